"""Data-parallel training: each rank gets a share of each batch, and explicit all-reduces average the gradients.

PyTorch's wrapper modules are not used, because they raise on a meta gradient or do not synchronize it. One process is
one rank. Without torch.distributed there is one rank, and the functions here do nothing. All ranks make the same calls
in the same order. Tensors of the network use the default group (NCCL on GPUs, gloo on CPUs). Everything else uses a
separate gloo group, so that it does not wait for a GPU.
"""

import hashlib
import logging
import os
import re
import shlex
import signal
import sys
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Never, cast

import torch
import torch.distributed as dist
from torch import Tensor

from warpi.errors import UserError

EXIT_RANK_LOST = 75  # exit code of a process that lost another rank: "try again" in sysexits.h
_ENVIRONMENT = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")  # set by torchrun
_LAUNCHER = "WARPI_LAUNCHER"  # set if the parent process reports which rank has died
_TIMEOUT = timedelta(minutes=10)  # for a live rank; a dead one is noticed when its connection closes
_control: "dist.ProcessGroup | None" = None


class RankLostError(Exception):
    """Another rank has died. Not a RuntimeError, which autodiff would mistake for a missing forward-mode rule."""


class RemoteRankError(UserError):
    """An error on another rank, which reports it to the user."""


def is_launched() -> bool:
    """Whether torchrun, or a similar launcher, started this process as one of several."""
    return all(name in os.environ for name in _ENVIRONMENT)


def _active() -> bool:
    return dist.is_available() and dist.is_initialized()


def n_ranks() -> int:
    """Number of processes that train together."""
    return dist.get_world_size() if _active() else 1


def rank() -> int:
    """Number of this process. Only rank 0 writes files."""
    return dist.get_rank() if _active() else 0


def rank_slice(n: int) -> slice:
    """The share of this rank of a batch of n examples."""
    size = n_ranks()
    if n % size:
        raise UserError(
            f"a batch of {n} examples cannot be split evenly among {size} processes; choose multiples of {size} for "
            "--batch-size and --meta-batch-size, no larger than the number of noisy and of trusted examples"
        )
    part = n // size
    return slice(rank() * part, (rank() + 1) * part)


def draw_share(n: int, draw: Callable[[int], Tensor], dim: int = 0) -> Tensor:
    """Random numbers for this rank's n examples: its share of `draw(N)`, which draws for the whole batch of N.

    So the generators of all ranks stay in the same state, and the numbers do not depend on the number of ranks.
    """
    whole = draw(n * n_ranks())
    return whole.narrow(dim, rank() * n, n)


@contextmanager
def process_group(device: torch.device) -> Iterator[None]:
    """Context manager: join the other processes if torchrun started this one. An existing process group is used."""
    global _control
    creates = is_launched() and not _active()
    if _control is not None or not (creates or _active()):
        yield
        return
    if creates:
        on_gpu = device.type == "cuda"
        if on_gpu:
            torch.cuda.set_device(device)
        try:
            dist.init_process_group(
                "nccl" if on_gpu else "gloo", timeout=_TIMEOUT, device_id=device if on_gpu else None
            )
        except (RuntimeError, ValueError) as e:
            raise UserError(f"the processes of this run cannot connect to each other: {_short(e)}") from e
    all_alive = True
    try:
        with _detect_lost_rank():
            _control = dist.new_group(backend="gloo", timeout=_TIMEOUT)
        yield
    except RankLostError:
        all_alive = False
        raise
    finally:
        if all_alive:  # otherwise destroying the group could wait for the lost rank
            dist.destroy_process_group(None if creates else _control)
        _control = None


def average(tensors: Iterable[Tensor]) -> None:
    """Replace every tensor by its mean over the ranks, with one flat all-reduce per dtype and device."""
    if not _active():
        return
    groups: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for tensor in tensors:
        groups.setdefault((tensor.device, tensor.dtype), []).append(tensor.detach())
    for (device, _), group in groups.items():
        flat = torch.cat([tensor.reshape(-1) for tensor in group])
        all_reduce(flat, _control if device.type == "cpu" else None)
        flat /= n_ranks()
        means = torch.split(flat, [tensor.numel() for tensor in group])
        torch._foreach_copy_(group, [mean.view_as(tensor) for tensor, mean in zip(group, means, strict=True)])


def all_reduce(tensor: Tensor, group: "dist.ProcessGroup | None" = None, *, largest: bool = False) -> None:
    """Replace a tensor by its sum over the ranks, or by the elementwise maximum with `largest`."""
    with _detect_lost_rank():
        dist.all_reduce(tensor, dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM, group)


def gather(tensor: Tensor, dim: int = 0) -> Tensor:
    """Concatenate the shares of all ranks, in the order of the ranks. The result has no gradient."""
    if n_ranks() == 1:
        return tensor
    if tensor.dtype == torch.bool:
        return gather(tensor.byte(), dim).bool()
    part = tensor.detach().contiguous()
    parts = [torch.empty_like(part) for _ in range(n_ranks())]
    with _detect_lost_rank():
        dist.all_gather(parts, part, _control if part.device.type == "cpu" else None)
    return torch.cat(parts, dim)


