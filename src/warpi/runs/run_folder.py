"""The folder of a training or few-shot run: what it contains, and how it is written.

After a crash at any time, the run can be resumed from its folder. `runs.schema` names the files.
"""

import json
import os
import platform
import shlex
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from datetime import date
from pathlib import Path
from typing import Any, NamedTuple

import torch

import warpi
from warpi.datasets.registry import DATASETS
from warpi.errors import UserError, format_count
from warpi.runs.schema import (
    BEST,
    CHECKPOINT,
    CHOICE,
    DONE,
    FEWSHOT_FORMAT,
    FORMAT,
    RESULTS,
    SPEC,
    SWEEP,
    check_spec,
    read_record,
    use_current_spec,
)
from warpi.training import checkpoint
from warpi.training.engine import Record
from warpi.utils import distributed
from warpi.utils.files import append_line, read_json, write_atomically, write_json
from warpi.utils.leases import Lease, one_writer
from warpi.utils.limits import check_regular
from warpi.utils.tracking import FILE as TRACKING

ADVICE = "choose another folder"
_COMMANDS = {FORMAT: "warpi fit", FEWSHOT_FORMAT: "warpi fewshot fit"}
# may be in a folder before a run has started
_BEFORE_A_RUN = (SWEEP, RESULTS, TRACKING, "tensorboard", "wandb", "data", "trusted", "log.txt")
_LOGS = (".log", ".out", ".err")  # output of the run that a shell or a job queue wrote


class FolderState(NamedTuple):
    """What a run folder contains, as plain JSON values."""

    spec: dict[str, Any] | None
    has_checkpoint: bool
    is_done: bool


def check_training_spec(stored: dict[str, Any], file: Path) -> None:
    """Refuse the specification of a training run if a value is missing or of the wrong kind."""
    check_spec(stored, file, ADVICE, ("spec", "method", "options", "recipe", "seed", "facts", "environment"))


