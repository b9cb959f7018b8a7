"""The run folders of a sweep: the state of each run, and a queue that hands out the unfinished ones."""

import json
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, field, fields
from functools import lru_cache
from itertools import chain
from pathlib import Path
from typing import Any

from warpi.data.image_files import PHOTO
from warpi.datasets.registry import DATASETS
from warpi.errors import UserError
from warpi.methods.registry import METHODS
from warpi.runs import plugins
from warpi.runs.defaults import BY_DATASET, DATA_DEPENDENT, resolve_defaults
from warpi.runs.fingerprints import file_sha256, stamp
from warpi.runs.resume import files, read_spec
from warpi.runs.schema import read_json, read_record
from warpi.runs.spec import DataSpec, prepare
from warpi.sweep.events import RunEvent
from warpi.sweep.plan import Job, Plan, Settings
from warpi.training import checkpoint
from warpi.utils.files import Busy, one_writer, write_atomically

log = logging.getLogger("warpi.sweep")

KEPT = ("spec.json", "sweep.json", "results.jsonl", "done")
"""Files that are kept of a finished run: everything its figures are made from, without the weights."""


@dataclass(frozen=True)
class State:
    """How far a run has come."""

    done: bool
    begun: bool  # there is a checkpoint to resume from
    epoch: int  # epochs on disk
    epochs: int | None  # planned epochs; None if not known yet


def run_state(plan: Plan, job: Job) -> State:
    """The state of a run, kept results included. Raises a UserError if its folder belongs to another run."""
    path = run_folder(plan, job)
    return _folder_state(path, job.settings) if path.parent == plan.out else State(True, True, *_length(path))


def run_folder(plan: Plan, job: Job) -> Path:
    """The folder of a run: in the sweep's folder, or one with kept results if the run has not begun there."""
    path = plan.out / job.name
    begun = checkpoint.exists(path / "checkpoint.safetensors") or (path / "done").exists()
    return path if begun else find_kept(plan.kept, job) or path


def find_kept(folders: Sequence[Path], job: Job) -> Path | None:
    """The folder with all results of a run with these settings, under its own name or under that of another sweep."""
    named = (folder / job.name for folder in folders)
    others = (path for folder in folders for path in _by_settings(folder).get(_key(job.settings), ()))
    return next((path for path in chain(named, others) if why_not_kept(path, job.settings) is None), None)


def _by_settings(folder: Path) -> dict[str, list[Path]]:
    """The run folders in a folder by their settings; read again only if a folder was added or removed."""
    return _index(folder, folder.stat().st_mtime_ns) if folder.is_dir() else {}


@lru_cache(maxsize=64)
def _index(folder: Path, _: int) -> dict[str, list[Path]]:
    paths: dict[str, list[Path]] = {}
    for file in sorted(folder.glob("*/sweep.json")):
        with suppress(UserError):  # a broken file is reported when its run is asked for by name
            paths.setdefault(_key(_read(file) or {}), []).append(file.parent)
    return paths


def _key(settings: Settings) -> str:
    """Settings as a text key. The location of a built-in data set is ignored; the paths of the user's files are not."""
    named = settings.get("data", DataSpec.data) in DATASETS
    return json.dumps({k: v for k, v in settings.items() if k != "root" or not named}, sort_keys=True)


def why_not_kept(path: Path, settings: Settings) -> str | None:
    """Why a folder does not hold all results of a finished run with these settings; None if it does."""
    missing = [name for name in KEPT if not (path / name).exists()]
    if missing:
        return f"{missing[0]} is missing"
    changed = _difference(_read(path / "sweep.json") or {}, settings) or _other_defaults(path, settings)
    if changed := changed or _other_file(path, settings):
        return f"it was run with {changed[0]}, not with {changed[1]}"
    if files := _other_content(path, settings):
        return f"it was made from another version of {files}"
    return None if _is_complete(path) else "its results.jsonl does not contain every epoch"


def _other_defaults(path: Path, settings: Settings) -> tuple[str, str] | None:
    """The first default that has changed since a run of a built-in data set was made: before, and now."""
    stored = read_spec(path)
    defaults = BY_DATASET.get(settings.get("data", DataSpec.data))
    if stored is None or defaults is None:
        return None
    recipe, options, _ = resolve_defaults(METHODS[settings["method"]], defaults, settings)
    now = json.loads(json.dumps({"options": options, "recipe": {**asdict(recipe), "seed": None}}))
    for part in now:
        for key, value in now[part].items():
            if (was := stored["spec"][part].get(key, value)) != value:
                return f"{key} = {was!r}", f"{key} = {value!r}"
    return None


