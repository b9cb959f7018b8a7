"""Charts as inline SVG: they take the colours of the page, and so its dark mode, and need no library and no file."""

import html
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from warpi.report.curves import Line

esc = html.escape
COLORS = 7  # classes c0 .. c6 of page.css
_DASHES = ("", "7 3", "2 3", "9 3 2 3")  # where there are more lines than colours
_WIDTH, _HEIGHT = 400, 230
_LEFT, _RIGHT, _TOP, _BOTTOM = 46, 10, 10, 38


class Series(NamedTuple):
    """A line of a chart."""

    label: str
    line: Line
    look: int  # which colour and dash


def swatch(look: int) -> str:
    """A piece of the line, for a legend."""
    return f'<svg class="swatch" viewBox="0 0 28 8" aria-hidden="true"><path {_stroke(look)} d="M0 4H28"/></svg>'


def lines(what: str, series: Sequence[Series], unit: str = "", low: float | None = None) -> str:
    """Means over the epochs, with a band of one standard deviation; logarithmic where values are too far apart."""
    shown = [s for s in series if s.line.epochs]
    values = [v for s in shown for v in s.line.mean]
    edges = [m + side * d for s in shown for m, d in zip(s.line.mean, s.line.std, strict=True) for side in (-1, 1)]
    logarithmic = min(values) > 0 and max(values) > 100 * min(values)
    bottom = low if low is not None else min(values) if logarithmic else min(0.0, *edges)
    y = _Axis(bottom, max(values) if logarithmic else max(edges), _HEIGHT - _BOTTOM, _TOP + 2, logarithmic)
    first, last = min(s.line.epochs[0] for s in shown), max(s.line.epochs[-1] for s in shown)
    x = _Axis(first, last, _LEFT, _WIDTH - _RIGHT)
    steps = sorted({round(v) for v in x.ticks(5)})
    wide, high = _WIDTH - _LEFT - _RIGHT, _HEIGHT - _TOP - _BOTTOM
    inside = f'x="{_LEFT}" y="{_TOP}" width="{wide}" height="{high}" viewBox="{_LEFT} {_TOP} {wide} {high}"'
    parts = [_grid(y, unit), _below([(x(t), str(t)) for t in steps], "epoch"), f"<svg {inside}>"]  # it cuts off
    for s in shown:
        up = [f"{x(t):.1f} {y(m + d):.1f}" for t, m, d in zip(*s.line, strict=True)]
        down = [f"{x(t):.1f} {y(m - d):.1f}" for t, m, d in zip(*s.line, strict=True)]
        if any(s.line.std):
            parts.append(f'<path class="band c{s.look % COLORS}" d="M{" L".join(up + down[::-1])}Z"/>')
        middle = [f"{x(t):.1f} {y(m):.1f}" for t, m in zip(s.line.epochs, s.line.mean, strict=True)]
        path = f'<path {_stroke(s.look)} d="M{" L".join(middle)}"'
        parts.append(f"{path}><title>{esc(s.label)}: {s.line.mean[-1]:.4g}{unit}</title></path>")
        if len(middle) == 1:
            parts.append(
                f'<circle class="dot c{s.look % COLORS}" cx="{x(first):.1f}" cy="{y(s.line.mean[0]):.1f}" r="4"/>'
            )
    return _chart(what, [*parts, "</svg>"])


def histogram(
    what: str, counts: Mapping[str, NDArray[Any]], edges: NDArray[Any], unit: str, looks: Mapping[str, int], top: float
) -> str:
    """How many have which value, on a logarithmic axis: one outline for each of some groups, up to `top`."""
    y = _Axis(0.7, max(top, 2.0), _HEIGHT - _BOTTOM, _TOP, True)
    x = _Axis(float(edges[0]), float(edges[-1]), _LEFT, _WIDTH - _RIGHT)
    ground = _HEIGHT - _BOTTOM
    parts = [_grid(y), _below([(x(v), f"{v:g}") for v in x.ticks(6)], unit)]
    for name, values in counts.items():
        points = [f"M{x(float(edges[0])):.1f} {ground}"]
        for left, right, n in zip(edges[:-1], edges[1:], values[: len(edges) - 1], strict=True):
            height = y(float(n)) if n > 0 else ground
            points.append(f"L{x(float(left)):.1f} {height:.1f} L{x(float(right)):.1f} {height:.1f}")
        outline = " ".join([*points, f"L{x(float(edges[-1])):.1f} {ground}"])
        title = f"<title>{esc(name)}: {int(values.sum())}</title>"
        parts.append(f'<path class="fill c{looks[name] % COLORS}" d="{outline}Z">{title}</path>')
        parts.append(f'<path {_stroke(looks[name])} d="{outline}"/>')
    return _chart(what, parts)


