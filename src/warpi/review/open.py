"""Open a run or a data set for review: its items, its settings and its audit."""

import csv
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from warpi.errors import UserError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from warpi.audit.result import Audit
    from warpi.data.dataset import Dataset
    from warpi.review.items import Items


def open_run(
    run: Path, rows: "NDArray[np.int64] | None" = None, device: str = "auto", show: Path | None = None
) -> "tuple[Items, dict[str, Any], Audit]":
    """The items of a run, its settings that are not defaults, and its audit, which is made where there is none."""
    from warpi.audit import audit
    from warpi.audit.result import AUDIT_FILE, read_audit
    from warpi.datasets.registry import DATASETS
    from warpi.noise.noise import Noise
    from warpi.review.items import items_from_run
    from warpi.runs.defaults import adjust_for_few_rows, defaults_of
    from warpi.runs.reopen import read_run_spec, reopen
    from warpi.runs.spec import settings_to_repeat

    opened = reopen(run, device)
    dataset = opened.data.dataset
    spec: dict[str, Any] = read_run_spec(run)["spec"]
    found = read_audit(run) if (run / AUDIT_FILE).exists() else audit(opened)
    shown = _shown(show, dataset, spec["data"])
    items = items_from_run(dataset, opened.task, opened.method.net, found, rows, shown)
    if not Noise.parse(spec["noise"]).other_name:  # else inputs are not those of the file
        items = _with_files(items, spec["data"], spec.get("meta_data"))
    defaults = defaults_of(spec["data"], dataset)
    if spec["data"] not in DATASETS:
        defaults = adjust_for_few_rows(defaults, len(opened.task.train))
    return items, settings_to_repeat(spec, defaults), found


def _with_files(items: "Items", data: str, trusted: str | None = None) -> "Items":
    """Where the rows of tables stand, so that an export can copy them."""

    from warpi.data.numeric import Columns

    if not isinstance(items.dataset.encoding, Columns):
        return items
    return replace(items, source=Path(data), trusted_source=Path(trusted) if trusted else None)


def open_data(
    named: Mapping[str, Any], rows: "NDArray[np.int64] | None", given: Mapping[str, Any]
) -> "tuple[Items, dict[str, Any]]":
    """The items of data that nothing has been learned from."""

    from warpi.noise.noise import Noise
    from warpi.review.items import items_from_data
    from warpi.runs.defaults import defaults_of
    from warpi.runs.spec import DataSpec, settings_to_repeat
    from warpi.utils.seeding import generator

    spec = DataSpec(**named)
    dataset = spec.read()
    noise = Noise.parse(spec.noise)
    if noise.other_name:
        raise UserError(f"--noise {noise} replaces inputs, which only a run can show; leave it out")
    y = noise.apply(dataset, generator(given["seed"], "noise"), None).y
    shown = _shown(given["show"], dataset, spec.data)
    settings = settings_to_repeat(
        {**asdict(spec), "noise": str(noise), "seed": given["seed"]}, defaults_of(spec.data, dataset)
    )
    return _with_files(items_from_data(dataset, y, rows, shown), spec.data), settings


def read_row_list(path: Path | None) -> "NDArray[np.int64] | None":
    """The column `row` of a csv file, in its order."""
    import numpy as np

    if path is None:
        return None
    lines = _lines(path)
    if "row" not in lines[0]:
        raise UserError(
            f"{path} has no column 'row'; give a file as `warpi pick --csv` or `warpi audit --csv` writes it"
        )
    try:
        return np.array([int(line["row"]) for line in lines], dtype=np.int64)
    except (ValueError, OverflowError) as e:
        raise UserError(f"{path}: the column 'row' must hold whole numbers ({e})") from e


def _shown(path: Path | None, dataset: "Dataset", data: str) -> list[dict[str, str]] | None:
    """What else to show of each row: a csv file, or the array `text` of a .npz."""
    from warpi.datasets.arrays import load_arrays

    if path is not None:
        lines = _lines(path)
        trained = [line for line in lines if line.get("split", "").strip().lower() in ("", "train")]
        return [{key: value for key, value in line.items() if value} for line in trained]
    if dataset.encoding is None and data.lower().endswith(".npz"):
        held = load_arrays(Path(data))
        if isinstance(held, dict) and "text" in held and held["text"].shape == (len(dataset.y),):
            return [{"text": str(text)} for text in held["text"].tolist()]
    return None


def _lines(path: Path) -> list[dict[str, str]]:
    from warpi.datasets.text_files import check_separator, reading

    try:
        with reading(path), path.open(encoding="utf-8-sig", newline="") as file:
            found = csv.DictReader(file)
            check_separator(path, found.fieldnames or ())
            lines = [{key: value or "" for key, value in line.items() if key} for line in found]
    except csv.Error as e:
        raise UserError(f"{path}: not a readable csv file ({e})") from e
    if not lines:
        raise UserError(f"{path}: a first line with the names of the columns and at least one row are needed")
    return lines
