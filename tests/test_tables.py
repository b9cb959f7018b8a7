"""Tables and arrays of the user's own."""

import csv
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from warpi.data.augment import Crop
from warpi.data.dataset import Dataset
from warpi.data.examples import TensorExamples
from warpi.data.split import Split
from warpi.data.tables import Columns, read_arrays, read_table
from warpi.data.toy import digits
from warpi.errors import UserError

pd = pytest.importorskip("pandas")


@pytest.fixture
def table(tmp_path: Path) -> Callable[..., Path]:
    def write(text: str | bytes, name: str = "t.csv") -> Path:
        file = tmp_path / name
        file.write_bytes(text.encode() if isinstance(text, str) else text)
        return file

    return write


def x_of(source: Dataset | Split | None) -> np.ndarray:
    assert source is not None
    assert isinstance(source.examples, TensorExamples)
    return source.examples.x.numpy()


def listed(tensor: torch.Tensor | None) -> list[Any]:
    assert tensor is not None
    return tensor.tolist()


# -- tables -----------------------------------------------------------------------------------------------------------


def test_numbers_and_categories(table: Callable[..., Path]) -> None:
    data = read_table(table("age,colour,ok,label\n1.5,red,True,dog\n-2e1,blue,False,cat\n3,red,True,dog\n"))
    assert data.name == "t"
    assert data.classes == ("cat", "dog")
    assert data.y.tolist() == [1, 0, 1]
    #                                  age  blue red False True
    np.testing.assert_array_equal(x_of(data), [[1.5, 0, 1, 0, 1], [-20, 1, 0, 1, 0], [3, 0, 1, 0, 1]])
    assert x_of(data).dtype == np.float32
    assert isinstance(data.examples, TensorExamples)
    assert data.examples.standardise
    assert data.encoding == Columns("label", {"age": None, "colour": ("blue", "red"), "ok": ("False", "True")})
    assert data.clean is data.trusted is data.test is data.meta is None


@pytest.mark.parametrize(
    "text",
    [
        "\ufeffa,b,label\n1,x,p\n2,y y,q\n",
        "a,b,label\r\n1,x,p\r\n2,y y,q\r\n",
        "a,b,label\r1,x,p\r2,y y,q",
        'a, "b" ,label\n"1","x","p"\n 2 ,"y y",q\n'.replace(' "b" ', ' "b"'),
        "\na,b,label\n\n1,x,p\n\n2,y y,q\n\n",
    ],
)
def test_ways_to_write_a_csv(table: Callable[..., Path], text: str) -> None:
    data = read_table(table(text))
    np.testing.assert_array_equal(x_of(data), [[1, 1, 0], [2, 0, 1]])
    assert data.classes == ("p", "q")
    assert isinstance(data.encoding, Columns)
    assert data.encoding.categories == {"a": None, "b": ("x", "y y")}


def test_quotes_unicode_and_tabs(table: Callable[..., Path]) -> None:
    data = read_table(table('a,Größe,label\n1,"groß, ""sehr""",猫\n2,"zwei\nZeilen",犬\n'))
    assert isinstance(data.encoding, Columns)
    assert data.encoding.categories["Größe"] == ('groß, "sehr"', "zwei\nZeilen")
    assert data.classes == ("犬", "猫")
    data = read_table(table("a\tb\tlabel\n1\tx, y\tp\n2\tz\tq\n", "t.tsv"))
    assert isinstance(data.encoding, Columns)
    assert data.encoding.categories["b"] == ("x, y", "z")


def test_classes_in_order(table: Callable[..., Path]) -> None:
    assert read_table(table("a,label\n1,10\n2,9\n3,-1\n")).classes == ("-1", "9", "10")
    assert read_table(table("a,label\n1,10\n2,9\n3,b\n")).classes == ("10", "9", "b")
    assert read_table(table("a,label\n1,007\n2,12\n")).classes == ("007", "12")  # spelling is kept
    assert read_table(table("a,label\n1,1.0\n2,0.0\n3,1\n")).classes == ("0", "1")
    assert read_table(table("a,label\n1,True\n2,False\n")).classes == ("False", "True")
    assert read_table(table("a,label\n1,none\n2,some\n")).classes == ("none", "some")
    assert read_table(table("a,kind\n1,p\n2,q\n"), label="kind").classes == ("p", "q")