def gather_uneven(tensor: Tensor) -> Tensor:
    """Concatenate shares of different sizes along the first dimension."""
    if n_ranks() == 1:
        return tensor
    sizes = gather(torch.tensor([len(tensor)])).tolist()
    padded = tensor.new_zeros(max(sizes), *tensor.shape[1:])
    padded[: len(tensor)] = tensor
    whole = gather(padded).chunk(n_ranks())
    return torch.cat([part[:n] for part, n in zip(whole, sizes, strict=True)])


class _Total(torch.autograd.Function):
    """The sum over the ranks: S(x) = sum_r x_r, on every rank.

    It is linear, so its forward-mode derivative is the same sum of the tangents. The backward pass is the same sum of
    the gradients: the output of every rank depends on x_r, and the loss is the sum over all ranks.
    """

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        total = x.clone(memory_format=torch.contiguous_format)
        all_reduce(total)
        return total

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None: ...

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:  # noqa: ARG004
        return total(g)

    @staticmethod
    def jvp(ctx: Any, t: Tensor) -> Tensor:  # noqa: ARG004
        return total(t)


def total(x: Tensor) -> Tensor:
    """The sum over the ranks, with its derivatives."""
    return x if n_ranks() == 1 else cast("Tensor", _Total.apply(x))  # type: ignore[no-untyped-call]


def mean(x: Tensor) -> Tensor:
    """The mean over the ranks, with its derivatives. Means over shares become the mean over the whole batch."""
    return total(x) / n_ranks()


def min_over_ranks(n: int) -> int:
    """The minimum of n over the ranks."""
    return -agree(None, -n)[0]


def agree(error: Exception | None, *numbers: int) -> tuple[int, ...]:
    """The maximum of each number over the ranks. If a rank passes an error, all raise; the others a RemoteRankError."""
    size = n_ranks()
    if size > 1:
        values = torch.tensor([-size if error is None else -rank(), *numbers])
        all_reduce(values, _control, largest=True)
        failed, *maxima = values.tolist()
        failed = -failed  # the lowest rank with an error
        if failed < size:
            text = _broadcast(str(error or "").encode() or type(error).__name__.encode(), failed).decode()
            if failed != rank():
                raise RemoteRankError(f"rank {failed}: {text}")
        numbers = tuple(maxima)
    if error is not None:
        raise error
    return numbers


@contextmanager
def raise_on_all_ranks() -> Iterator[None]:
    """Context manager: if one rank raises inside, all ranks raise, so that none waits forever."""
    error: Exception | None = None
    try:
        yield
    except RankLostError:
        raise
    except Exception as e:
        error = e
    agree(error)


def broadcast_from_rank0(make: Callable[[], bytes]) -> bytes:
    """Call `make` on rank 0 and return its result on every rank. The others do not need access to its files."""
    data = b""
    with raise_on_all_ranks():
        if rank() == 0:
            data = make()
    return _broadcast(data, 0)


def check_same(data: bytes, what: str) -> None:
    """Raise on all ranks if the data differs between them. `what` names it in the message."""
    digest = hashlib.sha256(data).digest()
    error = None
    if _broadcast(digest, 0) != digest:
        advice = "all processes need the same data, settings, weight files and versions"
        error = UserError(f"{what} on rank {rank()} differs from that on rank 0; {advice}")
    agree(error)


def _broadcast(data: bytes, source: int) -> bytes:
    """Send the bytes of one rank to all ranks, as a tensor. Nothing is pickled."""
    if n_ranks() == 1:
        return data
    with _detect_lost_rank():
        size = torch.tensor(len(data))
        dist.broadcast(size, source, _control)
        content = torch.zeros(int(size), dtype=torch.uint8)
        if rank() == source and data:
            content = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        dist.broadcast(content, source, _control)
    return content.numpy().tobytes()


@contextmanager
def _detect_lost_rank() -> Iterator[None]:
    """Context manager: turn a communication error into a RankLostError."""
    try:
        yield
    except RuntimeError as e:
        raise RankLostError(f"rank {rank()} of {n_ranks()} lost another process of this run ({_short(e)})") from e


def _short(error: Exception) -> str:
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0].rpartition("] ")[2].partition(". ")[0][:120]  # without gloo's source location and advice


def check_devices(n: int, device: torch.device) -> None:
    """Raise if n processes cannot have one device each."""
    if n < 1:
        raise UserError(f"--devices must be at least 1, got {n}")
    if device.type == "cuda" and n > 1 and device.index is not None:
        raise UserError(f"--devices {n} uses the first {n} GPUs; set --device cuda, not {device}")
    available = torch.cuda.device_count()
    if device.type == "cuda" and n > available:
        raise UserError(
            f"--devices {n} needs {n} GPUs, but {available} can be used; lower --devices, or add --device cpu"
        )


