"""WarPI: a meta-network rectifies the logits before the loss."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from warpi.data.batch import Batch, Log
from warpi.functional.gaussian import DiagGaussian
from warpi.functional.losses import cross_entropy
from warpi.training.bilevel import bilevel_step
from warpi.training.method import Method
from warpi.training.recipe import Recipe, adam
from warpi.training.task import Task
from warpi.utils.field_checks import at_least
from warpi.utils.seeding import derive, seeded


class MetaNet(nn.Module):
    """V(z, y; phi): logits and given label -> a Gaussian over the rectifying vector, one coordinate a class."""

    def __init__(self, n_classes: int, hidden: int, label_input: str, activation: type[nn.Module]) -> None:
        super().__init__()
        self.label: nn.Embedding | OneHot = (
            nn.Embedding(n_classes, n_classes) if label_input == "embedding" else OneHot(n_classes)
        )
        first, second = nn.Linear(2 * n_classes, hidden), nn.Linear(hidden, hidden)
        self.trunk = nn.Sequential(first, activation(), second, activation())
        self.mean = nn.Linear(hidden, n_classes)
        self.log_var = nn.Linear(hidden, n_classes)
        for layer in (first, second, self.mean):  # the variance head keeps torch's own initialisation
            nn.init.xavier_normal_(layer.weight)
            nn.init.zeros_(layer.bias)

    def forward(self, z: Tensor, y: Tensor) -> DiagGaussian:
        h = self.trunk(torch.cat([z, self.label(y)], dim=1))  # [B, hidden]
        return DiagGaussian(self.mean(h), self.log_var(h))


class OneHot(nn.Module):
    """A label as a unit vector."""

    def __init__(self, n_classes: int) -> None:
        super().__init__()
        self.eye: Tensor
        self.register_buffer("eye", torch.eye(n_classes))

    def forward(self, y: Tensor) -> Tensor:
        return self.eye[y]


OUTPUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "sigmoid": torch.sigmoid,  # in (0, 1): the published code; can mute a label, not unlearn it
    "tanh": lambda s: 2 * torch.tanh((1 + s) / 2),  # in (-2, 2), signed; about 1 + s while that is small
    "unbounded": lambda s: 1 + s,  # the paper's Gaussian, shifted so that an untrained V leaves the logits alone
}
"""From a sample s = mu + sigma eps to the rectifying vector v."""


@dataclass
class WarPI(Method):
    """Warped probabilistic inference: logits are multiplied by a random vector v that a meta-network proposes.

        q(v | z, y)     = N(mu, diag(sigma^2)),  (mu, sigma) = V(z, y; phi), z detached
        L(theta; phi)   = 1/(L B) sum_i sum_j CE(v_ij * F(x_i; theta), y_i),  v_ij = RP_j[V(z_i, y_i; phi)]   Eq. (9)
        theta_hat(phi)  = theta - alpha dL/dtheta                                                        Eq. (11)
        phi   <- phi - beta d L_meta(theta_hat(phi)) / dphi                exactly, by `lookahead`       Eq. (12)
        theta <- theta - alpha dL(theta; phi_new)/dtheta                                                 Eq. (13)

    New classes are predicted from the plain logits. The Monte-Carlo number touches [L, B, K] numbers only.

    Differs from the paper where the published code does, each as a field: the label enters through a learned
    embedding (`label_input`; paper: one-hot), v is squashed (`output`; paper: Gaussian), tanh trunk (`activation`).
    Reference: Sun et al., Learning to Rectify for Robust Learning with Noisy Labels, Pattern Recognition 2022.
    """

    family: ClassVar[str] = "meta"
    year: ClassVar[int | None] = 2022
    needs_meta: ClassVar[bool] = True
    samples: int = 10  # L; 0 is WarPI (Detc.): v at the mean, no sampling
    output: Literal["sigmoid", "tanh", "unbounded"] = "sigmoid"
    label_input: Literal["embedding", "one_hot"] = "embedding"
    activation: Literal["tanh", "relu"] = "tanh"
    hidden: int = 100
    mean_init: Literal["zero"] | None = (
        None  # of V's head for mu; None: Xavier's, as published; zero: one mean for all v
    )
    meta_lr: float = 3e-4  # beta, of Adam
    virtual_lr: float | None = None  # alpha of Eq. (11); None: the classifier's current learning rate

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(self, samples=0, hidden=1, meta_lr=0, virtual_lr=0)

    def start(self, task: Task, recipe: Recipe) -> None:
        super().start(task, recipe)
        with seeded(derive(recipe.seed, "meta-network")):
            activation = nn.Tanh if self.activation == "tanh" else nn.ReLU
            V = MetaNet(task.n_classes, self.hidden, self.label_input, activation)
        if self.mean_init == "zero":
            nn.init.zeros_(V.mean.weight)
        self.V = V.to(task.train.y.device)
        self.meta_optimizer = adam(self.V.parameters(), self.meta_lr)

    def rectify(self, z: Tensor, y: Tensor) -> Tensor:
        """Samples of v for logits and given labels.  [max(L, 1), B, K]"""
        return self.draw(self.V(z.detach(), y))

    def draw(self, q: DiagGaussian) -> Tensor:
        """Samples of v.  [max(L, 1), B, K]"""
        s = q.rsample(self.samples, self.generator) if self.samples else q.mean[None]  # Eq. (8)
        return OUTPUTS[self.output](s)

    def step(self, batch: Batch) -> Log:
        logits: list[Tensor] = []

        def rectified_loss(z: Tensor) -> Tensor:
            logits[:] = [z.detach()]
            v = self.rectify(z, batch.y)  # [L, B, K]
            return cross_entropy(v * z, batch.y).mean()  # Eq. (9)

        def meta_loss(z: Tensor, y: Tensor) -> Tensor:
            return cross_entropy(z, y).mean()

        log = bilevel_step(  # Eqs. (11) to (13)
            self, batch, rectified_loss, meta_loss, self.V.parameters(), self.meta_optimizer, self.virtual_lr
        )
        if not self.samples:
            return log
        with (
            torch.no_grad()
        ):  # does the posterior collapse? A few large sigma make their mean, not that of the logarithms
            q = self.V(logits[0], batch.y)
            return {**log, "sigma": q.std.mean(), "log_sigma": 0.5 * q.log_var.mean()}
