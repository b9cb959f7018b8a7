"""M-correction: bootstrapping guided by a beta mixture model of the losses."""

from dataclasses import dataclass

import torch
from torch import Tensor

from warpi.data.batch import Batch
from warpi.functional.losses import cross_entropy, one_hot, prior_penalty, soft_cross_entropy
from warpi.functional.mixup import mixup
from warpi.functional.selection import beta_posterior, two_betas
from warpi.training.method import Log, Method, descend, evaluating
from warpi.training.outputs import predict_rows
from warpi.utils.settings import setting


def bootstrap_targets(y: Tensor, z: Tensor, w: Tensor) -> Tensor:
    """(1 - w_i) y_i + w_i [k = argmax z_i]: given labels, replaced by predictions as far as they are wrong.  [B, K]"""
    y_hot, guess = (one_hot(label, z.shape[1]) for label in (y, z.argmax(dim=1)))
    return torch.lerp(y_hot, guess, w[:, None].to(y_hot.dtype))


def loss_of_largest_posterior(mixture: Tensor) -> Tensor:
    """The loss in (0, 1), above the mean of the second component, with its largest posterior.  [3, 2] -> []"""
    _, alpha, beta = mixture
    mean = alpha[1] / (alpha[1] + beta[1])
    x = torch.lerp(mean, torch.ones_like(mean), torch.linspace(0, 1, 100, dtype=mean.dtype, device=mean.device))
    return x[beta_posterior(x, mixture).argmax()]


@dataclass
class MCorrection(Method):
    """Fit a mixture to the losses to find wrong labels, and replace them by predictions.

        p(l) = pi_1 Beta(l; a_1, b_1) + pi_2 Beta(l; a_2, b_2)      fitted by EM to all losses, before each epoch
        w_i  = p(second | l_i)                                      probability that label i is wrong
        t_i  = (1 - w_i) y_i + w_i z_i                              z_i the predicted class (hard bootstrapping)
        L    = 1/B sum_i CE(F(x'_i), t'_i) + reg KL(uniform || mean_i p'_i),    (x', t') mixup of (x, t)

    This is M-DYR-H of the paper. Losses are scaled to (0, 1) between their 5 % and 95 % quantiles. Beyond the loss at
    which w is largest, w stays constant, as in the published code: if the second component is the narrower one, the
    posterior would decrease again for the largest losses. The first epochs use mixup with the given labels.

    z_i comes from a pass in training mode, w_i from one in evaluation mode, as in the published code: with mixed images
    alone, the statistics of BatchNorm would not fit real images.

    Differs from the paper in how the posterior and the losses are computed: docs/methods/m_correction.md.
    Reference: Arazo et al., Unsupervised Label Noise Modeling and Loss Correction, ICML 2019.
    """

    family = "refinement"
    year = 2019

    alpha: float = setting(32.0, "parameter of mixup's Beta distribution", low=0)
    reg: float = setting(1.0, "weight of the penalty on uneven class predictions", low=0)
    warm_up: float = setting(0.7, "fraction of the epochs with mixup only", low=0, high=1)

    def create_state(self) -> None:
        device = self.task.device
        self.mixture = torch.ones(3, 2, dtype=torch.float64, device=device)
        self.low = torch.zeros((), device=device)  # 5 % quantile of the losses
        self.high = torch.ones((), device=device)  # 95 % quantile
        self.peak = torch.ones((), dtype=torch.float64, device=device)  # scaled loss at which w is largest
        self.correcting = False

    def before_epoch(self, t: int) -> None:
        self.correcting = t >= round(self.warm_up * self.recipe.epochs)
        if self.correcting:
            rows, z = predict_rows(self.net, self.task.train)
            losses = cross_entropy(z, self.task.train.y[rows])
            ordered = losses.sort().values
            self.low.copy_(ordered[int(0.05 * (len(losses) - 1))])
            self.high.copy_(ordered[int(0.95 * (len(losses) - 1))])
            inside = losses[(losses >= self.low) & (losses <= self.high)]
            self.mixture.copy_(two_betas(self.scale_losses(inside)))
            self.peak.copy_(loss_of_largest_posterior(self.mixture))

    def scale_losses(self, losses: Tensor) -> Tensor:
        return (losses - self.low) / (self.high - self.low + 1e-6)

    def wrong(self, losses: Tensor) -> Tensor:
        """w: the probability that a label is wrong, given its loss.  [B] -> [B]"""
        return beta_posterior(torch.minimum(self.scale_losses(losses), self.peak), self.mixture)

    def step(self, batch: Batch) -> Log:
        targets = one_hot(batch.y, self.task.n_classes)  # [B, K]
        if self.correcting:
            with torch.no_grad():
                guess = self.net(batch.x)
                with evaluating(self.nets):
                    losses = cross_entropy(self.net(batch.x), batch.y)
            targets = bootstrap_targets(batch.y, guess, self.wrong(losses))
        x, targets = mixup(batch.x, targets, self.alpha, self.generator)
        z = self.net(x)
        loss = soft_cross_entropy(z, targets).mean()
        if self.correcting:
            loss = loss + self.reg * prior_penalty(z)
        return {"loss": descend(loss, self.optimizer)}
