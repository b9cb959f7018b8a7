"""Pictures: example curves of regression, accuracy against the number of bases, other ways and shots than trained."""

import io
import statistics
import textwrap
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from warpi.errors import UserError
from warpi.fewshot.episodes import task_name
from warpi.report.plot_style import COLORS, GREY, drawing

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

    def row(self, task: int) -> dict[str, Any]:
        """What is drawn of it, as plain values; the band is mean ± 2 std."""
        (x, y), rest = self.support, self._asdict()
        del rest["support"]
        return {"task": task, "support_x": x, "support_y": y, **rest}


def plot_curves(curves: Sequence[Sequence[Curve]], kind: str) -> bytes:
    """A column a learner, a row a task: the function, the support, the prediction and a band of two deviations."""
    labels = list(dict.fromkeys(curve.label for line in curves for curve in line))
    for line in curves:
        if twice := [curve.label for i, curve in enumerate(line) if curve.label in {c.label for c in line[:i]}]:
            raise UserError(f"two of the runs are {twice[0]}, {line[0].shots} shots; leave one of them out")

    def draw() -> "Figure":
        from matplotlib.figure import Figure

        n, m = len(curves), len(labels)
        figure = Figure(figsize=(1.0 + 2.1 * m, 0.7 + 1.7 * n), layout="constrained")
        panels = figure.subplots(n, m, squeeze=False, sharex=True, sharey="row")
        used = [{labels.index(curve.label) for curve in line} for line in curves]
        for row, (line, axes) in enumerate(zip(curves, panels, strict=True)):
            reach = 1.15 * max(abs(v) for c in line for v in (*c.truth, *c.support[1])) + 0.2
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
        most = max((ax.get_legend_handles_labels() for ax in panels.flat), key=lambda found: len(found[1]))
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
    groups = _lines(with_bases, _name(with_bases, _task))

    def draw() -> "Figure":
        from matplotlib.figure import Figure

        figure = Figure(figsize=(5.5, 3.4 + 0.2 * len(groups)), layout="constrained")
        ax = figure.subplots()
        for i, (label, mine) in enumerate(groups.items()):
            _line(ax, mine, "bases", i, label)
        bases = sorted({int(row["bases"]) for row in with_bases})
        ax.set_xscale("log")
        ax.set_xticks(bases, [str(b) for b in bases], minor=False)
        ax.set_xticks([], minor=True)
        ax.set_xlabel("number of bases")
        _finish(ax, with_bases)
        figure.legend(*ax.get_legend_handles_labels(), loc="outside lower center", ncols=1)
        ax.set_title(textwrap.fill(_about(with_bases, kinds=True), 70), loc="left", fontsize=10)
        return figure

    return _picture(draw, kind)


def plot_versatility(rows: Sequence[Row], kind: str) -> bytes:
    """Learners on tasks with other ways (left) and other shots (right) than those they were trained on."""
    if not rows:
        raise UserError("there is nothing to draw: no runs and no rows")
    if regression := sorted({row["data"] for row in rows if not row["ways"]}):
        raise UserError(f"{regression[0]} is regression, which has no ways; plot --kind curves, or --kind bases")
    name = _name(rows, lambda r: r["data"])
    groups = _lines(rows, lambda r: f"{name(r)}, trained on {task_name(r['train_ways'], r['train_shots'])}", "bases")

    def draw() -> "Figure":
        from matplotlib.figure import Figure
        from matplotlib.ticker import MaxNLocator

        figure = Figure(figsize=(9, 3.8 + 0.2 * len(groups)), layout="constrained")
        left, right = figure.subplots(1, 2)
        for i, (label, mine) in enumerate(groups.items()):
            _line(left, [r for r in mine if r["shots"] == r["train_shots"]], "ways", i, label)
            _line(right, [r for r in mine if r["ways"] == r.get("task_ways", r["train_ways"])], "shots", i, label)
        left.set_xlabel("ways of the test tasks (shots as trained)")
        right.set_xlabel("shots of the test tasks (ways as the run's)")
        for ax in (left, right):
            ax.xaxis.set_major_locator(MaxNLocator(integer=True))
            _finish(ax, rows)
        handles, labels = left.get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=1)
        figure.suptitle(_about(rows, kinds=False), fontsize=10)
        return figure

    return _picture(draw, kind)


