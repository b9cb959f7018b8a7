"""The scripts of benchmarks, examples and the site are not imported by other tests: their names must still exist."""

import ast
import importlib
import types
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = sorted(path for folder in ("benchmarks", "examples") for path in (ROOT / folder).rglob("*.py"))
OWN = ("warpi", "benchmarks")


def read_name(module: str, name: str) -> object:
    """What `from module import name` gives: a name of the module, or a module within it."""
    found = importlib.import_module(module)
    return getattr(found, name) if hasattr(found, name) else importlib.import_module(f"{module}.{name}")


def missing_names(source: str) -> list[str]:
    """The names that a program imports from this repository, or uses of its modules, and that do not exist."""
    tree = ast.parse(source)
    modules: dict[str, types.ModuleType] = {}
    missing = []
    for node in ast.walk(tree):
        for alias in node.names if isinstance(node, ast.Import | ast.ImportFrom) else ():
            parent = node.module or "" if isinstance(node, ast.ImportFrom) else ""
            if (parent or alias.name).partition(".")[0] not in OWN:
                continue
            try:
                found = read_name(parent, alias.name) if parent else importlib.import_module(alias.name)
            except ImportError as e:
                missing.append(str(e))
                continue
            if isinstance(found, types.ModuleType):
                modules[alias.asname or alias.name] = found
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            module = modules.get(ast.unparse(node.value))
            if module is not None and not hasattr(module, node.attr):
                missing.append(f"{module.__name__}.{node.attr}")
    return missing


def test_there_are_scripts() -> None:
    assert len(SCRIPTS) > 60


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_names_of_the_library_exist(script: Path) -> None:
    assert missing_names(script.read_text()) == []


@pytest.mark.parametrize(
    "source",
    [
        "from warpi.audit import nothing",
        "def f():\n    from warpi.data.duplicates import neighbors",
        "import warpi.fewshot.run\nwarpi.fewshot.run.nothing()",
        "from warpi.fewshot import run as runs\nruns.nothing = 1",
        "import benchmarks.nothing",
    ],
)
def test_missing_names_are_noticed(source: str) -> None:
    (message,) = missing_names(source)
    assert "nothing" in message or "neighbors" in message
