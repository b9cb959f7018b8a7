"""Runs as one HTML file that holds everything: no script, no other file, nothing to be fetched."""

import base64
import html
import statistics
from collections.abc import Iterable, Sequence
from importlib import resources
from itertools import groupby
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

import warpi.report.svg_charts as charts
from warpi.audit.label_scores import wilson_interval
from warpi.report.curves import line, lowest
from warpi.report.experiments import Experiment, Row, RunRecord, best_epochs, group, number
from warpi.report.page_data import Audited, ClassRate, Detail, Suspect
from warpi.report.table import HEADS, Block, blocks, legend
from warpi.runs.rerun import command, format_value, own_files, own_names

esc = html.escape
_TRAINING = ("epochs", "batch_size", "meta_batch_size", "optimizer", "lr", "momentum", "weight_decay", "schedule")
_WORST = 10  # classes in the table of the worst
_POOR = 0.7  # share of the trusted examples, as in `warpi audit`
_CELLS, _LETTERS = 12, 400  # of a suspicious row: cells shown at once, letters of each
_INTERVAL = (
    "The interval is Wilson's, 95 %, over the test examples: where the accuracy of this very network would be found on "
    "any number of such examples. It does not say what another seed would give."
)


def to_html(rows: Sequence[Row], runs: Sequence[RunRecord], details: Iterable[Detail] = ()) -> str:
    """The page of one run, of the seeds of one experiment, or of many experiments that are compared."""
    experiments, known = group(runs), {detail.run: detail for detail in details}
    first = experiments[0]
    if len(experiments) == 1:
        title = f"{first.label} on {Path(first.data).name}" + (
            "" if first.noise == "given" else f", noise {first.noise}"
        )
        body = [_experiment(first, known), *_curves(experiments, True), *_rest(first, known)]
    else:
        title, body = f"{len(experiments)} experiments", []
        titled = {block.title: block for block in blocks(rows)}
        for name, some in groupby(experiments, lambda g: f"{g.data}, noise {g.noise}, {g.net}"):
            mine = list(some)
            body += [f"<h2>{esc(name)}</h2>", _table(titled[name]), *_curves(mine, False)]
        body.append(f'<p class="soft">{esc(legend(rows))}</p><h2>Each experiment</h2>')
        for g in experiments:
            inside = "\n".join([_experiment(g, known), *_rest(g, known)])
            name = f"{g.label}: {g.data}, {g.noise}, {g.net}"
            body.append(f'<details class="experiment"><summary>{esc(name)}</summary>{inside}</details>')
    head = f'<header><p class="over-line">warpi report</p><h1>{esc(title)}</h1></header>'
    style = resources.files("warpi.report").joinpath("page.css").read_text()
    fields = {"TITLE": esc(f"warpi report: {title}"), "STYLE": style, "BODY": "\n".join([head, *body])}
    before, *others = _PAGE.split("@@")  # not replaced one after the other: a label may hold any of the words
    return before + "".join(fields[name] + text for name, text in zip(others[::2], others[1::2], strict=True))


# -- the parts of an experiment --------------------------------------------------------------------------------------


def _experiment(g: Experiment, known: dict[Path, Detail]) -> str:
    detail = _detail(g, known)
    parts = [_tiles(g, detail), "<h2>What was trained on what</h2>", _facts(g), "<h2>Accuracy</h2>", _accuracy(g)]
    return "\n".join(parts)


def _rest(g: Experiment, known: dict[Path, Detail]) -> list[str]:
    detail, parts = _detail(g, known), list[str]()
    if detail is not None:
        if len(g.counted) > 1:
            seed = next(run.spec["seed"] for run in g.runs if run.path == detail.run)
            parts.append(f'<p class="soft">What follows is about seed {seed}: {esc(str(detail.run))}</p>')
        parts += [_losses(detail), _confusions(g, detail)]
        parts += [_audited(detail.audit)] if detail.audit else []
        parts += [f'<p class="soft warn">Not shown: {esc(reason)}</p>' for reason in detail.missing]
    first, *others = map(_again, g.runs)
    more = [f"<details><summary>{len(others)} more</summary>{''.join(others)}</details>"] if others else []
    return [*parts, "<h2>Run it again</h2>", first, *more]


def _detail(g: Experiment, known: dict[Path, Detail]) -> Detail | None:
    return next((known[run.path] for run in g.runs if run.path in known), None)


