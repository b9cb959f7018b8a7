"""The specification of a few-shot run: settings, checked, with the defaults that suit the data; and `spec.json`."""

import platform
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from datetime import date
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
from warpi.runs.resume import MEND, read_stored
from warpi.runs.schema import check_part

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
    """What `spec.json` of a run holds."""
    parts = {name: data.part(name) for name in ("train", "val", "test")}
    return {
        "format": FORMAT,
        "version": warpi.__version__,
        "spec": asdict(spec),
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


def read_spec(path: Path) -> dict[str, Any] | None:
    """What `spec.json` of a run folder holds, which must describe a few-shot run; None where there is none."""
    if (stored := read_stored(path, FORMAT)) is None:
        return None
    if not all(isinstance(stored.get(name), dict) for name in ("spec", "facts", "environment")):
        raise UserError(f"{path}/spec.json is garbled; {MEND}")
    check_part(stored["environment"], "environment", path / "spec.json", MEND)
    try:
        spec = Spec.from_json(stored["spec"])
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


def same_settings(
    stored: Mapping[str, Any], settings: Mapping[str, Any], threads: int | None, path: Path
) -> tuple[Spec, int | None]:
    """The settings of the stored run; those given again must be the same. Sums depend on the number of threads."""
    spec = Spec.from_json(stored["spec"])
    flat, again = spec.settings | {"threads": stored["environment"].get("threads")}, to_plain_types(settings)
    if threads is not None:
        again["threads"] = threads
    for name, value in again.items():
        if name not in flat:
            raise unknown("setting", name, flat)
        if value != flat[name] and name != "root":  # the data may have been moved; its hash is compared
            raise UserError(f"{path} was begun with {name} = {flat[name]!r}, not {value!r}; choose another --out")
    root = again.get("root")
    return replace(spec, root=_resolved(root) if root else spec.root), flat["threads"]


def same_facts(was: Mapping[str, Any], now: Mapping[str, Any], path: Path) -> None:
    for name in now:
        if was.get(name) != now[name]:
            raise UserError(
                f"the data or the learner of {path} has changed: {name} was {was.get(name)}, is {now[name]}; give what "
                "it was made with, or choose another --out"
            )
