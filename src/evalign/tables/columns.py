"""Columns of a table: kinds, conversion to numbers or category codes, and encoders learned from training rows.

Dates, lists and mixtures of numbers and text raise an error that names the column and says what to do. An encoder holds
plain numbers and strings: JSON holds it, and loading one executes nothing.
"""

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from pandas.api.types import infer_dtype
from scipy.special import ndtri

from evalign.tables.files import quoted

Column: TypeAlias = "pd.Series[Any] | pd.Index[Any] | NDArray[Any]"
Kind = Literal["number", "bool", "text", "empty"]
Label = str | int  # name of a column, or its position if it has none

LARGEST = 1e300  # larger numbers are clipped, so that the difference of any two stays finite
NUMPY_KINDS: dict[str, Kind] = {"b": "bool", "i": "number", "u": "number", "f": "number", "U": "text", "T": "text"}
INFERRED: dict[str, Kind] = {
    "boolean": "bool",
    "integer": "number",
    "floating": "number",
    "mixed-integer-float": "number",
    "decimal": "number",
    "string": "text",
    "empty": "empty",
}
NUMPY_REFUSED = {"M": "datetime", "m": "timedelta", "c": "complex", "S": "bytes", "V": "record"}
REFUSED = {
    **dict.fromkeys(
        ("datetime", "datetime64", "date"), ("dates", "turn it into numbers with evalign.tables.formats.expand_dates")
    ),
    **dict.fromkeys(("timedelta", "timedelta64"), ("time spans", "turn it into numbers first, e.g. seconds")),
    "time": ("times of day", "turn it into numbers first, e.g. seconds since midnight"),
    "period": ("periods", "turn it into numbers first, e.g. the year"),
    "interval": ("intervals", "turn it into numbers or text first, e.g. the midpoint"),
    "complex": ("complex numbers", "give the real and the imaginary part a column each"),
    "bytes": ("bytes", "decode it to text first"),
    "record": ("records", "give each field a separate column"),
}


class ColumnTypeError(ValueError, TypeError):
    """A column that cannot be encoded; also a TypeError, which scikit-learn expects here."""


def column_kind(column: Column, label: Label) -> Kind:
    """Kind of a column, by its dtype, or by its values if the dtype is object; raises for unsupported ones."""
    dtype = column.dtype
    if isinstance(dtype, pd.CategoricalDtype):
        return column_kind(dtype.categories, label) if len(dtype.categories) else "empty"
    if isinstance(dtype, pd.StringDtype):
        return "text"
    if dtype.kind in NUMPY_KINDS:
        return NUMPY_KINDS[dtype.kind]
    # Period and interval dtypes have kind "O" too; only their name distinguishes them from Python objects.
    inferred = NUMPY_REFUSED.get(dtype.kind) or infer_dtype(column, skipna=True)
    if inferred in REFUSED:
        what, remedy = REFUSED[inferred]
        raise ColumnTypeError(f"column {label!r} holds {what}; {remedy}")
    if inferred in INFERRED:
        return INFERRED[inferred]
    values = np.asarray(column, dtype=object)
    types = sorted({type(value).__name__ for value in values[~pd.isna(values)]})
    if types == ["str"]:  # text with a missing date in it
        return "text"
    what = f"holds {types[0]} values" if len(types) == 1 else f"mixes {' and '.join(types)} values"
    raise ColumnTypeError(
        f"column {label!r} {what}, but every argument must be a string or a number, of one type per column; "
        "make it all numbers or all text, e.g. with astype(str), or drop it"
    )


def floats(column: Column, label: Label) -> NDArray[np.float64]:
    """A copy in float64, nan where a value is missing, clipped at ±1e300; infinity is refused."""
    dtype = column.dtype
    with np.errstate(over="ignore"):  # a long double beyond float64 becomes an infinity, reported below
        if isinstance(dtype, np.dtype) and dtype.kind != "O":
            x = np.array(column, dtype=np.float64)
        else:
            known = ~np.asarray(pd.isna(column))
            x = np.full(len(known), np.nan)
            try:
                x[known] = np.asarray(column[known], dtype=np.float64)
            except OverflowError:  # Python integers are unbounded
                raise ValueError(f"column {label!r} holds a number larger than 1.8e308; make it smaller") from None
    if infinite := int(np.count_nonzero(np.isinf(x))):
        rows = "1 row" if infinite == 1 else f"{infinite} rows"
        raise ValueError(
            f"column {label!r} holds infinity in {rows}; replace it with a finite number, or with nan for a missing "
            "value"
        )
    return np.clip(x, -LARGEST, LARGEST, out=x)


