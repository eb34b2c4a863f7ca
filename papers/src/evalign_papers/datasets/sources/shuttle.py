"""Shuttle, from the Statlog project: seven states of a radiator; the rarest has ten of 58,000 rows."""

from evalign_papers.datasets.dataset import Card, File, Version
from evalign_papers.datasets.table_source import TARGET, TableSource, parquet, plain

COLUMNS = tuple(f"a{i}" for i in range(1, 10))

CARD = Card(
    name="shuttle",
    title="Shuttle (Statlog)",
    kind="table",
    source="https://archive.ics.uci.edu/dataset/148/statlog+shuttle",
    citation="Statlog (Shuttle), NASA, UCI Machine Learning Repository",
    licence="CC BY 4.0",
    rows=58000,
    num_classes=7,
    counts={
        "Rad Flow": 45586,
        "Fpv Close": 50,
        "Fpv Open": 171,
        "High": 8903,
        "Bypass": 3267,
        "Bpv Close": 10,
        "Bpv Open": 13,
    },
    versions=(
        Version(
            "parquet",
            (File("shuttle.parquet", 369581, "1e43567d53a1b414bc898d50aa878f390a9ddaee6d516f2fe8118e4b97f93eec"),),
        ),
        Version("original", (File("shuttle.trn"), File("shuttle.tst")), ("", "shuttle")),
    ),
    openml=40685,
    fingerprint="64cd079f28ebba90",
    refused={"shuttle.trn.Z": "it is compressed: unpack it with uncompress shuttle.trn.Z"},
    notes=("Not in the papers.", "OpenML's copy does not say which rows the source calls test."),
)

SOURCE = TableSource(
    card=CARD,
    columns=COLUMNS,
    labels={str(i): name for i, name in enumerate(CARD.counts, 1)},
    readers={"parquet": parquet, "original": plain((*COLUMNS, TARGET), delimiter=None)},
)
