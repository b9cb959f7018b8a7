"""Labels that a person has checked, and the noise rate they imply."""

import itertools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from warpi.audit.decisions import read_decisions
from warpi.audit.label_scores import Floats, Ints, wilson_interval
from warpi.datasets.delimited_files import read_records
from warpi.errors import UserError
from warpi.utils.files import sha256

CHECKED = "checked_label"
_YES = ("1", "true", "yes", "x")
_OUT_OF_ORDER = "checked_out_of_order"  # column of rows that were not checked in the order of the list
_MIN_IN_ORDER = 10  # fewer checked rows at the start of the list may be there by coincidence


def read_checked(path: Path, picked: Path | None = None) -> list[dict[str, str]]:
    """Read a pick file in which a person has filled in the column `checked_label`, one dict per row.

    `path` may instead be a file that `warpi review` exported; then `picked` is the pick file that the review was
    started with. Cells of the pick file count if the export says nothing about their row.
    """
    rows = read_records(path)
    if CHECKED not in rows[0] and {"label", "verified"} <= rows[0].keys():
        for cells in rows:
            cells[CHECKED] = cells["label"] if cells["verified"].lower() in _YES else ""
    if picked is not None:
        rows = _fill_list(read_records(picked), rows)
    for name in ("row", "given_label", CHECKED):
        if name not in rows[0]:
            raise UserError(f"{path} has no column {name!r}; give a filled file of `warpi pick --csv`")
    if not any(cells[CHECKED] for cells in rows):
        raise UserError(f"no row of {path} is checked; fill in the column {CHECKED}")
    return rows


