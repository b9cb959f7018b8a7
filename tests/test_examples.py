"""The examples run, and links and commands in the documentation work; `test_tutorials.py` runs the code of pages."""

import contextlib
import io
import json
import re
import runpy
from functools import cache
from pathlib import Path

import pytest
import torch

from warpi.cli.app import COMMANDS, main

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
PAGES = [page for page in PAGES if page.name != "notes.md"]  # notes are included in the page next to their folder


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_links_exist(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text()):
        if not target.startswith("http"):
            assert (page.parent / target).exists(), target


@cache
def flags_of(*command: str) -> set[str]:
    content = io.StringIO()
    with contextlib.suppress(SystemExit), contextlib.redirect_stdout(content):
        main([*command, "--help-all" if command[0] == "fit" else "--help"])
    return set(re.findall(r"--[\w-]+", content.getvalue()))


def test_commands_in_the_documentation_have_flags_that_exist() -> None:
    """Deprecated names are not shown in help texts, so they fail here, too."""
    pages = [page for page in PAGES if "results" not in page.parts]
    blocks = [block for page in pages for block in re.findall(r"^```.*?^```|^    .*?$", page.read_text(), re.M | re.S)]
    lines = [line for block in blocks for line in block.splitlines() if re.match(r" *warpi [a-z]", line)]
    assert len(lines) >= 50
    for line in lines:
        words = line.partition("#")[0].split()[1:]
        assert words[0] in COMMANDS, line
        command = words[: 2 if words[0] == "fewshot" else 1]
        if words[0] == "fit" and "--method" in words:
            command += words[words.index("--method") :][:2]
        assert {word for word in words if word.startswith("--")} <= flags_of(*command), line


def test_own_method() -> None:
    module = runpy.run_path(str(ROOT / "examples" / "own_method.py"))
    assert module["accuracy"](module["GCE"](), 8) > module["accuracy"](module["CE"](), 8)


def test_own_meta_method() -> None:
    module = runpy.run_path(str(ROOT / "examples" / "own_meta_method.py"))
    assert module["accuracy"](module["METHODS"]["entropy_weight"], 7) > module["accuracy"](module["CE"](), 7)


@pytest.mark.parametrize("n_jobs", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_scikit_learn_grid_search(n_jobs: int) -> None:
    main = runpy.run_path(str(ROOT / "examples" / "sklearn_grid_search.py"))["main"]
    method, accuracy, plain = main(n_jobs=n_jobs)
    assert method == "glc"
    assert accuracy > plain + 10


def test_text_tfidf() -> None:
    accuracy, auroc = runpy.run_path(str(ROOT / "examples" / "text_tfidf.py"))["main"](epochs=10)
    assert accuracy > 90
    assert auroc > 0.9


@pytest.mark.slow  # tests/estimator/test_estimator.py trains custom modules, too
def test_own_module() -> None:
    accuracy, precision = runpy.run_path(str(ROOT / "examples" / "own_module.py"))["main"](epochs=4)
    assert accuracy > 75
    assert precision > 0.8


def test_table_csv(tmp_path: Path) -> None:
    before, after = runpy.run_path(str(ROOT / "examples" / "table_csv.py"))["main"](tmp_path, model="knn")
    assert before < 62
    assert after > 90
    noisy, corrected = ((tmp_path / name).read_text().splitlines() for name in ("noisy.csv", "corrected.csv"))
    assert [line.rpartition(",")[0] for line in noisy] == [line.rpartition(",")[0] for line in corrected]


@pytest.mark.slow  # tests/datasets/test_image_folders.py and tests/audit do the same in less time
def test_image_folder(tmp_path: Path) -> None:
    accuracy, precision, recall = runpy.run_path(str(ROOT / "examples" / "image_folder.py"))["main"](
        tmp_path, epochs=11
    )
    assert accuracy > 85
    assert precision > 0.85
    assert recall > 0.7


def test_notebook(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Run the cells in order in one namespace."""
    import tempfile

    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    shown: list[int] = []
    monkeypatch.setattr(plt, "show", lambda: shown.extend(plt.get_fignums()) or plt.close("all"))
    monkeypatch.setattr(tempfile, "mkdtemp", lambda: str(tmp_path))
    notebook = json.loads((ROOT / "examples" / "notebook.ipynb").read_text())
    assert (notebook["nbformat"], {cell["cell_type"] for cell in notebook["cells"]}) == (4, {"markdown", "code"})
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in code), "clear the outputs"
    scope: dict[str, object] = {}
    for cell in code:
        exec("".join(cell["source"]).replace("EPOCHS = 30", "EPOCHS = 5"), scope)
    assert len(shown) == 2
    assert (tmp_path / "report" / "report.html").stat().st_size > 20_000
    line = re.search(r"warpi: test accuracy (\S+) %\n *ce: test accuracy (\S+) %", capsys.readouterr().out)
    assert line
    assert float(line[1]) > float(line[2]) + 10


def test_fewshot_own_tasks(capsys: pytest.CaptureFixture[str]) -> None:
    module = runpy.run_path(str(ROOT / "examples" / "fewshot_own_tasks.py"))
    learner = module["trained"](module["make_learner"]("metavrf_evidence", proposals=4), steps=40)
    assert module["error"](learner, 100) < 0.5  # predicting zero: 1.4
    one = module["pendulums"](1, torch.Generator().manual_seed(2))
    adapted = learner.adapt(one.support_x[0], one.support_y[0])
    x, y = one.query_x[0, :3], one.query_y[0, :3]
    module["show"](x, y, adapted.predict(x), adapted.std(x))
    assert len(capsys.readouterr().out.splitlines()) == 4


def test_demo(tmp_path: Path) -> None:
    """One run and the report of the demo; CI runs all of it with `make demo`."""
    module = runpy.run_path(str(ROOT / "examples" / "demo.py"))
    assert module["run"]((tmp_path, "pair:0.4", "ce", 0)) == "pair-ce-0"
    before = (tmp_path / "pair-ce-0" / "results.jsonl").read_text()
    assert module["run"]((tmp_path, "pair:0.4", "ce", 0)) == "pair-ce-0", "a finished run is not repeated"
    assert (tmp_path / "pair-ce-0" / "results.jsonl").read_text() == before
    assert main(["report", str(tmp_path), "--json", str(tmp_path / "summary.json")]) == 0
    (row,) = json.loads((tmp_path / "summary.json").read_text())
    assert {"method", "data", "noise", "net", "n_seeds", "last_mean", "last_std", "val_mean", "best_mean"} <= set(row)
    assert (row["method"], row["n_seeds"]) == ("ce", 1)
