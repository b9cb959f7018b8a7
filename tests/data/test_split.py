"""Split, TensorExamples and Loader: every row is read, and a stream can be resumed at any batch."""

import itertools
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

from warpi.data.augment import Crop
from warpi.data.batch import Batch
from warpi.data.examples import ReadBatch, Scale, TensorExamples
from warpi.data.loader import Loader
from warpi.data.numeric import Features
from warpi.data.split import Split
from warpi.errors import UserError

ONE = Scale(torch.tensor(0.0), torch.tensor(1.0))


def numbered(n: int, first: int = 0) -> Split:
    """n rows of a larger set; the input of a row is its number, and its label is ten times that."""
    rows = torch.arange(first, first + n).flip(0)  # reversed, so that rows and positions differ
    return Split(TensorExamples(torch.arange(float(first + n + 5))[:, None], ONE), rows, rows * 10)


def images(n: int = 6, size: int = 5, pad: int = 2, flip: bool = True) -> TensorExamples:
    x = torch.randint(256, (n, 3, size, size), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    return TensorExamples(x, Scale(torch.tensor(10.0), torch.tensor(4.0)), Crop(size, pad, flip))


def equal(a: Batch, b: Batch) -> bool:
    return all(torch.equal(p, q) for p, q in zip((*a.views, a.y, a.rows), (*b.views, b.y, b.rows), strict=True))


def same(a: Iterable[Batch], b: Iterable[Batch]) -> bool:
    return all(equal(p, q) for p, q in zip(a, b, strict=True))


@dataclass(frozen=True, eq=False)
class Ahead(TensorExamples):
    """Reads three batches ahead, as reader processes do, and cannot read the rows in `lost`."""

    lost: tuple[int, ...] = ()

    def stream(
        self, batches: Iterable[tuple[Tensor, int]], *, augment: bool, views: int = 1, **_: Any
    ) -> Iterator[ReadBatch]:
        waiting: deque[ReadBatch] = deque()
        for rows, seed in batches:
            kept = ~torch.isin(rows, torch.tensor(self.lost, dtype=torch.int64))
            (read,) = super().stream([(rows[kept], seed)], augment=augment, views=views)
            waiting.append(ReadBatch(read.views, kept if self.lost else None))
            if len(waiting) > 3:
                yield waiting.popleft()
        yield from waiting

    @classmethod
    def of(cls, split: Split, *lost: int) -> Split:
        examples = split.examples
        assert isinstance(examples, TensorExamples)
        return replace(split, examples=cls(examples.x, examples.scale, examples.crop, lost=lost))


class TestSplit:
    def test_batches_return_every_row_in_order(self) -> None:
        split = numbered(10, first=3)
        batches = list(split.batches(4))
        assert [len(b.y) for b in batches] == [4, 4, 2]
        assert torch.equal(torch.cat([b.x[:, 0] for b in batches]), split.rows.float())
        assert torch.equal(torch.cat([b.y for b in batches]), split.y)
        assert torch.equal(torch.cat([b.rows for b in batches]), torch.arange(10))

    def test_unreadable_rows_have_no_labels(self) -> None:
        split = numbered(7)
        for batch in Ahead.of(split, 2, 6).batches(3):
            assert torch.equal(batch.x[:, 0] * 10, batch.y.float())
            assert torch.equal(split.y[batch.rows], batch.y)
        rows = torch.cat([b.rows for b in Ahead.of(split, 2, 6).batches(3)])
        assert set(split.rows[rows].tolist()) == {0, 1, 3, 4, 5}

    def test_rows_stay_on_the_cpu(self) -> None:
        moved = numbered(4).to("meta")
        assert moved.y.device.type == "meta"
        assert moved.examples.device.type == "meta"
        assert moved.rows.device.type == "cpu"


class TestTensorExamples:
    def test_normalizes(self) -> None:
        x = torch.tensor([[2.0, 4.0], [6.0, 8.0]])
        examples = TensorExamples(x, Scale(torch.tensor([1.0, 2.0]), torch.tensor([2.0, 4.0])))
        (read,) = examples.stream([(torch.tensor([1, 0]), 0)], augment=False)
        assert torch.equal(read.views[0], torch.tensor([[2.5, 1.5], [0.5, 0.5]]))
        assert read.kept is None

    def test_augmentation_crops_the_reflected_image(self) -> None:
        examples, rows = images(), torch.tensor([4, 1, 1, 0])
        (read,) = examples.stream([(rows, 9)], augment=True)
        padded = torch.nn.functional.pad(examples.x.float(), [2] * 4, mode="reflect")
        for row, actual in zip(rows.tolist(), read.views[0] * 4 + 10, strict=True):
            windows = [padded[row, :, i : i + 5, j : j + 5] for i, j in itertools.product(range(5), repeat=2)]
            assert any(torch.allclose(actual, w) or torch.allclose(actual, w.flip(2)) for w in windows)

    def test_augmentation_depends_only_on_the_seed(self) -> None:
        examples, rows = images(), torch.arange(6)
        many = list(examples.stream([(rows, s) for s in (3, 4, 3)], augment=True, views=2))
        (alone,) = examples.stream([(rows, 3)], augment=True, views=2)
        assert all(torch.equal(a, b) for a, b in zip(many[2].views, alone.views, strict=True))
        assert all(torch.equal(a, b) for a, b in zip(many[0].views, alone.views, strict=True))
        assert not torch.equal(many[0].views[0], many[1].views[0])
        assert not torch.equal(alone.views[0], alone.views[1]), "two views are two draws"

    def test_global_generator_does_not_change(self) -> None:
        before = torch.get_rng_state()
        list(images().stream([(torch.arange(6), 1)], augment=True))
        assert torch.equal(before, torch.get_rng_state())

    def test_center_crop_without_augmentation(self) -> None:
        x = torch.arange(2 * 1 * 6 * 6, dtype=torch.uint8).view(2, 1, 6, 6)
        examples = TensorExamples(x, ONE, Crop(4, 2))
        (read,) = examples.stream([(torch.tensor([1]), 0)], augment=False, views=3)
        assert examples.shape == (1, 4, 4)
        assert len(read.views) == 3
        assert all(torch.equal(view, x[1:, :, 1:5, 1:5].float()) for view in read.views)

    def test_scale_is_fitted_to_the_training_rows(self) -> None:
        x = torch.tensor([[1.0, 5.0], [3.0, 5.0], [100.0, -9.0]])
        examples = Features(x, Scale(torch.zeros(2), torch.ones(2)))
        scale = examples.fit_scale(torch.tensor([0, 1]))
        assert scale is not None
        assert torch.equal(scale.mean, torch.tensor([2.0, 5.0]))
        assert torch.equal(scale.std, torch.tensor([1.0, torch.inf])), "a constant feature gets an infinite deviation"
        (read,) = examples.with_scale(scale).stream([(torch.arange(3), 0)], augment=False)
        assert torch.equal(read.views[0], torch.tensor([[-1.0, 0.0], [1.0, 0.0], [98.0, 0.0]]))
        assert images().fit_scale(torch.arange(3)) is None

    def test_replace_inputs_returns_a_copy(self) -> None:
        a, b = images(4), images(4)
        b = replace(b, x=255 - b.x)
        mixed = a.replace_inputs(torch.tensor([1, 3]), b, torch.tensor([0, 2]))
        assert torch.equal(mixed.x[1], b.x[0])
        assert torch.equal(mixed.x[3], b.x[2])
        assert torch.equal(mixed.x[0], a.x[0])
        assert torch.equal(a.x, images(4).x)
        with pytest.raises(UserError, match=r"same shape \(3, 5, 5\), got \(3, 7, 7\)"):
            a.replace_inputs(torch.tensor([0]), images(4, size=7), torch.tensor([0]))

    def test_flat_returns_raw_inputs(self) -> None:
        examples = images()
        assert torch.equal(examples.flat(torch.tensor([2])), examples.x[2].float().reshape(1, -1))


sizes = st.tuples(st.integers(1, 25), st.integers(1, 30))  # rows, batch size


class TestLoader:
    @given(sizes, st.integers(0, 2**40))
    @settings(max_examples=25, deadline=None)
    def test_every_row_once_per_pass(self, size: tuple[int, int], seed: int) -> None:
        n, batch_size = size
        loader = Loader(numbered(n), batch_size, seed)
        size_given = min(n, batch_size)  # a batch is never larger than the split
        orders = []
        for t in range(3):
            batches = list(loader.epoch(t))
            assert len(batches) == len(loader) == n // size_given
            assert all(len(b.y) == size_given for b in batches)
            rows = torch.cat([b.rows for b in batches])
            assert len(set(rows.tolist())) == len(rows) > n - size_given
            assert all(torch.equal(b.x[:, 0] * 10, b.y.float()) for b in batches)
            orders.append(rows.tolist())
        if n >= 12:
            assert orders[0] != orders[1], "each pass has its own order"

    @given(sizes, st.integers(0, 60), st.booleans())
    @settings(max_examples=25, deadline=None)
    def test_resumes_at_any_batch(self, size: tuple[int, int], stop: int, ahead: bool) -> None:
        split = Ahead.of(numbered(size[0]), 1, 4) if ahead else numbered(size[0])
        whole = [b for t in range(4) for b in Loader(split, size[1], 7).epoch(t)]
        first, second = Loader(split, size[1], 7), Loader(split, size[1], 7)
        stop = min(stop, len(whole))
        head = list(itertools.islice((b for t in range(4) for b in first.epoch(t)), stop))
        second.load_state_dict(first.state_dict())
        rest = [b for t in range(stop // len(second), 4) for b in second.epoch(t)]
        assert same(whole, head + rest)

    @given(sizes, st.integers(0, 40), st.booleans())
    @settings(max_examples=25, deadline=None)
    def test_draws_resume_exactly(self, size: tuple[int, int], stop: int, ahead: bool) -> None:
        split = Ahead.of(numbered(size[0])) if ahead else numbered(size[0])
        reference, first, second = (Loader(split, size[1], 7) for _ in range(3))
        whole = [reference.draw() for _ in range(50)]
        head = [first.draw() for _ in range(stop)]
        assert first.state_dict() == {"count": stop}, "batches that were only read ahead do not count"
        second.draw()  # the running stream is dropped
        second.load_state_dict(first.state_dict())
        assert same(whole, head + [second.draw() for _ in range(50 - stop)])

    @pytest.mark.parametrize("augmented", [False, True])
    def test_inputs_of_a_small_split_are_normalized_once(self, augmented: bool, monkeypatch: Any) -> None:
        examples = images(9) if augmented else replace(images(9), crop=None)
        split = Split(examples, torch.tensor([8, 1, 3, 0, 5]), torch.arange(5))
        loaders = [Loader(split, 2, 7, views=2) for _ in range(2)]
        reads = []
        read = TensorExamples.read
        monkeypatch.setattr(TensorExamples, "read", lambda *a, **b: reads.append(0) or read(*a, **b))
        small = [loaders[0].draw() for _ in range(6)]
        assert len(reads) == (6 if augmented else 1)  # augmented inputs differ from pass to pass
        monkeypatch.setattr("warpi.data.loader.SMALL_SPLIT", 0)
        assert same(small, [loaders[1].draw() for _ in range(6)])

    def test_draws_follow_the_passes(self) -> None:
        drawn, passed = Loader(numbered(10), 4, 1), Loader(numbered(10), 4, 1)
        assert same([drawn.draw() for _ in range(6)], [b for t in range(3) for b in passed.epoch(t)])

    def test_augmentation_resumes_exactly(self) -> None:
        split = Split(images(6), torch.arange(6), torch.arange(6))
        whole = [b for t in range(3) for b in Loader(split, 2, 5, views=2).epoch(t)]
        late = Loader(split, 2, 5, views=2)
        late.load_state_dict({"count": 4})
        assert same(whole[4:], [b for t in (1, 2) for b in late.epoch(t)])
        assert len(whole[0].views) == 2
        assert not torch.equal(whole[0].x, next(Loader(split, 2, 5, augment=False).epoch(0)).x)

    def test_epoch_with_another_number_of_steps(self) -> None:
        loader = Loader(numbered(10), 4, 2)
        drawn = Loader(numbered(10), 4, 2)
        loader.steps = 5  # more than the two batches of a pass
        assert same([b for t in range(2) for b in loader.epoch(t)], [drawn.draw() for _ in range(10)])

    def test_finished_epoch_is_empty(self) -> None:
        loader = Loader(numbered(10), 4, 2)
        list(loader.epoch(0))
        assert list(loader.epoch(0)) == []
        assert loader.count == 2

    def test_skipped_epochs_stay_skipped(self) -> None:
        """FineTune does not use its trusted loader in most epochs; resuming must give the same batches."""
        loader, other = Loader(numbered(10), 4, 2), Loader(numbered(10), 4, 2)
        expected = [list(other.epoch(t)) for t in range(4)][3]
        assert same(loader.epoch(3), expected)

    def test_count_is_updated_before_the_batch_is_returned(self) -> None:
        loader = Loader(Ahead.of(numbered(20)), 2, 0)
        for k, _ in enumerate(loader.epoch(0), 1):
            assert loader.state_dict() == {"count": k}

    def test_draws_and_epochs_share_one_position(self) -> None:
        loader, reference = Loader(numbered(10), 4, 2), Loader(numbered(10), 4, 2)
        actual = [loader.draw(), *loader.epoch(0), *loader.epoch(1), loader.draw()]
        assert same(actual, [reference.draw() for _ in range(5)])
        assert loader.count == 5

    def test_unreadable_rows_are_removed_from_batches(self) -> None:
        split = numbered(12)
        for batch in Loader(Ahead.of(split, 0, 5, 11), 4, 3).epoch(0):
            assert len(batch.x) == len(batch.y) == len(batch.rows)
            assert torch.equal(batch.x[:, 0] * 10, batch.y.float())
            assert torch.equal(split.y[batch.rows], batch.y)
            assert not {0, 5, 11} & set(split.rows[batch.rows].tolist())

    def test_seeds(self) -> None:
        def order(seed: int) -> list[int]:
            return [int(r) for b in Loader(numbered(30), 5, seed).epoch(0) for r in b.rows]

        assert order(1) == order(1)
        assert order(1) != order(2)

    def test_global_generators_do_not_change(self) -> None:
        before = torch.get_rng_state()
        list(Loader(Split(images(), torch.arange(6), torch.arange(6)), 2, 0).epoch(0))
        assert torch.equal(before, torch.get_rng_state())

    def test_permutations_are_uniform(self) -> None:
        """The first row is uniform: 2,000 passes over 5 rows, chi-square test with 4 degrees of freedom."""
        loader = Loader(numbered(5), 1, 0)
        counts = torch.bincount(torch.tensor([int(loader.index(5 * p)) for p in range(2000)]), minlength=5)
        assert float(((counts - 400) ** 2 / 400).sum()) < 18.5  # p = 0.001
