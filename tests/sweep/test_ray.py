"""`warpi sweep --on ray`: a cluster of four nodes on loopback addresses, a local one, and no shared folder."""

import json
import os
import re
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from sweep_helpers import assert_same_as_local, read_log, sweep, write_sweep

import warpi
from warpi.errors import UserError
from warpi.runs import plugins
from warpi.sweep import on_ray
from warpi.sweep.inbox import Inbox, changed_files
from warpi.sweep.place import Place
from warpi.sweep.plan import Job, read_plan
from warpi.sweep.queue import RunEvent
from warpi.utils.leases import Watch, one_writer


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    pause = 'float(os.environ.get("PAUSE", "0"))'  # a test can kill a node during a pause
    write_sweep(tmp_path, pause, epochs=6, seeds=[*range(6)], methods=["slow", "gce"])
    monkeypatch.setenv("RAY_worker_niceness", "0")  # Ray sets 15, and other programs could take all of the time
    monkeypatch.chdir(tmp_path)
    return tmp_path


def start(*flags: str) -> "subprocess.Popen[str]":
    command = [sys.executable, "-m", "warpi", "--use", "plugin.py", "sweep", "few.toml", *flags]
    environment = {**os.environ, "PAUSE": "0.03"}
    return subprocess.Popen(command, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


def until(happened: Callable[[], Any], seconds: float = 120) -> Any:
    end = time.monotonic() + seconds
    while not (result := happened()):
        assert time.monotonic() < end, "timeout"
        time.sleep(0.05)
    return result


def children(pid: int) -> dict[int, str]:
    """The processes below a process, each with its command."""
    found = {}
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):
            for child in task.read_text().split():
                found[int(child)] = Path(f"/proc/{child}/cmdline").read_text().replace("\0", " ").strip()
                found |= children(int(child))
    return found


def events(out: Path) -> list[list[str]]:
    return read_log([out / ".sweep" / "ray.log"])


# -- without Ray -----------------------------------------------------------------------------------------------------


def test_files_of_an_earlier_attempt_are_ignored(tmp_path: Path) -> None:
    inbox = Inbox(str(tmp_path))
    assert inbox.begin("run") == (1, {})
    assert inbox.receive("run", 1, {"results.jsonl": b"one\n", "checkpoint": b"1"}, False)
    assert inbox.begin("run") == (2, {"results.jsonl": b"one\n", "checkpoint": b"1"})
    assert not inbox.receive("run", 1, {"checkpoint": b"late"}, True)
    assert Watch(tmp_path / "run").is_held(), "another process can take the run"
    assert inbox.receive("run", 2, {"checkpoint": b"2"}, True)
    assert not Watch(tmp_path / "run").is_held()
    assert not inbox.receive("run", 2, {"checkpoint": b"3"}, False)
    assert not (tmp_path / ".sweep").exists()
    assert inbox.begin("run") is not None
    assert inbox.receive("run", 3, {}, True, b"why")
    assert (tmp_path / ".sweep" / "run" / "failed.json").read_bytes() == b"why"
    assert (tmp_path / "run" / "checkpoint").read_bytes() == b"2"
    inbox.put({"kind": "done"})
    assert inbox.take() == [{"kind": "done"}]
    assert inbox.take() == []
    with one_writer(tmp_path / "run"):
        assert inbox.begin("run") is None


def test_changed_files_come_in_the_order_of_their_changes(tmp_path: Path) -> None:
    for age, name in enumerate(("done", "spec.json", "b", ".lock")):
        (tmp_path / name).write_text(name)
        os.utime(tmp_path / name, ns=(0, 10**18 - age))
    known: dict[str, int] = {}
    assert list(changed_files(tmp_path, known)) == ["b", "spec.json", "done"]
    assert changed_files(tmp_path, known) == {}
    os.utime(tmp_path / "b", ns=(0, 2 * 10**18))
    assert list(changed_files(tmp_path, known)) == ["b"]


