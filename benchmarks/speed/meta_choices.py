"""The accuracy of WarPI on digits for each choice of the meta step, all on the same tasks.

    python -m benchmarks.speed.meta_choices OUT.json [--noises pair:0.4,symmetric:0.4] [--seeds 10,11] [--epochs N]

Writes one row per choice, noise and seed with the test accuracy of the last epoch. Times are measured by
`warpi bench meta-step`, since digits are too small for it.
"""

import argparse
import json
import platform
import statistics
import tempfile
from pathlib import Path

import torch

from warpi import fit

CHOICES: dict[str, dict[str, object]] = {
    "ce": {"method": "ce"},
    "exact": {},
    "every2": {"meta_every": 2},
    "every5": {"meta_every": 5},
    "depth1": {"meta_depth": 1},
    "difference": {"meta_gradient": "difference"},
    "real": {"meta_order": "real"},
    "compile": {"compile": True},
    "bf16": {"precision": "bf16"},
    "accumulate2": {"accumulate": 2},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--noises", default="pair:0.4,symmetric:0.4")
    parser.add_argument("--seeds", default="10,11,12,13,14")
    parser.add_argument("--choices", default=",".join(CHOICES))
    parser.add_argument("--epochs", type=int, default=None)
    given = parser.parse_args()
    settings = {} if given.epochs is None else {"epochs": given.epochs}
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for noise in given.noises.split(","):
            for name in given.choices.split(","):
                scores = []
                for seed in map(int, given.seeds.split(",")):
                    options = {
                        "method": "warpi",
                        "noise": noise,
                        "seed": seed,
                        "threads": 1,
                        **settings,
                        **CHOICES[name],
                    }
                    run = fit(Path(folder) / f"{noise}-{name}-{seed}".replace(":", "-"), data="digits", **options)
                    scores.append(run.history[-1]["test_acc"])
                    rows.append({"choice": name, "noise": noise, "seed": seed, "test_acc": scores[-1]})
                print(
                    f"{noise:15} {name:12} {statistics.mean(scores):6.2f} ± {statistics.stdev(scores):.2f}", flush=True
                )
    facts = {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "threads": 1,
        "data": "digits",
        **settings,
    }
    given.out.write_text(json.dumps({"facts": facts, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
