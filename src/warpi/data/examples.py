"""Where the inputs lie: N examples stored once, read a batch of rows at a time."""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import ClassVar, NamedTuple, Self

import torch
from torch import Generator, Tensor

from warpi.data.augment import Crop
from warpi.errors import UserError


class ReadBatch(NamedTuple):
    """One batch as it was read."""

    views: tuple[Tensor, ...]  # each [B', ...], float, normalised
    kept: Tensor | None  # [B] bool on the CPU: which of the rows asked for could be read; None: all of them


class Examples(ABC):
    """N inputs. A `Split` is a set of their rows; splits of one data set share one Examples and never overlap."""

    always_readable: ClassVar[bool] = True  # every row can be read: `Read.kept` is always None

    @property
    @abstractmethod
    def shape(self) -> tuple[int, ...]:
        """The shape of one input as a network sees it."""

    @property
    @abstractmethod
    def device(self) -> torch.device:
        """Where the batches come out."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def to(self, device: torch.device | str) -> Self: ...

    @abstractmethod
    def stream(
        self, batches: Iterable[tuple[Tensor, int]], *, augment: bool, views: int = 1, part: slice = slice(None)
    ) -> Iterator[ReadBatch]:
        """Read batch after batch. Each is (rows [B], seed); the seed alone decides its augmentation, so that a run
        can be taken up at any batch. Only `part` of each is read, and augmented as it is within the whole batch."""

    @abstractmethod
    def replace_inputs(self, rows: Tensor, other: "Examples", other_rows: Tensor) -> Self:
        """A copy in which the inputs of `rows` are those of `other_rows` of another set (open-set noise)."""

    @abstractmethod
    def fit_scale(self, rows: Tensor) -> "Scale | None":
        """Mean and deviation over `rows` where features are to be standardised; None where the scale is fixed."""

    @abstractmethod
    def with_scale(self, scale: "Scale") -> Self:
        """A copy with another normalisation."""

    @abstractmethod
    def digest(self) -> str:
        """A hash by which a run knows its inputs again."""

    @abstractmethod
    def flat(self, rows: Tensor) -> Tensor:
        """[len(rows), D] raw inputs without augmentation or normalisation (pixels 0..255), for `instance` noise."""


class Scale(NamedTuple):
    """Normalisation (x - mean) / std; each a scalar or shaped to broadcast over one input."""

    mean: Tensor
    std: Tensor


@dataclass(frozen=True, eq=False)
class TensorExamples(Examples):
    """Inputs held as one tensor on the device."""

    x: Tensor  # [N, ...]: uint8 images [N, C, H, W] or float features [N, D]
    scale: Scale
    crop: Crop | None = None  # augmentation of images; None: nothing is augmented
    standardise: bool = False  # features whose scale is to be learned from the training rows
    copies: dict[torch.device, Tensor] = field(default_factory=dict, init=False, repr=False)  # of x, one a device

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.x.shape[1], self.crop.size, self.crop.size) if self.crop else tuple(self.x.shape[1:])

    @property
    def device(self) -> torch.device:
        return self.x.device

    def __len__(self) -> int:
        return len(self.x)

    def to(self, device: torch.device | str) -> Self:
        where = torch.device(device)
        if where not in self.copies:
            self.copies[where] = self.x.to(where)
        return replace(self, x=self.copies[where], scale=Scale(*(t.to(device) for t in self.scale)))

    def stream(
        self, batches: Iterable[tuple[Tensor, int]], *, augment: bool, views: int = 1, part: slice = slice(None)
    ) -> Iterator[ReadBatch]:
        generator = torch.Generator(self.device)
        for rows, seed in batches:
            generator.manual_seed(seed)
            yield ReadBatch(self.read(rows.to(self.device), generator, augment=augment, views=views, part=part), None)

    def read(
        self, rows: Tensor, generator: Generator, *, augment: bool, views: int = 1, part: slice = slice(None)
    ) -> tuple[Tensor, ...]:
        """`part` of the rows, which are on the device: nothing here waits, or looks at a value."""
        x = self.x[rows[part]]
        if augment and self.crop:
            crops = (self.crop.train(x, generator, part, len(rows)) for _ in range(views))
            return tuple(self._normal(crop) for crop in crops)
        return (self._normal(self.crop.middle(x) if self.crop else x),) * views

    def _normal(self, x: Tensor) -> Tensor:
        return (x.to(self.scale.mean.dtype) - self.scale.mean) / self.scale.std

    def replace_inputs(self, rows: Tensor, other: Examples, other_rows: Tensor) -> Self:
        if not isinstance(other, TensorExamples) or other.x.shape[1:] != self.x.shape[1:]:
            got = tuple(other.x.shape[1:]) if isinstance(other, TensorExamples) else "files"
            raise UserError(f"open_set noise needs inputs of the same shape {tuple(self.x.shape[1:])}, got {got}")
        x = self.x.clone()
        x[rows] = other.x[other_rows].to(x)
        return replace(self, x=x)

    def fit_scale(self, rows: Tensor) -> Scale | None:
        if not self.standardise:
            return None
        x = self.x[rows].double()
        std = x.std(0, correction=0)
        return Scale(x.mean(0).to(self.scale.mean), torch.where(std > 1e-12, std, torch.inf).to(self.scale.std))

    def with_scale(self, scale: Scale) -> Self:
        return replace(self, scale=scale)

    def digest(self) -> str:
        x = self.x.cpu().contiguous()
        content = hashlib.sha256(f"{x.dtype} {tuple(x.shape)}".encode())
        content.update(x.numpy().data if x.numel() else b"")
        return content.hexdigest()

    def flat(self, rows: Tensor) -> Tensor:
        return self.x[rows].flatten(1).float()