def check_kind(column: Column, kind: Kind, label: Label, *, expected: str, right: bool) -> None:
    """Raise unless a column is of the same kind as in training; a column without values always passes."""
    if right or kind == "empty":
        return
    values = np.asarray(column, dtype=object)
    values = values[~pd.isna(values)]
    if len(values):
        raise ColumnTypeError(f"column {label!r} held {expected} in training, got {values[0]!r}; pass the same kind")


def factorized(column: Column) -> tuple[NDArray[Any], NDArray[Any]]:
    """Codes (n,), -1 where missing, and the values they stand for as Python objects."""
    if isinstance(column, pd.Series) and isinstance(column.dtype, pd.CategoricalDtype):
        return column.cat.codes.to_numpy(), np.asarray(column.cat.categories, dtype=object)
    if column.dtype.kind in "UT":
        column = np.asarray(column, dtype=object)
    codes, uniques = pd.factorize(column)
    return codes, np.asarray(uniques, dtype=object)


BOUND = 1e4  # on standardised values; among n training rows none passes sqrt(n - 1), so below 1e8 rows none is touched
QUANTILES = 1000
RANK_MARGIN = 1e-7  # ranks end this far from 0 and 1, i.e. at 5.2 standard deviations, as in scikit-learn


def mean_and_std(x: NDArray[np.float64]) -> tuple[float, float]:
    """Mean and standard deviation (over n) in two passes; overwrites `x`."""
    _, exponent = math.frexp(max(-float(x.min()), float(x.max())))
    exponent = exponent if abs(exponent) > 300 else 0
    if exponent:  # squares would leave float64's range; a power of two scales without rounding
        np.ldexp(x, -exponent, out=x)
    mean = float(x.mean())
    x -= mean
    np.square(x, out=x)
    return math.ldexp(mean, exponent), math.ldexp(math.sqrt(float(x.mean())), exponent)


Numeric = Literal["standard", "quantile", "both"]
FEW, MOST = 64, 1024  # categories per column that are always distinguished, and at most
NUMERIC: tuple[Numeric, ...] = ("standard", "quantile", "both")


class Widths(NamedTuple):
    """Number of encoded columns of each storage kind, in this order."""

    exact: int  # any float32
    rounded: int  # ranks, which float16 holds with sufficient precision
    flags: int  # 0 or 1


class Blocks(NamedTuple):
    """Output of a column: a matrix (n, k) per storage kind of `Widths`, of any suitable dtype."""

    exact: NDArray[Any]
    rounded: NDArray[Any]
    flags: NDArray[Any]


@dataclass(frozen=True)
class NumberColumn:
    """(x - shift) / scale, or the normal quantile of the rank of x, or both; scale 0 marks a constant, all zeros.

    A missing value becomes `fill`; `indicator` adds a column that marks it if training had missing values.
    """

    kind: Literal["number", "bool"]
    shift: float
    scale: float
    fill: float
    indicator: bool
    quantiles: tuple[float, ...] | None = None
    both: bool = False  # the rank in addition to the scaled value

    @property
    def widths(self) -> Widths:
        return Widths(int(self.quantiles is None or self.both), int(self.quantiles is not None), int(self.indicator))

    @property
    def width(self) -> int:
        return sum(self.widths)

    @property
    def constant(self) -> bool:
        return self.scale == 0 and not self.indicator

    def names(self, name: str) -> list[str]:
        return [name, *([f"{name}=<rank>"] if self.both else []), *([f"{name}=<missing>"] if self.indicator else [])]

    def read(self, column: Column, kind: Kind, label: Label) -> NDArray[np.float64]:
        """The column's numbers, nan where missing; a type other than in training is refused."""
        expected = "numbers" if self.kind == "number" else "true/false values"
        check_kind(column, kind, label, expected=expected, right=kind != "text")
        x = floats(column, label)
        odd = (x != 0) & (x != 1) & ~np.isnan(x)
        if self.kind == "bool" and kind == "number" and odd.any():
            raise ColumnTypeError(
                f"column {label!r} held true/false values in training, got {x[odd][0]:g}; pass 0 or 1"
            )
        return x

    def write(self, column: Column, kind: Kind, label: Label, out: Blocks) -> None:
        """Write to `out`, which must hold zeros."""
        x = self.read(column, kind, label)
        missing = np.isnan(x)
        if self.indicator:
            out.flags[:, 0] = missing
        if self.scale == 0:
            return
        if self.quantiles is not None:
            rank = self.ranked(x)
            rank[missing] = self.fill
            # A thousand quantiles give ranks of three digits, in every storage kind.
            out.rounded[:, 0] = rank.astype(np.float16)
            if not self.both:
                return
        x = self._scaled(x)
        x[missing] = self.fill
        out.exact[:, 0] = x

    def _scaled(self, x: NDArray[np.float64]) -> NDArray[np.float64]:
        if self.kind == "bool":
            return x
        with np.errstate(over="ignore"):  # overflow ends at the bound
            x -= self.shift
            x /= self.scale
        return np.clip(x, -BOUND, BOUND, out=x)

    def ranked(self, x: NDArray[np.float64]) -> NDArray[np.float64]:
        q = np.array(self.quantiles)
        levels = np.linspace(0, 1, len(q))
        # A value that spans several quantiles gets the middle of its ranks, from below and from above.
        rank = np.interp(x, q, levels)
        rank -= np.interp(-x, -q[::-1], -levels[::-1])
        rank *= 0.5
        # DIFFERS: scikit-learn adds an absolute 1e-7 here, which flattens columns of tiny numbers.
        rank[x <= q[0]] = 0
        rank[x >= q[-1]] = 1
        normal: NDArray[np.float64] = ndtri(np.clip(rank, RANK_MARGIN, 1 - RANK_MARGIN, out=rank))
        return normal


