"""Several ranks give the same run as one process, and handle the failure of one of them.

Most tests fork the ranks. One starts them with `warpi fit --devices 2`, as a user would.
"""

import contextlib
import json
import math
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from forked import PROC, Forked
from hypothesis import given, settings, strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.func import functional_call, jvp

from warpi import METHODS, Recipe, UserError, fit, make_task, train
from warpi.cli.app import main
from warpi.data.augment import Crop
from warpi.data.batch import Batch
from warpi.data.dataset import Dataset
from warpi.data.examples import Scale, TensorExamples
from warpi.data.image_files import FileExamples
from warpi.data.loader import Loader
from warpi.data.split import Split
from warpi.functional.gaussian import DiagGaussian
from warpi.methods.plain import CE
from warpi.nets.mlp import MLP
from warpi.nets.sync_batchnorm import SharedBatchNorm, synchronize_batchnorm
from warpi.runs.defaults import scale_to_ranks
from warpi.training import checkpoint
from warpi.training.method import Log, Method
from warpi.training.outputs import share_rows
from warpi.utils import distributed

FIT = ["fit", "--data", "digits", "--noise", "pair:0.4", "--method", "warpi", "--limit", "150", "--device", "cpu"]
FIT += ["--meta", "20", "--batch-size", "8", "--meta-batch-size", "8", "--epochs", "3", "--sync-batchnorm", "--quiet"]
SETTINGS: dict[str, Any] = {"noise": "pair:0.4", "limit": 300, "epochs": 1, "meta": 20, "meta_batch_size": 20}
SETTINGS |= {"device": "cpu", "batch_size": 32}

# --- tasks, networks and methods of a rank -----------------------------------------------------------------------


class Plain(nn.Module):
    """A network without BatchNorm."""

    def __init__(self, shape: tuple[int, ...], n_classes: int) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(shape[0], 4, 3), nn.Tanh(), nn.Flatten())
        self.fc = nn.Linear(4 * (shape[1] - 2) ** 2, n_classes)

    def forward(self, x: Tensor) -> Tensor:
        z: Tensor = self.fc(self.body(x))
        return z


class InTwoParts(nn.Module):
    """A network with penultimate features, which some methods need."""

    def __init__(self, shape: tuple[int, ...], n_classes: int) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(math.prod(shape), 8), nn.Tanh())
        self.fc = nn.Linear(8, n_classes)

    def features(self, x: Tensor) -> Tensor:
        h: Tensor = self.body(x)
        return h

    def forward(self, x: Tensor) -> Tensor:
        z: Tensor = self.fc(self.features(x))
        return z


class Normed(Plain):
    """A network with BatchNorm over images and over features."""

    norms: ClassVar[tuple[type[nn.Module], type[nn.Module]]] = (nn.BatchNorm2d, nn.BatchNorm1d)

    def __init__(self, shape: tuple[int, ...], n_classes: int) -> None:
        super().__init__(shape, n_classes)
        self.body.insert(1, self.norms[0](4))
        self.body.append(self.norms[1](self.fc.in_features))


class Sharded(nn.BatchNorm1d):
    """Emulates two ranks with separate statistics in one process: normalizes each half of the batch separately."""

    def _check_input_dim(self, input: Tensor) -> None: ...

    def forward(self, input: Tensor) -> Tensor:
        if not self.training:
            return super().forward(input)
        halves = input.chunk(2)
        for stored, now in ((self.running_mean, torch.mean), (self.running_var, torch.var)):
            assert stored is not None
            means = [now(half.detach().transpose(0, 1).flatten(1), dim=1) for half in halves]
            stored.lerp_(torch.stack(means).mean(0), 0.1)
        assert self.num_batches_tracked is not None
        self.num_batches_tracked.add_(1)
        return torch.cat([F.batch_norm(h, None, None, self.weight, self.bias, True, 0, self.eps) for h in halves])


class NormedInHalves(Normed):
    norms = (Sharded, Sharded)


def images(n: int = 72) -> Dataset:
    """Three classes of noise images, of the default type."""
    rng = torch.Generator().manual_seed(5)
    kind = torch.get_default_dtype()
    x = torch.randint(256, (n, 3, 6, 6), generator=rng).to(kind)
    y = torch.arange(n) % 3
    x[torch.arange(n), y] /= 2
    scale = Scale(torch.tensor(127.0).to(kind), torch.tensor(64.0).to(kind))
    return Dataset("images", TensorExamples(x, scale, Crop(6, pad=2)), y, ("red", "green", "blue"), clean=y)


def trained(method: str | Method, net: type[nn.Module], epochs: int = 2, **recipe: Any) -> dict[str, Tensor]:
    """The final state: weights of all networks, running statistics, memories of examples, logs, scores."""
    task, truth = make_task(images(), "pair:0.3", meta=24, seed=3)
    learner = replace(METHODS[method] if isinstance(method, str) else method)
    learner.start(task, Recipe(net=net, epochs=epochs, batch_size=12, meta_batch_size=12, lr=0.05, **recipe))
    records = [record for record in train(learner, task, truth) if record]
    state = {f"net{i}.{k}": v for i, each in enumerate(learner.nets) for k, v in each.state_dict().items()}
    memories = {k: v for k, v in vars(learner).items() if isinstance(v, Tensor) and len(task.train) in v.shape[:2]}
    state |= {f"memory.{k}": v for k, v in memories.items()}
    if hasattr(learner, "V"):
        state |= {f"V.{k}": v for k, v in learner.V.state_dict().items()}
    for record in records:
        record.pop("seconds")
        state |= {f"{int(record['epoch'])}.{k}": torch.tensor(v) for k, v in record.items()}
    return {k: v.clone() for k, v in state.items()}


