"""Time and memory to read a large table with missing cells and categories, and optionally to train `auto` on it.

    python -m benchmarks.tables.read_large [--rows 100000] [--fit]

Makes a table of 50 feature columns: 30 of numbers, 16 of words, and an id, a date and two of numbers with signs. Of the
cells 5 % are missing, and 25 % of the labels are wrong. Each command runs in a process of its own. Writes the table of
docs/data.md.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import pandas as pd

from benchmarks.common import ROOT, made_on, write_between

PAGE = ROOT / "docs" / "data.md"
MARKS = "<!-- by benchmarks/tables/read_large.py -->\n", "<!-- until here: large tables -->\n"
READ = "from warpi.datasets.load import read_dataset; read_dataset({!r})"


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


def measure(what: str, command: str) -> str:
    """Run a command in a process of its own; return a line of the table."""
    start = time.perf_counter()
    process = subprocess.Popen([sys.executable, "-c", command], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    seconds = time.perf_counter() - start
    if status:
        raise RuntimeError(f"{what} failed")
    cpu = usage.ru_utime + usage.ru_stime
    return f"| {what} | {seconds:.0f} | {cpu:.0f} | {usage.ru_maxrss / 2**20:.2f} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--fit", action="store_true", help="train `auto` with 300 trusted rows as well (minutes)")
    options = parser.parse_args()
    n = options.rows
    with tempfile.TemporaryDirectory() as folder:
        frame = make_table(n)
        trusted = frame.iloc[:300].assign(label=lambda rows: [f"class {k}" for k in rows["truth"]])
        for part, name in ((frame, "large"), (trusted, "trusted")):
            part.drop(columns="truth").to_csv(f"{folder}/{name}.csv", index=False)
        frame.drop(columns="truth").to_parquet(f"{folder}/large.parquet")
        size = Path(folder, "large.csv").stat().st_size / 2**20
        fit = f"import warpi; warpi.fit({folder + '/run'!r}, data={folder + '/large.csv'!r}, "
        lines = [
            measure("start Python, import warpi and torch", "import warpi.datasets.load"),
            measure("the same, and read the `.parquet`", READ.format(f"{folder}/large.parquet")),
            measure(f"the same, and read the `.csv` ({size:.0f} MiB)", READ.format(f"{folder}/large.csv")),
        ]
        if options.fit:
            lines.append(
                measure("`warpi.fit` of `auto`, 300 trusted rows", f"{fit}trusted={folder + '/trusted.csv'!r})")
            )
    head = f"| {n:,} rows, 50 columns | seconds | CPU seconds | largest memory, GiB |\n|:---|---:|---:|---:|\n"
    made = ", ".join(f"{name} {value}" for name, value in made_on("torch", "scikit-learn", "pyarrow").items())
    note = f"One thread (OMP_NUM_THREADS=1), machine shared with other jobs, seed 0 for the table; {made}."
    write_between(PAGE, MARKS, head + "\n".join(lines) + f"\n\n{note}\n")


if __name__ == "__main__":
    main()
