"""A scorer for grid search and cross-validation that looks only at trusted rows."""

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import ArrayLike
from sklearn import get_config
from sklearn.metrics import accuracy_score, make_scorer

from warpi.errors import UserError
from warpi.estimator.inputs import check_marks


def trusted_scorer(
    metric: Callable[..., float] = accuracy_score, response_method: str = "predict", **options: Any
) -> Any:
    """A scorer for `GridSearchCV` or `cross_val_score` that applies a metric to the trusted rows of a test fold.

    The other rows of the fold have labels that may be wrong, so they are omitted. Pass `trusted`, one boolean per row,
    to the search. It needs metadata routing, which sends `trusted` to `fit` and to the scorer:

        with sklearn.config_context(enable_metadata_routing=True):
            model = NoisyLabelClassifier().set_fit_request(trusted=True)
            GridSearchCV(model, grid, scoring=trusted_scorer(), cv=folds).fit(X, y, trusted=trusted)

    `metric`, `response_method` and `options` are those of `sklearn.metrics.make_scorer`.
    """
    if not get_config()["enable_metadata_routing"]:
        raise UserError(
            "trusted_scorer needs metadata routing, which is off; call sklearn.set_config(enable_metadata_routing=True)"
        )
    scorer = make_scorer(_score_trusted, response_method=response_method, metric=metric, **options)
    return scorer.set_score_request(trusted=True)


def _score_trusted(
    y: ArrayLike,
    predicted: ArrayLike,
    *,
    metric: Callable[..., float],
    trusted: ArrayLike | None = None,
    **options: Any,
) -> float:
    """The metric on the rows that `trusted` marks."""
    if trusted is None:
        raise UserError("trusted_scorer needs the marks of the trusted rows; pass trusted=MASK to the search")
    y = np.asarray(y)
    marks = check_marks(trusted, len(y)).numpy()
    return float(metric(y[marks], np.asarray(predicted)[marks], **options))
