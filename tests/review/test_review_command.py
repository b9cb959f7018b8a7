"""The command `warpi review`."""

import csv
import re
import shlex
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from warpi.audit.decisions import Choice, Store
from warpi.cli.app import main
from warpi.noise.noise_file import read_noise_file
from warpi.review.items import Cell, items_from_data
from warpi.review.server import Server
from warpi.runs.defaults import load_dataset


def test_from_data_to_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
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
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """But not those that have their default value."""
    x = np.random.default_rng(0).normal(size=(60, 3))
    np.savez(tmp_path / "x.npz", x=x, y=np.arange(60) % 2)
    np.savez(tmp_path / "ok.npz", x=x[:4], y=np.arange(4) % 2)
    data, ok, run = (str(tmp_path / name) for name in ("x.npz", "ok.npz", "run"))
    flags = ["--val", "0.0", "--epochs", "1", "--milestones", "0.5,0.9", "--lr", "0.01", "--samples", "2"]
    given = ["--trusted", ok, "--seed", "3", "--no-compile", "--net", "mlp", "--out", run, "--quiet"]
    assert main(["fit", "--data", data, "--method", "warpi", *flags, *given]) == 0
    trusted = str(tmp_path / "more.npz")
    assert main(["review", run, "--export-trusted", trusted]) == 0
    output = capsys.readouterr().out.splitlines()[-1]
    assert output == (
        f"next: warpi fit --data {data} --method warpi --net mlp --epochs 1 --lr 0.01 --milestones 0.5,0.9 "
        f"--no-compile --samples 2 --trusted {trusted} --seed 3 --out runs/next"
    )
    (tmp_path / "runs" / "next").mkdir(parents=True)  # such a run exists in the second round
    monkeypatch.chdir(tmp_path)
    assert main(["review", run, "--export-trusted", trusted]) == 0
    assert capsys.readouterr().out.endswith(" --out runs/next-2\n")


def test_table_from_checked_rows_to_the_next_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
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
    assert main(["pick", "--estimate", str(picked), *read_as, "--export-trusted", str(trusted), "--unbalanced"]) == 0
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
    assert f"{more}: 20 trusted examples; without 9 decided rows chosen by score" in output
    assert set(more.read_text().splitlines()[1:]) <= {
        f"{line[:-1]}{kind},{line[-1]}" for line in lines for kind in "xy"
    }  # with the original cells, and the given label

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
    assert "add --export FILE.csv to also train on the other corrected labels" in capsys.readouterr().err


