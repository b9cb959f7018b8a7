"""Figures: regression curves, score against the number of bases, and tasks with other ways and shots."""

import statistics
import textwrap
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from warpi.errors import UserError
from warpi.fewshot.episodes import task_name
from warpi.report.experiments import group_by
from warpi.report.plot_style import COLORS, GREY, figure_style, render

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Row = Mapping[str, Any]
_MARKERS = ("o", "s", "^", "D", "v", "P", "X")


class Curve(NamedTuple):
    """Predictions of a learner on one task."""

    label: str
    shots: int
    support_x: Sequence[float]
    support_y: Sequence[float]
    x: Sequence[float]
    truth: Sequence[float]
    mean: Sequence[float]
    std: Sequence[float] | None
    mse: float

    def row(self, task: int) -> dict[str, Any]:
        """The drawn values as JSON types; the band is mean ± 2 std."""
        return {"task": task, **self._asdict()}


def plot_curves(curves: Sequence[Sequence[Curve]], kind: str) -> bytes:
    """One column per learner, one row per task: function, support, prediction and a band of two standard deviations."""
    labels = list(dict.fromkeys(curve.label for line in curves for curve in line))
    for line in curves:
        twice = [curve.label for i, curve in enumerate(line) if curve.label in {c.label for c in line[:i]}]
        if twice:
            raise UserError(f"two runs are {twice[0]} with {line[0].shots} shots; leave out one of them")

    with figure_style():
        from matplotlib.figure import Figure

        n = len(curves)
        m = len(labels)
        figure = Figure(figsize=(1.0 + 2.1 * m, 0.7 + 1.7 * n), layout="constrained")
        panels = figure.subplots(n, m, squeeze=False, sharex=True, sharey="row")
        used = [{labels.index(curve.label) for curve in line} for line in curves]
        for row, (line, axes) in enumerate(zip(curves, panels, strict=True)):
            reach = 1.15 * max(abs(v) for c in line for v in (*c.truth, *c.support_y)) + 0.2
            first = row == 0 or curves[row - 1][0].shots != line[0].shots
            for curve in line:
                i = labels.index(curve.label)
                _curve(axes[i], curve, COLORS[i % len(COLORS)])
                axes[i].set_ylim(-reach, reach)
                head = textwrap.fill(curve.label, 28) + "\n" if first else ""
                axes[i].set_title(f"{head}MSE {curve.mse:.3g}", loc="left", fontsize=9)
                axes[i].tick_params(labelbottom=not any(i in below for below in used[row + 1 :]))
            axes[min(used[row])].set_ylabel(f"{line[0].shots} shots")
            axes[min(used[row])].tick_params(labelleft=True)
            for i in {*range(m)} - used[row]:
                axes[i].set_axis_off()
        most = max((ax.get_legend_handles_labels() for ax in panels.flat), key=lambda handles: len(handles[1]))
        figure.legend(*most, loc="outside lower center", ncols=4)
        return render(figure, kind)


def _curve(ax: "Axes", curve: Curve, color: str) -> None:
    ax.plot(curve.x, curve.truth, color=GREY, linestyle="--", linewidth=1, label="function")
    if curve.std is not None:
        low, high = ([m + s * d for m, d in zip(curve.mean, curve.std, strict=True)] for s in (-2, 2))
        ax.fill_between(curve.x, low, high, color=color, alpha=0.18, linewidth=0, label="± 2 standard deviations")
    ax.plot(curve.x, curve.mean, color=color, linewidth=1.6, label="prediction")
    ax.plot(curve.support_x, curve.support_y, "o", color="black", markersize=4, label="support")


def plot_bases(rows: Sequence[Row], kind: str) -> bytes:
    """Score against the number of bases, one line per learner."""
    with_bases = [row for row in rows if row.get("bases")]
    if len({row["bases"] for row in with_bases}) < 2:
        raise UserError(
            "this figure needs runs with different numbers of bases; train some with --bases 50, --bases 200, ..."
        )
    groups = _lines(with_bases, _name(with_bases, _task))

    with figure_style():
        from matplotlib.figure import Figure

        figure = Figure(figsize=(5.5, 3.4 + 0.2 * len(groups)), layout="constrained")
        ax = figure.subplots()
        for i, (label, group) in enumerate(groups.items()):
            _line(ax, group, "bases", i, label)
        bases = sorted({int(row["bases"]) for row in with_bases})
        ax.set_xscale("log")
        ax.set_xticks(bases, [str(b) for b in bases], minor=False)
        ax.set_xticks([], minor=True)
        ax.set_xlabel("number of bases")
        _finish(ax, with_bases)
        figure.legend(*ax.get_legend_handles_labels(), loc="outside lower center", ncols=1)
        ax.set_title(textwrap.fill(_describe(with_bases, kinds=True), 70), loc="left", fontsize=10)
        return render(figure, kind)


def plot_versatility(rows: Sequence[Row], kind: str) -> bytes:
    """Learners on tasks with other ways (left) and other shots (right) than those they were trained on."""
    if not rows:
        raise UserError("there are no runs and no rows to draw")
    if regression := sorted({row["data"] for row in rows if not row["ways"]}):
        raise UserError(f"{regression[0]} is regression and has no ways; use plot --kind curves or --kind bases")
    name = _name(rows, lambda r: r["data"])
    groups = _lines(rows, lambda r: f"{name(r)}, trained on {task_name(r['train_ways'], r['train_shots'])}", "bases")

    with figure_style():
        from matplotlib.figure import Figure
        from matplotlib.ticker import MaxNLocator

        figure = Figure(figsize=(9, 3.8 + 0.2 * len(groups)), layout="constrained")
        left, right = figure.subplots(1, 2)
        for i, (label, group) in enumerate(groups.items()):
            _line(left, [r for r in group if r["shots"] == r["train_shots"]], "ways", i, label)
            _line(right, [r for r in group if r["ways"] == r.get("task_ways", r["train_ways"])], "shots", i, label)
        left.set_xlabel("ways of the test tasks (shots as trained)")
        right.set_xlabel("shots of the test tasks (ways as trained)")
        for ax in (left, right):
            ax.xaxis.set_major_locator(MaxNLocator(integer=True))
            _finish(ax, rows)
        handles, labels = left.get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=1)
        figure.suptitle(_describe(rows, kinds=False), fontsize=10)
        return render(figure, kind)


