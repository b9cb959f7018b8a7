"""What a sweep shows: bars and the time left on a terminal, lines elsewhere, and at the end what became of each run."""

import json
import time
from collections.abc import Mapping
from statistics import fmean
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bars
from rich.table import Table
from rich.text import Text

from warpi.runs.defaults import BY_DATASET
from warpi.sweep.interleave import Event
from warpi.sweep.plan import Job, Plan
from warpi.sweep.queue import State
from warpi.training.engine import Record

_QUIET = 10.0  # seconds between two lines about epochs where there is no terminal


class Board:
    """A context that hears of events, shows them, and knows what is left."""

    def __init__(self, plan: Plan, states: Mapping[str, State], console: Console | None = None) -> None:
        self.console = console or Console(highlight=False)
        self.jobs = {job.name: job for job in plan.jobs}
        self.state = {name: "done" if states[name].done else "waiting" for name in self.jobs}
        self.epoch = {name: states[name].epoch for name in self.jobs}
        self.epochs = {name: states[name].epochs or _planned(job) for name, job in self.jobs.items()}
        self.seconds: dict[str, list[float]] = {}  # of an epoch, by kind of run
        self.failed: dict[str, str] = {}
        self.said = time.monotonic()
        columns = (TextColumn("{task.description}"), BarColumn(24), MofNCompleteColumn(), TextColumn("epochs"))
        more = (TimeElapsedColumn(), TextColumn("{task.fields[note]}"))
        live = self.console.is_terminal
        self.bars = Bars(*columns, *more, console=self.console, disable=not live, transient=True)
        self.all = self.bars.add_task("", total=None, note="")
        self.rows: dict[str, TaskID] = {}

    def __enter__(self) -> "Board":
        self.bars.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.bars.stop()

    def tell(self, event: Event) -> None:
        """Take note of an event."""
        name = event.run
        if name:
            self.epoch[name] = max(event.epoch, self.epoch[name])
            states = {"begun": "active", "epoch": "active", "again": "waiting", "stopped": "waiting"}
            self.state[name] = states.get(event.what, event.what)
            if event.what == "failed":
                self.failed[name] = event.reason
            if event.what == "epoch" and event.record is not None:
                self.seconds.setdefault(_kind(self.jobs[name]), []).append(event.record["seconds"])
            self._row(event)
        self._say(event)
        total = sum(self.epochs[name] or 0 for name in self.jobs)
        counts = f"{self.count('done')} done, {self.count('active')} active, {self.count('waiting')} waiting"
        counts += f", {self.count('failed')} failed" if self.failed else ""
        done = sum(self.epoch.values())
        self.bars.update(self.all, description=counts, total=total or None, completed=done, note=self._left())

    def count(self, state: str) -> int:
        return sum(each == state for each in self.state.values())

    def left(self) -> float | None:
        """Seconds to the end, from the seconds of the epochs so far; None before the first of them."""
        if not self.seconds:
            return None
        anything = fmean(seconds for each in self.seconds.values() for seconds in each)
        longest = max((epochs for epochs in self.epochs.values() if epochs), default=1)
        total = 0.0
        for name, job in self.jobs.items():
            if self.state[name] in ("active", "waiting"):
                known = self.seconds.get(_kind(job))
                epochs = (self.epochs[name] or longest) - self.epoch[name]
                total += max(epochs, 0) * (fmean(known[-20:]) if known else anything)
        return total / max(1, self.count("active"))

    def say(self, text: str) -> None:
        self.console.print(text, markup=False, emoji=False, soft_wrap=True)

    def _left(self) -> str:
        left = self.left()
        return f"about {duration(left)} left" if left is not None and left >= 1 else ""

    def _row(self, event: Event) -> None:
        """A bar for each run that is under way."""
        if self.state[event.run] != "active":
            if event.run in self.rows:
                self.bars.remove_task(self.rows.pop(event.run))
            return
        if event.run not in self.rows:
            self.rows[event.run] = self.bars.add_task(f"  {event.run}", total=self.epochs[event.run], note="")
        self.bars.update(self.rows[event.run], completed=self.epoch[event.run], note=scores(event.record))

    def _say(self, event: Event) -> None:
        head = f"[{self.count('done')}/{len(self.jobs)}]"
        end = f"  ({self._left()})" if self._left() else ""
        match event.what:
            case "done":
                self.say(f"{head} {event.run}  {scores(event.record)}{end}")
            case "failed":
                told = [*self.failed.values()].count(event.reason) > 1  # by the first of them
                self.say(f"{head} {event.run}  failed: {'the same again' if told else event.reason}")
            case "again":
                self.say(
                    f"{head} {event.run}  found no memory beside the others; it goes on when one of them has ended"
                )
            case "epoch" if not self.console.is_terminal and time.monotonic() - self.said >= _QUIET:
                epochs = f"{event.epoch}/{self.epochs[event.run] or '?'}"
                self.say(f"{head} {event.run}  epoch {epochs}  {scores(event.record)}{end}")
            case _:
                return
        self.said = time.monotonic()


def grid(plan: Plan, states: Mapping[str, State | str]) -> Table:
    """What a sweep would do: a line a run. A text stands for a run that cannot be done, and says why."""
    table = Table("run", "", box=None)
    for job in plan.jobs:
        state = states[job.name]
        if isinstance(state, str):
            said = state
        elif state.done:
            said = "done"
        elif state.begun:
            said = f"at epoch {state.epoch} of {state.epochs or '?'}"
        else:
            said = "missing"
        table.add_row(Text(job.name, overflow="fold"), Text(said))
    return table


def scores(record: Record | None) -> str:
    """The accuracy of an epoch, in words."""
    for name in ("test", "val"):
        if record is not None and f"{name}_acc" in record:
            return f"{name} {record[f'{name}_acc']:.2f} %"
    return ""


def duration(seconds: float) -> str:
    """`40 s`, `12 min`, `3 h 05 min`."""
    minutes = round(seconds / 60)
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{minutes} min" if minutes < 100 else f"{minutes // 60} h {minutes % 60:02} min"


def _planned(job: Job) -> int | None:
    defaults = BY_DATASET.get(job.settings.get("data", "digits"), {})
    epochs = job.settings.get("epochs", defaults.get("epochs"))
    return epochs if isinstance(epochs, int) else None


def _kind(job: Job) -> str:
    """Runs of one kind take equally long."""
    return json.dumps({key: value for key, value in job.settings.items() if key not in ("seed", "noise")})
