"""Settings whose name on the command line and in Python differs from the name in `spec.json`.

Users write `trusted` and `labels`. Run folders store `meta_data` and `noise = "given:FILE"`, as they always have, so
that runs of all versions can be compared and resumed.
"""

from collections.abc import Mapping
from typing import Any

from warpi.errors import UserError
from warpi.training.presets import expand_recipe

STORED = {"trusted": "meta_data", "labels": "noise"}
"""The stored name of each setting that is written under another one."""


def to_stored_names(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings as `spec.json` names them; a value may be a list of values, as in the grid of a sweep.

    A named `recipe` is replaced by the settings it stands for.
    """
    stored = expand_recipe(settings)
    for name, stored_name in STORED.items():
        value = stored.pop(name, None)
        if value is None:
            continue
        if stored.get(stored_name) is not None:
            raise UserError(f"{name} and {stored_name} cannot be set together; leave out {stored_name}")
        if name == "labels":
            value = [given_labels(each) for each in value] if isinstance(value, list) else given_labels(value)
        stored[stored_name] = value
    return stored


def to_written_names(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Stored settings as users write them."""
    written = {}
    for name, value in settings.items():
        if name == "meta_data":
            written["trusted"] = value
        elif name == "noise" and is_label_file(value):
            written["labels"] = value.partition(":")[2]
        else:
            written[name] = value
    return written


def given_labels(file: object) -> str:
    """The noise that replaces the labels by those in a file."""
    if not str(file).endswith(".json"):
        raise UserError(
            f"labels must be a .json file, as written by `warpi review` or `warpi corrupt`, got {str(file)!r}; "
            "for a label set of the data use noise given:NAME"
        )
    return f"given:{file}"


def is_label_file(noise: object) -> bool:
    return isinstance(noise, str) and noise.startswith("given:") and noise.endswith(".json")
