"""Pickles of arrays and plain containers, read without running what else a pickle may ask for."""

import _codecs
import pickle
from pathlib import Path
from typing import IO, Any

import numpy as np

from warpi.errors import UserError

# What numpy itself writes into a pickle, taken from numpy rather than from its private modules, which have moved.
_reconstruct: Any = np.zeros(1).__reduce__()[0]
_scalar: Any = np.int64(0).__reduce__()[0]
_frombuffer: Any = np.zeros(1).__reduce_ex__(5)[0]
_CORE = ("numpy.core", "numpy._core")


def safe_load(source: Path | str | IO[bytes], name: str | None = None) -> Any:
    """Read the next pickle of a file: dicts, lists, tuples, str, bytes, numbers and numpy arrays of numbers or text.

    A pickle is a small program: it may name any function of any module and have it called. Here every name but the
    few that arrays need is refused before anything is called. Strings of python 2 are read as latin-1. Errors call the
    file `name`, which is needed only where it is open already and does not know its own.
    """
    if isinstance(source, Path | str):
        try:
            with open(source, "rb") as file:
                return _load(file, name or str(source))
        except OSError as e:
            raise UserError(f"cannot read {source}: {e.strerror or e}") from e
    return _load(source, name or str(getattr(source, "name", "pickle")))


def _load(file: IO[bytes], name: str) -> Any:
    try:
        return _Arrays(file, name).load()
    # All that broken bytes can make of the reader and of numpy's constructors; the cause stays attached.
    except (
        pickle.UnpicklingError, EOFError, ValueError, TypeError, LookupError, AttributeError, MemoryError, OverflowError
    ) as e:  # fmt: skip
        reason = str(e).splitlines()[0] if str(e) else type(e).__name__
        raise UserError(f"{name}: not a readable pickle ({reason}); is the file complete? fetch it again") from e


class _Arrays(pickle.Unpickler):
    """An unpickler that knows numpy's arrays and nothing else."""

    def __init__(self, file: IO[bytes], name: str) -> None:
        super().__init__(file, encoding="latin1")
        self._name = name

    def find_class(self, module: str, name: str) -> Any:
        # Python functions are handed out behind a fresh lambda: a pickle can set attributes of what it was given.
        if (module, name) == ("numpy", "ndarray"):
            return np.ndarray
        if (module, name) == ("numpy", "dtype"):
            return lambda code, *_: _plain_dtype(code)
        if module in [f"{core}.multiarray" for core in _CORE] and name in ("_reconstruct", "scalar"):
            return _reconstruct if name == "_reconstruct" else _scalar
        if module in [f"{core}.numeric" for core in _CORE] and name == "_frombuffer":
            return lambda *parts: _frombuffer(*parts)
        if (module, name) == ("_codecs", "encode"):
            return _codecs.encode
        raise UserError(
            f"{self._name}: this pickle asks for {module}.{name}, which is no data; it was not opened. "
            f"Fetch the file from its official source"
        )


def _plain_dtype(code: Any) -> np.dtype[Any]:
    """A dtype of numbers or text. It is always a copy, since the pickle goes on to set its byte order."""
    dtype: np.dtype[Any] = np.dtype(code, False, True)
    if dtype.kind not in "biufcSU":
        raise ValueError(f"array of type {dtype}, allowed are numbers and text")
    return dtype
