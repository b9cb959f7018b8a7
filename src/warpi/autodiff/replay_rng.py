"""Replay the random state of a forward pass, so that a repeated pass draws the same masks.

Torch's global generator of a device is recorded and restored. The generators of python and numpy are only compared.
"""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor, nn

_draws: WeakKeyDictionary[nn.Module, bool] = WeakKeyDictionary()  # whether a network draws from the global generator


def is_capturing(device: torch.device) -> bool:
    """Whether a CUDA graph is being recorded."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


@contextmanager
def record_rng(net: nn.Module, x: Tensor) -> Iterator[list[Tensor]]:
    """Context manager: record the state of the global generator at the start, if the code inside draws from it.

    The list gets one element at the end, or none. Comparing generator states also detects functions such as F.dropout,
    which a search for modules would miss.
    """
    recorded: list[Tensor] = []
    if is_capturing(x.device):  # states cannot be compared in a graph
        if _draws.get(net):
            raise RuntimeError("its network draws random numbers, which in a graph only traced passes can repeat")
        yield recorded
        return
    before = get_rng_state(x.device)
    yield recorded
    _draws[net] = not torch.equal(before, get_rng_state(x.device))
    if _draws[net]:
        recorded.append(before)


def get_rng_state(device: torch.device) -> Tensor:
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()


@contextmanager
def replay_rng(state: Tensor | None, device: torch.device) -> Iterator[None]:
    """Context manager: draw from a recorded state inside, and restore the global generator at the end."""
    if state is None:
        yield
        return
    with torch.random.fork_rng([device] if device.type == "cuda" else [], device_type="cuda"):
        if device.type == "cuda":
            torch.cuda.set_rng_state(state, device)
        else:
            torch.set_rng_state(state)
        yield


def get_python_rng_state() -> object:
    """State of the generators of python and numpy, for comparison."""
    return random.getstate(), [str(part) for part in np.random.get_state()]  # noqa: NPY002
