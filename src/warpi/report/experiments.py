"""Read run folders, and put the runs of one experiment together."""

import hashlib
import json
import math
import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from warpi.errors import UserError
from warpi.runs.facts import base_key, describe_differences, later_keys
from warpi.runs.rerun import format_value
from warpi.runs.schema import FORMAT, check_spec, read_json, read_record

_MEND = "run it again, or leave this folder out"
_RESULTS = ("loss", "meta_loss", "val_acc", "val_nll", "test_acc", "test_nll", "test_ece")


@dataclass(frozen=True)
class RunRecord:
    """One run folder as it was found."""

    path: Path
    spec: dict[str, Any]
    facts: dict[str, Any]
    environment: dict[str, Any]
    epochs: list[dict[str, Any]]  # the lines of results.jsonl in the order of their epochs
    done: bool
    version: str = "unknown"


@dataclass(frozen=True)
class Experiment:
    """Runs that are equal in all but the seed."""

    label: str  # the method, and what tells it from its neighbours
    data: str
    noise: str
    net: str
    runs: tuple[RunRecord, ...]  # by seed, finished or not, at least one

    @property
    def first(self) -> RunRecord:
        """Any of the runs, for what they share."""
        return self.runs[0]

    @property
    def needs_meta(self) -> bool:
        return bool(self.first.facts.get("needs_meta", False))

    @property
    def finished(self) -> bool:
        return any(run.done for run in self.runs)

    @property
    def counted(self) -> tuple[RunRecord, ...]:
        """The runs that enter the numbers: the finished ones, or where there are none, those that have begun."""
        return tuple(run for run in self.runs if (run.done if self.finished else run.epochs))


@dataclass(frozen=True)
class Difference:
    """A row's last accuracy less that of another row, a seed at a time (`report.paired`)."""

    label: str  # of the other row; the row itself is compared with itself
    seeds: tuple[int, ...]  # compared: those that both rows have finished, on the same data
    unlike: tuple[int, ...]  # left out: both have them, but not, or not provably, the same noise and test set
    mean: float | None
    ci95: float | None  # half of the interval of the mean


@dataclass(frozen=True)
class Row:
    """One experiment over its seeds. Accuracies are on the test set, in percent; None where there is nothing to say.

    `last` is the final epoch, `val` the epoch of the highest validation accuracy (the latest of equals), and `best` the
    epoch of the highest test accuracy: an ORACLE, for nobody may pick an epoch by the test set. Deviations are those of
    a sample (ddof = 1). Values by seed are in the order of `seeds`.
    """

    method: str
    label: str
    data: str
    noise: str
    net: str
    needs_meta: bool
    needs_noise_rate: bool
    finished: bool  # False: the numbers come from runs that have not ended
    n_seeds: int
    seeds: tuple[int, ...]
    n_unfinished: int
    epochs: int  # reached by every run that counts
    planned_epochs: int | None
    last_mean: float | None
    last_std: float | None
    val_mean: float | None
    val_std: float | None
    best_mean: float | None
    best_std: float | None
    last_by_seed: tuple[float | None, ...]
    val_by_seed: tuple[float | None, ...]
    best_by_seed: tuple[float | None, ...]
    seconds_per_epoch: float | None
    test_labels: str
    machines: tuple[str, ...]
    versions: tuple[str, ...]
    against: Difference | None = None  # where the row is compared with another


def find_runs(paths: Sequence[Path], unreadable: list[UserError] | None = None) -> list[RunRecord]:
    """The runs in `paths`, each a run folder or a folder with run folders somewhere below it.

    With `unreadable`, a run that cannot be read is left out and its error put there; without, it is raised.
    """
    folders: dict[Path, Path] = {}  # the same folder may be named twice
    for path in map(Path, paths):
        try:
            if not path.is_dir():
                what = "is a file" if path.exists() else "does not exist"
                raise UserError(f"{path} {what}; give a run folder, or a folder that holds run folders")
            found = [path] if (path / "spec.json").exists() else sorted(p.parent for p in path.rglob("spec.json"))
        except OSError as error:
            raise _unreadable(path, error) from error
        if not found:
            raise UserError(f"no runs in {path}: no spec.json in it or below; warpi fit makes run folders")
        for folder in found:
            folders.setdefault(folder.resolve(), folder)
    if not folders:
        raise UserError("no runs given; give a run folder, or a folder that holds run folders")
    runs = []
    for folder in folders.values():
        try:
            runs.append(_read(folder))
        except UserError as error:
            if unreadable is None:
                raise
            unreadable.append(error)
    return runs


