"""Fixtures and hooks that several test files share.

Imports that take long are inside functions, because the process that only distributes the tests imports this file too.
"""

import gc
import logging
import os
from collections.abc import Iterator
from functools import cache
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from warpi.data.dataset import Dataset
    from warpi.training.task import Task, Truth


for _name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"):  # also for the processes that tests start
    os.environ.setdefault(_name, "1")  # read when numpy is imported; threads wait for each other on small arrays


def pytest_configure(config: pytest.Config) -> None:
    """Hide GPUs from tests that are not marked `gpu`."""
    if "not gpu" in config.option.markexpr:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Exclude the half million imported objects from garbage collection, which saves time in every test."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.collect()  # frees garbage, so that its warnings appear now
        gc.freeze()
        gc.set_threshold(20_000, 50, 100)  # collect rarely
        _let_loggers_propagate()


def _let_loggers_propagate() -> None:
    """pytest adds a handler to loggers that do not propagate, and torch logs every detail of a trace if it has one."""
    for logger in logging.root.manager.loggerDict.values():
        if isinstance(logger, logging.Logger) and logger.name.startswith("torch"):
            logger.propagate = True


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run the files that take longest first, so that no worker waits long for the other at the end."""
    slow = ("test_distributed.py", "test_estimator.py", "test_contract.py", "test_passes.py", "test_sweep.py")
    slow += ("test_faults.py", "test_examples.py", "test_review_browser.py", "test_predict_moved.py", "test_figures.py")
    items.sort(key=lambda item: slow.index(item.path.name) if item.path.name in slow else len(slow))


@pytest.fixture(scope="session", autouse=True)
def use_one_thread() -> None:
    """The last bit of a sum depends on the number of threads."""
    import torch

    torch.set_num_threads(1)


@pytest.fixture(scope="session", autouse=True)
def read_images_in_the_main_process() -> None:
    """Start reader processes only in tests that set `workers`: starting them takes most of the time of small tests."""
    from warpi.data.image_files import FileExamples

    init: Any = FileExamples.__init__
    size, _, *others = init.__defaults__  # the second is `workers`
    init.__defaults__ = (size, 0, *others)


@pytest.fixture(scope="session", autouse=True)
def do_not_wait_for_the_disk() -> None:
    """Let files be written without `fsync`, which protects them from power failures only."""
    os.fsync = lambda _: None


@pytest.fixture(scope="session", autouse=True)
def read_digits_once() -> None:
    """Most of the time of a short run on digits is spent on reading them."""
    import sklearn.datasets

    sklearn.datasets.load_digits = cache(sklearn.datasets.load_digits)


@pytest.fixture(scope="session", autouse=True)
def fit_small_models() -> None:
    """Let `auto` grow few trees, audits fit it once or twice, and WarPI fit its rectifier in few steps.

    Tests of their quality restore the values.
    """
    from warpi.audit import cross_fit
    from warpi.auto import fit as auto_fit
    from warpi.methods import warpi as warpi_method

    auto_fit.N_TREES = 8
    cross_fit.FITS = 2
    warpi_method.FIT_STEPS = 20


@pytest.fixture(scope="session")
def digits() -> "Dataset":
    from warpi.datasets.digits import digits as read_digits

    return read_digits()


@pytest.fixture(scope="session")
def tiny(digits: "Dataset") -> "tuple[Task, Truth]":
    """A small part of digits with fast epochs: about 190 noisy rows, 20 trusted."""
    from warpi.training.task import make_task

    return make_task(digits, "pair:0.4", meta=20, limit=300, seed=3)


@pytest.fixture(scope="session")
def pictures() -> "tuple[Task, Truth]":
    """Three classes of noise images as bytes, with augmentation."""
    import torch

    from warpi.data.augment import Crop
    from warpi.data.dataset import Dataset
    from warpi.data.examples import Scale, TensorExamples
    from warpi.training.task import make_task

    rng = torch.Generator().manual_seed(5)
    x = torch.randint(256, (120, 3, 6, 6), generator=rng, dtype=torch.uint8)
    y = torch.arange(120) % 3
    x[torch.arange(120), y] //= 2  # one channel per class is darker
    images = TensorExamples(x, Scale(torch.tensor(127.0), torch.tensor(64.0)), Crop(6, pad=2))
    return make_task(Dataset("pictures", images, y, ("red", "green", "blue"), clean=y), "pair:0.3", meta=12, seed=3)
