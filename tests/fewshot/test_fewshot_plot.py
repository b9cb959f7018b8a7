"""Figures and tables of few-shot runs: meaning of lines, columns and error bars, and refused inputs."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from matplotlib.figure import Figure

from warpi.cli import fewshot as command
from warpi.cli.app import main
from warpi.errors import UserError
from warpi.fewshot import plot
from warpi.fewshot.compare import examples, judged, versatility
from warpi.fewshot.data import Classes, FewShotData
from warpi.fewshot.datasets import load_fewshot
from warpi.fewshot.plot import Curve, plot_bases, plot_curves, plot_versatility
from warpi.fewshot.run import fit
from warpi.utils.seeding import generator

QUICK: dict[str, Any] = {"tasks": 2, "queries": 2, "val_every": 4, "val_tasks": 4, "threads": 1, "device": "cpu"}


@pytest.fixture(autouse=True)
def tiny_images(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace `cifar_fs` by a few classes of noise."""

    def read(name: str, root: str | None) -> FewShotData:
        if name != "cifar_fs":
            return load_fewshot(name, root)
        parts = []
        for seed in range(3):
            x = torch.randint(256, (6, 8, 3, 8, 8), generator=generator(seed, "x")).to(torch.uint8)
            parts.append(Classes.of({f"{seed}-{k}": x[k] for k in range(6)}))
        return FewShotData(name, *parts)

    monkeypatch.setattr("warpi.fewshot.run._read_builtin", read)


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> list[Figure]:
    """The figures that a test draws. They are not written, which would take most of the time."""
    drawn: list[Figure] = []

    def keep(figure: Figure, _: str) -> bytes:
        drawn.append(figure)
        return b""

    monkeypatch.setattr(plot, "render", keep)
    return drawn


def row(mean: float = 50.0, **other: Any) -> dict[str, Any]:
    evaluated = {"label": "rff", "data": "cifar_fs", "metric": "accuracy", "transductive": False, "tasks": 9, "ways": 5}
    trained = {"shots": 1, "task_ways": 5, "train_ways": 5, "train_shots": 1, "bases": 8, "seed": 0}
    return {**evaluated, **trained, "mean": mean, "ci95": 1.0, "median": mean, **other}


def legend(figure: Figure) -> list[str]:
    return [text.get_text() for box in figure.legends for text in box.get_texts()]


def two_bases(**other: Any) -> list[dict[str, Any]]:
    return [row(**{"mean": 50 + bases} | other, bases=bases) for bases in (8, 16)]


# --- curves -----------------------------------------------------------------------------------------------------------


def curve(label: str, shots: int) -> Curve:
    return Curve(label, shots, [0.0], [1.0], [0, 1], [0, 1], [0, 0.5], None, 0.1)


def test_curves_have_one_column_per_learner_for_all_shots(figures: list[Figure]) -> None:
    few = [curve("a", 5), curve("b", 5)]
    many = [curve("b", 10), curve("c", 10)]
    plot_curves([few, few, many, many], "svg")
    panels = [figures[0].axes[i : i + 3] for i in range(0, 12, 3)]
    heads = [[ax.get_title(loc="left").partition("MSE")[0].strip() for ax in line] for line in panels]
    assert heads == [["a", "b", ""], ["", "", ""], ["", "b", "c"], ["", "", ""]]
    colors = [[ax.lines[1].get_color() if ax.lines else None for ax in line] for line in panels]
    assert colors[0][1] == colors[2][1]
    assert len({*colors[0][:2], colors[2][2]}) == 3
    assert [[ax.axison for ax in line] for line in panels[1:3]] == [[True, True, False], [False, True, True]]
    assert [panels[0][0].get_ylabel(), panels[2][1].get_ylabel()] == ["5 shots", "10 shots"]


def test_curves_have_separate_columns_for_different_training(tmp_path: Path) -> None:
    settings = QUICK | {"data": "sines", "learner": "rff"}
    runs = [fit(tmp_path / f"{s}-{n}", **settings, shots=s, iterations=n) for s, n in ((3, 1), (3, 2), (5, 2))]
    labels = [[c.label for c in line] for line in examples(runs, 1)]
    assert labels == [["rff, iterations=1", "rff, iterations=2"], ["rff, iterations=2"]]
    with pytest.raises(UserError, match="two runs are rff with 3 shots"):
        plot_curves(examples([runs[0], runs[0]], 1), "png")


