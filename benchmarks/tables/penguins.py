"""The commands of the README: penguins with missing cells, 35 % wrong labels and 15 trusted rows.

A wrong label is always the next species in the alphabet, as if one species were often taken for another.

The table ships in the package palmerpenguins (`benchmarks.never_loses.tables` downloads it). 100 of its 344 rows are
kept for testing, and `warpi fit` never sees them. The same rows are given to models that a user would try instead, with
the missing cells filled by the median or the most frequent value.

    python -m benchmarks.tables.penguins --folder DIR --out benchmarks/results/penguins.json
"""

import argparse
import io
import json
import os
import platform
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import sklearn
from sklearn.compose import make_column_transformer
from sklearn.ensemble import RandomForestClassifier
from sklearn.impute import SimpleImputer
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import OneHotEncoder, StandardScaler

from benchmarks.never_loses.tables import read_member
from warpi import __version__
from warpi.utils.files import write_atomically

RATE, TRUSTED, TEST = 0.35, 15, 100
NUMBERS = ["bill_length_mm", "bill_depth_mm", "flipper_length_mm", "body_mass_g", "year"]
WORDS = ["island", "sex"]


def make_files(folder: Path, seed: int) -> pd.DataFrame:
    """Write penguins.csv (some labels wrong), checked.csv (trusted) and new.csv (to test); return the first."""
    frame = pd.read_csv(io.BytesIO(read_member("palmerpenguins", "palmerpenguins/data/penguins.csv")))
    rng = np.random.default_rng(seed)
    order = rng.permutation(len(frame))
    test, trusted, noisy = np.split(order, [TEST, TEST + TRUSTED])
    frame.iloc[test].to_csv(folder / "new.csv", index=False)
    frame.iloc[trusted].to_csv(folder / "checked.csv", index=False)
    wrong = frame.iloc[noisy].copy()
    names = sorted(frame["species"].unique())
    flipped = rng.random(len(noisy)) < RATE
    others = [names[(names.index(name) + 1) % len(names)] for name in wrong["species"]]
    wrong["species"] = np.where(flipped, others, wrong["species"])
    wrong.to_csv(folder / "penguins.csv", index=False)
    return wrong


def run_warpi(folder: Path, seed: int) -> str:
    """Run the commands of the README and return what `fit` prints."""
    out = folder / f"run{seed}"
    warpi = [sys.executable, "-m", "warpi"]
    fit = ["fit", "--data", "penguins.csv", "--label", "species", "--trusted", "checked.csv", "--seed", str(seed)]
    done = subprocess.run([*warpi, *fit, "--out", str(out)], cwd=folder, capture_output=True, text=True, check=True)
    predict = ["predict", str(out), "--data", "new.csv", "--csv", "predicted.csv"]
    subprocess.run([*warpi, *predict], cwd=folder, capture_output=True, check=True)
    return done.stdout


def measure(folder: Path, seed: int) -> dict[str, float]:
    """Test accuracy of warpi and of plain models, in percent."""
    wrong = make_files(folder, seed)
    new = pd.read_csv(folder / "new.csv")
    text = run_warpi(folder, seed)
    if seed == 0:
        print(text)
    predicted = pd.read_csv(folder / "predicted.csv")["predicted"]
    result = {"auto": 100 * float((predicted == new["species"]).mean())}
    trusted = pd.read_csv(folder / "checked.csv")
    for name, model in (
        ("logistic regression", LogisticRegression(max_iter=1000)),
        ("random forest", RandomForestClassifier(random_state=seed)),
    ):
        for rows, train in (("all rows", pd.concat([wrong, trusted])), ("trusted rows alone", trusted)):
            prepare = make_column_transformer(
                (make_pipeline(SimpleImputer(strategy="median"), StandardScaler()), NUMBERS),
                (make_pipeline(SimpleImputer(strategy="most_frequent"), OneHotEncoder(handle_unknown="ignore")), WORDS),
            )
            fitted = make_pipeline(prepare, model).fit(train, train["species"])
            result[f"{name}, {rows}"] = 100 * float((fitted.predict(new) == new["species"]).mean())
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True, help="folder for the tables and runs")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seeds", type=int, default=5)
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    results = [measure(args.folder, seed) for seed in range(args.seeds)]
    values = {name: [r[name] for r in results] for name in results[0]}
    mean = {name: (float(np.mean(v)), float(np.std(v))) for name, v in values.items()}
    for name, (center, spread) in mean.items():
        print(f"{name}: {center:.1f} ± {spread:.1f}")
    versions = {"warpi": __version__, "scikit-learn": sklearn.__version__, "python": platform.python_version()}
    about = {"seeds": args.seeds, "cores": os.cpu_count(), "versions": versions}
    write_atomically(args.out, (json.dumps({**about, "accuracy": mean}, indent=1) + "\n").encode())


if __name__ == "__main__":
    main()
