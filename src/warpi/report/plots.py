"""The plots of a report as PNG and SVG: learning curves, and the critical-difference plot of methods."""

import statistics
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

from warpi.report.experiments import Experiment, RunRecord, group, group_by, number
from warpi.report.paired_tests import Ranking
from warpi.report.plot_style import GREY, LineStyle, epoch_axis, figure_style, file_stem, line_styles, save
from warpi.utils.terminal import visible

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


class Curve(NamedTuple):
    """A quantity at the epochs that all runs have: mean and standard deviation over the seeds (0 for one seed)."""

    epochs: list[int]
    mean: list[float]
    std: list[float]


def draw_curves(runs: Iterable[RunRecord], out: Path) -> list[Path]:
    """Write one figure per (data, noise, net) that has a curve, as PNG and SVG. The same runs give the same bytes."""
    groups = [g for g in group(runs) if any(len(run.epochs) > 1 or "test_acc" in run.epochs[0] for run in g.counted)]
    methods = dict(sorted((g.label, str(g.first.spec["method"])) for g in groups))
    styles = dict(zip(methods, line_styles(list(methods.values())), strict=True))
    paths: list[Path] = []
    for block, members in group_by(groups, lambda g: g.block).items():
        name = file_stem("curves", *block)
        while out / f"{name}.png" in paths:  # the names of two blocks may differ only in characters that are replaced
            name += "-other"
        with figure_style():
            paths += save(_draw(sorted(members, key=_last_accuracy, reverse=True), styles), out / name)
    return paths


def average_curve(runs: Sequence[RunRecord], key: str) -> Curve:
    """Mean and sample standard deviation of `key` at each epoch at which all runs have it."""
    tables = [{int(e["epoch"]): v for e in run.epochs if (v := number(e, key)) is not None} for run in runs]
    epochs = sorted(set.intersection(*(set(table) for table in tables)))
    values = [[table[t] for table in tables] for t in epochs]
    means = [statistics.fmean(v) for v in values]
    return Curve(epochs, means, [statistics.stdev(v) if len(v) > 1 else 0.0 for v in values])


