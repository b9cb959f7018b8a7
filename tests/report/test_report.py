"""Reports of synthetic run folders, compared with numbers computed by hand."""

import errno
import io
import json
import os
import re
import shlex
import shutil
import sys
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

import warpi.report.write
from warpi.cli.app import main
from warpi.errors import UserError
from warpi.methods.registry import METHODS
from warpi.nets.registry import NETS
from warpi.report.experiments import Difference, find_runs, group, summarize
from warpi.report.page import to_html
from warpi.report.paired_tests import compare, mean_interval
from warpi.report.plots import average_curve, draw_curves
from warpi.report.table import blocks, to_latex, to_markdown, to_rich, write_json
from warpi.report.write import write_report
from warpi.runs.rerun_command import BUILTIN, command
from warpi.utils.terminal import in_columns

ENVIRONMENT = {"torch": "2.13.0", "python": "3.11.7", "device": "cpu", "gpu": None, "threads": 1}


def spec_of(method: str = "ce", seed: int = 0, **changes: Any) -> dict[str, Any]:
    spec: dict[str, Any] = {
        "data": "digits",
        "root": None,
        "label": None,
        "noise": "pair:0.4",
        "meta": 50,
        "meta_data": None,
        "val": 0.1,
        "test": 0.25,
        "limit": None,
        "method": method,
        "options": {},
        "changed": {},
        "recipe": {"net": "mlp", "weights": None, "epochs": 3, "batch_size": 64, "lr": 0.1, "milestones": [0.5, 0.8]},
        "seed": seed,
    }
    spec["recipe"] |= changes.pop("recipe", {})
    spec["options"] = dict(changes.get("changed", {}))
    return spec | changes


def epochs_of(
    test: list[float | None], val: list[float | None] | None = None, **more: list[float]
) -> list[dict[str, Any]]:
    columns: dict[str, list[Any]] = {"test_acc": test, "val_acc": val or [None] * len(test), **more}
    epochs = []
    for t in range(len(test)):
        values = {name: column[t] for name, column in columns.items() if column[t] is not None}
        epochs.append({"epoch": t + 1, "lr": 0.1, "loss": 1.0 / (t + 1), "seconds": 0.5} | values)
    return epochs


def make(
    folder: Path,
    epochs: list[dict[str, Any]],
    spec: dict[str, Any] | None = None,
    done: bool = True,
    version: str = "0.1.0",
    environment: dict[str, Any] = ENVIRONMENT,
    **facts: Any,
) -> Path:
    folder.mkdir(parents=True)
    facts = {"n_train": 1167, "test_labels": "clean", "needs_meta": False} | facts
    content = {"format": "warpi-run/1", "version": version, "spec": spec or spec_of(), "facts": facts}
    (folder / "spec.json").write_text(json.dumps(content | {"environment": environment}))
    (folder / "results.jsonl").write_text("".join(json.dumps(epoch) + "\n" for epoch in epochs))
    if done:
        (folder / "done").touch()
    return folder


def table(tmp_path: Path) -> list[Any]:
    return summarize(find_runs([tmp_path]))


# -- reading ---------------------------------------------------------------------------------------------------------


def test_find_runs_searches_folders_and_takes_each_once(tmp_path: Path) -> None:
    a = make(tmp_path / "x" / "a", epochs_of([1.0]))
    make(tmp_path / "x" / "deep" / "b", epochs_of([1.0]), spec_of(seed=1), done=False)
    runs = find_runs([a, tmp_path, tmp_path / "x"])
    assert [(run.path.name, run.done, run.version) for run in runs] == [("a", True, "0.1.0"), ("b", False, "0.1.0")]
    assert runs[0].spec["method"] == "ce"
    assert runs[0].facts["n_train"] == 1167
    assert runs[0].environment == ENVIRONMENT
    assert runs[0].epochs[0]["test_acc"] == 1.0


def test_find_runs_names_what_is_missing(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "empty").mkdir()
    for paths, words in (
        ([tmp_path / "no"], "does not exist"),
        ([tmp_path / "file"], "is a file"),
        ([tmp_path / "empty"], "no runs in"),
        ([], "no runs given"),
    ):
        with pytest.raises(UserError, match=words):
            find_runs(paths)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "not JSON"),
        ("[]", "format None"),
        ('{"format": "warpi-run/9"}', "warpi-run/9"),
        ('{"format": "warpi-run/1", "spec": {"data": "d", "method": "m"}}', "'seed' must be a whole number, got None"),
        ('{"format": "warpi-run/1", "spec": 3}', "'spec' must be an object, got 3"),
        ('{"format": "warpi-run/1", "spec": {"data": "d", "method": "m", "seed": 1, "recipe": 3}}', "'recipe'"),
    ],
)
def test_broken_spec_is_named(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "spec.json").write_text(text)
    with pytest.raises(UserError, match=words) as caught:
        find_runs([tmp_path])
    assert str(tmp_path / "spec.json") in str(caught.value)


@pytest.mark.parametrize("name", ["spec.json", "results.jsonl"])
def test_a_file_that_cannot_be_opened_is_named(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make(tmp_path / "x" / "a", epochs_of([10.0]))
    with monkeypatch.context() as patch:
        open_file = Path.open

        def refuse(path: Path, *how: Any, **options: Any) -> Any:  # a test that runs as root may read everything
            if path.name == name:
                raise PermissionError(errno.EACCES, "Permission denied", str(path))
            return open_file(path, *how, **options)

        patch.setattr(Path, "open", refuse)
        with pytest.raises(UserError) as caught:
            find_runs([folder])
        assert str(caught.value).startswith(f"cannot read {folder / name}: Permission denied; ")
    (folder / name).unlink()
    (folder / name).mkdir()
    for path in (folder, tmp_path):
        with pytest.raises(UserError) as caught:
            find_runs([path])
        assert str(caught.value).startswith(f"cannot read {folder / name}: {os.strerror(errno.EISDIR)}; ")


def test_a_folder_that_cannot_be_searched_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path) -> bool:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(Path, "is_dir", refuse)
    with pytest.raises(UserError, match="Permission denied") as caught:
        find_runs([tmp_path / "a"])
    assert str(tmp_path / "a") in str(caught.value)


def test_a_run_that_ends_while_it_is_read_is_not_finished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, read = make(tmp_path / "a", epochs_of([10.0]), done=False), Path.read_bytes

    def end(path: Path) -> bytes:
        content = read(path)
        if path.name == "results.jsonl":
            (folder / "done").touch()
        return content

    monkeypatch.setattr(Path, "read_bytes", end)
    assert [run.done for run in find_runs([folder])] == [False]


def test_cut_off_last_line_is_ignored_and_such_a_run_is_not_finished(tmp_path: Path) -> None:
    folder = make(tmp_path / "a", epochs_of([10.0, 20.0]))
    with (folder / "results.jsonl").open("ab") as file:
        file.write(b'{"epoch": 3, "test_acc": 30.0, "name": "\xc3')  # a crash, in the middle of a letter
    (run,) = find_runs([folder])
    assert [epoch["test_acc"] for epoch in run.epochs] == [10.0, 20.0]
    assert not run.done


