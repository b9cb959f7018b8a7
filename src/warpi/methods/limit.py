"""LIMIT: limiting label information memorization in training."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import nn

from warpi.data.batch import Batch
from warpi.functional.losses import one_hot, soft_cross_entropy
from warpi.training.method import Log, Method, descend
from warpi.utils.field_checks import at_least, setting


@dataclass
class LIMIT(Method):
    """The classifier never sees a label: a second network predicts its gradients, and learns to predict them from x.

        g_i   = softmax(z_i) - y_i                     the gradient of cross-entropy at the logits z = F(x)
        mu_i  = softmax(z_i) - softmax(q(x_i))         the predicted one, by which the classifier is trained
        L_q   = 1/B sum_i |g_i - mu_i|^2 + beta |mu_i|^2       Gaussian (LIMIT_G);  |g_i - mu_i|_1 for Laplace (LIMIT_L)

    The information that gradients carry about the labels beyond x is bounded by how well q predicts them; with the
    penalty on mu there is little to memorise. A gradient mu is that of cross-entropy with the target softmax(q(x)).

    Differs from the paper: the mean of q is used, no sample; the paper chooses beta on validation data, here it is a
    constant. Both networks have the recipe's optimizer; q is not pretrained. Predictions are the classifier's alone.
    Reference: Harutyunyan et al., Improving Generalization by Controlling Label-Noise Information in Neural Network
    Weights, ICML 2020.
    """

    family: ClassVar[str] = "refinement"
    year: ClassVar[int | None] = 2020
    n_nets: ClassVar[int] = 2  # the classifier, and q

    beta: float = setting(1.0, "weight of the penalty on predicted gradients")
    dist: Literal["gaussian", "laplace"] = setting("gaussian", "distribution of a gradient around its prediction")

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(self, beta=0)

    def step(self, batch: Batch) -> Log:
        classifier, q = self.nets
        z, label = classifier(batch.x), q(batch.x).softmax(dim=1)  # [B, K], [B, K]
        loss = soft_cross_entropy(z, label.detach()).mean()  # its gradient at z is mu / B
        p = z.detach().softmax(dim=1)
        missed = label - one_hot(batch.y, z.shape[1])  # g - mu
        distance = missed.square() if self.dist == "gaussian" else missed.abs()
        info = (distance + self.beta * (p - label).square()).sum(1).mean()
        descend(loss, self.optimizers[0])
        descend(info, self.optimizers[1])
        return {"loss": loss.detach(), "q_loss": info.detach()}

    @property
    def predictors(self) -> list[nn.Module]:
        return self.nets[:1]
