"""The figures: runs and their arrays to pictures. Needs no torch.

Each function takes experiments (runs that differ in the seed alone) and gives a picture, or None where the runs do not
have what it shows.
"""

import json
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from statistics import fmean, median
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from warpi.report.curves import Curve, average_curve, lowest, title
from warpi.report.experiments import Experiment, RunRecord, group, number
from warpi.report.figure_data import EDGES, KINDS, Array, Arrays, error, read
from warpi.report.plot_style import COLORS, GREY, drawing, epoch_axis, looks, save, slug

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

RAW, RECTIFIED = COLORS[0], COLORS[1]
_ROWS = (("all labels", None), ("right labels", 0), ("wrong labels", 1))


class Measured(NamedTuple):
    """An experiment, and the arrays of the first of its runs that has some."""

    experiment: Experiment
    arrays: Arrays
    seed: int | None = None  # of the run that they are of

    @property
    def title(self) -> str:
        e = self.experiment
        return f"{e.data}, {e.net}, {e.label}"


def figures(runs: Iterable[RunRecord], out: Path, only: Sequence[str] = ()) -> tuple[list[Path], dict[str, Any]]:
    """Every figure that the runs allow, as PNG and SVG in `out`, and the numbers that belong to them.

    `only` names some of FIGURES.
    """
    experiments = [e for e in group(runs) if e.counted]
    measured = [m for e in experiments if (m := _measured(e)) is not None]
    paths: list[Path] = []
    with drawing():
        for kind in only or FIGURES:
            for words, draw in FIGURES[kind](experiments, measured):
                if (figure := draw()) is not None:
                    paths += save(figure, out / slug(kind, *words))
    return paths, {f"{m.title}, {m.experiment.noise}": numbers(m) for m in measured}


def numbers(m: Measured) -> dict[str, Any]:
    """What the pictures of one experiment show, as numbers."""
    a, found = m.arrays, dict[str, Any]()
    if "T_given" in a:
        names = [name for name in ("T_rectified", "T_classifier") if name in a]
        found["estimation_error_percent"] = {n.removeprefix("T_"): round(error(a[n], a["T_given"]), 3) for n in names}
    for name in sorted(a):
        if name.endswith("_mean"):
            kinds = {kind: round(float(v), 4) for kind, v in zip(KINDS, a[name], strict=True) if np.isfinite(v)}
            found[name.removesuffix("_mean")] = kinds
    if "bin_count" in a:
        share = a["bin_count"] / a["bin_count"].sum()
        found["ece_percent"] = round(100 * float(np.nansum(share * np.abs(a["bin_accuracy"] - a["bin_confidence"]))), 3)
    if "confusion_test" in a and "T" in a:
        wrong = ~np.eye(len(a["T"]), dtype=bool)
        counts = {"all": wrong, "as_the_noise_has_it": wrong & (a["T"] > 0)}
        found["test_errors"] = {name: int(a["confusion_test"][cells].sum()) for name, cells in counts.items()}
    return {"seed": m.seed, **found}


# -- (a) losses ------------------------------------------------------------------------------------------------------


