"""A sweep's TOML file to the runs it describes, each with a folder name of its own."""

import hashlib
import json
import logging
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any, get_origin, get_type_hints

from warpi.errors import UserError, unknown
from warpi.methods import METHODS
from warpi.nets import NETS
from warpi.noise import Noise
from warpi.recipe import Recipe
from warpi.spec import DataSpec, plain

Settings = dict[str, Any]
log = logging.getLogger("warpi.sweep")

_OWN = ("method", "threads")  # settings of a run that are fields of no dataclass
_NAMED = ("method", "noise", "seed")  # in every folder name, wherever they were set
_SECTIONS = {"sweep": dict, "defaults": dict, "grid": dict, "method": dict, "runs": list}


@dataclass(frozen=True)
class Job:
    """One run of a sweep."""

    name: str  # of its folder
    settings: Settings  # what the file says about it, as `warpi fit` takes it


@dataclass(frozen=True)
class Plan:
    """All runs of a sweep, in the order in which they are begun."""

    file: Path
    out: Path  # the folder of their folders
    jobs: tuple[Job, ...]
    kept: tuple[Path, ...] = ()  # folders with the results of runs that were done elsewhere


def read_plan(file: Path, out: Path | None = None, root: Path | None = None, changes: Iterable[str] = ()) -> Plan:
    """Read a sweep file. `changes` are `key=value`: they take the place of what the file says."""
    try:
        tables = tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as e:
        raise UserError(f"cannot read {file}: {e.strerror}; give a TOML file, such as recipes/digits-quick.toml") from e
    except ValueError as e:  # of TOML, or of UTF-8
        raise UserError(f"{file} is not TOML: {e}") from e
    try:
        sections = _sections(tables)
        set_by_hand = _read_changes(changes, sections["method"])
        if root is not None:
            set_by_hand["root"] = str(root)
        jobs = tuple(_jobs(sections, set_by_hand))
        if not jobs:
            shown = " ".join(f"--set {key}={value}" for key, value in set_by_hand.items() if key != "root")
            raise UserError(f"no run is left: none of its [[runs]] has {shown}; --dry-run lists what there is")
        _check_once(jobs)
        place = sections["sweep"].get("out") or f"runs/{sections['sweep'].get('name') or file.stem}"
    except UserError as e:
        raise UserError(f"{file}: {e}") from e
    kept = sections["sweep"].get("kept", [])
    folders = tuple(map(Path, [kept] if isinstance(kept, str) else kept))
    for folder in folders:
        if not folder.parent.is_dir():  # before the first run is kept there is none
            log.warning("%s: there is no %s in %s, so that no kept run counts as done", file, folder.parent, Path.cwd())
    return Plan(file, out or Path(place), jobs, folders)


# -- what the file holds ---------------------------------------------------------------------------------------------


