"""Trained models as torch modules, which predict without scikit-learn and are stored without pickle."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from warpi.errors import UserError
from warpi.nets.patches import PatchFeatures

TINY = 1e-12


def _tensor(values: Any, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.as_tensor(np.ascontiguousarray(values)).to(dtype)


def round_down(thresholds: Any) -> np.ndarray[Any, np.dtype[np.float32]]:
    """The largest float32 not above each threshold, so that `x <= threshold` stays the same for a float32 x."""
    exact = np.asarray(thresholds, dtype=np.float64)
    rounded = exact.astype(np.float32)
    return np.where(rounded > exact, np.nextafter(rounded, np.float32(-np.inf)), rounded)


class Part(nn.Module):
    """A module that maps rows [B, D] to log-probabilities [B, K] and is stored as tensors and plain values."""

    kind = ""

    def arrays(self) -> dict[str, Any]:
        """Keyword arguments that build the same part again."""
        raise NotImplementedError


class TreeSum(Part):
    """The mean of the class probabilities of trees (a forest), or the softmax of their sum (boosting).

    The nodes of all trees are in one array. A leaf is its own child, so that every row takes `depth` steps.
    """

    kind = "trees"
    roots: Tensor
    feature: Tensor
    threshold: Tensor
    branches: Tensor  # [nodes, 2]
    value: Tensor  # [nodes, K]
    baseline: Tensor
    gap_right: Tensor | None  # [nodes] whether NaN goes right; None: always left

    def __init__(
        self,
        roots: Any,
        feature: Any,
        threshold: Any,
        branches: Any,
        value: Any,
        depth: int,
        baseline: Any = None,
        gap_right: Any = None,
    ) -> None:
        super().__init__()
        self.depth = int(depth)
        self.boosted = baseline is not None
        self.register_buffer("roots", _tensor(roots, torch.int64))
        self.register_buffer("feature", _tensor(feature, torch.int64))
        self.register_buffer("threshold", _tensor(threshold))
        self.register_buffer("branches", _tensor(branches, torch.int64))
        self.register_buffer("value", _tensor(value))
        self.register_buffer("baseline", _tensor(baseline if self.boosted else np.zeros(self.value.shape[1])))
        self.register_buffer("gap_right", None if gap_right is None else _tensor(gap_right, torch.bool))

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(1).float()
        node = self.roots.unsqueeze(0).expand(x.shape[0], -1)  # [B, trees]
        for _ in range(self.depth):
            number = x.gather(1, self.feature[node])
            goes_right = number > self.threshold[node]
            if self.gap_right is not None:
                goes_right |= number.isnan() & self.gap_right[node]
            node = torch.where(goes_right, self.branches[:, 1][node], self.branches[:, 0][node])
        total = self.value[node].sum(1)
        if self.boosted:
            return F.log_softmax(total + self.baseline, dim=1)
        mean = total / len(self.roots)
        return (mean / mean.sum(1, keepdim=True).clamp_min(TINY)).clamp_min(TINY).log()

    def arrays(self) -> dict[str, Any]:
        names = ("roots", "feature", "threshold", "branches", "value")
        stored: dict[str, Any] = {name: getattr(self, name) for name in names}
        baseline = self.baseline if self.boosted else None
        return {**stored, "depth": self.depth, "baseline": baseline, "gap_right": self.gap_right}


class Linear(Part):
    """Softmax regression on standardized columns, which are clipped at `limit` standard deviations."""

    kind = "linear"
    mean: Tensor
    scale: Tensor
    weight: Tensor
    bias: Tensor

    def __init__(self, mean: Any, scale: Any, weight: Any, bias: Any, limit: float) -> None:
        super().__init__()
        self.limit = float(limit)
        for name, values in (("mean", mean), ("scale", scale), ("weight", weight), ("bias", bias)):
            self.register_buffer(name, _tensor(values))

    def forward(self, x: Tensor) -> Tensor:
        z = ((x.flatten(1).float() - self.mean) / self.scale).clamp(-self.limit, self.limit)
        return F.log_softmax(z @ self.weight + self.bias, dim=1)

    def arrays(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("mean", "scale", "weight", "bias", "limit")}


class Neighbors(Part):
    """The mean soft label of the k nearest rows in standardized columns, weighted by the weights of these rows."""

    kind = "neighbors"
    mean: Tensor
    scale: Tensor
    points: Tensor
    labels: Tensor

    def __init__(self, mean: Any, scale: Any, points: Any, labels: Any, k: int) -> None:
        super().__init__()
        self.k = int(k)
        for name, values in (("mean", mean), ("scale", scale), ("points", points), ("labels", labels)):
            self.register_buffer(name, _tensor(values))

    def forward(self, x: Tensor) -> Tensor:
        z = (x.flatten(1).float() - self.mean) / self.scale
        distance = self.points.square().sum(1) - 2 * z @ self.points.T  # without |z|^2, which does not change the order
        nearest = distance.topk(self.k, dim=1, largest=False).indices
        votes = self.labels[nearest].sum(1)
        return (votes / votes.sum(1, keepdim=True).clamp_min(TINY)).clamp_min(TINY).log()

    def arrays(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("mean", "scale", "points", "labels", "k")}


class Kernel(Part):
    """A weighted sum of Gaussian kernels around points in standardized columns, clipped and scaled to sum 1."""

    kind = "kernel"
    mean: Tensor
    scale: Tensor
    points: Tensor
    coefficients: Tensor
    intercept: Tensor

    def __init__(
        self,
        mean: Any,
        scale: Any,
        points: Any,
        width: float,
        coefficients: Any,
        intercept: Any,
        limit: float,
        least: float,
    ) -> None:
        super().__init__()
        self.width = float(width)
        self.limit = float(limit)
        self.least = float(least)
        self.register_buffer("mean", _tensor(mean))
        self.register_buffer("scale", _tensor(scale))
        self.register_buffer("points", _tensor(points))
        self.register_buffer("coefficients", _tensor(coefficients))
        self.register_buffer("intercept", _tensor(intercept))

    def forward(self, x: Tensor) -> Tensor:
        z = ((x.flatten(1).float() - self.mean) / self.scale).clamp(-self.limit, self.limit)
        distance = z.square().sum(1, keepdim=True) + self.points.square().sum(1) - 2 * z @ self.points.T
        kernel = (distance.clamp_min(0) / (-2 * self.width**2)).exp()
        p = (self.intercept + kernel @ self.coefficients).clamp_min(self.least)
        return (p / p.sum(1, keepdim=True)).log()

    def arrays(self) -> dict[str, Any]:
        names = ("mean", "scale", "points", "width", "coefficients", "intercept", "limit", "least")
        return {name: getattr(self, name) for name in names}


class Projected(Part):
    """A part that reads x @ components instead of x."""

    kind = "projected"
    components: Tensor  # [D, d]

    def __init__(self, components: Any, part: Part | Mapping[str, Any]) -> None:
        super().__init__()
        self.register_buffer("components", _tensor(components))
        self.columns = find_selection(self.components)
        self.part = part if isinstance(part, nn.Module) else build_part(part)

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(1).float()
        out: Tensor = self.part(x @ self.components if self.columns is None else x[:, self.columns])
        return out

    def arrays(self) -> dict[str, Any]:
        return {"components": self.components, "part": store_part(self.part)}


class Gaps(Part):
    """A part that reads NaN where a column is missing. `marks` [D] are the columns that say so, -1 for none."""

    kind = "gaps"
    marks: Tensor  # [D]

    def __init__(self, marks: Any, part: Part | Mapping[str, Any]) -> None:
        super().__init__()
        self.register_buffer("marks", _tensor(marks, torch.int64))
        self.part = part if isinstance(part, nn.Module) else build_part(part)

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(1).float()
        is_gap = (self.marks >= 0) & (x[:, self.marks.clamp_min(0)] > 0)
        out: Tensor = self.part(torch.where(is_gap, torch.nan, x))
        return out

    def arrays(self) -> dict[str, Any]:
        return {"marks": self.marks, "part": store_part(self.part)}


def find_selection(components: Tensor) -> Tensor | None:
    """The columns [d] that components [D, d] select, or None if they do more than that. An index is much faster."""
    used = components != 0
    if not bool((used.sum(0) == 1).all()) or not bool((components[used] == 1).all()):
        return None
    return used.int().argmax(0)


class Wrapped(nn.Module):
    """A fitted scikit-learn classifier. It cannot be saved, because that would need pickle."""

    def __init__(self, estimator: Any, n_classes: int) -> None:
        super().__init__()
        self.estimator = estimator
        self.n_classes = n_classes

    def forward(self, x: Tensor) -> Tensor:
        p = full_probabilities(self.estimator, x.detach().cpu().numpy(), self.n_classes)
        return torch.as_tensor(p, dtype=torch.float32, device=x.device).clamp_min(TINY).log()


def full_probabilities(estimator: Any, x: Any, n_classes: int) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Probabilities [M, K] of a fitted classifier, with zeros for classes it has not seen."""
    p = np.zeros((x.shape[0], n_classes))
    if not x.shape[0]:
        return p
    classes = np.asarray(estimator.classes_, dtype=np.int64)
    if hasattr(estimator, "predict_proba"):
        p[:, classes] = estimator.predict_proba(x)
    else:
        p[np.arange(len(p)), np.asarray(estimator.predict(x), dtype=np.int64)] = 1
    return p


