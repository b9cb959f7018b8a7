"""Properties that every method has. A new entry of METHODS is tested here automatically."""

import copy
import hashlib
import inspect
import random
import re
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass, replace
from functools import cache
from itertools import combinations, islice
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from warpi.errors import UserError
from warpi.methods.plain import CE, CleanOnly
from warpi.methods.registry import METHODS, make_method
from warpi.nets.mlp import MLP
from warpi.runs import run
from warpi.runs.spec import DataSpec
from warpi.training import checkpoint
from warpi.training.engine import Record, TrainingState, check_batches, train
from warpi.training.method import Method
from warpi.training.recipe import Recipe
from warpi.training.task import Task, Truth
from warpi.utils.seeding import RngState, seeded

RECIPE = Recipe(epochs=2, batch_size=64, meta_batch_size=16, lr=0.05, seed=7)
MethodTask = tuple[Task, Truth]

pytestmark = pytest.mark.parametrize("name", METHODS)


QUICK = {"auto": {"model": "knn"}, "cleannet": {"embedding_steps": 5}, "vri": {"hidden": (32, 32)}}  # else slow


def quick(name: str) -> Method:
    return make_method(name, **QUICK.get(name, {}))


def steps_of(name: str) -> int:
    """How many of the first two steps of an epoch there are."""
    return 2 if METHODS[name].trains_network else 1


def started(name: str, task: MethodTask, recipe: Recipe = RECIPE) -> Method:
    method = quick(name)
    method.start(task[0], recipe)
    return method


def stored(method: Method, path: Path, at: TrainingState | None = None) -> dict[str, Any]:
    """Save a checkpoint of the method and read it back."""
    state = {
        "method": checkpoint.state_of(method),
        "position": vars(at or TrainingState()),
        "rng": RngState.capture().to_dict(),
    }
    checkpoint.save(path, state)
    return checkpoint.load(path)


def same(a: Any, b: Any) -> bool:
    """Whether two nested values are equal bit by bit, except for times."""
    if isinstance(a, Tensor):
        return isinstance(b, Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a if k != "seconds")
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


class Dropout(nn.Module):
    """A user-defined network that draws from torch's global generator."""

    def __init__(self, shape: tuple[int, ...], n_classes: int) -> None:
        super().__init__()
        self.fc = nn.Linear(prod(shape), n_classes)

    def features(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(x.flatten(1), 0.2, self.training)

    def forward(self, x: Tensor) -> Tensor:
        z: Tensor = self.fc(self.features(x))
        return z


RECIPES = {
    "tiny": RECIPE,
    "dropout": replace(RECIPE, net=Dropout),
    "pictures": replace(RECIPE, optimizer="adam", lr=1e-3, schedule="cosine"),
}
CUTS: dict[str, Callable[[int], int]] = {  # from the items per epoch to the number of items before the interruption
    "in the middle of the first epoch": lambda n: n // 2,
    "after the last step of the first epoch": lambda n: n - 1,
    "at the end of the first epoch": lambda n: n,
    "in the middle of the last epoch": lambda n: n + n // 2,
}


class Whole(NamedTuple):
    """An uninterrupted run, with a checkpoint at each of the CUTS."""

    method: Method
    initial: list[Tensor]  # weights of all networks before training
    records: list[Record]
    state: dict[str, Any]  # the last checkpoint
    checkpoints: dict[str, tuple[dict[str, Any], list[Record]]]  # the state at a cut, and the records up to it
    data_changed: bool


@pytest.fixture(scope="session")
def whole(
    tiny: MethodTask, pictures: MethodTask, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str, str], Whole]:
    """Train a method on some data, once for all tests that compare with it."""

    @cache
    def run_whole(name: str, data: str) -> Whole:
        task = pictures if data == "pictures" else tiny
        file = tmp_path_factory.mktemp("whole") / name
        before = fingerprint(task[0])
        with seeded(1):
            method = started(name, task, RECIPES[data])
            initial = weights(method)
            n = len(method.loader) + 1  # items of an epoch: one per step, and the record
            stops = {cut: stop(n) for cut, stop in CUTS.items()}
            at = TrainingState()
            records: list[Record] = []
            checkpoints = {}
            for i, item in enumerate(train(method, *task, at), 1):
                records += [] if item is None else [item]
                for cut in (cut for cut, stop in stops.items() if stop == i):
                    checkpoints[cut] = stored(method, file, at), list(records)
            state = stored(method, file)
        return Whole(method, initial, records, state, checkpoints, fingerprint(task[0]) != before)

    return run_whole


def weights(method: Method) -> list[Tensor]:
    return [p.detach().clone() for net in method.nets for p in net.parameters()]


def untimed(records: list[Record]) -> list[Record]:
    return [{name: value for name, value in r.items() if name != "seconds"} for r in records]


