"""Find examples that two sets share."""

import logging
import os
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Sequence
from functools import cache
from hashlib import blake2b, file_digest
from typing import Any

import torch
from torch import Tensor

from warpi.data.examples import TensorExamples
from warpi.data.image_files import FileExamples
from warpi.data.mapped import MappedExamples
from warpi.data.sparse import SparseExamples
from warpi.data.split import Split
from warpi.errors import UserError
from warpi.utils.seeding import generator

logger = logging.getLogger("warpi.data")
_ROWS_AT_ONCE = 10_000
_MANY = 100_000  # rows


def mark_shared(a: Split, b: Split) -> Tensor:
    """Which examples of `a` are also in `b`.  [len(a)] bool

    Only inputs are compared, because labels may have been corrected: tensors of one shape and dtype by their content,
    image files by their resolved paths. If the two cannot be compared, no example is marked.

    Each example of `b` matches at most one of `a`, because with few possible values, many different examples have the
    same input. Among those, examples with the same label come first, then the order of `a` decides.
    """
    return torch.tensor([label is not None for label in match_labels(a, b)], dtype=torch.bool)


def mark_shared_once(a: Split, b: Split) -> Tensor:
    """Which examples of `a` are also in `b` and have an input that occurs only once in `a`.  [len(a)] bool

    If an input occurs more often, it is unknown which of the examples is meant, if any.
    """
    positions = _possibly_in(a, b)
    kind, keys = comparable_inputs(a.subset(positions))
    other_kind, other_keys = comparable_inputs(b)
    if kind is None or kind != other_kind:
        return torch.zeros(len(a), dtype=torch.bool)
    others = set(other_keys)
    matches = [(i, key) for i, key in zip(positions.tolist(), keys, strict=True) if key in others]
    counts = Counter(key for _, key in matches)
    shared = torch.zeros(len(a), dtype=torch.bool)
    shared[[i for i, key in matches if counts[key] == 1]] = True
    return shared


def match_labels(a: Split, b: Split) -> list[int | None]:
    """The label in `b` of each example of `a` that `mark_shared` marks; None for the others."""
    kind, keys = comparable_inputs(a)
    other_kind, other_keys = comparable_inputs(b)
    if kind is None or kind != other_kind:
        return [None] * len(a)
    keys = list(keys)
    unmatched = Counter(zip(other_keys, b.y.tolist(), strict=True))
    matched = [label if _take(unmatched, (key, label)) else None for key, label in zip(keys, a.y.tolist(), strict=True)]
    others: dict[Hashable, list[int]] = {}  # the labels of the remaining examples of `b` with each input, descending
    for (key, label), n in sorted(unmatched.items(), key=lambda item: -item[0][1]):
        others.setdefault(key, []).extend([label] * n)
    for i, key in enumerate(keys):
        if matched[i] is None and others.get(key):
            matched[i] = others[key].pop()
    return matched


def labels_in(a: Split, b: Split) -> Tensor:
    """The labels that the examples of `a` have in `b`; -1 if `b` does not have this input exactly once.  [len(a)]"""
    b = b.subset(_possibly_in(b, a))
    kind, keys = comparable_inputs(a)
    other_kind, other_keys = comparable_inputs(b)
    if kind is None or kind != other_kind:
        return torch.full((len(a),), -1)
    keys = list(keys)
    wanted = set(keys)
    labels: dict[Hashable, int] = {}
    for i, key in enumerate(other_keys):
        if key in wanted:
            labels[key] = -1 if key in labels else int(b.y[i])
    return torch.tensor([labels.get(key, -1) for key in keys], dtype=torch.int64)


def check_disjoint(trusted: Split, test: Split, noisy: Split) -> None:
    """Raise an error if trusted examples are in the test set. If this may be a coincidence, only warn.

    The probability of a coincidence is estimated by the fraction of noisy rows that equal a test row. Test rows may be
    copies of noisy ones, so it is at most the fraction of rows that equal another row of their own set. The error is
    raised if the count is more than three standard deviations above twice the expected one, because trusted examples
    are not a random sample and may be more common.
    """
    kind, trusted_keys = comparable_inputs(trusted)
    test_kind, test_keys = comparable_inputs(test)
    noisy_kind, noisy_keys = comparable_inputs(noisy)
    tested = list(test_keys) if kind == test_kind is not None else []
    count = _count_in(trusted_keys, tested)
    if not count:
        return
    n = len(trusted)
    rows = list(noisy_keys) if noisy_kind == kind else []
    p = min(_count_in(rows, tested) / max(len(rows), 1), max(_repeated_fraction(tested), _repeated_fraction(rows)))
    message = f"{count} of {n} trusted examples are also in the test set, about {p * n:.0f} are expected by coincidence"
    if count > n * 2 * p / (1 + p) + 3 * (n * p * (1 - p)) ** 0.5:
        raise UserError(f"{message}; remove them from it, or do not trust them")
    logger.warning("%s: equal rows may be different examples; remove those that are the same", message)


