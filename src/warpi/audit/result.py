"""`Audit`: the result for every label as arrays, as a table, and as one file in a run folder. Does not need torch."""

import io
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from types import NoneType
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from warpi.audit.label_scores import Floats, Ints, posterior
from warpi.data.duplicates.result import Duplicates
from warpi.errors import DAMAGED_ARRAY_ERRORS, MALFORMED_ERRORS, UserError, missing_package
from warpi.utils.files import write_atomically, write_csv
from warpi.utils.limits import check_array_file

AUDIT_FILE = "audit.npz"
FORMAT = "warpi-audit/1"
_MANY = 1_000_000  # audits with more rows are not compressed
_RATE_KEYS = ("n", "rate")
_INTERVAL_KEYS = ("low", "high")  # None: no interval was computed
MODEL_BASED = "model-based, usually too low when mistakes cluster at class boundaries"
UNCHECKED = "model-based; without trusted rows it can be much too low or too high"
"""Describes a noise rate that is not backed by rows whose labels before and after a check are known."""
_DESCRIPTIONS = ("probabilities", "uncertainty")  # facts that are sentences
_NOT_ARRAYS = ("classes", "error_rates", "facts")  # fields of Audit, stored as JSON
_PAIR = "pair_"  # prefix of the names of the arrays of `CheckedPairs` in a file
_COPY = "copy_"  # the same for `Duplicates`


class CheckedPairs(NamedTuple):
    """m rows whose given and true label are both known."""

    q: Floats  # [m, K] P(true class | x, given label), from a fit without this row
    given: Ints  # [m]
    true: Ints  # [m]
    random: NDArray[np.bool_]  # [m] drawn at random
    weight: Floats  # [m] rows that a random one stands for, relative to the others
    position: Ints  # [m] position among the audited rows; -1 for trusted rows that are not audited