def tensors_in(value: object) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif is_dataclass(value):
        for f in fields(value):
            yield from tensors_in(getattr(value, f.name))
    elif isinstance(value, tuple | list):
        for item in value:
            yield from tensors_in(item)


def fingerprint(task: Task) -> list[str]:
    hashes = [hashlib.sha256(t.contiguous().numpy().tobytes()).hexdigest() for t in tensors_in(task)]
    assert len(hashes) > 8  # inputs, rows and labels of three splits
    return hashes


def global_states() -> tuple[Any, ...]:
    _, keys, *rest = np.random.get_state()  # noqa: NPY002
    return random.getstate(), keys.tolist(), rest, torch.get_rng_state().tolist()


# --- the class and its documentation --------------------------------------------------------------------------------


def test_method_is_defined_by_its_hyper_parameters(name: str) -> None:
    method, cls = METHODS[name], type(METHODS[name])
    assert eval(repr(method), {cls.__name__: cls}) == method
    assert replace(method) == method
    assert make_method(name) == method
    assert make_method(name) is not method
    assert isinstance(cls(), Method)  # all fields have defaults
    for f in fields(method):  # a flag and spec.json can hold every value
        assert isinstance(getattr(method, f.name), str | int | float | bool | tuple | None), f.name
    assert vars(method).keys() == {f.name for f in fields(method)}  # the entry of the table was never started


def test_every_hyper_parameter_has_a_help_text(name: str) -> None:
    for f in fields(METHODS[name]):
        text = f.metadata.get("help", "")
        assert len(text.split()) >= 3, f"use setting(default, help) for {f.name}"
        assert text.replace(" ", "_") != f.name
        assert (f.default is None) == ("(default: " in text), (
            f"{f.name}: describe the default if and only if it is None"
        )


def test_method_has_a_docstring(name: str) -> None:
    cls = type(METHODS[name])
    assert "__doc__" in vars(cls)
    first = (cls.__doc__ or "").splitlines()[0]
    assert len(first) > 20
    assert not first.startswith(cls.__name__ + "(")  # the docstring that dataclasses generate
    if cls not in (CE, CleanOnly):
        assert "Reference: " in (cls.__doc__ or "")


def test_method_has_a_page(name: str) -> None:
    folder = Path(__file__).resolve().parents[2] / "docs" / "methods"
    file = folder / f"{name}.md"
    assert file.is_file(), f"write docs/methods/{name}.md"
    page = " ".join(file.read_text().split()).lower()
    doc = inspect.getdoc(type(METHODS[name])) or ""
    assert len(page) > 200, f"docs/methods/{name}.md is almost empty"
    if match := re.search(r"Reference: (.*?\b(?:19|20)\d\d)", " ".join(doc.split())):
        title = max(match[1].split(", "), key=len)
        year = match[1][-4:]
        assert title.lower() in page, f"docs/methods/{name}.md does not name the paper {title!r}"
        assert year in page
    variants = [other for other, method in METHODS.items() if type(method) is type(METHODS[name])]
    pages = "".join((folder / f"{other}.md").read_text() for other in variants)
    for f in fields(METHODS[name]):
        assert f"`{f.name}`" in pages, f"docs/methods/{name}.md does not describe {f.name}"


def test_flag_names_are_unique(name: str) -> None:
    groups = {cls.__name__: {f.name for f in fields(cls)} for cls in (type(METHODS[name]), Recipe, DataSpec)}
    groups["fit"] = set(inspect.signature(run.fitting).parameters) - {"settings"}
    for a, b in combinations(groups, 2):
        assert not groups[a] & groups[b], f"{a} and {b} share a name"


# --- training and prediction ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("data", ["tiny", "pictures"])
def test_trains_and_predicts(name: str, data: str, whole: Any, request: pytest.FixtureRequest) -> None:
    task, truth = request.getfixturevalue(data)
    trained = whole(name, data)
    method = trained.method
    assert len(method.nets) == method.n_nets
    assert [r["epoch"] for r in trained.records] == [1, 2]
    if method.trains_network:
        assert len(method.optimizers) == method.n_nets
        assert "loss" in trained.records[0]
    assert all(np.isfinite(list(r.values())).all() for r in trained.records)
    assert not any(map(torch.equal, trained.initial, weights(method)))
    assert not trained.data_changed

    x = next(iter(truth.test.batches(50))).x if truth.test else next(iter(task.train.batches(50))).x
    p = method.predict(x)
    assert p.shape == (len(x), task.n_classes)
    assert not p.requires_grad
    assert bool((p >= 0).all())
    torch.testing.assert_close(p.sum(1), torch.ones(len(x)))
    assert torch.equal(method.predict(x), p)
    torch.testing.assert_close(method.predict(x[:7]), p[:7])  # predictions do not depend on the rest of the batch


