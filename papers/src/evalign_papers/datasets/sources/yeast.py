"""Yeast: location of a protein in the cell; ten classes, five rows in the smallest."""

from evalign_papers.datasets.dataset import Card, File, Version
from evalign_papers.datasets.table_source import TARGET, TableSource, parquet, plain

COLUMNS = ("mcg", "gvh", "alm", "mit", "erl", "pox", "vac", "nuc")

CARD = Card(
    name="yeast",
    title="Yeast (protein localisation)",
    kind="table",
    source="https://archive.ics.uci.edu/dataset/110/yeast",
    citation="Horton and Nakai, A probabilistic classification system for predicting the cellular localization sites "
    "of proteins, ISMB 1996",
    licence="CC BY 4.0",
    rows=1484,
    num_classes=10,
    counts={
        "CYT": 463,
        "ERL": 5,
        "EXC": 35,
        "ME1": 44,
        "ME2": 51,
        "ME3": 163,
        "MIT": 244,
        "NUC": 429,
        "POX": 20,
        "VAC": 30,
    },
    versions=(
        Version(
            "parquet",
            (File("yeast.parquet", 14962, "7a250adc07a2e8e544328a0e687bdff07e5804856ce574f7d3b1c724c05b1f6e"),),
        ),
        Version("original", (File("yeast.data"),), ("", "yeast")),
    ),
    openml=181,
    fingerprint="64a393ba1212c7d0",
    notes=(
        "Not in the papers.",
        "yeast.names counts 37 EXC and 1486 rows in all; the data have 35 and 1484.",
        "31 duplicate rows, kept.",
    ),
)

SOURCE = TableSource(
    card=CARD,
    columns=COLUMNS,
    labels={name: name for name in CARD.counts},
    readers={"parquet": parquet, "original": plain(("sequence", *COLUMNS, TARGET), delimiter=None)},
)
