"""Sentences about copies across training, trusted and test rows. They are printed before training."""

from warpi.data.duplicates.search import has_pictures, reason_to_skip, search
from warpi.data.overlap import count_copies
from warpi.data.split import Split

_NAMES = {"train": "training", "trusted": "trusted"}
_VERBS = {  # singular, plural
    "exact": ("has the same input as", "have the same input as"),
    "near": ("is a copy or near copy of", "are copies or near copies of"),
}
_EFFECT = {"test": "the test accuracy may be too high", "trusted": "the accuracy on trusted rows may be too high"}


def describe_leaks(
    train: Split, val: Split | None, trusted: Split | None, test: Split | None, classes: tuple[str, ...], command: str
) -> list[str]:
    """Describe how many trusted and test rows are copies of others, and what to do about it; empty if none are.

    Among at most 10,000 images, near copies are also found, which takes seconds. `command` lists the copies.
    """
    if trusted is None and test is None:
        return []
    parts = [(name, split) for name, split in (("train", train), ("train", val)) if split is not None]
    parts += [(name, split) for name, split in (("trusted", trusted), ("test", test)) if split is not None]
    pictures = has_pictures(train)
    skipped = reason_to_skip(train, sum(len(split) for _, split in parts), bounded=True) if pictures else ""
    near = False
    if pictures and not skipped:
        duplicates = search(parts, classes, bounded=True)
        counts, skipped = duplicates.leaks(), duplicates.skipped
        near = not skipped
    else:
        counts = [] if test is None else [("test", "train", count_copies(test, train))]
    sizes = {"test": len(test or ()), "trusted": len(trusted or ())}
    lines = []
    for part, other, n in counts:
        verb = _VERBS["near" if near else "exact"][n > 1]
        if n:
            lines.append(f"{n} of {sizes[part]} {part} rows {verb} a {_NAMES[other]} row; {_EFFECT[part]}")
    if lines:
        lines.append(f"to list the copies, so that you can keep one of each group: {command}")
    if skipped:
        lines.append(f"near copies were not searched for ({skipped}); to search for them: {command}")
    return lines