@pytest.mark.parametrize(
    ("line_", "words"),
    [
        ('{"epoch": 2, "te', "is not JSON"),
        ('{"loss": 1.0}', "no epoch"),
        ("3", "not a results record"),
        ('{"epoch":2,"loss":"x"}', "'loss'"),
    ],
)
def test_broken_middle_line_is_named(tmp_path: Path, line_: str, words: str) -> None:
    folder = make(tmp_path / "a", [])
    (folder / "results.jsonl").write_text('{"epoch": 1}\n' + line_ + '\n{"epoch": 3}\n')
    with pytest.raises(UserError, match=words) as caught:
        find_runs([folder])
    assert f"{folder / 'results.jsonl'} line 2" in str(caught.value)


def test_if_an_epoch_was_written_twice_the_later_line_counts(tmp_path: Path) -> None:
    folder = make(
        tmp_path / "a", [*epochs_of([10.0, 20.0]), {"epoch": 2, "test_acc": 25.0}, {"epoch": 3, "test_acc": 30.0}]
    )
    assert [epoch["test_acc"] for epoch in find_runs([folder])[0].epochs] == [10.0, 25.0, 30.0]


# -- numbers ---------------------------------------------------------------------------------------------------------


def test_statistics_against_hand_computed_values(tmp_path: Path) -> None:
    make(tmp_path / "a", epochs_of([80.0, 95.0, 90.0], [50.0, 55.0, 60.0]))  # last 90, val 90, best 95
    make(tmp_path / "b", epochs_of([70.0, 96.0, 93.0], [50.0, 65.0, 60.0]), spec_of(seed=1))  # last 93, val 96, best 96
    make(tmp_path / "c", epochs_of([99.0, 80.0, 87.0], [40.0, 30.0, 20.0]), spec_of(seed=2))  # last 87, val 99, best 99
    (row,) = table(tmp_path)
    assert (row.n_seeds, row.seeds, row.n_unfinished, row.epochs, row.finished) == (3, (0, 1, 2), 0, 3, True)
    assert row.last_mean == pytest.approx(90)
    assert row.last_std == pytest.approx(3)  # sqrt((0 + 9 + 9) / 2)
    assert row.val_mean == pytest.approx(95)
    assert row.val_std == pytest.approx(21**0.5)  # (25 + 1 + 16) / 2
    assert row.best_mean == pytest.approx(290 / 3)
    assert row.best_std == pytest.approx((13 / 3) ** 0.5)  # deviations -5/3, -2/3, 7/3: (78 / 9) / 2
    assert (row.last_by_seed, row.val_by_seed, row.best_by_seed) == ((90, 93, 87), (90, 96, 99), (95, 96, 99))
    assert row.seconds_per_epoch == pytest.approx(0.5)
    assert (row.method, row.label, row.data, row.noise, row.net) == ("ce", "ce", "digits", "pair:0.4", "mlp")
    assert (row.test_labels, row.machines) == ("clean", ("cpu (1 thread)",))
    assert row.versions == ("warpi 0.1.0, torch 2.13.0, python 3.11.7",)


def test_the_latest_of_equal_validation_accuracies_counts(tmp_path: Path) -> None:
    make(tmp_path / "a", epochs_of([99.0, 60.0, 70.0, 98.0], [50.0, 60.0, 60.0, 55.0]))
    assert table(tmp_path)[0].val_mean == 70.0


def test_one_seed_has_no_standard_deviation(tmp_path: Path) -> None:
    make(tmp_path / "a", epochs_of([80.0], [50.0]))
    (row,) = table(tmp_path)
    assert (row.last_std, row.val_std, row.best_std) == (None, None, None)
    assert "±" not in to_markdown([row]).splitlines()[5]
    assert "| ce | 1 | **80.00** | 80.00 | 80.00 |" in to_markdown([row])


def test_missing_and_non_finite_fields(tmp_path: Path) -> None:
    make(tmp_path / "no_val", epochs_of([80.0, 85.0]), spec_of("a"))
    make(tmp_path / "no_test", epochs_of([None, None], [50.0, 60.0]), spec_of("b"))
    make(tmp_path / "nan", epochs_of([80.0, float("nan")], [float("nan"), 50.0]), spec_of("c"))
    bare = tmp_path / "bare"
    bare.mkdir()
    spec = {"data": "digits", "method": "d", "seed": 0}
    (bare / "spec.json").write_text(json.dumps({"format": "warpi-run/1", "spec": spec}))  # just begun
    a, b, c, d = sorted(table(tmp_path), key=lambda row: row.method)
    assert (a.last_mean, a.val_mean, a.best_mean) == (85.0, None, 85.0)
    assert (b.last_mean, b.val_mean, b.best_mean, b.n_seeds) == (None, None, None, 1)
    assert (c.last_mean, c.val_mean, c.best_mean) == (None, None, 80.0)
    assert (d.n_seeds, d.n_unfinished, d.epochs, d.last_mean, d.seconds_per_epoch) == (0, 1, 0, None, None)
    assert (d.noise, d.net, d.test_labels, d.machines) == ("none", "none", "unknown", ("unknown machine",))
    assert "| a | 1 | **85.00** | – | 85.00 |" in to_markdown([a, b, c, d])


def test_mean_is_not_taken_over_some_of_the_seeds(tmp_path: Path) -> None:
    make(tmp_path / "a", epochs_of([80.0, 90.0], [50.0, 60.0]))
    make(tmp_path / "b", epochs_of([80.0, 70.0]), spec_of(seed=1))
    (row,) = table(tmp_path)
    assert (row.last_mean, row.val_mean) == (80.0, None)
    assert (row.last_by_seed, row.val_by_seed) == ((90.0, 70.0), (90.0, None))


def test_unfinished_runs_are_left_out_and_counted(tmp_path: Path) -> None:
    make(tmp_path / "a", epochs_of([80.0, 90.0, 91.0]))
    make(tmp_path / "b", epochs_of([10.0]), spec_of(seed=1), done=False)
    make(tmp_path / "c", [], spec_of(seed=2))  # marked as done, but without results
    (row,) = table(tmp_path)
    assert (row.n_seeds, row.seeds, row.n_unfinished, row.last_mean, row.finished) == (1, (0,), 2, 91.0, True)
    text = to_markdown([row])
    assert "| 1 (+ 2 unfinished) |" in text
    assert "2 unfinished runs left out." in text


def test_if_all_runs_are_unfinished_they_are_shown_but_not_bold(tmp_path: Path) -> None:
    make(tmp_path / "a", epochs_of([90.0, 96.0]), done=False)
    make(tmp_path / "b", epochs_of([98.0]), spec_of(seed=1), done=False)
    make(tmp_path / "c", epochs_of([50.0]), spec_of("gce"))
    ce, gce = table(tmp_path)
    assert (ce.n_seeds, ce.n_unfinished, ce.last_mean, ce.epochs, ce.finished) == (2, 2, 97.0, 1, False)
    text = to_markdown([ce, gce])
    assert "| ce | 2 (unfinished) | 97.00 ± 1.41 |" in text
    assert "ce has not finished: epoch 1 of 3." in text
    assert "**50.00**" in text


def test_copies_count_once_even_if_their_times_differ(tmp_path: Path) -> None:
    make(tmp_path / "a", epochs_of([80.0, 90.0]))
    make(tmp_path / "b", [epoch | {"seconds": 9.0} for epoch in epochs_of([80.0, 90.0])])
    make(tmp_path / "c", epochs_of([80.0]), done=False)  # the same run, interrupted elsewhere
    (row,) = table(tmp_path)
    assert (row.n_seeds, row.n_unfinished, row.last_mean) == (1, 0, 90.0)