def _other_file(path: Path, settings: Settings) -> tuple[str, str] | None:
    """The first default of a custom method that has changed since a run was made: before, and now."""
    method = METHODS[settings["method"]]
    if settings["method"] not in plugins.METHOD_FILES or (stored := read_spec(path)) is None:
        return None
    for key, value in json.loads(json.dumps(asdict(method))).items():
        is_set = key in settings or f"{type(method).__name__}.{key}" in DATA_DEPENDENT
        if not is_set and (was := stored["spec"]["options"].get(key, value)) != value:
            return f"{key} = {was!r}", f"{key} = {value!r}"
    return None


def _other_content(path: Path, settings: Settings) -> str | None:
    """Which source file of a run has changed since, and how that is known; None if no change is known.

    Noise files, `--matrix` and `--weights` are compared by their hashes. The user's data is read again and compared
    with the stored facts if its stamp has changed. A file that no longer exists is not needed by a finished run.
    """
    if (stored := read_spec(path)) is None:
        return None
    data = DataSpec(**{f.name: settings[f.name] for f in fields(DataSpec) if f.name in settings})
    for fact, file in files(data.noise, settings, settings.get("weights")).items():
        was = stored["facts"].get(fact)
        if file and was and (now := _digest(file)) not in (None, was):
            return f"{file}: its sha256 was {was:.12}, is {now:.12}"
    if data.data not in DATASETS and not os.path.exists(data.data):
        return None
    stamps, then = data.stamps(), stored["environment"].get("stamps", {})
    touched = [place for place in stamps if stamps[place] != then.get(place)]
    for key, value in (_facts(data, settings["seed"], *stamps.values()) if touched else {}).items():
        if (before := stored["facts"].get(key, value)) != value:
            return f"{' or '.join(touched)}: {key} was {before!s:.12}, is {value!s:.12}"
    return None


def _digest(file: str) -> str | None:
    with suppress(OSError):
        return _sha256(file, stamp(file))
    return None


@lru_cache(maxsize=64)
def _sha256(file: str, _: str) -> str | None:
    return file_sha256(file)


@lru_cache(maxsize=64)
def _facts(data: DataSpec, seed: int, *_: str) -> dict[str, Any]:
    """The facts that a run of this data would store now, whatever its method; empty if the data cannot be read."""
    try:
        spec, task, truth = prepare("ce", seed=seed, **asdict(data))
    except UserError as e:
        log.warning(
            "%s has changed since runs were made from it and cannot be compared with their data: %s", data.data, e
        )
        return {}
    parts = {"n_train": task.train, "n_meta": task.meta, "n_val": task.val, "n_test": truth.test}
    sizes = {name: len(part) if part else 0 for name, part in parts.items()}
    return {
        **spec.hashes,
        "noise_sha256": truth.noise_hash,
        **sizes,
        "n_classes": task.n_classes,
        "wrong_share": task.noise_rate,
    }


def _check_fit(path: Path, settings: Settings) -> None:
    """Raise if a run that `warpi fit` began differs from the sweep's run in any setting."""
    if (stored := read_spec(path)) is None:
        return

    def flat(spec: Mapping[str, Any]) -> dict[str, Any]:
        size = spec.get("image_size") or PHOTO
        merged = {**spec, **spec["options"], **spec["recipe"], "image_size": size}
        return {key: v for key, v in merged.items() if key not in ("options", "recipe", "changed", "root")}

    asked = prepare(**{key: value for key, value in settings.items() if key != "threads"})[0].to_json()
    was, now = flat(stored["spec"]), flat(json.loads(json.dumps(asked)))
    for key in now:
        if (before := was.get(key, now[key])) != now[key]:
            raise _begun_as_another(path, f"{key} = {before!r}", f"{key} = {now[key]!r}")


def _begun_as_another(path: Path, before: str, after: str) -> UserError:
    return UserError(f"{path} was begun with {before}, not with {after}; choose another --out to change it")


def _length(path: Path) -> tuple[int, int | None]:
    """Number of finished and of planned epochs."""
    spec = read_spec(path)
    try:
        epoch = (path / "results.jsonl").read_bytes().count(b"\n")
    except OSError:
        epoch = 0
    return epoch, spec["spec"]["recipe"].get("epochs") if spec else None


def _is_complete(path: Path) -> bool:
    """Whether every epoch has a readable record."""
    try:
        lines = (file := path / "results.jsonl").read_bytes().splitlines()
        records = [read_record(line, file, i, "") for i, line in enumerate(lines, 1)]
    except (OSError, UserError):
        return False
    return len(records) == _length(path)[1]


