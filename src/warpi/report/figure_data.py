"""`figures.npz`: the small arrays beside a run from which its figures are drawn, without its weights and data."""

import io
import struct
import tokenize
import zipfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from warpi.errors import UserError
from warpi.utils.files import write_atomically

Array = npt.NDArray[Any]  # float32, and the names of the classes
Arrays = dict[str, Array]

FILE = "figures.npz"
EDGES = np.linspace(0, 10, 51)  # of the bins of the losses; the last one holds all that is above
BINS = 15  # of the calibration, as in `evaluate.scores`
KINDS = ("right", "wrong", "unknown")  # given labels, as the truth has it: the rows of a histogram
_TOGETHER = [["classes", "n_kind", "loss_raw", "loss_raw_mean", "T_classifier"]]  # always; the others all, or none
_TOGETHER += [["loss_rectified", "loss_rectified_mean", "v_count"], ["bin_count", "bin_confidence", "bin_accuracy"]]
_TOGETHER += [
    [f"{n}_{at}{of}" for at in ("given", "predicted", "other") for of in ("", "_mean")] for n in ("v", "sigma")
]


def read(folder: Path) -> Arrays | None:
    """The arrays beside a run; None where there are none."""
    file = folder / FILE
    try:
        with np.load(file, allow_pickle=False) as stored:
            arrays = {name: stored[name] for name in stored.files}
        _check(arrays)
        return arrays
    except FileNotFoundError:
        return None
    # All that numpy and zipfile make of broken bytes.
    except (
        OSError, ValueError, EOFError, RuntimeError, SyntaxError, MemoryError,
        tokenize.TokenError, struct.error, zlib.error, zipfile.BadZipFile,
    ) as error:  # fmt: skip
        raise UserError(f"cannot read {file} ({error}); delete it, and run warpi figures where the run is") from error


def _check(arrays: Arrays) -> None:
    """ValueError where arrays are lacking, or do not fit one another."""
    for names in _TOGETHER:
        absent = [name for name in names if name not in arrays]
        if absent and (len(absent) < len(names) or names is _TOGETHER[0]):
            raise ValueError(f"there is no {absent[0]}")
    K, kinds = arrays["classes"].size, len(KINDS)
    shapes = {"classes": (K,), "n_kind": (kinds,), "loss_raw": (kinds, len(EDGES) - 1), "bin_count": (BINS,)}
    shapes |= {"loss_rectified": shapes["loss_raw"], "bin_confidence": (BINS,), "bin_accuracy": (BINS,)}
    for name, values in arrays.items():
        shape = shapes.get(name, (kinds,) if name.endswith("_mean") else (K, K))
        if values.shape != shape or values.dtype.kind != ("U" if name == "classes" else "f"):
            raise ValueError(f"{name} is {values.dtype} {list(values.shape)}")


def write(folder: Path, arrays: Arrays) -> None:
    content = io.BytesIO()
    np.savez_compressed(content, allow_pickle=False, **dict(sorted(arrays.items())))
    write_atomically(folder / FILE, content.getvalue())


def error(estimate: Array, true: Array) -> float:
    """How far an estimated transition matrix is from the true one, in percent: the mean over its rows of the total
    variation 1/2 sum_j |T_ij - T'_ij|. A row of which nothing is known counts as wholly wrong."""
    rows = 0.5 * np.abs(estimate.astype(np.float64) - true).sum(axis=1)
    return 100 * float(np.where(np.isnan(rows), 1.0, rows).mean())
