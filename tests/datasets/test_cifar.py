"""CIFAR and CIFAR-N from small synthetic files in the official layouts, and malicious pickles."""

import builtins
import contextlib
import io
import os
import pickle
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from warpi.data.augment import Crop
from warpi.data.examples import TensorExamples
from warpi.datasets.cifar import cifar10, cifar100
from warpi.datasets.safe_pickle import safe_load
from warpi.errors import UserError

NAMES10 = ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]
NAMES100 = [f"fine{k}" for k in range(100)]
PER_BATCH = 4


def python2(value: Any) -> bytes:
    """Pickle opcodes as Python 2 and an old numpy wrote them in the official files."""
    if isinstance(value, str):
        return b"U" + struct.pack("<B", len(value)) + value.encode("latin1")
    if isinstance(value, int):
        return b"J" + struct.pack("<i", value)
    if isinstance(value, list):
        return b"](" + b"".join(map(python2, value)) + b"e"
    if isinstance(value, dict):
        return b"}(" + b"".join(python2(k) + python2(v) for k, v in value.items()) + b"u"
    assert value.dtype == np.uint8
    start = b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85U\x01b\x87R"
    dtype = b"cnumpy\ndtype\nU\x02u1K\x00K\x01\x87R(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"
    shape = b"".join(map(python2, value.shape)) + b"\x86"
    data = value.tobytes()
    return start + b"(K\x01" + shape + dtype + b"\x89T" + struct.pack("<i", len(data)) + data + b"tb"


def write(path: Path, value: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"\x80\x02" + python2(value) + b".")


def images(n: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (n, 3072), dtype=np.uint8)


def make10(root: Path, binary: bool = False) -> tuple[np.ndarray, np.ndarray]:
    """Write five batches of four images; return all training images [20, 3072] and labels [20]."""
    x, y = images(5 * PER_BATCH, 0), np.arange(5 * PER_BATCH) % 10
    parts = [(f"data_batch_{i + 1}", slice(i * PER_BATCH, (i + 1) * PER_BATCH)) for i in range(5)]
    everything = [(name, x[rows], y[rows]) for name, rows in parts] + [("test_batch", images(6, 9), np.arange(6))]
    for name, data, labels in everything:
        if binary:
            file = root / "cifar-10-batches-bin" / f"{name}.bin"
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(b"".join(bytes([k]) + row.tobytes() for k, row in zip(labels, data, strict=True)))
        else:
            record = {"batch_label": "x", "labels": labels.tolist(), "data": data, "filenames": ["f"] * len(labels)}
            write(root / "cifar-10-batches-py" / name, record)
    if binary:
        (root / "cifar-10-batches-bin" / "batches.meta.txt").write_text("\n".join(NAMES10) + "\n\n")
    else:
        write(root / "cifar-10-batches-py" / "batches.meta", {"label_names": NAMES10, "num_vis": 3072})
    return x, y


def make100(root: Path, binary: bool = False) -> tuple[np.ndarray, np.ndarray]:
    """Write every class once, with superclass = class mod 20."""
    x, y = images(100, 1), np.random.default_rng(2).permutation(100)
    for name, data, fine in (("train", x, y), ("test", images(3, 8), np.array([5, 50, 99]))):
        if binary:
            file = root / "cifar-100-binary" / f"{name}.bin"
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(b"".join(bytes([k % 20, k]) + row.tobytes() for k, row in zip(fine, data, strict=True)))
        else:
            record = {"data": data, "fine_labels": fine.tolist(), "coarse_labels": (fine % 20).tolist()}
            write(root / "cifar-100-python" / name, record)
    if binary:
        (root / "cifar-100-binary" / "fine_label_names.txt").write_text("\n".join(NAMES100) + "\n")
    else:
        write(root / "cifar-100-python" / "meta", {"fine_label_names": NAMES100, "coarse_label_names": ["c"] * 20})
    return x, y


# -- pickles ----------------------------------------------------------------------------------------------------------


class Calls:
    """Pickles to a function call."""

    def __init__(self, function: Any, *args: Any) -> None:
        self.call = function, args

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return self.call


