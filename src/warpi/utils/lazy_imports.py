"""Names of a package that are imported at first use, so that importing the package stays fast."""

import ast
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any


def lazy_names(package: str, file: str) -> tuple[Callable[[str], Any], list[str]]:
    """Return `__getattr__` and `__all__` of a package, for the names that its stub imports as `A as A`.

    The stub, `__init__.pyi`, is the only list of these names. Type checkers read it, too.
    """
    nodes = ast.parse(Path(file).with_suffix(".pyi").read_text()).body
    imports = [node for node in nodes if isinstance(node, ast.ImportFrom)]
    home = {alias.asname: node.module for node in imports for alias in node.names if alias.asname and node.module}

    def __getattr__(name: str) -> Any:
        if name not in home:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(import_module(home[name]), name)

    return __getattr__, sorted(home)
