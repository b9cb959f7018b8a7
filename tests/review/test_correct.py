"""`warpi correct`: decisions of people and suggestions of an audit, applied to the data."""

import csv
from contextlib import closing
from copy import copy
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from warpi import load_dataset
from warpi.audit.decisions import Choice, Decision, Store, read_decisions
from warpi.audit.result import Audit, CheckedPairs, read_audit
from warpi.cli import main
from warpi.data.dataset import Dataset
from warpi.data.numeric import Features
from warpi.data.split import Split
from warpi.errors import UserError
from warpi.noise.noise_file import read_noise_file
from warpi.review.correct import apply_corrections, write_corrections, write_trusted_set
from warpi.review.items import Items, items_from_data
from warpi.review.open import open_data
from warpi.review.reviewed_labels import write_corrected
from warpi.runs.spec import DataSpec
from warpi.training.task import make_task

CLASSES = ("a", "b", "c")


def write_table(path: Path) -> None:
    lines = ["id,size,kind,split"]
    lines += [f"{100 + i},{i * 0.1!r},{CLASSES[i % 3]},{'test' if i == 2 else 'train'}" for i in range(9)]
    path.write_text("\n".join(lines) + "\n")


def make_audit(dataset: Dataset, p: np.ndarray) -> Audit:
    """An audit whose posterior is p: a transition matrix without preferences changes nothing."""
    K = dataset.n_classes
    given = dataset.y.numpy()
    quality = p[np.arange(len(p)), given]
    rate = {"n": len(p), "rate": 0.1, "low": 0.0, "high": 0.2}
    return Audit(
        np.arange(len(p)),
        given,
        p.argmax(1),
        1 - quality,
        quality,
        (p.argmax(1) != given) & (quality < 0.5),
        np.zeros(len(p)),
        p,
        np.full((K, K), 1 / K),
        dataset.classes,
        tuple({"class": name, **rate} for name in dataset.classes),
        {"noise_rate": rate, "trusted_accuracy": None, "probabilities": "", "uncertainty": ""},
    )


@pytest.fixture
def items(tmp_path: Path) -> Items:
    write_table(tmp_path / "t.csv")
    dataset, _ = load_dataset(str(tmp_path / "t.csv"), label="kind", drop=["id"])
    return replace(items_from_data(dataset, dataset.y), source=tmp_path / "t.csv")


@pytest.fixture
def p(items: Items) -> np.ndarray:
    """The model agrees with all labels but those of rows 0 (0.95) and 1 (0.6), for which it suggests c."""
    p = np.full((8, 3), 0.05)
    p[np.arange(8), items.given] = 0.9
    p[0] = [0.03, 0.02, 0.95]
    p[1] = [0.1, 0.3, 0.6]
    return p


def decide(row: int, label: str) -> dict[int, Decision]:
    return {row: Decision(1, row, "change", label, "t", "now", "a")}


def test_suggestions_and_decisions(items: Items, p: np.ndarray) -> None:
    audit = make_audit(items.dataset, p)
    every = apply_corrections(items, audit, {})
    assert every.changed_by == ("audit", "audit", "", "", "", "", "", "")
    assert every.label[:2].tolist() == [2, 2]
    assert every.before.rate == pytest.approx(8 * 0.1)  # the noise rate of the audit
    assert every.after.rate == pytest.approx(0.05 + 0.4 + 6 * 0.1)
    assert every.after.low is None
    assert "model alone" in str(every)
    sure = apply_corrections(items, audit, {}, above=0.9)
    assert sure.changed_by[:2] == ("audit", "")
    decided = apply_corrections(items, audit, decide(0, "a") | decide(5, "b"))  # row 0 keeps its label
    assert decided.changed_by == ("", "audit", "", "", "", "person", "", "")
    assert decided.probability[[0, 5]].tolist() == [1, 1]
    assert decided.after.rate == pytest.approx(0.4 + 5 * 0.1)
    assert str(decided).startswith(
        "2 of 8 labels changed: 1 by a person, 1 by the audit\nwrong labels of 8: about 1 before"
    )
    accepted = {1: Decision(1, 1, "change", "a", "t", "now", "b", "auto-1")}
    assert apply_corrections(items, audit, accepted, above=0.9).changed_by[:2] == ("audit", "audit")


