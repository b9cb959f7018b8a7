"""Decide how each column of a table becomes features (numbers, dates, categories or texts), or that it is not used."""

import re
from collections import Counter
from collections.abc import Callable, Collection
from datetime import date
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from warpi.data.decode import SUFFIXES
from warpi.data.numeric import (
    CategoryColumn,
    Column,
    DateColumn,
    Floats,
    NumberColumn,
    VectorColumn,
    months_of,
    weekdays_of,
)
from warpi.data.sparse import fit_texts
from warpi.datasets.columns.raw import Raw, Words
from warpi.datasets.delimited_files import GAPS, drop_flag, is_nameless, is_number, shorten_list, warn_once
from warpi.datasets.labels import MARK_NAMES, parse_marks, to_texts
from warpi.errors import UserError

_ENOUGH_ROWS = 20  # with fewer rows, the frequency of values is not checked
MANY_CATEGORIES = 50  # with more categories, rare ones are pooled
RARE = 3  # categories with fewer rows than this are rare
_MONTHS = ["jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec"]
_MONTH = rf"(?P<name>{'|'.join(_MONTHS)})[a-z]*\.?"
_TIME = (
    r"([T ]+(?P<hour>\d\d?):(?P<minute>\d\d)(:(?P<second>\d\d([.,]\d+)?))?( ?(?P<half>[ap])m)?"
    r"( ?(Z|UTC|(?P<zone>[+-]\d\d):?(?P<zone_minute>\d\d)))?)?"
)
_DATES = {  # how dates may be written, by the order of their parts
    order: [re.compile(form + _TIME, re.IGNORECASE) for form in forms]
    for order, forms in {
        "ymd": [r"(?P<y>\d{4})(?P<mark>[-/.])(?P<m>\d\d?)((?P=mark)(?P<d>\d\d?))?"],
        "dmy": [
            r"(?P<d>\d\d?)(?P<mark>[-/.])(?P<m>\d\d?)(?P=mark)(?P<y>\d{4}|\d\d)",
            rf"(?P<d>\d\d?)[- ]{_MONTH}[- ,]+(?P<y>\d{{4}}|\d\d)",
        ],
        "mdy": [
            r"(?P<m>\d\d?)(?P<mark>[-/.])(?P<d>\d\d?)(?P=mark)(?P<y>\d{4}|\d\d)",
            rf"{_MONTH} (?P<d>\d\d?),? (?P<y>\d{{4}})",
        ],
    }.items()
}
_SIGNS = "%$€£¥₹ \N{NO-BREAK SPACE}\N{NARROW NO-BREAK SPACE}"  # at the ends of a number
_SPACES = re.compile(r"(?<=\d)[' \N{NO-BREAK SPACE}\N{NARROW NO-BREAK SPACE}](?=\d{3}(\D|$))")  # between thousands
_THOUSANDS = re.compile(r"[+-]?\d{1,3}(,\d{3})+(\.\d*)?")
_DECIMAL_COMMA = re.compile(r"[+-]?(\d{1,3}(\.\d{3})+|\d+)?(,\d+)?([eE][+-]?\d+)?")
_NOTATIONS = ("plain", "signs", "thousands", "decimal comma")
_WITH_UNIT = re.compile(r"[+-]?\d([\d.,]*\d)? ?(?P<unit>([^\W\d_]|[°'\"/²³])+)")  # such as 18.3 °C or 1,200 km/h
_UNIT = ", unit "  # between a notation and the unit
_ID_NAME = re.compile(r"(^|[^a-z])(id|uuid|guid|row|rowid|rownum|index|idx|key|hash|unnamed: [\d.]+)$")
_ID_ENDING = re.compile(r"[a-z](Id|ID)$")


class Notes:
    """Decisions about the columns of a table. Columns with the same explanation share one sentence."""

    def __init__(self) -> None:
        self.columns: dict[str, list[str]] = {}

    def add(self, sentence: str, column: str) -> None:
        self.columns.setdefault(sentence, []).append(column)

    def lines(self) -> list[str]:
        """The sentences, with the names of the columns in place of {}."""
        return [sentence.format(shorten_list(columns)) for sentence, columns in self.columns.items()]

    def log(self, path: object) -> None:
        for line in self.lines():
            warn_once(f"{path}: {line}")