def group(runs: Iterable[RunRecord]) -> list[Experiment]:
    """Runs that differ in nothing but the seed (and where the data lies), those of a table beside each other.

    Neither a path nor the name of a network says what is behind it, so that facts about both count too. Labels are
    unique within a table (`_labels`). A folder that holds the same run once more is left out.
    """
    found, apart = dict[str, list[RunRecord]](), dict[tuple[str, str], list[RunRecord]]()
    for run in runs:
        known = [_fields(run.spec), base_key(run.facts)]
        found.setdefault(json.dumps(known, sort_keys=True), []).append(run)
    for one, mine in found.items():
        for run, key in zip(mine, later_keys([run.facts for run in mine]), strict=True):
            apart.setdefault((one, key), []).append(run)
    members = list(apart.values())
    experiments = [
        Experiment(label, *_block(mine[0].spec), _once(mine))
        for label, mine in zip(_labels(members), members, strict=True)
    ]
    return sorted(experiments, key=lambda g: (g.data, g.noise, g.net, g.needs_meta, _in_order(g.label)))


def _in_order(label: str) -> list[tuple[str, float]]:
    """A key to sort by: 5 comes before 20."""
    return [(text, float(number or 0)) for text, number in re.findall(r"(\D*)(\d*\.?\d*)", label)]


def summarize(runs: Iterable[RunRecord]) -> list[Row]:
    """A row for each experiment. Unfinished runs count only where an experiment has no others."""
    return [_row(g) for g in group(runs)]


def number(record: Mapping[str, Any], key: str) -> float | None:
    """A finite number of an epoch; None where it is absent or the run had diverged."""
    value = record.get(key)
    return float(value) if value is not None and math.isfinite(value) else None


# -- reading ---------------------------------------------------------------------------------------------------------


def _read(folder: Path) -> RunRecord:
    file = folder / "spec.json"
    try:
        content = read_json(file, _MEND)
    except OSError as error:
        raise _unreadable(file, error) from error
    form = content.get("format") if isinstance(content, dict) else None
    if form != FORMAT:
        raise UserError(f"{file} has the format {form!r}, this version of warpi reads {FORMAT!r}; leave the folder out")
    check_spec(content, file, _MEND, ("spec", "data", "method", "seed"))
    spec = content["spec"] | {name: content["spec"].get(name) or {} for name in ("options", "changed", "recipe")}
    done = (folder / "done").exists()  # before the results: the run may end at this moment
    epochs, whole = _read_epochs(folder / "results.jsonl")
    done = done and whole and bool(epochs)  # a run without its last epoch cannot be finished
    facts, environment = content.get("facts") or {}, content.get("environment") or {}
    return RunRecord(folder, spec, facts, environment, epochs, done, str(content.get("version", "unknown")))


def _read_epochs(file: Path) -> tuple[list[dict[str, Any]], bool]:
    """The epochs, and whether the last line is whole: a crash may have cut it off. Of an epoch that was run twice
    (after a crash) the later line holds."""
    try:
        lines = file.read_bytes().decode("utf-8", errors="replace").split("\n")
    except FileNotFoundError:
        return [], True
    except OSError as error:
        raise _unreadable(file, error) from error
    filled = [(i, line) for i, line in enumerate(lines, 1) if line.strip()]
    epochs: dict[int, dict[str, Any]] = {}
    for i, line in filled:
        try:
            record = read_record(line, file, i, "mend or remove the line, or run it again")
        except UserError as error:
            if i == filled[-1][0] and error.__cause__:
                return [epochs[t] for t in sorted(epochs)], False
            raise
        if (t := number(record, "epoch")) is None:
            raise UserError(f"{file} line {i} has no epoch; mend or remove the line, or run it again")
        if (acc := number(record, "test_acc")) is not None and not 0 <= acc <= 100:
            raise UserError(f"{file} line {i}: 'test_acc' must be a percentage, got {acc}; mend or remove the line")
        epochs[int(t)] = record
    return [epochs[t] for t in sorted(epochs)], True


