"""The fields of a dataclass hold what they may: types, choices, limits."""

import math
from collections.abc import Mapping
from dataclasses import fields
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from warpi.errors import UserError, unknown


def check_choices(settings: object) -> None:
    """Fields of a dataclass that are a Literal hold one of its values: a misspelt one must not mean another."""
    hints = get_type_hints(type(settings))
    for f in fields(settings):  # type: ignore[arg-type]
        allowed, got = get_args(hints[f.name]), getattr(settings, f.name)
        if get_origin(hints[f.name]) is Literal and got not in allowed:
            raise unknown(f.name.replace("_", " "), str(got), map(str, allowed))


def at_least(settings: object, **limits: float) -> None:
    """Fields that are numbers are finite and not below their limit; None is left alone."""
    for name, limit in limits.items():
        value = getattr(settings, name)
        if value is not None and not (math.isfinite(value) and value >= limit):
            raise UserError(f"{name} must be at least {limit:g}, got {value}")


def check_types(cls: type, values: Mapping[str, Any]) -> None:
    """Settings from python must be of the types that their flags would give."""
    hints = get_type_hints(cls)
    for name, value in values.items():
        if not _fits(value, hint := hints[name]):
            if get_origin(hint) is Literal and isinstance(value, str):
                raise unknown(name, value, map(str, get_args(hint)))
            raise UserError(f"{name} must be {hint if get_origin(hint) else hint.__name__}, got {value!r}")


def _fits(value: object, hint: Any) -> bool:
    origin, args = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        return any(_fits(value, kind) for kind in args)
    if origin is Literal:
        return value in args
    if origin is tuple:
        return isinstance(value, tuple) and all(_fits(part, args[0]) for part in value)
    if hint in (int, float) and isinstance(value, int):
        return not isinstance(value, bool)
    return isinstance(value, origin or hint)
