"""S-model: a noise adaptation layer on top of the classifier."""

from dataclasses import dataclass

import torch
from torch import nn

from warpi.data.batch import Batch
from warpi.functional.losses import cross_entropy
from warpi.functional.transition import forward_loss, from_given
from warpi.training.method import Log, Method, descend
from warpi.training.outputs import predict_rows
from warpi.training.warmup import warmup_epochs
from warpi.utils.settings import setting


@dataclass
class SModel(Method):
    """A second softmax layer models how true classes become given labels; it is trained with the network.

        p(given = j | x) = sum_i T_ij softmax(F(x; theta))_i,    T_ij = exp(b_ij) / sum_l exp(b_il)
        L = 1/B sum_i -log p(given = y_i | x_i),  minimized over theta and b
        b_ij = log( sum_n softmax(F(x_n))_i [y_n = j] / sum_n softmax(F(x_n))_i )                    initial b

    The network is trained without the layer in the first `warmup` of the epochs. Its confusion matrix initializes b,
    and training continues from its weights. The layer is not used for predictions.

    Differs from the paper in the epochs and in the optimizer of the layer: docs/methods/s_model.md.
    Reference: Goldberger and Ben-Reuven, Training deep neural-networks using a noise adaptation layer, ICLR 2017.
    """

    family = "transition"
    year = 2017
    for_tables = {"warmup": 0.1}

    warmup: float = setting(0.7, "fraction of the epochs before the noise layer is added", low=0, high=1)

    def create_state(self) -> None:
        K = self.task.n_classes
        self.b = nn.Parameter(torch.zeros(K, K, device=self.task.device))
        self.optimizer.add_param_group({"params": [self.b], "weight_decay": 0.0})
        self.switch = warmup_epochs(self.warmup, self.recipe.epochs)
        self.has_layer = False

    def before_epoch(self, t: int) -> None:
        if t >= self.switch and not self.has_layer:
            rows, z = predict_rows(self.net, self.task.train)
            T = from_given(z.softmax(1), self.task.train.y[rows])
            with torch.no_grad():
                self.b.copy_(T.clamp_min(1e-8).log())
            self.has_layer = True

    def step(self, batch: Batch) -> Log:
        z = self.net(batch.x)
        if self.has_layer:
            loss = forward_loss(z, batch.y, self.b.softmax(1)).mean()
        else:
            loss = cross_entropy(z, batch.y).mean()
        return {"loss": descend(loss, self.optimizer)}
