"""The documentation site: built without warnings, and read in Chromium from a folder, without a server or a network."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from notebooks import make_notebook

pytestmark = pytest.mark.slow
ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    env = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=200)
    assert (done.returncode, done.stdout + done.stderr) == (0, "")
    return folder


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    sync_playwright = pytest.importorskip("playwright.sync_api").sync_playwright
    program = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if program is None:
        if os.environ.get("WARPI_BROWSER") == "required":
            pytest.fail("Chromium is not installed")
        pytest.skip("Chromium is not installed")
    with sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=program, args=["--no-sandbox", "--disable-gpu"])
        yield opened
        opened.close()


def test_every_command_and_public_name_is_described(site: Path) -> None:
    import warpi
    from warpi.cli.app import COMMANDS

    commands, python = ((site / name).read_text() for name in ("cli.html", "python.html"))
    assert [name for name in COMMANDS if f"warpi {name}" not in commands] == []
    assert [name for name in warpi.__all__ if name[0] != "_" and f'id="warpi.{name}"' not in python] == []


@pytest.mark.parametrize("width", [1440, 390])
def test_pages_fit_the_screen_and_ask_for_nothing_outside(site: Path, browser: Any, width: int) -> None:
    pages = sorted(path for path in site.rglob("*.html") if path.name != "404.html")
    assert len(pages) > 120
    context = browser.new_context(viewport={"width": width, "height": 900})
    page, requests, errors = context.new_page(), [], []
    page.on("request", lambda request: requests.append(request.url))
    page.on("pageerror", lambda error: errors.append(f"{page.url}: {error}"))
    too_wide = []
    for path in pages:
        page.goto(path.as_uri())
        if page.evaluate("document.documentElement.scrollWidth") > width:
            too_wide.append(str(path.relative_to(site)))
    context.close()
    assert [url for url in requests if not url.startswith(("file:", "data:", "blob:"))] == []
    assert (too_wide, errors) == ([], [])


def test_the_search_works_from_a_folder(site: Path, browser: Any) -> None:
    page = browser.new_page()
    page.goto((site / "methods" / "ce.html").as_uri())
    page.click(".md-search__input")
    page.keyboard.type("annotators")
    page.wait_for_selector(".md-search-result__item", timeout=20_000)
    links = page.eval_on_selector_all(".md-search-result__link", "links => links.map(link => link.href)")
    page.close()
    assert any("annotators.html" in link for link in links), json.dumps(links)


def test_a_tutorial_can_be_downloaded_as_a_notebook_from_a_folder(site: Path, browser: Any) -> None:
    page = browser.new_page()
    page.goto((site / "tutorials" / "table.html").as_uri())
    with page.expect_download() as download:
        page.click("text=Download this tutorial as a notebook")
    assert download.value.suggested_filename == "table.ipynb"
    assert json.loads(Path(download.value.path()).read_text()) == make_notebook(
        ROOT / "docs" / "tutorials" / "table.md"
    )
    page.close()
