"""`auto`: cheap models are compared on trusted rows that they have not seen, and their best mixture predicts."""

import logging
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, Literal, Protocol, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.sparse import csr_array

from warpi.auto.learners.modules import Mixture
from warpi.auto.rows import Rows
from warpi.data.batch import Batch
from warpi.data.numeric import Features
from warpi.data.sparse import SparseExamples
from warpi.data.split import Split
from warpi.errors import UserError
from warpi.nets.patches import PatchFeatures
from warpi.training.method import Log, Method, OutOfSample
from warpi.training.recipe import Recipe
from warpi.training.task import Task
from warpi.utils.seeding import derive, generator
from warpi.utils.settings import setting

log = logging.getLogger("warpi")
MODELS = ("forest", "boosting", "logistic", "kernel", "knn")
MOST_IMAGES = 2000  # from which patches are drawn
_UNITS = {"": 1, "s": 1, "m": 60, "h": 3600}


@runtime_checkable
class ScikitModel(Protocol):
    """A scikit-learn classifier."""

    def fit(self, X: Any, y: Any) -> Any: ...
    def predict_proba(self, X: Any) -> Any: ...
    def get_params(self, deep: bool = True) -> dict[str, Any]: ...


@dataclass
class Auto(Method):
    """Fits forests, logistic regressions and kernel regressions in several ways, and predicts with a mixture of them.

    The candidates are models trained on all rows (also with more weight on the trusted rows, or without the rows that
    confident learning doubts), on the trusted rows alone, and on labels re-estimated with the transition matrix T. All
    of them predict rows that they were not trained on (out of bag or cross-validated). Weights on the simplex maximize
    the likelihood of the trusted labels under a prior. If models of the trusted rows alone are clearly better, they
    are used instead.

    Images become `PatchFeatures` first. The models are fitted once, in the first epoch; further epochs of a recipe
    repeat the results. `docs/methods/auto.md` has the algorithm.
    Reference: Wolpert, Stacked Generalization, Neural Networks, 1992.
    """

    family = "model choice"
    resumes_mid_epoch = False
    trains_network = False
    needs_every_class = False
    recipe_defaults: ClassVar[dict[str, Any]] = {"epochs": 1}

    model: Literal["forest", "boosting", "logistic", "kernel", "knn"] | ScikitModel | None = setting(
        None, "kind of model that all candidates use (default: forest, logistic and kernel)"
    )
    budget: float | str | None = setting(
        None,
        "time that auto may spend comparing models, such as 60s or 5m; what does not fit is left out "
        "(default: no limit)",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        parse_seconds(self.budget)

    def start(self, task: Task, recipe: Recipe) -> None:
        self.start_without_steps(task, recipe, Mixture())
        self.candidates: list[dict[str, Any]] = []
        self.p = torch.zeros(0, task.n_classes)
        self.p_trusted = torch.zeros(0, task.n_classes)
        self.transition = torch.zeros(0, 0)
        self.trusted_score: list[float] | None = None  # estimate, low, high
        self.noise_rate: list[float] | None = None  # estimate, low, high
        self.noise_rate_point = 0.0
        self.reason = ""

    def check(self, task: Task) -> None:
        super().check(task)
        if task.meta is not None:
            counts = torch.bincount(task.meta.y.cpu(), minlength=task.n_classes)
            missing = [name for name, n in zip(task.classes, counts.tolist(), strict=True) if n == 0]
            if missing:
                listed = ", ".join(map(repr, missing[:5])) + (", ..." if len(missing) > 5 else "")
                log.warning(
                    "there is no trusted example of %s: the labels of these classes are taken as they are, and the "
                    "printed accuracy covers only the other classes; check at least one row of each of them",
                    listed,
                )

    def epoch(self, t: int) -> Iterator[Log]:  # noqa: ARG002 (it fits only once)
        if not self.candidates:
            self._fit()
        log = {"noise_estimate": 100 * (self.noise_rate[0] if self.noise_rate else self.noise_rate_point)}
        if self.noise_rate is not None:
            log |= {"noise_low": 100 * self.noise_rate[1], "noise_high": 100 * self.noise_rate[2]}
        if self.trusted_score is not None:
            names = ("trusted_acc", "trusted_low", "trusted_high")
            log |= {name: 100 * value for name, value in zip(names, self.trusted_score, strict=True)}
        yield log

    def step(self, batch: Batch) -> Log:
        raise NotImplementedError("auto has no steps; `epoch` fits all candidates")

    def _fit(self) -> None:
        from warpi.auto.fit import AutoSettings, fit_auto
        from warpi.auto.score import Interval

        task = self.task
        images = fit_patches(task.train, self.recipe.seed) if len(task.shape) == 3 else None
        rows = read_task(task, task.train, images)
        options: dict[str, Any] = {} if self.model is None else {"models": (self.model,)}
        seed = derive(self.recipe.seed, "auto") % 2**31  # scikit-learn takes small seeds only
        settings = AutoSettings(**options, budget=parse_seconds(self.budget), seed=seed)
        result = fit_auto(rows, settings, progress=self.report_progress)

        def ends(interval: Interval | None) -> list[float] | None:
            return None if interval is None else [interval.estimate, interval.low, interval.high]

        result.model.images = images
        self.nets = [result.model.to(task.train.examples.device).eval()]
        self.candidates = [_to_plain(asdict(candidate)) for candidate in result.candidates]
        self.p = torch.from_numpy(np.asarray(result.p, np.float64))
        self.p_trusted = torch.from_numpy(np.asarray(result.p_trusted, np.float64))
        self.transition = torch.from_numpy(np.asarray(result.transition, np.float64))
        self.trusted_score = ends(result.trusted_score)
        self.noise_rate = ends(result.noise_rate)
        self.noise_rate_point = float(result.noise_rate_point)
        self.reason = result.reason

    def choice(self) -> list[dict[str, Any]] | None:
        return [{"candidate" if name == "name" else name: value for name, value in c.items()} for c in self.candidates]

    def out_of_sample(self) -> OutOfSample | None:
        return OutOfSample(self.p, self.p_trusted, self.transition) if self.candidates else None

    @property
    def uses_trusted(self) -> bool:
        return True


def fit_patches(split: Split, seed: int) -> PatchFeatures:
    """Features for the images of a split: fewer for few images."""
    rng = generator(seed, "patches")
    few = split.subset(torch.randperm(len(split), generator=rng)[:MOST_IMAGES])
    x = torch.cat([batch.x.float().cpu() for batch in few.batches(100)])
    size = 6 if min(x.shape[-2:]) >= 12 else 3
    filters = min(256, max(16, len(split) // 8))
    return PatchFeatures(x.shape[1], filters, size).fit(x, rng)


def read_rows(
    split: Split, images: PatchFeatures | None = None
) -> tuple[NDArray[np.float32] | csr_array, NDArray[np.int64]]:
    """The inputs of a split as a network sees them, [N, D], and their labels [N]. Sparse inputs stay sparse.

    Images are turned into features.
    """
    examples = split.examples
    y = split.y.cpu().numpy()
    if isinstance(examples, SparseExamples):
        return examples.normalized(split.rows.numpy()), y
    parts = []
    for batch in split.batches(1000 if images is None else 50):
        x = batch.x.float().cpu()
        parts.append(x.flatten(1) if images is None else images(x))
    if sum(map(len, parts)) < len(split):
        raise UserError("some images cannot be read; remove them, or choose a method that trains a network")
    return torch.cat(parts).numpy(), y


def read_task(task: Task, noisy: Split, images: PatchFeatures | None) -> Rows:
    """The noisy rows, and the trusted rows of a task, as `auto` sees them."""
    x, given = read_rows(noisy, images)
    x_trusted, y_trusted = (x[:0], given[:0]) if task.meta is None else read_rows(task.meta, images)
    meta_given = None if task.meta_given is None else task.meta_given.cpu().numpy()
    before, checked = (
        None if known is None or noisy is not task.train else known.cpu().numpy()
        for known in (task.before_audit, task.checked)
    )
    examples = noisy.examples
    marks = examples.find_marks() if isinstance(examples, Features) else None
    return Rows(x, given, x_trusted, y_trusted, meta_given, task.n_classes, before, marks, checked)


def parse_seconds(budget: float | str | None) -> float | None:
    """A time in seconds from a number or a text such as 60s, 5m or 1h."""
    if budget is None:
        return None
    match = re.fullmatch(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*([smh]?)\s*", str(budget).lower())
    if match is None or float(match[1]) <= 0:
        raise UserError(f"budget must be a time such as 60s, 5m or 1h, got {budget!r}")
    return float(match[1]) * _UNITS[match[2]]


def _to_plain(candidate: dict[str, Any]) -> dict[str, Any]:
    """NumPy numbers as Python numbers, and None instead of NaN, as a checkpoint and JSON can store them."""
    plain = {name: value.item() if isinstance(value, np.generic) else value for name, value in candidate.items()}
    return {name: None if value != value else value for name, value in plain.items()}
