"""Parse labels as users write them: names and numbers of classes, missing labels, yes/no marks."""

import math
import re
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from warpi.errors import UserError, unknown

MISSING = {"", "nan", "na", "n/a", "null", "none"}  # in a numeric column; in other columns only the first
_TRUE = {"1", "true", "t", "yes", "y", "x"}
_FALSE = {"0", "false", "f", "no", "n", ""}


def to_texts(values: NDArray[Any]) -> list[str]:
    """Numbers or text as text, '' if missing. 1.0 is written 1."""
    if values.dtype.kind == "f":
        return ["" if math.isnan(v) else str(int(v)) if v.is_integer() else repr(v) for v in values.tolist()]
    if values.dtype.kind == "S":
        values = np.char.decode(values, "utf-8", "replace")
    return normalize_labels(str(v).strip() for v in values.tolist())


def normalize_labels(cells: Iterable[str]) -> list[str]:
    """Labels read as text, '' if missing. 1.0 is the class 1: programs write integers like this next to blanks."""
    cells = list(cells)
    numbers = parse_numbers(cells)
    blank = [False] * len(cells) if numbers is None else np.isnan(numbers).tolist()
    return ["" if b else re.sub(r"^([+-]?\d+)\.0*$", r"\1", cell) for cell, b in zip(cells, blank, strict=True)]


def blank_missing(texts: Iterable[str], names: Iterable[str]) -> list[str]:
    """Labels with '' for words that mean a missing label, unless a class has that name."""
    blank = MISSING - {name.lower() for name in names}
    return ["" if text.lower() in blank else text for text in texts]


def sort_classes(names: Collection[str]) -> tuple[str, ...]:
    """Numbers in numerical order; other names, and numbers among them, in alphabetical order."""
    numbers = parse_numbers(names)
    if numbers is None or np.isnan(numbers).any():
        return tuple(sorted(names))
    return tuple(name for _, name in sorted(zip(numbers, names, strict=True)))


def encode_labels(
    texts: Sequence[str], classes: tuple[str, ...], at: Callable[[int], str], by_position: bool = False
) -> Tensor:
    """Names -> [N] positions in `classes`, -1 for ''. With `by_position`, integers may be positions already."""
    index = {"": -1} | {name: k for k, name in enumerate(classes)}
    if by_position:
        index = {str(k): k for k in range(len(classes))} | index
    check_allowed(texts, index, at, "class", "; fix the label or drop the row: a new class needs training rows")
    return torch.tensor([index[text] for text in texts], dtype=torch.int64)


def parse_marks(texts: Iterable[str], at: Callable[[int], str], name: str = "trusted") -> Tensor:
    """Which rows a yes/no column marks.  [N] bool"""
    texts = [text.lower() for text in texts]
    check_allowed(texts, _TRUE | _FALSE, at, f"value of {name!r}", "; it marks trusted rows: rename other columns")
    return torch.tensor([text in _TRUE for text in texts])


def check_allowed(
    texts: Iterable[str], allowed: Collection[str], at: Callable[[int], str], what: str, advice: str = ""
) -> None:
    """Raise an error for the first text that is not allowed."""
    for row, text in enumerate(texts):
        if text not in allowed:
            raise UserError(f"{unknown(f'{what} in {at(row)}:', text, (name for name in allowed if name))}{advice}")


def parse_numbers(cells: Iterable[str]) -> NDArray[np.float64] | None:
    """Cells as numbers, NaN if missing; None if any cell is neither."""
    cells = list(cells)
    try:
        numbers = np.array(cells, dtype=object).astype(np.float64)
    except ValueError:  # a word, possibly one for a missing number
        try:
            numbers = np.array([math.nan if cell.lower() in MISSING else float(cell) for cell in cells])
        except ValueError:
            return None
    return None if any("_" in cell for cell in cells) else numbers  # python reads 1_0 as 10
