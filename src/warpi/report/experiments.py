"""Read run folders and group the runs that differ only in the seed."""

import json
import math
import re
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from warpi.datasets.delimited_files import reading
from warpi.errors import UserError
from warpi.runs.rerun_command import format_value
from warpi.runs.schema import CHOICE, DONE, FORMAT, RESULTS, SPEC, check_spec, read_record, use_current_spec
from warpi.runs.stored_facts import base_key, describe_differences, later_keys
from warpi.utils.files import read_json, sha256

Item = TypeVar("Item")
Key = TypeVar("Key")
_ADVICE = "run it again, or leave this folder out"
_RESULTS = ("loss", "meta_loss", "val_acc", "val_nll", "test_acc", "test_nll", "test_ece")


@dataclass(frozen=True)
class RunRecord:
    """The content of one run folder."""

    path: Path
    spec: dict[str, Any]
    facts: dict[str, Any]
    environment: dict[str, Any]
    epochs: list[dict[str, Any]]  # the lines of results.jsonl, sorted by epoch
    done: bool
    version: str = "unknown"


@dataclass(frozen=True)
class Experiment:
    """Runs that differ only in the seed."""

    label: str  # the method, and the settings that distinguish it from other experiments of its table
    data: str
    noise: str
    net: str
    runs: tuple[RunRecord, ...]  # at least one, sorted by seed, finished or not

    @property
    def first(self) -> RunRecord:
        """The first run, for the settings that all runs share."""
        return self.runs[0]

    @property
    def block(self) -> tuple[str, str, str]:
        """Data, noise and network: what the experiments of one table share."""
        return self.data, self.noise, self.net

    @property
    def block_title(self) -> str:
        return f"{self.data}, noise {self.noise}, {self.net}"

    @property
    def needs_meta(self) -> bool:
        """Whether the runs used trusted examples. A method that can do without them has the option `use_trusted`."""
        facts = self.first.facts
        optional = self.first.spec.get("options", {}).get("use_trusted", False) and facts.get("n_meta", 0) > 0
        return bool(facts.get("needs_meta", False) or optional)

    @property
    def finished(self) -> bool:
        return any(run.done for run in self.runs)

    @property
    def counted(self) -> tuple[RunRecord, ...]:
        """The runs that enter the averages: the finished ones, or if there are none, those with at least one epoch."""
        return tuple(run for run in self.runs if (run.done if self.finished else run.epochs))


@dataclass(frozen=True)
class Difference:
    """The last accuracy of a row minus that of another row, averaged over seeds (`report.paired_tests`)."""

    label: str  # of the other row, which is also compared with itself
    seeds: tuple[int, ...]  # compared: both rows have finished them on the same data
    unlike: tuple[int, ...]  # not compared: noise or test set differ, or are not known to be the same
    mean: float | None
    ci95: float | None  # half-width of the interval of the mean


@dataclass(frozen=True)
class Row:
    """One experiment, averaged over its seeds. Accuracies are in percent on the test set; None if unknown.

    `last` is the final epoch, `val` the epoch with the highest validation accuracy (the latest if several are equal),
    and `best` the epoch with the highest test accuracy: an ORACLE, because no user may choose an epoch by the test set.
    Standard deviations are those of a sample (ddof = 1). Values by seed are in the order of `seeds`.
    """

    method: str
    label: str
    data: str
    noise: str
    net: str
    needs_meta: bool
    needs_noise_rate: bool
    finished: bool  # False: the numbers come from unfinished runs
    n_seeds: int
    seeds: tuple[int, ...]
    n_unfinished: int
    epochs: int  # reached by every counted run
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
    against: Difference | None = None  # set if the row is compared with another
    trusted: tuple[float, ...] = ()  # by seed: accuracy on trusted rows that the models have not seen, if measured
    trusted_interval: tuple[float, float] | None = None  # of a single seed, 90 %
    uses_net: bool = True  # whether the method trains a network


