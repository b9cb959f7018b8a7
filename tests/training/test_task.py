"""make_task: parts without overlap, noise in the noisy parts only, and no access to the true labels."""

from collections.abc import Iterator
from dataclasses import fields, is_dataclass, replace
from itertools import chain
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

from warpi.data.dataset import Dataset
from warpi.data.examples import Scale, TensorExamples
from warpi.data.numeric import Features, make_features
from warpi.data.split import Split
from warpi.errors import UserError
from warpi.noise.noise_file import hash_labels
from warpi.noise.parse import Noise
from warpi.training.task import Task, Truth, _warn_uneven, check_every_class, make_task
from warpi.utils.seeding import generator

SOME = settings(max_examples=15, deadline=None, derandomize=True)


def made(
    counts: list[int], *, seed: int = 0, name: str = "made", standardize: bool = False, wrong: float = 0.0, **more: Any
) -> Dataset:
    """A shuffled data set with these class counts. Input i is (i, i, ...), so that its content identifies a row."""
    n = sum(counts)
    k = len(counts)
    rng = torch.Generator().manual_seed(seed)
    clean = torch.repeat_interleave(torch.arange(k), torch.tensor(counts))[torch.randperm(n, generator=rng)]
    y = torch.where(torch.rand(n, generator=rng) < wrong, (clean + 1) % k, clean)
    x = torch.arange(n).float()[:, None].expand(n, 3).clone() + 1000 * seed
    kind = Features if standardize else TensorExamples
    examples = kind(x, Scale(torch.tensor(0.0), torch.tensor(1.0)))
    more = {"clean": clean, **more}
    return Dataset(name, examples, y, tuple(f"class {i}" for i in range(k)), **more)


def split_of(dataset: Dataset) -> Split:
    """A data set as the test or trusted set of another one."""
    return Split(dataset.examples, torch.arange(len(dataset.y)), dataset.y)


def parts(task: Task, truth: Truth) -> dict[str, Split]:
    all_four = {"train": task.train, "meta": task.meta, "val": task.val, "test": truth.test}
    return {name: split for name, split in all_four.items() if split is not None}


def rows_of(task: Task, truth: Truth) -> dict[str, list[int]]:
    return {name: split.rows.tolist() for name, split in parts(task, truth).items()}


def counts_of(y: Tensor, k: int) -> list[int]:
    return torch.bincount(y, minlength=k).tolist()


def check_stratified(taken: list[int], of: list[int], share: float) -> None:
    """Check that every class has its share, rounded up or down, and that the total is right."""
    assert sum(taken) == round(share * sum(of))
    assert all(abs(t - share * n) < 1 for t, n in zip(taken, of, strict=True))


data_sets = st.builds(
    made,
    st.lists(st.integers(30, 50), min_size=2, max_size=5),
    seed=st.integers(0, 99),
    wrong=st.sampled_from([0, 0.2]),
)
noises = st.sampled_from(["given", "uniform:0.4", "symmetric:0.3", "pair:0.4", "flip:0.4", "instance:0.3"])
seeds = st.integers(0, 2**31)
shares = st.sampled_from([0, 0.1, 0.3])


# --- properties -----------------------------------------------------------------------------------------------------


@SOME
@given(data_sets, noises, seeds, shares, shares, st.integers(1, 4), st.integers(0, 4))
def test_a_task(dataset: Dataset, noise: str, seed: int, val: float, test: float, per_class: int, more: int) -> None:
    k, n, clean = dataset.n_classes, len(dataset.y), dataset.clean
    assert clean is not None
    n_meta = per_class * k + more % k
    task, truth = make_task(dataset, noise, meta=n_meta, val=val, test=test, seed=seed)
    rows = rows_of(task, truth)

    # without overlap and complete
    assert sorted(chain(*rows.values())) == list(range(n))
    assert set(rows) == {"train", "meta"} | ({"val"} if val else set()) | ({"test"} if test else set())
    assert all(list(r) == sorted(r) for r in rows.values())

    # trusted rows: the requested number, balanced, with true labels
    assert task.meta is not None
    assert len(task.meta) == n_meta
    assert sorted(counts_of(task.meta.y, k)) == sorted([per_class] * (k - more % k) + [per_class + 1] * (more % k))
    assert torch.equal(task.meta.y, clean[task.meta.rows])

    # train and val have exactly the noise that `warpi corrupt` writes with this seed
    noisy = Noise.parse(noise).apply(dataset, generator(seed, "noise"))
    for split in (task.train, task.val):
        if split is not None:
            assert torch.equal(split.y, noisy.y[split.rows])
    assert truth.noise_hash == hash_labels(noisy.y)
    assert truth.T is None if noisy.T is None else torch.equal(truth.T, noisy.T)

    # true labels
    assert torch.equal(truth.clean, clean[task.train.rows])
    assert task.noise_rate == pytest.approx(float((truth.clean != task.train.y).double().mean()))
    if truth.test is not None:
        assert torch.equal(truth.test.y, clean[truth.test.rows])
        assert truth.test_is_clean

    # test and val are stratified by the true labels
    for split, share, of in ((truth.test, test, torch.arange(n)), (task.val, val, None)):
        if split is not None:
            of = torch.tensor(sorted(rows["train"] + rows["val"])) if of is None else of
            check_stratified(counts_of(clean[split.rows], k), counts_of(clean[of], k), share)


