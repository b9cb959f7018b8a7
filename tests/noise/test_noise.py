"""Label noise: each kind does what its docstring says."""

import math

import pytest
import torch
from hypothesis import given as examples_of, settings, strategies as st

from warpi.data.dataset import Dataset
from warpi.data.examples import Scale, TensorExamples
from warpi.errors import UserError
from warpi.noise import kinds as noise
from warpi.noise.kinds import NoisyLabels
from warpi.noise.noise_file import write_noise_file
from warpi.noise.parse import NOISES, Noise

CIFAR10 = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
# Fixed examples, so that statistical tests are deterministic.
FIXED = settings(max_examples=12, deadline=None, derandomize=True)

seeds = st.integers(0, 2**31)
rates = st.floats(0, 1)
sizes = st.integers(3, 12)


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def some_labels(n: int, k: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(k, (n,), generator=seeded(seed))


def superclasses(k: int) -> torch.Tensor:
    return torch.arange(k) % max(1, k // 3)  # interleaved groups of at least three


def data(n: int = 60, k: int = 4, name: str = "made", dtype: torch.dtype = torch.float32, **more: object) -> Dataset:
    x = torch.randint(200, (n, 5), generator=seeded(1)).to(dtype)
    y = some_labels(n, k, 2)
    classes = more.pop("classes", tuple(map(str, range(k))))
    return Dataset(name, TensorExamples(x, Scale(torch.tensor(0.0), torch.tensor(1.0))), y, classes, **more)  # type: ignore[arg-type]


CONDITIONAL = {
    "uniform": noise.uniform,
    "symmetric": noise.symmetric,
    "flip": noise.flip,
    "flip2": noise.flip2,
    "pair": noise.pair,
    "asymmetric": lambda y, k, r, g: noise.asymmetric(y, k, r, g, (), superclasses(k)),
    "hierarchical": lambda y, k, r, g: noise.hierarchical(y, k, r, g, superclasses(k)),
}


def real_share(kind: str, k: int, rate: float) -> float:
    """The fraction of wrong labels as documented."""
    return rate * (1 - 1 / k) if kind == "uniform" else rate


kinds = pytest.mark.parametrize("kind", CONDITIONAL)


@kinds
@FIXED
@examples_of(k=sizes, rate=rates, seed=seeds)
def test_transition_rows_are_distributions_with_the_stated_share(kind: str, k: int, rate: float, seed: int) -> None:
    corrupt = CONDITIONAL[kind]
    y = some_labels(50, k, seed)
    before = y.clone()
    T = corrupt(y, k, rate, seeded(seed)).T
    assert T.dtype == torch.float64
    assert T.shape == (k, k)
    assert (T >= 0).all()
    torch.testing.assert_close(T.sum(1), torch.ones(k, dtype=torch.float64))
    torch.testing.assert_close(1 - T.diagonal(), torch.full((k,), real_share(kind, k, rate), dtype=torch.float64))
    assert torch.equal(y, before)


@kinds
@FIXED
@examples_of(k=sizes, rate=st.floats(0.05, 0.95), seed=seeds)
def test_draws_agree_with_the_transition_matrix(kind: str, k: int, rate: float, seed: int) -> None:
    y = some_labels(20_000, k, seed + 1)
    drawn = CONDITIONAL[kind](y, k, rate, seeded(seed))
    noisy, T = drawn.y, drawn.T
    assert noisy.dtype == torch.int64
    assert T is not None
    assert drawn.replaced is None
    for i in range(k):
        seen = torch.bincount(noisy[y == i], minlength=k).double()
        n = seen.sum()
        deviation = (T[i] * (1 - T[i]) / n).sqrt()
        assert ((seen / n - T[i]).abs() <= 5 * deviation + 5 / n).all()
        assert (seen[T[i] == 0] == 0).all()  # impossible labels never occur


@kinds
def test_seed_and_rate_zero(kind: str) -> None:
    corrupt = CONDITIONAL[kind]
    y = some_labels(400, 6)
    assert torch.equal(corrupt(y, 6, 0.5, seeded(1)).y, corrupt(y, 6, 0.5, seeded(1)).y)
    assert not torch.equal(corrupt(y, 6, 0.5, seeded(1)).y, corrupt(y, 6, 0.5, seeded(2)).y)
    assert torch.equal(corrupt(y, 6, 0.0, seeded(1)).y, y)
    if kind != "uniform":  # all others exclude the true class
        assert not (corrupt(y, 6, 1.0, seeded(1)).y == y).any()


@kinds
@pytest.mark.parametrize("rate", [-0.1, 1.1, math.nan])
def test_invalid_rates(kind: str, rate: float) -> None:
    with pytest.raises(UserError, match=r"must be in 0\.\.1"):
        CONDITIONAL[kind](some_labels(5, 4), 4, rate, seeded())


def test_rows_are_independent() -> None:
    """A label depends only on the class and draw of its row, and the number of wrong labels is binomial."""
    y = some_labels(300, 5)
    other = y.clone()
    other[100:] = (other[100:] + 1) % 5
    assert torch.equal(noise.symmetric(y, 5, 0.4, seeded()).y[:100], noise.symmetric(other, 5, 0.4, seeded()).y[:100])
    wrong = torch.tensor([int((noise.pair(y, 5, 0.4, seeded(s)).y != y).sum()) for s in range(200)]).double()
    assert 0.6 < float(wrong.var()) / (300 * 0.4 * 0.6) < 1.5


def test_impossible_classes_are_never_drawn() -> None:
    cdf = torch.tensor([[0.0, 0.5, 0.5, 1.0]], dtype=torch.float64).expand(3, 4).contiguous()
    assert noise._sample(cdf, torch.tensor([0.0, 0.5, 1 - 2**-53], dtype=torch.float64)).tolist() == [1, 3, 3]
    short = torch.tensor([[1 - 2**-50, 1 - 2**-50]], dtype=torch.float64)  # rounding can make the sum smaller than 1
    assert noise._sample(short, torch.tensor([1 - 2**-53], dtype=torch.float64)).tolist() == [0]


def test_large_sets_are_drawn_in_chunks() -> None:
    y = some_labels(2**16 + 7, 3)
    wrong = noise.pair(y, 3, 1.0, seeded()).y
    assert torch.equal(wrong, (y + 1) % 3)


@pytest.mark.parametrize(("kind", "least"), [("symmetric", 2), ("flip", 2), ("flip2", 3), ("pair", 2)])
def test_too_few_classes(kind: str, least: int) -> None:
    k = least - 1
    with pytest.raises(UserError, match=f"at least {least} classes"):
        CONDITIONAL[kind](torch.zeros(5, dtype=torch.int64), k, 0.3, seeded())


def test_flip_map_is_the_published_one() -> None:
    T = noise.flip(some_labels(5, 10), 10, 0.4, seeded()).T
    assert T is not None
    assert (T - 0.6 * torch.eye(10)).argmax(1).tolist() == [6, 9, 6, 0, 0, 1, 8, 6, 2, 4]
    assert (T > 0).sum(1).tolist() == [2] * 10


def test_flip2_map_is_the_published_one() -> None:
    T = noise.flip2(some_labels(5, 10), 10, 0.4, seeded()).T
    assert T is not None
    pairs = [[j for j in range(10) if j != i and T[i, j] > 0] for i in range(10)]
    assert pairs == [[3, 9], [4, 8], [1, 8], [4, 8], [2, 5], [4, 7], [2, 9], [5, 8], [5, 6], [4, 5]]
    assert T[0, [3, 9]].tolist() == [0.2, 0.2]


@FIXED
@examples_of(k=st.integers(3, 30), seed=st.integers(0, 2**32 - 1))
def test_map_seed_changes_the_map(k: int, seed: int) -> None:
    y = some_labels(5, k)
    for kind, targets in ((noise.flip, 1), (noise.flip2, 2)):
        T = kind(y, k, 1.0, seeded(), map_seed=seed).T
        assert T is not None
        assert (T.diagonal() == 0).all()
        assert (T > 0).sum(1).tolist() == [targets] * k


def test_asymmetric_cifar10() -> None:
    y = torch.arange(10).repeat(200)
    noisy = noise.asymmetric(y, 10, 1.0, seeded(), CIFAR10).y
    moved = {CIFAR10[a]: CIFAR10[b] for a, b in zip(y.tolist(), noisy.tolist(), strict=True) if a != b}
    assert moved == {"truck": "automobile", "bird": "airplane", "deer": "horse", "cat": "dog", "dog": "cat"}
    some = noise.asymmetric(y, 10, 0.4, seeded(), CIFAR10).y
    assert abs(float((some != y).double().mean()) - 0.2) < 5 * math.sqrt(0.4 * 0.6 / 1000) / 2


def test_asymmetric_superclass_is_circular() -> None:
    groups = torch.tensor([0, 1, 0, 2, 1, 0])
    moved = noise.asymmetric(torch.arange(6), 6, 1.0, seeded(), (), groups).y
    assert moved.tolist() == [2, 4, 5, 3, 1, 0]


def test_asymmetric_needs_known_classes() -> None:
    with pytest.raises(UserError, match="use flip, flip2 or pair"):
        noise.asymmetric(torch.arange(3), 3, 0.2, seeded(), ("a", "b", "c"))


def test_hierarchical_stays_within_the_superclass() -> None:
    groups = torch.tensor([0, 1, 0, 2, 1, 0])
    T = noise.hierarchical(torch.arange(6), 6, 0.4, seeded(), groups).T
    assert T is not None
    torch.testing.assert_close(T[0], torch.tensor([0.6, 0, 0.2, 0, 0, 0.2], dtype=torch.float64))
    torch.testing.assert_close(T[1], torch.tensor([0, 0.6, 0, 0, 0.4, 0], dtype=torch.float64))
    torch.testing.assert_close(T[3], torch.tensor([0, 0, 0, 1.0, 0, 0], dtype=torch.float64))
    with pytest.raises(UserError, match="superclasses"):
        noise.hierarchical(torch.arange(6), 6, 0.4, seeded())


# instance ------------------------------------------------------------------------------------------------------------


def naive_instance(x: torch.Tensor, c: int, q: torch.Tensor, W: torch.Tensor) -> list[list[float]]:
    table = []
    for row, rate in zip(x.tolist(), q.tolist(), strict=True):
        a = [sum(v * float(W[d, j]) for d, v in enumerate(row)) for j in range(W.shape[1])]
        top = max(a[j] for j in range(len(a)) if j != c)
        weights = [0.0 if j == c else math.exp(a[j] - top) for j in range(len(a))]
        table.append([1 - rate if j == c else rate * weights[j] / sum(weights) for j in range(len(a))])
    return table


@FIXED
@examples_of(k=st.integers(2, 6), n=st.integers(1, 5), seed=seeds, data=st.data())
def test_instance_probabilities_agree_with_a_loop(k: int, n: int, seed: int, data: st.DataObject) -> None:
    c = data.draw(st.integers(0, k - 1))
    draw = {"generator": seeded(seed), "dtype": torch.float64}
    x, W, q = torch.randn(n, 3, **draw), torch.randn(3, k, **draw), torch.rand(n, **draw)
    p = noise.instance_probabilities(x, c, q, W)
    torch.testing.assert_close(p, torch.tensor(naive_instance(x, c, q, W), dtype=torch.float64))
    torch.testing.assert_close(p.sum(1), torch.ones(n, dtype=torch.float64))


@pytest.mark.parametrize("scale", noise.SCALES)
def test_instance_agrees_with_a_loop_over_rows(scale: str) -> None:
    """Uses the same random numbers in the same order: rates, draws, one W per class."""
    n, k, rate = 40, 4, 0.4
    x, y = torch.randint(256, (n, 6), generator=seeded(5)).float(), some_labels(n, k, 6)
    actual = noise.instance(y, k, rate, seeded(7), lambda rows: x[rows], scale=scale, max_value=255.0)

    g = seeded(7)
    q = noise.truncated_normal(n, rate, g)
    u = torch.rand(n, generator=g, dtype=torch.float64)
    W = [torch.randn(6, k, generator=g, dtype=torch.float64) for _ in range(k)]
    z = x.double()
    z = {"raw": z, "unit": z / 255, "standard": (z - z.mean(0)) / z.std(0, correction=0)}[scale]
    table = [naive_instance(z[i : i + 1], int(y[i]), q[i : i + 1], W[int(y[i])])[0] for i in range(n)]
    for i in range(n):
        below = 0.0
        for j in range(k):
            below += table[i][j]
            if float(u[i]) < below:
                break
        assert int(actual.y[i]) == j
    p = torch.tensor(table, dtype=torch.float64)
    assert actual.T is not None
    for c in range(k):
        torch.testing.assert_close(actual.T[c], p[y == c].mean(0))


@pytest.mark.parametrize("scale", noise.SCALES)
def test_instance_chunks_do_not_matter(scale: str) -> None:
    x, y = torch.randint(256, (101, 6), generator=seeded(5)).float(), some_labels(101, 3, 6)
    whole, pieces = (
        noise.instance(y, 3, 0.4, seeded(7), lambda rows: x[rows], scale=scale, chunk=chunk) for chunk in (None, 7)
    )
    assert torch.equal(whole.y, pieces.y)
    torch.testing.assert_close(whole.T, pieces.T)


def test_instance_rates_and_share() -> None:
    q = noise.truncated_normal(20_000, 0.4, seeded())
    assert abs(float(q.mean()) - 0.4) < 5 * 0.1 / math.sqrt(20_000)
    assert abs(float(q.std()) - 0.1) < 0.003
    for mean, stated in ((0.1, 0.13), (1.0, 0.92)):
        q = noise.truncated_normal(20_000, mean, seeded())
        assert (q >= 0).all()
        assert (q <= 1).all()
        assert abs(float(q.mean()) - stated) < 0.005
    x, y = torch.rand(4000, 5, generator=seeded(1)), some_labels(4000, 5)
    drawn = noise.instance(y, 5, 0.4, seeded(), lambda rows: x[rows])
    noisy, T = drawn.y, drawn.T
    assert T is not None
    assert abs(float((noisy != y).double().mean()) - 0.4) < 5 * math.sqrt(0.24 / 4000)
    torch.testing.assert_close(T.sum(1), torch.ones(5, dtype=torch.float64))
    torch.testing.assert_close(T.diagonal(), torch.full((5,), 0.6, dtype=torch.float64), atol=0.02, rtol=0)


def test_instance_never_flips_to_the_true_class_and_depends_on_the_input() -> None:
    draw = {"generator": seeded(), "dtype": torch.float64}
    x, W = 99 * torch.randn(50, 4, **draw), torch.randn(4, 3, **draw)
    p = noise.instance_probabilities(x, 2, torch.ones(50, dtype=torch.float64), W)
    assert (p[:, 2] == 0).all()
    x, y = torch.randn(300, 4, generator=seeded(1)), torch.zeros(300, dtype=torch.int64)
    a = noise.instance(y, 6, 0.9, seeded(3), lambda rows: x[rows]).y
    b = noise.instance(y, 6, 0.9, seeded(3), lambda rows: -x[rows]).y
    assert torch.equal(a == 0, b == 0)  # whether a label is wrong depends only on q, its new class on x
    assert not torch.equal(a, b)
    other_seed = noise.instance(y, 6, 0.9, seeded(4), lambda rows: x[rows]).y
    assert not torch.equal(a, other_seed)


def test_instance_rate_zero_empty_class_and_bad_inputs() -> None:
    x, y = torch.rand(30, 2, generator=seeded(1)), some_labels(30, 2)
    clean = noise.instance(y, 4, 0.0, seeded(), lambda rows: x[rows])
    assert torch.equal(clean.y, y)
    torch.testing.assert_close(clean.T, torch.eye(4, dtype=torch.float64))
    with pytest.raises(UserError, match="finite"):
        noise.instance(y, 4, 0.2, seeded(), lambda rows: x[rows] * math.nan)
    with pytest.raises(UserError, match="did you mean 'standard'"):
        noise.instance(y, 4, 0.2, seeded(), lambda rows: x[rows], scale="standrd")


def test_instance_scale_without_a_bound_or_deviation() -> None:
    """`unit` divides by the largest magnitude without a known bound; `standard` allows constant features."""
    x, y = torch.randn(40, 3, generator=seeded(1)), some_labels(40, 3)
    x[:, 1] = 5.0
    largest = float(x.abs().max())
    a = noise.instance(y, 3, 0.4, seeded(), lambda rows: x[rows], scale="unit")
    b = noise.instance(y, 3, 0.4, seeded(), lambda rows: x[rows], scale="unit", max_value=largest)
    torch.testing.assert_close(a.T, b.T)
    zero = noise.instance(y, 3, 0.4, seeded(), lambda rows: torch.zeros(len(rows), 3), scale="unit").T
    assert zero is not None
    assert zero.isfinite().all()
    far = noise.instance(y, 3, 0.4, seeded(), lambda rows: x[rows].double() * 1e3 + 1e6, scale="standard")
    near = noise.instance(y, 3, 0.4, seeded(), lambda rows: x[rows].double(), scale="standard")
    torch.testing.assert_close(
        far.T, near.T, atol=1e-6, rtol=0
    )  # neither shift nor factor matters after standardization


# open_set and given --------------------------------------------------------------------------------------------------


@FIXED
@examples_of(n=st.integers(1, 60), rate=rates, seed=seeds)
def test_open_set_replaces_a_share_by_distinct_rows(n: int, rate: float, seed: int) -> None:
    y = some_labels(n, 3, seed)
    drawn = noise.open_set(y, 3, rate, seeded(seed), 70)
    replaced = drawn.replaced
    assert torch.equal(drawn.y, y)
    assert torch.equal(drawn.T, torch.eye(3, dtype=torch.float64))
    assert replaced is not None
    used = replaced[replaced >= 0]
    assert len(used) == round(rate * n)
    assert len(set(used.tolist())) == len(used)
    assert (replaced >= -1).all()
    assert (replaced < 70).all()


def test_open_set_needs_enough_other_rows() -> None:
    with pytest.raises(UserError, match="needs 20 other inputs, but the other set has 19"):
        noise.open_set(some_labels(40, 3), 3, 0.5, seeded(), 19)


def test_given_counts_the_transitions() -> None:
    clean = torch.tensor([0, 0, 0, 0, 1, 1])
    y = torch.tensor([0, 0, 1, 2, 1, 1])
    labels = noise.given(y, 3, clean)
    assert torch.equal(labels.y, y)
    assert labels.T is not None
    assert labels.T.tolist() == [[0.5, 0.25, 0.25], [0, 1, 0], [0, 0, 1]]
    assert noise.given(y, 3, None).T is None
    assert noise.given(y, 3, torch.tensor([0, 0, 0, 0, 1, -1])).T is None


# Noise: from text to labels ------------------------------------------------------------------------------------------

names = st.text("abcdefghij0123456789_-./", min_size=1, max_size=12)
simple = sorted(set(NOISES) - {"flip", "flip2", "instance", "open_set", "matrix", "given"})
noises = st.one_of(
    st.builds(Noise, st.sampled_from(simple), rates),
    st.builds(
        lambda kind, rate, s: Noise(kind, rate, options=() if s == 1 else (("map_seed", s),)),
        st.sampled_from(["flip", "flip2"]),
        rates,
        st.integers(0, 2**32 - 1),
    ),
    st.builds(
        lambda rate, s: Noise("instance", rate, options=() if s == "raw" else (("scale", s),)),
        rates,
        st.sampled_from(noise.SCALES),
    ),
    st.builds(lambda rate, name: Noise("open_set", rate, options=(("from", name),)), rates, names),
    st.builds(
        lambda name, end: Noise("matrix", source=f"{name}T{end}"), names, st.sampled_from([".npy", ".csv", ".JSON"])
    ),
    st.builds(lambda source: Noise("given", source=source), st.none() | names | st.just("C:/a, b=c.json")),
)


@settings(max_examples=60, deadline=None)
@examples_of(noises)
def test_parse_is_the_inverse_of_str(expected: Noise) -> None:
    assert Noise.parse(str(expected)) == expected
    assert hash(Noise.parse(str(expected))) == hash(expected)


@pytest.mark.parametrize(
    ("text", "canonical"),
    [
        ("flip:0.4", "flip:0.4"),
        (" flip : .40 , map_seed=1", "flip:0.4"),
        ("flip:0.4,map_seed=3", "flip:0.4,map_seed=3"),
        ("flip:0.4,map_seed=03", "flip:0.4,map_seed=3"),
        ("instance:4e-1,scale=unit", "instance:0.4,scale=unit"),
        ("uniform:-0", "uniform:0.0"),
        ("open_set:0.2,from=cifar100", "open_set:0.2,from=cifar100"),
        ("given", "given"),
        ("given:random1", "given:random1"),
        ("given:my,path/noise.json", "given:my,path/noise.json"),
        (" matrix : my,path/T.csv ", "matrix:my,path/T.csv"),
    ],
)
def test_canonical_text(text: str, canonical: str) -> None:
    assert str(Noise.parse(text)) == canonical


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("flp:0.4", "unknown noise 'flp'; did you mean 'flip'"),
        ("", "unknown noise ''; allowed"),
        ("flip", "needs a rate"),
        ("flip:", "needs a rate"),
        ("flip,map_seed=3", "needs a rate"),
        ("flip:a lot", "needs a rate, got 'a lot'"),
        ("flip:nan", "must be in 0..1"),
        ("flip:1.5", "must be in 0..1, got 1.5"),
        ("flip:-0.1", "must be in 0..1"),
        ("flip:0.4,mapseed=3", "unknown option of noise 'flip' 'mapseed'; did you mean 'map_seed'"),
        ("flip:0.4,map_seed", "with a value"),
        ("flip:0.4,map_seed=1,map_seed=2", "once"),
        ("flip:0.4,map_seed=-1", "an integer"),
        ("flip:0.4,map_seed=4294967296", "an integer"),
        ("flip:0.4,map_seed=1.5", "an integer"),
        ("pair:0.4,map_seed=3", "takes no options"),
        ("pair:0.4,", "takes no options"),
        ("given,map_seed=3", "'given' takes no options"),
        ("instance:0.4,scale=unity", "did you mean 'unit'"),
        ("open_set:0.2", "needs the option 'from'"),
        ("given:", "after the colon"),
        ("matrix", r"a transition matrix \(\.npy, \.csv, \.json\), got ''; write e\.g\. matrix:T\.csv"),
        ("matrix:0.4", "got '0.4'"),
        ("matrix:T.csv,map_seed=3", "got 'T.csv,map_seed=3'"),
    ],
)
def test_parse_errors(text: str, message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        Noise.parse(text)
    assert "\n" not in str(caught.value)


def test_every_kind_applies_to_a_data_set(tmp_path) -> None:  # type: ignore[no-untyped-def]
    (tmp_path / "T.json").write_text(str(torch.eye(4).tolist()))
    made = data(superclass=torch.tensor([0, 0, 1, 1]))
    other = data(name="other")
    for kind, entry in NOISES.items():
        needs = "".join(f",{name}=other" for name, default in entry.options.items() if default is None)
        text = {"given": "given", "matrix": f"matrix:{tmp_path}/T.json"}.get(kind, f"{kind}:0.3{needs}")
        expected = Noise.parse(text)
        labels = expected.apply(made, seeded(), other)
        assert isinstance(labels, NoisyLabels)
        assert labels.y.shape == made.y.shape
        assert "\n" not in entry.summary
        assert (expected.other_name == "other") == (kind == "open_set")


def test_apply_passes_options() -> None:
    made = data(classes=tuple("abcd"), dtype=torch.uint8)
    y, flat = made.y, made.examples.flat
    for text, expected in {
        "flip:0.4,map_seed=3": noise.flip(y, 4, 0.4, seeded(9), map_seed=3),
        "instance:0.4": noise.instance(y, 4, 0.4, seeded(9), flat),
        "instance:0.4,scale=unit": noise.instance(y, 4, 0.4, seeded(9), lambda rows: flat(rows) / 255),
        "instance:0.4,scale=standard": noise.instance(y, 4, 0.4, seeded(9), flat, scale="standard"),
    }.items():
        actual = Noise.parse(text).apply(made, seeded(9))
        assert torch.equal(actual.y, expected.y), text
        torch.testing.assert_close(actual.T, expected.T)


def test_given_label_sets_and_files(tmp_path) -> None:  # type: ignore[no-untyped-def]
    truth = data().y
    crowd = (truth + 1) % 4
    made = data(label_sets={"random1": crowd, "worst": truth}, clean=truth)
    own = Noise.parse("given").apply(made, seeded())
    assert torch.equal(own.y, truth)
    assert own.T is not None
    assert torch.equal(own.T, torch.eye(4, dtype=torch.float64))
    labels = Noise.parse("given:random1").apply(made, seeded())
    assert torch.equal(labels.y, crowd)
    assert labels.T is not None
    assert torch.equal(labels.T, torch.eye(4, dtype=torch.float64).roll(1, 1))
    with pytest.raises(UserError, match="did you mean 'random1'"):
        Noise.parse("given:random2").apply(made, seeded())
    with pytest.raises(UserError, match="has no label sets"):
        Noise.parse("given:random1").apply(data(), seeded())
    with pytest.raises(UserError, match="'cifar10' has no label sets; put the CIFAR-N files into its folder, or use a"):
        Noise.parse("given:worst").check(data(name="cifar10"))
    for good in ("given", "given:worst", "flip:0.4"):
        Noise.parse(good).check(made)

    path = tmp_path / "noise.json"
    labels = Noise.parse("flip:0.4").apply(made, seeded())
    write_noise_file(path, data="made", noise="flip:0.4", seed=0, n_classes=4, labels=labels)
    parsed = Noise.parse(f"given:{path}")
    assert parsed.other_name is None
    assert torch.equal(parsed.apply(made, seeded(5)).y, labels.y)
    parsed.check(made)
    with pytest.raises(UserError, match=r"noise\.json: data is 'made', but this data set has 'other'"):
        parsed.check(data(name="other"))


def test_open_set_by_name_and_by_file(tmp_path) -> None:  # type: ignore[no-untyped-def]
    made, other = data(), data(n=30, name="other")
    expected = Noise.parse("open_set:0.4,from=other")
    with pytest.raises(UserError, match="needs another data set"):
        expected.apply(made, seeded())
    with pytest.raises(UserError, match="for both"):
        expected.apply(made, seeded(), made)
    labels = expected.apply(made, seeded(), other)
    path = tmp_path / "noise.json"
    write_noise_file(path, data="made", noise=str(expected), seed=0, n_classes=4, labels=labels)
    parsed = Noise.parse(f"given:{path}")
    assert parsed.other_name == "other"
    replaced = parsed.apply(made, seeded(), other).replaced
    assert replaced is not None
    assert torch.equal(replaced, labels.replaced)
    with pytest.raises(UserError, match="which has only 3 rows"):
        parsed.apply(made, seeded(), data(n=3, name="other"))
    with pytest.raises(UserError, match="needs another data set"):
        parsed.apply(made, seeded())
