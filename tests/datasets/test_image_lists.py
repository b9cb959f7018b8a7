"""Lists of images as .parquet files: the same data as from a .csv file, without a Python object per path."""

import os
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import torch
from PIL import Image
from pyarrow import parquet

from warpi.cli.app import main
from warpi.data.dataset import Dataset
from warpi.datasets import image_lists
from warpi.datasets.image_folders import convert_images, read_folder, read_manifest, read_new_images
from warpi.datasets.image_lists import PathList, find_repeated, is_manifest
from warpi.datasets.load import read_dataset
from warpi.errors import UserError
from warpi.noise.noise_file import hash_inputs
from warpi.runs.fingerprints import fingerprint_data
from warpi.utils import links

LINES = [
    "path,label,clean_label,trusted,split,given,changed_by",
    "a/1.png,cat,,,,,",
    "./a//2.png,dog,cat,,train,,",
    "a/x/../3.png,dog,,1,train,cat,person",
    "b/4.png,cat,cat,0,,,",
    "b/5.png,7,7,,test,,",
    "b/6.png,dog,cat,,test,,",
    "b/7.png,dog,,,trusted,cat,",
    "b/8.png,dog,,,,cat,audit",
]


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(image_lists, "_ROWS", 3)


def read(path: Path, **options: Any) -> Dataset:
    return read_manifest(path, size=8, in_memory=False, **options)


def write(path: Path, columns: dict[str, Any], **options: Any) -> Path:
    parquet.write_table(pa.table(columns), path, **options)
    return path


def write_photos(folder: Path, names: list[str]) -> None:
    for k, name in enumerate(names):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (9, 9), (20 * k, 0, 0)).save(folder / name)


def assert_same(a: Dataset, b: Dataset) -> None:
    assert a.classes == b.classes
    assert a.files is not None
    assert b.files is not None
    assert list(a.files.paths) == list(b.files.paths)
    assert fingerprint_data(a, None, None) == fingerprint_data(b, None, None)
    assert hash_inputs(a) == hash_inputs(b)
    for name in ("y", "clean", "trusted", "given", "meta_given", "before_audit"):
        x, y = getattr(a, name), getattr(b, name)
        assert (x is None and y is None) or torch.equal(x, y), name
    assert a.test_is_clean == b.test_is_clean
    for x, y in ((a.test, b.test), (a.meta, b.meta)):
        assert (x is None) == (y is None)
        assert x is None or y is None or torch.equal(x.y, y.y)


@pytest.mark.parametrize("dictionary", [True, False])
def test_equals_the_list_as_csv(tmp_path: Path, dictionary: bool) -> None:
    (tmp_path / "list.csv").write_text("\n".join(LINES) + "\n")
    cells = [line.split(",") for line in LINES[1:]]
    columns = {name: [row[j] or None for row in cells] for j, name in enumerate(LINES[0].split(","))}
    columns = {"remark": list(range(8)), " Path ": columns.pop("path")} | columns
    columns["path"] = columns.pop(" Path ")
    if dictionary:
        columns["label"] = pa.array(columns["label"]).dictionary_encode()
        columns["path"] = pa.array(columns["path"]).dictionary_encode()
    listed = write(tmp_path / "list.parquet", columns, row_group_size=2)
    assert is_manifest(listed)
    data = read(listed)
    assert isinstance(data.examples.paths, PathList)  # type: ignore[attr-defined]
    assert_same(data, read(tmp_path / "list.csv"))
    assert data.before_audit is not None


def test_numbers_and_marks_have_their_types(tmp_path: Path) -> None:
    columns = {"path": ["1.png", "2.png", "3.png"], "label": [10, 9, 9], "trusted": [True, None, False]}
    data = read(write(tmp_path / "list.parquet", columns))
    assert data.classes == ("9", "10")
    assert data.y.tolist() == [1, 0, 0]
    assert data.trusted is not None
    assert data.trusted.tolist() == [True, False, False]


def test_converts_a_list_and_trains(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "list.csv").write_text("\n".join(LINES) + "\n")
    before = read(tmp_path / "photos" / "list.csv")
    n, base = convert_images(tmp_path / "photos" / "list.csv", tmp_path / "photos" / "l.parquet")
    assert (n, base) == (8, tmp_path / "photos")
    assert_same(read(tmp_path / "photos" / "l.parquet"), before)
    above = read(tmp_path / "l.parquet") if convert_images(base / "list.csv", tmp_path / "l.parquet") else before
    assert above.files is not None
    assert list(above.files.paths) == [f"photos/a/{k}.png" for k in (1, 2, 3)] + ["photos/b/4.png", "photos/b/8.png"]

    (tmp_path / "photos" / "l.parquet").unlink()
    folders = ("train/cat", "train/dog", "test/cat", "test/dog")
    write_photos(tmp_path / "photos", [f"{folder}/{k}.png" for folder in folders for k in range(6)])
    (tmp_path / "elsewhere").mkdir()
    out = tmp_path / "elsewhere" / "l.parquet"
    assert main(["convert", str(tmp_path / "photos"), "--out", str(out)]) == 0
    command = f"warpi fit --data {out} --root {tmp_path / 'photos'} --out DIR"
    assert f"next: {command}" in capsys.readouterr().out
    run = ["fit", "--data", str(out), "--root", str(tmp_path / "photos"), "--image-size", "8", "--method", "ce"]
    run += ["--epochs", "1", "--batch-size", "4", "--device", "cpu", "--quiet", "--out", str(tmp_path / "run")]
    assert main(run) == 0
    a, b = read_dataset(str(out), root=tmp_path / "photos", image_size=8), read_folder(tmp_path / "photos", size=8)
    assert torch.equal(a.examples.flat(torch.arange(12)), b.examples.flat(torch.arange(12)))
    assert a.test is not None
    assert len(a.test) == 12
    new = read_new_images(out, 8, a.classes, root=tmp_path / "photos")
    assert new.paths is not None
    assert new.paths[0] == "train/cat/0.png"


