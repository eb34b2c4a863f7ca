"""Adult, census income: more than 50,000 dollars a year or not."""

from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from evalign_papers.datasets.dataset import Card, DataError, Dataset, File, Protocol, Version
from evalign_papers.datasets.folders import Store
from evalign_papers.datasets.table_source import TARGET, TableSource, parquet, plain

CATEGORIES = (
    "workclass", "education", "marital_status", "occupation", "relationship", "race", "sex", "native_country",
)  # fmt: skip
COLUMNS = (
    "age", "workclass", "fnlwgt", "education", "education_num", "marital_status", "occupation", "relationship",
    "race", "sex", "capital_gain", "capital_loss", "hours_per_week", "native_country",
)  # fmt: skip
UCI = "https://archive.ics.uci.edu/ml/machine-learning-databases/adult"
DROPPED = "fnlwgt"  # number of people that a row represents (BtG supplement 4.1.3); no paper uses it

CARD = Card(
    name="adult",
    title="Adult (census income)",
    kind="table",
    source="https://archive.ics.uci.edu/dataset/2/adult",
    citation="Kohavi, Scaling up the accuracy of naive-Bayes classifiers, KDD 1996",
    licence="CC BY 4.0",
    rows=48842,
    num_classes=2,
    counts={"<=50K": 37155, ">50K": 11687},
    versions=(
        Version(
            "parquet",
            (File("adult.parquet", 416294, "ac43b06ea9e64f9a39b781adc722377e9fad41480e373e1a7684b2e1a20e2f37"),),
        ),
        Version(
            "original",
            (
                File(
                    "adult.data",
                    3974305,
                    "5b00264637dbfec36bdeaab5676b0b309ff9eb788d63554ca0a249491c86603d",
                    url=f"{UCI}/adult.data",
                ),
                File(
                    "adult.test",
                    2003153,
                    "a2a9044bc167a35b2361efbabec64e89d69ce82d9790d2980119aac5fd7e9c05",
                    url=f"{UCI}/adult.test",
                ),
            ),
            ("", "adult", "uci"),
        ),
    ),
    openml=1590,
    fingerprint="656386dc4a20d102",
    paper_test="official",
    notes=(
        "A row's fnlwgt is dropped, as in the papers.",
        "The text has a split of 64/16/20, but 19782 negatives in the oversampled training part (BtG Table 10) are "
        "80 % of the 24720 in adult.data: the printed numbers were taken on adult.test. The paper protocol does that.",
        "paper: categories are numbered in alphabetical order, a missing value being one of them, the first.",
        "first_line=True: adult.test read with its first line, as the released code does.",
        "52 exact duplicates, kept.",
    ),
)

SOURCE = TableSource(
    card=CARD,
    columns=COLUMNS,
    labels={"<=50K": "<=50K", ">50K": ">50K"},
    readers={"parquet": lambda paths: _renamed(parquet(paths)), "original": plain((*COLUMNS, TARGET))},
    text=frozenset(CATEGORIES),
)


def load(store: Store, protocol: Protocol, *, first_line: bool = False) -> Dataset:
    """`first_line` reads adult.test as the released code does, with its first line `|1x3 Cross validator`.

    That line makes `age` a column of text in the test part, and the row is dropped too late: joined with the numbers of
    the training part and turned into category codes, ages of test rows get codes that no training row has.
    The codes are the same whether or not the file at hand has the line.
    """
    raw = SOURCE.load(store)
    X = raw.frame.drop(columns=DROPPED)
    if first_line:
        if raw.official_test is None:
            raise DataError("first_line needs to know the rows of adult.test, which OpenML does not say; get the files")
        X["age"] = _age_codes(X["age"], raw.official_test)
    for name in CATEGORIES:
        if protocol == "paper":
            X[name] = X[name].astype("category").cat.codes.astype("int64")
        else:  # text, for an encoder to one-hot; unknown values are missing, not a category
            X[name] = X[name].mask(X[name] == "?")
    return Dataset(CARD, X, raw.y, raw.classes, protocol, official_test=raw.official_test)


def _age_codes(age: "pd.Series[Any]", test: NDArray[np.bool_]) -> "pd.Series[Any]":
    """Category codes of ages that are numbers in the training part and text in the test part.

    >>> _age_codes(pd.Series([39, 17, 90, 17, 39]), np.array([False, False, False, True, True])).tolist()
    [1, 0, 2, 3, 4]
    """
    mixed = age.astype(object).where(~test, age.astype(str).astype(object))
    return mixed.astype("category").cat.codes.astype("int64")


def _renamed(frame: pd.DataFrame) -> pd.DataFrame:
    """In this file `target` is already 0 or 1; the original label is `income`."""
    return frame.drop(columns=TARGET).rename(columns={"income": TARGET})
