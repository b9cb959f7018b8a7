"""Render inputs for people: images as PNG or JPEG, features as named cells."""

import io
import math
import os
import re
import struct
import zlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from warpi.data import decode as decoder
from warpi.data.examples import Examples, TensorExamples
from warpi.data.numeric import Columns, format_number
from warpi.data.sparse import SparseExamples

_DECIMAL = re.compile(r"-?\d+(\.\d+(e[+-]?\d+)?|e[+-]?\d+)", re.ASCII)
SIDE = 448  # shorter side of a displayed photo, in pixels


class Cell(NamedTuple):
    """A value of a row that is shown."""

    name: str
    value: str
    speaks: float | None = None  # for the suggestion against the given label; negative: for the given label


def png(pixels: NDArray[np.uint8]) -> bytes:
    """Encode bytes [H, W] or [H, W, 3] as a PNG file."""
    height, width = pixels.shape[:2]
    rows = np.concatenate([np.zeros((height, 1), np.uint8), pixels.reshape(height, -1)], axis=1)  # 0: no filter
    color = 2 if pixels.ndim == 3 else 0

    def chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    header = struct.pack(">IIBBBBB", width, height, 8, color, 0, 0, 0)
    parts = chunk(b"IHDR", header), chunk(b"IDAT", zlib.compress(rows.tobytes(), 6)), chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


def is_picture(examples: TensorExamples, name: str) -> bool:
    """Whether inputs in memory are images: arrays [C, H, W], or scikit-learn's digits."""
    return examples.x.ndim == 4 or (name == "digits" and examples.x.shape[1:] == (64,))


def pixels(x: Tensor) -> NDArray[np.uint8]:
    """Convert an image [C, H, W] of bytes, or a digit [64] of 0..16, to bytes [H, W] or [H, W, 3]."""
    if x.ndim == 1:
        return (255 - x.view(8, 8).clamp(0, 16) * (255 / 16)).round().to(torch.uint8).cpu().numpy()
    image = x.permute(1, 2, 0).cpu().numpy()  # [H, W, C]
    return np.ascontiguousarray(image[:, :, 0] if image.shape[2] == 1 else image)


def photo(root: str, path: str, also: str | None = None) -> bytes | None:
    """An image file, re-encoded as JPEG; None if it cannot be read or is outside its folder and the folder `also`."""
    file = path_inside(root, path, also)
    if file is None:
        return None
    try:
        image = decoder.decode(file, SIDE)
    except decoder.BROKEN:
        return None
    content = io.BytesIO()
    image.save(content, "JPEG", quality=88)
    return content.getvalue()


def path_inside(root: str, path: str, also: str | None = None) -> str | None:
    """The real path of a file of a data set; None if it is outside the folder `root`.

    As in training, a folder directly below the root may be a link to anywhere, but the files in it may not. Links to
    files in the folder `also` are allowed, because a trusted set from a review contains links to images of the data.
    """
    root = os.path.abspath(root)
    full_path = os.path.normpath(os.path.join(root, path))
    if not _is_below(full_path, root):
        return None
    real_path = os.path.realpath(full_path)
    parts = os.path.relpath(full_path, root).split(os.sep)
    folders = [root, *([os.path.join(root, parts[0])] if len(parts) > 1 else []), *([also] if also else [])]
    return real_path if any(_is_below(real_path, os.path.realpath(folder)) for folder in folders) else None


def _is_below(path: str, folder: str) -> bool:
    return path.startswith(os.path.join(folder, ""))


def shorten_number(text: str) -> str:
    """A number with four significant digits; large numbers as integers. Other texts, and integers, stay as they are."""
    if not _DECIMAL.fullmatch(text):
        return text
    value = float(text)
    if not math.isfinite(value):
        return text
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def feature_cells(examples: Examples, row: int, columns: Columns | None) -> list[tuple[str, str]]:
    """The features of one example, or for a table its cells, as (name, value). Texts are not shortened."""
    if isinstance(examples, SparseExamples):
        texts = {name: cells[row] for name, cells in examples.texts.items()}
        x = examples.flat(torch.tensor([row]))[0].numpy()
    else:
        assert isinstance(examples, TensorExamples)  # image files are shown by `photo`
        texts = {}
        x = examples.x[row].flatten().cpu().numpy()
    if columns is not None:
        return list((columns.decode(x) | texts).items())
    return [(f"x{j}", format_number(value)) for j, value in enumerate(x)]


def cells_to_json(cells: Sequence[Cell]) -> list[dict[str, Any]]:
    """Cells for the page."""
    return [
        {"name": c.name, "value": c.value, "short": shorten_number(c.value), "speaks": c.speaks and finite(c.speaks)}
        for c in cells
    ]


def finite(value: float) -> float | None:
    """A number for JSON, which has no NaN and no infinity."""
    return round(value, 6) if math.isfinite(value) else None
