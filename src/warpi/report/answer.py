"""The answers at the top of the page: how many labels are wrong, where they are, and what to do next."""

import shlex
from collections import Counter
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

import warpi.report.svg_charts as charts
from warpi.audit.rates import MIN_CHECKS, Rate
from warpi.audit.result import Audit, is_unchecked
from warpi.errors import format_count
from warpi.report.page_data import Detail, Review
from warpi.report.plots import Curve
from warpi.report.table import Grid
from warpi.review.progress import audit_concerns, check_command, correct_command

if TYPE_CHECKING:
    from markupsafe import Markup

MANY_CLASSES = 20
_SHOWN_CLASSES = 10  # if there are many
_SHOWN_PAIRS = 10
_NAMED_PAIRS = 3  # in a sentence
_NAMED_CLASSES = 3


class Tile(NamedTuple):
    """A headline number at the top of the page."""

    number: str
    text: str
    note: str = ""


def answer(detail: Detail) -> dict[str, Any] | None:
    """The results about the labels of a run, for the page; None without an audit."""
    audit = detail.audit
    if audit is None:
        return None
    first, more = _class_rates(audit)
    return {
        "tiles": [_wrong_tile(audit, detail.review), _suspicious_tile(audit, detail.review)],
        "concerns": audit_concerns(audit),
        "advice_first": any(concern.comes_first for concern in audit_concerns(audit)),
        "where": _where(audit),
        "systematic": _systematic(audit),
        "left_out": audit.facts.get("left_out") or 0,
        "actually_wrong": _actually_wrong(audit, detail.review),
        "next_step": next_step(detail),
        "pairs": _pairs(audit),
        "rates": first,
        "more_rates": more,
        "has_intervals": audit.has_interval,
        "trusted": "" if detail.review is None else _trusted_rows(detail.review),
        "review": None if detail.review is None else _decisions(detail.review),
        "suspects": detail.suspects,
        "copies": _copies(audit),
        "copy_groups": detail.copies,
        "unusual": _unusual(audit),
        "probabilities": audit.facts["probabilities"],
        "uncertainty": audit.facts["uncertainty"],
        "accuracy": audit.facts.get("trusted_accuracy"),
    }


def next_step(detail: Detail) -> str:
    """What to do after reading the page; '' without an audit. Commands are in backticks."""
    if detail.audit is None:
        return ""
    concerns = audit_concerns(detail.audit)
    if concerns and concerns[0].comes_first:
        return concerns[0].advice
    return _advise(detail.audit, detail.review)


def percent(share: float) -> str:
    if 0 < share < 0.0005:
        return "< 0.1 %"
    return f"{100 * share:.1f} %" if 0 < share < 0.0995 else f"{100 * share:.0f} %"


def _wrong_tile(audit: Audit, review: Review | None) -> Tile:
    """The number of wrong labels. It includes trusted rows of the data, as in the section about the review."""
    rate = audit.facts["noise_rate"]
    n = len(audit)
    wrong, low, high = (rate[name] and n * rate[name] for name in ("rate", "low", "high"))
    if review is not None:
        n, wrong, low, high = review.before.n, review.before.rate, review.before.low, review.before.high
    note = "Estimated from the model alone, so probably too low; no interval yet"
    if is_unchecked(audit.facts):
        note = "Estimated from the model alone; without trusted rows it can be much too low or too high"
    if audit.has_interval and low is not None and high is not None:
        note = (
            f"90 % interval {100 * low / n:.0f} to {100 * high / n:.0f} %, from the predictions for all rows, "
            f"corrected by {_describe_checks(audit)}"
        )
    text = f"labels estimated to be wrong in the data as given ({percent(wrong / max(n, 1))})"
    return Tile(f"{wrong:,.0f} of {n:,}", text, note)


def _describe_checks(audit: Audit) -> str:
    """The checked rows that the interval of the noise rate is based on."""
    n = audit.facts["noise_rate"]["checked"]
    pairs = audit.pairs
    if pairs is None or int(pairs.random.sum()) != n:
        return f"{n:,} checked rows"
    trusted = int((pairs.random & (pairs.position < 0)).sum())
    drawn = f"{n - trusted:,} rows checked at random"
    if not trusted:
        return drawn
    return f"{trusted:,} trusted rows" + (f" and {drawn}" if n > trusted else "")


