"""A set of rows with the labels they were given, and the order in which a training run sees them."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from warpi.data.batch import Batch
from warpi.data.examples import Examples
from warpi.errors import UserError


@dataclass(frozen=True, eq=False)
class Split:
    """Rows of an Examples with a label each. Splits are values: nothing here is ever changed in place."""

    examples: Examples
    rows: Tensor  # [N] rows of `examples`, on the CPU
    y: Tensor  # [N] given labels, on the device

    def __len__(self) -> int:
        return len(self.rows)

    def to(self, device: torch.device | str) -> "Split":
        return replace(self, examples=self.examples.to(device), y=self.y.to(device))

    def batches(self, size: int) -> Iterator[Batch]:
        """All rows once, in order, as they are: for evaluation. Rows that cannot be read are left out."""
        chunks = torch.split(torch.arange(len(self)), size)
        reads = self.examples.stream(((self.rows[chunk], 0) for chunk in chunks), augment=False)
        unread = 0
        for chunk, read in zip(chunks, reads, strict=True):
            if read.kept is None or read.kept.any():
                yield self._batch(chunk, read.views, read.kept)
            else:
                unread += len(chunk)
        if unread == len(self) > 0:
            raise UserError(f"none of the {len(self)} examples to be evaluated can be read; mend or remove them")

    def _batch(self, index: Tensor, views: tuple[Tensor, ...], kept: Tensor | None) -> Batch:
        index = index if kept is None else index[kept]
        rows = index.to(self.y.device)
        return Batch(views, self.y[rows], rows)
