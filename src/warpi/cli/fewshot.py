"""`warpi fewshot fit | evaluate | plot`."""

from collections.abc import Callable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from warpi.errors import UserError, unknown
from warpi.utils.files import write_atomically, write_json
from warpi.utils.flags import Parser, add_fields
from warpi.utils.terminal import cell, say

if TYPE_CHECKING:
    from warpi.fewshot.run import Run

_NEEDED = ("label", "data", "metric", "transductive", "tasks")  # required keys of a row in a file
_NUMBERS = ("ways", "shots", "train_ways", "train_shots", "mean")

USAGE = """usage: warpi fewshot fit|evaluate|plot ...

Learn from many small tasks how to learn a new one from a few examples.

  fit --data sines|omniglot|cifar_fs|mini_imagenet --learner NAME --out DIR     train, and write a run folder
  evaluate DIR... [--tasks N] [--json FILE]                                     evaluate runs on the same test tasks
  plot DIR... --out FILE                                                        draw curves, bases, other ways and shots

`warpi fewshot fit --help` shows the flags; with --learner NAME, those of that learner.
"""


def fewshot(argv: list[str]) -> None:
    """Run one of the three commands."""
    if not argv or argv[0] in ("-h", "--help", "help"):
        print(USAGE, end="")
        return
    if argv[0] not in _COMMANDS:
        raise unknown("command of warpi fewshot", argv[0], _COMMANDS)
    try:
        _COMMANDS[argv[0]](argv[1:])
    except (MemoryError, RuntimeError) as e:
        if "memory" not in str(e):
            raise
        raise UserError(f"out of memory: {str(e).splitlines()[0]}; lower --tasks, --ways or --queries") from e


def fit(argv: list[str]) -> None:
    from warpi.fewshot.datasets import FEWSHOT
    from warpi.fewshot.learners.registry import LEARNERS
    from warpi.fewshot.run import fit as run_fit
    from warpi.fewshot.spec import DEFAULTS, fewshot_folder
    from warpi.fewshot.train import Training
    from warpi.utils.devices import Stopped

    first = Parser(prog="warpi fewshot fit", add_help=False)
    first.add_argument("--learner", default=None)
    first.add_argument("--data", default="sines")
    first.add_argument("--out", type=Path, default=None)
    first.add_argument("--resume", action="store_true")
    peek, _ = first.parse_known_args([a for a in argv if a not in ("-h", "--help")])
    stored = fewshot_folder(peek.out).read_spec() if peek.resume and peek.out is not None else None
    data = stored["spec"].get("data") if stored else peek.data
    defaults = DEFAULTS[data if data in DEFAULTS else "sines"]
    name = peek.learner or (stored["spec"]["learner"] if stored else defaults["learner"])
    if name not in LEARNERS:
        raise unknown("learner", name, LEARNERS)

    about = "Train a learner on tasks of a data set and write a run folder. Learners: " + ", ".join(LEARNERS)
    parser = Parser("warpi fewshot fit", about)
    parser.start_group("run")
    parser.add("--out DIR", "run folder to write or resume", Path, required=True)
    parser.add("--data NAME", f"data set: {', '.join(FEWSHOT)} (default: sines)")
    parser.add("--root DIR", "folder with the files of the data set (default: the variable WARPI_DATA)")
    parser.add("--learner NAME", f"learner to train (default: depends on the data, here {name})")
    parser.add("--ways N", "classes per task (default: 5 for images)", int)
    parser.add("--shots N", f"support examples per class, or per regression task (default: {defaults['shots']})", int)
    parser.add("--resume", "resume the interrupted run in DIR")
    parser.add("--device auto|cpu|cuda", "device to train on", default="auto")
    parser.add("--threads N", "number of CPU threads; it can change the last digits of results", int)
    parser.add("--checkpoint-seconds X", "seconds between checkpoints", float, 300.0)
    parser.add("--quiet", "print errors only")
    training = Training(**{f.name: defaults[f.name] for f in fields(Training) if f.name in defaults})
    add_fields(parser, f"training (defaults for {data})", training)
    add_fields(parser, f"learner {name}", LEARNERS[name])
    given = parser.read(argv)
    settings = {k: v for k, v in given.items() if v is not None}
    try:
        run = run_fit(**settings)
    except Stopped as e:
        say(f"warpi: {e}", error=True)
        raise SystemExit(128 + e.signum) from e
    if not given["quiet"]:
        best = (min if run.data.regression else max)(record["val_mean"] for record in run.history)
        what = "mean squared error" if run.data.regression else "accuracy"
        say(f"{run.spec.label()}: best validation {what} {best:.4g}; run folder {run.path}")


