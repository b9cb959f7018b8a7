"""What can go wrong with any file that a user names."""

import os
import shlex
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from warpi.errors import UserError
from warpi.settings import join_names


@contextmanager
def reading(what: object) -> Iterator[None]:
    """Inside, a file that may not be opened, cannot be read or is not the text it should be is the user's to mend."""
    try:
        yield
    except OSError as e:
        reason = e.strerror or str(e).partition("\n")[0]
        raise UserError(f"cannot read {what}: {reason}; check the path and who may read it") from e
    except UnicodeDecodeError as e:
        raise UserError(f"{what} is not UTF-8 text ({e.reason} at byte {e.start}); save it as UTF-8") from e


def data_root(root: Path | None, data: str, how_to_get: str) -> Path:
    """The folder of a data set's files: the one given, else the one that the environment names in WARPI_DATA."""
    if root is None and not os.environ.get("WARPI_DATA"):
        raise UserError(f"{data} needs its files: {how_to_get}")
    return root or Path(os.environ["WARPI_DATA"])


def checked_suffix(path: Path, allowed: Sequence[str]) -> str:
    """The ending of a file that is there, in small letters."""
    if path.suffix.lower() not in allowed:
        raise UserError(f"{path}: ends in {path.suffix!r}, allowed are {', '.join(allowed)}")
    with reading(path):
        if not path.is_file():
            raise UserError(f"there is no file {path}")
    return path.suffix.lower()


def few(names: Iterable[object]) -> str:
    """A list of names that may be long, for a message."""
    listed = [str(name) for name in names]
    return ", ".join(listed[:20]) + (f", ... ({len(listed)} in all)" if len(listed) > 20 else "")


def drop_flag(*names: str) -> str:
    """The flag that leaves columns of a table out."""
    return f"--drop {shlex.quote(join_names(names))}" if len(names) <= 20 else "--drop COLUMN,..."
