"""Images read from their files while training goes on: any number of them, in a bounded amount of memory."""

import hashlib
import json
import logging
import os
import subprocess
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
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

from warpi.data.augment import Crop
from warpi.data.decode import decode_batch, image_size
from warpi.data.examples import Examples, ReadBatch, Scale, TensorExamples, check_form, is_integer
from warpi.errors import UserError, missing_package

logger = logging.getLogger("warpi.data")

PHOTO, SMALL = 224, 64  # pixels: the side at which photos are read, and the largest of what counts as a small image
IMAGENET = Scale(  # of pixels 0..255
    torch.tensor([123.675, 116.28, 103.53]).view(3, 1, 1), torch.tensor([58.395, 57.12, 57.375]).view(3, 1, 1)
)
_CPU = torch.device("cpu")
_READER = str(Path(__file__).with_name("decode.py"))  # the program of a reader process
_CHUNK = 16  # images a request: a batch is shared among the readers, so that the first one is there soon
_AHEAD = 4  # requests a reader


def stored_size(size: int) -> int:
    """The shorter side an image is scaled to before a crop of `size` is taken: 256 for 224."""
    return round(size * 8 / 7)


@dataclass(frozen=True, eq=False)
class FileExamples(Examples):
    """N image files, decoded by reader processes a little ahead of their use.

    An image is turned upright, scaled so that its shorter side is `stored_size(size)`, and cropped to size x size: at
    random and mirrored by chance in training, from the middle otherwise. A file that cannot be read is logged once,
    left out of its batch and kept in `bad`. More than `allowed` such files are an error. Other numbers of
    `workers` and `max_bad` are set with `dataclasses.replace(examples, workers=16)`.
    """

    always_readable: ClassVar[bool] = False
    root: str
    paths: tuple[str, ...]  # relative to root, or absolute
    size: int = PHOTO
    workers: int = min(8, os.cpu_count() or 1)  # 0: read in the main process; the images are the same
    device: torch.device = _CPU
    scale: Scale = IMAGENET
    max_bad: float = 0.01  # share of unreadable files tolerated
    bad: dict[str, str] = field(default_factory=dict, repr=False)  # path -> why; shared by copies on other devices

    def __post_init__(self) -> None:
        try:
            import PIL  # noqa: F401
        except ImportError:
            raise missing_package("pillow", "reading image files", "images") from None
        if self.size < 1 or self.workers < 0 or not 0 <= self.max_bad <= 1:
            got = f"size {self.size}, workers {self.workers}, max_bad {self.max_bad}"
            raise UserError(f"image files: got {got}; allowed are size >= 1, workers >= 0, max_bad 0..1")

    @property
    def shape(self) -> tuple[int, ...]:
        return (3, self.size, self.size)

    @property
    def allowed(self) -> int:
        """How many unreadable files are tolerated: `max_bad` of all, but at least 3; none where max_bad is 0."""
        return max(3, int(self.max_bad * len(self))) if self.max_bad else 0

    def __len__(self) -> int:
        return len(self.paths)

    def to(self, device: torch.device | str) -> Self:
        return replace(self, device=torch.device(device), scale=Scale(*(t.to(device) for t in self.scale)))

    def stream(
        self, batches: Iterable[tuple[Tensor, int]], *, augment: bool, views: int = 1, part: slice = slice(None)
    ) -> Iterator[ReadBatch]:
        drawn = views if augment else 1
        with closing(self._read(batches, crop=self.size, views=drawn, augment=augment, part=part)) as reads:
            for images, kept in reads:
                whole = bool(kept.all())
                x = (images if whole else images[:, kept]).to(self.device, non_blocking=True)
                x = x.permute(0, 1, 4, 2, 3).contiguous()  # [V, B', 3, size, size] uint8
                normal = tuple((view.to(self.scale.mean.dtype) - self.scale.mean) / self.scale.std for view in x)
                yield ReadBatch(normal if augment else normal * views, None if whole else kept)

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
        """Of the names of the files and the size they are read at; what is in a million files is not looked at."""
        return hashlib.sha256("\0".join((str(self.size), *self.paths)).encode()).hexdigest()

    def flat(self, rows: Tensor) -> Tensor:
        """The middle crop of each image; zeros where it cannot be read."""
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
        """Zero files that are read at a stored size."""
        check_form(is_integer(form["size"]) and 1 <= form["size"] <= 10_000, "size", form["size"])
        return cls("", (), form["size"])

    def path(self, row: int) -> str:
        return os.path.join(self.root, self.paths[row])

    def _read(
        self, batches: Iterable[tuple[Tensor, int]], *, crop: int, views: int, augment: bool, part: slice = slice(None)
    ) -> Generator[tuple[Tensor, Tensor], None, None]:
        """For (the part of) each batch its images [V, B, crop, crop, 3] uint8, and which of them could be read [B]."""
        plan, pending = iter(batches), deque[_Asked]()
        options = {"short": stored_size(self.size), "size": crop, "views": views, "augment": augment}
        readers = _Readers(self.workers) if self.workers else None
        # Each reader has a few requests waiting, and a batch is being read while the one before it is in use.
        few, jobs = (2, _AHEAD * self.workers) if readers else (1, 1)
        try:
            while True:
                while len(pending) < few or sum(len(asked.answers) for asked in pending) < jobs:
                    if (batch := next(plan, None)) is None:
                        break
                    pending.append(self._ask(*batch, part, readers, options))
                if not pending:
                    return
                paths, images, answers = pending.popleft()
                reasons = [reason for answer in answers for reason in answer()]
                self._note(paths, reasons)
                yield images, torch.tensor([reason is None for reason in reasons], dtype=torch.bool)
        finally:
            if readers:
                readers.close()

    def _ask(
        self, rows: Tensor, seed: int, part: slice, readers: "_Readers | None", options: dict[str, Any]
    ) -> "_Asked":
        paths = [self.path(row) for row in rows[part].tolist()]
        before = part.indices(len(rows))[0]  # chance follows from the position within the whole batch
        size = options["size"]
        pinned = self.device.type == "cuda"  # so that the copy to the device does not wait
        images = torch.empty((options["views"], len(paths), size, size, 3), dtype=torch.uint8, pin_memory=pinned)
        answers: list[Callable[[], list[str | None]]] = []
        for first in range(0, len(paths), _CHUNK):
            request = {"paths": paths[first : first + _CHUNK], "seed": int(seed), "first": before + first, **options}
            out = images.numpy()[:, first : first + _CHUNK]
            answers.append(readers.ask(request, out).result if readers else partial(_fill, request, out))
        return _Asked(paths, images, answers)

    def _any_there(self) -> bool:
        return any(os.path.exists(self.path(row)) for row in range(len(self)))

    def _note(self, paths: list[str], reasons: list[str | None]) -> None:
        if not self.bad and any(map(_is_absent, reasons)) and not self._any_there():
            slashes = "; write / between folders, not \\" if "\\" in self.paths[0] else ""
            raise UserError(
                f"none of {len(self)} listed images is there; the first, {self.paths[0]!r}, was looked for in "
                f"{os.path.abspath(self.root)}; name the folder that the paths begin in with --root FOLDER{slashes}"
            )
        for path, reason in zip(paths, reasons, strict=True):
            if reason is not None and path not in self.bad:
                self.bad[path] = reason
                logger.warning("unreadable image left out: %s (%s)", path, reason)
        if len(self.bad) > self.allowed:
            first = "; ".join(f"{path} ({reason})" for path, reason in list(self.bad.items())[:3])
            absent = "; if they lie elsewhere, name that folder with --root FOLDER"
            raise UserError(
                f"already {len(self.bad)} of {len(self)} images cannot be read, at most {self.allowed} are tolerated "
                f"(max_bad={self.max_bad:g}); mend or remove them, the first are: {first}"
                + (absent if all(map(_is_absent, self.bad.values())) else "")
            )


