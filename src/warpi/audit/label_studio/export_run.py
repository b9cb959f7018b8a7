"""Export the rows of a run to Label Studio."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from warpi.audit.decisions import read_decisions
from warpi.audit.label_studio.export_tasks import LOCAL_FILES, add_to_export, labeling_interface, new_tasks
from warpi.audit.label_studio.import_project import TASK_ID
from warpi.audit.label_studio.read_export import read_export
from warpi.audit.make_audit import load_or_make_audit
from warpi.data.dataset import Dataset
from warpi.data.numeric import Columns
from warpi.datasets.columns.copied import read_table_cells
from warpi.datasets.delimited_files import TABLE_SUFFIXES
from warpi.datasets.label_columns import CORRECTION_COLUMNS, GIVEN, LABEL_COLUMNS
from warpi.errors import UserError
from warpi.runs.reopen import read_run_spec, reopen

_HIDDEN = ("label", "split", *LABEL_COLUMNS, *GIVEN, *CORRECTION_COLUMNS)  # an annotator should not see labels


def export_run(
    path: Path,
    *,
    tasks: Path | None = None,
    choices: str | None = None,
    decisions: Path | None = None,
    reviewer: int | None = None,
    prefix: str = LOCAL_FILES,
    only_issues: bool = False,
    device: str = "auto",
) -> tuple[list[dict[str, Any]], str]:
    """The tasks of a run with the suggestions of its audit, and a labeling interface for them.

    `tasks` is the export from which the data was imported. Its tasks are kept as they are, and suggestions are added.
    `decisions` is the file of a review. Its decisions become annotations by the user with the number `reviewer`.
    """
    run = reopen(path, device)
    audit = load_or_make_audit(run)
    dataset = run.data.dataset
    cells = read_rows(read_run_spec(path)["spec"]["data"], dataset)
    decided: Mapping[int, str | None] = read_decisions(decisions)[0] if decisions else {}
    image = "path" if dataset.files else None
    names = [name for name in next(iter(cells.values())) if name != TASK_ID]
    interface = labeling_interface(dataset.classes, names, image)
    if tasks is None:
        shown = {row: _without_ids(named, image) for row, named in cells.items()}
        return new_tasks(audit, shown, image, decided, reviewer, prefix, only_issues), interface
    return add_to_export(read_export(tasks, choices), audit, cells, decided, reviewer, only_issues), interface


def _without_ids(cells: Mapping[str, str], image: str | None) -> dict[str, str]:
    """The cells to show, without the ids of other tasks and a second address of an image."""
    hidden = (TASK_ID, "image") if image else (TASK_ID,)
    return {name: cell for name, cell in cells.items() if name not in hidden}


def read_rows(data: str, dataset: Dataset) -> dict[int, dict[str, str]]:
    """The cells of each row of a data set, without its labels. Images have at least their path."""
    path = Path(data)
    is_table = path.suffix.lower() in TABLE_SUFFIXES and path.is_file()
    if not is_table:
        if dataset.files is None:
            raise UserError(f"{data} is neither a table nor a set of image files, so Label Studio cannot show it")
        return {row: {"path": file} for row, file in enumerate(dataset.files.paths)}
    names, lines, parts = read_table_cells(path)
    label = dataset.encoding.label if isinstance(dataset.encoding, Columns) else "label"
    kept = [j for j, name in enumerate(names) if name not in (*_HIDDEN, label)]
    rows = [{names[j]: line[j] for j in kept} for line, part in zip(lines, parts, strict=True) if part in ("train", "")]
    if dataset.files is None:
        if len(rows) != len(dataset.y):
            raise UserError(f"{data} has changed since the run; restore it")
        return dict(enumerate(rows))
    by_path = {os.path.normpath(cells["path"]): cells for cells in rows}  # unreadable images are not in the data set
    if missing := [file for file in dataset.files.paths if file not in by_path]:
        raise UserError(f"{data} no longer lists {missing[0]}; restore it")
    return {row: by_path[file] for row, file in enumerate(dataset.files.paths)}
