"""The HTML page of runs: one self-contained file without scripts. `templates/page.html` has the layout."""

import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import warpi.report.svg_charts as charts
from warpi.errors import MALFORMED_ERRORS, UserError
from warpi.functional.intervals import wilson_interval
from warpi.report.answer import Tile, answer
from warpi.report.experiments import Experiment, Row, RunRecord, best_epochs, group, group_by, machine, number, versions
from warpi.report.figure_data import EDGES, KINDS, Arrays
from warpi.report.page_data import Detail
from warpi.report.plot_style import COLORS
from warpi.report.plots import average_curve, lowest
from warpi.report.table import HEADS, Grid, blocks, legend
from warpi.runs.rerun_command import command, custom_files, custom_names, format_tables, format_value
from warpi.runs.schema import CHOICE
from warpi.runs.stored_facts import data_hashes
from warpi.utils.files import read_json

_TRAINING = ("epochs", "batch_size", "meta_batch_size", "optimizer", "lr", "momentum", "weight_decay", "schedule")
_SIZES = {"n_train": "for training", "n_meta": "trusted", "n_val": "for validation", "n_test": "for testing"}
_DATA = {
    "root": "in",
    "label": "label column",
    "drop": "without the columns",
    "types": "kinds of columns",
    "text": "text columns",
    "missing": "missing cells",
    "unknown": "unknown values",
    "image_size": "image size",
    "limit": "limited to",
}
_SETTINGS = {"meta": "trusted rows held out", "meta_data": "trusted"}  # names in the table of settings
_TEST_LABELS = {"clean": "known to be right", "given": "as given: they may be wrong"}
_KINDS = {"right": "right labels", "wrong": "wrong labels", "unknown": "all labels (truth unknown)"}
_STYLES = {"right": 0, "wrong": 1, "unknown": 6}
_LOSSES = {"raw": "loss", "rectified": "rectified loss"}
_CANDIDATES = {  # explanations by the last words of a candidate's name
    "gold": "trained on the estimated probabilities of the true classes instead of on the given labels",
    "first stack": "a weighted mixture of the plain models; gold starts from it",
    "trusted only": "trained on the trusted rows alone",
    "pruned": "trained without suspicious rows",
    "agreeing rows": "trained only on rows whose label several models predict",
    "trusted x10": "a trusted row counts ten times",
}
_Z = 1.644854  # standard normal quantile of a 90 % interval, the level of the whole page
_WORST = 10  # number of classes in the table of the worst ones
_INTERVAL = (
    "90 % Wilson intervals for the accuracy of this model on all examples of the kind that was tested. They do not "
    "include the variation between seeds."
)


def to_html(
    rows: Sequence[Row], runs: Sequence[RunRecord], details: Iterable[Detail] = (), ranks: dict[str, Any] | None = None
) -> str:
    """The page of one run, of the seeds of one experiment, or of several experiments that are compared.

    ranks : mean ranks of the methods: tables `methods` and `pairs`, `note`, and `picture` as a data URL
    """
    experiments = group(runs)
    known = {detail.run: detail for detail in details}
    first = experiments[0]
    title = f"{len(experiments)} experiments"
    if len(experiments) == 1:
        noise = "" if first.noise == "given" else f", noise {first.noise}"
        about = "Labels of" if known and any(d.audit is not None for d in known.values()) else f"{first.label} on"
        title = f"{about} {Path(first.data).name}{noise}"
    tables = {block.key: block for block in blocks(rows)}
    shown = []
    for key, members in group_by(experiments, lambda g: g.block).items():
        curves = _curves(members, len(experiments) > 1)
        shown.append({"name": tables[key].title, "table": tables[key], "curves": curves})
    parts = [_experiment(g, known) | {"name": f"{g.label}: {tables[g.block].title}"} for g in experiments]
    values = {"title": title, "blocks": shown, "table_legend": legend(rows), "experiments": parts, "colors": COLORS}
    return str(charts.render("page.html", ranks=ranks, **values))


def _experiment(g: Experiment, known: dict[Path, Detail]) -> dict[str, Any]:
    detail = next((known[run.path] for run in g.runs if run.path in known), Detail(g.first.path))
    accuracy, note = _accuracy(g)
    choice = _choice(next(iter(g.counted), g.first))
    truth = "true class" if g.first.facts.get("test_labels") == "clean" else "given label"
    about = ""
    if detail.run in known and len(g.counted) > 1:
        seed = next(run.spec["seed"] for run in g.runs if run.path == detail.run)
        about = f"The rest of this section is about seed {seed}: {detail.run}"
    return {
        "answer": answer(detail),
        "tiles": _tiles(g),
        "swatches": [charts.swatch(0), charts.swatch(1)],
        "n_val": g.first.facts.get("n_val"),
        "known_rate": g.first.facts.get("wrong_share"),
        "choice": choice,
        "candidates": _explain_candidates(choice),
        "facts": _facts(g),
        "settings": _settings(g.first.spec),
        "accuracy": accuracy,
        "accuracy_note": note,
        "commands": [_rerun(run) for run in g.runs],
        "about": about,
        "losses": _losses(detail.arrays),
        "confusions": _confusions(detail.arrays, truth),
        "worst": _worst_classes(detail.arrays, truth) if "confusion_test" in detail.arrays else None,
        "missing": detail.missing,
    }


