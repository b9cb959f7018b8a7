"""Files of noisy labels, so that papers can share the same noise."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from warpi.data.dataset import Dataset, check_labels
from warpi.data.examples import TensorExamples
from warpi.data.numeric import CategoryColumn, Columns
from warpi.datasets.delimited_files import reading, shorten_list
from warpi.errors import UserError
from warpi.noise.kinds import NoisyLabels
from warpi.noise.matrix_file import check_matrix, read_rows
from warpi.utils.files import read_json, sha256, write_atomically

FORMAT = "warpi-noise/1"


def hash_labels(y: Tensor, replaced: Tensor | None = None) -> str:
    """SHA-256 of the rows 0..N-1, the labels and `replaced` as little-endian int64, as in reports and noise files."""
    return _hash(torch.arange(len(y)), y, replaced)


def hash_inputs(dataset: Dataset) -> dict[str, str]:
    """Hashes that identify the rows of a data set and their order, no matter how it is read.

    For image files, this is a hash of their paths below their common folder; for a table, one hash per column (of
    numbers as float32, or of words); otherwise a hash of the stored inputs.
    """
    if dataset.files:
        paths = dataset.files.paths
        common = os.path.commonpath((min(paths), max(paths)))  # also of all paths in between
        return {"path": sha256("\0".join(path.removeprefix(common).lstrip("/") for path in paths))}
    columns = dataset.encoding
    examples = dataset.examples
    if not isinstance(columns, Columns) or not isinstance(examples, TensorExamples):
        return {"x": examples.digest()}
    x = examples.x.cpu().numpy()
    hashes: dict[str, str] = {}
    for name, column, part in columns.blocks():
        if isinstance(column, CategoryColumn):
            words = (*column.categories, "\1other")
            hashes[name] = sha256("\0".join(words[k] for k in x[:, part].argmax(1)))
        else:
            hashes[name] = sha256(x[:, part].astype("<f4").tobytes())
    return hashes


def write_noise_file(
    path: Path | str,
    *,
    data: Dataset | str,
    noise: str,
    seed: int,
    n_classes: int | None = None,
    labels: NoisyLabels,
) -> None:
    """Write the labels of all rows of a data set, atomically.

    `data` may be only the name of a data set. Then `n_classes` is required, and the file cannot check that the rows are
    the same when it is read.
    """
    source: dict[str, Any] = {"data": data, "n_classes": n_classes}
    if isinstance(data, str):
        if n_classes is None:
            raise UserError(f"noise file {path}: n_classes is missing; pass it, or pass the data set itself as data")
    else:
        check_labels(labels.y, len(data.y), data.n_classes, f"labels for the noise file {path}")
        source = {"data": data.name, "n_classes": data.n_classes, "classes": data.classes, "inputs": hash_inputs(data)}
    content = {
        "format": FORMAT,
        **source,
        "noise": noise,
        "seed": seed,
        "sha256": hash_labels(labels.y, labels.replaced),
        "T": None if labels.T is None else labels.T.tolist(),
        "rows": list(range(len(labels.y))),
        "labels": labels.y.tolist(),
    }
    if labels.replaced is not None:
        content["replaced"] = labels.replaced.tolist()
    for name, known in (("before_audit", labels.before_audit), ("unchecked", labels.unchecked)):
        if known is not None and bool((known >= 0).any()):
            content[name] = known.tolist()
    if len(labels.dropped):
        content["dropped"] = labels.dropped.tolist()
    if labels.checked is not None:
        content["checked"] = labels.checked.nonzero().flatten().tolist()
    lines = ",\n".join(f"{json.dumps(key)}: {json.dumps(value, allow_nan=False)}" for key, value in content.items())
    write_atomically(Path(path), f"{{\n{lines}\n}}\n".encode())


def read_noise_file(path: Path | str, dataset: Dataset) -> NoisyLabels:
    """Read the labels of a data set, in the order of its rows. The file may list the rows in any order."""
    content = _load(path)
    for key, expected in (("data", dataset.name), ("n_classes", dataset.n_classes)):
        if content.get(key) != expected:
            raise UserError(f"noise file {path}: {key} is {content.get(key)!r}, but this data set has {expected!r}")
    classes = content.get("classes", [*dataset.classes])
    if classes != [*dataset.classes]:
        stored = shorten_list(classes if isinstance(classes, list) else [classes])
        current = shorten_list(dataset.classes)
        raise UserError(f"noise file {path}: its classes are {stored}, not {current} as in the data; create it again")
    if "inputs" in content:
        _check_inputs(path, content["inputs"], dataset)
    rows = _integers(path, content, "rows")
    labels = _integers(path, content, "labels")
    replaced = _integers(path, content, "replaced") if "replaced" in content else None
    if content.get("sha256") != _hash(rows, labels, replaced):
        raise UserError(f"noise file {path} was changed: its checksum does not match; copy or create it again")
    n = len(dataset.examples)
    if not torch.equal(rows.sort().values, torch.arange(n)):
        raise UserError(f"noise file {path} has {len(rows)} rows, but must list each of the {n} rows of the data once")
    check_labels(labels, n, dataset.n_classes, f"noise file {path}")
    order = rows.argsort()
    if replaced is not None:
        if len(replaced) != n or bool((replaced < -1).any()):
            raise UserError(f"noise file {path}: 'replaced' must contain, per row, a row of the other set or -1")
        replaced = replaced[order]
    T = content.get("T")
    if T is not None:
        T = check_matrix(f"noise file {path}", read_rows(f"noise file {path}", T), dataset.classes, dataset.classes)
    before, unchecked = (_some_labels(path, content, name, dataset, order) for name in ("before_audit", "unchecked"))
    dropped, checked = (_some_rows(path, content, name, n) for name in ("dropped", "checked"))
    is_checked = torch.zeros(n, dtype=torch.bool)
    is_checked[checked] = True
    return NoisyLabels(labels[order], T, replaced, before, dropped, unchecked, is_checked if len(checked) else None)


def _some_rows(path: Path | str, content: Mapping[str, Any], name: str, n: int) -> Tensor:
    """[M] rows of the data that a file names, if it does."""
    rows = _integers(path, {name: [], **content}, name)
    if bool(((rows < 0) | (rows >= n)).any()):
        raise UserError(f"noise file {path}: {name!r} must contain rows of the data, from 0 to {n - 1}")
    return rows


def _some_labels(
    path: Path | str, content: Mapping[str, Any], name: str, data: Dataset, order: Tensor
) -> Tensor | None:
    """[N] labels that are known for some of the rows, -1 for the others; None if the file has none."""
    if name not in content:
        return None
    labels = _integers(path, content, name)
    check_labels(labels.clamp(min=0), len(order), data.n_classes, f"{name!r} in the noise file {path}")
    return labels[order]


def read_noise_name(path: Path | str) -> str:
    """The description of the noise in a file, such as `pair:0.4`."""
    return str(_load(path).get("noise"))


def _load(path: Path | str) -> dict[str, Any]:
    with reading(f"the noise file {path}"):
        content = read_json(Path(path), "create a noise file with: warpi corrupt")
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        stored = content.get("format") if isinstance(content, dict) else None
        raise UserError(f"noise file {path}: the format must be {FORMAT!r}, got {stored!r}")
    return content


def _check_inputs(path: Path | str, stored: Any, dataset: Dataset) -> None:
    """Raise an error if the labels are for other rows. Columns may be missing on one side, because of `--drop`."""
    if not isinstance(stored, dict):
        raise UserError(f"noise file {path}: 'inputs' must be hashes by name, got {stored!r:.40}; remove it")
    hashes = hash_inputs(dataset)
    common = [name for name in hashes if name in stored]
    if not common:
        names, columns = (shorten_list(map(repr, each)) for each in (stored, hashes))
        raise UserError(
            f"noise file {path} identifies the rows of {dataset.name} by {names}, but the data has only {columns}; "
            "read the data with some of the same columns, or create the file again"
        )
    changed = [name for name in common if stored[name] != hashes[name]]
    if changed:
        raise UserError(
            f"noise file {path} does not match the rows of {dataset.name}: rows were moved, renamed, added, removed or "
            f"changed since it was made (in {shorten_list(map(repr, changed))}); restore them and their order, or "
            "create the file again (warpi corrupt, or warpi review --export)"
        )


def _integers(path: Path | str, content: Mapping[str, Any], key: str) -> Tensor:
    values = content.get(key)
    if not isinstance(values, list) or not all(type(v) is int and abs(v) < 2**63 for v in values):
        raise UserError(f"noise file {path}: {key!r} must be a list of integers")
    return torch.tensor(values, dtype=torch.int64)


def _hash(*parts: Tensor | None) -> str:
    return sha256(*(part.cpu().numpy().astype("<i8").tobytes() for part in parts if part is not None))
