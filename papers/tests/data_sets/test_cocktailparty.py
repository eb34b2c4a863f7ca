"""CocktailParty: pairs and graphs of people."""

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from miniature_data import (
    put_card,
    with_files,
)

from evalign_papers.datasets import DataError, load
from evalign_papers.datasets.sources import (
    cocktailparty,
)


def people(frames=40, seed=0):
    """Frames as cocktailparty.parquet has them."""
    rng = np.random.default_rng(seed)
    index = pd.MultiIndex.from_product([range(frames), range(1, 7)], names=["frame", "person"])
    frame = pd.DataFrame(rng.normal(size=(len(index), 3)), columns=["x", "y", "theta"], index=index).reset_index()
    return frame.assign(group=rng.integers(0, 3, len(frame)))


def slow_pairs(frame, swapped):
    """One pair after the other, in plain Python."""
    rows = []
    for number, six in frame.groupby("frame"):
        six = six.set_index("person")
        for i in range(1, 7):
            for j in range(i + 1, 7):
                a, b = (j, i) if swapped[len(rows)] else (i, j)
                axis = complex(six.x[a] - six.x[b], six.y[a] - six.y[b])
                middle = complex(six.x[a] + six.x[b], six.y[a] + six.y[b]) / 2
                row = []
                for k in [a, b, *sorted({1, 2, 3, 4, 5, 6} - {a, b})]:
                    z = (complex(six.x[k], six.y[k]) - middle) * axis.conjugate() / abs(axis)
                    angle = np.exp(1j * six.theta[k]) * axis.conjugate() / abs(axis)
                    row += [z.real, *([] if k in (a, b) else [z.imag]), angle.real, angle.imag]
                rows.append([*row, six.group[a] == six.group[b], number, a, b])
    return np.array(rows, dtype=np.float64)


def test_pairs_are_those_of_a_slow_loop():
    frame = people(8)
    table = cocktailparty.pairs_of_frames(frame.sample(frac=1, random_state=0))
    expected = slow_pairs(frame, np.random.default_rng(0).random(8 * 15) < 0.5)
    np.testing.assert_allclose(table.to_numpy(dtype=np.float64), expected, atol=1e-6)


def test_pairs_do_not_depend_on_where_the_room_is():
    frame = people(8)
    z = (frame.x + 1j * frame.y) * np.exp(0.7j) + (3 - 2j)
    moved = frame.assign(x=z.to_numpy().real, y=z.to_numpy().imag, theta=frame.theta + 0.7)
    left, right = (cocktailparty.pairs_of_frames(each)[list(cocktailparty.FEATURES)] for each in (frame, moved))
    np.testing.assert_allclose(left, right, atol=1e-5)


@pytest.fixture
def party(tmp_path, monkeypatch):
    """Both files in miniature."""
    frame = people()
    pairs = cocktailparty.pairs_of_frames(frame)
    frame.to_parquet(tmp_path / "cocktailparty.parquet")
    pairs.to_parquet(tmp_path / "cocktailparty_pairs.parquet")
    same = int(pairs["same_group"].sum())
    counts = {cocktailparty.DIFFERENT: 600 - same, cocktailparty.SAME: same}
    paths = [tmp_path / "cocktailparty.parquet", tmp_path / "cocktailparty_pairs.parquet"]
    put_card(monkeypatch, cocktailparty, rows=600, counts=counts, versions=with_files(cocktailparty.CARD, *paths))
    graph = replace(cocktailparty.GRAPH_CARD, rows=40, counts=counts)
    monkeypatch.setattr(cocktailparty, "GRAPH_CARD", replace(graph, versions=with_files(graph, *paths)))
    return tmp_path


def test_cocktailparty_pairs(party):
    honest, paper = load("cocktailparty", party), load("cocktailparty", party, "paper")
    assert honest.X.shape == (600, 22)
    assert honest.classes[1] == "same group"
    assert paper.classes[1] == "different group"
    np.testing.assert_array_equal(honest.y, 1 - paper.y)
    np.testing.assert_array_equal(honest.groups, np.repeat(np.arange(40), 15))
    np.testing.assert_array_equal(load("cocktailparty", party, positive="different").y, paper.y)
    np.testing.assert_array_equal(load("cocktailparty", party, block=4).groups, np.repeat(np.arange(10), 60))
    (party / "cocktailparty_pairs.parquet").unlink()
    derived = load("cocktailparty", party)
    pd.testing.assert_frame_equal(derived.X, honest.X)
    np.testing.assert_array_equal(derived.y, honest.y)
    with pytest.raises(ValueError, match="block must lie in"):
        load("cocktailparty", party, block=9)
    with pytest.raises(ValueError, match="positive must be one of same, different"):
        load("cocktailparty", party, positive="sme")


def test_cocktailparty_graphs(party):
    graphs, pairs = load("cocktailparty_graph", party), load("cocktailparty", party)
    assert graphs.X.nodes.shape == (40, 6, 4)
    assert graphs.X.pairs.shape == (40, 15, 1)
    np.testing.assert_array_equal(graphs.y.ravel(), pairs.y)
    frame = people()
    first, second = graphs.X.index[7]
    at = frame[frame.frame == 11].reset_index()
    assert graphs.X.pairs[11, 7, 0] == pytest.approx(
        np.hypot(at.x[first] - at.x[second], at.y[first] - at.y[second]), rel=1e-6
    )
    np.testing.assert_allclose(
        graphs.X.nodes[11, 2], [at.x[2], at.y[2], np.cos(at.theta[2]), np.sin(at.theta[2])], rtol=1e-6
    )
    part, y = graphs.take(np.array([3, 1]))
    np.testing.assert_array_equal(part.nodes[0], graphs.X.nodes[3])
    np.testing.assert_array_equal(y, graphs.y[[3, 1]])


def test_a_frame_that_lacks_a_person_is_told(party):
    people()[:-1].to_parquet(party / "cocktailparty.parquet")
    with pytest.raises(DataError, match="every frame must have the people 1 to 6 once"):
        load("cocktailparty_graph", party, verify=False)
