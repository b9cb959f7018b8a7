"""Shuffled batches of a split, in an order that follows from a seed."""

import itertools
from collections import deque
from collections.abc import Iterator
from typing import Any, TypeGuard

import torch
from torch import Tensor

from warpi.data.batch import Batch
from warpi.data.examples import TensorExamples
from warpi.data.mapped import MappedExamples
from warpi.data.split import Split
from warpi.errors import UserError
from warpi.utils import distributed
from warpi.utils.seeding import derive, generator


class Loader:
    """Endless shuffled batches of a split. Its only state is the number of batches it has returned.

    Pass p over the data follows a permutation made from (seed, p), and batch k is augmented with random numbers made
    from (seed, k), so a run can be resumed at any batch. An epoch has `steps` batches: one pass without its last
    incomplete batch, unless a method sets another number. A batch of which fewer than two examples can be read is
    counted but skipped, because BatchNorm needs two.

    With several ranks, all make the same batches, and each rank reads its share of every batch.
    """

    def __init__(self, split: Split, batch_size: int, seed: int, *, augment: bool = True, views: int = 1) -> None:
        self.split = split
        self.seed = seed
        self.augment = augment
        self.views = views
        self.batch_size = min(batch_size, len(split))  # summed over all ranks
        self.share = distributed.rank_slice(self.batch_size)
        self.per_pass = len(split) // self.batch_size
        self.steps = self.per_pass
        self.count = 0
        self._endless: Iterator[Batch] | None = None
        self._order: tuple[int, Tensor] | None = None
        self.planned = False  # whether batches are read on first access (`training/cuda_graph.py`)
        self._slot: Slot | None = None
        self.capturing: list[Slot] = []  # the next draws read these while a step is being captured

    def __len__(self) -> int:
        return self.steps

    def epoch(self, t: int) -> Iterator[Batch]:
        """The remaining batches of epoch t."""
        self._endless = None  # later draws start after these batches
        return self._between(max(self.count, t * self.steps), (t + 1) * self.steps)

    def draw(self) -> Batch:
        """The next batch of an endless stream."""
        if self.capturing:
            return self.capturing.pop(0).read()
        if self.planned:
            self.count += 1
            return self.read(self.count - 1)
        if self._endless is None:
            self._endless = self._between(self.count, None)
        return next(self._endless)

    def plan(self, on: bool) -> None:
        """Turn reading on first access on or off."""
        self.planned = on
        self._endless = None

    def read(self, k: int) -> Batch:
        """Batch k, if the inputs are on the device."""
        self._slot = self._slot or Slot(self)
        self._slot.fill(k)
        return self._slot.read()

    def _between(self, start: int, stop: int | None) -> Iterator[Batch]:
        if self.planned and stop is not None:
            for k in range(start, stop):
                self.count = k + 1
                yield Planned.of(self, k)
            return
        pending: deque[Tensor] = deque()  # a stream may read ahead of the batches that were returned

        def plan() -> Iterator[tuple[Tensor, int]]:
            for k in itertools.count(start) if stop is None else range(start, stop):
                index = self._index(k)
                pending.append(index)
                yield self.split.rows[index], derive(self.seed, "augment", k)

        reads = self.split.examples.stream(plan(), augment=self.augment, views=self.views, part=self.share)
        last_used = start
        for k, read in enumerate(reads, start):
            self.count = k + 1
            index = pending.popleft()
            if self._has_enough(read.kept):
                last_used = k
                yield self.split.make_batch(index[self.share], read.views, read.kept)
            elif k - last_used >= self.per_pass:  # an entire pass without a usable batch
                raise UserError(f"too few of {len(self.split)} examples can be read: no batch has two; fix the files")

    def _has_enough(self, kept: Tensor | None) -> bool:
        """Whether every rank has two examples."""
        if self.split.examples.always_readable and kept is None:
            return True
        least = min(2, self.batch_size // distributed.n_ranks())
        n = least if kept is None else int(kept.sum())
        return distributed.min_over_ranks(n) >= least

    def _index(self, k: int) -> Tensor:
        """Positions within the split of batch k.  [B]"""
        p, j = divmod(k, self.per_pass)
        return self.order(p)[j * self.batch_size : (j + 1) * self.batch_size]

    def order(self, p: int) -> Tensor:
        """The order of the rows in pass p.  [N]"""
        if self._order is None or self._order[0] != p:
            self._order = p, torch.randperm(len(self.split), generator=generator(self.seed, "order", p))
        return self._order[1]

    @property
    def resident(self) -> bool:
        """Whether the device can read a batch by itself."""
        return isinstance(self.split.examples, TensorExamples) and not isinstance(self.split.examples, MappedExamples)

    def state_dict(self) -> dict[str, int]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.count = state["count"]
        self._endless = None


class Slot:
    """A batch in fixed tensors: `fill` selects its number on the host, `read` gathers it on the device."""

    def __init__(self, loader: Loader) -> None:
        assert isinstance(loader.split.examples, TensorExamples)
        device = loader.split.y.device
        self.loader = loader
        self.examples = loader.split.examples
        self.index = torch.empty(loader.batch_size, dtype=torch.long, device=device)
        self.generator = torch.Generator(device)
        self._rows = loader.split.rows.to(device)
        self._order = (-1, self.index)

    def fill(self, k: int) -> None:
        loader = self.loader
        p, j = divmod(k, loader.per_pass)
        if self._order[0] != p:  # the order is copied to the device once per pass
            self._order = p, loader.order(p).to(self.index.device)
        self.index.copy_(self._order[1][j * loader.batch_size : (j + 1) * loader.batch_size])
        self.generator.manual_seed(derive(loader.seed, "augment", k))

    def read(self) -> Batch:
        loader = self.loader
        views = self.examples.read(
            self._rows[self.index], self.generator, augment=loader.augment, views=loader.views, part=loader.share
        )
        rows = self.index[loader.share].clone()
        return Batch(views, loader.split.y[rows], rows)


class Planned(Batch):
    """A batch that is read on first access. `dataclasses.replace` turns it into an ordinary batch."""

    loader: Loader
    k: int

    @classmethod
    def of(cls, loader: Loader, k: int) -> "Planned":
        batch = cls.__new__(cls)
        vars(batch).update(loader=loader, k=k)
        return batch

    @staticmethod
    def is_one(batch: Batch) -> TypeGuard["Planned"]:
        return "loader" in vars(batch)

    def __getattr__(self, name: str) -> Any:
        if name not in ("views", "y", "rows") or "loader" not in vars(self):
            raise AttributeError(name)
        vars(self).update(vars(self.loader.read(self.k)))
        return vars(self)[name]
