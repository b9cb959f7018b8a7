"""Which examples two sets share."""

import logging
import os
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator
from functools import cache
from hashlib import blake2b
from typing import Any

import torch
from torch import Tensor

from warpi.data.examples import TensorExamples
from warpi.data.image_files import FileExamples
from warpi.data.sparse import SparseExamples
from warpi.data.split import Split
from warpi.errors import UserError

logger = logging.getLogger("warpi.data")


def mark_shared(a: Split, b: Split) -> Tensor:
    """Which examples of `a` are also in `b`.  [len(a)] bool

    Inputs alone say so, labels may have been corrected: tensors of one shape and type are compared by their content,
    image files by where they lie once links are followed; none are marked where the two cannot be compared.

    An example of `b` stands for one of `a` at most: where few values are possible, many examples have the same input,
    and are not the same for that. Of those with the same input, the ones whose label is the same too go first, then
    the order of `a`.
    """
    (kind, first), (other, second) = _inputs(a), _inputs(b)
    if kind is None or kind != other:
        return torch.zeros(len(a), dtype=torch.bool)
    return _marked(first, a.y, second, b.y)


def check_disjoint(trusted: Split, test: Split, noisy: Split) -> None:
    """Refuse trusted examples that are in the test set, unless chance may have put them there; say so then.

    How likely that is, noisy rows say: the share of them that look like a test row, but no more than rows look like
    others of their own set, for test rows may be copies of noisy ones. Refused is what lies three deviations beyond
    twice these odds: trusted examples are no random draw, and may be more usual than others.
    """
    (kind, ours), (other, tested), (third, given) = _inputs(trusted), _inputs(test), _inputs(noisy)
    there = list(tested) if kind == other is not None else []
    count, n = _found(ours, there), len(trusted)
    if not count:
        return
    rows = list(given) if third == kind else []
    p = min(_found(rows, there) / max(len(rows), 1), max(_repeated(there), _repeated(rows)))
    also = f"{count} of {n} trusted examples are also in the test set, by chance some {p * n:.0f} would be"
    if count > n * 2 * p / (1 + p) + 3 * (n * p * (1 - p)) ** 0.5:
        raise UserError(f"{also}; take them out of it, or do not trust them")
    logger.warning("%s: rows that look alike need not be the same; take out of it those that are", also)


def _found(keys: Iterable[Hashable], among: Iterable[Hashable]) -> int:
    there = set(among)
    return sum(key in there for key in keys)


def _repeated(keys: list[Hashable]) -> float:
    """The share of those that occur more than once."""
    return sum(n for n in Counter(keys).values() if n > 1) / max(len(keys), 1)


def _inputs(split: Split) -> tuple[Hashable, Iterable[Hashable]]:
    """What the inputs can be compared with (None: with nothing), and a key for each: the same for equal ones."""
    match split.examples:
        case TensorExamples(x=x):
            return (x.shape[1:], x.dtype), _contents(x, split.rows)
        case FileExamples() as files:
            return FileExamples, _places(files, split.rows)
        case SparseExamples() as sparse:
            return SparseExamples, sparse.contents(split.rows)
    return None, ()


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


def _contents(x: Tensor, rows: Tensor) -> Iterator[bytes]:
    x = x[rows] + 0.0 if x.is_floating_point() else x[rows]  # -0.0 is 0.0
    for row in x.flatten(1).cpu().numpy():
        yield blake2b(row, digest_size=16).digest()


def _places(examples: FileExamples, rows: Tensor) -> Iterator[str]:
    resolved = cache(os.path.realpath)  # of folders: there are few, and each takes a look at all that it lies in
    for row in rows.tolist():
        path = os.path.join(examples.root, examples.paths[row])
        folder, name = os.path.split(path)
        yield os.path.realpath(path) if os.path.islink(path) else os.path.join(resolved(folder), name)
