"""Freed memory is returned to the system, if the platform supports it."""

import ctypes
import platform
import types
from pathlib import Path

import numpy as np
import pytest

from evalign.tables.packed import release_memory


def resident_mib() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 / 2**20


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="needs glibc")
def test_holes_between_what_is_in_use_go_back() -> None:
    pieces = [np.ones(8000) for _ in range(2000)]  # 122 MiB, each too small for pages of its own
    kept = pieces[::100]
    held = resident_mib()
    del pieces
    release_memory()
    assert resident_mib() < held - 60
    assert sum(piece.sum() for piece in kept) == 20 * 8000


@pytest.mark.parametrize("error", [OSError, TypeError, AttributeError])
def test_without_glibc_nothing_happens(monkeypatch: pytest.MonkeyPatch, error: type[Exception]) -> None:
    asked = []

    def no_library(name: None) -> types.SimpleNamespace:
        asked.append(name)
        raise error("not here")

    monkeypatch.setattr(ctypes, "CDLL", no_library)
    release_memory()
    assert asked == [None]
