"""Hand out the unfinished runs of a sweep to the processes that share its folder."""

import json
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from warpi.errors import UserError
from warpi.runs.schema import SWEEP, failure_file
from warpi.runs.spec import DataCache
from warpi.sweep.plan import Job, Plan
from warpi.sweep.run_states import check_fit_settings, read_settings, run_state
from warpi.utils.files import write_json, write_with_folder
from warpi.utils.leases import Busy, Lease, LeaseLost, Watch, one_writer


@dataclass(frozen=True)
class RunEvent:
    """Something that happened to a run. `alive` is not about a run: it only refreshes the display."""

    kind: Literal["begun", "epoch", "done", "failed", "stopped", "requeued", "alive"]
    run: str = ""
    epoch: int = 0  # number of finished epochs
    record: dict[str, Any] | None = None  # results of the last finished epoch
    reason: str = ""  # why the run failed


@dataclass(frozen=True)
class ClaimedRun:
    """A run that this process may train while it holds the lease of its folder."""

    job: Job
    path: Path
    epoch: int  # number of finished epochs
    resume: bool
    lock: ExitStack  # closing it releases the run
    lease: Lease | None = None


@dataclass
class Queue:
    """Hands out the unfinished runs of a plan. Processes that share a folder never get the same run.

    A run belongs to the process that holds the lease of its folder. If that process dies or stays silent for too long,
    another one resumes the run. A failed run is not tried again within the same `session`.
    """

    plan: Plan
    session: str
    report: Callable[[RunEvent], None]
    cache: DataCache = field(default_factory=DataCache)  # the data that the runs share
    ended: set[str] = field(default_factory=set)  # done or failed
    claimed: set[str] = field(default_factory=set)  # by this process
    watches: dict[str, Watch] = field(default_factory=dict)  # of the leases of other processes

    def take(self) -> ClaimedRun | None:
        """Claim a run to begin or resume. Returns None if none is available now."""
        for job in self.plan.jobs:
            if job.name in self.ended | self.claimed or self._watch(job).is_held():
                continue
            failure = read_settings(failure_file(self.plan.out, job.name))
            if failure is not None and failure.get("session") == self.session:
                self.ended.add(job.name)
                continue
            try:
                if run_state(self.plan, job, self.cache).done:
                    self.ended.add(job.name)
                elif (claim := self._claim(job)) is not None:
                    return claim
            except (Busy, LeaseLost):
                continue
            except (UserError, OSError) as error:
                self.mark_failed(job, str(error))
                self.report(RunEvent("failed", job.name, reason=str(error)))
        return None

    def _claim(self, job: Job) -> ClaimedRun | None:
        """Claim a run. Returns None if it is done; raises Busy if another process was faster."""
        path = self.plan.out / job.name
        with ExitStack() as lock:
            lease = lock.enter_context(one_writer(path, self._watch(job)))
            state = run_state(self.plan, job, self.cache)  # again, because another process may have finished it
            if state.done:
                self.ended.add(job.name)
                return None
            if not state.begun:
                write_json(path / SWEEP, job.settings)
            elif not (path / SWEEP).exists():
                check_fit_settings(path, job.settings, self.cache)
            self.claimed.add(job.name)
            lock.callback(self.claimed.discard, job.name)
            return ClaimedRun(job, path, state.epoch, state.begun, lock.pop_all(), lease)

    def has_more(self) -> bool:
        """Whether a run may become available later, because another process has not finished it."""
        return any(job.name not in self.ended for job in self.plan.jobs)

    def others_are_at_work(self) -> bool:
        """Whether another process holds a run at the moment."""
        others = (job for job in self.plan.jobs if job.name not in self.ended | self.claimed)
        return any(self._watch(job).is_held() for job in others)

    def mark_done(self, claim: ClaimedRun) -> None:
        self.ended.add(claim.job.name)
        if not (claim.path / SWEEP).exists():  # begun by `warpi fit`, with the same settings
            write_json(claim.path / SWEEP, claim.job.settings)

    def mark_failed(self, job: Job, reason: str, details: str = "") -> None:
        self.ended.add(job.name)
        note = {"session": self.session, "reason": reason, "details": details}
        write_with_folder(failure_file(self.plan.out, job.name), json.dumps(note, indent=1) + "\n")

    def _watch(self, job: Job) -> Watch:
        return self.watches.setdefault(job.name, Watch(self.plan.out / job.name))
