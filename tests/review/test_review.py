"""`warpi review` without a browser: stored decisions, the server, the items, and the exports."""

import csv
import http.client
import json
import os
import random
import re
import shlex
import shutil
import signal
import socket
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from warpi.audit.result import Audit
from warpi.cli.app import main
from warpi.data.dataset import Dataset
from warpi.data.examples import Scale, TensorExamples
from warpi.data.image_files import FileExamples
from warpi.data.split import Split
from warpi.errors import UserError
from warpi.nets.registry import make_net
from warpi.noise.noise_file import read_noise_file
from warpi.review import render
from warpi.review.decisions import Choice, Decision, Store
from warpi.review.export import corrected_csv, fit_command, write_all, write_corrected, write_trusted
from warpi.review.items import Items, items_from_data, items_from_run
from warpi.review.server import Server
from warpi.review.session import ReviewSession
from warpi.runs.defaults import load_dataset
from warpi.training.task import Task, Truth, make_task

ASSETS = Path(render.__file__).with_name("assets")
NAMES = ("<b>bold</b>", "a & b", '"quote"\'')


def make_choice(row: int, label: str | None = "b", seen: int = 0, action: str = "change") -> Choice:
    return Choice(row, seen, action, label, "a", "b")


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with closing(Store(tmp_path / "d.sqlite", {"classes": ["a", "b"]})) as opened:
        yield opened


