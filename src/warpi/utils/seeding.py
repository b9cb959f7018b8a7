"""Seeds and random generators. Each purpose has its own seed, so that no source of randomness depends on another."""

import hashlib
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch


def derive(seed: int, *names: str | int) -> int:
    """A seed for one named purpose. It is the same on every machine."""
    text = "/".join(str(part) for part in (seed, *names))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") >> 1


def generator(seed: int, *names: str | int, device: torch.device | str = "cpu") -> torch.Generator:
    """A new generator for one named purpose."""
    return torch.Generator(device).manual_seed(derive(seed, *names))


class RngState(NamedTuple):
    """State of the global generators of python, numpy and torch."""

    python: Any
    numpy: Any
    torch: torch.Tensor
    cuda: list[torch.Tensor] | None

    @classmethod
    def capture(cls) -> "RngState":
        cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else None
        return cls(random.getstate(), np.random.get_state(), torch.get_rng_state(), cuda)  # noqa: NPY002

    def restore(self) -> None:
        """Set the global generators. GPUs that this machine does not have are ignored."""
        random.setstate(self.python)
        np.random.set_state(self.numpy)  # noqa: NPY002
        torch.set_rng_state(self.torch)
        if self.cuda is not None and torch.cuda.is_available():
            torch.cuda.set_rng_state_all(self.cuda[: torch.cuda.device_count()])

    def to_dict(self) -> dict[str, Any]:
        """The state as checkpoints store it: lists, numbers and tensors."""
        version, numbers, gauss = self.python
        _, keys, *rest = self.numpy
        state = {
            "python": [version, list(numbers), gauss],
            "numpy": [torch.tensor(np.asarray(keys).astype(np.int64)), *rest],
            "torch": self.torch,
        }
        return state if self.cuda is None else {**state, "cuda": self.cuda}

    @classmethod
    def from_dict(cls, state: dict[str, Any]) -> "RngState":
        version, numbers, gauss = state["python"]
        keys, *rest = state["numpy"]
        return cls(
            (version, tuple(numbers), gauss),
            ("MT19937", keys.numpy().astype(np.uint32), *rest),
            state["torch"],
            state.get("cuda"),
        )


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Context manager: seed the global generators of python, numpy and torch, and restore them at the end."""
    state = RngState.capture()
    random.seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002
    if torch.cuda.is_available():
        torch.manual_seed(seed)
    else:  # `torch.manual_seed` would format and keep three stack traces, for missing devices
        torch.default_generator.manual_seed(seed)
    try:
        yield
    finally:
        state.restore()
