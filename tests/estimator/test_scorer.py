"""Grid search and cross-validation on trusted rows, settings as parameters, and the hint for a Pipeline."""

from typing import Any

import numpy as np
import pytest
import sklearn
from sklearn.base import clone
from sklearn.datasets import make_blobs
from sklearn.decomposition import PCA
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.metrics import roc_auc_score
from sklearn.model_selection import GridSearchCV, StratifiedKFold, cross_val_score
from sklearn.pipeline import make_pipeline

from warpi.errors import UserError
from warpi.estimator import NoisyLabelClassifier, trusted_scorer

X, TRUE = make_blobs(120, centers=2, n_features=3, random_state=0, cluster_std=0.5)
TRUSTED = np.arange(120) % 4 == 0
Y = np.where(TRUSTED, TRUE, 1 - TRUE)  # every other label is wrong
FOLDS = list(StratifiedKFold(2, shuffle=True, random_state=0).split(X, TRUE + 2 * TRUSTED))


def fast(method: str = "ce", **params: Any) -> NoisyLabelClassifier:
    return NoisyLabelClassifier(method, **{"epochs": 2, "batch_size": 20, "random_state": 0, **params})


def test_the_scorer_looks_only_at_trusted_rows() -> None:
    with sklearn.config_context(enable_metadata_routing=True):
        model = fast("clean_only", epochs=20, lr=0.1).set_fit_request(trusted=True)
        scores = cross_val_score(model, X, Y, scoring=trusted_scorer(), cv=FOLDS, params={"trusted": TRUSTED})
        areas = cross_val_score(
            model, X, Y, scoring=trusted_scorer(_area, "predict_proba"), cv=FOLDS, params={"trusted": TRUSTED}
        )
        usual = cross_val_score(model, X, Y, cv=FOLDS, params={"trusted": TRUSTED})
    assert scores.tolist() == [1, 1]
    assert areas.tolist() == [1, 1]
    assert (usual < 0.5).all()


def _area(y: Any, p: Any) -> float:
    return float(roc_auc_score(y, p[:, 1] if p.ndim == 2 else p))


def test_grid_search_chooses_by_trusted_rows_and_sets_single_settings() -> None:
    grid = {"method": ["clean_only", "ce"], "settings__momentum": [0.5]}
    with sklearn.config_context(enable_metadata_routing=True):
        model = fast(epochs=20, lr=0.1, settings={"weight_decay": 0.0}).set_fit_request(trusted=True)
        search = GridSearchCV(model, grid, scoring=trusted_scorer(), cv=FOLDS).fit(X, Y, trusted=TRUSTED)
    assert search.best_params_ == {"method": "clean_only", "settings__momentum": 0.5}
    assert search.best_estimator_.settings == {"weight_decay": 0.0, "momentum": 0.5}


def test_a_fold_without_trusted_rows_and_missing_marks_are_errors() -> None:
    with pytest.raises(UserError, match="needs metadata routing, which is off"):
        trusted_scorer()
    model = fast().fit(X, Y)
    with sklearn.config_context(enable_metadata_routing=True):
        scorer = trusted_scorer()
        with pytest.raises(UserError, match="no trusted row"):
            scorer(model, X, Y, trusted=np.zeros(120, bool))
        with pytest.raises(UserError, match="pass trusted=MASK"):
            scorer(model, X, Y)


def test_settings_are_parameters() -> None:
    model = fast("warpi").set_params(settings__meta_lr=0.1)
    assert model.settings == {"meta_lr": 0.1}
    assert model.get_params()["settings__meta_lr"] == 0.1
    before = clone(model)
    model.set_params(settings={"samples": 2}, settings__meta_lr=0.2, epochs=3)
    assert (model.settings, model.epochs) == ({"samples": 2, "meta_lr": 0.2}, 3)
    assert before.settings == {"meta_lr": 0.1}
    assert make_pipeline(PCA(), fast()).set_params(noisylabelclassifier__settings__momentum=0.3)[1].settings == {
        "momentum": 0.3
    }
    with pytest.raises(UserError, match="unknown setting 'meta_lrr'"):
        fast("warpi").set_params(settings__meta_lrr=1).fit(X, Y, trusted=TRUSTED)


@pytest.mark.parametrize(
    ("step", "x"), [(PCA(2), X), (TfidfVectorizer(), [f"word{k} of row{i % 9}" for i, k in enumerate(TRUE)])]
)
def test_raw_trusted_examples_in_a_pipeline_get_a_hint(step: Any, x: Any) -> None:
    model = make_pipeline(step, fast("glc"))
    fit_params = {"noisylabelclassifier__X_trusted": x[:20], "noisylabelclassifier__y_trusted": TRUE[:20]}
    with pytest.raises(UserError, match=r"X_trusted does not match X: .*transform_input=\['X_trusted'\]"):
        model.fit(x, Y, **fit_params)
