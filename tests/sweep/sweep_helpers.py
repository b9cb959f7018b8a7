"""A small sweep with a method that pauses, its log, and the comparison of its runs with those of another sweep."""

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from warpi.cli.app import main
from warpi.training import checkpoint

PLUGIN = '''
import os, time
from dataclasses import dataclass
from warpi import CE

@dataclass
class Slow(CE):
    """Plain training with pauses, which change no result."""

    def step(self, batch):
        time.sleep({pause})
        return super().step(batch)

@dataclass
class Broken(CE):
    """A method with a bug."""

    def step(self, batch):
        raise ValueError("odd")

METHODS = {{"slow": Slow(), "broken": Broken()}}
'''
SWEEP = """
[defaults]
data = "digits"
limit = 300
meta = 20
batch_size = 16
epochs = {epochs}
threads = 1
[grid]
noise = ["pair:0.4"]
seed = {seeds}
method = {methods}
"""


def write_sweep(folder: Path, pause: str, epochs: int, seeds: list[int], methods: list[str]) -> None:
    """Write `few.toml` and `plugin.py`, whose method `slow` pauses in each step for the seconds of an expression."""
    (folder / "plugin.py").write_text(PLUGIN.format(pause=pause))
    (folder / "few.toml").write_text(SWEEP.format(epochs=epochs, seeds=seeds, methods=json.dumps(methods)))


def sweep(*flags: str) -> int:
    """The exit code of `warpi sweep few.toml` in this folder."""
    try:
        return main(["--use", "plugin.py", "sweep", "few.toml", *flags])
    except SystemExit as e:
        return int(e.code or 0)


def read_log(logs: Iterable[Path]) -> list[list[str]]:
    """Run, event and epoch of each line in the logs of a sweep."""
    lines = "".join(log.read_text() for log in logs).splitlines()
    parts = [line.split("  ") for line in lines if line[:2] == "20"]
    return [part[1:4] for part in parts if len(part) >= 4]


def leaves(tree: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(tree, dict | list | tuple):
        for key, value in tree.items() if isinstance(tree, dict) else enumerate(tree):
            yield from leaves(value, f"{name}/{key}")
    else:
        yield name, tree


def results(path: Path) -> list[dict[str, float]]:
    lines = [json.loads(line) for line in (path / "results.jsonl").read_text().splitlines()]
    return [{key: value for key, value in line.items() if key != "seconds"} for line in lines]


def assert_same_runs(a: Path, b: Path) -> None:
    assert (a / "done").exists()
    x, y = (dict(leaves(checkpoint.load(path / "checkpoint.safetensors"))) for path in (a, b))
    assert x.keys() == y.keys()
    for name, value in x.items():
        assert torch.equal(value, y[name]) if isinstance(value, Tensor) else value == y[name], name
    assert results(a) == results(b)


def assert_same_as_local(out: Path, names: list[str], *flags: str) -> None:
    """Train the same runs on this machine, in the folder `local`, and compare."""
    assert sweep("--out", "local", "--jobs", "1", *flags) == 0
    for name in names:
        assert_same_runs(out / name, Path("local", name))
