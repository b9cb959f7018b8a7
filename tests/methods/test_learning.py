"""Methods on digits with wrong labels: they beat cross-entropy, and recognize wrong labels."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from warpi.autodiff.passes import forward
from warpi.data.dataset import Dataset
from warpi.functional.losses import cross_entropy, one_hot
from warpi.methods.loss_correction import LossCorrection
from warpi.methods.registry import CORE, METHODS, make_method
from warpi.training.engine import Record, train
from warpi.training.method import Method, evaluating
from warpi.training.recipe import Recipe
from warpi.training.task import Task, Truth, make_task

RECIPE = Recipe(epochs=12, batch_size=128, meta_batch_size=32, lr=0.1, seed=1)
EPOCHS = {"mlc": 24, "warpi": 20}  # more than in RECIPE
OPTIONS: dict[str, dict[str, Any]] = {  # cheaper than the defaults, or better for tables
    "auto": {"model": "knn"},
    "cleannet": {"embedding_steps": 8, "references": 8},
    "disc": {"memory": 0.967},
    "dmi": {"warmup": 0.2},
    "dmi_ns": {"warmup": 0.2},
    "lccn": {"warmup": 0.1},
    "masking": {"warmup": 0.1, "critics": 2},
    "mlc": {"meta_lr": 0.001},
    "mlc_wang": {"matrix_lr": 30.0},
    "mlnt": {"updates": 3},
    "promix": {"tau": 0.9, "warm_up": 3.0},
    "s_model": {"warmup": 0.1},
    "sop": {"lr_v": 30.0},
    "sop_plus": {"lr_v": 30.0},
    "vri": {"hidden": (64, 32), "output": "tanh"},
    "warpi": {"samples": 3, "output": "tanh"},
}
GAINS = {  # points of test accuracy above cross-entropy, about half of the measured gain
    "symmetric:0.5": {
        "mae": 6,
        "gce": 6,
        "gce_truncated": 6,
        "sce": 6,
        "mixup": 3,
        "s_model": 6,
        "dmi": 6,
        "masking": 3,
        "mwnet": 3,
        "mlc_wang": 4,
        "mlc": 3,
        "mslc": 3,
        "mlnt": 4,
        "gdw": 6,
        "emlc": 6,
        "vri": 3,
        "dividemix": 7,
        "decoupling": 4,
        "co_teaching": 6,
        "co_teaching_plus": 4,
        "jocor": 6,
        "mentornet_pd": 2,
        "mentornet_dd": 6,
        "selfie": 7,
        "cdr": 3,
        "plc": 5,
        "pencil": 6,
        "m_correction": 5,
        "d2l": 6,
        "limit": 4,
        "smp": 5,
        "noiserank": 7,
        "wann": 8,
        "dmlp": 5,
        "elr": 6,
        "elr_plus": 6,
        "sop": 5,
        "sop_plus": 5,
        "promix": 6,
        "disc": 7,
        "cleannet": 4,
        "cal": 4,
    },
    "pair:0.4": {
        "auto": 20,
        "forward": 10,
        "glc": 20,
        "dmi_ns": 8,
        "l2rw": 18,
        "dividemix": 10,
        "promix": 15,
        "clean_only": 15,
        "warpi": 20,
    },
    "instance:0.4": {"forward": 0, "t_revision": 3, "lccn": 3, "ptd": 2},
}


class Learned(NamedTuple):
    """A trained method and its data."""

    method: Any
    records: list[Record]
    task: Task
    truth: Truth

    @property
    def accuracy(self) -> float:
        return self.records[-1]["test_acc"]

    @property
    def wrong(self) -> Tensor:
        """Which training labels are wrong.  [N]"""
        assert self.truth.clean is not None
        return self.truth.clean != self.task.train.y


Learn = Callable[[str, str], Learned]


@pytest.fixture(scope="module")
def tasks(digits: Dataset) -> dict[str, tuple[Task, Truth]]:
    return {noise: make_task(digits, noise, meta=50, seed=1) for noise in GAINS}


@pytest.fixture(scope="module")
def learn(tasks: dict[str, tuple[Task, Truth]]) -> Learn:
    """Train a method under some noise, once for all tests."""

    @cache
    def train_once(name: str, noise: str) -> Learned:
        return fit(make_method(name, **OPTIONS.get(name, {})), *tasks[noise], EPOCHS.get(name, RECIPE.epochs))

    return train_once


def fit(method: Method, task: Task, truth: Truth, epochs: int = RECIPE.epochs) -> Learned:
    method.start(task, replace(RECIPE, epochs=epochs))
    return Learned(method, [record for record in train(method, task, truth) if record is not None], task, truth)


def losses_of(learned: Learned) -> Tensor:
    """Cross-entropy of all training rows.  [N]"""
    batch = next(learned.task.train.batches(len(learned.task.train)))
    with torch.no_grad(), evaluating(learned.method.nets):
        return cross_entropy(learned.method.net(batch.x), batch.y)


@pytest.mark.parametrize(
    ("noise", "name"),
    [
        pytest.param(noise, name, marks=[] if name in CORE else pytest.mark.slow)
        for noise, gains in GAINS.items()
        for name in gains
    ],
)
def test_beats_cross_entropy(noise: str, name: str, learn: Learn) -> None:
    assert learn(name, noise).accuracy > learn("ce", noise).accuracy + GAINS[noise][name]


def test_every_robust_method_is_tested() -> None:
    """Not listed: variants of listed methods, and losses that do not help under symmetric noise."""
    listed = {name for gains in GAINS.values() for name in gains}
    assert METHODS.keys() - listed == {
        "ce",
        "fine_tune",
        "backward",
        "focal",
        "bootstrap_soft",
        "bootstrap_hard",
        "label_smoothing",
        "warpi_detc",
        "warpi_plus",  # made for images, see test_warpi_plus.py
    }


def test_warpi_makes_noisy_examples_useful(learn: Learn) -> None:
    """WarPI beats training on the trusted examples alone."""
    assert learn("warpi", "pair:0.4").accuracy > learn("clean_only", "pair:0.4").accuracy + 2


def test_forward_with_the_true_matrix(tasks: dict[str, tuple[Task, Truth]], learn: Learn) -> None:
    task, truth = tasks["pair:0.4"]
    assert truth.T is not None
    T = tuple(truth.T.flatten().tolist())
    learned = fit(LossCorrection(matrix=T), task, truth)
    assert learned.accuracy > 93
    assert tuple(learned.method.T.flatten().tolist()) == pytest.approx(T)
    backward = fit(LossCorrection(direction="backward", matrix=T), task, truth)
    assert backward.accuracy > learn("ce", "pair:0.4").accuracy - 3


# --- which labels are wrong -----------------------------------------------------------------------------------------


def test_mwnet_gives_wrong_labels_less_weight(learn: Learn) -> None:
    learned = learn("mwnet", "symmetric:0.5")
    with torch.no_grad():
        w = learned.method.V(losses_of(learned)[:, None])[:, 0]
    assert w[learned.wrong].mean() < 0.6 * w[~learned.wrong].mean()


def test_l2rw_gives_wrong_labels_less_weight(learn: Learn) -> None:
    learned = learn("l2rw", "pair:0.4")
    wrong_weight = right_weight = 0.0
    for _ in range(5):
        batch = learned.method.loader.draw()
        w, _ = learned.method.weigh(forward(learned.method.net, batch.x), batch.y)
        wrong = learned.wrong[batch.rows]
        wrong_weight += float(w[wrong].mean())
        right_weight += float(w[~wrong].mean())
    assert wrong_weight < 0.6 * right_weight


def test_mentor_gives_wrong_labels_less_weight(learn: Learn) -> None:
    learned = learn("mentornet_dd", "symmetric:0.5")
    with torch.no_grad():
        v = learned.method.mentor_logits(losses_of(learned)).sigmoid()
    assert v[learned.wrong].mean() < 0.5 * v[~learned.wrong].mean()


@pytest.mark.parametrize(("noise", "precision"), [("symmetric:0.5", 0.85), ("pair:0.4", 0.7)])
def test_dividemix_divides_right_from_wrong_labels(noise: str, precision: float, learn: Learn) -> None:
    learned = learn("dividemix", noise)
    labeled = learned.method.clean >= learned.method.tau  # [2, N]
    right = ~learned.wrong
    assert (right & labeled).sum() > precision * labeled.sum()
    assert (right & labeled).sum() > 0.7 * 2 * right.sum()


def test_truncated_gce_prunes_wrong_labels(learn: Learn) -> None:
    learned = learn("gce_truncated", "symmetric:0.5")
    method = learned.method
    assert [r["kept"] for r in learned.records[:8]] == [1.0] * 8
    right = ~learned.wrong
    kept = method.kept.bool()
    assert (right & kept).sum() > 0.9 * kept.sum()
    assert (right & kept).sum() > 0.85 * right.sum()
    assert learned.records[-1]["kept"] == pytest.approx(float(kept.float().mean()), abs=0.1)
    method.prune()
    assert torch.equal(method.kept, ((-losses_of(learned)).exp() > 0.5).float())


def test_noiserank_keeps_right_labels(learn: Learn) -> None:
    learned = learn("noiserank", "symmetric:0.5")
    assert learned.method.kept[learned.wrong].mean() < 0.2
    assert learned.method.kept[~learned.wrong].mean() > 0.8


def test_smp_corrects_labels(learn: Learn) -> None:
    learned = learn("smp", "symmetric:0.5")
    assert (learned.method.y_hat == learned.truth.clean).float().mean() > 0.85
    assert learned.wrong.float().mean() > 0.4


def test_cal_clusters_by_true_class(learn: Learn) -> None:
    learned = learn("cal", "symmetric:0.5")
    method = learned.method
    assert (method.cluster == learned.truth.clean).float().mean() > 0.8
    torch.testing.assert_close(method.prior, one_hot(method.cluster, 10).mean(0))
    for i in range(10):
        given = learned.task.train.y[method.cluster == i]
        torch.testing.assert_close(method.T[i], one_hot(given, 10).mean(0))
    assert not bool(method.counts.any())  # sums of an epoch become the means of the next, and are reset
    assert bool((method.mean > 0).all())


def test_glc_estimates_the_noise(learn: Learn) -> None:
    learned = learn("glc", "pair:0.4")
    assert learned.truth.T is not None
    assert float((learned.method.C - learned.truth.T).abs().mean()) < 0.06
    torch.testing.assert_close(learned.method.C.sum(1), torch.ones(10))
