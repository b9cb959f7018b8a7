"""Write the tables and figures of docs/fewshot.md from stored results.

    python -m benchmarks.pages.fewshot

Reads benchmarks/results/fewshot-{runs,speed}.json, written by benchmarks/fewshot/gpu.py. The tables are written between
the marks `<!-- fewshot:NAME -->` and `<!-- /fewshot:NAME -->` of the page, the figures to docs/results/fewshot. Tables
without results are not changed.
"""

import json
import re
from collections.abc import Sequence
from typing import Any

from benchmarks.common import RESULTS, ROOT
from benchmarks.fewshot.gpu import ORDER
from warpi.fewshot.plot import plot_bases, plot_versatility
from warpi.utils.files import write_atomically

PAGE = ROOT / "docs/fewshot.md"
PICTURES = ROOT / "docs/results/fewshot"
Row = dict[str, Any]
SETTINGS = {
    "cifar_fs-5w1s": "CIFAR-FS 5-way 1-shot",
    "cifar_fs-5w5s": "CIFAR-FS 5-way 5-shot",
    "omniglot-5w1s": "Omniglot 5-way 1-shot",
    "omniglot-20w1s": "Omniglot 20-way 1-shot",
}
NAMES = {
    "bilstm": "MetaVRF, bi-LSTM",
    "lstm": "MetaVRF, LSTM",
    "none": "MetaVRF without LSTM",
    "exact": "MetaVRF without LSTM, exact kernel",
    "rff": "random Fourier features, 2048",
    "rbf": "RBF kernel",
    "protonet": "ProtoNet",
    "r2d2": "R2-D2",
    "maml": "MAML, second order",
    "nearest": "nearest class mean of raw pixels",
}
# Zhen et al. 2020, tables 1 and 2.
PAPER = {
    "MetaVRF, bi-LSTM": ("63.1 ± 0.7", "76.5 ± 0.9", "99.8 ± 0.1", "97.8 ± 0.3"),
    "MetaVRF without LSTM": ("61.1 ± 0.7", "74.3 ± 0.9", "99.6 ± 0.2", "97.0 ± 0.3"),
    "random Fourier features, 2048": ("61.1 ± 0.8", "74.7 ± 0.9", "99.5 ± 0.2", "97.2 ± 0.3"),
}


def accuracy(rows: Sequence[Row]) -> str:
    """One row per learner, one column per setting; transductive and inductive separately, the best of a column bold."""
    cells = {(split(r)[1], r["transductive"], r["setting"]): r for r in rows if r.get("setting") in SETTINGS}
    rows = list(cells.values())
    lines = ["| learner | " + " | ".join(SETTINGS.values()) + " |", "|---" * (1 + len(SETTINGS)) + "|"]
    for transductive in (True, False):
        group = {key: r for key, r in cells.items() if key[1] is transductive}
        if not group:
            continue
        lines.append(f"| **{'transductive' if transductive else 'inductive'}** |" + " |" * len(SETTINGS))
        means = {s: [r["mean"] for (_, _, t), r in group.items() if t == s] for s in SETTINGS}
        best = {s: max(values) for s, values in means.items() if len(values) > 1}
        for name, text in NAMES.items():
            row = [group.get((name, transductive, s)) for s in SETTINGS]
            if any(row):
                shown = [show(r, r is not None and r["mean"] == best.get(r["setting"])) for r in row]
                lines.append(f"| {text} | " + " | ".join(shown) + " |")
    lines.append("| **published** (most likely transductive, as many queries as shots) |" + " |" * len(SETTINGS))
    lines += [f"| {name} | " + " | ".join(values) + " |" for name, values in PAPER.items()]
    tasks = "/".join(sorted({f"{r['tasks']:,}" for r in rows}))
    seeds = "/".join(sorted({str(r["seed"]) for r in rows}))
    lines += [
        "",
        f"Accuracy in percent over {tasks} test tasks with 15 queries per class, ± 95 % interval. {machine(rows)}",
    ]
    if (done := len(rows)) < len(ORDER):
        lines.append(f"{done} of {len(ORDER)} runs are done; the others are missing.")
    budget = ", ".join(f"{SETTINGS[s]} {text}" for s in SETTINGS if (text := steps(rows, s)))
    rates = "/".join(f"{lr:g}" for lr in sorted({r["train_lr"] for r in rows if r["learner"] != "maml"}))
    lines.append(
        f"Seed {seeds}; training (steps × tasks per step × (ways, queries per class)): {budget}; learning rate {rates}."
    )
    other = [r for r in rows if split(r)[1] == "maml"]
    if other:
        used = f"{other[0]['iterations']:,} × {other[0]['train_tasks']}, at {other[0]['train_lr']:g}"
        lines.append(f"MAML, whose steps cost more, used {used}.")
    return "\n".join(lines)


