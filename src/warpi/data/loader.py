"""Shuffled batches of a split, in an order that depends only on a seed."""

import itertools
import math
from bisect import bisect_right
from collections import deque
from collections.abc import Iterator
from functools import cached_property
from typing import Any, TypeGuard

import torch
from torch import Tensor

from warpi.data.batch import Batch
from warpi.data.examples import ReadBatch, TensorExamples
from warpi.data.mapped import MappedExamples
from warpi.data.split import Split
from warpi.errors import UserError
from warpi.utils import distributed
from warpi.utils.seeding import derive, generator

SMALL_SPLIT = 2**20  # values; the inputs of a smaller split are normalized once and kept together
BLOCK_ROWS = 8192
MIXED_BLOCKS = 16


class Loader:
    """Endless shuffled batches of a split. Its only state is the number of batches it has returned.

    Pass p over the data follows a permutation made from (seed, p), and batch k is augmented with random numbers made
    from (seed, k), so a run can be resumed at any batch. An epoch has `steps` batches: one pass without its last
    incomplete batch, unless a method sets another number. A batch with fewer than two readable examples is counted but
    skipped, because BatchNorm needs two.

    With `in_blocks`, a pass mixes a few blocks of neighboring rows at a time (`BlockOrder`). This order also depends
    only on (seed, p).

    With several ranks, all make the same batches, and each rank reads its share of every batch. If one rank cannot read
    all examples of its share, the others omit some, so that all shares have the same size.
    """

    def __init__(
        self,
        split: Split,
        batch_size: int,
        seed: int,
        *,
        augment: bool = True,
        views: int = 1,
        in_blocks: bool = False,
    ) -> None:
        self.split = split
        self.in_blocks = in_blocks
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
        self._blocks: BlockOrder | None = None
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
        """Turn lazy reading, on first access, on or off."""
        self.planned = on
        self._endless = None

    def read(self, k: int) -> Batch:
        """Batch k. The inputs must be on the device."""
        self._slot = self._slot or Slot(self)
        self._slot.fill(k)
        return self._slot.read()

    def _between(self, start: int, stop: int | None) -> Iterator[Batch]:
        if self.planned and stop is not None:
            for k in range(start, stop):
                self.count = k + 1
                yield Planned.of(self, k)
            return
        if self._inputs is not None:
            for k in itertools.count(start) if stop is None else range(start, stop):
                index = self.index(k)[self.share]
                self.count = k + 1
                yield self.split.make_batch(index, (self._inputs[index.to(self._inputs.device)],) * self.views, None)
            return
        pending: deque[Tensor] = deque()  # a stream may read ahead of the batches that were returned

        def plan() -> Iterator[tuple[Tensor, int]]:
            for k in itertools.count(start) if stop is None else range(start, stop):
                index = self.index(k)
                pending.append(index)
                yield self.split.rows[index], derive(self.seed, "augment", k)

        reads = self.split.examples.stream(plan(), augment=self.augment, views=self.views, part=self.share)
        last_used = start
        for k, read in enumerate(reads, start):
            self.count = k + 1
            index = pending.popleft()[self.share]
            read, n = self._cut(read, len(index))
            if n >= min(2, len(index)):
                last_used = k
                yield self.split.make_batch(index, read.views, read.kept)
            elif k - last_used >= self.per_pass:  # an entire pass without a usable batch
                raise UserError(f"too few of {len(self.split)} examples can be read: no batch has two; fix the files")

    @cached_property
    def _inputs(self) -> Tensor | None:
        """The normalized inputs of a small split that is not augmented.  [N, ...]"""
        examples = self.split.examples
        if not (isinstance(examples, TensorExamples) and self.resident) or (self.augment and examples.crop):
            return None
        has_own_stream = type(examples).stream is not TensorExamples.stream
        if has_own_stream or len(self.split) * math.prod(examples.shape) > SMALL_SPLIT:
            return None
        rows = self.split.rows.to(examples.device)
        return examples.read(rows, torch.Generator(examples.device), augment=False)[0]

    def _cut(self, read: ReadBatch, size: int) -> tuple[ReadBatch, int]:
        """Cut the share to the size of the smallest share of all ranks. Return it and its size."""
        if self.split.examples.always_readable and read.kept is None:
            return read, size
        n_kept = size if read.kept is None else int(read.kept.sum())
        n = distributed.min_over_ranks(n_kept)
        if n == n_kept:
            return read, n
        kept = torch.ones(size, dtype=torch.bool) if read.kept is None else read.kept
        return ReadBatch(tuple(view[:n] for view in read.views), kept & (kept.cumsum(0) <= n)), n

    def index(self, k: int) -> Tensor:
        """Positions of batch k within the split.  [B]"""
        p, j = divmod(k, self.per_pass)
        start, stop = j * self.batch_size, (j + 1) * self.batch_size
        if not self.in_blocks:
            return self.order(p)[start:stop]
        if self._blocks is None or self._blocks.p != p:
            self._blocks = BlockOrder(self.split, self.seed, p)
        return self._blocks.between(start, stop)

    def order(self, p: int) -> Tensor:
        """The order of the rows in pass p.  [N]"""
        if self._order is None or self._order[0] != p:
            n = len(self.split)
            if self.in_blocks:
                self._order = p, BlockOrder(self.split, self.seed, p).between(0, n)
            else:
                self._order = p, torch.randperm(n, generator=generator(self.seed, "order", p))
        return self._order[1]

    @property
    def resident(self) -> bool:
        """Whether all inputs are on the device, so that it can read batches without the host."""
        return isinstance(self.split.examples, TensorExamples) and not isinstance(self.split.examples, MappedExamples)

    def state_dict(self) -> dict[str, int]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.count = state["count"]
        self._endless = None


