"""Few-shot regression of sinusoids: every learner, and the effect of each change to MetaVRF, on the same tasks.

    python -m benchmarks.fewshot.sines --out benchmarks/results/sines.json [--iterations 3000] [--seeds 0,1,2,3,4]
    python -m benchmarks.fewshot.sines --out benchmarks/results/sines.json --table --page docs/fewshot.md

Writes one row per variant, number of shots and seed: the mean squared error over 1,000 test tasks (the same for all),
on the grid of 50 points, each task separately. Rows that are already in the file are not computed again.
"""

import argparse
import json
import platform
import re
import statistics
import time
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor, as_completed
from datetime import date
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from warpi.fewshot.data import FewShotData
from warpi.fewshot.datasets import load_fewshot
from warpi.fewshot.episodes import Kind, make_tasks
from warpi.fewshot.evaluate import evaluate
from warpi.fewshot.learner import Problem
from warpi.fewshot.learners.registry import make_learner
from warpi.fewshot.train import Training, train
from warpi.utils.files import write_atomically

LEARNERS = ("maml", "rff", "metavrf", "metavrf_lstm", "metavrf_bilstm", "metavrf_evidence")
PLAIN = {"exact": True, "floor": 1e-4}  # common to the steps that lead to metavrf_evidence
INPUTS = {"minmax": False, "skip": True, "norm": "support"}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "maml": ("maml", {}),
    "r2d2": ("r2d2", {}),
    "rbf": ("rbf", {}),
    "rff": ("rff", {}),
    "rff, 2048 bases": ("rff", {"bases": 2048}),
    "metavrf_lstm": ("metavrf_lstm", {}),
    "metavrf_bilstm": ("metavrf_bilstm", {}),
    "metavrf": ("metavrf", {}),
    "metavrf, fresh noise": ("metavrf", {"noise": "fresh"}),
    "metavrf_bilstm, fresh noise": ("metavrf_bilstm", {"noise": "fresh"}),
    "exact": ("metavrf", {"exact": True}),
    "exact, ridge 1e-4": ("metavrf", PLAIN),
    "exact, ridge 1e-4, inputs": ("metavrf", PLAIN | INPUTS),
    "exact, ridge 1e-4, inputs, labels": ("metavrf", PLAIN | INPUTS | {"labels": True}),
    "metavrf_evidence": ("metavrf_evidence", {}),
    "evidence, weighed alike": ("metavrf_evidence", {"weigh": "alike"}),
    "evidence, without labels": ("metavrf_evidence", {"labels": False}),
    "evidence, without inputs": ("metavrf_evidence", {"skip": False, "minmax": True}),
    "evidence, ridge 0.01": ("metavrf_evidence", {"floor": 0.01}),
    "evidence, 128 bases": ("metavrf_evidence", {"exact": False}),
    "evidence, without KL": ("metavrf_evidence", {"kl_weight": 0.0}),
    "evidence, 4 proposals": ("metavrf_evidence", {"proposals": 4}),
}
N_SEEDS = 5
Job = tuple[str, int, int, int]  # variant, shots, seed, iterations


def train_one(job: Job) -> dict[str, Any]:
    variant, shots, seed, iterations = job
    torch.set_num_threads(1)
    scored = train_and_score(*VARIANTS[variant], load_fewshot("sines"), shots, seed, iterations)
    return {"variant": variant, "shots": shots, "seed": seed, "iterations": iterations, **scored}


def train_and_score(
    name: str, options: dict[str, Any], data: FewShotData, shots: int, seed: int, iterations: int
) -> dict[str, Any]:
    """Train a learner and evaluate it on 1,000 test tasks."""
    learner = make_learner(name, **options)
    learner.start(Problem(data.shape), seed)
    training = Training(iterations=iterations, seed=seed, val_every=iterations)
    began = time.process_time()
    *_, record = train(learner, data, Kind(0, shots, 10), training)
    seconds = time.process_time() - began
    scores = evaluate(learner, make_tasks(data.test, Kind(0, shots, 50), "cpu", training=False, augment=False), 1000)
    return {
        "mean": scores.mean,
        "ci95": scores.ci95,
        "median": scores.median,
        "transductive": learner.transductive,
        "cpu_seconds": round(seconds, 1),
        "train_mse": record["mse"] if record else None,
    }


