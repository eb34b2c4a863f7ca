"""Mammography: microcalcifications among bright spots of X-ray images."""

from evalign_papers.datasets.dataset import Card, File, Version
from evalign_papers.datasets.table_source import TARGET, TableSource, parquet, plain

COLUMNS = tuple(f"attr{i}" for i in range(1, 7))

CARD = Card(
    name="mammography",
    title="Mammography (microcalcifications)",
    kind="table",
    source="https://www.openml.org/d/310",
    citation="Woods et al., Comparative evaluation of pattern recognition techniques for detection of "
    "microcalcifications in mammography, IJPRAI 1993",
    licence="public, as OpenML has it",
    rows=11183,
    num_classes=2,
    counts={"other": 10923, "calcification": 260},
    versions=(
        Version(
            "parquet",
            (File("mammography.parquet", 157844, "939f28d794b062f2b0e5d3c3319845702a7e9e72db280c567008d1fcd8335610"),),
        ),
        Version("original", (File("mammography.csv"),), ("", "mammography", "odds")),
        Version("original", (File("mammography.arff"),), ("", "mammography")),
    ),
    openml=310,
    fingerprint="6f78c452e20dd390",
    notes=(
        "3334 duplicate rows, kept: they are in the original.",
        "The source has standardised the features on all rows, so its test rows are not quite unseen.",
    ),
)

SOURCE = TableSource(
    card=CARD,
    columns=COLUMNS,
    labels={"0": "other", "1": "calcification", "-1": "other"},
    readers={"parquet": parquet, "original": plain((*COLUMNS, TARGET))},
)
