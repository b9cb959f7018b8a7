"""Strong augmentation: pure functions of images and random numbers."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from PIL import Image

from warpi.data.augment import change_colors, cut_out, distort, warp
from warpi.data.examples import TensorExamples
from warpi.data.image_files import FileExamples
from warpi.training.task import Task, Truth


@pytest.fixture
def images() -> torch.Tensor:
    return torch.randint(256, (5, 3, 8, 8), generator=torch.Generator().manual_seed(0)).float()


def test_zero_draws_change_nothing(images: torch.Tensor) -> None:
    torch.testing.assert_close(warp(images, torch.zeros(5, 6)), images)
    torch.testing.assert_close(change_colors(images, torch.zeros(5, 3)), images)


def test_a_shift_moves_the_image(images: torch.Tensor) -> None:
    u = torch.zeros(5, 6)
    u[:, 4] = 1 / 0.8  # a tenth of the image times 1.25: one pixel of eight
    torch.testing.assert_close(warp(images, u)[..., :-1], images[..., 1:])


def test_cut_out_covers_a_square_of_half_the_side(images: torch.Tensor) -> None:
    covered = cut_out(images, torch.full((5, 2), 0.5)) != images
    assert covered[:, 0].any(0).sum() <= 16
    assert (cut_out(images, torch.full((5, 2), 0.5))[:, :, 2:6, 2:6] == 127.5).all()
    corner = cut_out(images, torch.zeros(5, 2))
    assert (corner[:, :, :2, :2] == 127.5).all()
    assert torch.equal(corner[:, :, 2:], images[:, :, 2:])


def test_distort_follows_the_generator_and_keeps_the_range(images: torch.Tensor) -> None:
    first, again, other = (distort(images, torch.Generator().manual_seed(seed)) for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert first.shape == images.shape
    assert first.min() >= 0
    assert first.max() <= 255


def test_a_part_is_distorted_as_within_the_whole(images: torch.Tensor) -> None:
    whole = distort(images, torch.Generator().manual_seed(1))
    part = distort(images[2:4], torch.Generator().manual_seed(1), slice(2, 4), 5)
    torch.testing.assert_close(part, whole[2:4])


def test_only_strong_views_are_distorted(pictures: tuple[Task, Truth]) -> None:
    examples = pictures[0].train.examples
    assert isinstance(examples, TensorExamples)
    rows = torch.arange(4)
    weak, second = examples.read(rows, torch.Generator().manual_seed(1), augment=True, views=2)
    strong = replace(examples, strong_views=(1,))
    still_weak, distorted = strong.read(rows, torch.Generator().manual_seed(1), augment=True, views=2)
    assert torch.equal(weak, still_weak)
    assert not torch.equal(second, distorted)
    assert torch.equal(*(e.read(rows, torch.Generator(), augment=False)[0] for e in (examples, strong)))


def test_image_files_are_distorted_on_the_device(tmp_path: Path) -> None:
    pixels = torch.randint(256, (5, 12, 12, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    for row in range(5):
        Image.fromarray(pixels[row].numpy()).save(tmp_path / f"{row}.png")
    paths = ("0.png", "1.png", "absent.png", "3.png", "4.png")
    files = FileExamples(str(tmp_path), paths, size=8, workers=0)
    strong = replace(files, strong_views=(1,))
    batches = [(torch.arange(5), 3), (torch.tensor([0, 2, 4]), 4)]
    for plain, distorted in zip(
        *(list(each.stream(batches, augment=True, views=2)) for each in (files, strong)), strict=True
    ):
        assert plain.kept is not None
        assert distorted.kept is not None
        assert torch.equal(plain.kept, distorted.kept)
        assert torch.equal(plain.views[0], distorted.views[0])
        seed, whole = (3, 5) if len(plain.kept) == 5 else (4, 3)
        restored = plain.views[1] * files.scale.std + files.scale.mean
        padded = torch.zeros(whole, 3, 8, 8).index_put((plain.kept.nonzero()[:, 0],), restored)
        expected = distort(padded, torch.Generator().manual_seed(seed))[plain.kept]
        torch.testing.assert_close(distorted.views[1] * files.scale.std + files.scale.mean, expected, atol=1e-3, rtol=0)
    part = next(iter(strong.stream(batches[:1], augment=True, views=2, part=slice(3, 5))))
    whole_views = next(iter(strong.stream(batches[:1], augment=True, views=2))).views
    torch.testing.assert_close(part.views[1], whole_views[1][-2:])
