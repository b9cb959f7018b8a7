"""NoisyLabelClassifier on tf-idf features of texts, compared with scikit-learn and cleanlab on the same rows.

    python -m benchmarks.tables.sparse_texts

Writes benchmarks/results/sparse_texts.json and the tables of docs/estimator.md. Results that are already in the file
are not computed again; delete the file to start over.

There are two kinds of texts. Real ones are paragraphs from the docstrings of installed packages, read without importing
them; the class is the package or subpackage. Synthetic ones mix topics over words with Zipf frequencies, as in LDA. The
defaults were chosen with seed 0 (80 trusted, mostly pair:0.3) on `packages`, `scipy`, `two` and `lda4`; the tables use
other texts and other seeds.
"""

import ast
import json
import re
import sys
import sysconfig
import time
import warnings
from functools import cache
from itertools import product
from pathlib import Path
from statistics import mean, stdev

import numpy as np
import torch
from cleanlab.classification import CleanLearning
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.linear_model import LogisticRegression
from sklearn.naive_bayes import ComplementNB
from sklearn.svm import LinearSVC

from benchmarks.common import RESULTS, ROOT, made_on, write_between
from warpi import NoisyLabelClassifier
from warpi.utils.files import write_atomically

PACKAGES = ("numpy", "scipy", "sklearn", "torch", "matplotlib", "sympy", "pandas", "networkx")
REAL = {  # folders, and the maximum number of paragraphs from each
    "packages": (PACKAGES, 500),
    "scipy": (("scipy/stats", "scipy/signal", "scipy/sparse", "scipy/optimize"), 450),
    "two": (("numpy", "sklearn"), 1500),
    "sympy": (("sympy/core", "sympy/solvers", "sympy/polys", "sympy/physics", "sympy/combinatorics"), 500),
    "tools": (("pip", "playwright", "huggingface_hub", "mypy", "fontTools", "setuptools"), 850),
}
MADE = {  # classes, words, texts, topics, similarity of the texts of a class, shortest and longest text
    "lda4": (4, 8000, 3000, 20, 8.0, 20, 120),
    "lda2": (2, 3000, 1500, 12, 6.0, 20, 60),
    "lda8": (8, 20000, 5000, 40, 12.0, 30, 200),
}
NAMES = {*PACKAGES, "np", "scikit", "learn", "pytorch", "plt", "pd", "nx"}  # would reveal the class
TITLES = {"sympy": "Docstrings of five parts of sympy", "lda2": "Synthetic texts of two classes"}
NOISES = ("pair:0.4", "uniform:0.4")
SEEDS = range(10, 13)
TRUSTED = 80
BEFORE = {"epochs": 30, "augment": False, "settings": {"weight_decay": 5e-4}}  # the defaults of dense tables
OURS = {
    "glc": ("glc", {}),
    "glc, as dense tables": ("glc", BEFORE),
    "warpi": ("warpi", {}),
    "warpi, as dense tables": ("warpi", BEFORE),
    "elr": ("elr", {}),
    "co_teaching": ("co_teaching", {}),
    "dmi_ns": ("dmi_ns", {}),
    "ce": ("ce", {}),
    "clean_only": ("clean_only", {}),
}
LOGISTIC = "LogisticRegression"
THEIRS = {
    f"{LOGISTIC}, noisy rows": lambda: LogisticRegression(max_iter=1000),
    "LinearSVC, noisy rows": LinearSVC,
    "ComplementNB, noisy rows": ComplementNB,
    f"cleanlab's CleanLearning({LOGISTIC}), noisy rows": lambda: CleanLearning(LogisticRegression(max_iter=1000)),
}
ENTRIES = [*OURS, *THEIRS, f"{LOGISTIC}, trusted rows", f"{LOGISTIC}, true labels"]
OUT = RESULTS / "sparse_texts.json"
PAGE = ROOT / "docs" / "estimator.md"
MARKS = "<!-- by benchmarks/tables/sparse_texts.py -->\n", "<!-- until here: texts -->\n"


def paragraphs(folder: str) -> list[str]:
    """Distinct paragraphs of 20 to 200 words in the docstrings below a folder of the installed packages."""
    texts = set()
    root = Path(sysconfig.get_paths()["purelib"])
    for file in sorted((root / folder).rglob("*.py")):
        if "test" in str(file.relative_to(root)):
            continue
        try:
            tree = ast.parse(file.read_bytes())
        except (SyntaxError, ValueError):  # templates
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                for part in re.split(r"\n\s*\n", ast.get_docstring(node) or ""):
                    words = re.findall(r"[a-z]{2,}", part.lower())
                    if ">>>" not in part and 20 <= len(words) <= 200:
                        texts.add(" ".join(word for word in words if word not in NAMES))
    return sorted(texts)


@cache
def docstrings(name: str) -> tuple[list[str], np.ndarray]:
    rng = np.random.default_rng(0)
    texts: list[str] = []
    labels: list[int] = []
    for k, folder in enumerate(REAL[name][0]):
        some = paragraphs(folder)
        chosen = rng.permutation(len(some))[: REAL[name][1]]
        texts += [some[i] for i in chosen]
        labels += [k] * len(chosen)
    return texts, np.array(labels)


