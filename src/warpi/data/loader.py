"""The order in which a training run sees the rows of a split."""

import itertools
from collections import deque
from collections.abc import Iterator
from typing import Any, TypeGuard

import torch
from torch import Tensor

from warpi.data.batch import Batch
from warpi.data.examples import TensorExamples
from warpi.data.split import Split
from warpi.errors import UserError
from warpi.utils import distributed
from warpi.utils.seeding import derive, generator


class Loader:
    """Endless shuffled batches of a split. All its state is one number: how many batches it has given.

    Pass p over the data follows a permutation made from (seed, p), and batch k is augmented by chance made from
    (seed, k), so a run can be taken up at any batch. An epoch is `steps` batches: one pass, whose last incomplete
    batch is left out, unless a method sets another number. A batch of which fewer than two examples can be read counts
    as given, but is left out: BatchNorm needs two.

    Of several ranks all make the same batches, and each reads its share of every one of them.
    """

    def __init__(self, split: Split, batch_size: int, seed: int, *, augment: bool = True, views: int = 1) -> None:
        self.split, self.seed, self.augment, self.views = split, seed, augment, views
        self.batch_size = min(batch_size, len(split))  # of all ranks together
        self.share = distributed.rank_slice(self.batch_size)
        self.per_pass = len(split) // self.batch_size
        self.steps = self.per_pass
        self.count = 0
        self._endless: Iterator[Batch] | None = None
        self._order: tuple[int, Tensor] | None = None
        self.planned = False  # batches are read when they are looked at (`capture.py`)
        self._own: Slot | None = None
        self.capturing: list[Slot] = []  # what the next draws give while a step is being captured

    def __len__(self) -> int:
        return self.steps

    def epoch(self, t: int) -> Iterator[Batch]:
        """What is left of the batches of epoch t."""
        self._endless = None  # what is drawn later comes after them
        return self._between(max(self.count, t * self.steps), (t + 1) * self.steps)

    def draw(self) -> Batch:
        """The next batch, without end."""
        if self.capturing:
            return self.capturing.pop(0).read()
        if self.planned:
            self.count += 1
            return self.read(self.count - 1)
        if self._endless is None:
            self._endless = self._between(self.count, None)
        return next(self._endless)

    def plan(self, on: bool) -> None:
        """From now on, give batches that are read when they are looked at, or not."""
        self.planned, self._endless = on, None

    def read(self, k: int) -> Batch:
        """Batch k, of inputs that lie on the device."""
        self._own = self._own or Slot(self)
        self._own.fill(k)
        return self._own.read()

    def _between(self, start: int, stop: int | None) -> Iterator[Batch]:
        if self.planned and stop is not None:
            for k in range(start, stop):
                self.count = k + 1
                yield Planned.of(self, k)
            return
        pending: deque[Tensor] = deque()  # a stream may read ahead of what has been given out

        def plan() -> Iterator[tuple[Tensor, int]]:
            for k in itertools.count(start) if stop is None else range(start, stop):
                pending.append(index := self._index(k))
                yield self.split.rows[index], derive(self.seed, "augment", k)

        cut = {"part": self.share} if distributed.ranks() > 1 else {}
        reads = self.split.examples.stream(plan(), augment=self.augment, views=self.views, **cut)
        used = start  # the last batch that could be, or the first of all
        for k, read in enumerate(reads, start):
            self.count, index = k + 1, pending.popleft()
            if self._enough(read.kept):
                used = k
                yield self.split._batch(index[self.share], read.views, read.kept)
            elif k - used >= self.per_pass:  # a pass without any: the next would be no better
                raise UserError(
                    f"too few of {len(self.split)} examples can be read to train on: no batch holds two; mend the files"
                )

    def _enough(self, kept: Tensor | None) -> bool:
        """Whether every rank has two examples."""
        if self.split.examples.always_readable and kept is None:
            return True
        least = min(2, self.batch_size // distributed.ranks())
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
        """Whether a batch can be read by the device alone."""
        return isinstance(self.split.examples, TensorExamples)

    def state_dict(self) -> dict[str, int]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.count, self._endless = state["count"], None


class Slot:
    """A batch whose number is chosen outside (`fill`) and which the device reads by itself (`read`)."""

    def __init__(self, loader: Loader) -> None:
        assert isinstance(loader.split.examples, TensorExamples)
        self.loader, self.examples, device = loader, loader.split.examples, loader.split.y.device
        self.index = torch.empty(loader.batch_size, dtype=torch.long, device=device)
        self.generator = torch.Generator(device)
        self._rows, self._order = loader.split.rows.to(device), (-1, self.index)

    def fill(self, k: int) -> None:
        loader, (p, j) = self.loader, divmod(k, self.loader.per_pass)
        if self._order[0] != p:  # a pass at a time goes to the device
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
    """A batch that is read when it is looked at. One made from it (`dataclasses.replace`) is a batch like any other."""

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
