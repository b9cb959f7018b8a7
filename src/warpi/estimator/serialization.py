"""Write and read a fitted `NoisyLabelClassifier`: tensors and JSON with a checksum. Nothing is unpickled."""

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from torch import nn

from warpi.auto.learners.modules import Mixture
from warpi.data.examples import Scale
from warpi.errors import UserError
from warpi.estimator.inputs import Layout
from warpi.estimator.onnx import Classifier
from warpi.methods.auto import MODELS
from warpi.methods.old_names import use_current_names
from warpi.methods.registry import METHODS
from warpi.nets.registry import NETS, NetBuilder, make_net
from warpi.runs.defaults import resolve_method, to_plain_types
from warpi.training.checkpoint import pack, unpack
from warpi.training.engine import Record
from warpi.training.method import Method
from warpi.utils.files import write_atomically
from warpi.utils.seeding import seeded

FORMAT = "warpi-classifier/1"
_STORED_SEPARATELY = ("method", "net", "model", "random_state")


class TrustedScore(float):
    """An accuracy, from 0 to 1, on trusted rows that the models have not seen, with its 90 % interval."""

    low: float
    high: float

    @classmethod
    def of(cls, estimate: float, low: float, high: float) -> Self:
        score = cls(estimate)
        score.low = low
        score.high = high
        return score

    def __repr__(self) -> str:
        return f"{float(self):.3f} (90 % interval {self.low:.3f} to {self.high:.3f})"


def trusted_score(record: Record) -> TrustedScore | None:
    """The accuracy on trusted rows in the record of an epoch."""
    if "trusted_acc" not in record:
        return None
    return TrustedScore.of(*(record[name] / 100 for name in ("trusted_acc", "trusted_low", "trusted_high")))


class StoredClassifier(NamedTuple):
    """The parameters and the attributes of a fitted classifier."""

    params: dict[str, Any]
    fitted: dict[str, Any]


def write_classifier(fitted: Any, path: Path) -> None:
    """Write a fitted NoisyLabelClassifier."""
    method = fitted.method
    if isinstance(method, Method):
        name, _ = resolve_method(method)
        if name in METHODS:
            method = {"name": name, "options": to_plain_types(asdict(method))}
        else:
            method = _qualified_name(method)
    prepare = fitted.net_.prepare
    state = {
        "params": {k: v for k, v in fitted.get_params(deep=False).items() if k not in _STORED_SEPARATELY},
        "method": method,
        "net": fitted.net_name_ or _qualified_name(fitted.net),
        "model": fitted.model if isinstance(fitted.model, str | None) else _qualified_name(fitted.model),
        "random_state": fitted.seed_ if fitted.random_state is not None else None,
        "classes": [fitted.classes_.tolist(), fitted.classes_.dtype.str],
        "features": [fitted.n_features_in_, list(getattr(fitted, "feature_names_in_", ()))],
        "layout": prepare.layout.to_json(),
        "shape": fitted.shape_,
        "scale": [prepare.mean, prepare.std],
        "nets": [dict(net.state_dict()) for net in fitted.net_.nets],
        "label_quality": torch.from_numpy(fitted.label_quality_),
        "transition": torch.from_numpy(fitted.transition_),
        "choice": fitted.choice_,
        "history": fitted.history_,
        "method_name": fitted.method_,
    }
    try:
        content = pack(state, FORMAT)
    except TypeError as e:
        raise UserError(f"{e}; settings may only contain numbers, texts and lists of them") from e
    write_atomically(path, content)


def read_classifier(path: Path, net: nn.Module | NetBuilder | None, model: Any) -> StoredClassifier:
    """Read a file that `write_classifier` wrote. `net` and `model` are those that it cannot contain."""
    if not path.is_file():
        raise UserError(f"there is no file {path}; pass one that NoisyLabelClassifier.save wrote")
    state = unpack(path, FORMAT, "pass an unchanged file that NoisyLabelClassifier.save wrote")
    method, stored_net, stored_model = state["method"], state["net"], state.get("model")
    if isinstance(method, dict):
        method = replace(METHODS[method["name"]], **use_current_names(method["name"], method["options"]))
    if stored_net not in NETS and net is None and state["method_name"] != "auto":
        raise UserError(f"{path} contains the weights of {stored_net}, not the network; pass it: load(path, net=...)")
    if model is None and stored_model in MODELS:
        model = stored_model
    params = {
        "method": method,
        "net": stored_net if net is None else net,
        "model": model,
        "random_state": state["random_state"],
        **state["params"],
    }
    names, kind = state["classes"]
    n_features, columns = state["features"]
    nets = _build_nets(params["net"], state, len(names), path)
    fitted = {
        "classes_": np.array(names, dtype=np.dtype(kind)),
        "n_features_in_": n_features,
        "shape_": state["shape"],
        "method_": state["method_name"],
        "history_": state["history"],
        "choice_": state.get("choice"),
        "trusted_score_": trusted_score(state["history"][-1]),
        "seed_": state["random_state"],
        "net_name_": stored_net if stored_net in NETS else "",
        "label_quality_": state["label_quality"].numpy(),
        "transition_": state["transition"].numpy(),
        "net_": Classifier(Layout.from_json(state["layout"]), Scale(*state["scale"]), nets),
    }
    if columns:
        fitted["feature_names_in_"] = np.array(columns, dtype=object)
    return StoredClassifier(params, fitted)


def _build_nets(net: Any, state: dict[str, Any], n_classes: int, path: Path) -> list[nn.Module]:
    """The networks with their stored weights, or the mixture of `auto`."""
    if state["method_name"] == "auto":
        nets: list[nn.Module] = [Mixture() for _ in state["nets"]]
    else:
        with seeded(0):
            nets = [make_net(net, state["shape"], n_classes) for _ in state["nets"]]
    for module, weights in zip(nets, state["nets"], strict=True):
        try:
            module.load_state_dict(weights)
        except RuntimeError as e:
            raise UserError(f"the network does not match the one in {path}: {str(e).splitlines()[-1].strip()}") from e
    return nets


def _qualified_name(thing: object) -> str:
    definition = thing if hasattr(thing, "__qualname__") else type(thing)
    return f"{definition.__module__}.{definition.__qualname__}"
