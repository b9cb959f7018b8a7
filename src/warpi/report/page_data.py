"""What the page of a run shows beyond its results: from its weights, its data and its audit.

Torch is imported only when something has to be computed.
"""

import base64
import io
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from warpi.audit.result import AUDIT_FILE, Audit
from warpi.errors import UserError
from warpi.report.experiments import RunRecord, group
from warpi.report.figure_data import Arrays, read_arrays, write_arrays
from warpi.runs.schema import CHECKPOINT

if TYPE_CHECKING:
    from warpi.review.items import Items

SUSPECTS = 20
_SIDE = 240  # pixels of a thumbnail
_NEW = "confusion_train"  # files of older versions lack it


class Suspect(NamedTuple):
    """An example whose label is suspicious."""

    row: int  # in the data
    given: str
    suggested: str
    wrong: float  # probability
    uncertainty: float
    image: str  # its picture as a data URL; empty if there is none
    words: tuple[tuple[str, str], ...]  # names and values: the file, and the columns if there is no picture
    small: bool  # a picture of few pixels, which is enlarged without smoothing


@dataclass(frozen=True)
class Detail:
    """What is known about a run from its weights, its data and its audit. None or empty: unknown."""

    run: Path
    arrays: Arrays = field(default_factory=dict)  # of `figures.npz`
    audit: Audit | None = None
    suspects: tuple[Suspect, ...] = ()  # the most suspicious examples of the audit
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
    arrays: Arrays = {}
    try:
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
    if audit or (path / AUDIT_FILE).exists():
        try:
            audited, suspects = _read_audit(path, device)
        except UserError as error:
            missing.append(_left_out(path, "suspicious labels", error, audit))
    elif (path / CHECKPOINT).exists():
        missing.append("suspicious labels: the run has no audit; add --audit to the command that made this page")
    return Detail(path, arrays, audited, suspects, tuple(missing))


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


def _read_audit(path: Path, device: str) -> tuple[Audit, tuple[Suspect, ...]]:
    """The audit of a run, which is computed if there is none, and its most suspicious examples."""
    from warpi.review.open import open_run

    opened = open_run(path, device=device)
    n = min(SUSPECTS, len(opened.items))
    return opened.audit, tuple(_suspect(opened.items, i) for i in range(n))


def _suspect(items: "Items", i: int) -> Suspect:
    from warpi.review.show_input import shorten_number

    row = int(items.row[i])
    names = items.classes
    picture = items.picture(row)
    files = items.dataset.files
    words = [] if files is None else [("file", files.paths[row])]
    words += [(cell.name, shorten_number(cell.value)) for cell in items.describe(row)]
    return Suspect(
        row,
        names[int(items.given[row])],
        names[int(items.suggested[i])],
        float(items.wrong_probability[i]),
        float(items.uncertainty[i]),
        _to_url(*picture) if picture else "",
        tuple(words),
        items.is_small,
    )


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
