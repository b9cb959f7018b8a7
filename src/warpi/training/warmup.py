"""The length of a warm-up, and restarting the training after it."""

import torch
from torch import Tensor

from warpi.training.method import Method


def warmup_epochs(share: float, epochs: int) -> int:
    """Number of epochs of a phase that takes this fraction of the training, at least one."""
    return max(1, round(share * epochs))


def capped_warmup(wanted: float, epochs: int) -> float:
    """Length of a paper's warm-up, but at most half of a short run.

    Longer runs keep the paper's number of epochs, because a warm-up only has to teach the network something.
    """
    return min(wanted, epochs / 2)


@torch.no_grad()
def reset_optimizer_state(optimizer: torch.optim.Optimizer) -> None:
    """Set the moments of an optimizer to zero, because those of one loss would distort the first steps of another.

    This happens in place, as graphed steps require.
    """
    for state in optimizer.state.values():
        for value in state.values():
            if isinstance(value, Tensor):
                value.zero_()


def restart(method: Method, *, reinitialize: bool = True) -> None:
    """Reset the optimizer of the first network, and its weights to the initial ones if `reinitialize`, in place.

    Averaged weights are reset with them, because they would keep the first training for some epochs.
    """
    if reinitialize:
        fresh = method.recipe.make_net(method.task.shape, method.task.n_classes)
        for net in [method.net, *(method.averaged_nets[:1] if method.average_decay else [])]:
            net.load_state_dict(fresh.state_dict())
    reset_optimizer_state(method.optimizer)
