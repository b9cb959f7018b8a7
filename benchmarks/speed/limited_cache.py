"""Rows per second of a loader while the page cache is too small for the file: a memory cgroup limits both.

python benchmarks/speed/limited_cache.py FILE SHUFFLE BATCH SECONDS    the measured process; waits for one line first
"""

import json
import os
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

SECONDS = 20.0
SHARE = 4  # the cache holds this part of the file


def measure_limited(path: Path, shuffle: str, batch: int) -> dict[str, Any]:
    """Draw batches in a process whose cgroup may hold its own memory and a quarter of the file in the page cache."""
    size = path.stat().st_size
    own = next(line for line in Path("/proc/self/cgroup").read_text().splitlines() if ":memory:" in line)
    group = Path("/sys/fs/cgroup/memory" + own.split(":", 2)[2]) / f"warpi-benchmark-{os.getpid()}"
    group.mkdir()
    command = [sys.executable, __file__, str(path), shuffle, str(batch), str(SECONDS)]
    try:
        with path.open("rb") as file:
            os.fsync(file.fileno())  # pages that are not on the disk yet would stay
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
            assert child.stdin is not None
            assert child.stdout is not None
            (group / "cgroup.procs").write_text(str(child.pid))  # before it has touched the file
            child.stdin.write("start\n")
            child.stdin.flush()
            anonymous = int(child.stdout.readline())
            (group / "memory.limit_in_bytes").write_text(str(anonymous + size // SHARE))
            child.stdin.write("go\n")
            child.stdin.flush()
            result = json.loads(child.stdout.readline())
    finally:
        for _ in range(50):
            with suppress(OSError):  # the process has not ended completely
                group.rmdir()
                break
            time.sleep(0.1)
    return {**result, "cache_mib": size // SHARE >> 20, "file_mib": size >> 20}


def draw(path: Path, shuffle: str, batch: int, seconds: float) -> dict[str, Any]:
    import torch

    from warpi.data.loader import Loader
    from warpi.data.mapped import MappedExamples, RawRows
    from warpi.data.split import Split

    torch.set_num_threads(1)
    raw = RawRows.open(path)
    assert raw is not None
    n = len(raw.x)
    split = Split(MappedExamples.of(raw), torch.arange(n), torch.zeros(n, dtype=torch.int64))
    loader = Loader(split, batch, seed=0, in_blocks=shuffle == "blocks")
    loader.order(0) if shuffle == "rows" else None
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines() if ":" in line)
    print(int(status["RssAnon"].split()[0]) * 1024, flush=True)
    sys.stdin.readline()
    drawn = 0
    before, began, at = read_bytes(), time.monotonic(), 0
    end = began + seconds * 4 / 3
    while (now := time.monotonic()) < end:
        if not at and now > began + seconds / 3:  # the cache is in the state in which it stays
            before, began, at = read_bytes(), now, drawn
        loader.draw()
        drawn += batch
    taken = time.monotonic() - began
    rows = drawn - at
    return {"rows_per_s": round(rows / taken), "read_bytes_per_row": round((read_bytes() - before) / rows)}


def read_bytes() -> int:
    """Bytes that this process has read from the disk."""
    lines = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(lines["read_bytes"])


if __name__ == "__main__":
    sys.stdin.readline()
    print(json.dumps(draw(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), float(sys.argv[4]))), flush=True)
