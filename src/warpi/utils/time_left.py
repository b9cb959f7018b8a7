"""The progress and the remaining time of a long job, in one line of text."""

import sys
import time


class TimeLeft:
    """Counts finished items and prints how many are left: in place on a terminal, otherwise every ten seconds."""

    def __init__(self, total: int, unit: str, *, done: int = 0, quiet: bool = False) -> None:
        self.total = total
        self.unit = unit
        self.done = done
        self.quiet = quiet
        self.started = time.monotonic()
        self.first = done
        self.printed = self.started
        self.on_terminal = sys.stderr.isatty()

    def add(self, n: int) -> None:
        self.done += n
        now = time.monotonic()
        if not self.quiet and now - self.printed >= (0.5 if self.on_terminal else 10):
            self.printed = now
            start, end = ("\r", " ") if self.on_terminal else ("", "\n")
            print(f"{start}{self.line(now)}", end=end, file=sys.stderr, flush=True)

    def line(self, now: float) -> str:
        speed = (self.done - self.first) / max(now - self.started, 1e-9)
        left = format_duration((self.total - self.done) / speed) if speed > 0 else "?"
        return f"{self.done:,} of {self.total:,} {self.unit}, {speed:.3g} per second, {left} left"

    def close(self) -> None:
        """End the line on a terminal."""
        if self.on_terminal and not self.quiet and self.printed > self.started:
            print(file=sys.stderr)


def format_duration(seconds: float) -> str:
    """`40 s`, `12 min`, `3 h 05 min`."""
    minutes = round(seconds / 60)
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{minutes} min" if minutes < 100 else f"{minutes // 60} h {minutes % 60:02} min"
