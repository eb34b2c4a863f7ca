import os

import hypothesis
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when a kernel is defined, so set before any import

os.environ.setdefault("EVALIGN_COMPILE", "wait")  # the same form of a loss in every run

# The same examples on every machine, without a time limit; `--hypothesis-profile thorough` tries more.
for name, examples in (("evalign", 50), ("thorough", 500)):
    hypothesis.settings.register_profile(name, derandomize=True, deadline=None, max_examples=examples, database=None)
hypothesis.settings.load_profile("evalign")

torch.set_num_threads(1)
