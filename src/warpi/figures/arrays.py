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

from warpi.atomic import write_atomically
from warpi.errors import UserError

Array = npt.NDArray[Any]  # float32, and the names of the classes
Arrays = dict[str, Array]

FILE = "figures.npz"
EDGES = np.linspace(0, 10, 51)  # of the bins of the losses; the last one holds all that is above
KINDS = ("right", "wrong", "unknown")  # given labels, as the truth has it: the rows of a histogram


def read(folder: Path) -> Arrays | None:
    """The arrays beside a run; None where there are none."""
    file = folder / FILE
    try:
        with np.load(file, allow_pickle=False) as stored:
            return {name: stored[name] for name in stored.files}
    except FileNotFoundError:
        return None
    # All that numpy and zipfile make of broken bytes.
    except (
        OSError, ValueError, EOFError, RuntimeError, SyntaxError, MemoryError,
        tokenize.TokenError, struct.error, zlib.error, zipfile.BadZipFile,
    ) as error:  # fmt: skip
        raise UserError(f"cannot read {file} ({error}); delete it, and run warpi figures where the run is") from error


def write(folder: Path, arrays: Arrays) -> None:
    content = io.BytesIO()
    np.savez_compressed(content, allow_pickle=False, **dict(sorted(arrays.items())))
    write_atomically(folder / FILE, content.getvalue())


def error(estimate: Array, true: Array) -> float:
    """How far an estimated transition matrix is from the true one, in percent: the mean over its rows of the total
    variation 1/2 sum_j |T_ij - T'_ij|. A row of which nothing is known counts as wholly wrong."""
    rows = 0.5 * np.abs(estimate.astype(np.float64) - true).sum(axis=1)
    return 100 * float(np.where(np.isnan(rows), 1.0, rows).mean())
