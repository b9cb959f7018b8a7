"""The effect of a review: right labels after each decision, the gain of further ones, and concerns about the audit."""

import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from warpi.audit.decisions import Decision
from warpi.audit.rates import MIN_CHECKS
from warpi.audit.result import Audit
from warpi.errors import format_count
from warpi.utils.files import unused_name

Floats = NDArray[np.float64]
LOW_ACCURACY = 0.7  # accuracy on trusted rows; below it, many suggestions are wrong and `warpi audit` warns
AHEAD = 20  # further decisions whose gain is forecast
_WORTH = 0.05  # gain per decision, in labels, below which a person can stop
_MOST_POINTS = 120


class Concern(NamedTuple):
    """A reason not to rely on the audit, and what to do. Commands are in backticks."""

    problem: str
    advice: str
    comes_first: bool = True  # whether the advice is the next step; otherwise it concerns individual suggestions


@dataclass(frozen=True, eq=False)
class Progress:
    """The expected fraction of right labels after 0, 1, ..., m decisions of people, in the order they were made.

    `by_people` counts the decisions only (Export). `with_audit` also applies the audit's suggestions to all other rows
    (`warpi correct`). The fraction at step 0 already uses everything that the decisions revealed.
    """

    n_rows: int  # audited rows
    by_people: Floats  # [m + 1]
    with_audit: Floats  # [m + 1]
    next_gain: float  # labels that the most useful of the next decisions are expected to correct
    n_random: int  # decided rows that were drawn at random
    n_new: int  # decisions that the audit has not used yet
    n_waiting: int = 0  # rows that were drawn at random for a list and are not decided
    has_interval: bool = False  # whether random checks gave the audit's noise rate an interval

    @property
    def n_decided(self) -> int:
        return len(self.by_people) - 1

    @property
    def can_stop(self) -> bool:
        return self.next_gain < _WORTH * AHEAD

    def points(self) -> list[int]:
        """Numbers of decisions to draw, at most `_MOST_POINTS`."""
        m = self.n_decided
        return sorted({round(m * i / _MOST_POINTS) for i in range(_MOST_POINTS + 1)})

    def hint(self, run: str | None = None, effect: str = "", correcting_helps: bool = True) -> str:
        """What to do next, in one or two sentences, or in numbered steps on separate lines. Commands are in backticks.

        `effect` says what the command does that writes the corrected data; with it, there are steps up to the next
        training. The command is not named if correcting does not help.
        """
        name = "RUN" if run is None else shlex.quote(run)
        if self.n_waiting:
            one = self.n_waiting == 1
            return (
                f"Finish the list of rows to check: {self.n_waiting} row{'s' * (not one)} drawn at random "
                f"{'is' if one else 'are'} undecided. Decisions about these show how many labels are wrong."
            )
        if self.n_random < MIN_CHECKS and not self.has_interval:
            n = MIN_CHECKS - self.n_random
            return (
                f"Checking {format_count(n, 'more randomly drawn row')} gives an interval for the number of wrong "
                f"labels: {check_command(name, 2 * max(n, 10))}."
            )
        if self.n_new >= AHEAD:
            return f"The audit has not used {self.n_new} of the decisions yet. To update it: `warpi audit {name}`."
        keep = (
            "Keep the labels as they are: according to the random checks, the audit's suggestions would not improve "
            "them."
        )
        if self.can_stop:
            review = (
                f"You can stop: the {AHEAD} most useful further decisions are expected to correct fewer than one label."
            )
            if not correcting_helps:
                return f"{review} {keep}"
            return f"{review}\n{_correct_and_train(name, effect)}" if effect else f"{review} {_write(name)}"
        optional = correcting_helps and bool(effect)
        review = (
            f"Review {AHEAD} more rows{', if you have time' * optional}: `warpi review {name}`, in the order “largest "
            "expected gain first”."
        )
        if not correcting_helps:
            return f"{keep} {review}"
        n = round(self.next_gain)
        review += f" This is expected to correct about {n} label{'s' * (n != 1)} that would otherwise stay wrong."
        if effect:
            return f"1. {review}\n{_correct_and_train(name, effect, 2)}"
        return f"{review} Or export now: `{correct_command(name)}`."


def _correct_and_train(run: str, effect: str, number: int = 1) -> str:
    """The last two steps, on separate lines. `effect` says what the command of the first one does."""
    return (
        f"{number}. {_write(run)} {effect}\n{number + 1}. Train again with the command that `warpi correct` prints, so "
        "that the model learns from the corrected labels."
    )


def _write(run: str) -> str:
    return f"Write the corrected data: `{correct_command(run)}`."


