"""Write files atomically: a reader sees the old file or the new one, never a part."""

import errno
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

DISK_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


def write_atomically(path: Path, content: bytes | str) -> Path:
    """Write next to the target, flush to disk, then rename over it; errors name the target.

    >>> import tempfile
    >>> path = write_atomically(Path(tempfile.mkdtemp()) / "a.txt", "hello")
    >>> path.read_text()
    'hello'
    """
    path = Path(path)
    data = content.encode() if isinstance(content, str) else content
    with _naming(path), created(path.parent):
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.chmod(name, 0o666 & ~_umask())  # mkstemp makes private files
            os.replace(name, path)
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise
    return path


@contextmanager
def staged_folder(folder: Path, *, last: str) -> Iterator[Path]:
    """A temporary folder whose files are moved into `folder` at the end, `last` as the last; none after an error.

    >>> import tempfile
    >>> folder = Path(tempfile.mkdtemp()) / "run"
    >>> with staged_folder(folder, last="done.json") as stage:
    ...     _ = (stage / "done.json").write_text("{}")
    >>> [path.name for path in folder.iterdir()]
    ['done.json']
    """
    with (
        _naming(folder),
        created(folder),
        tempfile.TemporaryDirectory(dir=folder, prefix=".writing-") as name,
    ):
        yield Path(name)
        names = sorted(os.listdir(name), key=lambda file: file == last)
        (folder / last).unlink(missing_ok=True)  # from here on the folder is incomplete until `last` is there
        for file in names:
            os.replace(Path(name) / file, folder / file)


@contextmanager
def created(folder: Path, *files: Path) -> Iterator[None]:
    """Create a folder with its parents; after an error remove new `files`, and new folders that are empty."""
    made = [parent for parent in (folder, *folder.parents) if not parent.exists()]
    new = [file for file in files if not file.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    try:
        yield
    except BaseException:
        for file in new:
            file.unlink(missing_ok=True)
        for parent in made:
            if not any(parent.iterdir()):
                parent.rmdir()
        raise


def remove_staged(folder: Path) -> None:
    """Remove what a killed process left in a folder: staged folders and temporary files."""
    for path in folder.glob(".*"):
        if path.name.startswith(".writing-"):
            shutil.rmtree(path, ignore_errors=True)


def check_writable(path: Path) -> None:
    """Raise an OSError that names `path` unless a file can be created there, or in the nearest folder that exists."""
    folder = path if path.is_dir() else next(parent for parent in path.absolute().parents if parent.exists())
    with _naming(path), tempfile.TemporaryFile(dir=folder) as file:
        file.write(b"\0" * 4096)
        file.flush()
        os.fsync(file.fileno())


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Name the target in errors of writing, which would name a temporary file or nothing."""
    try:
        yield
    except OSError as error:
        first = error.__cause__ if isinstance(error.__cause__, OSError) else error  # it may name the path already
        advice = "free some space, or choose another place" if first.errno in DISK_FULL else "choose another place"
        raise OSError(f"{path} cannot be written ({first.strerror or first}); {advice}") from first


def _umask() -> int:
    current = os.umask(0)
    os.umask(current)
    return current
