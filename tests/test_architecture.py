"""The house rules that a machine can hold: imports point one way, every module is described, names are public."""

import ast
import re
import statistics
from pathlib import Path

import pytest

import warpi

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src"
PAGE = (ROOT / "docs" / "architecture.md").read_text()

# From the ground up. A module may import from lower floors, and from its own package.
FLOORS = [
    ["errors", "types", "rng"],
    ["atomic", "settings", "parallel", "stored"],
    ["data", "batchnorm", "chance", "stateless"],
    ["manifest", "matrix", "nets", "losses", "mixing", "selection", "neighbours", "gaussian", "ridge", "trace"],
    ["noise_kinds"],
    ["noise", "retrace", "kernels", "columns"],
    ["passes", "transition"],
    ["task", "recipe", "provenance"],
    ["method"],
    ["evaluate", "checkpoint", "lookahead", "features", "phases", "survey", "carried"],
    ["capture", "methods", "export", "untrusted"],
    ["engine"],
    ["progress", "peers", "spec", "flags"],
    ["own"],
    ["folder"],
    ["run"],
    ["bench"],
    ["audit"],
    ["report"],
    ["sweep", "estimator", "fewshot", "predictions"],
    ["review", "figures"],
    ["details"],
    ["cli"],
    ["__main__"],
]
FLOOR = {name: number for number, names in enumerate(FLOORS) for name in names}
MODULES = sorted(p for p in (SOURCE / "warpi").rglob("*.py") if p != SOURCE / "warpi" / "__init__.py")


def name_of(path: Path) -> str:
    parts = path.relative_to(SOURCE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found |= {node.module or ""} if node.module != "warpi" else {f"warpi.{a.name}" for a in node.names}
    return {name for name in found if name.startswith("warpi.")}


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_imports_point_one_way(path: Path) -> None:
    mine = name_of(path).split(".")[1]
    for target in imports(path):
        other = target.split(".")[1]
        assert other in FLOOR, f"{other} has no floor: add it here and to docs/architecture.md"
        assert other == mine or FLOOR[other] < FLOOR[mine], f"{mine} must not import {target}"


def test_no_cycles_between_modules() -> None:
    graph = {name_of(p): imports(p) for p in MODULES}
    done: set[str] = set()

    def visit(name: str, trail: tuple[str, ...]) -> None:
        assert name not in trail, " -> ".join((*trail, name))
        if name in graph and name not in done:
            for target in graph[name]:
                visit(target, (*trail, name))
            done.add(name)

    for name in graph:
        visit(name, ())


def test_report_starts_without_torch() -> None:
    for path in (SOURCE / "warpi" / "report").glob("*.py"):
        assert "import torch" not in path.read_text(), path


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_architecture_page_names_every_module(path: Path) -> None:
    relative = str(path.relative_to(SOURCE / "warpi"))
    assert f"`{relative}`" in PAGE, f"docs/architecture.md does not say what {relative} is for"
    assert ast.get_docstring(ast.parse(path.read_text())), f"{relative} has no docstring"


def test_architecture_page_names_no_module_that_is_gone() -> None:
    for relative in re.findall(r"^\| `([\w/]+\.py)`", PAGE, re.MULTILINE):
        assert (SOURCE / "warpi" / relative).exists(), relative


def test_public_names() -> None:
    assert 20 <= len(warpi.__all__) <= 32
    for name in warpi.__all__:
        assert getattr(warpi, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'WarPy'"):
        warpi.WarPy  # noqa: B018


def test_modules_stay_small() -> None:
    long = {name_of(p): n for p in MODULES if (n := len(p.read_text().splitlines())) > 420}
    assert not long, f"is there a second responsibility inside? {long}"


def test_no_registry_host_is_named() -> None:
    for name in ("pyproject.toml", "constraints.txt", "Makefile", ".ci/run"):
        assert not re.search(r"https?://", (ROOT / name).read_text()), name


def own_lines(path: Path) -> list[str]:
    """What a file says itself: no imports, no blank lines."""
    lines, inside = [], False
    for line in map(str.strip, path.read_text().splitlines()):
        if inside or line.startswith(("import ", "from ")):
            inside = (inside or line.endswith("(")) and not line.startswith(")")
        elif line:
            lines.append(line)
    return lines


def test_no_method_copies_another() -> None:
    seen: dict[tuple[str, ...], Path] = {}
    for path in sorted((SOURCE / "warpi" / "methods").glob("*.py")):
        lines = own_lines(path)
        for run in zip(*(lines[i:] for i in range(6)), strict=False):
            other = seen.setdefault(run, path)
            assert other == path, f"{path.name} and {other.name} share six lines from {run[0]!r} on"


def test_half_of_the_methods_take_less_than_80_lines() -> None:
    files = [p for p in (SOURCE / "warpi" / "methods").glob("*.py") if p.name != "__init__.py"]
    assert statistics.median(len(p.read_text().splitlines()) for p in files) < 80
