"""Meta-Weight-Net: a small network learns to weigh examples by their loss."""

from dataclasses import dataclass

from torch import Tensor, nn

from warpi.data.batch import Batch
from warpi.functional.losses import cross_entropy, mean_cross_entropy
from warpi.training.bilevel import bilevel_step
from warpi.training.method import Log, Method
from warpi.training.recipe import adam
from warpi.utils.settings import setting


def make_weighting_net(method: Method, hidden: int) -> nn.Sequential:
    """V: from a loss [B, 1] to a weight in (0, 1) [B, 1]."""
    layers = lambda: nn.Sequential(nn.Linear(1, hidden), nn.ReLU(), nn.Linear(hidden, 1), nn.Sigmoid())
    return method.recipe.make_module("meta-network", layers).to(method.task.device)


@dataclass
class MWNet(Method):
    """A small network V maps the loss of an example to its weight; V is trained on the trusted examples.

        L(theta; phi)  = 1/B sum_i V(l_i; phi) l_i,    l_i = CE(F(x_i; theta), y_i)
        theta_hat(phi) = theta - alpha dL/dtheta
        phi   <- phi - beta d L_meta(theta_hat(phi)) / dphi                 an exact gradient
        theta <- theta - alpha dL(theta; phi_new)/dtheta

    V has one hidden layer with ReLU and a sigmoid output.
    Differs from the paper: follows the stable version of the published code (Adam for V, weights not normalized); the
    paper uses SGD and divides the weights by their sum.
    Reference: Shu et al., Meta-Weight-Net: Learning an Explicit Mapping For Sample Weighting, NeurIPS 2019.
    """

    family = "meta"
    year = 2019
    needs_meta = True

    hidden: int = setting(100, "hidden units of the weighting network", low=1)
    meta_lr: float = setting(1e-3, "learning rate of the weighting network (Adam)", low=0)
    meta_weight_decay: float = setting(1e-4, "weight decay of the weighting network", low=0)

    def create_state(self) -> None:
        self.V = make_weighting_net(self, self.hidden)
        self.meta_optimizer = adam(self.V.parameters(), self.meta_lr, self.meta_weight_decay)

    def step(self, batch: Batch) -> Log:
        def weighted_loss(z: Tensor) -> Tensor:
            losses = cross_entropy(z, batch.y)  # [B]
            w: Tensor = self.V(losses.detach()[:, None])[:, 0]  # [B]
            return (w * losses).mean()

        return bilevel_step(self, batch, weighted_loss, mean_cross_entropy, self.V.parameters(), self.meta_optimizer)
