"""Turns fitted scikit-learn models into torch modules."""

from __future__ import annotations

from typing import Any

import numpy as np
from sklearn.ensemble import ExtraTreesClassifier, HistGradientBoostingClassifier, RandomForestClassifier
from sklearn.linear_model import LogisticRegression
from sklearn.tree import DecisionTreeClassifier
from torch import nn

from warpi.auto.learners.forest import Nodes, join_trees, trees_to_module
from warpi.auto.learners.modules import Linear, TreeSum, Wrapped
from warpi.auto.rows import Floats

UNUSED = -1e4  # the logit of a class that a model has not seen


def constant_module(p: Floats, n_columns: int) -> Linear:
    """A module that predicts `p` for every row."""
    shape = (n_columns, len(p))
    return Linear(np.zeros(n_columns), np.ones(n_columns), np.zeros(shape), np.log(np.maximum(p, 1e-12)), limit=6.0)


def estimators_to_module(estimators: list[Any], n_classes: int) -> nn.Module:
    """A module with the same predictions. An estimator without a conversion is wrapped and cannot be saved."""
    if len(estimators) > 1:
        return Wrapped(MeanOf(estimators), n_classes)
    estimator = estimators[0]
    if type(estimator) in (RandomForestClassifier, ExtraTreesClassifier) and estimator.n_outputs_ == 1:
        return forest_to_module([tree.tree_ for tree in estimator.estimators_], estimator.classes_, n_classes)
    if type(estimator) is DecisionTreeClassifier:
        return forest_to_module([estimator.tree_], estimator.classes_, n_classes)
    if type(estimator) is HistGradientBoostingClassifier and estimator.is_categorical_ is None:
        return boosting_to_module(estimator, n_classes)
    if type(estimator) is LogisticRegression:
        return logistic_to_module(estimator, n_classes)
    return Wrapped(estimator, n_classes)


def forest_to_module(trees: list[Any], classes: Any, n_classes: int) -> TreeSum:
    module = trees_to_module(trees, classification=True)
    value = module.value.new_zeros((len(module.value), n_classes))
    value[:, np.asarray(classes, dtype=np.int64)] = module.value
    module.value = value
    module.baseline = value.new_zeros(n_classes)
    return module


def logistic_to_module(estimator: LogisticRegression, n_classes: int) -> nn.Module:
    coefficients = np.zeros((estimator.coef_.shape[1], n_classes))
    intercept = np.full(n_classes, UNUSED)
    classes = np.asarray(estimator.classes_, dtype=np.int64)
    intercept[classes] = 0
    if len(classes) == 2:
        coefficients[:, classes[1]] = estimator.coef_[0]
        intercept[classes[1]] = estimator.intercept_[0]
    else:
        coefficients[:, classes] = estimator.coef_.T
        intercept[classes] = estimator.intercept_
    n_columns = len(coefficients)
    return Linear(np.zeros(n_columns), np.ones(n_columns), coefficients, intercept, limit=np.inf)


def boosting_to_module(estimator: HistGradientBoostingClassifier, n_classes: int) -> TreeSum:
    """The trees of histogram boosting. Each tree adds to the logit of one class."""
    classes = np.asarray(estimator.classes_, dtype=np.int64)
    start = np.asarray(estimator._baseline_prediction).ravel()
    baseline = np.full(n_classes, UNUSED)
    baseline[classes] = 0
    targets = classes[1:] if len(classes) == 2 else classes
    baseline[targets] = start
    trees, depth = [], 0
    for iteration in estimator._predictors:
        for target, tree in zip(targets, iteration, strict=True):
            n = tree.nodes
            leaf = n["is_leaf"].astype(bool)
            logits = np.zeros((len(n), n_classes))
            logits[:, target] = np.where(leaf, n["value"], 0)
            gap_right = ~n["missing_go_to_left"].astype(bool)
            trees.append(Nodes(leaf, n["feature_idx"], n["num_threshold"], n["left"], n["right"], logits, gap_right))
            depth = max(depth, int(n["depth"].max()))
    return join_trees(trees, depth, baseline)


class MeanOf:
    """The mean prediction of several classifiers."""

    def __init__(self, estimators: list[Any]) -> None:
        self.estimators = estimators
        self.classes_ = np.unique(np.concatenate([estimator.classes_ for estimator in estimators]))

    def predict_proba(self, x: Any) -> Floats:
        total = np.zeros((x.shape[0], len(self.classes_)))
        for estimator in self.estimators:
            columns = np.searchsorted(self.classes_, estimator.classes_)
            if hasattr(estimator, "predict_proba"):
                total[:, columns] += estimator.predict_proba(x)
            else:
                total[np.arange(len(total)), np.searchsorted(self.classes_, estimator.predict(x))] += 1
        return total / len(self.estimators)
