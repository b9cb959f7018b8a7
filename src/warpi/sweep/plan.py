"""Read the TOML file of a sweep: the runs it describes, each with a unique folder name."""

import json
import logging
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

from warpi.errors import UserError, unknown
from warpi.methods.old_names import OLD_NAMES, rename
from warpi.methods.registry import METHODS
from warpi.nets.registry import NETS
from warpi.noise.parse import Noise
from warpi.runs.defaults import to_plain_types
from warpi.runs.schema import STORED, to_stored_names
from warpi.runs.spec import DataSpec
from warpi.training.recipe import Recipe
from warpi.utils.files import sha256

Settings = dict[str, Any]
log = logging.getLogger("warpi.sweep")

_OTHER_KEYS = ("method", "threads")  # settings of a run that are not fields of a dataclass
_NAMED = ("method", "noise", "seed")  # in every folder name
_OLD_NAMES = {old: new for names in OLD_NAMES.values() for old, new in names.items()}
_IN_FOLDER_NAMES = {new: old for old, new in _OLD_NAMES.items()}  # folders keep the names they have always had
_SECTIONS = {"sweep": dict, "defaults": dict, "grid": dict, "method": dict, "runs": list}


@dataclass(frozen=True)
class Job:
    """One run of a sweep."""

    name: str  # folder name
    settings: Settings  # as `warpi fit` takes them; only those that the file sets


@dataclass(frozen=True)
class Plan:
    """All runs of a sweep, in the order in which they start."""

    file: Path
    out: Path  # the folder that contains the run folders
    jobs: tuple[Job, ...]
    kept: tuple[Path, ...] = ()  # folders with results of runs that were made elsewhere
    flags: tuple[str, ...] = ()  # the arguments of `warpi sweep` that recreate this plan


def read_plan(file: Path, out: Path | None = None, root: Path | None = None, changes: Sequence[str] = ()) -> Plan:
    """Read a sweep file. `changes` are `key=value` texts that override settings of the file."""
    try:
        tables = tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as e:
        raise UserError(f"cannot read {file}: {e.strerror}; pass a TOML file, such as recipes/digits-quick.toml") from e
    except ValueError as e:  # invalid TOML or UTF-8
        raise UserError(f"{file} is not TOML: {e}") from e
    try:
        sections = _sections(tables)
        overrides = _read_changes(changes)
        if root is not None:
            overrides["root"] = str(root)
        jobs = tuple(_jobs(sections, overrides))
        if not jobs:
            chosen = {key: value for key, value in overrides.items() if key != "root" and "." not in key}
            shown = " ".join(f"--set {key}={value}" for key, value in chosen.items())
            raise UserError(f"no run is left: none of its [[runs]] has {shown}; --dry-run lists the runs of the file")
        _check_once(jobs)
        folder_of_runs = sections["sweep"].get("out") or f"runs/{sections['sweep'].get('name') or file.stem}"
    except UserError as e:
        raise UserError(f"{file}: {e}") from e
    kept = sections["sweep"].get("kept", [])
    folders = tuple(map(Path, [kept] if isinstance(kept, str) else kept))
    for folder in folders:
        if not folder.parent.is_dir():  # the folder itself appears with the first kept run
            log.warning("%s: %s does not exist in %s, so no kept run counts as done", file, folder.parent, Path.cwd())
    out = out or Path(folder_of_runs)
    flags = [str(file), "--out", str(out), *(["--root", str(root)] if root is not None else [])]
    flags += [word for change in changes for word in ("--set", change)]
    return Plan(file, out, jobs, folders, tuple(flags))


