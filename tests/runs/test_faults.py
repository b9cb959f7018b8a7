"""Processes that are killed at any moment: the run resumes from its last checkpoint and ends as if it had not stopped.

The moments are drawn in units of the time that a step takes on this machine.
"""

import contextlib
import json
import os
import random
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from forked import PROC, Forked
from PIL import Image
from torch import Tensor

from warpi.cli.app import main
from warpi.data.image_files import FileExamples
from warpi.training import checkpoint

pytestmark = pytest.mark.skipif(not (PROC / "self" / "stat").exists(), reason="watches processes through /proc")

EPOCHS = 4
STEPS = 20  # roughly, per epoch
FIT = ["fit", "--data", "digits", "--noise", "uniform:0.4", "--method", "warpi", "--threads", "1", "--limit", "300"]
FIT += ["--batch-size", "8", "--epochs", str(EPOCHS), "--resume"]


@pytest.fixture(scope="module", autouse=True)
def import_everything(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Trigger late imports here, so that no forked process repeats them."""
    assert main([*FIT, "--epochs", "1", "--quiet", "--out", str(tmp_path_factory.mktemp("imports"))]) == 0


class Lab:
    """A run folder in which processes train and are killed."""

    def __init__(self, folder: Path, fit: list[str] = FIT) -> None:
        self.folder, self.fit = folder, fit
        self.out, self.log = folder / "run", folder / "log"
        self.file = self.out / "checkpoint.safetensors"
        self.started: list[Forked] = []

    def start(self, seconds: float = 300.0, fresh: bool = False) -> Forked:
        """Train in a process with this time between checkpoints; `fresh`: start Python instead of only forking."""
        argv = [*self.fit, "--out", str(self.out), "--checkpoint-seconds", str(seconds), "--quiet"]
        command = [sys.executable, "-m", "warpi", *argv]
        self.started.append(Forked(lambda: os.execv(command[0], command) if fresh else main(argv), self.log))
        return self.started[-1]

    def stop(self) -> None:
        for process in self.started:  # running only if a test has failed
            process.send(signal.SIGKILL)

    def position(self) -> tuple[int, int]:
        """Epoch and step of the last checkpoint."""
        if not checkpoint.exists(self.file):
            return 0, 0
        at = checkpoint.load(self.file)["position"]
        return at["epoch"], at["step"]

    def end(self) -> tuple[dict[str, Any], list[dict[str, float]], str]:
        """Everything that a finished run leaves behind, except times."""
        assert (self.out / "done").exists()
        lines = [json.loads(line) for line in (self.out / "results.jsonl").read_text().splitlines()]
        for line in lines:
            line.pop("seconds")
        return dict(_leaves(checkpoint.load(self.file))), lines, (self.out / "spec.json").read_text()


def wait_for(child: Forked, file: Path, changes: int) -> None:
    """Wait until a file has been replaced a number of times, or the process has ended."""
    known = _version(file)
    while changes > 0 and not child.ended():
        if (now := _version(file)) not in (known, None):
            known, changes = now, changes - 1
        time.sleep(0.0005)


def _version(file: Path) -> tuple[int, int] | None:
    try:
        stat = file.stat()
    except FileNotFoundError:
        return None
    return stat.st_ino, stat.st_mtime_ns


def _leaves(tree: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Every value of a state by its path; tensors as dtype, shape and bytes."""
    if isinstance(tree, Tensor):
        yield name, (str(tree.dtype), tuple(tree.shape), tree.contiguous().numpy().tobytes())
    elif isinstance(tree, dict | list | tuple):
        for key, value in tree.items() if isinstance(tree, dict) else enumerate(tree):
            yield from _leaves(value, f"{name}/{key}")
    else:
        yield name, tree


def assert_same(lab: Lab, expected: Lab) -> None:
    a, b = lab.end(), expected.end()
    assert a[0].keys() == b[0].keys()
    assert [name for name in a[0] if a[0][name] != b[0][name]] == []
    assert a[1:] == b[1:]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Lab:
    lab = Lab(tmp_path_factory.mktemp("undisturbed"))
    assert lab.start().wait() == 0, lab.log.read_text()
    leaves = lab.end()[0]
    assert sum(isinstance(value, tuple) for value in leaves.values()) > 30, "networks, optimizers and generators"
    assert len(lab.end()[1]) == EPOCHS
    return lab


@pytest.fixture(scope="module")
def step(undisturbed: Lab) -> float:
    """Seconds per step of an undisturbed run on this machine."""
    lines = (undisturbed.out / "results.jsonl").read_text().splitlines()
    return min(json.loads(line)["seconds"] for line in lines) / STEPS


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[Lab]:
    lab = Lab(tmp_path)
    yield lab
    lab.stop()


@pytest.mark.parametrize(("seed", "kills"), [(0, 6), pytest.param(1, 12, marks=pytest.mark.slow)])
def test_killed_many_times(undisturbed: Lab, lab: Lab, step: float, seed: int, kills: int) -> None:
    """SIGKILL cannot be caught, so nothing can be stored at that moment."""
    rng = random.Random(seed)
    deaths: list[tuple[int, int]] = []
    for attempt in range(100):
        child = lab.start(seconds=rng.choice([0, 3, 6]) * step)
        if len(deaths) < kills:
            if attempt == 0:  # before there is any checkpoint
                wait_for(child, lab.out / "spec.json", 1)
            else:
                wait_for(child, lab.file, rng.randint(1, 2))
                time.sleep(rng.uniform(0, 3 * step))
            code = child.send(signal.SIGKILL)
        else:
            code = child.wait()
        if code == 0:
            break
        assert code == -signal.SIGKILL, lab.log.read_text()
        assert not (lab.out / "done").exists()
        deaths.append(lab.position())
    assert_same(lab, undisturbed)
    assert lab.log.read_text() == ""
    assert deaths == sorted(deaths), "no checkpoint is lost"
    assert len(deaths) >= kills - 2
    assert any(at > 0 for _, at in deaths), "some in the middle of an epoch"
    assert len(set(deaths)) >= kills // 2
    assert not list(lab.out.glob(".*.part")), "half-written files are removed"


def test_killed_with_readers_and_augmentation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two processes read random crops of images; they end when the process that trains is killed."""
    rng = np.random.default_rng(4)
    for i in range(48):
        file = tmp_path / "images" / "pqr"[i % 3] / f"{i}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(rng.integers(256, size=(16, 16, 3), dtype=np.uint8)).save(file)
    monkeypatch.setattr("warpi.datasets.image_folders.IN_MEMORY", 0)
    size, _, *others = FileExamples.__init__.__defaults__ or ()
    monkeypatch.setattr(FileExamples.__init__, "__defaults__", (size, 2, *others))  # `workers`
    fit = ["fit", "--data", str(tmp_path / "images"), "--method", "ce", "--net", "mlp", "--image-size", "12"]
    fit += ["--batch-size", "4", "--epochs", "3", "--threads", "1", "--resume"]
    whole, lab = Lab(tmp_path / "whole", fit), Lab(tmp_path / "lab", fit)
    for each in (whole, lab):
        each.folder.mkdir()
    assert whole.start().wait() == 0, whole.log.read_text()
    deaths = []
    with contextlib.ExitStack() as stack:
        stack.callback(lab.stop)
        for k in range(3):
            child = lab.start(seconds=0.0)
            wait_for(child, lab.file, 3 + 4 * k)
            readers = readers_of(child)
            assert len(readers) == 2
            assert child.send(signal.SIGKILL) == -signal.SIGKILL, lab.log.read_text()
            deaths.append(lab.position())
            assert_end(readers)
        assert lab.start().wait() == 0, lab.log.read_text()
    assert any(step > 0 for _, step in deaths)
    assert deaths == sorted(deaths)
    assert_same(lab, whole)


def readers_of(child: Forked) -> list[int]:
    """The processes that another has started."""
    listed = (PROC / str(child.pid) / "task").glob("*/children")
    return [int(number) for file in listed for number in file.read_text().split()]


def assert_end(processes: list[int]) -> None:
    end = time.monotonic() + 20
    while any((PROC / str(number)).exists() for number in processes):
        assert time.monotonic() < end, "a reader goes on without the process that trains"
        time.sleep(0.01)


@pytest.mark.parametrize(
    ("number", "code", "fresh"),
    [
        (signal.SIGTERM, 143, None),
        (signal.SIGUSR2, 140, None),  # from a SLURM cluster, before a time limit
        (signal.SIGINT, 130, None),
        pytest.param(signal.SIGINT, 130, 2, marks=pytest.mark.slow),  # the third process is not only forked
    ],
)
def test_stopped_by_a_signal(
    undisturbed: Lab, lab: Lab, step: float, number: signal.Signals, code: int, fresh: int | None
) -> None:
    """After SIGTERM, Ctrl-C or SIGUSR2 a checkpoint is written at once, and the message says how to resume."""
    rng = random.Random(code)
    stops: list[tuple[int, int]] = []
    for attempt in range(4):
        child = lab.start(fresh=attempt == fresh)
        while not child.catches(signal.SIGTERM):  # training has begun
            assert not child.ended(), lab.log.read_text()
            time.sleep(0.0005)
        time.sleep(rng.uniform(0, STEPS * step))
        ended_with = child.send(number)
        if ended_with == 0:
            break
        assert ended_with == code, lab.log.read_text()
        stops.append(lab.position())
    if not (lab.out / "done").exists():
        assert lab.start().wait() == 0
    assert_same(lab, undisturbed)
    assert len(stops) >= 2
    assert stops == sorted(stops)
    assert any(at > 0 for _, at in stops), "the signal caused these checkpoints"
    line = f"warpi: stopped by {number.name}; resume with: warpi fit --out {lab.out} --resume\n"
    assert lab.log.read_text() == line * len(stops)


@pytest.mark.parametrize("kills", [20, pytest.param(200, marks=pytest.mark.slow)])
def test_killed_while_it_writes(tmp_path: Path, kills: int) -> None:
    """The last complete checkpoint always loads; a half-written file is never used."""
    rng = random.Random(3)
    file, log = tmp_path / "checkpoint.safetensors", tmp_path / "log"

    def save_forever(n: int) -> None:
        while True:
            checkpoint.save(file, {"n": n, "x": torch.full((250_000,), float(n))})
            n += 1

    first = Forked(lambda: save_forever(1), log)
    wait_for(first, file, 1)
    began = time.perf_counter()
    wait_for(first, file, 10)
    a_write = (time.perf_counter() - began) / 10
    assert first.send(signal.SIGKILL) == -signal.SIGKILL
    n = 10
    n_halves = 0
    for k in range(kills):
        child = Forked(lambda: save_forever(n + 1), log)
        wait_for(child, file, rng.randint(0, 1))  # a process takes a while until its first write
        if k % 2:
            time.sleep(rng.uniform(0, 2 * a_write))
        else:  # as soon as a half-written file exists
            while not list(tmp_path.glob(".*.part")):
                assert not child.ended(), log.read_text()
        assert child.send(signal.SIGKILL) == -signal.SIGKILL, log.read_text()
        halves = list(tmp_path.glob(".*.part"))
        n_halves += len(halves)
        for half in halves:
            half.unlink()
        state = checkpoint.load(file)
        assert state["n"] >= n, "no checkpoint is lost"
        assert (state["x"] == state["n"]).all()
        n = state["n"]
    assert n_halves >= kills // 10, "some kills came during a write"


def test_two_processes_in_one_folder(undisturbed: Lab, lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    """One is paused for longer than its lease. The other takes over, and the first writes nothing when it wakes up."""
    monkeypatch.setenv("WARPI_LEASE_SECONDS", "0.5")
    first = lab.start(seconds=0.0)
    wait_for(first, lab.file, 2)
    os.kill(first.pid, signal.SIGSTOP)
    assert not (lab.out / "done").exists()
    assert lab.start().wait() == 0
    before = {path: path.read_bytes() for path in lab.out.iterdir()}
    assert first.send(signal.SIGCONT) == 2
    assert f"warpi: another process has taken over {lab.out}, because" in lab.log.read_text()
    assert {path: path.read_bytes() for path in lab.out.iterdir()} == before
    assert_same(lab, undisturbed)
