"""Tables of the user (.csv, .tsv, .parquet)."""

import csv
import io
import sys
from collections.abc import Callable
from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st

from warpi.data.dataset import Dataset, NewInputs
from warpi.data.examples import TensorExamples
from warpi.data.numeric import CategoryColumn, Columns, DateColumn, NumberColumn
from warpi.data.sparse import SparseExamples
from warpi.data.split import Split
from warpi.datasets import tables as tables_module
from warpi.datasets.columns.copied import read_table_cells
from warpi.datasets.columns.encode import TableOptions
from warpi.datasets.delimited_files import read_before
from warpi.datasets.digits import digits
from warpi.datasets.tables import read_new_table, read_table
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


def categories_of(data: Dataset) -> dict[str, tuple[str, ...] | None]:
    """The categories of each feature column, None for numbers."""
    assert isinstance(data.encoding, Columns)
    columns = data.encoding.features.items()
    return {name: column.categories if isinstance(column, CategoryColumn) else None for name, column in columns}


STRICT = TableOptions(missing="error", unknown="error")


def listed(tensor: torch.Tensor | None) -> list[Any]:
    assert tensor is not None
    return tensor.tolist()


def test_numbers_and_categories(table: Callable[..., Path]) -> None:
    data = read_table(table("age,colour,ok,label\n1.5,red,True,dog\n-2e1,blue,False,cat\n3,red,True,dog\n"))
    assert data.name == "t"
    assert data.classes == ("cat", "dog")
    assert data.y.tolist() == [1, 0, 1]
    #                                  age  blue red False True
    np.testing.assert_array_equal(x_of(data), [[1.5, 0, 1, 0, 1], [-20, 1, 0, 1, 0], [3, 0, 1, 0, 1]])
    assert x_of(data).dtype == np.float32
    assert isinstance(data.examples, TensorExamples)
    words = {"colour": CategoryColumn(("blue", "red")), "ok": CategoryColumn(("False", "True"))}
    assert data.encoding == Columns("label", {"age": NumberColumn(1.5), **words})
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
def test_csv_formats(table: Callable[..., Path], text: str) -> None:
    data = read_table(table(text))
    np.testing.assert_array_equal(x_of(data), [[1, 1, 0], [2, 0, 1]])
    assert data.classes == ("p", "q")
    assert isinstance(data.encoding, Columns)
    assert categories_of(data) == {"a": None, "b": ("x", "y y")}


def test_quotes_unicode_and_tabs(table: Callable[..., Path]) -> None:
    data = read_table(table('a,Größe,label\n1,"groß, ""sehr""",猫\n2,"zwei\nZeilen",犬\n'))
    assert isinstance(data.encoding, Columns)
    assert categories_of(data)["Größe"] == ('groß, "sehr"', "zwei\nZeilen")
    assert data.classes == ("犬", "猫")
    data = read_table(table("a\tb\tlabel\n1\tx, y\tp\n2\tz\tq\n", "t.tsv"))
    assert isinstance(data.encoding, Columns)
    assert categories_of(data)["b"] == ("x, y", "z")


def test_order_of_classes(table: Callable[..., Path]) -> None:
    assert read_table(table("a,label\n1,10\n2,9\n3,-1\n")).classes == ("-1", "9", "10")
    assert read_table(table("a,label\n1,10\n2,9\n3,b\n")).classes == ("10", "9", "b")
    assert read_table(table("a,label\n1,007\n2,12\n")).classes == ("007", "12")  # the spelling is kept
    assert read_table(table("a,label\n1,1.0\n2,0.0\n3,1\n")).classes == ("0", "1")
    assert read_table(table("a,label\n1,True\n2,False\n")).classes == ("False", "True")
    assert read_table(table("a,label\n1,none\n2,some\n")).classes == ("none", "some")
    assert read_table(table("a,kind\n1,p\n2,q\n"), label="kind").classes == ("p", "q")


def test_clean_and_trusted_columns(table: Callable[..., Path]) -> None:
    """Blank clean labels are unknown; a class may occur only there; integers may be written as floats."""
    data = read_table(table("a,label,clean_label\n1,0,\n2,1,2.0\n3,0,0.0\n"))
    assert data.classes == ("0", "1", "2")
    assert listed(data.clean) == [-1, 2, 0]
    assert listed(data.trusted) == [False, True, True]
    assert x_of(data).shape == (3, 1)

    data = read_table(table("a,label,clean_label\n1,0,0\n2,1,0\n"))
    assert listed(data.clean) == [0, 0]
    assert data.trusted is None  # all filled, so no rows are marked as checked

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
    assert data.test.y.tolist() == [0, 1]  # the true label if there is one
    np.testing.assert_array_equal(x_of(data.test), [[2, 0, 1, 0], [3, 0, 0, 1]])
    assert data.meta is not None
    assert data.meta.y.tolist() == [1]
    assert data.clean is None  # no true label of a training row is known


