"""Corrupted labels as a value, and as a file by which two papers can share the same noise."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from warpi.data.dataset import Dataset, check_labels
from warpi.data.examples import TensorExamples
from warpi.data.numeric import Columns
from warpi.datasets.text_files import reading, shorten_list
from warpi.errors import UserError
from warpi.noise.kinds import NoisyLabels
from warpi.utils.files import sha256, write_atomically

FORMAT = "warpi-noise/1"


def hash_labels(y: Tensor, replaced: Tensor | None = None) -> str:
    """The sha256 that reports print and manifests hold: rows 0..N-1, labels, replaced, as little-endian int64."""
    return _hash(torch.arange(len(y)), y, replaced)


def hash_inputs(dataset: Dataset) -> dict[str, str]:
    """By what a data set is known again, row by row in order: hashes that no option of reading it changes.

    Of image files the paths below the folder that holds them all, of a table each column that was read (numbers as
    float32, else the words), of anything else the inputs as they are held.
    """
    if dataset.files:
        paths = dataset.files.paths
        above = os.path.commonpath((min(paths), max(paths)))  # what these two share, all in between do
        return {"path": sha256("\0".join(path.removeprefix(above).lstrip("/") for path in paths))}
    columns, examples = dataset.encoding, dataset.examples
    if not isinstance(columns, Columns) or not isinstance(examples, TensorExamples):
        return {"x": examples.digest()}
    x, at, found = examples.x.cpu().numpy(), 0, dict[str, str]()
    for name, words in columns.categories.items():
        if words is None:
            found[name] = sha256(x[:, at].astype("<f4").tobytes())
        else:
            found[name] = sha256("\0".join(words[k] for k in x[:, at : at + len(words)].argmax(1)))
        at += 1 if words is None else len(words)
    return found


def write_noise_file(
    path: Path | str,
    *,
    data: Dataset | str,
    noise: str,
    seed: int,
    n_classes: int | None = None,
    labels: NoisyLabels,
) -> None:
    """Write the labels of all rows of a data set. The file appears whole or not at all.

    Of a data set that is only named, `n_classes` must be said, and nothing binds the labels to its rows.
    """
    of: dict[str, Any] = {"data": data, "n_classes": n_classes}
    if isinstance(data, str):
        if n_classes is None:
            raise UserError(f"noise manifest {path}: n_classes is missing; give it, or the data set itself as data")
    else:
        check_labels(labels.y, len(data.y), data.n_classes, f"labels for the noise manifest {path}")
        of = {"data": data.name, "n_classes": data.n_classes, "classes": data.classes, "inputs": hash_inputs(data)}
    content = {
        "format": FORMAT,
        **of,
        "noise": noise,
        "seed": seed,
        "sha256": hash_labels(labels.y, labels.replaced),
        "T": None if labels.T is None else labels.T.tolist(),
        "rows": list(range(len(labels.y))),
        "labels": labels.y.tolist(),
    }
    if labels.replaced is not None:
        content["replaced"] = labels.replaced.tolist()
    lines = ",\n".join(f"{json.dumps(key)}: {json.dumps(value, allow_nan=False)}" for key, value in content.items())
    write_atomically(Path(path), f"{{\n{lines}\n}}\n".encode())


def read_noise_file(path: Path | str, dataset: Dataset) -> NoisyLabels:
    """The labels that a manifest holds for this data set, in the order of its rows, which the file may list in any."""
    content = _load(path)
    for key, expected in (("data", dataset.name), ("n_classes", dataset.n_classes)):
        if content.get(key) != expected:
            raise UserError(f"noise manifest {path}: {key} is {content.get(key)!r}, but this data set has {expected!r}")
    if (was := content.get("classes", [*dataset.classes])) != [*dataset.classes]:
        was, now = shorten_list(was if isinstance(was, list) else [was]), shorten_list(dataset.classes)
        raise UserError(
            f"noise manifest {path}: its classes are {was}, those of this data set {now}; make the manifest again"
        )
    if "inputs" in content:
        _check_inputs(path, content["inputs"], dataset)
    rows, labels = _integers(path, content, "rows"), _integers(path, content, "labels")
    replaced = _integers(path, content, "replaced") if "replaced" in content else None
    if content.get("sha256") != _hash(rows, labels, replaced):
        raise UserError(f"noise manifest {path}: the checksum does not match, the file was changed; get it anew")
    n = len(dataset.examples)
    if not torch.equal(rows.sort().values, torch.arange(n)):
        raise UserError(f"noise manifest {path}: has {len(rows)} rows, must name each of the {n} rows of the data once")
    check_labels(labels, n, dataset.n_classes, f"noise manifest {path}")
    order = rows.argsort()
    if replaced is not None:
        if len(replaced) != n or bool((replaced < -1).any()):
            raise UserError(f"noise manifest {path}: 'replaced' must be one row of the other set, or -1, a row")
        replaced = replaced[order]
    return NoisyLabels(labels[order], _transition(path, content.get("T"), dataset.n_classes), replaced)


def read_noise_name(path: Path | str) -> str:
    """The noise that a manifest was made with, as its maker wrote it."""
    return str(_load(path).get("noise"))


def _load(path: Path | str) -> dict[str, Any]:
    with reading(f"the noise manifest {path}"):
        text = Path(path).read_bytes()
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:  # not JSON, or not even text
        raise UserError(f"noise manifest {path} is not JSON ({error}); make one with: warpi corrupt") from error
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        got = content.get("format") if isinstance(content, dict) else None
        raise UserError(f"noise manifest {path}: format is {got!r}, must be {FORMAT!r}")
    return content


def _check_inputs(path: Path | str, stored: Any, dataset: Dataset) -> None:
    """Refuse labels of other rows. Columns that only one of the two has may have been dropped in the other."""
    if not isinstance(stored, dict):
        raise UserError(f"noise manifest {path}: 'inputs' must be hashes by name, got {stored!r:.40}; leave it out")
    found = hash_inputs(dataset)
    both = [name for name in found if name in stored]
    changed = [name for name in both if stored[name] != found[name]]
    was, now, seen = (shorten_list(map(repr, names)) for names in (stored, found, changed))
    if not both:
        raise UserError(
            f"noise manifest {path} knows the rows of {dataset.name} by {was}, and the data has {now} only; read the "
            "data with some of the same columns, or make the manifest again"
        )
    if changed:
        raise UserError(
            f"noise manifest {path} is not for the rows of {dataset.name} as they are: since it was made some were "
            f"moved, renamed, added, removed or changed (seen in {seen}); restore them and their order, or make the "
            "manifest again (warpi corrupt, or warpi review --export)"
        )


def _integers(path: Path | str, content: Mapping[str, Any], key: str) -> Tensor:
    values = content.get(key)
    if not isinstance(values, list) or not all(type(v) is int and abs(v) < 2**63 for v in values):
        raise UserError(f"noise manifest {path}: {key!r} must be a list of whole numbers")
    return torch.tensor(values, dtype=torch.int64)


def _transition(path: Path | str, values: Any, n_classes: int) -> Tensor | None:
    if values is None:
        return None
    wrong = UserError(f"noise manifest {path}: 'T' must be {n_classes} x {n_classes} probabilities whose rows sum to 1")
    try:
        T = torch.tensor(values, dtype=torch.float64)
    except (TypeError, ValueError) as error:
        raise wrong from error
    if T.shape != (n_classes, n_classes) or not bool((T >= 0).all()) or not bool(((T.sum(1) - 1).abs() < 1e-6).all()):
        raise wrong
    return T


def _hash(*parts: Tensor | None) -> str:
    return sha256(*(part.cpu().numpy().astype("<i8").tobytes() for part in parts if part is not None))
