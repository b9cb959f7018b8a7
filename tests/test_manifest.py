"""Noise manifests: what is written comes back, and a file that cannot be trusted is refused."""

import hashlib
import json
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from warpi.data.dataset import Dataset
from warpi.data.examples import Scale, TensorExamples
from warpi.errors import UserError
from warpi.manifest import NoisyLabels, labels_hash, noise_of, read_manifest, write_manifest


def data(n: int = 4, k: int = 3, name: str = "made") -> Dataset:
    examples = TensorExamples(torch.zeros(n, 2), Scale(torch.tensor(0.0), torch.tensor(1.0)))
    return Dataset(name, examples, torch.zeros(n, dtype=torch.int64), tuple(map(str, range(k))))


LABELS = NoisyLabels(torch.tensor([2, 0, 1, 1]), torch.full((3, 3), 1 / 3, dtype=torch.float64))


def write(path: Path, labels: NoisyLabels = LABELS, **changes: Any) -> Path:
    write_manifest(
        path, **{"data": "made", "noise": "uniform:1.0", "seed": 7, "n_classes": 3, "labels": labels, **changes}
    )
    return path


def rehash(content: dict[str, Any]) -> None:
    numbers = content["rows"] + content["labels"] + content.get("replaced", [])
    content["sha256"] = hashlib.sha256(struct.pack(f"<{len(numbers)}q", *numbers)).hexdigest()


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    seed=st.integers(0, 2**31), n=st.integers(1, 20), k=st.integers(1, 6), table=st.booleans(), outside=st.booleans()
)
def test_round_trip(tmp_path: Path, seed: int, n: int, k: int, table: bool, outside: bool) -> None:
    g = torch.Generator().manual_seed(seed)
    T = torch.rand(k, k, generator=g, dtype=torch.float64) + 0.01
    labels = NoisyLabels(
        torch.randint(k, (n,), generator=g),
        T / T.sum(1, keepdim=True) if table else None,
        torch.randint(-1, 50, (n,), generator=g) if outside else None,
    )
    path = write(tmp_path / "noise.json", labels, n_classes=k, seed=seed)
    got = read_manifest(path, data(n, k))
    for there, here in zip(got, labels, strict=True):
        assert (there is None) == (here is None)
        assert there is None or (torch.equal(there, here) and there.dtype == here.dtype)
    assert noise_of(path) == "uniform:1.0"
    assert json.loads(path.read_text())["sha256"] == labels_hash(labels.y, labels.replaced)


def test_hash_is_over_little_endian_int64() -> None:
    y = torch.tensor([3, 1])
    assert labels_hash(y) == hashlib.sha256(struct.pack("<4q", 0, 1, 3, 1)).hexdigest()
    assert labels_hash(y.int()) == labels_hash(y)
    assert labels_hash(y, torch.tensor([-1, 5])) == hashlib.sha256(struct.pack("<6q", 0, 1, 3, 1, -1, 5)).hexdigest()
    assert labels_hash(torch.tensor([1, 3])) != labels_hash(y)


def test_content_is_plain(tmp_path: Path) -> None:
    content = json.loads(write(tmp_path / "noise.json").read_text())
    assert content["format"] == "warpi-noise/1"
    assert (content["data"], content["noise"], content["seed"], content["n_classes"]) == ("made", "uniform:1.0", 7, 3)
    assert content["rows"] == [0, 1, 2, 3]
    assert content["labels"] == [2, 0, 1, 1]
    assert "replaced" not in content


def test_rows_may_come_in_any_order(tmp_path: Path) -> None:
    path = write(tmp_path / "noise.json", LABELS._replace(replaced=torch.tensor([-1, 5, 6, -1])))
    content = json.loads(path.read_text())
    for key in ("rows", "labels", "replaced"):
        content[key] = [content[key][i] for i in (2, 0, 3, 1)]
    rehash(content)
    path.write_text(json.dumps(content))
    got = read_manifest(path, data())
    assert got.y.tolist() == [2, 0, 1, 1]
    assert got.replaced is not None
    assert got.replaced.tolist() == [-1, 5, 6, -1]


def changed(**new: Any) -> Callable[[dict[str, Any]], None]:
    return lambda content: content.update(new)


