"""The decisions of a review in an SQLite file: an append-only log, and views of the decisions in force."""

import json
import sqlite3
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing, contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple, TypeVar
from urllib.parse import quote

from warpi.errors import UserError
from warpi.utils.files import sha256

T = TypeVar("T")

FORMAT = "warpi-review/1"
ACTIONS = ("keep", "change", "skip", "unsure")
AUTOMATIC = "auto-"
"""Prefix of the name of a step that accepts suggestions without a person looking at each row."""
COPIES = "copies-"
"""Prefix of the name of a step that keeps one of several copies and drops the others."""
_SCHEMA = """
CREATE TABLE IF NOT EXISTS about (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS log (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    time TEXT NOT NULL,
    tab TEXT NOT NULL,      -- browser tab that decided
    step TEXT NOT NULL,     -- one key or click; its decisions are undone together
    row INTEGER NOT NULL,   -- row of the data set
    action TEXT NOT NULL CHECK (action IN ('keep', 'change', 'skip', 'unsure', 'undo')),
    label TEXT,             -- the right class, for keep and change
    given TEXT NOT NULL,    -- the given label that the person saw
    suggested TEXT,         -- the suggested label that the person saw
    undoes INTEGER UNIQUE REFERENCES log (id)
);
CREATE INDEX IF NOT EXISTS log_row ON log (row);
CREATE INDEX IF NOT EXISTS log_tab ON log (tab, step);
CREATE TRIGGER IF NOT EXISTS log_stays BEFORE UPDATE ON log BEGIN SELECT RAISE(ABORT, 'the log is append-only'); END;
CREATE TRIGGER IF NOT EXISTS log_grows BEFORE DELETE ON log BEGIN SELECT RAISE(ABORT, 'the log is append-only'); END;
CREATE VIEW IF NOT EXISTS valid AS
    SELECT * FROM log WHERE action != 'undo' AND NOT EXISTS (SELECT 1 FROM log AS later WHERE later.undoes = log.id);
CREATE VIEW IF NOT EXISTS standing AS SELECT * FROM valid WHERE id IN (SELECT max(id) FROM valid GROUP BY row);
"""


_SCHEMAS = ("2e3edebf34bf2533", "90a61b7e7d68a472")
"""Hashes of this schema and of an older one with other comments. Others are refused: their views may never end."""
_ODD_ENTRIES = """SELECT count(*) FROM log WHERE
    typeof(row) != 'integer' OR row NOT BETWEEN 0 AND :rows - 1
    OR action NOT IN ('keep', 'change', 'skip', 'unsure', 'undo')
    OR (action IN ('keep', 'change')) != (label IS NOT NULL)
    OR label NOT IN (SELECT value FROM json_each(:classes))
    OR typeof(time) != 'text' OR typeof(tab) != 'text' OR typeof(step) != 'text' OR typeof(given) != 'text'"""
"""Counts the entries that no version of warpi has written."""
_COLUMNS = """id, row, action, label, tab, time,
    (SELECT given FROM log AS line WHERE line.row = {0}.row ORDER BY line.id LIMIT 1), step"""


class Decision(NamedTuple):
    """A decision in force about a row."""

    id: int  # in the log
    row: int
    action: str  # one of ACTIONS
    label: str | None  # name of the right class; None for skip and unsure
    tab: str
    time: str
    given: str = ""  # the given label when the row was first decided
    step: str = ""

    @property
    def is_automatic(self) -> bool:
        """Whether a suggestion was accepted without looking at the row. Such a label is not checked by a person."""
        return self.step.startswith(AUTOMATIC)

    @property
    def is_dropped(self) -> bool:
        """Whether the row is omitted from the corrected data, because a copy of it is kept."""
        return self.step.startswith(COPIES) and self.action == "unsure"


class Choice(NamedTuple):
    """A decision that a person wants to make about a row. `seen` is the id of the decision they saw (0: none)."""

    row: int
    seen: int
    action: str
    label: str | None
    given: str
    suggested: str | None


