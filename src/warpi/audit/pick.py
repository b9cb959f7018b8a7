"""Which examples a person should check first, and what the checks say about the noise rate.

Two parts. `random` is drawn at random within strata (the classes by given label, the same number of each): whatever an
example is like, its chance does not depend on it, so that these rows stand for the data and give an estimate of the
noise rate. `informative` are rows whose class is in doubt, the same number of each suggested class. Nothing prefers
examples on which a network is sure.
"""

import csv
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from warpi.audit.label_scores import Floats, Ints, wilson_interval
from warpi.audit.result import Audit
from warpi.datasets.text_files import check_separator, reading
from warpi.errors import UserError
from warpi.functional.neighbors import cluster_centers
from warpi.utils.files import write_atomically
from warpi.utils.seeding import generator

CHECKED = "checked_label"
SURE = 0.9  # a class of at least this probability is not in doubt
_YES = ("1", "true", "yes", "x")
_APART = "checked_apart"  # of a row that was checked out of the list's order
_FEW = 10  # rows in order that are hardly all there by chance


@dataclass(frozen=True, eq=False)
class Pick:
    """n rows to be checked, in the order in which to check them: any first part of it is a fair beginning."""

    row: Ints  # [n] rows of the data set
    given: Ints  # [n]
    random: NDArray[np.bool_]  # [n] drawn at random within its stratum, or for being informative
    stratum_size: Ints  # [n] rows of the data in the stratum it was drawn from; 0: informative
    stratum_picked: Ints  # [n] how many of them were drawn; 0: informative
    classes: tuple[str, ...]
    audit: Audit | None = None  # of the run, where there is one
    paths: Sequence[str] | None = None  # [N] of the image files of the data set

    def to_csv(self, path: Path | str) -> None:
        """Write the list. A person fills the column `checked_label`; blank rows count as not checked."""
        known = {} if self.audit is None else {row: i for i, row in enumerate(self.audit.row.tolist())}
        text = io.StringIO(newline="")
        writer = csv.writer(text, lineterminator="\n")
        head = ["row", *(["path"] if self.paths is not None else []), "given_label", CHECKED, "suggested_label"]
        writer.writerow([*head, "wrong_probability", "uncertainty", "part", "stratum_size", "stratum_picked"])
        for i, row in enumerate(self.row.tolist()):
            found = ["", "", ""]
            if self.audit is not None and row in known:
                a, at = self.audit, known[row]
                found = [a.classes[a.suggested[at]], f"{a.wrong_probability[at]:.6g}", f"{a.uncertainty[at]:.6g}"]
            line = [row, *([self.paths[row]] if self.paths is not None else []), self.classes[self.given[i]], ""]
            part = "random" if self.random[i] else "informative"
            writer.writerow([*line, *found, part, self.stratum_size[i], self.stratum_picked[i]])
        # Names of files may be any bytes; `row` says which is meant.
        write_atomically(Path(path), text.getvalue().encode(errors="backslashreplace"))


