"""Two sweeps of one file share a folder, and are killed and paused: each run is done once, and none is lost."""

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from forked import Chaos, Forked

from warpi.cli.app import main
from warpi.runs.run_folder import RunFolder
from warpi.training import checkpoint
from warpi.utils import leases

SECONDS = 0.4  # of silence, until another process may take over
FILE = """
[defaults]
data = "digits"
limit = 120
noise = "pair:0.4"
method = "ce"
net = "linear"
epochs = {epochs}
batch_size = 60
threads = 1
[grid]
seed = {seeds}
"""


class Observed:
    """What one process does to the folders of runs, as lines of a log.

    It also makes epochs last longer, and lets the last two runs end only after the file `calm` exists.
    """

    def __init__(self, log: Path, calm: Path, runs: int, epochs: int) -> None:
        self.log = log
        self.calm = calm
        self.runs = runs
        self.epochs = epochs
        self.known: int | None = None  # the checkpoint that this process has read or written last
        self.load, self.save, self.append, self.finish = (
            checkpoint.load,
            checkpoint.save,
            RunFolder.append,
            RunFolder.finish,
        )

    def install(self) -> None:
        """Only in a forked process, since nothing is undone."""
        os.fsync = lambda _: None  # the machine does not lose power here
        checkpoint.load = self.observed_load
        checkpoint.save = self.observed_save
        observed = self

        def append(folder: RunFolder, record: dict[str, float]) -> None:
            time.sleep(0.08)
            if record["epoch"] == observed.epochs:
                observed.wait(folder.path.parent)
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

    def wait(self, out: Path) -> None:
        while not self.calm.exists() and len(list(out.glob("*/done"))) >= self.runs - 2:
            time.sleep(0.02)

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


@pytest.fixture
def started() -> Iterator[list[Forked]]:
    processes: list[Forked] = []
    yield processes
    for process in processes:
        process.end()


def content(folder: Path) -> tuple[str, list[dict[str, float]]]:
    """Weights and results of a finished run, without times."""
    records = [json.loads(line) for line in (folder / "results.jsonl").read_text().splitlines()]
    for record in records:
        record.pop("seconds")
    state = checkpoint.load(folder / "checkpoint.safetensors")
    return checkpoint.digest(state["method"]), records


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("disturbances", "seeds", "epochs"), [(12, 4, 25), pytest.param(200, 12, 60, marks=pytest.mark.slow)]
)
def test_two_sweeps_that_are_killed_and_paused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, started: list[Forked], disturbances: int, seeds: int, epochs: int
) -> None:
    """SIGKILL, and SIGSTOP for up to one and a half times the time after which another process takes over."""
    monkeypatch.setenv(leases.VARIABLE, str(SECONDS))
    file, log, output, calm = (tmp_path / name for name in ("sweep.toml", "log", "output", "calm"))
    file.write_text(FILE.format(epochs=epochs, seeds=list(range(seeds))))
    flags = ["--jobs", "1", "--device", "cpu"]
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", lambda _: None)
        assert main(["sweep", str(file), "--out", str(tmp_path / "alone"), *flags]) == 0
    out = tmp_path / "shared"

    def coordinator(_: int) -> Forked:
        def work() -> int:
            torch.set_num_threads(1)
            Observed(log, calm, seeds, epochs).install()
            return main(["sweep", str(file), "--out", str(out), *flags])

        started.append(Forked(work, output))
        return started[-1]

    chaos = Chaos(coordinator, 2, seed=0)
    while chaos.kills + chaos.pauses < disturbances:
        time.sleep(chaos.rng.uniform(0.1, 1.1))
        chaos.disturb(1.5 * SECONDS)
    calm.touch()
    assert [process.wait(600) for process in chaos.running] == [0, 0], output.read_text()
    assert min(chaos.kills, chaos.pauses) >= disturbances / 4
    events: dict[str, list[tuple[int, str, int]]] = {}
    for line in log.read_text().splitlines():
        name, number, event, epoch = json.loads(line)
        events.setdefault(name, []).append((number, event, epoch))
    names = sorted(path.name for path in (tmp_path / "alone").glob("ce_*"))
    assert len(names) == seeds
    assert sorted(path.name for path in out.glob("ce_*")) == sorted(events) == names
    for name in names:
        assert (out / name / "done").exists(), "lost"
        kinds = [event for _, event, _ in events[name]]
        assert "OVERWRITTEN" not in kinds, "a late process has replaced a checkpoint"
        assert kinds.count("done") <= 1, "done twice"
        assert "done" not in kinds[:-1], "trained after it was done"
        saved = [(number, epoch) for number, event, epoch in events[name] if event == "saved"]
        assert saved == sorted(saved), "an earlier owner has written after a later one"
        assert content(out / name) == content(tmp_path / "alone" / name)
        hidden = [path.name for path in (out / name).glob(".*")]
        assert len(hidden) == 1, "one lease and no incomplete file remain"
    owners = sum(len({number for number, _, _ in each}) for each in events.values())
    print(f"{chaos.kills} kills, {chaos.pauses} pauses, {owners - seeds} owners took over and stored checkpoints")
    assert owners - seeds >= disturbances / 8, "few runs were taken over"
