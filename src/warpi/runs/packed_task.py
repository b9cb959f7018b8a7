"""The part of a task that is stored in a checkpoint: everything except the inputs, plus how to read new ones."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from warpi.data.examples import Examples, is_integer
from warpi.data.placeholder import PlaceholderExamples, examples_from_form
from warpi.data.split import Split
from warpi.errors import UserError, blame_file
from warpi.runs.facts import PACKED_FACTS
from warpi.training.task import Task


def pack_task(task: Task, facts: Mapping[str, Any]) -> dict[str, Any] | None:
    """A task without its inputs, as plain values and tensors; `facts` are those of the run's `spec.json`.

    None if inputs like those of the task cannot be read from files.
    """
    form = task.train.examples.form()
    if form is None:
        return None
    splits = {"train": task.train, "meta": task.meta, "val": task.val}
    return {
        "form": form,
        "classes": list(task.classes),
        "noise_rate": task.noise_rate,
        "splits": {name: _pack_split(split) for name, split in splits.items() if split is not None},
        "facts": {name: facts[name] for name in PACKED_FACTS},
    }


def unpack_task(packed: Any, facts: Mapping[str, Any], device: torch.device, file: object) -> Task:
    """The task in a checkpoint `file`. Raises a UserError if it is damaged, or if `facts` are those of another run."""
    with blame_file(file):
        for name in PACKED_FACTS:
            packed_value = packed["facts"][name]
            if packed_value != facts.get(name):
                raise UserError(
                    f"{file} and the spec.json next to it belong to different runs: {name} is {packed_value!r} in the "
                    f"checkpoint and {facts.get(name)!r} in spec.json; put the files of one run together again"
                )
        form = examples_from_form(packed["form"]).to(device)
        classes = tuple(packed["classes"])
        noise_rate = packed["noise_rate"]
        splits = {name: _unpack_split(split, form, len(classes)) for name, split in packed["splits"].items()}
        counts = {f"n_{name}": len(splits.get(name, ())) for name in ("train", "meta", "val")}
        counts["n_classes"] = len({name for name in classes if isinstance(name, str)})
        if any(packed["facts"][name] != n for name, n in counts.items()) or not isinstance(noise_rate, float | None):
            raise ValueError(f"{counts}, noise rate {noise_rate}")
        return Task(splits["train"], splits.get("meta"), splits.get("val"), classes, noise_rate)


def _pack_split(split: Split) -> dict[str, Any]:
    return {"of": len(split.examples), "rows": _smallest_type(split.rows), "y": _smallest_type(split.y)}


def _unpack_split(packed: Mapping[str, Any], form: Examples, n_classes: int) -> Split:
    n = packed["of"]
    rows = packed["rows"].long()
    y = packed["y"].long()
    limits = {"rows": (rows, n), "labels": (y, n_classes)}
    for name, (values, limit) in limits.items():
        if not is_integer(limit) or values.shape != (len(y),) or not bool(((values >= 0) & (values < limit)).all()):
            raise ValueError(f"{name} {tuple(values.shape)} are not all in 0..{limit} - 1")
    return Split(PlaceholderExamples(form, n), rows, y.to(form.device))


def _smallest_type(t: Tensor) -> Tensor:
    """Non-negative integers in the smallest type that holds them."""
    t = t.cpu()
    kinds = (torch.uint8, torch.int16, torch.int32)
    return t.to(next((kind for kind in kinds if not len(t) or int(t.max()) <= torch.iinfo(kind).max), torch.int64))
