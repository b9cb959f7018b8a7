"""Write recipes/README.md: what is in the recipes, and what the missing runs of the paper's tables cost in GPU minutes.

    python -m benchmarks.pages.plan

The costs follow from the step times in benchmarks/results/meta-step-h200.json (one run alone on the GPU), from those of
several runs at once in docs/speed.md, and from the numbers of steps. Runs in docs/results count as done.
"""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from benchmarks import leaderboard
from benchmarks.common import ROOT
from benchmarks.pages.results import NAMES
from warpi.sweep.plan import Job, read_plan
from warpi.sweep.run_states import find_kept
from warpi.utils.files import write_with_folder

PAGE = ROOT / "recipes" / "README.md"
SPEEDS = ROOT / "benchmarks" / "results" / "meta-step-h200.json"
TABLES = ("asymmetric", "asymmetric-others", "uniform", "instance")
STEPS = 480  # per epoch: 48,020 images in batches of 100
EVALUATION = 0.15  # seconds per epoch
COMPILING = 25.0  # seconds per run
# A step relative to plain training with the same network. Measured with ResNet-32 in bf16: warpi and mwnet; the others
# by their passes (two networks; two batches in most epochs) or like mwnet.
RELATIVE = {"glc": 1.7, "co_teaching": 2.0, "l2rw": 3.35, "mlc_wang": 3.35, "mwnet": 3.35}
PLAIN = ("ce", "clean_only", "fine_tune", "mentornet_pd", "d2l")
# FLOPs of a forward pass relative to WRN-28-10; small networks at this batch size use about half of the GPU.
RESNET18 = 2 * 0.56 / 5.25
# Six processes with ResNet-32 take 4.3 ms per step of WarPI instead of 7.85 (docs/speed.md). The larger networks fill
# the GPU alone, and nothing has been measured for them.
PACKED = {"resnet32": 4.3 / 7.85}
STAGES: list[tuple[str, tuple[str, ...], tuple[int, ...]]] = [
    ("`warpi`, seed 0", ("warpi",), (0,)),
    ("`ce` and `mwnet`, seed 0", ("ce", "mwnet"), (0,)),
    ("`warpi_detc`, seed 0", ("warpi_detc",), (0,)),
    ("`warpi` and `mwnet`, seeds 1 and 2", ("warpi", "mwnet"), (1, 2)),
    ("all others", (), (0, 1, 2)),
]
FILES = {
    "asymmetric, asymmetric-others, uniform, instance, clothing1m, food101n": "the tables of the WarPI paper",
    "animal10n, mini_webvision": "methods without trusted examples on photos with labels from the web",
    "curves, samples, samples-time, ablation, v-output, v-output-small": "figures of the paper; one setting changed",
    "digits, digits-why, digits-quick": "every method on digits, in minutes on a CPU",
    "cifar10-short, cifar10-why": "every method on CIFAR-10 for 20 epochs",
}
INTRO = """# Recipes

Each file describes runs for `warpi sweep` ([docs/sweep.md](../docs/sweep.md)). Finished runs are not repeated, so a
sweep can be stopped at any time. [Results](../docs/results/README.md).

| files | runs |
|---|---|
"""
PLAN = """
## What is missing from the paper's tables

Minutes of one NVIDIA H200 for runs that are not in [docs/results](../docs/results). *Alone*: one run after the other.
*Packed*: six ResNet-32 runs at a time as processes under MPS (`warpi sweep --jobs 6`), which costs {saved:.0f} % less.
Larger networks fill the GPU; they are counted as alone.

Measured steps ([docs/speed.md](../docs/speed.md), bf16, {date}): ResNet-32 {r32:.2f} ms for plain training and
{w32:.2f} ms for `warpi`, WRN-28-10 {r28:.2f} and {w28:.2f} ms. ResNet-18 is not measured but estimated from its FLOPs,
and methods other than `ce`, `warpi` and `mwnet` are estimated from their passes. A run has {steps} steps per epoch.
{compiling:.0f} s for compiling are included.

The order, so that every claim of the paper is tested early:

"""
SAVINGS = """

Ways to make WRN-28-10 cheaper without changing the result. None is used in these figures, and none was measured there:

- *The noisy and the trusted batch in one call.* The trusted pass runs at the virtual weights and the noisy pass at the
  real ones, so they cannot be one call. Only `--meta-order real` shares a pass. On ResNet-32 a step then takes
  {real:.2f} instead of {w32:.2f} ms, but V is used one step later, so it is not the published step.
- *Shared first layers.* With `--meta-depth 2` the virtual step moves only the last two children ({depth:.2f} ms on
  ResNet-32). This changes the meta gradient.
- *Two runs at once.* A step of WRN-28-10 fills the GPU, so a second process can hardly gain anything.

## The leaderboard

`python -m benchmarks.leaderboard` trains every core method and the strongest rivals with
[the strong recipe](../docs/strong_recipe.md), two minutes each, on CIFAR-10N `random1`, CIFAR-10 `flip:0.4` and
CIFAR-100N `fine`. A run that the time limit (`--seconds`) stops keeps its checkpoint, and the same command resumes it.
"""


@dataclass(frozen=True)
class Cost:
    """Minutes of a set of runs."""

    runs: int
    alone: float
    packed: float


def main() -> None:
    write_with_folder(PAGE, page())


