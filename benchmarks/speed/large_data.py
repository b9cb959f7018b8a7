"""Memory and throughput on features that stay in their file, and on a million image paths.

    python -m benchmarks.speed.large_data FOLDER train --rows 1e6 4e6    fit from the file (rows, blocks), in memory
    python -m benchmarks.speed.large_data FOLDER judge --rows 20e6       audit, predict and report of the first run
    python -m benchmarks.speed.large_data FOLDER limited --rows 20e6     row and block shuffling with a small cache
    python -m benchmarks.speed.large_data FOLDER sorted --rows 4e6       accuracy on rows sorted by class
    python -m benchmarks.speed.large_data FOLDER images --rows 1e6       seconds and memory until the first step
    python -m benchmarks.speed.large_data FOLDER page                    writes the tables and the plot of docs/scale.md

The data are N rows x 64 float16 with 10 classes, 20 % random labels, and 1000 trusted rows. Every command runs in a
process of its own with one thread. Results are kept in benchmarks/results/large_data.json. FOLDER needs 11 GB for all
of it and can be deleted afterwards. `limited` needs root and cgroups of version 1.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Collection
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common import RESULTS, made_on
from benchmarks.speed.large_data_page import write_page
from benchmarks.speed.limited_cache import measure_limited
from warpi.utils.files import write_atomically

FEATURES, CLASSES, BATCH, EPOCHS = 64, 10, 4096, 2
COMMAND = "from warpi.cli.app import main; raise SystemExit(main())"
TRAIN = """
import json, sys, time
from warpi.runs.run import fitting
seconds = [time.process_time()]
for record in fitting(sys.argv[1], quiet=True, device="cpu", threads=1, **json.loads(sys.argv[2])):
    if record is not None:
        seconds.append(time.process_time())
with open(sys.argv[1] + "/epoch_cpu.json", "w") as file:
    json.dump(seconds[-1] - seconds[-2], file)
