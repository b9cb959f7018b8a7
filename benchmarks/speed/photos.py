"""Clothing1M's recipe end to end on generated photos in its published layout: speed, memory, kill -9 and resume.

    python -m benchmarks.speed.photos FOLDER [--cifar DATA] [--seconds 150]      on a GPU: about 150 seconds
    python -m benchmarks.speed.photos FOLDER --compile --seconds 500             fused, as in a run of 10 epochs
    python -m benchmarks.speed.photos --page                                     writes the table of docs/speed.md

FOLDER receives JPEG files of 300 to 400 pixels, enlarged images of CIFAR-10 (--cifar) or of random colors, and a file
of random weights of the network. Each method of recipes/clothing1m.toml is trained in a process of its own, which
reads, scales and crops the files in every epoch. A process of `warpi` kills itself within the second epoch; another one
resumes the run. Then the same step is measured on images that are already in the memory of the GPU. Results are
kept in benchmarks/results/photos.json. A method is skipped if the time is not enough.
"""

import argparse
import json
import os
import resource
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from safetensors.torch import save_file

from benchmarks.common import RESULTS, ROOT, made_on, write_between
from benchmarks.meta_step.measure import stepper
from benchmarks.speed.scale_model import ALL_REDUCES, all_reduce
from warpi.data.image_files import FileExamples, load_images
from warpi.data.split import Split
from warpi.datasets import image_folders
from warpi.datasets.safe_pickle import safe_load
from warpi.nets.registry import NETS
from warpi.runs.run import Run, fitting
from warpi.sweep.plan import read_plan
from warpi.training.task import Task
from warpi.utils.devices import pick_device
from warpi.utils.files import write_atomically

RECIPE = ROOT / "recipes" / "clothing1m.toml"
FILE = RESULTS / "photos.json"
PAGE = ROOT / "docs" / "speed.md"
MARKS = "<!-- photos -->", "<!-- /photos -->"
CLASSES = 14
NEEDED = {"warpi": 70.0, "ce": 30.0}  # seconds that a method needs at least
REAL = {"train": 990_000, "held_out": 10_000 + 10_526, "epochs": 10}  # Clothing1M: rows per epoch, rows to evaluate
GPUS = 8


# -- photos in the published layout ----------------------------------------------------------------------------------


