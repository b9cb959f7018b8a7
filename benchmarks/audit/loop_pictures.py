"""Pictures of the review page: a folder of images with wrong labels and no trusted examples.

    python -m benchmarks.audit.loop_pictures

Writes docs/pictures/loop-*.png and prints figures; needs the dev extra and Chromium. The images are
digits, 40 % of them in the folder of the next class. Each command runs in its own process. The review page is used in a
real browser by a simulated user who makes no mistakes.
"""

import argparse
import csv
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from playwright.sync_api import expect, sync_playwright
from sklearn.datasets import load_digits

from benchmarks.common import ROOT
from warpi.runs.defaults import load_dataset

NAMES = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
FLAGS = ("--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking", "--disable-sync")


def make_folder() -> dict[str, str]:
    """Write photos/LABEL/FILE.png in the working folder; return the true class of each file."""
    data, rng = load_digits(), np.random.default_rng(0)
    given = np.where(rng.random(len(data.target)) < 0.4, (data.target + 1) % 10, data.target)
    truth = {}
    for i, (image, k) in enumerate(zip(data.images, given, strict=True)):
        path = Path("photos") / NAMES[k] / f"{i:04d}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray((255 - 15.9 * image).astype(np.uint8)).resize((32, 32), Image.Resampling.NEAREST).save(path)
        truth[path.name] = NAMES[data.target[i]]
    return truth


def warpi(*argv: str) -> None:
    print("$ warpi", " ".join(argv), flush=True)
    subprocess.run([sys.executable, "-m", "warpi", *argv], check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})


def review(truth: list[str], n: int, picture: Path, *argv: str) -> Path:
    """Decide about n rows with the keyboard; return the folder of the export."""
    print("$ warpi review", " ".join(argv), flush=True)
    command = [sys.executable, "-m", "warpi", "review", *argv, "--no-browser"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        link = server.stdout.readline().strip()
        with sync_playwright() as playwright:
            browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=list(FLAGS))
            page = browser.new_context(viewport={"width": 1280, "height": 800}).new_page()
            page.goto(link)
            page.wait_for_selector("body[data-ready]")
            stage = page.locator("#stage")
            for i in range(n):
                row = stage.get_attribute("data-row")
                right = truth[int(row or -1)]
                if i == min(n, 12) - 1:
                    page.wait_for_timeout(1500)  # until the neighbors are computed
                    page.screenshot(path=picture)
                names = [page.locator(f"#{what}-name").inner_text() for what in ("given", "guess")]
                if right in names:
                    page.keyboard.press("ka"[names.index(right)])
                else:
                    page.keyboard.press("c")
                    page.keyboard.type(right)
                    page.keyboard.press("Enter")
                if i < n - 1:
                    expect(stage).not_to_have_attribute("data-row", row or "", timeout=20_000)
            page.keyboard.press("e")
            expect(page.locator("#exported")).to_contain_text("Corrected labels of all rows", timeout=20_000)
            made = Path(page.locator("#exported code").nth(0).inner_text()).parent
            browser.close()
        return made
    finally:
        server.terminate()
        server.wait()


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    pictures = ROOT / "docs/pictures"
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        files = make_folder()
        dataset = load_dataset("photos")[0]
        assert dataset.files is not None
        truth = [files[Path(path).name] for path in dataset.files.paths]
        right = lambda labels: 100 * sum(a == truth[i] for i, a in labels) / len(labels)
        results["rows"] = len(truth)
        results["right_as_given"] = right([(i, dataset.classes[int(k)]) for i, k in enumerate(dataset.y)])

        began = time.monotonic()
        warpi("pick", "40", "--data", "photos/", "--csv", "check.csv")
        of_data = ("--data", "photos/", "--rows", "check.csv", "--out", "checked")
        first = review(truth, 40, pictures / "loop-first.png", *of_data)
        label_file = f"given:{first}/corrected.json"
        fit_began, checked = time.monotonic(), f"{first}/trusted"
        warpi("fit", "--data", "photos/", "--noise", label_file, "--meta-data", checked, "--out", "runs/photos")
        results["fit_seconds"] = round(time.monotonic() - fit_began)
        warpi("audit", "runs/photos", "--csv", "audit.csv")
        review(truth, 60, pictures / "loop-second.png", "runs/photos", "--out", "checked")
        warpi("review", "runs/photos", "--out", "checked", "--export", "corrected.csv")
        results["seconds"] = round(time.monotonic() - began)

        with Path("audit.csv").open() as file:
            audit = list(csv.DictReader(file))
        wrong = [row["given_label"] != truth[int(row["row"])] for row in audit]
        issue = [row["is_label_issue"] == "True" for row in audit]
        hits = sum(a and b for a, b in zip(wrong, issue, strict=True))
        results |= {"decisions": 40, "audited": len(audit), "precision": hits / sum(issue), "recall": hits / sum(wrong)}
        accepted = [
            (int(row["row"]), row["suggested_label"] if is_issue else row["given_label"])
            for row, is_issue in zip(audit, issue, strict=True)
        ]
        results["right_with_suggestions"] = right(accepted)
        with Path("corrected.csv").open() as file:
            results["right_after_review"] = right([(int(r["row"]), r["label"]) for r in csv.DictReader(file)])
    machine = f"{os.cpu_count()} CPU cores, python {platform.python_version()}, torch {torch.__version__}"
    results |= {"machine": machine, "date": f"{date.today()}", "seed": 0}
    print(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
