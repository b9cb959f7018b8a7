"""Read a folder of features as a data set, and embed further images or texts in the same way."""

import hashlib
import io
from collections.abc import Mapping
from dataclasses import replace
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from numpy.lib import format as npy
from numpy.typing import NDArray
from torch import Tensor

from warpi.data.dataset import Dataset, Files, NewInputs
from warpi.data.examples import check_form, is_integer
from warpi.data.mapped import MappedEmbedded, RawRows
from warpi.data.numeric import Embedded, Originals, make_features
from warpi.datasets.embedding.embed import embed_in_memory
from warpi.datasets.embedding.embedders import Embedder, open_embedder
from warpi.datasets.embedding.folder import FeatureFolder, Records, is_features
from warpi.datasets.embedding.sources import Source, list_new, list_source, list_with_classes
from warpi.datasets.hugging_face.saved import is_saved
from warpi.errors import UserError, blame_file
from warpi.utils.files import sha256, write_atomically

_CPU = torch.device("cpu")
LARGE = 2**30  # bytes: larger vectors are joined in one file and stay there


class _Vectors:
    """The vectors of some rows of a source, in the order of the rows."""

    def __init__(
        self,
        listed: Source,
        embedder: Mapping[str, Any],
        rows: NDArray[np.int64],
        x: Tensor | RawRows,
        hashes: NDArray[np.uint8],
    ) -> None:
        self.listed = listed
        self.embedder = embedder
        self.rows = rows  # [n] sorted
        self.x = x  # [n, D] float16, in memory or in a file
        self.hashes = hashes  # [n, 32]

    def examples(self, part: str | None = None) -> tuple[Embedded, NDArray[np.int64]]:
        """The vectors of one part (None: of all), and their rows in the source."""
        listed = self.listed
        of_part = range(len(listed.inputs)) if part is None else listed.rows_of(part)
        first, last = np.searchsorted(self.rows, (of_part.start, of_part.stop)).tolist()
        chosen = slice(first, last)  # the rows are sorted, so no vector is copied
        rows = self.rows[chosen]
        originals = Originals(tuple(listed.inputs[row] for row in rows.tolist()), listed.root)
        about: dict[str, Any] = {"embedder": self.embedder, "originals": originals, "hashes": self.hashes[chosen]}
        if isinstance(self.x, RawRows):
            return replace(MappedEmbedded.of(self.x.part(chosen)), **about), rows
        plain = make_features(self.x[chosen])
        return Embedded(plain.x, plain.scale, **about), rows


def read_features(path: Path, like: Dataset | None = None) -> Dataset:
    """Read a folder that `warpi embed` has written. If it is a second set, `like` is the first one."""
    vectors = _read_vectors(FeatureFolder(path))
    if like is not None:
        if not isinstance(like.examples, Embedded):
            raise UserError(f"{path} contains features, but {like.name} does not; embed both, or neither")
        _check_same_embedder(vectors.embedder, like.examples.embedder, path)
        vectors.listed = list_with_classes(vectors.listed, like.classes, str(path))
    return _make_dataset(vectors)


def embed_second(data: str, like: Dataset, **options: Any) -> Dataset:
    """Embed a second, small set of images or texts, such as trusted examples, in the same way as the first.

    Images and texts that are also in the first set keep their vectors. If all are, no embedder is needed.
    """
    first = like.examples
    assert isinstance(first, Embedded)
    if first.embedder["kind"] == "images" and is_saved(Path(data)):
        command = f"warpi embed hf:{data} --with {first.embedder['name']} --out FOLDER"
        raise UserError(f"{data} is a Hugging Face data set; embed it too ({command}) and pass that folder")
    columns = {name: first.embedder.get(name) for name in ("label", "text")}
    given = {name: value for name, value in options.items() if value is not None}
    listed = list_source(data, classes=like.classes, like=like, **{**columns, **given})
    kind = first.embedder["kind"]
    if listed.kind != kind:
        raise UserError(f"{data} contains {listed.kind}, but the features were made from {kind}; pass {kind}")
    known = _by_hash(first)
    digests = [_digest(listed, row) for row in range(len(listed.inputs))]
    rows = [row for row, digest in enumerate(digests) if digest in known]
    x = first.x[[known[digests[row]] for row in rows]]
    others = [row for row, digest in enumerate(digests) if digest not in known]
    if others:
        model = _open_same(first.embedder, _CPU, data)
        more, more_x = embed_in_memory(listed, model, _CPU, others, quiet=False)
        rows, x = [*rows, *more.tolist()], torch.cat([x, more_x])
    order = np.argsort(rows)
    rows_array = np.array(rows, np.int64)[order]
    hashes = np.frombuffer(b"".join(digests[row] for row in rows_array.tolist()), np.uint8).reshape(-1, 32)
    return _make_dataset(_Vectors(listed, first.embedder, rows_array, x[torch.from_numpy(order)], hashes))


