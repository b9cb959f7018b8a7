"""How the runs went: test accuracy and training loss against the epoch."""

import statistics
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

from warpi.report.experiments import Experiment, RunRecord, group, number
from warpi.report.plot_style import GREY, drawing, epoch_axis, looks, save, slug

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Look = tuple[str, str]  # colour and marker


class Curve(NamedTuple):
    """A quantity over the epochs that every run has, mean and deviation over the seeds (0 for one seed)."""

    epochs: list[int]
    mean: list[float]
    std: list[float]


def draw_curves(runs: Iterable[RunRecord], out: Path) -> list[Path]:
    """One picture for each (data, noise, net) that has results, as PNG and as SVG. Same runs, same bytes."""
    groups = [g for g in group(runs) if g.counted]
    methods = dict(sorted((g.label, str(g.first.spec["method"])) for g in groups))
    looks_of = dict(zip(methods, looks(list(methods.values())), strict=True))
    paths: list[Path] = []
    for block, members in groupby(groups, lambda g: (g.data, g.noise, g.net)):
        name = slug("curves", *block)
        while out / f"{name}.png" in paths:  # two blocks may differ in signs alone
            name += "-other"
        with drawing():
            paths += save(_draw(sorted(members, key=_last, reverse=True), looks_of), out / name)
    return paths


def average_curve(runs: Sequence[RunRecord], key: str) -> Curve:
    """Mean and sample deviation of `key` at each epoch at which all runs have it."""
    tables = [{int(e["epoch"]): v for e in run.epochs if (v := number(e, key)) is not None} for run in runs]
    epochs = sorted(set.intersection(*(set(table) for table in tables)))
    values = [[table[t] for table in tables] for t in epochs]
    return Curve(
        epochs, [statistics.fmean(v) for v in values], [statistics.stdev(v) if len(v) > 1 else 0.0 for v in values]
    )


def _draw(groups: Sequence[Experiment], looks_of: Mapping[str, Look]) -> "Figure":
    from matplotlib.figure import Figure  # the object itself: pyplot would keep it in a global list
    from matplotlib.lines import Line2D

    names = [textwrap.fill(g.label + ("" if g.finished else " (unfinished)"), 60) for g in groups]
    columns = max(1, min(len(groups), 110 // (max(max(map(len, n.split("\n"))) for n in names) + 8)))
    figure = Figure(figsize=(10, 4.2 + 0.22 * -(-len(groups) // columns)), layout="constrained")
    left, right = figure.subplots(1, 2)
    lines = [(g, looks_of[g.label]) for g in groups]
    accuracies = [v for g, look in lines for v in _plot(left, g, "test_acc", look)]
    losses = [v for g, look in lines for v in _plot(right, g, "loss", look)]
    meta_losses = [v for g, look in lines for v in _plot(right, g, "meta_loss", look, "--")]
    left.set_title("test accuracy", loc="left")
    left.yaxis.set_major_formatter(lambda value, _: f"{value:g}%")
    if accuracies:
        bottom, top = lowest([average_curve(g.counted, "test_acc") for g in groups]), max(accuracies)
        left.set_ylim(bottom=max(0.0, bottom - 0.08 * (top - bottom) - 0.5))
    right.set_title("training loss", loc="left")
    shown = losses + meta_losses
    if shown and min(shown) > 0 and max(shown) > 100 * min(shown):
        right.set_yscale("log")  # losses of different methods may be so far apart that the small ones would vanish
    for axes, values in ((left, accuracies), (right, shown)):
        epoch_axis(axes)
        if not values:
            axes.text(0.5, 0.5, "not recorded", ha="center", va="center", transform=axes.transAxes, color=GREY)
            axes.set(xticks=[], yticks=[])
    if meta_losses:
        both = [Line2D([], [], color=GREY, linestyle="-"), Line2D([], [], color=GREY, linestyle="--")]
        right.legend(both, ["training examples", "trusted examples (meta loss)"], loc="best")
    figure.suptitle(title(groups), parse_math=False)
    handles = [Line2D([], [], linewidth=2, color=c, marker=m) for _, (c, m) in lines]
    legend = figure.legend(handles, names, loc="outside lower center", ncols=columns)
    for text in legend.get_texts():
        text.set_parse_math(False)  # a dollar sign in a label is a dollar sign
    return figure


def _plot(axes: "Axes", g: Experiment, key: str, look: Look, style: Literal["-", "--"] = "-") -> list[float]:
    """The mean, a band of one deviation where there are several seeds, a dot where there is one epoch. The means."""
    epochs, mean, std = average_curve(g.counted, key)
    if epochs:
        colour, marker = look
        marker = marker or ("o" if len(epochs) == 1 else "")
        every = max(1, len(epochs) // 8)
        axes.plot(epochs, mean, color=colour, linestyle=style, linewidth=1.6, marker=marker, markevery=every)
        if len(g.counted) > 1:
            low, high = [m - s for m, s in zip(mean, std, strict=True)], [m + s for m, s in zip(mean, std, strict=True)]
            axes.fill_between(epochs, low, high, color=colour, alpha=0.15, linewidth=0)
    return mean


def lowest(lines: Sequence[Curve]) -> float:
    """The lowest point after the first tenth of the epochs, whose steep rise would leave no room for the rest."""
    start = max(e for curve in lines for e in curve.epochs) // 10
    points = [(e, m - s, curve.epochs[-1]) for curve in lines for e, m, s in zip(*curve, strict=True)]
    return min(low for e, low, last in points if e > start or e == last)


def _last(g: Experiment) -> float:
    """What the legend is sorted by, so that it reads like the right end of the lines."""
    return (average_curve(g.counted, "test_acc").mean or [float("-inf")])[-1]


def title(groups: Sequence[Experiment]) -> str:
    """Data, noise, network, how many seeds, and what the band is."""
    counts = sorted({len(g.counted) for g in groups})
    seeds = f"{counts[0]} seed" + "s" * (counts[0] != 1) if len(counts) == 1 else f"{counts[0]} to {counts[-1]} seeds"
    band = " (band: ± one standard deviation)" if counts[-1] > 1 else ""
    return f"{groups[0].data}, noise {groups[0].noise}, {groups[0].net}, {seeds}{band}"
