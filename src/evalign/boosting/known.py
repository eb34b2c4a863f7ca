"""Labels and weights that come again with every round: checked and converted once, then only compared."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


@dataclass(frozen=True)
class Known:
    """What was given (copies: a caller may write over its own), and the tensors it became, for scores of one kind."""

    shape: torch.Size
    dtype: torch.dtype
    given_labels: NDArray[Any]
    given_weights: NDArray[Any] | None
    labels: Tensor
    weights: Tensor

    def is_for(self, scores: Tensor, y: Any, weight: Any) -> bool:
        """Whether these are the same again; a nan is never the same."""
        if (scores.shape, scores.dtype) != (self.shape, self.dtype) or (weight is None) != (self.given_weights is None):
            return False
        same_weights = self.given_weights is None or np.array_equal(self.given_weights, weight)
        return same_weights and np.array_equal(self.given_labels, y)
