"""What a person decided, in SQLite: a log that only grows, from which what stands follows."""

import json
import sqlite3
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from warpi.errors import UserError

FORMAT = "warpi-review/1"
ACTIONS = ("keep", "change", "skip", "unsure")
_SCHEMA = """
CREATE TABLE IF NOT EXISTS about (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS log (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    time TEXT NOT NULL,
    tab TEXT NOT NULL,      -- who: a tab of a browser
    step TEXT NOT NULL,     -- what was decided by one key or click; undone as one
    row INTEGER NOT NULL,   -- of the data set
    action TEXT NOT NULL CHECK (action IN ('keep', 'change', 'skip', 'unsure', 'undo')),
    label TEXT,             -- the right class, of keep and change
    given TEXT NOT NULL,    -- the label that the person saw, and what was suggested
    suggested TEXT,
    undoes INTEGER UNIQUE REFERENCES log (id)
);
CREATE INDEX IF NOT EXISTS log_row ON log (row);
CREATE INDEX IF NOT EXISTS log_tab ON log (tab, step);
CREATE TRIGGER IF NOT EXISTS log_stays BEFORE UPDATE ON log BEGIN SELECT RAISE(ABORT, 'the log only grows'); END;
CREATE TRIGGER IF NOT EXISTS log_grows BEFORE DELETE ON log BEGIN SELECT RAISE(ABORT, 'the log only grows'); END;
CREATE VIEW IF NOT EXISTS valid AS
    SELECT * FROM log WHERE action != 'undo' AND NOT EXISTS (SELECT 1 FROM log AS later WHERE later.undoes = log.id);
CREATE VIEW IF NOT EXISTS standing AS SELECT * FROM valid WHERE id IN (SELECT max(id) FROM valid GROUP BY row);
"""


_COLUMNS = """id, row, action, label, tab, time,
    (SELECT given FROM log AS line WHERE line.row = {0}.row ORDER BY line.id LIMIT 1)"""


class Decision(NamedTuple):
    """What stands about a row."""

    id: int  # its place in the log
    row: int
    action: str  # of ACTIONS
    label: str | None  # the right class by name; None of skip and unsure
    tab: str
    time: str
    given: str = ""  # the label it had when it was decided for the first time


class Choice(NamedTuple):
    """What a person wants to decide about a row, who has seen the decision `seen` (0: none) about it."""

    row: int
    seen: int
    action: str
    label: str | None
    given: str
    suggested: str | None


class Outcome(NamedTuple):
    """What stands now about the rows of a step: those decided, and those that somebody else had decided meanwhile."""

    done: dict[int, Decision | None]
    refused: dict[int, Decision | None]


