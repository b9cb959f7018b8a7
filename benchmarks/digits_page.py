"""docs/results/digits.md and the costs that `warpi list methods` shows, from the runs of recipes/digits.toml.

    warpi sweep recipes/digits.toml
    python benchmarks/digits_page.py [FOLDER]        default: runs/digits

Keeps the last record of every run in docs/results/digits.json, so that the page can be made again without the runs.
Where the folder holds some methods only, the others stay, and so do the seconds, which were measured side by side.
"""

import json
import statistics
import sys
from collections import defaultdict
from pathlib import Path

from warpi.method import FAMILIES
from warpi.methods import METHODS

ROOT = Path(__file__).resolve().parents[1]
ROWS, PAGE = ROOT / "docs/results/digits.json", ROOT / "docs/results/digits.md"
COSTS = ROOT / "src/warpi/methods/costs.json"
INTRO = """# Every method on digits

`recipes/digits.toml`: digits, 50 trusted examples, 30 epochs, the MLP, every method with its defaults, seeds {first} to
{last}; test accuracy of the last epoch, mean ± sample standard deviation. 2 CPU cores, one thread a run, torch {torch}.
Bold: more than two points above `ce`. Methods marked * use the trusted examples, those marked ° the true noise rate.
Defaults for tables of `warpi` and a few others were chosen on digits with other seeds (their pages say so): it is a
smoke test, not a ranking.

    warpi sweep recipes/digits.toml && python benchmarks/digits_page.py
"""


def collect(folder: Path) -> list[dict[str, object]]:
    rows = []
    for path in sorted(folder.glob("*/done")):
        spec = json.loads((path.parent / "spec.json").read_text())
        records = [json.loads(line) for line in (path.parent / "results.jsonl").read_text().splitlines()]
        rows.append(
            {
                "method": spec["spec"]["method"],
                "noise": spec["spec"]["noise"],
                "seed": spec["spec"]["seed"],
                "test_acc": records[-1]["test_acc"],
                "epoch_seconds": statistics.mean(r["seconds"] for r in records),
                "noise_sha256": spec["facts"]["noise_sha256"],
                "torch": spec["environment"]["torch"],
            }
        )
    return rows


def key(row: dict[str, object]) -> tuple[str, ...]:
    return tuple(str(row[k]) for k in ("method", "noise", "seed"))


def page(rows: list[dict[str, object]]) -> str:
    noises = list(dict.fromkeys(str(r["noise"]) for r in sorted(rows, key=lambda r: str(r["noise"]))))
    cells: dict[tuple[str, str], list[float]] = defaultdict(list)
    for r in rows:
        cells[str(r["method"]), str(r["noise"])].append(float(str(r["test_acc"])))
    base = {noise: statistics.mean(cells["ce", noise]) for noise in noises}
    seeds = sorted({int(str(r["seed"])) for r in rows})
    torch = ", ".join(sorted({str(r["torch"]) for r in rows}))
    intro = INTRO.format(first=seeds[0], last=seeds[-1], torch=torch)
    lines = [intro, f"| method | family | {' | '.join(f'`{n}`' for n in noises)} |", f"|---|---|{'---|' * len(noises)}"]
    for family in FAMILIES:
        for name, method in METHODS.items():
            if method.family != family or not cells[name, noises[0]]:
                continue
            marks = "*" * method.needs_meta + "°" * method.needs_noise_rate
            shown = []
            for noise in noises:
                scores = cells[name, noise]
                if not scores:
                    shown.append("-")
                    continue
                mean = statistics.mean(scores)
                text = f"{mean:.1f} ± {statistics.stdev(scores):.1f}" if len(scores) > 1 else f"{mean:.1f}"
                shown.append(f"**{text}**" if mean > base[noise] + 2 else text)
            lines.append(f"| [`{name}`](../methods/{name}.md){marks} | {family} | {' | '.join(shown)} |")
    weak = []
    for name in METHODS:
        known = [noise for noise in noises if cells[name, noise]]
        if known and name != "ce" and all(statistics.mean(cells[name, noise]) <= base[noise] + 2 for noise in known):
            weak.append(f"`{name}`")
    lines += ["", f"Nowhere more than two points above `ce`: {', '.join(weak) or 'none'}. Their pages say why.", ""]
    return "\n".join(lines)


def costs(rows: list[dict[str, object]]) -> dict[str, float]:
    """Seconds an epoch relative to plain training: a median over runs."""
    seconds: dict[str, list[float]] = defaultdict(list)
    for r in rows:
        seconds[str(r["method"])].append(float(str(r["epoch_seconds"])))
    plain = statistics.median(seconds["ce"])
    return {name: round(statistics.median(seconds[name]) / plain, 1) for name in METHODS if seconds[name]}


def main() -> None:
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "runs" / "digits"
    if folder.exists():
        known, new = {key(r): r for r in json.loads(ROWS.read_text())}, collect(folder)
        whole = {r["method"] for r in new} >= set(METHODS)  # beside one another, so that their seconds can be compared
        for r in new:
            seconds = r if whole else known.get(key(r), r)
            known[key(r)] = r | {"epoch_seconds": seconds["epoch_seconds"]}
        ROWS.write_text(json.dumps(list(known.values()), indent=0) + "\n")
    rows = json.loads(ROWS.read_text())
    PAGE.write_text(page(rows))
    COSTS.write_text(json.dumps(costs(rows), indent=1) + "\n")


if __name__ == "__main__":
    main()
