"""`warpi review` in a real browser: Chromium, controlled with Playwright as a person would use it."""

import csv
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
from review_helpers import make_audited_items, make_copies, make_images, make_unusual, serve

from warpi.audit.decisions import Store
from warpi.cli.app import main
from warpi.data.dataset import Dataset, Files
from warpi.review.items import items_from_data
from warpi.runs.run import fit

FLAGS = [
    *("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"),
    *("--disable-component-update", "--disable-sync", "--disable-extensions", "--mute-audio"),
]
LAPTOP, PHONE = ViewportSize(width=1280, height=800), ViewportSize(width=390, height=844)
WIDTHS = (1440, 1920, 390)
LONG = ("Caltha palustris subsp. palustris", "automobile (passenger)", "Myosotis", "Pneumonoultramicroscopicsilicosis")


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    path = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if path is None:
        advice = "there is no Chromium; `make test` installs Debian's as root, else: apt-get install chromium"
        if os.environ.get("WARPI_BROWSER") == "required":
            pytest.fail(advice)
        pytest.skip(advice)
    expect.set_options(timeout=20_000)  # for a busy machine
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=path, args=FLAGS)
        yield chromium
        chromium.close()


@pytest.fixture
def errors() -> Iterator[list[str]]:
    """JavaScript errors and requests to other servers; there must be none at the end of a test."""
    collected: list[str] = []
    yield collected
    assert collected == []


def open_page(browser: Browser, link: str, errors: list[str]) -> Page:
    """A page in a new browser profile."""
    page = browser.new_context(viewport=LAPTOP).new_page()
    origin = link.partition("/?")[0] + "/"
    page.set_default_timeout(30_000)
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("request", lambda request: None if request.url.startswith(origin) else errors.append(request.url))
    visit(page, link)
    return page


def visit(page: Page, link: str) -> None:
    page.goto(link)
    page.wait_for_selector("body[data-ready]")


def row_shown(page: Page) -> int:
    return int(page.locator("#stage").get_attribute("data-row") or -1)


def test_restarted_server(browser: Browser, errors: list[str], tmp_path: Path) -> None:
    """If the server stops, the page keeps the decision; after a restart the old key is invalid."""
    dataset = make_images(6, ("a", "b"))
    items = items_from_data(dataset, dataset.y)
    with serve(items, tmp_path) as client:
        page = open_page(browser, client.server.link, errors)
        port = client.port
        assert "token" not in page.url  # it is in a cookie that scripts cannot read
        assert page.evaluate("document.cookie") == ""
        page.keyboard.press("k")
        expect(page.locator("#count")).to_have_text("1 of 6 rows reviewed")
        page.keyboard.press("k")
        expect(page.locator("#count")).to_have_text("2 of 6 rows reviewed")
        page.keyboard.press("z")
        expect(page.locator("#count")).to_have_text("1 of 6 rows reviewed")
        page.reload()
        page.wait_for_selector("body[data-ready]")
        assert row_shown(page) == 1  # the undone row is open again
    page.keyboard.press("u")
    expect(page.locator("#trouble")).to_contain_text("Not saved. No connection to warpi review")
    with serve(items, tmp_path, port) as client:
        page.click("#again")
        expect(page.locator("#trouble")).to_contain_text("Open the link that it printed")
        visit(page, client.server.link)
        expect(page.locator("#count")).to_have_text("1 of 6 rows reviewed")
        page.keyboard.press("k")
        expect(page.locator("#count")).to_have_text("2 of 6 rows reviewed")
        page.keyboard.press("e")
        expect(page.locator("#exported")).to_contain_text("Corrected labels of all rows")
        folder = Path(page.locator("#exported code").nth(0).inner_text()).parent
        page.click("#exported button")
        expect(page.locator("#exported")).to_be_hidden()
        assert {path.name for path in folder.iterdir()} == {"corrected.csv", "corrected.json", "trusted.npz"}
        page.context.close()


