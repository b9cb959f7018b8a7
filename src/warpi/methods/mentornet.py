"""MentorNet with a predefined curriculum (PD), and with one learned from trusted examples (DD)."""

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from warpi.autodiff.passes import forward_at
from warpi.data.batch import Batch
from warpi.functional.losses import cross_entropy
from warpi.functional.selection import follow_percentile, keep_at_random, self_paced
from warpi.training.method import Log, Method, descend
from warpi.training.recipe import adam
from warpi.utils import distributed
from warpi.utils.settings import setting


@dataclass
class MentorNetPD(Method):
    """Weigh examples by a fixed function of their loss that changes in the course of training.

        L(w)     = 1/B sum_i v_i d_i CE(F(x_i; w), y_i)
        lambda   <- a lambda + (1 - a) (the p-th percentile of the losses of the batch)
        v_i      = clip(1 - (l_i - lambda) / gamma_t, 0, 1),    gamma_t = inf in the burn-in: all examples
                                                                        = 0 then: self-paced learning
                                                                        = gamma in the last epochs: a line
        d_i      = 0 for a random fraction of the batch, else 1: half of it in the burn-in, a twentieth later

    Differs from the paper: the weights are the predefined function itself (paper: a network trained to imitate it).
    The moving average starts at the first batch, not at 0.
    Reference: Jiang et al., MentorNet: Learning Data-Driven Curriculum for Very Deep Neural Networks on Corrupted
    Labels, ICML 2018.
    """

    family = "selection"
    year = 2018

    share: float = setting(0.75, "fraction p of a batch whose losses lie below the threshold", low=0, high=1)
    averaging: float = setting(0.5, "fraction of the threshold kept per step (moving average)", low=0, high=1)
    softness: float = setting(1.0, "loss range gamma in which weights fall to 0 in the last epochs", low=0)
    burn_in: float = setting(0.18, "fraction of the epochs in which all examples have weight 1", low=0, high=1)
    linear_from: float = setting(0.9, "fraction of the epochs after which weights fall linearly", low=0, high=1)
    early_dropout: float = setting(0.5, "fraction of each batch left out at random in the burn-in", low=0, high=1)
    dropout: float = setting(0.05, "fraction of each batch left out at random after the burn-in", low=0, high=1)

    def create_state(self) -> None:
        device = self.task.device
        self.average = torch.full((), -1.0, device=device)  # lambda; -1 before the first batch
        self.gamma = torch.zeros((), device=device)
        self.dropped = torch.zeros((), device=device)  # fraction of a batch left out

    def before_epoch(self, t: int) -> None:
        burning = t < self.burn_in * self.recipe.epochs
        if burning:
            self.gamma.fill_(torch.inf)
        else:
            self.gamma.fill_(0.0 if t < self.linear_from * self.recipe.epochs else self.softness)
        self.dropped.fill_(self.early_dropout if burning else self.dropout)

    def step(self, batch: Batch) -> Log:
        losses = cross_entropy(self.net(batch.x), batch.y)  # [B]
        follow_percentile(self.average, losses.detach(), self.share, self.averaging)
        v = self_paced(losses.detach(), self.average, self.gamma)
        v = v * keep_at_random(len(losses), self.dropped, self.generator)
        loss = (v * losses).mean()
        return {"loss": descend(loss, self.optimizer), "weight": v.mean()}


