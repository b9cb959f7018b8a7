"""Data-parallel training: every rank has its share of each batch, and gradients are averaged by explicit all-reduces.

No wrapper around the network: those of PyTorch raise on a meta gradient or leave it unsynchronised. One process is one
rank; without torch.distributed there is one, and nothing here does anything. All ranks make the same calls in the same
order. Numbers of the network travel on the default group (NCCL on GPUs, gloo on CPUs), everything else on a gloo group
beside it, so that no agreement ever waits for a GPU.
"""

import hashlib
import logging
import os
import shlex
import signal
import sys
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Never

import torch
import torch.distributed as dist
from torch import Tensor

from warpi.errors import UserError

EXIT_RANK_LOST = 75  # exit code of a process whose peers are gone: "try again" in sysexits.h
_ENVIRONMENT = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")  # what torchrun sets
_TELLS = "WARPI_LAUNCHER"  # set where the process that started this one tells the user which of them has died
_PATIENCE = timedelta(minutes=10)  # for a peer that lives; a dead one is noticed when its connection closes
_control: "dist.ProcessGroup | None" = None


class RankLostError(Exception):
    """Another rank is gone. No RuntimeError, which `lookahead` would take for a network without a JVP."""


class RemoteRankError(UserError):
    """What another rank raised; that one says it to the user."""


def launched() -> bool:
    """Whether torchrun, or something like it, started this process as one of several."""
    return all(name in os.environ for name in _ENVIRONMENT)


def _active() -> bool:
    return dist.is_available() and dist.is_initialized()


def ranks() -> int:
    """How many processes train together."""
    return dist.get_world_size() if _active() else 1


def rank() -> int:
    """Which of them this one is. Rank 0 alone writes."""
    return dist.get_rank() if _active() else 0


def rank_slice(n: int) -> slice:
    """Which of n examples of a batch this rank takes."""
    size = ranks()
    if n % size:
        raise UserError(
            f"a batch of {n} examples cannot be shared by {size} processes; choose multiples of {size} for "
            "--batch-size and --meta-batch-size, no larger than the number of noisy and of trusted examples"
        )
    part = n // size
    return slice(rank() * part, (rank() + 1) * part)


@contextmanager
def process_group(where: torch.device) -> Iterator[None]:
    """Inside, this process is a rank if torchrun started it; a process group that is there already is used as it is."""
    global _control
    mine = launched() and not _active()
    if _control is not None or not (mine or _active()):
        yield
        return
    if mine:
        on_gpu = where.type == "cuda"
        if on_gpu:
            torch.cuda.set_device(where)
        try:
            dist.init_process_group(
                "nccl" if on_gpu else "gloo", timeout=_PATIENCE, device_id=where if on_gpu else None
            )
        except (RuntimeError, ValueError) as e:
            raise UserError(f"the processes of this run cannot reach one another: {_short(e)}") from e
    try:
        with _peers():
            _control = dist.new_group(backend="gloo", timeout=_PATIENCE)
        yield
    except RankLostError:
        raise  # taking a group down may wait for those who are gone
    except BaseException:
        _leave(mine)
        raise
    else:
        _leave(mine)
    finally:
        _control = None


def _leave(mine: bool) -> None:
    dist.destroy_process_group(None if mine else _control)


def average(tensors: Iterable[Tensor]) -> None:
    """Replace every tensor by its mean over the ranks, in one flat all-reduce for each kind of number and device."""
    if not _active():
        return
    kinds: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for tensor in tensors:
        kinds.setdefault((tensor.device, tensor.dtype), []).append(tensor.detach())
    for (device, _), same in kinds.items():
        flat = torch.cat([tensor.reshape(-1) for tensor in same])
        all_reduce(flat, _control if device.type == "cpu" else None)
        flat /= ranks()
        means = torch.split(flat, [tensor.numel() for tensor in same])
        torch._foreach_copy_(same, [mean.view_as(tensor) for tensor, mean in zip(same, means, strict=True)])


def all_reduce(tensor: Tensor, group: "dist.ProcessGroup | None" = None, *, largest: bool = False) -> None:
    """Replace a tensor by its sum over the ranks, or by the largest numbers."""
    with _peers():
        dist.all_reduce(tensor, dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM, group)


def min_over_ranks(n: int) -> int:
    """The smallest of a number that each rank has."""
    return -agree(None, -n)[0]


def agree(error: Exception | None, *numbers: int) -> tuple[int, ...]:
    """The largest of each number over the ranks. Where one brings an error, all raise: the others a RemoteRankError."""
    size = ranks()
    if size > 1:
        mine = torch.tensor([-size if error is None else -rank(), *numbers])
        all_reduce(mine, _control, largest=True)
        who, *agreed = mine.tolist()
        if -who < size:
            text = _sent(str(error or "").encode() or type(error).__name__.encode(), -who).decode()
            if -who != rank():
                raise RemoteRankError(f"rank {-who}: {text}")
        numbers = tuple(agreed)
    if error is not None:
        raise error
    return numbers


