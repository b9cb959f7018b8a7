"""Two sweeps of one file share a folder, and are killed and paused: each run is done once, and none is lost."""

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from forked import Chaos
from sweep_helpers import assert_same_runs

from warpi.cli.app import main
from warpi.runs.run_folder import RunFolder
from warpi.training import checkpoint
from warpi.utils import leases

SECONDS = 0.3  # of silence, until another process may take over
FILE = """
[defaults]
data = "digits"
limit = 400
noise = "pair:0.4"
method = "ce"
net = "linear"
epochs = 30
batch_size = 150
threads = 1
[grid]
seed = [0]
"""
FLAGS = ["--jobs", "1", "--device", "cpu"]


class Observed:
    """What one process does to the folders of runs, as lines of a log. It also makes epochs last longer."""

    def __init__(self, log: Path) -> None:
        self.log = log
        self.known: int | None = None  # the checkpoint that this process has read or written last
        self.load, self.save = checkpoint.load, checkpoint.save
        self.append, self.finish = RunFolder.append, RunFolder.finish

    def install(self) -> None:
        """Only in a forked process, since nothing is undone."""
        os.fsync = lambda _: None  # the machine does not lose power here
        checkpoint.load = self.observed_load
        checkpoint.save = self.observed_save
        observed = self

        def append(folder: RunFolder, record: dict[str, float]) -> None:
            time.sleep(0.05)
            observed.append(folder, record)

        def finish(folder: RunFolder) -> None:
            number = self.number(folder.path)
            observed.finish(folder)
            observed.write(folder.path, number, "done", 0)

        RunFolder.append = append  # type: ignore[method-assign]
        RunFolder.finish = finish  # type: ignore[method-assign]

    def observed_load(self, path: Path, *more: Any) -> dict[str, Any]:
        state = self.load(path, *more)
        self.known = os.stat(path).st_ino
        return state

    def observed_save(self, path: Path, state: dict[str, Any]) -> None:
        """The checkpoint that is replaced must be one that this owner has read or written."""
        number = self.number(path.parent)
        before = os.stat(path).st_ino if path.exists() else None
        self.save(path, state)  # raises if another process has taken over
        expected = self.known if state["position"]["epoch"] > 1 else before
        self.write(path.parent, number, "saved" if before == expected else "OVERWRITTEN", state["position"]["epoch"])
        self.known = os.stat(path).st_ino

    @staticmethod
    def number(folder: Path) -> int:
        lease = leases.held_lease(folder / "file")
        assert lease is not None
        return lease.number

    def write(self, folder: Path, number: int, event: str, epoch: int) -> None:
        line = json.dumps([folder.name, number, event, epoch]) + "\n"
        descriptor = os.open(self.log, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
        os.write(descriptor, line.encode())
        os.close(descriptor)


def name_of(path: Path) -> str:
    return path.name


def sweep_one_by_one(file: Path, out: Path, calm: Path) -> int:
    """Sweep one run after the other, so that two processes always compete for the same run, until all is calm."""
    seed = len(list(out.glob("*/done")))
    while seed == 0 or not calm.exists() or len(list(out.glob("ce_*"))) > seed:
        if code := main(["sweep", str(file), "--out", str(out), "--set", f"seed=[{seed}]", *FLAGS]):
            return code
        seed += 1
    return 0


@pytest.mark.timeout(900)
@pytest.mark.parametrize("disturbances", [12, pytest.param(200, marks=pytest.mark.slow)])
def test_two_sweeps_that_are_killed_and_paused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, disturbances: int
) -> None:
    """SIGKILL, and SIGSTOP for two to three times as long as it takes until the other process takes over."""
    monkeypatch.setenv(leases.VARIABLE, str(SECONDS))
    file, log, output, calm = (tmp_path / name for name in ("sweep.toml", "log", "output", "calm"))
    file.write_text(FILE)
    alone, out = tmp_path / "alone", tmp_path / "shared"
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", lambda _: None)
        assert main(["sweep", str(file), "--out", str(alone), *FLAGS]) == 0  # also triggers late imports

    def coordinate(_: int) -> int:
        torch.set_num_threads(1)
        Observed(log).install()
        return sweep_one_by_one(file, out, calm)

    with Chaos(coordinate, 2, output) as chaos:
        chaos.disturb(disturbances, (0.1, 0.9), 3 * SECONDS)
        calm.touch()
        chaos.wait(600)
    events: dict[str, list[tuple[int, str, int]]] = {}
    for line in log.read_text().splitlines():
        name, number, event, epoch = json.loads(line)
        events.setdefault(name, []).append((number, event, epoch))
    seeds = list(range(len(events)))
    assert len(seeds) >= disturbances / 20
    assert (
        sorted(events) == sorted(f"ce_pair-0.4_seed{seed}" for seed in seeds) == sorted(map(name_of, out.glob("ce_*")))
    )
    assert main(["sweep", str(file), "--out", str(alone), "--set", f"seed={seeds}", *FLAGS]) == 0
    for name in events:
        assert (out / name / "done").exists(), "lost"
        kinds = [event for _, event, _ in events[name]]
        assert "OVERWRITTEN" not in kinds, "a late process has replaced a checkpoint"
        assert kinds.count("done") <= 1, "done twice"
        assert "done" not in kinds[:-1], "trained after it was done"
        saved = [(number, epoch) for number, event, epoch in events[name] if event == "saved"]
        assert saved == sorted(saved), "an earlier owner has written after a later one"
        assert_same_runs(out / name, alone / name)
        hidden = list(out.joinpath(name).glob(".*"))
        assert len(hidden) == 1, "one lease and no incomplete file remain"
    owners = sum(len({number for number, _, _ in each}) for each in events.values())
    print(f"{len(seeds)} runs, {chaos.kills} kills, {chaos.pauses} pauses, {owners - len(seeds)} takeovers")
    assert owners - len(seeds) >= disturbances / 8, "few runs were taken over"
