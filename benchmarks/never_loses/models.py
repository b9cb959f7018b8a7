"""The baselines, and `auto` through its public interface. Every model predicts the same test rows."""

import time
from dataclasses import dataclass
from typing import Any

import numpy as np
from cleanlab.classification import CleanLearning
from scipy.sparse import csr_array, issparse, vstack
from sklearn.base import BaseEstimator
from sklearn.decomposition import TruncatedSVD
from sklearn.ensemble import HistGradientBoostingClassifier, RandomForestClassifier
from sklearn.linear_model import LogisticRegression
from sklearn.neighbors import KNeighborsClassifier
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from benchmarks.never_loses.noise import Problem
from benchmarks.never_loses.tables import Features
from warpi import NoisyLabelClassifier


@dataclass(frozen=True)
class Fit:
    accuracy: float  # percent of the test rows
    seconds: float  # CPU time


def stack_rows(first: Features, second: Features) -> Features:
    return csr_array(vstack([first, second])) if issparse(first) else np.vstack([first, second])


def make_model(kind: str, problem: Problem, n_rows: int, seed: int) -> BaseEstimator:
    """A scikit-learn classifier with its defaults, except where the number of classes or rows requires a choice."""
    sparse = issparse(problem.x)
    if kind == "forest":
        return RandomForestClassifier(100, random_state=seed)
    if kind == "boosting":  # few iterations with many classes: each iteration fits one tree per class
        iterations = 100 if problem.n_classes <= 4 else 50
        model = HistGradientBoostingClassifier(max_iter=iterations, early_stopping=False, random_state=seed)
        return make_pipeline(TruncatedSVD(min(50, n_rows - 1), random_state=seed), model) if sparse else model
    if kind == "knn":
        model = KNeighborsClassifier(min(15 if n_rows > 200 else 5, n_rows))
    else:
        model = LogisticRegression(max_iter=300)
    return model if sparse else make_pipeline(StandardScaler(), model)


def fit_baseline(name: str, problem: Problem, seed: int) -> Fit:
    x, y = problem.x_trusted, problem.y_trusted
    kind = name.split(",")[0]
    if not name.endswith("trusted rows"):
        x, y = stack_rows(problem.x, x), np.concatenate([problem.given, y])
    began = time.process_time()
    if name.startswith("cleanlab"):
        inner = make_model(name[len("cleanlab (") : -1], problem, len(y), seed)
        model = CleanLearning(inner, seed=seed, cv_n_folds=5, find_label_issues_kwargs={"n_jobs": 1})
        model.fit(x, y)
    elif name.endswith("x10"):
        weight = np.where(np.arange(len(y)) < len(problem.given), 1.0, 10.0)
        model = make_model(kind, problem, len(y), seed).fit(x, y, sample_weight=weight)
    else:
        model = make_model(kind, problem, len(y), seed).fit(x, y)
    accuracy = 100 * float(np.mean(model.predict(problem.x_test) == problem.y_test))
    return Fit(accuracy, time.process_time() - began)


def fit_auto(problem: Problem, seed: int) -> dict[str, Any]:
    """Accuracy of `auto`, and the two figures that it reports with an interval: the accuracy and the noise rate."""
    began = time.process_time()
    model = NoisyLabelClassifier(random_state=seed)
    trusted = (problem.x_trusted, problem.y_trusted)
    model.fit(problem.x, problem.given, *trusted, given_trusted=problem.given_trusted)
    accuracy = 100 * float(np.mean(model.predict(problem.x_test) == problem.y_test))
    seconds = time.process_time() - began
    score, record = model.trusted_score_, model.history_[-1]
    return {
        "accuracy": accuracy,
        "seconds": seconds,
        "score": [100 * float(value) for value in (score, score.low, score.high)],
        "noise_rate": [record[name] / 100 for name in ("noise_estimate", "noise_low", "noise_high")],
        "used": {line["candidate"]: round(line["weight"], 2) for line in model.choice_ if line["weight"]},
    }
