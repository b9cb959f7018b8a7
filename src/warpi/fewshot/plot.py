"""Pictures: example curves of regression, accuracy against the number of bases, other ways and shots than trained."""

import io
import statistics
import textwrap
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from warpi.errors import UserError
from warpi.report.pictures import COLOURS, GREY, drawing

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Row = Mapping[str, Any]
_MARKERS = ("o", "s", "^", "D", "v", "P", "X")


class Curve(NamedTuple):
    """A learner on one task."""

    label: str
    shots: int
    support: tuple[Sequence[float], Sequence[float]]
    x: Sequence[float]
    truth: Sequence[float]
    mean: Sequence[float]
    std: Sequence[float] | None
    mse: float


def plot_curves(curves: Sequence[Sequence[Curve]], kind: str) -> bytes:
    """A column a learner, a row a task: the function, the support, the prediction and a band of two deviations."""

    def draw() -> "Figure":
        from matplotlib.figure import Figure

        n, m = len(curves), max(map(len, curves))
        figure = Figure(figsize=(1.0 + 2.1 * m, 0.7 + 1.7 * n), layout="constrained")
        panels = figure.subplots(n, m, squeeze=False, sharex=True, sharey="row")
        for line, axes in zip(curves, panels, strict=True):
            reach = 1.15 * max(abs(v) for c in line for v in (*c.truth, *c.support[1])) + 0.2
            for i, (curve, ax) in enumerate(zip(line, axes, strict=False)):
                _curve(ax, curve, COLOURS[i % len(COLOURS)])
                ax.set_ylim(-reach, reach)
                ax.set_title(
                    ("" if line is not curves[0] else f"{curve.label}\n") + f"MSE {curve.mse:.3g}",
                    loc="left",
                    fontsize=9,
                )
            axes[0].set_ylabel(f"{line[0].shots} shots")
            for ax in axes[len(line) :]:
                ax.set_axis_off()
        most = max((ax.get_legend_handles_labels() for ax in panels[0]), key=lambda found: len(found[1]))
        figure.legend(*most, loc="outside lower center", ncols=4)
        return figure

    return _picture(draw, kind)


def _curve(ax: "Axes", curve: Curve, colour: str) -> None:
    ax.plot(curve.x, curve.truth, color=GREY, linestyle="--", linewidth=1, label="function")
    if curve.std is not None:
        low, high = ([m + s * d for m, d in zip(curve.mean, curve.std, strict=True)] for s in (-2, 2))
        ax.fill_between(curve.x, low, high, color=colour, alpha=0.18, linewidth=0, label="± 2 standard deviations")
    ax.plot(curve.x, curve.mean, color=colour, linewidth=1.6, label="prediction")
    ax.plot(*curve.support, "o", color="black", markersize=4, label="support")


def plot_bases(rows: Sequence[Row], kind: str) -> bytes:
    """The score against the number of bases, a line a learner."""
    with_bases = [row for row in rows if row.get("bases")]
    if len({row["bases"] for row in with_bases}) < 2:
        raise UserError("runs with different numbers of bases are needed; train some with --bases 50, --bases 200, ...")

    def draw() -> "Figure":
        from matplotlib.figure import Figure

        figure = Figure(figsize=(5.5, 3.6), layout="constrained")
        ax = figure.subplots()
        for i, (label, mine) in enumerate(_grouped(with_bases, _name(with_bases, _task)).items()):
            _line(ax, mine, "bases", i, label)
        bases = sorted({int(row["bases"]) for row in with_bases})
        ax.set_xscale("log")
        ax.set_xticks(bases, [str(b) for b in bases], minor=False)
        ax.set_xticks([], minor=True)
        ax.set_xlabel("number of bases")
        _finish(ax, with_bases)
        ax.set_title(textwrap.fill(_about(with_bases, kinds=True), 70), loc="left", fontsize=10)
        return figure

    return _picture(draw, kind)


