"""A named pipe in place of a file: opening it would wait forever."""

import os
import shutil
import zipfile
from pathlib import Path

import pytest
from PIL import Image

from warpi.audit.result import AUDIT_FILE, read_audit
from warpi.cli.app import main
from warpi.data.decode import decode, image_size
from warpi.datasets.embedding.folder import FeatureFolder
from warpi.datasets.load import read_dataset
from warpi.errors import UserError
from warpi.runs.run import fit

PIPE = "is a pipe or a device, not a file"
pytestmark = [
    pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no named pipes"),
    pytest.mark.timeout(60),  # the tests take a second
]


@pytest.mark.parametrize("name", ["t.csv", "t.tsv", "t.parquet", "t.npz", "t.npy"])
def test_data(name: str, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / name)
    with pytest.raises(UserError, match=rf"{name}( {PIPE})?"):
        read_dataset(str(tmp_path / name))


def test_images(tmp_path: Path) -> None:
    for i in range(8):
        (tmp_path / "pq"[i % 2]).mkdir(exist_ok=True)
        Image.new("RGB", (9, 9), (30 * i, 0, 0)).save(tmp_path / "pq"[i % 2] / f"{i}.png")
    pipe = str(tmp_path / "p" / "9.png")
    os.mkfifo(pipe)
    with pytest.raises(ValueError, match="not a file"):
        decode(pipe, 9)
    assert image_size(pipe) is None
    assert len(read_dataset(str(tmp_path)).y) == 8


def test_files_of_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "t.csv").write_text("a,label\n" + "1,p\n2,q\n" * 20)
    fit(tmp_path / "whole", data=str(tmp_path / "t.csv"), method="ce", epochs=1, test=0.2, quiet=True)
    run = tmp_path / "run"
    for name in ("spec.json", "results.jsonl", "checkpoint.safetensors", AUDIT_FILE):
        shutil.rmtree(run, ignore_errors=True)
        shutil.copytree(tmp_path / "whole", run)
        (run / name).unlink(missing_ok=True)
        os.mkfifo(run / name)
        if name == AUDIT_FILE:
            with pytest.raises(UserError, match=PIPE):
                read_audit(run)
        else:
            assert main(["fit", "--out", str(run), "--resume"]) == 2
            assert PIPE in capsys.readouterr().err


def test_features(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "features.json")
    with pytest.raises(UserError, match=PIPE):
        FeatureFolder(tmp_path).read_manifest()


def test_a_member_of_an_archive_that_is_not_an_array(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "t.npz", "w") as archive:
        archive.writestr("x.npy", b"PK\x03\x04 another archive")
        archive.writestr("../../y.npy", b"")
    with pytest.raises(UserError, match="x is not an array"):
        read_dataset(str(tmp_path / "t.npz"))
