"""Compute the vectors of images or texts, and store them so that a killed process can continue."""

import hashlib
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from warpi.data.examples import Scale
from warpi.data.image_files import FileExamples
from warpi.datasets.embedding.embedders import Embedder, open_embedder
from warpi.datasets.embedding.folder import (
    FORMAT,
    SHARD_ROWS,
    FeatureFolder,
    Records,
    is_features,
    make_records,
    n_shards,
    rows_of_shard,
)
from warpi.datasets.embedding.sources import Source, list_source
from warpi.datasets.hugging_face.extract import LIST, extract_images
from warpi.datasets.hugging_face.saved import find_image_column, is_dataset, is_saved, plain_path
from warpi.errors import UserError
from warpi.utils.devices import pick_device
from warpi.utils.files import sha256
from warpi.utils.leases import one_writer
from warpi.utils.time_left import TimeLeft

IMAGES = "images"  # the folder of the images of a Hugging Face data set, inside that of the features
PARTIAL_SECONDS = 15.0  # a shard that is not complete is stored this often
BATCH = 64  # images or texts per call of an embedder


class EmbedResult(NamedTuple):
    """The result of `embed`."""

    path: Path
    rows: int  # rows with a vector
    dimensions: int
    computed: int  # rows that this call computed; the others existed before


def embed(
    source: Path | str,
    out: Path | str,
    embedder: "str | nn.Module | Callable[..., Any]",
    *,
    root: Path | str | None = None,
    label: str | None = None,
    text: str | None = None,
    image_size: int | None = None,
    batch_size: int = BATCH,
    shard_rows: int = SHARD_ROWS,
    device: str = "auto",
    quiet: bool = True,
) -> EmbedResult:
    """Embed images or texts once, and write a folder of features that `fit(data=...)` reads as a data set.

    `source` is a folder of images or .txt files with one folder per class, a list of images, a table with a column
    of texts, or `hf:FOLDER`, a Hugging Face data set with a column of images or texts. `embedder` is a name such as
    `timm:resnet50`, a network, or a function from a batch of images [B, 3, S, S] (or a list of texts) to vectors
    [B, D]. `root` is the folder of listed images; `label` and `text` are columns of a table. A file contains
    `shard_rows` vectors. If the folder `out` already contains a part of the same features, only the rest is computed.
    """
    path = Path(out)
    where = pick_device(device)
    data = _plain_path(source)
    listed = None
    if text is not None or not is_saved(Path(data)) or find_image_column(Path(data)) is None:
        listed = list_source(data, root=Path(root) if root else None, label=label, text=text)
    model = open_embedder(embedder, listed.kind if listed else "images", where, image_size)
    _check_out(path, data)
    with one_writer(path):
        if listed is None:
            files = extract_images(Path(data), path / IMAGES, label, overwrite=not is_features(path))
            listed = replace(list_source(str(files)), name=Path(data).stem)
        settings = {
            "source": str(source),
            "columns": {"label": label, "text": text},
            "batch_size": batch_size,
            "shard_rows": shard_rows,
        }
        return _fill_folder(FeatureFolder(path), listed, model, settings, where, quiet)


def embed_in_memory(
    listed: Source, model: Embedder, device: torch.device, rows: Sequence[int] | None = None, quiet: bool = True
) -> tuple[NDArray[np.int64], Tensor]:
    """The rows that can be read, and their vectors [n, D] as float16."""
    chosen = np.arange(len(listed.inputs)) if rows is None else np.asarray(rows, np.int64)
    batches = [chosen[i : i + BATCH] for i in range(0, len(chosen), BATCH)]
    progress = TimeLeft(len(chosen), listed.kind, quiet=quiet)
    parts = []
    for batch, records in zip(batches, _compute(listed, model, batches, device), strict=True):
        parts.append(records)
        progress.add(len(batch))
    progress.close()
    joined = _join(parts, listed)
    return joined["row"].copy(), torch.from_numpy(joined["vector"].copy())


def _plain_path(source: Path | str) -> str:
    if is_dataset(source):
        raise UserError("`embed` reads data sets from disk: dataset.save_to_disk(FOLDER), then embed('hf:FOLDER', ...)")
    return plain_path(str(source))


def _check_out(path: Path, source: str) -> None:
    """Refuse a folder with other files, and one inside the folder of the images."""
    if Path(source).is_dir() and path.resolve().is_relative_to(Path(source).resolve()):
        raise UserError(f"--out {path} is inside {source}; choose a folder outside of it")
    known = [IMAGES] if (path / IMAGES / LIST).is_file() else []  # an interrupted call has written them
    others = [e.name for e in path.iterdir() if e.name[0] != "." and e.name not in known] if path.is_dir() else []
    if others and not is_features(path):
        raise UserError(f"the folder {path} contains other files; choose a new or empty one for --out")
    if path.exists() and not path.is_dir():
        raise UserError(f"--out {path} is a file; choose a folder")


