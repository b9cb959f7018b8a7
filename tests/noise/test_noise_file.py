"""Noise files: a round trip, and errors for changed files and other rows."""

import hashlib
import json
import os
import struct
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st
from PIL import Image

from warpi.cli.app import main
from warpi.data.dataset import Dataset
from warpi.data.examples import Scale, TensorExamples
from warpi.data.sparse import SparseExamples
from warpi.datasets.image_folders import read_folder
from warpi.errors import UserError
from warpi.noise.kinds import NoisyLabels
from warpi.noise.noise_file import hash_labels, read_noise_file, read_noise_name, write_noise_file
from warpi.runs.defaults import load_dataset
from warpi.training.task import make_task


def data(n: int = 4, k: int = 3, name: str = "made") -> Dataset:
    examples = TensorExamples(torch.zeros(n, 2), Scale(torch.tensor(0.0), torch.tensor(1.0)))
    return Dataset(name, examples, torch.zeros(n, dtype=torch.int64), tuple(map(str, range(k))))


LABELS = NoisyLabels(torch.tensor([2, 0, 1, 1]), torch.full((3, 3), 1 / 3, dtype=torch.float64))


def write(path: Path, labels: NoisyLabels = LABELS, **changes: Any) -> Path:
    write_noise_file(
        path, **{"data": "made", "noise": "uniform:1.0", "seed": 7, "n_classes": 3, "labels": labels, **changes}
    )
    return path


def rehash(content: dict[str, Any]) -> None:
    numbers = content["rows"] + content["labels"] + content.get("replaced", [])
    content["sha256"] = hashlib.sha256(struct.pack(f"<{len(numbers)}q", *numbers)).hexdigest()


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
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
    actual = read_noise_file(path, data(n, k))
    for read, written in zip(actual, labels, strict=True):
        assert (read is None) == (written is None)
        assert read is None or (torch.equal(read, written) and read.dtype == written.dtype)
    assert read_noise_name(path) == "uniform:1.0"
    assert json.loads(path.read_text())["sha256"] == hash_labels(labels.y, labels.replaced)


