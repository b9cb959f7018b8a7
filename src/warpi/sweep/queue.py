"""The run folders of a sweep: what is done, what is begun, and which process does what is left."""

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
from warpi.runs import plugins as own
from warpi.runs.defaults import BY_DATASET, DATA_DEPENDENT, resolve_defaults
from warpi.runs.fingerprints import file_sha256, stamp
from warpi.runs.resume import files, read_spec
from warpi.runs.schema import read_json, read_record
from warpi.runs.spec import DataSpec, prepare
from warpi.sweep.interleave import Claim, Event
from warpi.sweep.plan import Job, Plan, Settings
from warpi.training import checkpoint
from warpi.utils.files import Busy, one_writer, write_atomically

log = logging.getLogger("warpi.sweep")

KEPT = ("spec.json", "sweep.json", "results.jsonl", "done")
"""What is left of a run that was done elsewhere: all that its numbers are made from, and no weights."""


@dataclass(frozen=True)
class State:
    """How far a run has come."""

    done: bool
    begun: bool  # there is a checkpoint to go on from
    epoch: int  # epochs on disk
    epochs: int | None  # of how many; None: not known yet


def look(plan: Plan, job: Job) -> State:
    """How far a run of a sweep is, be it by results that are kept; a UserError where it was begun as something else."""
    path = place(plan, job)
    return _look(path, job.settings) if path.parent == plan.out else State(True, True, *_length(path))


def place(plan: Plan, job: Job) -> Path:
    """The folder of a run: that of the sweep, or, where it has none yet, one with the results of the same run."""
    path = plan.out / job.name
    begun = checkpoint.exists(path / "checkpoint.safetensors") or (path / "done").exists()
    return path if begun else kept(plan.kept, job) or path


def kept(folders: Sequence[Path], job: Job) -> Path | None:
    """Where the results, all of them, of a run with these settings are kept: under its name, or under that of another
    sweep which has the same run."""
    named = (folder / job.name for folder in folders)
    others = (path for folder in folders for path in _asked(folder).get(_key(job.settings), ()))
    return next((path for path in chain(named, others) if why_not_kept(path, job.settings) is None), None)


def _asked(folder: Path) -> dict[str, list[Path]]:
    """The folders in this one by the settings of their runs; read again only where one came or went."""
    return _index(folder, folder.stat().st_mtime_ns) if folder.is_dir() else {}


@lru_cache(maxsize=64)
def _index(folder: Path, _: int) -> dict[str, list[Path]]:
    found: dict[str, list[Path]] = {}
    for file in sorted(folder.glob("*/sweep.json")):
        with suppress(UserError):  # a broken one is told where it is asked for by its name
            found.setdefault(_key(_read(file) or {}), []).append(file.parent)
    return found


def _key(settings: Settings) -> str:
    """Settings as text. Where a named data set lies is no part of what it is; where files of the user's own do, is."""
    named = settings.get("data", DataSpec.data) in DATASETS
    return json.dumps({k: v for k, v in settings.items() if k != "root" or not named}, sort_keys=True)


def why_not_kept(path: Path, settings: Settings) -> str | None:
    """Why a folder is none with the results, all of them, of a run that was done with these settings; None: it is."""
    if absent := [name for name in KEPT if not (path / name).exists()]:
        return f"there is no {absent[0]}"
    changed = _difference(_read(path / "sweep.json") or {}, settings) or _other_defaults(path, settings)
    if changed := changed or _other_file(path, settings):
        return f"it was run with {changed[0]}, not with {changed[1]}"
    if files := _other_content(path, settings):
        return f"it was made from another version of {files}"
    return None if _whole(path) else "its results.jsonl does not hold every epoch"


def _other_defaults(path: Path, settings: Settings) -> tuple[str, str] | None:
    """Where a run of a named data set was done with other defaults than those of today, its numbers are not ours.

    The first of these: as it was, and as it is.
    """
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
    """The first hyper-parameter that a method of the user's own (`own`) had another value of, and no setting asks for:
    as it was, and as it is."""
    method = METHODS[settings["method"]]
    if settings["method"] not in own.METHOD_FILES or (stored := read_spec(path)) is None:
        return None
    for key, value in json.loads(json.dumps(asdict(method))).items():
        said = key in settings or f"{type(method).__name__}.{key}" in DATA_DEPENDENT
        if not said and (was := stored["spec"]["options"].get(key, value)) != value:
            return f"{key} = {was!r}", f"{key} = {value!r}"
    return None


