"""Leases: only one process at a time writes to a folder, even if several machines share it. No file locks are needed.

The lease in force is the file `.lease-N` with the largest number N. It states a time, and its owner rewrites it more
often than that. A process that has seen the same content for this time, by its own clock, takes over: it creates
`.lease-N+1`, which only one process can do. Clocks of different machines are never compared. On the same machine, a
dead owner is noticed at once. After its release the file remains, so that numbers only grow.

A process that was paused must not overwrite what the next owner has written. A writer therefore creates a temporary
file, then checks that its lease is in force, then renames the file. A new owner creates its lease, then deletes all
temporary files with smaller numbers, then reads the folder. In any order of these steps, either the check fails, or
the rename fails, or the new owner reads what was written. A file to append to is opened before the check, and replaced
by a copy when the new owner reads it.
"""

import contextlib
import errno
import json
import logging
import os
import re
import secrets
import socket
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from warpi.errors import UserError

VARIABLE = "WARPI_LEASE_SECONDS"
_SECONDS = 60.0  # time without a renewal after which another process may take over
_LONGEST = 3600.0
_RENEWALS = 6  # renewals in this time
_NAME = re.compile(r"\.lease-(\d+)")
_PART = re.compile(r"\..+\.lease-(\d+)\.[0-9a-f]+\.part")
_GONE = (errno.ENOENT, errno.ESTALE)
_held: "dict[str, Lease]" = {}  # the leases of this process, by folder
log = logging.getLogger("warpi.utils")


class Busy(UserError):
    """Another process holds the lease of this folder."""


class LeaseLost(UserError):
    """Another process has taken over the folder, because this one did not renew its lease in time."""


class Lease:
    """A lease that this process holds. A thread renews it."""

    def __init__(self, folder: Path, number: int) -> None:
        self.folder = folder
        self.number = number
        self.lost = False  # another process has taken over
        self._file = folder / f".lease-{number}"
        self._owner = secrets.token_hex(8)
        self._seconds = _lease_seconds()
        self._renewed = 0
        self._mutex = threading.Lock()
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def check(self) -> None:
        """Raise LeaseLost if another process has taken over."""
        with self._mutex:
            self.lost = self.lost or not self._in_force()
        if self.lost:
            raise LeaseLost(
                f"another process has taken over {self.folder}, because this one gave no sign of life for "
                f"{self._seconds:g} seconds; nothing was overwritten"
            )

    def start(self) -> None:
        """Write the lease for the first time and renew it from now on."""
        self._write()
        self._thread = threading.Thread(target=self._keep, daemon=True)
        self._thread.start()

    def release(self) -> None:
        """Release the folder for other processes."""
        self._ended.set()
        if self._thread is not None:
            self._thread.join(self._seconds)
        with self._mutex, contextlib.suppress(OSError):
            if not self.lost and self._in_force():
                self._write(released=True)

    def _keep(self) -> None:
        while not self._ended.wait(self._seconds / _RENEWALS):
            with self._mutex, contextlib.suppress(OSError):  # a file system may be unavailable for a while
                self.lost = self.lost or not self._in_force()
                if self.lost or self._ended.is_set():
                    return
                self._write()

    def _in_force(self) -> bool:
        content = _read(self._file)
        return self._owner.encode() in content and not (self.folder / f".lease-{self.number + 1}").exists()

    def _write(self, released: bool = False) -> None:
        """Rewrite the file in place: a late process must not bring back a file that the next owner has deleted."""
        self._renewed += 1
        content = {
            "owner": self._owner,
            "machine": _machine(),
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "seconds": self._seconds,
            "renewals": self._renewed,
            "renewed": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),  # for people; no process reads it
            "released": released,
        }
        with open(self._file, "r+b") as file:
            file.write(json.dumps(content).encode().ljust(511) + b"\n")


