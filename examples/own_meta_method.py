"""A custom meta method: a network weighs examples by loss and entropy, and is trained on the trusted examples.

python examples/own_meta_method.py
warpi --use examples/own_meta_method.py fit --data digits --noise pair:0.4 --method entropy_weight --out runs/own
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from warpi import CE, Batch, Log, Method, Recipe, load_dataset, make_task, setting, train
from warpi.functional import cross_entropy
from warpi.training import adam, bilevel_step


@dataclass
class EntropyWeight(Method):
    """w = V(loss, entropy): V is trained so that the classifier's next step lowers the loss on the trusted examples."""

    needs_meta = True  # it cannot be trained without trusted examples
    hidden: int = setting(32, "units in the hidden layer of V")
    meta_lr: float = setting(1e-3, "learning rate of V")

    def create_state(self) -> None:
        """Create what checkpoints store. The classifier `net`, its `optimizer` and the loaders exist already."""
        layers = lambda: nn.Sequential(nn.Linear(2, self.hidden), nn.ReLU(), nn.Linear(self.hidden, 1), nn.Sigmoid())
        V = self.recipe.make_module("meta-network", layers)  # the same initial weights for the same seed
        self.V = V.to(self.task.device)
        self.meta_optimizer = adam(self.V.parameters(), self.meta_lr)

    def step(self, batch: Batch) -> Log:
        def weighted_loss(z: Tensor) -> Tensor:  # loss of the noisy batch, a function of V
            losses = cross_entropy(z, batch.y)  # [B]
            p = z.softmax(dim=1)  # [B, K]
            entropy = -(p * p.clamp_min(1e-9).log()).sum(1)  # [B]
            w: Tensor = self.V(torch.stack([losses, entropy], dim=1).detach())[:, 0]  # [B]
            return (w * losses).mean()

        def meta_loss(z: Tensor, y: Tensor) -> Tensor:  # loss of the trusted batch, after the virtual step
            return cross_entropy(z, y).mean()

        return bilevel_step(self, batch, weighted_loss, meta_loss, self.V.parameters(), self.meta_optimizer)


METHODS = {"entropy_weight": EntropyWeight()}


def accuracy(method: Method, epochs: int = 30) -> float:
    dataset, _ = load_dataset("digits")
    task, truth = make_task(dataset, "uniform:0.4", meta=50, seed=0)
    method.start(task, Recipe(net="mlp", epochs=epochs))
    *_, last = (record for record in train(method, task, truth) if record)
    return last["test_acc"]


if __name__ == "__main__":
    print(f"CE             {accuracy(CE()):.1f} %")
    print(f"EntropyWeight  {accuracy(EntropyWeight()):.1f} %")
