"""Names of classes, columns and files that a terminal, a table of rich or a page would act on are shown escaped."""

import csv
import json
import logging
import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from warpi.cli.app import main
from warpi.utils.terminal import VisibleFormatter, cell, visible

NAMES = ("[/b]", "\x1b[31mred\x1b[0m", "<script>alert(1)</script>", "line\nbreak", "\u202eevil", ":smile:[bold]")
ACTIVE = re.compile("[\x00-\x09\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069]")


def test_visible_text_has_no_active_characters() -> None:
    assert [visible(name) for name in NAMES[:5]] == [
        "[/b]",
        "\\x1b[31mred\\x1b[0m",
        "<script>alert(1)</script>",
        "line\\nbreak",
        "\\u202eevil",
    ]
    assert visible("file\udcff") == "file\\udcff"
    assert visible("Größe 猫 👩‍🔬") == "Größe 猫 👩‍🔬"
    assert str(cell("[/b]\x1b")) == "[/b]\\x1b"


def test_log_lines_are_visible() -> None:
    record = logging.LogRecord("warpi", logging.WARNING, "", 0, "class %s", ("\x1b[2J\nforged",), None)
    assert VisibleFormatter("warpi: %(message)s").format(record) == "warpi: class \\x1b[2J\\nforged"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A table whose classes and columns have hostile names, in a folder with such a name."""
    folder = tmp_path_factory.mktemp("names") / "[red]\x1b[31m"
    folder.mkdir()
    rng = np.random.default_rng(100)
    for name, n in (("data.csv", 90), ("trusted.csv", 30)):
        with (folder / name).open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(["[/i]\x1b[0m", "<b>b", "label"])
            for i in range(n):
                k = i % len(NAMES)
                writer.writerow([k + rng.normal() / 4, rng.normal(), NAMES[(k + (i % 7 == 0)) % len(NAMES)]])
    _write_more(folder)
    return folder


def _write_more(folder: Path) -> None:
    """The same classes as labels of several people, tasks of Label Studio, arrays and folders of images."""
    people = [f"{name}\x1b[5m" for name in ("label_[/b]", "label_<i>", "label_3")]
    with (folder / "people.csv").open("w", newline="") as file:
        csv.writer(file).writerows([people, *([NAMES[(i + (i % 5 == k)) % 6] for k in range(3)] for i in range(60))])
    choose = lambda name: {"type": "choices", "from_name": "[/b]", "to_name": "\x1b", "value": {"choices": [name]}}
    tasks = [
        {"id": f"{i}\x1b", "data": {"[/b]\n": NAMES[i % 6]}, "annotations": [_annotation(choose(NAMES[i % 6]))]}
        for i in range(12)
    ]
    (folder / "studio.json").write_text(json.dumps(tasks))
    rng = np.random.default_rng(1)
    np.save(folder / "p.npy", rng.dirichlet(np.ones(6), 90))
    np.save(folder / "x.npy", rng.normal(size=(90, 3)).astype(np.float32))
    np.save(folder / "names.npy", np.array(NAMES * 15))
    for i in range(6):
        file = folder / "photos" / NAMES[i].replace("/", "") / f"[/b]\x1b[5m{i}.png"
        file.parent.mkdir(parents=True)
        Image.fromarray(rng.integers(256, size=(8, 8, 3), dtype=np.uint8)).save(file)
        (file.parent / f"broken\x1b[5m{i}.png").write_bytes(b"no image")


def _annotation(result: dict[str, object]) -> dict[str, object]:
    return {"id": 1, "completed_by": {"email": "[/b]\x1b[5m@<b>"}, "result": [result]}


def _commands(folder: Path) -> Iterator[list[str]]:
    data, trusted, run = (str(folder / name) for name in ("data.csv", "trusted.csv", "run\x1b[5m"))
    read = ["--data", data]
    yield ["fit", *read, "--trusted", trusted, "--out", run, "--method", "ce", "--epochs", "1"]
    yield ["predict", run, *read, "--csv", str(folder / "predicted.csv")]
    yield ["audit", run, "--csv", str(folder / "audit.csv"), "--folds", "0"]
    yield ["pick", "12", run, "--csv", str(folder / "check.csv")]
    yield ["review", run, "--export", str(folder / "labels.csv"), "--export-trusted", str(folder / "more.csv")]
    yield ["correct", run, "--out", str(folder / "corrected.csv")]
    yield ["report", run, "--out", str(folder / "page")]
    yield ["figures", run, "--out", str(folder / "figures"), "--only", "calibration"]
    yield ["corrupt", *read, "--noise", "symmetric:0.2", "--out", str(folder / "noise.json")]
    yield ["audit", str(folder / "missing\x1b[5m")]
    yield ["check", run]
    yield ["check", data]
    yield ["duplicates", data, "--trusted", trusted, "--csv", str(folder / "copies.csv")]
    yield ["convert", data, "--out", str(folder / "converted\x1b[5m.npy")]
    yield ["annotators", str(folder / "people.csv"), "--out", str(folder / "consensus.csv")]
    yield ["label-studio", "import", str(folder / "studio.json"), "--out", str(folder / "studio\x1b[5m")]
    yield ["label-studio", "export", run, "--out", str(folder / "tasks.json")]
    yield ["audit", "--probabilities", str(folder / "p.npy"), *read, "--csv", str(folder / "p_audit.csv")]
    yield ["compare", *read, "--trusted", trusted, "--out", str(folder / "compared\x1b[5m")]
    mapped = ["--data", str(folder / "x.npy"), "--label", str(folder / "names.npy"), "--shuffle", "blocks"]
    yield ["fit", *mapped, "--out", str(folder / "mapped"), "--method", "ce", "--epochs", "1"]
    yield ["embed", str(folder / "photos"), "--with", "pixels:4", "--out", str(folder / "features\x1b[5m")]
    yield ["duplicates", str(folder / "photos")]


def test_every_command_shows_names_escaped(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    shown = ""
    for command in _commands(folder):
        code = main(command)
        output = "".join(capfd.readouterr())
        assert code in (0, 2), (command[0], output)
        assert code == 0 or len(output.splitlines()) == 1 or command[0] in ("review", "figures"), (command[0], output)
        assert not ACTIVE.search(output), (command[0], output)
        shown += output
    for name in NAMES:
        assert visible(name) in shown, name
    page = (folder / "page" / "report.html").read_text()
    assert "<script>alert" not in page
    assert not ACTIVE.search(page)
    assert "&lt;script&gt;alert" in page
