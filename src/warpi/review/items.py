"""The items of a review: rows with the results about their labels, and how to show them."""

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from itertools import compress
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from warpi.audit.result import Audit
from warpi.auto.learners.modules import Mixture
from warpi.data.dataset import Dataset
from warpi.data.examples import Examples, TensorExamples
from warpi.data.image_files import FileExamples
from warpi.data.numeric import Columns, Embedded
from warpi.data.overlap import match_labels
from warpi.data.split import Split
from warpi.errors import UserError, format_count
from warpi.review.show_input import Cell, feature_cells, is_picture, photo, pixels, png
from warpi.review.telling_columns import ClassMeans, class_means, order_by_size, sum_by_column
from warpi.training.task import Task
from warpi.utils.files import sha256

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
EmbedFn = Callable[[Tensor], Tensor]
"""Function from inputs as a network sees them, without augmentation, to features [n, D]."""

_MAX_CELLS = 200  # features shown per example
_MAX_CANDIDATES = {True: 1000, False: 200}  # trusted examples to compare with: in memory, in files


@dataclass(frozen=True, eq=False)
class Items:
    """Rows of a data set in the order of review. Arrays [n] are over the items, [N] over all rows of the data set."""

    dataset: Dataset
    examples: Examples  # the inputs as used for training
    embed: EmbedFn  # computes the features in which nearest neighbors are searched for
    row: Ints  # [n] rows of the data set, most suspicious first, or in the order of a list
    given: Ints  # [N] given labels
    suggested: Ints  # [n] class indices; -1: no suggestion
    wrong_probability: Floats  # [n] probability that the label is wrong; NaN: unknown
    uncertainty: Floats  # [n]
    review_first: NDArray[np.bool_]  # [n] rows to review first
    probabilities: Floats | None  # [n, K] class probabilities of the classifier
    trusted: Split | None  # examples with trusted labels
    trusted_given: Tensor | None = None  # their labels before a person checked them, -1 unknown
    audit: Audit | None = None  # of the run, if there is one
    test: Split | None = None  # the test rows of the run
    before_audit: Tensor | None = None  # [N] labels that an earlier audit replaced, -1 for other rows
    before_person: Tensor | None = None  # [N] labels before a person checked them in an earlier review, else -1
    dropped_before: frozenset[int] = frozenset()  # rows that are not used, because a copy of them was kept earlier
    listed: bool = False  # whether the rows are those of a list
    random_rows: frozenset[int] = frozenset()  # rows of the data set that `warpi pick` drew at random
    extra_cells: Sequence[Mapping[str, str]] | None = None  # [N] more cells to show for each row
    copied: Mapping[str, Sequence[str]] = field(default_factory=dict)  # [N] columns that identify the rows, by name
    source: Path | None = None  # the file of the data, if it is a table
    trusted_source: Path | None = None  # the separate file of the trusted examples, if there is one
    lock: threading.Lock = field(default_factory=threading.Lock)  # protects `vectors`
    vectors: dict[tuple[str, int], Tensor] = field(default_factory=dict)  # cached results of `embed`

    def __post_init__(self) -> None:
        if self.extra_cells is not None and len(self.extra_cells) != len(self.given):
            raise UserError(
                f"--show has {format_count(len(self.extra_cells), 'row')}, but {self.dataset.name} has "
                f"{len(self.given):,}; it must have one line per row, in the same order"
            )

    def __len__(self) -> int:
        return len(self.row)

    @property
    def classes(self) -> tuple[str, ...]:
        return self.dataset.classes

    @property
    def has_pictures(self) -> bool:
        x = self.examples
        if isinstance(x, Embedded):
            return x.originals is not None and x.originals.root is not None
        return isinstance(x, FileExamples) or (isinstance(x, TensorExamples) and is_picture(x, self.dataset.name))

    @property
    def is_small(self) -> bool:
        """Whether images have so few pixels that they are shown enlarged without smoothing."""
        return self.dataset.files is None and (len(self.examples.shape) < 3 or self.examples.shape[-1] <= 64)

    @property
    def identity(self) -> dict[str, Any]:
        """Values that identify the data set. Image files count by name, because they may be read at another size."""
        files = self.dataset.files
        inputs = sha256("\0".join(files.paths)) if files else self.dataset.examples.digest()
        return {"inputs_sha256": inputs, "classes": list(self.classes), "rows": len(self.given)}

    @cached_property
    def posterior(self) -> Floats | None:
        """P(true class | x, given label) of each item, [n, K]; NaN if it was not audited, None without an audit."""
        if self.audit is None:
            return self.probabilities
        audited = {row: i for i, row in enumerate(self.audit.row.tolist())}
        index = np.array([audited.get(row, -1) for row in self.row.tolist()], dtype=np.int64)
        return np.where((index >= 0)[:, None], self.audit.posterior[index], np.nan)

    @cached_property
    def suggestion_probability(self) -> Floats:
        """Probability that each suggestion is right, [n]; 0 if there is none."""
        if self.posterior is None:
            return np.zeros(len(self))
        return np.nan_to_num(self.posterior[np.arange(len(self)), self.suggested])

    @cached_property
    def orders(self) -> dict[str, Ints]:
        """The items in each order, by the name of the order. The first one is the default.

        The expected gain of checking a row is the probability that its suggestion is wrong: `warpi correct` applies
        the suggestions in any case, so a check improves only wrong ones.
        """
        if self.posterior is None:
            return {"listed": np.arange(len(self))}
        wrong = np.nan_to_num(self.wrong_probability, nan=-1.0)
        gain = np.where(self.suggestion_probability > 0, 1 - self.suggestion_probability, -1.0)
        orders = {
            "suspicious": np.lexsort((self.row, -wrong)),
            "gain": np.lexsort((self.row, -gain)),
        }
        return {"listed": np.arange(len(self)), **orders} if self.listed else orders

    @cached_property
    def means(self) -> ClassMeans | None:
        """Means of the features of each class, by the audit and the trusted rows of the data; None if unknown."""
        if self.audit is None:
            return None
        known = {row: k for row, k in self.trusted_rows.items() if row not in set(self.audit.row.tolist())}
        row = np.concatenate([self.audit.row, np.array(list(known), dtype=np.int64)])
        certain = np.eye(len(self.classes))[list(known.values())].reshape(-1, len(self.classes))
        return class_means(self.examples, row, np.concatenate([self.audit.posterior, certain]))

    @cached_property
    def position(self) -> dict[int, int]:
        """The position of each row of the data set in the order of review."""
        return {row: i for i, row in enumerate(self.row.tolist())}

    @cached_property
    def trusted_rows(self) -> dict[int, int]:
        """The class of each row that was trusted before, in the data or as a copy in a separate file."""
        if self.trusted is None:
            return {}
        if self.shares(self.trusted.examples):
            return dict(zip(self.trusted.rows.tolist(), self.trusted.y.tolist(), strict=True))
        rows = Split(self.dataset.examples, torch.arange(len(self.dataset.y)), self.dataset.y)
        return {row: k for row, k in enumerate(match_labels(rows, self.trusted)) if k is not None}

    def represents_data(self, row: int) -> bool:
        """Whether a row was not chosen by its scores, so that it may become a trusted example once it is decided.

        Rows that look suspicious would teach a method that the data is more difficult than it is.
        """
        return self.probabilities is None or row in self.random_rows or row in self.trusted_rows

    def name_of(self, row: int) -> str | None:
        """The id of a row in its table; None if no column identifies the rows."""
        return next((cells[row] for cells in self.copied.values()), None)

    def shares(self, other: Examples) -> bool:
        """Whether `other` are the inputs of this data set."""
        return other is self.examples or other is self.dataset.examples

    def picture(self, row: int) -> tuple[str, bytes] | None:
        """The image of a row of the data set as (media type, content); None if it has none."""
        return picture_of(self, self.examples, row)

    def trusted_picture(self, k: int) -> tuple[str, bytes] | None:
        """The image of the k-th trusted example."""
        if self.trusted is None or not 0 <= k < len(self.trusted):
            return None
        return picture_of(self, self.trusted.examples, int(self.trusted.rows[k]))

    def describe(self, row: int) -> list[Cell]:
        """Cells to show for a row: those of `--show`, and its features if it has no image.

        Features that speak for the suggestion against the given label come first. Unnamed features of an array are
        omitted if there is anything else to show.
        """
        extra = [Cell(name, cells[row]) for name, cells in list(self.copied.items())[1:]]
        extra += [Cell(name, text) for name, text in self.extra_cells[row].items()] if self.extra_cells else []
        if self.has_pictures or (extra and self.dataset.encoding is None):
            return extra
        cells = self.cells_of(self.examples, row)
        speaks = self._column_evidence(row, len(cells))
        if speaks is not None:
            order = order_by_size(speaks)
            cells = [cells[j]._replace(speaks=speaks[j]) for j in order]
        return (extra + cells)[:_MAX_CELLS]

    def _column_evidence(self, row: int, n_cells: int) -> list[float] | None:
        """How much each column of a row speaks for the suggestion against the given label.

        If the suggestion is the given label, it is compared with the next most probable class.
        """
        i = self.position.get(row, -1)
        if self.means is None or self.posterior is None or i < 0 or self.suggested[i] < 0:
            return None
        given, other = int(self.given[row]), int(self.suggested[i])
        if other == given:
            q = self.posterior[i].copy()
            q[given] = -1.0
            other = int(q.argmax())
        columns = self.dataset.encoding if isinstance(self.dataset.encoding, Columns) else None
        x = self.examples.flat(torch.tensor([row]))[0].double().cpu().numpy()
        values = sum_by_column(self.means.compare(x, other, given), columns)
        return values.tolist() if len(values) == n_cells else None

    def cells_of(self, examples: Examples, row: int) -> list[Cell]:
        columns = self.dataset.encoding if isinstance(self.dataset.encoding, Columns) else None
        if isinstance(examples, Embedded) and examples.originals is not None:
            return [Cell("text", examples.originals.values[row])]
        return [Cell(name, text) for name, text in feature_cells(examples, row, columns)]

    def nearest_trusted(
        self, row: int, decided: Mapping[int, str], n: int = 5, required: Sequence[str] = ()
    ) -> list[dict[str, Any]]:
        """The n examples nearest to a row among the trusted ones and those decided so far, nearest first.

        They include the nearest one of each of the `required` classes, if there is one.
        """
        limit = _MAX_CANDIDATES[self.examples.always_readable]
        count = 0 if self.trusted is None else len(self.trusted)
        refs = [("trusted", k) for k in np.linspace(0, count - 1, min(count, limit)).round().astype(int).tolist()]
        refs += [("row", r) for r in decided if r != row and r not in self.trusted_rows][-limit:]
        with self.lock:
            vectors = self._embed_refs([("row", row), *refs])
        center = vectors.pop(("row", row), None)
        if center is None:
            return []
        ranked = sorted(vectors, key=lambda ref: float((vectors[ref] - center).norm()))
        nearest: list[tuple[str, int]] = []
        for ref in ranked:
            if len(nearest) == n:
                break
            # A row that was decided and later used as a trusted example would appear twice.
            if not any(torch.equal(vectors[ref], vectors[other]) for other in nearest):
                nearest.append(ref)
        labels = {ref: self._label_at(ref, decided) for ref in reversed(ranked)}
        first = {label: ref for ref, label in labels.items()}  # the nearest one of each class
        chosen = list(dict.fromkeys([*(first[label] for label in required if label in first), *nearest]))[:n]
        return [self._describe_neighbor(ref, decided) for ref in sorted(chosen, key=ranked.index)]

    def _label_at(self, ref: tuple[str, int], decided: Mapping[int, str]) -> str:
        kind, k = ref
        if kind == "row":
            return decided[k]
        assert self.trusted is not None
        return self.classes[int(self.trusted.y[k])]

    def _describe_neighbor(self, ref: tuple[str, int], decided: Mapping[int, str]) -> dict[str, Any]:
        kind, k = ref
        label = self._label_at(ref, decided)
        if kind == "row":
            return {"row": k, "label": label, "cells": self.describe(k)}
        assert self.trusted is not None
        cells = [] if self.has_pictures else self.cells_of(self.trusted.examples, int(self.trusted.rows[k]))
        return {"trusted": k, "label": label, "cells": cells[:_MAX_CELLS]}

    def _embed_refs(self, refs: Sequence[tuple[str, int]]) -> dict[tuple[str, int], Tensor]:
        """Features of the examples, cached. Examples that cannot be read are omitted."""
        for kind in ("row", "trusted"):
            new = [ref for ref in refs if ref[0] == kind and ref not in self.vectors]
            for start in range(0, len(new), 256):
                chunk = new[start : start + 256]
                rows = torch.tensor([k for _, k in chunk])
                examples = self.examples
                if kind == "trusted":
                    assert self.trusted is not None
                    examples, rows = self.trusted.examples, self.trusted.rows[rows]
                if isinstance(examples, FileExamples) and len(chunk) < 16:
                    examples = replace(examples, workers=0)  # starting worker processes takes longer than reading
                (batch,) = examples.stream([(rows, 0)], augment=False)
                readable = chunk if batch.kept is None else list(compress(chunk, batch.kept.tolist()))
                self.vectors.update(zip(readable, self.embed(batch.views[0]), strict=True))
        return {ref: self.vectors[ref] for ref in refs if ref in self.vectors}


