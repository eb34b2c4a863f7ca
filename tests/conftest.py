import hypothesis
import torch

# The same examples on every machine, and no time limit on a busy one.
hypothesis.settings.register_profile("evalign", derandomize=True, deadline=None, max_examples=200, database=None)
hypothesis.settings.load_profile("evalign")

torch.set_num_threads(1)