def find_runs(paths: Sequence[Path], unreadable: list[UserError] | None = None) -> list[RunRecord]:
    """Read the runs in `paths`: each is a run folder or a folder that contains run folders at any depth.

    If a run cannot be read, its error is appended to `unreadable`, or raised if that is None.
    """
    folders: dict[Path, Path] = {}  # by resolved path, since a folder may be given twice
    for path in map(Path, paths):
        with reading(path):
            if not path.is_dir():
                problem = "is a file" if path.exists() else "does not exist"
                raise UserError(f"{path} {problem}; pass a run folder, or a folder that contains run folders")
            inside = [path] if (path / SPEC).exists() else sorted(p.parent for p in path.rglob(SPEC))
        if not inside:
            raise UserError(f"no runs in {path}: it contains no spec.json at any depth; warpi fit makes run folders")
        for folder in inside:
            folders.setdefault(folder.resolve(), folder)
    if not folders:
        raise UserError("no runs given; pass a run folder, or a folder that contains run folders")
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
    """Group runs that differ only in the seed and in the location of the data; sorted by table.

    A path or the name of a network does not identify the data or the network, so their facts are also compared. Labels
    are unique within a table (`_labels`). Copies of a run are dropped.
    """
    members: list[list[RunRecord]] = []
    settings = lambda run: json.dumps([_fields(run.spec), base_key(run.facts)], sort_keys=True)
    for some in group_by(runs, settings).values():
        keyed = zip(later_keys([run.facts for run in some]), some, strict=True)
        members += ([run for _, run in same] for same in group_by(keyed, lambda pair: pair[0]).values())
    experiments = [
        Experiment(label, *_block(some[0].spec), _drop_copies(some))
        for label, some in zip(_labels(members), members, strict=True)
    ]
    return sorted(experiments, key=lambda g: (*g.block, g.needs_meta, _natural_order(g.label)))


def _natural_order(label: str) -> list[tuple[str, float]]:
    """A sort key that puts 5 before 20."""
    return [(text, float(number or 0)) for text, number in re.findall(r"(\D*)(\d*\.?\d*)", label)]