class TestStore:
    def test_decisions_are_stored(self, store: Store) -> None:
        store.decide([make_choice(3), make_choice(5, "a", action="keep")], "tab", "1")
        store.decide([make_choice(9, None, action="unsure")], "tab", "2")
        with closing(Store(store.path, {"classes": ["a", "b"]})) as reopened:
            decisions = {row: (d.action, d.label) for row, d in reopened.current_decisions().items()}
        assert decisions == {3: ("change", "b"), 5: ("keep", "a"), 9: ("unsure", None)}

    def test_decisions_about_other_data_are_refused(self, store: Store) -> None:
        with pytest.raises(UserError, match="decisions about other data: classes"):
            Store(store.path, {"classes": ["a", "c"]})

    def test_other_files_are_refused(self, tmp_path: Path) -> None:
        (tmp_path / "x").write_bytes(b"not a database, but long enough to be one" * 50)
        with pytest.raises(UserError, match="cannot store decisions in"):
            Store(tmp_path / "x", {})

    def test_undo_restores_the_previous_decision(self, store: Store) -> None:
        (first,) = store.decide([make_choice(3)], "tab", "1").done.values()
        assert first is not None
        store.decide([make_choice(3, "a", first.id, "keep")], "tab", "2")
        assert store.undo("tab", "3") == {3: first}
        assert store.undo("tab", "4") == {3: None}
        assert store.undo("tab", "5") == {}
        assert [line[2] for line in store.log()] == ["change", "keep", "undo", "undo"]

    def test_decisions_of_one_step_are_undone_together(self, store: Store) -> None:
        store.decide([make_choice(row) for row in range(4)], "tab", "1")
        assert store.undo("tab", "2") == dict.fromkeys(range(4))

    def test_log_is_append_only(self, store: Store) -> None:
        store.decide([make_choice(3)], "tab", "1")
        with closing(sqlite3.connect(store.path)) as db:
            for change in ("DELETE FROM log", "UPDATE log SET label = 'a'"):
                with pytest.raises(sqlite3.IntegrityError, match="append-only"):
                    db.execute(change)

    def test_second_of_two_tabs_is_refused(self, store: Store) -> None:
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

    def test_repeated_step_is_stored_once(self, store: Store) -> None:
        first = store.decide([make_choice(3)], "tab", "1")
        assert store.decide([make_choice(3)], "tab", "1") == first
        store.decide([make_choice(4)], "tab", "2")
        assert store.undo("tab", "u") == store.undo("tab", "u") == {4: None}
        assert len(store.log()) == 3
        assert set(store.current_decisions()) == {3}

    def test_failed_step_leaves_the_store_usable(self, store: Store) -> None:
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

    def test_random_steps_match_a_model_in_memory(self, store: Store) -> None:
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

    def test_decisions_survive_a_kill(self, tmp_path: Path) -> None:
        program = (
            "import itertools, sys\nfrom pathlib import Path\nfrom warpi.review.decisions import Choice, Store\n"
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


def make_images(n: int = 24, classes: tuple[str, ...] = NAMES) -> Dataset:
    """Images in memory, with class names full of markup."""
    x = torch.randint(256, (n, 3, 6, 6), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    examples = TensorExamples(x, Scale(torch.tensor(127.0), torch.tensor(64.0)))
    return Dataset("x<y", examples, torch.arange(n) % len(classes), classes)


class Client:
    """Sends requests like a browser, or like an attacker."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.port = server.server_port
        self.cookie = f"{server.cookie}={server.token}"

    def ask(
        self, method: str, path: str, body: object = None, **headers: str | None
    ) -> tuple[int, Any, dict[str, str]]:
        sent = {"Host": f"127.0.0.1:{self.port}", "Cookie": self.cookie}
        if method == "POST":
            sent |= {"Origin": f"http://127.0.0.1:{self.port}", "Content-Type": "application/json"}
        sent |= {name.replace("_", "-"): value for name, value in headers.items()}  # type: ignore[misc]
        content = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
        with closing(http.client.HTTPConnection("127.0.0.1", self.port, timeout=10)) as connection:
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
def serve(items: Items, folder: Path, port: int = 0) -> Iterator[Client]:
    with (
        closing(Store(folder / "decisions.sqlite", items.identity)) as store,
        Server(ReviewSession(items, store, folder, {"data": "x", "noise": "given", "seed": 0}), port) as server,
    ):
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


@pytest.fixture
def items() -> Items:
    dataset = make_images()
    made = items_from_data(dataset, dataset.y, np.arange(20)[::-1].copy(), None)
    p = np.full((20, 3), 0.1)
    p[:, 1] = 0.8
    issue = np.arange(20) < 8
    return replace(
        made,
        suggested=np.ones(20, np.int64),
        wrong_probability=np.linspace(1, 0, 20),
        review_first=issue,
        probabilities=p,
    )


@pytest.fixture
def client(items: Items, tmp_path: Path) -> Iterator[Client]:
    with serve(items, tmp_path / "review") as made:
        yield made


EVERYWHERE = ("/", "/page.js", "/page.css", "/icon.svg", "/api/session", "/api/items", "/api/near/1", "/picture/1")


class TestSecurity:
    @pytest.mark.parametrize("path", [*EVERYWHERE, "/api/corrected.csv", "/trusted/0", "/nothing", "/?token=wrong"])
    def test_get_requires_the_key(self, client: Client, path: str) -> None:
        for cookie in (None, "", f"{client.server.cookie}=wrong", f"other={client.server.token}"):
            assert client.ask("GET", path, Cookie=cookie)[0] == 403

    def test_post_requires_the_key(self, client: Client) -> None:
        for path in ("/api/decide", "/api/undo", "/api/export", f"/api/export?token={client.server.token}"):
            assert client.ask("POST", path, {}, Cookie=None)[0] == 403
        assert not client.server.review.store.log()

    def test_link_sets_a_strict_cookie(self, client: Client) -> None:
        path = client.server.link.partition(str(client.port))[2]
        status, page, headers = client.ask("GET", path, Cookie=None)
        assert status == 200
        assert b"<title>" in page
        assert re.fullmatch(rf"{client.cookie}; HttpOnly; SameSite=Strict; Path=/", headers["Set-Cookie"])
        assert len(client.server.token) >= 40
        assert (
            client.ask("GET", path.replace("/?", "/api/session?"), Cookie=None)[0] == 403
        )  # only the page accepts a token

    @pytest.mark.parametrize("odd", ['x={"a": 1}', "a b=1", "=", "x", '"', "x=\xe9"])
    def test_malformed_cookies_of_other_ports_are_ignored(self, client: Client, odd: str) -> None:
        for cookie in (f"{odd}; {client.cookie}", f"{client.cookie};{odd}"):
            assert client.ask("GET", "/api/session", Cookie=cookie)[0] == 200
        assert client.ask("GET", "/api/session", Cookie=odd)[0] == 403

    @pytest.mark.parametrize("host", ["evil.example", "127.0.0.1", "127.0.0.1:1", "evil.example:{port}", None])
    def test_other_host_names_are_refused(self, client: Client, host: str | None) -> None:
        for method, path in (("GET", "/api/session"), ("POST", "/api/undo"), ("GET", "/")):
            assert client.ask(method, path, {}, Host=host and host.format(port=client.port))[0] in (400, 421)

    def test_localhost_is_accepted(self, client: Client) -> None:
        host = f"localhost:{client.port}"
        assert client.ask("POST", "/api/undo", {"tab": "t", "step": "1"}, Host=host, Origin=f"http://{host}")[0] == 200

    @pytest.mark.parametrize(
        "origin", ["http://evil.example", "http://127.0.0.1:1", "https://127.0.0.1:{port}", "null", None]
    )
    def test_other_pages_cannot_post_with_the_cookie(self, client: Client, origin: str | None) -> None:
        body = {"tab": "t", "step": "1", "choices": [{"row": 1, "seen": 0, "action": "keep"}]}
        assert client.ask("POST", "/api/decide", body, Origin=origin and origin.format(port=client.port))[0] == 403
        assert not client.server.review.store.log()

    @pytest.mark.parametrize("site", ["cross-site", "same-site"])
    def test_other_pages_cannot_read_with_the_cookie(self, client: Client, site: str) -> None:
        for path in ("/api/items", "/picture/1", "/page.js"):
            assert client.ask("GET", path, Sec_Fetch_Site=site)[0] == 403
            assert client.ask("GET", path, Origin="http://evil.example")[0] == 403

    @pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data"])
    def test_forms_cannot_post(self, client: Client, kind: str) -> None:
        assert client.ask("POST", "/api/undo", {"tab": "t", "step": "1"}, Content_Type=kind)[0] == 415

    @pytest.mark.parametrize(
        "path",
        [
            *("/../../etc/passwd", "/%2e%2e/%2e%2e/etc/passwd", "//etc/passwd", "/assets/page.js", "/page.html"),
            *("/picture/../../../etc/passwd", "/picture/%2e%2e%2f%2e%2e%2fetc%2fpasswd", "/picture//etc/passwd"),
            *(
                "/picture/-1",
                "/picture/1.png",
                "/picture/1e1",
                "/picture/%D9%A3",
                "/picture/",
                "/picture/99999999999999999999",
            ),
            *("/picture/24", "/trusted/0", "/trusted/-1", "/api/near/20", "/api/near/x", "/api/decide", "/..%5c..%5cx"),
        ],
    )
    def test_unknown_paths_are_not_found(self, client: Client, path: str) -> None:
        status, answer, _ = client.ask("GET", path)
        assert status == 404
        assert set(answer) == {"error"}

    def test_other_verbs_are_refused(self, client: Client) -> None:
        for verb in ("PUT", "DELETE", "OPTIONS", "PATCH", "TRACE"):
            assert client.ask(verb, "/api/decide")[0] == 501
        assert client.ask("GET", "http://[")[0] == 400

    def test_every_answer_has_a_security_policy(self, client: Client) -> None:
        for path in (*EVERYWHERE, "/nothing"):
            headers = client.ask("GET", path)[2]
            policy = headers["Content-Security-Policy"]
            assert policy.startswith("default-src 'none'; script-src 'self'; style-src 'self'")
            assert "unsafe" not in policy
            assert (headers["X-Content-Type-Options"], headers["Referrer-Policy"]) == ("nosniff", "no-referrer")
        assert client.ask("GET", "/api/session", Cookie=None)[2]["Content-Security-Policy"] == policy

    def test_server_listens_on_this_machine_only(self, client: Client) -> None:
        assert client.server.server_address[0] == "127.0.0.1"
        with pytest.raises(UserError, match=f"cannot listen on port {client.port}"):
            Server(client.server.review, client.port)

    @pytest.mark.parametrize(
        "body",
        [
            *(b"", b"{", b"[]", b"[" * 100_000, {}, {"tab": "t", "step": "1"}),
            *({"tab": 1, "step": "1", "choices": [1]}, {"tab": "t", "step": "1", "choices": [1]}),
            {"tab": "\ud800", "step": "1", "choices": [{"row": 1, "seen": 0, "action": "keep"}]},
        ],
    )
    def test_invalid_bodies_are_refused(self, client: Client, body: object) -> None:
        assert client.ask("POST", "/api/decide", body)[0] == 400

    def test_large_bodies_are_refused(self, client: Client) -> None:
        for length in ("1048577", "-1", "x", "1" * 30):
            assert client.ask("POST", "/api/decide", b"", Content_Length=length)[0] == 413

    @pytest.mark.parametrize(
        "wanted",
        [
            *({"row": 1, "seen": 0, "action": "erase"}, {"row": 1, "seen": 0, "action": "change", "label": "no"}),
            *({"row": "1", "seen": 0, "action": "keep"}, {"row": 1, "seen": None, "action": "keep"}),
            *({"row": 21, "seen": 0, "action": "keep"}, {"row": True, "seen": 0, "action": "keep"}),
            {"row": 1, "seen": 0, "action": "change", "label": ["a"]},
        ],
    )
    def test_invalid_decisions_are_refused(self, client: Client, wanted: object) -> None:
        good = {"row": 2, "seen": 0, "action": "keep"}
        assert client.ask("POST", "/api/decide", {"tab": "t", "step": "1", "choices": [good, wanted]})[0] in (400, 404)
        assert not client.server.review.store.log()  # all or nothing


class TestPage:
    def test_assets_are_self_contained(self) -> None:
        paths = sorted(ASSETS.iterdir())
        assert len(paths) == 4
        for path in paths:
            text = path.read_text().replace("http://www.w3.org/2000/svg", "")
            assert not re.search(r"(https?:)?//[\w.-]+\.\w", text), path
            assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|new Function", text), (
                path
            )
            assert not re.search(r"\son\w+=|style=|<script>|<style", text) or path.suffix == ".js", path

    def test_assets_are_shipped(self) -> None:
        settings = (Path(__file__).parents[2] / "pyproject.toml").read_text()
        assert "review/assets/*" in settings

    def test_class_names_are_sent_as_data(self, client: Client) -> None:
        _, session, headers = client.ask("GET", "/api/session")
        assert session["classes"] == list(NAMES)
        assert headers["Content-Type"] == "application/json"
        assert client.decide(1, "change", NAMES[2])[1]["done"]["1"]["label"] == NAMES[2]

    def test_items_are_paged_in_order(self, client: Client) -> None:
        first = client.ask("GET", "/api/items?limit=3")[1]
        assert [item["row"] for item in first["items"]] == [19, 18, 17]
        assert first["total"] == 20
        rest = client.ask("GET", "/api/items?limit=100&after=2")[1]["items"]
        assert [item["row"] for item in rest] == list(range(17))[::-1]
        assert client.ask("GET", "/api/items?limit=-1")[1]["items"] == []
        item = rest[0]
        assert (item["given"], item["suggested"], item["p"]) == (NAMES[16 % 3], NAMES[1], [0.1, 0.8, 0.1])
        assert (item["state"], item["seen"], item["label"]) == ("open", 0, None)

    def test_filters(self, client: Client) -> None:
        def rows(**query: str) -> list[int]:
            text = "&".join(f"{k}={v}" for k, v in query.items())
            return [item["row"] for item in client.ask("GET", f"/api/items?limit=100&{text}")[1]["items"]]

        client.decide(19, "keep")
        client.decide(18, "accept")
        client.decide(17, "unsure")
        client.decide(2, "skip")
        client.decide(13, "change", NAMES[1])  # its given label: the same as keeping it
        assert rows(state="kept") == [19, 13]
        assert rows(state="changed") == [18]
        assert rows(state="decided") == [19, 18, 13]
        assert (rows(state="unsure"), rows(state="skipped")) == ([17], [2])
        assert rows(state="open", scope="first") == [16, 15, 14, 12]
        assert rows(given="a%20%26%20b", state="open") == [16, 10, 7, 4, 1]
        assert rows(suggested="a%20%26%20b") == list(range(20))[::-1]
        assert rows(suggested="%3Cb%3Ebold%3C/b%3E") == []
        for bad in ("state=gone", "scope=x", "given=x", "after=x", "limit=1.5"):
            assert client.ask("GET", f"/api/items?{bad}")[0] == 400
        counts = client.ask("GET", "/api/session")[1]["counts"]
        assert counts["first"] == {"open": 4, "kept": 2, "changed": 1, "skipped": 0, "unsure": 1}
        assert counts["all"] == {"open": 15, "kept": 2, "changed": 1, "skipped": 1, "unsure": 1}

    def test_concurrent_tabs_lose_nothing(self, client: Client) -> None:
        """Two tabs decide at the same time, some rows twice: the first decision stays and the second is refused."""
        refused: list[str] = []

        def work(tab: str, rows: list[int]) -> None:
            for row in rows:
                answer = client.decide(row, "keep" if tab == "one" else "unsure", tab=tab, step=str(row))[1]
                refused.extend(f"{tab}{row}" for row in answer["refused"])

        tabs = [
            threading.Thread(target=work, args=a) for a in (("one", list(range(12))), ("two", list(range(19, 7, -1))))
        ]
        for tab in tabs:
            tab.start()
        for tab in tabs:
            tab.join()
        decisions = client.server.review.store.current_decisions()
        assert set(decisions) == set(range(20))
        assert len(refused) == 4
        assert all(decisions[int(text[3:])].tab != text[:3] for text in refused)

    def test_full_disk_is_reported(self, client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
        def full(*_: object) -> None:
            raise sqlite3.OperationalError("database or disk is full")

        monkeypatch.setattr(client.server.review.store, "decide", full)
        status, answer, _ = client.decide(5, "keep")
        assert (status, answer) == (507, {"error": "Decisions cannot be stored: database or disk is full"})

    def test_undo_returns_the_restored_items(self, client: Client) -> None:
        client.decide(5, "keep", tab="one")
        client.decide(6, "keep", tab="two")
        answer = client.ask("POST", "/api/undo", {"tab": "one", "step": "u"})[1]
        assert [(item["row"], item["state"]) for item in answer["items"]] == [(5, "open")]
        assert answer["counts"]["all"]["kept"] == 1
        assert client.ask("POST", "/api/undo", {"tab": "three", "step": "v"})[1]["items"] == []

    def test_undo_of_a_row_that_is_not_listed(self, client: Client) -> None:
        """A tab may survive a restart of the server with another list of rows."""
        client.server.review.store.decide([Choice(23, 0, "keep", NAMES[2], NAMES[2], None)], "one", "1")
        answer = client.ask("POST", "/api/undo", {"tab": "one", "step": "u"})[1]
        assert (answer["items"], answer["rows"]) == ([], [23])
        assert client.ask("POST", "/api/undo", {"tab": "one", "step": "v"})[1]["rows"] == []

    def test_page_and_server_have_the_same_limit(self, tmp_path: Path) -> None:
        most = int(re.findall(r"AT_ONCE = (\d+)", (ASSETS / "page.js").read_text())[0])
        dataset = make_images(most + 1)
        choices = [{"row": row, "seen": 0, "action": "keep"} for row in range(most + 1)]
        with serve(items_from_data(dataset, dataset.y), tmp_path) as client:
            assert client.ask("POST", "/api/decide", {"tab": "t", "step": "1", "choices": choices})[0] == 400
            answer = client.ask("POST", "/api/decide", {"tab": "t", "step": "1", "choices": choices[:most]})[1]
        assert answer["counts"]["all"]["kept"] == most

    def test_images_and_neighbors(self, client: Client, items: Items) -> None:
        status, content, headers = client.ask("GET", "/picture/7")
        assert (status, headers["Content-Type"]) == (200, "image/png")
        from io import BytesIO

        from PIL import Image

        with Image.open(BytesIO(content)) as image:
            assert np.array_equal(np.asarray(image), items.examples.x[7].permute(1, 2, 0).numpy())  # type: ignore[attr-defined]
        assert client.ask("GET", "/api/near/7")[1] == {"near": []}
        for row in (8, 9, 10):
            client.decide(row, "keep")
        near = client.ask("GET", "/api/near/7")[1]["near"]
        assert sorted(n["row"] for n in near) == [8, 9, 10]
        x = items.examples.flat(torch.arange(24))
        assert near[0]["row"] == 8 + int((x[8:11] - x[7]).norm(dim=1).argmin())
        assert near[0]["label"] == NAMES[near[0]["row"] % 3]

    def test_export_never_replaces_an_earlier_one(self, client: Client) -> None:
        assert client.ask("POST", "/api/export", {})[0] == 409  # no decision yet
        for row in range(6):
            client.decide(row, "keep")
        made = client.ask("POST", "/api/export", {})[1]
        folder = client.server.review.folder
        assert made["path"] == str(folder / "export-1" / "trusted.npz")
        assert (made["size"], made["left_out"], made["missing"]) == (6, 0, [])
        assert client.ask("POST", "/api/export", {})[1] == made  # unchanged
        for row in (6, 7, 8, 9):
            client.decide(row, "keep")
        more = client.ask("POST", "/api/export", {})[1]
        assert more["path"] == str(folder / "export-2" / "trusted.npz")
        assert (more["size"], more["left_out"]) == (9, 1)
        assert client.ask("GET", "/api/corrected.csv")[1] == (folder / "export-2" / "corrected.csv").read_bytes()


def make_decisions(rows: dict[int, str]) -> dict[int, Decision]:
    return {row: Decision(i, row, "change", label, "", "") for i, (row, label) in enumerate(rows.items())}


class TestExport:
    def test_corrected_csv(self, items: Items) -> None:
        decisions = make_decisions({19: NAMES[1], 3: NAMES[2]}) | {4: Decision(9, 4, "unsure", None, "", "")}
        rows = list(csv.DictReader(corrected_csv(items, decisions).splitlines()))
        assert [int(row["row"]) for row in rows] == list(range(24))
        columns = ["row", "given_label", "label", "state", "verified", "suggested_label", "wrong_probability"]
        assert list(rows[0]) == columns
        assert list(rows[3].values()) == ["3", NAMES[0], NAMES[2], "changed", "1", NAMES[1], "0.157895"]
        assert [rows[19][c] for c in columns[1:5]] == [NAMES[1], NAMES[1], "kept", "1"]
        assert [rows[4][c] for c in columns[1:5]] == [NAMES[1], NAMES[1], "unsure", "0"]
        assert [rows[23][c] for c in columns[2:]] == [NAMES[2], "open", "0", "", ""]  # not listed

    def test_original_label_is_kept(self, items: Items, store: Store) -> None:
        """Also if a later review shows a label that was corrected before."""
        (first,) = store.decide([Choice(3, 0, "change", NAMES[2], NAMES[1], None)], "tab", "1").done.values()
        assert first is not None
        store.decide([Choice(3, first.id, "keep", NAMES[2], NAMES[2], None)], "tab", "2")
        row = list(csv.DictReader(corrected_csv(items, store.current_decisions()).splitlines()))[3]
        assert (row["given_label"], row["label"], row["state"]) == (NAMES[1], NAMES[2], "changed")

    def test_corrected_json_is_read_by_fit(self, items: Items, tmp_path: Path) -> None:
        write_corrected(items, make_decisions({3: NAMES[2]}), tmp_path / "c.json")
        y = read_noise_file(tmp_path / "c.json", items.dataset).y
        assert y[3] == 2
        assert torch.equal(y[4:], items.dataset.y[4:])
        write_corrected(items, make_decisions({3: NAMES[2]}), tmp_path / "c.json")
        with pytest.raises(UserError, match="a run may depend on it"):
            write_corrected(items, make_decisions({3: NAMES[1]}), tmp_path / "c.json")
        with pytest.raises(UserError, match=r"\.csv or \.json"):
            write_corrected(items, {}, tmp_path / "c.txt")

    def test_corrected_labels_are_refused_for_moved_rows(self, photos: Path, tmp_path: Path) -> None:
        """If an image file is renamed, the rows of others change, and the labels must not move with them."""
        folder = Path(shutil.copytree(photos, tmp_path / "photos"))

        def open_items() -> Items:
            dataset, _ = load_dataset(str(folder), image_size=8)
            return items_from_data(dataset, dataset.y)

        before = open_items()
        decisions = make_decisions({0: "red", 1: "blue"})
        path = write_corrected(before, decisions, tmp_path / "c.csv")
        read_noise_file(path, load_dataset(str(folder), image_size=16)[0])
        assert before.dataset.files is not None
        file = folder / before.dataset.files.paths[0]
        file.rename(file.with_stem("zzz"))
        with pytest.raises(UserError, match=r"moved, renamed, added.*restore them.*warpi review --export"):
            read_noise_file(path, open_items().dataset)
        content = path.read_bytes()
        assert write_corrected(open_items(), decisions, tmp_path / "c.csv") == tmp_path / "c-2.json"
        assert path.read_bytes() == content  # a run may depend on it

    def test_trusted_digits(self, digits: Dataset, tmp_path: Path) -> None:
        items = items_from_data(digits, digits.y)
        rows = {row: digits.classes[int(digits.y[row])] for row in range(57)}
        written = write_trusted(items, make_decisions(rows), tmp_path / "trusted.npz")
        meta, _ = load_dataset(str(tmp_path / "trusted.npz"), like=digits)
        least = int(digits.y[:57].bincount().min())
        assert meta.y.bincount().tolist() == [least] * 10
        assert (written.size, written.left_out) == (10 * least, 57 - 10 * least)
        task, _ = make_task(digits, "pair:0.4", meta_data=meta, limit=None)
        assert task.meta is not None
        assert len(task.meta) == 10 * least
        x, y = task.meta.examples.flat(task.meta.rows), task.meta.y
        at = [int((digits.examples.flat(torch.arange(57)) == row).all(1).nonzero()[0]) for row in x]
        assert torch.equal(digits.y[at], y)
        write_trusted(items, make_decisions(rows), tmp_path / "all.npz", balanced=False)
        assert len(load_dataset(str(tmp_path / "all.npz"), like=digits)[0].y) == 57
        with pytest.raises(UserError, match=r"a \.npz file, got"):
            write_trusted(items, make_decisions(rows), tmp_path / "trusted.csv")
        with pytest.raises(UserError, match="a run may depend on it"):
            write_trusted(items, make_decisions({0: "0"}), tmp_path / "trusted.npz")

    def test_trusted_table(self, tmp_path: Path) -> None:
        rng = np.random.default_rng(0)
        path = tmp_path / "t.csv"
        kinds = ['sa"id, so', "two\nlines", "plain"]
        with path.open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(["size", "kind", "split", "species", "trusted"])
            for i in range(60):
                part = "test" if i % 10 == 9 else "train"
                writer.writerow(
                    [repr(float(rng.normal() * 10.0 ** (i % 9 - 4))), kinds[i % 3], part, "ab"[i % 2], int(i < 4)]
                )
        dataset, _ = load_dataset(str(path), label="species")
        items = items_from_data(dataset, dataset.y, np.array([40, 30, 20]), None)
        assert items.describe(1)[1] == ("kind", "two\nlines")
        assert not items.has_pictures
        decisions = make_decisions({row: "b" if row % 3 else "a" for row in range(10, 30)})
        write_trusted(items, decisions, tmp_path / "trusted.csv", balanced=False)
        meta, _ = load_dataset(str(tmp_path / "trusted.csv"), label="species", like=dataset)
        assert len(meta.y) == 24  # including the four marked rows
        assert torch.equal(meta.examples.flat(torch.arange(4, 24)), dataset.examples.flat(torch.arange(10, 30)))
        task, _ = make_task(dataset, meta_data=meta)  # finds them among the rows of the data
        assert len(task.train) + len(task.val or ()) == 54 - 24

    def test_trusted_images(self, photos: Path, tmp_path: Path) -> None:
        dataset, _ = load_dataset(str(photos), image_size=8)
        assert dataset.files is not None
        items = items_from_data(dataset, dataset.y)
        decisions = make_decisions({0: "red", 1: "blue", 2: "red", 5: "blue"})
        write_trusted(items, decisions, tmp_path / "trusted")
        for path, root in ((tmp_path / "trusted", None), (tmp_path / "trusted.csv", photos)):
            write_trusted(items, decisions, path)
            meta, _ = load_dataset(str(path), root=root, image_size=8, like=dataset)
            task, _ = make_task(dataset, meta_data=meta, test=0.0, val=0.0)
            assert task.meta is not None
            assert (len(task.meta), len(task.train)) == (4, len(dataset.y) - 4)
        assert "--root" in fit_command(items, {"data": "p"}, tmp_path / "trusted.csv", None)
        with pytest.raises(UserError, match="a run may depend on it"):
            write_trusted(items, make_decisions({0: "red", 5: "blue"}), tmp_path / "trusted")
        write_corrected(items, decisions, tmp_path / "c.csv")
        again, _ = load_dataset(str(tmp_path / "c.csv"), root=photos, image_size=8)
        assert again.trusted is not None
        assert again.y[[0, 1, 2, 5]].tolist() == [1, 0, 1, 0]
        assert again.trusted.nonzero().flatten().tolist() == [0, 1, 2, 5]
        assert not again.test_is_clean  # the true labels are unknown

    def test_trusted_set_includes_earlier_examples(self, photos: Path, tmp_path: Path) -> None:
        """Trusted examples of a separate file are included, and later decisions about them count."""
        dataset, _ = load_dataset(str(photos), image_size=8)
        first = items_from_data(dataset, dataset.y)
        write_trusted(first, make_decisions({0: "red", 1: "blue"}), tmp_path / "one")
        meta, _ = load_dataset(str(tmp_path / "one"), image_size=8, like=dataset)
        later = replace(first, trusted=Split(meta.examples, torch.arange(2), meta.y))
        path, trusted = write_all(later, make_decisions({0: "blue", 4: "red", 6: "red"}), tmp_path)
        counts = {folder.name: len(list(folder.iterdir())) for folder in trusted.path.iterdir()}
        assert (path, counts, trusted.left_out) == (tmp_path / "export-1", {"blue": 2, "red": 2}, 0)

    def test_copies_of_trusted_examples_are_trusted(self, photos: Path, tmp_path: Path) -> None:
        """Rows with a copy in a separate trusted file are trusted, with the label from that file."""
        for size in (8, None):
            dataset, _ = load_dataset(str(photos), image_size=size)
            first = items_from_data(dataset, dataset.y)
            known = {0: "red", 1: "blue", 2: "red", 5: "blue"}
            write_trusted(first, make_decisions(known), tmp_path / "ok.csv")
            meta, _ = load_dataset(str(tmp_path / "ok.csv"), root=photos, image_size=size, like=dataset)
            later = replace(first, trusted=Split(meta.examples, torch.arange(4), meta.y))
            assert {row: dataset.classes[k] for row, k in later.trusted_rows.items()} == known
            rows = list(csv.DictReader(corrected_csv(later, make_decisions({0: "blue", 4: "red"})).splitlines()))
            assert [row["state"] for row in rows[:6]] == ["kept", "trusted", "trusted", "open", "kept", "trusted"]
            assert [rows[row]["label"] for row in (0, 1, 2, 4, 5)] == ["blue", "blue", "red", "red", "blue"]
            write_trusted(later, {}, tmp_path / "again.csv")
            same = [sorted((tmp_path / name).read_text().splitlines()) for name in ("ok.csv", "again.csv")]
            assert same[0] == same[1]

    def test_each_trusted_example_matches_one_row(self, tmp_path: Path) -> None:
        """Among rows with the same input, one with the same label is preferred, else the first one."""
        x, y = np.zeros((9, 2)), np.arange(9) % 3
        x[6:] = np.eye(3, 2) + 1
        np.savez(tmp_path / "x.npz", x=x, y=y)
        np.savez(tmp_path / "ok.npz", x=x[[0, 0, 0, 0, 7]], y=np.array([0, 1, 1, 1, 0]))
        dataset, _ = load_dataset(str(tmp_path / "x.npz"))
        meta, _ = load_dataset(str(tmp_path / "ok.npz"), like=dataset)
        items = replace(items_from_data(dataset, dataset.y), trusted=Split(meta.examples, torch.arange(5), meta.y))
        assert items.trusted_rows == {0: 0, 1: 1, 2: 1, 4: 1, 7: 0}
        assert write_trusted(items, make_decisions({7: "2"}), tmp_path / "t.npz", balanced=False).size == 5

    def test_trusted_folder_does_not_depend_on_the_location_of_the_data(self, photos: Path, tmp_path: Path) -> None:
        """File names determine the order of the rows, and this affects the training."""
        names = []
        for place in ("one", "two"):
            shutil.copytree(photos, tmp_path / place, symlinks=True)
            dataset, _ = load_dataset(str(tmp_path / place), image_size=8)
            items = items_from_data(dataset, dataset.y)
            write_trusted(items, make_decisions({0: "red", 1: "blue", 2: "red", 5: "blue"}), tmp_path / f"of-{place}")
            names.append(sorted(str(p.relative_to(tmp_path / f"of-{place}")) for p in tmp_path.glob(f"of-{place}/*/*")))
        assert names[0] == names[1]
        assert len(names[0]) == 4

    def test_empty_trusted_set_is_refused(self, items: Items, tmp_path: Path) -> None:
        with pytest.raises(UserError, match="no example is trusted yet"):
            write_trusted(items, {}, tmp_path / "t.npz")

    def test_failed_export_leaves_no_files(self, items: Items, tmp_path: Path) -> None:
        """Otherwise the first successful export would go to export-2."""
        with pytest.raises(UserError, match="no example is trusted yet"):
            write_all(items, {}, tmp_path)
        assert list(tmp_path.rglob("*.json")) == []
        name = items.classes[int(items.given[3]) - 1]
        assert write_all(items, make_decisions({3: name}), tmp_path)[0] == tmp_path / "export-1"


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Eight small photos in two folders, and a link to a photo outside."""
    from PIL import Image

    outside = tmp_path_factory.mktemp("outside") / "secret.png"
    Image.new("RGB", (12, 9), "white").save(outside)
    root = tmp_path_factory.mktemp("photos")
    for i in range(8):
        folder = root / ("blue" if i < 4 else "red")
        folder.mkdir(exist_ok=True)
        Image.new("RGB", (12 + i, 9), (30 * i, 0, 255 - 30 * i)).save(folder / f"{i}.png")
    os.symlink(outside, root / "red" / "9.png")
    return root


class TestImages:
    def test_links_out_of_the_folder_are_not_shown(self, photos: Path, tmp_path: Path) -> None:
        dataset, _ = load_dataset(str(photos), image_size=8)
        assert dataset.files is not None
        last = dataset.files.paths.index("red/9.png")
        with serve(items_from_data(dataset, dataset.y), tmp_path) as client:
            assert client.ask("GET", f"/picture/{last}")[0] == 404
            status, content, headers = client.ask("GET", "/picture/0")
        assert (status, headers["Content-Type"], content[:3]) == (200, "image/jpeg", b"\xff\xd8\xff")

    def test_files_that_are_not_in_memory(self, photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Images of a large data set are read from their files when they are needed."""
        monkeypatch.setattr("warpi.datasets.image_folders.IN_MEMORY", 0)
        (tmp_path / "data").mkdir()
        for name in ("blue", "red"):
            shutil.copytree(photos / name, tmp_path / "data" / name)
        (tmp_path / "data" / "red" / "5.png").write_bytes(b"broken")
        dataset, _ = load_dataset(str(tmp_path / "data"), image_size=8)
        assert isinstance(dataset.examples, FileExamples)
        with serve(items_from_data(dataset, dataset.y), tmp_path / "review") as client:
            assert client.ask("GET", "/picture/0")[2]["Content-Type"] == "image/jpeg"
            assert client.ask("GET", "/picture/5")[0] == 404
            for row in (1, 3, 5, 7):
                client.decide(row, "keep")
            near = client.ask("GET", "/api/near/0")[1]["near"]
            assert [n["row"] for n in near] == [1, 3, 7]  # the nearest in color, without unreadable files
            assert client.ask("GET", "/api/near/5")[1]["near"] == []
            made = client.ask("POST", "/api/export", {})[1]
        meta, _ = load_dataset(made["path"], image_size=8, like=dataset)
        assert len(meta.y) == 4

    def test_paths_of_image_files(self, client: Client, photos: Path, tmp_path: Path) -> None:
        shutil.copytree(photos / "blue", tmp_path / "x" / "blue")
        shutil.copytree(photos / "blue", tmp_path / "x" / "<i>")
        last = os.fsencode(tmp_path / "x" / "blue") + b"/\xff.png"  # not valid UTF-8
        os.rename(tmp_path / "x" / "blue" / "0.png", last)
        dataset, _ = load_dataset(str(tmp_path / "x"), image_size=8)
        assert dataset.files is not None
        with serve(items_from_data(dataset, dataset.y), tmp_path) as files:
            paths = [item["path"] for item in files.ask("GET", "/api/items")[1]["items"]]
            row = paths.index("blue/\udcff.png")
            assert paths == list(dataset.files.paths)
            assert "<i>/0.png" in paths
            files.decide(row, "keep")
            files.decide(0, "keep")
            made = files.ask("POST", "/api/export", {})[1]
        assert b"\n%d,blue/\xff.png,blue,blue,kept," % row in Path(made["corrected"]).read_bytes()
        assert len(load_dataset(made["path"], image_size=8, like=dataset)[0].y) == made["size"] == 2
        assert client.ask("GET", "/api/items")[1]["items"][0]["path"] is None  # arrays have no files

    def test_path_inside(self, photos: Path, tmp_path: Path) -> None:
        os.symlink(photos / "red", tmp_path / "class")
        assert render.path_inside(str(tmp_path), "class/5.png") == os.path.realpath(photos / "red" / "5.png")
        os.symlink(photos / "red" / "5.png", tmp_path / "file.png")
        for path in ("class/9.png", "file.png", "../x.png", "/etc/passwd", "class/../../x.png", "."):
            assert render.path_inside(str(tmp_path), path) is None

    def test_broken_image_file(self, tmp_path: Path) -> None:
        (tmp_path / "x.png").write_bytes(b"<svg onload=alert(1)>")
        assert render.photo(str(tmp_path), "x.png") is None


class TestItemsFromRun:
    def test_order_labels_and_neighbors(self, tiny: tuple[Task, Truth], digits: Dataset) -> None:
        task, _ = tiny
        rows, n = task.train.rows.numpy(), len(task.train)
        rng = np.random.default_rng(0)
        p = rng.dirichlet(np.ones(10), n)
        wrong = rng.random(n)
        given, guess = task.train.y.numpy(), p.argmax(1)
        audit = Audit(rows, given, guess, wrong, 1 - wrong, wrong > 0.5, wrong, p, np.eye(10), task.classes, (), {})
        items = items_from_run(digits, task, make_net("mlp", task.shape, 10), audit)
        assert np.array_equal(items.row, rows[np.argsort(-wrong)])
        assert np.array_equal(items.given[items.row], given[np.argsort(-wrong)])
        assert items.has_pictures
        assert items.is_small
        assert task.meta is not None
        assert items.trusted_rows == dict(zip(task.meta.rows.tolist(), task.meta.y.tolist(), strict=True))
        near = items.nearest_trusted(int(rows[0]), {})
        assert len(near) == 5
        assert all(n["label"] == str(int(task.meta.y[n["trusted"]])) for n in near)
        assert items.trusted_picture(near[0]["trusted"]) is not None
        listed = items_from_run(
            digits, task, make_net("mlp", task.shape, 10), audit, np.array([rows[3], task.meta.rows[0]])
        )
        assert listed.review_first.all()
        assert listed.suggested.tolist() == [guess[3], -1]
        state = {row["state"] for row in csv.DictReader(corrected_csv(items, {}).splitlines())}
        assert state == {"open", "trusted"}


class TestCommand:
    def test_from_data_to_files(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        """Data without a run: decisions are exported without a server."""
        x = np.random.default_rng(0).normal(size=(40, 3))
        np.savez(tmp_path / "x.npz", x=x, y=np.arange(40) % 2, text=np.array([f"text {i}" for i in range(40)]))
        (tmp_path / "rows.csv").write_text("row,why\n7,a\n5,b\n30,c\n")
        data, rows, out = str(tmp_path / "x.npz"), str(tmp_path / "rows.csv"), tmp_path / "r"
        dataset, _ = load_dataset(data)
        with closing(Store(out / "decisions.sqlite", items_from_data(dataset, dataset.y).identity)) as store:
            store.decide([Choice(7, 0, "change", "0", "1", None), Choice(5, 0, "keep", "1", "1", None)], "t", "1")
        flags = ["review", "--data", data, "--rows", rows, "--out", str(out)]
        files = ["--export", str(tmp_path / "c.json"), "--export-trusted", str(tmp_path / "trusted.npz")]
        assert main([*flags, *files]) == 0
        output = capsys.readouterr().out
        assert "labels of 40 rows, 2 of them decided by a person" in output
        command = f"next: warpi fit --data {data} --labels {tmp_path / 'c.json'} --trusted {tmp_path / 'trusted.npz'}"
        assert command in output
        assert (
            main(
                [
                    "fit",
                    *command.split()[3:],
                    "--method",
                    "clean_only",
                    "--epochs",
                    "1",
                    "--out",
                    str(tmp_path / "run"),
                    "--quiet",
                ]
            )
            == 0
        )
        capsys.readouterr()

    def test_next_command_repeats_the_settings_of_the_run(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """But not those that have their default value."""
        x = np.random.default_rng(0).normal(size=(60, 3))
        np.savez(tmp_path / "x.npz", x=x, y=np.arange(60) % 2)
        np.savez(tmp_path / "ok.npz", x=x[:4], y=np.arange(4) % 2)
        data, ok, run = (str(tmp_path / name) for name in ("x.npz", "ok.npz", "run"))
        flags = ["--val", "0.0", "--epochs", "1", "--milestones", "0.5,0.9", "--lr", "0.01", "--samples", "2"]
        given = ["--trusted", ok, "--seed", "3", "--no-compile", "--net", "mlp", "--out", run, "--quiet"]
        assert main(["fit", "--data", data, *flags, *given]) == 0
        trusted = str(tmp_path / "more.npz")
        assert main(["review", run, "--export-trusted", trusted]) == 0
        output = capsys.readouterr().out.splitlines()[-1]
        assert output == (
            f"next: warpi fit --data {data} --val 0.0 --epochs 1 --lr 0.01 --milestones 0.5,0.9 --no-compile "
            f"--samples 2 --trusted {trusted} --seed 3 --out runs/next"
        )
        (tmp_path / "runs" / "next").mkdir(parents=True)  # such a run exists in the second round
        monkeypatch.chdir(tmp_path)
        assert main(["review", run, "--export-trusted", trusted]) == 0
        assert capsys.readouterr().out.endswith(" --out runs/next-2\n")

    def test_table_from_checked_rows_to_the_next_command(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """Trusted rows of an earlier round stay trusted, and the next command uses all decisions."""
        rng = np.random.default_rng(0)
        table = tmp_path / "mine.csv"
        lines = [f"2024{i:07d},{rng.normal()!r},{rng.normal()!r},{'xy'[i % 2]}" for i in range(120)]
        table.write_text("\n".join(["id,a,b,kind", *lines]) + "\n")
        picked, trusted, run, corrected, more = (
            tmp_path / name for name in ("p.csv", "ok.csv", "run", "corrected.csv", "more.csv")
        )
        read_as = ["--data", str(table), "--label", "kind", "--drop", "id"]
        assert main(["pick", "20", *read_as, "--csv", str(picked)]) == 0
        rows = list(csv.DictReader(picked.read_text().splitlines()))
        checked = {int(r["row"]): "y" if i % 3 else "x" for i, r in enumerate(rows)}
        with picked.open("w", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows({**r, "checked_label": checked[int(r["row"])]} for r in rows)
        assert (
            main(["pick", "--estimate", str(picked), *read_as, "--export-trusted", str(trusted), "--unbalanced"]) == 0
        )
        fit = ["--trusted", str(trusted), "--epochs", "1", "--out", str(run), "--quiet", "--device", "cpu"]
        assert main(["fit", *read_as, *fit]) == 0

        open_rows = [row for row in range(120) if row not in checked][:9]
        dataset, _ = load_dataset(str(table), label="kind", drop=["id"])
        with closing(Store(run / "review/decisions.sqlite", items_from_data(dataset, dataset.y).identity)) as store:
            store.decide([Choice(row, 0, "change", "y", "xy"[row % 2], None) for row in open_rows], "t", "1")
        files = ["--export", str(corrected), "--export-trusted", str(more)]
        capsys.readouterr()
        assert main(["review", str(run), "--device", "cpu", *files]) == 0
        output = capsys.readouterr().out
        lines_out = list(csv.DictReader(corrected.read_text().splitlines()))
        assert all((lines_out[row]["label"], lines_out[row]["state"]) == (checked[row], "trusted") for row in checked)
        assert sum(r["verified"] == "1" for r in lines_out) == 20 + 9
        assert {row for row, r in enumerate(lines_out) if r["label"] != r["given_label"]} == {
            row for row, label in (checked | dict.fromkeys(open_rows, "y")).items() if label != "xy"[row % 2]
        }
        assert "more are left out" in output
        assert set(more.read_text().splitlines()[1:]) <= {
            f"{line[:-1]}{kind}" for line in lines for kind in "xy"
        }  # with the original cells

        *_, command = output.splitlines()
        argv = shlex.split(command.removeprefix("next: "))[1:]
        argv[argv.index("--out") + 1] = str(tmp_path / "next")
        spec = {name: argv[argv.index(f"--{name}") + 1] for name in ("labels", "trusted")}
        assert spec == {"labels": str(corrected.with_suffix(".json")), "trusted": str(more)}
        names = dataset.classes
        y = read_noise_file(corrected.with_suffix(".json"), dataset).y.tolist()
        assert [names[k] for k in y] == [r["label"] for r in lines_out]  # all decisions
        assert main([*argv, "--quiet"]) == 0

        with closing(Store(run / "review/decisions.sqlite", items_from_data(dataset, dataset.y).identity)) as store:
            free = next(row for row in range(1, 120, 2) if row not in checked and row not in open_rows)
            store.decide([Choice(free, 0, "change", "x", "y", None)], "t", "2")
        capsys.readouterr()
        assert main(["review", str(run), "--device", "cpu", "--export", str(corrected)]) == 0
        second = tmp_path / "corrected-2.json"  # the run above depends on the first
        assert f"{second}: the same labels, for warpi fit --labels {second}" in capsys.readouterr().out
        assert read_noise_file(second, dataset).y[free] == names.index("x")
        assert main(["review", str(run), "--device", "cpu", "--export-trusted", str(tmp_path / "last.csv")]) == 0
        assert "add --export FILE.csv to train on those left out, too" in capsys.readouterr().err

    def test_serve_prints_the_link(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        opened: list[str] = []

        def interrupt(_: Server) -> None:
            raise KeyboardInterrupt

        monkeypatch.setattr(Server, "serve_forever", interrupt)
        monkeypatch.setattr("webbrowser.open", opened.append)
        monkeypatch.setenv("DISPLAY", ":0")
        for flags in ([], ["--no-browser"]):
            assert main(["review", "--data", "digits", "--out", str(tmp_path), *flags]) == 0
        output = capsys.readouterr()
        links = output.out.splitlines()
        assert len(links) == 2
        assert all(re.fullmatch(r"http://127\.0\.0\.1:\d+/\?token=[\w-]{40,}", link) for link in links)
        assert opened == links[:1]
        assert f"the decisions are in {tmp_path / 'decisions.sqlite'}; run the same command to continue" in output.err

    def test_trusted_as_an_output_is_deprecated(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        argv = ["review", "--data", "digits", "--out", str(tmp_path), "--trusted", str(tmp_path / "t.npz")]
        assert main(argv) == 2
        assert "--trusted as an output is deprecated; use --export-trusted" in capsys.readouterr().err

    @pytest.mark.parametrize(
        ("argv", "message"),
        [
            ([], "give a run folder, or --data"),
            (["x", "--data", "digits"], "give a run folder, or --data"),
            (["x", "--label", "y"], "the run defines its data; leave out --label"),
            (["--data", "digits"], "required: --out"),
            (["x"], "there is no run in x"),
            (["--data", "digits", "--out", "r", "--rows", "none.csv"], "cannot read none.csv"),
            (["--data", "digits", "--out", "r", "--rows", "bad.csv"], "has no column 'row'"),
            (["--data", "digits", "--out", "r", "--rows", "twice.csv"], "lists row 3 twice"),
            (
                ["--data", "digits", "--out", "r", "--rows", "far.csv"],
                "lists 1797; list at least one of the rows 0..1796",
            ),
            (["--data", "digits", "--out", "r", "--rows", "words.csv"], "must contain integers"),
            (["--data", "digits", "--out", "r", "--rows", "empty.csv"], "at least one row"),
            (["--data", "digits", "--out", "r", "--show", "twice.csv"], "--show has 2 rows, digits has 1797"),
            (["--data", "digits", "--out", "r", "--noise", "open_set:0.1,from=digits"], "only a run can show"),
        ],
    )
    def test_mistakes_are_reported_on_one_line(
        self,
        argv: list[str],
        message: str,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        monkeypatch.chdir(tmp_path)
        for name, text in {
            "bad": "a\n1",
            "twice": "row\n3\n3",
            "far": "row\n1797",
            "words": "row\nx",
            "empty": "row\n",
        }.items():
            (tmp_path / f"{name}.csv").write_text(text)
        assert main(["review", *argv]) == 2
        error = capsys.readouterr().err
        assert message in error
        assert error.count("\n") == 1

    def test_extra_cells(self, tmp_path: Path) -> None:
        from warpi.review.open import read_extra_cells

        np.savez(tmp_path / "x.npz", x=np.eye(4), y=np.arange(4) % 2, text=np.array(["<i>a</i>", "b", "c", "d"]))
        dataset, _ = load_dataset(str(tmp_path / "x.npz"))
        shown = read_extra_cells(None, dataset, str(tmp_path / "x.npz"))
        items = items_from_data(dataset, dataset.y, None, shown)
        assert items.describe(0) == [("text", "<i>a</i>")]
        assert items_from_data(dataset, dataset.y).describe(0)[0] == ("x0", "1")
        (tmp_path / "more.csv").write_text("note,split\nhello,train\n,\nb,\nc,\nleft out,test\n")
        assert read_extra_cells(tmp_path / "more.csv", dataset, "x")[0] == {"note": "hello", "split": "train"}  # type: ignore[index]
