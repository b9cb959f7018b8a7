"""Choose between methods with scikit-learn's grid search.

python examples/sklearn_grid_search.py
"""

import numpy as np
from sklearn.datasets import load_digits
from sklearn.model_selection import GridSearchCV, StratifiedKFold, train_test_split

from warpi import NoisyLabelClassifier


def main(epochs: int = 15, n_jobs: int = 2) -> tuple[str, float, float]:
    x, truth = load_digits(return_X_y=True)
    x, x_test, truth, y_test = train_test_split(x, truth, stratify=truth, random_state=0)
    rng = np.random.default_rng(0)
    y = np.where(rng.random(len(truth)) < 0.4, (truth + 1) % 10, truth)  # 40 % get the label of the next digit

    trusted = np.zeros(len(y), dtype=bool)  # six of each class were checked by a person
    for digit in range(10):
        trusted[np.flatnonzero(truth == digit)[:6]] = True
    y[trusted] = truth[trusted]

    # GridSearchCV splits `trusted` together with the rows; each fold needs trusted rows of every class. Most labels in
    # a fold are noisy, so scores are too low, but the order of the candidates is usually right.
    folds = StratifiedKFold(2, shuffle=True, random_state=0).split(x, y + 10 * trusted)
    grid = GridSearchCV(
        NoisyLabelClassifier(epochs=epochs, random_state=0),
        {"method": ["glc", "ce"]},
        cv=list(folds),
        n_jobs=n_jobs,
    )
    grid.fit(x, y, trusted=trusted)
    plain = NoisyLabelClassifier("ce", epochs=epochs, random_state=0).fit(x, y)
    return str(grid.best_params_["method"]), 100 * grid.score(x_test, y_test), 100 * plain.score(x_test, y_test)


if __name__ == "__main__":
    method, accuracy, plain = main()
    print(f"chosen: {method}; test accuracy {accuracy:.1f} %, plain training {plain:.1f} %")