def losses(some: Sequence[Measured]) -> "Figure | None":
    """How many training examples have which loss, with the logits as they are and multiplied by v."""
    some = [m for m in some if "loss_rectified" in m.arrays]
    if not some:
        return None
    shown = [row for row in _ROWS if row[1] is None or any(m.arrays["n_kind"][row[1]] for m in some)]
    figure, grid = _panels(some[0].title, len(shown), len(some), (4.6, 2.1))
    top = max(float(m.arrays[f"loss_{which}"].sum(0).max()) for m in some for which in ("raw", "rectified"))
    used = [np.flatnonzero(m.arrays["loss_raw"].sum(0) + m.arrays["loss_rectified"].sum(0))[-1] for m in some]
    for column, m in enumerate(some):
        for row, (name, kind) in enumerate(shown):
            axes = grid[row][column]
            for which, colour in (("raw", RAW), ("rectified", RECTIFIED)):
                counts, means = m.arrays[f"loss_{which}"], m.arrays[f"loss_{which}_mean"]
                n = m.arrays["n_kind"]
                mean = np.nansum(means * n) / n.sum() if kind is None else means[kind]
                axes.stairs(counts.sum(0) if kind is None else counts[kind], EDGES, fill=True, color=colour, alpha=0.35)
                axes.stairs(
                    counts.sum(0) if kind is None else counts[kind],
                    EDGES,
                    color=colour,
                    linewidth=1.4,
                    label=f"{which}, mean {mean:.2f}",
                )
            axes.set(yscale="log", ylim=(0.7, 2 * top), xlim=(0, EDGES[min(max(used) + 2, len(EDGES) - 1)]))
            axes.legend(loc="upper center", fontsize=8, title=name, title_fontsize=9)
            if row == 0:
                axes.set_title(f"noise {m.experiment.noise}", loc="left")
            if column == 0:
                axes.set_ylabel("examples")
        more = f" ({EDGES[-1]:g}: and more)" if max(used) + 2 == len(EDGES) else ""
        grid[-1][column].set_xlabel(f"cross-entropy with the given label{more}")
    return figure


# -- (b) transition matrices -----------------------------------------------------------------------------------------


def confusion(some: Sequence[Measured]) -> "Figure | None":
    """The transition matrix of the labels, and what the method makes of it."""
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
            off = "" if name == "T_given" else f"\nerror {error(T, true):.1f} %"
            axes.set_title(head + (f"\nnoise {m.experiment.noise}" if name == "T_given" else off), fontsize=9)
            axes.set_xlabel("rectified prediction" if name == "T_rectified" else "given label")
        for axes, text in zip(grid[row], ("true class", "true class", "predicted class"), strict=True):
            axes.set_ylabel(text)
        figure.colorbar(image, ax=list(grid[row]), shrink=0.8, label="share of the row")
    return figure


# -- (c) the Monte-Carlo number --------------------------------------------------------------------------------------


def samples(rows: Sequence[Experiment]) -> "Figure | None":
    """Accuracy, and seconds an epoch, against L.

    The longest runs tell the accuracy. The shortest that several L have, if shorter, were made to tell the time; of
    several with one L the fastest does, for others beside it can only slow a run down."""
    families: dict[str, dict[int, list[Experiment]]] = {}  # by what else V is
    for e in rows:
        options = {name: value for name, value in e.first.spec["options"].items() if value is not None}
        if e.first.spec["method"] == "warpi" and (n := options.pop("samples", 0)):
            families.setdefault(json.dumps(options, sort_keys=True), {}).setdefault(int(n), []).append(e)
    found = max(families.values(), key=len, default={})
    if len(found) < 2:
        return None
    found = dict(sorted(found.items()))
    lengths = [n for each in found.values() for n in {_length(e) for e in each}]
    longest, brief = max(lengths), min((n for n in lengths if lengths.count(n) > 1), default=max(lengths))
    scored = {n: [run for e in each if _length(e) == longest for run in e.counted] for n, each in found.items()}
    brief_runs = {n: [run for e in each if _length(e) == brief for run in e.counted] for n, each in found.items()}
    timed = {n: min(map(_seconds, runs)) for n, runs in brief_runs.items() if runs}
    figure, ((left, right),) = _panels(f"{rows[0].data}, noise {rows[0].noise}, {rows[0].net}", 1, 2, (4.8, 3.4))
    for i, (name, pick) in enumerate((("last epoch", _last), ("best on test (oracle)", _best))):
        points = {n: [a for run in runs if (a := pick(run)) is not None] for n, runs in scored.items()}
        points = {n: values for n, values in points.items() if values}
        left.plot(list(points), [fmean(v) for v in points.values()], "o-", color=COLORS[i], label=name)
        for n, values in points.items():
            if len(values) > 1:
                left.plot([n] * len(values), values, "o", color=COLORS[i], markersize=3, alpha=0.6)
    left.set_title("test accuracy (%)", loc="left")
    left.legend()
    right.plot(list(timed), list(timed.values()), "s-", color=COLORS[2])
    right.set_title("seconds an epoch", loc="left")
    right.set_ylim(0, 1.25 * max(timed.values()))
    for axes in (left, right):
        axes.set_xscale("log")
        axes.set_xticks(list(found), [str(n) for n in found], minor=False)
        axes.set_xticks([], minor=True)
        axes.set_xlabel("Monte-Carlo samples L")
    return figure