def test_second_table_is_read_like_the_first(table: Callable[..., Path]) -> None:
    first = read_table(table("a,c,n,kind\n1,u,5,p\n2,v,6,q\n3,7,7,r\n"), label="kind")
    second = read_table(
        table("kind,n,c,a\nq,1,7,9\n", "s.csv"), like=first
    )  # another order, and '7' looks like a number
    assert second.classes == ("p", "q", "r")
    assert second.y.tolist() == [1]
    np.testing.assert_array_equal(x_of(second), [[9, 1, 0, 0, 1]])  # a, c=7, c=u, c=v, n
    assert second.encoding == first.encoding
    for text, what in (
        ("kind,n,c\nq,1,u\n", "it lacks 'a'"),
        ("kind,n,C,a\nq,1,u,1\n", "it lacks 'c' and adds 'C'"),
        (
            "kind,n,c,a\nq,1,uu,1\nq,1,w,1\n",
            r"value of column 'c' .*row 0 \(line 2\): 'uu'; did you mean 'u'\?; 2 rows .* drop them, or train with",
        ),
        (
            "kind,n,c,a\nq,1,u,1\nq,1,u,one\n",
            r"row 1 \(line 3\): column 'a' contains 'one', but is numeric in the training table",
        ),
        (
            "kind,n,c,a\nqq,1,u,1\n",
            r"unknown class in .*row 0 \(line 2\): 'qq'; did you mean 'q'\?; fix the label or drop",
        ),
        ("a,c,n,label\n1,u,5,p\n", "no column 'kind'"),
    ):
        with pytest.raises(UserError, match=what):
            read_table(table(text, "s.csv"), like=first, options=STRICT)
    with pytest.raises(UserError, match="digits is not; use the same form"):
        read_table(table("a,label\n1,1\n"), like=digits())


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("", "at least one row"),
        ("a,label\n", "at least one row"),
        ("a,lable\n1,2\n", r"no column 'label' \(did you mean 'lable'\?\); columns: a, lable; .*--label"),
        ("a,z\n1,2\n", r"no column 'label'; columns: a, z"),
        ("label,split\n1,train\n", "no feature column is left"),
        ("a,a,label\n1,2,3\n", "columns 1 and 2 are both called 'a'"),
        (
            ",a,label\nu,1,2\nu,1,2\n",
            r"column 1 has no name; name or delete it, or drop the column with --drop 'Unnamed: 0'$",
        ),
        ("a,label\n1,p\n2,q,r\n", "line 3 has 3 cells, the first has 2"),
        ("a,label\n1,p\n2\n", "line 3 has 1 cell, the first has 2"),
        ('a,label\n1,p\n"2,q\n', r"line 3: .*quote"),
        ('a,label\n1,"p"x\n', "line 2: "),
        ("a,label\n1,p\n,q\n", r"missing in 'a' \(1 of 2, first row 1 \(line 3\)\); fill them"),
        ("a,label\n1,p\nnan,q\n", r"missing in 'a' \(1 of 2, first row 1 \(line 3\)\)"),
        ("a,label\n1,p\nNA,q\n", r"missing in 'a' \(1 of 2, first row 1 \(line 3\)\)"),
        (
            "a,b,c,label\n1,,u,p\n,x,u,p\n,,u,q\n",
            r"missing in 'a' \(2 of 3, first row 1 \(line 3\)\), 'b' \(2 of 3, first row 0 .*; fill .* --drop a,b",
        ),
        ("a,label\n-inf,p\n1,q\n", r"row 0 \(line 2\): column 'a' contains '-inf', but must contain finite"),
        (
            "a,label\n1e39,p\n1,q\n",
            r"row 0 \(line 2\): column 'a' contains '1e\+39', but must contain finite numbers up to 3\.4e38",
        ),
        ("a,b,label\n1,x,p\n2,,q\n", r"missing in 'b' \(1 of 2, first row 1 \(line 3\)\)"),
        ('a,label\n"1\n",p\n\n1, \n', r"row 1 \(line 5\): column 'label' is empty"),
        ("a,label\n1,1\n1,nan\n2,\n", r"row 1 \(line 3\): column 'label' is empty \(2 such rows in total\)"),
        (
            "a,label\n1,p\n1,nan\n2,q\n2,nan\n",
            r"'label' contains the label 'nan' \(2 rows\), .* looks like a missing label; label these",
        ),
        ("a,label\n1,p\n1,N/A\n", r"the label 'N/A' \(1 row\), .* rename the class"),
        ("a,label,verified\n1,p,maybe\n", r"value of 'verified' in .*row 0 \(line 2\): 'maybe'"),
        ("a,label,split\n1,p,trian\n", r"value of 'split' in .*row 0 \(line 2\): 'trian'; did you mean 'train'"),
        ("a,label,split\n1,p,test\n", "there are no training rows"),
        (b"a,label\n1,p\n2,\xe9t\xe9\n", "line 3 is not UTF-8"),
        ("a,label\n1,p\n".encode("utf-16"), "line 1 is not UTF-8"),
    ],
)
def test_broken_tables(table: Callable[..., Path], text: str | bytes, what: str) -> None:
    file = table(text)
    with pytest.raises(UserError, match=what) as e:
        read_table(file, options=STRICT)
    assert str(file) in str(e.value)


@pytest.mark.parametrize(
    "text",
    [
        "a;b;label\n1,5;u;p\n2,5;v;q\n",  # as spreadsheets write it in many countries
        "\ufeffa;b;label\r\n1,5;u;p\r\n2,5;v;q\r\n",
        "a, cm;b;label\n1,5;u;p\n2,5;v;q\n",  # as many commas per row as semicolons, less one
        "a\tb\tlabel\n1.5\tu\tp\n2.5\tv\tq\n",
        "a|b|label\n1.5|u|p\n2.5|v|q\n",
        'a,b,label\n1.5,"u;1;2;3",p\n2.5,v,q\n',
        "a;1;2;3,b,label\n1.5,u,p\n2.5,v,q\n",
    ],
)
def test_separators(table: Callable[..., Path], text: str) -> None:
    file = table(text)
    data = read_table(file)
    assert data.classes == ("p", "q")
    assert x_of(data)[:, 0].tolist() == [1.5, 2.5]
    assert isinstance(data.encoding, Columns)
    new = read_new_table(file, data.encoding, data.classes)
    assert isinstance(new.examples, TensorExamples)
    assert np.array_equal(new.examples.x.numpy(), x_of(data))
    names, rows, _ = read_table_cells(file)
    assert (len(names), names[-1], rows[1][-1]) == (3, "label", "q")


def test_blank_rows_and_columns_at_the_end_are_not_used(
    table: Callable[..., Path], caplog: pytest.LogCaptureFixture
) -> None:
    file = table("a,b,label,\n1,u,p,\n,,,\n2,v,q,\n,,,\n , ,,\n")
    with pytest.raises(UserError, match=r"row 1 \(line 3\): column 'label' is empty \(1 such row in"):
        read_table(file)
    file.write_text(file.read_text().replace("p,\n,,,", "p,", 1))
    data = read_table(file)
    assert "the last 2 rows, from line 4 on, are blank and not used" in caplog.text
    assert isinstance(data.encoding, Columns)
    assert [*data.encoding.features] == ["a", "b"]
    assert x_of(data)[:, 0].tolist() == [1, 2]
    assert len(read_table_cells(file)[1]) == 2


def test_separator_of_one_column(table: Callable[..., Path]) -> None:
    texts = ["one; two", "one| three", "four"]
    columns = read_table(table("text,label\n" + "".join(f"{text},p\n" for text in texts))).encoding
    assert isinstance(columns, Columns)
    new = read_new_table(table("text\n" + "\n".join(texts), "new.csv"), columns, ("p",))
    assert len(new.examples) == 3