def _lines(rows: Sequence[Row], name: Callable[[Row], str], *also: str) -> dict[str, list[Row]]:
    """Rows by the line they belong to, each once. What a line's bars are is a part of its name."""
    if len({row["metric"] for row in rows}) > 1:
        data = _grouped(rows, lambda r: r["metric"])
        found = "; ".join(f"{m}: {', '.join(sorted({r['data'] for r in mine}))}" for m, mine in sorted(data.items()))
        raise UserError(f"scores of different kinds have no axis in common ({found}); draw them one by one")
    lines = {}
    for label, mine in _grouped(rows, apart(rows, name, also=also)).items():
        points: dict[Any, list[Row]] = {}
        for same in _grouped(mine, lambda r: (r.get("seed"), r.get("bases"), r["ways"], r["shots"])).values():
            if len({row["mean"] for row in same}) > 1:
                what = f"{label}, seed {same[0].get('seed')}, {_task(same[0])}"
                raise UserError(f"there are two different scores of {what}; leave one of them out")
            points.setdefault((same[0].get("bases"), same[0]["ways"], same[0]["shots"]), []).append(same[0])
        low, high = (pick(map(len, points.values())) for pick in (min, max))
        bars = (
            "95 % interval" if high == 1 else "± one deviation" if low > 1 else "± one deviation, 95 % interval of one"
        )
        seeds = f"{high} seed{'s' * (high > 1)}" if low == high else f"{low} to {high} seeds"
        lines[f"{label} ({seeds}, {bars})"] = [row for found in points.values() for row in found]
    return lines


def _line(ax: "Axes", rows: Sequence[Row], x: str, i: int, label: str) -> None:
    """Means; bars are 95 % intervals over tasks, or one deviation over seeds where there are several."""
    found = _grouped(rows, lambda r: r[x])
    points = sorted(found)
    mean = [statistics.fmean(r["mean"] for r in found[p]) for p in points]
    bar = [
        statistics.stdev(r["mean"] for r in found[p]) if len(found[p]) > 1 else found[p][0].get("ci95") or 0.0
        for p in points
    ]
    colour, marker = COLORS[i % len(COLORS)], _MARKERS[i % len(_MARKERS)]
    ax.errorbar(
        points, mean, yerr=bar, color=colour, marker=marker, markersize=4, capsize=2, linewidth=1.4, label=label
    )


def _grouped(rows: Sequence[Row], key: Any) -> dict[Any, list[Row]]:
    found: dict[Any, list[Row]] = {}
    for row in rows:
        found.setdefault(key(row), []).append(row)
    return found


def _name(rows: Sequence[Row], what: Callable[[Row], str]) -> Callable[[Row], str]:
    """What a line is called: the learner, and where rows differ in it, what they are about."""
    several = len({what(row) for row in rows}) > 1
    return lambda row: f"{row['label']}, {what(row)}" if several else str(row["label"])


def apart(
    rows: Sequence[Row],
    name: Callable[[Row], str],
    among: Callable[[Row], Any] | None = None,
    also: Sequence[str] = (),
) -> Callable[[Row], str]:
    """A row's name, with all in which rows of that name (or those alike in `among`) differ but their seeds.

    That is how they were trained, on what they were judged, and the fields `also`.
    """
    key = among or name
    differ = {k: _differing([_settings(row, also) for row in mine]) for k, mine in _grouped(rows, key).items()}

    def full(row: Row) -> str:
        settings = _settings(row, also)
        added = " ".join(f"{k}={settings[k]}" for k in differ[key(row)] if k in settings)
        return f"{name(row)}, {added}" if added else name(row)

    return full


def _settings(row: Row, also: Sequence[str]) -> dict[str, Any]:
    """What scores depend on beside the learner's options, as far as the row says it."""
    fields = (*also, "task_ways", "train_ways", "train_shots", "part", "episodes_seed", "iterations")
    found = {name: row[name] for name in fields if row.get(name) is not None}
    return {**found, "weights": row.get("weights", "best"), **(row.get("training") or {})}


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


def _about(rows: Sequence[Row], kinds: bool) -> str:
    """What the rows have in common."""
    data = "/".join(sorted({row["data"] for row in rows}))
    names = {task_name(row["ways"], row["shots"]) for row in rows}
    tasks = "/".join(sorted(names)) if kinds else ""
    protocol = "/".join(sorted({"transductive" if row["transductive"] else "inductive" for row in rows}))
    numbers = "/".join(sorted({str(row["tasks"]) for row in rows}))
    return ", ".join(part for part in (data, tasks, protocol, f"{numbers} test tasks") if part)


def _picture(draw: Any, kind: str) -> bytes:
    metadata = {"png": {"Software": None}, "svg": {"Date": None, "Creator": None}}[kind]
    content = io.BytesIO()
    with drawing():
        draw().savefig(content, format=kind, dpi=150, metadata=metadata)
    return content.getvalue()
