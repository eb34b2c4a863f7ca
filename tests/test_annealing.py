"""Schedules: hand-worked traces, ends, and a state that goes through JSON and gives the same future."""

import json
import math
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from evalign import MetricLoss
from evalign.annealing import Geometric

losses = st.lists(st.sampled_from([0.1, 0.2, 0.3, 0.4, 0.5, math.nan, math.inf]), max_size=40)


def test_geometric_follows_a_hand_worked_trace():
    loss = MetricLoss("f1", temperature=0.1)
    schedule = Geometric(loss, start=0.2, rate=0.5, patience=2, max_stale=2, minimum=0.001)
    assert loss.temperature == 0.2
    trace = [
        # validation loss, cooled, temperature after it
        (0.9, False, 0.2),  # the first is a best
        (0.8, False, 0.2),
        (0.8, False, 0.2),  # no fall: 1 of 2
        (0.7, False, 0.2),  # a best: the count starts anew
        (0.75, False, 0.2),
        (0.71, True, 0.1),  # 2 of 2: cooled, overall best 0.7
        (0.9, False, 0.1),  # a new temperature starts from its own first value
        (0.85, False, 0.1),
        (0.86, False, 0.1),
        (0.85, True, 0.05),  # best here 0.85 is not below 0.7: 1 stale temperature
        (0.6, False, 0.05),
        (0.65, False, 0.05),
        (0.65, True, 0.025),  # 0.6 is a new overall best: none is stale
        (0.6, False, 0.025),  # equal is not below
        (0.61, False, 0.025),
        (0.62, True, 0.0125),  # 1 stale
        (0.7, False, 0.0125),
        (0.71, False, 0.0125),
    ]
    for value, cooled, temperature in trace:
        assert schedule.step(value) is cooled
        assert loss.temperature == pytest.approx(temperature)
        assert not schedule.finished
    assert schedule.step(0.72) is False  # 2 stale temperatures end it, and it does not cool once more
    assert schedule.finished
    assert loss.temperature == pytest.approx(0.0125)
    assert schedule.coolings == 4
    assert schedule.best == 0.6
    assert schedule.step(0.0) is False
    assert loss.temperature == pytest.approx(0.0125)


def test_geometric_cools_to_start_times_rate_to_the_k_and_stops_at_the_minimum():
    loss = MetricLoss("f1")
    schedule = Geometric(loss, start=0.2, rate=0.9, patience=1, max_stale=100, minimum=0.1)
    schedule.step(1.0)
    temperatures = []
    while not schedule.finished:
        if schedule.step(1.0):
            temperatures.append(loss.temperature)
            schedule.step(1.0)
    assert temperatures == pytest.approx([0.2 * 0.9**k for k in range(1, 7)])  # 0.2 * 0.9^7 is below 0.1
    assert all(t >= 0.1 for t in temperatures)


def test_nan_losses_are_never_a_best_and_count_as_waiting():
    loss = MetricLoss("f1")
    schedule = Geometric(loss, rate=0.5, patience=2, max_stale=2)
    assert [schedule.step(math.nan), schedule.step(math.nan)] == [False, True]
    assert schedule.best is None
    assert schedule.step(math.nan) is False
    assert schedule.step(0.5) is False  # a number after nan is a best
    assert [schedule.step(math.nan), schedule.step(math.nan)] == [False, True]
    assert schedule.best == 0.5
    for _ in range(4):
        schedule.step(math.nan)
    assert schedule.finished


@given(values=losses, cut=st.integers(0, 40), patience=st.integers(1, 3), max_stale=st.integers(1, 3))
def test_a_state_through_json_gives_the_same_future(values, cut, patience, max_stale):
    def make():
        loss = SimpleNamespace(temperature=None)
        return Geometric(loss, rate=0.7, patience=patience, max_stale=max_stale, minimum=0.01), loss

    (whole, loss), (resumed, other) = make(), make()
    for value in values[:cut]:
        whole.step(value)
    resumed.load_state_dict(json.loads(json.dumps(whole.state_dict())))
    assert other.temperature == loss.temperature
    for value in values[cut:]:
        assert whole.step(value) is resumed.step(value)
        assert (whole.finished, loss.temperature) == (resumed.finished, other.temperature)
    assert whole.state_dict() == resumed.state_dict()


def test_another_schedules_state_is_refused():
    loss = MetricLoss("f1")
    with pytest.raises(ValueError, match="from another schedule"):
        Geometric(loss).load_state_dict({"taken": 0, "temperature": 0.2})
    state = Geometric(loss).state_dict()
    del state["best"]
    with pytest.raises(ValueError, match="best"):
        Geometric(loss).load_state_dict(state)


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda loss: Geometric(loss, start=0.5), "temperature"),
        (lambda loss: Geometric(loss, rate=1.0), "rate"),
        (lambda loss: Geometric(loss, patience=0), "patience"),
        (lambda loss: Geometric(loss, max_stale=0), "max_stale"),
        (lambda loss: Geometric(loss, minimum=0.3), "minimum"),
        (lambda loss: Geometric(loss, patience=1.5), "patience must be a whole number"),
        (lambda loss: Geometric(loss, start=0), "temperature must lie in"),
        (lambda loss: Geometric(nn.CrossEntropyLoss()), "of a MetricLoss, got CrossEntropyLoss"),
        (lambda loss: Geometric(MetricLoss("f1", step="linear")), "with step='annealed', got step='linear'"),
        (lambda loss: Geometric(MetricLoss("f1", step=lambda p, t: p)), "with step='annealed', got step=<function"),
    ],
)
def test_wrong_options_are_refused(make, name):
    with pytest.raises((TypeError, ValueError), match=name):
        make(MetricLoss("f1"))