def _other_content(path: Path, settings: Settings) -> str | None:
    """Which files a run was made from in another version than today's, and what tells; None: none, as far as is known.

    The files of the noise, of `--matrix` and of `--weights` are known by their hashes. Data of the user's own is read
    again, and compared with what is stored of it, where its stamp is not that of the run. A file that is gone is not
    needed by a run that is done.
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
    """What a run would store of its data today, whatever its method; nothing where that cannot be read."""
    try:
        spec, task, truth = prepare("ce", seed=seed, **asdict(data))
    except UserError as e:
        log.warning("%s was touched since runs were made from it, and cannot be compared with theirs: %s", data.data, e)
        return {}
    parts = {"n_train": task.train, "n_meta": task.meta, "n_val": task.val, "n_test": truth.test}
    found = {name: len(part) if part else 0 for name, part in parts.items()}
    return {
        **spec.hashes,
        "noise_sha256": truth.noise_hash,
        **found,
        "n_classes": task.n_classes,
        "wrong_share": task.noise_rate,
    }


def _check_fit(path: Path, settings: Settings) -> None:
    """A run that `warpi fit` has begun is that of a sweep if what the sweep does not say is the same, too."""
    if (stored := read_spec(path)) is None:
        return

    def flat(spec: Mapping[str, Any]) -> dict[str, Any]:
        size = spec.get("image_size") or PHOTO
        found = {**spec, **spec["options"], **spec["recipe"], "image_size": size}
        return {key: v for key, v in found.items() if key not in ("options", "recipe", "changed", "root")}

    asked = prepare(**{key: value for key, value in settings.items() if key != "threads"})[0].to_json()
    was, now = flat(stored["spec"]), flat(json.loads(json.dumps(asked)))
    for key in now:
        if (before := was.get(key, now[key])) != now[key]:
            raise _begun_as_another(path, f"{key} = {before!r}", f"{key} = {now[key]!r}")


def _begun_as_another(path: Path, before: str, after: str) -> UserError:
    return UserError(f"{path} was begun with {before}, not with {after}; choose another --out to change it")


def _length(path: Path) -> tuple[int, int | None]:
    """Epochs on disk, and of how many."""
    spec = read_spec(path)
    try:
        epoch = (path / "results.jsonl").read_bytes().count(b"\n")
    except OSError:
        epoch = 0
    return epoch, spec["spec"]["recipe"].get("epochs") if spec else None


def _whole(path: Path) -> bool:
    """Whether there is a readable record of every epoch."""
    try:
        lines = (file := path / "results.jsonl").read_bytes().splitlines()
        records = [read_record(line, file, i, "") for i, line in enumerate(lines, 1)]
    except (OSError, UserError):
        return False
    return len(records) == _length(path)[1]


def _look(path: Path, settings: Settings) -> State:
    epoch, epochs = _length(path)
    known, done = _read(path / "sweep.json"), (path / "done").exists()
    begun = done or checkpoint.exists(path / "checkpoint.safetensors")
    if begun and known is not None and (changed := _difference(known, settings) or _other_file(path, settings)):
        raise _begun_as_another(path, *changed)
    if done and not _whole(path):
        raise UserError(
            f"{path} is done, but its results.jsonl does not hold every epoch; delete the folder to run it anew"
        )
    if begun and known is not None and (files := _other_content(path, settings)):
        raise UserError(
            f"{path} was made from another version of {files}; put that back, choose another --out, or delete the "
            "folder to run it anew"
        )
    done = done and known is not None  # a run of `warpi fit` in this folder: going on with it will compare all of it
    return State(done, begun, epoch if begun else 0, epochs)


def _difference(was: Settings, settings: Settings) -> tuple[str, str] | None:
    """The first setting that is not what it was: as it was, and as it is."""
    now = json.loads(json.dumps(settings))
    for key in sorted(was.keys() | now.keys()):
        if key != "root" and was.get(key) != now.get(key):  # where the data lies is no part of what it is
            before, after = (f"{key} = {each[key]!r}" if key in each else f"no {key}" for each in (was, now))
            return before, after
    return None


def _read(file: Path) -> dict[str, Any] | None:
    mend = "delete it, or choose another --out"
    try:
        content = read_json(file, mend)
    except FileNotFoundError:
        return None
    if not isinstance(content, dict):
        raise UserError(f"{file} is garbled; {mend}")
    return content


def _write(file: Path, content: Mapping[str, Any]) -> None:
    write_atomically(file, (json.dumps(content, indent=1) + "\n").encode())


@dataclass
class Queue:
    """Hands out the runs of a plan that are left. Processes that share a folder never get the same one.

    A run belongs to whoever holds the lock of its folder in `.sweep`. The kernel frees it when that process dies, and
    the run goes on elsewhere. A run that failed is not tried again by a process of the same `session`.
    """

    plan: Plan
    session: str
    tell: Callable[[Event], None]
    over: set[str] = field(default_factory=set)  # done or failed
    mine: set[str] = field(default_factory=set)

    def take(self) -> Claim | None:
        for job in self.plan.jobs:
            if job.name in self.over | self.mine:
                continue
            with ExitStack() as held:
                path, notes = self.plan.out / job.name, self._notes(job)
                try:
                    held.enter_context(one_writer(notes))
                except Busy:
                    continue
                failure = _read(notes / "failed.json")
                if failure is not None and failure.get("session") == self.session:
                    self.over.add(job.name)
                    continue
                try:
                    state = look(self.plan, job)
                    if state.done:
                        self.over.add(job.name)
                        continue
                    if not state.begun:
                        path.mkdir(parents=True, exist_ok=True)
                        _write(path / "sweep.json", job.settings)
                    elif not (path / "sweep.json").exists():
                        _check_fit(path, job.settings)
                except (UserError, OSError) as e:
                    self.failed(job, str(e))
                    self.tell(Event("failed", job.name, reason=str(e)))
                    continue
                self.mine.add(job.name)
                held.callback(self.mine.discard, job.name)
                return Claim(job, path, state.epoch, state.begun, held.pop_all())
        return None

    def more(self) -> bool:
        return any(job.name not in self.over for job in self.plan.jobs)

    def done(self, claim: Claim) -> None:
        self.over.add(claim.job.name)
        if not (claim.path / "sweep.json").exists():  # begun by `warpi fit`: the settings were compared
            _write(claim.path / "sweep.json", claim.job.settings)

    def failed(self, job: Job, reason: str, details: str = "") -> None:
        self.over.add(job.name)
        note = {"session": self.session, "reason": reason, "details": details}
        _write(self._notes(job) / "failed.json", note)

    def _notes(self, job: Job) -> Path:
        return self.plan.out / ".sweep" / job.name
