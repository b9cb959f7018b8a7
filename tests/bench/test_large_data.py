"""The benchmark of large data: its files, its measured process, and the tables of docs/scale.md."""

import io
import json
from pathlib import Path

import numpy as np
import pytest

from benchmarks.audit import any_model
from benchmarks.speed import large_data, large_data_page, limited_cache, scale_model


def test_sorted_rows_have_the_labels_of_the_others(tmp_path: Path) -> None:
    labels = []
    for is_sorted in (False, True):
        path = large_data.write(tmp_path, 500, is_sorted)
        assert np.load(path).shape == (500, large_data.FEATURES)
        labels.append(np.load(path.with_name(f"{path.stem}_labels.npy")))
    assert np.array_equal(np.sort(labels[0]), labels[1])
    assert not np.array_equal(labels[0], labels[1])


@pytest.mark.parametrize("shuffle", ["rows", "blocks"])
def test_batches_are_drawn_for_some_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], shuffle: str
) -> None:
    path = large_data.write(tmp_path, 500)
    monkeypatch.setattr("sys.stdin", io.StringIO("go\n"))
    result = limited_cache.draw(path, shuffle, 50, 0.03)
    assert result["rows_per_s"] > 0
    assert int(capsys.readouterr().out) > 0  # anonymous memory in bytes


def test_the_page_holds_the_stored_results() -> None:
    page = large_data_page.PAGE.read_text()
    records = list(json.loads(large_data.FILE.read_text()).values())
    for make in large_data_page.TABLES.values():
        assert make(records) in page
    assert scale_model.gpu_table() in page
    assert scale_model.billion_table() in page


def test_an_all_reduce_takes_longer_between_nodes() -> None:
    assert scale_model.all_reduce(8, 0) == scale_model.LATENCY_IN_NODE
    bytes_only = scale_model.all_reduce(2, 3e9) - scale_model.LATENCY_IN_NODE
    assert bytes_only == pytest.approx(2 * 0.5 * 3e9 / scale_model.IN_NODE)
    assert scale_model.all_reduce(16, 1e6) > scale_model.all_reduce(8, 1e6)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_memory_and_time_of_two_million_rows(tmp_path: Path) -> None:
    """Real commands in processes of their own. A copy of the features as float32 alone would take 0.52 GiB."""
    n = 2_200_000
    path = large_data.write(tmp_path, n)
    kept = large_data.train(path, tmp_path / "run", large_data.TRAIN)
    in_memory = large_data.train(path, tmp_path / "memory", large_data.IN_MEMORY)
    assert kept["anonymous_gib"] < in_memory["anonymous_gib"] - 0.4
    assert kept["anonymous_gib"] < 0.75
    assert kept["epoch_cpu_s"] < in_memory["epoch_cpu_s"] / 0.6
    assert abs(kept["test_acc"] - in_memory["test_acc"]) < 0.1
    run = str(tmp_path / "run")
    for command in (
        ["audit", run, "--csv", str(tmp_path / "audit.csv")],
        ["report", run, "--out", str(tmp_path / "r")],
    ):
        assert large_data.measure(large_data.COMMAND, *command)["anonymous_gib"] < 0.75, command[0]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_memory_of_an_audit_of_probabilities(tmp_path: Path) -> None:
    """Two million rows of ten classes. The probabilities in float64 alone would take 0.15 GiB."""
    used = large_data.measure(large_data.COMMAND, *any_model.write_rows(2_000_000, tmp_path))
    assert used["anonymous_gib"] < 0.5
    assert (tmp_path / "out" / "audit.csv").read_bytes().count(b"\n") == 2_000_001
