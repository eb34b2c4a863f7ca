"""Credit card fraud, from Kaggle: 492 frauds in 284,807 payments."""

from pathlib import Path

import numpy as np
import pandas as pd

from evalign.tables.files import TableError
from evalign.tables.read import read_table
from evalign_papers.datasets.dataset import Card, DataError, Dataset, File, Protocol, Version
from evalign_papers.datasets.folders import Store
from evalign_papers.datasets.table_source import TARGET, TableSource, parquet

COMPONENTS = tuple(f"V{i}" for i in range(1, 29))
COLUMNS = (*COMPONENTS, "Amount")

CARD = Card(
    name="creditcard",
    title="Credit card fraud (Kaggle, ULB)",
    kind="table",
    source="https://www.kaggle.com/mlg-ulb/creditcardfraud",
    citation="Dal Pozzolo et al., Calibrating probability with undersampling for unbalanced classification, CIDM 2015",
    licence="Database Contents License 1.0",
    rows=284807,
    num_classes=2,
    counts={"genuine": 284315, "fraud": 492},
    versions=(
        Version(
            "parquet",
            (File("creditcard.parquet", 28461961, "6809999de22afb43bf9ddde1b570770e06d4b3d8b7c7c6d018f8e7fb438295cb"),),
        ),
        Version(
            "original",
            (
                File(
                    "creditcard.csv",
                    150828752,
                    "76274b691b16a6c49d3f159c883398e03ccd6d1ee12d9d8ee38f4b4b98551a89",
                    "e90efcb83d69faf99fcab8b0255024de",
                    url="https://storage.googleapis.com/download.tensorflow.org/data/creditcard.csv",
                ),
            ),
            ("", "creditcard", "kaggle"),
        ),
    ),
    openml=1597,
    fingerprint="5557ab3454137a9d",
    notes=(
        "Time is dropped and Amount becomes log(Amount + 0.001), as in the papers; both protocols do so.",
        "V1 to V28 in float32, the precision of the Parquet file, so that every form gives the same numbers.",
        "1081 duplicate rows, kept.",
    ),
)


def _csv(paths: tuple[Path, ...]) -> pd.DataFrame:
    try:
        return read_table(paths[0], [*COLUMNS, "Class"]).rename(columns={"Class": TARGET})
    except TableError as error:
        raise DataError(str(error)) from None


SOURCE = TableSource(
    card=CARD,
    columns=COLUMNS,
    labels={"0": "genuine", "1": "fraud"},
    readers={"parquet": lambda paths: parquet(paths).rename(columns={"Class": TARGET}), "original": _csv},
    ignored=frozenset({"Time"}),
)


def load(store: Store, protocol: Protocol) -> Dataset:
    raw = SOURCE.load(store)
    X = raw.frame[list(COMPONENTS)].astype(np.float32)
    # Cents, rounded because of float32: otherwise the two files would differ in the 7th digit.
    cents = raw.frame["Amount"].to_numpy(dtype=np.float64).round(2)
    X["log_amount"] = np.log(cents + 0.001).astype(np.float32)
    return Dataset(CARD, X, raw.y, raw.classes, protocol)