# (method, network of the ranks, network of the single process, changes of the recipe)
CASES: dict[str, tuple[str, type[nn.Module], type[nn.Module], dict[str, Any]]] = {
    "ce": ("ce", Plain, Plain, {}),
    "mwnet": ("mwnet", Plain, Plain, {}),
    "l2rw": ("l2rw", Plain, Plain, {}),
    "gdw": ("gdw", Plain, Plain, {}),
    "mlc_wang": ("mlc_wang", Plain, Plain, {}),
    "co_teaching": ("co_teaching", Plain, Plain, {"epochs": 4}),
    "dividemix": ("dividemix", Plain, Plain, {"epochs": 4}),
    "elr": ("elr", Plain, Plain, {"epochs": 3}),
    "elr_plus": ("elr_plus", Plain, Plain, {"epochs": 3}),
    "mixup": ("mixup", Plain, Plain, {}),
    "pencil": ("pencil", Plain, Plain, {"epochs": 4}),
    "selfie": ("selfie", Plain, Plain, {"epochs": 6}),
    "sop": ("sop", Plain, Plain, {"epochs": 3}),
    "warpi": ("warpi", Plain, Plain, {}),
    "warpi, real step first": ("warpi", Plain, Plain, {"meta_order": "real", "meta_every": 2}),
    "warpi, compiled": ("warpi", Normed, NormedInHalves, {"compile": True}),
    "warpi, compiled, synchronized": ("warpi", Normed, Normed, {"compile": True, "sync_batchnorm": True}),
    "ce, BatchNorm": ("ce", Normed, NormedInHalves, {}),
    "warpi, BatchNorm": ("warpi", Normed, NormedInHalves, {}),
    "ce, synchronized": ("ce", Normed, Normed, {"sync_batchnorm": True}),
    "mwnet, synchronized": ("mwnet", Normed, Normed, {"sync_batchnorm": True}),
    "warpi, synchronized": ("warpi", Normed, Normed, {"sync_batchnorm": True}),
}

# Settings for which a short training takes all kinds of steps, also those with trusted examples.
MORE: dict[str, Method] = {
    "cal, more": replace(METHODS["cal"], sieve=-1.0),
    "dividemix, more": replace(METHODS["dividemix"], use_trusted=True, warm_up=1.0),
    "disc, more": replace(METHODS["disc"], use_trusted=True, warmup=0.3),
    "promix, more": replace(METHODS["promix"], use_trusted=True, tau=0.3, guessing=0.3, warm_up=1.0),
    "sop_plus, more": replace(METHODS["sop_plus"], use_trusted=True),
    "warpi_plus, more": replace(METHODS["warpi_plus"], rectifier=True, warm_up=1.0),
}
OTHERS = [name for name in METHODS if name not in ("auto", "wann")]  # these do not train in steps of batches


@contextlib.contextmanager
def doubles() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


def do_train(out: str, names: list[str]) -> None:
    with distributed.process_group(torch.device("cpu")), doubles():
        for name in names:
            method, net, _, recipe = CASES[name]
            save_file(trained(method, net, **recipe), f"{out}/{name}.{distributed.rank()}")


def do_train_four_epochs(out: str, names: list[str]) -> None:
    with distributed.process_group(torch.device("cpu")):
        for name in names:
            save_file(trained(MORE.get(name, name), InTwoParts, epochs=4), f"{out}/{name}.{distributed.rank()}")


def do_normalize() -> None:
    """Compare the synchronized layer with BatchNorm on the whole batch."""
    with distributed.process_group(torch.device("cpu")), doubles():
        torch.manual_seed(0)
        share = slice(4 * distributed.rank(), 4 * distributed.rank() + 4)
        cases: list[tuple[type[nn.Module], tuple[int, ...]]]
        cases = [(nn.BatchNorm1d, (8, 5)), (nn.BatchNorm1d, (8, 5, 6)), (nn.BatchNorm2d, (8, 5, 3, 4))]
        options: list[dict[str, Any]]
        options = [{}, {"momentum": None}, {"affine": False}, {"track_running_stats": False}]
        for (kind, shape), option in [(case, option) for case in cases for option in options]:
            whole = nn.Sequential(kind(5, **option))
            for p in whole.parameters():
                nn.init.normal_(p)
            part = synchronize_batchnorm(nn.Sequential(kind(5, **option)))
            part.load_state_dict(whole.state_dict())
            assert isinstance(part[0], SharedBatchNorm)
            x, w, t = (torch.randn(shape) for _ in range(3))
            directions = {name: torch.randn_like(p) for name, p in whole.named_parameters()}
            whole(x), part(x[share])  # running statistics of more than one batch
            a, b = x.clone().requires_grad_(), x[share].clone().requires_grad_()
            y, z = whole(a), part(b)
            torch.testing.assert_close(z, y[share])
            (y * w).sum().backward(), (z * w[share]).sum().backward()
            assert a.grad is not None
            assert b.grad is not None
            torch.testing.assert_close(b.grad, a.grad[share])
            for p, q in zip(part.parameters(), whole.parameters(), strict=True):
                assert p.grad is not None
                distributed.average([p.grad])
                torch.testing.assert_close(2 * p.grad, q.grad)
            for p, q in zip(part.buffers(), whole.buffers(), strict=True):
                torch.testing.assert_close(p, q)

            def call(net: nn.Module) -> Callable[[dict[str, Tensor], Tensor], Any]:
                buffers = {name: buffer.clone() for name, buffer in net.named_buffers()}
                return lambda p, x: functional_call(net, (p, {k: v.clone() for k, v in buffers.items()}), (x,))

            parameters = {name: p.detach() for name, p in whole.named_parameters()}
            _, expected = jvp(call(whole), (parameters, x), (directions, t))
            _, product = jvp(call(part), (parameters, x[share]), (directions, t[share]))
            torch.testing.assert_close(product, expected[share])
            if option != {"track_running_stats": False}:
                torch.testing.assert_close(part.eval()(x), whole.eval()(x))
        half = synchronize_batchnorm(nn.BatchNorm1d(3)).float()
        assert half(torch.randn(4, 3, dtype=torch.bfloat16)).dtype == torch.bfloat16


def write_files(folder: Path) -> None:
    """Write 40 image files, every third of which is damaged. Only one process may do so: the ranks read them."""
    from PIL import Image

    for i in range(40):
        if i % 3:
            Image.new("RGB", (8, 8), (i, 0, 0)).save(folder / f"{i}.png")
        else:
            (folder / f"{i}.png").write_bytes(b"no image")


