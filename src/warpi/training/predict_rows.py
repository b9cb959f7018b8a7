"""What a network makes of all examples of a split."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from warpi.data.split import Split
from warpi.training.method import evaluating


@torch.no_grad()
def survey(
    net: nn.Module, split: Split, look: Callable[[Tensor], Tensor] | None = None, size: int = 1000
) -> tuple[Tensor, Tensor]:
    """Rows [n] that can be read, and `look(x)` [n, ...] of each (by default logits); no augmentation, evaluation mode.

    On every rank the same, if done at the beginning of an epoch: running statistics have just been averaged.
    """
    with evaluating([net]):
        found = [(batch.rows, (look or net)(batch.x).float()) for batch in split.batches(size)]
    return torch.cat([rows for rows, _ in found]), torch.cat([values for _, values in found])
