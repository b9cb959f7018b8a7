"""The part of a task that a checkpoint stores: everything except the inputs, plus how to read new inputs."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from warpi.data.examples import Examples, is_integer
from warpi.data.placeholder import PlaceholderExamples, examples_from_form
from warpi.data.split import Split
from warpi.errors import UserError, blame_file
from warpi.runs.stored_facts import PACKED_FACTS
from warpi.training.task import Task


def pack_task(task: Task, facts: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return a task without its inputs, as plain values and tensors; `facts` are the facts in the run's `spec.json`.

    Returns None if new inputs of this kind cannot be read from files.
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
    """Rebuild the task stored in a checkpoint `file`.

    Raises a UserError if the packed task is damaged, or if `facts` belong to another run.
    """
    with blame_file(file):
        for name in PACKED_FACTS:
            packed_value = packed["facts"][name]
            if packed_value != facts.get(name):
                raise UserError(
                    f"{file} and the spec.json next to it belong to different runs: {name} is {packed_value!r} in the "
                    f"checkpoint and {facts.get(name)!r} in spec.json; put the files of one run together again"
                )
        template = examples_from_form(packed["form"]).to(device)
        classes = tuple(packed["classes"])
        noise_rate = packed["noise_rate"]
        splits = {name: _unpack_split(split, template, len(classes)) for name, split in packed["splits"].items()}
        counts = {f"n_{name}": len(splits.get(name, ())) for name in ("train", "meta", "val")}
        counts["n_classes"] = len({name for name in classes if isinstance(name, str)})
        if any(packed["facts"][name] != n for name, n in counts.items()) or not isinstance(noise_rate, float | None):
            raise ValueError(f"counts or noise rate do not match the facts: {counts}, noise rate {noise_rate}")
        return Task(splits["train"], splits.get("meta"), splits.get("val"), classes, noise_rate)  # no `meta_given`


def _pack_split(split: Split) -> dict[str, Any]:
    return {"of": len(split.examples), "rows": _to_smallest_dtype(split.rows), "y": _to_smallest_dtype(split.y)}


def _unpack_split(packed: Mapping[str, Any], template: Examples, n_classes: int) -> Split:
    n_examples = packed["of"]
    rows = packed["rows"].long()
    y = packed["y"].long()
    for name, values, limit in (("rows", rows, n_examples), ("labels", y, n_classes)):
        if not is_integer(limit) or values.shape != (len(y),) or not bool(((values >= 0) & (values < limit)).all()):
            raise ValueError(f"{name} of shape {tuple(values.shape)} must be {len(y)} integers from 0 to {limit} - 1")
    return Split(PlaceholderExamples(template, n_examples), rows, y.to(template.device))


def _to_smallest_dtype(values: Tensor) -> Tensor:
    """Convert non-negative integers to the smallest type that can represent them."""
    values = values.cpu()
    largest = int(values.max()) if len(values) else 0
    for dtype in (torch.uint8, torch.int16, torch.int32):
        if largest <= torch.iinfo(dtype).max:
            return values.to(dtype)
    return values.to(torch.int64)
