"""Read a table from any of its files or from OpenML into the same columns and label codes, and verify it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from evalign.tables.files import TableError
from evalign.tables.read import read_table
from evalign_papers.datasets.dataset import Card, DataError, Dataset, Protocol
from evalign_papers.datasets.downloads import fetch_openml_table, fetch_original
from evalign_papers.datasets.fingerprint import fingerprint
from evalign_papers.datasets.folders import Store, reading

TARGET, SPLIT = "target", "split"  # the label; "train" or "test" where the source has such parts
Reader = Callable[[tuple[Path, ...]], pd.DataFrame]


class Raw(NamedTuple):
    frame: pd.DataFrame
    y: NDArray[np.int64]
    classes: tuple[str, ...]
    official_test: NDArray[np.bool_] | None


@dataclass(frozen=True)
class TableSource:
    """How to read a table. `labels` maps labels in the file to class names, in the order of the codes.

    `columns` are all features, in the order in which OpenML and the original files have them; `text` those that hold
    categories, where "?" stands for no value; `ignored` what OpenML may have besides. A reader gives the columns,
    `target` and, where there is one, `split`.
    """

    card: Card
    columns: tuple[str, ...]
    labels: Mapping[str, str]
    readers: Mapping[str, Reader]
    text: frozenset[str] = frozenset()
    ignored: frozenset[str] = frozenset()

    def dataset(self, store: Store, protocol: Protocol) -> Dataset:
        """The table for a protocol that needs no other columns or labels."""
        raw = self.load(store)
        return Dataset(self.card, raw.frame, raw.y, raw.classes, protocol, official_test=raw.official_test)

    def load(self, store: Store) -> Raw:
        found = store.find(self.card) or fetch_original(self.card, store)
        if found is None:
            frame = self._of_openml(fetch_openml_table(self.card, store))
            where, known = f"OpenML's data set {self.card.openml}", False
        else:
            store.check(self.card, found)
            with reading(found.paths[0]):
                frame = self.readers[found.version.form](found.paths)
            where = " and ".join(map(str, found.paths))
            known = all(file.sha256 or file.md5 for file in found.version.files)
        if lacking := [name for name in (*self.columns, TARGET) if name not in frame]:
            raise DataError(f"{where} must have the column {lacking[0]!r}, it has none; is it the right file?")
        raw = self._tidy(frame, where)
        if store.verify and not known and self.card.fingerprint is not None:
            self._check_content(raw, where)
        return raw

    def _of_openml(self, frame: pd.DataFrame) -> pd.DataFrame:
        """By position: OpenML has other names, and scikit-learn puts the label last."""
        frame = frame[[name for name in frame if name not in self.ignored]]
        if frame.shape[1] != len(self.columns) + 1:
            raise DataError(
                f"{self.card.name} must have {len(self.columns)} features and a label, OpenML's data set "
                f"{self.card.openml} has {frame.shape[1]} columns; get a file from {self.card.source}"
            )
        return frame.set_axis([*self.columns, TARGET], axis=1)

    def _tidy(self, frame: pd.DataFrame, where: str) -> Raw:
        """Whole numbers as integers, categories as text, labels as codes."""
        columns = {name: self._column(frame[name], name, where) for name in self.columns}
        found = [str(label).strip().strip("'").removesuffix(".") for label in frame[TARGET]]
        if unknown := sorted(set(found) - set(self.labels)):
            known = ", ".join(self.labels)
            raise DataError(f"{where} must have the labels {known}, got {unknown[0]!r}; is it the right file?")
        classes = tuple(dict.fromkeys(self.labels.values()))
        codes = {label: classes.index(name) for label, name in self.labels.items()}
        official = frame[SPLIT].to_numpy() == "test" if SPLIT in frame else None
        y = np.array([codes[label] for label in found], dtype=np.int64)
        return Raw(pd.DataFrame(columns), y, classes, official)

    def _column(self, column: "pd.Series[Any]", name: str, where: str) -> "pd.Series[Any]":
        if name in self.text:
            return column.astype(object).where(column.notna(), "?").astype(str).str.strip().reset_index(drop=True)
        try:
            numbers = pd.to_numeric(column).reset_index(drop=True)
        except (ValueError, TypeError) as error:
            raise DataError(f"{where} must have numbers in column {name!r} ({error}); it is damaged") from None
        if not np.isfinite(numbers).all():
            raise DataError(f"{where} lacks numbers in column {name!r}; it is damaged: download it again")
        # Files store 3 in different ways; loaded tables must not differ.
        return numbers.astype(np.int64) if (numbers == np.rint(numbers)).all() else numbers

    def _check_content(self, raw: Raw, where: str) -> None:
        found = fingerprint(raw.frame, np.array(raw.classes, dtype=object)[raw.y])
        if found != self.card.fingerprint:
            raise DataError(
                f"{where} must hold the rows of {self.card.name} (fingerprint {self.card.fingerprint}), some of its "
                f"values differ ({found}); get another copy, or load with verify=False to accept it"
            )


def parquet(paths: tuple[Path, ...]) -> pd.DataFrame:
    try:
        return read_table(paths[0])
    except TableError as error:
        raise DataError(str(error)) from None


def plain(columns: tuple[str, ...], *, delimiter: str | None = ",") -> Reader:
    """A reader of text without a header, one file after the other; `delimiter` None is white space.

    Lines that begin with @, % or | are no data: ARFF's header and the first line of adult.test. The second of two
    files is the source's test part.
    """

    def read(paths: tuple[Path, ...]) -> pd.DataFrame:
        frames = [pd.DataFrame(_rows(path, columns, delimiter), columns=list(columns)) for path in paths]
        if len(frames) == 2:
            frames = [frame.assign(**{SPLIT: part}) for frame, part in zip(frames, ("train", "test"), strict=True)]
        return pd.concat(frames, ignore_index=True)

    return read


def _rows(path: Path, columns: tuple[str, ...], delimiter: str | None) -> list[list[str]]:
    rows = []
    with reading(path):
        text = path.read_text(encoding="utf-8")
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip() or line[0] in "@%|":
            continue
        fields = [field.strip().strip('"') for field in line.split(delimiter)]
        if len(fields) != len(columns):
            raise DataError(
                f"{path}, line {number} must have {len(columns)} fields, it has {len(fields)}; it is damaged"
            )
        if number == 1 and fields[0] == columns[0]:  # the file has a header after all
            continue
        rows.append(fields)
    if not rows:
        raise DataError(f"{path} holds no rows; is it the right file?")
    return rows