@dataclass(frozen=True, eq=False)
class Audit:
    """Results for the given labels of N examples of a data set with K classes. The arrays are parallel.

    `row` is the row of the example in the data set as it was read (`Dataset.examples`, `Dataset.y`), in ascending
    order. Rows of the trusted set and images that cannot be read are omitted. Labels are class indices; `classes`
    contains their names.
    """

    row: Ints  # [N] rows of the data set
    given: Ints  # [N] given labels
    suggested: Ints  # [N] most probable class given x and the label; usually the given label
    wrong_probability: Floats  # [N] P(true != given | x, given)
    label_quality: Floats  # [N] 1 - wrong_probability
    is_label_issue: NDArray[np.bool_]  # [N] wrong_probability > threshold and another class is more probable
    uncertainty: Floats  # [N] uncertainty of wrong_probability; `facts["uncertainty"]` describes it
    probabilities: Floats  # [N, K] p(true class | x) of the classifier, without the given label
    T: Floats  # [K, K] estimated P(given = j | true = i); rows (true classes) sum to 1
    classes: tuple[str, ...]  # K names
    error_rates: tuple[Mapping[str, Any], ...]  # one dict per class: class, n, rate, low, high, checked
    facts: Mapping[str, Any]  # run, method, folds, threshold, noise_rate {n, rate, low, high, checked, level}, ...
    learned_posterior: Floats | None = None  # [N, K] P(true class | x, given label), learned from checked rows
    pairs: CheckedPairs | None = None  # what people have checked
    copies: Duplicates | None = None  # copies within and between the training, trusted and test rows of a run

    def __len__(self) -> int:
        return len(self.row)

    @property
    def posterior(self) -> Floats:
        """P(true class | x, given label).  [N, K]"""
        if self.learned_posterior is not None:
            return self.learned_posterior
        return posterior(self.probabilities, self.given, self.T)

    @property
    def has_interval(self) -> bool:
        """Whether the noise rate has an interval based on checked rows. The intervals of older audits do not."""
        return is_checked(self.facts["noise_rate"])

    @property
    def ranked(self) -> Ints:
        """Positions in these arrays (not rows), most suspicious first.  [N]"""
        order: Ints = np.lexsort((self.row, -self.wrong_probability))
        return order

    def columns(
        self, paths: Sequence[str] | None = None, copied: Mapping[str, Sequence[str]] | None = None
    ) -> dict[str, Any]:
        """The columns of the table, with class names as labels.

        `paths` are the image files of all rows of the data set (`Dataset.files.paths`), which become the last column.
        `copied` are columns of the data, such as ids (`read_copied_columns`), which follow `row`.
        """
        from warpi.datasets.columns.copied import insert_copied  # imports torch, which reading an audit does not need

        names = np.array(self.classes, dtype=object)
        table = {
            "row": self.row,
            "given_label": names[self.given],
            "suggested_label": names[self.suggested],
            "wrong_probability": self.wrong_probability,
            "label_quality": self.label_quality,
            "is_label_issue": self.is_label_issue,
            "uncertainty": self.uncertainty,
        }
        if self.copies is not None:
            table |= self.copies.findings_of(self.row)
        if paths is not None:  # file names may be any bytes; `row` identifies the example
            printable = [paths[row].encode(errors="backslashreplace").decode() for row in self.row.tolist()]
            table["path"] = np.array(printable, dtype=object)
        return insert_copied(table, copied or {}, self.row.tolist())

    def to_csv(
        self,
        path: Path | str,
        paths: Sequence[str] | None = None,
        copied: Mapping[str, Sequence[str]] | None = None,
    ) -> None:
        """Write the table, one line per example in the order of the rows; `paths` and `copied` as in `columns`."""
        columns = self.columns(paths, copied)
        write_csv(Path(path), list(columns), _format_lines(columns))

    def to_parquet(
        self,
        path: Path | str,
        paths: Sequence[str] | None = None,
        copied: Mapping[str, Sequence[str]] | None = None,
    ) -> None:
        """Write the table as parquet; needs the extra `tables`. `paths` and `copied` as in `columns`."""
        try:
            import pyarrow
            from pyarrow import parquet
        except ImportError as e:
            raise missing_package("pyarrow", "writing .parquet", "tables") from e
        content = io.BytesIO()
        parquet.write_table(pyarrow.table(self.columns(paths, copied)), content)
        write_atomically(Path(path), content.getvalue())

    def cleanlab(self) -> dict[str, NDArray[Any]]:
        """The arguments `labels` [N] and `pred_probs` [N, K] of cleanlab's functions, in the order of these arrays.

            cleanlab.filter.find_label_issues(**audit.cleanlab())

        cleanlab expects out-of-sample probabilities: `audit(run, folds=5)`.
        """
        return {"labels": self.given, "pred_probs": self.probabilities}

    @property
    def noise_matrix(self) -> Floats:
        """T in cleanlab's convention: P(given = i | true = j), columns sum to 1.  [K, K]"""
        return self.T.T

    def label_issues(self) -> Any:
        """The table as a pandas frame with the columns and class indices of `CleanLearning.get_label_issues()`.

        Use it as `CleanLearning(clf).fit(X, labels, label_issues=...)`.
        """
        try:
            import pandas as pd
        except ImportError as e:
            raise missing_package("pandas", "a data frame", "cleanlab") from e
        return pd.DataFrame(
            {
                "is_label_issue": self.is_label_issue,
                "label_quality": self.label_quality,
                "given_label": self.given,
                "predicted_label": self.suggested,
            }
        )

    def summary(self) -> dict[str, Any]:
        """Everything except the arrays over the examples, ready for JSON."""
        return {
            "n": len(self),
            "n_issues": int(self.is_label_issue.sum()),
            "classes": list(self.classes),
            "error_rates": [dict(rate) for rate in self.error_rates],
            "T": self.T.tolist(),
            **self.facts,
            **({} if self.copies is None else {"copies": self.copies.summary()}),
        }

    def save(self, folder: Path | str) -> Path:
        """Store the audit in a run folder as one file and return its path."""
        arrays = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in _NOT_ARRAYS}
        arrays = {name: values for name, values in arrays.items() if values is not None}
        if (pairs := arrays.pop("pairs", None)) is not None:
            arrays |= {_PAIR + name: values for name, values in pairs._asdict().items()}
        if arrays.pop("copies", None) is not None and self.copies is not None:
            arrays |= {_COPY + name: values for name, values in self.copies.to_arrays().items()}
        about = {"format": FORMAT, **{name: getattr(self, name) for name in _NOT_ARRAYS}}
        arrays["about"] = np.array(json.dumps(about))
        path = Path(folder) / AUDIT_FILE
        if len(self) > _MANY:
            _write_uncompressed(path, arrays)
            return path
        write_arrays(path, arrays)
        return path