PARTS: dict[str, type[Part]] = {part.kind: part for part in (TreeSum, Linear, Neighbors, Kernel, Projected, Gaps)}


def store_part(part: nn.Module) -> dict[str, Any]:
    if isinstance(part, Part):
        return {"kind": part.kind, **part.arrays()}
    name = type(part.estimator if isinstance(part, Wrapped) else part).__name__
    raise UserError(
        f"a model that contains {name} cannot be saved; models that can: forest, logistic, kernel, boosting, knn, and "
        "scikit-learn's random forests, extra trees, histogram boosting and logistic regression"
    )


def build_part(stored: Mapping[str, Any]) -> Part:
    values = dict(stored)
    kind = values.pop("kind")
    return PARTS[kind](**values)


class Node:
    """One step of a mixture: a weighted mean or a weighted geometric mean of calibrated inputs.

    Inputs are numbers: 0, 1, ... for the parts, then the earlier nodes. Calibration raises probabilities to the power
    of their temperature; `smooth` mixes in the uniform distribution before and after. `factors` correct the shares of
    the classes in the result.
    """

    def __init__(
        self,
        inputs: Sequence[int],
        weights: Sequence[float],
        powers: Sequence[float],
        geometric: bool = False,
        smooth: float = 0.01,
        factors: Sequence[float] | None = None,
    ) -> None:
        self.inputs = [int(i) for i in inputs]
        self.weights = [float(w) for w in weights]
        self.powers = [float(g) for g in powers]
        self.geometric = bool(geometric)
        self.smooth = float(smooth)
        self.factors = None if factors is None else [float(f) for f in factors]

    def state(self) -> dict[str, Any]:
        return dict(vars(self))