class Watch:
    """Observes the lease of a folder, to find out whether its owner still renews it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.seconds = _lease_seconds()  # as the owner states
        self.owner = "another process"
        self._seen: tuple[int, bytes] = (0, b"")
        self._looked = time.monotonic()
        self._unchanged = 0.0

    def is_held(self) -> bool:
        """Whether another process holds the lease. An owner that no longer renews it holds it until its time is up."""
        number = _newest(self.folder)
        if number == 0:
            self._seen = (0, b"")
            return False
        seen = number, _read(self.folder / f".lease-{number}")
        now = time.monotonic()
        # A long time between two calls counts as one renewal: both processes may have been paused together.
        step = min(now - self._looked, self.seconds / _RENEWALS)
        self._looked = now
        self._unchanged = self._unchanged + step if seen == self._seen else 0.0
        self._seen = seen
        lease = _decode(seen[1])
        self.seconds = lease.get("seconds", _lease_seconds())
        if lease:
            self.owner = f"process {lease['pid']} on {lease['host']}"
        return not (lease.get("released") or _is_dead(lease) or self._unchanged >= self.seconds)

    def claim(self) -> Lease | None:
        """Take the lease and delete incomplete files of earlier owners; None if another process holds it."""
        if self.is_held():
            return None
        number = self._seen[0] + 1
        lease = Lease(self.folder, number)
        file = self.folder / f".lease-{number}"
        try:
            os.close(os.open(file, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666))
        except FileExistsError:
            return None
        if _newest(self.folder) != number:  # this process was paused, and others have taken over meanwhile
            file.unlink(missing_ok=True)
            return None
        try:
            lease.start()
        except FileNotFoundError:  # the same, a moment later
            return None
        _clear(self.folder, number)
        return lease


@contextlib.contextmanager
def one_writer(folder: Path, watch: Watch | None = None) -> Iterator[Lease]:
    """Context manager: create a folder, hold its lease, and delete incomplete files in it.

    If another process holds it, waits for one and a half times the time that its lease states, then raises Busy. A
    caller that retries passes its own `watch`; then Busy is raised at once. Inside, `write_atomically` and
    `append_line` check the lease.
    """
    folder = Path(os.path.abspath(folder))
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lease = _wait(Watch(folder)) if watch is None else watch.claim()
    except OSError as e:
        raise UserError(f"cannot write to {folder}: {e.strerror}; choose another --out") from e
    if lease is None:
        raise Busy(f"another process is training in {folder}")
    _held[str(folder)] = lease
    try:
        yield lease
    finally:
        del _held[str(folder)]
        lease.release()


def held_lease(path: Path) -> Lease | None:
    """The lease that this process holds for the folder of a file, or None."""
    return _held.get(os.path.dirname(os.path.abspath(path))) if _held else None


def part_name(path: Path) -> Path:
    """The name of a temporary file that will replace a file. It contains the number of the lease of the folder."""
    lease = held_lease(path)
    number = "" if lease is None else f".lease-{lease.number}"
    return path.with_name(f".{path.name}{number}.{secrets.token_hex(6)}.part")


def _wait(watch: Watch) -> Lease:
    began = time.monotonic()
    announced = False
    while (lease := watch.claim()) is None:
        waited = time.monotonic() - began
        longest = 1.5 * watch.seconds
        if waited > longest:
            raise Busy(
                f"another process is training in {watch.folder} ({watch.owner}); wait for it, or choose another --out"
            )
        if waited > min(1.0, longest / 4) and not announced:
            announced = True
            log.warning("%s is using %s; waiting up to %.0f seconds", watch.owner, watch.folder, longest)
        time.sleep(min(0.2, watch.seconds / 20))
    return lease


def _clear(folder: Path, number: int) -> None:
    """Delete what earlier owners have left: first their leases, starting with the oldest, then incomplete files."""
    names = os.listdir(folder)
    for old in sorted(int(match[1]) for name in names if (match := _NAME.fullmatch(name))):
        if old < number:
            (folder / f".lease-{old}").unlink(missing_ok=True)
    for name in names:
        if name.startswith(".") and name.endswith(".part"):
            match = _PART.fullmatch(name)
            if match is None or int(match[1]) < number:  # one with a larger number belongs to the next owner
                (folder / name).unlink(missing_ok=True)


def _newest(folder: Path) -> int:
    """The largest number of a lease in a folder, or 0."""
    try:
        names = os.listdir(folder)
    except FileNotFoundError:
        return 0
    return max((int(match[1]) for name in names if (match := _NAME.fullmatch(name))), default=0)


def _read(file: Path) -> bytes:
    """The content of a lease; empty if it is gone. Opening it again makes network file systems ask the server."""
    try:
        descriptor = os.open(file, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))  # a named pipe must not block
        with open(descriptor, "rb") as content:
            return content.read(4096)
    except OSError as e:
        if e.errno in _GONE:
            return b""
        raise


def _decode(content: bytes) -> dict[str, Any]:
    """The values of a lease; empty if its owner has not completed it, or if it is damaged."""
    try:
        lease = json.loads(content)
        lease |= {"pid": int(lease["pid"]), "host": str(lease["host"]), "seconds": float(lease["seconds"])}
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
        return {}
    return lease if 0 < lease["seconds"] <= _LONGEST else {}


def _is_dead(lease: dict[str, Any]) -> bool:
    """Whether the owner of a lease ran on this machine and has ended."""
    if not lease or lease.get("machine") != _machine() or lease["pid"] <= 0 or sys.platform == "win32":
        return False
    try:
        os.kill(lease["pid"], 0)
    except ProcessLookupError:
        return True
    except (PermissionError, OverflowError):
        return False
    with contextlib.suppress(OSError):  # Z: it has ended, but its parent has not read its exit code
        return Path(f"/proc/{lease['pid']}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    return False


@cache
def _machine() -> str:
    """An id of this machine since its last boot and of this container. Process ids are unique within it."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip() + " " + os.readlink("/proc/self/ns/pid")
    except OSError:
        return f"{socket.gethostname()} {uuid.getnode():x}"


def _lease_seconds() -> float:
    text = os.environ.get(VARIABLE, "") or str(_SECONDS)
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0.01 <= seconds <= _LONGEST:
        raise UserError(f"{VARIABLE} must be a number of seconds from 0.01 to {_LONGEST:g}, got {text!r}")
    return seconds
