"""Find pairs of near copies, of images by their thumbnails and of vectors by their nearest neighbors, and outliers."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from warpi.data.duplicates import thumbnails as thumbs

SIMILAR = 0.88  # smallest similarity of near copies of images; chosen by benchmarks/audit/duplicates.py
CLOSE = 0.1  # largest distance of near copies, relative to the usual distance of the nearest neighbor
CLOSE_TEXT = 0.3  # the same for texts
MIN_COLUMNS = 3  # with fewer, many rows are close by coincidence
_CANDIDATE = 0.75  # similarity of coarse structure below which images are not compared
_MOST = 8  # candidates per image and window
_NEIGHBORS = 5
_AT_ONCE = 1024

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


class Pairs(NamedTuple):
    """Pairs of near copies."""

    a: Ints  # [m] positions
    b: Ints  # [m]
    similarity: Floats  # [m] of the pair, at most 1


class TooManyPairs(Exception):
    """More pairs of images look alike than a bounded search may compare."""


def find_similar_images(thumbnails: Tensor, most: int | None = None) -> Pairs:
    """Pairs of thumbnails [N, S, S] that show the same picture, even if it was cropped, compressed or brightened.

    Raises TooManyPairs if more than `most` pairs have to be compared.
    """
    index = torch.cat([thumbs.describe(part) for part in torch.split(thumbnails, _AT_ONCE)])
    candidates: set[tuple[int, int]] = set()
    k = min(_MOST, len(index))
    for start in range(0, len(index), _AT_ONCE):
        part = thumbnails[start : start + _AT_ONCE]
        for window in thumbs.query_windows():
            similarity = thumbs.describe(part, window) @ index.T
            similarity.diagonal(start).fill_(-1.0)
            best = similarity.topk(k)
            rows, ranks = (best.values >= _CANDIDATE).nonzero(as_tuple=True)
            others = best.indices[rows, ranks].tolist()
            candidates.update((min(i, j), max(i, j)) for i, j in zip((rows + start).tolist(), others, strict=True))
        if most is not None and len(candidates) > most:
            raise TooManyPairs
    pairs = torch.tensor(sorted(candidates), dtype=torch.int64).reshape(-1, 2)
    score = thumbs.compare(thumbnails, pairs[:, 0], pairs[:, 1])
    kept = score >= SIMILAR
    a, b = pairs[kept].T.numpy()
    return Pairs(a, b, score[kept].double().numpy())


def find_close_vectors(x: Any, is_text: bool) -> tuple[Pairs, Floats]:
    """Near copies among distinct vectors [N, D], dense or sparse, and the outlier score of each.

    The score is the log of the mean distance to the nearest neighbors, in robust standard deviations from the median.
    It is zero for texts, because tf-idf vectors are about equally far from each other.
    """
    from sklearn.neighbors import NearestNeighbors

    n = x.shape[0]
    k = min(_NEIGHBORS, n - 1)
    if k < 1:
        empty = np.zeros(0, dtype=np.int64)
        return Pairs(empty, empty, np.zeros(0)), np.zeros(n)
    distance, index = NearestNeighbors(n_neighbors=k + 1, algorithm="brute").fit(x).kneighbors(x)
    itself = index == np.arange(n)[:, None]
    itself[~itself.any(1), -1] = True  # among very close rows, a row may not be the nearest to itself
    distance = distance[~itself].reshape(n, k)
    index = index[~itself].reshape(n, k)
    usual = float(np.median(distance[:, 0]))
    share = CLOSE_TEXT if is_text else CLOSE if x.shape[1] >= MIN_COLUMNS else 0.0
    limit = share * usual
    rows, ranks = (distance < limit).nonzero()
    pairs = {(min(i, j), max(i, j)): 1 - d / max(usual, 1e-12) for i, j, d in _triples(rows, ranks, index, distance)}
    both = np.array(sorted(pairs), dtype=np.int64).reshape(-1, 2)
    similarity = np.array([pairs[i, j] for i, j in both.tolist()])
    return Pairs(both[:, 0], both[:, 1], similarity), np.zeros(n) if is_text else _outlier_scores(distance.mean(1))


def _triples(rows: Ints, ranks: Ints, index: Ints, distance: Floats) -> Iterator[tuple[int, int, float]]:
    values = (rows, index[rows, ranks], distance[rows, ranks])
    return zip(*(column.tolist() for column in values), strict=True)


def _outlier_scores(distance: Floats) -> Floats:
    logs = np.log(np.maximum(distance, 1e-12))
    center = np.median(logs)
    spread = 1.4826 * np.median(np.abs(logs - center))
    scores: Floats = (logs - center) / max(float(spread), 1e-3)
    return scores
