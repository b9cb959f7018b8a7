"""MAML: an initialization from which a few gradient steps on the support set reach a good solution."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from warpi.errors import UserError
from warpi.fewshot.learner import Conditioned, Learner, Output, Problem, fit_loss
from warpi.fewshot.learners.embedding import FEATURES_HELP, NORM_HELP, Convolutions, FeatureNet
from warpi.utils.settings import setting


@dataclass
class MAML(Learner):
    """theta_k+1 = theta_k - alpha d/dtheta L(theta_k; support), theta_0 learned through the steps, second order.

    All tasks take their steps in parallel (`vmap` over tasks, with separate weights).

    Reference: Finn et al., Model-Agnostic Meta-Learning for Fast Adaptation of Deep Networks, ICML 2017.
    """

    year: ClassVar[int | None] = 2017
    any_ways: ClassVar[bool] = False
    inner_lr: float = setting(0.01, "learning rate alpha of the steps on the support set", low=0)
    steps: int | None = setting(None, "number of steps in training (default: 5, in regression 1)", low=1)
    test_steps: int = setting(10, "number of steps in evaluation", low=1)
    first_order: bool = setting(False, "treat the gradients of the steps as constants")
    norm: Literal["transductive", "support"] = setting("transductive", NORM_HELP)
    features: int | None = setting(None, FEATURES_HELP, low=1)

    def build(self, problem: Problem) -> nn.Module:
        return Network(self, problem)

    def condition(self, support_x: Tensor, support_y: Tensor, ways: int) -> Conditioned:
        if ways != self.problem.ways:
            raise UserError(f"MAML has one output per class: it was trained for {self.problem.ways} ways, got {ways}")
        training = self.net.training
        steps = (self.steps or (5 if ways else 1)) if training else self.test_steps
        start: dict[str, Tensor] = dict(self.net.named_parameters())

        def support_loss(theta: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
            return fit_loss(functional_call(self.net, theta, (x[None],)), y[None], ways)

        def descend(x: Tensor, y: Tensor) -> dict[str, Tensor]:
            theta = start
            for _ in range(steps):
                slope = grad(support_loss)(theta, x, y)
                if self.first_order:
                    slope = {name: g.detach() for name, g in slope.items()}
                theta = {name: p - self.inner_lr * slope[name] for name, p in theta.items()}
            return theta

        adapted = vmap(descend)(support_x, support_y)  # each [T, ...]

        def predict(theta: dict[str, Tensor], support: Tensor, x: Tensor) -> Tensor:
            out: Tensor = functional_call(self.net, theta, (x[None], support[None]))[0]
            return out

        return lambda query_x: Output(vmap(predict)(adapted, support_x, query_x))  # [T, Q, W]


class Network(nn.Module):
    """psi and a linear layer."""

    def __init__(self, learner: MAML, problem: Problem) -> None:
        super().__init__()
        self.psi = FeatureNet(problem, learner.norm, learner.features)
        if isinstance(self.psi.body, Convolutions):
            self.psi.body.channels_last = False
        self.last = nn.Linear(self.psi.features, problem.ways or problem.outputs)
        nn.init.xavier_normal_(self.last.weight)
        nn.init.zeros_(self.last.bias)

    def forward(self, x: Tensor, support: Tensor | None = None) -> Tensor:
        """Logits or numbers for inputs [T, N, ...], normalized by the statistics of `support` if `norm` asks for it."""
        stats = None
        if support is not None and self.psi.norm == "support":
            stats = self.psi(support)[1]
        out: Tensor = self.last(self.psi(x, stats)[0])
        return out
