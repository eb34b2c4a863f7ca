"""CIFAR-10, and the two binary tasks that BtG derives from it: Transportation and Frog."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from evalign.checks import check_choice
from evalign_papers.datasets.dataset import Card, DataError, Dataset, File, Protocol, Version
from evalign_papers.datasets.folders import Found, Store, reading
from evalign_papers.datasets.image_files import Pixels, read_npz

CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
TRANSPORT, FROG = ("airplane", "automobile", "ship", "truck"), ("frog",)
PARTS = ("batch1", "batch2", "batch3", "batch4", "batch5", "test")  # in the order of the rows
PART_ROWS, SIDE = 10000, 32
RECORD = 1 + 3 * SIDE * SIDE  # a label, then red, green and blue, row by row
NPZ = {  # bytes and sha256
    "batch1": (17259268, "d5582bd8e573ba7f016eddcc11fbc0b116480d31108b5fceade5c0a815de34e7"),
    "batch2": (17308504, "65749527cddcb81d6f0c4db7751b04fad20bc15a048e2d90ca81366d90bf8e54"),
    "batch3": (17309185, "fba642618aa65253f1d7b895573d938befe0a5384b6270cf44ea15b7cab41473"),
    "batch4": (17280982, "1fb59fe66d9719a110e0b7ab08a0cb0e3edfb44790396f2579ff8df07b4a8a24"),
    "batch5": (17249577, "eaeedc61731c79170883d408a1ec9f03e5a954befc822543a9a9108e0c2321d8"),
    "test": (17290912, "fe5c334863fa4919c88472fc2c9d5f934c8748de0aecc2cac81ff235d0b66a9e"),
}
MD5 = {  # of the binary version, as published
    "batch1": "5dd7e06a14cb22eb9f671a540d1b7c25",
    "batch2": "5ea93a67294ea407fff1d09f752e9692",
    "batch3": "942cd6a4bcdd0dd3c604fbe906cb4421",
    "batch4": "ae636b3ba5c66a11e91e8cb52e771fcb",
    "batch5": "53f37980c15c3d472c316c40844f3f0d",
    "test": "803d5f7f4d78ea53de84dbe85f74fb6d",
}
PICKLED = "it is pickled, and a pickle can run anything: get the binary version, cifar-10-binary.tar.gz, and unpack it"


def _binary_name(part: str) -> str:
    return "test_batch.bin" if part == "test" else f"data_batch_{part[-1]}.bin"


CARD = Card(
    name="cifar10",
    title="CIFAR-10",
    kind="images",
    source="https://www.cs.toronto.edu/~kriz/cifar.html",
    citation="Krizhevsky, Learning multiple layers of features from tiny images, 2009",
    licence="none stated; cite the report",
    rows=60000,
    num_classes=10,
    counts=dict.fromkeys(CLASSES, 6000),
    versions=(
        Version(
            "npz",
            tuple(File(f"cifar10_{part}.npz", *facts) for part, facts in NPZ.items()),
            ("", "cifar10"),
        ),
        Version(
            "binary",
            tuple(File(_binary_name(part), PART_ROWS * RECORD, md5=md5) for part, md5 in MD5.items()),
            ("cifar-10-batches-bin", "", "cifar10/cifar-10-batches-bin"),
        ),
    ),
    refused={
        "cifar-10-binary.tar.gz": "it is packed: unpack it there with tar xzf cifar-10-binary.tar.gz",
        "cifar-10-batches-py": PICKLED,
        "cifar-10-python.tar.gz": PICKLED,
        "data_batch_1": PICKLED,
    },
    notes=("The five training batches, then the test batch, in their order.", "EAST has a random split of 64/16/20."),
)
BINARY_NOTES = (
    "BtG splits 67/17/17, which is 40000, 10000 and the 10000 of the test batch: the paper protocol tests on that.",
)
TRANSPORT_CARD = replace(
    CARD,
    name="cifar10_transportation",
    title="CIFAR-10-Transportation",
    num_classes=2,
    counts={"other": 36000, "transportation": 24000},
    paper_test="official",
    notes=BINARY_NOTES,
)
FROG_CARD = replace(TRANSPORT_CARD, name="cifar10_frog", title="CIFAR-10-Frog", counts={"other": 54000, "frog": 6000})


def load(store: Store, protocol: Protocol, *, parts: Sequence[str] | None = None) -> Dataset:
    """`parts` selects from batch1 … batch5 and test; only these files are needed."""
    X, y, test = _read(CARD, store, parts)
    return Dataset(_card(CARD, parts), X, y, CLASSES, protocol, official_test=test)


def load_transportation(store: Store, protocol: Protocol, *, parts: Sequence[str] | None = None) -> Dataset:
    return _yes_no(TRANSPORT_CARD, TRANSPORT, store, protocol, parts)


def load_frog(store: Store, protocol: Protocol, *, parts: Sequence[str] | None = None) -> Dataset:
    return _yes_no(FROG_CARD, FROG, store, protocol, parts)


def _yes_no(
    card: Card, positive: tuple[str, ...], store: Store, protocol: Protocol, parts: Sequence[str] | None
) -> Dataset:
    X, y, test = _read(card, store, parts)
    yes = np.isin(y, [CLASSES.index(name) for name in positive]).astype(np.int64)
    classes = tuple(card.counts)
    return Dataset(_card(card, parts), X, yes, classes, protocol, official_test=test)


def _card(card: Card, parts: Sequence[str] | None) -> Card:
    """The card of some of the files, whose class counts are not known."""
    return card if parts is None else replace(card, rows=PART_ROWS * len(parts), counts={})


def _read(card: Card, store: Store, parts: Sequence[str] | None) -> tuple[Pixels, NDArray[np.int64], NDArray[np.bool_]]:
    chosen = list(PARTS if parts is None else parts)
    if not chosen or len(set(chosen)) < len(chosen):
        raise DataError(f"parts must name some of {', '.join(PARTS)}, each once, got {', '.join(chosen) or 'none'}")
    for part in chosen:
        check_choice("parts", part, PARTS)
    at = [PARTS.index(part) for part in chosen]
    versions = tuple(replace(version, files=tuple(version.files[i] for i in at)) for version in card.versions)
    found = store.get(replace(card, versions=versions))
    X = np.empty((PART_ROWS * len(chosen), SIDE, SIDE, 3), dtype=np.uint8)
    y = np.empty(len(X), dtype=np.int64)
    for i, path in enumerate(found.paths):
        rows = slice(i * PART_ROWS, (i + 1) * PART_ROWS)
        X[rows], y[rows] = _read_part(found, path)
    return X, y, np.repeat([part == "test" for part in chosen], PART_ROWS)


def _read_part(found: Found, path: Path) -> tuple[Pixels, NDArray[np.int64]]:
    if found.version.form == "npz":
        X, y, _ = read_npz(path)
    else:
        with reading(path):
            records = np.fromfile(path, dtype=np.uint8).reshape(-1, RECORD)
        X, y = records[:, 1:].reshape(-1, 3, SIDE, SIDE).transpose(0, 2, 3, 1), records[:, 0].astype(np.int64)
    if X.shape != (PART_ROWS, SIDE, SIDE, 3) or y.shape != (PART_ROWS,) or y.max() >= len(CLASSES):
        raise DataError(
            f"{path} must hold {PART_ROWS} images of {SIDE} x {SIDE} with labels 0 to 9, it has shape {X.shape}; "
            "it is damaged: download it again"
        )
    return X, y
