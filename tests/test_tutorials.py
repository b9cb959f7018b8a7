"""Every block of code in the README and the tutorials runs, in the order of the page, in one folder.

Python blocks of a page share their names. The lines of `sh` blocks are commands of warpi. A person at the review page
is replaced by the true labels, which the page keeps in `truth`, by row or by the name of the image file.
"""

import csv
import os
import re
import shlex
import sys
from pathlib import Path
from typing import Any

import notebooks
import numpy as np
import pytest
from sklearn.datasets import load_digits

from warpi.audit.decisions import Choice
from warpi.cli import review
from warpi.cli.app import main
from warpi.review.page_requests import ReviewSession

ROOT = Path(__file__).resolve().parents[1]
TUTORIALS = sorted((ROOT / "docs" / "tutorials").glob("*.md"))
INSTALL = re.compile(r"pip install (\w+|'warpi\[\w+(,\w+)*\]')")


def read_blocks(page: Path) -> list[tuple[str, str]]:
    """The language and the content of each block of code."""
    return re.findall(r"^```(\w*)\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)


def decide(session: ReviewSession, truth: Any) -> None:
    """Decide about all items as a person would who makes no mistakes."""
    items = session.items
    for i, row in enumerate(items.row.tolist()):
        label = truth[row if items.dataset.files is None else Path(items.dataset.files.paths[row]).name]
        given = items.classes[int(items.given[row])]
        action = "keep" if given == label else "change"
        session.store.decide([Choice(row, 0, action, label, given, None)], "test", f"{len(items)} {i}")


def review_in_notebook(command: str, truth: Any) -> None:
    """Stands in for a cell that opens the review page."""
    review._serve = lambda session, _: decide(session, truth)  # type: ignore[assignment]
    assert main(shlex.split(command)[1:]) == 0


def run_blocks(page: Path, scope: dict[str, Any], monkeypatch: pytest.MonkeyPatch, folder: Path) -> dict[str, int]:
    """Run the blocks of a page, and count them by language."""

    monkeypatch.setattr(review, "_serve", lambda session, _: decide(session, scope["truth"]))
    monkeypatch.chdir(folder)
    counts: dict[str, int] = {}
    for language, content in read_blocks(page):
        counts[language] = counts.get(language, 0) + 1
        if language == "python":
            exec(compile(content, f"{page.name}, block {counts[language]}", "exec"), scope)
        elif language == "sh":
            for line in filter(None, map(str.strip, content.splitlines())):
                words = shlex.split(line, comments=True)
                if words[0] == "warpi":
                    assert main(words[1:]) == 0, line
                else:
                    assert INSTALL.fullmatch(line), line
        else:
            assert language == "text", f"{page.name}: a block is python, sh or text (output): {content[:60]!r}"
    return counts


def write_penguins(folder: Path) -> None:
    """Tables with the names in the README: three groups, two measurements, 30 % of the labels wrong."""
    rng = np.random.default_rng(0)
    names = ["Adelie", "Chinstrap", "Gentoo"]
    for file, n, rate in (("penguins.csv", 120, 0.3), ("checked.csv", 15, 0.0), ("new.csv", 20, 0.0)):
        k = np.arange(n) % 3
        x = rng.normal(size=(n, 2)) + 4 * np.column_stack([k == 1, k == 2])
        given = np.where(rng.random(n) < rate, (k + 1) % 3, k)
        with (folder / file).open("w", newline="") as out:
            table = csv.writer(out)
            table.writerow(["bill_length_mm", "body_mass_g", "species"])
            table.writerows([*row, names[i]] for row, i in zip(x.round(3).tolist(), given.tolist(), strict=True))


def test_readme(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_penguins(tmp_path)
    X, y = load_digits(n_class=4, return_X_y=True)
    wrong = np.random.default_rng(0).random(len(y)) < 0.4
    given = np.where(wrong, (y + 1) % 4, y)
    names = ["Adelie", "Chinstrap", "Gentoo"]
    scope: dict[str, Any] = {"X": X[40:], "y": given[40:], "X_trusted": X[:40], "y_trusted": y[:40]}
    scope["truth"] = [names[i % 3] for i in range(120)]
    counts = run_blocks(ROOT / "README.md", scope, monkeypatch, tmp_path)
    assert counts == {"sh": 2, "python": 1}
    assert wrong[40:][scope["doubtful"]].mean() > 0.9
    with (tmp_path / "corrected.csv").open() as file:
        corrected = [row["species"] for row in csv.DictReader(file)]
    assert np.mean([a == b for a, b in zip(corrected, scope["truth"], strict=True)]) == 1.0, "all rows were reviewed"


def test_installation_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run_blocks(ROOT / "docs" / "install.md", {}, monkeypatch, tmp_path)["sh"] == 2


@pytest.mark.parametrize("page", TUTORIALS, ids=lambda page: page.stem)
def test_tutorial(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tutorials check their own results with `assert`."""
    counts = run_blocks(page, {}, monkeypatch, tmp_path)
    assert counts.get("python", 0) >= 2


def test_there_are_tutorials() -> None:
    assert {"table", "photos", "texts", "pytorch"} <= {page.stem for page in TUTORIALS}


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("page", TUTORIALS, ids=lambda page: page.stem)
def test_notebook_of_a_tutorial(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel of Jupyter runs the cells, commands included. Only the person at the review page is replaced."""
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    notebook = nbformat.from_dict(notebooks.make_notebook(page))
    nbformat.validate(notebook)
    commands = [cell for cell in notebook.cells if cell.source.startswith("!")]
    for cell in commands:
        if cell.source.startswith("!warpi review") and "--export" not in cell.source:
            cell.source = (
                f"from test_tutorials import review_in_notebook\nreview_in_notebook({cell.source[1:]!r}, truth)"
            )
    for name in ("IPYTHONDIR", "JUPYTER_RUNTIME_DIR", "JUPYTER_CONFIG_DIR"):
        monkeypatch.setenv(name, str(tmp_path / name))
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}/tests:{ROOT}/docs/site")
    (tmp_path / "work").mkdir()
    nbclient.NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(tmp_path / "work")}}).execute()
    printed = "".join(output.get("text", "") for cell in notebook.cells for output in cell.get("outputs", []))
    assert "Traceback" not in printed
    assert ("next: warpi" in printed) == bool(commands)
