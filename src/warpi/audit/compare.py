"""Compare methods, and the candidates of `auto`, on trusted rows that they were not trained on."""

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import torch

from warpi.audit.out_of_sample import predict_split, split_into_folds
from warpi.auto.fit import estimate_class_sizes
from warpi.auto.rows import weigh_trusted
from warpi.auto.score import share_error
from warpi.auto.transition import bayes
from warpi.errors import UserError, unknown
from warpi.methods.registry import METHODS
from warpi.runs.run import Run
from warpi.runs.run_folder import RunFolder
from warpi.runs.spec import PreparedRun, RunSpec, prepare
from warpi.training.engine import train

Entry = dict[str, Any]
"""A line of choice.json: candidate, score, error, seconds, weight, note."""


class OutOfTime(Exception):
    """The time for the comparison is over."""


def compare(
    run: Run,
    methods: Sequence[str],
    *,
    folds: int = 3,
    budget: float | None = None,
    say: Callable[[str], None] = lambda _: None,
) -> list[Entry]:
    """Add methods to the candidates of a finished run of `auto`, and store all of them in its choice.json.

    Each method is trained `folds` times with all noisy rows and without one fold of the trusted rows, on which it is
    then scored. Methods that do not fit into `budget` seconds are listed as left out. A score never changes what the
    run predicts: train with `--method NAME` to use another method.
    """
    candidates = run.method.choice()
    if candidates is None:
        raise UserError(
            f"methods are compared with the candidates of auto, but {run.path} is a run of "
            f"{type(run.method).__name__}; pass a run of auto, or --data and --out for a new one"
        )
    trusted = run.task.meta
    if trusted is None or len(trusted) < 2:
        raise UserError("methods are compared on trusted rows, but this run has fewer than two; check some rows first")
    for name in methods:
        if name not in METHODS:
            raise unknown("method", name, METHODS)
    deadline = None if budget is None else time.monotonic() + budget
    entries: list[Entry] = [entry for entry in candidates if entry["candidate"] not in methods]
    for i, name in enumerate(methods):
        left = "" if deadline is None else f", {max(0.0, deadline - time.monotonic()):.0f} s left"
        say(f"method {i + 1} of {len(methods)}: {name}{left}")
        entries.append(_score(run, name, folds, deadline))
    RunFolder(run.path).save_choice(entries)
    return entries


def _score(run: Run, name: str, folds: int, deadline: float | None) -> Entry:
    """Train and score one method."""
    began = time.monotonic()
    entry: Entry = {"candidate": name, "score": None, "error": None, "seconds": 0.0, "weight": 0.0, "note": ""}
    try:
        _check_time(deadline)
        prepared = _prepare_method(run, name)
        chosen, predicted = _predict_trusted(prepared, folds, deadline)
    except OutOfTime:
        entry["note"] = "left out: no time"
    except UserError as e:
        entry["note"] = f"left out: {e}"
    else:
        task = prepared.task
        assert task.meta is not None
        truth = task.meta.y.cpu().numpy()[chosen]
        before = None if task.meta_given is None else task.meta_given.cpu().numpy()[chosen]
        right = (predicted == truth).astype(np.float64)
        weight = weigh_trusted(_class_sizes(run), truth, before, task.train.y.cpu().numpy())
        entry["score"] = float(weight @ right / weight.sum())
        entry["error"] = share_error(right, weight)
        entry["note"] = f"trained {min(folds, len(truth))} times without some trusted rows"
    entry["seconds"] = round(time.monotonic() - began, 3)
    return entry


def _class_sizes(run: Run) -> Any:
    """Estimated number of noisy rows of each class, computed as in `auto`, so that the scores are comparable."""
    task = run.task
    given = task.train.y.cpu().numpy()
    own = run.method.out_of_sample()
    if own is None:
        return np.bincount(given, minlength=task.n_classes)
    p = own.p.numpy()
    return estimate_class_sizes(p, bayes(p, own.transition.numpy(), given))


def _prepare_method(run: Run, name: str) -> PreparedRun:
    """A method with its own defaults on the data of a run."""
    stored = RunFolder(run.path).read_spec()
    assert stored is not None
    spec = RunSpec.from_json(stored["spec"])
    settings = {**asdict(spec.data), "seed": spec.recipe.seed}
    return prepare(RunSpec.from_settings(name, **settings)).to(run.task.train.examples.device)


def _predict_trusted(prepared: PreparedRun, folds: int, deadline: float | None) -> tuple[Any, Any]:
    """Positions of trusted rows, and predictions by methods that were not trained on them."""
    trusted = prepared.task.meta
    assert trusted is not None
    y = trusted.y.cpu().numpy()
    chosen = []
    predicted = []
    for fold in split_into_folds(y, min(folds, len(y)), prepared.spec.recipe.seed):
        rest = np.setdiff1d(np.arange(len(y)), fold)
        left_out = fold[np.isin(y[fold], y[rest])]  # the only row of a class stays
        if not len(left_out):
            continue
        kept = torch.from_numpy(np.setdiff1d(np.arange(len(y)), left_out))
        part = replace(prepared, task=replace(prepared.task, meta=trusted.subset(kept), val=None))
        with part.seed():
            method = part.start()
            for _ in train(method, part.task):
                _check_time(deadline)
        predictions = predict_split(method, trusted.subset(torch.from_numpy(left_out)))
        chosen.append(left_out)
        predicted.append(predictions.p.argmax(1))
    if not chosen:
        raise UserError("every class has only one trusted row, so none can be left out")
    return np.concatenate(chosen), np.concatenate(predicted)


def _check_time(deadline: float | None) -> None:
    if deadline is not None and time.monotonic() > deadline:
        raise OutOfTime
