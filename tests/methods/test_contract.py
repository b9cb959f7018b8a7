"""What every method of the table promises. A new entry of METHODS is tested here without another line."""

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
from warpi.utils.seeding import capture_rng, restore_rng, seeded

RECIPE = Recipe(epochs=2, batch_size=32, meta_batch_size=16, lr=0.05, seed=7)
MethodTask = tuple[Task, Truth]

pytestmark = pytest.mark.parametrize("name", METHODS)


QUICK = {"cleannet": {"embedding_steps": 5}, "vri": {"hidden": (32, 32)}}  # what takes seconds with its defaults


def quick(name: str) -> Method:
    return make_method(name, **QUICK.get(name, {}))


def trained(name: str, task: MethodTask, recipe: Recipe = RECIPE) -> tuple[Method, list[Record]]:
    method = quick(name)
    method.start(task[0], recipe)
    return method, [record for record in train(method, *task) if record is not None]


def stored(method: Method, path: Path, at: TrainingState | None = None) -> dict[str, Any]:
    """What a checkpoint of the method holds, read back."""
    state = {
        "method": checkpoint.state_of(method),
        "position": vars(at or TrainingState()),
        "rng": capture_rng(),
    }
    checkpoint.save(path, state)
    return checkpoint.load(path)


def same(a: Any, b: Any) -> bool:
    """Equal to the last bit, whatever is inside."""
    if isinstance(a, Tensor):
        return isinstance(b, Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


class Whole(NamedTuple):
    """A run without interruption."""

    records: list[Record]
    state: dict[str, Any]  # what its last checkpoint holds
    n: int  # items that `train` yields in an epoch: a step each, and the record


@pytest.fixture(scope="module")
def whole(
    tiny: MethodTask, pictures: MethodTask, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str, str, Recipe], Whole]:
    """A method trained on some data, once for all tests that compare with it."""

    @cache
    def found(name: str, data: str, recipe: Recipe) -> Whole:
        with seeded(1):
            method, task = quick(name), {"tiny": tiny, "pictures": pictures}[data]
            method.start(task[0], recipe)
            items = list(train(method, *task))
            records = [item for item in items if item is not None]
            return Whole(records, stored(method, tmp_path_factory.mktemp("whole") / name), items.index(records[0]) + 1)

    return found


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
    found = [hashlib.sha256(t.contiguous().numpy().tobytes()).hexdigest() for t in tensors_in(task)]
    assert len(found) > 8  # inputs, rows and labels of three splits
    return found


def global_states() -> tuple[Any, ...]:
    _, keys, *rest = np.random.get_state()  # noqa: NPY002
    return random.getstate(), keys.tolist(), rest, torch.get_rng_state().tolist()


# --- what a method is -----------------------------------------------------------------------------------------------


def test_is_its_hyper_parameters(name: str) -> None:
    method, cls = METHODS[name], type(METHODS[name])
    assert eval(repr(method), {cls.__name__: cls}) == method
    assert replace(method) == method
    assert make_method(name) == method
    assert make_method(name) is not method
    assert isinstance(cls(), Method)  # the defaults are enough
    for f in fields(method):  # each is a value that a flag or spec.json can hold
        assert isinstance(getattr(method, f.name), str | int | float | bool | tuple | None), f.name
    assert vars(method).keys() == {f.name for f in fields(method)}  # the entry of the table was never started


def test_has_a_docstring(name: str) -> None:
    cls = type(METHODS[name])
    assert "__doc__" in vars(cls)
    first = (cls.__doc__ or "").splitlines()[0]
    assert len(first) > 20
    assert not first.startswith(cls.__name__ + "(")  # what dataclasses write where there is none
    if cls not in (CE, CleanOnly):
        assert "Reference: " in (cls.__doc__ or "")


def test_has_a_page(name: str) -> None:
    file = Path(__file__).resolve().parents[2] / "docs" / "methods" / f"{name}.md"
    assert file.is_file(), f"write docs/methods/{name}.md"
    page, doc = " ".join(file.read_text().split()).lower(), inspect.getdoc(type(METHODS[name])) or ""
    assert len(page) > 200, f"docs/methods/{name}.md says next to nothing"
    if found := re.search(r"Reference: (.*?\b(?:19|20)\d\d)", " ".join(doc.split())):
        title = max(found[1].split(", "), key=len)
        year = found[1][-4:]
        assert title.lower() in page, f"docs/methods/{name}.md does not name the paper {title!r}"
        assert year in page


