"""Darknets by their printed layer tables, images by a loop over them, graphs by their symmetries."""

from itertools import combinations, permutations

import numpy as np
import pytest
import torch
from torch import nn

from evalign_papers.networks import PairNetwork, Pictures, darknet19, tiny_darknet
from evalign_papers.networks.graph import pair_network
from evalign_papers.networks.image_input import channel_statistics, moved

# Filters, size and output of each layer as printed for 224 x 224 images (YOLO9000, Table 6), typed in by hand.
PRINTED_19 = """
conv 32 3 224, pool 112, conv 64 3 112, pool 56, conv 128 3 56, conv 64 1 56, conv 128 3 56, pool 28, conv 256 3 28,
conv 128 1 28, conv 256 3 28, pool 14, conv 512 3 14, conv 256 1 14, conv 512 3 14, conv 256 1 14, conv 512 3 14,
pool 7, conv 1024 3 7, conv 512 1 7, conv 1024 3 7, conv 512 1 7, conv 1024 3 7, conv 1000 1 7
"""
# The same of Tiny Darknet, as its page lists it.
PRINTED_TINY = """
conv 16 3 224, pool 112, conv 32 3 112, pool 56, conv 16 1 56, conv 128 3 56, conv 16 1 56, conv 128 3 56, pool 28,
conv 32 1 28, conv 256 3 28, conv 32 1 28, conv 256 3 28, pool 14, conv 64 1 14, conv 512 3 14, conv 64 1 14,
conv 512 3 14, conv 128 1 14, conv 1000 1 14
"""


def table(printed: str) -> list[list[str]]:
    return [line.split() for line in printed.replace("\n", " ").split(",")]


@pytest.mark.parametrize(("make", "printed"), [(darknet19, PRINTED_19), (tiny_darknet, PRINTED_TINY)])
def test_parameters_are_those_of_the_printed_layers(make, printed):
    width, expected = 3, 0
    convolutions = [(int(filters), int(kernel)) for kind, *rest in table(printed) if kind == "conv"
                    for filters, kernel, _ in [rest]]  # fmt: skip
    for filters, kernel in convolutions:
        last = filters == 1000
        expected += width * filters * kernel**2 + (1000 if last else 2 * filters)  # a bias, or batch norm's two
        width = filters
    assert sum(p.numel() for p in make(1000).parameters()) == expected


@pytest.mark.parametrize(("make", "printed"), [(darknet19, PRINTED_19), (tiny_darknet, PRINTED_TINY)])
def test_shapes_are_the_printed_ones(make, printed):
    """At 32 x 32, a seventh of the printed 224 x 224, every side is a seventh too."""
    network, seen = make(1000).eval(), []
    for module in network:
        if isinstance(module, (nn.Conv2d, nn.MaxPool2d)):
            module.register_forward_hook(lambda m, _args, out: seen.append((type(m), tuple(out.shape[1:]))))
    with torch.no_grad():
        assert network(torch.zeros(1, 3, 32, 32)).shape == (1, 1000)
    width, expected = 3, []
    for kind, *rest in table(printed):
        width = int(rest[0]) if kind == "conv" else width
        side = int(rest[-1]) // 7
        expected.append((nn.Conv2d if kind == "conv" else nn.MaxPool2d, (width, side, side)))
    assert seen == expected


def test_every_convolution_but_the_last_is_normalised_and_leaky():
    layers = list(darknet19(10))
    hidden = [i for i, layer in enumerate(layers) if isinstance(layer, nn.Conv2d)][:-1]
    assert len(hidden) == 18
    for i in hidden:
        assert layers[i].bias is None
        assert isinstance(layers[i + 1], nn.BatchNorm2d)
        assert layers[i + 2].negative_slope == 0.1
    assert layers[-3].bias is not None


