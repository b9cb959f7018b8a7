"""Time and memory to read a large table with missing cells and categories, and to train `auto` on it.

    python benchmarks/tables/read_large.py [--rows 100000] [--fit]

Writes a table of 50 columns (30 numeric, 15 of words, 5 of dates, text numbers and ids), with 5 % of the cells missing
and 25 % wrong labels, as .csv and .parquet, and reads each in a process of its own.
"""

import argparse
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import pandas as pd


def make_table(n: int, seed: int = 0) -> pd.DataFrame:
    """A table whose class depends on some of the numbers and words."""
    rng = np.random.default_rng(seed)
    numbers = rng.normal(size=(n, 30)).round(4)
    words = {f"w{j}": rng.integers(0, 3 + 12 * j, size=n) for j in range(15)}
    score = numbers[:, :5].sum(1) + (words["w1"] % 3) - (words["w2"] % 2)
    label = np.digitize(score, [-1.0, 1.5])
    wrong = rng.random(n) < 0.25
    given = np.where(wrong, (label + rng.integers(1, 3, size=n)) % 3, label)
    columns: dict[str, object] = {f"x{j}": numbers[:, j] for j in range(30)}
    columns |= {name: np.char.add("value ", values.astype(str)) for name, values in words.items()}
    columns["id"] = np.arange(n)
    columns["price"] = [f"${value:,}" for value in rng.integers(1, 10**6, size=n)]
    columns["when"] = pd.Timestamp("2020-01-01") + pd.to_timedelta(rng.integers(0, 1500, size=n), unit="D")
    columns["city"] = np.char.add("city ", (rng.pareto(1.0, size=n) * 50).astype(int).astype(str))
    columns["share"] = [f"{value:.1f} %" for value in rng.random(n) * 100]
    frame = pd.DataFrame(columns)
    frame = frame.mask(pd.DataFrame(rng.random(frame.shape) < 0.05, columns=frame.columns))
    frame["id"] = np.arange(n)
    return frame.assign(label=[f"class {k}" for k in given], truth=label)


def measure(path: Path, command: str) -> None:
    """Run a command in a process of its own, and print its time and its largest memory."""
    start = time.perf_counter()
    subprocess.run([sys.executable, "-c", command], check=True)
    seconds = time.perf_counter() - start
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 2**20
    size = path.stat().st_size / 2**20
    print(f"{path.suffix}: {seconds:.1f} s with imports, largest memory so far {peak:.2f} GiB, file {size:.0f} MiB")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--fit", action="store_true", help="train `auto` with 300 trusted rows as well")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        frame = make_table(given.rows)
        trusted = frame.iloc[:300].assign(label=lambda rows: [f"class {k}" for k in rows["truth"]])
        for frames, name in ((frame, "large"), (trusted, "trusted")):
            kept = frames.drop(columns="truth")
            kept.to_csv(f"{folder}/{name}.csv", index=False)
            kept.to_parquet(f"{folder}/{name}.parquet")
        for suffix in (".parquet", ".csv"):
            path = Path(folder, f"large{suffix}")
            read = "from warpi.datasets.load import read_dataset; print(read_dataset({!r}).examples.shape)"
            measure(path, read.format(str(path)))
        if given.fit:
            path = Path(folder, "large.csv")
            options = f"data={str(path)!r}, trusted={folder + '/trusted.csv'!r}"
            measure(path, f"import warpi; warpi.fit({folder + '/run'!r}, {options})")


if __name__ == "__main__":
    main()
