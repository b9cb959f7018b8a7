"""Features that stay in their file: the same batches, statistics and runs as in memory."""

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st

import warpi.data.loader as loader_module
import warpi.data.mapped as mapped
from warpi.data import overlap
from warpi.data.loader import Loader
from warpi.data.mapped import MappedExamples, RawRows
from warpi.data.numeric import Features, make_features
from warpi.data.overlap import labels_in, mark_shared_once
from warpi.data.split import Split
from warpi.datasets import arrays
from warpi.errors import UserError
from warpi.runs import defaults
from warpi.runs.run import fit, fitting
from warpi.runs.spec import RunSpec, prepare


def write(folder: Path, n: int = 300, kind: Any = np.float16, seed: int = 0) -> Path:
    """Features and noisy labels of three classes."""
    rng = np.random.default_rng(seed)
    y = rng.integers(0, 3, n)
    x = rng.normal(size=(n, 5)) + 2 * np.eye(3, 5)[y]
    y = np.where(rng.random(n) < 0.2, rng.integers(0, 3, n), y)
    np.save(folder / "a.npy", x.astype(kind))
    np.save(folder / "a_labels.npy", y)
    return folder / "a.npy"


def read(path: Path, monkeypatch: pytest.MonkeyPatch, large: int) -> Any:
    monkeypatch.setattr(arrays, "LARGE", large)
    return arrays.read_arrays(path)


@given(
    n=st.integers(2, 60), kind=st.sampled_from(["float16", "float32"]), block=st.sampled_from([1, 64]), data=st.data()
)
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_equals_features_in_memory(tmp_path: Path, n: int, kind: str, block: int, data: st.DataObject) -> None:
    x = np.random.default_rng(n).normal(3, 2, (n, 4)).astype(kind)
    x[:, 3] = 7.25  # a constant column
    np.save(tmp_path / "x.npy", x)
    raw = RawRows.open(tmp_path / "x.npy")
    assert raw is not None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mapped, "BLOCK_BYTES", block)
        on_disk: Features = MappedExamples.of(raw)
        in_memory = make_features(torch.from_numpy(x.astype(np.float32)))
        rows = torch.tensor(sorted(data.draw(st.sets(st.integers(0, n - 1), min_size=1))))
        a, b = on_disk.fit_scale(rows), in_memory.fit_scale(rows)
        torch.testing.assert_close(a.mean, b.mean, rtol=1e-6, atol=1e-7)
        torch.testing.assert_close(a.std, b.std, rtol=1e-6, atol=1e-7)
        assert on_disk.digest() == in_memory.digest()
        on_disk, in_memory = on_disk.with_scale(b), in_memory.with_scale(b)
        y = torch.zeros(len(rows), dtype=torch.int64)
        splits = [Split(examples, rows, y) for examples in (on_disk, in_memory)]
        loaders = [Loader(split, 3, seed=1) for split in splits]
        for _ in range(5):
            first, second = (loader.draw() for loader in loaders)
            assert torch.equal(first.x, second.x)
            assert torch.equal(first.rows, second.rows)
        assert torch.equal(on_disk.flat(rows), in_memory.flat(rows))
        assert on_disk.form().keys() == in_memory.form().keys()
        assert on_disk.form()["kind"] == in_memory.form()["kind"]


def test_large_files_stay_in_their_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path)
    data = read(path, monkeypatch, 0)
    assert isinstance(data.examples, MappedExamples)
    assert data.examples.x.dtype == torch.float16
    assert torch.equal(data.y, read(path, monkeypatch, 2**30).y)
    np.save(path, np.asfortranarray(np.load(path), np.float32))  # rows are not in one piece
    assert not isinstance(read(path, monkeypatch, 0).examples, MappedExamples)
    np.savez(tmp_path / "b.npz", x=np.ones((4, 2), np.float16), y=[0, 1, 0, 1])
    assert read(tmp_path / "b.npz", monkeypatch, 0).examples.x.dtype == torch.float16


def test_the_same_errors_as_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path)
    x = np.load(path)
    x[17, 2] = np.nan
    x[40, 2] = np.inf
    np.save(path, x)
    messages = []
    for large in (0, 2**30):
        with pytest.raises(UserError) as error:
            read(path, monkeypatch, large)
        messages.append(str(error.value))
    assert messages[0] == messages[1]
    assert "row 17, column 2 contains nan; cells that are not finite numbers: 2 in 1 column" in messages[0]


def test_shared_rows_are_found_across_precisions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = read(write(tmp_path), monkeypatch, 0)
    some = torch.tensor([5, 9])
    trusted = Split(make_features(data.examples.x[some].float()), torch.arange(2), data.y[some])
    whole = Split(data.examples, torch.arange(len(data.y)), data.y)
    for many in (2**30, 1):
        monkeypatch.setattr(overlap, "_MANY", many)
        assert mark_shared_once(whole, trusted).nonzero().flatten().tolist() == [5, 9]
        assert torch.equal(labels_in(trusted, whole), data.y[some])


