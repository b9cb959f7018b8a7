"""The state of each run of a sweep: missing, begun, done, or kept from another sweep with the same settings."""

import json
import logging
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import lru_cache
from itertools import chain
from pathlib import Path
from typing import Any

from warpi.datasets.registry import DATASETS
from warpi.errors import UserError
from warpi.methods.old_names import use_current_names
from warpi.methods.registry import METHODS
from warpi.runs import plugins
from warpi.runs.defaults import BY_DATASET, DATA_DEPENDENT, default_split, resolve_defaults
from warpi.runs.fingerprints import file_sha256, stamp
from warpi.runs.run_folder import RunFolder
from warpi.runs.same_run import comparable_spec
from warpi.runs.schema import DONE, RESULTS, SPEC, SWEEP
from warpi.runs.spec import DataCache, DataSpec, RunSpec, files_to_hash, prepare
from warpi.runs.stored_facts import ABSENT, Difference, differences
from warpi.sweep.plan import Job, Plan, Settings
from warpi.utils.files import read_json

log = logging.getLogger("warpi.sweep")

KEPT = (SPEC, SWEEP, RESULTS, DONE)
"""The files of a finished run that are kept: everything that its figures need, without the weights."""


@dataclass(frozen=True)
class State:
    """The progress of a run."""

    done: bool = False
    begun: bool = False  # there is a checkpoint to resume from
    epoch: int = 0  # epochs on disk
    epochs: int | None = None  # planned epochs; None if not known yet
    problem: str = ""  # why it cannot be run


def run_state(plan: Plan, job: Job, cache: DataCache | None = None) -> State:
    """The state of a run, including kept results. Raises a UserError if its folder belongs to another run."""
    path = run_folder(plan, job, cache)
    if path.parent != plan.out:
        return State(True, True, *_length(path))
    return _folder_state(path, job.settings, cache)


def run_folder(plan: Plan, job: Job, cache: DataCache | None = None) -> Path:
    """The folder of a run: in the sweep's folder, or one with kept results if the run has not begun there."""
    path = plan.out / job.name
    folder = RunFolder(path)
    if folder.has_checkpoint or folder.is_done:
        return path
    return find_kept(plan.kept, job, cache) or path


def find_kept(folders: Sequence[Path], job: Job, cache: DataCache | None = None) -> Path | None:
    """The folder with all results of a run with these settings, under its own name or under that of another sweep."""
    named = (folder / job.name for folder in folders)
    others = (path for folder in folders for path in _by_settings(folder).get(_key(job.settings), ()))
    return next((path for path in chain(named, others) if why_not_kept(path, job.settings, cache) is None), None)


def _by_settings(folder: Path) -> dict[str, list[Path]]:
    """The run folders in a folder by their settings; read again only if a folder was added or removed."""
    return _index(folder, folder.stat().st_mtime_ns) if folder.is_dir() else {}


@lru_cache(maxsize=64)
def _index(folder: Path, _: int) -> dict[str, list[Path]]:
    paths: dict[str, list[Path]] = {}
    for file in sorted(folder.glob(f"*/{SWEEP}")):
        with suppress(UserError):  # a broken file is reported when its run is looked up by name
            paths.setdefault(_key(read_settings(file) or {}), []).append(file.parent)
    return paths


def _key(settings: Settings) -> str:
    """Settings as a text key, without the location of a built-in data set."""
    named = settings.get("data", DataSpec.data) in DATASETS
    return json.dumps({k: v for k, v in settings.items() if k != "root" or not named}, sort_keys=True)


def why_not_kept(path: Path, settings: Settings, cache: DataCache | None = None) -> str | None:
    """Why a folder does not contain all results of a finished run with these settings; None if it does."""
    missing = [name for name in KEPT if not (path / name).exists()]
    if missing:
        return f"{missing[0]} is missing"
    stored = RunFolder(path).read_spec() or {}
    changed = _changed_setting(read_settings(path / SWEEP) or {}, settings, stored)
    changed = changed or _changed_split(stored, settings) or _changed_default(stored, settings)
    if changed := changed or _changed_plugin(stored, settings):
        return f"it was run with {changed[0]}, not with {changed[1]}"
    if files := _other_content(stored, settings, cache):
        return f"it was made from another version of {files}"
    return None if _is_complete(path) else "its results.jsonl does not contain every epoch"


