"""Methods and networks of the user's own file, by name: `warpi --use FILE.py COMMAND ...`.

The file defines `METHODS = {"mine": Mine()}`, `NETS = {"tiny": build}`, or both; `build` is a function (shape,
n_classes) -> nn.Module, or a class that is made from these two. Only who starts the process names such a file: run
folders and recipes hold names alone, and nothing that is read from them is ever executed.
"""

import hashlib
import importlib
import inspect
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
from warpi.nets.registry import NETS, Build, NetEntry, make_net
from warpi.runs.defaults import resolve_method
from warpi.runs.rerun import PLUGIN_FILES
from warpi.runs.schema import STORED
from warpi.runs.spec import DataSpec
from warpi.training.method import Method
from warpi.training.recipe import Recipe
from warpi.utils.flags import Parser, add_fields

METHOD_PLUGINS = PLUGIN_FILES["METHODS"]
"""The methods in METHODS that come from a file in use, with the file."""
NET_PLUGINS = PLUGIN_FILES["NETS"]
"""The same for NETS."""
_USED: dict[Path, str] = {}  # every file in use, as it was given

_RUN = (
    "out",
    "method",
    "resume",
    "device",
    "devices",
    "threads",
    "checkpoint_seconds",
    "checkpoint_epochs",
    "tensorboard",
    "quiet",
    "help",
)
_TAKEN = {
    *_RUN,
    *STORED,
    *(f.name for cls in (DataSpec, Recipe) for f in fields(cls)),
}  # what settings of a method cannot be


@contextmanager
def using(files: Iterable[Path | str]) -> Iterator[None]:
    """Inside, METHODS and NETS hold what these files define, too. Each file is executed once, here."""
    tables: list[dict[Any, Any]] = [METHODS, NETS, METHOD_PLUGINS, NET_PLUGINS, _USED]
    before, paths, modules = [dict(table) for table in tables], list(sys.path), set(sys.modules)
    try:
        for file in files:
            _use(str(file))
        yield
    finally:
        for name in _neighbours({path.parent for path in _USED}):
            if name not in modules:
                del sys.modules[name]  # next time it is read again, or it is another folder's
        for table, content in zip(tables, before, strict=True):
            table.clear()
            table.update(content)
        sys.path[:] = paths


def run_with(argv: list[str], run: Callable[[list[str]], None]) -> None:
    """Run a command with the files that `--use` names before it."""
    files, rest = list[str](), list(argv)
    while rest and rest[0].partition("=")[0] == "--use":
        flag, equals, file = rest.pop(0).partition("=")
        file = file if equals else rest.pop(0) if rest else ""
        if not file or file.startswith("-"):
            raise UserError(f"{flag} takes a file of your own, got {file!r}; such as: warpi --use mine.py fit ...")
        files.append(file)
    with using(files):
        run(rest)


def flags() -> list[str]:
    """What a process that this one starts, or a command that goes on, is given before its command."""
    return [word for file in _USED.values() for word in ("--use", file)]


def family(method: str) -> str | None:
    """What a method of the table does about wrong labels; None where a class of the user's own does not say."""
    kind = type(METHODS[method])
    said = any("family" in vars(cls) for cls in kind.__mro__ if cls is not Method)
    return kind.family if said or method not in METHOD_PLUGINS else None


def stored_net(name: str) -> str:
    """A run from Python stores a network as MODULE.NAME: that of a file in use, where one has the name."""
    last = name.rpartition(".")[2]
    return last if last in NET_PLUGINS else name


def check_fields(path: Path, method: str | Method, options: Mapping[str, object]) -> None:
    """A stored run can be made again only by a method that still has every field that it had."""
    name, now = resolve_method(method)
    for field in options:
        if field not in {f.name for f in fields(now)}:
            own = name in METHOD_PLUGINS or name not in METHODS
            whose = f"of {METHOD_PLUGINS.get(name, 'your own')}" if own else "of this version of warpi"
            raise UserError(
                f"the run in {path} was made with {field} = {options[field]!r}, and the method {name!r} {whose} no "
                f"longer has a field {field!r}; {'put it back, or ' * own}train again with another --out"
            )