def _sections(tables: Mapping[str, Any]) -> dict[str, Any]:
    """Return all sections of the file, missing ones empty, after checking their keys and types."""
    for name, table in tables.items():
        if name not in _SECTIONS:
            raise unknown("section", name, _SECTIONS)
        if not isinstance(table, _SECTIONS[name]):
            raise UserError(f"{name} must be written as {'[[runs]]' if name == 'runs' else f'[{name}]'}, got {table!r}")
    sections: dict[str, Any] = {name: tables.get(name, kind()) for name, kind in _SECTIONS.items()}
    for key, value in sections["sweep"].items():
        if key not in (allowed := ("name", "out", "kept")):
            raise unknown("setting in [sweep]", key, allowed)
        several = value if key == "kept" and isinstance(value, list) else [value]
        if not all(isinstance(text, str) and text for text in several):
            or_list = " or a list of texts" if key == "kept" else ""
            raise UserError(f"{key} in [sweep] must be text{or_list}, got {value!r}")
    for key, value in sections["grid"].items():
        if not isinstance(value, list) or (_is_list(key, always=True) and not all(isinstance(v, list) for v in value)):
            raise UserError(f"{key} in [grid] must be a list of values, got {value!r}; one value goes into [defaults]")
    for key, value in sections["defaults"].items():
        if _is_axis(key, value):
            raise UserError(f"{key} in [defaults] must be one value, got {value!r}; several go into [grid]")
    for name, table in sections["method"].items():
        if name not in METHODS:
            raise unknown("method", name, METHODS)
        if not isinstance(table, dict):
            raise UserError(f"settings of a method are written as [method.{name}], got {table!r}")
        if "method" in table:
            raise UserError(f"method cannot be set in [method.{name}]")
    for number, table in enumerate(sections["runs"], 1):
        if not isinstance(table, dict):
            raise UserError(f"[[runs]] {number} must be a table, got {table!r}")
    sections["grid"] = _rename(sections["grid"])
    sections["defaults"] = _rename(sections["defaults"])
    sections["method"] = {name: _rename(table) for name, table in sections["method"].items()}
    sections["runs"] = [_rename(table) for table in sections["runs"]]
    places = {"[grid]": sections["grid"], "[defaults]": sections["defaults"]}
    places |= {f"[method.{name}]": table for name, table in sections["method"].items()}
    places |= {f"[[runs]] {number}": table for number, table in enumerate(sections["runs"], 1)}
    for place, table in places.items():
        for key, value in table.items():
            if key not in _known():
                raise unknown(f"setting in {place}", key, _known())
            if _is_axis(key, value) and not value:
                raise UserError(f"{key} in {place} is an empty list; set a value, or omit it")
            _check_text(key, value, place)
    return sections


def _rename(table: Mapping[str, Any]) -> dict[str, Any]:
    """Settings under the names in `spec.json`, with a warning about a deprecated name."""
    if "meta_data" in table:
        log.warning("warpi: meta_data is deprecated; use trusted")
    old_names = {old: new for old, new in _OLD_NAMES.items() if old in table and old not in _known()}
    for old, new in old_names.items():
        log.warning("warpi: %s is deprecated; use %s", old, new)
    return to_stored_names(rename(table, old_names))


def _read_changes(changes: Iterable[str]) -> Settings:
    """Values of `key=value` texts by key. A key of the form `METHOD.key` is for the runs of that method."""
    values: Settings = {}
    for text in changes:
        key, equals, written = (part.strip() for part in text.partition("="))
        if not equals:
            raise UserError(f"--set takes key=value, got {text!r}")
        try:
            value = tomllib.loads(f"value = {written}")["value"]
        except tomllib.TOMLDecodeError:
            value = written  # text without quotes
        name, dot, option = key.rpartition(".")
        if dot and name not in METHODS:
            raise unknown("method in --set", name, METHODS)
        if option in STORED or option in _OLD_NAMES:
            ((option, value),) = _rename({option: value}).items()
            key = f"{name}{dot}{option}"
        if option not in _known() or (dot and option == "method"):
            raise unknown("setting in --set", option, _known())
        if _is_axis(option, value) and not value:
            raise UserError(f"--set {key}: the list is empty; set a value")
        if _is_text(option) and not isinstance(value, list):
            value = value if isinstance(value, str) else written  # text that looks like a number or a date
        _check_text(option, value, "--set")
        values[key] = value
    return values


def _known() -> set[str]:
    """The names of all settings that a run can have."""
    return {*_OTHER_KEYS, *_hints(tuple(map(type, METHODS.values())))}


