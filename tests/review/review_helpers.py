"""Data, decisions and an HTTP client for the tests of `warpi review`."""

import http.client
import json
import socket
import sqlite3
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from warpi.audit.decisions import Choice, Decision, Store
from warpi.audit.result import Audit
from warpi.data.dataset import Dataset
from warpi.data.duplicates.result import Duplicates
from warpi.data.examples import Scale, TensorExamples
from warpi.data.numeric import Columns, NumberColumn, make_features
from warpi.data.split import Split
from warpi.review.items import Items, items_from_data
from warpi.review.page_requests import ReviewSession
from warpi.review.people import People
from warpi.review.server import Server

NAMES = ("<b>bold</b>", "a & b", '"quote"\'')


def make_choice(row: int, label: str | None = "b", seen: int = 0, action: str = "change") -> Choice:
    return Choice(row, seen, action, label, "a", "b")


def read_log(store: Store) -> list[str]:
    """The action of every entry of the log of a store."""
    with closing(sqlite3.connect(store.path)) as db:
        return [action for (action,) in db.execute("SELECT action FROM log ORDER BY id")]


def make_decisions(rows: dict[int, str]) -> dict[int, Decision]:
    return {row: Decision(i, row, "change", label, "", "") for i, (row, label) in enumerate(rows.items())}


