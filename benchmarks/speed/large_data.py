"""Memory and throughput of training, audit and report on features that stay in their file.

    python benchmarks/speed/large_data.py FOLDER --rows 1e6 4e6 16e6

Writes N rows x 64 float16 with 10 classes, 20 % random labels and 1000 trusted rows. Trains a linear head for two
epochs in a process of its own, from the file and in memory; then audits and reports the first run.
Prints one line of JSON per command: wall and CPU seconds, peak resident memory, its anonymous part, seconds per epoch.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

FEATURES, CLASSES, BATCH, EPOCHS = 64, 10, 4096, 2
COMMAND = "from warpi.cli.app import main; raise SystemExit(main())"
IN_MEMORY = f"import warpi.datasets.arrays as a; a.LARGE = 2**60; {COMMAND}"


def write(folder: Path, n: int) -> Path:
    """Gaussian classes, written in blocks."""
    path = folder / f"rows{n}.npy"
    if path.exists():
        return path
    rng = np.random.default_rng(0)
    centers = rng.normal(0, 0.5, (CLASSES, FEATURES)).astype(np.float32)
    x = np.lib.format.open_memmap(path, "w+", np.float16, (n, FEATURES))
    y = np.empty(n, np.uint8)
    for start in range(0, n, 10**5):
        size = min(10**5, n - start)
        true = rng.integers(0, CLASSES, size)
        x[start : start + size] = rng.standard_normal((size, FEATURES), np.float32) + centers[true]
        wrong = rng.random(size) < 0.2
        y[start : start + size] = np.where(wrong, rng.integers(0, CLASSES, size), true)
    np.save(folder / f"rows{n}_labels.npy", y)
    true = np.arange(1000) % CLASSES
    trusted = rng.standard_normal((1000, FEATURES), np.float32) + centers[true]
    np.savez(folder / "trusted.npz", x=trusted, y=true)
    return path


def measure(code: str, arguments: list[str]) -> dict[str, Any]:
    """Run a command of warpi; peak memory in GiB, seconds."""
    began = time.monotonic()
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    child = subprocess.Popen([sys.executable, "-c", code, *arguments], env=environment, stdout=subprocess.DEVNULL)
    anonymous = 0
    while True:
        done, status, usage = os.wait4(child.pid, os.WNOHANG)
        if done:
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


def train(path: Path, out: Path, code: str, method: str, shuffle: str) -> dict[str, Any]:
    """Train a linear head; seconds of the last epoch."""
    flags = f"--method {method} --net linear --epochs {EPOCHS} --batch-size {BATCH} --test 0.05 --threads 1 --quiet"
    files = ["--data", str(path), "--trusted", str(path.parent / "trusted.npz"), "--out", str(out)]
    result = measure(code, ["fit", *files, "--shuffle", shuffle, "--device", "cpu", *flags.split()])
    records = [json.loads(line) for line in (out / "results.jsonl").read_text().splitlines()]
    return {**result, "epoch_s": round(records[-1]["seconds"], 2), "test_acc": round(records[-1]["test_acc"], 2)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rows", type=float, nargs="+", default=[1e6])
    parser.add_argument("--method", default="ce")
    parser.add_argument("--parts", nargs="+", default=["file", "blocks", "memory", "audit", "report"])
    given = parser.parse_args()
    given.folder.mkdir(parents=True, exist_ok=True)
    for n in map(int, given.rows):
        path = write(given.folder, n)
        for part in given.parts:
            run = given.folder / f"run{n}-file"
            out = given.folder / f"run{n}-{part}"
            if part in ("audit", "report"):
                arguments = {"audit": ["audit", str(run)], "report": ["report", str(run), "--out", str(out)]}[part]
                result = measure(COMMAND, arguments)
            else:
                code = IN_MEMORY if part == "memory" else COMMAND
                result = train(path, out, code, given.method, "blocks" if part == "blocks" else "rows")
            print(json.dumps({"rows": n, "part": part, "load": os.getloadavg()[0], **result}), flush=True)


if __name__ == "__main__":
    main()
