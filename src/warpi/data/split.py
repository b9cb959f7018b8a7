"""Sets of rows, and a set of rows with their given labels."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from warpi.data.batch import Batch
from warpi.data.examples import Examples, TensorExamples
from warpi.data.image_files import FileExamples
from warpi.data.placeholder import PlaceholderExamples
from warpi.errors import UserError


@dataclass(frozen=True, eq=False)
class Split:
    """Rows of an `Examples` with one label each. Splits are immutable."""

    examples: Examples
    rows: Tensor  # [N] rows of `examples`, on the CPU
    y: Tensor  # [N] given labels, on the device

    def __len__(self) -> int:
        return len(self.rows)

    def to(self, device: torch.device | str) -> "Split":
        return replace(self, examples=self.examples.to(device), y=self.y.to(device))

    def subset(self, index: Tensor) -> "Split":
        """The rows selected by a boolean mask [N] or by positions."""
        return replace(self, rows=self.rows[index.cpu()], y=self.y[index.to(self.y.device)])

    def with_strong_views(self, views: tuple[int, ...]) -> "Split":
        """The same split, with strong augmentation of the views with these numbers when inputs are augmented."""
        if not views or isinstance(self.examples, PlaceholderExamples):
            return self
        if not isinstance(self.examples, TensorExamples | FileExamples):
            raise UserError("strong augmentation needs images or dense features; use --augment weak")
        return replace(self, examples=replace(self.examples, strong_views=views))

    def batches(self, size: int) -> Iterator[Batch]:
        """All rows once, in order and without augmentation. Rows that cannot be read are skipped."""
        chunks = torch.split(torch.arange(len(self)), size)
        reads = self.examples.stream(self._announced(chunks), augment=False)
        unread = 0
        for chunk, read in zip(chunks, reads, strict=True):
            if read.kept is None or read.kept.any():
                yield self.make_batch(chunk, read.views, read.kept)
            else:
                unread += len(chunk)
            self.examples.release(self.rows[chunk])
        if unread == len(self) > 0:
            raise UserError(f"none of the {len(self)} examples can be read for evaluation; fix or remove them")

    def to_vectors(self) -> Tensor:
        """All inputs as vectors in memory; zeros for inputs that cannot be read.  [N, D] float32"""
        x = torch.zeros(len(self), math.prod(self.examples.shape), dtype=torch.float32, device=self.examples.device)
        for batch in self.batches(1000):
            x[batch.rows] = batch.x.flatten(1).float()
        return x

    def _announced(self, chunks: Sequence[Tensor]) -> Iterator[tuple[Tensor, int]]:
        """The rows of each chunk, which are about to be read."""
        for chunk in chunks:
            self.examples.announce(self.rows[chunk])
            yield self.rows[chunk], 0

    def make_batch(self, index: Tensor, views: tuple[Tensor, ...], kept: Tensor | None) -> Batch:
        """A batch of the positions `index`, without those that could not be read."""
        index = index if kept is None else index[kept]
        rows = index.to(self.y.device)
        return Batch(views, self.y[rows], rows)


def group_by_class(rows: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    """The rows of each class, in their order. This takes one pass over the rows for any number of classes."""
    labels = y[rows].numpy()
    counts = np.bincount(labels)
    order = np.argsort(labels.astype(np.min_scalar_type(len(counts))), kind="stable")  # small integers sort fast
    return torch.split(rows[torch.from_numpy(order)], counts.tolist())


def leave_out(rows: Tensor, others: Tensor) -> Tensor:
    """The rows that are not among the others, in their order."""
    if not len(rows):
        return rows
    kept = torch.ones(int(rows.max()) + 1, dtype=torch.bool)  # `isin` would sort all rows
    kept[others] = False
    return rows[kept[rows]]