def _draw(groups: Sequence[Experiment], styles: Mapping[str, LineStyle]) -> "Figure":
    from matplotlib.figure import Figure  # pyplot would keep it in a global list
    from matplotlib.lines import Line2D

    names = [textwrap.fill(g.label + ("" if g.finished else " (unfinished)"), 60) for g in groups]
    longest = max(len(line) for name in names for line in name.split("\n"))
    columns = max(1, min(len(groups), 110 // (longest + 8)))
    figure = Figure(figsize=(10, 4.2 + 0.22 * -(-len(groups) // columns)), layout="constrained")
    left, right = figure.subplots(1, 2)
    lines = [(g, styles[g.label]) for g in groups]
    accuracies = [plot_curve(left, g, "test_acc", style) for g, style in lines]
    losses = [plot_curve(right, g, "loss", style) for g, style in lines]
    meta_losses = [plot_curve(right, g, "meta_loss", style, "--") for g, style in lines]
    left.set_title("test accuracy", loc="left")
    left.yaxis.set_major_formatter(lambda value, _: f"{value:g}%")
    if any(curve.epochs for curve in accuracies):
        bottom = lowest(accuracies)
        top = max(m for curve in accuracies for m in curve.mean)
        left.set_ylim(bottom=max(0.0, bottom - 0.08 * (top - bottom) - 0.5))
    right.set_title("training loss", loc="left")
    shown = [m for curve in losses + meta_losses for m in curve.mean]
    if shown and min(shown) > 0 and max(shown) > 100 * min(shown):
        right.set_yscale("log")  # small losses would not be visible next to the large ones of other methods
    for axes, curves in ((left, accuracies), (right, losses + meta_losses)):
        epoch_axis(axes)
        if not any(curve.epochs for curve in curves):
            axes.text(0.5, 0.5, "not recorded", ha="center", va="center", transform=axes.transAxes, color=GREY)
            axes.set(xticks=[], yticks=[])
    if any(curve.epochs for curve in meta_losses):
        handles = [Line2D([], [], color=GREY, linestyle="-"), Line2D([], [], color=GREY, linestyle="--")]
        right.legend(handles, ["training examples", "trusted examples (meta loss)"], loc="best")
    figure.suptitle(visible(title(groups)), parse_math=False)
    handles = [Line2D([], [], linewidth=2, color=style.color, marker=style.marker) for _, style in lines]
    legend = figure.legend(handles, names, loc="outside lower center", ncols=columns)
    for text in legend.get_texts():
        text.set_parse_math(False)  # a dollar sign in a label is not math
    return figure


def plot_curve(
    axes: "Axes",
    g: Experiment,
    key: str,
    style: LineStyle,
    dashes: Literal["-", "--"] = "-",
    label: str | None = None,
    band: bool = True,
) -> Curve:
    """Plot the mean over the seeds, and for several seeds a band of one standard deviation. Returns the curve."""
    curve = average_curve(g.counted, key)
    n = len(curve.epochs)
    marker = style.marker or ("o" if n == 1 else "")  # a line of one point would be invisible
    every = max(1, n // 8)
    look = {"color": style.color, "linestyle": dashes, "marker": marker, "markevery": every}
    axes.plot(curve.epochs, curve.mean, linewidth=1.5, label=label, **look)  # type: ignore[arg-type]
    if band and n and len(g.counted) > 1:
        low = [m - s for m, s in zip(curve.mean, curve.std, strict=True)]
        high = [m + s for m, s in zip(curve.mean, curve.std, strict=True)]
        axes.fill_between(curve.epochs, low, high, color=style.color, alpha=0.15, linewidth=0)
    return curve


def lowest(curves: Sequence[Curve]) -> float:
    """The lowest point of the curves. The first tenth of the epochs, a steep rise, is left out."""
    known = [curve for curve in curves if curve.epochs]
    start = max(e for curve in known for e in curve.epochs) // 10
    points = [(e, m - s, curve.epochs[-1]) for curve in known for e, m, s in zip(*curve, strict=True)]
    return min(low for e, low, last in points if e > start or e == last)


def _last_accuracy(g: Experiment) -> float:
    """Accuracy at the last epoch. Sorted by it, the legend has the order of the right ends of the lines."""
    return (average_curve(g.counted, "test_acc").mean or [float("-inf")])[-1]


def title(groups: Sequence[Experiment]) -> str:
    """Data, noise, network, number of seeds, and the meaning of the band."""
    counts = sorted({len(g.counted) for g in groups})
    few, many = counts[0], counts[-1]
    seeds = f"{few} seed{'s' * (few != 1)}" if few == many else f"{few} to {many} seeds"
    band = " (band: ± one standard deviation)" if many > 1 else ""
    return f"{groups[0].block_title}, {seeds}{band}"


def draw_ranks(ranking: Ranking) -> "Figure":
    """A critical-difference plot: methods along an axis of mean ranks; bars join those that are not distinguished.

    Draw and save it within `figure_style`.
    """
    from matplotlib.figure import Figure

    k = len(ranking.methods)
    half = (k + 1) // 2
    start = -0.4 * len(ranking.groups) - 0.9  # height of the first name
    margin = 0.5 + 0.085 * max(len(visible(name)) for name in ranking.methods)  # inches for the names on each side
    width = 2 * margin + 5
    height = 1.1 + 0.13 * len(ranking.groups) + 0.25 * half
    figure = Figure(figsize=(width, height))
    axes = figure.add_axes((margin / width, 0.02, 5 / width, 0.96))
    axes.set_axis_off()
    axes.set(xlim=(0.9, k + 0.1), ylim=(start - 0.75 * half, 1.1))
    axes.plot([1, k], [0, 0], color="black", linewidth=1.2)
    for tick in range(1, k + 1):
        axes.plot([tick, tick], [0, 0.2], color="black", linewidth=1.2)
        axes.text(tick, 0.3, str(tick), ha="center", va="bottom")
    for place, (name, rank) in enumerate(zip(ranking.methods, ranking.ranks, strict=True)):
        left = place < half
        y = start - 0.75 * (place if left else k - 1 - place)
        edge = 0.9 if left else k + 0.1
        axes.plot([rank, rank, edge], [0, y, y], color="black", linewidth=0.8)
        text = f"{visible(name)}  {rank:.2f}" if left else f"{rank:.2f}  {visible(name)}"
        side = "right" if left else "left"
        axes.text(edge + (-0.05 if left else 0.05), y, text, ha=side, va="center", parse_math=False)
    for level, (first, last) in enumerate(ranking.groups, 1):
        ends = [ranking.ranks[first] - 0.03, ranking.ranks[last] + 0.03]
        axes.plot(ends, [-0.4 * level] * 2, color="black", linewidth=4, solid_capstyle="butt")
    return figure
