"""The server under load: slow clients, many clients, oversized requests, and what it writes to its log."""

import http.client
import json
import os
import signal
import socket
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from pathlib import Path

import numpy as np
import pytest
from review_helpers import Client, make_audited_items, serve

from warpi.review import server as module

CLIENTS = 50
SLOW = pytest.mark.slow


@pytest.fixture
def client(tmp_path: Path) -> Iterator[Client]:
    with serve(make_audited_items(1000, ("a", "b", "c")), tmp_path / "review") as connected:
        yield connected


def _open(client: Client) -> socket.socket:
    return socket.create_connection(("127.0.0.1", client.port), timeout=10)


def test_slow_clients_delay_nobody_and_are_cut_off(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_REQUEST_SECONDS", 0.5)
    with ExitStack() as stack:
        slow = [stack.enter_context(_open(client)) for _ in range(20)]
        for connection in slow:
            connection.sendall(b"GET / HT")
        start = time.monotonic()
        assert client.ask("GET", "/api/session")[0] == 200
        assert time.monotonic() - start < 5
        end = time.monotonic() + 8
        open_ones = set(slow)
        while open_ones and time.monotonic() < end:  # a byte now and then does not keep a connection open
            for connection in [*open_ones]:
                connection.settimeout(0.02)
                try:
                    connection.sendall(b"T")
                    if connection.recv(100) == b"":
                        open_ones.remove(connection)
                except TimeoutError:
                    pass
                except OSError:
                    open_ones.remove(connection)
        assert not open_ones


def test_a_slow_body_is_cut_off(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_REQUEST_SECONDS", 0.3)
    with _open(client) as connection:
        head = f"POST /api/undo HTTP/1.1\r\nHost: 127.0.0.1:{client.port}\r\nCookie: {client.cookie}\r\n"
        head += f"Origin: http://127.0.0.1:{client.port}\r\nContent-Type: application/json\r\n"
        head += "Content-Length: 9\r\n\r\n{"
        connection.sendall(head.encode())
        assert connection.recv(1000) == b""


def test_more_connections_than_allowed_are_closed(client: Client) -> None:
    client.server.free = threading.BoundedSemaphore(2)
    with ExitStack() as stack:
        for _ in range(2):
            stack.enter_context(_open(client)).sendall(b"G")
        time.sleep(0.2)
        with _open(client) as refused:
            assert refused.recv(10) == b""


def test_requests_that_are_not_http_get_a_short_answer_with_all_headers(
    client: Client, capfd: pytest.CaptureFixture[str]
) -> None:
    for sent in (
        b"\x16\x03 / HTTP/x\r\n\r\n",
        b"DELETE /<b>x HTTP/1.1\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"A" * 70_000,
    ):
        with _open(client) as connection:
            connection.sendall(sent)
            answer = connection.recv(5000).decode()
        assert "<b>x" not in answer
        assert "Content-Security-Policy" in answer, answer
    assert client.ask("GET", f"/?token={client.server.token}", Cookie=None)[0] == 200
    status, _, headers = client.ask("GET", "/")
    assert status == 200
    assert headers["Referrer-Policy"] == "no-referrer"
    assert headers["X-Frame-Options"] == "DENY"
    assert capfd.readouterr() == ("", "")  # neither the token nor anything else


def test_many_clients_at_once_record_every_decision_once(client: Client) -> None:
    _decide_all(client, rows=range(150))


def _decide_all(client: Client, rows: range) -> None:
    def decide(row: int) -> None:
        status, answer, _ = client.decide(row, "change", "b", tab=f"t{row % CLIENTS}")
        assert status == 200, answer

    with ThreadPoolExecutor(CLIENTS) as pool:
        list(pool.map(decide, rows))
    assert client.server.review.store.current_decisions().keys() == {*rows}


class KilledServer:
    """A server in a process of its own, which is killed and started again while clients use it."""

    def __init__(self, folder: Path, rows: int) -> None:
        program = Path(__file__).with_name("killed_server.py")
        command = [sys.executable, str(program), str(folder), str(rows)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.start()

    def start(self) -> None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write("start\n")
        self.process.stdin.flush()
        pid, port, token = self.process.stdout.readline().split()
        self.pid = int(pid)
        self.place = int(port), token

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)

    def close(self) -> None:
        self.kill()
        self.process.communicate("")


class Tab:
    """A browser tab that makes decisions one after the other without a pause, and repeats those without an answer."""

    def __init__(self, server: KilledServer, number: int) -> None:
        self.server = server
        self.number = number
        self.connection: http.client.HTTPConnection | None = None
        self.ids: dict[int, int] = {}  # id of the stored decision, by row
        self.seconds: list[float] = []  # of the requests that were answered
        self.repeated = 0

    def decide(self, rows: Iterable[int]) -> None:
        for row in rows:
            while row not in self.ids:
                try:
                    self._decide(row)
                except (OSError, http.client.HTTPException):  # killed
                    self._close()
                    self.repeated += 1
                    time.sleep(0.005)
        self._close()

    def _decide(self, row: int) -> None:
        port, token = self.server.place
        start = time.monotonic()
        if self.connection is None:
            self.connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        choice = {"row": row, "seen": 0, "action": "change", "label": "b"}
        request = json.dumps({"tab": f"t{self.number}", "step": str(row), "choices": [choice]})
        headers = {"Origin": f"http://127.0.0.1:{port}", "Content-Type": "application/json"}
        headers["Cookie"] = f"warpi_{port}={token}"
        self.connection.request("POST", "/api/decide", request, headers)
        answer = self.connection.getresponse()
        content = json.loads(answer.read())
        assert answer.status == 200, content
        assert content["refused"] == {}
        self.seconds.append(time.monotonic() - start)
        self.ids[row] = content["done"][str(row)]["seen"]

    def _close(self) -> None:
        if self.connection is not None:
            self.connection.close()
            self.connection = None


@pytest.mark.parametrize(
    ("decisions", "kills"), [(500, 2), pytest.param(5000, 0, marks=SLOW), pytest.param(5000, 20, marks=SLOW)]
)
def test_killed_under_load(decisions: int, kills: int, tmp_path: Path) -> None:
    """Fifty clients decide without pauses while the server is killed: each decision is stored once."""
    with closing(KilledServer(tmp_path, decisions)) as server, ThreadPoolExecutor(CLIENTS) as pool:
        tabs = [Tab(server, k) for k in range(CLIENTS)]
        busy = [pool.submit(tab.decide, range(tab.number, decisions, CLIENTS)) for tab in tabs]
        for k in range(kills):
            while sum(len(tab.ids) for tab in tabs) < decisions * (k + 1) / (kills + 1):
                assert not any(job.done() and job.exception() for job in busy)
                time.sleep(0.002)
            server.kill()
            server.start()
        for job in busy:
            job.result()
    with closing(sqlite3.connect(tmp_path / "decisions.sqlite")) as db:
        assert db.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
        log = db.execute("SELECT row, id FROM log").fetchall()
    assert len(log) == decisions
    answered = {row: number for tab in tabs for row, number in tab.ids.items()}
    assert dict(log) == answered
    repeated = sum(tab.repeated for tab in tabs)
    assert (repeated > 0) == (kills > 0)
    p50, p99 = 1000 * np.quantile([second for tab in tabs for second in tab.seconds], [0.5, 0.99])
    print(f"{decisions} decisions, {kills} kills, {repeated} requests repeated: p50 {p50:.0f} ms, p99 {p99:.0f} ms")
    if os.environ.get("WARPI_TIMING") == "required":  # only on a machine with nothing else to do
        assert p99 < 250


def test_two_servers_of_one_file(tmp_path: Path) -> None:
    """Of two decisions about a row, at different servers at the same time, one is stored and the other refused."""
    items = make_audited_items(60, ("a", "b", "c"))
    with serve(items, tmp_path) as one, serve(items, tmp_path) as other, ThreadPoolExecutor(8) as pool:
        jobs = [
            pool.submit(client.decide, row, "change", label, tab=label)
            for row in range(60)
            for client, label in ((one, "a"), (other, "b"))
        ]
        answers = [job.result() for job in jobs]
        assert {status for status, _, _ in answers} == {200}
        assert sum(len(answer["done"]) for _, answer, _ in answers) == 60
        assert sum(len(answer["refused"]) for _, answer, _ in answers) == 60
        assert one.server.review.store.current_decisions() == other.server.review.store.current_decisions()


def test_clients_that_leave_before_the_answer(client: Client) -> None:
    """The decision of a client that closes its connection at once is stored, or is not; the server goes on."""
    for row in range(30):
        choice = {"row": row, "seen": 0, "action": "change", "label": "b"}
        body = json.dumps({"tab": "t", "step": str(row), "choices": [choice]})
        head = f"POST /api/decide HTTP/1.1\r\nHost: 127.0.0.1:{client.port}\r\nCookie: {client.cookie}\r\n"
        head += f"Origin: http://127.0.0.1:{client.port}\r\nContent-Type: application/json\r\n"
        with _open(client) as connection:
            connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode()[: None if row % 2 else -9])
    assert client.ask("GET", "/api/session")[0] == 200
    end = time.monotonic() + 10
    while len(client.server.review.store.current_decisions()) < 15 and time.monotonic() < end:
        time.sleep(0.01)
    assert client.server.review.store.current_decisions().keys() == set(range(1, 30, 2))


def test_another_address_is_only_used_if_asked(tmp_path: Path) -> None:
    with serve(make_audited_items(10, ("a", "b")), tmp_path / "review") as client:
        assert client.server.server_address[0] == "127.0.0.1"
        session = client.server.review
        with module.Server(session, 0, "0.0.0.0") as other:
            assert other.server_address[0] == "0.0.0.0"
            assert socket.gethostname() in other.link
