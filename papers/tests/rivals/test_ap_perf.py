"""AP-Perf: the linear program against the game over all answers, the authors' package, and differences."""

import sys
from random import Random

import numpy as np
import pytest
import slow_rivals as slow
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from sklearn.metrics import f1_score

from evalign_papers.rivals import APPerfLoss, ap_perf_loss
from evalign_papers.rivals.ap_perf_game import METRICS, adversary, affine, decided

GAMES = [(metric, 1.0) for metric in METRICS if metric != "fbeta"] + [("fbeta", b) for b in (0.0, 0.5, 2.0)]


def options_of(metric, beta):
    return {"metric": metric, "beta": beta if metric == "fbeta" else None}


def batch(n, scale=0.3, seed=0):
    generator = torch.Generator().manual_seed(seed)
    psi = scale * torch.randn(n, dtype=torch.float64, generator=generator)
    return psi, (torch.rand(n, generator=generator) < 0.4).long()


def loss_and_gradient(psi, y, **options):
    z = psi.detach().clone().requires_grad_()
    loss = ap_perf_loss(z, y, **options)
    loss.backward()
    return loss.detach(), z.grad


# --- the game --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 2, 3, 4])
@pytest.mark.parametrize(("metric", "beta"), GAMES)
def test_the_program_is_the_game_over_all_answers(metric, beta, n):
    for seed, scale in enumerate((0.03, 0.3, 1.0, 50.0)):
        psi, y = batch(n, scale, seed)
        value, q = slow.game(metric, psi.numpy(), beta)
        loss, gradient = loss_and_gradient(psi, y, **options_of(metric, beta))
        assert loss.item() == pytest.approx(1 - value - (psi @ y.double()).item(), abs=1e-9)
        # The adversary's best answer is unique for prices drawn at random.
        assert gradient.numpy() == pytest.approx(q - y.numpy(), abs=1e-9)


@pytest.mark.parametrize(("metric", "beta"), [*GAMES, ("f1", 1.0)])
def test_larger_games_are_the_papers_program(metric, beta):
    """Of these prices the first rows alone are not enough: the adversary needs other sets, and the predictor too."""
    for seed in (1, 17, 49):
        psi = 0.3 * np.random.default_rng(seed).standard_normal(11)
        expected, best = slow.marginal_game(metric, psi, beta)
        value, q = adversary(psi, metric=metric, beta=beta)
        assert value - psi @ q == pytest.approx(expected, abs=1e-9)
        assert q == pytest.approx(best, abs=1e-6)


def test_the_answer_does_not_depend_on_games_before():
    generator = np.random.default_rng(0)
    games = [0.2 * generator.standard_normal(n) for n in (9, 5, 9, 12, 5, 9)]
    found = [adversary(psi)[1] for psi in games]
    again = [adversary(psi)[1] for psi in games[::-1]][::-1]
    assert all((a == b).all() for a, b in zip(found, again, strict=True))


@pytest.mark.parametrize(("metric", "beta"), GAMES)
def test_the_program_is_the_game_where_answers_tie(metric, beta):
    for psi in ([0.0] * 4, [0.5, 0.5, -0.5, 0.0], [0.25, 0.25, 0.25]):
        expected, _ = slow.game(metric, psi, beta)
        value, q = adversary(np.array(psi), metric=metric, beta=beta)
        assert value - np.dot(psi, q) == pytest.approx(expected, abs=1e-9)


# Prices on both sides of where they decide their label, and there: 1, then 1/3 and 1/5 beside one and two sure rows.
PRICES = st.lists(
    st.integers(-60, 60).map(lambda i: i / 20) | st.floats(-1.0, 1.0) | st.sampled_from([1 / 3, -1 / 3, 1 / 5, -1 / 5]),
    min_size=1,
    max_size=5,
)


