"""VRI: variational rectification inference."""

from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import torch
from torch import Tensor, nn

from warpi.data.batch import Batch
from warpi.functional.gaussian import DiagGaussian
from warpi.functional.losses import cross_entropy, mean_cross_entropy
from warpi.methods.warpi import OUTPUTS
from warpi.training.bilevel import bilevel_step
from warpi.training.method import Log, Method
from warpi.training.outputs import feature_size, penultimate
from warpi.training.recipe import adam
from warpi.utils.settings import setting


class Rectifier(nn.Module):
    """Map features and labels to Gaussians over the rectifying vector v. Without labels, the Gaussian is the prior."""

    def __init__(self, size: int, n_classes: int, embedding: int, hidden: tuple[int, ...]) -> None:
        super().__init__()
        self.label = nn.Embedding(n_classes, embedding)
        sizes = size + embedding, *hidden
        layers = [nn.Linear(a, b) for a, b in pairwise(sizes)]
        self.trunk = nn.Sequential(*(part for layer in layers for part in (layer, nn.Tanh())))
        self.mean = nn.Linear(sizes[-1], n_classes)
        self.log_var = nn.Linear(sizes[-1], n_classes)
        for layer in (*layers, self.mean, self.log_var):
            nn.init.xavier_normal_(layer.weight)
            nn.init.zeros_(layer.bias)

    def forward(self, h: Tensor, y: Tensor | None = None) -> DiagGaussian:
        label = h.new_zeros(len(h), self.label.embedding_dim) if y is None else self.label(y)
        hidden = self.trunk(torch.cat([h, label], dim=1))
        return DiagGaussian(self.mean(hidden), self.log_var(hidden))


@dataclass
class VRI(Method):
    """Like WarPI, but V reads features, not logits, and a learned prior keeps the distribution of v from collapsing.

        q(v | x, y) = N(V(h(x), y; phi)),   p(v | x) = N(V(h(x), 0; phi)),   h(x) = penultimate features, detached
        L(theta; phi) = 1/(L B) sum_i sum_j CE(v_ij * F(x_i; theta), y_i),   v_ij ~ q(v | x_i, y_i), squashed
        phi   <- phi - beta d [L_meta(theta_hat(phi)) + lambda 1/B sum_i KL(q_i || p_i)] / dphi
        theta <- theta - alpha dL(theta; phi_new)/dtheta

    Differs from the published code: phi minimizes the KL term, as in the paper; more in docs/methods/vri.md.
    Reference: Sun et al., Variational Rectification Inference for Learning with Noisy Labels, IJCV 2025.
    """

    family = "meta"
    year = 2025
    needs_meta = True
    for_tables = {"output": "tanh"}

    samples: int = setting(1, "number L of samples of v per example", low=1)
    kl: float = setting(1e-3, "weight lambda of the KL divergence, which is summed over the classes", low=0)
    output: Literal["sigmoid", "tanh", "unbounded"] = setting("sigmoid", "function from a Gaussian sample to v")
    embedding: int = setting(64, "size of the label embedding", low=1)
    hidden: tuple[int, ...] = setting((1024, 512, 512), "units of the meta-network's hidden layers", low=1, high=2**20)
    meta_lr: float = setting(3e-4, "learning rate of the meta-network (Adam)", low=0)
    meta_weight_decay: float = setting(5e-4, "weight decay of the meta-network", low=0)

    def create_state(self) -> None:
        K = self.task.n_classes
        size = feature_size(self.net, self.task.shape)
        V = self.recipe.make_module("meta-network", lambda: Rectifier(size, K, self.embedding, self.hidden))
        self.V = V.to(self.task.device)
        self.meta_optimizer = adam(self.V.parameters(), self.meta_lr, self.meta_weight_decay)

    def step(self, batch: Batch) -> Log:
        with torch.no_grad():
            h = penultimate(self.net, batch.x)  # [B, D]

        def rectified_loss(z: Tensor) -> Tensor:
            v = OUTPUTS[self.output](self.V(h, batch.y).rsample(self.samples, self.generator))  # [L, B, K]
            return cross_entropy(v * z, batch.y).mean()

        kl_loss = lambda: self.kl * self.V(h, batch.y).kl(self.V(h)).mean()
        phi = self.V.parameters()
        return bilevel_step(self, batch, rectified_loss, mean_cross_entropy, phi, self.meta_optimizer, own_loss=kl_loss)
