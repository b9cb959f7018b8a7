"""The command line: error messages, exit codes, and how flags reach a run."""

import json
import re
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
import pytest

from warpi.cli.app import main
from warpi.cli.fit import WITHOUT_TRUSTED
from warpi.errors import UserError
from warpi.methods.registry import make_method
from warpi.report.experiments import find_runs
from warpi.runs.reopen import reopen
from warpi.runs.rerun_command import command
from warpi.runs.run import fit
from warpi.runs.spec import RunSpec, prepare
from warpi.sweep.plan import read_plan
from warpi.sweep.run_states import read_settings

FIT = ["fit", "--data", "digits", "--limit", "300", "--meta", "20", "--epochs", "1", "--method", "ce"]
Files = dict[str, str]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    """Small data files, most of them with an error."""
    folder = tmp_path_factory.mktemp("data")
    x = np.random.default_rng(0).normal(size=(60, 3)).astype("f4")
    y = np.arange(60) % 3
    hole = x.copy()
    hole[4, 1] = np.nan
    wrong = np.where(np.arange(60) == 7, 5, y)
    names = np.array(["a", "b", "c"])
    arrays: dict[str, dict[str, Any]] = {
        "good": {"x": x, "y": y, "clean": y},
        "range": {"x": x, "y": wrong, "classes": names},
        "negative": {"x": x, "y": np.where(wrong == 5, -1, y), "classes": names},
        "fraction": {"x": x, "y": y + 0.5},
        "lengths": {"x": x, "y": y[:50]},
        "nan": {"x": hole, "y": y},
        "no rows": {"x": x[:0], "y": y[:0]},
        "empty class": {"x": x, "y": y, "classes": np.array(["a", "b", "c", "d"])},
        "meta lacks": {"x": x, "y": y, "x_meta": x[:4], "y_meta": np.array([0, 0, 1, 1])},
        "objects": {"x": x, "y": y.astype(object)},
        "two": {"x": x[:2], "y": y[:2]},
        "trusted": {"x": x[:9] + 1, "y": y[:9]},
    }
    paths = {name: folder / f"{name}.npz" for name in arrays}
    for name, path in paths.items():
        np.savez(path, **arrays[name])
    for name, content in {
        "ids.csv": "id,a,label\n1,2,p\n3,4,q\n",
        "text.npz": "hello",
        "none.csv": "",
        "bare.csv": "a,b\n1,2\n",
        "letter.docx": "x",
    }.items():
        path = paths[name.split(".")[0]] = folder / name
        path.write_text(content)
    return {name: str(path) for name, path in paths.items()}