def pick_rows(
    n: int,
    row: Ints,
    given: Ints,
    classes: tuple[str, ...],
    *,
    audit: Audit | None = None,
    features: Tensor | None = None,
    unbiased: bool = False,
    paths: Sequence[str] | None = None,
    seed: int = 0,
) -> Pick:
    """n of the rows (with labels `given`).

    With an audit of just these rows half are drawn for being informative, unless `unbiased`. Without one, and with
    `features` [N, D], the strata are clusters of the inputs within each class, so that the random rows cover them.
    """
    K = len(classes)
    if not K <= n <= len(row):
        raise UserError(f"cannot pick {n} of {len(row)} rows; allowed are at least one a class ({K}) and at most all")
    chance = generator(seed, "pick")
    n_random = n if audit is None or unbiased else max(K, n - n // 2)
    by_class = np.bincount(given, minlength=K)
    strata = given if features is None else _clusters(features, given, _shares(by_class, n), chance)
    size = np.bincount(strata)
    count = _shares(size, n_random) if features is None else _shares_by_class(strata, given, n_random, K)
    drawn = [_draw(np.flatnonzero(strata == h), count[h], chance) for h in range(len(size))]
    at = np.concatenate(drawn)
    stratum = strata[at]
    informative = np.zeros(0, np.int64)
    if audit is not None and n > n_random:
        informative = _informative(audit, np.setdiff1d(np.arange(len(row)), at), n - n_random, K, chance)
    chosen = np.concatenate([at, informative])
    picked = np.concatenate([count[stratum], np.zeros(len(informative), np.int64)])
    sizes = np.concatenate([size[stratum], np.zeros(len(informative), np.int64)])
    order = _draw(np.arange(len(chosen)), len(chosen), chance)
    chosen = chosen[order]
    return Pick(row[chosen], given[chosen], order < len(at), sizes[order], picked[order], classes, audit, paths)


def _draw(pool: Ints, n: int, chance: torch.Generator) -> Ints:
    drawn: Ints = pool[torch.randperm(len(pool), generator=chance).numpy()[:n]]
    return drawn


def _shares(size: Ints, n: int) -> Ints:
    """n among strata of these sizes: as equal as the sizes allow."""
    count = np.zeros(len(size), np.int64)
    while (left := n - int(count.sum())) > 0:
        room = np.flatnonzero(count < size)
        each = max(1, left // len(room))
        for h in room[:left]:
            count[h] += min(each, size[h] - count[h])
    return count


def _shares_by_class(strata: Ints, given: Ints, n: int, K: int) -> Ints:
    """As many of every class; within a class first one of each stratum, then in proportion to their sizes."""
    size, count = np.bincount(strata), np.zeros(int(strata.max()) + 1, np.int64)
    for k, quota in enumerate(_shares(np.bincount(given, minlength=K), n)):
        mine = np.unique(strata[given == k])
        for _ in range(quota):
            h = mine[(size[mine] / (count[mine] + 1e-9) * (count[mine] < size[mine])).argmax()]
            count[h] += 1
    return count


def _clusters(features: Tensor, given: Ints, quota: Ints, chance: torch.Generator) -> Ints:
    """Strata: for each class as many clusters (k-means) of its inputs as there are rows to be drawn of it.  [N]"""
    h = features.flatten(1).float()
    h = (h - h.mean(0)) / h.std(0).clamp_min(1e-6)
    strata, start = np.zeros(len(given), np.int64), 0
    for k, m in enumerate(quota.tolist()):
        mine = torch.from_numpy(np.flatnonzero(given == k))
        if len(mine):
            label = torch.cdist(h[mine], cluster_centers(h[mine], max(1, m), chance)).argmin(1).numpy()
            _, label = np.unique(label, return_inverse=True)
            strata[mine.numpy()] = start + label
            start += int(label.max()) + 1
    return strata


def _informative(audit: Audit, pool: Ints, n: int, K: int, chance: torch.Generator) -> Ints:
    """n of the pool (positions of the audit), the same number of every suggested class: at random among those whose
    class is in doubt or is not the given one, and where these run out, those that come next to it."""
    top = audit.posterior[pool].max(1)
    doubtful = (top < SURE) | (audit.suggested[pool] != audit.given[pool])
    chosen = []
    for k, m in enumerate(_shares(np.bincount(audit.suggested[pool], minlength=K), n)):
        mine = audit.suggested[pool] == k
        first = _draw(pool[mine & doubtful], m, chance)
        rest = pool[mine & ~doubtful]
        rest = rest[top[mine & ~doubtful].argsort(kind="stable")][: m - len(first)]
        chosen += [first, rest]
    return np.concatenate(chosen)


# --- after checking ---------------------------------------------------------------------------------------------------


def read_checked(path: Path, picked: Path | None = None) -> list[dict[str, str]]:
    """A pick file whose column `checked_label` a person has filled, a dict a row.

    Instead of that, a file that `warpi review` exported, together with the pick file that it was made from; what that
    one says counts where the export says nothing.
    """
    rows = _read(path)
    if CHECKED not in rows[0] and {"label", "verified"} <= rows[0].keys():
        for cells in rows:
            cells[CHECKED] = cells["label"] if cells["verified"].lower() in _YES else ""
    if picked is not None:
        rows = _of_list(_read(picked), rows)
    for name in ("row", "given_label", CHECKED):
        if name not in rows[0]:
            raise UserError(f"{path} has no column {name!r}; give the file of `warpi pick --csv`, filled by a person")
    if not any(cells[CHECKED] for cells in rows):
        raise UserError(f"no row of {path} is checked; fill the column {CHECKED}")
    return rows


def _of_list(listed: list[dict[str, str]], exported: list[dict[str, str]]) -> list[dict[str, str]]:
    """The list, filled by what was decided in a review, and marked where that did not go by the list.

    A review also decides about rows since they look suspicious, and some of these may be on the list: they are no
    random rows. What went by the list is what is filled in the list itself, and the whole of it or its beginning, for
    its order is random: the random rows up to the first one that nobody looked at. Where rows beside the list were
    decided, too, a beginning of very few rows may be there by chance, and does not count.
    """
    said = {cells.get("row"): cells for cells in exported}
    own = {cells.get("row") for cells in listed}
    beside = any(
        cells.get(CHECKED) and cells.get("state") != "trusted" for row, cells in said.items() if row not in own
    )
    rows, looked = list[dict[str, str]](), list[bool]()
    for cells in listed:
        found = said.get(cells.get("row"), {})
        rows.append({**cells, CHECKED: found.get(CHECKED) or cells.get(CHECKED, "")})
        looked.append(bool(rows[-1][CHECKED]) or found.get("state") in ("unsure", "skipped"))
    random = [i for i, cells in enumerate(rows) if cells.get("part") == "random"]
    first = next((n for n, i in enumerate(random) if not looked[i]), len(random))
    if first < len(random) and beside and first < _FEW:
        first = 0
    for i in random[first:]:
        rows[i][_APART] = "1" if rows[i][CHECKED] and not listed[i].get(CHECKED) else ""
    return rows


def _read(path: Path) -> list[dict[str, str]]:
    try:
        with reading(path), path.open(encoding="utf-8-sig", newline="") as file:
            lines = csv.DictReader(file)
            check_separator(path, lines.fieldnames or ())
            rows = [{k: (v or "").strip() for k, v in cells.items() if k} for cells in lines]
    except csv.Error as e:
        raise UserError(f"{path} is not a csv file ({e})") from e
    if not rows:
        raise UserError(f"{path} has no rows")
    return rows


def estimate(rows: Sequence[Mapping[str, str]]) -> dict[str, Any]:
    """The noise rate of the data by the `random` rows that were checked, with 95 % intervals.

        r_c = sum_i w_i [checked_i != given_i] / sum_i w_i     checked rows of given class c, w = stratum size / picked
        r   = sum_c N_c / N r_c                                N_c = rows of the data with that label

    Unbiased, since the chance of every row is known. Its interval is Wilson's for as many rows as a plain random sample
    would need for the same variance. That is the larger of sum_c (N_c / N)^2 r_c (1 - r_c) / n_c and of the same with r
    for all r_c, for few rows may show no error where there are some; n_c = (sum w)^2 / sum w^2, over 1 - the share that
    was checked. A row left blank is taken to be like the others of its class. Rows that were not checked in the order
    of the list do not count (`read_checked`): somebody may have chosen them.
    """
    if any("part" not in cells for cells in rows):
        raise UserError("the file does not say how its rows were drawn (column 'part'); add --picked PICK.csv")
    rows = [cells for cells in rows if cells["part"] == "random"]
    try:
        weight = np.array([int(cells["stratum_size"]) / int(cells["stratum_picked"]) for cells in rows])
    except (KeyError, ValueError, ZeroDivisionError) as e:
        raise UserError(f"stratum_size and stratum_picked are not as `warpi pick` wrote them ({e})") from e
    if (weight < 1).any():
        raise UserError(
            "stratum_size and stratum_picked are not as `warpi pick` wrote them (more picked than there are)"
        )
    given = np.array([cells["given_label"] for cells in rows])
    checked = np.array([bool(cells[CHECKED] and not cells.get(_APART)) for cells in rows], dtype=bool)
    left_out = sum(bool(cells.get(_APART)) for cells in rows)
    wrong = np.array([cells["given_label"] != cells[CHECKED] for cells in rows], dtype=float)
    if left_out and not checked.any():
        raise UserError(
            f"{left_out} of the {len(rows)} rows that were drawn at random are checked, but not in the order of the "
            "list: rows that were chosen for looking suspicious say nothing about the noise rate; decide about the "
            "list from its beginning, with: warpi review --rows LIST.csv"
        )
    if not checked.any():
        raise UserError("no row that was drawn at random is checked: the others say nothing about the noise rate")
    names = [name for name in dict.fromkeys(given.tolist()) if checked[given == name].any()]
    size = np.array([weight[given == name].sum() for name in names])  # N_c
    share = size / size.sum()
    own = [(given == name) & checked for name in names]
    found = [_rate(wrong[at], weight[at], N) for at, N in zip(own, size.tolist(), strict=True)]
    rate = float(sum(s * c["rate"] for s, c in zip(share, found, strict=True)))
    pooled = float(sum(s**2 / c["n"] for s, c in zip(share, found, strict=True)))
    apart = float(sum(s**2 * c["rate"] * (1 - c["rate"]) / c["n"] for s, c in zip(share, found, strict=True)))
    n = 1 / max(pooled, apart / (rate * (1 - rate)) if 0 < rate < 1 else 0.0)
    low, high = wilson_interval(rate, n / max(1 - checked.sum() / size.sum(), 1e-9))
    return {
        "rate": rate,
        "low": low,
        "high": high,
        "checked": int(checked.sum()),
        "drawn": len(rows),  # at random, checked or not
        "left_out": left_out,  # checked, but not in the order of the list
        "by_class": [{"class": name, **c} for name, c in zip(names, found, strict=True)],
        "unchecked_classes": sorted({*given.tolist()} - {*names}),  # which the estimate says nothing about
    }


def _rate(wrong: Floats, w: Floats, N: float) -> dict[str, float]:
    """Of one class of N rows: weighted share of wrong labels, interval, and how many rows that is worth."""
    rate, n = float((w * wrong).sum() / w.sum()), float(w.sum() ** 2 / (w**2).sum())
    low, high = wilson_interval(rate, n / max(1 - len(w) / N, 1e-9))
    return {"checked": len(w), "rate": rate, "low": low, "high": high, "n": n}