def _tiles(g: Experiment) -> list[Tile]:
    """Tiles with the accuracy. The test accuracy comes first if the test labels are known to be right."""
    is_clean = g.first.facts.get("test_labels") == "clean"
    tiles = []
    last = [value for run in g.counted if (value := number(run.epochs[-1], "test_acc")) is not None]
    against = "" if is_clean else " against noisy labels"
    if len(last) == 1:
        interval = f"90 % interval {_interval(last[0], g.counted[0])} %"
        tiles.append(Tile(f"{last[0]:.1f} %", f"test accuracy{against}", interval))
    elif last:
        mean = f"{statistics.fmean(last):.1f} ± {statistics.stdev(last):.1f} %"
        tiles.append(Tile(mean, f"test accuracy{against}", f"{len(last)} seeds"))
    return tiles + _trusted_tile(g) if is_clean else _trusted_tile(g) + tiles


def _trusted_tile(g: Experiment) -> list[Tile]:
    """The accuracy on trusted rows that the models have not seen, if the method measures it."""
    names = ("trusted_acc", "trusted_low", "trusted_high")
    scores = [[number(run.epochs[-1], name) for name in names] for run in g.counted]
    known = [[value for value in score if value is not None] for score in scores if None not in score]
    n = g.first.facts.get("n_meta") or 0
    text = f"model accuracy on {n:,} trusted rows"
    about = "Their labels are known to be right, and the models that predict them were not trained on them"
    if len(known) == 1:
        accuracy, low, high = known[0]
        halve = f"With about {4 * n:,} trusted rows in total, this interval would be half as wide"
        note = f"90 % interval {low:.0f} to {high:.0f} %. {about}. {halve}"
        return [Tile(f"{accuracy:.1f} %", text, note)]
    if known:
        values = [score[0] for score in known]
        mean = f"{statistics.fmean(values):.1f} ± {statistics.stdev(values):.1f} %"
        return [Tile(mean, text, f"{len(values)} seeds. {about}")]
    return []


def _choice(run: RunRecord) -> Grid | None:
    """The candidates that the method compared, the most important ones first."""
    file = run.path / CHOICE
    if not file.is_file():
        return None
    choice = read_json(file, "repeat the run")
    rows = []
    try:
        for c in sorted(choice, key=lambda c: (-c["weight"], -(c["score"] or 0))):
            score = "–" if c["score"] is None else f"{100 * c['score']:.1f} ± {100 * (c['error'] or 0):.1f} %"
            weight = f"{c['weight']:.2f}" if c["weight"] else "–"
            seconds = f"{c['seconds']:.1f}" if c["seconds"] >= 0.1 else "< 0.1"
            rows.append((c["candidate"], score, seconds, weight, c.get("note") or ""))
    except MALFORMED_ERRORS as e:
        raise UserError(f"{file} is not a list of candidates ({e}); repeat the run") from e
    heads = ("candidate", "accuracy on trusted rows", "seconds", "weight", "note")
    n = 5 if any(row[4] for row in rows) else 4
    return Grid(heads[:n], [row[:n] for row in rows], (0, 4))


def _explain_candidates(choice: Grid | None) -> list[tuple[str, str]]:
    """What the names of the candidates mean, for those that occur."""
    names = [] if choice is None else [row[0] for row in choice.rows]
    return [(end, text) for end, text in _CANDIDATES.items() if any(name.endswith(end) for name in names)]


