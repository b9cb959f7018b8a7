"""The few-shot results of the docs that need a GPU: tables of accuracy and of episodes per second.

    python -m benchmarks.fewshot.gpu speed  --root DATA --out WORK --json fewshot-speed.json
    python -m benchmarks.fewshot.gpu train  --root DATA --out WORK --json fewshot-runs.json       (about 18 min)

DATA contains omniglot and cifar-100-python. WORK contains the run folders. A finished run stores its rows in WORK/rows
and is not repeated; a run that does not finish within --seconds is resumed by the next call. A run folder with other
settings is renamed, and the run is started again. The JSON file contains all rows so far and is written after every
run. The most important runs come first; --only REGEX selects some of them, --scale 0.5 halves all iterations, and
--list prints them. --tiny uses random images and a few steps, also on a CPU.

`speed` measures the whole training step (drawing tasks, loss, gradient, Adam) after a warm-up and should be alone on
the GPU. All rows of a setting of `train` are evaluated on the same 3,000 test tasks and contain the number of right
answers for each (`scores_of` reads it), so that learners can be compared task by task.
"""

import argparse
import base64
import json
import os
import platform
import re
import signal
import threading
import time
import zlib
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import fields, replace
from datetime import date
from itertools import count
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch

from warpi.errors import UserError
from warpi.fewshot import run as runs
from warpi.fewshot.compare import judged, versatility
from warpi.fewshot.data import Classes, FewShotData
from warpi.fewshot.episodes import Kind, make_tasks
from warpi.fewshot.learner import Problem
from warpi.fewshot.learners.registry import LEARNERS
from warpi.fewshot.spec import Spec, fewshot_folder, specify
from warpi.fewshot.train import Position, Step, Training
from warpi.training.cuda_graph import cudnn_search
from warpi.utils.devices import Stopped
from warpi.utils.files import write_atomically
from warpi.utils.leases import one_writer
from warpi.utils.seeding import generator

# The same training for every learner of a table. Training tasks with more ways and fewer queries per class than the
# test tasks (which have 15 queries) learn more from each image.
_PHOTOGRAPHS: dict[str, Any] = {"data": "cifar_fs", "ways": 5, "tasks": 32, "augment": True, "dropout": 0.2}
_DRAWINGS: dict[str, Any] = {"data": "omniglot", "shots": 1, "queries": 5, "augment": True, "dropout": 0.0}
SETTINGS: dict[str, dict[str, Any]] = {
    "cifar_fs-5w1s": _PHOTOGRAPHS | {"shots": 1, "iterations": 8000},
    "cifar_fs-5w5s": _PHOTOGRAPHS | {"shots": 5, "iterations": 6000},
    "omniglot-5w1s": _DRAWINGS | {"ways": 5, "train_ways": 20, "tasks": 16, "iterations": 8000},
    "omniglot-20w1s": _DRAWINGS | {"ways": 20, "train_ways": 60, "tasks": 8, "iterations": 9000},
}
COMMON: dict[str, Any] = {
    "lr": 3e-3,
    "queries": 15,
    "precision": "bf16",
    "val_every": 1000,
    "val_tasks": 600,
    "clip": 10.0,
    "scalars": 10.0,
}
NOT_STARTED = "not started"
TINY: dict[str, Any] = {}  # what --tiny changes
LEARNER: dict[str, dict[str, Any]] = {  # names in the table: a learner and its options
    "bilstm": {"learner": "metavrf_bilstm"},
    "bilstm-inductive": {"learner": "metavrf_bilstm", "norm": "support"},
    "none": {"learner": "metavrf"},
    "lstm": {"learner": "metavrf_lstm"},
    "exact": {"learner": "metavrf", "exact": True},
    "exact-inductive": {"learner": "metavrf", "exact": True, "norm": "support"},
    "rff": {"learner": "rff"},
    "rbf": {"learner": "rbf"},
    "protonet": {"learner": "protonet", "norm": "transductive"},
    "protonet-inductive": {"learner": "protonet"},
    "r2d2": {"learner": "r2d2", "norm": "transductive"},
    "r2d2-inductive": {"learner": "r2d2"},
    # its steps are expensive, and its last layer has one output per class
    "maml": {"learner": "maml", "precision": "32", "tasks": 8, "iterations": 4000, "lr": 1e-3, "train_ways": 0},
    "nearest": {"learner": "nearest"},
}
_EVERY = ("cifar_fs-5w1s", "cifar_fs-5w5s", "omniglot-5w1s", "omniglot-20w1s")
ORDER = [  # all learners in one setting before all settings of one learner
    *((s, "bilstm") for s in _EVERY),
    *((s, "bilstm-inductive") for s in _EVERY),
    *((s, "nearest") for s in _EVERY),
    *(("cifar_fs-5w1s", n) for n in ("rff", "protonet", "r2d2", "none", "maml")),
    *((s, n) for s in ("cifar_fs-5w5s", "omniglot-5w1s") for n in ("rff", "protonet", "r2d2", "none")),
    *(("omniglot-20w1s", n) for n in ("rff", "protonet")),
    *(("cifar_fs-5w1s", n) for n in ("lstm", "exact", "protonet-inductive", "r2d2-inductive", "rbf")),
    *(("cifar_fs-5w5s", n) for n in ("protonet-inductive", "r2d2-inductive", "lstm", "exact")),
    ("omniglot-5w1s", "exact"),
    ("cifar_fs-5w1s", "exact-inductive"),
]
BASES = [(d, name) for d in (10, 50, 200, 780, 2000) for name in ("bilstm", "rff")]  # CIFAR-FS 5-way 5-shot, short


