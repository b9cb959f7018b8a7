"""Checked rows as a trusted set that `warpi fit --meta-data` takes."""

import csv
import io
from pathlib import Path

import numpy as np
import torch

from warpi.atomic import write_atomically
from warpi.data.dataset import Dataset
from warpi.data.examples import TensorExamples
from warpi.data.tables import Columns
from warpi.errors import UserError


def write_trusted(path: Path, dataset: Dataset, labels: dict[int, str]) -> None:
    """Write rows of a data set with the labels a person found for them, in the form that the data has.

    Image files: a .csv with `path` and `label`, paths as seen from the folder of the data (`--root`). Tables: a .csv
    with their columns. Everything else: a .npz with x and y.
    """
    known = set(dataset.classes)
    for row, label in labels.items():
        if not 0 <= row < len(dataset.y):
            raise UserError(
                f"row {row} is checked, {dataset.name} has rows 0..{len(dataset.y) - 1}; is it the same data?"
            )
        if label not in known:
            raise UserError(f"row {row} is checked as {label!r}, which is no class of {dataset.name}; leave it blank")
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
        return
    text = io.StringIO(newline="")
    writer = csv.writer(text, lineterminator="\n")
    if dataset.files is not None:
        writer.writerow(["path", "label"])
        writer.writerows([dataset.files.paths[row], label] for row, label in labels.items())
    elif isinstance(columns := dataset.encoding, Columns) and isinstance(x, TensorExamples):
        writer.writerow([*columns.categories, columns.label])
        writer.writerows([*_cells(x.x[row].numpy(), columns), label] for row, label in labels.items())
    write_atomically(path, text.getvalue().encode())


def _cells(values: np.ndarray, columns: Columns) -> list[str]:
    """The features of a row as the columns they were made from; numbers such that they are read as the same float32."""
    cells, at = list[str](), 0
    for categories in columns.categories.values():
        width = 1 if categories is None else len(categories)
        here = values[at : at + width]
        cells.append(str(here[0]) if categories is None else categories[int(here.argmax())])
        at += width
    return cells
