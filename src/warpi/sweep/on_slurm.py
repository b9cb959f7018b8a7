"""Train a sweep on a SLURM cluster: a job array whose tasks take runs from the sweep's folder."""

import re
import shlex
import subprocess
import sys
import time
from pathlib import Path

from warpi.errors import UserError, first_line, format_count
from warpi.runs import plugins
from warpi.sweep.place import Place
from warpi.sweep.plan import Job, Plan
from warpi.utils.files import read_json, write_json

PATIENCE = 180.0  # seconds a worker waits for a run of another worker, which may have died
_SECONDS_BEFORE_LIMIT = 120  # SLURM checks time limits every minute
MAX_TASKS = 1000  # MaxArraySize of SLURM is 1001 by default

_SCRIPT = """\
#!/bin/bash
{directives}

# Each task of the array trains unfinished runs of the folder until none is left.
srun {command}
code=$?
if [ "$code" = 140 ]; then  # stopped by SIGUSR2 before the time limit; the checkpoint is stored
    scontrol requeue "${{SLURM_ARRAY_JOB_ID}}_${{SLURM_ARRAY_TASK_ID}}"
fi
exit "$code"
"""


def make_script(plan: Plan, jobs: list[Job], place: Place, tasks: int | None) -> str:
    """The batch script that trains the jobs in an array of `tasks` tasks (default: one per job)."""
    out = plan.out.absolute()
    n_tasks = min(tasks or len(jobs), len(jobs), MAX_TASKS)
    threads = max(job.settings.get("threads", 1) for job in jobs)
    options = [
        f"job-name=warpi-{re.sub(r'[^A-Za-z0-9_.-]', '-', plan.file.stem)}",
        f"array=0-{n_tasks - 1}",
        "requeue",
        "open-mode=append",
        f"signal=USR2@{_SECONDS_BEFORE_LIMIT}",
        f"chdir={Path.cwd()}",
        f"output={out}/.sweep/slurm-%A_%a.log",
        "nodes=1",
        f"ntasks={place.runs_per_gpu or 1}",
        f"cpus-per-task={threads}",
        *(["gres=gpu:1"] if place.runs_per_gpu else []),
        *place.options,  # a later option replaces an earlier one
    ]
    session = f"slurm-{time.time_ns()}"
    device = "cuda" if place.runs_per_gpu else "cpu"
    command = [sys.executable, "-m", "warpi", *plugins.flags(), "sweep", *plan.flags]
    command += ["--on", "slurm", "--device", device, "--worker", session]
    return _SCRIPT.format(
        directives="\n".join(f"#SBATCH {_quote(f'--{option}')}" for option in options), command=shlex.join(command)
    )


def submit(plan: Plan, jobs: list[Job], place: Place, tasks: int | None) -> str:
    """Submit the script. Returns instructions for following the job."""
    note = plan.out / ".sweep" / "slurm.json"
    before = read_json(note, "delete it")["job"] if note.exists() else None
    if before is not None and (left := _run("squeue", "--noheader", "--array", f"--jobs={before}", check=False)):
        raise UserError(
            f"job {before} of this sweep is still in the queue ({format_count(len(left.splitlines()), 'task')}); "
            f"wait for it, or end it with: scancel {before}"
        )
    script = make_script(plan, jobs, place, tasks)
    job = _run("sbatch", "--parsable", script=script).partition(";")[0]
    write_json(note, {"job": job})
    runs = format_count(len(jobs), "run")
    again = shlex.join(["warpi", *plugins.flags(), "sweep", *plan.flags])
    return (
        f"{plan.file}: submitted {runs} to SLURM as job {job}; logs in {plan.out}/.sweep/slurm-{job}_*.log\n"
        f"progress: {again} --dry-run\nresults, when all are done: {again}\nstop, with checkpoints: scancel {job}"
    )


def _run(*command: str, script: str = "", check: bool = True) -> str:
    """Run a SLURM command and return its output. If it fails, raise an error, or return "" without `check`."""
    try:
        done = subprocess.run(command, input=script, capture_output=True, text=True)
    except FileNotFoundError as e:
        raise UserError(
            f"--on slurm needs the command {command[0]}; run this on a login node of a SLURM cluster, or add --dry-run "
            "to print the script"
        ) from e
    if done.returncode and check:
        raise UserError(f"{command[0]} failed: {first_line(Exception(done.stderr))}; set options with --sbatch")
    return "" if done.returncode else done.stdout.strip()


def _quote(option: str) -> str:
    """Quote an option for the script: an unquoted one ends at a space or a number sign."""
    if re.fullmatch(r"[\w=:@%/.,+~^*\[\]-]+", option):
        return option
    if '"' in option or "\n" in option or "\\" in option:
        raise UserError(f"SLURM cannot read the option {option!r}; use a path without quotes and backslashes")
    return f'"{option}"'
