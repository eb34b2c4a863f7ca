"""The last place to look: OpenML, through scikit-learn, which keeps what it downloads."""

import socket
from collections.abc import Iterator
from contextlib import contextmanager

import pandas as pd

from evalign_papers.datasets.base import Card, DataError
from evalign_papers.datasets.store import Store

PATIENCE = 20.0  # seconds without a byte


def fetch(card: Card, store: Store) -> pd.DataFrame:
    """The table with all its columns as OpenML has them, or one sentence with the file to get and where to put it.

    scikit-learn compares the download with OpenML's own md5; the caller compares counts and fingerprint.
    """
    if card.openml is None or not store.fetch:
        raise DataError(store.missing(card))
    from sklearn.datasets import fetch_openml

    try:
        with timeout(PATIENCE):
            return fetch_openml(data_id=card.openml, as_frame=True, parser="pandas", n_retries=1).frame  # type: ignore[no-any-return]
    except (OSError, ValueError) as error:  # URLError and HTTPError are OSErrors; a wrong md5 is a ValueError
        reason = (str(error) or type(error).__name__).strip().split("\n")[0].rstrip(".")
        why = f", and OpenML's data set {card.openml} cannot be fetched ({reason})"
        raise DataError(store.missing(card, why)) from None


@contextmanager
def timeout(seconds: float) -> Iterator[None]:
    """scikit-learn sets none, and a firewall that swallows packets would leave the user waiting for ever."""
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(seconds)
    try:
        yield
    finally:
        socket.setdefaulttimeout(before)
