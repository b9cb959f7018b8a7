"""Apply the decisions of people and the suggestions of an audit to the labels of a data set."""

import io
import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple
from uuid import uuid4

import numpy as np
import torch
from torch import Tensor

from warpi.audit.decisions import AUTOMATIC, Choice, Decision, Store
from warpi.audit.hugging_face import embedded_source, save_with_audit
from warpi.audit.rates import MIN_CHECKS, Rate, combine_with_expectation
from warpi.audit.result import Audit, CheckedPairs
from warpi.audit.use_checks import choose_labels, count_wrong_labels, shift_number
from warpi.data.numeric import Columns, Embedded
from warpi.data.overlap import labels_in
from warpi.data.split import Split
from warpi.datasets.columns.copied import read_table_cells
from warpi.datasets.columns.parquet import read_parquet
from warpi.datasets.label_columns import CORRECTION_COLUMNS, GIVEN
from warpi.errors import UserError, format_count, missing_package
from warpi.noise.kinds import NoisyLabels
from warpi.noise.noise_file import write_noise_file
from warpi.review.export import fit_command, next_folder, write_trusted
from warpi.review.items import Floats, Ints, Items
from warpi.review.open import OpenedRun, open_run
from warpi.review.reviewed_labels import (
    accepted_labels,
    dropped_rows,
    earlier_decisions,
    final_labels,
    first_labels,
    labels_before_audit,
)
from warpi.review.trusted_set import TrustedSetSummary
from warpi.runs.rerun_command import command
from warpi.utils.files import format_csv, write_atomically

PERSON, AUDIT = "person", "audit"
_ACCEPTING = "accept"  # stands for a browser tab in the log of decisions


@dataclass(frozen=True, eq=False)
class Corrections:
    """The new label of each of the N rows of a data set, and why it has it."""

    items: Items
    label: Ints  # [N] new labels
    changed_by: tuple[str, ...]  # [N] "person" or "audit"; "" if the label is unchanged
    probability: Floats  # [N] that the new label is right: 1 if a person has checked it, NaN if nothing is known
    before: Rate  # number of wrong labels among all rows about which something is known
    after: Rate
    decisions: Mapping[int, Decision] = field(default_factory=dict)
    posterior: Mapping[int, Floats] = field(default_factory=dict)  # [K] of checked rows, from a fit without their check
    above: float = 0.0
    settings: Mapping[str, Any] = field(default_factory=dict)  # of the run, without defaults
    dropped: tuple[int, ...] = ()  # rows that are omitted, because a copy of them is kept

    def __str__(self) -> str:
        counts = Counter(self.changed_by)
        changed = (
            f"{counts[PERSON] + counts[AUDIT]} of {len(self.label)} labels changed: {counts[PERSON]} by a person, "
            f"{counts[AUDIT]} by the audit"
        )
        wrong = f"of {self.before.n:,}: {_describe(self.before)} before, {_describe(self.after)} after"
        n_dropped = format_count(len(self.dropped), "row")
        omitted = f"\nomitted, because a copy is kept: {n_dropped}" if self.dropped else ""
        return f"{changed}\nwrong labels {wrong}{self._basis()}{omitted}"

    def _basis(self) -> str:
        if self.after.low is not None:
            return f"; 90 % intervals, from {self.after.checked} checked rows"
        return (
            f"; expected by the model alone, which can be far off: with {MIN_CHECKS} random checks or more there is an "
            "interval (warpi pick, warpi review)"
        )


def _describe(rate: Rate) -> str:
    interval = "" if rate.low is None or rate.high is None else f" ({rate.low:.0f} to {rate.high:.0f})"
    return f"about {rate.rate:.0f}{interval}"


def correct(run: Path | str, above: float = 0.0, device: str = "auto", decisions: Path | None = None) -> Corrections:
    """Correct the labels of the data of a run.

    A label that a person decided in `warpi review` (in the folder `decisions`, default RUN/review) is always used, as
    are trusted labels. Any other label becomes the audit's suggestion if its probability is larger than `above`. With
    0, every suggestion is used, which gives the largest expected number of right labels.
    """
    if not 0 <= above < 1:
        raise UserError(f"above must be a probability in [0, 1), got {above}")
    opened = open_run(Path(run), device=device)
    items = opened.items
    file = (decisions or Path(run) / "review") / "decisions.sqlite"
    decided: Mapping[int, Decision] = {}
    if file.exists():
        with closing(Store(file, items.identity)) as store:
            decided = store.current_decisions()
            items = replace(items, random_rows=frozenset(store.random_rows()))
    elif decisions is not None:
        raise UserError(f"there are no decisions in {decisions}; pass the --out folder of `warpi review`")
    return replace(apply_corrections(items, opened.audit, decided, above), settings=opened.settings)


