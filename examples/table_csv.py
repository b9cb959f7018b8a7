"""A table with wrong labels: fit, audit, and a corrected table.

python examples/table_csv.py

The same from a shell:
    warpi fit --data noisy.csv --label digit --trusted checked.csv --out run
    warpi audit run --csv audit.csv
"""

import csv
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from sklearn.datasets import load_digits

import warpi
from warpi.audit import audit


def write_table(path: Path, x: np.ndarray, labels: np.ndarray) -> None:
    with path.open("w", newline="") as file:
        table = csv.writer(file)
        table.writerow([f"pixel_{i}_{j}" for i in range(8) for j in range(8)] + ["digit"])
        table.writerows([*row, label] for row, label in zip(x.astype(int).tolist(), labels.tolist(), strict=True))


def correct(noisy: Path, corrected: Path, result: "warpi.audit.Audit") -> None:
    """Write the table with the suggested labels in place of those that are probably wrong."""
    with noisy.open(newline="") as file:
        head, *rows = csv.reader(file)
    for i in np.flatnonzero(result.is_label_issue):
        rows[result.row[i]][-1] = result.classes[result.suggested[i]]
    with corrected.open("w", newline="") as file:
        csv.writer(file).writerows([head, *rows])


def main(folder: Path, **settings: str) -> tuple[float, float]:
    """Write the tables, find and correct the wrong labels; return the percentage of right labels before and after."""
    x, truth = load_digits(return_X_y=True)
    rng = np.random.default_rng(0)
    given = np.where(rng.random(len(x)) < 0.4, (truth + 1) % 10, truth)  # 40 % get the label of the next digit
    checked = np.concatenate([np.flatnonzero(truth == digit)[:10] for digit in range(10)])  # checked by a person
    rest = np.setdiff1d(np.arange(len(x)), checked)
    write_table(folder / "checked.csv", x[checked], truth[checked])
    write_table(folder / "noisy.csv", x[rest], given[rest])

    data, trusted = str(folder / "noisy.csv"), str(folder / "checked.csv")
    run = warpi.fit(out=folder / "run", data=data, label="digit", trusted=trusted, seed=0, quiet=True, **settings)
    result = audit(run)
    correct(folder / "noisy.csv", folder / "corrected.csv", result)

    accuracy, low, high = (run.history[-1][name] for name in ("trusted_acc", "trusted_low", "trusted_high"))
    print(f"accuracy {accuracy:.1f} % on trusted rows, 90 % interval {low:.1f} to {high:.1f}")
    print(f"{result.is_label_issue.sum()} of {len(result)} labels are probably wrong")
    with (folder / "corrected.csv").open(newline="") as file:
        after = np.array([int(row[-1]) for row in list(csv.reader(file))[1:]])
    return 100 * float(np.mean(given[rest] == truth[rest])), 100 * float(np.mean(after == truth[rest]))


if __name__ == "__main__":
    with TemporaryDirectory() as name:
        before, after = main(Path(name))
    print(f"right labels: {before:.1f} % before, {after:.1f} % after")