def test_convert_refuses(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "table.csv").write_text("size,label\n1,a\n2,b\n")
    (tmp_path / "list.csv").write_text("path,label\n1.png,a\n2.png,b\n")
    out = ["--out", str(tmp_path / "l.parquet")]
    for arguments, message in (
        ([str(tmp_path / "table.csv"), *out], "is not a folder or a list of images"),
        ([str(tmp_path / "list.csv"), "--drop", "label", *out], "--drop can only be used with tables, but"),
        (
            [str(tmp_path / "table.csv"), "--root", "x", "--out", "t.npy"],
            "--root can only be used with a list of images",
        ),
    ):
        assert main(["convert", *arguments]) == 2
        assert message in capsys.readouterr().err
    assert main(["convert", str(tmp_path), *out]) == 2
    assert "which could no longer be read as a folder of images; choose another folder" in capsys.readouterr().err
    (tmp_path / "l.parquet").touch()
    assert main(["convert", str(tmp_path / "list.csv"), *out]) == 2
    assert "exists; delete it first" in capsys.readouterr().err
    (tmp_path / "l.parquet").unlink()
    write_photos(tmp_path, ["photos/a/1.png", "photos/b/2.png", os.fsdecode(b"photos/b/\xff.png")])
    assert main(["convert", str(tmp_path / "photos"), *out]) == 2
    assert "photos: some names of images or folders are not UTF-8; rename them" in capsys.readouterr().err
    assert not list(tmp_path.glob("*l.parquet*"))


@pytest.mark.parametrize("cell", ["../x.png", "/etc/passwd", "a/../../x.png", ".", "", None])
def test_a_list_cannot_leave_its_folder(cell: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    listed = write(tmp_path / "list.parquet", {"path": ["0.png", "b.png", "c.png", cell], "label": list("abab")})
    with pytest.raises(UserError, match=r"list.parquet row 3: (the path is empty|.* is not a file below)"):
        read(listed)
    if cell == "../x.png":
        with pytest.raises(SystemExit):
            main(["check", str(listed)])
        shown = capsys.readouterr().out
        assert "a list of images" in shown
        assert "row 3: ../x.png is outside" in shown


def test_links_that_leave_are_found_in_folders_with_many_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "_MANY", 3)
    folder = tmp_path / "photos"
    folder.mkdir()
    for k in range(6):
        (folder / f"{k}.png").touch()
    listed = write(folder / "list.parquet", {"path": [f"{k}.png" for k in range(6)], "label": list("ababab")})
    assert len(read(listed).y) == 6
    for k in (0, 5):  # before and after the folder is listed
        (folder / f"{k}.png").unlink()
        (folder / f"{k}.png").symlink_to("/etc/passwd")
        with pytest.raises(UserError, match=rf"{k}.png leads to /etc/passwd, outside of"):
            read(listed)
        (folder / f"{k}.png").unlink()
    assert len(read(listed).y) == 6, "files may be missing"


def test_invalid_lists(tmp_path: Path) -> None:
    listed = tmp_path / "list.parquet"
    for columns, message in (
        ({"path": ["1", "2", "./1"], "label": list("aba")}, r"row 2: path '1' is also on row 0; keep one"),
        ({"path": ["1", "2"], "name": list("ab")}, r"has no column 'label'; its columns are: path, name"),
        ({"path": ["1", "2"], "label": ["a", None]}, r"row 1: column 'label' is empty"),
        ({"path": ["1", "2"], "label": [[1], [2]]}, r"column 'label' contains values of type list"),
        ({"path": pa.array([], pa.string()), "label": pa.array([], pa.string())}, r"no rows"),
    ):
        with pytest.raises(UserError, match=message):
            read(write(listed, columns))
    listed.write_bytes(listed.read_bytes()[:-9])
    assert not is_manifest(listed)
    with pytest.raises(UserError, match="not a readable parquet file"):
        read(listed)


def test_a_table_is_not_a_list(tmp_path: Path) -> None:
    """A column of numbers called `path` does not list images; with --drop path, no column does."""
    rows = [0.0, 1.0] * 20
    assert not is_manifest(write(tmp_path / "t.parquet", {"path": rows, "label": list("ab") * 20}))
    texts = write(tmp_path / "u.parquet", {"path": [f"{k}" for k in range(40)], "size": rows, "label": list("ab") * 20})
    assert is_manifest(texts)
    assert read_dataset(str(texts), drop=("path",)).examples.shape == (1,)
    with pytest.raises(UserError, match="lists images in column 'path'; omit --drop"):
        read_dataset(str(texts), drop=("size",))


def test_a_path_list_is_a_sequence() -> None:
    names = [f"ü{k}/é.png" for k in range(8)]
    paths = PathList(pa.array(names, pa.large_string()))
    assert len(paths) == 8
    assert list(paths) == names
    assert [paths[0], paths[-1]] == [names[0], names[-1]]
    for part in (slice(2, 5), slice(None), slice(-3, None), slice(0, 8, 3), slice(6, 2, -2), slice(9, 12), slice(5, 2)):
        assert paths[part] == names[part]
    assert list(paths.take([1, 6])) == [names[1], names[6]]
    assert "ü3/é.png" in paths
    with pytest.raises(IndexError):
        paths[8]
    assert find_repeated(paths) is None
    assert find_repeated(["a", "b", "a", "b"]) == (2, 0)
