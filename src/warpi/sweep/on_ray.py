"""Train a sweep on a Ray cluster: one task per run, which Ray restarts on another machine if its machine is lost."""

import os
import secrets
import socket
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, chdir, contextmanager
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

import warpi
from warpi.errors import UserError, first_line, missing_package
from warpi.runs import plugins
from warpi.runs.schema import failure_file
from warpi.runs.spec import DataCache
from warpi.sweep.inbox import Inbox, changed_files
from warpi.sweep.place import Place
from warpi.sweep.plan import Job, Plan
from warpi.sweep.queue import Queue, RunEvent
from warpi.sweep.run_states import run_state
from warpi.sweep.worker import work
from warpi.utils.devices import catch_signals, count_cores, cpu_threads
from warpi.utils.files import sha256
from warpi.utils.leases import LeaseLost

_RETRIES = 10  # of a run whose process or machine is lost
_SHARE = 20  # a machine that cannot access the folder spends at most 1/20 of its time on sending checkpoints
_LAST = ("done", "failed", "stopped")  # the last events of an attempt
_OBJECT_STORE = 100_000_000  # bytes; a local cluster passes almost nothing through it


@dataclass(frozen=True)
class Sweep:
    """What a worker needs to know about the sweep."""

    plan: Plan  # with an absolute folder
    session: str
    identity: dict[str, str]  # of the installation that started the sweep
    plugins: tuple[str, ...]
    folder: str  # the working directory: relative paths of the plan start there
    proof: Path  # a file that exists only where the folder of the sweep is the same
    inbox: Any  # handle of the Inbox


def check_installed() -> None:
    """Raise a UserError if Ray is not installed. Does not import Ray, which would read its environment variables."""
    if find_spec("ray") is None:
        raise missing_package("ray", "warpi sweep --on ray", "ray")


@contextmanager
def cluster(address: str) -> Iterator[Any]:
    """Context manager: connect to a Ray cluster, or start one on this machine. Yields the module `ray`.

    The local cluster listens on 127.0.0.1, requires a token that only this process knows, and keeps its files in a
    folder that only this user can open. It ends with the context.
    """
    with ExitStack() as stack:
        options: dict[str, Any] = {"address": address or "local"}
        advice = "this machine must be a node of it (ray start --address=HEAD:6379)"
        if not address:
            os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"  # otherwise it listens on all interfaces
            os.environ["RAY_AUTH_MODE"] = "token"
            os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="warpi-ray-", ignore_cleanup_errors=True))
            temp = os.path.join(folder, "ray")  # Ray makes its folder writable for everybody, but not the parent
            options |= {"include_dashboard": False, "object_store_memory": _OBJECT_STORE, "_temp_dir": temp}
            options |= {"num_cpus": count_cores()}
            advice = "try --on local"
        os.environ["RAY_USAGE_STATS_ENABLED"] = "0"  # no telemetry
        check_installed()
        ray: Any = import_module("ray")
        try:
            _check_reachable(address)
            ray.init(**options, log_to_driver=False, logging_level="ERROR")
        except Exception as e:  # Ray raises many types
            what = f"join the Ray cluster {address!r}" if address else "start Ray"
            raise UserError(f"cannot {what}: {first_line(e)}; {advice}") from e
        stack.callback(ray.shutdown)
        yield ray


def _check_reachable(address: str) -> None:
    """Raise an OSError at once if nobody listens at HOST:PORT: Ray would try for minutes."""
    host, _, port = address.rpartition(":")
    if host and port.isdigit():
        socket.create_connection((host.strip("[]"), int(port)), timeout=10).close()