def check_started(devices: int | None) -> None:
    """Raise if torchrun did not start as many processes as the user asked for."""
    started = os.environ.get("LOCAL_WORLD_SIZE")
    if devices is not None and is_launched() and started != str(devices):
        raise UserError(f"torchrun started {started} processes here, but --devices asks for {devices}; omit --devices")


def launch(n: int, argv: list[str], out: Path, restarts: int = 3) -> int:
    """Start `warpi ARGV` as n ranks on this machine, like `torchrun --standalone -m warpi`; return their exit code.

    If a rank is killed, all are restarted from the last checkpoint, at most `restarts` times. Uses torchrun's
    implementation, but without its long report, and with a new store for each attempt: when torchrun 2.13 restarts
    ranks, they find the addresses of dead ones.
    """
    from torch.distributed.elastic.multiprocessing import SignalException

    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, torch.get_num_threads() // n)))  # they share the cores
    os.environ[_LAUNCHER] = "1"
    logging.disable(logging.CRITICAL)
    resumed = argv if "--resume" in argv else [*argv, "--resume"]
    for attempt in range(restarts + 1):
        try:
            codes = _run_ranks(n, resumed if attempt else argv)
        except SignalException as e:
            return 128 + e.sigval
        if not codes:
            return 0
        # Ranks that ended only because another one ended are sorted last.
        cause = min(
            codes, key=lambda number: (codes[number] == EXIT_RANK_LOST, codes[number] == -signal.SIGTERM, number)
        )
        code = codes[cause]
        if code >= 0 and code != EXIT_RANK_LOST:
            return code  # that rank has printed the reason
        what = f"rank {cause} was killed by {signal.Signals(-code).name}" if code < 0 else "a process is gone"
        if code in (-signal.SIGTERM, -signal.SIGINT) or attempt == restarts:
            break
        print(
            f"warpi: {what}; restarting all processes from the last checkpoint (restart {attempt + 1} of {restarts})",
            file=sys.stderr,
        )
    command = shlex.join(["warpi", *resumed])
    print(f"warpi: {what}; resume from the last checkpoint in {out} with: {command}", file=sys.stderr)
    return 128 - code if code < 0 else EXIT_RANK_LOST


def _run_ranks(n: int, argv: list[str]) -> dict[int, int]:
    """Run n ranks until they end. Return the exit codes of those that failed, by rank."""
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

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
            return {number: failure.exitcode for number, failure in e.failures.items()}
    return {}


def describe_nodes(nodes: int, devices: int, argv: list[str], restarts: int) -> str:
    """The commands that start `warpi ARGV` as `devices` ranks on each of several machines."""
    command = shlex.join([*argv, *([] if "--resume" in argv else ["--resume"])])
    name = hashlib.sha256(command.encode()).hexdigest()[:8]
    torchrun = (
        f"TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 torchrun --nnodes {nodes} --nproc-per-node {devices} --max-restarts "
        f"{restarts} --rdzv-backend c10d --rdzv-endpoint HOST:29500 --rdzv-id {name} -m warpi {command}"
    )
    srun = f"srun --nodes {nodes} --ntasks-per-node {devices} --kill-on-bad-exit=1 warpi {command}"
    where = f"on each of the {nodes} machines, with the name of one of them instead of HOST"
    return f"{where}:\n  {torchrun}\nor once, in a SLURM job:\n  {srun}"


def use_srun() -> bool:
    """Set torchrun's environment variables if srun started this process as one of several tasks."""
    n = int(os.environ.get("SLURM_STEP_NUM_TASKS", "1"))  # SLURM_NTASKS is also set where srun was not used
    if n == 1 or is_launched():
        return False
    sizes = [
        int(size)
        for size, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", os.environ["SLURM_STEP_TASKS_PER_NODE"])
        for _ in range(int(times or 1))
    ]
    job, step = int(os.environ["SLURM_JOB_ID"]), int(os.environ["SLURM_STEP_ID"])
    one_gpu = torch.cuda.device_count() == 1  # each task sees only its own GPU, as with --gpus-per-task
    os.environ["RANK"] = os.environ["SLURM_PROCID"]
    os.environ["WORLD_SIZE"] = str(n)
    os.environ["LOCAL_RANK"] = "0" if one_gpu else os.environ["SLURM_LOCALID"]
    os.environ["LOCAL_WORLD_SIZE"] = str(sizes[int(os.environ["SLURM_NODEID"])])
    os.environ.setdefault("MASTER_ADDR", first_host(os.environ["SLURM_STEP_NODELIST"]))
    os.environ.setdefault("MASTER_PORT", str(12000 + (97 * job + step) % 20000))
    return True


def first_host(nodes: str) -> str:
    """The first machine of a SLURM node list: node007 for `node[007-012,3],other`."""
    match = re.match(r"([^,\[]+)(?:\[([^],-]+)[^]]*\]([^,]*))?", nodes)
    return "".join(part or "" for part in match.groups()) if match else nodes


def give_up(lost: RankLostError) -> Never:
    """End this process immediately. A normal exit could wait for the lost rank."""
    if _LAUNCHER not in os.environ:
        print(f"warpi: {lost}", file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(EXIT_RANK_LOST)
