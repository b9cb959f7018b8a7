"""A model on paper of 8 to 64 GPUs and of a billion rows: from measured steps on one GPU, measured memory, assumptions.

python -m benchmarks.speed.scale_model      writes the tables into docs/scale.md

Nothing here was measured on several GPUs. The assumptions are the constants below.
"""

import json
from collections.abc import Iterable
from typing import Any

from benchmarks.common import RESULTS, ROOT, write_between

PAGE = ROOT / "docs" / "scale.md"
MARKS = "<!-- by benchmarks/speed/scale_model.py: {} -->", "<!-- until here: {} -->"
GPUS = (8, 16, 32, 64)
GPUS_PER_NODE = 8
IN_NODE, BETWEEN_NODES = 300e9, 150e9  # bytes per second of an all-reduce of some megabytes (bus bandwidth)
LATENCY_IN_NODE, LATENCY_BETWEEN = 30e-6, 100e-6  # seconds per all-reduce
PARAMETERS = {"resnet32": 0.46e6, "wrn28_10": 36.5e6}
ALL_REDUCES = {"sgd": 1, "warpi": 3}  # of all parameters, in float32; that of the meta-network is small
ROWS, ROW_BYTES = 1e9, 128  # 64 float16
DISK = 5e9  # bytes per second that a node reads in blocks
IMAGES = 100e6


def all_reduce(n: int, size: float) -> float:
    """Seconds of an all-reduce over n GPUs: each sends and receives 2 (n - 1) / n of the bytes."""
    one_node = n <= GPUS_PER_NODE
    speed, latency = (IN_NODE, LATENCY_IN_NODE) if one_node else (BETWEEN_NODES, LATENCY_BETWEEN)
    return latency + 2 * (n - 1) / n * size / speed


def gpu_rows() -> Iterable[tuple[Any, ...]]:
    stored = json.loads((RESULTS / "meta-step-h200.json").read_text())
    for net, size in PARAMETERS.items():
        for variant, times in ALL_REDUCES.items():
            step = next(r for r in stored if (r["net"], r["precision"], r["variant"]) == (net, "bf16", variant))
            sent = times * 4 * size
            alone = step["ms"] / 1e3
            taken = [alone + times * all_reduce(n, 4 * size) for n in GPUS]
            shares = [f"{100 * alone / t:.0f} %" for t in taken]
            epoch = f"{IMAGES / (step['batch'] * GPUS[-1]) * taken[-1] / 60:.0f}"
            yield f"`{net}`", f"`{variant}`", f"{alone * 1e3:.1f}", f"{sent / 1e6:.0f}", *shares, epoch


def gpu_table() -> str:
    head = [
        "Network",
        "Step",
        "ms on one GPU",
        "MB per step",
        *(f"{n} GPUs" for n in GPUS),
        "minutes per epoch, 64 GPUs",
    ]
    return table(head, gpu_rows())


def bytes_per_row(records: list[dict[str, Any]]) -> float:
    """Anonymous memory that a row costs at the peak of `warpi fit`: the slope between the smallest and largest file."""
    files = sorted((r for r in records if r["part"] == "file"), key=lambda r: r["rows"])
    gained = (files[-1]["anonymous_gib"] - files[0]["anonymous_gib"]) * 2**30
    return gained / (files[-1]["rows"] - files[0]["rows"])


def billion_table() -> str:
    records = list(json.loads((RESULTS / "large_data.json").read_text()).values())
    peak = bytes_per_row(records)
    speed = {
        part: max((r["rows"], r["rows"] / r["epoch_cpu_s"]) for r in records if r["part"] == part)[1]
        for part in ("file", "blocks")
    }
    read = ROWS * ROW_BYTES / DISK
    rows = [
        ("file of the features", f"{ROWS * ROW_BYTES / 1e9:.0f} GB", f"{ROW_BYTES} bytes per row"),
        ("memory per rank at the start", f"{ROWS * peak / 1e9:.0f} GB", f"{peak:.0f} bytes per row, measured slope"),
        ("memory per rank while training, rows", f"{ROWS * 24 / 1e9:.0f} GB", "row number, label, order: 8 bytes each"),
        ("memory per rank while training, blocks", f"{ROWS * 16 / 1e9:.0f} GB", "row number, label"),
        ("reading once per epoch, each node", f"{read:.0f} s", f"in blocks, {DISK / 1e9:.0f} GB per second assumed"),
    ]
    for n in (1, *GPUS):
        work = ROWS / (n * speed["blocks"])
        what = f"epoch of a linear head, {n} CPU rank{'s' * (n > 1)}"
        rows.append((what, f"{max(work, read):,.0f} s", f"the larger of computing ({work:,.0f} s) and reading"))
    return table(["A billion rows of 64 float16", "", "how"], rows)


def table(head: list[str], rows: Iterable[tuple[Any, ...]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)


def main() -> None:
    for name, text in (("gpus", gpu_table()), ("billion", billion_table())):
        write_between(PAGE, (MARKS[0].format(name), MARKS[1].format(name)), text)


if __name__ == "__main__":
    main()
