"""Seeds and random generators. Each purpose has its own seed, so that no source of randomness depends on another."""

import hashlib
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch


def derive(seed: int, *names: str | int) -> int:
    """A seed for one named purpose. It is the same on every machine."""
    text = "/".join(str(part) for part in (seed, *names))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") >> 1


def generator(seed: int, *names: str | int, device: torch.device | str = "cpu") -> torch.Generator:
    """A new generator for one named purpose."""
    return torch.Generator(device).manual_seed(derive(seed, *names))


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Context manager: seed the global generators of python, numpy and torch, and restore them at the end."""
    state = capture_rng()
    random.seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002
    torch.manual_seed(seed)
    try:
        yield
    finally:
        restore_rng(state)


def capture_rng() -> dict[str, Any]:
    """State of the global generators of python, numpy and torch, as checkpoints store it."""
    version, numbers, gauss = random.getstate()
    _, keys, *rest = np.random.get_state()  # noqa: NPY002
    state = {
        "python": [version, list(numbers), gauss],
        "numpy": [torch.tensor(np.asarray(keys).astype(np.int64)), *rest],
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state_all()
    return state


def restore_rng(state: dict[str, Any]) -> None:
    """Set the global generators to a captured state. GPUs that this machine does not have are ignored."""
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers), gauss))
    keys, *rest = state["numpy"]
    np.random.set_state(("MT19937", keys.numpy().astype(np.uint32), *rest))  # noqa: NPY002
    torch.set_rng_state(state["torch"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state_all(state["cuda"][: torch.cuda.device_count()])
