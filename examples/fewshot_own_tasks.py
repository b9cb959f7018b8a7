"""Few-shot learning on your own tasks: curves of damped pendulums, each measured at six times.

    python examples/fewshot_own_tasks.py

Each pendulum has its own amplitude, frequency and damping. A learner trained on many of them predicts a new one from
six measurements, with a standard deviation. Tasks are tensors [tasks, examples, features]; for classification, use
`Problem(shape, ways=5)` and class indices as targets.
"""

import torch
from torch import Tensor

from warpi.fewshot.learner import Episode, Learner, Problem
from warpi.fewshot.learners.metavrf import MetaVRF
from warpi.fewshot.learners.registry import make_learner


def pendulums(tasks: int, generator: torch.Generator, seen: int = 6, asked: int = 20) -> Episode:
    """Angles over time: [tasks, seen, 1] measurements to adapt to, and [tasks, asked, 1] others to predict."""
    swing, frequency, damping, phase = torch.rand(4, tasks, 1, 1, generator=generator)
    t = 8 * torch.rand(tasks, seen + asked, 1, generator=generator)
    angle = (1 + 2 * swing) * torch.exp(-0.2 * damping * t) * torch.cos((1 + frequency) * t + 6.28 * phase)
    return Episode(t[:, :seen], angle[:, :seen], t[:, seen:], angle[:, seen:])


def trained(learner: Learner, steps: int, tasks: int = 25, lr: float = 3e-3) -> Learner:
    """The learner after some steps of Adam, each on new tasks."""
    generator = torch.Generator().manual_seed(0)
    learner.start(Problem(shape=(1,)), seed=0)
    optimizer = torch.optim.Adam(learner.parameters(), lr)
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = lr * (1 - step / steps)
        loss, _ = learner.loss(pendulums(tasks, generator))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return learner


def error(learner: Learner, tasks: int = 500) -> float:
    """Mean squared error on new pendulums."""
    new = pendulums(tasks, torch.Generator().manual_seed(1))
    answer = learner.adapt(new.support_x, new.support_y).predict(new.query_x)
    return (answer - new.query_y).square().mean().item()


def show(times: Tensor, truth: Tensor, mean: Tensor, std: Tensor) -> None:
    print("   time   truth   prediction")
    for row in torch.cat([times, truth, mean, std], 1)[times.squeeze(1).argsort()]:
        print("{:7.2f} {:7.2f} {:7.2f} ± {:.2f}".format(*row.tolist()))


if __name__ == "__main__":
    torch.set_num_threads(1)  # faster: the tensors are small
    ours = trained(make_learner("metavrf_evidence", proposals=8), steps=600)
    plain = trained(MetaVRF(norm="support"), steps=600)
    print(f"mean squared error on 500 new pendulums: {error(ours):.3f} (with the paper's kernel: {error(plain):.3f})")
    one = pendulums(1, torch.Generator().manual_seed(2))
    adapted = ours.adapt(one.support_x[0], one.support_y[0])  # a single task
    times = one.query_x[0, :8]
    show(times, one.query_y[0, :8], adapted.predict(times), adapted.std(times))
