"""Columns that may not be what they seem: typos among numbers, decimal commas, ids, dates, labels that are none."""

import logging
import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from warpi.data.decode import SUFFIXES
from warpi.datasets.labels import MISSING, parse_marks, parse_numbers, to_texts
from warpi.datasets.text_files import drop_flag
from warpi.errors import UserError

logger = logging.getLogger("warpi.data")

_ENOUGH = 20  # rows: of fewer, nothing is said about how often values occur
_MANY = 50  # categories of a column, from which on it is asked whether they are too many
_MARKS = {"trusted", "is_trusted", "clean", "is_clean", "checked", "is_checked", "is_verified", "gold", "is_gold"}
_MONTH = r"(jan|feb|mar|apr|may|jun|jul|aug|sep|oct|nov|dec)[a-z]*\.?"
_DATE = re.compile(
    r"(\d{4}([-/.])\d\d?\2\d\d?|\d{4}-(0\d|1[0-2])"  # 2024-01-31, 2024-01
    r"|\d\d?([-/.])\d\d?\4\d{4}|\d\d?/\d\d?/\d\d|\d\d\.\d\d\.\d\d"  # 31.1.2024, 1/31/24
    rf"|\d\d?[- ]{_MONTH}[- ]\d\d(\d\d)?|{_MONTH} \d\d?,? \d{{4}})"  # 31 Jan 2024, January 31, 2024
    r"([T ]+\d\d?:\d\d(:\d\d([.,]\d+)?)?( ?[ap]m)?( ?(Z|UTC|[+-]\d\d:?\d\d))?)?",
    re.IGNORECASE,
)
_SIGNS = str.maketrans({"\N{MINUS SIGN}": "-", **dict.fromkeys("%$€£¥' \N{NO-BREAK SPACE}\N{NARROW NO-BREAK SPACE}")})
_NO_LABEL = MISSING - {"", "none"}  # nobody calls a class so; some call one 'none'


def check_numeric_text(cells: Sequence[str], name: str, at: Callable[[int], str]) -> None:
    """Refuse a column of text that is meant to hold numbers: nine of ten cells are, or would be without commas."""
    count = Counter(cell for cell in cells if cell.lower() not in MISSING)
    words = {cell for cell in count if not _is_number(cell)}
    total, odd = count.total(), sum(count[cell] for cell in words)
    commas = {cell for cell in words if re.fullmatch(r"[+-]?\d[\d.]*,[\d,]*\d(\.\d+)?([eE][+-]?\d+)?|[+-]?,\d+", cell)}
    row = next((row for row, cell in enumerate(cells) if cell in words), 0)
    names = "where numbers are names, write a letter before each of them"
    if commas and 10 * sum(count[cell] for cell in words - commas) <= total:
        row = next(row for row, cell in enumerate(cells) if cell in commas)
        raise UserError(
            f"{at(row)}: column {name!r} has decimal commas (it holds {cells[row]!r}); save the file with decimal "
            f"points, and without separators of thousands, or leave the column out with {drop_flag(name)}; {names}"
        )
    a_code = len(count) <= _ENOUGH and all(count[cell] > 2 for cell in words)  # 0, 1, 2, 3+
    if odd and 10 * odd <= total and not a_code:
        more = f", in {odd} rows other words," if odd > 1 else ""
        raise UserError(
            f"{at(row)}: column {name!r} holds {cells[row]!r}{more} and numbers in {total - odd} of {total} rows; "
            f"mend the cell, drop the row, or leave the column out with {drop_flag(name)}; {names}"
        )


def _is_number(cell: str) -> bool:
    try:
        float(cell)
    except ValueError:
        return False
    return "_" not in cell


def find_trusted_column(columns: Collection[str], where: object) -> str | None:
    """The column that marks checked rows, where no column is a feature: `verified`, or else `trusted`. Others that seem
    to do so are told."""
    used = next((name for name in ("verified", "trusted") if name in columns), None)
    for name in sorted(_MARKS.intersection(columns) - {used}):
        warn_once(f"{where}: {name!r} is not used; if it marks what a person has checked, call it 'verified'")
    return used


