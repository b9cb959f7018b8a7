"""What a page shows of a run beyond its results, as plain values: whoever has weights, data and audit fills it in."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from numpy.typing import NDArray

Counts = NDArray[Any]


class Losses(NamedTuple):
    """Losses of the training examples, by whether their label is right, wrong or unknown."""

    name: str
    counts: Mapping[str, Counts]  # [bins] each
    means: Mapping[str, float]


class Suspect(NamedTuple):
    """An example whose label is doubted."""

    row: int  # of the data
    given: str
    suggested: str
    wrong: float  # probability
    uncertainty: float
    picture: tuple[str, bytes] | None  # type and content
    words: tuple[tuple[str, str], ...]  # names and values: where from, and what it is where there is no picture
    small: bool  # a picture of few pixels, which should be seen


class ClassRate(NamedTuple):
    """How many labels of a class are wrong."""

    name: str
    n: int
    rate: float
    low: float
    high: float
    issues: int
    instead: str  # the class most often suggested


@dataclass(frozen=True)
class Audited:
    """What an audit found."""

    n: int
    n_issues: int
    noise_rate: tuple[float, float, float]  # and its interval
    by_class: tuple[ClassRate, ...]
    probabilities: str  # where they come from
    uncertainty: str  # what it is
    trusted: float | None  # share of the trusted examples that the classifier is right about
    suspects: tuple[Suspect, ...]

    @property
    def pictures(self) -> bool:
        return any(s.picture is not None for s in self.suspects)


@dataclass(frozen=True)
class Detail:
    """A run as its weights, its data and its audit show it. None, or empty: not known."""

    run: Path
    classes: tuple[str, ...] = ()
    test: Counts | None = None  # [K, K] true class, predicted class
    train: Counts | None = None  # [K, K] given label, predicted class
    edges: Counts | None = None  # of the bins of `losses`
    losses: tuple[Losses, ...] = ()
    audit: Audited | None = None
    missing: tuple[str, ...] = ()  # what could not be had, and why
