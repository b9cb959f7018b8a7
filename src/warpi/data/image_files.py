"""Images that are read from their files during training, so that any number of them fits into memory."""

import hashlib
import json
import logging
import os
import subprocess
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from io import BufferedReader
from pathlib import Path
from statistics import median_low
from typing import IO, Any, ClassVar, NamedTuple, Self, cast

import numpy as np
import torch
from torch import Tensor

from warpi.data.augment import Crop, distort
from warpi.data.decode import decode_batch, image_size
from warpi.data.examples import Examples, ReadBatch, Scale, TensorExamples, check_form, is_integer
from warpi.errors import UserError, missing_package
from warpi.utils.limits import limit

logger = logging.getLogger("warpi.data")

PHOTO = 224  # pixels: the side at which photos are read
SMALL = 64  # pixels: the largest side of a small image
IMAGENET = Scale(  # of pixels 0..255
    torch.tensor([123.675, 116.28, 103.53]).view(3, 1, 1), torch.tensor([58.395, 57.12, 57.375]).view(3, 1, 1)
)
_CPU = torch.device("cpu")
_READER = str(Path(__file__).with_name("decode.py"))  # the main program of a reader process
_CHUNK = 16  # images per request: several readers share a batch, so that the first one is ready soon
_AHEAD = 4  # requests per reader
_NAMES = 65_536  # file names that are hashed together


def stored_size(size: int) -> int:
    """The shorter side of an image before it is cropped to `size`: 256 for 224."""
    return round(size * 8 / 7)