def page() -> str:
    ms = {(row["net"], row["variant"]): row for row in json.loads(SPEEDS.read_text()) if row["precision"] == "bf16"}
    missing = list(missing_jobs())
    about = {
        "saved": 100 * (1 - PACKED["resnet32"]),
        "date": ms["resnet32", "warpi"]["date"],
        "r32": ms["resnet32", "sgd"]["ms"],
        "w32": ms["resnet32", "warpi"]["ms"],
        "r28": ms["wrn28_10", "sgd"]["ms"],
        "w28": ms["wrn28_10", "warpi"]["ms"],
        "real": ms["resnet32", "warpi_real"]["ms"],
        "depth": ms["resnet32", "warpi_depth2"]["ms"],
        "steps": STEPS,
        "compiling": COMPILING,
    }
    files = [
        f"| {', '.join(f'`{name}.toml`' for name in names.split(', '))} | {what} |" for names, what in FILES.items()
    ]
    n = len(list((ROOT / "recipes" / "authors").glob("*.toml")))
    files.append(
        f"| [`authors/`](authors), {n} files | one rival each, with its authors' settings and published figures |"
    )
    lines = ["| stage | runs | alone | packed | sum, packed |", "|---|---:|---:|---:|---:|"]
    total = 0.0
    left = missing
    for title, methods, seeds in STAGES:
        now = [
            job for job in left if (not methods or job.settings["method"] in methods) and job.settings["seed"] in seeds
        ]
        left = [job for job in left if job not in now]
        cost = cost_of(now, ms)
        total += cost.packed
        lines.append(f"| {title} | {cost.runs} | {cost.alone:.0f} | {cost.packed:.0f} | {total:.0f} |")
    lines += ["", "Minutes of one run alone, and the missing seeds:", "", *cells(missing, ms)]
    return (
        "\n".join([INTRO + "\n".join(files), PLAN.format(**about) + "\n".join(lines)])
        + SAVINGS.format(**about)
        + board()
    )


def missing_jobs() -> Iterable[Job]:
    """The runs of the paper's tables on CIFAR that are not stored."""
    for name in TABLES:
        plan = read_plan(ROOT / "recipes" / f"{name}.toml")
        kept = [ROOT / path for path in plan.kept]
        yield from (job for job in plan.jobs if find_kept(kept, job) is None)


def minutes(job: Job, ms: dict[tuple[str, str], Any]) -> float:
    net, method = job.settings["net"], job.settings["method"]
    if net == "resnet18":
        plain = ms["wrn28_10", "sgd"]["ms"] * RESNET18
        relative = ms["wrn28_10", "warpi"]["ratio_to_sgd"]
    else:
        plain = ms[net, "sgd"]["ms"]
        relative = ms[net, "warpi"]["ratio_to_sgd"]
    if method in PLAIN:
        relative = 1.0
    elif method not in ("warpi", "warpi_detc"):
        relative = RELATIVE[method]
    epoch = STEPS * plain * relative / 1000 + EVALUATION
    return (job.settings["epochs"] * epoch + COMPILING) / 60


def cost_of(jobs: list[Job], ms: dict[tuple[str, str], Any]) -> Cost:
    alone = [minutes(job, ms) for job in jobs]
    packed = [m * PACKED.get(job.settings["net"], 1.0) for m, job in zip(alone, jobs, strict=True)]
    return Cost(len(jobs), sum(alone), sum(packed))


def cells(jobs: list[Job], ms: dict[tuple[str, str], Any]) -> list[str]:
    """For each table, data set and noise: what one run costs, and which seeds of the main methods are missing."""
    lines = ["| data | noise | network | `ce` | `mwnet` | `warpi` | missing runs | minutes, packed |"]
    lines.append("|---|---|---|---|---|---|---:|---:|")
    groups: dict[tuple[str, str, str], list[Job]] = {}
    for job in jobs:
        groups.setdefault((job.settings["data"], job.settings["noise"], job.settings["net"]), []).append(job)
    for (data, noise, net), group in groups.items():
        each = []
        for method in ("ce", "mwnet", "warpi"):
            runs = [job for job in group if job.settings["method"] == method]
            seeds = ", ".join(str(job.settings["seed"]) for job in runs)
            each.append(f"{minutes(runs[0], ms):.1f} (seeds {seeds})" if runs else "done")
        cost = cost_of(group, ms)
        lines.append(f"| {NAMES[data]} | `{noise}` | {net} | {' | '.join(each)} | {cost.runs} | {cost.packed:.0f} |")
    return lines


def board() -> str:
    runs = len(leaderboard.ENTRIES) * len(leaderboard.LABELS)
    best = 5 * len(leaderboard.LABELS) * 2
    minutes_each = leaderboard.MINUTES + COMPILING / 60
    unmeasured = [f"`{entry}`" for entry in leaderboard.ENTRIES if entry not in leaderboard.measured()]
    text = f"{runs} runs with one seed cost {runs * minutes_each:.0f} minutes with compiling, "
    text += f"two more seeds of the best five {best * minutes_each:.0f}.\n"
    if unmeasured:
        text += "The seconds of an epoch, from which the number of epochs follows, are not yet measured for "
        text += f"{', '.join(unmeasured)}:\n"
        text += f"`--measure` trains six epochs of each, about {len(unmeasured) * 0.6:.0f} minutes in all.\n"
    return text


if __name__ == "__main__":
    main()