MISTAKES: list[tuple[list[str], str]] = [
    # names
    (["fti"], "unknown command 'fti'; did you mean 'fit'?"),
    (
        ["--bogus"],
        "unknown command '--bogus'; allowed: annotators, audit, bench, check, compare, con",
    ),
    (["FIT", "--epohcs", "3"], "unknown flag '--epohcs'; did you mean '--epochs'?"),
    (["FIT", "--epohcs=3"], "unknown flag '--epohcs'; did you mean '--epochs'?"),
    (["FIT", "--epoch", "3"], "unknown flag '--epoch'"),
    (["FIT", "--samples", "3"], "unknown flag '--samples'"),
    (
        ["FIT", "--method", "ce", "--meta-lr", "1"],
        "unknown flag '--meta-lr': ce has no such setting; leave it out or choose a method with it: mwnet",
    ),
    (["FIT", "--rat", "3"], "unknown flag '--rat'; allowed: "),  # does not suggest '--lr' because both have dashes
    (["FIT", "--data", "foo"], "unknown data set 'foo'; allowed: "),
    (["FIT", "--method", "wrapi"], "unknown method 'wrapi'; did you mean 'warpi'?"),
    (["FIT", "--noise", "unifrom:0.4"], "unknown noise 'unifrom'; did you mean 'uniform'?"),
    (["FIT", "--net", "resnet23"], "unknown net 'resnet23'; did you mean 'resnet"),
    (["FIT", "--net", "own.mine:Net"], "wrn28_10; for a custom one: warpi --use FILE.py ..., or warpi.fit(net=...)"),
    (["FIT", "--data", "digit"], "unknown data set 'digit'; did you mean 'digits'?"),
    (["FIT", "--optimizer", "sdg"], "unknown optimizer 'sdg'; did you mean 'sgd'?"),
    (["FIT", "--device", "gpu"], "unknown device 'gpu'; allowed: auto, cpu, cuda"),
    (["list", "method"], "unknown list 'method'; did you mean 'methods'?"),
    (["list", "nets", "--jsn"], "unknown flag '--jsn'; did you mean '--json'?"),
    # values
    (["FIT", "--noise", "uniform:1.4"], "0..1, got 1.4"),
    (["FIT", "--noise", "uniform:x"], "needs a rate, got 'x'"),
    (["FIT", "--noise", "uniform"], "needs a rate"),
    (["FIT", "--epochs", "ten"], "--epochs must be an integer, got 'ten'"),
    (["FIT", "--lr", "fast"], "--lr must be a number, got 'fast'"),
    (["FIT", "--lr", "-1"], "lr must be at least 0, got -1.0"),
    (["FIT", "--lr", "inf"], "lr must be at least 0 and finite, got inf"),
    (["FIT", "--milestones", "a,b"], "--milestones must be numbers separated by commas, got 'a,b'"),
    (["FIT", "--limit", "-3"], "limit must be at least 1, got -3"),
    (["FIT", "--val", "1.5"], "val must be a fraction of the rows in [0, 1), got 1.5"),
    (["FIT", "--threads", "0"], "threads must be at least 1 and at most 1024, got 0"),
    (["FIT", "--batch-size", "1"], "BatchNorm needs at least 2 examples per batch"),
    (["FIT", "--meta", "3"], "--meta 3 cannot cover 10 classes"),
    # missing values and files
    (["fit"], "missing --out DIR; see warpi fit --help"),
    (["FIT", "--out"], "--out needs a value; see warpi fit --help"),
    (["FIT", "extra"], "unexpected argument 'extra'; flags begin with --"),
    (["list"], "missing methods|datasets|noises|nets|learners; see"),
    (["report"], "missing DIR; see warpi report --help"),
    (["report", "nowhere"], "nowhere does not exist; pass a run folder"),
    (["corrupt"], "missing --out FILE"),
    (["FIT", "--data", "nothere.npz"], "no file or folder 'nothere.npz'"),
    (["FIT", "--labels", "nothere.json"], "cannot read the noise file nothere.json"),
    (["FIT", "--weights", "nothere.pt"], "nothere.pt"),
    (["FIT", "--data", "cifar10", "--root", "nothere"], "cifar10 is not in nothere"),
    (["FIT", "--data", "{good}", "--trusted", "nothere.npz"], "no file or folder 'nothere.npz'"),
    (
        ["FIT", "--labels", "worst"],
        "labels must be a .json file, as written by `warpi review` or `warpi corrupt`, got ",
    ),
    (["FIT", "--labels", "a.json", "--noise", "pair:0.4"], "--labels replaces all labels and --noise changes them"),
    (["FIT", "--noise", "pair:0.4", "--labels", "a.json"], "--labels replaces all labels and --noise changes them"),
    # folders
    (["FIT", "--out", "{good}"], "cannot read {good}/spec.json: Not a directory; choose another folder"),
    (["FIT", "--out", "{good}/below"], "Not a directory; choose another folder"),
    (["corrupt", "--out", "nowhere/q.json", "--noise", "pair:0.1"], "cannot write nowhere/q.json: No such file"),
    (["corrupt", "--out", "{good}/q.json", "--noise", "pair:0.1"], "q.json: Not a directory"),
    # data
    (["FIT", "--data", "{range}"], "row 7 of train: '5'"),
    (["FIT", "--data", "{negative}"], "row 7 of train: '-1'"),
    (["FIT", "--data", "{fraction}"], "row 0 contains 0.5"),
    (["FIT", "--data", "{lengths}"], "y has 50 rows, but the inputs have 60"),
    (["FIT", "--data", "{nan}"], "row 4, column 1 contains nan"),
    (["FIT", "--data", "{no rows}"], "[0, 3]"),
    (["FIT", "--data", "{empty class}", "--meta", "0"], "1 of 4 classes without an example in the training rows: 'd'"),
    (["FIT", "--data", "{meta lacks}", "--meta", "4"], "class '2' needs 1 but has only 0 candidates"),
    (["FIT", "--data", "{good}", "--trusted", "{two}", "--meta", "3"], "class '2' needs 1 but has only 0 candidates"),
    (["FIT", "--data", "{objects}"], "objects are rejected"),
    (["FIT", "--data", "{text}"], "text.npz"),
    (["FIT", "--data", "{none}"], "none.csv"),
    (["FIT", "--data", "{bare}"], "has no column 'label'; columns: a, b"),
    (["FIT", "--data", "{letter}"], "pass a .npz"),
    # columns to leave out
    (
        ["FIT", "--drop", "id"],
        "digits is not a table; omit --drop, which can only be used with tables (.csv, .tsv, .parquet)",
    ),
    (
        ["FIT", "--data", "{good}", "--drop", "id"],
        "good.npz is not a table; omit --drop, which can only be used with tables",
    ),
    (
        ["FIT", "--data", "{ids}", "--drop", "ids"],
        "ids.csv has no column 'ids' (did you mean 'id'?); columns: id, a, l",
    ),
    (["FIT", "--data", "{ids}", "--drop", "id,label"], "ids.csv: 'label' contains the labels and cannot be dropped"),
    (
        ["FIT", "--data", "{ids}", "--drop", "id, a"],
        "no feature column is left; columns: id, a, label; --drop ignores id, a",
    ),
    (
        ["corrupt", "--drop", "id", "--out", "n.json", "--noise", "pair:0.1"],
        "digits is not a table; omit --drop, which can only be used with tables",
    ),
    (
        ["pick", "3", "--data", "{ids}", "--drop", "x", "--csv", "n.csv"],
        "ids.csv has no column 'x'; columns: id, a, la",
    ),
    (["review", "--data", "{ids}", "--drop", "x", "--out", "n"], "ids.csv has no column 'x'; columns: id, a, label"),
    (["FIT", "--method", "warpi", "--meta", "0"], "`warpi pick`"),
]