@dataclass(frozen=True, eq=False)
class FileExamples(Examples):
    """N image files, decoded by reader processes shortly before they are used.

    An image is turned upright, scaled so that its shorter side is `stored_size(size)`, and cropped to size x size: with
    a random crop and flip in training, from the center otherwise. A file that cannot be read is logged once, omitted
    from its batch and kept in `bad`. More than `allowed` such files raise an error. Set `workers` and `max_bad` with
    `dataclasses.replace(examples, workers=16)`.
    """

    always_readable: ClassVar[bool] = False
    root: str
    paths: Sequence[str]  # relative to root, or absolute
    size: int = PHOTO
    workers: int = min(8, os.cpu_count() or 1)  # 0: read in the main process, with the same result
    device: torch.device = _CPU
    scale: Scale = IMAGENET
    max_bad: float = 0.01  # tolerated fraction of unreadable files
    short: int | None = None  # shorter side before an image is cropped; None: `stored_size(size)`
    strong_views: tuple[int, ...] = ()  # numbers of the views that are also distorted, on the device
    bad: dict[str, str] = field(default_factory=dict, repr=False)  # path -> reason; shared by copies on other devices

    def __post_init__(self) -> None:
        try:
            import PIL  # noqa: F401
        except ImportError:
            raise missing_package("pillow", "reading image files", "images") from None
        limit("PIXELS")  # raises if the environment variable is not a number
        if self.size < 1 or self.workers < 0 or not 0 <= self.max_bad <= 1:
            values = f"size {self.size}, workers {self.workers}, max_bad {self.max_bad}"
            raise UserError(f"image files need size >= 1, workers >= 0 and max_bad in 0..1, got {values}")

    @property
    def shape(self) -> tuple[int, ...]:
        return (3, self.size, self.size)

    @property
    def allowed(self) -> int:
        """How many unreadable files are tolerated: the fraction `max_bad`, but at least 3; none if max_bad is 0."""
        return max(3, int(self.max_bad * len(self))) if self.max_bad else 0

    def __len__(self) -> int:
        return len(self.paths)

    def to(self, device: torch.device | str) -> Self:
        return replace(self, device=torch.device(device), scale=Scale(*(t.to(device) for t in self.scale)))

    def stream(
        self, batches: Iterable[tuple[Tensor, int]], *, augment: bool, views: int = 1, part: slice = slice(None)
    ) -> Iterator[ReadBatch]:
        n_views = views if augment else 1
        requested: deque[tuple[int, int]] = deque()  # size and seed of the batches that are being read

        def request() -> Iterator[tuple[Tensor, int]]:
            for rows, seed in batches:
                requested.append((len(rows), seed))
                yield rows, seed

        with closing(self._read(request(), crop=self.size, views=n_views, augment=augment, part=part)) as reads:
            for images, kept in reads:
                x = images.to(self.device, non_blocking=True).permute(0, 1, 4, 2, 3)  # [V, B, 3, size, size] uint8
                read = list(x.contiguous())
                whole, seed = requested.popleft()
                if augment and self.strong_views:
                    generator = torch.Generator(self.device).manual_seed(seed)
                    for view in self.strong_views:
                        read[view] = distort(read[view], generator, part, whole)
                complete = bool(kept.all())
                if not complete:
                    read = [view[kept.to(self.device)] for view in read]
                scaled = tuple((view.to(self.scale.mean.dtype) - self.scale.mean) / self.scale.std for view in read)
                yield ReadBatch(scaled if augment else scaled * views, None if complete else kept)

    def replace_inputs(self, rows: Tensor, other: Examples, other_rows: Tensor) -> Self:
        if not isinstance(other, FileExamples):
            raise UserError("open_set noise needs inputs of the same kind: got a tensor to replace image files")
        paths = list(self.paths)
        for row, other_row in zip(rows.tolist(), other_rows.tolist(), strict=True):
            paths[row] = os.path.abspath(other.path(other_row))
        return replace(self, paths=tuple(paths), bad={})

    def fit_scale(self, rows: Tensor) -> Scale | None:  # noqa: ARG002
        return None

    def with_scale(self, scale: Scale) -> Self:
        return replace(self, scale=scale)

    def digest(self) -> str:
        """A hash of the file names and the size. The content of a million files would take too long to read."""
        names = hashlib.sha256(str(self.size).encode())
        for start in range(0, len(self), _NAMES):
            names.update("\0".join(("", *self.paths[start : start + _NAMES])).encode())
        return names.hexdigest()

    def flat(self, rows: Tensor) -> Tensor:
        """The center crop of each image; zeros if it cannot be read."""
        batches = ((chunk, 0) for chunk in torch.split(rows, _CHUNK))
        parts = []
        for images, kept in self._read(batches, crop=self.size, views=1, augment=False):
            images[0, ~kept] = 0
            parts.append(images[0].permute(0, 3, 1, 2).flatten(1))
        return torch.cat(parts).to(self.device).float()

    def form(self) -> dict[str, Any]:
        return {"size": self.size}

    @classmethod
    def from_form(cls, form: Mapping[str, Any]) -> Self:
        """Examples without files, of a stored size."""
        check_form(is_integer(form["size"]) and 1 <= form["size"] <= 10_000, "size", form["size"])
        return cls("", (), form["size"])

    def path(self, row: int) -> str:
        return os.path.join(self.root, self.paths[row])

    def _read(
        self, batches: Iterable[tuple[Tensor, int]], *, crop: int, views: int, augment: bool, part: slice = slice(None)
    ) -> Generator[tuple[Tensor, Tensor], None, None]:
        """Yield the images [V, B, crop, crop, 3] uint8 of `part` of each batch, and which could be read [B]."""
        remaining = iter(batches)
        pending: deque[_PendingBatch] = deque()
        options = {"short": self.short or stored_size(self.size), "size": crop, "views": views, "augment": augment}
        readers = _Readers(self.workers) if self.workers else None
        # Each reader has a few waiting requests, and one batch is read while the previous one is in use.
        min_batches = 2 if readers else 1
        min_requests = _AHEAD * self.workers if readers else 1
        try:
            while True:
                while len(pending) < min_batches or sum(len(batch.answers) for batch in pending) < min_requests:
                    if (requested := next(remaining, None)) is None:
                        break
                    pending.append(self._request(*requested, part, readers, options))
                if not pending:
                    return
                paths, images, answers = pending.popleft()
                reasons = [reason for answer in answers for reason in answer()]
                self._record_bad(paths, reasons)
                yield images, torch.tensor([reason is None for reason in reasons], dtype=torch.bool)
        finally:
            if readers:
                readers.close()

    def _request(
        self, rows: Tensor, seed: int, part: slice, readers: "_Readers | None", options: dict[str, Any]
    ) -> "_PendingBatch":
        paths = [self.path(row) for row in rows[part].tolist()]
        start = part.indices(len(rows))[0]  # augmentation depends on the position within the entire batch
        size = options["size"]
        pinned = self.device.type == "cuda"  # so that the copy to the device is asynchronous
        images = torch.empty((options["views"], len(paths), size, size, 3), dtype=torch.uint8, pin_memory=pinned)
        answers: list[Callable[[], list[str | None]]] = []
        for first in range(0, len(paths), _CHUNK):
            request = {"paths": paths[first : first + _CHUNK], "seed": int(seed), "first": start + first, **options}
            out = images.numpy()[:, first : first + _CHUNK]
            answers.append(readers.ask(request, out).result if readers else partial(_fill, request, out))
        return _PendingBatch(paths, images, answers)

    def _record_bad(self, paths: list[str], reasons: list[str | None]) -> None:
        files = map(self.path, range(len(self)))
        if not self.bad and any(map(_is_absent, reasons)) and not any(map(os.path.exists, files)):
            slashes = "; write / between folders, not \\" if "\\" in self.paths[0] else ""
            raise UserError(
                f"none of the {len(self)} listed images exists; the first, {self.paths[0]!r}, is not in "
                f"{os.path.abspath(self.root)}; set --root FOLDER to the one that the paths are relative to{slashes}"
            )
        for path, reason in zip(paths, reasons, strict=True):
            if reason is not None and path not in self.bad:
                self.bad[path] = reason
                logger.warning("skipped an unreadable image: %s (%s)", path, reason)
        if len(self.bad) > self.allowed:
            first = "; ".join(f"{path} ({reason})" for path, reason in list(self.bad.items())[:3])
            advice = "; if they are in another folder, set it with --root FOLDER"
            raise UserError(
                f"{len(self.bad)} of {len(self)} images cannot be read so far, but at most {self.allowed} are "
                f"tolerated (max_bad={self.max_bad:g}); fix or remove them; the first are: {first}"
                + (advice if all(map(_is_absent, self.bad.values())) else "")
            )