class Served:
    """`warpi review` in a separate process."""

    def __init__(self, *argv: str) -> None:
        command = [sys.executable, "-m", "warpi", "review", *argv, "--no-browser"]
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env)
        assert self.process.stdout is not None
        self.link = self.process.stdout.readline().strip()
        assert re.fullmatch(r"http://127\.0\.0\.1:\d+/\?token=[\w-]{40,}", self.link)

    def kill(self) -> None:
        self.process.kill()  # SIGKILL: the process cannot clean up
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()


@pytest.mark.slow
def test_from_noisy_labels_to_a_better_classifier(
    browser: Browser, errors: list[str], digits: Dataset, tmp_path: Path
) -> None:
    """Start without trusted rows; after about twenty keys, WarPI can be trained and is far more accurate."""
    common = {"data": "digits", "epochs": 6, "seed": 1, "threads": 1}
    before = fit(tmp_path / "run", noise="pair:0.4", method="ce", meta=0, **common)  # type: ignore[arg-type]
    run = tmp_path / "run"
    rows = tmp_path / "rows.csv"
    chosen = np.random.default_rng(0).permutation(before.task.train.rows.numpy())[:60]  # a list before any audit
    lines = [f"{row},random,{len(before.task.train)},60" for row in chosen.tolist()]
    rows.write_text("\n".join(["row,part,stratum_size,stratum_picked", *lines]))
    decided: dict[int, str] = {}  # true labels

    def press(page: Page) -> None:
        row = row_shown(page)
        truth = digits.classes[int(digits.y[row])]
        expect(page.locator("#given-name")).to_have_text("hidden until you choose")  # the rows were drawn at random
        page.keyboard.press(truth)
        expect(page.locator("#stage")).not_to_have_attribute("data-row", str(row))
        decided[row] = truth

    server = Served(str(run), "--rows", str(rows), "--port", "0")
    try:
        page = open_page(browser, server.link, errors)
        while len(set(decided.values())) < 10 or len(decided) < 20:
            press(page)
        expect(page.locator("#count")).to_have_text(f"{len(decided)} of 60 rows of the list reviewed")
        server.kill()
        with closing(Store(run / "review" / "decisions.sqlite", {})) as store:
            assert {row: d.label for row, d in store.current_decisions().items()} == decided
        port = server.link.partition("/?")[0].rpartition(":")[2]
        server = Served(str(run), "--rows", str(rows), "--port", port)
        visit(page, server.link)
        expect(page.locator("#count")).to_have_text(f"{len(decided)} of 60 rows of the list reviewed")
        assert row_shown(page) not in decided
        page.keyboard.press("e")
        expect(page.locator("#exported")).to_contain_text("Corrected labels of all rows")
        folder = Path(page.locator("#exported code").nth(0).inner_text()).parent
        page.context.close()
    finally:
        server.kill()
    after = fit(
        tmp_path / "next",
        method="warpi",
        labels=str(folder / "corrected.json"),
        trusted=str(folder / "trusted.npz"),
        **common,  # type: ignore[arg-type]
    )
    assert after.task.meta is not None
    assert len(after.task.meta) == len(decided)
    assert after.history[-1]["test_acc"] > before.history[-1]["test_acc"] + 10  # seeds 0 to 3: 13 to 25


