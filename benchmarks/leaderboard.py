"""The leaderboard: every method with the strong recipe and the same training time on one GPU.

    python -m benchmarks.leaderboard --root DATA --out OUT --measure [METHOD ...]      measure seconds per epoch
    python -m benchmarks.leaderboard --root DATA --out OUT --methods ce promix --labels random1 --seeds 0 1 2

Each method has as many epochs as fit into two minutes (`--minutes`), without the time to compile. The number follows
from the seconds of an epoch in benchmarks/results/leaderboard_epochs.json (`--table`), which `--measure` writes: six
epochs, three of them in the warm-up of a method that has one. Seconds of methods with a run in docs/results/strong come
from there. A run that does not end within `--seconds` keeps its checkpoint: the same command resumes it, and skips
finished runs.
"""

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

from benchmarks.common import ROOT
from benchmarks.strong_images import DISC, PROMIX, SOP_PLUS, try_run
from warpi.methods.registry import METHODS
from warpi.report.experiments import RunRecord, find_runs
from warpi.runs.spec import DataCache
from warpi.utils.files import write_with_folder

TABLE = ROOT / "benchmarks" / "results" / "leaderboard_epochs.json"
KEPT = ROOT / "docs" / "results" / "strong"
MINUTES = 2.0
LABELS: dict[str, dict[str, Any]] = {
    "random1": {"noise": "given:random1"},
    "flip": {"noise": "flip:0.4"},
    "fine": {"data": "cifar100", "noise": "given:noisy"},  # the fine labels of CIFAR-100N
}
# Settings that the authors publish for other data or for a short schedule. The others are the defaults.
ENTRIES: dict[str, dict[str, Any]] = {
    "ce": {},
    "clean_only": {},
    "fine_tune": {},
    "gce": {},
    "elr": {},
    "elr_plus": {},
    "co_teaching": {},
    "dividemix": {},
    "glc": {},
    "l2rw": {},
    "mwnet": {},
    "dmi_ns": {},
    "warpi": {},
    "sop_plus": SOP_PLUS,
    "promix": PROMIX,
    "disc": DISC,
    "warpi_plus": {},
    "warpi_plus_untrusted": {"method": "warpi_plus", "use_trusted": False},
}
_ELR_FLIP = {"beta": 0.9, "strength": 1.0}
_ELR_FINE = {"beta": 0.9, "strength": 7.0}
FOR_LABELS: dict[tuple[str, str], dict[str, Any]] = {
    ("elr", "flip"): _ELR_FLIP,
    ("elr_plus", "flip"): _ELR_FLIP,
    ("elr", "fine"): _ELR_FINE,
    ("elr_plus", "fine"): _ELR_FINE,
    ("dividemix", "flip"): {"lambda_u": 0.0, "confidence_penalty": 1.0},
    ("promix", "flip"): {"confidence_penalty": 1.0},
    ("sop_plus", "flip"): {"lr_v": 100.0},
    ("sop_plus", "fine"): {"lr_u": 1.0},
    ("promix", "fine"): {"debias_loss": 0.5, "debias_labels": 0.5},
    ("disc", "flip"): {"memory": 0.95},
}
_SLOWER = {"rectifier", "strong_pair", "use_trusted"}  # settings with which a step takes longer
_PROBE = {"epochs": 6, "warm_up": 3.0, "compile": True}  # `compile`: short runs are not compiled otherwise


def settings_of(entry: str, labels: str) -> dict[str, Any]:
    """All settings of a run except epochs and seed."""
    method = {"method": entry, **ENTRIES[entry], **FOR_LABELS.get((entry, labels), {})}
    meta = 1000 if METHODS[method["method"]].needs_meta or entry == "warpi_plus" else 0
    return {"meta": meta, **{name: value for name, value in method.items() if name != "epochs"}, **LABELS[labels]}


def warm_up_of(entry: str) -> float:
    settings = ENTRIES[entry]
    method = METHODS[settings.get("method", entry)]
    return float(settings.get("warm_up", getattr(method, "warm_up", 0.0)))


def epochs_within(seconds: float, first: float, later: float, warm_up: float) -> int:
    """The largest number of epochs within the time, if an epoch of the warm-up takes `first` and each other `later`.

    A warm-up takes at most half of the epochs.
    """
    n = 2
    while min(warm_up, (n + 1) / 2) * first + (n + 1 - min(warm_up, (n + 1) / 2)) * later <= seconds:
        n += 1
    return n


def from_history(seconds: list[float], warm_up: float) -> tuple[float, float]:
    """Median seconds of an epoch during the warm-up and after it. The first epoch of each phase also compiles."""
    n = round(warm_up)
    later = statistics.median(seconds[n + 1 :])
    return (statistics.median(seconds[1:n]) if n > 1 else later), later


