"""Checks for suspicious columns: typos in numeric columns, decimal commas, ids, dates, placeholder labels."""

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

logger = logging.getLogger("warpi.datasets")

MARK_NAMES = {"is_trusted", "clean", "is_clean", "checked", "is_checked", "is_verified", "gold", "is_gold"}
"""Names of columns that may be meant to mark trusted rows, but do not."""
_ENOUGH_ROWS = 20  # with fewer rows, the frequency of values is not checked
_MANY_CATEGORIES = 50  # with more categories, a column may be an id
_MONTH = r"(jan|feb|mar|apr|may|jun|jul|aug|sep|oct|nov|dec)[a-z]*\.?"
_DATE = re.compile(
    r"(\d{4}([-/.])\d\d?\2\d\d?|\d{4}-(0\d|1[0-2])"  # 2024-01-31, 2024-01
    r"|\d\d?([-/.])\d\d?\4\d{4}|\d\d?/\d\d?/\d\d|\d\d\.\d\d\.\d\d"  # 31.1.2024, 1/31/24
    rf"|\d\d?[- ]{_MONTH}[- ]\d\d(\d\d)?|{_MONTH} \d\d?,? \d{{4}})"  # 31 Jan 2024, January 31, 2024
    r"([T ]+\d\d?:\d\d(:\d\d([.,]\d+)?)?( ?[ap]m)?( ?(Z|UTC|[+-]\d\d:?\d\d))?)?",
    re.IGNORECASE,
)
_DECIMAL_COMMA = re.compile(r"[+-]?\d[\d.]*,[\d,]*\d(\.\d+)?([eE][+-]?\d+)?|[+-]?,\d+")
_SIGNS = str.maketrans({"\N{MINUS SIGN}": "-", **dict.fromkeys("%$€£¥' \N{NO-BREAK SPACE}\N{NARROW NO-BREAK SPACE}")})
_MISSING_LABELS = MISSING - {"", "none"}  # 'none' may be the name of a class


@cache  # a file may be read more than once
def warn_once(message: str) -> None:
    logger.warning(message)


def check_numeric_text(cells: Sequence[str], name: str, at: Callable[[int], str]) -> None:
    """Reject a text column that is probably numeric: nine of ten cells are numbers, or would be without commas."""
    count = Counter(cell for cell in cells if cell.lower() not in MISSING)
    words = {cell for cell in count if not is_number(cell)}
    commas = {cell for cell in words if _DECIMAL_COMMA.fullmatch(cell)}
    total = count.total()
    n_words = sum(count[cell] for cell in words)
    advice = "if its numbers are names, write a letter before each of them"
    if commas and 10 * sum(count[cell] for cell in words - commas) <= total:
        row = next(row for row, cell in enumerate(cells) if cell in commas)
        raise UserError(
            f"{at(row)}: column {name!r} has decimal commas (it holds {cells[row]!r}); save the file with decimal "
            f"points and without thousands separators, or drop the column with {drop_flag(name)}; {advice}"
        )
    is_code = len(count) <= _ENOUGH_ROWS and all(count[cell] > 2 for cell in words)  # such as 0, 1, 2, 3+
    if words and 10 * n_words <= total and not is_code:
        row = next(row for row, cell in enumerate(cells) if cell in words)
        more = f" (words in {n_words} rows)" if n_words > 1 else ""
        raise UserError(
            f"{at(row)}: column {name!r} holds {cells[row]!r}{more}, and numbers in {total - n_words} of {total} rows; "
            f"fix the cell, drop the row, or drop the column with {drop_flag(name)}; {advice}"
        )


def is_number(cell: str) -> bool:
    """Whether a cell is a number. Python reads 1_0 as 10."""
    try:
        float(cell)
    except ValueError:
        return False
    return "_" not in cell