class TestMistakes:
    @pytest.mark.parametrize(("argv", "message"), MISTAKES, ids=[" ".join(argv) for argv, _ in MISTAKES])
    def test_an_error_is_one_line_and_exit_code_2(
        self,
        argv: list[str],
        message: str,
        files: Files,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        monkeypatch.chdir(tmp_path)
        if argv[0] == "FIT":
            argv = [*FIT, "--out", "run", *argv[1:]]
        argv = [a.format(**files) for a in argv]
        assert main(argv) == 2
        out, err = capsys.readouterr()
        assert out == "", "nothing is trained"
        assert err.startswith("warpi: ")
        assert message.format(**files) in err
        assert err.count("\n") == 1
        assert err.endswith("\n")
        assert not (tmp_path / "run" / "done").exists()

    def test_a_trusted_set_without_examples_of_a_class(
        self, files: Files, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        for extra in (["--data", files["meta lacks"]], ["--data", files["good"], "--trusted", files["two"]]):
            assert main(["fit", "--method", "ce", "--out", str(tmp_path / "a"), *extra]) == 2
            assert "1 of 3 classes without an example in the trusted examples: '2'" in capsys.readouterr().err

    def test_divergence_stops_the_run(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        """The message is the only line: a warning of a library would fail the test."""
        assert main([*FIT, "--out", str(tmp_path / "run"), "--lr", "1e30", "--epochs", "9"]) == 2
        error = capsys.readouterr().err
        assert error.count("\n") == 1
        assert "(lr 1e+30); lower --lr" in error
        assert not (tmp_path / "run" / "done").exists()

    def test_in_a_new_process(self) -> None:
        command = [sys.executable, "-m", "warpi", "fti"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=100)
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr == "warpi: unknown command 'fti'; did you mean 'fit'?\n"

    def test_ctrl_c_before_training(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        def interrupted(*_: Any, **__: Any) -> None:
            raise KeyboardInterrupt

        monkeypatch.setattr("warpi.runs.run.prepare", interrupted)
        assert main([*FIT, "--out", str(tmp_path)]) == 130
        assert capsys.readouterr().err == "warpi: interrupted\n"


class TestFit:
    def test_flags_reach_the_run(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        out = tmp_path / "a run"
        argv = ["fit", "--limit", "300", "--noise", "pair:0.2", "--method", "warpi", "--out", str(out), "--meta", "20"]
        argv += ["--epochs", "2", "--seed", "4", "--lr", "0.02", "--samples", "2"]
        argv += ["--output", "sigmoid"]
        argv += ["--virtual-lr", "0.1", "--milestones", "0.5", "--schedule", "cosine", "--net", "mlp", "--val", "0.2"]
        assert main(argv) == 0
        text = capsys.readouterr().out.splitlines()
        assert re.fullmatch(
            r"digits, noise pair:0.2 \([\d.]+ % wrong\): \d+ noisy, 20 trusted, \d+ validation, \d+ test rows; "
            r"10 classes, 64 features; warpi trains mlp for 2 epochs",
            text[0],
        )
        assert text[1].startswith("epoch 1/2  loss ")
        assert text[-1].startswith("warpi after 2 epochs: test accuracy ")
        spec = json.loads((out / "spec.json").read_text())["spec"]
        assert (spec["noise"], spec["seed"], spec["meta"], spec["val"]) == ("pair:0.2", 4, 20, 0.2)
        assert spec["changed"] == {"samples": 2, "output": "sigmoid", "virtual_lr": 0.1}
        assert spec["options"]["label_input"] == "one_hot", "defaults that depend on the data are not listed as changed"
        assert spec["recipe"]["milestones"] == [0.5]
        assert (spec["recipe"]["lr"], spec["recipe"]["schedule"]) == (0.02, "cosine")
        before = (out / "results.jsonl").read_text()

        assert main(["fit", "--out", str(out), "--resume"]) == 0  # the folder stores the method
        assert (out / "results.jsonl").read_text() == before
        assert main([*argv, "--resume", "--quiet"]) == 0
        capsys.readouterr()
        assert main([*argv, "--resume", "--samples", "3"]) == 2
        assert "was started with samples = 2, not 3" in capsys.readouterr().err
        assert main(argv) == 2
        assert "already contains a run" in capsys.readouterr().err

    def test_quiet(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert main([*FIT, "--out", str(tmp_path), "--quiet"]) == 0
        assert capsys.readouterr() == ("", "")

    def test_no_test_set(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert main([*FIT, "--out", str(tmp_path), "--test", "0"]) == 0
        assert "no test set" in capsys.readouterr().out

    def test_data_from_a_file(self, files: Files, tmp_path: Path) -> None:
        argv = ["--method", "warpi", "--meta", "9", "--epochs", "1", "--noise", "flip:0.3"]
        assert main(["fit", "--data", files["good"], "--out", str(tmp_path), *argv, "--quiet"]) == 0
        assert json.loads((tmp_path / "spec.json").read_text())["facts"]["n_meta"] == 9

    def test_few_rows(self, files: Files) -> None:
        """A small table is trained in more and smaller steps, unless epochs are set; a built-in data set is not."""
        table = {"data": files["good"], "meta": 9, "noise": "flip:0.3"}
        for settings, epochs, lr in (
            (table, 469, 0.0032),
            (table | {"epochs": 1}, 1, 0.05),
            ({"data": "digits", "limit": 300, "meta": 20, "noise": "pair:0.4"}, 30, 0.05),
        ):
            recipe = prepare(RunSpec.from_settings("ce", **settings)).spec.recipe
            assert (recipe.epochs, round(recipe.lr, 4)) == (epochs, lr)


class TestDeprecatedNames:
    def test_of_flags(self, files: Files, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        """The old names do the same and print one line each."""
        labels = tmp_path / "labels.json"
        common = ["--data", files["good"]]
        assert main(["corrupt", *common, "--noise", "pair:0.3", "--out", str(labels)]) == 0
        capsys.readouterr()
        lines = {
            "new": ["--trusted", files["trusted"], "--labels", str(labels)],
            "old": ["--meta-data", files["trusted"], "--noise", f"given:{labels}"],
        }
        errors = []
        for name, flags in lines.items():
            argv = ["fit", *common, *flags, "--method", "ce", "--epochs", "1", "--quiet"]
            assert main([*argv, "--out", str(tmp_path / name)]) == 0
            errors.append(capsys.readouterr().err)
        assert errors[0] == ""
        assert errors[1].splitlines() == [
            "warpi: --meta-data FILE is deprecated; use --trusted FILE",
            "warpi: --noise given:FILE is deprecated; use --labels FILE",
        ]
        new, old = (json.loads((tmp_path / name / "spec.json").read_text())["spec"] for name in lines)
        assert new == old
        assert (new["meta_data"], new["noise"]) == (files["trusted"], f"given:{labels}")
        assert main(["fit", *common, *lines["new"], "--out", str(tmp_path / "old"), "--resume", "--quiet"]) == 0
        assert "--trusted" in command(old)
        assert f"--labels {labels}" in command(old)

    def test_in_python(self, files: Files, tmp_path: Path) -> None:
        common: dict[str, Any] = {"data": files["good"], "method": "ce", "epochs": 1}
        run = fit(tmp_path / "new", trusted=files["trusted"], **common)
        with pytest.warns(FutureWarning, match="meta_data is deprecated; use trusted"):
            old = fit(tmp_path / "old", meta_data=Path(files["trusted"]), **common)
        assert run.task.meta is not None
        assert old.task.meta is not None
        assert len(run.task.meta) == len(old.task.meta) == 9
        labels = str(tmp_path / "labels.json")
        assert main(["corrupt", "--data", files["good"], "--noise", "pair:0.5", "--out", labels]) == 0
        run = fit(tmp_path / "new labels", labels=labels, **common)
        with pytest.warns(FutureWarning, match="noise='given:FILE' is deprecated; use labels=FILE"):
            old = fit(tmp_path / "old labels", noise=f"given:{labels}", **common)
        assert run.task.train.y.tolist() == old.task.train.y.tolist()
        with pytest.raises(UserError, match="labels and noise cannot be set together; omit noise"):
            fit(tmp_path / "x", labels="a.json", noise="pair:0.3", **common)

    def test_in_a_sweep(self, files: Files, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        file = tmp_path / "s.toml"
        plans = []
        for name, labels in (("trusted", "labels"), ("meta_data", "noise")):
            values = ["a.json", "b.json"] if labels == "labels" else ["given:a.json", "given:b.json"]
            text = f'[defaults]\ndata = "{files["good"]}"\nmethod = "ce"\n{name} = "{files["trusted"]}"\n'
            file.write_text(f"{text}[grid]\n{labels} = {values}\n")
            caplog.clear()
            plans.append(read_plan(file))
            assert ("meta_data is deprecated; use trusted" in caplog.text) is (name == "meta_data")
        assert plans[0].jobs == plans[1].jobs
        assert [job.settings["noise"] for job in plans[0].jobs] == ["given:a.json", "given:b.json"]
        (job,) = read_plan(file, changes=["labels=c.json", "trusted=t.npz"]).jobs
        assert (job.settings["noise"], job.settings["meta_data"]) == ("given:c.json", "t.npz")


class TestRenamedSettings:
    """`reinitialize` of t_revision and ptd was `anew`."""

    COMMON = ("fit", "--method", "t_revision", "--limit", "100", "--epochs", "1", "--quiet")

    def test_on_the_command_line_and_in_a_stored_run(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        out = tmp_path / "run"
        assert main([*self.COMMON, "--out", str(out), "--no-anew"]) == 0
        assert capsys.readouterr().err == "warpi: --no-anew is deprecated; use --no-reinitialize\n"
        file = out / "spec.json"
        stored = json.loads(file.read_text())
        assert stored["spec"]["changed"] == {"reinitialize": False}
        for part in ("options", "changed"):  # as older versions stored it
            stored["spec"][part]["anew"] = stored["spec"][part].pop("reinitialize")
        file.write_text(json.dumps(stored))
        for flag in ("--no-anew", "--no-reinitialize"):
            assert main(["fit", "--out", str(out), "--resume", "--quiet", flag]) == 0
        assert main(["fit", "--out", str(out), "--resume", "--quiet", "--reinitialize"]) == 2
        assert "was started with reinitialize = False, not True" in capsys.readouterr().err
        assert asdict(reopen(out).method)["reinitialize"] is False
        (record,) = find_runs([out])
        assert "--no-reinitialize" in command(record.spec)

    def test_in_python(self, tmp_path: Path) -> None:
        with pytest.warns(FutureWarning, match="anew is deprecated; use reinitialize"):
            run = fit(tmp_path / "run", method="ptd", anew=False, limit=100, epochs=1)
        assert asdict(run.method)["reinitialize"] is False
        with pytest.warns(FutureWarning, match="anew is deprecated; use reinitialize"):
            assert make_method("ptd", anew=False) == make_method("ptd", reinitialize=False)
        with pytest.raises(UserError, match="anew is the deprecated name of reinitialize; leave it out"):
            RunSpec.from_settings("ptd", anew=False, reinitialize=False)
        with pytest.raises(UserError, match="unknown setting 'anew'"):
            RunSpec.from_settings("ce", anew=False)

    def test_in_a_sweep(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        file = tmp_path / "s.toml"
        plans = []
        for name in ("reinitialize", "anew"):
            file.write_text(f'[defaults]\nmethod = "ptd"\n[grid]\n{name} = [true, false]\n')
            caplog.clear()
            plans.append(read_plan(file))
            assert ("anew is deprecated; use reinitialize" in caplog.text) is (name == "anew")
        assert plans[0].jobs == plans[1].jobs
        assert plans[0].jobs[1].name == "ptd_given_anew-false_seed0"  # as in folders of older versions
        assert plans[0].jobs[1].settings["reinitialize"] is False
        (job,) = read_plan(file, changes=["anew=false"]).jobs
        assert job == plans[0].jobs[1]
        folder = tmp_path / job.name
        folder.mkdir()
        (folder / "sweep.json").write_text('{"method": "ptd", "anew": false}')
        assert read_settings(folder / "sweep.json") == {"method": "ptd", "reinitialize": False}


class TestSweep:
    def test_columns_to_drop(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        """A list is one value, a list of lists is several; names that differ only in case get different folders."""
        rows = [f"{k},{k % 5},{k % 7},{k},{'pq'[k % 2]}" for k in range(60)]
        (tmp_path / "t.csv").write_text("\n".join(["id,a,b,ID/no,label", *rows]))
        file = tmp_path / "s.toml"
        fixed = f'[defaults]\ndata = "{tmp_path / "t.csv"}"\nepochs = 1\nmethod = "ce"\n'
        argv = ["sweep", str(file), "--out", str(tmp_path / "runs"), "--jobs", "1", "--device", "cpu"]
        file.write_text(fixed + 'drop = ["id", "ID/no"]\n')
        assert main(argv) == 0
        spec = json.loads((tmp_path / "runs" / "ce_given_seed0" / "spec.json").read_text())["spec"]
        assert spec["drop"] == ["id", "ID/no"]
        file.write_text(fixed + '[grid]\ndrop = [["id"], ["id", "b"], ["id", "ID/no"], ["id", "ID-no"]]\n')
        names = [job.name for job in read_plan(file).jobs]
        assert names[:2] == ["ce_given_drop-id_seed0", "ce_given_drop-id,b_seed0"]
        assert len({name.lower() for name in names}) == 4
        assert not any("/" in name for name in names)
        file.write_text(fixed + 'drop = "id"\n')
        assert main([*argv, "--dry-run"]) == 2
        assert "drop must be tuple[str, ...], got 'id'" in capsys.readouterr().err


class TestCorrupt:
    @pytest.mark.parametrize("kind", ["uniform:0.4", "instance:0.2"])
    def test_draws_the_same_noise_as_fit(self, tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]) -> None:
        manifest = tmp_path / "noise.json"
        assert main(["corrupt", "--data", "digits", "--noise", kind, "--seed", "7", "--out", str(manifest)]) == 0
        digest = capsys.readouterr().out.split("sha256 ")[1].strip()
        assert main([*FIT, "--noise", kind, "--seed", "7", "--out", str(tmp_path / "a")]) == 0
        assert main([*FIT, "--labels", str(manifest), "--seed", "7", "--out", str(tmp_path / "b")]) == 0
        facts = [json.loads((tmp_path / run / "spec.json").read_text())["facts"] for run in "ab"]
        assert [each.pop("noise_file_sha256") is None for each in facts] == [True, False]
        assert facts[0] == facts[1]
        assert facts[0]["noise_sha256"] == digest == json.loads(manifest.read_text())["sha256"]
        results = [(tmp_path / run / "results.jsonl").read_text().split('"seconds"')[0] for run in "ab"]
        assert results[0] == results[1]


class TestReport:
    def test_json(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        for seed in "01":
            assert main([*FIT, "--epochs", "2", "--seed", seed, "--out", str(tmp_path / seed), "--quiet"]) == 0
        assert main(["report", str(tmp_path / "0"), str(tmp_path / "1"), "--json", str(tmp_path / "t.json")]) == 0
        (row,) = json.loads((tmp_path / "t.json").read_text())
        assert (row["method"], row["data"], row["noise"], row["net"], row["n_seeds"]) == (
            *("ce", "digits", "given", "mlp", 2),
        )
        epochs = [[*map(json.loads, (tmp_path / seed / "results.jsonl").read_text().splitlines())] for seed in "01"]
        assert row["last_mean"] == pytest.approx(np.mean([run[-1]["test_acc"] for run in epochs]))
        assert row["last_std"] == pytest.approx(np.std([run[-1]["test_acc"] for run in epochs], ddof=1))
        assert row["best_mean"] == pytest.approx(np.mean([max(e["test_acc"] for e in run) for run in epochs]))
        assert row["val_mean"] is not None
        assert "ce" in capsys.readouterr().out


def test_fit_names_the_measured_gain_of_five_checked_rows() -> None:
    """The message follows the results of benchmarks/audit/without_trusted.py."""
    results = Path(__file__).resolve().parents[2] / "benchmarks" / "results" / "without_trusted.json"
    cases = json.loads(results.read_text())["cases"]
    pair = [case for key, case in cases.items() if key.split()[1:3] == ["pair", "0.4"]]
    assert len(pair) == 9
    without, five = (mean(case[which]["accuracy"] for case in pair) for which in ("without", "five"))
    assert "nine tables with 40 % of the labels" in WITHOUT_TRUSTED
    assert f"raised the accuracy from {without:.0f} to {five:.0f} %" in WITHOUT_TRUSTED
