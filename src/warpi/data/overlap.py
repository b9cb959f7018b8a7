"""Which examples two sets share."""

import os
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator
from functools import cache
from hashlib import blake2b
from typing import Any

import torch
from torch import Tensor

from warpi.data.examples import TensorExamples
from warpi.data.files import FileExamples
from warpi.data.sparse import SparseExamples
from warpi.data.split import Split


def shared(a: Split, b: Split) -> Tensor:
    """Which examples of `a` are also in `b`.  [len(a)] bool

    Inputs alone say so, labels may have been corrected: tensors of one shape and type are compared by their content,
    image files by where they lie once links are followed; none are marked where the two cannot be compared.

    An example of `b` stands for one of `a` at most: where few values are possible, many examples have the same input,
    and are not the same for that. Of those with the same input, the ones whose label is the same too go first, then
    the order of `a`.
    """
    x, other = a.examples, b.examples
    if isinstance(x, TensorExamples) and isinstance(other, TensorExamples):
        if x.x.shape[1:] == other.x.shape[1:] and x.x.dtype == other.x.dtype:
            return _marked(_contents(x.x[a.rows]), a.y, _contents(other.x[b.rows]), b.y)
    elif isinstance(x, FileExamples) and isinstance(other, FileExamples):
        return _marked(_places(x, a.rows), a.y, _places(other, b.rows), b.y)
    elif isinstance(x, SparseExamples) and isinstance(other, SparseExamples):
        return _marked(x.contents(a.rows), a.y, other.contents(b.rows), b.y)
    return torch.zeros(len(a), dtype=torch.bool)


def _marked(first: Iterable[Hashable], y: Tensor, second: Iterable[Hashable], other_y: Tensor) -> Tensor:
    inputs = list(first)
    labelled = Counter(zip(second, other_y.tolist(), strict=True))  # those of the second that stand for none so far
    marks = [_taken(labelled, key) for key in zip(inputs, y.tolist(), strict=True)]
    others = Counter[Hashable]()
    for (key, _), n in labelled.items():
        others[key] += n
    marks = [mark or _taken(others, key) for mark, key in zip(marks, inputs, strict=True)]
    return torch.tensor(marks, dtype=torch.bool)


def _taken(left: Counter[Any], key: Hashable) -> bool:
    """Whether there was one left; then it is no more."""
    if left[key] == 0:
        return False
    left[key] -= 1
    return True


def _contents(x: Tensor) -> Iterator[bytes]:
    x = x + 0.0 if x.is_floating_point() else x  # -0.0 is 0.0
    rows = x.flatten(1).cpu().numpy()
    return (blake2b(row, digest_size=16).digest() for row in rows)


def _places(examples: FileExamples, rows: Tensor) -> Iterator[str]:
    resolved = cache(os.path.realpath)  # of folders: there are few, and each takes a look at all that it lies in
    for row in rows.tolist():
        path = os.path.join(examples.root, examples.paths[row])
        folder, name = os.path.split(path)
        yield os.path.realpath(path) if os.path.islink(path) else os.path.join(resolved(folder), name)
