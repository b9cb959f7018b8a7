"""Open a run or a data set for review."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from warpi.audit.checked_labels import row_weight
from warpi.audit.make_audit import load_or_make_audit
from warpi.audit.pick import labels_with_noise
from warpi.audit.result import Audit
from warpi.data.dataset import Dataset
from warpi.data.numeric import Columns
from warpi.datasets.arrays import load_arrays
from warpi.datasets.columns.copied import read_copied_columns
from warpi.datasets.delimited_files import read_records
from warpi.errors import UserError
from warpi.noise.noise_file import read_noise_file, read_noise_name
from warpi.noise.parse import Noise
from warpi.review.items import Items, items_from_data, items_from_run
from warpi.runs.defaults import defaults_of, defaults_of_task
from warpi.runs.reopen import read_run_spec, reopen
from warpi.runs.run import Run
from warpi.runs.spec import DataSpec, settings_to_repeat


class RowList(NamedTuple):
    """The rows of a list that `warpi pick --csv` or `warpi audit --csv` wrote."""

    row: NDArray[np.int64]  # [n] in the order of the list
    random: dict[int, float]  # those that were drawn at random, and how many rows of the data each represents
    given: dict[int, str]  # their given labels, if the list has them
    path: Path


@dataclass(frozen=True)
class OpenedRun:
    """A finished run with its audit and the items to review."""

    run: Run
    audit: Audit
    items: Items

    @property
    def settings(self) -> dict[str, Any]:
        """The settings of the run that differ from the defaults of a new run on its data."""
        spec: dict[str, Any] = read_run_spec(self.run.path)["spec"]
        return settings_to_repeat(spec, defaults_of_task(self.run.task, {}, spec["data"]))


def open_run(
    path: Path,
    rows: RowList | None = None,
    device: str = "auto",
    show: Path | None = None,
    id: Sequence[str] = (),
    keep: Sequence[str] = (),
) -> OpenedRun:
    """Open a run folder. If it has no audit yet, it is audited.

    `id` and `keep` name columns of a table that are shown with each row, see `read_copied_columns`.
    """
    run = reopen(path, device)
    audit = load_or_make_audit(run)
    spec: dict[str, Any] = read_run_spec(path)["spec"]
    dataset = run.data.dataset
    extra_cells = read_extra_cells(show, dataset, spec["data"])
    items = items_from_run(dataset, run.task, run.method.net, audit, rows and rows.row, extra_cells)
    items = _with_label_file(replace(items, test=run.truth.test), spec["noise"])
    items = _with_copied_columns(_with_row_list(items, rows), spec["data"], id, keep)
    if not Noise.parse(spec["noise"]).other_name:  # otherwise some inputs are not those of the file
        items = _with_source_files(items, spec["data"], spec.get("meta_data"))
    return OpenedRun(run, audit, items)


def open_data(
    spec: DataSpec,
    rows: RowList | None = None,
    seed: int = 0,
    show: Path | None = None,
    id: Sequence[str] = (),
    keep: Sequence[str] = (),
) -> tuple[Items, dict[str, Any]]:
    """Open data without a run; return its items, and its settings that are not defaults."""
    dataset = spec.read()
    y = labels_with_noise(dataset, spec.noise, seed).y
    items = items_from_data(dataset, y, rows and rows.row, read_extra_cells(show, dataset, spec.data))
    items = _with_label_file(items, spec.noise)
    items = _with_copied_columns(_with_row_list(items, rows), spec.data, id, keep)
    stored = {**asdict(spec), "noise": str(Noise.parse(spec.noise)), "seed": seed}
    return _with_source_files(items, spec.data), settings_to_repeat(stored, defaults_of(spec.data, dataset))


def _with_label_file(items: Items, noise: str) -> Items:
    """Add the results of an earlier review in a label file: the labels that it has changed, and dropped rows."""
    parsed = Noise.parse(noise)
    if parsed.kind != "given" or parsed.file is None:
        return items if str(parsed) == "given" else replace(items, before_audit=None, before_person=None)
    earlier = read_noise_file(parsed.file, items.dataset)
    before_person = None
    if read_noise_name(parsed.file) == "given":  # a review wrote it; other files contain noise
        y = items.dataset.y
        by_audit = torch.zeros(len(y), dtype=torch.bool) if earlier.before_audit is None else earlier.before_audit >= 0
        by_person = (earlier.y != y) & ~by_audit
        before_person = torch.where(by_person if earlier.checked is None else by_person | earlier.checked, y, -1)
    return replace(
        items,
        given=earlier.y.numpy().copy(),
        before_audit=earlier.before_audit,
        before_person=before_person,
        dropped_before=frozenset(earlier.dropped.tolist()),
    )


def _with_copied_columns(items: Items, data: str, id: Sequence[str], keep: Sequence[str]) -> Items:
    """Add the columns of a table that identify its rows."""
    copied = read_copied_columns(data, items.dataset.encoding, id, keep)
    if any(len(cells) != len(items.given) for cells in copied.values()):
        raise UserError(f"{data} has changed while it was read; run the command again")
    return replace(items, copied=copied)


def _with_source_files(items: Items, data: str, trusted: str | None = None) -> Items:
    """Add the files of a table, so that an export can copy rows from them."""
    if not isinstance(items.dataset.encoding, Columns):
        return items
    return replace(items, source=Path(data), trusted_source=Path(trusted) if trusted else None)


def _with_row_list(items: Items, rows: RowList | None) -> Items:
    """Mark the rows of a list that were drawn at random. Raises if the list was made for other data."""
    if rows is None:
        return items
    for row, label in rows.given.items():
        known = {items.classes[int(k)] for k in (items.given[row], items.dataset.y[row])}
        if label not in known:
            raise UserError(
                f"row {row} is {label!r} in {rows.path}, but {' or '.join(map(repr, sorted(known)))} in "
                f"{items.dataset.name}; the list was made for other data or labels: create a new one with `warpi pick`"
            )
    return replace(items, random_rows=frozenset(rows.random))


def read_row_list(path: Path | None) -> RowList | None:
    """Read a csv file with a column `row` and, if `warpi pick` wrote it, `part` and `given_label`."""
    if path is None:
        return None
    records = read_records(path)
    if "row" not in records[0]:
        raise UserError(f"{path} has no column 'row'; pass a file that `warpi pick --csv` or `warpi audit --csv` wrote")
    try:
        row = np.array([int(cells["row"]) for cells in records], dtype=np.int64)
    except (ValueError, OverflowError) as e:
        raise UserError(f"{path}: the column 'row' must contain integers ({e})") from e
    lines = dict(zip(row.tolist(), records, strict=True))
    random = {r: row_weight(cells) for r, cells in lines.items() if cells.get("part") == "random"}
    given = {r: cells["given_label"] for r, cells in lines.items() if cells.get("given_label")}
    return RowList(row, random, given, path)


def read_extra_cells(path: Path | None, dataset: Dataset, data: str) -> list[Mapping[str, str]] | None:
    """More cells to show for each row, from the lines of a csv file, or else the array `text` of a .npz file."""
    if path is not None:
        train = [cells for cells in read_records(path) if cells.get("split", "").lower() in ("", "train")]
        return [{name: cell for name, cell in cells.items() if cell} for cells in train]
    if dataset.encoding is None and data.lower().endswith(".npz"):
        arrays = load_arrays(Path(data))
        if isinstance(arrays, dict) and "text" in arrays and arrays["text"].shape == (len(dataset.y),):
            return [{"text": str(text)} for text in arrays["text"].tolist()]
    return None
