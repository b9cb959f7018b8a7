"""Copies side by side: what is dropped, and that exports, corrected data and the next training leave it out."""

import csv
import json
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from review_helpers import Client, make_audited_items, make_copies, make_decisions, make_unusual, serve

import warpi
from warpi.audit.checked_labels import read_checked
from warpi.audit.decisions import Choice, Store
from warpi.audit.pick import pick_from_data
from warpi.audit.rates import estimate_noise_rate
from warpi.cli.app import main
from warpi.errors import UserError
from warpi.noise.kinds import NoisyLabels
from warpi.noise.noise_file import read_noise_file, write_noise_file
from warpi.review.copies import Copies, copies_of, unusual_rows
from warpi.review.correct import apply_corrections, correct
from warpi.review.items import Items
from warpi.review.open import open_data
from warpi.review.progress import measure_progress
from warpi.review.reviewed_labels import corrected_csv, dropped_rows, write_corrected
from warpi.runs.spec import DataSpec
from warpi.training.task import make_task


@pytest.fixture
def items() -> Items:
    """Labels: row + 1 modulo 3. Group 0 agrees, group 1 contradicts itself, group 2 contradicts a row of a test set."""
    return make_copies(make_audited_items(12, ("cat", "dog", "emu")), [[0, 3], [1, 2, 4], [7]], {0: 2})


@pytest.fixture
def client(items: Items, tmp_path: Path) -> Iterator[Client]:
    with serve(items, tmp_path) as connected:
        yield connected


def keep(client: Client, at: int, step: str = "s", **seen: int) -> tuple[int, Any, dict[str, str]]:
    body = {"tab": "t", "step": step, "at": at, "seen": {row.removeprefix("row"): id for row, id in seen.items()}}
    return client.ask("POST", "/api/copies", body)


def test_groups_come_in_the_order_of_their_urgency(items: Items) -> None:
    copies = copies_of(items)
    assert copies is not None
    assert list(copies.groups) == [2, 1, 0]
    members = copies.members(2)
    assert [(m.part, m.row, m.in_data, m.can_keep) for m in members] == [
        ("train", 7, True, False),
        ("test", 0, False, True),
    ]
    assert copies_of(replace(items, audit=None)) is None
    assert copies_of(replace(items, test=None)) is None


def test_one_key_keeps_one_and_undo_takes_it_back(client: Client) -> None:
    store = client.server.review.store
    assert client.ask("GET", "/api/session")[1]["copies"] == 3
    before = client.ask("GET", "/api/copies/1")[1]
    assert [m["given"] for m in before["members"]] == ["emu", "cat", "emu"]
    status, answer, _ = keep(client, 2)
    assert status == 200
    assert {row: state["state"] for row, state in answer["done"].items()} == {
        "1": "dropped",
        "2": "kept",
        "4": "dropped",
    }
    assert answer["counts"]["all"]["dropped"] == 2
    groups = client.ask("GET", "/api/copies")[1]["groups"]
    assert groups == [{"group": 2, "open": True}, {"group": 1, "open": False}, {"group": 0, "open": True}]
    assert client.ask("GET", "/api/items?state=dropped")[1]["total"] == 2
    assert keep(client, 2, "s2")[1]["refused"], "the rows were decided since the person saw them"
    client.ask("POST", "/api/undo", {"tab": "t", "step": "u"})
    assert store.current_decisions() == {}

    assert list(keep(client, 0, "s3")[1]["done"]) == ["3"], "the label of a kept row is decided only if labels differ"
    seen = {f"row{d.row}": d.id for d in store.current_decisions().values()}
    done = keep(client, 3, "s4", **seen)[1]["done"]
    assert {row: state["state"] for row, state in done.items()} == {"0": "dropped", "3": "skipped"}, "another choice"


def test_a_copy_in_the_test_set_stays(client: Client) -> None:
    status, answer, _ = keep(client, 7)
    assert status == 409
    assert "cannot be kept" in answer["error"]
    assert keep(client, 12)[1]["done"]["7"]["state"] == "dropped"
    assert client.ask("GET", "/copy/12")[0] == 200
    assert client.ask("GET", "/copy/99")[0] == client.ask("GET", "/api/copies/9")[0] == 404
    assert keep(client, 9999)[0] == keep(client, -1)[0] == 409
    assert client.ask("POST", "/api/copies", {"tab": "t", "step": "x", "at": 1, "seen": {"1": "x"}})[0] == 400