def files(folder: Path) -> Split:
    """The files of `write_files`."""
    paths = tuple(f"{i}.png" for i in range(40))
    return Split(FileExamples(str(folder), paths, size=6, workers=0, max_bad=1.0), torch.arange(40), torch.arange(40))


def do_read(folder: str) -> None:
    with distributed.process_group(torch.device("cpu")):
        loader = Loader(files(Path(folder)), 8, 7)
        seen = [batch.rows.tolist() for t in range(3) for batch in loader.epoch(t)]
    Path(folder, f"seen{os.environ['RANK']}").write_text(json.dumps(seen))


def do_predict(out: str) -> None:
    """Twice the input of each of 8 examples, and of 2 examples, which are too few to share."""
    with distributed.process_group(torch.device("cpu")):
        computed: list[int] = []

        def twice(x: Tensor) -> Tensor:
            computed.append(len(x))
            return 2 * x[:, 0]

        unit = Scale(torch.tensor(0.0), torch.tensor(1.0))
        split = Split(TensorExamples(torch.arange(8.0)[:, None], unit), torch.arange(8), torch.zeros(8).long())
        rows, values = share_rows(twice, split)
        n = sum(computed)
        few = [t.tolist() for t in share_rows(twice, split.subset(torch.arange(2)))]
        found = [n, rows.tolist(), values.tolist(), few]
        Path(out, str(distributed.rank())).write_text(json.dumps(found))


def do_fit(out: str, **options: Any) -> None:
    fit(out, **{"net": MLP, **SETTINGS, **options})


def do_fit_with_other_seeds(out: str) -> None:
    do_fit(out, method="ce", seed=int(os.environ["RANK"]))


def do_fit_in_existing_group(out: str) -> None:
    dist.init_process_group("gloo")
    do_fit(out, method="ce")
    assert dist.is_initialized()
    assert distributed.n_ranks() == 2
    dist.destroy_process_group()


@dataclass
class Faulty(CE):
    """Rank 1 fails in its third step."""

    how: str = "nan"

    def step(self, batch: Batch) -> Log:
        if distributed.rank() == 1 and self.loader.count == 3:
            if self.how == "error":
                raise UserError("a file has gone")
            return {**super().step(batch), "loss": float("nan")}
        return super().step(batch)


def do_fit_and_fail(out: str, how: str) -> None:
    try:
        do_fit(out, method=Faulty(how=how))
    except distributed.RankLostError as e:
        distributed.give_up(e)
    except distributed.RemoteRankError as e:
        os.write(1, f"elsewhere: {e}\n".encode())  # unbuffered, because ranks share their log
        raise SystemExit(2) from e
    except UserError as e:
        os.write(1, f"this rank: {e}\n".encode())
        raise SystemExit(2) from e


RANK = """#!/bin/sh
exec 2> /dev/null
case "$*" in *--resume*) echo "$@" > "$0.resumed$RANK"; exit 0;; esac
trap 'sleep 0.2; touch "$0.stored$RANK"; exit CODE' TERM
echo "$@" > "$0.arguments$RANK"
echo $$ > "$0.part$RANK" && mv "$0.part$RANK" "$0.pid$RANK"
while :; do sleep 0.02; done
"""


def do_launch(rank: str, restarts: int = 0) -> None:
    """Run the launcher with a script in place of python."""
    sys.executable = rank
    raise SystemExit(distributed.launch(2, ["fit"], Path("run"), restarts))


# --- ranks ------------------------------------------------------------------------------------------------------------