def _sections(tables: Mapping[str, Any]) -> dict[str, Any]:
    """The sections, all of them there, with keys and lists where they may be."""
    for name, table in tables.items():
        if name not in _SECTIONS:
            raise unknown("section", name, _SECTIONS)
        if not isinstance(table, _SECTIONS[name]):
            raise UserError(f"{name} must be written as {'[[runs]]' if name == 'runs' else f'[{name}]'}, got {table!r}")
    found: dict[str, Any] = {name: tables.get(name, kind()) for name, kind in _SECTIONS.items()}
    for key, value in found["sweep"].items():
        if key not in (allowed := ("name", "out", "kept")):
            raise unknown("setting in [sweep]", key, allowed)
        several = value if key == "kept" and isinstance(value, list) else [value]
        if not all(isinstance(text, str) and text for text in several):
            or_list = " or a list of texts" if key == "kept" else ""
            raise UserError(f"{key} in [sweep] must be text{or_list}, got {value!r}")
    for key, value in found["grid"].items():
        if not isinstance(value, list) or (key in _lists() and not all(isinstance(v, list) for v in value)):
            raise UserError(f"{key} in [grid] must be a list of values, got {value!r}; one value goes into [defaults]")
    for key, value in found["defaults"].items():
        if _is_axis(key, value):
            raise UserError(f"{key} in [defaults] must be one value, got {value!r}; several go into [grid]")
    for name, table in found["method"].items():
        if name not in METHODS:
            raise unknown("method", name, METHODS)
        if not isinstance(table, dict):
            raise UserError(f"settings of a method are written as [method.{name}], got {table!r}")
        if "method" in table:
            raise UserError(f"method cannot be set in [method.{name}]")
    for number, table in enumerate(found["runs"], 1):
        if not isinstance(table, dict):
            raise UserError(f"[[runs]] {number} must be a table, got {table!r}")
    places = {"[grid]": found["grid"], "[defaults]": found["defaults"]}
    places |= {f"[method.{name}]": table for name, table in found["method"].items()}
    places |= {f"[[runs]] {number}": table for number, table in enumerate(found["runs"], 1)}
    for place, table in places.items():
        for key, value in table.items():
            if key not in _known():
                raise unknown(f"setting in {place}", key, _known())
            if _is_axis(key, value) and not value:
                raise UserError(f"{key} in {place} is an empty list; give it a value, or leave it out")
    return found


def _read_changes(changes: Iterable[str], methods: dict[str, Settings]) -> Settings:
    """`key=value` pairs; those of the form `METHOD.key=value` go into the table of that method."""
    made: Settings = {}
    for text in changes:
        key, equals, written = (part.strip() for part in text.partition("="))
        if not equals:
            raise UserError(f"--set takes key=value, got {text!r}")
        try:
            value = tomllib.loads(f"value = {written}")["value"]
        except tomllib.TOMLDecodeError:
            value = written  # text needs no quotes here
        name, dot, option = key.rpartition(".")
        if dot and name not in METHODS:
            raise unknown("method in --set", name, METHODS)
        if option not in _known() or (dot and option == "method"):
            raise unknown("setting in --set", option, _known())
        if _is_axis(option, value) and not value:
            raise UserError(f"--set {key}: an empty list; give it a value")
        if dot:
            methods[name] = {**methods.get(name, {}), option: value}
        else:
            made[option] = value
    return made


def _known() -> set[str]:
    """Every setting that some run may have."""
    return _of(tuple(map(type, METHODS.values())))[0]


def _lists() -> set[str]:
    """Settings that are lists themselves."""
    return _of(tuple(map(type, METHODS.values())))[1]


@cache  # by the methods, which those of a file of the user's own may join
def _of(methods: tuple[type, ...]) -> tuple[set[str], set[str]]:
    classes = (DataSpec, Recipe, *methods)
    hints = [get_type_hints(cls) for cls in classes]
    lists = {name for each in hints for name, hint in each.items() if get_origin(hint) is tuple}
    return {*_OWN, *(f.name for cls in classes for f in fields(cls))}, lists


def _is_axis(key: str, value: object) -> bool:
    """Whether a value stands for several: a list, or for a setting that is a list itself, a list of lists."""
    return isinstance(value, list) and (key not in _lists() or (bool(value) and isinstance(value[0], list)))


# -- the runs --------------------------------------------------------------------------------------------------------


def _jobs(sections: Mapping[str, Any], set_by_hand: Settings) -> Iterator[Job]:
    """Each [[runs]] table is a block: the grid with what the table says instead. Without any the grid is the block."""
    for table in sections["runs"] or [{}]:
        axes = {key: values if isinstance(values, list) else [values] for key, values in sections["grid"].items()}
        axes |= {key: value if _is_axis(key, value) else [value] for key, value in table.items()}
        fixed = _change(axes, table, set_by_hand)
        for point in _points(axes):
            given = {**sections["defaults"], **point, **fixed}
            method = given.setdefault("method", "warpi")
            if not isinstance(method, str) or method not in METHODS:
                raise unknown("method", str(method), METHODS)
            own = {key: v for key, v in sections["method"].get(method, {}).items() if key not in {**axes, **fixed}}
            inner = {key: value for key, value in own.items() if _is_axis(key, value)}
            for options in _points(inner):
                yield _job({**given, **own, **options}, {*axes, *inner})


