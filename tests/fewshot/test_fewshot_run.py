"""Few-shot training and evaluation: run folders, exact resume, scores compared with naive loops, command line."""

import json
import math
import os
import signal
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from warpi.cli.app import main
from warpi.errors import UserError
from warpi.fewshot import plot
from warpi.fewshot.compare import judged, versatility
from warpi.fewshot.data import Classes, FewShotData
from warpi.fewshot.datasets import load_fewshot
from warpi.fewshot.episodes import Kind, make_tasks
from warpi.fewshot.evaluate import Scores, evaluate, score_tasks
from warpi.fewshot.learner import Episode, Output, Problem
from warpi.fewshot.learners.registry import LEARNERS
from warpi.fewshot.plot import plot_bases, plot_versatility
from warpi.fewshot.run import fit, load
from warpi.fewshot.spec import specify
from warpi.fewshot.train import Position, Step, Training, train
from warpi.training import checkpoint
from warpi.training.engine import Diverged
from warpi.utils.devices import Stopped
from warpi.utils.seeding import generator

QUICK: dict[str, Any] = {"data": "sines", "tasks": 4, "queries": 5, "val_every": 4, "val_tasks": 10, "threads": 1}
SINES_LEARNER = "metavrf_bilstm"


@pytest.fixture(autouse=True)
def tiny_images(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace `cifar_fs` by a few classes of noise that differ in brightness."""

    def read(name: str, root: str | None) -> FewShotData:
        if name != "cifar_fs":
            return load_fewshot(name, root)

        def part(seed: int) -> Classes:
            x = torch.randint(60, (6, 8, 3, 8, 8), generator=generator(seed, "x")).to(torch.uint8)
            return Classes.of({f"{seed}-{k}": x[k] + 30 * k for k in range(6)})

        return FewShotData(name, part(0), part(1), part(2))

    monkeypatch.setattr("warpi.fewshot.run._read_builtin", read)


def state(run: Any) -> str:
    return checkpoint.digest(checkpoint.state_of(run.learner))


# --- run folders and resume -------------------------------------------------------------------------------------------


def test_interrupted_and_resumed_run_equals_uninterrupted_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stops = (3, 5, 7)  # before the first validation, after it, and twice between two validations
    settings = QUICK | {"learner": SINES_LEARNER, "iterations": 10, "shots": 3, "seed": 4}
    whole = fit(tmp_path / "whole", **settings)
    calls = [0]
    plain = Step.body

    def body(step: Step) -> None:
        plain(step)
        calls[0] += 1
        if calls[0] in stops:
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(Step, "body", body)
    for i, _ in enumerate(stops):
        with pytest.raises(Stopped, match=r"warpi fewshot fit --out .* --resume"):
            fit(tmp_path / "parts", **({"resume": True} if i else settings))
    assert not (tmp_path / "parts" / "done").exists()
    parts = fit(tmp_path / "parts", resume=True)
    assert calls[0] == 10
    assert state(parts) == state(whole)
    for name in ("best.safetensors", "checkpoint.safetensors"):
        a, b = (checkpoint.load(tmp_path / folder / name)["learner"] for folder in ("whole", "parts"))
        assert checkpoint.digest(a) == checkpoint.digest(b)
    carried = dict(whole.learner.net.named_buffers())["context.state"]
    assert carried.abs().sum() > 0, "the state of the LSTM was not kept"
    timed = ("seconds", "episodes_per_s")
    same = [[{k: v for k, v in r.items() if k not in timed} for r in run.history] for run in (whole, parts)]
    assert same[0] == same[1]
    assert [r["iteration"] for r in parts.history] == [4, 8, 10]


def test_resume_deletes_results_that_the_checkpoint_does_not_have(tmp_path: Path) -> None:
    settings = QUICK | {"learner": "metavrf", "iterations": 8, "shots": 3}
    whole = fit(tmp_path / "run", **settings)
    (tmp_path / "run" / "done").unlink()
    with (tmp_path / "run" / "results.jsonl").open("a") as file:
        file.write('{"iteration": 12, "val_mean": 1.0, "episodes_per_s": 1.0}\n{"iterat')
    assert [r["iteration"] for r in load(tmp_path / "run", device="cpu").history] == [4, 8, 12]
    assert [r["iteration"] for r in fit(tmp_path / "run", resume=True).history] == [4, 8]
    assert state(load(tmp_path / "run", weights="last", device="cpu")) == state(whole)


def test_folder_with_other_files_is_refused(tmp_path: Path) -> None:
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "cat.png").write_bytes(b"")
    with pytest.raises(UserError, match=r"contains 'cat\.png' and no run; choose a new or empty one"):
        fit(tmp_path / "photos", **QUICK, learner="metavrf", shots=3)
    assert [p.name for p in (tmp_path / "photos").iterdir()] == ["cat.png"]


def test_finished_run_and_changed_settings_are_refused(tmp_path: Path) -> None:
    settings = QUICK | {"learner": "metavrf", "iterations": 4, "shots": 3}
    fit(tmp_path / "run", **settings)
    with pytest.raises(UserError, match="already contains a run"):
        fit(tmp_path / "run", **settings)
    with pytest.raises(UserError, match=r"started with lr = 0\.001, not 0\.1"):
        fit(tmp_path / "run", resume=True, lr=0.1)
    with pytest.raises(UserError, match="started with threads = 1"):
        fit(tmp_path / "run", resume=True, threads=2)
    with pytest.raises(UserError, match="no run in"):
        fit(tmp_path / "other", resume=True)
    with pytest.raises(UserError, match="contains no few-shot run"):
        load(tmp_path / "other")
    spec = tmp_path / "run" / "spec.json"
    stored = json.loads(spec.read_text())
    stored["facts"]["data_sha256"] = "other"
    spec.write_text(json.dumps(stored))
    with pytest.raises(UserError, match="has changed: data_sha256"):
        load(tmp_path / "run", device="cpu")
    spec.write_text("{}")
    with pytest.raises(UserError, match="does not have the format"):
        fit(tmp_path / "run", resume=True)


def test_best_weights_are_stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    values = iter([3.0, 1.0, 2.0])  # lower is better
    monkeypatch.setattr("warpi.fewshot.train.evaluate", lambda *_, **__: Scores(next(values), 0.1, 0.1, 10, 1.0))
    run = fit(tmp_path / "run", **QUICK | {"val_every": 2}, learner="metavrf", iterations=6, shots=3)
    assert [r["best"] for r in run.history] == [1.0, 1.0, 0.0]
    best, last = (load(tmp_path / "run", weights=w, device="cpu") for w in ("best", "last"))
    assert state(last) == state(run)
    assert state(best) != state(run)


def test_run_stops_if_the_loss_is_not_finite(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cls = type(LEARNERS["metavrf"])
    plain = cls.loss
    monkeypatch.setattr(cls, "loss", lambda self, e: (plain(self, e)[0], {"loss": torch.tensor(math.nan)}))
    with pytest.raises(Diverged, match="loss became nan before step 4"):
        fit(tmp_path / "run", **QUICK, learner="metavrf", iterations=8, shots=3)
    assert not (tmp_path / "run" / "checkpoint.safetensors").exists()


# --- every learner ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", LEARNERS)
def test_every_learner_is_trained_and_evaluated(tmp_path: Path, name: str) -> None:
    data = "sines" if "classification" not in LEARNERS[name].solves else "cifar_fs"
    options = {f.name for f in fields(LEARNERS[name])}
    small = {k: v for k, v in {"features": 8, "bases": 16, "test_steps": 2, "steps": 1}.items() if k in options}
    kind = {"ways": 2, "shots": 2} if data == "cifar_fs" else {"shots": 3}
    run = fit(
        tmp_path / "r", **QUICK | {"data": data, "queries": 2, "tasks": 2}, **kind, **small, learner=name, iterations=2
    )
    assert not options & {f.name for f in fields(Training)}, "one flag would set two things"
    row = judged(load(tmp_path / "r", device="cpu"), 5)
    assert {"learner", "data", "ways", "shots", "mean", "ci95", "median", "transductive", "episodes_per_s"} <= set(row)
    assert row["learner"] == name
    assert row["transductive"] is run.learner.transductive
    assert 0 <= row["mean"] <= 100
    assert row["episodes_per_s"] > 0


def test_runs_are_equal_if_and_only_if_their_seeds_are(tmp_path: Path) -> None:
    settings = QUICK | {"data": "cifar_fs", "learner": "protonet", "ways": 2, "queries": 2, "tasks": 2, "iterations": 3}
    settings |= {"features": 4}
    a, b = (fit(tmp_path / name, **settings, augment=True) for name in "ab")
    c = fit(tmp_path / "c", **settings, seed=1, augment=True)
    assert state(a) == state(b)
    assert state(a) != state(c)


# --- evaluation -------------------------------------------------------------------------------------------------------


def test_scores_equal_a_loop_over_tasks() -> None:
    data = load_fewshot("sines")
    learner = replace(LEARNERS["metavrf"], bases=16)
    learner.start(Problem((1,)))
    tasks = make_tasks(data.test, Kind(0, 5, 50), "cpu", training=False, augment=False)
    scores = evaluate(learner, tasks, 23, seed=3, batch=7)
    values = []
    for e in tasks.fixed(23, 3, "test", at_once=1):
        out = learner.predict(e.support_x, e.support_y, e.query_x, 0).value
        values.append(
            sum((float(a) - float(b)) ** 2 for a, b in zip(out[0, :, 0], e.query_y[0, :, 0], strict=True)) / 50
        )
    mean = sum(values) / 23
    deviation = math.sqrt(sum((v - mean) ** 2 for v in values) / 22)
    assert scores.mean == pytest.approx(mean, rel=1e-4)
    assert scores.ci95 == pytest.approx(1.96 * deviation / math.sqrt(23), rel=1e-4)
    assert scores.median == pytest.approx(sorted(values)[11], rel=1e-4)
    assert scores.tasks == 23


def test_accuracy_equals_the_share_of_correct_queries() -> None:
    x = torch.randint(256, (5, 6, 1, 4, 4), generator=generator(0, "x")).to(torch.uint8)
    source = Classes.of({str(k): x[k] for k in range(5)})
    learner = replace(LEARNERS["nearest"])
    learner.start(Problem((1, 4, 4), ways=3))
    tasks = make_tasks(source, Kind(3, 2, 3), "cpu", training=False, augment=False)
    values = []
    for e in tasks.fixed(12, 0, "test", at_once=1):
        means = [e.support_x[0, e.support_y[0] == c].double().mean(0) for c in range(3)]
        guesses = [min(range(3), key=lambda c: float((q.double() - means[c]).square().sum())) for q in e.query_x[0]]
        hits = sum(g == int(y) for g, y in zip(guesses, e.query_y[0], strict=True))
        values.append(100 * hits / 9)
    scores = evaluate(learner, tasks, 12, batch=5, timed=True)
    assert scores.mean == pytest.approx(sum(values) / 12)
    assert scores.episodes_per_s > 0


def test_versatility_varies_ways_and_shots(tmp_path: Path) -> None:
    run = fit(
        tmp_path / "r",
        **QUICK | {"data": "cifar_fs", "queries": 2, "tasks": 2},
        learner="protonet",
        features=4,
        ways=2,
        iterations=1,
    )
    rows = versatility(run, 5, ways=(2, 3, 100), shots=(1, 5, 8))
    assert [(r["ways"], r["shots"], r["queries"]) for r in rows] == [(2, 1, 2), (3, 1, 2), (2, 5, 2)]
    assert plot_versatility(rows, "svg").startswith(b"<?xml")  # the other tests of figures write no file
    with pytest.raises(UserError, match="between 2 and 6"):
        judged(run, 5, ways=7)


def test_training_tasks_may_have_more_ways_than_test_tasks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = QUICK | {"data": "cifar_fs", "queries": 2, "tasks": 2, "ways": 2, "iterations": 2, "train_ways": 4}
    run = fit(tmp_path / "r", **settings, learner="metavrf_bilstm", features=4, bases=8)
    row = judged(run, 5)
    assert (row["ways"], row["train_ways"], len(run.learner.problem.shape)) == (2, 4, 3)
    assert run.history[0]["loss"] > math.log(2.2)  # with two classes it would be lower at first
    rows = versatility(run, 5, ways=(4,), shots=(1, 5))
    assert [(r["ways"], r["shots"]) for r in rows] == [(2, 1), (4, 1), (2, 5)]
    drawn: list[list[tuple[int, int]]] = []
    monkeypatch.setattr(plot, "_line", lambda _, rows, *__: drawn.append([(r["ways"], r["shots"]) for r in rows]))
    monkeypatch.setattr(plot, "_finish", lambda *_, **__: None)
    monkeypatch.setattr(plot, "render", lambda *_: b"")
    plot_versatility(rows, "svg")
    assert drawn == [[(2, 1), (4, 1)], [(2, 1), (2, 5)]]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"learner": "maml"}, "maml has as many outputs as ways: leave out --train-ways 4, or set --ways 4"),
        ({"ways": 5}, "at least --ways 5, got --train-ways 4"),
        ({"data": "sines"}, "sines is regression, which has no classes: leave out --train-ways 4"),
        ({"train_ways": 70}, "give at most --train-ways 6"),
    ],
)
def test_impossible_training_ways_are_refused(tmp_path: Path, settings: dict[str, Any], message: str) -> None:
    ways = {} if "data" in settings else {"data": "cifar_fs", "ways": 2}
    with pytest.raises(UserError, match=message):
        fit(tmp_path / "r", **QUICK | {"queries": 2, "shots": 1, "train_ways": 4} | ways | settings)


def test_nan_does_not_count_as_a_prediction() -> None:
    y = torch.zeros(2, 3, dtype=torch.long)
    value = torch.zeros(2, 3, 4)
    value[:, :, 0] = 1
    value[1, 2, 0] = torch.nan  # argmax would return class 0, which is correct
    scores = score_tasks(Output(value), Episode(y, y, y, y, 4))
    assert scores[0] == 100
    assert scores[1].isnan()


# --- training ---------------------------------------------------------------------------------------------------------


def test_training_learns_sines() -> None:
    learner = replace(LEARNERS["metavrf"])
    learner.start(Problem((1,)))
    data = load_fewshot("sines")
    kind = Kind(0, 10, 10)
    training = Training(iterations=40, tasks=16, queries=10, lr=2e-3, val_every=20, val_tasks=20)
    (before,) = train(learner, data, kind, replace(training, iterations=0))
    records = [r for r in train(learner, data, kind, training) if r]
    assert before is not None
    assert records[-1]["val_mean"] < 0.6 * before["val_mean"]
    assert records[1]["loss"] < records[0]["loss"]


def test_the_learning_rate_falls_to_zero() -> None:
    training = Training(iterations=100, lr=0.4)
    assert training.lr_at(0) == 0.4
    assert training.lr_at(50) == pytest.approx(0.2)
    assert training.lr_at(100) == pytest.approx(0, abs=1e-12)
    assert replace(training, schedule="constant").lr_at(99) == 0.4


def test_scalar_parameters_have_their_own_learning_rate(tmp_path: Path) -> None:
    learner = replace(LEARNERS["metavrf"], bases=8)
    learner.start(Problem((1,)))
    training = Training(iterations=2, tasks=2, queries=3, lr=1e-3, scalars=10.0, schedule="constant")
    at = Position(learner, training)
    scale = dict(learner.net.named_parameters())["scale"]
    before = [p.detach().clone() for p in learner.parameters()]
    scale_before = scale.item()
    Step(learner, make_tasks(load_fewshot("sines").train, Kind(0, 3, 3), "cpu", True, False), training, at)()
    assert abs(scale.item() - scale_before) == pytest.approx(1e-2, rel=1e-3)  # Adam's first step is its learning rate
    pairs = zip(learner.parameters(), before, strict=True)
    moved = max(float((p.detach() - q).abs().max()) for p, q in pairs if p.numel() > 1)
    assert moved == pytest.approx(1e-3, rel=1e-3)
    runs = [fit(tmp_path / str(n), **QUICK, learner="metavrf", shots=3, iterations=n, scalars=10.0) for n in (4, 8)]
    (tmp_path / "4" / "done").unlink()  # resume it, to restore the parameter groups from the checkpoint
    spec = json.loads((tmp_path / "4" / "spec.json").read_text())
    spec["spec"]["training"]["iterations"] = 8
    (tmp_path / "4" / "spec.json").write_text(json.dumps(spec))
    assert len(fit(tmp_path / "4", resume=True).history) == len(runs[1].history)


def test_clipping_limits_the_gradient_norm(monkeypatch: pytest.MonkeyPatch) -> None:
    learner = replace(LEARNERS["protonet"], features=4)
    data = Classes.of({str(k): torch.randint(256, (5, 1, 16, 16)).to(torch.uint8) for k in range(3)})
    learner.start(Problem((1, 16, 16), ways=2))
    training = Training(iterations=1, tasks=2, queries=2, clip=1e-3)
    at = Position(learner, training)
    monkeypatch.setattr(at.optimizer, "step", lambda: None)
    Step(learner, make_tasks(data, Kind(2, 1, 2), "cpu", True, False), training, at)()
    norm = math.sqrt(sum(float(p.grad.square().sum()) for p in learner.parameters() if p.grad is not None))
    assert norm == pytest.approx(1e-3, rel=1e-3)


def test_invalid_settings_are_refused() -> None:
    spec = specify("omniglot", "metavrf", ways=20, tasks=3)
    assert (spec.ways, spec.shots, spec.training.tasks, spec.training.queries) == (20, 1, 3, 15)
    for settings, message in [
        ({"data": "omnigolt"}, "did you mean 'omniglot'"),
        ({"learner": "mamel"}, "did you mean 'maml'"),
        ({"iteration": 3}, "did you mean 'iterations'"),
        ({"iterations": -1}, "iterations must be at least 0"),
        ({"schedule": "cosin"}, "did you mean 'cosine'"),
    ]:
        with pytest.raises(UserError, match=message):
            specify(**{"data": "sines", "learner": "metavrf", **settings})


# --- the command line -------------------------------------------------------------------------------------------------


def test_command_line_end_to_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    quick = ["--tasks=2", "--queries=5", "--iterations=2", "--val-every=2", "--val-tasks=2", "--threads=1"]
    runs = []
    for learner, flags in (("metavrf", ["--bases", "8"]), ("metavrf", ["--bases", "16"]), ("maml", [])):
        runs.append(str(tmp_path / f"{learner}{''.join(flags)}"))
        argv = ["fewshot", "fit", "--data", "sines", "--learner", learner, "--shots", "3", "--seed", "1"]
        assert main([*argv, *quick, *flags, "--device=cpu", "--out", runs[-1]]) == 0
    output = capsys.readouterr().out
    assert "metavrf bases=8 on sines, 3-shot" in output
    assert "best validation mean squared error" in output
    rows = tmp_path / "rows.json"
    assert main(["fewshot", "evaluate", *runs, "--tasks", "20", "--device", "cpu", "--json", str(rows)]) == 0
    output = capsys.readouterr().out
    assert output.count("3-shot") == 3
    table = json.loads(rows.read_text())
    assert [row["learner"] for row in table] == ["metavrf", "metavrf", "maml"]
    assert [row["bases"] for row in table] == [8, 16, None]
    assert all(row["tasks"] == 20 and row["metric"] == "mse" and row["episodes_seed"] == 0 for row in table)
    for kind, files in (("curves", runs), ("bases", [str(rows)])):
        picture = tmp_path / f"{kind}.png"
        assert (
            main(["fewshot", "plot", *files, "--kind", kind, "--examples=1", "--out", str(picture), "--device", "cpu"])
            == 0
        )
        assert picture.read_bytes().startswith(b"\x89PNG")
        assert capsys.readouterr().out == f"{picture}\n"
    assert main(["fewshot", "fit", "--out", runs[0], "--resume", "--quiet"]) == 0


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["fitt"], "did you mean 'fit'"),
        (["fit", "--data", "sines"], "missing --out DIR"),
        (["fit", "--learner", "mamel", "--out", "x"], "did you mean 'maml'"),
        (["fit", "--learner", "maml", "--contxt", "lstm", "--out", "x"], "unknown flag '--contxt'"),
        (["fit", "--data", "sines", "--ways", "5", "--out", "{tmp}/x"], "leave out --ways 5"),
        (["evaluate", "{tmp}/none"], "contains no few-shot run"),
        (["evaluate", "{tmp}", "--tasks", "0"], "--tasks must be at least 1"),
        (["evaluate", "{tmp}", "--weights", "bst"], "did you mean 'best'"),
        (["plot", "{tmp}", "--out", "{tmp}/x.gif"], "images are written as .png or .svg"),
    ],
)
def test_command_line_errors_are_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], argv: list[str], message: str
) -> None:
    assert main(["fewshot", *(a.replace("{tmp}", str(tmp_path)) for a in argv)]) == 2
    output = capsys.readouterr().err
    assert message in output
    assert output.count("\n") == 1


def test_figures_average_over_seeds_only(monkeypatch: pytest.MonkeyPatch) -> None:
    lines: dict[str, list[float]] = {}

    def line(_: Any, rows: Any, __: str, ___: int, label: str) -> None:
        lines[label] = [row["mean"] for row in rows]

    monkeypatch.setattr(plot, "_line", line)
    monkeypatch.setattr(plot, "render", lambda *_: b"")
    common = {"label": "rff", "metric": "accuracy", "transductive": True, "tasks": 9, "ways": 5, "train_ways": 5}
    for by in ("shots", "data"):
        kinds = {"shots": (1, 5), "data": ("cifar_fs", "omniglot")}[by]
        rows = [
            {"data": "cifar_fs", "shots": 1, "train_shots": 1, **common, by: kinds[mean % 2], "bases": 8, "mean": mean}
            | {"seed": mean}
            for mean in range(4)
        ]
        lines.clear()
        plot_bases([*rows, *({**row, "bases": 16} for row in rows)], "svg")
        assert sorted(lines.values()) == [[0, 2, 0, 2], [1, 3, 1, 3]]
    lines.clear()
    plot_versatility(rows, "svg")
    assert sorted(lines.values()) == [[0, 2], [1, 3]]


def test_help_lists_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fewshot"]) == 0
    assert "evaluate DIR..." in capsys.readouterr().out


def test_the_python_of_the_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "fewshot.md").read_text()
    section = page.partition("\n## Python\n")[2].partition("\n## ")[0]
    blocks = [block.partition("```")[0] for block in section.split("```python\n")[1:]]
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    for block in blocks:
        exec(block, names)
    assert len(blocks) == 3
    assert names["probabilities"].shape == (4, 3)


def test_long_runs_on_a_gpu_are_compiled_by_default() -> None:
    gpu, cpu = torch.device("cuda"), torch.device("cpu")
    for iterations, compiles, expected in (
        (3000, None, True),
        (2999, None, False),
        (9, True, True),
        (9000, False, False),
    ):
        training = Training(iterations=iterations, compile=compiles)
        assert training.compiles(gpu) is expected
        assert training.compiles(cpu) is bool(compiles)


def test_compiled_steps_equal_plain_steps_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    x = torch.randint(256, (6, 8, 3, 8, 8), generator=generator(0, "x")).to(torch.uint8)
    images = Classes.of({str(k): x[k] for k in range(6)})
    losses = []
    for compiles in (False, True):
        learner = replace(LEARNERS["protonet"], features=8)
        learner.start(Problem((3, 8, 8), ways=2))
        learner.net.body.blocks = learner.net.body.blocks[:1]  # faster to compile
        training = Training(iterations=3, tasks=3, queries=2, compile=compiles)
        at = Position(learner, training)
        step = Step(learner, make_tasks(images, Kind(2, 1, 2), "cpu", training=True, augment=True), training, at)
        assert (learner.net.body.fused is not None) is compiles
        for _ in range(3):
            step()
            at.iteration += 1
        losses.append(at.sums["loss"].item())
        step.close()
        assert learner.net.body.fused is None
        assert not Step(learner, step.tasks, training, at).fused, "compiled although no step is left"
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


def test_maml_is_not_compiled() -> None:
    learner = replace(LEARNERS["maml"], features=4)
    learner.start(Problem((3, 8, 8), ways=2))
    training = Training(iterations=1, tasks=2, queries=2, compile=True)
    x = torch.zeros(3, 3, 3, 8, 8, dtype=torch.uint8)
    tasks = make_tasks(Classes.of({str(k): x[k] for k in range(3)}), Kind(2, 1, 2), "cpu", training=True, augment=False)
    Step(learner, tasks, training, Position(learner, training))
    assert learner.net.psi.body.fused is None


# --- on a GPU ---------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["32", "bf16"])
@pytest.mark.parametrize("name", ["metavrf_bilstm", "metavrf_evidence", "rff", "rbf", "protonet", "r2d2", "maml"])
def test_graphed_steps_equal_plain_steps(name: str, precision: str) -> None:
    x = torch.randint(256, (6, 8, 3, 8, 8), generator=generator(0, "x")).to(torch.uint8)
    turns = 4 if name == "protonet" else 1  # drawings have another augmentation
    images = Classes.of({str(k): x[k] for k in range(6)}, turns).to("cuda")
    options = {f.name for f in fields(LEARNERS[name])}
    training = Training(iterations=12, tasks=3, queries=2, precision=precision)  # type: ignore[arg-type]
    states = []
    for why in ("", "to compare"):
        torch.manual_seed(0)
        learner = replace(LEARNERS[name], **{k: v for k, v in {"features": 8, "bases": 32}.items() if k in options})
        learner.start(Problem((3, 8, 8), ways=2), device="cuda")
        at = Position(learner, training)
        tasks = make_tasks(images, Kind(2, 1, 2), "cuda", training=True, augment=True)
        step = Step(learner, tasks, training, at)
        step.why = why
        for _ in range(12):
            step()
            at.iteration += 1
        assert (step.graph is not None) == (not why), step.why
        assert at.sums["loss"].isfinite()
        states.append((at.sums["loss"].item(), [p.detach().clone() for p in learner.parameters()]))
    assert states[0][0] == pytest.approx(states[1][0], rel=1e-3 if precision == "32" else 0.05)
    if precision == "32":
        for a, b in zip(states[0][1], states[1][1], strict=True):
            torch.testing.assert_close(a, b, atol=2e-3, rtol=2e-2)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("name", "norm"), [("metavrf_bilstm", "transductive"), ("metavrf", "support"), ("r2d2", "running")]
)
def test_compiled_steps_equal_plain_steps(name: str, norm: str) -> None:
    x = torch.randint(256, (6, 8, 3, 32, 32), generator=generator(0, "x")).to(torch.uint8)
    images = Classes.of({str(k): x[k] for k in range(6)}).to("cuda")
    sums: list[float] = []
    for compiles in (False, True):
        learner = replace(LEARNERS[name], features=16, dropout=0.0, norm=norm)
        learner.start(Problem((3, 32, 32), ways=2), device="cuda")
        training = Training(iterations=12, tasks=3, queries=2, compile=compiles)
        at = Position(learner, training)
        step = Step(learner, make_tasks(images, Kind(2, 1, 2), "cuda", training=True, augment=True), training, at)
        assert any(getattr(m, "fused", None) for m in learner.net.modules()) is compiles
        for _ in range(12):
            step()
            at.iteration += 1
        assert step.graph is not None, step.why
        sums.append(at.sums["loss"].item())
    assert sums[0] == pytest.approx(sums[1], rel=1e-2)


@pytest.mark.gpu
def test_dropout_in_compiled_steps_differs_from_step_to_step() -> None:
    x = (
        torch.zeros(6, 8, 3, 32, 32, dtype=torch.uint8)
        + torch.arange(0, 240, 40, dtype=torch.uint8)[:, None, None, None, None]
    )
    learner = replace(LEARNERS["protonet"], features=16, dropout=0.5)
    learner.start(Problem((3, 32, 32), ways=2), device="cuda")
    training = Training(iterations=20, tasks=3, queries=2, lr=0.0, schedule="constant", compile=True)
    at = Position(learner, training)
    images = Classes.of({str(k): x[k] for k in range(2)}).to("cuda")
    step = Step(learner, make_tasks(images, Kind(2, 1, 2), "cuda", training=True, augment=False), training, at)
    losses = []
    before = 0.0
    for _ in range(12):
        step()
        losses.append(at.sums["loss"].item() - before)
        before = at.sums["loss"].item()
    assert step.graph is not None, step.why
    assert len({round(v, 9) for v in losses[4:]}) > 4


@pytest.mark.gpu
def test_run_on_a_gpu_is_resumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = QUICK | {"learner": SINES_LEARNER, "shots": 3, "device": "cuda"}
    whole = fit(tmp_path / "whole", **settings, iterations=20)
    calls = [0]
    plain = Step.__call__

    def call(step: Step) -> None:
        plain(step)
        calls[0] += 1
        if calls[0] == 11:
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(Step, "__call__", call)
    with pytest.raises(Stopped):
        fit(tmp_path / "parts", **settings, iterations=20)
    parts = fit(tmp_path / "parts", resume=True, device="cuda")
    assert parts.history[-1]["val_mean"] == pytest.approx(whole.history[-1]["val_mean"], rel=1e-3)
