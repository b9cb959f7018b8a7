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
from warpi.report.figure_data import EDGES, KINDS, Arrays, read, write

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
    counts: Mapping[str, Counts]  # [bins] each
    means: Mapping[str, float]


class Suspect(NamedTuple):
    """An example whose label is doubted."""

    row: int  # of the data
    given: str
    suggested: str
    wrong: float  # probability
    uncertainty: float
    picture: tuple[str, bytes] | None  # type and content
    words: tuple[tuple[str, str], ...]  # names and values: where from, and what it is where there is no picture
    small: bool  # a picture of few pixels, which should be seen


class ClassRate(NamedTuple):
    """How many labels of a class are wrong."""

    name: str
    n: int
    rate: float
    low: float
    high: float
    issues: int
    instead: str  # the class most often suggested


@dataclass(frozen=True)
class Audited:
    """What an audit found."""

    n: int
    n_issues: int
    noise_rate: tuple[float, float, float]  # and its interval
    by_class: tuple[ClassRate, ...]
    probabilities: str  # where they come from
    uncertainty: str  # what it is
    trusted: float | None  # share of the trusted examples that the classifier is right about
    suspects: tuple[Suspect, ...]

    @property
    def pictures(self) -> bool:
        return any(s.picture is not None for s in self.suspects)


@dataclass(frozen=True)
class Detail:
    """A run as its weights, its data and its audit show it. None, or empty: not known."""

    run: Path
    classes: tuple[str, ...] = ()
    test: Counts | None = None  # [K, K] true class, predicted class
    train: Counts | None = None  # [K, K] given label, predicted class
    edges: Counts | None = None  # of the bins of `losses`
    losses: tuple[Losses, ...] = ()
    audit: Audited | None = None
    missing: tuple[str, ...] = ()  # what could not be had, and why


def read_details(runs: Sequence[RunRecord], audit: bool = False, device: str = "auto") -> list[Detail]:
    """One for each experiment, of its first finished run.

    Of one experiment all is computed that its weights allow, and stored beside the run; of several, what is there
    already. With `audit` the same is done for each, and those that have no audit are audited. What cannot be had is
    said in `missing`; with `audit` it is an error.
    """
    experiments, found = group(runs), list[Detail]()
    for g in experiments:
        run = next((run for run in g.runs if run.done), None)
        if run is None:
            why = f"losses, confusion and suspicious labels: the run in {g.first.path} has not ended"
            found.append(Detail(g.first.path, missing=(why,)))
        else:
            found.append(_detail(run.path, audit or len(experiments) == 1, audit, device))
    return found


def _detail(path: Path, compute: bool, audit: bool, device: str) -> Detail:
    missing, arrays, found = list[str](), None, None
    try:
        arrays = read(path)
    except UserError as error:
        missing.append(_left_out(path, "losses and confusion", error, audit))
    if not missing and (arrays is None or _NEW not in arrays):
        if not (path / WEIGHTS).exists():
            missing.append(f"losses and confusion: there is no {WEIGHTS} in {path}")
        elif not compute:
            missing.append(f"losses and confusion: they are computed by: warpi report {path} --out DIR")
        else:
            try:
                arrays = _measured(path, device)
            except UserError as error:
                missing.append(_left_out(path, "losses and confusion", error, audit))
    if audit or (path / AUDIT_FILE).exists():
        try:
            found = _audited(path, device)
        except UserError as error:
            missing.append(_left_out(path, "suspicious labels", error, audit))
    elif (path / WEIGHTS).exists():
        missing.append("suspicious labels: the run was not audited; add --audit to the command that made this page")
    return _of_arrays(Detail(path, audit=found, missing=tuple(missing)), arrays or {})


def _left_out(path: Path, what: str, error: UserError, asked: bool) -> str:
    if asked:
        raise error
    print(f"warpi: {path}: {what} are not on the page: {error}", file=sys.stderr)
    return f"{what}: {error}"


def _measured(path: Path, device: str) -> Arrays:
    from warpi.report.measure import arrays_of
    from warpi.runs.reopen import reopen

    arrays = arrays_of(reopen(path, device))
    try:
        write(path, arrays)
    except UserError as error:  # the page can be had all the same
        print(f"warpi: losses and confusion are not stored in the run: {error}", file=sys.stderr)
    return arrays


def _of_arrays(detail: Detail, arrays: Arrays) -> Detail:
    if not arrays:
        return detail
    n, losses = arrays["n_kind"], list[Losses]()
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


def _audited(path: Path, device: str) -> Audited:
    """What the audit of a run found; it is made where there is none."""
    from warpi.review.open import open_run

    items, _, found = open_run(path, device=device)
    rate = found.facts["noise_rate"]
    return Audited(
        n=len(found),
        n_issues=int(found.is_label_issue.sum()),
        noise_rate=(rate["rate"], rate["low"], rate["high"]),
        by_class=tuple(_by_class(found)),
        probabilities=found.facts["probabilities"],
        uncertainty=found.facts["uncertainty"],
        trusted=found.facts["trusted_accuracy"],
        suspects=tuple(_suspect(items, i) for i in range(min(SUSPECTS, len(items)))),
    )


def _by_class(found: Audit) -> Iterator[ClassRate]:
    for k, rate in enumerate(found.error_rates):
        mine = found.is_label_issue & (found.given == k)
        votes = np.bincount(found.suggested[mine], minlength=len(found.classes))
        instead = found.classes[int(votes.argmax())] if mine.any() else ""
        yield ClassRate(rate["class"], rate["n"], rate["rate"], rate["low"], rate["high"], int(mine.sum()), instead)


def _suspect(items: "Items", i: int) -> Suspect:
    row, names = int(items.row[i]), items.classes
    picture, files = items.picture(row), items.dataset.files
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
    """Photos as small as they are shown; other pictures are small already, or come without the package for it."""
    if kind != "image/jpeg":
        return content
    from PIL import Image  # it has just decoded this very photo

    with Image.open(io.BytesIO(content)) as image:
        image.thumbnail((_SIDE, _SIDE))
        small = io.BytesIO()
        image.save(small, "JPEG", quality=82)
    return small.getvalue()