def plot_versatility(rows: Sequence[Row], kind: str) -> bytes:
    """Learners on tasks with other ways (left) and other shots (right) than those they were trained on."""
    name = _name(rows, lambda r: r["data"])
    groups = _grouped(rows, lambda r: f"{name(r)}, trained on {r['train_ways']}-way {r['train_shots']}-shot")

    def draw() -> "Figure":
        from matplotlib.figure import Figure

        figure = Figure(figsize=(9, 3.8 + 0.2 * len(groups)), layout="constrained")
        left, right = figure.subplots(1, 2)
        for i, (label, mine) in enumerate(groups.items()):
            _line(left, [r for r in mine if r["shots"] == r["train_shots"]], "ways", i, label)
            _line(right, [r for r in mine if r["ways"] == r.get("task_ways", r["train_ways"])], "shots", i, label)
        left.set_xlabel("ways of the test tasks (shots as trained)")
        right.set_xlabel("shots of the test tasks (ways as the run's)")
        for ax in (left, right):
            _finish(ax, rows, legend=False)
        handles, labels = left.get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=1)
        figure.suptitle(_about(rows, kinds=False), fontsize=10)
        return figure

    return _picture(draw, kind)


def _line(ax: "Axes", rows: Sequence[Row], x: str, i: int, label: str) -> None:
    """Means; bars are 95 % intervals over tasks, or one deviation over seeds where there are several."""
    found = _grouped(rows, lambda r: r[x])
    points = sorted(found)
    mean = [statistics.fmean(r["mean"] for r in found[p]) for p in points]
    bar = [statistics.stdev(r["mean"] for r in found[p]) if len(found[p]) > 1 else found[p][0]["ci95"] for p in points]
    colour, marker = COLOURS[i % len(COLOURS)], _MARKERS[i % len(_MARKERS)]
    ax.errorbar(
        points, mean, yerr=bar, color=colour, marker=marker, markersize=4, capsize=2, linewidth=1.4, label=label
    )


def _grouped(rows: Sequence[Row], key: Any) -> dict[Any, list[Row]]:
    found: dict[Any, list[Row]] = {}
    for row in rows:
        found.setdefault(key(row), []).append(row)
    return found


def _name(rows: Sequence[Row], what: Callable[[Row], str]) -> Callable[[Row], str]:
    """What a line is called: the learner, and where rows differ in it, what they are about. Only seeds are averaged."""
    several = len({what(row) for row in rows}) > 1
    return lambda row: f"{row['label']}, {what(row)}" if several else str(row["label"])


def _task(row: Row) -> str:
    return f"{row['data']} " + f"{row['ways']}-way {row['shots']}-shot".removeprefix("0-way ")


def _finish(ax: "Axes", rows: Sequence[Row], legend: bool = True) -> None:
    if rows[0]["metric"] == "mse":
        ax.set_yscale("log")
        ax.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
        ax.yaxis.set_minor_formatter(lambda value, _: f"{value:g}")
        ax.set_ylabel("mean squared error")
    else:
        ax.yaxis.set_major_formatter(lambda value, _: f"{value:g}%")
    if legend:
        ax.legend(loc="best")


def _about(rows: Sequence[Row], kinds: bool) -> str:
    """What the rows have in common."""
    data = "/".join(sorted({row["data"] for row in rows}))
    names = {f"{row['ways']}-way {row['shots']}-shot".removeprefix("0-way ") for row in rows}
    tasks = "/".join(sorted(names)) if kinds else ""
    protocol = "/".join(sorted({"transductive" if row["transductive"] else "inductive" for row in rows}))
    numbers = "/".join(sorted({str(row["tasks"]) for row in rows}))
    seeds = len({row.get("seed") for row in rows})
    several = f"{seeds} seeds (± one deviation)" if seeds > 1 else ""
    return ", ".join(part for part in (data, tasks, protocol, f"{numbers} test tasks", several) if part)


def _picture(draw: Any, kind: str) -> bytes:
    metadata = {"png": {"Software": None}, "svg": {"Date": None, "Creator": None}}[kind]
    content = io.BytesIO()
    with drawing():
        draw().savefig(content, format=kind, dpi=150, metadata=metadata)
    return content.getvalue()
