"""CIFAR-10, Caltech-256 and Caltech-101 from their files."""

import sys
from dataclasses import replace

import numpy as np
import pytest
from miniature_data import (
    put_card,
    sentence,
    with_files,
)

from evalign_papers.datasets import DataError, load
from evalign_papers.datasets.image_files import read_folder, read_npz, write_npz
from evalign_papers.datasets.sources import (
    caltech101,
    caltech256,
    cifar10,
)


def pictures(n, side=32, seed=0):
    rng = np.random.default_rng(seed)
    return rng.integers(0, 256, (n, side, side, 3), dtype=np.uint8), np.arange(n, dtype=np.uint8) % 10


@pytest.mark.parametrize("side", [1, 5, 32])
def test_npz_files_give_back_what_was_written(side, tmp_path):
    X, y = pictures(4, side)
    write_npz(tmp_path / "x.npz", X, y, classes=np.array(["a", "b"]))
    again, labels, more = read_npz(tmp_path / "x.npz", ("classes",))
    np.testing.assert_array_equal(again, X)
    np.testing.assert_array_equal(labels, y)
    assert more["classes"].tolist() == ["a", "b"]


def test_npz_files_are_decoded_as_their_readme_says(tmp_path):
    """The loader that comes with the files, against ours."""
    X, y = pictures(6)
    write_npz(tmp_path / "x.npz", X, y)

    def summed(a):
        return np.cumsum(np.cumsum(a, 1, dtype=np.uint8), 2, dtype=np.uint8)

    with np.load(tmp_path / "x.npz") as z:
        green = summed(z["g"])
        expected = np.stack([summed(z["rg"]) + green, green, summed(z["bg"]) + green], -1)
    np.testing.assert_array_equal(expected, X)
    np.testing.assert_array_equal(read_npz(tmp_path / "x.npz")[0], X)


def test_a_pickle_in_an_npz_file_is_refused(tmp_path):
    np.savez(tmp_path / "x.npz", g=np.array([{"a": 1}], dtype=object))
    with pytest.raises(DataError) as error:
        read_npz(tmp_path / "x.npz")
    assert "x.npz cannot be read" in sentence(error)


@pytest.fixture
def cifar(tmp_path, monkeypatch):
    """Six parts of twenty images, as npz files and in the binary version."""
    monkeypatch.setattr(cifar10, "PART_ROWS", 20)
    X, y = pictures(120)
    (tmp_path / "npz").mkdir()
    (tmp_path / "bin" / "cifar-10-batches-bin").mkdir(parents=True)
    paths = []
    for i, part in enumerate(cifar10.PARTS):
        rows = slice(20 * i, 20 * (i + 1))
        write_npz(tmp_path / "npz" / f"cifar10_{part}.npz", X[rows], y[rows])
        # A record is a label, then all of red, all of green, all of blue.
        records = b"".join(
            bytes([label]) + x.transpose(2, 0, 1).tobytes() for x, label in zip(X[rows], y[rows], strict=True)
        )
        path = tmp_path / "bin" / "cifar-10-batches-bin" / cifar10._binary_name(part)
        path.write_bytes(records)
        paths += [tmp_path / "npz" / f"cifar10_{part}.npz", path]
    versions = with_files(cifar10.CARD, *paths)
    put_card(monkeypatch, cifar10, rows=120, counts=dict.fromkeys(cifar10.CLASSES, 12), versions=versions)
    for attribute, counts in (
        ("TRANSPORT_CARD", {"other": 72, "transportation": 48}),
        ("FROG_CARD", {"other": 108, "frog": 12}),
    ):
        card = getattr(cifar10, attribute)
        monkeypatch.setattr(cifar10, attribute, replace(card, rows=120, counts=counts, versions=versions))
    return tmp_path, X, y.astype(np.int64)