def test_text_two_tabs_mouse_grid_filters_and_phone(browser: Browser, errors: list[str], tmp_path: Path) -> None:
    """Markup in class names and texts stays text, and two tabs see each other's decisions."""
    markup = ("<img src=x onerror=window.hacked=1>", "<script>window.hacked=1</script>", "a & b")
    dataset = make_images(30, markup)
    notes = [{"note": f"<b onclick=window.hacked=1>row {row}</b>", "size": "0.30000000000000004"} for row in range(30)]
    items = items_from_data(dataset, torch.zeros(30, dtype=torch.int64), None, notes)
    with serve(items, tmp_path) as client:
        page = open_page(browser, client.server.link, errors)
        expect(page.locator("#given-name")).to_have_text(markup[0])
        expect(page.locator("#stage")).to_contain_text("<b onclick=window.hacked=1>row 0</b>")
        expect(page.get_by_title("0.30000000000000004", exact=True)).to_have_text("0.3")  # rounded for reading
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
            expect(tab.locator("#toast")).to_contain_text("Already decided in another tab")
            tab.keyboard.press("ArrowRight")
            expect(tab.locator("#where")).to_contain_text(f"Row {row + 1} ")
            tab.keyboard.press("3")
            expect(tab.locator("#where")).to_contain_text(f"Row {row + 2} ")
        expect(other.locator("#count")).to_have_text("3 of 30 rows reviewed")
        decisions = {row: (d.action, d.label) for row, d in client.server.review.store.current_decisions().items()}
        assert decisions == {0: ("keep", markup[0]), 1: ("change", markup[2]), 2: ("change", markup[2])}
        other.close()

        page.keyboard.press("g")
        tiles = page.locator(".pick")
        tiles.nth(5).click()
        tiles.nth(8).click(modifiers=["Shift"])
        expect(page.locator("#chosen")).to_have_text("4 selected")
        page.keyboard.press("k")
        expect(page.locator("#count")).to_have_text("7 of 30 rows reviewed")
        page.keyboard.press("z")  # decisions of one step are undone together
        expect(page.locator("#count")).to_have_text("3 of 30 rows reviewed")
        page.keyboard.press("g")

        page.keyboard.press("c")
        page.locator("#search").fill("script")
        page.keyboard.press("Enter")
        expect(page.locator("#count")).to_have_text("4 of 30 rows reviewed")
        page.keyboard.press("f")
        page.locator("#state").select_option("changed")
        expect(page.locator("#ribbon")).to_have_text(f"Changed to {markup[2]}")
        page.keyboard.press("Escape")
        page.locator("#help").click()
        expect(page.locator("#keys")).to_contain_text("undo the last decision of this tab")
        page.keyboard.press("Escape")

        page.set_viewport_size(PHONE)
        assert page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]
        buttons = page.locator(".actions button:visible, .top nav button:visible").all()
        assert buttons
        assert all((button.bounding_box() or {"height": 0})["height"] >= 38 for button in buttons)  # for a finger
        assert page.evaluate("window.hacked") is None
        page.context.close()


def test_a_report_of_hostile_names_runs_no_script(browser: Browser, errors: list[str], tmp_path: Path) -> None:
    names = (
        "<img src=x onerror=window.hacked=1>",
        "<script>window.hacked=1</script>",
        "'\"><b onclick=window.hacked=1>",
    )
    rng = np.random.default_rng(0)
    with (tmp_path / "t.csv").open("w", newline="") as file:
        lines = [[i % 3 + rng.normal() / 3, rng.normal(), names[(i + (i % 9 == 0)) % 3]] for i in range(90)]
        csv.writer(file).writerows([[names[0], "</script><script>window.hacked=1</script>", "label"], *lines])
    fit(tmp_path / names[1].replace("/", ""), data=str(tmp_path / "t.csv"), method="ce", epochs=2, test=0.2, quiet=True)
    run = str(tmp_path / names[1].replace("/", ""))
    assert main(["report", run, "--audit", "--out", str(tmp_path / "page")]) == 0
    page = browser.new_context().new_page()
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("dialog", lambda dialog: errors.append(dialog.message))
    page.goto((tmp_path / "page" / "report.html").as_uri())
    shown = page.locator("body").inner_text()
    assert all(name in shown for name in names)
    assert page.evaluate("window.hacked") is None
    assert page.locator("img[onerror], [onclick], body script").count() == 0


