"""What there is to review: rows with what is known about their labels, and how each of them looks."""

import hashlib
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from warpi.audit.result import Audit
from warpi.data.dataset import Dataset
from warpi.data.examples import Examples, TensorExamples
from warpi.data.image_files import FileExamples
from warpi.data.numeric import Columns
from warpi.data.overlap import mark_shared
from warpi.data.split import Split
from warpi.errors import UserError
from warpi.review.render import cells, is_picture, photo, pixels, png
from warpi.training.task import Task

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
EmbedFn = Callable[[Examples, Tensor], Tensor]
"""Rows [n] of some examples to features [n, D]; fewer where some cannot be read."""

_CELLS = 200  # features of one example that are shown
_AMONG = {True: 1000, False: 200}  # trusted examples among which neighbours are looked for: in memory, in files


@dataclass(frozen=True, eq=False)
class Items:
    """Rows of a data set in the order of review. Arrays [n] are parallel; [N] are over all rows of the data set."""

    dataset: Dataset
    examples: Examples  # the inputs as they were learned from
    embed: EmbedFn  # for neighbours
    row: Ints  # [n] rows of the data set, the most suspicious first
    given: Ints  # [N] given labels
    suggested: Ints  # [n] class numbers, -1: no suggestion
    wrong_probability: Floats  # [n] probability that the label is wrong, NaN: unknown
    uncertainty: Floats  # [n]
    review_first: NDArray[np.bool_]  # [n] what is to be reviewed first of all
    probabilities: Floats | None  # [n, K] the classifier's probabilities
    trusted: Split | None  # examples whose labels are known to be right
    extra_cells: Sequence[Mapping[str, str]] | None = None  # [N] what else is known about each row, for people
    source: Path | None = None  # the file of the data, where it is a table
    trusted_source: Path | None = None  # that of the trusted examples, where they lie in one of their own
    lock: threading.Lock = field(default_factory=threading.Lock)
    vectors: dict[tuple[str, int], Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.extra_cells is not None and len(self.extra_cells) != len(self.given):
            got, want = len(self.extra_cells), len(self.given)
            raise UserError(f"--show has {got} rows, {self.dataset.name} has {want}; give one line a row, in its order")

    def __len__(self) -> int:
        return len(self.row)

    @property
    def classes(self) -> tuple[str, ...]:
        return self.dataset.classes

    @property
    def has_pictures(self) -> bool:
        x = self.examples
        return isinstance(x, FileExamples) or (isinstance(x, TensorExamples) and is_picture(x, self.dataset.name))

    @property
    def is_small(self) -> bool:
        """Pictures of so few pixels that these should be seen."""
        return self.dataset.files is None and (len(self.examples.shape) < 3 or self.examples.shape[-1] <= 64)

    @property
    def identity(self) -> dict[str, Any]:
        """By what the data is known again. Image files count by their names: they may be read at another size."""
        files = self.dataset.files
        inputs = (
            hashlib.sha256("\0".join(files.paths).encode(errors="surrogateescape")).hexdigest()
            if files
            else self.dataset.examples.digest()
        )
        return {"inputs_sha256": inputs, "classes": list(self.classes), "rows": len(self.given)}

    @property
    def position(self) -> dict[int, int]:
        """Row of the data set -> place in the order of review."""
        return _positions(self)

    @property
    def trusted_rows(self) -> dict[int, int]:
        """Rows of this data set that were trusted before, also by a copy in a file of their own, and their class."""
        return _trusted_rows(self)

    def shares(self, other: Examples) -> bool:
        """Whether these are the inputs of the data set itself."""
        return other is self.examples or other is self.dataset.examples

    def picture(self, row: int) -> tuple[str, bytes] | None:
        """Row of the data set as (type, content); None where there is nothing to see."""
        return _picture(self, "row", row)

    def trusted_picture(self, k: int) -> tuple[str, bytes] | None:
        """The same of the k-th trusted example."""
        return _picture(self, "trusted", k)

    def describe(self, row: int) -> list[tuple[str, str]]:
        """What is to be read about a row: what the user wants shown, and features where there is no picture.

        Features without names (of an array) mean little to a person who has something to read.
        """
        own = list(self.extra_cells[row].items()) if self.extra_cells else []
        is_said = self.has_pictures or (own and self.dataset.encoding is None)
        return own if is_said else own + self._cells(self.examples, row)

    def _cells(self, examples: Examples, row: int) -> list[tuple[str, str]]:
        columns = self.dataset.encoding if isinstance(self.dataset.encoding, Columns) else None
        assert isinstance(examples, TensorExamples)  # image files are pictures
        return cells(examples.x[row], columns)[:_CELLS]

    def nearest_trusted(self, row: int, decided: Mapping[int, str], n: int = 5) -> list[dict[str, Any]]:
        """The nearest of the trusted examples and of those decided so far, nearest first."""
        most, known = _AMONG[self.examples.always_readable], self.trusted_rows
        count = 0 if self.trusted is None else len(self.trusted)
        places = [("trusted", k) for k in np.linspace(0, count - 1, min(count, most)).round().astype(int).tolist()]
        places += [("row", r) for r in decided if r != row and r not in known][-most:]
        with self.lock:
            found = self._vectors([("row", row), *places])
        here = found.pop(("row", row), None)
        if here is None or not found:
            return []
        distance = {place: float((vector - here).norm()) for place, vector in found.items()}
        chosen = list[tuple[str, int]]()
        for place in sorted(found, key=lambda place: distance[place]):
            if not any(torch.equal(found[place], found[other]) for other in chosen):  # decided, and trusted since
                chosen.append(place)
            if len(chosen) == n:
                break
        return [self._neighbour(place, decided) for place in chosen]

    def _neighbour(self, place: tuple[str, int], decided: Mapping[int, str]) -> dict[str, Any]:
        kind, k = place
        if kind == "row":
            return {"row": k, "label": decided[k], "words": self.describe(k)}
        assert self.trusted is not None
        words = [] if self.has_pictures else self._cells(self.trusted.examples, int(self.trusted.rows[k]))
        return {"trusted": k, "label": self.classes[int(self.trusted.y[k])], "words": words}

    def _vectors(self, places: Sequence[tuple[str, int]]) -> dict[tuple[str, int], Tensor]:
        """Features by place, each computed once."""
        for kind in ("row", "trusted"):
            new = [place for place in places if place[0] == kind and place not in self.vectors]
            for start in range(0, len(new), 256):
                chunk = new[start : start + 256]
                examples, rows = self._at(chunk)
                values = self.embed(examples, rows)
                if len(values) == len(chunk):  # a file that cannot be read has no neighbours
                    self.vectors.update(zip(chunk, values, strict=True))
                else:
                    for place in chunk:
                        examples, rows = self._at([place])
                        self.vectors.update((place, v) for v in self.embed(examples, rows))
        return {place: self.vectors[place] for place in places if place in self.vectors}

    def _at(self, places: Sequence[tuple[str, int]]) -> tuple[Examples, Tensor]:
        index = torch.tensor([k for _, k in places])
        if places[0][0] == "row":
            return self.examples, index
        assert self.trusted is not None
        return self.trusted.examples, self.trusted.rows[index]


@lru_cache(maxsize=4)
def _positions(items: Items) -> dict[int, int]:
    return {row: i for i, row in enumerate(items.row.tolist())}


@lru_cache(maxsize=4)
def _trusted_rows(items: Items) -> dict[int, int]:
    trusted, found = items.trusted, dict[int, int]()
    if trusted is None:
        return found
    if items.shares(trusted.examples):
        return dict(zip(trusted.rows.tolist(), trusted.y.tolist(), strict=True))

    trusted, classes = replace(trusted, y=trusted.y.cpu()), sorted(set(trusted.y.tolist()))

    def at(rows: Tensor) -> Split:
        return Split(items.dataset.examples, rows, items.dataset.y[rows])

    left = torch.arange(len(items.given))
    left = left[mark_shared(at(left), trusted)]
    for same in (True, False):  # as there: rows whose label is that of their copy go first
        for k in classes:
            mine = trusted.subset(trusted.y == k)
            taken = torch.tensor([row for row, label in found.items() if label == k], dtype=torch.int64)
            mine = mine.subset(~mark_shared(mine, at(taken)))
            pool = left[items.dataset.y[left] == k] if same else left
            rows = pool[mark_shared(at(pool), mine)]
            found |= dict.fromkeys(rows.tolist(), k)
            left = left[~torch.isin(left, rows)]
    return dict(sorted(found.items()))


@lru_cache(maxsize=512)
def _picture(items: Items, kind: str, k: int) -> tuple[str, bytes] | None:
    examples, row = items.examples, k
    if kind == "trusted":
        if items.trusted is None or not 0 <= k < len(items.trusted):
            return None
        examples, row = items.trusted.examples, int(items.trusted.rows[k])
    if not items.has_pictures or not 0 <= row < len(examples):
        return None
    if isinstance(examples, FileExamples):
        content = photo(examples.root, examples.paths[row])
        return None if content is None else ("image/jpeg", content)
    files = items.dataset.files
    if files is not None and items.shares(examples):  # the whole picture, not the square that is held in memory
        content = photo(files.root, files.paths[row])
        return None if content is None else ("image/jpeg", content)
    assert isinstance(examples, TensorExamples)
    return "image/png", png(pixels(examples.x[row]))


def items_from_run(
    dataset: Dataset,
    task: Task,
    net: nn.Module,
    audit: Audit,
    rows: Ints | None,
    shown: Sequence[Mapping[str, str]] | None,
) -> Items:
    """The rows that were audited, the most suspicious first; or those listed, in their order."""
    given = dataset.y.numpy().copy()
    for split in (task.train, task.val, task.meta):
        if split is not None and split.examples is task.train.examples:
            given[split.rows.numpy()] = split.y.cpu().numpy()
    given[audit.row] = audit.given
    chosen = audit.row[audit.ranked] if rows is None else _checked(rows, len(dataset.y))
    known = {row: i for i, row in enumerate(audit.row.tolist())}
    at = np.array([known.get(row, -1) for row in chosen.tolist()], dtype=np.int64)

    def pick(values: NDArray[Any], blank: Any) -> NDArray[Any]:
        picked: NDArray[Any] = np.where(at >= 0, values[at], blank)
        return picked

    return Items(
        dataset,
        task.train.examples,
        _by_net(net),
        chosen,
        given,
        pick(audit.suggested, -1),
        pick(audit.wrong_probability, np.nan),
        pick(audit.uncertainty, np.nan),
        pick(audit.is_label_issue, False) if rows is None else np.ones(len(chosen), bool),
        np.where((at >= 0)[:, None], audit.probabilities[at], np.nan),
        task.meta,
        shown,
    )


def items_from_data(
    dataset: Dataset, given: Tensor, rows: Ints | None, shown: Sequence[Mapping[str, str]] | None
) -> Items:
    """The rows listed (else all) of data that nothing has been learned from yet."""
    chosen = np.arange(len(dataset.y)) if rows is None else _checked(rows, len(dataset.y))
    n, trusted, examples = len(chosen), dataset.meta, dataset.examples
    if (scale := examples.fit_scale(torch.arange(len(examples)))) is not None:
        examples = examples.with_scale(scale)
        trusted = trusted and replace(trusted, examples=trusted.examples.with_scale(scale))
    if trusted is None and dataset.trusted is not None and dataset.trusted.any():
        checked = dataset.trusted.nonzero().flatten()
        trusted = Split(examples, checked, dataset.truth[checked])
    unknown = np.full(n, np.nan)
    return Items(
        dataset,
        examples,
        _by_input,
        chosen,
        given.numpy().copy(),
        np.full(n, -1),
        unknown,
        unknown,
        np.ones(n, bool),
        None,
        trusted,
        shown,
    )


def _checked(rows: Ints, n: int) -> Ints:
    """Rows that somebody listed: each once, all there."""
    values, first = np.unique(rows, return_index=True)
    if len(values) < len(rows):
        twice = next(row for i, row in enumerate(rows.tolist()) if i not in set(first.tolist()))
        raise UserError(f"--rows lists row {twice} twice; list each row once")
    if not len(rows) or values[0] < 0 or values[-1] >= n:
        bad = "none" if not len(rows) else values[0] if values[0] < 0 else values[-1]
        raise UserError(f"--rows lists {bad}; allowed are rows 0..{n - 1} of the data set, and at least one")
    return rows


def _read(examples: Examples, rows: Tensor) -> Tensor:
    """A few inputs, as a network sees them, without augmentation."""
    if isinstance(examples, FileExamples) and len(rows) < 16:
        examples = replace(examples, workers=0)  # to start readers takes longer than to read
    (read,) = examples.stream([(rows, 0)], augment=False)
    return read.views[0]


def _by_net(net: nn.Module) -> EmbedFn:
    """Directions in the last layer but one, or among the logits where a network does not show that."""
    inner = getattr(net, "features", None)
    net.eval()

    @torch.no_grad()
    def embed(examples: Examples, rows: Tensor) -> Tensor:
        x = _read(examples, rows)
        h = inner(x) if callable(inner) and not isinstance(inner, nn.Module) else net(x)
        return F.normalize(h.flatten(1).float(), dim=1)

    return embed


def _by_input(examples: Examples, rows: Tensor) -> Tensor:
    """The inputs themselves; images as 16 x 16 pixels."""
    x = _read(examples, rows).float()
    x = F.adaptive_avg_pool2d(x, (16, 16)) if x.ndim == 4 else x
    return x.flatten(1)
