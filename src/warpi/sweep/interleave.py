"""Several runs in one process, a step of each in turn, each on a CUDA stream of its own.

A step only queues its work on the GPU, so that the streams overlap. What is global in a process belongs to one run at
a time: the generators of python, numpy and torch, the number of threads and a switch of cuDNN's are swapped whenever
another run has its turn. So each run is what it would be alone, on a CPU bit for bit.
"""

import gc
import random
import time
import traceback
from collections import deque
from collections.abc import Callable, Generator
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
import torch

from warpi.errors import UserError
from warpi.runs.run import Run, Stopped, fitting
from warpi.sweep.gpu_packing import Crowd, Meter
from warpi.sweep.plan import Job
from warpi.training.engine import Record

_AHEAD = 16  # steps of one run that may wait on the GPU: enough to keep it busy while another is evaluated
_POLL = 0.2  # seconds between two looks for work, and between two signs of life


@dataclass(frozen=True)
class Event:
    """Something that happened to a run; `alive` is about none of them."""

    what: Literal["begun", "epoch", "done", "failed", "stopped", "again", "alive"]
    run: str = ""
    epoch: int = 0  # epochs done
    record: Record | None = None  # of the last of them
    reason: str = ""  # why it failed


@dataclass(frozen=True)
class Claim:
    """A run that is ours to do."""

    job: Job
    path: Path
    epoch: int  # what is done of it
    resume: bool
    held: ExitStack  # gives it back


class Work(Protocol):
    """Where runs come from."""

    def take(self) -> Claim | None:
        """A run to begin or to go on with; None where there is none at the moment."""

    def more(self) -> bool:
        """Whether there may be one later, since another process has not come to an end with its own."""

    def done(self, claim: Claim) -> None:
        """A run is complete."""

    def failed(self, job: Job, reason: str, details: str) -> None:
        """A run cannot be done."""


def drive(work: Work, device: torch.device, crowd: Crowd, caught: list[int], tell: Callable[[Event], None]) -> None:
    """Do the work there is, `crowd.limit` runs at once, until there is none or a signal is noted in `caught`."""
    lanes: list[_Lane] = []
    free: list[torch.cuda.Stream] = []  # memory that a run leaves behind serves the next one on its stream
    meter, turns, look, sign = Meter(), _Turns(device), 0.0, 0.0
    try:
        while True:
            while not caught and len(lanes) < crowd.limit and time.monotonic() >= look:
                if (claim := work.take()) is None:
                    look = time.monotonic() + _POLL
                    break
                run = fitting(claim.path, resume=claim.resume, device=str(device), caught=caught, **claim.job.settings)
                stream = None
                if device.type == "cuda":
                    stream = free.pop() if free else torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
                lanes.append(_Lane(claim, run, stream, turns.outside.for_a_run(), claim.epoch))
                meter.restart([lane.name for lane in lanes])
                tell(Event("begun", claim.job.name, claim.epoch))
            if not lanes:
                if caught or not work.more():
                    return
                time.sleep(_POLL)
            for lane in list(lanes):
                meter.add(lane.name, lane.finished())
                if len(lane.queued) >= _AHEAD and not caught:
                    continue
                began = time.perf_counter()
                event = turns.step(lane)
                if event is None:
                    continue
                meter.pause(time.perf_counter() - began)
                if event.what != "epoch":
                    lanes.remove(lane)
                    meter.restart([other.name for other in lanes])
                    if event.what == "again":  # it found no memory: alone it may
                        crowd.out_of_memory(len(lanes))
                        event = event if lanes else replace(event, what="failed")
                    if event.what == "done":
                        work.done(lane.claim)
                    if event.what == "failed":
                        work.failed(lane.claim.job, event.reason, lane.details)
                    lane.claim.held.close()
                    if lane.stream is not None:
                        _give_back(lane.stream)
                        free.append(lane.stream)
                    look = 0.0
                tell(event)
            if lanes and all(len(lane.queued) >= _AHEAD for lane in lanes):
                lanes[0].queued[0].synchronize()
            if (rates := meter.rates()) is not None and device.type == "cuda":
                crowd.measured(rates, torch.cuda.mem_get_info(device)[0], torch.cuda.memory_reserved(device))
            if time.monotonic() >= sign:
                sign = time.monotonic() + _POLL
                tell(Event("alive"))
    finally:
        for lane in lanes:  # where something unforeseen has happened: their last checkpoints stay
            turns.close(lane)
        turns.outside.put()


def _give_back(stream: torch.cuda.Stream) -> None:
    """Return the memory of a run that has ended to the device, for whatever stream."""
    stream.synchronize()  # nothing reads it any more
    gc.collect()  # networks, graphs and optimizers refer to each other in circles
    torch.cuda.empty_cache()


