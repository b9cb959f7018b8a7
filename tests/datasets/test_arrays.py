"""Arrays of the user (.npz, .npy)."""

import io
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st

from warpi.data.augment import Crop
from warpi.data.dataset import Dataset
from warpi.data.examples import TensorExamples
from warpi.data.split import Split
from warpi.datasets.arrays import read_arrays
from warpi.errors import UserError


def x_of(source: Dataset | Split | None) -> np.ndarray:
    assert source is not None
    assert isinstance(source.examples, TensorExamples)
    return source.examples.x.numpy()


def listed(tensor: torch.Tensor | None) -> list[Any]:
    assert tensor is not None
    return tensor.tolist()


def save(folder: Path, **arrays: Any) -> Path:
    np.savez(folder / "a.npz", **{key: np.asarray(value) for key, value in arrays.items()})
    return folder / "a.npz"


def test_features(tmp_path: Path) -> None:
    x = np.random.default_rng(0).normal(size=(4, 3))
    data = read_arrays(save(tmp_path, x=x, y=[7, 3, 7, 10]))
    assert data.name == "a"
    assert data.classes == ("3", "7", "10")
    assert data.y.tolist() == [1, 0, 1, 2]
    np.testing.assert_array_equal(x_of(data), x.astype(np.float32))
    assert isinstance(data.examples, TensorExamples)
    assert data.examples.crop is None
    assert data.clean is data.trusted is data.test is data.meta is None


@pytest.mark.parametrize("y", [["b", "a", "b"], np.array([b"b", b"a", b"b"]), [[1], [0], [1]], [1.0, 0.0, 1.0]])
def test_label_types(tmp_path: Path, y: Any) -> None:
    assert read_arrays(save(tmp_path, X=np.eye(3), Y=y)).y.tolist() == [1, 0, 1]


def test_all_arrays(tmp_path: Path) -> None:
    file = save(
        tmp_path,
        x=np.eye(3, dtype=np.float32),
        y=[0, 1, 1],
        clean=[-1, 2, 1],
        verified=[0, 1, 0],
        x_test=np.ones((2, 3)),
        y_test=[2, 0],
        x_trusted=np.zeros((1, 3)),
        y_trusted=[1],
        classes=["cat", "dog", "eel"],
        other=np.zeros(9),
    )
    data = read_arrays(file)
    assert data.classes == ("cat", "dog", "eel")
    assert listed(data.clean) == [-1, 2, 1]
    assert listed(data.trusted) == [False, True, False]
    assert data.test is not None
    assert data.test.y.tolist() == [2, 0]
    np.testing.assert_array_equal(x_of(data.test), np.ones((2, 3)))
    assert data.meta is not None
    assert data.meta.y.tolist() == [1]
    assert data.meta.rows.tolist() == [0]


