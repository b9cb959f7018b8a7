"""Tables that are converted block by block: the same features, labels and runs as when they are read at once."""

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from pyarrow import parquet

from warpi.cli.app import main
from warpi.data.mapped import MappedExamples
from warpi.datasets import arrays
from warpi.datasets.columns import table_blocks, to_npy
from warpi.datasets.columns.to_npy import convert_table, read_table_form
from warpi.datasets.load import read_dataset
from warpi.errors import UserError
from warpi.runs.predictions import predict
from warpi.runs.run import fit


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table_blocks, "ROWS", 17)
    monkeypatch.setattr(table_blocks, "_CSV_BYTES", 700)


def make_columns(n: int = 120, **more: Any) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    y = rng.integers(0, 2, n)
    size = [round(float(v), 3) for v in rng.normal(2 * y)]
    size[3] = None  # type: ignore[call-overload]
    return {
        "id": list(range(n)),
        "size": size,
        "color": [["red", "blue", "green"][k] for k in rng.integers(0, 3, n)],
        "day": [f"2024-{1 + k % 12:02d}-{1 + k % 28:02d}" for k in rng.integers(0, 300, n)],
        "label": [["yes", "no"][k] for k in y],
        "trusted": [int(k % 10 == 0) for k in range(n)],
        **more,
    }


def write_table(path: Path, columns: dict[str, Any]) -> Path:
    if path.suffix == ".parquet":
        parquet.write_table(pa.table(columns), path, row_group_size=50)
        return path
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(columns)
        writer.writerows(zip(*columns.values(), strict=True))
    return path


@pytest.mark.parametrize("suffix", [".csv", ".parquet"])
def test_equals_the_table_read_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suffix: str) -> None:
    more = {} if suffix == ".csv" else {"vector": [[k, k / 2.0] for k in range(120)]}
    table = write_table(tmp_path / f"t{suffix}", make_columns(**more))
    done = convert_table(table, tmp_path / "x.npy")
    monkeypatch.setattr(arrays, "LARGE", 0)
    whole, converted = read_dataset(str(table)), read_dataset(str(done.path))
    assert isinstance(converted.examples, MappedExamples)
    assert (done.n_rows, done.n_features) == tuple(whole.examples.x.shape)  # type: ignore[attr-defined]
    assert torch.equal(converted.examples.x, whole.examples.x)  # type: ignore[attr-defined]
    assert torch.equal(converted.y, whole.y)
    assert converted.classes == whole.classes == ("no", "yes")
    assert converted.trusted is not None and whole.trusted is not None  # noqa: PT018
    assert torch.equal(converted.trusted, whole.trusted)
    form = read_table_form(done.path)
    assert form is not None
    assert form.columns.features == whole.encoding.features  # type: ignore[attr-defined]
    assert "id" in form.columns.drop


@pytest.mark.parametrize("labels", [["3", "7"], ["-1", "1"], ["0.5", "1.5"], ["a", "1"]])
def test_labels_keep_their_names(tmp_path: Path, labels: list[str]) -> None:
    clean = ["", *labels, ""] * 10
    columns = {"a": [0.5, 1.5, 2.5, 4.0] * 10, "label": labels * 20, "clean_label": clean}
    table = write_table(tmp_path / "t.csv", columns)
    convert_table(table, tmp_path / "x.npy")
    whole, converted = read_dataset(str(table)), read_dataset(str(tmp_path / "x.npy"))
    assert converted.classes == whole.classes
    assert torch.equal(converted.y, whole.y)
    assert converted.clean is not None and whole.clean is not None  # noqa: PT018
    assert torch.equal(converted.clean, whole.clean)