def matrix(what: str, counts: NDArray[Any], classes: Sequence[str], rows: str, columns: str) -> str:
    """A confusion matrix: a cell is as deep as its share of the row, and has another colour on the diagonal."""
    K = len(classes)
    size = 34.0 if K <= 12 else max(4.0, 420 / K)
    total = counts.sum(1, keepdims=True)
    share = np.divide(counts, total, out=np.zeros(counts.shape), where=total > 0)
    names = [name if len(name) <= 12 else name[:11] + "…" for name in classes] if K <= 30 else []
    longest = max((len(name) for name in names), default=0)
    slanted = longest > 3 or K > 12
    left = 26 + (7 * longest if names else 0)
    top = 24 + ((5 * longest + 8 if slanted else 14) if names else 0)
    side = K * size
    parts = [
        f'<text x="{left + side / 2}" y="14" text-anchor="middle" class="axis">{esc(columns)}</text>',
        f'<text transform="translate(13 {top + side / 2}) rotate(-90)" text-anchor="middle" class="axis">{esc(rows)}'
        "</text>",
        f'<rect class="ground" x="{left}" y="{top}" width="{side}" height="{side}"/>',
    ]
    for k, name in enumerate(names):
        middle = (k + 0.5) * size
        parts.append(f'<text x="{left - 6}" y="{top + middle + 4}" text-anchor="end">{esc(name)}</text>')
        where = f"translate({left + middle + (4 if slanted else 0)} {top - 6})" + (" rotate(-40)" if slanted else "")
        parts.append(f'<text transform="{where}" text-anchor="{"start" if slanted else "middle"}">{esc(name)}</text>')
    parts.append(_cells(counts, share, classes, size, left, top) if K <= 12 else _dots(share, size, left, top))
    slack = 3 * longest if slanted and names else 2
    width = left + side + slack
    box = f'viewBox="0 0 {width:.0f} {top + side + 2:.0f}" role="img" aria-label="{esc(what)}"'
    box += f' style="max-width: {1.25 * width:.0f}px"'  # few classes would fill the page
    return f'<svg class="matrix" {box}>{"".join(parts)}</svg>'


def _cells(
    counts: NDArray[Any], share: NDArray[Any], classes: Sequence[str], size: float, left: float, top: float
) -> str:
    """Every cell that is not empty, with its number."""
    parts = []
    for i, j in zip(*np.nonzero(counts), strict=True):
        x, y, deep = left + j * size, top + i * size, 0.08 + 0.92 * float(share[i, j])
        kind = "hit" if i == j else "miss"
        words = f"{classes[i]} → {classes[j]}: {int(counts[i, j])}, {100 * share[i, j]:.1f} %"
        parts.append(
            f'<rect class="{kind}" x="{x}" y="{y}" width="{size}" height="{size}" fill-opacity="{deep:.2f}">'
            f"<title>{esc(words)}</title></rect>"
            f'<text x="{x + size / 2}" y="{y + size / 2 + 4}" text-anchor="middle" '
            f'class="{"over" if deep > 0.55 else "number"}">{_short(int(counts[i, j]))}</text>'
        )
    return "".join(parts)


def _dots(share: NDArray[Any], size: float, left: float, top: float) -> str:
    """Many cells, without numbers: one path for each depth."""
    levels, parts = 8, []
    deep = np.ceil(levels * share).astype(int)  # 0: empty
    on = np.eye(len(share), dtype=bool)
    for kind, here in (("hit", on), ("miss", ~on)):
        for level in range(1, levels + 1):
            cells = zip(*np.nonzero(here & (deep == level)), strict=True)
            path = "".join(
                f"M{left + j * size:.1f} {top + i * size:.1f}h{size:.1f}v{size:.1f}h-{size:.1f}z" for i, j in cells
            )
            if path:
                parts.append(f'<path class="{kind}" fill-opacity="{level / levels:.2f}" d="{path}"/>')
    return "".join(parts)


class _Axis:
    """From values to places."""

    def __init__(self, low: float, high: float, start: float, end: float, logarithmic: bool = False) -> None:
        self.scale: Callable[[float], float] = (lambda v: math.log10(max(v, 1e-12))) if logarithmic else (lambda v: v)
        if high <= low:
            low, high = (low / 2, high * 2) if logarithmic else (low - 0.5, high + 0.5)
        self.low, self.high, self.logarithmic = low, high, logarithmic
        self.start, self.end = start, end

    def __call__(self, value: float) -> float:
        low, high = self.scale(self.low), self.scale(self.high)
        part = (self.scale(value) - low) / (high - low)
        return self.start + part * (self.end - self.start)

    def ticks(self, n: int) -> list[float]:
        """About n round values inside."""
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


def _grid(y: _Axis, unit: str = "") -> str:
    parts = []
    for value in y.ticks(5):
        at = y(value)
        parts.append(f'<path class="grid" d="M{_LEFT} {at:.1f}H{_WIDTH - _RIGHT}"/>')
        parts.append(f'<text x="{_LEFT - 6}" y="{at + 4:.1f}" text-anchor="end">{value:g}{unit}</text>')
    return "".join(parts)


def _below(ticks: Sequence[tuple[float, str]], name: str) -> str:
    parts = [f'<path class="rule" d="M{_LEFT} {_HEIGHT - _BOTTOM}H{_WIDTH - _RIGHT}"/>']
    parts += [
        f'<text x="{at:.1f}" y="{_HEIGHT - _BOTTOM + 15}" text-anchor="middle">{text}</text>' for at, text in ticks
    ]
    middle = (_LEFT + _WIDTH - _RIGHT) / 2
    return "".join(
        [*parts, f'<text x="{middle}" y="{_HEIGHT - 3}" text-anchor="middle" class="axis">{esc(name)}</text>']
    )


def _chart(what: str, parts: Sequence[str]) -> str:
    box = f'viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{esc(what)}"'
    return f'<figure><figcaption>{esc(what)}</figcaption><svg class="chart" {box}>{"".join(parts)}</svg></figure>'


def _stroke(look: int) -> str:
    dash = _DASHES[look // COLORS % len(_DASHES)]
    return f'class="line c{look % COLORS}"' + (f' stroke-dasharray="{dash}"' if dash else "")


def _short(n: int) -> str:
    return str(n) if n < 10_000 else f"{n / 1000:.0f}k"
