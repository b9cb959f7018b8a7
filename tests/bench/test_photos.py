"""The benchmark of photos in the layout of Clothing1M: its files, its processes, and its table."""

import json
import shlex
import sys
from pathlib import Path

import pytest

from benchmarks.speed import photos
from warpi.datasets.load import read_dataset

COUNTS = {"noisy_train": 5, "clean_train": 1, "clean_val": 3, "clean_test": 2}


def test_photos_have_the_published_layout(tmp_path: Path) -> None:
    about = photos.write_photos(tmp_path, COUNTS, None, 1)
    assert about["photos"] == 11
    assert about["kilobytes_per_photo"] > 10
    data = read_dataset("clothing1m", root=tmp_path, image_size=16)
    assert data.y.tolist() == [0, 1, 2, 3, 4]
    assert data.meta is not None
    assert data.test is not None
    assert (len(data.meta), len(data.test)) == (3, 2)


def test_hours_for_the_real_data() -> None:
    row = {"method": "warpi", "rate": 1000.0, "step_rate": 1100.0, "parameters": 25_600_000}
    done = photos.with_projection(row, batch=128)
    assert done["hours"] == pytest.approx(10 * 1_010_526 / 1000 / 3600, abs=0.01)
    assert done["hours"] / 8 < done["hours_on_8"] < done["hours"] / 6
    assert done["share_of_step_rate"] == pytest.approx(0.909)


@pytest.mark.slow
def test_a_killed_run_is_resumed_and_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Real processes with reader processes and kill -9; a small network on a CPU instead of ResNet-50 on a GPU."""
    small = "--net conv4 --size 16 --batch 4 --steps 4 --warm-up 1 --precision 32 --device cpu --methods warpi"
    results = tmp_path / "results.json"
    monkeypatch.setattr(sys, "argv", ["photos", str(tmp_path), "--json", str(results), *shlex.split(small)])
    photos.main()
    capsys.readouterr()
    stored = json.loads(results.read_text())
    row = stored["warpi"]
    assert row["killed_and_resumed"]
    assert row["epochs"] == [1, 2]
    assert row["rate"] > 0
    assert row["step_rate"] > 0
    assert f"{row['rate']:,.0f}" in photos.make_page(stored)
