"""Decide how each column of a table becomes features (numbers, dates, categories or texts), or that it is not used."""

import re
from collections import Counter
from collections.abc import Collection
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
from warpi.datasets.columns.parse_cells import find_date_order, find_notation, read_days, read_numbers
from warpi.datasets.columns.raw import Raw, Words
from warpi.datasets.delimited_files import GAPS, drop_flag, is_nameless, shorten_list, warn_once
from warpi.datasets.labels import MARK_NAMES, parse_marks, to_texts
from warpi.errors import UserError

_ENOUGH_ROWS = 20  # with fewer rows, the frequency of values is not checked
MANY_CATEGORIES = 50  # with more categories, rare ones are pooled
RARE = 3  # categories with fewer rows than this are rare
_ID_NAME = re.compile(r"(^|[^a-z])(id|uuid|guid|row|rowid|rownum|row[._ ]?names?|index|idx|key|hash|unnamed: [\d.]+)$")
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
_CLOCK_NOTE = "times are read as numbers (9:05 as 545): {}; to read them as words: --types COLUMN=category"
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
                    note = _CLOCK_NOTE if notation == "clock" else _NOTATION
                    self.notes.add(note, f"{name!r} ({_example(raw)!r})")
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

    Integers do if they count up by one, or if almost all are different and the column is named like an id. Words do if
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
    return bool((np.diff(raw.astype(np.float64)) == 1).all()) or (named and len(np.unique(raw)) >= 0.9 * len(raw))


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