def apply_corrections(items: Items, audit: Audit, decisions: Mapping[int, Decision], above: float = 0.0) -> Corrections:
    """Corrections from an audit and the decisions of people. See `correct`."""
    N = len(items.given)
    label = items.given.copy()
    changed_by = np.full(N, "", dtype=object)
    probability = np.full(N, np.nan)
    q = audit.posterior
    label[audit.row] = choose_labels(q, audit.given, above)
    for row, k in accepted_labels(items, decisions).items():
        label[row] = k
    changed_by[label != items.given] = AUDIT
    probability[audit.row] = q[np.arange(len(audit)), label[audit.row]]
    before, after = count_wrong_labels(audit, label[audit.row], above)
    judged = {row: i for i, row in enumerate(audit.row.tolist())}
    checks = _read_checks(items, audit)
    every = {**earlier_decisions(items), **checks.decisions, **decisions}
    n_known, n_wrong, removed = 0, 0, 0.0  # trusted rows, which are not audited; by decisions new to the audit
    for row, k in final_labels(items, every).items():
        if row not in judged:
            n_known += 1
            n_wrong += int(k != items.given[row])
        elif row not in checks.decisions:
            removed += 1 - q[judged[row], label[row]]
        label[row] = k
        changed_by[row] = PERSON if k != items.given[row] else ""
        probability[row] = 1.0
    dropped = tuple(dropped_rows(items, decisions))
    for row in dropped:
        removed += 1 - q[judged[row], label[row]] if row in judged else 0
        label[row], changed_by[row], probability[row] = items.given[row], "", 1.0
    before, after = shift_number(before, n_wrong), shift_number(after, -removed)
    before, after = (replace(number, n=number.n + n_known) for number in (before, after))
    after = replace(after, n=after.n - sum(row in judged for row in dropped))
    after = combine_with_expectation(after, float((1 - probability[audit.row]).sum()))
    items = replace(items, random_rows=items.random_rows | checks.random)
    return Corrections(
        items, label, tuple(changed_by), probability, before, after, every, checks.posterior, above, {}, dropped
    )


def accept_suggestions(opened: OpenedRun, store: Store, above: float) -> list[int]:
    """Accept suggestions that are more probable than `above`, and return their rows.

    Rows about which a person has decided, and trusted rows, stay as they are. The decisions are one step, which is
    marked as made without looking at the rows, so that they never count as checks. `undo_accepted` takes it back.
    """
    if not 0 <= above < 1:
        raise UserError(f"--accept-above must be a probability in [0, 1), got {above}")
    items, audit = opened.items, opened.audit
    decided = {*store.current_decisions(), *items.trusted_rows, *earlier_decisions(items)}
    choices = []
    for row, given, k in zip(audit.row, audit.given, choose_labels(audit.posterior, audit.given, above), strict=True):
        if k != given and int(row) not in decided:
            name = items.classes[int(k)]
            choices.append(Choice(int(row), 0, "change", name, items.classes[int(given)], name))
    store.decide(choices, _ACCEPTING, f"{AUTOMATIC}{uuid4().hex}")
    return [choice.row for choice in choices]


def undo_accepted(store: Store) -> list[int]:
    """Take back the last step of `accept_suggestions`, and return its rows."""
    return list(store.undo(_ACCEPTING, uuid4().hex))


class _Checks(NamedTuple):
    """What an audit knows from people, by row of the data set."""

    decisions: dict[int, Decision]
    random: frozenset[int]
    posterior: dict[int, Floats]  # [K] P(true class | x, given label), from a fit without the check


def _read_checks(items: Items, audit: Audit) -> _Checks:
    pairs = audit.pairs
    if pairs is None:
        return _Checks({}, frozenset(), {})
    inside = np.flatnonzero(pairs.position >= 0)
    rows = audit.row[pairs.position[inside]].tolist()
    names = items.classes
    decisions = {}
    for row, i in zip(rows, inside.tolist(), strict=True):
        given, true = names[int(pairs.given[i])], names[int(pairs.true[i])]
        decisions[row] = Decision(0, row, "keep" if given == true else "change", true, "list", "", given)
    random = frozenset(np.array(rows, np.int64)[pairs.random[inside]].tolist())
    posterior = dict(zip(rows, pairs.q[inside], strict=True))
    return _Checks(decisions, random, posterior | _judge_trusted(items, pairs))


