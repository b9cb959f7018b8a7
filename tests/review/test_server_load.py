"""The server under load: slow clients, many clients, oversized requests, and what it writes to its log."""

import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
from review_helpers import Client, make_audited_items, serve

from warpi.review import server as module

CLIENTS = 50


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


@pytest.mark.slow
def test_five_thousand_decisions_of_fifty_clients(client: Client) -> None:
    for seen in range(5):  # each row is decided five times
        _decide_all(client, range(1000), tag=str(seen))


def _decide_all(client: Client, rows: range, tag: str = "") -> None:
    current = client.server.review.store.current_decisions
    before = {row: decision.id for row, decision in current().items()}
    seconds = []

    def decide(row: int) -> None:
        start = time.monotonic()
        status, answer, _ = client.decide(
            row, "change", "b", before.get(row, 0), tab=f"t{row % CLIENTS}", step=f"{tag}-{row}"
        )
        seconds.append(time.monotonic() - start)
        assert status == 200, answer

    with ThreadPoolExecutor(CLIENTS) as pool:
        list(pool.map(decide, rows))
    after = current()
    assert after.keys() >= {*rows}
    assert all(after[row].id != before.get(row) for row in rows)
    print(f"{len(rows)} decisions of {CLIENTS} clients: p99 {1000 * np.quantile(seconds, 0.99):.0f} ms")


def test_another_address_is_only_used_if_asked(tmp_path: Path) -> None:
    with serve(make_audited_items(10, ("a", "b")), tmp_path / "review") as client:
        assert client.server.server_address[0] == "127.0.0.1"
        session = client.server.review
        with module.Server(session, 0, "0.0.0.0") as other:
            assert other.server_address[0] == "0.0.0.0"
            assert socket.gethostname() in other.link