def test_every_kth_row_decides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(to_npy, "_SAMPLE", 30)
    columns = make_columns()
    columns["color"][1] = "pink"  # not in the sample of every second row or fewer
    table = write_table(tmp_path / "t.csv", columns)
    convert_table(table, tmp_path / "x.npy")
    form = read_table_form(tmp_path / "x.npy")
    assert form is not None
    assert form.columns.features["color"].categories == ("blue", "green", "red")  # type: ignore[union-attr]
    assert "id" in form.columns.drop  # it counts up by the step of the sample
    x = np.load(tmp_path / "x.npy")
    sizes = [row for row in range(120) if row != 3]
    assert np.allclose(x[sizes, 0], np.array([columns["size"][row] for row in sizes], np.float32))
    assert np.isfinite(x).all()


def test_a_run_takes_trusted_and_new_rows_as_tables(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    columns = make_columns()
    trusted = {name: [cells[k] for k in range(0, 120, 10)] for name, cells in columns.items() if name != "trusted"}
    del columns["trusted"]
    table = write_table(tmp_path / "t.csv", columns)
    write_table(tmp_path / "trusted.csv", trusted)
    assert main(["convert", str(table), "--out", str(tmp_path / "x.npy")]) == 0
    assert "120 rows of" in capsys.readouterr().out
    options = {"trusted": str(tmp_path / "trusted.csv"), "method": "ce", "net": "linear", "epochs": 2, "device": "cpu"}
    run = fit(tmp_path / "run", data=str(tmp_path / "x.npy"), quiet=True, **options)
    assert run.task.meta is not None
    assert len(run.task.meta) == 12
    new = {name: cells for name, cells in columns.items() if name != "label"}
    new_table = write_table(tmp_path / "new.csv", new)
    assert main(["convert", str(new_table), "--like", str(tmp_path / "x.npy"), "--out", str(tmp_path / "n.npy")]) == 0
    assert not (tmp_path / "n_labels.npy").exists()
    by_table, by_array = (predict(tmp_path / "run", tmp_path / name) for name in ("new.csv", "n.npy"))
    assert np.array_equal(by_table.probabilities, by_array.probabilities)
    other = write_table(tmp_path / "o.csv", {**columns, "color": ["teal", "gray"] * 60})
    convert_table(other, tmp_path / "o.npy")
    with pytest.raises(UserError, match="columns differ from those of the run"):
        predict(tmp_path / "run", tmp_path / "o.npy")
    with pytest.raises(UserError, match=r"convert it with --like x\.npy"):
        fit(tmp_path / "b", data=str(tmp_path / "x.npy"), trusted=str(tmp_path / "o.npy"), method="ce", epochs=1)


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"a": [1, 2], "y": ["u", "v"]}, "no column 'label'"),
        ({"a": [1, 2], "label": ["u", ""]}, "row 1: column 'label' is empty"),
        ({"a": [1, 2], "label": ["u", "v"], "split": ["train", "test"]}, "write one file per split"),
        ({"a": [1.7e9 + k / 10 for k in range(40)], "label": ["u", "v"] * 20}, "'a' need float64"),
        ({"a": [1], "label": ['"open']}, "is one left open"),
    ],
)
def test_invalid_tables(tmp_path: Path, columns: dict[str, Any], message: str) -> None:
    table = write_table(tmp_path / "t.csv", columns)
    if len(columns["a"]) == 1:
        table.write_text('a,label\n1,"open\n2,u\n')
    with pytest.raises(UserError, match=message):
        convert_table(table, tmp_path / "x.npy")
    assert not (tmp_path / "x.npy").exists()
    assert not list(tmp_path.glob(".*.part"))


