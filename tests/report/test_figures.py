"""Figures: arrays against naive loops and closed forms, drawing from small files, and consistent numbers."""

import json
import math
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from warpi import UserError, fit
from warpi.cli.app import main
from warpi.methods.plain import CE
from warpi.methods.warpi import OUTPUTS, WarPI
from warpi.report import figures as draw
from warpi.report.experiments import Experiment, find_runs, group
from warpi.report.figure_data import EDGES, FILE, KINDS, matrix_error, read_arrays, write_arrays
from warpi.report.figure_measures import _means, measure
from warpi.report.plot_style import COLORS, figure_style, line_style, line_styles
from warpi.runs.reopen import reopen

TINY = {"data": "digits", "limit": 400, "epochs": 3, "meta": 20, "batch_size": 32, "threads": 1}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Measured runs of WarPI, WarPI without sampling, and Meta-Weight-Net."""
    folder = tmp_path_factory.mktemp("runs")
    for name, method in (("warpi4", "warpi"), ("detc4", "warpi_detc"), ("mwnet4", "mwnet")):
        fit(folder / name, method=method, noise="flip:0.4", **TINY)
    assert main(["figures", str(folder), "--arrays", "--device", "cpu"]) == 0
    return folder


# -- arrays ----------------------------------------------------------------------------------------------------------


def test_arrays_against_loops(runs: Path) -> None:
    """WarPI without sampling is deterministic, so everything can be recomputed one example at a time."""
    run, a = reopen(runs / "detc4", "cpu"), read_arrays(runs / "detc4")
    assert a is not None
    method, truth, k = run.method, run.truth.clean, run.task.n_classes
    assert isinstance(method, WarPI)
    assert truth is not None
    method.net.eval()
    n, raw, rectified = np.zeros((k, k)), [], []
    given, followed, seen, v_given = np.zeros((k, k)), np.zeros((k, k)), np.zeros((k, k)), np.zeros((k, k))
    for batch in run.task.train.batches(1):
        i, y = int(batch.rows), int(batch.y)
        with torch.no_grad():
            z = method.net(batch.x)
            v = OUTPUTS[method.output](method.V(z, batch.y).mean)
        guess, true = int(z.argmax()), int(truth[i])
        raw.append(float(-z.log_softmax(1)[0, y]))
        rectified.append(float(-(v * z).log_softmax(1)[0, y]))
        given[true, y] += 1
        followed[true, int((v * z).argmax())] += 1
        seen[guess, y] += 1
        n[y, guess] += 1
        v_given[y, guess] += float(v[0, y])
    assert np.array_equal(a["v_count"], n)
    np.testing.assert_allclose(a["T_given"], given / given.sum(1, keepdims=True), atol=1e-6)
    np.testing.assert_allclose(a["T_rectified"], followed / followed.sum(1, keepdims=True), atol=1e-6)
    with np.errstate(invalid="ignore"):
        np.testing.assert_allclose(a["T_classifier"], seen / seen.sum(1, keepdims=True), atol=1e-6)
        np.testing.assert_allclose(a["v_given"], v_given / n, atol=1e-4)
    for name, values in (("raw", raw), ("rectified", rectified)):
        binned, _ = np.histogram(np.clip(values, 0, EDGES[-1] - 1e-9), EDGES)
        assert np.abs(a[f"loss_{name}"].sum(0) - binned).sum() <= 2, "except for rounding at an edge"
        mean = np.nansum(a[f"loss_{name}_mean"] * a["n_kind"]) / a["n_kind"].sum()
        assert mean == pytest.approx(np.mean(values), rel=1e-4)
    wrong = int((run.task.train.y != truth).sum())
    assert a["n_kind"].tolist() == [len(truth) - wrong, wrong, 0]
    assert not any(name.startswith("sigma") for name in a), "sigma was not trained"


def test_calibration_agrees_with_the_results(runs: Path) -> None:
    for name in ("warpi4", "mwnet4"):
        (run,) = find_runs([runs / name])
        a = read_arrays(run.path)
        assert a is not None
        assert a["bin_count"].sum() == run.facts["n_test"]
        share = a["bin_count"] / a["bin_count"].sum()
        assert 100 * np.nansum(share * a["bin_accuracy"]) == pytest.approx(run.epochs[-1]["test_acc"], abs=1e-3)
        (experiment,) = group([run])
        numbers = draw.numbers(draw.Measured(experiment, a))
        assert numbers["ece_percent"] == pytest.approx(run.epochs[-1]["test_ece"], abs=0.01)
        assert ("rectified" in numbers["estimation_error_percent"]) == (name == "warpi4")
        errors, n = numbers["test_errors"], run.facts["n_test"]
        assert 100 * (1 - errors["all"] / n) == pytest.approx(run.epochs[-1]["test_acc"], abs=1e-3)
        to = [max((j for j in range(10) if j != i), key=lambda j: float(a["T_given"][i, j])) for i in range(10)]
        along = sum(int(a["confusion_test"][i, j]) for i, j in enumerate(to))
        assert errors["as_the_noise_has_it"] == along < errors["all"], "flip noise: one other class for each"


def test_means_ignore_nan() -> None:
    """With two classes of which one is given and one predicted, there are no other classes."""
    values = torch.tensor([[1.0, torch.nan], [3.0, 4.0], [5.0, torch.nan]])
    means = _means(values, torch.tensor([0, 0, 2]), 3).tolist()
    assert means[0] == [2, 4]
    assert means[2][0] == 5
    assert all(map(math.isnan, [means[2][1], *means[1]])), "empty groups"


def test_sigma_is_logged_for_methods_that_have_one(runs: Path) -> None:
    logged = {run.path.name: [e.get("sigma") for e in run.epochs] for run in find_runs([runs])}
    assert all(0 < s < 5 for s in logged["warpi4"])
    (run,) = find_runs([runs / "warpi4"])
    assert all(0 < math.exp(e["log_sigma"]) < e["sigma"] for e in run.epochs), "the geometric mean is smaller"
    assert logged["detc4"] == logged["mwnet4"] == [None] * 3


def test_error_of_a_matrix() -> None:
    T = np.array([[0.6, 0.4, 0], [0, 1, 0], [0.2, 0, 0.8]])
    assert matrix_error(T, T) == 0
    assert matrix_error(np.eye(3)[[1, 2, 0]], np.eye(3)) == pytest.approx(100)
    assert matrix_error(np.eye(3), T) == pytest.approx(100 * (0.4 + 0 + 0.2) / 3)
    assert matrix_error(np.array([[0.6, 0.4, 0], [0, 1, 0], [np.nan] * 3]), T) == pytest.approx(100 / 3), (
        "unknown rows count as wrong"
    )


def test_arrays_are_read_without_pickle(tmp_path: Path) -> None:
    assert read_arrays(tmp_path) is None
    names = ["x", "y"]
    kinds, T = np.ones(len(KINDS), np.float32), np.eye(2, dtype=np.float32)
    losses = np.ones((len(KINDS), len(EDGES) - 1), np.float32)
    whole = {"classes": np.array(names), "n_kind": kinds, "loss_raw": losses, "loss_raw_mean": kinds, "T_classifier": T}
    write_arrays(tmp_path, whole)
    stored = read_arrays(tmp_path)
    assert stored is not None
    assert stored["classes"].tolist() == names
    for name in whole:
        for changed in ({name: np.zeros((0, 3))}, {name: np.array("x")}, {name: np.array([1j])}, {"bin_count": kinds}):
            write_arrays(tmp_path, whole | changed)
            with pytest.raises(UserError, match=r"figures\.npz \(\w+ is "):
                read_arrays(tmp_path)
        write_arrays(tmp_path, {k: v for k, v in whole.items() if k != name})
        with pytest.raises(UserError, match=f"{name} is missing"):
            read_arrays(tmp_path)
    with pytest.raises(ValueError):
        write_arrays(tmp_path, {"a": np.array([{}], dtype=object)})
    np.savez(tmp_path / FILE, a=np.array([{}], dtype=object))
    with pytest.raises(UserError, match=r"cannot read .*figures\.npz"):
        read_arrays(tmp_path)
    (tmp_path / FILE).write_bytes(b"no archive")
    with pytest.raises(UserError, match=r"delete it"):
        read_arrays(tmp_path)


def test_only_finished_runs_are_measured(runs: Path, tmp_path: Path) -> None:
    shutil.copytree(runs / "detc4", tmp_path / "a", ignore=shutil.ignore_patterns("done", FILE))
    assert main(["figures", str(tmp_path / "a"), "--arrays"]) == 0
    assert not (tmp_path / "a" / FILE).exists()
    with pytest.raises(UserError, match="not finished"):
        measure(tmp_path / "a", "cpu")


# -- pictures --------------------------------------------------------------------------------------------------------


def test_every_figure_from_small_files(runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without weights, and with reproducible bytes."""
    for name in ("warpi4", "mwnet4"):
        folder = tmp_path / "kept" / name
        shutil.copytree(runs / name, folder, ignore=shutil.ignore_patterns("*.safetensors*", ".*"))
        arrays = read_arrays(folder)
        assert arrays is not None
        small = {key: a[:3, :3] if a.shape == (10, 10) else a for key, a in arrays.items()}  # few numbers to draw
        write_arrays(folder, small | {"classes": arrays["classes"][:3]})
    out = tmp_path / "out"
    assert main(["figures", str(tmp_path / "kept"), "--out", str(out)]) == 0
    expected = {
        "losses-digits-mlp-warpi",
        "confusion-digits-mlp-warpi",
        "rectifier-digits-mlp-warpi-flip-0.4",
        "stability-digits-flip-0.4-mlp-3-epochs",
        "sigma-digits-mlp-3-epochs",
        "calibration-digits-flip-0.4-mlp",
    }
    assert {path.stem for path in out.glob("*.png")} == {path.stem for path in out.glob("*.svg")} == expected
    assert all(path.read_bytes()[:4] == b"\x89PNG" for path in out.glob("*.png"))
    assert str(out / "sigma-digits-mlp-3-epochs.png") in capsys.readouterr().out
    numbers = json.loads((out / "figures.json").read_text())
    assert numbers["digits, mlp, warpi, flip:0.4"]["v_given"].keys() == {"right", "wrong"}
    second = tmp_path / "second"
    assert main(["figures", str(tmp_path / "kept"), "--out", str(second), "--only", "sigma"]) == 0
    for kind in ("png", "svg"):
        assert (second / f"sigma-digits-mlp-3-epochs.{kind}").read_bytes() == (
            out / f"sigma-digits-mlp-3-epochs.{kind}"
        ).read_bytes()
    assert len(list(second.glob("*.png"))) == 1