@settings(max_examples=60)
@given(st.sampled_from([0.0, 0.5, 1.0, 2.0, 3.0]), PRICES, st.randoms(use_true_random=False))
@example(1.0, [-0.9], Random(0))
@example(1.0, [0.9], Random(0))
@example(0.5, [1.5, -0.4], Random(0))
@example(0.5, [1.5, 0.4], Random(0))
@example(2.0, [1.5, 0.3, -0.3], Random(0))
def test_rows_whose_price_decides_leave_the_game_as_it_is(beta, prices, random):
    psi = np.array(prices)
    expected, best = slow.game("fbeta", psi, beta)
    value, q = adversary(psi, metric="fbeta", beta=beta)
    assert value - psi @ q == pytest.approx(expected, abs=1e-7)
    # Best answers may tie; q is one of them exactly where -q is a slope of the concave value.
    other = np.array([random.uniform(-1.5, 1.5) for _ in prices])
    assert slow.game("fbeta", other, beta)[0] <= expected - q @ (other - psi) + 1e-7
    # Where the price decides strictly, every best answer agrees.
    fixed = ~np.isnan(decided(psi, beta)) & ~np.isnan(decided(psi * (1 - 1e-3), beta))
    assert q[fixed] == pytest.approx(best[fixed], abs=1e-5)
    assert set(q[fixed]) <= {0.0, 1.0}


def test_sure_rows_need_no_program(monkeypatch):
    monkeypatch.setitem(sys.modules, "highspy", None)
    psi = torch.tensor([1.1, -0.4, 0.4, 0.3, -5.0], dtype=torch.float64)
    loss, gradient = loss_and_gradient(psi, torch.tensor([1, 0, 0, 1, 1]))
    assert loss.item() == pytest.approx(0.4 + 5.0)  # named and not true, true and not named: each at its price
    assert gradient.tolist() == [0, 0, 1, 0, -1]


@pytest.mark.parametrize(("metric", "beta"), GAMES)
def test_a_metric_is_affine_in_its_true_positives(metric, beta):
    gain, constant = affine(metric, beta, 5)
    generator = np.random.default_rng(0)
    for _ in range(200):
        a, b = (tuple((generator.random(5) < generator.random()).astype(int).tolist()) for _ in range(2))
        k, l, tp = sum(a), sum(b), int(np.dot(a, b))  # noqa: E741
        assert gain[k, l] * tp + constant[k, l] == pytest.approx(slow.score(metric, a, b, beta))


def test_f1_is_scikit_learns_but_for_two_empty_answers():
    gain, constant = affine("f1", 1.0, 6)
    generator = np.random.default_rng(0)
    for _ in range(50):
        a, b = (generator.random((2, 6)) < 0.4).astype(int)
        got = gain[a.sum(), b.sum()] * (a @ b) + constant[a.sum(), b.sum()]
        assert got == pytest.approx(f1_score(b, a, zero_division=1.0))


def test_a_batch_of_25_is_solved():
    psi, y = batch(25, scale=0.05)
    expected = 1 - slow.accuracy_game(psi.tolist()) - (psi @ y.double()).item()
    assert ap_perf_loss(psi, y, metric="accuracy").item() == pytest.approx(expected, abs=1e-9)
    # No closed form for F1; the loss is convex, so it lies above its tangents, whose slope is q - y.
    loss, slope = loss_and_gradient(psi, y)
    other, other_slope = loss_and_gradient(-psi, y)
    assert other >= loss + slope @ (-2 * psi) - 1e-9
    assert loss >= other + other_slope @ (2 * psi) - 1e-9
    assert ((slope + y >= 0) & (slope + y <= 1)).all()