# -- (d) stability ---------------------------------------------------------------------------------------------------


def stability(rows: Sequence[Experiment]) -> "Figure | None":
    """Test accuracy over the epochs, and meta loss of the methods that have one: several of them, others beside."""
    meta = [e for e in rows if average_curve(e.counted, "meta_loss").epochs]
    if len({e.first.spec["method"] for e in meta}) < 2:
        return None
    shown = meta + [e for e in rows if e not in meta]
    figure, ((left, right),) = _panels(title(rows), 1, 2, (5.2, 3.6))
    for e, look in zip(shown, _looks(shown), strict=True):
        for axes, key in ((left, "test_acc"), (right, "meta_loss")):
            curve, (colour, _) = average_curve(e.counted, key), look
            _plot(axes, curve, look, e.label if axes is left else None)
            if len(e.counted) > 1:
                low, high = (np.asarray(curve.mean) + side * np.asarray(curve.std) for side in (-1, 1))
                axes.fill_between(curve.epochs, low, high, color=colour, alpha=0.15, linewidth=0)
    left.set_title("test accuracy (%)", loc="left")
    accuracies = [curve for e in shown if (curve := average_curve(e.counted, "test_acc")).epochs]
    if accuracies:
        bottom, top = lowest(accuracies), max(m + s for curve in accuracies for m, s in zip(*curve[1:], strict=True))
        room = 0.05 * (top - bottom) + 0.5
        left.set_ylim(max(0, bottom - room), top + room)
    right.set_title("loss on the trusted examples after the virtual step", loc="left")
    _log_axis(right)
    for axes in (left, right):
        epoch_axis(axes)
    figure.legend(fontsize=9, loc="outside lower center", ncols=4)
    return figure


# -- (e) what V has learned ------------------------------------------------------------------------------------------


def rectifier(m: Measured) -> "Figure | None":
    """Mean v and sigma by (given label, predicted class), at the coordinates of the two."""
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
        colours = "viridis"
        if which == "v" and low < 0:  # signed: white is where v changes its sign
            high = max(-low, high)
            low, colours = -high, "RdBu"
        for axes, where, x in zip(grid[row], ("given label", "predicted class", "other classes"), shown, strict=True):
            image = _matrix(axes, x, a["classes"], colours, low, high, logarithmic=which == "sigma")
            axes.set(title=f"{name} at the {where}", xlabel="predicted class", ylabel="given label")
        figure.colorbar(image, ax=list(grid[row]), shrink=0.8, label=name)
    return figure


def sigma(rows: Sequence[Experiment]) -> "Figure | None":
    """The mean standard deviation of v's posterior over the epochs: does it collapse?"""
    found = [(e, average_curve(e.counted, "sigma"), average_curve(e.counted, "log_sigma")) for e in rows]
    if not (curves := [each for each in found if each[1].epochs]):
        return None
    several = any("samples=" in e.label for e, *_ in curves)  # then the default number is told, too
    figure, ((axes,),) = _panels(f"{rows[0].data}, {rows[0].net}", 1, 1, (7.5, 4.0))
    for (e, mean, logs), look in zip(curves, _looks([e for e, *_ in curves]), strict=True):
        many = f" (samples={e.first.spec['options'].get('samples')})" if several and "samples=" not in e.label else ""
        _plot(axes, mean, look, f"{e.label}{many}, {e.noise}")
        axes.plot(logs.epochs, np.exp(logs.mean), ":", color=look[0])
    axes.plot([], [], ":", color=GREY, label="dotted: geometric mean")
    axes.set_title("σ of the posterior of s (v is a function of s), mean over examples and classes", loc="left")
    _log_axis(axes)
    epoch_axis(axes)
    figure.legend(fontsize=8, loc="outside lower center", ncols=2)
    return figure


