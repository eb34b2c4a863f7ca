"""The papers' theorems as tests: BtG 4.1, 4.2, supplement 1.2; MF 5.1, Eq. 7-14; EAST 5.2 to 5.4, 5.7 to 5.9."""

import math
from functools import partial
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from evalign import Confusion, curves, membership, metric_loss, metrics, steps
from reference import loops
from test_losses import WITH_AUROC, batch, loss_and_gradient

taus = st.one_of(st.floats(0.01, 0.99), st.sampled_from([1e-6, 1 - 1e-6]))
units = st.floats(0, 1)
kinds = st.one_of(
    st.tuples(st.just("linear"), st.floats(0, 0.5)), st.tuples(st.just("annealed"), st.floats(0.001, 0.399))
)


def slopes(points):
    return [(y1 - y0) / (x1 - x0) for (x0, y0), (x1, y1) in pairwise(points)]


def step_and_constant(kind, tau):
    """A step, and the Lipschitz constant max(m1, m2, m3) from the five points of the paper."""
    name, value = kind
    points = (loops.linear_points if name == "linear" else loops.annealed_points)(tau, value)
    option = {"delta" if name == "linear" else "temperature": value}
    return partial(getattr(steps, name), threshold=tau, **option), max(slopes(points))


@given(kind=kinds, tau=taus, p=units, q=units)
def test_btg_4_1_steps_are_lipschitz_with_the_steepest_slope_and_never_fall(kind, tau, p, q):
    step, constant = step_and_constant(kind, tau)
    a, b = step(torch.tensor([p, q], dtype=torch.float64)).tolist()
    rounding = 1e-12 + 1e-15 * constant
    assert abs(a - b) <= constant * abs(p - q) + rounding
    if p <= q:
        assert a <= b + rounding
    assert -rounding <= a <= 1 + rounding


@given(kind=kinds, tau=taus)
def test_btg_4_1_steps_are_continuous_across_their_breakpoints(kind, tau):
    step, constant = step_and_constant(kind, tau)
    points = (loops.linear_points if kind[0] == "linear" else loops.annealed_points)(tau, kind[1])
    for x, _ in points[1:4]:
        eps = min(tau, 1 - tau) * 1e-9
        around = step(torch.tensor([x - eps, x, x + eps], dtype=torch.float64))
        assert around.diff().abs().max().item() <= constant * eps + 1e-12 + 1e-15 * constant


@given(kind=kinds, tau=taus, rows=st.lists(st.tuples(units, units, st.integers(0, 1)), min_size=1, max_size=10))
def test_btg_4_2_every_entry_of_the_soft_matrix_is_lipschitz(kind, tau, rows):
    step, constant = step_and_constant(kind, tau)
    p, q, y = (torch.tensor(x) for x in zip(*rows, strict=True))
    moved = (p.double() - q.double()).abs().sum().item()
    first, second = (Confusion.soft(step(x.double()), y).matrix for x in (p, q))
    assert (first - second).abs().max().item() <= constant * moved * (1 + 1e-9) + 1e-9 + 1e-14 * constant


@pytest.mark.parametrize("n", [1_000, 10_000, 100_000, 1_000_000])
def test_btg_supplement_1_2_soft_and_hard_metrics_have_one_limit(n):
    """Bernoulli(u), Bernoulli(v) against Beta memberships of the same means."""
    r, (alpha_u, beta_u), (alpha_v, beta_v) = 0.3, (4.0, 1.0), (1.0, 3.0)
    u, v = alpha_u / (alpha_u + beta_u), alpha_v / (alpha_v + beta_v)
    rng = np.random.default_rng(0)
    y = np.arange(n) < round(r * n)
    hard = rng.random(n) < np.where(y, u, v)
    soft = np.where(y, rng.beta(alpha_u, beta_u, n), rng.beta(alpha_v, beta_v, n))
    target = torch.tensor(y).long()
    counts = Confusion.hard(torch.tensor(hard).long(), target, 2), Confusion.soft(torch.tensor(soft), target)
    # Hoeffding at 1 in 1000 for the two means, through a Lipschitz constant of 2 / r for F1 in U/n and V/n.
    off = r * math.sqrt(math.log(2000) / (2 * n * r)) + (1 - r) * math.sqrt(math.log(2000) / (2 * n * (1 - r)))
    for c in counts:
        assert abs(metrics.accuracy(c).item() - (r * u + (1 - r) * (1 - v))) <= off
        assert abs(metrics.f1(c, "binary").item() - 2 * r * u / (r + r * u + v - r * v)) <= 2 / r * off


