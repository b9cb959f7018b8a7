"""Audit of the probabilities of any model: arrays and files, chunks, trusted rows, errors."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sklearn.datasets import load_digits
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import cross_val_predict

from warpi.audit import audit
from warpi.audit.any_model.audit_array import NO_TRUSTED, audit_array, correct_transition
from warpi.audit.any_model.read_files import TrustedRows, read_probabilities
from warpi.audit.label_scores import posterior
from warpi.audit.pair_model import cross_fit_pairs, pair_features
from warpi.auto.transition import confident_transition
from warpi.cli.app import main
from warpi.errors import UserError

RNG = np.random.default_rng(0)
N, K = 400, 3
TRUE = RNG.integers(0, K, N)
GIVEN = np.where(RNG.random(N) < 0.3, (TRUE + 1) % K, TRUE)
LOGITS = 2.5 * np.eye(K)[TRUE] + RNG.normal(size=(N, K))
P = np.exp(LOGITS) / np.exp(LOGITS).sum(1, keepdims=True)
ROWS = RNG.choice(N, 60, replace=False)
TRUSTED = TrustedRows.from_rows(ROWS, TRUE[ROWS])
CLASSES = ("0", "1", "2")


def test_chunks_give_the_result_of_the_whole() -> None:
    whole = audit_array(P, GIVEN, CLASSES, TRUSTED)
    parts = audit_array(P, GIVEN, CLASSES, TRUSTED, chunk=7)
    for name in ("wrong_probability", "uncertainty", "learned_posterior", "T"):
        np.testing.assert_allclose(getattr(parts, name), getattr(whole, name), atol=1e-12)
    np.testing.assert_array_equal(parts.is_label_issue, whole.is_label_issue)
    assert parts.facts == whole.facts


def test_an_audit_without_posterior_is_the_same_otherwise() -> None:
    whole = audit_array(P, GIVEN, CLASSES, TRUSTED)
    less = audit_array(P, GIVEN, CLASSES, TRUSTED, keep_posterior=False)
    assert less.learned_posterior is None
    columns, expected = less.columns(), whole.columns()
    assert all(np.array_equal(columns[name], values) for name, values in expected.items())
    assert less.summary() == whole.summary()


def test_trusted_rows_teach_the_pair_model() -> None:
    result = audit(probabilities=P, labels=GIVEN, trusted=(ROWS, TRUE[ROWS]))
    features, names = pair_features(P, GIVEN)
    order = np.sort(ROWS)
    expected, _ = cross_fit_pairs(features, names, order, TRUE[order])
    others = np.setdiff1d(np.arange(N), ROWS)
    np.testing.assert_allclose(result.posterior[others], expected[others], atol=1e-6)
    np.testing.assert_array_equal(result.wrong_probability[ROWS], GIVEN[ROWS] != TRUE[ROWS])
    rate = result.facts["noise_rate"]
    assert rate["low"] < (GIVEN != TRUE).mean() < rate["high"]
    assert result.facts["learned"]


def test_without_trusted_rows_it_is_bayes_rule_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    result = audit(probabilities=P, labels=GIVEN)
    expected = posterior(P, GIVEN, confident_transition(P, GIVEN))
    np.testing.assert_allclose(result.posterior, expected, atol=1e-6)
    assert NO_TRUSTED in caplog.text
    assert result.facts["noise_rate"]["low"] is None


def test_without_trusted_rows_a_model_of_the_given_labels_shows_their_mistakes() -> None:
    x, true = load_digits(return_X_y=True)
    given = np.where(RNG.random(len(true)) < 0.2, (true + 1) % 10, true)
    p = cross_val_predict(LogisticRegression(C=0.2, max_iter=200), x / 16, given, cv=3, method="predict_proba")
    result = audit(probabilities=p, labels=given)
    wrong = given != true
    assert wrong[result.is_label_issue].mean() > 0.8
    assert result.is_label_issue[wrong].mean() > 0.5
    assert result.facts["noise_rate"]["rate"] == pytest.approx(wrong.mean(), abs=0.1)


def test_pairs_without_rows_correct_the_transition_matrix(tmp_path: Path) -> None:
    file = tmp_path / "pairs.csv"
    file.write_text("given_label,true_label\n" + "1,0\n" * 30)
    result = audit(probabilities=P, labels=GIVEN, trusted=file)
    T = confident_transition(P, GIVEN)
    np.testing.assert_allclose(result.T[0], (10 * T[0] + [0, 30, 0]) / 40)
    np.testing.assert_allclose(result.T[1:], T[1:])
    np.testing.assert_allclose(correct_transition(T, TRUE[:0], TRUE[:0]), T)


def test_trusted_rows_in_every_form_agree(tmp_path: Path) -> None:
    table = tmp_path / "trusted.csv"
    table.write_text("row,true_label\n" + "".join(f"{row},{TRUE[row]}\n" for row in ROWS) + "399,\n")
    marked = np.full(N, -1)
    marked[ROWS] = TRUE[ROWS]
    forms: list[Any] = [(ROWS, TRUE[ROWS]), dict(zip(ROWS.tolist(), TRUE[ROWS].tolist(), strict=True)), marked, table]
    first, *others = (audit(probabilities=P, labels=GIVEN, trusted=form).wrong_probability for form in forms)
    for other in others:
        np.testing.assert_array_equal(other, first)


def test_files_of_probabilities_agree_with_arrays(tmp_path: Path) -> None:
    import pyarrow
    from pyarrow import parquet

    names = ["cat", "dog", "eel"]
    np.save(tmp_path / "p.npy", P)
    lines = [",".join(map(repr, row)) for row in P.tolist()]
    (tmp_path / "p.csv").write_text("row,cat,dog,eel\n" + "".join(f"{i},{line}\n" for i, line in enumerate(lines)))
    table = pyarrow.table({f"p_{name}": P[:, k] for k, name in enumerate(names)})
    parquet.write_table(table, tmp_path / "p.parquet")
    for suffix in ("npy", "csv", "parquet"):
        p, columns = read_probabilities(tmp_path / f"p.{suffix}")
        np.testing.assert_array_equal(p, P)
        assert columns == (None if suffix == "npy" else names)
    assert isinstance(read_probabilities(tmp_path / "p.npy")[0], np.memmap)
    words = np.array(names)[GIVEN]
    by_csv = audit(probabilities=tmp_path / "p.csv", labels=words)
    by_npy = audit(probabilities=tmp_path / "p.npy", labels=words)
    assert by_csv.classes == by_npy.classes == tuple(names)
    np.testing.assert_array_equal(by_csv.wrong_probability, by_npy.wrong_probability)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"probabilities": LOGITS}, "apply softmax"),
        ({"probabilities": P[:10]}, "10 rows of probabilities for 400 labels"),
        ({"labels": GIVEN + 1}, "classes are 0 to 2"),
        ({"labels": None}, "labels"),
        ({"classes": ["a", "b"]}, "3 columns for 2 classes|not one of"),
        ({"trusted": ([N], [0])}, "row 400 is out of range; row numbers go from 0 to 399"),
        ({"trusted": ([1, 1], [0, 0])}, "occurs twice"),
        ({"run": "runs/x"}, "with probabilities"),
        ({"threshold": 1.5}, "threshold"),
    ],
)
def test_errors(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        audit(**{"probabilities": P, "labels": GIVEN} | changed)


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    np.save(tmp_path / "p.npy", P.astype(np.float16))
    words = np.array(["cat", "dog", "eel"])
    (tmp_path / "x.csv").write_text("a,label\n" + "".join(f"{i % 7},{words[y]}\n" for i, y in enumerate(GIVEN)))
    (tmp_path / "trusted.csv").write_text("row,true_label\n" + "".join(f"{r},{words[TRUE[r]]}\n" for r in ROWS))
    flags = ["--probabilities", f"{tmp_path}/p.npy", "--out", f"{tmp_path}/out"]
    assert main(["audit", *flags, "--data", f"{tmp_path}/x.csv", "--trusted", f"{tmp_path}/trusted.csv"]) == 0
    assert "400 labels" in capsys.readouterr().out
    lines = (tmp_path / "out" / "audit.csv").read_text().splitlines()
    assert len(lines) == N + 1
    assert lines[0].startswith("row,given_label,suggested_label,wrong_probability")
    assert json.loads((tmp_path / "out" / "audit.json").read_text())["learned"]
    assert main(["audit", "--probabilities", f"{tmp_path}/p.npy"]) == 2
    assert "needs the given labels" in capsys.readouterr().err
    assert main(["audit", *flags, "--labels", "y.npy", "runs/x"]) == 2
    assert main(["audit", "runs/x", "--labels", "y.npy"]) == 2