@lru_cache(maxsize=512)
def picture_of(items: Items, examples: Examples, row: int) -> tuple[str, bytes] | None:
    if not items.has_pictures or not 0 <= row < len(examples):
        return None
    root = None if items.dataset.files is None else items.dataset.files.root
    if isinstance(examples, Embedded) and examples.originals is not None and examples.originals.root is not None:
        content = photo(examples.originals.root, examples.originals.values[row], root)
        return None if content is None else ("image/jpeg", content)
    files = items.dataset.files if items.shares(examples) else None  # the whole image, not the square in memory
    source = examples if isinstance(examples, FileExamples) else files
    if source is not None:
        content = photo(source.root, source.paths[row], root)
        return None if content is None else ("image/jpeg", content)
    assert isinstance(examples, TensorExamples)
    return "image/png", png(pixels(examples.x[row]))


def items_from_run(
    dataset: Dataset,
    task: Task,
    net: nn.Module,
    audit: Audit,
    rows: Ints | None = None,
    extra_cells: Sequence[Mapping[str, str]] | None = None,
) -> Items:
    """The audited rows of a run, most suspicious first, or the listed `rows` in their order."""
    given = dataset.y.numpy().copy()
    for split in (task.train, task.val, task.meta):
        if split is not None and split.examples is task.train.examples:
            given[split.rows.numpy()] = split.y.cpu().numpy()
    given[audit.row] = audit.given
    chosen = audit.row[audit.ranked] if rows is None else _check_listed(rows, len(dataset.y))
    audited = {row: i for i, row in enumerate(audit.row.tolist())}
    index = np.array([audited.get(row, -1) for row in chosen.tolist()], dtype=np.int64)

    def pick(values: NDArray[Any], blank: Any) -> NDArray[Any]:
        return np.asarray(np.where(index >= 0, values[index], blank))

    return Items(
        dataset=dataset,
        examples=task.train.examples,
        embed=_embed_by_net(net),
        row=chosen,
        given=given,
        suggested=pick(audit.suggested, -1),
        wrong_probability=pick(audit.wrong_probability, np.nan),
        uncertainty=pick(audit.uncertainty, np.nan),
        review_first=pick(audit.is_label_issue, False) if rows is None else np.ones(len(chosen), bool),
        probabilities=np.where((index >= 0)[:, None], audit.probabilities[index], np.nan),
        trusted=task.meta,
        trusted_given=task.meta_given,
        audit=audit,
        before_audit=dataset.before_audit,
        before_person=dataset.before_person,
        listed=rows is not None,
        extra_cells=extra_cells,
    )


