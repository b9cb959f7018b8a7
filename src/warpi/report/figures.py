"""The figures of `warpi figures`, drawn from runs and their stored arrays. Torch is not needed.

Each function takes experiments (runs that differ only in the seed) and returns a figure, or None if the runs do not
contain what it shows.
"""

import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from statistics import fmean, median
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from warpi.report.experiments import Experiment, RunRecord, best_epochs, group, group_by, number
from warpi.report.figure_data import EDGES, KINDS, Array, Arrays, matrix_error, read_arrays
from warpi.report.plot_style import COLORS, GREY, LineStyle, epoch_axis, figure_style, file_stem, line_styles, save
from warpi.report.plots import average_curve, lowest, plot_curve, title
from warpi.utils.terminal import visible

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_LOSS_COLORS = {"raw": COLORS[0], "rectified": COLORS[1]}
_ROWS = (("all labels", None), ("right labels", 0), ("wrong labels", 1))


class Measured(NamedTuple):
    """An experiment, and the arrays of its first run that has some."""

    experiment: Experiment
    arrays: Arrays
    seed: int | None = None  # of that run

    @property
    def title(self) -> str:
        e = self.experiment
        return f"{e.data}, {e.net}, {e.label}"


def draw_figures(runs: Iterable[RunRecord], out: Path, only: Sequence[str] = ()) -> tuple[list[Path], dict[str, Any]]:
    """Write every possible figure as PNG and SVG to `out`; return their paths and the numbers they show.

    `only` selects some of FIGURES.
    """
    experiments = [e for e in group(runs) if e.counted]
    measured = [m for e in experiments if (m := _read_measurements(e)) is not None]
    paths: list[Path] = []
    with figure_style():
        for kind in only or FIGURES:
            for words, some in group_by_figure(kind, experiments, measured).items():
                if (figure := FIGURES[kind][1](some)) is not None:
                    paths += save(figure, out / file_stem(kind, *words))
    return paths, {f"{m.title}, {m.experiment.noise}": numbers(m) for m in measured}


def group_by_figure(
    kind: str, experiments: Sequence[Experiment], measured: Sequence[Measured]
) -> dict[tuple[str, ...], Any]:
    """What each figure of a kind shows, by the words that distinguish the figures."""
    words_of, _ = FIGURES[kind]
    if kind in FROM_ARRAYS:
        return group_by(measured, lambda m: words_of(m.experiment))
    groups = group_by(experiments, words_of)
    # `group` labels each experiment by the settings that differ within the figure.
    return {words: group(run for e in some for run in e.counted) for words, some in groups.items()}


def numbers(m: Measured) -> dict[str, Any]:
    """The numbers that the figures of one experiment show."""
    a = m.arrays
    shown: dict[str, Any] = {}
    if "T_given" in a:
        names = [name for name in ("T_rectified", "T_classifier") if name in a]
        errors = {name.removeprefix("T_"): round(matrix_error(a[name], a["T_given"]), 3) for name in names}
        shown["estimation_error_percent"] = errors
    for name in sorted(a):
        if name.endswith("_mean"):
            kinds = {kind: round(float(v), 4) for kind, v in zip(KINDS, a[name], strict=True) if np.isfinite(v)}
            shown[name.removesuffix("_mean")] = kinds
    if "bin_count" in a:
        share = a["bin_count"] / a["bin_count"].sum()
        shown["ece_percent"] = round(100 * float(np.nansum(share * np.abs(a["bin_accuracy"] - a["bin_confidence"]))), 3)
    if "confusion_test" in a and "T" in a:
        wrong = ~np.eye(len(a["T"]), dtype=bool)
        counts = {"all": wrong, "as_the_noise_has_it": wrong & (a["T"] > 0)}
        shown["test_errors"] = {name: int(a["confusion_test"][cells].sum()) for name, cells in counts.items()}
    return {"seed": m.seed, **shown}


