"""Fixtures of the tests of `warpi review`."""

import os
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from review_helpers import Client, make_images, serve

from warpi.audit.decisions import Store
from warpi.review.items import Items, items_from_data


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with closing(Store(tmp_path / "d.sqlite", {"classes": ["a", "b"]})) as opened:
        yield opened


@pytest.fixture
def items() -> Items:
    """Twenty of 24 images in reverse order, with made-up results of an audit; eight are to be reviewed first.

    The rows 0 to 9 were drawn at random.
    """
    dataset = make_images()
    p = np.full((20, 3), 0.1)
    p[:, 1] = 0.8
    return replace(
        items_from_data(dataset, dataset.y, np.arange(20)[::-1].copy()),
        suggested=np.ones(20, np.int64),
        wrong_probability=np.linspace(1, 0, 20),
        review_first=np.arange(20) < 8,
        probabilities=p,
        random_rows=frozenset(range(10)),
    )


@pytest.fixture
def client(items: Items, tmp_path: Path) -> Iterator[Client]:
    with serve(items, tmp_path / "review") as connected:
        yield connected


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Eight small photos in two folders, and a link to a photo outside, which is allowed."""
    from PIL import Image

    outside = tmp_path_factory.mktemp("outside") / "secret.png"
    Image.new("RGB", (12, 9), "white").save(outside)
    root = tmp_path_factory.mktemp("photos")
    for i in range(8):
        folder = root / ("blue" if i < 4 else "red")
        folder.mkdir(exist_ok=True)
        Image.new("RGB", (12 + i, 9), (30 * i, 0, 255 - 30 * i)).save(folder / f"{i}.png")
    os.symlink(outside, root / "red" / "9.png")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WARPI_FOLLOW_LINKS", "1")
        yield root
