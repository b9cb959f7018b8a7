"""Random tensors for tests, and the settings of property tests."""

import torch
from hypothesis import settings, strategies as st
from torch import Tensor

SOME = settings(max_examples=15, deadline=None, derandomize=True)
seeds = st.integers(0, 2**31)


def make_generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=make_generator(seed), dtype=torch.float64)
