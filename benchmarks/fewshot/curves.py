"""The figures of docs/fewshot.md that need no GPU: example sines, and the error against the number of bases.

    python -m benchmarks.fewshot.curves --out WORK [--pictures docs/results/fewshot] [--iterations 1500]

Trains each learner on 5-shot sines with one thread: seed 0 for the first figure, seeds 0, 1 and 2 for the second, whose
rows are written to benchmarks/results/fewshot-sines-bases.json. Finished runs in WORK are not repeated.
"""

import argparse
import json
from pathlib import Path

from benchmarks.common import ROOT
from warpi.fewshot.compare import examples, judged
from warpi.fewshot.plot import plot_bases, plot_curves
from warpi.fewshot.run import fit, load
from warpi.utils.files import write_atomically

CURVES = ("maml", "rff", "metavrf", "metavrf_bilstm", "metavrf_evidence")
BASES = [(name, d, seed) for seed in (0, 1, 2) for d in (8, 32, 128, 512) for name in ("metavrf", "rff")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--pictures", type=Path, default=ROOT / "docs/results/fewshot")
    parser.add_argument("--rows", type=Path, default=ROOT / "benchmarks/results/fewshot-sines-bases.json")
    parser.add_argument("--iterations", type=int, default=1500)
    given = parser.parse_args()
    given.pictures.mkdir(parents=True, exist_ok=True)

    def trained(name: str, **options: int) -> Path:
        path: Path = given.out / "-".join([name, *(f"{k}{v}" for k, v in options.items())])
        if not (path / "done").exists():
            settings = {"data": "sines", "learner": name, "shots": 5, "iterations": given.iterations, **options}
            fit(path, resume=(path / "spec.json").exists(), device="cpu", threads=1, quiet=False, **settings)
        return path

    curves = examples([load(trained(name), device="cpu") for name in CURVES], 3)
    write_atomically(given.pictures / "curves.png", plot_curves(curves, "png"))
    runs = [load(trained(name, bases=d, seed=seed), device="cpu") for name, d, seed in BASES]
    rows = [judged(run, 1000) for run in runs]
    write_atomically(given.rows, (json.dumps(rows, indent=1) + "\n").encode())
    write_atomically(given.pictures / "sines-bases.png", plot_bases(rows, "png"))


if __name__ == "__main__":
    main()
