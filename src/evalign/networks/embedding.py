"""Embeddings of columns in front of a network: numbers as learned curves, categories as vectors.

Gorishniy et al. 2022, "On Embeddings for Numerical Features in Tabular Deep Learning": a linear layer sees one slope
for a whole column; here every column first passes through its own small curve. The input is the matrix of
`TableEncoder`, and `Fields` has the positions of the columns in it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Fields:
    """Positions of a table's columns in its encoded matrix (n, `features`).

    `numbers` are places of numbers, of which each has rising `edges` (none are known of a column that is only scaled);
    `categories` are the ranges of 0/1 columns that one column of categories has become. Everything else is left as
    it is.
    """

    features: int
    numbers: tuple[int, ...] = ()
    edges: tuple[tuple[float, ...], ...] = ()
    categories: tuple[tuple[int, int], ...] = ()


class Piecewise(nn.Module):
    """x -> its progress through each bin, clamp((x - low) / (high - low), 0, 1): (M, n, 1) -> (M, n, bins).

    `edges` of a column with more than `bins` + 1 are thinned evenly, and a column with few values has an edge at each
    of them. Bins that a column lacks are 0.

    DIFFERS: in the paper the outer bins go on beyond the last training value; here they end, so that one extreme value
    cannot dominate all other columns.

    >>> Piecewise([(0.0, 1.0, 3.0)], bins=3)(torch.tensor([[[2.0]]]))
    tensor([[[1.0000, 0.5000, 0.0000]]])
    """

    low: Tensor
    slope: Tensor

    def __init__(self, edges: Sequence[Sequence[float]], bins: int) -> None:
        super().__init__()
        self.width = bins
        low, slope = np.zeros((len(edges), bins), np.float32), np.zeros((len(edges), bins), np.float32)
        for j, own in enumerate(edges):
            found = np.unique(np.asarray(own, dtype=np.float32))
            if len(found) < 2:
                raise ValueError(f"a column must have two or more edges, got {len(found)}; drop constant columns")
            found = found[np.linspace(0, len(found) - 1, min(bins + 1, len(found))).round().astype(int)]
            low[j, : len(found) - 1], slope[j, : len(found) - 1] = found[:-1], 1 / np.diff(found)
        self.register_buffer("low", torch.from_numpy(low)[:, None])
        self.register_buffer("slope", torch.from_numpy(slope)[:, None])

    def forward(self, x: Tensor) -> Tensor:
        return ((x - self.low) * self.slope).clamp(0, 1)


class NumberEmbedding(nn.Module):
    """relu(a x + b + W curve(x)) of every column by itself, (n, M) -> (n, M width).

    W starts at 0, so that training starts from straight lines.
    """

    def __init__(self, curve: Piecewise, columns: int, width: int) -> None:
        super().__init__()
        self.curve = curve
        bound = width**-0.5
        self.slope = nn.Parameter(torch.empty(columns, 1, width).uniform_(-bound, bound))
        self.bias = nn.Parameter(torch.empty(columns, 1, width).uniform_(-bound, bound))
        self.weight = nn.Parameter(torch.zeros(columns, curve.width, width))

    def forward(self, x: Tensor) -> Tensor:
        columns = x.t().unsqueeze(-1)
        line = torch.addcmul(self.bias, columns, self.slope)
        bent = torch.baddbmm(line, self.curve(columns), self.weight).relu()  # all columns in one product
        return bent.transpose(0, 1).flatten(1)


class CategoryEmbedding(nn.Module):
    """A learned vector for every category, (n, levels) of 0 and 1 -> (n, columns width).

    A column without any 1 holds a category that training did not have: it gets the mean vector of its column. Vectors
    start normal with standard deviation `start`, small so that an untrained one has little effect.

    >>> embedding = CategoryEmbedding([2, 3], width=4)
    >>> known, unseen = embedding(torch.tensor([[1.0, 0.0, 0.0, 0.0, 0.0]])).detach().split(4, 1)
    >>> torch.allclose(known, embedding.vectors[0]), torch.allclose(unseen, embedding.vectors[2:].mean(0))
    (True, True)
    """

    place: Tensor
    share: Tensor

    def __init__(self, levels: Sequence[int], width: int, start: float = 0.1) -> None:
        super().__init__()
        self.vectors = nn.Parameter(start * torch.randn(sum(levels), width))
        place = torch.eye(len(levels)).repeat_interleave(torch.tensor(levels), 0)
        self.register_buffer("place", place)  # (levels, columns): the column of each level
        self.register_buffer("share", (place / place.sum(0)).t().contiguous())

    def forward(self, x: Tensor) -> Tensor:
        unseen = 1 - x @ self.place
        # One product for all columns: the vector of a level is in the place of its column, with zeros elsewhere.
        matrix = (self.vectors[:, None] * self.place[..., None]).flatten(1)
        return torch.addmm(x @ matrix, unseen @ self.share, matrix)


class TableEmbedding(nn.Module):
    """Curves of numbers and vectors of categories, with all non-category columns: (n, F) -> (n, `width`).

    >>> fields = Fields(5, numbers=(1,), edges=((-1.0, 0.0, 1.0),), categories=((2, 5),))
    >>> embedding = TableEmbedding(fields, width=8)
    >>> embedding(torch.tensor([[0.3, 0.3, 0.0, 1.0, 0.0]])).shape  # two numbers, a curve of 8, a vector of 8
    torch.Size([1, 18])
    """

    plain: Tensor
    numbers: Tensor
    levels: Tensor

    def __init__(self, fields: Fields, *, width: int = 16, bins: int = 64, start: float = 0.1) -> None:
        super().__init__()
        levels = [place for start, end in fields.categories for place in range(start, end)]
        plain = sorted({*range(fields.features)} - {*levels})
        for name, places in (("plain", plain), ("numbers", fields.numbers), ("levels", levels)):
            self.register_buffer(name, torch.tensor(places, dtype=torch.long))
        columns = len(fields.numbers)
        self.of_numbers = self.of_categories = None
        if columns:
            self.of_numbers = NumberEmbedding(Piecewise(fields.edges, bins), columns, width)
        if fields.categories:
            self.of_categories = CategoryEmbedding([end - first for first, end in fields.categories], width, start)
        self.width = len(plain) + width * (columns + len(fields.categories))

    def forward(self, x: Tensor) -> Tensor:
        parts = [x.index_select(1, self.plain)]
        if self.of_numbers is not None:
            parts.append(self.of_numbers(x.index_select(1, self.numbers)))
        if self.of_categories is not None:
            parts.append(self.of_categories(x.index_select(1, self.levels)))
        return torch.cat(parts, 1)