def _facts(g: Experiment) -> dict[str, str]:
    """Names and texts; an empty text is not shown."""
    run, spec, facts, environment = g.first, g.first.spec, g.first.facts, g.first.environment
    recipe = spec["recipe"]
    data = [f"{words} {format_value(spec[name])}" for name, words in _DATA.items() if spec.get(name) is not None]
    trusted = (
        "held out from rows whose true labels are known" if spec.get("meta") else "rows marked in the data, if any"
    )
    test_labels = _TEST_LABELS.get(str(facts.get("test_labels")), "unknown")
    options = _pairs({**spec["options"], **spec["changed"]})
    is_mixture = facts.get("n_parameters") == 0 and any((r.path / CHOICE).is_file() for r in g.runs)
    network = g.net + (f", {facts['n_parameters']:,} parameters" if facts.get("n_parameters") else "")
    return {
        "Data": ", ".join([g.data, *data]) + (f"; {facts['n_classes']} classes" if facts.get("n_classes") else ""),
        "Rows": ", ".join(f"{facts[name]:,} {words}" for name, words in _SIZES.items() if facts.get(name) is not None),
        "Noise": g.noise if g.noise != "given" else "none added; labels used as supplied",
        "Trusted": str(spec["meta_data"]) if spec.get("meta_data") else trusted,
        "Test labels": "" if facts.get("n_test") == 0 else test_labels,
        "Method": f"{spec['method']}" + (f" ({options})" if options else ""),
        "Model": "predictions come from a weighted mixture of the candidates above" if is_mixture else "",
        "Network": "" if is_mixture else network,
        "Training": "" if is_mixture else _pairs({name: recipe.get(name) for name in _TRAINING}),
        "Time": _training_time(g),
        "Seeds": ", ".join(f"{r.spec['seed']}" + ("" if r.done else " (unfinished)") for r in g.runs),
        "Machine": machine(environment) + (f", {environment['date']}" if environment.get("date") else ""),
        "Versions": versions(run),
    }


def _settings(spec: dict[str, Any]) -> Grid:
    parts = {
        "data": {name: value for name, value in spec.items() if name not in ("options", "changed", "recipe", "seed")},
        "training": spec["recipe"],
        "method": spec["options"],
    }
    rows = [
        (part, _SETTINGS.get(name, name), _round(value))
        for part, values in parts.items()
        for name, value in values.items()
    ]
    return Grid(("part", "setting", "value"), rows, (0, 1, 2))


def _round(value: Any) -> str:
    """A setting with at most four significant digits; the command below the table has all of them."""
    if isinstance(value, float):
        return f"{value:.4g}"
    return ",".join(map(_round, value)) if isinstance(value, list | tuple) else format_value(value)


def _accuracy(g: Experiment) -> tuple[Grid, str]:
    """A table and a note. One run: its important epochs. Several seeds: the last epoch of each, and their mean."""
    last = [(run, value) for run in g.counted if (value := number(run.epochs[-1], "test_acc")) is not None]
    if not g.counted:
        return Grid(), "No epoch has finished yet."
    if not last:
        evidence = "; the best evidence is the accuracy on trusted rows, at the top of this page"
        return Grid(), f"No separate test set{evidence if _trusted_tile(g) else ''}."
    if len(g.counted) > 1:
        rows = [(str(run.spec["seed"]), f"{value:.2f} %", _interval(value, run)) for run, value in last]
        values = [value for _, value in last]
        std = f" ± {statistics.stdev(values):.2f}" if len(values) > 1 else ""
        rows.append((f"mean ± sd of {len(values)}", f"{statistics.fmean(values):.2f}{std}", ""))
        note = f"{_INTERVAL} The last row is the mean ± the sample standard deviation over seeds."
        return Grid(("seed", "last epoch", "90 % interval"), rows, mean=True), note
    (run,) = g.counted
    epochs = []
    if len(run.epochs) == 1:
        value = last[0][1]
        note = f"{_INTERVAL}{'' if run.done else ' The run has not finished.'}"
        return Grid(("test accuracy", "90 % interval"), [(f"{value:.2f} %", _interval(value, run))], ()), note
    for name, epoch in zip(HEADS[2:], best_epochs(run), strict=True):
        if epoch is not None and (value := number(epoch, "test_acc")) is not None:
            epochs.append((name, str(int(epoch["epoch"])), f"{value:.2f} %", _interval(value, run)))
    oracle = "Best on test is the epoch with the highest test accuracy: an oracle, because the test set chose it."
    end = "" if run.done else " The run has not finished."
    return Grid(("which", "epoch", "test accuracy", "90 % interval"), epochs), f"{_INTERVAL} {oracle}{end}"


def _curves(experiments: Sequence[Experiment], compared: bool) -> dict[str, Any] | None:
    """Accuracy and losses over the epochs, with a legend if experiments are compared."""
    begun = [g for g in experiments if g.counted]
    titles = {"test_acc": "test accuracy", "loss": "training loss", "meta_loss": "loss on the trusted examples"}
    shown = []
    for key, title in titles.items():
        series = [charts.Series(g.label, average_curve(g.counted, key), i) for i, g in enumerate(begun)]
        curves = [s.curve for s in series if s.curve.epochs]
        if all(len(curve.epochs) == 1 for curve in curves):
            continue  # a method that trains in one step has no learning curve
        if curves and key == "test_acc":
            shown.append(charts.lines(title, series, "%", max(0.0, lowest(curves) - 1)))
        elif curves:
            shown.append(charts.lines(title, series))
    names = [g.label + ("" if g.finished else " (unfinished)") for g in begun]
    entries = [(charts.swatch(i), name) for i, name in enumerate(names)] if compared else []
    band = any(len(g.counted) > 1 for g in begun)
    return {"charts": shown, "legend": entries, "band": band} if shown else None


