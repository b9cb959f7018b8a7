"""The store of decisions: concurrency, undo, and safety against crashes."""

import random
import signal
import sqlite3
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest
from review_helpers import make_choice, read_log

from warpi.audit.decisions import AUTOMATIC, Choice, Outcome, Store, read_decisions
from warpi.errors import UserError


def test_decisions_are_stored(store: Store) -> None:
    store.decide([make_choice(3), make_choice(5, "a", action="keep")], "tab", "1")
    store.decide([make_choice(9, None, action="unsure")], "tab", "2")
    with closing(Store(store.path, {"classes": ["a", "b"]})) as reopened:
        decisions = {row: (d.action, d.label) for row, d in reopened.current_decisions().items()}
    assert decisions == {3: ("change", "b"), 5: ("keep", "a"), 9: ("unsure", None)}


def test_decisions_about_other_data_are_refused(store: Store) -> None:
    with pytest.raises(UserError, match="decisions about other data: classes"):
        Store(store.path, {"classes": ["a", "c"]})


def test_other_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"not a database, but long enough to be one" * 50)
    with pytest.raises(UserError, match="cannot store decisions in"):
        Store(tmp_path / "x", {})


@pytest.mark.parametrize(
    "change",
    [
        "UPDATE log SET label = 'c'",  # not a class
        "UPDATE log SET row = 1e400",
        "UPDATE log SET row = -1",
        "UPDATE log SET label = NULL",
        "UPDATE log SET step = x'00'",
        "UPDATE about SET value = '[[1]]' WHERE key = 'random_rows'",
        "CREATE TRIGGER more AFTER INSERT ON log BEGIN SELECT 1; END",
        "DROP VIEW standing; CREATE VIEW standing AS WITH RECURSIVE n(i) AS (VALUES (1) UNION ALL SELECT 1 FROM n) "
        "SELECT i AS row FROM n",  # never ends
    ],
)
def test_a_file_that_the_page_cannot_have_written_is_refused(store: Store, change: str) -> None:
    store.remember_random({3: 1.0})
    store.decide([make_choice(3), make_choice(5, "a", action="keep")], "tab", "1")
    with closing(sqlite3.connect(store.path)) as db:
        keep = db.execute("SELECT sql FROM sqlite_master WHERE name = 'log_stays'").fetchone()[0]
        db.executescript(f"DROP TRIGGER log_stays; {change}; {keep}")
    with pytest.raises(UserError, match="is damaged: "):
        read_decisions(store.path)
    with pytest.raises(UserError, match="is damaged: "), closing(Store(store.path, {})) as opened:
        opened.random_rows()


def test_undo_restores_the_previous_decision(store: Store) -> None:
    (first,) = store.decide([make_choice(3)], "tab", "1").done.values()
    assert first is not None
    store.decide([make_choice(3, "a", first.id, "keep")], "tab", "2")
    assert store.undo("tab", "3") == {3: first}
    assert store.undo("tab", "4") == {3: None}
    assert store.undo("tab", "5") == {}
    assert read_log(store) == ["change", "keep", "undo", "undo"]


def test_decisions_of_one_step_are_undone_together(store: Store) -> None:
    store.decide([make_choice(row) for row in range(4)], "tab", "1")
    assert store.undo("tab", "2") == dict.fromkeys(range(4))


def test_log_is_append_only(store: Store) -> None:
    store.decide([make_choice(3)], "tab", "1")
    with closing(sqlite3.connect(store.path)) as db:
        for change in ("DELETE FROM log", "UPDATE log SET label = 'a'"):
            with pytest.raises(sqlite3.IntegrityError, match="append-only"):
                db.execute(change)


def test_second_of_two_tabs_is_refused(store: Store) -> None:
    first = store.decide([make_choice(3), make_choice(4)], "one", "1").done
    second = store.decide([make_choice(4, "a"), make_choice(5)], "two", "2")
    assert second.refused == {4: first[4]}
    assert set(second.done) == {5}
    assert set(store.current_decisions()) == {3, 4, 5}
    assert first[4] is not None
    store.decide([make_choice(4, "a", first[4].id)], "two", "3")  # a tab that has seen the decision may change it
    assert store.current_decisions()[4].label == "a"
    later = store.current_decisions()[4]
    assert store.undo("one", "4") == {3: None, 4: later}  # the later decision of the other tab stays


def test_repeated_step_is_stored_once(store: Store) -> None:
    first = store.decide([make_choice(3)], "tab", "1")
    assert store.decide([make_choice(3)], "tab", "1") == first
    store.decide([make_choice(4)], "tab", "2")
    assert store.undo("tab", "u") == store.undo("tab", "u") == {4: None}
    assert len(read_log(store)) == 3
    assert set(store.current_decisions()) == {3}


def test_failed_step_leaves_the_store_usable(store: Store) -> None:
    store.decide([make_choice(1)], "tab", "1")
    entry = "INSERT INTO log (time, tab, step, row, action, given, undoes) VALUES ('', '', '', 2, 'undo', '', 99)"
    store._db.execute("PRAGMA foreign_keys = ON")
    with pytest.raises(sqlite3.IntegrityError, match="FOREIGN KEY"), store._writing() as db:  # noqa: PT012
        db.execute("PRAGMA defer_foreign_keys = ON")  # so that the commit fails, not the insert
        db.execute(entry)
    (pages,) = store._db.execute("PRAGMA page_count").fetchone()
    store._db.execute(f"PRAGMA max_page_count = {pages}")
    with pytest.raises(sqlite3.OperationalError, match="full"):
        store.decide([make_choice(row, "b" * 500) for row in range(2, 200)], "tab", "2")
    store._db.execute("PRAGMA max_page_count = 100000")
    store.decide([make_choice(3)], "tab", "2")
    assert set(store.current_decisions()) == {1, 3}