def evaluate(argv: list[str]) -> None:
    about = "Evaluate runs on the same new tasks. For several runs, also print their differences to the first one."
    parser = Parser("warpi fewshot evaluate", about)
    parser.add_argument("runs", nargs="+", type=Path, metavar="DIR", help="run folders written by warpi fewshot fit")
    parser.add("--tasks N", "number of tasks (default: 1000)", int, 1000)
    parser.add("--ways N,...", "classes per task, if other than in training", _numbers)
    parser.add("--shots N,...", "support examples per class, if other than in training", _numbers)
    parser.add("--queries N", "queries per class (default: as in training; sines: 50)", int)
    parser.add("--part test|val|train", "part of the data (default: test)", default="test")
    parser.add("--weights best|last", "weights of the best validation (default), or the last ones", default="best")
    parser.add("--episodes-seed N", "seed of the tasks (default: 0)", int, 0)
    parser.add("--json FILE", "also write the rows as JSON", Path)
    _add_where(parser)
    given = parser.read(argv)
    _check(given, weights=("best", "last"), part=("test", "val", "train"))
    if given["tasks"] < 1:
        raise UserError(f"--tasks must be at least 1, got {given['tasks']}")
    from warpi.fewshot.compare import judged
    from warpi.fewshot.evaluate import paired
    from warpi.fewshot.run import load

    rows: list[dict[str, Any]] = []
    firsts: dict[tuple[Any, ...], list[float]] = {}  # scores of the first run, by data and kind of task
    for path in given["runs"]:
        run = load(path, device=given["device"], weights=given["weights"], root=given["root"])
        for ways in given["ways"] or [None]:
            for shots in given["shots"] or [None]:
                row = judged(
                    run,
                    given["tasks"],
                    ways=ways,
                    shots=shots,
                    queries=given["queries"],
                    part=given["part"],
                    seed=given["episodes_seed"],
                    facts={"weights": given["weights"], "folder": str(path)},
                    by_task=True,
                )
                scores = row.pop("scores")
                first = firsts.setdefault((run.data_sha256, *(row[k] for k in ("ways", "shots", "queries"))), scores)
                none = {"difference": None, "difference_ci95": None}
                rows.append(row | (none if first is scores else paired(scores, first)))
                _write_rows(given["json"], rows)
    _print(rows)


def plot(argv: list[str]) -> None:
    parser = Parser("warpi fewshot plot", "Draw figures of runs.")
    parser.add_argument("runs", nargs="+", type=Path, metavar="DIR", help="run folders; or a .json file of rows")
    parser.add("--out FILE", "the figure to write (.png or .svg)", Path, required=True)
    parser.add(
        "--kind curves|bases|versatility",
        "curves: example sines, one column per run; bases: score against the number of bases; versatility: other "
        "ways and shots (default: chosen by the runs)",
        default="auto",
    )
    parser.add("--examples N", "tasks in `curves` (default: 3)", int, 3)
    parser.add("--tasks N", "number of tasks per point (default: 600)", int, 600)
    parser.add("--ways N,...", "ways in `versatility`", _numbers, (5, 10, 20, 50, 100))
    parser.add("--shots N,...", "shots to test", _numbers, (1, 5, 10))
    parser.add("--episodes-seed N", "seed of the tasks (default: 0)", int, 0)
    parser.add("--json FILE", "also write the values of the figure as JSON", Path)
    _add_where(parser)
    given = parser.read(argv)
    _check(given, kind=("auto", "curves", "bases", "versatility"))
    for name in ("examples", "tasks"):
        if given[name] < 1:
            raise UserError(f"--{name} must be at least 1, got {given[name]}")
    from warpi.fewshot import plot as draw
    from warpi.fewshot.compare import examples, judged, other_kinds
    from warpi.fewshot.run import load
    from warpi.report.plot_style import image_format

    picture = image_format(given["out"])
    rows = [row for path in given["runs"] if path.suffix == ".json" for row in _read_rows(path)]
    runs = [load(p, device=given["device"], root=given["root"]) for p in given["runs"] if p.suffix != ".json"]
    kind = _choose_kind(runs, rows) if given["kind"] == "auto" else given["kind"]
    if kind == "curves" and rows:
        raise UserError("curves need run folders; omit the .json files")
    for run in runs if kind != "curves" else ():
        same = [(None, None, None)]
        for ways, shots, queries in same if kind == "bases" else other_kinds(run, given["ways"], given["shots"]):
            seed = given["episodes_seed"]
            rows.append(judged(run, given["tasks"], ways=ways, shots=shots, queries=queries, seed=seed))
            _write_rows(given["json"], rows)
    if kind == "curves":
        tasks = examples(runs, given["examples"], given["episodes_seed"])
        content = draw.plot_curves(tasks, picture)
        rows = [curve.row(i % given["examples"]) for i, line in enumerate(tasks) for curve in line]
    else:
        content = {"bases": draw.plot_bases, "versatility": draw.plot_versatility}[kind](rows, picture)
    write_atomically(given["out"], content)
    say(given["out"])
    _write_rows(given["json"], rows)


