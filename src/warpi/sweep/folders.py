"""The run folders of a sweep: what is done, what is begun, and which process does what is left."""

import json
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from warpi import checkpoint
from warpi.atomic import Busy, one_writer, write_atomically
from warpi.errors import UserError
from warpi.run import read_spec
from warpi.sweep.lanes import Claim, Event
from warpi.sweep.plan import Job, Plan, Settings


@dataclass(frozen=True)
class State:
    """How far a run has come."""

    done: bool
    begun: bool  # there is a checkpoint to go on from
    epoch: int  # epochs on disk
    epochs: int | None  # of how many; None: not known yet


def look(path: Path, settings: Settings) -> State:
    """The state of a run folder; a UserError where the file asked for something else when the run was begun."""
    spec = read_spec(path)
    known, done = _read(path / "sweep.json"), (path / "done").exists()
    begun = done or checkpoint.exists(path / "checkpoint.safetensors")
    if begun and known is not None:
        _same(path, known, json.loads(json.dumps(settings)))
    done = done and known is not None  # a run of `warpi fit` in this folder: going on with it will compare all of it
    epochs = spec["spec"]["recipe"].get("epochs") if spec else None
    try:
        epoch = (path / "results.jsonl").read_bytes().count(b"\n") if begun else 0
    except OSError:
        epoch = 0
    return State(done, begun, epoch, epochs)


def _same(path: Path, was: Settings, now: Settings) -> None:
    for key in sorted(was.keys() | now.keys()):
        if key != "root" and was.get(key) != now.get(key):  # where the data lies is no part of what it is
            before, after = (f"{key} = {each[key]!r}" if key in each else f"no {key}" for each in (was, now))
            raise UserError(f"{path} was begun with {before}, not with {after}; choose another --out to change it")


def _read(file: Path) -> dict[str, Any] | None:
    try:
        content = json.loads(file.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as e:
        raise UserError(f"cannot read {file}: {e}; delete it, or choose another --out") from e
    if not isinstance(content, dict):
        raise UserError(f"{file} is garbled; delete it, or choose another --out")
    return content


def _write(file: Path, content: Mapping[str, Any]) -> None:
    write_atomically(file, (json.dumps(content, indent=1) + "\n").encode())


@dataclass
class Queue:
    """Hands out the runs of a plan that are left. Processes that share a folder never get the same one.

    A run belongs to whoever holds the lock of its folder in `.sweep`. The kernel frees it when that process dies, and
    the run goes on elsewhere. A run that failed is not tried again by a process of the same `session`.
    """

    plan: Plan
    session: str
    tell: Callable[[Event], None]
    over: set[str] = field(default_factory=set)  # done or failed
    mine: set[str] = field(default_factory=set)

    def take(self) -> Claim | None:
        for job in self.plan.jobs:
            if job.name in self.over | self.mine:
                continue
            with ExitStack() as held:
                path, notes = self.plan.out / job.name, self._notes(job)
                try:
                    held.enter_context(one_writer(notes))
                except Busy:
                    continue
                failure = _read(notes / "failed.json")
                if failure is not None and failure.get("session") == self.session:
                    self.over.add(job.name)
                    continue
                try:
                    state = look(path, job.settings)
                    if state.done:
                        self.over.add(job.name)
                        continue
                    if not state.begun:
                        path.mkdir(parents=True, exist_ok=True)
                        _write(path / "sweep.json", job.settings)
                except (UserError, OSError) as e:
                    self.failed(job, str(e))
                    self.tell(Event("failed", job.name, reason=str(e)))
                    continue
                self.mine.add(job.name)
                held.callback(self.mine.discard, job.name)
                return Claim(job, path, state.epoch, state.begun, held.pop_all())
        return None

    def more(self) -> bool:
        return any(job.name not in self.over for job in self.plan.jobs)

    def done(self, claim: Claim) -> None:
        self.over.add(claim.job.name)
        if not (claim.path / "sweep.json").exists():  # begun by `warpi fit`, which has compared the settings
            _write(claim.path / "sweep.json", claim.job.settings)

    def failed(self, job: Job, reason: str, details: str = "") -> None:
        self.over.add(job.name)
        note = {"session": self.session, "reason": reason, "details": details}
        _write(self._notes(job) / "failed.json", note)

    def _notes(self, job: Job) -> Path:
        return self.plan.out / ".sweep" / job.name
