"""Read pickles of arrays and plain containers without executing anything else that a pickle may contain."""

import math
import pickle
import re
import struct
from pathlib import Path
from typing import IO, Any

import numpy as np

from warpi.datasets.delimited_files import reading
from warpi.errors import UserError


def safe_load(source: Path | str | IO[bytes], name: str | None = None) -> Any:
    """Read the next pickle of a file: dicts, lists, tuples, str, bytes, numbers and numpy arrays of numbers or text.

    A pickle is a small program that may call any function of any module. Here, the few names that arrays need refer to
    functions of this module, and every other name raises an error before anything is called. Python 2 strings are read
    as latin-1. Error messages use `name`, which is only needed for an open file without a name.
    """
    if isinstance(source, Path | str):
        with reading(source), Path(source).open("rb") as file:
            return _load(file, name or str(source))
    return _load(source, name or str(getattr(source, "name", "pickle")))


def _load(file: IO[bytes], name: str) -> Any:
    try:
        return _to_plain(_Unpickler(file, name).load(), {})
    except UserError:
        raise
    # All exceptions that broken bytes can cause in the reader.
    except (
        pickle.UnpicklingError, struct.error, EOFError, ValueError, TypeError, LookupError, AttributeError,
        AssertionError, MemoryError, OverflowError, RecursionError,
    ) as e:  # fmt: skip
        reason = str(e).splitlines()[0] if str(e) else type(e).__name__
        raise UserError(f"{name}: not a readable pickle ({reason}); is the file complete? download it again") from e


class _Dtype:
    """Stands for a numpy dtype while reading, because a bad state can crash numpy's own."""

    def __init__(self, code: str, *_: object) -> None:
        if not isinstance(code, str) or not re.fullmatch(r"[<>|=]?[biufcSU][0-9]{1,6}", code):
            raise ValueError(f"arrays must contain numbers or text, got type {code!r}")
        self.value: np.dtype[Any] = np.dtype(code)

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self.value = self.value.newbyteorder(state[1])


class _Array:
    """Stands for a numpy array while reading. As in numpy, it is created empty and then filled by its state."""

    value: Any = None

    def __init__(self, *_: object) -> None: ...

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        _, shape, dtype, fortran, data = state
        self.value = _make_array(data, dtype, shape, "F" if fortran else "C")


def _make_array(data: Any, dtype: _Dtype, shape: tuple[int, ...], order: Any = "C", *_: object) -> Any:
    data = data.encode("latin1") if isinstance(data, str) else bytes(data)
    if not all(type(n) is int for n in shape) or len(data) != math.prod(shape) * dtype.value.itemsize:
        raise ValueError(f"{len(data)} bytes for an array {shape} of {dtype.value}")
    return np.ndarray(shape, dtype.value, data, order="F" if order == "F" else "C").copy(order="K")


def _allowed(module: str, name: str) -> Any:
    # Functions are wrapped in a new lambda, because a pickle can set attributes of the objects it receives.
    match module.replace("numpy._core", "numpy.core"), name:
        case "numpy", "ndarray":
            return _Array
        case "numpy", "dtype":
            return _Dtype
        case "numpy.core.multiarray", "_reconstruct":
            return lambda *_: _Array()
        case "numpy.core.multiarray", "scalar":
            return lambda dtype, data: _make_array(data, dtype, ())[()]
        case "numpy.core.numeric", "_frombuffer":
            return lambda *parts: _make_array(*parts)
        case "_codecs", "encode":  # bytes in the older protocols
            return lambda text, _: text.encode("latin1")
        case "builtins" | "__builtin__", "bytes":  # b"" in the older protocols
            return lambda: b""
    return None


# The reader in Python: broken bytes can make the one in C use all memory (an index of 2^31 into its memo).
class _Unpickler(pickle._Unpickler):
    def __init__(self, file: IO[bytes], name: str) -> None:
        super().__init__(file, encoding="latin1")
        self._name = name

    def find_class(self, module: str, name: str) -> Any:
        allowed = _allowed(module, name)
        if allowed is None:
            raise UserError(
                f"{self._name}: this pickle asks for {module}.{name}, which is not data; it was not opened. "
                "Download the file from its official source"
            )
        return allowed


def _to_plain(value: Any, seen: dict[int, Any]) -> Any:
    """Replace the stand-ins by arrays. `seen` preserves objects that occur more than once."""
    if isinstance(value, _Array | _Dtype):
        if value.value is None:
            raise ValueError("an array without content")
        return value.value
    if isinstance(value, dict | list | tuple):
        if id(value) in seen:
            return seen[id(value)]
        if isinstance(value, dict):
            plain: dict[Any, Any] = {}
            seen[id(value)] = plain
            plain.update((key, _to_plain(item, seen)) for key, item in value.items())
            return plain
        items = [_to_plain(item, seen) for item in value]
        seen[id(value)] = items if isinstance(value, list) else tuple(items)
        return seen[id(value)]
    return value
