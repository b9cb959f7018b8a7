"""EMLC: enhanced meta label correction with a teacher network."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from warpi.data.batch import Batch
from warpi.functional.losses import cross_entropy, mean_cross_entropy, one_hot, soft_cross_entropy
from warpi.methods.mlc import halve
from warpi.training.bilevel import bilevel_step
from warpi.training.method import Log, Method
from warpi.training.outputs import feature_size, last_layer, penultimate
from warpi.utils.settings import setting


class Retain(nn.Module):
    """Map features and a label to the log-odds that the label is right."""

    def __init__(self, size: int, n_classes: int, embedding: int, hidden: int) -> None:
        super().__init__()
        self.label = nn.Embedding(n_classes, embedding)
        self.layers = nn.Sequential(nn.Linear(size + embedding, hidden), nn.ReLU(), nn.Linear(hidden, 1))

    def forward(self, h: Tensor, y: Tensor) -> Tensor:
        odds: Tensor = self.layers(torch.cat([h, self.label(y)], dim=1))[:, 0]  # [B]
        return odds


def swap_every_other_label(z: Tensor, y: Tensor) -> Tensor:
    """Replace every other true label by the most likely wrong class, to train the judge of labels.  [B]"""
    wrong = z.masked_fill(one_hot(y, z.shape[1]).bool(), -torch.inf).argmax(dim=1)
    return torch.where(torch.arange(len(y), device=y.device) % 2 == 0, wrong, y)


@dataclass
class EMLC(Method):
    """A teacher network corrects the labels of the classifier and learns from its loss on trusted examples.

        r_i = sigmoid(V(h_T(x_i), y_i)),   q_i = r_i y_i + (1 - r_i) softmax(T(x_i))     phi: teacher T and V
        L(theta; phi) = 1/B sum_i CE(F(x_i; theta), q_i) + the mean CE on half of the trusted batch
        phi   <- a step down L_meta(theta_hat(phi)) + mean CE of T on the trusted batch + BCE of V
        theta <- theta - alpha dL(theta; phi_new)/dtheta

    L_meta is the loss on the other half of the trusted batch; its gradient is exact. V is trained on the labels of the
    trusted examples, half of them replaced by the teacher's most likely wrong class. The classifier predicts.

    Differs from the paper: no pretraining, one step ahead, the new phi in the real step; more in docs/methods/emlc.md.
    Reference: Taraday and Baskin, Enhanced Meta Label Correction for Coping with Label Corruption, ICCV 2023.
    """

    family = "meta"
    year = 2023
    needs_meta = True
    least_meta_batch = 3  # as for MLC
    n_nets = 2

    embedding: int = setting(128, "size of the label embedding", low=1)
    hidden: int = setting(128, "hidden units of the network that judges labels", low=1)

    def create_state(self) -> None:
        K = self.task.n_classes
        size = feature_size(self.net, self.task.shape)
        last_layer(self.net, next(self.net.parameters()).new_zeros((1, size)))  # raises if it has none
        V = self.recipe.make_module("meta-network", lambda: Retain(size, K, self.embedding, self.hidden))
        self.V = V.to(self.task.device)
        self.optimizers[1].add_param_group({"params": list(self.V.parameters())})  # at the teacher's learning rate

    def correct_labels(self, x: Tensor, y: Tensor) -> Tensor:
        """Soft labels q.  [B, K]"""
        h = penultimate(self.nets[1], x)  # [B, D]
        z = last_layer(self.nets[1], h)
        r = torch.sigmoid(self.V(h, y))[:, None]
        return r * one_hot(y, z.shape[1]) + (1 - r) * z.softmax(dim=1)

    def step(self, batch: Batch) -> Log:
        n = len(batch.y)
        trusted = self.meta_loader.draw()
        learned, judge = halve(trusted)

        def corrected_loss(z: Tensor) -> Tensor:
            noisy = soft_cross_entropy(z[:n], self.correct_labels(batch.x, batch.y)).mean()
            return noisy + cross_entropy(z[n:], learned.y).sum() / max(len(learned.y), 1)

        def own_loss() -> Tensor:
            """The loss of the teacher and of V on the trusted batch."""
            h = penultimate(self.nets[1], trusted.x)
            z = last_layer(self.nets[1], h)
            y = swap_every_other_label(z, trusted.y)
            right = (y == trusted.y).to(z)
            return cross_entropy(z, trusted.y).mean() + F.binary_cross_entropy_with_logits(self.V(h, y), right)

        both = Batch((torch.cat([batch.x, learned.x]),), batch.y, batch.rows)
        phi = [*self.nets[1].parameters(), *self.V.parameters()]
        return bilevel_step(
            self, both, corrected_loss, mean_cross_entropy, phi, self.optimizers[1], trusted=judge, own_loss=own_loss
        )

    @property
    def predictors(self) -> list[nn.Module]:
        return self.nets[:1]
