"""Training with the strong recipe as a benchmark: `benchmarks/strong_images.py`."""

import itertools
import json
import shutil
import time
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks import leaderboard, strong_images
from benchmarks.audit import strong as strong_audit
from benchmarks.pages import leaderboard as leaderboard_page, strong
from warpi.methods.registry import METHODS
from warpi.report.experiments import RunRecord, find_runs
from warpi.runs.spec import DataCache
from warpi.training.named_recipes import RECIPES
from warpi.training.recipe import Recipe

SHORT = {"epochs": 2, "batch_size": 64, "average": 0.9, "threads": 1, "seed": 0}


def test_a_run_leaves_its_folder_without_weights_and_a_summary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(strong_images, "COMMON", {"data": "digits", "val": 0.0, "limit": 300})
    settings = {"method": "warpi_plus", "noise": "pair:0.4", "meta": 50, "warm_up": 1.0, **SHORT}
    cache = DataCache()
    strong_images.run_one(tmp_path, "short", settings, None, time.monotonic() + 60, cache)
    strong_images.run_one(tmp_path, "late", settings, None, time.monotonic() - 1, cache)
    (summary,) = [json.loads(line) for line in (tmp_path / "summary.jsonl").read_text().splitlines()]
    assert summary["name"] == "short"
    assert summary["finished"]
    assert summary["epochs"] == 2
    assert summary["test_acc_one_view"] == pytest.approx(summary["test_acc"]), "digits are not mirrored"
    for name in ("selected", "selected_right", "recall_of_right", "memory_acc", "auroc_wrong"):
        assert 0 <= summary[name] <= 1
    assert {path.name for path in (tmp_path / "short").iterdir()} >= {"spec.json", "results.jsonl", "done"}
    assert not list(tmp_path.glob("*/checkpoint*"))
    assert not (tmp_path / "late").exists()


def test_a_run_stopped_at_the_deadline_is_resumed_and_ends_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(strong_images, "COMMON", {"data": "digits", "val": 0.0, "limit": 300})
    settings = {"method": "warpi_plus", "noise": "pair:0.4", "meta": 50, **SHORT, "epochs": 3, "batch_size": 32}
    for folder, times in (("whole", [100.0]), ("parts", [3.0, 5.0, 100.0, 100.0])):
        for seconds in times:
            looks = itertools.count()  # each look at the clock takes a second
            clock = SimpleNamespace(monotonic=lambda looks=looks: next(looks))
            monkeypatch.setattr(strong_images, "time", clock)
            strong_images.run_one(tmp_path / folder, "run", settings, "", seconds, DataCache())
    for kind, folder in (("whole", tmp_path / "whole"), ("parts", tmp_path / "parts")):
        rows = [json.loads(line) for line in (folder / "summary.jsonl").read_text().splitlines()]
        assert [row["finished"] for row in rows] == ([True] if kind == "whole" else [False, False, True])
        assert [row["epochs"] for row in rows] == ([3] if kind == "whole" else [0, 1, 3]), "stopped within an epoch"
        assert not list(folder.glob("*/checkpoint*"))
    assert "run: finished before" in capsys.readouterr().out
    results = [(tmp_path / folder / "run" / "results.jsonl").read_text().splitlines() for folder in ("whole", "parts")]
    whole, parts = ([{**json.loads(line), "seconds": 0} for line in lines] for lines in results)
    assert whole == parts


def test_the_last_call_stops_a_run_that_cannot_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(strong_images, "COMMON", {"data": "digits", "val": 0.0, "limit": 300})
    settings = {"method": "warpi_plus", "noise": "pair:0.4", "meta": 50, **SHORT, "epochs": 10_000, "warm_up": 3.0}
    strong_images.run_one(tmp_path, "run", settings, "", time.monotonic() + 30, DataCache(), final=True)
    assert "which is too long" in capsys.readouterr().out
    summary = json.loads((tmp_path / "summary.jsonl").read_text())
    assert summary["epochs"] == 5, "the second epoch after the warm-up, which is slower than those before"
    assert not summary["finished"]