def test_truth_columns(table: Callable[..., Path]) -> None:
    """Blanks of clean_label are unknown; a class may appear there alone; whole numbers may be written as floats."""
    data = read_table(table("a,label,clean_label\n1,0,\n2,1,2.0\n3,0,0.0\n"))
    assert data.classes == ("0", "1", "2")
    assert listed(data.clean) == [-1, 2, 0]
    assert listed(data.trusted) == [False, True, True]
    assert x_of(data).shape == (3, 1)

    data = read_table(table("a,label,clean_label\n1,0,0\n2,1,0\n"))
    assert listed(data.clean) == [0, 0]
    assert data.trusted is None  # all filled: nothing says which of them were checked

    data = read_table(table("a,label,clean_label\n1,p,\n2,q,\n"))
    assert data.clean is None
    assert data.trusted is None

    data = read_table(table("a,label,clean_label,verified\n1,p,,yes\n2,q,p,0\n3,q,NA,\n4,q,,TRUE\n"))
    assert listed(data.clean) == [-1, 0, -1, -1]
    assert listed(data.trusted) == [True, False, False, True]

    data = read_table(table("a,label,verified\n1,p,1.0\n2,q,\n"))
    assert data.clean is None
    assert listed(data.trusted) == [True, False]


def test_split_column(table: Callable[..., Path]) -> None:
    data = read_table(
        table("a,c,label,clean_label,split\n1,u,p,,train\n2,v,q,p,test\n3,w,q,,Test\n4,u,p,,train\n5,u,p,q,meta\n")
    )
    assert data.y.tolist() == [0, 0]
    np.testing.assert_array_equal(x_of(data), [[1, 1, 0, 0], [4, 1, 0, 0]])
    assert data.test is not None
    assert data.test.rows.tolist() == [0, 1]
    assert data.test.y.tolist() == [0, 1]  # the true label where there is one
    np.testing.assert_array_equal(x_of(data.test), [[2, 0, 1, 0], [3, 0, 0, 1]])
    assert data.meta is not None
    assert data.meta.y.tolist() == [1]
    assert data.clean is None  # nothing is known about the training rows


def test_a_second_table_is_read_like_the_first(table: Callable[..., Path]) -> None:
    first = read_table(table("a,c,n,kind\n1,u,5,p\n2,v,6,q\n3,7,7,r\n"), label="kind")
    second = read_table(table("kind,n,c,a\nq,1,7,9\n", "s.csv"), like=first)  # other order, '7' looks like a number
    assert second.classes == ("p", "q", "r")
    assert second.y.tolist() == [1]
    np.testing.assert_array_equal(x_of(second), [[9, 1, 0, 0, 1]])  # a, c=7, c=u, c=v, n
    assert second.encoding == first.encoding
    for text, what in (
        ("kind,n,c\nq,1,u\n", "it lacks 'a'"),
        ("kind,n,c,a,z,w\nq,1,u,1,1,1\n", "it adds 'z', 'w'"),
        ("kind,n,C,a\nq,1,u,1\n", "it lacks 'c' and adds 'C'"),
        ("kind,n,c,a\nq,1,uu,1\n", r"value of column 'c' .*row 0 \(line 2\): 'uu'; did you mean 'u'"),
        ("kind,n,c,a\nq,1,u,1\nq,1,u,one\n", r"row 1 \(line 3\): column 'a' holds 'one', numbers in the first"),
        ("kind,n,c,a\nqq,1,u,1\n", r"unknown class in .*row 0 \(line 2\): 'qq'; did you mean 'q'"),
        ("a,c,n,label\n1,u,5,p\n", "no column 'kind'"),
    ):
        with pytest.raises(UserError, match=what):
            read_table(table(text, "s.csv"), like=first)
    with pytest.raises(UserError, match="digits is not; give both in the same form"):
        read_table(table("a,label\n1,1\n"), like=digits())


