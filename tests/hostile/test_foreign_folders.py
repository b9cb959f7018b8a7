"""A run folder or a data set from elsewhere executes nothing and reads nothing outside of itself."""

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import matplotlib
import numpy as np
import pytest
from PIL import Image

import warpi
from warpi.audit.decisions import Decision
from warpi.cli.app import main
from warpi.datasets.embedding.sources import list_source
from warpi.datasets.image_folders import read_folder, read_manifest
from warpi.datasets.load import read_dataset
from warpi.errors import UserError
from warpi.review.export import write_trusted
from warpi.review.items import items_from_data
from warpi.runs.run import fit

DECOYS = ("sitecustomize.py", "torch.py", "plugins.py", "conftest.py", "checkpoint.pt", "best.pkl", ".netrc", "log.txt")
SECRET = "secret.csv"


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    rng = np.random.default_rng(100)
    lines = [f"{k + rng.normal() / 3},{rng.normal()},{'pq'[k]}" for k in (0, 1) * 40]
    (folder / "data.csv").write_text("a,b,label\n" + "\n".join(lines) + "\n")
    (folder / SECRET).write_text("a,b,label\n" + "\n".join(lines) + "\n")
    return folder / "data.csv"


@pytest.fixture(scope="module")
def run(table: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run with files that a careless program would execute, and a link that leaves the folder."""
    path = tmp_path_factory.mktemp("foreign") / "run"
    fit(path, data=str(table), method="ce", epochs=1, test=0.25, quiet=True)
    for name in DECOYS:
        (path / name).write_text("import os; os.system('touch executed')\n")
    (path / "notes").symlink_to(table.with_name(SECRET))
    return path


@pytest.mark.parametrize("tracer", ["audit hook", pytest.param("strace", marks=pytest.mark.slow)])
def test_commands_open_only_the_run_its_data_and_python(tracer: str, run: Path, table: Path, tmp_path: Path) -> None:
    """The hook sees what Python opens; strace also what compiled code opens."""
    trace = ["strace", "-f", "-qq", "-e", "trace=open,openat", "-o", str(tmp_path / "trace")] * (tracer == "strace")
    if trace and not shutil.which("strace"):
        pytest.skip("strace is not installed")
    (tmp_path / "people.csv").write_text("label_1,label_2\n" + "p,p\nq,p\n" * 9)
    (tmp_path / "studio.json").write_text(json.dumps(_tasks(table.with_name(SECRET))))
    np.save(tmp_path / "x.npy", np.random.default_rng(0).normal(size=(40, 3)).astype(np.float32))
    np.save(tmp_path / "y.npy", np.arange(40) % 2)
    program = str(Path(__file__).with_name("list_opened_files.py"))
    environment = {**os.environ, "TMPDIR": str(tmp_path), "CUDA_VISIBLE_DEVICES": ""}
    listed = subprocess.run(
        [*trace, sys.executable, program, str(run), str(table), str(tmp_path)],
        capture_output=True,
        text=True,
        cwd=run,
        env=environment,
        timeout=200,
    )
    assert listed.returncode == 0, listed.stderr
    result = json.loads(listed.stdout.splitlines()[-1])
    assert {name: code for name, code in result["codes"].items() if code} == {"check": 1}, listed.stderr  # the link
    if trace:
        calls = re.findall(r'(?:AT_FDCWD, |open\()"(.*?)", .*? = \d+$', (tmp_path / "trace").read_text(), re.M)
        result["opened"] += {os.path.realpath(os.path.join(run, path)) for path in calls}
        assert any(path.endswith("decisions.sqlite") for path in result["opened"])
    assert len(result["opened"]) > 100
    python = {sys.prefix, sys.base_prefix, *sysconfig.get_paths().values(), str(Path(warpi.__file__).parents[1])}
    python.add(matplotlib.get_cachedir())
    system = ("/proc", "/sys", "/dev", "/usr/share", "/etc", "/lib", "/usr/lib")
    allowed = tuple(map(os.path.realpath, (*python, run, table, tmp_path, Path(program).parent))) + system
    coverage = re.compile(r"/\.coverage[^/]*$")  # written by `make coverage`
    assert not [path for path in result["opened"] if not path.startswith(allowed) and not coverage.search(path)]
    assert not {*result["opened"]} & {str(run / name) for name in DECOYS}
    assert str(table.with_name(SECRET)) not in result["opened"]
    assert not (run / "executed").exists()
    assert not [start for start in result["started"] if "fc-list" not in start], result["started"]


def _tasks(secret: Path) -> list[dict[str, object]]:
    """Tasks of Label Studio that refer to a file elsewhere."""
    value = lambda i: {"choices": ["pq"[i % 2]]}
    result = lambda i: {"type": "choices", "from_name": "kind", "to_name": "image", "value": value(i)}
    image = f"/data/local-files/?d={secret.parent}/../{secret.parent.name}/x.png"
    return [
        {"id": i, "data": {"image": image, "table": str(secret)}, "annotations": [{"id": i, "result": [result(i)]}]}
        for i in range(6)
    ]


def test_check_describes_a_run(run: Path, table: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(["check", str(run)])
    assert exit_.value.code == 1
    shown = capsys.readouterr().out
    assert "kind: a run of ce" in shown
    assert "files: checkpoint, checksum: correct" in shown
    assert f"refers to: --data {table} (exists)" in shown
    assert "PROBLEM refers to" in shown
    assert SECRET in shown
    (run / "notes").unlink()
    assert main(["check", str(run)]) == 0
    checkpoint = run / "checkpoint.safetensors"
    content = checkpoint.read_bytes()
    checkpoint.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    try:
        with pytest.raises(SystemExit):
            main(["check", str(run)])
        assert "checksum mismatch" in capsys.readouterr().out
    finally:
        checkpoint.write_bytes(content)
        (run / "notes").symlink_to(table.with_name(SECRET))


def test_check_describes_data(table: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", str(table)]) == 0
    assert "kind: a .csv file" in capsys.readouterr().out
    listed = tmp_path / "list.csv"
    listed.write_text("path,label\n../x.png,a\n/etc/passwd,b\nin.png,b\n")
    with pytest.raises(SystemExit):
        main(["check", str(listed)])
    shown = capsys.readouterr().out
    assert "line 2: ../x.png is outside" in shown
    assert "line 3: /etc/passwd is outside" in shown
    assert "in.png is" not in shown
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "x.png").symlink_to("/etc/hostname")
    with pytest.raises(SystemExit):
        main(["check", str(tmp_path)])
    assert "is a link to /etc/hostname" in capsys.readouterr().out
    assert main(["check", str(tmp_path / "missing")]) == 2


@pytest.mark.parametrize("cell", ["../x.png", "/etc/passwd", "a/../../x.png", ".", ""])
def test_a_list_of_images_cannot_leave_its_folder(cell: str, tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    file = tmp_path / "in" / "list.csv"
    file.write_text(f'path,label\n"{cell}",a\nb.png,b\n')
    with pytest.raises(UserError, match=r"line 2: (the path is empty|.* is not a file below)"):
        read_manifest(file)


def test_links_in_image_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Links to folders within a class are not followed; links that leave the folder are refused."""
    outside = tmp_path / "outside"
    outside.mkdir()
    Image.new("RGB", (9, 9), "red").save(outside / "o.png")
    root = tmp_path / "images"
    for name in ("a", "b"):
        (root / name).mkdir(parents=True)
        for i in range(4):
            Image.new("RGB", (9, 9), (40 * i, 0, 0)).save(root / name / f"{i}.png")
    (root / "a" / "deeper").symlink_to(outside)  # not followed
    (root / "b" / "loop").symlink_to(root)
    dataset = read_folder(root)
    assert dataset.files is not None
    assert len(dataset.files.paths) == 8
    (root / "b" / "inside.png").symlink_to(root / "a" / "1.png")
    assert len(read_folder(root).y) == 9
    (root / "a" / "passwd.png").symlink_to("/etc/passwd")
    with pytest.raises(UserError, match=r"passwd.png leads to /etc/passwd, outside of .*WARPI_FOLLOW_LINKS=1"):
        read_folder(root)
    monkeypatch.setenv("WARPI_FOLLOW_LINKS", "1")
    assert len(read_folder(root).y) == 9  # not an image, so it is skipped
    (root / "a" / "passwd.png").unlink()
    (root / "c").symlink_to(outside)
    assert len(read_folder(root).y) == 10
    monkeypatch.delenv("WARPI_FOLLOW_LINKS")
    with pytest.raises(UserError, match=r"c leads to .*outside"):
        read_folder(root)
    (root / "list.csv").write_text("path,label\na/0.png,a\nc/o.png,b\n")
    with pytest.raises(UserError, match=r"c leads to .*outside"):
        read_manifest(root / "list.csv")


def test_links_of_an_exported_trusted_set_lead_to_the_data(tmp_path: Path) -> None:
    """The links of a trusted set may lead to the data, but to no other place."""
    data = tmp_path / "data"
    for name in ("a", "b"):
        (data / name).mkdir(parents=True)
        for i in range(4):
            Image.new("RGB", (9, 9), (40 * i, 0, 99)).save(data / name / f"{i}.png")
    dataset = read_dataset(str(data))
    decisions = {row: Decision(row + 1, row, "keep", dataset.classes[int(dataset.y[row])], "", "") for row in (0, 5)}
    write_trusted(items_from_data(dataset, dataset.y), decisions, tmp_path / "trusted")
    links = [*(tmp_path / "trusted").glob("*/*.png")]
    assert len(links) == 2
    assert all(link.is_symlink() for link in links)
    assert len(read_dataset(str(tmp_path / "trusted"), like=dataset).y) == 2
    with pytest.raises(UserError, match="through a link"):
        read_dataset(str(tmp_path / "trusted"))
    (tmp_path / "trusted" / "a" / "host.png").symlink_to("/etc/hostname")
    with pytest.raises(UserError, match=r"host.png leads to /etc/hostname"):
        read_dataset(str(tmp_path / "trusted"), like=dataset)


def test_links_in_folders_of_texts(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "x.txt").write_text(f"some words about {name}")
    (tmp_path / "b" / "host.txt").symlink_to("/etc/hostname")
    for read in (read_dataset, list_source):
        with pytest.raises(UserError, match=r"host.txt leads to /etc/hostname"):
            read(str(tmp_path))
