"""The tables of docs/speed.md as Markdown, from the rows in benchmarks/results.

python benchmarks/tables.py
"""

import json
import statistics
from pathlib import Path

RESULTS = Path(__file__).resolve().parent / "results"


def steps(name: str) -> None:
    rows = json.loads((RESULTS / f"meta-step-{name}.json").read_text())
    for net, precision in dict.fromkeys((r["net"], r["precision"]) for r in rows):
        mine = [r for r in rows if (r["net"], r["precision"]) == (net, precision)]
        print(
            f"\n**{net}, {'tf32' if mine[0]['gpu'] and precision == '32' else precision}**, batch {mine[0]['batch']}\n"
        )
        print("| variant | L | ms a step | x sgd | peak MiB | x sgd | gradient error |\n|---|---|---|---|---|---|---|")
        for r in mine:
            peak, base = r["peak_mib"], mine[0]["peak_mib"]
            memory = f"{peak:.0f} | {peak / base:.2f}" if peak else "- | -"
            error = "-" if r["gradient_error"] is None else f"{r['gradient_error']:.1e}"
            samples = "-" if r["samples"] is None else r["samples"]
            print(f"| `{r['variant']}` | {samples} | {r['ms']:.2f} | {r['ratio_to_sgd']:.2f} | {memory} | {error} |")


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
    steps("h200")
    steps("cpu")
    choices()
