"""Pickles of arrays and plain containers, read without running what else a pickle may ask for."""

import math
import pickle
import re
import struct
from pathlib import Path
from typing import IO, Any

import numpy as np

from warpi.datasets.text_files import reading
from warpi.errors import UserError


def safe_load(source: Path | str | IO[bytes], name: str | None = None) -> Any:
    """Read the next pickle of a file: dicts, lists, tuples, str, bytes, numbers and numpy arrays of numbers or text.

    A pickle is a small program: it may name any function of any module and have it called. Here the few names that
    arrays need stand for functions of this module, and every other name is refused before anything is called. Strings
    of python 2 are read as latin-1. Errors call the file `name`, needed only where an open file has none of its own.
    """
    if isinstance(source, Path | str):
        with reading(source), Path(source).open("rb") as file:
            return _load(file, name or str(source))
    return _load(source, name or str(getattr(source, "name", "pickle")))


def _load(file: IO[bytes], name: str) -> Any:
    try:
        return _finished(_Unpickler(file, name).load(), {})
    # All that broken bytes can make of the reader; the cause stays attached.
    except (
        pickle.UnpicklingError, struct.error, EOFError, ValueError, TypeError, LookupError, AttributeError,
        AssertionError, MemoryError, OverflowError, RecursionError,
    ) as e:  # fmt: skip
        reason = str(e).splitlines()[0] if str(e) else type(e).__name__
        raise UserError(f"{name}: not a readable pickle ({reason}); is the file complete? fetch it again") from e


class _Dtype:
    """Stands for a numpy dtype while reading: numpy's own can be made to crash by the state it is given."""

    def __init__(self, code: str, *_: object) -> None:
        if not isinstance(code, str) or not re.fullmatch(r"[<>|=]?[biufcSU][0-9]{1,6}", code):
            raise ValueError(f"array of type {code!r}, allowed are numbers and text")
        self.value: np.dtype[Any] = np.dtype(code)

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self.value = self.value.newbyteorder(state[1])


class _Array:
    """Stands for a numpy array while reading; empty when made, then filled by its state, as numpy pickles do."""

    value: Any = None

    def __init__(self, *_: object) -> None: ...

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        _, shape, dtype, fortran, data = state
        self.value = _filled(data, dtype, shape, "F" if fortran else "C")


def _filled(data: Any, dtype: _Dtype, shape: tuple[int, ...], order: Any = "C", *_: object) -> Any:
    data = data.encode("latin1") if isinstance(data, str) else bytes(data)
    if not all(type(n) is int for n in shape) or len(data) != math.prod(shape) * dtype.value.itemsize:
        raise ValueError(f"{len(data)} bytes for an array {shape} of {dtype.value}")
    return np.ndarray(shape, dtype.value, data, order="F" if order == "F" else "C").copy(order="K")


def _allowed(module: str, name: str) -> Any:
    # Functions are handed out behind a fresh lambda: a pickle can set attributes of what it was given.
    match module.replace("numpy._core", "numpy.core"), name:
        case "numpy", "ndarray":
            return _Array
        case "numpy", "dtype":
            return _Dtype
        case "numpy.core.multiarray", "_reconstruct":
            return lambda *_: _Array()
        case "numpy.core.multiarray", "scalar":
            return lambda dtype, data: _filled(data, dtype, ())[()]
        case "numpy.core.numeric", "_frombuffer":
            return lambda *parts: _filled(*parts)
        case "_codecs", "encode":  # bytes in the older protocols
            return lambda text, _: text.encode("latin1")
        case "builtins" | "__builtin__", "bytes":  # b"" in the older protocols
            return lambda: b""
    return None


# The reader written in python: broken bytes can make the one in C take all memory (an index of 2^31 into its memo).
class _Unpickler(pickle._Unpickler):
    def __init__(self, file: IO[bytes], name: str) -> None:
        super().__init__(file, encoding="latin1")
        self._name = name

    def find_class(self, module: str, name: str) -> Any:
        if (found := _allowed(module, name)) is None:
            raise UserError(
                f"{self._name}: this pickle asks for {module}.{name}, which is no data; it was not opened. "
                "Fetch the file from its official source"
            )
        return found


def _finished(value: Any, seen: dict[int, Any]) -> Any:
    """Put the arrays in their places. `seen` keeps what is shared shared, however often it is."""
    if isinstance(value, _Array | _Dtype):
        if value.value is None:
            raise ValueError("an array without content")
        return value.value
    if isinstance(value, dict | list | tuple):
        if id(value) in seen:
            return seen[id(value)]
        if isinstance(value, dict):
            made: dict[Any, Any] = {}
            seen[id(value)] = made
            made.update((key, _finished(item, seen)) for key, item in value.items())
            return made
        items = [_finished(item, seen) for item in value]
        seen[id(value)] = items if isinstance(value, list) else tuple(items)
        return seen[id(value)]
    return value
