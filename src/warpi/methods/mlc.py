"""MLC of Zheng et al.: meta label correction."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from warpi.data.batch import Batch
from warpi.functional.losses import cross_entropy, mean_cross_entropy, soft_cross_entropy
from warpi.training.bilevel import bilevel_step
from warpi.training.method import Log, Method
from warpi.training.outputs import feature_size, penultimate
from warpi.training.recipe import adam
from warpi.utils.settings import setting


class Corrector(nn.Module):
    """Map features and given labels to distributions over the classes."""

    def __init__(self, size: int, n_classes: int, embedding: int, hidden: int) -> None:
        super().__init__()
        self.label = nn.Embedding(n_classes, embedding)
        layers = [nn.Linear(size + embedding, hidden), nn.Linear(hidden, hidden), nn.Linear(hidden, n_classes)]
        nn.init.xavier_uniform_(self.label.weight)
        for layer in layers:
            nn.init.xavier_normal_(layer.weight)
            nn.init.zeros_(layer.bias)
        self.layers = nn.Sequential(layers[0], nn.Tanh(), layers[1], nn.Tanh(), layers[2])

    def forward(self, h: Tensor, y: Tensor) -> Tensor:
        q: Tensor = self.layers(torch.cat([h, self.label(y)], dim=1)).softmax(dim=1)  # [B, K]
        return q


def halve(batch: Batch) -> tuple[Batch, Batch]:
    """One half of a trusted batch to train on and one for L_meta: the same for ranks with even shares as for one."""
    return batch.part(slice(1, None, 2)), batch.part(slice(0, None, 2))


@dataclass
class MLC(Method):
    """A meta-network predicts a corrected soft label from the features and the given label of an example.

        q_i = softmax(V(h(x_i), y_i; phi)),   h(x_i) = penultimate features, detached
        L(theta; phi)  = the mean of CE(F(x_i; theta), q_i) over the noisy batch and CE(F(x_j; theta), y_j) over half
                         of the trusted batch
        phi   <- phi - beta d L_meta(theta_hat(phi)) / dphi                L_meta: the other half of the trusted batch
        theta <- theta - alpha dL(theta; phi_new)/dtheta

    Differs from the paper in the batch of the classifier, the virtual step and the order of steps: docs/methods/mlc.md.
    Reference: Zheng et al., Meta Label Correction for Noisy Label Learning, AAAI 2021.
    """

    family = "meta"
    year = 2021
    needs_meta = True
    least_meta_batch = 3  # one to train on, two for L_meta: BatchNorm needs two

    embedding: int = setting(128, "size of the label embedding", low=1)
    hidden: int = setting(128, "units in each hidden layer of the meta-network", low=1)
    meta_lr: float = setting(3e-4, "learning rate of the meta-network (Adam)", low=0)

    def create_state(self) -> None:
        K = self.task.n_classes
        size = feature_size(self.net, self.task.shape)
        V = self.recipe.make_module("meta-network", lambda: Corrector(size, K, self.embedding, self.hidden))
        self.V = V.to(self.task.device)
        self.meta_optimizer = adam(self.V.parameters(), self.meta_lr)

    def step(self, batch: Batch) -> Log:
        n = len(batch.y)
        learned, judge = halve(self.meta_loader.draw())
        x = torch.cat([batch.x, learned.x])
        with torch.no_grad():
            h = penultimate(self.net, x)[:n]  # [B, D]

        def corrected_loss(z: Tensor) -> Tensor:
            noisy = soft_cross_entropy(z[:n], self.V(h, batch.y))
            return torch.cat([noisy, cross_entropy(z[n:], learned.y)]).mean()

        both = Batch((x,), batch.y, batch.rows)
        phi = self.V.parameters()
        return bilevel_step(self, both, corrected_loss, mean_cross_entropy, phi, self.meta_optimizer, trusted=judge)
