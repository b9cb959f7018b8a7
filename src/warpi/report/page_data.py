"""What the page of a run shows beyond its results: from its weights, its data and its audit.

Torch is imported only when something has to be computed.
"""

import base64
import io
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from warpi.audit.decisions import Decision
from warpi.audit.rates import Rate
from warpi.audit.result import AUDIT_FILE, Audit
from warpi.errors import UserError
from warpi.report.experiments import RunRecord, group
from warpi.report.figure_data import Arrays, read_arrays, write_arrays
from warpi.review.progress import Progress, measure_progress
from warpi.runs.schema import CHECKPOINT
from warpi.utils.terminal import say

if TYPE_CHECKING:
    from warpi.review.correct import Corrections
    from warpi.review.items import Items
    from warpi.review.open import OpenedRun

SUSPECTS = 20
COPY_GROUPS = 4  # groups of copies on the page
COPIES = 4  # rows per group
_MOST_ROWS = 2_000_000
_SIDE = 240  # pixels of a thumbnail
_NEW = "confusion_train"  # files of older versions lack it


class Suspect(NamedTuple):
    """An example whose label is suspicious."""

    row: int  # in the data
    name: str | None  # id of the row in its table, if there is one
    given: str
    suggested: str
    wrong: float  # probability
    image: str  # its picture as a data URL; empty if there is none
    words: tuple[tuple[str, str], ...]  # names and values: the file, and the columns of a row without a picture
    small: bool  # a picture of few pixels, which is enlarged without smoothing


class ShownCopy(NamedTuple):
    """A row of a group of copies."""

    part: str  # train, trusted or test
    row: int
    label: str
    image: str  # as in `Suspect`
    words: tuple[tuple[str, str], ...]
    small: bool


class Review(NamedTuple):
    """The decisions about the labels of a run, and their effect."""

    counts: dict[str, int]  # number of rows by state: kept, changed, unsure, skipped, accepted, dropped
    progress: Progress
    before: Rate  # number of wrong labels as given
    after: Rate  # the same after `warpi correct`
    n_unchecked: int | None = None  # suspicious labels that nobody has checked
    n_found_wrong: int = 0  # suspicious labels that people have changed
    n_by_people: int = 0  # labels that `warpi correct` changes because of a check, trusted rows included
    n_by_audit: int = 0  # labels that it changes unchecked
    n_trusted: int = 0  # rows with a trusted label, which are not audited
    n_trusted_wrong: int = 0  # those among them with another given label
    n_actually_wrong: int | None = None  # suspicious labels that are wrong, if the truth is known


@dataclass(frozen=True)
class Detail:
    """What is known about a run from its weights, its data and its audit. None or empty: unknown."""

    run: Path
    arrays: Arrays = field(default_factory=dict)  # of `figures.npz`
    audit: Audit | None = None
    suspects: tuple[Suspect, ...] = ()  # examples of the audit's suspicious labels
    missing: tuple[str, ...] = ()  # what is not shown, and why
    review: Review | None = None  # known if there is an audit
    copies: tuple[tuple[ShownCopy, ...], ...] = ()  # the first groups of copies


def read_details(runs: Sequence[RunRecord], audit: bool = False, device: str = "auto") -> list[Detail]:
    """Read the details of the first finished run of each experiment.

    For a single experiment everything that its weights allow is computed and stored in the run folder; for several,
    only stored details are read. With `audit`, both are computed for every experiment, and runs without an audit are
    audited. `Detail.missing` names what is not available; with `audit` that is an error.
    """
    experiments = group(runs)
    details: list[Detail] = []
    for g in experiments:
        run = next((run for run in g.runs if run.done), None)
        if run is None:
            reason = f"losses, confusion and suspicious labels: the run in {g.first.path} has not finished"
            details.append(Detail(g.first.path, missing=(reason,)))
        else:
            details.append(_detail(run, audit or len(experiments) == 1, audit, device))
    return details


