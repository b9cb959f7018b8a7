"""Custom methods and networks from a user's file: `warpi --use FILE.py COMMAND ...`.

The file defines `METHODS = {"mine": Mine()}`, `NETS = {"tiny": build}`, or both. `build` is a function (shape,
n_classes) -> nn.Module, or a class with these two arguments. Only the user who starts the process names such a file:
run folders and recipes store names, and nothing that is read from them is ever executed.
"""

import hashlib
import importlib
import inspect
import os
import shlex
import sys
import traceback
from argparse import ArgumentError
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, fields, replace
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import nn

from warpi.errors import UserError
from warpi.methods.registry import METHODS
from warpi.nets.registry import NETS, NetEntry, make_net
from warpi.runs.defaults import check_is_method, resolve_method
from warpi.runs.rerun_command import PLUGIN_FILES, short_name
from warpi.runs.schema import STORED
from warpi.runs.spec import DataSpec
from warpi.training.method import Method
from warpi.training.recipe import Recipe
from warpi.utils.flags import Parser, add_fields

METHOD_PLUGINS = PLUGIN_FILES["METHODS"]
"""The custom methods in METHODS, each with its file."""
NET_PLUGINS = PLUGIN_FILES["NETS"]
"""The custom networks in NETS, each with its file."""
_USED: dict[Path, str] = {}  # every file in use, as the user wrote it
_MODULE_PREFIX = "plugin_"

_RUN_ARGUMENTS = (
    *("out", "method", "resume", "device", "devices", "threads", "checkpoint_seconds", "checkpoint_epochs"),
    *("track", "tensorboard", "quiet", "help", "recipe", "cache", "caught"),
)
_RESERVED = {*_RUN_ARGUMENTS, *STORED, *(f.name for cls in (DataSpec, Recipe) for f in fields(cls))}
"""Names that a field of a custom method cannot have."""


@contextmanager
def use(files: Iterable[Path | str]) -> Iterator[None]:
    """Context manager: METHODS and NETS also contain what these files define. Each file is executed once."""
    tables: list[dict[Any, Any]] = [METHODS, NETS, METHOD_PLUGINS, NET_PLUGINS, _USED]
    contents = [dict(table) for table in tables]
    search_path = list(sys.path)
    modules = set(sys.modules)
    try:
        for file in files:
            _use_file(str(file))
        yield
    finally:
        for name in _modules_from({path.parent for path in _USED}):
            if name not in modules:
                del sys.modules[name]  # the next `use` imports it again, perhaps from another folder
        for table, content in zip(tables, contents, strict=True):
            table.clear()
            table.update(content)
        sys.path[:] = search_path


using = use  # the former name


def run_with(argv: list[str], run: Callable[[list[str]], None]) -> None:
    """Run a command with the files in the `--use` flags before it."""
    files: list[str] = []
    words = list(argv)
    while words and words[0].partition("=")[0] == "--use":
        flag, equals, file = words.pop(0).partition("=")
        if not equals and words:
            file = words.pop(0)
        if not file or file.startswith("-"):
            raise UserError(f"{flag} takes a Python file, got {file!r}; for example: warpi --use mine.py fit ...")
        files.append(file)
    with use(files):
        run(words)


def flags() -> list[str]:
    """The `--use` flags of this process, for commands that it starts or prints."""
    return [word for file in _USED.values() for word in ("--use", file)]


def family(method: str) -> str | None:
    """The family of a method in METHODS; None if a custom class does not set it."""
    cls = type(METHODS[method])
    is_set = any("family" in vars(base) for base in cls.__mro__ if base is not Method)
    return cls.family if is_set or method not in METHOD_PLUGINS else None


def stored_net(name: str) -> str:
    """The network that a run stored as MODULE.NAME: a custom one in use if it has this NAME."""
    short = short_name(name)
    return short if short in NET_PLUGINS else name


def check_fields(path: Path, method: str | Method, options: Mapping[str, object]) -> None:
    """Refuse a stored run whose method no longer has all the fields that are stored."""
    name, default = resolve_method(method)
    for field in options:
        if field not in {f.name for f in fields(default)}:
            is_custom = name in METHOD_PLUGINS or name not in METHODS
            where = "of this version of warpi"
            if is_custom:
                where = f"of {METHOD_PLUGINS[name]}" if name in METHOD_PLUGINS else "that you passed"
            raise UserError(
                f"the run in {path} was made with {field} = {options[field]!r}, but the method {name!r} {where} no "
                f"longer has a field {field!r}; {'restore it, or ' * is_custom}train again with another --out"
            )


