"""What a training step costs: the tables and pictures of docs/speed.md, each by one `warpi bench meta-step`.

    python benchmarks/meta_step.py cpu                      ResNet-20, batch 32, and other libraries
    python benchmarks/meta_step.py resnet32 wrn28_10        on a CUDA device: every variant, tf32 and bf16
    python benchmarks/meta_step.py memory                   on a CUDA device: ResNet-50 at 224 pixels

Writes benchmarks/results/meta-step-NAME.json and .svg, or into the folder given by --out.
"""

import argparse
import sys
from pathlib import Path

from warpi.cli.app import main as warpi

SETS = {
    "cpu": ["--device", "cpu", "--net", "resnet20", "--batch", "32", "--variants", "all"],
    "resnet32": ["--device", "cuda", "--net", "resnet32", "--precision", "32,bf16", "--variants", "all"],
    "wrn28_10": ["--device", "cuda", "--net", "wrn28_10", "--precision", "32,bf16", "--variants", "all"],
    "memory": [
        *("--device", "cuda", "--net", "resnet50", "--image-size", "224", "--batch", "32", "--precision", "bf16"),
        *("--variants", "warpi,warpi_checkpointing,warpi_accumulate2,double_backward_autograd,published"),
    ],
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="+", choices=SETS)
    parser.add_argument("--out", type=Path, default=Path(__file__).resolve().parent / "results")
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    codes = []
    for name in given.names:
        path = given.out / f"meta-step-{name}"
        codes.append(warpi(["bench", "meta-step", *SETS[name], "--json", f"{path}.json", "--plot", f"{path}.svg"]))
    return max(codes)


if __name__ == "__main__":
    sys.exit(main())