@pytest.mark.parametrize("protocol", range(6))
@pytest.mark.parametrize("hidden", [False, True])
def test_pickles_cannot_call_functions(tmp_path: Path, protocol: int, hidden: bool) -> None:
    victim, file = tmp_path / "victim", tmp_path / "bad"
    for function, args, name in (
        (os.system, (f"touch {victim}",), f"{os.system.__module__}.system"),
        (builtins.eval, (f"open({str(victim)!r}, 'w').close()",), "eval"),
        (io.open, (str(victim), "w"), "open"),
        (Path.touch, (victim,), ""),
    ):
        payload = Calls(function, *args)
        file.write_bytes(pickle.dumps({"data": np.zeros(3), "labels": [payload]} if hidden else payload, protocol))
        with pytest.raises(UserError, match="it was not opened") as e:
            safe_load(file)
        assert name in str(e.value)
        assert str(file) in str(e.value)
        assert not victim.exists()
    file.write_bytes(pickle.dumps(Calls(io.open, str(victim), "w"), protocol))
    pickle.loads(file.read_bytes()).close()  # the payload works with an ordinary unpickler
    assert victim.exists()


def test_objects_and_unknown_types_are_errors() -> None:
    for value in (np.array([{}, 1], dtype=object), np.zeros(2, dtype=[("a", "i4"), ("b", "O")]), Path("x"), {1, 2}):
        with pytest.raises(UserError):
            safe_load(io.BytesIO(pickle.dumps(value, 2)))


@pytest.mark.parametrize("protocol", range(6))
def test_plain_data_round_trip(protocol: int) -> None:
    value = {"a": [1, -2.5, None, True, 2**70], b"\xff": ("é", b"\x00\xfe"), "n": {"x": []}}
    assert safe_load(io.BytesIO(pickle.dumps(value, protocol))) == value
    for array in (
        np.arange(12, dtype=">i4").reshape(3, 4).T,
        np.array(["a", "bcd"]),
        np.zeros((0, 3), np.float32),
        np.array([1, 255], np.uint8),
        np.array([True]),
        np.float32(1.5),
        np.int64(-3),
    ):
        back = safe_load(io.BytesIO(pickle.dumps(array, protocol)))
        np.testing.assert_array_equal(back, array)
        assert back.dtype == array.dtype.newbyteorder("=") or back.dtype == array.dtype


def test_old_numpy_names() -> None:
    """numpy 1 writes numpy.core, numpy 2 writes numpy._core."""
    array = np.arange(3)
    new = pickle.dumps(array, 2)
    old = new.replace(b"numpy._core.multiarray", b"numpy.core.multiarray")
    assert (old != new) == (np.__version__ >= "2")
    for data in (old, new):
        np.testing.assert_array_equal(safe_load(io.BytesIO(data)), array)


def test_errors_name_the_file(tmp_path: Path) -> None:
    file = tmp_path / "batch"
    write(file, {"data": images(2, 0), "labels": [1, 2]})
    whole = file.read_bytes()
    for data in (b"", whole[:-1], whole[:3000], whole[:40], b"<!DOCTYPE html><html>", b"\x1f\x8b\x08\x00abc", b"hello"):
        file.write_bytes(data)
        with pytest.raises(UserError, match=r"not a readable pickle|it was not opened") as e:
            safe_load(file)
        assert str(file) in str(e.value)
        assert "\n" not in str(e.value)
    with pytest.raises(UserError, match="cannot read"):
        safe_load(tmp_path / "absent")


@given(data=st.binary(max_size=60))
@settings(max_examples=80, deadline=None)
def test_any_bytes_give_data_or_an_error(data: bytes) -> None:
    with contextlib.suppress(UserError):
        safe_load(io.BytesIO(b"\x80\x02" + data))


def test_hostile_shapes_and_loops_are_errors() -> None:
    """Array states that crash numpy's reader or fill the memory, and containers that contain themselves."""
    head = b"\x80\x02cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85U\x01b\x87R"
    dtype = b"cnumpy\ndtype\nU\x02u1K\x00K\x01\x87R"
    for state in (
        b"(K\x01K\x03\x85" + dtype + b"\x89U\x02abtb.",  # 2 bytes for 3 numbers
        b"(K\x01J\xff\xff\xff\xff\x85" + dtype + b"\x89U\x00tb.",  # a negative size
        b"(K\x01J\xff\xff\xff\x7f\x85" + dtype + b"\x89U\x00tb.",
        b"(K\x01U\x01a\x85" + dtype + b"\x89U\x00tb.",
        b"(K\x01K\x01\x85U\x01O\x89U\x01atb.",  # a code instead of a dtype
        b".",  # never filled
    ):
        with pytest.raises(UserError, match="not a readable pickle"):
            safe_load(io.BytesIO(head + state))
    with pytest.raises(UserError, match="not a readable pickle"):
        safe_load(io.BytesIO(b"\x80\x02]q\x00h\x00a."))  # a list that contains itself
    value: Any = [1]
    for _ in range(60):
        value = [value, value]  # 2^60 leaves if sharing is lost
    safe_load(io.BytesIO(pickle.dumps(value)))
    safe_load(io.BytesIO(b"\x80\x02Nr\xff\xff\xff\x7f."))  # a memo index of 2^31


