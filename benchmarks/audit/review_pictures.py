"""Screenshots for docs/review.md: the review page for digits and for a table, in Chromium.

python -m benchmarks.audit.review_pictures --out docs/pictures
"""

import argparse
import csv
import io
import shutil
import tempfile
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from playwright.sync_api import sync_playwright
from sklearn.datasets import load_wine

from warpi import fit, load_dataset
from warpi.audit import audit
from warpi.audit.decisions import Store
from warpi.review.items import Items, items_from_run
from warpi.review.server import Server
from warpi.review.session import ReviewSession
from warpi.utils.files import write_atomically

FLAGS = ["--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking", "--disable-sync"]


def digits(at: Path) -> Items:
    """Digits with pair noise, 50 trusted examples."""
    run = fit(at / "digits", data="digits", noise="pair:0.4", meta=50, threads=1)
    result = audit(run)
    result = replace(result, facts={**result.facts, "run": "runs/digits"})  # the page names the folder in its hints
    return items_from_run(load_dataset("digits")[0], run.task, run.method.net, result, None, None)


def wine(at: Path) -> Items:
    """The wine data of scikit-learn as a table, with a quarter of the labels wrong and 30 checked rows."""
    data, rng = load_wine(), np.random.default_rng(0)
    names = ["Barolo", "Grignolino", "Barbera"]
    wrong = rng.random(len(data.target)) < 0.25
    checked = np.concatenate([np.flatnonzero(data.target == k)[:10] for k in range(3)])
    with (at / "wine.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow([*data.feature_names, "label", "clean_label"])
        for i, (x, k) in enumerate(zip(data.data, data.target, strict=True)):
            truth = names[k] if i in checked else ""
            writer.writerow([*x, names[(k + wrong[i]) % 3], truth])
    file_name = str(at / "wine.csv")
    run = fit(at / "wine", data=file_name, batch_size=16, meta_batch_size=30, threads=1)
    return items_from_run(load_dataset(file_name)[0], run.task, run.method.net, audit(run), None, None)


@contextmanager
def served(items: Items, folder: Path) -> Iterator[str]:
    with closing(Store(folder / "decisions.sqlite", items.identity)) as store:
        review = ReviewSession(items, store, folder, {"data": items.dataset.name, "noise": "given"})
        with Server(review) as server:
            thread = threading.Thread(target=server.serve_forever)
            thread.start()
            yield server.link
            server.shutdown()
            thread.join()


def take_screenshot(browser: Any, link: str, path: Path, keys: str, size: tuple[int, int], **options: Any) -> None:
    """Open the page, press keys, and save a screenshot with few colors."""
    context = browser.new_context(viewport={"width": size[0], "height": size[1]}, **options)
    page = context.new_page()
    page.goto(link)
    page.wait_for_selector("body[data-ready]")
    for key in keys.split():
        page.keyboard.press(key)
        page.wait_for_timeout(150)
    page.wait_for_timeout(3000)  # until notes have faded
    content = io.BytesIO()
    with Image.open(io.BytesIO(page.screenshot())) as image:
        image.convert("RGB").quantize(96).save(content, "PNG", optimize=True)
    write_atomically(path, content.getvalue())
    context.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    out = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    laptop, phone = (1280, 800), (390, 844)
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        at = Path(folder)
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=FLAGS)
        with served(digits(at), at / "one") as link:
            take_screenshot(browser, link, out / "review.png", "a a a a", laptop)
            take_screenshot(browser, link, out / "review-phone.png", "", phone, has_touch=True, is_mobile=True)
            dark = {"has_touch": True, "is_mobile": True, "color_scheme": "dark"}
            take_screenshot(browser, link, out / "review-phone-dark.png", "", phone, **dark)
            right = "ArrowRight Space"
            take_screenshot(
                browser, link, out / "review-grid.png", f"g Space {right} {right} A {right} {right} {right}", laptop
            )
            take_screenshot(browser, link, out / "review-progress.png", "a a a a k a a a a p", laptop)
            take_screenshot(browser, link, out / "review-many.png", "b Tab Tab Enter", laptop)
        with served(wine(at), at / "two") as link:
            take_screenshot(browser, link, out / "review-table.png", "", laptop)
        browser.close()


if __name__ == "__main__":
    main()