def group_by(items: Iterable[Item], key: Callable[[Item], Key]) -> dict[Key, list[Item]]:
    """Items by their key. Keys and items keep their order."""
    groups: dict[Key, list[Item]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups


def summarize(runs: Iterable[RunRecord]) -> list[Row]:
    """One row per experiment. Unfinished runs count only if an experiment has no finished ones."""
    return [_row(g) for g in group(runs)]


def number(record: Mapping[str, Any], key: str) -> float | None:
    """The value of `key` in the record of an epoch; None if it is absent or not finite."""
    value = record.get(key)
    return float(value) if value is not None and math.isfinite(value) else None


def _read(folder: Path) -> RunRecord:
    file = folder / SPEC
    with reading(file):
        content = read_json(file, _ADVICE)
    form = content.get("format") if isinstance(content, dict) else None
    if form != FORMAT:
        raise UserError(f"{file} has the format {form!r}, but this version reads {FORMAT!r}; leave the folder out")
    check_spec(content, file, _ADVICE, ("spec", "data", "method", "seed"))
    content = use_current_spec(content)
    spec = content["spec"] | {name: content["spec"].get(name) or {} for name in ("options", "changed", "recipe")}
    done = (folder / DONE).exists()  # checked before the results are read: the run may end in between
    epochs, whole = _read_epochs(folder / RESULTS)
    done = done and whole and bool(epochs)  # a run without its last epoch cannot be finished
    return RunRecord(
        path=folder,
        spec=spec,
        facts=content.get("facts") or {},
        environment=content.get("environment") or {},
        epochs=epochs,
        done=done,
        version=str(content.get("version", "unknown")),
    )


def _read_epochs(file: Path) -> tuple[list[dict[str, Any]], bool]:
    """The epochs, and whether the last line is complete: a crash may have cut it off.

    If an epoch was run twice (after a crash), the later line counts.
    """
    with reading(file):
        content = file.read_bytes() if file.exists() else b""
    lines = content.decode("utf-8", errors="replace").split("\n")
    filled = [(i, line) for i, line in enumerate(lines, 1) if line.strip()]
    epochs: dict[int, dict[str, Any]] = {}
    for i, line in filled:
        try:
            record = read_record(line, file, i, "fix or remove the line, or run it again")
        except UserError as error:
            if i == filled[-1][0] and error.__cause__:
                return [epochs[t] for t in sorted(epochs)], False
            raise
        if (t := number(record, "epoch")) is None:
            raise UserError(f"{file} line {i} has no epoch; fix or remove the line, or run it again")
        if (acc := number(record, "test_acc")) is not None and not 0 <= acc <= 100:
            raise UserError(f"{file} line {i}: 'test_acc' must be a percentage, got {acc}; fix or remove the line")
        epochs[int(t)] = record
    return [epochs[t] for t in sorted(epochs)], True


def _fields(spec: Mapping[str, Any]) -> dict[str, Any]:
    """All settings of an experiment as a flat dict. Fields that are null count as absent.

    `changed` is ignored: it depends on the defaults of the version that made the run. `options` has all values.
    """
    parts = ("options", "recipe")
    flat = {name: value for name, value in spec.items() if name not in (*parts, "changed", "seed", "root")}
    flat |= {f"{part}.{name}": value for part in parts for name, value in (spec.get(part) or {}).items()}
    flat.pop("recipe.seed", None)
    return {name: value for name, value in flat.items() if value is not None}


def _block(spec: Mapping[str, Any]) -> tuple[str, str, str]:
    return str(spec["data"]), format_value(spec.get("noise")), format_value(spec["recipe"].get("net"))


def _labels(experiments: Sequence[Sequence[RunRecord]]) -> list[str]:
    """The method of each experiment with its changed options.

    If several experiments of a table would get the same label, the settings in which they differ are added, and if
    there are none, the facts.
    """
    specs = [_fields(runs[0].spec) for runs in experiments]
    labels: list[str] = []
    shown = [{name: value for run in runs for name, value in run.spec["changed"].items()} for runs in experiments]
    words = [list[str]() for _ in experiments]
    while labels != (labels := [_label(*each) for each in zip(specs, shown, words, strict=True)]):
        same = group_by(range(len(labels)), lambda i: (*_block(experiments[i][0].spec), labels[i]))
        for rivals in (some for some in same.values() if len(some) > 1):
            names = sorted({name for i in rivals for name in specs[i]})
            differ = [name for name in names if len({json.dumps(specs[i].get(name)) for i in rivals}) > 1]
            tails = [name.split(".")[-1] for name in differ]  # `lr` may be a setting of the recipe and of the method
            for i in rivals:
                for name, tail in zip(differ, tails, strict=True):
                    unique = tails.count(tail) == 1 and tail not in shown[i]
                    shown[i][tail if unique else name] = specs[i].get(name)
            if not differ:
                facts = describe_differences([experiments[i][0].facts for i in rivals])
                for i, own_facts in zip(rivals, facts, strict=True):
                    words[i] = own_facts
    return labels


def _label(spec: Mapping[str, Any], shown: Mapping[str, Any], facts: Iterable[str]) -> str:
    text = ", ".join([*(f"{name}={_short(value)}" for name, value in shown.items()), *facts])
    return f"{spec['method']} ({text})" if text else str(spec["method"])


def _short(value: object) -> str:
    """A value in a label: numbers with six digits, long lists as their first values and a digest."""
    text = format_value(value)
    if isinstance(value, float):
        return f"{value:.6g}"
    if not isinstance(value, list | tuple):
        return text
    if len(value) <= 9:
        return format_value([f"{each:.6g}" if isinstance(each, float) else each for each in value])
    return f"{format_value(value[:3])},… {sha256(text)[:8]}"


def _drop_copies(runs: Iterable[RunRecord]) -> tuple[RunRecord, ...]:
    """One run per seed. Copies are dropped, also an unfinished copy of a run that was resumed elsewhere."""
    kept: dict[int, RunRecord] = {}
    for run in runs:
        seed = run.spec["seed"]
        if seed in kept:
            long, short = sorted((kept[seed], run), key=lambda r: (r.done, len(r.epochs)), reverse=True)
            differ = short.done and len(short.epochs) != len(long.epochs)
            if differ or _results(short) != _results(long)[: len(short.epochs)]:
                raise UserError(
                    f"{kept[seed].path} and {run.path} have the same spec and seed but different results; "
                    "leave one of them out"
                )
            run = long
        kept[seed] = run
    return tuple(kept[seed] for seed in sorted(kept))


def _results(run: RunRecord) -> list[str]:
    """The results of all epochs without the times, which differ between copies."""
    return [json.dumps([epoch.get(key) for key in ("epoch", *_RESULTS)]) for epoch in run.epochs]


def _row(g: Experiment) -> Row:
    runs, first = g.counted, g.first
    epochs = [best_epochs(run) for run in runs]
    accuracies: dict[str, Any] = {}
    for i, name in enumerate(("last", "val", "best")):
        values = tuple(number(each[i] or {}, "test_acc") for each in epochs)
        mean, std = mean_std(values)
        accuracies |= {f"{name}_mean": mean, f"{name}_std": std, f"{name}_by_seed": values}
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
        **accuracies,
        seconds_per_epoch=statistics.fmean(seconds) if seconds else None,
        test_labels=" and ".join(sorted({str(run.facts.get("test_labels") or "unknown") for run in runs or (first,)})),
        machines=tuple(sorted({machine(run.environment) for run in runs or (first,)})),
        versions=tuple(sorted({versions(run) for run in runs or (first,)})),
        trusted=tuple(value for run in runs if (value := number(run.epochs[-1], "trusted_acc")) is not None),
        trusted_interval=_trusted_interval(runs),
        uses_net=not (first.path / CHOICE).is_file(),
    )


