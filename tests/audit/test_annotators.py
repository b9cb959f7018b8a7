"""Several annotators: the model of Dawid and Skene against naive loops and closed forms, tables, intervals, errors."""

import csv
import json
from pathlib import Path

import numpy as np
import pytest

from warpi.audit import combine_annotators
from warpi.audit.annotators.dawid_skene import (
    Labels,
    count_labels,
    estimate_matrices,
    estimate_strength,
    fit_dawid_skene,
    run_em,
)
from warpi.cli.app import main
from warpi.errors import UserError

RNG = np.random.default_rng(0)
N, A, K = 300, 4, 3
TRUE = RNG.integers(0, K, N)
ACCURACY = np.array([0.95, 0.8, 0.7, 0.4])
WIDE = np.where(RNG.random((N, A)) < ACCURACY, TRUE[:, None], (TRUE[:, None] + RNG.integers(1, K, (N, A))) % K)
WIDE[RNG.random((N, A)) < 0.2] = -1


def to_labels(wide: np.ndarray, n_classes: int = K) -> Labels:
    row, by = np.nonzero(wide >= 0)
    return Labels(row, by, wide[row, by], len(wide), wide.shape[1], n_classes)


def naive_em(wide: np.ndarray, q: np.ndarray, strength: float, steps: int) -> tuple[np.ndarray, np.ndarray]:
    """EM by loops over rows, annotators and classes."""
    n, n_annotators = wide.shape
    for _ in range(steps):
        counts = np.zeros((n_annotators, K, K))
        for i in range(n):
            for a in range(n_annotators):
                if wide[i, a] >= 0:
                    counts[a, :, wide[i, a]] += q[i]
        T = np.zeros_like(counts)
        for k in range(K):
            total = counts[:, k].sum() + 1
            for a in range(n_annotators):
                for j in range(K):
                    pooled = (counts[:, k, j].sum() + 1 / K) / total
                    T[a, k, j] = (counts[a, k, j] + strength * pooled) / (counts[a, k].sum() + strength)
        frequency = [(q[:, k].sum() + 1) / (n + K) for k in range(K)]
        new = np.zeros_like(q)
        for i in range(n):
            for k in range(K):
                new[i, k] = frequency[k] * np.prod(
                    [T[a, k, wide[i, a]] for a in range(n_annotators) if wide[i, a] >= 0]
                )
            new[i] /= new[i].sum()
        q = new
    return q, T


@pytest.mark.parametrize("strength", [0.5, 20.0])
def test_em_is_the_naive_loop(strength: float) -> None:
    wide = WIDE[:40]
    labels = to_labels(wide)
    start = labels.votes() + 1 / K
    start /= start.sum(1, keepdims=True)
    q, T, steps = run_em(labels.design(), K, start, None, strength, steps=5, tol=0.0)
    expected_q, expected_T = naive_em(wide, start, strength, 5)
    assert steps == 5
    np.testing.assert_allclose(q, expected_q, rtol=1e-9)
    np.testing.assert_allclose(T, expected_T, rtol=1e-9)


def test_closed_form_with_a_known_prior() -> None:
    """Annotators who are always right about 1,000 rows: one label multiplies the odds by the ratio of their T."""
    wide = np.tile(np.arange(K), 1000)[:1000, None].repeat(2, axis=1)
    wide = np.concatenate([wide, [[0, -1]]])
    p = np.full((len(wide), K), 1 / K)
    model = fit_dawid_skene(to_labels(wide), p, strength=1.0)
    T = model.T[0]
    np.testing.assert_allclose(model.q[-1], T[:, 0] / T[:, 0].sum(), atol=1e-6)
    np.testing.assert_array_equal(model.q[:-1].argmax(1), wide[:-1, 0])


def test_infinite_strength_gives_one_matrix_and_zero_the_own_counts() -> None:
    counts = count_labels(to_labels(WIDE).design(), np.eye(K)[TRUE])
    same = estimate_matrices(counts, 1e12)
    np.testing.assert_allclose(same, same[:1].repeat(A, axis=0), atol=1e-9)
    own = estimate_matrices(counts, 0.0)
    np.testing.assert_allclose(own, counts / counts.sum(2, keepdims=True), atol=1e-6)


def test_strength_of_simulated_annotators() -> None:
    M = np.full((K, K), 0.1) + 0.7 * np.eye(K)
    for strength in (5.0, 50.0):
        T = np.stack([[RNG.dirichlet(strength * row) for row in M] for _ in range(200)])
        counts = np.stack([[RNG.multinomial(100, row) for row in matrix] for matrix in T]).astype(float)
        assert strength / 1.5 < estimate_strength(counts) < 1.5 * strength
    alike = np.stack([[RNG.multinomial(100, row) for row in M] for _ in range(200)]).astype(float)
    assert estimate_strength(alike) > 500


def majority_errors(wide: np.ndarray) -> float:
    votes = to_labels(wide).votes()
    best = votes == votes.max(1, keepdims=True)
    return float((1 - (best / best.sum(1, keepdims=True))[np.arange(len(wide)), TRUE]).sum())


def test_consensus_is_better_than_the_majority_and_ranks_annotators() -> None:
    consensus = combine_annotators(WIDE)
    assert (consensus.label != TRUE).sum() < majority_errors(WIDE) - 5
    accuracy = [annotator["accuracy"] for annotator in consensus.annotators]
    assert np.argsort(accuracy).tolist() == [3, 2, 1, 0]
    p = 0.6 * np.eye(K)[TRUE] + 0.4 / K
    assert (combine_annotators(WIDE, probabilities=p).label != TRUE).sum() < (consensus.label != TRUE).sum()