def _lines(rows: Sequence[Row], name: Callable[[Row], str], *also: str) -> dict[str, list[Row]]:
    """Rows by the line they belong to, without duplicates. The name of a line says what its error bars show."""
    if len({row["metric"] for row in rows}) > 1:
        data = group_by(rows, lambda r: r["metric"])
        metrics = "; ".join(
            f"{m}: {', '.join(sorted({r['data'] for r in group}))}" for m, group in sorted(data.items())
        )
        raise UserError(f"scores of different kinds cannot share an axis ({metrics}); draw them one by one")
    lines = {}
    for label, group in group_by(rows, distinguish(rows, name, also=also)).items():
        distinct = []
        for same in group_by(group, lambda r: (r.get("seed"), r.get("bases"), r["ways"], r["shots"])).values():
            if len({row["mean"] for row in same}) > 1:
                what = f"{label}, seed {same[0].get('seed')}, {_task(same[0])}"
                raise UserError(f"there are two different scores for {what}; leave out one of them")
            distinct.append(same[0])
        points = group_by(distinct, lambda r: (r.get("bases"), r["ways"], r["shots"]))
        low = min(map(len, points.values()))
        high = max(map(len, points.values()))
        spread = "± 1 SD" if low > 1 else "± 1 SD, or 95 % interval for one seed"
        bars = "95 % interval" if high == 1 else spread
        seeds = f"{high} seed{'s' * (high > 1)}" if low == high else f"{low} to {high} seeds"
        lines[f"{label} ({seeds}, {bars})"] = distinct
    return lines


def _line(ax: "Axes", rows: Sequence[Row], x: str, i: int, label: str) -> None:
    """Plot means, with the standard deviation over several seeds or the 95 % interval over tasks as error bars."""
    groups = group_by(rows, lambda r: r[x])
    points = sorted(groups)
    mean = [statistics.fmean(r["mean"] for r in groups[p]) for p in points]
    bar = [
        statistics.stdev(r["mean"] for r in groups[p]) if len(groups[p]) > 1 else groups[p][0].get("ci95") or 0.0
        for p in points
    ]
    color = COLORS[i % len(COLORS)]
    marker = _MARKERS[i % len(_MARKERS)]
    ax.errorbar(points, mean, yerr=bar, color=color, marker=marker, markersize=4, capsize=2, linewidth=1.4, label=label)


def _name(rows: Sequence[Row], what: Callable[[Row], str]) -> Callable[[Row], str]:
    """Name of a line: the learner, followed by `what` if that differs between the rows."""
    several = len({what(row) for row in rows}) > 1
    return lambda row: f"{row['label']}, {what(row)}" if several else str(row["label"])


def distinguish(
    rows: Sequence[Row],
    name: Callable[[Row], str],
    among: Callable[[Row], Any] | None = None,
    also: Sequence[str] = (),
) -> Callable[[Row], str]:
    """Extend the names of rows by the settings in which rows of the same name (or same `among`) differ, except seeds.

    The settings are those of training and evaluation, and the fields `also`.
    """
    key = among or name
    differ = {k: _differing([_settings(row, also) for row in group]) for k, group in group_by(rows, key).items()}

    def full(row: Row) -> str:
        settings = _settings(row, also)
        added = " ".join(f"{k}={settings[k]}" for k in differ[key(row)] if k in settings)
        return f"{name(row)}, {added}" if added else name(row)

    return full


def _settings(row: Row, also: Sequence[str]) -> dict[str, Any]:
    """The settings that scores depend on, except the options of the learner."""
    fields = (*also, "task_ways", "train_ways", "train_shots", "part", "episodes_seed", "iterations")
    known = {name: row[name] for name in fields if row.get(name) is not None}
    return {**known, "weights": row.get("weights", "best"), **(row.get("training") or {})}


def _differing(settings: Sequence[Mapping[str, Any]]) -> list[str]:
    names = dict.fromkeys(name for one in settings for name in one)
    return [name for name in names if len({str(one[name]) for one in settings if name in one}) > 1]


def _task(row: Row) -> str:
    return f"{row['data']} {task_name(row['ways'], row['shots'])}"


def _finish(ax: "Axes", rows: Sequence[Row]) -> None:
    if rows[0]["metric"] == "mse":
        ax.set_yscale("log")
        ax.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
        ax.yaxis.set_minor_formatter(lambda value, _: f"{value:g}" if f"{value:e}"[0] in "235" else "")
        ax.set_ylabel("mean squared error")
    else:
        ax.set_ylabel("accuracy, %")


def _describe(rows: Sequence[Row], kinds: bool) -> str:
    """The data, tasks and protocol of the rows, for a title."""
    data = "/".join(sorted({row["data"] for row in rows}))
    names = {task_name(row["ways"], row["shots"]) for row in rows}
    tasks = "/".join(sorted(names)) if kinds else ""
    protocol = "/".join(sorted({"transductive" if row["transductive"] else "inductive" for row in rows}))
    numbers = "/".join(sorted({str(row["tasks"]) for row in rows}))
    return ", ".join(part for part in (data, tasks, protocol, f"{numbers} test tasks") if part)
