"""Receive events and files from workers on other machines. This is a Ray actor, so the module imports little."""

from contextlib import ExitStack
from pathlib import Path
from typing import Any

from warpi.runs.schema import failure_file
from warpi.utils.files import write_with_folder
from warpi.utils.leases import Busy, Watch, one_writer


class Inbox:
    """Collects the events of all workers, and the files of those that cannot access the folder of the sweep.

    Each attempt to train a run has a number. Files of an earlier attempt are ignored: its machine may have lost the
    connection and regained it after another one took over the run. The inbox holds the leases of the run folders.
    """

    def __init__(self, out: str) -> None:
        self.out = Path(out)
        self.events: list[dict[str, Any]] = []
        self.attempts: dict[str, int] = {}
        self.watches: dict[str, Watch] = {}
        self.leases: dict[str, ExitStack] = {}

    def put(self, event: dict[str, Any]) -> None:
        self.events.append(event)

    def take(self) -> list[dict[str, Any]]:
        events, self.events = self.events, []
        return events

    def begin(self, run: str) -> tuple[int, dict[str, bytes]] | None:
        """Begin an attempt. Returns its number and the files of the run, or None if it belongs to another process."""
        if run not in self.leases:
            with ExitStack() as stack:
                try:
                    stack.enter_context(one_writer(self.out / run, self.watches.setdefault(run, Watch(self.out / run))))
                except Busy:
                    return None
                self.leases[run] = stack.pop_all()
        self.attempts[run] = self.attempts.get(run, 0) + 1
        return self.attempts[run], changed_files(self.out / run, {})

    def receive(
        self, run: str, attempt: int, files: dict[str, bytes], is_last: bool, failure: bytes | None = None
    ) -> bool:
        """Write files of a run in the given order, or return False for those of an earlier attempt.

        After the last files, other processes may claim the run. `failure` describes why it failed.
        """
        if attempt != self.attempts[run] or run not in self.leases:
            return False
        for name, content in files.items():
            write_with_folder(self.out / run / name, content)
        if failure is not None:
            write_with_folder(failure_file(self.out, run), failure)
        if is_last:
            self.leases.pop(run).close()
        return True


def changed_files(folder: Path, known: dict[str, int]) -> dict[str, bytes]:
    """The files of a folder that have changed since the last call, oldest first. Updates `known`, the change times.

    Hidden files are skipped: they are leases, or are still being written.
    """
    times = {path: path.stat().st_mtime_ns for path in folder.glob("*") if path.is_file() and path.name[0] != "."}
    changed = [path for path in sorted(times, key=times.__getitem__) if known.get(path.name) != times[path]]
    known.update({path.name: times[path] for path in changed})
    return {path.name: path.read_bytes() for path in changed}