def some_pictures(n: int = 6, height: int = 9, width: int = 7) -> torch.Tensor:
    return torch.randint(0, 256, (n, height, width, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


def test_evaluation_only_normalises():
    x, mean, std = some_pictures(), (0.1, 0.5, 0.7), (0.2, 0.3, 0.4)
    found = Pictures(mean, std).eval()(x)
    expected = (x.numpy() / 255 - np.array(mean)) / np.array(std)
    np.testing.assert_allclose(found.permute(0, 2, 3, 1).numpy(), expected, atol=1e-5)
    assert found.is_contiguous(memory_format=torch.channels_last)


def test_every_augmented_picture_is_a_window_of_its_reflected_self():
    """numpy's `reflect` padding, all windows of it and their mirror images: each image must be one of them."""
    x, border = some_pictures(), 2
    torch.manual_seed(3)
    found, windows = moved(x, border).numpy(), set()
    for original, ours in zip(x.numpy(), found, strict=True):
        padded = np.pad(original, ((border, border), (border, border), (0, 0)), mode="reflect")
        candidates = {}
        for i in range(2 * border + 1):
            for j in range(2 * border + 1):
                window = padded[i : i + 9, j : j + 7]
                candidates[window.tobytes()] = (i, j, "plain")
                candidates[window[:, ::-1].tobytes()] = (i, j, "mirrored")
        assert ours.tobytes() in candidates
        windows.add(candidates[ours.tobytes()])
    assert len(windows) > 1  # each image has its own
    assert {kind for _, _, kind in windows} == {"plain", "mirrored"}


def test_all_shifts_and_both_mirrorings_happen_equally_often():
    ramp = (10 * torch.arange(7)[:, None] + torch.arange(7)).to(torch.uint8)[..., None].expand(7, 7, 3)
    torch.manual_seed(0)
    found = moved(ramp.expand(6000, 7, 7, 3), 1)
    centre, right = found[:, 3, 3, 0].int(), found[:, 3, 4, 0].int()
    keys = torch.stack([centre, right - centre], 1)
    values, counts = keys.unique(dim=0, return_counts=True)
    assert len(values) == 18  # nine shifts, mirrored or not
    assert counts.min() > 6000 / 18 - 5 * (6000 / 18) ** 0.5


def test_augmentation_is_decided_by_the_seed_and_only_in_training():
    x, layer = some_pictures(), Pictures((0.5,) * 3, (0.2,) * 3, border=2)
    torch.manual_seed(1)
    first = layer(x)
    torch.manual_seed(1)
    assert torch.equal(layer(x), first)
    assert not torch.equal(layer(x), first)
    plain = Pictures((0.5,) * 3, (0.2,) * 3, augment=False)
    assert torch.equal(plain(x), layer.eval()(x))


def test_statistics_are_numpys():
    x = some_pictures(11)
    mean, std = channel_statistics(x)
    np.testing.assert_allclose(mean, x.numpy().reshape(-1, 3).mean(0) / 255)
    np.testing.assert_allclose(std, x.numpy().reshape(-1, 3).std(0) / 255)
    assert channel_statistics(torch.zeros(2, 3, 3, 3, dtype=torch.uint8))[1] == [1 / 255] * 3


def test_pictures_that_are_none_are_refused():
    with pytest.raises(ValueError, match="must be uint8"):
        Pictures((0.5,) * 3, (0.2,) * 3)(torch.zeros(2, 8, 8, 3))
    with pytest.raises(ValueError, match="larger than the border"):
        moved(some_pictures(2, 4, 4), 4)


def graphs(people: int = 5) -> tuple[PairNetwork, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    network = PairNetwork(people, 3, 2, hidden=8, rounds=2).double()
    return network, torch.randn(4, people, 3).double(), torch.randn(4, people, people, 2).double()


def as_rows(nodes: torch.Tensor, between: torch.Tensor, ends: list[tuple[int, int]]) -> torch.Tensor:
    pairs = torch.stack([between[:, i, j] for i, j in ends], 1)
    return torch.cat([nodes.flatten(1), pairs.flatten(1)], 1)


def test_permuting_people_permutes_pairs_and_swapping_ends_changes_nothing():
    network, nodes, between = graphs()
    between = between + between.transpose(1, 2)
    ends = list(combinations(range(5), 2))
    expected = network(as_rows(nodes, between, ends))
    assert expected.std() > 0.01  # pairs differ
    for order in list(permutations(range(5)))[1::17]:
        at = torch.tensor(order)
        found = network(as_rows(nodes[:, at], between[:, at][:, :, at], ends))
        # Pair (a, b) of the new frame is the pair {order[a], order[b]} of the old one, whichever of the two is smaller.
        places = [ends.index((min(order[a], order[b]), max(order[a], order[b]))) for a, b in ends]
        torch.testing.assert_close(found, expected[:, places])


def test_a_pair_hears_of_the_others():
    """Message passing: a third person's place changes what is said of two."""
    network, nodes, between = graphs()
    ends = list(combinations(range(5), 2))
    before = network(as_rows(nodes, between, ends))
    nodes = nodes.clone()
    nodes[:, 4] += 1
    assert (network(as_rows(nodes, between, ends))[:, 0] - before[:, 0]).abs().min() > 1e-6


def test_sums_of_messages_are_those_of_a_loop():
    network, nodes, between = graphs(4)
    ends = list(combinations(range(4), 2))
    with torch.no_grad():
        h = network.inlet(nodes)
        for message, update in zip(network.messages, network.updates, strict=True):
            heard = torch.zeros_like(h)
            for i, j in ends:
                heard[:, i] += message(torch.cat([h[:, i], h[:, j], between[:, i, j]], -1))
                heard[:, j] += message(torch.cat([h[:, j], h[:, i], between[:, i, j]], -1))
            h = h + update(torch.cat([h, heard], -1))
        expected = [
            (network.affinity(torch.cat([h[:, i], h[:, j], between[:, i, j]], -1))
             + network.affinity(torch.cat([h[:, j], h[:, i], between[:, i, j]], -1))) / 2
            for i, j in ends
        ]  # fmt: skip
        torch.testing.assert_close(network(as_rows(nodes, between, ends)), torch.cat(expected, 1))


def test_rows_that_hold_no_graph_are_refused():
    with pytest.raises(ValueError, match="6 k \\+ 15 numbers"):
        pair_network(6, 40, (16,))
