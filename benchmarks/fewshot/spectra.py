"""Where does a learned kernel win? Sinusoids of a narrow and of a wide range of frequencies, few and many bases.

    python -m benchmarks.fewshot.spectra [--iterations 1500] [--seeds 0,1,2]      seconds per run, one CPU thread
    python -m benchmarks.fewshot.spectra --page                                   writes the table of docs/fewshot.md

Kernels that all tasks share (`rff`, and its limit `rbf`) and kernels that MetaVRF infers for each task, with the same
network, ridge regression and test tasks. Rows that are already in benchmarks/results/fewshot-spectra.json are kept.
"""

import argparse
import json
import statistics
from typing import Any

import torch

from benchmarks.common import RESULTS, ROOT, made_on, write_between
from benchmarks.fewshot.sines import train_and_score
from warpi.fewshot.data import FewShotData, Sines
from warpi.utils.files import write_atomically

FILE = RESULTS / "fewshot-spectra.json"
PAGE = ROOT / "docs" / "fewshot.md"
MARKS = "<!-- spectra -->", "<!-- /spectra -->"
SHOTS = 10
FREQUENCIES = {"0.8 to 1.2, as in the paper": (0.8, 1.2), "0.5 to 3": (0.5, 3.0)}
PAIRS: dict[str, tuple[tuple[str, dict[str, Any]], tuple[str, dict[str, Any]]]] = {  # shared kernel, learned kernel
    "32": (("rff", {"bases": 32}), ("metavrf", {"bases": 32, "noise": "fresh"})),
    "128": (("rff", {"bases": 128}), ("metavrf", {"bases": 128, "noise": "fresh"})),
    "infinitely many": (("rbf", {}), ("metavrf", {"exact": True})),
}


def make_page(rows: list[dict[str, Any]], about: dict[str, Any]) -> str:
    """Mean and spread over seeds for each pair, and the differences of the seeds."""
    lines = ["| frequencies | bases | shared kernel | learned kernel | learned better in |", "|---|---|---|---|---|"]
    for frequencies in FREQUENCIES:
        for bases in PAIRS:
            some = [row for row in rows if (row["frequencies"], row["bases"]) == (frequencies, bases)]
            shared, learned = (
                {row["seed"]: row["mean"] for row in some if row["kernel"] == kernel}
                for kernel in ("shared", "learned")
            )
            if len(shared) < 2 or shared.keys() != learned.keys():
                continue
            wins = sum(learned[seed] < shared[seed] for seed in shared)
            cells = [_spread(list(values.values())) for values in (shared, learned)]
            lines.append(f"| {frequencies} | {bases} | {cells[0]} | {cells[1]} | {wins} of {len(shared)} seeds |")
    seeds = sorted({row["seed"] for row in rows})
    lines += [
        "",
        f"Mean squared error over 1,000 test tasks with {SHOTS} shots; mean ± standard deviation over seeds {seeds[0]} "
        f"to {seeds[-1]}, {rows[0]['iterations']:,} steps of 25 tasks, the last weights. {about['machine']}, one "
        f"thread, torch {about['torch']}, {about['date']}.",
    ]
    return "\n".join(lines)


def _spread(values: list[float]) -> str:
    return f"{statistics.mean(values):.3f} ± {statistics.stdev(values):.3f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--iterations", type=int, default=1500)
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--page", action="store_true", help="only write the table")
    given = parser.parse_args()
    stored: dict[str, Any] = json.loads(FILE.read_text()) if FILE.exists() else {"about": made_on("torch"), "rows": []}
    rows: list[dict[str, Any]] = stored["rows"]
    if given.page:
        write_between(PAGE, MARKS, make_page(rows, stored["about"]))
        return
    torch.set_num_threads(1)
    for seed in map(int, given.seeds.split(",")):
        for frequencies, interval in FREQUENCIES.items():
            sines = Sines(frequency=interval)
            data = FewShotData("sines", sines, sines, sines)
            for bases, pair in PAIRS.items():
                for kernel, (learner, options) in zip(("shared", "learned"), pair, strict=True):
                    place = {"frequencies": frequencies, "bases": bases, "kernel": kernel, "seed": seed}
                    place |= {"iterations": given.iterations}
                    if any(place.items() <= row.items() for row in rows):
                        continue
                    rows.append(place | train_and_score(learner, options, data, SHOTS, seed, given.iterations))
                    print(rows[-1], flush=True)
                    write_atomically(FILE, (json.dumps(stored, indent=1) + "\n").encode())


if __name__ == "__main__":
    main()