def _unreadable(path: Path, error: OSError) -> UserError:
    return UserError(f"cannot read {path}: {error.strerror}; mend that, or leave this folder out")


# -- grouping --------------------------------------------------------------------------------------------------------


def _fields(spec: Mapping[str, Any]) -> dict[str, Any]:
    """All that makes an experiment, flat. A field that is absent and one that is null are the same.

    Which options were said to differ from the defaults of the day is no part of it: the options are.
    """
    parts = ("options", "recipe")
    flat = {name: value for name, value in spec.items() if name not in (*parts, "changed", "seed", "root")}
    flat |= {f"{part}.{name}": value for part in parts for name, value in (spec.get(part) or {}).items()}
    flat.pop("recipe.seed", None)
    return {name: value for name, value in flat.items() if value is not None}


def _block(spec: Mapping[str, Any]) -> tuple[str, str, str]:
    return str(spec["data"]), format_value(spec.get("noise")), format_value(spec["recipe"].get("net"))


def _labels(experiments: Sequence[Sequence[RunRecord]]) -> list[str]:
    """The method of each, with its changed options, and where others of its table would have the same label, with the
    settings in which these differ; where there are none, with the facts."""
    specs, labels = [_fields(runs[0].spec) for runs in experiments], list[str]()
    shown = [{name: value for run in runs for name, value in run.spec["changed"].items()} for runs in experiments]
    words = [list[str]() for _ in experiments]
    while labels != (labels := [_label(*each) for each in zip(specs, shown, words, strict=True)]):
        same: dict[tuple[str, ...], list[int]] = {}
        for i, label in enumerate(labels):
            same.setdefault((*_block(experiments[i][0].spec), label), []).append(i)
        for rivals in (mine for mine in same.values() if len(mine) > 1):
            names = sorted({name for i in rivals for name in specs[i]})
            differ = [name for name in names if len({json.dumps(specs[i].get(name)) for i in rivals}) > 1]
            tails = [name.split(".")[-1] for name in differ]  # `lr` may be a field of the recipe and of the method
            for i in rivals:
                for name, tail in zip(differ, tails, strict=True):
                    alone = tails.count(tail) == 1 and tail not in shown[i]
                    shown[i][tail if alone else name] = specs[i].get(name)
            if not differ:
                for i, facts in zip(
                    rivals, describe_differences([experiments[i][0].facts for i in rivals]), strict=True
                ):
                    words[i] = facts
    return labels


def _label(spec: Mapping[str, Any], shown: Mapping[str, Any], facts: Iterable[str]) -> str:
    text = ", ".join([*(f"{name}={_short(value)}" for name, value in shown.items()), *facts])
    return f"{spec['method']} ({text})" if text else str(spec["method"])


def _short(value: object) -> str:
    """A value in a label: 2/3 with six digits; a matrix by how it begins, and by a digest that tells it from others."""
    text = format_value(value)
    if isinstance(value, float):
        return f"{value:.6g}"
    if not isinstance(value, list | tuple):
        return text
    if len(value) <= 9:
        return format_value([f"{each:.6g}" if isinstance(each, float) else each for each in value])
    return f"{format_value(value[:3])},… {hashlib.sha256(text.encode()).hexdigest()[:8]}"