def plan(scale: float) -> dict[str, dict[str, Any]]:
    """All runs by name."""
    runs_by_name = {}
    for setting, name in ORDER:
        runs_by_name[f"{setting}-{name}"] = options(setting, name, scale)
    for d, name in BASES:
        settings = options("cifar_fs-5w5s", name, scale)
        short = {"bases": d, "iterations": settings["iterations"] // 4, "compile": True}
        runs_by_name[f"bases-{name}-{d}"] = settings | short
    return runs_by_name


def options(setting: str, name: str, scale: float) -> dict[str, Any]:
    settings = COMMON | SETTINGS[setting] | LEARNER[name]
    own = {f.name for f in fields(LEARNERS[settings["learner"]])}
    if "dropout" not in own:
        settings.pop("dropout", None)
    return settings | {"iterations": max(1, round(scale * settings["iterations"]))} | TINY


def train_one(name: str, settings: dict[str, Any], given: argparse.Namespace, deadline: float) -> str:
    """Start or resume a run and store its rows."""
    prepare(given)
    out, rows_file = given.out / "runs" / name, given.out / "rows" / f"{name}.json"
    left = deadline - time.time()
    if left < 5:
        return NOT_STARTED
    timer = threading.Timer(left, lambda: os.kill(os.getpid(), signal.SIGTERM))
    timer.daemon = True
    before = signal.signal(signal.SIGTERM, too_late)  # until `fit` handles signals
    timer.start()
    try:
        put_aside(out, settings)
        if not (out / "done").exists():
            resume = (out / "spec.json").exists()
            runs.fit(out, resume=resume, device=given.device, root=given.root, **settings)
    except (Stopped, TimeoutError):
        return "stopped; the next call resumes it"
    except UserError as e:
        return f"failed: {e}"
    finally:
        timer.cancel()
        signal.signal(signal.SIGTERM, before)
    run = runs.load(out, device=given.device, root=given.root)
    about = {"run": name, "setting": re.split(r"-(?=[a-z]+)", name)[0], "precision": run.spec.training.precision}
    names = ("tasks", "queries", "augment", "lr", "scalars", "weight_decay")
    about |= {f"train_{k}": getattr(run.spec.training, k) for k in names} | machine(given)
    about |= {"settings": settings, "data_sha256": run.data_sha256}
    about["train_seconds"] = sum(r["seconds"] for r in run.history)
    about["val_mean"] = (min if run.data.regression else max)(r["val_mean"] for r in run.history)
    tests = 20 if given.tiny else 3000
    row = judged(run, tests, queries=2 if given.tiny else 15, facts=about, by_task=True)
    row["right"] = packed(row.pop("scores"), row["ways"] * row["queries"])
    rows = [row]
    if name.startswith("omniglot") and name.endswith("-bilstm"):
        few = 10 if given.tiny else 600
        rows += [
            row | about | {"versatility": True}
            for row in versatility(run, few, (5, 10) if given.tiny else (5, 10, 20, 50, 100), (1, 5, 10))
        ]
    write_atomically(rows_file, (json.dumps(rows, indent=1) + "\n").encode())
    return f"{rows[0]['mean']:.2f} ± {rows[0]['ci95']:.2f}"


def put_aside(out: Path, settings: dict[str, Any]) -> None:
    """Rename the folder of a run with other settings."""
    if difference := other_settings(out, settings):
        free = (out.with_name(f"{out.name}.{i}") for i in count(1))
        aside = next(path for path in free if not path.exists())
        with one_writer(out):
            out.rename(aside)
        print(f"{out.name}: starts again; the previous run is kept as {aside}: {difference}", flush=True)


def other_settings(out: Path, settings: dict[str, Any]) -> str:
    """The settings of a run folder that differ; empty if there are none, or no run."""
    try:
        stored = fewshot_folder(out).read_spec()
    except UserError as e:  # of another version
        return str(e)
    if stored is None:
        return ""
    was, now = Spec.from_json(stored["spec"]).settings, specify(**settings).settings
    names = [name for name in {**was, **now} if name != "root" and was.get(name) != now.get(name)]
    return ", ".join(f"{name} = {was.get(name)}, not {now.get(name)}" for name in names)


def packed(scores: Sequence[float], answers: int) -> str | None:
    """Accuracies of tasks as a short text: the number of right answers to each task."""
    right = np.array(scores) * answers / 100
    if not np.isfinite(right).all():
        return None
    return base64.b64encode(zlib.compress(right.round().astype("<u2").tobytes(), 9)).decode()


def scores_of(row: dict[str, Any]) -> list[float] | None:
    """Accuracies of the test tasks of a row in percent; None if the row does not contain them."""
    if not row.get("right"):
        return None
    right = np.frombuffer(zlib.decompress(base64.b64decode(row["right"])), "<u2")
    scores: list[float] = (100 * right / (row["ways"] * row["queries"])).tolist()
    return scores


def too_late(*_: object) -> None:
    raise TimeoutError


def train(given: argparse.Namespace, wanted: dict[str, dict[str, Any]]) -> None:
    began, deadline = time.time(), time.time() + given.seconds
    (given.out / "rows").mkdir(parents=True, exist_ok=True)
    names = [n for n in wanted if re.search(given.only, n)]
    if given.list:
        print("\n".join(f"{n}: {wanted[n]}" for n in names))
        return
    left = [n for n in names if not rows_of(given, n, wanted[n])]
    with ProcessPoolExecutor(given.jobs, mp_context=get_context("spawn")) as pool:
        jobs = {pool.submit(train_one, n, wanted[n], given, deadline): n for n in left}
        for job in as_completed(jobs):
            error = job.exception()
            outcome = f"failed: {error!r}" if error else job.result()
            if outcome != NOT_STARTED:
                print(f"{time.time() - began:6.0f} s  {jobs[job]}: {outcome}", flush=True)
                collect(given, wanted)
    collect(given, wanted)
    done = sum(bool(rows_of(given, n, wanted[n])) for n in names)
    print(f"{done} of {len(names)} runs are done" + ("; call again to continue" if done < len(names) else ""))


def rows_of(given: argparse.Namespace, name: str, settings: dict[str, Any]) -> list[dict[str, Any]]:
    """The rows of a finished run with these settings; empty if there is none."""
    file = given.out / "rows" / f"{name}.json"
    rows: list[dict[str, Any]] = json.loads(file.read_text()) if file.exists() else []
    return rows if rows and rows[0].get("settings") == settings else []


def collect(given: argparse.Namespace, wanted: dict[str, dict[str, Any]]) -> None:
    rows = [row for name, settings in wanted.items() for row in rows_of(given, name, settings)]
    write_atomically(given.json, (json.dumps(rows, indent=1) + "\n").encode())


# --- speed ------------------------------------------------------------------------------------------------------------


def speed(given: argparse.Namespace) -> None:
    """Training episodes per second on CIFAR-FS 5-way 1-shot with 15 queries per class."""
    prepare(given)
    device = torch.device(given.device if given.device != "auto" else "cuda" if torch.cuda.is_available() else "cpu")
    data = runs._read_builtin("cifar_fs", str(given.root)).to(device)
    rows: list[dict[str, Any]] = json.loads(given.json.read_text()) if given.json.exists() else []
    wide = ("bilstm", "none", "exact", "lstm", "rff", "rbf", "protonet", "r2d2")
    how = ("compiled", "captured", "")  # a step as one CUDA graph, with or without fused kernels, or kernel by kernel
    cases = [("bilstm", 32, "bf16", how[0]), ("maml", 32, "32", how[1]), ("bilstm", 32, "bf16", how[1])]
    cases += [(n, 32, "bf16", how[0]) for n in reversed(wide) if n != "bilstm"] + [("maml", 8, "32", how[1])]
    cases += [("bilstm", 32, "bf16", how[2]), ("bilstm", 128, "bf16", how[0])]
    cases += [("bilstm", 8, "bf16", how[0]), ("bilstm", 32, "32", how[0])]
    cases += [(n, t, "bf16", how[0]) for t in (128, 8) for n in wide if n != "bilstm"]
    deadline, now = time.time() + given.seconds, machine(given)
    known = {(r["case"], r["gpu"], r["torch"]) for r in rows if "case" in r}
    left = [c for c in cases if ("-".join(map(str, c)), now["gpu"], now["torch"]) not in known]
    left = [c for c in left if re.search(given.only, "-".join(map(str, c)))]
    while left and time.time() < deadline:
        name, tasks, precision, done = case = left.pop(0)
        row = {"case": "-".join(map(str, case)), **time_step(name, tasks, precision, done, data, device, given)}
        rows.append(row)
        print(*(row[k] for k in ("case", "episodes_per_s", "compiled", "why")), flush=True)
        write_atomically(given.json, (json.dumps(rows, indent=1) + "\n").encode())
    print(f"{len(left)} cases are left" if left else "all cases are done")


def time_step(
    name: str,
    tasks: int,
    precision: Any,
    done: str,
    data: FewShotData,
    device: torch.device,
    given: argparse.Namespace,
) -> dict[str, Any]:
    base = LEARNERS[LEARNER[name]["learner"]]
    own = {f.name for f in fields(base)}
    learner = replace(base, **{k: v for k, v in LEARNER[name].items() if k in own})
    learner.start(Problem(data.shape, 5), device=device)
    tasks, queries, fuse = (2, 2, False) if given.tiny else (tasks, 15, done == "compiled")
    training = Training(iterations=10_000, tasks=tasks, queries=queries, precision=precision, compile=fuse)
    at = Position(learner, training)
    source = make_tasks(data.train, Kind(5, 1, training.queries), device, training=True, augment=False)
    step = Step(learner, source, training, at)
    step.why = step.why or ("" if done else "not requested")
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    with cudnn_search():
        for _ in range(6):
            step()
        wait()
        began, n = time.perf_counter(), 0
        while (spent := time.perf_counter() - began) < (0.2 if given.tiny else 1.5):
            for _ in range(1 if given.tiny else 10):
                step()
                at.iteration += 1
                n += 1
            wait()
    row = {
        "name": name,
        "learner": LEARNER[name]["learner"],
        "data": "cifar_fs",
        "ways": 5,
        "shots": 1,
        "queries": training.queries,
        "train_tasks": training.tasks,
        "precision": precision,
        "dropout": getattr(learner, "dropout", None),
        "episodes_per_s": n * training.tasks / spent,
        "ms": 1000 * spent / n,
        "compiled": any(getattr(module, "fused", None) for module in learner.net.modules()),
        "captured": step.graph is not None,
        "why": step.why,
        "peak_mib": torch.cuda.max_memory_allocated() / 2**20 if device.type == "cuda" else None,
        **machine(given),
    }
    del step, at, learner
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return row


# --- both -------------------------------------------------------------------------------------------------------------


def machine(given: argparse.Namespace) -> dict[str, Any]:
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() and given.device != "cpu" else None
    versions = {"torch": torch.__version__, "python": platform.python_version()}
    return {"gpu": gpu, "date": date.today().isoformat(), "jobs": given.jobs, **versions}


def prepare(given: argparse.Namespace) -> None:
    """With --tiny, replace the data by noise."""
    if not given.tiny:
        return
    torch.set_num_threads(1)

    def random_data(name: str, root: str | None) -> FewShotData:  # noqa: ARG001
        size, k, n = ((1, 28, 28), 24, 20) if name == "omniglot" else ((3, 32, 32), 6, 22)

        def part(seed: int) -> Classes:
            x = torch.randint(256, (k, n, *size), generator=generator(seed, "made up")).to(torch.uint8)
            return Classes.of({f"{seed}-{i}": x[i] for i in range(k)}, 4 if name == "omniglot" else 1)

        return FewShotData(name, part(0), part(1), part(2))

    runs._read_builtin = random_data  # type: ignore[assignment]
    TINY.update(tasks=1, train_ways=0, queries=2, val_every=2, val_tasks=2, iterations=2, precision="32")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["speed", "train"])
    parser.add_argument("--root", type=Path, default=None)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=540.0)
    parser.add_argument("--jobs", type=int, default=3)
    parser.add_argument("--only", default="")
    parser.add_argument("--scale", type=float, default=1.0)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--list", action="store_true")
    given = parser.parse_args()
    prepare(given)
    if given.what == "speed":
        given.jobs = 1
        speed(given)
    else:
        train(given, plan(given.scale))


if __name__ == "__main__":
    main()
