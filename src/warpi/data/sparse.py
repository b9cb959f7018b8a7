"""Inputs that are mostly zeros, such as tf-idf vectors of texts: stored sparse, converted to dense batch by batch."""

import hashlib
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.sparse import csr_array
from torch import Tensor

from warpi.data.examples import Examples, ReadBatch, Scale, check_form
from warpi.data.numeric import CategoryColumn, Columns, TextColumn
from warpi.errors import UserError

_MAX_DROPPED = 0.7  # docs/estimator.md explains why
_MIN_KEPT = 8  # entries per row, on average
_MAX_WORDS = 50_000  # size of the vocabulary of a text column


@dataclass(frozen=True, eq=False)
class SparseExamples(Examples):
    """Rows of a sparse matrix, divided by the root mean square of all entries, so that zeros stay zeros.

    On average, features are then as large as standardized ones; a scale per column would enlarge rare words. Numeric
    columns of a table with texts are scaled when they are read and keep that scale. In training, a random part of the
    entries of a row is dropped each time, because a network would otherwise memorize the label of a text by its rare
    words.
    """

    x: csr_array  # [N, D] float32, on the CPU
    target: torch.device  # of the batches
    scale: Scale
    dropped: float = 0.0  # fraction of the entries that is dropped in training
    columns: Columns | None = None  # of the table from which they were read
    texts: Mapping[str, Sequence[str]] = field(default_factory=dict)  # the cells of text columns, to show to people

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.x.shape[1],)

    @property
    def device(self) -> torch.device:
        return self.target

    def __len__(self) -> int:
        return int(self.x.shape[0])

    def to(self, device: torch.device | str) -> Self:
        return replace(self, target=torch.device(device), scale=Scale(*(t.to(device) for t in self.scale)))

    def stream(
        self,
        batches: Iterable[tuple[Tensor, int]],
        *,
        augment: bool,
        views: int = 1,
        part: slice = slice(None),
    ) -> Iterator[ReadBatch]:
        for rows, seed in batches:
            if not (augment and self.dropped):
                yield ReadBatch((self._normalize(self.flat(rows[part])),) * views, None)
                continue
            batch = self.x[rows.cpu().numpy()]
            rng = np.random.default_rng(seed)
            dropped = (self._drop_entries(batch, rng)[part].toarray() for _ in range(views))
            yield ReadBatch(tuple(self._normalize(torch.from_numpy(x)) for x in dropped), None)

    def _drop_entries(self, rows: csr_array, rng: np.random.Generator) -> csr_array:
        """Drop entries at random and scale the others, so that the expected values stay the same."""
        kept = rng.random(rows.nnz, dtype=np.float32) >= self.dropped
        return csr_array((rows.data * kept / np.float32(1 - self.dropped), rows.indices, rows.indptr), shape=rows.shape)

    def _normalize(self, x: Tensor) -> Tensor:
        return (x.to(self.target) - self.scale.mean) / self.scale.std

    def replace_inputs(self, rows: Tensor, other: Examples, other_rows: Tensor) -> Self:  # noqa: ARG002
        raise UserError("open_set noise needs arrays in memory or image files, got sparse features; make them dense")

    def normalized(self, rows: NDArray[np.int64]) -> csr_array:
        """Some rows as a network sees them, but sparse."""
        picked = self.x[rows]
        std = self.scale.std.cpu().expand(self.x.shape[1]).numpy()
        return csr_array((picked.data / std[picked.indices], picked.indices, picked.indptr), shape=picked.shape)

    def fit_scale(self, rows: Tensor) -> Scale:
        picked = self.x[rows.numpy()]
        is_sparse = self._sparse_features()
        entries = picked.data.astype(np.float64) * is_sparse[picked.indices]
        mean_square = float(entries @ entries) / max(len(rows) * int(is_sparse.sum()), 1)
        std = torch.tensor(mean_square**0.5 if mean_square > 0 else 1.0).to(self.scale.std)
        if not is_sparse.all():
            std = torch.where(torch.from_numpy(is_sparse).to(std.device), std, torch.ones_like(std))
        return Scale(self.scale.mean, std)

    def _sparse_features(self) -> NDArray[np.bool_]:
        """Which features are mostly zero: words and categories.  [D]"""
        marks = np.ones(self.x.shape[1], dtype=bool)
        for name, _, part in self.columns.blocks() if self.columns else ():
            marks[part] = name not in (self.columns.scales if self.columns else ())
        return marks

    def with_scale(self, scale: Scale) -> Self:
        return replace(self, scale=scale)

    def digest(self) -> str:
        content = hashlib.sha256(f"sparse {self.x.shape}".encode())
        for part in (self.x.indptr, self.x.indices, self.x.data):
            content.update(np.ascontiguousarray(part).data)
        return content.hexdigest()

    def form(self) -> dict[str, Any] | None:
        if self.columns is None:
            return None
        scale = {name: t.cpu() for name, t in self.scale._asdict().items()}
        return {"sparse": True, "shape": list(self.shape), "columns": self.columns.form(), **scale}

    @classmethod
    def from_form(cls, form: Mapping[str, Any]) -> Self:
        """Examples without rows of a stored form. Raises ValueError, TypeError, KeyError or RuntimeError if invalid."""
        columns = Columns.from_form(form["columns"])
        check_form(form["shape"] == [columns.width], "shape", form["shape"])
        scale = Scale(form["mean"], form["std"])
        for name, t in scale._asdict().items():
            valid = isinstance(t, Tensor) and t.is_floating_point() and not bool(t.isnan().any())
            check_form(valid and t.expand(columns.width).shape == (columns.width,), name, t)
        return cls(csr_array((0, columns.width), dtype=np.float32), torch.device("cpu"), scale, columns=columns)

    def flat(self, rows: Tensor) -> Tensor:
        return torch.from_numpy(self.x[rows.cpu().numpy()].toarray())

    @classmethod
    def of(cls, x: Any, augment: bool = False, columns: Columns | None = None) -> Self:
        """Convert a scipy matrix or array of any sparse format."""
        rows = csr_array(x, dtype=np.float32, copy=True)  # a copy, because the next two lines work in place
        rows.sum_duplicates()
        rows.eliminate_zeros()  # so that equal rows have equal entries
        n_kept = _MIN_KEPT * rows.shape[0]
        dropped = min(_MAX_DROPPED, 1 - n_kept / rows.nnz) if augment and rows.nnz > n_kept else 0.0
        return cls(rows, torch.device("cpu"), Scale(torch.tensor(0.0), torch.tensor(1.0)), dropped, columns)

    def contents(self, rows: Tensor) -> Iterator[bytes]:
        """The content of each row as bytes, the same for equal rows."""
        picked = self.x[rows.numpy()]
        ends = picked.indptr.tolist()
        for start, stop in itertools.pairwise(ends):
            yield picked.indices[start:stop].astype(np.int64).tobytes() + picked.data[start:stop].tobytes()