def _tiles(g: Experiment, detail: Detail | None) -> str:
    """The few numbers that one looks for first."""
    facts, tiles = g.first.facts, list[tuple[str, str]]()
    last = [value for run in g.counted if (value := number(run.epochs[-1], "test_acc")) is not None]
    against = "" if facts.get("test_labels") == "clean" else ", against given labels"
    if len(last) == 1:
        tiles.append((f"{last[0]:.1f} %", f"test accuracy{against}; 95 % interval {_span(last[0], g.counted[0])}"))
    elif last:
        mean = f"{statistics.fmean(last):.1f} ± {statistics.stdev(last):.1f} %"
        tiles.append((mean, f"test accuracy{against}; {len(last)} seeds"))
    if (wrong := facts.get("wrong_share")) is not None:
        tiles.append((f"{100 * wrong:.1f} %", "of the training labels are wrong, by the known truth"))
    if detail is not None and detail.audit is not None:
        rate, low, high = (100 * value for value in detail.audit.noise_rate)
        tiles.append((f"{detail.audit.n_issues:,}", f"suspicious labels of {detail.audit.n:,}"))
        tiles.append((f"{rate:.1f} %", f"of the labels are wrong, by the audit: {low:.1f} to {high:.1f}"))
    if (n := facts.get("n_train")) is not None:
        tiles.append((f"{n:,}", f"training examples, {facts.get('n_meta') or 0:,} trusted ones"))
    if seconds := [s for run in g.counted for epoch in run.epochs if (s := number(epoch, "seconds")) is not None]:
        each = " a run" if len(g.counted) > 1 else ""
        tiles.append((_time(sum(seconds) / len(g.counted)), f"of training and testing{each}"))
    shown = "".join(f'<div class="tile"><b>{esc(n)}</b><span>{esc(text)}</span></div>' for n, text in tiles)
    return f'<div class="tiles">{shown}</div>' if tiles else ""


def _facts(g: Experiment) -> str:
    run = g.first
    spec, facts, place, recipe = run.spec, run.facts, run.environment, run.spec["recipe"]
    named = {
        "root": "in",
        "label": "label column",
        "drop": "without the columns",
        "image_size": "images of side",
        "limit": "limited to",
    }
    data = [
        g.data,
        *(f"{words} {format_value(spec[name])}" for name, words in named.items() if spec.get(name) is not None),
    ]
    sizes = (("n_train", "to train on"), ("n_meta", "trusted"), ("n_val", "for validation"), ("n_test", "to test on"))
    counts = [f"{facts[name]:,} {words}" for name, words in sizes if facts.get(name) is not None]
    trusted = "held out of rows whose truth is known" if spec.get("meta") else "as the data marks them, if it does"
    exam = {"clean": "known to be right", "given": "as given: nobody knows whether they are right"}
    machine = f"{place.get('gpu') or place.get('device') or 'unknown'}" + (
        f", {place['threads']} thread{'s' * (place['threads'] != 1)}" if place.get("threads") else ""
    )
    tools = [f"{name} {place[name]}" for name in ("torch", "numpy", "python") if place.get(name)]
    options = _pairs({**spec["options"], **spec["changed"]})
    shown = {
        "Data": ", ".join(data) + (f"; {facts['n_classes']} classes" if facts.get("n_classes") else ""),
        "Rows": ", ".join(counts),
        "Noise": g.noise if g.noise != "given" else "given: the labels as they are in the data",
        "Trusted": str(spec["meta_data"]) if spec.get("meta_data") else trusted,
        "Test labels": exam.get(str(facts.get("test_labels")), "unknown") if facts.get("n_test") != 0 else "",
        "Method": f"{spec['method']}" + (f" ({options})" if options else ""),
        "Network": g.net + (f", {facts['n_parameters']:,} parameters" if facts.get("n_parameters") else ""),
        "Training": _pairs({name: recipe[name] for name in _TRAINING if recipe.get(name) is not None}),
        "Seeds": ", ".join(f"{r.spec['seed']}" + ("" if r.done else " (unfinished)") for r in g.runs),
        "Machine": machine + (f", {place['date']}" if place.get("date") else ""),
        "Versions": ", ".join([f"warpi {run.version}", *tools]),
    }
    cells = "".join(f"<dt>{esc(name)}</dt><dd>{esc(text)}</dd>" for name, text in shown.items() if text)
    settings = {"data": {k: v for k, v in spec.items() if k not in ("options", "changed", "recipe", "seed")}}
    settings |= {"training": recipe, "method": spec["options"]}
    rows = [(part, name, format_value(value)) for part, values in settings.items() for name, value in values.items()]
    every = _grid(("part", "setting", "value"), rows, text=(1, 2))
    return f'<dl class="facts">{cells}</dl><details><summary>Every setting</summary>{every}</details>'