def _suspicious_tile(audit: Audit, review: Review | None) -> Tile:
    """The number of suspicious labels; 0 with an explanation if the audit singles out none."""
    n = int(audit.is_label_issue.sum())
    if not n:
        return Tile(
            "0",
            "suspicious labels",
            "No label is more likely wrong than right, so the audit can only estimate how many are wrong",
        )
    threshold = audit.facts.get("threshold", 0.5)
    likely = "Probably wrong"
    if threshold != 0.5:
        likely = f"Wrong with a probability above {percent(threshold)}"
    return Tile(f"{n:,}", f"suspicious labels{_checked(review, n)}", f"{likely}, and another class fits better")


def _checked(review: Review | None, n: int) -> str:
    """How many of n suspicious labels people have checked; '' if nobody has looked at the labels of this run."""
    if review is None or review.n_unchecked is None:
        return ""
    if review.n_unchecked == n:
        return ", none of them checked yet"
    right = n - review.n_unchecked - review.n_found_wrong
    counts = {"found wrong by people": review.n_found_wrong, "found right": right, "unchecked": review.n_unchecked}
    return ": " + ", ".join(f"{k:,} {what}" for what, k in counts.items() if k)


def _actually_wrong(audit: Audit, review: Review | None) -> str:
    """How many suspicious labels are wrong, if the truth is known."""
    n = int(audit.is_label_issue.sum())
    if not n or review is None or review.n_actually_wrong is None:
        return ""
    wrong = review.n_actually_wrong
    return f"Of {format_count(n, 'suspicious label')}, {wrong:,} {'is' if wrong == 1 else 'are'} actually wrong."


def _where(audit: Audit) -> str:
    """The most frequent confusions in one sentence."""
    pairs = _count_pairs(audit)
    if not pairs:
        return ""
    total = sum(n for _, n in pairs)
    parts = [
        f"{n:,} labeled “{audit.classes[given]}” look like “{audit.classes[suggested]}”"
        for (given, suggested), n in pairs[:_NAMED_PAIRS]
    ]
    rest = total - sum(n for _, n in pairs[:_NAMED_PAIRS])
    if 2 * rest > total:
        labels = Counter(audit.given[audit.is_label_issue].tolist()).most_common()
        named = labels[:_NAMED_PAIRS]
        unnamed = total - sum(n for _, n in named)
        if 2 * unnamed <= total:
            parts = [f"{n:,} are labeled “{audit.classes[k]}”" for k, n in named]
            ending = f"; the other {unnamed:,} have other labels" if unnamed else ""
            return f"Of the {total:,} suspicious labels, {', '.join(parts)}{ending}."
        return (
            f"The {total:,} suspicious labels are spread over {len(pairs)} pairs of given and suggested class; no pair "
            f"has more than {pairs[0][1]:,}."
        )
    others = f"; the table below has the other {rest:,}" if rest else ""
    return f"Of the {total:,} suspicious labels, {', '.join(parts)}{others}."


def _systematic(audit: Audit) -> str:
    """Classes with more wrong than right labels, even at the lower end of the interval; '' if there is none."""
    found = [f"“{c['class']}”" for c in audit.error_rates if c["low"] is not None and c["low"] > 0.5]
    if not audit.has_interval or not found:
        return ""
    more = len(found) - _NAMED_CLASSES
    named = [*found[:_NAMED_CLASSES], *([f"{more} more classes"] if more > 0 else [])]
    classes = ", ".join(named[:-1]) + " and " * (len(named) > 1) + named[-1]
    how = "how this class was labeled" if len(found) == 1 else "how these classes were labeled"
    return f"Most labels {classes} are wrong, which may be a systematic mistake: check {how}."


def _trusted_rows(review: Review) -> str:
    """The trusted rows of the data, which are not audited."""
    if not review.n_trusted:
        return ""
    wrong = f"; {review.n_trusted_wrong:,} of their given labels are wrong" if review.n_trusted_wrong else ""
    return f"The {review.n_trusted:,} trusted rows are not in this table{wrong}."


def _count_pairs(audit: Audit) -> list[tuple[tuple[int, int], int]]:
    issues = audit.is_label_issue
    pairs = zip(audit.given[issues].tolist(), audit.suggested[issues].tolist(), strict=True)
    return Counter(pairs).most_common()


