"""The benchmark of `auto`: noise, splits, summary and page."""

import json

import numpy as np
import pandas as pd
import pytest

from benchmarks.never_loses import plan, tables
from benchmarks.never_loses.noise import draw_trusted, instance_noise, make_problem, pair_noise, symmetric_noise
from benchmarks.never_loses.rows import append_row, job_of, read_any, read_rows
from benchmarks.never_loses.summary import cell_results, losses_to_trusted_alone, summarize
from benchmarks.pages import never_loses as page

rng = np.random.default_rng


def test_pair_noise_gives_the_next_class_at_the_rate():
    y = np.arange(6000) % 3
    given = pair_noise(y, 0.3, 3, rng(0))
    assert set((given - y) % 3) == {0, 1}
    assert np.mean(given != y) == pytest.approx(0.3, abs=0.02)


def test_symmetric_noise_reaches_every_other_class_equally():
    y = np.zeros(9000, np.int64)
    shares = np.bincount(symmetric_noise(y, 0.6, 4, rng(0))) / len(y)
    assert shares == pytest.approx([0.4, 0.2, 0.2, 0.2], abs=0.02)


def test_instance_noise_is_most_frequent_at_the_boundary():
    y = np.zeros(8000, np.int64)
    true = np.linspace(0.2, 0.9, len(y))
    p = np.stack([true, 0.1 * (1 - true), 0.9 * (1 - true)], axis=1)
    given = instance_noise(y, 0.4, p, rng(0))
    wrong = given != y
    assert set(given[wrong]) == {2}  # the runner-up
    assert wrong.mean() == pytest.approx(0.4, abs=0.02)
    assert wrong[:800].mean() == pytest.approx(0.76, abs=0.04)
    assert wrong[-800:].mean() == pytest.approx(0.04, abs=0.02)


def test_trusted_rows_are_nested_and_at_most_half_of_a_class():
    y = np.repeat([0, 1, 2], [40, 7, 1])
    few, many = (set(draw_trusted(y, n, rng(0))) for n in (5, 20))
    assert few <= many
    assert np.bincount(y[list(few)]).tolist() == [5, 3, 1]
    assert np.bincount(y[list(many)]).tolist() == [20, 3, 1]


def test_problem_keeps_rows_apart_and_labels_of_trusted_rows():
    x, y = tables.load_table("wine")
    problem = make_problem("wine", "pair", 0.4, 5, 100)
    parts = (problem.x, problem.x_trusted, problem.x_test)
    assert sum(map(len, parts)) == len(x) == len(np.unique(np.vstack(parts), axis=0))
    assert np.bincount(problem.y_trusted).tolist() == [5, 5, 5]
    rows = [int(np.flatnonzero((x == row).all(1))[0]) for row in problem.x_trusted]
    assert (y[rows] == problem.y_trusted).all()
    assert set((problem.given_trusted - problem.y_trusted) % 3) == {0, 1}


def test_encode_handles_missing_cells_and_categories():
    frame = pd.DataFrame({"n": [1.0, None, 3.0], "c": ["a", "b", None], "same": [1, 1, 1], "text": ["1", "2", "4"]})
    x = tables.encode(frame)
    assert x.tolist() == [[1, 0, 1, 0, 0, 1], [2, 1, 0, 1, 0, 2], [3, 0, 0, 0, 1, 4]]


def test_each_pass_is_balanced_and_passes_do_not_overlap():
    names = ["digits", "wine", "breast_cancer"]
    passes = [list(plan.cells_of_pass(number, names)) for number in range(3)]
    cells = [cell for cells in passes for cell in cells]
    assert len(set(cells)) == len(cells)
    per_pass = [cell for cell in passes[0] if cell.table == "digits"]
    assert sorted(cell.per_class for cell in per_pass) == [5, 5, 20, 20, 50, 50]
    assert not any(cell.noise == "symmetric" for cell in cells if cell.table == "breast_cancer")
    assert plan.different_counts("wine") == [5, 20]  # half a class is fewer than 50


def row(seed, auto, forest, logistic, table="wine", score=(90.0, 80.0, 95.0), study="grid"):
    accuracy = dict.fromkeys(plan.BASELINES, 50.0)
    accuracy |= {"forest, trusted rows": forest, "logistic, all rows": logistic}
    result = {"accuracy": auto, "seconds": 1.0, "score": list(score), "noise_rate": [0.35, 0.3, 0.4]}
    cell = {"table": table, "noise": "pair", "rate": 0.4, "per_class": 5, "seed": seed}
    sizes = {"n_noisy": 100, "n_trusted": 15, "n_test": 54, "true_rate": 0.41}
    return {"study": study, **cell, **sizes, "auto": result, "accuracy": accuracy}


ROWS = [row(0, 88.0, 90.0, 80.0), row(1, 90.0, 94.0, 80.0), row(0, 96.0, 70.0, 90.0, "digits")]


def test_regret_and_errors_by_hand():
    wine, digits = cell_results(ROWS)
    assert (wine.best, wine.trusted_alone, digits.best) == (*["forest, trusted rows"] * 2, "logistic, all rows")
    assert wine.regret == pytest.approx(3)
    assert wine.error == pytest.approx(2)  # of the baseline, 90 and 94; the paired difference has 1
    assert not wine.within(1)
    assert wine.within(2)
    assert digits.regret == pytest.approx(-6)


def test_summary_by_hand():
    figures = summarize(cell_results(ROWS))
    assert figures["regret"] == pytest.approx(-1.5)
    assert (figures["within_1"], figures["within_2"]) == (50, 100)
    assert figures["single"] == "logistic, all rows"
    assert figures["above_single"] == pytest.approx((89 + 96) / 2 - 85)
    assert figures["score_error"] == pytest.approx((2 + 0 - 6) / 3)
    assert figures["score_covers"] == pytest.approx(200 / 3)  # 96 is above 95
    assert figures["noise_covers"] == 0
    assert [r["seed"] for r in losses_to_trusted_alone(cell_results(ROWS))] == [1]


def test_rows_survive_a_line_that_was_cut_off(tmp_path):
    file = tmp_path / "rows.jsonl"
    append_row(file, ROWS[0])
    with file.open("a") as stream:
        stream.write('{"study": "gr')
    append_row(file, ROWS[2])
    assert read_rows(file) == [ROWS[0], ROWS[2]]
    assert job_of(ROWS[0]) == ("grid", plan.Cell("wine", "pair", 0.4, 5), 0)


def test_page_lists_every_cell_and_loss(tmp_path):
    target = row(0, 97.5, 0.0, 0.0, study="targets") | {"accuracy": {}}
    page.keep([*ROWS, target], tmp_path / "kept.json")
    about, rows = page.read_kept(tmp_path / "kept.json")
    assert {job_of(row): row["accuracy"] for row in read_any(tmp_path / "kept.json")} == {
        job_of(row): row["accuracy"] or dict.fromkeys(plan.BASELINES) for row in [*ROWS, target]
    }  # the baselines of an earlier run
    assert {json.dumps(r["auto"]) for r in rows} == {json.dumps(r["auto"]) for r in [*ROWS, target]}
    text = page.page(about, rows)
    assert "| wine `pair:0.4` | 15 | 89.0 | 92.0 (forest, trusted rows) | 3.0 | 2.0 |" in text
    assert "| digits `pair:0.4` |" in text
    assert "- wine `pair:0.4`, 15 trusted, seed 1: 90.0, trusted alone 94.0" in text
    assert "≥ 96.5 | 97.5 ± 0.0 |" in text
    assert "scikit-learn" in text
