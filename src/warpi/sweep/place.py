"""Where the runs of a sweep are trained: `--on local | ray[:ADDRESS] | slurm`."""

from dataclasses import dataclass

from warpi.errors import UserError, unknown

PLACES = ("local", "ray", "slurm")


@dataclass(frozen=True)
class Place:
    """Where runs are trained, and which share of a GPU each of them gets there."""

    kind: str = "local"  # one of PLACES
    address: str = ""  # of a Ray cluster; "" starts one on this machine
    runs_per_gpu: int | None = None  # 0: no GPU; None: not set
    options: tuple[str, ...] = ()  # of sbatch, without "--"

    @property
    def gpus_per_run(self) -> float:
        return 1 / self.runs_per_gpu if self.runs_per_gpu else 0.0


def parse_place(on: str, gpus_per_run: str | None = None, options: tuple[str, ...] = ()) -> Place:
    """Read the flags --on, --gpus-per-run and --sbatch."""
    kind, _, address = on.partition(":")
    if kind not in PLACES:
        raise unknown("place in --on", kind, PLACES)
    if address and kind != "ray":
        raise UserError(f"--on {kind} takes no address, got {on!r}; allowed: local, ray, ray:ADDRESS, slurm")
    if gpus_per_run is not None and kind == "local":
        raise UserError("--gpus-per-run can only be used with --on ray or slurm; on this machine, use --per-gpu N")
    if options and kind != "slurm":
        raise UserError("--sbatch can only be used with --on slurm")
    for option in options:
        if option.startswith("-") or not option.isprintable():
            raise UserError(f"--sbatch takes an option of sbatch without dashes, such as time=2:00:00, got {option!r}")
    return Place(kind, address, None if gpus_per_run is None else _runs_per_gpu(gpus_per_run), options)


def _runs_per_gpu(text: str) -> int:
    """The number of runs that share a GPU if each gets this fraction of it; 0 for no GPU."""
    try:
        fraction = float(text)
        n = round(1 / fraction) if fraction else 0
        if fraction == 0 or (1 <= n <= 64 and abs(n * fraction - 1) < 0.02):  # 0.33 is a third
            return n
    except (ValueError, OverflowError):
        pass
    raise UserError(f"--gpus-per-run must be 0, 1 or 1 divided by an integer, such as 0.5, got {text!r}")
