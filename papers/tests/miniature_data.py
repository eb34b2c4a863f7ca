"""Miniatures of the data sets, with cards that fit them."""

import os
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

from evalign_papers.datasets import registry
from evalign_papers.datasets.dataset import Card, File
from evalign_papers.datasets.fingerprint import fingerprint
from evalign_papers.datasets.folders import VARIABLE, digest_of
from evalign_papers.datasets.sources import (
    adult,
    creditcard,
    letter,
    mammography,
    shuttle,
    yeast,
)

REAL = os.environ.get(VARIABLE)
needs_real = pytest.mark.skipif(
    not REAL, reason=f"the real files are not part of a clone; ${VARIABLE} names their folder"
)
PAPERS = {  # rows and positives as the papers print them
    "synthetic_5": (5250, 250),
    "synthetic_33": (7500, 2500),
    "cocktailparty": (4800, 1454),
    "adult": (48842, 11687),
    "mammography": (11183, 260),
    "creditcard": (284807, 492),
    "cifar10_transportation": (60000, 24000),
    "cifar10_frog": (60000, 6000),
}
RARE = {"cocktailparty": "different group"}
TABLES = (adult, mammography, creditcard, letter, shuttle, yeast)


def no_network(*_, **__):
    raise OSError("Name or service not known")


def sentence(error) -> str:
    text = str(error.value)
    assert "\n" not in text
    assert len(text) < 700
    return text


def put_card(monkeypatch, module, **changes) -> Card:
    """Give a module a card that fits a miniature."""
    card = replace(module.CARD, **changes)
    monkeypatch.setattr(module, "CARD", card)
    entry = registry.ENTRIES[card.name]._replace(card=card)
    if hasattr(module, "SOURCE"):
        monkeypatch.setattr(module, "SOURCE", replace(module.SOURCE, card=card))
        entry = entry if hasattr(module, "load") else entry._replace(load=module.SOURCE.dataset)
    monkeypatch.setitem(registry.ENTRIES, card.name, entry)
    return card


def known(path) -> File:
    return File(path.name, path.stat().st_size, digest_of(path, "sha256"))


def with_files(card, *paths):
    """The versions of a card, the files at `paths` with their own size and checksum."""
    facts = {path.name: known(path) for path in paths}
    return tuple(
        replace(version, files=tuple(facts.get(file.name, file) for file in version.files)) for version in card.versions
    )


class Mini:
    """A small table of one of the sources: `raw` has its columns, a label and a split as the original has them."""

    def __init__(self, module, rows=60):
        self.module, source, rng = module, module.SOURCE, np.random.default_rng(3)
        columns = {}
        for name in source.columns:
            if name in source.text:
                columns[name] = rng.choice(["?", "Private", "State-gov", "Other"], rows)
            elif module in (adult, letter, shuttle):
                columns[name] = rng.integers(-3 if module is shuttle else 0, 90, rows)
            elif module is creditcard and name == "Amount":
                columns[name] = (rng.integers(0, 400000, rows) / 100).round(2)
            else:
                columns[name] = rng.normal(size=rows).round(5)
        labels = {mammography: ["-1", "1"]}.get(module) or list(source.labels)
        self.labels = [labels[i] for i in np.arange(rows) % len(labels)]
        self.raw = pd.DataFrame(columns)
        self.test = np.arange(rows) >= rows * 2 // 3
        names = [source.labels[label] for label in self.labels]
        self.counts = {name: names.count(name) for name in dict.fromkeys(source.labels.values())}
        numbers = {
            name: self.raw[name].astype(np.float32) if module is creditcard else self.raw[name] for name in self.raw
        }
        self.facts = {
            "rows": rows,
            "counts": self.counts,
            "fingerprint": fingerprint(pd.DataFrame(numbers), np.array(names, dtype=object)),
        }

    def parquet(self, folder):
        frame, name = self.raw.copy(), self.module.CARD.name
        if self.module is adult:
            frame["income"], frame["split"], frame["target"] = self.labels, np.where(self.test, "test", "train"), 0
        elif self.module is creditcard:
            frame = frame.astype(np.float32).assign(Time=0, Class=[int(label) for label in self.labels])
        elif self.module is shuttle:
            frame["split"], frame["target"] = (
                np.where(self.test, "test", "train"),
                [int(label) for label in self.labels],
            )
        else:
            frame["target"] = self.labels if self.module is not mammography else [int(x == "1") for x in self.labels]
        path = folder / f"{name}.parquet"
        frame.to_parquet(path)
        return [path]

    def original(self, folder):
        frame, label = self.raw.copy(), pd.Series(self.labels)
        if self.module is adult:
            lines = frame.assign(y=label).astype(str).agg(", ".join, axis=1)
            (folder / "adult.data").write_text("\n".join(lines[~self.test]) + "\n\n")
            (folder / "adult.test").write_text("|1x3 Cross validator\n" + ".\n".join(lines[self.test]) + ".\n\n")
            return [folder / "adult.data", folder / "adult.test"]
        if self.module is creditcard:
            frame.insert(0, "Time", 0.0)
            lines = frame.astype(str).agg(",".join, axis=1) + ',"' + label + '"'
            header = ",".join(f'"{name}"' for name in [*frame.columns, "Class"])
            (folder / "creditcard.csv").write_text("\n".join([header, *lines]) + "\n")
            return [folder / "creditcard.csv"]
        if self.module is shuttle:
            for name, rows in (("shuttle.trn", ~self.test), ("shuttle.tst", self.test)):
                frame.assign(y=label)[rows].to_csv(folder / name, sep=" ", header=False, index=False)
            return [folder / "shuttle.trn", folder / "shuttle.tst"]
        if self.module is letter:
            frame.insert(0, "y", label)
        elif self.module is yeast:
            frame.insert(0, "sequence", "ADT1_YEAST")
            frame["y"] = label
        else:
            frame["class"] = "'" + label + "'"
        name = {letter: "letter-recognition.data", yeast: "yeast.data", mammography: "mammography.csv"}[self.module]
        sep = "  " if self.module is yeast else ","
        lines = frame.astype(str).agg(sep.join, axis=1)
        (folder / name).write_text("\n".join([",".join(frame)] * (self.module is mammography) + [*lines]) + "\n")
        return [folder / name]

    def openml(self):
        """As scikit-learn's parser gives it: "?" is missing, labels are categories, the label's column is the last."""
        frame = self.raw.replace("?", np.nan).rename(columns=lambda name: name.replace("_", "-"))
        return frame.assign(**{"class": pd.Categorical(self.labels)}).iloc[::-1].reset_index(drop=True)
