"""What a checkpoint holds of the data: all of a task but its inputs, and how inputs are read."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from warpi.data.examples import Examples, is_integer
from warpi.data.placeholder import PlaceholderExamples, examples_from_form
from warpi.data.split import Split
from warpi.errors import UserError, blame_file
from warpi.training.task import Task

_FACTS = ("inputs_sha256", "noise_sha256", "n_train", "n_meta", "n_val", "n_classes")


def carried(task: Task, facts: Mapping[str, Any]) -> dict[str, Any] | None:
    """A task without its inputs, as plain values and tensors; `facts` are those of the run's `spec.json`.

    None where inputs like its own cannot be read from files.
    """
    if (form := task.train.examples.form()) is None:
        return None
    splits = {"train": task.train, "meta": task.meta, "val": task.val}
    return {
        "form": form,
        "classes": list(task.classes),
        "noise_rate": task.noise_rate,
        "splits": {name: _packed(split) for name, split in splits.items() if split is not None},
        "facts": {name: facts[name] for name in _FACTS},
    }


def task_of(stored: Any, facts: Mapping[str, Any], where: torch.device, file: object) -> Task:
    """The task that a checkpoint holds. One that is garbled, or that `spec.json` does not know, is refused."""
    with blame_file(file):
        for name in _FACTS:
            if (held := stored["facts"][name]) != (known := facts.get(name)):
                raise UserError(
                    f"{file} and the spec.json beside it are of two runs: {name} is {held!r} in the one and {known!r} "
                    "in the other; put the files of one run together again"
                )
        form, classes, rate = (
            examples_from_form(stored["form"]).to(where),
            tuple(stored["classes"]),
            stored["noise_rate"],
        )
        parts = {name: _unpacked(split, form, len(classes)) for name, split in stored["splits"].items()}
        counts = {f"n_{name}": len(parts.get(name, ())) for name in ("train", "meta", "val")}
        counts["n_classes"] = len({name for name in classes if isinstance(name, str)})
        if any(stored["facts"][name] != n for name, n in counts.items()) or not isinstance(rate, float | None):
            raise ValueError(f"{counts}, noise rate {rate}")
        return Task(parts["train"], parts.get("meta"), parts.get("val"), classes, rate)


def _packed(split: Split) -> dict[str, Any]:
    return {"of": len(split.examples), "rows": _narrow(split.rows), "y": _narrow(split.y)}


def _unpacked(stored: Mapping[str, Any], form: Examples, n_classes: int) -> Split:
    n, rows, y = stored["of"], stored["rows"].long(), stored["y"].long()
    limits = {"rows": (rows, n), "labels": (y, n_classes)}
    for name, (values, limit) in limits.items():
        if not is_integer(limit) or values.shape != (len(y),) or not bool(((values >= 0) & (values < limit)).all()):
            raise ValueError(f"{name} {tuple(values.shape)} are not all in 0..{limit} - 1")
    return Split(PlaceholderExamples(form, n), rows, y.to(form.device))


def _narrow(t: Tensor) -> Tensor:
    """Whole numbers from 0 on, in as few bytes as they need."""
    t = t.cpu()
    kinds = (torch.uint8, torch.int16, torch.int32)
    return t.to(next((kind for kind in kinds if not len(t) or int(t.max()) <= torch.iinfo(kind).max), torch.int64))
