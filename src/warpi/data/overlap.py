"""Which examples two sets share."""

import os
from collections.abc import Hashable, Iterator
from functools import cache
from hashlib import blake2b

import torch
from torch import Tensor

from warpi.data.examples import TensorExamples
from warpi.data.files import FileExamples
from warpi.data.sparse import SparseExamples
from warpi.data.split import Split


def shared(a: Split, b: Split) -> Tensor:
    """Which examples of `a` have an input that also occurs in `b`.  [len(a)] bool

    Tensors of one shape and type are compared by their content, image files by where they lie once links are
    followed; none are marked where the two cannot be compared.
    """
    x, other = a.examples, b.examples
    if isinstance(x, TensorExamples) and isinstance(other, TensorExamples):
        if x.x.shape[1:] == other.x.shape[1:] and x.x.dtype == other.x.dtype:
            return _marked(_contents(x.x[a.rows]), _contents(other.x[b.rows]))
    elif isinstance(x, FileExamples) and isinstance(other, FileExamples):
        return _marked(_places(x, a.rows), _places(other, b.rows))
    elif isinstance(x, SparseExamples) and isinstance(other, SparseExamples):
        return _marked(x.contents(a.rows), other.contents(b.rows))
    return torch.zeros(len(a), dtype=torch.bool)


def _marked(first: Iterator[Hashable], second: Iterator[Hashable]) -> Tensor:
    seen = set(second)
    return torch.tensor([key in seen for key in first], dtype=torch.bool)


def _contents(x: Tensor) -> Iterator[bytes]:
    rows = x.flatten(1).cpu().numpy()
    return (blake2b(row, digest_size=16).digest() for row in rows)


def _places(examples: FileExamples, rows: Tensor) -> Iterator[str]:
    resolved = cache(os.path.realpath)  # of folders: there are few, and each takes a look at all that it lies in
    for row in rows.tolist():
        path = os.path.join(examples.root, examples.paths[row])
        folder, name = os.path.split(path)
        yield os.path.realpath(path) if os.path.islink(path) else os.path.join(resolved(folder), name)
