"""Passes that are done a second time draw what they drew the first time.

Torch's own generator of a device is watched and set back; python's and numpy's can only be looked at.
"""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor, nn

_draws: WeakKeyDictionary[nn.Module, bool] = WeakKeyDictionary()  # whether a network draws from the global generator


def capturing(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


@contextmanager
def record_rng(net: nn.Module, x: Tensor) -> Iterator[list[Tensor]]:
    """The state of the global generator before what happens inside, if that draws from it.

    Found by looking at the generator, not for modules: F.dropout is none.
    """
    noted: list[Tensor] = []
    if capturing(x.device):  # a graph cannot look
        if _draws.get(net):
            raise RuntimeError("its network draws random numbers, which in a graph only traced passes can repeat")
        yield noted
        return
    before = generator_state(x.device)
    yield noted
    _draws[net] = not torch.equal(before, generator_state(x.device))
    if _draws[net]:
        noted.append(before)


def generator_state(device: torch.device) -> Tensor:
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()


@contextmanager
def replay_rng(chance: Tensor | None, device: torch.device) -> Iterator[None]:
    """Draw inside what was drawn from `chance` on, and leave the global generator as it was."""
    if chance is None:
        yield
        return
    with torch.random.fork_rng([device] if device.type == "cuda" else [], device_type="cuda"):
        if device.type == "cuda":
            torch.cuda.set_rng_state(chance, device)
        else:
            torch.set_rng_state(chance)
        yield


def python_rng_state() -> object:
    """The state of python's and numpy's generators, to be compared."""
    return random.getstate(), [str(part) for part in np.random.get_state()]  # noqa: NPY002
