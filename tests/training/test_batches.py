import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from evalign.training.batches import Batches


@given(st.integers(1, 300), st.integers(1, 100), st.integers(0, 5))
def test_an_epoch_is_a_permutation_in_nearly_equal_batches(n: int, batch_size: int, seed: int):
    batches = list(Batches(n, batch_size, seed=seed).epoch())
    assert sorted(torch.cat(batches).tolist()) == list(range(n))
    sizes = [len(batch) for batch in batches]
    assert max(sizes) - min(sizes) <= 1
    assert len(sizes) == max(1, round(n / batch_size))


def test_the_same_seed_gives_the_same_epochs_and_epochs_differ():
    first, second = Batches(50, 10, seed=3), Batches(50, 10, seed=3)
    orders = [(first.order(), second.order()) for _ in range(3)]
    assert all(torch.equal(a, b) for a, b in orders)
    assert not torch.equal(orders[0][0], orders[1][0])


@pytest.mark.parametrize(("n", "size"), [(0, 4), (4, 0)])
def test_nothing_to_batch_is_refused(n: int, size: int):
    with pytest.raises(ValueError, match="at least 1"):
        Batches(n, size, seed=0)


@pytest.mark.parametrize(("n", "size"), [(10, 3), (7, 7), (100, 32), (5, 9)])
def test_lengths_are_those_of_the_batches_of_an_epoch(n, size):
    batches = Batches(n, size, seed=1)
    assert batches.lengths == [len(rows) for rows in batches.epoch()]
