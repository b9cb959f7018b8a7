"""Write docs/results/cifar10-short.md from the stored runs of recipes/cifar10-short.toml and cifar10-why.toml.

    warpi sweep recipes/cifar10-short.toml --root DATA
    warpi sweep recipes/cifar10-why.toml --root DATA
    python benchmarks/keep.py runs/cifar10-short runs/cifar10-why
    python -m benchmarks.pages.cifar

Runs that are not stored yet are left out.
"""

import json
import statistics
from pathlib import Path
from typing import Any

from benchmarks.common import ROOT
from warpi.methods.registry import METHODS
from warpi.runs.rerun_command import flag

FAMILIES = ("baseline", "loss", "transition", "meta", "selection", "refinement", "semi-supervised")
FOR_FEATURES = ("wann", "dmlp")  # not for pixels: they need features of a pretrained network
KEPT = ROOT / "docs/results/cifar10-short"
CHANGED = ROOT / "docs/results/cifar10-why"
PAGE = ROOT / "docs/results/cifar10-short.md"
INTRO = """# Every method on CIFAR-10, 20 epochs

`recipes/cifar10-short.toml`: CIFAR-10, ResNet-32, 1,000 trusted images, 20 epochs of SGD (learning rate 0.1, a tenth
after 13 epochs and a hundredth after 17), batches of 100, bf16, every method with its defaults, seed 0. Test accuracy
of the last epoch; in brackets the best epoch on the test set, an oracle. Seconds: the median epoch, including
evaluation, on a shared GPU ({machine}). Usually six to ten runs shared it. Up to sixteen processes ran next to the last
eleven runs (`backward`, `cal`, `m_correction`, `mlnt`; `mlc`, `vri`, `emlc` under `uniform:0.6`), but only two in most
epochs of `mlnt`. A step of `backward` or `cal` costs hardly more than one of `ce`; their larger times come from
sharing. Bold: above `ce`. Methods marked * use the trusted images, those marked ° the true noise rate.{missing}

This is a check that every method works on images, not a ranking: it has one seed and far fewer epochs than the papers
(100 to 300). After 20 epochs plain training has memorized few of the wrong labels, so `ce` is strong here. Methods that
need a good network before they start their correction have little time for it.{d2l}

If a method stays below `ce`, its page explains why under "On CIFAR-10, 20 epochs", based on its stored log, its code
and its paper. Eight methods were fixed as a result (`ptd`, `m_correction`, `jocor`, `lccn`, `masking`, `gce_truncated`,
`cal`, `backward`). `pencil`, `mslc`, `dividemix`, `elr_plus`, `selfie`, `gdw`, `mentornet_pd`, `mentornet_dd`,
`s_model` and again `lccn`, `cal`, `ptd` and `backward` were changed after these runs; their rows show the results
before. `recipes/cifar10-why.toml` has the runs that test the
explanations{why}.

    warpi sweep recipes/cifar10-short.toml --root DATA
    warpi sweep recipes/cifar10-why.toml --root DATA
    python benchmarks/keep.py runs/cifar10-short runs/cifar10-why && python -m benchmarks.pages.cifar
"""
RANDOM = """
`d2l` shows the size of random differences: it never started its correction, so it did the same steps as `ce`, and ended
"""
WHY = """
## One thing changed

`recipes/cifar10-why.toml`: the same runs with one setting changed (second column). "Default": the method's cell in the
table above.

"""
NOISES = ("flip:0.4", "uniform:0.6")


Run = tuple[dict[str, Any], list[dict[str, Any]]]  # its spec.json and its epochs


def kept(folder: Path) -> list[Run]:
    runs = []
    for path in sorted(folder.glob("*/spec.json")):
        file = path.parent / "results.jsonl"
        try:
            records = [json.loads(line) for line in file.read_text().splitlines()]
            runs.append((json.loads(path.read_text()), records))
        except ValueError as e:
            raise SystemExit(f"{file} or the spec.json beside it is damaged: {e}") from e
        if not records:
            raise SystemExit(f"{file} is empty")
    return runs


def last(records: list[dict[str, Any]]) -> float:
    return float(records[-1]["test_acc"])


def changes(spec: dict[str, Any], default: dict[str, Any]) -> str:
    """The settings that differ from the run with defaults, as flags."""
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
    listed = {n: m for n, m in METHODS.items() if n not in FOR_FEATURES}
    methods = [(n, m) for family in FAMILIES for n, m in listed.items() if m.family == family]
    for name, method in methods:
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
    tried, wanted = why(runs), len(methods) * len(NOISES)
    intro = INTRO.format(
        machine="; ".join(sorted(machines)),
        missing=f" –: not run yet ({len(runs)} of {wanted} runs are done)." if len(runs) < wanted else "",
        d2l=RANDOM + " and\n".join(apart) + "." if apart else "",
        why=" ([below](#one-thing-changed))" if tried else ", not run yet",
    )
    PAGE.write_text("\n".join([intro, *lines, ""]) + (WHY + "\n".join([*tried, ""]) if tried else ""))


def why(runs: dict[tuple[str, str], Run]) -> list[str]:
    """The table of the runs with one changed setting."""
    rows = []
    for run, records in kept(CHANGED):
        spec = run["spec"]
        plain = runs["ce", spec["noise"]][0]  # with the common settings
        before = runs.get((spec["method"], spec["noise"]))
        name, shown = f"[`{spec['method']}`](../methods/{spec['method']}.md)", changes(spec, plain)
        default = f"{last(before[1]):.1f}" if before else "–"
        rows.append(f"| {name} | {shown} | `{spec['noise']}` | {last(records):.1f} | {default} |")
    head = ["| method | changed | noise | last epoch | default |", "|:---|:---|:---|---:|---:|"]
    return [*head, *rows] if rows else []


if __name__ == "__main__":
    main()