def test_trusted_rows_are_certain_and_carry_the_intervals() -> None:
    rows = RNG.choice(N, 100, replace=False)
    consensus = combine_annotators(WIDE, trusted=(rows, TRUE[rows]))
    np.testing.assert_array_equal(consensus.label[rows], TRUE[rows])
    for a, annotator in enumerate(consensus.annotators):
        done = WIDE[:, a] >= 0
        accuracy = (WIDE[done, a] == TRUE[done]).mean()
        assert annotator["low"] - 0.03 < accuracy < annotator["high"] + 0.03  # a 90 % interval
        assert annotator["high"] - annotator["low"] < 0.2
        assert annotator["checked"] == done[rows].sum()


def test_annotators_who_share_mistakes_need_trusted_rows() -> None:
    """Two annotators copy each other: without trusted rows both look perfect."""
    one = np.where(RNG.random(N) < 0.7, TRUE, (TRUE + 1) % K)
    wide = np.stack([one, one], 1)
    assert combine_annotators(wide).annotators[0]["accuracy"] > 0.95
    rows = RNG.choice(N, 150, replace=False)
    consensus = combine_annotators(wide, trusted=(rows, TRUE[rows]))
    for quality in (consensus.annotators[0], consensus.quality):
        assert quality["low"] < (one == TRUE).mean() < quality["high"]


def test_rows_to_review() -> None:
    wide = np.concatenate([np.repeat(np.arange(K), 30)[:, None].repeat(3, axis=1), [[0, 1, 2], [-1, -1, -1]]])
    consensus = combine_annotators(wide)
    assert set(consensus.review[:90]) == {""}
    assert consensus.review[90:] == ("annotators disagree", "no label")
    assert consensus.agreement[90] == pytest.approx(1 / 3)


def write_tables(folder: Path) -> tuple[Path, Path]:
    """The same labels as a wide and as a long table."""
    names = np.array(["ant", "bee", "cow", ""])
    wide, long = folder / "wide.csv", folder / "long.csv"
    with wide.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["size", "label_1", "label_2", "label_3", "label_4"])
        writer.writerows([i % 5, *names[WIDE[i]]] for i in range(N))
    with long.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["row", "annotator", "label"])
        cells = [(i, f"label_{a + 1}", names[WIDE[i, a]]) for i in range(N) for a in range(A) if WIDE[i, a] >= 0]
        writer.writerows(cells[j] for j in RNG.permutation(len(cells)))
    return wide, long


def test_wide_and_long_tables_and_arrays_agree(tmp_path: Path) -> None:
    wide, long = (combine_annotators(path) for path in write_tables(tmp_path))
    labeled = np.flatnonzero((WIDE >= 0).any(1))
    np.testing.assert_allclose(combine_annotators(WIDE).posterior, wide.posterior)
    assert wide.classes == long.classes == ("ant", "bee", "cow")
    assert [int(str(key)) for key in long.rows["row"]] == labeled.tolist()
    np.testing.assert_array_equal(long.label, wide.label[labeled])
    by_name = {annotator["annotator"]: annotator for annotator in long.annotators}
    assert by_name["label_4"]["accuracy"] == pytest.approx(wide.annotators[3]["accuracy"], abs=0.01)


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wide, _ = write_tables(tmp_path)
    out = tmp_path / "consensus.csv"
    assert main(["annotators", str(wide), "--out", str(out), "--json", str(tmp_path / "quality.json")]) == 0
    printed = capsys.readouterr().out
    assert "independent mistakes" in printed
    with out.open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == N
    assert list(rows[0]) == ["row", "size", "label", "label_probability", "n_labels", "agreement", "review"]
    assert json.loads((tmp_path / "quality.json").read_text())["annotators"][0]["n"] == (WIDE[:, 0] >= 0).sum()
    assert main(["annotators", str(out), "--out", str(tmp_path / "x.csv"), "--columns", "size"]) == 2
    assert "at least two annotators" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("annotator,label\na,x\nb,y\n", "identifies the rows"),
        ("row,annotator,label\n0,a,x\n0,a,y\n", "two labels for the same row"),
        ("row,annotator,label\n0,a,x\n1,a,x\n", "fewer than two classes"),
    ],
)
def test_tables_that_cannot_be_used(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "table.csv"
    file.write_text(text)
    with pytest.raises(UserError, match=message):
        combine_annotators(file)


@pytest.mark.parametrize("wide", [np.zeros((3, 1), int), np.full((3, 2), -1), np.zeros((0, 3), int)])
def test_arrays_that_cannot_be_used(wide: np.ndarray) -> None:
    with pytest.raises(UserError, match=r"column per annotator|no labels"):
        combine_annotators(wide)


def test_probabilities_of_a_long_table_need_row_numbers(tmp_path: Path) -> None:
    file = tmp_path / "table.csv"
    file.write_text("id,annotator,label\nu,a,x\nu,b,x\nv,a,y\nv,b,y\n")
    with pytest.raises(UserError, match="row numbers"):
        combine_annotators(file, probabilities=np.full((2, 2), 0.5))
    with pytest.raises(UserError, match="one column for each of 2 classes"):
        combine_annotators(file, probabilities=np.full((2, 3), 1 / 3))
