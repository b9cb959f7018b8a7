"""A few-shot run on disk: its folder, the way back into it after a crash, and what was learned out of it.

A run folder holds `spec.json` (settings, facts about the data, versions), `results.jsonl` (a line a validation),
`checkpoint.safetensors` (all state), `best.safetensors` (the learner as it was at its best validation) and, when the
run is complete, `done`.
"""

import json
import math
import platform
import shlex
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass, fields, replace
from datetime import date
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

import warpi
from warpi import checkpoint
from warpi.atomic import append_line, one_writer, write_atomically
from warpi.data.fewshot import FEWSHOT, Classes, FewShotData, load_fewshot
from warpi.engine import Record
from warpi.errors import UserError, unknown
from warpi.fewshot import LEARNERS
from warpi.fewshot.episodes import Kind
from warpi.fewshot.learner import Learner, Problem
from warpi.fewshot.train import Position, Training, means, task_pair, train
from warpi.folder import check_free, cut_results, read_stored
from warpi.progress import Progress
from warpi.rng import derive, seeded
from warpi.run import Stopped, cpu_threads, pick_device, signals
from warpi.spec import plain

FORMAT = "warpi-fewshot/1"
_IMAGES: dict[str, Any] = {"learner": "metavrf_bilstm", "ways": 5, "shots": 1, "tasks": 16, "iterations": 20_000}
DEFAULTS: dict[str, dict[str, Any]] = {
    "sines": {"learner": "metavrf_evidence", "ways": 0, "shots": 5, "queries": 10, "tasks": 25, "iterations": 4_000},
    "omniglot": _IMAGES,
    "cifar_fs": _IMAGES,
    "mini_imagenet": _IMAGES | {"tasks": 8},
}
"""What suits a data set, where nothing else is said."""
_STORED: dict[str, tuple[type, ...]] = {
    **dict.fromkeys(("data", "learner"), (str,)),
    "root": (str, type(None)),
    "own": (bool,),
    **dict.fromkeys(("options", "changed", "training"), (dict,)),
    **dict.fromkeys(("ways", "shots"), (int,)),
}
"""The fields of a specification, as JSON has them."""


@dataclass(frozen=True)
class Spec:
    """Everything that decides the numbers of a run."""

    data: str
    root: str | None
    learner: str
    options: Mapping[str, Any]  # all hyper-parameters of the learner
    changed: Mapping[str, Any]  # those that differ from its defaults
    ways: int
    shots: int
    training: Training
    own: bool = False  # the data is the user's own: it has a name and a hash here, and must be given again

    @property
    def kind(self) -> Kind:
        """Of the tasks that a run is for."""
        return Kind(self.ways, self.shots, self.training.queries)

    @property
    def train_ways(self) -> int:
        """Classes of a training task."""
        return self.training.train_ways or self.ways

    def problem(self, data: FewShotData) -> Problem:
        return Problem(data.shape, self.ways)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, stored: Mapping[str, Any]) -> "Spec":
        stored = {"own": False, **stored}
        for name, kinds in _STORED.items():
            if not isinstance(stored[name], kinds):
                allowed = " or ".join(kind.__name__ for kind in kinds)
                raise UserError(f"{name} must be {allowed}, got {stored[name]!r}")
        options = {name: tuple(v) if isinstance(v, list) else v for name, v in stored["options"].items()}
        return cls(**{**stored, "options": options, "training": Training(**{"compile": False, **stored["training"]})})

    @property
    def settings(self) -> dict[str, Any]:
        """What was chosen, by name: what is asked of the tasks, fields of the learner and of Training."""
        asked = {name: getattr(self, name) for name in ("data", "root", "learner", "ways", "shots")}
        return {**asked, **plain(self.options), **asdict(self.training)}

    def make(self) -> Learner:
        return replace(LEARNERS[self.learner], **self.options)


@dataclass(frozen=True)
class Run:
    """A run folder, read: what was asked for, the learner as it was stored, the data, what happened."""

    path: Path
    spec: Spec
    learner: Learner
    data: FewShotData
    history: list[Record]
    data_sha256: str  # of what lies in `data`, whatever its name