def _trusted_interval(runs: Sequence[RunRecord]) -> tuple[float, float] | None:
    ends = [number(run.epochs[-1], name) for run in runs for name in ("trusted_low", "trusted_high")]
    return (ends[0], ends[1]) if len(ends) == 2 and ends[0] is not None and ends[1] is not None else None


def best_epochs(run: RunRecord) -> tuple[dict[str, Any] | None, dict[str, Any] | None, dict[str, Any] | None]:
    """The last epoch, the one with the highest validation accuracy, and the one with the highest test accuracy.

    If several validation accuracies are equal, the latest epoch counts. The third is an oracle.
    """
    validated = [(v, t) for t, epoch in enumerate(run.epochs) if (v := number(epoch, "val_acc")) is not None]
    tested = [(acc, -t) for t, epoch in enumerate(run.epochs) if (acc := number(epoch, "test_acc")) is not None]
    by_validation = run.epochs[max(validated)[1]] if validated else None
    return run.epochs[-1], by_validation, run.epochs[-max(tested)[1]] if tested else None


def mean_std(values: Sequence[float | None]) -> tuple[float | None, float | None]:
    """Mean and sample standard deviation over the seeds; None if a value is missing."""
    known = [value for value in values if value is not None]
    if not known or len(known) < len(values):
        return None, None
    return statistics.fmean(known), statistics.stdev(known) if len(known) > 1 else None


def machine(environment: Mapping[str, Any]) -> str:
    if environment.get("gpu"):
        return str(environment["gpu"])
    threads = environment.get("threads")
    many = "" if threads is None else f" ({threads} thread{'s' * (threads != 1)})"
    return str(environment.get("device") or "unknown machine") + many


def versions(run: RunRecord) -> str:
    tools = [f"{name} {run.environment[name]}" for name in ("torch", "python") if run.environment.get(name)]
    return ", ".join([f"warpi {run.version}", *tools])
