"""Time of one step with a linear head: WarPI's exact meta step against plain logistic SGD, in the same training loop.

    python -m benchmarks.speed.linear_head [THREADS ...]

Writes benchmarks/results/linear_head.json and the table of docs/speed.md. The methods take turns in blocks of a few
steps, so that other load on the machine slows all of them. The table has the mean elapsed time of a step and the median
CPU time, which other load hardly changes. A median of elapsed times would not be fair on a busy machine: short steps
are seldom interrupted. The inputs are random: 1,280 features, ten classes, batches of 256 noisy and 100 trusted rows.
"""

import json
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from statistics import mean, median
from typing import Any

import torch

import warpi
from benchmarks.common import RESULTS, ROOT, made_on, write_between
from warpi.data.numeric import make_features
from warpi.training.engine import train
from warpi.training.recipe import Recipe
from warpi.utils.files import write_atomically

FEATURES, CLASSES, ROWS, TRUSTED, BATCH = 1280, 10, 25_600, 100, 256
WARPI: dict[str, dict[str, Any]] = {
    "warpi, table defaults": {**warpi.WarPI.for_tables, "v_start": None},  # the steps after the start of V
    "warpi, paper's form": {},
}
BLOCK, BLOCKS, WARM_UP = 5, 40, 10
SEED = 100
OUT = RESULTS / "linear_head.json"
PAGE = ROOT / "docs" / "speed.md"
MARKS = ("<!-- linear_head -->", "<!-- end of linear_head -->")


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
    times: dict[str, list[float]] = {name: [] for name in loops}  # elapsed
    work: dict[str, list[float]] = {name: [] for name in loops}  # of all threads
    for block in range(BLOCKS + WARM_UP // BLOCK):
        for name, loop in loops.items():
            for _ in range(BLOCK):
                began, began_work = time.perf_counter(), time.process_time()
                next(loop)
                if block >= WARM_UP // BLOCK:
                    times[name].append(1e3 * (time.perf_counter() - began))
                    work[name].append(1e3 * (time.process_time() - began_work))
    return [
        {
            "method": name,
            "threads": threads,
            "ms": round(mean(times[name]), 2),
            "ms_cpu": round(median(work[name]), 2),
            "ratio": round(mean(times[name]) / mean(times["ce"]), 2),
            "ratio_cpu": round(median(work[name]) / median(work["ce"]), 2),
        }
        for name in loops
    ]


def main() -> None:
    rows = [row for threads in map(int, sys.argv[1:] or ("1", "2")) for row in measure(threads)]
    about = made_on("warpi", "torch") | {"seed": SEED, "steps": BLOCK * BLOCKS, "features": FEATURES, "batch": BATCH}
    write_atomically(OUT, (json.dumps({"about": about, "rows": rows}, indent=1) + "\n").encode())
    titles = ("method", "threads", "ms, mean", "CPU ms, median", "× ce", "× ce, CPU time")
    lines = [f"| {' | '.join(titles)} |", "|---" * len(titles) + "|"]
    lines += [f"| {' | '.join(str(value) for value in row.values())} |" for row in rows]
    print("\n".join(lines))
    write_between(PAGE, MARKS, "\n".join(lines))


if __name__ == "__main__":
    main()