def test_given_classes(table: Callable[..., Path]) -> None:
    file = table("a,label\n1,p\n2,q\n")
    assert read_table(file, classes=("q", "p", "o")).y.tolist() == [1, 0]
    with pytest.raises(UserError, match=r"unknown class .*'q'"):
        read_table(file, classes=("p", "o"))


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("", "at least one row"),
        ("a,label\n", "at least one row"),
        ("a,lable\n1,2\n", r"no column 'label' \(did you mean 'lable'\?\); columns: a, lable; .*--label"),
        ("a,z\n1,2\n", r"no column 'label'; columns: a, z"),
        ("label,split\n1,train\n", "no column is left to learn from"),
        ("a,a,label\n1,2,3\n", "columns 1 and 2 are both called 'a'"),
        (",a,label\n0,1,2\n", "column 1 has no name"),
        ("a,label\n1,p\n2,q,r\n", "line 3 has 3 cells, the first has 2"),
        ("a,label\n1,p\n2\n", "line 3 has 1 cells, the first has 2"),
        ('a,label\n1,p\n"2,q\n', r"line 3: .*quote"),
        ('a,label\n1,"p"x\n', "line 2: "),
        ("a,label\n1,p\n,q\n", r"row 1 \(line 3\): column 'a' is empty"),
        ("a,label\n1,p\nnan,q\n", r"row 1 \(line 3\): column 'a' holds nan"),
        ("a,label\n1,p\nNA,q\n", r"row 1 \(line 3\): column 'a' holds NA"),
        ("a,label\n-inf,p\n1,q\n", r"row 0 \(line 2\): column 'a' holds -inf"),
        ("a,label\n1e39,p\n1,q\n", r"row 0 \(line 2\): column 'a' holds 1e39"),  # too large for float32
        ("a,b,label\n1,x,p\n2,,q\n", r"row 1 \(line 3\): column 'b' is empty"),
        ('a,label\n"1\n",p\n\n1, \n', r"row 1 \(line 5\): column 'label' is empty"),
        ("a,label\n1,1\n1,nan\n", r"row 1 \(line 3\): column 'label' is empty"),
        ("a,label,verified\n1,p,maybe\n", r"value of 'verified' in .*row 0 \(line 2\): 'maybe'"),
        ("a,label,split\n1,p,trian\n", r"value of 'split' in .*row 0 \(line 2\): 'trian'; did you mean 'train'"),
        ("a,label,split\n1,p,test\n", "no row has the split 'train'"),
        (b"a,label\n1,p\n2,\xe9t\xe9\n", "line 3 is not UTF-8"),
        ("a,label\n1,p\n".encode("utf-16"), "line 1 is not UTF-8"),
    ],
)
def test_broken_tables(table: Callable[..., Path], text: str | bytes, what: str) -> None:
    file = table(text)
    with pytest.raises(UserError, match=what) as e:
        read_table(file)
    assert str(file) in str(e.value)


def test_too_many_categories(table: Callable[..., Path]) -> None:
    rows = [f"{k},id{k},p" for k in range(1001)]
    with pytest.raises(UserError, match=r"column 'name' is text with 1001 distinct values.*drop the column"):
        read_table(table("\n".join(["a,name,label", *rows])))
    assert x_of(read_table(table("\n".join(["a,name,label", *rows[:1000]])))).shape == (1000, 1001)


def test_words_that_python_takes_for_numbers(table: Callable[..., Path]) -> None:
    data = read_table(table("a,label\n1_0,p\n10,q\n"))
    assert isinstance(data.encoding, Columns)
    assert data.encoding.categories == {"a": ("10", "1_0")}


