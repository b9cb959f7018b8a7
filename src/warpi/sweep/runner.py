"""Run all unfinished runs of a sweep file, in one process or in several, and compare the results.

Every process reads the same file and takes runs from the same folder (`queue.Queue`), one at a time.
"""

import json
import math
import os
import shlex
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, fields, replace
from datetime import datetime
from pathlib import Path

import torch
from rich.console import Console

from warpi.errors import UserError, format_count
from warpi.noise.parse import Noise
from warpi.report.experiments import find_runs, group_by
from warpi.report.table import screen, to_rich
from warpi.report.write import write_report
from warpi.runs import plugins
from warpi.runs.schema import SPEC, SWEEP, failure_file
from warpi.runs.spec import DataCache, DataSpec, load
from warpi.sweep import on_ray, on_slurm
from warpi.sweep.display import Board, format_scores, states_table
from warpi.sweep.place import Place
from warpi.sweep.plan import Job, Plan
from warpi.sweep.processes import run_processes
from warpi.sweep.queue import Queue, RunEvent
from warpi.sweep.run_states import State, read_settings, run_folder, run_state
from warpi.sweep.worker import work
from warpi.utils.devices import catch_signals, count_cores, cpu_threads, pick_device
from warpi.utils.terminal import cell, say, visible_lines
from warpi.utils.time_left import format_duration

_MAX_CPU_JOBS = 8  # default limit, because each process has its own copy of the data
_JOBS_WITH_MPS = 3  # three runs with a small network use a whole GPU (docs/speed.md)


