"""Errors that a user can fix. Each message says what was given, what is allowed and what to do."""

import os
import struct
import tokenize
import zipfile
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from difflib import get_close_matches

MALFORMED_ERRORS = (LookupError, TypeError, ValueError, RuntimeError, AttributeError, ArithmeticError)
"""Errors that malformed stored values can cause. RecursionError is a RuntimeError."""
_BAD_BYTES = (ValueError, EOFError, RuntimeError, SyntaxError, MemoryError)
DAMAGED_ARRAY_ERRORS = (*_BAD_BYTES, tokenize.TokenError, struct.error, zlib.error, zipfile.BadZipFile)
"""Errors that damaged bytes cause in numpy's reader of .npy and .npz files, and in the modules it uses."""


_MOST_NAMES = 1000  # of a folder, which are compared with a misspelled one


class UserError(ValueError):
    """An error the user can fix. The command line prints it on one line and exits with code 2."""


def unknown(kind: str, got: str, allowed: Iterable[str]) -> UserError:
    """The error for an unknown name. It suggests the closest allowed name."""
    names = sorted(allowed)
    closest = nearest(got, names)
    if closest:
        hint = f"did you mean {closest!r}?"
    else:
        more = f", ... ({len(names)} in all)" if len(names) > 60 else ""
        hint = f"allowed: {', '.join(names[:60])}{more}"
    if kind in ("method", "net"):
        hint += f"{' For' if closest else '; for'} a custom one: warpi --use FILE.py ..., or warpi.fit({kind}=...)"
    return UserError(f"unknown {kind} {got!r}; {hint}")


def nearest(got: str, names: Iterable[str]) -> str | None:
    """The allowed name most similar to `got`, or None if none is similar. Leading dashes are ignored."""
    by_bare_name = {name.lstrip("-"): name for name in names}
    matches = get_close_matches(got.lstrip("-"), by_bare_name, n=1, cutoff=0.65)  # about two letters in three
    return by_bare_name[matches[0]] if matches else None


def no_path(path: object, what: str = "file or folder", advice: str = "") -> UserError:
    """The error for a path that does not exist. It suggests the path with the closest name in the same folder."""
    closest = nearest_path(path)
    hint = f"did you mean {closest!r}?" if closest else advice
    return UserError(f"there is no {what} {str(path)!r}{f'; {hint}' if hint else ''}")


def nearest_path(path: object) -> str | None:
    """The path of the file or folder whose name is most similar, in the same folder; None if none is similar."""
    folder, name = os.path.split(str(path))
    stem, suffix = os.path.splitext(name)
    try:
        names = sorted(os.listdir(folder or "."))[:_MOST_NAMES]
    except (OSError, ValueError):
        return None
    names.sort(key=lambda other: other.endswith(suffix))  # of several names that differ in the suffix, the last counts
    by_stem = {os.path.splitext(other)[0]: other for other in names}
    closest = nearest(stem, by_stem)
    return None if closest is None else os.path.join(folder, by_stem[closest])


def missing_package(package: str, purpose: str, extra: str) -> UserError:
    """The error for an optional package that is not installed."""
    return UserError(f"{purpose} needs the package {package!r}; install it with: pip install 'warpi[{extra}]'")


def format_count(n: int, noun: str) -> str:
    """A number with a noun, in the singular or with a plural s: `1 row`, `1,200 rows`."""
    return f"{n:,} {noun}{'' if n == 1 else 's'}"


def first_line(error: BaseException) -> str:
    """The first line of an error message, at most 200 characters, or the type of the error if it has no message."""
    return (str(error).strip() or type(error).__name__).splitlines()[0][:200]


@contextmanager
def blame_file(file: object) -> Iterator[None]:
    """Context manager: an error inside means that the file is malformed, although its checksum is right."""
    try:
        yield
    except UserError:
        raise
    except MALFORMED_ERRORS as e:
        if "out of memory" in str(e):
            raise
        raise UserError(f"{file} is damaged ({first_line(e)}); copy it again from where the run was made") from e
