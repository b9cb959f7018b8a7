"""Find pairs of near copies, of images by their thumbnails and of vectors by their nearest neighbors, and outliers."""

import math
from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.sparse import issparse
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
EXACT = 10_000  # dense rows of which all pairs are compared; for more rows faiss is used, if it is installed
_CELLS = 4  # of its index, in square roots of the number of rows
_SEARCHED_CELLS = 16  # for each row

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
    n = x.shape[0]
    k = min(_NEIGHBORS, n - 1)
    if k < 1:
        empty = np.zeros(0, dtype=np.int64)
        return Pairs(empty, empty, np.zeros(0)), np.zeros(n)
    distance, index = _nearest(x, k + 1)
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


def uses_index(n: int) -> bool:
    """Whether an index finds the nearest neighbors of n dense rows, instead of a comparison of all pairs."""
    return n > EXACT and find_spec("faiss") is not None


def work(n: int, d: int) -> float:
    """Multiplications that it takes to find the nearest neighbors of n dense rows with d features, approximately."""
    compared = (_CELLS + _SEARCHED_CELLS / _CELLS) * math.sqrt(n) if uses_index(n) else n
    return n * d * compared


def _nearest(x: Any, k: int) -> tuple[Floats, Ints]:
    """Distances and positions [N, k] of the nearest rows of each row, usually itself first."""
    from sklearn.neighbors import NearestNeighbors

    exact = NearestNeighbors(n_neighbors=k, algorithm="brute").fit(x)
    if issparse(x) or not uses_index(len(x)):
        distance, index = exact.kneighbors(x)
        return distance, index
    distance, index = _nearest_by_index(x, k)
    if len(alone := np.flatnonzero((index < 0).any(1))):
        distance[alone], index[alone] = exact.kneighbors(x[alone])
    return distance, index


def _nearest_by_index(x: Floats, k: int) -> tuple[Floats, Ints]:
    """As `_nearest`, but a row is compared only with those in the cells nearest to it. -1: these have too few rows."""
    faiss: Any = import_module("faiss")
    n, d = x.shape
    centers = faiss.IndexFlatL2(d)
    cells = faiss.IndexIVFFlat(centers, d, int(_CELLS * math.sqrt(n)))
    cells.cp.niter, cells.cp.min_points_per_centroid, cells.cp.max_points_per_centroid = 5, 1, 64
    cells.nprobe = _SEARCHED_CELLS
    rows = np.ascontiguousarray(x, np.float32)
    cells.train(rows)
    cells.add(rows)
    squared, index = cells.search(rows, k)
    return np.sqrt(squared.astype(np.float64)), index


def _triples(rows: Ints, ranks: Ints, index: Ints, distance: Floats) -> Iterator[tuple[int, int, float]]:
    values = (rows, index[rows, ranks], distance[rows, ranks])
    return zip(*(column.tolist() for column in values), strict=True)


def _outlier_scores(distance: Floats) -> Floats:
    logs = np.log(np.maximum(distance, 1e-12))
    center = np.median(logs)
    spread = 1.4826 * np.median(np.abs(logs - center))
    scores: Floats = (logs - center) / max(float(spread), 1e-3)
    return scores
