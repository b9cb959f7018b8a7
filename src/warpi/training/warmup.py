"""The phases of a method: where they meet, and a new beginning."""

import torch
from torch import Tensor

from warpi.training.method import Method


def warmup_epochs(share: float, epochs: int) -> int:
    """The first epoch after a phase that takes that share of the epochs, and one at least."""
    return max(1, round(share * epochs))


def capped_warmup(wanted: float, epochs: int) -> float:
    """So many epochs as a paper's warm-up takes, and at most half of a short run.

    What a warm-up needs is a network that has learned something, however long the training goes on afterwards.
    """
    return min(wanted, epochs / 2)


@torch.no_grad()
def reset_optimizer_state(optimizer: torch.optim.Optimizer) -> None:
    """No moments any more: those of one loss would carry the weights away when another begins.

    In place, as captured steps need it.
    """
    for memory in optimizer.state.values():
        for value in memory.values():
            if isinstance(value, Tensor):
                value.zero_()


def restart(method: Method, *, reinitialize: bool = True) -> None:
    """The first network as it was at the start (as it is, unless anew), in place, and its optimizer without memory."""
    if reinitialize:
        fresh = method.recipe.make_net(method.task.shape, method.task.n_classes)
        method.net.load_state_dict(fresh.state_dict())
    reset_optimizer_state(method.optimizer)