class Store:
    """The decisions about one data set in one file. Several tabs, threads and processes may use it at once.

    Every step is one transaction, which is on the disk when it returns. Nothing is ever changed or deleted: to undo is
    to add a line that says so.
    """

    def __init__(self, path: Path, about: Mapping[str, Any]) -> None:
        self.path, self._lock = path, threading.RLock()
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._db = sqlite3.connect(path, timeout=30, isolation_level=None, check_same_thread=False)
            self._db.execute("PRAGMA journal_mode = WAL")
            self._db.execute("PRAGMA synchronous = FULL")
            self._db.executescript(_SCHEMA)
            self._check_about({"format": FORMAT, **about})
        except (OSError, sqlite3.Error) as e:
            raise UserError(f"cannot keep decisions in {path}: {e}; choose another --out") from e

    def _check_about(self, about: Mapping[str, Any]) -> None:
        """Decisions are about rows by number: those of one data set must not be taken for those of another."""
        wanted = {key: json.dumps(value) for key, value in about.items()}
        with self._writing() as db:
            stored = dict(db.execute("SELECT key, value FROM about"))
            db.executemany("INSERT OR IGNORE INTO about VALUES (?, ?)", wanted.items())
        for key, value in wanted.items():
            if (was := stored.get(key, value)) != value:
                raise UserError(
                    f"{self.path} holds decisions about other data: {key} was {was[:80]}, is {value[:80]}; choose "
                    "another --out"
                )

    @contextmanager
    def _writing(self) -> Iterator[sqlite3.Connection]:
        with self._lock:
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield self._db
                self._db.execute("COMMIT")
            except BaseException:
                if self._db.in_transaction:  # a full disk ends it by itself
                    self._db.execute("ROLLBACK")
                raise

    def current_decisions(self) -> dict[int, Decision]:
        """What stands, by row."""
        with self._lock:
            found = self._db.execute(f"SELECT {_COLUMNS.format('standing')} FROM standing").fetchall()
        return {line[1]: Decision(*line) for line in found}

    def decision_about(self, row: int) -> Decision | None:
        """What stands about one row."""
        return self._about([row])[row]

    def _about(self, rows: Iterable[int]) -> dict[int, Decision | None]:
        query = f"SELECT {_COLUMNS.format('valid')} FROM valid WHERE row = ? ORDER BY id DESC LIMIT 1"
        with self._lock:
            found = {row: self._db.execute(query, (row,)).fetchone() for row in rows}
        return {row: Decision(*line) if line else None for row, line in found.items()}

    def decide(self, choices: Iterable[Choice], tab: str, step: str) -> Outcome:
        """Note decisions. Where somebody has decided since the person looked, that stands, and is said.

        A step that was noted before (its answer got lost, and it was sent again) is not noted twice.
        """
        choices, now = list(choices), datetime.now(UTC).isoformat(timespec="milliseconds")
        with self._writing() as db:
            known = db.execute("SELECT row FROM log WHERE tab = ? AND step = ?", (tab, step)).fetchall()
            if known:
                return Outcome(self._about(row for (row,) in known), {})
            before = self._about(choice.row for choice in choices)
            seen = {row: decision.id if decision else 0 for row, decision in before.items()}
            free = {choice.row: choice for choice in choices if seen[choice.row] == choice.seen}
            db.executemany(
                "INSERT INTO log (time, tab, step, row, action, label, given, suggested) "
                "VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
                [(now, tab, step, row, c.action, c.label, c.given, c.suggested) for row, c in free.items()],
            )
            refused = {row: decision for row, decision in before.items() if row not in free}
            return Outcome(self._about(free), refused)

    def undo(self, tab: str, step: str) -> dict[int, Decision | None]:
        """Take back the last step of a tab that is not taken back yet; what stands about its rows afterwards.

        Decisions that others made later about the same rows stay.
        """
        now = datetime.now(UTC).isoformat(timespec="milliseconds")
        with self._writing() as db:
            known = db.execute("SELECT row FROM log WHERE tab = ? AND step = ?", (tab, step)).fetchall()
            if known:
                return self._about(row for (row,) in known)
            last = db.execute("SELECT step FROM valid WHERE tab = ? ORDER BY id DESC LIMIT 1", (tab,)).fetchone()
            if last is None:
                return {}
            lines = db.execute(
                "SELECT id, row, given, suggested FROM valid WHERE tab = ? AND step = ?", (tab, last[0])
            ).fetchall()
            db.executemany(
                "INSERT INTO log (time, tab, step, row, action, given, suggested, undoes) "
                "VALUES (?, ?, ?, ?, 'undo', ?, ?, ?)",
                [(now, tab, step, row, given, suggested, line) for line, row, given, suggested in lines],
            )
            return self._about(row for _, row, _, _ in lines)

    def log(self) -> list[tuple[Any, ...]]:
        """Every line that was ever written: id, row, action, label, undoes."""
        with self._lock:
            return self._db.execute("SELECT id, row, action, label, undoes FROM log ORDER BY id").fetchall()

    def close(self) -> None:
        with self._lock:
            self._db.close()
