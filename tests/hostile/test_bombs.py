"""Small files that claim gigabytes are refused by one line, in little time and memory."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from bombs import write_bombs

from warpi.cli.app import main
from warpi.data.image_files import FileExamples
from warpi.datasets.image_folders import read_folder
from warpi.errors import UserError
from warpi.runs.reopen import reopen_without_data
from warpi.runs.run import fit
from warpi.training import checkpoint
from warpi.utils.limits import LIMITS, limit


def test_every_bomb_is_refused_in_little_time_and_memory(tmp_path: Path) -> None:
    """One process with limited memory and CPU time reads all of them."""
    bombs = write_bombs(tmp_path)
    program = str(Path(__file__).with_name("bombs.py"))
    read = subprocess.run([sys.executable, program, str(tmp_path)], capture_output=True, text=True, timeout=200)
    assert read.returncode == 0, read.stderr
    results: dict[str, Any] = json.loads(read.stdout)
    print(max(r["seconds"] for r in results.values()), "s,", max(r["peak_mib"] for r in results.values()), "MiB")
    tables = {f"convert {name}" for name in ("long.csv", "rows.parquet", "words.parquet")}
    assert results.keys() == {path.name for path in bombs.values()} | tables
    for name, result in results.items():
        expected = "ValueError" if name == "pixels.png" else "UserError"
        assert result["error"].startswith(expected), (name, result)
        assert result["seconds"] < 5, (name, result)
        assert result["peak_mib"] < 1024, (name, result)
        if name not in ("deep.json", "shape.npy", "shape.npz", "convert long.csv"):
            assert "WARPI_LIMIT_" in result["error"], (name, result)


def test_a_limit_is_set_by_an_environment_variable(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    table = tmp_path / "t.csv"
    table.write_text("a,label\n" + "1,p\n2,q\n" * 9)
    assert limit("LINE") == LIMITS["LINE"][0]
    monkeypatch.setenv("WARPI_LIMIT_LINE", "5")
    assert main(["fit", "--data", str(table), "--out", str(tmp_path / "run"), "--quiet"]) == 2
    monkeypatch.setenv("WARPI_LIMIT_LINE", "many")
    with pytest.raises(UserError, match="positive whole number"):
        limit("LINE")
    monkeypatch.setenv("WARPI_LIMIT_PIXELS", "-1")
    with pytest.raises(UserError, match="WARPI_LIMIT_PIXELS"):
        FileExamples("", ())


def test_too_many_files(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        for i in range(3):
            (tmp_path / name / f"{i}.png").touch()
    monkeypatch.setenv("WARPI_LIMIT_FILES", "2")
    with pytest.raises(UserError, match="WARPI_LIMIT_FILES"):
        read_folder(tmp_path)


def test_a_checkpoint_that_claims_huge_inputs_is_refused_before_the_network_is_built(tmp_path: Path) -> None:
    run = fit(tmp_path / "run", data="digits", method="ce", limit=200, epochs=1, quiet=True)
    file = run.path / "checkpoint.safetensors"
    state = checkpoint.load(file)
    form = state["data"]["form"]
    form["shape"] = [10**10]
    form["mean"], form["std"] = torch.zeros(1), torch.ones(1)
    if form.get("columns") is not None:
        form["columns"] = None
    file.write_bytes(checkpoint.pack(state, checkpoint.FORMAT))
    with pytest.raises(UserError, match="is damaged"):
        reopen_without_data(run.path)
