"""Links in data from elsewhere: files outside of a folder are read only if the user allows it."""

import os
from collections.abc import Iterable, Sequence
from pathlib import Path

from warpi.errors import UserError

FOLLOW = "WARPI_FOLLOW_LINKS"


def check_links(folder: Path, files: Iterable[str | Path], allowed: Sequence[Path]) -> None:
    """Raise if a file, given relative to `folder`, is a link to a place outside of all allowed folders, or below one.

    WARPI_FOLLOW_LINKS=1 allows all links.
    """
    if os.environ.get(FOLLOW, "") not in ("", "0"):
        return
    tops = tuple(os.path.join(os.path.realpath(top), "") for top in allowed)
    checked: set[str] = set()  # folders inside
    for file in files:
        path = os.path.join(folder, file)
        if "\0" in path:  # no file has such a name, as its reader will say
            continue
        parent = os.path.dirname(path)
        if parent not in checked:
            _check_target(parent, tops)
            checked.add(parent)
        if os.path.islink(path):
            _check_target(path, tops)


def _check_target(path: str, tops: tuple[str, ...]) -> None:
    target = os.path.realpath(path)
    if not os.path.join(target, "").startswith(tops):
        raise UserError(
            f"{path} leads to {target}, outside of {tops[0]}, by a link; data from elsewhere could read your files in "
            f"this way; copy the files, or set the environment variable {FOLLOW}=1 if you trust the links"
        )
