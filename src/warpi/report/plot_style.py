"""Style of all figures: colors, markers, axes, and files that do not depend on the time or the machine."""

import io
import re
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from warpi.errors import UserError, missing_package
from warpi.utils.files import write_with_folder

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# The colors of Okabe and Ito, safe for color-blind readers, without the yellow, which is barely visible on white.
COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
_FREQUENT = ("warpi", "mwnet", "ce", "warpi_detc")  # each has its own color; the other methods share the rest
_MARKERS = ("", "o", "s", "^", "D", "v", "P")  # tell lines apart when there are more lines than colors
GREY = "#5c6470"
DPI = 150
_METADATA = {"png": {"Software": None}, "svg": {"Date": None, "Creator": None}}  # no time, no version
_STYLE = {
    "svg.hashsalt": "warpi",  # otherwise the ids in the file are random
    "svg.fonttype": "path",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#e3e6ea",
    "axes.axisbelow": True,
    "font.size": 10.0,
    "axes.titlesize": 11.0,
    "figure.titlesize": 12.0,
    "lines.markersize": 4.0,
    "legend.frameon": False,
}


class LineStyle(NamedTuple):
    """Color and marker of a line."""

    color: str
    marker: str


@contextmanager
def figure_style() -> Iterator[None]:
    """Context manager: apply the common style to figures."""
    try:
        import matplotlib.style
    except ImportError as error:
        raise missing_package("matplotlib", "drawing figures", "report") from error
    with matplotlib.style.context(["default", _STYLE]):
        yield


def save(figure: "Figure", path: Path) -> list[Path]:
    """Write a figure as PATH.png and PATH.svg. The same figure gives the same bytes."""
    paths = [path.with_name(f"{path.name}.{kind}") for kind in _METADATA]
    for file in paths:
        write_with_folder(file, render(figure, file.suffix[1:]))
    return paths


def render(figure: "Figure", kind: str) -> bytes:
    """The content of a png or svg file of a figure."""
    content = io.BytesIO()
    figure.savefig(content, format=kind, dpi=DPI, metadata=_METADATA[kind])
    return content.getvalue()


def image_format(path: Path) -> str:
    """The format of an image file by its name: png or svg."""
    if path.suffix not in (".png", ".svg"):
        raise UserError(f"images are written as .png or .svg, got {str(path)!r}")
    return path.suffix[1:]


def file_stem(kind: str, *words: str) -> str:
    """The name of a figure's file, without its ending."""
    return f"{kind}-" + re.sub(r"[^a-z0-9.]+", "-", "-".join(words).lower())[:100].strip("-.")


def line_style(i: int) -> LineStyle:
    return LineStyle(COLORS[i % len(COLORS)], _MARKERS[i // len(COLORS) % len(_MARKERS)])


def line_styles(methods: Sequence[str]) -> list[LineStyle]:
    """Color and marker of the lines of these methods.

    A method has the same color in every figure, and markers distinguish lines of one color. If all lines belong to one
    method, they have different colors.
    """
    n = len(COLORS)
    first = len(_FREQUENT)
    places = [_FREQUENT.index(m) if m in _FREQUENT else first + zlib.crc32(m.encode()) % (n - first) for m in methods]
    if len(set(methods)) == 1:
        return [line_style(place + i) for i, place in enumerate(places)]
    return [line_style(place + n * places[:i].count(place)) for i, place in enumerate(places)]


def epoch_axis(axes: "Axes") -> None:
    """Label the axis and use whole numbers as ticks, also for short runs."""
    from matplotlib.ticker import MaxNLocator

    axes.set_xlabel("epoch")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1, steps=[1, 2, 5, 10]))
