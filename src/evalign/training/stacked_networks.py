"""What a stack of networks needs beside the networks: dropout from outside, one AdamW for all, padded indices."""

import copy
import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.func import functional_call, stack_module_state, vmap

from evalign.tables.packed import Table
from evalign.training.cuda_graph import RECORDING
from evalign.training.evaluation import joined, rows_at_once
from evalign.training.plain_layers import PlainLayers, SharedDropout


def with_shared_dropout(network: nn.Module, rate: float | None) -> nn.Module:
    for name, module in list(network.named_modules()):
        if type(module) is nn.Dropout:
            network.set_submodule(name, SharedDropout(module.p if rate is None else rate))
    return network


def dropout_widths(network: nn.Module, x: Tensor) -> dict[str, tuple[int, ...]]:
    """The shape of one sample at every dropout layer, found by sending two rows through."""
    widths: dict[str, tuple[int, ...]] = {}
    hooks = []
    for name, module in network.named_modules():
        if isinstance(module, SharedDropout):

            def note(_module: nn.Module, args: tuple[Tensor, ...], name: str = name) -> None:
                widths[name] = tuple(args[0].shape[1:])

            hooks.append(module.register_forward_pre_hook(note))
    network.eval()
    with torch.no_grad():
        network(x)
    for hook in hooks:
        hook.remove()
    return widths


class FlatParameters:
    """The parameters of S networks in one matrix (S, P), each parameter a view of it.

    One matrix, because an optimiser that walks over the parameters launches a dozen small kernels for each.
    """

    def __init__(self, stacked: dict[str, Tensor]) -> None:
        count = len(next(iter(stacked.values())))
        self.flat = torch.cat([p.detach().reshape(count, -1) for p in stacked.values()], 1)
        self.shapes = {name: p.shape for name, p in stacked.items()}
        self.views = self.views_of(self.flat)

    def views_of(self, flat: Tensor) -> dict[str, Tensor]:
        """A matrix (S, P) as the parameters that it holds, each a view of it."""
        parts = torch.split(flat, [shape[1:].numel() for shape in self.shapes.values()], 1)
        return {name: part.view(shape) for (name, shape), part in zip(self.shapes.items(), parts, strict=True)}

    def leaves(self, own: slice) -> dict[str, Tensor]:
        """The parameters of some of the networks, to take a gradient by."""
        return {name: view[own].detach().requires_grad_() for name, view in self.views.items()}

    @staticmethod
    def gradient(loss: Tensor, leaves: dict[str, Tensor]) -> Tensor:
        """d loss / d flat of these networks, a row for each."""
        parts = torch.autograd.grad(loss, list(leaves.values()))
        return torch.cat([part.flatten(1) if part.dim() > 1 else part[:, None] for part in parts], 1)


class StackedAdamW:
    """AdamW with one learning rate, weight decay and step count per network (Loshchilov and Hutter 2019)."""

    def __init__(self, parameters: FlatParameters) -> None:
        self.flat = parameters.flat
        self.first, self.second = torch.zeros_like(self.flat), torch.zeros_like(self.flat)
        self.steps = torch.zeros(len(self.flat), 1, dtype=torch.float64, device=self.flat.device)

    @torch.no_grad()
    def step(self, own: slice, gradient: Tensor, learning_rate: Tensor, decay: Tensor) -> None:
        """One update of these networks; `gradient` is (s, P), `learning_rate` and `decay` are (s, 1)."""
        flat, first, second, steps = (kept[own] for kept in self.state)
        steps += 1
        size = (learning_rate / (1 - 0.9**steps)).to(gradient.dtype)
        scale = (1 - 0.999**steps).rsqrt().to(gradient.dtype)
        first.lerp_(gradient, 0.1)
        second.mul_(0.999).addcmul_(gradient, gradient, value=0.001)
        flat.mul_(1 - learning_rate * decay)
        flat.sub_((size * first).div_(second.sqrt().mul_(scale).add_(1e-8)))

    def restart(self, s: int) -> None:
        self.steps[s] = 0
        self.first[s] = 0
        self.second[s] = 0

    @property
    def state(self) -> list[Tensor]:
        return [self.flat, self.first, self.second, self.steps]


