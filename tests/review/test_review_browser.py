"""`warpi review` in a real browser: Chromium, driven through Playwright as a person would use it."""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

if os.environ.get("WARPI_BROWSER") != "required":
    pytest.importorskip("playwright")
from playwright.sync_api import Browser, Page, ViewportSize, expect, sync_playwright
from test_review import bytes_data, serving

from warpi.data.dataset import Dataset, Files
from warpi.review.decisions import Store
from warpi.review.items import items_from_data
from warpi.runs.run import fit

FLAGS = [
    *("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"),
    *("--disable-component-update", "--disable-sync"),
]
LAPTOP, PHONE = ViewportSize(width=1280, height=800), ViewportSize(width=390, height=844)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    path = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if path is None:
        how = "there is no Chromium; `make test` installs Debian's as root, else: apt-get install chromium"
        if os.environ.get("WARPI_BROWSER") == "required":
            pytest.fail(how)
        pytest.skip(how)
    expect.set_options(timeout=20_000)  # a busy machine
    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=path, args=FLAGS)
        yield started
        started.close()


@pytest.fixture
def wrong() -> Iterator[list[str]]:
    """What went wrong in pages: errors, and requests that went elsewhere."""
    found: list[str] = []
    yield found
    assert found == []


def opened(browser: Browser, link: str, wrong: list[str]) -> Page:
    """A page in a profile of its own."""
    page = browser.new_context(viewport=LAPTOP).new_page()
    origin = link.partition("/?")[0] + "/"
    page.set_default_timeout(30_000)
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on("request", lambda request: None if request.url.startswith(origin) else wrong.append(request.url))
    visit(page, link)
    return page


def visit(page: Page, link: str) -> None:
    page.goto(link)
    page.wait_for_selector("body[data-ready]")


def shown(page: Page) -> int:
    """The row that is shown."""
    return int(page.locator("#stage").get_attribute("data-row") or -1)


class Served:
    """`warpi review` as a process of its own."""

    def __init__(self, *argv: str) -> None:
        command = [sys.executable, "-m", "warpi", "review", *argv, "--no-browser"]
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env)
        assert self.process.stdout is not None
        self.link = self.process.stdout.readline().strip()
        assert re.fullmatch(r"http://127\.0\.0\.1:\d+/\?token=[\w-]{40,}", self.link)

    def kill(self) -> None:
        self.process.kill()  # SIGKILL: nothing can be tidied up
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()


