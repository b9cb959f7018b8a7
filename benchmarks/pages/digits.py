"""Write docs/results/digits.md, and the costs in `warpi list methods`, from recipes/digits.toml and digits-why.toml.

    warpi sweep recipes/digits.toml
    warpi sweep recipes/digits-why.toml
    python -m benchmarks.pages.digits runs/digits runs/digits-why    (without folders: only the page)

Stores the last record of every run in docs/results/digits.json (digits-why.json for changed options), so that the page
can be written again without the runs. If the folders contain only some methods, the rows of the others are kept, and so
are all times, which can be compared only if they were measured together.
"""

import json
import statistics
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

from benchmarks.common import ROOT
from warpi.methods.registry import METHODS
from warpi.runs.rerun_command import flag

FAMILIES = ("baseline", "loss", "transition", "meta", "selection", "refinement", "semi-supervised")
ROWS = ROOT / "docs/results/digits.json"
WHY = ROOT / "docs/results/digits-why.json"
PAGE = ROOT / "docs/results/digits.md"
COSTS = ROOT / "src/warpi/methods/costs.json"
Row = dict[str, Any]
INTRO = """# Every method on digits

`recipes/digits.toml`: digits, 50 trusted examples, 30 epochs, the MLP, every method with its defaults, seeds {first} to
{last}; test accuracy of the last epoch, mean ± sample standard deviation. 2 CPU cores, one thread per run, torch
{torch}. Bold: more than two points above `ce`. Methods marked * use the trusted examples, those marked ° the true
noise rate. The defaults for tables of `warpi` and a few other methods were chosen on digits with other seeds (see
their pages), so this is a smoke test, not a ranking.

    warpi sweep recipes/digits.toml && warpi sweep recipes/digits-why.toml
    python -m benchmarks.pages.digits runs/digits runs/digits-why
"""
CHANGED = """## One thing changed

`recipes/digits-why.toml`: the same runs with one setting changed (second column). Before the arrow: the mean of the
table above; after it: mean ± standard deviation with the change.
"""


def collect(folder: Path) -> list[Row]:
    rows = []
    for path in sorted(folder.glob("*/done")):
        spec = json.loads((path.parent / "spec.json").read_text())
        records = [json.loads(line) for line in (path.parent / "results.jsonl").read_text().splitlines()]
        rows.append(
            {
                "method": spec["spec"]["method"],
                "noise": spec["spec"]["noise"],
                "seed": spec["spec"]["seed"],
                "changed": spec["spec"]["changed"],
                "test_acc": records[-1]["test_acc"],
                "epoch_seconds": statistics.mean(r["seconds"] for r in records),
                "noise_sha256": spec["facts"]["noise_sha256"],
                "torch": spec["environment"]["torch"],
            }
        )
    return rows


def key(row: Row) -> tuple[str, ...]:
    return tuple(json.dumps(row.get(k, {})) for k in ("method", "noise", "seed", "changed"))


def table(rows: list[Row]) -> dict[tuple[str, str, str], list[float]]:
    """Accuracies by method, changed settings (in words) and noise."""
    cells: dict[tuple[str, str, str], list[float]] = defaultdict(list)
    for r in rows:
        changed = r.get("changed", {}).items()
        words = ["the true T" if name == "matrix" else f"`{' '.join(flag(name, v))}`" for name, v in changed]
        cells[r["method"], " ".join(words), r["noise"]].append(r["test_acc"])
    return cells


def better(scores: list[float], base: float) -> bool:
    """More than two points above plain training."""
    return bool(scores) and statistics.mean(scores) > base + 2


def format_scores(scores: list[float]) -> str:
    spread = f" ± {statistics.stdev(scores):.1f}" if len(scores) > 1 else ""
    return f"{statistics.mean(scores):.1f}{spread}" if scores else "–"


def page(rows: list[Row], changed: list[Row]) -> str:
    noises = sorted({r["noise"] for r in rows})
    cells: dict[tuple[str, str], list[float]] = defaultdict(list)
    cells |= {(method, noise): scores for (method, _, noise), scores in table(rows).items()}
    base = {noise: statistics.mean(cells["ce", noise]) for noise in noises}
    seeds = sorted({r["seed"] for r in rows})
    torch = ", ".join(sorted({r["torch"] for r in rows}))
    intro = INTRO.format(first=seeds[0], last=seeds[-1], torch=torch)
    lines = [intro, f"| method | family | {' | '.join(f'`{n}`' for n in noises)} |", f"|---|---|{'---|' * len(noises)}"]
    for family in FAMILIES:
        for name, method in METHODS.items():
            if method.family != family or not any(cells[name, noise] for noise in noises):
                continue
            marks = "*" * method.needs_meta + "°" * method.needs_noise_rate
            good = [better(cells[name, noise], base[noise]) for noise in noises]
            shown = [format_scores(cells[name, noise]) for noise in noises]
            shown = [f"**{text}**" if bold else text for text, bold in zip(shown, good, strict=True)]
            lines.append(f"| [`{name}`](../methods/{name}.md){marks} | {family} | {' | '.join(shown)} |")
    weak = [
        f"`{name}`"
        for name in METHODS
        if name != "ce"
        and any(cells[name, noise] for noise in noises)
        and not any(better(cells[name, noise], base[noise]) for noise in noises)
    ]
    lines += ["", f"Never more than two points above `ce`: {', '.join(weak) or 'none'}. Their pages explain why.", ""]
    lines += [
        CHANGED,
        f"| method | changed | {' | '.join(f'`{n}`' for n in noises)} |",
        f"|---|---|{'---|' * len(noises)}",
    ]
    tried = table(changed)
    for name, words in sorted(dict.fromkeys(key[:2] for key in tried), key=lambda pair: pair[0]):
        shown = [
            f"{statistics.mean(cells[name, n]):.1f} → {format_scores(tried[name, words, n])}"
            if (name, words, n) in tried
            else ""
            for n in noises
        ]
        lines.append(f"| [`{name}`](../methods/{name}.md) | {words} | {' | '.join(shown)} |")
    return "\n".join([*lines, ""])


def costs(rows: list[Row]) -> dict[str, float]:
    """Seconds per epoch relative to plain training: the median over runs."""
    seconds: dict[str, list[float]] = defaultdict(list)
    for r in rows:
        if r["epoch_seconds"] is not None:
            seconds[r["method"]].append(r["epoch_seconds"])
    plain = statistics.median(seconds["ce"])
    return {name: round(statistics.median(seconds[name]) / plain, 1) for name in METHODS if seconds[name]}


def main() -> None:
    new = [row for folder in sys.argv[1:] for row in collect(Path(folder))]
    whole = {r["method"] for r in new if not r["changed"]} >= set(METHODS)  # then their times can be compared
    for file, rows in ((ROWS, [r for r in new if not r["changed"]]), (WHY, [r for r in new if r["changed"]])):
        known = {key(r): r for r in json.loads(file.read_text())} if file.exists() else {}
        for r in rows:
            seconds = r if whole else known.get(key(r), {"epoch_seconds": None})
            known[key(r)] = r | {"epoch_seconds": seconds["epoch_seconds"]}
        file.write_text(json.dumps(list(known.values()), indent=0) + "\n")
    rows = json.loads(ROWS.read_text())
    PAGE.write_text(page(rows, json.loads(WHY.read_text())))
    COSTS.write_text(json.dumps(costs(rows), indent=1) + "\n")


if __name__ == "__main__":
    main()
