"""The server of the review page: security, and the answers to its requests."""

import re
import sqlite3
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from review_helpers import NAMES, Client, make_images, read_log, serve

from warpi.audit.decisions import Choice
from warpi.errors import UserError
from warpi.review import show_input as render
from warpi.review.items import Items, items_from_data
from warpi.review.server import Server

ASSETS = Path(render.__file__).with_name("assets")


EVERYWHERE = ("/", "/page.js", "/page.css", "/icon.svg", "/api/session", "/api/items", "/api/near/1", "/picture/1")


class TestSecurity:
    @pytest.mark.parametrize("path", [*EVERYWHERE, "/api/corrected.csv", "/trusted/0", "/nothing", "/?token=wrong"])
    def test_get_requires_the_key(self, client: Client, path: str) -> None:
        for cookie in (None, "", f"{client.server.cookie}=wrong", f"other={client.server.token}"):
            assert client.ask("GET", path, Cookie=cookie)[0] == 403

    def test_post_requires_the_key(self, client: Client) -> None:
        for path in ("/api/decide", "/api/undo", "/api/export", f"/api/export?token={client.server.token}"):
            assert client.ask("POST", path, {}, Cookie=None)[0] == 403
        assert not read_log(client.server.review.store)

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
        assert not read_log(client.server.review.store)

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
        assert not read_log(client.server.review.store)  # all or nothing


class TestPage:
    def test_assets_are_self_contained(self) -> None:
        paths = sorted(ASSETS.iterdir())
        assert len(paths) == 5
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
        assert counts["first"] == {
            "open": 4,
            "kept": 2,
            "changed": 1,
            "skipped": 0,
            "unsure": 1,
            "accepted": 0,
            "dropped": 0,
        }
        assert counts["all"] == {
            "open": 15,
            "kept": 2,
            "changed": 1,
            "skipped": 1,
            "unsure": 1,
            "accepted": 0,
            "dropped": 0,
        }

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
        assert (more["size"], more["left_out"], more["corrected_only"]) == (10, 0, 0)
        assert client.ask("GET", "/api/corrected.csv")[1] == (folder / "export-2" / "corrected.csv").read_bytes()