def make_images(n: int = 24, classes: tuple[str, ...] = NAMES) -> Dataset:
    """Images in memory, with class names full of markup."""
    x = torch.randint(256, (n, 3, 6, 6), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    examples = TensorExamples(x, Scale(torch.tensor(127.0), torch.tensor(64.0)))
    return Dataset("x<y", examples, torch.arange(n) % len(classes), classes)


def make_audited_items(
    n: int,
    classes: tuple[str, ...],
    *,
    is_table: bool = False,
    accuracy: float | None = 0.9,
    n_trusted: int = 0,
) -> Items:
    """Rows whose true class is row % K and whose label is that of the next class, and their audit.

    A table has a column that tells the true class, and two that do not.
    """
    K = len(classes)
    dataset = make_images(n + n_trusted, classes)
    truth = np.arange(n + n_trusted) % K
    if is_table:
        rng = np.random.default_rng(0)
        x = np.column_stack([rng.normal(size=n + n_trusted), truth * 10.123456, rng.normal(size=n + n_trusted) * 1e3])
        columns = Columns("label", {"noise": NumberColumn(), "telling": NumberColumn(), "large": NumberColumn()})
        dataset = replace(dataset, examples=make_features(torch.from_numpy(x), columns), encoding=columns)
    row = np.arange(n)
    given = (truth[:n] + 1) % K
    sure = np.linspace(0.99, 0.55, n)
    p = np.full((n, K), 0.0)
    p[row, truth[:n]] = sure
    p[row, given] = 1 - sure
    suggested = p.argmax(1)
    facts: dict[str, Any] = {"noise_rate": {"n": n, "rate": 0.5, "low": None, "high": None}, "run": "runs/x"}
    facts |= {"trusted_accuracy": accuracy, "probabilities": "p", "uncertainty": "u"}
    audit = Audit(row, given, suggested, sure, 1 - sure, sure > 0.5, sure, p, np.ones((K, K)) / K, classes, (), facts)
    trusted = (
        Split(dataset.examples, torch.arange(n, n + n_trusted), torch.from_numpy(truth[n:])) if n_trusted else None
    )
    return replace(
        items_from_data(dataset, torch.from_numpy(np.concatenate([given, truth[n:]]))),
        row=row,
        suggested=suggested,
        wrong_probability=sure,
        uncertainty=sure,
        review_first=sure > 0.5,
        probabilities=p,
        trusted=trusted,
        audit=audit,
    )


def make_copies(items: Items, groups: list[list[int]], tested: dict[int, int]) -> Items:
    """Items whose audit names groups of copies among the rows; `tested` are groups by row of a separate test set."""
    n = len(items.given)
    group = np.full(n + 2, -1, dtype=np.int64)
    for g, rows in enumerate(groups):
        group[rows] = g
    for row, g in tested.items():
        group[n + row] = g
    label = tuple(items.classes[k] for k in items.given.tolist()) + items.classes[:2]
    found = Duplicates(
        part=("train",) * n + ("test",) * 2,
        row=np.append(np.arange(n), [0, 1]),
        label=label,
        path=None,
        group=group,
        similarity=np.where(group >= 0, 1.0, 0.0),
        outlier_score=np.zeros(n + 2),
        problem=("",) * (n + 2),
        of_data=np.arange(n + 2) < n,
    )
    assert isinstance(items.audit, Audit)
    test = Split(items.dataset.examples, torch.tensor([5, 6]), torch.tensor([0, 1]))
    return replace(items, audit=replace(items.audit, copies=found), test=test)


def make_unusual(items: Items, outliers: list[int], problems: dict[int, str]) -> Items:
    """Items whose audit has found outliers, and images without content, among the rows and in a separate test set."""
    with_copies = make_copies(items, [], {})
    assert with_copies.audit is not None
    found = with_copies.audit.copies
    assert found is not None
    score = np.where(np.isin(np.arange(len(found)), outliers), 9.0, 0.0)
    problem = tuple(problems.get(i, "") for i in range(len(found)))
    copies = replace(found, outlier_score=score, problem=problem)
    return replace(with_copies, audit=replace(with_copies.audit, copies=copies))


class Client:
    """Sends requests like a browser, or like an attacker."""

    def __init__(self, server: Server, person: str = "") -> None:
        self.server = server
        self.port = server.server_port
        self.cookie = f"{server.cookie}={server.tokens[person] if person else server.token}"

    def ask(
        self, method: str, path: str, body: object = None, **headers: str | None
    ) -> tuple[int, Any, dict[str, str]]:
        sent = {"Host": f"127.0.0.1:{self.port}", "Cookie": self.cookie}
        if method == "POST":
            sent |= {"Origin": f"http://127.0.0.1:{self.port}", "Content-Type": "application/json"}
        sent |= {name.replace("_", "-"): value for name, value in headers.items()}  # type: ignore[misc]
        content = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
        with closing(http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)) as connection:
            connection.putrequest(method, path, skip_host=True, skip_accept_encoding=True)
            for name, value in sent.items():
                if value is not None:
                    connection.putheader(name, value)
            if method == "POST" and "Content_Length" not in headers:
                connection.putheader("Content-Length", str(len(content)))
            connection.endheaders(content)
            answer = connection.getresponse()
            raw = answer.read()
            kind = answer.headers.get_content_type()
            return answer.status, json.loads(raw) if kind == "application/json" else raw, dict(answer.headers)

    def decide(
        self, row: int, action: str, label: str | None = None, seen: int = 0, tab: str = "t", step: str = ""
    ) -> Any:
        choices = [{"row": row, "seen": seen, "action": action, "label": label}]
        return self.ask("POST", "/api/decide", {"tab": tab, "step": step or f"{row}{action}", "choices": choices})


@contextmanager
def serve(
    items: Items, folder: Path, port: int = 0, people: Sequence[str] = (), overlap: float = 0.0
) -> Iterator[Client]:
    settings = {"data": "x", "noise": "given", "seed": 0}
    with ExitStack() as stack:
        store = stack.enter_context(closing(Store(folder / "decisions.sqlite", items.identity)))
        together = People(people, items, store, overlap) if people else None
        sessions = {
            name: ReviewSession(together.items_of(name), own, folder, settings, "none", together, name)
            for name, own in (together.stores if together else {}).items()
            if together
        }
        session = ReviewSession(items, store, folder, settings, people=together)
        server = stack.enter_context(Server(session, port, people=sessions))
        connections: list[socket.socket] = []
        accept = server.get_request

        def accept_and_record() -> tuple[socket.socket, Any]:
            connection, address = accept()
            connections.append(connection)
            return connection, address

        server.get_request = accept_and_record  # type: ignore[method-assign]
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield Client(server)
        finally:
            server.shutdown()
            thread.join()
            for connection in connections:  # as if the process had ended
                with suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)