def test_refuses_texts_existing_files_and_damaged_forms(tmp_path: Path) -> None:
    words = ["sun and rain over hills", "rain over the sea today", "hills and sea and wind now", "sun over the wind"]
    texts = [f"{words[k % 4]} {words[(k // 4) % 4]} number {k}" for k in range(60)]
    table = write_table(tmp_path / "t.csv", {"text": texts, "a": [k % 7 for k in range(60)], "label": ["u", "v"] * 30})
    with pytest.raises(UserError, match="warpi embed"):
        convert_table(table, tmp_path / "x.npy")
    done = convert_table(table, tmp_path / "x.npy", drop=["text"])
    with pytest.raises(UserError, match="exists"):
        convert_table(table, tmp_path / "x.npy", drop=["text"])
    with pytest.raises(UserError, match=r"there is no t_table\.json"):
        convert_table(table, tmp_path / "z.npy", like=table)
    (tmp_path / "x_table.json").write_text('{"format": "warpi-table/1", "classes": ["u"], "columns": {}}')
    with pytest.raises(UserError, match=r"x_table\.json"):
        read_dataset(str(done.path))


def test_folders_of_parquet_and_of_saved_data_sets(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    columns = make_columns()
    whole = convert_table(write_table(tmp_path / "t.parquet", columns), tmp_path / "whole.npy")
    folder = tmp_path / "parts"
    folder.mkdir()
    for k, rows in enumerate((slice(0, 70), slice(70, 120))):
        write_table(folder / f"part-{k}.parquet", {name: cells[rows] for name, cells in columns.items()})
    saved = tmp_path / "saved"  # as `save_to_disk` writes it: streams, their names, and the names of the classes
    saved.mkdir()
    features = {
        "label": {"names": ["yes", "no"], "_type": "ClassLabel"},
        "size": {"dtype": "float64", "_type": "Value"},
    }
    numbers = {**columns, "label": [["yes", "no"].index(name) for name in columns["label"]]}
    about = {b"huggingface": json.dumps({"info": {"features": features}}).encode()}
    table = pa.table(numbers).replace_schema_metadata(about)
    names = ["data-00000-of-00002.arrow", "data-00001-of-00002.arrow"]
    for name, rows in zip(names, (table.slice(0, 50), table.slice(50)), strict=True):
        with pa.OSFile(str(saved / name), "wb") as file, pa.ipc.new_stream(file, table.schema) as stream:
            stream.write_table(rows, max_chunksize=20)
    (saved / "state.json").write_text(json.dumps({"_data_files": [{"filename": name} for name in names]}))
    for source, out in ((folder, "a"), (saved, "b")):
        assert main(["convert", str(source), "--out", str(tmp_path / f"{out}.npy")]) == 0
        for end in ("", "_labels", "_trusted"):
            assert np.array_equal(np.load(tmp_path / f"{out}{end}.npy"), np.load(tmp_path / f"whole{end}.npy"))
        assert read_table_form(tmp_path / f"{out}.npy") == read_table_form(whole.path)
    (tmp_path / "splits" / "train").mkdir(parents=True)
    (tmp_path / "splits" / "train" / "state.json").write_text("{}")
    assert main(["convert", str(tmp_path / "splits"), "--out", str(tmp_path / "c.npy")]) == 2
    assert "pass one of its splits" in capsys.readouterr().err
    assert main(["convert", str(tmp_path / "splits" / "train"), "--out", str(tmp_path / "c.npy")]) == 2
    assert "state.json" in capsys.readouterr().err
    (saved / names[1]).write_bytes((saved / names[1]).read_bytes()[:900])
    assert main(["convert", str(saved), "--out", str(tmp_path / "c.npy")]) == 2
    assert "not a readable table" in capsys.readouterr().err


def test_saved_by_the_package_datasets(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    columns = make_columns()
    whole = convert_table(write_table(tmp_path / "t.parquet", columns), tmp_path / "whole.npy")
    data = datasets.Dataset.from_dict(columns).class_encode_column("label")
    data.save_to_disk(tmp_path / "saved", num_shards=3)
    convert_table(tmp_path / "saved", tmp_path / "x.npy")
    assert np.array_equal(np.load(tmp_path / "x.npy"), np.load(whole.path))
    assert np.array_equal(np.load(tmp_path / "x_labels.npy"), np.load(tmp_path / "whole_labels.npy"))