@given(place=st.integers(2, 300), value=st.integers(0, 255))
@settings(max_examples=80, deadline=None)
def test_any_changed_byte_gives_data_or_an_error(place: int, value: int) -> None:
    data = bytearray(pickle.dumps({"data": np.arange(8, dtype=np.uint8), "names": ["a"], "n": np.int64(3)}, 2))
    data[place % len(data)] = value
    with contextlib.suppress(UserError):
        safe_load(io.BytesIO(bytes(data)))


# -- the official files -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("binary", [False, True])
@pytest.mark.parametrize("inside", [False, True])
def test_cifar10(tmp_path: Path, binary: bool, inside: bool) -> None:
    x, y = make10(tmp_path, binary)
    folder = "cifar-10-batches-bin" if binary else "cifar-10-batches-py"
    data = cifar10(tmp_path / folder if inside else tmp_path)
    assert isinstance(data.examples, TensorExamples)
    assert data.examples.x.dtype == torch.uint8
    assert torch.equal(data.examples.x, torch.tensor(x).view(20, 3, 32, 32))
    assert data.examples.crop == Crop(size=32, pad=4)
    assert data.examples.shape == (3, 32, 32)
    assert data.y.tolist() == y.tolist()
    assert data.clean is not None
    assert torch.equal(data.clean, data.y)
    assert data.classes == tuple(NAMES10)
    assert data.superclass is None
    assert not data.label_sets
    assert data.test is not None
    assert isinstance(data.test.examples, TensorExamples)
    assert torch.equal(data.test.examples.x, torch.tensor(images(6, 9)).view(6, 3, 32, 32))
    assert data.test.y.tolist() == [0, 1, 2, 3, 4, 5]
    assert data.test.rows.tolist() == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize("binary", [False, True])
@pytest.mark.parametrize("inside", [False, True])
def test_cifar100(tmp_path: Path, binary: bool, inside: bool) -> None:
    x, y = make100(tmp_path, binary)
    folder = "cifar-100-binary" if binary else "cifar-100-python"
    data = cifar100(tmp_path / folder if inside else tmp_path)
    assert isinstance(data.examples, TensorExamples)
    assert torch.equal(data.examples.x, torch.tensor(x).view(100, 3, 32, 32))
    assert data.y.tolist() == y.tolist()  # the fine label: the second byte of a binary record
    assert data.classes == tuple(NAMES100)
    assert data.superclass is not None
    assert data.superclass.tolist() == [k % 20 for k in range(100)]
    assert data.test is not None
    assert data.test.y.tolist() == [5, 50, 99]


def test_batches_are_normalized_per_channel(tmp_path: Path) -> None:
    x, _ = make10(tmp_path)
    batch = next(iter(cifar10(tmp_path).examples.stream([(torch.arange(20), 0)], augment=False))).views[0]
    mean, std = (np.array(v).reshape(3, 1, 1) for v in ((125.307, 122.95, 113.865), (62.993, 62.089, 66.705)))
    expected = (x.reshape(20, 3, 32, 32) - mean) / std
    np.testing.assert_allclose(batch.numpy(), expected, rtol=1e-4, atol=1e-5)


def test_python_files_have_priority(tmp_path: Path) -> None:
    make10(tmp_path, binary=True)
    assert cifar10(tmp_path).classes[0] == "airplane"
    make10(tmp_path)
    write(tmp_path / "cifar-10-batches-py" / "batches.meta", {"label_names": [name.upper() for name in NAMES10]})
    assert cifar10(tmp_path).classes[0] == "AIRPLANE"


def test_folder_from_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WARPI_DATA", raising=False)
    with pytest.raises(UserError, match=r"cifar-10-python\.tar\.gz.*--root.*WARPI_DATA"):
        cifar10(None)
    with pytest.raises(UserError, match=r"cifar100 is not in .*cifar-100-python\.tar\.gz"):
        cifar100(tmp_path)
    make10(tmp_path)
    monkeypatch.setenv("WARPI_DATA", str(tmp_path))
    assert len(cifar10(None).y) == 20
    with pytest.raises(UserError, match="not in"):
        cifar10(tmp_path / "elsewhere")  # an explicit folder has priority


