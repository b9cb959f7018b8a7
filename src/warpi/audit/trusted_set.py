"""Write checked rows as a trusted set for `warpi fit --trusted`."""

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from warpi.audit.checked import CHECKED
from warpi.data.dataset import Dataset
from warpi.data.examples import TensorExamples
from warpi.data.numeric import Columns
from warpi.datasets.label_columns import LABEL_COLUMNS, OLD_NAMES
from warpi.datasets.tables import read_parquet
from warpi.datasets.text_files import read_cells
from warpi.errors import UserError
from warpi.noise.noise import Noise
from warpi.runs.spec import DataSpec
from warpi.utils.files import write_atomically, write_csv
from warpi.utils.seeding import generator


class TrustedSetSummary(NamedTuple):
    """What was written as a trusted set."""

    path: Path
    size: int  # number of examples
    left_out: int  # trusted examples that were left out to balance the classes
    fewest: list[str]  # the classes with the fewest examples, which limit the others
    missing: list[str]  # the classes without any example

    @classmethod
    def of(cls, path: Path, y: Tensor, size: int, classes: tuple[str, ...]) -> "TrustedSetSummary":
        """Summary of a set with `size` of the trusted examples, whose classes are y."""
        counts = dict(zip(classes, torch.bincount(y, minlength=len(classes)).tolist(), strict=True))
        least = min(n for n in counts.values() if n)
        fewest = [name for name, n in counts.items() if n == least]
        missing = [name for name, n in counts.items() if not n]
        return cls(path, size, len(y) - size, fewest, missing)

    def __str__(self) -> str:
        text = f"{self.path}: {self.size} trusted examples"
        if self.left_out:
            text += f"; {self.left_out} more are left out to balance the classes, limited by {', '.join(self.fewest)}"
        return text


def balance_classes(y: Tensor, first: int = 0) -> Tensor:
    """Positions of a subset with the same number of examples of every class that occurs, in ascending order.

    The `first` examples are preferred; the others are drawn at random. A trusted set of the most suspicious rows would
    contain some classes far more often than others, and meta methods would learn these frequencies (docs/review.md).
    """
    counts = torch.bincount(y)
    least = int(counts[counts > 0].min())
    drawn = torch.randperm(len(y) - first, generator=generator(0, "trusted"))
    order = torch.cat([torch.arange(first), first + drawn])
    return torch.cat([order[y[order] == k][:least] for k in range(len(counts))]).sort().values


def original_rows(path: Path, label: str, part: str = "train") -> list[dict[str, str]]:
    """The rows of a table as they stand in its file, as dicts from column name to cell: numbers are not rounded.

    If there is a column `split`, only the rows with that `part` (train, test or trusted). The columns clean_label,
    trusted and split are left out: they may be wrong for a checked row. Returns an empty list if the file is not a
    table.
    """
    suffix = path.suffix.lower()
    if suffix not in (".csv", ".tsv", ".parquet"):
        return []
    names: Sequence[str]
    rows: Sequence[Sequence[str]]
    if suffix == ".parquet":
        names, rows = _read_parquet(path)
    else:
        names, rows, _ = read_cells(path, "\t" if suffix == ".tsv" else ",")
    names = [name.strip() or f"Unnamed: {j}" for j, name in enumerate(names)]  # the names that pandas gives
    copied = [name for name in names if name == label or name not in LABEL_COLUMNS]
    records = [dict(zip(names, row, strict=True)) for row in rows]
    parts = [cells.get("split", "train").strip().lower() for cells in records]
    return [
        {name: cells[name] for name in copied}
        for cells, cells_part in zip(records, parts, strict=True)
        if OLD_NAMES.get(cells_part, cells_part) == part
    ]


def _read_parquet(path: Path) -> tuple[list[str], list[tuple[str, ...]]]:
    frame = read_parquet(path)
    columns: list[list[str]] = []
    for column in frame.columns:
        is_float = str(column.type) in ("halffloat", "float", "double")  # numpy writes as few digits as needed
        cells = column.to_numpy() if is_float else column.to_pylist()
        columns.append(["" if cell is None or cell != cell else str(cell) for cell in cells])
    return frame.column_names, list(zip(*columns, strict=True))


def decode_cells(x: Tensor, columns: Columns) -> dict[str, str]:
    """The features [D] of one row as cells of the columns they were made from."""
    values = x.flatten().cpu().numpy()
    cells: dict[str, str] = {}
    start = 0
    for name, categories in columns.categories.items():
        width = 1 if categories is None else len(categories)
        block = values[start : start + width]
        cells[name] = format_number(block[0]) if categories is None else categories[int(block.argmax())]
        start += width
    return cells


def format_number(value: np.floating) -> str:
    """The shortest text that is read as the same float32, without a decimal point for integers."""
    return str(value).removesuffix(".0")


def pack_arrays(x: Tensor, labels: Sequence[str]) -> bytes:
    """A .npz file with the inputs x and the labels y."""
    content = io.BytesIO()
    np.savez_compressed(content, x=x.cpu().numpy(), y=np.array(labels))
    return content.getvalue()


