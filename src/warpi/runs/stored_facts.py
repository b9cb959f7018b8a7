"""Facts about the data that a run stores in `spec.json`: one table for resuming, comparing and reporting.

A path or a name alone does not identify the data; these counts and SHA-256 fingerprints do. Does not load torch.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

Facts = Mapping[str, Any]
"""The entry `facts` of `spec.json`."""


@dataclass(frozen=True)
class Fact:
    """One entry of `facts`, and what it is used for."""

    name: str
    kind: type = str
    shown: str | None = None  # how reports show it; runs that differ in it belong to different experiments
    subject: str = "the data or the network"  # what has changed if the run cannot be resumed
    newer: bool = False  # older runs do not store it
    packed: bool = False  # is also in the checkpoint, which must belong to the same run
    decides_test: bool = False  # methods are compared only between runs in which it is equal


FACTS = (
    Fact("n_train", int, subject="the number of training rows", packed=True),
    Fact("n_meta", int, subject="the number of trusted examples", packed=True),
    Fact("n_val", int, subject="the number of validation rows", packed=True),
    Fact("n_test", int, subject="the number of test rows", decides_test=True),
    Fact("n_classes", int, "{} classes", "the number of classes", packed=True),
    Fact("inputs_sha256", str, "inputs {:.8}", packed=True, decides_test=True),
    Fact("n_parameters", int, "{} parameters"),
    Fact("noise_sha256", packed=True, decides_test=True),  # the labels that were trained on
    Fact("matrix_file_sha256", str, "matrix {:.8}", "the matrix file"),
    Fact("noise_file_sha256", str, "labels {:.8}", "the label file", newer=True),
    Fact("labels_sha256", str, "given labels {:.8}", "a label of the data", newer=True, decides_test=True),
    Fact("files_sha256", str, "image files {:.8}", "an image file", newer=True, decides_test=True),
    Fact("meta_sha256", str, "trusted {:.8}", "the set of trusted examples", newer=True),
    Fact("test_set_sha256", str, "test set {:.8}", "the test set", newer=True, decides_test=True),
    Fact("other_sha256", str, "open set {:.8}", newer=True, decides_test=True),
    Fact("embedder", str, "features by {}", "the embedder of the features", newer=True),
    Fact("embedder_sha256", str, "embedder {:.8}", "the weights of the embedder", newer=True),
    Fact("weights_sha256", str, "weights {:.8}", "the weight file", newer=True),
    Fact("test_sha256", newer=True, decides_test=True),  # the rows that were held out
)

PACKED_FACTS = tuple(fact.name for fact in FACTS if fact.packed)
"""Names of the facts that a checkpoint also stores."""
_BASE = tuple(fact for fact in FACTS if fact.shown and not fact.newer)
_NEWER = tuple(fact for fact in FACTS if fact.shown and fact.newer)


class _Absent:
    def __repr__(self) -> str:
        return "absent"


ABSENT = _Absent()
"""Stands for a value that one side of a `Difference` does not have."""


class Difference(NamedTuple):
    """A name with two different values."""

    name: str
    before: Any
    after: Any


def differences(
    before: Mapping[str, Any], after: Mapping[str, Any], *, ignore: Iterable[str] = (), shared: bool = False
) -> list[Difference]:
    """Compare two flat mappings by name. With `shared`, only names that both have count."""
    names = [name for name in {**before, **after} if name not in ignore]
    if shared:
        names = [name for name in names if name in before and name in after]
    pairs = (Difference(name, before.get(name, ABSENT), after.get(name, ABSENT)) for name in names)
    return [pair for pair in pairs if pair.before != pair.after]


def changed_facts(before: Facts, after: Facts, facts: Iterable[Fact] = FACTS) -> list[tuple[Fact, Any, Any]]:
    """The facts that differ, with both values. A newer fact that one side does not store counts as equal."""
    known = (fact for fact in facts if not fact.newer or (fact.name in before and fact.name in after))
    values = ((fact, before.get(fact.name), after.get(fact.name)) for fact in known)
    return [(fact, old, new) for fact, old, new in values if old != new]


def data_hashes(facts: Facts) -> dict[str, str]:
    """The fingerprints of the data that a run stores, by short name."""
    names = (fact.name for fact in FACTS if fact.name.endswith("_sha256") and fact.name != "test_sha256")
    return {name.removesuffix("_sha256"): facts[name] for name in names if facts.get(name)}


def base_key(facts: Facts) -> list[Any]:
    """Values that are equal in all runs of one experiment."""
    return [facts.get(fact.name) for fact in _BASE]


def later_keys(runs: Sequence[Facts]) -> list[str]:
    """One key per run, for runs with the same `base_key`; runs of one experiment have the same key.

    If runs differ in a newer fact, the runs that do not store it form a separate group, since they could belong to any
    of the others.
    """
    differ = [f.name for f in _NEWER if len({json.dumps(facts[f.name]) for facts in runs if f.name in facts}) > 1]
    return [json.dumps([[name in facts, facts.get(name)] for name in differ]) for facts in runs]


def describe_differences(runs: Sequence[Facts]) -> list[list[str]]:
    """For each run, the facts that are not equal in all runs, in words."""
    shown = (*_BASE, *_NEWER)
    differ = [fact for fact in shown if len({json.dumps(facts.get(fact.name)) for facts in runs}) > 1]

    def describe(facts: Facts, fact: Fact) -> str:
        assert fact.shown is not None
        absent = "none" if fact.newer and fact.name in facts else "unknown"
        value = facts.get(fact.name)
        return fact.shown.format(absent if value is None else str(value))

    return [[describe(facts, fact) for fact in differ] for facts in runs]


def same_test_set(a: Facts, b: Facts, trusted: bool) -> bool:
    """Whether two runs learned from the same noisy labels and were tested on the same rows, as far as they store it.

    With `trusted`, the trusted examples must also be the same.
    """
    if not (a.get("inputs_sha256") and a.get("noise_sha256")):
        return False
    return not changed_facts(a, b, [f for f in FACTS if f.decides_test or (trusted and f.name == "meta_sha256")])