def count_copies(a: Split, b: Split) -> int:
    """How many examples of `a` have exactly the input of an example of `b`. Image files are compared by content."""
    if isinstance(a.examples, FileExamples) and isinstance(b.examples, FileExamples):
        paths = [a.examples.path(row) for row in a.rows.tolist()] + [b.examples.path(row) for row in b.rows.tolist()]
        keys = hash_files(paths)
        return _count_in(keys[: len(a)], keys[len(a) :])
    kind, keys_a = comparable_inputs(a)
    other_kind, keys_b = comparable_inputs(b.subset(_possibly_in(b, a)))
    if kind is None or kind != other_kind:
        return 0
    counts = Counter(keys_a)
    return sum(counts.pop(key, 0) for key in keys_b)  # stores no keys of `b`, which may have millions of examples


def hash_files(paths: Sequence[str]) -> list[Hashable]:
    """One key per file. Files with the same content have the same key. Only files of the same size are read."""
    sizes = [os.path.getsize(path) if os.path.isfile(path) else -1 for path in paths]
    counts = Counter(sizes)
    keys: list[Hashable] = []
    for path, size in zip(paths, sizes, strict=True):
        if size < 0 or counts[size] == 1:
            keys.append(path)
        else:
            with open(path, "rb") as file:
                keys.append(file_digest(file, "sha256").digest())
    return keys


def _count_in(keys: Iterable[Hashable], others: Iterable[Hashable]) -> int:
    known = set(others)
    return sum(key in known for key in keys)


def _repeated_fraction(keys: list[Hashable]) -> float:
    """The fraction of keys that occur more than once."""
    return sum(n for n in Counter(keys).values() if n > 1) / max(len(keys), 1)


def comparable_inputs(split: Split) -> tuple[Hashable, Iterable[Hashable]]:
    """The kind of the inputs, and a key per input. Only inputs of one kind are comparable; None: none are."""
    match split.examples:
        case TensorExamples(x=x) as examples:
            dtype = examples.kind if isinstance(examples, MappedExamples) else x.dtype
            return (x.shape[1:], dtype), _hash_rows(examples, split.rows, dtype)
        case FileExamples() as files:
            return FileExamples, _resolve_paths(files, split.rows)
        case SparseExamples() as sparse:
            return SparseExamples, sparse.contents(split.rows)
    return None, ()


def _take(counts: Counter[Any], key: Hashable) -> bool:
    """Remove one of the keys; False if there is none left."""
    if counts[key] == 0:
        return False
    counts[key] -= 1
    return True


def _hash_rows(examples: TensorExamples, rows: Tensor, dtype: torch.dtype) -> Iterator[bytes]:
    for some in torch.split(rows, _ROWS_AT_ONCE):
        part = examples.x[some].to(dtype)
        examples.release(some)
        part = part + 0.0 if part.is_floating_point() else part  # -0.0 is 0.0
        for row in part.flatten(1).cpu().numpy():
            yield blake2b(row, digest_size=16).digest()


def _possibly_in(a: Split, b: Split) -> Tensor:
    """Positions of the examples of `a` that may also be in `b`.

    For many float32 features, compares sums of products, because exact keys of millions of rows would take minutes.
    """
    kinds = [comparable_inputs(split)[0] for split in (a, b)]
    if len(a) < _MANY or kinds[0] != kinds[1] or not isinstance(kinds[0], tuple) or kinds[0][1] != torch.float32:
        return torch.arange(len(a))
    wanted = torch.cat(list(_sums_of_products(b)))
    possible = torch.zeros(len(a), dtype=torch.bool)  # a list of small results would fragment the memory
    for start, sums in zip(range(0, len(a), _ROWS_AT_ONCE), _sums_of_products(a), strict=True):
        possible[start : start + len(sums)] = torch.isin(sums, wanted)
    return possible.nonzero().flatten()


def _sums_of_products(split: Split) -> Iterator[Tensor]:
    """Multiply the bits of each input, as integers, by fixed numbers and add them modulo 2**64; in blocks of rows."""
    assert isinstance(split.examples, TensorExamples)
    x = split.examples.x
    factors = torch.randint(2**62, (x[0].numel(),), generator=generator(0, "overlap"))
    for rows in torch.split(split.rows, _ROWS_AT_ONCE):
        part = x[rows].to("cpu", torch.float32).flatten(1) + 0.0  # -0.0 is 0.0
        split.examples.release(rows)
        yield (part.view(torch.int32).long() * factors).sum(1)


def _resolve_paths(examples: FileExamples, rows: Tensor) -> Iterator[str]:
    resolve = cache(os.path.realpath)  # for folders: there are few of them, and resolving is slow
    for row in rows.tolist():
        path = examples.path(row)
        folder, name = os.path.split(path)
        yield os.path.realpath(path) if os.path.islink(path) else os.path.join(resolve(folder), name)
