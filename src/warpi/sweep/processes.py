"""Start the processes of a sweep, show the events that they print as lines of JSON, and pass on signals."""

import json
import queue
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from signal import SIGTERM
from typing import IO

from warpi.sweep.queue import RunEvent


def run_processes(
    commands: Sequence[Sequence[str]],
    caught: list[int],
    show: Callable[[RunEvent], None],
    log: IO[str] | None = None,
) -> list[str]:
    """Start one process per command and show their events until all have ended. Returns one line per failed process.

    A signal in `caught` is passed on as SIGTERM. Everything else that the processes print goes to `log` (default:
    standard error).
    """
    events: queue.Queue[RunEvent] = queue.Queue()
    with ExitStack() as stack:
        workers = []
        listeners = []
        for command in commands:
            # A new session: Ctrl-C reaches this process only, which passes it on once.
            worker = subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=log, stdin=subprocess.DEVNULL, start_new_session=True
            )
            stack.enter_context(worker)  # waits until it ends
            stack.callback(worker.terminate)  # in case this process ends unexpectedly
            workers.append(worker)
            listeners.append(threading.Thread(target=_listen, args=(worker, events, log), daemon=True))
            listeners[-1].start()
        passed_on = False
        while any(listener.is_alive() for listener in listeners) or not events.empty():
            if caught and not passed_on:
                passed_on = True
                for worker in workers:
                    if worker.poll() is None:
                        worker.terminate()  # not SIGINT: a running import may swallow a KeyboardInterrupt
            try:
                show(events.get(timeout=0.2))
            except queue.Empty:
                show(RunEvent("alive"))
        codes = [worker.wait() for worker in workers]
    stopped = (128 + SIGTERM, -SIGTERM) if caught else ()  # -SIGTERM: before it handled signals
    return [f"a process of the sweep ended with code {code}" for code in codes if code not in (0, *stopped)]


def _listen(worker: "subprocess.Popen[bytes]", events: "queue.Queue[RunEvent]", log: IO[str] | None = None) -> None:
    """Read all output of a worker. If its pipe became full, it would wait forever."""
    assert worker.stdout is not None
    for line in worker.stdout:
        if line.endswith(b"\n"):  # the last line of a killed process may be cut off
            try:
                events.put(RunEvent(**json.loads(line)))
            except (ValueError, TypeError):  # printed by a network or a library
                print(line.decode(errors="replace"), end="", file=log or sys.stderr)