def calibration(block: Sequence[Measured]) -> "Figure | None":
    """How often a prediction is right, against how sure the method is of it."""
    block = [m for m in block if "bin_count" in m.arrays]
    if not block:
        return None
    e = block[0].experiment
    figure, ((axes,),) = _panels(f"{e.data}, noise {e.noise}, {e.net}", 1, 1, (6.4, 4.6 + 0.1 * len(block)))
    axes.plot([0, 1], [0, 1], color=GREY, linewidth=1, linestyle=":")
    for m, (colour, marker) in zip(block, _looks([m.experiment for m in block]), strict=True):
        a, enough = m.arrays, m.arrays["bin_count"] >= 0.01 * m.arrays["bin_count"].sum()  # fewer would be chance
        label = f"{m.experiment.label}: ECE {numbers(m)['ece_percent']:.1f} %"
        axes.plot(
            a["bin_confidence"][enough],
            a["bin_accuracy"][enough],
            marker=marker.replace("o", "X") or "o",  # points are few: each has a marker
            color=colour,
            label=label,
            clip_on=False,
        )
    axes.set(xlim=(0, 1), ylim=(0, 1), xlabel="highest probability", ylabel="share that is right")
    axes.set_title("calibration on the test set", loc="left")
    figure.legend(fontsize=8, loc="outside lower center", ncols=2)
    return figure


# -- which figures there are -----------------------------------------------------------------------------------------

Drawing = tuple[tuple[str, ...], Callable[[], "Figure | None"]]
"""What tells a picture from others of its kind, and how to draw it."""


def _by_method(draw: Callable[[Sequence[Measured]], "Figure | None"]) -> "Maker":
    """A picture for each method (data, network), over its kinds of noise."""
    key: Callable[[Measured], tuple[str, ...]] = lambda m: (m.experiment.data, m.experiment.net, m.experiment.label)
    return lambda _, measured: [(key(some[0]), partial(draw, some)) for some in _together(measured, key)]


def _rectifiers(_: Sequence[Experiment], measured: Sequence[Measured]) -> list[Drawing]:
    words: Callable[[Experiment], tuple[str, ...]] = lambda e: (e.data, e.net, e.label, e.noise)
    return [(words(m.experiment), partial(rectifier, m)) for m in measured]


def _calibrations(_: Sequence[Experiment], measured: Sequence[Measured]) -> list[Drawing]:
    key: Callable[[Measured], tuple[str, ...]] = lambda m: _block(m.experiment)
    return [(key(some[0]), partial(calibration, some)) for some in _together(measured, key)]


def _over(
    key: Callable[[Experiment], tuple[str, ...]], draw: Callable[[Sequence[Experiment]], "Figure | None"]
) -> "Maker":
    """A picture for each key, in which an experiment is called by what tells it from the others that are in it."""
    named: Callable[[Sequence[Experiment]], list[Experiment]] = lambda es: group(run for e in es for run in e.counted)
    return lambda experiments, _: [(key(some[0]), partial(draw, named(some))) for some in _together(experiments, key)]


Maker = Callable[[Sequence[Experiment], Sequence[Measured]], list[Drawing]]
FIGURES: dict[str, Maker] = {
    "losses": _by_method(losses),
    "confusion": _by_method(confusion),
    "samples": _over(lambda e: _block(e), samples),
    "stability": _over(lambda e: (*_block(e), f"{_length(e)} epochs"), stability),
    "rectifier": _rectifiers,
    "sigma": _over(lambda e: (e.data, e.net, f"{_length(e)} epochs"), sigma),
    "calibration": _calibrations,
}
FROM_ARRAYS = ("losses", "confusion", "rectifier", "calibration")