def _changed_default(stored: Mapping[str, Any], settings: Settings) -> tuple[str, str] | None:
    """The first default that has changed since a run of a built-in data set was made: before, and now."""
    defaults = BY_DATASET.get(settings.get("data", DataSpec.data))
    if defaults is None:
        return None
    recipe, options, _ = resolve_defaults(METHODS[settings["method"]], defaults, settings)
    before = {**stored["spec"]["options"], **stored["spec"]["recipe"]}
    return _first(differences(before, _as_json({**options, **asdict(recipe)}), shared=True))


def _changed_split(stored: Mapping[str, Any], settings: Settings) -> tuple[str, str] | None:
    """The first default of the split that has changed since a run was made: before, and now.

    Older versions held out rows of the user's data too.
    """
    now = {
        name: value if settings.get(name) is None else settings[name]
        for name, value in default_split(settings.get("data", DataSpec.data)).items()
    }
    return _first(differences(stored["spec"], now, shared=True))


def _changed_plugin(stored: Mapping[str, Any], settings: Settings) -> tuple[str, str] | None:
    """The first default of a custom method that has changed since a run was made: before, and now."""
    if settings["method"] not in plugins.METHOD_PLUGINS:
        return None
    method = METHODS[settings["method"]]
    defaults = _as_json(asdict(method))
    is_set = [name for name in defaults if name in settings or f"{type(method).__name__}.{name}" in DATA_DEPENDENT]
    return _first(differences(stored["spec"]["options"], defaults, ignore=is_set, shared=True))


def _other_content(stored: Mapping[str, Any], settings: Settings, cache: DataCache | None = None) -> str | None:
    """A source file that has changed since the run was made, and how this was detected; None if there is none.

    Noise files, `--matrix` and `--weights` are compared by their hashes. The user's data is read again and compared
    with the stored facts if its stamp has changed. A file that no longer exists is not needed by a finished run.
    """
    spec = _spec(settings)
    for fact, file in files_to_hash(spec).items():
        before = stored["facts"].get(fact)
        now = _digest(file, stamp(file)) if file and before else None
        if now not in (None, before):
            return f"{file}: its sha256 was {before:.12}, now {now:.12}"
    if spec.data.data not in DATASETS and not os.path.exists(spec.data.data):
        return None
    stamps = spec.data.stamps(cache)
    stored_stamps = stored["environment"].get("stamps", {})
    touched = [file for file in stamps if stamps[file] != stored_stamps.get(file)]
    facts = _facts(spec.data, settings["seed"], *stamps.values()) if touched else {}
    for name, before, now in differences(stored["facts"], facts, shared=True):
        return f"{' or '.join(touched)}: {name} was {before!s:.12}, now {now!s:.12}"
    return None


def _spec(settings: Settings) -> RunSpec:
    return RunSpec.from_settings(**{name: value for name, value in settings.items() if name != "threads"})


@lru_cache(maxsize=64)
def _digest(file: str, _: str) -> str | None:
    """The hash of a file with this stamp; None if it cannot be read."""
    with suppress(OSError):
        return file_sha256(file)
    return None


@lru_cache(maxsize=64)
def _facts(data: DataSpec, seed: int, *_: str) -> dict[str, Any]:
    """The facts that a run of this data would store now, with any method; empty if the data cannot be read."""
    try:
        prepared = prepare(RunSpec.from_settings("ce", seed=seed, **asdict(data)))
    except UserError as e:
        log.warning(
            "%s has changed since runs were made from it and cannot be compared with their data: %s", data.data, e
        )
        return {}
    return prepared.facts()