# -- one file --------------------------------------------------------------------------------------------------------


def _use(file: str) -> None:
    path = Path(file).resolve()
    if path in _USED:
        return
    module = _load(file, path)
    for name, known in _neighbours({used.parent for used in _USED} - {path.parent}).items():
        if (path.parent / f"{name}.py").exists() or (path.parent / name / "__init__.py").exists():
            raise UserError(f"{file} has a neighbour {name!r}, and {known} is in use; rename one of them")
    _USED[path] = file
    sys.path.append(str(path.parent))  # for what it imports later
    methods, nets = _table(module, "METHODS", METHODS, file), _table(module, "NETS", NETS, file)
    if methods is None and nets is None:
        raise UserError(f"{file} defines neither METHODS nor NETS; end it with METHODS = {{'mine': Mine()}}")
    for name, method in (methods or {}).items():
        place = _place(file, "METHODS", name, METHODS, METHOD_PLUGINS)
        METHODS[name], METHOD_PLUGINS[name] = _method(method, place), file
    for name, build in (nets or {}).items():
        place = _place(file, "NETS", name, NETS, NET_PLUGINS)
        NETS[name], NET_PLUGINS[name] = _net(build, place, path), file


def _load(file: str, path: Path) -> ModuleType:
    """The file as a module. Its folder can be imported from meanwhile."""
    try:
        source = path.read_bytes()
    except FileNotFoundError as e:
        raise UserError(f"there is no file {file!r}; --use takes a python file of your own") from e
    except OSError as e:
        raise UserError(f"cannot read {file!r}: {e.strerror}; --use takes a python file of your own") from e
    digest = hashlib.sha256(str(path).encode()).hexdigest()[:8]  # two files may have one name
    module = ModuleType(f"own_{digest}_{path.stem}")
    module.__file__, folder = str(path), str(path.parent)
    sys.modules[module.__name__] = module  # where dataclasses and type hints look
    sys.path.insert(0, folder)
    importlib.invalidate_caches()
    try:
        exec(compile(source, str(path), "exec", dont_inherit=True), vars(module))
    except (Exception, SystemExit) as e:  # whatever the user's code does
        del sys.modules[module.__name__]
        raise UserError(f"cannot load {_said(e, file, path)}; all of it: python {shlex.quote(file)}") from e
    finally:
        if folder in sys.path:
            sys.path.remove(folder)
    return module


def _neighbours(folders: set[Path]) -> dict[str, Path]:
    """The modules that were imported from these folders, by name."""
    files = {name: Path(file) for name, m in sys.modules.items() if (file := getattr(m, "__file__", None))}
    homes = {name: file.parent.parent if file.name == "__init__.py" else file.parent for name, file in files.items()}
    return {name: file for name, file in files.items() if homes[name] in folders and not name.startswith("own_")}


def _said(error: BaseException, file: str, path: Path) -> str:
    """FILE:LINE: what went wrong, where the deepest line is that lies in the file or in one beside it."""
    lines = [(frame.filename, frame.lineno) for frame in traceback.extract_tb(error.__traceback__)]
    text = str(error)
    if isinstance(error, SyntaxError):
        lines, text = [*lines, (error.filename or "", error.lineno)], error.msg
    beside = [(Path(name).name, line) for name, line in lines if Path(name).parent == path.parent]
    name, line = beside[-1] if beside else (path.name, None)
    kind = "" if isinstance(error, UserError) else type(error).__name__
    return (
        f"{Path(file).with_name(name)}{f':{line}' if line else ''}: {': '.join(part for part in (kind, text) if part)}"
    )


def _table(module: ModuleType, name: str, ours: object, file: str) -> Mapping[Any, Any] | None:
    found = vars(module).get(name)
    if found is None or found is ours:  # imported from warpi
        return None
    if not isinstance(found, Mapping):
        example = "{'mine': Mine()}" if name == "METHODS" else "{'tiny': build}"
        raise UserError(f"{name} in {file} must be a dict such as {example}, got {type(found).__name__}")
    return found


