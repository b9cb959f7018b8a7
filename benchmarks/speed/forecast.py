"""How well `warpi fit` predicts the time that a training takes on a CPU.

    python -m benchmarks.speed.forecast

Trains each setting for about a minute, and prints the forecasts that a user would see: the one after ten seconds, and
the one after each epoch that corrects it. Small images have random content: only the time counts.
"""

import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.common import made_on
from warpi.runs.run import fitting
from warpi.training.progress import Forecast

IMAGES = 1500


def make_images(folder: Path) -> Path:
    rng = np.random.default_rng(0)
    x = rng.integers(0, 256, (IMAGES, 32, 32, 3), dtype=np.uint8)
    file = folder / "images.npz"
    np.savez(file, x=x, y=rng.integers(0, 10, IMAGES), x_trusted=x[:200], y_trusted=rng.integers(0, 10, 200))
    return file


def choose_runs(folder: Path) -> list[dict[str, Any]]:
    digits: dict[str, Any] = {"data": "digits", "noise": "pair:0.4", "meta": 50}
    images: dict[str, Any] = {"data": str(make_images(folder)), "net": "resnet20"}
    return [
        *({**digits, "method": name, "epochs": epochs} for name, epochs in (("ce", 600), ("warpi", 200))),
        *({**digits, "method": name, "epochs": epochs} for name, epochs in (("dividemix", 150), ("vri", 30))),
        *({**images, "method": name, "epochs": epochs} for name, epochs in (("ce", 5), ("warpi", 2), ("mwnet", 2))),
        *({**images, "method": name, "epochs": epochs} for name, epochs in (("sop_plus", 3), ("elr_plus", 3))),
    ]


def record_times(settings: dict[str, Any], folder: Path) -> list[tuple[float, bool]]:
    """Train; return the time of each step, and of each epoch (True)."""
    began = time.perf_counter()
    return [
        (time.perf_counter() - began, record is not None)
        for record in fitting(folder / "run", **settings, device="cpu", threads=1)
    ]


def replay(events: list[tuple[float, bool]]) -> list[str]:
    """The forecasts of the whole time in seconds, each with the second when it was made."""
    now = 0.0
    forecast = Forecast(sum(not is_epoch for _, is_epoch in events), lambda: now)
    made = []
    for now, is_epoch in events:
        minutes = forecast.after_epoch() if is_epoch else forecast.after_step()
        if minutes is not None and forecast.steps_left:
            made.append(f"{now:.0f}: {now + 60 * minutes:.0f}")
    return made


def main() -> None:
    torch.set_num_threads(1)
    print("| data | method | forecasts (at second: total seconds) | run, s |\n|:---|:---|:---|---:|")
    for settings in choose_runs(Path(tempfile.mkdtemp())):
        with tempfile.TemporaryDirectory() as folder:
            events = record_times(settings, Path(folder))
        made = ", ".join(replay(events))
        print(f"| {Path(settings['data']).stem} | {settings['method']} | {made} | {events[-1][0]:.0f} |", flush=True)
    print(made_on("warpi", "torch"))


if __name__ == "__main__":
    main()
