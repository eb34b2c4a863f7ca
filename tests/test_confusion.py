"""Confusion: soft counts equal the slow loop, are conserved, add up, and know of order, weights and ignored rows."""

from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from evalign import Confusion, MetricLoss, membership, steps
from reference import loops

VECTORS = ("tp", "fp", "fn", "tn", "actual", "predicted")
STEPS = {
    **{f"annealed {t}": partial(steps.annealed, temperature=t) for t in (0.01, 0.2, 0.4)},
    "linear": steps.linear,
    "sigmoid": steps.sigmoid,
    "identity": steps.identity,
}


def assert_near(got, expected, tolerance=1e-9):
    expected = torch.as_tensor(expected, dtype=torch.float64)
    torch.testing.assert_close(got.double(), expected, atol=tolerance, rtol=tolerance)


@st.composite
def batches(draw, classes=None, rows=(1, 12)):
    """Memberships (n, d) as rows of a softmax after a step, and labels; classes may be absent."""
    d = classes or draw(st.integers(2, 5))
    n = draw(st.integers(*rows))
    logits = draw(st.lists(st.lists(st.integers(-4, 4), min_size=d, max_size=d), min_size=n, max_size=n))
    labels = draw(st.lists(st.integers(0, d - 1), min_size=n, max_size=n))
    step = STEPS[draw(st.sampled_from(list(STEPS)))]
    threshold = draw(st.sampled_from([None, 0.1, 0.5, 0.8]))
    p = torch.tensor(logits, dtype=torch.float64).softmax(1)
    return membership.dynamic(p, step, threshold), torch.tensor(labels)


def slow_matrix(g, y, weights=None, smoothing=0.0):
    d = g.shape[1]
    labels = [loops.soft_labels(k, d, smoothing) for k in y.tolist()]
    return loops.matrix(g.tolist(), labels, [1.0] * len(y) if weights is None else weights)


def assert_counts(c: Confusion, matrix) -> None:
    """Every vector and the matrix of c against a slow one."""
    four = [loops.cells(matrix, k) for k in range(len(matrix))]
    for name, expected in zip(VECTORS[:4], zip(*four, strict=True), strict=True):
        assert_near(getattr(c, name), expected)
    assert_near(c.actual, [sum(row) for row in matrix])
    assert_near(c.predicted, [sum(column) for column in zip(*matrix, strict=True)])
    assert_near(c.total, sum(map(sum, matrix)))
    assert_near(c.matrix, matrix)


def assert_same(a: Confusion, b: Confusion, tolerance=1e-9) -> None:
    for name in (*VECTORS, "total"):
        assert_near(getattr(a, name), getattr(b, name), tolerance)


@given(batch=batches())
def test_soft_counts_are_the_slow_loop(batch):
    assert_counts(Confusion.soft(*batch), slow_matrix(*batch))


@given(batch=batches(), weights=st.lists(st.integers(0, 9), min_size=12, max_size=12))
def test_weighted_soft_counts_are_the_slow_loop(batch, weights):
    g, y = batch
    w = [x / 7 for x in weights[: len(y)]]
    assert_counts(Confusion.soft(g, y, sample_weight=torch.tensor(w, dtype=torch.float64)), slow_matrix(g, y, w))


@given(batch=batches(), smoothing=st.sampled_from([0.05, 0.3, 0.9]))
def test_smoothed_counts_are_those_of_soft_labels(batch, smoothing):
    assert_counts(Confusion.soft(*batch).smoothed(smoothing), slow_matrix(*batch, smoothing=smoothing))


