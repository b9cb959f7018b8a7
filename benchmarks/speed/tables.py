"""Print the tables of docs/speed.md as Markdown, from the rows in benchmarks/results.

python -m benchmarks.speed.tables
python -m benchmarks.speed.tables FOLDER    first store the rows of FOLDER/memory-*.json, written by `warpi bench`
"""

import json
import statistics
import sys
from pathlib import Path

from benchmarks.common import RESULTS

TIMES = ("ms", "ms_min", "ms_max", "ratio_to_sgd", "compile_s", "repeats", "steps")


def steps(name: str) -> None:
    rows = json.loads((RESULTS / f"meta-step-{name}.json").read_text())
    for net, precision in dict.fromkeys((r["net"], r["precision"]) for r in rows):
        group = [r for r in rows if (r["net"], r["precision"]) == (net, precision)]
        shown = "tf32" if group[0]["gpu"] and precision == "32" else precision
        print(f"\n**{net}, {shown}**, batch {group[0]['batch']}\n")
        print(
            "| variant | L | ms per step | x sgd | peak MiB | x sgd | gradient error |\n|---|---|---|---|---|---|---|"
        )
        for r in group:
            peak, base = r["peak_mib"], group[0]["peak_mib"]
            memory = f"{peak:.0f} | {peak / base:.2f}" if peak else "- | -"
            error = "-" if r["gradient_error"] is None else f"{r['gradient_error']:.1e}"
            samples = "-" if r["samples"] is None else r["samples"]
            print(f"| `{r['variant']}` | {samples} | {r['ms']:.2f} | {r['ratio_to_sgd']:.2f} | {memory} | {error} |")


def gather(folder: Path) -> None:
    """memory-0-*.json: fused kernels, memory-1-*.json: not fused. Times are dropped, since the runs shared the GPU."""
    rows = {}
    for file in sorted(folder.glob("memory-*.json")):
        fused = file.name.startswith("memory-0")
        for row in json.loads(file.read_text()):
            fields = {k: v for k, v in row.items() if k not in TIMES}
            rows.setdefault((fused, row["variant"]), {"fused": fused, **fields})
    (RESULTS / "memory-h200.json").write_text(json.dumps(list(rows.values()), indent=1) + "\n")


def memory() -> None:
    rows = json.loads((RESULTS / "memory-h200.json").read_text())
    base = {r["fused"]: r["peak_mib"] for r in rows if r["variant"] == "sgd"}
    print("\n| variant | fused | peak MiB | x sgd | gradient error |\n|---|---|---|---|---|")
    for r in sorted(rows, key=lambda r: not r["fused"]):
        error = "-" if r["gradient_error"] is None else f"{r['gradient_error']:.1f}"
        fused, peak = r["fused"], r["peak_mib"]
        print(f"| `{r['variant']}` | {'yes' if fused else 'no'} | {peak:.0f} | {peak / base[fused]:.2f} | {error} |")


def choices() -> None:
    rows = json.loads((RESULTS / "meta_choices.json").read_text())["rows"]
    noises = list(dict.fromkeys(r["noise"] for r in rows))
    print(f"\n| choice | {' | '.join(f'`{n}`' for n in noises)} |\n|---|{'---|' * len(noises)}")
    for choice in dict.fromkeys(r["choice"] for r in rows):
        cells = []
        for noise in noises:
            scores = [r["test_acc"] for r in rows if (r["choice"], r["noise"]) == (choice, noise)]
            cells.append(f"{statistics.mean(scores):.1f} ± {statistics.stdev(scores):.1f}")
        print(f"| `{choice}` | {' | '.join(cells)} |")


if __name__ == "__main__":
    for name in sys.argv[1:]:
        gather(Path(name))
    steps("h200")
    memory()
    steps("cpu")
    choices()
