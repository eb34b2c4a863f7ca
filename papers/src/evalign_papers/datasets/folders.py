"""Find the files of a data set in `--data-dir`, then in `$EVALIGN_DATA`, and verify their checksums."""

import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple
from zipfile import BadZipFile

from evalign_papers.datasets.dataset import Card, DataError, File, Version

VARIABLE = "EVALIGN_DATA"
OPTION = "--data-dir"


class Place(NamedTuple):
    folder: Path
    named_by: str


class Found(NamedTuple):
    version: Version
    paths: tuple[Path, ...]


@dataclass(frozen=True)
class Store:
    """Folders to search, in this order. `verify` compares checksums and counts, `fetch` allows a download.

    `known` are the files of all data sets: a file under the wrong name is then recognised by its checksum.
    """

    places: tuple[Place, ...]
    verify: bool = True
    fetch: bool = True
    known: tuple[File, ...] = ()

    def find(self, card: Card) -> Found | None:
        """Find the first folder that holds all files of a version; their content is not checked."""
        for place in self.places:
            for version in card.versions:
                for folder in version.folders:
                    paths = tuple(place.folder / folder / file.name for file in version.files)
                    if all(_exists(path, file) for path, file in zip(paths, version.files, strict=True)):
                        return Found(version, paths)
        return None

    def check(self, card: Card, found: Found) -> None:
        """Check size and checksum of every file, where known."""
        if self.verify:
            for path, file in zip(found.paths, found.version.files, strict=True):
                with reading(path):
                    check_file(card, path, file, self.known)

    def get(self, card: Card) -> Found:
        """Find and verify the files, or raise an error that says which files to put where."""
        found = self.find(card)
        if found is None:
            raise DataError(self.missing(card))
        self.check(card, found)
        return found

    def missing(self, card: Card, why: str = "") -> str:
        """Message: what is missing, where it was searched, and what to do."""
        wanted = ", or ".join(_listed(version) for version in card.versions)
        folders = [f"{place.folder} ({place.named_by})" for place in self.places]
        looked = f"none in {' or '.join(folders)}" if folders else f"neither {OPTION} nor ${VARIABLE} names a folder"
        hint = next(self._hints(card), f"put it into a folder and name that by {OPTION} or ${VARIABLE}")
        return f"{card.name} needs {wanted}: {looked}{why}; {hint} (source: {card.source})"

    def _hints(self, card: Card) -> Iterator[str]:
        for place in self.places:
            for name, remark in card.refused.items():
                if (place.folder / name).exists():
                    yield f"{place.folder / name} is there, but {remark}"
            for version in card.versions:
                for folder in dict.fromkeys((*version.folders, "")):
                    yield from _near_misses(place.folder / folder, version)


def open_places(data_dir: str | Path | None = None) -> tuple[Place, ...]:
    """The given folders; a missing one is an error, since a typing error would otherwise cause a download."""
    named = [(data_dir, OPTION), (os.environ.get(VARIABLE) or None, f"${VARIABLE}")]
    places = [Place(Path(folder).expanduser(), by) for folder, by in named if folder is not None]
    for folder, by in places:
        if not folder.is_dir():
            raise DataError(f"{by} must name a folder, {folder} is {'a file' if folder.exists() else 'not there'}")
    return tuple(places)


def check_file(card: Card, path: Path, file: File, known: tuple[File, ...] = ()) -> None:
    if file.directory:
        return
    size = path.stat().st_size
    if file.size is not None and size != file.size:
        what = "truncated" if size < file.size else "not the original"
        raise DataError(
            f"{path} must have {file.size} bytes, it has {size}: it is {what}{_content_of(path, file, known)}; "
            f"get it again from {card.source}"
        )
    for kind, expected in (("sha256", file.sha256), ("md5", file.md5)):
        if expected is not None and (digest := digest_of(path, kind)) != expected:
            raise DataError(
                f"{path} must have {kind} {expected}, it has {digest}: it is damaged or another file"
                f"{_content_of(path, file, known)}; get it again from {card.source}"
            )


def digest_of(path: Path, kind: str) -> str:
    with path.open("rb") as stream:
        # Against accidents, not attackers: the authors of CIFAR-10 published only an md5.
        return hashlib.file_digest(stream, lambda: hashlib.new(kind, usedforsecurity=False)).hexdigest()


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turn a library's read error into a one-sentence `DataError`."""
    try:
        yield
    except DataError:
        raise
    except (OSError, ValueError, KeyError, EOFError, BadZipFile) as error:
        reason = (str(error) or type(error).__name__).strip().split("\n")[0].rstrip(".")
        raise DataError(
            f"{path} cannot be read ({reason}); it is damaged or not the original: download it again"
        ) from None


def _exists(path: Path, file: File) -> bool:
    return path.is_dir() if file.directory else path.is_file()


def _listed(version: Version) -> str:
    names = [f"the folder {file.name}" if file.directory else file.name for file in version.files]
    return " and ".join(names) if len(names) < 4 else f"{names[0]} … {names[-1]} ({len(names)} files)"


def _near_misses(folder: Path, version: Version) -> Iterator[str]:
    """Hints for the user: files that are incomplete or misnamed."""
    lacking = [file for file in version.files if not _exists(folder / file.name, file)]
    if 0 < len(lacking) < len(version.files):
        yield f"{folder} lacks {' and '.join(file.name for file in lacking)} of them, put it there"
    if not folder.is_dir() or not lacking:
        return
    for path in sorted(folder.iterdir()):
        for file in lacking:
            same_size = file.size is not None and path.is_file() and path.stat().st_size == file.size
            if same_size and file.sha256 is not None and digest_of(path, "sha256") == file.sha256:
                yield f"{path} is {file.name} under another name, rename it"


def _content_of(path: Path, file: File, known: tuple[File, ...]) -> str:
    """The name of the known file that this one is a renamed copy of, if any."""
    same_size = [other for other in known if other.size == path.stat().st_size and other.name != file.name]
    for other in same_size:
        if other.sha256 is not None and digest_of(path, "sha256") == other.sha256:
            return f", namely {other.name}"
    return ""
