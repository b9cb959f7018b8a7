"""Features that stay in their file. Batches are gathered from a memory map; everything else works in blocks of rows."""

import hashlib
import mmap
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from numpy.lib import format as npy
from numpy.typing import NDArray
from torch import Tensor

from warpi.data.examples import Examples, ReadBatch, Scale
from warpi.data.numeric import ROUNDING, Embedded, Features
from warpi.errors import UserError

BLOCK_BYTES = 2**24  # read at once
MOST_ROWS = 1_000_000  # if a file has more rows, only computations in chunks fit into memory
_SEEK_BYTES = 2**14  # reading one separate row costs as much as reading this many bytes in one piece
KINDS = (np.dtype(np.float16), np.dtype(np.float32))
"""Types of numbers that are kept as in the file, and converted to float32 batch by batch."""


class RawRows:
    """Rows of numbers [N, D] in the precision of their file, in a memory map or in memory."""

    def __init__(self, values: NDArray[Any], source: mmap.mmap | None = None, offset: int = 0) -> None:
        self.x = torch.from_numpy(values)
        self._source = source
        self._offset = offset  # of the first row in the file, in bytes
        self.row_bytes = values.itemsize * values.shape[1]

    @classmethod
    def open(cls, path: Path) -> "RawRows | None":
        """The rows of a .npy file; None if their type, dimensions or order cannot be mapped."""
        with path.open("rb") as file:
            read_header = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}
            version = npy.read_magic(file)
            if version not in read_header:
                return None
            shape, is_fortran, kind = read_header[version](file)
            if len(shape) != 2 or 0 in shape or is_fortran or kind not in KINDS:
                return None
            offset = file.tell()
            source = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)  # tensors need a writable buffer
        values = np.frombuffer(source, kind, shape[0] * shape[1], offset).reshape(shape)
        if hasattr(mmap, "MADV_RANDOM"):
            source.madvise(mmap.MADV_RANDOM)  # do not read megabytes ahead for each shuffled row
        return cls(values, source, offset)

    def part(self, rows: slice) -> "RawRows":
        """A slice of the rows."""
        start, stop, _ = rows.indices(len(self.x))
        return RawRows(self.x[start:stop].numpy(), self._source, self._offset + start * self.row_bytes)

    def blocks(self) -> Iterator[tuple[int, Tensor]]:
        """Yield all rows in blocks: the number of the first row, and the block."""
        size = max(1, BLOCK_BYTES // self.row_bytes)
        for start in range(0, len(self.x), size):
            stop = min(start + size, len(self.x))
            self.announce(start, stop)
            yield start, self.x[start:stop]
            self.release(start, stop)

    def announce(self, start: int, stop: int) -> None:
        """Let the system read these rows from the disk, in one piece."""
        self._advise("MADV_WILLNEED", start, stop)

    def release(self, start: int, stop: int) -> None:
        """Return the memory of these rows to the system, which may keep them in its cache."""
        self._advise("MADV_DONTNEED", start, stop)

    def _advise(self, advice: str, start: int, stop: int) -> None:
        if self._source is None or not hasattr(mmap, advice):
            return
        first = (self._offset + start * self.row_bytes) // mmap.PAGESIZE * mmap.PAGESIZE
        last = self._offset + stop * self.row_bytes
        self._source.madvise(getattr(mmap, advice), first, last - first)


@dataclass(frozen=True, eq=False)
class MappedExamples(Features):
    """Features in the precision of their file, which may be larger than the memory.

    x is on the CPU, in a memory map. A batch is copied to `target` and converted to float32 there. Batches, scale and
    digest equal those of `Features` in float32 (the scale up to rounding), so that a run may use either.
    """

    raw: RawRows | None = None
    target: torch.device = torch.device("cpu")  # noqa: RUF009 (immutable)

    @classmethod
    def of(cls, raw: RawRows) -> Self:
        return cls(raw.x, Scale(torch.tensor(0.0), torch.tensor(1.0)), raw=raw)

    @property
    def kind(self) -> torch.dtype:
        """The dtype in which the numbers are hashed and compared. It equals that of the same data in memory."""
        return torch.float32

    @property
    def device(self) -> torch.device:
        return self.target

    def to(self, device: torch.device | str) -> Self:
        device = torch.device(device)
        return replace(self, target=device, scale=Scale(*(t.to(device) for t in self.scale)))

    def stream(
        self, batches: Iterable[tuple[Tensor, int]], *, augment: bool, views: int = 1, part: slice = slice(None)
    ) -> Iterator[ReadBatch]:
        del augment  # there is none for features
        for rows, _ in batches:
            x = self.x.index_select(0, rows[part])
            if self.target.type == "cuda":
                x = x.pin_memory().to(self.target, non_blocking=True)
            yield ReadBatch((self._normalize(x),) * views, None)

    def announce(self, rows: Tensor) -> None:
        """Read these rows and all between them in one piece, unless reading single rows costs less."""
        if self.raw is None or not len(rows):
            return
        start, stop = int(rows.min()), int(rows.max()) + 1
        if (stop - start) * self.raw.row_bytes <= len(rows) * _SEEK_BYTES:
            self.raw.announce(start, stop)

    def release(self, rows: Tensor) -> None:
        if self.raw is not None and len(rows):
            self.raw.release(int(rows.min()), int(rows.max()) + 1)

    def fit_scale(self, rows: Tensor) -> Scale:
        """Mean and standard deviation over `rows`, as `Features.fit_scale`; blocks are combined pairwise."""
        assert self.raw is not None
        chosen = torch.zeros(len(self.x), dtype=torch.bool)
        chosen[rows] = True
        n = 0
        mean, squares, largest = torch.zeros(3, self.x.shape[1], dtype=torch.float64)
        for start, block in self.raw.blocks():
            x = block[chosen[start : start + len(block)]].double()
            if not len(x):
                continue
            shift = x.mean(0) - mean
            squares += (x - x.mean(0)).square().sum(0) + shift.square() * (n * len(x) / (n + len(x)))
            mean += shift * (len(x) / (n + len(x)))
            largest = torch.maximum(largest, x.abs().amax(0))
            n += len(x)
        std = (squares / max(n, 1)).sqrt()
        std = torch.where(std > ROUNDING * largest, std, torch.inf)
        return Scale(mean.to(self.scale.mean), std.to(self.scale.std))

    def replace_inputs(self, rows: Tensor, other: Examples, other_rows: Tensor) -> Self:  # noqa: ARG002
        raise UserError(
            "open_set noise replaces inputs, which is not possible if they stay in their file; use fewer rows"
        )

    def digest(self) -> str:
        """The digest of the same numbers in memory."""
        assert self.raw is not None
        content = hashlib.sha256(f"{self.kind} {tuple(self.x.shape)}".encode())
        for _, block in self.raw.blocks():
            content.update(block.to(self.kind).numpy().data)
        return content.hexdigest()

    def flat(self, rows: Tensor) -> Tensor:
        return self.x[rows].float()

    def form(self) -> dict[str, Any]:
        return {**super().form(), "kind": str(self.kind)}


@dataclass(frozen=True, eq=False)
class MappedEmbedded(MappedExamples, Embedded):
    """Vectors that a pretrained model computed, in their file. In memory, they have the same type."""

    @property
    def kind(self) -> torch.dtype:
        return self.x.dtype
