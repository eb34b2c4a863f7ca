"""Steps: five points, BtG Thm 4.1 for every threshold, T = 0.4, thresholds of every form."""

from itertools import pairwise

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from evalign import steps
from reference import loops

taus = st.floats(1e-6, 1 - 1e-6)
probabilities = st.floats(0, 1)
TAUS = [1e-6, 0.01, 0.1, 0.3, 0.5, 0.7, 0.9, 0.99, 1 - 1e-6]
STEPS = [("linear", {"delta": d}) for d in (0.0, 0.1, 0.2, 0.5)]
STEPS += [("annealed", {"temperature": t}) for t in (1e-3, 0.05, 0.2, 0.35)]


def points_of(name, options, tau):
    return (loops.linear_points if name == "linear" else loops.annealed_points)(tau, *options.values())


@pytest.mark.parametrize("tau", TAUS)
@pytest.mark.parametrize(("name", "options"), STEPS)
def test_the_five_points_are_hit_exactly(name, options, tau):
    x, y = zip(*points_of(name, options, tau), strict=True)
    values = getattr(steps, name)(torch.tensor(x, dtype=torch.float64), tau, **options)
    assert values[0] == 0
    assert values[2] == 0.5
    assert values[4] == 1
    # Next to an end a breakpoint is known only to rounding, which the slope magnifies.
    slope = max((y1 - y0) / (x1 - x0) for (x0, y0), (x1, y1) in pairwise(points_of(name, options, tau)))
    assert values.tolist() == pytest.approx(y, abs=1e-12 + 4e-16 * slope)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("tau", TAUS)
@pytest.mark.parametrize(("name", "options"), STEPS)
@pytest.mark.parametrize("as_tensor", [False, True])
def test_ends_are_exactly_0_and_1_and_the_threshold_a_half(name, options, tau, dtype, as_tensor):
    threshold = torch.tensor(tau, dtype=dtype) if as_tensor else tau
    p = torch.stack([torch.tensor(x, dtype=dtype) for x in (0.0, tau, 1.0)])
    values = getattr(steps, name)(p, threshold, **options)
    assert values.dtype == dtype
    assert values[0] == 0
    assert values[2] == 1
    if as_tensor or dtype == torch.float64:
        assert values[1] == 0.5
    elif 0.1 <= tau <= 0.9:  # nearer to an end, p in float32 is not the number tau
        assert values[1].item() == pytest.approx(0.5, abs=1e-3)


@given(p=probabilities, tau=taus, delta=st.floats(0, 0.5))
def test_linear_is_the_slow_loop(p, tau, delta):
    value = steps.linear(torch.tensor(p, dtype=torch.float64), tau, delta=delta).item()
    assert value == pytest.approx(loops.linear(p, tau, delta), abs=1e-8)


@given(p=probabilities, tau=taus, temperature=st.floats(1e-3, 0.399))
def test_annealed_is_the_slow_loop(p, tau, temperature):
    value = steps.annealed(torch.tensor(p, dtype=torch.float64), tau, temperature=temperature).item()
    assert value == pytest.approx(loops.annealed(p, tau, temperature), abs=1e-6)


@given(p=probabilities, tau=taus, k=st.floats(0.1, 100))
def test_sigmoid_is_the_slow_loop(p, tau, k):
    value = steps.sigmoid(torch.tensor(p, dtype=torch.float64), tau, k=k).item()
    assert value == pytest.approx(loops.sigmoid_step(p, tau, k), rel=1e-9)


def test_sigmoid_misses_the_ends_and_hard_counts_a_tie_as_positive():
    assert steps.sigmoid(torch.zeros(()), 0.1, k=10.0) > 0.2
    assert steps.hard(torch.tensor([0.3, 0.5, 0.7], dtype=torch.float64), 0.5).tolist() == [0, 1, 1]


@pytest.mark.parametrize("tau", TAUS)
@pytest.mark.parametrize("temperature", [0.05, 0.2, 0.35, 0.4])
def test_thresholds_as_number_tensor_and_rows_agree(tau, temperature):
    p = torch.linspace(0, 1, 303, dtype=torch.float64).reshape(3, 101)
    number = steps.annealed(p, tau, temperature=temperature)
    forms = [torch.tensor(tau, dtype=torch.float64), torch.full((3, 1), tau, dtype=torch.float64)]
    for threshold in [*forms, torch.full((3, 101), tau, dtype=torch.float64)]:
        torch.testing.assert_close(steps.annealed(p, threshold, temperature=temperature), number)
        tensor = torch.tensor(temperature, dtype=torch.float64)
        torch.testing.assert_close(steps.annealed(p, threshold, temperature=tensor), number)


def test_rows_have_their_own_thresholds():
    p = torch.full((3, 1), 0.4, dtype=torch.float64)
    tau = torch.tensor([[0.2], [0.4], [0.8]], dtype=torch.float64)
    expected = [loops.linear(0.4, t, 0.1) for t in (0.2, 0.4, 0.8)]
    assert steps.linear(p, tau, delta=0.1).flatten().tolist() == pytest.approx(expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("tau", TAUS)
def test_at_temperature_0_4_value_and_gradient_are_finite_even_to_the_threshold(tau, dtype):
    p = torch.tensor([0, tau / 2, tau, (1 + tau) / 2, 1], dtype=dtype, requires_grad=True)
    threshold = torch.full((5,), tau, dtype=dtype, requires_grad=True)
    temperature = torch.tensor(0.4, dtype=torch.float64)
    values = steps.annealed(p, threshold, temperature=temperature)
    values.sum().backward()
    assert ((values >= 0) & (values <= 1)).all()
    assert (values.diff() >= 0).all()
    assert p.grad.isfinite().all()
    assert (p.grad >= 0).all()
    assert threshold.grad.isfinite().all()
    # Where the outer points meet their neighbours the end belongs to the middle line (EAST Eq. 4).
    if tau == 0.5:
        assert values[0].item() == pytest.approx(0.4)
        assert values[4].item() == pytest.approx(0.6)


@given(p=st.floats(0.01, 0.99), tau=st.floats(0.05, 0.95), temperature=st.floats(0.01, 0.39))
@example(p=0.3, tau=0.3, temperature=0.2)
def test_gradients_to_p_threshold_and_temperature_are_difference_quotients(p, tau, temperature):
    at = [torch.tensor(x, dtype=torch.float64, requires_grad=True) for x in (p, tau, temperature)]
    steps.annealed(at[0], at[1], temperature=at[2]).backward()
    eps = 1e-7
    for i, x in enumerate(at):
        sides = []
        for sign in (-1, 1):
            moved = [p, tau, temperature]
            moved[i] += sign * eps
            sides.append((loops.annealed(*moved) - loops.annealed(p, tau, temperature)) / (sign * eps))
        low, high = sorted(sides)  # on a kink any slope between those of its sides will do
        assert low - 1e-4 * (1 + abs(low)) <= x.grad.item() <= high + 1e-4 * (1 + abs(high))


@pytest.mark.parametrize("step", [steps.linear, steps.annealed, steps.sigmoid])
def test_a_nan_stays_a_nan(step):
    assert step(torch.tensor([float("nan"), 0.5]), 0.5).isnan().tolist() == [True, False]