@pytest.mark.parametrize("suffix", [".csv", ".parquet"])
def test_a_table_keeps_its_columns_and_rows(items: Items, p: np.ndarray, tmp_path: Path, suffix: str) -> None:
    pd = pytest.importorskip("pandas")
    pytest.importorskip("pyarrow")
    out = tmp_path / f"out{suffix}"
    if suffix == ".parquet":
        pd.read_csv(tmp_path / "t.csv").to_parquet(tmp_path / "t.parquet")
        items = replace(items, source=tmp_path / "t.parquet")
    write_corrections(apply_corrections(items, make_audit(items.dataset, p), {}), out)
    before = pd.read_csv(tmp_path / "t.csv")
    after = pd.read_csv(out) if suffix == ".csv" else pd.read_parquet(out)
    assert list(after) == ["id", "size", "kind", "split", "given", "changed_by", "label_probability"]
    for name in ("id", "size", "split"):
        assert (after[name] == before[name]).all()
        assert after[name].dtype == before[name].dtype
    assert after["kind"].tolist() == ["c", "c", "c", *before["kind"][3:]]  # the third is a test row
    assert after["given"].fillna("").tolist()[:3] == ["a", "b", ""]
    again, _ = load_dataset(str(out), label="kind", drop=["id"])  # the added columns are not features
    assert again.examples.shape == items.dataset.examples.shape


def test_corrected_data_shows_which_labels_an_audit_replaced(items: Items, p: np.ndarray, tmp_path: Path) -> None:
    out, again = tmp_path / "out.csv", tmp_path / "again.csv"
    corrections = apply_corrections(items, make_audit(items.dataset, p), decide(5, "b"))
    write_corrections(corrections, out)
    corrected, _ = load_dataset(str(out), label="kind", drop=["id"])
    assert corrected.before_audit is not None
    assert corrected.before_audit.tolist() == [0, 1, *6 * [-1]]
    # The second audit changes row 4, a person keeps row 0, and row 1 is still as the first audit left it.
    second = replace(items_from_data(corrected, corrected.y), source=out)
    p = np.full((8, 3), 0.05)
    p[np.arange(8), second.given] = 0.9
    p[4] = [0.9, 0.05, 0.05]
    write_corrections(apply_corrections(second, make_audit(corrected, p), decide(0, "c")), again)
    with again.open(newline="") as file:
        lines = [line for line in csv.DictReader(file) if line["split"] == "train"]
    assert [line["changed_by"] for line in lines[:5]] == ["person", "audit", "", "", "audit"]
    assert [line["given"] for line in lines[:5]] == ["a", "b", "a", "b", "c"]
    last, _ = load_dataset(str(again), label="kind", drop=["id"])
    assert last.before_audit is not None
    assert last.before_audit.tolist() == [-1, 1, -1, -1, 2, -1, -1, -1]


def test_an_audit_does_not_replace_what_a_person_decided_earlier(items: Items, p: np.ndarray, tmp_path: Path) -> None:
    """A row that a person changed keeps its label and its original label, in a table and in a label file."""
    given = CLASSES[items.given[5]]
    assert given != "b"
    corrections = apply_corrections(items, make_audit(items.dataset, p), decide(5, "b"))
    write_corrections(corrections, tmp_path / "out.csv")
    write_corrections(replace(corrections, items=replace(items, source=None)), tmp_path / "list.csv")
    table, _ = open_data(DataSpec(str(tmp_path / "out.csv"), label="kind", drop=("id",)))
    listed, _ = open_data(
        DataSpec(str(items.source), noise=f"given:{tmp_path / 'list.json'}", label="kind", drop=("id",))
    )
    for second in (table, replace(listed, source=None)):
        assert second.given.tolist() == corrections.label.tolist()
        q = np.full((8, 3), 0.05)
        q[np.arange(8), second.given] = 0.9
        q[5] = [0.9, 0.05, 0.05]
        audit = replace(make_audit(second.dataset, q), given=second.given)
        again = apply_corrections(second, audit, {})
        assert set(again.changed_by) == {""}
        assert again.probability[5] == 1
        write_corrections(again, tmp_path / "again.csv")
        lines = list(csv.DictReader((tmp_path / "again.csv").read_text().splitlines()))
        lines = [line for line in lines if line.get("split", "train") == "train"]
        assert [line["changed_by"] for line in lines] == ["audit", "audit", "", "", "", "person", "", ""]
        assert lines[5]["given"] == given