def _change(axes: dict[str, list[Any]], table: Settings, set_by_hand: Settings) -> Settings:
    """Put values set by hand in the place of axes, so that folders keep their names; return those that are of none.

    What a block says itself belongs to its experiment: there they choose among its values, perhaps none of them.
    """
    fixed = {}
    for key, value in set_by_hand.items():
        values = value if _is_axis(key, value) else [value]
        if key in table:
            axes[key] = [own for own in axes[key] if own in values]
        elif key in axes or values is value:
            axes[key] = values
        else:
            fixed[key] = value
    return fixed


def _points(axes: Mapping[str, Sequence[Any]]) -> Iterator[Settings]:
    """The cross product; the last axis moves fastest."""
    for values in product(*axes.values()):
        yield dict(zip(axes, values, strict=True))


def _job(settings: Settings, named: set[str]) -> Job:
    settings = {"noise": DataSpec.noise, "seed": Recipe.seed, **plain(settings)}
    base = METHODS[settings["method"]]
    groups = {cls: {f.name for f in fields(cls)} for cls in (DataSpec, Recipe, type(base))}
    for key in settings:
        if key not in set(_OWN).union(*groups.values()):
            having = [name for name, method in METHODS.items() if key in {f.name for f in fields(method)}]
            raise UserError(
                f"{key!r} is no setting of the method {settings['method']!r}; put it into [method.NAME] of the "
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
    return Job(folder_name({key: settings[key] for key in {*named, *_NAMED}}), settings)


def folder_name(settings: Settings) -> str:
    """`warpi_pair-0.4_lr-0.1_seed0`: made from these settings alone, so that it stays when a grid grows.

    A value that cannot be written in a file name as it is leaves a short hash of all of them at the end.
    """
    rest = sorted(settings.keys() - set(_NAMED))
    written = [(key, *_written(settings[key], ":" if key == "noise" else "")) for key in ("method", "noise", *rest)]
    words = [text if key in _NAMED else f"{key}-{text}" for key, text, _ in written] + [f"seed{settings['seed']}"]
    name = "_".join(words)
    if all(exact for *_, exact in written) and len(name) <= 120:
        return name
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:8]
    if len(name) > 120:
        name = f"{'_'.join(words[:-1])[:100]}_{words[-1]}"
    return f"{name}_{digest}"


def _written(value: Any, colon: str) -> tuple[str, bool]:
    """A value as part of a file name, and whether no other value is written like it."""
    if isinstance(value, tuple):
        parts = [_written(part, "") for part in value]
        return ",".join(text for text, _ in parts), all(exact for _, exact in parts)
    if not isinstance(value, str):
        return str(value).lower(), True
    text, exact = re.sub(r"[^\w.+-]+", "-", value, flags=re.ASCII), rf"\w+({colon}[\w.]+)?" if colon else r"[\w.]+"
    return text, re.fullmatch(exact, value, flags=re.ASCII) is not None


def _check_once(jobs: Sequence[Job]) -> None:
    """No run twice, and no two in one folder."""
    names: dict[str, str] = {}
    runs: dict[str, str] = {}
    for job in jobs:
        run = json.dumps(job.settings, sort_keys=True)
        if run in runs:
            other = "twice" if runs[run] == job.name else f"also as {runs[run]}"
            raise UserError(f"the run {job.name} is described {other}; take one of them out")
        if names.setdefault(job.name, run) != run:
            raise UserError(f"two runs that are not the same would lie in {job.name}; set what differs in [[runs]]")
        runs[run] = job.name