def _folder_state(path: Path, settings: Settings) -> State:
    epoch, epochs = _length(path)
    known, done = _read(path / "sweep.json"), (path / "done").exists()
    begun = done or checkpoint.exists(path / "checkpoint.safetensors")
    if begun and known is not None and (changed := _difference(known, settings) or _other_file(path, settings)):
        raise _begun_as_another(path, *changed)
    if done and not _is_complete(path):
        raise UserError(
            f"{path} is done, but its results.jsonl does not contain every epoch; delete the folder to run it again"
        )
    if begun and known is not None and (files := _other_content(path, settings)):
        raise UserError(
            f"{path} was made from another version of {files}; put that back, choose another --out, or delete the "
            "folder to run it again"
        )
    done = done and known is not None  # otherwise a run of `warpi fit`; resuming it compares all settings
    return State(done, begun, epoch if begun else 0, epochs)


def _difference(was: Settings, settings: Settings) -> tuple[str, str] | None:
    """The first setting that differs: before, and now."""
    now = json.loads(json.dumps(settings))
    for key in sorted(was.keys() | now.keys()):
        if key != "root" and was.get(key) != now.get(key):  # the location of the data does not identify it
            before, after = (f"{key} = {each[key]!r}" if key in each else f"no {key}" for each in (was, now))
            return before, after
    return None


def _read(file: Path) -> dict[str, Any] | None:
    advice = "delete it, or choose another --out"
    try:
        content = read_json(file, advice)
    except FileNotFoundError:
        return None
    if not isinstance(content, dict):
        raise UserError(f"{file} is garbled; {advice}")
    return content


def _write(file: Path, content: Mapping[str, Any]) -> None:
    write_atomically(file, (json.dumps(content, indent=1) + "\n").encode())


@dataclass(frozen=True)
class ClaimedRun:
    """A run that this process may train while it holds the lock."""

    job: Job
    path: Path
    epoch: int  # number of finished epochs
    resume: bool
    lock: ExitStack  # closing it gives the run back


@dataclass
class Queue:
    """Hands out the unfinished runs of a plan. Processes that share a folder never get the same run.

    A run belongs to the process that holds the lock of its folder in `.sweep`. The kernel releases the lock when that
    process dies, and another process resumes the run. A failed run is not tried again within the same `session`.
    """

    plan: Plan
    session: str
    report: Callable[[RunEvent], None]
    ended: set[str] = field(default_factory=set)  # done or failed
    claimed: set[str] = field(default_factory=set)  # by this process

    def take(self) -> ClaimedRun | None:
        """Claim a run to begin or resume; None if there is none at the moment."""
        for job in self.plan.jobs:
            if job.name in self.ended | self.claimed:
                continue
            with ExitStack() as lock:
                try:
                    lock.enter_context(one_writer(self._notes(job)))
                except Busy:
                    continue
                failure = _read(self._notes(job) / "failed.json")
                if failure is not None and failure.get("session") == self.session:
                    self.ended.add(job.name)
                    continue
                path = self.plan.out / job.name
                try:
                    state = run_state(self.plan, job)
                    if state.done:
                        self.ended.add(job.name)
                        continue
                    if not state.begun:
                        path.mkdir(parents=True, exist_ok=True)
                        _write(path / "sweep.json", job.settings)
                    elif not (path / "sweep.json").exists():
                        _check_fit(path, job.settings)
                except (UserError, OSError) as error:
                    self.mark_failed(job, str(error))
                    self.report(RunEvent("failed", job.name, reason=str(error)))
                    continue
                self.claimed.add(job.name)
                lock.callback(self.claimed.discard, job.name)
                return ClaimedRun(job, path, state.epoch, state.begun, lock.pop_all())
        return None

    def has_more(self) -> bool:
        """Whether there may be a run later, since another process has not finished its own."""
        return any(job.name not in self.ended for job in self.plan.jobs)

    def others_are_at_work(self) -> bool:
        """Whether another process holds a run at the moment."""
        for job in self.plan.jobs:
            if job.name not in self.ended | self.claimed:
                try:
                    with one_writer(self._notes(job)):
                        pass
                except Busy:
                    return True
        return False

    def mark_done(self, claim: ClaimedRun) -> None:
        """Record that a run is complete."""
        self.ended.add(claim.job.name)
        if not (claim.path / "sweep.json").exists():  # begun by `warpi fit`, with the same settings
            _write(claim.path / "sweep.json", claim.job.settings)

    def mark_failed(self, job: Job, reason: str, details: str = "") -> None:
        """Record that a run cannot be finished."""
        self.ended.add(job.name)
        note = {"session": self.session, "reason": reason, "details": details}
        _write(self._notes(job) / "failed.json", note)

    def _notes(self, job: Job) -> Path:
        return self.plan.out / ".sweep" / job.name
