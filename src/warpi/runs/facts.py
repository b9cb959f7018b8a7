"""Which facts tell runs of one specification apart: no path or name says what is behind it."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

_FACTS = {"n_classes": "{} classes", "inputs_sha256": "inputs {:.8}", "n_parameters": "{} parameters"}
_FACTS["matrix_file_sha256"] = "matrix {:.8}"  # of the file that --matrix names
_LATER = {  # these were not stored before 2026-11-16
    "noise_file_sha256": "labels {:.8}",  # of the file that --noise names
    "labels_sha256": "given labels {:.8}",  # and true ones, and marks of trusted rows
    "files_sha256": "image files {:.8}",
    "meta_sha256": "trusted {:.8}",  # a set of their own
    "test_set_sha256": "test set {:.8}",
    "other_sha256": "open set {:.8}",
    "weights_sha256": "weights {:.8}",
}


def base_key(facts: Mapping[str, Any]) -> list[Any]:
    """What is the same in runs that may be of one experiment."""
    return [facts.get(name) for name in _FACTS]


def later_keys(runs: Sequence[Mapping[str, Any]]) -> list[str]:
    """For each of such runs a key that is the same in those of one experiment. A fact that some do not hold counts
    where the others differ in it: then nobody knows to which of these they belong."""
    differ = [name for name in _LATER if len({json.dumps(facts[name]) for facts in runs if name in facts}) > 1]
    return [json.dumps([[name in facts, facts.get(name)] for name in differ]) for facts in runs]


def describe_differences(runs: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """The facts that are not the same in all, in words."""
    names = {**_FACTS, **_LATER}
    differ = [name for name in names if len({json.dumps(facts.get(name)) for facts in runs}) > 1]

    def word(facts: Mapping[str, Any], name: str) -> str:
        absent = "none" if name in _LATER and name in facts else "unknown"
        return names[name].format(absent if facts.get(name) is None else str(facts[name]))

    return [[word(facts, name) for name in differ] for facts in runs]


def same_test_set(a: Mapping[str, Any], b: Mapping[str, Any], meta: bool) -> bool:
    """Whether runs of two methods have, by their facts, learned from the same noise and been tested on the same rows,
    and with `meta` also the same trusted examples; what runs of before do not say is taken for the same."""
    names = ("test_sha256", "labels_sha256", "files_sha256", "test_set_sha256", "other_sha256", *["meta_sha256"] * meta)
    known = all(a.get(name) for name in ("inputs_sha256", "noise_sha256"))
    shared = all(a.get(name) == b.get(name) for name in ("inputs_sha256", "noise_sha256", "n_test"))
    return known and shared and all(a[name] == b[name] for name in names if name in a and name in b)
