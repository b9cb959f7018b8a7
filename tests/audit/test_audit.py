"""Audits of runs: accuracy on data with known labels, storage, folds, the command, and use with cleanlab."""

import csv
import json
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import roc_auc_score

import warpi
from warpi.audit import audit, out_of_sample
from warpi.audit.make_audit import _Predictions, _trusted_accuracy, estimate_uncertainty
from warpi.audit.result import Audit, read_audit
from warpi.cli.app import main
from warpi.data.image_files import FileExamples
from warpi.errors import UserError
from warpi.estimator.classifier import NoisyLabelClassifier
from warpi.methods.plain import CE
from warpi.runs.run import Run
from warpi.training.recipe import Recipe
from warpi.training.task import Task, Truth

PER_ROW = ("row", "given", "suggested", "wrong_probability", "label_quality", "is_label_issue", "uncertainty")
PER_ROW += ("probabilities",)
COLUMNS = "row,given_label,suggested_label,wrong_probability,label_quality,is_label_issue,uncertainty"
COPIES = ",copy_group,copy_kind,copy_labels_differ,copy_across_parts,is_outlier,problem"  # of audits of runs


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    out = tmp_path_factory.mktemp("audit") / "run"
    return warpi.fit(out, data="digits", noise="pair:0.4", epochs=12, seed=0, device="cpu")


@pytest.fixture(scope="module")
def judged(run: Run) -> Audit:
    return audit(run.path, folds=0, device="cpu")


def test_finds_the_wrong_labels(run: Run, judged: Audit) -> None:
    assert run.truth.clean is not None
    assert np.array_equal(judged.row, run.task.train.rows.numpy())
    bad = run.truth.clean.numpy() != judged.given
    issue = judged.is_label_issue
    assert roc_auc_score(bad, judged.wrong_probability) > 0.97
    assert bad[issue].mean() > 0.85
    assert issue[bad].mean() > 0.85
    assert (np.where(issue, judged.suggested, judged.given) == run.truth.clean.numpy()).mean() > 0.92
    assert np.abs(judged.T - run.truth.T.numpy()).max() < 0.2  # type: ignore[union-attr]
    assert abs(judged.facts["noise_rate"]["rate"] - bad.mean()) < 0.1
    assert judged.facts["noise_rate"]["low"] is None, "no check backs an interval"
    assert roc_auc_score(bad != issue, judged.uncertainty) > 0.75
    assert "20 samples" in judged.facts["uncertainty"]
    assert bad[judged.ranked[:100]].mean() > 0.97


def test_stored_audit_is_read_back_and_damaged_files_are_refused(run: Run, judged: Audit, tmp_path: Path) -> None:
    stored = read_audit(run.path)
    for name in ("row", "given", "suggested", "wrong_probability", "is_label_issue", "probabilities", "T"):
        assert np.array_equal(getattr(stored, name), getattr(judged, name)), name
    assert stored.summary() == judged.summary()
    assert json.loads(json.dumps(stored.summary()))["n"] == len(judged)
    judged = replace(judged, **{f.name: getattr(judged, f.name)[:20] for f in fields(judged) if f.name in PER_ROW})
    for content in (b"", b"nonsense", (run.path / "audit.npz").read_bytes()[:-40]):
        (tmp_path / "audit.npz").write_bytes(content)
        with pytest.raises(UserError, match="is damaged or was written by another version"):
            read_audit(tmp_path)
    with pytest.raises(UserError, match="warpi audit"):
        read_audit(tmp_path / "nothing")
    for name, change in (
        ("given", lambda v: v[:5]),
        ("given", lambda v: v + 7),
        ("row", lambda v: v * 1.0),
        ("row", lambda v: v - 10_000),
        ("probabilities", lambda v: v[:, :1]),
        ("wrong_probability", lambda v: v * np.nan),
        ("T", lambda v: v.astype(str)),
    ):
        replace(judged, **{name: change(getattr(judged, name))}).save(tmp_path)
        with pytest.raises(
            UserError, match=f"is damaged or was written by another version.*{name if name != 'row' else ''}"
        ):
            read_audit(tmp_path)
    facts = dict(judged.facts)
    for change_of in (
        {"classes": judged.classes[:3]},
        {"classes": [*range(len(judged.classes))]},
        {"error_rates": judged.error_rates[1:]},
        {"error_rates": ({"rate": "x"},) * len(judged.classes)},
        {"facts": {**facts, "noise_rate": None}},
        {"facts": {**facts, "trusted_accuracy": "x"}},
        {"facts": {name: value for name, value in facts.items() if name != "uncertainty"}},
    ):
        replace(judged, **change_of).save(tmp_path)
        with pytest.raises(UserError, match="is damaged or was written by another version"):
            read_audit(tmp_path)
    np.savez(tmp_path / "audit.npz", about=np.array("5"))
    with pytest.raises(UserError, match="is damaged or was written by another version"):
        read_audit(tmp_path)