def test_broken_official_files(tmp_path: Path) -> None:
    make10(tmp_path)
    folder = tmp_path / "cifar-10-batches-py"
    good = (folder / "data_batch_3").read_bytes()
    (folder / "data_batch_3").unlink()
    with pytest.raises(UserError, match="no file 'data_batch_3'"):
        cifar10(tmp_path)
    (folder / "data_batch_3").write_bytes(good[:-100])
    with pytest.raises(UserError, match="data_batch_3: not a readable pickle"):
        cifar10(tmp_path)
    for record, what in (
        ({"labels": [1]}, "no uint8 array 'data'"),
        ([1, 2], "no uint8 array 'data'"),
        ({"data": images(2, 0)[:, :100], "labels": [1, 2]}, "no uint8 array 'data'"),
        ({"data": images(2, 0), "labels": [1]}, "1 labels under 'labels' for 2 images"),
        ({"data": images(2, 0), "labels": ["a", "b"]}, "'labels' is not a list of integers"),
        ({"data": images(2, 0), "fine_labels": [1, 2]}, "'labels' is not a list of integers"),
        ({"data": images(2, 0), "labels": [1, 10]}, "label 10, but labels must be in 0..9"),
    ):
        write(folder / "data_batch_3", record)
        with pytest.raises(UserError, match=what):
            cifar10(tmp_path)
    (folder / "data_batch_3").write_bytes(good)
    write(folder / "batches.meta", {"names": []})
    with pytest.raises(UserError, match=r"batches\.meta: no class names"):
        cifar10(tmp_path)


def test_broken_binary_files(tmp_path: Path) -> None:
    make100(tmp_path, binary=True)
    file = tmp_path / "cifar-100-binary" / "train.bin"
    good = file.read_bytes()
    for data in (good[:-1], b""):
        file.write_bytes(data)
        with pytest.raises(UserError, match=r"train\.bin: \d+ bytes are not a multiple of the record size 3074"):
            cifar100(tmp_path)
    file.write_bytes(good + bytes([7]) + good[1:3074])  # the class of the first record, in another superclass
    with pytest.raises(UserError, match="more than one superclass"):
        cifar100(tmp_path)


@pytest.mark.parametrize("binary", [False, True])
def test_files_without_permission(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, binary: bool) -> None:
    make10(tmp_path, binary)
    np.savez(tmp_path / "cifar10n.npz", worst=np.arange(20) % 10)
    torch.save({"worse_label": np.arange(20) % 10}, tmp_path / "CIFAR-10_human.pt")
    folder = tmp_path / ("cifar-10-batches-bin" if binary else "cifar-10-batches-py")
    opened = io.open
    for file in (*folder.iterdir(), tmp_path / "cifar10n.npz", tmp_path / "CIFAR-10_human.pt"):

        def denied(path: Any, *args: Any, **options: Any) -> Any:
            if path == file:
                raise PermissionError(13, "Permission denied", str(path))
            return opened(path, *args, **options)

        monkeypatch.setattr(io, "open", denied)  # root can read all files
        with pytest.raises(UserError, match=f"cannot read {file}: Permission denied; check"):
            cifar10(tmp_path)
    monkeypatch.undo()
    assert set(cifar10(tmp_path).label_sets) == {"worst"}


# -- CIFAR-N ----------------------------------------------------------------------------------------------------------

KEYS = {"worse_label": "worst", "aggre_label": "aggre"} | {f"random_label{i}": f"random{i}" for i in (1, 2, 3)}