class Ranks:
    """Running ranks, forked from this process with the environment that torchrun would set.

    They do what a function of this file does, a command (a list), or one command per rank.
    """

    def __init__(self, log: Path, ranks: int, do: str | list[str] | list[list[str]], **options: Any) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        n = str(ranks)
        group = {"WORLD_SIZE": n, "LOCAL_WORLD_SIZE": n, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        self._log = log
        self._processes = [
            Forked(
                partial(work, do, options, r), log, {**group, "RANK": str(r), "LOCAL_RANK": str(r)} if ranks > 1 else {}
            )
            for r in range(ranks)
        ]
        self.pids = [process.pid for process in self._processes]

    def codes(self, seconds: float = 60.0) -> list[int]:
        """Exit codes of the ranks. If they hang, they are killed and the test fails."""
        try:
            return [process.wait(seconds) for process in self._processes]
        finally:
            for process in self._processes:
                process.send(signal.SIGKILL)

    def log(self) -> str:
        return self._log.read_text() if self._log.exists() else ""


def work(do: str | list[str] | list[list[str]], options: dict[str, Any], rank: int) -> int | None:
    if isinstance(do, str):
        done: int | None = globals()[do](**options)
        return done
    command = do[rank] if isinstance(do[0], list) else do
    return main([str(word) for word in command])


class Server:
    """Starts ranks, one group at a time."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.number = 0

    def start(self, ranks: int, do: str | list[str] | list[list[str]], **options: Any) -> Ranks:
        self.number += 1
        return Ranks(self.folder / f"log{self.number}", ranks, do, **options)

    def run(self, ranks: int, do: str | list[str] | list[list[str]], seconds: float = 60.0, **options: Any) -> Ranks:
        """Start the ranks and wait for their successful end."""
        running = self.start(ranks, do, **options)
        assert running.codes(seconds) == [0] * ranks, running.log()
        return running


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Server:
    """Triggers late imports here, so that no rank repeats them."""
    folder = tmp_path_factory.mktemp("server")
    with doubles():
        trained("warpi", Normed)
    assert main([*FIT, "--threads", "1", "--epochs", "1", "--out", str(folder / "run")]) == 0
    import_module("torch.distributed.launcher.api")
    return Server(folder)


# --- one update -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def by_two(server: Server, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("trained")
    server.run(2, "do_train", out=str(out), names=list(CASES))
    return out


def assert_same(got: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert got.keys() == wanted.keys()
    assert len(got) > 10
    for name, value in wanted.items():
        tolerance = 1e-7 if name[0].isdigit() else 1e-9  # some methods log float32
        torch.testing.assert_close(
            got[name], value, rtol=tolerance, atol=tolerance / 10, msg=lambda text: f"{name}: {text}"
        )


@pytest.mark.parametrize("case", CASES)
def test_two_ranks_equal_one_process(case: str, by_two: Path) -> None:
    """After some epochs, in float64. With BatchNorm the single process normalizes the halves of a batch separately."""
    method, _, net, recipe = CASES[case]
    with doubles():
        wanted = trained(method, net, **recipe)
    got, other = (load_file(by_two / f"{case}.{r}") for r in (0, 1))
    assert_same(got, wanted)
    assert all(torch.equal(got[name], other[name]) for name in got), "all ranks have the same weights, logs and scores"


def test_the_references_differ(by_two: Path) -> None:
    """Statistics of halves and of the whole batch lead to different weights."""
    a, b = (load_file(by_two / f"warpi, {kind}.0") for kind in ("BatchNorm", "synchronized"))
    assert (a["net0.fc.weight"] - b["net0.fc.weight"]).abs().max() > 1e-4


def test_three_ranks(server: Server, tmp_path: Path) -> None:
    names = ["warpi", "warpi, synchronized"]
    server.run(3, "do_train", out=str(tmp_path), names=names)
    for name in names:
        method, _, net, recipe = CASES[name]
        with doubles():
            assert_same(load_file(tmp_path / f"{name}.2"), trained(method, net, **recipe))


def test_four_ranks(server: Server, tmp_path: Path) -> None:
    names = ["warpi", "mwnet", "elr", "co_teaching", "dividemix"]
    server.run(4, "do_train", out=str(tmp_path), names=names)
    for name in names:
        method, net, _, recipe = CASES[name]
        with doubles():
            assert_same(load_file(tmp_path / f"{name}.3"), trained(method, net, **recipe))


@pytest.mark.timeout(600)
@pytest.mark.parametrize("names", [["warpi_plus", *MORE], pytest.param(OTHERS, marks=pytest.mark.slow)])
def test_every_method_with_two_ranks(names: list[str], server: Server, tmp_path: Path) -> None:
    """In float32."""
    server.run(2, "do_train_four_epochs", seconds=10.0 * len(names), out=str(tmp_path), names=names)
    differences = {}
    for name in names:
        got, other = (load_file(tmp_path / f"{name}.{r}") for r in (0, 1))
        assert all(torch.equal(got[key].nan_to_num(), other[key].nan_to_num()) for key in got), name
        wanted = trained(MORE.get(name, name), InTwoParts, epochs=4)
        weights = [key for key in wanted if key.startswith("net")]
        differences[name] = max(float((got[key] - wanted[key]).abs().max()) for key in weights)
    print({name: f"{d:.1e}" for name, d in differences.items()})
    assert {name: d for name, d in differences.items() if d > 1e-6} == {}


def test_memories_of_examples_are_the_same_on_all_ranks(by_two: Path) -> None:
    """Each rank sees other examples in each epoch, so it needs what the others have stored about them."""
    for name, memory in {"elr": "memory", "elr_plus": "memories", "pencil": "y_tilde", "selfie": "predictions"}.items():
        a, b = (load_file(by_two / f"{name}.{r}")[f"memory.{memory}"] for r in (0, 1))
        assert torch.equal(a, b), name
        assert len(a.unique()) > 2, name


def test_memories_of_examples_need_the_stated_bytes() -> None:
    """The table in docs/parallel.md."""
    page = (Path(__file__).parents[2] / "docs" / "parallel.md").read_text()
    rows = re.findall(
        r"^\| (`.+`) \| (?:(\d+) K)?(?: \+ )?(\d+)? \| ([\d.]+) GB \| ([\d.]+) GB \|$", page, re.MULTILINE
    )
    stated = {name: row for row in rows for name in re.findall(r"`(\w+)`", row[0])}
    assert len(stated) > 10
    task, _ = make_task(images(), "pair:0.3", meta=24, seed=3)
    recipe = Recipe(net=InTwoParts, epochs=4, batch_size=12, meta_batch_size=12)
    for name in OTHERS:
        method = replace(METHODS[name])
        method.start(task, recipe)
        tensors = [v for v in vars(method).values() if isinstance(v, Tensor) and len(task.train) in v.shape[:2]]
        needed = sum(tensor.nbytes for tensor in tensors) / len(task.train)
        if name in stated:
            per_class, rest = (int(number or 0) for number in stated[name][1:3])
            assert needed == 3 * per_class + rest, name
            for k, gigabytes in zip((10, 1000), stated[name][3:], strict=True):
                assert float(gigabytes) == pytest.approx((k * per_class + rest) / 1000, abs=0.05), name
        else:
            assert needed <= 8, name


def test_predictions_are_shared_by_the_ranks(server: Server, tmp_path: Path) -> None:
    server.run(3, "do_predict", out=str(tmp_path))
    shares = [json.loads((tmp_path / f"{r}").read_text()) for r in range(3)]
    assert shares == [
        [[3, 3, 2][r], list(range(8)), [2.0 * i for i in range(8)], [[0, 1], [0.0, 2.0]]] for r in range(3)
    ]


def test_synchronized_batchnorm_equals_batchnorm_of_the_whole_batch(server: Server) -> None:
    server.run(2, "do_normalize")


def test_only_plain_batchnorm_can_be_synchronized() -> None:
    net = synchronize_batchnorm(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)))
    assert [name for name, _ in net.named_parameters()] == ["0.weight", "0.bias", "1.weight", "1.bias"]
    assert synchronize_batchnorm(net)[1] is net[1], "a second call changes nothing"
    with pytest.raises(UserError, match="Sharded cannot be synchronized"):
        synchronize_batchnorm(nn.Sequential(Sharded(2)))


# --- shares of a batch ------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def as_rank(r: int, ranks: int) -> Iterator[None]:
    """Context manager: this process pretends to be rank r, without communication."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(distributed, "n_ranks", lambda: ranks)
        patch.setattr(distributed, "rank", lambda: r)
        patch.setattr(distributed, "min_over_ranks", lambda n: n)
        yield


def shared(split: Split, size: int, ranks: int, first: int, n: int, views: int) -> list[list[Batch]]:
    """n batches from number `first` on, for each rank."""
    seen = []
    for r in range(ranks):
        with as_rank(r, ranks):
            loader = Loader(split, size, 7, views=views)
            loader.load_state_dict({"count": first})
            seen.append([loader.draw() for _ in range(n)])
    return seen


def assert_cut(split: Split, size: int, ranks: int, first: int, n: int, views: int) -> None:
    ((*whole,),) = shared(split, size, 1, first, n, views)
    parts = shared(split, size, ranks, first, n, views)
    for k, batch in enumerate(whole):
        shares = [part[k] for part in parts]
        assert {len(b.y) for b in shares} == {len(batch.y) // ranks}
        assert torch.equal(torch.cat([b.rows for b in shares]), batch.rows)
        assert torch.equal(torch.cat([b.y for b in shares]), batch.y)
        for v in range(views):
            assert torch.equal(torch.cat([b.views[v] for b in shares]), batch.views[v])
        assert len(set(torch.cat([b.rows for b in shares]).tolist())) == len(batch.y), "disjoint"


@settings(max_examples=10, deadline=None)
@given(
    ranks=st.integers(2, 5),
    part=st.integers(1, 4),
    first=st.integers(0, 40),
    views=st.integers(1, 2),
    crop=st.booleans(),
)
def test_shares_make_up_the_batch_of_one_process(ranks: int, part: int, first: int, views: int, crop: bool) -> None:
    examples = images(45).examples
    assert isinstance(examples, TensorExamples)
    examples = examples if crop else replace(examples, crop=None)
    rows = torch.arange(3, 43)
    assert_cut(Split(examples, rows, rows * 10), ranks * part, ranks, first, 5, views)


def test_shares_of_image_files(tmp_path: Path) -> None:
    from PIL import Image

    rng = np.random.default_rng(0)
    paths = [f"{i}.png" for i in range(44)]
    for path in paths:
        Image.fromarray(rng.integers(0, 256, (9, 11, 3), dtype=np.uint8)).save(tmp_path / path)
    rows = torch.arange(44)
    split = Split(FileExamples(str(tmp_path), tuple(paths), size=6, workers=0), rows, rows % 3)
    assert_cut(split, 40, 2, 0, 2, 2)  # a share exceeds the 16 images of a request


def test_a_batch_that_one_rank_cannot_read_is_skipped_by_all(server: Server, tmp_path: Path) -> None:
    """Otherwise the ranks would wait for each other in different steps."""
    write_files(tmp_path)
    with as_rank(0, 1):
        loader = Loader(files(tmp_path), 8, 7)
    wanted: list[list[list[int]]] = [[], []]
    for k in range(15):
        readable = [[i for i in half if i % 3] for half in loader.index(k).view(2, 4).tolist()]
        n = min(map(len, readable))
        if n >= 2:  # the ranks use equally many
            wanted[0].append(readable[0][:n]), wanted[1].append(readable[1][:n])
    assert 0 < len(wanted[0]) < 15
    server.run(2, "do_read", folder=str(tmp_path))
    assert [json.loads((tmp_path / f"seen{r}").read_text()) for r in (0, 1)] == wanted


@settings(max_examples=10, deadline=None)
@given(ranks=st.integers(2, 5), b=st.integers(1, 6), n=st.integers(1, 4))
def test_samples_equal_those_of_one_process(ranks: int, b: int, n: int) -> None:
    rng = torch.Generator().manual_seed(1)
    mean, log_var = torch.randn(2, ranks * b, 3, generator=rng).double()
    whole = DiagGaussian(mean, log_var).rsample(n, torch.Generator().manual_seed(2))
    parts = []
    for r in range(ranks):
        with as_rank(r, ranks):
            share = slice(r * b, (r + 1) * b)
            parts.append(DiagGaussian(mean[share], log_var[share]).rsample(n, torch.Generator().manual_seed(2)))
    assert torch.equal(torch.cat(parts, 1), whole)


# --- runs -------------------------------------------------------------------------------------------------------------


class Run:
    """A run folder."""

    def __init__(self, out: Path) -> None:
        self.out = out
        self.file = out / "checkpoint.safetensors"

    def records(self) -> list[dict[str, float]]:
        return [json.loads(line) for line in (self.out / "results.jsonl").read_text().splitlines()]

    def weights(self) -> list[Tensor]:
        return list(checkpoint.load(self.file)["method"]["nets"][0].values())

    def position(self) -> tuple[int, int]:
        at = checkpoint.load(self.file)["position"]
        return at["epoch"], at["step"]

    def assert_like(self, other: "Run") -> None:
        """Assert that both runs are the same up to float32 rounding."""
        assert (self.out / "done").exists()
        records = self.records()
        expected = other.records()
        assert len(records) == len(expected) >= 3
        for a, b in zip(records, expected, strict=True):
            assert a["epoch"] == b["epoch"]
            assert a["loss"] == pytest.approx(b["loss"], rel=2e-3)
            assert a.get("meta_loss", 0) == pytest.approx(b.get("meta_loss", 0), rel=2e-2)
            assert a["test_acc"] == pytest.approx(b["test_acc"], abs=2.1)
        for p, q in zip(self.weights(), other.weights(), strict=True):
            torch.testing.assert_close(p, q, rtol=1e-2, atol=5e-3)
        assert not list(self.out.glob(".*.part"))


def wait_until(true: Callable[[], Any], ranks: Callable[[], str], seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, ranks()
        time.sleep(0.005)


@pytest.fixture(scope="module")
def alone(server: Server, tmp_path_factory: pytest.TempPathFactory) -> Run:
    run = Run(tmp_path_factory.mktemp("alone") / "run")
    server.run(1, [*FIT, "--threads", "1", "--out", str(run.out)])
    assert len(run.records()) == 3
    return run


@pytest.fixture(scope="module")
def undisturbed(server: Server, tmp_path_factory: pytest.TempPathFactory) -> Run:
    run = Run(tmp_path_factory.mktemp("two") / "run")
    server.run(2, [*FIT, "--threads", "1", "--out", str(run.out)])
    return run


def test_a_run_of_two_ranks(alone: Run, undisturbed: Run) -> None:
    undisturbed.assert_like(alone)
    names = {
        "spec.json",
        "results.jsonl",
        "checkpoint.safetensors",
        "checkpoint.safetensors.previous",
        "done",
        ".lease-1",
    }
    assert {p.name for p in undisturbed.out.iterdir()} == names
    specs = [json.loads((run.out / "spec.json").read_text()) for run in (alone, undisturbed)]
    assert [spec["environment"].pop("ranks") for spec in specs] == [1, 2]
    assert specs[0] == specs[1]


@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2), (2, 2)])
def test_a_run_resumes_with_other_ranks(
    server: Server, alone: Run, undisturbed: Run, tmp_path: Path, before: int, after: int
) -> None:
    """SIGTERM within an epoch, to one rank or (as a launcher does) to all: all ranks store their state and stop."""
    run = Run(tmp_path / "run")
    argv = [*FIT, "--threads", "1", "--out", str(run.out), "--resume"]
    ranks = server.start(before, [*argv, "--checkpoint-seconds", "0"])
    wait_until(run.file.exists, ranks.log)
    for pid in ranks.pids if before == after else ranks.pids[-1:]:
        os.kill(pid, signal.SIGTERM)
    assert ranks.codes() == [143] * before
    command = ["warpi", "fit", "--out", str(run.out), "--resume"] + ["--devices", "2", "--device", "cpu"] * (
        before == 2
    )
    assert ranks.log() == f"warpi: stopped by SIGTERM; resume with: {shlex.join(command)}\n", "one rank reports it"
    epoch, step = run.position()
    assert epoch < 3
    assert step > 0
    server.run(after, [*FIT, "--out", str(run.out), "--resume"])
    run.assert_like(alone)
    if before == after:
        assert all(torch.equal(p, q) for p, q in zip(run.weights(), undisturbed.weights(), strict=True)), (
            "bitwise equal"
        )