def _accuracy(g: Experiment) -> str:
    """One run: its epochs that matter. Several seeds: the last epoch of each, and their mean."""
    if not g.counted:
        return "<p>No epoch has ended yet.</p>"
    if all(number(run.epochs[-1], "test_acc") is None for run in g.counted):
        return "<p>There is no test set.</p>"
    if len(g.counted) > 1:
        return _by_seed(g)
    (run,) = g.counted
    body = []
    for name, epoch in zip(HEADS[2:], best_epochs(run), strict=True):
        if epoch is not None and (value := number(epoch, "test_acc")) is not None:
            body.append((name, str(int(epoch["epoch"])), f"{value:.2f} %", _span(value, run)))
    oracle = "The best on test is an oracle that picks the epoch by the test set, which no user could do."
    end = "" if run.done else " The run has not ended."
    table = _grid(("which", "epoch", "test accuracy", "95 % interval"), body)
    return f'{table}<p class="soft">{esc(_INTERVAL)} {oracle}{end}</p>'


def _by_seed(g: Experiment) -> str:
    last = [(run, value) for run in g.counted if (value := number(run.epochs[-1], "test_acc")) is not None]
    body = [(str(run.spec["seed"]), f"{value:.2f} %", _span(value, run)) for run, value in last]
    values = [value for _, value in last]
    std = f" ± {statistics.stdev(values):.2f}" if len(values) > 1 else ""
    body.append((f"mean ± sd of {len(values)}", f"{statistics.fmean(values):.2f}{std}", ""))
    table = _grid(("seed", "last epoch", "95 % interval"), body, mean=True)
    said = "The last line is the mean and the sample standard deviation over seeds."
    return f'{table}<p class="soft">{esc(_INTERVAL)} {said}</p>'


def _curves(experiments: Sequence[Experiment], alone: bool) -> list[str]:
    """Accuracy and losses over the epochs, of everything that is compared with one another."""
    begun = [g for g in experiments if g.counted]
    named = {"test_acc": "test accuracy", "loss": "training loss", "meta_loss": "loss on the trusted examples"}
    shown = []
    for key, what in named.items():
        series = [charts.Series(g.label, line(g.counted, key), i) for i, g in enumerate(begun)]
        if any(s.line.epochs for s in series):
            if key == "test_acc":
                bottom = max(0.0, lowest([s.line for s in series if s.line.epochs]) - 1)
                shown.append(charts.lines(what, series, "%", bottom))
            else:
                shown.append(charts.lines(what, series))
    if not shown:
        return []
    items = [
        f"<li>{charts.swatch(i)}{esc(g.label)}{'' if g.finished else ' (unfinished)'}</li>" for i, g in enumerate(begun)
    ]
    legend = "" if alone else f'<ul class="legend">{"".join(items)}</ul>'
    band = " The band is one standard deviation over seeds." if any(len(g.counted) > 1 for g in begun) else ""
    head = ["<h2>Learning curves</h2>"] if alone else []
    said = [f'<p class="soft">{band.strip()}</p>'] if band else []
    return [*head, f'<div class="charts">{"".join(shown)}</div>', legend, *said]


def _losses(detail: Detail) -> str:
    if not detail.losses or detail.edges is None:
        return ""
    used = max(
        int(end) for each in detail.losses for counts in each.counts.values() for end in counts.nonzero()[0][-1:]
    )
    edges = detail.edges[: used + 2]
    top = max(float(counts.max()) for each in detail.losses for counts in each.counts.values()) * 1.3
    looks = {"right": 0, "wrong": 1, "unknown": 6}
    names = [name for name in looks if name in detail.losses[0].counts]
    shown = [
        charts.histogram(
            f"{each.name}: " + ", ".join(f"mean {mean:.2f} ({name})" for name, mean in each.means.items()),
            each.counts,
            edges,
            "cross-entropy with the given label",
            looks,
            top,
        )
        for each in detail.losses
    ]
    words = {"right": "right labels", "wrong": "wrong labels", "unknown": "labels nobody has checked"}
    legend = "".join(f"<li>{charts.swatch(looks[name])}{words[name]}</li>" for name in names)
    said = "How many training examples have which loss, after training; the last bar holds all that is above."
    if len(detail.losses) > 1:
        said += " Rectified: of the logits times WarPI's v, which is what the network was trained by."
    return (
        f'<h2>Losses</h2><p class="soft">{said}</p><div class="charts">{"".join(shown)}</div>'
        f'<ul class="legend">{legend}</ul>'
    )


