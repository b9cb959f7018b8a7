"""Mean ranks, Holm-corrected paired tests and the critical-difference plot."""

import base64
import itertools
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats
from test_report import epochs_of, make, shared, spec_of

from warpi.cli.app import main
from warpi.errors import UserError
from warpi.report.experiments import find_runs
from warpi.report.paired_tests import (
    PairTest,
    _groups,
    holm,
    mean_places,
    rank_methods,
    seeds_t_p,
    signed_rank_p,
)

NOISES = ("pair:0.2", "pair:0.4", "uniform:0.4", "uniform:0.6")


def write_runs(folder: Path, accuracies: dict[str, Any]) -> list[Any]:
    """Runs by method: a list of tables, each with the accuracies of seeds 0, 1, ..."""
    for method, tables in accuracies.items():
        for noise, values in zip(NOISES, tables, strict=False):
            for seed, value in enumerate(values):
                spec = spec_of(method, seed, noise=noise)
                make(folder / f"{method}-{noise}-{seed}", epochs_of([value]), spec, **shared(seed))
    return find_runs([folder])


def test_holm_by_a_naive_loop() -> None:
    """A hypothesis is rejected at level a if it and all smaller p-values pass a / (m - place)."""
    rng = np.random.default_rng(0)
    for m in (1, 2, 5, 9):
        p = rng.uniform(0, 0.2, m)
        corrected = holm(p.tolist())
        for level in (0.01, 0.05, 0.1, 0.3):
            rejected = set[int]()
            for place, i in enumerate(np.argsort(p)):
                if p[i] > level / (m - place):
                    break
                rejected.add(int(i))
            assert rejected == {i for i, q in enumerate(corrected) if q <= level}
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])


def test_places_of_equal_values_are_shared() -> None:
    values = [3.0, 1.0, 3.0, 2.0, 3.0]
    assert mean_places(values) == stats.rankdata(values).tolist() == [4, 1, 4, 2, 4]


def test_signed_ranks_agree_with_scipy_and_with_all_signs() -> None:
    rng = np.random.default_rng(1)
    for n in (3, 6, 10):
        differences = rng.normal(0.5, 1, n)
        assert signed_rank_p(differences.tolist()) == pytest.approx(stats.wilcoxon(differences, method="exact").pvalue)
    tied = [1.0, 1.0, -1.0, 2.0, 2.0, 3.0]  # ranks 2, 2, 2, 4.5, 4.5, 6
    ranks = stats.rankdata(np.abs(tied))
    sums = np.array(
        [sum(r for r, s in zip(ranks, signs, strict=True) if s) for signs in itertools.product((0, 1), repeat=6)]
    )
    observed = sum(r for r, d in zip(ranks, tied, strict=True) if d > 0)
    expected = np.mean(np.abs(sums - 10.5) >= abs(observed - 10.5))
    assert signed_rank_p(tied) == pytest.approx(expected)
    assert signed_rank_p([*tied, 0.0]) == signed_rank_p(tied)
    assert signed_rank_p([0.0, 0.0]) == 1.0
    assert signed_rank_p([1.0] * 6) == pytest.approx(2 / 2**6)


def test_t_test_of_one_table_is_the_paired_t_test_and_of_several_a_linear_model() -> None:
    rng = np.random.default_rng(2)
    one = rng.normal(0.3, 1, 5)
    assert seeds_t_p([one.tolist()]) == pytest.approx(stats.ttest_1samp(one, 0).pvalue)
    tables = [rng.normal(m, 1, n) for m, n in ((0.2, 3), (1.0, 2), (-0.1, 4))]
    design = np.zeros((9, 3))
    design[np.arange(9), np.repeat([0, 1, 2], [3, 2, 4])] = 1  # one mean per table, tested by a contrast
    y = np.concatenate(tables)
    beta = np.linalg.lstsq(design, y, rcond=None)[0]
    variance = ((y - design @ beta) ** 2).sum() / 6
    contrast = np.ones(3) / 3
    t = contrast @ beta / np.sqrt(variance * contrast @ np.linalg.inv(design.T @ design) @ contrast)
    assert seeds_t_p([table.tolist() for table in tables]) == pytest.approx(2 * stats.t.sf(abs(t), 6))
    assert seeds_t_p([[1.0, 2.0], [1.0]]) is None
    assert seeds_t_p([[2.0, 2.0, 2.0]]) == 0.0
    assert seeds_t_p([[0.0, 0.0, 0.0]]) == 1.0


def test_p_values_over_seeds_are_uniform_without_a_difference() -> None:
    rng = np.random.default_rng(3)
    p = [seeds_t_p(rng.normal(0, 1, (3, 3)).tolist()) for _ in range(2000)]
    assert np.mean(np.array(p, dtype=float) <= 0.05) == pytest.approx(0.05, abs=0.015)


