"""What a finished run says about new rows: `predict`, and `warpi predict`. Heavy imports wait until they are needed."""

import csv
import io
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from warpi.errors import UserError
from warpi.utils.files import write_atomically
from warpi.utils.flags import Parser

if TYPE_CHECKING:
    from warpi.runs.run import Run
    from warpi.training.method import Method

log = logging.getLogger("warpi.predictions")


@dataclass(frozen=True, eq=False)
class Predictions:
    """Class probabilities of N new examples. Arrays are parallel; images that cannot be read are not among them."""

    row: NDArray[np.int64]  # [N] positions in the new data, from 0
    probabilities: NDArray[np.float64]  # [N, K]
    classes: tuple[str, ...]  # K names
    labels: Mapping[str, NDArray[np.int64]]  # those that the new data has, by the name of the column: [N], -1 unknown
    paths: tuple[str, ...] | None  # [N] of image files
    unread: int = 0  # how many images were left out

    def __len__(self) -> int:
        return len(self.row)

    @property
    def predicted(self) -> NDArray[np.int64]:
        """The most probable class of each.  [N]"""
        best: NDArray[np.int64] = self.probabilities.argmax(1)
        return best

    @property
    def accuracy(self) -> dict[str, tuple[float, int]]:
        """Against each column of labels: the share in percent of rows that agree, and how many rows have a label."""
        known = {name: y >= 0 for name, y in self.labels.items() if (y >= 0).any()}
        return {
            name: (100 * float((self.predicted == self.labels[name])[has].mean()), int(has.sum()))
            for name, has in known.items()
        }

    def to_csv(self, path: Path | str) -> None:
        """Write `row`, for images `path`, `predicted_label`, its `probability`, and a column `p_CLASS` a class."""
        text = io.StringIO(newline="")
        writer = csv.writer(text, lineterminator="\n")
        where = [] if self.paths is None else ["path"]
        writer.writerow(["row", *where, "predicted_label", "probability", *(f"p_{name}" for name in self.classes)])
        for i, (row, k, p) in enumerate(zip(self.row, self.predicted, self.probabilities, strict=True)):
            place = [] if self.paths is None else [self.paths[i]]
            writer.writerow([row, *place, self.classes[k], f"{p[k]:.8g}", *(f"{share:.8g}" for share in p)])
        write_atomically(Path(path), text.getvalue().encode())


def predict(run: "Path | str | Run", data: Path | str, *, device: str = "auto", **own: Any) -> Predictions:
    """Class probabilities of new data by the trained method of a run, as it was after its last epoch.

    `run` is a finished run folder, or what `fit` returned. `data` is of the kind that the run was trained on: a table
    with the same feature columns, an array of inputs, images in a folder or a manifest. It is encoded and standardised
    as the training rows were, which the checkpoint says; the data of the run is not needed. Labels may be absent. `own`
    are a method or a net of your own that the run was made with, as for `fit(resume=True)`.

    Where a checkpoint does not say it (of an older version), or a method of your own looks at inputs that it was
    trained on, the data of the run is read again: it must be where it was, unchanged. The numbers are the same.
    """
    from warpi.data.placeholder import InputsNotAvailable
    from warpi.runs.reopen import reopen, without_data
    from warpi.runs.run import Run

    if not Path(data).exists():
        raise UserError(f"no file or folder {str(data)!r}; give the new rows")
    if isinstance(run, Run):
        return _said(run.method, data, run.path)
    try:
        return _said(without_data(run, device, own), data, Path(run))
    except InputsNotAvailable as why:
        log.info("the data of the run is read again: %s", why)
        try:
            method = reopen(run, device, own).method
        except UserError as e:
            raise UserError(f"{e}; {why}") from e
    return _said(method, data, Path(run))


def _said(method: "Method", data: Path | str, folder: Path) -> Predictions:
    """What the trained method of a run says about new data, read as that of the run was."""
    import torch

    from warpi.data.split import Split
    from warpi.datasets.load import read_new_inputs
    from warpi.runs.resume import read_spec

    if (stored := read_spec(folder)) is None:
        raise UserError(f"there is no run in {folder} any more; give the folder that `warpi fit --out` made")
    task, first = method.task, dict(stored["spec"])
    begun = stored["environment"].get("folder")
    if first["root"] and begun and not Path(first["root"]).exists():
        first["root"] = str(Path(begun, first["root"]))
    new = read_new_inputs(str(data), first, task.train.examples, task.classes)
    n, where = len(new.examples), task.train.examples.device
    split = Split(new.examples.to(where), torch.arange(n), torch.zeros(n, dtype=torch.int64, device=where))
    size = 1000 if len(task.shape) == 1 else method.recipe.batch_size
    rows, p = zip(
        *((batch.rows.cpu(), method.predict(batch.x).double().cpu()) for batch in split.batches(size)), strict=True
    )
    row = torch.cat(rows).numpy()
    return Predictions(
        row,
        torch.cat(p).numpy(),
        task.classes,
        {name: y.numpy()[row] for name, y in new.labels.items()},
        None if new.paths is None else tuple(new.paths[i] for i in row),
        n - len(row),
    )


def command(argv: list[str]) -> None:
    parser = Parser(prog="warpi predict", description="The classes of new rows, by the classifier of a run.")
    parser.add_argument("run", type=Path, metavar="DIR", help="a finished run folder")
    parser.add_argument(
        "--data", required=True, metavar="PATH", help="new rows, in the form of the run's data; labels may be absent"
    )
    parser.add_output("--csv", "write row, predicted_label, probability, p_CLASS ...", required=True)
    parser.add_argument("--device", default="auto", metavar="auto|cpu|cuda", help="where to compute")
    parser.add_argument("--quiet", action="store_true", help="print nothing but errors")
    given = parser.read(argv)
    found = predict(given["run"], given["data"], device=given["device"])
    found.to_csv(given["csv"])
    if given["quiet"]:
        return
    lost = f", {found.unread} images that cannot be read are left out" if found.unread else ""
    print(f"{given['csv']}: {len(found)} rows of {given['data']}{lost}")
    for name, (share, n) in found.accuracy.items():
        doubt = "" if name in ("clean_label", "clean") else ", which may be wrong themselves"
        print(f"accuracy against the labels of {given['data']} ({name!r}, {n} rows{doubt}): {share:.2f} %")
