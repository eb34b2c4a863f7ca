"""One update of every network of a stack, and one look at the rows that judge it.

Everything that these read or write stays where it is, so that a step that was recorded on a GPU finds it again.
"""

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor
from torch.func import vmap

from evalign.confusion import Task
from evalign.objective import cross_entropy
from evalign.training.average import weight_of_newest
from evalign.training.judging import Score
from evalign.training.outputs import Term, Watch, flat, probabilities_of
from evalign.training.rows import Rows
from evalign.training.stacked_networks import StackedNetworks
from evalign.training.stacking import StackedAdamW, padded


class StackedSteps:
    """The loss of each network on its own rows: metric * term + anchor * cross-entropy, at its own temperature.

    `index` and `mask` (S, width) are the batch of the next step, `rate`, `decay` and `share` (of the updates to average
    over) what it does with the gradient. A validation leaves in `values` what each network's epoch was like: the mean
    training loss of `updates` steps, the loss, cross-entropy and hard score of its validation rows, then what is told
    of the rows that are watched.
    """

    def __init__(
        self,
        networks: StackedNetworks,
        rows: Rows,
        valid: Sequence[Tensor],
        *,
        term: Term,
        score: Score,
        task: Task,
        width: int,
        updates: int,
        averages: bool,
        watch: Watch | None = None,
        watched: Sequence[Tensor] | None = None,
    ) -> None:
        self.networks, self.rows, self.term, self.score, self.task = networks, rows, term, score, task
        self.updates, self.averages, self.watch = updates, averages, watch
        device, count = networks.device, networks.count
        self.adam = StackedAdamW(networks.parameters)
        self.valid = padded(valid, device)
        self.watched = None if watched is None else padded(watched, device)
        zeros = torch.zeros(count, dtype=rows.x.dtype, device=device)
        self.temperature, self.metric, self.anchor = zeros.clone(), zeros.clone(), zeros.clone()
        self.rate, self.decay, self.share = zeros[:, None].clone(), zeros[:, None].clone(), zeros[:, None].clone()
        self.index = torch.zeros(count, width, dtype=torch.long, device=device)
        self.mask = zeros.new_ones(count, width)
        self.loss_sum = zeros.clone()
        self.values = zeros.new_zeros(count, 4 if self.watched is None else 4 + self._look().shape[1])
        self.uses_metric = False

    @property
    def changed(self) -> list[Tensor]:
        """The tensors that a step or a validation writes to."""
        networks = self.networks
        return [*self.adam.state, networks.judged, *networks.buffers.values(), self.loss_sum, self.values]

    def step(self) -> None:
        for own in self.networks.groups:
            self._step(own)

    @torch.no_grad()
    def validate(self) -> None:
        index, mask = self.valid
        found = [self._losses(own, index[own], mask[own], None) for own in self.networks.groups]
        columns = [self.loss_sum / self.updates, *(torch.cat(parts) for parts in zip(*found, strict=True))]
        self.values[:, :4] = torch.stack(columns, 1)
        if self.watched is not None:
            self.values[:, 4:] = self._look()

    def _step(self, own: slice) -> None:
        parameters, judged = self.networks.parameters, self.networks.judged
        leaves = parameters.leaves(own)
        loss = self._losses(own, self.index[own], self.mask[own], leaves)[0]
        self.adam.step(own, parameters.gradient(loss.sum(), leaves), self.rate[own], self.decay[own])
        with torch.no_grad():
            self.loss_sum[own].add_(loss)
            if self.averages:
                newest = weight_of_newest(self.adam.steps[own], self.share[own])
                judged[own].lerp_(parameters.flat[own], newest.to(judged.dtype))

    def _losses(
        self, own: slice, index: Tensor, mask: Tensor, training: dict[str, Tensor] | None
    ) -> tuple[Tensor, ...]:
        """Loss, cross-entropy and, without parameters in `training`, hard score of these networks on their own rows."""
        y, weight = self.rows.y[index], self.rows.weight[index] * mask
        logits = self.networks.logits(own, index, training)
        of_one = partial(self._losses_of_one, judged=training is None)
        return vmap(of_one)(logits, y, weight, self.temperature[own], self.metric[own], self.anchor[own])

    def _losses_of_one(
        self,
        logits: Tensor,
        y: Tensor,
        weight: Tensor,
        temperature: Tensor,
        metric: Tensor,
        anchor: Tensor,
        *,
        judged: bool,
    ) -> tuple[Tensor, ...]:
        logits, y, weight = flat(logits, y, weight, self.task)
        if self.task == "multiclass" and logits.dim() == 3:  # an ensemble in training
            members = vmap(partial(self._losses_of_one, judged=judged), in_dims=(0, None, None, None, None, None))
            return tuple(v.mean() for v in members(logits, y, weight, temperature, metric, anchor))
        entropy = cross_entropy(logits, y, weight, self.task)
        loss = anchor * entropy
        if self.uses_metric:
            loss = loss + metric * self.term(logits, y, weight, temperature)
        if not judged:
            return loss, entropy
        return loss, entropy, self.score(probabilities_of(logits, self.task), y, weight).to(loss.dtype)

    @torch.no_grad()
    def _look(self) -> Tensor:
        """What `watch` says of the rows that are watched, (S, k)."""
        assert self.watched is not None
        watch, (index, mask) = self.watch, self.watched
        assert watch is not None

        def one(logits: Tensor, y: Tensor, weight: Tensor) -> Tensor:
            return watch(*flat(logits, y, weight, self.task))

        def of(own: slice) -> Tensor:
            places = index[own]
            logits = self.networks.logits(own, places, None)
            return vmap(one)(logits, self.rows.y[places], self.rows.weight[places] * mask[own])

        return torch.cat([of(own) for own in self.networks.groups])
