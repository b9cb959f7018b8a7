"""Cells of csv tables come back. Atomic writes: links remain links, pipes are written to, folders are refused."""

import csv
import io
import os
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from warpi.cli.app import main
from warpi.errors import UserError
from warpi.utils.files import format_csv, write_atomically
from warpi.utils.settings import join_names, split_names


def test_a_link_remains_and_its_target_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "far").mkdir()
    target, link, twice = tmp_path / "far" / "target.csv", tmp_path / "link.csv", tmp_path / "twice.csv"
    target.write_bytes(b"old")
    link.symlink_to(Path("far") / "target.csv")
    twice.symlink_to("link.csv")
    for path, content in ((link, b"new"), (twice, b"newer")):
        write_atomically(path, content)
        assert link.is_symlink()
        assert twice.is_symlink()
        assert target.read_bytes() == content
    assert sorted(p.name for p in tmp_path.rglob("*")) == ["far", "link.csv", "target.csv", "twice.csv"]


def test_a_link_to_a_missing_file(tmp_path: Path) -> None:
    link = tmp_path / "link.csv"
    link.symlink_to("later.csv")
    write_atomically(link, b"new")
    assert link.is_symlink()
    assert (tmp_path / "later.csv").read_bytes() == b"new"
    lost = tmp_path / "lost.csv"
    lost.symlink_to("nowhere/later.csv")
    with pytest.raises(UserError, match=r"cannot write .*nowhere/later.csv: No such file or directory"):
        write_atomically(lost, b"new")
    assert lost.is_symlink()


def test_a_circular_link(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    with pytest.raises(UserError, match="the link points to itself"):
        write_atomically(tmp_path / "a", b"new")
    assert (tmp_path / "a").is_symlink()


def test_a_link_is_renamed_to_keep_the_old_file(tmp_path: Path) -> None:
    """Its target may be on another disk, so the target cannot be renamed."""
    (tmp_path / "target").write_bytes(b"old")
    (tmp_path / "link").symlink_to("target")
    write_atomically(tmp_path / "link", b"new", keep=tmp_path / "kept")
    assert (tmp_path / "kept").is_symlink()
    assert (tmp_path / "kept").read_bytes() == b"old"
    assert (tmp_path / "link").read_bytes() == b"new"


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no named pipes on this system")
def test_a_pipe_is_written_to(tmp_path: Path) -> None:
    pipe, link, got = tmp_path / "pipe", tmp_path / "link", list[bytes]()
    os.mkfifo(pipe)
    link.symlink_to("pipe")
    for path in (pipe, link):
        reader = threading.Thread(target=lambda: got.append(pipe.read_bytes()), daemon=True)
        reader.start()
        write_atomically(path, b"x" * 100_000)  # more than the buffer of a pipe
        reader.join(timeout=10)
        assert got.pop() == b"x" * 100_000
        assert stat.S_ISFIFO(pipe.stat().st_mode)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["link", "pipe"]


def test_a_device_is_written_to(tmp_path: Path) -> None:
    device = tmp_path / "null"
    try:
        os.mknod(device, stat.S_IFCHR | 0o600, os.makedev(1, 3))  # so that a bug cannot replace /dev/null
    except OSError:
        pytest.skip("devices cannot be created on this system")
    try:
        write_atomically(device, b"new")
    except UserError as e:
        pytest.skip(f"devices cannot be used on this system: {e}")
    finally:
        is_device = stat.S_ISCHR(device.stat().st_mode)
    assert is_device


@pytest.mark.parametrize("to_file", [True, False], ids=["file", "pipe"])
def test_standard_output_keeps_its_order(to_file: bool, tmp_path: Path) -> None:
    """Uses another name, because a bug could replace /dev/stdout if root runs the tests."""
    program = (
        "import pathlib, warpi.utils.files; warpi.utils.files._STREAMS = {'stream': 1}; print('before')\n"
        "warpi.utils.files.write_atomically(pathlib.Path('stream'), b'table\\n'); print('after')"
    )
    with (tmp_path / "out").open("wb+") as file:
        out = file if to_file else subprocess.PIPE
        done = subprocess.run([sys.executable, "-c", program], stdout=out, check=True, cwd=tmp_path)
    assert (done.stdout or (tmp_path / "out").read_bytes()) == b"before\ntable\nafter\n"


def test_a_folder_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to("folder")
    for name in (".", "", "..", "folder", "link"):
        with pytest.raises(UserError, match=r"is a folder; pass the name of a file, such as .*NAME$"):
            write_atomically(Path(name), b"new")
    assert sorted(p.name for p in tmp_path.rglob("*")) == ["folder", "link"]


@pytest.mark.parametrize(
    ("argv", "flag"),
    [
        ("corrupt --noise pair:0.1 --out .", "--out"),
        ("report run --json .", "--json"),
        ("predict run --data x.npz --csv .", "--csv"),
        ("audit run --csv folder", "--csv"),
        ("audit run --json .", "--json"),
        ("pick 3 --data digits --csv .", "--csv"),
        ("bench meta-step --json .", "--json"),
    ],
)
def test_commands_refuse_a_folder_before_doing_anything(
    argv: str, flag: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    assert main(argv.split()) == 2
    assert capsys.readouterr().err.startswith(f"warpi: {flag}: '{argv.split()[-1]}' is a folder; pass the name of a fi")


def test_any_cell_of_a_csv_table_comes_back() -> None:
    cells = ["a,b", 'a"b', "a\nb", "a\rb", "a\r\nb", "", " a ", "\r", "é"]
    text = format_csv(cells, [cells[::-1]])
    assert [*csv.reader(io.StringIO(text, newline=""))] == [cells, cells[::-1]]
    assert format_csv(["a", "b"], [[1, 2.5]]) == "a,b\n1,2.5\n"
    assert split_names(join_names(cells[:5])) == cells[:5]