def measure_progress(audit: Audit, decisions: Mapping[int, Decision], random_rows: Mapping[int, float]) -> Progress:
    """Progress of a review of audited rows. `random_rows`: the rows drawn at random (`Store.random_rows`)."""
    position_of = {row: i for i, row in enumerate(audit.row.tolist())}
    class_index = {name: k for k, name in enumerate(audit.classes)}
    q = audit.posterior.copy()
    index = np.arange(len(audit))
    ordered = sorted(decisions.values(), key=lambda d: d.id)
    labeled = [
        (position_of[d.row], class_index[d.label], d.is_automatic)
        for d in ordered
        if d.label in class_index and d.row in position_of
    ]
    checked = {i: k for i, k, is_automatic in labeled if not is_automatic}
    accepted = {i: k for i, k, is_automatic in labeled if is_automatic}
    dropped = {d.row for d in ordered if d.is_dropped}
    places = np.array(list(checked), dtype=np.int64)
    labels = np.array(list(checked.values()), dtype=np.int64)
    known = {} if audit.pairs is None else dict(zip(audit.pairs.position.tolist(), audit.pairs.q, strict=True))
    for i in checked:
        q[i] = known.get(i, q[i])  # the prediction without the check; the posterior of a checked row is 0 or 1
    suggested = q.argmax(1)
    right_given = q[index, audit.given]
    for i, k in accepted.items():
        right_given[i] = q[i, k]
    right_suggested = q[index, suggested]
    right_given[places] = audit.given[places] == labels
    right_suggested[places] = suggested[places] == labels
    gains = np.sort(1 - np.delete(right_suggested, places))[::-1]
    return Progress(
        n_rows=len(audit),
        by_people=_accumulate(right_given, places),
        with_audit=_accumulate(right_suggested, places),
        next_gain=float(gains[:AHEAD].sum()),
        n_random=sum(row in random_rows for row in (audit.row[i] for i in checked)),
        n_new=sum(i not in known for i in checked),
        n_waiting=sum(
            row in position_of and position_of[row] not in checked and row not in dropped for row in random_rows
        ),
        has_interval=audit.has_interval,
    )


def _accumulate(right: Floats, places: NDArray[np.int64]) -> Floats:
    """Fraction of right labels after 0, 1, ... of the rows at `places` got their right label."""
    start = right.sum()
    return np.concatenate([[start], start + np.cumsum(1 - right[places])]) / len(right)


def check_command(run: str, n: int = 40) -> str:
    """The commands to check n rows, half of them drawn at random, in backticks."""
    listed = unused_name("check.csv")
    return f"`warpi pick {n} {run} --csv {listed}`, then `warpi review {run} --rows {listed}`"


def correct_command(run: str) -> str:
    return f"warpi correct {run} --out {unused_name('corrected.csv')}"


def audit_concerns(audit: Audit) -> list[Concern]:
    """Reasons not to rely on an audit."""
    accuracy = audit.facts.get("trusted_accuracy")
    run = audit.facts.get("run")
    name = "RUN" if run is None else shlex.quote(str(run))
    check = check_command(name)
    if accuracy is not None and accuracy < LOW_ACCURACY:
        from warpi.audit.use_checks import choose_labels, count_wrong_labels  # loads torch

        before, after = count_wrong_labels(audit, choose_labels(audit.posterior, audit.given))
        if before.low is not None and after.high is not None and after.high < before.low:
            return [
                Concern(
                    "Many suggestions are wrong: the model is right for only "
                    f"{100 * accuracy:.0f} % of the trusted rows.",
                    "According to the random checks, applying all of them still removes more errors than it adds. Look "
                    "at a suggestion before you rely on it.",
                    comes_first=False,
                )
            ]
        return [
            Concern(
                f"The audit is unreliable: its model is right for only {100 * accuracy:.0f} % of the trusted rows.",
                f"Do not accept suggestions without looking. Check rows drawn at random ({check}), use them as trusted "
                "rows and train again.",
            )
        ]
    if accuracy is None and not audit.facts.get("learned"):
        return [
            Concern(
                "The audit may be unreliable: there are no trusted rows to compare it with.",
                f"Check some rows first: {check}.",
            )
        ]
    n = audit.facts.get("already_corrected", 0)
    if n and not audit.facts.get("decisions") and not audit.facts.get("checked_lists"):
        return [
            Concern(
                f"An audit has already corrected {format_count(n, 'label')}, and nobody has checked rows since.",
                f"Applying more suggestions can undo right corrections. Check more rows first: {check}.",
            )
        ]
    return []