def test_no_such_file(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="there is no file"):
        read_table(tmp_path / "absent.csv")
    with pytest.raises(UserError, match=r"ends in '\.xls', allowed are \.csv, \.tsv, \.parquet"):
        read_table(tmp_path / "t.xls")
    with pytest.raises(UserError, match=r"ends in '\.csv', allowed are \.npz, \.npy"):
        read_arrays(tmp_path / "t.csv")


def test_parquet_reads_as_csv_does(tmp_path: Path) -> None:
    frame = pd.DataFrame(
        {
            "a": [1, 2, 3],
            "b": [0.5, -1.0, 2.0],
            "code": ["1", "2", "1"],  # declared as text
            "kind": pd.Categorical(["v", "u", "v"]),
            "ok": [True, False, True],
            "whole": pd.array([1, 2, 3], dtype="Int64"),
            "label": [10, 9, 10],
            "clean_label": [None, 9, 11],
            "verified": [None, True, False],
        }
    )
    frame.to_parquet(tmp_path / "t.parquet")
    data = read_table(tmp_path / "t.parquet")
    assert isinstance(data.encoding, Columns)
    assert data.encoding.categories == {
        "a": None, "b": None, "code": ("1", "2"), "kind": ("u", "v"), "ok": ("False", "True"), "whole": None,
    }  # fmt: skip
    np.testing.assert_array_equal(x_of(data)[1], [2, -1, 0, 1, 1, 0, 1, 0, 2])
    assert data.classes == ("9", "10", "11")
    assert data.y.tolist() == [1, 0, 1]
    assert listed(data.clean) == [-1, 0, 2]
    assert listed(data.trusted) == [False, True, False]
    frame.to_csv(tmp_path / "second.csv", index=False)
    second = read_table(tmp_path / "second.csv", like=data)  # a second file in the other form
    np.testing.assert_array_equal(x_of(second), x_of(data))
    assert listed(second.clean) == listed(data.clean)


def test_broken_parquet(tmp_path: Path) -> None:
    file = tmp_path / "t.parquet"
    for columns, what in (
        ({"a": [1.0, None], "label": ["p", "q"]}, "row 1: column 'a' holds nan"),
        ({"a": ["x", None], "label": ["p", "q"]}, "row 1: column 'a' is empty"),
        ({"a": [1, 2], "label": ["p", None]}, "row 1: column 'label' is empty"),
        ({"a": [1, 2], "label": [1.0, None]}, "row 1: column 'label' is empty"),
        (
            {"a": pd.to_datetime(["2020-01-01", "2020-01-02"]), "label": [1, 2]},
            "column 'a' holds values of type datetime64",
        ),
        ({"a": [[1], [2]], "label": [1, 2]}, "column 'a' holds values of type mixed"),
        ({"a": [], "label": []}, "no rows"),
    ):
        pd.DataFrame(columns).to_parquet(file)
        with pytest.raises(UserError, match=what):
            read_table(file)
    file.write_bytes(b"PAR1 or not")
    with pytest.raises(UserError, match="not a readable parquet file"):
        read_table(file)


def test_large_whole_numbers_stay_apart_as_labels(tmp_path: Path) -> None:
    pd.DataFrame({"a": [1, 2], "label": [2**60, 2**60 + 1]}).to_parquet(tmp_path / "t.parquet")
    assert read_table(tmp_path / "t.parquet").classes == (str(2**60), str(2**60 + 1))


