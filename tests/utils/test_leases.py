"""Leases of folders: one owner at a time, takeover of silent and dead owners, and late writes that fail."""

import errno
import fcntl
import json
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from forked import Chaos, Forked

from warpi.errors import UserError
from warpi.runs.run import fitting
from warpi.utils import files, leases
from warpi.utils.files import append_line, write_atomically
from warpi.utils.leases import Busy, Lease, LeaseLost, Watch, one_writer

SECONDS = 0.3


@pytest.fixture(autouse=True)
def short_leases(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WARPI_LEASE_SECONDS", str(SECONDS))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "run"


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def silent(lease: Lease) -> None:
    """Let the owner of a lease stop renewing it, as if its process was paused."""
    lease._ended.set()


def take_over(folder: Path) -> Lease:
    """Wait as another process would, until the owner has been silent for long enough."""
    watch = Watch(folder)
    end = time.monotonic() + 20
    while (lease := watch.claim()) is None:
        assert time.monotonic() < end
        time.sleep(SECONDS / 20)
    return lease


def test_a_lease_is_one_hidden_file_and_its_number_grows(folder: Path) -> None:
    for number in (1, 2, 3):
        with one_writer(folder) as lease:
            assert lease.number == number
            assert names(folder) == [f".lease-{number}"]
            content = json.loads((folder / f".lease-{number}").read_text())
            assert content["pid"] == os.getpid()
            assert not content["released"]
        assert names(folder) == [f".lease-{number}"]


def test_a_second_process_waits_and_then_gives_up(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    with one_writer(folder):
        began = time.monotonic()
        message = rf"is training in {folder} \(process {os.getpid()} on .*\); wait for it"
        with pytest.raises(Busy, match=message), one_writer(folder):
            pass
        assert time.monotonic() - began >= 1.5 * SECONDS
    assert f"process {os.getpid()} on " in caplog.text
    with one_writer(folder):
        pass


def test_a_second_process_gets_the_folder_after_its_release(folder: Path) -> None:
    ends = threading.Event()
    held = threading.Event()

    def hold() -> None:
        with one_writer(folder):
            held.set()
            ends.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait()
    threading.Timer(SECONDS / 2, ends.set).start()
    with one_writer(folder) as lease:
        assert lease.number == 2
    thread.join()


def test_a_dead_owner_on_this_machine_is_noticed_at_once(folder: Path, tmp_path: Path) -> None:
    os.environ["WARPI_LEASE_SECONDS"] = "600"

    def die() -> None:
        with one_writer(folder):
            (folder / ".half.part").touch()
            os.kill(os.getpid(), signal.SIGKILL)

    assert Forked(die, tmp_path / "log").wait() == -signal.SIGKILL
    began = time.monotonic()
    with one_writer(folder):
        assert names(folder) == [".lease-2"], "the incomplete file is deleted"
    assert time.monotonic() - began < 10


def test_a_run_asks_for_no_file_locks(folder: Path, tmp_path: Path) -> None:
    """Where such calls fail, a run is trained, and after its process has died, another one resumes it."""

    def train(dies: bool) -> None:
        def refuse(event: str, _: object) -> None:
            if event in ("fcntl.flock", "fcntl.lockf"):
                raise OSError(errno.ENOLCK, "no locks available")

        sys.addaudithook(refuse)
        with pytest.raises(OSError, match="no locks"), (tmp_path / "file").open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
        settings = {"limit": 100, "epochs": 3, "batch_size": 20, "method": "ce", "threads": 1, "device": "cpu"}
        for record in fitting(folder, resume=True, quiet=True, **settings):
            if record and dies and record["epoch"] == 2:
                os.kill(os.getpid(), signal.SIGKILL)

    for dies, code in ((True, -signal.SIGKILL), (False, 0)):
        assert Forked(partial(train, dies), tmp_path / "log").wait() == code, (tmp_path / "log").read_text()
    assert (folder / "done").exists()
    assert (folder / "results.jsonl").read_text().count("\n") == 3
    assert (folder / ".lease-2").exists()


def test_an_owner_elsewhere_keeps_the_folder_until_it_is_silent(folder: Path) -> None:
    """Its clock may be wrong by years; only the time without a change counts."""
    folder.mkdir()
    foreign = {"owner": "x", "machine": "elsewhere", "host": "far", "pid": 1, "seconds": SECONDS}
    content = json.dumps({**foreign, "renewed": "1999-01-01T00:00:00Z", "released": False})
    (folder / ".lease-7").write_text(content)
    watch = Watch(folder)
    for k in range(10):
        (folder / ".lease-7").write_text(content + " " * k)
        assert watch.claim() is None
        time.sleep(SECONDS / 6)
    began = time.monotonic()
    assert take_over(folder).number == 8
    assert time.monotonic() - began >= SECONDS


def test_a_long_time_without_a_look_is_not_the_silence_of_the_owner(folder: Path) -> None:
    """Both may have been stopped together, for example by a batch system."""
    with one_writer(folder) as lease:
        watch = Watch(folder)
        assert watch.is_held()
        silent(lease)
        time.sleep(1.2 * SECONDS)
        assert watch.is_held()


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"pid": 1e999, "host": 1, "seconds": 1}', b"\xff" * 9000])
def test_an_incomplete_lease_is_taken_over_after_a_while(folder: Path, content: bytes) -> None:
    folder.mkdir()
    (folder / ".lease-1").write_bytes(content)
    assert Watch(folder).claim() is None
    assert take_over(folder).number == 2


@pytest.mark.parametrize("seconds", [0, -1, 1e9, float("nan")])
def test_a_lease_from_elsewhere_cannot_make_others_wait_forever(folder: Path, seconds: float) -> None:
    folder.mkdir()
    lease = {"owner": "x", "machine": "m", "host": "h", "pid": 1, "seconds": seconds, "released": False}
    (folder / ".lease-1").write_text(json.dumps(lease))
    assert take_over(folder).number == 2


def test_the_setting_is_checked(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for text in ("soon", "0", "nan", "1e9"):
        monkeypatch.setenv("WARPI_LEASE_SECONDS", text)
        with pytest.raises(UserError, match=r"WARPI_LEASE_SECONDS must be a number of seconds from 0\.01 to 3600, got"):
            Watch(folder)


def test_an_owner_notices_that_it_was_taken_over(folder: Path) -> None:
    with one_writer(folder) as late:
        silent(late)
        late_thread = threading.Thread(target=late._keep)
        new = take_over(folder)
        late._ended.clear()  # it wakes up
        late_thread.start()
        late_thread.join(10)
        assert late.lost
        for write in (lambda: write_atomically(folder / "a", b"late"), lambda: append_line(folder / "b", "late")):
            with pytest.raises(LeaseLost, match="another process has taken over"):
                write()
    assert names(folder) == [".lease-2", "b"], "nothing is written, and the late owner does not release the lease"
    assert (folder / "b").read_text() == ""
    new.check()
    new.release()


STEPS = ["link", "check", "replace", "second replace"]


@pytest.mark.parametrize("step", STEPS)
def test_a_checkpoint_is_not_overwritten_wherever_its_writer_was_paused(
    folder: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    """The owner is paused before one step of a write. Meanwhile another process takes over and writes twice."""
    file, kept = folder / "checkpoint", folder / "checkpoint.previous"
    calls: list[str] = []

    def pause(name: str, real: Callable[..., None]) -> Callable[..., None]:
        def paused(*args: object, **options: object) -> None:
            calls.append(name)
            if step == (f"second {name}" if calls.count(name) == 2 and name == "replace" else name):
                monkeypatch.undo()
                monkeypatch.setenv("WARPI_LEASE_SECONDS", str(SECONDS))
                silent(late)
                held = leases._held.pop(str(folder))
                leases._held[str(folder)] = new = take_over(folder)
                write_atomically(file, b"new 1", keep=kept)
                write_atomically(file, b"new 2", keep=kept)
                append_line(folder / "results", "new")
                new.release()
                leases._held[str(folder)] = held
            real(*args, **options)

        return paused

    with one_writer(folder) as late:
        for text in (b"old 1", b"old 2"):
            write_atomically(file, text, keep=kept)
        monkeypatch.setattr(os, "link", pause("link", os.link))
        monkeypatch.setattr(os, "replace", pause("replace", os.replace))
        monkeypatch.setattr(Lease, "check", pause("check", Lease.check))
        with pytest.raises(LeaseLost):
            write_atomically(file, b"late", keep=kept)
    assert calls
    assert (file.read_bytes(), kept.read_bytes()) == (b"new 2", b"new 1")
    assert names(folder) == [".lease-2", "checkpoint", "checkpoint.previous", "results"]


def test_a_line_appended_late_is_lost(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The owner is paused between the check and the write. The next owner replaces the file when it reads it."""
    file = folder / "results"
    real = Lease.check

    def paused(lease: Lease) -> None:
        real(lease)
        monkeypatch.undo()
        silent(lease)
        held = leases._held.pop(str(folder))
        leases._held[str(folder)] = take_over(folder)
        write_atomically(file, file.read_bytes())
        append_line(file, "new")
        leases._held[str(folder)] = held

    with one_writer(folder):
        append_line(file, "old")
        monkeypatch.setattr(Lease, "check", paused)
        monkeypatch.setattr(leases, "_lease_seconds", lambda: SECONDS)
        append_line(file, "late")
    assert file.read_text() == "old\nnew\n"


def test_a_file_system_without_hard_links(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object, **__: object) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(files.os, "link", fails)
    with one_writer(folder):
        for k in range(3):
            write_atomically(folder / "file", str(k).encode(), keep=folder / "kept")
            assert (folder / "file").read_text() == str(k)
        assert (folder / "kept").read_text() == "1"
        assert names(folder) == [".lease-1", "file", "kept"]


def test_a_process_that_is_late_to_claim(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It decides to take over, is paused, and meanwhile others have come and gone."""
    with one_writer(folder):
        pass
    watch = Watch(folder)
    real = Watch.is_held

    def paused(self: Watch) -> bool:
        held = real(self)
        monkeypatch.undo()
        for _ in range(2):
            with one_writer(folder):
                pass
        return held

    monkeypatch.setattr(Watch, "is_held", paused)
    with one_writer(folder) as owner:
        monkeypatch.setattr(Watch, "is_held", lambda _: False)
        watch._seen = (1, b"")
        (folder / ".mine.lease-9.ab.part").touch()
        assert watch.claim() is None
        monkeypatch.undo()
        owner.check()
    assert names(folder) == [".lease-4", ".mine.lease-9.ab.part"]


# --- many processes ---------------------------------------------------------------------------------------------------

TURNS = 12  # increments that a process makes while it holds the lease


def count_up(folder: Path, seed: int) -> None:
    """Take the lease again and again, and add one to a number in a file, which is safe only for a single writer."""
    rng = random.Random(seed)
    file, log = folder / "number", folder / "log"
    while not (folder / "stop").exists():
        try:
            with one_writer(folder) as lease:
                write_atomically(log, log.read_bytes() if log.exists() else b"")
                n = int(file.read_text()) if file.exists() else 0
                for _ in range(rng.randint(1, TURNS)):
                    n += 1
                    write_atomically(file, str(n).encode(), keep=folder / "previous")
                    append_line(log, f"{lease.number} {n}")
                    time.sleep(rng.uniform(0, 0.01))
        except (Busy, LeaseLost):
            continue


@pytest.mark.parametrize("disturbances", [20, pytest.param(200, marks=pytest.mark.slow)])
def test_one_writer_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, disturbances: int) -> None:
    """Three processes, killed, and paused for longer than the lease: no increment is lost, none is made twice."""
    seconds = 0.1
    monkeypatch.setenv("WARPI_LEASE_SECONDS", str(seconds))
    monkeypatch.setattr(os, "fsync", lambda _: None)  # the machine does not lose power here
    folder, log = tmp_path / "run", tmp_path / "output"
    folder.mkdir()

    with Chaos(lambda number: count_up(folder, number), 3, log) as chaos:
        chaos.disturb(disturbances, (0, 0.05), 3 * seconds)
        (folder / "stop").touch()
        chaos.wait()
    assert not log.exists() or log.read_text() == ""
    lines = [line.split() for line in (folder / "log").read_text().splitlines()]
    owners = [int(owner) for owner, _ in lines]
    numbers = [int(n) for _, n in lines]
    assert owners == sorted(owners), "a late process has written"
    # A process that is killed between its two writes has counted without a line.
    steps = [after - before for before, after in zip([0, *numbers], numbers, strict=False)]
    assert min(steps) == 1, "a number was lost"
    assert sum(step - 1 for step in steps) <= chaos.kills + chaos.pauses
    assert len(set(owners)) > disturbances / 4
    assert int((folder / "number").read_text()) - numbers[-1] in (0, 1)
