"""Losses an example: (z [B, K], y [B]) -> [B]. The method reduces."""

import torch.nn.functional as F
from torch import Tensor


def cross_entropy(z: Tensor, y: Tensor) -> Tensor:
    """-log softmax(z)_y.  z [..., B, K], y [B] -> [..., B]"""
    log_p = F.log_softmax(z, dim=-1)
    return -log_p.gather(-1, y.expand(z.shape[:-1]).unsqueeze(-1)).squeeze(-1)
