"""Deprecated names of settings, which commands, sweep files and stored runs may still use. Does not import torch."""

from collections.abc import Mapping
from typing import Any

from warpi.errors import UserError

_REINITIALIZE = {"anew": "reinitialize"}
OLD_NAMES: dict[str, dict[str, str]] = {"t_revision": _REINITIALIZE, "ptd": _REINITIALIZE}
"""The current name of each renamed setting, by method and by deprecated name."""


def use_current_names(method: object, settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a run of this method, with the current names of renamed settings."""
    return rename(settings, OLD_NAMES.get(method, {}) if isinstance(method, str) else {})


def rename(settings: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """Settings with new names. Raises a UserError if one is given under both names."""
    for old, new in names.items():
        if old in settings and new in settings:
            raise UserError(f"{old} is the deprecated name of {new}; leave it out")
    return {names.get(name, name): value for name, value in settings.items()}
