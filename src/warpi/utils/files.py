"""Files that are never half written, and folders that one process at a time writes to."""

import contextlib
import csv
import io
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from warpi.errors import UserError

_STREAMS = {"/dev/stdout": 1, "/dev/stderr": 2}  # by number: opened by name, a file behind them would be cut off


class Busy(UserError):
    """Another process works in this folder."""


def write_atomically(path: Path, content: bytes, keep: Path | None = None) -> None:
    """Replace a file such that a crash leaves either the old or the new one, whole. The old one goes to `keep`.

    A link stays a link, and what it leads to is replaced; with `keep` the link is what is kept. What is there and is no
    file (a pipe, a device) is not replaced but written to.
    """
    check_no_folder(path)
    if str(path) in _STREAMS or (os.path.exists(path) and not os.path.isfile(path)):
        _write_straight(path, content)
        return
    if keep is None and os.path.islink(path):
        path = _end_of_link(path)
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with open(part, "wb") as f:
            f.write(content)
            f.flush()
            os.fsync(f.fileno())
        if keep is not None and path.exists():
            os.replace(path, keep)
        os.replace(part, path)
    except OSError as e:
        raise UserError(f"cannot write {path}: {e.strerror}; what was there before is intact") from e
    finally:
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)
    with contextlib.suppress(OSError):  # not every file system can flush a folder
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
        raise UserError(f"cannot make the folder {path.parent}: {error.strerror}; choose another") from error
    data = content.encode(errors="backslashreplace") if isinstance(content, str) else content  # paths may be any bytes
    write_atomically(path, data)


def format_csv(header: Sequence[object], rows: Iterable[Iterable[object]]) -> str:
    """A csv table as text, with a first line of column names."""
    text = io.StringIO(newline="")
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(header)
    writer.writerows(rows)
    return text.getvalue()


def write_csv(
    path: Path, header: Sequence[object], rows: Iterable[Iterable[object]], errors: str = "backslashreplace"
) -> None:
    """Write a csv table atomically. `errors` says what to do with file names that are not valid UTF-8."""
    write_atomically(path, format_csv(header, rows).encode(errors=errors))


def check_no_folder(path: Path, flag: str = "") -> None:
    """Refuse a folder where a file is wanted."""
    if os.path.isdir(path):
        example = os.path.join(path, "NAME")
        raise UserError(f"{flag and flag + ': '}{str(path)!r} is a folder; give the name of a file, such as {example}")


def _end_of_link(path: Path) -> Path:
    """Where a link leads to, which need not be there yet."""
    end = Path(os.path.realpath(path))
    if os.path.islink(end):
        raise UserError(f"cannot write {path}: it is a link that leads in a circle; remove it or choose another name")
    return end


def _write_straight(path: Path, content: bytes) -> None:
    """Write to a stream, a pipe or a device, as a shell would."""
    try:
        if (stream := _STREAMS.get(str(path))) is not None:
            sys.stdout.flush()  # what was printed before comes first
            sys.stderr.flush()
        with open(path if stream is None else stream, "wb", closefd=stream is None) as f:
            f.write(content)
    except OSError as e:
        raise UserError(f"cannot write {path}: {e.strerror}; choose another place") from e


def append_line(path: Path, line: str) -> None:
    """Add a line to a file. It is on the disk when this returns; a crash before may leave a part of it."""
    try:
        with open(path, "a") as f:
            f.write(line + "\n")
            f.flush()
            os.fsync(f.fileno())
    except OSError as e:
        raise UserError(f"cannot write {path}: {e.strerror}; the last checkpoint is intact, go on by --resume") from e


@contextlib.contextmanager
def one_writer(folder: Path) -> Iterator[None]:
    """A folder that can be written to, that no other process works in, and in which no half-written files lie."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = open(folder / ".lock", "w")  # noqa: SIM115
    except OSError as e:
        raise UserError(f"cannot write to {folder}: {e.strerror}; choose another --out") from e
    with lock:
        if sys.platform != "win32":
            import fcntl

            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # the kernel frees it when the process dies
            except BlockingIOError as e:
                raise Busy(f"another process is training in {folder}; wait for it, or choose another --out") from e
            except OSError:
                pass  # a file system without locks
        for left in folder.glob(".*.part"):  # by a process that was killed while it wrote
            left.unlink(missing_ok=True)
        yield
