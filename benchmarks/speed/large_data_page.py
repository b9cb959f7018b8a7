"""The tables and the plot of docs/scale.md, from benchmarks/results/large_data.json."""

from collections.abc import Sequence
from typing import Any

from benchmarks.common import ROOT, write_between

PAGE = ROOT / "docs" / "scale.md"
PLOT = ROOT / "docs" / "pictures" / "scale.svg"
MARKS = "<!-- by benchmarks/speed/large_data.py: {} -->", "<!-- until here: {} -->"
NAMES = {
    "file": "fit, `--shuffle rows`",
    "blocks": "fit, `--shuffle blocks`",
    "memory": "fit, features read into memory as float32",
    "audit": "audit, with a csv file",
    "predict": "predict all rows, with a csv file",
    "report": "report",
}

LISTS = {
    "images": "first step from a `.csv` list",
    "images parquet": "first step from a `.parquet` list",
    "convert images": "`warpi convert` from `.csv` to `.parquet`",
}


def write_page(records: Sequence[dict[str, Any]]) -> None:
    for name, make in TABLES.items():
        marks = MARKS[0].format(name), MARKS[1].format(name)
        write_between(PAGE, marks, make(records))
    plot(records)


def memory_table(records: Sequence[dict[str, Any]]) -> str:
    lines = [
        "| Rows | Command | Peak GiB | Anonymous GiB | Rows per CPU second | Epoch, elapsed s | CPU s |",
        "|---|---|---|---|---|---|---|",
    ]
    for r in sorted(
        (r for r in records if r["part"] in NAMES), key=lambda r: (r["rows"], list(NAMES).index(r["part"]))
    ):
        speed = f"{r['rows'] / r['epoch_cpu_s'] / 1e6:.2f} M" if "epoch_cpu_s" in r else ""
        epoch = f"{r['epoch_s']:.1f}" if "epoch_s" in r else ""
        values = (
            f"{r['rows'] / 1e6:.0f} M",
            NAMES[r["part"]],
            r["peak_gib"],
            r["anonymous_gib"],
            speed,
            epoch,
            r["cpu_s"],
        )
        lines.append("| " + " | ".join(map(str, values)) + " |")
    return "\n".join([*lines, "", growth(records), "", made(records, NAMES)])


def growth(records: Sequence[dict[str, Any]]) -> str:
    """How an epoch and the memory grow when the rows become four times as many."""
    by = {(r["part"], r["rows"] // 10**6): r for r in records}
    sentences = []
    for few, many in ((1, 4), (4, 16)):
        grown = [
            f"{by[part, many][key] / by[part, few][key]:.1f}"
            for key in ("cpu_s", "epoch_cpu_s", "anonymous_gib")
            for part in ("file", "blocks")
        ]
        sentences.append(
            f"From {few} M to {many} M rows the whole command takes {grown[0]} (rows) and {grown[1]} times (blocks) the"
            f" CPU time, an epoch {grown[2]} and {grown[3]} times, and anonymous memory grows by factors of "
            f"{grown[4]} and {grown[5]}."
        )
    return " ".join(sentences)


def shuffling_table(records: Sequence[dict[str, Any]]) -> str:
    limited = [r for r in records if r["part"].startswith("limited")]
    lines = [
        "| Order | File | Page cache | Rows per second | Read from disk per row |",
        "|---|---|---|---|---|",
    ]
    for r in limited:
        values = (
            f"`--shuffle {r['part'].split()[1]}`",
            f"{r['file_mib']} MiB",
            f"{r['cache_mib']} MiB",
            f"{r['rows_per_s']:,}",
            f"{r['read_bytes_per_row']:,} bytes",
        )
        lines.append("| " + " | ".join(values) + " |")
    best = {
        shuffle: max(r["rows_per_s"] for r in limited if r["part"].endswith(shuffle)) for shuffle in ("rows", "blocks")
    }
    ratio = f"Blocks give {best['blocks'] / best['rows']:.0f} times the rows per second."
    return "\n".join([*lines, "", f"{ratio} {made(records, {r['part'] for r in limited})}"])


def sorted_table(records: Sequence[dict[str, Any]]) -> str:
    ordered = [r for r in records if r["part"].split()[0] in ("random", "sorted")]
    lines = ["| Rows in the file | Classes | Order | Test accuracy by seed |", "|---|---|---|---|"]
    for part in dict.fromkeys(r["part"] for r in ordered):
        order, classes, shuffle = part.split()
        accuracy = ", ".join(f"{r['test_acc']:.2f}" for r in ordered if r["part"] == part)
        where = "sorted by label" if order == "sorted" else "in random order"
        lines.append(f"| {ordered[0]['rows'] / 1e6:.0f} M, {where} | {classes} | `--shuffle {shuffle}` | {accuracy} |")
    return "\n".join([*lines, "", made(records, {r["part"] for r in ordered})])


def images_table(records: Sequence[dict[str, Any]]) -> str:
    lines = ["| Paths | What | CPU seconds | Elapsed s | Load | Peak GiB |", "|---|---|---|---|---|---|"]
    for r in sorted(
        (r for r in records if r["part"] in LISTS), key=lambda r: (r["rows"], list(LISTS).index(r["part"]))
    ):
        values = f"{r['cpu_s']} | {r['wall_s']} | {r['load']} | {r['peak_gib']}"
        lines.append(f"| {r['rows'] / 1e6:.2g} M | {LISTS[r['part']]} | {values} |")
    return "\n".join([*lines, "", made(records, LISTS)])


def made(records: Sequence[dict[str, Any]], parts: Any) -> str:
    """When and on what some parts were measured, in one sentence."""
    some = [r for r in records if r["part"] in parts]
    loads = sorted({r["load"] for r in some})
    load = f"{loads[0]} to {loads[-1]}" if len(loads) > 1 else f"{loads[0]}"
    first = some[0]
    return (
        f"Measured {min(r['date'] for r in some)}, {first['machine']}, Python {first['python']}, "
        f"torch {first['torch']}, numpy {first['numpy']}; load of the machine: {load}."
    )


TABLES = {"memory": memory_table, "images": images_table, "shuffling": shuffling_table, "sorted": sorted_table}


def plot(records: Sequence[dict[str, Any]]) -> None:
    """CPU seconds per epoch and memory against the number of rows."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    sizes = (1e6, 4e6, 16e6)
    figure, axes = plt.subplots(1, 2, figsize=(8, 3), layout="constrained")
    for part in ("file", "blocks", "memory"):
        some = sorted((r for r in records if r["part"] == part and r["rows"] in sizes), key=lambda r: r["rows"])
        millions = [r["rows"] / 1e6 for r in some]
        axes[0].plot(millions, [r["epoch_cpu_s"] for r in some], "o-", label=NAMES[part].replace("`", ""))
        axes[1].plot(millions, [r["anonymous_gib"] for r in some], "o-")
    axes[0].set(xlabel="million rows", ylabel="CPU seconds per epoch", ylim=0, xlim=0)
    axes[1].set(xlabel="million rows", ylabel="GiB, without pages of files", ylim=0, xlim=0)
    axes[0].legend(fontsize=7)
    with mpl.rc_context({"svg.hashsalt": "warpi"}):
        figure.savefig(PLOT, metadata={"Date": None})