def _once(runs: Iterable[RunRecord]) -> tuple[RunRecord, ...]:
    """One run a seed. Copies are dropped, also an unfinished one of a run that went on elsewhere."""
    kept: dict[int, RunRecord] = {}
    for run in runs:
        seed = run.spec["seed"]
        if seed in kept:
            long, short = sorted((kept[seed], run), key=lambda r: (r.done, len(r.epochs)), reverse=True)
            ended_apart = short.done and len(short.epochs) != len(long.epochs)
            if ended_apart or _results(short) != _results(long)[: len(short.epochs)]:
                raise UserError(
                    f"{kept[seed].path} and {run.path} have the same spec and seed but different results; "
                    "leave one of them out"
                )
            run = long
        kept[seed] = run
    return tuple(kept[seed] for seed in sorted(kept))


def _results(run: RunRecord) -> list[str]:
    """What was learned, without what it cost: the clock never says the same twice."""
    return [json.dumps([epoch.get(key) for key in ("epoch", *_RESULTS)]) for epoch in run.epochs]


# -- numbers ---------------------------------------------------------------------------------------------------------


def _row(g: Experiment) -> Row:
    runs, first = g.counted, g.first
    epochs = [best_epochs(run) for run in runs]
    values = [tuple(number(each[i] or {}, "test_acc") for each in epochs) for i in range(3)]
    (last_mean, last_std), (val_mean, val_std), (best_mean, best_std) = map(_mean_std, values)
    seconds = [s for run in runs for epoch in run.epochs if (s := number(epoch, "seconds")) is not None]
    return Row(
        method=first.spec["method"],
        label=g.label,
        data=g.data,
        noise=g.noise,
        net=g.net,
        needs_meta=g.needs_meta,
        needs_noise_rate=bool(first.facts.get("needs_noise_rate", False)),
        finished=g.finished,
        n_seeds=len(runs),
        seeds=tuple(run.spec["seed"] for run in runs),
        n_unfinished=sum(not run.done for run in g.runs),
        epochs=min((int(run.epochs[-1]["epoch"]) for run in runs), default=0),
        planned_epochs=first.spec["recipe"].get("epochs"),
        last_mean=last_mean,
        last_std=last_std,
        val_mean=val_mean,
        val_std=val_std,
        best_mean=best_mean,
        best_std=best_std,
        last_by_seed=values[0],
        val_by_seed=values[1],
        best_by_seed=values[2],
        seconds_per_epoch=statistics.fmean(seconds) if seconds else None,
        test_labels=" and ".join(sorted({str(run.facts.get("test_labels") or "unknown") for run in runs or (first,)})),
        machines=tuple(sorted({_machine(run.environment) for run in runs or (first,)})),
        versions=tuple(sorted({_versions(run) for run in runs or (first,)})),
    )


def best_epochs(run: RunRecord) -> tuple[dict[str, Any] | None, dict[str, Any] | None, dict[str, Any] | None]:
    """The last epoch, that of the highest validation accuracy (the latest of equals), and that of the highest test
    accuracy, which no user could have picked."""
    judged = [(v, t) for t, epoch in enumerate(run.epochs) if (v := number(epoch, "val_acc")) is not None]
    tested = [(acc, -t) for t, epoch in enumerate(run.epochs) if (acc := number(epoch, "test_acc")) is not None]
    by_validation = run.epochs[max(judged)[1]] if judged else None
    return run.epochs[-1], by_validation, run.epochs[-max(tested)[1]] if tested else None


def _mean_std(values: Sequence[float | None]) -> tuple[float | None, float | None]:
    """Mean and sample deviation over the seeds; nothing where a seed has no value, for it would be another mean."""
    known = [value for value in values if value is not None]
    if not known or len(known) < len(values):
        return None, None
    return statistics.fmean(known), statistics.stdev(known) if len(known) > 1 else None


def _machine(environment: Mapping[str, Any]) -> str:
    if environment.get("gpu"):
        return str(environment["gpu"])
    threads = environment.get("threads")
    many = "" if threads is None else f" ({threads} thread{'s' * (threads != 1)})"
    return str(environment.get("device") or "unknown machine") + many


def _versions(run: RunRecord) -> str:
    tools = [f"{name} {run.environment[name]}" for name in ("torch", "python") if run.environment.get(name)]
    return ", ".join([f"warpi {run.version}", *tools])
