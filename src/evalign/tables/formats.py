"""Numbers and dates written as text: detect their format if it is certain, and convert them.

A column is converted only if every entry fits one format. Otherwise it stays text, and a note says why.
"""

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd

from evalign.tables.files import TableError

Note = Callable[[str], None]
NUMBER = re.compile(
    r"(?P<sign>[-+\u2212]?)\s*(?P<before>[$€£¥₹]|[A-Z]{3}(?=[\s\d]))?\s*(?P<sign2>[-+\u2212]?)"
    r"(?P<body>\d[\d.,'’ \u00a0\u202f]*|[.,]\d+)(?P<exponent>[eE][-+]?\d+)?\s*(?P<after>[%$€£¥₹]|[A-Za-zµ°/²³]{1,8})?"
)
CURRENCIES = {"USD", "EUR", "GBP", "CHF", "JPY", "INR", "CNY", *"$€£¥₹"}
SPACES = str.maketrans({"\u00a0": " ", "\u202f": " ", "’": "'", "\u2212": "-"})
# Words for a missing value, letters only, including errors of spreadsheets.
MISSING_WORDS = {
    "", "na", "nan", "null", "none", "nil", "missing", "unknown", "notavailable", "notapplicable", "nodata", "tbd",
    "div", "ref", "value", "name", "num",
}  # fmt: skip
BOUNDS = "<>=~≈≤≥ "  # before a number, as in laboratory results
MOSTLY = 0.8  # share of numbers above which a categorical column was probably meant to be numeric
SAMPLE = 500
MONTH = "(jan|feb|mar|apr|may|jun|jul|aug|sep|oct|nov|dec)[a-z]*"
DATE = re.compile(
    rf"(\d{{1,4}}[-./]\d{{1,2}}[-./]\d{{1,4}}|\d{{4}}-\d\d|\d{{1,2}}[- ]{MONTH}[- ]\d{{2,4}}|"
    rf"{MONTH} \d{{1,2}}, \d{{4}})"
    r"([ T]\d{1,2}:\d{2}(:\d{2}(\.\d+)?)?( ?[ap]m|Z|[+-]\d{2}:?\d{2})?)?",
    re.IGNORECASE,
)
DATES = (
    "ISO8601", "%Y/%m/%d", "%d.%m.%Y", "%d.%m.%y", "%d/%m/%Y", "%m/%d/%Y", "%d/%m/%y", "%m/%d/%y", "%d-%m-%Y",
    "%m-%d-%Y", "%d %b %Y", "%d-%b-%Y", "%d-%b-%y", "%d %B %Y", "%b %d, %Y", "%B %d, %Y",
)  # fmt: skip
TIMES = ("", " %H:%M", " %H:%M:%S", " %I:%M %p", " %I:%M:%S %p")
PARTS = ("days", "month", "day", "weekday", "hour")


@dataclass(frozen=True)
class NumberFormat:
    """How a column writes numbers: decimal and thousands separator, and the unit around them.

    >>> NumberFormat(",", ".").parse(pd.Series(["1.234,5", None, "7"])).tolist()
    [1234.5, nan, 7.0]
    """

    decimal: str = "."
    thousands: str = ""
    unit: str = ""
    kind: str = "number"

    def matches(self, body: str) -> bool:
        """Whether digits and separators are a number in this format."""
        d, t = re.escape(self.decimal), re.escape(self.thousands)
        plain = rf"\d*({d}\d*)?"
        grouped = rf"|[1-9]\d{{0,2}}({t}\d{{3}})+({d}\d*)?" if self.thousands else ""
        if self.thousands == ",":  # India groups by two: 12,34,567
            grouped += rf"|[1-9]\d?(,\d{{2}})+,\d{{3}}({d}\d*)?"
        return re.fullmatch(plain + grouped, body) is not None

    def parse(self, column: "pd.Series[Any]") -> "pd.Series[Any]":
        """Numbers as float64, nan for missing words; raises ValueError for anything else."""
        values = {text: self._value(text) for text in column.dropna().unique()}
        return column.map(values).astype(np.float64)

    def _value(self, text: str) -> float:
        match = NUMBER.fullmatch(clean(text))
        if match is None:
            if is_missing_word(text):
                return np.nan
            raise ValueError(f"{text!r} is not a number")
        if not self.matches(match["body"].strip()):
            raise ValueError(f"{text!r} is not a number with the decimal separator {self.decimal!r}")
        unit = unit_of(match)
        if unit != self.unit and (unit or self.unit == "%"):
            raise ValueError(f"{text!r} is not a number with the unit {self.unit!r}")
        body = match["body"].strip()
        body = body.replace(self.thousands, "") if self.thousands else body
        number = float(body.replace(self.decimal, ".") + (match["exponent"] or ""))
        return -number if "-" in (match["sign"], match["sign2"]) else number


