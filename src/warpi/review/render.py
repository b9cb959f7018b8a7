"""Inputs as people see them: pictures as PNG or JPEG, features by the names of their columns."""

import io
import os
import struct
import zlib

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from warpi.data import decode as decoder
from warpi.data.examples import TensorExamples
from warpi.data.numeric import Columns

SIDE = 448  # the shorter side of a photo as it is shown


def png(pixels: NDArray[np.uint8]) -> bytes:
    """Bytes [H, W] or [H, W, 3] as a PNG file."""
    height, width = pixels.shape[:2]
    rows = np.concatenate([np.zeros((height, 1), np.uint8), pixels.reshape(height, -1)], axis=1)  # 0: no filter
    colour = 2 if pixels.ndim == 3 else 0

    def chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    header = struct.pack(">IIBBBBB", width, height, 8, colour, 0, 0, 0)
    parts = chunk(b"IHDR", header), chunk(b"IDAT", zlib.compress(rows.tobytes(), 6)), chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


def is_picture(examples: TensorExamples, name: str) -> bool:
    """Whether inputs held in memory are images: bytes in three dimensions, or scikit-learn's digits."""
    return examples.x.ndim == 4 or (name == "digits" and examples.x.shape[1:] == (64,))


def pixels(x: Tensor) -> NDArray[np.uint8]:
    """An image [C, H, W] of bytes, or a digit [64] of 0..16 (dark on light), as bytes [H, W] or [H, W, 3]."""
    if x.ndim == 1:
        return (255 - x.view(8, 8).clamp(0, 16) * (255 / 16)).round().to(torch.uint8).cpu().numpy()
    image = x.permute(1, 2, 0).cpu().numpy()  # [H, W, C]
    return np.ascontiguousarray(image[:, :, 0] if image.shape[2] == 1 else image)


def photo(root: str, path: str) -> bytes | None:
    """An image file, decoded and written anew as JPEG; None where it cannot be read or lies outside its folder."""
    if (real := inside(root, path)) is None:
        return None
    try:
        image = decoder.decode(real, SIDE)
    except decoder.BROKEN:
        return None
    content = io.BytesIO()
    image.save(content, "JPEG", quality=88)
    return content.getvalue()


def inside(root: str, path: str) -> str | None:
    """Where a file of a data set really lies; None where that is outside of its folder.

    As in training, a folder right below the root may be a link (classes may lie anywhere); what is in it may not.
    """
    root = os.path.abspath(root)
    whole = os.path.normpath(os.path.join(root, path))
    if not _below(whole, root):
        return None
    real, parts = os.path.realpath(whole), os.path.relpath(whole, root).split(os.sep)
    homes = [root, os.path.join(root, parts[0])] if len(parts) > 1 else [root]
    return real if any(_below(real, os.path.realpath(home)) for home in homes) else None


def _below(path: str, folder: str) -> bool:
    return path.startswith(os.path.join(folder, ""))


def cells(x: Tensor, columns: Columns | None) -> list[tuple[str, str]]:
    """One example's features [D] as (name, value); those of a table by its columns, as they stood there."""
    values = x.flatten().cpu().numpy()
    if columns is None:
        return [(f"x{j}", number(value)) for j, value in enumerate(values)]
    found, at = list[tuple[str, str]](), 0
    for name, categories in columns.categories.items():
        width = 1 if categories is None else len(categories)
        block, at = values[at : at + width], at + width
        found.append((name, number(block[0]) if categories is None else categories[int(block.argmax())]))
    return found


def number(value: np.floating) -> str:
    """The shortest text that reads as the same float32; whole numbers without a point."""
    text = str(value)
    return text.removesuffix(".0")
