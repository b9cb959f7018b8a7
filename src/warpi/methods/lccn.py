"""LCCN: sample the true labels, and count them to estimate T."""

from dataclasses import dataclass

import torch
from torch import Tensor

from warpi.data.batch import Batch
from warpi.functional.losses import cross_entropy
from warpi.functional.transition import from_given, latent_labels, normalize_rows
from warpi.training.method import Log, Method, descend
from warpi.training.outputs import predict_rows
from warpi.training.warmup import warmup_epochs
from warpi.utils import distributed
from warpi.utils.settings import setting


@dataclass
class LCCN(Method):
    """Sample a latent true label for each example in every epoch; counts of these labels estimate T.

        C_kj   = number of examples with latent label k and given label j, without the batch
        phi_kj = (C_kj + alpha) / sum_l (C_kl + alpha)                          Dirichlet posterior, T integrated out
        z_i    ~ softmax(F(x_i; theta))_z phi_{z y_i},  normalized              collapsed Gibbs sampling
        L      = 1/B sum_i -log softmax(F(x_i; theta))_{z_i}

    One batch changes phi by at most its share of the counts: the safeguard of the title. Initially z is the prediction
    of a network trained with cross-entropy in the first `warmup` of the epochs. In the first `fixed` fraction of the
    remaining epochs, phi is the confusion matrix of that network: sum_n softmax(F(x_n))_k [y_n = j], rows normalized.

    Differs from the paper: phi follows the counts in every step (published: every 200 steps). The first phase lasts
    until the learning rate has decayed (published: a separate training, and another one for the sampling).
    Reference: Yao et al., Safeguarded Dynamic Label Regression for Noisy Supervision, AAAI 2019.
    """

    family = "transition"
    year = 2019
    for_tables = {"warmup": 0.1}  # why: docs/methods/lccn.md

    warmup: float = setting(0.7, "fraction of the epochs with cross-entropy, before sampling", low=0, high=1)
    fixed: float = setting(0.43, "fraction of the remaining epochs in which T stays fixed", low=0, high=1)
    alpha: float = setting(1.0, "concentration of the Dirichlet prior on the rows of T", low=1e-6)

    def create_state(self) -> None:
        K = self.task.n_classes
        epochs = self.recipe.epochs
        self.latent = self.task.train.y.clone()  # [N]
        self.counts = torch.zeros(K, K, device=self.task.device)  # C
        self.T = torch.zeros_like(self.counts)
        first = warmup_epochs(self.warmup, epochs)
        self.borders = (first, first + round(self.fixed * (epochs - first)))  # first epochs of phases 1 and 2
        self.phase = 0

    def before_epoch(self, t: int) -> None:
        previous = self.phase
        self.phase = sum(t >= begins for begins in self.borders)
        if self.phase and not previous:
            rows, z = predict_rows(self.net, self.task.train)
            self.latent[rows] = z.argmax(1)
            self._count(self.latent, self.task.train.y, 1.0)
            self.T.copy_(from_given(z.softmax(1), self.task.train.y[rows]))

    def step(self, batch: Batch) -> Log:
        logits = self.net(batch.x)
        target = batch.y
        if self.phase:
            self._count_all(self.latent[batch.rows], batch.y, -1.0)
            phi = self.T if self.phase == 1 else normalize_rows(self.counts + self.alpha)  # [K, K]
            self.latent[batch.rows] = target = latent_labels(logits.detach(), batch.y, phi, self.generator)
            self._count_all(target, batch.y, 1.0)
        loss = cross_entropy(logits, target).mean()
        return {"loss": descend(loss, self.optimizer)}

    def _count_all(self, latent: Tensor, y: Tensor, sign: float) -> None:
        """Count the examples of all ranks."""
        self._count(distributed.gather(latent), distributed.gather(y), sign)

    def _count(self, latent: Tensor, y: Tensor, sign: float) -> None:
        self.counts.index_put_((latent, y), self.counts.new_full(y.shape, sign), accumulate=True)