def _write_uncompressed(path: Path, arrays: Mapping[str, NDArray[Any]]) -> None:
    """Write arrays directly into a file, which then replaces an old one, because a copy may not fit into memory."""
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with part.open("wb") as file:
            np.savez(file, **dict(arrays))  # type: ignore[arg-type]
            os.fsync(file.fileno())
        os.replace(part, path)
    except OSError as e:
        raise UserError(f"cannot write {path}: {e.strerror}; the previous file is unchanged") from e
    finally:
        part.unlink(missing_ok=True)


def _format_lines(columns: Mapping[str, Any], size: int = 20_000) -> Iterator[list[object]]:
    """The lines of a table. Columns are converted in chunks; a list of all cells would take ten times their memory."""
    for start in range(0, len(next(iter(columns.values()))), size):
        for row in zip(*(column[start : start + size].tolist() for column in columns.values()), strict=True):
            yield [f"{cell:.6g}" if isinstance(cell, float) else cell for cell in row]


def is_checked(rate: Mapping[str, Any]) -> bool:
    """Whether a rate has an interval based on checked rows."""
    return rate.get("level") is not None and rate["low"] is not None


def is_unchecked(facts: Mapping[str, Any]) -> bool:
    """Whether no trusted and no checked row tells anything about the labels."""
    return not (facts.get("n_trusted") or facts.get("n_checked"))


def describe_rate(facts: Mapping[str, Any]) -> str:
    """The noise rate of an audit in words, with its interval if it is based on checked rows."""
    rate = facts["noise_rate"]
    percent = f"{100 * rate['rate']:.1f} %"
    if not is_checked(rate):
        return f"{percent} ({UNCHECKED if is_unchecked(facts) else MODEL_BASED})"
    interval = f"{100 * rate['low']:.1f} to {100 * rate['high']:.1f}"
    return f"{percent} ({100 * rate['level']:.0f} % interval {interval}, from {rate['checked']} checked rows)"


def write_arrays(path: Path, arrays: Mapping[str, Any]) -> None:
    """Write arrays to a compressed .npz file, atomically and without pickle."""
    content = io.BytesIO()
    np.savez_compressed(content, allow_pickle=False, **arrays)
    write_atomically(path, content.getvalue())


def read_arrays(path: Path) -> dict[str, NDArray[Any]]:
    """Read the arrays of a .npz file without unpickling anything; raise ValueError if the file is damaged."""
    try:
        check_array_file(path)
        with path.open("rb") as file, np.load(file, allow_pickle=False) as stored:
            return {name: stored[name] for name in stored.files}
    except (OSError, KeyError, *DAMAGED_ARRAY_ERRORS) as e:
        raise ValueError(str(e)) from e