def test_flags_have_one_meaning_each(name: str) -> None:
    groups = {cls.__name__: {f.name for f in fields(cls)} for cls in (type(METHODS[name]), Recipe, DataSpec)}
    groups["fit"] = set(inspect.signature(run.fitting).parameters) - {"settings"}
    for a, b in combinations(groups, 2):
        assert not groups[a] & groups[b], f"{a} and {b} share a name"


# --- what it does ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("data", ["tiny", "pictures"])
def test_trains_and_predicts(name: str, data: str, request: pytest.FixtureRequest) -> None:
    task, truth = request.getfixturevalue(data)
    method, before = quick(name), fingerprint(task)
    method.start(task, RECIPE)
    assert len(method.nets) == len(method.optimizers) == method.n_nets
    weights = [p.detach().clone() for net in method.nets for p in net.parameters()]
    records = [record for record in train(method, task, truth) if record is not None]

    assert [r["epoch"] for r in records] == [1, 2]
    assert "loss" in records[0]
    assert all(np.isfinite(list(r.values())).all() for r in records)
    now = [p for net in method.nets for p in net.parameters()]
    assert not any(torch.equal(a, b) for a, b in zip(weights, now, strict=True))
    assert fingerprint(task) == before  # data is never changed

    x = next(iter(truth.test.batches(50))).x if truth.test else next(iter(task.train.batches(50))).x
    for net in method.nets:
        net.eval()
    p = method.predict(x)
    assert p.shape == (len(x), task.n_classes)
    assert not p.requires_grad
    assert bool((p >= 0).all())
    torch.testing.assert_close(p.sum(1), torch.ones(len(x)))
    assert torch.equal(method.predict(x), p)
    torch.testing.assert_close(method.predict(x[:7]), p[:7])  # no example looks at its neighbours


def test_logs_cost_no_graph(name: str, tiny: MethodTask) -> None:
    method = quick(name)
    method.start(tiny[0], RECIPE)
    for log in method.epoch(0):
        for key, value in log.items():
            assert isinstance(value, float) or (value.ndim == 0 and not value.requires_grad), key


def test_the_same_seed_gives_the_same_run(name: str, tiny: MethodTask, whole: Any, tmp_path: Path) -> None:
    """Whatever was drawn from the global generators before: methods have their own."""
    records, state, _ = whole(name, "tiny", RECIPE)
    with seeded(12345):
        again, same_records = trained(name, tiny)
        torch.rand(1)
    assert untimed(records) == untimed(same_records)
    assert same(state["method"], stored(again, tmp_path / "again")["method"])

    other, other_records = trained(name, tiny, replace(RECIPE, seed=8))
    assert untimed(records) != untimed(other_records)
    for a, b in zip(again.nets, other.nets, strict=True):
        assert not any(torch.equal(p, q) for p, q in zip(a.parameters(), b.parameters(), strict=True) if p.ndim > 1)


def test_all_chance_follows_the_seed(name: str, tiny: MethodTask) -> None:
    a, b = quick(name), quick(name)
    a.start(tiny[0], RECIPE)
    b.start(tiny[0], replace(RECIPE, seed=8))
    assert not torch.equal(a.generator.get_state(), b.generator.get_state())
    for loader in ("loader", "meta_loader"):
        assert not torch.equal(getattr(a, loader).draw().rows, getattr(b, loader).draw().rows)


def test_leaves_the_global_generators_alone(name: str, tiny: MethodTask) -> None:
    before = global_states()
    trained(name, tiny)
    assert global_states() == before


def test_a_run_leaves_the_global_generators_alone(name: str, tmp_path: Path) -> None:
    before = global_states()
    done = run.fit(
        tmp_path / "run", method=name, device="cpu", noise="pair:0.4", limit=300, meta=20, epochs=1, batch_size=64
    )
    assert global_states() == before
    assert (done.path / "done").exists()


CUTS: dict[str, Callable[[int], int]] = {
    "at the end of an epoch": lambda n: n,
    "in the middle of the first epoch": lambda n: n // 2,
    "after the last step of the first epoch": lambda n: n - 1,
    "in the middle of the last epoch": lambda n: n + n // 2,
}