def _pairs(audit: Audit) -> Grid:
    """The most frequent pairs of given and suggested class; empty if a sentence names all of them."""
    names = audit.classes
    pairs = _count_pairs(audit)
    if len(pairs) <= _NAMED_PAIRS:
        return Grid()
    rows = [(names[given], names[suggested], f"{n:,}") for (given, suggested), n in pairs[:_SHOWN_PAIRS]]
    if rest := pairs[_SHOWN_PAIRS:]:
        rows.append((f"other pairs ({len(rest)})", "", f"{sum(n for _, n in rest):,}"))
    return Grid(("given label", "suggestion", "suspicious labels"), rows, (0, 1))


def _advise(audit: Audit, review: Review | None) -> str:
    run = audit.facts.get("run")
    name = "RUN" if run is None else shlex.quote(str(run))
    if not audit.has_interval and (review is None or review.progress.n_random < MIN_CHECKS):
        return (
            "Have a person check some rows. This takes a few minutes, gives an interval for the number of wrong "
            f"labels, and improves the audit: {check_command(name)}."
        )
    if review is None:
        return f"Write the corrected data: `{correct_command(name)}`."
    helps = review.after.rate < review.before.rate
    effect = _describe_correction(review) if helps else ""
    return review.progress.hint(None if run is None else str(run), effect, correcting_helps=helps)


def _describe_correction(review: Review) -> str:
    """What `warpi correct` does, in two sentences."""
    parts = []
    if review.n_by_people:
        trusted = f" ({review.n_trusted_wrong:,} of them in trusted rows)" if review.n_trusted_wrong else ""
        parts.append(f"{review.n_by_people:,} that people found wrong{trusted}")
    if review.n_by_audit:
        parts.append(f"{review.n_by_audit:,} suggestions that nobody has confirmed (expect mistakes among these)")
    changed = review.n_by_people + review.n_by_audit
    contents = f" with {changed:,} changed label{'s' * (changed != 1)}: {' and '.join(parts)}" if parts else ""
    after = review.after
    n, interval = f"{after.rate:,.0f}", ""
    if after.low is not None and after.high is not None:
        interval = f" (90 % interval {after.low:,.0f} to {after.high:,.0f})"
    labels, remain = ("label", "remains") if n == "1" else ("labels", "remain")
    before = f"{review.before.rate:,.0f}"
    return f"It writes a new file{contents}. About {n} wrong {labels}{interval} {remain} instead of {before}."


def _class_rates(audit: Audit) -> tuple[Grid, Grid]:
    """Wrong labels by class, the largest numbers first. If there are many classes, the rest is in a second table."""
    many = len(audit.classes) > MANY_CLASSES
    rates = list(enumerate(audit.error_rates))
    has_interval = audit.has_interval
    rows = []
    for k, c in sorted(rates, key=lambda pair: -pair[1]["n"] * pair[1]["rate"]):
        issues = audit.is_label_issue & (audit.given == k)
        votes = np.bincount(audit.suggested[issues], minlength=len(rates))
        instead = audit.classes[int(votes.argmax())] if issues.any() else "–"
        interval = [f"{100 * c['low']:.0f} to {100 * c['high']:.0f} %" if c["low"] is not None else "–"] * has_interval
        wrong = "< 1" if 0 < c["n"] * c["rate"] < 0.5 else f"{c['n'] * c['rate']:,.0f}"
        rows.append((c["class"], f"{c['n']:,}", wrong, percent(c["rate"]), *interval, f"{issues.sum():,}", instead))
    heads = (
        "given label",
        "rows",
        "estimated wrong",
        "share",
        *(["90 % interval"] * has_interval),
        "suspicious",
        "most frequent suggestion",
    )
    end = _SHOWN_CLASSES if many else len(rows)
    text = (0, len(heads) - 1)
    return Grid(heads, rows[:end], text), Grid(heads, rows[end:], text)


def _decisions(review: Review) -> dict[str, Any]:
    """What people decided, and its effect."""
    counts = review.counts
    progress = review.progress
    n = counts["kept"] + counts["changed"] + counts["unsure"]
    text = "Nobody has reviewed labels of this run yet."
    if n:
        text = (
            f"People looked at {format_count(n, 'row')}, {_or_none(progress.n_random)} of them drawn at random: "
            f"{format_count(counts['kept'], 'label')} kept, {counts['changed']:,} changed, "
            f"{_or_none(counts['unsure'])} unsure."
        )
    if counts["accepted"]:
        text += f" Suggestions of the audit accepted without looking at the row: {counts['accepted']:,}."
    if counts["dropped"]:
        text += f" Rows left out because another copy was kept: {counts['dropped']:,}."
    return {
        "text": text,
        "before": _number_of(review.before),
        "after": _number_of(review.after),
        "curve": draw_progress(review) if progress.n_decided > 1 else None,
        "accepted": counts["accepted"],
    }


