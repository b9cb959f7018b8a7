"""scikit-learn's grid search over methods that know what to do about wrong labels.

python examples/sklearn_grid_search.py
"""

import numpy as np
from sklearn.datasets import load_digits
from sklearn.model_selection import GridSearchCV, StratifiedKFold, train_test_split

from warpi import NoisyLabelClassifier


def main(epochs: int = 15) -> tuple[str, float, float]:
    x, truth = load_digits(return_X_y=True)
    x, x_test, truth, y_test = train_test_split(x, truth, stratify=truth, random_state=0)
    chance = np.random.default_rng(0)
    y = np.where(chance.random(len(truth)) < 0.4, (truth + 1) % 10, truth)  # 40 % are labelled as the next digit

    trusted = np.zeros(len(y), dtype=bool)  # six of each class were checked by a person
    for digit in range(10):
        trusted[np.flatnonzero(truth == digit)[:6]] = True
    y[trusted] = truth[trusted]

    # The trusted rows follow their rows into the folds; each fold needs some of every class. Most labels that a fold is
    # scored on are noisy: accuracies are too low, but the order of the candidates is usually right.
    folds = StratifiedKFold(2, shuffle=True, random_state=0).split(x, y + 10 * trusted)
    grid = GridSearchCV(
        NoisyLabelClassifier(epochs=epochs, random_state=0),
        {"method": ["warpi", "ce"]},
        cv=list(folds),
        n_jobs=2,
    )
    grid.fit(x, y, trusted=trusted)
    plain = NoisyLabelClassifier("ce", epochs=epochs, random_state=0).fit(x, y)
    return str(grid.best_params_["method"]), 100 * grid.score(x_test, y_test), 100 * plain.score(x_test, y_test)


if __name__ == "__main__":
    method, found, plain = main()
    print(f"chosen: {method}; test accuracy {found:.1f} %, plain training {plain:.1f} %")