class Outcome(NamedTuple):
    """Decisions in force about the rows of a step. `refused` are rows that someone else decided in the meantime."""

    done: dict[int, Decision | None]
    refused: dict[int, Decision | None]


class _PendingChange:
    """A change of the file for which a thread waits, and then its result or error."""

    def __init__(self, change: Callable[[], Any]) -> None:
        self.change = change
        self.result: Any = None
        self.error: Exception | None = sqlite3.OperationalError("interrupted")
        self.is_done = False


class Store:
    """The decisions about one data set, in one file. Several tabs, threads and processes may use it at the same time.

    A step is on disk as a whole when its method returns. Steps that threads make at the same time share a transaction,
    because each waits for the disk (group commit). Nothing is ever changed or deleted: undo adds an entry to the log.
    """

    def __init__(self, path: Path, about: Mapping[str, Any]) -> None:
        self.path = path
        self._lock = threading.RLock()
        self._waiting: deque[_PendingChange] = deque()
        self._in_force: dict[int, Decision] = {}  # the decisions in force, as of the state `_read_at` of the file
        self._read_at: int | None = None
        self._shown: Mapping[int, Decision] | None = None  # a copy of `_in_force` that is never changed
        # The decisions of each prefix, with the copy in `_shown` from which they were made.
        self._by_prefix: dict[str, tuple[Mapping[int, Decision], dict[int, Decision]]] = {}
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._db = sqlite3.connect(path, timeout=30, isolation_level=None, check_same_thread=False)
            self._db.execute("PRAGMA journal_mode = WAL")
            self._db.execute("PRAGMA synchronous = FULL")
            self._db.executescript(_SCHEMA)
            _check_schema(self._db, path)
            self._check_about({"format": FORMAT, **about})
        except (OSError, sqlite3.Error) as e:
            raise UserError(f"cannot store decisions in {path}: {e}; choose another --out") from e

    def _check_about(self, about: Mapping[str, Any]) -> None:
        """Raise if the file is about another data set, because decisions identify rows only by number."""
        wanted = {key: json.dumps(value) for key, value in about.items()}
        with self._writing() as db:
            stored = dict(db.execute("SELECT key, value FROM about"))
            db.executemany("INSERT OR IGNORE INTO about VALUES (?, ?)", wanted.items())
        for key, value in wanted.items():
            before = stored.get(key, value)
            if before != value:
                raise UserError(
                    f"{self.path} contains decisions about other data: {key} was {before[:80]}, now {value[:80]}; "
                    "choose another --out"
                )
        _check_entries(self._db, self.path, {**stored, **wanted})

    @contextmanager
    def _writing(self) -> Iterator[sqlite3.Connection]:
        with self._lock:
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield self._db
                self._db.execute("COMMIT")
            except BaseException:
                if self._db.in_transaction:  # a full disk ends the transaction
                    self._db.execute("ROLLBACK")
                raise

    def _commit(self, change: Callable[[], T]) -> T:
        """Change the file, in one transaction with all other waiting changes. The change is on disk on return.

        The first thread that gets the lock commits for all threads that wait for it.
        """
        pending = _PendingChange(change)
        self._waiting.append(pending)
        with self._lock:
            if not pending.is_done:
                self._commit_waiting()
        if pending.error is not None:
            raise pending.error
        result: T = pending.result
        return result

    def _commit_waiting(self) -> None:
        changes = [self._waiting.popleft() for _ in range(len(self._waiting))]
        try:
            self._run_together(changes)
        except Exception:  # one of them fails, or all of them together are too large for the disk
            for pending in changes:
                try:
                    self._run_together([pending])
                except Exception as error:
                    pending.error = error
        finally:
            for pending in changes:
                pending.is_done = True

    def _run_together(self, changes: list[_PendingChange]) -> None:
        """Run changes in one transaction. If one fails, none takes effect."""
        try:
            with self._writing():
                for pending in changes:
                    pending.result = pending.change()
        except BaseException:
            self._read_at = None  # the decisions in memory may contain some that were not stored
            raise
        for pending in changes:
            pending.error = None

    def remember_random(self, weights: Mapping[int, float]) -> None:
        """Add rows that were drawn at random, in the order of their list, and how many rows each stands for."""
        with self._writing() as db:
            known = self.random_rows() | dict(weights)
            value = json.dumps([[row, weight] for row, weight in known.items()])
            db.execute("INSERT OR REPLACE INTO about VALUES ('random_rows', ?)", (value,))

    def random_rows(self) -> dict[int, float]:
        """The rows of all reviewed lists that were drawn at random, with their weights."""
        with self._lock:
            stored = self._db.execute("SELECT value FROM about WHERE key = 'random_rows'").fetchone()
        return _parse_random(stored and stored[0], self.path)

    def is_empty(self) -> bool:
        """Whether the log has no decision, not even an undone one."""
        with self._lock:
            return self._db.execute("SELECT 1 FROM log LIMIT 1").fetchone() is None

    def current_decisions(self) -> Mapping[int, Decision]:
        """The decisions in force, by row. Returns the same object until a decision is made."""
        with self._lock:
            self._read_again_if_changed()
            if self._shown is None:
                self._shown = dict(self._in_force)
            return self._shown

    def _read_again_if_changed(self) -> None:
        """Read the decisions in force, if another process has written since they were read."""
        (version,) = self._db.execute("PRAGMA data_version").fetchone()  # own changes do not count
        if version != self._read_at:
            entries = self._db.execute(f"SELECT {_COLUMNS.format('standing')} FROM standing").fetchall()
            self._in_force = {entry[1]: Decision(*entry) for entry in entries}
            self._read_at = version
            self._shown = None

    def _read_rows(self, rows: Iterable[int]) -> dict[int, Decision | None]:
        """Read the decisions in force about some rows that have changed."""
        query = f"SELECT {_COLUMNS.format('valid')} FROM valid WHERE row = ? ORDER BY id DESC LIMIT 1"
        decisions: dict[int, Decision | None] = {}
        self._shown = None
        for row in rows:
            entry = self._db.execute(query, (row,)).fetchone()
            decisions[row] = Decision(*entry) if entry else None
            if entry:
                self._in_force[row] = Decision(*entry)
            else:
                self._in_force.pop(row, None)
        return decisions

    def decisions_of(self, prefix: str) -> Mapping[int, Decision]:
        """The last decision about each row, if not undone, by tabs whose name begins with `prefix`."""
        everything = self.current_decisions()
        with self._lock:
            known = self._by_prefix.get(prefix)
            if known is None or known[0] is not everything:
                query = (
                    f"SELECT {_COLUMNS.format('valid')} FROM valid WHERE id IN "
                    "(SELECT max(id) FROM valid WHERE substr(tab, 1, ?) = ? GROUP BY row)"
                )
                entries = self._db.execute(query, (len(prefix), prefix)).fetchall()
                known = (everything, {entry[1]: Decision(*entry) for entry in entries})
                self._by_prefix[prefix] = known
            return known[1]

    def tabs(self) -> list[str]:
        """The names of all tabs that have decided something."""
        with self._lock:
            return [tab for (tab,) in self._db.execute("SELECT DISTINCT tab FROM log").fetchall()]

    def decide(self, choices: Iterable[Choice], tab: str, step: str, prefix: str = "") -> Outcome:
        """Store decisions. If someone else has decided a row that the person saw as open, the first decision stays.

        A step that is sent again because the response was lost is stored only once. If several people review the same
        rows, each has a `prefix`. A row is open to a person until a tab whose name begins with it has decided the row.
        """
        asked = list(choices)
        return self._commit(lambda: self._decide(asked, tab, step, prefix))

    def _decide(self, choices: list[Choice], tab: str, step: str, prefix: str) -> Outcome:
        self._read_again_if_changed()
        known = self.decisions_of(prefix) if prefix else self._in_force
        if stored := self._rows_of_step(tab, step):
            return Outcome({row: known.get(row) for row in stored}, {})
        before = {choice.row: known.get(choice.row) for choice in choices}
        seen = {row: decision.id if decision else 0 for row, decision in before.items()}
        free = {choice.row: choice for choice in choices if seen[choice.row] == choice.seen}
        now = _now()
        self._db.executemany(
            "INSERT INTO log (time, tab, step, row, action, label, given, suggested) VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
            [(now, tab, step, row, c.action, c.label, c.given, c.suggested) for row, c in free.items()],
        )
        refused = {row: decision for row, decision in before.items() if row not in free}
        return Outcome(self._read_rows(free), refused)

    def undo(self, tab: str, step: str) -> dict[int, Decision | None]:
        """Undo the last step of a tab that is not undone yet; return the decisions then in force about its rows.

        Later decisions of other tabs about the same rows stay.
        """
        return self._commit(lambda: self._undo(tab, step))

    def _undo(self, tab: str, step: str) -> dict[int, Decision | None]:
        self._read_again_if_changed()
        if stored := self._rows_of_step(tab, step):
            return {row: self._in_force.get(row) for row in stored}
        last = self._db.execute("SELECT step FROM valid WHERE tab = ? ORDER BY id DESC LIMIT 1", (tab,)).fetchone()
        if last is None:
            return {}
        entries = self._db.execute(
            "SELECT id, row, given, suggested FROM valid WHERE tab = ? AND step = ?", (tab, last[0])
        ).fetchall()
        now = _now()
        self._db.executemany(
            "INSERT INTO log (time, tab, step, row, action, given, suggested, undoes) "
            "VALUES (?, ?, ?, ?, 'undo', ?, ?, ?)",
            [(now, tab, step, row, given, suggested, entry) for entry, row, given, suggested in entries],
        )
        return self._read_rows(row for _, row, _, _ in entries)

    def _rows_of_step(self, tab: str, step: str) -> list[int]:
        entries = self._db.execute("SELECT row FROM log WHERE tab = ? AND step = ?", (tab, step)).fetchall()
        return [row for (row,) in entries]

    def close(self) -> None:
        with self._lock:
            self._db.close()