def _judge_trusted(items: Items, pairs: CheckedPairs) -> dict[int, Floats]:
    """The posterior of the trusted rows that are rows of the data, if each whose given label is known has a pair."""
    if items.trusted is None:
        return {}
    outside = pairs.position < 0
    known = torch.arange(len(items.trusted))
    if items.trusted_given is not None:
        known = (items.trusted_given.cpu() >= 0).nonzero().flatten()
    trusted = items.trusted.subset(known)
    if not np.array_equal(pairs.true[outside], trusted.y.cpu().numpy()):
        return {}
    q = pairs.q[outside]
    if items.shares(trusted.examples):
        return dict(zip(trusted.rows.tolist(), q, strict=True))
    every = torch.arange(len(items.dataset.y))
    numbered = Split(trusted.examples, trusted.rows, torch.arange(len(trusted)))
    numbers = labels_in(Split(items.dataset.examples, every, items.dataset.y), numbered).tolist()
    return {row: q[k] for row, k in enumerate(numbers) if k >= 0}


def write_trusted_set(corrections: Corrections, path: Path) -> TrustedSetSummary:
    """Write the trusted rows for training on the corrected data: those of the run, and random rows that were checked.

    The column `given` of a table contains the label that a row would have if it had been corrected without its check.
    Together with the true label it shows how many of the corrected labels are wrong, and how.
    """
    items = corrections.items
    given = {row: items.classes[k] for row, k in _unchecked_labels(corrections).items()}
    return write_trusted(items, corrections.decisions, path, given=given)


def _unchecked_labels(corrections: Corrections) -> dict[int, int]:
    """The class that each checked row would have if it had been corrected without its check."""
    given = corrections.items.given
    return {
        row: int(choose_labels(q[None], given[[row]], corrections.above)[0]) for row, q in corrections.posterior.items()
    }


def write_corrections(corrections: Corrections, path: Path, trusted: Path | None = None) -> str:
    """Write the data with corrected labels as .csv or .parquet; return the command that trains on it.

    `trusted` is the trusted set for that command (`write_trusted_set`), if there is one.

    A table keeps all of its columns, and all rows but those that were dropped as copies; its label column has the new
    labels. Three columns are added: `given` (the old label), `changed_by` and `label_probability`. `warpi fit` does not
    use them as features. Data that is not a table becomes a table with `row` (or `path`, for image files) and these
    columns, and a label file NAME.json next to it is for `warpi fit --labels`.
    """
    suffix = path.suffix.lower()
    if suffix not in (".csv", ".parquet"):
        raise UserError(f"corrected data must go to a .csv or .parquet file, got {path}")
    items = corrections.items
    if items.source is not None and path.exists() and path.samefile(items.source):
        raise UserError(f"{path} is the data itself, which is never replaced; choose another --out")
    columns, rows = _correct_table(corrections) if items.source is not None else _list_rows(corrections)
    dropped = set(corrections.dropped)
    kept = [i for i, row in enumerate(rows) if row not in dropped]
    if suffix == ".csv":
        lines = list(zip(*columns.values(), strict=True))
        content = format_csv(list(columns), [lines[i] for i in kept]).encode(errors="surrogateescape")
    else:
        content = _format_parquet(columns, kept, items.source)
    write_atomically(path, content)
    settings = {**corrections.settings, "data": str(path)}
    if items.source is None:
        labels = path.with_suffix(".json")
        left_out = torch.tensor(corrections.dropped, dtype=torch.int64)
        unchecked = torch.full((len(items.given),), -1)
        for row, k in _unchecked_labels(corrections).items():
            unchecked[row] = k
        noisy = NoisyLabels(
            torch.from_numpy(corrections.label), None, None, _before_audit(corrections), left_out, unchecked
        )
        write_noise_file(labels, data=items.dataset, noise="given", seed=0, labels=noisy)
        settings = {**corrections.settings, "noise": f"given:{labels}"}
    return fit_command(items, settings, trusted, None) if trusted else command(settings, next_folder())


