"""ProMix: use as many examples with right labels as possible, selected class by class and by matching predictions."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from warpi.autodiff.passes import configure_passes, pass_config
from warpi.data.batch import Batch
from warpi.functional.losses import cross_entropy, entropy, one_hot, soft_cross_entropy
from warpi.functional.mixup import mixup_selected, sharpen
from warpi.functional.selection import rank_within_classes, selected_mean
from warpi.training.method import Log, Method, add_trusted, descend
from warpi.training.outputs import feature_size, last_layer, predict_rows
from warpi.training.warmup import capped_warmup
from warpi.utils import distributed
from warpi.utils.settings import setting


class TwoHeads(nn.Module):
    """A network and a second last layer on its features: the logits of both, side by side.  [B, ...] -> [B, 2 K]"""

    def __init__(self, net: nn.Module, head: nn.Linear) -> None:
        super().__init__()
        self.net = net
        self.head = head

    def forward(self, x: Tensor) -> Tensor:
        h = self.net.features(x)  # type: ignore[operator]
        return torch.cat([self.net.fc(h), self.head(h)], dim=1)  # type: ignore[operator]


@dataclass
class ProMix(Method):
    """Two networks start from small losses of each class and add examples whose labels they predict with confidence.

    Each network has a primary head h and a pseudo head g on the same features, and running means pi of its predictions
    p = softmax(h) for reliable examples R and pi' for the others. After a warm-up with cross-entropy, before each
    epoch and for each network:

        S  = in each given class the rho N/K examples with the smallest losses          class-wise small loss
    and in a step, with p from the weak view:

        R  = S and all examples with p_i[y_i] > tau                                     matched high confidence
        R += in the last epochs, examples for which both networks predict the same      label guessing by agreement
             class with probabilities above tau, up to a fraction `most` of the batch
        t_i = y_i; for guessed labels the class with the largest h - beta log pi        debiased labels
        L  = sum over the heads f = h, g of                                             debiased margins
             mean_R CE(f + alpha log pi, t) + w mean_R CE(f_strong + alpha log pi, t) + w CE(mixup of R)
             + lambda_u mean over the others of CE(g + alpha log pi', Sharpen(softmax(h - beta log pi'), T)), both views

    where w rises to 1, and lambda_u rises for twice as long and is 0 afterwards, as in the published code.

    Differs from the published code: docs/methods/promix.md.
    Reference: Xiao et al., ProMix: Combating Label Noise via Maximizing Clean Sample Utility, IJCAI 2023.
    """

    family = "semi-supervised"
    year = 2023
    n_nets = 2
    n_views = 2
    n_trusted_views = 2
    strong_views = (1,)
    for_tables = {"warm_up": 3.0, "tau": 0.95}

    warm_up: float = setting(10.0, "epochs with cross-entropy, at least one and at most half of all epochs", low=0)
    rho: float = setting(0.5, "fraction of the mean class size that small loss selects in each class", low=0, high=1)
    tau: float = setting(0.99, "probability above which a predicted label is selected", low=0, high=1)
    ramp_up: float = setting(50 / 600, "fraction of the epochs in which the weight w rises to 1", low=0, high=1)
    guessing: float = setting(250 / 600, "fraction of the epochs, the last ones, in which labels are guessed", 0, 1)
    most: float = setting(0.9, "fraction of a batch up to which guessed labels are added", low=0, high=1)
    alpha: float = setting(4.0, "parameter of mixup's Beta distribution", low=0)
    lambda_u: float = setting(0.1, "largest weight of the examples that are not selected", low=0)
    temperature: float = setting(0.5, "temperature T at which their predictions are sharpened", low=1e-3)
    debias_loss: float = setting(0.8, "strength of the margins in the loss, alpha in the formula", low=0)
    debias_labels: float = setting(0.8, "strength of the correction of guessed labels, beta in the formula", low=0)
    follow: float = setting(0.085, "fraction of all steps over which the mean predictions are averaged", 0, 1)
    confidence_penalty: float = setting(0.0, "weight of the negative entropy in the warm-up", low=0)
    use_trusted: bool = setting(False, "also train on the trusted examples, which are always selected")

    def create_state(self) -> None:
        n, k = len(self.task.train), self.task.n_classes
        device = self.task.device
        size = feature_size(self.net, self.task.shape)
        last_layer(self.net, torch.zeros(1, size, device=device))  # raises if the network has none
        heads = [self.recipe.make_module(f"pseudo head {i}", lambda: nn.Linear(size, k)).to(device) for i in (0, 1)]
        self.two_heads = [TwoHeads(net, head).train() for net, head in zip(self.nets, heads, strict=True)]
        self.optimizers = [self.recipe.make_optimizer(module.parameters()) for module in self.two_heads]
        for net, module in zip(self.nets, self.two_heads, strict=True):
            configure_passes(module, pass_config(net))
        self.small_loss = torch.zeros(2, n, device=device)  # [2, N] 1: in S, for each network
        self.mean_p = torch.full((2, 2, k), 1 / k, device=device)  # [2, 2, K] pi and pi' of each network
        self.kept = 1 - 1 / max(1.0, self.follow * self.recipe.epochs * self.loader.steps)  # of pi, per step
        self.w = torch.zeros((), device=device)
        self.weight_u = torch.zeros((), device=device)  # current lambda_u
        self.warming = True
        self.is_guessing = False

    def before_epoch(self, t: int) -> None:
        epochs = self.recipe.epochs
        rise = max(1.0, self.ramp_up * epochs)
        self.warming = t < max(1, round(capped_warmup(self.warm_up, epochs)))
        self.is_guessing = not self.warming and t >= round((1 - self.guessing) * epochs)
        self.w.fill_(min(1.0, t / rise))
        self.weight_u.fill_(self.lambda_u * t / (2 * rise) if t < 2 * rise else 0.0)
        if not self.warming:
            self.select()

    def select(self) -> None:
        """Class-wise small-loss selection S by each network, or by its averaged weights if there are any."""
        train, k = self.task.train, self.task.n_classes
        number = math.ceil(self.rho * len(train) / k)
        for i, net in enumerate(self.predictors):
            rows, z = predict_rows(net, train)
            y = train.y[rows]
            self.small_loss[i, rows] = (rank_within_classes(cross_entropy(z, y), y, k) < number).float()

    def step(self, batch: Batch) -> Log:
        if self.warming:
            return self.warm(batch)
        views, y = add_trusted(self, batch)
        z = [net(torch.cat(views)).unflatten(1, (2, -1)) for net in self.two_heads]  # [2 B, 2, K] views, heads
        p = torch.stack([a[: len(y), 0].detach().softmax(1) for a in z])  # [2, B, K] of the weak view
        selected = self.match(batch, y, p)
        reliable = self.add_guesses(selected, p) if self.is_guessing else selected
        parts = [len(batch.y), len(y) - len(batch.y)]
        logs = [self.learn(k, views[0], y, z[k], selected[k], reliable[k], parts) for k in (0, 1)]
        self.follow_means(p, reliable)
        return {"loss": (logs[0] + logs[1]) / 2, "selected": reliable.mean()}

    def warm(self, batch: Batch) -> Log:
        (x, _), y = add_trusted(self, batch)
        total = torch.zeros_like(self.w)
        for net, optimizer in zip(self.two_heads, self.optimizers, strict=True):
            z = net(x)[:, : self.task.n_classes]
            loss = (cross_entropy(z, y) - self.confidence_penalty * entropy(z)).mean()
            total += descend(loss, optimizer) / 2
        return {"loss": total}

    def match(self, batch: Batch, y: Tensor, p: Tensor) -> Tensor:
        """1 for examples in S, with a confidently predicted label, or trusted.  y [B], p [2, B, K] -> [2, B]"""
        n = len(batch.y)
        matched = p.gather(2, y.expand(2, -1)[..., None])[..., 0] > self.tau  # [2, B]
        selected = torch.maximum(self.small_loss[:, batch.rows], matched[:, :n].float())
        return torch.cat([selected, torch.ones_like(p[:, n:, 0])], dim=1)

    def add_guesses(self, selected: Tensor, p: Tensor) -> Tensor:
        """Add the most confident examples for which both networks predict the same class.  [2, B], [2, B, K] -> [2, B]

        Each network adds examples until a fraction `most` of the batch is selected.
        """
        confidence, guess = p.max(2)  # [2, B]
        agree = (guess[0] == guess[1]) & (confidence > self.tau).all(0)  # [B]
        new = agree & (selected == 0)  # [2, B]
        order = distributed.gather(torch.where(new, -confidence.mean(0), 1.0), dim=1)  # of the batch of all ranks
        rank = order.argsort(stable=True, dim=1).argsort(1)[:, distributed.rank_slice(order.shape[1])]
        room = int(self.most * order.shape[1]) - distributed.total(selected.sum(1, keepdim=True))  # [2, 1]
        return torch.where(new & (rank < room), 1.0, selected)

    def learn(
        self, k: int, x: Tensor, y: Tensor, z: Tensor, selected: Tensor, reliable: Tensor, parts: list[int]
    ) -> Tensor:
        """One step of network k.  x [B, ...] weak views, z [2 B, 2, K] of both views, selected and reliable [B]

        `parts` are the numbers of noisy and of trusted examples.
        """
        z_weak, z_strong = z.chunk(2)  # [B, 2, K]
        log_pi, log_other = self.mean_p[k].log()  # [K]
        guess = (z_weak[:, 0].detach() - self.debias_labels * log_pi).argmax(1)
        target = one_hot(torch.where(selected > 0, y, guess), z.shape[2])  # [B, K]
        margin = self.debias_loss * log_pi
        of_labels = two_losses(z_weak + margin, target) + self.w * two_losses(z_strong + margin, target)
        x_mixed, mixed = mixup_selected(x, target, reliable, self.alpha, self.generator, parts)
        z_mixed = self.two_heads[k](x_mixed).unflatten(1, (2, -1))
        any_reliable = distributed.total(reliable.sum()).clamp_max(1)
        of_mixed = any_reliable * two_losses(z_mixed + margin, mixed).mean()
        soft = sharpen((z_weak[:, 0].detach() - self.debias_labels * log_other).softmax(1), self.temperature)
        margin = self.debias_loss * log_other
        of_weak = soft_cross_entropy(z_weak[:, 1] + margin, soft)
        of_strong = soft_cross_entropy(z_strong[:, 1] + margin, soft)
        unreliable = selected_mean(of_weak + self.w * of_strong, 1 - reliable)
        loss = selected_mean(of_labels, reliable) + self.w * of_mixed + self.weight_u * unreliable
        return descend(loss, self.optimizers[k])

    @torch.no_grad()
    def follow_means(self, p: Tensor, reliable: Tensor) -> None:
        """Move pi and pi' toward the mean predictions of reliable and other examples.  p [2, B, K], reliable [2, B]"""
        group = torch.stack([reliable, 1 - reliable], dim=1)  # [2, 2, B]
        sums = group @ p  # [2, 2, K]
        counts = group.sum(2, keepdim=True)
        distributed.average([sums, counts])
        means = sums / counts.clamp_min(1e-6)
        self.mean_p.copy_(torch.where(counts > 0, self.mean_p.lerp(means, 1 - self.kept), self.mean_p))


def two_losses(z: Tensor, q: Tensor) -> Tensor:
    """Cross-entropy with a target, summed over the two heads.  z [B, 2, K], q [B, K] -> [B]"""
    return soft_cross_entropy(z, q[:, None]).sum(1)
