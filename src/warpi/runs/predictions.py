"""Predictions of a finished run for new rows. Modules that load torch are imported only when they are needed."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from warpi.errors import UserError, no_path
from warpi.utils.files import write_csv

if TYPE_CHECKING:
    from warpi.runs.run import Run
    from warpi.training.method import Method

log = logging.getLogger("warpi.runs")
MOST_DOUBLE = 1_000_000  # probabilities of more rows are float32
_ROWS_AT_ONCE = 20_000


@dataclass(frozen=True, eq=False)
class Predictions:
    """Class probabilities of N new examples, in parallel arrays. Images that cannot be read are omitted."""

    row: NDArray[np.int64]  # [N] positions in the new data, from 0
    probabilities: NDArray[np.floating]  # [N, K] float64, or float32 if there are many rows
    classes: tuple[str, ...]  # K names
    labels: Mapping[str, NDArray[np.int64]]  # [N] labels of the new data by column name; -1: unknown
    paths: tuple[str, ...] | None  # [N] of image files
    unread: int = 0  # number of images that could not be read
    copied: Mapping[str, Sequence[str]] = field(default_factory=dict)  # columns of the new data by name, such as ids

    def __len__(self) -> int:
        return len(self.row)

    @property
    def predicted(self) -> NDArray[np.int64]:
        """The most probable class of each example.  [N]"""
        best: NDArray[np.int64] = self.probabilities.argmax(1)
        return best

    @property
    def accuracy(self) -> dict[str, tuple[float, int]]:
        """By column of labels: accuracy in percent, and the number of rows that have a label."""
        known = {name: y >= 0 for name, y in self.labels.items() if (y >= 0).any()}
        return {
            name: (100 * float((self.predicted == self.labels[name])[has].mean()), int(has.sum()))
            for name, has in known.items()
        }

    def to_csv(self, path: Path | str) -> None:
        """Write one line per example: `row`, `path` for images, `predicted`, `probability`, and `p_CLASS` per class.

        Copied columns follow `row`. `predicted_label` equals `predicted`, for programs that read files of older
        versions.
        """
        tables = (self._table(slice(start, start + _ROWS_AT_ONCE)) for start in range(0, len(self), _ROWS_AT_ONCE))
        lines = (line for table in tables for line in zip(*table.values(), strict=True))
        write_csv(Path(path), list(self._table(slice(0, 0))), lines, errors="strict")

    def _table(self, part: slice) -> dict[str, Any]:
        """The columns of some of the lines. All lines at once would take many times the memory of the numbers."""
        from warpi.datasets.columns.copied import insert_copied

        probabilities = self.probabilities[part].astype(np.float64)
        names = [self.classes[k] for k in probabilities.argmax(1)]
        columns: dict[str, Any] = {"row": self.row[part].tolist()}
        if self.paths is not None:
            columns["path"] = self.paths[part]
        columns |= {"predicted": names, "predicted_label": names}
        columns["probability"] = [f"{p.max():.8g}" for p in probabilities]
        for k, name in enumerate(self.classes):
            columns[f"p_{name}"] = [f"{p:.8g}" for p in probabilities[:, k]]
        return insert_copied(columns, self.copied, range(len(self))[part])


def predict(
    run: "Path | str | Run",
    data: Path | str,
    *,
    device: str = "auto",
    missing: str | None = None,
    unknown: str | None = None,
    id: Sequence[str] = (),
    keep: Sequence[str] = (),
    **custom: Any,
) -> Predictions:
    """Class probabilities of new data by the trained method of a run, as it was after its last epoch.

    `run` is a finished run folder, or the result of `fit`. `data` must be of the same kind as the data of the run: a
    table with the same feature columns, an array of inputs, or images in a folder or a list. It is encoded and
    standardized like the training rows, as the checkpoint describes; the data of the run is not needed. Labels may be
    missing. `custom` are the custom method or network that the run was made with, as for `fit(resume=True)`.
    `missing` ("fill", "error") and `unknown` ("ignore", "error") say what to do with missing cells and unknown values
    of a table; by default as the run was trained. `id` names columns of a table that identify its rows and are copied
    to the result; by default those that differ in every row and are not features. `keep` names more columns to copy.

    If the checkpoint does not describe the data (older versions), or a custom method uses its training inputs, the
    data of the run is read again. It must be in its place, unchanged. The predictions are the same.
    """
    from warpi.data.placeholder import InputsNotAvailable
    from warpi.datasets.hugging_face.saved import plain_path
    from warpi.runs.reopen import reopen, reopen_without_data
    from warpi.runs.run import Run

    data = plain_path(str(data))
    if not Path(data).exists():
        raise no_path(data, advice="pass the new rows")
    options = {name: value for name, value in (("missing", missing), ("unknown", unknown)) if value is not None}
    copy = Copy(id, keep)
    if isinstance(run, Run):
        return _predict(run.method, data, run.path, options, copy)
    try:
        return _predict(reopen_without_data(run, device, custom), data, Path(run), options, copy)
    except InputsNotAvailable as reason:
        log.info("the data of the run is read again: %s", reason)
        try:
            method = reopen(run, device, custom).method
        except UserError as e:
            raise UserError(f"{reason}: {e}") from e
    return _predict(method, data, Path(run), options, copy)


class Copy(NamedTuple):
    """Columns of the new data to copy."""

    ids: Sequence[str]
    keep: Sequence[str]


def _predict(method: "Method", data: Path | str, folder: Path, options: Mapping[str, str], copy: Copy) -> Predictions:
    """Read new data like that of the run in a folder, and predict it."""
    import torch

    from warpi.data.placeholder import PlaceholderExamples
    from warpi.data.split import Split
    from warpi.datasets.columns.copied import read_copied_columns
    from warpi.datasets.load import read_new_inputs
    from warpi.runs.reopen import read_run_spec

    task = method.task
    stored = read_run_spec(folder)
    spec = {**stored["spec"], **options}
    started_in = stored["environment"].get("folder")
    if spec["root"] and started_in and not Path(spec["root"]).exists():
        spec["root"] = str(Path(started_in, spec["root"]))
    new = read_new_inputs(str(data), spec, task.train.examples, task.classes)
    n = len(new.examples)
    device = task.train.examples.device
    split = Split(new.examples.to(device), torch.arange(n), torch.zeros(n, dtype=torch.int64, device=device))
    size = 1000 if len(task.shape) == 1 else method.recipe.batch_size
    p = torch.empty((n, task.n_classes), dtype=torch.float64 if n <= MOST_DOUBLE else torch.float32)
    is_read = torch.zeros(n, dtype=torch.bool)
    for batch in split.batches(size):
        rows = batch.rows.cpu()
        p[rows] = method.predict(batch.x).to("cpu", p.dtype)
        is_read[rows] = True
    kept = is_read.nonzero().flatten().numpy()
    row = kept if new.rows is None else new.rows.numpy()[kept]
    examples = task.train.examples
    like = examples.like if isinstance(examples, PlaceholderExamples) else examples
    copied = read_copied_columns(data, getattr(like, "columns", None), *copy, part=None)
    return Predictions(
        row=row,
        probabilities=p.numpy() if len(kept) == n else p.numpy()[kept],
        classes=task.classes,
        labels={name: y.numpy()[kept] for name, y in new.labels.items()},
        paths=None if new.paths is None else tuple(new.paths[i] for i in kept),
        unread=n - len(kept) + new.unread,
        copied={name: [cells[i] for i in row] for name, cells in copied.items()},
    )