class BlockOrder:
    """The order of pass p: blocks of neighboring rows are shuffled, then the rows of a few blocks at a time are mixed.

    It is a function of (seed, p). Only the mixture in use is in memory, and its rows are read from the disk in blocks.
    """

    def __init__(self, split: Split, seed: int, p: int) -> None:
        self.split = split
        self.seed = seed
        self.p = p
        n_blocks = -(-len(split) // BLOCK_ROWS)
        self.blocks = torch.randperm(n_blocks, generator=generator(seed, "blocks", p))
        sizes = torch.full((n_blocks,), BLOCK_ROWS)
        sizes[self.blocks == n_blocks - 1] = len(split) - (n_blocks - 1) * BLOCK_ROWS  # the last block may be shorter
        ends = sizes.cumsum(0)
        self.ends = ends[MIXED_BLOCKS - 1 :: MIXED_BLOCKS].tolist()  # positions in the order at which a mixture ends
        if not self.ends or self.ends[-1] < len(split):
            self.ends.append(len(split))
        self._mixed: tuple[int, Tensor] | None = None

    def between(self, start: int, stop: int) -> Tensor:
        """Positions start to stop of the order, as positions within the split.  [stop - start]"""
        first = bisect_right(self.ends, start)
        parts = []
        for m in range(first, len(self.ends)):
            begin = self.ends[m - 1] if m else 0
            if begin >= stop:
                break
            parts.append(self._mix(m)[max(start - begin, 0) : stop - begin])
        return torch.cat(parts)

    def _mix(self, m: int) -> Tensor:
        """The rows of mixture m in random order."""
        if self._mixed is None or self._mixed[0] != m:
            examples = self.split.examples
            if self._mixed is not None:
                for block in self._blocks_of(self._mixed[0]):
                    examples.release(self.split.rows[block])
            blocks = self._blocks_of(m)
            for block in blocks:
                examples.announce(self.split.rows[block])
            rows = torch.cat([torch.arange(block.start, block.stop) for block in blocks])
            order = torch.randperm(len(rows), generator=generator(self.seed, "mix", self.p, m))
            self._mixed = m, rows[order]
        return self._mixed[1]

    def _blocks_of(self, m: int) -> list[slice]:
        """The blocks of mixture m."""
        chosen = self.blocks[m * MIXED_BLOCKS : (m + 1) * MIXED_BLOCKS].tolist()
        return [slice(b * BLOCK_ROWS, min((b + 1) * BLOCK_ROWS, len(self.split))) for b in chosen]


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