@pytest.mark.parametrize("n", [1_000, 10_000, 100_000])
def test_btg_supplement_1_2_auroc_on_a_fixed_grid_has_one_limit(n):
    grid = np.arange(1, 10) / 10
    u, v = 1 - grid**3, (1 - grid) ** 3
    r, alpha = 0.4, 2.0
    rng = np.random.default_rng(1)
    y = np.arange(n) < round(r * n)
    mean = np.where(y, u[:, None], v[:, None])
    hard = rng.random(n) <= mean  # one uniform number a sample, so that rates fall with tau
    soft = rng.beta(alpha, alpha * (1 - mean) / mean)
    rates = np.concatenate([[1], v, [0]]), np.concatenate([[1], u, [0]])
    limit = np.sum((rates[0][:-1] - rates[0][1:]) * (rates[1][1:] + rates[1][:-1])) / 2
    # Hoeffding for all 18 rates together; the area moves by at most as much as its rates.
    off = sum(math.sqrt(math.log(2 * 18 * 1000) / (2 * n * share)) for share in (r, 1 - r))
    for s in (hard.astype(float), soft):
        area = curves.auroc(Confusion.soft_grid(torch.tensor(s), torch.tensor(y).long(), "binary"))
        assert abs(area.item() - limit) <= off + off**2


@given(
    rows=st.lists(st.permutations([0.05, 0.1, 0.15, 0.3, 0.4]), min_size=1, max_size=6),
    temperature=st.floats(1e-6, 0.03),
)
def test_east_5_2_membership_tends_to_the_predicted_class(rows, temperature):
    """Below T = 2 (p1 - p2) / 5 the largest entry has h >= 1 - T and each other h <= T."""
    p = torch.tensor(rows, dtype=torch.float64)
    assert temperature < 2 * (0.4 - 0.3) / 5
    g = membership.dynamic(p, partial(steps.annealed, temperature=temperature))
    hard = torch.nn.functional.one_hot(p.argmax(1), 5)
    assert (g - hard).abs().max().item() <= 4 * temperature / (1 - temperature) + 1e-12


@pytest.mark.parametrize(("metric", "task"), [(m, t) for m, t in WITH_AUROC if m != "auroc"])
def test_east_5_3_every_soft_metric_tends_to_the_hard_one(metric, task):
    z, y = batch(task, n=60)
    predicted = z.argmax(1) if task == "multiclass" else (z >= 0).long()
    apart = z.sort(1).values[:, -2:].diff(dim=1)[:, 0] if task == "multiclass" else z.reshape(len(z), -1).abs().amin(1)
    kept = apart > 0.2  # p1 - p2 bounded away from 0
    z, y, predicted = z[kept], y[kept], predicted[kept]
    classes = {"multiclass": 4, "binary": 2}.get(task)
    hard = Confusion.hard(predicted, y, classes, multilabel=task == "multilabel")
    function = metrics.METRICS[metric]
    averaged = {"average": "binary" if task == "binary" else "macro"} if metrics.is_averaged(metric) else {}
    expected = 1 - function(hard, **averaged).item()
    errors = [
        abs(metric_loss(z, y, metric, task=task, temperature=t).item() - expected) for t in (0.2, 1e-3, 1e-5, 1e-7)
    ]
    assert errors[0] > 1e-4  # at T = 0.2 they still differ
    assert errors[1] < 2e-2
    assert errors[2] < 2e-4
    assert errors[3] < 2e-6


def test_east_5_8_deviations_stay_below_the_bound_in_all_but_a_share_delta_of_samples():
    d, n, delta, repetitions, population = 4, 200, 0.1, 1000, 50_000
    generator = torch.Generator().manual_seed(2)
    z = 2 * torch.randn(population, d, dtype=torch.float64, generator=generator)
    y = (z + 2 * torch.randn(population, d, dtype=torch.float64, generator=generator)).argmax(1)
    g = membership.dynamic(z.softmax(1), partial(steps.annealed, temperature=0.1))
    whole = Confusion.soft(g, y).matrix / population
    bound = math.sqrt(math.log(2 * d**2 / delta) / (2 * n))
    deviations = []
    for _ in range(repetitions):
        rows = torch.randint(population, (n,), generator=generator)
        deviations.append((Confusion.soft(g[rows], y[rows]).matrix / n - whole).abs().max().item())
    assert np.mean(np.array(deviations) > bound) <= delta
    assert np.mean(np.array(deviations) > bound / 4) > delta  # so the bound is of the right size