def _choose_kind(runs: Sequence["Run"], rows: Sequence[dict[str, Any]]) -> str:
    """The kind of figure that the runs and rows allow."""
    from warpi.fewshot.compare import bases

    if not rows and any(run.data.regression for run in runs):
        return "curves"
    if any((r["ways"], r["shots"]) != (r.get("task_ways", r["train_ways"]), r["train_shots"]) for r in rows):
        return "versatility" if all(row["ways"] for row in rows) else "bases"
    numbers = {bases(run.learner) for run in runs} | {row.get("bases") for row in rows}
    several = len(numbers - {None}) > 1
    return "bases" if several or not all(row["ways"] for row in rows) else "versatility"


def _add_where(parser: Parser) -> None:
    parser.add("--root DIR", "folder with the files of the data set, if moved since training", Path)
    parser.add("--device auto|cpu|cuda", "device to compute on", default="auto")


def _check(given: dict[str, Any], **allowed: Sequence[str]) -> None:
    for name, names in allowed.items():
        if given[name] not in names:
            raise unknown(name, given[name], names)


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))


def _write_rows(path: Path | None, rows: list[dict[str, Any]]) -> None:
    if path is not None:
        write_json(path, rows)


def _read_rows(path: Path) -> list[dict[str, Any]]:
    from warpi.datasets.delimited_files import reading
    from warpi.utils.files import read_json

    advice = "write it with `warpi fewshot evaluate --json`"
    with reading(path):
        rows: list[dict[str, Any]] = read_json(path, advice)
    if not isinstance(rows, list) or not rows or not all(isinstance(row, dict) for row in rows):
        raise UserError(f"{path} contains no rows; {advice}")
    for i, row in enumerate(rows, 1):
        missing = [name for name in _NEEDED if name not in row]
        missing += [name for name in _NUMBERS if not isinstance(row.get(name), int | float)]
        if missing:
            raise UserError(f"row {i} of {path} has no {missing[0]!r}; {advice}")
    return rows


def _print(rows: Sequence[dict[str, Any]]) -> None:
    from rich import box
    from rich.table import Table

    from warpi.fewshot.episodes import task_name
    from warpi.fewshot.plot import distinguish
    from warpi.report.table import screen

    tasks = ("label", "data", "ways", "shots")
    name = distinguish(rows, lambda r: str(r["label"]), lambda r: tuple(r[k] for k in tasks), also=("bases", "seed"))
    lines: list[tuple[str, ...]] = [("learner", "data", "task", "", "mean", "median", "minus first")]
    for row in rows:
        unit, digits = (" %", 2) if row["metric"] == "accuracy" else ("", 4)
        gap = row.get("difference")
        lines.append(
            (
                name(row),
                row["data"],
                task_name(row["ways"], row["shots"]),
                "transd." if row["transductive"] else "inductive",
                f"{row['mean']:.{digits}f}{_spread(row['ci95'], digits)}{unit}",
                f"{row['median']:.{digits}f}",
                "" if gap is None else f"{gap:+.{digits}f}{_spread(row['difference_ci95'], digits)}",
            )
        )
    if not any(line[-1] for line in lines[1:]):
        lines = [line[:-1] for line in lines]
    console = screen()
    widths = [max(map(len, column)) + 2 for column in zip(*lines, strict=True)]
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0))
    for i, head in enumerate(lines[0]):
        max_width = None if i else max(12, console.width - sum(widths[1:]))  # fold names first, then kinds of tasks
        justify: Any = "right" if i > 3 else "left"
        table.add_column(head, justify=justify, overflow="fold", max_width=max_width, no_wrap=i not in (0, 2))
    for line in lines[1:]:
        table.add_row(*map(cell, line))
    console.print(table)


def _spread(ci95: float | None, digits: int) -> str:
    return "" if ci95 is None else f" ± {ci95:.{digits}f}"  # no interval for a single task


_COMMANDS: dict[str, Callable[[list[str]], None]] = {"fit": fit, "evaluate": evaluate, "plot": plot}
