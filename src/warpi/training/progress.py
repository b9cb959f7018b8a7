"""Progress of training: a bar with the remaining time on a terminal, one line per epoch, and the result in words."""

import math
import time
from collections.abc import Callable, Mapping
from types import TracebackType

import rich.progress
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from warpi.utils.terminal import cell

MOST_LINES = 12  # epochs that are printed
SHOWN = {"loss": "loss", "meta_loss": "meta", "trusted_acc": "trusted %", "val_acc": "val %", "test_acc": "test %"}
WATCH = 10.0  # seconds of training that a forecast is based on
CHANGE = 1.5  # a forecast is corrected if the time left differs by this factor


class Progress:
    """Context manager that counts steps and prints epochs."""

    def __init__(self, epochs: int, steps: int, done: int, quiet: bool, shown: Mapping[str, str] | None = None) -> None:
        self.epochs = epochs
        self.quiet = quiet
        self.shown = SHOWN if shown is None else shown  # fields of a record and their labels
        self.console = Console(highlight=False)
        columns = ("{task.description}", BarColumn(), MofNCompleteColumn(), TextColumn("steps"))
        times = (TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn())
        hidden = quiet or not self.console.is_terminal
        self.bar = rich.progress.Progress(*columns, *times, console=self.console, disable=hidden)
        self.job = self.bar.add_task("training", total=epochs * steps, completed=done)

    def __enter__(self) -> "Progress":
        self.bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.bar.stop()

    def print(self, text: str) -> None:
        if not self.quiet:
            self.console.print(cell(text), soft_wrap=True)

    def step(self) -> None:
        self.bar.advance(self.job)

    def describe(self, what: str, share: float) -> None:
        """Show what is being done, and that `share` of the work is done."""
        self.bar.update(self.job, description=what, completed=share * (self.bar.tasks[0].total or 1))

    def line(self, record: dict[str, float]) -> None:
        """Print the record of an epoch. If there are many epochs, about a dozen are printed, including the last."""
        every = math.ceil(self.epochs / MOST_LINES)
        if record["epoch"] % every and record["epoch"] != self.epochs:
            return
        shown = "  ".join(f"{label} {record[name]:.4g}" for name, label in self.shown.items() if name in record)
        epoch = f"epoch {record['epoch']:>{len(str(self.epochs))}}/{self.epochs}"
        self.print(f"{epoch}  {shown}  lr {record['lr']:.2g}  {record['seconds']:.1f} s")


class Forecast:
    """Predicts the end of a training from the time of its steps.

    The first forecast comes after WATCH seconds. Some methods have later phases with slower steps, and there are
    evaluations after epochs, so epochs are compared with the last forecast, several short ones at a time.
    """

    def __init__(self, steps_left: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.steps_left = steps_left
        self.clock = clock
        self.expected_end: float | None = None
        self.began: float | None = None  # of the steps that are being measured
        self.counted = 0

    def after_step(self) -> float | None:
        """Return the minutes left when they are first known."""
        self.steps_left -= 1
        now = self.clock()
        if self.began is None:  # the first step is slower
            self.began = now
            return None
        self.counted += 1
        return self._predict(now) if self.expected_end is None and now - self.began >= WATCH else None

    def after_epoch(self) -> float | None:
        """Return the minutes left if the last forecast has turned out wrong."""
        now = self.clock()
        if self.expected_end is None or self.began is None or now - self.began < WATCH:
            return None
        expected = max(self.expected_end - now, 0.0)
        left = self.steps_left * (now - self.began) / self.counted
        minutes = None if expected / CHANGE <= left <= expected * CHANGE else self._predict(now)
        self.began, self.counted = now, 0
        return minutes

    def _predict(self, now: float) -> float:
        assert self.began is not None
        seconds = self.steps_left * (now - self.began) / self.counted
        self.expected_end = now + seconds
        return seconds / 60


def describe_trusted_accuracy(record: Mapping[str, float], n: int) -> str:
    """The accuracy on n trusted rows that the models have not seen, with its interval, in words; "" if unknown.

    The width of an interval falls with the square root of the number of rows.
    """
    names = ("trusted_acc", "trusted_low", "trusted_high")
    if any(record.get(name) is None for name in names):
        return ""
    accuracy, low, high = (record[name] for name in names)
    return (
        f"accuracy {accuracy:.1f} %, 90 % interval {low:.1f} to {high:.1f}, on {n} trusted rows, each predicted by "
        f"models that were not trained on it; with about {4 * n} trusted rows in total, this interval would "
        "be half as wide"
    )
