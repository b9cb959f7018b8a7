"""Review by several people: who gets which rows, what each of them sees, and on what they agree."""

import datetime
import json
import ssl
import threading
import urllib.request
from collections import Counter
from contextlib import closing
from pathlib import Path

import pytest
from hypothesis import given, settings, strategies as st
from review_helpers import Client, make_audited_items, make_choice, serve

from warpi.audit.decisions import Store
from warpi.errors import UserError
from warpi.review.page_requests import ReviewSession
from warpi.review.people import People, assign_rows
from warpi.review.server import Server

PEOPLE = ("anna", "ben", "carl")


@settings(max_examples=50, deadline=None)
@given(n=st.integers(0, 200), overlap=st.floats(0, 1), n_people=st.integers(2, 5), data=st.data())
def test_every_row_is_handed_out(n: int, overlap: float, n_people: int, data: st.DataObject) -> None:
    names = [f"p{i}" for i in range(n_people)]
    done = data.draw(st.dictionaries(st.integers(0, max(0, n - 1)), st.sets(st.sampled_from([*names, "gone"]))))
    hands = assign_rows(range(n), names, overlap, done)
    count = Counter(row for rows in hands.values() for row in rows)
    for row in range(n):
        before = done.get(row, set())
        assert before & {*names} <= {name for name in names if row in hands[name]}
        assert count[row] + len(before - {*names}) >= 1
    if not done:
        assert sum(count.values()) == n + round(overlap * n)
        sizes = [len(rows) for rows in hands.values()]
        assert max(sizes) - min(sizes) <= 1
        assert hands == assign_rows(range(n), names, overlap, {})


def test_each_person_sees_only_own_decisions(store: Store) -> None:
    items = make_audited_items(8, ("a", "b"))
    people = People(PEOPLE[:2], items, store, overlap=1.0)
    anna, ben = people.stores.values()
    assert people.rows["anna"] == people.rows["ben"] == set(range(8))
    anna.decide([make_choice(3, "a")], "tab", "1")
    assert ben.current_decisions() == {}
    assert not ben.decide([make_choice(3, "b")], "tab", "1").refused, "the same step of another person"
    assert ben.decide([make_choice(3, "a")], "tab", "2").refused.keys() == {3}, "decided by this person in another tab"
    assert store.current_decisions()[3].label == "b"
    assert [tuple(pair) for pair in people.agreements()] == [("anna", "ben", 1, 0)]
    assert people.disputes() == {3: {"anna": "a", "ben": "b"}}
    assert ben.undo("tab", "3") == {3: None}
    assert store.current_decisions()[3].label == "a", "that of the other person counts again"
    assert people.disputes() == {}
    ben.decide([make_choice(3, "a"), make_choice(4, None, action="unsure")], "tab", "4")
    anna.decide([make_choice(4, "b")], "tab", "5")
    assert [tuple(pair) for pair in people.agreements()] == [("anna", "ben", 1, 1)]


def test_settled_rows_and_the_list_of_the_others(store: Store, tmp_path: Path) -> None:
    items = make_audited_items(8, ("a", "b"))
    people = People(PEOPLE, items, store, overlap=1.0)
    for name, label in zip(PEOPLE, "aba", strict=True):
        people.stores[name].decide([make_choice(row, label) for row in (1, 2)], "tab", "1")
    store.decide([make_choice(1, "b", store.current_decisions()[1].id)], "lead", "1")
    file = people.write_disputes(tmp_path)
    assert file is not None
    assert file.read_text().splitlines() == ["row,given_label,anna,ben,carl", f"2,{'ab'[(2 + 1) % 2]},a,b,a"]
    assert "anna and carl agree on 2 of 2 rows (100 %)" in people.describe()
    with closing(Store(store.path, {})) as again:
        assert People(["ben", "dora"], items, again, 0.5).disputes().keys() == {2}, "of everybody, also later"


