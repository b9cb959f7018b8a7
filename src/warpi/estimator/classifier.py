"""`NoisyLabelClassifier`: every method of the library as a scikit-learn classifier."""

import copy
import inspect
import logging
import threading
import warnings
from collections.abc import Mapping
from dataclasses import asdict, fields, replace
from numbers import Integral
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.utils import check_consistent_length, check_random_state, column_or_1d
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted, validate_data
from torch import Tensor, nn

from warpi.audit.label_scores import label_quality
from warpi.data.dataset import Dataset
from warpi.data.examples import Scale
from warpi.data.sparse import SparseExamples
from warpi.datasets.text_files import shorten_list
from warpi.errors import UserError, unknown
from warpi.estimator.inputs import Layout, is_table, refuse_blanks, refuse_texts
from warpi.estimator.onnx import Classifier, write_onnx
from warpi.estimator.pseudo_trusted import WITHOUT_TRUSTED, NoTrustedExamples, hold_out_pseudo_trusted
from warpi.functional.transition import from_given
from warpi.methods.registry import METHODS, explain_unknown_setting
from warpi.nets.registry import NETS, Build, make_net
from warpi.runs.defaults import (
    ENOUGH_ROWS,
    FEW_ROWS_METHOD,
    adjust_for_few_rows,
    defaults_for,
    resolve_defaults,
    resolve_method,
    to_plain_types,
)
from warpi.training.checkpoint import pack, unpack
from warpi.training.engine import Record, check_batches, train
from warpi.training.method import Method
from warpi.training.recipe import Recipe
from warpi.training.task import Task, make_task
from warpi.utils.devices import pick_device
from warpi.utils.files import write_atomically
from warpi.utils.seeding import derive, seeded

log = logging.getLogger("warpi.estimator")

FORMAT = "warpi-classifier/1"
_RECIPE = {f.name for f in fields(Recipe)} - {"net", "seed"}
_ONE_AT_A_TIME = threading.RLock()  # of the fits in threads of a process
_ANY: dict[str, Any] = {"accept_sparse": "csr", "allow_nd": True}
_INSTEAD = {
    False: "there are no trusted examples (X_meta, y_meta, or trusted): {} is trained, which needs none; "
    "docs/estimator.md says how much worse that is",
    True: "{} needs trusted examples, and there are none (X_meta, y_meta, or trusted): rows stand in for them whose "
    "labels networks that never saw them agree with; docs/estimator.md says how much worse that is",
}


