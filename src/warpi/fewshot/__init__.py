"""fewshot."""

from importlib import import_module
from typing import Any

_HOME = {"fit": "run", "load": "run", "judged": "compare", "paired": "evaluate"}


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    if name in _HOME:
        return getattr(import_module(f"warpi.fewshot.{_HOME[name]}"), name)
    return getattr(import_module("warpi.fewshot.learners.registry"), name)