def test_long_texts(table: Callable[..., Path]) -> None:
    csv.field_size_limit(131_072)
    texts = [f"word{k} common " * 20_000 for k in range(4)]  # 240,000 characters
    data = read_table(table("text,label\n" + "".join(f'"{text}",{"pq"[k % 2]}\n' for k, text in enumerate(texts))))
    assert data.classes == ("p", "q")


def test_table_with_several_indexes(table: Callable[..., Path]) -> None:
    frame = pd.DataFrame({"a": np.arange(30) * 1.5, "label": ["p", "q"] * 15}, index=[*range(1, 60, 2)])
    for times in (1, 2, 3):  # that a program read the file and wrote it, each time with an index
        file = table(frame.to_csv())
        data = read_table(file)
        assert isinstance(data.encoding, Columns)
        assert [*data.encoding.features] == ["a"]
        frame = pd.read_csv(file)
        assert {*read_table_cells(file)[0]} == {*frame.columns}
        assert len(frame.columns) == times + 2
        new = read_new_table(table(frame[["a"]].to_csv(), "new.csv"), data.encoding, data.classes)
        assert len(new.examples) == 30


def column(cells: list[str], name: str = "a") -> str:
    """A csv of one column and unambiguous others."""
    rows = (f'{k % 7}.5,"{cell}",{"pq"[k % 2]}\n' for k, cell in enumerate(cells))
    return f"b,{name},label\n" + "".join(rows)


NUMERALS = [str(k % 11) for k in range(39)]


@pytest.mark.parametrize(
    ("cells", "numbers"),
    [
        ([*NUMERALS, "1.2.3"], [*NUMERALS, "4"]),  # a typo is a missing cell: the median and a mark
        (["n/a", "", "?", *NUMERALS, "-"], ["4", "4", "4", *NUMERALS, "4"]),
        ([f"{k},5" for k in range(40)], [f"{k}.5" for k in range(40)]),
        ([*NUMERALS, "1,5"], [*NUMERALS, "1.5"]),
        ([f"1.234,{k}" for k in range(40)], [f"1234.{k}" for k in range(40)]),
        ([f"{k},234.5" for k in range(1, 40)], [f"{k}234.5" for k in range(1, 40)]),
        (["5%", "10 %", "12.5%"], ["5", "10", "12.5"]),
        (["$1", "−$2", "$3.50"], ["1", "-2", "3.5"]),
        (["1 000", "20\u202f000", "−7"], ["1000", "20000", "-7"]),
        (["1'000'000", "3", "4"], ["1000000", "3", "4"]),
        (["18.3 °C", "-4 °C", "7°C"], ["18.3", "-4", "7"]),
        (["2,210 lbs", "900 lbs"], ["2210", "900"]),
        (["1,5 km/h", "12,25 km/h", "3 km/h"], ["1.5", "12.25", "3"]),
        (["9:05", "21:43", "00:00"], ["545", "1303", "0"]),
        (["12:05 AM", "12:10 pm", "1:00 PM"], ["5", "730", "780"]),
        (["59:30", "1:02:03", "0:07.5"], ["3570", "3723", "7.5"]),
    ],
)
def test_numbers_as_people_write_them(table: Callable[..., Path], cells: list[str], numbers: list[str]) -> None:
    data = read_table(table(column(cells)))
    np.testing.assert_allclose(x_of(data)[:, 1], np.array(numbers, dtype=np.float32))
    assert x_of(data).shape[1] == (3 if {"1.2.3", "?"} & {*cells} else 2)


def test_a_typo_in_a_numeric_column_is_named(table: Callable[..., Path], caplog: pytest.LogCaptureFixture) -> None:
    file = table(column([*NUMERALS, "1.2.3"]))
    read_table(file)
    assert "count as missing: 'a' (1 cell, first row 39 (line 41): '1.2.3'); to refuse them:" in caplog.text
    with pytest.raises(
        UserError, match=r"row 39 \(line 41\): column 'a' contains '1.2.3', but must contain .* --drop a$"
    ):
        read_table(file, options=STRICT)


def test_text_columns_with_some_numbers(table: Callable[..., Path]) -> None:
    code = [*["0", "1", "2"] * 13, *["3+"] * 3]  # few values, and the word is repeated
    named, units = [f"n{text}" for text in NUMERALS], ["1 kg", "2 lb", "3 kg"] * 13
    for cells in ([*NUMERALS[:30], *"abcdefghij"], ["a,b", "c,d"] * 20, named, code, units):
        data = read_table(table(column(cells)))
        assert isinstance(data.encoding, Columns)
        assert categories_of(data)["a"] == tuple(sorted(set(cells)))


def test_columns_that_are_not_used(table: Callable[..., Path], caplog: pytest.LogCaptureFixture) -> None:
    counting = [str(k) for k in range(100, 140)]
    for k, (name, cells, why) in enumerate(
        (
            ("a", counting, "the values look like ids"),
            ("user_id", counting[::-1], "the values look like ids"),
            ("customerID", [str(37 * k) for k in range(40)], "the values look like ids"),
            ("rownames", counting[::-1], "the values look like ids"),
            ("row.names", counting[::-1], "the values look like ids"),
            (
                "patient_id",
                [str(37 * k) for k in (*range(37), 4, 6, 9)],
                "the values look like ids",
            ),  # three came twice
            ("a", [f"user-{k}" for k in range(40)], "the values look like ids"),
            ("a", ["7"] * 40, "the value is the same in every row"),
            ("a", [""] * 40, "the value is the same in every row"),
            ("a", [f"{k}.png" for k in range(40)], "rename the column to 'path'"),
        )
    ):
        caplog.clear()
        file = table(column(cells, name), f"{k}.csv")
        first = read_table(file)
        assert isinstance(first.encoding, Columns)
        assert first.encoding.drop == (name,)
        assert read_table(file, like=first).examples.shape == (1,)
        read_table(file)  # logged only once
        (message,) = caplog.messages
        assert repr(name) in message
        assert why in message
        kept = read_table(file, options=TableOptions(types=(f"{name}=category",)))
        assert name in categories_of(kept)
    caplog.clear()
    for k, cells in enumerate(
        ([*counting[:39], "100"], [f"{k}.5" for k in range(40)][::2] * 2, ["u", "v"] * 20, counting[:9], counting[::-1])
    ):
        assert read_table(table(column(cells), f"used{k}.csv")).examples.shape[0] > 1
    assert not caplog.messages


