"""Checked rows as a trusted set that `warpi fit --meta-data` takes."""

import csv
import io
import sys
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from warpi.data.dataset import Dataset
from warpi.data.examples import TensorExamples
from warpi.data.numeric import Columns
from warpi.datasets.text_files import reading
from warpi.errors import UserError
from warpi.utils.files import write_atomically
from warpi.utils.seeding import generator

_ABOUT = ("clean_label", "trusted", "verified", "split")  # columns that are about rows of the data, and no part of them


class TrustedSetSummary(NamedTuple):
    """What was written as a trusted set."""

    path: Path
    size: int  # examples
    left: int  # trusted examples that are not among them, so that the classes are equally frequent
    fewest: list[str]  # the classes with the fewest examples, which limit the others
    lacking: list[str]  # the classes without any

    @classmethod
    def of(cls, path: Path, y: Tensor, size: int, classes: tuple[str, ...]) -> "TrustedSetSummary":
        """`size` of the examples with classes y."""
        names = list(zip(classes, torch.bincount(y, minlength=len(classes)).tolist(), strict=True))
        least = min(n for _, n in names if n)
        fewest, lacking = [name for name, n in names if n == least], [name for name, n in names if not n]
        return cls(path, size, len(y) - size, fewest, lacking)

    def tell(self) -> None:
        """Print what is in it, and what would make it larger."""
        few, none = (", ".join(names) for names in (self.fewest, self.lacking))
        left = f"; {self.left} more are left out so that classes are equal, limited by {few}" if self.left else ""
        print(f"{self.path}: {self.size} trusted examples{left}")
        if none:
            print(f"warpi: no trusted example yet of: {none}; warpi fit needs at least one of each", file=sys.stderr)


def balance_classes(y: Tensor, first: int = 0) -> Tensor:
    """Positions of as many examples of every class that occurs, in order: the `first` ones before others at random.

    A set of what looked most suspicious holds some classes far more often than others, and meta methods learn that as
    if it were a fact (docs/review.md).
    """
    counts = torch.bincount(y)
    least = int(counts[counts > 0].min())
    drawn = torch.randperm(len(y) - first, generator=generator(0, "trusted"))
    order = torch.cat([torch.arange(first), first + drawn])
    return torch.cat([order[y[order] == k][:least] for k in range(len(counts))]).sort().values


def original_rows(path: Path, label: str, part: str = "train") -> list[dict[str, str]]:
    """The rows of a table, cells by column, as they stand in the file: an id is not rounded, nothing is dropped.

    Of the train (test, meta) rows where there is a column `split`. Columns that say something about a row of the data
    (clean_label, verified, split) are left out: of a checked row they may be wrong. None of a file that is no table.
    """
    if path.suffix.lower() not in (".csv", ".tsv", ".parquet"):
        return []
    with reading(path):
        names, rows = _parquet(path) if path.suffix.lower() == ".parquet" else _text(path)
    names = [name.strip() or f"Unnamed: {j}" for j, name in enumerate(names)]  # as the table was read
    kept = [name for name in names if name == label or name not in _ABOUT]
    found = [dict(zip(names, row, strict=True)) for row in rows]
    own = [cells for cells in found if cells.get("split", "train").strip().lower() == part]
    return [{name: cells[name] for name in kept} for cells in own]


def _text(path: Path) -> tuple[list[str], list[list[str]]]:
    mark = "\t" if path.suffix.lower() == ".tsv" else ","
    with path.open(encoding="utf-8-sig", newline="") as file:
        lines = [line for line in csv.reader(file, delimiter=mark, skipinitialspace=True, strict=True) if line]
    return lines[0], lines[1:]


def _parquet(path: Path) -> tuple[list[str], list[list[str]]]:
    import pandas as pd  # by which the data was read before

    frame = pd.read_parquet(path)
    columns = list[list[str]]()
    for j in range(frame.shape[1]):  # each of its own type: whole numbers stay whole
        column = frame.iloc[:, j]
        columns.append(["" if b else str(cell) for cell, b in zip(column, column.isna(), strict=True)])
    return [str(name) for name in frame.columns], [list(row) for row in zip(*columns, strict=True)]


def write_trusted(
    path: Path, dataset: Dataset, labels: dict[int, str], balanced: bool = True, source: Path | None = None
) -> TrustedSetSummary:
    """Write rows of a data set with the labels a person found for them, in the form that the data has.

    Balanced: the same number of every class. Image files: a .csv with `path` and `label`, paths as seen from the folder
    of the data (`--root`). Tables: a .csv with all columns of their file `source`, cells as they stand there (without
    it, what was made of the columns that were read). Everything else: a .npz with x and y.
    """
    known = set(dataset.classes)
    for row, label in labels.items():
        if not 0 <= row < len(dataset.y):
            raise UserError(
                f"row {row} is checked, {dataset.name} has rows 0..{len(dataset.y) - 1}; is it the same data?"
            )
        if label not in known:
            raise UserError(f"row {row} is checked as {label!r}, which is no class of {dataset.name}; leave it blank")
    rows, number = list(labels), {name: k for k, name in enumerate(dataset.classes)}
    y = torch.tensor([number[label] for label in labels.values()])
    if balanced:
        labels = {rows[i]: labels[rows[i]] for i in balance_classes(y).tolist()}
    kind = ".csv" if dataset.files is not None or isinstance(dataset.encoding, Columns) else ".npz"
    if path.suffix.lower() != kind:
        raise UserError(f"the trusted set of {dataset.name} is a {kind} file, got {path}")
    x = dataset.examples
    if kind == ".npz":
        if not isinstance(x, TensorExamples):
            raise UserError(f"the inputs of {dataset.name} cannot be written to an array; use warpi review")
        content = io.BytesIO()
        np.savez_compressed(content, x=x.x[torch.tensor(list(labels))].numpy(), y=np.array(list(labels.values())))
        write_atomically(path, content.getvalue())
        return TrustedSetSummary.of(path, y, len(labels), dataset.classes)
    text = io.StringIO(newline="")
    writer = csv.writer(text, lineterminator="\n")
    if dataset.files is not None:
        writer.writerow(["path", "label"])
        writer.writerows([dataset.files.paths[row], label] for row, label in labels.items())
    elif isinstance(columns := dataset.encoding, Columns) and isinstance(x, TensorExamples):
        found = source and original_rows(source, columns.label)
        if found and len(found) != len(dataset.y):
            raise UserError(f"{source} has changed while it was read; run the same again")
        head = list(found[0]) if found else [*columns.categories, columns.label]
        writer.writerow(head)
        for row, label in labels.items():
            cells = found[row] if found else _cells(x.x[row].numpy(), columns)
            writer.writerow({**cells, columns.label: label}[name] for name in head)
    try:
        write_atomically(path, text.getvalue().encode())
    except UnicodeEncodeError as e:
        raise UserError("names of some images are no UTF-8; rename them, or let `warpi review` write a folder") from e
    return TrustedSetSummary.of(path, y, len(labels), dataset.classes)


def _cells(values: np.ndarray, columns: Columns) -> dict[str, str]:
    """The features of a row as the columns they were made from; numbers such that they are read as the same float32."""
    cells, at = dict[str, str](), 0
    for name, categories in columns.categories.items():
        width = 1 if categories is None else len(categories)
        here = values[at : at + width]
        cells[name] = str(here[0]) if categories is None else categories[int(here.argmax())]
        at += width
    return cells