def save_dataset(corrections: Corrections, out: Path, trusted: Path | None = None) -> str:
    """Write the data with corrected labels as a Hugging Face data set; return the command that trains on it.

    It has the columns that `write_corrections` adds, and those of the audit (`save_with_audit`).
    """
    items = corrections.items
    encoding = items.dataset.encoding
    data, label = embedded_source(str(corrections.settings["data"]), corrections.settings.get("label"))
    label = encoding.label if isinstance(encoding, Columns) else label or "label"
    added = _added_columns(corrections, range(len(items.given)))
    labels = [items.classes[int(k)] for k in corrections.label]
    probability = [None if np.isnan(p) else float(p) for p in corrections.probability]
    columns: dict[str, Sequence[Any]] = {label: labels, **added, CORRECTION_COLUMNS[1]: probability}
    assert items.audit is not None
    save_with_audit(out, items.audit, items.dataset, data, label, columns, corrections.dropped)
    if data != str(corrections.settings["data"]):
        assert isinstance(items.examples, Embedded)
        return shlex.join(["warpi", "embed", f"hf:{out}", "--with", items.examples.embedder["name"], "--out", "FOLDER"])
    settings = {**corrections.settings, "data": str(out)}
    return fit_command(items, settings, trusted, None) if trusted else command(settings, next_folder())


def _before_audit(corrections: Corrections) -> Tensor:
    """[N] the labels that an audit replaced, this one or an earlier one; -1 for other rows."""
    checked = final_labels(corrections.items, corrections.decisions)
    return labels_before_audit(corrections.items, torch.from_numpy(corrections.label), checked)


def _added_columns(corrections: Corrections, rows: Sequence[int | None]) -> dict[str, list[str]]:
    """The added columns of a file. `rows` are the rows of the data set on its lines; None for other lines."""
    items = corrections.items
    first = first_labels(items).numpy()
    by_audit = _before_audit(corrections).numpy() >= 0
    who = np.where(corrections.label == first, "", np.where(by_audit, AUDIT, PERSON))
    given: list[str] = []
    changed_by: list[str] = []
    probability: list[str] = []
    for row in rows:
        p = np.nan if row is None else corrections.probability[row]
        given.append("" if row is None else items.classes[int(first[row])])
        changed_by.append("" if row is None else str(who[row]))
        probability.append("" if np.isnan(p) else f"{p:.6g}")
    return dict(zip((GIVEN[0], *CORRECTION_COLUMNS), (given, changed_by, probability), strict=True))


def _correct_table(corrections: Corrections) -> tuple[dict[str, list[str]], Sequence[int | None]]:
    """The cells of the data file by column, with new labels and the added columns, and the row of each line."""
    items = corrections.items
    encoding = items.dataset.encoding
    assert items.source is not None
    assert isinstance(encoding, Columns)
    names, lines, parts = read_table_cells(items.source)
    if sum(part == "train" for part in parts) != len(items.given):
        raise UserError(f"{items.source} has changed while it was read; run the command again")
    numbers = iter(range(len(items.given)))
    rows = [next(numbers) if part == "train" else None for part in parts]
    columns = {name: [line[j] for line in lines] for j, name in enumerate(names)}
    old = columns[encoding.label]
    columns[encoding.label] = [
        cell if row is None or not corrections.changed_by[row] else items.classes[int(corrections.label[row])]
        for cell, row in zip(old, rows, strict=True)
    ]
    return {**columns, **_added_columns(corrections, rows)}, rows


def _list_rows(corrections: Corrections) -> tuple[dict[str, list[str]], Sequence[int | None]]:
    """A table with one line per row of data that is not a table, and the row of each line."""
    items = corrections.items
    rows = range(len(items.given))
    files = items.dataset.files
    where = {"path": list(files.paths)} if files is not None else {"row": [str(row) for row in rows]}
    labels = [items.classes[int(k)] for k in corrections.label]
    return {**where, "label": labels, **_added_columns(corrections, rows)}, rows


def _format_parquet(columns: Mapping[str, Sequence[str]], kept: Sequence[int], source: Path | None) -> bytes:
    """A parquet file with the lines `kept`. If the source is one, its columns keep their types. Others are text."""
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError as e:
        raise missing_package("pyarrow", "writing .parquet", "tables") from e
    table = pyarrow.table({name: pyarrow.array(cells, pyarrow.string()) for name, cells in columns.items()})
    if source is not None and source.suffix.lower() == ".parquet":
        for j, column in enumerate(read_parquet(source).columns):
            name = table.column_names[j]
            same = [str(a) == b for a, b in zip(column.to_pylist(), columns[name], strict=True)]
            table = table.set_column(j, name, column if all(same) else table.column(j).cast(column.type))
    content = io.BytesIO()
    parquet.write_table(table.take(kept), content)
    return content.getvalue()
