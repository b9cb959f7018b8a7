"""A custom method in thirty lines: generalized cross-entropy (Zhang & Sabuncu, NeurIPS 2018).

python examples/own_method.py
warpi --use examples/own_method.py fit --data digits --noise symmetric:0.4 --method my_gce --q 0.9 --out runs/mine
"""

from dataclasses import dataclass

from warpi import CE, Batch, Log, Method, Recipe, load_dataset, make_task, setting, train
from warpi.training import descend


@dataclass
class GCE(Method):
    """Between cross-entropy (q -> 0) and absolute error (q = 1): L = (1 - p_y^q) / q."""

    q: float = setting(0.7, "exponent; larger values give wrong labels less weight")

    def step(self, batch: Batch) -> Log:
        p = self.net(batch.x).softmax(dim=1).gather(1, batch.y[:, None]).squeeze(1)  # [B]
        loss = ((1 - p**self.q) / self.q).mean()
        return {"loss": descend(loss, self.optimizer)}


METHODS = {"my_gce": GCE(), "my_gce_q05": GCE(q=0.5)}  # the names for `warpi --use`


def accuracy(method: Method, epochs: int = 30) -> float:
    dataset, _ = load_dataset("digits")
    task, truth = make_task(dataset, "symmetric:0.4", meta=50, seed=0)
    method.start(task, Recipe(net="mlp", epochs=epochs))
    *_, last = (record for record in train(method, task, truth) if record)
    return last["test_acc"]


if __name__ == "__main__":
    print(f"CE   {accuracy(CE()):.1f} %")
    print(f"GCE  {accuracy(GCE()):.1f} %")
