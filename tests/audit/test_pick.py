"""Which rows to check first: balance, chance, and an estimate that is right on average."""

import csv
import json
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import warpi
from warpi.audit.label_scores import errors_by_class, judge_labels, posterior
from warpi.audit.pick import CHECKED, Pick, estimate, pick_rows, read_checked
from warpi.audit.result import Audit, read_audit
from warpi.audit.trusted_set import write_trusted
from warpi.cli.app import main
from warpi.errors import UserError
from warpi.runs.spec import RunSpec, prepare

CLASSES = ("a", "b", "c")


def made_up(n: int = 600, seed: int = 0) -> tuple[Audit, np.ndarray]:
    """An audit, and the truth about its rows: class a is often wrong, c is rare."""
    rng = np.random.default_rng(seed)
    true = rng.choice(3, n, p=[0.5, 0.4, 0.1])
    y = np.where((true == 1) & (rng.random(n) < 0.4), 0, true)
    z = 2 * rng.standard_normal((n, 3))
    z[np.arange(n), true] += 4
    p = np.exp(z) / np.exp(z).sum(1, keepdims=True)
    T = np.array([[1, 0, 0], [0.4, 0.6, 0], [0, 0, 1]]) * 0.97 + 0.01
    found = judge_labels(posterior(p, y, T), y)
    rates = errors_by_class(found.wrong_probability, y, CLASSES, 0.0)
    return Audit(10 * np.arange(n), y, *found, found.wrong_probability, p, T, CLASSES, rates, {}), true


def read(path: Path | str) -> list[dict[str, str]]:
    return list(csv.DictReader(Path(path).read_text().splitlines()))


def filled(pick: Pick, right: Callable[[int], str], path: Path) -> list[dict[str, str]]:
    """The list with every row checked by somebody who knows."""
    pick.to_csv(path)
    rows = read(path)
    for cells in rows:
        cells[CHECKED] = right(int(cells["row"]))
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return rows


def test_half_at_random_half_informative_both_balanced() -> None:
    audit, _ = made_up()
    pick = pick_rows(60, audit.row, audit.given, CLASSES, audit=audit)
    assert len(set(pick.row.tolist())) == 60
    at = np.searchsorted(audit.row, pick.row)
    assert np.array_equal(audit.given[at], pick.given)
    assert np.bincount(pick.given[pick.random]).tolist() == [10, 10, 10]  # by given label
    assert np.bincount(audit.suggested[at][~pick.random]).tolist() == [10, 10, 10]  # by suggested label
    doubtful = (audit.posterior.max(1) < 0.9) | (audit.suggested != audit.given)
    informative = at[~pick.random & (audit.suggested[at] < 2)]  # of the rare class there are not as many
    assert doubtful[informative].all()
    assert doubtful.mean() < 0.5
    assert 0 < pick.random[:30].sum() < 30  # whoever stops early has some of both
    same, other = (pick_rows(60, audit.row, audit.given, CLASSES, audit=audit, seed=s) for s in (0, 1))
    assert np.array_equal(same.row, pick.row)
    assert not np.array_equal(other.row, pick.row)
    assert pick_rows(60, audit.row, audit.given, CLASSES, audit=audit, unbiased=True).random.all()