def human(y: np.ndarray, keys: list[str], n_classes: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(5)
    return {key: np.where(rng.random(len(y)) < 0.5, rng.integers(0, n_classes, len(y)), y) for key in keys}


@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize("place", ["", "cifar-n", ".."])
def test_cifar10n_as_saved_by_torch(tmp_path: Path, zipped: bool, place: str) -> None:
    root = tmp_path / "root"
    _, y = make10(root)
    labels = human(y, list(KEYS), 10)
    (root / place).mkdir(exist_ok=True)
    torch.save(labels | {"clean_label": y}, root / place / "CIFAR-10_human.pt", _use_new_zipfile_serialization=zipped)
    for folder in (root, root / "cifar-10-batches-py") if place != ".." else (root,):
        sets = cifar10(folder).label_sets
        assert set(sets) == set(KEYS.values())
        for key, name in KEYS.items():
            assert sets[name].dtype == torch.int64
            assert sets[name].tolist() == labels[key].tolist()


def test_cifar10n_as_arrays(tmp_path: Path) -> None:
    _, y = make10(tmp_path)
    labels = human(y, ["aggre", "random1"], 10)
    (tmp_path / "cifar-n").mkdir()
    np.savez(tmp_path / "cifar-n" / "cifar10n.npz", **{key: v.astype(np.uint8) for key, v in labels.items()})
    assert {name: v.tolist() for name, v in cifar10(tmp_path).label_sets.items()} == {
        name: v.tolist() for name, v in labels.items()
    }
    worst = human(y, ["worse_label"], 10)["worse_label"]
    torch.save({"worse_label": worst, "aggre_label": labels["aggre"]}, tmp_path / "CIFAR-10_human.pt")
    assert set(cifar10(tmp_path).label_sets) == {"aggre", "random1", "worst"}  # both files are used
    torch.save({"aggre_label": (labels["aggre"] + 1) % 10}, tmp_path / "CIFAR-10_human.pt")
    with pytest.raises(UserError, match="'aggre_label' differs from another file's 'aggre' in 20 rows"):
        cifar10(tmp_path)


def test_cifar100n_has_one_name(tmp_path: Path) -> None:
    _, y = make100(tmp_path)
    labels = human(y, ["noisy"], 100)["noisy"]
    np.savez(tmp_path / "cifar100n.npz", fine=labels, coarse=labels % 20)
    sets = cifar100(tmp_path).label_sets
    assert list(sets) == ["noisy"]
    assert sets["noisy"].tolist() == labels.tolist()
    (tmp_path / "cifar100n.npz").unlink()
    torch.save(
        {"clean_label": y, "noisy_label": labels, "noisy_coarse_label": labels % 20}, tmp_path / "CIFAR-100_human.pt"
    )
    assert cifar100(tmp_path).label_sets["noisy"].tolist() == labels.tolist()


def test_mismatched_human_labels(tmp_path: Path) -> None:
    _, y = make10(tmp_path)
    file = tmp_path / "CIFAR-10_human.pt"
    for saved, what in (
        ({"clean_label": np.roll(y, 1), "worse_label": y}, "'clean_label' differs from the official labels in 20 rows"),
        ({"worse_label": y[:-1]}, "19 labels under 'worse_label' for 20 images"),
        ({"worse_label": y + 5}, "label set 'worst' of cifar10: row 5 has label 10"),
        ({"worse_label": y / 2}, "'worse_label' is not a list of integers"),
        ({"noisy_label": y}, "has no cifar10 labels"),
        ([y], "contains a list, not a dict"),
    ):
        torch.save(saved, file)
        with pytest.raises(UserError, match=what) as e:
            cifar10(tmp_path)
        assert "cifar10" in str(e.value) or str(file) in str(e.value)
    torch.save({"worse_label": y}, file)
    whole = bytearray(file.read_bytes())
    whole[whole.index(b"worse_label")] ^= 1  # the checksum of the zip file is now wrong
    for data in (b"", b"PK\x03\x04 cut off", b"<html>", bytes(whole), bytes(whole[:-9])):
        file.write_bytes(data)
        with pytest.raises(UserError, match=r"CIFAR-10_human\.pt"):
            cifar10(tmp_path)


def test_broken_arrays_of_human_labels(tmp_path: Path) -> None:
    _, y = make10(tmp_path)
    file = tmp_path / "cifar10n.npz"
    np.savez(file, worst=y)
    whole = file.read_bytes()
    np.save(tmp_path / "y.npy", y)
    for data in (b"", whole[:-20], whole[:50], b"hello", (tmp_path / "y.npy").read_bytes()):
        file.write_bytes(data)
        with pytest.raises(
            UserError, match=r"cifar10n\.npz: not a readable file of plain arrays|npz contains a ndarray, not a dict"
        ):
            cifar10(tmp_path)


def test_human_labels_cannot_call_functions(tmp_path: Path) -> None:
    make10(tmp_path)
    victim = tmp_path / "victim"
    torch.save({"worse_label": Calls(os.system, f"touch {victim}")}, tmp_path / "CIFAR-10_human.pt")
    with pytest.raises(UserError, match=r"CIFAR-10_human\.pt: .*\.system.*it was not opened"):
        cifar10(tmp_path)
    (tmp_path / "CIFAR-10_human.pt").unlink()
    np.savez(tmp_path / "cifar10n.npz", worst=np.array([Calls(os.system, f"touch {victim}")] * 20, dtype=object))
    with pytest.raises(UserError, match=r"cifar10n\.npz"):
        cifar10(tmp_path)
    assert not victim.exists()