def test_a_rank_without_access_to_the_folder(server: Server, undisturbed: Run, tmp_path: Path) -> None:
    """On another machine the path may not exist; rank 0 sends the contents."""
    run = Run(tmp_path / "run")
    elsewhere = tmp_path / "missing" / "folder"
    commands = [[*FIT, "--out", str(out), "--checkpoint-seconds", "0"] for out in (run.out, elsewhere)]
    ranks = server.start(2, commands)
    wait_until(run.file.exists, ranks.log)
    os.kill(ranks.pids[0], signal.SIGINT)
    assert ranks.codes() == [130, 130], ranks.log()
    short = [["fit", "--device", "cpu", "--quiet", "--resume", "--out", str(out)] for out in (run.out, elsewhere)]
    server.run(2, short)
    run.assert_like(undisturbed)
    assert not elsewhere.parent.exists()


def test_the_others_notice_a_lost_rank(server: Server, alone: Run, tmp_path: Path) -> None:
    """SIGKILL to rank 0, which holds the store that connects the ranks."""
    run = Run(tmp_path / "run")
    ranks = server.start(2, [*FIT, "--out", str(run.out), "--checkpoint-seconds", "0"])
    wait_until(run.file.exists, ranks.log)
    os.kill(ranks.pids[0], signal.SIGKILL)
    assert ranks.codes(10.0) == [-signal.SIGKILL, distributed.EXIT_RANK_LOST], ranks.log()
    (line,) = ranks.log().splitlines()
    assert line.startswith("warpi: rank 1 of 2 lost another process of this run (")
    assert line.endswith(f"; resume with: warpi fit --out {run.out} --resume --devices 2 --device cpu")
    assert checkpoint.exists(run.file)
    server.run(1, [*FIT, "--out", str(run.out), "--resume"])
    run.assert_like(alone)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["warpi", "mwnet", "elr", "co_teaching", "dividemix", "warpi_plus", "promix"])