@dataclass
class MentorNetDD(Method):
    """A small network, the mentor, learns from trusted examples to weigh examples by their loss.

        L(w) = 1/B sum_i v_i d_i CE(F(x_i; w), y_i),    v_i = g(l_i, l_i - lambda; Theta), 1 in the burn-in
        Theta <- Theta - beta d/dTheta BCE(g, v*)       on trusted examples: v* = 1 with their right label,
                                                        0 for the half that gets a wrong one

    with lambda and d_i as in MentorNetPD. Mentor and classifier take steps in turn. Wrong labels are drawn from the
    classifier's probabilities without the true class, because a classifier trained on noisy labels imitates the noise.

    Differs from the paper: there the mentor learns from examples with known noisy and true labels, and is a recurrent
    network with loss, difference, label and epoch as inputs. In the published code it takes one step, and label and
    epoch are constants; here it is a perceptron of loss and difference, trained in every step.
    Reference: Jiang et al., MentorNet: Learning Data-Driven Curriculum for Very Deep Neural Networks on Corrupted
    Labels, ICML 2018.
    """

    family = "selection"
    year = 2018
    needs_meta = True

    share: float = setting(0.75, "fraction p of a batch whose losses lie below the threshold", low=0, high=1)
    averaging: float = setting(0.5, "fraction of the threshold kept per step (moving average)", low=0, high=1)
    hidden: int = setting(20, "hidden units of the mentor", low=1)
    mentor_lr: float = setting(0.01, "learning rate of the mentor (Adam)", low=0)
    burn_in: float = setting(0.18, "fraction of the epochs in which all examples have weight 1", low=0, high=1)
    early_dropout: float = setting(0.5, "fraction of each batch left out at random in the burn-in", low=0, high=1)
    dropout: float = setting(0.05, "fraction of each batch left out at random after the burn-in", low=0, high=1)

    def create_state(self) -> None:
        device = self.task.device
        layers = lambda: nn.Sequential(nn.Linear(2, self.hidden), nn.Tanh(), nn.Linear(self.hidden, 1))
        self.mentor = self.recipe.make_module("mentor", layers).to(device)
        self.mentor_optimizer = adam(self.mentor.parameters(), self.mentor_lr)
        self.average = torch.full((), -1.0, device=device)  # lambda; -1 before the first batch
        self.burning = torch.ones((), device=device)  # 1 in the burn-in, else 0
        self.dropped = torch.zeros((), device=device)  # fraction of a batch left out

    def before_epoch(self, t: int) -> None:
        burning = t < self.burn_in * self.recipe.epochs
        self.burning.fill_(float(burning))
        self.dropped.fill_(self.early_dropout if burning else self.dropout)

    def step(self, batch: Batch) -> Log:
        losses = cross_entropy(self.net(batch.x), batch.y)  # [B]
        follow_percentile(self.average, losses.detach(), self.share, self.averaging)
        mentor_loss = self.teach_mentor()
        v = self.mentor_logits(losses.detach()).detach().sigmoid().maximum(self.burning)
        loss = (v * keep_at_random(len(losses), self.dropped, self.generator) * losses).mean()
        return {"loss": descend(loss, self.optimizer), "mentor_loss": mentor_loss, "weight": v.mean()}

    def mentor_logits(self, losses: Tensor) -> Tensor:
        """The mentor's logit that a label with this loss is right.  [B] -> [B]"""
        logits: Tensor = self.mentor(torch.stack([losses, losses - self.average], dim=1))
        return logits[:, 0]

    def teach_mentor(self) -> Tensor:
        """One step of the mentor on a trusted batch; returns its loss."""
        meta = self.meta_loader.draw()
        weights = {name: w for name, w in self.net.named_parameters() if w.requires_grad}
        z = forward_at(self.net, weights, meta.x).z.detach()  # [M, K]
        n, k = z.shape
        uniform = partial(torch.rand, generator=self.generator, device=z.device)
        u = distributed.draw_share(n, lambda total: uniform(total, k))
        drawn = z - (-u.log()).log()  # its argmax is a sample of softmax(z)
        wrong = drawn.scatter(1, meta.y[:, None], -torch.inf).argmax(dim=1)
        right = (distributed.draw_share(n, uniform) < 0.5).float()  # [M] v*
        losses = cross_entropy(z, torch.where(right > 0, meta.y, wrong))
        loss = nn.functional.binary_cross_entropy_with_logits(self.mentor_logits(losses), right)
        return descend(loss, self.mentor_optimizer)