def test_old_names_of_trusted_arrays(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "old.npz"
    np.savez(path, x=np.eye(3), y=[0, 1, 1], X_meta=np.eye(1, 3), y_meta=[1])
    data = read_arrays(path)
    assert data.meta is not None
    assert data.meta.y.tolist() == [1]
    assert caplog.messages == [
        f"{path}: the name 'x_meta' is deprecated; use 'x_trusted'",
        f"{path}: the name 'y_meta' is deprecated; use 'y_trusted'",
    ]


def test_unknown_truth(tmp_path: Path) -> None:
    x = np.eye(3)
    assert listed(read_arrays(save(tmp_path, x=x, y=["p", "q", "p"], clean=["q", "", "p"])).clean) == [1, -1, 0]
    data = read_arrays(save(tmp_path, x=x, y=[0, 1, 0], clean=[1.0, np.nan, 0.0]))
    assert listed(data.clean) == [1, -1, 0]
    assert listed(data.trusted) == [True, False, True]
    assert listed(read_arrays(save(tmp_path, x=x, y=[-1, 1, 1], clean=[1, -1, 1])).clean) == [1, 0, 1]  # a class -1
    assert read_arrays(save(tmp_path, x=x, y=[0, 1, 1], clean=[-1, -1, -1])).clean is None


def test_label_key(tmp_path: Path) -> None:
    file = save(tmp_path, x=np.eye(2), y=[0, 0], coarse=[5, 6])
    assert read_arrays(file, label="coarse").classes == ("5", "6")
    with pytest.raises(UserError, match="no array 'fine'"):
        read_arrays(file, label="fine")


def test_separate_files(tmp_path: Path) -> None:
    np.save(tmp_path / "photos.npy", np.eye(2))
    with pytest.raises(UserError, match=r"photos_labels\.npy and no .*y\.npy; pass --label FILE\.npy"):
        read_arrays(tmp_path / "photos.npy")
    np.save(tmp_path / "y.npy", [1, 0])
    assert read_arrays(tmp_path / "photos.npy").y.tolist() == [1, 0]
    np.save(tmp_path / "photos_labels.npy", [0, 1])
    assert read_arrays(tmp_path / "photos.npy").y.tolist() == [0, 1]
    np.save(tmp_path / "names.npy", ["b", "a"])
    assert read_arrays(tmp_path / "photos.npy", label=str(tmp_path / "names.npy")).y.tolist() == [1, 0]
    assert read_arrays(tmp_path / "photos.npy", label="names.npy").classes == ("a", "b")
    with pytest.raises(UserError, match=r"no labels for .*absent\.npy"):
        read_arrays(tmp_path / "photos.npy", label="absent.npy")


@pytest.mark.parametrize(
    ("shape", "first", "crop"),
    [
        ((16, 16), False, Crop(16, 2)),
        ((16, 16, 3), False, Crop(16, 2)),
        ((3, 16, 16), True, Crop(16, 2)),
        ((16, 16, 1), False, Crop(16, 2)),
        ((1, 16, 16), True, Crop(16, 2)),
        ((12, 16, 3), False, None),
        ((3, 12, 16), True, None),
        ((3, 3, 1), False, Crop(3, 0)),  # 1 or 3 at both ends: the square reading
        ((3, 1, 1), True, Crop(1, 0)),
        ((3, 3, 3), True, Crop(3, 0)),  # both are square: channels first
        ((1, 5, 3), True, None),  # neither is square: channels first
    ],
)
def test_images(tmp_path: Path, shape: tuple[int, ...], first: bool, crop: Crop | None) -> None:
    x = np.random.default_rng(1).integers(0, 256, (6, *shape), dtype=np.uint8)
    data = read_arrays(save(tmp_path, x=x, y=[0, 1] * 3))
    expected = x[:, None] if len(shape) == 2 else x if first else np.moveaxis(x, 3, 1)
    assert isinstance(data.examples, TensorExamples)
    assert data.examples.x.dtype == torch.uint8
    np.testing.assert_array_equal(x_of(data), expected)
    assert data.examples.crop == crop
    assert data.examples.shape == expected.shape[1:]
    for actual, naive in zip(data.examples.scale, (np.mean, np.std), strict=True):
        assert actual.shape == (expected.shape[1], 1, 1)
        np.testing.assert_allclose(actual.flatten(), naive(expected.astype(np.float64), axis=(0, 2, 3)), rtol=1e-5)


def test_all_parts_have_the_same_scale(tmp_path: Path) -> None:
    x = np.random.default_rng(1).integers(0, 256, (6, 8, 8, 3), dtype=np.uint8)
    file = save(tmp_path, x=x, y=[0, 1] * 3, x_test=x[:2] // 2, y_test=[0, 1])
    data = read_arrays(file)
    assert data.test is not None
    assert isinstance(data.examples, TensorExamples)
    assert isinstance(data.test.examples, TensorExamples)
    assert data.test.examples.scale is data.examples.scale
    second = read_arrays(save(tmp_path, x=x[:1] // 3, y=[1]), like=data)
    assert isinstance(second.examples, TensorExamples)
    assert second.examples.scale is data.examples.scale
    assert second.classes == ("0", "1")
    flat = np.full((4, 8, 8), 7, np.uint8)  # a constant image
    constant = read_arrays(save(tmp_path, x=flat, y=[0, 1] * 2)).examples
    assert next(iter(constant.stream([(torch.arange(4), 0)], augment=False))).views[0].abs().max() == 0


def test_second_file_is_read_like_the_first(tmp_path: Path) -> None:
    first = read_arrays(save(tmp_path, x=np.eye(3), y=[0, 1, 1], classes=["cat", "dog"]))
    assert read_arrays(save(tmp_path, x=np.ones((1, 3)), y=[1]), like=first).y.tolist() == [1]
    assert read_arrays(save(tmp_path, x=np.ones((1, 3)), y=["dog"]), like=first).y.tolist() == [1]
    for arrays, what in (
        ({"x": np.ones((1, 3)), "y": [2]}, "unknown class in .*row 0 of train: '2'"),
        ({"x": np.ones((1, 3)), "y": ["dig"]}, "'dig'; did you mean 'dog'"),
        ({"x": np.ones((1, 4)), "y": [1]}, r"input of train is float32 \[4\], expected float32 \[3\]"),
        ({"x": np.ones((1, 8, 8), np.uint8), "y": [1]}, r"uint8 \[1, 8, 8\], expected float32 \[3\]"),
    ):
        with pytest.raises(UserError, match=what):
            read_arrays(save(tmp_path, **arrays), like=first)
    names = read_arrays(save(tmp_path, x=np.eye(2), y=[5, 9]))
    assert read_arrays(save(tmp_path, x=np.ones((1, 2)), y=[9]), like=names).y.tolist() == [1]  # the numbers are names


@pytest.mark.parametrize(
    ("arrays", "what"),
    [
        ({"y": [1]}, "no array 'x'; arrays: y"),
        ({"x": np.eye(2)}, "no array 'y'; arrays: x"),
        ({"x": np.eye(2), "X": np.eye(2), "y": [0, 1]}, "more than one array 'x'"),
        ({"x": np.eye(2), "y": [0, 1, 1]}, "y has 3 rows, but the inputs have 2"),
        ({"x": np.eye(2), "y": [0, 1], "clean": [1]}, "clean has 1 row, but the inputs have 2"),
        ({"x": np.eye(2), "y": [0, 1], "verified": [1]}, "verified has 1 row, but the inputs have 2"),
        ({"x": np.eye(2), "y": [0, 1], "verified": [1, 2]}, "value of 'verified' in .*row 1: '2'"),
        ({"x": np.eye(2), "y": [0, 1], "x_test": np.eye(2)}, "must contain both x_test and y_test"),
        ({"x": np.eye(2), "y": [0, 1], "x_trusted": np.eye(3), "y_trusted": [0, 1, 1]}, r"input of trusted is .*\[3\]"),
        ({"x": np.eye(2), "y": [0, 1.5]}, r"y: row 1 contains 1\.5; labels must be integers"),
        ({"x": np.eye(2), "y": [0, np.nan]}, "row 1 of y has no label"),
        ({"x": np.eye(2), "y": [0, np.inf]}, "row 1 contains inf"),
        ({"x": np.eye(2), "y": ["a", ""]}, "row 1 of y has no label"),
        ({"x": np.eye(2), "y": [[0, 1], [1, 0]]}, r"y must be integers or text, one per row; got int64 \[2, 2\]"),
        ({"x": np.eye(2), "y": [1j, 2]}, "must be integers"),
        ({"x": np.eye(2), "y": [0, 2], "classes": ["p", "q"]}, "row 1 of train: '2'; allowed: 0, 1, p, q"),
        ({"x": np.eye(2), "y": [0, -1], "classes": ["p", "q"]}, "row 1 of train: '-1'"),
        ({"x": np.eye(2), "y": [0, 1], "classes": ["p", "p"]}, "must be different names"),
        (
            {"x": [[1, np.nan], [0, 1]], "y": [0, 1]},
            "column 1 contains nan; cells that are not finite numbers: 1 in 1 column;",
        ),
        (
            {"x": [[1, np.nan], [np.nan, np.nan]], "y": [0, 1]},
            "column 1 contains nan; cells that are not finite numbers: 3 in 2 columns",
        ),
        ({"x": np.eye(3), "y": ["a", "nan", "nan"]}, r"'y' contains the label 'nan' \(2 rows\), .* a missing label"),
        ({"x": np.eye(60), "y": range(60)}, "'y' contains 60 different numbers in 60 rows .* looks like a quantity"),
        ({"x": [[1, 1e300], [0, 1]], "y": [0, 1]}, r"row 0, column 1 contains 1e\+300"),
        ({"x": [1.0, 2.0], "y": [0, 1]}, r"x is float64 \[2\]; it must contain"),
        ({"x": np.zeros((2, 8, 8)), "y": [0, 1]}, r"x is float64 \[2, 8, 8\]; it must contain"),
        ({"x": np.zeros((2, 8, 8, 4), np.uint8), "y": [0, 1]}, r"x is uint8 \[2, 8, 8, 4\]; it must contain"),
        ({"x": np.zeros((0, 3)), "y": []}, r"x is float64 \[0, 3\]"),
        ({"x": [["a", "b"]], "y": [0]}, "must contain numbers"),
        ({"x": np.array([{}], dtype=object), "y": [0]}, "objects are rejected"),
        ({"x": np.eye(2), "y": np.array(["a", 1], dtype=object)}, "objects are rejected"),
    ],
)
def test_broken_arrays(tmp_path: Path, arrays: dict[str, Any], what: str) -> None:
    file = save(tmp_path, **arrays)
    with pytest.raises(UserError, match=what) as e:
        read_arrays(file)
    assert str(file) in str(e.value)


def test_broken_array_files(tmp_path: Path) -> None:
    file = save(tmp_path, x=np.eye(20), y=range(20))
    whole = file.read_bytes()
    for data in (b"", whole[:100], whole[:-30], b"hello world", b"PK\x03\x04"):
        file.write_bytes(data)
        with pytest.raises(UserError, match=r"a\.npz"):
            read_arrays(file)
    np.save(tmp_path / "x.npy", np.array([{}], dtype=object), allow_pickle=True)
    np.save(tmp_path / "y.npy", [0])
    with pytest.raises(UserError, match=r"x\.npy: not a readable file of plain arrays; objects are rejected"):
        read_arrays(tmp_path / "x.npy")
    (tmp_path / "x.npy").write_bytes(whole)
    with pytest.raises(UserError, match=r"x\.npy: not a \.npy file"):
        read_arrays(tmp_path / "x.npy")


def saved(save: Any, *args: Any, **arrays: Any) -> bytes:
    file = io.BytesIO()
    save(file, *args, **arrays)
    return file.getvalue()


WHOLE = (
    saved(np.savez, x=np.eye(3), y=np.arange(3)),
    saved(np.savez_compressed, x=np.eye(3), y=np.arange(3)),
    saved(np.save, np.arange(9.0).reshape(3, 3)),
)


def changed(whole: bytes, mark: bytes, offset: int, new: bytes) -> bytes:
    at = whole.index(mark) + offset
    return whole[:at] + new + whole[at + len(new) :]


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("a.npy", changed(WHOLE[2], b"(3, 3)", 0, b"(3, 3 ")),  # an unclosed bracket
        ("a.npy", changed(WHOLE[2], b"(3, 3)", 0, b"(03,3)")),  # not a Python number
        ("a.npy", changed(WHOLE[2], b"(3, 3)", 0, b"(3,93)")),  # fewer numbers than declared
        ("a.npz", changed(WHOLE[1], b"x.npy", 40, b"\xff" * 10)),  # damaged compressed data
        ("a.npz", changed(WHOLE[0], b"PK\x01\x02", 8, b"\x01")),  # encrypted
        ("a.npz", changed(WHOLE[0], b"PK\x01\x02", 10, b"\x63")),  # unknown compression
        ("a.npz", changed(WHOLE[0], b"NUMPY", 80, b"x")),  # a wrong checksum
    ],
)
def test_damaged_files(tmp_path: Path, name: str, data: bytes) -> None:
    (tmp_path / name).write_bytes(data)
    np.save(tmp_path / "y.npy", np.arange(3))
    with pytest.raises(UserError, match=rf"{name}: not a readable file of plain arrays; objects are rejected \("):
        read_arrays(tmp_path / name)


@given(st.sampled_from(WHOLE), st.integers(0, 10_000), st.integers(0, 255), st.integers(0, 40))
@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_damage_gives_data_or_an_error(tmp_path: Path, whole: bytes, place: int, value: int, cut: int) -> None:
    data = bytearray(whole)
    data[place % len(data)] = value
    file = tmp_path / ("a.npy" if whole is WHOLE[2] else "a.npz")
    file.write_bytes(data[: len(data) - cut])
    np.save(tmp_path / "y.npy", np.arange(3))
    message = str(file)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of numpy about Python 2 headers
        try:
            read_arrays(file)
        except UserError as e:
            message = str(e)
    assert str(file) in message
    assert "\n" not in message


def test_files_without_permission(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = save(tmp_path, x=np.eye(2), y=[0, 1])
    for name in ("x.npy", "y.npy"):
        np.save(tmp_path / name, np.arange(2))
    with pytest.raises(UserError, match=r"the suffix must be one of \.npz, \.npy, got '\.csv'"):
        read_arrays(tmp_path / "t.csv")
    with pytest.raises(UserError, match="there is no file"):
        read_arrays(tmp_path / "absent.npz")

    def denied(path: object, *_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(io, "open", denied)  # root can read all files
    for path in (file, tmp_path / "x.npy"):
        with pytest.raises(UserError, match=rf"cannot read {path}: Permission denied; check"):
            read_arrays(path)