@dataclass(frozen=True)
class _Globals:
    """What belongs to the process, and while it has its turn, to a run."""

    python: tuple[Any, ...]
    numpy: Any
    cpu: torch.Tensor
    cuda: torch.Generator | None  # holds the state itself, not a copy: a captured graph draws from it at every launch
    threads: int
    benchmark: bool  # whether cuDNN tries all its algorithms; `capture.py` sets it

    @classmethod
    def now(cls, device: torch.device) -> "_Globals":
        cuda = torch.cuda.default_generators[device.index].graphsafe_get_state() if device.type == "cuda" else None
        legacy, benchmark = np.random.get_state(), torch.backends.cudnn.benchmark  # noqa: NPY002
        return cls(random.getstate(), legacy, torch.get_rng_state(), cuda, torch.get_num_threads(), benchmark)

    def for_a_run(self) -> "_Globals":
        """The same, with a state of its own for what is not copied at every turn."""
        return replace(self, cuda=None if self.cuda is None else self.cuda.clone_state())

    def put(self) -> None:
        random.setstate(self.python)
        np.random.set_state(self.numpy)  # noqa: NPY002
        torch.set_rng_state(self.cpu)
        if self.cuda is not None:
            torch.cuda.default_generators[self.cuda.device.index].graphsafe_set_state(self.cuda)
        if torch.get_num_threads() != self.threads:
            torch.set_num_threads(self.threads)
        torch.backends.cudnn.benchmark = self.benchmark


@dataclass
class _Lane:
    """A run under way."""

    claim: Claim
    steps: Generator[Record | None, None, Run]
    stream: torch.cuda.Stream | None
    left: _Globals  # as they were after its last turn
    epoch: int
    queued: deque[torch.cuda.Event] = field(default_factory=deque)  # one for each step that the GPU has yet to do
    complete: int = 0  # steps that are, and have not been counted
    details: str = ""  # of the error that ended it

    @property
    def name(self) -> str:
        return self.claim.job.name

    def finished(self) -> int:
        """How many steps have been completed since the last call; waits for nothing."""
        while self.queued and self.queued[0].query():  # type: ignore[no-untyped-call]
            self.queued.popleft()
            self.complete += 1
        count, self.complete = self.complete, 0
        return count


class _Turns:
    """Gives one run after the other the process, with the generators as that run had left them."""

    def __init__(self, device: torch.device) -> None:
        if device.type == "cuda":
            torch.cuda.init()  # type: ignore[no-untyped-call]  # its generators are not there before
        self.device, self.outside = device, _Globals.now(device)
        self.last: _Lane | None = None  # whose generators are in place

    def step(self, lane: _Lane) -> Event | None:
        """One step of a run, and what there is to tell about it: an epoch, or its end; None after most steps."""
        self._enter(lane)
        try:
            with nullcontext() if lane.stream is None else torch.cuda.stream(lane.stream):
                record = next(lane.steps)
                if lane.stream is None:
                    lane.complete += 1
                else:
                    lane.queued.append(torch.cuda.Event())  # type: ignore[no-untyped-call]
                    lane.queued[-1].record(lane.stream)
        except StopIteration as end:
            self.last = None  # a run that ends puts the generators back as it had found them
            history: list[Record] = end.value.history
            return Event("done", lane.name, len(history), history[-1] if history else None)
        except Stopped:
            self.last = None
            return Event("stopped", lane.name, lane.epoch)
        except UserError as e:
            self.last = None
            return Event("failed", lane.name, lane.epoch, reason=str(e))
        except Exception as e:  # a night's other runs must not end by a bug that one of them has met
            self.last, lane.details = None, traceback.format_exc()
            memory = isinstance(e, MemoryError | torch.OutOfMemoryError) or "out of memory" in str(e)
            reason = f"{type(e).__name__}: {' '.join(str(e).split())[:300]}"
            reason += "; lower batch_size and meta_batch_size" if memory else ""
            return Event("again" if memory else "failed", lane.name, lane.epoch, reason=reason)
        if record is None:
            return None
        lane.epoch = int(record["epoch"])
        return Event("epoch", lane.name, lane.epoch, record)

    def close(self, lane: _Lane) -> None:
        self._enter(lane)
        lane.steps.close()
        lane.claim.held.close()
        self.last = None

    def _enter(self, lane: _Lane) -> None:
        if self.last is not lane:
            if self.last is not None:
                self.last.left = _Globals.now(self.device)
            lane.left.put()
            self.last = lane