@pytest.mark.parametrize("other", [[80.0, 91.0], [80.0, 90.0, 95.0]])
def test_same_spec_and_seed_with_other_results_is_an_error(tmp_path: Path, other: list[float | None]) -> None:
    a, b = make(tmp_path / "a", epochs_of([80.0, 90.0])), make(tmp_path / "b", epochs_of(other))
    with pytest.raises(UserError, match="different results") as caught:
        table(tmp_path)
    assert str(a) in str(caught.value)
    assert str(b) in str(caught.value)


# -- groups and labels -----------------------------------------------------------------------------------------------


def test_seed_and_root_do_not_split_a_group(tmp_path: Path) -> None:
    make(tmp_path / "a", epochs_of([80.0]), spec_of(root="/here", recipe={"seed": 0}))
    make(tmp_path / "b", epochs_of([90.0]), spec_of(root="/there", seed=1, recipe={"seed": 1}))
    assert [row.n_seeds for row in table(tmp_path)] == [2]


def test_changed_options_are_in_the_label(tmp_path: Path) -> None:
    make(tmp_path / "a", epochs_of([80.0]), spec_of("warpi"))
    make(tmp_path / "b", epochs_of([90.0]), spec_of("warpi", changed={"samples": 5, "skip": True}))
    assert [row.label for row in table(tmp_path)] == ["warpi", "warpi (samples=5, skip=true)"]


def test_a_matrix_in_a_label_is_short_but_unique(tmp_path: Path) -> None:
    for name, last in (("a", 0.46), ("b", 0.40)):
        changed = {"matrix": [0.46] + 98 * [0.06] + [last]}
        make(tmp_path / name, epochs_of([80.0]), spec_of("forward", changed=changed))
    one, other = (row.label for row in table(tmp_path))
    assert one != other
    assert all(label.startswith("forward (matrix=0.46,0.06,0.06,… ") and len(label) < 50 for label in (one, other))


def test_differing_fields_are_added_only_to_equal_labels(tmp_path: Path) -> None:
    make(tmp_path / "a", epochs_of([80.0]), spec_of("ce"))
    make(tmp_path / "b", epochs_of([90.0]), spec_of("ce", recipe={"lr": 0.02}, limit=100))
    make(tmp_path / "c", epochs_of([70.0]), spec_of("gce", recipe={"lr": 0.02}))
    make(tmp_path / "d", epochs_of([60.0]), spec_of("ce", noise="uniform:0.2"))
    make(tmp_path / "e", epochs_of([60.0]), spec_of("ce", recipe={"net": "conv4"}))
    make(tmp_path / "f", epochs_of([60.0]), spec_of("elr", meta=10, changed={"beta": 0.5}))
    make(tmp_path / "g", epochs_of([60.0]), spec_of("elr", changed={"beta": 0.5}))
    rows = table(tmp_path)
    assert [(row.noise, row.net, row.label) for row in rows] == [
        ("pair:0.4", "conv4", "ce"),
        ("pair:0.4", "mlp", "ce (limit=100, lr=0.02)"),
        ("pair:0.4", "mlp", "ce (limit=none, lr=0.1)"),
        ("pair:0.4", "mlp", "elr (beta=0.5, meta=10)"),
        ("pair:0.4", "mlp", "elr (beta=0.5, meta=50)"),
        ("pair:0.4", "mlp", "gce"),
        ("uniform:0.2", "mlp", "ce"),
    ]


def test_a_name_in_recipe_and_options_gives_unique_labels(tmp_path: Path) -> None:
    for i, (ours, theirs) in enumerate([(0.1, 1.0), (0.2, 1.0), (0.1, 2.0)]):
        make(tmp_path / str(i), epochs_of([80.0]), spec_of(recipe={"lr": ours}) | {"options": {"lr": theirs}})
    assert len({row.label for row in table(tmp_path)}) == 3


def test_a_default_that_changed_between_runs(tmp_path: Path) -> None:
    """Two of three runs had q = 0.7: one as its default, one set explicitly after the default had changed.

    Other differences are shown; without any, the runs are seeds of one experiment.
    """
    for name, q, changed, seed, lr in (
        ("then", 0.7, {}, 0, 0.1),
        ("now", 0.5, {}, 0, 0.1),
        ("explicit", 0.7, {"q": 0.7}, 0, 0.02),
        ("seed", 0.7, {"q": 0.7}, 1, 0.1),
    ):
        spec = spec_of("gce", seed, changed=changed, recipe={"lr": lr}) | {"options": {"q": q}}
        make(tmp_path / name, epochs_of([80.0]), spec)
    assert [(row.label, row.seeds) for row in table(tmp_path)] == [
        ("gce", (0,)),
        ("gce (q=0.7, lr=0.02)", (0,)),
        ("gce (q=0.7, lr=0.1)", (0, 1)),
    ]
    make(tmp_path / "long", epochs_of([80.0]), spec_of("ce", changed={"a": 2 / 3, "b": [1 / 3, 20]}))
    assert table(tmp_path)[0].label == "ce (a=0.666667, b=0.333333,20)"
    shutil.rmtree(tmp_path / "long")
    shutil.rmtree(tmp_path / "seed")
    assert [row.label for row in table(tmp_path)] == ["gce (q=0.5)", "gce (q=0.7, lr=0.02)", "gce (q=0.7, lr=0.1)"]


@pytest.mark.parametrize(
    ("name", "values", "labels"),
    [
        ("inputs_sha256", ("1a2b3c4d5e", "1a2b3c4f5e"), ["ce (inputs 1a2b3c4d)", "ce (inputs 1a2b3c4f)"]),
        ("n_parameters", (650, 1290), ["ce (650 parameters)", "ce (1290 parameters)"]),
        ("n_classes", (10, 3), ["ce (3 classes)", "ce (10 classes)"]),
        ("matrix_file_sha256", ("1a2b3c4d5e", None), ["ce (matrix 1a2b3c4d)", "ce (matrix unknown)"]),
        ("meta_sha256", ("1a2b3c4d5e", "1a2b3c4f5e"), ["ce (trusted 1a2b3c4d)", "ce (trusted 1a2b3c4f)"]),
        ("test_set_sha256", ("1a2b3c4d5e", None), ["ce (test set 1a2b3c4d)", "ce (test set none)"]),
    ],
)
def test_runs_with_other_data_or_nets_of_the_same_name_are_separate_experiments(
    tmp_path: Path, name: str, values: tuple[Any, Any], labels: list[str]
) -> None:
    shared = {"n_classes": 10, "inputs_sha256": "aa", "n_parameters": 650}
    for seed, value in enumerate([values[0], values[0], values[1]]):
        make(tmp_path / str(seed), epochs_of([80.0 + seed]), spec_of(seed=seed), **shared | {name: value})
    rows = table(tmp_path)
    assert [row.label for row in rows] == labels
    assert sorted((row.seeds, row.last_mean) for row in rows) == [((0, 1), 80.5), ((2,), 82.0)]
    assert {g.label for g in group(find_runs([tmp_path]))} == set(labels)


