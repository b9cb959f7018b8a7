"""The measurements of docs/speed.md: tables and bar charts of what a training step costs.

    python -m benchmarks.meta_step.documented cpu                      ResNet-20, batch 32, with other libraries
    python -m benchmarks.meta_step.documented resnet32 wrn28_10        on a CUDA device: every variant, tf32 and bf16
    python -m benchmarks.meta_step.documented memory                   on a CUDA device: ResNet-50 at 224 pixels

Writes benchmarks/results/meta-step-NAME.json and .svg, or into the folder given by --out.
"""

import argparse
from pathlib import Path

from benchmarks.common import RESULTS
from benchmarks.meta_step.__main__ import main as measure

SETS = {
    "cpu": ["--device", "cpu", "--net", "resnet20", "--batch", "32", "--variants", "all"],
    "resnet32": ["--device", "cuda", "--net", "resnet32", "--precision", "32,bf16", "--variants", "all"],
    "wrn28_10": ["--device", "cuda", "--net", "wrn28_10", "--precision", "32,bf16", "--variants", "all"],
    "memory": [
        *("--device", "cuda", "--net", "resnet50", "--image-size", "224", "--batch", "32", "--precision", "bf16"),
        *("--variants", "warpi,warpi_checkpointing,warpi_accumulate2,double_backward_autograd,published"),
    ],
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="+", choices=SETS)
    parser.add_argument("--out", type=Path, default=RESULTS)
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    for name in given.names:
        path = given.out / f"meta-step-{name}"
        measure([*SETS[name], "--json", f"{path}.json", "--plot", f"{path}.svg"])


if __name__ == "__main__":
    main()
