"""Show the progress of a sweep: bars and the remaining time on a terminal, lines elsewhere."""

import json
import time
from collections.abc import Mapping
from statistics import fmean
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress as Bars, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from warpi.runs.defaults import BY_DATASET
from warpi.sweep.plan import Job, Plan
from warpi.sweep.queue import RunEvent
from warpi.sweep.run_states import State
from warpi.utils.terminal import cell, visible
from warpi.utils.time_left import format_duration

_QUIET = 10.0  # seconds between two epoch lines if the output is not a terminal


class Board:
    """Shows events and estimates the remaining time. `bars` are visible inside their context."""

    def __init__(self, plan: Plan, states: Mapping[str, State], console: Console | None = None) -> None:
        self.console = console or Console(highlight=False)
        self.jobs = {job.name: job for job in plan.jobs}
        self.state = {name: "done" if states[name].done else "waiting" for name in self.jobs}
        self.epoch = {name: states[name].epoch for name in self.jobs}
        self.epochs = {name: states[name].epochs or _planned_epochs(job) for name, job in self.jobs.items()}
        self.seconds: dict[str, list[float]] = {}  # per epoch, by kind of run
        self.failed: dict[str, str] = {}
        self.printed_at = time.monotonic()
        columns = (TextColumn("{task.description}"), BarColumn(24), MofNCompleteColumn(), TextColumn("epochs"))
        more = (TimeElapsedColumn(), TextColumn("{task.fields[note]}"))
        live = self.console.is_terminal
        self.bars = Bars(*columns, *more, console=self.console, disable=not live, transient=True)
        self.all = self.bars.add_task("", total=None, note="")
        self.rows: dict[str, TaskID] = {}

    def show(self, event: RunEvent) -> None:
        """Record an event and update the display."""
        name = event.run
        if event.kind == "failed" and name in self.failed:  # two processes have reported the same failure
            return
        if name:
            self.epoch[name] = max(event.epoch, self.epoch[name])
            states = {"begun": "active", "epoch": "active", "requeued": "waiting", "stopped": "waiting"}
            self.state[name] = states.get(event.kind, event.kind)
            if event.kind == "failed":
                self.failed[name] = event.reason
            if event.kind == "epoch" and event.record is not None:
                self.seconds.setdefault(_kind(self.jobs[name]), []).append(event.record["seconds"])
            self._update_bar(event)
        self._print_event(event)
        total = sum(self.epochs[name] or 0 for name in self.jobs)
        counts = f"{self.count('done')} done, {self.count('active')} active, {self.count('waiting')} waiting"
        counts += f", {self.count('failed')} failed" if self.failed else ""
        done = sum(self.epoch.values())
        self.bars.update(self.all, description=counts, total=total or None, completed=done, note=self._time_left())

    def count(self, state: str) -> int:
        return sum(other == state for other in self.state.values())

    def seconds_left(self) -> float | None:
        """Estimated seconds to the end, from the epochs so far; None before the first of them."""
        if not self.seconds:
            return None
        overall = fmean(seconds for values in self.seconds.values() for seconds in values)
        longest = max((epochs for epochs in self.epochs.values() if epochs), default=1)
        total = 0.0
        for name, job in self.jobs.items():
            if self.state[name] in ("active", "waiting"):
                known = self.seconds.get(_kind(job))
                epochs = (self.epochs[name] or longest) - self.epoch[name]
                total += max(epochs, 0) * (fmean(known[-20:]) if known else overall)
        return total / max(1, self.count("active"))

    def print(self, text: str) -> None:
        self.console.print(cell(text), soft_wrap=True)

    def _time_left(self) -> str:
        seconds = self.seconds_left()
        return f"about {format_duration(seconds)} left" if seconds is not None and seconds >= 1 else ""

    def _update_bar(self, event: RunEvent) -> None:
        """Add, update or remove the bar of a run. Only active runs have one."""
        if self.state[event.run] != "active":
            if event.run in self.rows:
                self.bars.remove_task(self.rows.pop(event.run))
            return
        if event.run not in self.rows:
            self.rows[event.run] = self.bars.add_task(
                escape(f"  {visible(event.run)}"), total=self.epochs[event.run], note=""
            )
        self.bars.update(self.rows[event.run], completed=self.epoch[event.run], note=format_scores(event.record))

    def _print_event(self, event: RunEvent) -> None:
        head = f"[{self.count('done')}/{len(self.jobs)}]"
        end = f"  ({self._time_left()})" if self._time_left() else ""
        match event.kind:
            case "done":
                self.print(f"{head} {event.run}  {format_scores(event.record)}{end}")
            case "failed":
                repeated = [*self.failed.values()].count(event.reason) > 1
                reason = "for the same reason" if repeated else event.reason
                self.print(f"{head} {event.run}  failed: {reason}")
            case "requeued":
                self.print(f"{head} {event.run}  ran out of memory alongside the other runs; it will be retried")
            case "epoch" if not self.console.is_terminal and time.monotonic() - self.printed_at >= _QUIET:
                epochs = f"{event.epoch}/{self.epochs[event.run] or '?'}"
                self.print(f"{head} {event.run}  epoch {epochs}  {format_scores(event.record)}{end}")
            case _:
                return
        self.printed_at = time.monotonic()


def states_table(plan: Plan, states: Mapping[str, State], failed: Mapping[str, str]) -> Table:
    """One line per run with its state, or why it cannot be run. `failed` contains why the last attempts failed."""
    table = Table("run", "", box=None)
    for job in plan.jobs:
        state = states[job.name]
        if state.problem:
            text = state.problem
        elif state.done:
            text = "done"
        elif state.begun:
            text = f"at epoch {state.epoch} of {state.epochs or '?'}"
        else:
            text = "missing"
        if job.name in failed and not (state.done or state.problem):
            text += f"; failed: {failed[job.name]}"
        table.add_row(Text(visible(job.name), overflow="fold"), cell(text))
    return table


def format_scores(record: Mapping[str, Any] | None) -> str:
    """The accuracy of an epoch as text."""
    for name in ("test", "val"):
        if record is not None and f"{name}_acc" in record:
            return f"{name} {record[f'{name}_acc']:.2f} %"
    return ""


def _planned_epochs(job: Job) -> int | None:
    defaults = BY_DATASET.get(job.settings.get("data", "digits"), {})
    epochs = job.settings.get("epochs", defaults.get("epochs"))
    return epochs if isinstance(epochs, int) else None


def _kind(job: Job) -> str:
    """A key for the settings that determine how long a run takes."""
    return json.dumps({key: value for key, value in job.settings.items() if key not in ("seed", "noise")})