def test_values_of_curves_are_written_as_json(tmp_path: Path, figures: list[Figure]) -> None:
    settings = QUICK | {"data": "sines", "iterations": 1}
    for learner, shots in (("rff", 3), ("metavrf", 3), ("maml", 5)):
        fit(tmp_path / learner, **settings, learner=learner, shots=shots)
    runs = [str(tmp_path / name) for name in ("rff", "metavrf", "maml")]
    file = tmp_path / "curves.json"
    argv = ["plot", *runs, "--kind=curves", "--examples=2", "--device=cpu", "--out", str(tmp_path / "x.svg")]
    command.fewshot([*argv, "--json", str(file)])
    assert len(figures) == 1
    rows = json.loads(file.read_text())
    heads = [(row["task"], row["shots"], row["label"].partition(",")[0].split()[0]) for row in rows]
    assert heads == [(t, 3, name) for t in (0, 1) for name in ("rff", "metavrf")] + [(t, 5, "maml") for t in (0, 1)]
    for row in rows:
        x, mean = torch.tensor(row["x"]), torch.tensor(row["mean"])
        assert len(row["support_x"]) == len(row["support_y"]) == row["shots"]
        assert len(x) == len(mean) == len(row["truth"]) == 200
        assert ((mean - torch.tensor(row["truth"])) ** 2).mean() == pytest.approx(row["mse"], rel=1e-4)
        assert len(row["std"] or ()) == 200 * row["label"].startswith("metavrf"), "std of a learner without one"
    assert rows[0]["truth"] == rows[1]["truth"] != rows[2]["truth"]


# --- lines ------------------------------------------------------------------------------------------------------------


def test_different_training_gives_separate_lines(figures: list[Figure]) -> None:
    rows = [r for n in (60, 1500) for r in two_bases(training={"iterations": n, "lr": 0.1})]
    plot_bases(rows, "svg")
    assert legend(figures[0]) == [f"rff, iterations={n} (1 seed, 95 % interval)" for n in (60, 1500)]
    old = [r for n in (60, 1500) for r in two_bases(iterations=n)]
    plot_bases(old, "svg")
    assert legend(figures[1]) == legend(figures[0])
    plot_versatility(rows, "svg")  # this figure has no axis for the number of bases
    assert {text.partition(" (")[0] for text in legend(figures[2])} == {
        f"rff, trained on 5-way 1-shot, bases={b} iterations={n}" for b in (8, 16) for n in (60, 1500)
    }


def test_legend_explains_the_error_bars(figures: list[Figure]) -> None:
    rows = [r for seed in range(3) for r in two_bases(mean=50 + seed, seed=seed)]
    plot_bases([*rows, *two_bases(label="maml"), *two_bases(label="some"), row(label="some", seed=1)], "svg")
    assert legend(figures[0]) == [
        "rff (3 seeds, ± 1 SD)",
        "maml (1 seed, 95 % interval)",
        "some (1 to 2 seeds, ± 1 SD, or 95 % interval for one seed)",
    ]
    assert "seeds" not in figures[0].axes[0].get_title(loc="left")


def test_duplicate_rows_count_once(figures: list[Figure]) -> None:
    plot_bases(two_bases() + two_bases(), "svg")
    assert legend(figures[0]) == ["rff (1 seed, 95 % interval)"]
    with pytest.raises(UserError, match=r"two different scores for rff, seed 0, cifar_fs 5-way 1-shot"):
        plot_bases([*two_bases(), row(mean=3)], "svg")


def test_rows_without_a_common_axis_are_refused() -> None:
    with pytest.raises(UserError, match=r"\(accuracy: cifar_fs; mse: sines\); draw them one by one"):
        plot_bases([*two_bases(), *two_bases(metric="mse", data="sines", ways=0)], "png")
    with pytest.raises(UserError, match="sines is regression and has no ways"):
        plot_versatility(two_bases(metric="mse", data="sines", ways=0), "png")


def test_axes_have_labels_and_integer_ticks(figures: list[Figure]) -> None:
    plot_versatility([row(), row(shots=2), row(ways=7)], "svg")
    for ax in figures[0].axes:
        assert ax.get_ylabel() == "accuracy, %"
        assert all(tick == int(tick) for tick in ax.get_xticks())


def test_maml_is_evaluated_on_its_training_ways_only(tmp_path: Path) -> None:
    run = fit(tmp_path / "r", **QUICK, data="cifar_fs", learner="maml", features=4, test_steps=1, ways=2, iterations=1)
    rows = versatility(run, 4, ways=(2, 3, 5), shots=(1, 5))
    assert [(r["ways"], r["shots"]) for r in rows] == [(2, 1), (2, 5)]
    assert rows[0]["training"]["iterations"] == 1
    assert not {"seed", "train_ways"} & set(rows[0]["training"])


# --- the command line -------------------------------------------------------------------------------------------------


