"""CUDA graphs: a step recorded once and replayed, which saves the launches that dominate small networks."""

import contextlib
import gc
import threading
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

# A recording fails if another thread seeds or allocates during it, so one at a time.
RECORDING = threading.Lock()


class Replay:
    """`step` itself on a CPU; on a GPU a recording of it, made at the first call.

    `step` must take its inputs from tensors that stay where they are, and leave its outputs in such. `state` are the
    tensors it changes: recording runs the step a few times, and puts them back. `generators` draw its random numbers.
    """

    def __init__(
        self,
        step: Callable[[], None],
        state: Sequence[Tensor],
        device: torch.device,
        generators: Sequence[torch.Generator],
    ) -> None:
        self.step, self.state, self.generators = step, state, generators
        self.records = device.type == "cuda"
        self.graph: torch.cuda.CUDAGraph | None = None

    def __call__(self) -> None:
        if not self.records:
            self.step()
            return
        if self.graph is None:
            with RECORDING:
                self.graph = self._record()
        self.graph.replay()

    def _record(self) -> torch.cuda.CUDAGraph:
        saved = [tensor.detach().clone() for tensor in self.state]
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):  # libraries choose their algorithms and workspaces now, not while recording
                self.step()
        torch.cuda.current_stream().wait_stream(stream)
        with torch.no_grad():
            for tensor, old in zip(self.state, saved, strict=True):
                tensor.copy_(old)
        graph = torch.cuda.CUDAGraph()
        for generator in self.generators:
            graph.register_generator_state(generator)
        with _nothing_collected(), torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            self.step()
        return graph


@contextlib.contextmanager
def _nothing_collected() -> Iterator[None]:
    """Suspend garbage collection: destroying an earlier graph would abort the recording."""
    collects = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()
