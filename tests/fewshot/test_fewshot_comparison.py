"""Learners on the same tasks: differences per task, on the command line and in the rows of the benchmark."""

import argparse
import json
import math
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from benchmarks.common import RESULTS
from benchmarks.fewshot import gpu, spectra
from warpi.cli import fewshot as command
from warpi.cli.app import main
from warpi.errors import UserError
from warpi.fewshot.compare import judged
from warpi.fewshot.data import Classes, FewShotData
from warpi.fewshot.datasets import load_fewshot
from warpi.fewshot.episodes import Kind, make_tasks
from warpi.fewshot.evaluate import paired
from warpi.fewshot.run import fit, load
from warpi.utils.seeding import generator

QUICK: dict[str, Any] = {"data": "sines", "tasks": 2, "queries": 2, "val_every": 4, "val_tasks": 4, "threads": 1}


def noise(name: str = "cifar_fs", root: str | None = None, seeds: tuple[int, ...] = (0, 1, 2)) -> FewShotData:
    """A few classes of noise that cannot be distinguished."""
    if name != "cifar_fs":
        return load_fewshot(name, root)
    x = [torch.randint(256, (6, 8, 3, 8, 8), generator=generator(seed, "x")).to(torch.uint8) for seed in seeds]
    return FewShotData(name, *(Classes.of({f"{i}-{k}": x[i][k] for k in range(6)}) for i in range(3)))


@pytest.fixture(autouse=True)
def tiny_images(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("warpi.fewshot.run._read_builtin", noise)


def scores_one_by_one(path: Path, kind: Kind, n: int, seed: int = 0) -> list[float]:
    """The score of each test task, in a loop over tasks."""
    run = load(path, device="cpu")
    values = []
    for e in make_tasks(run.data.test, kind, "cpu", False, False).fixed(n, seed, "test", at_once=1):
        value = run.learner.predict(e.support_x, e.support_y, e.query_x, e.ways).value[0]
        if kind.ways:
            correct = [int(v.argmax()) == int(y) for v, y in zip(value, e.query_y[0], strict=True)]
            values.append(100 * sum(correct) / len(correct))
        else:
            errors = [(float(a) - float(b)) ** 2 for a, b in zip(value[:, 0], e.query_y[0, :, 0], strict=True)]
            values.append(sum(errors) / len(errors))
    return values


def evaluate(tmp_path: Path, *argv: str) -> list[dict[str, Any]]:
    file = tmp_path / "rows.json"
    assert main(["fewshot", "evaluate", *argv, "--device", "cpu", "--json", str(file)]) == 0
    rows: list[dict[str, Any]] = json.loads(file.read_text())
    return rows


@pytest.mark.parametrize(
    ("data", "learners", "kind"),
    [("sines", ("metavrf", "maml"), Kind(0, 3, 50)), ("cifar_fs", ("nearest", "protonet"), Kind(3, 2, 2))],
)
def test_differences_to_the_first_run_equal_a_loop_over_tasks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], data: str, learners: tuple[str, ...], kind: Kind
) -> None:
    settings = QUICK | {"data": data, "queries": 2, "tasks": 2, "ways": kind.ways, "shots": kind.shots, "iterations": 2}
    for name in learners:
        fit(tmp_path / name, **settings, learner=name, **({} if name == "nearest" else {"features": 8}))
    a, b = (str(tmp_path / name) for name in learners)
    first, second, repeated = evaluate(tmp_path, a, b, a, "--tasks", "11", "--episodes-seed", "5")
    one, other = (scores_one_by_one(Path(path), kind, 11, seed=5) for path in (a, b))
    gaps = [y - x for x, y in zip(one, other, strict=True)]
    mean = sum(gaps) / 11
    deviation = math.sqrt(sum((gap - mean) ** 2 for gap in gaps) / 10)
    assert deviation > 0
    assert second["difference"] == pytest.approx(mean, rel=1e-4)
    assert second["difference"] == pytest.approx(second["mean"] - first["mean"], rel=1e-6)
    assert second["difference_ci95"] == pytest.approx(1.96 * deviation / math.sqrt(11), rel=1e-4)
    assert (repeated["difference"], repeated["difference_ci95"]) == (0, 0), "a run differs from itself"
    assert first["difference"] is first["difference_ci95"] is None
    lines = capsys.readouterr().out.splitlines()
    shown = f"{mean:+.{2 if kind.ways else 4}f} ± {second['difference_ci95']:.{2 if kind.ways else 4}f}"
    assert [line.rstrip().endswith(shown) for line in lines if f"{kind.shots}-shot" in line] == [False, True, False]
    assert judged(load(a, device="cpu"), 11, seed=5).keys() == first.keys() - {
        "difference",
        "difference_ci95",
        "weights",
        "folder",
    }