@SOME
@given(data_sets, noises, noises, seeds)
def test_the_split_depends_on_the_seed_but_not_on_the_noise(dataset: Dataset, a: str, b: str, seed: int) -> None:
    first = rows_of(*make_task(dataset, a, meta=10, seed=seed))
    assert rows_of(*make_task(dataset, a, meta=10, seed=seed)) == first
    assert rows_of(*make_task(dataset, b, meta=10, seed=seed)) == first
    other = rows_of(*make_task(dataset, a, meta=10, seed=seed + 1))
    assert all(other[name] != first[name] for name in first)


@SOME
@given(data_sets, noises, seeds)
def test_a_task_is_a_function_of_its_arguments(dataset: Dataset, noise: str, seed: int) -> None:
    before = torch.get_rng_state(), dataset.y.clone(), dataset.examples.x.clone()  # type: ignore[attr-defined]
    tasks = [make_task(dataset, noise, meta=10, seed=seed) for _ in "ab"]
    (_, a), (_, b) = tasks
    assert a.noise_hash == b.noise_hash
    for one, other in zip(*(parts(*t).values() for t in tasks), strict=True):
        assert torch.equal(one.y, other.y)
    after = torch.get_rng_state(), dataset.y, dataset.examples.x  # type: ignore[attr-defined]
    assert all(map(torch.equal, before, after))


@SOME
@given(data_sets, seeds, st.integers(60, 150))
def test_limit(dataset: Dataset, seed: int, limit: int) -> None:
    k = dataset.n_classes
    rows = list(chain(*rows_of(*make_task(dataset, meta=k, limit=limit, seed=seed)).values()))
    assert len(set(rows)) == len(rows)
    assert len(rows) == min(limit, len(dataset.y))
    assert dataset.clean is not None
    share = min(1.0, limit / len(dataset.y))
    check_stratified(counts_of(dataset.clean[rows], k), counts_of(dataset.clean, k), share)


# --- an error of the published code ------------------------------------------------------------------------------


def test_no_trusted_image_is_also_a_noisy_one(digits: Dataset) -> None:
    """The published code drew the trusted set and the noisy set independently, so they shared images."""
    task, truth = make_task(digits, "flip:0.4", meta=200, seed=4)
    contents = {}
    for name, split in parts(task, truth).items():
        contents[name] = {bytes(x.to(torch.uint8).tolist()) for x in 16 * next(split.batches(2000)).x}
        assert len(contents[name]) == len(split)  # digits has no duplicate images
    everything = set().union(*contents.values())
    assert len(everything) == sum(map(len, contents.values())) == len(digits.y)


# --- what a method may see ------------------------------------------------------------------------------------------


def reachable(value: object) -> Iterator[object]:
    yield value
    if is_dataclass(value):
        inside = [getattr(value, f.name) for f in fields(value)] + list(vars(value).values())
    elif isinstance(value, dict):
        inside = [*value.keys(), *value.values()]
    else:
        inside = list(value) if isinstance(value, tuple | list | set) else []
    for item in inside:
        yield from reachable(item)