def test_a_label_file_shows_which_labels_an_audit_replaced(items: Items, p: np.ndarray, tmp_path: Path) -> None:
    corrections = apply_corrections(replace(items, source=None), make_audit(items.dataset, p), decide(5, "b"))
    write_corrections(corrections, tmp_path / "out.csv")
    labels = tmp_path / "out.json"
    before = read_noise_file(labels, items.dataset).before_audit
    assert before is not None
    assert before.tolist() == [0, 1, *6 * [-1]]
    second, _ = open_data(DataSpec(str(items.source), noise=f"given:{labels}", label="kind", drop=("id",)))
    audit = make_audit(items.dataset, np.eye(3)[corrections.label])
    write_corrections(apply_corrections(replace(second, source=None), audit, {}), tmp_path / "again.csv")
    assert read_noise_file(tmp_path / "again.json", items.dataset).before_audit.tolist() == [0, 1, *6 * [-1]]  # type: ignore[union-attr]
    exported = read_noise_file(write_corrected(second, {}, tmp_path / "second.json"), items.dataset)
    assert exported.before_audit is not None
    assert exported.before_audit.tolist() == [0, 1, *6 * [-1]]
    accepted = {0: Decision(1, 0, "change", "c", "t", "now", "a", "auto-1")} | decide(5, "b")
    exported = read_noise_file(write_corrected(items, accepted, tmp_path / "export.csv"), items.dataset)
    assert exported.before_audit is not None
    assert exported.before_audit.tolist() == [0, *7 * [-1]]
    task, _ = make_task(items.dataset, f"given:{tmp_path / 'export.json'}", val=0.0, test=0.0)
    assert task.before_audit is not None
    assert task.before_audit[task.train.rows == 0].tolist() == [0]


def test_the_data_itself_is_never_replaced(items: Items, p: np.ndarray, tmp_path: Path) -> None:
    corrections = apply_corrections(items, make_audit(items.dataset, p), {})
    with pytest.raises(UserError, match="is the data itself"):
        write_corrections(corrections, tmp_path / "t.csv")
    with pytest.raises(UserError, match=r"\.csv or \.parquet"):
        write_corrections(corrections, tmp_path / "t.json")


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(90, 2)) + 3 * (np.arange(90) % 3)[:, None]
    np.savez(tmp_path / "x.npz", x=x, y=np.arange(90) % 3)
    run, out = tmp_path / "run", tmp_path / "out.csv"
    fit = ["--method", "ce", "--epochs", "2", "--net", "mlp", "--quiet", "--device", "cpu"]
    assert main(["fit", "--data", str(tmp_path / "x.npz"), *fit, "--out", str(run)]) == 0
    dataset, _ = load_dataset(str(tmp_path / "x.npz"))
    with closing(Store(run / "review/decisions.sqlite", items_from_data(dataset, dataset.y).identity)) as store:
        store.decide([Choice(5, 0, "change", "0", "2", None)], "t", "1")
    capsys.readouterr()
    assert main(["correct", str(run), "--out", str(out), "--above", "0.99"]) == 0
    printed, warnings = capsys.readouterr()
    assert "there are no trusted rows to compare it with. Check some rows first" in warnings
    assert "by a person" in printed
    assert f"next: warpi fit --data {tmp_path / 'x.npz'}" in printed
    assert f"--labels {out.with_suffix('.json')}" in printed
    assert read_noise_file(out.with_suffix(".json"), dataset).y[5] == 0
    rows = list(csv.DictReader(out.read_text().splitlines()))
    assert len(rows) == 90
    assert (rows[5]["label"], rows[5]["given"], rows[5]["changed_by"]) == ("0", "2", "person")
    check_accepting(run, capsys)
    assert main(["correct", str(run), "--out", str(out), "--above", "1"]) == 2
    assert main(["correct", str(run), "--out", str(out), "--review", str(tmp_path / "none")]) == 2
    assert "there are no decisions" in capsys.readouterr().err