def test_ranks_and_groups_of_methods(tmp_path: Path) -> None:
    last = {
        "ce": [[60.0, 61.0, 60.5], [70.0, 70.5, 71.0]],
        "gce": [[80.0, 81.0, 80.4], [70.1, 70.4, 71.3]],
        "elr": [[80.2, 80.8, 80.6], [70.2, 70.3, 71.2]],
    }
    ranking = rank_methods(write_runs(tmp_path, last))
    ranks = dict(zip(ranking.methods, ranking.ranks, strict=True))
    expected = dict.fromkeys(last, 0.0)
    for table in range(2):
        for seed in range(3):
            places = stats.rankdata([-last[name][table][seed] for name in last])
            for name, place in zip(last, places, strict=True):
                expected[name] += place / 6
    assert ranks == pytest.approx(expected)
    assert list(ranks.values()) == sorted(ranks.values())
    tests = {frozenset((t.better, t.worse)): t for t in ranking.pairs}
    assert tests[frozenset(("ce", "gce"))].distinguished
    assert not tests[frozenset(("elr", "gce"))].distinguished
    assert ranking.groups == ((0, 1),)
    assert "paired t over seeds" in ranking.note


def test_groups_are_maximal_and_may_overlap() -> None:
    apart = [PairTest("a", "c", 1.0, 3, 0.001, 0.01), PairTest("a", "d", 1.0, 3, 0.001, 0.01)]
    near = [PairTest(*pair, 0.1, 3, None, None) for pair in (("a", "b"), ("b", "c"), ("b", "d"), ("c", "d"))]
    assert _groups("abcd", [*apart, *near]) == ((0, 1), (1, 3))
    assert _groups("ab", [PairTest("a", "b", 1.0, 3, 0.001, 0.001)]) == ()


def test_many_tables_are_tested_by_signed_ranks(tmp_path: Path) -> None:
    for i in range(6):
        for method, value in (("ce", 60.0 + i), ("gce", 61.0 + 2 * i)):
            spec = spec_of(method, 0, noise=f"pair:0.{i}")
            make(tmp_path / f"{method}{i}", epochs_of([value]), spec, **shared(0))
    ranking = rank_methods(find_runs([tmp_path]))
    assert ranking.pairs[0].p == pytest.approx(2 / 2**6)
    assert ranking.ranks == (1.0, 2.0)
    assert "Wilcoxon" in ranking.note


def test_a_pair_with_more_seeds_is_tested_even_if_other_methods_have_one(tmp_path: Path) -> None:
    runs = write_runs(tmp_path, {"ce": [[60.0, 61.0, 62.0]], "gce": [[70.0, 71.5, 72.0]], "mae": [[50.0]]})
    ranking = rank_methods(runs)
    known = [t for t in ranking.pairs if t.p is not None]
    assert [(t.better, t.worse, t.n) for t in known] == [("gce", "ce", 3)]
    assert known[0].corrected == known[0].p
    assert ranking.ranks == (1.0, 2.0, 3.0)
    assert "1 of 3 pairs tested" in ranking.note


@pytest.mark.parametrize(
    ("last", "words"),
    [
        ({"ce": [[60.0, 61.0]], "gce": [[70.0, 71.0]]}, "too few to test 2 methods"),
        ({"ce": [[60.0], [61.0]], "gce": [[70.0], [71.0]]}, "too few to test 2 methods"),
        ({"ce": [[60.0, 61.0]]}, "at least two methods"),
        ({"ce": [[60.0, 61.0], [60.0, 61.0]], "gce": [[70.0, 71.0]]}, "each of the 2 tables"),
        ({"ce": [[None, 61.0]], "gce": [[70.0, 71.0]]}, "no test accuracy"),
    ],
)
def test_too_few_runs_are_refused(tmp_path: Path, last: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        rank_methods(write_runs(tmp_path, last))


def test_methods_without_a_common_seed_are_refused(tmp_path: Path) -> None:
    for seed, method in enumerate(("ce", "gce")):
        make(tmp_path / method, epochs_of([60.0]), spec_of(method, seed), **shared(seed))
    with pytest.raises(UserError, match="share no seed"):
        rank_methods(find_runs([tmp_path]))


def test_the_command_prints_ranks_and_writes_the_plot(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    last = {m: [[60.0 + i, 61.0 + i, 62.0 + 1.5 * i]] for i, m in enumerate(("ce", "gce", "elr", "mae"))}
    write_runs(tmp_path / "runs", last | {"ce": [[10.0, 11.0, 12.0]]})
    out = tmp_path / "out"
    assert main(["report", str(tmp_path / "runs"), "--ranks", "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    assert "mean rank" in printed
    assert "corrected by Holm" in printed
    assert (out / "ranks.png").read_bytes().startswith(b"\x89PNG")
    page = (out / "report.html").read_text()
    source = re.search(r'src="data:image/svg\+xml;base64,([^"]+)"', page)
    assert source is not None
    assert base64.b64decode(source.group(1)) == (out / "ranks.svg").read_bytes()
    assert "<h2>Mean ranks</h2>" in page
    assert "### Mean ranks" in (out / "report.md").read_text()
    stored = json.loads((out / "ranks.json").read_text())
    assert stored["methods"][0] == "mae"
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    assert main(["report", str(tmp_path / "runs"), "--ranks", "--out", str(out)]) == 0
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before
    assert main(["report", str(tmp_path / "runs" / "ce-pair:0.2-0"), "--ranks"]) == 2
