"""The page of a run: from synthetic values, from real runs, and in a browser."""

import base64
import csv
import io
import json
import re
import shutil
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from test_report import NASTY, Page, epochs_of, make, spec_of
from test_review_browser import (
    LAPTOP,
    PHONE,
    Browser,
    browser as browser,  # a fixture
)

from warpi.audit.decisions import Choice, Store
from warpi.audit.rates import Rate
from warpi.audit.result import Audit, CheckedPairs, read_audit
from warpi.cli.app import main
from warpi.data.duplicates.result import Duplicates
from warpi.errors import UserError
from warpi.report import svg_charts as charts
from warpi.report.answer import draw_progress
from warpi.report.experiments import find_runs, summarize
from warpi.report.page import to_html
from warpi.report.page_data import (
    SUSPECTS,
    Detail,
    Review,
    ShownCopy,
    Suspect,
    choose_examples,
    read_details,
    show_suspect,
)
from warpi.report.plot_style import COLORS
from warpi.report.plots import Curve
from warpi.review.open import open_run
from warpi.review.progress import Progress
from warpi.runs.reopen import reopen
from warpi.runs.run import fit


@pytest.fixture(scope="module")
def digits_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("page") / "digits"
    fit(out=out, data="digits", noise="pair:0.4", meta=50, limit=400, epochs=4, seed=0, quiet=True, device="cpu")
    return out


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A table with a number and a category, without known truth; half of it is checked."""
    folder, rng = tmp_path_factory.mktemp("table"), np.random.default_rng(0)
    with (folder / "mine.csv").open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["size", "colour", "label", "verified"])
        for i in range(120):
            red = i % 2
            label = ("apple", "<pear>")[red if rng.random() < 0.8 or i % 4 < 2 else 1 - red]
            rows.writerow([round(red + rng.normal() / 4, 3), ("green", "red")[red], label, int(i % 4 < 2)])
    data = str(folder / "mine.csv")
    fit(out=folder / "run", data=data, test=0.25, epochs=3, seed=0, quiet=True, device="cpu")
    return folder


PIXELS = "data:image/png;base64," + base64.b64encode(b"\x89PNG").decode()


def a_detail(run: Path, word: str = NASTY) -> Detail:
    """Everything that a page can show, with a word that must be escaped."""
    test = np.array([[8, 2], [1, 9]])
    suspects = (
        Suspect(3, word, word, word, 0.9999, "", ((word, word), ("text", "x" * 1000)), False),
        Suspect(4, None, "a", "b", 0.42, PIXELS, (("file", word),), True),
        Suspect(5, None, "a", "b", 0.4, "", (("file", "broken.jpg"),), False),
    )
    losses = np.stack([np.r_[5, np.zeros(49)], np.r_[np.zeros(10), 3, np.zeros(39)], np.zeros(50)])
    arrays = {"classes": np.array([word, "b"]), "n_kind": np.array([5, 3, 0])}
    arrays |= {"confusion_test": test, "confusion_train": test.T}
    for name in ("raw", "rectified"):
        arrays |= {f"loss_{name}": losses, f"loss_{name}_mean": np.array([0.1, 2.0, np.nan])}
    return Detail(run, arrays, an_audit((word, "b"), [0.1, 0.2], word), suspects, (word,), a_review())


def a_review() -> Review:
    """Three decisions about 100 rows, and one accepted suggestion."""
    shares = np.array([0.6, 0.7, 0.75, 0.8])
    progress = Progress(100, shares, shares + 0.1, next_gain=3.0, n_random=2, n_new=3)
    counts = {"kept": 1, "changed": 2, "skipped": 0, "unsure": 0, "accepted": 1, "dropped": 0}
    return Review(counts, progress, Rate(100, 40.0, None, None, 2), Rate(100, 20.0, 15.0, 28.0, 25))


def an_audit(classes: Sequence[str], rates: Sequence[float], word: str, accuracy: float = 0.5) -> Audit:
    """An audit with one row per class. The label of the first one is suspicious."""
    K = len(classes)
    ones, numbers = np.ones(K), np.arange(K)
    about = [
        {"class": name, "n": 10, "rate": r, "low": 0.0, "high": 1.0} for name, r in zip(classes, rates, strict=True)
    ]
    facts = {"noise_rate": {"n": K, "rate": 0.15, "low": 0.1, "high": 0.2}, "trusted_accuracy": accuracy}
    facts |= {"probabilities": word, "uncertainty": word}
    issue = numbers == 0
    labels = (numbers, numbers, np.zeros(K, int))
    return Audit(*labels, ones, 1 - ones, issue, ones, np.eye(K), np.eye(K), tuple(classes), tuple(about), facts)


# -- the page from plain values --------------------------------------------------------------------------------------


def test_all_text_is_escaped_and_nothing_is_loaded(tmp_path: Path) -> None:
    run = make(
        tmp_path / "a", epochs_of([80.0, 85.0], meta_loss=[1.0, 0.5]), spec_of(changed={"opt": NASTY}), n_test=20
    )
    runs = find_runs([run])
    text = to_html(summarize(runs), runs, [a_detail(run)])
    page = Page(text)
    assert not {"script", "link", "iframe", "object"} & set(page.seen)
    assert page.loads == [PIXELS]
    assert "url(" not in text
    assert page.words.count(NASTY) >= 9  # labels, cells, class, suggestion, missing parts, ...
    assert "x" * 401 not in page.words
    assert "> 99.9 %" in page.words
    for part in (
        "The audit is unreliable: its model is right for only 50 % of the trusted rows.",
        "People looked at 3 rows, 2 of them drawn at random: 1 label kept, 2 changed, none unsure.",
        "about 40 of 100 (40 %)",
        "about 20 of 100 (20 %), 90 % interval 15 to 28",
        "Rows are counted from 0.",
        "The curves are not a history: every point uses the present model.",
        "Losses",
        "rectified loss: mean 0.10 (right), mean 2.00 (wrong)",
        "Accuracy by class, worst first",
        "cannot be read",
    ):
        assert part in page.words


def test_copies_are_counted_and_shown_side_by_side(tmp_path: Path) -> None:
    run = make(tmp_path / "a", epochs_of([80.0]))
    found = Duplicates(
        part=("train", "train", "test", "trusted"),
        row=np.array([0, 1, 0, 0]),
        label=(NASTY, "b", "b", "b"),
        path=None,
        group=np.array([0, 0, 0, -1]),
        similarity=np.array([1.0, 1.0, 0.95, 0.0]),
        outlier_score=np.zeros(4),
        problem=("",) * 4,
        of_data=np.array([True, True, False, False]),
        skipped="50,000 rows are too many",
    )
    odd = replace(found, group=np.full(4, -1), outlier_score=np.array([9.0, 0, 0, 0]), problem=("", "blank", "", "?"))
    group = (
        ShownCopy("train", 0, NASTY, PIXELS, (("file", NASTY),), True),
        ShownCopy("test", 0, "b", "", (("width", "3.2"),), False),
    )
    detail = a_detail(run, "plain")
    assert detail.audit is not None
    without = replace(detail, suspects=(), arrays={})
    runs = find_runs([run])
    assert "Copies" not in Page(to_html(summarize(runs), runs, [without])).words
    shown = replace(without, audit=replace(detail.audit, copies=found), copies=(group,))
    page = Page(to_html(summarize(runs), runs, [shown]))
    assert page.loads == [PIXELS]
    for part in (
        "3 of 4 rows have a copy: 2 an exact one, 1 a near one. They form 1 group.",
        "In 1 of the groups the labels contradict each other, so some of them must be wrong.",
        "1 of 1 test rows have a copy among the training rows, so the accuracy on test rows may be too high.",
        "Near copies were not searched for: 50,000 rows are too many.",
        "warpi review RUN",
        NASTY,
        "training, row 0",
        "test, row 0",
        "3.2",
    ):
        assert part in page.words, part
    assert "Outliers" not in page.words
    page = Page(to_html(summarize(runs), runs, [replace(without, audit=replace(detail.audit, copies=odd))]))
    assert "Copies" not in page.words
    for part in ("1 outlier.", "1 blank image.", "Cannot be read: 1 image.", "press F", "warpi audit RUN --csv FILE"):
        assert part in page.words, part


def test_template_syntax_in_labels_is_plain_text(tmp_path: Path) -> None:
    run = make(tmp_path / "a", epochs_of([80.0]), spec_of(changed={"opt": "{{ title }} {% raw %}"}))
    runs = find_runs([run])
    assert "{{ title }} {% raw %}" in Page(to_html(summarize(runs), runs)).words


@pytest.mark.parametrize(("accuracy", "n"), [(95.0, 400), (100.0, 50), (10.0, 20)])
def test_intervals_are_wilson_intervals(tmp_path: Path, accuracy: float, n: int) -> None:
    """The ends p of the interval solve (share - p)^2 = z^2 p (1 - p) / n."""
    runs = find_runs([make(tmp_path / "a", epochs_of([accuracy]), n_test=n)])
    words = Page(to_html(summarize(runs), runs)).words
    match = re.search(r"90 % interval (\d+\.\d) to (\d+\.\d)", words)
    assert match
    for end in map(float, match.groups()):
        gap = lambda p: (accuracy / 100 - p) ** 2 - 1.644854**2 * p * (1 - p) / n
        below, above = max(0.0, end / 100 - 0.0005), min(1.0, end / 100 + 0.0005)
        assert gap(below) * gap(above) <= 1e-12, (end, gap(below), gap(above))


def test_worst_classes_come_first(tmp_path: Path) -> None:
    runs = find_runs([make(tmp_path / "a", epochs_of([85.0]), n_test=30)])
    losses = {"n_kind": np.array([1, 0, 0]), "loss_raw": np.ones((3, 50)), "loss_raw_mean": np.ones(3)}
    confusion = np.array([[10, 0, 0], [3, 6, 1], [0, 2, 8]])
    arrays = {"classes": np.array(["x", "y", "z"]), "confusion_test": confusion, **losses}
    text = to_html(summarize(runs), runs, [Detail(runs[0].path, arrays)])
    rows = re.findall(r"<tr>(.*?)</tr>", text.split("Accuracy by class, worst first")[1].split("</table>")[0])[1:]
    cells = [re.findall(r"<td[^>]*>(.*?)</td>", row) for row in rows]
    assert [(c[0], c[1], c[2], c[4]) for c in cells] == [
        ("y", "10", "60.0 %", "x (3)"),
        ("z", "10", "80.0 %", "y (2)"),
        ("x", "10", "100.0 %", "–"),
    ]


def test_classes_are_sorted_by_error_rate_if_there_are_many(tmp_path: Path) -> None:
    runs = find_runs([make(tmp_path / "a", epochs_of([85.0]), n_test=30)])
    audit = an_audit([f"k{k:02}" for k in range(50)], [k / 100 for k in range(50)], "word")
    text = to_html(summarize(runs), runs, [Detail(runs[0].path, audit=audit)]).split("By given label")[1]
    suggestion = "k00"  # of the only suspicious label, after its class
    assert re.findall(r"k\d\d", text) == [*(f"k{k:02}" for k in reversed(range(50))), suggestion]
    assert re.findall(r"k\d\d", text.split("<details>")[0])[-1] == "k40"
    assert "40 more" in text


def test_seeds_are_averaged_and_each_has_its_command(tmp_path: Path) -> None:
    for seed, last in enumerate((90.0, 93.0, 87.0)):
        make(tmp_path / str(seed), epochs_of([80.0, last]), spec_of(seed=seed), n_test=100, noise_sha256=f"{seed}abc")
    runs = find_runs([tmp_path])
    words = Page(to_html(summarize(runs), runs)).words
    assert "90.00 ± 3.00" in words  # sqrt((0 + 9 + 9) / 2)
    assert "mean ± sd of 3" in words
    for seed in range(3):
        assert f"--seed {seed} " in words
        assert f"noise {seed}abc" in words


def test_many_experiments_are_compared_and_each_can_be_opened(tmp_path: Path) -> None:
    make(tmp_path / "a", epochs_of([80.0, 85.0]), n_test=100)
    make(tmp_path / "b", epochs_of([70.0, 95.0]), spec_of("gce"), n_test=100)
    make(tmp_path / "c", epochs_of([70.0]), spec_of("new", noise="uniform:0.1"), done=False)
    make(tmp_path / "d", [], spec_of("begun", noise="uniform:0.1"), done=False)
    runs = find_runs([tmp_path])
    details = read_details(runs)
    assert [d.run.name for d in details] == ["a", "b", "d", "c"]
    assert "no checkpoint.safetensors" in details[0].missing[0]
    assert "has not finished" in details[2].missing[0]
    page = Page(to_html(summarize(runs), runs, details))
    assert page.seen.count("details") >= 4
    assert "digits, noise uniform:0.1, mlp" in page.words
    assert "No epoch has finished yet." in page.words
    assert "has not finished" in page.words


def test_examples_are_spread_over_the_pairs_of_classes() -> None:
    """Of 30 suspicious labels, 20 belong to one pair; each pair gets its turn before a second one is shown."""
    n = 40
    given = np.r_[np.zeros(20, int), np.ones(6, int), np.full(4, 2), np.zeros(10, int)]
    suggested = np.r_[np.ones(20, int), np.full(6, 2), np.zeros(4, int), np.zeros(10, int)]
    wrong = np.r_[np.linspace(0.99, 0.6, 30), np.linspace(0.4, 0.1, 10)]
    issue = wrong > 0.5
    audit = Audit(
        np.arange(n),
        given,
        suggested,
        wrong,
        1 - wrong,
        issue,
        wrong,
        np.ones((n, 3)) / 3,
        np.eye(3),
        ("a", "b", "c"),
        (),
        {},
    )
    chosen = choose_examples(audit, 9)
    assert chosen == [0, 20, 26, 1, 21, 27, 2, 22, 28]
    assert sorted(choose_examples(audit, 35)) == list(range(30))  # the others are not suspicious
    one = np.ones(1)
    pairs = CheckedPairs(np.ones((1, 3)) / 3, given[:1], suggested[:1], one > 0, one, np.array([0]))
    assert choose_examples(replace(audit, pairs=pairs), 3) == [1, 20, 26]  # a person has checked the first one


def test_the_answer_comes_first_and_does_not_contradict_itself(tmp_path: Path) -> None:
    runs = find_runs([make(tmp_path / "a", epochs_of([85.0]), n_test=30)])
    audit = replace(an_audit(("cat", "dog"), [0.2, 0.3], "word", accuracy=0.9), suggested=np.array([1, 1]))
    words = Page(to_html(summarize(runs), runs, [Detail(runs[0].path, audit=audit)])).words
    order = [
        "0 of 2",
        "suspicious labels",
        "What to do next:",
        "Where the wrong labels are",
        "How this was made",
        "Repeat the run",
    ]
    places = [words.index(text) for text in order]
    assert places == sorted(places)
    assert "1 labeled “cat” look like “dog”" in words
    none = replace(audit, is_label_issue=np.zeros(2, bool))
    words = Page(to_html(summarize(runs), runs, [Detail(runs[0].path, audit=none)])).words
    assert "No label is more likely wrong than right, so the audit can only estimate how many are wrong" in words
    assert "warpi pick 40" in words
    checked = {"n": 2, "rate": 0.15, "low": 0.1, "high": 0.2, "checked": 50, "level": 0.9}
    backed = replace(audit, facts={**audit.facts, "noise_rate": checked})
    review = a_review()._replace(before=Rate(4, 0.6, 0.4, 0.8, 50))  # with trusted rows, as in the part about it
    words = Page(to_html(summarize(runs), runs, [Detail(runs[0].path, audit=backed, review=review)])).words
    assert "1 of 4" in words
    assert "90 % interval 10 to 20 %, from the predictions for all rows, corrected by 50 checked rows" in words
    assert words.count("A 90 % interval contains the true value in about 9 of 10 cases.") == 1
    assert "Checking 18 more randomly drawn rows" in words


def test_the_page_says_what_the_correction_changes_and_what_it_is_based_on(tmp_path: Path) -> None:
    runs = find_runs([make(tmp_path / "a", epochs_of([85.0]), n_test=30)])
    audit = replace(an_audit(("cat", "dog"), [0.9, 0.02], "word", accuracy=0.9), is_label_issue=np.ones(2, bool))
    rates = tuple({**rate, "low": low} for rate, low in zip(audit.error_rates, (0.51, 0.0), strict=True))
    ones = np.ones(60)
    at = np.r_[np.full(40, -1), np.arange(20)]
    pairs = CheckedPairs(np.ones((60, 2)) / 2, ones.astype(int), ones.astype(int), np.arange(60) < 50, ones, at)
    rate = {"n": 2, "rate": 0.4, "low": 0.3, "high": 0.5, "checked": 50, "level": 0.9}
    audit = replace(audit, facts={**audit.facts, "noise_rate": rate}, error_rates=rates, pairs=pairs)
    old = a_review()
    review = old._replace(progress=replace(old.progress, has_interval=True), before=Rate(100, 40.0, 30.0, 50.0, 50))
    counts = {"n_unchecked": 1, "n_found_wrong": 1, "n_by_people": 6, "n_by_audit": 30}
    review = review._replace(**counts, n_trusted=40, n_trusted_wrong=5)
    words = Page(to_html(summarize(runs), runs, [Detail(runs[0].path, audit=audit, review=review)])).words
    for part in (
        "corrected by 40 trusted rows and 10 rows checked at random",
        "suspicious labels: 1 found wrong by people, 1 unchecked",
        "Probably wrong, and another class fits better",
        "Most labels “cat” are wrong, which may be a systematic mistake: check how this class was labeled.",
        "1. Review 20 more rows, if you have time: warpi review RUN",
        "36 changed labels: 6 that people found wrong (5 of them in trusted rows) and 30 suggestions that nobody has",
        "About 20 wrong labels (90 % interval 15 to 28) remain instead of 40.",
        "The 40 trusted rows are not in this table; 5 of their given labels are wrong.",
        "dog10< 12.0 %",  # 0.2 of 10 labels
    ):
        assert part in words, part
    none = replace(audit, facts={**audit.facts, "threshold": 0.8}, error_rates=rates[1:] + rates[1:])
    review = review._replace(n_by_people=0, n_unchecked=2, n_trusted=0, after=Rate(100, 1.0, None, None, 50))
    words = Page(to_html(summarize(runs), runs, [Detail(runs[0].path, audit=none, review=review)])).words
    assert "Wrong with a probability above 80 %" in words
    assert "suspicious labels, none of them checked yet" in words
    assert "30 changed labels: 30 suggestions that" in words
    assert "About 1 wrong label remains instead of 40." in words
    assert "systematic" not in words
    assert "not in this table" not in words


def test_a_mixture_of_candidates_is_named_and_explained(tmp_path: Path) -> None:
    """The network and its epochs are not shown, because it does not predict; the clean test set comes first."""
    epochs = epochs_of([95.0], trusted_acc=[91.5], trusted_low=[80.0], trusted_high=[97.0])
    run = make(tmp_path / "a", epochs, n_test=200, n_meta=40, n_parameters=0)
    names = {"gold": 0.9, "forest, pruned": 0.1}
    choice = [
        {"candidate": name, "score": 0.9, "error": 0.1, "seconds": 0.01, "weight": w} for name, w in names.items()
    ]
    (run / "choice.json").write_text(json.dumps(choice))
    runs = find_runs([run])
    words = Page(to_html(summarize(runs), runs)).words
    assert words.index("test accuracy") < words.index("model accuracy on 40 trusted rows")
    assert "With about 160 trusted rows in total, this interval would be half as wide" in words
    assert "predictions come from a weighted mixture of the candidates above" in words
    for part in ("trained without suspicious rows", "instead of on the given labels", "< 0.1"):
        assert part in words
    for part in ("Network", "trained on the trusted rows alone", "note"):
        assert part not in words


def test_page_and_figures_have_the_same_colors(tmp_path: Path) -> None:
    runs = find_runs([make(tmp_path / "a", epochs_of([85.0]), n_test=30)])
    text = to_html(summarize(runs), runs)
    for i, color in enumerate(COLORS):
        assert f"--c{i}: {color};" in text


def test_text_and_chart_show_the_same_numbers_of_wrong_labels() -> None:
    """The curve of decisions begins at 40 wrong labels of 100, that of the correction ends at 20."""
    svg = draw_progress(a_review())
    ends = [re.search(r"with(?:out)?: ([\d.]+) %", title) for title in re.findall(r"<title>([^<]*)</title>", svg)]
    assert [float(end[1]) for end in ends if end] == [80.0, 80.0]
    first = [float(d.split(" L")[0].split()[1]) for d in re.findall(r'<path class="line c\d"[^>]* d="M([^"]*)"', svg)]
    scale = {float(text): float(y) - 4 for y, text in re.findall(r'y="([\d.]+)" text-anchor="end">([\d.]+) %<', svg)}
    (low, y_low), *_, (high, y_high) = sorted(scale.items())
    shares = [low + (y - y_low) * (high - low) / (y_high - y_low) for y in first]
    assert shares == pytest.approx([40.0, 60.0], abs=0.5)  # 100 - 30 * 20 / 10, and 100 - 40


def test_errors_that_are_spread_evenly_are_described_so_and_rare_pairs_are_added_up(tmp_path: Path) -> None:
    K = 12
    audit = an_audit([f"c{k}" for k in range(K)], [0.1] * K, "word", accuracy=0.9)
    numbers = np.arange(K)
    even = replace(audit, suggested=(numbers + 1) % K, is_label_issue=np.ones(K, bool))
    runs = find_runs([make(tmp_path / "a", epochs_of([85.0]), n_test=30)])
    review = a_review()._replace(n_unchecked=9, n_actually_wrong=7)
    runs[0].facts["wrong_share"] = 0.5
    words = Page(to_html(summarize(runs), runs, [Detail(runs[0].path, audit=even, review=review)])).words
    assert (
        "The 12 suspicious labels are spread over 12 pairs of given and suggested class; no pair has more than 1."
        in words
    )
    assert "suspicious labels: 3 found right, 9 unchecked" in words
    assert "Of 12 suspicious labels, 7 are actually wrong." in words
    assert "other pairs (2)" in words
    three = replace(even, given=numbers % 3)
    words = Page(to_html(summarize(runs), runs, [Detail(runs[0].path, audit=three, review=review)])).words
    assert "4 are labeled “c0”, 4 are labeled “c1”, 4 are labeled “c2”." in words


# -- charts ----------------------------------------------------------------------------------------------------------


def points(svg: str, kind: str) -> list[tuple[float, float]]:
    (path,) = re.findall(rf'<path class="{kind} c\d"[^>]* d="M([^"Z]*)Z?"', svg)
    return [(float(x), float(y)) for x, y in (pair.split() for pair in path.split(" L"))]


def test_a_line_runs_through_its_values() -> None:
    series = [charts.Series("a", Curve([1, 2, 5], [10.0, 30.0, 20.0], [0.0, 5.0, 0.0]), 0)]
    svg = charts.lines("accuracy", series, "%")
    (x1, y1), (x2, y2), (x5, y5) = points(svg, "line")
    assert x2 - x1 == pytest.approx((x5 - x1) / 4, abs=0.1)
    assert y5 == pytest.approx((y1 + y2) / 2, abs=0.1)
    assert y2 < y5 < y1  # the y axis points down
    band = points(svg, "band")
    assert band[1][1] < y2 < band[-2][1]
    assert "20%" in svg


def test_a_wide_range_gives_a_logarithmic_axis_and_one_epoch_gives_a_dot() -> None:
    svg = charts.lines("loss", [charts.Series("a", Curve([1, 2, 3], [10.0, 1.0, 0.01], [0.0] * 3), 0)])
    (_, a), (_, b), (_, c) = points(svg, "line")
    assert c - b == pytest.approx(2 * (b - a), abs=0.2)
    svg = charts.lines("loss", [charts.Series("a", Curve([1], [1.0], [0.0]), 8)])
    assert 'class="dot' in svg
    assert "stroke-dasharray" in svg


def test_a_matrix_of_many_classes_stays_small() -> None:
    K = 100
    counts = np.random.default_rng(0).poisson(0.3, (K, K)) + 60 * np.eye(K, dtype=int)
    svg = charts.matrix("confusion", counts, [f"class {k}" for k in range(K)], "true", "predicted")
    assert len(svg) < 120_000
    cells = sum(path.count("z") for path in re.findall(r'class="(?:hit|miss)"[^>]* d="([^"]*)"', svg))
    assert cells == np.count_nonzero(counts)
    assert "class 7" not in svg  # too many names


# -- real runs -------------------------------------------------------------------------------------------------------


def test_details_of_a_run_agree_with_its_results_and_its_audit(digits_run: Path, tmp_path: Path) -> None:
    runs = find_runs([digits_run])
    (before,) = read_details(runs)
    assert before.audit is None
    assert "--audit" in before.missing[0]
    (detail,) = read_details(runs, audit=True)
    facts, last = runs[0].facts, runs[0].epochs[-1]
    assert detail.missing == ()
    confusion, train = detail.arrays["confusion_test"], detail.arrays["confusion_train"]
    assert (confusion.sum(), train.sum()) == (facts["n_test"], facts["n_train"])
    test = reopen(digits_run).truth.test
    assert test is not None
    assert confusion.sum(1).tolist() == np.bincount(test.y.numpy(), minlength=10).tolist()  # rows are true classes
    assert 100 * confusion.trace() / confusion.sum() == pytest.approx(last["test_acc"], abs=1e-3)
    assert detail.arrays["loss_raw"].sum() == detail.arrays["loss_rectified"].sum() == facts["n_train"]
    stored = read_audit(digits_run)
    assert detail.audit is not None
    assert len(detail.audit) == len(stored)
    assert train.sum(1).tolist() == np.bincount(stored.given, minlength=10).tolist()
    assert [s.row for s in detail.suspects] == stored.row[choose_examples(stored)].tolist()
    assert detail.review is not None
    assert detail.review.progress.n_decided == 0
    for s in detail.suspects:
        assert s.image.startswith("data:image/png;base64,")
    changed = corrected_by(digits_run, tmp_path)
    review = detail.review
    assert (review.n_by_people, review.n_by_audit) == (changed.count("person"), changed.count("audit"))
    assert review.n_by_people == review.n_trusted_wrong  # nobody has decided anything
    assert review.n_trusted == review.before.n - len(stored)


def corrected_by(run: Path, folder: Path) -> list[str]:
    """Who changed the label of each row, in the file that `warpi correct` writes."""
    assert main(["correct", str(run), "--out", str(folder / "corrected.csv")]) == 0
    with (folder / "corrected.csv").open(newline="") as file:
        return [line["changed_by"] for line in csv.DictReader(file)]


def test_labels_that_people_have_checked_are_counted_apart(table: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(table / "run", run)
    opened = open_run(run, device="cpu")
    items, audit = opened.items, opened.audit
    kept, changed = audit.row[audit.ranked[:2]].tolist()
    labels = {kept: int(items.given[kept]), changed: 1 - int(items.given[changed])}
    choices = [Choice(row, 0, "change", items.classes[k], "", None) for row, k in labels.items()]
    with closing(Store(run / "review" / "decisions.sqlite", items.identity)) as store:
        store.decide(choices, "tab", "step")
    (detail,) = read_details(find_runs([run]), audit=True)
    review = detail.review
    assert review is not None
    assert detail.audit is not None
    assert review.n_unchecked == int(detail.audit.is_label_issue.sum()) - 1  # the audit has learned that one is right
    assert review.n_found_wrong == 1
    by = corrected_by(run, tmp_path)
    assert (by.count("person"), by.count("audit")) == (review.n_by_people, review.n_by_audit)
    assert review.n_by_people == 1 + review.n_trusted_wrong


def test_a_read_only_run_is_audited_and_shown(
    digits_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """An audit that cannot be stored in the run folder must not end the command."""
    run = tmp_path / "run"
    shutil.copytree(digits_run, run, ignore=shutil.ignore_patterns("audit.npz", "figures.npz"))

    def refuse(path: Path, _: bytes) -> None:
        raise UserError(f"cannot write {path}: Permission denied; the previous file is unchanged")

    monkeypatch.setattr("warpi.audit.result.write_atomically", refuse)  # chmod does not stop root
    (detail,) = read_details(find_runs([run]), audit=True)
    assert (detail.missing, detail.audit is None, "confusion_test" in detail.arrays) == ((), False, True)
    assert "losses and confusion are not stored in the run: cannot write" in capsys.readouterr().err
    assert main(["audit", str(run), "--folds", "2", "--json", str(tmp_path / "audit.json")]) == 0
    printed = capsys.readouterr()
    assert "probably wrong; noise rate" in printed.out
    assert "cannot store the audit in the run folder: cannot write" in printed.err
    assert main(["pick", "20", str(run), "--csv", str(tmp_path / "check.csv")]) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["audit.json", "check.csv", "run"]
    assert not (run / "audit.npz").exists()


def test_the_command_writes_the_same_page_again(digits_run: Path, tmp_path: Path) -> None:
    assert main(["report", str(digits_run), "--out", str(tmp_path / "a"), "--audit"]) == 0
    assert main(["report", str(digits_run), "--out", str(tmp_path / "b")]) == 0  # the audit is stored now
    text = (tmp_path / "a" / "report.html").read_text()
    assert (tmp_path / "b" / "report.html").read_text() == text
    page = Page(text)
    assert page.seen.count("img") == SUSPECTS
    assert all(load.startswith("data:image/png;base64,") for load in page.loads)
    facts = json.loads((digits_run / "spec.json").read_text())["facts"]
    for part in (facts["inputs_sha256"], facts["noise_sha256"], "--noise pair:0.4", "Confusion"):
        assert part in page.words


def test_rows_of_a_table_are_shown_as_text(table: Path, tmp_path: Path) -> None:
    (detail,) = read_details(find_runs([table / "run"]), audit=True)
    assert detail.audit is not None
    assert detail.audit.facts["trusted_accuracy"] is not None
    first = dict(detail.suspects[0].words)
    assert set(first) == {"size", "colour"}
    assert first["colour"] in ("red", "green")
    assert not any(s.image for s in detail.suspects)
    assert main(["report", str(table / "run"), "--out", str(tmp_path)]) == 0
    words = Page((tmp_path / "report.html").read_text()).words
    assert "<pear>" in words
    assert "against noisy labels" in words


def test_missing_parts_are_named_and_are_an_error_if_requested(
    table: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    run.mkdir()
    for name in ("spec.json", "results.jsonl", "done", "checkpoint.safetensors"):
        (run / name).write_bytes((table / "run" / name).read_bytes())
    content = (run / "spec.json").read_text().replace(str(table), str(tmp_path))  # a folder without the table
    (run / "spec.json").write_text(content)
    assert main(["report", str(run), "--out", str(tmp_path / "page")]) == 0
    assert "losses and confusion are not on the page: there is no file or folder" in capsys.readouterr().err
    assert (
        "Not shown: losses and confusion: there is no file or folder"
        in Page((tmp_path / "page" / "report.html").read_text()).words
    )
    with pytest.raises(UserError, match="no file or folder"):
        read_details(find_runs([run]), audit=True)
    assert main(["report", str(run), "--audit"]) == 2
    assert "--out DIR" in capsys.readouterr().err


def test_photos_become_thumbnails_with_their_names(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    for i in range(40):
        file = tmp_path / "photos" / ("train" if i < 32 else "meta") / ("dark", "light")[i % 2] / f"{i:02}.jpg"
        file.parent.mkdir(parents=True, exist_ok=True)
        pixels = rng.integers(0, 120, (300, 400, 3), dtype=np.uint8) + np.uint8(120 * (i % 2))
        Image.fromarray(pixels).save(file)
    settings = {"data": str(tmp_path / "photos"), "image_size": 8, "net": "mlp", "batch_size": 8, "meta_batch_size": 8}
    fit(out=tmp_path / "run", epochs=1, seed=0, quiet=True, device="cpu", **settings)
    s = show_suspect(open_run(tmp_path / "run", device="cpu").items, 0)
    with Image.open(io.BytesIO(base64.b64decode(s.image.removeprefix("data:image/jpeg;base64,")))) as image:
        assert max(image.size) == 240
    assert not s.small
    assert (tmp_path / "photos" / "train" / dict(s.words)["file"]).exists()


# -- in a browser ----------------------------------------------------------------------------------------------------


def test_the_page_fits_a_laptop_and_a_phone_and_loads_nothing(browser: Browser, tmp_path: Path) -> None:
    run = make(tmp_path / "a", epochs_of([80.0, 85.0]), spec_of(data="x" * 200, changed={"opt": NASTY}), n_test=20)
    runs = find_runs([run])
    (tmp_path / "page.html").write_text(to_html(summarize(runs), runs, [a_detail(run, "y" * 150)]))
    grounds = set()
    for size, scheme in ((LAPTOP, "light"), (PHONE, "dark")):
        wrong: list[str] = []
        page = browser.new_context(viewport=size, color_scheme=scheme).new_page()  # type: ignore[arg-type]
        page.on("console", lambda message: wrong.append(message.text))
        page.on("request", lambda r: None if r.url.startswith(("file:", "data:")) else wrong.append(r.url))
        page.goto((tmp_path / "page.html").as_uri())
        assert wrong == []
        assert page.evaluate("document.documentElement.scrollWidth") <= size["width"]
        assert page.locator("svg.chart").first.bounding_box()["width"] > 250  # type: ignore[index]
        grounds.add(page.evaluate("getComputedStyle(document.body).backgroundColor"))
    assert len(grounds) == 2
