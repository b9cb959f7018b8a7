"""A folder of a million image files with every kind of bad image: the time to scan it, and the memory to read it.

    nice python -m benchmarks.million_files --work FOLDER [--files 1000000] [--read 100000]

Writes 100 folders of classes with hard links to 1,000 different images, and one bad file of each kind. `--work` is
outside of the repository. Prints one line of JSON; `docs/reliability.md` states the result.
"""

import argparse
import json
import os
import resource
import struct
import time
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from benchmarks.common import made_on
from warpi.data.image_files import FileExamples
from warpi.datasets.image_folders import read_folder
from warpi.utils.files import write_atomically

CLASSES, DIFFERENT, BATCH = 100, 1_000, 256
READABLE = ("cmyk.jpg", "sixteen_bit.png", "rotated.jpg", "gray.png", "palette.gif", "text\u202e[b].png")
LINKS = {"loop.png": "loop.png", "dangling.png": "nothing.png"}


def write_bad_images(folder: Path) -> int:
    """One file of each kind; the number of those that cannot be read."""
    rng = np.random.default_rng(0)
    pixels = rng.integers(256, size=(20, 16, 3), dtype=np.uint8)
    image = Image.fromarray(pixels)
    image.convert("CMYK").save(folder / "cmyk.jpg")
    Image.fromarray((pixels[..., 0].astype(np.uint16)) * 257).save(folder / "sixteen_bit.png")
    exif = Image.Exif()
    exif[0x0112] = 6  # turn by 90 degrees
    image.save(folder / "rotated.jpg", exif=exif)
    image.convert("L").save(folder / "gray.png")
    image.convert("P").save(folder / "palette.gif")
    image.save(folder / READABLE[-1])
    image.save(folder / "whole.png")
    whole = (folder / "whole.png").read_bytes()
    (folder / "whole.png").unlink()
    bad = {"empty.png": b"", "cut.png": whole[: len(whole) // 2], "text.jpg": b"not an image", "zeros.png": bytes(500)}
    header = b"IHDR" + struct.pack(">IIBBBBB", 50_000, 50_000, 8, 2, 0, 0, 0)
    bad["bomb.png"] = whole[:12] + header + struct.pack(">I", zlib.crc32(header)) + whole[33:]
    for name, content in bad.items():
        (folder / name).write_bytes(content)
    for name, target in LINKS.items():
        (folder / name).symlink_to(target)
    os.mkfifo(folder / "pipe.png")
    unreadable = folder / "vanishes.png"
    image.save(unreadable)
    return len(bad) + len(LINKS) + 2  # the pipe, and the file that vanishes after the scan


def write_folder(folder: Path, files: int) -> int:
    rng = np.random.default_rng(1)
    sources = folder.parent / "sources"
    sources.mkdir(parents=True)
    for i in range(DIFFERENT):
        Image.fromarray(rng.integers(256, size=(32, 32, 3), dtype=np.uint8)).save(sources / f"{i}.png")
    for k in range(CLASSES):
        (folder / f"class{k:02d}").mkdir(parents=True)
    for i in range(files):  # a file system allows some ten thousand links to a file
        os.link(sources / f"{i % DIFFERENT}.png", folder / f"class{i % CLASSES:02d}" / f"{i:07d}.png")
    return write_bad_images(folder / "class00")


def memory(name: str = "VmRSS") -> int:
    """MiB of this process."""
    return int(Path("/proc/self/status").read_text().partition(f"{name}:")[2].split()[0]) // 1024


def measure(folder: Path, n_bad: int, read: int) -> dict[str, Any]:
    before = memory()
    start, cpu = time.perf_counter(), time.process_time()
    dataset = read_folder(folder, size=28, in_memory=False)
    scan, scan_cpu = time.perf_counter() - start, time.process_time() - cpu
    examples = dataset.examples
    assert isinstance(examples, FileExamples)
    (folder / "class00" / "vanishes.png").unlink()
    scanned = memory()
    examples = replace(examples, max_bad=2 * n_bad / len(examples))
    first = [i for i, path in enumerate(examples.paths) if not path.endswith("png") or not path[-11:-4].isdecimal()]
    rows = torch.cat([torch.tensor(first), torch.randperm(len(examples), generator=torch.Generator().manual_seed(0))])
    sizes = []
    start = time.perf_counter()
    batches = ((batch, i) for i, batch in enumerate(rows[:read].split(BATCH)))
    for _ in examples.stream(batches, augment=True):
        sizes.append(memory())
    seconds = time.perf_counter() - start
    assert len(examples.bad) == n_bad, examples.bad
    return {
        "files": len(examples),
        "scan_seconds": round(scan, 1),
        "scan_cpu_seconds": round(scan_cpu, 1),
        "scan_mib": scanned - before,
        "read": min(read, len(rows)),
        "images_per_second": round(min(read, len(rows)) / seconds),
        "growth_while_reading_percent": round(100 * (sizes[-1] / sizes[len(sizes) // 5] - 1), 2),
        "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
        "bad": sorted(f"{Path(path).name}: {reason}" for path, reason in examples.bad.items()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="A folder of a million image files with every kind of bad image.")
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--files", type=int, default=1_000_000)
    parser.add_argument("--read", type=int, default=100_000)
    parser.add_argument("--json", type=Path)
    flags = parser.parse_args()
    n_bad = write_folder(flags.work / "images", flags.files)
    result = made_on("torch", "pillow") | measure(flags.work / "images", n_bad, flags.read)
    print(json.dumps(result, indent=1, ensure_ascii=True))
    if flags.json:
        write_atomically(flags.json, (json.dumps(result, indent=1) + "\n").encode())


if __name__ == "__main__":
    main()
