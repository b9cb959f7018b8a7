"""The table of few-shot learners by name."""

from dataclasses import fields, replace
from typing import Any

from warpi.errors import unknown
from warpi.fewshot.learner import Learner
from warpi.fewshot.learners.kernel_ridge import R2D2, KernelRidge
from warpi.fewshot.learners.maml import MAML
from warpi.fewshot.learners.metavrf import MetaVRF
from warpi.fewshot.learners.protonet import Nearest, ProtoNet

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
    """Create a learner by name, with some of its hyper-parameters changed."""
    if name not in LEARNERS:
        raise unknown("learner", name, LEARNERS)
    for option in options:
        if option not in (allowed := [f.name for f in fields(LEARNERS[name])]):
            raise unknown(f"option of {name}", option, allowed)
    return replace(LEARNERS[name], **options)