def _detail(run: RunRecord, compute: bool, audit: bool, device: str) -> Detail:
    path = run.path
    missing: list[str] = []
    arrays: Arrays = {}
    try:
        _check_size(run)
        arrays = read_arrays(path) or {}
        if _NEW not in arrays and not (path / CHECKPOINT).exists():
            missing.append(f"losses and confusion: there is no {CHECKPOINT} in {path}")
        elif _NEW not in arrays and not compute:
            missing.append(f"losses and confusion: compute them with: warpi report {path} --out DIR")
        elif _NEW not in arrays:
            arrays = _measure(path, device)
    except UserError as error:
        missing.append(_left_out(path, "losses and confusion", error, audit))
    audited: Audit | None = None
    suspects: tuple[Suspect, ...] = ()
    review: Review | None = None
    copies: tuple[tuple[ShownCopy, ...], ...] = ()
    if audit or (path / AUDIT_FILE).exists():
        try:
            _check_size(run)
            audited, suspects, review, copies = _read_audit(path, device)
        except UserError as error:
            missing.append(_left_out(path, "suspicious labels", error, audit))
    elif (path / CHECKPOINT).exists():
        missing.append("suspicious labels: the run has no audit; add --audit to the command that made this page")
    return Detail(path, arrays, audited, suspects, tuple(missing), review, copies)


def _check_size(run: RunRecord) -> None:
    """Raise an error if a run has too many rows to predict and list them all in memory."""
    n = run.facts.get("n_train") or 0
    if n > _MOST_ROWS:
        raise UserError(f"{n:,} rows are too many for a page, which lists at most {_MOST_ROWS:,}; see warpi audit")


def _left_out(path: Path, what: str, error: UserError, required: bool) -> str:
    """Print why something is not on the page and return that; raise the error if it is required."""
    if required:
        raise error
    say(f"warpi: {path}: {what} are not on the page: {error}", error=True)
    return f"{what}: {error}"


def _measure(path: Path, device: str) -> Arrays:
    from warpi.report.figure_measures import compute_arrays
    from warpi.runs.reopen import reopen

    arrays = compute_arrays(reopen(path, device))
    try:
        write_arrays(path, arrays)
    except UserError as error:  # the page can still be written
        say(f"warpi: losses and confusion are not stored in the run: {error}", error=True)
    return arrays


def _read_audit(
    path: Path, device: str
) -> tuple[Audit, tuple[Suspect, ...], Review, tuple[tuple[ShownCopy, ...], ...]]:
    """The audit of a run, made if there is none, examples of suspicious labels, the decisions, and groups of copies."""
    from warpi.review.open import open_run

    opened = open_run(path, device=device)
    items = opened.items
    places = [items.position[int(row)] for row in opened.audit.row[choose_examples(opened.audit)]]
    suspects = tuple(show_suspect(items, i) for i in places)
    return opened.audit, suspects, _read_review(opened, path), show_copies(items)


def choose_examples(audit: Audit, n: int = SUSPECTS) -> list[int]:
    """Positions of suspicious labels, spread over the pairs of given and suggested class.

    The most frequent pairs come first, and from each pair in turn the most suspicious label. Labels that a person has
    checked are left out.
    """
    checked = set() if audit.pairs is None else set(audit.pairs.position.tolist())
    by_pair: dict[tuple[int, int], list[int]] = {}
    for i in audit.ranked.tolist():
        if audit.is_label_issue[i] and i not in checked:
            by_pair.setdefault((int(audit.given[i]), int(audit.suggested[i])), []).append(i)
    queues = sorted(by_pair.values(), key=len, reverse=True)
    turns = max(map(len, queues), default=0)
    return [queue[turn] for turn in range(turns) for queue in queues if turn < len(queue)][:n]