simplex = st.lists(st.floats(0.01, 1), min_size=4, max_size=4).map(lambda x: [value / sum(x) for value in x])


@given(
    rows=st.lists(st.tuples(simplex, simplex, st.integers(0, 3)), min_size=1, max_size=5), delta=st.floats(0.05, 0.45)
)
def test_mf_5_1_every_entry_of_the_multiclass_soft_matrix_is_lipschitz(rows, delta):
    """In the outputs p, with a constant that no threshold is in.

    tau_avg is at least 1/d, so the slopes are at most m = max(2 delta, 1 - 2 delta) d and 4 delta. h is a function of
    p / tau below 3 tau / 2, hence |dh/dtau| <= 1.5 m, and tau moves by at most as much as p does; the sum of h is at
    least 1/2. Together |g(p) - g(q)| <= 5 m (1 + d) max|p - q|, entry by entry.
    """
    d = 4
    p, q, y = (torch.tensor(x, dtype=torch.float64) for x in zip(*rows, strict=True))
    m = max(max(2 * delta, 1 - 2 * delta) * d, 4 * delta)
    step = partial(steps.linear, delta=delta)
    first, second = (Confusion.soft(membership.dynamic(x, step), y.long()).matrix for x in (p, q))
    moved = (p - q).abs().amax(1).sum().item()
    assert (first - second).abs().max().item() <= 5 * m * (1 + d) * moved + 1e-9


@pytest.mark.parametrize("beta", [0.5, 1.0, 3.0])
@pytest.mark.parametrize("n", [2_000, 20_000, 200_000])
def test_mf_7_to_14_hard_and_dirichlet_memberships_have_one_macro_f_beta(n, beta):
    """Categorical predictions against Dirichlet memberships of the same means: Eq. 10 is the limit of both."""
    rng = np.random.default_rng(3)
    share = np.array([0.5, 0.3, 0.2])
    alpha = np.array([[6.0, 1.0, 1.0], [1.5, 3.0, 0.5], [0.5, 0.5, 2.0]])
    p = alpha / alpha.sum(1, keepdims=True)
    y = np.repeat(np.arange(3), np.round(share * n).astype(int))
    hard = (rng.random((len(y), 1)) > p[y].cumsum(1)).sum(1)
    soft = np.concatenate([rng.dirichlet(alpha[k], round(share[k] * n)) for k in range(3)])
    target, b2 = torch.tensor(y), beta**2
    counts = Confusion.hard(torch.tensor(hard), target, 3), Confusion.soft(torch.tensor(soft), target)
    column = share @ p
    limit = np.mean((1 + b2) * np.diag(p) * share / (b2 * share + column))
    # Hoeffding at 1 in 1000 for the nine means; F_beta,k moves by at most (1 + b2) / (b2 q_k + column) for each.
    off = math.sqrt(math.log(2 * 9 * 1000) / (2 * n * share.min()))
    slope = 3 * max((1 + b2) / (b2 * share + column))
    for c in counts:
        assert abs(metrics.fbeta(c, "macro", beta=beta).item() - limit) <= slope * off
    u = np.array([[np.sum((y == j) & (hard == k)) for k in range(3)] for j in range(3)])  # Eq. 8, from the counts U_j
    eq_8 = (1 + b2) * np.diag(u) / ((1 + b2) * np.diag(u) + u.sum(0) - np.diag(u) + b2 * (u.sum(1) - np.diag(u)))
    np.testing.assert_allclose(metrics.fbeta(counts[0], None, beta=beta).numpy(), eq_8, rtol=1e-12)