def _decide_together(store: Store, steps: list[list[Choice]]) -> list[Outcome | BaseException]:
    """Make decisions in threads that all wait for the store."""
    with ThreadPoolExecutor(len(steps)) as pool:
        with store._lock:
            jobs = [pool.submit(store.decide, choices, "tab", str(n)) for n, choices in enumerate(steps)]
            while len(store._waiting) < len(steps):
                time.sleep(0.001)
        return [job.exception() or job.result() for job in jobs]


def test_steps_that_wait_share_a_transaction(store: Store) -> None:
    commits: list[str] = []
    store._db.set_trace_callback(lambda sql: commits.append(sql) if sql == "COMMIT" else None)
    outcomes = _decide_together(store, [[make_choice(n), make_choice(99)] for n in range(20)])
    assert len(commits) == 1
    assert all(isinstance(outcome, Outcome) and n in outcome.done for n, outcome in enumerate(outcomes))
    assert sum(isinstance(outcome, Outcome) and 99 in outcome.done for outcome in outcomes) == 1
    with closing(Store(store.path, {"classes": ["a", "b"]})) as other:
        assert other.current_decisions() == store.current_decisions()
        assert other.current_decisions().keys() == {*range(20), 99}


def test_a_step_that_fails_does_not_stop_those_of_others(store: Store) -> None:
    bad = [make_choice(3), make_choice(4, action="burn")]
    first, failed, last = _decide_together(store, [[make_choice(1)], bad, [make_choice(2)]])
    assert isinstance(first, Outcome)
    assert isinstance(failed, sqlite3.IntegrityError)
    assert isinstance(last, Outcome)
    assert store.current_decisions().keys() == {1, 2}
    assert read_log(store) == ["change", "change"]


def test_decisions_of_another_process_are_seen(store: Store) -> None:
    store.decide([make_choice(1)], "one", "1")
    with closing(Store(store.path, {"classes": ["a", "b"]})) as other:
        assert other.decide([make_choice(1, "a"), make_choice(2)], "two", "1").refused.keys() == {1}
    assert store.current_decisions().keys() == {1, 2}
    assert store.decide([make_choice(2, "a")], "one", "2").refused.keys() == {2}


def test_random_steps_match_a_model_in_memory(store: Store) -> None:
    """Two tabs decide and undo in random order; the result equals that of lists in memory."""
    rng = random.Random(0)
    steps: dict[str, list[int]] = {"one": [], "two": []}
    stack: dict[int, list[tuple[int, str]]] = {row: [] for row in range(5)}  # row -> (step, label)
    for n in range(80):
        tab = rng.choice(["one", "two"])
        if rng.random() < 0.35:
            store.undo(tab, str(n))
            if steps[tab]:
                last = steps[tab].pop()
                for row in stack:
                    stack[row] = [entry for entry in stack[row] if entry[0] != last]
        else:
            rows = rng.sample(range(5), rng.randint(1, 3))
            label = rng.choice("ab")
            seen = {row: d.id for row, d in store.current_decisions().items()}
            store.decide([make_choice(row, label, seen.get(row, 0)) for row in rows], tab, str(n))
            steps[tab].append(n)
            for row in rows:
                stack[row].append((n, label))
    expected = {row: entries[-1][1] for row, entries in stack.items() if entries}
    assert {row: d.label for row, d in store.current_decisions().items()} == expected


def test_decisions_survive_a_kill(tmp_path: Path) -> None:
    program = (
        "import itertools, sys\nfrom pathlib import Path\nfrom warpi.audit.decisions import Choice, Store\n"
        "store = Store(Path(sys.argv[1]), {})\n"
        "for n in itertools.count():\n"
        "    store.decide([Choice(n, 0, 'keep', 'a', 'a', None)], 'tab', str(n))\n    print(n, flush=True)\n"
    )
    command = [sys.executable, "-c", program, str(tmp_path / "d.sqlite")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for _ in range(40):
            process.stdout.readline()
        process.send_signal(signal.SIGKILL)
        last = 39 + len([line for line in process.stdout if line.endswith("\n")])
    with closing(Store(tmp_path / "d.sqlite", {})) as store:
        assert set(range(last + 1)) <= set(store.current_decisions())


def test_random_rows_are_remembered_in_order(store: Store) -> None:
    store.decide([make_choice(7), make_choice(3, None, action="unsure")], "tab", "1")
    store.remember_random({7: 2.0, 3: 2.5, 9: 1.0})
    store.remember_random({4: 1.0, 7: 2.0})
    assert list(store.random_rows().items()) == [(7, 2.0), (3, 2.5), (9, 1.0), (4, 1.0)]
    assert read_decisions(store.path) == ({7: "b", 3: None}, store.random_rows())


def test_reading_a_damaged_file_of_decisions(tmp_path: Path) -> None:
    (tmp_path / "d.sqlite").write_bytes(b"no database" * 100)
    with pytest.raises(UserError, match="is not a file of decisions"):
        read_decisions(tmp_path / "d.sqlite")


def test_accepted_suggestions_are_not_checks(store: Store) -> None:
    """A step with the automatic prefix changes labels, but no person has looked at these rows."""
    store.decide([make_choice(1)], "t", "1")
    store.decide([make_choice(2), make_choice(3)], "t", f"{AUTOMATIC}2")
    assert [d.is_automatic for d in store.current_decisions().values()] == [False, True, True]
    assert read_decisions(store.path)[0] == {1: "b"}
    assert set(store.undo("t", "3")) == {2, 3}
    assert set(store.current_decisions()) == {1}
