"""`warpi sweep --on slurm`: the script, errors, and a real SLURM cluster of one machine."""

import json
import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import sweep_helpers
from one_machine_slurm import missing_programs, one_machine_slurm
from sweep_helpers import assert_same_as_local, read_log, write_sweep

from warpi.errors import UserError
from warpi.sweep.place import Place, parse_place

# Until SLURM starts the job again, an epoch takes five seconds and a run 40. The signal comes after 30 seconds, before
# the end of the run but, also on a busy machine, after its first epoch.
PAUSE = '0.4 * ("SLURM_JOB_ID" in os.environ and "SLURM_RESTART_COUNT" not in os.environ)'


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "with a space"
    folder.mkdir()
    write_sweep(folder, PAUSE, epochs=8, seeds=[*range(4)], methods=["ce", "gce", "slow"])
    monkeypatch.chdir(folder)
    return folder


def sweep(*flags: str) -> int:
    return sweep_helpers.sweep("--out", "runs", *flags)


def test_places() -> None:
    assert parse_place("local") == Place()
    assert parse_place("ray") == Place("ray")
    assert parse_place("ray:10.0.0.1:6379") == Place("ray", "10.0.0.1:6379")
    assert parse_place("slurm", "0.5", ("time=1",)) == Place("slurm", "", 2, ("time=1",))
    assert [parse_place("ray", part).runs_per_gpu for part in ("0", "1", "0.33", "0.25")] == [0, 1, 3, 4]
    assert parse_place("ray", "0.25").gpus_per_run == 0.25
    assert parse_place("ray").gpus_per_run == 0


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("kubernetes",), "unknown place in --on 'kubernetes'"),
        (("slurm:login1",), "--on slurm takes no address, got 'slurm:login1'; allowed: local, ray, ray:ADDRESS, slurm"),
        (("local", "1"), "--gpus-per-run can only be used with --on ray or slurm; on this machine, use --per-gpu N"),
        (("ray", "2"), "--gpus-per-run must be 0, 1 or 1 divided by an integer, such as 0.5, got '2'"),
        (("ray", "0.7"), "such as 0.5, got '0.7'"),
        (("ray", "-1"), "such as 0.5, got '-1'"),
        (("ray", "nan"), "such as 0.5, got 'nan'"),
        (("ray", None, ("time=1",)), "--sbatch can only be used with --on slurm"),
        (("slurm", None, ("--time=1",)), "an option of sbatch without dashes, such as time=2:00:00, got '--time=1'"),
        (("slurm", None, ("a\nrm -r x",)), "without dashes"),
    ],
)
def test_invalid_places_are_refused(flags: tuple[str, ...], message: str) -> None:
    with pytest.raises(UserError, match=re.escape(message)):
        parse_place(*flags)  # type: ignore[arg-type]