@pytest.mark.parametrize("metric", ["f1", "accuracy", "mcc"])
def test_east_5_4_parameters_that_optimise_the_soft_metric_tend_to_those_of_the_hard_one(metric):
    """A compact set of parameters (an offset to one class) on which the two largest outputs stay apart."""
    generator = torch.Generator().manual_seed(4)
    y = torch.randint(3, (300,), generator=generator)
    z = 2 * torch.nn.functional.one_hot(y, 3) + 1.5 * torch.randn(300, 3, dtype=torch.float64, generator=generator)
    offsets = torch.arange(-40, 41, dtype=torch.float64) * 0.1
    moved = torch.stack([z + torch.tensor([0.0, 0.0, 1.0]) * offset for offset in offsets])
    p = moved.softmax(2)
    top = p.topk(2, 2).values
    kept = ((top[..., 0] - top[..., 1]) > 0.002).all(0)  # bounded away from 0 for every parameter
    p, y = p[:, kept], y[kept]
    assert kept.sum() > 200
    score = metrics.resolve(metric)
    hard = torch.stack([score(Confusion.hard(each.argmax(1), y, 3)) for each in p])
    gaps, regrets = [], []
    for temperature in (0.2, 0.02, 0.002, 0.0005):
        step = partial(steps.annealed, temperature=temperature)
        soft = torch.stack([score(Confusion.soft(membership.dynamic(each, step), y)) for each in p])
        gaps.append((soft - hard).abs().max().item())  # uniform over the parameters
        regrets.append((hard.max() - hard[soft.argmax()]).item())
    assert gaps[0] > 0.05
    assert gaps == sorted(gaps, reverse=True)
    assert gaps[-1] < 0.002
    assert regrets[-1] <= 2 * gaps[-1]  # the optimum of the soft metric is one of the hard metric
    assert regrets[-1] == pytest.approx(0.0, abs=1e-12)


def population_and_samples(metric, sizes, repetitions=400):
    """The metric of a population's soft matrix, and of samples of each size."""
    generator = torch.Generator().manual_seed(5)
    z = 2 * torch.randn(20_000, 4, dtype=torch.float64, generator=generator)
    y = (z + torch.tensor([1.5, 0.5, 0.0, -1.0]) + torch.randn(z.shape, dtype=z.dtype, generator=generator)).argmax(1)
    g = membership.dynamic(z.softmax(1), partial(steps.annealed, temperature=0.1))
    score = metrics.resolve(metric)
    whole = score(Confusion.soft(g, y)).item()
    found = {}
    for n in sizes:
        draws = [torch.randint(len(y), (n,), generator=generator) for _ in range(repetitions)]
        found[n] = np.array([score(Confusion.soft(g[rows], y[rows])).item() for rows in draws])
    return whole, found


@pytest.mark.parametrize("metric", ["f1", "accuracy", "mcc", "precision", "recall"])
def test_east_5_7_and_5_9_batches_estimate_the_population_metric_at_the_rate_of_root_n(metric):
    """5.7: no bias in the limit. 5.9: deviations are O_p(1 / sqrt n), so sqrt(n) times their quantile stays put."""
    whole, found = population_and_samples(metric, (100, 400, 6400))
    bias = {n: abs(values.mean() - whole) for n, values in found.items()}
    noise = {n: 3.5 * values.std() / math.sqrt(len(values)) for n, values in found.items()}
    assert bias[6400] <= 0.002 + noise[6400]
    scaled = [math.sqrt(n) * np.quantile(np.abs(values - whole), 0.9) for n, values in found.items()]
    assert max(scaled) / min(scaled) < 1.6
    if metric == "accuracy":  # sum of d entries: d-Lipschitz in the largest one, so Thm 5.8 bounds the quantile
        for n, values in found.items():
            assert np.quantile(np.abs(values - whole), 0.9) <= 4 * math.sqrt(math.log(2 * 16 / 0.1) / (2 * n))


@given(p=units, tau=taus)
def test_annealed_at_0_2_is_linear_with_delta_0_2(p, tau):
    p = torch.tensor(p, dtype=torch.float64)
    a, b = steps.annealed(p, tau, temperature=0.2), steps.linear(p, tau, delta=0.2)
    assert a.item() == pytest.approx(b.item(), abs=1e-9)


@pytest.mark.parametrize("temperature", [0.05, 0.2, 0.4])
@pytest.mark.parametrize("metric", [m for m, t in WITH_AUROC if t == "binary"])
def test_two_classes_are_the_binary_form_in_value_and_gradient(metric, temperature):
    z, y = batch("multiclass", classes=2, seed=3)
    options = {"temperature": temperature, "average": "macro", "anchor": 0.5}
    if metric == "auroc":  # exact rankings share the value; their soft forms differ, by log-probabilities and by logits
        two, one = (
            metric_loss(z, y, metric, **options),
            metric_loss(z[:, 1] - z[:, 0], y, metric, task="binary", **options),
        )
        torch.testing.assert_close(two, one)
        options["threshold"] = [k / 20 for k in range(1, 20)]  # the area of soft counts, where gradients agree too
    two, slope = loss_and_gradient(z, y, metric, **options)
    one, gradient = loss_and_gradient(z[:, 1] - z[:, 0], y, metric, task="binary", **options)
    torch.testing.assert_close(two, one)
    torch.testing.assert_close(slope, torch.stack([-gradient, gradient], 1))
