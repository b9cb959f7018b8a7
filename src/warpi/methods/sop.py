"""SOP: sparse over-parameterization; SOP+: with two views and balanced predictions."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from warpi.data.batch import Batch
from warpi.functional.losses import entropy, one_hot, soft_cross_entropy
from warpi.training.method import Log, Method, add_trusted, descend
from warpi.utils import distributed
from warpi.utils.settings import setting

_TINY = 1e-4  # smallest probability
_PUBLISHED_BATCH = 128  # the learning rates of u and v refer to this batch size
_PUBLISHED_EPOCHS = 300  # and to this length


@dataclass
class SOP(Method):
    """Give each example variables that absorb a wrong label before the network can learn it.

        s_i  = u_i^2 y_i - v_i^2 (1 - y_i)                    u_i a number, v_i a vector; both begin near 0
        q_i  = normalize(p_i + s_i)                           p_i = softmax(F(x_i)); entries at least 1e-4
        L    = 1/B sum_i CE(q_i, y_i) + |[argmax p_i] + s_i - y_i|^2

    where q_i is constant in v_i, and the squared error in everything but v_i. In a step

        u_i <- u_i - lr_u dL/du_i,    v_i <- v_i - lr_v dL/dv_i,    theta by the optimizer

    While p_i is close to y_i, the gradients of u_i and v_i are small. If the network contradicts the label, they grow
    exponentially, p_i + s_i agrees with the label, and the network no longer has to.

    Differs from the published code: lr_u and lr_v refer to batches of 128 examples and to 300 epochs, as published, and
    are scaled for others, so that the variables can grow by the same factor in a run of any length.
    Reference: Liu et al., Robust Training under Label Noise by Over-parameterization, ICML 2022.
    """

    family = "refinement"
    year = 2022
    for_tables = {"lr_v": 30.0}

    lr_u: float = setting(10.0, "learning rate of u, for 300 epochs with batches of 128 examples", low=0)
    lr_v: float = setting(10.0, "learning rate of v, for 300 epochs with batches of 128 examples", low=0)
    initial: float = setting(1e-8, "standard deviation of u and v at the beginning", low=0)
    use_trusted: bool = setting(False, "also train on the trusted examples, which have no u and v")

    def create_state(self) -> None:
        n, k = len(self.task.train), self.task.n_classes
        device = self.task.device
        self.u = self.initial * torch.randn(n, 1, generator=self.generator, device=device)  # [N, 1]
        self.v = self.initial * torch.randn(n, k, generator=self.generator, device=device)  # [N, K]

    def step(self, batch: Batch) -> Log:
        (x,), y = add_trusted(self, batch)
        u, v = self.variables(batch)
        z = self.net(x)
        q = absorb(z, y, u, v)
        loss = given_loss(q, y).mean() + noise_error(z, y, v).mean()
        return self.learn(batch, loss, len(y), u, v)

    def variables(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """The variables u [B, 1] and v [B, K] of a batch, for which gradients are wanted."""
        return self.u[batch.rows].requires_grad_(), self.v[batch.rows].requires_grad_()

    def learn(self, batch: Batch, loss: Tensor, n: int, u: Tensor, v: Tensor) -> Log:
        """One step of the network and of the variables of the batch, given a loss that is a mean over n examples."""
        du, dv = torch.autograd.grad(loss, (u, v), retain_graph=True)
        descend(loss, self.optimizer)
        scale = n / _PUBLISHED_BATCH * _PUBLISHED_EPOCHS / self.recipe.epochs
        u, v = u.detach(), v.detach()
        self.u[batch.rows] = u - self.lr_u * scale * du
        self.v[batch.rows] = v - self.lr_v * scale * dv
        return {"loss": loss.detach(), "absorbed": (u.square() > 0.5).float().mean()}


@dataclass
class SOPPlus(SOP):
    """SOP with a strong view that must agree with the weak one, and with evenly distributed predictions.

        L+ = L + lambda_C 1/B sum_i KL(p_i || p'_i) + lambda_B CE(mean_i q_i, uniform)

    with p_i (constant in the first term), q_i and L from the weak view as in SOP, and p'_i from the strong view. The
    defaults are those of a re-run by others on CIFAR-10 with human labels.

    Differs from the published code: lr_u and lr_v are scaled as in SOP. The strong view is that of this library
    (rotation, shear, zoom, colors, a covered square) instead of AutoAugment.
    Reference: Liu et al., Robust Training under Label Noise by Over-parameterization, ICML 2022.
    """

    n_views = 2
    n_trusted_views = 2
    strong_views = (1,)

    consistency: float = setting(0.9, "weight lambda_C of the divergence between the two views", low=0)
    balance: float = setting(0.1, "weight lambda_B of the penalty on unevenly predicted classes", low=0)

    def step(self, batch: Batch) -> Log:
        views, y = add_trusted(self, batch)
        u, v = self.variables(batch)
        z, z_strong = self.net(torch.cat(views)).chunk(2)
        q = absorb(z, y, u, v)
        away = soft_cross_entropy(z_strong, z.detach().softmax(1)) - entropy(z.detach())  # KL(p || p')
        uneven = -distributed.mean(q.mean(0)).clamp_min(_TINY).log().mean()
        loss = given_loss(q, y).mean() + noise_error(z, y, v).mean()
        return self.learn(batch, loss + self.consistency * away.mean() + self.balance * uneven, len(y), u, v)


def absorb(z: Tensor, y: Tensor, u: Tensor, v: Tensor) -> Tensor:
    """q = normalize(softmax(z) + u^2 y - v^2 (1 - y)), which is constant in v.  z [B, K], y [B], u [n, 1], v [n, K]

    Examples after the first n have no variables.
    """
    given = one_hot(y, z.shape[1])
    added = F.pad(_square(u), (0, 0, 0, len(y) - len(u))) * given
    removed = F.pad(_square(v.detach()), (0, 0, 0, len(y) - len(v))) * (1 - given)
    q = (z.softmax(1) + added - removed).clamp_min(_TINY)
    return (q / q.sum(1, keepdim=True)).clamp_min(_TINY)


def given_loss(q: Tensor, y: Tensor) -> Tensor:
    """-log q_y.  [B, K], [B] -> [B]"""
    return -q.gather(1, y[:, None])[:, 0].log()


def noise_error(z: Tensor, y: Tensor, v: Tensor) -> Tensor:
    """|[argmax z] - v^2 (1 - y) - y|^2 over the classes other than y, as a function of v.  -> [B], 0 without v

    The class y is left out because its term does not depend on v.
    """
    n, k = v.shape
    others = 1 - one_hot(y[:n], k)
    error = (one_hot(z[:n].argmax(1), k) - _square(v)) * others
    return F.pad(error.square().sum(1), (0, len(y) - n))


def _square(a: Tensor) -> Tensor:
    return a.square().clamp_max(1 - _TINY)
