"""The specification of a few-shot run: settings, checked, with the defaults that suit the data; and `spec.json`."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch

import warpi
from warpi.errors import UserError, unknown
from warpi.fewshot.data import FEWSHOT, Classes, FewShotData
from warpi.fewshot.episodes import Kind
from warpi.fewshot.learner import Learner, Problem
from warpi.fewshot.learners.registry import LEARNERS, make_learner
from warpi.fewshot.train import Training, check_train_ways
from warpi.runs.defaults import to_plain_types
from warpi.runs.facts import differences
from warpi.runs.run_folder import ADVICE, RunFolder, describe_run
from warpi.runs.schema import FEWSHOT_FORMAT, check_part

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

    @property
    def settings(self) -> dict[str, Any]:
        """What was chosen, by name: what is asked of the tasks, fields of the learner and of Training."""
        asked = {name: getattr(self, name) for name in ("data", "root", "learner", "ways", "shots")}
        return {**asked, **to_plain_types(self.options), **asdict(self.training)}

    def label(self, but: str | None = "bases") -> str:
        """The learner and what differs from its defaults; the number of bases is an axis of its own in pictures."""
        return " ".join([self.learner, *(f"{k}={v}" for k, v in self.changed.items() if k != but)])

    def make(self) -> Learner:
        return make_learner(self.learner, **self.options)

    def started(self, data: FewShotData, device: torch.device) -> Learner:
        """The learner, with its first weights."""
        learner = self.make()
        learner.start(Problem(data.shape, self.ways), seed=self.training.seed, device=device)
        return learner

    @classmethod
    def from_json(cls, stored: Mapping[str, Any]) -> "Spec":
        """What `asdict` made, of this version or an older one."""
        stored = {"own": False, **stored}
        for name, kinds in _STORED.items():
            if not isinstance(stored[name], kinds):
                allowed = " or ".join(kind.__name__ for kind in kinds)
                raise UserError(f"{name} must be {allowed}, got {stored[name]!r}")
        training = Training(**{"compile": False, **stored["training"]})
        return cls(**{**stored, "options": to_plain_types(stored["options"]), "training": training})


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
    base, settings = LEARNERS[learner], to_plain_types(settings)
    own, common = {f.name for f in fields(base)}, {f.name for f in fields(Training)}
    for name in settings:
        if name not in own | common:
            raise unknown(f"setting of {learner}", name, own | common)
    training = Training(**{k: v for k, v in {**suits, **settings}.items() if k in common})
    options = asdict(replace(base, **{k: v for k, v in settings.items() if k in own}))
    ways = suits["ways"] if ways is None else ways
    if more := training.train_ways:
        if not ways:
            raise UserError(f"{data} is regression, which has no classes: leave out --train-ways {more}")
        check_train_ways(training, ways)
        if more > ways and not base.any_ways:
            raise UserError(f"{learner} has as many outputs as ways: leave out --train-ways {more}, or --ways {more}")
    return Spec(
        data=data,
        root=None if root is None else _resolved(root),
        learner=learner,
        options=options,
        changed={k: v for k, v in options.items() if v != getattr(base, k)},
        ways=ways,
        shots=suits["shots"] if shots is None else shots,
        training=training,
        own=mine,
    )


def _resolved(root: str | Path) -> str:
    """A run may be gone on with, or judged, in another folder than it was begun in."""
    return str(Path(root).resolve())


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
        advice = "put it back as it was, or choose another --out"
        if version != warpi.__version__:
            advice = (
                f"it was written by warpi {version}, and this is {warpi.__version__}: use that version to resume it"
            )
        raise UserError(f"{file} does not describe a run: {reason}; {advice}") from e


def restore_spec(
    stored: Mapping[str, Any], settings: Mapping[str, Any], threads: int | None, path: Path
) -> tuple[Spec, int | None]:
    """The specification and the thread count of a stored run. Settings that are given again must be the same.

    The data may have been moved to another root, since its hash is compared. Results depend on the thread count.
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
    return replace(spec, root=_resolved(root) if root else spec.root), flat["threads"]


def check_facts(stored: Mapping[str, Any], facts: Mapping[str, Any], path: Path) -> None:
    """Refuse data or a learner that has changed since the run was started."""
    known = {name: stored.get(name) for name in facts}
    for name, before, after in differences(known, facts):
        raise UserError(
            f"the data or the learner of {path} has changed: {name} was {before}, is {after}; give what it was made "
            "with, or choose another --out"
        )