def test_only_runs_on_the_same_tasks_are_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = QUICK | {"data": "cifar_fs", "learner": "nearest", "queries": 2, "iterations": 1}
    for name, other in {"a": {}, "shots": {"shots": 3}, "queries": {"queries": 3}, "b": {"seed": 1}}.items():
        fit(tmp_path / name, **{**settings, "ways": 2, **other})
    fit(tmp_path / "sines", **QUICK, learner="rff", shots=1, iterations=1)
    names = ("a", "shots", "queries", "sines", "b")
    rows = evaluate(tmp_path, *(str(tmp_path / name) for name in names), "--tasks", "6")
    assert [row["difference"] for row in rows] == [None, None, None, None, 0]
    rows = evaluate(tmp_path, str(tmp_path / "a"), str(tmp_path / "shots"), "--shots", "1,2", "--tasks", "6")
    assert [row["difference"] for row in rows] == [None, None, 0, 0], "evaluated on the same tasks, trained on others"
    capsys.readouterr()
    assert evaluate(tmp_path, str(tmp_path / "a"), "--tasks", "6")[0]["difference"] is None
    assert "first" not in capsys.readouterr().out
    one = evaluate(tmp_path, *(str(tmp_path / name) for name in "ab"), "--tasks", "1")[1]
    assert (one["difference"], one["difference_ci95"]) == (0, None), "an interval from one task"


def test_runs_on_different_data_of_the_same_name_are_not_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read(name: str, root: str | None) -> FewShotData:
        return noise(name, root, (0, 1, 2 if str(root).endswith("first") else 3))

    monkeypatch.setattr("warpi.fewshot.run._read_builtin", read)
    settings = QUICK | {"data": "cifar_fs", "learner": "nearest", "ways": 2}
    for name, root in (("a", "first"), ("b", "second"), ("c", "first")):
        fit(tmp_path / name, **settings, root=root)
    rows = evaluate(tmp_path, *(str(tmp_path / name) for name in "abc"), "--tasks", "6")
    assert [row["difference"] for row in rows] == [None, None, 0]


def test_scores_by_task_are_returned_on_request(tmp_path: Path) -> None:
    run = fit(tmp_path / "r", **QUICK, learner="rff", shots=3, iterations=1)
    row = judged(run, 12, by_task=True)
    assert row["scores"] == pytest.approx(scores_one_by_one(tmp_path / "r", Kind(0, 3, 50), 12), rel=1e-4)
    assert row["mean"] == pytest.approx(sum(row["scores"]) / 12)
    assert "scores" not in judged(run, 12)
    with pytest.raises(UserError, match="scores of 12 and 1 tasks cannot be compared"):
        paired(row["scores"], row["scores"][:1])


