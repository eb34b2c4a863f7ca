"""Letter recognition: 26 capital letters from 16 measures of their shape; nearly balanced."""

from string import ascii_uppercase

from evalign_papers.datasets.dataset import Card, File, Version
from evalign_papers.datasets.table_source import TARGET, TableSource, parquet, plain

COLUMNS = (
    "x_box", "y_box", "width", "high", "onpix", "x_bar", "y_bar", "x2bar", "y2bar", "xybar", "x2ybr", "xy2br",
    "x_ege", "xegvy", "y_ege", "yegvx",
)  # fmt: skip
COUNTS = (
    789, 766, 736, 805, 768, 775, 773, 734, 755, 747, 739, 761, 792,
    783, 753, 803, 783, 758, 748, 796, 813, 764, 752, 787, 786, 734,
)  # fmt: skip

CARD = Card(
    name="letter",
    title="Letter recognition",
    kind="table",
    source="https://archive.ics.uci.edu/dataset/59/letter+recognition",
    citation="Frey and Slate, Letter recognition using Holland-style adaptive classifiers, Machine Learning 6, 1991",
    licence="CC BY 4.0",
    rows=20000,
    num_classes=26,
    counts=dict(zip(ascii_uppercase, COUNTS, strict=True)),
    versions=(
        Version(
            "parquet",
            (File("letter.parquet", 149726, "0f64f3474132046af835fb5b7f0a73675cbffed12453c82cafda8fd4c0a1c168"),),
        ),
        Version("original", (File("letter-recognition.data"),), ("", "letter")),
    ),
    openml=6,
    fingerprint="e4eaa2310202a591",
    notes=("Not in the papers.", "1332 duplicate rows, kept."),
)


SOURCE = TableSource(
    card=CARD,
    columns=COLUMNS,
    labels={letter: letter for letter in ascii_uppercase},
    readers={"parquet": parquet, "original": plain((TARGET, *COLUMNS))},
)
