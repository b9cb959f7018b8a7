"""The files of a run folder: their names, and checks of `spec.json` and `results.jsonl`. Does not load torch."""

import json
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

from warpi.errors import UserError
from warpi.methods.old_names import OLD_NAMES, use_current_names
from warpi.runs.stored_facts import FACTS
from warpi.training.named_recipes import expand_recipe
from warpi.utils.settings import setting

SPEC = "spec.json"
"""Settings, facts about the data, versions."""
RESULTS = "results.jsonl"
"""One line per epoch, or per validation of a few-shot run."""
CHECKPOINT = "checkpoint.safetensors"
"""All state, and how the inputs of the data are read."""
BEST = "best.safetensors"
"""The learner of a few-shot run at its best validation."""
DONE = "done"
"""An empty file that marks a complete run."""
CHOICE = "choice.json"
"""The candidates that the method `auto` compared."""
SWEEP = "sweep.json"
"""The settings that a sweep gave the run."""


def failure_file(sweep: Path, run: str) -> Path:
    """The file of a sweep that says why a run failed. It is not in the folder of the run."""
    return sweep / ".sweep" / run / "failed.json"


@dataclass(frozen=True)
class DataSettings:
    """The settings that say what to learn from. `DataSpec` reads it."""

    data: str = setting(
        "digits", "name from `warpi list datasets`, or path of a table, arrays, images or features; hf:FOLDER"
    )
    root: str | None = setting(None, "folder with the files of a built-in data set (default: $WARPI_DATA)")
    label: str | None = setting(None, "column (or .npy file) with the labels (default: label)")
    drop: tuple[str, ...] = setting((), "columns of a table that are not features, such as an id (default: none)")
    types: tuple[str, ...] = setting(
        (), "COLUMN=KIND of columns of a table: number, category, date or text (default: by their content)"
    )
    text: tuple[str, ...] = setting((), "columns of a table that hold texts (default: `text`, and long texts)")
    missing: Literal["fill", "error"] = setting("fill", "fill missing cells of a table, or refuse them")
    unknown: Literal["ignore", "error"] = setting("ignore", "ignore or refuse values that training rows do not have")
    image_size: int | None = setting(
        None, "side of image files in pixels (default: their own size if at most 64, else 224)"
    )
    noise: str = setting(
        "given", "label noise to add, see `warpi list noises` (default: given, the labels as they are)"
    )
    meta: int | None = setting(
        None, "number of trusted (*meta*) examples to hold out from the data, or to take from rows marked as trusted"
    )
    meta_data: str | None = setting(
        None, "second file or folder, with examples whose labels were checked; rows of --data or others"
    )
    val: float | None = setting(
        None, "fraction of the noisy rows held out for validation (default: 0.1 for a built-in data set, 0 for yours)"
    )
    test: float | None = setting(
        None, "fraction of the rows held out for testing (default: 0.25 for a built-in data set, 0 for yours)"
    )
    limit: int | None = setting(None, "use only this many rows, for a quick try", low=1)


ADDED = ("drop", "types", "text", "missing", "unknown")
"""Fields that older versions did not have. `spec.json` has them only if they are not the default."""
READ = ("data", "root", "label", *ADDED, "image_size", "noise")
"""Fields that determine the rows and their labels. Commands that do not train have only these."""
NOT_READ = tuple(f.name for f in fields(DataSettings) if f.name not in READ)

FORMAT = "warpi-run/1"
FEWSHOT_FORMAT = "warpi-fewshot/1"
_KINDS = {
    dict: "an object",
    list: "a list",
    tuple: "a list of texts",
    str: "a text",
    int: "a whole number",
    float: "a number",
}
_PARTS: dict[str, dict[str, type]] = {  # the kind of each known value, by the part of the specification it is in
    "": {"spec": dict, "facts": dict, "environment": dict},
    "spec": {
        **dict.fromkeys(("method", "data", "root", "label", "noise", "meta_data"), str),
        **dict.fromkeys(("options", "changed", "recipe"), dict),
        **dict.fromkeys(("seed", "image_size", "meta", "limit"), int),
        **dict.fromkeys(("val", "test"), float),
        **dict.fromkeys(("drop", "types", "text"), tuple),
        **dict.fromkeys(("missing", "unknown"), str),
    },
    "recipe": {"net": str, "epochs": int, "weights": str},
    "facts": {**{fact.name: fact.kind for fact in FACTS}, "wrong_share": float},
    "environment": {"threads": int, "ranks": int, "folder": str, "stamps": dict},
}


