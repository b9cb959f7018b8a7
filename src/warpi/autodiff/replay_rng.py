"""Replay the random state of a forward pass, so that a repeated pass draws the same masks.

The state of torch's global generator is recorded and replayed. The states of Python's and NumPy's generators are only
compared, to detect networks that draw from them.
"""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor, nn

# Whether the last recorded pass of a network drew from the global generator.
_draws_random_numbers: WeakKeyDictionary[nn.Module, bool] = WeakKeyDictionary()


def is_capturing(device: torch.device) -> bool:
    """Whether a CUDA graph is being recorded."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


@contextmanager
def record_rng(net: nn.Module, x: Tensor) -> Iterator[list[Tensor]]:
    """Context manager: record the initial state of the global generator if the code inside draws from it.

    The yielded list is empty at first. When the context ends, the state is appended to it if it has changed. Comparing
    states also detects functions such as F.dropout, which a search for modules would miss.
    """
    recorded: list[Tensor] = []
    if is_capturing(x.device):  # states cannot be compared while a graph is recorded
        if _draws_random_numbers.get(net):
            raise RuntimeError("the network draws random numbers, which only a traced pass can repeat in a CUDA graph")
        yield recorded
        return
    before = get_rng_state(x.device)
    yield recorded
    _draws_random_numbers[net] = not torch.equal(before, get_rng_state(x.device))
    if _draws_random_numbers[net]:
        recorded.append(before)


def get_rng_state(device: torch.device) -> Tensor:
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()


@contextmanager
def replay_rng(state: Tensor | None, device: torch.device) -> Iterator[None]:
    """Context manager: set the global generator to a recorded state, and restore its own state at the end.

    Does nothing if `state` is None.
    """
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
    """States of Python's and NumPy's global generators, for comparison."""
    return random.getstate(), [str(part) for part in np.random.get_state()]  # noqa: NPY002
