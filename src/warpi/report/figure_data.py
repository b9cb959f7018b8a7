"""`figures.npz`: small arrays in a run folder, from which figures are drawn without the weights and the data."""

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from warpi.audit.result import read_arrays as read_npz, write_arrays as write_npz
from warpi.errors import UserError

Array = npt.NDArray[Any]  # float32, except the names of the classes
Arrays = dict[str, Array]

FILE = "figures.npz"
EDGES = np.linspace(0, 10, 51)  # bins of the losses; the last one also counts larger losses
BINS = 15  # of the calibration, as in `training.metrics`
KINDS = ("right", "wrong", "unknown")  # kinds of given labels: the rows of a histogram
_COORDINATES = [f"{at}{of}" for at in ("given", "predicted", "other") for of in ("", "_mean")]
_GROUPS = [  # the first group is always present, each of the others completely or not at all
    ["classes", "n_kind", "loss_raw", "loss_raw_mean", "T_classifier"],
    ["loss_rectified", "loss_rectified_mean", "v_count"],
    ["bin_count", "bin_confidence", "bin_accuracy"],
    [f"v_{name}" for name in _COORDINATES],
    [f"sigma_{name}" for name in _COORDINATES],
]


def read_arrays(folder: Path) -> Arrays | None:
    """The arrays in a run folder; None if there are none."""
    file = folder / FILE
    if not file.exists():
        return None
    try:
        arrays = read_npz(file)
        _check(arrays)
        return arrays
    except ValueError as error:
        raise UserError(f"cannot read {file} ({error}); delete it and run warpi figures to compute it again") from error


def _check(arrays: Arrays) -> None:
    """Raise a ValueError if arrays are missing or their shapes do not match."""
    for names in _GROUPS:
        absent = [name for name in names if name not in arrays]
        if absent and (len(absent) < len(names) or names is _GROUPS[0]):
            raise ValueError(f"{absent[0]} is missing")
    K = arrays["classes"].size
    kinds = len(KINDS)
    shapes = {"classes": (K,), "n_kind": (kinds,), "loss_raw": (kinds, len(EDGES) - 1), "bin_count": (BINS,)}
    shapes |= {"loss_rectified": shapes["loss_raw"], "bin_confidence": (BINS,), "bin_accuracy": (BINS,)}
    for name, values in arrays.items():
        shape = shapes.get(name, (kinds,) if name.endswith("_mean") else (K, K))
        if values.shape != shape or values.dtype.kind != ("U" if name == "classes" else "f"):
            raise ValueError(f"{name} is {values.dtype} {list(values.shape)}")


def write_arrays(folder: Path, arrays: Arrays) -> None:
    write_npz(folder / FILE, dict(sorted(arrays.items())))


def matrix_error(estimate: Array, true: Array) -> float:
    """Error of an estimated transition matrix in percent: the mean over its rows of the total variation distance.

    The distance is 1/2 sum_j |T_ij - T'_ij|. A row of unknown values counts as completely wrong.
    """
    rows = 0.5 * np.abs(estimate.astype(np.float64) - true).sum(axis=1)
    return 100 * float(np.where(np.isnan(rows), 1.0, rows).mean())