def test_fit_with_two_and_four_ranks(server: Server, tmp_path: Path, method: str) -> None:
    """The command, in float32, with BatchNorm over all ranks, and a warm-up that ends before the last epoch."""
    runs = []
    for ranks in (1, 2, 4):
        run = Run(tmp_path / str(ranks))
        more = ["--method", method, "--epochs", "4", "--threads", "1", "--lr", "0.01"]
        server.run(ranks, [*FIT, *more, "--out", str(run.out)])
        runs.append(run)
    losses, weights = [0.0], [0.0]
    for run in runs[1:]:
        for a, b in zip(run.records(), runs[0].records(), strict=True):
            losses.append(abs(a["loss"] / b["loss"] - 1))
            for name in a.keys() - {"seconds"}:
                assert a[name] == pytest.approx(b[name], rel=1e-5, abs=1e-5), name
        for p, q in zip(run.weights(), runs[0].weights(), strict=True):
            weights.append(float((p - q).abs().max()))
            torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-5)
    print(f"{method}: losses differ by up to {max(losses):.1e}, weights by up to {max(weights):.1e}")


def test_batch_sizes_and_rates_per_rank(server: Server, tmp_path: Path) -> None:
    """They are stored as those of all ranks, so that the run can be resumed with any number of ranks."""
    whole, part = Run(tmp_path / "whole"), Run(tmp_path / "part")
    flags = [*FIT, "--epochs", "2", "--threads", "1", "--out"]
    server.run(2, [*flags, str(whole.out), "--batch-size", "16", "--meta-batch-size", "16", "--lr", "0.1"])
    per_rank = [*flags, str(part.out), "--lr", "0.05", "--batch-per-rank"]
    server.run(2, per_rank)
    assert all(torch.equal(p, q) for p, q in zip(part.weights(), whole.weights(), strict=True))
    server.run(2, [*per_rank, "--resume"])
    (tmp_path / "part" / "done").unlink()
    server.run(1, [*FIT[:0], "fit", "--device", "cpu", "--resume", "--quiet", "--out", str(part.out)])
    assert scale_to_ranks({"optimizer": "adam"}, {"lr": 0.1}) == {"lr": 0.1}
    with as_rank(0, 4):
        assert scale_to_ranks({"optimizer": "adam"}, {"lr": 0.1, "net": "mlp"}) == {"lr": 0.2}


