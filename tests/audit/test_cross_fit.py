"""Audits by `auto`, fitted several times, whatever method trained the run."""

from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import warpi
from warpi.audit import cross_fit as module
from warpi.audit.cross_fit import FITS, cross_fit
from warpi.audit.decisions import Choice, Store
from warpi.audit.make_audit import audit, load_or_make_audit
from warpi.audit.result import describe_rate
from warpi.auto.fit import AutoSettings
from warpi.auto.rows import Rows
from warpi.errors import UserError
from warpi.runs.run import Run

N = 90
RNG = np.random.default_rng(0)
Y = np.arange(N) % 3
X = (2 * np.eye(3)[Y] + 0.5 * RNG.normal(size=(N, 3))).astype(np.float32)
GIVEN = np.where(RNG.random(N) < 0.3, (Y + 1) % 3, Y)


@pytest.fixture(autouse=True)
def as_many_fits_as_usual(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "FITS", FITS)


@pytest.fixture
def run(tmp_path: Path) -> Run:
    verified = np.arange(N) < 10  # four of class 0
    np.savez(tmp_path / "a.npz", x=X, y=np.where(verified, Y, GIVEN), verified=verified)
    split = {"val": 0.1, "test": 0.1}
    return warpi.fit(tmp_path / "run", method="ce", data=str(tmp_path / "a.npz"), epochs=1, device="cpu", **split)


@pytest.fixture
def fitted(monkeypatch: pytest.MonkeyPatch) -> list[Rows]:
    """The rows of every fit. Each fit is fast: one model."""
    seen: list[Rows] = []
    original = module.fit_auto

    def record(rows: Rows, settings: AutoSettings) -> Any:
        assert not settings.measure
        seen.append(rows)
        return original(rows, AutoSettings(("logistic",), seed=settings.seed, measure=False))

    monkeypatch.setattr(module, "fit_auto", record)
    return seen


def test_every_method_is_audited_by_auto(run: Run, fitted: list[Rows]) -> None:
    result = audit(run)
    assert len(fitted) == FITS
    assert f"mean of {FITS} fits of auto" in result.facts["probabilities"]
    assert result.row.tolist() == list(range(10, N))  # held-out rows are also cross-fitted
    assert all(len(rows.given) == N - 10 for rows in fitted)
    assert np.array_equal(result.given, GIVEN[10:])
    assert (result.suggested == Y[10:]).mean() > 0.95
    trusted = [rows.n_trusted for rows in fitted]
    assert sum(trusted) == (FITS - 1) * 10  # each fit leaves out other trusted rows
    again = audit(run)
    assert len(fitted) == FITS, "nothing is fitted again"
    assert np.array_equal(again.wrong_probability, result.wrong_probability)
    assert audit(run, folds=0).facts["folds"] == 0
    assert len(fitted) == FITS, "folds=0 audits by the run itself"


@pytest.mark.parametrize("method", ["auto", "ce"])
def test_mistakes_are_found_without_trusted_rows(method: str, tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    y = np.arange(300) % 3
    given = np.where(rng.random(300) < 0.3, (y + 1) % 3, y)
    np.savez(tmp_path / "a.npz", x=(2 * np.eye(3)[y] + 0.5 * rng.normal(size=(300, 3))).astype(np.float32), y=given)
    data = str(tmp_path / "a.npz")
    result = audit(warpi.fit(tmp_path / "run", method=method, data=data, epochs=1, device="cpu"))
    wrong = given != y
    assert wrong[result.is_label_issue].mean() > 0.9
    assert result.is_label_issue[wrong].mean() > 0.5
    assert result.facts["noise_rate"]["rate"] == pytest.approx(wrong.mean(), abs=0.15)
    assert result.facts["noise_rate"]["low"] is None
    assert describe_rate(result.facts).endswith(
        "(model-based; without trusted rows it can be much too low or too high)"
    )


def test_stored_predictions(run: Run, fitted: list[Rows]) -> None:
    split = run.task.train
    first = cross_fit(run.method, split, run.path)
    other = torch.roll(split.y, 1)
    assert not np.array_equal(
        cross_fit(run.method, type(split)(split.examples, split.rows, other), run.path).p, first.p
    )
    assert len(fitted) == 2 * FITS, "predictions for other labels are not used"
    file = run.path / module.FILE
    with np.load(file) as stored:
        arrays = dict(stored)
    for name, values in (("p", arrays["p"] * np.nan), ("p", arrays["p"][:-1]), ("T", arrays["T"][:1])):
        np.savez(file, **{**arrays, name: values})
        with pytest.raises(UserError, match="delete it"):
            cross_fit(run.method, split, run.path)


def test_the_only_trusted_row_of_a_class_stays(tmp_path: Path, fitted: list[Rows]) -> None:
    verified = np.arange(N) < 4  # two of class 0, one of each other
    np.savez(tmp_path / "a.npz", x=X, y=np.where(verified, Y, GIVEN), verified=verified)
    run = warpi.fit(tmp_path / "run", method="ce", data=str(tmp_path / "a.npz"), epochs=1, device="cpu")
    result = cross_fit(run.method, run.task.train, None)
    assert all({1, 2} <= set(rows.y_trusted.tolist()) for rows in fitted)
    assert run.task.meta is not None
    assert run.task.meta.y[torch.from_numpy(result.left_out)].tolist() == [0, 0]


def test_a_run_of_auto_counts_as_one_fit(tmp_path: Path, fitted: list[Rows]) -> None:
    np.savez(tmp_path / "a.npz", x=X, y=GIVEN)
    run = warpi.fit(tmp_path / "run", model="logistic", data=str(tmp_path / "a.npz"), device="cpu")
    result = cross_fit(run.method, run.task.train, None)
    assert len(fitted) == FITS - 1
    own = run.method.out_of_sample()
    assert own is not None
    rest = (FITS * result.p - own.p.numpy()) / (FITS - 1)
    assert np.allclose(rest.sum(1), 1)
    assert rest.min() > -1e-9


def test_decisions_renew_the_audit(run: Run, fitted: list[Rows]) -> None:
    first = load_or_make_audit(run)
    row = int(first.row[0])
    assert np.array_equal(load_or_make_audit(run).posterior, first.posterior)
    with closing(Store(run.path / "review" / "decisions.sqlite", {})) as store:
        store.decide([Choice(row, 0, "change", "2", str(GIVEN[row]), None)], "tab", "1")
    second = load_or_make_audit(run)
    assert second.posterior[0].tolist() == [0, 0, 1]
    assert len(fitted) == FITS
