"""The memory of training does not grow with the number of steps."""

import copy
import gc
from pathlib import Path

import pytest

from warpi.methods.registry import METHODS
from warpi.training.engine import train
from warpi.training.recipe import Recipe
from warpi.training.task import Task, Truth

STATM = Path("/proc/self/statm")


@pytest.mark.slow
@pytest.mark.skipif(not STATM.exists(), reason="reads the memory of this process from /proc")
@pytest.mark.parametrize("name", ["ce", "mwnet", "warpi"])
def test_a_thousand_steps(name: str, tiny: tuple[Task, Truth]) -> None:
    """After 200 steps, the next 1,000 add less than 1 % to the memory of the process."""
    method = copy.deepcopy(METHODS[name])
    method.start(tiny[0], Recipe(net="mlp", batch_size=16, epochs=1000))
    pages = {}
    step = 0
    for record in train(method, *tiny):
        step += record is None
        if step in (200, 1200) and step not in pages:
            gc.collect()
            pages[step] = int(STATM.read_text().split()[1])
        if step == 1200:
            break
    growth = pages[1200] / pages[200] - 1
    print(f"{name}: {100 * growth:+.2f} % in 1,000 steps")
    assert growth < 0.01
