"""`NoisyLabelClassifier`: every method of the library as a scikit-learn classifier."""

import copy
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
from torch import nn

from warpi.audit.label_scores import label_quality
from warpi.data.dataset import Dataset
from warpi.data.examples import Scale
from warpi.datasets.delimited_files import shorten_list
from warpi.errors import UserError, first_line, unknown
from warpi.estimator import inputs
from warpi.estimator.frames import has_non_numeric_columns
from warpi.estimator.inputs import Layout
from warpi.estimator.onnx import Classifier, write_onnx
from warpi.estimator.pseudo_trusted import METHOD_WITHOUT_TRUSTED, NoTrustedExamples, hold_out_pseudo_trusted
from warpi.estimator.serialization import read_classifier, trusted_score, write_classifier
from warpi.functional.transition import from_given
from warpi.methods.registry import explain_unknown_setting
from warpi.nets.registry import NetBuilder
from warpi.runs.defaults import default_method, defaults_of_task, resolve_defaults, resolve_method, to_plain_types
from warpi.training.engine import Record, check_batches, train
from warpi.training.method import Method
from warpi.training.recipe import Recipe
from warpi.training.task import Task, make_task
from warpi.utils.devices import pick_device
from warpi.utils.seeding import derive, seeded

log = logging.getLogger("warpi.estimator")

_RECIPE = {f.name for f in fields(Recipe)} - {"net", "seed"}
_SETTING = "settings__"  # prefix of the parameters that are settings
_FIT_LOCK = threading.RLock()  # only one thread of a process fits at a time
_ANY: dict[str, Any] = {"accept_sparse": "csr", "allow_nd": True, "ensure_all_finite": "allow-nan"}
_NO_TRUSTED = {
    False: "There are no trusted examples (X_trusted, y_trusted or trusted), so {} is trained without any, and its "
    "accuracy is unknown. Five checked rows per class reveal mistakes that follow a pattern, and help most if many "
    "labels are wrong. docs/estimator.md has the figures.",
    True: "{} needs trusted examples, but there are none (X_trusted, y_trusted or trusted). They are replaced by rows "
    "whose labels agree with networks that were not trained on them. docs/estimator.md says how much accuracy this "
    "costs.",
}