def test_date_columns(table: Callable[..., Path]) -> None:
    days = [day % 9 + 1 for day in range(60)]
    for k, form in enumerate(
        (
            *(
                "2024-01-{:02}",
                "2024/1/{}",
                "{}.01.2024",
                "{:02}.01.24",
                "{} Jan 2024",
                "{}-jan-24",
                "January {}, 2024",
            ),
            *("2024-01-{:02}T00:00:00Z", "2024-01-{:02} 01:30:00.0+01:30", "1/{}/24"),
        )
    ):
        data = read_table(table(column([form.format(day) for day in days]), f"{k}.csv"))
        assert isinstance(data.encoding, Columns)
        assert isinstance(data.encoding.features["a"], DateColumn), form
        assert x_of(data)[:, 1].tolist() == [19722 + day for day in days], form  # 2024-01-01 is day 19723
        assert x_of(data)[:, 2].tolist() == [(day - 1) % 7 for day in days], form  # it was a Monday; one month only
    cells = ["31/1/2024", "1/2/2024", "2024-13-01", "", *["5/6/2024"] * 26]
    data = read_table(table(column(cells), "dmy.csv"))
    assert x_of(data)[:4, 1].tolist() == [19753, 19754, 19879, 19879]  # the median replaces what is not a date
    assert x_of(data)[:4, -1].tolist() == [0, 0, 1, 1]


def test_guessed_dates_are_named(table: Callable[..., Path], caplog: pytest.LogCaptureFixture) -> None:
    read_table(table(column(["1/2/2024", "3/4/2024"] * 20)))
    assert "dates are read as month/day/year: 'a' ('1/2/2024'); if the day comes first" in caplog.text


def test_rare_values_become_one_category(table: Callable[..., Path], caplog: pytest.LogCaptureFixture) -> None:
    for n, rows in ((50, 300), (60, 1200)):
        read_table(table(column([f"w{k % n}" for k in range(rows)]), f"{n}.csv"))
    assert not caplog.messages
    cells = [*["often"] * 200, *["also"] * 50, *(f"rare {k % 60}" for k in range(100))]
    data = read_table(table(column(cells)))
    assert isinstance(data.encoding, Columns)
    assert data.encoding.features["a"] == CategoryColumn(("also", "often"), other=True)
    assert "'a' (2 of 62 values are kept)" in caplog.text
    assert x_of(data)[[0, 200, 250]].tolist() == [[0.5, 0, 1, 0], [4.5, 1, 0, 0], [5.5, 0, 0, 1]]
    new = read_table(table(column(["new", "also"]), "new.csv"), like=data, options=STRICT)
    assert x_of(new)[:, 1:].tolist() == [[0, 0, 1], [1, 0, 0]]


def test_columns_that_may_mark_trusted_rows(table: Callable[..., Path], caplog: pytest.LogCaptureFixture) -> None:
    for name, cells in (("Is_Trusted", ["0", "1"]), ("clean", ["yes", "no"]), ("checked", ["True", "False"])):
        caplog.clear()
        read_table(table(column(cells, name), f"{name}{cells[0]}.csv"))
        (message,) = caplog.messages
        assert f"column {name!r} is used as a feature" in message
        assert f"rename it to 'trusted', else drop it with --drop {name}" in message
    caplog.clear()
    for name, cells in (("clean", ["0", "2"]), ("flag", ["0", "1"])):
        read_table(table(column(cells, name), "other.csv"))
    assert not caplog.messages


def test_trusted_column(table: Callable[..., Path], caplog: pytest.LogCaptureFixture) -> None:
    text = "a,label,{}\n1,p,yes\n2,q,no\n3,q,\n"
    new = read_table(table(text.format("trusted"), "new.csv"))
    assert new.trusted is not None
    assert new.trusted.tolist() == [True, False, False]
    assert new.examples.shape == (1,)
    assert not caplog.messages
    old = read_table(table(text.format("verified"), "old.csv"))
    assert old.trusted is not None
    assert torch.equal(old.trusted, new.trusted)
    (message,) = caplog.messages
    assert message.endswith("old.csv: the name 'verified' is deprecated; use 'trusted'")
    dropped = read_table(table(text.format("trusted"), "dropped.csv"), drop=["trusted"])
    assert dropped.trusted is None
    with pytest.raises(UserError, match="'trusted' and 'verified' have the same meaning"):
        read_table(table("a,label,trusted,verified\n1,p,1,1\n2,q,0,0\n", "both.csv"))
    with pytest.raises(UserError, match=r"unknown value of 'trusted' .*: 'blue'; .*rename other columns"):
        read_table(table("a,label,trusted\n1,p,blue\n2,q,no\n", "feature.csv"))
    with pytest.raises(
        UserError, match="column 'Trusted' looks like 'trusted', which has a special meaning; rename it"
    ):
        read_table(table("a,label,Trusted\n1,p,1\n2,q,0\n", "capital.csv"))


def test_trusted_split(table: Callable[..., Path], caplog: pytest.LogCaptureFixture) -> None:
    text = "a,label,split\n1,p,train\n2,q,{0}\n3,q,train\n"
    new = read_table(table(text.format("trusted"), "new.csv"))
    assert not caplog.messages
    old = read_table(table(text.format("meta"), "old.csv"))
    assert [message.rpartition(": ")[2] for message in caplog.messages] == [
        "the name 'meta' is deprecated; use 'trusted'"
    ]
    for dataset in (new, old):
        assert dataset.meta is not None
        assert dataset.meta.y.tolist() == [1]
        assert len(dataset.y) == 2


