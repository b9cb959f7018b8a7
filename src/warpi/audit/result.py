"""`Audit`: what is known about every label, as arrays, as a table, and as one file of a run folder. No torch."""

import csv
import io
import json
import struct
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from warpi.audit.label_scores import Floats, Ints, posterior
from warpi.errors import MALFORMED_ERRORS, UserError, missing_package
from warpi.utils.files import write_atomically

AUDIT_FILE = "audit.npz"
FORMAT = "warpi-audit/1"
COLUMNS = (
    *("row", "given_label", "suggested_label", "wrong_probability", "label_quality", "is_label_issue", "uncertainty"),
)
_RATE, _WORDS = ("n", "rate", "low", "high"), ("probabilities", "uncertainty")


@dataclass(frozen=True, eq=False)
class Audit:
    """Verdicts about the given labels of N examples of a data set with K classes. Arrays are parallel.

    `row` is the example's row in the data set as it was read (`Dataset.examples`, `Dataset.y`), in ascending order;
    rows of the trusted set are not among them, nor images that cannot be read. Labels are class numbers: `classes`
    names them.
    """

    row: Ints  # [N] rows of the data set
    given: Ints  # [N] the labels they were given
    suggested: Ints  # [N] the most probable class, given x and the label; mostly the given one
    wrong_probability: Floats  # [N] P(true != given | x, given)
    label_quality: Floats  # [N] 1 - wrong_probability
    is_label_issue: NDArray[np.bool_]  # [N] wrong_probability > threshold, and another class is more probable
    uncertainty: Floats  # [N] how far to trust wrong_probability; `facts["uncertainty"]` says what it is
    probabilities: Floats  # [N, K] p(true class | x): the classifier alone, without the given label
    T: Floats  # [K, K] estimated P(given = j | true = i): rows = true class, sum to 1
    classes: tuple[str, ...]  # K names
    error_rates: tuple[Mapping[str, Any], ...]  # a dict a class: class, n, rate, low, high (see `errors_by_class`)
    facts: Mapping[str, Any]  # run, method, folds, threshold, noise_rate {n, rate, low, high}; what probabilities and
    # uncertainty are, in words

    def __len__(self) -> int:
        return len(self.row)

    @property
    def posterior(self) -> Floats:
        """P(true class | x, given label).  [N, K]"""
        return posterior(self.probabilities, self.given, self.T)

    @property
    def ranked(self) -> Ints:
        """Positions (not rows) in these arrays, the most suspicious first.  [N]"""
        order: Ints = np.lexsort((self.row, -self.wrong_probability))
        return order

    def columns(self, paths: Sequence[str] | None = None) -> dict[str, NDArray[Any]]:
        """The columns of the table, labels by the names of their classes.

        `paths` are the files of all rows of the data set, where they are images (`Dataset.files.paths`): a last column.
        """
        names = np.array(self.classes, dtype=object)
        values = (self.row, names[self.given], names[self.suggested], self.wrong_probability, self.label_quality)
        found = dict(zip(COLUMNS, (*values, self.is_label_issue, self.uncertainty), strict=True))
        if paths is not None:  # names of files may be any bytes; `row` says which is meant
            known = [paths[row].encode(errors="backslashreplace").decode() for row in self.row.tolist()]
            found["path"] = np.array(known, dtype=object)
        return found

    def to_csv(self, path: Path | str, paths: Sequence[str] | None = None) -> None:
        """Write the table, a line an example in the order of the rows; `paths` as in `columns`."""
        text, columns = io.StringIO(newline=""), self.columns(paths)
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(columns)
        for cells in zip(*(column.tolist() for column in columns.values()), strict=True):
            writer.writerow([f"{cell:.6g}" if isinstance(cell, float) else cell for cell in cells])
        write_atomically(Path(path), text.getvalue().encode())

    def to_parquet(self, path: Path | str, paths: Sequence[str] | None = None) -> None:
        """Write the table as parquet; needs the extra `tables`. `paths` as in `columns`."""
        try:
            import pandas as pd

            content = io.BytesIO()
            pd.DataFrame(self.columns(paths)).to_parquet(content, index=False)
        except ImportError as e:
            raise missing_package("pandas" if e.name == "pandas" else "pyarrow", "writing .parquet", "tables") from e
        write_atomically(Path(path), content.getvalue())

    def cleanlab(self) -> dict[str, NDArray[Any]]:
        """The arguments `labels` [N] and `pred_probs` [N, K] of cleanlab's functions, rows in this order.

            cleanlab.filter.find_label_issues(**audit.cleanlab())

        The probabilities do not know the given label; cleanlab wants them out of sample: `audit(run, folds=5)`.
        """
        return {"labels": self.given, "pred_probs": self.probabilities}

    @property
    def noise_matrix(self) -> Floats:
        """T as cleanlab has it: P(given = i | true = j), columns sum to 1.  [K, K]"""
        return self.T.T

    def label_issues(self) -> Any:
        """The table as a pandas frame with the columns and class numbers of `CleanLearning.get_label_issues()`, for
        `CleanLearning(clf).fit(X, labels, label_issues=...)`."""
        try:
            import pandas as pd
        except ImportError as e:
            raise missing_package("pandas", "a data frame", "tables") from e
        return pd.DataFrame(
            {
                "is_label_issue": self.is_label_issue,
                "label_quality": self.label_quality,
                "given_label": self.given,
                "predicted_label": self.suggested,
            }
        )

    def summary(self) -> dict[str, Any]:
        """All that is not an array over the examples, as JSON takes it."""
        return {
            "n": len(self),
            "n_issues": int(self.is_label_issue.sum()),
            "classes": list(self.classes),
            "error_rates": [dict(rate) for rate in self.error_rates],
            "T": self.T.tolist(),
            **self.facts,
        }

    def save(self, folder: Path | str) -> Path:
        """Store it in a run folder, as one file."""
        words = ("classes", "error_rates", "facts")
        arrays = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in words}
        about = {"format": FORMAT, **{name: getattr(self, name) for name in words}}
        content = io.BytesIO()
        np.savez_compressed(content, about=np.array(json.dumps(about)), **arrays)
        path = Path(folder) / AUDIT_FILE
        write_atomically(path, content.getvalue())
        return path