FORMATS = [NumberFormat("."), NumberFormat(","), *(NumberFormat(d, t) for d in ".," for t in ",. '" if d != t)]


@dataclass(frozen=True)
class DateFormat:
    """How a column writes dates, as `strptime` reads it."""

    pattern: str
    kind: str = "date"

    def parse(self, column: "pd.Series[Any]") -> "pd.Series[Any]":
        words = [text for text in column.dropna().unique() if is_missing_word(text)]
        text = column.astype(object).where(column.notna() & ~column.isin(words), None)
        return pd.to_datetime(text.str.strip(), format=self.pattern, utc=True).dt.tz_localize(None)


ColumnFormat = NumberFormat | DateFormat


def format_from_json(data: Mapping[str, Any]) -> ColumnFormat:
    """The format that `dataclasses.asdict` wrote."""
    fields = {name: str(value) for name, value in data.items()}
    return DateFormat(**fields) if fields.get("kind") == "date" else NumberFormat(**fields)


def is_text(column: "pd.Series[Any]") -> bool:
    """Whether a column holds text and missing values only."""
    if column.dtype == object:
        return pd.api.types.infer_dtype(column, skipna=True) == "string"
    return isinstance(column.dtype, pd.StringDtype) and bool(column.notna().any())


def clean(text: str) -> str:
    """Normalise spaces and signs; a number in parentheses is negative, as in accounting.

    >>> clean(" ($1,250.50)")
    '-$1,250.50'
    """
    text = text.translate(SPACES).strip()
    return f"-{text[1:-1]}" if re.fullmatch(r"\([^()]*\d[^()]*\)", text) else text


def unit_of(number: re.Match[str]) -> str:
    return number["before"] or number["after"] or ""


def is_missing_word(text: str) -> bool:
    """Whether an entry stands for a missing value.

    >>> [is_missing_word(text) for text in ("n/a?", "--", "#DIV/0!", "low")]
    [True, True, True, False]
    """
    return (
        len(text) < 40
        and not re.search(r"\d", text.replace("#DIV/0!", ""))
        and (re.sub(r"[\W\d_]", "", text).casefold() in MISSING_WORDS)
    )


def convert(
    frame: pd.DataFrame,
    *,
    known: Mapping[str, ColumnFormat],
    text: Any = (),
    decimal: str | None = None,
    delimiter: str = ",",
    note: Note,
) -> dict[str, ColumnFormat]:
    """Convert text columns that hold numbers or dates in place; returns the format of each.

    `known` formats, of the training file, are applied before any are detected; `text` columns stay as they are.
    """
    formats: dict[str, ColumnFormat] = {}
    for name in frame.columns:
        column, before = frame[name], known.get(name)
        unit = getattr(before, "unit", "")
        if name in text or not is_text(column):
            if unit == "%" and column.dtype.kind in "iuf" and column.notna().any():
                raise TableError(
                    f"column {name!r} held percentages in training, but has numbers without % here; add the %"
                )
            continue
        if before is not None:
            try:
                frame[name], formats[name] = before.parse(column), before
                continue
            except ValueError:  # a format other than in training: detect it
                pass
        found = detect_number(column, name, decimal, delimiter, note) or detect_date(column, name, note)
        if found is not None:
            if before is not None and getattr(found, "unit", "") != unit:
                raise TableError(
                    f"column {name!r} had the unit {unit or 'none'} in training, but has "
                    f"{getattr(found, 'unit', '') or 'none'} here; convert it"
                )
            frame[name], formats[name] = found.parse(column), found
    return formats


