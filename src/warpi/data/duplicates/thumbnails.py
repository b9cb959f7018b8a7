"""Small gray thumbnails of images, and the share of detail that two of them have in common."""

import os
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from itertools import product

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from warpi.data.decode import BROKEN, decode

SIDE = 64  # pixels of a thumbnail
_COMPARED = 32  # side in pixels at which two thumbnails are compared
_COARSE = 12  # side in pixels of the images that find candidates
_CUT = 0.12  # largest part of a side that a crop may cut off
_STEPS = (0.0, 0.04, 0.08, 0.12)  # cuts that are tried first
_FINER = (-0.02, 0.0, 0.02)  # changes of the best of them that are tried next
_BLANK = 2.0  # gray levels: an image with a smaller standard deviation shows nothing
_AT_ONCE = 64  # pairs
_PIXELS_AT_ONCE = 2**23

Window = tuple[float, float]  # the parts of a side that are cut off at its two ends


def read_thumbnails(paths: Sequence[str]) -> tuple[Tensor, dict[int, str]]:
    """Thumbnails of image files [N, SIDE, SIDE] uint8, and for files that cannot be read, the reason by position."""
    thumbnails = torch.zeros((len(paths), SIDE, SIDE), dtype=torch.uint8)
    broken: dict[int, str] = {}
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as threads:
        for i, result in enumerate(threads.map(_read_one, paths)):
            if isinstance(result, str):
                broken[i] = result
            else:
                thumbnails[i] = torch.from_numpy(result)
    return thumbnails, broken


def _read_one(path: str) -> NDArray[np.uint8] | str:
    from PIL.Image import Resampling

    try:
        image = decode(path, 2 * SIDE).convert("L").resize((SIDE, SIDE), Resampling.BOX)
    except BROKEN as error:
        return f"{type(error).__name__}: {error}"
    return np.array(image)


def make_thumbnails(x: Tensor, rows: Tensor) -> Tensor:
    """Thumbnails of some images in memory [N, C, H, W]. Floats are scaled to 0..255.  [n, SIDE, SIDE] uint8"""
    low, high = (0.0, 255.0) if x.dtype == torch.uint8 else (float(x.min()), float(x.max()))
    parts = []
    for some in torch.split(rows, max(1, _PIXELS_AT_ONCE // x[0].numel())):
        gray = x[some].float().mean(1, keepdim=True)
        small = F.interpolate(gray, (SIDE, SIDE), mode="bilinear", antialias=True)[:, 0].cpu()
        parts.append(((small - low) * (255 / max(high - low, 1e-9))).round().clamp(0, 255).to(torch.uint8))
    return torch.cat(parts)


def mark_blank(thumbnails: Tensor) -> Tensor:
    """Which thumbnails show a single color.  [N] bool"""
    return thumbnails.flatten(1).float().std(1) < _BLANK


def describe(thumbnails: Tensor, window: tuple[Window, Window] = ((0.0, 0.0), (0.0, 0.0))) -> Tensor:
    """Unit vectors of the coarse structure within a window. Their dot products are similarities.  [N, D]"""
    small = _sampler((window[0],), _COARSE)[0] @ thumbnails.float() @ _sampler((window[1],), _COARSE)[0].T
    rough = F.avg_pool2d(F.pad(small[:, None], (1, 1, 1, 1), mode="replicate"), 3, 1)[:, 0]
    flat = (part.flatten(1) for part in (small - rough, small))
    return torch.cat([F.normalize(part - part.mean(1, keepdim=True), dim=1) for part in flat], 1) / 2**0.5


def query_windows() -> Iterable[tuple[Window, Window]]:
    """Windows whose descriptions are close to those of crops: the whole, its middle and its corners."""
    cut = _CUT / 2
    sides = ((cut, 0.0), (0.0, cut))
    return [((0.0, 0.0), (0.0, 0.0)), ((cut / 2, cut / 2), (cut / 2, cut / 2)), *product(sides, sides)]


def compare(thumbnails: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """Similarity of each pair (a, b): of one thumbnail with the best matching crop of the other.  [n], at most 1"""
    parts = []
    for first, second in zip(torch.split(a, _AT_ONCE), torch.split(b, _AT_ONCE), strict=True):
        x, y = thumbnails[first].float(), thumbnails[second].float()
        parts.append(torch.maximum(_match(x, y), _match(y, x)))
    return torch.cat(parts) if parts else torch.zeros(0)


def _match(whole: Tensor, crop: Tensor) -> Tensor:
    """Similarity of `crop` with the most similar window of `whole`, searched from coarse to fine.  [n]"""
    target = _detail(_sampler(((0.0, 0.0),), _COMPARED)[0] @ crop @ _sampler(((0.0, 0.0),), _COMPARED)[0].T)
    cuts = tuple((low, high) for low, high in product(_STEPS, _STEPS) if low + high <= _CUT + 1e-9)
    best, windows = _best_window(whole, target, cuts, cuts)
    for i, window in enumerate(windows.tolist()):
        if best[i] < 0.3:  # too different for a finer search to matter
            continue
        around = [_around(cuts[part]) for part in divmod(window, len(cuts))]
        finer, _ = _best_window(whole[i : i + 1], target[i : i + 1], *around)
        best[i] = torch.maximum(best[i], finer[0])
    return best


def _around(cut: Window) -> tuple[Window, ...]:
    return tuple((max(0.0, cut[0] + low), max(0.0, cut[1] + high)) for low, high in product(_FINER, _FINER))


def _best_window(
    whole: Tensor, target: Tensor, vertical: tuple[Window, ...], horizontal: tuple[Window, ...]
) -> tuple[Tensor, Tensor]:
    """The largest similarity over windows, and the number of that window.  [n], [n]"""
    rows = torch.einsum("vij,njk->nvik", _sampler(vertical, _COMPARED), whole)
    windows = torch.einsum("hlk,nvik->nvhil", _sampler(horizontal, _COMPARED), rows).flatten(1, 2)
    similarity = torch.einsum("nwd,nd->nw", _detail(windows), target)
    best = similarity.max(1)
    return best.values, best.indices


def _detail(images: Tensor) -> Tensor:
    """Differences of neighboring pixels as unit vectors, which contrast does not change.  [..., S, S] -> [..., D]"""
    right = images[..., :-1, 1:] - images[..., :-1, :-1]
    down = images[..., 1:, :-1] - images[..., :-1, :-1]
    return F.normalize(torch.stack((right, down), -3).flatten(-3), dim=-1)


@lru_cache(maxsize=4096)
def _sampler(cuts: tuple[Window, ...], size: int) -> Tensor:
    """Matrices that average the pixels of one side of a thumbnail within windows.  [len(cuts), size, SIDE]"""
    pixels = torch.arange(SIDE, dtype=torch.float32)
    matrices = []
    for low, high in cuts:
        step = SIDE * (1 - low - high) / size
        begins = SIDE * low + step * torch.arange(size)[:, None]
        covered = torch.minimum(begins + step, pixels + 1) - torch.maximum(begins, pixels)
        matrices.append(covered.clamp_min(0) / step)
    return torch.stack(matrices)
