"""LIMIT: limiting label information memorization in training."""

from dataclasses import dataclass
from typing import Literal

from torch import nn

from warpi.data.batch import Batch
from warpi.functional.losses import one_hot, soft_cross_entropy
from warpi.training.method import Log, Method, descend
from warpi.utils.settings import setting


@dataclass
class LIMIT(Method):
    """The classifier is trained with gradients that a second network predicts from the input, without the label.

        g_i   = softmax(z_i) - y_i                     the gradient of cross-entropy at the logits z = F(x)
        mu_i  = softmax(z_i) - softmax(q(x_i))         the predicted gradient, which trains the classifier
        L_q   = 1/B sum_i |g_i - mu_i|^2 + beta |mu_i|^2       Gaussian (LIMIT_G);  |g_i - mu_i|_1 for Laplace (LIMIT_L)

    The classifier's weights can only contain information about the labels that q has learned, and the penalty on mu
    limits it further. mu is the gradient of cross-entropy with the target softmax(q(x)).

    Differs from the paper: uses the mean of q instead of a sample; beta is a constant (the paper chooses it on
    validation data). Both networks use the recipe's optimizer, and q is not pretrained. The classifier alone predicts.
    Reference: Harutyunyan et al., Improving Generalization by Controlling Label-Noise Information in Neural Network
    Weights, ICML 2020.
    """

    family = "refinement"
    year = 2020
    n_nets = 2  # the classifier and q

    beta: float = setting(1.0, "weight of the penalty on predicted gradients", low=0)
    dist: Literal["gaussian", "laplace"] = setting("gaussian", "distribution of a gradient around its prediction")

    def step(self, batch: Batch) -> Log:
        classifier, q = self.nets
        z = classifier(batch.x)  # [B, K]
        label = q(batch.x).softmax(dim=1)  # [B, K]
        loss = soft_cross_entropy(z, label.detach()).mean()  # its gradient at z is mu / B
        p = z.detach().softmax(dim=1)
        error = label - one_hot(batch.y, z.shape[1])  # g - mu
        distance = error.square() if self.dist == "gaussian" else error.abs()
        info = (distance + self.beta * (p - label).square()).sum(1).mean()
        return {"loss": descend(loss, self.optimizers[0]), "q_loss": descend(info, self.optimizers[1])}

    @property
    def predictors(self) -> list[nn.Module]:
        return self.nets[:1]