def test_cifar10_in_both_versions(cifar):
    folder, X, y = cifar
    for form in ("npz", "bin"):
        loaded = load("cifar10", folder / form)
        assert loaded.X.dtype == np.uint8
        np.testing.assert_array_equal(loaded.X, X)
        np.testing.assert_array_equal(loaded.y, y)
        np.testing.assert_array_equal(loaded.official_test, np.arange(120) >= 100)
        assert loaded.classes[5:7] == ("dog", "frog")


def test_cifar10_asked_yes_or_no(cifar):
    folder, _, y = cifar
    transport, frog = (load(f"cifar10_{name}", folder / "npz").y for name in ("transportation", "frog"))
    np.testing.assert_array_equal(transport, np.isin(y, [0, 1, 8, 9]))
    np.testing.assert_array_equal(frog, y == 6)


def test_parts_of_cifar10_need_only_their_files(cifar):
    folder, X, y = cifar
    (folder / "npz" / "cifar10_batch5.npz").unlink()
    some = load("cifar10", folder / "npz", parts=["batch2", "test"])
    np.testing.assert_array_equal(some.X, np.concatenate([X[20:40], X[100:]]))
    np.testing.assert_array_equal(some.y, np.concatenate([y[20:40], y[100:]]))
    np.testing.assert_array_equal(some.official_test, np.arange(40) >= 20)
    with pytest.raises(DataError, match=r"lacks cifar10_batch5.npz of them"):
        load("cifar10", folder / "npz")
    for wrong in ([], ["test", "test"]):
        with pytest.raises(DataError, match="parts must name some of batch1"):
            load("cifar10", folder / "npz", parts=wrong)
    with pytest.raises(ValueError, match="did you mean 'batch1'"):
        load("cifar10", folder / "npz", parts=["batch_1"])


@pytest.mark.parametrize("name", ["cifar-10-batches-py", "cifar-10-python.tar.gz", "data_batch_1"])
def test_the_pickled_version_of_cifar10_is_refused(name, tmp_path):
    (tmp_path / name).touch()
    with pytest.raises(DataError) as error:
        load("cifar10", tmp_path)
    assert "it is pickled, and a pickle can run anything" in sentence(error)
    assert "binary version, cifar-10-binary.tar.gz" in sentence(error)


def test_damaged_parts_of_cifar10(cifar):
    folder, _, _ = cifar
    path = folder / "bin" / "cifar-10-batches-bin" / "test_batch.bin"
    content = path.read_bytes()
    path.write_bytes(b"\x0b" + content[1:])  # no class has code 11
    with pytest.raises(DataError, match=r"test_batch.bin must have sha256"):
        load("cifar10", folder / "bin")
    with pytest.raises(DataError, match="with labels 0 to 9"):
        load("cifar10", folder / "bin", verify=False)
    for damaged in (content[:-3073], content[:-1]):
        path.write_bytes(damaged)
        with pytest.raises(DataError, match="it is truncated"):
            load("cifar10", folder / "bin")
        with pytest.raises(DataError, match=r"test_batch.bin"):
            load("cifar10", folder / "bin", verify=False)


def save(path, X, mode="RGB"):
    from PIL import Image

    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(X).convert(mode).save(path)


@pytest.fixture
def caltech(tmp_path):
    """Eighty classes with the archive's numbers, two of them as EAST names them, and some litter."""
    X, _ = pictures(81, 16)
    special = {56: "dog", 80: "frog"}
    for i in range(1, 81):
        name = f"{i:03d}.{special.get(i, f'class-{i}')}"
        save(tmp_path / "256_ObjectCategories" / name / f"{i:03d}_0001.png", X[i])
    root = tmp_path / "256_ObjectCategories"
    save(root / "056.dog" / "056_0002.png", X[0], "L")
    save(root / "056.dog" / "056_0003.PNG", X[0], "RGBA")
    (root / "056.dog" / "greg").mkdir()
    (root / "080.frog" / "RENAME2").write_text("litter")
    (root / "README").touch()
    return tmp_path, X