def _is_absent(reason: str | None) -> bool:
    return reason is not None and reason.startswith(FileNotFoundError.__name__)


class _PendingBatch(NamedTuple):
    """A batch that is being read."""

    paths: list[str]  # B
    images: Tensor  # [V, B, size, size, 3] uint8, filled by the answers
    answers: list[Callable[[], list[str | None]]]  # each waits and returns one reason (or None) per image


def _fill(request: dict[str, Any], out: np.ndarray) -> list[str | None]:
    """Decode images in this process.  out [V, n, size, size, 3]"""
    reasons = []
    for i, (reason, crops) in enumerate(decode_batch(**request)):
        reasons.append(reason)
        for view, crop in enumerate(crops):
            out[view, i] = np.frombuffer(crop, np.uint8).reshape(out.shape[2:])
    return reasons


class _Readers:
    """Reader processes. Each is started when it is needed, and has a thread that waits for its answers.

    `close` ends them at once. It is also called when the object is deleted and when the program ends.
    """

    def __init__(self, workers: int) -> None:
        self._processes: list[subprocess.Popen[bytes]] = []
        self._local = threading.local()
        self._threads = ThreadPoolExecutor(workers, thread_name_prefix="warpi-read")
        self.close = weakref.finalize(self, _end, self._threads, self._processes)

    def ask(self, request: dict[str, Any], out: np.ndarray) -> "Future[list[str | None]]":
        return self._threads.submit(self._answer, request, out)

    def _answer(self, request: dict[str, Any], out: np.ndarray) -> list[str | None]:
        process = self._process()
        stdin, stdout = cast("IO[bytes]", process.stdin), cast("BufferedReader", process.stdout)
        reasons: list[str | None] = []
        try:
            stdin.write(json.dumps(request).encode() + b"\n")
            stdin.flush()
            for i in range(out.shape[1]):
                line = stdout.readline()
                if not line.endswith(b"\n"):
                    raise EOFError
                reasons.append(json.loads(line))
                for view in out[:, i] if reasons[-1] is None else ():  # [size, size, 3]
                    if stdout.readinto(view.data.cast("B")) < view.size:
                        raise EOFError
        except (EOFError, BrokenPipeError):
            path = request["paths"][min(len(reasons), out.shape[1] - 1)]
            raise UserError(
                f"a process that reads images ended with code {process.wait()} near {path}; "
                "if memory is short, use fewer workers, otherwise remove that file"
            ) from None
        return reasons

    def _process(self) -> "subprocess.Popen[bytes]":
        if not hasattr(self._local, "process"):
            pipe = subprocess.PIPE
            command = [sys.executable, "-P", _READER]  # -P: do not import from the folder of the file
            self._local.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, pipesize=1 << 20)
            self._processes.append(self._local.process)
        process: subprocess.Popen[bytes] = self._local.process
        return process


def _end(threads: ThreadPoolExecutor, processes: "list[subprocess.Popen[bytes]]") -> None:
    """End the readers. Their threads then reach the end of the answers, and also end."""
    threads.shutdown(wait=False, cancel_futures=True)
    for process in list(processes):
        process.kill()
    threads.shutdown(wait=True)
    for process in processes:  # a thread may have started one in the meantime
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            with suppress(BrokenPipeError):  # closing flushes a request that was not sent
                cast("IO[bytes]", pipe).close()


@dataclass(frozen=True, eq=False)
class Decoded(TensorExamples):
    """Image files that were decoded once and are kept in memory."""

    def form(self) -> dict[str, Any]:
        return {"size": self.shape[-1]}


def default_size(examples: FileExamples) -> int:
    """The side at which files are read by default: the median of their shorter sides if that is small, else `PHOTO`.

    Reads the headers of up to 100 files.
    """
    rows = range(0, len(examples), len(examples) // 100 + 1)
    sizes = [image_size(examples.path(row)) for row in rows]
    side = median_low([min(size) for size in sizes if size] or [PHOTO])
    return side if side <= SMALL else PHOTO


def load_images(examples: FileExamples) -> tuple[Decoded, Tensor]:
    """Decode all images into memory; also return which of the N files could be read.

    Stores the center square of `stored_size(size)` pixels as uint8. Outside training, the crops equal those of the
    files. In training, crops are taken from the square, so the ends of the longer side are not used.
    """
    n, side = len(examples), stored_size(examples.size)
    x = torch.empty((n, 3, side, side), dtype=torch.uint8)
    kept = torch.zeros(n, dtype=torch.bool)
    batches = ((chunk, 0) for chunk in torch.split(torch.arange(n), _CHUNK))
    start = done = 0
    with closing(examples._read(batches, crop=side, views=1, augment=False)) as reads:
        for images, good in reads:
            readable = images[0, good].permute(0, 3, 1, 2)
            x[done : done + len(readable)] = readable
            kept[start : start + len(good)] = good
            start, done = start + len(good), done + len(readable)
    tensor = Decoded(x[:done], examples.scale, Crop(examples.size))
    return tensor.to(examples.device), kept