def test_paths_and_undo_of_a_row_that_is_not_fetched(browser: Browser, errors: list[str], tmp_path: Path) -> None:
    """Paths of images are shown as text, shortened in the middle; undo skips no row."""
    folder = tmp_path / "data"
    paths = [f"<b>{row}</b>.png" for row in range(29)]
    paths[1] = "/".join(["a" * 30, "b" * 30, "last.png"])
    dataset = replace(make_images(29, ("a", "b")), files=Files(str(folder), tuple(paths)))
    items = items_from_data(dataset, (torch.arange(29) >= 26).long())
    with serve(items, tmp_path / "review") as client:
        page = open_page(browser, client.server.link, errors)
        expect(page.locator("#where")).to_have_text("Row 0 · 1 of 29 · <b>0</b>.png")
        page.keyboard.press("s")
        expect(page.locator("#where")).to_have_text(f"Row 1 · 2 of 29 · {'a' * 15}…{'b' * 23}/last.png")
        assert page.locator("#where bdi").get_attribute("title") == paths[1]
        page.keyboard.press("f")
        page.locator("#state").focus()
        page.keyboard.press("Escape")  # leaves the filters, so that keys decide again
        page.keyboard.press("f")
        expect(page.locator("#filters")).to_be_hidden()
        page.keyboard.press("f")
        page.locator("#given").focus()
        page.locator("#given").dispatch_event("pointerdown")  # as by mouse; a headless list cannot be clicked
        page.locator("#given").select_option("b")
        expect(page.locator("#where")).to_contain_text("Row 26 ")
        assert page.evaluate("document.activeElement.id") != "given"
        page.locator("#keep").click()
        expect(page.locator("#where")).to_contain_text("Row 27 ")
        page.locator("#given").select_option("")
        expect(page.locator("#where")).to_contain_text("Row 1 ")
        page.locator("#undo").click()  # a row beyond those that were fetched
        expect(page.locator("#where")).to_contain_text("Row 26 ")
        shown: list[int] = []
        for n in range(1, 5):
            shown.append(row_shown(page))
            page.keyboard.press("k")
            expect(page.locator("#count")).to_have_text(f"{n} of 29 rows reviewed")
        assert shown == [26, 1, 2, 3]
        page.keyboard.press("g")
        expect(page.locator(".pick")).to_have_count(28)  # all open rows and those decided here, none twice
        page.context.close()


def test_a_hidden_label_is_not_in_the_path(browser: Browser, errors: list[str], tmp_path: Path) -> None:
    """The folder of an image is its given label, so only the name of the file is shown until the person has chosen."""
    paths = tuple(f"{'ab'[row % 2]}/{row}.png" for row in range(4))
    dataset = replace(make_images(4, ("a", "b")), files=Files(str(tmp_path), paths))
    items = replace(items_from_data(dataset, dataset.y), random_rows=frozenset(range(4)))
    with serve(items, tmp_path / "review") as client:
        page = open_page(browser, client.server.link, errors)
        expect(page.locator("#where")).to_have_text("Row 0 · 1 of 4 · 0.pngdrawn at random")
        assert page.locator("#where bdi").get_attribute("title") == "0.png"
        page.keyboard.press("v")
        expect(page.locator("#where")).to_have_text("Row 0 · 1 of 4 · a/0.pngdrawn at random")
        page.context.close()


def test_names_of_classes_are_shown_in_full(browser: Browser, errors: list[str], tmp_path: Path) -> None:
    """Buttons, bars, neighbors and the pairs of `Accept many` cut no name, at any width."""
    items = make_audited_items(24, LONG, n_trusted=4)
    with serve(items, tmp_path) as client:
        page = open_page(browser, client.server.link, errors)
        for width in WIDTHS:
            page.set_viewport_size(ViewportSize(width=width, height=900))
            expect(page.locator("#neighbors figcaption").first).to_be_visible()
            names = page.locator(".actions b, .bars .name, .neighbors figcaption")
            cut = (
                "nodes => nodes.filter(n => n.scrollWidth > n.clientWidth + 1 && n.clientWidth).map(n => n.textContent)"
            )
            assert names.evaluate_all(cut) == []
            page.keyboard.press("b")
            page.locator("#bulk-above").select_option("0.5")
            expect(page.locator("#bulk-pairs tbody tr").first).to_be_visible()
            narrow = "cells => cells.map(c => c.clientWidth).filter(width => width > 0 && width < 40)"
            assert page.locator("#bulk-pairs td:not(.number):not(:last-child)").evaluate_all(narrow) == []
            page.keyboard.press("Escape")
        page.context.close()


