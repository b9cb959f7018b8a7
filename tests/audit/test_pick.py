"""`warpi pick`: balanced random lists, unbiased estimates of the noise rate, and trusted sets."""

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
from warpi.audit.checked_labels import CHECKED, read_checked
from warpi.audit.label_scores import judge_labels, posterior
from warpi.audit.pick import Pick, pick_rows
from warpi.audit.rates import estimate_noise_rate
from warpi.audit.result import Audit, read_audit
from warpi.cli.app import main
from warpi.errors import UserError
from warpi.review.export import write_checked_rows
from warpi.runs.spec import DataSpec
from warpi.training.task import make_task

CLASSES = ("a", "b", "c")


def make_audit(n: int = 600, seed: int = 0) -> tuple[Audit, np.ndarray]:
    """An audit and the true classes of its rows: class a is often wrong, c is rare."""
    rng = np.random.default_rng(seed)
    true = rng.choice(3, n, p=[0.5, 0.4, 0.1])
    y = np.where((true == 1) & (rng.random(n) < 0.4), 0, true)
    z = 2 * rng.standard_normal((n, 3))
    z[np.arange(n), true] += 4
    p = np.exp(z) / np.exp(z).sum(1, keepdims=True)
    T = np.array([[1, 0, 0], [0.4, 0.6, 0], [0, 0, 1]]) * 0.97 + 0.01
    verdict = judge_labels(posterior(p, y, T), y)
    rates = tuple({"class": name, "n": int((y == k).sum()), "rate": 0.1} for k, name in enumerate(CLASSES))
    return Audit(10 * np.arange(n), y, *verdict, verdict.wrong_probability, p, T, CLASSES, rates, {}), true


def read(path: Path | str) -> list[dict[str, str]]:
    return list(csv.DictReader(Path(path).read_text().splitlines()))


def fill_list(pick: Pick, true_label: Callable[[int], str], path: Path) -> list[dict[str, str]]:
    """Write the list with the true label of every row, and return its rows."""
    pick.to_csv(path)
    rows = read(path)
    for cells in rows:
        cells[CHECKED] = true_label(int(cells["row"]))
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return rows


def test_half_is_random_and_half_uncertain() -> None:
    audit, _ = make_audit()
    pick = pick_rows(60, audit.row, audit.given, CLASSES, audit=audit)
    assert len(set(pick.row.tolist())) == 60
    at = np.searchsorted(audit.row, pick.row)
    assert np.array_equal(audit.given[at], pick.given)
    assert np.bincount(pick.given[pick.random]).tolist() == [10, 10, 10]  # by given label
    certainty = audit.posterior.max(1)
    others = np.setdiff1d(np.arange(len(audit)), at)
    assert certainty[at[~pick.random]].max() <= certainty[others].min()
    assert 0 < pick.random[:30].sum() < 30  # the beginning of the list has some of both
    same, different = (pick_rows(60, audit.row, audit.given, CLASSES, audit=audit, seed=s) for s in (0, 1))
    assert np.array_equal(same.row, pick.row)
    assert not np.array_equal(different.row, pick.row)
    assert pick_rows(60, audit.row, audit.given, CLASSES, audit=audit, unbiased=True).random.all()