def test_random_rows_are_as_hard_as_the_data() -> None:
    audit, _ = made_up()
    chance = np.zeros(600)
    for seed in range(300):
        pick = pick_rows(30, audit.row, audit.given, CLASSES, audit=audit, unbiased=True, seed=seed)
        chance[pick.row // 10] += 1 / 300
    for k in range(3):
        mine = audit.given == k
        sure = audit.posterior.max(1) > 0.99
        assert chance[mine & sure].mean() == pytest.approx(10 / mine.sum(), rel=0.15)
        assert chance[mine & ~sure].mean() == pytest.approx(10 / mine.sum(), rel=0.25)


def test_how_many() -> None:
    audit, _ = made_up()
    everything = pick_rows(600, audit.row, audit.given, CLASSES, audit=audit)
    assert sorted(everything.row.tolist()) == audit.row.tolist()
    for n in (2, 601):
        with pytest.raises(UserError, match="cannot pick"):
            pick_rows(n, audit.row, audit.given, CLASSES)
    rare = pick_rows(300, audit.row, audit.given, CLASSES)  # a class that has too few gives all it has
    assert (rare.given == 2).sum() == (audit.given == 2).sum() < 100


@pytest.mark.parametrize("coverage", [False, True])
def test_estimate_is_right_on_average_and_its_interval_holds(coverage: bool, tmp_path: Path) -> None:
    audit, true = made_up()
    rate, found, held = float((audit.given != true).mean()), [], []
    features = torch.from_numpy(audit.probabilities) if coverage else None
    for seed in range(60 if coverage else 150):
        pick = pick_rows(45, audit.row, audit.given, CLASSES, features=features, seed=seed)
        got = estimate(filled(pick, lambda row: CLASSES[true[row // 10]], tmp_path / "p.csv"))
        found.append(got["rate"])
        held.append(got["low"] <= rate <= got["high"])
        assert got["checked"] == 45
    assert np.mean(found) == pytest.approx(rate, abs=3 * np.std(found) / len(found) ** 0.5)
    assert np.mean(held) >= 0.93


def test_estimate_uses_random_rows_only_and_bears_blanks(tmp_path: Path) -> None:
    audit, true = made_up()
    pick = pick_rows(90, audit.row, audit.given, CLASSES, audit=audit)
    rows = filled(pick, lambda row: CLASSES[true[row // 10]], tmp_path / "p.csv")
    whole = estimate(read_checked(tmp_path / "p.csv"))
    assert whole["checked"] == 45
    by_class = {c["class"]: c for c in whole["by_class"]}
    wrong = [r["given_label"] != r[CHECKED] for r in rows if r["part"] == "random" and r["given_label"] == "a"]
    assert by_class["a"]["rate"] == pytest.approx(np.mean(wrong))
    sizes = {name: (audit.given == k).sum() / 600 for k, name in enumerate(CLASSES)}
    assert whole["rate"] == pytest.approx(sum(sizes[c] * by_class[c]["rate"] for c in CLASSES))
    blank = [{**r, CHECKED: "" if r["given_label"] == "c" else r[CHECKED]} for r in rows]
    part = estimate(blank)
    assert part["unchecked_classes"] == ["c"]
    assert part["high"] - part["low"] >= 0.9 * (whole["high"] - whole["low"])
    everything = pick_rows(600, audit.row, audit.given, CLASSES)
    got = estimate(filled(everything, lambda row: CLASSES[true[row // 10]], tmp_path / "all.csv"))
    assert got["low"] == pytest.approx(got["high"], abs=1e-3)  # nothing is left to chance
    with pytest.raises(UserError, match="say nothing about the noise rate"):
        estimate([r for r in rows if r["part"] == "informative"])
    with pytest.raises(UserError, match="more picked than there are"):
        estimate([{**r, "stratum_picked": "-3"} for r in rows])
    with pytest.raises(UserError, match="--picked"):
        estimate([{"row": "1", "given_label": "a", CHECKED: "a"}])


def test_an_export_of_review_is_taken_with_the_list(tmp_path: Path) -> None:
    audit, true = made_up()
    pick = pick_rows(30, audit.row, audit.given, CLASSES)
    rows = filled(pick, lambda row: CLASSES[true[row // 10]], tmp_path / "filled.csv")
    pick.to_csv(tmp_path / "p.csv")
    with (tmp_path / "export.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["row", "given_label", "label", "state", "verified"])
        writer.writerow([1, "a", "b", "open", 0])  # not decided, and not in the list
        writer.writerows([r["row"], r["given_label"], r[CHECKED], "kept", 1] for r in rows)
    assert estimate(read_checked(tmp_path / "export.csv", tmp_path / "p.csv")) == estimate(rows)
    with pytest.raises(UserError, match="is checked"):
        read_checked(tmp_path / "p.csv")


def exported(path: Path, rows: list[dict[str, str]], state: Callable[[int], str]) -> Path:
    """What `warpi review` writes of such rows, in another order, and of ten more that it decided beside the list."""
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["row", "given_label", "label", "state", "verified"])
        writer.writerows([i, "a", "b", "changed", 1] for i in range(1, 11))
        for i, r in reversed([*enumerate(rows)]):
            done = state(i) in ("kept", "changed", "trusted")
            writer.writerow([r["row"], r["given_label"], r[CHECKED] if done else r["given_label"], state(i), int(done)])
    return path


def test_rows_that_were_decided_for_being_suspicious_are_no_random_ones(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """They used to count where they happened to be on the list: a noise rate of 100 % by one row."""
    audit, true = made_up()
    pick, listed, export = pick_rows(60, audit.row, audit.given, CLASSES), tmp_path / "p.csv", tmp_path / "e.csv"
    rows = filled(pick, lambda row: CLASSES[true[row // 10]], tmp_path / "filled.csv")
    pick.to_csv(listed)
    wrong = {i for i, r in enumerate(rows) if r["given_label"] != r[CHECKED]}
    assert wrong
    argv = ["pick", "--estimate", str(export), "--picked", str(listed)]

    exported(export, rows, lambda i: "changed" if i in wrong else "open")
    assert main(argv) == 2
    assert f"{len(wrong)} of the 60 rows that were drawn at random are checked, but not" in capsys.readouterr().err
    exported(export, rows, lambda i: "changed" if i < 3 else "open")  # so few may lead the list by chance
    assert main(argv) == 2
    capsys.readouterr()

    exported(
        export, rows, lambda i: ("skipped" if i == 5 else "kept") if i < 20 else "changed" if i in wrong else "open"
    )
    assert main(argv) == 0
    said, later = capsys.readouterr().out, sum(i >= 20 for i in wrong)
    first = [{**r, CHECKED: r[CHECKED] if i < 20 and i != 5 else ""} for i, r in enumerate(rows)]
    assert f"noise rate {100 * estimate(first)['rate']:.1f} %" in said
    assert "by 19 checked rows of 60 that were drawn at random" in said
    assert f"{later} more of these are checked, but not in the order of the list" in said
    assert later

    exported(export, rows, lambda i: "changed" if i in wrong else "kept")  # all of the list: nobody chose
    assert estimate(read_checked(export, listed)) == estimate(rows)
    exported(export, rows, lambda i: "changed" if i in wrong else "open")  # half of the list was filled by hand
    with listed.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows({**r, CHECKED: r[CHECKED] if i % 2 else ""} for i, r in enumerate(rows))
    apart = sum(i % 2 == 0 for i in wrong - {0})
    by_hand = estimate(read_checked(export, listed))
    assert by_hand["checked"] + by_hand["left_out"] == 30 + sum(i % 2 == 0 for i in wrong)
    assert by_hand["left_out"] >= apart > 0


def test_a_trusted_set_holds_the_cells_as_they_were(tmp_path: Path) -> None:
    """An id of eleven digits used to be rounded, and a column that was dropped to be missing."""
    lines = [f"2024{i:07d},{i * 0.1!r},{i % 3}.0,{'xy'[i % 2]},n{i},{'test' if i < 3 else 'train'}," for i in range(40)]
    head = "id,size,n,kind,note,split,clean_label"
    (tmp_path / "t.csv").write_text("\n".join([head, *lines]) + "\n")
    (tmp_path / "t.tsv").write_text("\n".join([head, *lines]).replace(",", "\t") + "\n")
    (tmp_path / "p.csv").write_text(
        "row,given_label,checked_label,part,stratum_size,stratum_picked\n"
        "4,y,x,random,18,2\n6,y,y,random,18,2\n5,x,x,random,19,1\n"
    )
    for name in ("t.csv", "t.tsv"):
        out = tmp_path / f"{name}.trusted.csv"
        read_as = ["--data", str(tmp_path / name), "--label", "kind", "--drop", "note"]
        assert (
            main(["pick", "--estimate", str(tmp_path / "p.csv"), *read_as, "--trusted", str(out), "--unbalanced"]) == 0
        )
        assert out.read_text() == (
            "id,size,n,kind,note\n20240000007,0.7000000000000001,1.0,x,n7\n20240000009,0.9,0.0,y,n9\n"
            "20240000008,0.8,2.0,x,n8\n"
        )
        settings = {"data": str(tmp_path / name), "label": "kind", "drop": ("note",)}
        prepared = prepare(RunSpec.from_settings("warpi", **settings, meta_data=str(out)))
        task, truth = prepared.task, prepared.truth
        assert task.meta is not None
        assert (task.meta.y.tolist(), truth.n_repeated) == ([0, 1, 0], 3)


def test_checked_labels_do_not_land_on_rows_that_were_moved(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The list knows rows by number: of a table that was sorted since, others used to become the trusted ones."""
    lines = [f"{i * 0.1!r},{'xy'[i % 2]}" for i in range(40)]
    table, listed, out = tmp_path / "t.csv", tmp_path / "p.csv", tmp_path / "trusted.csv"
    table.write_text("\n".join(["size,kind", *lines]) + "\n")
    listed.write_text(
        "row,given_label,checked_label,part,stratum_size,stratum_picked\n"
        "4,x,y,random,20,2\n6,x,x,random,20,2\n5,y,y,random,20,1\nnone,y,,random,20,1\n"
    )
    argv = ["pick", "--estimate", str(listed), "--data", str(table), "--label", "kind", "--trusted", str(out)]
    assert main([*argv, "--unbalanced"]) == 0
    assert out.read_text() == "size,kind\n0.4,y\n0.6000000000000001,x\n0.5,y\n"
    out.unlink()
    table.write_text("\n".join(["size,kind", *reversed(lines)]) + "\n")
    capsys.readouterr()
    assert main(argv) == 2
    assert f"row 4 is 'x' in {listed}, and 'y' in t: rows were moved" in capsys.readouterr().err
    assert not out.exists()


def test_checked_labels_do_not_land_on_other_images(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    image = pytest.importorskip("PIL.Image")
    for name in ("a/1.png", "a/2.png", "b/1.png", "b/2.png"):
        (tmp_path / "photos" / name).parent.mkdir(parents=True, exist_ok=True)
        image.new("RGB", (8, 8)).save(tmp_path / "photos" / name)
    listed, out = tmp_path / "p.csv", tmp_path / "trusted.csv"
    head = "row,path,given_label,checked_label,part,stratum_size,stratum_picked\n"
    listed.write_text(head + "1,a/2.png,a,b,random,2,1\n2,b/1.png,b,b,random,2,1\n")
    argv = ["pick", "--estimate", str(listed), "--data", str(tmp_path / "photos"), "--trusted", str(out)]
    assert main(argv) == 0
    image.new("RGB", (8, 8)).save(tmp_path / "photos/a/0.png")  # of the same class, and before the others
    capsys.readouterr()
    assert main(argv) == 2
    assert f"row 1 is 'a/2.png' in {listed}, and 'a/1.png' in photos" in capsys.readouterr().err


def test_a_list_that_a_spreadsheet_wrote_with_semicolons(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It used to be told that it has no column 'row'."""
    (tmp_path / "p.csv").write_text("row;given_label;checked_label;part\n1;a;b;random\n")
    listed = str(tmp_path / "p.csv")
    for argv in (["pick", "--estimate", listed], ["review", "--data", "digits", "--rows", listed, "--out", listed]):
        assert main(argv) == 2
        assert "p.csv seems to be separated by ';'; save it with ','" in capsys.readouterr().err


def test_a_trusted_set_of_a_parquet_table(tmp_path: Path) -> None:
    pd = pytest.importorskip("pandas")
    pytest.importorskip("pyarrow")
    ids, notes = [20240000000 + i for i in range(20)], [None if i % 2 else "n" for i in range(20)]
    frame = pd.DataFrame({"id": ids, "size": np.arange(20) / 7, "note": notes, "kind": ["x", "y"] * 10})
    frame.to_parquet(tmp_path / "t.parquet")
    table, _ = warpi.load_dataset(str(tmp_path / "t.parquet"), label="kind", drop=["note"])
    write_trusted(tmp_path / "ok.csv", table, {3: "x", 8: "y"}, source=tmp_path / "t.parquet")
    assert read(tmp_path / "ok.csv")[0] == {"id": "20240000003", "size": str(3 / 7), "note": "", "kind": "x"}
    again, _ = warpi.load_dataset(str(tmp_path / "ok.csv"), like=table)
    assert torch.equal(again.examples.flat(torch.arange(2)), table.examples.flat(torch.tensor([3, 8])))
    frame[:9].to_parquet(tmp_path / "t.parquet")
    with pytest.raises(UserError, match="has changed while it was read"):
        write_trusted(tmp_path / "ok.csv", table, {3: "x", 8: "y"}, source=tmp_path / "t.parquet")


def test_command_from_data_to_trusted_set(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    digits, _ = warpi.load_dataset("digits")
    files = {name: str(tmp_path / name) for name in ("p.csv", "t.npz", "e.json")}
    data = ["--data", "digits", "--noise", "pair:0.4"]
    assert main(["pick", "40", *data, "--coverage", "--csv", files["p.csv"]]) == 0
    assert "40 rows to check, 40 at random" in capsys.readouterr().out
    rows = read(files["p.csv"])
    assert {r["given_label"] for r in rows} == set(digits.classes)
    for r in rows:
        r[CHECKED] = digits.classes[int(digits.y[int(r["row"])])]
    with Path(files["p.csv"]).open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    flags = ["--estimate", files["p.csv"], "--trusted", files["t.npz"], "--json", files["e.json"]]
    counts = Counter(r[CHECKED] for r in rows)
    least = min(counts.values())
    assert least < max(counts.values())
    assert main(["pick", *flags, *data]) == 0  # the same number of every class, as `warpi review` does
    assert f"{10 * least} trusted examples; {40 - 10 * least} more are left out" in capsys.readouterr().out
    with np.load(files["t.npz"]) as balanced:
        assert Counter(balanced["y"].tolist()) == dict.fromkeys(digits.classes, least)
    assert main(["pick", *flags, *data, "--unbalanced"]) == 0
    assert "noise rate" in capsys.readouterr().out
    got = json.loads(Path(files["e.json"]).read_text())
    assert got["low"] < 0.4 < got["high"]
    task = prepare(RunSpec.from_settings("warpi", data="digits", noise="pair:0.4", meta_data=files["t.npz"])).task
    assert task.meta is not None
    assert len(task.meta) == 40
    long = tmp_path / "long.csv"
    long.write_text("row\n" + "x" * 200_000)
    for argv, said in (
        (["5", "--data", "digits", "--csv", files["p.csv"]], "at least one a class"),
        (["20", "--data", "digits"], "required: --csv FILE; or"),
        (["--csv", files["p.csv"], "--data", "digits"], "required: N, how many rows; or"),
        (["20", "--csv", files["p.csv"]], "give a run folder after N, or --data"),
        (["20", str(tmp_path), "--csv", files["p.csv"]], "there is no run"),
        (["20", str(tmp_path), "--data", "digits", "--csv", files["p.csv"]], "the run says what its data is"),
        (["--estimate", files["p.csv"], "--trusted", files["t.npz"]], "--trusted needs the data"),
        (["3", "--estimate", files["p.csv"]], "reads a filled list"),
        (["--estimate", str(tmp_path / "none.csv")], "none.csv"),
        (["--estimate", str(long)], "is not a csv file"),
        (["20", "--data", "digits", "--csv", files["p.csv"], "--trusted", files["t.npz"]], "--trusted goes with"),
    ):
        assert main(["pick", *argv]) == 2
        assert said in capsys.readouterr().err


def test_command_from_a_run(tmp_path: Path) -> None:
    run = tmp_path / "run"
    warpi.fit(run, data="digits", noise="pair:0.4", meta=20, limit=300, epochs=2, device="cpu")
    assert main(["pick", "30", str(run), "--csv", str(tmp_path / "p.csv"), "--device", "cpu"]) == 0
    assert (run / "audit.npz").exists()  # made where there was none
    rows = read(tmp_path / "p.csv")
    assert sum(r["part"] == "random" for r in rows) == 15
    assert all(0 <= float(r["wrong_probability"]) <= 1 for r in rows)


def test_a_run_whose_data_has_changed_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = [f"{i / 80},{i % 7},{'xy'[i % 2]},{int(i < 12)}" for i in range(80)]
    data, run, out = tmp_path / "t.csv", tmp_path / "run", ["--csv", str(tmp_path / "p.csv"), "--device", "cpu"]
    data.write_text("\n".join(["a,b,kind,verified", *lines]) + "\n")
    warpi.fit(run, data=str(data), label="kind", epochs=1, device="cpu")
    assert main(["pick", "10", str(run), *out]) == 0
    audit = run / "audit.npz"
    found = read_audit(run)
    for other in (replace(found, row=found.row + 80), replace(found, classes=("x", "z"))):
        other.save(run)
        assert main(["pick", "10", str(run), *out]) == 2
        assert f"{audit} is about other data" in capsys.readouterr().err
    found.save(run)
    data.write_text("\n".join(["a,b,kind,verified", *lines[::-1]]) + "\n")
    assert main(["pick", "10", str(run), *out]) == 2
    assert "has changed" in capsys.readouterr().err
    (run / "done").unlink()
    assert main(["pick", "10", str(run), *out]) == 2
    assert "is not finished" in capsys.readouterr().err


def test_trusted_set_of_a_table_is_read_as_the_same_rows(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    with (tmp_path / "t.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["size", "colour", "kind"])
        for i in range(60):
            writer.writerow([rng.random() / 3, "red" if rng.random() < 0.5 else "blue, dark", "xy"[i % 2]])
    table, _ = warpi.load_dataset(str(tmp_path / "t.csv"), label="kind")
    write_trusted(tmp_path / "ok.csv", table, {3: "x", 7: "y", 20: "y"}, balanced=False)
    again, _ = warpi.load_dataset(str(tmp_path / "ok.csv"), like=table)
    assert torch.equal(again.examples.flat(torch.arange(3)), table.examples.flat(torch.tensor([3, 7, 20])))
    assert [again.classes[k] for k in again.y.tolist()] == ["x", "y", "y"]
    task = prepare(
        RunSpec.from_settings("warpi", data=str(tmp_path / "t.csv"), label="kind", meta_data=str(tmp_path / "ok.csv"))
    ).task
    assert not {3, 7, 20} & set(task.train.rows.tolist())  # used as trusted rows only
    for rows, path, said in (
        ({99: "x"}, "a.csv", "rows 0..59"),
        ({1: "z"}, "a.csv", "is no class"),
        ({1: "x"}, "a.npz", "is a .csv file"),
    ):
        with pytest.raises(UserError, match=said):
            write_trusted(tmp_path / path, table, rows)


def test_trusted_set_of_images(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    for name in ("cat", "dog"):
        (tmp_path / "photos" / name).mkdir(parents=True)
        for i in range(6):
            image.new("RGB", (9, 9), (i * 20, 90, 10)).save(tmp_path / "photos" / name / f"{i}.png")
    photos, _ = warpi.load_dataset(str(tmp_path / "photos"), image_size=8)
    pick = pick_rows(4, np.arange(12), photos.y.numpy(), photos.classes, paths=photos.files.paths)  # type: ignore[union-attr]
    rows = filled(
        pick, lambda row: "dog" if row == pick.row[0] else photos.classes[int(photos.y[row])], tmp_path / "p.csv"
    )
    assert all((tmp_path / "photos" / r["path"]).exists() for r in rows)
    write_trusted(tmp_path / "ok.csv", photos, {int(r["row"]): r[CHECKED] for r in rows}, balanced=False)
    checked, _ = warpi.load_dataset(str(tmp_path / "ok.csv"), root=tmp_path / "photos", image_size=8, like=photos)
    assert [checked.classes[k] for k in checked.y.tolist()] == [r[CHECKED] for r in rows]
    paths = tuple(f"{i}\udcff.png" for i in range(12))  # a name may be any bytes
    odd = replace(photos, files=photos.files._replace(paths=paths))  # type: ignore[union-attr]
    replace(pick, paths=paths).to_csv(tmp_path / "odd.csv")
    assert read(tmp_path / "odd.csv")[0]["path"] == f"{pick.row[0]}\\udcff.png"
    with pytest.raises(UserError, match="no UTF-8; rename them"):
        write_trusted(tmp_path / "odd.csv", odd, {0: "cat", 6: "dog"})