@given(
    logits=st.lists(st.lists(st.floats(-20, 20), min_size=3, max_size=3), min_size=1, max_size=20),
    labels=st.lists(st.integers(0, 2), min_size=20, max_size=20),
    step=st.sampled_from(list(STEPS)),
    threshold=st.one_of(st.none(), st.floats(0.01, 0.99)),
    dtype=st.sampled_from([torch.float32, torch.float64]),
)
def test_rows_sum_to_the_label_counts_and_all_to_n(logits, labels, step, threshold, dtype):
    p, y = torch.tensor(logits, dtype=dtype).softmax(1), torch.tensor(labels[: len(logits)])
    g = membership.dynamic(p, STEPS[step], threshold)
    kept = g.sum(1) > 0  # a table may be 0 for every class of a row
    c = Confusion.soft(g[kept], y[kept])
    counts = torch.bincount(y[kept], minlength=3)
    assert_near(c.matrix.sum(1), counts, 1e-5 if dtype == torch.float32 else 1e-12)
    assert_near(c.matrix.sum(), int(kept.sum()), 1e-5 if dtype == torch.float32 else 1e-12)
    assert_near(c.tp + c.fp + c.fn + c.tn, [int(kept.sum())] * 3, 1e-5)
    tau = 0.5 if threshold is None else threshold
    binary = Confusion.soft(STEPS[step](p[:, 0], tau), (y == 0).long())
    assert_near(binary.matrix.sum(1), torch.bincount((y == 0).long(), minlength=2), 1e-5)


@given(batch=batches(), data=st.data())
def test_order_of_rows_is_immaterial_and_classes_permute(batch, data):
    (g, y), d = batch, batch[0].shape[1]
    c = Confusion.soft(g, y)
    rows = torch.tensor(data.draw(st.permutations(range(len(y)))))
    assert_same(Confusion.soft(g[rows], y[rows]), c)
    classes = torch.tensor(data.draw(st.permutations(range(d))))  # new class i is old class classes[i]
    renamed = Confusion.soft(g[:, classes], classes.argsort()[y])
    assert_near(renamed.tp, c.tp[classes])
    assert_near(renamed.fp, c.fp[classes])
    assert_near(renamed.matrix, c.matrix[classes][:, classes])


@given(batch=batches(rows=(2, 12)), cut=st.integers(1, 11))
def test_counts_add_over_batches(batch, cut):
    g, y = batch
    cut = min(cut, len(y) - 1)
    parts = [Confusion.soft(g[:cut], y[:cut]), Confusion.soft(g[cut:], y[cut:])]
    _ = [part.matrix for part in parts]
    assert_counts(sum(parts), slow_matrix(g, y))
    assert torch.equal(sum(parts).present, torch.bincount(y, minlength=g.shape[1]) > 0)


@given(batch=batches(), repeats=st.lists(st.integers(0, 3), min_size=12, max_size=12))
def test_integer_weights_are_repeated_rows(batch, repeats):
    g, y = batch
    times = torch.tensor(repeats[: len(y)])
    weighted = Confusion.soft(g, y, sample_weight=times)
    assert_same(weighted, Confusion.soft(g.repeat_interleave(times, 0), y.repeat_interleave(times)))
    hard, again = g.argmax(1), g.argmax(1).repeat_interleave(times)
    counted = Confusion.hard(again, y.repeat_interleave(times), g.shape[1])
    assert_same(Confusion.hard(hard, y, g.shape[1], sample_weight=times), counted)


@pytest.mark.parametrize("ignore_index", [-100, 1, 255])
def test_ignored_rows_are_dropped_rows(ignore_index):
    generator = torch.Generator().manual_seed(0)
    g = torch.rand(50, 4, dtype=torch.float64, generator=generator).softmax(1)
    y = torch.randint(4, (50,), generator=generator)
    y = torch.where(torch.rand(50, generator=generator) < 0.3, ignore_index, y)
    kept = y != ignore_index
    assert 0 < kept.sum() < 50
    assert_same(Confusion.soft(g, y, ignore_index=ignore_index), Confusion.soft(g[kept], y[kept]))
    predicted = torch.where(kept, g.argmax(1), -7)  # what was predicted there may be anything
    hard = Confusion.hard(predicted, y, 4, ignore_index=ignore_index)
    assert_same(hard, Confusion.hard(predicted[kept], y[kept], 4))
    s, t = g[:, 0], torch.where(kept, (y == 0).long(), -1)
    assert_same(Confusion.soft(s, t, ignore_index=-1), Confusion.soft(s[kept], t[kept]))