# -- texts -------------------------------------------------------------------------------------------------------------


def fit_texts(texts: Sequence[str]) -> TextColumn | None:
    """Choose the vocabulary of texts: the most frequent words and pairs of words that occur in at least two of them.

    Texts without spaces are cut into sequences of up to three characters. Returns None if there are no words.
    """
    spaces = sum(text.count(" ") for text in texts)
    analyzer = "char" if 30 * spaces < sum(map(len, texts)) else "word"
    for min_df in (2, 1):
        vectorizer = _make_vectorizer(analyzer, min_df=min_df, max_features=_MAX_WORDS)
        try:
            vectorizer.fit(texts)
        except ValueError:  # no word occurs often enough
            continue
        words = tuple(map(str, vectorizer.get_feature_names_out()))
        return TextColumn(words, tuple(map(float, vectorizer.idf_)), analyzer)
    return None


def encode_texts(texts: Sequence[str], column: TextColumn) -> csr_array:
    """tf-idf of texts, each row of length 1; zero for a text without known words.  [N, V]"""
    vectorizer = _make_vectorizer(column.analyzer, vocabulary=column.vocabulary)
    vectorizer.idf_ = np.array(column.idf)
    return csr_array(vectorizer.transform(texts))


def _make_vectorizer(analyzer: str, **options: Any) -> Any:
    from sklearn.feature_extraction.text import TfidfVectorizer

    ngrams = (1, 3) if analyzer == "char" else (1, 2)
    return TfidfVectorizer(sublinear_tf=True, ngram_range=ngrams, analyzer=analyzer, dtype=np.float32, **options)


def encode_categories(positions: NDArray[np.int64], column: CategoryColumn) -> csr_array:
    """One feature per category; a row without one (-1) is zero.  [N, C]"""
    rows = np.flatnonzero(positions >= 0)
    entries = np.ones(len(rows), np.float32), (rows, positions[rows])
    return csr_array(entries, shape=(len(positions), column.width))
