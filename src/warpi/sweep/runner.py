"""Many runs from one file: `warpi sweep`. What is done is left alone, what stopped goes on, what is missing is run.

One device is served by this process; several, or several jobs, by a process each. All of them read the same file
and take what is left of it (`folders.Queue`), so that none waits for another.
"""

import json
import os
import queue
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import torch
from rich.console import Console

from warpi.errors import UserError
from warpi.noise.noise import Noise
from warpi.report.experiments import find_runs
from warpi.report.table import screen, to_rich
from warpi.report.write import write_report
from warpi.runs import plugins as own
from warpi.runs.run import pick_device, signals
from warpi.runs.spec import DataSpec, read_all, read_once
from warpi.sweep.display import Board, duration, grid
from warpi.sweep.gpu_packing import Crowd
from warpi.sweep.interleave import Event, drive
from warpi.sweep.plan import Job, Plan, read_plan
from warpi.sweep.queue import Queue, State, look, place

__all__ = ["Means", "dry_run", "means", "read_plan", "serve", "sweep"]

_MOST_JOBS = 8  # processes on the cores of one machine, unless --jobs says otherwise: each holds the data


@dataclass(frozen=True)
class Means:
    """What a sweep may use."""

    devices: tuple[torch.device, ...]
    per_gpu: int | None  # runs at once on a GPU; None: as many as pay
    jobs: int  # processes a device

    @property
    def cpu(self) -> bool:
        return self.devices[0].type == "cpu"

    @property
    def processes(self) -> tuple[torch.device, ...]:
        """A process for each of these."""
        return self.devices * self.jobs

    @property
    def threads(self) -> int | None:
        """Of a new run that does not say itself; a run that was begun keeps its own."""
        return max(1, cores() // self.jobs) if self.cpu else None


def cores() -> int:
    """Those that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def means(device: str, per_gpu: str, jobs: int | None) -> Means:
    """Flags to means."""
    if device == "auto":
        found = [torch.device("cuda", i) for i in range(torch.cuda.device_count())] or [torch.device("cpu")]
    else:
        found = [pick_device(part.strip()) for part in device.split(",")]
        found = [torch.device("cuda", d.index or 0) if d.type == "cuda" else d for d in found]
    if len(set(found)) < len(found) or (len(found) > 1 and any(d.type == "cpu" for d in found)):
        raise UserError(f"--device {device}: name each CUDA device once, or cpu alone")
    if per_gpu != "auto" and not (per_gpu.isascii() and per_gpu.isdigit() and 1 <= int(per_gpu) <= 64):
        raise UserError(f"--per-gpu must be auto or a number from 1 to 64, got {per_gpu!r}")
    on_cpu = found[0].type == "cpu"
    if on_cpu and per_gpu != "auto":
        raise UserError("--per-gpu is for GPUs, and there is none in use here; --jobs N runs N processes on the CPU")
    if jobs is not None and not 1 <= jobs <= 1024:
        raise UserError(f"--jobs must be at least 1 and at most 1024, got {jobs}")
    if not on_cpu and jobs is not None and jobs > 1 and per_gpu == "auto":
        per_gpu = "1"  # what pays cannot be measured beside other processes
    most = min(cores(), _MOST_JOBS) if on_cpu else 1
    return Means(tuple(found), None if per_gpu == "auto" else int(per_gpu), jobs or most)


def states(plan: Plan) -> dict[str, State | str]:
    """How far each run has come, or why it cannot be done."""
    found: dict[str, State | str] = {}
    with read_once():
        for job in plan.jobs:
            try:
                found[job.name] = look(plan, job)
            except UserError as e:
                found[job.name] = str(e)
    return found


def dry_run(plan: Plan) -> None:
    """Print what is done and what is missing."""
    console, found = Console(highlight=False), states(plan)
    console.print(grid(plan, found))
    n_done = sum(isinstance(state, State) and state.done for state in found.values())
    n_begun = sum(isinstance(state, State) and state.begun and not state.done for state in found.values())
    n_refused = sum(isinstance(state, str) for state in found.values())
    left = f"{n_done} done, {n_begun} begun, {len(found) - n_done - n_begun - n_refused} missing"
    left += f", {n_refused} refused" if n_refused else ""
    console.print(f"{len(found)} runs in {plan.out}: {left}", markup=False, emoji=False, soft_wrap=True)


def sweep(plan: Plan, means: Means, command: Sequence[str], json_file: Path | None = None) -> int:
    """Do all that is left of a plan, and report. `command` started it, and goes on with it. Returns an exit code."""
    began, found = time.monotonic(), states(plan)
    start = {name: s if isinstance(s, State) else State(False, False, 0, None) for name, s in found.items()}
    n_left = sum(not state.done for state in start.values())
    processes = means.processes[:n_left]
    left = [job for job in plan.jobs if isinstance(s := found[job.name], State) and not s.done]
    with ExitStack() as held:
        held.enter_context(read_once())
        _check_data(plan, left)
        if n_left:
            _check_out(plan.out)
        if len(processes) != 1:
            held.close()  # several read for themselves
        board, caught = held.enter_context(Board(plan, start)), held.enter_context(signals())
        if n_left:
            where = ", ".join(dict.fromkeys(map(str, processes)))
            many = f", {len(processes)} at a time" if means.cpu and len(processes) > 1 else ""
            board.say(f"{plan.file}: {len(start)} runs, {len(start) - n_left} of them done; on {where}{many}")
        else:
            board.say(f"{plan.file}: nothing to do, all {len(start)} runs are done")
        session = f"{os.getpid()}-{time.time_ns()}"
        if len(processes) == 1:
            _serve(plan, means, processes[0], session, caught, board.tell)
        elif processes:
            died = _workers(means, processes, session, caught, board, command)
            for line in died:
                board.say(line)
    if caught:
        again = shlex.join(["warpi", *own.flags(), "sweep", *command])
        print(f"warpi: stopped by {signal.Signals(caught[0]).name}; go on with: {again}", file=sys.stderr)
        return 128 + caught[0]
    return _report(plan, board.failed, time.monotonic() - began, json_file)


def _check_out(out: Path) -> None:
    """Runs can be made there: else each process would say so, and each run be told to be tried again."""
    try:
        (out / ".sweep").mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise UserError(f"cannot write to {out}: {e.strerror}; choose another --out") from e


def _check_data(plan: Plan, jobs: Sequence[Job]) -> None:
    """Read what these runs learn from, given labels too: what is not there, or broken, is said once, before any of them
    is begun."""
    seen = set()
    for settings in (job.settings for job in jobs):
        data = DataSpec(**{f.name: settings[f.name] for f in fields(DataSpec) if f.name in settings})
        noise = Noise.parse(data.noise)
        files = (data.data, data.root, data.label, data.drop, data.image_size, data.meta_data)
        if (read := (*files, noise.source and str(noise), dict(noise.options).get("from"))) not in seen:
            seen.add(read)
            data.stamps()
            try:
                _, dataset, _, _, other = read_all(data)
                noise.check(dataset, other)
            except Exception as e:  # of a reader of the user's own, too
                kind = "" if isinstance(e, UserError) else f"{type(e).__name__}: "
                where = f"data = {data.data!r}, root = {data.root!r}"
                raise UserError(f"{plan.file}: {kind}{e} ({where}; no run was begun)") from e


def serve(plan: Plan, means: Means, session: str) -> int:
    """Be one of the processes of a sweep: on one device, with events as lines of JSON on standard output."""
    with signals() as caught:

        def tell(event: Event) -> None:
            try:
                print(json.dumps(asdict(event)), flush=True)
            except BrokenPipeError:  # the process that started this one has died: store, and stop
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
                caught.append(signal.SIGTERM)

        _serve(plan, means, means.devices[0], session, caught, tell)
    return 128 + caught[0] if caught else 0


def _serve(
    plan: Plan, means: Means, device: torch.device, session: str, caught: list[int], tell: Callable[[Event], None]
) -> None:
    before = torch.get_num_threads()
    try:
        if means.threads is not None:
            torch.set_num_threads(means.threads)
        if device.type == "cuda":
            torch.cuda.set_device(device)
        crowd = Crowd(1 if device.type == "cpu" else means.per_gpu)
        with read_once():
            drive(Queue(plan, session, tell), device, crowd, caught, tell)
    finally:
        torch.set_num_threads(before)


def _workers(
    means: Means,
    processes: Sequence[torch.device],
    session: str,
    caught: list[int],
    board: Board,
    command: Sequence[str],
) -> list[str]:
    """A process for each device or CPU job; what they say goes to the board. Returns how those ended that died."""
    told: queue.Queue[Event] = queue.Queue()
    how = ["--jobs", str(means.jobs)] if means.cpu else ["--per-gpu", str(means.per_gpu or "auto")]
    kept = _without(command, "--device", "--jobs", "--per-gpu", "--json")
    base = [sys.executable, "-m", "warpi", *own.flags(), "sweep", *kept]
    with ExitStack() as held:
        workers, listeners = [], []
        for device in processes:
            argv = [*base, *how, "--device", str(device), "--worker", session]
            # In a session of its own: Ctrl-C comes to this process alone, which hands it on once.
            worker = subprocess.Popen(argv, stdout=subprocess.PIPE, stdin=subprocess.DEVNULL, start_new_session=True)
            held.callback(_end, worker)
            workers.append(worker)
            listeners.append(threading.Thread(target=_listen, args=(worker, told), daemon=True))
            listeners[-1].start()
        handed_on = False
        while any(listener.is_alive() for listener in listeners) or not told.empty():
            if caught and not handed_on:
                handed_on = True
                for worker in workers:
                    if worker.poll() is None:
                        worker.terminate()  # not by SIGINT: an import under way may swallow a KeyboardInterrupt
            try:
                board.tell(told.get(timeout=0.2))
            except queue.Empty:
                board.tell(Event("alive"))
        codes = [worker.wait() for worker in workers]
    stopped = (128 + signal.SIGTERM, -signal.SIGTERM) if caught else ()  # the latter: before it had begun
    return [f"a process of the sweep ended with code {code}" for code in codes if code not in (0, *stopped)]


def _listen(worker: "subprocess.Popen[bytes]", told: "queue.Queue[Event]") -> None:
    """To the end, whatever is said: a process whose pipe is full waits for ever."""
    assert worker.stdout is not None
    for line in worker.stdout:
        if line.endswith(b"\n"):  # the last one of a process that was killed may be cut off
            try:
                told.put(Event(**json.loads(line)))
            except (ValueError, TypeError):  # not ours: what a network or a library prints
                print(line.decode(errors="replace"), end="", file=sys.stderr)


def _end(worker: "subprocess.Popen[bytes]") -> None:
    """Only where this process comes to an unforeseen end does a worker still live here."""
    if worker.poll() is None:
        worker.terminate()
        worker.wait()
    if worker.stdout is not None:
        worker.stdout.close()


def _without(argv: Sequence[str], *flags: str) -> list[str]:
    """Arguments without some flags and their values."""
    kept, skip = [], False
    for word in argv:
        if not skip and word.partition("=")[0] not in flags:
            kept.append(word)
        skip = not skip and word in flags
    return kept


def _report(plan: Plan, failed: Mapping[str, str], seconds: float, json_file: Path | None) -> int:
    """The table of all runs, where they lie, and what went wrong."""
    console = screen()
    now = states(plan)
    ours = [job for job in plan.jobs if isinstance(now[job.name], State)]  # not those that had other settings
    paths = [place(plan, job) for job in ours]
    begun = [path for path in paths if (path / "spec.json").exists() and (path / "sweep.json").exists()]
    broken = list[UserError]()
    if begun and (runs := find_runs(begun, broken)):
        console.print(to_rich(write_report(runs, None, json_file)))
    done = sum(isinstance(state, State) and state.done for state in now.values())
    said = f"{done} of {len(now)} runs done, in {duration(seconds)}; run folders in {plan.out}"
    console.print(said, markup=False, emoji=False, soft_wrap=True)
    for error in broken:
        print(f"warpi: not in the table: {' '.join(str(error).split())}", file=sys.stderr)
    left = [name for name, state in now.items() if name not in failed and not (isinstance(state, State) and state.done)]
    alike = dict[str, list[str]]()
    for name, reason in failed.items():
        alike.setdefault(" ".join(reason.split()), []).append(name)
    for reason, (first, *others) in alike.items():
        names = f"{first} and {len(others)} more" if others else first
        print(f"warpi: {names} failed: {reason}", file=sys.stderr)
    for name in left:
        print(f"warpi: {name} is not finished; sweep again", file=sys.stderr)
    return 1 if failed or left or broken else 0