@pytest.mark.parametrize("method", ["ce", "glc"])
def test_a_run_equals_one_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    path = write(tmp_path)
    np.savez(tmp_path / "trusted.npz", x=np.load(path)[:30].astype(np.float32), y=np.arange(30) % 3)
    runs = []
    for large in (0, 2**30):
        monkeypatch.setattr(arrays, "LARGE", large)
        out = tmp_path / f"run{large}"
        options = {"method": method, "net": "linear", "epochs": 3, "device": "cpu", "test": 0.2}
        run = fit(out, data=str(path), trusted=str(tmp_path / "trusted.npz"), **options)
        facts = json.loads((out / "spec.json").read_text())["facts"]
        runs.append((run, {name: value for name, value in facts.items() if name.endswith("_sha256")}))
    (on_disk, facts), (in_memory, other_facts) = runs
    assert isinstance(on_disk.task.train.examples, MappedExamples)
    assert not isinstance(in_memory.task.train.examples, MappedExamples)
    assert facts == other_facts
    assert on_disk.history[-1]["loss"] == pytest.approx(in_memory.history[-1]["loss"], rel=1e-6)
    for a, b in zip(on_disk.method.net.parameters(), in_memory.method.net.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


@given(n=st.integers(1, 70), size=st.integers(1, 20), block=st.integers(1, 9), mixed=st.integers(1, 4))
@settings(max_examples=60, deadline=None)
def test_blocks_are_a_function_of_seed_and_pass(n: int, size: int, block: int, mixed: int) -> None:
    x = make_features(torch.arange(n, dtype=torch.float32)[:, None])
    split = Split(x, torch.arange(n), torch.zeros(n, dtype=torch.int64))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loader_module, "BLOCK_ROWS", block)
        patch.setattr(loader_module, "MIXED_BLOCKS", mixed)
        loader = Loader(split, size, seed=3, in_blocks=True)
        for p in range(3):
            order = loader.order(p)
            assert sorted(order.tolist()) == list(range(n))
            drawn = [loader.draw().rows for _ in range(loader.per_pass)]
            assert torch.equal(torch.cat(drawn), order[: loader.per_pass * loader.batch_size])
            ends = [0, *loader_module.BlockOrder(split, 3, p).ends]
            for start, stop in pairwise(ends):
                assert len({row // block for row in order[start:stop].tolist()}) <= mixed
        resumed = Loader(split, size, seed=3, in_blocks=True)
        resumed.load_state_dict({"count": loader.count - 1})
        assert torch.equal(resumed.draw().rows, drawn[-1])


def test_block_shuffling_resumes_exactly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path)
    monkeypatch.setattr(arrays, "LARGE", 0)
    monkeypatch.setattr(loader_module, "BLOCK_ROWS", 16)
    monkeypatch.setattr(loader_module, "MIXED_BLOCKS", 4)
    options = {"method": "ce", "net": "linear", "epochs": 4, "device": "cpu", "shuffle": "blocks", "batch_size": 32}
    whole = fit(tmp_path / "whole", data=str(path), **options)
    steps = fitting(tmp_path / "part", data=str(path), checkpoint_seconds=0.0, **options)
    for _ in range(14):  # a checkpoint after each step, the last one within an epoch
        next(steps)
    steps.close()
    assert json.loads((tmp_path / "part/spec.json").read_text())["spec"]["recipe"]["shuffle"] == "blocks"
    resumed = fit(tmp_path / "part", resume=True, device="cpu")
    for a, b in zip(whole.method.net.parameters(), resumed.method.net.parameters(), strict=True):
        assert torch.equal(a, b)
    assert [r["loss"] for r in whole.history] == [r["loss"] for r in resumed.history]


def test_pages_are_given_back_after_reading_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = read(write(tmp_path), monkeypatch, 0)
    advised: list[tuple[str, int, int]] = []
    for name in ("announce", "release"):
        monkeypatch.setattr(data.examples.raw, name, lambda a, b, name=name: advised.append((name, a, b)))
    rows = torch.arange(10, 90)
    split = Split(data.examples, rows, data.y[rows])
    assert torch.equal(torch.cat([batch.x for batch in split.batches(40)]), data.examples.x[10:90].float())
    assert advised == [("announce", 10, 50), ("release", 10, 50), ("announce", 50, 90), ("release", 50, 90)]
    advised.clear()
    monkeypatch.setattr(mapped, "_SEEK_BYTES", 100)  # a row has 10 bytes
    data.examples.announce(torch.tensor([0, 20]))  # 21 rows in one piece: more than two rows of their own
    data.examples.announce(torch.tensor([0, 19]))
    assert advised == [("announce", 0, 20)]


def test_millions_of_rows_in_a_file_have_a_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path)
    np.savez(tmp_path / "trusted.npz", x=np.load(path)[:30].astype(np.float32), y=np.arange(30) % 3)
    monkeypatch.setattr(arrays, "LARGE", 0)
    monkeypatch.setattr(defaults, "MOST_ROWS", 100)
    monkeypatch.setattr(defaults, "ENOUGH_ROWS", 100)
    for trusted, method in (({}, "elr"), ({"meta_data": str(tmp_path / "trusted.npz")}, "warpi")):
        spec = RunSpec.from_settings(None, data=str(path), **trusted)
        prepared = prepare(spec)
        assert prepared.spec.method == method
        assert "millions of rows in a file" in prepared.summarize()
    monkeypatch.setattr(defaults, "MOST_ROWS", 1000)
    assert prepare(RunSpec.from_settings(None, data=str(path))).spec.method == "auto"
