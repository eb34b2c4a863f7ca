"""The boosting libraries by name, imported when first asked for: neither is needed for anything else."""

from dataclasses import dataclass

from evalign import _checks as checks
from evalign.boosting.growth import Grower, Trees

LIBRARIES = ("lightgbm", "xgboost")


@dataclass(frozen=True)
class Library:
    grower: type[Grower]
    trees: type[Trees]


def find_library(name: str) -> Library:
    """What grows trees, and what reads them.

    >>> find_library("lightgbm").trees.__name__
    'LightGBMTrees'
    """
    checks.check_choice("library", name, LIBRARIES)
    try:
        if name == "lightgbm":
            from evalign.boosting.lightgbm import LightGBMGrower, LightGBMTrees

            return Library(LightGBMGrower, LightGBMTrees)
        from evalign.boosting.xgboost import XGBoostGrower, XGBoostTrees

        return Library(XGBoostGrower, XGBoostTrees)
    except ModuleNotFoundError as error:
        if error.name != name:
            raise
        raise ImportError(
            f"library={name!r} needs the package {name}; install it with pip install 'evalign[boost]'"
        ) from None


def is_installed(name: str) -> bool:
    """Whether a library can be imported, without importing it."""
    from importlib.util import find_spec

    return find_spec(name) is not None
