"""Few-shot learning: learners, episodes, training and evaluation."""

from dataclasses import fields, replace
from importlib import import_module
from typing import Any

from warpi.errors import unknown
from warpi.fewshot.learner import Adapted, Episode, Learner, Output, Problem
from warpi.fewshot.learners.kernel_ridge import KernelRidge
from warpi.fewshot.learners.maml import MAML
from warpi.fewshot.learners.metavrf import MetaVRF
from warpi.fewshot.learners.nearest_mean import Nearest
from warpi.fewshot.learners.protonet import ProtoNet
from warpi.fewshot.learners.r2d2 import R2D2

__all__ = [
    "LEARNERS",
    "MAML",
    "R2D2",
    "Adapted",
    "Episode",
    "KernelRidge",
    "Learner",
    "MetaVRF",
    "Nearest",
    "Output",
    "Problem",
    "ProtoNet",
    "make_learner",
]

LEARNERS: dict[str, Learner] = {
    "metavrf": MetaVRF(),
    "metavrf_lstm": MetaVRF(context="lstm"),
    "metavrf_bilstm": MetaVRF(context="bilstm"),
    "metavrf_evidence": MetaVRF(
        exact=True, labels=True, proposals=16, floor=1e-4, minmax=False, skip=True, norm="support"
    ),
    "rff": KernelRidge(),
    "rbf": KernelRidge(kernel="rbf"),
    "maml": MAML(),
    "protonet": ProtoNet(),
    "r2d2": R2D2(),
    "nearest": Nearest(),
}


def make_learner(name: str, **options: Any) -> Learner:
    """A new learner of the table, with some of its hyper-parameters changed."""
    if name not in LEARNERS:
        raise unknown("learner", name, LEARNERS)
    for option in options:
        if option not in (allowed := [f.name for f in fields(LEARNERS[name])]):
            raise unknown(f"option of {name}", option, allowed)
    return replace(LEARNERS[name], **options)


_HOME = {"fit": "run", "load": "run", "judged": "rows", "paired": "evaluate"}  # which need LEARNERS first


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(import_module(f"warpi.fewshot.{_HOME[name]}"), name)
    raise AttributeError(f"module 'warpi.fewshot.learners.registry' has no attribute {name!r}")
