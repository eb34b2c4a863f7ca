"""Atomic file writes: a reader sees the old file or the new one, never a part."""

import os
import tempfile
from pathlib import Path


def write_atomically(path: Path, content: bytes | str) -> Path:
    """Write beside the target, flush to disk, then rename over it.

    >>> import tempfile
    >>> path = write_atomically(Path(tempfile.mkdtemp()) / "a.txt", "hello")
    >>> path.read_text()
    'hello'
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    data = content.encode() if isinstance(content, str) else content
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


def _umask() -> int:
    current = os.umask(0)
    os.umask(current)
    return current