def read_audit(folder: Path | str) -> Audit:
    """Read the audit that `warpi audit` stored in a run folder. Nothing is trained or unpickled."""
    path = Path(folder) / AUDIT_FILE
    if not path.exists():
        raise UserError(f"there is no audit in {folder}; create one with: warpi audit {folder}")
    try:
        arrays: dict[str, Any] = read_arrays(path)
        about = json.loads(str(arrays.pop("about")))
        if about.pop("format") != FORMAT:
            raise ValueError("another format")
        about["classes"] = tuple(about["classes"])
        about["error_rates"] = tuple(about["error_rates"])
        pairs, copies = (
            {name.removeprefix(prefix): arrays.pop(name) for name in [*arrays] if name.startswith(prefix)}
            for prefix in (_PAIR, _COPY)
        )
        about["pairs"] = CheckedPairs(**pairs) if pairs else None
        about["copies"] = Duplicates.from_arrays(copies) if copies else None
        audit = Audit(**arrays, **about)
        _check(audit)
        return audit
    except MALFORMED_ERRORS as e:
        raise UserError(
            f"{path} is damaged or was written by another version ({e}); recreate it with: warpi audit {folder}"
        ) from e


_OTHERS = ("classes", "error_rates", "facts", "pairs", "copies")  # fields that are not arrays


def _check(audit: Audit) -> None:
    """Raise ValueError if the arrays do not fit together."""
    N, K = len(audit.row), len(audit.classes)
    shapes = {"probabilities": (N, K), "T": (K, K), "learned_posterior": (N, K)}
    for f in fields(audit):
        values = getattr(audit, f.name)
        if f.name in _OTHERS or (f.name == "learned_posterior" and values is None):
            continue
        if not isinstance(values, np.ndarray):
            raise ValueError(f"{f.name} is not an array")
        kind = {"row": "i", "given": "i", "suggested": "i", "is_label_issue": "b"}.get(f.name, "f")
        if values.shape != shapes.get(f.name, (N,)) or values.dtype.kind != kind:
            raise ValueError(f"{f.name} is {values.dtype} {list(values.shape)}")
        if kind == "f" and not (np.isfinite(values) & (values >= 0)).all():
            raise ValueError(f"{f.name} contains values that are not probabilities")
    if audit.pairs is not None and not _are_pairs(audit.pairs, N, K):
        raise ValueError("the checked rows do not fit together")
    if audit.copies is not None:
        audit.copies.position_of(audit.row)
    if not N or audit.row.min() < 0 or len(audit.error_rates) != K or not isinstance(audit.facts, dict):
        raise ValueError("parts are missing")
    rates = (audit.facts.get("noise_rate"), *audit.error_rates)
    for rate in rates:
        if not isinstance(rate, dict) or not {*map(type, map(rate.get, _RATE_KEYS))} <= {int, float}:
            raise ValueError("a rate is missing")
        if not {*map(type, map(rate.get, _INTERVAL_KEYS))} <= {int, float, NoneType}:
            raise ValueError("the interval of a rate is not a number")
    if not isinstance(audit.facts.get("trusted_accuracy"), int | float | None):
        raise ValueError("the accuracy on trusted rows is not a number")
    if not all(isinstance(text, str) for text in (*audit.classes, *map(audit.facts.get, _DESCRIPTIONS))):
        raise ValueError("a name or a description is not text")
    for name in ("given", "suggested"):
        if not ((getattr(audit, name) >= 0) & (getattr(audit, name) < K)).all():
            raise ValueError(f"{name} contains a number that is not one of {K} classes")


def _are_pairs(pairs: CheckedPairs, n_rows: int, n_classes: int) -> bool:
    """Whether arrays of checked rows fit together and to an audit."""
    m = len(pairs.true)
    if pairs.q.shape != (m, n_classes) or any(values.shape != (m,) for values in pairs[1:]):
        return False
    kinds = "".join(values.dtype.kind for values in pairs)
    limits = ((pairs.given, 0, n_classes), (pairs.true, 0, n_classes), (pairs.position, -1, n_rows))
    in_range = all(((values >= low) & (values < high)).all() for values, low, high in limits)
    return kinds == "fiibfi" and in_range and bool(np.isfinite(pairs.q).all() and np.isfinite(pairs.weight).all())
