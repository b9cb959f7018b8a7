"""What the trusted examples and the meta-network of WarPI+ do on digits.

    python -m benchmarks.tables.warpi_plus_digits        about three minutes on two cores

Prints the table of docs/methods/warpi_plus.md and writes benchmarks/results/warpi_plus_digits.json.
"""

import json
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import Any

import torch

from warpi import fit

NOISES = ("flip:0.4", "pair:0.4", "uniform:0.6")
SEEDS = (0, 1, 2)
ROWS: dict[str, dict[str, Any]] = {
    "no trusted examples": {"use_trusted": False},
    "trusted examples in the loss": {},
    "only for V": {"rectifier": True, "trusted_in_loss": False},
    "in the loss and for V": {"rectifier": True},
}
COMMON = {"data": "digits", "net": "mlp", "meta": 50, "epochs": 40, "batch_size": 64, "val": 0.0, "average": 0.98}
FILE = Path(__file__).parents[1] / "results" / "warpi_plus_digits.json"


def measure(row: str, noise: str, seed: int) -> dict[str, Any]:
    """Train one run; returns its accuracy and the precision and recall of the selected labels in percent."""
    with TemporaryDirectory() as folder:
        settings = {**COMMON, **ROWS[row], "noise": noise, "seed": seed, "threads": 1, "device": "cpu"}
        run = fit(Path(folder) / "run", method="warpi_plus", **settings)
    assert run.truth.clean is not None
    right = run.truth.clean == run.task.train.y
    selected = run.method.selected > 0
    scores = {"right": right[selected], "recall": selected[right]}
    return {
        "row": row,
        "noise": noise,
        "seed": seed,
        "accuracy": run.history[-1]["test_acc"],
        **{name: 100 * values.float().mean().item() for name, values in scores.items()},
    }


def main() -> None:
    jobs = [(row, noise, seed) for row in ROWS for noise in NOISES for seed in SEEDS]
    with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as pool:
        results = list(pool.map(measure, *zip(*jobs, strict=True)))
    FILE.write_text(json.dumps({"torch": torch.__version__, "runs": results}, indent=1) + "\n")
    for row in ROWS:
        cells = []
        for noise in NOISES:
            runs = [result for result in results if result["row"] == row and result["noise"] == noise]
            accuracy, right, recall = (fmean(run[key] for run in runs) for key in ("accuracy", "right", "recall"))
            cells.append(f"{accuracy:.1f} | {right:.1f}, {recall:.1f}")
        print(f"| {row} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