def test_without_pandas(tmp_path: Path, table: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    pd.DataFrame({"a": [1], "label": [1]}).to_parquet(tmp_path / "t.parquet")
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(UserError, match=r"needs the package 'pandas'.*warpi\[tables\]"):
        read_table(tmp_path / "t.parquet")
    assert len(read_table(table("a,label\n1,p\n")).y) == 1  # .csv does without


# csv.writer does not quote a lone carriage return, which is the end of a line to any reader.
TEXT = st.text(st.characters(codec="utf-8", exclude_characters="\0\r"), max_size=6)
WORDS = TEXT.map(lambda text: "w" + text.strip() + "w")  # no blanks at the ends, not a number
NUMBERS = st.floats(width=32, allow_nan=False, allow_infinity=False)


@st.composite
def tables(draw: st.DrawFn) -> tuple[list[str], list[list[Any]], list[str]]:
    """Names, columns of numbers or words, labels."""
    n = draw(st.integers(1, 8))
    names = draw(st.lists(WORDS, min_size=1, max_size=4, unique=True))
    columns = [draw(st.lists(draw(st.sampled_from([NUMBERS, WORDS])), min_size=n, max_size=n)) for _ in names]
    return names, columns, draw(st.lists(WORDS, min_size=n, max_size=n))


@given(tables(), st.sampled_from([",", "\t"]), st.sampled_from(["\n", "\r\n"]), st.sampled_from(["utf-8", "utf-8-sig"]))
@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_csv_round_trip(
    tmp_path: Path, made: tuple[list[str], list[list[Any]], list[str]], delimiter: str, end: str, encoding: str
) -> None:
    names, columns, labels = made
    file = tmp_path / ("t.tsv" if delimiter == "\t" else "t.csv")
    with file.open("w", newline="", encoding=encoding) as f:
        writer = csv.writer(f, delimiter=delimiter, lineterminator=end)
        writer.writerow([*names, "label"])
        writer.writerows(zip(*columns, labels, strict=True))
    data = read_table(file)
    assert [data.classes[k] for k in data.y.tolist()] == labels
    assert list(data.classes) == sorted(set(labels))
    assert isinstance(data.encoding, Columns)
    x, start = x_of(data), 0
    for name, column in zip(names, columns, strict=True):
        categories = data.encoding.categories[name]
        if isinstance(column[0], float):
            assert categories is None
            assert x[:, start].tolist() == column
            start += 1
            continue
        assert categories == tuple(sorted(set(column)))
        block = x[:, start : start + len(categories)]
        assert (block.sum(1) == 1).all()
        assert [categories[k] for k in block.argmax(1)] == column
        start += len(categories)
    assert start == x.shape[1]
    np.testing.assert_array_equal(x_of(read_table(file, like=data)), x)


# -- arrays -----------------------------------------------------------------------------------------------------------


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
    assert data.examples.standardise
    assert data.examples.crop is None
    assert data.clean is data.trusted is data.test is data.meta is None


@pytest.mark.parametrize("y", [["b", "a", "b"], np.array([b"b", b"a", b"b"]), [[1], [0], [1]], [1.0, 0.0, 1.0]])
def test_forms_of_labels(tmp_path: Path, y: Any) -> None:
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
        x_meta=np.zeros((1, 3)),
        y_meta=[1],
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


def test_unknown_truth(tmp_path: Path) -> None:
    x = np.eye(3)
    assert listed(read_arrays(save(tmp_path, x=x, y=["p", "q", "p"], clean=["q", "", "p"])).clean) == [1, -1, 0]
    data = read_arrays(save(tmp_path, x=x, y=[0, 1, 0], clean=[1.0, np.nan, 0.0]))
    assert listed(data.clean) == [1, -1, 0]
    assert listed(data.trusted) == [True, False, True]
    assert listed(read_arrays(save(tmp_path, x=x, y=[-1, 1, 1], clean=[1, -1, 1])).clean) == [1, 0, 1]  # a class -1
    assert read_arrays(save(tmp_path, x=x, y=[0, 1, 1], clean=[-1, -1, -1])).clean is None


def test_another_key_for_the_labels(tmp_path: Path) -> None:
    file = save(tmp_path, x=np.eye(2), y=[0, 0], coarse=[5, 6])
    assert read_arrays(file, label="coarse").classes == ("5", "6")
    with pytest.raises(UserError, match="no array 'fine'"):
        read_arrays(file, label="fine")


def test_separate_files(tmp_path: Path) -> None:
    np.save(tmp_path / "photos.npy", np.eye(2))
    with pytest.raises(UserError, match=r"photos_labels\.npy and no .*y\.npy; give --label FILE\.npy"):
        read_arrays(tmp_path / "photos.npy")
    np.save(tmp_path / "y.npy", [1, 0])
    assert read_arrays(tmp_path / "photos.npy").y.tolist() == [1, 0]
    np.save(tmp_path / "photos_labels.npy", [0, 1])
    assert read_arrays(tmp_path / "photos.npy").y.tolist() == [0, 1]
    np.save(tmp_path / "mine.npy", ["b", "a"])
    assert read_arrays(tmp_path / "photos.npy", label=str(tmp_path / "mine.npy")).y.tolist() == [1, 0]
    assert read_arrays(tmp_path / "photos.npy", label="mine.npy").classes == ("a", "b")
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
        ((3, 3, 1), False, Crop(3, 0)),  # a 1 or 3 at both ends: the reading that is square
        ((3, 1, 1), True, Crop(1, 0)),
        ((3, 3, 3), True, Crop(3, 0)),  # both are: channels first
        ((1, 5, 3), True, None),  # neither is: channels first
    ],
)
def test_images(tmp_path: Path, shape: tuple[int, ...], first: bool, crop: Crop | None) -> None:
    x = np.random.default_rng(1).integers(0, 256, (6, *shape), dtype=np.uint8)
    data = read_arrays(save(tmp_path, x=x, y=[0, 1] * 3))
    want = x[:, None] if len(shape) == 2 else x if first else np.moveaxis(x, 3, 1)
    assert isinstance(data.examples, TensorExamples)
    assert data.examples.x.dtype == torch.uint8
    np.testing.assert_array_equal(x_of(data), want)
    assert data.examples.crop == crop
    assert not data.examples.standardise
    assert data.examples.shape == want.shape[1:]
    for got, naive in zip(data.examples.scale, (np.mean, np.std), strict=True):
        assert got.shape == (want.shape[1], 1, 1)
        np.testing.assert_allclose(got.flatten(), naive(want.astype(np.float64), axis=(0, 2, 3)), rtol=1e-5)