def padded(indices: Sequence[Tensor], device: torch.device) -> tuple[Tensor, Tensor]:
    """Index vectors as one matrix, and a mask that is 0 where a shorter one was filled up."""
    longest = max(len(i) for i in indices)
    dtype = indices[0].dtype if device.type == "cpu" else torch.long  # a GPU would turn short ones into long every time
    matrix = torch.zeros(len(indices), longest, dtype=dtype, device=device)
    mask = torch.zeros(len(indices), longest, device=device)
    for row, i in enumerate(indices):
        matrix[row, : len(i)] = i.to(device)
        mask[row, : len(i)] = 1
    return matrix, mask


DRAWN_AT_ONCE = 256  # rows: a random number takes four bytes, whether a value is kept one


class StackedNetworks:
    """S networks on the rows of one table: their weights, those that are judged, and the best of each so far.

    `make_network` is called once for each, after seeding with its seed; `dropouts` replace the network's rate where
    they are not None, and `batch_lengths` are how many rows of a training batch are a network's own, for which its
    generator draws what dropout keeps. With `averages` what is judged is an average of the weights, kept by the caller.
    """

    def __init__(
        self,
        make_network: Callable[[], nn.Module],
        x: Table,
        *,
        seeds: Sequence[int],
        dropouts: Sequence[float | None],
        batch_lengths: Sequence[int],
        averages: bool,
    ) -> None:
        self.x, self.device, self.count, self.batch_lengths = x, x.device, len(seeds), batch_lengths
        # A GPU has time left for all trials at once. A CPU has none, and one after the other takes a share of the room.
        self.groups = [slice(None)] if self.device.type != "cpu" else [slice(s, s + 1) for s in range(self.count)]
        networks = []
        for seed, dropout in zip(seeds, dropouts, strict=True):
            with RECORDING, torch.random.fork_rng([]):
                torch.default_generator.manual_seed(seed)  # not the GPU's, which a recording may hold
                network = with_shared_dropout(make_network(), dropout)
            networks.append(network.to(self.device))
        params, buffers = stack_module_state(networks)
        self.parameters = FlatParameters(params)
        self.judged = self.parameters.flat.clone() if averages else self.parameters.flat
        self.judged_views = self.parameters.views_of(self.judged)
        self.widths = dropout_widths(networks[0], x[:2])
        anew = {f"{name}.keep" for name in self.widths}  # anew for every batch
        self.buffers: dict[str, Tensor] = {name: b.detach() for name, b in buffers.items() if name not in anew}
        self.skeleton = copy.deepcopy(networks[0]).to("meta")
        self.best = {name: kept.clone() for name, kept in self._kept().items()}
        shared = self.device.type == "cuda" and self.count > 1
        self.plain = PlainLayers.of(networks[0], max(batch_lengths)) if self.device.type == "cpu" else None
        drawn = sum(map(math.prod, self.widths.values()))
        # One place for all that dropout draws: the largest tensor of a step need not find new room every time.
        room = (self.count // len(self.groups), DRAWN_AT_ONCE if self.plain else max(batch_lengths), drawn)
        self.drawn = torch.empty(room, dtype=x.dtype, device=self.device)
        self.keeps = torch.ones(1, max(batch_lengths) if self.plain else 0, drawn, dtype=torch.bool)
        self.noises = [torch.Generator(self.device).manual_seed(seed) for seed in seeds[: 1 if shared else None]]

    def logits(self, own: slice, index: Tensor, training: dict[str, Tensor] | None) -> Tensor:
        """By the parameters in `training`, or by those that are judged, in pieces then on a CPU."""
        if self.plain is not None:
            return self._plain_logits(self.plain, own, index[0], training)[None]
        self.skeleton.train(training is not None)
        keep = self._nothing_drawn if training is None else self._kept_values(own, index.shape)
        buffers = {name: buffer[own] for name, buffer in self.buffers.items()} | keep
        params = {name: view[own] for name, view in self.judged_views.items()} if training is None else training

        def one(params, buffers, x):  # type: ignore[no-untyped-def]
            return functional_call(self.skeleton, (params, buffers), (x,))

        def of(places: Tensor) -> Tensor:
            return vmap(one, randomness="different")(params, buffers, self.x[places])  # type: ignore[no-any-return]

        if training is not None or self.device.type != "cpu":
            return of(index)
        return joined(map(of, torch.split(index, rows_at_once(self.device), 1)), index.shape[1], dim=1)

    def _plain_logits(
        self, plain: PlainLayers, own: slice, index: Tensor, training: dict[str, Tensor] | None
    ) -> Tensor:
        """Of one network, as they are trained on a CPU."""
        if training is None:
            judged = {name: view[own].squeeze(0) for name, view in self.judged_views.items()}
            pieces = torch.split(index, plain.rows)
            return joined((plain.judged(self.x[places], judged) for places in pieces), len(index))
        kept = self._kept_values(own, index[None].shape)
        scales = [1 / (1 - float(self.buffers[f"{name}.rate"][own])) for name in plain.dropouts]
        parameters = {name: leaf.squeeze(0) for name, leaf in training.items()}
        return plain.logits(self.x[index], parameters, [kept[f"{name}.keep"][0] for name in plain.dropouts], scales)

    def _kept_values(self, own: slice, shape: torch.Size) -> dict[str, Tensor]:
        """What every dropout layer keeps of a batch; on a CPU by each trial's own generator, for its own rows only."""
        rates = {name: self.buffers[f"{name}.rate"][own, None, None] for name in self.widths}
        places = [math.prod(one) for one in self.widths.values()]
        if self.plain is not None:
            rate = torch.cat([rate.expand(1, 1, width) for rate, width in zip(rates.values(), places, strict=True)], 2)
            (count,), (generator,) = self.batch_lengths[own], self.noises[own]
            for rows in torch.split(self.keeps[:, :count], DRAWN_AT_ONCE, 1):
                torch.ge(self.drawn[:, : rows.shape[1]].uniform_(generator=generator), rate, out=rows)
            layers = torch.split(self.keeps, places, 2)
        else:
            if len(self.noises) < self.count:
                self.drawn.uniform_(generator=self.noises[0])
            else:
                for rows, count, generator in zip(self.drawn, self.batch_lengths[own], self.noises[own], strict=True):
                    rows[:count].uniform_(generator=generator)
            drawn = torch.split(self.drawn, places, 2)
            layers = tuple(layer.ge_(rate) for layer, rate in zip(drawn, rates.values(), strict=True))
        return {
            f"{name}.keep": layer.view(*shape, *one)
            for (name, one), layer in zip(self.widths.items(), layers, strict=True)
        }

    @property
    def _nothing_drawn(self) -> dict[str, Tensor]:
        width = 1 if len(self.groups) > 1 else self.count
        return {f"{name}.keep": self.drawn.new_empty(width, 0) for name in self.widths}

    @torch.no_grad()
    def keep(self, better: list[int]) -> None:
        """The weights of the networks that are better than ever; on a GPU all at once: a copy of each is a kernel."""
        if self.device.type == "cpu":
            for name, current in self._kept().items():
                for s in better:
                    self.best[name][s] = current[s]
        elif better:
            chosen = torch.zeros(self.count, dtype=torch.bool)
            chosen[better] = True
            chosen = chosen.to(self.device)
            for name, current in self._kept().items():
                shape = (-1, *([1] * (current.dim() - 1)))
                self.best[name].copy_(torch.where(chosen.view(shape), current, self.best[name]))

    @torch.no_grad()
    def restore(self, s: int) -> None:
        """Network s goes on from its best weights."""
        for name, current in {**self._kept(), "": self.parameters.flat}.items():
            current[s] = self.best[name][s]

    def _kept(self) -> dict[str, Tensor]:
        return {"": self.judged, **self.buffers}

    def best_of(self, s: int) -> dict[str, Tensor]:
        """The best weights of network s as a state dict of what `make_network` makes."""
        kept = {**self.parameters.views_of(self.best[""]), **{name: best for name, best in self.best.items() if name}}
        own = {name: best[s].detach().clone() for name, best in kept.items()}
        return {name: value for name, value in own.items() if name.rsplit(".", 1)[0] not in self.widths}
