"""The JSON files of a run folder, `spec.json` and `results.jsonl`, read and checked. No torch."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from warpi.errors import UserError

FORMAT = "warpi-run/1"
_WORDS = {dict: "an object", list: "a list", str: "a text", int: "a whole number", float: "a number"}
_HASHES = (
    *("inputs", "files", "labels", "meta", "test", "test_set", "other"),
    *("noise", "noise_file", "matrix_file", "weights"),
)
_PARTS: dict[str, dict[str, type]] = {  # what a part of a specification holds, where it is there; others go unread
    "": {"spec": dict, "facts": dict, "environment": dict},
    "spec": {
        **dict.fromkeys(("method", "data", "root", "label", "noise", "meta_data"), str),
        **dict.fromkeys(("options", "changed", "recipe"), dict),
        "seed": int,
        "drop": list,
        "image_size": int,
        "meta": int,
        "limit": int,
        "val": float,
        "test": float,
    },
    "recipe": {"net": str, "epochs": int, "weights": str},
    "facts": {
        **{f"n_{name}": int for name in ("train", "meta", "val", "test", "classes", "parameters")},
        **{f"{name}_sha256": str for name in _HASHES},
        "wrong_share": float,
    },
    "environment": {"threads": int, "ranks": int, "folder": str, "stamps": dict},
}


def read_json(file: Path, mend: str) -> Any:
    """What a file holds; FileNotFoundError where there is none. `mend` says what to do about any other error."""
    try:
        return json.loads(file.read_bytes())
    except FileNotFoundError:
        raise
    except OSError as e:
        raise UserError(f"cannot read {file}: {e.strerror}; {mend}") from e
    except (ValueError, RecursionError) as e:
        raise UserError(f"{file} is not JSON ({e}); {mend}") from e


def check_spec(stored: Mapping[str, Any], file: Path, mend: str, needed: Iterable[str]) -> None:
    """Every part of a specification is of its kind; those that are `needed` are there."""
    spec = stored.get("spec")
    inner = {**stored, "recipe": spec.get("recipe")} if isinstance(spec, dict) else stored
    for part in _PARTS:
        check_part(inner if not part else inner.get(part) or {}, part, file, mend, needed)


def check_part(values: Mapping[str, Any], part: str, file: Path, mend: str, needed: Iterable[str] = ()) -> None:
    for name, kind in _PARTS[part].items():
        value = values.get(name)
        if not (_is(value, kind) or (value is None and name not in needed)):
            raise UserError(f"{file}: {name!r} must be {_WORDS[kind]}, got {value!r:.200}; {mend}")


def read_record(line: bytes | str, file: Path, number: int, mend: str) -> dict[str, Any]:
    """A line of `results.jsonl`: names and numbers. A line that is no JSON has been cut: its error has a cause."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as e:
        raise UserError(f"{file} line {number} is not JSON ({e}); {mend}") from e
    if not isinstance(record, dict):
        raise UserError(f"{file} line {number} is no record of results; {mend}")
    for name, value in record.items():
        if not (_is(value, float) or isinstance(value, bool | None)):
            raise UserError(f"{file} line {number}: {name!r} must be a number, got {value!r:.200}; {mend}")
    return record


def _is(value: object, kind: type) -> bool:
    if kind in (int, float) and isinstance(value, int):
        return not isinstance(value, bool) and abs(value) < 2**63
    return isinstance(value, kind)