def drive(plan: Plan, place: Place, session: str, report: Callable[[RunEvent], None], caught: list[int]) -> None:
    """Let a Ray cluster train the unfinished runs of a plan, until all have ended or a signal is noted in `caught`."""
    out = plan.out.absolute()
    proof = out / ".sweep" / f"ray-{session}"
    with cluster(place.address) as ray, catch_signals(caught):  # Ray has replaced the handler of SIGTERM
        here = ray.get_runtime_context().get_node_id()
        strategy = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(here, soft=False)
        inbox = ray.remote(Inbox).options(num_cpus=0, scheduling_strategy=strategy).remote(str(out))
        files = tuple(plugins.flags()[1::2])
        sweep = Sweep(replace(plan, out=out), session, identity(files), files, os.getcwd(), proof, inbox)
        proof.touch()
        try:
            jobs = {job.name: job for job in plan.jobs if not _is_done(plan, job)}
            _follow(ray, sweep, {name: _prepare(ray, sweep, job, place) for name, job in jobs.items()}, report, caught)
        except ray.exceptions.RayError as e:
            raise UserError(f"lost the Ray cluster: {first_line(e)}; run the same command again to resume") from e
        finally:
            proof.unlink(missing_ok=True)


def _prepare(ray: Any, sweep: Sweep, job: Job, place: Place) -> Callable[[], Any]:
    """Return a function that submits the task of a run. Raises a UserError if no machine can ever run it."""
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    gpus = place.gpus_per_run
    if place.runs_per_gpu is None and any(node.get("GPU") for node in nodes):
        gpus = 1.0
    threads = job.settings.get("threads", 1)
    if not any(node.get("CPU", 0) >= threads and node.get("GPU", 0) >= gpus for node in nodes):
        available = "; ".join(_format_resources(node.get("CPU", 0), node.get("GPU", 0)) for node in nodes)
        raise UserError(
            f"{job.name} needs a machine with {_format_resources(threads, gpus)}, but those of the Ray cluster have "
            f"{available}; lower threads or --gpus-per-run"
        )
    task = ray.remote(train_run).options(
        num_cpus=threads, num_gpus=gpus, max_retries=_RETRIES, scheduling_strategy="SPREAD", name=job.name
    )
    return partial(task.remote, sweep, job, "cuda" if gpus else "cpu", 0 < gpus < 1)


def _format_resources(cpus: float, gpus: float) -> str:
    return f"{cpus:g} CPU core{'s' * (cpus != 1)} and {gpus:g} GPU{'s' * (gpus != 1)}"


def _follow(
    ray: Any,
    sweep: Sweep,
    submit: Mapping[str, Callable[[], Any]],
    report: Callable[[RunEvent], None],
    caught: list[int],
) -> None:
    """Submit all runs and report events until they have ended. After a signal, they store checkpoints and stop."""
    runs = {function(): name for name, function in submit.items()}  # by task
    last: dict[str, str] = {}  # kind of the last event
    passed_on = False
    while runs:
        if caught and not passed_on:
            passed_on = True
            for task in runs:
                ray.cancel(task)  # raises KeyboardInterrupt in the task, which `catch_signals` catches
        finished, _ = ray.wait([*runs], num_returns=len(runs), timeout=0.2)
        events = [RunEvent(**event) for event in ray.get(sweep.inbox.take.remote())]
        for event in events or [RunEvent("alive")]:
            report(event)
            last[event.run] = event.kind
        for task in finished:
            name = runs.pop(task)
            reason = _reason(ray, task)
            if passed_on or last.get(name) in ("done", "failed"):
                continue
            if last.get(name) == "stopped" and not reason:  # its machine is being shut down
                runs[submit[name]()] = name
            elif any(job.name == name and _is_done(sweep.plan, job) for job in sweep.plan.jobs):
                report(RunEvent("done", name))  # by another process
            else:
                report(RunEvent("failed", name, reason=reason or "it was not trained"))


def _reason(ray: Any, task: Any) -> str:
    """Why a task could not train its run, or "". Errors of the run itself are events."""
    try:
        reason: str = ray.get(task)
    except ray.exceptions.TaskCancelledError:
        return "cancelled"
    except ray.exceptions.RayTaskError as e:
        return f"{type(e.cause).__name__}: {first_line(e.cause)}"
    except ray.exceptions.RayError as e:
        return f"Ray gave up after {_RETRIES} retries: {first_line(e)}"
    return reason