def _fill_folder(
    folder: FeatureFolder,
    listed: Source,
    model: Embedder,
    settings: dict[str, Any],
    device: torch.device,
    quiet: bool,
) -> EmbedResult:
    """Compute the shards that the folder does not have yet."""
    rows = listed.to_json()
    n = len(listed.inputs)
    manifest = {
        "format": FORMAT,
        **settings,
        "embedder": model.identity(),
        "n_rows": n,
        "rows_sha256": sha256(rows),
        "files_sha256": sha256(repr(listed.file_sizes()).encode()),
    }
    is_complete = False
    if is_features(folder.path):
        stored = folder.read_manifest()
        _check_same(stored, manifest, folder.path)
        is_complete = stored["complete"]
    if not is_complete:
        folder.write_start(manifest, rows)
    missing = [k for k in range(n_shards(manifest)) if folder.read_shard(k, manifest) is None]
    started = {k: folder.read_shard(k, manifest, complete=False) for k in missing}
    left = {k: _batches_left(rows_of_shard(k, manifest), settings["batch_size"], started[k]) for k in missing}
    to_do = sum(len(batch) for batches in left.values() for batch in batches)
    progress = TimeLeft(n, listed.kind, done=n - to_do, quiet=quiet)
    flat = [batch for k in missing for batch in left[k]]
    computed = 0
    with closing(_compute(listed, model, flat, device)) as results:
        for k in missing:
            first = started[k]
            parts: list[Records | None] = [None if first is None else np.array(first)]
            saved_at = time.monotonic()
            for batch in left[k]:
                parts.append(next(results))
                computed += len(batch)
                progress.add(len(batch))
                if time.monotonic() - saved_at > PARTIAL_SECONDS:
                    folder.write_shard(k, _join(parts, listed), complete=False)
                    saved_at = time.monotonic()
            folder.write_shard(k, _join(parts, listed), complete=True)
    progress.close()
    if missing or not is_complete:
        folder.write_end(manifest)
    final = folder.read_manifest()
    return EmbedResult(folder.path, sum(shard["rows"] for shard in final["shards"]), final["dimensions"], computed)


def _check_same(stored: dict[str, Any], now: dict[str, Any], path: Path) -> None:
    """Refuse to continue features of other data or of another embedder."""
    words = {
        "rows_sha256": "the list of rows or their labels",
        "files_sha256": "an image file",
        "batch_size": "--batch-size",
        "shard_rows": "the number of rows per shard",
        "n_rows": "the number of rows",
    }
    if stored["embedder"] != now["embedder"]:
        raise UserError(
            f"{path} contains features by {_describe(stored['embedder'])}, not by {_describe(now['embedder'])}; "
            "choose another --out"
        )
    for name, what in words.items():
        if stored[name] != now[name]:
            raise UserError(
                f"{path} contains features of {stored['source']}, but {what} has changed; choose another --out"
            )


def _describe(embedder: dict[str, Any]) -> str:
    size = f" at {embedder['image_size']} pixels" if embedder["image_size"] else ""
    return f"{embedder['name']}{size} (weights {embedder['sha256'][:8]})"


def _batches_left(rows: range, size: int, started: Records | None) -> list[NDArray[np.int64]]:
    """The batches of a shard that are not computed yet. They begin at the same rows, whenever a process was killed."""
    first = rows.start
    if started is not None and len(started):
        done = int(started["row"][-1]) + 1 - first
        first += -(-done // size) * size
    return [np.arange(start, min(start + size, rows.stop)) for start in range(first, rows.stop, size)]


def _join(parts: Sequence[Records | None], listed: Source) -> Records:
    known = [records for records in parts if records is not None]
    if not known:
        raise UserError(f"none of the {listed.kind} can be read")
    if len({records.dtype for records in known}) > 1:
        raise UserError("the embedder returned vectors of different lengths; they must all have the same length")
    joined: Records = np.concatenate(known)
    return joined


def _compute(
    listed: Source, model: Embedder, batches: Sequence[NDArray[np.int64]], device: torch.device
) -> Generator[Records | None, None, None]:
    """The records of each batch of rows, without images that cannot be read; None if no image of a batch can."""
    inputs = _read_images(listed, model, batches, device) if listed.kind == "images" else _read_texts(listed, batches)
    for rows, x in inputs:
        hashes = [hashlib.sha256(listed.content(row)).digest() for row in rows.tolist()]
        if not len(rows):
            yield None
            continue
        with torch.inference_mode():
            vectors = model.compute(x)
        if not isinstance(vectors, Tensor) or vectors.ndim != 2 or len(vectors) != len(rows):
            shape = list(vectors.shape) if isinstance(vectors, Tensor) else type(vectors).__name__
            raise UserError(f"{model.name} must return one vector per input, [{len(rows)}, D], got {shape}")
        yield make_records(rows, hashes, vectors.float().cpu().numpy())


def _read_texts(listed: Source, batches: Sequence[NDArray[np.int64]]) -> Iterator[tuple[NDArray[np.int64], list[str]]]:
    for rows in batches:
        yield rows, [listed.inputs[row] for row in rows.tolist()]


def _read_images(
    listed: Source, model: Embedder, batches: Sequence[NDArray[np.int64]], device: torch.device
) -> Iterator[tuple[NDArray[np.int64], Tensor]]:
    """The normalized images of each batch, read ahead by other processes."""
    size = model.image_size or 224
    files = FileExamples(listed.root or "", listed.inputs, size, short=max(size, round(size / model.crop)))
    scale = Scale(*(255 * torch.tensor(values).view(3, 1, 1) for values in (model.mean, model.std)))
    examples = replace(files, scale=scale).to(device)
    reads = examples.stream(((torch.from_numpy(rows), 0) for rows in batches), augment=False)
    for rows, read in zip(batches, reads, strict=True):
        kept = rows if read.kept is None else rows[read.kept.numpy()]
        yield kept, read.views[0]