@pytest.mark.parametrize("kind", ["images", "table"])
def test_tiles_show_the_whole_suggestion_at_every_width(
    browser: Browser, errors: list[str], tmp_path: Path, kind: str
) -> None:
    """No label is cut, leaves its tile, or covers something else."""
    items = make_audited_items(24, LONG, is_table=kind == "table")
    with serve(items, tmp_path) as client:
        page = open_page(browser, client.server.link, errors)
        page.keyboard.press("g")
        expect(page.locator(".tiles .pick")).to_have_count(24)
        page.keyboard.press("x")  # a decided tile also shows its new label
        page.keyboard.press("a")
        expect(page.locator(".pick .ribbon:visible").first).to_contain_text("→")
        for width in WIDTHS:
            page.set_viewport_size(ViewportSize(width=width, height=900))
            assert page.evaluate("document.documentElement.scrollWidth") <= width
            measured = page.evaluate(
                """() => [...document.querySelectorAll('.pick')].map(tile => {
                  const box = tile.getBoundingClientRect();
                  return [...tile.querySelectorAll('.line, .line em, .share, .ribbon, th, td')].map(node => {
                    const b = node.getBoundingClientRect(), style = getComputedStyle(node);
                    const inside = b.left >= box.left && b.right <= box.right + .5 && b.bottom <= box.bottom + .5;
                    const fits = node.scrollWidth <= Math.ceil(b.width) + 1 || style.display === 'inline';
                    return [inside && b.width > 0, fits, style.textOverflow !== 'ellipsis', node.textContent];
                  });
                })"""
            )
            assert len(measured) == 24
            for tile in measured:
                assert len(tile) >= 3
                assert all(inside and fits and whole for inside, fits, whole, _ in tile), (width, tile)
            shown = page.locator(".pick .line").all_inner_texts()
            pairs = zip(items.given[items.row], items.suggested, strict=True)
            expected = [f"{LONG[int(given)]} → {LONG[int(suggested)]}" for given, suggested in pairs]
            assert [" ".join(text.split()) for text in shown] == expected
        page.context.close()


def test_accepting_a_pair_of_classes_undo_progress_and_export(
    browser: Browser, errors: list[str], tmp_path: Path
) -> None:
    items = make_audited_items(40, ("cat", "dog", "emu"), accuracy=0.4)
    with serve(items, tmp_path) as client:
        page = open_page(browser, client.server.link, errors)
        store = client.server.review.store
        expect(page.locator("#intro")).to_contain_text("K keeps the given label")  # nothing was decided before
        page.click("#intro-close")
        expect(page.locator("#intro")).to_be_hidden()
        expect(page.locator("#concerns")).to_contain_text("right for only 40 % of the trusted rows")
        expect(page.locator("#concerns")).to_contain_text("warpi pick 40")
        page.keyboard.press("p")
        expect(page.locator("#curve-text")).to_contain_text("The curve appears after a few decisions")
        page.keyboard.press("Escape")

        page.keyboard.press("b")
        expect(page.locator("#bulk-pairs tbody tr")).to_have_count(3)
        page.locator("#bulk-above").select_option("0.5")
        expect(page.locator("#bulk-pairs tbody tr").first).to_contain_text("14")
        page.locator("#bulk-pairs button").first.click()
        expect(page.locator("#bulk-preview .pick")).to_have_count(12)
        cells = page.locator("#bulk-pairs tbody tr").first.locator("td").all_inner_texts()
        page.locator("#bulk-accept").click()
        expect(page.locator("#toast")).to_contain_text(f"{cells[2]} label")
        accepted = store.current_decisions()
        assert len(accepted) == int(cells[2]) > 12
        assert all(d.is_automatic and (d.given, d.label) == (cells[0], cells[1]) for d in accepted.values())
        expect(page.locator("#count")).to_contain_text(f"{len(accepted)} of ")
        page.keyboard.press("z")
        expect(page.locator("#toast")).to_have_text(f"Undone: {len(accepted)} rows")
        assert store.current_decisions() == {}

        for n in range(1, 4):
            page.keyboard.press("a")
            expect(page.locator("#count")).to_contain_text(f"{n} of ")
        page.keyboard.press("p")
        expect(page.locator("#curve-text svg polyline")).to_have_count(2)
        expect(page.locator("#curve-text")).to_contain_text("3 rows of 40 decided")
        expect(page.locator("#curve-text")).to_contain_text("Checking 20 more randomly drawn rows")
        page.keyboard.press("Escape")
        page.keyboard.press("e")
        expect(page.locator("#exported")).to_contain_text("Corrected labels of all rows")
        expect(page.locator("#exported")).to_contain_text("do not represent the data")
        page.keyboard.press("Escape")
        page.keyboard.press("b")
        page.locator("#bulk-pairs button").first.click()
        page.locator("#bulk-accept").click()
        expect(page.locator("#toast")).to_contain_text(" changed. Undo")
        page.keyboard.press("e")
        expect(page.locator("#exported")).to_contain_text("nobody has checked them")
        folder = Path(page.locator("#exported code").nth(0).inner_text()).parent
        assert (folder / "corrected.csv").read_text().count(",accepted,0,") > 0
        page.context.close()