def test_rows_are_written_one_by_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fit(tmp_path / "r", **QUICK, data="cifar_fs", learner="protonet", features=4, ways=2, iterations=1)
    calls = []

    def failing(*args: Any, **settings: Any) -> dict[str, Any]:
        calls.append(0)
        if len(calls) == 3:
            raise UserError("the third")
        return judged(*args, **settings)

    monkeypatch.setattr("warpi.fewshot.compare.judged", failing)
    rows = tmp_path / "rows.json"
    argv = ["plot", str(tmp_path / "r"), "--tasks=4", "--ways=2,3,4", "--device=cpu", "--json", str(rows)]
    with pytest.raises(UserError, match="the third"):
        command.fewshot([*argv, "--out", str(tmp_path / "x.png")])
    assert [r["ways"] for r in json.loads(rows.read_text())] == [2, 3]


@pytest.mark.parametrize(
    ("rows", "kind"),
    [
        (two_bases(), "bases"),
        (two_bases(metric="mse", data="sines", ways=0, task_ways=0, train_ways=0), "bases"),
        ([row(), row(shots=5)], "versatility"),
        ([row(), row(ways=9), row(bases=16)], "versatility"),
        ([row()], "versatility"),
    ],
)
def test_kind_of_figure_is_chosen_from_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rows: list[dict[str, Any]], kind: str
) -> None:
    drawn = []
    for name in ("bases", "versatility"):
        monkeypatch.setattr(plot, f"plot_{name}", lambda *_, name=name: drawn.append(name) or b"")
    (tmp_path / "rows.json").write_text(json.dumps(rows))
    command.fewshot(["plot", str(tmp_path / "rows.json"), "--out", str(tmp_path / "x.png")])
    assert drawn == [kind]


@pytest.mark.parametrize(
    ("rows", "flags", "message"),
    [
        ([], [], "contains no rows; write it with"),
        ([{"mean": 1}], [], "has no 'label'"),
        ([row(), {k: v for k, v in row().items() if k != "data"}], [], "row 2 of"),
        ([row(mean=None)], [], "has no 'mean'"),
        ([row()], ["--kind", "curves"], "curves need run folders"),
        ([row(ways=0, data="sines", metric="mse")], ["--kind", "versatility"], "sines is regression"),
        ([row()], ["--kind", "bases"], "different numbers of bases"),
        ([row()], ["--shots", "a"], "--shots must be numbers separated by commas, got 'a'"),
    ],
)
def test_invalid_rows_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], rows: list[Any], flags: list[str], message: str
) -> None:
    (tmp_path / "rows.json").write_text(json.dumps(rows))
    argv = ["fewshot", "plot", str(tmp_path / "rows.json"), "--out", str(tmp_path / "x.png"), *flags]
    assert main(argv) == 2
    output = capsys.readouterr().err
    assert message in output
    assert output.count("\n") == 1


def test_table_fits_into_80_columns_with_distinct_names(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [row(70, training={"iterations": n}, label="metavrf_bilstm" + " context=lstm" * 6) for n in (60, 1500)]
    command._print(rows)
    lines = capsys.readouterr().out.splitlines()
    ends = [line.partition("iterations=")[2].split() for line in lines if "iterations=" in line]
    assert [end[0] for end in ends] == ["60", "1500"]
    assert all(end[2:] == ["5-way", "1-shot", "inductive", "70.00", "±", "1.00", "%", "70.00"] for end in ends)
    monkeypatch.setattr("rich.console.Console.is_terminal", True)
    monkeypatch.setenv("TERM", "dumb")  # 80 columns, no colors
    command._print(rows)
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    assert sum(line.rstrip().endswith(" 5-way 1-shot  inductive  70.00 ± 1.00 %   70.00") for line in lines) == 2


def test_help_shows_the_defaults_of_the_data(capsys: pytest.CaptureFixture[str]) -> None:
    for data, defaults in {"omniglot": (20_000, 16, 15, 1), "sines": (4_000, 25, 10, 5)}.items():
        with pytest.raises(SystemExit):
            command.fit(["--data", data, "--help"])
        output = " ".join(capsys.readouterr().out.split())
        texts = (
            "number of training steps",
            "number of tasks per step",
            "training queries per class, or per regression task",
        )
        for text, default in zip((*texts, "or per regression task"), defaults, strict=True):
            assert f"{text} (default: {default})" in output


def test_one_task_has_no_interval(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = ["--data", "sines", "--learner", "rff", "--shots", "3", "--iterations", "1", "--tasks", "2"]
    assert main(["fewshot", "fit", *settings, "--val-tasks", "2", "--out", str(tmp_path / "r")]) == 0
    capsys.readouterr()
    assert (
        main(["fewshot", "evaluate", str(tmp_path / "r"), "--tasks", "1", "--json", str(tmp_path / "rows.json")]) == 0
    )
    assert "±" not in capsys.readouterr().out
    text = (tmp_path / "rows.json").read_text()
    assert "NaN" not in text
    assert json.loads(text)[0]["ci95"] is None