@pytest.mark.parametrize("names", [["anna"], ["anna", "anna"], ["anna", "a b"], ["anna", "x:y"], ["anna", "<b>"]])
def test_names(names: list[str], store: Store) -> None:
    with pytest.raises(UserError, match="--people"):
        People(names, make_audited_items(4, ("a", "b")), store)


def test_the_link_of_a_person(tmp_path: Path) -> None:
    with serve(make_audited_items(10, ("a", "b")), tmp_path, people=PEOPLE[:2]) as lead:
        anna, ben = (Client(lead.server, name) for name in PEOPLE[:2])
        rows = [{item["row"] for item in who.ask("GET", "/api/items?limit=100")[1]["items"]} for who in (anna, ben)]
        assert rows[0] | rows[1] == set(range(10))
        assert not rows[0] & rows[1]
        assert anna.ask("GET", "/api/session")[1]["person"] == "anna"
        mine, others = min(rows[0]), min(rows[1])
        assert anna.decide(mine, "change", "a")[0] == 200
        assert anna.decide(others, "change", "a")[0] == 404, "not a row of this person"
        assert ben.ask("GET", "/api/session")[1]["counts"]["all"]["open"] == 5
        assert lead.ask("GET", "/api/session")[1]["counts"]["all"]["open"] == 9
        together = ben.ask("GET", "/api/progress")[1]["together"]
        assert [(each["name"], each["done"], each["of"]) for each in together["people"]] == [
            ("anna", 1, 5),
            ("ben", 0, 5),
        ]
        for method, path in (("POST", "/api/export"), ("GET", "/api/corrected.csv")):
            assert anna.ask(method, path, {} if method == "POST" else None)[0] == 403
        assert lead.ask("GET", "/api/corrected.csv")[0] == 200
        assert lead.ask("GET", "/api/session", Cookie=f"{lead.server.cookie}=x")[0] == 403
        assert len({lead.server.token, *lead.server.tokens.values()}) == 3


def test_tls(tmp_path: Path, store: Store) -> None:
    certificate, key = _make_certificate(tmp_path)
    session = ReviewSession(make_audited_items(4, ("a", "b")), store, tmp_path, {"data": "x"})
    with pytest.raises(UserError, match=r"cannot use the certificate .* pass PEM files"):
        Server(session, tls=(key, certificate))
    with Server(session, tls=(certificate, key)) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            assert server.link.startswith("https://127.0.0.1:")
            context = ssl.create_default_context(cafile=str(certificate))
            opener = urllib.request.build_opener(
                urllib.request.HTTPSHandler(context=context), urllib.request.HTTPCookieProcessor()
            )
            with opener.open(server.link, timeout=30) as page:
                assert "Secure" in page.headers["Set-Cookie"]
            with opener.open(f"https://127.0.0.1:{server.server_port}/api/session", timeout=30) as answer:
                assert json.load(answer)["counts"]["all"]["open"] == 4
            with pytest.raises(OSError):
                urllib.request.urlopen(server.link.replace("https", "http"), timeout=30)
        finally:
            server.shutdown()
            thread.join()


def _make_certificate(folder: Path) -> tuple[Path, Path]:
    """A certificate for 127.0.0.1 that signs itself."""
    from ipaddress import ip_address

    x509 = pytest.importorskip("cryptography.x509")
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    private = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "127.0.0.1")])
    now = datetime.datetime.now(datetime.UTC)
    builder = x509.CertificateBuilder(name, name, private.public_key(), x509.random_serial_number())
    builder = builder.not_valid_before(now - datetime.timedelta(days=1)).not_valid_after(
        now + datetime.timedelta(days=1)
    )
    names = x509.SubjectAlternativeName([x509.IPAddress(ip_address("127.0.0.1"))])
    signed = builder.add_extension(names, critical=False).sign(private, hashes.SHA256())
    certificate, key = folder / "cert.pem", folder / "key.pem"
    certificate.write_bytes(signed.public_bytes(serialization.Encoding.PEM))
    form = (serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    key.write_bytes(private.private_bytes(*form))
    return certificate, key