def _or_none(n: int) -> str:
    return f"{n:,}" if n else "none"


def _copies(audit: Audit) -> list[str]:
    """What the audit says about copies, in sentences; empty without any. Commands are in backticks."""
    found = audit.copies
    if found is None or not (found.group >= 0).any():
        return []
    counts = found.summary()
    n = counts["labels_differ"]
    sentences = [
        f"{counts['exact'] + counts['near']:,} of {len(found):,} rows have a copy: {counts['exact']:,} an exact one, "
        f"{counts['near']:,} a near one. They form {format_count(counts['groups'], 'group')}."
    ]
    if n:
        sentences.append(f"In {n:,} of the groups the labels contradict each other, so some of them must be wrong.")
    for part, other, k in found.leaks():
        words = {"train": "training"}.get(other, other)
        sentences.append(
            f"{k:,} of {found.part.count(part):,} {part} rows have a copy among the {words} rows, so the accuracy "
            f"on {part} rows may be too high."
        )
    if found.skipped:
        sentences.append(f"Near copies were not searched for: {found.skipped}.")
    run = _name_of_run(audit)
    return [
        *sentences,
        f"To keep one row of each group, run `warpi review {run}` and press D. `warpi audit {run} --csv FILE` lists "
        "them.",
    ]


def _unusual(audit: Audit) -> list[str]:
    """What the audit says about outliers and images without content, in sentences; empty without any."""
    found = audit.copies
    counts = {} if found is None else found.summary()
    sentences = []
    if n := counts.get("outliers"):
        sentences.append(f"Far from all other rows: {format_count(n, 'outlier')}.")
    if n := counts.get("blank"):
        sentences.append(f"One color and nothing else: {format_count(n, 'blank image')}.")
    if n := counts.get("broken"):
        sentences.append(f"Cannot be read: {format_count(n, 'image')}.")
    if not sentences:
        return []
    run = _name_of_run(audit)
    return [
        *sentences,
        f"To look at outliers and blank images, run `warpi review {run}`, press F and choose them under *Show*. "
        f"`warpi audit {run} --csv FILE` lists all of them.",
    ]


def _name_of_run(audit: Audit) -> str:
    """The folder of the run as part of a command."""
    run = audit.facts.get("run")
    return "RUN" if run is None else shlex.quote(str(run))


def _number_of(rate: Rate) -> str:
    share = f"about {rate.rate:,.0f} of {rate.n:,} ({percent(rate.rate / max(rate.n, 1))})"
    if rate.low is None or rate.high is None:
        return share
    return f"{share}, 90 % interval {rate.low:,.0f} to {rate.high:,.0f}"


def draw_progress(review: Review) -> "Markup":
    """The share of right labels against the number of decisions, with the same estimates as the text.

    The curves are rescaled: the one of decisions begins at the estimate before the correction, and the one of
    `warpi correct` ends at the estimate after it.
    """
    progress, before, after = review.progress, review.before, review.after
    points = progress.points()
    zeros = [0.0] * len(points)
    people = 1 - progress.by_people
    if not review.counts["accepted"]:  # otherwise this curve does not begin with the given labels
        people = _scale(people, 0, before.rate / max(before.n, 1))
    corrected = _scale(1 - progress.with_audit, -1, after.rate / max(after.n, 1))
    series = []
    for look, (name, wrong) in enumerate((("with", corrected), ("without", people))):
        series.append(charts.Series(name, Curve(points, [100 - 100 * float(wrong[m]) for m in points], zeros), look))
    lowest = min(min(s.curve.mean) for s in series)
    return charts.lines("Estimated share of correct labels", series, " %", max(0.0, lowest - 1), "Labels reviewed")


def _scale(wrong: NDArray[np.float64], at: int, share: float) -> NDArray[np.float64]:
    """Shares of wrong labels, multiplied so that the one at position `at` becomes `share`."""
    return np.minimum(wrong * (share / wrong[at]), 1.0) if wrong[at] > 0 else wrong