def check_fit_settings(path: Path, settings: Settings, cache: DataCache | None) -> None:
    """Raise if a run that `warpi fit` started differs from the sweep's run in any setting."""
    stored = RunFolder(path).read_spec()
    if stored is None:
        return
    asked = _as_json(prepare(_spec(settings), cache).spec.to_json())
    changed = differences(comparable_spec(stored["spec"]), comparable_spec(asked), ignore=("root",))
    if words := _first(changed):
        raise _begun_as_another(path, *words)


def _as_json(values: Mapping[str, Any]) -> dict[str, Any]:
    """Values as they are read from JSON, with lists instead of tuples."""
    plain: dict[str, Any] = json.loads(json.dumps(values))
    return plain


def _first(changed: Sequence[Difference]) -> tuple[str, str] | None:
    """The first difference as two texts: before, and now."""
    if not changed:
        return None
    name, before, after = min(changed, key=lambda difference: difference.name)
    words = [f"no {name}" if value is ABSENT else f"{name} = {value!r}" for value in (before, after)]
    return words[0], words[1]


def _begun_as_another(path: Path, before: str, after: str) -> UserError:
    return UserError(f"{path} was started with {before}, not with {after}; choose another --out to change it")


def _length(path: Path) -> tuple[int, int | None]:
    """The numbers of finished and of planned epochs."""
    spec = RunFolder(path).read_spec()
    try:
        epoch = (path / RESULTS).read_bytes().count(b"\n")
    except OSError:
        epoch = 0
    return epoch, spec["spec"]["recipe"].get("epochs") if spec else None


def _is_complete(path: Path) -> bool:
    """Whether every epoch has a readable record."""
    try:
        return len(RunFolder(path).read_history("")) == _length(path)[1]
    except UserError:
        return False


def _folder_state(path: Path, settings: Settings, cache: DataCache | None) -> State:
    folder = RunFolder(path)
    epoch, epochs = _length(path)
    known = read_settings(path / SWEEP)
    stored = folder.read_spec()
    done = folder.is_done
    begun = done or folder.has_checkpoint
    if done and not _is_complete(path):
        raise UserError(
            f"{path} is done, but its results.jsonl does not contain every epoch; delete the folder to run it again"
        )
    if begun and known is not None and stored is not None:
        if changed := _changed_setting(known, settings, stored) or _changed_plugin(stored, settings):
            raise _begun_as_another(path, *changed)
        if changed := _changed_split(stored, settings):
            raise UserError(
                f"{path} was started with {changed[0]}, the default of an older version; now it would be {changed[1]}; "
                "to keep its rows, set both val and test in the file of the sweep, or choose another --out"
            )
        if files := _other_content(stored, settings, cache):
            raise UserError(
                f"{path} was made from another version of {files}; restore it, choose another --out, or delete the "
                "folder to run it again"
            )
    done = done and known is not None  # otherwise a run of `warpi fit`; resuming it compares all settings
    return State(done, begun, epoch if begun else 0, epochs)


def _changed_setting(before: Settings, settings: Settings, stored: Mapping[str, Any]) -> tuple[str, str] | None:
    """The first setting that differs: before, and now. The location of the data does not identify it.

    A setting that was not set before had the value in the `stored` specification.
    """
    spec = stored.get("spec", {})
    was = {**spec.get("options", {}), **spec.get("recipe", {}), **spec}
    not_set = {name: was[name] for name in settings if before.get(name) is None and name in was}
    set_before, set_now = (
        {name: value for name, value in each.items() if value is not None}
        for each in ({**before, **not_set}, _as_json(settings))
    )
    return _first(differences(set_before, set_now, ignore=("root",)))


def read_settings(file: Path) -> dict[str, Any] | None:
    advice = "delete it, or choose another --out"
    try:
        content = read_json(file, advice)
    except FileNotFoundError:
        return None
    if not isinstance(content, dict):
        raise UserError(f"{file} is damaged; {advice}")
    return use_current_names(content.get("method"), content)
