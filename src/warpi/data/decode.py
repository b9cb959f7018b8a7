"""Decode image files to pixels, and the main program of a reader process.

A reader process runs this file by its path and needs only Pillow. It starts in 50 ms with 15 MB of memory, without a
fork or a copy of the main program, and ends by itself when the main process has ended.
"""

import hashlib
import json
import os
import signal
import stat
import struct
import sys
import warnings
import zlib
from collections.abc import Iterator
from contextlib import suppress
from typing import IO, TYPE_CHECKING

if TYPE_CHECKING:
    from PIL.Image import Image

# Exceptions that Pillow raises for damaged files; Warning is for images with too many pixels (see `decode`).
BROKEN: tuple[type[Exception], ...] = (OSError, SyntaxError, ValueError, TypeError, AttributeError, LookupError)
BROKEN += (EOFError, ArithmeticError, RuntimeError, MemoryError, struct.error, zlib.error, Warning)
SUFFIXES = (".jpg", ".jpeg", ".jpe", ".jfif", ".png", ".bmp", ".webp", ".gif", ".tif", ".tiff")
_FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF")  # without EPS and others, which start other programs
_MAX_ASPECT = 100  # ratio of the sides: an enlarged image of 1 x 100,000 pixels would fill the memory

_LIMIT = os.environ.get("WARPI_LIMIT_PIXELS", "").replace("_", "").strip()  # `warpi.utils.limits` checks it
_PIXELS = int(_LIMIT) if _LIMIT.isascii() and _LIMIT.isdigit() else 89_478_485
_TOO_LARGE = f"{{}} pixels, more than {_PIXELS:,}; if you trust it, set the environment variable WARPI_LIMIT_PIXELS"


def decode(path: str | IO[bytes], short: int) -> "Image":
    """The image as 8-bit RGB, upright, scaled so that its shorter side has `short` pixels."""
    from PIL import Image, ImageOps

    if isinstance(path, str) and not stat.S_ISREG(os.stat(path).st_mode):
        raise ValueError("not a file")  # a pipe could be read forever
    if Image.MAX_IMAGE_PIXELS is not None and Image.MAX_IMAGE_PIXELS < _PIXELS:
        Image.MAX_IMAGE_PIXELS = _PIXELS  # the user has raised the limit
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            with Image.open(path, formats=_FORMATS) as image:
                _check_pixels(image)
                image.draft(None, (2 * short, 2 * short))  # large JPEGs are decoded at 1/2, 1/4 or 1/8
                image.load()
                with suppress(*BROKEN):  # the pixels are good even if the orientation tag is damaged
                    ImageOps.exif_transpose(image, in_place=True)
                upright = _rgb(image)
        except Image.DecompressionBombError as error:
            raise ValueError(_TOO_LARGE.format("too many")) from error
    low, high = min(upright.size), max(upright.size)
    if high > _MAX_ASPECT * low:
        raise ValueError(f"{upright.width} x {upright.height} pixels: too long and narrow")
    width, height = (max(short, round(side * short / low)) for side in upright.size)
    return upright.resize((width, height), Image.Resampling.BILINEAR)


def _check_pixels(image: "Image") -> None:
    """Raise if an image claims more pixels than the limit, before they are decoded."""
    if image.width * image.height > _PIXELS:
        raise ValueError(_TOO_LARGE.format(f"{image.width} x {image.height}"))


def image_size(path: str) -> tuple[int, int] | None:
    """Width and height from the header of the file; None if it cannot be read."""
    from PIL import Image

    if not os.path.isfile(path):
        return None
    broken: tuple[type[Exception], ...] = (Image.DecompressionBombError, *BROKEN)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            with Image.open(path, formats=_FORMATS) as image:
                return image.size
        except broken:
            return None


def _rgb(image: "Image") -> "Image":
    """Convert any mode to RGB. 16-bit values are scaled, not cut off; transparent pixels become white."""
    from PIL import Image

    if image.mode == "F":
        raise ValueError("pixels are floating-point numbers, whose range is unknown")
    if image.mode.startswith("I"):
        image = image.convert("I").point(lambda value: value * (1 / 256)).convert("L")
    elif "A" in image.getbands() or "a" in image.getbands() or "transparency" in image.info:
        rgba = image.convert("RGBA")
        white = Image.new("RGBA", rgba.size, "white")
        image = Image.alpha_composite(white, rgba)
    return image.convert("RGB")


def decode_batch(
    paths: list[str], *, seed: int, first: int, short: int, size: int, views: int, augment: bool
) -> Iterator[tuple[str | None, list[bytes]]]:
    """For each path, yield the reason why it could not be read (or None) and its views, each size * size * 3 bytes.

    The paths are at the positions first, first + 1, ... of a batch. The position of a crop and whether it is flipped
    depend only on (seed, position, view). Without augmentation, the crop is the center of the center square, so that a
    copy of that square in memory gives the same crop.
    """
    from PIL.Image import Transpose

    for position, path in enumerate(paths, first):
        try:
            image = decode(path, short)
        except BROKEN as error:
            yield _reason(path, error), []
            continue
        crops = []
        for view in range(views):
            left, top = ((side - short) // 2 + (short - size) // 2 for side in image.size)
            mirror = False
            if augment:
                digest = hashlib.sha256(f"{seed}/{position}/{view}".encode()).digest()
                a, b, c = struct.unpack("<3Q", digest[:24])
                left = a % (image.width - size + 1)
                top = b % (image.height - size + 1)
                mirror = bool(c % 2)
            crop = image.crop((left, top, left + size, top + size))
            crops.append((crop.transpose(Transpose.FLIP_LEFT_RIGHT) if mirror else crop).tobytes())
        yield None, crops


def _reason(path: str, error: Exception) -> str:
    """Why a file could not be read."""
    from PIL import UnidentifiedImageError

    if not isinstance(error, UnidentifiedImageError):
        return f"{type(error).__name__}: {error}"
    with suppress(OSError):
        if os.path.getsize(path) == 0:
            return "the file is empty"
    return f"not a {', '.join(_FORMATS[:-1])} or {_FORMATS[-1]} file"


def serve(requests: IO[bytes], replies: IO[bytes]) -> None:
    """Answer requests of one JSON line each. The answer for an image is a line (null or a reason) and its bytes."""
    for line in requests:
        for reason, crops in decode_batch(**json.loads(line)):
            replies.write(json.dumps(reason).encode() + b"\n")
            for crop in crops:
                replies.write(crop)
            replies.flush()  # if an image crashes this process, the main process knows which one


if __name__ == "__main__":
    for name in ("SIGINT", "SIGUSR2"):  # may reach the whole group; the main process handles them and ends this one
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.SIG_IGN)
    try:
        serve(sys.stdin.buffer, sys.stdout.buffer)
    except BrokenPipeError:
        os._exit(0)  # the main process has ended, so there is nothing to flush to