def _read_review(opened: "OpenedRun", path: Path) -> Review:
    """The decisions in a run folder and their effect; without decisions that of the audit alone."""
    from warpi.audit.decisions import Store
    from warpi.review.correct import apply_corrections
    from warpi.review.reviewed_labels import ACCEPTED, DROPPED, STATES, state_of

    items = opened.items
    file = path / "review" / "decisions.sqlite"
    decisions: Mapping[int, Decision] = {}
    random: dict[int, float] = {}
    if file.exists():
        with closing(Store(file, items.identity)) as store:
            decisions = store.current_decisions()
            random = store.random_rows()
    counts = dict.fromkeys((*STATES.values(), ACCEPTED, DROPPED), 0)
    for decision in decisions.values():
        counts[state_of(decision)] += 1
    corrections = apply_corrections(items, opened.audit, decisions)
    progress = measure_progress(opened.audit, decisions, random)
    n_wrong = None
    if items.dataset.truth_is_known:
        suspicious = opened.audit.row[opened.audit.is_label_issue]
        n_wrong = int((items.dataset.truth.numpy()[suspicious] != items.given[suspicious]).sum())
    numbers = _count_labels(opened, corrections)
    return Review(counts, progress, corrections.before, corrections.after, n_actually_wrong=n_wrong, **numbers)


def _count_labels(opened: "OpenedRun", corrections: "Corrections") -> dict[str, int]:
    """How many labels people have checked, and how many `warpi correct` changes: fields of `Review`."""
    from warpi.review.correct import AUDIT, PERSON
    from warpi.review.reviewed_labels import final_labels

    items, audit = opened.items, opened.audit
    checked = final_labels(items, corrections.decisions)
    wrong = {row for row, k in checked.items() if k != items.given[row]}
    suspicious = audit.row[audit.is_label_issue]
    outside = checked.keys() - set(audit.row.tolist())
    return {
        "n_unchecked": sum(row not in checked for row in suspicious.tolist()),
        "n_found_wrong": sum(row in wrong for row in suspicious.tolist()),
        "n_by_people": corrections.changed_by.count(PERSON),
        "n_by_audit": corrections.changed_by.count(AUDIT),
        "n_trusted": len(outside),
        "n_trusted_wrong": len(outside & wrong),
    }


def show_suspect(items: "Items", i: int) -> Suspect:
    from warpi.review.show_input import shorten_number

    row = int(items.row[i])
    names = items.classes
    picture = items.picture(row)
    files = items.dataset.files
    words = [] if files is None else [("file", files.paths[row])]
    words += [(cell.name, shorten_number(cell.value)) for cell in items.describe(row)]
    return Suspect(
        row,
        items.name_of(row),
        names[int(items.given[row])],
        names[int(items.suggested[i])],
        float(items.wrong_probability[i]),
        _to_url(*picture) if picture else "",
        tuple(words),
        items.is_small,
    )


def show_copies(items: "Items") -> tuple[tuple[ShownCopy, ...], ...]:
    """Some groups of copies: first those with contradicting labels, then those across training, trusted and test."""
    from warpi.review.copies import copies_of
    from warpi.review.show_input import shorten_number

    copies = copies_of(items)
    if copies is None:
        return ()
    groups = []
    for number in list(copies.groups)[:COPY_GROUPS]:
        shown = []
        for m in copies.members(number)[:COPIES]:
            picture = copies.picture(m.at)
            words = [("file", m.path)] if m.path else []
            words += [(cell.name, shorten_number(cell.value)) for cell in copies.cells(m.at)]
            image = _to_url(*picture) if picture else ""
            shown.append(ShownCopy(m.part, m.row, m.given, image, tuple(words), items.is_small))
        groups.append(tuple(shown))
    return tuple(groups)


def _to_url(kind: str, content: bytes) -> str:
    """A picture as a data URL. Photos are reduced to the size in which they are shown; other pictures are small."""
    if kind == "image/jpeg":
        from PIL import Image  # installed, since it has decoded this photo

        with Image.open(io.BytesIO(content)) as image:
            image.thumbnail((_SIDE, _SIDE))
            small = io.BytesIO()
            image.save(small, "JPEG", quality=82)
        content = small.getvalue()
    return f"data:{kind};base64,{base64.b64encode(content).decode()}"