@dataclass(frozen=True)
class CategoryColumn:
    """One column per category, one for all others and one for missing values, the last two if training had them.

    An unseen category goes to the others if there are any (they are not stored separately), else it is all zeros.
    `id_like` marks a column of more than 64 values in which over half the rows have distinct ones.
    """

    values: tuple[str | float, ...]
    text: bool
    other: bool
    missing: bool
    id_like: bool
    kind: Literal["category"] = "category"

    @property
    def widths(self) -> Widths:
        return Widths(0, 0, self.width)

    @property
    def width(self) -> int:
        return len(self.values) + self.other + self.missing

    @property
    def constant(self) -> bool:
        return self.width == 1 and not self.other  # identifiers vary even if no value was kept

    def names(self, name: str) -> list[str]:
        return [f"{name}={value}" for value in self.values] + [
            f"{name}=<{extra}>" for extra in ("other", "missing") if getattr(self, extra)
        ]

    def read(self, column: Column, kind: Kind, label: Label) -> NDArray[np.int64]:
        """Index of each row's category: -1 for a category unseen in training, -2 for a missing value."""
        expected = "text" if self.text else "categories that are numbers"
        check_kind(column, kind, label, expected=expected, right=self.text == (kind == "text"))
        codes, uniques = factorized(column)
        place = np.full(len(uniques) + 1, -2)  # the last is for code -1, a missing value
        found = pd.Index(self.values, dtype=object).get_indexer(pd.Index(uniques, dtype=object))
        place[:-1] = np.where(found < 0, len(self.values) if self.other else -1, found)
        at: NDArray[np.int64] = place[codes]
        return at

    def write(self, column: Column, kind: Kind, label: Label, out: Blocks) -> None:
        """Write to `out`, which must hold zeros."""
        at = self.read(column, kind, label)
        if self.missing:
            at[at == -2] = self.width - 1
        rows = np.flatnonzero(at >= 0)
        out.flags[rows, at[rows]] = 1


AnyColumn = NumberColumn | CategoryColumn


def fit_numbers(
    column: Column, kind: Literal["number", "bool"], label: Label, *, numeric: Numeric
) -> NumberColumn | None:
    """Learn a column of numbers; None if it has no values."""
    x = floats(column, label)
    missing = np.isnan(x)
    indicator = bool(missing.any())
    if indicator:
        x = x[~missing]
    if not x.size:
        return None
    ends = float(x.min()), float(x.max())
    # The quantiles come first, since the moments overwrite x.
    return number_column(kind, numeric, ends, indicator, lambda: quantiles_of(x), lambda: mean_and_std(x))


def number_column(
    kind: Literal["number", "bool"], numeric: Numeric, ends: tuple[float, float], indicator: bool,
    quantiles: Callable[[], tuple[float, ...]], moments: Callable[[], tuple[float, float]],
) -> NumberColumn:  # fmt: skip
    """The encoder of numbers between these ends, with the given quantiles, and mean and standard deviation."""
    if ends[0] == ends[1]:  # compared exactly: the rounded mean of equal numbers can be off and leave a tiny deviation
        return NumberColumn(kind, ends[0], 0.0, 0.0, indicator)
    if kind == "bool":
        return NumberColumn(kind, 0.0, 1.0, moments()[0], indicator)
    found = None if numeric == "standard" else quantiles()
    if numeric == "quantile":
        return NumberColumn(kind, 0.0, 1.0, 0.0, indicator, found)
    return NumberColumn(kind, *moments(), 0.0, indicator, found, both=numeric == "both")


