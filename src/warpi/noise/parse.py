"""Parse descriptions of label noise, written as `KIND[:ARG][,option=value...]`, and apply them to a data set."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import torch
from torch import Generator

from warpi.data.dataset import Dataset
from warpi.data.examples import Examples, TensorExamples
from warpi.errors import UserError, unknown
from warpi.noise import kinds
from warpi.noise.kinds import NoisyLabels
from warpi.noise.matrix_file import SUFFIXES, read_matrix
from warpi.noise.noise_file import read_noise_file, read_noise_name


@dataclass(frozen=True)
class NoiseEntry:
    """One line of `warpi list noises`. An option whose default is None is required."""

    summary: str
    options: Mapping[str, int | str | None] = field(default_factory=dict)


NOISES: dict[str, NoiseEntry] = {
    "uniform": NoiseEntry("any class at random, the true one included (WarPI, MW-Net, L2RW, GLC)"),
    "symmetric": NoiseEntry("any other class at random (Co-teaching, JoCoR, PLC)"),
    "flip": NoiseEntry("a fixed other class for each class (WarPI)", {"map_seed": 1}),
    "flip2": NoiseEntry("one of two fixed other classes for each class, half the rate each (MW-Net)", {"map_seed": 1}),
    "pair": NoiseEntry("the next class (Co-teaching)"),
    "asymmetric": NoiseEntry("a similar class: CIFAR-10, or data with superclasses (Forward, DivideMix, ELR)"),
    "hierarchical": NoiseEntry("any other class of the same superclass (GLC)"),
    "instance": NoiseEntry("depends on the input (PTD); scale: raw, unit or standard", {"scale": "raw"}),
    "open_set": NoiseEntry("inputs of another data set with labels of this one", {"from": None}),
    "matrix": NoiseEntry("drawn from a transition matrix: matrix:FILE (.npy, .csv or .json, one row per true class)"),
    "given": NoiseEntry("the labels as they are; or of a label set: given:NAME; or of a noise file: given:FILE.json"),
}


@dataclass(frozen=True)
class Noise:
    """Label noise, written as `KIND[:ARG][,option=value...]`. Use `Noise.parse` to create a checked instance."""

    kind: str
    rate: float | None = None  # None for `given` and `matrix`
    source: str | None = None  # `given`: a label set or noise file, None for unchanged labels; `matrix`: a file
    options: tuple[tuple[str, int | str], ...] = ()  # sorted, without those that have their default value

    @classmethod
    def parse(cls, text: str) -> "Noise":
        """Parse e.g. `flip:0.4`, `flip:0.4,map_seed=3`, `open_set:0.2,from=cifar100`, `given:worst`, `given:a.json`."""
        kind, colon, source = (part.strip() for part in text.partition(":"))
        if kind == "given":
            if colon and not source:
                raise UserError("noise 'given:' needs a label set or a noise file after the colon; or write 'given'")
            return cls(kind, source=source or None)
        if kind == "matrix":
            if Path(source).suffix.lower() not in SUFFIXES:
                raise UserError(
                    f"noise 'matrix' takes a file with a transition matrix ({', '.join(SUFFIXES)}), got {source!r}; "
                    "write e.g. matrix:T.csv"
                )
            return cls(kind, source=source)
        head, *settings = text.split(",")
        kind, _, rate = (part.strip() for part in head.partition(":"))
        if kind not in NOISES:
            raise unknown("noise", kind, NOISES)
        options = _parse_options(kind, settings)  # before the rate, because its errors are more specific
        return cls(kind, _parse_rate(kind, rate), options=options)

    def __str__(self) -> str:
        if self.rate is None:
            return self.kind if self.source is None else f"{self.kind}:{self.source}"
        return ",".join([f"{self.kind}:{self.rate}", *(f"{name}={value}" for name, value in self.options)])

    @property
    def file(self) -> str | None:
        """The noise file or matrix file, or None."""
        is_noise_file = self.source is not None and self.source.endswith(".json")
        return self.source if self.kind == "matrix" or is_noise_file else None

    @property
    def other_name(self) -> str | None:
        """Name of the data set from which open-set noise takes inputs; None for other noise. The caller loads it."""
        if self.kind == "given" and self.file:
            noise = read_noise_name(self.file)
            return Noise.parse(noise).other_name if noise.startswith("open_set") else None
        name = dict(self.options).get("from")
        return None if name is None else str(name)

    def apply(self, dataset: Dataset, generator: Generator, other: Dataset | None = None) -> NoisyLabels:
        """Corrupt the labels of all N rows. `other` is the data set named `other_name`."""
        if self.kind == "given":
            return self._read_given_labels(dataset, other)
        if self.kind == "matrix":
            return kinds.matrix(dataset.y, read_matrix(cast(str, self.source), dataset.classes), generator)
        settings: dict[str, Any] = {**NOISES[self.kind].options, **dict(self.options)}
        arguments = (dataset.y, dataset.n_classes, cast(float, self.rate), generator)
        match self.kind:
            case "asymmetric":
                return kinds.asymmetric(*arguments, dataset.classes, dataset.superclass)
            case "hierarchical":
                return kinds.hierarchical(*arguments, dataset.superclass)
            case "instance":
                largest = _max_input_value(dataset.examples)
                return kinds.instance(*arguments, dataset.examples.flat, max_value=largest, **settings)
            case "open_set":
                return kinds.open_set(*arguments, _count_other_inputs(dataset, other))
        labels: NoisyLabels = getattr(kinds, self.kind)(*arguments, **settings)  # the others use only the labels
        return labels

    def check(self, dataset: Dataset, other: Dataset | None = None) -> None:
        """Raise an error if a file or label set is missing or does not match the data set, without drawing noise."""
        if self.kind == "given":
            self._read_given_labels(dataset, other)
        elif self.kind == "matrix":
            read_matrix(cast(str, self.source), dataset.classes)

    def _read_given_labels(self, dataset: Dataset, other: Dataset | None) -> NoisyLabels:
        if self.source is None:
            return kinds.given(dataset.y, dataset.n_classes, dataset.clean)
        if self.file is None:
            if not dataset.label_sets:
                advice = "put the CIFAR-N files into its folder, or " if dataset.name.startswith("cifar") else ""
                raise UserError(f"{dataset.name!r} has no label sets; {advice}use a noise file *.json, or only 'given'")
            if self.source not in dataset.label_sets:
                raise unknown(f"label set of {dataset.name}", self.source, dataset.label_sets)
            return kinds.given(dataset.label_sets[self.source], dataset.n_classes, dataset.clean)
        labels = read_noise_file(self.source, dataset)
        if labels.replaced is not None:
            last = int(labels.replaced.max())
            n_other = _count_other_inputs(dataset, other)
            if last >= n_other:
                raise UserError(
                    f"noise file {self.source} uses row {last} of the other data set, which has only {n_other} rows; "
                    "use the data set with which the noise file was made"
                )
        return labels


def _parse_rate(kind: str, text: str) -> float:
    try:
        rate = float(text)
    except ValueError:
        raise UserError(f"noise {kind!r} needs a rate, got {text!r}; write e.g. {kind}:0.4") from None
    kinds.check_rate(kind, n_classes=2**31, rate=rate)
    return rate + 0.0  # turns -0.0 into 0.0


def _parse_options(kind: str, settings: Iterable[str]) -> tuple[tuple[str, int | str], ...]:
    defaults = NOISES[kind].options
    options: dict[str, int | str] = {}
    for setting in settings:
        name, _, text = (part.strip() for part in setting.partition("="))
        if not defaults:
            raise UserError(f"noise {kind!r} takes no options, got {setting!r}")
        if name not in defaults:
            raise unknown(f"option of noise {kind!r}", name, defaults)
        if name in options or not text:
            raise UserError(f"noise {kind!r}: set option {name!r} once and with a value, as {name}=VALUE")
        if name == "scale" and text not in kinds.SCALES:
            raise unknown("scale of instance noise", text, kinds.SCALES)
        if name == "map_seed" and not (text.isascii() and text.isdigit() and int(text) < 2**32):
            raise UserError(f"noise {kind!r}: map_seed must be an integer from 0 to 2**32-1, got {text!r}")
        options[name] = int(text) if name == "map_seed" else text
    for name, default in defaults.items():
        if default is None and name not in options:
            raise UserError(f"noise {kind!r} needs the option {name!r}; write e.g. {kind}:0.2,{name}=cifar100")
    return tuple(sorted((name, value) for name, value in options.items() if value != defaults[name]))


def _count_other_inputs(dataset: Dataset, other: Dataset | None) -> int:
    if other is None:
        raise UserError("open_set noise needs another data set; name it, e.g. open_set:0.2,from=cifar100")
    if other.name == dataset.name:
        raise UserError(f"open_set noise needs inputs of another data set, got {other.name!r} for both")
    return len(other.examples)


def _max_input_value(examples: Examples) -> float | None:
    """255 for images stored as bytes or in files; None for features, which have no bound."""
    if isinstance(examples, TensorExamples):
        return 255.0 if examples.x.dtype == torch.uint8 else None
    return 255.0 if len(examples.shape) == 3 else None