def _place(file: str, table: str, name: object, taken: Mapping[str, object], files: Mapping[str, str]) -> str:
    """How an entry of a table is called in messages; its name must be a new one."""
    place = f"{table}[{name!r}] in {file}"
    if not isinstance(name, str) or not (name.isidentifier() and name.isascii()):
        raise UserError(f"{place}: a name is made of letters, digits and _, and begins with no digit; choose another")
    if name in taken:
        whose = f"of {files[name]}" if name in files else "that warpi has"
        kind = "method" if table == "METHODS" else "network"
        raise UserError(f"{place}: {name!r} is the name of a {kind} {whose}; choose another")
    return place


def _method(method: object, place: str) -> Method:
    """A method of which the shell can make everything: another one like it, and its flags."""
    if isinstance(method, type) and issubclass(method, Method):
        raise UserError(f"{place} is the class {method.__name__}, an instance is needed; write {method.__name__}()")
    if not isinstance(method, Method):
        got = f"the class {method.__name__}" if isinstance(method, type) else type(method).__name__
        raise UserError(f"{place} must be a warpi.Method, got {got}; derive your class from it and define `step`")
    kind = type(method).__name__
    try:
        type(method)()
        replace(method, **asdict(method))
    except Exception as e:  # of the user's own code
        raise UserError(
            f"{place}: {kind} cannot be made without arguments, or not from its fields ({e}); make it a @dataclass "
            "whose fields, its hyper-parameters, all have defaults"
        ) from e
    names = [f.name for f in fields(method)]
    for cls in type(method).__mro__:
        for name, hint in inspect.get_annotations(cls).items() if issubclass(cls, Method) and cls is not Method else ():
            if name not in names and "ClassVar" not in str(hint):
                raise UserError(f"{place}: {name!r} of {cls.__name__} is no field; write @dataclass above the class")
    for name in names:
        if name in _TAKEN:
            raise UserError(f"{place}: {kind} has a field {name!r}, which every run has; call it something else")
        try:
            add_fields(Parser("warpi fit"), "", method, skip=tuple(other for other in names if other != name))
        except Exception as e:  # of types that no flag can hold
            raise UserError(
                f"{place}: the field {name!r} of {kind} cannot be a flag ({type(e).__name__}: {e}); it may be int, "
                "float, str, bool, a Literal of texts, a tuple of one of these, or one of these or None"
            ) from e
    parser = Parser("warpi fit")
    try:
        for each in (DataSpec(), Recipe(), method):
            add_fields(parser, "", each)
    except ArgumentError as e:  # such as `no_x` beside a bool `x`, whose flags are --x and --no-x
        raise UserError(f"{place}: two fields of a run would be one flag ({e}); call yours something else") from e
    return method


def _net(build: object, place: str, path: Path) -> NetEntry:
    """A network that is made, and looked at, as one given from Python is."""
    if isinstance(build, nn.Module):
        kind = type(build).__name__
        raise UserError(
            f"{place} is a module, whose weights would be other ones in every process; give its class, or a function: "
            f"lambda shape, n_classes: {kind}()"
        )
    if not callable(build):
        raise UserError(f"{place} must be a function (shape, n_classes) -> nn.Module, got {type(build).__name__}")
    try:
        inspect.signature(build).bind((1,), 2)
    except TypeError as e:
        raise UserError(f"{place} is called with (shape, n_classes), and does not take them ({e})") from e
    except ValueError:  # it does not say what it takes
        pass
    said = (build.__doc__ or "").strip() if inspect.isroutine(build) or isinstance(build, type) else ""
    return NetEntry(said.splitlines()[0] if said else f"of {path.name}", _made_by(build, place, path))


def _made_by(build: Callable[..., Any], place: str, path: Path) -> Build:
    def made(shape: tuple[int, ...], n_classes: int) -> nn.Module:
        try:
            return make_net(build, shape, n_classes)
        except UserError as e:
            raise UserError(f"{place}: {e}") from e
        except Exception as e:  # of the user's own code
            raise UserError(f"{place} cannot be made for {shape}, {n_classes}: {_said(e, path.name, path)}") from e

    return made