@dataclass(frozen=True)
class Resources:
    """The devices of a sweep and the number of processes on each of them."""

    devices: tuple[torch.device, ...]
    jobs: int

    @property
    def processes(self) -> tuple[torch.device, ...]:
        """The device of each process."""
        return self.devices * self.jobs

    @property
    def threads(self) -> int | None:
        """CPU threads for new runs that do not set them; resumed runs keep their own number."""
        return max(1, count_cores() // self.jobs) if self.devices[0].type == "cpu" else None


def mps_is_running() -> bool:
    """Whether NVIDIA's Multi-Process Service, which lets processes share a GPU, has been started."""
    return Path(os.environ.get("CUDA_MPS_PIPE_DIRECTORY", "/tmp/nvidia-mps"), "control").exists()


def parse_resources(device: str, per_gpu: str, jobs: int | None) -> Resources:
    """Convert the flags --device, --per-gpu and --jobs to resources."""
    if device == "auto":
        devices = [torch.device("cuda", i) for i in range(torch.cuda.device_count())] or [torch.device("cpu")]
    else:
        devices = [pick_device(part.strip()) for part in device.split(",")]
        devices = [torch.device("cuda", d.index or 0) if d.type == "cuda" else d for d in devices]
    if len(set(devices)) < len(devices) or (len(devices) > 1 and any(d.type == "cpu" for d in devices)):
        raise UserError(f"--device {device}: list each CUDA device only once, or use cpu alone")
    if per_gpu != "auto" and not (per_gpu.isascii() and per_gpu.isdigit() and 1 <= int(per_gpu) <= 64):
        raise UserError(f"--per-gpu must be auto or a number from 1 to 64, got {per_gpu!r}")
    on_cpu = devices[0].type == "cpu"
    if on_cpu and per_gpu != "auto":
        raise UserError("--per-gpu needs a GPU, but this sweep uses none; --jobs N runs N processes on the CPU")
    if jobs is not None and not 1 <= jobs <= 1024:
        raise UserError(f"--jobs must be at least 1 and at most 1024, got {jobs}")
    if on_cpu:
        return Resources(tuple(devices), jobs or min(count_cores(), _MAX_CPU_JOBS))
    if per_gpu != "auto":
        return Resources(tuple(devices), int(per_gpu) * (jobs or 1))
    return Resources(tuple(devices), jobs or (_JOBS_WITH_MPS if mps_is_running() else 1))


def read_states(plan: Plan) -> dict[str, State]:
    states: dict[str, State] = {}
    cache = DataCache()
    for job in plan.jobs:
        try:
            states[job.name] = run_state(plan, job, cache)
        except UserError as error:
            states[job.name] = State(problem=str(error))
    return states


def dry_run(plan: Plan) -> None:
    """Print which runs are done and which are missing."""
    console = Console(highlight=False)
    states = read_states(plan)
    notes = {job.name: read_settings(failure_file(plan.out, job.name)) for job in plan.jobs}
    failed = {name: str(note.get("reason")) for name, note in notes.items() if note is not None}
    console.print(states_table(plan, states, failed))
    n_done = sum(state.done for state in states.values())
    n_begun = sum(state.begun and not state.done for state in states.values())
    n_refused = sum(bool(state.problem) for state in states.values())
    counts = f"{n_done} done, {n_begun} begun, {len(states) - n_done - n_begun - n_refused} missing"
    if n_refused:
        counts += f", {n_refused} refused"
    console.print(cell(f"{format_count(len(states), 'run')} in {plan.out}: {counts}"), soft_wrap=True)


def submit(plan: Plan, place: Place, tasks: int | None, dry: bool = False) -> None:
    """Submit the unfinished runs of a plan to SLURM, or (`dry`) print the script."""
    if tasks is not None and not 1 <= tasks <= on_slurm.MAX_TASKS:
        raise UserError(f"--jobs must be at least 1 and at most {on_slurm.MAX_TASKS} with --on slurm, got {tasks}")
    states = read_states(plan)
    jobs = [job for job in plan.jobs if not (states[job.name].done or states[job.name].problem)]
    if not jobs:
        raise UserError(f"{plan.file}: no run is left to submit; --on local prints the table, --dry-run the states")
    if dry:
        print(on_slurm.make_script(plan, jobs, place, tasks), end="")
        return
    _check_data(plan, jobs, DataCache())
    _check_out(plan.out)
    print(visible_lines(on_slurm.submit(plan, jobs, place, tasks)))


def sweep(plan: Plan, place: Place, resources: Resources, command: Sequence[str], json_file: Path | None = None) -> int:
    """Finish all runs of a plan and print the table. `command` is the command line. Returns an exit code."""
    began = time.monotonic()
    states = read_states(plan)
    n_left = sum(not state.done for state in states.values())
    processes = resources.processes[:n_left] if place.kind == "local" else ()
    cache = DataCache()
    _check_data(plan, [job for job in plan.jobs if not (states[job.name].done or states[job.name].problem)], cache)
    if n_left:
        _check_out(plan.out)
    if len(processes) != 1:
        cache = DataCache()  # frees the data: each worker process reads it itself
    with ExitStack() as stack:
        board = Board(plan, states)
        stack.enter_context(board.bars)
        caught = stack.enter_context(catch_signals())
        if n_left:
            where = ", ".join(dict.fromkeys(map(str, processes))) or f"Ray {place.address}".strip()
            several = f", {len(processes)} at a time" if len(processes) > 1 else ""
            runs = format_count(len(states), "run")
            board.print(f"{plan.file}: {runs}, {len(states) - n_left} of them done; on {where}{several}")
        else:
            board.print(f"{plan.file}: nothing to do: {len(states)} of {len(states)} runs are done")
        session = f"{os.getpid()}-{time.time_ns()}"
        if len(processes) == 1:
            _work(plan, resources, processes[0], session, caught, board.show, cache)
        elif processes:
            commands = _worker_commands(plan, resources, processes, session)
            for line in run_processes(commands, caught, board.show):
                board.print(line)
        elif n_left:
            _drive_ray(plan, place, session, caught, board)
    if caught:
        resume = shlex.join(["warpi", *plugins.flags(), "sweep", *command])
        say(f"warpi: stopped by {signal.Signals(caught[0]).name}; resume with: {resume}", error=True)
        return 128 + caught[0]
    return _report(plan, board.failed, time.monotonic() - began, json_file)


def _check_out(out: Path) -> None:
    """Raise an error if run folders cannot be created. Otherwise every run would fail for this reason."""
    try:
        (out / ".sweep").mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise UserError(f"cannot write to {out}: {e.strerror}; choose another --out") from e


def _check_data(plan: Plan, jobs: Sequence[Job], cache: DataCache) -> None:
    """Read all data and given labels once, so that missing or broken files are reported before any run starts."""
    seen = set()
    for settings in (job.settings for job in jobs):
        data = DataSpec(**{f.name: settings[f.name] for f in fields(DataSpec) if f.name in settings})
        noise = Noise.parse(data.noise)
        sources = (data.data, data.root, data.label, data.drop, data.table_options, data.image_size, data.meta_data)
        key = (*sources, noise.source and str(noise), dict(noise.options).get("from"))
        if key in seen:
            continue
        seen.add(key)
        try:
            loaded = load(data, cache)
            noise.check(loaded.dataset, loaded.open_set)
        except Exception as e:  # also errors of a user-defined reader
            kind = "" if isinstance(e, UserError) else f"{type(e).__name__}: "
            where = f"data = {data.data!r}, root = {data.root!r}"
            raise UserError(f"{plan.file}: {kind}{e} ({where}; no run was started)") from e


def serve(plan: Plan, resources: Resources, session: str, place: Place) -> int:
    """Run one worker process of a sweep, on one device. It prints events as lines of JSON, with SLURM as text."""
    with catch_signals() as caught:
        if place.kind == "slurm":
            resources = replace(resources, jobs=count_cores())  # one thread for runs that do not set a number
            _work(plan, resources, resources.devices[0], session, caught, _log, DataCache(), on_slurm.PATIENCE)
            return 128 + caught[0] if caught else 0

        def report(event: RunEvent) -> None:
            if place.kind == "ray":
                _log(event, error=True)
            try:
                print(json.dumps(asdict(event)), flush=True)
            except BrokenPipeError:  # the parent process has died: store a checkpoint and stop
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
                caught.append(signal.SIGTERM)

        if place.kind == "ray":
            on_ray.drive(plan, place, session, report, caught)
        else:
            _work(plan, resources, resources.devices[0], session, caught, report, DataCache())
    return 128 + caught[0] if caught else 0


def _drive_ray(plan: Plan, place: Place, session: str, caught: list[int], board: Board) -> None:
    """Let a separate process drive Ray, because Ray prints to the terminal when it loses a machine."""
    on_ray.check_installed()
    gpus = [] if place.runs_per_gpu is None else ["--gpus-per-run", str(place.gpus_per_run)]
    command = [sys.executable, "-m", "warpi", *plugins.flags(), "sweep", *plan.flags]
    command += ["--on", f"ray:{place.address}", *gpus, "--worker", session]
    file = plan.out / ".sweep" / "ray.log"
    with open(file, "w") as log:
        problems = run_processes([command], caught, board.show, log)
    if problems and not caught:  # if stopped while it starts, Ray exits with its own code
        lines = file.read_text(errors="replace").splitlines()
        reasons = [line.removeprefix("warpi: ") for line in lines if line.startswith("warpi: ")]
        raise UserError(reasons[-1] if reasons else f"{problems[0]}; see {file}")


def _log(event: RunEvent, error: bool = False) -> None:
    """Print an event as a line of a log file."""
    if event.kind != "alive":
        details = event.reason or format_scores(event.record)
        line = f"{datetime.now():%Y-%m-%d %H:%M:%S}  {event.run}  {event.kind}  epoch {event.epoch}  {details}"
        say(line, error=error, flush=True)


def _work(
    plan: Plan,
    resources: Resources,
    device: torch.device,
    session: str,
    caught: list[int],
    report: Callable[[RunEvent], None],
    cache: DataCache,
    patience: float = math.inf,
) -> None:
    with cpu_threads(resources.threads):
        if device.type == "cuda":
            torch.cuda.set_device(device)
        shares_device = device.type == "cuda" and resources.jobs > 1
        work(Queue(plan, session, report, cache), device, caught, shares_device, patience)


def _worker_commands(
    plan: Plan, resources: Resources, processes: Sequence[torch.device], session: str
) -> list[list[str]]:
    """The command of one worker process per entry of `processes`."""
    base = [sys.executable, "-m", "warpi", *plugins.flags(), "sweep", *plan.flags, "--jobs", str(resources.jobs)]
    return [[*base, "--device", str(device), "--worker", session] for device in processes]


def _report(plan: Plan, failed: Mapping[str, str], seconds: float, json_file: Path | None) -> int:
    """Print the table of all runs, their folder and the errors. Returns an exit code."""
    console = screen()
    states = read_states(plan)
    paths = [run_folder(plan, job) for job in plan.jobs if not states[job.name].problem]
    begun = [path for path in paths if (path / SPEC).exists() and (path / SWEEP).exists()]
    broken = list[UserError]()
    if begun and (runs := find_runs(begun, broken)):
        console.print(to_rich(write_report(runs, None, json_file)))
    n_done = sum(state.done for state in states.values())
    summary = f"{n_done} of {len(states)} runs done in {format_duration(seconds)}; run folders in {plan.out}"
    console.print(cell(summary), soft_wrap=True)
    for error in broken:
        say(f"warpi: not in the table: {' '.join(str(error).split())}", error=True)
    for reason, (first, *others) in group_by(failed, lambda name: " ".join(failed[name].split())).items():
        names = f"{first} and {len(others)} more" if others else first
        say(f"warpi: {names} failed: {reason}", error=True)
    unfinished = [name for name, state in states.items() if name not in failed and not state.done]
    for name in unfinished:
        say(f"warpi: {name} is not finished; run the sweep again", error=True)
    return 1 if failed or unfinished or broken else 0