def test_a_run_without_a_hash_of_the_trusted_set_joins_others_that_agree(tmp_path: Path) -> None:
    for seed, facts in enumerate([{"meta_sha256": "aa"}, {"meta_sha256": "aa"}, {}]):
        make(tmp_path / str(seed), epochs_of([80.0]), spec_of(seed=seed), **facts)
    assert [(row.label, row.seeds) for row in table(tmp_path)] == [("ce", (0, 1, 2))]
    make(tmp_path / "3", epochs_of([80.0]), spec_of(seed=3), meta_sha256="bb")
    assert [(row.label, row.seeds) for row in table(tmp_path)] == [
        ("ce (trusted aa)", (0, 1)),
        ("ce (trusted bb)", (3,)),
        ("ce (trusted unknown)", (2,)),
    ]


def test_the_same_seed_with_other_data_is_allowed(tmp_path: Path) -> None:
    make(tmp_path / "a", epochs_of([80.0]), inputs_sha256="aaaaaaaaaa")
    make(tmp_path / "b", epochs_of([90.0]), inputs_sha256="bbbbbbbbbb")
    assert [(row.label, row.last_mean) for row in table(tmp_path)] == [
        ("ce (inputs aaaaaaaa)", 80.0),
        ("ce (inputs bbbbbbbb)", 90.0),
    ]


def test_facts_are_in_the_label_only_if_nothing_else_differs(tmp_path: Path) -> None:
    make(tmp_path / "a", epochs_of([80.0]), inputs_sha256="aaaaaaaaaa", n_parameters=5)
    make(tmp_path / "b", epochs_of([80.0]))  # from a version without these facts
    make(tmp_path / "c", epochs_of([80.0]), spec_of(limit=7), inputs_sha256="cccccccccc", n_parameters=5)
    make(tmp_path / "d", epochs_of([80.0]), spec_of("gce"), inputs_sha256="dddddddddd", n_parameters=5)
    assert [row.label for row in table(tmp_path)] == [
        "ce (limit=7)",
        "ce (limit=none, inputs aaaaaaaa, 5 parameters)",
        "ce (limit=none, inputs unknown, unknown parameters)",
        "gce",
    ]


def test_runs_without_facts_are_grouped(tmp_path: Path) -> None:
    make(tmp_path / "a", epochs_of([80.0]))
    make(tmp_path / "b", epochs_of([90.0]), spec_of(seed=1), inputs_sha256=None)
    assert [(row.label, row.n_seeds) for row in table(tmp_path)] == [("ce", 2)]


# -- tables ----------------------------------------------------------------------------------------------------------


def test_json_has_all_keys_and_is_complete(tmp_path: Path) -> None:
    make(tmp_path / "a", epochs_of([80.0]))
    rows, path = table(tmp_path), tmp_path / "new" / "x.json"
    write_json(rows, path)
    (entry,) = json.loads(path.read_text())
    wanted = {"method": "ce", "data": "digits", "noise": "pair:0.4", "net": "mlp", "n_seeds": 1, "last_mean": 80.0}
    assert entry | wanted == entry
    assert entry["last_std"] is entry["val_mean"] is None
    assert (entry["best_mean"], entry["best_is_oracle"], entry["seeds"]) == (80.0, True, [0])
    assert (entry["last_by_seed"], entry["val_by_seed"], entry["best_by_seed"]) == ([80.0], [None], [80.0])
    assert entry["against"] is None
    assert [p.name for p in path.parent.iterdir()] == ["x.json"]  # no temporary file is left
    for bad in (tmp_path / "new", path / "y.json"):
        with pytest.raises(UserError, match=r"cannot|is a folder"):
            write_json(rows, bad)


def two_sections(tmp_path: Path) -> list[Any]:
    for seed in (0, 1):
        make(tmp_path / f"w{seed}", epochs_of([80.0, 96.0 + seed]), spec_of("warpi", seed), needs_meta=True)
        make(tmp_path / f"z{seed}", epochs_of([80.0, 90.0 + seed]), spec_of("zeta", seed), needs_noise_rate=True)
        make(tmp_path / f"u{seed}", epochs_of([70.0]), spec_of("ce", seed, noise="uniform:0.4"), test_labels="given")
    return table(tmp_path)


def test_a_method_that_can_use_trusted_examples_is_listed_by_whether_it_did(tmp_path: Path) -> None:
    for name, use_trusted, n_meta in (("with", True, 50), ("none", True, 0), ("unused", False, 50)):
        spec = spec_of("warpi_plus") | {"options": {"use_trusted": use_trusted}}
        make(tmp_path / name, epochs_of([90.0]), spec, n_meta=n_meta)
    groups = {name: table(tmp_path / name)[0].needs_meta for name in ("with", "none", "unused")}
    assert groups == {"with": True, "none": False, "unused": False}


def test_markdown_splits_blocks_and_sections(tmp_path: Path) -> None:
    text = to_markdown(two_sections(tmp_path))
    lines = text.splitlines()
    assert lines[:8] == [
        "### digits, noise pair:0.4, mlp",
        "",
        "| method | seeds | last | best on validation | best on test (oracle) |",
        "|:---|---:|---:|---:|---:|",
        "| *without trusted data* |  |  |  |  |",
        "| zeta † | 2 | 90.50 ± 0.71 | – | 90.50 ± 0.71 |",
        "| *with trusted data* |  |  |  |  |",
        "| warpi | 2 | **96.50 ± 0.71** | – | 96.50 ± 0.71 |",
    ]
    assert text.count("###") == 2
    pair, uniform = text.split("### ")[1:]
    assert "Test labels: clean. Machine: cpu (1 thread). Versions: warpi 0.1.0, torch 2.13.0, python 3.11.7." in pair
    assert "†: uses the true noise rate." in pair
    assert "Test labels: given." in uniform
    assert "†" not in uniform
    assert "oracle, because the test set chose it" in text


def test_rows_that_look_equal_are_both_bold(tmp_path: Path) -> None:
    make(tmp_path / "a", epochs_of([90.001]), spec_of("a"))
    make(tmp_path / "b", epochs_of([90.002]), spec_of("b"))
    make(tmp_path / "c", epochs_of([9.5]), spec_of("c"))  # the larger text, the smaller number
    assert to_markdown(table(tmp_path)).count("**90.00**") == 2


def test_rich_shows_the_same_rows(tmp_path: Path) -> None:
    out = io.StringIO()
    Console(file=out, width=120, force_terminal=False).print(to_rich(two_sections(tmp_path)))
    text = out.getvalue()
    for words in ("digits, noise pair:0.4, mlp", "with trusted data", "96.50 ± 0.71", "(oracle)", "Test labels: clean"):
        assert words in text
    assert text.index("zeta †") < text.index("warpi ")


@pytest.mark.parametrize(
    ("method", "unlike", "wanted"),
    [
        ("elr", None, ["elr 4 81.50 ± 1.29 80.00 ± 0.00 81.50 ± 1.29 +1.50 ± 2.05", "(beta=0.5)"]),
        ("elr", 3, ["elr 4 81.50 ± 1.29 80.00 ± 0.00 81.50 ± 1.29 +1.00 ± 2.48", "(beta=0.5) (3 seeds)"]),
        (
            "co_teaching_plus",
            3,
            ["co_teaching_plus (beta=0.5)", "4 81.50 ± 1.29 80.00 ± 0.00 81.50 ± 1.29 +1.00 ± 2.48 (3 seeds)"],
        ),
    ],
)
def test_no_name_is_broken_at_80_columns(tmp_path: Path, method: str, unlike: int | None, wanted: list[str]) -> None:
    """First remarks move below the numbers, then names move above them."""
    for seed in range(4):
        known = shared(seed, noise_sha256="other") if seed == unlike else shared(seed)
        make(tmp_path / f"ce{seed}", epochs_of([80.0, 80.0], [50.0, 40.0]), spec_of("ce", seed), **shared(seed))
        kind = spec_of(method, seed, changed={"beta": 0.5})
        make(tmp_path / f"{method}{seed}", epochs_of([80.0, 80.0 + seed], [50.0, 40.0]), kind, **known)
    out = io.StringIO()
    Console(file=out, width=80).print(to_rich(compare(find_runs([tmp_path]), "ce")))
    lines = [" ".join(line_.split()) for line_ in out.getvalue().splitlines()]
    at = next(i for i, line_ in enumerate(lines) if line_.startswith(method))
    assert lines[at : at + 2] == wanted
    assert max(map(len, out.getvalue().splitlines())) <= 80