class NoisyLabelClassifier(ClassifierMixin, BaseEstimator):  # type: ignore[misc]  # scikit-learn has no types
    """A classifier that learns from partly wrong labels, best with a few trusted examples.

    Parameters
    ----------
    method : "auto", a name in `warpi.METHODS` (`warpi list methods`), or a Method
        "auto" compares models for feature vectors on the trusted rows and mixes them. For images, and if a network or
        its training is set (net, epochs, lr, ...), it trains a network: WarPI, or GLC if there are few rows.
    model : None, "forest", "boosting", "logistic", "kernel", "knn", or a scikit-learn classifier
        The model that "auto" uses; None compares forests, logistic regressions and kernel regressions.
    net : "mlp", another name in `warpi.NETS`, an nn.Module (copied), or a function (shape, n_classes) -> nn.Module
        "mlp" stands for the network that suits the method on tables: WarPI's has no BatchNorm.
    epochs, batch_size, lr : settings of training; None chooses them by the data
    noise_rate : fraction of wrong labels, for methods that need it
    settings : dict of other settings: fields of `warpi.Recipe` and hyperparameters of the method. A grid can set one of
        them as `settings__meta_lr`
    augment : whether to shift and flip images, and drop entries of sparse rows, during training
    device : "auto", "cpu", "cuda", "cuda:0", ...
    random_state : int or RandomState; None gives a different result each time. Global generators are not changed.

    Attributes
    ----------
    classes_ : the sorted labels
    label_quality_ : [N] probability that the label of each row passed to `fit` is right
    transition_ : [K, K] estimated probability that an example of class i is labeled j; rows sum to 1
    choice_ : the candidates that "auto" compared, as dicts: candidate, score, error, seconds, weight, note; or None
    trusted_score_ : accuracy on trusted rows that the models have not seen, a number with the ends `low` and `high` of
        its 90 % interval; None if it is not known
    history_ : one dict per epoch: losses, learning rate, seconds
    n_features_in_, feature_names_in_ : as in scikit-learn
    net_ : the trained module, from the numbers in X to probabilities
    method_ : the name of the trained method
    """

    def __init__(
        self,
        method: str | Method = "auto",
        net: str | nn.Module | NetBuilder = "mlp",
        *,
        model: Any = None,
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
        self.model = model
        self.epochs = epochs
        self.batch_size = batch_size
        self.lr = lr
        self.noise_rate = noise_rate
        self.settings = settings
        self.augment = augment
        self.device = device
        self.random_state = random_state

    def get_params(self, deep: bool = True) -> dict[str, Any]:
        """The parameters; if `deep`, also each of the settings as `settings__NAME`."""
        params: dict[str, Any] = super().get_params(deep=deep)
        if deep and isinstance(self.settings, Mapping):
            params |= {_SETTING + name: value for name, value in self.settings.items()}
        return params

    def set_params(self, **params: Any) -> Self:
        """Set parameters; `settings__meta_lr=0.1` sets one of the settings and keeps the others."""
        nested = {name.removeprefix(_SETTING): params.pop(name) for name in [*params] if name.startswith(_SETTING)}
        super().set_params(**params)
        if nested:
            self.settings = {**(self.settings or {}), **nested}
        return self

    def fit(
        self,
        X: Any,
        y: ArrayLike,
        X_trusted: Any = None,
        y_trusted: ArrayLike | None = None,
        trusted: ArrayLike | None = None,
        *,
        given_trusted: ArrayLike | None = None,
        X_meta: Any = None,
        y_meta: ArrayLike | None = None,
    ) -> Self:
        """Learn from examples X whose labels y are partly wrong.

        The trusted examples are (X_trusted, y_trusted), or the rows of X that the booleans `trusted` [N] mark. Without
        any, a `NoTrustedExamples` warning says what is done instead. `given_trusted` are the labels that the rows of
        X_trusted had before they were checked, or None if unknown; they show how labels go wrong. X_meta and y_meta are
        deprecated names.
        """
        if X_meta is not None or y_meta is not None:
            warnings.warn("X_meta and y_meta are deprecated; use X_trusted and y_trusted", FutureWarning, stacklevel=2)
            if X_trusted is not None or y_trusted is not None:
                raise UserError("got X_trusted, y_trusted and their old names X_meta, y_meta; pass only one pair")
            X_trusted, y_trusted = X_meta, y_meta
        X, y = self._check_fit_data(X, y)
        self.classes_ = np.unique(y)
        if len(self.classes_) < 2:
            raise ValueError(f"y contains one class, {self.classes_.tolist()[0]!r}; a classifier needs at least two")
        if self.method == "auto" and y_trusted is not None:
            self.classes_ = inputs.add_classes(self.classes_, y_trusted)
        given = np.searchsorted(self.classes_, y)
        layout = Layout.of(X, custom_net=not isinstance(self.net, str))
        numbers = layout.numbers(X)
        dataset = self._make_dataset(layout, numbers, given)
        if trusted is not None:
            dataset = replace(dataset, trusted=inputs.check_marks(trusted, len(given)))
        checked = self._check_trusted(layout, X_trusted, y_trusted, trusted)
        if given_trusted is not None:
            checked = self._add_given(checked, given_trusted)
        task, truth = make_task(dataset, meta_data=checked, val=0.0, test=0.0)
        if truth.n_repeated:
            text = "rows of X that are also in X_trusted are used only as trusted examples: %d of %d"
            log.warning(text, truth.n_repeated, len(given))
        task = replace(task, noise_rate=self._noise_rate()).to(pick_device(self.device))
        seed = self._seed()
        # A custom network may use the global generators, and forward-mode differentiation has one level per process.
        with _FIT_LOCK, seeded(derive(seed, "training")):
            learner = self._train(task, seed)
        scale: Scale = task.train.examples.scale  # type: ignore[attr-defined]
        self.net_ = Classifier(layout, scale, learner.predictors)
        p = self.net_.probabilities(numbers)  # [N, K]
        self.transition_ = from_given(p, torch.from_numpy(given)).numpy()
        if (unseen := learner.out_of_sample()) is not None:
            p[task.train.rows] = unseen.p
            self.transition_ = unseen.transition.numpy()
        self.choice_ = learner.choice()
        self.trusted_score_ = trusted_score(self.history_[-1])
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
        predicted: NDArray[Any] = self.classes_[p.argmax(1)]
        return predicted

    def encode(self, X: Any) -> Any:
        """Convert X to the numbers that `net_` and the ONNX file take: text becomes the position of its category."""
        check_is_fitted(self)
        layout: Layout = self.net_.prepare.layout
        return layout.numbers(self._check_like_fit(layout, X, "X"))

    def save(self, path: Path | str) -> None:
        """Write the fitted classifier to one file of tensors and JSON with a checksum, without pickle.

        Raises a UserError if `model` is a scikit-learn classifier whose fitted form cannot be written as numbers.
        """
        check_is_fitted(self)
        write_classifier(self, Path(path))

    @classmethod
    def load(cls, path: Path | str, net: nn.Module | NetBuilder | None = None, model: Any = None) -> Self:
        """Read a file that `save` wrote. It does not contain a custom network: pass it as `net`, with any weights.

        A scikit-learn classifier that was passed as `model` is needed only to fit again.
        """
        stored = read_classifier(Path(path), net, model)
        result = cls(**stored.params)
        for name, value in stored.fitted.items():
            setattr(result, name, value)
        return result

    def to_onnx(self, path: Path | str) -> float | None:
        """Write the classifier as ONNX: input `x`, as `encode` returns it, output `probabilities` of `classes_`.

        If onnxruntime is installed, the file is written only if both agree to 1e-5. Returns the largest difference.
        """
        check_is_fitted(self)
        return write_onnx(copy.deepcopy(self.net_).cpu(), Path(path), self.classes_.tolist())

    def __getstate__(self) -> dict[str, Any]:
        state: dict[str, Any] = super().__getstate__()
        if "net_" in state and self.net_.prepare.mean.device.type != "cpu":  # for machines without a GPU
            state = {**state, "net_": copy.deepcopy(self.net_).cpu()}
        return state

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.sparse = True
        tags.input_tags.categorical = True
        tags.input_tags.allow_nan = True
        tags.input_tags.three_d_array = True
        return tags

    def _check_fit_data(self, X: Any, y: Any) -> tuple[Any, NDArray[Any]]:
        inputs.refuse_texts(X)
        inputs.refuse_blanks(y, "y")
        if has_non_numeric_columns(X):
            X, y = validate_data(self, X, y, skip_check_array=True)
            y = column_or_1d(y, warn=True)
            check_consistent_length(X, y)
        else:
            X, y = validate_data(self, X, y, dtype=inputs.accepted_types(X), **_ANY)
        check_classification_targets(y)
        return X, y

    def _check_like_fit(self, layout: Layout, X: Any, name: str) -> Any:
        """Check that X has the same form as the X passed to `fit`."""
        if layout.kind != "columns":
            return validate_data(self, X, reset=False, dtype=inputs.accepted_types(X), **_ANY)
        if not hasattr(X, "iloc"):
            raise UserError(f"{name} must be a data frame with the columns of the X in fit, got {type(X).__name__}")
        return validate_data(self, X, reset=False, skip_check_array=True)

    def _check_trusted(self, layout: Layout, X: Any, y: Any, trusted: Any) -> Dataset | None:
        """The trusted examples as a separate data set."""
        if X is None and y is None:
            return None
        if X is None or y is None:
            raise UserError("X_trusted and y_trusted must be passed together, got only one of them")
        if trusted is not None:
            raise UserError("pass trusted examples either as X_trusted and y_trusted or by `trusted`, got both")
        inputs.refuse_blanks(y, "y_trusted")
        try:
            X = self._check_like_fit(layout, X, "X_trusted")
        except (ValueError, TypeError) as e:
            raise UserError(
                f"X_trusted does not match X: {first_line(e).rstrip('.;:')}. In a Pipeline, X_trusted must pass "
                "through the same steps: Pipeline(..., transform_input=['X_trusted']), see docs/estimator.md"
            ) from e
        y = column_or_1d(y, warn=True)
        check_consistent_length(X, y)
        index = {name: k for k, name in enumerate(self.classes_.tolist())}
        labels = y.tolist()
        for row, label in enumerate(labels):
            if label not in index:
                classes = shorten_list(map(repr, index))
                raise UserError(f"y_trusted, row {row}: the class {label!r} does not occur in y; classes: {classes}")
        return self._make_dataset(layout, layout.numbers(X), np.array([index[label] for label in labels]))

    def _add_given(self, checked: Dataset | None, given: ArrayLike) -> Dataset:
        """Trusted examples with the labels that they had before they were checked; missing or unknown ones are -1."""
        if checked is None:
            raise UserError("given_trusted are labels of the rows of X_trusted, which is missing; pass both")
        labels = column_or_1d(np.asarray(given, dtype=object)).tolist()
        if len(labels) != len(checked.y):
            raise UserError(f"given_trusted must have one label per row of X_trusted, got {len(labels)}")
        index = {name: k for k, name in enumerate(self.classes_.tolist())}
        return replace(checked, given=torch.tensor([index.get(label, -1) for label in labels]))

    def _make_dataset(self, layout: Layout, numbers: Any, given: NDArray[np.int64]) -> Dataset:
        examples = layout.examples(numbers, self.augment)
        return Dataset("X", examples, torch.from_numpy(given), tuple(map(str, self.classes_.tolist())))

    def _train(self, task: Task, seed: int) -> Method:
        """Train and return the method; sets `method_`, `history_` and `shape_`."""
        chosen = {"epochs": self.epochs, "batch_size": self.batch_size, "lr": self.lr}
        settings = to_plain_types({**(self.settings or {}), **{k: v for k, v in chosen.items() if v is not None}})
        method, strong = self._choose_method(task, settings)
        settings = {**{name: value for name, value in strong.items() if name != "net"}, **settings}
        net_or_name = strong.get("net", self.net)
        if self.model is not None:
            settings["model"] = self.model
        self.method_, base = resolve_method(method)
        self._check_method(base, settings)
        net = inputs.check_net(net_or_name)

        def learn(method: str | Method, task: Task, settings: Mapping[str, Any]) -> tuple[Method, list[Record]]:
            _, base = resolve_method(method)
            options = asdict(method) if isinstance(method, Method) else {}
            defaults = defaults_of_task(task, {**settings, "net": net_or_name})
            chosen_net = base.table_net if net_or_name == "mlp" else net  # as `warpi fit` does
            fixed = {"net": chosen_net, "seed": seed}
            recipe, options, _ = resolve_defaults(base, defaults, {**options, **settings, **fixed})
            self.net_name_ = chosen_net if isinstance(chosen_net, str) else ""
            learner = replace(base, **options)
            learner.start(task, recipe)
            learner.check_nets_differ()
            check_batches(learner)
            return learner, [record for record in train(learner, task) if record]

        if task.meta is None and (base.needs_meta or self.method == "auto"):
            warnings.warn(_NO_TRUSTED[base.needs_meta].format(self.method_), NoTrustedExamples, stacklevel=3)
        if base.needs_meta and task.meta is None:
            shared = {name: value for name, value in settings.items() if name in _RECIPE}
            task = hold_out_pseudo_trusted(task, lambda part: learn(METHOD_WITHOUT_TRUSTED, part, shared)[0], seed)
        learner, self.history_ = learn(method, task, settings)
        self.shape_ = task.shape
        return learner

    def _choose_method(self, task: Task, settings: Mapping[str, Any]) -> tuple[str | Method, Mapping[str, Any]]:
        """The method, or what "auto" stands for: the same as the default of `warpi fit`, with its recipe."""
        if self.model is not None and self.method != "auto":
            raise UserError(f"model can only be used with method='auto', got {self.method!r}; omit one of them")
        if self.method != "auto" or self.model is not None:
            return self.method, {}
        custom_net = {} if isinstance(self.net, str) and self.net == "mlp" else {"net": self.net}
        chosen = default_method(task, {**settings, **custom_net})
        return chosen.name, chosen.recipe

    def _check_method(self, method: Method, settings: Mapping[str, Any]) -> None:
        allowed = {f.name for f in fields(method)} | _RECIPE
        for name in settings:
            if name not in allowed:
                explained = explain_unknown_setting(f"setting {name!r}", self.method_, name)
                raise explained or unknown("setting", name, allowed)
        if type(method).predict is not Method.predict:
            raise UserError(f"{self.method_} redefines `predict`; name the networks that predict in `predictors`")

    def _seed(self) -> int:
        if self.random_state is None:  # not from numpy's global generator, which must not change
            self.seed_ = int(np.random.SeedSequence().generate_state(1)[0])
        elif isinstance(self.random_state, Integral):
            check_random_state(self.random_state)
            self.seed_ = int(self.random_state)
        else:
            self.seed_ = int(check_random_state(self.random_state).randint(2**31))
        return self.seed_

    def _noise_rate(self) -> float | None:
        if self.noise_rate is not None and not 0 <= self.noise_rate < 1:
            raise UserError(f"noise_rate must be in [0, 1), got {self.noise_rate}")
        return None if self.noise_rate is None else float(self.noise_rate)