def test_table_of_differences_fits_into_80_columns(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    row = {"label": "metavrf_bilstm dropout=0.2", "data": "cifar_fs", "ways": 20, "shots": 1, "metric": "accuracy"}
    row |= {"transductive": False, "mean": 70.0, "ci95": 1.0, "median": 70.0}
    monkeypatch.setattr("rich.console.Console.is_terminal", True)
    monkeypatch.setenv("TERM", "dumb")  # 80 columns, no colors
    gap = {"difference": -10.5, "difference_ci95": 0.25}
    command._print([row | {"difference": None, "difference_ci95": None}, row | gap])
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    assert sum("70.00 ± 1.00 %" in line for line in lines) == 2, "a number is split over two lines"
    assert sum(line.rstrip().endswith(" 70.00  -10.50 ± 0.25") for line in lines) == 1


# --- the benchmark ----------------------------------------------------------------------------------------------------


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The benchmark script, with noise as data."""
    monkeypatch.setattr(gpu, "prepare", lambda _: None)
    tiny = {"tasks": 1, "queries": 2, "val_every": 2, "val_tasks": 2, "iterations": 2}
    for name, value in (tiny | {"precision": "32", "augment": False}).items():
        monkeypatch.setitem(gpu.TINY, name, value)
    return gpu


def arguments(tmp_path: Path) -> argparse.Namespace:
    (tmp_path / "rows").mkdir(exist_ok=True)
    return argparse.Namespace(out=tmp_path, root=None, device="cpu", tiny=True, jobs=1, json=tmp_path / "all.json")


def test_benchmark_run_with_other_settings_starts_again(
    tmp_path: Path, benchmark: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    given = arguments(tmp_path)
    name = "cifar_fs-5w1s-protonet"
    settings = benchmark.options("cifar_fs-5w1s", "protonet", 1.0) | {"features": 4}
    folder = tmp_path / "runs" / name

    def do(**other: Any) -> list[str]:
        result = benchmark.train_one(name, settings | other, given, time.time() + 99)
        assert "±" in result, result
        assert benchmark.rows_of(given, name, settings | other)[0]["train_lr"] == other.get("lr", 3e-3)
        lines: list[str] = capsys.readouterr().out.splitlines()
        return lines

    assert do() == []
    written = (folder / "checkpoint.safetensors").stat().st_mtime_ns
    assert do() == [], "a finished run is trained again"
    assert (folder / "checkpoint.safetensors").stat().st_mtime_ns == written
    (message,) = do(lr=0.1)
    assert message.endswith(f"kept as {folder}.1: lr = 0.003, not 0.1")
    assert load(folder, device="cpu").spec.training.lr == 0.1
    assert load(f"{folder}.1", device="cpu").spec.training.lr == 0.003
    del settings["features"]  # the default of the learner
    (folder / "done").unlink()  # an unfinished run
    (message,) = do(lr=0.1)
    assert message.endswith(
        f"kept as {folder}.2: features = 4, not {load(folder, device='cpu').spec.options['features']}"
    )
    stored = json.loads((folder / "spec.json").read_text())
    stored["spec"]["options"]["pace"] = 3
    (folder / "spec.json").write_text(json.dumps(stored))
    (message,) = do(lr=0.1)
    assert "does not describe a run" in message


def test_rows_of_the_benchmark_can_be_compared_by_task(tmp_path: Path, benchmark: ModuleType) -> None:
    given = arguments(tmp_path)
    rows = {}
    for name in ("protonet", "nearest"):
        settings = benchmark.options("cifar_fs-5w1s", name, 1.0)
        benchmark.train_one(f"cifar_fs-5w1s-{name}", settings, given, time.time() + 99)
        (rows[name],) = benchmark.rows_of(given, f"cifar_fs-5w1s-{name}", settings)
        run = load(tmp_path / "runs" / f"cifar_fs-5w1s-{name}", device="cpu")
        scores = judged(run, 20, queries=2, by_task=True)["scores"]
        assert benchmark.scores_of(rows[name]) == pytest.approx(scores, abs=1e-12)
        assert "scores" not in rows[name]
    gap = paired(*(benchmark.scores_of(row) for row in rows.values()))
    assert gap["difference"] == pytest.approx(rows["protonet"]["mean"] - rows["nearest"]["mean"])
    assert rows["protonet"]["data_sha256"] == rows["nearest"]["data_sha256"]
    old = json.loads((RESULTS / "fewshot-runs.json").read_text())
    assert all(len(benchmark.scores_of(row) or [0] * row["tasks"]) == row["tasks"] for row in old)
    assert benchmark.scores_of({key: value for key, value in rows["nearest"].items() if key != "right"}) is None


@pytest.mark.parametrize("answers", [75, 300])
def test_scores_by_task_are_a_few_kilobytes(benchmark: ModuleType, answers: int) -> None:
    correct = torch.randint(answers + 1, (3000,), generator=generator(0, "right")).tolist()  # the worst case
    text = benchmark.packed([100 * n / answers for n in correct], answers)
    assert len(text) < 7000
    unpacked = benchmark.scores_of({"right": text, "ways": answers // 15, "queries": 15})
    assert unpacked == pytest.approx([100 * n / answers for n in correct])
    assert benchmark.packed([math.nan, 1.0], answers) is None


def test_the_page_holds_the_stored_comparison_of_kernels() -> None:
    stored = json.loads(spectra.FILE.read_text())
    assert len(stored["rows"]) == 2 * len(spectra.PAIRS) * len(spectra.FREQUENCIES) * 3
    assert spectra.make_page(stored["rows"], stored["about"]) in spectra.PAGE.read_text()
