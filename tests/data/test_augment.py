"""Random and center crops compared with a loop."""

from typing import NamedTuple

import torch
from hypothesis import given, strategies as st
from random_inputs import SOME, make_generator, normal, seeds
from torch import Tensor

from warpi.data.augment import Crop


class Draws(NamedTuple):
    top: list[int]
    left: list[int]
    mirror: list[bool]


def draws(n: int, places: tuple[int, int], flip: bool, generator: torch.Generator) -> Draws:
    top, left = (torch.randint(p, (n, 1), generator=generator)[:, 0].tolist() for p in places)
    mirror = (torch.rand((n, 1), generator=generator)[:, 0] < 0.5).tolist() if flip else [False] * n
    return Draws(top, left, mirror)


def reflected(i: int, size: int) -> int:
    """The pixel that a reflected border shows at i: 1 at -1, size - 2 at size."""
    return -i if i < 0 else 2 * (size - 1) - i if i >= size else i


def naive_crop(image: Tensor, size: int, pad: int, top: int, left: int, mirror: bool) -> Tensor:
    channels, height, width = image.shape
    out = torch.empty(channels, size, size)
    for i in range(size):
        for j in range(size):
            column = size - 1 - j if mirror else j
            row_from, column_from = reflected(top + i - pad, height), reflected(left + column - pad, width)
            out[:, i, j] = image[:, row_from, column_from]
    return out


@SOME
@given(seeds, st.integers(2, 5), st.integers(0, 2), st.integers(0, 2), st.booleans())
def test_crop_equals_that_of_a_loop(seed: int, size: int, pad: int, larger: int, flip: bool) -> None:
    height, width = size + larger, size + 2 * larger
    pad = min(pad, size + larger - 1)  # a border cannot reflect more than the image
    x = torch.randint(256, (4, 2, height, width), generator=make_generator(seed), dtype=torch.uint8)
    got = Crop(size, pad, flip).train(x, make_generator(seed))
    assert got.shape == (4, 2, size, size)
    places = (height + 2 * pad - size + 1, width + 2 * pad - size + 1)
    drawn = draws(4, places, flip, make_generator(seed))
    for i in range(4):
        wanted = naive_crop(x[i], size, pad, drawn.top[i], drawn.left[i], drawn.mirror[i])
        assert torch.equal(got[i].float(), wanted)


def test_crop_draws_all_positions_and_mirror_images() -> None:
    x = torch.arange(9.0).view(1, 1, 3, 3).expand(400, 1, 3, 3)
    corners = {tuple(c.flatten().tolist()) for c in Crop(2).train(x, make_generator())}
    plain = {(t * 3 + c, t * 3 + c + 1, t * 3 + c + 3, t * 3 + c + 4) for t in (0, 1) for c in (0, 1)}
    assert corners == plain | {(b, a, d, c) for a, b, c, d in plain}
    assert {tuple(c.flatten().tolist()) for c in Crop(2, flip=False).train(x, make_generator())} == plain


def test_crop_is_not_in_place_and_depends_only_on_its_generator() -> None:
    x, crop, before = normal(8, 3, 6, 6), Crop(6, pad=2), torch.get_rng_state()
    copy = x.clone()
    first, second, other = (crop.train(x, make_generator(seed)) for seed in (1, 1, 2))
    assert torch.equal(first, second)
    assert not torch.equal(first, other)
    assert torch.equal(x, copy)
    assert torch.equal(before, torch.get_rng_state())


def test_center_crop() -> None:
    x = torch.arange(2 * 5 * 7).view(1, 2, 5, 7)
    assert torch.equal(Crop(3, pad=2).center(x), x[:, :, 1:4, 2:5])
    assert torch.equal(Crop(5).center(x[..., :5]), x[..., :5])