def write_photos(folder: Path, counts: dict[str, int], cifar: Path | None, workers: int) -> dict[str, Any]:
    """Write the lists and images of Clothing1M; returns what the images are."""
    began = time.perf_counter()
    labels: dict[str, list[str]] = {"noisy": [], "clean": []}
    jobs: list[tuple[Path, int]] = []
    for part, n in counts.items():
        keys = [f"images/{part}/{k // 1000}/{k}.jpg" for k in range(n)]
        (folder / "images" / part).mkdir(parents=True, exist_ok=True)
        for k in range(-(-n // 1000)):
            (folder / "images" / part / str(k)).mkdir(exist_ok=True)
        jobs += [(folder / key, len(jobs) + k) for k, key in enumerate(keys)]
        labels[part.partition("_")[0]] += [f"{key} {k % CLASSES}" for k, key in enumerate(keys)]
        _write_lines(folder / f"{part}_key_list.txt", keys)
    for kind, lines in labels.items():
        _write_lines(folder / f"{kind}_label_kv.txt", lines)
    images = None if cifar is None else _cifar_images(cifar)
    grain = np.random.default_rng(0).integers(-6, 7, (512, 512, 1), np.int16)  # files of the size of real photos
    with ThreadPoolExecutor(workers) as pool:
        sizes = list(pool.map(lambda job: _write_photo(*job, images, grain), jobs))
    return {
        "photos": len(jobs),
        "source": "CIFAR-10" if cifar else "random colors",
        "kilobytes_per_photo": round(sum(sizes) / len(jobs) / 1000, 1),
        "written_s": round(time.perf_counter() - began, 1),
    }


def _write_lines(path: Path, lines: list[str]) -> None:
    path.write_text("".join(f"{line}\n" for line in lines))


def _write_photo(path: Path, number: int, images: NDArray[np.uint8] | None, grain: NDArray[np.int16]) -> int:
    """Write a photo that is different from all others; returns its bytes."""
    rng = np.random.default_rng(number)
    small = rng.integers(0, 256, (32, 32, 3), np.uint8) if images is None else images[number % len(images)]
    width, height, left, top = (int(n) for n in rng.integers((300, 300, 0, 0), (400, 400, 100, 100)))
    large = Image.fromarray(small).resize((width, height), Image.Resampling.BICUBIC)
    pixels = np.asarray(large, np.int16) + grain[top : top + height, left : left + width]
    Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(path, quality=85)
    return path.stat().st_size


def _cifar_images(folder: Path) -> NDArray[np.uint8]:
    """10,000 images of the official files.  [N, 32, 32, 3]"""
    data: NDArray[np.uint8] = safe_load(folder / "cifar-10-batches-py" / "data_batch_1")["data"]
    return data.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)


def write_weights(path: Path, net: str, size: int) -> None:
    """Random weights of a network with the 1,000 classes of ImageNet, as a file."""
    state = NETS[net].build((3, size, size), 1000).state_dict()
    save_file({name: value.clone().contiguous() for name, value in state.items()}, path)


# -- one process -----------------------------------------------------------------------------------------------------


def train(given: argparse.Namespace) -> dict[str, Any]:
    """Train or resume a run of two epochs, measure it, and then measure the step alone. May kill this process."""
    image_folders.IN_MEMORY = 0  # the real photos do not fit into memory, so read these from their files too
    device = pick_device(given.device)
    began = time.perf_counter()
    settings = {} if given.out.exists() else json.loads(given.settings)
    steps = fitting(given.out, resume=given.out.exists(), device=given.device, quiet=True, **settings)
    rates: list[float] = []
    first_step = 0.0
    step = 0
    while True:
        try:
            record = next(steps)
        except StopIteration as end:
            run: Run = end.value
            break
        step = 0 if record else step + 1
        first_step = first_step or time.perf_counter() - began
        if step == given.warm_up:
            _wait(device)
            start = time.perf_counter()
        if step == given.steps:
            _wait(device)
            rates.append(given.batch * (step - given.warm_up) / (time.perf_counter() - start))
        if step > given.steps // 2 and len(rates) == given.die_after:
            _append(given.result, {"rate": rates[0], "first_step_s": round(first_step, 1)})
            os.kill(os.getpid(), signal.SIGKILL)
    row: dict[str, Any] = {"rate": min(rates), "first_step_s": round(first_step, 1)}
    row["gpu_gib"] = round(torch.cuda.max_memory_reserved() / 2**30, 2) if device.type == "cuda" else None
    row["host_gib"] = round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, 2)
    row["epochs"] = [int(record["epoch"]) for record in run.history]
    row["parameters"] = sum(p.numel() for p in run.method.net.parameters())
    row["compiled"] = bool(run.method.recipe.compile)
    row["step_rate"] = step_rate(run, given.batch, max(5, given.steps // 4))
    return row


def step_rate(run: Run, batch: int, n: int) -> float:
    """Images per second of the same step on images that are already on the device."""
    task = run.task
    assert task.meta is not None
    resident = Task(_in_memory(task.train, 4 * batch), _in_memory(task.meta, 4 * batch), None, task.classes)
    method = replace(run.method)
    method.start(resident, replace(run.method.recipe, weights=None))
    with stepper(method, capture=True) as (step, _):
        for _ in range(8):
            step()
        _wait(task.device)
        start = time.perf_counter()
        for _ in range(n):
            step()
        _wait(task.device)
        return batch * n / (time.perf_counter() - start)


def _in_memory(split: Split, n: int) -> Split:
    """The first rows of a split, decoded and copied to the device."""
    files = split.examples
    assert isinstance(files, FileExamples)
    rows = split.rows[:n].tolist()
    decoded, kept = load_images(replace(files, paths=tuple(files.paths[row] for row in rows)))
    return Split(decoded, torch.arange(len(decoded)), split.y[:n][kept.to(split.y.device)])


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _append(path: Path, row: dict[str, Any]) -> None:
    with path.open("a") as file:
        file.write(json.dumps(row) + "\n")


# -- all processes ---------------------------------------------------------------------------------------------------


def measure(given: argparse.Namespace, name: str) -> dict[str, Any]:
    """Train one method in processes of its own: `warpi` is killed and resumed."""
    job = next(job for job in read_plan(RECIPE).jobs if (job.settings["method"], job.settings["seed"]) == (name, 0))
    folder = given.folder
    settings = {
        **job.settings,
        "root": str(folder),
        "weights": str(folder / f"{given.net}.safetensors"),
        "net": given.net,
        "image_size": given.size,
        "batch_size": given.batch,
        "meta_batch_size": given.batch,
        "epochs": 2,
        "compile": given.compile,
        "precision": given.precision,
    }
    result = folder / f"{name}.jsonl"
    result.unlink(missing_ok=True)
    command = [sys.executable, "-m", "benchmarks.speed.photos", str(folder), "--settings", json.dumps(settings)]
    for flag in ("net", "size", "batch", "steps", "warm_up", "device"):
        command += [f"--{flag.replace('_', '-')}", str(getattr(given, flag))]
    command += ["--out", str(folder / f"run-{name}-{time.time_ns()}"), "--result", str(result)]
    killed = name == "warpi"
    began = time.perf_counter()
    if killed:
        code = subprocess.run([*command, "--die-after", "1"], cwd=ROOT, check=False).returncode
        if code != -signal.SIGKILL:
            raise SystemExit(f"{name}: the first process ended with code {code} instead of being killed")
    subprocess.run(command, cwd=ROOT, check=True)
    lines = [json.loads(line) for line in result.read_text().splitlines()]
    row = lines[-1]
    if row["epochs"] != [1, 2]:
        raise SystemExit(f"{name}: the run has epochs {row['epochs']} instead of 1 and 2")
    row["rate"] = min(line["rate"] for line in lines)
    row |= {"method": name, "killed_and_resumed": killed, "seconds_in_all": round(time.perf_counter() - began, 1)}
    return with_projection(row, given.batch)


def with_projection(row: dict[str, Any], batch: int) -> dict[str, Any]:
    """Add hours for the real data: on one GPU as measured, on several with a model of the time to add gradients."""
    seconds = REAL["epochs"] * (REAL["train"] + REAL["held_out"]) / row["rate"]  # evaluation takes less per image
    added = ALL_REDUCES["warpi" if row["method"] == "warpi" else "sgd"] * all_reduce(GPUS, 4 * row["parameters"])
    step = batch / row["rate"]
    row["share_of_step_rate"] = row["rate"] / row["step_rate"]
    row["hours"] = seconds / 3600
    row["hours_on_8"] = seconds / 3600 / GPUS * (step + added) / step
    rounded = {"rate": 1, "step_rate": 1, "share_of_step_rate": 3, "hours": 2, "hours_on_8": 2}
    return row | {name: round(row[name], digits) for name, digits in rounded.items()}


def run_all(given: argparse.Namespace) -> None:
    deadline = time.perf_counter() + given.seconds
    device = pick_device(given.device)
    cores = len(os.sched_getaffinity(0))
    about: dict[str, Any] = made_on("torch", "numpy", "pillow")
    about["device"] = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
    about |= {"readers": FileExamples.workers, "net": given.net, "size": given.size, "batch": given.batch}
    about["precision"] = given.precision
    n = {"noisy_train": given.batch * given.steps * 100 // 99 + given.batch, "clean_train": CLASSES}
    n |= {"clean_val": 4 * given.batch, "clean_test": 2 * given.batch}
    given.folder = given.folder.resolve()  # the other processes run in the root of the repository
    given.folder.mkdir(parents=True, exist_ok=True)
    about |= write_photos(given.folder, n, given.cifar, cores)
    write_weights(given.folder / f"{given.net}.safetensors", given.net, given.size)
    print(json.dumps(about), flush=True)
    stored: dict[str, Any] = json.loads(given.json.read_text()) if given.json.exists() else {}
    for name in given.methods:
        left = deadline - time.perf_counter()
        if left < NEEDED.get(name, 30.0):
            print(f"{name}: skipped, {left:.0f} seconds are left", flush=True)
            continue
        row = measure(given, name)
        print(json.dumps(row), flush=True)
        stored[f"{name}{', compiled' if row['compiled'] else ''}"] = {**row, **about}
        write_atomically(given.json, (json.dumps(stored, indent=1) + "\n").encode())


def make_page(stored: dict[str, Any]) -> str:
    """The table of docs/speed.md."""
    lines = [
        "| method | images/s, from files | images/s, step alone | share | GPU memory | killed and resumed "
        f"| hours for Clothing1M | on {GPUS} GPUs |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, row in stored.items():
        cells = [f"`{row['method']}`{name.removeprefix(row['method'])}", f"{row['rate']:,.0f}"]
        cells += [f"{row['step_rate']:,.0f}", f"{100 * row['share_of_step_rate']:.0f} %"]
        cells += [f"{row['gpu_gib']:.1f} GiB" if row["gpu_gib"] else "–", "yes" if row["killed_and_resumed"] else "–"]
        cells += [f"{row['hours']:.1f}", f"{row['hours_on_8']:.1f}"]
        lines.append(f"| {' | '.join(cells)} |")
    about = next(iter(stored.values()))
    lines += [
        "",
        f"{about['net']} at {about['size']} pixels, batches of {about['batch']}, {about['precision']}, "
        f"{about['photos']:,} JPEG files of {about['kilobytes_per_photo']} kB, {about['readers']} reader processes. "
        f"{about['device']}, "
        f"{about['machine']}, torch {about['torch']}, Pillow {about['pillow']}, {about['date']}.",
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?", help="folder for the photos and the runs")
    parser.add_argument("--cifar", type=Path, help="folder that holds cifar-10-batches-py")
    parser.add_argument("--methods", nargs="+", default=["warpi", "ce"])
    parser.add_argument("--compile", action="store_true", help="fuse the network, which takes a minute and a half")
    parser.add_argument("--seconds", type=float, default=150.0, help="time limit")
    parser.add_argument("--steps", type=int, default=100, help="steps per epoch")
    parser.add_argument("--warm-up", type=int, default=20, help="first steps of an epoch, which are not measured")
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--net", default="resnet50")
    parser.add_argument("--size", type=int, default=224, help="pixels")
    parser.add_argument("--precision", default="bf16")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--json", type=Path, default=FILE)
    parser.add_argument("--page", action="store_true", help="only write the table")
    for name in ("--settings", "--out", "--result", "--die-after"):  # of a process that trains
        parser.add_argument(name, help=argparse.SUPPRESS, type={"--settings": str, "--die-after": int}.get(name, Path))
    given = parser.parse_args()
    if given.page:
        write_between(PAGE, MARKS, make_page(json.loads(FILE.read_text())))
    elif given.settings:
        _append(given.result, train(given))
    else:
        run_all(given)


if __name__ == "__main__":
    main()
