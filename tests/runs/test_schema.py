"""A damaged run folder: every command reports it in one line, without a traceback."""

import json
import shutil
from collections.abc import Iterator
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from warpi.cli.app import main
from warpi.training import checkpoint

JUNK = (None, True, -1, 10**30, float("nan"), "x", [], {"a": 1}, [[1], "b"])
COMMANDS = {
    "report": ["report", "RUN"],
    "report --json": ["report", "RUN", "--json", "OUT/rows.json"],
    "fit": ["fit", "--out", "RUN", "--resume", "--device", "cpu"],
    "predict": ["predict", "RUN", "--data", "OUT/new.npz", "--csv", "OUT/new.csv", "--device", "cpu"],
    "audit": ["audit", "RUN", "--device", "cpu"],
    "figures": ["figures", "RUN", "--arrays", "--device", "cpu"],
}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("stored") / "run"
    data = ["--data", "digits", "--noise", "pair:0.4", "--meta", "20", "--limit", "200"]
    assert main(["fit", *data, "--epochs", "2", "--out", str(out), "--device", "cpu", "--quiet"]) == 0
    np.savez(out.parent / "new.npz", x=np.zeros((2, 64), np.float32))
    return out


def variants(tree: Any, junk: Iterator[Any]) -> Iterator[Any]:
    """The tree with each of its parts removed, and with junk in place of each part."""
    yield next(junk)
    for key in tree if isinstance(tree, dict) else ():
        yield {k: v for k, v in tree.items() if k != key}
        for inner in variants(tree[key], junk):
            yield {**tree, key: inner}


def exit_code(command: str, run: Path) -> int:
    words = [word.replace("RUN", str(run)).replace("OUT", str(run.parent)) for word in COMMANDS[command]]
    try:
        return main(words)
    except SystemExit as e:
        return int(str(e.code))


@pytest.mark.parametrize("command", COMMANDS)
def test_values_of_the_wrong_kind(run: Path, tmp_path: Path, command: str, capsys: pytest.CaptureFixture[str]) -> None:
    """`spec.json` and `results.jsonl` with junk in place of each value."""
    copy = shutil.copytree(run, tmp_path / "run")
    codes: set[int] = set()
    shutil.copy(run.parent / "new.npz", tmp_path)
    for name in ("spec.json", "results.jsonl"):
        whole = (run / name).read_text()
        *before, tree = [whole] if name == "spec.json" else whole.splitlines(keepends=True)
        step = 1 if command == "report" else 11  # the others are slower
        for changed in islice(variants(json.loads(tree), cycle(JUNK)), 0, None, step):
            (copy / name).write_text("".join(before) + json.dumps(changed) + "\n")
            codes.add(exit_code(command, copy))
        shutil.copy(run / name, copy)
    assert codes == {0, 2}
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.parametrize("content", [b"", b"\xff\x00" * 99, b"[" * 99_999, b'{"epoch": 1}\n[3]\n'])
@pytest.mark.parametrize("name", ["spec.json", "results.jsonl", "checkpoint.safetensors"])
def test_other_content(
    run: Path, tmp_path: Path, name: str, content: bytes, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copy(run.parent / "new.npz", tmp_path)
    for command in COMMANDS:
        copy = shutil.copytree(run, tmp_path / "run", dirs_exist_ok=True)
        (copy / name).write_bytes(content)
        assert exit_code(command, copy) in (0, 2), command
        assert name != "spec.json" or f"{copy / name} is not" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("part", "junk"),
    [
        ("nets", "x"),
        ("optimizers", []),
        ("meta_optimizer", {"a": 1}),
        ("meta_loader", 3),
        ("generator", []),
        ("V", "x"),
    ],
)
def test_a_checkpoint_with_other_state(
    run: Path, tmp_path: Path, part: str, junk: object, capsys: pytest.CaptureFixture[str]
) -> None:
    """With a valid hash."""
    copy = shutil.copytree(run, tmp_path / "run")
    state = checkpoint.load(copy / "checkpoint.safetensors")
    checkpoint.save(copy / "checkpoint.safetensors", {**state, "method": {**state["method"], part: junk}})
    for command in ("audit", "fit"):
        assert exit_code(command, copy) == 2
        assert f"the checkpoint does not match in {part!r}" in capsys.readouterr().err