def test_hash_is_over_little_endian_int64() -> None:
    y = torch.tensor([3, 1])
    assert hash_labels(y) == hashlib.sha256(struct.pack("<4q", 0, 1, 3, 1)).hexdigest()
    assert hash_labels(y.int()) == hash_labels(y)
    assert hash_labels(y, torch.tensor([-1, 5])) == hashlib.sha256(struct.pack("<6q", 0, 1, 3, 1, -1, 5)).hexdigest()
    assert hash_labels(torch.tensor([1, 3])) != hash_labels(y)


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
    actual = read_noise_file(path, data())
    assert actual.y.tolist() == [2, 0, 1, 1]
    assert actual.replaced is not None
    assert actual.replaced.tolist() == [-1, 5, 6, -1]


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
        (changed(format="warpi-noise/9"), False, "format must be 'warpi-noise/1', got 'warpi-noise/9'"),
        (lambda content: content.pop("format"), False, "format must be 'warpi-noise/1', got None"),
        (changed(data="cifar10"), False, "data is 'cifar10', but this data set has 'made'"),
        (changed(n_classes=10), False, "n_classes is 10, but this data set has 3"),
        (changed(labels=[2, 0, 1, 3]), True, "row 3 has label 3, but labels must be in 0..2"),
        (changed(labels=[2, 0, 1, -1]), True, "row 3 has label -1"),
        (changed(labels=[2, 0, 1]), True, "3,. labels for 4 examples"),
        (changed(rows=[0, 1, 2], labels=[2, 0, 1]), True, "has 3 rows, but must list each of the 4 rows"),
        (changed(rows=[0, 1, 2, 2]), True, "must list each"),
        (changed(rows=[], labels=[]), True, "has 0 rows"),
        (changed(replaced=[-1, -2, -1, -1]), True, "'replaced' must contain"),
        (changed(replaced=[-1]), True, "'replaced' must contain"),
        (changed(labels=[2, 0, 1, 1.0]), False, "'labels' must be a list of integers"),
        (changed(labels=[2, 0, 1, True]), False, "'labels' must be a list of integers"),
        (changed(labels=[2, 0, 1, 2**70]), False, "'labels' must be a list of integers"),
        (changed(rows=4), False, "'rows' must be a list of integers"),
        (changed(T=[[1.0]]), False, "T is 1 x 1, but the data has 3 classes"),
        (changed(T=[[1.0, 1, 1]] * 3), False, "sums to 3, not to 1"),
        (changed(T=[[2.0, -1, 0]] * 3), False, "is 2; a probability must be between 0 and 1"),
        (changed(T=[[1.0], [0, 1]]), False, "row 2 of T has 2 numbers, but the first has 1"),
        (changed(T="no"), False, "T must be a list of lists, got 'no'"),
        (changed(T={"a": 1}), False, "T must be a list of lists"),
    ],
)
def test_changed_files_are_errors(
    tmp_path: Path, change: Callable[[dict[str, Any]], None], honest: bool, message: str
) -> None:
    """`honest`: with a correct checksum, so that only the content is wrong."""
    path = write(tmp_path / "noise.json")
    content = json.loads(path.read_text())
    change(content)
    if honest:
        rehash(content)
    path.write_text(json.dumps(content))
    with pytest.raises(UserError, match=message) as caught:
        read_noise_file(path, data())
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"not json", "is not JSON"),
        (b"", "is not JSON"),
        (b"\xff\xfe\x00", "is not JSON"),
        (b"[" * 100_000, "is not JSON"),
        (b"[1, 2]", "format must be 'warpi-noise/1', got None"),
        (b"3", "format must be 'warpi-noise/1', got None"),
    ],
)
def test_other_files_are_errors(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "noise.json"
    path.write_bytes(content)
    with pytest.raises(UserError, match=message):
        read_noise_file(path, data())


def test_missing_file_and_folder(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"cannot read the noise file .*No such file"):
        read_noise_file(tmp_path / "none.json", data())
    with pytest.raises(UserError, match="cannot read"):
        read_noise_file(tmp_path, data())
    with pytest.raises(UserError, match=r"cannot write .*noise\.json: No such file"):
        write(tmp_path / "no" / "folder" / "noise.json")


def test_failed_write_keeps_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
    assert read_noise_file(path, data()).y.tolist() == [0, 0, 0, 0]


# Rows that the labels belong to -------------------------------------------------------------------------------------

MOVED = "rows were moved, renamed, added, removed or changed"


def arrays(folder: Path, order: Sequence[int] = range(6), **more: Any) -> Dataset:
    folder.mkdir(exist_ok=True)
    x = np.arange(12, dtype=np.float32).reshape(6, 2)[list(order)]
    np.savez(folder / "x.npz", x=x, y=np.array(list("abcabc"))[list(order)], **more)
    return load_dataset(str(folder / "x.npz"))[0]


def table(folder: Path, order: Sequence[int] = range(6), **read: Any) -> Dataset:
    folder.mkdir(exist_ok=True)
    head, *lines = (  # seconds since 1970 need float64; without that column, the others are float32
        "id,size,hue,time,label,second,split",
        *(f"{9 - i},{i / 7},{'xyz'[i % 3]},{1.7e9 + i},{'abcabc'[i]},{'bcabca'[i]},train" for i in range(6)),
    )
    lines = [head, *(lines[i] for i in order), "1,1,w,1.7e9,a,a,test"]
    (folder / "t.csv").write_text("\n".join(lines) + "\n")
    return load_dataset(str(folder / "t.csv"), **{"drop": (), **read})[0]


def photos(root: Path) -> Path:
    for i in range(6):
        path = root / "photos" / "ab"[i % 2] / f"{i}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (8, 8), (40 * i, 0, 0)).save(path)
    return root / "photos"


def of(path: Path, dataset: Dataset) -> Path:
    y = (dataset.y + 1) % dataset.n_classes
    write_noise_file(path, data=dataset, noise="own", seed=0, labels=NoisyLabels(y, None))
    assert torch.equal(read_noise_file(path, dataset).y, y)
    return path


def test_arrays_in_another_order(tmp_path: Path) -> None:
    """Labels must not be used for other rows."""
    path = of(tmp_path / "n.json", arrays(tmp_path / "one"))
    read_noise_file(
        path, arrays(tmp_path / "two", clean=np.array(list("abcabc")))
    )  # other arrays of the file are not inputs
    with pytest.raises(UserError, match=f"{MOVED}.*in 'x'.*order.*create the file again"):
        read_noise_file(path, arrays(tmp_path / "three", [1, 0, 2, 3, 4, 5]))
    assert labels_of(tmp_path / "n.json", "data", "n_classes", "classes") == ["x", 3, ["a", "b", "c"]]
    sparse = SparseExamples.of(np.eye(6))
    made = replace(arrays(tmp_path / "one"), examples=sparse)
    of(path, made)
    with pytest.raises(UserError, match=MOVED):
        read_noise_file(path, replace(made, examples=SparseExamples.of(np.eye(6)[::-1])))


def labels_of(path: Path, *keys: str) -> list[Any]:
    content = json.loads(path.read_text())
    return [content[key] for key in keys]


def test_file_without_input_hashes(tmp_path: Path) -> None:
    path = of(tmp_path / "n.json", arrays(tmp_path / "one"))
    content = json.loads(path.read_text())
    del content["inputs"], content["classes"]
    path.write_text(json.dumps(content))
    read_noise_file(path, arrays(tmp_path / "two", [1, 0, 2, 3, 4, 5]))
    for garbled in ("x", ["x"], {}, {"x": 3}):
        path.write_text(json.dumps({**content, "inputs": garbled}))
        with pytest.raises(UserError, match=r"n\.json"):
            read_noise_file(path, arrays(tmp_path / "one"))


def test_tables_are_compared_by_common_columns(tmp_path: Path) -> None:
    path = of(tmp_path / "n.json", table(tmp_path / "one"))
    fewer = of(tmp_path / "fewer.json", table(tmp_path / "one", drop=("id", "time")))
    settings: list[dict[str, Any]] = [
        {},
        {"drop": ("id",)},
        {"drop": ("time", "hue")},
        {"label": "second"},
        {"label": "second", "drop": ("label", "time")},
    ]
    for read in settings:
        for made in (path, fewer):
            read_noise_file(made, table(tmp_path / "two", **read))
        for made in (path, fewer):
            with pytest.raises(UserError, match=MOVED):
                read_noise_file(made, table(tmp_path / "three", [0, 1, 5, 3, 4, 2], **read))
    with pytest.raises(UserError, match=r"by 'id'.*, but the data has only 'x'.*create the file again"):
        read_noise_file(path, replace(arrays(tmp_path / "four"), name="t"))


def test_text_columns_are_compared(tmp_path: Path) -> None:
    """This includes categories that only occur in test rows."""
    path = of(tmp_path / "n.json", table(tmp_path / "one", drop=("id", "size", "time", "second")))
    file = tmp_path / "one" / "t.csv"
    file.write_text(file.read_text() + "1,1,a new word,1.7e9,a,a,test\n")
    read_noise_file(path, load_dataset(str(file))[0])
    file.write_text(file.read_text().replace("x,", "y,"))
    with pytest.raises(UserError, match=f"{MOVED}.*in 'hue'"):
        read_noise_file(path, load_dataset(str(file))[0])


def test_image_files_are_compared_by_path(tmp_path: Path) -> None:
    folder = photos(tmp_path)
    path = of(tmp_path / "n.json", load_dataset(str(folder))[0])
    read_noise_file(path, load_dataset(str(folder), image_size=16)[0])
    read_noise_file(path, read_folder(folder, in_memory=False))
    (tmp_path / "elsewhere").mkdir()
    moved = folder.rename(tmp_path / "elsewhere" / "photos")
    read_noise_file(path, load_dataset(str(moved))[0])
    listed = tmp_path / "photos.csv"  # paths that start in another folder
    files = sorted(moved.glob("*/*"))
    listed.write_text("path,label\n" + "".join(f"{f.relative_to(tmp_path)},{f.parent.name}\n" for f in files))
    read_noise_file(path, load_dataset(str(listed))[0])
    (moved / "a" / "0.png").rename(moved / "a" / "9.png")
    with pytest.raises(UserError, match=f"{MOVED}.*in 'path'"):
        read_noise_file(path, load_dataset(str(moved))[0])
    (moved / "a" / "9.png").rename(moved / "a" / "0.png")
    read_noise_file(path, load_dataset(str(moved))[0])
    (moved / "b" / "1.png").rename(moved / "a" / "1.png")
    (moved / "a" / "0.png").unlink()
    with pytest.raises(UserError, match=MOVED):  # a better message than the number of rows
        read_noise_file(path, load_dataset(str(moved))[0])


def test_renamed_classes_are_an_error(tmp_path: Path) -> None:
    """Labels are positions of classes, which are sorted by name."""
    made = arrays(tmp_path / "one")
    path = of(tmp_path / "n.json", made)
    with pytest.raises(UserError, match="its classes are a, b, c, not b, c, z as in the data"):
        read_noise_file(path, replace(made, classes=("b", "c", "z")))
    content = json.loads(path.read_text())
    path.write_text(json.dumps({**content, "classes": 3}))
    with pytest.raises(UserError, match="its classes are 3, not a, b, c"):
        read_noise_file(path, made)


def test_corrupt_binds_labels_to_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arrays(tmp_path / "one"), arrays(tmp_path / "two", [1, 0, 2, 3, 4, 5])
    out = str(tmp_path / "n.json")
    assert main(["corrupt", "--data", str(tmp_path / "one" / "x.npz"), "--noise", "pair:0.5", "--out", out]) == 0
    for folder, code in (("one", 0), ("two", 2)):
        data, copy = str(tmp_path / folder / "x.npz"), str(tmp_path / "copy.json")
        assert main(["corrupt", "--data", data, "--noise", f"given:{out}", "--out", copy]) == code
    assert MOVED in capsys.readouterr().err


def test_custom_labels(tmp_path: Path) -> None:
    """The example in docs/data.md."""
    made, T = arrays(tmp_path / "one"), torch.tensor([[0, 1, 0], [0, 0, 1], [1, 0, 0]], dtype=torch.float64)
    y = torch.multinomial(T[made.y], 1, generator=torch.Generator().manual_seed(0))[:, 0]
    write_noise_file(tmp_path / "own.json", data=made, noise="own", seed=0, labels=NoisyLabels(y, T))
    _, truth = make_task(made, f"given:{tmp_path / 'own.json'}", val=0, test=0)
    assert truth.T is not None
    assert torch.equal(truth.T, T)
    assert truth.noise_hash == hash_labels((made.y + 1) % 3)
    with pytest.raises(UserError, match=r"own\.json: got \(5,\) labels for 6 examples"):
        write_noise_file(tmp_path / "own.json", data=made, noise="own", seed=0, labels=NoisyLabels(y[:5], T))
    with pytest.raises(UserError, match="n_classes is missing; pass it, or pass the data set itself"):
        write_noise_file(tmp_path / "own.json", data="x", noise="own", seed=0, labels=NoisyLabels(y, T))
