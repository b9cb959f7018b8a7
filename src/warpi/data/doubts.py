"""Columns that are probably not what they seem: typos among numbers, decimal commas, ids, labels that are none."""

import logging
import re
from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from warpi.data.labels import MISSING, parsed
from warpi.data.reading import drop_flag
from warpi.errors import UserError

logger = logging.getLogger("warpi.data")

_ENOUGH = 20  # rows: of fewer, nothing is said about how often values occur
_NO_LABEL = MISSING - {"", "none"}  # nobody calls a class so; some call one 'none'


def check_words(cells: Sequence[str], name: str, at: Callable[[int], str]) -> None:
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


def tell_id(values: NDArray[Any], name: str, path: object) -> None:
    """Say so where a feature numbers or names the rows."""
    n = len(values)
    if n < _ENOUGH:
        return
    numbers = parsed(values) if values.dtype.kind == "O" else values.astype(np.float64)
    if numbers is None:
        if 10 * (distinct := len(set(values.tolist()))) >= 9 * n:
            _tell(
                f"{path}: column {name!r} has {distinct} distinct words in {n} rows, each becomes a feature, and new "
                f"rows will have others; if it holds names, ids or dates, leave it out with {drop_flag(name)}"
            )
    elif bool((np.diff(np.sort(numbers)) == 1).all()):
        _tell(
            f"{path}: column {name!r} counts the rows and is learned from; if it is an id, leave it out with "
            f"{drop_flag(name)}"
        )


@cache  # a file may be read more than once
def _tell(message: str) -> None:
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
    if named or len(texts) < _ENOUGH or (numbers := parsed(count)) is None:
        return
    half = len(texts) // 2
    if len(count) > (half if bool((numbers == np.floor(numbers)).all()) else min(_ENOUGH, half)):
        some = ", ".join(list(count)[:3])
        raise UserError(
            f"{where}: {name!r} holds {len(count)} different numbers in {len(texts)} rows ({some}, ...): it looks like "
            "a quantity, and labels are classes; name another one with --label, or cut it into classes"
        )