def test_similar_classes(table: Callable[..., Path], caplog: pytest.LogCaptureFixture) -> None:
    text = "a,label\n1,Tiger\n2,Tiger\n3,tiger\n4,house cat\n5,House-Cat\n6,lion\n"
    first = read_table(table(text))
    (message,) = caplog.messages
    assert "the classes 'House-Cat' (1 row) and 'house cat' (1 row) in 'label' differ only in case, sp" in message
    assert "as in 1 more case; if they are one class, write them in the same way" in message
    caplog.clear()
    read_table(table(text, "again.csv"), like=first)
    read_table(table("a,label\n1,a\n2,A\n3,b\n", "letters.csv"))
    read_table(table("a,label\n1,-1\n2,1\n3,1-0\n4,10\n", "signs.csv"))
    read_table(table("a,label\n1,A\n2,A-\n3,B+\n4,B\n", "grades.csv"))
    assert not caplog.messages


@pytest.mark.parametrize(
    ("one", "other"),
    [("1", "01"), ("1", "+1"), ("0", "-0.0"), ("0.5", "0.50"), ("café", "cafe\u0301"), ("x", "x\u200b")],
)
def test_classes_with_the_same_meaning(
    table: Callable[..., Path], caplog: pytest.LogCaptureFixture, one: str, other: str
) -> None:
    read_table(table(f"a,label\n1,{one}\n2,{other}\n3,z\n", f"{one!a}.csv"))
    (message,) = caplog.messages
    assert (
        "differ only in case, spaces, dashes or notation; if they are one class, write them in the same way" in message
    )


def test_warnings_are_not_repeated_when_a_run_is_opened_again(
    table: Callable[..., Path], caplog: pytest.LogCaptureFixture
) -> None:
    path = table("a,b,label\n" + "".join(f"{k % 7},1,{'pq'[k % 2]}\n" for k in range(30)))
    with read_before():
        read_table(path)
    assert not caplog.messages
    read_table(path)
    assert any("not used" in message for message in caplog.messages)


def test_quantities_and_ids_as_labels(table: Callable[..., Path]) -> None:
    def labelled(labels: list[Any]) -> Path:
        return table("a,label\n" + "".join(f"{k % 5},{label}\n" for k, label in enumerate(labels)))

    for labels in ([k / 7 for k in range(60)], list(range(60)), [k % 25 + 0.5 for k in range(200)]):
        with pytest.raises(UserError, match=r"'label' contains \d+ different numbers in .* looks like a quantity"):
            read_table(labelled(labels))
    for labels in ([f"id {k}" for k in range(60)], [f"a text {k % 31}" for k in range(60)]):
        with pytest.raises(UserError, match=r"'label' contains \d+ different texts in .* looks like ids or free text"):
            read_table(labelled(labels))
    for labels in ([k % 25 for k in range(60)], [k % 10 / 2 for k in range(60)], list(range(10))):
        assert read_table(labelled(labels)).n_classes == len(set(labels))


def test_many_categories(table: Callable[..., Path]) -> None:
    rows = [f"{k % 9},id{k % 1200},{'pq'[k % 2]}" for k in range(36_000)] + ["1,id7,p"]
    data = read_table(table("\n".join(["a,name,label", *rows])))
    assert data.examples.shape == (1 + 1000 + 1,)
    assert isinstance(data.encoding, Columns)
    column = data.encoding.features["name"]
    assert isinstance(column, CategoryColumn)
    assert column.other
    assert "id7" in column.categories


