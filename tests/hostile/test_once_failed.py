"""Damaged files that once ended in a traceback; `make fuzz` found them."""

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from warpi.audit.result import AUDIT_FILE, read_audit
from warpi.cli.app import main
from warpi.data.numeric import Columns
from warpi.datasets.load import read_dataset
from warpi.errors import UserError
from warpi.runs.schema import check_spec


@pytest.mark.parametrize("path", ["a\0.png", "a\0/b.png"])
def test_a_null_byte_in_a_path(path: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "list.csv").write_text(f"path,label\n{path},p\nb.png,q\n")
    with pytest.raises(UserError, match=r"a\\x00"):
        read_dataset(str(tmp_path / "list.csv"))
    assert main(["check", str(tmp_path / "list.csv")]) == 0
    assert "a list of images" in capsys.readouterr().out


@pytest.mark.parametrize(
    "about", ['{"index_columns": ["absent", null, 3]}', '{"index_columns": "label"}', "[]", "[" * 9999]
)
def test_wrong_facts_about_the_index_in_a_parquet_file(about: str, tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    table = pa.table({"a": [1.0, 2.0], "label": ["p", "q"]})
    parquet.write_table(table.replace_schema_metadata({"pandas": about}), tmp_path / "t.parquet")
    assert read_dataset(str(tmp_path / "t.parquet")).classes == ("p", "q")


def test_an_audit_without_one_of_its_arrays(tmp_path: Path) -> None:
    np.savez(tmp_path / AUDIT_FILE, about=json.dumps({"format": "warpi-audit/1", "classes": [], "error_rates": []}))
    with pytest.raises(UserError, match="recreate it with"):
        read_audit(tmp_path)


@pytest.mark.parametrize("name", ["columns", "sha256"])
def test_features_whose_list_lacks_a_value(name: str, tmp_path: Path) -> None:
    for i in range(6):
        (tmp_path / "images" / "pq"[i % 2]).mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (9, 9), (40 * i, 0, 0)).save(tmp_path / "images" / "pq"[i % 2] / f"{i}.png")
    assert main(["embed", str(tmp_path / "images"), "--with", "pixels:2", "--out", str(tmp_path / "f")]) == 0
    manifest = json.loads((tmp_path / "f" / "features.json").read_text())
    del (manifest if name in manifest else manifest["embedder"])[name]
    (tmp_path / "f" / "features.json").write_text(json.dumps(manifest))
    with pytest.raises(UserError, match=name):
        read_dataset(str(tmp_path / "f"))


@pytest.mark.parametrize("file", ["p.npy", "rows.csv"])
def test_annotators_with_odd_numbers(file: str, tmp_path: Path) -> None:
    people = tmp_path / "people.csv"
    people.write_text("label_1,label_2\n" + "p,q\nq,q\n" * 9)
    np.save(tmp_path / "p.npy", np.full((18, 2), "0.5"))
    (tmp_path / "rows.csv").write_text("row,true_label\n" + "9" * 30 + ",p\n")
    flag = "--probabilities" if file == "p.npy" else "--trusted"
    assert main(["annotators", str(people), flag, str(tmp_path / file), "--out", str(tmp_path / "c.csv")]) == 2


def test_annotators_with_names_of_rows_that_are_huge_numbers(tmp_path: Path) -> None:
    table = tmp_path / "long.csv"
    table.write_text(
        "row,annotator,label\n" + "".join(f"{'9' * 25}{i},a{k},{'pq'[i % 2]}\n" for i in range(9) for k in (1, 2))
    )
    assert main(["annotators", str(table), "--out", str(tmp_path / "c.csv")]) == 0


def test_converting_classes_called_like_numbers(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("a,label\n" + "1,1e999\n2,007\n" * 9)
    assert main(["convert", str(tmp_path / "t.csv"), "--out", str(tmp_path / "x.npy")]) == 0
    assert set(read_dataset(str(tmp_path / "x.npy")).classes) == set(read_dataset(str(tmp_path / "t.csv")).classes)


@pytest.mark.parametrize("value", [10**30, "", None, 1])
def test_stored_columns_with_another_type(value: object) -> None:
    form = {"label": "label", "features": {"a": {"kind": "number", "fill": 0.5, "marks_gaps": value}}}
    with pytest.raises(ValueError, match="marks_gaps"):
        Columns.from_form(form)


def test_a_specification_whose_list_of_columns_holds_no_texts() -> None:
    stored = {"spec": {"method": "ce", "recipe": {}, "drop": [{"list": 3}]}}
    with pytest.raises(UserError, match="'drop' must be a list of texts"):
        check_spec(stored, Path("spec.json"), "copy it again", ())