def test_rows_that_are_not_shown_are_dropped_too(tmp_path: Path) -> None:
    items = make_copies(make_audited_items(30, ("cat", "dog", "emu")), [list(range(30))], {})
    with serve(items, tmp_path) as client:
        store = client.server.review.store
        store.decide([Choice(29, 0, "keep", "cat", "cat", None)], "t", "earlier")
        members = client.ask("GET", "/api/copies/0")[1]["members"]
        assert 29 not in [m["row"] for m in members]
        answer = keep(client, 0, **{"row" + "9" * 5000: 1})[1]
        assert answer["refused"] == {}
        assert len(answer["done"]) == 30
        assert {row for row, d in store.current_decisions().items() if d.is_dropped} == set(range(1, 30))


def test_people_do_not_see_copies(items: Items, tmp_path: Path) -> None:
    with serve(items, tmp_path, people=("ann", "bob")) as client:
        ann = Client(client.server, "ann")
        assert ann.ask("GET", "/api/session")[1]["copies"] == 0
        assert ann.ask("GET", "/api/copies")[0] == ann.ask("GET", "/copy/12")[0] == 403
        assert client.ask("GET", "/api/copies")[0] == 200


def test_outliers_and_blank_images_are_a_scope_of_their_own(tmp_path: Path) -> None:
    items = make_unusual(make_audited_items(12, ("cat", "dog", "emu")), [3, 12], {5: "blank", 13: "cannot be read: x"})
    with serve(items, tmp_path, people=("ann", "bob")) as client:
        assert client.ask("GET", "/api/session")[1]["unusual"] == 2, "rows of the test set are not reviewed"
        found = client.ask("GET", "/api/items?scope=unusual")[1]
        assert {item["row"]: item["unusual"] for item in found["items"]} == {3: "outlier", 5: "blank image"}
        assert found["total"] == 2
        every = client.ask("GET", "/api/items?scope=all")[1]["items"]
        assert sum(item["unusual"] == "" for item in every) == 10
        _, answer, _ = client.decide(5, "unsure")
        assert {name: answer["counts"]["unusual"][name] for name in ("open", "unsure")} == {"open": 1, "unsure": 1}
        client.decide(0, "keep")
        counts = client.ask("GET", "/api/session")[1]["counts"]
        assert (counts["unusual"]["kept"], counts["all"]["kept"], counts["all"]["open"]) == (0, 1, 10)
        seen = [Client(client.server, name).ask("GET", "/api/items?scope=unusual")[1] for name in ("ann", "bob")]
        assert sorted(item["row"] for each in seen for item in each["items"]) == [3, 5]
        assert client.ask("GET", "/api/items?scope=odd")[0] == 400
    assert unusual_rows(replace(items, audit=None)) == {}


def decide(items: Items, folder: Path, *kept: int) -> dict[int, Any]:
    copies = copies_of(items)
    assert isinstance(copies, Copies)
    with closing(Store(folder / "d.sqlite", items.identity)) as store:
        for at in kept:
            store.decide(copies.keep(at, {}, {}), "t", f"copies-{at}")
        return dict(store.current_decisions())


def test_dropped_rows_are_left_out_of_exports_and_of_the_next_task(items: Items, tmp_path: Path) -> None:
    decisions = decide(items, tmp_path, 2, 0)
    assert dropped_rows(items, decisions) == [1, 3, 4]
    rows = [int(cells["row"]) for cells in csv.DictReader(corrected_csv(items, decisions).splitlines())]
    assert rows == [0, 2, *range(5, 12)]
    file = write_corrected(items, decisions, tmp_path / "labels.json")
    assert json.loads(file.read_text())["dropped"] == [1, 3, 4]
    assert read_noise_file(file, items.dataset).dropped.tolist() == [1, 3, 4]
    assert write_corrected(items, decisions, file) == file
    with pytest.raises(UserError, match="different content"):
        write_corrected(items, {}, file)
    task, truth = make_task(items.dataset, f"given:{file}", test=0.2, val=0.2)
    assert task.val is not None
    assert truth.test is not None
    used = torch.cat([split.rows for split in (task.train, task.val, truth.test)])
    assert used.sort().values.tolist() == rows
    content = json.loads(file.read_text())
    file.write_text(json.dumps({**content, "dropped": [99]}))
    with pytest.raises(UserError, match="'dropped' must contain rows of the data"):
        read_noise_file(file, items.dataset)