def test_method_and_run_give_the_same_audit_as_the_folder_without_true_labels(run: Run, judged: Audit) -> None:
    without_truth = replace(run, truth=replace(run.truth, clean=None, T=None, test=None))
    for source in (run.method, without_truth):
        result = audit(source, folds=0, save=False)
        assert np.allclose(result.wrong_probability, judged.wrong_probability, atol=1e-6)
        assert np.array_equal(result.suggested, judged.suggested)


def test_command(run: Run, judged: Audit, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = [str(tmp_path / name) for name in ("a.csv", "a.parquet", "a.json")]
    assert (
        main(["audit", str(run.path), "--folds", "0", "--csv", files[0], "--parquet", files[1], "--json", files[2]])
        == 0
    )
    output = capsys.readouterr().out
    assert "probably wrong" in output
    assert run.task.val is not None
    assert f"{len(run.task.val)} held-out rows not audited; --rows all" in output  # the test labels are clean
    lines = Path(files[0]).read_text().splitlines()
    assert lines[0] == COLUMNS + COPIES
    rows = list(csv.DictReader(lines))
    assert [int(r["row"]) for r in rows] == judged.row.tolist()
    assert {r["given_label"] for r in rows} == set(judged.classes)
    assert {r["is_label_issue"] for r in rows} == {"True", "False"}
    import pandas as pd

    frame = pd.read_parquet(files[1])
    assert ",".join(frame.columns) == COLUMNS + COPIES
    assert frame["is_label_issue"].sum() == judged.is_label_issue.sum()
    assert np.allclose(json.loads(Path(files[2]).read_text())["T"], judged.T)


def test_mistakes_are_reported(run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    half = tmp_path / "half"
    half.mkdir()
    (half / "spec.json").write_bytes((run.path / "spec.json").read_bytes())
    for argv, message in (
        ([str(tmp_path)], "there is no run"),
        ([str(half)], "not finished"),
        ([str(run.path), "--threshold", "1"], "threshold"),
        ([str(run.path), "--folds", "1"], "folds"),
        ([str(run.path), "--rows", "some"], "'train' or 'all'"),
        ([str(run.path), "--csv", str(tmp_path / "no" / "a.csv")], "no folder"),
    ):
        assert main(["audit", *argv]) == 2
        assert message in capsys.readouterr().err
    with pytest.raises(UserError, match="not been trained"):
        audit(warpi.WarPI())


def fit_small(out: Path, method: str = "warpi", **settings: Any) -> Run:
    return warpi.fit(out, data="digits", noise="pair:0.4", method=method, limit=300, epochs=2, device="cpu", **settings)


def test_folds_predict_rows_they_were_not_trained_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done = fit_small(tmp_path / "run", meta=20)
    trained: list[set[int]] = []
    trusted: list[set[int]] = []
    original_train = out_of_sample.train

    def recording_train(method: warpi.Method, task: warpi.Task) -> Any:
        trained.append(set(task.train.rows.tolist()))
        assert task.meta is not None
        assert task.meta.y.unique().tolist() == list(range(10))  # every class still has a trusted row
        trusted.append(set(task.meta.rows.tolist()))
        return original_train(method, task)

    monkeypatch.setattr(out_of_sample, "train", recording_train)
    first = audit(done.path, folds=3, device="cpu")
    rows = set(done.task.train.rows.tolist())
    left_out = [rows - part for part in trained]
    assert len(trained) == 3
    assert sorted(row for part in left_out for row in part) == sorted(rows)  # every row once
    assert max(map(len, left_out)) - min(map(len, left_out)) <= 1
    assert done.task.meta is not None
    left_out = [set(done.task.meta.rows.tolist()) - part for part in trusted]
    assert sorted(row for part in left_out for row in part) == sorted(done.task.meta.rows.tolist())
    assert first.facts["n_trusted"] == 20
    assert "out of sample" in first.facts["probabilities"]
    assert "of run and fold" in first.facts["uncertainty"]
    second = audit(done.path, folds=3, device="cpu")  # nothing is trained again
    assert len(trained) == 3
    assert np.array_equal(first.wrong_probability, second.wrong_probability)
    file = done.path / "fold-2-of-3.npz"
    with np.load(file) as stored:
        arrays = dict(stored)
    for name, values in (("y", (arrays["y"] + 1) % 10), ("p", arrays["p"] * np.nan), ("p", arrays["p"][:-1])):
        np.savez(file, **{**arrays, name: values})
        with pytest.raises(UserError, match=r"do not fit the run.*delete it"):
            audit(done.path, folds=3, device="cpu")
    np.savez(file, **{name: values for name, values in arrays.items() if not name.startswith("trusted_")})
    audit(done.path, folds=3, device="cpu")  # older versions left no trusted row out: this fold is trained again
    assert len(trained) == 4
    file.write_bytes(b"nonsense")
    with pytest.raises(UserError, match="delete it"):
        audit(done.path, folds=3, device="cpu")


def test_rate_is_better_if_the_trusted_rows_were_not_used_for_training(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rng = np.random.default_rng(0)
    y = rng.integers(0, 3, 460)
    x = (y[:, None] * 0.9 + rng.normal(size=(460, 6))).astype(np.float32)  # classes that overlap
    given = np.where((rng.random(460) < 0.3) & (np.arange(460) >= 60), (y + 1) % 3, y)
    np.savez(tmp_path / "a.npz", x=x, y=given, verified=np.arange(460) < 60)
    done = warpi.fit(tmp_path / "run", method="clean_only", data=str(tmp_path / "a.npz"), epochs=20, device="cpu")
    rates = []
    for n in (0, 5):
        caplog.clear()
        result = audit(done, folds=n, rows="train", save=False)
        rate = result.facts["noise_rate"]
        rates.append(rate["rate"])
        assert ("used for training" in caplog.text) is (n == 0)
        assert rate["low"] is None
    assert abs(rates[1] - 0.3) < 0.5 * abs(rates[0] - 0.3)


@pytest.mark.parametrize("use_trusted", [True, False])
def test_trusted_rows_that_a_method_chose_to_use_cannot_check_the_rates(
    use_trusted: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = fit_small(tmp_path, "warpi_plus", use_trusted=use_trusted)
    audit(run, folds=0, save=False)
    assert ("used for training" in caplog.text) is use_trusted


@pytest.mark.parametrize("meta", [10, 11])
def test_the_only_trusted_row_of_a_class_is_never_left_out(
    meta: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    result = audit(fit_small(tmp_path / "run", meta=meta), folds=2, save=False)
    assert result.facts["n_trusted"] == (2 if meta == 11 else 10)  # 11: one class has two rows; 10: none is left out
    assert "use --folds" not in caplog.text


@pytest.mark.parametrize("folds", [0, 3])
def test_labels_before_the_check_back_an_interval(folds: int, tmp_path: Path) -> None:
    """Trusted rows that were not used for training, and still have the label before the check, measure the rate."""
    rng = np.random.default_rng(2)
    y = rng.integers(0, 3, 500)
    x = (y[:, None] * 0.9 + rng.normal(size=(500, 6))).astype(np.float32)
    given = np.where(rng.random(500) < 0.3, (y + 1) % 3, y)
    clean = np.where(np.arange(500) < 90, y, -1)
    np.savez(tmp_path / "a.npz", x=x, y=given, clean=clean)
    done = warpi.fit(tmp_path / "run", method="clean_only", data=str(tmp_path / "a.npz"), epochs=5, device="cpu")
    result = audit(done, folds=folds, rows="train")
    rate = result.facts["noise_rate"]
    if not folds:
        assert rate["low"] is None
        return
    assert rate["low"] <= (y != given)[result.row].mean() <= rate["high"]
    assert rate["high"] - rate["low"] < 0.4
    assert (rate["checked"], rate["level"]) == (90, 0.9)
    assert read_audit(done.path).facts["noise_rate"] == rate


def test_more_folds_than_rows(tmp_path: Path) -> None:
    x = np.random.default_rng(0).normal(size=(40, 3)).astype(np.float32)
    np.savez(tmp_path / "a.npz", x=x, y=x[:, 0] > 0, verified=np.arange(40) < 10)
    done = warpi.fit(tmp_path / "run", data=str(tmp_path / "a.npz"), epochs=1, device="cpu")
    with pytest.raises(UserError, match=r"50 folds of \d+ training rows"):
        audit(done, folds=50)


def test_folds_leave_out_trusted_images_that_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    image, lines = pytest.importorskip("PIL.Image"), ["path,label,verified"]
    for i in range(48):
        image.new("RGB", (9, 9), (i * 5, 90, 10)).save(tmp_path / f"{i}.png")
        lines.append(f"{i}.png,{'cat' if i % 2 else 'dog'},{'yes' if i < 4 else 'no'}")
    (tmp_path / "list.csv").write_text("\n".join(lines))
    (tmp_path / "0.png").write_bytes(b"not an image")
    monkeypatch.setattr("warpi.datasets.image_folders.IN_MEMORY", 0)  # read files when they are needed
    monkeypatch.setattr("warpi.datasets.image_folders.FileExamples", partial(FileExamples, workers=0))
    done = warpi.fit(
        tmp_path / "run",
        data=str(tmp_path / "list.csv"),
        root=str(tmp_path),
        net="mlp",
        image_size=8,
        method="ce",
        epochs=1,
        device="cpu",
    )
    assert audit(done, folds=4).facts["n_trusted"] == 3  # one trusted row per fold


def test_which_rows_are_audited(tmp_path: Path) -> None:
    x = np.random.default_rng(0).normal(size=(150, 3)).astype(np.float32)
    y = (x[:, 0] > 0).astype(int)
    verified = np.arange(150) < 20
    np.savez(tmp_path / "a.npz", x=x, y=y, verified=verified)
    held_out = {"val": 0.1, "test": 0.25}
    done = warpi.fit(tmp_path / "run", data=str(tmp_path / "a.npz"), epochs=2, device="cpu", **held_out)
    assert done.task.val is not None
    assert done.truth.test is not None
    every = audit(done, folds=0, save=False)
    assert every.row.tolist() == [row for row in range(150) if not verified[row]]  # all but the trusted ones
    assert np.array_equal(every.given, y[every.row])
    assert every.facts["left_out"] == 0
    part = audit(done, folds=0, rows="train", save=False)
    assert len(part) == len(done.task.train)
    assert part.facts["left_out"] == len(done.task.val) + len(done.truth.test)
    bare = audit(warpi.fit(tmp_path / "bare", data=str(tmp_path / "a.npz"), epochs=1, device="cpu"), folds=0)
    assert "use folds" in bare.facts["probabilities"]
    assert bare.facts["memory"] == 0


def test_uncertainty_with_several_networks_and_with_one(tmp_path: Path) -> None:
    two = audit(fit_small(tmp_path / "two", "co_teaching", meta=20), folds=0, save=False)
    assert "2 networks" in two.facts["uncertainty"]
    assert (two.uncertainty > 0).any()
    one = audit(fit_small(tmp_path / "one", "ce", meta=0), folds=0, save=False)
    assert "entropy" in one.facts["uncertainty"]
    assert ((one.uncertainty >= 0) & (one.uncertainty <= 1)).all()
    p = np.array([[0.7, 0.3], [0.5, 0.5]])
    predictions = out_of_sample.RowPredictions(
        np.arange(2), np.array([0, 1]), p, np.stack([p, p]), np.array([[-1.0, -2.0], [-1.0, -1.0]])
    )
    spread, _ = estimate_uncertainty(predictions, np.array([[0.8, 0.2], [0.2, 0.8]]))
    assert spread[0] == 0  # neither the samples nor the networks disagree
    w, shift = 1 - 0.8, np.array([-0.5, 0.5])
    assert spread[1] == pytest.approx((1 / (1 + np.exp(-(np.log(w / (1 - w)) + shift)))).std())


class _Sampling(CE):
    """A custom method with random label probabilities."""

    def label_samples(
        self, z: torch.Tensor, y: torch.Tensor, n: int, generator: torch.Generator
    ) -> torch.Tensor | None:
        assert z.shape == (len(y), 10)
        return torch.randn(n, len(y), generator=generator)


def test_custom_methods_can_supply_label_samples(tiny: tuple[Task, Truth]) -> None:
    method = _Sampling()
    method.start(tiny[0], Recipe(epochs=1, net="mlp"))
    result = audit(method, folds=0, save=False)
    assert "20 samples" in result.facts["uncertainty"]
    assert (result.uncertainty > 0).all()


def test_image_files_are_named_in_the_table(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    for name in ("cat", "dog"):
        (tmp_path / "photos" / name).mkdir(parents=True)
        for i in range(12):
            image.new("RGB", (9, 9), (i * 20, 90, 10)).save(tmp_path / "photos" / name / f"{i}.png")
    run = str(tmp_path / "run")
    warpi.fit(run, data=str(tmp_path / "photos"), method="ce", net="mlp", image_size=8, epochs=1, device="cpu")
    files = [str(tmp_path / name) for name in ("a.csv", "a.parquet")]
    assert main(["audit", run, "--csv", files[0], "--parquet", files[1], "--quiet"]) == 0
    with Path(files[0]).open() as file:
        rows = list(csv.DictReader(file))
    assert ",".join(rows[0]) == f"{COLUMNS}{COPIES},path"
    assert len(rows) == 24  # including held-out rows
    for cells in rows:
        assert (tmp_path / "photos" / cells["path"]).is_file()
        assert cells["path"].startswith(cells["given_label"])
    import pandas as pd

    assert pd.read_parquet(files[1])["path"].tolist() == [cells["path"] for cells in rows]
    odd = tuple(f"{i}\udcff.png" for i in range(24))  # a name may be any bytes
    read_audit(run).to_csv(files[0], odd)
    assert "3\\udcff.png" in Path(files[0]).read_text()


# --- cleanlab ---------------------------------------------------------------------------------------------------------


def test_cleanlab_takes_the_arrays(run: Run, judged: Audit) -> None:
    pytest.importorskip("cleanlab")
    from cleanlab.classification import CleanLearning
    from cleanlab.filter import find_label_issues

    assert run.truth.clean is not None
    bad = run.truth.clean.numpy() != judged.given
    issue = find_label_issues(**judged.cleanlab())
    assert issue.dtype == bool
    assert bad[issue].mean() > 0.8
    x = run.task.train.examples.flat(run.task.train.rows).numpy() / 16
    table = judged.label_issues()
    cleaned = CleanLearning(LogisticRegression(max_iter=500), seed=0).fit(x, judged.given, label_issues=table)
    plain = LogisticRegression(max_iter=500).fit(x, judged.given)
    assert run.truth.test is not None
    x_test = run.truth.test.examples.flat(run.truth.test.rows).numpy() / 16
    y_test = run.truth.test.y.numpy()
    assert cleaned.score(x_test, y_test) > plain.score(x_test, y_test) + 0.1
    theirs = CleanLearning(seed=0).find_label_issues(noise_matrix=judged.noise_matrix, **judged.cleanlab())
    assert theirs.columns.tolist() == table.columns.tolist()
    assert theirs["is_label_issue"].dtype == table["is_label_issue"].dtype


@pytest.mark.filterwarnings("ignore:The inplace keyword")  # pandas 3.1, about code in Datalab
def test_datalab_takes_the_arrays(judged: Audit) -> None:
    pytest.importorskip("cleanlab")
    from cleanlab import Datalab

    arrays = judged.cleanlab()
    lab = Datalab({"label": arrays["labels"]}, label_name="label", verbosity=0)
    lab.find_issues(pred_probs=arrays["pred_probs"], issue_types={"label": {}})
    issues = lab.get_issues("label")["is_label_issue"].to_numpy()
    assert (issues == judged.is_label_issue).mean() > 0.8


def test_our_classifier_within_cleanlab(digits: warpi.Dataset) -> None:
    pytest.importorskip("cleanlab")
    from cleanlab.classification import CleanLearning

    x, y = digits.examples.flat(torch.arange(300)).numpy() / 16, digits.y[:300].numpy().copy()
    wrong = np.random.default_rng(0).permutation(300)[:45]
    y[wrong] = (y[wrong] + 3) % 10
    clf = NoisyLabelClassifier("gce", epochs=15, random_state=0, device="cpu")
    issues = CleanLearning(clf, seed=0, cv_n_folds=3).find_label_issues(x, y)
    bad = np.isin(np.arange(300), wrong)
    assert roc_auc_score(bad, -issues["label_quality"]) > 0.85


def test_trusted_rows_count_by_the_size_of_their_class() -> None:
    """Ten trusted rows of each class stand for 900 and 100 rows."""

    def predictions(y: np.ndarray, predicted: np.ndarray) -> out_of_sample.RowPredictions:
        p = np.where(np.arange(2) == predicted[:, None], 0.99, 0.01)
        return out_of_sample.RowPredictions(np.arange(len(y)), y, p, np.zeros((0, *p.shape)), np.zeros((0, len(y))))

    large, ten = np.arange(1000) >= 900, np.repeat([0, 1], 10)
    rows = predictions(large.astype(np.int64), large)
    trusted = predictions(ten, np.zeros(20))  # right for the large class only
    accuracy = _trusted_accuracy(_Predictions(np.arange(1000), rows, trusted, True, np.eye(2), ""))
    assert accuracy == pytest.approx(0.9, abs=0.01)