def test_images_of_test_and_meta_share_the_scale(tmp_path: Path) -> None:
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
    flat = np.full((4, 8, 8), 7, np.uint8)  # a constant image has no deviation
    constant = read_arrays(save(tmp_path, x=flat, y=[0, 1] * 2)).examples
    assert next(iter(constant.stream([(torch.arange(4), 0)], augment=False))).views[0].abs().max() == 0


def test_a_second_file_is_read_like_the_first(tmp_path: Path) -> None:
    first = read_arrays(save(tmp_path, x=np.eye(3), y=[0, 1, 1], classes=["cat", "dog"]))
    assert read_arrays(save(tmp_path, x=np.ones((1, 3)), y=[1]), like=first).y.tolist() == [1]
    assert read_arrays(save(tmp_path, x=np.ones((1, 3)), y=["dog"]), like=first).y.tolist() == [1]
    for arrays, what in (
        ({"x": np.ones((1, 3)), "y": [2]}, "unknown class in .*row 0 of train: '2'"),
        ({"x": np.ones((1, 3)), "y": ["dig"]}, "'dig'; did you mean 'dog'"),
        ({"x": np.ones((1, 4)), "y": [1]}, r"input of train is torch\.float32 \[4\], expected torch\.float32 \[3\]"),
        ({"x": np.ones((1, 8, 8), np.uint8), "y": [1]}, r"torch\.uint8 \[1, 8, 8\], expected torch\.float32 \[3\]"),
    ):
        with pytest.raises(UserError, match=what):
            read_arrays(save(tmp_path, **arrays), like=first)
    names = read_arrays(save(tmp_path, x=np.eye(2), y=[5, 9]))
    assert read_arrays(save(tmp_path, x=np.ones((1, 2)), y=[9]), like=names).y.tolist() == [1]  # numbers are names