def test_the_number_of_classes_is_read_from_entries_that_count():
    assert Confusion.hard(torch.tensor([0, 9]), torch.tensor([2, -100])).num_classes == 3
    assert Confusion.hard(torch.tensor([3, 0]), torch.tensor([0, 0])).num_classes == 4
    assert Confusion.hard(torch.tensor([5]), torch.tensor([-100])).num_classes == 2


def test_ignore_index_works_with_unsigned_bytes():
    y = torch.tensor([156, 3, 255], dtype=torch.uint8)
    assert Confusion.hard(y, y, 256).total == 3  # -100 is 156 in a byte, and is not meant
    assert Confusion.hard(y, y, 256, ignore_index=255).total == 2


@pytest.mark.parametrize("task", ["multiclass", "multilabel"])
def test_further_dimensions_are_flattened(task):
    generator = torch.Generator().manual_seed(1)
    g = torch.rand(2, 3, 4, 5, dtype=torch.float64, generator=generator).softmax(1)
    shape = (2, 4, 5) if task == "multiclass" else (2, 3, 4, 5)
    y = torch.randint(3 if task == "multiclass" else 2, shape, generator=generator)
    w = torch.rand(shape, dtype=torch.float64, generator=generator)
    flat = g.movedim(1, -1).reshape(-1, 3)
    flat_y, flat_w = (x.reshape(-1) if task == "multiclass" else x.movedim(1, -1).reshape(-1, 3) for x in (y, w))
    c = Confusion.soft(g, y, task=task, sample_weight=w)
    assert_same(c, Confusion.soft(flat, flat_y, task=task, sample_weight=flat_w))
    per_image = torch.tensor([2.0, 5.0], dtype=torch.float64)  # one weight per sample goes to all its entries
    everywhere = per_image.reshape(-1, *[1] * (len(shape) - 1)).expand(shape)
    assert_same(
        Confusion.soft(g, y, task=task, sample_weight=per_image),
        Confusion.soft(g, y, task=task, sample_weight=everywhere),
    )


@given(batch=batches(classes=2))
def test_binary_counts_are_the_two_class_ones(batch):
    g, y = batch
    one, two = Confusion.soft(g[:, 1], y), Confusion.soft(g, y)
    scale = g.sum(1)
    if torch.allclose(scale, torch.ones_like(scale)):
        assert_counts(one, slow_matrix(g, y))
        assert_same(one, two)
    assert torch.equal(one.present, two.present)


@given(
    s=st.lists(st.lists(st.integers(0, 8), min_size=3, max_size=3), min_size=1, max_size=8),
    t=st.lists(st.lists(st.integers(0, 1), min_size=3, max_size=3), min_size=8, max_size=8),
    smoothing=st.sampled_from([0.0, 0.2]),
)
def test_multilabel_counts_are_a_binary_loop_per_label(s, t, smoothing):
    s, t = torch.tensor(s, dtype=torch.float64) / 8, torch.tensor(t[: len(s)])
    c = Confusion.soft(s, t, task="multilabel").smoothed(smoothing)
    for k in range(3):
        pairs = torch.stack([1 - s[:, k], s[:, k]], 1)
        four = loops.cells(slow_matrix(pairs, t[:, k], smoothing=smoothing), 1)
        for name, expected in zip(VECTORS[:4], four, strict=True):
            assert_near(getattr(c, name)[k], expected)