def _use_file(file: str) -> None:
    path = Path(file).resolve()
    if path in _USED:
        return
    module = _load(file, path)
    for name, other in _modules_from({used.parent for used in _USED} - {path.parent}).items():
        if (path.parent / f"{name}.py").exists() or (path.parent / name / "__init__.py").exists():
            raise UserError(
                f"the folder of {file} contains a module {name!r}, but {other} with the same name is in use; rename one"
            )
    _USED[path] = file
    sys.path.append(str(path.parent))  # for modules that it imports later
    methods = _read_table(module, "METHODS", METHODS, file)
    nets = _read_table(module, "NETS", NETS, file)
    if methods is None and nets is None:
        raise UserError(f"{file} defines neither METHODS nor NETS; end it with METHODS = {{'mine': Mine()}}")
    for name, method in (methods or {}).items():
        place = _check_name(file, "METHODS", name, METHODS, METHOD_PLUGINS)
        METHODS[name] = _check_method(method, place)
        METHOD_PLUGINS[name] = file
    for name, build in (nets or {}).items():
        place = _check_name(file, "NETS", name, NETS, NET_PLUGINS)
        NETS[name] = _make_entry(build, place, path)
        NET_PLUGINS[name] = file


def _load(file: str, path: Path) -> ModuleType:
    """Execute the file as a module. While it runs, modules can be imported from its folder."""
    try:
        source = path.read_bytes()
    except FileNotFoundError as e:
        raise UserError(f"there is no file {file!r}; --use takes a Python file") from e
    except OSError as e:
        raise UserError(f"cannot read {file!r}: {e.strerror}; --use takes a Python file") from e
    digest = hashlib.sha256(str(path).encode()).hexdigest()[:8]  # two files may have the same name
    module = ModuleType(f"{_MODULE_PREFIX}{digest}_{path.stem}")
    module.__file__ = str(path)
    sys.modules[module.__name__] = module  # dataclasses and type hints are looked up there
    folder = str(path.parent)
    sys.path.insert(0, folder)
    importlib.invalidate_caches()
    try:
        exec(compile(source, str(path), "exec", dont_inherit=True), vars(module))
    except (Exception, SystemExit) as e:  # user code may raise anything
        del sys.modules[module.__name__]
        message = _format_error(e, file, path)
        raise UserError(f"cannot load {message}; for the full traceback: python {shlex.quote(file)}") from e
    finally:
        if folder in sys.path:
            sys.path.remove(folder)
    return module


def _modules_from(folders: set[Path]) -> dict[str, Path]:
    """The imported modules whose files are in these folders, by name."""
    paths = {str(folder) for folder in folders}
    modules = {}
    for name, module in sys.modules.items():
        file = getattr(module, "__file__", None) or ""
        folder, base = os.path.split(file)
        if base == "__init__.py":
            folder = os.path.dirname(folder)
        if folder in paths and not name.startswith(_MODULE_PREFIX):
            modules[name] = Path(file)
    return modules


def _format_error(error: BaseException, file: str, path: Path) -> str:
    """FILE:LINE: MESSAGE, with the deepest line of the traceback that is in the folder of the file."""
    lines = [(frame.filename, frame.lineno) for frame in traceback.extract_tb(error.__traceback__)]
    text = str(error)
    if isinstance(error, SyntaxError):
        lines.append((error.filename or "", error.lineno))
        text = error.msg
    in_folder = [(Path(name).name, line) for name, line in lines if Path(name).parent == path.parent]
    name, line = in_folder[-1] if in_folder else (path.name, None)
    location = f"{Path(file).with_name(name)}{f':{line}' if line else ''}"
    kind = "" if isinstance(error, UserError) else type(error).__name__
    return ": ".join(part for part in (location, kind, text) if part)


