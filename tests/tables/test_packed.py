"""A table in fewer bytes: what comes out is what `transform` gives, and that is scikit-learn's but for rounding."""

from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.preprocessing import QuantileTransformer, StandardScaler

from evalign import EASTClassifier
from evalign.tables.columns import NUMERIC
from evalign.tables.encode import TableEncoder
from evalign.tables.packed import Layout, PackedTable
from evalign.training.batches import Rows
from evalign.training.stacked import FoldedRows


def mixed(rows: int, seed: int = 0) -> pd.DataFrame:
    draw = np.random.default_rng(seed)
    some = draw.lognormal(sigma=2, size=rows)
    return pd.DataFrame(
        {
            "number": draw.normal(50, 9, rows),
            "job": draw.choice(["cook", "smith", "clerk"], rows),
            "gaps": np.where(draw.random(rows) < 0.2, np.nan, some),
            "flag": pd.array(np.where(draw.random(rows) < 0.1, None, draw.random(rows) < 0.5), dtype="boolean"),
            "always": np.full(rows, 3.0),
            "home": pd.Categorical(draw.choice(["x", "y", None], rows)),
        }
    )


@pytest.mark.parametrize("numeric", NUMERIC)
def test_a_packed_table_holds_what_transform_gives(numeric: Any):
    frame, new = mixed(200), mixed(60, seed=1)
    encoder = TableEncoder(numeric=numeric).fit(frame)
    for table in (frame, new):
        np.testing.assert_array_equal(encoder.packed(table)[:].numpy(), encoder.transform(table))
    some = np.array([7, 3, 3, 150])
    np.testing.assert_array_equal(encoder.packed(frame, rows=some)[:].numpy(), encoder.transform(frame)[some])


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(0, 2), min_size=1, max_size=12), st.integers(1, 5))
def test_every_column_comes_back_to_its_place(kinds: list[int], rows: int):
    layout = Layout(*(tuple(j for j, kind in enumerate(kinds) if kind == own) for own in range(3)))
    data = layout.zeros(rows)
    expected = np.zeros((rows, len(kinds)), np.float32)
    for view, places in zip(layout.views(data), (layout.exact, layout.rounded, layout.flags), strict=True):
        for own, place in enumerate(places):
            view[:, own] = expected[:, place] = (np.arange(rows) + place) % 2
    np.testing.assert_array_equal(PackedTable(torch.from_numpy(data), layout)[:].numpy(), expected)


def test_scaled_numbers_are_exact_and_ranks_rounded_by_two_to_the_minus_eleven():
    x = np.random.default_rng(0).lognormal(sigma=2, size=(3000, 4))
    ours = TableEncoder(numeric="both").fit(x).packed(x)[:].numpy()
    scaled = StandardScaler().fit_transform(x).astype(np.float32)
    np.testing.assert_allclose(ours[:, 0::2], scaled, rtol=1e-6, atol=1e-7)
    assert (ours[:, 0::2] == TableEncoder(numeric="standard").fit_transform(x)).all()
    ranks = QuantileTransformer(n_quantiles=1000, output_distribution="normal", subsample=None).fit_transform(x)
    np.testing.assert_allclose(ours[:, 1::2], ranks, rtol=2.0**-11, atol=1e-5)


def test_bytes_of_a_row():
    numbers = TableEncoder(numeric="both").fit(np.random.default_rng(0).normal(size=(50, 29)))
    table = numbers.packed(np.zeros((10, 29)))
    assert table.data.nbytes == 10 * 176  # 29 times 4 + 2, filled up to a multiple of 4; float32 takes 232
    words = TableEncoder().fit(pd.DataFrame({"word": list("abcdefgh")}))
    assert words.packed(pd.DataFrame({"word": list("ah")})).data.nbytes == 2 * 8


def test_places_of_any_shape_and_type():
    encoder = TableEncoder(numeric="both").fit(mixed(50))
    dense = torch.from_numpy(encoder.transform(mixed(50)))
    table = encoder.packed(mixed(50))
    for index in (torch.tensor([[4, 0], [49, 4]]), torch.tensor([3, 1], dtype=torch.int32), torch.arange(0)):
        assert torch.equal(table[index], dense[index.long()])
    assert torch.equal(table[10:20], dense[10:20])
    assert (len(table), table.shape, table.dim(), table.dtype) == (50, dense.shape, 2, dense.dtype)


def test_packed_rows_divide_like_others():
    encoder = TableEncoder(numeric="both").fit(mixed(50))
    y = torch.arange(50) % 2
    packed = Rows.of(encoder.packed(mixed(50)), y)
    dense = Rows.of(torch.from_numpy(encoder.transform(mixed(50))), y)
    some = torch.tensor([5, 9])
    for one, other in zip(vars(packed[some]).values(), vars(dense[some]).values(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("options", [{"folds": 1}, {"folds": 2}])
def test_a_network_is_trained_on_a_packed_table_as_on_a_dense_one(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
):
    X, y = mixed(160), np.random.default_rng(0).integers(0, 2, 160)
    model = EASTClassifier(hidden=(8,), epochs=3, random_state=0, device="cpu", **options)
    seen, of = [], FoldedRows.of.__func__
    monkeypatch.setattr(FoldedRows, "of", classmethod(lambda *given: seen.append(of(*given)) or seen[-1]))
    packed = model.fit(X, y).predict_proba(X)
    assert all(isinstance(folded.rows.x, PackedTable) for folded in seen)
    monkeypatch.setattr(
        TableEncoder, "packed", lambda self, X, *, rows=None: torch.from_numpy(self.transform(X, rows=rows))
    )
    np.testing.assert_allclose(model.fit(X, y).predict_proba(X), packed, atol=1e-6)