def measured(file: Path | None = None) -> dict[str, dict[str, Any]]:
    """The seconds of an epoch of each method that was measured: stored in a file, or of a stored run."""
    return {**from_kept(), **read_table(file or TABLE)}


def read_table(file: Path) -> dict[str, dict[str, Any]]:
    table: dict[str, dict[str, Any]] = json.loads(file.read_text()) if file.exists() else {}
    return table


def from_kept() -> dict[str, dict[str, Any]]:
    """Seconds per epoch of the methods that have a run with the strong recipe, alone on the GPU, in docs/results."""
    table = {}
    shared = {row["name"] for row in json.loads((KEPT / "summary.json").read_text()) if row.get("shared")}
    for run in find_runs([KEPT]):
        entry = run.spec["method"]
        usual = run.spec["recipe"].get("average") and run.spec["recipe"]["batch_size"] == 512 and not run.spec["limit"]
        slower = _SLOWER & run.spec["changed"].keys()
        if run.path.name in shared or entry not in ENTRIES or not usual or slower:
            continue
        table[entry] = timed(run, float(run.spec["options"].get("warm_up", 0.0)))
    if "warpi_plus" in table:
        table["warpi_plus_untrusted"] = table["warpi_plus"]
    return table


def timed(run: RunRecord, warm_up: float) -> dict[str, Any]:
    first, later = from_history([epoch["seconds"] for epoch in run.epochs], warm_up)
    about = {name: run.environment[name] for name in ("gpu", "torch", "date")}
    return {"warm_up_seconds": round(first, 3), "seconds": round(later, 3), "run": run.path.name, **about}


def measure(out: Path, entries: list[str], root: str, deadline: float, cache: DataCache, file: Path) -> None:
    """Train a few epochs of each method and store their seconds in a file."""
    for entry in entries:
        warms_up = hasattr(METHODS[ENTRIES[entry].get("method", entry)], "warm_up")
        probe = {name: value for name, value in _PROBE.items() if warms_up or name != "warm_up"}
        settings = {**settings_of(entry, "random1"), **probe, "seed": 100}
        if not try_run(out / "probes", f"probe_{entry}", settings, root, deadline, cache):
            continue
        table = read_table(file)
        for run in find_runs([out / "probes" / f"probe_{entry}"]):
            if len(run.epochs) == _PROBE["epochs"]:
                table[entry] = timed(run, _PROBE["warm_up"] if warms_up else 0.0)
        write_with_folder(file, json.dumps(dict(sorted(table.items())), indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", required=True, help="folder of CIFAR-10, CIFAR-100 and CIFAR-N")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--measure", nargs="*", metavar="METHOD", help="measure epochs (default: what is not measured)")
    parser.add_argument("--table", type=Path, default=TABLE, help="file with the seconds of an epoch")
    parser.add_argument("--methods", nargs="+", choices=ENTRIES, default=list(ENTRIES))
    parser.add_argument("--labels", nargs="+", choices=LABELS, default=list(LABELS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--minutes", type=float, default=MINUTES, help="training time of each run, without compiling")
    parser.add_argument("--seconds", type=float, default=1e9, help="time limit of all runs together")
    parser.add_argument("--final", action="store_true", help="stop a run early if it cannot end within the time limit")
    parser.add_argument("--plan", action="store_true", help="only print the number of epochs of each method")
    given = parser.parse_args()
    deadline = time.monotonic() + given.seconds
    given.out.mkdir(parents=True, exist_ok=True)
    cache = DataCache()
    if given.measure is not None:
        missing = [entry for entry in ENTRIES if entry not in measured(given.table)]
        measure(given.out, given.measure or missing, given.root, deadline, cache, given.table)
        return
    table = measured(given.table)
    if missing := [entry for entry in given.methods if entry not in table]:
        raise SystemExit(f"no speed of {', '.join(missing)}; run with --measure first")
    for seed in given.seeds:
        for labels in given.labels:
            for entry in given.methods:
                speed = table[entry]
                seconds = (speed["warm_up_seconds"], speed["seconds"])
                epochs = epochs_within(60 * given.minutes, *seconds, warm_up_of(entry))
                if given.plan:
                    print(f"{entry} {labels}: {epochs} epochs")
                    continue
                options = {**settings_of(entry, labels), "epochs": epochs, "seed": seed}
                name = f"{entry}_{labels}_seed{seed}"
                try_run(given.out, name, options, given.root, deadline, cache, final=given.final)


if __name__ == "__main__":
    main()