@pytest.mark.usefixtures("folder")
def test_clear_errors(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert sweep("--on", "ray", "--jobs", "2") == 2
    assert "--device, --per-gpu and --jobs cannot be used with --on ray; use --gpus-per-run" in (
        capsys.readouterr().err
    )
    monkeypatch.setitem(sys.modules, "ray", None)
    assert sweep("--on", "ray") == 2
    error = "warpi: warpi sweep --on ray needs the package 'ray'; install it with: pip install 'warpi[ray]'\n"
    assert capsys.readouterr().err == error


@pytest.mark.slow
@pytest.mark.usefixtures("folder")
def test_an_address_without_a_cluster_is_reported_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.2", 0))
        address = f"127.0.0.2:{free.getsockname()[1]}"
        assert sweep("--on", f"ray:{address}", "--set", "seed=0", "--set", "method=gce") == 2
    error = (
        f"warpi: cannot join the Ray cluster '{address}': [Errno 111] Connection refused; this machine must be a node"
    )
    assert capsys.readouterr().err.startswith(error)


# -- with Ray --------------------------------------------------------------------------------------------------------

NODE = ("--object-store-memory=80000000", "--disable-usage-stats", "--block")
# A lost node is noticed after about ten seconds.
HEALTH = {"initial_delay_ms": "5000", "period_ms": "1000", "timeout_ms": "2000", "failure_threshold": "5"}


@contextmanager
def node(log: Path, *flags: str, prefix: tuple[str, ...] = (), pause: str = "0.03") -> Iterator[int]:
    """Context manager: a node of a Ray cluster, as a process of its own."""
    command = [*prefix, sys.executable, "-m", "ray.scripts.scripts", "start", *flags, *NODE]
    environment = {**os.environ, "PAUSE": pause, "CUDA_VISIBLE_DEVICES": "", "PYTHONWARNINGS": "ignore"}
    environment |= {f"RAY_health_check_{name}": value for name, value in HEALTH.items()}
    with open(log, "w") as file:
        process = subprocess.Popen(command, env=environment, stdout=file, stderr=file, stdin=subprocess.DEVNULL)
        below: dict[int, str] = {}
        try:
            until(lambda: process.poll() is not None or "--block" in log.read_text())
            assert process.poll() is None, log.read_text()
            yield process.pid
        finally:
            below = children(process.pid)
            process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.wait(20)
            for pid in below:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            process.kill()
            process.wait()


@contextmanager
def ray_cluster(folder: Path, monkeypatch: pytest.MonkeyPatch, hidden: Path) -> Iterator[tuple[str, list[int]]]:
    """Context manager: the address of a cluster of a head and three nodes, and the processes of the nodes.

    The last node does not see the folder `hidden`, if this user may mount file systems.
    """
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setenv("RAY_AUTH_TOKEN", secrets.token_hex(32))
    with socket.socket() as free:
        free.bind(("127.0.0.2", 0))
        address = f"127.0.0.2:{free.getsockname()[1]}"
    port = address.partition(":")[2]
    mount = ("unshare", "--mount", "sh", "-c", 'mount -t tmpfs none "$0" && exec "$@"', str(hidden))
    may_mount = subprocess.run([*mount, "true"], capture_output=True).returncode == 0
    with ExitStack() as stack:
        flags = ("--head", "--node-ip-address=127.0.0.2", f"--port={port}", "--num-cpus=0", "--include-dashboard=false")
        stack.enter_context(node(folder / "head.log", *flags))
        nodes = [
            stack.enter_context(
                node(
                    folder / f"node{i}.log",
                    *(f"--address={address}", f"--node-ip-address=127.0.0.{i}", "--num-cpus=1"),
                    prefix=mount if may_mount and i == 5 else (),
                )
            )
            for i in (3, 4, 5)
        ]
        yield address, nodes


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_cluster_loses_a_node_and_no_run(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Three nodes train twelve runs. One is killed, one stops its process, and one does not see the folder."""
    out = folder / "runs"
    out.mkdir()

    def find_run(raylet: int) -> tuple[str, int] | None:
        """A run that the node trains and that has a checkpoint (it follows the results), with its process."""
        for pid, command in children(raylet).items():
            name = command.removeprefix("ray::")
            path = out / name
            if command.startswith("ray::slow") and (path / "results.jsonl").exists() and not (path / "done").exists():
                return (name, pid) if (path / "results.jsonl").read_text().count("\n") >= 2 else None
        return None

    with ray_cluster(folder, monkeypatch, out) as (address, nodes):
        process = start("--out", "runs", "--on", f"ray:{address}")
        raylets = [next(pid for pid, command in children(node).items() if "raylet/raylet" in command) for node in nodes]
        lost = []
        for raylet in raylets[:2]:
            found = until(lambda: process.poll() is not None or find_run(raylet))
            assert found is not True, process.communicate()
            run, pid = found
            if raylet == raylets[0]:
                os.kill(raylet, signal.SIGKILL)
            else:
                os.kill(pid, signal.SIGTERM)
            assert not (out / run / "done").exists()
            lost.append(run)
        output, _ = process.communicate(timeout=200)
    assert process.returncode == 0, output
    assert "12 of 12 runs done" in output
    finished = re.findall(r"^\[\d+/12\] (\S+)  test [\d.]+ %", output, re.MULTILINE)
    names = sorted(path.parent.name for path in out.glob("*/done"))
    assert len(names) == 12
    done = [run for run, event, _ in events(out) if event == "done"]
    assert sorted(done) == names, "not each run once"
    for each in lost:
        begun = [epoch for run, event, epoch in events(out) if (run, event) == (each, "begun")]
        assert len(begun) >= 2
        assert begun[0] == "epoch 0"
        assert begun[-1] != "epoch 0", "the run of the lost node did not go on from its checkpoint"
    assert {*names} <= {*finished}
    assert_same_as_local(out, names)
    capsys.readouterr()


def listening(pids: set[int]) -> set[str]:
    """The addresses on which these processes listen, as the kernel writes them."""
    sockets = set[str]()
    for pid in pids:
        with suppress(OSError):
            links = Path(f"/proc/{pid}/fd").iterdir()
            sockets |= {os.readlink(link)[8:-1] for link in links if os.readlink(link).startswith("socket:[")}
    table = "".join(Path(f"/proc/net/{name}").read_text() for name in ("tcp", "tcp6"))
    lines = [line.split() for line in table.splitlines()]
    return {line[1].partition(":")[0] for line in lines if line[3] == "0A" and line[9] in sockets}


@pytest.mark.slow
def test_a_local_cluster_is_closed_to_others_and_stops_cleanly(folder: Path) -> None:
    out = folder / "runs"
    process = start("--out", "runs", "--on", "ray", "--set", "seed=0", "--set", "method=slow", "--set", "epochs=60")
    results = out / "slow_pair-0.4_seed0" / "results.jsonl"
    until(lambda: process.poll() is not None or (results.exists() and results.read_text().count("\n") >= 2))
    assert process.poll() is None, process.communicate()
    below = children(process.pid)
    addresses = listening({*below})
    (temp,) = {Path(found) for found in re.findall(r"/\S*?/warpi-ray-\w+", " ".join(below.values()))}
    assert temp.stat().st_mode & 0o777 == 0o700
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=100)
    assert process.returncode == 130, output
    assert "warpi: stopped by SIGINT; resume with: warpi --use plugin.py sweep few.toml --out runs --on ray" in output
    assert addresses, "found no open port, not even Ray's own"
    assert addresses <= {"0100007F", "0000000000000000FFFF00000100007F"}, "not on 127.0.0.1 only"
    until(lambda: not [pid for pid in below if Path(f"/proc/{pid}/cmdline").exists()])
    assert not temp.exists()
    stopped = [epoch for _, event, epoch in events(out) if event == "stopped"]
    assert len(stopped) == 1
    assert not (results.parent / "done").exists()
    assert results.read_text().count("\n") == int(stopped[0].split()[1])


@pytest.mark.slow
def test_files_go_to_and_return_from_a_machine_that_does_not_see_the_folder(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run is stopped, and its second attempt begins with the checkpoint of the first."""
    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "RAY_USAGE_STATS_ENABLED"):
        monkeypatch.setenv(name, "")  # restores them after the test
    monkeypatch.setenv("PAUSE", "0.05")
    out = folder / "runs"
    seen = list[RunEvent]()
    with plugins.use(["plugin.py"]), on_ray.cluster("") as ray:
        plan = read_plan(Path("few.toml"), out, changes=["seed=0", "method=slow"])
        (job,) = plan.jobs
        inbox = ray.remote(Inbox).remote(str(out))
        code = on_ray.identity(("plugin.py",))
        there = on_ray.Sweep(plan, "a session", code, ("plugin.py",), os.getcwd(), folder / "no proof", inbox)

        def look() -> list[str]:
            seen.extend(RunEvent(**event) for event in ray.get(inbox.take.remote()))
            return [event.kind for event in seen]

        train = ray.remote(on_ray.train_run)
        first = train.remote(there, job, "cpu", False)
        until(lambda: look().count("epoch") >= 2)
        ray.cancel(first)
        until(lambda: "stopped" in look())
        path = out / job.name
        assert (path / "checkpoint.safetensors").exists()
        assert not (path / "done").exists()
        assert ray.get(train.remote(there, job, "cpu", False)) == ""
        look()
        with pytest.raises(UserError, match=r"needs a machine with 1 CPU core and 0\.5 GPUs, but those"):
            on_ray._prepare(ray, there, job, Place("ray", runs_per_gpu=2))
        failing = Job("failing", {**job.settings, "method": "ce", "lr": 1e30})
        assert ray.get(train.remote(there, failing, "cpu", False)) == "", "a failed run is a result"
        look()
        assert [event.kind for event in seen if event.run == "failing"] == ["begun", "failed"]
        broken = Job("broken", {**job.settings, "method": "broken"})
        assert ray.get(train.remote(there, broken, "cpu", False)) == ""
        for name, reason, details in (("failing", "loss", ""), ("broken", "ValueError: odd", "in step")):
            failed = json.loads((out / ".sweep" / name / "failed.json").read_text())
            assert failed["session"] == "a session"
            assert reason in failed["reason"]
            assert details in failed["details"]
        monkeypatch.setattr(on_ray, "catch_signals", lambda: nullcontext([signal.SIGTERM]))
        assert on_ray.train_run(there, replace(job, name="early"), "cpu", False) == ""
        look()
        assert [event.kind for event in seen if event.run == "early"] == ["stopped"], "before it was claimed"
        other = replace(there, identity={**code, "warpi": "0.1"})
        refused = ray.get(train.remote(other, job, "cpu", False))
    mine = [event for event in seen if event.run == job.name]
    assert mine[-1].kind == "done"
    begun = [event.epoch for event in mine if event.kind == "begun"]
    assert begun[0] == 0
    assert begun[1] >= 2, "the second attempt began again"
    assert re.fullmatch(rf"\S+ has warpi {warpi.__version__}, but the machine that started the sweep has 0.1", refused)
    assert_same_as_local(out, [job.name], "--set", "seed=0", "--set", "method=slow")