def losses(some: Sequence[Measured]) -> "Figure | None":
    """Histograms of the training losses, for the raw logits and for the logits times v."""
    some = [m for m in some if "loss_rectified" in m.arrays]
    if not some:
        return None
    shown = [row for row in _ROWS if row[1] is None or any(m.arrays["n_kind"][row[1]] for m in some)]
    figure, grid = _panels(some[0].title, len(shown), len(some), (4.6, 2.1))
    top = max(float(m.arrays[f"loss_{which}"].sum(0).max()) for m in some for which in _LOSS_COLORS)
    used = [np.flatnonzero(m.arrays["loss_raw"].sum(0) + m.arrays["loss_rectified"].sum(0))[-1] for m in some]
    for column, m in enumerate(some):
        for row, (name, kind) in enumerate(shown):
            axes = grid[row][column]
            for which, color in _LOSS_COLORS.items():
                counts = m.arrays[f"loss_{which}"]
                means = m.arrays[f"loss_{which}_mean"]
                n = m.arrays["n_kind"]
                mean = np.nansum(means * n) / n.sum() if kind is None else means[kind]
                heights = counts.sum(0) if kind is None else counts[kind]
                axes.stairs(heights, EDGES, fill=True, color=color, alpha=0.35)
                axes.stairs(heights, EDGES, color=color, linewidth=1.4, label=f"{which}, mean {mean:.2f}")
            axes.set(yscale="log", ylim=(0.7, 2 * top), xlim=(0, EDGES[min(max(used) + 2, len(EDGES) - 1)]))
            axes.legend(loc="upper center", fontsize=8, title=name, title_fontsize=9)
            if row == 0:
                axes.set_title(f"noise {m.experiment.noise}", loc="left")
            if column == 0:
                axes.set_ylabel("examples")
        more = f" ({EDGES[-1]:g}: and more)" if max(used) + 2 == len(EDGES) else ""
        grid[-1][column].set_xlabel(f"cross-entropy with the given label{more}")
    return figure


def confusion(some: Sequence[Measured]) -> "Figure | None":
    """The true transition matrix of the labels, and the estimates of the method."""
    some = [m for m in some if "T_given" in m.arrays and "T_rectified" in m.arrays]
    if not some:
        return None
    heads = (
        "true: given labels by true class",
        "rectified predictions by true class",
        "given labels by predicted class",
    )
    figure, grid = _panels(some[0].title, len(some), 3, (4.3, 4.1))
    for row, m in enumerate(some):
        true = m.arrays["T_given"]
        for axes, name, head in zip(grid[row], ("T_given", "T_rectified", "T_classifier"), heads, strict=True):
            T = m.arrays[name]
            image = _matrix(axes, T, m.arrays["classes"], "Blues", 0, 1)
            off = "" if name == "T_given" else f"\nerror {matrix_error(T, true):.1f} %"
            axes.set_title(head + (f"\nnoise {m.experiment.noise}" if name == "T_given" else off), fontsize=9)
            axes.set_xlabel("rectified prediction" if name == "T_rectified" else "given label")
        for axes, text in zip(grid[row], ("true class", "true class", "predicted class"), strict=True):
            axes.set_ylabel(text)
        figure.colorbar(image, ax=list(grid[row]), shrink=0.8, label="fraction of the row")
    return figure


def samples(rows: Sequence[Experiment]) -> "Figure | None":
    """Accuracy and seconds per epoch against L.

    The accuracy is that of the longest runs. The time is that of the shortest length that several L share, because
    such runs are made to measure it. If an L has several of them, the fastest counts, as other load slows runs down.
    """
    families: dict[str, dict[int, list[Experiment]]] = {}  # by the other options of V
    for e in rows:
        options = {name: value for name, value in e.first.spec["options"].items() if value is not None}
        if e.first.spec["method"] == "warpi" and (n := options.pop("samples", 0)):
            families.setdefault(json.dumps(options, sort_keys=True), {}).setdefault(int(n), []).append(e)
    by_samples = dict(sorted(max(families.values(), key=len, default={}).items()))
    if len(by_samples) < 2:
        return None
    lengths = [n for each in by_samples.values() for n in {_length(e) for e in each}]
    shortest = min((n for n in lengths if lengths.count(n) > 1), default=max(lengths))
    scored = {n: _runs_of_length(each, max(lengths)) for n, each in by_samples.items()}
    brief = {n: _runs_of_length(each, shortest) for n, each in by_samples.items()}
    timed = {n: min(map(_seconds, runs)) for n, runs in brief.items() if runs}
    figure, ((left, right),) = _panels(rows[0].block_title, 1, 2, (4.8, 3.4))
    for i, (name, which) in enumerate((("last epoch", 0), ("best on test (oracle)", 2))):
        epochs = {n: [best_epochs(run)[which] or {} for run in runs] for n, runs in scored.items()}
        points = {n: [a for e in es if (a := number(e, "test_acc")) is not None] for n, es in epochs.items()}
        points = {n: values for n, values in points.items() if values}
        left.plot(list(points), [fmean(v) for v in points.values()], "o-", color=COLORS[i], label=name)
        for n, values in points.items():
            if len(values) > 1:
                left.plot([n] * len(values), values, "o", color=COLORS[i], markersize=3, alpha=0.6)
    left.set_title("test accuracy (%)", loc="left")
    left.legend()
    right.plot(list(timed), list(timed.values()), "s-", color=COLORS[2])
    right.set_title("seconds per epoch", loc="left")
    right.set_ylim(0, 1.25 * max(timed.values()))
    for axes in (left, right):
        axes.set_xscale("log")
        axes.set_xticks(list(by_samples), [str(n) for n in by_samples], minor=False)
        axes.set_xticks([], minor=True)
        axes.set_xlabel("Monte-Carlo samples L")
    return figure


