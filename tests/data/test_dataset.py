"""Dataset: known labels, invalid input, and examples that two sets share."""

import os
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

from warpi.data.dataset import Dataset
from warpi.data.examples import ReadBatch, Scale, TensorExamples
from warpi.data.image_files import FileExamples
from warpi.data.loader import Loader
from warpi.data.overlap import mark_shared
from warpi.data.split import Split
from warpi.errors import UserError

ONE = Scale(torch.tensor(0.0), torch.tensor(1.0))


def overlap(a: Split, b: Split) -> int:
    """How many examples of b also occur in a."""
    return int(mark_shared(b, a).sum())


def examples(n: int = 4) -> TensorExamples:
    return TensorExamples(torch.arange(float(n))[:, None], ONE)


def data(y: list[int], **more: Any) -> Dataset:
    return Dataset("made", examples(len(y)), torch.tensor(y), ("a", "b", "c"), **more)


def test_truth_prefers_the_clean_label() -> None:
    y = [0, 1, 2, 0]
    assert data(y).truth.tolist() == y
    assert data(y, clean=torch.tensor([2, -1, -1, 1])).truth.tolist() == [2, 1, 2, 1]
    assert data(y, clean=torch.tensor([1, 1, 1, 1])).truth.tolist() == [1, 1, 1, 1]


@pytest.mark.parametrize(
    ("wrong", "what"),
    [
        ({"clean": torch.tensor([0, 1])}, r"true labels of made: got \(2,\) labels for 4 examples"),
        (
            {"clean": torch.tensor([0, 1, 3, -1])},
            r"true labels of made: row 2 has label 3, but labels must be in 0\.\.2",
        ),
        ({"clean": torch.tensor([0.0, 1, 1, 1])}, "true labels of made: labels must be integers"),
        ({"trusted": torch.tensor([True])}, r"trusted rows of made: got torch.bool \[1\] for 4 examples"),
        ({"trusted": torch.tensor([0, 1, 1, 1])}, "one bool each"),
        ({"label_sets": {"x": torch.tensor([0, 1, 2, 9])}}, "label set 'x' of made: row 3 has label 9"),
        ({"test": Split(examples(2), torch.arange(2), torch.tensor([0, 5]))}, "test set of made: row 1 has label 5"),
        ({"y": torch.tensor([0, 1, 2, -1])}, "labels of made: row 3 has label -1"),
    ],
)
def test_invalid_labels(wrong: dict[str, Any], what: str) -> None:
    with pytest.raises(UserError, match=what):
        replace(data([0, 1, 2, 0]), **wrong)


@pytest.mark.parametrize(
    ("clean", "marks", "known", "trusted"),
    [
        (None, None, None, None),
        ([-1, -1, -1], None, None, None),  # no label is known
        ([1, -1, 0], None, [1, -1, 0], [True, False, True]),  # some rows were checked
        ([1, 2, 0], None, [1, 2, 0], None),  # a benchmark, without marks of checked rows
        ([1, -1, 0], [False, True, False], [1, -1, 0], [False, True, False]),
        (None, [False, True, False], None, [False, True, False]),
    ],
)
def test_from_parts(clean: Any, marks: Any, known: Any, trusted: Any) -> None:
    y = {name: torch.arange(n) % 3 for name, n in (("train", 3), ("test", 4), ("trusted", 5))}
    parts = {name: (examples(len(labels)), labels) for name, labels in y.items()}
    tensors = (None if values is None else torch.tensor(values) for values in (clean, marks))
    made = Dataset.from_parts("n", parts, ("a", "b", "c"), **dict(zip(("clean", "trusted"), tensors, strict=True)))
    assert (None if made.clean is None else made.clean.tolist()) == known
    assert (None if made.trusted is None else made.trusted.tolist()) == trusted
    assert made.test is not None
    assert made.meta is not None
    for name, split in (("test", made.test), ("trusted", made.meta)):
        assert split.examples is parts[name][0]
        assert split.rows.tolist() == list(range(len(y[name])))
        assert torch.equal(split.y, y[name])
    alone = Dataset.from_parts("n", {"train": parts["train"]}, ("a", "b", "c"))
    assert alone.test is alone.meta is None


class Masked(TensorExamples):
    """Reports explicitly that every row could be read."""

    def stream(self, batches: Iterable[tuple[Tensor, int]], **options: Any) -> Iterator[ReadBatch]:
        for read in super().stream(batches, **options):
            yield ReadBatch(read.views, torch.ones(len(read.views[0]), dtype=torch.bool))


def test_batches_of_one_are_kept_if_requested() -> None:
    loader = Loader(Split(Masked(examples().x, ONE), torch.arange(4), torch.arange(4)), 1, 0)
    assert sorted(int(batch.y) for batch in loader.epoch(0)) == [0, 1, 2, 3]