def test_nodes_prints_the_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "a run"
    argv = ["fit", "--devices=8", "--data", "digits", "--nodes", "4", "--out", str(out), "--method", "ce"]
    assert main(argv) == 0
    words = shlex.split(capsys.readouterr().out)
    common = ["fit", "--data", "digits", "--out", str(out), "--method", "ce", "--resume"]
    torchrun = words[words.index("torchrun") : words.index("or")]
    assert "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1" in words
    assert torchrun[1:7] == ["--nnodes", "4", "--nproc-per-node", "8", "--max-restarts", "3"]
    assert torchrun[-len(common) - 2 :] == ["-m", "warpi", *common]
    srun = words[words.index("srun") :]
    assert srun == ["srun", "--nodes", "4", "--ntasks-per-node", "8", "--kill-on-bad-exit=1", "warpi", *common]
    assert not out.exists()
    for flag in ("--nodes", "--restarts"):
        assert main([*argv, flag, "-1"]) == 2
        assert f"{flag} must be at least" in capsys.readouterr().err


def test_the_environment_of_srun(monkeypatch: pytest.MonkeyPatch) -> None:
    given = {"SLURM_STEP_NUM_TASKS": "7", "SLURM_STEP_TASKS_PER_NODE": "2(x3),1", "SLURM_STEP_NODELIST": "n[08-10],m"}
    given |= {
        "SLURM_JOB_ID": "70",
        "SLURM_STEP_ID": "1",
        "SLURM_PROCID": "6",
        "SLURM_LOCALID": "0",
        "SLURM_NODEID": "3",
    }
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    with monkeypatch.context() as patch:
        for name in names:
            patch.setenv(name, "")  # so that it is restored
            patch.delenv(name)
        for name, value in given.items():
            patch.setenv(name, value)
        assert distributed.use_srun()
        assert [os.environ[name] for name in names] == ["6", "7", "0", "1", "n08", "18791"]
        assert distributed.is_launched()
        assert not distributed.use_srun(), "torchrun within srun comes first"
        patch.setenv("SLURM_STEP_NUM_TASKS", "1")
        patch.delenv("RANK")
        assert not distributed.use_srun()
    hosts = {"a": "a", "a,b": "a", "a[3,5]": "a3", "gpu-[007-012,3].cluster,x": "gpu-007.cluster", "a1b[2]": "a1b2"}
    assert {nodes: distributed.first_host(nodes) for nodes in hosts} == hosts


@pytest.mark.slow
def test_devices_starts_ranks(server: Server, alone: Run, tmp_path: Path) -> None:
    """`warpi fit --devices 2` starts fresh processes, which train like one process.

    Forked ranks and launched scripts cover the same in less time.
    """
    run = Run(tmp_path / "run")
    launcher = server.run(1, [*FIT, "--devices", "2", "--out", str(run.out)])
    assert launcher.log() == ""
    run.assert_like(alone)


def start_scripts(server: Server, folder: Path, code: int, restarts: int = 0) -> tuple[Ranks, list[int]]:
    """The launcher with scripts as ranks, which end with a code after SIGTERM, and the process ids of the ranks.

    Scripts that are told to resume end at once, successfully.
    """
    script = folder / "rank"
    script.write_text(RANK.replace("CODE", str(code)))
    script.chmod(0o755)
    launcher = server.start(1, "do_launch", rank=str(script), restarts=restarts)
    wait_until(lambda: len(list(folder.glob("rank.pid?"))) == 2, launcher.log)
    return launcher, [int((folder / f"rank.pid{r}").read_text()) for r in (0, 1)]


def test_devices_reports_a_killed_rank(server: Server, tmp_path: Path) -> None:
    launcher, pids = start_scripts(server, tmp_path, distributed.EXIT_RANK_LOST)
    assert {path.read_text() for path in tmp_path.glob("rank.arguments?")} == {"-P -m warpi fit\n"}
    os.kill(pids[1], signal.SIGKILL)
    assert launcher.codes(20.0) == [137], launcher.log()
    line = "warpi: rank 1 was killed by SIGKILL; resume from the last checkpoint in run with: warpi fit --resume\n"
    assert launcher.log() == line


def test_devices_starts_all_ranks_again_if_one_is_killed(server: Server, tmp_path: Path) -> None:
    launcher, pids = start_scripts(server, tmp_path, distributed.EXIT_RANK_LOST, restarts=2)
    os.kill(pids[0], signal.SIGKILL)
    assert launcher.codes(30.0) == [0], launcher.log()
    assert {path.read_text() for path in tmp_path.glob("rank.resumed?")} == {"-P -m warpi fit --resume\n"}
    line = "restarting all processes from the last checkpoint (restart 1 of 2)\n"
    assert launcher.log() == f"warpi: rank 0 was killed by SIGKILL; {line}"


def children(pid: int) -> list[int]:
    """Process ids of ranks that a launcher has started."""
    return [int(child) for child in (PROC / str(pid) / "task" / str(pid) / "children").read_text().split()]