def warn_suspicious_feature(values: NDArray[Any], name: str, path: object) -> None:
    """Warn about a feature that may be an id, a date, a file name, or a mark of trusted rows."""
    n = len(values)
    drop = drop_flag(name)
    if name.lower() in MARK_NAMES and _is_yes_or_no(values):
        warn_once(
            f"{path}: column {name!r} is used as a feature; if it marks rows that a person has checked, rename it to "
            f"'trusted', else drop it with {drop}"
        )
    words = set(values.tolist()) if values.dtype.kind == "O" else set[str]()
    if are_image_names(words) and 10 * len(words) >= 9 * n:
        warn_once(
            f"{path}: column {name!r} names image files, and each name becomes a feature; to learn from the images, "
            f"rename it to 'path' in a .csv or .tsv, else drop it with {drop}"
        )
        return
    if n < _ENOUGH_ROWS:
        return
    numbers = parse_numbers(values) if values.dtype.kind == "O" else values.astype(np.float64)
    if numbers is None and len(words) > 2 and all(is_number(word.translate(_SIGNS)) for word in words):
        warn_once(
            f"{path}: column {name!r} holds numbers with extra characters ({values[0]!r}), and each becomes a separate "
            f"feature; write plain numbers, such as 1000 or -0.5, or drop it with {drop}"
        )
    elif numbers is None:
        are_dates = len(words) > 1 and 10 * sum(map(bool, map(_DATE.fullmatch, words))) >= 9 * len(words)
        if are_dates or 10 * len(words) >= 9 * n or len(words) > max(_MANY_CATEGORIES, n // 20):
            reason = f"it seems to hold dates ({min(words)}):" if are_dates else "if it holds names, ids or dates,"
            warn_once(
                f"{path}: column {name!r} has {len(words)} distinct words in {n} rows; each becomes a feature, and new "
                f"rows with other words are rejected; {reason} drop it with {drop}"
            )
    elif bool((np.diff(np.sort(numbers)) == 1).all()):
        warn_once(f"{path}: column {name!r} counts rows and is used as a feature; if it is an id, drop it with {drop}")


def are_image_names(words: Collection[str]) -> bool:
    return bool(words) and all(word.lower().endswith(SUFFIXES) for word in words)


def _is_yes_or_no(values: NDArray[Any]) -> bool:
    try:
        parse_marks(set(to_texts(values)), str)
    except UserError:
        return False
    return True


def check_label(texts: Sequence[str], name: str, where: object, *, named: bool = False) -> None:
    """Reject labels that mean a missing value, and quantities.

    Quantities are allowed if the classes are `named` elsewhere: a trusted set may have one example per class.
    """
    count = Counter(texts)
    for text, n in count.items():
        if text.lower() in _MISSING_LABELS:
            raise UserError(
                f"{where}: {n} rows have the label {text!r} in {name!r}, which looks like a missing label; label these "
                "rows or drop them, or give the class another name"
            )
    if not named:
        warn_similar_classes(count, name, where)
    if named or len(texts) < _ENOUGH_ROWS or (numbers := parse_numbers(count)) is None:
        return
    half = len(texts) // 2
    are_integers = bool((numbers == np.floor(numbers)).all())
    if len(count) > (half if are_integers else min(_ENOUGH_ROWS, half)):
        some = ", ".join(list(count)[:3])
        raise UserError(
            f"{where}: {name!r} holds {len(count)} different numbers in {len(texts)} rows ({some}, ...): it looks like "
            "a quantity, but labels are classes; choose another column with --label, or cut it into classes"
        )


def warn_similar_classes(count: Counter[str], name: str, where: object) -> None:
    """Warn about classes with almost the same name. Single letters may differ in case."""
    by_name: dict[str, list[str]] = {}
    for text in sorted(count):
        by_name.setdefault(_bare_name(text), []).append(text)
    groups = [texts for bare, texts in by_name.items() if bare and len(texts) > 1 and not {*map(len, texts)} <= {1}]
    if groups:
        first = " and ".join(f"{text!r} ({count[text]} rows)" for text in groups[0])
        more = f", and so do {len(groups) - 1} more" if len(groups) > 1 else ""
        warn_once(
            f"{where}: the classes {first} in {name!r} differ only in case, spaces, dashes or notation{more}; if "
            "they are one class, write them in the same way"
        )


def _bare_name(text: str) -> str:
    """A name without case, spaces, dashes and invisible characters; a number as its value."""
    text = "".join(c for c in unicodedata.normalize("NFKC", text) if unicodedata.category(c) != "Cf")
    return str(float(text) + 0.0) if is_number(text) else "".join(re.split(r"[\s_]+|(?<=\w)-+(?=\w)", text.casefold()))
