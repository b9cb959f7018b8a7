"""Scores of predictions compared with a loop and with values computed by hand."""

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, strategies as st
from random_inputs import SOME, make_generator, normal, seeds
from torch import Tensor

from warpi.data.examples import Scale, TensorExamples
from warpi.data.split import Split
from warpi.training.metrics import compute_scores, evaluate


def naive_scores(p: Tensor, y: Tensor, bins: int) -> tuple[float, float, float, list[float]]:
    n, k = p.shape
    hits, nll = [], 0.0
    in_bin: list[list[tuple[float, bool]]] = [[] for _ in range(bins)]
    per_class: list[list[bool]] = [[] for _ in range(k)]
    for row, label in zip(p.tolist(), y.tolist(), strict=True):
        top = max(row)
        hit = row.index(top) == label
        hits.append(hit)
        nll -= math.log(row[label]) / n
        per_class[label].append(hit)
        for b in range(bins):
            if b / bins < top <= (b + 1) / bins:
                in_bin[b].append((top, hit))
    ece = 0.0
    for members in filter(None, in_bin):
        accuracy = sum(hit for _, hit in members) / len(members)
        confidence = sum(top for top, _ in members) / len(members)
        ece += len(members) / n * abs(accuracy - confidence)
    by_class = [100 * sum(h) / len(h) if h else math.nan for h in per_class]
    return 100 * sum(hits) / n, nll, 100 * ece, by_class


@SOME
@given(seeds, st.integers(1, 60), st.integers(2, 5), st.integers(1, 20))
def test_scores_equal_those_of_a_loop(seed: int, n: int, k: int, bins: int) -> None:
    p = (3 * normal(n, k, seed=seed)).softmax(1)
    y = torch.randint(k, (n,), generator=make_generator(seed))
    got, wanted = compute_scores(p, y, bins), naive_scores(p, y, bins)
    assert got[:3] == pytest.approx(wanted[:3], rel=1e-9, abs=1e-9)
    assert list(got.per_class) == pytest.approx(wanted[3], nan_ok=True)


def test_scores_computed_by_hand() -> None:
    """Two bins. (0, .5]: confidence .5 once, wrong. (.5, 1]: confidences .6, .7, .8, two of three right."""
    p = torch.tensor([[0.5, 0.3, 0.2], [0.6, 0.4, 0.0], [0.7, 0.2, 0.1], [0.1, 0.8, 0.1]]).double()
    s = compute_scores(p, torch.tensor([1, 0, 0, 0]), bins=2)
    assert s.acc == pytest.approx(50)
    assert s.nll == pytest.approx(-(math.log(0.3) + math.log(0.6) + math.log(0.7) + math.log(0.1)) / 4)
    assert s.ece == pytest.approx(100 * (1 / 4 * 0.5 + 3 / 4 * abs(2 / 3 - 0.7)))
    assert s.per_class[:2] == pytest.approx((200 / 3, 0))
    assert math.isnan(s.per_class[2])  # no example of the third class


def test_scores_of_certain_predictions() -> None:
    y = torch.tensor([2, 0, 1])
    right, wrong = compute_scores(F.one_hot(y, 3).float(), y), compute_scores(F.one_hot((y + 1) % 3, 3).float(), y)
    assert (right.acc, right.nll, right.ece, right.per_class) == (100, 0, 0, (100, 100, 100))
    assert (wrong.acc, wrong.ece, wrong.per_class) == (0, 100, (0, 0, 0))
    assert wrong.nll == pytest.approx(-math.log(1e-12))  # a probability of zero has a large but finite loss


def test_evaluate_does_not_depend_on_the_batches() -> None:
    x, y = normal(23, 4).float(), torch.randint(4, (23,), generator=make_generator())
    split = Split(TensorExamples(x, Scale(torch.tensor(0.5), torch.tensor(2.0))), torch.arange(23).flip(0), y)
    whole = compute_scores(((x.flip(0) - 0.5) / 2).softmax(1), y)
    for size in (1, 7, 23, 100):
        got = evaluate(lambda z: z.softmax(1), split, size)
        assert got[:3] == pytest.approx(whole[:3])
        assert got.per_class == pytest.approx(whole.per_class)
