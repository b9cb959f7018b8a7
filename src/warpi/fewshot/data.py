"""Data for few-shot tasks: images or vectors by class, sinusoids, and data sets with train, val and test parts."""

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Generator, Tensor

from warpi.datasets.delimited_files import shorten_list
from warpi.errors import UserError

PARTS = ("train", "val", "test")

Values = Tensor | NDArray[Any] | Sequence[Any]
"""Types that are accepted instead of a tensor."""


def as_tensor(values: Values, what: str) -> Tensor:
    """Convert values to a tensor; errors call them `what`."""
    try:
        return values if isinstance(values, Tensor) else torch.from_numpy(np.array(values, order="C"))
    except (TypeError, ValueError, RuntimeError) as e:
        raise UserError(f"{what} must be a tensor, an array or a list with rows of equal length: {e}") from e


@dataclass(frozen=True, eq=False)
class Classes:
    """Images (or vectors) of K classes, sorted by class."""

    x: Tensor  # [N, C, H, W] uint8, or floats in [0, 1]; or [N, D] float32
    first: Tensor  # [K] row of the first image of each class
    count: Tensor  # [K] number of images of each class
    names: tuple[str, ...]
    least: int  # size of the smallest class
    most: int  # size of the largest class; a number, since reading a tensor on a GPU would block the step
    rotations: int = 1  # 4: every class rotated by 90, 180 and 270 degrees counts as three more classes

    @classmethod
    def of(cls, images: Mapping[str, Values], rotations: int = 1) -> Self:
        """Build from the images [n, C, H, W], or vectors [n, D], of each class."""
        parts = {name: _inputs(x, name) for name, x in images.items()}
        if not parts:
            raise UserError("no classes were given; write Classes.of({'cat': images, ...})")
        forms = {name: (tuple(x.shape[1:]), x.dtype) for name, x in parts.items()}
        (first, form), *others = forms.items()
        if other := next((name for name, its in others if its != form), None):
            raise UserError(f"{first!r} has inputs {form}, and {other!r} has {forms[other]}; they must be equal")
        if rotations > 1 and (len(form[0]) != 3 or form[0][1] != form[0][2]):
            raise UserError(f"only square images can be rotated, got inputs of shape {form[0]}; leave out rotations")
        sizes = [len(x) for x in parts.values()]
        x = torch.cat(list(parts.values()))
        count = torch.tensor(sizes)
        return cls(x, count.cumsum(0) - count, count, tuple(parts), min(sizes), max(sizes), rotations)

    def __len__(self) -> int:
        """Number of classes that a task can choose from."""
        return len(self.names) * self.rotations

    def to(self, device: torch.device | str) -> Self:
        return replace(self, x=self.x.to(device), first=self.first.to(device), count=self.count.to(device))

    def digest(self) -> str:
        """A hash of the data, with which a run checks that its data has not changed."""
        content = hashlib.sha256(f"{tuple(self.x.shape)} {self.count.tolist()} {self.names} {self.rotations}".encode())
        content.update(self.x.cpu().contiguous().numpy().data)
        return content.hexdigest()


def _inputs(values: Values, name: str) -> Tensor:
    """Check the images or vectors of a class; returns uint8 or float32."""
    x = as_tensor(values, f"the inputs of class {name!r}")
    if x.dim() not in (2, 4) or not x.numel():
        raise UserError(f"class {name!r} must have images [n, C, H, W] or vectors [n, D], got shape {tuple(x.shape)}")
    if x.dim() == 4 and not (x.is_floating_point() or x.dtype == torch.uint8):
        raise UserError(f"images must be bytes (uint8) or floats in [0, 1], got {x.dtype} for {name!r}; convert them")
    return x if x.dtype == torch.uint8 else x.float()


@dataclass(frozen=True)
class Sines:
    """Functions y = A sin(w x + b), with A, w, b and x drawn uniformly (Zhen et al. 2020, section 5.1)."""

    amplitude: tuple[float, float] = (0.1, 5.0)
    frequency: tuple[float, float] = (0.8, 1.2)
    phase: tuple[float, float] = (0.0, math.pi)
    interval: tuple[float, float] = (-5.0, 5.0)

    def functions(self, tasks: int, generator: Generator) -> Tensor:
        """A, w and b of each task.  [T, 3]"""
        ranges = (self.amplitude, self.frequency, self.phase)
        u = torch.rand(tasks, 3, generator=generator, device=generator.device).unbind(1)
        return torch.stack([low + (high - low) * v for (low, high), v in zip(ranges, u, strict=True)], dim=1)

    def points(self, tasks: int, n: int, generator: Generator) -> Tensor:
        """Inputs of each task.  [T, n, 1]"""
        low, high = self.interval
        return low + (high - low) * torch.rand(tasks, n, 1, generator=generator, device=generator.device)

    def grid(self, n: int = 50) -> Tensor:
        """n equally spaced inputs, including the left end and excluding the right end.  [n, 1]"""
        low, high = self.interval
        return low + (high - low) / n * torch.arange(n)[:, None]

    @staticmethod
    def values(functions: Tensor, x: Tensor) -> Tensor:
        """functions [T, 3], x [T, n, 1] -> y [T, n, 1]"""
        a, w, b = functions[:, :, None, None].unbind(1)  # each [T, 1, 1]
        return a * torch.sin(w * x + b)


class FewShotData(NamedTuple):
    """The source of tasks: three parts with different classes, or functions."""

    name: str
    train: Classes | Sines
    val: Classes | Sines
    test: Classes | Sines

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of one input."""
        return tuple(self.train.x.shape[1:]) if isinstance(self.train, Classes) else (1,)

    @property
    def regression(self) -> bool:
        return isinstance(self.train, Sines)

    def part(self, name: str) -> Classes | Sines:
        part: Classes | Sines = getattr(self, name)
        return part

    def check(self) -> None:
        """Raise if two parts share a class or have inputs of different shapes."""
        parts = {name: part for name in PARTS if isinstance(part := self.part(name), Classes)}
        if parts and len(parts) < len(PARTS):
            raise UserError(
                f"only {', '.join(parts)} of {', '.join(PARTS)} are Classes; use the same type for all parts"
            )
        for a, b in combinations(parts, 2):
            if shared := sorted({*parts[a].names} & {*parts[b].names}):
                raise UserError(f"{a} and {b} share classes: {shorten_list(shared)}; put each class into one part only")
            if (one := parts[a].x.shape[1:]) != (other := parts[b].x.shape[1:]):
                raise UserError(f"inputs of {a} are {tuple(one)}, those of {b} are {tuple(other)}; they must be equal")

    def to(self, device: torch.device | str) -> "FewShotData":
        parts = (self.part(name) for name in PARTS)
        return FewShotData(self.name, *(p.to(device) if isinstance(p, Classes) else p for p in parts))

    def digest(self) -> str:
        return " ".join(p.digest() if isinstance(p, Classes) else repr(p) for p in self[1:])