# -- parts -----------------------------------------------------------------------------------------------------------


def _panels(title: str, rows: int, columns: int, size: tuple[float, float]) -> tuple["Figure", Any]:
    """A figure with a grid of axes, each of that size in inches."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(size[0] * columns, size[1] * rows + 0.5), layout="constrained")
    figure.suptitle(title, parse_math=False)
    return figure, figure.subplots(rows, columns, squeeze=False)


def _looks(rows: Sequence[Experiment]) -> list[tuple[str, str]]:
    return looks([e.first.spec["method"] for e in rows])


def _plot(axes: "Axes", curve: Curve, look: tuple[str, str], label: str | None) -> None:
    """A line over the epochs; a dot where there is one epoch alone."""
    n, (colour, marker) = len(curve.epochs), look
    marker = marker or ("o" if n == 1 else "")
    every = max(1, n // 8)
    axes.plot(curve.epochs, curve.mean, color=colour, marker=marker, markevery=every, linewidth=1.5, label=label)


def _matrix(
    axes: "Axes", x: Array, classes: Array, colours: str, low: float, high: float, logarithmic: bool = False
) -> Any:
    """A matrix as an image, with its numbers where there is room for them; grey where nothing is known."""
    from matplotlib.colors import LogNorm, Normalize

    norm = LogNorm(max(low, 0.005), max(high, 0.05), clip=True) if logarithmic else Normalize(low, high)
    axes.grid(False)
    axes.set_facecolor("#d5d9df")
    image = axes.imshow(np.ma.masked_invalid(x), cmap=colours, norm=norm)
    if len(x) <= 12:
        names = [str(name)[:12] for name in classes]
        turned = 45 if max(map(len, names)) > 2 else 0
        axes.set_xticks(range(len(x)), names, fontsize=8, rotation=turned, ha="right" if turned else "center")
        axes.set_yticks(range(len(x)), names, fontsize=8)
        for i, j in zip(*np.nonzero(np.isfinite(x)), strict=True):
            if (value := float(x[i, j])) >= 0.005 or low < 0 or low > 0.005:
                light = np.dot((0.2126, 0.7152, 0.0722), np.asarray(image.to_rgba(np.asarray([value])))[0, :3] ** 2.2)
                dark = light < 0.18  # where white and black stand out equally
                text = axes.text(j, i, f"{value:.2f}", ha="center", va="center", fontsize=6, color="w" if dark else "k")
                text.set_in_layout(False)  # it lies inside: measuring it takes time
    return image


def _measured(e: Experiment) -> Measured | None:
    found = ((run, arrays) for run in e.counted if (arrays := read(run.path)) is not None)
    return next((Measured(e, arrays, run.spec["seed"]) for run, arrays in found), None)


def _together(items: Iterable[Any], key: Any) -> list[list[Any]]:
    """Items of one key beside each other, in the order in which keys are met."""
    found: dict[Any, list[Any]] = {}
    for item in items:
        found.setdefault(key(item), []).append(item)
    return list(found.values())


def _block(e: Experiment) -> tuple[str, str, str]:
    return e.data, e.noise, e.net


def _log_axis(axes: "Axes") -> None:
    from matplotlib.ticker import LogLocator, NullLocator

    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")


def _length(e: Experiment) -> int:
    return int(e.first.spec["recipe"].get("epochs") or 0)


def _seconds(run: RunRecord) -> float:
    """Of an epoch: the median, without the first, in which kernels are compiled."""
    values = [s for epoch in run.epochs if (s := number(epoch, "seconds")) is not None]
    return median(values[1:] or values)


def _last(run: RunRecord) -> float | None:
    return number(run.epochs[-1], "test_acc")


def _best(run: RunRecord) -> float | None:
    return max((a for epoch in run.epochs if (a := number(epoch, "test_acc")) is not None), default=None)
