"""Inputs that are mostly zeros, such as counts of words: kept sparse, made dense a batch at a time."""

import hashlib
import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np
import torch
from scipy.sparse import csr_array
from torch import Tensor

from warpi.data.examples import Examples, ReadBatch, Scale
from warpi.errors import UserError

_DROPPED = 0.7  # why: docs/estimator.md
_LEFT = 8  # entries a row, on average


@dataclass(frozen=True, eq=False)
class SparseExamples(Examples):
    """Rows of a sparse matrix. Zeros stay zeros: they are divided by one number, the root mean square of all entries.

    That leaves features as large on average as standardised ones are; a deviation a column would blow rare words up.
    A text has words that few others have, by which a network would learn its label by heart: each time it sees a row
    in training, most entries are missing, others each time.
    """

    x: csr_array  # [N, D] float32, on the CPU
    where: torch.device
    scale: Scale
    dropped: float = 0.0  # share of the entries that are missing in training

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.x.shape[1],)

    @property
    def device(self) -> torch.device:
        return self.where

    def __len__(self) -> int:
        return int(self.x.shape[0])

    def to(self, device: torch.device | str) -> Self:
        return replace(self, where=torch.device(device), scale=Scale(*(t.to(device) for t in self.scale)))

    def stream(
        self,
        batches: Iterable[tuple[Tensor, int]],
        *,
        augment: bool,
        views: int = 1,
        part: slice = slice(None),
    ) -> Iterator[ReadBatch]:
        for rows, seed in batches:
            if not (augment and self.dropped):
                yield ReadBatch((self._normal(self.flat(rows[part])),) * views, None)
                continue
            whole, chance = self.x[rows.cpu().numpy()], np.random.default_rng(seed)
            thinned = (self._thinned(whole, chance)[part].toarray() for _ in range(views))
            yield ReadBatch(tuple(self._normal(torch.from_numpy(x)) for x in thinned), None)

    def _thinned(self, rows: csr_array, chance: np.random.Generator) -> csr_array:
        """Rows of which entries are missing; the others are larger, such that the mean over chance is as it was."""
        kept = chance.random(rows.nnz, dtype=np.float32) >= self.dropped
        return csr_array((rows.data * kept / np.float32(1 - self.dropped), rows.indices, rows.indptr), shape=rows.shape)

    def _normal(self, x: Tensor) -> Tensor:
        return (x.to(self.where) - self.scale.mean) / self.scale.std

    def replace_inputs(self, rows: Tensor, other: Examples, other_rows: Tensor) -> Self:  # noqa: ARG002
        raise UserError("open_set noise is for arrays in memory and image files, got sparse features; make them dense")

    def fit_scale(self, rows: Tensor) -> Scale:
        entries = self.x[rows.numpy()].data.astype(np.float64)
        mean_square = float(entries @ entries) / max(len(rows) * self.x.shape[1], 1)
        return Scale(self.scale.mean, torch.full_like(self.scale.std, mean_square**0.5 if mean_square > 0 else 1.0))

    def with_scale(self, scale: Scale) -> Self:
        return replace(self, scale=scale)

    def digest(self) -> str:
        content = hashlib.sha256(f"sparse {self.x.shape}".encode())
        for part in (self.x.indptr, self.x.indices, self.x.data):
            content.update(np.ascontiguousarray(part).data)
        return content.hexdigest()

    def flat(self, rows: Tensor) -> Tensor:
        return torch.from_numpy(self.x[rows.cpu().numpy()].toarray())

    @classmethod
    def of(cls, x: Any, augment: bool = False) -> Self:
        """Of a scipy matrix or array of any sparse format."""
        rows = csr_array(x, dtype=np.float32, copy=True)  # the next two lines change it in place
        rows.sum_duplicates()
        rows.eliminate_zeros()  # so that rows of the same numbers are the same
        short = rows.nnz <= _LEFT * rows.shape[0]
        dropped = min(_DROPPED, 1 - _LEFT * rows.shape[0] / rows.nnz) if augment and not short else 0.0
        return cls(rows, torch.device("cpu"), Scale(torch.tensor(0.0), torch.tensor(1.0)), dropped)

    def contents(self, rows: Tensor) -> Iterator[bytes]:
        """What each row holds, the same for equal rows."""
        picked = self.x[rows.numpy()]
        ends = picked.indptr.tolist()
        for start, stop in itertools.pairwise(ends):
            yield picked.indices[start:stop].astype(np.int64).tobytes() + picked.data[start:stop].tobytes()
