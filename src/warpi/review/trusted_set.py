"""Parts of a trusted set for `warpi fit --trusted`: balanced classes and the cells of tables."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from warpi.data.examples import Examples
from warpi.data.numeric import Embedded
from warpi.datasets.columns.copied import read_table_cells
from warpi.datasets.delimited_files import TABLE_SUFFIXES
from warpi.datasets.label_columns import LABEL_COLUMNS
from warpi.errors import UserError, format_count
from warpi.utils.files import format_csv
from warpi.utils.seeding import generator


class TrustedSetSummary(NamedTuple):
    """What was written as a trusted set."""

    path: Path
    size: int  # number of examples
    left_out: int  # number of trusted examples that were omitted to balance the classes
    fewest: list[str]  # the classes with the fewest examples, which limit the others
    missing: list[str]  # the classes without any example
    corrected_only: int = 0  # decided rows that are not trusted, because they were chosen by their scores

    @classmethod
    def of(cls, path: Path, y: Tensor, size: int, classes: tuple[str, ...]) -> "TrustedSetSummary":
        """Summary of a set with `size` of the trusted examples, whose classes are y."""
        counts = dict(zip(classes, torch.bincount(y, minlength=len(classes)).tolist(), strict=True))
        least = min(n for n in counts.values() if n)
        fewest = [name for name, n in counts.items() if n == least]
        missing = [name for name, n in counts.items() if not n]
        return cls(path, size, len(y) - size, fewest, missing)

    def __str__(self) -> str:
        text = f"{self.path}: {format_count(self.size, 'trusted example')}"
        if self.left_out:
            text += f"; {self.left_out} more omitted to balance the classes, limited by {', '.join(self.fewest)}"
        if self.corrected_only:
            text += (
                f"; without {format_count(self.corrected_only, 'decided row')} chosen by score, which do not represent "
                "the data: only their labels are corrected"
            )
        return text


def balance_classes(y: Tensor, first: int = 0) -> Tensor:
    """Positions of a subset with the same number of examples of every class that occurs, in ascending order.

    The `first` examples are preferred; the others are drawn at random. A trusted set of the most suspicious rows would
    contain some classes far more often than others, and meta methods would learn these frequencies (docs/review.md).
    """
    counts = torch.bincount(y)
    least = int(counts[counts > 0].min())
    drawn = torch.randperm(len(y) - first, generator=generator(0, "trusted"))
    order = torch.cat([torch.arange(first), first + drawn])
    return torch.cat([order[y[order] == k][:least] for k in range(len(counts))]).sort().values


def original_rows(path: Path, label: str, part: str = "train") -> list[dict[str, str]]:
    """The rows of a table as they are in its file, as dicts from column name to cell. Numbers are not rounded.

    If there is a column `split`, returns only the rows with that `part` (train, test or trusted). Omits the columns
    clean_label, trusted and split, which may be wrong for a checked row. Returns an empty list if the file is not a
    table.
    """
    if path.suffix.lower() not in TABLE_SUFFIXES:
        return []
    names, rows, parts = read_table_cells(path)
    copied = {name: j for j, name in enumerate(names) if name == label or name not in LABEL_COLUMNS}
    return [
        {name: row[j] for name, j in copied.items()}
        for row, row_part in zip(rows, parts, strict=True)
        if row_part == part
    ]


def format_texts(refs: Sequence[tuple[Examples, int]], names: Sequence[str]) -> bytes:
    """A csv with the texts from which vectors were computed, and their classes."""
    first = refs[0][0]
    assert isinstance(first, Embedded)
    header = [first.embedder.get("text") or "text", first.embedder.get("label") or "label"]
    lines = []
    for (examples, row), name in zip(refs, names, strict=True):
        if not isinstance(examples, Embedded) or examples.originals is None:
            raise UserError("features and other inputs cannot be mixed in one trusted set")
        lines.append([examples.originals.values[row], name])
    return format_csv(header, lines).encode(errors="surrogateescape")