def test_a_task_contains_no_true_labels() -> None:
    own_test, dataset = split_of(made([10, 10, 10], seed=9)), made([60, 60, 60])
    for source in (dataset, replace(dataset, test=own_test)):
        task, truth = make_task(source, "symmetric:0.5", meta=9, seed=2)
        objects = list(reachable(task))
        assert not any(isinstance(o, Truth | Dataset) for o in objects)
        assert {id(o) for o in objects if isinstance(o, Split)} == {id(s) for s in (task.train, task.meta, task.val)}
        assert truth.test is not None
        assert truth.clean is not None
        assert dataset.clean is not None
        secrets = [dataset.clean, truth.clean, truth.T, truth.test.y, truth.test.rows]
        for tensor in (o for o in objects if isinstance(o, Tensor)):
            assert not any(tensor.shape == s.shape and torch.equal(tensor, s) for s in secrets if s is not None)
        assert truth.noise_hash not in [o for o in objects if isinstance(o, str)]


# --- sources of trusted examples -------------------------------------------------------------------------------


def test_rows_marked_as_trusted() -> None:
    """They have the true label if it is known, else the given one."""
    plain = made([40, 40], wrong=0.4)
    assert plain.clean is not None
    trusted = torch.arange(80) % 3 == 0
    half_known = torch.where(torch.arange(80) % 2 == 0, plain.clean, -1)
    for clean, wanted in (
        (None, plain.y),
        (plain.clean, plain.clean),
        (half_known, torch.where(half_known >= 0, half_known, plain.y)),
    ):
        dataset = replace(plain, clean=clean, trusted=trusted)
        task, truth = make_task(dataset, "given", seed=1)
        rows = rows_of(task, truth)
        assert sorted(chain(*rows.values())) == list(range(80))
        assert task.meta is not None
        assert set(rows["meta"]) == set(trusted.nonzero()[:, 0].tolist()) - set(rows["test"])
        assert torch.equal(task.meta.y, wanted[task.meta.rows])
        assert not trusted[task.train.rows].any()
        assert truth.test is not None
        assert torch.equal(truth.test.y, wanted[truth.test.rows])
        assert truth.test_is_clean == (clean is plain.clean)
        assert (task.noise_rate is None) == (clean is not plain.clean)
        assert (truth.clean is None) == (clean is None)

        fewer, _ = make_task(dataset, "given", meta=6, seed=1)
        assert fewer.meta is not None
        assert set(fewer.meta.rows.tolist()) < set(rows["meta"])
        assert counts_of(fewer.meta.y, 2) == [3, 3]
        assert make_task(dataset, "given", meta=0)[0].meta is None


def test_a_trusted_set_that_comes_with_the_data() -> None:
    own = split_of(made([5, 7, 6], seed=3))
    dataset = made([40, 40, 40], meta=own)
    task, truth = make_task(dataset, "pair:0.3", seed=1)
    assert task.meta is not None
    assert task.meta.examples is own.examples
    assert torch.equal(task.meta.y, own.y)
    others = [rows for name, rows in rows_of(task, truth).items() if name != "meta"]
    assert sorted(chain(*others)) == list(range(120))
    fewer, _ = make_task(dataset, "pair:0.3", meta=7, seed=1)
    assert fewer.meta is not None
    assert sorted(counts_of(fewer.meta.y, 3)) == [2, 2, 3]
    assert torch.equal(fewer.meta.y, own.y[fewer.meta.rows])
    assert len(fewer.train) == len(task.train)
    assert make_task(dataset, meta=0)[0].meta is None


def test_a_second_file_has_priority() -> None:
    own, second = split_of(made([5, 5], seed=3)), made([6, 8], seed=4, name="second")
    dataset = made([40, 40], meta=own, trusted=torch.ones(80, dtype=torch.bool))
    task, _ = make_task(dataset, meta_data=second)
    assert task.meta is not None
    assert task.meta.examples is second.examples
    assert torch.equal(task.meta.y, second.y)
    fewer, _ = make_task(dataset, meta=4, meta_data=second)
    assert fewer.meta is not None
    assert counts_of(fewer.meta.y, 2) == [2, 2]


@pytest.mark.parametrize("rare", [1, 2, 3])
def test_no_class_loses_its_last_training_row(rare: int) -> None:
    task, truth = make_task(made([40, 40, *[rare] * 9]), test=0.25, val=0.25)
    assert min(counts_of(task.train.y, 11)) >= 1
    assert truth.test is not None
    assert len(task.train) + len(task.val or ()) + len(truth.test) == 80 + 9 * rare


def test_without_trusted_examples() -> None:
    task, _ = make_task(made([40, 40]), "pair:0.2")
    assert task.meta is None


