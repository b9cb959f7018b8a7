"""The wheel and the source distribution: what they contain, and that they work without the repository."""

import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import urllib.request
import zipfile
from importlib.metadata import distribution
from pathlib import Path

import numpy as np
import pytest
from supply_chain import dependencies

import warpi

pytestmark = pytest.mark.slow
ROOT = Path(__file__).resolve().parents[1]
SOURCES = ["pyproject.toml", "MANIFEST.in", "README.md", "LICENSE", "CHANGELOG.md", "CITATION.cff"]


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a wheel, built from a source distribution."""
    copy = tmp_path_factory.mktemp("source")
    for name in SOURCES:
        shutil.copy(ROOT / name, copy)
    for name in ("src", "tests"):
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("*.egg-info", "__pycache__"))
    subprocess.run([sys.executable, "-m", "build", "--no-isolation", copy], check=True, capture_output=True)
    return copy / "dist"


@pytest.fixture(scope="module")
def bare(dist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The programs of an environment that has only the wheel and links to its dependencies."""
    folder = tmp_path_factory.mktemp("bare") / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    (packages,) = folder.glob("lib/python*/site-packages")
    for name in {*dependencies("warpi", "report")} - {"warpi"}:
        found = distribution(name)
        for top in {file.parts[0] for file in found.files or () if file.parts[0] not in ("..", "__pycache__")}:
            if not (packages / top).exists():
                (packages / top).symlink_to(Path(str(found.locate_file(top))))
    (wheel,) = dist.glob("*.whl")
    pip = [sys.executable, "-m", "pip", "--python", folder / "bin" / "python"]
    subprocess.run([*pip, "install", "--quiet", "--no-deps", "--no-index", wheel], check=True)
    return folder / "bin"


def run(program: Path, *arguments: object, cwd: Path) -> str:
    env = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    words = [program, *map(str, arguments)]
    done = subprocess.run(words, cwd=cwd, env=env, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_wheel_has_every_file_of_the_package_and_nothing_else(dist: Path) -> None:
    (wheel,) = dist.glob("*.whl")
    assert wheel.name == f"warpi-{warpi.__version__}-py3-none-any.whl"
    names = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    files = {
        path.relative_to(ROOT / "src").as_posix() for path in (ROOT / "src" / "warpi").rglob("*") if path.is_file()
    }
    assert names == {name for name in files if "__pycache__" not in name}
    assert {"warpi/py.typed", "warpi/methods/status.json", "warpi/report/templates/page.html"} <= names
    assert {"warpi/review/assets/page.js", "warpi/fewshot/fewshot_splits.json"} <= names
    assert not [name for name in names if name.endswith((".pth", ".so"))], "nothing runs at the start of Python"


def test_the_source_distribution_has_no_part_of_the_tests(dist: Path) -> None:
    (archive,) = dist.glob("*.tar.gz")
    with tarfile.open(archive) as file:
        names = {name.partition("/")[2] for name in file.getnames()}
    assert set(SOURCES) <= names
    assert not [name for name in names if name.startswith("tests")]
    assert "setup.py" not in names, "an installation runs no code of warpi"


def test_versions_agree() -> None:
    assert f"version: {warpi.__version__}\n" in (ROOT / "CITATION.cff").read_text()


def write_tables(folder: Path) -> None:
    """A table with 20 % wrong labels and 30 checked rows."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(230, 3))
    truth = (x[:, 0] > 0).astype(int)
    given = np.where(rng.random(len(x)) < 0.2, 1 - truth, truth)
    given[:30] = truth[:30]
    for name, rows in (("checked.csv", range(30)), ("noisy.csv", range(30, 230))):
        lines = [f"{x[i, 0]:.4f},{x[i, 1]:.4f},{x[i, 2]:.4f},{'ab'[given[i]]}" for i in rows]
        (folder / name).write_text("\n".join(["u,v,w,label", *lines]) + "\n")


def test_the_wheel_works_without_the_repository(bare: Path, tmp_path: Path) -> None:
    program = "import warpi; print(warpi.__file__, warpi.__version__, len(warpi.METHODS))"
    where = run(bare / "python", "-c", program, cwd=tmp_path).split()
    assert where[0].startswith(str(bare.parent))
    assert where[1:] == [warpi.__version__, str(len(warpi.METHODS))]
    write_tables(tmp_path)
    command = bare / "warpi"
    run(command, "fit", "--data", "noisy.csv", "--trusted", "checked.csv", "--out", "run", cwd=tmp_path)
    run(command, "report", "run", "--audit", "--out", "report", cwd=tmp_path)
    assert "suspicious" in (tmp_path / "report" / "report.html").read_text()
    assert "torch" in json.loads((tmp_path / "run" / "spec.json").read_text())["environment"]
    review(command, tmp_path)


def review(command: Path, folder: Path) -> None:
    """Open the review page and its program; the server ends with its process."""
    words = [command, "review", "run", "--no-browser"]
    with subprocess.Popen(
        words, cwd=folder, stdout=subprocess.PIPE, text=True, env={"PATH": os.environ["PATH"]}
    ) as page:
        try:
            assert page.stdout is not None
            link = next(found[0] for line in page.stdout if (found := re.search(r"http://\S+", line)))
            with urllib.request.urlopen(link, timeout=30) as answer:
                assert "<title>" in answer.read().decode()
        finally:
            page.terminate()


def test_a_missing_extra_is_named(bare: Path, tmp_path: Path) -> None:
    from pyarrow import parquet, table

    parquet.write_table(table({"u": [1.0, 2.0], "label": ["a", "b"]}), tmp_path / "noisy.parquet")
    words = [bare / "warpi", "fit", "--data", "noisy.parquet", "--out", "run"]
    done = subprocess.run(words, cwd=tmp_path, env={"PATH": os.environ["PATH"]}, capture_output=True, text=True)
    assert done.returncode == 2
    assert "pip install 'warpi[tables]'" in done.stderr
