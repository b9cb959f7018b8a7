"""The consensus of several annotators, from tables or arrays, with the quality of each annotator."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from warpi.audit.annotators.dawid_skene import DawidSkene, Labels, fit_dawid_skene
from warpi.audit.any_model.audit_array import normalize
from warpi.audit.any_model.read_files import TrustedRows, encode, read_columns, read_probabilities, read_trusted
from warpi.audit.label_scores import Floats, Ints
from warpi.audit.rates import Checks, estimate_rate
from warpi.datasets.labels import blank_missing, normalize_labels, sort_classes
from warpi.errors import UserError
from warpi.functional.intervals import wilson_interval
from warpi.utils.files import write_csv

_ROW = ("row", "task", "item", "id", "path")  # columns of a long table that identify the row, in this order
_ANNOTATOR = ("annotator", "worker", "annotator_id", "worker_id")
_WIDE = ("label_", "annotator_", "annotator")  # prefixes of the names of columns with labels
_ADDED = ("label", "label_probability", "n_labels", "agreement", "review")
_LEVEL, _Z = 0.9, 1.644854  # of the intervals
SURE = 0.9
"""Rows whose most probable class has a lower probability should be reviewed."""


@dataclass(frozen=True, eq=False)
class AnnotatorLabels:
    """Labels as they were read."""

    labels: Labels
    classes: tuple[str, ...]
    annotators: tuple[str, ...]
    rows: Mapping[str, Sequence[object]]  # columns that describe the rows, copied to the result
    number: Ints | None  # [N] row of the data, ascending; None: not known


@dataclass(frozen=True, eq=False)
class Consensus:
    """The most probable class of each of N rows, and the quality of each annotator."""

    label: Ints  # [N]
    probability: Floats  # [N] that it is right
    posterior: Floats  # [N, K]
    n_labels: Ints  # [N]
    agreement: Floats  # [N] share of the row's labels that are the consensus; 0 without labels
    review: tuple[str, ...]  # N reasons to review a row; '' for none
    classes: tuple[str, ...]
    annotators: tuple[Mapping[str, Any], ...]  # one dict each: annotator, n, accuracy, low, high, checked
    quality: Mapping[str, Any]  # the same for the consensus itself, without the trusted labels
    model: DawidSkene
    rows: Mapping[str, Sequence[object]]  # columns of the input that describe the rows

    def to_csv(self, path: Path | str) -> None:
        """Write one line per row: columns of the input, label, label_probability, n_labels, agreement and review."""
        write_csv(Path(path), [*self.rows, *_ADDED], self._lines())

    def _lines(self) -> Iterator[list[object]]:
        columns = (*self.rows.values(), self.label.tolist(), self.probability.tolist(), self.n_labels.tolist())
        for *cells, label, sure, n, agreement, review in zip(
            *columns, self.agreement.tolist(), self.review, strict=True
        ):
            yield [*cells, self.classes[label], f"{sure:.6g}", n, f"{agreement:.4g}", review]

    def summary(self) -> dict[str, Any]:
        """Everything except the rows, ready for JSON."""
        return {
            "n": len(self.label),
            "n_labels": int(self.n_labels.sum()),
            "to_review": sum(map(bool, self.review)),
            "consensus": dict(self.quality),
            "classes": list(self.classes),
            "annotators": [dict(annotator) for annotator in self.annotators],
            "strength": self.model.strength,
        }


def combine_annotators(
    labels: object,
    *,
    columns: Sequence[str] = (),
    probabilities: object = None,
    trusted: object = None,
    classes: Sequence[str] | None = None,
) -> Consensus:
    """Find the most probable class of each row from the labels of several annotators.

    Parameters:
        labels: a table with one column per annotator, or with the columns `row`, `annotator` and `label`; or an array
            [N, A] of class numbers, -1 if an annotator did not label the row.
        columns: the columns of the annotators (default: those whose names begin with `label_` or `annotator`).
        probabilities: a classifier's probabilities [N, K] of the rows, or a file; they are combined with the labels.
        trusted: rows whose true class is known, as in `warpi.audit.audit`. With 20 or more, the intervals of the
            annotators' accuracies are based on them and not on the model.
        classes: the names of the classes in the order of the columns of `probabilities` (default: sorted).
    """
    names = None
    if probabilities is not None:
        probabilities, names = read_probabilities(probabilities)
    read = read_annotators(labels, columns, classes or names)
    p = None
    if isinstance(probabilities, np.ndarray):
        p = _match_rows(probabilities, read)
    model = fit_dawid_skene(read.labels, p)
    return _make_consensus(read, model, _match_trusted(trusted, read), p)


def _make_consensus(read: AnnotatorLabels, model: DawidSkene, trusted: TrustedRows, p: Floats | None) -> Consensus:
    labels = read.labels
    q = model.q.copy()
    q[trusted.row] = np.eye(labels.n_classes)[trusted.true]
    votes = labels.votes()
    label, index = q.argmax(1), np.arange(labels.n_rows)
    n = votes.sum(1).astype(np.int64)
    agreement = votes[index, label] / np.maximum(n, 1)
    review = _reasons(q[index, label], votes, n, None if p is None else p.argmax(1), label, trusted.row)
    annotators = []
    for a, name in enumerate(read.annotators):
        by_a = labels.annotator == a
        annotators.append({"annotator": name, **_rate(labels.row[by_a], labels.label[by_a], model, trusted)})
    quality = _rate(index, model.q.argmax(1), model, trusted)
    parts = (n, agreement, review, read.classes, tuple(annotators), quality, model, read.rows)
    return Consensus(label, q[index, label], q, *parts)


def _reasons(sure: Floats, votes: Floats, n: Ints, predicted: Ints | None, label: Ints, known: Ints) -> tuple[str, ...]:
    """The reason why a person should review each row; '' if there is none."""
    reason = np.full(len(sure), "", dtype=object)
    doubtful = sure < SURE
    reason[doubtful] = "uncertain"
    if predicted is not None:
        reason[doubtful & (predicted != label)] = "the model disagrees"
    reason[doubtful & (votes.max(1) < n)] = "annotators disagree"
    reason[n == 0] = "no label"
    reason[known] = ""
    return tuple(reason.tolist())


def _rate(row: Ints, label: Ints, model: DawidSkene, trusted: TrustedRows) -> dict[str, Any]:
    """The fraction of right labels of one annotator or of the consensus, with a 90 % interval.

    With 20 or more labels of random trusted rows, the interval is based on these: the mean over all labels is
    corrected by its mean error on the trusted rows. Otherwise it assumes that the model is right.
    """
    if not len(row):
        return {"n": 0, "accuracy": None, "low": None, "high": None, "checked": 0}
    wrong = 1 - model.q[row, label]
    order = np.searchsorted(trusted.row, row)
    checked = np.flatnonzero(np.append(trusted.row, -1)[order] == row)
    index = order[checked]
    checks = Checks(
        given=label,
        wrong=wrong,
        checked_given=label[checked],
        is_wrong=label[checked] != trusted.true[index],
        wrong_left_out=wrong[checked],
        random=trusted.random[index],
        weight=trusted.weight[index],
    )
    rate = estimate_rate(checks, _LEVEL)
    low, high, n_checked = rate.low, rate.high, rate.checked
    wrong_share = rate.rate
    if low is None or high is None:
        wrong_share = float(wrong.mean())
        low, high = wilson_interval(wrong_share, len(row), _Z)
        n_checked = 0
    return {"n": len(row), "accuracy": 1 - wrong_share, "low": 1 - high, "high": 1 - low, "checked": n_checked}


def read_annotators(source: object, columns: Sequence[str], classes: Sequence[str] | None) -> AnnotatorLabels:
    """Labels from a wide table, a long table, or an array."""
    if not isinstance(source, str | Path):
        return _read_array(np.asarray(source), classes)
    path = Path(source)
    table = read_columns(path)
    annotator = next((name for name in _ANNOTATOR if name in table), None)
    if annotator is not None and "label" in table and not columns:
        return _read_long(path, table, annotator, classes)
    columns = columns or [name for name in table if name.lower().startswith(_WIDE)]
    if missing := [name for name in columns if name not in table]:
        raise UserError(f"{path} has no column {missing[0]!r}; its columns are {', '.join(table)}")
    if len(columns) < 2:
        raise UserError(
            f"{path}: name the columns of at least two annotators with --columns A,B,..., or use a table with the "
            f"columns row, annotator and label; its columns are {', '.join(table)}"
        )
    texts = [normalize_labels(table[name]) for name in columns]
    rows = {name: cells for name, cells in table.items() if name not in columns and name not in _ADDED}
    if "row" not in rows:
        rows = {"row": list(map(str, range(len(texts[0])))), **rows}
    row = np.tile(np.arange(len(texts[0])), len(columns))
    by = np.repeat(np.arange(len(columns)), len(texts[0]))
    cells = [text for column in texts for text in column]
    return _encode(row, by, cells, rows, tuple(columns), classes, np.arange(len(texts[0])))


def _read_long(
    path: Path, table: Mapping[str, list[str]], annotator: str, classes: Sequence[str] | None
) -> AnnotatorLabels:
    key = next((name for name in _ROW if name in table), None)
    if key is None:
        raise UserError(f"{path} needs a column that identifies the rows: row, id or path")
    keys, row = _number(table[key])
    number = None
    if all(text.isdecimal() and len(text) < 19 for text in keys):  # rows of the data, in their order
        order = sorted(range(len(keys)), key=lambda i: int(keys[i]))
        position = np.empty(len(keys), np.int64)
        position[order] = np.arange(len(keys))
        keys, row = [keys[i] for i in order], position[row]
        number = np.array(list(map(int, keys)), np.int64)
    annotators, by = _number(table[annotator])
    return _encode(row, by, normalize_labels(table["label"]), {key: keys}, tuple(annotators), classes, number)


def _number(texts: Sequence[str]) -> tuple[list[str], Ints]:
    """Distinct texts in the order of their first appearance, and the position of each text among them."""
    index: dict[str, int] = {}
    positions = [index.setdefault(text, len(index)) for text in texts]
    return list(index), np.array(positions, np.int64)


def _read_array(values: NDArray[Any], classes: Sequence[str] | None) -> AnnotatorLabels:
    if values.ndim != 2 or values.shape[1] < 2 or values.dtype.kind not in "iu":
        shape = f"{values.dtype} {list(values.shape)}"
        raise UserError(
            f"labels must be class numbers with one row per example and one column per annotator, got {shape}"
        )
    if not (values >= 0).any():
        raise UserError("there are no labels; -1 means that an annotator did not label a row")
    names = tuple(classes or map(str, range(max(int(values.max()) + 1, 2))))
    row, by = np.nonzero(values >= 0)
    label = encode(values[row, by], tuple(map(str, range(len(names)))), "labels")
    labels = Labels(row, by, label, len(values), values.shape[1], len(names))
    rows = {"row": list(map(str, range(len(values))))}
    return AnnotatorLabels(labels, names, tuple(map(str, range(values.shape[1]))), rows, np.arange(len(values)))


def _encode(
    row: Ints,
    by: Ints,
    texts: Sequence[str],
    rows: Mapping[str, Sequence[object]],
    annotators: tuple[str, ...],
    classes: Sequence[str] | None,
    number: Ints | None,
) -> AnnotatorLabels:
    """Labels as numbers. Blank ones are omitted."""
    texts = blank_missing(texts, classes or ())
    names = tuple(classes or sort_classes({*texts} - {""}))
    if len(names) < 2:
        raise UserError("the labels have fewer than two classes; is every annotator a column, and are labels names?")
    filled = np.array([bool(text) for text in texts])
    label = encode(np.array(texts, dtype=str)[filled], names, "labels")
    n_rows = len(next(iter(rows.values())))
    row, by = row[filled], by[filled]
    if len(np.unique(row * len(annotators) + by)) != len(row):
        raise UserError("an annotator has two labels for the same row; keep one of them")
    labels = Labels(row, by, label, n_rows, len(annotators), len(names))
    return AnnotatorLabels(labels, names, annotators, rows, number)


def _match_rows(probabilities: NDArray[Any], read: AnnotatorLabels) -> Floats:
    """The probabilities of the rows that have labels."""
    K = read.labels.n_classes
    if probabilities.ndim != 2 or probabilities.shape[1] != K:
        raise UserError(f"probabilities must have one column for each of {K} classes, got {list(probabilities.shape)}")
    number = _require_numbers(read, "probabilities")
    if number.max() >= len(probabilities):
        raise UserError(f"there are {len(probabilities)} rows of probabilities, but row {number.max()} has labels")
    return normalize(probabilities[number])


def _match_trusted(trusted: object, read: AnnotatorLabels) -> TrustedRows:
    """The trusted rows that have labels, as positions among the rows with labels."""
    if trusted is None:
        return TrustedRows.none()
    number = _require_numbers(read, "trusted rows")  # ascending
    known = read_trusted(trusted, read.classes, int(number.max()) + 1)
    position = np.searchsorted(number, known.row)
    has_labels = number[position] == known.row
    true, random, weight = (values[has_labels] for values in known[1:4])
    return known._replace(row=position[has_labels], true=true, random=random, weight=weight)


def _require_numbers(read: AnnotatorLabels, what: str) -> Ints:
    if read.number is None:
        raise UserError(f"{what} must be matched to rows of the data; identify them by row numbers, starting at 0")
    return read.number
