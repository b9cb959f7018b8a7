"""GDW: generalized data weighting, with one weight per example and class."""

from dataclasses import dataclass

from torch import Tensor

from warpi.autodiff.passes import forward
from warpi.data.batch import Batch
from warpi.functional.losses import cross_entropy, one_hot
from warpi.methods.mwnet import make_weighting_net
from warpi.training.bilevel import batch_gradient
from warpi.training.method import Log, Method, descend
from warpi.training.recipe import adam
from warpi.utils import distributed
from warpi.utils.settings import setting


def balance_gradient(g: Tensor, y: Tensor) -> Tensor:
    """Set g_y = -sum_{k != y} g_k, so that a gradient with respect to the logits sums to zero.  [B, K]

    For g_k = omega_k p_k this is equivalent to the paper's omega_y = sum_{k != y} omega_k p_k / (1 - p_y), without the
    division.
    """
    given = one_hot(y, g.shape[1]).to(g)
    others = g * (1 - given)
    return others - given * others.sum(1, keepdim=True)


@dataclass
class GDW(Method):
    """Weigh the gradient of each logit of each example separately, guided by the trusted examples.

        dL/dz_ik = omega_ik (p_ik - [k = y_i]) / B
        omega_ik = V(l_i; phi)                                 initial weight, equal for all k, as in Meta-Weight-Net
        d_ik     = d L_meta(theta_hat(omega)) / d omega_ik
        omega'   = max(omega - clip(eta d / |d|_1, -c, c), 1e-6),  omega'_iy so that the gradient sums to zero over k
        phi <- phi - beta d L_meta / d phi,    theta <- a step with omega'

    One meta gradient d serves both levels: the gradient of phi is sum_k d_ik, backpropagated through V.

    d is divided by its sum over examples and classes, so eta grows with the number K of classes: 10 K, which is the
    authors' 100 for 10 classes and 1,000 for 100.

    Differs from the paper: the learning rate of theta is the recipe's (paper: cosine over 80 epochs).
    Reference: Chen et al., Generalized Data Weighting via Class-level Gradient Manipulation, NeurIPS 2021.
    """

    family = "meta"
    year = 2021
    needs_meta = True

    hidden: int = setting(100, "hidden units of the weighting network", low=1)
    meta_lr: float = setting(1e-3, "learning rate of the weighting network (Adam)", low=0)
    meta_weight_decay: float = setting(1e-4, "weight decay of the weighting network", low=0)
    class_lr: float | None = setting(None, "learning rate eta of the class weights (default: 10 per class)", low=0)
    clip: float = setting(0.2, "largest change of a class-level weight in one step", low=0)

    def create_state(self) -> None:
        self.V = make_weighting_net(self, self.hidden)
        self.meta_optimizer = adam(self.V.parameters(), self.meta_lr, self.meta_weight_decay)

    @property
    def eta(self) -> float:
        """The learning rate of the class weights."""
        return 10.0 * self.task.n_classes if self.class_lr is None else self.class_lr

    def step(self, batch: Batch) -> Log:
        noisy = forward(self.net, batch.x)
        z = noisy.z.detach()
        p = z.softmax(dim=1)  # [B, K]
        losses = cross_entropy(z, batch.y)  # [B]
        flow = (p - one_hot(batch.y, p.shape[1])) / len(p)  # dL/dz  [B, K]
        w: Tensor = self.V(losses[:, None])  # [B, 1]
        omega = w.detach().repeat(1, p.shape[1]).requires_grad_()  # [B, K]

        with_flow = lambda z: (omega * flow * z).sum()  # its gradient with respect to z is omega * flow
        d, judged = batch_gradient(self, noisy, with_flow, omega, self.lr, shared=False)
        descend((w * d).sum(), self.meta_optimizer)
        size = d.abs().sum()
        distributed.average([size])
        change = (self.eta * d / (distributed.n_ranks() * size).clamp_min(1e-30)).clamp(-self.clip, self.clip)
        omega = (omega.detach() - change).clamp_min(1e-6)
        descend((balance_gradient(omega * flow, batch.y) * noisy.z).sum(), self.optimizer)
        return {"loss": losses.mean(), "meta_loss": judged, "weight": omega.mean()}