def read_new_vectors(data: str, settings: Mapping[str, Any], first: Embedded, classes: tuple[str, ...]) -> NewInputs:
    """Read vectors to predict: a folder of features, or images or texts, which are embedded like those of the run."""
    path = Path(data)
    if is_features(path):
        vectors = _read_vectors(FeatureFolder(path))
        _check_same_embedder(vectors.embedder, first.embedder, path)
        listed = list_with_classes(vectors.listed, classes, data)
        labels = {"label": np.array(listed.y)} if listed.y else {}
    else:
        root = Path(settings["root"]) if settings.get("root") else None
        columns = {name: first.embedder.get(name) for name in ("label", "text")}
        with TemporaryDirectory() as scratch:
            listed = list_new(data, first.embedder["kind"], classes, Path(scratch), root=root, **columns)
            model = _open_same(first.embedder, first.device, data)
            rows, x = embed_in_memory(listed, model, first.device, quiet=False)
        vectors = _Vectors(listed, first.embedder, rows, x, np.empty((len(rows), 32), np.uint8))
        labels = {name: np.array(values) for name, values in (listed.labels or {}).items()}
    examples, rows = vectors.examples()
    return NewInputs(
        examples.with_scale(first.scale),
        {name: torch.from_numpy(values[rows]) for name, values in labels.items()},
        None if listed.root is None or is_saved(path) else tuple(listed.inputs[row] for row in rows.tolist()),
        torch.from_numpy(rows),
        len(listed.inputs) - len(rows),
    )


def _read_vectors(folder: FeatureFolder) -> _Vectors:
    manifest = folder.read_manifest()
    shards = folder.read_shards(manifest)
    with blame_file(folder.path):
        listed = Source.from_json(folder.read_rows(manifest))
        x: Tensor | RawRows
        if sum(shard["vector"].nbytes for shard in shards) >= LARGE:
            x = _open_joined(folder, shards, manifest)
        else:
            x = torch.from_numpy(np.concatenate([shard["vector"] for shard in shards]))
        rows = np.concatenate([shard["row"] for shard in shards])
        hashes = np.concatenate([shard["sha256"] for shard in shards])
        embedder = {**manifest["embedder"], **manifest["columns"]}
        check_form(all(isinstance(embedder[key], str) for key in ("name", "kind", "sha256")), "embedder", embedder)
        check_form(embedder["image_size"] is None or is_integer(embedder["image_size"]), "image_size", embedder)
        return _Vectors(listed, embedder, rows, x, hashes)


def _open_joined(folder: FeatureFolder, shards: list[Records], manifest: Mapping[str, Any]) -> RawRows:
    """The vectors of all shards in one file, which is written the first time they are read."""
    path = folder.path / f"vectors-{sha256(*(shard['sha256'] for shard in manifest['shards']))[:16]}.npy"
    shape = (sum(map(len, shards)), manifest["dimensions"])
    if not path.is_file():
        header = io.BytesIO()
        npy.write_array_header_1_0(header, {"descr": "<f2", "fortran_order": False, "shape": shape})
        parts = (np.ascontiguousarray(shard["vector"], "<f2").tobytes() for shard in shards)
        write_atomically(path, chain([header.getvalue()], parts))
    raw = RawRows.open(path)
    if raw is None or tuple(raw.x.shape) != shape:
        raise UserError(f"{path} is damaged; delete it, and it is written again")
    return raw


def _make_dataset(vectors: _Vectors) -> Dataset:
    listed = vectors.listed
    parts = {}
    kept: dict[str, Tensor] = {}
    for part in listed.parts:
        examples, rows = vectors.examples(part)
        parts[part] = examples, torch.tensor([listed.y[row] for row in rows.tolist()], dtype=torch.int64)
        kept[part] = torch.from_numpy(rows - listed.rows_of(part).start)
    train = parts["train"][0].originals
    assert train is not None
    files = Files(train.root, train.values) if train.root is not None else None
    facts = {
        name: torch.tensor(values)[kept["trusted" if name == "meta_given" else "train"]]
        for name, values in listed.facts.items()
    }
    return Dataset.from_parts(
        listed.name, parts, listed.classes, test_is_clean=listed.test_is_clean, files=files, **facts
    )


def _check_same_embedder(embedder: Mapping[str, Any], first: Mapping[str, Any], where: object) -> None:
    for name, what in {"name": "embedder", "image_size": "size of the images", "sha256": "weights"}.items():
        if embedder[name] != first[name]:
            raise UserError(
                f"{where}: the {what} must be the same as for the first features, {first[name]}, got {embedder[name]}"
            )


def _open_same(embedder: Mapping[str, Any], device: torch.device, data: str) -> Embedder:
    """Load the embedder of some features again. Raises a UserError if its weights have changed."""
    name = embedder["name"]
    if name.startswith("python:"):
        raise UserError(
            f"the features were computed by a Python object, {name.removeprefix('python:')}, which cannot be loaded by "
            f"its name; embed {data} with it (warpi.embed) and pass the folder of features"
        )
    model = open_embedder(name, embedder["kind"], device, embedder["image_size"])
    if model.sha256 != embedder["sha256"]:
        raise UserError(
            f"the weights of {name} have changed ({embedder['sha256'][:8]} before, {model.sha256[:8]} now), so its "
            "vectors cannot be compared; install the version that the features were made with, or embed all data again"
        )
    return model


def _by_hash(examples: Embedded) -> dict[bytes, int]:
    """The row of each content hash."""
    if examples.hashes is None:
        return {}
    content = np.ascontiguousarray(examples.hashes).tobytes()
    return {content[32 * row : 32 * row + 32]: row for row in reversed(range(len(examples)))}


def _digest(listed: Source, row: int) -> bytes:
    try:
        return hashlib.sha256(listed.content(row)).digest()
    except OSError:
        return b""  # the embedder reports files that cannot be read
