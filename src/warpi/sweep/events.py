"""What the processes of a sweep report to the one that shows the progress."""

from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True)
class RunEvent:
    """Something that happened to a run. `alive` belongs to no run: it only refreshes the display."""

    kind: Literal["begun", "epoch", "done", "failed", "stopped", "requeued", "alive"]
    run: str = ""
    epoch: int = 0  # number of finished epochs
    record: dict[str, Any] | None = None  # results of the last finished epoch
    reason: str = ""  # why the run failed