def quantiles_of(x: NDArray[np.float64]) -> tuple[float, ...]:
    """At most `QUANTILES` quantiles, from the lowest to the highest value."""
    q = np.percentile(x, np.linspace(0, 100, min(QUANTILES, len(x))))
    return tuple(np.maximum.accumulate(q).tolist())


def fit_categories(column: Column, kind: Kind, label: Label, *, max_categories: int) -> CategoryColumn | None:
    """Learn a column of categories; None if it has no values."""
    codes, uniques = factorized(column)
    counts = np.bincount(codes[codes >= 0], minlength=len(uniques))
    return categories_of_counts(
        uniques, counts, label, text=kind == "text", missing=bool((codes < 0).any()), rows=len(codes),
        max_categories=max_categories,
    )  # fmt: skip


def categories_of_counts(
    uniques: NDArray[Any],
    counts: NDArray[np.int64],
    label: Label,
    *,
    text: bool,
    missing: bool,
    rows: int,
    max_categories: int,
    forgotten: int = 0,
) -> CategoryColumn | None:
    """An encoder from the counts of the values in `rows` rows; `forgotten` further values were not counted."""
    seen = int(np.count_nonzero(counts)) + forgotten
    if not seen:
        return None
    many = seen > min(FEW, max_categories)
    # If there are many categories, drop those seen once: they are uninformative, and identifiers consist of them.
    most = min(max_categories, len(counts))
    least = max(2, int(np.partition(counts, -most)[-most])) if many else 1
    kept = np.flatnonzero(counts >= least)
    values = [plain(value, label) for value in uniques[kept]]
    by_count = sorted(zip((-counts[kept]).tolist(), values, strict=True))[:max_categories]
    return CategoryColumn(
        values=tuple(sorted(value for _, value in by_count)),
        text=text,
        other=seen > len(by_count),
        missing=missing,
        id_like=many and seen > rows / 2,
    )


def plain(value: Any, label: Label) -> Any:
    """A category as a JSON value."""
    if isinstance(value, str):
        return str(value)
    if isinstance(value, (bool, int)):
        return value
    if not math.isfinite(value):
        raise ValueError(f"column {label!r} has a category that is infinite; give it a name instead")
    return float(value)


def column_to_json(column: AnyColumn) -> dict[str, Any]:
    return {key: list(value) if isinstance(value, tuple) else value for key, value in asdict(column).items()}


def column_from_json(data: Any) -> AnyColumn:
    """The encoder from the output of `column_to_json`; anything else raises ValueError."""
    fields = dict(data) if isinstance(data, dict) else {}
    if fields.get("kind") == "category":
        _check_types(
            fields, {"values": list, "text": bool, "other": bool, "missing": bool, "id_like": bool, "kind": str}
        )
        values = tuple(fields["values"])
        sort = str if fields["text"] else int | float
        if not all(isinstance(v, sort) and v == v for v in values) or len(set(values)) < len(values):
            raise ValueError("the categories of a column must be distinct and all text or all numbers")
        return CategoryColumn(**{**fields, "values": values})
    number = int | float  # JSON writers of other languages drop the ".0"
    types = {
        "shift": number, "scale": number, "fill": number, "indicator": bool, "quantiles": list | None, "kind": str,
        "both": bool,
    }  # fmt: skip
    _check_types(fields, types)
    if fields["kind"] not in ("number", "bool"):
        raise ValueError(f"the kind of a column must be number, bool or category, got {fields['kind']!r}")
    q = fields["quantiles"]
    numbers = [fields["shift"], fields["scale"], fields["fill"], *(q or ())]
    if not all(isinstance(v, number) and math.isfinite(v) for v in numbers) or fields["scale"] < 0:
        raise ValueError("shift, scale, fill and quantiles of a column must be finite numbers, and scale at least 0")
    if fields["both"] and q is None:
        raise ValueError("a column of both kinds must have quantiles")
    if q is not None and (len(q) < 2 or q != sorted(q)):
        raise ValueError("the quantiles of a column must be two or more increasing numbers")
    floating = {key: float(fields[key]) for key in ("shift", "scale", "fill")}
    return NumberColumn(**{**fields, **floating, "quantiles": None if q is None else tuple(map(float, q))})


def _check_types(fields: dict[str, Any], types: dict[str, Any]) -> None:
    if set(fields) != set(types) or not all(isinstance(fields[key], kind) for key, kind in types.items()):
        raise ValueError(f"a column must have the fields {', '.join(types)} of the right types, got {quoted(fields)}")