# -- overlap ----------------------------------------------------------------------------------------------------------


def split(x: Tensor, rows: list[int] | None = None, y: list[int] | None = None) -> Split:
    index = torch.arange(len(x)) if rows is None else torch.tensor(rows, dtype=torch.int64)
    labels = torch.zeros(len(index), dtype=torch.int64) if y is None else torch.tensor(y, dtype=torch.int64)
    return Split(TensorExamples(x, ONE), index, labels)


values = st.lists(st.tuples(st.integers(0, 2), st.integers(0, 2)), min_size=1, max_size=12)


@given(values, values, st.data())
@settings(max_examples=60, deadline=None)
def test_shared_inputs(a: list[Any], b: list[Any], rng: st.DataObject) -> None:
    rows_a = rng.draw(st.lists(st.integers(0, len(a) - 1), max_size=8))
    rows_b = rng.draw(st.lists(st.integers(0, len(b) - 1), max_size=8))
    expected = (Counter(a[i] for i in rows_a) & Counter(b[j] for j in rows_b)).total()
    for kind in (torch.float32, torch.uint8):
        x, y = torch.tensor(a).to(kind), torch.tensor(b).to(kind)
        assert overlap(split(x, rows_a), split(y, rows_b)) == expected
        images = split(x.view(-1, 1, 1, 2), rows_a), split(y.view(-1, 1, 1, 2), rows_b)
        assert overlap(*images) == expected


examples_of_two = st.lists(st.tuples(st.integers(0, 2), st.integers(0, 2)), max_size=12)  # (input, label)


@given(examples_of_two, examples_of_two)
@settings(max_examples=80, deadline=None)
def test_each_example_matches_at_most_one(a: list[Any], b: list[Any]) -> None:
    """Agrees with a loop: equal labels first, then the order of the rows."""
    free, left = dict(enumerate(a)), list[int]()
    for one in b:
        match = next((i for i, other in free.items() if other == one), None)
        left += [one[0]] if match is None else []
        free.pop(match, None)  # type: ignore[arg-type]
    for value in left:
        free.pop(next((i for i, other in free.items() if other[0] == value), -1), None)

    def labeled(pairs: list[Any]) -> Split:
        return split(torch.tensor([[x] for x, _ in pairs]).view(-1, 1).float(), y=[y for _, y in pairs])

    assert mark_shared(labeled(a), labeled(b)).tolist() == [i not in free for i in range(len(a))]


def test_minus_zero_equals_zero() -> None:
    assert overlap(split(torch.tensor([[0.0, 1]])), split(torch.tensor([[-0.0, 1]]))) == 1


def test_incomparable_inputs_are_not_shared() -> None:
    x = torch.zeros(3, 4)
    assert overlap(split(x), split(x.t().contiguous())) == 0
    assert overlap(split(x), split(x.int())) == 0  # the same bytes, but not the same numbers
    assert overlap(split(x), Split(FileExamples("", ("a.png",)), torch.arange(1), torch.zeros(1))) == 0
    columns = torch.arange(12.0).view(4, 3).t()  # the rows are not contiguous
    assert overlap(split(columns), split(columns.contiguous())) == 3


def test_files_are_compared_by_resolved_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("train/a.png", "train/b.png", "train/deep/c.png", "other/a.png"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b"")
    (tmp_path / "linked").symlink_to(tmp_path / "train")
    (tmp_path / "checked").mkdir()
    (tmp_path / "checked" / "linked.png").symlink_to(tmp_path / "train" / "b.png")
    (tmp_path / "checked" / "dead.png").symlink_to(tmp_path / "gone.png")

    def files(root: str, *paths: str) -> Split:
        return Split(FileExamples(root, paths), torch.arange(len(paths)), torch.zeros(len(paths)))

    train = files(str(tmp_path / "train"), "a.png", "b.png", "deep/c.png", "gone.png")
    assert overlap(train, train) == 4
    assert overlap(train, files(str(tmp_path / "linked"), "deep/c.png", "x.png", "a.png")) == 2
    assert overlap(train, files(str(tmp_path / "checked"), "linked.png", "dead.png")) == 1
    assert overlap(files(str(tmp_path / "checked"), "linked.png"), train) == 1
    assert overlap(train, files(str(tmp_path / "other"), "a.png")) == 0  # the same name in another folder
    monkeypatch.chdir(tmp_path / "train")
    assert overlap(train, files("", "a.png", os.path.join("..", "train", "b.png"))) == 2
    assert overlap(replace(train, rows=torch.tensor([1]), y=torch.zeros(1)), train) == 1


def test_overlap_is_fast() -> None:
    """CIFAR should take about a second; this is a tenth of it, with a generous limit."""
    x = torch.randint(256, (5_000, 3, 32, 32), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    assert overlap(split(x), split(x[4_000:].clone())) == 1_000