def test_two_people_lose_nothing(browser: Browser, errors: list[str], tmp_path: Path) -> None:
    """Two browsers decide at the same time, one of them many rows at once. Both see the decisions of the other."""
    items = make_audited_items(40, ("cat", "dog", "emu"))
    with serve(items, tmp_path) as client:
        store = client.server.review.store
        ann, bob = (open_page(browser, client.server.link, errors) for _ in range(2))
        first = row_shown(ann)
        assert row_shown(bob) == first
        ann.keyboard.press("k")
        expect(ann.locator("#count")).to_contain_text("1 of ")
        bob.keyboard.press("a")  # the same row
        expect(bob.locator("#toast")).to_contain_text("by someone else")
        assert store.current_decisions()[first].action == "keep"
        bob.keyboard.press("ArrowRight")
        expect(bob.locator("#stage")).not_to_have_attribute("data-row", str(first))
        bob.keyboard.press("u")
        expect(bob.locator("#count")).to_contain_text("2 of ")
        bob.keyboard.press("b")
        bob.locator("#bulk-pairs button").first.click()
        ann.keyboard.press("2")  # the row that bob has decided
        expect(ann.locator("#toast")).to_contain_text("by someone else")
        ann.keyboard.press("ArrowRight")
        ann.keyboard.press("2")  # while bob looks at the preview
        expect(ann.locator("#count")).to_contain_text("3 of ")
        before = store.current_decisions()
        bob.locator("#bulk-accept").click()
        expect(bob.locator("#toast")).to_contain_text(" changed. Undo")
        after = store.current_decisions()
        assert {row: after[row] for row in before} == before
        assert len(after) > len(before)
        ann.keyboard.press("z")  # undoes the last step of this person only
        expect(ann.locator("#toast")).to_contain_text("Undone: row")
        last = max(before.values(), key=lambda d: d.id)
        assert set(after) - set(store.current_decisions()) == {last.row}
        ann.context.close()
        bob.context.close()


