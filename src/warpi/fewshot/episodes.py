"""Sample episodes on the device: draw integer indices, then gather the examples."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Generator, Tensor

from warpi.data.augment import Crop
from warpi.errors import UserError
from warpi.fewshot.data import Classes, Sines
from warpi.fewshot.learner import Episode
from warpi.fewshot.learners.embedding import scale_pixels
from warpi.utils.seeding import generator

_BLOCK = 10  # tasks drawn from one seed, so that a test set does not depend on the evaluation batch size


class Kind(NamedTuple):
    """The size of a task."""

    ways: int  # classes; 0: regression
    shots: int  # support examples per class (in regression: per task)
    queries: int  # query examples per class or task; outside training, regression is evaluated on a grid


def task_name(ways: int, shots: int) -> str:
    """A name such as 5-way 1-shot, or 5-shot for regression."""
    return f"{ways}-way {shots}-shot" if ways else f"{shots}-shot"


Plan = tuple[Tensor, ...]
"""Everything that is drawn at random for T tasks; the first dimension of each tensor is T."""


@dataclass(frozen=True, eq=False)
class Tasks(ABC):
    """All tasks of one kind. The generator's device draws the random numbers, the data's device reads the examples."""

    kind: Kind

    def __post_init__(self) -> None:
        if self.kind.shots < 1 or self.kind.queries < 1:
            raise UserError(f"shots and queries must be at least 1, got {self.kind.shots} and {self.kind.queries}")

    @abstractmethod
    def plan(self, n: int, generator: Generator) -> Plan:
        """Draw everything that is random about n tasks."""

    @abstractmethod
    def read(self, plan: Plan) -> Episode:
        """Read the examples of planned tasks."""

    def draw(self, n: int, generator: Generator) -> Episode:
        """Draw n tasks for training."""
        return self.read(self.plan(n, generator))

    def fixed(self, n: int, seed: int, name: str, at_once: int) -> Iterator[Episode]:
        """The first n tasks identified by `seed` and `name`: the same on every machine and device."""
        names = (name, *self.kind)
        blocks = [self.plan(_BLOCK, generator(seed, "episodes", *names, i)) for i in range(-(-n // _BLOCK))]
        plan = [torch.cat(parts)[:n] for parts in zip(*blocks, strict=True)]
        for i in range(0, n, at_once):
            yield self.read(tuple(part[i : i + at_once] for part in plan))


@dataclass(frozen=True, eq=False)
class ImageTasks(Tasks):
    """Tasks with W distinct classes and S + Q distinct images of each."""

    source: Classes
    vary: Callable[[Tensor, Generator], Tensor] | None = None  # augmentation of training images
    part: str = ""  # name of the part of the data, for messages

    def __post_init__(self) -> None:
        ways, shots, queries = self.kind
        smallest = self.source.least
        if not 2 <= ways <= len(self.source):
            what = f"{self.part} classes" if self.part else "classes here"
            raise UserError(f"ways must be between 2 and {len(self.source)}, the number of {what}; got {ways}")
        super().__post_init__()
        if shots + queries > smallest:
            raise UserError(
                f"{shots} shots and {queries} queries need more images than the smallest class has ({smallest}); lower "
                "--queries"
            )

    def plan(self, n: int, generator: Generator) -> Plan:
        """Classes [T, W], and indices of images within their class [T, W, S + Q]."""
        ways, shots, queries = self.kind
        device = generator.device
        count = self.source.count.to(device)
        classes = torch.rand(n, len(self.source), generator=generator, device=device).topk(ways).indices
        keys = torch.rand(n, ways, self.source.most, generator=generator, device=device)
        beyond = torch.arange(self.source.most, device=device) >= count[classes % len(count)][..., None]
        return classes, keys.masked_fill(beyond, -1).topk(shots + queries).indices

    def read(self, plan: Plan) -> Episode:
        return self._episode(self._images(plan))

    def draw(self, n: int, generator: Generator) -> Episode:
        x = self._images(self.plan(n, generator))
        return self._episode(x if self.vary is None else self.vary(x, generator))

    def _images(self, plan: Plan) -> Tensor:
        """[T, W, S + Q, C, H, W]"""
        source = self.source
        k = len(source.names)
        classes, places = (part.to(source.x.device) for part in plan)
        x = source.x[source.first[classes % k][..., None] + places]
        if source.rotations > 1:
            turns = (classes // k)[(...,) + (None,) * 4]
            for r in range(1, source.rotations):
                x = torch.where(turns == r, x.rot90(r, (-2, -1)), x)
        return x

    def _episode(self, x: Tensor) -> Episode:
        ways, shots, _ = self.kind
        y = torch.arange(ways, device=x.device)[None, :, None].expand(x.shape[:3])
        support, query = slice(None, shots), slice(shots, None)
        xs, ys, xq, yq = (t[:, :, part].flatten(1, 2) for part in (support, query) for t in (x, y))
        return Episode(xs, ys, xq, yq, ways)


def random_crop(x: Tensor, generator: Generator) -> Tensor:
    """Shift each photograph [T, W, N, C, H, W] by up to an eighth of its side, and mirror half of them."""
    side = x.shape[-1]
    moved = Crop(side, pad=side // 8).train(x.flatten(0, 2), generator).view(x.shape)
    return moved / 255 if x.dtype == torch.uint8 else moved


def random_affine(
    x: Tensor, generator: Generator, per_class: float = 0.25, per_image: float = 0.15, shift: float = 0.05
) -> Tensor:
    """Apply random linear maps I + U(-a, a) to drawings [T, W, N, C, H, W] on an empty background.

    One map is shared by all images of a class (a = `per_class`, half of the classes mirrored) and turns it into a new
    class, as a rotation by 90 degrees does. Another one is drawn per image (a = `per_image`), with a shift of up to
    `shift` of its side.
    """
    T, W, N = x.shape[:3]

    def uniform(a: float, *shape: int) -> Tensor:
        return a * (2 * torch.rand(shape, generator=generator, device=x.device) - 1)

    one = torch.eye(2, device=x.device)
    side = torch.where(uniform(1, T, W, 1, 1, 1) < 0, -1.0, 1.0)
    mirror = torch.cat([side, torch.ones_like(side)], -1)  # [T, W, 1, 1, 2]: flips the first column
    maps = (one + uniform(per_class, T, W, 1, 2, 2)) * mirror @ (one + uniform(per_image, T, W, N, 2, 2))
    maps = torch.cat([maps, uniform(2 * shift, T, W, N, 2, 1)], -1).flatten(0, 2)  # [T W N, 2, 3]
    images = scale_pixels(x.flatten(0, 2))
    grid = F.affine_grid(maps, list(images.shape), align_corners=False)
    return F.grid_sample(images, grid, align_corners=False).view(x.shape)


@dataclass(frozen=True, eq=False)
class SineTasks(Tasks):
    """Sinusoids. Training queries are drawn at random, others lie on a grid."""

    source: Sines
    grid: bool = True
    device: torch.device | str = "cpu"

    def __post_init__(self) -> None:
        if self.kind.ways:
            raise UserError(f"sines are regression and have no classes; leave out --ways {self.kind.ways}")
        super().__post_init__()

    def plan(self, n: int, generator: Generator) -> Plan:
        """Functions [T, 3], inputs of the support [T, S, 1] and of the queries [T, Q, 1]."""
        functions = self.source.functions(n, generator)
        support = self.source.points(n, self.kind.shots, generator)
        if self.grid:
            return functions, support, self.source.grid(self.kind.queries).expand(n, -1, -1)
        return functions, support, self.source.points(n, self.kind.queries, generator)

    def read(self, plan: Plan) -> Episode:
        functions, xs, xq = (part.to(self.device) for part in plan)
        return Episode(xs, Sines.values(functions, xs), xq, Sines.values(functions, xq))


def make_tasks(
    source: Classes | Sines, kind: Kind, device: torch.device | str, training: bool, augment: bool, part: str = ""
) -> Tasks:
    """Tasks from one part of a data set that is on the device; error messages call it `part`."""
    if isinstance(source, Sines):
        if augment:
            raise UserError("only images can be augmented; leave out --augment")
        return SineTasks(kind, source, grid=not training, device=device)
    if augment and (source.x.dim() != 4 or source.x.shape[-2] != source.x.shape[-1]):
        shape = tuple(source.x.shape[1:])
        raise UserError(f"only square images can be augmented, but these inputs are {shape}; leave out --augment")
    vary = None
    if augment and training:
        drawings = source.rotations > 1  # if a rotated image is another class, so is a mirrored one
        vary = random_affine if drawings else random_crop
    return ImageTasks(kind, source, vary, part)