def items_from_data(
    dataset: Dataset,
    given: Tensor,
    rows: Ints | None = None,
    extra_cells: Sequence[Mapping[str, str]] | None = None,
) -> Items:
    """The listed rows, or all rows, of data without a run."""
    chosen = np.arange(len(dataset.y)) if rows is None else _check_listed(rows, len(dataset.y))
    n = len(chosen)
    trusted, examples = dataset.meta, dataset.examples
    if (scale := examples.fit_scale(torch.arange(len(examples)))) is not None:
        examples = examples.with_scale(scale)
        trusted = trusted and replace(trusted, examples=trusted.examples.with_scale(scale))
    if trusted is None and dataset.trusted is not None and dataset.trusted.any():
        checked = dataset.trusted.nonzero().flatten()
        trusted = Split(examples, checked, dataset.truth[checked])
    unknown = np.full(n, np.nan)
    return Items(
        dataset=dataset,
        examples=examples,
        embed=_embed_by_input,
        row=chosen,
        given=given.numpy().copy(),
        suggested=np.full(n, -1),
        wrong_probability=unknown,
        uncertainty=unknown,
        review_first=np.ones(n, bool),
        probabilities=None,
        trusted=trusted,
        before_audit=dataset.before_audit,
        before_person=dataset.before_person,
        listed=rows is not None,
        extra_cells=extra_cells,
    )


