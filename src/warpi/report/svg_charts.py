"""Templates of the HTML page, and charts as inline SVG, which follow the colors and the dark mode of the page."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from warpi.report.plots import Curve

if TYPE_CHECKING:
    from jinja2 import Environment
    from markupsafe import Markup

COLORS = 7  # classes c0 .. c6 of page.css
_DASHES = ("", "7 3", "2 3", "9 3 2 3")  # tell lines apart when there are more lines than colors
_LEFT, _RIGHT, _TOP, _BOTTOM = 46, 390, 10, 192  # edges of the plotted area
_AREA = {"width": 408, "height": 230, "left": _LEFT, "right": _RIGHT, "top": _TOP, "bottom": _BOTTOM}


@cache
def _environment() -> "Environment":
    from jinja2 import Environment, PackageLoader, StrictUndefined

    loader = PackageLoader("warpi.report")
    return Environment(loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)


def render(template: str, **values: Any) -> "Markup":
    """The text of a file in `report/templates`, filled with these values.

    All values are escaped, except those that a template has rendered.
    """
    from markupsafe import Markup

    return Markup(_environment().get_template(template).render(values))


class Series(NamedTuple):
    """A line of a chart."""

    label: str
    curve: Curve
    look: int  # selects color and dash


class Shape(NamedTuple):
    """A path and its look."""

    kind: str  # a class of page.css: line, band, fill or dot
    path: str
    color: int
    dash: str = ""
    title: str = ""  # shown by the browser when the pointer is above


def stroke(path: str, look: int, title: str = "") -> Shape:
    """A line with the color and the dash of `look`."""
    return Shape("line", path, look % COLORS, _DASHES[look // COLORS % len(_DASHES)], title)


def swatch(look: int) -> Shape:
    """A piece of the line, for a legend."""
    return stroke("M0 4H28", look)


def lines(
    title: str, series: Sequence[Series], unit: str = "", low: float | None = None, x_label: str = "epoch"
) -> "Markup":
    """Means over epochs or another quantity, ± one standard deviation; logarithmic if they are far apart."""
    shown = [s for s in series if s.curve.epochs]
    values = [v for s in shown for v in s.curve.mean]
    edges = [m + side * d for s in shown for m, d in zip(s.curve.mean, s.curve.std, strict=True) for side in (-1, 1)]
    logarithmic = min(values) > 0 and max(values) > 100 * min(values)
    bottom = min(values) if logarithmic else min(0.0, *edges)
    top = max(values) if logarithmic else max(edges)
    y = _Axis(bottom if low is None else low, top, _BOTTOM, _TOP + 2, logarithmic)
    if low is not None and len(ticks := y.ticks(5)) > 1 and not logarithmic:
        step = ticks[1] - ticks[0]
        y.low = step * math.floor(y.low / step + 1e-9)  # the axis begins with a number
    first = min(s.curve.epochs[0] for s in shown)
    x = _Axis(first, max(s.curve.epochs[-1] for s in shown), _LEFT, _RIGHT)
    shapes = []
    for s in shown:
        upper = [f"{x(t):.1f} {y(m + d):.1f}" for t, m, d in zip(*s.curve, strict=True)]
        lower = [f"{x(t):.1f} {y(m - d):.1f}" for t, m, d in zip(*s.curve, strict=True)]
        middle = [f"{x(t):.1f} {y(m):.1f}" for t, m in zip(s.curve.epochs, s.curve.mean, strict=True)]
        if any(s.curve.std):
            shapes.append(Shape("band", f"M{' L'.join(upper + lower[::-1])}Z", s.look % COLORS))
        shapes.append(stroke(f"M{' L'.join(middle)}", s.look, f"{s.label}: {s.curve.mean[-1]:.4g}{unit}"))
        if len(middle) == 1:
            shapes.append(Shape("dot", f"M{middle[0]}m-4 0a4 4 0 1 0 8 0a4 4 0 1 0 -8 0", s.look % COLORS))
    x_ticks = [(x(t), str(t)) for t in sorted({round(v) for v in x.ticks(5)})]
    return _chart(title, y, unit, x_ticks, x_label, shapes, clip=True)


def histogram(
    title: str,
    counts: Mapping[str, NDArray[Any]],
    edges: NDArray[Any],
    x_label: str,
    looks: Mapping[str, int],
    top: float,
) -> "Markup":
    """Histograms of some groups as outlines, on a logarithmic axis that ends at `top`."""
    y = _Axis(0.7, max(top, 2.0), _BOTTOM, _TOP, True)
    x = _Axis(float(edges[0]), float(edges[-1]), _LEFT, _RIGHT)
    shapes = []
    for name, values in counts.items():
        points = [f"M{x(float(edges[0])):.1f} {_BOTTOM}"]
        for left, right, n in zip(edges[:-1], edges[1:], values[: len(edges) - 1], strict=True):
            height = y(float(n)) if n > 0 else _BOTTOM
            points.append(f"L{x(float(left)):.1f} {height:.1f} L{x(float(right)):.1f} {height:.1f}")
        outline = " ".join([*points, f"L{x(float(edges[-1])):.1f} {_BOTTOM}"])
        shapes.append(Shape("fill", f"{outline}Z", looks[name] % COLORS, title=f"{name}: {int(values.sum())}"))
        shapes.append(stroke(outline, looks[name]))
    return _chart(title, y, "", [(x(v), f"{v:g}") for v in x.ticks(6)], x_label, shapes, clip=False)


def matrix(title: str, counts: NDArray[Any], classes: Sequence[str], rows: str, columns: str) -> "Markup":
    """A confusion matrix: the opacity of a cell is its share of the row, and the diagonal has its own color."""
    K = len(classes)
    size = 34.0 if K <= 12 else max(4.0, 420 / K)
    total = counts.sum(1, keepdims=True)
    share = np.divide(counts, total, out=np.zeros(counts.shape), where=total > 0)
    names = [name if len(name) <= 12 else name[:11] + "…" for name in classes] if K <= 30 else []
    longest = max((len(name) for name in names), default=0)
    slanted = longest > 3 or K > 12
    left = 26 + (7 * longest if names else 0)
    top = 24
    if names:
        top += 5 * longest + 8 if slanted else 14
    return render(
        "matrix.svg",
        title=title,
        rows=rows,
        columns=columns,
        names=names,
        slanted=slanted,
        size=size,
        left=left,
        top=top,
        side=K * size,
        width=left + K * size + (max(2.0, 5.5 * longest - size / 2 + 8) if slanted and names else 2),
        cells=list(_cells(counts, share, classes, size, left, top)) if K <= 12 else [],
        paths=[] if K <= 12 else list(_cell_paths(share, size, left, top)),
    )


def _cells(
    counts: NDArray[Any], share: NDArray[Any], classes: Sequence[str], size: float, left: float, top: float
) -> Iterator[dict[str, Any]]:
    """Every cell that is not empty, with its number."""
    for i, j in zip(*np.nonzero(counts), strict=True):
        n = int(counts[i, j])
        yield {
            "kind": "hit" if i == j else "miss",
            "x": left + j * size,
            "y": top + i * size,
            "opacity": 0.08 + 0.92 * float(share[i, j]),
            "title": f"{classes[i]} → {classes[j]}: {n}, {100 * share[i, j]:.1f} %",
            "text": str(n) if n < 10_000 else f"{n / 1000:.0f}k",
        }


def _cell_paths(share: NDArray[Any], size: float, left: float, top: float) -> Iterator[tuple[str, float, str]]:
    """Many cells, without numbers: one path for each level of opacity."""
    levels = 8
    level_of = np.ceil(levels * share).astype(int)  # 0: empty
    diagonal = np.eye(len(share), dtype=bool)
    for kind, mask in (("hit", diagonal), ("miss", ~diagonal)):
        for level in range(1, levels + 1):
            cells = zip(*np.nonzero(mask & (level_of == level)), strict=True)
            corners = [f"M{left + j * size:.1f} {top + i * size:.1f}" for i, j in cells]
            if corners:
                yield kind, level / levels, "".join(f"{at}h{size:.1f}v{size:.1f}h-{size:.1f}z" for at in corners)


class _Axis:
    """Maps values to positions."""

    def __init__(self, low: float, high: float, start: float, end: float, logarithmic: bool = False) -> None:
        self.scale: Callable[[float], float] = (lambda v: math.log10(max(v, 1e-12))) if logarithmic else (lambda v: v)
        if high <= low:
            low, high = (low / 2, high * 2) if logarithmic else (low - 0.5, high + 0.5)
        self.low = low
        self.high = high
        self.start = start
        self.end = end
        self.logarithmic = logarithmic

    def __call__(self, value: float) -> float:
        low, high = self.scale(self.low), self.scale(self.high)
        return self.start + (self.scale(value) - low) / (high - low) * (self.end - self.start)

    def ticks(self, n: int) -> list[float]:
        """About n round values within the range."""
        if self.logarithmic:
            decades = range(math.ceil(math.log10(self.low)), math.floor(math.log10(self.high)) + 1)
            every = max(1, len(decades) // n)
            if len(decades) >= 2:
                return [10.0**d for d in decades[::every]]
        rough = (self.high - self.low) / n
        unit = 10 ** math.floor(math.log10(rough))
        step = next(unit * m for m in (1, 2, 5, 10) if unit * m >= rough * 0.999)
        first = math.ceil(self.low / step - 1e-9)
        return [round(k * step, 10) for k in range(first, math.floor(self.high / step + 1e-9) + 1)]


def _chart(
    title: str,
    y: _Axis,
    unit: str,
    x_ticks: Sequence[tuple[float, str]],
    x_label: str,
    shapes: Sequence[Shape],
    clip: bool,
) -> "Markup":
    return render(
        "chart.svg",
        title=title,
        **_AREA,
        y_ticks=[(y(value), f"{value:g}{unit}") for value in y.ticks(5)],
        x_ticks=x_ticks,
        x_label=x_label,
        shapes=shapes,
        clip=clip,
    )