@pytest.mark.parametrize("task", ["binary", "multilabel", "multiclass"])
def test_a_grid_holds_the_counts_of_every_threshold(task):
    generator = torch.Generator().manual_seed(2)
    p = torch.rand(20, *([] if task == "binary" else [3]), dtype=torch.float64, generator=generator)
    y = torch.randint(2, p.shape, generator=generator)
    if task == "multiclass":
        p, y = p.softmax(1), torch.randint(3, (20,), generator=generator)
    taus = (0.2, 0.5, 0.7)
    c = Confusion.soft_grid(membership.grid(p, steps.linear, taus), y, task)
    for tau, part in zip(taus, c.unbind(), strict=True):
        s = steps.linear(p, tau)
        if task == "multiclass":  # one class against the rest
            expected = Confusion.soft(s, torch.nn.functional.one_hot(y, 3), task="multilabel")
        else:
            expected = Confusion.soft(s, y, task=task)
        assert_same(part, expected)
    if task == "multiclass":
        smooth = torch.full((20, 3), 0.3 / 3, dtype=torch.float64).scatter(1, y[:, None], 0.7 + 0.3 / 3)
        assert_near(c.smoothed(0.3).tp[1], (steps.linear(p, 0.5) * smooth).sum(0))


def test_a_million_equal_terms_are_summed_to_float_precision():
    g = torch.tensor([[0.642, 0.358]]).expand(1 << 20, 2)
    y = torch.zeros(1 << 20, dtype=torch.long)
    c = Confusion.soft(g, y)
    assert_near(c.tp[0], 0.642 * 2**20, 1e-5)
    assert_near(c.predicted, [0.642 * 2**20, 0.358 * 2**20], 1e-5)
    assert_near(c.matrix[0], [0.642 * 2**20, 0.358 * 2**20], 1e-5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_membership_is_counted_in_float32(dtype):
    c = Confusion.soft(torch.full((100_000, 2), 0.5, dtype=dtype), torch.zeros(100_000, dtype=torch.long))
    assert c.tp.dtype == torch.float32
    assert c.predicted.tolist() == [50_000, 50_000]


def test_counts_are_not_rounded_under_autocast():
    g, y = torch.rand(64, 3, generator=torch.Generator().manual_seed(3)).softmax(1), torch.arange(64) % 3
    with torch.autocast("cpu", torch.bfloat16):
        inside = Confusion.soft(g, y)
    assert_same(inside, Confusion.soft(g, y), 1e-6)


def test_the_matrix_is_built_once_and_only_sums_of_built_ones_have_one():
    g, y = torch.eye(3), torch.arange(3)
    c = Confusion.soft(g, y)
    assert c.matrix is c.matrix
    d = Confusion.soft(g, y)
    assert (c + c).matrix.diag().tolist() == [2, 2, 2]
    with pytest.raises(ValueError, match="holds no matrix"):
        _ = (d + Confusion.soft(g, y)).matrix


def test_repr_and_one_vs_rest():
    c = Confusion.hard(torch.tensor([0, 1, 2, 2]), torch.tensor([0, 2, 2, 2]), 3)
    assert repr(c) == "Confusion(classes=3, total=4)"
    rest = c.one_vs_rest()
    assert rest.tp.tolist() == [[3, 1], [3, 0], [1, 2]]
    assert rest.actual.tolist() == [[3, 1], [4, 0], [1, 3]]
    assert rest.predicted.tolist() == [[3, 1], [3, 1], [2, 2]]


def test_outcomes_stay_known_to_a_metric_function_and_to_every_threshold():
    """One-vs-rest problems of five classes: labels are smoothed among five outcomes."""
    seen = []

    def metric(c):
        seen.append(c.outcomes)
        return c.tp.sum() / c.total.sum()

    counts = torch.ones(2, 3)
    c = Confusion(counts, counts, counts, counts, multilabel=True, outcomes=5)
    MetricLoss(metric).objective.score(c)
    assert [*seen, *(part.outcomes for part in c.unbind())] == [5, 5, 5]
