"""Exact accumulation: micro-batches whose gradients add up to that of the whole batch.

The metric of a batch is not the mean of its parts' metrics, so dividing by the number of parts, as for cross-entropy,
trains on a different loss. Two passes give the exact gradient: the first sums the counts S without gradients and
computes dL/dS; in the second the loss of part i is <dL/dS, S_i>.
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from evalign._batch import Sums
from evalign.checks import represents
from evalign.losses import MetricLoss

Backward = Callable[[Tensor], Any]


class Accumulation:
    """Two-pass accumulation for custom loops: `add` every part, then call `loss` for every part.

    The values of `loss` add up to the loss of the whole batch, and so do their gradients. The sum over ranks and the
    update of a memory happen once, between the passes.

    >>> loss, network = MetricLoss("f1"), torch.nn.Linear(4, 3)
    >>> x, y = torch.randn(8, 4), torch.tensor([0, 1, 2, 0, 1, 2, 0, 1])
    >>> parts = Accumulation(loss)
    >>> with torch.no_grad():
    ...     for i in (slice(0, 4), slice(4, 8)):
    ...         parts.add(network(x[i]), y[i])
    >>> for i in (slice(0, 4), slice(4, 8)):
    ...     parts.loss(network(x[i]), y[i]).backward()
    >>> exact = torch.autograd.grad(loss(network(x), y), network.weight)[0]
    >>> torch.allclose(network.weight.grad, exact, atol=1e-6)
    True
    """

    def __init__(self, loss: MetricLoss) -> None:
        self.metric_loss = loss
        self.parts = 0
        self._total: Sums | None = None
        self._whole: tuple[Tensor, Tensor] | None = None

    def add(self, input: Tensor, target: Tensor, sample_weight: Tensor | None = None) -> None:
        """First pass: add the counts of a part."""
        if self._whole is not None:
            raise RuntimeError("a part was added after the first loss; use a new Accumulation for every optimiser step")
        with torch.enable_grad():  # without gradients the loss would treat this as validation
            part = self.metric_loss.sums(input.detach(), target, sample_weight).alone()
        self._total = part if self._total is None else self._total + part
        self.parts += 1

    def loss(self, input: Tensor, target: Tensor, sample_weight: Tensor | None = None) -> Tensor:
        """Second pass: this part's share of the loss, with its part of the gradient."""
        value, slope = self.whole()
        part = self.metric_loss.sums(input, target, sample_weight)
        return represents(value / self.parts, (slope * part.vector).sum())

    def whole(self) -> tuple[Tensor, Tensor]:
        """The loss of all parts together, and its gradient with respect to their sums."""
        if self._whole is None:
            if self._total is None:
                raise RuntimeError("no part was added; go through all micro-batches with add() before loss()")
            with torch.enable_grad():
                sums = self._total.vector.detach().requires_grad_()
                value = self.metric_loss.of_sums(self._total.with_vector(sums))
                (slope,) = torch.autograd.grad(value, sums)
            self._whole = value.detach(), slope
        return self._whole


def accumulate(
    loss: MetricLoss,
    network: Callable[[Any], Tensor],
    batches: Sequence[tuple[Any, ...]],
    *,
    backward: Backward = Tensor.backward,
) -> Tensor:
    """Add the exact gradient of all `batches` together to the network's parameters; return the loss of the whole.

    Each of `batches` is (x, target) or (x, target, sample_weight), `network(x)` gives logits. `backward` is called with
    every part's loss; pass `scaler.scale(...).backward()` as a function, or Lightning's `manual_backward`. Dropout is
    the same in both passes. Under DDP and FSDP2 gradients are reduced once, with the last part.

    >>> loss, network = MetricLoss("f1", anchor=1.0), torch.nn.Linear(4, 3)
    >>> x, y = torch.randn(8, 4), torch.tensor([0, 1, 2, 0, 1, 2, 0, 1])
    >>> value = accumulate(loss, network, [(x[:4], y[:4]), (x[4:], y[4:])])
    >>> torch.allclose(value, loss(network(x), y), atol=1e-6)
    True
    """
    parts, states = Accumulation(loss), []
    for x, *labels in batches:
        states.append(RandomState(x))
        with torch.no_grad():
            parts.add(network(x), *labels)
    for i, (x, *labels) in enumerate(batches):
        with states[i].again(), without_gradient_sync(network, i + 1 < len(batches)):
            backward(parts.loss(network(x), *labels))
    return parts.whole()[0]


class RandomState:
    """Random state before a forward pass, on the CPU and on the devices of its inputs."""

    def __init__(self, inputs: Any) -> None:
        self.devices = sorted({x.get_device() for x in _tensors(inputs) if x.is_cuda})
        self.cpu, self.cuda = torch.get_rng_state(), [torch.cuda.get_rng_state(device) for device in self.devices]

    @contextlib.contextmanager
    def again(self) -> Iterator[None]:
        """Replay the same random numbers, then restore the current state."""
        with torch.random.fork_rng(self.devices):
            torch.set_rng_state(self.cpu)
            for device, state in zip(self.devices, self.cuda, strict=True):
                torch.cuda.set_rng_state(state, device)
            yield


def _tensors(inputs: Any) -> Iterator[Tensor]:
    if isinstance(inputs, Tensor):
        yield inputs
    elif isinstance(inputs, dict):
        yield from _tensors(list(inputs.values()))
    elif isinstance(inputs, Iterable) and not isinstance(inputs, str | bytes):
        for part in inputs:
            yield from _tensors(part)


@contextlib.contextmanager
def without_gradient_sync(network: Any, wanted: bool = True) -> Iterator[None]:
    """Keep DDP and FSDP2 from reducing incomplete gradients."""
    if wanted and hasattr(network, "no_sync"):  # DDP
        with network.no_sync():
            yield
    elif wanted and hasattr(network, "set_requires_gradient_sync"):  # FSDP2
        network.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            network.set_requires_gradient_sync(True)
    else:
        yield
