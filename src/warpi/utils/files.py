"""Atomic file writes, csv tables and hashes."""

import contextlib
import csv
import hashlib
import itertools
import json
import os
import shutil
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from warpi.errors import UserError
from warpi.utils.leases import held_lease, part_name
from warpi.utils.limits import check_json_size, check_regular

_CSV_ROWS = 20_000  # rows converted at once
_STREAMS = {"/dev/stdout": 1, "/dev/stderr": 2}  # opening them by name would truncate a redirected file


def write_atomically(path: Path, content: bytes | Iterable[bytes], keep: Path | None = None) -> None:
    """Replace a file atomically: after a crash, either the old or the new version exists, complete.

    `content` may be an iterable of parts, which are written one after the other. With `keep`, the old version is
    renamed to that path. A link remains a link and its target is replaced, except with `keep`, which renames the link.
    Pipes and devices are written to directly. Raises LeaseLost, and writes nothing, if this process held the lease of
    the folder and another one has taken over.
    """
    check_no_folder(path)
    parts = [content] if isinstance(content, bytes) else content
    if str(path) in _STREAMS or (os.path.exists(path) and not os.path.isfile(path)):
        _write_directly(path, parts)
        return
    if keep is None and os.path.islink(path):
        path = _link_target(path)
    lease = held_lease(path)
    part = part_name(path)
    old = part_name(keep) if keep is not None else None
    try:
        with open(part, "wb") as f:
            f.writelines(parts)
            f.flush()
            os.fsync(f.fileno())
        if old is not None and os.path.lexists(path):
            _link_or_copy(path, old)
        if lease is not None:
            lease.check()  # after both temporary files exist: the next owner deletes them
        if keep is not None and old is not None and os.path.lexists(old):
            os.replace(old, keep)
        os.replace(part, path)
    except OSError as e:
        if lease is not None:
            lease.check()
        raise UserError(f"cannot write {path}: {e.strerror}; the previous file is unchanged") from e
    finally:
        for file in (part, *([old] if old is not None else [])):
            with contextlib.suppress(OSError):
                file.unlink(missing_ok=True)
    with contextlib.suppress(OSError):  # some file systems cannot flush a folder
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def write_with_folder(path: Path, content: str | bytes) -> None:
    """Write a file atomically; create its folder first if there is none."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"cannot create the folder {path.parent}: {error.strerror}; choose another") from error
    data = content.encode(errors="backslashreplace") if isinstance(content, str) else content  # paths may be any bytes
    write_atomically(path, data)


def unused_name(name: str) -> str:
    """Return `name`, or the first name with a number that is not taken in the working folder: check.csv, check2.csv."""
    path = Path(name)
    names = itertools.chain([name], (f"{path.stem}{n}{path.suffix}" for n in itertools.count(2)))
    return next(each for each in names if not Path(each).exists())


class _Lines(list[str]):
    """A file of lines in memory."""

    write = list.append


def format_csv(header: Iterable[object], rows: Iterable[Iterable[object]], separator: str = ",") -> str:
    """A csv table as text, with a first line of column names."""
    lines = _Lines()
    writer = csv.writer(lines, delimiter=separator, lineterminator="\r\n")  # so that cells with \r or \n are quoted
    writer.writerow(header)
    writer.writerows(rows)
    return "".join(f"{line[:-2]}\n" for line in lines)


def write_csv(
    path: Path, header: Sequence[object], rows: Iterable[Iterable[object]], errors: str = "backslashreplace"
) -> None:
    """Write a csv table atomically. `errors` is how `str.encode` handles file names that are not valid UTF-8."""
    write_atomically(path, _csv_parts(header, rows, errors))


def _csv_parts(header: Sequence[object], rows: Iterable[Iterable[object]], errors: str) -> Iterator[bytes]:
    """A csv table in parts of many rows, so that a large one does not have to fit into memory."""
    lines = itertools.chain([header], rows)
    while part := list(itertools.islice(lines, _CSV_ROWS)):
        yield format_csv(part[0], part[1:]).encode(errors=errors)


def write_json(path: Path, value: object) -> None:
    """Write a value as JSON, atomically."""
    write_atomically(path, (json.dumps(value, indent=1) + "\n").encode())


def read_json(file: Path, advice: str) -> Any:
    """The content of a JSON file. Raises FileNotFoundError if it is missing; other errors end with the advice."""
    check_regular(file)
    try:
        check_json_size(file, os.path.getsize(file))
        return json.loads(file.read_bytes())
    except FileNotFoundError:
        raise
    except OSError as e:
        raise UserError(f"cannot read {file}: {e.strerror}; {advice}") from e
    except UserError:
        raise
    except (ValueError, RecursionError) as e:
        raise UserError(f"{file} is not JSON ({e}); {advice}") from e


def check_no_folder(path: Path, flag: str = "") -> None:
    """Raise if the path of a file to write is a folder."""
    if os.path.isdir(path):
        example = os.path.join(path, "NAME")
        raise UserError(f"{flag and flag + ': '}{str(path)!r} is a folder; pass the name of a file, such as {example}")


def check_folder_exists(path: Path) -> None:
    """Raise if the folder of a file to write does not exist, before time is spent on its content."""
    if not path.parent.is_dir():
        raise UserError(f"there is no folder {str(path.parent)!r} to write {path.name} into; create it first")


def sha256(*parts: str | bytes) -> str:
    """Hexadecimal SHA-256 of the concatenated parts. Texts may contain file names that are not valid UTF-8."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part.encode(errors="surrogateescape") if isinstance(part, str) else part)
    return digest.hexdigest()


def _link_target(path: Path) -> Path:
    """The target of a link. It does not have to exist."""
    target = Path(os.path.realpath(path))
    if os.path.islink(target):
        raise UserError(f"cannot write {path}: the link points to itself; remove it or choose another name")
    return target


def _link_or_copy(path: Path, other: Path) -> None:
    """Give a file a second name, or a copy if the file system has no hard links."""
    try:
        os.link(path, other, follow_symlinks=False)
    except OSError:
        shutil.copyfile(path, other)


def _write_directly(path: Path, parts: Iterable[bytes]) -> None:
    """Write to a stream, a pipe or a device."""
    try:
        stream = _STREAMS.get(str(path))
        if stream is not None:
            sys.stdout.flush()  # earlier output comes first
            sys.stderr.flush()
        with open(path if stream is None else stream, "wb", closefd=stream is None) as f:
            f.writelines(parts)
    except OSError as e:
        raise UserError(f"cannot write {path}: {e.strerror}; choose another file") from e


def append_line(path: Path, line: str) -> None:
    """Append a line to a file and flush it to disk. A crash may leave an incomplete line."""
    try:
        with open(path, "a") as f:
            lease = held_lease(path)
            if lease is not None:
                lease.check()  # after the file was opened: the next owner replaces it
            f.write(line + "\n")
            f.flush()
            os.fsync(f.fileno())
    except OSError as e:
        raise UserError(f"cannot write {path}: {e.strerror}; the last checkpoint is intact: use --resume") from e


def file_size(file: str) -> int:
    """Size of a file in bytes, -1 if it is missing."""
    try:
        return os.stat(file).st_size
    except (OSError, ValueError):  # ValueError: not a valid file name
        return -1
