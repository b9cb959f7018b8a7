"""DISC: thresholds of each example that follow the confidence of the network, for selection and correction."""

from dataclasses import dataclass

import torch
from torch import Tensor

from warpi.data.batch import Batch
from warpi.functional.losses import cross_entropy, generalized_cross_entropy, one_hot, soft_cross_entropy
from warpi.functional.mixup import mixup_selected
from warpi.training.method import Log, Method, add_trusted, descend
from warpi.training.warmup import warmup_epochs
from warpi.utils import distributed
from warpi.utils.settings import setting

_PUBLISHED_EPOCHS = 200


@dataclass
class DISC(Method):
    """Compare the probability of the given label with the past confidence of the network in the same example.

    A pass over the data records the predictions p_w, p_s of a weak and a strong view of each example. After each epoch,
    with h = w, s and thresholds that begin at 1/N:

        C   = { i : p_w,i[y_i] > tau_w,i and p_s,i[y_i] > tau_s,i }                     clean
        H   = { i : one of the two holds }                                              hard
        P   = the others with max (p_w,i + p_s,i) / 2 > min((tau_w,i + tau_s,i) / 2 + sigma, cap)     purified
        tau_h,i <- m tau_h,i + (1 - m) max p_h,i                                        m = memory^(200 / epochs)

    Examples in C and H keep their labels, those in P get the predicted one. After a warm-up with cross-entropy on both
    views, a step descends

        L = 1/B sum_C CE + lambda_h 1/B sum_H GCE + mean CE(mixup of C, H and P)        each for both views

    Differs from the published code: docs/methods/disc.md.
    Reference: Li et al., DISC: Learning from Noisy Labels via Dynamic Instance-Specific Selection and Correction, CVPR
    2023.
    """

    family = "selection"
    year = 2023
    n_views = 2
    n_trusted_views = 2
    strong_views = (1,)
    for_tables = {"memory": 0.967}

    warmup: float = setting(15 / 200, "fraction of the epochs with cross-entropy, at least one epoch", low=0, high=1)
    memory: float = setting(0.99, "fraction m of a threshold kept per epoch, for 200 epochs", low=0, high=1)
    sigma: float = setting(0.5, "confidence above the threshold at which a label is corrected", low=0, high=1)
    cap: float = setting(0.99, "largest confidence that a correction requires", low=0, high=1)
    alpha: float = setting(5.0, "parameter of mixup's Beta distribution", low=0)
    q: float = setting(0.7, "exponent of the generalized cross-entropy of hard examples", low=0, high=1)
    lambda_h: float = setting(1.0, "weight of the hard examples", low=0)
    use_trusted: bool = setting(False, "also train on the trusted examples, which are always clean")

    def create_state(self) -> None:
        n, k = len(self.task.train), self.task.n_classes
        device = self.task.device
        self.p = torch.zeros(2, n, k, device=device)  # [2, N, K] last predictions of both views
        self.thresholds = torch.full((2, n), 1 / n, device=device)  # [2, N] tau
        self.clean = torch.zeros(n, device=device)  # [N] 1: in C
        self.hard = torch.zeros(n, device=device)  # [N] 1: in H
        self.purified = torch.zeros(n, device=device)  # [N] 1: in P
        self.labels = self.task.train.y.clone()  # [N] given or corrected
        self.warming = True

    def before_epoch(self, t: int) -> None:
        self.warming = t < warmup_epochs(self.warmup, self.recipe.epochs)
        if t > 0:
            self.divide()

    def divide(self) -> None:
        """Compute C, H, P and the labels from the predictions of the last epoch, then update the thresholds."""
        y = self.task.train.y
        above = self.p.gather(2, y.expand(2, -1)[..., None])[..., 0] > self.thresholds  # [2, N]
        confidence, guess = self.p.mean(0).max(1)  # [N]
        certain = confidence > (self.thresholds.mean(0) + self.sigma).clamp_max(self.cap)
        self.clean.copy_(above.all(0))
        self.hard.copy_(above[0] != above[1])
        self.purified.copy_(certain & ~above.any(0))
        self.labels.copy_(torch.where(self.purified > 0, guess, y))
        kept = self.memory ** (_PUBLISHED_EPOCHS / self.recipe.epochs)
        self.thresholds.lerp_(self.p.amax(2), 1 - kept)

    def step(self, batch: Batch) -> Log:
        views, y = add_trusted(self, batch)
        n, known = len(batch.y), len(y) - len(batch.y)
        z = self.net(torch.cat(views)).unflatten(0, (2, -1))  # [2, B, K]
        self.p[:, batch.rows] = z[:, :n].detach().softmax(2)
        if self.warming:
            return {"loss": descend(cross_entropy(z, y).sum(0).mean(), self.optimizer)}
        clean, hard, purified = (a[batch.rows] for a in (self.clean, self.hard, self.purified))
        mixed = clean + hard + purified
        clean, mixed = (torch.cat([a, a.new_ones(known)]) for a in (clean, mixed))
        hard = torch.cat([hard, hard.new_zeros(known)])
        loss = (clean * cross_entropy(z, y).sum(0)).mean()
        loss = loss + self.lambda_h * (hard * generalized_cross_entropy(z, y, self.q).sum(0)).mean()
        labels = torch.cat([self.labels[batch.rows], y[n:]])
        any_mixed = distributed.total(mixed.sum()).clamp_max(1)
        loss = loss + any_mixed * self.mixed_loss(views, labels, mixed, [n, known])
        log = {"clean": clean[:n].mean(), "hard": hard.mean(), "purified": purified.mean()}
        return {"loss": descend(loss, self.optimizer), **log}

    def mixed_loss(self, views: tuple[Tensor, ...], labels: Tensor, mixed: Tensor, parts: list[int]) -> Tensor:
        """Mean cross-entropy of mixtures of weak views plus that of mixtures of strong views."""
        target = one_hot(labels, self.task.n_classes)
        pairs = [mixup_selected(x, target, mixed, self.alpha, self.generator, parts) for x in views]
        z = self.net(torch.cat([x for x, _ in pairs]))
        return 2 * soft_cross_entropy(z, torch.cat([q for _, q in pairs])).mean()
