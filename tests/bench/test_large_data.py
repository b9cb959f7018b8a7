"""The benchmark of large data: its files, its measured process, and the tables of docs/scale.md."""

import io
import json
from pathlib import Path

import numpy as np
import pytest

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