def detect_number(
    column: "pd.Series[Any]", name: str, decimal: str | None, delimiter: str, note: Note
) -> NumberFormat | None:
    """The only format in which every entry is a number or a word for a missing value; None if there is none."""
    counts = column.value_counts()
    texts = [str(text) for text in counts.index]
    sample = texts[:SAMPLE]
    if sum(NUMBER.fullmatch(clean(text.lstrip(BOUNDS))) is not None for text in sample) < max(1, 0.5 * len(sample)):
        return None
    numbers = {text: match for text in texts if (match := NUMBER.fullmatch(clean(text)))}
    units = {unit_of(match) for match in numbers.values()}
    if len(units) > 1:  # words such as 12A and 1st among numbers; letters are a unit only if every row has them
        numbers = {text: match for text, match in numbers.items() if unit_of(match) in {"", "%", *CURRENCIES}}
    words = [text for text in texts if text not in numbers]
    others = [text for text in words if not is_missing_word(text)]
    found = list(numbers.values())
    symbols = {unit for match in found if (unit := unit_of(match))}
    bodies = [match["body"].strip() for match in found]
    unclear = None
    if not all(any(one.matches(body) for one in FORMATS) for body in bodies):  # dates such as 31.1.2024, addresses
        return None
    if others:
        bounds = [text for text in others if text[0] in BOUNDS and NUMBER.fullmatch(clean(text.lstrip(BOUNDS)))]
        if found and counts[[*numbers, *bounds]].sum() >= MOSTLY * counts.sum():
            unclear = _mixture("numbers", 1 - counts[others].sum() / counts.sum(), others[0])
    elif len(symbols) > 1:
        unclear = f"mixes units ({', '.join(sorted(symbols))}), and is used as categories; convert it to a single unit"
    elif symbols == {"%"} and not all(map(unit_of, found)):
        unclear = "mixes units (% and none), and is used as categories; convert it to a single unit"
    else:
        fits = _formats_of(bodies, decimal, delimiter)
        if len(fits) == 1:
            _tell(name, column, fits[0], words, symbols, bodies, note)
            return replace(fits[0], unit="".join(symbols))
        comma, point = (next((body for body in bodies if sign in body), "") for sign in ",.")
        unclear = (
            f"writes numbers as {comma!r}, which may be a decimal or a thousands separator, and is used as "
            "categories; pass --decimal , or --decimal ."
            if fits
            else f"writes numbers in several ways, such as {comma!r} and {point!r}, and is used as categories; "
            "write them in one"
        )
    if unclear is not None:
        note(f"column {name!r} {unclear}")
    return None


def _mixture(kind: str, share: float, other: str) -> str:
    return (
        f"holds {kind} in {share:.0%} of its rows but also text such as {other!r}, and is used as categories; "
        f"if that means missing, add --na {other!r}"
    )


def _formats_of(bodies: list[str], decimal: str | None, delimiter: str) -> list[NumberFormat]:
    """All formats that fit, without redundant ones."""
    fits = [one for one in FORMATS if all(one.matches(body) for body in bodies)]
    fits = [one for one in fits if not one.thousands or any(one.thousands in body for body in bodies)]
    if decimal is not None:
        return ([one for one in fits if one.decimal == decimal] or fits)[:1]
    if any(one.decimal == "." and not one.thousands for one in fits):  # format of plain numbers
        return [NumberFormat()]
    if {NumberFormat(".", ","), NumberFormat(",", "")} <= set(fits):  # "12,345": both fit
        return [NumberFormat(".", ",")] if delimiter == "," else fits
    return fits[:1]


