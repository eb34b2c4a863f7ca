"""Download a table: its original files with pooch, which compares checksums, else from OpenML."""

import logging
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pandas as pd

from evalign_papers.datasets.dataset import Card, DataError, Version
from evalign_papers.datasets.folders import Found, Store

TIMEOUT = 20.0  # seconds without a byte
CACHE = "evalign"


def fetch_original(card: Card, store: Store) -> Found | None:
    """Download the version whose files all have an address and a checksum; None without one or without a network.

    Files are kept in the user's cache folder and not downloaded again.
    """
    version = next((version for version in card.versions if _downloadable(version)), None)
    if version is None or not store.fetch:
        return None
    import pooch  # type: ignore[import-untyped]

    pooch.get_logger().setLevel(logging.ERROR)
    fetch = pooch.HTTPDownloader(timeout=TIMEOUT)
    folder = Path(pooch.os_cache(CACHE)) / card.name
    try:
        paths = [
            pooch.retrieve(file.url, f"sha256:{file.sha256}", file.name, folder, downloader=fetch)
            for file in version.files
        ]
    except (OSError, ValueError):  # no network, or a wrong file: OpenML may have the right one
        return None
    return Found(version, tuple(Path(path) for path in paths))


def fetch_openml_table(card: Card, store: Store) -> pd.DataFrame:
    """Download the table from OpenML, columns unchanged; the error names the file to get and where to put it.

    scikit-learn compares the download with OpenML's own md5; the caller compares counts and fingerprint.
    """
    if card.openml is None or not store.fetch:
        raise DataError(store.missing(card))
    from sklearn.datasets import fetch_openml

    try:
        with default_timeout(TIMEOUT):
            return fetch_openml(data_id=card.openml, as_frame=True, parser="pandas", n_retries=1).frame  # type: ignore[no-any-return]
    except (OSError, ValueError) as error:  # URLError and HTTPError are OSErrors; a wrong md5 is a ValueError
        reason = (str(error) or type(error).__name__).strip().split("\n")[0].rstrip(".")
        why = f", and OpenML's data set {card.openml} cannot be fetched ({reason})"
        raise DataError(store.missing(card, why)) from None


def _downloadable(version: Version) -> bool:
    return all(file.url is not None and file.sha256 is not None for file in version.files)


@contextmanager
def default_timeout(seconds: float) -> Iterator[None]:
    """scikit-learn sets no timeout: behind a firewall that drops packets a download would never return."""
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(seconds)
    try:
        yield
    finally:
        socket.setdefaulttimeout(before)
