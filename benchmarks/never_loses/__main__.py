"""Fit `auto` and the baselines, and append one line per run to a file.

    python -m benchmarks.never_loses --seeds 0 1 2 --passes 1 --out results.jsonl --part 1/2
    python -m benchmarks.never_loses --targets --out results.jsonl
    python -m benchmarks.never_loses --seeds 100 --cells 20 --out dev.jsonl            development: 20 random cells
    python -m benchmarks.never_loses --out new.jsonl --baselines benchmarks/results/never_loses.json   only `auto` again

Runs that the file already has are not repeated, so a stopped command can be started again. Several parts may write to
the same file. `python -m benchmarks.pages.never_loses results.jsonl` makes the page.
"""

import argparse
import random
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sklearn.exceptions import ConvergenceWarning
from threadpoolctl import threadpool_limits

from benchmarks.never_loses.models import fit_auto, fit_baseline
from benchmarks.never_loses.noise import Sizes, make_problem
from benchmarks.never_loses.plan import BASELINES, DEVELOPMENT, TARGET_SIZES, TARGETS, cells_of_pass
from benchmarks.never_loses.rows import Job, append_row, job_of, read_any, read_rows
from benchmarks.never_loses.tables import TABLES


def plan_jobs(options: argparse.Namespace) -> Iterator[Job]:
    if options.targets:
        for target in TARGETS:
            for seed in range(options.first_seed, options.first_seed + target.seeds):
                yield "targets", target.cell, seed
        return
    development = min(options.seeds) >= DEVELOPMENT
    tables = options.tables or [name for name in TABLES if not (development and TABLES[name].fresh)]
    passes = [list(cells_of_pass(number, tables)) for number in range(options.passes)]
    if options.cells:
        chosen = random.Random(options.seeds[0]).sample([cell for cells in passes for cell in cells], options.cells)
        passes = [[cell for cell in cells if cell in chosen] for cells in passes]
    for cells in passes:
        for seed in options.seeds:
            yield from (("grid", cell, seed) for cell in cells)


def run(job: Job, earlier: dict[Job, dict[str, Any]]) -> dict[str, Any]:
    """The row of a run. The baselines come from `earlier` if it has the same run."""
    study, cell, seed = job
    sizes = TARGET_SIZES if study == "targets" else Sizes()
    problem = make_problem(cell.table, cell.noise, cell.rate, cell.per_class, seed, sizes)
    row: dict[str, Any] = {"study": study, **vars(cell), "seed": seed}
    row |= {"n_noisy": len(problem.given), "n_trusted": len(problem.y_trusted), "n_test": len(problem.y_test)}
    row["true_rate"] = float(np.mean(problem.given != problem.clean))
    row["auto"] = fit_auto(problem, seed)
    if study == "grid" and job in earlier:
        return row | {name: earlier[job][name] for name in ("accuracy", "seconds") if name in earlier[job]}
    fits = {name: fit_baseline(name, problem, seed) for name in BASELINES if study == "grid"}
    row["accuracy"] = {name: round(fit.accuracy, 3) for name, fit in fits.items()}
    row["seconds"] = {name: round(fit.seconds, 3) for name, fit in fits.items()}
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="file to append to")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--passes", type=int, choices=(1, 2, 3), default=1, help="thirds of the grid")
    parser.add_argument("--part", default="1/1", help="i/n: every n-th run, from the i-th on")
    parser.add_argument("--tables", nargs="+", choices=tuple(TABLES), help="only these tables")
    parser.add_argument("--cells", type=int, help="only this many random cells")
    parser.add_argument("--targets", action="store_true", help="only the few cells with a target accuracy")
    parser.add_argument("--first-seed", type=int, default=0, help="with --targets")
    parser.add_argument("--baselines", type=Path, help="file of earlier results: their baselines are not repeated")
    options = parser.parse_args()
    warnings.simplefilter("ignore", ConvergenceWarning)
    torch.set_num_threads(1)
    part, parts = map(int, options.part.split("/"))
    done = {job_of(row) for row in read_rows(options.out)}
    jobs = [job for job in list(plan_jobs(options))[part - 1 :: parts] if job not in done]
    earlier = {job_of(row): row for row in read_any(options.baselines)} if options.baselines else {}
    with threadpool_limits(1):
        for i, job in enumerate(jobs):
            row = run(job, earlier)
            append_row(options.out, row)
            best = max(row["accuracy"].values(), default=float("nan"))
            print(f"{i + 1}/{len(jobs)}", *vars(job[1]).values(), f"seed {job[2]}", end=" ")
            print(f"auto {row['auto']['accuracy']:.1f} best {best:.1f} {row['auto']['seconds']:.1f} s", flush=True)


if __name__ == "__main__":
    main()