def _tell(
    name: str, column: "pd.Series[Any]", found: NumberFormat, words: list[str], symbols: set[str], bodies: list[str],
    note: Note,
) -> None:  # fmt: skip
    said = []
    if found.decimal == "," and any("," in body for body in bodies):
        said.append("a decimal comma")
    elif found.decimal == "." and not (found.thousands or symbols or words):
        said.append("a decimal point")
    if found.thousands:
        said.append(f"{found.thousands!r} between thousands")
    if symbols:
        said.append(f"the unit {symbols.copy().pop()}")
    if words:
        said.append(_missing_in(column, words))
    note(f"column {name!r} was read as numbers with {' and '.join(said)}")


def detect_date(column: "pd.Series[Any]", name: str, note: Note) -> DateFormat | None:
    """The only date format that fits every entry except words for missing values; None if there is none, or several."""
    counts = column.value_counts(sort=False)
    texts = pd.Series([str(text).strip() for text in counts.index], dtype=object)
    missing = texts.map(is_missing_word).to_numpy(dtype=bool)
    words, texts, rows = counts.index[missing].tolist(), texts[~missing], counts.to_numpy()[~missing]
    sample, of_sample = texts[:SAMPLE], rows[:SAMPLE]
    like_dates = sample.map(lambda text: DATE.fullmatch(text) is not None).to_numpy(dtype=bool)
    if of_sample[like_dates].sum() < max(1, MOSTLY * of_sample.sum()):
        return None
    fits: list[tuple[str, pd.Series[Any]]] = []
    share, other = 0.0, ""  # share of the best-fitting format, and an entry that it does not fit
    for pattern in (date + time for date in DATES for time in (TIMES if "%" in date else ("",))):
        fitting = pd.to_datetime(sample, format=pattern, errors="coerce", utc=True).notna().to_numpy()
        if of_sample[fitting].sum() < MOSTLY * of_sample.sum():
            continue
        parsed = pd.to_datetime(texts, format=pattern, errors="coerce", utc=True)
        known = parsed.notna().to_numpy()
        if known.all():
            if not any(parsed.equals(same) for _, same in fits):
                fits.append((pattern, parsed))
        elif (found := rows[known].sum() / rows.sum()) > share:
            share, other = found, texts[~known].iloc[0]
    if len(fits) == 1:
        if words:
            note(f"column {name!r} was read as dates with {_missing_in(column, words)}")
        return DateFormat(fits[0][0])
    if fits:
        note(
            f"column {name!r} holds dates such as {texts.iloc[0]!r} in which day and month are ambiguous, "
            "and is used as categories; write them as YYYY-MM-DD"
        )
    elif share >= MOSTLY:
        note(f"column {name!r} {_mixture('dates', share, other)}")
    return None


def _missing_in(column: "pd.Series[Any]", words: Sequence[object]) -> str:
    rows = int(column.isin(words).sum())
    return f"{', '.join(map(repr, words[:3]))} for missing values in {rows} row{'s' * (rows > 1)}"


