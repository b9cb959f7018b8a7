"""Placeholders for inputs that are not available, of which only the form is known."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Never, Self

import torch

from warpi.data.examples import Examples, TensorExamples
from warpi.data.image_files import FileExamples
from warpi.data.numeric import Embedded, Features
from warpi.data.sparse import SparseExamples
from warpi.errors import UserError


class InputsNotAvailable(UserError):
    """The inputs of a run are needed, but only their form is known. A caller that can read them does so."""


@dataclass(frozen=True, eq=False)
class PlaceholderExamples(Examples):
    """Stands in for N inputs that are not available. All but their number and shape raises `InputsNotAvailable`."""

    like: Examples  # examples of the same form; their number does not matter
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

    def _refuse(self, *_: Any, **__: Any) -> Never:
        raise InputsNotAvailable("the run's method uses its training inputs, so the data must be in place, unchanged")

    stream = replace_inputs = fit_scale = with_scale = digest = flat = _refuse

    def __getattr__(self, name: str) -> Never:
        if name.startswith("__"):  # looked up by `copy` and others
            raise AttributeError(name)
        self._refuse()


def examples_from_form(form: Mapping[str, Any]) -> Examples:
    """Examples without rows, of the form that `Examples.form` returned.

    Raises ValueError, TypeError, KeyError or RuntimeError if the form is invalid.
    """
    kind: type[FileExamples | TensorExamples | SparseExamples] = TensorExamples
    if "size" in form:
        kind = FileExamples
    elif "sparse" in form:
        kind = SparseExamples
    elif form["features"]:
        kind = Embedded if "embedder" in form else Features
    return kind.from_form(form)
