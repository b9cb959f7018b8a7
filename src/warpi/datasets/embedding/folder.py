"""The folder that `warpi embed` writes: a manifest, the list of rows, and shards of vectors.

    features.json       source, embedder, number of rows, and the shards with their hashes
    rows.json           the inputs (paths or texts), classes and labels of all rows
    shard-00000.npy     per row: its number, the SHA-256 of its input, its vector as float16
    partial-00003.npy   the beginning of a shard that is not complete

A file is replaced atomically, so a killed process leaves a folder from which embedding can continue.
"""

import io
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from warpi.errors import DAMAGED_ARRAY_ERRORS, UserError, blame_file
from warpi.utils.files import read_json, sha256, write_atomically, write_json
from warpi.utils.limits import check_array_file, check_regular

FORMAT = "warpi-features-1"
MANIFEST = "features.json"
ROWS = "rows.json"
SHARD_ROWS = 4096  # rows per shard

Records = NDArray[np.void]
"""Rows of a shard: a structured array with the fields `row`, `sha256` and `vector`."""


def is_features(path: Path) -> bool:
    """Whether a path is a folder that `warpi embed` has written, or has begun to write."""
    return (path / MANIFEST).is_file()


def make_records(rows: NDArray[np.int64], hashes: list[bytes], vectors: NDArray[np.float32]) -> Records:
    """The records of a few rows. Raises a UserError if a vector does not fit into float16."""
    with np.errstate(over="ignore"):
        half = vectors.astype(np.float16)
    bad = ~np.isfinite(half).all(1)
    if bad.any():
        row = int(rows[bad.argmax()])
        raise UserError(f"the vector of row {row} is not finite in float16; use another embedder")
    records: Records = np.empty(
        len(rows), [("row", "<i8"), ("sha256", "u1", (32,)), ("vector", "<f2", (vectors.shape[1],))]
    )
    records["row"] = rows
    records["sha256"] = np.frombuffer(b"".join(hashes), np.uint8).reshape(-1, 32)
    records["vector"] = half
    return records


class FeatureFolder:
    """The files of one folder of features."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def read_manifest(self) -> dict[str, Any]:
        """The content of `features.json`. Raises FileNotFoundError if there is none."""
        stored: dict[str, Any] = read_json(self.path / MANIFEST, "run `warpi embed` again into another folder")
        if not isinstance(stored, dict) or stored.get("format") != FORMAT:
            raise UserError(f"{self.path / MANIFEST} does not have the format {FORMAT!r} that `warpi embed` writes")
        return stored

    def read_rows(self, manifest: Mapping[str, Any]) -> dict[str, Any]:
        """The content of `rows.json`, which must be the one that the manifest describes."""
        file = self.path / ROWS
        check_regular(file)
        try:
            content = file.read_bytes()
        except OSError as e:
            raise UserError(f"cannot read {file}: {e.strerror}; run `warpi embed` again") from e
        if sha256(content) != manifest["rows_sha256"]:
            raise UserError(f"{file} is not the file that `warpi embed` wrote; run `warpi embed` again")
        rows: dict[str, Any] = json.loads(content)
        return rows

    def write_start(self, manifest: Mapping[str, Any], rows: bytes) -> None:
        """Write the list of rows and an incomplete manifest."""
        write_json(self.path / MANIFEST, {**manifest, "complete": False})  # first, because it marks the folder as ours
        write_atomically(self.path / ROWS, rows)

    def write_end(self, manifest: Mapping[str, Any]) -> None:
        """Write the manifest with the shards and their hashes."""
        shards = []
        dimensions = 0
        for k in range(n_shards(manifest)):
            records = self.read_shard(k, manifest)
            assert records is not None
            dimensions = records["vector"].shape[1]
            file = self._file(k)
            shards.append({"file": file.name, "rows": len(records), "sha256": sha256(file.read_bytes())})
        write_json(self.path / MANIFEST, {**manifest, "complete": True, "dimensions": dimensions, "shards": shards})

    def write_shard(self, k: int, records: Records, *, complete: bool) -> None:
        content = io.BytesIO()
        np.save(content, records, allow_pickle=False)
        write_atomically(self._file(k, complete), content.getvalue())
        if complete:
            self._file(k, complete=False).unlink(missing_ok=True)

    def read_shard(self, k: int, manifest: Mapping[str, Any], *, complete: bool = True) -> Records | None:
        """The records of a shard, memory-mapped; None if the file does not exist."""
        file = self._file(k, complete)
        if not file.exists():
            return None
        check_regular(file)
        try:
            check_array_file(file)
            records: Records = np.load(file, mmap_mode="r", allow_pickle=False)
            rows = records["row"]
            possible = rows_of_shard(k, manifest)
            valid = records["sha256"].shape[1:] == (32,) and records["vector"].dtype == np.float16
            valid = valid and bool((np.diff(rows) > 0).all()) and bool((rows >= possible.start).all())
            valid = valid and bool((rows < possible.stop).all())
        except (*DAMAGED_ARRAY_ERRORS, LookupError, OSError) as e:
            raise self._damaged(file) from e
        if not valid:
            raise self._damaged(file)
        return records

    def read_shards(self, manifest: Mapping[str, Any]) -> list[Records]:
        """All shards, memory-mapped. Raises a UserError if embedding is not complete or a shard has changed."""
        with blame_file(self.path / MANIFEST):
            if not manifest["complete"]:
                raise UserError(
                    f"the features in {self.path} are not complete; continue with: warpi embed {manifest['source']} "
                    f"--with {manifest['embedder']['name']} --out {self.path}"
                )
            shards = []
            for k, shard in enumerate(manifest["shards"]):
                file = self._file(k)
                records = self.read_shard(k, manifest)
                if records is None:
                    raise UserError(f"{file} is missing; run `warpi embed` again with the same --out")
                if sha256(file.read_bytes()) != shard["sha256"]:
                    raise self._damaged(file)
                shards.append(records)
            return shards

    def _file(self, k: int, complete: bool = True) -> Path:
        return self.path / f"{'shard' if complete else 'partial'}-{k:05d}.npy"

    def _damaged(self, file: Path) -> UserError:
        return UserError(f"{file} is damaged; delete it and run `warpi embed` again with the same --out")


def n_shards(manifest: Mapping[str, Any]) -> int:
    return -(-int(manifest["n_rows"]) // int(manifest["shard_rows"]))


def rows_of_shard(k: int, manifest: Mapping[str, Any]) -> range:
    """The rows that a shard contains if all of them can be read."""
    size = manifest["shard_rows"]
    return range(k * size, min((k + 1) * size, manifest["n_rows"]))