def test_serve_prints_the_link(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
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
    assert f"decisions are in {tmp_path / 'decisions.sqlite'}; run the same command to continue" in output.err


def test_the_end_of_a_review_names_the_next_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its flags are those of the review, also those of the data."""
    (tmp_path / "t.csv").write_text("a,kind\n1,x\n2,y\n3,x\n4,y\n")
    (tmp_path / "rows.csv").write_text("row,part,stratum_size,stratum_picked\n0,random,4,2\n1,random,4,2\n")

    def decide(server: Server) -> None:
        sessions = [server.sessions[token] for token in server.tokens.values()] or [server.review]
        for session, label in zip(sessions, "xy", strict=False):
            choices = [{"row": 0, "seen": 0, "action": "change", "label": label}]
            session.decide({"tab": "t", "step": "s", "choices": choices})
        raise KeyboardInterrupt

    monkeypatch.setattr(Server, "serve_forever", decide)
    monkeypatch.chdir(tmp_path)
    data = ["--data", "t.csv", "--label", "kind", "--out", "checked"]
    assert main(["review", *data, "--rows", "rows.csv", "--no-browser"]) == 0
    command = capsys.readouterr().out.splitlines()[-1].removeprefix("next: warpi ")
    assert command == f"review {' '.join(data)} --rows rows.csv --export-trusted trusted.csv"
    assert main(command.split()) == 0
    data[-1] = "two"
    assert main(["review", *data, "--people", "anna,ben", "--overlap", "1", "--no-browser"]) == 0
    command = capsys.readouterr().out.splitlines()[-1].removeprefix("next: warpi ")
    assert command == f"review {' '.join(data)} --rows two/disputes.csv"


def test_trusted_as_an_output_is_deprecated(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["review", "--data", "digits", "--out", str(tmp_path), "--trusted", str(tmp_path / "t.npz")]
    assert main(argv) == 2
    assert "--trusted as an output is deprecated; use --export-trusted" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "pass either a run folder, or --data"),
        (["x", "--data", "digits"], "pass either a run folder, or --data"),
        (["x", "--label", "y"], "the run defines its data; omit --label"),
        (["--data", "digits"], "the folder for the decisions, which data without a run needs"),
        (["x"], "there is no run in 'x'; pass the folder"),
        (["--data", "digits", "--out", "r", "--rows", "none.csv"], "cannot read none.csv"),
        (["--data", "digits", "--out", "r", "--rows", "bad.csv"], "has no column 'row'"),
        (["--data", "digits", "--out", "r", "--rows", "twice.csv"], "lists row 3 twice"),
        (
            ["--data", "digits", "--out", "r", "--rows", "far.csv"],
            "lists 1797; list at least one of the rows 0..1796",
        ),
        (["--data", "digits", "--out", "r", "--rows", "words.csv"], "must contain integers"),
        (["--data", "digits", "--out", "r", "--rows", "empty.csv"], "at least one row"),
        (["--data", "digits", "--out", "r", "--show", "twice.csv"], "--show has 2 rows, but digits has 1,797"),
        (["--data", "digits", "--out", "r", "--noise", "open_set:0.1,from=digits"], "only a run can show"),
    ],
)
def test_mistakes_are_reported_on_one_line(
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


def test_extra_cells(tmp_path: Path) -> None:
    from warpi.review.open import read_extra_cells

    np.savez(tmp_path / "x.npz", x=np.eye(4), y=np.arange(4) % 2, text=np.array(["<i>a</i>", "b", "c", "d"]))
    dataset, _ = load_dataset(str(tmp_path / "x.npz"))
    shown = read_extra_cells(None, dataset, str(tmp_path / "x.npz"))
    items = items_from_data(dataset, dataset.y, None, shown)
    assert items.describe(0) == [Cell("text", "<i>a</i>")]
    assert items_from_data(dataset, dataset.y).describe(0)[0] == Cell("x0", "1")
    (tmp_path / "more.csv").write_text("note,split\nhello,train\n,\nb,\nc,\nleft out,test\n")
    assert read_extra_cells(tmp_path / "more.csv", dataset, "x")[0] == {"note": "hello", "split": "train"}  # type: ignore[index]


def test_several_people(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def decide(server: Server) -> None:
        """Two people give different labels to the first row that both have, and the review is stopped."""
        anna, ben = (server.sessions[server.tokens[name]] for name in ("anna", "ben"))
        row = min({*anna.items.row.tolist()} & {*ben.items.row.tolist()})
        for session, label in ((anna, "0"), (ben, "1")):
            choices = [{"row": row, "seen": 0, "action": "change", "label": label}]
            session.decide({"tab": "t", "step": "s", "choices": choices})
        raise KeyboardInterrupt

    monkeypatch.setattr(Server, "serve_forever", decide)
    command = ["review", "--data", "digits", "--out", str(tmp_path), "--no-browser"]
    assert main([*command, "--people", "anna,ben", "--overlap", "0.5"]) == 0
    output = capsys.readouterr().out.splitlines()
    assert [line.split("http")[0] for line in output[:3]] == ["", "anna: ", "ben: "]
    assert len({line.split("token=")[1] for line in output[:3]}) == 3
    assert output[3].startswith("anna: 1 of ")
    assert output[5] == "anna and ben agree on 0 of 1 row (0 %)"
    assert output[6] == f"{tmp_path}/disputes.csv: 1 row with different labels"
    assert output[7] == f"next: warpi review --data digits --out {tmp_path} --rows {tmp_path}/disputes.csv"
    lines = (tmp_path / "disputes.csv").read_text().splitlines()
    assert lines[0] == "row,given_label,anna,ben"
    for flags, error in (
        (["--overlap", "1"], "--overlap can only be used with --people"),
        (["--tls-key", "k.pem"], "--tls-cert and --tl"),
    ):
        assert main([*command, *flags]) == 2
        assert error in capsys.readouterr().err
