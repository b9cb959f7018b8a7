"""The device of a run, its CPU threads, and the signals that stop it."""

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from warpi.errors import UserError, format_count
from warpi.utils import distributed

STOPPING = tuple(getattr(signal, name) for name in ("SIGINT", "SIGUSR2", "SIGTERM") if hasattr(signal, name))
"""The signals that stop a run after its state was stored. Windows has no SIGUSR2."""
DEVICE_ERRORS = (torch.OutOfMemoryError, getattr(torch, "AcceleratorError", torch.OutOfMemoryError))
"""RuntimeErrors that a device causes, not a network. AcceleratorError exists since torch 2.8."""


class Stopped(Exception):
    """A signal stopped the run after its state was stored. `advice` tells the user how to resume."""

    def __init__(self, signum: int, advice: str) -> None:
        super().__init__(f"stopped by {signal.Signals(signum).name}; {advice}")
        self.signum = signum
        self.rank = distributed.rank()


def pick_device(device: str) -> torch.device:
    """The device with this name. `auto` is a CUDA device if there is one. Each rank on a machine gets its own."""
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda" and distributed.is_launched():
        device = f"cuda:{os.environ['LOCAL_RANK']}"
    try:
        chosen = torch.device(device)
    except RuntimeError:
        chosen = None
    if chosen is None or chosen.type not in ("cpu", "cuda"):
        raise UserError(f"unknown device {device!r}; allowed: auto, cpu, cuda, cuda:0, ...")
    if chosen.type == "cuda" and (chosen.index or 0) >= torch.cuda.device_count():
        n_devices = format_count(torch.cuda.device_count(), "CUDA device")
        raise UserError(f"this machine has {n_devices}, got {device!r}; use cpu")
    return chosen


def count_cores() -> int:
    """Number of CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@contextmanager
def cpu_threads(n: int | None) -> Iterator[None]:
    """Context manager: let torch use n CPU threads. None keeps the current number."""
    if n is not None and not 1 <= n <= 1024:
        raise UserError(f"threads must be at least 1 and at most 1024, got {n}")
    before = torch.get_num_threads()
    torch.set_num_threads(n or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def catch_signals(caught: list[int] | None = None) -> Iterator[list[int]]:
    """Context manager: collect signals in a list instead of stopping, so that state can be stored first.

    The signals are SIGINT, SIGTERM, and SIGUSR2, which a SLURM cluster sends before a time limit. `caught` is the list
    to use (default: a new one).
    """
    caught = [] if caught is None else caught
    if threading.current_thread() is not threading.main_thread():
        yield caught
        return
    numbers = STOPPING
    handlers = [signal.signal(number, lambda signum, _: caught.append(signum)) for number in numbers]
    try:
        yield caught
    finally:
        for number, handler in zip(numbers, handlers, strict=True):
            signal.signal(number, handler)
