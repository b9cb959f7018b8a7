"""What the page of a run shows beyond its results: from its weights, its data and its audit.

Torch is imported only when something has to be computed.
"""

import io
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from warpi.audit.result import AUDIT_FILE, Audit
from warpi.errors import UserError
from warpi.report.experiments import RunRecord, group
from warpi.report.figure_data import EDGES, KINDS, Arrays, read_arrays, write_arrays

if TYPE_CHECKING:
    from warpi.review.items import Items

Counts = NDArray[Any]
WEIGHTS = "checkpoint.safetensors"
SUSPECTS = 20
_SIDE = 240  # pixels of a thumbnail
_NEW = "confusion_train"  # files of older versions lack it


class Losses(NamedTuple):
    """Losses of the training examples, by whether their label is right, wrong or unknown."""

    name: str
    counts: Mapping[str, Counts]  # each [bins]
    means: Mapping[str, float]


class Suspect(NamedTuple):
    """An example whose label is suspicious."""

    row: int  # in the data
    given: str
    suggested: str
    wrong: float  # probability
    uncertainty: float
    picture: tuple[str, bytes] | None  # media type and content
    words: tuple[tuple[str, str], ...]  # names and values: the file, and the columns if there is no picture
    small: bool  # a picture of few pixels, which is enlarged without smoothing


class ClassRate(NamedTuple):
    """Fraction of wrong labels in a class."""

    name: str
    n: int
    rate: float
    low: float
    high: float
    issues: int
    instead: str  # the class that is suggested most often


@dataclass(frozen=True)
class Audited:
    """Results of an audit."""

    n: int
    n_issues: int
    noise_rate: tuple[float, float, float]  # rate, low and high end of its interval
    by_class: tuple[ClassRate, ...]
    probabilities: str  # their origin, in words
    uncertainty: str  # its meaning, in words
    trusted: float | None  # accuracy of the classifier on the trusted examples
    suspects: tuple[Suspect, ...]

    @property
    def pictures(self) -> bool:
        return any(s.picture is not None for s in self.suspects)


@dataclass(frozen=True)
class Detail:
    """What is known about a run from its weights, its data and its audit. None or empty: unknown."""

    run: Path
    classes: tuple[str, ...] = ()
    test: Counts | None = None  # [K, K] true class, predicted class
    train: Counts | None = None  # [K, K] given label, predicted class
    edges: Counts | None = None  # edges of the bins of `losses`
    losses: tuple[Losses, ...] = ()
    audit: Audited | None = None
    missing: tuple[str, ...] = ()  # what is not shown, and why


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
            reason = f"losses, confusion and suspicious labels: the run in {g.first.path} has not ended"
            details.append(Detail(g.first.path, missing=(reason,)))
        else:
            details.append(_detail(run.path, audit or len(experiments) == 1, audit, device))
    return details


def _detail(path: Path, compute: bool, audit: bool, device: str) -> Detail:
    missing: list[str] = []
    arrays: Arrays | None = None
    try:
        arrays = read_arrays(path)
    except UserError as error:
        missing.append(_left_out(path, "losses and confusion", error, audit))
    if not missing and (arrays is None or _NEW not in arrays):
        if not (path / WEIGHTS).exists():
            missing.append(f"losses and confusion: there is no {WEIGHTS} in {path}")
        elif not compute:
            missing.append(f"losses and confusion: compute them with: warpi report {path} --out DIR")
        else:
            try:
                arrays = _measure(path, device)
            except UserError as error:
                missing.append(_left_out(path, "losses and confusion", error, audit))
    audited = None
    if audit or (path / AUDIT_FILE).exists():
        try:
            audited = _read_audit(path, device)
        except UserError as error:
            missing.append(_left_out(path, "suspicious labels", error, audit))
    elif (path / WEIGHTS).exists():
        missing.append("suspicious labels: the run has no audit; add --audit to the command that made this page")
    return _add_arrays(Detail(path, audit=audited, missing=tuple(missing)), arrays or {})


def _left_out(path: Path, what: str, error: UserError, required: bool) -> str:
    """Print why something is not on the page and return that; raise the error if it is required."""
    if required:
        raise error
    print(f"warpi: {path}: {what} are not on the page: {error}", file=sys.stderr)
    return f"{what}: {error}"


def _measure(path: Path, device: str) -> Arrays:
    from warpi.report.figure_measures import compute_arrays
    from warpi.runs.reopen import reopen

    arrays = compute_arrays(reopen(path, device))
    try:
        write_arrays(path, arrays)
    except UserError as error:  # the page can still be written
        print(f"warpi: losses and confusion are not stored in the run: {error}", file=sys.stderr)
    return arrays


def _add_arrays(detail: Detail, arrays: Arrays) -> Detail:
    if not arrays:
        return detail
    n = arrays["n_kind"]
    losses: list[Losses] = []
    for which in ("raw", "rectified"):
        if (counts := arrays.get(f"loss_{which}")) is not None:
            kinds = {name: i for i, name in enumerate(KINDS) if n[i]}
            means = {name: float(arrays[f"loss_{which}_mean"][i]) for name, i in kinds.items()}
            losses.append(Losses(which, {name: counts[i] for name, i in kinds.items()}, means))
    return replace(
        detail,
        classes=tuple(arrays["classes"].tolist()),
        test=arrays.get("confusion_test"),
        train=arrays.get(_NEW),
        edges=EDGES,
        losses=tuple(losses),
    )


def _read_audit(path: Path, device: str) -> Audited:
    """The audit of a run, which is computed if there is none."""
    from warpi.review.open import open_run

    opened = open_run(path, device=device)
    items = opened.items
    audit = opened.audit
    rate = audit.facts["noise_rate"]
    return Audited(
        n=len(audit),
        n_issues=int(audit.is_label_issue.sum()),
        noise_rate=(rate["rate"], rate["low"], rate["high"]),
        by_class=tuple(_by_class(audit)),
        probabilities=audit.facts["probabilities"],
        uncertainty=audit.facts["uncertainty"],
        trusted=audit.facts["trusted_accuracy"],
        suspects=tuple(_suspect(items, i) for i in range(min(SUSPECTS, len(items)))),
    )


def _by_class(audit: Audit) -> Iterator[ClassRate]:
    for k, rate in enumerate(audit.error_rates):
        issues = audit.is_label_issue & (audit.given == k)
        votes = np.bincount(audit.suggested[issues], minlength=len(audit.classes))
        instead = audit.classes[int(votes.argmax())] if issues.any() else ""
        yield ClassRate(rate["class"], rate["n"], rate["rate"], rate["low"], rate["high"], int(issues.sum()), instead)


def _suspect(items: "Items", i: int) -> Suspect:
    row = int(items.row[i])
    names = items.classes
    picture = items.picture(row)
    files = items.dataset.files
    words = [*([] if files is None else [("file", files.paths[row])]), *items.describe(row)]
    return Suspect(
        row,
        names[int(items.given[row])],
        names[int(items.suggested[i])],
        float(items.wrong_probability[i]),
        float(items.uncertainty[i]),
        picture and (picture[0], _thumbnail(*picture)),
        tuple(words),
        items.is_small,
    )


def _thumbnail(kind: str, content: bytes) -> bytes:
    """Shrink photos to the size in which they are shown; other pictures are already small."""
    if kind != "image/jpeg":
        return content
    from PIL import Image  # installed, since it has decoded this photo

    with Image.open(io.BytesIO(content)) as image:
        image.thumbnail((_SIDE, _SIDE))
        small = io.BytesIO()
        image.save(small, "JPEG", quality=82)
    return small.getvalue()