def synthetic(name: str, seed: int) -> tuple[list[str], np.ndarray]:
    n_classes, n_words, n, n_topics, similarity, shortest, longest = MADE[name]
    rng = np.random.default_rng(1000 + seed)
    zipf = 1 / np.arange(1, n_words + 1)
    zipf /= zipf.sum()
    topics = rng.gamma(np.maximum(zipf * n_words * 0.02, 1e-4), size=(n_topics, n_words))
    topics = 0.5 * zipf + 0.5 * topics / topics.sum(1, keepdims=True)
    mixture = rng.dirichlet(np.full(n_topics, 0.1), n_classes)
    labels, texts = np.arange(n) % n_classes, []
    for k in labels:
        words = rng.dirichlet(similarity * mixture[k] + 0.02) @ topics
        length = int(np.exp(rng.uniform(np.log(shortest), np.log(longest))))
        texts.append(" ".join(f"w{word}" for word in rng.choice(n_words, length, p=words)))
    return texts, labels


def rows_of(name: str, noise: str, seed: int) -> tuple:
    """tf-idf and labels: noisy, trusted and test rows (a quarter), and the true labels of the noisy ones."""
    texts, y = synthetic(name, seed) if name in MADE else docstrings(name)
    rng = np.random.default_rng(seed)
    n_classes = int(y.max()) + 1
    order = rng.permutation(len(y))
    test, rest = order[: len(y) // 4], order[len(y) // 4 :]
    trusted = np.concatenate([rest[y[rest] == k][: TRUSTED // n_classes] for k in range(n_classes)])
    train = rest[~np.isin(rest, trusted)]
    kind, _, rate = noise.partition(":")
    other = (y[train] + 1) % n_classes if kind == "pair" else rng.integers(n_classes, size=len(train))
    given = np.where(rng.random(len(train)) < float(rate), other, y[train])
    words = TfidfVectorizer().fit([texts[i] for i in train])
    x = [words.transform([texts[i] for i in part]) for part in (train, trusted, test)]
    return (x[0], given), (x[1], y[trusted]), (x[2], y[test]), y[train]


def accuracy(entry: str, seed: int, noise: str, data: tuple) -> float:
    (x, given), trusted, test, true = data
    if entry in OURS:
        method, params = OURS[entry]
        rate = float(noise.partition(":")[2]) if method == "co_teaching" else None
        model = NoisyLabelClassifier(method, noise_rate=rate, random_state=seed, **params).fit(x, given, *trusted)
    elif entry in THEIRS:
        model = THEIRS[entry]().fit(x, given)
    else:
        model = LogisticRegression(max_iter=1000).fit(*(trusted if "trusted" in entry else (x, true)))
    return 100 * float(np.mean(model.predict(test[0]) == test[1]))


def table(rows: list[dict]) -> str:
    lines = ["| | " + " | ".join(NOISES) + " | CPU s |", "|:---|" + "---:|" * (len(NOISES) + 1)]
    for entry in ENTRIES:
        some = [r for r in rows if r["entry"] == entry]
        cells = [[r["accuracy"] for r in some if r["noise"] == noise] for noise in NOISES]
        shown = " | ".join(f"{mean(values):.1f} ± {stdev(values):.1f}" for values in cells)
        method, comma, rest = entry.partition(",")
        lines.append(f"| `{method}`{comma}{rest} | {shown} | {mean(r['cpu_seconds'] for r in some):.1f} |")
    return "\n".join(lines)


def main() -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    rows = json.loads(OUT.read_text())["rows"] if OUT.exists() else []
    about = made_on("warpi", "torch", "scikit-learn", "cleanlab", "sympy") | {"threads_a_fit": 1, "trusted": TRUSTED}
    for data, seed, noise in product(sys.argv[1:] or TITLES, SEEDS, NOISES):
        done = {r["entry"] for r in rows if (r["data"], r["noise"], r["seed"]) == (data, noise, seed)}
        if done.issuperset(ENTRIES):
            continue
        made = rows_of(data, noise, seed)
        for entry in ENTRIES:
            if entry in done:
                continue
            began = time.process_time()
            row = {"data": data, "noise": noise, "seed": seed, "entry": entry, "shape": list(made[0][0].shape)}
            row["accuracy"] = accuracy(entry, seed, noise, made)
            rows.append({**row, "cpu_seconds": round(time.process_time() - began, 2)})
        write_atomically(OUT, (json.dumps({"about": about, "rows": rows}, indent=1) + "\n").encode())
    write_page(rows, about)


def write_page(rows: list[dict], about: dict) -> None:
    """Write the complete tables between the marks of the page."""
    parts = []
    for data, title in TITLES.items():
        some = [r for r in rows if r["data"] == data]
        if len(some) == len(NOISES) * len(SEEDS) * len(ENTRIES):
            n, words = some[0]["shape"]
            parts.append(
                f"{title} ({n:,} noisy rows, {words:,} words), seeds {SEEDS[0]} to {SEEDS[-1]}:\n\n{table(some)}\n"
            )
    versions = ", ".join(f"{name} {about[name]}" for name in ("python", "torch", "scikit-learn", "cleanlab", "sympy"))
    parts.append(
        f"{about['date']}, {about['machine']}, one thread per fit, machine shared with other jobs; {versions}.\n"
    )
    write_between(PAGE, MARKS, "\n".join(parts))


if __name__ == "__main__":
    main()