class RunFolder:
    """The files of one run. `check` raises a UserError for the content of a `spec.json` that cannot be used."""

    def __init__(
        self, path: Path, form: str = FORMAT, check: Callable[[dict[str, Any], Path], None] = check_training_spec
    ) -> None:
        self.path = path
        self.form = form
        self.check = check
        self.checkpoint = path / CHECKPOINT
        self.results = path / RESULTS

    def read_spec(self) -> dict[str, Any] | None:
        """The content of `spec.json`, or None if the file does not exist."""
        file = self.path / SPEC
        try:
            stored: dict[str, Any] = read_json(file, ADVICE)
        except FileNotFoundError:
            return None
        if not isinstance(stored, dict) or stored.get("format") != self.form:
            command = _COMMANDS[self.form]
            raise UserError(f"{file} does not have the format {self.form!r} that `{command}` writes; {ADVICE}")
        self.check(stored, file)
        return use_current_spec(stored)

    @property
    def has_checkpoint(self) -> bool:
        return checkpoint.exists(self.checkpoint)

    @property
    def is_done(self) -> bool:
        return (self.path / DONE).exists()

    def state(self) -> FolderState:
        """What the folder contains. Refuses a folder with other files but no run."""
        state = FolderState(self.read_spec(), self.has_checkpoint, self.is_done)
        if state.spec is None and not state.has_checkpoint:
            self._check_free()
        return state

    def state_on_all_ranks(self) -> FolderState:
        """The `state` that rank 0 sees; the other ranks do not need access to the folder."""
        return FolderState(*json.loads(distributed.broadcast_from_rank0(lambda: json.dumps(self.state()).encode())))

    def read_history(self, advice: str, *, skip_unfinished: bool = False) -> list[Record]:
        """The records of `results.jsonl`. With `skip_unfinished`, an incomplete last line is omitted."""
        lines = [line for line in self._read_lines(advice) if line.endswith(b"\n") or not skip_unfinished]
        return [read_record(line, self.results, i, advice) for i, line in enumerate(lines, 1)]

    def _read_lines(self, advice: str) -> list[bytes]:
        check_regular(self.results)
        try:
            return self.results.read_bytes().splitlines(keepends=True) if self.results.exists() else []
        except OSError as e:
            raise UserError(f"cannot read {self.results}: {e.strerror}; {advice}") from e

    def spec_to_resume(self, state: FolderState, resume: bool, has_settings: bool) -> dict[str, Any] | None:
        """The stored specification if a run is resumed, None if a new one starts; raises if neither is possible.

        A run that failed before its first checkpoint starts from the beginning.
        """
        started = state.has_checkpoint or state.is_done
        if state.spec is None and state.has_checkpoint:
            raise UserError(f"{self.path} contains a checkpoint, but its {SPEC} is missing; choose another --out")
        if state.spec is None and resume and not has_settings:
            raise UserError(f"there is no run in {self.path} to resume")
        if started and not resume:
            raise UserError(f"{self.path} already contains a run; resume it with --resume, or choose another --out")
        return state.spec if resume else None

    def lock(self) -> AbstractContextManager[Lease]:
        """Context manager: lock the folder, so that no other process writes to it. Waits a while if one does."""
        return one_writer(self.path)

    def cut_history(self, n: int) -> list[Record]:
        """Return the first n records, those up to the checkpoint. Delete lines that a crash left after them."""
        advice = f"restore it, or {ADVICE}"
        lines = self._read_lines(advice)[:n]
        records = [read_record(line, self.results, i, advice) for i, line in enumerate(lines, 1)]
        if len(records) < n:
            raise UserError(
                f"{self.results} has {format_count(len(records), 'epoch')}, but the checkpoint has {n}; restore the "
                f"missing lines, or {ADVICE}"
            )
        write_atomically(self.results, b"".join(lines))
        return records

    def _check_free(self) -> None:
        """Refuse a folder with other files. They may be the user's data."""
        try:
            with os.scandir(self.path) as entries:
                names = [e.name for e in entries if e.name not in _BEFORE_A_RUN and not e.name.endswith(_LOGS)]
        except OSError:  # the folder does not exist or cannot be read; writing to it raises an error then
            return
        others = sorted(name for name in names if not name.startswith("."))
        if others:
            listed = ", ".join(map(repr, others[:3])) + (", ..." if len(others) > 3 else "")
            raise UserError(
                f"the folder {self.path} contains {listed} and no run; choose a new or empty one, such as --out "
                f"{shlex.quote(f'runs/{self.path.resolve().name}')}"
            )

    def write_spec(self, description: Mapping[str, Any]) -> None:
        write_json(self.path / SPEC, description)

    def append(self, record: Record) -> None:
        append_line(self.results, json.dumps(record))

    def save(self, state: dict[str, Any]) -> None:
        checkpoint.save(self.checkpoint, state)

    def save_best(self, state: dict[str, Any]) -> None:
        write_atomically(self.path / BEST, checkpoint.pack(state, checkpoint.FORMAT))

    def save_choice(self, choice: list[dict[str, Any]]) -> None:
        write_json(self.path / CHOICE, choice)

    def finish(self) -> None:
        write_atomically(self.path / DONE, b"")


def describe_run(
    form: str, spec: Mapping[str, Any], facts: Mapping[str, Any], device: torch.device, **environment: Any
) -> dict[str, Any]:
    """The content of `spec.json`."""
    return {
        "format": form,
        "version": warpi.__version__,
        "spec": dict(spec),
        "facts": dict(facts),
        "environment": {
            "date": date.today().isoformat(),
            "python": platform.python_version(),
            "torch": torch.__version__,
            "device": device.type,
            "gpu": torch.cuda.get_device_name(device) if device.type == "cuda" else None,
            "threads": torch.get_num_threads(),
            **environment,
        },
    }


def check_outside(path: Path, data: object) -> None:
    """Refuse a run folder inside a folder of images, where it would look like a class."""
    is_folder = isinstance(data, str) and data not in DATASETS and os.path.isdir(data)
    if is_folder and path.resolve().is_relative_to(Path(str(data)).resolve()):
        raise UserError(f"--out {path} is inside the folder of the data, {data}; choose one outside of it")