class NoisyLabelClassifier(ClassifierMixin, BaseEstimator):  # type: ignore[misc]  # scikit-learn has no types
    """A classifier that learns from labels which are partly wrong, best with a few that can be trusted.

    Parameters
    ----------
    method : "auto", a name of `warpi.METHODS` (`warpi list methods`), or a Method
        "auto" is WarPI with trusted examples (GLC if X is sparse, or has fewer than 1,000 rows); `docs/estimator.md`
        says what it is without them.
    net : "mlp", another name of `warpi.NETS`, an nn.Module (copied), or a function (shape, n_classes) -> nn.Module
    epochs, batch_size, lr : of training; None: what suits the data
    noise_rate : share of wrong labels, for the methods that want to be told
    settings : dict of all else: fields of `warpi.Recipe` and hyper-parameters of the method
    augment : shift and mirror images, leave out entries of sparse rows, while training
    device : "auto", "cpu", "cuda", "cuda:0", ...
    random_state : int or RandomState; None: another result each time. Global generators are left alone.

    Attributes
    ----------
    classes_ : the labels, in order
    label_quality_ : [N] for every row given to `fit` the probability that its label is right
    transition_ : [K, K] estimated probability of being labelled j for an example of class i; rows sum to 1
    history_ : a dict an epoch: losses, learning rate, seconds
    n_features_in_, feature_names_in_ : as in scikit-learn
    net_ : the trained module, from the numbers in X to probabilities
    method_ : the name of the method that was trained
    """

    def __init__(
        self,
        method: str | Method = "auto",
        net: str | nn.Module | Build = "mlp",
        *,
        epochs: int | None = None,
        batch_size: int | None = None,
        lr: float | None = None,
        noise_rate: float | None = None,
        settings: Mapping[str, Any] | None = None,
        augment: bool = True,
        device: str = "auto",
        random_state: int | np.random.RandomState | None = None,
    ) -> None:
        self.method = method
        self.net = net
        self.epochs = epochs
        self.batch_size = batch_size
        self.lr = lr
        self.noise_rate = noise_rate
        self.settings = settings
        self.augment = augment
        self.device = device
        self.random_state = random_state

    def fit(
        self,
        X: Any,
        y: ArrayLike,
        X_meta: Any = None,
        y_meta: ArrayLike | None = None,
        trusted: ArrayLike | None = None,
    ) -> Self:
        """Learn from examples X whose labels y are partly wrong.

        The trusted examples are (X_meta, y_meta), or the rows of X that the booleans `trusted` [N] mark. Without any, a
        `NoTrustedExamples` warning says what is done instead.
        """
        X, y = self._checked(X, y)
        self.classes_, given = np.unique(y, return_inverse=True)
        if len(self.classes_) < 2:
            raise ValueError(
                f"y holds one class, {self.classes_.tolist()[0]!r}; a classifier needs at least two classes"
            )
        layout = Layout.of(X, own_net=not isinstance(self.net, str))
        numbers = layout.numbers(X)
        dataset = self._dataset(layout, numbers, given)
        if trusted is not None:
            dataset = replace(dataset, trusted=_marks(trusted, len(given)))
        checked = self._checked_meta(layout, X_meta, y_meta, trusted)
        task, truth = make_task(dataset, meta_data=checked, val=0.0, test=0.0)
        if truth.n_repeated:
            log.warning("%d of %d rows of X are also in X_meta, and are used only there", truth.n_repeated, len(given))
        task = replace(task, noise_rate=self._noise_rate()).to(pick_device(self.device))
        seed = self._seed()
        # A network of the user's may draw from the global generators, and there is one forward-mode level a process.
        with _ONE_AT_A_TIME, seeded(derive(seed, "training")):
            learner = self._train(task, seed)
        self.net_ = Classifier(layout, _scale(task), learner.predictors)
        p = self.net_.probabilities(numbers)  # [N, K]
        self.transition_ = from_given(p, torch.from_numpy(given)).numpy()
        self.label_quality_ = label_quality(p.numpy(), given, self.transition_)
        if dataset.trusted is not None:
            self.label_quality_[dataset.trusted.numpy()] = 1.0
        return self

    def predict_proba(self, X: Any) -> NDArray[np.float32]:
        """[N, K] probabilities of `classes_`."""
        check_is_fitted(self)
        p = self.net_.to(pick_device(self.device)).probabilities(self.encode(X))
        proba: NDArray[np.float32] = (p / p.sum(1, keepdim=True)).float().numpy()
        return proba

    def predict(self, X: Any) -> NDArray[Any]:
        """[N] the most probable of `classes_`."""
        p = self.predict_proba(X)
        found: NDArray[Any] = self.classes_[p.argmax(1)]
        return found

    def encode(self, X: Any) -> Any:
        """X as the numbers that `net_` and the ONNX file take: text in a table as the position of its category."""
        check_is_fitted(self)
        layout: Layout = self.net_.prepare.layout
        return layout.numbers(self._again(layout, X, "X"))

    # --- files --------------------------------------------------------------------------------------------------------

    def save(self, path: Path | str) -> None:
        """Write the fitted classifier to one file of tensors and JSON, with a hash over both; nothing is pickled."""
        check_is_fitted(self)
        method: Any = self.method
        net = self.net
        if isinstance(method, Method):
            name, _ = resolve_method(method)
            method = {"name": name, "options": to_plain_types(asdict(method))} if name in METHODS else _called(method)
        own = ("method", "net", "random_state")
        state = {
            "params": {k: v for k, v in self.get_params(deep=False).items() if k not in own},
            "method": method,
            "net": net if isinstance(net, str) else _called(net),
            "random_state": self.seed_ if self.random_state is not None else None,
            "classes": [self.classes_.tolist(), self.classes_.dtype.str],
            "features": [self.n_features_in_, list(getattr(self, "feature_names_in_", ()))],
            "layout": self.net_.prepare.layout.to_json(),
            "shape": self.shape_,
            "scale": [self.net_.prepare.mean, self.net_.prepare.std],
            "nets": [dict(net.state_dict()) for net in self.net_.nets],
            "label_quality": torch.from_numpy(self.label_quality_),
            "transition": torch.from_numpy(self.transition_),
            "history": self.history_,
            "method_name": self.method_,
        }
        try:
            content = pack(state, FORMAT)
        except TypeError as e:
            raise UserError(f"{e}; settings may hold numbers, text, and lists of them") from e
        write_atomically(Path(path), content)

    @classmethod
    def load(cls, path: Path | str, net: nn.Module | Build | None = None) -> Self:
        """Read what `save` wrote. A network of your own is not in the file: give it again, with any weights."""
        if not Path(path).is_file():
            raise UserError(f"there is no file {path}; give one that NoisyLabelClassifier.save wrote")
        state = unpack(Path(path), FORMAT, "give a file that NoisyLabelClassifier.save wrote, as it wrote it")
        method, stored = state["method"], state["net"]
        if isinstance(method, dict):
            method = replace(METHODS[method["name"]], **method["options"])
        if stored not in NETS and net is None:
            raise UserError(
                f"{path} holds the weights of {stored}, not the network itself; load(path, net=...) with it"
            )
        model = cls(method, stored if net is None else net, random_state=state["random_state"], **state["params"])
        names, kind = state["classes"]
        model.classes_ = np.array(names, dtype=np.dtype(kind))
        model.n_features_in_, columns = state["features"]
        if columns:
            model.feature_names_in_ = np.array(columns, dtype=object)
        model.shape_, model.method_, model.history_ = state["shape"], state["method_name"], state["history"]
        model.seed_ = state["random_state"]
        model.label_quality_, model.transition_ = state["label_quality"].numpy(), state["transition"].numpy()
        with seeded(0):
            nets = [make_net(model.net, model.shape_, len(names)) for _ in state["nets"]]
        for made, weights in zip(nets, state["nets"], strict=True):
            try:
                made.load_state_dict(weights)
            except RuntimeError as e:
                raise UserError(f"the network given is not the one in {path}: {str(e).splitlines()[-1].strip()}") from e
        model.net_ = Classifier(Layout.from_json(state["layout"]), Scale(*state["scale"]), nets)
        return model

    def to_onnx(self, path: Path | str) -> float | None:
        """Write the classifier as ONNX: input `x`, raw (as `encode` gives it), output `probabilities` of `classes_`.

        Where onnxruntime is installed the file is written only if both agree to 1e-5. Returns the largest difference.
        """
        check_is_fitted(self)
        return write_onnx(copy.deepcopy(self.net_).cpu(), Path(path), self.classes_.tolist())

    def __getstate__(self) -> dict[str, Any]:
        state: dict[str, Any] = super().__getstate__()
        if "net_" in state and self.net_.prepare.mean.device.type != "cpu":  # another machine may have no GPU
            state = {**state, "net_": copy.deepcopy(self.net_).cpu()}
        return state

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.sparse = True
        tags.input_tags.categorical = True
        tags.input_tags.three_d_array = True
        return tags

    # --- fitting ------------------------------------------------------------------------------------------------------

    def _checked(self, X: Any, y: Any) -> tuple[Any, NDArray[Any]]:
        refuse_texts(X)
        refuse_blanks(y, "y")
        if is_table(X):
            X, y = validate_data(self, X, y, skip_check_array=True)
            y = column_or_1d(y, warn=True)
            check_consistent_length(X, y)
        else:
            X, y = validate_data(self, X, y, dtype=_dtype(X), **_ANY)
        check_classification_targets(y)
        return X, y

    def _again(self, layout: Layout, X: Any, name: str) -> Any:
        """Another X, checked to be of the kind that `fit` was given."""
        if layout.kind != "columns":
            return validate_data(self, X, reset=False, dtype=_dtype(X), **_ANY)
        if not hasattr(X, "iloc"):
            raise UserError(f"{name} must be a frame with the columns of the X to fit, got {type(X).__name__}")
        return validate_data(self, X, reset=False, skip_check_array=True)

    def _checked_meta(self, layout: Layout, X: Any, y: Any, trusted: Any) -> Dataset | None:
        """The trusted examples as a data set of their own."""
        if X is None and y is None:
            return None
        if X is None or y is None:
            raise UserError("X_meta and y_meta come together, got only one of them")
        if trusted is not None:
            raise UserError("trusted examples are given by X_meta and y_meta or by `trusted`, got both")
        refuse_blanks(y, "y_meta")
        X = self._again(layout, X, "X_meta")
        y = column_or_1d(y, warn=True)
        check_consistent_length(X, y)
        index = {name: k for k, name in enumerate(self.classes_.tolist())}
        labels = y.tolist()
        for row, label in enumerate(labels):
            if label not in index:
                classes = shorten_list(map(repr, index))
                raise UserError(f"y_meta, row {row}: the class {label!r} does not occur in y; classes: {classes}")
        return self._dataset(layout, layout.numbers(X), np.array([index[label] for label in labels]))

    def _dataset(self, layout: Layout, numbers: Any, given: NDArray[np.int64]) -> Dataset:
        examples = layout.examples(numbers, self.augment)
        return Dataset("X", examples, torch.from_numpy(given), tuple(map(str, self.classes_.tolist())))

    def _train(self, task: Task, seed: int) -> Method:
        """The method after its last epoch, and what happened on the way."""
        chosen = {"epochs": self.epochs, "batch_size": self.batch_size, "lr": self.lr}
        settings = to_plain_types({**(self.settings or {}), **{k: v for k, v in chosen.items() if v is not None}})
        sparse = isinstance(task.train.examples, SparseExamples)
        defaults = defaults_for((1,) if self.net == "mlp" else task.shape, task.n_classes, sparse=sparse)
        net = _usable(self.net)

        def learn(method: str | Method, task: Task, settings: Mapping[str, Any]) -> tuple[Method, list[Record]]:
            _, base = resolve_method(method)
            own = asdict(method) if isinstance(method, Method) else {}
            suits = adjust_for_few_rows(defaults, len(task.train), settings)
            recipe, options, _ = resolve_defaults(base, suits, {**own, **settings, "net": net, "seed": seed})
            learner = replace(base, **options)
            learner.start(task, recipe)
            learner.check_nets_differ()
            check_batches(learner)
            return learner, [record for record in train(learner, task) if record]

        method = self.method
        if method == "auto":
            too_few = defaults["net"] == "mlp" and len(task.train) < ENOUGH_ROWS
            method = WITHOUT_TRUSTED if not task.meta else FEW_ROWS_METHOD if sparse or too_few else "warpi"
        self.method_, base = resolve_method(method)
        own = {f.name for f in fields(base)}
        for name in settings:
            if name not in own | _RECIPE:
                lacks = explain_unknown_setting(f"setting {name!r}", self.method_, name)
                raise lacks or unknown("setting", name, own | _RECIPE)
        if type(base).predict is not Method.predict:
            raise UserError(
                f"{self.method_} redefines `predict`; name the networks that predict in `predictors` instead"
            )
        if task.meta is None and (base.needs_meta or self.method == "auto"):
            warnings.warn(_INSTEAD[base.needs_meta].format(self.method_), NoTrustedExamples, stacklevel=3)
        if base.needs_meta and task.meta is None:
            shared = {name: value for name, value in settings.items() if name in _RECIPE}
            task = hold_out_pseudo_trusted(task, lambda part: learn(WITHOUT_TRUSTED, part, shared)[0], seed)
        learner, self.history_ = learn(method, task, settings)
        self.shape_ = task.shape
        return learner

    def _seed(self) -> int:
        if self.random_state is None:  # not from numpy's global generator: it would be moved
            self.seed_ = int(np.random.SeedSequence().generate_state(1)[0])
        elif isinstance(self.random_state, Integral):
            check_random_state(self.random_state)
            self.seed_ = int(self.random_state)
        else:
            self.seed_ = int(check_random_state(self.random_state).randint(2**31))
        return self.seed_

    def _noise_rate(self) -> float | None:
        if self.noise_rate is not None and not 0 <= self.noise_rate < 1:
            raise UserError(f"noise_rate is a share of the labels in [0, 1), got {self.noise_rate}")
        return None if self.noise_rate is None else float(self.noise_rate)