def _read_table(module: ModuleType, name: str, builtin: object, file: str) -> Mapping[Any, Any] | None:
    table = vars(module).get(name)
    if table is None or table is builtin:  # the file imported it from warpi
        return None
    if not isinstance(table, Mapping):
        example = "{'mine': Mine()}" if name == "METHODS" else "{'tiny': build}"
        raise UserError(f"{name} in {file} must be a dict such as {example}, got {type(table).__name__}")
    return table


def _check_name(file: str, table: str, name: object, taken: Mapping[str, object], files: Mapping[str, str]) -> str:
    """Check that the name of an entry is valid and new. Returns how error messages refer to the entry."""
    place = f"{table}[{name!r}] in {file}"
    if not isinstance(name, str) or not (name.isidentifier() and name.isascii()):
        raise UserError(f"{place}: a name must consist of letters, digits and _, and must not begin with a digit")
    if name in taken:
        kind = "method" if table == "METHODS" else "network"
        owner = f"a {kind} in {files[name]}" if name in files else f"a built-in {kind}"
        raise UserError(f"{place}: {name!r} is the name of {owner}; choose another")
    return place


def _check_method(method: Method, place: str) -> Method:
    """Check that a method can be created again from its fields, and that each field can be a flag."""
    check_is_method(method, place)
    cls = type(method)
    try:
        cls()
        replace(method, **asdict(method))
    except Exception as e:  # user code may raise anything
        raise UserError(
            f"{place}: {cls.__name__} cannot be created without arguments, or not from its fields ({e}); make it a "
            "@dataclass whose fields, its hyper-parameters, all have defaults"
        ) from e
    names = [f.name for f in fields(method)]
    for base in cls.__mro__:
        hints = inspect.get_annotations(base) if issubclass(base, Method) and base is not Method else {}
        for name, hint in hints.items():
            if name not in names and "ClassVar" not in str(hint):
                raise UserError(f"{place}: {name!r} of {base.__name__} is not a field; add @dataclass to the class")
    _check_flags(method, names, place)
    return method


def _check_flags(method: Method, names: list[str], place: str) -> None:
    """Check that each field of a method can be a flag of `warpi fit`, different from all others."""
    cls = type(method).__name__
    parser = Parser("warpi fit")
    add_fields(parser, "", DataSpec)
    add_fields(parser, "", Recipe)
    for name in names:
        if name in _RESERVED:
            raise UserError(f"{place}: {cls} has a field {name!r}, which is a setting of every run; rename it")
        try:
            add_fields(parser, "", method, skip=tuple(other for other in names if other != name))
        except ArgumentError as e:  # for example `no_x` next to a bool `x`, whose flags are --x and --no-x
            raise UserError(f"{place}: two fields of a run would be the same flag ({e}); rename yours") from e
        except Exception as e:  # a type that cannot be a flag
            raise UserError(
                f"{place}: the field {name!r} of {cls} cannot be a flag ({type(e).__name__}: {e}); it may be int, "
                "float, str, bool, a Literal of strings, a tuple of one of these, or one of these or None"
            ) from e


def _make_entry(build: object, place: str, path: Path) -> NetEntry:
    """The entry of a custom network in NETS. Errors of its function name the entry."""
    if isinstance(build, nn.Module):
        kind = type(build).__name__
        raise UserError(
            f"{place} is a module, whose weights would differ between processes; use its class, or a function: "
            f"lambda shape, n_classes: {kind}()"
        )
    if not callable(build):
        raise UserError(f"{place} must be a function (shape, n_classes) -> nn.Module, got {type(build).__name__}")
    try:
        inspect.signature(build).bind((1,), 2)
    except TypeError as e:
        raise UserError(f"{place} is called with (shape, n_classes), but does not accept them ({e})") from e
    except ValueError:  # its signature is not known
        pass
    has_doc = inspect.isroutine(build) or isinstance(build, type)
    summary = ((build.__doc__ or "") if has_doc else "").strip().partition("\n")[0]

    def build_net(shape: tuple[int, ...], n_classes: int) -> nn.Module:
        try:
            return make_net(build, shape, n_classes)
        except UserError as e:
            raise UserError(f"{place}: {e}") from e
        except Exception as e:  # user code may raise anything
            message = _format_error(e, path.name, path)
            raise UserError(f"{place} cannot be built for {shape}, {n_classes}: {message}") from e

    return NetEntry(summary or f"from {path.name}", build_net)
