"""WarPI: a meta-network rescales the logits before the loss, which weakens the influence of wrong labels."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from warpi.data.batch import Batch
from warpi.functional.gaussian import DiagGaussian
from warpi.functional.losses import cross_entropy, cross_entropy_gradient, one_hot, rectified_cross_entropy
from warpi.functional.transition import from_trusted
from warpi.training.bilevel import WithGradient, bilevel_step
from warpi.training.method import Log, Method, descend, evaluating
from warpi.training.outputs import predict_rows
from warpi.training.recipe import adam
from warpi.training.warmup import restart, warmup_epochs
from warpi.utils.settings import setting

OUTPUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "sigmoid": torch.sigmoid,  # v in (0, 1), as in the published code
    "tanh": lambda s: 4 * torch.sigmoid(1 + s) - 2,  # 2 tanh((1 + s) / 2), in (-2, 2); close to 1 + s for small s
    "unbounded": lambda s: 1 + s,  # the paper's Gaussian, shifted so that s = 0 leaves the logits unchanged
}
"""Functions from a sample s = mu + sigma * eps to the rectifying vector v."""
# Settings of `fit_posterior`:
FIT_STEPS = 500
FIT_BATCH = 256
FIT_LR = 1e-2
FIT_NOISE = 0.5  # noise that is added to the logits, as a multiple of their standard deviation


@dataclass
class WarPI(Method):
    """Warped probabilistic inference: a second network learns how far each given label can be trusted.

    This meta-network proposes a random vector, by which the logits are multiplied before the loss is computed.

    F(x; theta) is the classifier. The meta-network V(z, y; phi) reads the logits z and the given label y of an example
    and returns the mean and variance of a rectifying vector v with one coordinate per class. One step updates phi,
    then theta, on a batch of B noisy examples and a batch of trusted ones:

        (mu_i, sigma_i) = V(z_i, y_i; phi),         z_i = F(x_i; theta), detached
        v_ij            = h(mu_i + sigma_i eps_ij), eps_ij ~ N(0, I),  j = 1, ..., L                     Eq. (8)
        L(theta; phi)   = 1/(L B) sum_i sum_j CE(v_ij * F(x_i; theta), y_i)                              Eq. (9)
        L_meta(theta)   = mean CE(F(x; theta), y) over the trusted batch                                 Eq. (10)
        theta_hat(phi)  = theta - alpha dL(theta; phi)/dtheta                   the virtual step         Eq. (11)
        phi            <- phi - beta dL_meta(theta_hat(phi))/dphi               the meta step            Eq. (12)
        theta          <- theta - alpha dL(theta; phi)/dtheta                   the real step, new phi   Eq. (13)

    The gradient in Eq. (12) is exact (see `warpi.training.bilevel`). V is used for training only: predictions are the
    softmax of the plain logits. The number of samples L only multiplies operations on [B, K] logits, so it is cheap.

    Differs from the paper: the defaults follow the published code, and a field selects the paper's version. The label
    enters V through a learned embedding (`label_input`; paper: one-hot), and h is a sigmoid (`output`; paper: the
    identity, so that v is Gaussian).
    Reference: Sun et al., Learning to Rectify for Robust Learning with Noisy Labels, Pattern Recognition 2022.
    """

    family = "meta"
    year = 2022
    needs_meta = True
    for_tables: ClassVar[dict[str, Any]] = {  # why: docs/methods/warpi.md
        "output": "tanh",
        "label_input": "one_hot",
        "v_start": "transition",
        "log_var_init": -4.0,
        "trusted_weight": 5.0,
        "meta_lr": 3e-5,
    }
    table_net = "mlp_plain"

    samples: int = setting(10, "number L of samples of v per example; 0 uses the mean of v instead", low=0)
    output: Literal["sigmoid", "tanh", "unbounded"] = setting("sigmoid", "function h from a Gaussian sample to v")
    label_input: Literal["embedding", "one_hot"] = setting("embedding", "how the given label enters the meta-network")
    activation: Literal["tanh", "relu"] = setting("tanh", "activation of the meta-network's hidden layers")
    hidden: int = setting(100, "units in each hidden layer of the meta-network", low=1)
    mean_init: Literal["zero"] | None = setting(None, "initial weights of the layer of the mean of v (default: Xavier)")
    meta_lr: float = setting(3e-4, "learning rate beta of the meta-network (Adam)", low=0)
    trusted_weight: float = setting(
        0.0, "weight of the trusted examples in the real step, times M/N for M trusted and N noisy ones", low=0
    )
    v_start: Literal["transition"] | None = setting(
        None, "start the meta-network from the posterior under an estimated transition matrix (default: Xavier)"
    )
    log_var_init: float | None = setting(None, "initial log-variance of v (default: PyTorch's random weights)")
    warmup: float = setting(0.3, "with --v-start: fraction of the epochs before the matrix is estimated", 0, 1)
    virtual_lr: float | None = setting(None, "step size alpha of the virtual step (default: the classifier's)", low=0)

    def create_state(self) -> None:
        activation = Tanh if self.activation == "tanh" else nn.ReLU
        V = self.recipe.make_module(
            "meta-network", lambda: MetaNet(self.task.n_classes, self.hidden, self.label_input, activation)
        )
        if self.mean_init == "zero":
            nn.init.zeros_(V.mean.weight)
        if self.log_var_init is not None:
            nn.init.zeros_(V.log_var.weight)
            nn.init.constant_(V.log_var.bias, self.log_var_init)
        self.V = V.to(self.task.device)
        self.meta_optimizer = adam(self.V.parameters(), self.meta_lr)
        if self.v_start:
            self.is_warm = False  # True when V has been fitted to the transition matrix
            self.schedule_starts = [0, self.switch]

    @property
    def switch(self) -> int:
        """With `v_start`: the epoch in which V is fitted to the transition matrix and training starts again."""
        return warmup_epochs(self.warmup, self.recipe.epochs)

    def before_epoch(self, t: int) -> None:
        if self.v_start and t >= self.switch and not self.is_warm:
            self.start_from_transition()
            restart(self)
            self.is_warm = True

    def step(self, batch: Batch) -> Log:
        if self.v_start and not self.is_warm:
            return {"loss": descend(cross_entropy(self.net(batch.x), batch.y).mean(), self.optimizer)}
        proposals: list[DiagGaussian] = []  # the outputs of V in this step

        def rectified_loss(z: Tensor) -> tuple[Tensor, Tensor]:
            proposals.append(self.V(z, batch.y))
            return rectified_cross_entropy(self.draw(proposals[-1]), z, batch.y)  # Eq. (9) and its gradient at z

        assert self.task.meta is not None  # see needs_meta
        log = bilevel_step(  # Eqs. (11) to (13)
            self,
            batch,
            WithGradient(rectified_loss),
            WithGradient(cross_entropy_gradient),  # Eq. (10)
            self.V.parameters(),
            self.meta_optimizer,
            self.virtual_lr,
            trusted_weight=self.trusted_weight * len(self.task.meta) / len(self.task.train),
        )
        if self.samples == 0:
            return log
        # Both logs show whether the posterior collapses; the mean of sigma alone can hide it behind a few large values.
        q = proposals[-1]
        return {**log, "sigma": q.std.detach().mean(), "log_sigma": 0.5 * q.log_var.detach().mean()}

    def draw(self, q: DiagGaussian) -> Tensor:
        """Sample v from the output of the meta-network.  Returns [max(L, 1), B, K]."""
        s = q.rsample(self.samples, self.generator) if self.samples else q.mean[None]  # Eq. (8)
        return OUTPUTS[self.output](s)

    def label_samples(self, z: Tensor, y: Tensor, n: int, generator: torch.Generator) -> Tensor | None:
        """log softmax(v_l z)_y for n samples v_l of the rectifying vector.  [n, B]"""
        if not self.samples:
            return None
        with evaluating([self.V]):
            v = OUTPUTS[self.output](self.V(z, y).rsample(n, generator))  # [n, B, K]
        return (v * z).log_softmax(-1).gather(-1, y.expand(n, -1)[..., None])[..., 0]

    def start_from_transition(self) -> None:
        """Fit V to the posterior under T. T and the logits are those of the network trained on the noisy labels."""
        assert self.task.meta is not None  # see needs_meta
        rows, z = predict_rows(self.net, self.task.meta)
        T = from_trusted(z.softmax(1), self.task.meta.y[rows])
        rows, z = predict_rows(self.net, self.task.train)
        fit_posterior(self.V, OUTPUTS[self.output], z, self.task.train.y[rows], T, self.generator)


class MetaNet(nn.Module):
    """V(z, y; phi): a network from logits and given labels to Gaussians, one coordinate per class."""

    def __init__(self, n_classes: int, hidden: int, label_input: str, activation: type[nn.Module]) -> None:
        super().__init__()
        self.label: nn.Embedding | OneHot
        if label_input == "embedding":
            self.label = nn.Embedding(n_classes, n_classes)
        else:
            self.label = OneHot(n_classes)
        first = nn.Linear(2 * n_classes, hidden)
        second = nn.Linear(hidden, hidden)
        self.trunk = nn.Sequential(first, activation(), second, activation())
        self.mean = nn.Linear(hidden, n_classes)
        self.log_var = nn.Linear(hidden, n_classes)  # keeps PyTorch's default initialization
        for layer in (first, second, self.mean):
            nn.init.xavier_normal_(layer.weight)
            nn.init.zeros_(layer.bias)

    def forward(self, z: Tensor, y: Tensor) -> DiagGaussian:
        h = self.trunk(torch.cat([z, self.label(y)], dim=1))  # [B, hidden]
        return DiagGaussian(self.mean(h), self.log_var(h))


def fit_posterior(
    V: MetaNet, output: Callable[[Tensor], Tensor], z: Tensor, y: Tensor, T: Tensor, generator: torch.Generator
) -> None:
    """Fit the mean of V, so that the rectified loss and forward correction with T have the same gradient at the logits.

        u(v) = v (softmax(v z) - y)   close to   softmax(z) - q,   q_k proportional to softmax(z)_k T[k, y]

    The logits z [N, K], which have the given labels y [N], get noise and random factors, because logits grow during
    training.
    """
    layers = [p for name, p in V.named_parameters() if not name.startswith("log_var")]
    optimizer = torch.optim.Adam(layers, FIT_LR)
    n_classes = z.shape[1]
    for step in range(FIT_STEPS):
        optimizer.param_groups[0]["lr"] = FIT_LR * (1 - step / FIT_STEPS)
        rows = torch.randint(len(z), (FIT_BATCH,), generator=generator, device=z.device)
        scale = 4 * torch.rand(FIT_BATCH, 1, generator=generator, device=z.device)
        noise = FIT_NOISE * z.std() * torch.randn(FIT_BATCH, n_classes, generator=generator, device=z.device)
        logits = scale * (z[rows] + noise)  # [B, K]
        given = y[rows]  # [B]
        p = logits.softmax(1)
        q = p * T.T[given]
        q = q / q.sum(1, keepdim=True).clamp_min(1e-12)
        v = output(V(logits, given).mean)
        u = v * ((v * logits).softmax(1) - one_hot(given, n_classes))
        descend((u - (p - q)).square().sum(1).mean(), optimizer)


class Tanh(nn.Module):
    """tanh x = 2 sigmoid(2x) - 1. On a CPU, torch computes the sigmoid several times faster."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.sigmoid(2 * x).mul(2).sub_(1)


class OneHot(nn.Module):
    """Encode labels [B] as unit vectors [B, K]."""

    def __init__(self, n_classes: int) -> None:
        super().__init__()
        self.eye: Tensor
        self.register_buffer("eye", torch.eye(n_classes))

    def forward(self, y: Tensor) -> Tensor:
        return self.eye[y]