def check_spec(stored: Mapping[str, Any], file: Path, advice: str, needed: Iterable[str]) -> None:
    """Check the kind of every value of a specification, and that the needed ones exist."""
    spec = stored.get("spec")
    inner = {**stored, "recipe": spec.get("recipe")} if isinstance(spec, dict) else stored
    for part in _PARTS:
        check_part(inner if not part else inner.get(part) or {}, part, file, advice, needed)


def use_current_spec(stored: dict[str, Any]) -> dict[str, Any]:
    """A stored specification in which renamed settings of the method have their current names."""
    spec = stored["spec"]
    parts = ("options", "changed")
    renamed = {part: use_current_names(spec.get("method"), spec[part]) for part in parts if spec.get(part)}
    return {**stored, "spec": {**spec, **renamed}}


def check_part(values: Mapping[str, Any], part: str, file: Path, advice: str, needed: Iterable[str] = ()) -> None:
    """Check the kinds of the values of one part of a specification."""
    for name, kind in _PARTS[part].items():
        value = values.get(name)
        if not (_is_a(value, kind) or (value is None and name not in needed)):
            raise UserError(f"{file}: {name!r} must be {_KINDS[kind]}, got {value!r:.200}; {advice}")


def read_record(line: bytes | str, file: Path, number: int, advice: str) -> dict[str, Any]:
    """Parse one line of `results.jsonl`: names and numbers.

    If the line is not JSON, because it was cut off, the error has a `__cause__`.
    """
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as e:
        raise UserError(f"{file} line {number} is not JSON ({e}); {advice}") from e
    if not isinstance(record, dict):
        raise UserError(f"{file} line {number} is not a results record; {advice}")
    for name, value in record.items():
        if not (_is_a(value, float) or isinstance(value, bool | None)):
            raise UserError(f"{file} line {number}: {name!r} must be a number, got {value!r:.200}; {advice}")
    return record


def _is_a(value: object, kind: type) -> bool:
    if kind in (int, float) and isinstance(value, int):
        return not isinstance(value, bool) and abs(value) < 2**63
    if kind is tuple:
        return isinstance(value, list | tuple) and all(isinstance(item, str) for item in value)
    return isinstance(value, kind)


# --- names of settings ------------------------------------------------------------------------------------------------
# Users write `trusted` and `labels`. Run folders store `meta_data` and `noise = "given:FILE"`, as they always have, so
# that runs of all versions can be compared and resumed.

STORED = {"trusted": "meta_data", "labels": "noise"}
"""The stored names of settings that users write under other names."""


def to_stored_names(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Rename settings as in `spec.json`. A value may be a list of values, as in the grid of a sweep.

    A named `recipe` is replaced by the settings it stands for.
    """
    stored = expand_recipe(settings)
    for name, stored_name in STORED.items():
        value = stored.pop(name, None)
        if value is None:
            continue
        if stored.get(stored_name) is not None:
            raise UserError(f"{name} and {stored_name} cannot be set together; omit {stored_name}")
        if name == "labels":
            value = [given_labels(file) for file in value] if isinstance(value, list) else given_labels(value)
        stored[stored_name] = value
    return stored


def to_written_names(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Rename stored settings as users write them."""
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
    """The setting `noise` that replaces the labels by those in a file."""
    if not str(file).endswith(".json"):
        raise UserError(
            f"labels must be a .json file, as written by `warpi review` or `warpi corrupt`, got {str(file)!r}; "
            "for a label set of the data use noise given:NAME"
        )
    return f"given:{file}"


def is_label_file(noise: object) -> bool:
    return isinstance(noise, str) and noise.startswith("given:") and noise.endswith(".json")


def warn_of_old_names(options: Mapping[str, Any]) -> None:
    """Warn the caller of `warpi.fit` of options that have new names."""
    names = {
        "meta_data": "trusted",
        "tensorboard": "track='tensorboard'",
        **OLD_NAMES.get(str(options.get("method")), {}),
    }
    renamed = [(old, new) for old, new in names.items() if old in options]
    if is_label_file(options.get("noise")):
        renamed.append(("noise='given:FILE'", "labels=FILE"))
    for old, new in renamed:
        warnings.warn(f"{old} is deprecated; use {new}", FutureWarning, stacklevel=3)
