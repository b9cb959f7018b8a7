"""Labels that a person has checked."""

import itertools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from warpi.audit.decisions import read_decisions
from warpi.audit.label_scores import Floats, Ints
from warpi.datasets.delimited_files import read_records
from warpi.errors import UserError, unknown
from warpi.utils.files import sha256

CHECKED = "checked_label"
_YES = ("1", "true", "yes", "x")
OUT_OF_ORDER = "checked_out_of_order"  # column of rows that were not checked in the order of the list
_MIN_IN_ORDER = 10  # fewer checked rows at the start of the list may be there by coincidence


def read_checked(path: Path, picked: Path | None = None) -> list[dict[str, str]]:
    """Read a pick file in which a person has filled in the column `checked_label`, one dict per row.

    `path` may instead be a file that `warpi review` exported; then `picked` is the pick file with which the review was
    started. Cells of the pick file count if the export says nothing about their row.
    """
    rows = read_records(path)
    if CHECKED not in rows[0] and {"label", "verified"} <= rows[0].keys():
        for cells in rows:
            cells[CHECKED] = cells["label"] if cells["verified"].lower() in _YES else ""
    if picked is not None:
        rows = _fill_list(read_records(picked), rows)
    for name in ("row", "given_label", CHECKED):
        if name not in rows[0]:
            raise UserError(f"{path} has no column {name!r}; pass a filled file from `warpi pick --csv`")
    if not any(cells[CHECKED] for cells in rows):
        raise UserError(f"no row of {path} is checked; fill in the column {CHECKED}")
    return rows


def _fill_list(listed: list[dict[str, str]], exported: list[dict[str, str]]) -> list[dict[str, str]]:
    """Fill a pick list with the decisions of a review, and mark rows that were not decided in the order of the list.

    A person may also review rows because they look suspicious, and some of these may be on the list; they are not a
    random sample. The order of the list is random, so its beginning is a random sample: random rows count up to the
    first one that was not reviewed. Cells that were filled in the list itself always count. If the review also decided
    rows that are not on the list, a beginning of only a few rows may be a coincidence and does not count.
    """
    exported_by_row = {cells.get("row"): cells for cells in exported}
    listed_rows = {cells.get("row") for cells in listed}
    decided_others = any(
        cells.get(CHECKED) and cells.get("state") != "trusted"
        for row, cells in exported_by_row.items()
        if row not in listed_rows
    )
    is_whole = any(cells.get("state") == "open" for cells in exported)  # else somebody may have kept decided rows only
    absent = {"state": "dropped"} if is_whole else {}  # an export has all rows but copies
    rows: list[dict[str, str]] = []
    reviewed: list[bool] = []
    for cells in listed:
        decision = exported_by_row.get(cells.get("row"), absent)
        label = decision.get(CHECKED) or cells.get(CHECKED, "")
        rows.append({**cells, CHECKED: label})
        reviewed.append(bool(label) or decision.get("state") in ("unsure", "skipped", "dropped"))
    random = [i for i, cells in enumerate(rows) if cells.get("part") == "random"]
    in_order = next((n for n, i in enumerate(random) if not reviewed[i]), len(random))
    if in_order < len(random) and decided_others and in_order < _MIN_IN_ORDER:
        in_order = 0
    for i in random[in_order:]:
        by_review = rows[i][CHECKED] and not listed[i].get(CHECKED)
        rows[i][OUT_OF_ORDER] = "1" if by_review else ""
    return rows


def row_weight(cells: Mapping[str, str]) -> float:
    """How many rows of the data a row of a pick list stands for, if it was drawn at random."""
    changed = "stratum_size and stratum_picked are not as `warpi pick` wrote them"
    try:
        weight = int(cells["stratum_size"]) / int(cells["stratum_picked"])
    except (KeyError, ValueError, ZeroDivisionError) as e:
        raise UserError(f"{changed} ({e})") from e
    if weight < 1:
        raise UserError(f"{changed} (more picked than there are)")
    return weight


class RowChecks(NamedTuple):
    """The m rows of a data set whose labels a person has checked."""

    row: Ints  # [m]
    label: Ints  # [m] the right class
    random: NDArray[np.bool_]  # [m] drawn at random, so that they represent the data
    weight: Floats  # [m] how many rows each random one stands for


def collect_row_checks(
    folder: Path | None, lists: Sequence[Path], classes: Sequence[str], row: Ints, y: Ints
) -> RowChecks:
    """The decisions of `warpi review` in a run folder, and the filled lists from `warpi pick`.

    The rows `row` [n] are audited and have the given labels y [n]. A list for other data is refused.

    Of the random rows of a review, only those before the first one that was not reviewed count as random, because
    others may have been decided because they looked suspicious.
    """
    checked: dict[int, tuple[int, bool, float]] = {}
    number = {name: k for k, name in enumerate(classes)}
    file = None if folder is None else folder / "review" / "decisions.sqlite"
    if file is not None and file.exists():
        decisions, random = read_decisions(file)
        in_order = list(itertools.takewhile(decisions.__contains__, random))
        for decided, label in decisions.items():
            if label in number:
                checked[decided] = number[label], decided in in_order, random.get(decided, 1.0)
    filled = [(path, _row_number(path, cells), cells) for path in lists for cells in read_checked(path)]
    listed = np.isin(row, [i for _, i, _ in filled])
    given = {i: classes[k] for i, k in zip(row[listed].tolist(), y[listed].tolist(), strict=True)}
    for path, i, cells in filled:
        if not cells[CHECKED]:
            continue
        if cells[CHECKED] not in number:
            raise unknown(f"class in {path}, row {i}:", cells[CHECKED], classes)
        _check_given(path, cells, given.get(i))
        is_random = cells.get("part") == "random"
        checked[i] = number[cells[CHECKED]], is_random, row_weight(cells) if is_random else 1.0
    rows = np.array(sorted(checked), dtype=np.int64)
    values = [checked[row] for row in rows.tolist()]
    labels = np.array([label for label, _, _ in values], dtype=np.int64)
    random_rows = np.array([is_random for _, is_random, _ in values], dtype=np.bool_)
    return RowChecks(rows, labels, random_rows, np.array([weight for _, _, weight in values], dtype=np.float64))


def _row_number(path: Path, cells: Mapping[str, str]) -> int:
    try:
        return int(cells["row"])
    except ValueError as e:
        raise UserError(f"{path}: the column row is not as `warpi pick` wrote it ({e})") from e


def _check_given(path: Path, cells: Mapping[str, str], given: str | None) -> None:
    """Raise if a row of a list has another given label in the run, unless it was corrected as the list says."""
    if given not in (None, cells["given_label"], cells[CHECKED]):
        raise UserError(
            f"row {cells['row']} is {cells['given_label']!r} in {path}, but {given!r} in the run; the list was made "
            "for other data or labels: create a new one with `warpi pick`"
        )


def digest_decisions(folder: Path) -> str | None:
    """A hash of the decisions of `warpi review` in a run folder; None if there are none."""
    file = folder / "review" / "decisions.sqlite"
    if not file.exists():
        return None
    labels, random = read_decisions(file)
    return sha256(json.dumps([sorted(labels.items()), list(random)])) if labels else None
