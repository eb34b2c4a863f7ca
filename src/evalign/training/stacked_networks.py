"""Weights, dropout masks and AdamW of several networks trained as one; on a CPU by a hand-written backward pass.

Autograd under `vmap` spends more time on bookkeeping than on arithmetic at the batch sizes of small tables, and
allocates every intermediate tensor again, which fragments the heap.
"""

import copy
import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.func import functional_call, stack_module_state, vmap

from evalign.tables.packed import EncodedTable
from evalign.training.batches import joined, rows_at_once
from evalign.training.loop import RECORDING


class SharedDropout(nn.Module):
    """Dropout with external rate and mask, which differ between stacked networks: x keep / (1 - rate).

    `keep` is 1 where a value stays and 0 where it is dropped.

    >>> layer = SharedDropout(0.5)
    >>> layer.keep = torch.tensor([1.0, 0.0])
    >>> layer(torch.tensor([3.0, 3.0]))
    tensor([6., 0.])
    """

    keep: Tensor
    rate: Tensor

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.register_buffer("rate", torch.tensor(rate))
        self.register_buffer("keep", torch.empty(0))

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return x
        return (x * self.keep).div_(1 - self.rate)


class BatchedMLP:
    """a_l = ReLU(a_(l-1) W_l^T + b_l) m_l for S networks, m_l a mask that holds 0 or 1 / (1 - rate); last layer linear.

    Only a_l is stored: where it is 0 the gradient is 0, whether dropped or negative. The backward pass overwrites a_l
    with the gradient by it. `names` are the linear layers, `dropouts` the dropout layers between them.
    """

    def __init__(
        self,
        names: Sequence[str],
        dropouts: Sequence[str],
        widths: Sequence[int],
        *,
        networks: int,
        rows: int,
        dtype: torch.dtype,
    ) -> None:
        self.names, self.dropouts, self.rows = names, dropouts, rows
        self.outputs = [torch.empty(networks, rows, width, dtype=dtype) for width in widths]
        self.scratch = torch.empty(networks * rows * max(widths), dtype=dtype)
        self.input: Tensor | None = None  # of the last forward pass, until its gradient is taken

    @classmethod
    def of(cls, network: nn.Module, networks: int, rows: int, prefix: str = "") -> "BatchedMLP | None":
        """Buffers for `networks` times `rows` rows if the network is linear, ReLU, dropout, ..., linear, else None.

        >>> layers = [nn.Linear(2, 3), nn.ReLU(), SharedDropout(0.5), nn.Linear(3, 1)]
        >>> BatchedMLP.of(nn.Sequential(*layers), 1, 5) is None, BatchedMLP.of(nn.Sequential(*layers[1:]), 1, 5) is None
        (False, True)
        """
        if type(network) is not nn.Sequential or len(network) < 4 or len(network) % 3 != 1:
            return None
        kinds = [type(layer) for layer in network]
        if kinds != [nn.Linear, nn.ReLU, SharedDropout] * (len(network) // 3) + [nn.Linear]:
            return None
        linear = [layer for layer in network if isinstance(layer, nn.Linear)]
        if any(layer.bias is None for layer in linear):
            return None
        return cls(
            [f"{prefix}{i}" for i in range(0, len(network), 3)], [f"{prefix}{i}" for i in range(2, len(network), 3)],
            [layer.out_features for layer in linear[:-1]], networks=networks, rows=rows, dtype=linear[0].weight.dtype,
        )  # fmt: skip

    @torch.no_grad()
    def forward(self, x: Tensor, parameters: dict[str, Tensor], masks: Sequence[Tensor] | None = None) -> Tensor:
        """Logits (s, n, C) of x (s, n, F), for s and n within the buffers; `masks` (s, n, width)."""
        self.input, below, (count, rows, _) = x, x, x.shape
        for i, name in enumerate(self.names[:-1]):
            weight, bias = parameters[f"{name}.weight"], parameters[f"{name}.bias"]
            out = self.outputs[i][:count, :rows]
            below = torch.baddbmm(bias[:, None], below, weight.transpose(1, 2), out=out).relu_()
            if masks is not None:
                below.mul_(masks[i])
        last = self.names[-1]
        return torch.baddbmm(parameters[f"{last}.bias"][:, None], below, parameters[f"{last}.weight"].transpose(1, 2))

    @torch.no_grad()
    def backward(
        self,
        slope: Tensor,
        parameters: dict[str, Tensor],
        scales: Sequence[Tensor],
        out: dict[str, Tensor],
        *,
        by_input: bool = False,
    ) -> Tensor | None:
        """Write d loss / d parameter into `out`, given d loss / d logits of the last forward pass.

        `scales` (s, 1, 1) are the 1 / (1 - rate) of each dropout layer. Returns d loss / d x if `by_input`. To be
        called once per forward pass.
        """
        if self.input is None:
            raise RuntimeError("a backward pass needs the outputs of a forward pass, which the last one overwrote")
        x, self.input = self.input, None
        count, rows, _ = x.shape
        for layer in reversed(range(len(self.names))):
            below = self.outputs[layer - 1][:count, :rows] if layer else x
            name = self.names[layer]
            torch.sum(slope, 1, out=out[f"{name}.bias"])
            out[f"{name}.weight"].copy_(torch.bmm(slope.transpose(1, 2), below))
            if layer:
                # Scaled before the product, where it is smaller. From here on `slope` is a buffer of this pass.
                room = self.scratch[: below.numel()].view(below.shape)
                torch.bmm(slope.mul_(scales[layer - 1]), parameters[f"{name}.weight"], out=room)
                slope = torch.ops.aten.threshold_backward.grad_input(room, below, 0, grad_input=below)
        return torch.bmm(slope, parameters[f"{self.names[0]}.weight"]) if by_input else None


def with_shared_dropout(network: nn.Module, rate: float | None) -> nn.Module:
    for name, module in list(network.named_modules()):
        if type(module) is nn.Dropout:
            network.set_submodule(name, SharedDropout(module.p if rate is None else rate))
    return network


def dropout_widths(network: nn.Module, x: Tensor) -> dict[str, tuple[int, ...]]:
    """The shape of one sample at every dropout layer, found by a forward pass of two rows."""
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

    One matrix, since an optimiser that loops over parameters launches a dozen small kernels for each.
    """

    def __init__(self, stacked: dict[str, Tensor]) -> None:
        count = len(next(iter(stacked.values())))
        self.flat = torch.cat([p.detach().reshape(count, -1) for p in stacked.values()], 1)
        self.shapes = {name: p.shape for name, p in stacked.items()}
        self.views = self.views_of(self.flat)

    def views_of(self, flat: Tensor) -> dict[str, Tensor]:
        """A matrix (s, P) as the parameters that it holds, each a view of it."""
        parts = torch.split(flat, [shape[1:].numel() for shape in self.shapes.values()], 1)
        named = zip(self.shapes.items(), parts, strict=True)
        return {name: part.view(len(flat), *shape[1:]) for (name, shape), part in named}

    def leaves(self, own: slice, prefix: str = "") -> dict[str, Tensor]:
        """Parameters with this name prefix of some networks, as leaves for a gradient."""
        return {
            name: view[own].detach().requires_grad_() for name, view in self.views.items() if name.startswith(prefix)
        }


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
    """Index vectors padded to one matrix, and a mask that is 0 at the padding."""
    longest = max(len(i) for i in indices)
    dtype = indices[0].dtype if device.type == "cpu" else torch.long  # a GPU would convert 32-bit ones every time
    matrix = torch.zeros(len(indices), longest, dtype=dtype, device=device)
    mask = torch.zeros(len(indices), longest, device=device)
    for row, i in enumerate(indices):
        matrix[row, : len(i)] = i.to(device)
        mask[row, : len(i)] = 1
    return matrix, mask


GROUP_SIZE = 1 << 22  # maximum size of a tensor, such as hidden values, in a CPU step of several networks


class StackedNetworks:
    """S networks on the rows of one table: their weights, those that are evaluated, and the best of each so far.

    `make_network` is called once for each, after seeding with its seed; `dropouts` replace the network's rate where
    they are not None, and `batch_lengths` are how many rows of a training batch are a network's own, for which its
    generator draws the dropout masks.
    """

    def __init__(
        self,
        make_network: Callable[[], nn.Module],
        x: EncodedTable,
        *,
        seeds: Sequence[int],
        dropouts: Sequence[float | None],
        batch_lengths: Sequence[int],
    ) -> None:
        self.x, self.device, self.count, self.batch_lengths = x, x.device, len(seeds), batch_lengths
        networks = []
        for seed, dropout in zip(seeds, dropouts, strict=True):
            with RECORDING, torch.random.fork_rng([]):
                torch.default_generator.manual_seed(seed)  # not the GPU's generator, which a recording may hold
                network = with_shared_dropout(make_network(), dropout)
            networks.append(network.to(self.device))
        params, buffers = stack_module_state(networks)
        self.parameters = FlatParameters(params)
        self.widths = dropout_widths(networks[0], x[:2])
        masks = {f"{name}.keep" for name in self.widths}  # drawn for every batch
        self.buffers: dict[str, Tensor] = {name: b.detach() for name, b in buffers.items() if name not in masks}
        self.skeleton = copy.deepcopy(networks[0]).to("meta")
        self.best = {name: kept.clone() for name, kept in self._kept().items()}
        rows, drawn = max(batch_lengths), sum(map(math.prod, self.widths.values()))
        # A GPU trains all networks in one step. A CPU gains from that only while launching operations takes longer
        # than their arithmetic, and pays with memory.
        self.at_once = self.count
        self.mlp: BatchedMLP | None = None
        self.front: nn.Module | None = None
        if self.device.type == "cpu":
            self.at_once = max(1, min(self.count, GROUP_SIZE // max(1, rows * drawn)))
            whole = networks[0]
            # A module before a perceptron, such as an embedding, is left to autograd.
            if type(whole) is nn.Sequential and len(whole) == 2:
                self.mlp = BatchedMLP.of(whole[1], self.at_once, rows, prefix="1.")
                self.front = self.skeleton.get_submodule("0") if self.mlp is not None else None
            else:
                self.mlp = BatchedMLP.of(whole, self.at_once, rows)
            if self.mlp is None:
                self.at_once = 1
        self.open_groups([True] * self.count)
        self.all_groups = self.groups
        self.gradient = torch.empty_like(self.parameters.flat[: self.at_once])
        # One buffer for all dropout masks, so that the largest tensor of a step is allocated once.
        self.drawn = torch.empty((self.at_once, rows, drawn), dtype=x.dtype, device=self.device)
        shared = self.device.type == "cuda" and self.count > 1
        self.generators = [torch.Generator(self.device).manual_seed(seed) for seed in seeds[: 1 if shared else None]]

    def open_groups(self, still_training: Sequence[bool]) -> None:
        """Group the networks that are trained in one step: all on a GPU, up to `at_once` neighbours on a CPU."""
        if self.device.type != "cpu":
            self.groups = [slice(None)]
            return
        self.groups = []
        for s in (s for s, is_open in enumerate(still_training) if is_open):
            last = self.groups[-1] if self.groups else slice(0, -1)
            if last.stop == s and s - last.start < self.at_once:
                self.groups[-1] = slice(last.start, s + 1)
            else:
                self.groups.append(slice(s, s + 1))

    def training_logits(self, own: slice, index: Tensor) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
        """Logits of a training batch, and a function from d loss / d logits to the gradient of the flat parameters.

        The function may be called once, and before the next batch.
        """
        masks = self._masks(own, index.shape)
        if self.mlp is not None:
            return self._mlp_logits(self.mlp, own, index, masks)
        leaves = self.parameters.leaves(own)
        self.skeleton.train()
        logits = self._vmapped(self.skeleton, own, index, leaves, masks)

        def gradient(slope: Tensor) -> Tensor:
            parts = torch.autograd.grad(logits, list(leaves.values()), slope)
            return torch.cat([part.flatten(1) if part.dim() > 1 else part[:, None] for part in parts], 1)

        return logits.detach(), gradient

    def _mlp_logits(
        self, mlp: BatchedMLP, own: slice, index: Tensor, masks: dict[str, Tensor]
    ) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
        parameters = {name: view[own] for name, view in self.parameters.views.items()}
        scales = [1 / (1 - self.buffers[f"{name}.rate"][own, None, None]) for name in mlp.dropouts]
        chosen = [masks[f"{name}.keep"].mul_(scale) for name, scale in zip(mlp.dropouts, scales, strict=True)]

        front = self.parameters.leaves(own, "0.") if self.front is not None else {}
        features = self._features(own, index, front)

        def gradient(slope: Tensor) -> Tensor:
            found = self.gradient[: len(slope)]
            views = self.parameters.views_of(found)
            towards = mlp.backward(slope, parameters, scales, views, by_input=bool(front))
            if towards is not None:
                for name, part in zip(front, torch.autograd.grad(features, list(front.values()), towards), strict=True):
                    views[name].copy_(part)
            return found

        return mlp.forward(features.detach(), parameters, chosen), gradient

    def _features(self, own: slice, index: Tensor, parameters: dict[str, Tensor]) -> Tensor:
        """The input of the perceptrons: rows of the table, passed through the preceding module if there is one."""
        if self.front is None:
            return self.x[index]
        return self._vmapped(self.front, own, index, parameters, {}, "0.")

    @torch.no_grad()
    def logits(self, own: slice, index: Tensor) -> Tensor:
        """Logits in evaluation mode; on a CPU in pieces."""
        views = {name: view[own] for name, view in self.parameters.views.items()}
        mlp = self.mlp
        if mlp is not None:
            front = {name: view for name, view in views.items() if name.startswith("0.")}
            pieces = torch.split(index, mlp.rows, 1)
            found = (mlp.forward(self._features(own, places, front), views) for places in pieces)
            return joined(found, index.shape[1], dim=1)
        self.skeleton.eval()
        keep = {f"{name}.keep": self.drawn.new_empty(len(index), 0) for name in self.widths}
        if self.device.type != "cpu":
            return self._vmapped(self.skeleton, own, index, views, keep)
        pieces = torch.split(index, rows_at_once(self.device), 1)
        return joined(
            (self._vmapped(self.skeleton, own, places, views, keep) for places in pieces), index.shape[1], dim=1
        )

    def _vmapped(
        self,
        module: nn.Module,
        own: slice,
        index: Tensor,
        parameters: dict[str, Tensor],
        keep: dict[str, Tensor],
        prefix: str = "",
    ) -> Tensor:
        """Outputs of a module whose parameters and buffers have this prefix in the network."""
        buffers = {name: buffer[own] for name, buffer in self.buffers.items() if name.startswith(prefix)} | keep
        state = {name.removeprefix(prefix): value for name, value in {**parameters, **buffers}.items()}

        def one(state, x):  # type: ignore[no-untyped-def]
            return functional_call(module, state, (x,))

        return vmap(one, randomness="different")(state, self.x[index])  # type: ignore[no-any-return]

    def _masks(self, own: slice, shape: torch.Size) -> dict[str, Tensor]:
        """Dropout masks of a batch; on a CPU drawn by each network's generator, for its rows only."""
        drawn = self.drawn[: shape[0]]
        if len(self.generators) < self.count:
            drawn.uniform_(generator=self.generators[0])
        else:
            for rows, count, generator in zip(drawn, self.batch_lengths[own], self.generators[own], strict=True):
                rows[:count].uniform_(generator=generator)
        layers = torch.split(drawn, [math.prod(one) for one in self.widths.values()], 2)
        return {
            f"{name}.keep": layer.ge_(self.buffers[f"{name}.rate"][own, None, None]).view(*shape, *one)
            for (name, one), layer in zip(self.widths.items(), layers, strict=True)
        }

    @torch.no_grad()
    def keep(self, better: list[int]) -> None:
        """Store the weights of these networks as their best; on a GPU in one kernel per tensor."""
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
        """Set the weights of network s to its best ones."""
        for name, current in self._kept().items():
            current[s] = self.best[name][s]

    def _kept(self) -> dict[str, Tensor]:
        return {"": self.parameters.flat, **self.buffers}

    def best_of(self, s: int) -> dict[str, Tensor]:
        """The best weights of network s as a state dict of what `make_network` makes."""
        kept = {**self.parameters.views_of(self.best[""]), **{name: best for name, best in self.best.items() if name}}
        own = {name: best[s].detach().clone() for name, best in kept.items()}
        return {name: value for name, value in own.items() if name.rsplit(".", 1)[0] not in self.widths}
