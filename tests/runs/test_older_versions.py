"""Runs of older versions open and resume.

Each file in `older` holds a run as it was after its first epoch, the results of both epochs, and the predictions of
that version. `warpi fit --method mwnet --net mlp --epochs 2 --test 0.2 --threads 1` made those on tables, `warpi fit
--data cifar10 --root data --noise flip:0.4 --meta 20 --method ce --net conv4 --momentum 0 --epochs 2 --batch-size 32
--threads 1` the one on generated images in the layout of CIFAR-10, `warpi fit --method mwnet --net mlp --epochs 2
--batch-size 16 --threads 1` the one on a folder of images.

`fewshot` is a few-shot run that was stopped after 8 of 20 steps, with the results of a whole run and the accuracies
that were measured on it. `sweep` is a sweep of two runs, of which the second has been removed, and its results.
"""

import csv
import json
import zipfile
from pathlib import Path

import pytest

from warpi.cli.app import main

FOLDER = Path(__file__).with_name("older")
FEWSHOT, SWEEP = FOLDER / "0.1.0-fewshot.zip", FOLDER / "0.1.0-sweep.zip"
OLDER = sorted({*FOLDER.glob("*.zip")} - {FEWSHOT, SWEEP})


def _results(path: Path) -> list[dict[str, float]]:
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    times = ("seconds", "episodes_per_s")
    return [{name: value for name, value in line.items() if name not in times} for line in lines]


def _predictions(path: Path) -> list[tuple[str, list[float]]]:
    with path.open(newline="") as file:
        return [
            (line["predicted_label"], [float(value) for name, value in line.items() if name.startswith("p_")])
            for line in csv.DictReader(file)
        ]


@pytest.mark.parametrize("archive", OLDER, ids=lambda path: path.stem)
def test_a_run_of_an_older_version_resumes_and_predicts_the_same(
    archive: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    zipfile.ZipFile(archive).extractall()
    assert main(["check", "run"]) == 0
    assert main(["fit", "--out", "run", "--resume", "--quiet"]) == 0
    for now, then in zip(_results(Path("run/results.jsonl")), _results(Path("results.jsonl")), strict=True):
        assert now == pytest.approx(then, rel=1e-5)
    (new,) = Path().glob("new.*")
    assert main(["predict", "run", "--data", str(new), "--csv", "now.csv"]) == 0
    for (label, row), (expected, probabilities) in zip(
        _predictions(Path("now.csv")), _predictions(Path("predicted.csv")), strict=True
    ):
        assert label == expected
        assert row == pytest.approx(probabilities, abs=1e-5)
    assert main(["report", "run"]) == 0
    assert main(["audit", "run", "--folds", "0", "--quiet"]) == 0


def test_a_few_shot_run_of_an_older_version_resumes_and_is_evaluated_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    zipfile.ZipFile(FEWSHOT).extractall()
    assert main(["fewshot", "fit", "--out", "run", "--resume", "--quiet"]) == 0
    for now, then in zip(_results(Path("run/results.jsonl")), _results(Path("results.jsonl")), strict=True):
        assert now == pytest.approx(then, rel=1e-4)
    assert main(["fewshot", "evaluate", "run", "--tasks", "50", "--json", "now.json"]) == 0
    now, then = (json.loads(Path(name).read_text()) for name in ("now.json", "evaluated.json"))
    assert _mean(now) == pytest.approx(_mean(then), rel=1e-4)


def _mean(evaluated: object) -> float:
    rows = evaluated["rows"] if isinstance(evaluated, dict) else evaluated
    assert isinstance(rows, list)
    return float(rows[0]["mean"])


def test_a_sweep_of_an_older_version_trains_only_what_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    zipfile.ZipFile(SWEEP).extractall()
    done = Path("runs/ce_pair-0.3_seed0/results.jsonl").read_bytes()
    with pytest.raises(SystemExit):  # it held out rows for testing
        main(["sweep", "sweep.toml", "--set", "method=ce", "--jobs", "1"])
    text = " ".join(capsys.readouterr().err.split())
    assert (
        "was started with test = 0.25, the default of an older version; now it would be test = 0.0; to keep its" in text
    )
    plan = Path("sweep.toml")
    plan.write_text(plan.read_text().replace("epochs = 2", "epochs = 2\nval = 0.1\ntest = 0.25"))
    assert main(["sweep", "sweep.toml", "--jobs", "1"]) == 0
    assert Path("runs/ce_pair-0.3_seed0/results.jsonl").read_bytes() == done
    new = _results(Path("runs/glc_pair-0.3_seed0/results.jsonl"))
    for now, then in zip(new, _results(Path("expected/results.jsonl")), strict=True):
        assert now == pytest.approx(then, rel=1e-5)
    assert main(["report", "runs"]) == 0
    assert "glc" in capsys.readouterr().out


def test_there_are_older_versions() -> None:
    assert len(OLDER) >= 5
