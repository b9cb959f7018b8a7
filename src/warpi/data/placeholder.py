"""Inputs that are not there: of which form they are, so that others can be read as they were."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Never, Self

import torch
from torch import Tensor

from warpi.data.augment import Crop
from warpi.data.examples import Examples, Scale, TensorExamples
from warpi.data.image_files import Decoded, FileExamples
from warpi.data.numeric import Columns, Features
from warpi.errors import UserError

_KINDS = {str(kind): kind for kind in (torch.uint8, torch.float32, torch.float64)}


class InputsNotAvailable(UserError):
    """The inputs of a run are wanted where only their form is known. Whoever can, reads them."""


@dataclass(frozen=True, eq=False)
class PlaceholderExamples(Examples):
    """N inputs that cannot be read. Whoever looks at more than their number and shape is told so."""

    like: Examples  # of the same form: any number of rows, which are not looked at
    n: int

    @property
    def shape(self) -> tuple[int, ...]:
        return self.like.shape

    @property
    def device(self) -> torch.device:
        return self.like.device

    def __len__(self) -> int:
        return self.n

    def to(self, device: torch.device | str) -> Self:
        return replace(self, like=self.like.to(device))

    def _absent(self, *_: Any, **__: Any) -> Never:
        raise InputsNotAvailable(
            "the method of the run looks at inputs that it was trained on, so these must be there, unchanged"
        )

    stream = replace_inputs = fit_scale = with_scale = digest = flat = _absent

    def __getattr__(self, name: str) -> Never:
        if name.startswith("__"):  # what copy and its like try
            raise AttributeError(name)
        self._absent()


def form_of(examples: Examples) -> dict[str, Any] | None:
    """What new inputs are read by, as plain values and tensors; None where files hold no such inputs."""
    if are_image_files(examples):
        return {"size": examples.shape[-1]}
    if not isinstance(examples, TensorExamples):
        return None
    columns = examples.columns if isinstance(examples, Features) else None
    return {
        "features": isinstance(examples, Features),
        "shape": list(examples.x.shape[1:]),
        "kind": str(examples.x.dtype),
        "mean": examples.scale.mean.cpu(),
        "std": examples.scale.std.cpu(),
        "crop": asdict(examples.crop) if examples.crop else None,
        "columns": asdict(columns) if columns else None,
    }


def examples_of_form(form: Mapping[str, Any]) -> Examples:
    """Inputs of a form, none of them. A ValueError, TypeError, KeyError or RuntimeError where it is no form."""
    if "size" in form:
        _check(is_integer(form["size"]) and 1 <= form["size"] <= 10_000, "size", form["size"])
        return FileExamples("", (), form["size"])
    shape, kind, scale = tuple(form["shape"]), _KINDS[form["kind"]], Scale(form["mean"], form["std"])
    _check(bool(shape) and all(is_integer(side) and side >= 1 for side in shape), "shape", shape)
    for name, t in scale._asdict().items():
        good = isinstance(t, Tensor) and t.is_floating_point() and not bool(t.isnan().any())
        _check(good and t.ndim <= len(shape) and t.expand(shape).shape == shape, name, t)
    x = torch.empty((0, *shape), dtype=kind)
    if form["features"]:
        return Features(x, scale, columns=_columns(form["columns"], shape))
    crop = None if form["crop"] is None else Crop(**form["crop"])
    _check(
        crop is None or (len(shape) == 3 and is_integer(crop.size) and 1 <= crop.size <= min(shape[1:])), "crop", crop
    )
    return TensorExamples(x, scale, crop)


def are_image_files(examples: Examples) -> bool:
    """Whether the inputs are image files, be they read or not."""
    return isinstance(examples, FileExamples | Decoded)


def is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _columns(stored: Mapping[str, Any] | None, shape: tuple[int, ...]) -> Columns | None:
    if stored is None:
        return None
    columns = Columns(**stored)
    texts = [columns.label, *columns.drop, *columns.categories]
    for names in columns.categories.values():
        _check(names is None or (isinstance(names, tuple) and len(names) > 0), "categories", names)
        texts.extend(names or ())
    wide = sum(1 if names is None else len(names) for names in columns.categories.values())
    _check(all(isinstance(text, str) for text in texts) and shape == (wide,), "columns", texts)
    return columns


def _check(good: bool, what: str, got: object) -> None:
    if not good:
        raise ValueError(f"{what} is {str(got)[:200]}")