# --- test sets, scales, open sets -----------------------------------------------------------------------------------


def test_a_test_set_that_comes_with_the_data() -> None:
    own = split_of(made([30, 20], seed=3))
    dataset = made([40, 40], test=own, test_is_clean=True)
    task, truth = make_task(dataset, meta=4, test=0.5)
    assert truth.test is not None
    assert truth.test.examples is own.examples
    assert torch.equal(truth.test.rows, own.rows)
    assert torch.equal(truth.test.y, own.y)
    assert truth.test_is_clean
    assert len(task.train) + 4 + len(task.val or ()) == 80
    assert not make_task(replace(dataset, test_is_clean=False), meta=4)[1].test_is_clean, "the test labels may be wrong"
    _, small = make_task(dataset, meta=4, limit=25)
    assert small.test is not None
    assert len(small.test) == 25
    assert counts_of(small.test.y, 2) == [15, 10]
    assert torch.equal(small.test.y, own.y[small.test.rows])


def test_features_are_standardized_by_the_training_rows_only() -> None:
    own, second = (split_of(made([20, 20], seed=s, standardize=True)) for s in (3, 4))
    for extra in ({}, {"test": own, "meta": second}):
        dataset = made([40, 40], standardize=True, **extra)
        task, truth = make_task(dataset, meta=10, seed=1)
        assert isinstance(task.train.examples, TensorExamples)
        x = dataset.examples.flat(task.train.rows).double()
        mean, std = x.mean(0), x.std(0, correction=0)
        for name, split in parts(task, truth).items():
            got, raw = next(split.batches(200)).x, split.examples.flat(split.rows)
            torch.testing.assert_close(got, ((raw - mean) / std).float(), msg=name)
        train = next(task.train.batches(200)).x.double()
        torch.testing.assert_close(train.mean(0), torch.zeros(3).double(), atol=1e-6, rtol=0)
        torch.testing.assert_close(train.std(0, correction=0), torch.ones(3).double())


def test_constant_features_become_zero() -> None:
    dataset = made([40, 40], standardize=True)
    dataset.examples.x[:, 1] = 7.0  # type: ignore[attr-defined]
    x = next(make_task(dataset, meta=4)[0].train.batches(200)).x
    assert bool((x[:, 1] == 0).all())
    assert bool(x.isfinite().all())


def test_open_set_noise_reaches_noisy_rows_only() -> None:
    dataset, other = made([50, 50]), made([60, 60], seed=7, name="other")
    noise = Noise.parse("open_set:0.5,from=other")
    task, truth = make_task(dataset, noise, meta=10, seed=1, other=other)
    noisy = noise.apply(dataset, generator(1, "noise"), other)
    assert noisy.replaced is not None
    for name, split in parts(task, truth).items():
        x = next(split.batches(200)).x[:, 0].long()
        is_noisy = name in ("train", "val")
        hit = (noisy.replaced[split.rows] >= 0) & is_noisy
        assert torch.equal(x, torch.where(hit, 7000 + noisy.replaced[split.rows], split.rows))
        assert bool(hit.any()) == is_noisy
    assert torch.equal(dataset.examples.flat(torch.arange(100))[:, 0].long(), torch.arange(100))

    # none of the classes is right for such a row, and the noise rate counts them
    assert truth.clean is not None
    replaced = noisy.replaced[task.train.rows] >= 0
    assert torch.equal(truth.clean < 0, replaced)
    assert torch.equal(truth.clean[~replaced], task.train.y[~replaced])
    assert task.noise_rate == pytest.approx(float(replaced.double().mean()))
    assert truth.noise_hash == hash_labels(noisy.y, noisy.replaced)


def test_to_moves_everything(tiny: tuple[Task, Truth]) -> None:
    task, truth = (part.to("meta") for part in tiny)
    for split in parts(task, truth).values():
        assert split.y.device.type == split.examples.device.type == "meta"
        assert split.rows.device.type == "cpu"
    assert task.noise_rate == tiny[0].noise_rate


# --- mistakes -------------------------------------------------------------------------------------------------------

UNKNOWN = made([40, 40, 40], clean=None)
LOPSIDED = made([40, 3, 40])
NO_MIDDLE = split_of(replace(made([8, 1, 8]), y=2 * (torch.arange(17) % 2)))