@contextmanager
def raise_on_all_ranks() -> Iterator[None]:
    """What goes wrong on one rank inside goes wrong on all of them, so that none waits for one that has left."""
    error: Exception | None = None
    try:
        yield
    except RankLostError:
        raise
    except Exception as e:
        error = e
    agree(error)


def broadcast_from_rank0(make: Callable[[], bytes]) -> bytes:
    """What rank 0 makes, on every rank: the others need not see its files."""
    data = b""
    with raise_on_all_ranks():
        if rank() == 0:
            data = make()
    return _sent(data, 0)


def check_same(data: bytes, what: str) -> None:
    """All ranks must have come to the same."""
    mine = hashlib.sha256(data).digest()
    other = _sent(mine, 0) != mine
    need = "all processes need the same data, settings, weight files and versions"
    agree(UserError(f"{what} on rank {rank()} is not that of rank 0; {need}") if other else None)


def _sent(data: bytes, source: int) -> bytes:
    """Bytes of one rank on all; tensors travel, nothing is pickled."""
    if ranks() == 1:
        return data
    with _peers():
        size = torch.tensor(len(data))
        dist.broadcast(size, source, _control)
        content = torch.zeros(int(size), dtype=torch.uint8)
        if rank() == source and data:
            content = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        dist.broadcast(content, source, _control)
    return content.numpy().tobytes()


@contextmanager
def _peers() -> Iterator[None]:
    """A peer that is gone is not an error of this process."""
    try:
        yield
    except RuntimeError as e:
        raise RankLostError(f"rank {rank()} of {ranks()} lost another process of this run ({_short(e)})") from e


def _short(error: Exception) -> str:
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0].rpartition("] ")[2].partition(". ")[0][:120]  # without the place in gloo's source, and advice


# --- starting ---------------------------------------------------------------------------------------------------------


def check_devices(n: int, where: torch.device) -> None:
    """Whether n processes can have a device each."""
    if n < 1:
        raise UserError(f"--devices must be at least 1, got {n}")
    if where.type == "cuda" and n > 1 and where.index is not None:
        raise UserError(f"--devices {n} takes the first {n} GPUs; give --device cuda, not {where}")
    if where.type == "cuda" and n > (there := torch.cuda.device_count()):
        raise UserError(f"--devices {n} needs {n} GPUs, there are {there} here; lower it, or add --device cpu")


def check_started(devices: int | None) -> None:
    """Whether torchrun started as many processes as the user asked for."""
    if devices is not None and launched() and (here := os.environ.get("LOCAL_WORLD_SIZE")) != str(devices):
        raise UserError(
            f"torchrun started {here} processes on this machine, --devices asks for {devices}; leave it away"
        )


def launch(n: int, argv: list[str], out: Path) -> int:
    """Start `warpi ARGV` as n ranks on this machine, as `torchrun --standalone -m warpi` does; return their exit code.

    By torchrun's own machinery, but without its page of text when a process has ended with an error.
    """
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, torch.get_num_threads() // n)))  # they share the cores
    os.environ[_TELLS] = "1"
    logging.disable(logging.CRITICAL)
    with TemporaryDirectory(prefix="warpi-") as logs:
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=n,
            logs_specs=DefaultLogsSpecs(log_dir=logs),
            run_id=uuid.uuid4().hex,
            rdzv_backend="c10d",
            rdzv_endpoint="localhost:0",
            max_restarts=0,
        )
        try:
            elastic_launch(config, sys.executable)("-P", "-m", "warpi", *argv)
        except ChildFailedError as e:
            codes = {number: failure.exitcode for number, failure in e.failures.items()}
        except SignalException as e:
            return 128 + e.sigval
        else:
            return 0
    # Those that were ended because of another's end come last.
    who = min(codes, key=lambda number: (codes[number] == EXIT_RANK_LOST, codes[number] == -signal.SIGTERM, number))
    if codes[who] >= 0 and codes[who] != EXIT_RANK_LOST:
        return codes[who]  # it has said why
    how = f"rank {who} was killed by {signal.Signals(-codes[who]).name}" if codes[who] < 0 else "a process is gone"
    again = shlex.join(["warpi", *argv, *([] if "--resume" in argv else ["--resume"])])
    print(f"warpi: {how}; go on from the last checkpoint in {out} with: {again}", file=sys.stderr)
    return 128 - codes[who] if codes[who] < 0 else EXIT_RANK_LOST


def give_up(lost: RankLostError) -> Never:
    """End this process at once: an orderly end may wait for those who are gone."""
    if _TELLS not in os.environ:
        print(f"warpi: {lost}", file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(EXIT_RANK_LOST)