def _fill_list(listed: list[dict[str, str]], exported: list[dict[str, str]]) -> list[dict[str, str]]:
    """Fill a pick list with the decisions of a review, and mark rows that were not decided in the order of the list.

    A review may also decide rows because they look suspicious, and some of these may be on the list; they are not a
    random sample. Since the order of the list is random, its beginning is one: random rows count up to the first one
    that was not reviewed, and so do cells filled in the list itself. If the review also decided rows that are not on
    the list, a beginning of only a few rows may be a coincidence and does not count.
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
        rows[i][_OUT_OF_ORDER] = "1" if by_review else ""
    return rows


def estimate_noise_rate(rows: Sequence[Mapping[str, str]]) -> dict[str, Any]:
    """Estimate the noise rate of the data from the checked `random` rows, with 95 % intervals.

        r_c = sum_i w_i [checked_i != given_i] / sum_i w_i     checked rows of given class c, w = stratum size / picked
        r   = sum_c N_c / N r_c                                N_c = rows of the data with that label

    The estimate is unbiased, since the probability of drawing each row is known. Its interval is Wilson's for the
    number of rows of a simple random sample with the same variance. That variance is the larger of
    sum_c (N_c / N)^2 r_c (1 - r_c) / n_c and of the same sum with r in place of every r_c, because a few rows of a
    class may show no error by coincidence. n_c = (sum w)^2 / sum w^2, divided by the proportion of unchecked rows.

    Rows left blank are assumed to be like the others of their class. Rows that were checked out of order are left out
    (see `read_checked`).
    """
    rows, weight = _random_rows(rows)
    given = np.array([cells["given_label"] for cells in rows])
    checked = np.array([bool(cells[CHECKED] and not cells.get(_OUT_OF_ORDER)) for cells in rows], dtype=bool)
    out_of_order = sum(bool(cells.get(_OUT_OF_ORDER)) for cells in rows)
    _require_checked(checked, out_of_order)
    wrong = np.array([cells["given_label"] != cells[CHECKED] for cells in rows], dtype=float)
    names = [name for name in dict.fromkeys(given.tolist()) if checked[given == name].any()]
    size = np.array([weight[given == name].sum() for name in names])  # N_c
    by_class = []
    for name, N in zip(names, size.tolist(), strict=True):
        members = (given == name) & checked
        by_class.append({"class": name, **_class_rate(wrong[members], weight[members], N)})
    share = size / size.sum()
    class_rate = np.array([c["rate"] for c in by_class])
    class_n = np.array([c["n"] for c in by_class])
    rate = float((share * class_rate).sum())
    pooled = float((share**2 / class_n).sum())
    stratified = float((share**2 * class_rate * (1 - class_rate) / class_n).sum())
    n = 1 / max(pooled, stratified / (rate * (1 - rate)) if 0 < rate < 1 else 0.0)
    low, high = wilson_interval(rate, n / max(1 - checked.sum() / size.sum(), 1e-9))
    return {
        "rate": rate,
        "low": low,
        "high": high,
        "checked": int(checked.sum()),
        "drawn": len(rows),  # at random, checked or not
        "left_out": out_of_order,
        "by_class": by_class,
        "unchecked_classes": sorted({*given.tolist()} - {*names}),  # not covered by the estimate
    }


def _random_rows(rows: Sequence[Mapping[str, str]]) -> tuple[list[Mapping[str, str]], Floats]:
    """The rows that were drawn at random, and how many rows of the data each stands for."""
    if any("part" not in cells for cells in rows):
        raise UserError("the file does not say how its rows were drawn (column 'part'); add --picked PICK.csv")
    drawn = [cells for cells in rows if cells["part"] == "random"]
    return drawn, np.array([row_weight(cells) for cells in drawn])


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


def collect_row_checks(folder: Path | None, lists: Sequence[Path], classes: Sequence[str]) -> RowChecks:
    """The decisions of `warpi review` in a run folder, and the filled lists of `warpi pick`.

    Of the random rows of a review, only those before the first one that was not reviewed count as random: others may
    have been decided because they looked suspicious.
    """
    checked: dict[int, tuple[int, bool, float]] = {}
    number = {name: k for k, name in enumerate(classes)}
    file = None if folder is None else folder / "review" / "decisions.sqlite"
    if file is not None and file.exists():
        decisions, random = read_decisions(file)
        in_order = list(itertools.takewhile(lambda row: row in decisions, random))
        for row, label in decisions.items():
            if label in number:
                checked[row] = number[label], row in in_order, random.get(row, 1.0)
    for path in lists:
        for cells in read_checked(path):
            if cells[CHECKED] and cells[CHECKED] not in number:
                raise UserError(f"{path}: row {cells['row']} is checked as {cells[CHECKED]!r}, which is not a class")
            if cells[CHECKED]:
                is_random = cells.get("part") == "random"
                checked[int(cells["row"])] = (
                    number[cells[CHECKED]],
                    is_random,
                    row_weight(cells) if is_random else 1.0,
                )
    rows = np.array(sorted(checked), dtype=np.int64)
    values = [checked[row] for row in rows.tolist()]
    labels = np.array([label for label, _, _ in values], dtype=np.int64)
    random_rows = np.array([is_random for _, is_random, _ in values], dtype=np.bool_)
    return RowChecks(rows, labels, random_rows, np.array([weight for _, _, weight in values], dtype=np.float64))


def digest_decisions(folder: Path) -> str | None:
    """Identifies the decisions of `warpi review` in a run folder; None if there are none."""
    file = folder / "review" / "decisions.sqlite"
    if not file.exists():
        return None
    labels, random = read_decisions(file)
    return sha256(json.dumps([sorted(labels.items()), list(random)])) if labels else None


def _require_checked(checked: NDArray[np.bool_], out_of_order: int) -> None:
    if checked.any():
        return
    if out_of_order:
        raise UserError(
            f"{out_of_order} of the {len(checked)} rows that were drawn at random are checked, but not in the order of "
            "the list, and rows chosen because they look suspicious say nothing about the noise rate; review the list "
            "from its beginning with: warpi review --rows LIST.csv"
        )
    raise UserError("no row that was drawn at random is checked; the others cannot be used to estimate the noise rate")


def _class_rate(wrong: Floats, weight: Floats, N: float) -> dict[str, float]:
    """For one class of N rows: weighted proportion of wrong labels, its interval, and the effective sample size."""
    rate = float((weight * wrong).sum() / weight.sum())
    n = float(weight.sum() ** 2 / (weight**2).sum())
    low, high = wilson_interval(rate, n / max(1 - len(weight) / N, 1e-9))
    return {"checked": len(weight), "rate": rate, "low": low, "high": high, "n": n}