def test_from_doubt_to_a_better_classifier(browser: Browser, wrong: list[str], digits: Dataset, tmp_path: Path) -> None:
    """Nothing is trusted at first; twenty keys and a few more later WarPI can be trained, and is far better."""
    common = {"data": "digits", "epochs": 6, "seed": 1, "threads": 1}
    before = fit(tmp_path / "run", noise="pair:0.4", method="ce", meta=0, **common)  # type: ignore[arg-type]
    run, rows = tmp_path / "run", tmp_path / "rows.csv"
    chosen = np.random.default_rng(0).permutation(before.task.train.rows.numpy())[:60]  # a list before any audit
    rows.write_text("row\n" + "\n".join(map(str, chosen.tolist())))
    said: dict[int, str] = {}  # what the person, who knows digits, has said

    def press(page: Page) -> None:
        row = shown(page)
        truth = digits.classes[int(digits.y[row])]
        given, guess = (page.locator(f"#{name}-name").inner_text() for name in ("given", "guess"))
        page.keyboard.press("k" if truth == given else "a" if truth == guess else truth)
        expect(page.locator("#stage")).not_to_have_attribute("data-row", str(row))
        said[row] = truth

    served = Served(str(run), "--rows", str(rows), "--port", "0")
    try:
        page = opened(browser, served.link, wrong)
        assert "token" not in page.url  # it is in a cookie that scripts cannot read
        assert page.evaluate("document.cookie") == ""
        for _ in range(20):
            press(page)
        expect(page.locator("#count")).to_have_text("20 of 60 suspicious rows reviewed")
        last = list(said)[-1]
        page.keyboard.press("z")
        expect(page.locator("#stage")).to_have_attribute("data-row", str(last))
        del said[last]
        expect(page.locator("#count")).to_have_text("19 of 60 suspicious rows reviewed")
        page.reload()
        page.wait_for_selector("body[data-ready]")
        expect(page.locator("#count")).to_have_text("19 of 60 suspicious rows reviewed")
        assert shown(page) == last  # what was taken back is open again
        while len(set(said.values())) < 10 or len(said) < 20:
            press(page)

        served.kill()
        page.keyboard.press("u")
        expect(page.locator("#trouble")).to_contain_text("Not saved. No connection to warpi review")
        with closing(Store(run / "review" / "decisions.sqlite", {})) as store:
            assert {row: d.label for row, d in store.current_decisions().items()} == said
        port = served.link.partition("/?")[0].rpartition(":")[2]
        served = Served(str(run), "--rows", str(rows), "--port", port)
        page.click("#again")
        expect(page.locator("#trouble")).to_contain_text("open the link that it printed")  # the old key is void
        visit(page, served.link)
        expect(page.locator("#count")).to_have_text(f"{len(said)} of 60 suspicious rows reviewed")
        assert shown(page) not in said

        page.keyboard.press("e")
        expect(page.locator("#exported")).to_contain_text("Corrected labels of all rows")
        made = Path(page.locator("#exported code").nth(0).inner_text()).parent
        page.click("#exported button")
        expect(page.locator("#exported")).to_be_hidden()
        page.context.close()
    finally:
        served.kill()
    after = fit(
        tmp_path / "next",
        method="warpi",
        noise=f"given:{made / 'corrected.json'}",
        trusted=str(made / "trusted.npz"),
        **common,  # type: ignore[arg-type]
    )
    assert after.task.meta is not None
    assert len(after.task.meta) == 10 * min(list(said.values()).count(name) for name in digits.classes)
    assert after.history[-1]["test_acc"] > before.history[-1]["test_acc"] + 10  # seeds 0 to 3: 13 to 25


def test_names_and_texts_are_shown_as_they_are(browser: Browser, wrong: list[str], tmp_path: Path) -> None:
    """Markup in class names and in texts stays text; two tabs see one another; mouse, grid, filters, phone."""
    nasty = ("<img src=x onerror=window.hacked=1>", "<script>window.hacked=1</script>", "a & b")
    dataset = bytes_data(30, nasty)
    notes = [{"note": f"<b onclick=window.hacked=1>row {row}</b>", "size": "0.30000000000000004"} for row in range(30)]
    items = items_from_data(dataset, torch.zeros(30, dtype=torch.int64), None, notes)
    with serving(items, tmp_path) as client:
        page = opened(browser, client.server.link, wrong)
        expect(page.locator("#given-name")).to_have_text(nasty[0])
        expect(page.locator("#stage")).to_contain_text("<b onclick=window.hacked=1>row 0</b>")
        expect(page.get_by_title("0.30000000000000004", exact=True)).to_have_text("0.3")  # to be read by a person
        other = page.context.new_page()
        visit(other, client.server.link)

        page.keyboard.press("e")
        expect(page.locator("#exported")).to_contain_text("Not exported")
        page.keyboard.press("Escape")
        page.click("#keep")  # the mouse
        expect(page.locator("#count")).to_have_text("1 of 30 rows reviewed")
        expect(other.locator("#count")).to_have_text("1 of 30 rows reviewed")  # told by the first tab
        for tab, key, row in ((other, "u", 0), (page, "u", 1)):  # each still shows a row that the other has decided
            tab.keyboard.press(key)
            expect(tab.locator("#toast")).to_contain_text("Decided in another tab meanwhile: that stands")
            tab.keyboard.press("ArrowRight")
            expect(tab.locator("#where")).to_contain_text(f"Row {row + 1} ")
            tab.keyboard.press("3")
            expect(tab.locator("#where")).to_contain_text(f"Row {row + 2} ")
        expect(other.locator("#count")).to_have_text("3 of 30 rows reviewed")
        found = {row: (d.action, d.label) for row, d in client.server.review.store.current_decisions().items()}
        assert found == {0: ("keep", nasty[0]), 1: ("change", nasty[2]), 2: ("change", nasty[2])}
        other.close()

        page.keyboard.press("g")
        tiles = page.locator(".pick")
        tiles.nth(5).click()
        tiles.nth(8).click(modifiers=["Shift"])
        expect(page.locator("#chosen")).to_have_text("4 selected")
        page.keyboard.press("k")
        expect(page.locator("#count")).to_have_text("7 of 30 rows reviewed")
        page.keyboard.press("z")  # what was decided at once is undone at once
        expect(page.locator("#count")).to_have_text("3 of 30 rows reviewed")
        page.keyboard.press("g")

        page.keyboard.press("c")
        page.locator("#search").fill("script")
        page.keyboard.press("Enter")
        expect(page.locator("#count")).to_have_text("4 of 30 rows reviewed")
        page.keyboard.press("f")
        page.locator("#state").select_option("changed")
        expect(page.locator("#ribbon")).to_have_text(f"Changed to {nasty[2]}")
        page.keyboard.press("Escape")
        page.locator("#help").click()
        expect(page.locator("#keys")).to_contain_text("undo the last decision of this tab")
        page.keyboard.press("Escape")

        page.set_viewport_size(PHONE)
        assert page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]
        buttons = page.locator(".actions button:visible, .top nav button:visible").all()
        assert all((button.bounding_box() or {"height": 0})["height"] >= 38 for button in buttons)  # for a finger
        assert page.evaluate("window.hacked") is None
        page.context.close()