def _confusions(g: Experiment, detail: Detail) -> str:
    figures, worst = [], ""
    if detail.test is not None:
        truth = "true class" if g.first.facts.get("test_labels") == "clean" else "given label"
        name = f"Test set: {truth} and prediction"
        figures.append((name, charts.matrix(name, detail.test, detail.classes, truth, "predicted class")))
        worst = _worst(detail.test, detail.classes, truth)
    if detail.train is not None:
        name = "Training set: given label and prediction"
        figures.append((name, charts.matrix(name, detail.train, detail.classes, "given label", "predicted class")))
    if not figures:
        return ""
    shown = "".join(f"<figure><figcaption>{esc(name)}</figcaption>{svg}</figure>" for name, svg in figures)
    return f'<h2>Confusion</h2><div class="charts">{shown}</div>{worst}'


def _worst(counts: NDArray[Any], classes: Sequence[str], truth: str) -> str:
    """The classes of the lowest accuracy."""
    body = []
    total, right = counts.sum(1), counts.diagonal()
    order = sorted((k for k in range(len(classes)) if total[k]), key=lambda k: (right[k] / total[k], k))
    for k in order[:_WORST]:
        others = counts[k].copy()
        others[k] = 0
        low, high = wilson_interval(right[k] / total[k], float(total[k]))
        instead = f"{classes[int(others.argmax())]} ({int(others.max())})" if others.any() else "–"
        share = f"{100 * right[k] / total[k]:.1f} %"
        body.append((classes[k], f"{int(total[k])}", share, f"{100 * low:.0f} to {100 * high:.0f}", instead))
    heads = (truth, "examples", "accuracy", "95 % interval", "taken for")
    return f"<h3>Worst classes</h3>{_grid(heads, body, text=(4,))}"


def _audited(found: Audited) -> str:
    rate, low, high = (100 * value for value in found.noise_rate)
    sure = ""
    if found.trusted is not None:
        kind = "warn" if found.trusted < _POOR else "soft"
        words = "Do not believe it: the classifier" if found.trusted < _POOR else "The classifier"
        sure = f'<p class="{kind}">{words} is right about {100 * found.trusted:.0f} % of the trusted examples.</p>'
    cards, wide = "".join(map(_suspect, found.suspects)), "" if found.pictures else ' style="--wide: 17rem"'
    return (
        f"<h2>Suspicious labels</h2><p>{found.n_issues:,} of {found.n:,} labels are probably wrong. "
        f"Wrong labels in all: {rate:.1f} %, 95 % interval {low:.1f} to {high:.1f}.</p>{sure}"
        f"<h3>The {len(found.suspects)} most suspicious examples</h3>"
        f'<ol class="suspects{" seen" * found.pictures}"{wide}>{cards}</ol>'
        f"<h3>By given label</h3>{_rates(found.by_class)}"
        f'<p class="soft">Probabilities: {esc(found.probabilities)}. Uncertainty: {esc(found.uncertainty)}.</p>'
    )


def _rates(classes: Sequence[ClassRate]) -> str:
    """How many labels of each class are wrong; of many classes the worst at once."""
    heads = ("given label", "rows", "wrong", "95 % interval", "suspicious", "instead")
    many, lines = len(classes) > 2 * _WORST, list[tuple[str, ...]]()
    for c in sorted(classes, key=lambda c: -c.rate) if many else classes:
        span = f"{100 * c.low:.1f} to {100 * c.high:.1f}"
        lines.append((c.name, f"{c.n:,}", f"{100 * c.rate:.1f} %", span, f"{c.issues:,}", c.instead or "–"))
    if not many:
        return _grid(heads, lines, text=(5,))
    rest = f"<details><summary>{len(lines) - _WORST} more</summary>{_grid(heads, lines[_WORST:], text=(5,))}</details>"
    return _grid(heads, lines[:_WORST], text=(5,)) + rest