"""
IN_MEMORY = f"import warpi.datasets.arrays as a; a.LARGE = 2**60\n{TRAIN}"
FIRST_STEP = """
import sys
from warpi.runs.run import fitting
options = dict(method="ce", net="resnet20", image_size=32, batch_size=128, epochs=1, val=0.0, test=0.05)
steps = fitting(sys.argv[2], data=sys.argv[1], device="cpu", threads=1, quiet=True, **options)
next(steps)
steps.close()
"""
FILE = RESULTS / "large_data.json"


def write(folder: Path, n: int, is_sorted: bool = False, classes: int = CLASSES) -> Path:
    """Gaussian classes, written in blocks; sorted by label on request."""
    path = folder / f"{'sorted' if is_sorted else 'rows'}{n}{f'-{classes}' if classes != CLASSES else ''}.npy"
    if path.with_name(f"{path.stem}_labels.npy").exists():
        return path
    rng = np.random.default_rng(0)
    centers = rng.normal(0, 0.5, (classes, FEATURES)).astype(np.float32)
    x = np.lib.format.open_memmap(path, "w+", np.float16, (n, FEATURES))
    true = rng.integers(0, classes, n)
    y = np.where(rng.random(n) < 0.2, rng.integers(0, classes, n), true).astype(np.uint8)
    if is_sorted:
        order = np.argsort(y, kind="stable")
        true, y = true[order], y[order]
    for start in range(0, n, 10**5):
        some = true[start : start + 10**5]
        x[start : start + len(some)] = rng.standard_normal((len(some), FEATURES), np.float32) + centers[some]
    np.save(path.with_name(f"{path.stem}_labels.npy"), y)
    checked = np.arange(1000) % classes
    trusted = rng.standard_normal((1000, FEATURES), np.float32) + centers[checked]
    np.savez(folder / f"trusted{classes}.npz", x=trusted, y=checked)
    return path


def write_images(folder: Path, n: int) -> Path:
    """A list of n image files in 1000 folders: links to 1000 small photos, since only their number matters."""
    from PIL import Image

    top = folder / f"images{n}"
    if (top / "list.csv").exists():
        return top / "list.csv"
    rng = np.random.default_rng(0)
    (top / "src").mkdir(parents=True, exist_ok=True)
    for i in range(1000):
        pixels = rng.integers(0, 255, (40, 48, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(top / "src" / f"{i}.jpg", quality=30)
        (top / "photos" / f"class_{i:04d}").mkdir(parents=True, exist_ok=True)
    lines = ["path,label"]
    for i in range(n):
        path = f"photos/class_{i % 1000:04d}/photo_{i:08d}_{i * 2654435761 % 2**32:08x}.jpg"
        os.link(top / "src" / f"{i % 1000}.jpg", top / path)
        lines.append(f"{path},class_{i % 1000:04d}")
    (top / "list.csv").write_text("\n".join(lines) + "\n")
    return top / "list.csv"


def measure(code: str, *arguments: str) -> dict[str, Any]:
    """Run a command; wall and CPU seconds, peak memory in GiB: all resident pages, and without those of files."""
    began = time.monotonic()
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    child = subprocess.Popen([sys.executable, "-c", code, *arguments], env=environment, stdout=subprocess.DEVNULL)
    anonymous = 0
    while True:
        done, status, usage = os.wait4(child.pid, os.WNOHANG)
        if done:
            child.returncode = os.waitstatus_to_exitcode(status)
            break
        with open(f"/proc/{child.pid}/status") as file:
            lines = dict(line.split(":", 1) for line in file if ":" in line)
        anonymous = max(anonymous, int(lines.get("RssAnon", "0 kB").split()[0]))
        time.sleep(0.02)
    if status:
        raise SystemExit(f"{arguments[0]} failed with status {status}")
    return {
        "wall_s": round(time.monotonic() - began, 1),
        "cpu_s": round(usage.ru_utime + usage.ru_stime, 1),
        "peak_gib": round(usage.ru_maxrss / 2**20, 2),
        "anonymous_gib": round(anonymous / 2**20, 2),
    }


def train(path: Path, out: Path, code: str, *, classes: int = CLASSES, **options: object) -> dict[str, Any]:
    """Train a linear head; seconds, CPU seconds and accuracy of the last epoch."""
    shutil.rmtree(out, ignore_errors=True)
    settings = {"data": str(path), "method": "ce", "net": "linear"}
    settings |= {
        "trusted": str(path.parent / f"trusted{classes}.npz"),
        "epochs": EPOCHS,
        "batch_size": BATCH,
        "test": 0.05,
        **options,
    }
    result = measure(code, str(out), json.dumps(settings))
    last = json.loads((out / "results.jsonl").read_text().splitlines()[-1])
    cpu = json.loads((out / "epoch_cpu.json").read_text())
    accuracy = round(last["test_acc"], 2)
    return {**result, "epoch_s": round(last["seconds"], 2), "epoch_cpu_s": round(cpu, 2), "test_acc": accuracy}


def measure_training(folder: Path, n: int, repeat: int, parts: Collection[str]) -> None:
    path = write(folder, n)
    variants = {"file": (TRAIN, "rows"), "memory": (IN_MEMORY, "rows"), "blocks": (TRAIN, "blocks")}
    for r, part in product(range(repeat), variants):
        if not parts or part in parts:
            code, shuffle = variants[part]
            keep(part, n, r, **train(path, folder / f"run{n}-{part}", code, shuffle=shuffle))


def measure_judging(folder: Path, n: int, repeat: int, parts: Collection[str]) -> None:
    """Audit, report and predict with the run that `measure_training` left."""
    run = str(folder / f"run{n}-file")
    commands = {
        "audit": ["audit", run, "--csv", str(folder / "audit.csv")],
        "report": ["report", run, "--out", str(folder / "report")],
        "predict": ["predict", run, "--data", str(write(folder, n)), "--csv", str(folder / "predicted.csv")],
    }
    for r, part in product(range(repeat), commands):
        if not parts or part in parts:
            keep(part, n, r, **measure(COMMAND, *commands[part]))


def measure_sorted(folder: Path, n: int, repeat: int, parts: Collection[str]) -> None:
    for r, classes, is_sorted, shuffle in product(range(repeat), (CLASSES, 100), (False, True), ("rows", "blocks")):
        part = f"{'sorted' if is_sorted else 'random'} {classes} {shuffle}"
        if not parts or part in parts:
            path = write(folder, n, is_sorted, classes)
            keep(part, n, r, **train(path, folder / "run-sorted", TRAIN, classes=classes, shuffle=shuffle, seed=r))


def measure_images(folder: Path, n: int, repeat: int, parts: Collection[str]) -> None:
    """From a .csv list, from the .parquet list that `warpi convert` makes of it, and this conversion."""
    listed, out = write_images(folder, n), folder / "run-images"
    fast = listed.with_suffix(".parquet")
    for r, part in product(range(repeat), ("convert images", "images", "images parquet")):
        if not parts or part in parts:
            shutil.rmtree(out, ignore_errors=True)
            if part == "convert images":
                fast.unlink(missing_ok=True)
                keep(part, n, r, **measure(COMMAND, "convert", str(listed), "--out", str(fast)))
            else:
                data = listed if part == "images" else fast
                keep(part, n, r, **measure(FIRST_STEP, str(data), str(out)))


def measure_shuffling(folder: Path, n: int, repeat: int, _: Collection[str]) -> None:
    path = write(folder, n)
    for r in range(repeat):
        for shuffle in ("rows", "blocks"):
            keep(f"limited {shuffle}", n, r, **measure_limited(path, shuffle, BATCH))


def keep(part: str, rows: int, repeat: int, **result: Any) -> None:
    """Store one result, in place of an older one of the same part and size."""
    stored = json.loads(FILE.read_text()) if FILE.exists() else {}
    entry = {**made_on("torch", "numpy"), "load": round(os.getloadavg()[0], 1), **result}
    print(part, rows, repeat, json.dumps(entry), flush=True)
    stored[f"{part} {rows} {repeat}"] = {"part": part, "rows": rows, "repeat": repeat, **entry}
    write_atomically(FILE, (json.dumps(stored, indent=1) + "\n").encode())


MEASURES = {
    "train": measure_training,
    "judge": measure_judging,
    "limited": measure_shuffling,
    "sorted": measure_sorted,
    "images": measure_images,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("what", choices=(*MEASURES, "page"))
    parser.add_argument("--rows", type=float, nargs="+", default=[1e6])
    parser.add_argument("--repeat", type=int, default=1)
    parser.add_argument("--parts", nargs="+", default=(), help="some of them, by the names in the file of results")
    given = parser.parse_args()
    if given.what == "page":
        write_page(list(json.loads(FILE.read_text()).values()))
        return
    given.folder.mkdir(parents=True, exist_ok=True)
    for n in map(int, given.rows):
        MEASURES[given.what](given.folder, n, given.repeat, given.parts)


if __name__ == "__main__":
    main()