def test_in_a_pipe_nothing_is_folded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make(tmp_path / "a", epochs_of([80.0]), spec_of(changed={"word": 100 * "x", "other": "y"}))
    assert main(["report", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any(f"ce (word={100 * 'x'}, other=y)" in line_ and "80.00" in line_ for line_ in lines)
    assert any(warpi.report.table.LEGEND in line_ for line_ in lines)


def test_machines_are_named(tmp_path: Path) -> None:
    gpu = ENVIRONMENT | {"device": "cuda", "gpu": "NVIDIA H200"}
    make(tmp_path / "a", epochs_of([80.0]), environment=gpu)
    make(tmp_path / "b", epochs_of([80.0]), spec_of(seed=1), environment=ENVIRONMENT | {"threads": 2}, version="0.2.0")
    (row,) = table(tmp_path)
    assert row.machines == ("NVIDIA H200", "cpu (2 threads)")
    assert "Machine: NVIDIA H200; cpu (2 threads)." in to_markdown([row])
    assert len(row.versions) == 2


NASTY = "<script>alert('x')</script> & a_b _c_ 50% | $x$ {y} [z] *w* `q` \\n ~ ^ #"


def nasty_runs(tmp_path: Path) -> list[Any]:
    make(tmp_path / "a", epochs_of([80.0, 85.0]), spec_of(changed={"opt": NASTY}))
    return find_runs([tmp_path])


def test_markdown_is_escaped(tmp_path: Path) -> None:
    lines = to_markdown(summarize(nasty_runs(tmp_path))).splitlines()
    row = next(text for text in lines if text.startswith("| ce ("))
    assert "<" not in row
    assert "&lt;script&gt;" in row
    assert r"\| $x$ {y} \[z\] \*w\* \`q\` \\n \~" in row
    assert r"a_b \_c\_" in row
    assert row.replace(r"\|", "").count("|") == 6


def test_latex_is_escaped_and_balanced(tmp_path: Path) -> None:
    text = to_latex(summarize(nasty_runs(tmp_path)))
    assert r"\textless{}script\textgreater{}" in text
    assert (
        r"50\% \textbar{} \$x\$ \{y\} {[}z] {*}w{*} `q` \textbackslash{}n \textasciitilde{} \textasciicircum{} \#"
        in text
    )
    bare = text.replace(r"\{", "").replace(r"\}", "")
    assert bare.count("{") == bare.count("}")


def test_latex_rows(tmp_path: Path) -> None:
    text = to_latex(two_sections(tmp_path))
    assert r"warpi & 2 & \textbf{96.50 $\pm$ 0.71} & -- & 96.50 $\pm$ 0.71 \\" in text
    assert r"zeta $^\dagger$ & 2 &" in text
    assert text.count(r"\begin{tabular}") == text.count(r"\end{tabular}") == 2
    assert text.count(r"\midrule") == 3  # two sections and one
    assert "(oracle)" in text


class Page(HTMLParser):
    """Checks that elements are closed in order, and collects what a browser would load."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[str] = []
        self.loads: list[str] = []
        self.words = ""
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append(tag)
        self.loads += [value or "" for name, value in attrs if name in ("src", "href", "srcset")]
        if tag not in ("meta", "img"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words += data


def test_html_is_escaped_and_self_contained(tmp_path: Path) -> None:
    runs = nasty_runs(tmp_path)
    text = to_html(summarize(runs), runs)
    page = Page(text)
    assert not {"script", "link", "iframe", "object"} & set(page.seen)
    assert page.loads == []
    assert page.seen.count("figure") == 2  # accuracy and loss
    assert "url(" not in text
    assert "@import" not in text
    for part in ("prefers-color-scheme: dark", 'name="viewport"', "Content-Security-Policy"):
        assert part in text
    assert NASTY in page.words
    assert command(runs[0].spec, "again/a", 1) in page.words
    assert str(runs[0].path) in page.words


# -- the command -----------------------------------------------------------------------------------------------------


def test_command_lists_what_was_given() -> None:
    spec = spec_of("warpi", 7, changed={"samples": 5, "flat_start": False, "hot": True}, recipe={"weight_decay": 5e-4})
    assert command(spec) == (
        "warpi fit --data digits --noise pair:0.4 --meta 50 --val 0.1 --test 0.25 --method warpi --net mlp --epochs 3 "
        "--batch-size 64 --lr 0.1 --milestones 0.5,0.8 --weight-decay 0.0005 --seed 7 --samples 5 --no-flat-start --hot"
    )


def test_command_survives_a_shell() -> None:
    words = shlex.split(command(spec_of(root="/my data/$HOME", label="it's", changed={"shift": -1, "name": "--x; rm"})))
    for flag, value in (("--root", "/my data/$HOME"), ("--label", "it's")):
        assert words[words.index(flag) + 1] == value
    assert {"--shift=-1", "--name=--x; rm"} <= set(words)


def test_command_of_a_bare_spec() -> None:
    spec = {"data": "digits", "method": "ce", "seed": 0}
    assert command(spec) == "warpi fit --data digits --method ce --seed 0"
    assert command(spec, "x y") == "warpi fit --data digits --method ce --seed 0 --out 'x y'"


def test_custom_methods_and_nets_get_a_use_flag() -> None:
    assert {"METHODS": METHODS.keys(), "NETS": NETS.keys()} == BUILTIN
    for method, net, use, shown in (
        ("ce", "mlp", "", "mlp"),
        ("mine", "mlp", "--use FILE.py ", "mlp"),
        ("ce", "some.module.Tiny", "--use FILE.py ", "Tiny"),
        ("mine", "notebook.<lambda>", "--use FILE.py ", "mine"),
    ):
        text = command(spec_of(method, recipe={"net": net}))
        assert text.startswith(f"warpi {use}fit ")
        assert f"--method {method} --net {shown} " in text


# -- differences -----------------------------------------------------------------------------------------------------


def test_mean_interval_by_a_naive_loop() -> None:
    values = [1.5, -0.25, 3.0, 0.5]
    mean = variance = 0.0
    for value in values:
        mean += value / 4
    for value in values:
        variance += (value - mean) ** 2 / 3
    assert mean_interval(values) == (pytest.approx(mean), pytest.approx(3.182446305 * (variance / 4) ** 0.5))
    assert mean_interval([2.0, 3.0]) == (2.5, pytest.approx(12.7062047 * 0.5))  # s / sqrt(n) = sqrt(1/2) / sqrt(2)
    assert mean_interval([2.0]) == (2.0, None)
    assert mean_interval([]) == mean_interval([1.0, None]) == (None, None)


def shared(seed: int, **more: Any) -> dict[str, Any]:
    """Facts that runs with the same seed share."""
    return {"inputs_sha256": "aa", "noise_sha256": f"n{seed}", "n_test": 100, "test_sha256": "rows"} | more


def pairs(tmp_path: Path) -> list[Any]:
    """pair:0.4: ce over seeds 0-2, gce over 1-3, elr over 2, mae over 5. uniform:0.4: no ce."""
    last = {"ce": {0: 80.0, 1: 82.0, 2: 81.0}, "gce": {1: 85.0, 2: 86.0, 3: 99.0}, "elr": {2: 80.5}, "mae": {5: 50.0}}
    for method, values in last.items():
        for seed, value in values.items():
            make(tmp_path / f"{method}{seed}", epochs_of([value]), spec_of(method, seed), **shared(seed))
    make(tmp_path / "other", epochs_of([70.0]), spec_of("gce", 1, noise="uniform:0.4"), **shared(1))
    return find_runs([tmp_path])


def test_differences_are_over_common_seeds_within_a_block(tmp_path: Path) -> None:
    rows = {(row.noise, row.label): row for row in compare(pairs(tmp_path), "ce")}
    against = {label: row.against for (noise, label), row in rows.items() if noise == "pair:0.4"}
    half = pytest.approx(12.7062047 * 1.0)  # 3 and 5: s = sqrt(2)
    assert against["gce"] == Difference("ce", (1, 2), (), 4.0, half)
    assert against["elr"] == Difference("ce", (2,), (), -0.5, None)
    assert against["mae"] == Difference("ce", (), (), None, None)
    assert against["ce"] == Difference("ce", (0, 1, 2), (), 0.0, 0.0)
    assert rows["uniform:0.4", "gce"].against is None
    plain = summarize(find_runs([tmp_path]))
    assert [replace(row, against=None) for row in rows.values()] == plain


def test_each_table_is_compared_with_its_own_reference(tmp_path: Path) -> None:
    for noise, ce in (("pair:0.4", 60.0), ("uniform:0.4", 70.0)):
        for net in ("mlp", "conv4"):
            kind = {"noise": noise, "recipe": {"net": net}}
            make(tmp_path / noise / net / "ce", epochs_of([ce]), spec_of("ce", **kind), **shared(0))
            make(tmp_path / noise / net / "gce", epochs_of([75.0]), spec_of("gce", **kind), **shared(0))
    gaps = {
        (r.noise, r.net): r.against.mean for r in compare(find_runs([tmp_path]), "ce") if r.against and r.label == "gce"
    }
    assert gaps == {(n, net): gap for n, gap in (("pair:0.4", 15.0), ("uniform:0.4", 5.0)) for net in ("mlp", "conv4")}


@pytest.mark.parametrize(
    "facts",
    [
        {"noise_sha256": "other"},
        {"inputs_sha256": "other"},
        {"n_test": 99},
        {"test_sha256": "other rows"},
        {"noise_sha256": None},
    ],
)
def test_seeds_on_other_noise_or_data_are_left_out_and_named(tmp_path: Path, facts: dict[str, Any]) -> None:
    same = "inputs_sha256" not in facts  # other inputs are another row
    for seed, gap in ((0, 1.0), (1, 3.0), (2, 50.0)):
        make(tmp_path / f"ce{seed}", epochs_of([40.0]), spec_of("ce", seed), **shared(seed))
        more = facts if seed == 2 else {}
        make(tmp_path / f"gce{seed}", epochs_of([40.0 + gap]), spec_of("gce", seed), **shared(seed, **more))
    rows = compare(find_runs([tmp_path]), "ce")
    differences = [row.against for row in rows if row.method == "gce"]
    assert [(d.seeds, d.unlike, d.mean) for d in differences if d] == (
        [((0, 1), (2,), 2.0)] if same else [((0, 1), (), 2.0), ((), (2,), None)]
    )
    text = to_markdown(rows)
    left_out = "gce" if same else "gce (inputs other)"
    assert (
        f"The difference of {left_out} leaves out seed 2: noise, trusted set or test set are unknown or differ" in text
    )
    assert "| +2.00 ± 12.71 (2 seeds) |" in text if same else "| +2.00 ± 12.71 |" in text


@pytest.mark.parametrize(
    ("fact", "setting", "compared"),
    [
        ("test_set_sha256", {}, 0),
        ("labels_sha256", {}, 0),
        ("meta_sha256", {}, 0),
        ("meta_sha256", {"meta_data": "b"}, 1),
    ],
)
def test_rows_with_other_test_or_trusted_examples_are_compared_only_on_request(
    tmp_path: Path, fact: str, setting: dict[str, Any], compared: int
) -> None:
    make(tmp_path / "ce", epochs_of([80.0]), spec_of("ce"), **shared(0, **{fact: "aa"}))
    make(tmp_path / "gce", epochs_of([80.0]), spec_of("gce", **setting), **shared(0, **{fact: "bb"}))
    rows = compare(find_runs([tmp_path]), "ce")
    assert [len(row.against.seeds) for row in rows if row.method == "gce" and row.against] == [compared]


def test_missing_hashes_do_not_count_as_equal(tmp_path: Path) -> None:
    for method in ("ce", "gce"):
        make(tmp_path / method, epochs_of([80.0]), spec_of(method))
    rows = compare(find_runs([tmp_path]), "ce")
    assert [row.against and row.against.unlike for row in rows] == [(0,), (0,)]
    assert "The difference of gce leaves out seed 0:" in to_markdown(rows)


def test_only_finished_runs_are_compared_and_a_diverged_run_gives_no_difference(tmp_path: Path) -> None:
    for seed in (0, 1):
        make(tmp_path / f"ce{seed}", epochs_of([80.0]), spec_of("ce", seed), **shared(seed))
        make(tmp_path / f"a{seed}", epochs_of([85.0]), spec_of("a", seed), done=not seed, **shared(seed))
        make(tmp_path / f"b{seed}", epochs_of([85.0]), spec_of("b", seed), done=False, **shared(seed))
        make(tmp_path / f"c{seed}", epochs_of([float("nan") if seed else 85.0]), spec_of("c", seed), **shared(seed))
    a, b, c, _ = (row.against for row in compare(find_runs([tmp_path]), "ce"))
    assert a == Difference("ce", (0,), (), 5.0, None)
    assert b == Difference("ce", (), (), None, None)
    assert c == Difference("ce", (0, 1), (), None, None)


def test_a_row_is_named_by_its_label_or_by_its_method(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, spec in {
        "a": spec_of("gce", changed={"q": 0.5}),
        "b": spec_of("ce", recipe={"lr": 0.1}),
        "c": spec_of("ce", recipe={"lr": 0.2}),
    }.items():
        make(tmp_path / name, epochs_of([80.0]), spec, **shared(0))
    runs = find_runs([tmp_path])
    for name, label in (("gce", "gce (q=0.5)"), ("gce (q=0.5)", "gce (q=0.5)"), ("ce (lr=0.2)", "ce (lr=0.2)")):
        assert {row.against.label for row in compare(runs, name) if row.against} == {label}
    with pytest.raises(UserError) as caught:
        compare(runs, "ce")
    assert str(caught.value) == (
        "'ce' matches 2 rows of digits, noise pair:0.4, mlp: 'ce (lr=0.1)', 'ce (lr=0.2)'; give one of these labels"
    )
    monkeypatch.setattr(
        "warpi.report.page_data.read_details", lambda *_: pytest.fail("computed before the name was checked")
    )
    assert main(["report", str(tmp_path), "--against", "warpi", "--out", str(tmp_path / "out")]) == 2
    allowed = "ce, ce (lr=0.1), ce (lr=0.2), gce, gce (q=0.5)"
    assert capsys.readouterr().err == f"warpi: unknown method or label 'warpi'; allowed: {allowed}\n"
    assert not (tmp_path / "out").exists()


def test_differences_are_in_every_format(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs, out = pairs(tmp_path / "runs"), tmp_path / "out"
    assert main(["report", str(tmp_path / "runs"), "--against", "ce", "--out", str(out)]) == 0
    shown = capsys.readouterr().out
    for words in ("difference", "reference", "+4.00 ± 12.71 (2 seeds)", "−0.50", "Student's t over seeds"):
        assert words in shown
    text = (out / "report.md").read_text()
    assert text.splitlines()[2:8] == [
        "| method | seeds | last | best on validation | best on test (oracle) | difference |",
        "|:---|---:|---:|---:|---:|---:|",
        "| *without trusted data* |  |  |  |  |  |",
        "| ce | 3 | 81.00 ± 1.00 | – | 81.00 ± 1.00 | reference |",
        "| elr | 1 | 80.50 | – | 80.50 | −0.50 |",
        "| gce | 3 | **90.00 ± 7.81** | – | 90.00 ± 7.81 | +4.00 ± 12.71 (2 seeds) |",
    ]
    assert "| mae | 1 | 50.00 | – | 50.00 | – |" in text
    assert "| gce | 1 | **70.00** | – | 70.00 |\n" in text  # no ce in that table, and no such column
    tex = (out / "report.tex").read_text()
    assert r"\begin{tabular}{lrrrrr}" in tex
    assert r"\multicolumn{6}{l}" in tex
    assert r"elr & 1 & 80.50 & -- & 80.50 & $-$0.50 \\" in tex
    assert r"\begin{tabular}{lrrrr}" in tex
    page = Page((out / "report.html").read_text())
    assert all(words in page.words for words in ("difference", "+4.00 ± 12.71 (2 seeds)", "Student's t over seeds"))
    entry = next(e for e in json.loads((out / "summary.json").read_text()) if e["label"] == "gce")
    half = pytest.approx(12.7062047)
    assert entry["against"] == {"label": "ce", "seeds": [1, 2], "unlike": [], "mean": 4.0, "ci95": half}
    assert (entry["seeds"], entry["last_by_seed"]) == ([1, 2, 3], [85.0, 86.0, 99.0])
    assert write_report(runs, against="ce") == compare(runs, "ce")


def test_without_a_reference_there_are_no_differences(tmp_path: Path) -> None:
    runs = pairs(tmp_path)
    rows = summarize(runs)
    assert not any("ifference" in text for text in (to_markdown(rows), to_latex(rows), to_html(rows, runs)))


# -- lists -----------------------------------------------------------------------------------------------------------


def test_lists_have_one_line_per_row_and_are_folded_only_if_too_wide() -> None:
    rows = [{"name": "ce", "year": "", "summary": "word " * 20}, {"name": "gce", "year": "2018", "summary": "short"}]
    wide = in_columns(rows).splitlines()
    assert wide == ["name  year  summary", f"ce          {('word ' * 20).rstrip()}", "gce   2018  short"]
    assert in_columns(rows, max(map(len, wide))).splitlines() == wide
    beside = in_columns(rows, 60).splitlines()
    assert beside[1:4] == [
        "ce          " + " ".join(["word"] * 9),
        " " * 12 + " ".join(["word"] * 9),
        " " * 12 + "word word",
    ]
    below = in_columns(rows, 45).splitlines()
    assert below[:3] == ["name  year", "    summary", "ce"]
    assert below[-2:] == ["gce   2018", "    short"]
    assert max(map(len, beside + below)) <= 60
    assert in_columns(rows, 8).splitlines()[-2:] == ["gce  2018", "    short"]


# -- pictures --------------------------------------------------------------------------------------------------------


def test_average_curve_has_the_epochs_that_all_runs_have(tmp_path: Path) -> None:
    make(tmp_path / "a", epochs_of([80.0, 90.0, None, 70.0]))
    make(tmp_path / "b", epochs_of([82.0, 90.0, 91.0]), spec_of(seed=1))
    (g,) = group(find_runs([tmp_path]))
    assert average_curve(g.counted, "test_acc") == ([1, 2], [81.0, 90.0], [pytest.approx(2**0.5), 0.0])
    assert average_curve(g.counted[:1], "test_acc") == ([1, 2, 4], [80.0, 90.0, 70.0], [0.0, 0.0, 0.0])
    assert average_curve(g.counted, "meta_loss") == ([], [], [])


def test_curves_are_written_for_each_block_and_are_reproducible(tmp_path: Path) -> None:
    for seed in (0, 1):
        more = {"meta_loss": [0.5, 0.001]}
        make(tmp_path / f"w{seed}", epochs_of([80.0, 95.0 + seed], **more), spec_of("warpi", seed))
        make(tmp_path / f"u{seed}", epochs_of([None, None]), spec_of("cost $5$", seed, noise="Uniform:0.4"))
    make(tmp_path / "ce", epochs_of([80.0, 60.0]))
    make(tmp_path / "same name", epochs_of([70.0]), spec_of(noise="uniform 0.4"))
    make(tmp_path / "nothing yet", [], spec_of(noise="pair:0.1"))
    runs = find_runs([tmp_path])
    first = draw_curves(runs, tmp_path / "one")
    assert sorted(path.name for path in (tmp_path / "one").iterdir()) == [
        "curves-digits-pair-0.4-mlp.png",
        "curves-digits-pair-0.4-mlp.svg",
        "curves-digits-uniform-0.4-mlp-other.png",
        "curves-digits-uniform-0.4-mlp-other.svg",
        "curves-digits-uniform-0.4-mlp.png",
        "curves-digits-uniform-0.4-mlp.svg",
    ]
    assert len(first) == 6
    for path in first:
        content = path.read_bytes()
        assert content.startswith(b"\x89PNG" if path.suffix == ".png" else b"<?xml")
        assert b"<dc:date>" not in content
    second = draw_curves([run for run in runs if run.spec["noise"] == "pair:0.4"], tmp_path / "two")
    assert [path.read_bytes() for path in second] == [path.read_bytes() for path in first[2:4]]


def test_the_error_without_matplotlib_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make(tmp_path / "a", epochs_of([80.0]))
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(UserError, match=r"drawing figures needs .*warpi\[report\]"):
        draw_curves(find_runs([tmp_path]), tmp_path / "out")


# -- the whole -------------------------------------------------------------------------------------------------------


def test_write_report_writes_every_file(tmp_path: Path) -> None:
    make(tmp_path / "runs" / "a", epochs_of([80.0, 90.0], [40.0, 50.0]))
    out, extra = tmp_path / "out", tmp_path / "numbers.json"
    runs = find_runs([tmp_path / "runs"])
    rows = write_report(runs, out, extra)
    assert rows == summarize(runs)
    names = {
        "report.md",
        "report.html",
        "report.tex",
        "summary.json",
        "curves-digits-pair-0.4-mlp.png",
        "curves-digits-pair-0.4-mlp.svg",
    }
    assert {path.name for path in out.iterdir()} == names
    picture = "\n![curves-digits-pair-0.4-mlp](curves-digits-pair-0.4-mlp.png)\n"
    assert (out / "report.md").read_text() == to_markdown(rows) + picture
    assert (out / "report.tex").read_text() == to_latex(rows)
    assert (out / "summary.json").read_bytes() == extra.read_bytes()
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    assert write_report(runs, out) == rows
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before


def test_write_report_without_folder_only_returns(tmp_path: Path) -> None:
    folder = make(tmp_path / "a", epochs_of([80.0]))
    before = sorted(tmp_path.rglob("*"))
    runs = find_runs([folder])
    assert write_report(runs, None, None) == summarize(runs)
    assert sorted(tmp_path.rglob("*")) == before
    with pytest.raises(UserError, match="cannot"):
        write_report(runs, folder / "spec.json")


def test_the_command_reads_each_file_once_and_prints_plain_paths(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, open_file, read, seen = make(tmp_path / "a", epochs_of([80.0])), Path.open, Path.read_bytes, list[str]()

    def count(path: Path, mode: str = "r", *how: Any, **options: Any) -> Any:
        seen.extend([path.name] * (mode == "rb"))
        return open_file(path, mode, *how, **options)

    def change(path: Path) -> bytes:
        content = read(path)
        if path.name == "results.jsonl":  # the run continues
            (folder / "results.jsonl").write_text(json.dumps({"epoch": 2, "test_acc": 95.0}) + "\n")
        return content

    monkeypatch.setattr(Path, "open", count)
    monkeypatch.setattr(Path, "read_bytes", change)
    out = tmp_path / "[bold]x :smile:" / ("long" * 30)
    assert main(["report", str(folder), "--out", str(out), "--json", str(tmp_path / "t.json")]) == 0
    assert sorted(name for name in seen if name in ("results.jsonl", "spec.json")) == ["results.jsonl", "spec.json"]
    (row,) = json.loads((tmp_path / "t.json").read_text())
    printed = capsys.readouterr().out
    assert row["last_mean"] == 80.0
    assert "80.00" in printed
    assert "95.00" not in printed
    assert printed.endswith(f"report: {out / 'report.html'}\n")
    assert (out / "report.tex").exists()


def test_the_command_names_broken_runs_and_reports_the_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Damaged or half-written runs: exit code 1 if others were reported, 2 if not."""
    good, broken = make(tmp_path / "good", epochs_of([80.0])), dict[Path, str]()

    def spoil(name: str, file: str, text: str, says: str) -> None:
        broken[make(tmp_path / name, epochs_of([70.0, 71.0]), spec_of(seed=1 + len(broken))) / file] = says
        (tmp_path / name / file).write_text(text)

    spoil("cut", "spec.json", '{"format": "warpi-run/1", "sp', "is not JSON")
    spoil("empty", "spec.json", "", "is not JSON")
    spoil("line", "results.jsonl", 'no json\n{"epoch": 2}\n', "line 1 is not JSON")
    spoil("epoch", "results.jsonl", '{"epoch": NaN}\n', "line 1 has no epoch")
    spoil("endless", "results.jsonl", '{"epoch": 1e999}\n', "line 1 has no epoch")
    spoil("acc", "results.jsonl", '{"epoch": 1, "test_acc": 8000.0}\n', "'test_acc' must be a percentage, got 8000.0")
    argv = ["report", str(tmp_path), "--out", str(tmp_path / "out"), "--json", str(tmp_path / "t.json")]
    with pytest.raises(SystemExit) as ended:
        main(argv)
    assert ended.value.code == 1
    printed = capsys.readouterr()
    assert [(row["seeds"], row["last_mean"]) for row in json.loads((tmp_path / "t.json").read_text())] == [([0], 80.0)]
    assert "80.00" in printed.out
    assert (tmp_path / "out" / "report.html").exists()
    lines = printed.err.splitlines()
    assert len(lines) == len(broken)
    for file, says in broken.items():
        assert any(line.startswith(f"warpi: skipped: {file}") and says in line for line in lines), (file, lines)
    assert main(["report", *(str(file.parent) for file in broken)]) == 2
    (line_,) = capsys.readouterr().err.splitlines()
    assert all(str(file) in line_ for file in broken)
    assert main(["report", str(good)]) == 0


def test_a_page_is_written_even_if_the_arrays_of_a_run_are_damaged(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for seed in (0, 1):
        make(tmp_path / "runs" / str(seed), epochs_of([80.0]), spec_of(seed=seed))
    content = io.BytesIO()
    np.savez_compressed(content, x=np.random.default_rng(0).random(1000))
    for broken in (b"no archive", content.getvalue()[:400] + bytes(100) + content.getvalue()[500:]):
        (file := tmp_path / "runs" / "0" / "figures.npz").write_bytes(broken)
        assert main(["report", str(tmp_path / "runs"), "--out", str(tmp_path / "out")]) == 0
        (line_,) = capsys.readouterr().err.splitlines()
        assert f"losses and confusion are not on the page: cannot read {file}" in line_
        assert f"cannot read {file}" in (tmp_path / "out" / "report.html").read_text()


def test_rows_of_a_block_are_grouped_in_any_order(tmp_path: Path) -> None:
    make(tmp_path / "a", epochs_of([80.0]))
    (row,) = table(tmp_path)
    text = to_markdown([replace(row, net="z"), row, replace(row, net="z", label="other")])
    assert [line_ for line_ in text.splitlines() if line_.startswith("###")] == [
        "### digits, noise pair:0.4, mlp",
        "### digits, noise pair:0.4, z",
    ]


def test_pyplot_is_not_used() -> None:
    """It would keep every figure in a global list."""
    files = sorted(Path(warpi.report.write.__file__).parent.glob("*.py"))
    assert len(files) >= 8
    assert not [file.name for file in files if re.search(r"^\s*(import|from) [^#\n]*pyplot", file.read_text(), re.M)]


def test_runs_without_test_rows_show_the_accuracy_on_trusted_rows(tmp_path: Path) -> None:
    more = {"trusted_acc": [80.0], "trusted_low": [70.0], "trusted_high": [88.0]}
    mine = make(tmp_path / "mine", epochs_of([None], **more), spec_of("auto", data="mine.csv", noise="given"))
    (mine / "choice.json").write_text("[]")
    for seed, accuracy in enumerate((80.0, 84.0)):
        spec = spec_of("auto", seed, data="b.csv", noise="given")
        make(tmp_path / f"b{seed}", epochs_of([None], **more | {"trusted_acc": [accuracy]}), spec)
    rows = summarize(find_runs([tmp_path]))
    several, single = blocks(rows)
    assert single.title == "mine.csv"  # no network is trained
    assert single.sections[0][1][0].cells == ("auto", "1", "80.0", "70.0 to 88.0")
    assert several.title == "b.csv, mlp"
    assert several.sections[0][1][0].cells == ("auto", "2", "82.0 ± 2.8", "–")
    assert "oracle" not in to_markdown(rows)
    assert list(draw_curves(find_runs([tmp_path]), tmp_path / "out")) == []
    make(tmp_path / "tested", epochs_of([90.0]), spec_of())
    assert "oracle" in to_markdown(summarize(find_runs([tmp_path])))
