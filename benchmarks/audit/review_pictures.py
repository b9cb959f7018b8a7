"""Screenshots for the README and docs/review.md: the review page for photos, digits and a table, in Chromium.

pip install scikit-image    # its photos are in the public domain
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
from PIL import Image, ImageEnhance
from playwright.sync_api import sync_playwright
from sklearn.datasets import load_wine

from warpi import fit, load_dataset
from warpi.audit import audit
from warpi.audit.decisions import Store
from warpi.review.items import Items, items_from_run
from warpi.review.page_requests import ReviewSession
from warpi.review.server import Server
from warpi.utils.files import write_atomically

FLAGS = ["--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking", "--disable-sync"]


def digits(at: Path) -> Items:
    """Digits with pair noise, 50 trusted examples."""
    run = fit(at / "digits", data="digits", noise="pair:0.4", meta=50, threads=1)
    result = audit(run)
    result = replace(result, facts={**result.facts, "run": "runs/digits"})  # the page names the folder in its hints
    return items_from_run(load_dataset("digits")[0], run.task, run.method.net, result, None, None)


def photos(at: Path) -> Items:
    """Crops of five photos of scikit-image in folders; a quarter of them lie in the folder of another class."""
    from skimage import data

    sources = {
        "cat": "chelsea",
        "coffee": "coffee",
        "retina": "retina",
        "rocket": "rocket",
        "stars": "hubble_deep_field",
    }
    rng = np.random.default_rng(0)
    for name, source in sources.items():
        image = Image.fromarray(getattr(data, source)()).convert("RGB")
        for i in range(60):
            side = int(rng.uniform(0.4, 0.9) * min(image.size))
            left, top = (int(rng.integers(size - side + 1)) for size in image.size)
            crop = image.crop((left, top, left + side, top + side)).resize((224, 224))
            if rng.random() < 0.5:
                crop = crop.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
            crop = ImageEnhance.Brightness(crop).enhance(rng.uniform(0.7, 1.2))
            others = [other for other in sources if other != name]
            given = others[rng.integers(len(others))] if rng.random() < 0.25 and i >= 10 else name
            path = at / ("checked" if i < 10 else "photos") / given / f"{rng.integers(10_000):04d}-{name[0]}{i}.jpg"
            path.parent.mkdir(parents=True, exist_ok=True)
            crop.save(path, quality=92)
    run = fit(at / "run", data=str(at / "photos"), trusted=str(at / "checked"), threads=1)
    result = audit(run)
    result = replace(result, facts={**result.facts, "run": "runs/photos"})
    return items_from_run(load_dataset(str(at / "photos"))[0], run.task, run.method.net, result, None, None)


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
        if path.suffix == ".jpg":
            image.convert("RGB").save(content, "JPEG", quality=88, optimize=True)
        else:
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
        with served(photos(at), at / "zero") as link:
            grid = "g Space ArrowRight Space ArrowRight Space A ArrowRight Space ArrowRight Space"
            take_screenshot(browser, link, out / "review-photos.jpg", grid, (1280, 720))
            take_screenshot(browser, link, out / "review-copies.jpg", "d", (1280, 720))
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
