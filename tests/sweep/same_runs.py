"""Compare two run folders bit for bit, except for the seconds."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from warpi.training import checkpoint


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