def _losses(arrays: Arrays) -> dict[str, Any] | None:
    if not arrays:
        return None
    kinds = {name: i for i, name in enumerate(KINDS) if arrays["n_kind"][i]}
    stages = [name for name in ("raw", "rectified") if f"loss_{name}" in arrays]
    counts = [arrays[f"loss_{stage}"] for stage in stages]
    edges = EDGES[: max(int(each.nonzero()[1].max()) for each in counts) + 2]
    top = 1.3 * max(float(each.max()) for each in counts)
    shown = []
    for stage, each in zip(stages, counts, strict=True):
        known = {name: "" if name == "unknown" else f" ({name})" for name in kinds}
        means = ", ".join(f"mean {arrays[f'loss_{stage}_mean'][i]:.2f}{known[name]}" for name, i in kinds.items())
        by_kind = {name: each[i] for name, i in kinds.items()}
        x_label = "cross-entropy with the given label"
        shown.append(charts.histogram(f"{_LOSSES[stage]}: {means}", by_kind, edges, x_label, _STYLES, top))
    return {"charts": shown, "legend": [(charts.swatch(_STYLES[name]), _KINDS[name]) for name in kinds]}


def _confusions(arrays: Arrays, truth: str) -> list[tuple[str, str]]:
    shown: list[tuple[str, str]] = []
    for part, name, rows in (("test", "Test", truth), ("train", "Training", "given label")):
        if (counts := arrays.get(f"confusion_{part}")) is not None:
            title = f"{name} set: {rows} and prediction"
            shown.append((title, charts.matrix(title, counts, arrays["classes"].tolist(), rows, "predicted class")))
    return shown


def _worst_classes(arrays: Arrays, truth: str) -> Grid:
    """The classes with the lowest accuracy."""
    rows = []
    counts, classes = arrays["confusion_test"], arrays["classes"].tolist()
    total = counts.sum(1)
    right = counts.diagonal()
    order = sorted((k for k in range(len(classes)) if total[k]), key=lambda k: (right[k] / total[k], k))
    for k in order[:_WORST]:
        others = counts[k].copy()
        others[k] = 0
        low, high = wilson_interval(right[k] / total[k], float(total[k]), _Z)
        confused = f"{classes[int(others.argmax())]} ({int(others.max())})" if others.any() else "–"
        share = f"{100 * right[k] / total[k]:.1f} %"
        rows.append((classes[k], f"{int(total[k])}", share, f"{100 * low:.0f} to {100 * high:.0f}", confused))
    return Grid((truth, "examples", "accuracy", "90 % interval", "predicted as"), rows, (0, 4))


def _rerun(run: RunRecord) -> tuple[str, str]:
    """The command that repeats a run, and a note with the hashes of its data."""
    state = "" if run.done else " (unfinished)"
    hashes = [f"{name} {digest}" for name, digest in data_hashes(run.facts).items()]
    same = f" SHA-256 of the data (spec.json): {', '.join(hashes)}." if hashes else ""
    tables = format_tables(custom_names(run.spec))
    own = f" The run used custom code: {' and '.join(custom_files(run.spec))} must define {tables}."
    note = f"Seed {run.spec['seed']}{state}: {run.path}.{same}{own if tables else ''}"
    return command(run.spec, f"again/{run.path.name}", run.environment.get("threads")), note


def _interval(percent: float, run: RunRecord) -> str:
    low, high = wilson_interval(percent / 100, int(run.facts.get("n_test") or 0), _Z)
    return f"{100 * low:.1f} to {100 * high:.1f}"


def _pairs(values: dict[str, Any]) -> str:
    known = {name.replace("_", " "): value for name, value in values.items() if value is not None}
    return ", ".join(f"{name} {f'{v:.4g}' if isinstance(v, float) else format_value(v)}" for name, v in known.items())


def _training_time(g: Experiment) -> str:
    """Seconds of training and testing, per run."""
    seconds = [s for run in g.counted for epoch in run.epochs if (s := number(epoch, "seconds")) is not None]
    each = " per run" if len(g.counted) > 1 else ""
    return f"{_time(sum(seconds) / len(g.counted))} of training and testing{each}" if seconds else ""


def _time(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