@pytest.mark.slow
def test_a_killed_rank_is_replaced_and_the_run_finishes(server: Server, alone: Run, tmp_path: Path) -> None:
    """`warpi fit --devices 2` without `--resume`; SIGKILL to each rank once."""
    run = Run(tmp_path / "run")
    launcher = server.start(1, [*FIT, "--devices", "2", "--out", str(run.out), "--checkpoint-seconds", "0"])
    killed: list[int] = []  # ranks of the first start: rank 0 may write another checkpoint before it is stopped
    for rank in (1, 0):
        wait_until(lambda: not {*children(launcher.pids[0])} & {*killed}, launcher.log, 120)
        known = run.position() if run.file.exists() else (0, 0)
        wait_until(lambda: run.file.exists() and run.position() > known, launcher.log, 120)
        killed = children(launcher.pids[0])
        os.kill(killed[rank], signal.SIGKILL)
    assert launcher.codes(120.0) == [0], launcher.log()
    again = "restarting all processes from the last checkpoint"
    assert [line.partition("; ")[2] for line in launcher.log().splitlines()] == [
        f"{again} (restart {k} of 3)" for k in (1, 2)
    ]
    run.assert_like(alone)
    assert [record["epoch"] for record in run.records()] == [1, 2, 3]


@pytest.mark.slow
def test_a_rank_that_torchrun_starts_again_resumes(alone: Run, tmp_path: Path) -> None:
    """Without `--resume`, the number of restarts tells the ranks to resume."""
    run = Run(tmp_path / "run")
    command = [*["torchrun", "--standalone", "--nproc-per-node", "2", "--max-restarts", "2", "-m", "warpi"], *FIT]
    command[0] = str(Path(sys.executable).with_name("torchrun"))
    environment = {**os.environ, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "OMP_NUM_THREADS": "1"}
    with open(tmp_path / "log", "w") as log:
        flags = ["--out", str(run.out), "--checkpoint-seconds", "0"]
        process = subprocess.Popen([*command, *flags], env=environment, stdout=log, stderr=log)
    try:
        wait_until(run.file.exists, (tmp_path / "log").read_text, 120)
        os.kill(children(process.pid)[1], signal.SIGKILL)
        assert process.wait(120) == 0, (tmp_path / "log").read_text()
    finally:
        process.kill()
    run.assert_like(alone)


def test_devices_waits_for_its_ranks_to_stop(server: Server, tmp_path: Path) -> None:
    """They may be storing their state. These ranks take 0.2 seconds for it."""
    launcher, _ = start_scripts(server, tmp_path, 143)
    time.sleep(0.5)  # torchrun does not pass a signal on before it monitors the ranks it has started
    os.kill(launcher.pids[0], signal.SIGTERM)
    assert launcher.codes(20.0) == [143], launcher.log()
    assert {path.name for path in tmp_path.glob("rank.stored?")} == {"rank.stored0", "rank.stored1"}
    assert launcher.log() == "", "a rank reports it"


# --- mistakes ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (
            ["--batch-size", "9"],
            "9 examples cannot be split evenly among 2 processes; choose multiples of 2",
        ),
        (
            ["--meta", "11", "--meta-batch-size", "100"],
            "11 examples cannot be split evenly among 2 processes",
        ),
        (["--batch-size", "2", "--no-sync-batchnorm"], "BatchNorm needs at least 2 examples per process and batch"),
        (["--data", "nothing.csv"], "nothing.csv"),
        (["--bath-size", "8"], "unknown flag '--bath-size'; did you mean '--batch-size'?"),
        (["--devices", "3"], "torchrun started 2 processes here, but --devices asks for 3"),
    ],
)
def test_one_rank_reports_a_mistake(server: Server, tmp_path: Path, more: list[str], says: str) -> None:
    ranks = server.start(2, [*FIT, "--out", str(tmp_path / "run"), *more])
    assert ranks.codes() == [2, 2], ranks.log()
    (line,) = ranks.log().splitlines()
    assert line.startswith("warpi: ")
    assert says in line


def test_mistakes_with_devices(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """They are reported before any process starts."""
    argv = [*FIT, "--out", str(tmp_path / "run")]
    assert main([*argv, "--devices", "0"]) == 2
    assert "--devices must be at least 1, got 0" in capsys.readouterr().err
    assert main([*argv, "--devices", "2", "--bath-size", "8"]) == 2
    assert "did you mean '--batch-size'?" in capsys.readouterr().err
    assert main([*argv, "--devices", "two"]) == 2
    assert "--devices must be an integer, got 'two'" in capsys.readouterr().err
    cuda = torch.device("cuda")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "device_count", lambda: 1)
        with pytest.raises(
            UserError, match="--devices 2 needs 2 GPUs, but 1 can be used; lower --devices, or add --device cpu"
        ):
            distributed.check_devices(2, cuda)
    with pytest.raises(UserError, match="set --device cuda, not cuda:1"):
        distributed.check_devices(2, torch.device("cuda:1"))


def test_ranks_with_different_settings_raise(server: Server, tmp_path: Path) -> None:
    ranks = server.start(2, "do_fit_with_other_seeds", out=str(tmp_path / "run"))
    assert ranks.codes() == [99, 99]
    assert "on rank 1 differs from that on rank 0; all processes need the same data, settings" in ranks.log()


def test_an_existing_process_group_is_used_and_kept(server: Server, tmp_path: Path) -> None:
    server.run(2, "do_fit_in_existing_group", out=str(tmp_path / "run"))
    assert (tmp_path / "run" / "done").exists()


def test_all_ranks_stop_if_one_diverges(server: Server, tmp_path: Path) -> None:
    ranks = server.start(2, "do_fit_and_fail", out=str(tmp_path / "run"), how="nan")
    assert ranks.codes(20.0) == [2, 2], ranks.log()
    message = "loss became nan at epoch 1, step 3"
    assert sorted(line.partition(message)[0] for line in ranks.log().splitlines()) == [
        "elsewhere: rank 1: ",
        "this rank: ",
    ]


def test_an_error_in_the_middle_of_a_step(server: Server, tmp_path: Path) -> None:
    ranks = server.start(2, "do_fit_and_fail", out=str(tmp_path / "run"), how="error")
    assert ranks.codes(20.0) == [distributed.EXIT_RANK_LOST, 2], ranks.log()
    assert "this rank: a file has gone" in ranks.log()
    assert "warpi: rank 0 of 2 lost another process of this run (" in ranks.log()
