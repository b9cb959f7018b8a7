"""Describe and check the fields of a dataclass: help texts, types, choices and limits."""

import csv
import io
import math
from collections.abc import Iterable
from dataclasses import field, fields
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from warpi.errors import UserError, unknown
from warpi.utils.files import format_csv

T = TypeVar("T")


def setting(default: T, help: str, low: float | str | None = None, high: float | None = None) -> T:
    """A dataclass field with a default, the help text of its command-line flag, and limits for `check_types`.

    The lower limit may be the name of an earlier field.
    """
    described: T = field(default=default, metadata={"help": help, "low": low, "high": high})
    return described


def _check_limits(name: str, value: Any, low: float | None, high: float | None) -> None:
    if value is None or low is None:
        return
    numbers = value if isinstance(value, tuple) else (value,)
    if high is not None:
        if not all(low <= x <= high for x in numbers):
            raise UserError(f"{name} must be between {low:g} and {high:g}, got {value}")
    elif not all(math.isfinite(x) and x >= low for x in numbers):
        finite = "" if any(x < low for x in numbers) else " and finite"
        raise UserError(f"{name} must be at least {low:g}{finite}, got {value}")


def check_types(settings: object) -> None:
    """Check that every field of a dataclass has its declared type and is within the limits of its `setting`."""
    hints = get_type_hints(type(settings))
    for f in fields(settings):  # type: ignore[arg-type]
        hint = hints[f.name]
        value = getattr(settings, f.name)
        if not _fits(value, hint):
            if get_origin(hint) is Literal:
                if isinstance(value, str):
                    raise unknown(f.name.replace("_", " "), value, map(str, get_args(hint)))
                raise UserError(f"{f.name} must be one of {', '.join(map(repr, get_args(hint)))}, got {value!r}")
            raise UserError(f"{f.name} must be {_describe(hint)}, got {value!r}")
        low = f.metadata.get("low")
        _check_limits(f.name, value, getattr(settings, low) if isinstance(low, str) else low, f.metadata.get("high"))


def split_names(text: str) -> list[str]:
    """Split `a,b` into names. A name with a comma is quoted: `"a, b",c`."""
    rows = csv.reader(io.StringIO(text, newline=""), skipinitialspace=True)
    return [name for row in rows for part in row if (name := part.strip())]


def join_names(names: Iterable[str]) -> str:
    """Join names so that `split_names` reads them."""
    return format_csv(names, [])[:-1]


def _describe(hint: Any) -> str:
    """A type in words; a protocol by the first line of its docstring."""
    if get_origin(hint) in (Union, UnionType):
        return " | ".join(map(_describe, get_args(hint)))
    if get_origin(hint) is Literal:
        return " | ".join(map(repr, get_args(hint)))
    if hint is NoneType:
        return "None"
    if getattr(hint, "_is_protocol", False):
        line = str(hint.__doc__).splitlines()[0].rstrip(".")
        return line[0].lower() + line[1:]
    return str(hint) if get_origin(hint) else str(hint.__name__)


def _fits(value: object, hint: Any) -> bool:
    origin = get_origin(hint)
    args = get_args(hint)
    if origin in (Union, UnionType):
        return any(_fits(value, kind) for kind in args)
    if origin is Literal:
        return value in args
    if origin is tuple:
        return isinstance(value, tuple) and all(_fits(part, args[0]) for part in value)
    if hint in (int, float) and isinstance(value, int):
        return not isinstance(value, bool) and abs(value) < 2**63
    return isinstance(value, origin or hint)
