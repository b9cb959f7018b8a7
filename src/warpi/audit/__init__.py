"""Which labels of a run's data are wrong, and which examples a person should check first.

`audit(run)` makes an `Audit` (and stores it in the run folder), `read_audit(folder)` reads a stored one without torch.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from warpi.audit.result import Audit as Audit
from warpi.audit.result import read_audit as read_audit

if TYPE_CHECKING:
    from warpi.runs.run import Run
    from warpi.training.method import Method


def audit(
    run: "Path | str | Run | Method",
    *,
    folds: int = 0,
    rows: str | None = None,
    threshold: float = 0.5,
    device: str = "auto",
    save: bool = True,
    **own: Any,
) -> Audit:
    """Audit the labels a run was trained on.

    `run` is a run folder, what `fit` returned, or a trained method. With `folds` >= 2 the same recipe is trained that
    many times more, each time without a part of the rows, and every probability comes from a network that has not seen
    its label. `rows` are "train", or "all": also the rows of the data that were held out for validation, and those held
    out for testing whose true labels nobody knows. None: "all" where nobody knows the truth about the test rows (your
    own data), else "train". A row is an issue above the wrong_probability `threshold`. The
    result is stored in the run folder unless `save` is False. `own` are a method or a net of your own that the run was
    made with, as for `fit(resume=True)`.
    """
    from warpi.audit.judge import judge

    return judge(run, folds=folds, rows=rows, threshold=threshold, device=device, save=save, own=own)