def test_caltech256_from_its_folder(caltech, monkeypatch):
    folder, X = caltech
    put_card(monkeypatch, caltech256, rows=82, num_classes=80)
    loaded = load("caltech256", folder, size=16)
    assert loaded.X.shape == (82, 16, 16, 3)
    assert (loaded.classes[55], loaded.classes[79]) == ("dog", "frog")  # EAST, appendix D
    dogs = loaded.X[loaded.y == 55]
    np.testing.assert_array_equal(dogs[0], X[56])
    assert (dogs[1] == dogs[1][..., :1]).all()  # grey in three channels
    np.testing.assert_array_equal(dogs[2], X[0])
    assert loaded.notes == ("3 entries that are no images were skipped: 056.dog/greg, 080.frog/RENAME2, README",)
    assert load("caltech256", folder, size=8).X.shape[1:] == (8, 8, 3)
    np.testing.assert_array_equal(load("caltech256", folder, size=8).X, load("caltech256", folder, size=8).X)


def test_caltech256_that_is_not_whole(caltech):
    folder, _ = caltech
    with pytest.raises(DataError, match="caltech256 must have 30607 images of 257 classes, got 82 of 80"):
        load("caltech256", folder, size=16)
    assert len(load("caltech256", folder, size=16, verify=False)) == 82
    with pytest.raises(ValueError, match="size must lie in"):
        load("caltech256", folder, size=2)


def test_folders_that_cannot_be_read(caltech, tmp_path, monkeypatch):
    root = caltech[0] / "256_ObjectCategories"
    damaged = root / "001.class-1" / "001_0001.png"
    damaged.write_bytes(damaged.read_bytes()[:200])
    with pytest.raises(DataError) as error:
        read_folder(root, 8)
    assert f"{damaged} cannot be read" in sentence(error)
    damaged.unlink()
    with pytest.raises(DataError, match=r"001.class-1 must hold images .* it has none"):
        read_folder(root, 8)
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="it has no folder"):
        read_folder(tmp_path / "empty", 8)
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(DataError, match="need Pillow to be read; install it with pip install pillow"):
        read_folder(root, 8)


def test_a_packed_caltech256_is_told(tmp_path):
    (tmp_path / "256_ObjectCategories.tar").touch()
    with pytest.raises(DataError, match="it is packed: unpack it there with tar xf"):
        load("caltech256", tmp_path)


def test_caltech101_from_npz_and_from_its_folder(tmp_path, monkeypatch):
    names = ["Faces", "accordion", "BACKGROUND_Google"]  # in the order of the codes, the background last
    X, _ = pictures(6, 48)
    y = np.array([0, 0, 1, 1, 2, 2], dtype=np.uint8)
    for form in ("npz", "folder"):
        (tmp_path / form).mkdir()
    write_npz(tmp_path / "npz" / "caltech101_48.npz", X, y, classes=np.array(names), split=y)
    for i, label in enumerate(y):
        save(tmp_path / "folder" / "101_ObjectCategories" / names[label] / f"image_{i:04d}.png", X[i])
    versions = with_files(caltech101.CARD, tmp_path / "npz" / "caltech101_48.npz")
    put_card(monkeypatch, caltech101, rows=4, num_classes=2, counts={"Faces": 2, "accordion": 2}, versions=versions)
    monkeypatch.setattr(caltech101, "BACKGROUND_ROWS", 2)
    for form in ("npz", "folder"):
        loaded = load("caltech101", tmp_path / form)
        assert loaded.classes == ("Faces", "accordion")
        np.testing.assert_array_equal(loaded.X, X[:4])
        np.testing.assert_array_equal(loaded.y, y[:4])
        everything = load("caltech101", tmp_path / form, background=True)
        assert everything.classes == tuple(names)
        np.testing.assert_array_equal(everything.X, X)
    assert load("caltech101", tmp_path / "folder", size=24).X.shape == (4, 24, 24, 3)
    with pytest.raises(DataError, match="caltech101 needs the folder 101_ObjectCategories"):
        load("caltech101", tmp_path / "npz", size=24)
