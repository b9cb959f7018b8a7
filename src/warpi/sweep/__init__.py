"""sweep."""

from importlib import import_module
from typing import Any

_HOME: dict[str, str] = {}


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    if name in _HOME:
        return getattr(import_module(f"warpi.sweep.{_HOME[name]}"), name)
    return getattr(import_module("warpi.sweep.runner"), name)