def _suspect(s: Suspect) -> str:
    seen, cells = "", _words(s.words[:_CELLS]) if s.words else ""
    if s.picture is not None:
        kind, content = s.picture
        source = f"data:{esc(kind)};base64,{base64.b64encode(content).decode()}"
        seen = f'<img {"class=small " if s.small else ""}alt="row {s.row}" src="{source}">'
    elif not s.words or s.words[0][0] == "file":
        seen = '<div class="none">cannot be read</div>'
    if more := s.words[_CELLS:]:
        cells += f'<details class="cells"><summary>{len(more)} more</summary>{_words(more)}</details>'
    labels = f'<p class="labels"><s>{esc(s.given)}</s> → <b>{esc(s.suggested)}</b></p>'
    wrong = f"{100 * s.wrong:.1f}" if s.wrong < 0.9995 else "> 99.9"
    said = (f"wrong: {wrong} %", f"uncertainty {s.uncertainty:.2f}", f"row {s.row}")
    numbers = "".join(f'<p class="soft">{esc(text)}</p>' for text in said)
    return f"<li>{seen}{cells}{labels}{numbers}</li>"


def _words(words: Iterable[tuple[str, str]]) -> str:
    cut = [(name, text if len(text) <= _LETTERS else text[:_LETTERS] + "…") for name, text in words]
    return '<p class="cells">' + ", ".join(f"<i>{esc(name)}</i> {esc(text)}" for name, text in cut) + "</p>"


def _again(run: RunRecord) -> str:
    """The command of a run, and what tells that the data is the same."""
    state = "" if run.done else " (unfinished)"
    again = command(run.spec, f"again/{run.path.name}", run.environment.get("threads"))
    known = ("inputs", "files", "labels", "noise", "noise_file", "meta", "test_set", "other", "matrix_file", "weights")
    hashes = [f"{n} {run.facts[f'{n}_sha256']}" for n in known if run.facts.get(f"{n}_sha256")]
    same = f" The same data has the SHA-256 {' and '.join(hashes)} (spec.json)." if hashes else ""
    tables = " and ".join(f"{table} = {{{name!r}: ...}}" for table, name in own_names(run.spec).items())
    own = f" {' and '.join(own_files(run.spec))}: of your own, with {tables} as it was; a run holds names alone."
    where = f"Seed {run.spec['seed']}{state}: {run.path}.{same}{own if tables else ''}"
    return f'<pre>{esc(again)}</pre><p class="soft">{esc(where)}</p>'


# -- pieces ----------------------------------------------------------------------------------------------------------


def _table(block: Block) -> str:
    """The comparison of a block."""
    body = ["<thead><tr>" + "".join(f'<th scope="col">{esc(h)}</th>' for h in block.heads) + "</tr></thead>"]
    for name, rows in block.sections:
        body.append(f'<tbody><tr><th scope="rowgroup" colspan="{len(block.heads)}">{esc(name)}</th></tr>')
        for row in rows:
            cells = [esc(cell) for cell in row.cells]
            cells[2] = f"<strong>{cells[2]}</strong>" if row.bold else cells[2]
            first, *others = cells
            body.append(f'<tr><td class="text">{first}</td>{"".join(f"<td>{cell}</td>" for cell in others)}</tr>')
        body.append("</tbody>")
    return f'<div class="wide"><table>{"".join(body)}</table></div><p class="soft">{esc(block.note)}</p>'


def _grid(heads: Sequence[str], body: Sequence[Sequence[str]], text: Sequence[int] = (), mean: bool = False) -> str:
    """A table; columns of `text` are set to the left, the last line is a mean where there is one."""
    kinds = [' class="text"' if i in text or i == 0 else "" for i in range(len(heads))]
    top = "".join(f'<th scope="col"{kind}>{esc(head)}</th>' for kind, head in zip(kinds, heads, strict=True))
    lines = ["".join(f"<td{k}>{esc(cell)}</td>" for k, cell in zip(kinds, cells, strict=True)) for cells in body]
    rows = [f"<tr>{cells}</tr>" for cells in lines]
    if mean:
        rows[-1] = f'<tr class="mean">{lines[-1]}</tr>'
    return f'<div class="wide"><table><thead><tr>{top}</tr></thead><tbody>{"".join(rows)}</tbody></table></div>'


def _span(percent: float, run: RunRecord) -> str:
    """The interval of an accuracy, as text."""
    low, high = wilson_interval(percent / 100, int(run.facts.get("n_test") or 0))
    return f"{100 * low:.1f} to {100 * high:.1f}"


def _pairs(values: dict[str, Any]) -> str:
    known = {name.replace("_", " "): value for name, value in values.items() if value is not None}
    return ", ".join(f"{name} {f'{v:.4g}' if isinstance(v, float) else format_value(v)}" for name, v in known.items())


def _time(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'; img-src data:">
<title>@@TITLE@@</title>
<style>
@@STYLE@@
</style>
</head>
<body>
@@BODY@@
</body>
</html>
"""