@pytest.mark.parametrize(
    ("change", "honest", "message"),
    [
        (changed(labels=[2, 0, 1, 0]), False, "checksum"),
        (changed(rows=[1, 0, 2, 3]), False, "checksum"),
        (changed(replaced=[-1, -1, -1, 0]), False, "checksum"),
        (changed(sha256="0" * 64), False, "checksum"),
        (lambda content: content.pop("sha256"), False, "checksum"),
        (changed(format="warpi-noise/9"), False, "format is 'warpi-noise/9', must be 'warpi-noise/1'"),
        (lambda content: content.pop("format"), False, "format is None"),
        (changed(data="cifar10"), False, "data is 'cifar10', but this data set has 'made'"),
        (changed(n_classes=10), False, "n_classes is 10, but this data set has 3"),
        (changed(labels=[2, 0, 1, 3]), True, "row 3 has label 3, allowed are 0..2"),
        (changed(labels=[2, 0, 1, -1]), True, "row 3 has label -1"),
        (changed(labels=[2, 0, 1]), True, "3,. labels for 4 examples"),
        (changed(rows=[0, 1, 2], labels=[2, 0, 1]), True, "has 3 rows, must name each of the 4 rows"),
        (changed(rows=[0, 1, 2, 2]), True, "must name each"),
        (changed(rows=[], labels=[]), True, "has 0 rows"),
        (changed(replaced=[-1, -2, -1, -1]), True, "'replaced' must be"),
        (changed(replaced=[-1]), True, "'replaced' must be"),
        (changed(labels=[2, 0, 1, 1.0]), False, "'labels' must be a list of whole numbers"),
        (changed(labels=[2, 0, 1, True]), False, "'labels' must be a list of whole numbers"),
        (changed(labels=[2, 0, 1, 2**70]), False, "'labels' must be a list of whole numbers"),
        (changed(rows=4), False, "'rows' must be a list of whole numbers"),
        (changed(T=[[1.0]]), False, "'T' must be 3 x 3"),
        (changed(T=[[1.0, 1, 1]] * 3), False, "'T' must be 3 x 3"),
        (changed(T=[[2.0, -1, 0]] * 3), False, "'T' must be 3 x 3"),
        (changed(T=[[1.0], [0, 1]]), False, "'T' must be 3 x 3"),
        (changed(T="no"), False, "'T' must be 3 x 3"),
        (changed(T={"a": 1}), False, "'T' must be 3 x 3"),
    ],
)
def test_a_changed_file_is_refused(
    tmp_path: Path, change: Callable[[dict[str, Any]], None], honest: bool, message: str
) -> None:
    """`honest`: with the checksum made anew, so that what is wrong is the content itself."""
    path = write(tmp_path / "noise.json")
    content = json.loads(path.read_text())
    change(content)
    if honest:
        rehash(content)
    path.write_text(json.dumps(content))
    with pytest.raises(UserError, match=message) as caught:
        read_manifest(path, data())
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"not json", "is not JSON"),
        (b"", "is not JSON"),
        (b"\xff\xfe\x00", "is not JSON"),
        (b"[" * 100_000, "is not JSON"),
        (b"[1, 2]", "format is None"),
        (b"3", "format is None"),
    ],
)
def test_other_files_are_refused(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "noise.json"
    path.write_bytes(content)
    with pytest.raises(UserError, match=message):
        read_manifest(path, data())


def test_missing_file_and_folder(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"cannot read the noise manifest .*No such file"):
        read_manifest(tmp_path / "none.json", data())
    with pytest.raises(UserError, match="cannot read"):
        read_manifest(tmp_path, data())
    with pytest.raises(UserError, match=r"cannot write .*noise\.json: No such file"):
        write(tmp_path / "no" / "folder" / "noise.json")


def test_failure_leaves_the_old_file_and_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "noise.json")
    before = path.read_bytes()

    def full_disk(_: int) -> None:
        raise OSError(28, "No space left on device")

    def stopped(*_: object) -> None:
        raise KeyboardInterrupt

    other = LABELS._replace(y=torch.tensor([0, 0, 0, 0]))
    monkeypatch.setattr(os, "fsync", full_disk)
    with pytest.raises(UserError, match="No space left"):
        write(path, other)
    monkeypatch.undo()
    monkeypatch.setattr(os, "replace", stopped)
    with pytest.raises(KeyboardInterrupt):
        write(path, other)
    monkeypatch.undo()
    assert [p.name for p in tmp_path.iterdir()] == ["noise.json"]
    assert path.read_bytes() == before
    write(path, other)
    assert read_manifest(path, data()).y.tolist() == [0, 0, 0, 0]