def test_the_stored_audit_of_a_run_is_compared_with_cleanlab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("cleanlab")
    monkeypatch.setattr(strong_images, "COMMON", {"data": "digits", "val": 0.0, "limit": 300})
    settings = {"method": "ce", "noise": "pair:0.3", "meta": 0, **SHORT, "epochs": 6}
    end = time.monotonic() + 60
    strong_images.run_one(tmp_path, "short", settings, None, end, DataCache(), probabilities=True)
    summary = json.loads((tmp_path / "summary.jsonl").read_text())
    found = strong_audit.compare(tmp_path / "short.npz")
    assert found["found"]["warpi audit"]["auroc"] == pytest.approx(summary["audit_auroc"], abs=1e-3)
    by_cleanlab = found["found"]["cleanlab, self_confidence, prune_by_noise_rate"]
    assert by_cleanlab["auroc"] == pytest.approx(summary["audit_self_confidence_auroc"], abs=1e-3)
    assert "| `short` | warpi audit | 0." in strong_audit.table({"short": found})


def test_auroc() -> None:
    wrong = torch.tensor([True, False, True, False])
    assert strong_images.auroc(torch.tensor([0.9, 0.1, 0.4, 0.3]), wrong) == 1
    assert strong_images.auroc(torch.tensor([0.9, 0.1, 0.2, 0.3]), wrong) == 0.75


def test_every_run_has_settings_that_exist() -> None:
    runs = [*strong_images.RUNS.values()]
    runs += [leaderboard.settings_of(entry, labels) for entry in leaderboard.ENTRIES for labels in leaderboard.LABELS]
    known = {f.name for f in fields(Recipe)} | {"method", "meta", "noise", "data", "limit", "recipe", "stop"}
    for settings in runs:
        method = METHODS[settings["method"]]
        assert set(settings) - known <= {f.name for f in fields(method)}
        assert settings["meta"] >= 100 * method.needs_meta
        options = {name: value for name, value in settings.items() if name not in known}
        Recipe(**{**RECIPES["strong"], **{k: v for k, v in settings.items() if k in RECIPES["strong"]}})
        replace(method, **options)  # raises if a value is out of range


