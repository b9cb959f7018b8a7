"""Several runs of a sweep at once on one GPU: milliseconds a step, of all together.

    python benchmarks/streams.py [--runs 1,3,6] [--methods ce,warpi] [--out FILE]

ResNet-32 in bf16, batches of 100, 50,000 random images, three epochs of which the second counts; each number of runs is
one `warpi sweep --per-gpu N`. Writes benchmarks/results/streams-h200.json, and prints the table of docs/speed.md.
"""

import argparse
import json
import statistics
import tempfile
from pathlib import Path

import numpy as np

from warpi.cli.app import main as warpi
from warpi.utils.files import write_atomically

PLAN = """[defaults]
data = "{data}"
noise = "symmetric:0.4"
method = "{method}"
net = "resnet32"
epochs = 3
meta = 1000
batch_size = 100
meta_batch_size = 100
precision = "bf16"
compile = true
val = 0.02
test = 0.02
[grid]
seed = {seeds}
"""


def measure(folder: Path, method: str, n: int) -> dict[str, object]:
    file, out = folder / f"{method}-{n}.toml", folder / f"{method}-{n}"
    file.write_text(PLAN.format(data=folder / "x.npz", method=method, seeds=list(range(n))))
    if code := warpi(["sweep", str(file), "--out", str(out), "--per-gpu", str(n)]):
        raise SystemExit(code)
    return row(out, method, n)


def row(out: Path, method: str, n: int) -> dict[str, object]:
    specs = [json.loads(path.read_text()) for path in sorted(out.glob("*/spec.json"))]
    rows = [json.loads(line) for path in out.glob("*/results.jsonl") for line in path.read_text().splitlines()]
    seconds = statistics.median(r["seconds"] for r in rows if r["epoch"] == 2)  # all are under way then
    steps = specs[0]["facts"]["n_train"] // 100
    return {
        "method": method,
        "runs": n,
        "epoch_seconds": seconds,
        "steps": steps,
        "ms_a_step": 1e3 * seconds / steps / n,
        "gpu": specs[0]["environment"].get("gpu"),
        "torch": specs[0]["environment"]["torch"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", default="1,3,6")
    parser.add_argument("--methods", default="ce,warpi")
    parser.add_argument("--out", type=Path, default=Path(__file__).resolve().parent / "results/streams-h200.json")
    given = parser.parse_args()
    found = []
    with tempfile.TemporaryDirectory() as name:
        chance, y = np.random.default_rng(0), np.arange(50_000) % 10
        x = chance.integers(0, 256, (50_000, 3, 32, 32), dtype=np.uint8)
        np.savez(Path(name) / "x.npz", x=x, y=y, clean=y)
        for method in given.methods.split(","):
            for n in map(int, given.runs.split(",")):
                found.append(measure(Path(name), method, n))
                write_atomically(given.out, (json.dumps(found, indent=1) + "\n").encode())
    print("| method | runs at once | ms a step of all together |\n|---|---|---|")
    for r in found:
        print(f"| `{r['method']}` | {r['runs']} | {r['ms_a_step']:.2f} |")


if __name__ == "__main__":
    main()
