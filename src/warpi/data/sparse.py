"""Inputs that are mostly zeros, such as word counts: stored sparse, made dense batch by batch."""

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

_MAX_DROPPED = 0.7  # why: docs/estimator.md
_MIN_KEPT = 8  # entries per row, on average


@dataclass(frozen=True, eq=False)
class SparseExamples(Examples):
    """Rows of a sparse matrix, divided by the root mean square of all entries, so that zeros stay zeros.

    On average, features are then as large as standardized ones; a scale per column would enlarge rare words. In
    training, a random part of the entries of a row is dropped each time, because a network would otherwise memorize
    the label of a text by its rare words.
    """

    x: csr_array  # [N, D] float32, on the CPU
    target: torch.device  # of the batches
    scale: Scale
    dropped: float = 0.0  # fraction of the entries that is dropped in training

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.x.shape[1],)

    @property
    def device(self) -> torch.device:
        return self.target

    def __len__(self) -> int:
        return int(self.x.shape[0])

    def to(self, device: torch.device | str) -> Self:
        return replace(self, target=torch.device(device), scale=Scale(*(t.to(device) for t in self.scale)))

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
                yield ReadBatch((self._normalize(self.flat(rows[part])),) * views, None)
                continue
            batch = self.x[rows.cpu().numpy()]
            rng = np.random.default_rng(seed)
            dropped = (self._drop_entries(batch, rng)[part].toarray() for _ in range(views))
            yield ReadBatch(tuple(self._normalize(torch.from_numpy(x)) for x in dropped), None)

    def _drop_entries(self, rows: csr_array, rng: np.random.Generator) -> csr_array:
        """Drop entries at random, and scale the others so that the expected value stays the same."""
        kept = rng.random(rows.nnz, dtype=np.float32) >= self.dropped
        return csr_array((rows.data * kept / np.float32(1 - self.dropped), rows.indices, rows.indptr), shape=rows.shape)

    def _normalize(self, x: Tensor) -> Tensor:
        return (x.to(self.target) - self.scale.mean) / self.scale.std

    def replace_inputs(self, rows: Tensor, other: Examples, other_rows: Tensor) -> Self:  # noqa: ARG002
        raise UserError("open_set noise needs arrays in memory or image files, got sparse features; make them dense")

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
        """Convert a scipy matrix or array of any sparse format."""
        rows = csr_array(x, dtype=np.float32, copy=True)  # a copy, because the next two lines work in place
        rows.sum_duplicates()
        rows.eliminate_zeros()  # so that equal rows have equal entries
        n_kept = _MIN_KEPT * rows.shape[0]
        dropped = min(_MAX_DROPPED, 1 - n_kept / rows.nnz) if augment and rows.nnz > n_kept else 0.0
        return cls(rows, torch.device("cpu"), Scale(torch.tensor(0.0), torch.tensor(1.0)), dropped)

    def contents(self, rows: Tensor) -> Iterator[bytes]:
        """The content of each row as bytes, the same for equal rows."""
        picked = self.x[rows.numpy()]
        ends = picked.indptr.tolist()
        for start, stop in itertools.pairwise(ends):
            yield picked.indices[start:stop].astype(np.int64).tobytes() + picked.data[start:stop].tobytes()
