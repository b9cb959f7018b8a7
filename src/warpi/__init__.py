"""Learn from data with partly wrong labels, with the help of a few trusted examples."""

from importlib import import_module
from typing import Any

from warpi.utils.lazy_imports import lazy_names

__version__ = "0.2.0"
_find, _names = lazy_names(__name__, __file__)
__all__ = ["__version__", *_names]
_MODULES = {
    "audit": "audit",
    "fewshot": "fewshot",
    "plugins": "runs.plugins",
    "own": "runs.plugins",
}  # own: former name


def __getattr__(name: str) -> Any:
    return import_module(f"warpi.{_MODULES[name]}") if name in _MODULES else _find(name)
