"""How many runs at once on one device: a number, or one more for as long as that makes the whole faster."""

import time
from collections.abc import Callable, Collection, Mapping
from statistics import fmean

_WARM = 20  # first steps, in which kernels are chosen and graphs captured: they are not measured
_STEPS, _SECONDS = 20, 2.0  # a window has at least so many steps of every run, and is at least so long
_GAIN = 1.05  # a further run must have made the whole faster by this before another is added
_MARGIN = 1.25  # free memory, in runs of the largest size seen, before another is added


class Meter:
    """Steps a second of every run, over windows in which the same runs are under way."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self.restart(())

    def restart(self, runs: Collection[str]) -> None:
        """Other runs from now on."""
        self.counts = dict.fromkeys(runs, 0)
        self.began: float | None = None  # None: still warming up
        self.paused = 0.0

    def add(self, run: str, steps: int) -> None:
        """Steps that are complete, not only queued."""
        self.counts[run] += steps

    def pause(self, seconds: float) -> None:
        """Time in which a run was evaluated and stored: it is not counted, since it comes once an epoch."""
        self.paused += seconds

    def rates(self) -> dict[str, float] | None:
        """Steps a second of every run, once a window is over; then the next one begins."""
        if not self.counts or min(self.counts.values()) < (_WARM if self.began is None else _STEPS):
            return None
        now = self.clock()
        seconds = 0.0 if self.began is None else now - self.began - self.paused
        if self.began is not None and seconds < _SECONDS:
            return None
        found = {run: steps / seconds for run, steps in self.counts.items()} if self.began is not None else None
        self.restart(list(self.counts))
        self.began = now
        return found


class Crowd:
    """The number of runs at once. `auto` begins with one and adds another while there is memory and it pays.

    With n runs where there were n - 1, the whole has become faster by n / (n - 1) times the mean of (new speed / old
    speed) over the runs that were there before. For runs of one kind this is the ratio of all steps a second; a run
    with cheaper steps, which adds many of them, does not disturb it.
    """

    def __init__(self, limit: int | None = None) -> None:
        self.limit, self.settled = limit or 1, limit is not None
        self.before: Mapping[str, float] = {}  # rates with one run fewer
        self.need = 0.0  # bytes of the largest run so far

    def measured(self, rates: Mapping[str, float], free: float, reserved: float) -> None:
        """Take note of a window: steps a second of the runs under way, bytes free on the device and held by us."""
        n = len(rates)
        if self.settled or n < self.limit:
            return
        self.need = max(self.need, reserved / n)
        if n > 1 and (gain := self._gain(rates)) < _GAIN:
            self.limit, self.settled = n if gain >= 1 else n - 1, True
        elif free >= _MARGIN * self.need:
            self.before, self.limit = rates, n + 1

    def out_of_memory(self, others: int) -> None:
        """A run found no memory beside that many others: never again more than those."""
        self.limit, self.settled = max(1, others), True

    def _gain(self, rates: Mapping[str, float]) -> float:
        if both := rates.keys() & self.before.keys():
            return len(rates) / (len(rates) - 1) * fmean(rates[run] / self.before[run] for run in both)
        return sum(rates.values()) / sum(self.before.values())  # all that were there before have ended meanwhile
