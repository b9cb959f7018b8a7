"""Write docs/results/many-classes.md: every method on a table with 50 classes. Digits and CIFAR-10 have ten.

python -m benchmarks.pages.many_classes                       only the page, from benchmarks/results/many_classes.json
python -m benchmarks.pages.many_classes --run ce,forward      run these methods first, or `all` (30 minutes, one core)
"""

import argparse
import json
import platform
import statistics
import tempfile
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.common import ROOT
from warpi import METHODS, fit
from warpi.utils.files import write_atomically

ROWS = ROOT / "benchmarks/results/many_classes.json"
PAGE = ROOT / "docs/results/many-classes.md"
SEEDS = (0, 1, 2)
INTRO = """# Every method on 50 classes

A synthetic table: 6,000 rows from 50 Gaussian clusters in 32 dimensions, `uniform:0.4`, 200 trusted rows, the default
settings for tables (an MLP, 30 epochs), every method with its defaults, seeds 0 to 2. Test accuracy of the last epoch.
Methods marked * use the trusted rows, those marked ° the true noise rate.

The published settings of many methods were chosen for ten classes, as in digits and CIFAR-10. A method far below `ce`
here would show that its settings do not fit more classes. This is not a ranking: it is one synthetic table with one
kind of noise. Tables like this one led to fixes of the anchors of [`forward`](../methods/forward.md), `backward`,
`t_revision` and `ptd`, of the peer term of [`cal`](../methods/cal.md), and of the epoch at which
[`gce_truncated`](../methods/gce_truncated.md) starts to prune; the numbers are those after the fixes. (`mae` learns
slowly with many classes.)

    python -m benchmarks.pages.many_classes --run all

| method | family | test accuracy |
|---|---|---|
"""


def make_table(file: Path) -> None:
    rng = np.random.default_rng(0)
    y = np.arange(6000) % 50
    x = 1.2 * rng.normal(size=(50, 32))[y] + 1.5 * rng.normal(size=(6000, 32))
    np.savez(file, x=x.astype("float32"), y=y, clean=y)


def run(names: list[str], rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    about = {"torch": torch.__version__, "python": platform.python_version(), "date": date.today().isoformat()}
    with tempfile.TemporaryDirectory() as folder:
        make_table(data := Path(folder) / "clouds.npz")
        for name in names:
            rows = [row for row in rows if row["method"] != name]
            for seed in SEEDS:
                settings = {"noise": "uniform:0.4", "meta": 200, "method": name, "seed": seed, "threads": 1}
                last = fit(Path(folder) / f"{name}-{seed}", data=str(data), device="cpu", **settings).history[-1]
                rows.append({"method": name, "seed": seed, "test_acc": last["test_acc"], **about})
            write_atomically(ROWS, (json.dumps({"rows": rows}, indent=1) + "\n").encode())
    return rows


def page(rows: list[dict[str, Any]]) -> str:
    lines = []
    for name, method in METHODS.items():
        if scores := [row["test_acc"] for row in rows if row["method"] == name]:
            mark = "*" if method.needs_meta else "°" if method.needs_noise_rate else ""
            mean = f"{statistics.mean(scores):.1f} ± {statistics.stdev(scores):.1f}"
            lines.append(f"| [`{name}`](../methods/{name}.md){mark} | {method.family} | {mean} |")
    facts = ("/".join(sorted({row[key] for row in rows})) for key in ("torch", "python", "date"))
    return INTRO + "\n".join([*lines, "", "CPU, one thread; torch {}, Python {}, {}.".format(*facts), ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", metavar="METHODS")
    given = parser.parse_args()
    rows = json.loads(ROWS.read_text())["rows"] if ROWS.exists() else []
    if given.run:
        rows = run(list(METHODS) if given.run == "all" else given.run.split(","), rows)
    write_atomically(PAGE, page(rows).encode())


if __name__ == "__main__":
    main()