def _is_done(plan: Plan, job: Job) -> bool:
    """Whether a run is done. If its folder belongs to another run, it is not; its worker reports the reason."""
    try:
        return run_state(plan, job).done
    except UserError:
        return False


def identity(files: Sequence[str]) -> dict[str, str]:
    """What must be the same on all machines: the versions, and hashes of the code of warpi and of custom methods."""
    package = Path(warpi.__file__).parent
    code = sorted(path.relative_to(package).as_posix() for path in package.rglob("*.py"))
    content = sha256(*(part for name in code for part in (name, (package / name).read_bytes())))
    hashes = {file: sha256(Path(file).read_bytes())[:12] for file in files}
    return {
        "warpi": warpi.__version__,
        "the source of warpi": content[:12],
        "torch": torch.__version__,
        **hashes,
    }


@cache
def _data() -> DataCache:
    """The data of earlier runs in this process."""
    return DataCache()


def train_run(sweep: Sweep, job: Job, device: str, shares_device: bool) -> str:
    """Train one run on a machine of the cluster and send events to the inbox. Returns why this is impossible, or ""."""
    ray: Any = import_module("ray")
    where = ray.util.get_node_ip_address()
    with ExitStack() as stack:
        caught = stack.enter_context(catch_signals())
        if os.path.isdir(sweep.folder):
            stack.enter_context(chdir(sweep.folder))
        try:
            here = identity(sweep.plugins)
        except OSError as e:
            return f"{where} has no file {e.filename}, which --use needs on every machine"
        for name, value in sweep.identity.items():
            if here[name] != value:
                return f"{where} has {name} {here[name]}, but the machine that started the sweep has {value}"
        stack.enter_context(plugins.use(sweep.plugins))
        out = sweep.plan.out
        send: Callable[[RunEvent], None] = lambda _: None
        if not sweep.proof.exists():  # this machine cannot access the folder
            out = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="warpi-")))
            send = _exchange_files(ray, sweep, job, out, caught)

        reported = set[str]()

        def report(event: RunEvent) -> None:
            reported.add(event.kind)
            if event.kind != "alive":
                send(event)
                sent = sweep.inbox.put.remote(asdict(event))
                if event.kind in _LAST:
                    ray.get(sent)  # the driver must know before this task ends

        plan = replace(sweep.plan, out=out, jobs=(job,))
        stack.enter_context(cpu_threads(1))  # for runs that do not set a number
        work(Queue(plan, sweep.session, report, _data()), torch.device(device), caught, shares_device)
        if caught and reported.isdisjoint(_LAST):  # the signal came before the run was claimed
            report(RunEvent("stopped", job.name))
    return ""


def _exchange_files(ray: Any, sweep: Sweep, job: Job, out: Path, caught: list[int]) -> Callable[[RunEvent], None]:
    """Fetch the files of a run. Returns a function that sends the changed files after some epochs and at the end."""
    while (begun := ray.get(sweep.inbox.begin.remote(job.name))) is None and not caught:
        time.sleep(1)
    if begun is None:
        return lambda _: None
    attempt, files = begun
    folder, failed = out / job.name, failure_file(out, job.name)
    folder.mkdir(parents=True)
    for name, content in files.items():
        (folder / name).write_bytes(content)
    known: dict[str, int] = {}
    changed_files(folder, known)
    due = 0.0

    def send(event: RunEvent) -> None:
        nonlocal due
        began = time.monotonic()
        if event.kind in _LAST or (event.kind == "epoch" and began >= due):
            files = changed_files(folder, known)
            failure = failed.read_bytes() if event.kind == "failed" else None
            if not ray.get(sweep.inbox.receive.remote(job.name, attempt, files, event.kind in _LAST, failure)):
                raise LeaseLost(f"another machine trains {job.name}")
            due = time.monotonic() + _SHARE * (time.monotonic() - began)

    return send