def test_the_authors_package_finds_the_same_answer(monkeypatch):
    """Its gradient as it is; its value once the predictor with k positives collects k of them, not k - 1."""
    pytest.importorskip("ap_perf", reason="ap_perf (with numba) is not installed, only compared with")
    from ap_perf import MetricLayer, metric
    from ap_perf.common_metrics import accuracy_metric, f1_score, f2_score, mcc

    def k_largest(scores, non_neg=True):
        best = max(np.sort(scores[:, k])[::-1][: k + 1].sum() for k in range(len(scores)))
        return max(0.0, best) if non_neg else best

    monkeypatch.setattr(metric, "max_sumlargest", k_largest)
    theirs = {"f1": f1_score, "fbeta": f2_score, "accuracy": accuracy_metric, "mcc": mcc}
    for name, rule in theirs.items():
        for n in (4, 10, 20):
            psi, y = batch(n, scale=0.05)
            layer = MetricLayer(rule, {"max_iter": 3000})  # 100 by default, which leaves q off by up to 0.3
            z = psi.float().requires_grad_()
            value = layer(z, y.float())
            value.sum().backward()
            loss, gradient = loss_and_gradient(psi, y, **options_of(name, 2.0))
            assert loss.item() == pytest.approx(1 + value.item(), abs=1e-3)
            assert gradient.numpy() == pytest.approx(z.grad.numpy(), abs=1e-3)


# --- the loss --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("metric", "beta"), GAMES)
def test_the_gradient_is_that_of_differences_times_the_one_that_comes_in(metric, beta):
    psi, y = batch(6, seed=3)
    psi.requires_grad_()
    for factor in (1.0, -1000.0):
        # The loss is piecewise linear: a wide step loses nothing and hides the solver's rounding.
        assert torch.autograd.gradcheck(
            lambda z, c=factor: c * ap_perf_loss(z, y, **options_of(metric, beta)), (psi,), eps=1e-4, atol=1e-6
        )


@pytest.mark.parametrize(("metric", "beta"), GAMES)
def test_the_loss_is_0_for_sure_and_right_scores_and_positive_else(metric, beta):
    psi, y = batch(8)
    right = 2.0 * (2 * y - 1)
    assert ap_perf_loss(right.double(), y, **options_of(metric, beta)).item() == pytest.approx(0, abs=1e-9)
    assert ap_perf_loss(psi, y, **options_of(metric, beta)).item() > 0.1
    assert ap_perf_loss(-right.double(), y, **options_of(metric, beta)).item() > 10


def test_the_module_is_its_function():
    psi, y = batch(9)
    for loss, options in (
        (APPerfLoss(), {}),
        (APPerfLoss("fbeta", beta=2.0, task="binary"), {"metric": "fbeta", "beta": 2.0}),
        (APPerfLoss("mcc", max_rows=3), {"metric": "mcc", "max_rows": 3}),
    ):
        assert torch.equal(loss(psi, y), ap_perf_loss(psi, y, **options))


def test_long_batches_are_cut_into_pieces_of_nearly_equal_size():
    psi, y = batch(11)
    loss, gradient = loss_and_gradient(psi, y, max_rows=4)
    parts = [loss_and_gradient(psi[a:b], y[a:b]) for a, b in ((0, 4), (4, 8), (8, 11))]
    assert loss.item() == pytest.approx((4 * parts[0][0] + 4 * parts[1][0] + 3 * parts[2][0]).item() / 11)
    scaled = [len(g) / 11 * g for _, g in parts]
    assert torch.allclose(gradient, torch.cat(scaled))


def test_shapes_ignored_rows_and_order():
    psi, y = batch(7)
    expected = ap_perf_loss(psi, y).item()
    assert ap_perf_loss(psi[:, None], y.float()).item() == pytest.approx(expected)
    order = torch.tensor([3, 1, 6, 0, 5, 2, 4])
    assert ap_perf_loss(psi[order], y[order]).item() == pytest.approx(expected)
    longer, labels = torch.cat([psi[:2], psi]), torch.cat([torch.full((2,), -100), y])
    loss, gradient = loss_and_gradient(longer, labels)
    assert loss.item() == pytest.approx(expected)
    assert (gradient[:2] == 0).all()


@pytest.mark.parametrize("n", [1, 5])
@pytest.mark.parametrize(("metric", "beta"), GAMES)
def test_one_class_and_single_rows_are_finite(metric, beta, n):
    for label in (0, 1):
        loss, gradient = loss_and_gradient(batch(n)[0], torch.full((n,), label), **options_of(metric, beta))
        assert loss.isfinite()
        assert loss >= 0
        assert gradient.isfinite().all()
        assert gradient.abs().max() > 0


