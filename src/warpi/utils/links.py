"""Links in data from elsewhere: files outside a folder are read only if the user allows it."""

import os
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path

from warpi.errors import UserError

FOLLOW = "WARPI_FOLLOW_LINKS"
_MANY = 100  # after this many files of one folder, the folder is listed to find its links


def check_links(folder: Path, files: Iterable[str | Path], allowed: Sequence[Path]) -> None:
    """Raise if a file, or a folder on its path, is a link that leads outside all allowed folders.

    The files are relative to `folder`. WARPI_FOLLOW_LINKS=1 allows all links.
    """
    if os.environ.get(FOLLOW, "") not in ("", "0"):
        return
    tops = tuple(os.path.join(os.path.realpath(top), "") for top in allowed)
    top = os.fspath(folder)
    n_files: dict[str, int] = {}  # number of files so far, by folder
    plain: dict[str, set[str]] = {}  # names that are not links, for folders with many files
    for file in files:
        path = os.path.join(top, file)
        if "\0" in path:  # not a valid file name; its reader reports it
            continue
        parent, name = os.path.split(path)
        if parent not in n_files:
            _check_target(parent, tops)
        n = n_files[parent] = n_files.get(parent, 0) + 1
        if n == _MANY:
            with suppress(OSError), os.scandir(parent) as entries:  # faster than one system call per file
                plain[parent] = {entry.name for entry in entries if not entry.is_symlink()}
        if name not in plain.get(parent, ()) and os.path.islink(path):
            _check_target(path, tops)


def _check_target(path: str, tops: tuple[str, ...]) -> None:
    target = os.path.realpath(path)
    if not os.path.join(target, "").startswith(tops):
        raise UserError(
            f"{path} leads to {target}, outside of {tops[0]}, through a link; data from elsewhere could expose your "
            f"files in this way; copy the files, or set the environment variable {FOLLOW}=1 if you trust the links"
        )
