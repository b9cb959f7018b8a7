"""Copies in the audit of a run: the columns of its table, and the file that stores them."""

import csv
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import warpi
from warpi.audit.make_audit import audit
from warpi.audit.result import Audit, read_audit
from warpi.cli import main
from warpi.errors import UserError
from warpi.runs.run import Run


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Two clouds. Row 1 is row 0 with the other label, row 3 is nearly a trusted row, row 5 is a test row."""
    folder = tmp_path_factory.mktemp("copies")
    rng = np.random.default_rng(0)
    y = np.arange(76) % 2
    cloud = (rng.normal(size=(76, 6)) + 6 * y[:, None]).astype(np.float32)
    x, own, test, y = cloud[:60], cloud[60:68], cloud[68:], y[:60]
    x[1] = x[0]
    x[59] += 500
    own[0] = x[3] + 1e-4
    test[1] = x[5]
    np.savez(folder / "d.npz", x=x, y=y, x_test=test, y_test=np.arange(8) % 2)
    np.savez(folder / "t.npz", x=own, y=np.arange(8) % 2)
    settings: dict[str, Any] = {"data": str(folder / "d.npz"), "trusted": str(folder / "t.npz"), "device": "cpu"}
    return warpi.fit(folder / "run", method="ce", net="linear", epochs=1, quiet=True, **settings)


@pytest.fixture(scope="module")
def made(run: Run) -> Audit:
    return audit(run)


def test_the_table_names_copies_contradictions_leaks_and_outliers(run: Run, made: Audit, tmp_path: Path) -> None:
    assert main(["audit", str(run.path), "--csv", str(tmp_path / "a.csv"), "--quiet"]) == 0
    with (tmp_path / "a.csv").open(newline="") as file:
        rows = {int(cells["row"]): cells for cells in csv.DictReader(file)}
    assert rows[0]["copy_group"] == rows[1]["copy_group"] == "0"
    assert [rows[i]["copy_kind"] for i in (0, 1, 2, 3, 5)] == ["exact", "exact", "", "near", "exact"]
    assert rows[0]["copy_labels_differ"] == rows[1]["copy_labels_differ"] == "True"
    assert rows[0]["copy_across_parts"] == "False"
    assert rows[3]["copy_across_parts"] == rows[5]["copy_across_parts"] == "True"
    assert rows[59]["is_outlier"] == "True"
    assert rows[59]["problem"] == ""
    assert made.copies is not None
    assert made.copies.leaks() == [("test", "train", 1), ("trusted", "train", 1)]
    assert made.summary()["copies"]["across_parts"] == {"train and trusted": 1, "train and test": 1}


def test_outliers_are_printed_even_if_there_is_no_copy(
    made: Audit, run: Run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert made.copies is not None
    none = replace(made.copies, group=np.full_like(made.copies.group, -1), similarity=made.copies.similarity * 0)
    assert none.has_findings
    assert none.unusual()[59] == "outlier"
    clean = replace(none, outlier_score=none.outlier_score * 0)
    assert not clean.has_findings
    assert replace(clean, skipped="10,001 rows are too many").has_findings
    for copies, n_lines in ((none, 2), (clean, 0)):
        monkeypatch.setattr(
            "warpi.audit.make_audit.audit", lambda *_, copies=copies, **__: replace(made, copies=copies)
        )
        assert main(["audit", str(run.path)]) == 0
        lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("copies: ")]
        assert len(lines) == n_lines
        assert all("outlier" in line for line in lines[1:])


def test_copies_are_stored_and_read_back(run: Run, made: Audit, tmp_path: Path) -> None:
    made.save(tmp_path)
    stored = read_audit(tmp_path)
    assert made.copies is not None
    assert stored.copies is not None
    assert stored.copies.columns() == made.copies.columns()
    assert stored.summary() == made.summary()
    again = audit(run)
    assert again.copies is not None
    assert again.copies.columns() == made.copies.columns()


@pytest.mark.parametrize(
    "change",
    [
        lambda copies: {"row": copies.row[:-1]},
        lambda copies: {"row": copies.row - 100},
        lambda copies: {"group": copies.group + 1000},
        lambda copies: {"group": copies.group * 1.5},
        lambda copies: {"similarity": copies.similarity * np.nan},
        lambda copies: {"of_data": ~copies.of_data},
        lambda copies: {"problem": copies.problem[:3]},
    ],
)
def test_damaged_copies_are_refused(made: Audit, tmp_path: Path, change: Callable[[Any], dict[str, Any]]) -> None:
    assert made.copies is not None
    replace(made, copies=replace(made.copies, **change(made.copies))).save(tmp_path)
    with pytest.raises(UserError, match="is damaged or was written by another version"):
        read_audit(tmp_path)
