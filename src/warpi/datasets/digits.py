"""Handwritten digits that are included in scikit-learn, so that no download is needed."""

from pathlib import Path

import torch

from warpi.data.dataset import Dataset
from warpi.data.examples import Scale, TensorExamples


def digits(root: Path | None = None) -> Dataset:  # noqa: ARG001
    """1,797 images of 8 x 8 pixels (0..16) as 64 features. There is no official test set. `root` is ignored."""
    from sklearn.datasets import load_digits  # slow to import

    x, y = load_digits(return_X_y=True)
    examples = TensorExamples(torch.tensor(x, dtype=torch.float32), Scale(torch.tensor(0.0), torch.tensor(16.0)))
    labels = torch.tensor(y, dtype=torch.int64)
    return Dataset("digits", examples, labels, tuple(map(str, range(10))), clean=labels)
