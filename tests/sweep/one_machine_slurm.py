"""A real SLURM cluster of one machine, without systemd and cgroups: its own munged, slurmctld and slurmd in a folder.

All of them listen on 127.0.0.1 only and end with the context. By hand: python tests/sweep/one_machine_slurm.py DIR
"""

import getpass
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from shutil import which

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "squeue", "scancel")
_CONF = """\
ClusterName=one
SlurmctldHost={host}(127.0.0.1)
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
CommunicationParameters=NoCtldInAddrAny,NoInAddrAny
SlurmctldPort={ports[0]}
SlurmdPort={ports[1]}
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=2,bf_interval=2
ReturnToService=2
SlurmdParameters=config_overrides
MinJobAge=3600
NodeName={host} NodeAddr=127.0.0.1 CPUs=2 RealMemory=1000 State=UNKNOWN
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""
# cred_expire: a job that is requeued waits this long; 120 s by default


def missing_programs() -> list[str]:
    return [name for name in PROGRAMS if _find(name) is None]


@contextmanager
def one_machine_slurm(folder: Path) -> Iterator[None]:
    """Context manager: commands such as sbatch use a cluster whose files are in this folder."""
    for name in ("state", "spool"):
        (folder / name).mkdir(parents=True)
    folder.chmod(0o755)
    (folder / "munge.key").write_bytes(os.urandom(1024))
    (folder / "munge.key").chmod(0o400)
    host = socket.gethostname().partition(".")[0]
    conf = folder / "slurm.conf"
    conf.write_text(_CONF.format(host=host, user=getpass.getuser(), folder=folder, ports=_free_ports(2)))
    files = {"key-file": "munge.key", "socket": "munge.socket", "pid-file": "munged.pid", "seed-file": "munge.seed"}
    munge = [f"--{option}={folder / name}" for option, name in files.items()]
    before = os.environ.get("SLURM_CONF")
    os.environ["SLURM_CONF"] = str(conf)
    with ExitStack() as stack:
        try:
            stack.enter_context(_daemon(folder, "munged", "--foreground", "--force", *munge))
            _wait(folder, (folder / "munge.socket").exists)
            stack.enter_context(_daemon(folder, "slurmctld", "-D", "-c"))
            stack.enter_context(_daemon(folder, "slurmd", "-D", "-N", host))
            _wait(folder, lambda: _answer("sinfo", "--noheader", "--format=%T") == "idle")
            yield
        finally:
            _end_jobs(folder)
            stack.close()
            os.environ.pop("SLURM_CONF")
            if before is not None:
                os.environ["SLURM_CONF"] = before


def _find(program: str) -> str | None:
    return which(program, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")


def _free_ports(n: int) -> list[int]:
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(n)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


@contextmanager
def _daemon(folder: Path, program: str, *flags: str) -> Iterator[None]:
    path = _find(program)
    assert path is not None
    with open(folder / f"{program}.log", "w") as log:
        process = subprocess.Popen([path, *flags], stdout=log, stderr=log, stdin=subprocess.DEVNULL)
        try:
            yield
        finally:
            process.terminate()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _answer(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True).stdout.strip()


def _end_jobs(folder: Path) -> None:
    _answer("scancel", "--full", "--signal=KILL", "--state=RUNNING")
    _answer("scancel", f"--user={getpass.getuser()}")
    _wait(folder, lambda: not _answer("squeue", "--noheader"))


def _wait(folder: Path, is_ready: Callable[[], bool], seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not is_ready():
        logs = {path.name: path.read_text() for path in folder.glob("*.log")}
        assert time.monotonic() < end, f"SLURM does not start or does not end: {logs}"
        time.sleep(0.1)


if __name__ == "__main__":
    with one_machine_slurm(Path(sys.argv[1]).absolute()):
        print(f"export SLURM_CONF={os.environ['SLURM_CONF']}; press Enter to end the cluster", flush=True)
        sys.stdin.readline()