def test_the_next_review_does_not_bring_dropped_rows_back(tmp_path: Path) -> None:
    data = tmp_path / "d.npz"
    np.savez(data, x=np.arange(24.0).reshape(12, 2), y=np.arange(12) % 3)
    dataset, _ = warpi.load_dataset(str(data))
    labels = NoisyLabels(dataset.y, None, dropped=torch.tensor([1, 3, 4]))
    write_noise_file(tmp_path / "l.json", data=dataset, noise="given", seed=0, labels=labels)
    spec = DataSpec(str(data), noise=f"given:{tmp_path / 'l.json'}")
    later, _ = open_data(spec)
    assert dropped_rows(later, {}) == [1, 3, 4]
    assert sorted(pick_from_data(9, spec).row.tolist()) == [0, 2, *range(5, 12)]


def test_corrections_count_the_rows_that_are_left(items: Items, tmp_path: Path) -> None:
    assert items.audit is not None
    without = apply_corrections(items, items.audit, {})
    corrections = apply_corrections(items, items.audit, decide(items, tmp_path, 2, 0))
    assert corrections.dropped == (1, 3, 4)
    assert corrections.after.n == without.after.n - 3
    assert corrections.after.rate < without.after.rate
    assert "omitted, because a copy is kept: 3 rows" in str(corrections)


def test_a_dropped_row_of_a_list_does_not_wait(items: Items, tmp_path: Path) -> None:
    decisions = decide(items, tmp_path, 0)
    assert items.audit is not None
    assert measure_progress(items.audit, decisions, {2: 1.0, 3: 1.0}).n_waiting == 1
    listed = tmp_path / "check.csv"
    line = "row,given_label,checked_label,part,stratum_size,stratum_picked\n{},dog,,random,6,2\n{},dog,,random,6,2\n"
    listed.write_text(line.format(3, 0))
    export = tmp_path / "corrected.csv"
    export.write_text(corrected_csv(items, decisions | make_decisions({0: "cat"})))
    estimate = estimate_noise_rate(read_checked(export, listed))
    assert (estimate["checked"], estimate["left_out"]) == (1, 0), "row 0 was reviewed in the order of the list"


def test_correct_writes_a_table_without_the_dropped_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(60, 3)) + 4 * (np.arange(60) % 2)[:, None]
    x[1] = x[0]
    lines = [",".join([*(f"{v:.4f}" for v in row), "ab"[i % 2], str(int(20 <= i < 32))]) for i, row in enumerate(x)]
    data = tmp_path / "t.csv"
    data.write_text("\n".join(["f,g,h,label,trusted", *lines]) + "\n")
    run = tmp_path / "run"
    warpi.fit(run, data=str(data), method="ce", net="linear", epochs=1, quiet=True, device="cpu")
    warpi.audit.audit(run, folds=0)
    items = correct(run).items
    copies = copies_of(items)
    assert copies is not None
    with closing(Store(run / "review" / "decisions.sqlite", items.identity)) as store:
        choices = copies.keep(copies.duplicates.position_of(np.array([0]))[0], {}, {})
        assert choices == [Choice(0, 0, "keep", "a", "a", None), Choice(1, 0, "unsure", None, "b", None)]
        store.decide(choices, "t", "copies-1")
    for suffix in ("csv", "parquet"):
        assert main(["correct", str(run), "--out", str(tmp_path / f"c.{suffix}")]) == 0
        assert "omitted, because a copy is kept: 1 row\n" in capsys.readouterr().out
        dataset, _ = warpi.load_dataset(str(tmp_path / f"c.{suffix}"))
        assert len(dataset.y) == 59
    assert main(["report", str(run), "--out", str(tmp_path / "page")]) == 0
    assert "Rows left out because another copy was kept: 1" in (tmp_path / "page" / "report.html").read_text()