def write_trusted(
    path: Path, dataset: Dataset, labels: Mapping[int, str], balanced: bool = True, source: Path | None = None
) -> TrustedSetSummary:
    """Write rows of a data set with the labels that a person chose for them, in the format of the data.

    Balanced: the same number of every class. Image files become a .csv with `path` and `label`, with paths relative to
    the folder of the data (`--root`). Tables become a .csv with all columns of their file `source`, with the original
    cells; without a `source`, the cells are reconstructed from the features. Everything else becomes a .npz with x
    and y.
    """
    _check_labels(dataset, labels)
    kind = ".csv" if dataset.files is not None or isinstance(dataset.encoding, Columns) else ".npz"
    if path.suffix.lower() != kind:
        raise UserError(f"the trusted set of {dataset.name} must be a {kind} file, got {path}")
    y = torch.tensor([dataset.classes.index(label) for label in labels.values()])
    rows = list(labels)
    if balanced:
        rows = [rows[i] for i in balance_classes(y).tolist()]
    names = [labels[row] for row in rows]
    x = dataset.examples
    if dataset.files is not None:
        files = [dataset.files.paths[row] for row in rows]
        try:
            write_csv(path, ["path", "label"], zip(files, names, strict=True), errors="strict")
        except UnicodeEncodeError as e:
            raise UserError(
                "some image file names are not UTF-8; rename them, or let `warpi review` write a folder"
            ) from e
    elif not isinstance(x, TensorExamples):
        raise UserError(f"the inputs of {dataset.name} cannot be written to an array; use warpi review")
    elif isinstance(dataset.encoding, Columns):
        columns = dataset.encoding
        originals = original_rows(source, columns.label) if source else []
        if originals and len(originals) != len(dataset.y):
            raise UserError(f"{source} has changed while it was read; run the command again")
        header = list(originals[0]) if originals else [*columns.categories, columns.label]
        lines = []
        for row, name in zip(rows, names, strict=True):
            cells = originals[row] if originals else decode_cells(x.x[row], columns)
            lines.append([name if column == columns.label else cells[column] for column in header])
        write_csv(path, header, lines, errors="strict")
    else:
        write_atomically(path, pack_arrays(x.x[torch.tensor(rows)], names))
    return TrustedSetSummary.of(path, y, len(rows), dataset.classes)


def labels_with_noise(dataset: Dataset, noise: str, seed: int) -> Tensor:
    """The labels [N] of a data set with the noise that `warpi fit --noise NOISE --seed SEED` adds."""
    parsed = Noise.parse(noise)
    if parsed.other_name:
        raise UserError(f"noise {noise} replaces inputs, which only a run can show; leave it out")
    return parsed.apply(dataset, generator(seed, "noise"), None).y


def write_checked_rows(
    path: Path, rows: Sequence[Mapping[str, str]], listed: Path, spec: DataSpec, seed: int, balanced: bool
) -> TrustedSetSummary:
    """Write the checked rows of the list in the file `listed` as a trusted set of the data that `spec` names."""
    checked = [cells for cells in rows if cells[CHECKED]]
    try:
        labels = {int(cells["row"]): cells[CHECKED] for cells in checked}
    except ValueError as e:
        raise UserError(f"{listed}: the column row is not as `warpi pick` wrote it ({e})") from e
    dataset = spec.read()
    _check_same_rows(checked, dataset, labels_with_noise(dataset, spec.noise, seed), listed)
    return write_trusted(path, dataset, labels, balanced, Path(spec.data))


def _check_same_rows(rows: Sequence[Mapping[str, str]], dataset: Dataset, y: Tensor, listed: Path) -> None:
    """Raise if the list is about other data or other rows, so that no label is assigned to an unchecked example."""
    for cells in rows:
        row = int(cells["row"])
        if not 0 <= row < len(y):
            continue  # `write_trusted` raises
        if dataset.files is not None and cells.get("path"):
            name = cells["path"]
            expected = {dataset.files.paths[row]}
        else:  # the test rows of a run have no added noise
            name = cells["given_label"]
            expected = {dataset.classes[int(k)] for k in (y[row], dataset.y[row])}
        if name not in expected:
            raise UserError(
                f"row {row} is {name!r} in {listed}, but {' or '.join(map(repr, sorted(expected)))} in {dataset.name}: "
                "rows were moved or relabeled; give the same --data, --noise and --seed as when the list was made"
            )


def _check_labels(dataset: Dataset, labels: Mapping[int, str]) -> None:
    for row, label in labels.items():
        if not 0 <= row < len(dataset.y):
            raise UserError(
                f"row {row} is checked, but {dataset.name} has rows 0..{len(dataset.y) - 1}; is it the same data?"
            )
        if label not in dataset.classes:
            raise UserError(
                f"row {row} is checked as {label!r}, which is not a class of {dataset.name}; leave it blank"
            )
