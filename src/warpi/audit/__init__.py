"""Find the wrong labels in a run's data, and the examples that a person should check first.

`audit(run)` returns an `Audit` and stores it in the run folder; `read_audit(folder)` reads a stored one without torch.
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

    Parameters:
        run: a run folder, the result of `fit`, or a trained method.
        folds: 2 or more trains the same recipe that many times, each time without a part of the rows, so that every
            probability comes from a network that was not trained on the label it judges.
        rows: "train" for the training rows, "all" to add the rows held out for validation and, if their true labels
            are unknown, for testing. By default "all" if the true labels of the test rows are unknown, else "train".
        threshold: a row is an issue if its wrong_probability is higher.
        device: "auto", "cpu" or "cuda".
        save: whether to store the result in the run folder.
        own: a custom method or net that the run was trained with, as in `fit(resume=True)`.
    """
    from warpi.audit.judge import judge

    return judge(run, folds=folds, rows=rows, threshold=threshold, device=device, save=save, own=own)
