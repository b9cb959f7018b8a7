"""Storage for N inputs that are read in batches of rows."""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, ClassVar, NamedTuple, Self

import torch
from torch import Generator, Tensor

from warpi.data.augment import Crop, distort
from warpi.errors import UserError

_DTYPES = {str(dtype): dtype for dtype in (torch.uint8, torch.float16, torch.float32, torch.float64)}


class ReadBatch(NamedTuple):
    """One batch read from an `Examples`."""

    views: tuple[Tensor, ...]  # each [B', ...], float, normalized
    kept: Tensor | None  # [B] bool on the CPU: which of the requested rows could be read; None: all of them


class Examples(ABC):
    """N inputs. A `Split` is a set of their rows; splits of one data set share one Examples and never overlap."""

    always_readable: ClassVar[bool] = True  # no row can fail to be read, so `ReadBatch.kept` is always None

    @property
    @abstractmethod
    def shape(self) -> tuple[int, ...]:
        """The shape of one input as a network sees it."""

    @property
    @abstractmethod
    def device(self) -> torch.device:
        """The device of the batches."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def to(self, device: torch.device | str) -> Self: ...

    @abstractmethod
    def stream(
        self, batches: Iterable[tuple[Tensor, int]], *, augment: bool, views: int = 1, part: slice = slice(None)
    ) -> Iterator[ReadBatch]:
        """Read the batches, each given as (rows [B], seed).

        The seed alone decides the augmentation, so a run can be resumed at any batch. Only `part` of each batch is
        read, with the augmentation that it has in the entire batch.
        """

    @abstractmethod
    def replace_inputs(self, rows: Tensor, other: "Examples", other_rows: Tensor) -> Self:
        """A copy in which `other_rows` of another set replace the inputs of `rows` (open-set noise)."""

    @abstractmethod
    def fit_scale(self, rows: Tensor) -> "Scale | None":
        """Mean and standard deviation over `rows` if features are standardized; None if the scale is fixed."""

    @abstractmethod
    def with_scale(self, scale: "Scale") -> Self:
        """A copy with another normalization."""

    @abstractmethod
    def digest(self) -> str:
        """A hash of the content, by which a run recognizes its inputs."""

    @abstractmethod
    def flat(self, rows: Tensor) -> Tensor:
        """[len(rows), D] raw inputs without augmentation or normalization (pixels 0..255), for `instance` noise."""

    def form(self) -> dict[str, Any] | None:
        """How to read new inputs of the same kind, as plain values and tensors; None if no file format stores them."""
        return None

    def announce(self, rows: Tensor) -> None:  # noqa: B027 (only files need it)
        """Prepare for reading rows that are close to each other."""

    def release(self, rows: Tensor) -> None:  # noqa: B027
        """Release the memory of rows that are not needed soon."""


class Scale(NamedTuple):
    """Normalization (x - mean) / std; each a scalar or shaped to broadcast over one input."""

    mean: Tensor
    std: Tensor


@dataclass(frozen=True, eq=False)
class TensorExamples(Examples):
    """Inputs stored as one tensor on the device."""

    x: Tensor  # [N, ...]: uint8 images [N, C, H, W] or float features [N, D]
    scale: Scale
    crop: Crop | None = None  # augmentation of images; None: no augmentation

    strong_views: tuple[int, ...] = ()  # numbers of the views that are also distorted
    copies: dict[torch.device, Tensor] = field(default_factory=dict, init=False, repr=False)  # of x, by device

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.x.shape[1], self.crop.size, self.crop.size) if self.crop else tuple(self.x.shape[1:])

    @property
    def device(self) -> torch.device:
        return self.x.device

    def __len__(self) -> int:
        return len(self.x)

    def to(self, device: torch.device | str) -> Self:
        device = torch.device(device)
        if device not in self.copies:
            self.copies[device] = self.x.to(device)
        return replace(self, x=self.copies[device], scale=Scale(*(t.to(device) for t in self.scale)))

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
        """Read `part` of the rows, which are on the device. No operation synchronizes with the host."""
        x = self.x[rows[part]]
        if augment and self.crop:
            return tuple(self._augment(x, view, generator, part, len(rows)) for view in range(views))
        return (self._normalize(self.crop.center(x) if self.crop else x),) * views

    def _augment(self, x: Tensor, view: int, generator: Generator, part: slice, whole: int) -> Tensor:
        assert self.crop is not None
        x = self.crop.train(x, generator, part, whole)
        if view in self.strong_views:
            x = distort(x, generator, part, whole)
        return self._normalize(x)

    def _normalize(self, x: Tensor) -> Tensor:
        return (x.to(self.scale.mean.dtype) - self.scale.mean) / self.scale.std

    def replace_inputs(self, rows: Tensor, other: Examples, other_rows: Tensor) -> Self:
        if not isinstance(other, TensorExamples) or other.x.shape[1:] != self.x.shape[1:]:
            other_shape = tuple(other.x.shape[1:]) if isinstance(other, TensorExamples) else "files"
            shape = tuple(self.x.shape[1:])
            raise UserError(f"open_set noise needs inputs of the same shape {shape}, got {other_shape}")
        x = self.x.clone()
        x[rows] = other.x[other_rows].to(x)
        return replace(self, x=x)

    def fit_scale(self, rows: Tensor) -> Scale | None:  # noqa: ARG002
        return None

    def with_scale(self, scale: Scale) -> Self:
        return replace(self, scale=scale)

    def digest(self) -> str:
        x = self.x.cpu().contiguous()
        content = hashlib.sha256(f"{x.dtype} {tuple(x.shape)}".encode())
        content.update(x.numpy().data if x.numel() else b"")
        return content.hexdigest()

    def flat(self, rows: Tensor) -> Tensor:
        return self.x[rows].flatten(1).float()

    def form(self) -> dict[str, Any] | None:
        return {
            "features": False,
            "shape": list(self.x.shape[1:]),
            "kind": str(self.x.dtype),
            "mean": self.scale.mean.cpu(),
            "std": self.scale.std.cpu(),
            "crop": asdict(self.crop) if self.crop else None,
            "columns": None,
        }

    @classmethod
    def from_form(cls, form: Mapping[str, Any]) -> Self:
        """Examples without rows of a stored form. Raises ValueError, TypeError, KeyError or RuntimeError if invalid."""
        shape = tuple(form["shape"])
        check_form(bool(shape) and all(is_integer(side) and side >= 1 for side in shape), "shape", shape)
        scale = Scale(form["mean"], form["std"])
        for name, t in scale._asdict().items():
            valid = isinstance(t, Tensor) and t.is_floating_point() and not bool(t.isnan().any())
            check_form(valid and t.ndim <= len(shape) and t.expand(shape).shape == shape, name, t)
        crop = None if form["crop"] is None else Crop(**form["crop"])
        if crop is not None:
            fits = len(shape) == 3 and is_integer(crop.size) and 1 <= crop.size <= min(shape[1:])
            check_form(fits, "crop", crop)
        return cls(torch.empty((0, *shape), dtype=_DTYPES[form["kind"]]), scale, crop)


def is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def check_form(valid: bool, name: str, value: object) -> None:
    """Raise a ValueError if part of a stored form is invalid."""
    if not valid:
        raise ValueError(f"{name} is {str(value)[:200]}")