class DropsOut(nn.Module):
    """A network of the user's that draws from torch's global generator."""

    def __init__(self, shape: tuple[int, ...], n_classes: int) -> None:
        super().__init__()
        self.fc = nn.Linear(prod(shape), n_classes)

    def features(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(x.flatten(1), 0.2, self.training)

    def forward(self, x: Tensor) -> Tensor:
        z: Tensor = self.fc(self.features(x))
        return z


RECIPES = {
    "tiny": replace(RECIPE, net=DropsOut),
    "pictures": replace(RECIPE, optimizer="adam", lr=1e-3, schedule="cosine"),
}


@pytest.mark.parametrize(
    ("cut", "data"), [*((cut, "tiny") for cut in CUTS), ("in the middle of the first epoch", "pictures")]
)
def test_goes_on_as_if_never_interrupted(
    name: str, cut: str, data: str, whole: Any, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    task, recipe = request.getfixturevalue(data), RECIPES[data]
    if cut != "at the end of an epoch" and not METHODS[name].resumes_mid_epoch:
        pytest.skip(f"{name} says that it cannot")
    records, wanted, n = whole(name, data, recipe)
    with seeded(1):
        broken, at = quick(name), TrainingState()
        broken.start(task[0], recipe)
        seen = [r for r in islice(train(broken, *task, at), CUTS[cut](n)) if r is not None]
        stored(broken, tmp_path / "broken", at)
    with seeded(2):
        state = checkpoint.load(tmp_path / "broken")
        fresh = quick(name)
        fresh.start(task[0], recipe)
        checkpoint.restore(fresh, state["method"])
        restore_rng(state["rng"])
        rest = [r for r in train(fresh, *task, TrainingState(**state["position"])) if r is not None]
        got = stored(fresh, tmp_path / "fresh")
    assert same(got, wanted)
    assert untimed(seen + rest) == untimed(records)


def test_checkpoints_what_it_holds(name: str, tiny: MethodTask, whole: Any, tmp_path: Path) -> None:
    """A started method is unlike a trained one, and becomes it by `restore`."""
    state = whole(name, "tiny", RECIPE).state["method"]
    fresh = quick(name)
    fresh.start(tiny[0], RECIPE)
    assert not same(state, stored(fresh, tmp_path / "a")["method"])
    checkpoint.restore(fresh, copy.deepcopy(state))
    assert same(state, stored(fresh, tmp_path / "b")["method"])


# --- what it asks for -----------------------------------------------------------------------------------------------


def test_says_what_it_lacks(name: str, tiny: MethodTask) -> None:
    task, method = tiny[0], quick(name)
    if method.needs_meta:
        with pytest.raises(UserError, match="--meta"):
            method.start(replace(task, meta=None), RECIPE)
    else:
        method.start(replace(task, meta=None), RECIPE)
        assert len(list(method.epoch(0))) > 0
    if method.needs_noise_rate:
        with pytest.raises(UserError, match="noise rate"):
            quick(name).start(replace(task, noise_rate=None), RECIPE)


def test_says_how_small_a_batch_may_be(name: str, tiny: MethodTask) -> None:
    """The first epoch goes through with the least that is said, as far as BatchNorm allows it; less is refused."""
    needs = {"batch_size": METHODS[name].least_batch, "meta_batch_size": METHODS[name].least_meta_batch}
    method = quick(name)
    method.start(tiny[0], replace(RECIPE, **{part: max(2, n) for part, n in needs.items()}))
    check_batches(method)
    assert len(list(islice(method.epoch(0), 3))) == 3
    for part, n in needs.items():
        if n > 1:
            method.start(tiny[0], replace(RECIPE, net=lambda *of: MLP(*of, hidden=()), **{part: n - 1}))
            with pytest.raises(UserError, match=f"needs {n} .* got {n - 1}; use --{part.replace('_', '-')} >= {n}"):
                check_batches(method)


def test_does_not_look_at_what_it_says_it_does_not_need(name: str, tiny: MethodTask, whole: Any) -> None:
    """Without `needs_noise_rate` a method gives the same numbers whatever the oracle says; nobody looks at val."""
    task, truth = tiny
    blind = replace(task, val=None, noise_rate=task.noise_rate if METHODS[name].needs_noise_rate else None)
    _, blind_records = trained(name, (blind, truth))
    records = untimed(whole(name, "tiny", RECIPE).records)
    without_val = [{k: v for k, v in r.items() if not k.startswith("val_")} for r in records]
    assert without_val == untimed(blind_records)
