"""Limits on the memory and time that an untrusted file may use. An environment variable can raise each limit.

A small file can claim gigabytes: arrays of a huge shape, zeros that compress a thousandfold, one value that is repeated
a billion times. Readers call these checks before they allocate memory.
"""

import os
import stat
import zipfile
from pathlib import Path
from typing import IO, Any

from warpi.errors import UserError

LIMITS = {
    "EXPANSION": (200, "bytes in memory per byte of a compressed file, if it needs more than 256 MiB"),
    "PIXELS": (89_478_485, "pixels of one image"),
    "LINE": (64 * 2**20, "characters in one line of a .csv or .tsv file"),
    "JSON": (32 * 2**20, "bytes of a JSON file"),
    "FILES": (10_000_000, "files below one folder of images or texts"),
}
"""The default and the meaning of each limit. WARPI_LIMIT_NAME sets another; docs/reliability.md explains them."""
SMALL = 256 * 2**20  # bytes of content that are always allowed, however small the file
PREFIX = "WARPI_LIMIT_"


def limit(name: str) -> int:
    """The value of a limit, from its environment variable or else its default."""
    default, _ = LIMITS[name]
    text = os.environ.get(PREFIX + name, "").replace("_", "").strip()
    if not text:
        return default
    if not (text.isascii() and text.isdigit() and len(text) < 19 and int(text) > 0):
        raise UserError(f"the environment variable {PREFIX}{name} must be a positive whole number, got {text!r}")
    return int(text)


def refuse(what: object, claim: str, name: str) -> UserError:
    """The error for a file that exceeds a limit."""
    return UserError(
        f"{what} {claim}; the limit is {limit(name):,} {LIMITS[name][1]}, because such a file may be designed to fill "
        f"the memory; if you trust it, set the environment variable {PREFIX}{name} to a larger number"
    )


def check_expansion(file: Path, claimed: int) -> None:
    """Raise if the content of a file needs far more memory than its size explains."""
    size = os.path.getsize(file)
    if claimed > max(SMALL, limit("EXPANSION") * size):
        raise refuse(file, f"has {size:,} bytes and claims {claimed:,} in memory", "EXPANSION")


def check_json_size(file: Path, size: int) -> None:
    """Raise if a JSON file is too large: parsed short lists need twenty times as much memory as their text."""
    if size > limit("JSON"):
        raise refuse(file, f"has {size:,} bytes", "JSON")


def check_regular(path: str | os.PathLike[str]) -> None:
    """Raise if a path is a named pipe, a socket or a device, which could be read forever.

    Missing files and folders pass: their reader reports them.
    """
    try:
        mode = os.stat(path).st_mode
    except (OSError, ValueError):
        return
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
        raise UserError(f"{os.fspath(path)} is a pipe or a device, not a file; copy its content into a file")


def check_array_file(path: Path) -> None:
    """Raise if a .npy or .npz file, or a zip file of tensors, claims more than its size allows.

    Files that cannot be parsed pass: their reader explains what is wrong.
    """
    check_regular(path)
    with path.open("rb") as file:
        if file.read(2) != b"PK":
            file.seek(0)
            _check_shape(path, file, os.path.getsize(path))
            return
        file.seek(0)
        try:
            with zipfile.ZipFile(file) as archive:
                entries = archive.infolist()
                check_expansion(path, sum(entry.file_size for entry in entries))
                for entry in entries:
                    if entry.filename.endswith(".npy"):
                        with archive.open(entry) as member:
                            _check_shape(path, member, entry.file_size)
        except (zipfile.BadZipFile, OSError, ValueError, EOFError, RuntimeError, NotImplementedError) as error:
            if isinstance(error, UserError):
                raise


def _check_shape(path: Path, file: IO[bytes], size: int) -> None:
    """Raise if the header of a large array claims more bytes than the file has. Small arrays are left to the reader."""
    import math

    from numpy.lib import format as npy

    readers: dict[Any, Any] = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}
    try:
        shape, _, dtype = readers[npy.read_magic(file)](file)
        claimed = math.prod(shape) * dtype.itemsize
    except Exception:  # damaged; numpy's reader says how
        return
    if not dtype.hasobject and claimed > max(size, SMALL):
        raise UserError(
            f"{path} is damaged: it claims an array {list(shape)} of {dtype} with {claimed:,} bytes, but has only "
            f"{size:,}; copy or save it again"
        )
