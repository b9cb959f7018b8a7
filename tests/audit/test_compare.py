"""`warpi compare`: methods next to the candidates of auto, on trusted rows that they have not seen."""

import json
from pathlib import Path

import numpy as np
import pytest

import warpi
from warpi.audit.compare import compare
from warpi.cli import main
from warpi.errors import UserError
from warpi.runs.reopen import reopen


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("compare")
    rng = np.random.default_rng(0)
    y = np.arange(180) % 3
    x = rng.normal(size=(180, 3)) + 3 * np.eye(3)[y]
    given = np.where(rng.random(180) < 0.3, (y + 1) % 3, y)
    np.savez(path / "x.npz", x=x[:150], y=given[:150])
    np.savez(path / "trusted.npz", x=x[150:], y=y[150:])
    warpi.fit(path / "run", data=str(path / "x.npz"), trusted=str(path / "trusted.npz"), device="cpu", model="knn")
    return path


def test_methods_are_added_to_the_candidates(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = json.loads((folder / "run/choice.json").read_text())
    assert main(["compare", str(folder / "run"), "--methods", "clean_only", "--folds", "2", "--device", "cpu"]) == 0
    out = capsys.readouterr()
    assert "clean_only" in out.out
    assert "method 1 of 1: clean_only" in out.err
    after = json.loads((folder / "run/choice.json").read_text())
    assert after[: len(before)] == before
    assert after[-1]["candidate"] == "clean_only"
    assert after[-1]["score"] > 0.8
    assert 0 < after[-1]["error"] < 0.2
    assert after[-1]["weight"] == 0
    assert main(["compare", str(folder / "run"), "--methods", "clean_only", "--folds", "2", "--device", "cpu"]) == 0
    again = json.loads((folder / "run/choice.json").read_text())
    assert [entry["candidate"] for entry in again] == [entry["candidate"] for entry in after]  # not listed twice


def test_what_does_not_fit_is_left_out(folder: Path) -> None:
    run = reopen(folder / "run", "cpu")
    entries = compare(run, ["ce", "glc"], budget=1e-9)
    assert [entry["note"] for entry in entries[-2:]] == ["left out: no time"] * 2
    assert entries[-1]["score"] is None
    assert compare(run, ["jocor"], folds=2)[-1]["note"].startswith("left out: JoCoR needs the noise rate")


def test_wrong_arguments(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UserError, match="did you mean"):
        compare(reopen(folder / "run", "cpu"), ["clean_onli"])
    for argv in ([], [str(folder / "run"), "--out", "x"], ["--data", "digits"]):
        assert main(["compare", *argv]) == 2
        assert "pass either a run folder, or --data and --out" in capsys.readouterr().err


def test_a_run_of_another_method(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It has no candidates, and its folder does not change."""
    run = tmp_path / "ce"
    trusted = str(folder / "trusted.npz")
    warpi.fit(run, data=str(folder / "x.npz"), trusted=trusted, method="ce", epochs=1, device="cpu")
    assert main(["compare", str(run), "--methods", "clean_only", "--device", "cpu"]) == 2
    assert "candidates of auto" in capsys.readouterr().err
    assert not (run / "choice.json").exists()