def test_a_large_table_keeps_fewer_categories(table: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """So that the features of all categories fit into memory. What does not is stored sparse."""
    rows = [f"w{k % 100},{'uv'[k % 3 % 2]},{'pq'[k % 2]}" for k in range(3000)]
    file = table("\n".join(["a,b,label", *rows]))
    assert read_table(file).examples.shape == (100 + 2,)
    monkeypatch.setattr(tables_module, "_CATEGORY_CELLS", 3000 * 42)
    few = read_table(file)
    assert few.examples.shape == (40 + 1 + 2,)
    monkeypatch.setattr(tables_module, "_MAX_DENSE", 3000 * 40)
    sparse = read_table(file)
    assert isinstance(sparse.examples, SparseExamples)
    np.testing.assert_array_equal(sparse.examples.x.toarray(), x_of(few))


def test_words_that_python_parses_as_numbers(table: Callable[..., Path]) -> None:
    data = read_table(table("a,label\n1_0,p\n10,q\n"))
    assert isinstance(data.encoding, Columns)
    assert categories_of(data) == {"a": ("10", "1_0")}


def test_no_such_file(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="there is no file"):
        read_table(tmp_path / "absent.csv")
    with pytest.raises(UserError, match=r"the suffix must be one of \.csv, \.tsv, \.parquet, got '\.xls'"):
        read_table(tmp_path / "t.xls")


def test_parquet_equals_csv(tmp_path: Path) -> None:
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
    assert categories_of(data) == {
        "a": None, "b": None, "code": ("1", "2"), "kind": ("u", "v"), "ok": ("False", "True"), "whole": None,
    }  # fmt: skip
    np.testing.assert_array_equal(x_of(data)[1], [2, -1, 0, 1, 1, 0, 1, 0, 2])
    assert data.classes == ("9", "10", "11")
    assert data.y.tolist() == [1, 0, 1]
    assert listed(data.clean) == [-1, 0, 2]
    assert listed(data.trusted) == [False, True, False]
    frame.to_csv(tmp_path / "second.csv", index=False)
    second = read_table(tmp_path / "second.csv", like=data)  # a second file in the other format
    np.testing.assert_array_equal(x_of(second), x_of(data))
    assert listed(second.clean) == listed(data.clean)


def frame_of(column: Any, **more: Any) -> Any:
    return pd.DataFrame({"a": [0.5, 1, 2, 3], "x": column, "label": list("pqpq")} | more)


def alike(a: Dataset, b: Dataset) -> bool:
    """Whether two data sets are equal in all parts."""

    def parts(data: Dataset) -> list[Any]:
        inputs = [(x_of(s).tolist(), s.y.tolist()) if s else None for s in (data, data.test, data.meta)]
        known = [None if t is None else t.tolist() for t in (data.clean, data.trusted)]
        return [*inputs, *known, data.classes, data.encoding]

    return parts(a) == parts(b)


@pytest.mark.parametrize(
    ("values", "dtype", "categories"),
    [
        ([1, 2, 3, 4], "Int64", None),
        ([1, 2, 3, 4], "UInt8", None),
        ([1.5, 2, 3, 4], "Float32", None),
        ([1, 2, 3, 4], "int64[pyarrow]", None),
        ([1, 2, 3, 4.5], "float16", None),
        ([2**63, 1, 2, 3], "uint64", None),
        ([-1, 2, 3, 4], "int8", None),
        ([Decimal("1.5"), Decimal("2"), Decimal("3"), Decimal("4")], "object", None),
        ([True, False, True, True], "boolean", ("False", "True")),
        ([True, False, True, True], "bool[pyarrow]", ("False", "True")),
        (["u", "v", "u", "u"], "string", ("u", "v")),
        (["u", "v", "u", "u"], "string[pyarrow]", ("u", "v")),
        (["u", "v", "u", "u"], pd.CategoricalDtype(["z", "v", "u"]), ("u", "v")),  # without unused categories
        ([10, 9, 10, 9], "category", None),  # integers stay numbers
    ],
)
def test_parquet_types(tmp_path: Path, values: list[Any], dtype: Any, categories: tuple[str, ...] | None) -> None:
    """As a feature and as labels; the same table as csv gives the same data."""
    column = pd.Series(values, dtype=dtype)
    for name, frame in {
        "feature": frame_of(column),
        "label": frame_of([1, 2, 3, 4], label=column),
        "clean_label": frame_of([1, 2, 3, 4], label=column, clean_label=column[::-1].reset_index(drop=True)),
    }.items():
        frame.to_parquet(tmp_path / "t.parquet")
        frame.to_csv(tmp_path / "t.csv", index=False)
        data = read_table(tmp_path / "t.parquet")
        assert alike(data, read_table(tmp_path / "t.csv")), name
        assert isinstance(data.encoding, Columns)
        if name == "feature":
            assert categories_of(data)["x"] == categories
            if categories is None:
                np.testing.assert_array_equal(x_of(data)[:, 1], np.array(values, dtype=np.float32))


@pytest.mark.parametrize("dtype", ["Int64", "float64", "int64[pyarrow]", "boolean", "string", "category"])
def test_missing_parquet_cells(tmp_path: Path, dtype: Any) -> None:
    """A blank means unknown in clean_label, and may be refused in other columns."""
    values = {"boolean": [True, None, False, True], "string": ["q", None, "p", "p"], "category": ["q", None, "p", "p"]}
    column = pd.Series(values.get(dtype, [1, None, 0, 0]), dtype=dtype)
    frame = frame_of([1, 2, 3, 4], clean_label=column, verified=[None, True, False, None])
    frame.to_parquet(tmp_path / "t.parquet")
    frame.to_csv(tmp_path / "t.csv", index=False)
    data = read_table(tmp_path / "t.parquet")
    assert alike(data, read_table(tmp_path / "t.csv"))
    assert [k == -1 for k in listed(data.clean)] == [False, True, False, False]
    assert listed(data.trusted) == [False, True, False, False]
    for name in ("x", "label"):
        (frame_of(column) if name == "x" else frame_of([1, 2, 3, 4], label=column)).to_parquet(tmp_path / "t.parquet")
        with pytest.raises(
            UserError, match=rf"row 1: column '{name}' is empty|missing in '{name}' \(1 of 4, first row 1\)"
        ):
            read_table(tmp_path / "t.parquet", options=STRICT)
    frame_of(column).to_parquet(tmp_path / "t.parquet")
    frame_of(column).to_csv(tmp_path / "t.csv", index=False)
    assert alike(read_table(tmp_path / "t.parquet"), read_table(tmp_path / "t.csv"))


DAYS = pd.to_datetime(["2020-01-01", "2020-01-02"])


@pytest.mark.parametrize(
    ("columns", "what"),
    [
        ({"a": [1.0, None], "label": ["p", "q"]}, r"missing in 'a' \(1 of 2, first row 1\)"),
        ({"a": ["x", None], "label": ["p", "q"]}, r"missing in 'a' \(1 of 2, first row 1\)"),
        ({"a": [1.0, float("inf")], "label": ["p", "q"]}, "row 1: column 'a' contains 'inf'"),
        ({"a": [1, 2], "label": ["p", None]}, "row 1: column 'label' is empty"),
        ({"a": [1, 2], "label": [1.0, None]}, "row 1: column 'label' is empty"),
        (
            {"a": [1, 2], "label": DAYS},
            r"column 'label' contains values of type timestamp\[.*\]; convert .* or delete it$",
        ),
        (
            {"a": [1, 2], "label": [1, 2], "clean_label": DAYS},
            r"column 'clean_label' contains values of type timestamp\[",
        ),
        ({"a": [b"u", b"v"], "label": [1, 2]}, "column 'a' contains values of type binary"),
        ({"a": [[1], [2, 3]], "label": [1, 2]}, "column 'a' contains lists of 1 to 2 values .* same number of numbers"),
        ({"a": [["u"], ["v"]], "label": [1, 2]}, "column 'a' contains lists of 1 to 1 values of type string"),
        ({"a": [], "label": []}, "no rows"),
        ({"a": [1, 2], "b": [1, 2]}, "no column 'label'"),
    ],
)
def test_broken_parquet(tmp_path: Path, columns: dict[str, Any], what: str) -> None:
    file = tmp_path / "t.parquet"
    pd.DataFrame(columns).to_parquet(file)
    with pytest.raises(UserError, match=what) as e:
        read_table(file, options=STRICT)
    assert str(file) in str(e.value)


def test_damaged_parquet(tmp_path: Path) -> None:
    file = tmp_path / "t.parquet"
    pd.DataFrame({"a": [1, 2], "label": [1, 2]}).to_parquet(file)
    whole = file.read_bytes()
    for data in (b"", b"PAR1 or not", whole[:-1], whole[:40] + b"x" * 40 + whole[80:], whole[:-20] + whole[-8:]):
        file.write_bytes(data)
        with pytest.raises(UserError, match=r"t\.parquet") as e:
            read_table(file)
        assert "\n" not in str(e.value)


def test_files_without_permission(tmp_path: Path, table: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    pd.DataFrame({"a": [1], "label": [1]}).to_parquet(tmp_path / "t.parquet")
    files = [tmp_path / "t.parquet", *(table("a,label\n1,1\n", name) for name in ("t.csv", "t.tsv"))]

    def denied(path: object, *_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(io, "open", denied)  # root can read all files
    for file in files:
        with pytest.raises(UserError, match=f"cannot read {file}: Permission denied; check"):
            read_table(file)


def test_large_integer_labels(tmp_path: Path) -> None:
    pd.DataFrame({"a": [1, 2], "label": [2**60, 2**60 + 1]}).to_parquet(tmp_path / "t.parquet")
    assert read_table(tmp_path / "t.parquet").classes == (str(2**60), str(2**60 + 1))


def test_index_of_a_pandas_frame_is_ignored(tmp_path: Path) -> None:
    frame = pd.DataFrame({"a": [1, 2], "label": ["p", "q"]}, index=["first", "second"])
    frame.to_parquet(tmp_path / "t.parquet")
    assert read_table(tmp_path / "t.parquet").examples.shape == (1,)


def test_without_pyarrow(tmp_path: Path, table: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    pd.DataFrame({"a": [1], "label": [1]}).to_parquet(tmp_path / "t.parquet")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(UserError, match=r"needs the package 'pyarrow'.*warpi\[tables\]"):
        read_table(tmp_path / "t.parquet")
    assert len(read_table(table("a,label\n1,p\n")).y) == 1  # .csv does not need it


# csv.writer does not quote a carriage return, although readers treat it as the end of a line.
TEXT = st.text(st.characters(codec="utf-8", exclude_characters="\0\r"), max_size=6)
WORDS = TEXT.map(lambda text: "w" + text.strip() + "w")  # no blanks at the ends, and not a number
NUMBERS = st.floats(width=32, allow_nan=False, allow_infinity=False)


@st.composite
def tables(draw: st.DrawFn) -> tuple[list[str], list[list[Any]], list[str]]:
    """Names, columns of numbers or words, and labels."""
    n = draw(st.integers(1, 8))
    names = draw(st.lists(WORDS, min_size=1, max_size=4, unique=True))
    columns = [draw(st.lists(draw(st.sampled_from([NUMBERS, WORDS])), min_size=n, max_size=n)) for _ in names]
    return names, columns, draw(st.lists(WORDS, min_size=n, max_size=n))


@given(tables(), st.sampled_from([",", "\t"]), st.sampled_from(["\n", "\r\n"]), st.sampled_from(["utf-8", "utf-8-sig"]))
@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
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
        categories = categories_of(data)[name]
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


@st.composite
def frames(draw: st.DrawFn) -> Any:
    """A table whose types are unambiguous in a csv: numbers, words, true/false; some clean labels and splits."""
    n = draw(st.integers(1, 6))

    def column(values: st.SearchStrategy[Any]) -> list[Any]:
        return draw(st.lists(values, min_size=n, max_size=n))

    words = st.sampled_from(["red", "two words", "a, b", 'q"q', "ü"])
    kinds = [NUMBERS, st.integers(-(2**40), 2**40), words, st.booleans()]
    made = {f"c{j}": column(draw(st.sampled_from(kinds))) for j in range(draw(st.integers(1, 4)))}
    names = draw(st.sampled_from([words, st.integers(-3, 12), st.booleans()]))
    made["label"] = column(names)
    if draw(st.booleans()):
        made["clean_label"] = column(st.none() | names)
    if draw(st.booleans()):
        made["verified"] = column(st.sampled_from([True, False, None]))
    if draw(st.booleans()):
        made["split"] = ["train", *column(st.sampled_from(["train", "test", "trusted"]))[1:]]
    return pd.DataFrame(made)


@given(frames())
@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_csv_and_parquet_give_the_same_data(tmp_path: Path, frame: Any) -> None:
    frame.to_csv(tmp_path / "t.csv", index=False)
    frame.to_parquet(tmp_path / "t.parquet")
    first, second = read_table(tmp_path / "t.csv"), read_table(tmp_path / "t.parquet")
    assert alike(first, second)
    assert alike(read_table(tmp_path / "t.parquet", like=first), read_table(tmp_path / "t.csv", like=second))


@pytest.mark.parametrize(("last", "known"), [("a", True), ("", False)])
def test_test_is_clean(tmp_path: Path, last: str, known: bool) -> None:
    rows = ["x,label,clean_label,split", "1,a,,train", "2,b,,train", "3,a,b,test", f"4,a,{last},test"]
    (tmp_path / "t.csv").write_text("\n".join(rows))
    dataset = read_table(tmp_path / "t.csv")
    assert dataset.test is not None
    assert dataset.test_is_clean is known


def test_reserved_column_in_capitals(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("x,label,Clean_Label\n1,a,a\n2,b,b\n")
    with pytest.raises(UserError, match="column 'Clean_Label' looks like 'clean_label'"):
        read_table(tmp_path / "t.csv")


# -- dropped columns ---------------------------------------------------------------------------------------------------


def read_like(path: Path, first: Dataset, options: TableOptions | None = None) -> NewInputs:
    assert isinstance(first.encoding, Columns)
    return read_new_table(path, first.encoding, first.classes, options)


def undropped(data: Dataset) -> Dataset:
    assert isinstance(data.encoding, Columns)
    return replace(data, encoding=replace(data.encoding, drop=()))


@given(frames(), st.data())
@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_dropped_columns_change_nothing(tmp_path: Path, frame: Any, data: st.DataObject) -> None:
    """Even invalid columns can be dropped, in the first file, in a second one with or without them, and in new rows."""
    n, wide = len(frame), frame.copy()
    extra: dict[str, list[Any]] = {
        "id": list(range(n)),
        "a, remark": [f"text {k}, 'quoted'" if k else None for k in range(n)],
        "half": [*["1"] * (n - 1), "?"],
        "Split": ["of hair"] * n,
        "path": [f"{k}.png" for k in range(n)],
        "day": list(pd.date_range("2020-01-01", periods=n)),
    }
    names = data.draw(st.lists(st.sampled_from(list(extra)), unique=True, min_size=1))
    for name in names:
        wide.insert(data.draw(st.integers(0, wide.shape[1])), name, extra[name])
    for suffix, write in ((".csv", "to_csv"), (".tsv", "to_csv"), (".parquet", "to_parquet")):
        more = {"index": False, "sep": "\t" if suffix == ".tsv" else ","} if write == "to_csv" else {}
        bare, full = tmp_path / f"bare{suffix}", tmp_path / f"bare/bare{suffix}"
        full.parent.mkdir(exist_ok=True)
        getattr(frame, write)(bare, **more)
        getattr(wide, write)(full, **more)
        plain, dropped = read_table(bare), read_table(full, drop=names)
        assert alike(plain, undropped(dropped))
        assert plain.examples.digest() == dropped.examples.digest()
        assert dropped.encoding == replace(plain.encoding, drop=tuple(names))  # type: ignore[type-var]
        assert alike(read_table(bare, like=dropped), read_table(full, like=dropped, drop=names))
        for file in (bare, full):
            new = read_like(file, dropped)
            assert isinstance(new.examples, TensorExamples)
            assert new.examples.x.tolist() == np.concatenate(_in_order(frame, dropped)).tolist()


def _in_order(frame: Any, data: Dataset) -> list[np.ndarray]:
    """The inputs of all parts, in the order of the table."""
    parts = list(frame["split"]) if "split" in frame else ["train"] * len(frame)
    left = {part: iter(x_of(s)) for part, s in (("train", data), ("test", data.test), ("trusted", data.meta)) if s}
    return [next(left[part])[None] for part in parts]


def test_dropped_column_causes_no_warning(table: Callable[..., Path], caplog: Any) -> None:
    first = read_table(table("id,a,label\n1,5,p\n2,6,q\n"), drop=["id"])
    new = read_like(table("a,more,id\n7,1,x\n", "new.csv"), first)
    assert isinstance(new.examples, TensorExamples)
    assert new.examples.x.tolist() == [[7]]
    assert len(caplog.messages) == 1
    assert caplog.messages[0].endswith("not used: 'more'")


def test_unnamed_column(table: Callable[..., Path]) -> None:
    """pandas writes the index in this way, and uses this name when it reads it."""
    file = table(",a,label\n0,5,p\n1,6,q\n")
    first = read_table(file, drop=["Unnamed: 0"])
    assert x_of(first).tolist() == [[5], [6]]
    assert alike(read_table(file, like=first), first)
    without = read_table(file)  # it counts the rows, so it is not used
    assert alike(without, first)
    assert len(read_like(file, read_table(table("a,label\n5,p\n6,q\n", "bare.csv"))).examples) == 2


@pytest.mark.parametrize(
    ("drop", "label", "what"),
    [
        (
            ["ide"],
            None,
            r"has no column 'ide' \(did you mean 'id'\?\); columns: id, a, label, kind, verified; .*--drop",
        ),
        (["zzz", "id"], None, r"has no column 'zzz'; columns: id, a, label, kind, verified; "),
        (["ID"], None, r"has no column 'ID'"),
        ([""], None, r"has no column ''; columns"),
        (["label"], None, "'label' contains the labels and cannot be dropped; choose another label with --label"),
        (["kind"], "kind", "'kind' contains the labels"),
        (["id", "verified"], None, "'verified' is a reserved name and cannot be dropped; rename it"),
        (["clean_label"], None, "'clean_label' is a reserved name and cannot be dropped"),
        (["split"], None, "'split' is a reserved name and cannot be dropped"),
        (["id", "a", "kind"], None, r"no feature column is left; .* --drop ignores id, a, kind: keep one"),
        ("id", None, r"drop must be a list of columns, got 'id'; write \['id'\]"),
    ],
)
def test_columns_that_cannot_be_dropped(
    table: Callable[..., Path], drop: list[str], label: str | None, what: str
) -> None:
    file = table("id,a,label,kind,verified\n1,5,p,r,1\n2,6,q,s,0\n")
    with pytest.raises(UserError, match=what):
        read_table(file, label, drop=drop)


def test_column_named_label_can_be_dropped(table: Callable[..., Path]) -> None:
    file = table("a,label,kind\n5,p,r\n6,q,s\n")
    assert x_of(read_table(file, "kind", drop=["label"])).tolist() == [[5], [6]]


def test_errors_suggest_drop_if_possible(table: Callable[..., Path]) -> None:
    """Also for a second file, but not for new rows, whose columns are fixed."""
    text = "a,the name,label\n1,u,p\n2,v,q\n"
    first, new = read_table(table(text)), table("a,the name,label\n1,w,p\n", "s.csv")
    with pytest.raises(UserError, match=r"'w'; .* drop them, .*, or drop the column with --drop 'the name'$"):
        read_table(new, like=first, options=STRICT)
    with pytest.raises(UserError, match=r"'w'; .* fix or drop them, or train with rows that have these values$"):
        read_like(new, first, STRICT)
    with pytest.raises(UserError, match=r"it lacks 'the name'; .*--drop 'the name'$"):
        read_table(table("a,label\n1,p\n", "s.csv"), like=first)
    with pytest.raises(UserError, match=r"it lacks 'the name'; add them: cells may be empty$"):
        read_like(table("a,label\n1,p\n", "s.csv"), first)
    gaps = table("a,the name,label\n1,u,p\n,,q\n", "s.csv")
    with pytest.raises(
        UserError,
        match=r"fill them or drop the rows, or drop the columns with --drop 'a,the name', or use --missing fill$",
    ):
        read_table(gaps, options=STRICT)
    with pytest.raises(UserError, match=r"fill them or drop the rows, or use --missing fill$"):
        read_like(gaps, first, STRICT)
    with pytest.raises(
        UserError, match=r"'Split' looks like 'split', .*; rename it, or drop the column with --drop Split$"
    ):
        read_table(table("a,Split,label\n1,u,p\n2,v,q\n", "s.csv"))


def test_labels_before_they_were_checked(table: Callable[..., Path]) -> None:
    first = read_table(table("a,label\n1,p\n2,q\n"))
    assert first.given is first.meta_given is None
    checked = read_table(table("a,label,given\n1,p,q\n2,q,\n3,q,z\n4,p,p\n", "checked.csv"), like=first)
    assert listed(checked.given) == [1, -1, -1, 0]  # blank and unknown classes are not known
    assert x_of(checked).shape == (4, 1)
    marked = read_table(table("a,label,clean_label,split\n1,p,q,train\n2,q,,train\n3,q,p,trusted\n", "marked.csv"))
    assert listed(marked.given) == [0, -1]  # with a clean label, the label column is the earlier one
    assert listed(marked.meta_given) == [1]