def _dtype(X: Any) -> list[type[np.generic]]:
    """What X is kept as: bytes of images as they are, all else in float64 unless it is in float32."""
    return [np.uint8] if getattr(X, "ndim", 2) > 2 and X.dtype == np.uint8 else [np.float64, np.float32]


def _marks(trusted: ArrayLike, n: int) -> Tensor:
    marks = np.asarray(trusted)
    if marks.shape != (n,) or marks.dtype != bool:
        raise UserError(f"`trusted` must be {n} booleans, one a row of X; got {marks.dtype} {list(marks.shape)}")
    if not marks.any():  # another method would be trained, whose scores are no part of the same mean
        raise UserError(
            f"`trusted` marks none of the {n} rows to fit; in cross-validation this fold has none of the trusted rows: "
            "use StratifiedKFold(shuffle=True), or X_meta and y_meta, which are in every fold; else leave `trusted` out"
        )
    return torch.from_numpy(marks.copy())


def _usable(net: Any) -> Any:
    """The network; an error where it cannot be made, or where nothing in it can be learned."""
    if isinstance(net, str) or not callable(net):
        return net
    if isinstance(net, nn.Module):
        return _trainable(net)
    try:
        inspect.signature(net).bind((1,), 2)
    except TypeError as e:
        name = getattr(net, "__name__", type(net).__name__)
        what = f"give the module itself, net={name}(...)" if isinstance(net, type) else "give it these two arguments"
        raise UserError(f"net={name} cannot be called with (shape, n_classes): {e}; {what}") from e
    except ValueError:  # a function that does not say what it takes
        return net
    return lambda shape, n_classes: _trainable(net(shape, n_classes))


def _trainable(net: Any) -> Any:
    if isinstance(net, nn.Module) and not any(p.requires_grad for p in net.parameters()):
        raise UserError(
            f"the network {type(net).__name__} has no parameters that are trained; requires_grad_(True) on some of them"
        )
    return net


def _scale(task: Task) -> Scale:
    scale: Scale = task.train.examples.scale  # type: ignore[attr-defined]
    return scale


def _called(thing: object) -> str:
    named = thing if hasattr(thing, "__qualname__") else type(thing)
    return f"{named.__module__}.{named.__qualname__}"
