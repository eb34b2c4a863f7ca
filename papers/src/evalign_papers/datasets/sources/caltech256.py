"""Caltech-256: photographs of 256 kinds of objects and clutter, read from the unpacked archive."""

from evalign.checks import check_number
from evalign_papers.datasets.dataset import Card, Dataset, File, Protocol, Version
from evalign_papers.datasets.folders import Store
from evalign_papers.datasets.image_files import read_folder, skipped_note

CARD = Card(
    name="caltech256",
    title="Caltech-256",
    kind="images",
    source="https://data.caltech.edu/records/nyy15-4j048",
    citation="Griffin, Holub, Perona, Caltech-256 object category dataset, 2007",
    licence="CC BY 4.0",
    rows=30607,
    num_classes=257,
    versions=(Version("folder", (File("256_ObjectCategories", directory=True),), ("", "caltech256", "caltech-256")),),
    refused={"256_ObjectCategories.tar": "it is packed: unpack it there with tar xf 256_ObjectCategories.tar"},
    notes=(
        "Codes are the folders' numbers less one, so Dog is 55 and Frog 79 as in EAST; the clutter class is 256.",
        "md5 of the archive: 67b4f42ca05d46448c6bb8ecd2220f6d. The folder has no checksum; its images are counted.",
        "Rows per class are not known here, so neither is the imbalance; EAST gives an equitability of 0.87.",
    ),
)


def load(store: Store, protocol: Protocol, *, size: int = 48) -> Dataset:
    """`size` in pixels, to which every image is resized."""
    check_number("size", size, low=8, high=512)
    pictures = read_folder(store.get(CARD).paths[0], size)
    return Dataset(CARD, pictures.X, pictures.y, pictures.classes, protocol, notes=tuple(skipped_note(pictures)))