def specify(
    data: str | FewShotData = "sines",
    learner: str | None = None,
    root: str | Path | None = None,
    ways: int | None = None,
    shots: int | None = None,
    **settings: Any,
) -> Spec:
    """Settings, checked, with the defaults that suit the data. Settings are fields of Training or of the learner."""
    if not isinstance(data, str | FewShotData):
        raise UserError(f"data must be one of {', '.join(FEWSHOT)}, or a FewShotData, got a {type(data).__name__}")
    if mine := isinstance(data, FewShotData):
        if root is not None:
            raise UserError(f"the data {data.name!r} is given, not read: leave out root={str(root)!r}")
        suits, data = DEFAULTS["sines"] if data.regression else _IMAGES, str(data.name)
    elif data in FEWSHOT:
        suits = DEFAULTS[data]
    else:
        raise unknown("few-shot data set", data, FEWSHOT)
    learner = learner or suits["learner"]
    if learner not in LEARNERS:
        raise unknown("learner", learner, LEARNERS)
    base, settings = LEARNERS[learner], plain(settings)
    own, common = {f.name for f in fields(base)}, {f.name for f in fields(Training)}
    for name in settings:
        if name not in own | common:
            raise unknown(f"setting of {learner}", name, own | common)
    training = {k: v for k, v in {**suits, **settings}.items() if k in common}
    options = asdict(replace(base, **{k: v for k, v in settings.items() if k in own}))
    changed = {k: v for k, v in options.items() if v != asdict(base)[k]}
    ways = suits["ways"] if ways is None else ways
    if more := settings.get("train_ways", 0):
        if not ways:
            raise UserError(f"{data} is regression, which has no classes: leave out --train-ways {more}")
        if more < ways:
            raise UserError(f"training tasks need as many ways as --ways {ways} at least, got --train-ways {more}")
        if more > ways and not base.any_ways:
            raise UserError(f"{learner} has as many outputs as ways: leave out --train-ways {more}, or --ways {more}")
    return Spec(
        data=data,
        root=None if root is None else _resolved(root),
        learner=learner,
        options=options,
        changed=changed,
        ways=ways,
        shots=suits["shots"] if shots is None else shots,
        training=Training(**training),
        own=mine,
    )


def _resolved(root: str | Path) -> str:
    """A run may be gone on with, or judged, in another folder than it was begun in."""
    return str(Path(root).resolve())


def fit(
    out: Path | str,
    *,
    resume: bool = False,
    device: str = "auto",
    threads: int | None = None,
    checkpoint_seconds: float = 300.0,
    quiet: bool = True,
    **settings: Any,
) -> Run:
    """Train a learner on tasks of a data set, and leave a run folder behind.

    Settings are `data` (a name, or the user's own FewShotData), `learner`, `root`, `ways`, `shots`, the fields of
    Training and those of the learner. With `resume` an interrupted run goes on where its last checkpoint was, and ends
    as if it had never stopped; data of one's own must be given again for that, and be the same.
    """
    given = data if isinstance(data := settings.get("data"), FewShotData) else None
    named = {name: value for name, value in settings.items() if name != "data" or given is None}
    path, where = Path(out), pick_device(device)
    file, results = path / "checkpoint.safetensors", path / "results.jsonl"
    with ExitStack() as held:
        stored, begun = read_spec(path), checkpoint.exists(file) or (path / "done").exists()
        if stored is None and not begun:
            check_free(path)
        if begun and not resume:
            raise UserError(f"{path} already holds a run; go on with it by --resume, or choose another --out")
        if begun and stored is None:
            raise UserError(f"{path} holds a checkpoint, but its spec.json is gone; choose another --out")
        if stored is None and resume and not named:
            raise UserError(f"there is no run in {path} to go on with")
        if stored is not None and resume:
            spec, threads = _same(stored, named, threads, path)
        else:
            spec = specify(**settings)
        held.enter_context(cpu_threads(threads))
        data, digest = _data_of(spec, path, given, stored if resume else None, where)
        task_pair(data, spec.kind, spec.training, where)  # checks the kind of tasks before anything is written
        held.enter_context(seeded(derive(spec.training.seed, "training")))
        learner = spec.make()
        learner.start(spec.problem(data), seed=spec.training.seed, device=where)
        description = _describe(spec, learner, data, digest, where)
        if stored is not None and resume:
            _same_facts(stored["facts"], description["facts"], path)
        held.enter_context(one_writer(path))
        at = Position(learner, spec.training)
        if checkpoint.exists(file):
            state = checkpoint.load(file, where)
            checkpoint.restore(learner, state["learner"])
            checkpoint.restore(at, state["position"])
            checkpoint.set_global_rng(state["rng"])
        history = _records(cut_results(results, at.records), results)
        steps = train(learner, data, spec.kind, spec.training, at)
        progress = held.enter_context(Progress(1, spec.training.iterations, at.iteration, quiet))
        progress.say(_summary(spec, data))
        caught, saved_at = held.enter_context(signals()), time.monotonic()
        if not begun:
            write_atomically(path / "spec.json", (json.dumps(description, indent=1) + "\n").encode())
        for record in steps:
            progress.step()
            if record is not None:
                append_line(results, json.dumps(record))
                history.append(record)
                progress.say(_line(record, spec.training.iterations))
                if record["best"]:
                    best = checkpoint.packed({"learner": checkpoint.state_of(learner)}, checkpoint.FORMAT)
                    write_atomically(path / "best.safetensors", best)
            if record is not None or caught or time.monotonic() - saved_at >= checkpoint_seconds:
                means(at)  # which must be finite
                rng = checkpoint.global_rng()
                parts = {"learner": checkpoint.state_of(learner), "position": checkpoint.state_of(at), "rng": rng}
                checkpoint.save(file, parts)
                saved_at = time.monotonic()
            if caught:
                again = shlex.join(["warpi", "fewshot", "fit", "--out", str(path), "--resume"])
                again = f"fit({str(path)!r}, resume=True, data=...)" if spec.own else again
                raise Stopped(caught[0], f"go on with: {again}")
        write_atomically(path / "done", b"")
        return Run(path, spec, learner, data, history, digest)