def test_random_rows_do_not_depend_on_confidence() -> None:
    audit, _ = make_audit()
    frequency = np.zeros(600)
    for seed in range(150):
        pick = pick_rows(30, audit.row, audit.given, CLASSES, audit=audit, unbiased=True, seed=seed)
        frequency[pick.row // 10] += 1 / 150
    for k in range(3):
        members = audit.given == k
        confident = audit.posterior.max(1) > 0.99
        assert frequency[members & confident].mean() == pytest.approx(10 / members.sum(), rel=0.15)
        assert frequency[members & ~confident].mean() == pytest.approx(10 / members.sum(), rel=0.25)


def test_number_of_rows() -> None:
    audit, _ = make_audit()
    everything = pick_rows(600, audit.row, audit.given, CLASSES, audit=audit)
    assert sorted(everything.row.tolist()) == audit.row.tolist()
    for n in (2, 601):
        with pytest.raises(UserError, match="cannot pick"):
            pick_rows(n, audit.row, audit.given, CLASSES)
    rare = pick_rows(300, audit.row, audit.given, CLASSES)  # all rows of a class that has too few
    assert (rare.given == 2).sum() == (audit.given == 2).sum() < 100


@pytest.mark.parametrize("coverage", [False, True])
def test_estimate_is_unbiased_and_its_interval_covers_the_rate(coverage: bool, tmp_path: Path) -> None:
    audit, true = make_audit()
    rate = float((audit.given != true).mean())
    estimates: list[float] = []
    covered: list[bool] = []
    features = torch.from_numpy(audit.probabilities) if coverage else None
    for seed in range(30 if coverage else 80):
        pick = pick_rows(45, audit.row, audit.given, CLASSES, features=features, seed=seed)
        estimate = estimate_noise_rate(fill_list(pick, lambda row: CLASSES[true[row // 10]], tmp_path / "p.csv"))
        estimates.append(estimate["rate"])
        covered.append(estimate["low"] <= rate <= estimate["high"])
        assert estimate["checked"] == 45
    assert np.mean(estimates) == pytest.approx(rate, abs=3 * np.std(estimates) / len(estimates) ** 0.5)
    assert np.mean(covered) >= 0.93


def test_estimate_uses_random_rows_only_and_allows_blanks(tmp_path: Path) -> None:
    audit, true = make_audit()
    pick = pick_rows(90, audit.row, audit.given, CLASSES, audit=audit)
    rows = fill_list(pick, lambda row: CLASSES[true[row // 10]], tmp_path / "p.csv")
    whole = estimate_noise_rate(read_checked(tmp_path / "p.csv"))
    assert whole["checked"] == 45
    by_class = {c["class"]: c for c in whole["by_class"]}
    wrong = [r["given_label"] != r[CHECKED] for r in rows if r["part"] == "random" and r["given_label"] == "a"]
    assert by_class["a"]["rate"] == pytest.approx(np.mean(wrong))
    sizes = {name: (audit.given == k).sum() / 600 for k, name in enumerate(CLASSES)}
    assert whole["rate"] == pytest.approx(sum(sizes[c] * by_class[c]["rate"] for c in CLASSES))
    blank = [{**r, CHECKED: "" if r["given_label"] == "c" else r[CHECKED]} for r in rows]
    part = estimate_noise_rate(blank)
    assert part["unchecked_classes"] == ["c"]
    assert part["high"] - part["low"] >= 0.9 * (whole["high"] - whole["low"])
    everything = pick_rows(600, audit.row, audit.given, CLASSES)
    complete = estimate_noise_rate(fill_list(everything, lambda row: CLASSES[true[row // 10]], tmp_path / "all.csv"))
    assert complete["low"] == pytest.approx(complete["high"], abs=1e-3)  # every row is checked
    with pytest.raises(UserError, match="cannot be used to estimate the noise rate"):
        estimate_noise_rate([r for r in rows if r["part"] == "informative"])
    with pytest.raises(UserError, match="more picked than there are"):
        estimate_noise_rate([{**r, "stratum_picked": "-3"} for r in rows])
    with pytest.raises(UserError, match="--picked"):
        estimate_noise_rate([{"row": "1", "given_label": "a", CHECKED: "a"}])


def test_export_of_a_review_fills_the_list(tmp_path: Path) -> None:
    audit, true = make_audit()
    pick = pick_rows(30, audit.row, audit.given, CLASSES)
    rows = fill_list(pick, lambda row: CLASSES[true[row // 10]], tmp_path / "filled.csv")
    pick.to_csv(tmp_path / "p.csv")
    with (tmp_path / "export.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["row", "given_label", "label", "state", "verified"])
        writer.writerow([1, "a", "b", "open", 0])  # not decided and not on the list
        writer.writerows([r["row"], r["given_label"], r[CHECKED], "kept", 1] for r in rows)
    assert estimate_noise_rate(read_checked(tmp_path / "export.csv", tmp_path / "p.csv")) == estimate_noise_rate(rows)
    with pytest.raises(UserError, match="is checked"):
        read_checked(tmp_path / "p.csv")


def write_export(path: Path, rows: list[dict[str, str]], state: Callable[[int], str]) -> Path:
    """An export of `warpi review` with these rows in another order, and ten decided rows that are not on the list."""
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["row", "given_label", "label", "state", "verified"])
        writer.writerows([i, "a", "b", "changed", 1] for i in range(1, 11))
        for i, r in reversed([*enumerate(rows)]):
            done = state(i) in ("kept", "changed", "trusted")
            writer.writerow([r["row"], r["given_label"], r[CHECKED] if done else r["given_label"], state(i), int(done)])
    return path


def test_rows_decided_because_they_look_suspicious_are_not_random(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """If they counted as random, one row could give a noise rate of 100 %."""
    audit, true = make_audit()
    pick, listed, export = pick_rows(60, audit.row, audit.given, CLASSES), tmp_path / "p.csv", tmp_path / "e.csv"
    rows = fill_list(pick, lambda row: CLASSES[true[row // 10]], tmp_path / "filled.csv")
    pick.to_csv(listed)
    wrong = {i for i, r in enumerate(rows) if r["given_label"] != r[CHECKED]}
    assert wrong
    argv = ["pick", "--estimate", str(export), "--picked", str(listed)]

    write_export(export, rows, lambda i: "changed" if i in wrong else "open")
    assert main(argv) == 2
    assert f"in the order of the list ({len(wrong)} of 60 random rows)" in capsys.readouterr().err
    lines = export.read_text().splitlines(keepends=True)
    export.write_text("".join(line for line in lines if ",open," not in line))  # somebody kept the decided rows only
    assert main(argv) == 2
    assert f"in the order of the list ({len(wrong)} of 60 random rows)" in capsys.readouterr().err
    write_export(export, rows, lambda i: "changed" if i < 3 else "open")  # three rows at the top may be a coincidence
    assert main(argv) == 2
    capsys.readouterr()

    write_export(
        export, rows, lambda i: ("skipped" if i == 5 else "kept") if i < 20 else "changed" if i in wrong else "open"
    )
    assert main(argv) == 0
    output = capsys.readouterr().out
    later = sum(i >= 20 for i in wrong)
    first = [{**r, CHECKED: r[CHECKED] if i < 20 and i != 5 else ""} for i, r in enumerate(rows)]
    assert f"noise rate {100 * estimate_noise_rate(first)['rate']:.1f} %" in output
    assert "from 19 checked rows of 60 drawn at random" in output
    assert f"not used: {later} more checked rows, not in the order of the list" in output
    assert later

    write_export(export, rows, lambda i: "changed" if i in wrong else "kept")  # the whole list
    assert estimate_noise_rate(read_checked(export, listed)) == estimate_noise_rate(rows)
    write_export(export, rows, lambda i: "changed" if i in wrong else "open")  # half of the list is filled by hand
    with listed.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows({**r, CHECKED: r[CHECKED] if i % 2 else ""} for i, r in enumerate(rows))
    out_of_order = sum(i % 2 == 0 for i in wrong - {0})
    by_hand = estimate_noise_rate(read_checked(export, listed))
    assert by_hand["checked"] + by_hand["left_out"] == 30 + sum(i % 2 == 0 for i in wrong)
    assert by_hand["left_out"] >= out_of_order > 0


def test_trusted_set_contains_the_original_cells(tmp_path: Path) -> None:
    """Ids of eleven digits are not rounded, and dropped columns are included."""
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
            main(
                ["pick", "--estimate", str(tmp_path / "p.csv"), *read_as, "--export-trusted", str(out), "--unbalanced"]
            )
            == 0
        )
        assert out.read_text() == (
            "id,size,n,kind,note,given\n20240000007,0.7000000000000001,1.0,x,n7,y\n20240000009,0.9,0.0,y,n9,y\n"
            "20240000008,0.8,2.0,x,n8,x\n"
        )
        table, _ = warpi.load_dataset(str(tmp_path / name), label="kind", drop=["note"])
        trusted, _ = warpi.load_dataset(str(out), label="kind", drop=["note"], like=table)
        task, truth = make_task(table, meta_data=trusted)
        assert task.meta is not None
        assert (task.meta.y.tolist(), truth.n_repeated) == ([0, 1, 0], 3)


def test_moved_rows_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A list identifies rows by number, so a table that was sorted in the meantime is refused."""
    lines = [f"{i * 0.1!r},{'xy'[i % 2]}" for i in range(40)]
    table, listed, out = tmp_path / "t.csv", tmp_path / "p.csv", tmp_path / "trusted.csv"
    table.write_text("\n".join(["size,kind", *lines]) + "\n")
    listed.write_text(
        "row,given_label,checked_label,part,stratum_size,stratum_picked\n"
        "4,x,y,random,20,2\n6,x,x,random,20,2\n5,y,y,random,20,1\nnone,y,,random,20,1\n"
    )
    argv = ["pick", "--estimate", str(listed), "--data", str(table), "--label", "kind", "--export-trusted", str(out)]
    assert main([*argv, "--unbalanced"]) == 0
    assert out.read_text() == "size,kind,given\n0.4,y,x\n0.6000000000000001,x,x\n0.5,y,y\n"
    out.unlink()
    table.write_text("\n".join(["size,kind", *reversed(lines)]) + "\n")
    capsys.readouterr()
    assert main(argv) == 2
    assert f"row 4 is 'x' in {listed}, but 'y' in t: rows were moved" in capsys.readouterr().err
    assert not out.exists()


def test_moved_images_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    image = pytest.importorskip("PIL.Image")
    for name in ("a/1.png", "a/2.png", "b/1.png", "b/2.png"):
        (tmp_path / "photos" / name).parent.mkdir(parents=True, exist_ok=True)
        image.new("RGB", (8, 8)).save(tmp_path / "photos" / name)
    listed, out = tmp_path / "p.csv", tmp_path / "trusted.csv"
    head = "row,path,given_label,checked_label,part,stratum_size,stratum_picked\n"
    listed.write_text(head + "1,a/2.png,a,b,random,2,1\n2,b/1.png,b,b,random,2,1\n")
    argv = ["pick", "--estimate", str(listed), "--data", str(tmp_path / "photos"), "--export-trusted", str(out)]
    assert main(argv) == 0
    image.new("RGB", (8, 8)).save(tmp_path / "photos/a/0.png")  # of the same class, sorted before the others
    capsys.readouterr()
    assert main(argv) == 2
    assert f"row 1 is 'a/2.png' in {listed}, but 'a/1.png' in photos" in capsys.readouterr().err


def test_list_with_semicolons_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "p.csv").write_text("row;given_label;checked_label;part\n1;a;b;random\n")
    listed = str(tmp_path / "p.csv")
    for argv in (["pick", "--estimate", listed], ["review", "--data", "digits", "--rows", listed, "--out", listed]):
        assert main(argv) == 2
        assert "p.csv seems to be separated by ';'; save it with ','" in capsys.readouterr().err


def test_trusted_set_of_a_parquet_table(tmp_path: Path) -> None:
    pd = pytest.importorskip("pandas")
    pytest.importorskip("pyarrow")
    ids, notes = [20240000000 + i for i in range(20)], [None if i % 2 else "n" for i in range(20)]
    frame = pd.DataFrame({"id": ids, "size": np.arange(20) / 7, "note": notes, "kind": ["x", "y"] * 10})
    frame.to_parquet(tmp_path / "t.parquet")
    spec = DataSpec(data=str(tmp_path / "t.parquet"), label="kind", drop=("note",))
    rows = [{"row": "3", "given_label": "y", CHECKED: "x"}, {"row": "8", "given_label": "x", CHECKED: "y"}]
    write_checked_rows(tmp_path / "ok.csv", rows, tmp_path / "p.csv", spec, seed=0, balanced=True)
    first = {"id": "20240000003", "size": str(3 / 7), "note": "", "kind": "x", "given": "y"}
    assert read(tmp_path / "ok.csv")[0] == first
    table = spec.read()
    trusted, _ = warpi.load_dataset(str(tmp_path / "ok.csv"), like=table)
    assert torch.equal(trusted.examples.flat(torch.arange(2)), table.examples.flat(torch.tensor([3, 8])))


def test_command_from_data_to_trusted_set(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    digits, _ = warpi.load_dataset("digits")
    files = {name: str(tmp_path / name) for name in ("p.csv", "t.npz", "e.json")}
    data = ["--data", "digits", "--noise", "pair:0.4"]
    assert main(["pick", "40", *data, "--coverage", "--csv", files["p.csv"]]) == 0
    assert "40 rows to check: 40 random" in capsys.readouterr().out
    rows = read(files["p.csv"])
    assert {r["given_label"] for r in rows} == set(digits.classes)
    for r in rows:
        r[CHECKED] = digits.classes[int(digits.y[int(r["row"])])]
    with Path(files["p.csv"]).open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    flags = ["--estimate", files["p.csv"], "--export-trusted", files["t.npz"], "--json", files["e.json"]]
    counts = Counter(r[CHECKED] for r in rows)
    least = min(counts.values())
    assert least < max(counts.values())
    assert main(["pick", *flags, *data, "--balanced"]) == 0
    assert f"{10 * least} trusted examples; {40 - 10 * least} more omitted" in capsys.readouterr().out
    with np.load(files["t.npz"]) as balanced:
        assert Counter(balanced["y"].tolist()) == dict.fromkeys(digits.classes, least)
    assert main(["pick", *flags, *data]) == 0
    assert "noise rate" in capsys.readouterr().out
    estimate = json.loads(Path(files["e.json"]).read_text())
    assert estimate["low"] < 0.4 < estimate["high"]
    trusted, _ = warpi.load_dataset(files["t.npz"], like=digits)
    assert len(trusted.y) == 40
    long = tmp_path / "long.csv"
    long.write_text("row\n" + "x" * 200_000)
    for argv, message in (
        (["5", "--data", "digits", "--csv", files["p.csv"]], "at least one per class"),
        (["20", "--data", "digits"], "missing --csv FILE; to use a checked list"),
        (["--csv", files["p.csv"], "--data", "digits"], "missing N, the number of rows; to use"),
        (["20", "--csv", files["p.csv"]], "pass a run folder after N, or --data"),
        (["20", str(tmp_path), "--csv", files["p.csv"]], "there is no run"),
        (["20", str(tmp_path), "--data", "digits", "--csv", files["p.csv"]], "the run defines its data"),
        (["--estimate", files["p.csv"], "--export-trusted", files["t.npz"]], "--export-trusted needs the data"),
        (["3", "--estimate", files["p.csv"]], "reads a checked list"),
        (["--estimate", str(tmp_path / "none.csv")], "none.csv"),
        (["--estimate", str(long)], "has no column 'given_label'"),
        (
            ["20", "--data", "digits", "--csv", files["p.csv"], "--export-trusted", files["t.npz"]],
            "--export-trusted requires --estimate",
        ),
    ):
        assert main(["pick", *argv]) == 2
        assert message in capsys.readouterr().err


def test_command_from_a_run(tmp_path: Path) -> None:
    run = tmp_path / "run"
    warpi.fit(run, data="digits", noise="pair:0.4", meta=20, limit=300, epochs=2, device="cpu")
    assert main(["pick", "30", str(run), "--csv", str(tmp_path / "p.csv"), "--device", "cpu"]) == 0
    assert (run / "audit.npz").exists()  # made, since there was none
    rows = read(tmp_path / "p.csv")
    assert sum(r["part"] == "random" for r in rows) == 15
    assert all(0 <= float(r["wrong_probability"]) <= 1 for r in rows)


def test_run_with_changed_data_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = [f"{i / 80},{i % 7},{'xy'[i % 2]},{int(i < 12)}" for i in range(80)]
    data, run, out = tmp_path / "t.csv", tmp_path / "run", ["--csv", str(tmp_path / "p.csv"), "--device", "cpu"]
    data.write_text("\n".join(["a,b,kind,verified", *lines]) + "\n")
    warpi.fit(run, data=str(data), label="kind", epochs=1, device="cpu")
    assert main(["pick", "10", str(run), *out]) == 0
    audit = run / "audit.npz"
    stored = read_audit(run)
    for other in (replace(stored, row=stored.row + 80, copies=None), replace(stored, classes=("x", "z"))):
        other.save(run)
        assert main(["pick", "10", str(run), *out]) == 2
        assert f"{audit} was made from other data" in capsys.readouterr().err
    stored.save(run)
    data.write_text("\n".join(["a,b,kind,verified", *lines[::-1]]) + "\n")
    assert main(["pick", "10", str(run), *out]) == 2
    assert "has changed" in capsys.readouterr().err
    (run / "done").unlink()
    assert main(["pick", "10", str(run), *out]) == 2
    assert "is not finished" in capsys.readouterr().err


def test_checked_rows_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("\n".join(["size,kind", *(f"{i / 7},{'xy'[i % 2]}" for i in range(60))]))
    spec = DataSpec(data=str(tmp_path / "t.csv"), label="kind")
    for row, label, path, message in (
        ("99", "x", "a.csv", "has 60 rows"),
        ("1", "z", "a.csv", "is not a class"),
        ("1", "x", "a.npz", "must be a .csv file"),
        ("one", "x", "a.csv", "the column row is not as `warpi pick` wrote it"),
    ):
        rows = [{"row": row, "given_label": "y", CHECKED: label}]
        with pytest.raises(UserError, match=message):
            write_checked_rows(tmp_path / path, rows, tmp_path / "p.csv", spec, seed=0, balanced=True)


def test_trusted_set_of_images(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    for name in ("cat", "dog"):
        (tmp_path / "photos" / name).mkdir(parents=True)
        for i in range(6):
            image.new("RGB", (9, 9), (i * 20, 90, 10)).save(tmp_path / "photos" / name / f"{i}.png")
    photos, _ = warpi.load_dataset(str(tmp_path / "photos"), image_size=8)
    pick = pick_rows(4, np.arange(12), photos.y.numpy(), photos.classes, paths=photos.files.paths)  # type: ignore[union-attr]
    rows = fill_list(
        pick, lambda row: "dog" if row == pick.row[0] else photos.classes[int(photos.y[row])], tmp_path / "p.csv"
    )
    assert all((tmp_path / "photos" / r["path"]).exists() for r in rows)
    spec = DataSpec(data=str(tmp_path / "photos"), image_size=8)
    write_checked_rows(tmp_path / "ok.csv", rows, tmp_path / "p.csv", spec, seed=0, balanced=False)
    checked, _ = warpi.load_dataset(str(tmp_path / "ok.csv"), root=tmp_path / "photos", image_size=8, like=photos)
    assert [checked.classes[k] for k in checked.y.tolist()] == [r[CHECKED] for r in rows]
    paths = tuple(f"{i}\udcff.png" for i in range(12))  # file names may be any bytes
    replace(pick, paths=paths).to_csv(tmp_path / "odd.csv")
    assert read(tmp_path / "odd.csv")[0]["path"] == f"{pick.row[0]}\\udcff.png"