def test_hidden_labels_orders_ids_and_evidence(browser: Browser, errors: list[str], tmp_path: Path) -> None:
    items = make_audited_items(40, ("cat", "dog", "emu"), is_table=True, n_trusted=9)
    rows = items.row[:2].tolist()
    items = replace(items, random_rows=frozenset(rows[:1]))
    with serve(items, tmp_path) as client:
        page = open_page(browser, client.server.link, errors)
        given = items.classes[int(items.given[rows[0]])]
        expect(page.locator("#where")).to_contain_text("drawn at random")
        expect(page.locator("#given-name")).to_have_text("hidden until you choose")
        expect(page.locator("#guess-name")).to_be_hidden()
        expect(page.locator("#effect")).to_contain_text("makes it a trusted example")
        assert page.locator("th.evidence").count() == 0
        page.keyboard.press("k")
        expect(page.locator("#toast")).to_contain_text("Choose a class first")
        page.keyboard.press("v")
        expect(page.locator("#given-name")).to_have_text(given)
        page.reload()
        page.wait_for_selector("body[data-ready]")
        page.keyboard.press(str(items.classes.index(given) + 1))
        expect(page.locator("#toast")).to_contain_text(f"You chose {given}, like the given label")

        expect(page.locator("#stage")).to_have_attribute("data-row", str(rows[1]))
        expect(page.locator("#effect")).to_contain_text("does not become a trusted example")
        names = page.locator(".table tbody th").all_inner_texts()
        assert names == [cell.name for cell in items.describe(rows[1])]
        assert names[0] == "telling"
        expect(
            page.locator(".table thead .tag").filter(has_text=items.classes[int(items.given[rows[1]])])
        ).to_have_count(1)
        digits = page.locator(".table td.own").all_inner_texts()
        assert all(len(re.sub(r"\D", "", text).lstrip("0")) <= 4 for text in digits)
        assert page.locator(".speaks .for").count() >= 1
        page.keyboard.press("f")
        page.locator("#order").select_option("gain")
        expect(page.locator("#stage")).to_have_attribute("data-row", str(items.row[items.orders["gain"][0]]))
        page.context.close()


def test_two_people_at_once(browser: Browser, errors: list[str], tmp_path: Path) -> None:
    """Each decides own rows in an own browser; both decide some rows without seeing the decision of the other."""
    with serve(make_audited_items(20, ("ant", "bee")), tmp_path, people=("anna", "ben"), overlap=0.2) as client:
        server = client.server
        anna, ben = (open_page(browser, server.link_with(server.tokens[name]), errors) for name in ("anna", "ben"))
        lead = open_page(browser, server.link, errors)
        seen: dict[str, dict[int, str]] = {"anna": {}, "ben": {}}
        for _ in range(12):  # 20 rows, four of them for both
            for name, page, key in (("anna", anna, "a"), ("ben", ben, "k")):
                row = row_shown(page)
                assert row not in seen[name]
                page.keyboard.press(key)
                seen[name][row] = key
            for name, page in (("anna", anna), ("ben", ben)):
                expect(page.locator("#count")).to_have_text(re.compile(rf"^{len(seen[name])} of 12 "))
        assert len(seen["anna"].keys() & seen["ben"].keys()) == 4
        assert seen["anna"].keys() | seen["ben"].keys() == set(range(20))
        expect(anna.locator("#person")).to_have_text("anna")
        expect(anna.locator("#export")).to_be_hidden()
        expect(lead.locator("#person")).to_be_hidden()
        for page, width in ((anna, 1440), (ben, 390)):
            page.set_viewport_size(ViewportSize(width=width, height=844))
            expect(page.locator("#empty-title")).to_have_text("All done")
            page.click("#curve")
            expect(page.locator("#together")).to_contain_text("anna and ben agree on 0 of 4 rows")
            expect(page.locator("#together")).to_contain_text("4 rows with different labels")
            assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
            if folder := os.environ.get("WARPI_SCREENSHOTS"):
                page.screenshot(path=f"{folder}/people-{width}.png")
                page.keyboard.press("Escape")
                page.screenshot(path=f"{folder}/people-done-{width}.png")
        lead.reload()
        lead.wait_for_selector("body[data-ready]")
        expect(lead.locator("#count")).to_have_text(re.compile("^20 of 20 "))
        for page in (anna, ben, lead):
            page.context.close()


