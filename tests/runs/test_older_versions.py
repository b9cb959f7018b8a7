"""Runs of older versions open and resume.

Each file in `older` holds a run as it was after its first epoch, the results of both epochs, and the predictions of
that version. `warpi fit --method mwnet --net mlp --epochs 2 --test 0.2 --threads 1` made those on tables, `warpi fit
--data cifar10 --root data --noise flip:0.4 --meta 20 --method ce --net conv4 --momentum 0 --epochs 2 --batch-size 32
--threads 1` the one on generated images in the layout of CIFAR-10.
"""

import csv
import json
import zipfile
from pathlib import Path

import pytest

from warpi.cli.app import main

OLDER = sorted(Path(__file__).with_name("older").glob("*.zip"))


def _results(path: Path) -> list[dict[str, float]]:
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return [{name: value for name, value in line.items() if name != "seconds"} for line in lines]


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


def test_there_are_older_versions() -> None:
    assert len(OLDER) >= 4
