"""The specification of a few-shot run: checked settings, defaults that depend on the data, and `spec.json`."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch

import warpi
from warpi.errors import UserError, unknown
from warpi.fewshot.data import Classes, FewShotData
from warpi.fewshot.datasets import FEWSHOT
from warpi.fewshot.episodes import Kind
from warpi.fewshot.learner import Learner, Problem
from warpi.fewshot.learners.registry import make_learner
from warpi.fewshot.train import Training
from warpi.runs.defaults import to_plain_types
from warpi.runs.run_folder import ADVICE, RunFolder, describe_run
from warpi.runs.schema import FEWSHOT_FORMAT, check_part
from warpi.runs.stored_facts import differences
from warpi.utils.settings import check_types

_IMAGES: dict[str, Any] = {"learner": "metavrf_bilstm", "ways": 5, "shots": 1, "tasks": 16, "iterations": 20_000}
DEFAULTS: dict[str, dict[str, Any]] = {
    "sines": {"learner": "metavrf_evidence", "ways": 0, "shots": 5, "queries": 10, "tasks": 25, "iterations": 4_000},
    "omniglot": _IMAGES,
    "cifar_fs": _IMAGES,
    "mini_imagenet": _IMAGES | {"tasks": 8},
}
"""Default settings of each data set."""


@dataclass(frozen=True)
class Spec:
    """All settings that determine the results of a run."""

    data: str
    root: str | None
    learner: str
    options: Mapping[str, Any]  # all hyper-parameters of the learner
    changed: Mapping[str, Any]  # those that differ from its defaults
    ways: int
    shots: int
    training: Training
    own: bool = False  # the data was passed as an object, which is not stored and must be passed again

    def __post_init__(self) -> None:
        check_types(self)

    @property
    def kind(self) -> Kind:
        """The kind of tasks that the learner is trained for."""
        return Kind(self.ways, self.shots, self.training.queries)

    @property
    def train_ways(self) -> int:
        return self.training.train_ways or self.ways

    @property
    def settings(self) -> dict[str, Any]:
        """All settings by name: data and tasks, fields of the learner, fields of Training."""
        tasks = {name: getattr(self, name) for name in ("data", "root", "learner", "ways", "shots")}
        return {**tasks, **to_plain_types(self.options), **asdict(self.training)}

    def label(self, without: str | None = "bases") -> str:
        """The learner and its changed options, without the number of bases, which is an axis in figures."""
        return " ".join([self.learner, *(f"{k}={v}" for k, v in self.changed.items() if k != without)])

    def make(self) -> Learner:
        return make_learner(self.learner, **self.options)

    def start_learner(self, data: FewShotData, device: torch.device) -> Learner:
        """Create the learner with its initial weights."""
        learner = self.make()
        learner.start(Problem(data.shape, self.ways), seed=self.training.seed, device=device)
        return learner

    @classmethod
    def from_json(cls, stored: Mapping[str, Any]) -> "Spec":
        """Read what `asdict` returned, in this version or an older one."""
        stored = {"own": False, **stored}
        known = {f.name: stored[f.name] for f in fields(cls)}  # raises a KeyError that names a missing field
        if isinstance(known["options"], dict):
            known["options"] = to_plain_types(known["options"])
        if isinstance(known["training"], dict):
            known["training"] = Training(**{"compile": False, **known["training"]})
        return cls(**{**stored, **known})


def specify(
    data: str | FewShotData = "sines",
    learner: str | None = None,
    root: str | Path | None = None,
    ways: int | None = None,
    shots: int | None = None,
    **settings: Any,
) -> Spec:
    """Check settings and add the defaults of the data. `settings` are fields of Training or of the learner."""
    if not isinstance(data, str | FewShotData):
        raise UserError(f"data must be one of {', '.join(FEWSHOT)}, or a FewShotData, got a {type(data).__name__}")
    name = data if isinstance(data, str) else str(data.name)
    if isinstance(data, FewShotData):
        if root is not None:
            raise UserError(f"the data {name!r} is passed as an object, not read: leave out root={str(root)!r}")
        defaults = DEFAULTS["sines"] if data.regression else _IMAGES
    elif name in FEWSHOT:
        defaults = DEFAULTS[name]
    else:
        raise unknown("few-shot data set", name, FEWSHOT)
    learner = learner or defaults["learner"]
    base = make_learner(learner)
    settings = to_plain_types(settings)
    of_learner = {f.name for f in fields(base)}
    of_training = {f.name for f in fields(Training)}
    for key in settings:
        if key not in of_learner | of_training:
            raise unknown(f"setting of {learner}", key, of_learner | of_training)
    training = Training(**{k: v for k, v in {**defaults, **settings}.items() if k in of_training})
    options = asdict(replace(base, **{k: v for k, v in settings.items() if k in of_learner}))
    ways = defaults["ways"] if ways is None else ways
    if train_ways := training.train_ways:
        if not ways:
            raise UserError(f"{name} is regression, which has no classes: leave out --train-ways {train_ways}")
        if train_ways > ways and not base.any_ways:
            raise UserError(
                f"{learner} has as many outputs as ways: leave out --train-ways {train_ways}, or "
                f"set --ways {train_ways}"
            )
    return Spec(
        data=name,
        root=None if root is None else str(Path(root).resolve()),  # a run may be resumed from another folder
        learner=learner,
        options=options,
        changed={k: v for k, v in options.items() if v != getattr(base, k)},
        ways=ways,
        shots=defaults["shots"] if shots is None else shots,
        training=training,
        own=isinstance(data, FewShotData),
    )


def describe(spec: Spec, learner: Learner, data: FewShotData, digest: str, device: torch.device) -> dict[str, Any]:
    """The content of `spec.json`."""
    parts = {name: data.part(name) for name in ("train", "val", "test")}
    facts = {
        **{f"{name}_classes": len(part) for name, part in parts.items() if isinstance(part, Classes)},
        "n_parameters": sum(p.numel() for p in learner.parameters()),
        "data_sha256": digest,
    }
    return describe_run(FEWSHOT_FORMAT, asdict(spec), facts, device)


def fewshot_folder(path: Path) -> RunFolder:
    """The folder of a few-shot run."""
    return RunFolder(path, FEWSHOT_FORMAT, _check_spec)


def _check_spec(stored: dict[str, Any], file: Path) -> None:
    """Refuse a `spec.json` that does not describe a few-shot run of this version."""
    if not all(isinstance(stored.get(name), dict) for name in ("spec", "facts", "environment")):
        raise UserError(f"{file} is damaged; {ADVICE}")
    check_part(stored["environment"], "environment", file, ADVICE)
    try:
        spec = Spec.from_json(stored["spec"])
        if spec.data not in FEWSHOT and not spec.own:
            raise unknown("few-shot data set", spec.data, FEWSHOT)
        spec.make()
    except (UserError, KeyError, TypeError) as e:
        reason = f"no {e}" if isinstance(e, KeyError) else str(e)
        version = stored.get("version")
        advice = "restore it, or choose another --out"
        if version != warpi.__version__:
            advice = (
                f"it was written by warpi {version}, and this is {warpi.__version__}: use that version to resume it"
            )
        raise UserError(f"{file} does not describe a run: {reason}; {advice}") from e


def restore_spec(
    stored: Mapping[str, Any], settings: Mapping[str, Any], threads: int | None, path: Path
) -> tuple[Spec, int | None]:
    """The specification and the thread count of a stored run. Settings that are given again must be equal.

    Only `root` may differ, because the hash of the data is compared. The thread count can change results.
    """
    spec = Spec.from_json(stored["spec"])
    flat = spec.settings | {"threads": stored["environment"].get("threads")}
    given = to_plain_types(settings)
    if threads is not None:
        given["threads"] = threads
    for name in given:
        if name not in flat:
            raise unknown("setting", name, flat)
    for name, before, after in differences(flat, given, ignore=("root",), shared=True):
        raise UserError(f"{path} was started with {name} = {before!r}, not {after!r}; choose another --out")
    root = given.get("root")
    return replace(spec, root=str(Path(root).resolve()) if root else spec.root), flat["threads"]


def check_facts(stored: Mapping[str, Any], facts: Mapping[str, Any], path: Path) -> None:
    """Refuse data or a learner that has changed since the run was started."""
    known = {name: stored.get(name) for name in facts}
    for name, before, after in differences(known, facts):
        raise UserError(
            f"the data or the learner of {path} has changed: {name} was {before}, now {after}; use the original, "
            "or choose another --out"
        )