def key(row: dict[str, Any]) -> Job:
    return row["variant"], row["shots"], row["seed"], row["iterations"]


def jobs(shots: list[int], seeds: list[int], iterations: int, only: list[str]) -> Iterable[Job]:
    """First the learners, seed by seed; then the changes, only for the first number of shots."""
    for seed in seeds:
        yield from ((v, k, seed, iterations) for k in shots for v in LEARNERS if v in only)
    for seed in seeds:
        yield from ((v, shots[0], seed, iterations) for v in only if v not in LEARNERS)


def table(rows: list[dict[str, Any]], iterations: int) -> str:
    """By shots: mean and standard deviation over seeds of the mean over tasks, and the mean of the medians."""
    rows = [row for row in rows if row["iterations"] == iterations]
    shots = sorted({row["shots"] for row in rows})
    lines = ["| | " + " | ".join(f"{k} shots: mean | median" for k in shots) + " | CPU s |"]
    lines.append("|---" * (2 + 2 * len(shots)) + "|")
    for variant in VARIANTS:
        some = [row for row in rows if row["variant"] == variant]
        if not some:
            continue
        cells = [variant + (" (transductive)" if some[0]["transductive"] else "")]
        for k in shots:
            means = [row["mean"] for row in some if row["shots"] == k]
            spread = f" ± {statistics.stdev(means):.4f}" if len(means) > 1 else ""
            few = f" ({len(means)} seed{'s' * (len(means) > 1)})" if 0 < len(means) < N_SEEDS else ""
            cells.append(f"{statistics.mean(means):.4f}{spread}{few}" if means else "")
            medians = [row["median"] for row in some if row["shots"] == k]
            cells.append(f"{statistics.mean(medians):.4f}" if medians else "")
        cells.append(f"{statistics.mean(row['cpu_seconds'] for row in some):.0f}")
        lines.append("| " + " | ".join(cells) + " |")
    facts = (sorted({str(row[name]) for row in rows}) for name in ("machine", "torch", "python", "date"))
    machine, version, python, day = ("/".join(part) for part in facts)
    lines.append(
        f"\nMean squared error over 1,000 test tasks; mean ± standard deviation over seeds 0 to {N_SEEDS - 1}, "
        f"{iterations:,} steps of 25 tasks,\nthe last weights; CPU seconds of one training, one thread, busy machine. "
        f"{machine}, torch {version}, Python {python}, {day}."
    )
    return "\n".join(lines)


def write_page(page: Path, text: str) -> None:
    marks = re.compile(r"(<!-- sines -->\n).*?(<!-- /sines -->)", re.DOTALL)
    before = page.read_text()
    if not marks.search(before):
        raise SystemExit(f"{page} has no marks <!-- sines --> and <!-- /sines -->")
    write_atomically(page, marks.sub(lambda m: f"{m[1]}{text}\n{m[2]}", before).encode())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--iterations", type=int, default=3000)
    parser.add_argument("--shots", default="5,10")
    parser.add_argument("--seeds", default="0,1,2,3,4")
    parser.add_argument("--only", default="", help="variants, separated by ';'")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--table", action="store_true", help="only print the table")
    parser.add_argument("--page", type=Path, help="also write the table between the marks of this page")
    given = parser.parse_args()
    stored: dict[str, Any] = json.loads(given.out.read_text()) if given.out.exists() else {"rows": []}
    rows: list[dict[str, Any]] = stored["rows"]
    if not given.table:
        numbers = ([int(n) for n in text.split(",")] for text in (given.shots, given.seeds))
        only = given.only.split(";") if given.only else list(VARIANTS)
        done = {key(row) for row in rows}
        todo = [job for job in jobs(*numbers, given.iterations, only) if job not in done]
        about = {"date": date.today().isoformat(), "machine": platform.processor() or platform.machine()}
        about |= {"torch": torch.__version__, "python": platform.python_version()}
        with ProcessPoolExecutor(given.workers, mp_context=get_context("spawn")) as pool:
            for future in as_completed([pool.submit(train_one, job) for job in todo]):
                rows.append(future.result() | about)
                print(*(f"{k}={v}" for k, v in rows[-1].items() if k not in about), flush=True)
                write_atomically(given.out, json.dumps({"rows": rows}, indent=1).encode())
    text = table(rows, given.iterations)
    print(text)
    if given.page:
        write_page(given.page, text)


if __name__ == "__main__":
    main()