def test_a_run_can_stop_after_some_epochs_of_its_schedule(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(strong_images, "COMMON", {"data": "digits", "val": 0.0, "limit": 300})
    settings = {"method": "ce", "noise": "pair:0.4", "meta": 0, **SHORT, "epochs": 50, "stop": 2}
    strong_images.run_one(tmp_path, "prefix", settings, None, time.monotonic() + 60, DataCache())
    summary = json.loads((tmp_path / "summary.jsonl").read_text())
    assert summary["epochs"] == 2
    assert not summary["finished"]
    assert json.loads((tmp_path / "prefix" / "spec.json").read_text())["spec"]["recipe"]["epochs"] == 50


@pytest.mark.parametrize(
    ("seconds", "first", "later", "warm_up", "expected"),
    [(120, 1, 1, 0, 120), (120, 1, 3, 10, 46), (10, 1, 3, 10, 5), (120, 2, 2, 15, 60)],
)
def test_epochs_within_a_time(seconds: float, first: float, later: float, warm_up: float, expected: int) -> None:
    assert leaderboard.epochs_within(seconds, first, later, warm_up) == expected


def test_seconds_of_an_epoch_leave_out_compiling() -> None:
    assert leaderboard.from_history([30.0, 1.0, 1.0, 20.0, 3.0, 3.0], 3.0) == (1.0, 3.0)
    assert leaderboard.from_history([30.0, 2.0, 2.0, 2.0], 0.0) == (2.0, 2.0)


def test_page_shows_our_runs_beside_published_figures() -> None:
    (run,) = [run for run in find_runs([strong.KEPT]) if run.path.name == "sop_plus_random1_short_seed0"]
    finished = {name: [run] if name == "sop_plus_random1_short" else [] for name in strong_images.RUNS}
    *_, row = strong.rivals(finished)
    assert row == "| `sop_plus` (`sop_plus_random1_short`) | 95.77 | 120 | 103 | 95.70 |"
    assert strong.rivals({name: [] for name in strong_images.RUNS}) == []


def test_page_compares_runs_without_a_part_with_those_of_the_same_seeds() -> None:
    def run(name: str, acc: float) -> RunRecord:
        spec = {"seed": int(name[-1])}
        return RunRecord(Path(name), spec, {}, {}, [{"epoch": 1, "test_acc": acc}], done=True)

    finished: dict[str, list[RunRecord]] = {name: [] for name in strong_images.RUNS}
    finished["plus_random1"] = [run("plus_random1_seed0", 95.0), run("plus_random1_seed1", 96.0)]
    finished["plus_random1_no_memory"] = [run("plus_random1_no_memory_seed1", 95.5)]
    finished["plus_flip_v"] = [run("plus_flip_v_seed0", 93.0)]
    *_, base, with_v, without_memory = strong.parts(finished)
    assert base == "| – | – | 95.50 | – |"
    assert with_v == "| with V | `--rectifier` | – | 93.00 |"
    assert without_memory == "| without memory | `--beta 0.0` | 95.50 (-0.50) | – |"
    finished["plus_random1_no_memory"], finished["plus_flip_v"] = [], []
    assert strong.parts(finished) == []


def test_page_names_settings_that_differ_from_the_strong_recipe() -> None:
    recipe = Recipe(**{**RECIPES["strong"], "lr": 0.1, "label_smoothing": 0.1, "epochs": 7}).stored()
    assert strong.in_flags(strong.other_recipe(recipe)) == "--label-smoothing 0.1 --lr 0.1"
    weak = Recipe(**{**RECIPES["strong"], "augment": "weak"}).stored()
    assert "augment" not in weak, "a later field at its default is not stored"
    assert strong.other_recipe(weak) == {"augment": "weak"}


def test_runs_without_an_epoch_and_cut_off_repetitions_are_not_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = shutil.copytree(strong.KEPT / "ce_clean_seed0", tmp_path / "out" / "ce_clean_seed0")
    (row,) = [row for row in strong.summaries(strong.KEPT) if row["name"] == "ce_clean_seed0"]
    shutil.copytree(made, tmp_path / "out" / "ce_fine_seed0", ignore=shutil.ignore_patterns("done", "results.jsonl"))
    none = {"name": "ce_fine_seed0", "finished": False, "epochs": 0, "wall_seconds": 9.0}
    summary = tmp_path / "out" / "summary.jsonl"
    summary.write_text(f"{json.dumps(row)}\n{json.dumps(none)}\n")
    kept = tmp_path / "kept"
    strong.keep([summary.parent], kept)
    assert strong.summaries(kept) == [row]
    assert {path.name for path in kept.iterdir()} == {"ce_clean_seed0", "summary.json"}
    (made / "done").unlink()
    (made / "results.jsonl").write_text("")
    summary.write_text(json.dumps({**row, "finished": False, "epochs": 7}))
    strong.keep([summary.parent], kept)
    assert strong.summaries(kept) == [row]
    assert (kept / "ce_clean_seed0" / "results.jsonl").read_text()
    said = capsys.readouterr().out
    assert "ce_fine_seed0 is left out: it has no epoch" in said
    assert "ce_clean_seed0 is left out: it was cut off" in said


def test_page_shows_the_first_epochs_of_a_longer_schedule() -> None:
    spec = {"recipe": {"net": "preact18", "batch_size": 64, "lr": 0.02, "epochs": 300}}
    epochs = [{"epoch": t, "test_acc": 70.0 + t} for t in range(1, 21)]
    run = RunRecord(Path("dividemix_paper_random1_seed0"), spec, {}, {}, epochs, done=False)
    (_, line) = strong.first_epochs([run])
    assert "schedule of 300" in line
    assert line.endswith("80.00 at epoch 10, 90.00 at epoch 20.")
    row = {"name": run.path.name, "finished": False, "epochs": 20, "test_acc": 90.0}
    assert strong.cut_off([row]) == [], "it was meant to stop"
    assert len(strong.cut_off([{**row, "name": "plus_flip_seed0"}])) == 1


def test_stored_runs_that_were_not_alone_or_not_usual_give_no_seconds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (kept,) = [row for row in strong.summaries(strong.KEPT) if row["name"] == "ce_clean_seed0"]
    monkeypatch.setattr(leaderboard, "KEPT", tmp_path)
    changes: dict[str, Any] = {"few": {"limit": 6160}, "with_trusted": {"changed": {"use_trusted": True}}, "shared": {}}
    for name, change in {**changes, "usual": {}}.items():
        folder = shutil.copytree(strong.KEPT / "ce_clean_seed0", tmp_path / name)
        stored = json.loads((folder / "spec.json").read_text())
        stored["spec"] |= change
        (folder / "spec.json").write_text(json.dumps(stored))
    (tmp_path / "summary.json").write_text(json.dumps([{**kept, "name": "shared", "shared": True}]))
    assert leaderboard.from_kept()["ce"]["run"] == "usual"
    shutil.rmtree(tmp_path / "usual")
    assert leaderboard.from_kept() == {}


def test_measured_seconds_give_the_number_of_epochs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(strong_images, "COMMON", {"data": "digits", "val": 0.0, "limit": 300, "threads": 1})
    monkeypatch.setattr(leaderboard, "LABELS", {"random1": {"noise": "pair:0.4"}})
    monkeypatch.setattr(leaderboard, "_PROBE", {"epochs": 4, "warm_up": 2.0})
    monkeypatch.setattr(leaderboard, "from_kept", dict)
    file = tmp_path / "epochs.json"
    leaderboard.measure(tmp_path, ["ce", "dividemix"], "", time.monotonic() + 60, DataCache(), file)
    table = json.loads(file.read_text())
    assert set(table) == {"ce", "dividemix"}
    assert not (tmp_path / "probe_ce").exists(), "the page of the leaderboard would take it for a run"
    assert 0 < table["ce"]["seconds"] == table["ce"]["warm_up_seconds"]
    argv = ["x", "--root", "x", "--out", str(tmp_path), "--table", str(file), "--plan", "--methods"]
    monkeypatch.setattr("sys.argv", [*argv, "ce"])
    leaderboard.main()
    assert int(capsys.readouterr().out.split()[-2]) >= 2
    monkeypatch.setattr("sys.argv", [*argv, "warpi"])
    with pytest.raises(SystemExit, match="warpi; run with --measure"):
        leaderboard.main()


def test_leaderboard_page(tmp_path: Path) -> None:
    """Ranks are over the label sets; a published figure is shown beside runs without trusted images."""
    source = strong.KEPT / "sop_plus_random1_short_seed0"
    scores = {"ce": (90.0, 91.0, 60.0), "sop_plus": (95.0, 90.0, 65.0), "warpi": (92.0, 92.0, None)}
    for entry, row in scores.items():
        for labels, score in zip(leaderboard.LABELS, row, strict=True):
            for seed in (0, 1) if score is not None else ():
                folder = shutil.copytree(source, tmp_path / f"{entry}_{labels}_seed{seed}")
                stored = json.loads((folder / "spec.json").read_text())
                stored["spec"] |= {"method": entry, "data": "cifar10", **leaderboard.LABELS[labels], "seed": seed}
                (folder / "spec.json").write_text(json.dumps(stored))
                (folder / "results.jsonl").write_text(
                    json.dumps({"epoch": 1, "test_acc": score, "seconds": 2.0}) + "\n"
                )
    (tmp_path / "summary.json").write_text(json.dumps([{"name": "warpi_random1_seed1", "shared": True}]))
    page = leaderboard_page.page(tmp_path)
    assert "†: the run shared the GPU" in page
    rows = [line for line in page.splitlines() if line.startswith("| `")]
    assert rows[0] == "| `sop_plus` | 95.00 (2) / 95.70 | 90.00 (2) | 65.00 (2) / 63.88 | 1.3 | 1 | 2, 2 |"
    assert rows[1] == "| `ce` | 90.00 (2) | 91.00 (2) | 60.00 (2) | 1.7 | 1 | 2, 2 |"
    assert rows[2] == "| `warpi`* | 92.00 (2) | 92.00 (2) | – | – | 1 | 2, 2† |"


def test_scores_of_cleanlab_on_the_probabilities_of_an_audit() -> None:
    rank = pytest.importorskip("cleanlab.rank")
    p = torch.distributions.Dirichlet(torch.ones(4)).sample((200,)).double()
    given, wrong = torch.arange(200) % 4, torch.arange(200) % 3 == 0
    found = strong_images.cleanlab_aurocs(p, given, wrong)
    for name, method in (("self_confidence", "self_confidence"), ("margin", "normalized_margin")):
        quality = torch.from_numpy(rank.get_label_quality_scores(given.numpy(), p.numpy(), method=method))
        assert found[f"audit_{name}_auroc"] == pytest.approx(strong_images.auroc(-quality, wrong))
