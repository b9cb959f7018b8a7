"""Rows and curves of several runs, each evaluated on the same new tasks."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch

from warpi.errors import UserError
from warpi.fewshot.data import Classes
from warpi.fewshot.episodes import Kind, make_tasks
from warpi.fewshot.evaluate import evaluate, predictions, score_tasks
from warpi.fewshot.learner import Learner
from warpi.fewshot.plot import Curve, distinguish
from warpi.fewshot.run import Run
from warpi.fewshot.train import validation_kind


def judged(
    run: Run,
    n: int = 1000,
    *,
    ways: int | None = None,
    shots: int | None = None,
    queries: int | None = None,
    part: str = "test",
    seed: int = 0,
    facts: Mapping[str, Any] | None = None,
    by_task: bool = False,
) -> dict[str, Any]:
    """Evaluate a run on n tasks of a part of its data; returns one row of a table.

    The tasks are of the kind the run was trained on unless another is given. All learners evaluated with one `seed`
    and kind get the same tasks. `facts` are added to the row; so are the `scores` of single tasks with `by_task`.
    """
    spec = run.spec
    trained = validation_kind(run.data, spec.kind)
    kind = Kind(*(a if b is None else b for a, b in zip(trained, (ways, shots, queries), strict=True)))
    device = run.learner.generator.device
    tasks = make_tasks(run.data.part(part), kind, device, training=False, augment=False, part=part)
    scores = evaluate(run.learner, tasks, n, seed=seed, name=part, timed=True)
    speeds = [record["episodes_per_s"] for record in run.history if record["episodes_per_s"]]
    numbers = scores._asdict()
    each = numbers.pop("each")
    row = {
        **_describe(run),
        "part": part,
        "episodes_seed": seed,
        "changed": dict(spec.changed),
        "train_episodes_per_s": statistics.median(speeds) if speeds else None,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "torch": torch.__version__,
        **(facts or {}),
        "metric": "accuracy" if kind.ways else "mse",
        **kind._asdict(),
        "transductive": run.learner.transductive,
        **numbers,
    }
    return row | {"scores": each} if by_task else row


def _describe(run: Run) -> dict[str, Any]:
    """The settings of a run, for a row."""
    spec = run.spec
    separate = ("seed", "train_ways")  # the row has separate keys for them
    return {
        "learner": spec.learner,
        "label": spec.label(),
        "data": spec.data,
        "task_ways": spec.ways,
        "train_ways": spec.train_ways,
        "train_shots": spec.shots,
        "iterations": spec.training.iterations,
        "seed": spec.training.seed,
        "bases": bases(run.learner),
        "training": {name: value for name, value in asdict(spec.training).items() if name not in separate},
    }


def bases(learner: Learner) -> int | None:
    """The number of random features; None if the learner has none."""
    eps = dict(learner.net.named_buffers()).get("eps")
    return None if eps is None or getattr(learner, "exact", False) else len(eps)


def versatility(run: Run, n: int, ways: Sequence[int], shots: Sequence[int], seed: int = 0) -> list[dict[str, Any]]:
    """Rows of a run on tasks with other ways, and with other shots, than in training."""
    return [judged(run, n, ways=w, shots=s, queries=q, seed=seed) for w, s, q in other_kinds(run, ways, shots)]


def other_kinds(run: Run, ways: Sequence[int], shots: Sequence[int]) -> list[Kind]:
    """The kinds of tasks that the data and the learner allow, of other ways and other shots."""
    source, spec = run.data.test, run.spec
    if not isinstance(source, Classes):
        raise UserError(f"{spec.data} is regression and has no ways; use plot --kind curves or --kind bases")
    if not run.learner.any_ways:
        ways = ()
    kinds = [(w, spec.shots) for w in sorted({*ways, spec.ways}) if w <= len(source)]
    kinds += [(spec.ways, s) for s in sorted({*shots} - {spec.shots}) if s < source.least]
    return [Kind(w, s, min(spec.training.queries, source.least - s)) for w, s in kinds]


def examples(runs: Sequence[Run], n: int, seed: int = 0) -> list[list[Curve]]:
    """Regression learners on the same example tasks: n lists for each number of shots, with one Curve per run."""
    if not runs or not all(run.data.regression for run in runs):
        raise UserError("example curves are for runs on sines; train some with `warpi fewshot fit --data sines`")
    about = [_describe(run) | {"train_shots": None} for run in runs]  # shots are rows, not columns
    full = distinguish(about, lambda r: str(r["label"]), also=("bases", "seed"))
    names = {run.path: full(row) for run, row in zip(runs, about, strict=True)}
    all_lines = []
    for shots in sorted({run.spec.shots for run in runs}):
        lines: list[list[Curve]] = [[] for _ in range(n)]
        for run in (run for run in runs if run.spec.shots == shots):
            tasks = make_tasks(run.data.test, Kind(0, shots, 200), run.learner.generator.device, False, False)
            for episode, out in predictions(run.learner, tasks, n, seed, "examples", batch=n):
                parts = (episode.support_x, episode.support_y, episode.query_x, episode.query_y, out.value)
                xs, ys, x, y, mean = (t[..., 0].tolist() for t in parts)
                std = out.std[..., 0].tolist() if out.std is not None else [None] * n
                mse = score_tasks(out, episode).tolist()
                for i, line in enumerate(lines):
                    line.append(Curve(names[run.path], shots, xs[i], ys[i], x[i], y[i], mean[i], std[i], mse[i]))
        all_lines += lines
    return all_lines