def test_numbers_name_the_seed_of_their_run(runs: Path, tmp_path: Path) -> None:
    for seed, without in ((0, FILE), (7, "nothing")):
        folder = tmp_path / f"seed{seed}"
        shutil.copytree(runs / "warpi4", folder, ignore=shutil.ignore_patterns("*.safetensors*", ".*", without))
        stored = json.loads((folder / "spec.json").read_text())
        stored["spec"]["seed"] = seed
        (folder / "spec.json").write_text(json.dumps(stored))
    (numbers,) = draw.draw_figures(find_runs([tmp_path]), tmp_path / "out", ["samples"])[1].values()
    assert numbers["seed"] == 7


def test_each_noise_has_its_own_column(runs: Path) -> None:
    (experiment,), a = experiments(runs / "warpi4"), read_arrays(runs / "warpi4")
    assert a is not None
    two = [draw.Measured(replace(experiment, noise=noise), a) for noise in ("flip:0.2", "flip:0.4")]
    with figure_style():
        losses, confusion, rectifier = draw.losses(two), draw.confusion(two), draw.rectifier(two[:1])
        assert losses is not None
        assert confusion is not None
        assert rectifier is not None
        assert [axes.get_title("left") for axes in losses.axes[:2]] == ["noise flip:0.2", "noise flip:0.4"]
        assert len(losses.axes) == 2 * 3
        assert len(confusion.axes) == 2 * (3 + 1), "three matrices and a color scale per row"
        expected = f"error {matrix_error(a['T_rectified'], a['T_given']):.1f} %"
        assert expected in confusion.axes[1].get_title()
        assert len(rectifier.axes) == 2 * (3 + 1)
        a = {name: value for name, value in a.items() if "rectified" not in name and not name.startswith("v_")}
        other = [draw.Measured(experiment, a)]
        assert draw.losses(other) is draw.confusion(other) is draw.rectifier(other) is None


