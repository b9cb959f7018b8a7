"""Small files that claim gigabytes. Run as a program, it reads each of them with little memory and time.

Prints one line of JSON: for each file the error, its seconds, and the peak memory so far in MiB.
"""

import io
import json
import os
import resource
import struct
import sys
import time
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

MEMORY = 3 * 2**30  # bytes of address space, of which torch and pyarrow reserve more than one GiB
SECONDS = 100  # of CPU time


def write_bombs(folder: Path) -> dict[str, Path]:
    """Write the files; return their paths by name."""
    import numpy as np
    import pyarrow as pa
    from pyarrow import parquet

    paths = {name: folder / name for name in ("shape.npy", "shape.npz", "zeros.npz", "zeros.pt", "deep.json")}
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(header, {"descr": "<f8", "fortran_order": False, "shape": (10**6, 10**6)})
    paths["shape.npy"].write_bytes(header.getvalue() + bytes(800))
    with zipfile.ZipFile(paths["shape.npz"], "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("x.npy", header.getvalue() + bytes(800))
    _write_zeros(paths["zeros.npz"])
    paths["zeros.pt"].write_bytes(paths["zeros.npz"].read_bytes())
    paths["deep.json"].write_text("[" * 10**6)
    for name, size in (("long.csv", 70 * 2**20), ("large.json", 40 * 2**20)):
        paths[name] = folder / name
        with paths[name].open("wb") as file:
            file.write(b"a,label\n" if name == "long.csv" else b"[")
            file.seek(size)  # a hole, which takes no space on the disk
            file.write(b"\n")
    paths["rows.parquet"] = folder / "rows.parquet"
    zeros = pa.array(np.zeros(18_000_000, np.int8))
    parquet.write_table(pa.table({"a": zeros, "label": zeros}), paths["rows.parquet"], compression="zstd")
    paths["words.parquet"] = folder / "words.parquet"
    words = pa.DictionaryArray.from_arrays(pa.array(np.zeros(20_000, np.int32)), pa.array(["w" * 100_000]))
    parquet.write_table(pa.table({"a": words, "label": words}), paths["words.parquet"], store_schema=False)
    paths["pixels.png"] = folder / "pixels.png"
    paths["pixels.png"].write_bytes(_png(30_000, 30_000))
    return paths


def _write_zeros(path: Path) -> None:
    """A zip file with a member of 272 MiB of zeros, in about 1 MB."""
    with (
        zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive,
        archive.open("x.npy", "w") as member,
    ):
        for _ in range(17):
            member.write(bytes(2**24))


def _png(width: int, height: int) -> bytes:
    """A PNG image of one color."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 1, 0, 0, 0, 0)
    rows = zlib.compress(bytes((width // 8 + 1) * height), 1)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")


def main(folder: Path) -> None:
    from warpi.data.decode import decode
    from warpi.datasets.arrays import load_arrays
    from warpi.datasets.columns.to_npy import convert_table
    from warpi.datasets.load import read_dataset
    from warpi.nets.load_weights import read_weights
    from warpi.utils.files import read_json

    readers: dict[str, Callable[[Path], Any]] = {
        ".npy": load_arrays,
        ".png": lambda path: decode(str(path), 32),
        ".pt": read_weights,
        ".json": lambda path: read_json(path, "write it again"),
    }
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS))
    results = {}
    tables = [*folder.glob("*.csv"), *folder.glob("*.parquet")]
    jobs = [
        (path.name, path, readers.get(path.suffix, lambda path: read_dataset(str(path)))) for path in folder.iterdir()
    ]
    jobs += [
        (f"convert {path.name}", path, lambda path: convert_table(path, path.with_suffix(".out.npy")))
        for path in tables
    ]
    for name, path, read in sorted(jobs, key=lambda job: job[0]):
        start = time.process_time()
        try:
            read(path)
            error = "none"
        except Exception as e:
            error = f"{type(e).__name__}: {e}"
        results[name] = {"error": error, "seconds": time.process_time() - start, "peak_mib": peak_mib()}
    print(json.dumps(results), flush=True)


def peak_mib() -> int:
    """The peak memory of this program. `ru_maxrss` would also count the process that started it."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) // 1024


if __name__ == "__main__":
    main(Path(sys.argv[1]))
    os._exit(0)  # with so little memory, threads of libraries cannot always be ended in an orderly way
