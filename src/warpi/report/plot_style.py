"""What all pictures share: colours, style, and files that are the same for the same runs."""

import io
import re
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from warpi.errors import UserError, missing_package
from warpi.utils.files import write_with_folder

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's colours, which the colour-blind can tell apart, without the yellow that vanishes on white.
COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
_OFTEN = ("warpi", "mwnet", "ce", "warpi_detc")  # each has a colour to itself; all others share the rest
_MARKERS = ("", "o", "s", "^", "D", "v", "P")  # where there are more lines than colours
GREY = "#5c6470"
_STYLE = {
    "svg.hashsalt": "warpi",  # ids within the file would otherwise be drawn at random
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


@contextmanager
def drawing() -> Iterator[None]:
    """Inside, figures have the style of the house."""
    try:
        import matplotlib.style
    except ImportError as error:
        raise missing_package("matplotlib", "pictures", "report") from error
    with matplotlib.style.context(["default", _STYLE]):
        yield


def save(figure: "Figure", path: Path) -> list[Path]:
    """Write a figure as PATH.png and PATH.svg. The same figure, the same bytes."""
    paths = []
    for kind, metadata in (("png", {"Software": None}), ("svg", {"Date": None, "Creator": None})):
        content = io.BytesIO()
        figure.savefig(content, format=kind, dpi=150, metadata=metadata)
        paths.append(path.with_name(f"{path.name}.{kind}"))
        write_with_folder(paths[-1], content.getvalue())
    return paths


def image_format(path: Path) -> str:
    """The format of an image file by its name: png or svg."""
    if path.suffix not in (".png", ".svg"):
        raise UserError(f"images are written as .png or .svg, got {str(path)!r}")
    return path.suffix[1:]


def slug(kind: str, *words: str) -> str:
    """The name of a picture's file."""
    return f"{kind}-" + re.sub(r"[^a-z0-9.]+", "-", "-".join(words).lower())[:100].strip("-.")


def look(i: int) -> tuple[str, str]:
    """Colour and marker of line i."""
    return COLORS[i % len(COLORS)], _MARKERS[i // len(COLORS) % len(_MARKERS)]


def looks(methods: Sequence[str]) -> list[tuple[str, str]]:
    """Colour and marker of lines of these methods. A method has its colour in every picture, and markers tell lines of
    one colour apart; where all lines are of one method, colours do."""
    n, first = len(COLORS), len(_OFTEN)
    places = [_OFTEN.index(m) if m in _OFTEN else first + zlib.crc32(m.encode()) % (n - first) for m in methods]
    if len(set(methods)) == 1:
        return [look(place + i) for i, place in enumerate(places)]
    return [look(place + n * places[:i].count(place)) for i, place in enumerate(places)]


def epoch_axis(axes: "Axes") -> None:
    """Epochs are whole numbers, also those of short runs."""
    from matplotlib.ticker import MaxNLocator

    axes.set_xlabel("epoch")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1, steps=[1, 2, 5, 10]))
