"""One process of a sweep: take runs from the queue, one after another, and train them."""

import math
import time
import traceback

import torch

from warpi.errors import UserError
from warpi.runs.run import fitting
from warpi.sweep.queue import ClaimedRun, Queue, RunEvent
from warpi.utils.devices import Stopped
from warpi.utils.leases import LeaseLost

_POLL = 0.2  # seconds between two polls of the queue, and between two `alive` events


def work(
    queue: Queue, device: torch.device, caught: list[int], shares_device: bool = False, patience: float = math.inf
) -> None:
    """Train the runs of a queue until none is left or `caught` contains a signal.

    If all remaining runs belong to other processes, wait for at most `patience` seconds.

    A run that fails does not stop the others. A run that does not fit into the memory of a shared device returns to
    the queue, and this process ends, so that fewer processes share the device. If no other process is training, the
    run is retried once before it counts as failed.
    """
    retried: set[str] = set()
    idle_since = time.monotonic()
    while not caught:
        claim = queue.take()
        if claim is None:
            if not queue.has_more() or time.monotonic() - idle_since >= patience:
                return
            time.sleep(_POLL)
            queue.report(RunEvent("alive"))
            continue
        name = claim.job.name
        queue.report(RunEvent("begun", name, claim.epoch))
        with claim.lock:
            event, details = _train(queue, claim, device, caught)
            if event.kind == "requeued" and (not shares_device or name in retried):
                event = RunEvent("failed", name, event.epoch, reason=event.reason)
            if event.kind == "done":
                queue.mark_done(claim)
            elif event.kind == "failed":
                queue.mark_failed(claim.job, event.reason, details)
        queue.report(event)
        idle_since = time.monotonic()
        if event.kind == "requeued":
            if queue.others_are_at_work():
                return
            retried.add(name)


def _train(queue: Queue, claim: ClaimedRun, device: torch.device, caught: list[int]) -> tuple[RunEvent, str]:
    """Train one run. Returns the event that ended it, and the traceback of an unexpected error."""
    name = claim.job.name
    epoch = claim.epoch
    threads = torch.get_num_threads()
    steps = fitting(
        claim.path,
        resume=claim.resume,
        device=str(device),
        caught=caught,
        cache=queue.cache,
        lease=claim.lease,
        **claim.job.settings,
    )
    reported = time.monotonic()
    try:
        while True:
            record = next(steps)
            if record is not None:
                epoch = int(record["epoch"])
                queue.report(RunEvent("epoch", name, epoch, record))
            elif time.monotonic() - reported >= _POLL:
                reported = time.monotonic()
                queue.report(RunEvent("alive"))
    except StopIteration as end:
        history = end.value.history
        return RunEvent("done", name, len(history), history[-1] if history else None), ""
    except (Stopped, LeaseLost):  # another process may have taken over a run whose process was paused
        return RunEvent("stopped", name, epoch), ""
    except UserError as error:
        return RunEvent("failed", name, epoch, reason=str(error)), ""
    except Exception as error:  # a bug in one run must not stop the others
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        if isinstance(error, MemoryError | torch.OutOfMemoryError) or "out of memory" in str(error):
            reason += "; lower batch_size and meta_batch_size"
            return RunEvent("requeued", name, epoch, reason=reason), traceback.format_exc()
        return RunEvent("failed", name, epoch, reason=reason), traceback.format_exc()
    finally:
        steps.close()
        torch.set_num_threads(threads)
        if device.type == "cuda":
            torch.cuda.empty_cache()
