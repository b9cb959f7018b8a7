"""A trained method to an `Audit`: its view of the rows, T, Bayes, and how sure all that is."""

import logging
import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

import warpi
import warpi.audit.label_scores as scores
from warpi.audit.label_scores import Floats
from warpi.audit.out_of_sample import SAMPLES, RowPredictions, out_of_sample, predict_split
from warpi.audit.result import Audit
from warpi.data.split import Split
from warpi.errors import UserError
from warpi.runs.reopen import reopen
from warpi.runs.run import Run
from warpi.training.method import Method
from warpi.training.task import Task

log = logging.getLogger("warpi.audit")
_POOR = 0.7  # accuracy on the trusted rows below which a classifier is no judge
_UNCHECKED = 0.1  # how far off rates are where nothing that was kept from training checks them (docs/audit.md)


def judge(
    run: Path | str | Run | Method,
    *,
    folds: int,
    rows: str | None,
    threshold: float,
    device: str,
    save: bool,
    own: Mapping[str, Any],
) -> Audit:
    """See `warpi.audit.audit`."""
    if rows not in (None, "train", "all"):
        raise UserError(f"rows are 'train' or 'all', got {rows!r}")
    if not 0 < threshold < 1:
        raise UserError(f"threshold is a probability in (0, 1), got {threshold}")
    if folds and not 2 <= folds <= 50:
        raise UserError(f"folds are 0 (none) or 2 to 50, got {folds}")
    if isinstance(run, Path | str):
        run = reopen(run, device, own)
    method, path = (run, None) if isinstance(run, Method) else (run.method, run.path)
    if not hasattr(method, "task"):
        raise UserError("this method has not been trained; train it first, or give the folder of a run")
    task = method.task
    trusted, held_out = predict_split(method, task.meta), predict_split(method, task.val)
    seen, memory = _without_memory(predict_split(method, task.train), held_out)
    source, fresh, apart = _source(len(held_out.y)), None, not method.needs_meta
    if folds:
        fresh, left_out = out_of_sample(method, folds, path)
        trusted, apart = (left_out, True) if len(left_out.y) else (trusted, apart)
        source = f"out of sample: {folds} trainings of the recipe, each judges the rows that it left out"
    temperature = scores.fit_temperature(trusted.p, trusted.y)
    seen, held_out, trusted = (_tempered(sight, temperature) for sight in (seen, held_out, trusted))
    if fresh is not None:
        fresh = _tempered(fresh, temperature)
        both = np.stack([seen.p[np.searchsorted(seen.at, fresh.at)], fresh.p])  # [2, n, K]
        seen, memory = replace(fresh, each=both), 0.0
    T = scores.estimate_transition(seen.p, seen.y)

    parts: list[tuple[Split, RowPredictions]] = [(task.train, seen)]
    more = _held_out(run, task)
    rows = rows or ("all" if isinstance(run, Run) and not run.truth.test_is_clean else "train")
    if rows == "all":
        sights = (
            held_out if split is task.val else _tempered(predict_split(method, split), temperature) for split in more
        )
        parts += zip(more, sights, strict=True)
    row = np.concatenate([split.rows.numpy()[sight.at] for split, sight in parts])
    order = row.argsort(kind="stable")
    all_ = _joined([sight for _, sight in parts])
    y, p = all_.y[order], all_.p[order]
    found = scores.judge_labels(scores.posterior(p, y, T), y, threshold)
    spread, kind = uncertainty(all_, T, bool(folds))
    checked = apart and len(np.unique(trusted.y)) == task.n_classes
    off = 0.0 if checked and folds else _UNCHECKED  # without folds p has seen the labels, as no second rate may have
    if checked:
        second = scores.rate_by_confusion(p, y, trusted.p, trusted.y)
        off = max(off, abs(second - float(found.wrong_probability.mean())))
    doubt = math.hypot(scores.rate_margin(trusted.p, trusted.y, T), off)
    facts: dict[str, Any] = {
        "run": None if path is None else str(path),
        "method": type(method).__name__,
        "version": warpi.__version__,
        "rows": rows,
        "left_out": 0 if rows == "all" else sum(map(len, more)),
        "folds": folds,
        "probabilities": source,
        "temperature": temperature,
        "memory": memory,
        "uncertainty": kind,
        "threshold": threshold,
        "n_trusted": len(trusted.y),
        "trusted_accuracy": float((trusted.p.argmax(1) == trusted.y).mean()) if len(trusted.y) else None,
        "noise_rate": scores.error_rate(found.wrong_probability, doubt),
    }
    rates = scores.errors_by_class(found.wrong_probability, y, task.classes, doubt)
    audit = Audit(row[order], y, *found, spread[order], p, T, task.classes, rates, facts)
    if method.trusts_given_labels:
        log.warning("%s takes wrong labels for right ones, so its audit overlooks them; audit warpi", facts["method"])
    if folds and len(trusted.y) and not checked:
        log.warning("a class has a single trusted row, which is never left out to show how far the rates are off")
    elif not apart:
        log.warning("the trusted rows were trained on, so that none shows how far the rates are off; use --folds 5")
    if (accuracy := facts["trusted_accuracy"]) is not None and accuracy < _POOR:
        log.warning("the run is right about %.0f %% of the trusted rows only: do not believe its audit", 100 * accuracy)
    if save and path is not None:
        try:
            audit.save(path)
        except UserError as e:  # runs of somebody else, an archive: what was found is worth having all the same
            log.warning("the audit is not stored in the run: %s", e)
    return audit