@pytest.mark.parametrize(
    ("dataset", "settings", "words"),
    [
        (
            LOPSIDED,
            {"meta": 12, "test": 0.0},
            "cannot draw 12 balanced .* class 'class 1' needs 4 but has only 3 candidates",
        ),
        (LOPSIDED, {"meta": 2}, "--meta 2 cannot cover 3 classes; set it to at least 3"),
        (LOPSIDED, {"meta": -1}, "--meta -1 cannot cover"),
        (UNKNOWN, {"meta": 12}, "--meta 12 .* those of made are not; .*--trusted"),
        (made([40, 40, 0]), {}, "1 of 3 classes without an example in the training rows: 'class 2'"),
        (UNKNOWN, {"val": 1.0}, r"val must be a fraction of the rows in \[0, 1\), got 1.0"),
        (UNKNOWN, {"val": -0.1}, "val must be a fraction"),
        (UNKNOWN, {"test": 25}, "test must be a fraction .* got 25"),
        (UNKNOWN, {"test": float("nan")}, "test must be a fraction"),
        (UNKNOWN, {"limit": 0}, "limit must be at least 1, got 0"),
        (UNKNOWN, {"limit": -5}, "limit must be at least 1"),
        (UNKNOWN, {"limit": 1}, "classes without an example"),
        (UNKNOWN, {"noise": "flop:0.1"}, "did you mean 'flip'"),
        (UNKNOWN, {"meta_data": made([9, 9], name="second")}, "second have classes .*'class 1'"),
        (
            UNKNOWN,
            {
                "meta_data": replace(
                    made([9, 9, 9]), examples=TensorExamples(torch.zeros(27, 4), UNKNOWN.examples.scale)
                )
            },  # type: ignore[attr-defined]
            r"inputs of shape \(4,\), but the data has \(3,\)",
        ),
        (replace(UNKNOWN, trusted=torch.arange(120) < 0), {"meta": 3}, "needs 1 but has only 0 candidates"),
    ],
)
def test_mistakes(dataset: Dataset, settings: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words) as caught:
        make_task(dataset, **settings)
    assert "\n" not in str(caught.value)


def test_rows_that_also_occur_in_a_second_file_are_only_trusted() -> None:
    dataset = made([60, 60])
    rows = torch.arange(0, 120, 5)
    second = Dataset(
        "second", TensorExamples(dataset.examples.x[rows], dataset.examples.scale), dataset.y[rows], dataset.classes
    )  # type: ignore[attr-defined]
    task, truth = make_task(dataset, meta_data=second)
    others = {int(v) for name, split in parts(task, truth).items() if name != "meta" for v in split.rows}
    assert others == set(range(120)) - set(rows.tolist())


def test_rows_equal_to_trusted_ones_by_coincidence_are_kept() -> None:
    """With few possible values most rows equal some trusted example."""
    rng = torch.Generator().manual_seed(0)
    x, y = torch.randint(4, (2000, 4), generator=rng).float(), torch.randint(3, (2000,), generator=rng)
    one = Scale(torch.tensor(0.0), torch.tensor(1.0))
    noisy, checked = (
        Dataset("x", TensorExamples(x[rows], one), y[rows], ("a", "b", "c"))
        for rows in (slice(1800), slice(1800, None))
    )
    task, truth = make_task(noisy, meta_data=checked)
    assert truth.n_repeated <= 200
    assert sum(map(len, parts(task, truth).values())) == 2000 - truth.n_repeated


@pytest.mark.parametrize(("limit", "words"), [(None, "all 40 rows of made are trusted"), (20, "20 of 40 rows of made")])
def test_only_trusted_rows_raise(limit: int | None, words: str) -> None:
    trusted = torch.ones(40, dtype=torch.bool)
    with pytest.raises(UserError, match=f"{words}.* none is left to train on; trust only rows that somebody"):
        make_task(made([20, 20], trusted=trusted), test=0.9, val=0.0, limit=limit)


def test_trusted_examples_in_the_test_set_are_refused() -> None:
    own = split_of(made([30, 20], seed=3))
    with pytest.raises(UserError, match="50 of 50 trusted examples are also in the test set"):
        make_task(made([40, 40], test=own, meta=own))


