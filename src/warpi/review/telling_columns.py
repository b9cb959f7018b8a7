"""Which columns of a row support one class against another."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from warpi.data.examples import Examples, TensorExamples
from warpi.data.numeric import Columns
from warpi.utils.seeding import generator

Floats = NDArray[np.float64]
_MOST_ROWS = 20_000  # from which means and variances are computed
_MOST_FEATURES = 5_000
_MOST_VALUES = 10**7


@dataclass(frozen=True, eq=False)
class ClassMeans:
    """Means of the features of each class, and their variances within a class.

    They measure how strongly a column of a row x supports class a against class b: log p(x | a) / p(x | b), summed over
    the features of the column, which are taken as independent and normal with the same variances in both classes.
    """

    mean: Floats  # [K, D]
    variance: Floats  # [D]

    @classmethod
    def of(cls, x: Floats, q: Floats) -> "ClassMeans":
        """Compute the means from rows x [n, D] that belong to the classes with probabilities q [n, K]."""
        weight = q.sum(0)
        overall = x.mean(0)
        centered = x - overall
        mean = (q.T @ centered) / np.maximum(weight, 1e-12)[:, None]
        mean[weight < 1e-6] = 0.0  # a class without rows says nothing
        between = (weight[:, None] * mean**2).sum(0) / max(len(x), 1)
        total = (centered**2).mean(0)
        return cls(mean + overall, np.maximum(total - between, 1e-3 * total))

    def compare(self, x: Floats, a: int, b: int) -> Floats:
        """How much each feature of a row x [D] speaks for class a against class b."""
        difference = (x - self.mean[b]) ** 2 - (x - self.mean[a]) ** 2
        ratio: Floats = np.divide(difference, 2 * self.variance, out=np.zeros(len(x)), where=self.variance > 0)
        return ratio


def class_means(examples: Examples, row: NDArray[np.int64], q: Floats) -> ClassMeans | None:
    """Means of the classes in rows of `examples` [n] with class probabilities q [n, K].

    None if the inputs are not plain features in memory, or too many.
    """
    if not isinstance(examples, TensorExamples) or len(examples.shape) != 1 or examples.shape[0] > _MOST_FEATURES:
        return None
    most = min(_MOST_ROWS, _MOST_VALUES // examples.shape[0])
    if len(row) > most:
        chosen = torch.randperm(len(row), generator=generator(0, "class means"))[:most].numpy()
        row, q = row[chosen], q[chosen]
    return ClassMeans.of(examples.flat(torch.from_numpy(row)).double().cpu().numpy(), q)


def sum_by_column(values: Floats, columns: Columns | None) -> Floats:
    """Sum the values of features [D] over each column. Without columns, each feature is one."""
    if columns is None:
        return values
    return np.array([values[part].sum() for _, _, part in columns.blocks()])


def order_by_size(values: Sequence[float]) -> list[int]:
    """Positions of the values, the largest first. Equal ones keep their order."""
    return sorted(range(len(values)), key=lambda j: -values[j])
