"""Time of one step with a linear head: WarPI's exact meta step against plain logistic SGD, in the same training loop.

    python -m benchmarks.speed.linear_head

Writes benchmarks/results/linear_head.json. The two methods take turns in blocks of a few steps, so that other load on
the machine slows both; the table has the median step and the fastest tenth. The inputs are random: 1,280 features, ten
classes, batches of 256 noisy and 100 trusted rows.
"""

import json
import time
from collections.abc import Iterator
from dataclasses import replace
from statistics import median
from typing import Any

import torch

import warpi
from benchmarks.common import RESULTS, made_on
from warpi.data.numeric import make_features
from warpi.training.engine import train
from warpi.training.recipe import Recipe
from warpi.utils.files import write_atomically

FEATURES, CLASSES, ROWS, TRUSTED, BATCH = 1280, 10, 25_600, 100, 256
WARPI: dict[str, dict[str, Any]] = {
    "warpi, table defaults": {"output": "tanh", "label_input": "one_hot"},
    "warpi, paper's form": {},
}
BLOCK, BLOCKS, WARM_UP = 5, 40, 10
SEED = 100
OUT = RESULTS / "linear_head.json"


def steps(name: str, **options: Any) -> Iterator[Any]:
    """Endless training of a method; every item is one step."""
    rng = torch.Generator().manual_seed(SEED)
    x = torch.randn(ROWS + TRUSTED, FEATURES, generator=rng)
    y = torch.randint(CLASSES, (len(x),), generator=rng)
    data = warpi.Dataset("random", make_features(x), y, tuple(map(str, range(CLASSES))), clean=y)
    task, _ = warpi.make_task(data, "symmetric:0.4", meta=TRUSTED, val=0.0, test=0.0, seed=SEED)
    method = replace(warpi.METHODS[name], **options)
    method.start(task, Recipe(net="linear", epochs=10**6, batch_size=BATCH, meta_batch_size=TRUSTED, lr=0.01))
    return (item for item in train(method, task) if item is None)


def measure(threads: int) -> list[dict[str, Any]]:
    torch.set_num_threads(threads)
    loops = {"ce": steps("ce"), **{name: steps("warpi", **options) for name, options in WARPI.items()}}
    times: dict[str, list[float]] = {name: [] for name in loops}
    for block in range(BLOCKS + WARM_UP // BLOCK):
        for name, loop in loops.items():
            for _ in range(BLOCK):
                began = time.perf_counter()
                next(loop)
                if block >= WARM_UP // BLOCK:
                    times[name].append(1e3 * (time.perf_counter() - began))
    tenth = {name: sorted(values)[len(values) // 10] for name, values in times.items()}
    return [
        {
            "method": name,
            "threads": threads,
            "ms_median": round(median(values), 3),
            "ms_fast": round(tenth[name], 3),
            "ratio_median": round(median(values) / median(times["ce"]), 2),
            "ratio_fast": round(tenth[name] / tenth["ce"], 2),
        }
        for name, values in times.items()
    ]


def main() -> None:
    rows = [row for threads in (1, 2) for row in measure(threads)]
    about = made_on("warpi", "torch") | {"seed": SEED, "steps": BLOCK * BLOCKS, "features": FEATURES, "batch": BATCH}
    write_atomically(OUT, (json.dumps({"about": about, "rows": rows}, indent=1) + "\n").encode())
    print("| method | threads | ms, median | ms, fastest tenth | × ce, median | × ce, fastest tenth |")
    print("|---|---|---|---|---|---|")
    for r in rows:
        print(f"| {' | '.join(str(value) for value in r.values())} |")


if __name__ == "__main__":
    main()
