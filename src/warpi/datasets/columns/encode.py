"""Turn the cells of a table into features, as its columns describe."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.sparse import csr_array, hstack

from warpi.data.examples import Examples
from warpi.data.numeric import (
    CategoryColumn,
    Column,
    Columns,
    DateColumn,
    NumberColumn,
    TextColumn,
    VectorColumn,
    make_features,
    needs_float64,
)
from warpi.data.sparse import SparseExamples, encode_categories, encode_texts
from warpi.datasets.columns.choose import Notes
from warpi.datasets.columns.parse_cells import read_days, read_numbers
from warpi.datasets.columns.raw import Table, Words
from warpi.datasets.delimited_files import shorten_list
from warpi.datasets.labels import to_texts
from warpi.errors import UserError, format_count, unknown

KINDS = ("number", "category", "date", "text")
_FILLED = (
    "cells are missing in {}: missing numbers become the median, with a feature that marks them, and missing words a "
    "separate category; to refuse missing cells: --missing error"
)
_NEW_GAPS = (
    "cells are missing in {}, but not in the training table: missing numbers become its median, missing words count as "
    "unknown"
)
_BAD_CELLS = "cells that are neither numbers nor dates count as missing: {}; to refuse them: --missing error"
_UNKNOWN = "values that are not in the training table count as unknown: {}; to refuse them: --unknown error"


@dataclass(frozen=True)
class TableOptions:
    """How to read a table."""

    types: tuple[str, ...] = ()  # COLUMN=KIND, where KIND is one of KINDS; others are chosen by content
    text: tuple[str, ...] = ()  # columns of texts
    missing: str = "fill"  # or 'error'
    unknown: str = "ignore"  # or 'error'

    def __post_init__(self) -> None:
        for name, allowed in (("missing", ("fill", "error")), ("unknown", ("ignore", "error"))):
            if getattr(self, name) not in allowed:
                raise unknown(f"value of {name!r}:", str(getattr(self, name)), allowed)

    def kinds(self) -> dict[str, str]:
        """The kinds that the user has chosen, by column."""
        kinds = dict.fromkeys(self.text, "text")
        for entry in self.types:
            name, _, kind = entry.rpartition("=")
            if not name or kind not in KINDS:
                raise UserError(f"--types takes COLUMN=KIND, where KIND is one of {', '.join(KINDS)}; got {entry!r}")
            kinds[name] = kind
        return kinds


class Encoded(NamedTuple):
    """The features of all rows of a table."""

    x: NDArray[np.floating] | csr_array  # [N, D]
    columns: Columns
    texts: dict[str, list[str]]  # cells of text columns, each [N]

    def pick(self, rows: Sequence[int]) -> Examples:
        """Examples of some of the rows."""
        all_rows = len(rows) == self.x.shape[0]  # they are in order, so nothing is copied
        if isinstance(self.x, np.ndarray):
            return make_features(torch.from_numpy(self.x if all_rows else self.x[rows]), self.columns)
        texts = self.texts if all_rows else {name: [t[k] for k in rows] for name, t in self.texts.items()}
        sparse = SparseExamples.of(self.x if all_rows else self.x[rows], augment=True, columns=self.columns)
        return replace(sparse, texts=texts)


def encode_table(
    table: Table, columns: Columns, options: TableOptions, notes: Notes, train: Sequence[int] | None = None
) -> Encoded:
    """The features of a table. The training rows `train` of a first table determine scales and precision."""
    reader = _CellReader(table, options, notes, is_first=train is not None)
    blocks = {name: reader.read(name, column) for name, column in columns.features.items()}
    reader.check_gaps()
    numbers = {name: block for name, block in blocks.items() if isinstance(block, np.ndarray) and block.ndim == 2}
    texts = {name: block.cells() for name, block in blocks.items() if isinstance(block, Words)}
    if not columns.sparse:
        if train is not None:
            columns = replace(columns, double=any(map(needs_float64, numbers.values())))
        return Encoded(_fill_dense(columns, blocks), columns, texts)
    if train is not None:
        columns = replace(columns, scales={name: _fit_scale(block[list(train)]) for name, block in numbers.items()})
    return Encoded(
        hstack([_sparse_block(columns, name, blocks[name]) for name in blocks], format="csr"), columns, texts
    )


def _fill_dense(columns: Columns, blocks: dict[str, Any]) -> NDArray[np.floating]:
    n = len(next(iter(blocks.values())))
    x = np.zeros((n, columns.width), dtype=np.float64 if columns.double else np.float32)
    for name, column, part in columns.blocks():
        block = blocks[name]
        if isinstance(column, CategoryColumn):
            rows = np.flatnonzero(block >= 0)
            x[rows, part.start + block[rows]] = 1
        else:
            x[:, part] = block
    return x


def _fit_scale(block: NDArray[np.floating]) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Median and standard deviation of each feature."""
    spread = block.std(0, dtype=np.float64)
    return tuple(map(float, np.median(block, axis=0))), tuple(float(value) if value > 0 else 1.0 for value in spread)


def _sparse_block(columns: Columns, name: str, block: Any) -> csr_array:
    column = columns.features[name]
    if isinstance(column, TextColumn):
        return encode_texts(block.words, column)[block.codes]
    if isinstance(column, CategoryColumn):
        return encode_categories(block, column)
    center, spread = (np.array(values) for values in columns.scales[name])
    return csr_array(((block - center) / spread).astype(np.float32))


