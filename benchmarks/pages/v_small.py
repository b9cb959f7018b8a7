"""A signed v with other meta learning rates and initializations, on images small enough for a CPU.

python -m benchmarks.pages.v_small --root DATA --out FOLDER    make the images, run recipes/v-output-small.toml
python -m benchmarks.pages.v_small --out FOLDER                collect the runs there in benchmarks/results/v_small.json
python -m benchmarks.pages.v_small                             write the table in docs/results/v-output/notes.md
"""

import argparse
import json
import statistics
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common import ROOT, made_on, write_between
from warpi.cli.app import main as warpi
from warpi.data.examples import TensorExamples
from warpi.runs.defaults import load_dataset
from warpi.utils.files import write_atomically

ROWS, PAGE = ROOT / "benchmarks/results/v_small.json", ROOT / "docs/results/v-output/notes.md"
MARKS = "<!-- v_small.py -->", "<!-- end -->"
IMAGES = 13_000


def small_images(root: Path, file: Path) -> None:
    """The first images of the training set, averaged over blocks of 2 x 2 pixels."""
    dataset, _ = load_dataset("cifar10", root=root)
    assert isinstance(dataset.examples, TensorExamples)
    x = dataset.examples.x[:IMAGES].numpy()  # [N, 3, 32, 32]
    x = x.reshape(-1, 3, 16, 2, 16, 2).astype(np.float32).mean((3, 5)).round().astype(np.uint8)
    y = dataset.y[:IMAGES].numpy()
    file.parent.mkdir(parents=True, exist_ok=True)
    np.savez(file, X=x.transpose(0, 2, 3, 1), y=y, clean=y)


def collect(folder: Path) -> list[dict[str, Any]]:
    rows = []
    for path in sorted(folder.glob("*/done")):
        spec = json.loads((path.parent / "spec.json").read_text())
        accs = [json.loads(line)["test_acc"] for line in (path.parent / "results.jsonl").read_text().splitlines()]
        row = {key: spec["spec"][key] for key in ("method", "noise", "seed", "options")}
        facts = {key: spec["facts"][key] for key in ("n_train", "n_test", "inputs_sha256", "noise_sha256")}
        rows.append({**row, **facts, "test_acc": accs})
    return rows


def table(results: dict[str, Any]) -> str:
    cells = defaultdict(list)
    for r in results["rows"]:
        names = ("output", "mean_init", "meta_lr")
        words = [f"`{r['options'].get(name) or 'xavier'}`" for name in names] if r["options"] else ["–"] * 3
        cells[f"| `{r['method']}` | " + " | ".join(words)].append(r["test_acc"])
    lines = ["| method | output | initial mean | meta lr | seeds | epoch 1 | last | best on test |"]
    lines.append("|:---|:---|:---|---:|---:|---:|---:|---:|")
    for name, accs in sorted(cells.items(), key=lambda item: -statistics.fmean(a[-1] for a in item[1])):
        means = [statistics.fmean(pick) for pick in ([a[0] for a in accs], [a[-1] for a in accs], [*map(max, accs)])]
        lines.append(f"{name} | {len(accs)} | " + " | ".join(f"{mean:.1f}" for mean in means) + " |")
    lines += ["", ", ".join(f"{key} {value}" for key, value in results["about"].items()) + ", one thread per run."]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path)
    parser.add_argument("--out", type=Path)
    args, more = parser.parse_known_args()  # more: flags of `warpi sweep`
    if (args.root or more) and not (args.root and args.out):
        parser.error("a sweep needs both --root and --out")
    if args.root:
        file = args.out / "cifar10-16.npz"
        small_images(args.root, file)
        given = ["--set", f"data={file}", "--out", str(args.out / "runs"), *more]
        warpi(["sweep", str(ROOT / "recipes/v-output-small.toml"), *given])
    if args.out:
        results = {"about": made_on("torch"), "rows": collect(args.out / "runs")}
        write_atomically(ROWS, (json.dumps(results, indent=1) + "\n").encode())
    write_between(PAGE, MARKS, table(json.loads(ROWS.read_text())))


if __name__ == "__main__":
    main()