def test_trusted_examples_equal_to_test_rows_by_coincidence_warn(caplog: pytest.LogCaptureFixture) -> None:
    """With a few categorical columns."""
    rng = torch.Generator().manual_seed(0)
    x, y = torch.randint(4, (2600, 4), generator=rng).float(), torch.randint(3, (2600,), generator=rng)
    one, names = Scale(torch.tensor(0.0), torch.tensor(1.0)), ("a", "b", "c")
    noisy, test, checked = (
        Dataset("x", TensorExamples(x[rows], one), y[rows], names)
        for rows in (slice(2000), slice(2000, 2500), slice(2500, None))
    )
    task, truth = make_task(replace(noisy, test=split_of(test)), meta_data=checked)
    assert sum("of 100 trusted examples are also in the test set, about" in m for m in caplog.messages) == 1
    assert task.meta is not None
    assert truth.test is not None
    assert (len(task.meta), len(truth.test)) == (100, 500)  # all are kept


def test_examples_are_moved_once(tiny: tuple[Task, Truth]) -> None:
    task = tiny[0].to("meta")
    truth = tiny[1].to("meta")
    tensors = {id(split.examples.x) for split in parts(task, truth).values()}  # type: ignore[attr-defined]
    assert len(tensors) == 1


def test_uneven_trusted_examples_warn(caplog: pytest.LogCaptureFixture) -> None:
    def warns(trusted: list[int], given: list[int]) -> bool:
        caplog.clear()
        counts = (torch.arange(3).repeat_interleave(torch.tensor(n)) for n in (trusted, given))
        with caplog.at_level("WARNING"):
            _warn_uneven(*counts, ("a", "b", "c"))
        return any("12 of a, 3 of b" in r.getMessage() for r in caplog.records)

    assert warns([12, 3, 6], [100, 100, 100])
    assert not warns([12, 3, 6], [400, 100, 200])  # like the data
    assert not warns([5, 5, 5], [400, 100, 200])  # even
    assert not warns([8, 3, 6], [100, 100, 100])
    caplog.clear()
    _warn_uneven(*(torch.arange(3).repeat_interleave(torch.tensor(n)) for n in ([4, 8, 12], [30, 100, 300])), ("abc"))
    assert not caplog.records  # between even and like the data


def test_trusted_examples_on_another_scale_warn(caplog: pytest.LogCaptureFixture) -> None:
    """In a Pipeline they easily miss the scaler, and meta methods would silently learn nothing."""
    x, y = torch.randn(90, 4, generator=torch.Generator().manual_seed(0)), torch.arange(90) % 3
    x[:, 0] = 0  # a constant feature is ignored
    data = Dataset("x", make_features(x), y, ("a", "b", "c"))
    for shift, message in (([0, 0, 0, 0], ""), ([9, 0, 0, 0], ""), ([0, 0, 9, -9], "in 2 of 4 features the mean")):
        caplog.clear()
        make_task(data, meta_data=Dataset("m", make_features(x[:30] + torch.tensor(shift)), y[:30], data.classes))
        assert message in caplog.text
        assert bool(caplog.records) == bool(message)


def test_corrected_labels_apply_to_test_rows_without_known_truth() -> None:
    data = made([40, 40], wrong=0.3, clean=None)
    corrected_y = 1 - data.y
    corrected = replace(data, label_sets={"corrected": corrected_y})
    _, truth = make_task(corrected, "given:corrected", meta=0)
    assert truth.test is not None
    assert torch.equal(truth.test.y, corrected_y[truth.test.rows])

    half = torch.where(torch.arange(80) < 40, data.y, -1)  # known true labels of some rows are kept
    _, truth = make_task(replace(corrected, clean=half), "given:corrected", meta=0)
    assert truth.test is not None
    rows = truth.test.rows
    assert torch.equal(truth.test.y, torch.where(half[rows] >= 0, half[rows], corrected_y[rows]))

    _, truth = make_task(data, "symmetric:0.4", meta=0)  # synthetic noise only affects training rows
    assert truth.test is not None
    assert torch.equal(truth.test.y, data.y[truth.test.rows])


def test_methods_may_ask_for_an_example_of_every_class() -> None:
    task, _ = make_task(made([40, 3, 40]), meta=9, test=0.0)
    with pytest.raises(UserError, match=r"1 of 3 classes without an example in the training rows: 'class 1'"):
        check_every_class(task)
    task, _ = make_task(made([40, 40, 40], meta=NO_MIDDLE))
    with pytest.raises(UserError, match=r"1 of 3 classes without an example in the trusted .*'class 1'"):
        check_every_class(task)