def expand_dates(frame: pd.DataFrame, *, features: Any = (), note: Note = lambda text: None) -> pd.DataFrame:
    """Replace date columns by numbers: days since 1970, month, day of the month, weekday (Monday is 0), hour.

    The hour is left out if every time is midnight; at prediction, `features`, the names in training, decide. Times of
    day and time spans become seconds.

    >>> frame = pd.DataFrame({"day": pd.to_datetime(["2024-02-29", "1970-01-02"])})
    >>> expand_dates(frame).to_dict("list")
    {'day:days': [19782.0, 1.0], 'day:month': [2.0, 1.0], 'day:day': [29.0, 2.0], 'day:weekday': [3.0, 4.0]}
    """
    expanded: dict[str, Any] = {}
    known = set(features)
    found: list[str] = []
    changed = False
    if dates := _held_dates(known, frame):
        frame = frame.assign(**dates)
    for name in frame.columns:
        column = frame[name]
        kind = _time_kind(column)
        changed = changed or kind is not None
        if kind is None:
            expanded[name] = column
        elif kind == "date":
            parts = _date_parts(pd.to_datetime(column, utc=True).dt.tz_localize(None))
            if known:
                parts = {part: values for part, values in parts.items() if f"{name}:{part}" in known}
            elif not (parts["hour"].fillna(0) != 0).any():
                del parts["hour"]
            if not known and (parts["day"].dropna() == 1).all():  # months
                del parts["day"], parts["weekday"]
            expanded |= {f"{name}:{part}": values for part, values in parts.items()}
            found.append(str(name))
        else:
            expanded[name] = _seconds(column, kind)
    if not changed:
        return frame
    if found:
        names = ", ".join(map(repr, found))
        note(f"the dates in {names} were converted to days, month and, where they vary, day, weekday and hour")
    result = pd.DataFrame(expanded, index=frame.index)
    result.attrs = frame.attrs
    return result


def column_of_file(name: str, names: Collection[str]) -> str:
    """The original column of one made by `expand_dates`; `names` are all columns.

    >>> column_of_file("born:month", ["born:days", "born:month", "sex"])
    'born'
    """
    stem, _, part = name.rpartition(":")
    return stem if part in PARTS and {f"{stem}:days", f"{stem}:month"} <= {*names} else name


def _held_dates(known: set[str], frame: pd.DataFrame) -> dict[str, Any]:
    """Columns that held dates in training and are empty or text here, as dates; raises for anything else."""
    parts = (feature.rpartition(":") for feature in known if feature not in frame)
    dates: dict[str, Any] = {}
    for name in sorted({name for name, _, part in parts if name and part in PARTS}):
        if name not in frame:
            raise TableError(f"the table has no column {name!r}, which held dates in training; add it")
        if _time_kind(frame[name]) == "date":
            continue
        column = frame[name].astype(object).where(frame[name].notna(), None)
        try:
            dates[name] = pd.to_datetime(column, format="ISO8601", utc=True).dt.tz_localize(None)
        except (ValueError, TypeError):
            other = str(column.dropna().iloc[0])
            raise TableError(
                f"column {name!r} held dates in training, but holds {other!r} here; write dates as YYYY-MM-DD"
            ) from None
    return dates


def _time_kind(column: "pd.Series[Any]") -> str | None:
    kind = getattr(column.dtype, "kind", "")
    if kind in "Mm":
        return {"M": "date", "m": "timedelta"}[kind]
    if column.dtype != object:
        return None
    inferred = pd.api.types.infer_dtype(column, skipna=True)
    return {"date": "date", "datetime": "date", "time": "time", "timedelta": "timedelta"}.get(inferred)


def _date_parts(dates: "pd.Series[Any]") -> dict[str, "pd.Series[Any]"]:
    days = (dates - pd.Timestamp("1970-01-01")) / pd.Timedelta(days=1)
    named = {"month": dates.dt.month, "day": dates.dt.day, "weekday": dates.dt.day_of_week}
    hour = dates.dt.hour + dates.dt.minute / 60
    return {"days": days} | {part: values.astype(np.float64) for part, values in named.items()} | {"hour": hour}


def _seconds(column: "pd.Series[Any]", kind: str) -> "pd.Series[Any]":
    if kind == "timedelta":
        return pd.to_timedelta(column).dt.total_seconds()
    seconds = [np.nan if pd.isna(t) else 3600 * t.hour + 60 * t.minute + t.second for t in column]
    return pd.Series(seconds, index=column.index, dtype=np.float64)
