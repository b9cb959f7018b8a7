"""Structural rules: the import order of the packages, torch-free modules, sizes, and the architecture page."""

import ast
import re
import statistics
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import yaml

import warpi

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src"
PACKAGE = SOURCE / "warpi"
PAGE = (ROOT / "docs" / "architecture.md").read_text()

# A package may import from earlier lines only. Packages on one line do not import each other.
ORDER = [
    ["errors"],
    ["utils"],
    ["functional", "nets"],
    ["auto"],
    ["data"],
    ["datasets"],
    ["noise"],
    ["autodiff"],
    ["training"],
    ["methods"],
    ["runs"],
    ["audit"],
    ["review", "estimator"],
    ["report"],
    ["sweep", "fewshot"],
    ["cli"],
    ["__main__"],
]
LEVEL = {name: level for level, names in enumerate(ORDER) for name in names}

# Modules that must not load torch, so that `warpi --help`, `warpi report` and decoding processes start quickly.
TORCH_FREE = [
    "warpi",
    "warpi.errors",
    "warpi.utils.files",
    "warpi.utils.settings",
    "warpi.utils.flags",
    "warpi.utils.lazy_imports",
    "warpi.functional.intervals",
    "warpi.data.decode",
    "warpi.datasets.delimited_files",
    "warpi.datasets.safe_pickle",
    "warpi.datasets.registry",
    "warpi.training.progress",
    "warpi.runs.schema",
    "warpi.runs.stored_facts",
    "warpi.runs.rerun_command",
    "warpi.runs.predictions",
    "warpi.audit",
    "warpi.audit.result",
    "warpi.audit.label_scores",
    "warpi.audit.decisions",
]


def name_of(path: Path) -> str:
    parts = path.relative_to(SOURCE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {name_of(path): path for path in sorted(PACKAGE.rglob("*.py"))}
METHOD_FILES = sorted((PACKAGE / "methods").glob("*.py"))


def test_the_globs_match_files() -> None:
    assert len(MODULES) > 150
    assert len(METHOD_FILES) > 30


@cache
def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@cache
def imports(path: Path) -> list[tuple[str, int]]:
    """Every warpi module that a file imports at any depth, or names in a string, with its line."""
    return list(_find_imports(path))


def _find_imports(path: Path) -> Iterator[tuple[str, int]]:
    for node in ast.walk(parse(path)):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names if alias.name.startswith("warpi."))
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import"
            if (node.module or "").split(".")[0] == "warpi":
                for alias in node.names:
                    full = f"{node.module}.{alias.name}"
                    yield (full if full in MODULES else node.module or "", node.lineno)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            module = node.value.partition(":")[0]
            if module in MODULES:
                yield module, node.lineno


def violations(name: str, path: Path) -> list[str]:
    package = name.split(".")[1]
    return [
        f"{path.relative_to(SOURCE)}:{line} imports {target}"
        for target, line in imports(path)
        if target != "warpi" and target.split(".")[1] != package and LEVEL[target.split(".")[1]] >= LEVEL[package]
    ]


def test_packages_import_from_earlier_packages_only() -> None:
    lines = [line for name, path in MODULES.items() if name != "warpi" for line in violations(name, path)]
    assert not lines, "\n".join(lines)


@pytest.mark.parametrize(
    "text",
    [
        "from warpi.cli.app import main",
        "def f():\n    import warpi.cli.app",
        "HOME = 'warpi.cli.app:main'",
        "def f():\n    from warpi.sweep import plan",
    ],
)
def test_the_direction_check_sees_lazy_imports_and_strings(tmp_path: Path, text: str) -> None:
    file = tmp_path / "example.py"
    file.write_text(text)
    assert [name for name, _ in imports(file) if LEVEL[name.split(".")[1]] > LEVEL["utils"]]


def test_no_cycles_between_modules() -> None:
    graph = {
        name: {target for target, _ in imports(path) if not f"{name}.".startswith(f"{target}.")}  # its own package
        for name, path in MODULES.items()
    }
    del graph["warpi"]
    done: set[str] = set()

    def visit(name: str, trail: tuple[str, ...]) -> None:
        assert name not in trail, " -> ".join((*trail, name))
        if name in graph and name not in done:
            for target in graph[name]:
                visit(target, (*trail, name))
            done.add(name)

    for name in graph:
        visit(name, ())


def test_torch_free_modules_do_not_load_torch() -> None:
    report = [name for name in MODULES if name.startswith("warpi.report.") and name != "warpi.report.figure_measures"]
    cli = [name for name in MODULES if name.startswith("warpi.cli")]
    assert len(report) >= 8
    assert len(cli) >= 6
    script = (
        "import sys, importlib\n"
        "for name in sys.argv[1:]:\n"
        "    importlib.import_module(name)\n"
        "    assert 'torch' not in sys.modules, name\n"
    )
    command = [sys.executable, "-c", script, *TORCH_FREE, *report, *cli]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr


def test_the_top_level_has_three_files_and_packages_are_small() -> None:
    assert {path.name for path in PACKAGE.glob("*.py")} == {"__init__.py", "__main__.py", "errors.py"}
    packages = [path for path in PACKAGE.rglob("*") if (path / "__init__.py").exists() and path.name != "methods"]
    assert len(packages) >= 17
    sizes = {path.name: len([p for p in path.glob("*.py") if p.name != "__init__.py"]) for path in packages}
    assert not {name: size for name, size in sizes.items() if size > 13}


def test_every_module_has_a_docstring_and_the_architecture_page_names_every_package() -> None:
    for name, path in MODULES.items():
        assert ast.get_docstring(parse(path)), f"{name} has no docstring"
    for package in {name.split(".")[1] for name in MODULES if name.count(".") > 1}:
        assert f"`{package}/`" in PAGE, f"docs/architecture.md does not describe {package}/"


