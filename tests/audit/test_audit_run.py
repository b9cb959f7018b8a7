"""Audits of runs whose data stays in its file."""

import json
from pathlib import Path

import numpy as np
import pytest

import warpi.audit.result as result
from warpi.audit.any_model import audit_run
from warpi.audit.make_audit import audit
from warpi.audit.result import read_audit
from warpi.datasets import arrays
from warpi.runs.run import fit


def write(folder: Path, n: int) -> Path:
    """Features and noisy labels of three classes."""
    rng = np.random.default_rng(0)
    y = rng.integers(0, 3, n)
    x = rng.normal(size=(n, 5)) + 2 * np.eye(3, 5)[y]
    np.save(folder / "a.npy", x.astype(np.float16))
    np.save(folder / "a_labels.npy", np.where(rng.random(n) < 0.2, rng.integers(0, 3, n), y))
    return folder / "a.npy"


def test_large_runs_are_audited_in_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path, n=900)
    monkeypatch.setattr(arrays, "LARGE", 0)
    options = {"method": "ce", "net": "linear", "epochs": 5, "device": "cpu", "val": 0.1}
    run = fit(tmp_path / "run", data=str(path), **options)
    usual = audit(run, folds=0, rows="all", save=False)
    monkeypatch.setattr(audit_run, "MOST_ROWS", 100)
    monkeypatch.setattr(audit_run, "CHUNK", 256)
    monkeypatch.setattr(result, "_MANY", 100)
    large = audit(tmp_path / "run", rows="all", device="cpu")
    assert large.probabilities.dtype == np.float16
    assert np.array_equal(large.row, usual.row)
    assert np.array_equal(large.given, usual.given)
    assert np.abs(large.wrong_probability - usual.wrong_probability).mean() < 0.05  # without the correction by val rows
    assert (large.suggested == usual.suggested).mean() > 0.97
    stored = read_audit(tmp_path / "run")
    for name in ("row", "wrong_probability", "suggested", "probabilities", "is_label_issue"):
        assert np.array_equal(getattr(stored, name), getattr(large, name))
    assert stored.facts == json.loads(json.dumps(dict(large.facts)))
    large.to_csv(tmp_path / "audit.csv")
    assert len((tmp_path / "audit.csv").read_text().splitlines()) == 901