KEEP = "keep one with --types COLUMN=KIND (number, category, date or text)"
_IDS = "not used, because the values look like ids: {}; " + KEEP
_CONSTANT = "not used, because the value is the same in every row: {}; " + KEEP
_ALL_DIFFERENT = "not used, because the value is different in almost every row: {}; " + KEEP
_IMAGES = (
    "{} names image files and is not used; to learn from the images, rename the column to 'path' in a .csv or .tsv"
)
_NOTATION = "numbers with extra characters are read as numbers: {}; to read them as words: --types COLUMN=category"
_DATE_NOTE = "dates are read as days since 1970, month and weekday: {}; to read them as words: --types COLUMN=category"
_AMBIGUOUS = "dates are read as month/day/year: {}; if the day comes first, write them like 2024-01-31"
_TEXT_NOTE = (
    "texts are read as words and pairs of words (tf-idf): {}; to read whole cells as words: --types COLUMN=category"
)
_POOLED = "rare values become one category, 'other': {}; to ignore the column: --drop COLUMN"


class Chooser(NamedTuple):
    """Decides how the columns of a training table become features."""

    notes: Notes
    fit: NDArray[np.bool_]  # [N] which rows are training rows; they determine medians, means and vocabularies
    max_categories: int  # of a column; the most frequent ones are kept
    declared: bool  # whether the file declares types: then a few numbers that are stored as text are categories

    def choose(self, name: str, raw: Raw, kind: str | None) -> Column | None:
        """How a column becomes features; None if it is not used. `kind` is the user's choice."""
        if not isinstance(raw, Words) and raw.ndim == 2:
            return VectorColumn(tuple(map(float, np.nan_to_num(_mean(raw[self.fit])))))
        if kind is None and (sentence := self._why_unused(name, raw)):
            self.notes.add(sentence, repr(name))
            return None
        if not isinstance(raw, Words) and kind in ("category", "text"):
            raw = Words.of(to_texts(raw))
        if (parsed := self.parse(name, raw, kind)) or not isinstance(raw, Words):
            return parsed
        if kind == "text" or (kind is None and (name.lower() == "text" or is_text(raw))):
            column = fit_texts([raw.words[k] for k in raw.codes[self.fit].tolist()])
            if column is not None:
                self.notes.add(_TEXT_NOTE, f"{name!r} ({column.width} features)")
                return column
        return self._category(name, raw)

    def parse(self, name: str, raw: Raw, kind: str | None = None) -> NumberColumn | DateColumn | None:
        """How a column becomes numbers or dates; None if it contains other words, or if the user chose another kind."""
        if not isinstance(raw, Words):
            return self._date(raw, "ymd") if raw.dtype.kind == "M" else self._number(raw, "plain")
        if kind in (None, "number"):
            notation = find_notation(raw, forced=kind is not None)
            is_code = self.declared and kind is None and notation == "plain" and len(raw.words) <= _ENOUGH_ROWS
            if notation and not is_code:
                if notation != "plain":
                    self.notes.add(_NOTATION, f"{name!r} ({_example(raw)!r})")
                return self._number(raw, notation)
            if kind:
                raise UserError(f"column {name!r} cannot be read as numbers: it contains {_example(raw)!r}")
        if kind in (None, "date"):
            order, is_ambiguous = find_date_order(raw)
            if order:
                self.notes.add(_AMBIGUOUS if is_ambiguous else _DATE_NOTE, f"{name!r} ({_example(raw)!r})")
                return self._date(raw, order)
            if kind:
                raise UserError(f"column {name!r} cannot be read as dates: it contains {_example(raw)!r}")
        return None

    def _why_unused(self, name: str, raw: Raw) -> str | None:
        """Why a column is not used, as a sentence for `notes`."""
        n = len(self.fit)
        if is_nameless(name) and is_id(name, raw):
            return _IDS
        words = [word for word in raw.words if word] if isinstance(raw, Words) else []
        if are_image_names(words) and 10 * len(words) >= 9 * n:
            return _IMAGES
        if n < _ENOUGH_ROWS:
            return None
        if isinstance(raw, Words):
            if len(raw.words) == 1:
                return _CONSTANT
        elif len(np.unique(raw)) == 1:  # all missing counts as one value
            return _CONSTANT
        return _IDS if is_id(name, raw) else None

    def _number(self, raw: Raw, notation: str) -> NumberColumn:
        numbers = read_numbers(raw, notation)[0]
        return NumberColumn(self._median(numbers), bool(np.isnan(numbers).any()), notation)

    def _date(self, raw: Raw, order: str) -> DateColumn:
        days = read_days(raw, order)[0]
        known = np.floor(days[self.fit & ~np.isnan(days)])
        varies = [len(known) > 0 and np.ptp(part) > 0 for part in (months_of(known), weekdays_of(known))]
        return DateColumn(self._median(days), bool(np.isnan(days).any()), order, *map(bool, varies))

    def _median(self, values: Floats) -> float:
        known = values[self.fit & ~np.isnan(values)]
        return float(np.median(known)) if len(known) else 0.0

    def _category(self, name: str, raw: Words) -> CategoryColumn | None:
        counts = raw.counts()
        order = sorted((k for k, word in enumerate(raw.words) if word), key=lambda k: (-counts[k], raw.words[k]))
        n = len(raw.codes)
        kept = order
        if len(order) > max(MANY_CATEGORIES, n // 20):
            kept = [k for k in order if counts[k] >= RARE]
        kept = kept[: self.max_categories]
        has_gaps = "" in raw.words
        is_pooled = len(kept) < len(order)
        if is_pooled and not kept and not has_gaps:
            self.notes.add(_ALL_DIFFERENT, repr(name))
            return None
        if is_pooled:
            self.notes.add(_POOLED, f"{name!r} ({len(kept)} of {len(order)} values are kept)")
        names = sorted(raw.words[k] for k in kept)
        return CategoryColumn(tuple([""] * has_gaps + names), is_pooled)


def is_id(name: str, raw: Raw) -> bool:
    """Whether a column seems to number or name its rows.

    Integers do if they count up by one, or if they are all different and the column is named like an id. Words do if
    (almost) all are different, and they are neither numbers, dates nor texts.
    """
    named = bool(_ID_NAME.search(name.lower()) or _ID_ENDING.search(name))
    if isinstance(raw, Words):
        filled = int((raw.counts()[[k for k, word in enumerate(raw.words) if word]]).sum())
        distinct = len([word for word in raw.words if word])
        if distinct < (0.9 if named else 1) * filled or 2 * filled < len(raw.codes):
            return False
        return find_notation(raw) is None and find_date_order(raw)[0] is None and not is_text(raw)
    if raw.dtype.kind == "M" or (raw.dtype.kind == "f" and not (raw == np.floor(raw)).all()):
        return False
    return bool((np.diff(raw.astype(np.float64)) == 1).all()) or (named and len(np.unique(raw)) == len(raw))


def is_text(raw: Words) -> bool:
    """Whether the cells are texts: mostly different, of several words, some of which occur in several cells."""
    words = [word for word in raw.words if word]
    filled = len(raw.codes) - int(raw.counts()[raw.words.index("")]) if "" in raw.words else len(raw.codes)
    if filled < _ENOUGH_ROWS or 2 * len(words) < filled:
        return False
    sample = [set(re.findall(r"\w\w+", word.lower())) for word in words[:1000]]
    n_cells = Counter(token for tokens in sample for token in tokens)
    total = n_cells.total()
    shared = sum(n for n in n_cells.values() if n > 1)
    return total >= 3 * len(sample) and sum(map(len, words[:1000])) >= 20 * len(sample) and 10 * shared >= 3 * total


def warn_trusted_name(name: str, raw: Raw, path: object) -> None:
    """Warn about a feature that may be meant to mark trusted rows."""
    if name.lower() in MARK_NAMES and _is_yes_or_no(raw.words if isinstance(raw, Words) else to_texts(np.unique(raw))):
        warn_once(
            f"{path}: column {name!r} is used as a feature; if it marks rows that a person has checked, rename it to "
            f"'trusted', else drop it with {drop_flag(name)}"
        )


# -- numbers and dates in text -----------------------------------------------------------------------------------------


def find_notation(raw: Words, *, forced: bool = False) -> str | None:
    """How the numbers in a text column are written, and their unit; None if it does not contain numbers.

    Up to a tenth of the cells may be typos. But a column with few values, in which the words occur several times, is a
    code such as 0, 1, 2, 3+.
    """
    counts = dict(zip(raw.words, raw.counts().tolist(), strict=True))
    words = [word for word in raw.words if word.lower() not in GAPS]
    total = sum(counts[word] for word in words)
    if not words:
        return None
    best, fewest = None, total
    unit = _find_unit(words)
    with_unit = [notation + _UNIT + unit for notation in ("thousands", "decimal comma") if unit]
    for notation in (*_NOTATIONS, *with_unit):
        if sum(_to_number(word, notation) is not None for word in words[:100]) * 2 < len(words[:100]):
            continue
        bad = [word for word in words if _to_number(word, notation) is None]
        n_bad = sum(counts[word] for word in bad)
        is_code = bool(bad) and len(words) <= _ENOUGH_ROWS and all(counts[word] > 2 for word in bad)
        if n_bad < fewest and (forced or not is_code):
            best, fewest = notation, n_bad
    return best if forced or 10 * fewest <= total else None


def _find_unit(words: list[str]) -> str:
    """What follows the numbers in most of the cells; '' if they are not numbers with a unit."""
    units = Counter(match["unit"] for word in words[:100] if (match := _WITH_UNIT.fullmatch(word)))
    unit, n = units.most_common(1)[0] if units else ("", 0)
    return unit if 2 * n > len(words[:100]) else ""


def _to_number(word: str, notation: str) -> float | None:
    notation, _, unit = notation.partition(_UNIT)
    word = word.removesuffix(unit).rstrip()
    if not word:
        return None
    if notation != "plain":
        sign = "-" if word[0] in "-\N{MINUS SIGN}" else ""
        word = sign + _SPACES.sub("", word.lstrip("+-\N{MINUS SIGN}").strip(_SIGNS))
    if notation == "thousands" and _THOUSANDS.fullmatch(word):
        word = word.replace(",", "")
    elif notation == "decimal comma" and _DECIMAL_COMMA.fullmatch(word):
        word = word.replace(".", "").replace(",", ".")
    elif notation == "decimal comma":
        return None
    return float(word) if is_number(word) else None


def find_date_order(raw: Words) -> tuple[str | None, bool]:
    """The order of day, month and year in a text column of dates (None: no dates), and whether that is a guess."""
    words = [word for word in raw.words if word.lower() not in GAPS]
    counts = dict(zip(raw.words, raw.counts().tolist(), strict=True))
    total = sum(counts[word] for word in words)
    n_read: dict[str, int] = {}
    for order in _DATES:
        if sum(_to_day(word, order) is not None for word in words[:100]) * 2 >= len(words[:100]):
            n_read[order] = sum(counts[word] for word in words if _to_day(word, order) is not None)
    best = max(n_read, key=lambda order: n_read[order], default=None)
    if best is None or not total or 10 * n_read[best] < 9 * total:
        return None, False
    is_guess = n_read.get("dmy") == n_read.get("mdy") and best != "ymd" and "." not in words[0]
    return ("mdy" if is_guess else best), is_guess


def _to_day(word: str, order: str) -> float | None:
    """Days since 1970, with the time of day as a fraction."""
    match = next((match for form in _DATES[order] if (match := form.fullmatch(word))), None)
    if match is None:
        return None
    parts = match.groupdict()
    year = int(parts["y"])
    if len(parts["y"]) == 2:
        year += 2000 if year < 70 else 1900
    month = _MONTHS.index(parts["name"].lower()) + 1 if parts.get("name") else int(parts["m"])
    try:
        days = date(year, month, int(parts["d"] or 1)).toordinal() - date(1970, 1, 1).toordinal()
    except ValueError:
        return None
    hour = int(parts["hour"] or 0)
    if parts["half"]:
        hour = hour % 12 + (12 if parts["half"].lower() == "p" else 0)
    minutes = 60 * hour + int(parts["minute"] or 0) + float((parts["second"] or "0").replace(",", ".")) / 60
    if parts["zone"]:
        minutes -= 60 * int(parts["zone"]) + int(parts["zone"][0] + parts["zone_minute"])
    return days + minutes / 1440


def read_numbers(raw: Raw, notation: str) -> tuple[Floats, NDArray[np.bool_]]:
    """[N] numbers, NaN if missing; and which cells are neither missing nor finite numbers, whose number is also NaN."""
    if isinstance(raw, Words):
        numbers, bad = _read_words(raw, notation, _to_number)
    else:
        numbers = raw.astype(np.float64)
        bad = np.zeros(len(numbers), dtype=bool)
    with np.errstate(over="ignore", invalid="ignore"):
        huge = np.isinf(numbers.astype(np.float32))
    return np.where(huge, np.nan, numbers), bad | huge


def read_days(raw: Raw, order: str) -> tuple[Floats, NDArray[np.bool_]]:
    """[N] days since 1970, NaN if missing, and which cells are neither missing nor dates."""
    if isinstance(raw, Words):
        return _read_words(raw, order, _to_day)
    days = raw.astype("datetime64[us]").astype(np.float64) / 86_400_000_000
    return np.where(np.isnat(raw), np.nan, days), np.zeros(len(days), dtype=bool)


def _read_words(raw: Words, form: str, read: Callable[[str, str], float | None]) -> tuple[Floats, NDArray[np.bool_]]:
    values = [np.nan if word.lower() in GAPS else read(word, form) for word in raw.words]
    bad = np.array([value is None for value in values])
    return raw.take(np.array([np.nan if value is None else value for value in values])), raw.take(bad)


def _example(raw: Words) -> str:
    return next((word for word in raw.words if word.lower() not in GAPS), "")


def _mean(vectors: NDArray[Any]) -> NDArray[np.float64]:
    gaps = np.isnan(vectors)
    total = np.where(gaps, 0, vectors).sum(0, dtype=np.float64)
    mean: NDArray[np.float64] = total / np.maximum(len(vectors) - gaps.sum(0), 1)
    return mean


def are_image_names(words: Collection[str]) -> bool:
    return bool(words) and all(word.lower().endswith(SUFFIXES) for word in words)


def _is_yes_or_no(words: Collection[str]) -> bool:
    try:
        parse_marks(words, str)
    except UserError:
        return False
    return True