@cache  # the key contains the methods, because a plugin file may add some
def _hints(methods: tuple[type, ...]) -> dict[str, list[Any]]:
    """The types of every setting. A setting may have different types in different methods."""
    types: dict[str, list[Any]] = {}
    for cls in (DataSpec, Recipe, *methods):
        hints = get_type_hints(cls)
        for f in fields(cls):
            types.setdefault(f.name, []).append(hints[f.name])
    return types


def _is_list(key: str, methods: Iterable[str] | None = None, always: bool = False) -> bool:
    """Whether a setting is itself a list, for any (with `always`: for all) of the given methods, or of all methods."""
    names = METHODS if methods is None else [name for name in METHODS if name in methods]
    hints = _hints(tuple(type(METHODS[name]) for name in names)).get(key, ())
    return bool(hints) and (all if always else any)(get_origin(hint) is tuple for hint in hints)


def _is_axis(key: str, value: object, methods: Iterable[str] | None = None) -> bool:
    """Whether a value contains several values: it is a list, or a list of lists if the setting is itself a list."""
    return isinstance(value, list) and (not _is_list(key, methods) or (bool(value) and isinstance(value[0], list)))


def _is_text(key: str) -> bool:
    """Whether a setting is always text."""

    def text(hint: Any) -> bool:
        args = get_args(hint)
        if get_origin(hint) is Literal:
            return all(isinstance(choice, str) for choice in args)
        if any(get_origin(arg) is tuple for arg in (hint, *args)):  # a file name, or numbers
            return False
        return hint is str or (str in args and not {int, float, bool} & {*args})

    hints = _hints(tuple(map(type, METHODS.values()))).get(key, ())
    return key == "method" or (bool(hints) and all(map(text, hints)))


def _check_text(key: str, value: object, place: str) -> None:
    """Raise if a value of a text setting is not quoted (32 is a number)."""
    for each in value if isinstance(value, list) else [value]:
        if _is_text(key) and not isinstance(each, str):
            raise UserError(f"{key} in {place} must be text, got {each}; write it in quotes")


def _jobs(sections: Mapping[str, Any], overrides: Settings) -> Iterator[Job]:
    """Yield the runs of each block: the grid with the keys of a [[runs]] table replaced, or the grid alone."""
    for table in sections["runs"] or [{}]:
        method = {"method": "warpi", **sections["defaults"], **sections["grid"], **overrides, **table}["method"]
        methods = method if isinstance(method, list) else [method]
        axes = {key: values if isinstance(values, list) else [values] for key, values in sections["grid"].items()}
        axes |= {key: value if _is_axis(key, value, methods) else [value] for key, value in table.items()}
        fixed = _change(axes, table, overrides, methods)
        for point in _points(axes):
            given = {**sections["defaults"], **point, **fixed}
            method = given.setdefault("method", "warpi")
            if not isinstance(method, str) or method not in METHODS:
                raise unknown("method", str(method), METHODS)
            stronger = {**axes, **fixed}
            options = {key: v for key, v in sections["method"].get(method, {}).items() if key not in stronger}
            options |= _method_overrides(method, overrides, stronger)
            inner = {key: value for key, value in options.items() if _is_axis(key, value, [method])}
            for inner_point in _points(inner):
                yield _job({**given, **options, **inner_point}, {*axes, *inner})


def _method_overrides(method: str, overrides: Settings, stronger: Settings) -> Settings:
    """The overrides for one method. Raises if a setting with higher precedence would hide one of them."""
    selected = {key.removeprefix(f"{method}."): v for key, v in overrides.items() if key.startswith(f"{method}.")}
    if both := sorted(selected.keys() & stronger.keys()):
        raise UserError(
            f"--set {method}.{both[0]} would change nothing: [grid], [[runs]] or --set already sets {both[0]}; "
            f"write --set method={method} --set {both[0]}=..."
        )
    return selected


def _change(axes: dict[str, list[Any]], table: Settings, overrides: Settings, methods: Sequence[str]) -> Settings:
    """Replace axes by overrides, so that folders keep their names. Returns the overrides that are not axes.

    The keys of a block define its experiment, so an override of one only selects from the values of the block.
    """
    fixed = {}
    for key, value in overrides.items():
        values = value if _is_axis(key, value, methods) else [value]
        if "." in key:  # for one method: see `_method_overrides`
            continue
        if key in table:
            axes[key] = [each for each in axes[key] if each in values]
        elif key in axes or values is value:
            axes[key] = values
        else:
            fixed[key] = value
    return fixed