def uncertainty(sight: RowPredictions, T: Floats, folds: bool = False) -> tuple[Floats, str]:
    """How far wrong_probability w would be another one by chance, and in words what was varied.  [n]

    Samples of v (WarPI): w_l = sigmoid(logit w + log pi_l - mean_l log pi_l), pi_l = softmax(v_l z)_y. The rectified
    logits model the given label, so pi_l stands where Bayes' rule divides by P(given | x). Networks, or the run's
    network beside that of the fold: w of each. Deviations are added in squares. Where there is but one network and no
    v: the entropy of P(true | x, given), over log K.
    """
    y = sight.y
    w = 1 - scores.label_quality(sight.p, y, T)
    variance, varied = np.zeros(len(y)), list[str]()
    if len(sight.given):
        logit = np.log(np.maximum(w, 1e-9)) - np.log(np.maximum(1 - w, 1e-9))
        varied_w = 1 / (1 + np.exp(-np.clip(logit + sight.given - sight.given.mean(0), -50, 50)))  # [L, n]
        variance += varied_w.var(0)
        varied.append(f"{SAMPLES} samples of v")
    if len(sight.each):
        variance += np.stack([scores.label_quality(p, y, T) for p in sight.each]).var(0)
        varied.append("the run's network and that of the fold" if folds else f"{len(sight.each)} networks")
    if varied:
        return np.sqrt(variance), f"standard deviation of wrong_probability over {' and over '.join(varied)}"
    q = scores.posterior(sight.p, y, T)
    entropy = -(q * np.log(np.maximum(q, 1e-30))).sum(1) / np.log(q.shape[1])
    return entropy, "entropy of P(true class | x, given label) over log K: there is one network, and nothing to sample"


def _held_out(run: Run | Method, task: Task) -> list[Split]:
    """Rows of the data that were not trained on, and whose labels are as doubtful as the others'."""
    test = None if isinstance(run, Method) or run.truth.test_is_clean else run.truth.test
    splits = (task.val, test if test is not None and test.examples is task.train.examples else None)
    return [split for split in splits if split is not None]


def _without_memory(seen: RowPredictions, held_out: RowPredictions) -> tuple[RowPredictions, float]:
    n, y = len(held_out.y), seen.y
    p, memory = scores.remove_memorization(seen.p, y, scores.log_odds(held_out.p, held_out.y))
    others = held_out.each if n else np.zeros((len(seen.each), 0, p.shape[1]))
    each = [
        scores.remove_memorization(mine, y, scores.log_odds(other, held_out.y))[0]
        for mine, other in zip(seen.each, others, strict=True)
    ]
    return replace(seen, p=p, each=np.array(each).reshape(seen.each.shape)), memory


def _tempered(sight: RowPredictions, temperature: float) -> RowPredictions:
    each = [scores.apply_temperature(p, temperature) for p in sight.each]
    return replace(
        sight, p=scores.apply_temperature(sight.p, temperature), each=np.array(each).reshape(sight.each.shape)
    )


def _joined(sights: list[RowPredictions]) -> RowPredictions:
    """One after the other. What only the first has other views of counts as agreed on in the others."""
    S = len(sights[0].each)
    sights = [s if len(s.each) == S else replace(s, each=np.repeat(s.p[None], S, axis=0)) for s in sights]
    first = (np.concatenate([getattr(s, name) for s in sights]) for name in ("at", "y", "p"))
    return RowPredictions(
        *first, *(np.concatenate([getattr(s, name) for s in sights], axis=1) for name in ("each", "given"))
    )


def _source(n: int) -> str:
    if not n:
        return (
            "in sample: rows were judged by a network that was trained on their labels, and no rows were held out "
            "that would show how much of them it remembers; take folds"
        )
    return f"in sample, less what the network remembers of the label by comparison with {n} held-out rows"
