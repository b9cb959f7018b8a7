"""Processes that are forked from the test process: they need no imports, which take seconds with torch."""

import contextlib
import os
import random
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

from warpi.cli.app import main

PROC = Path("/proc")


class Forked:
    """A running process. Its exit code is what `work` returns, or 99 after an unexpected error.

    Its output goes to the file `log`, or to a file descriptor.
    """

    def __init__(
        self, work: Callable[[], int | None], log: Path | int, environment: dict[str, str] | None = None
    ) -> None:
        self.log = log
        self.code: int | None = None
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 warns: other threads are not copied
            self.pid = os.fork()
        if self.pid == 0:
            os.environ.update(environment or {})
            self._work(work)

    def _work(self, work: Callable[[], int | None]) -> None:
        """Run in the new process, which ends here."""
        code: int | str | None = 99
        try:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            file = self.log if isinstance(self.log, int) else os.open(self.log, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
            os.dup2(file, 1), os.dup2(file, 2)
            sys.stdout, sys.stderr = (os.fdopen(fd, "w", closefd=False) for fd in (1, 2))  # not captured by pytest
            code = work() or 0
        except SystemExit as e:
            code = e.code or 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush(), sys.stderr.flush()
            os._exit(code if isinstance(code, int) else 99)

    def wait(self, seconds: float = 120.0) -> int:
        """Wait until it ends and return its exit code. If it hangs, it is killed and the test fails."""
        end = time.monotonic() + seconds
        while self.code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.code = os.waitstatus_to_exitcode(status)
            elif time.monotonic() > end:
                os.kill(self.pid, signal.SIGKILL)
                self.code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
                raise AssertionError(f"process {self.pid} hangs: {self.output()}")
            else:
                time.sleep(0.001)
        return self.code

    def output(self) -> str:
        return self.log.read_text() if isinstance(self.log, Path) and self.log.exists() else ""

    def ended(self) -> bool:
        try:
            return (PROC / str(self.pid) / "stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
        except OSError:
            return True

    def catches(self, number: int) -> bool:
        """Whether the process has a handler for a signal."""
        try:
            lines = (PROC / str(self.pid) / "status").read_text().splitlines()
        except OSError:
            return False
        return any(int(line.split()[1], 16) >> (number - 1) & 1 for line in lines if line.startswith("SigCgt"))

    def end(self) -> None:
        """Kill it if it still runs, which it does only if a test has failed."""
        if self.code is None:
            self.send(signal.SIGKILL)

    def send(self, number: int) -> int:
        """Send a signal, unless the process has ended already, and return the exit code."""
        if self.code is None and not self.ended():
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)
        return self.wait()


class ForkedPopen(Forked):
    """Stands in for `subprocess.Popen` with a command of warpi and a pipe for its output."""

    def __init__(self, command: list[str], **_: Any) -> None:
        reading, writing = os.pipe()
        super().__init__(lambda: main(command[command.index("warpi") + 1 :]), writing)
        os.close(writing)
        self.stdout = os.fdopen(reading, "rb")

    def poll(self) -> int | None:
        return self.wait() if self.ended() else None

    def terminate(self) -> None:
        if self.code is None and not self.ended():
            os.kill(self.pid, signal.SIGTERM)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.wait()
        self.stdout.close()


class Chaos:
    """Context manager: processes that are killed and paused at random moments. `work(k)` is what the k-th one does."""

    def __init__(self, work: Callable[[int], int | None], n: int, log: Path) -> None:
        self.work = work
        self.log = log
        self.rng = random.Random(0)
        self.kills = 0
        self.pauses = 0
        self.started: list[Forked] = []
        self.running = [self._start() for _ in range(n)]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.started:
            process.end()

    def _start(self) -> Forked:
        number = len(self.started)
        self.started.append(Forked(lambda: self.work(number), self.log))
        return self.started[-1]

    def disturb(self, times: int, seconds_between: tuple[float, float], longest_pause: float) -> None:
        """Disturb processes again and again. None may end by itself."""
        for _ in range(times):
            time.sleep(self.rng.uniform(*seconds_between))
            assert not any(process.ended() for process in self.running), self.running[0].output()[-2000:]
            self._disturb_one(longest_pause)
        assert min(self.kills, self.pauses) >= times / 4

    def wait(self, seconds: float = 120) -> None:
        """Wait until all processes have ended without an error."""
        assert {process.wait(seconds) for process in self.running} == {0}, self.running[0].output()

    def _disturb_one(self, longest: float) -> None:
        """Kill a process and start another, or pause it for a time around that of a lease."""
        k = self.rng.randrange(len(self.running))
        if self.rng.random() < 0.5:
            self.running[k].send(signal.SIGKILL)
            self.running[k] = self._start()
            self.kills += 1
        else:
            os.kill(self.running[k].pid, signal.SIGSTOP)
            time.sleep(self.rng.uniform(0.8, 1) * longest)
            os.kill(self.running[k].pid, signal.SIGCONT)
            self.pauses += 1
