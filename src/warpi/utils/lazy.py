"""Names of a package that are imported at first use, so that importing the package stays fast."""

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def lazy_names(package: str, home: Mapping[str, tuple[str, ...]]) -> Callable[[str], Any]:
    """A module `__getattr__` for `package`; `home` maps each module to the names it defines.

    A name equal to the last part of its module's path stands for the module itself.
    """
    modules = {name: module for module, names in home.items() for name in names}

    def __getattr__(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module = import_module(modules[name])
        return module if modules[name].endswith(f".{name}") else getattr(module, name)

    return __getattr__
