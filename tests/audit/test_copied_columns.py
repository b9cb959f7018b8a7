"""Ids and other columns of a table in the lists about its rows."""

import csv
from pathlib import Path

import numpy as np
import pytest

import warpi
from warpi.cli.app import main
from warpi.data.numeric import Columns
from warpi.datasets.columns.copied import insert_copied, read_copied_columns
from warpi.errors import UserError

N = 60


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("copied") / "t.csv"
    rng = np.random.default_rng(0)
    lines = ["code,size,weight,city,kind,split"]
    for i in range(N):
        y = i % 2
        cells = [f"A-{i:03d}x", f"{rng.normal() + 3 * y:.3f}", f"{rng.normal():.3f}", "Bonn", "ab"[y]]
        lines.append(",".join([*cells, "test" if i == 5 else "train"]))
    path.write_text("\n".join(lines) + "\n")
    return path


def read(path: Path) -> list[dict[str, str]]:
    return list(csv.DictReader(path.read_text().splitlines()))


def test_which_columns_are_ids(table: Path) -> None:
    dataset = warpi.load_dataset(str(table), label="kind")[0]
    assert isinstance(dataset.encoding, Columns)
    copied = read_copied_columns(table, dataset.encoding)
    assert list(copied) == ["code"]  # `city` is not a feature either, but always the same
    assert copied["code"] == [f"A-{i:03d}x" for i in range(N) if i != 5]
    assert len(read_copied_columns(table, dataset.encoding, part=None)["code"]) == N
    assert list(read_copied_columns(table, dataset.encoding, ["size"], ["city", "code"])) == ["size", "city", "code"]
    assert read_copied_columns("digits", None) == {}
    with pytest.raises(UserError, match="no column 'name'; its columns are code, size"):
        read_copied_columns(table, dataset.encoding, ["name"])
    with pytest.raises(UserError, match="is not one"):
        read_copied_columns("digits", None, keep=["a"])
    filled = insert_copied({"row": [7, 8], "b": [1, 2]}, {"b": ["x", "y"]}, [1, 0])
    assert {name: list(cells) for name, cells in filled.items()} == {"row": [7, 8], "data_b": ["y", "x"], "b": [1, 2]}


def test_commands(table: Path, tmp_path: Path) -> None:
    run = str(tmp_path / "run")
    warpi.fit(run, data=str(table), label="kind", method="ce", epochs=1, device="cpu")
    ids = [f"A-{i:03d}x" for i in range(N) if i != 5]
    audited, picked, predicted = (tmp_path / f"{name}.csv" for name in ("audit", "pick", "predict"))
    assert main(["audit", run, "--folds", "0", "--csv", str(audited), "--keep", "city", "--quiet"]) == 0
    assert [(cells["code"], cells["city"]) for cells in read(audited)] == [(name, "Bonn") for name in ids]
    assert main(["pick", "10", run, "--csv", str(picked)]) == 0
    assert all(cells["code"] == ids[int(cells["row"])] for cells in read(picked))
    assert main(["predict", run, "--data", str(table), "--csv", str(predicted), "--id", "code,weight"]) == 0
    lines = read(predicted)
    assert [cells["code"] for cells in lines] == [f"A-{i:03d}x" for i in range(N)]
    assert list(lines[0])[:4] == ["row", "code", "weight", "predicted"]
    assert main(["pick", "10", "--data", str(table), "--label", "kind", "--csv", str(picked), "--id", "weight"]) == 0
    assert "weight" in read(picked)[0]