def test_the_script_has_the_resources_of_the_runs(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--on", "slurm", "--set", "seed=[0,1]", "--set", "threads=3", "--gpus-per-run", "0.5", "--jobs", "4"]
    assert sweep(*flags, "--sbatch", "time=2:00:00", "--sbatch", "comment=two words", "--dry-run") == 0
    script = capsys.readouterr().out
    assert not (folder / "runs").exists(), "--dry-run wrote something"
    options = [shlex.split(line)[1] for line in script.splitlines() if line.startswith("#SBATCH")]
    assert "--array=0-3" in options
    assert "--cpus-per-task=3" in options
    assert {"--ntasks=2", "--nodes=1", "--gres=gpu:1", "--requeue", "--signal=USR2@120"} <= {*options}
    assert options[-2:] == ["--time=2:00:00", "--comment=two words"]
    (command,) = (line for line in script.splitlines() if line.startswith("srun "))
    words = shlex.split(command)
    assert words[1] == sys.executable
    start = words.index("sweep")
    assert words[start - 2 : start + 8] == [
        *("--use", "plugin.py", "sweep", "few.toml", "--out", "runs", "--set", "seed=[0,1]", "--set", "threads=3")
    ]
    assert words[words.index("--device") + 1] == "cuda"
    done = subprocess.run(["bash", "-n"], input=script, text=True, capture_output=True)
    assert done.returncode == 0, done.stderr


def test_clear_errors(folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(folder))
    assert sweep("--on", "slurm") == 2
    assert "--on slurm needs the command sbatch; run this on a login node" in capsys.readouterr().err
    (folder / "sbatch").write_text("#!/bin/sh\necho 'sbatch: error: invalid partition specified: gpux' >&2\nexit 1\n")
    (folder / "sbatch").chmod(0o755)
    assert sweep("--on", "slurm", "--sbatch", "partition=gpux") == 2
    error = "warpi: sbatch failed: sbatch: error: invalid partition specified: gpux; set options with --sbatch\n"
    assert capsys.readouterr().err == error
    assert sweep("--on", "slurm", "--jobs", "0") == 2
    assert "--jobs must be at least 1 and at most 1000 with --on slurm, got 0" in capsys.readouterr().err
    assert sweep("--on", "slurm", "--set", "data=none.csv") == 2, "data is not checked before jobs are submitted"


@pytest.fixture
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    if missing := missing_programs():
        message = f"SLURM is not installed ({', '.join(missing)}); sudo apt-get install slurm-wlm munge"
        if os.environ.get("WARPI_SLURM") == "required":
            pytest.fail(message)
        pytest.skip(message)
    with one_machine_slurm(tmp_path_factory.mktemp("slurm")):
        yield


@pytest.mark.slow
@pytest.mark.usefixtures("slurm", "folder")
def test_srun_starts_the_ranks_of_one_run() -> None:
    """Two tasks train one run, which is that of one process. Without srun, a job with two tasks is one process."""
    flags = (
        "fit --data digits --noise pair:0.4 --method ce --limit 300 --batch-size 16 --epochs 2 --threads 1 --device cpu"
    )
    fit = [sys.executable, "-m", "warpi", *flags.split(), "--sync-batchnorm", "--quiet", "--out"]
    done = subprocess.run(["srun", "--ntasks=2", *fit, "runs/two"], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(Path("runs/two/spec.json").read_text())["environment"]["ranks"] == 2
    different = ["bash", "-c", shlex.join(fit) + " runs/$SLURM_PROCID"]
    done = subprocess.run(["srun", "--ntasks=2", *different], capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert "for separate runs, add --devices 1" in done.stderr
    Path("job").write_text("#!/bin/sh\n" + shlex.join([*fit, "runs/one"]))
    submitted = ["sbatch", "--wait", "--ntasks=2", "job"]
    done = subprocess.run(submitted, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert json.loads(Path("runs/one/spec.json").read_text())["environment"]["ranks"] == 1
    one, two = (Path("runs", name, "results.jsonl").read_text().splitlines() for name in ("one", "two"))
    for a, b in zip(one, two, strict=True):
        assert json.loads(a)["loss"] == pytest.approx(json.loads(b)["loss"], rel=1e-5)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.usefixtures("slurm")
def test_jobs_that_reach_their_time_limit_are_requeued_and_resume(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two jobs with a limit of one minute train twelve runs, some of which can only end after a requeue."""
    flags = ["--on", "slurm", "--jobs", "2", "--sbatch", "time=1", "--sbatch", "signal=USR2@30"]
    assert sweep(*flags) == 0
    assert "submitted 12 runs to SLURM as job " in capsys.readouterr().out
    assert sweep(*flags) == 2
    assert re.search(r"job \d+ of this sweep is still in the queue \(\d tasks?\)", capsys.readouterr().err)
    end = time.monotonic() + 240
    done = folder.glob
    while len(list(done("runs/*/done"))) < 12:
        logs = "".join(file.read_text() for file in folder.glob("runs/.sweep/*.log"))
        assert time.monotonic() < end, logs
        time.sleep(0.5)
    lines = read_log(sorted(folder.glob("runs/.sweep/slurm-*.log")))
    names = sorted(path.parent.name for path in folder.glob("runs/*/done"))
    assert sorted(run for run, event, _ in lines if event == "done") == names, "not each run once"
    stopped = {run for run, event, _ in lines if event == "stopped"}
    assert stopped
    assert all(run.startswith("slow") for run in stopped)
    for run in stopped:
        epochs = [epoch for name, event, epoch in lines if (name, event) == (run, "begun")]
        assert len(epochs) >= 2, "not resumed"
    resumed = [epoch for _, event, epoch in lines if event == "begun" and epoch != "epoch 0"]
    assert resumed, "no run went on from a checkpoint after its first epoch"
    assert_same_as_local(folder / "runs", names)
    assert sweep() == 0
    assert "nothing to do: 12 of 12 runs are done" in capsys.readouterr().out