def read_decisions(path: Path) -> tuple[dict[int, str | None], dict[int, float]]:
    """The label in force of every row that a person decided (None: unsure or skipped), and `Store.random_rows`.

    Suggestions that were accepted automatically are omitted. The file is only read, and may be about any data set.
    """
    try:
        with closing(sqlite3.connect(f"file:{quote(str(path))}?mode=ro", uri=True, timeout=30)) as db:
            _check_schema(db, path)
            about = dict(db.execute("SELECT key, value FROM about"))
            _check_entries(db, path, about)
            query = "SELECT row, label FROM standing WHERE substr(step, 1, ?) != ?"
            labels = dict(db.execute(query, (len(AUTOMATIC), AUTOMATIC)).fetchall())
    except sqlite3.Error as e:
        raise UserError(f"{path} is not a file of decisions ({e}); move it away, or restore it") from e
    return labels, _parse_random(about.get("random_rows"), path)


def _check_schema(db: sqlite3.Connection, path: Path) -> None:
    """Raise if a file has other tables, views or triggers than this module creates."""
    objects = db.execute("SELECT type, name, sql FROM sqlite_master ORDER BY name").fetchall()
    if sha256(json.dumps(objects))[:16] not in _SCHEMAS:
        raise UserError(f"{path} is damaged: its tables are not those of `warpi review`; move it away, or restore it")


def _check_entries(db: sqlite3.Connection, path: Path, about: Mapping[str, Any]) -> None:
    """Raise if the log contains what the review page cannot have stored: unknown rows, classes or actions."""
    known = {"rows": about.get("rows"), "classes": about.get("classes", "null")}
    (odd,) = db.execute(_ODD_ENTRIES, known).fetchone()
    if odd:
        raise UserError(f"{path} is damaged: {odd} of its entries are not decisions about the data; restore it")


def _parse_random(stored: Any, path: Path) -> dict[int, float]:
    try:
        return {int(row): float(weight) for row, weight in json.loads(stored or "[]")}
    except (TypeError, ValueError, OverflowError, RecursionError) as e:
        raise UserError(f"{path} is damaged: its list of random rows cannot be read; restore it") from e


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")
