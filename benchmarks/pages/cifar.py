"""docs/results/cifar10-short.md from what is kept of recipes/cifar10-short.toml and recipes/cifar10-why.toml.

    warpi sweep recipes/cifar10-short.toml --root DATA
    warpi sweep recipes/cifar10-why.toml --root DATA
    python benchmarks/keep.py runs/cifar10-short runs/cifar10-why
    python -m benchmarks.pages.cifar

What is not kept yet is left out.
"""

import json
import statistics
from pathlib import Path
from typing import Any

from benchmarks.common import ROOT
from warpi.methods.registry import METHODS
from warpi.runs.rerun import flag

FAMILIES = ("baseline", "loss", "transition", "meta", "selection", "refinement", "semi-supervised")
KEPT, CHANGED = ROOT / "docs/results/cifar10-short", ROOT / "docs/results/cifar10-why"
PAGE = ROOT / "docs/results/cifar10-short.md"
INTRO = """# Every method on CIFAR-10, 20 epochs

`recipes/cifar10-short.toml`: CIFAR-10, ResNet-32, 1,000 trusted images, 20 epochs of SGD (learning rate 0.1, a tenth
after 13 and again after 17), batches of 100, bf16, every method with its defaults, seed 0. Test accuracy of the last
epoch; in brackets the best epoch on the test set, an oracle. Seconds: the median epoch, evaluation included, on a GPU
({machine}) that others used, too: six to ten runs at once as a rule; up to sixteen processes,
few-shot training among them, beside the eleven runs that came last (`backward`, `cal`, `m_correction`, `mlnt`; `mlc`,
`vri`, `emlc` under `uniform:0.6`); two runs in most epochs of `mlnt`. A step of `backward` or `cal` is hardly dearer
than one of `ce`: the rest of their seconds is the crowd's.
Bold: above `ce`. Methods marked * use the trusted images, those marked ° the true noise rate.{missing}

It is a check that every method works on images, not a ranking: one seed, and far fewer epochs than the papers have
(100 to 300). After 20 epochs plain training has hardly begun to learn wrong labels by heart, so that `ce` is strong
here, and methods that need a good network before their own work begins have little time for it.{d2l}

Why a method stays below `ce` was looked into, and stands on its page under "On CIFAR-10, 20 epochs": from its log, kept
beside this page, from code and papers. Eight were mended for it (`ptd`, `m_correction`, `jocor`, `lccn`,
`masking`, `gce_truncated`, `cal`, `backward`). `pencil`, `mslc`, `dividemix`, `mentornet_pd`, `mentornet_dd`, `s_model`
and, once more, `lccn` were mended after these runs; their rows are those of before. The runs that decide what is only
probable are those of `recipes/cifar10-why.toml`{why}.

    warpi sweep recipes/cifar10-short.toml --root DATA
    warpi sweep recipes/cifar10-why.toml --root DATA
    python benchmarks/keep.py runs/cifar10-short runs/cifar10-why && python -m benchmarks.pages.cifar
"""
CHANCE = """ How much is chance:
`d2l`, whose turn never came, did what `ce` does, step for step, and ended
"""
WHY = """
## One thing changed

`recipes/cifar10-why.toml`: as above, but for what the second column says. "As above": the method's cell in the table
above, where it has its defaults.

"""
NOISES = ("flip:0.4", "uniform:0.6")


Run = tuple[dict[str, Any], list[dict[str, Any]]]  # its spec.json and its epochs


def kept(folder: Path) -> list[Run]:
    found = []
    for path in sorted(folder.glob("*/spec.json")):
        file = path.parent / "results.jsonl"
        try:
            records = [json.loads(line) for line in file.read_text().splitlines()]
            found.append((json.loads(path.read_text()), records))
        except ValueError as e:
            raise SystemExit(f"{file} or the spec.json beside it is garbled: {e}") from e
        if not records:
            raise SystemExit(f"{file} is empty")
    return found


def last(records: list[dict[str, Any]]) -> float:
    return float(records[-1]["test_acc"])


def changes(spec: dict[str, Any], default: dict[str, Any]) -> str:
    """What is not as in the run with defaults, in the words of the command line."""
    flags = spec["changed"] | {k: v for k, v in spec["recipe"].items() if v != default["recipe"].get(k)}
    flags |= {"seed": spec["seed"]} if spec["seed"] != default["seed"] else {}
    return " ".join("the true T" if name == "matrix" else f"`{' '.join(flag(name, v))}`" for name, v in flags.items())


def main() -> None:
    every = kept(KEPT)
    runs = {(run["spec"]["method"], run["spec"]["noise"]): (run["spec"], records) for run, records in every}
    where = [run["environment"] for run, _ in every]
    machines = {f"{e.get('gpu', e['device'])}, torch {e['torch']}" for e in where}
    head = "| method | family | " + " | ".join(f"`{noise}` | seconds" for noise in NOISES) + " |"
    lines = [head, "|:---|:---|" + "---:|---:|" * len(NOISES)]
    for name, method in ((n, m) for family in FAMILIES for n, m in METHODS.items() if m.family == family):
        cells = []
        for noise in NOISES:
            if (name, noise) not in runs:
                cells.append("– | –")
                continue
            records = runs[name, noise][1]
            best = max(r["test_acc"] for r in records)
            above = ("ce", noise) in runs and last(records) > last(runs["ce", noise][1])
            shown = f"**{last(records):.1f}**" if above else f"{last(records):.1f}"
            seconds = statistics.median(r["seconds"] for r in records[1:])
            cells.append(f"{shown} ({best:.1f}) | {seconds:.1f}")
        marks = "*" * method.needs_meta + "°" * method.needs_noise_rate
        lines.append(f"| [`{name}`](../methods/{name}.md){marks} | {method.family} | {' | '.join(cells)} |")
    apart = [
        f"{abs(last(runs['d2l', n][1]) - last(runs['ce', n][1])):.1f} points from it under `{n}`"
        for n in NOISES
        if ("d2l", n) in runs and all(r["alpha"] == 1 for r in runs["d2l", n][1])
    ]
    tried, wanted = why(runs), len(METHODS) * len(NOISES)
    intro = INTRO.format(
        machine="; ".join(sorted(machines)),
        missing=f" –: not run yet ({len(runs)} of {wanted} runs are done)." if len(runs) < wanted else "",
        d2l=CHANCE + " and\n".join(apart) + "." if apart else "",
        why=" ([below](#one-thing-changed))" if tried else ", not run yet",
    )
    PAGE.write_text("\n".join([intro, *lines, ""]) + (WHY + "\n".join([*tried, ""]) if tried else ""))


def why(runs: dict[tuple[str, str], Run]) -> list[str]:
    """The table of the runs in which one thing is changed."""
    rows = []
    for run, records in kept(CHANGED):
        spec = run["spec"]
        plain = runs["ce", spec["noise"]][0]  # with the common settings
        before = runs.get((spec["method"], spec["noise"]))
        name, shown = f"[`{spec['method']}`](../methods/{spec['method']}.md)", changes(spec, plain)
        default = f"{last(before[1]):.1f}" if before else "–"
        rows.append(f"| {name} | {shown} | `{spec['noise']}` | {last(records):.1f} | {default} |")
    head = ["| method | changed | noise | last epoch | as above |", "|:---|:---|:---|---:|---:|"]
    return [*head, *rows] if rows else []


if __name__ == "__main__":
    main()