def test_a_batch_without_labels_gives_0_and_backward_works():
    psi, y = batch(5)
    for z, target in ((psi[:0], y[:0]), (psi, torch.full_like(y, -100))):
        loss, gradient = loss_and_gradient(z, target)
        assert loss == 0
        assert (gradient == 0).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_narrow_and_large_logits_are_finite(dtype):
    psi, y = batch(8)
    loss, gradient = loss_and_gradient(psi.to(dtype), y)
    expected, exact = loss_and_gradient(psi.to(dtype).double(), y)
    assert loss.item() == pytest.approx(expected.item(), abs=1e-6)
    assert loss.dtype == torch.float32
    assert gradient.dtype == dtype
    assert torch.allclose(gradient.double(), exact, atol=0.005)
    # A price of 10000 decides its label: the others play on, and the loss is linear in it.
    large = psi.clone()
    large[2], y[2] = 1e4, 0
    loss, gradient = loss_and_gradient(large.to(dtype), y)
    larger, _ = loss_and_gradient((large + 1e4 * (large > 1e3)).to(dtype), y)
    assert gradient[2] == 1
    assert (larger - loss).item() == pytest.approx(1e4, rel=1e-2)


def test_it_trains():
    """Synthetic 33 %, as in test_baseline_losses.py, where cross-entropy gets 0.77; a few batches of 20 suffice."""
    x, y, x_test, y_test = slow.synthetic(800)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        network = torch.nn.Linear(3, 1)
    optimiser = torch.optim.Adam(network.parameters(), lr=0.05)
    loss = APPerfLoss("f1")
    for rows in torch.split(torch.arange(800), 20):
        optimiser.zero_grad()
        loss(network(x[rows]), y[rows]).backward()
        optimiser.step()
    with torch.no_grad():
        assert f1_score(y_test, network(x_test).squeeze(1) >= 0) > 0.75


# --- wrong input -----------------------------------------------------------------------------------------

Z, Y = torch.tensor([0.1, -0.2, 0.3]), torch.tensor([1, 0, 1])
ERRORS = {
    "metric": (lambda: ap_perf_loss(Z, Y, metric="jaccard"), ValueError, ["metric", "jaccard", "f1, fbeta"]),
    "task": (lambda: APPerfLoss(task="multiclass"), ValueError, ["task", "binary", "multiclass"]),
    "beta of f1": (lambda: APPerfLoss("f1", beta=2.0), ValueError, ["beta", "'f1'", "leave beta out"]),
    "no beta": (lambda: ap_perf_loss(Z, Y, metric="fbeta"), ValueError, ["beta", "None", "beta=1.0"]),
    "beta below 0": (lambda: ap_perf_loss(Z, Y, metric="fbeta", beta=-1.0), ValueError, ["beta", "-1"]),
    "max_rows": (lambda: APPerfLoss(max_rows=0), ValueError, ["max_rows", "0"]),
    "sample_weight": (lambda: ap_perf_loss(Z, Y, sample_weight=torch.ones(3)), ValueError, ["sample_weight", "None"]),
    "nan": (lambda: ap_perf_loss(Z * torch.nan, Y), ValueError, ["finite", "nan"]),
    "shape": (lambda: ap_perf_loss(torch.zeros(3, 2), Y), ValueError, ["(3, 2)", "(3,)"]),
}


@pytest.mark.parametrize("case", ERRORS)
def test_wrong_input_is_named_in_one_sentence(case):
    call, kind, words = ERRORS[case]
    with pytest.raises(kind) as error:
        call()
    message = str(error.value)
    assert all(word in message for word in words), message
    assert "\n" not in message


def test_without_highspy_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "highspy", None)
    with pytest.raises(ImportError, match=r"highspy.*pip install"):
        ap_perf_loss(Z, Y)