def _check_listed(rows: Ints, n: int) -> Ints:
    """Raise if a row is listed twice or does not exist."""
    values, counts = np.unique(rows, return_counts=True)
    if (counts > 1).any():
        raise UserError(f"--rows lists row {values[counts > 1][0]} twice; list each row once")
    outside = rows[(rows < 0) | (rows >= n)]
    if not len(rows) or len(outside):
        listed = outside[0] if len(outside) else "no row"
        raise UserError(f"--rows lists {listed}; list at least one of the rows 0..{n - 1} of the data set")
    return rows


def _embed_by_net(net: nn.Module) -> EmbedFn:
    """Normalized penultimate features, or normalized logits if the network does not expose its features.

    For a mixture of models, which has no such features, the inputs are used.
    """
    inner = getattr(net, "features", None)
    if isinstance(net, Mixture):
        inner = net.images or _embed_by_input
    elif not callable(inner) or isinstance(inner, nn.Module):
        inner = net
    net.eval()

    @torch.no_grad()
    def embed(x: Tensor) -> Tensor:
        h = inner(x).flatten(1).float()
        return h if inner is _embed_by_input else F.normalize(h, dim=1)

    return embed


def _embed_by_input(x: Tensor) -> Tensor:
    """The inputs themselves; images reduced to 16 x 16 pixels."""
    return (F.adaptive_avg_pool2d(x.float(), (16, 16)) if x.ndim == 4 else x.float()).flatten(1)
