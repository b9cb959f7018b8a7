"""Every method on a table with many classes: 50 Gaussian clouds, uniform noise 0.4. Digits and CIFAR-10 have ten.

    python benchmarks/many_classes.py benchmarks/results/many_classes.json [--methods ce,forward] [--seeds 0,1,2]

Writes a row a method and seed with the test accuracy of the last epoch, and the settings that suit tables; rows of
methods that are not named are kept. Two cores, about ten minutes for all.
"""

import argparse
import json
import platform
import statistics
import tempfile
from datetime import date
from pathlib import Path

import numpy as np
import torch

from warpi import METHODS, fit
from warpi.atomic import write_atomically

CLASSES, ROWS, WIDTH = 50, 6000, 32


def clouds(file: Path) -> None:
    """Means that are as far apart as a few deviations: the best a classifier can do is 95 % about."""
    chance = np.random.default_rng(0)
    means = 1.2 * chance.normal(size=(CLASSES, WIDTH))
    y = np.arange(ROWS) % CLASSES
    np.savez(file, x=(means[y] + 1.5 * chance.normal(size=(ROWS, WIDTH))).astype("float32"), y=y, clean=y)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--seeds", default="0,1,2")
    given = parser.parse_args()
    names = given.methods.split(",")
    rows = json.loads(given.out.read_text())["rows"] if given.out.exists() else []
    rows = [row for row in rows if row["method"] not in names]
    with tempfile.TemporaryDirectory() as folder:
        clouds(data := Path(folder) / "clouds.npz")
        for name in names:
            scores = []
            for seed in map(int, given.seeds.split(",")):
                settings = {"noise": "uniform:0.4", "meta": 200, "method": name, "seed": seed, "threads": 1}
                run = fit(Path(folder) / f"{name}-{seed}", data=str(data), device="cpu", **settings)
                scores.append(run.history[-1]["test_acc"])
                rows.append({"method": name, "seed": seed, "test_acc": scores[-1], "torch": torch.__version__})
                rows[-1] |= {"python": platform.python_version(), "date": date.today().isoformat()}
            spread = f" ± {statistics.stdev(scores):.1f}" if len(scores) > 1 else ""
            print(f"{name:18} {statistics.mean(scores):5.1f}{spread}", flush=True)
            write_atomically(given.out, (json.dumps({"rows": rows}, indent=1) + "\n").encode())


if __name__ == "__main__":
    main()