@pytest.mark.parametrize("kind", ["images", "table"])
def test_copies_side_by_side(browser: Browser, errors: list[str], tmp_path: Path, kind: str) -> None:
    """One key keeps a copy, undo takes it back, the export leaves the others out, and everything fits on a phone."""
    items = make_audited_items(12, ("cat", "dog", "emu"), is_table=kind == "table")
    with serve(make_copies(items, [[0, 3], [1, 2, 4], [7]], {0: 2}), tmp_path) as client:
        page = open_page(browser, client.server.link, errors)
        store = client.server.review.store
        page.keyboard.press("d")
        where = page.locator("#copies-where")
        expect(where).to_have_text("Group 1 of 3, 3 undecided")
        expect(page.locator("#copies-text")).to_contain_text("A copy is in the test set and stays there")
        expect(page.locator(".copy button").first).to_be_disabled()
        page.keyboard.press("1")  # this one cannot be kept
        page.keyboard.press("2")
        expect(where).to_have_text("Group 2 of 3, 2 undecided")
        assert [row for row, d in store.current_decisions().items() if d.is_dropped] == [7]
        expect(page.locator("#copies-text")).to_contain_text("The labels contradict each other")
        expect(page.locator(".copy strong")).to_have_text(["emu", "cat", "emu"])
        if kind == "images":
            page.wait_for_function("[...document.querySelectorAll('.copy img')].every(img => img.naturalWidth > 0)")
        else:
            expect(page.locator(".copy td.own").first).to_be_visible()  # a cell that differs from that of the first row
        for width in WIDTHS:
            page.set_viewport_size(ViewportSize(width=width, height=844))
            assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
            if folder := os.environ.get("WARPI_SCREENSHOTS"):
                page.screenshot(path=f"{folder}/copies-{kind}-{width}.png")
        page.keyboard.press("3")
        expect(where).to_have_text("Group 3 of 3, 1 undecided")
        page.keyboard.press("z")
        expect(where).to_have_text("Group 2 of 3, 2 undecided")
        assert list(store.current_decisions()) == [7]
        page.locator(".copy button").nth(1).click()
        expect(where).to_have_text("Group 3 of 3, 1 undecided")
        page.keyboard.press("ArrowLeft")
        expect(page.locator(".copy .ribbon:visible")).to_have_text(
            ["Dropped: a copy is kept", "Kept", "Dropped: a copy is kept"]
        )
        page.keyboard.press("Escape")
        expect(page.locator("#count")).to_contain_text("4 of ")
        page.keyboard.press("e")
        expect(page.locator("#exported")).to_contain_text("3 rows are left out of these files and of the training")
        expect(page.locator("#exported pre")).to_contain_text("corrected.json")
        folder_of = Path(page.locator("#exported code").nth(0).inner_text()).parent
        with (folder_of / "corrected.csv").open(newline="") as file:
            assert {int(line["row"]) for line in csv.DictReader(file)} == set(range(12)) - {1, 4, 7}
        page.context.close()


def test_outliers_and_blank_images_are_shown_alone(browser: Browser, errors: list[str], tmp_path: Path) -> None:
    items = make_audited_items(20, ("ant", "bee"))
    with serve(items, tmp_path / "plain") as client:
        page = open_page(browser, client.server.link, errors)
        assert page.locator("#scope option").all_inner_texts() == ["suspicious rows", "all rows"]
        page.context.close()
    with serve(make_unusual(items, [4], {7: "blank"}), tmp_path / "unusual") as client:
        page = open_page(browser, client.server.link, errors)
        page.keyboard.press("f")
        page.locator("#scope").select_option("unusual")
        expect(page.locator("#count")).to_have_text("0 of 2 unusual rows reviewed")
        for row, tag in ((4, "outlier"), (7, "blank image")):
            expect(page.locator("#stage")).to_have_attribute("data-row", str(row))
            expect(page.locator("#where .tag")).to_have_text(tag)
            for width in WIDTHS:
                page.set_viewport_size(ViewportSize(width=width, height=844))
                assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
                if folder := os.environ.get("WARPI_SCREENSHOTS"):
                    page.screenshot(path=f"{folder}/unusual-{row}-{width}.png")
            page.keyboard.press("Escape")
            page.keyboard.press("u")
        expect(page.locator("#empty-title")).to_have_text("All done")
        page.context.close()