class _CellReader:
    """Reads the cells of a table as its columns describe. Missing, unknown and malformed cells are noted or refused."""

    def __init__(self, table: Table, options: TableOptions, notes: Notes, is_first: bool) -> None:
        self.table = table
        self.fills = options.missing == "fill"
        self.accepts_unknown = options.unknown == "ignore"
        self.notes = notes
        self.is_first = is_first
        self.gaps: dict[str, str] = {}  # descriptions of missing cells, by column

    def read(self, name: str, column: Column) -> Any:
        """Features [N, width] of numbers, dates and vectors; positions [N] of categories; texts as they are."""
        raw = self.table.columns[name]
        match column:
            case NumberColumn(notation=notation):
                self._check_kind(
                    name, not isinstance(raw, Words) and (raw.ndim > 1 or raw.dtype.kind == "M"), "numeric"
                )
                return self._fill(name, column, *read_numbers(raw, notation))
            case DateColumn(order=order):
                if not isinstance(raw, Words) and raw.dtype.kind == "f" and np.isnan(raw).all():
                    raw = np.full(len(raw), np.datetime64("NaT", "us"))
                self._check_kind(name, not isinstance(raw, Words) and raw.dtype.kind != "M", "a date")
                return self._fill(name, column, *read_days(raw, order))
            case VectorColumn(fill=fill):
                if isinstance(raw, Words) and raw.words == [""]:
                    raw = np.full((len(raw.codes), len(fill)), np.nan)
                is_other = isinstance(raw, Words) or raw.ndim != 2 or raw.shape[1] != len(fill)
                self._check_kind(name, is_other, f"a vector of {len(fill)} numbers")
                assert not isinstance(raw, Words)
                self._note_gaps(name, np.asarray(np.isnan(raw).any(axis=1)), known=True)
                return column.encode(raw)
        words = raw if isinstance(raw, Words) else Words.of(to_texts(raw))
        return words if isinstance(column, TextColumn) else self._categories(name, words, column)

    def check_gaps(self) -> None:
        """Raise if cells are missing and the user refuses missing cells."""
        if self.gaps and not self.fills:
            raise UserError(
                f"{self.table.path}: cells are missing in {shorten_list(self.gaps.values())}; fill them or drop the "
                f"rows{self.table.or_drop(*self.gaps)}, or use --missing fill"
            )

    def _check_kind(self, name: str, is_other: bool, kind: str) -> None:
        if is_other:
            raise UserError(f"{self.table.path}: column {name!r} is {kind} in the training table, but not here")

    def _fill(
        self, name: str, column: NumberColumn | DateColumn, values: NDArray[np.float64], bad: NDArray[np.bool_]
    ) -> NDArray[np.float64]:
        gaps = np.isnan(values)
        if bad.any():
            self._note_bad(name, column, bad, int(bad.sum()) * 2 > len(bad) - int((gaps & ~bad).sum()))
        self._note_gaps(name, gaps & ~bad, known=column.marks_gaps)
        if column.fill is None and gaps.any():
            row = int(gaps.argmax())
            raise UserError(
                f"{self.table.at(row)}: column {name!r} is empty; the run was made by a version that did not store "
                "medians: fill the cell, or train again"
            )
        return column.encode(values)

    def _note_bad(self, name: str, column: Column, bad: NDArray[np.bool_], mostly: bool) -> None:
        row = int(bad.argmax())
        n = int(bad.sum())
        cell = self.table.cell(name, row)
        if not self.fills or (mostly and not self.is_first):
            kinds = (
                ("dates", "a date") if isinstance(column, DateColumn) else ("finite numbers up to 3.4e38", "numeric")
            )
            must = f"must contain {kinds[0]}" if self.is_first else f"is {kinds[1]} in the training table"
            more = f" ({n} such cells)" if n > 1 else ""
            raise UserError(
                f"{self.table.at(row)}: column {name!r} contains {cell!r}, but {must}{more}; fix it or drop the "
                f"row{self.table.or_drop(name)}"
            )
        self.notes.add(_BAD_CELLS, f"{name!r} ({format_count(n, 'cell')}, first {self.table.row(row)}: {cell!r})")

    def _note_gaps(self, name: str, gaps: NDArray[np.bool_], known: bool) -> None:
        """Note missing cells. `known` says whether the training table has some, too."""
        if not gaps.any():
            return
        n = int(gaps.sum())
        self.gaps[name] = f"{name!r} ({n} of {len(gaps)}, first {self.table.row(int(gaps.argmax()))})"
        if self.is_first:
            self.notes.add(_FILLED, f"{name!r} ({n} of {len(gaps)})")
        elif not known:
            self.notes.add(_NEW_GAPS, f"{name!r} ({n} of {len(gaps)})")

    def _categories(self, name: str, words: Words, column: CategoryColumn) -> NDArray[np.int64]:
        """[N] positions of the categories, -1 if there is none."""
        index = {category: k for k, category in enumerate(column.categories)}
        gap = index.get("", -1)
        other = len(column.categories) if column.other else gap
        positions = words.take(np.array([index.get(word, other if word else gap) for word in words.words]))
        if "" in words.words:
            self._note_gaps(name, words.codes == words.words.index(""), known=gap >= 0)
        new = [word for word in words.words if word and word not in index]
        if new and not column.other:
            n = int(words.counts()[[word in new for word in words.words]].sum())
            if not self.accepts_unknown:
                raise self._unknown_value(name, words, new[0], index, n)
            self.notes.add(_UNKNOWN, f"{name!r} ({format_count(n, 'row')}: {shorten_list(map(repr, new[:5]))})")
        return positions

    def _unknown_value(self, name: str, words: Words, word: str, index: dict[str, int], n: int) -> UserError:
        row = int((words.codes == words.words.index(word)).argmax())
        error = unknown(f"value of column {name!r} in {self.table.at(row)}:", word, filter(None, index))
        return UserError(
            f"{error}; {format_count(n, 'row')} with values that are not in the training table: fix or drop them, or "
            f"train with rows that have these values{self.table.or_drop(name)}"
        )