def stability(rows: Sequence[Experiment]) -> "Figure | None":
    """Test accuracy over the epochs, and the meta loss of the methods that have one (at least two)."""
    meta = [e for e in rows if average_curve(e.counted, "meta_loss").epochs]
    if len({e.first.spec["method"] for e in meta}) < 2:
        return None
    shown = meta + [e for e in rows if e not in meta]
    figure, ((left, right),) = _panels(title(rows), 1, 2, (5.2, 3.6))
    accuracies = []
    for e, style in zip(shown, _styles(shown), strict=True):
        accuracies.append(plot_curve(left, e, "test_acc", style, label=e.label))
        plot_curve(right, e, "meta_loss", style)
    left.set_title("test accuracy (%)", loc="left")
    if any(curve.epochs for curve in accuracies):
        bottom = lowest(accuracies)
        top = max(m + s for curve in accuracies for m, s in zip(curve.mean, curve.std, strict=True))
        margin = 0.05 * (top - bottom) + 0.5
        left.set_ylim(max(0, bottom - margin), top + margin)
    right.set_title("loss on the trusted examples after the virtual step", loc="left")
    _log_axis(right)
    for axes in (left, right):
        epoch_axis(axes)
    figure.legend(fontsize=9, loc="outside lower center", ncols=4)
    return figure


def rectifier(some: Sequence[Measured]) -> "Figure | None":
    """Mean v and sigma by given label and predicted class, at the coordinates of both and elsewhere."""
    (m,) = some
    a = m.arrays
    if "v_given" not in a:
        return None
    names = {"v": "mean v", "sigma": "mean σ"}
    rows = [(which, name) for which, name in names.items() if f"{which}_given" in a]
    figure, grid = _panels(f"{m.title}, noise {m.experiment.noise}", len(rows), 3, (4.3, 4.1))
    for row, (which, name) in enumerate(rows):
        shown = [a[f"{which}_{where}"] for where in ("given", "predicted", "other")]
        finite = np.concatenate([x[np.isfinite(x)] for x in shown])
        low, high = float(finite.min()), float(finite.max())
        colors = "viridis"
        if which == "v" and low < 0:  # signed: white marks the change of sign
            high = max(-low, high)
            low = -high
            colors = "RdBu"
        for axes, where, x in zip(grid[row], ("given label", "predicted class", "other classes"), shown, strict=True):
            image = _matrix(axes, x, a["classes"], colors, low, high, log_scale=which == "sigma")
            axes.set(title=f"{name} at the {where}", xlabel="predicted class", ylabel="given label")
        figure.colorbar(image, ax=list(grid[row]), shrink=0.8, label=name)
    return figure


def sigma(rows: Sequence[Experiment]) -> "Figure | None":
    """The mean standard deviation of v's posterior over the epochs: does it collapse?"""
    shown = [e for e in rows if average_curve(e.counted, "sigma").epochs]
    if not shown:
        return None
    several = any("samples=" in e.label for e in shown)  # then the default number is also shown
    figure, ((axes,),) = _panels(f"{rows[0].data}, {rows[0].net}", 1, 1, (7.5, 4.0))
    for e, style in zip(shown, _styles(shown), strict=True):
        many = f" (samples={e.first.spec['options'].get('samples')})" if several and "samples=" not in e.label else ""
        plot_curve(axes, e, "sigma", style, label=f"{e.label}{many}, {e.noise}", band=False)
        logs = average_curve(e.counted, "log_sigma")
        axes.plot(logs.epochs, np.exp(logs.mean), ":", color=style.color)
    axes.plot([], [], ":", color=GREY, label="dotted: geometric mean")
    axes.set_title("σ of the posterior of s (v is a function of s), mean over examples and classes", loc="left")
    _log_axis(axes)
    epoch_axis(axes)
    figure.legend(fontsize=8, loc="outside lower center", ncols=2)
    return figure