def _smooth(p: Tensor, amount: float) -> Tensor:
    smoothed: Tensor = p * (1 - amount) + amount / p.shape[1]
    return smoothed


class Mixture(nn.Module):
    """The final model: parts, and nodes that combine them. The last node is the prediction.

    Images are first turned into features by `images`.
    """

    def __init__(
        self, parts: Sequence[nn.Module] = (), nodes: Sequence[Node] = (), images: PatchFeatures | None = None
    ) -> None:
        super().__init__()
        self.images = images
        self.parts = nn.ModuleList(parts)
        self.nodes = list(nodes)

    def forward(self, x: Tensor) -> Tensor:
        """Log-probabilities [B, K] of rows x [B, D] or images x [B, C, H, W]."""
        if self.images is not None:
            x = self.images(x)
        values: list[Tensor] = [part(x).exp() for part in self.parts]
        for node in self.nodes:
            values.append(self._evaluate(node, values))
        return values[-1].clamp_min(TINY).log()

    @staticmethod
    def _evaluate(node: Node, values: list[Tensor]) -> Tensor:
        calibrated = []
        for i, power in zip(node.inputs, node.powers, strict=True):
            p = _smooth(values[i], node.smooth) ** power
            calibrated.append(_smooth(p / p.sum(1, keepdim=True), node.smooth))
        if not node.geometric:
            mean = torch.stack([w * p for w, p in zip(node.weights, calibrated, strict=True)]).sum(0)
            return mean if node.factors is None else F.normalize(mean * torch.tensor(node.factors).to(mean), p=1, dim=1)
        logs = torch.stack([w * p.log() for w, p in zip(node.weights, calibrated, strict=True)]).sum(0)
        return _smooth(F.softmax(logs, dim=1), 2 * node.smooth)

    def state_dict(self, *_: Any, **__: Any) -> dict[str, Any]:  # type: ignore[override]
        """Kinds, arrays and weights as a nested dict of plain values and tensors."""
        return {
            "parts": [store_part(part) for part in self.parts],
            "nodes": [node.state() for node in self.nodes],
            "images": None if self.images is None else self.images.arrays(),
        }

    def load_state_dict(self, state: Mapping[str, Any], *_: Any, **__: Any) -> None:  # type: ignore[override]
        """Rebuild all parts from `state`, even in a `Mixture()` that has none."""
        self.parts = nn.ModuleList(build_part(stored) for stored in state["parts"])
        self.nodes = [Node(**stored) for stored in state["nodes"]]
        images = state.get("images")
        self.images = None if images is None else PatchFeatures.from_arrays(**images)
