"""All data sets by name: find a card, open the folders of files, load a data set."""

import inspect
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from evalign.checks import check_choice
from evalign_papers.datasets.dataset import PROTOCOLS, Card, Dataset, File, Protocol, check_dataset
from evalign_papers.datasets.folders import Store, open_places
from evalign_papers.datasets.sources import (
    adult,
    caltech101,
    caltech256,
    cifar10,
    cocktailparty,
    creditcard,
    letter,
    mammography,
    shuttle,
    synthetic,
    yeast,
)


class Entry(NamedTuple):
    card: Card
    load: Callable[..., Dataset]


ENTRIES: dict[str, Entry] = {
    card.name: Entry(card, loader)
    for card, loader in (
        (synthetic.CARD_5, synthetic.load_5),
        (synthetic.CARD_33, synthetic.load_33),
        (cocktailparty.CARD, cocktailparty.load),
        (cocktailparty.GRAPH_CARD, cocktailparty.load_graph),
        (adult.CARD, adult.load),
        (mammography.CARD, mammography.SOURCE.dataset),
        (creditcard.CARD, creditcard.load),
        (cifar10.CARD, cifar10.load),
        (cifar10.TRANSPORT_CARD, cifar10.load_transportation),
        (cifar10.FROG_CARD, cifar10.load_frog),
        (caltech256.CARD, caltech256.load),
        (caltech101.CARD, caltech101.load),
        (shuttle.CARD, shuttle.SOURCE.dataset),
        (yeast.CARD, yeast.SOURCE.dataset),
        (letter.CARD, letter.SOURCE.dataset),
    )
}


def names() -> list[str]:
    """Every data set's name, those of the papers first."""
    return list(ENTRIES)


def find_card(name: str) -> Card:
    check_choice("data set", name, ENTRIES)
    return ENTRIES[name].card


def open_store(data_dir: str | Path | None = None, *, verify: bool = True, fetch: bool = True) -> Store:
    """The folders named by `data_dir` and $EVALIGN_DATA, to load data sets from."""
    return Store(open_places(data_dir), verify, fetch, tuple(all_files()))


def load(
    name: str,
    data_dir: str | Path | None = None,
    protocol: Protocol = "honest",
    *,
    fetch: bool = True,
    verify: bool = True,
    **options: Any,
) -> Dataset:
    """A data set from `data_dir`, else from $EVALIGN_DATA, else from OpenML (tables only, `fetch=False` forbids it).

    `protocol` "honest" has text for categories (to be one-hot encoded), groups to split by and the positive class of
    the task; "paper" is the data behind the printed numbers. `verify=False` accepts any files, with
    neither checksums nor counts compared. `options` are the data set's own: `positive` and `block` of cocktailparty,
    `parts` of the cifar10 sets, `size` of the caltech ones, `background` of caltech101.

    >>> blobs = load("synthetic_5")
    >>> len(blobs), blobs.counts, round(blobs.equitability, 2)
    (5250, {'negative': 5000, 'positive': 250}, 0.28)
    """
    card, loader = find_card(name), ENTRIES[name].load
    check_choice("protocol", protocol, PROTOCOLS)
    own = list(inspect.signature(loader).parameters)[2:]
    for option in options:
        if option not in own:
            known = f"the options {', '.join(own)}" if own else "no options"
            raise TypeError(f"{card.name} has {known}, got {option!r}; leave it out")
    dataset = loader(open_store(data_dir, verify=verify, fetch=fetch), protocol, **options)
    if not verify:
        return replace(dataset, notes=(*dataset.notes, "not verified: neither checksums nor counts were compared"))
    return check_dataset(dataset)


def all_files() -> Iterator[File]:
    """Every file that any data set is read from."""
    for entry in ENTRIES.values():
        for version in entry.card.versions:
            yield from version.files
