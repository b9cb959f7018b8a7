"""The command that makes a run again, from what its folder holds."""

import ast
import shlex
import sys
from collections.abc import Mapping
from functools import cache
from importlib import resources
from typing import Any

from warpi.runs.setting_names import to_written_names
from warpi.utils.field_checks import join_names

UNKNOWN = "FILE.py"
"""Stands for a file of the user's own that nobody has named."""


def command(spec: Mapping[str, Any], out: str | None = None, threads: int | None = None) -> str:
    """The command line that makes this run again, in the folder `out`: a flag for every field that has a value.

    Of the options of the method only those that differ from its defaults; recipe fields are flags like any other.
    Names that are not warpi's are those of a file of the user's own.
    """
    parts: dict[str, Any] = {part: spec.get(part) or {} for part in ("recipe", "options", "changed")}
    flags = {name: value for name, value in spec.items() if name not in (*parts, "seed")}
    flags = to_written_names(flags)
    flags |= parts["recipe"] | {"seed": spec.get("seed")} | parts["changed"] | {"threads": threads, "out": out}
    if net := own_names(spec).get("NETS"):
        flags["net"] = net
    use = [word for file in own_files(spec) for word in ("--use", file)]
    return shlex.join(["warpi", *use, "fit", *(word for name, value in flags.items() for word in flag(name, value))])


def flag(name: str, value: object) -> list[str]:
    """A setting in the words of the command line; none where it has no value."""
    name, text = name.replace("_", "-"), format_value(value)
    if isinstance(value, bool):
        return [f"--{name}" if value else f"--no-{name}"]
    if value is None:
        return []
    return [f"--{name}={text}"] if text.startswith("-") else [f"--{name}", text]


def format_value(value: object) -> str:
    """A value of a spec as a user would write it."""
    if value is None or isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list | tuple):
        return ",".join(join_names([each]) if isinstance(each, str) else format_value(each) for each in value)
    return str(value)


# -- files of the user's own (`warpi --use`) -------------------------------------------------------------------------


def own_names(spec: Mapping[str, Any]) -> dict[str, str]:
    """The method and the network of a run that are not warpi's, by the table of the file that has to have them."""
    used = {"METHODS": spec.get("method"), "NETS": (spec.get("recipe") or spec).get("net")}
    names = {table: str(name).rpartition(".")[2] for table, name in used.items() if name not in (None, *_ours(table))}
    return {table: name if name.isidentifier() else "mine" for table, name in names.items()}  # a lambda has no name


def own_files(spec: Mapping[str, Any]) -> list[str]:
    """The files that have these, each once: as this process was given them, or UNKNOWN."""
    own = sys.modules.get("warpi.runs.plugins")  # whoever names files has imported it, and torch with it
    known = {"METHODS": own.METHOD_FILES, "NETS": own.NET_FILES} if own else {}
    return list(dict.fromkeys(known.get(table, {}).get(name, UNKNOWN) for table, name in own_names(spec).items()))


@cache
def _ours(table: str) -> frozenset[str]:
    """The names in warpi's METHODS or NETS, read from the source: to import them would be to wait for torch."""
    source = resources.files("warpi").joinpath(table.lower(), "registry.py").read_text()
    tables = [node for node in ast.parse(source).body if isinstance(node, ast.AnnAssign)]
    (found,) = (node.value for node in tables if isinstance(node.target, ast.Name) and node.target.id == table)
    assert isinstance(found, ast.Dict)
    return frozenset(str(ast.literal_eval(key)) for key in found.keys if key is not None)