def calibration(block: Sequence[Measured]) -> "Figure | None":
    """Fraction of right predictions against their probability."""
    block = [m for m in block if "bin_count" in m.arrays]
    if not block:
        return None
    figure, ((axes,),) = _panels(block[0].experiment.block_title, 1, 1, (6.4, 4.6 + 0.1 * len(block)))
    axes.plot([0, 1], [0, 1], color=GREY, linewidth=1, linestyle=":")
    for m, (color, marker) in zip(block, _styles([m.experiment for m in block]), strict=True):
        a = m.arrays
        enough = a["bin_count"] >= 0.01 * a["bin_count"].sum()  # smaller bins are noise
        label = f"{m.experiment.label}: ECE {numbers(m)['ece_percent']:.1f} %"
        axes.plot(
            a["bin_confidence"][enough],
            a["bin_accuracy"][enough],
            marker=marker.replace("o", "X") or "o",  # points are few: each has a marker
            color=color,
            label=label,
            clip_on=False,
        )
    axes.set(xlim=(0, 1), ylim=(0, 1), xlabel="highest probability", ylabel="fraction that is right")
    axes.set_title("calibration on the test set", loc="left")
    figure.legend(fontsize=8, loc="outside lower center", ncols=2)
    return figure


FIGURES: dict[str, tuple[Callable[[Experiment], tuple[str, ...]], Callable[[Any], "Figure | None"]]] = {
    "losses": (lambda e: (e.data, e.net, e.label), losses),
    "confusion": (lambda e: (e.data, e.net, e.label), confusion),
    "samples": (lambda e: e.block, samples),
    "stability": (lambda e: (*e.block, f"{_length(e)} epochs"), stability),
    "rectifier": (lambda e: (e.data, e.net, e.label, e.noise), rectifier),
    "sigma": (lambda e: (e.data, e.net, f"{_length(e)} epochs"), sigma),
    "calibration": (lambda e: e.block, calibration),
}
"""For each kind of figure: the words that distinguish its figures, and the function that draws one of them."""
FROM_ARRAYS = ("losses", "confusion", "rectifier", "calibration")
"""The figures that are drawn from the stored arrays; the others only need the results of the epochs."""


def _panels(title: str, rows: int, columns: int, size: tuple[float, float]) -> tuple["Figure", Any]:
    """A figure with a grid of axes, each of that size in inches."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(size[0] * columns, size[1] * rows + 0.5), layout="constrained")
    figure.suptitle(visible(title), parse_math=False)
    return figure, figure.subplots(rows, columns, squeeze=False)


def _styles(rows: Sequence[Experiment]) -> list[LineStyle]:
    return line_styles([e.first.spec["method"] for e in rows])


def _matrix(axes: "Axes", x: Array, classes: Array, cmap: str, low: float, high: float, log_scale: bool = False) -> Any:
    """A matrix as an image, with its numbers if there is space for them; unknown values are gray."""
    from matplotlib.colors import LogNorm, Normalize

    norm = LogNorm(max(low, 0.005), max(high, 0.05), clip=True) if log_scale else Normalize(low, high)
    axes.grid(False)
    axes.set_facecolor("#d5d9df")
    image = axes.imshow(np.ma.masked_invalid(x), cmap=cmap, norm=norm)
    if len(x) <= 12:
        names = [str(name)[:12] for name in classes]
        turned = 45 if max(map(len, names)) > 2 else 0
        axes.set_xticks(range(len(x)), names, fontsize=8, rotation=turned, ha="right" if turned else "center")
        axes.set_yticks(range(len(x)), names, fontsize=8)
        for i, j in zip(*np.nonzero(np.isfinite(x)), strict=True):
            if (value := float(x[i, j])) >= 0.005 or low < 0 or low > 0.005:
                light = np.dot((0.2126, 0.7152, 0.0722), np.asarray(image.to_rgba(np.asarray([value])))[0, :3] ** 2.2)
                dark = light < 0.18  # the luminance at which white and black have equal contrast
                text = axes.text(j, i, f"{value:.2f}", ha="center", va="center", fontsize=6, color="w" if dark else "k")
                text.set_in_layout(False)  # it is inside the axes, and measuring it takes time
    return image


def _read_measurements(e: Experiment) -> Measured | None:
    stored = ((run, arrays) for run in e.counted if (arrays := read_arrays(run.path)) is not None)
    return next((Measured(e, arrays, run.spec["seed"]) for run, arrays in stored), None)


def _log_axis(axes: "Axes") -> None:
    from matplotlib.ticker import LogLocator, NullLocator

    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")


def _length(e: Experiment) -> int:
    return int(e.first.spec["recipe"].get("epochs") or 0)


def _runs_of_length(experiments: Sequence[Experiment], epochs: int) -> list[RunRecord]:
    return [run for e in experiments if _length(e) == epochs for run in e.counted]


def _seconds(run: RunRecord) -> float:
    """The median time of an epoch. The first is left out, because kernels are compiled in it."""
    values = [s for epoch in run.epochs if (s := number(epoch, "seconds")) is not None]
    return median(values[1:] or values)