def read_arrays(path: Path) -> dict[str, NDArray[Any]]:
    """The arrays of a .npz file; ValueError where it is damaged. Nothing is unpickled."""
    try:
        with np.load(io.BytesIO(path.read_bytes()), allow_pickle=False) as stored:
            return {name: stored[name] for name in stored.files}
    except (OSError, KeyError, EOFError, zipfile.BadZipFile, zlib.error, struct.error) as e:
        raise ValueError(str(e)) from e


def read_audit(folder: Path | str) -> Audit:
    """What `warpi audit` stored in a run folder. Nothing is trained and nothing unpickled."""
    path = Path(folder) / AUDIT_FILE
    if not path.exists():
        raise UserError(f"there is no audit in {folder}; make one with: warpi audit {folder}")
    try:
        arrays: dict[str, Any] = read_arrays(path)
        about = json.loads(str(arrays.pop("about")))
        if about.pop("format") != FORMAT:
            raise ValueError("another format")
        about["classes"], about["error_rates"] = tuple(about["classes"]), tuple(about["error_rates"])
        found = Audit(**arrays, **about)
        _check(found)
        return found
    except MALFORMED_ERRORS as e:
        raise UserError(f"{path} is no audit of this version ({e}); make it anew with: warpi audit {folder}") from e


def _check(found: Audit) -> None:
    """ValueError where arrays do not fit one another."""
    N, K = len(found.row), len(found.classes)
    shapes = {"probabilities": (N, K), "T": (K, K)}
    for f in fields(found):
        values = getattr(found, f.name)
        if not isinstance(values, np.ndarray):
            continue
        kind = {"row": "i", "given": "i", "suggested": "i", "is_label_issue": "b"}.get(f.name, "f")
        if values.shape != shapes.get(f.name, (N,)) or values.dtype.kind != kind:
            raise ValueError(f"{f.name} is {values.dtype} {list(values.shape)}")
        if kind == "f" and not (np.isfinite(values) & (values >= 0)).all():
            raise ValueError(f"{f.name} holds what is no probability")
    if not N or found.row.min() < 0 or len(found.error_rates) != K or not isinstance(found.facts, dict):
        raise ValueError("parts are lacking")
    rates = (found.facts.get("noise_rate"), *found.error_rates)
    if not all(isinstance(r, dict) and {*map(type, map(r.get, _RATE))} <= {int, float} for r in rates):
        raise ValueError("a rate is lacking")
    if not isinstance(found.facts.get("trusted_accuracy"), int | float | None):
        raise ValueError("the accuracy on trusted rows is no number")
    if not all(isinstance(text, str) for text in (*found.classes, *map(found.facts.get, _WORDS))):
        raise ValueError("a name or a description is no text")
    for name in ("given", "suggested"):
        if not ((getattr(found, name) >= 0) & (getattr(found, name) < K)).all():
            raise ValueError(f"{name} holds what is no class of {K}")