def test_architecture_page_names_only_modules_that_exist() -> None:
    named = re.findall(r"`((?!tests/|examples/)[a-z_]+/[\w/]+\.py)`", PAGE)
    assert named
    for relative in named:
        assert (PACKAGE / relative).exists(), relative


def test_every_page_has_a_place_in_the_navigation() -> None:
    """The site is built with warnings as errors, and a page outside the navigation is one (`make docs`)."""
    docs = ROOT / "docs"
    nav = yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]

    def listed(part: Any) -> Iterator[Path]:
        if isinstance(part, str):
            yield from docs.glob(part)
        else:
            for entry in part.values() if isinstance(part, dict) else part:
                yield from listed(entry)

    pages = {path for path in docs.rglob("*.md") if path.name != "notes.md"}  # notes are included in other pages
    assert len(pages) > 100
    assert {str(path.relative_to(docs)) for path in pages - set(listed(nav))} == set(), "add them to mkdocs.yml"


def test_the_installation_page_names_every_extra() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    page = (ROOT / "docs" / "install.md").read_text()
    assert [name for name in extras if f"`{name}`" not in page and name != "dev"] == []


def test_the_api_page_lists_deprecated_names() -> None:
    from warpi.datasets import label_columns
    from warpi.methods import old_names

    page = (ROOT / "docs" / "api.md").read_text()
    table = page[page.index("Deprecated at present") : page.index("## Requirements")]
    names = [*label_columns.OLD_NAMES, *(f"--{old}" for names in old_names.OLD_NAMES.values() for old in names)]
    warnings = "\n".join(path.read_text() for path in (PACKAGE / "cli").glob("*.py"))
    flags = re.findall(r'warn_deprecated\(\s*"(--[\w-]+)', warnings)
    assert len(names) >= 5
    assert len(flags) >= 4
    assert [name for name in (*names, *flags) if f"`{name}" not in table] == []


def test_public_names() -> None:
    assert 20 <= len(warpi.__all__) <= 32
    for name in warpi.__all__:
        assert getattr(warpi, name) is not None
    assert warpi.own.using is warpi.plugins.use, "the former names work"
    with pytest.raises(AttributeError, match="no attribute 'WarPy'"):
        warpi.WarPy  # noqa: B018


def test_modules_stay_small() -> None:
    sizes = {name: len(path.read_text().splitlines()) for name, path in MODULES.items()}
    assert not {name: size for name, size in sizes.items() if size > 420}, "split by responsibility"


def test_functions_have_at_most_80_lines() -> None:
    functions = [
        (f"{path}:{node.lineno}", (node.end_lineno or 0) - node.lineno + 1)
        for path in MODULES.values()
        for node in ast.walk(parse(path))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    assert len(functions) > 1500
    assert not [place for place, size in functions if size > 80]


def test_package_inits_define_no_logic() -> None:
    """They hold a docstring, imports and tables of names; only the top level and lazy names need an assignment."""
    inits = [path for path in PACKAGE.rglob("__init__.py") if path.parent != PACKAGE]
    assert len(inits) >= 18
    allowed = (ast.Expr, ast.Import, ast.ImportFrom, ast.Assign, ast.AnnAssign, ast.If)
    for path in inits:
        for node in parse(path).body:
            assert isinstance(node, allowed), f"{path}:{node.lineno} defines {type(node).__name__}"


def test_no_registry_host_is_named() -> None:
    for name in ("pyproject.toml", "constraints.txt", "Makefile", ".ci/run"):
        assert not re.search(r"https?://", (ROOT / name).read_text()), name


def code_lines(path: Path) -> list[str]:
    """The lines of a file without imports and blank lines."""
    lines, inside = [], False
    for line in map(str.strip, path.read_text().splitlines()):
        if inside or line.startswith(("import ", "from ")):
            inside = (inside or line.endswith("(")) and not line.startswith(")")
        elif line:
            lines.append(line)
    return lines


def test_no_method_copies_another() -> None:
    seen: dict[tuple[str, ...], Path] = {}
    for path in METHOD_FILES:
        lines = code_lines(path)
        for block in zip(*(lines[i:] for i in range(6)), strict=False):
            other = seen.setdefault(block, path)
            assert other == path, f"{path.name} and {other.name} share six lines from {block[0]!r} on"


def test_half_of_the_methods_take_less_than_85_lines() -> None:
    files = [path for path in METHOD_FILES if path.name not in ("__init__.py", "registry.py")]
    assert statistics.median(len(path.read_text().splitlines()) for path in files) < 85


def test_the_api_page_lists_exactly_the_public_names() -> None:
    text = (ROOT / "docs" / "api.md").read_text()
    listed: dict[str, set[str]] = {}
    for package, rows in re.findall(r"^### `([\w.]+)`\n(.*?)(?=^##|^Names|\Z)", text, re.MULTILINE | re.DOTALL):
        listed[package] = set(re.findall(r"^\| `(\w+)` \|", rows, re.MULTILINE))
    assert len(listed) >= 5
    everywhere = set.union(*listed.values())
    stubs = sorted((ROOT / "src" / "warpi").rglob("__init__.pyi"))
    assert stubs
    for stub in stubs:
        package = ".".join(stub.parent.relative_to(ROOT / "src").parts)
        names = set(import_module(package).__all__)
        assert names <= everywhere, f"docs/api.md does not list these names of {package}: {names - everywhere}"
        assert listed.pop(package, set()) <= names, f"docs/api.md lists names that {package} does not have"
    assert listed == {}