def _points(axes: Mapping[str, Sequence[Any]]) -> Iterator[Settings]:
    """The cross product of the axes; the last one varies fastest."""
    for values in product(*axes.values()):
        yield dict(zip(axes, values, strict=True))


def _job(settings: Settings, named: set[str]) -> Job:
    settings = {"noise": DataSpec.noise, "seed": Recipe.seed, **to_plain_types(settings)}
    base = METHODS[settings["method"]]
    groups = {cls: {f.name for f in fields(cls)} for cls in (DataSpec, Recipe, type(base))}
    for key in settings:
        if key not in set(_OTHER_KEYS).union(*groups.values()):
            having = [name for name, method in METHODS.items() if key in {f.name for f in fields(method)}]
            raise UserError(
                f"{key!r} is not a setting of the method {settings['method']!r}; put it into [method.NAME] of the "
                f"methods that have it: {', '.join(having)}"
            )
    try:
        for cls, names in groups.items():
            chosen = {key: value for key, value in settings.items() if key in names}
            replace(base, **chosen) if cls is type(base) else cls(**chosen)
        settings["noise"] = str(Noise.parse(settings["noise"]))
        if (net := settings.get("net", "mlp")) not in NETS:
            raise unknown("net", net, NETS)
        threads = settings.get("threads", 1)
        if not isinstance(threads, int) or isinstance(threads, bool) or not 1 <= threads <= 1024:
            raise UserError(f"threads must be at least 1 and at most 1024, got {threads!r}")
    except UserError as e:
        shown = ", ".join(f"{key} = {settings[key]!r}" for key in sorted({*named, *_NAMED}))
        raise UserError(f"{e} (in the run with {shown})") from e
    in_name = {_IN_FOLDER_NAMES.get(key, key): settings[key] for key in {*named, *_NAMED}}
    return Job(folder_name(in_name), settings)


def folder_name(settings: Settings) -> str:
    """A name such as `warpi_pair-0.4_lr-0.1_seed0`, from these settings only, so it does not change when a grid grows.

    If a value cannot be part of a file name unchanged, the name ends with a short hash of all values.
    """
    rest = sorted(settings.keys() - set(_NAMED))
    written = [(key, *_written(settings[key], ":" if key == "noise" else "")) for key in ("method", "noise", *rest)]
    words = [text if key in _NAMED else f"{key}-{text}" for key, text, _ in written] + [f"seed{settings['seed']}"]
    name = "_".join(words)
    if all(exact for *_, exact in written) and len(name) <= 120:
        return name
    digest = sha256(json.dumps(settings, sort_keys=True))[:8]
    if len(name) > 120:
        name = f"{'_'.join(words[:-1])[:100]}_{words[-1]}"
    return f"{name}_{digest}"


def _written(value: Any, colon: str) -> tuple[str, bool]:
    """A value as part of a file name, and whether this text is unique to the value."""
    if isinstance(value, tuple):
        parts = [_written(part, "") for part in value]
        return ",".join(text for text, _ in parts), all(exact for _, exact in parts)
    if not isinstance(value, str):
        return str(value).lower(), True
    text = re.sub(r"[^\w.+-]+", "-", value, flags=re.ASCII)
    exact = rf"\w+({colon}[\w.]+)?" if colon else r"[\w.]+"
    return text, re.fullmatch(exact, value, flags=re.ASCII) is not None


def _check_once(jobs: Sequence[Job]) -> None:
    """Raise if a run is described twice, or if two runs would share a folder."""
    names: dict[str, str] = {}
    runs: dict[str, str] = {}
    for job in jobs:
        run = json.dumps(job.settings, sort_keys=True)
        if run in runs:
            other = "twice" if runs[run] == job.name else f"also as {runs[run]}"
            raise UserError(f"the run {job.name} is described {other}; remove one of them")
        if names.setdefault(job.name, run) != run:
            raise UserError(f"two different runs would share the folder {job.name}; set what differs in [[runs]]")
        runs[run] = job.name