def test_which_file_it_is_and_undo_from_afar(browser: Browser, wrong: list[str], tmp_path: Path) -> None:
    """The path of an image is shown as text, without its middle where it is long; undo skips no row."""
    folder, paths = tmp_path / "data", [f"<b>{row}</b>.png" for row in range(34)]
    paths[1] = "/".join(["a" * 30, "b" * 30, "last.png"])
    dataset = replace(bytes_data(34, ("a", "b")), files=Files(str(folder), tuple(paths)))
    items = items_from_data(dataset, (torch.arange(34) >= 30).long(), None, None)
    with serving(items, tmp_path / "review") as client:
        page = opened(browser, client.server.link, wrong)
        expect(page.locator("#where")).to_have_text("Row 0 · rank 1 · <b>0</b>.png")
        page.keyboard.press("s")
        expect(page.locator("#where")).to_have_text(f"Row 1 · rank 2 · {'a' * 15}…{'b' * 23}/last.png")
        assert page.locator("#where bdi").get_attribute("title") == paths[1]
        page.keyboard.press("f")
        page.locator("#state").focus()
        page.keyboard.press("Escape")  # leaves the filters: keys decide again, and choose no other filter
        page.keyboard.press("f")
        expect(page.locator("#filters")).to_be_hidden()
        page.keyboard.press("f")
        page.locator("#given").focus()
        page.locator("#given").dispatch_event("pointerdown")  # by mouse: headless, the list itself cannot be clicked
        page.locator("#given").select_option("b")
        expect(page.locator("#where")).to_contain_text("Row 30 ")
        assert page.evaluate("document.activeElement.id") != "given"
        page.locator("#keep").click()
        expect(page.locator("#where")).to_contain_text("Row 31 ")
        page.locator("#given").select_option("")
        expect(page.locator("#where")).to_contain_text("Row 1 ")
        page.locator("#undo").click()  # a row far beyond those that were fetched
        expect(page.locator("#where")).to_contain_text("Row 30 ")
        seen = []
        while (row := shown(page)) not in seen and len(seen) < 40:
            seen.append(row)
            page.keyboard.press("k")
            expect(page.locator("#count")).to_have_text(f"{len(seen)} of 34 rows reviewed")
        assert seen == [30, *range(1, 30), *range(31, 34)]
        page.context.close()