def test_errors_name_the_mistake(runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["figures", str(runs)]) == 2
    assert "--out DIR" in capsys.readouterr().err
    assert main(["figures", str(runs), "--out", str(tmp_path), "--only", "loses"]) == 2
    assert "did you mean 'losses'" in capsys.readouterr().err
    bare = made(tmp_path / "bare", "ce", [50.0, 60.0])
    assert main(["figures", str(bare), "--out", str(tmp_path / "x")]) == 2
    err = capsys.readouterr().err
    assert "for 1 run without weights and without figures.npz" in err
    assert "no figure can be drawn from these runs (of ce): losses needs a finished run whose weights" in err
    assert "stability needs two or more methods with a meta loss" in err
    assert not (tmp_path / "x").exists()


def test_each_requested_figure_that_is_not_drawn_has_a_reason(
    runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Meta-Weight-Net is measured, but has no v."""
    args = ["figures", str(runs / "mwnet4"), "--out", str(tmp_path), "--only"]
    assert main([*args, "rectifier,samples"]) == 2
    err = capsys.readouterr().err
    assert "rectifier needs v, which" in err
    assert "samples needs runs of warpi" in err
    assert "weights" not in err
    assert main([*args, "calibration,sigma"]) == 0
    printed = capsys.readouterr()
    assert "calibration-" in printed.out
    assert printed.err.startswith("warpi: not drawn: sigma needs σ")
    assert len(printed.err.splitlines()) == 1


@dataclass
class Custom(CE):
    """A custom method."""


def test_a_run_that_cannot_be_measured_is_named(runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    custom = tmp_path / "runs" / "mine"
    fit(custom, method=Custom(), noise="flip:0.4", **{**TINY, "epochs": 1})
    capsys.readouterr()
    for flags in (["--arrays"], ["--out", str(tmp_path / "x")]):
        assert main(["figures", str(custom), *flags]) == 2, "no run can be measured"
        first, last = capsys.readouterr().err.splitlines()
        assert f"because the file that defines Custom is unknown: {custom}; run warpi --use FILE.py figures" in first
        assert ("none of these runs could be measured" if flags == ["--arrays"] else "no figure can be drawn") in last
    shutil.copytree(custom, tmp_path / "runs" / "same")
    shutil.copytree(runs / "detc4", tmp_path / "runs" / "detc4")
    (tmp_path / "runs" / "detc4" / FILE).unlink()
    flags = ["--out", str(tmp_path / "out"), "--device", "cpu", "--only", "losses"]
    assert main(["figures", str(tmp_path / "runs"), *flags]) == 0
    printed = capsys.readouterr()
    assert f"is unknown: {custom}, {custom.with_name('same')}; run" in printed.err
    assert len(printed.err.splitlines()) == 1, "one line for all of them"
    assert "losses-digits-mlp-warpi-detc.png" in printed.out
    assert "bin_count" in measure(str(custom), "cpu", method=Custom())
    assert main(["figures", str(custom), "--out", str(tmp_path / "mine")]) == 0, "measured from Python"
    assert [path.name for path in (tmp_path / "mine").glob("*.png")] == ["calibration-digits-flip-0.4-mlp.png"]


def test_a_run_that_cannot_be_read_is_named(runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    spec, results, arrays = (tmp_path / name for name in ("spec", "results", "arrays"))
    for folder in (spec, results, arrays):
        shutil.copytree(runs / "mwnet4", folder, ignore=shutil.ignore_patterns("*.safetensors*", ".*"))
    (spec / "spec.json").write_text("{")
    (results / "results.jsonl").write_text("no json\n" + (results / "results.jsonl").read_text())
    (arrays / FILE).write_bytes(b"no archive")
    bad, out = [str(spec), str(results), str(arrays)], ["--out", str(tmp_path / "out")]
    assert main(["figures", *bad, str(runs / "warpi4"), *out, "--only", "losses"]) == 0
    printed = capsys.readouterr()
    assert len(printed.err.splitlines()) == 3
    assert all(f"warpi: skipped: {path}" in printed.err for path in (spec, results))
    assert f"skipped: cannot read {arrays / FILE}" in printed.err
    assert "losses-digits-mlp-warpi.png" in printed.out
    assert main(["figures", str(spec), *out]) == 2
    assert capsys.readouterr().err.startswith(f"warpi: {spec / 'spec.json'} is not JSON")
    assert main(["figures", *bad, *out]) == 2
    err = capsys.readouterr().err
    assert all(path in err for path in bad)


def made(folder: Path, method: str, accs: list[float], seconds: float = 1.0, **options: Any) -> Path:
    """A run folder like one of `warpi fit`, without weights."""
    folder.mkdir(parents=True)
    changed = {k: v for k, v in options.items() if k == "samples"}
    spec = {"data": "cifar10", "noise": "flip:0.4", "method": method, "seed": 0, "options": options, "changed": changed}
    spec["recipe"] = {"net": "resnet32", "epochs": len(accs)}
    (folder / "spec.json").write_text(json.dumps({"format": "warpi-run/1", "spec": spec}))
    meta = {} if method == "ce" else {"meta_loss": 0.5}
    lines = [
        {"epoch": t, "test_acc": acc, "seconds": 9.0 if t == 1 else seconds, **meta} for t, acc in enumerate(accs, 1)
    ]
    (folder / "results.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "done").touch()
    return folder


def experiments(folder: Path) -> list[Experiment]:
    return group(find_runs([folder]))


def test_samples(tmp_path: Path) -> None:
    """The best and the last epoch of the long runs; the time of the short ones, without the first epoch."""
    for n, last in ((1, 80.0), (4, 82.0), (10, 83.0)):
        made(tmp_path / f"long{n}", "warpi", [70.0, 85.0, 84.0, last], 3.0, samples=n, output="sigmoid")
        made(tmp_path / f"short{n}", "warpi", [10.0, 11.0], 2.0 + n / 100, samples=n, output="sigmoid", mean_init=None)
    made(tmp_path / "long20", "warpi", [70.0, 85.0, 84.0, 81.0], 3.0, samples=20, output="sigmoid")  # not timed
    made(tmp_path / "other", "warpi", [99.0, 99.0, 99.0, 99.0], 0.1, samples=10, output="tanh")
    with figure_style():
        figure = draw.samples(experiments(tmp_path))
        assert figure is not None
        left, right = figure.axes
        last, best = (line.get_xydata().tolist() for line in left.get_lines())  # type: ignore[union-attr]
        assert last == [[1, 80], [4, 82], [10, 83], [20, 81]]
        assert best == [[1, 85], [4, 85], [10, 85], [20, 85]]
        (times,) = (line.get_xydata().tolist() for line in right.get_lines())  # type: ignore[union-attr]
        assert times == [[1, 2.01], [4, 2.04], [10, 2.10]]
        assert draw.samples(experiments(tmp_path / "other")) is None


def test_stability_needs_several_methods_with_the_same_epochs(tmp_path: Path) -> None:
    made(tmp_path / "a" / "mwnet", "mwnet", [50.0, 60.0, 55.0])
    assert draw.stability(experiments(tmp_path / "a")) is None
    made(tmp_path / "a" / "warpi", "warpi", [50.0, 61.0, 62.0])
    made(tmp_path / "a" / "ce", "ce", [50.0, 40.0, 30.0])
    made(tmp_path / "a" / "longer", "warpi", [50.0] * 5)
    groups = draw.group_by_figure("stability", experiments(tmp_path / "a"), [])
    assert len(groups) == 2
    with figure_style():
        drawn = [figure for some in groups.values() if (figure := draw.stability(some)) is not None]
    (figure,) = drawn
    left, right = figure.axes
    assert sorted(str(line.get_label()) for line in left.get_lines()) == ["ce", "mwnet", "warpi"], (
        "labels do not name the epochs"
    )
    assert sum(len(line.get_xydata()) > 0 for line in right.get_lines()) == 2, "plain training has no meta loss"  # type: ignore[arg-type]


def test_stability_shows_bands_and_methods_without_meta_loss(tmp_path: Path) -> None:
    for seed, method, accs in ((0, "mwnet", [50.0, 60.0]), (0, "warpi", [70.0, 80.0]), (1, "warpi", [20.0, 99.0])):
        folder = made(tmp_path / f"{method}{seed}", method, accs)
        stored = json.loads((folder / "spec.json").read_text())
        stored["spec"]["seed"] = seed
        (folder / "spec.json").write_text(json.dumps(stored))
    folder = made(tmp_path / "gce", "gce", [55.0, 58.0])
    lines = [json.loads(line) for line in (folder / "results.jsonl").read_text().splitlines()]
    lines = [{name: value for name, value in line.items() if name != "meta_loss"} for line in lines]
    (folder / "results.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    with figure_style():
        figure = draw.stability(experiments(tmp_path))
        assert figure is not None
        left, right = figure.axes
        assert [line.get_label() for line in left.get_lines()] == ["mwnet", "warpi", "gce"]
        assert "1 to 2 seeds (band: ± one standard deviation)" in figure.get_suptitle()
        assert sum(len(line.get_xydata()) > 0 for line in right.get_lines()) == 2  # type: ignore[arg-type]
        (low, high), deviation = left.get_ylim(), np.std([70.0, 20.0], ddof=1)
        assert low < 45 - deviation
        assert high > 89.5 + np.std([80.0, 99.0], ddof=1)
        for axes in (left, right):
            assert all(tick == int(tick) for tick in axes.get_xticks())


def test_sigma_has_a_logarithmic_axis_and_whole_epochs(runs: Path) -> None:
    with figure_style():
        figure = draw.sigma(experiments(runs / "warpi4"))
        assert figure is not None
        (axes,) = figure.axes
        low, high = axes.get_ylim()
        assert axes.get_yscale() == "log", "to show a collapse"
        for curve in axes.get_lines():  # the arithmetic and the geometric mean
            assert all(low < value < high for value in curve.get_ydata())  # type: ignore[union-attr]
        assert all(tick == int(tick) for tick in axes.get_xticks())


def test_sigma_names_the_number_of_samples_if_there_are_several(tmp_path: Path) -> None:
    for n in (10, 1):
        folder = made(tmp_path / str(n), "warpi", [50.0, 60.0], samples=n)
        stored = json.loads((folder / "spec.json").read_text())
        stored["spec"]["changed"] = {} if n == 10 else {"samples": n}
        (folder / "spec.json").write_text(json.dumps(stored))
        lines = [json.loads(line) | {"sigma": 1.0} for line in (folder / "results.jsonl").read_text().splitlines()]
        (folder / "results.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    for folder, names in ((tmp_path, ["warpi (samples=10)", "warpi (samples=1)"]), (tmp_path / "10", ["warpi"])):
        with figure_style():
            figure = draw.sigma(experiments(folder))
        assert figure is not None
        labels = [str(curve.get_label()) for curve in figure.axes[0].get_lines() if len(curve.get_xdata())]  # type: ignore[arg-type]
        assert [label for label in labels if label.startswith("warpi")] == [f"{name}, flip:0.4" for name in names]


def test_a_method_has_the_same_color_in_every_figure() -> None:
    assert line_styles(["ce", "warpi"]) == line_styles(["warpi", "ce"])[::-1]
    often = line_styles(["warpi", "mwnet", "ce", "warpi_detc", "gce"])
    assert len({color for color, _ in often}) == 5
    many = line_styles(["warpi", "gce", "warpi", "mlc", "elr", "Custom", "gce"])
    assert len(set(many)) == 7, "markers distinguish lines of one color"
    assert many[0][0] == many[2][0] == often[0][0]
    assert line_styles(["warpi"] * 9) == [line_style(i) for i in range(9)], "different colors for a single method"
    assert line_styles(["warpi"])[0][0] == COLORS[0]


def test_numbers_in_a_matrix_have_enough_contrast(runs: Path) -> None:
    """White or black, depending on the contrast; and color scales are labeled."""
    from matplotlib.colors import to_rgb
    from matplotlib.figure import Figure

    def luminance(color: Any) -> float:
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in to_rgb(color)]
        return float(np.dot((0.2126, 0.7152, 0.0722), linear))

    draw._matrix(Figure().subplots(), np.full((2, 2), 0.1), np.array(["a", "b"]), "viridis", 0.1, 0.1, True)
    axes, x = Figure().subplots(), np.linspace(0, 1, 100).reshape(10, 10)
    image = draw._matrix(axes, x, np.array(list("abcdefghij")), "viridis", 0, 1)
    for text in axes.texts:
        j, i = map(int, text.get_position())
        back, front = luminance(image.to_rgba(x[i, j])[:3]), luminance(text.get_color())
        dark, light = sorted((back, front))
        assert (light + 0.05) / (dark + 0.05) > 4.3
    a = read_arrays(runs / "warpi4")
    assert a is not None
    with figure_style():
        figure = draw.rectifier([draw.Measured(experiments(runs / "warpi4")[0], a)])
    assert figure is not None
    assert [axes.get_ylabel() for axes in figure.axes[-2:]] == ["mean v", "mean σ"]