def warn_suspicious_feature(values: NDArray[Any], name: str, path: object) -> None:
    """Say so where a feature numbers or names the rows, is a date, or marks the rows that were checked."""
    n = len(values)
    if name.lower() in _MARKS and _says_yes_or_no(values):
        warn_once(
            f"{path}: column {name!r} is learned from like any other; if it marks the rows that a person has checked, "
            f"call it 'verified', else leave it out with {drop_flag(name)}"
        )
    words = set(values.tolist()) if values.dtype.kind == "O" else set[str]()
    if names_images(words) and 10 * len(words) >= 9 * n:
        warn_once(
            f"{path}: column {name!r} names image files, and each name becomes a feature; to learn from the images, "
            f"call it 'path' in a .csv or .tsv, else leave it out with {drop_flag(name)}"
        )
        return
    if n < _ENOUGH:
        return
    numbers = parse_numbers(values) if values.dtype.kind == "O" else values.astype(np.float64)
    if numbers is None and len(words) > 2 and all(_is_number(word.translate(_SIGNS)) for word in words):
        warn_once(
            f"{path}: column {name!r} holds numbers with signs in them ({values[0]!r}), and each becomes a feature of "
            f"its own; write plain numbers, such as 1000 or -0.5, or leave it out with {drop_flag(name)}"
        )
    elif numbers is None:
        dates = len(words) > 1 and 10 * sum(map(bool, map(_DATE.fullmatch, words))) >= 9 * len(words)
        if dates or 10 * len(words) >= 9 * n or len(words) > max(_MANY, n // 20):
            what = f"it seems to hold dates ({min(words)}):" if dates else "if it holds names, ids or dates,"
            warn_once(
                f"{path}: column {name!r} has {len(words)} distinct words in {n} rows, each becomes a feature, and new "
                f"rows with others are refused; {what} leave it out with {drop_flag(name)}"
            )
    elif bool((np.diff(np.sort(numbers)) == 1).all()):
        warn_once(
            f"{path}: column {name!r} counts the rows and is learned from; if it is an id, leave it out with "
            f"{drop_flag(name)}"
        )


def names_images(words: Collection[str]) -> bool:
    return bool(words) and all(word.lower().endswith(SUFFIXES) for word in words)


def _says_yes_or_no(values: NDArray[Any]) -> bool:
    try:
        parse_marks(set(to_texts(values)), str)
    except UserError:
        return False
    return True


@cache  # a file may be read more than once
def warn_once(message: str) -> None:
    """Warn once."""
    logger.warning(message)


def check_label(texts: Sequence[str], name: str, where: object, *, named: bool = False) -> None:
    """Refuse labels that are words for a missing one, and quantities; not these where the classes are `named`
    elsewhere: there may be one trusted example a class."""
    count = Counter(texts)
    for text, n in count.items():
        if text.lower() in _NO_LABEL:
            raise UserError(
                f"{where}: {n} rows have the label {text!r} in {name!r}, which looks like a missing label; label these "
                "rows or drop them, or give the class another name"
            )
    if not named:
        warn_similar_classes(count, name, where)
    if named or len(texts) < _ENOUGH or (numbers := parse_numbers(count)) is None:
        return
    half = len(texts) // 2
    if len(count) > (half if bool((numbers == np.floor(numbers)).all()) else min(_ENOUGH, half)):
        some = ", ".join(list(count)[:3])
        raise UserError(
            f"{where}: {name!r} holds {len(count)} different numbers in {len(texts)} rows ({some}, ...): it looks like "
            "a quantity, and labels are classes; name another one with --label, or cut it into classes"
        )


def warn_similar_classes(count: Counter[str], name: str, where: object) -> None:
    """Say so where classes are written in almost the same way; single letters may well differ in case."""
    alike = dict[str, list[str]]()
    for text in sorted(count):
        alike.setdefault(_bare(text), []).append(text)
    groups = [texts for short, texts in alike.items() if short and len(texts) > 1 and not {*map(len, texts)} <= {1}]
    if groups:
        first = " and ".join(f"{text!r} ({count[text]} rows)" for text in groups[0])
        more = f", and so do {len(groups) - 1} more" if len(groups) > 1 else ""
        warn_once(
            f"{where}: the classes {first} in {name!r} differ only in case, spaces, dashes or notation{more}; if "
            "they are one class, write them alike"
        )


def _bare(text: str) -> str:
    """What is left of a name without case, spaces, dashes, and what cannot be seen; of a number its value."""
    text = "".join(c for c in unicodedata.normalize("NFKC", text) if unicodedata.category(c) != "Cf")
    return str(float(text) + 0.0) if _is_number(text) else "".join(re.split(r"[\s_]+|(?<=\w)-+(?=\w)", text.casefold()))
