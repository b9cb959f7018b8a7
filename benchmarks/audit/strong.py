"""Compare the audits of strong runs with cleanlab, on the same probabilities. Needs cleanlab, but no GPU.

    python -m benchmarks.strong_images --root DATA --out OUT --probabilities --runs plus_random1 ...     on a GPU
    python -m benchmarks.audit.strong OUT/plus_random1_seed0.npz [FILE ...]

The network predicts its own training rows, so the probabilities are in sample for both. Prints a table and writes
results/audit_strong.json.
"""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.audit.cifar10n import detection, find_by_cleanlab
from benchmarks.common import RESULTS, made_on
from warpi.utils.files import write_with_folder

OUT = RESULTS / "audit_strong.json"


def compare(file: Path) -> dict[str, Any]:
    with np.load(file, allow_pickle=False) as stored:
        given, bad = stored["given"].astype(np.int64), stored["true"] != stored["given"]
        p = stored["probabilities"].astype(np.float64)
        found = {"warpi audit": detection(bad, stored["wrong_probability"], stored["is_label_issue"])}
    p /= p.sum(1, keepdims=True)
    return {"n": len(given), "wrong": float(bad.mean()), "found": {**found, **find_by_cleanlab(given, p, bad)}}


def table(runs: dict[str, dict[str, Any]]) -> str:
    lines = ["| run | | AUROC | precision | recall |", "|:---|:---|---:|---:|---:|"]
    for name, run in runs.items():
        for by, scores in run["found"].items():
            lines.append(
                f"| `{name}` | {by} | {scores['auroc']:.4f} | {scores['precision']:.3f} | {scores['recall']:.3f} |"
            )
    return "\n".join(lines)


def main() -> None:
    files = [Path(name) for name in sys.argv[1:]]
    if not files or not all(file.suffix == ".npz" for file in files):
        raise SystemExit(__doc__)
    runs = {file.stem: compare(file) for file in files}
    write_with_folder(OUT, json.dumps({**made_on("cleanlab"), "runs": runs}, indent=1) + "\n")
    print(table(runs))


if __name__ == "__main__":
    main()