def test_logs_do_not_keep_the_graph(name: str, tiny: MethodTask) -> None:
    logs = list(islice(started(name, tiny).epoch(0), 2))
    assert len(logs) == steps_of(name)
    for log in logs:
        for key, value in log.items():
            assert isinstance(value, float) or (value.ndim == 0 and not value.requires_grad), key


def test_same_seed_gives_the_same_run_without_val_and_noise_rate(
    name: str, tiny: MethodTask, whole: Any, tmp_path: Path
) -> None:
    """A run depends on its seed only, not on the global generators, and leaves those unchanged.

    No method looks at the validation rows, and only methods with `needs_noise_rate` use the true noise rate.
    """
    task, truth = tiny
    blind = replace(task, val=None, noise_rate=task.noise_rate if METHODS[name].needs_noise_rate else None)
    with seeded(12345):
        before = global_states()
        method = started(name, (blind, truth))
        records = [r for r in train(method, blind, truth) if r is not None]
        assert global_states() == before
    expected = [{k: v for k, v in r.items() if not k.startswith("val_")} for r in whole(name, "tiny").records]
    assert untimed(records) == untimed(expected)
    assert same(stored(method, tmp_path / "again")["method"], whole(name, "tiny").state["method"])


def test_another_seed_changes_weights_batches_and_samples(name: str, tiny: MethodTask) -> None:
    a = started(name, tiny)
    b = started(name, tiny, replace(RECIPE, seed=8))
    assert not any(torch.equal(p, q) for p, q in zip(weights(a), weights(b), strict=True) if p.ndim > 1)
    assert not torch.equal(a.generator.get_state(), b.generator.get_state())
    for loader in ("loader", "meta_loader"):
        assert not torch.equal(getattr(a, loader).draw().rows, getattr(b, loader).draw().rows)


# --- checkpoints ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cut", "data"), [*((cut, "dropout") for cut in list(CUTS)[1:]), ("in the middle of the first epoch", "pictures")]
)
def test_resumes_exactly(
    name: str, cut: str, data: str, whole: Any, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    if cut != "at the end of the first epoch" and not METHODS[name].resumes_mid_epoch:
        pytest.skip(f"{name} does not support it")
    task = request.getfixturevalue("pictures" if data == "pictures" else "tiny")
    uninterrupted = whole(name, data)
    state, records = uninterrupted.checkpoints[cut]
    with seeded(2):
        method = started(name, task, RECIPES[data])
        checkpoint.restore(method, copy.deepcopy(state["method"]))
        RngState.from_dict(state["rng"]).restore()
        rest = [r for r in train(method, *task, TrainingState(**copy.deepcopy(state["position"]))) if r is not None]
        last = stored(method, tmp_path / "resumed")
    assert same(last, uninterrupted.state)
    assert untimed(records + rest) == untimed(uninterrupted.records)


def test_checkpoint_restores_the_whole_state(name: str, tiny: MethodTask, whole: Any, tmp_path: Path) -> None:
    """A started method differs from a trained one, and equals it after `restore`."""
    state = whole(name, "tiny").state["method"]
    fresh = started(name, tiny)
    assert not same(state, stored(fresh, tmp_path / "a")["method"])
    checkpoint.restore(fresh, copy.deepcopy(state))
    assert same(state, stored(fresh, tmp_path / "b")["method"])


# --- requirements ---------------------------------------------------------------------------------------------------


def test_missing_requirements_are_reported(name: str, tiny: MethodTask) -> None:
    task, method = tiny[0], quick(name)
    if method.needs_meta:
        with pytest.raises(UserError, match="needs trusted examples"):
            method.start(replace(task, meta=None), RECIPE)
    else:
        method.start(replace(task, meta=None), RECIPE)
        assert len(list(islice(method.epoch(0), 2))) == steps_of(name)
    if method.needs_noise_rate:
        with pytest.raises(UserError, match="noise rate"):
            quick(name).start(replace(task, noise_rate=None), RECIPE)


def test_too_small_batches_are_refused(name: str, tiny: MethodTask) -> None:
    """Batches of the stated minimum work, with 2 examples at least for BatchNorm; smaller ones are refused."""
    needs = {"batch_size": METHODS[name].least_batch, "meta_batch_size": METHODS[name].least_meta_batch}
    method = started(name, tiny, replace(RECIPE, **{part: max(2, n) for part, n in needs.items()}))
    check_batches(method)
    assert len(list(islice(method.epoch(0), 2))) == steps_of(name)
    for part, n in needs.items():
        if n > 1:
            method.start(tiny[0], replace(RECIPE, net=lambda *of: MLP(*of, hidden=()), **{part: n - 1}))
            with pytest.raises(UserError, match=f"needs {n} .* got {n - 1}; use --{part.replace('_', '-')} >= {n}"):
                check_batches(method)
