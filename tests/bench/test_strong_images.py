"""Training with the strong recipe as a benchmark: `benchmarks/strong_images.py`."""

import json
import time
from pathlib import Path

import pytest
import torch

from benchmarks import strong_images
from warpi.runs.spec import DataCache

SHORT = {"epochs": 2, "batch_size": 64, "average": 0.9, "threads": 1, "seed": 0}


def test_a_run_leaves_its_folder_without_weights_and_a_summary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(strong_images, "COMMON", {"data": "digits", "val": 0.0, "limit": 300})
    settings = {"method": "warpi_plus", "noise": "pair:0.4", "meta": 50, "warm_up": 1.0, **SHORT}
    cache = DataCache()
    strong_images.run_one(tmp_path, "short", settings, None, time.monotonic() + 60, cache)
    strong_images.run_one(tmp_path, "late", settings, None, time.monotonic() - 1, cache)
    (summary,) = [json.loads(line) for line in (tmp_path / "summary.jsonl").read_text().splitlines()]
    assert summary["name"] == "short"
    assert summary["finished"]
    assert summary["epochs"] == 2
    assert summary["test_acc_one_view"] == pytest.approx(summary["test_acc"]), "digits are not mirrored"
    for name in ("selected", "selected_right", "recall_of_right", "memory_acc", "auroc_wrong"):
        assert 0 <= summary[name] <= 1
    assert {path.name for path in (tmp_path / "short").iterdir()} >= {"spec.json", "results.jsonl", "done"}
    assert not list(tmp_path.glob("*/checkpoint*"))
    assert not (tmp_path / "late").exists()


def test_auroc() -> None:
    wrong = torch.tensor([True, False, True, False])
    assert strong_images.auroc(torch.tensor([0.9, 0.1, 0.4, 0.3]), wrong) == 1
    assert strong_images.auroc(torch.tensor([0.9, 0.1, 0.2, 0.3]), wrong) == 0.75