def _is_absent(reason: str | None) -> bool:
    return reason is not None and reason.startswith(FileNotFoundError.__name__)


class _Asked(NamedTuple):
    """A batch that is being read."""

    paths: list[str]  # B
    images: Tensor  # [V, B, size, size, 3] uint8, filled as the answers come
    answers: list[Callable[[], list[str | None]]]  # each waits, then says why each of its images could not be read


def _fill(request: dict[str, Any], out: np.ndarray) -> list[str | None]:
    """Read in this process.  out [V, n, size, size, 3]"""
    reasons = []
    for i, (reason, crops) in enumerate(decode_batch(**request)):
        reasons.append(reason)
        for view, crop in enumerate(crops):
            out[view, i] = np.frombuffer(crop, np.uint8).reshape(out.shape[2:])
    return reasons


class _Readers:
    """Reader processes, each started when there is work for it and served by a thread that waits for its answers.

    `close` ends them at once; it is also called when the object is dropped and when the program ends.
    """

    def __init__(self, workers: int) -> None:
        self._processes: list[subprocess.Popen[bytes]] = []
        self._own = threading.local()
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
                "where memory is short use fewer workers, otherwise remove that file"
            ) from None
        return reasons

    def _process(self) -> "subprocess.Popen[bytes]":
        if not hasattr(self._own, "process"):
            pipe = subprocess.PIPE
            command = [sys.executable, "-P", _READER]  # -P: its folder is not a place to import from
            self._own.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, pipesize=1 << 20)
            self._processes.append(self._own.process)
        process: subprocess.Popen[bytes] = self._own.process
        return process


def _end(threads: ThreadPoolExecutor, processes: "list[subprocess.Popen[bytes]]") -> None:
    """End the readers. A thread that waits for one sees the end of its answers, so that no thread is left either."""
    threads.shutdown(wait=False, cancel_futures=True)
    for process in list(processes):
        process.kill()
    threads.shutdown(wait=True)
    for process in processes:  # a thread may have started one meanwhile
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            with suppress(BrokenPipeError):  # a request that was not sent any more
                cast("IO[bytes]", pipe).close()


@dataclass(frozen=True, eq=False)
class Decoded(TensorExamples):
    """Image files that were decoded once and are kept in memory."""

    def form(self) -> dict[str, Any]:
        return {"size": self.shape[-1]}


def default_size(examples: FileExamples) -> int:
    """The side at which files are read where nobody says: their own where they are small, else that of photos.

    Looked at are the heads of up to 100 files, the shorter side of each.
    """
    rows = range(0, len(examples), len(examples) // 100 + 1)
    sizes = [image_size(examples.path(row)) for row in rows]
    side = median_low([min(size) for size in sizes if size] or [PHOTO])
    return side if side <= SMALL else PHOTO


def load_images(examples: FileExamples) -> tuple[Decoded, Tensor]:
    """All images decoded once and held in memory, and which rows they are [N]: unreadable files have none.

    Kept is the middle square of `stored_size(size)` pixels as uint8. Outside training this gives the very crops of
    the files; in training the crops come from that square, so that the ends of the longer side are never seen.
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