def load(
    path: Path | str,
    *,
    device: str = "auto",
    weights: str = "best",
    root: Path | str | None = None,
    data: FewShotData | None = None,
) -> Run:
    """The learner of a run folder as it was at its best validation, or `last`.

    `root` where the data lies now; `data`, where it is the user's own.
    """
    path, where = Path(path), pick_device(device)
    stored = read_spec(path)
    if stored is None:
        raise UserError(f"{path} holds no few-shot run (no spec.json); make one with `warpi fewshot fit --out {path}`")
    file = path / {"best": "best.safetensors", "last": "checkpoint.safetensors"}[weights]
    if not checkpoint.exists(file):
        raise UserError(f"{path} has no {file.name} yet; the run has not come to its first validation")
    spec = Spec.from_json(stored["spec"])
    if root is not None and spec.data != "sines" and not spec.own:
        spec = replace(spec, root=str(root))
    data, digest = _data_of(spec, path, data, stored, where)
    learner = spec.make()
    learner.start(spec.problem(data), seed=spec.training.seed, device=where)
    checkpoint.restore(learner, checkpoint.load(file, where)["learner"])
    return Run(path, spec, learner, data, _history(path / "results.jsonl"), digest)


def _history(file: Path) -> list[Record]:
    """The lines of a run that may be under way, or was killed while it wrote one: that one is left out."""
    try:
        lines = file.read_bytes().splitlines(keepends=True) if file.exists() else []
        found = [json.loads(line) for line in lines if line.endswith(b"\n")]
    except (OSError, ValueError) as e:
        raise UserError(f"cannot read {file}: {e}; put it back as it was") from e
    return _records(found, file)


def _records(found: list[Any], file: Path) -> list[Record]:
    needed = {"val_mean", "episodes_per_s"}
    for i, record in enumerate(found, 1):
        if not isinstance(record, dict) or not needed <= record.keys():
            raise UserError(f"line {i} of {file} is no record of a validation; put it back as it was")
    return found


def read_spec(path: Path) -> dict[str, Any] | None:
    """The specification of a few-shot run."""
    if (stored := read_stored(path, FORMAT)) is None:
        return None
    if not all(isinstance(stored.get(name), dict) for name in ("spec", "facts", "environment")):
        raise UserError(f"{path}/spec.json is garbled; choose another --out")
    try:
        spec = Spec.from_json(stored["spec"])
        if spec.learner not in LEARNERS:
            raise unknown("learner", spec.learner, LEARNERS)
        if spec.data not in FEWSHOT and not spec.own:
            raise unknown("few-shot data set", spec.data, FEWSHOT)
        spec.make()
    except (UserError, KeyError, TypeError) as e:
        why = f"no {e}" if isinstance(e, KeyError) else str(e)
        version = stored.get("version")
        hint = "put it back as it was, or choose another --out"
        if version != warpi.__version__:
            hint = f"it is of warpi {version}, and this is {warpi.__version__}: go on with that version"
        raise UserError(f"{path}/spec.json does not describe a run: {why}; {hint}") from e
    return stored


