"""A set of rows with the labels they were given, and the order in which a training run sees them."""

import itertools
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from warpi.data.examples import Examples
from warpi.errors import UserError
from warpi.rng import derive, generator
from warpi.types import Batch


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


class Loader:
    """Endless shuffled batches of a split. All its state is one number: how many batches it has given.

    Pass p over the data follows a permutation made from (seed, p), and batch k is augmented by chance made from
    (seed, k), so a run can be taken up at any batch. An epoch is `steps` batches: one pass, whose last incomplete
    batch is left out, unless a method sets another number. A batch of which fewer than two examples can be read counts
    as given, but is left out: BatchNorm needs two.
    """

    def __init__(self, split: Split, batch_size: int, seed: int, *, augment: bool = True, views: int = 1) -> None:
        self.split, self.seed, self.augment, self.views = split, seed, augment, views
        self.batch_size = min(batch_size, len(split))
        self.per_pass = len(split) // self.batch_size
        self.steps = self.per_pass
        self.count = 0
        self._endless: Iterator[Batch] | None = None
        self._order: tuple[int, Tensor] | None = None

    def __len__(self) -> int:
        return self.steps

    def epoch(self, t: int) -> Iterator[Batch]:
        """What is left of the batches of epoch t."""
        self._endless = None  # what is drawn later comes after them
        return self._between(max(self.count, t * self.steps), (t + 1) * self.steps)

    def draw(self) -> Batch:
        """The next batch, without end."""
        if self._endless is None:
            self._endless = self._between(self.count, None)
        return next(self._endless)

    def _between(self, start: int, stop: int | None) -> Iterator[Batch]:
        pending: deque[Tensor] = deque()  # a stream may read ahead of what has been given out

        def plan() -> Iterator[tuple[Tensor, int]]:
            for k in itertools.count(start) if stop is None else range(start, stop):
                pending.append(index := self._index(k))
                yield self.split.rows[index], derive(self.seed, "augment", k)

        reads = self.split.examples.stream(plan(), augment=self.augment, views=self.views)
        used = start  # the last batch that could be, or the first of all
        for k, read in enumerate(reads, start):
            self.count, index = k + 1, pending.popleft()
            if read.kept is None or int(read.kept.sum()) >= min(2, self.batch_size):
                used = k
                yield self.split._batch(index, read.views, read.kept)
            elif k - used >= self.per_pass:  # a pass without any: the next would be no better
                raise UserError(
                    f"too few of {len(self.split)} examples can be read to train on: no batch holds two; mend the files"
                )

    def _index(self, k: int) -> Tensor:
        """Positions within the split of batch k.  [B]"""
        p, j = divmod(k, self.per_pass)
        if self._order is None or self._order[0] != p:
            self._order = p, torch.randperm(len(self.split), generator=generator(self.seed, "order", p))
        return self._order[1][j * self.batch_size : (j + 1) * self.batch_size]

    def state_dict(self) -> dict[str, int]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.count, self._endless = state["count"], None
