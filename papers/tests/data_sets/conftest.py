"""Tests of data sets see no real files and no network; two of their files in miniature."""

from urllib.error import URLError

import pytest
import sklearn.datasets
from miniature_data import (
    Mini,
    no_network,
    put_card,
    with_files,
)

from evalign_papers.datasets import load
from evalign_papers.datasets.folders import VARIABLE
from evalign_papers.datasets.sources import (
    letter,
    yeast,
)


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    """No real files and no network, whatever the machine has."""
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setattr("pooch.retrieve", no_network)

    def offline(**_):
        raise URLError("Name or service not known")

    monkeypatch.setattr(sklearn.datasets, "fetch_openml", offline)


@pytest.fixture
def two_files(tmp_path, monkeypatch):
    """letter.parquet and yeast.parquet in miniature, with cards that know them."""
    for module in (letter, yeast):
        mini = Mini(module)
        put_card(monkeypatch, module, **mini.facts, versions=with_files(module.CARD, *mini.parquet(tmp_path)))
        load(module.CARD.name, tmp_path)
    return tmp_path
