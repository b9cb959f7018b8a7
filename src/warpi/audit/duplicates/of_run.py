"""Copies within and between the training, trusted and test rows of a run."""

from dataclasses import replace

import numpy as np

from warpi.audit.result import AUDIT_FILE, read_audit
from warpi.data.duplicates.result import Duplicates
from warpi.data.duplicates.search import search
from warpi.errors import UserError
from warpi.runs.run import Run

_MOST_ROWS = 200_000


def find_copies(run: Run) -> Duplicates | None:
    """The copies that are stored with the audit of a run, or those found by a search; None for too many rows.

    Near copies are searched for among at most 10,000 rows. Validation rows count as training rows.
    """
    task = run.method.task
    named = (("train", task.train), ("train", task.val), ("trusted", task.meta), ("test", run.truth.test))
    parts = [(name, split) for name, split in named if split is not None]
    if sum(len(split) for _, split in parts) > _MOST_ROWS:
        return None
    if (run.path / AUDIT_FILE).exists():
        try:
            stored = read_audit(run.path).copies
        except UserError:  # a damaged file, which the caller replaces
            stored = None
        if stored is not None:
            return stored
    copies = search(parts, task.classes, bounded=True)
    held_out = np.array([part == "test" and run.data.dataset.test is None for part in copies.part])
    return replace(copies, of_data=copies.of_data | held_out)