def split(row: Row) -> tuple[str, str]:
    """Setting and learner in the name of a run."""
    setting = row["setting"]
    return setting, row["run"].removeprefix(f"{setting}-").removesuffix("-inductive")


def show(row: Row | None, best: bool) -> str:
    if row is None:
        return ""
    text = f"{row['mean']:.2f} ± {row['ci95']:.2f}"
    return f"**{text}**" if best else text


def steps(rows: Sequence[Row], setting: str) -> str:
    names = ("iterations", "train_tasks", "train_ways", "train_queries")
    budgets = {tuple(r[n] for n in names) for r in rows if r["setting"] == setting and r["learner"] != "maml"}
    return " or ".join(f"{n:,} × {t} × ({w}, {q})" for n, t, w, q in sorted(budgets))


def speed(rows: Sequence[Row]) -> str:
    """One row per learner, one column per number of tasks."""
    sizes = sorted({r["train_tasks"] for r in rows})
    by_key = {(r["name"], r["precision"], execution(r), r["train_tasks"]): r for r in rows}
    lines = ["| learner | " + " | ".join(f"{t} tasks per step" for t in sizes) + " |", "|---" * (1 + len(sizes)) + "|"]
    for name, precision, how in sorted({key[:3] for key in by_key}, key=lambda k: (list(NAMES).index(k[0]), k[1:])):
        text = NAMES[name] + ", float32" * (precision == "32") + (f", {how}" if how else "")
        row = [by_key.get((name, precision, how, t)) for t in sizes]
        lines.append(f"| {text} | " + " | ".join(f"{r['episodes_per_s']:,.0f}" if r else "" for r in row) + " |")
    about = (
        f"Training episodes per second on CIFAR-FS 5-way 1-shot, {rows[0]['queries']} queries per class. A step draws\n"
        "the tasks and computes loss, gradient and Adam update. Unless noted, it runs in bfloat16 and as one CUDA\n"
        "graph of fused kernels.\n"
        f"{machine(rows)}"
    )
    return "\n".join([*lines, "", about])


def execution(row: Row) -> str:
    """How a step was executed, if not in the fastest way. MAML runs under vmap, so its kernels cannot be fused."""
    if not row["captured"]:
        return "kernel by kernel"
    return "" if row.get("compiled") or row["name"] == "maml" else "not fused"


def machine(rows: Sequence[Row]) -> str:
    parts = (sorted({str(r[name]) for r in rows}) for name in ("gpu", "torch", "date"))
    gpu, torch, day = ("/".join(p) for p in parts)
    return f"{'CPU' if gpu == 'None' else gpu}, torch {torch}, {day}."


def read(name: str) -> list[Row]:
    file = RESULTS / f"fewshot-{name}.json"
    rows: list[Row] = json.loads(file.read_text()) if file.exists() else []
    return rows


def pictures(runs: Sequence[Row]) -> str:
    """Draw the figures that have results; return the lines that show them."""
    bases = [r | {"label": NAMES[r["run"].split("-")[1]]} for r in runs if r["run"].startswith("bases-")]
    versatile = [r for r in runs if r.get("versatility")]
    lines = []
    if bases:
        write_atomically(PICTURES / "bases.png", plot_bases(bases, "png"))
        lines.append("![Accuracy against the number of bases](results/fewshot/bases.png)")
    if versatile:
        write_atomically(PICTURES / "versatility.png", plot_versatility(versatile, "png"))
        lines.append("![Numbers of ways and shots that differ from training](results/fewshot/versatility.png)")
    return "\n\n".join([*lines, f"Seed 0. {machine(runs)}"]) if lines else ""


def main() -> None:
    PICTURES.mkdir(parents=True, exist_ok=True)
    page = PAGE.read_text()
    runs = read("runs")
    plain = [r for r in runs if not r.get("versatility")]
    makers = {"accuracy": (accuracy, plain), "speed": (speed, read("speed"))}
    for name, (make, rows) in (makers | {"pictures": (pictures, runs)}).items():
        marks = re.compile(rf"(<!-- fewshot:{name} -->\n).*?(<!-- /fewshot:{name} -->)", re.DOTALL)
        if not marks.search(page):
            raise SystemExit(f"{PAGE} has no marks fewshot:{name}")
        if rows and (text := make(rows)):
            page = marks.sub(lambda m: f"{m[1]}{text}\n{m[2]}", page)
    write_atomically(PAGE, page.encode())


if __name__ == "__main__":
    main()
