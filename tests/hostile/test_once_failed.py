"""Damaged files that once ended in a traceback; `make fuzz` found them."""

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from warpi.audit.result import AUDIT_FILE, read_audit
from warpi.cli.app import main
from warpi.datasets.load import read_dataset
from warpi.errors import UserError


def test_a_null_byte_in_a_path(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "list.csv").write_text("path,label\na\0.png,p\nb.png,q\n")
    with pytest.raises(UserError, match=r"a\\x00.png"):
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


def test_features_whose_list_has_no_columns(tmp_path: Path) -> None:
    for i in range(6):
        (tmp_path / "images" / "pq"[i % 2]).mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (9, 9), (40 * i, 0, 0)).save(tmp_path / "images" / "pq"[i % 2] / f"{i}.png")
    assert main(["embed", str(tmp_path / "images"), "--with", "pixels:2", "--out", str(tmp_path / "f")]) == 0
    manifest = json.loads((tmp_path / "f" / "features.json").read_text())
    del manifest["columns"]
    (tmp_path / "f" / "features.json").write_text(json.dumps(manifest))
    with pytest.raises(UserError, match="columns"):
        read_dataset(str(tmp_path / "f"))