def check_accepting(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Suggestions are accepted in one step that is not a check, and taken back."""
    before = read_decisions(run / "review/decisions.sqlite")
    stored = read_audit(run)
    replace(stored, given=np.roll(stored.given, 1)).save(run)  # so that there are suggestions
    assert main(["review", str(run), "--accept-above", "0.2"]) == 0
    n = int(capsys.readouterr().out.split()[1])
    assert n > 10
    assert read_decisions(run / "review/decisions.sqlite") == before
    dataset, _ = load_dataset(str(run.parent / "x.npz"))
    with closing(Store(run / "review/decisions.sqlite", items_from_data(dataset, dataset.y).identity)) as store:
        accepted = [d for d in store.current_decisions().values() if d.is_automatic]
        assert len(accepted) == n
        assert 5 not in {d.row for d in accepted}  # a person decided it
    assert main(["review", str(run), "--undo-accepted"]) == 0
    assert f"{n} accepted suggestions taken back" in capsys.readouterr().out
    assert main(["review", "--data", str(run.parent / "x.npz"), "--out", str(run / "o"), "--undo-accepted"]) == 2
    stored.save(run)


def test_the_trusted_set_of_corrected_data(items: Items, p: np.ndarray, tmp_path: Path) -> None:
    """`given` is the label that a checked row would have had if the audit had corrected it without the check."""
    n = len(items.given)
    pairs = CheckedPairs(
        q=p[[0, 4]],
        given=items.given[[0, 4]],
        true=np.array([1, items.given[4]]),
        random=np.array([True, False]),
        weight=np.ones(2),
        position=np.array([0, 4]),
    )
    audit = replace(make_audit(items.dataset, p), pairs=pairs)
    corrections = apply_corrections(replace(items, probabilities=p), audit, {})
    assert corrections.changed_by[0] == "person"
    assert corrections.label[0] == 1
    summary = write_trusted_set(corrections, tmp_path / "trusted.csv")
    (line,) = csv.DictReader((tmp_path / "trusted.csv").read_text().splitlines())  # row 4 was not drawn at random
    assert (summary.size, summary.corrected_only) == (1, 1)
    assert (line["id"], line["kind"], line["given"]) == ("100", "b", "c")
    command = write_corrections(corrections, tmp_path / "out.csv", tmp_path / "trusted.csv")
    assert f"--trusted {tmp_path / 'trusted.csv'}" in command
    assert len((tmp_path / "out.csv").read_text().splitlines()) == n + 2  # the header and the test row


@pytest.mark.parametrize("separate", [True, False])
def test_trusted_rows_show_how_corrected_labels_would_have_been(
    items: Items, p: np.ndarray, tmp_path: Path, separate: bool
) -> None:
    """Trusted rows of the run are not audited. They count as rows of the data, whose labels were known to be wrong."""
    rows, kept = np.array([0, 3]), np.array([1, 2, 4, 5, 6, 7])
    true = np.array([1, int(items.given[3])])  # the label of row 0 was wrong
    examples = copy(items.dataset.examples) if separate else items.dataset.examples  # a file with copies of the rows
    items = replace(items, probabilities=p, trusted=Split(examples, torch.from_numpy(rows), torch.from_numpy(true)))
    whole = make_audit(items.dataset, p)
    names = ("row", "given", "suggested", "wrong_probability", "label_quality", "is_label_issue", "uncertainty")
    part = {name: getattr(whole, name)[kept] for name in (*names, "probabilities")}
    pairs = CheckedPairs(p[rows], items.given[rows], true, np.ones(2, dtype=bool), np.ones(2), np.full(2, -1))
    corrections = apply_corrections(items, replace(whole, **part, pairs=pairs), {})
    assert (corrections.before.n, corrections.after.n) == (8, 8)
    assert corrections.before.rate == pytest.approx(6 * 0.1 + 1)
    write_trusted_set(corrections, tmp_path / "trusted.csv")
    lines = list(csv.DictReader((tmp_path / "trusted.csv").read_text().splitlines()))
    assert [(line["id"], line["kind"], line["given"]) for line in lines] == [("100", "b", "c"), ("104", "b", "b")]


def test_trusted_rows_that_are_not_rows_of_the_data(items: Items, p: np.ndarray) -> None:
    """The others still show how the corrected labels would have been."""
    examples = items.dataset.examples
    assert isinstance(examples, Features)
    other = replace(examples, x=torch.cat([examples.x[[0]], examples.x[[3]] + 100, examples.x[[3]]]))
    true = torch.tensor([1, 0, int(items.given[3])])
    before = torch.tensor([int(items.given[0]), -1, int(items.given[3])])
    items = replace(items, probabilities=p, trusted=Split(other, torch.arange(3), true), trusted_given=before)
    kept = before >= 0
    pairs = CheckedPairs(
        p[[0, 3]], before[kept].numpy(), true[kept].numpy(), np.ones(2, dtype=bool), np.ones(2), np.full(2, -1)
    )
    corrections = apply_corrections(items, replace(make_audit(items.dataset, p), pairs=pairs), {})
    assert {row: q.tolist() for row, q in corrections.posterior.items()} == {0: p[0].tolist(), 3: p[3].tolist()}


def test_the_next_run_knows_the_labels_that_checked_rows_would_have(
    items: Items, p: np.ndarray, tmp_path: Path
) -> None:
    """The label file of data that is not a table has them, so that the next run can tell how many labels are wrong."""
    corrections = apply_corrections(replace(items, source=None), make_audit(items.dataset, p), decide(5, "b"))
    corrections = replace(corrections, posterior={5: np.array([0.1, 0.2, 0.7])})
    write_corrections(corrections, tmp_path / "out.csv")
    labels = read_noise_file(tmp_path / "out.json", items.dataset)
    assert labels.unchecked is not None
    assert labels.unchecked.tolist() == [-1, -1, -1, -1, -1, 2, -1, -1]
    examples = items.dataset.examples
    assert isinstance(examples, Features)
    trusted = Dataset("t", replace(examples, x=examples.x[5:6]), labels.y[5:6], items.classes)
    task, _ = make_task(items.dataset, f"given:{tmp_path / 'out.json'}", val=0.0, test=0.0, meta_data=trusted)
    assert task.meta_given is not None
    assert task.meta_given.tolist() == [2]
