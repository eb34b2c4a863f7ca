"""One step and one validation, for one process with all rows and for several with a part each.

Counts are summed over ranks, and a metric is applied once, to the sum.
"""

import torch
from torch import Tensor, nn

from evalign.confusion import Confusion
from evalign.distributed import Sync, all_summed, resolve
from evalign.numerics import safe_divide
from evalign.objective import Objective, cross_entropy
from evalign.offsets import of_matrix
from evalign.streaming.ranks import rank_count
from evalign.sums import standing_for
from evalign.training.judging import predict_logits
from evalign.training.outputs import mean_over_members, with_offset
from evalign.training.recipes import Stage
from evalign.training.rows import Rows
from evalign.training.step import batch_loss


def step_loss(
    network: nn.Module, batch: Rows, stage: Stage, objective: Objective, temperature: float, offset: Tensor | None
) -> Tensor:
    """The loss of all ranks' batches; averaged over the ranks, its gradients are those of one process with all rows."""
    sync = resolve("auto", training=True)
    if sync is None:
        return batch_loss(network, batch, stage, objective, temperature, offset=offset)
    z = with_offset(network(batch.x), offset, "multiclass")

    def loss_of(z: Tensor) -> Tensor:
        if stage.metric:
            return objective.of_sums(sync(objective.sums(z, batch.y, batch.weight, temperature)))
        return stage.anchor * _mean_entropy(z, batch, sync)

    return mean_over_members(loss_of, z, "multiclass")


def _mean_entropy(z: Tensor, batch: Rows, sync: Sync) -> Tensor:
    """Cross-entropy of all ranks' rows; batches of ranks may differ by a row, so that means must not be averaged."""
    mass = batch.weight.sum()
    own = torch.stack([cross_entropy(z, batch.y, batch.weight, "multiclass") * mass, mass])
    total = standing_for(all_summed(own.detach(), sync.group), own, sync.ranks)
    return safe_divide(total[0], total[1])


@torch.no_grad()
def validate(
    network: nn.Module, rows: Rows, stage: Stage, objective: Objective, temperature: float, offset: Tensor | None
) -> tuple[dict[str, float], Tensor]:
    """Loss at this temperature, cross-entropy and hard score of all ranks' rows, and their confusion matrix."""
    logits = predict_logits(network, rows.x)
    soft = objective.sums(with_offset(logits, offset, "multiclass"), rows.y, rows.weight, temperature)
    entropy = cross_entropy(logits, rows.y, rows.weight, "multiclass") * soft.weight
    matrix = Confusion.hard(logits.argmax(1), rows.y, logits.shape[1], sample_weight=rows.weight).matrix
    own = torch.cat([soft.vector.double(), entropy.double().reshape(1), matrix.double().reshape(-1)])
    total = all_summed(own) if rank_count() > 1 else own
    size = soft.vector.numel()
    summed = soft.with_vector(total[:size])
    matrix = total[size + 1 :].reshape(matrix.shape).cpu()
    entropy = safe_divide(total[size], summed.weight)
    loss = objective.of_sums(summed) if stage.metric else stage.anchor * safe_divide(summed.entropy, summed.weight)
    score = objective.score(of_matrix(matrix))
    return {"loss": float(loss), "entropy": float(entropy), "score": float(score)}, matrix