@lru_cache(maxsize=2)
def _loaded(name: str, root: str | None) -> FewShotData:
    return load_fewshot(name, root)


def _data_of(
    spec: Spec, path: Path, given: FewShotData | None, stored: Mapping[str, Any] | None, device: torch.device
) -> tuple[FewShotData, str]:
    """The data of a run, given or read, and its hash, which must be the one that is stored."""
    if given is None and spec.own:
        raise UserError(
            f"the run in {path} was made with data of your own, {spec.data!r}, which must be given again; from Python: "
            f"load({str(path)!r}, data=...), and to go on: fit({str(path)!r}, resume=True, data=...)"
        )
    data = _loaded(spec.data, spec.root) if given is None else given
    digest = data.digest()
    if stored is not None:
        _same_facts(stored["facts"], {"data_sha256": digest}, path)
    return data.to(device), digest


def _same(
    stored: dict[str, Any], settings: Mapping[str, Any], threads: int | None, path: Path
) -> tuple[Spec, int | None]:
    """The settings of the stored run; those given again must be the same. Sums depend on the number of threads."""
    spec = Spec.from_json(stored["spec"])
    flat, again = spec.settings | {"threads": stored["environment"].get("threads")}, plain(settings)
    if threads is not None:
        again["threads"] = threads
    for name, value in again.items():
        if name not in flat:
            raise unknown("setting", name, flat)
        if value != flat[name] and name != "root":  # the data may have been moved; its hash is compared
            raise UserError(f"{path} was begun with {name} = {flat[name]!r}, not {value!r}; choose another --out")
    root = again.get("root")
    return replace(spec, root=_resolved(root) if root else spec.root), flat["threads"]


def _same_facts(was: Mapping[str, Any], now: Mapping[str, Any], path: Path) -> None:
    for name in now:
        if was.get(name) != now[name]:
            raise UserError(
                f"the data or the learner of {path} has changed: {name} was {was.get(name)}, is {now[name]}; give what "
                "it was made with, or choose another --out"
            )


def _describe(spec: Spec, learner: Learner, data: FewShotData, digest: str, device: torch.device) -> dict[str, Any]:
    parts = {name: data.part(name) for name in ("train", "val", "test")}
    return {
        "format": FORMAT,
        "version": warpi.__version__,
        "spec": spec.to_json(),
        "facts": {
            **{f"{name}_classes": len(part) for name, part in parts.items() if isinstance(part, Classes)},
            "n_parameters": sum(p.numel() for p in learner.parameters()),
            "data_sha256": digest,
        },
        "environment": {
            "date": date.today().isoformat(),
            "python": platform.python_version(),
            "torch": torch.__version__,
            "device": device.type,
            "gpu": torch.cuda.get_device_name(device) if device.type == "cuda" else None,
            "threads": torch.get_num_threads(),
        },
    }


def _summary(spec: Spec, data: FewShotData) -> str:
    """What a run learns from, in a line."""
    task = f"{spec.ways}-way {spec.shots}-shot" if spec.ways else f"{spec.shots}-shot"
    parts = ((name, data.part(name)) for name in ("train", "val", "test"))
    classes = ", ".join(f"{len(part):,} {name}" for name, part in parts if isinstance(part, Classes))
    changed = " ".join(f"{k}={v}" for k, v in spec.changed.items())
    if spec.train_ways != spec.ways:
        task += f" (trained with {spec.train_ways} ways)"
    return (
        f"{spec.learner} {changed}".strip() + f" on {spec.data}, {task}" + (f"; classes: {classes}" if classes else "")
    )


def _line(record: Record, iterations: int) -> str:
    shown = "  ".join(f"{name} {record[name]:.4g}" for name in ("loss", "accuracy", "mse") if name in record)
    best = "  best so far" if record["best"] else ""
    spread = f" ± {record['val_ci95']:.2g}" if "val_ci95" in record else ""  # of one task there is none
    val = f"val {record['val_mean']:.4g}{spread}"
    speed = f"  {record['episodes_per_s']:,.0f} episodes/s" if math.isfinite(record["episodes_per_s"]) else ""
    return f"step {record['iteration']:>{len(str(iterations))}.0f}/{iterations}  {shown}  {val}{best}{speed}"


def label(spec: Spec) -> str:
    """The learner and what differs from its defaults; the number of bases is an axis of its own."""
    changed = " ".join(f"{k}={v}" for k, v in spec.changed.items() if k != "bases")
    return f"{spec.learner} {changed}".strip()
