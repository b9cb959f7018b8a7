"""Masking: estimate T under a known structure of the noise."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from warpi.data.batch import Batch
from warpi.errors import UserError
from warpi.functional.losses import cross_entropy
from warpi.functional.transition import from_given
from warpi.training.method import Log, Method, descend
from warpi.training.outputs import predict_rows
from warpi.training.recipe import adam
from warpi.training.warmup import warmup_epochs
from warpi.utils import distributed
from warpi.utils.settings import setting


def soft_structure(T: Tensor) -> Tensor:
    """Map transition probabilities above 0.05 to about 1, those below to about 0.  [..., K, K]"""
    return torch.sigmoid((T - 0.05) / 0.005)


def make_networks(K: int) -> nn.ModuleList:
    """The generator and the critic."""
    G = nn.Sequential(nn.Linear(10, 50), nn.ReLU(), nn.Linear(50, 50), nn.ReLU(), nn.Linear(50, K * K))
    D = nn.Sequential(nn.Flatten(), nn.Linear(K * K, 20), nn.Sigmoid(), nn.Linear(20, 1))
    return nn.ModuleList([G, D])


@dataclass
class Masking(Method):
    """A generator proposes transition matrices, and a critic checks that they have the structure a person gave.

        T = softmax(G(e)) by rows, e ~ N(0, I_10)                       one per example of the batch
        reconstructor F:  R = 1/B sum_i -log (T_i^T softmax(F(x_i; theta)))_{y_i}
        generator G:      R - mean D(f(T)),     f(T) = sigmoid((T - 0.05) / 0.005)
        critic D:         mean D(f(T)) - D(mask),    weights clipped to [-0.01, 0.01]             a Wasserstein GAN

    `mask` marks the transitions that a person considers possible. A network is trained with cross-entropy in the first
    `warmup` of the epochs; the generator starts at its confusion matrix, and training continues from its weights.

    Differs from the paper in the default mask, the start of G, and the optimizers of G and D: docs/methods/masking.md.
    Reference: Han et al., Masking: A New Perspective of Noisy Supervision, NeurIPS 2018.
    """

    family = "transition"
    year = 2018
    for_tables = {"warmup": 0.1}

    warmup: float = setting(0.7, "fraction of the epochs with cross-entropy, before T is used", low=0, high=1)
    mask: tuple[float, ...] | None = setting(None, "possible transitions: 0 or 1 (default: estimated)", low=0, high=1)
    critics: int = setting(5, "critic steps per generator step", low=0)
    game_lr: float = setting(1e-5, "learning rate of generator and critic (Adam)", low=0)

    def create_state(self) -> None:
        K = self.task.n_classes
        device = self.task.device
        if self.mask is not None and len(self.mask) != K * K:
            raise UserError(f"mask has {len(self.mask)} numbers, but {K} classes need {K * K}, row by row")
        self.structure = torch.eye(K) if self.mask is None else torch.tensor(self.mask).float().reshape(K, K)
        self.structure = self.structure.to(device)
        self.G, self.D = self.recipe.make_module("masking", lambda: make_networks(K)).to(device)
        self.G_optimizer = adam(self.G.parameters(), self.game_lr)
        self.D_optimizer = adam(self.D.parameters(), self.game_lr)
        self.switch = warmup_epochs(self.warmup, self.recipe.epochs)
        self.playing = False

    def before_epoch(self, t: int) -> None:
        if t >= self.switch and not self.playing:
            rows, z = predict_rows(self.net, self.task.train)
            T = from_given(z.softmax(1), self.task.train.y[rows])
            with torch.no_grad():
                list(self.G.parameters())[-1].copy_(T.clamp_min(1e-8).log().flatten())  # the bias of its last layer
            if self.mask is None:
                self.structure.copy_((T > 0.05).float())
            self.playing = True

    def generate(self, n: int) -> Tensor:
        """Sample transition matrices.  [n, K, K]"""
        device = self.structure.device
        e = distributed.draw_share(n, lambda total: torch.randn(total, 10, generator=self.generator, device=device))
        T: Tensor = self.G(e).unflatten(1, self.structure.shape).softmax(2)
        return T

    def step(self, batch: Batch) -> Log:
        z = self.net(batch.x)
        if self.playing:
            p = z.softmax(1)
            examples = torch.arange(len(z), device=z.device)
            T = self.generate(len(z))
            for _ in range(self.critics):
                critic_loss = self.D(soft_structure(T.detach())).mean() - self.D(self.structure[None]).mean()
                descend(critic_loss, self.D_optimizer)
                with torch.no_grad():
                    for weight in self.D.parameters():
                        weight.clamp_(-0.01, 0.01)
            columns = T[examples, :, batch.y]  # [B, K]
            reconstruction = -(p.detach() * columns).sum(1).clamp_min(1e-8).log().mean()
            descend(reconstruction - self.D(soft_structure(T)).mean(), self.G_optimizer)
            loss = -(p * columns.detach()).sum(1).clamp_min(1e-8).log().mean()
        else:
            loss = cross_entropy(z, batch.y).mean()
        return {"loss": descend(loss, self.optimizer)}