@pytest.mark.parametrize(
    ("arrays", "what"),
    [
        ({"y": [1]}, "no array 'x'; arrays: y"),
        ({"x": np.eye(2)}, "no array 'y'; arrays: x"),
        ({"x": np.eye(2), "X": np.eye(2), "y": [0, 1]}, "more than one array 'x'"),
        ({"x": np.eye(2), "y": [0, 1, 1]}, "y has 3 rows, the inputs have 2"),
        ({"x": np.eye(2), "y": [0, 1], "clean": [1]}, "clean has 1 rows, the inputs have 2"),
        ({"x": np.eye(2), "y": [0, 1], "verified": [1]}, "verified has 1 rows, the inputs have 2"),
        ({"x": np.eye(2), "y": [0, 1], "verified": [1, 2]}, "value of 'verified' in .*row 1: '2'"),
        ({"x": np.eye(2), "y": [0, 1], "x_test": np.eye(2)}, "x_test and y_test come together"),
        ({"x": np.eye(2), "y": [0, 1], "x_meta": np.eye(3), "y_meta": [0, 1, 1]}, r"input of meta is .*\[3\]"),
        ({"x": np.eye(2), "y": [0, 1.5]}, r"y: row 1 holds 1\.5; labels must be whole"),
        ({"x": np.eye(2), "y": [0, np.nan]}, "row 1 of y has no label"),
        ({"x": np.eye(2), "y": [0, np.inf]}, "row 1 holds inf"),
        ({"x": np.eye(2), "y": ["a", ""]}, "row 1 of y has no label"),
        ({"x": np.eye(2), "y": [[0, 1], [1, 0]]}, r"y must be whole numbers or text, one a row; got int64 \[2, 2\]"),
        ({"x": np.eye(2), "y": [1j, 2]}, "must be whole numbers"),
        ({"x": np.eye(2), "y": [0, 2], "classes": ["p", "q"]}, "row 1 of train: '2'; allowed: 0, 1, p, q"),
        ({"x": np.eye(2), "y": [0, -1], "classes": ["p", "q"]}, "row 1 of train: '-1'"),
        ({"x": np.eye(2), "y": [0, 1], "classes": ["p", "p"]}, "names that differ"),
        ({"x": [[1, np.nan], [0, 1]], "y": [0, 1]}, "x: row 0, column 1 holds nan"),
        ({"x": [[1, 1e300], [0, 1]], "y": [0, 1]}, r"row 0, column 1 holds 1e\+300"),
        ({"x": [1.0, 2.0], "y": [0, 1]}, r"x is float64 \[2\]; allowed are"),
        ({"x": np.zeros((2, 8, 8)), "y": [0, 1]}, r"x is float64 \[2, 8, 8\]; allowed are"),
        ({"x": np.zeros((2, 8, 8, 4), np.uint8), "y": [0, 1]}, r"x is uint8 \[2, 8, 8, 4\]; allowed are"),
        ({"x": np.zeros((0, 3)), "y": []}, r"x is float64 \[0, 3\]"),
        ({"x": [["a", "b"]], "y": [0]}, "allowed are numbers"),
        ({"x": np.array([{}], dtype=object), "y": [0]}, "objects are refused"),
        ({"x": np.eye(2), "y": np.array(["a", 1], dtype=object)}, "objects are refused"),
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
    with pytest.raises(UserError, match=r"x\.npy: not a readable file of plain arrays, objects are refused"):
        read_arrays(tmp_path / "x.npy")
    (tmp_path / "x.npy").write_bytes(whole)
    with pytest.raises(UserError, match=r"x\.npy: not a \.npy file"):
        read_arrays(tmp_path / "x.npy")
