"""Parse and check labels as users write them: names and numbers of classes, missing labels, and yes/no marks."""

import math
import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from warpi.datasets.delimited_files import MISSING, is_number, parse_numbers, warn_once
from warpi.errors import UserError, format_count, unknown

MARK_NAMES = {"is_trusted", "clean", "is_clean", "checked", "is_checked", "is_verified", "gold", "is_gold"}
"""Names of columns that may be meant to mark trusted rows, but do not."""
_MISSING_LABELS = MISSING - {"", "none"}  # 'none' may be the name of a class
_ENOUGH_ROWS = 20  # with fewer rows, the frequency of labels is not checked
_NARROW = 2**20  # integers in a smaller range are counted, not sorted
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
    """Labels read as text, '' if missing. 1.0 becomes 1, because programs write integers so in columns with gaps."""
    cells = list(cells)
    different = list(dict.fromkeys(cells))
    numbers = parse_numbers(different)
    blank = [False] * len(different) if numbers is None else np.isnan(numbers).tolist()
    texts = ["" if b else re.sub(r"^([+-]?\d+)\.0*$", r"\1", cell) for cell, b in zip(different, blank, strict=True)]
    normalized = dict(zip(different, texts, strict=True))
    return [normalized[cell] for cell in cells]


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


class CodedLabels(NamedTuple):
    """N labels as positions in a tuple of different texts. One text per row would take ten times the memory."""

    texts: tuple[str, ...]  # '' if missing
    codes: NDArray[np.int64]  # [N] positions in `texts`

    @classmethod
    def of(cls, values: NDArray[Any]) -> Self:
        """Code an array [N] of numbers or text."""
        if values.dtype.kind in "iu" and values.size and int(values.max()) - int(values.min()) < _NARROW:
            low = int(values.min())
            codes = values.astype(np.int64) - low
            present = np.bincount(codes) > 0
            different = np.flatnonzero(present) + low
            codes = (np.cumsum(present) - 1)[codes]
        else:
            different, codes = np.unique(values, return_inverse=True, equal_nan=True)
        return cls(tuple(to_texts(different)), codes)

    def count_texts(self) -> Counter[str]:
        """The number of rows of each text, in the order of the texts."""
        numbers = np.bincount(self.codes, minlength=len(self.texts)).tolist()
        count: Counter[str] = Counter()
        for text, n in zip(self.texts, numbers, strict=True):
            count[text] += n
        return count

    def blank(self, text: str) -> Self:
        """The same labels, in which `text` means a missing label."""
        return self._replace(texts=tuple("" if t == text else t for t in self.texts))

    def first_row(self, allowed: Collection[str]) -> int | None:
        """The first row whose text is not allowed; None if all are allowed."""
        bad = np.array([text not in allowed for text in self.texts], dtype=np.bool_)
        return int(bad[self.codes].argmax()) if bad.any() else None

    def encode(self, classes: tuple[str, ...], at: Callable[[int], str], by_position: bool = False) -> Tensor:
        """Positions in `classes`, as `encode_labels` returns them.  [N]"""
        encoded = encode_labels(self.texts, classes, lambda k: at(int((self.codes == k).argmax())), by_position)
        return encoded[torch.from_numpy(self.codes)]

    def to_list(self) -> list[str]:
        """The text of every row."""
        return [self.texts[code] for code in self.codes.tolist()]


def check_label(texts: Iterable[str], name: str, where: object, *, named: bool = False) -> None:
    """Reject labels that mean a missing value, quantities, and ids.

    Quantities and ids are allowed if the classes are `named` elsewhere: a trusted set may have one example per class.
    """
    check_counts(Counter(texts), name, where, named=named)


def check_counts(count: Counter[str], name: str, where: object, *, named: bool = False) -> None:
    """Like `check_label`, for the number of rows of each label."""
    n_rows = count.total()
    for text, n in count.items():
        if text.lower() in _MISSING_LABELS:
            raise UserError(
                f"{where}: {name!r} contains the label {text!r} ({format_count(n, 'row')}), which looks like a missing "
                "label; label these rows or drop them, or rename the class"
            )
    if not named:
        warn_similar_classes(count, name, where)
    if named or n_rows < _ENOUGH_ROWS:
        return
    numbers = parse_numbers(count)
    half = n_rows // 2
    are_fractions = numbers is not None and bool((numbers != np.floor(numbers)).any())
    if len(count) <= (min(_ENOUGH_ROWS, half) if are_fractions else half):
        return
    some = ", ".join(f"{text:.40}" for text in list(count)[:3])
    kind, looks, advice = "texts", "ids or free text", ""
    if numbers is not None:
        kind, looks, advice = "numbers", "a quantity", ", or divide it into classes"
    raise UserError(
        f"{where}: {name!r} contains {len(count)} different {kind} in {n_rows} rows ({some}, ...): it looks like "
        f"{looks}, but labels are classes; choose another column with --label{advice}"
    )


def warn_similar_classes(count: Counter[str], name: str, where: object) -> None:
    """Warn about classes with almost the same name. Single letters may differ in case."""
    by_name: dict[str, list[str]] = {}
    for text in sorted(count):
        by_name.setdefault(bare_name(text), []).append(text)
    groups = [texts for bare, texts in by_name.items() if bare and len(texts) > 1 and not {*map(len, texts)} <= {1}]
    if groups:
        first = " and ".join(f"{text!r} ({format_count(count[text], 'row')})" for text in groups[0])
        more = f", as in {format_count(len(groups) - 1, 'more case')}" if len(groups) > 1 else ""
        warn_once(
            f"{where}: the classes {first} in {name!r} differ only in case, spaces, dashes or notation{more}; if "
            "they are one class, write them in the same way"
        )


def bare_name(text: str) -> str:
    """A name without case, spaces, dashes and invisible characters; a number as its value."""
    text = "".join(c for c in unicodedata.normalize("NFKC", text) if unicodedata.category(c) != "Cf")
    return str(float(text) + 0.0) if is_number(text) else "".join(re.split(r"[\s_]+|(?<=\w)-+(?=\w)", text.casefold()))
