"""The command line. Heavy imports wait for their command."""

import json
import os
import sys
from argparse import SUPPRESS
from collections.abc import Callable
from dataclasses import asdict
from importlib import import_module, resources
from pathlib import Path
from typing import Any

import warpi
from warpi.errors import UserError, unknown
from warpi.utils.flags import Parser, add_fields

USAGE = """usage: warpi COMMAND ...
       warpi --use FILE.py COMMAND ...

Learn from data whose labels are partly wrong, when a few hundred examples can be trusted.

commands:
  fit       train a classifier that is not fooled, and leave a run folder behind
  predict   the classes of new rows, by the classifier of a run
  sweep     many runs from one file, several at a time
  report    one page about a run, or a comparison of many
  figures   the paper's figures from runs
  audit     which labels of a run's data are probably wrong
  pick      which examples to have checked by a person first
  review    a page in the browser where a person decides
  fewshot   few-shot learning: MetaVRF and its peers
  bench     what a training step costs on this machine, and in other libraries
  corrupt   write label noise to a file that others can use
  list      methods, datasets, noises, nets or few-shot learners

`warpi COMMAND --help` shows the flags of a command. With `--use FILE.py` a command knows the methods and networks of a
file of your own by name: METHODS = {"mine": Mine()}, NETS = {"tiny": build}.
"""


def fit(argv: list[str]) -> None:
    from warpi.runs import plugins as own
    from warpi.runs.run import Stopped, pick_device
    from warpi.runs.run import fit as run_fit
    from warpi.utils import distributed as parallel

    first = Parser(prog="warpi fit", add_help=False)
    first.add_argument("--device", default="auto")
    first.add_argument("--devices", type=int, default=1)
    peek, _ = first.parse_known_args([a for a in argv if a not in ("-h", "--help")])
    where = pick_device(peek.device)
    if not parallel.launched():
        parallel.check_devices(peek.devices, where)
        if peek.devices > 1:
            _, given = _fit_flags(argv)  # mistakes are said once, before anything is started
            raise SystemExit(parallel.launch(peek.devices, [*own.flags(), "fit", *argv], given["out"]))
    try:
        with parallel.joined(where):
            with parallel.together():
                name, given = _fit_flags(argv)
                parallel.check_started(given.pop("devices"))
            done = run_fit(**given)
            is_first = parallel.rank() == 0
    except Stopped as e:
        if e.rank == 0:
            print(f"warpi: {e}", file=sys.stderr)
        raise SystemExit(128 + e.signum) from e
    except parallel.Elsewhere as e:
        raise SystemExit(2) from e
    except parallel.Lost as e:
        parallel.give_up(e)
    except (MemoryError, RuntimeError) as e:
        if "memory" not in str(e):
            raise
        raise UserError(f"out of memory: {str(e).splitlines()[0]}; lower --batch-size and --meta-batch-size") from e
    if is_first and not given["quiet"]:
        last = done.history[-1]
        against = "" if done.truth.test_is_clean else " against the given labels, which may be wrong themselves"
        score = (
            f"test accuracy {last['test_acc']:.2f} %{against}" if last.get("test_acc") is not None else "no test set"
        )
        print(f"{name} after {len(done.history)} epochs: {score}; run folder {done.path}")


def _fit_flags(argv: list[str]) -> tuple[str, dict[str, Any]]:
    """The name of the method, which has flags of its own, and everything that was set."""
    from warpi.datasets.load import SUITED
    from warpi.methods.registry import METHODS, of_others
    from warpi.runs.resume import check_own, read_spec
    from warpi.runs.spec import DataSpec
    from warpi.training.recipe import Recipe
    from warpi.utils import distributed as parallel

    first = Parser(prog="warpi fit", add_help=False)
    first.add_argument("--method", default=None)
    first.add_argument("--out", type=Path, default=None)
    first.add_argument("--resume", action="store_true")
    peek, _ = first.parse_known_args([a for a in argv if a not in ("-h", "--help")])
    stored = None
    if peek.resume and peek.out is not None:
        stored = json.loads(parallel.from_first(lambda: json.dumps(read_spec(peek.out)).encode()))
    name = peek.method or (stored["spec"]["method"] if stored else "warpi")
    if stored and peek.method is None:
        check_own(peek.out, name, None)
    if name not in METHODS:
        raise unknown("method", name, METHODS)

    def explain(flag: str) -> UserError | None:
        field = flag.removeprefix("--").replace("-", "_")
        return of_others(f"flag {flag!r}", name, field, field.removeprefix("no_"))

    parser = Parser(
        prog="warpi fit",
        description="Train a method on data with noisy labels and write a run folder.",
        explain=explain,
    )
    run = parser.add_argument_group("run")
    run.add_argument("--out", type=Path, required=True, metavar="DIR", help="the run folder")
    run.add_argument("--method", metavar="NAME", help="a name of `warpi list methods` (default: warpi)")
    run.add_argument("--resume", action="store_true", help="go on where the run in DIR was interrupted")
    run.add_argument("--device", default="auto", metavar="auto|cpu|cuda", help="where to train")
    run.add_argument("--devices", type=int, metavar="N", help="processes that share each batch, one a GPU (default: 1)")
    run.add_argument("--threads", type=int, default=None, metavar="N", help="CPU threads; results depend on them")
    run.add_argument("--checkpoint-seconds", type=float, default=300.0, metavar="X", help="time between checkpoints")
    run.add_argument("--tensorboard", action="store_true", help="also write DIR/tensorboard")
    run.add_argument("--quiet", action="store_true", help="print nothing but errors")
    add_fields(parser, "data", DataSpec)
    add_fields(parser, "training", Recipe, suited=SUITED)
    prefix = type(METHODS[name]).__name__ + "."
    own = {setting.removeprefix(prefix) for setting in SUITED if setting.startswith(prefix)}
    add_fields(parser, f"method {name}", METHODS[name], suited=own)
    return name, parser.read(argv)


def sweep(argv: list[str]) -> None:
    parser = Parser(prog="warpi sweep", description="Do what is left of the runs of a file; compare them all.")
    parser.add_argument("file", type=Path, metavar="FILE", help="the runs, as TOML; see docs/sweep.md")
    parser.add_argument("--out", type=Path, metavar="DIR", help="the folder of the run folders (default: as FILE says)")
    parser.add_argument("--device", default="auto", metavar="auto|cpu|cuda:0,cuda:1", help="where to train")
    parser.add_argument("--per-gpu", default="auto", metavar="auto|N", help="runs at once on a GPU; auto: what pays")
    parser.add_argument(
        "--jobs", type=int, metavar="N", help="processes a device (default: on a CPU one a core, at most 8)"
    )
    parser.add_argument("--root", type=Path, metavar="DIR", help="folder of the data set's files")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="overrule a setting of FILE")
    parser.add_argument("--dry-run", action="store_true", help="print what is done and what is missing")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the table's rows as JSON")
    parser.add_argument("--worker", help=SUPPRESS)
    given = parser.read(argv)
    if given["dry_run"] and given["json"]:
        raise UserError("--dry-run makes no table; leave out --json, or use warpi report")
    from warpi.sweep import runner as sweeps

    plan = sweeps.read_plan(given["file"], given["out"], given["root"], given["set"])
    if given["dry_run"]:
        sweeps.dry_run(plan)
        return
    means = sweeps.means(given["device"], given["per_gpu"], given["jobs"])
    if given["worker"]:
        code = sweeps.serve(plan, means, given["worker"])
    else:
        code = sweeps.sweep(plan, means, argv, given["json"])
    if code:
        raise SystemExit(code)


def report(argv: list[str]) -> None:
    from warpi.report.experiments import find_runs
    from warpi.report.page_data import Detail
    from warpi.report.paired import compare
    from warpi.report.table import screen, to_rich
    from warpi.report.write import write_report

    parser = Parser(prog="warpi report", description="Show one run, or compare many: a table, and with --out a page.")
    parser.add_argument("runs", nargs="+", type=Path, metavar="DIR", help="run folders, or folders of run folders")
    parser.add_argument("--against", metavar="NAME", help="a method or label: differences to it, paired by seed")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the table's rows as JSON")
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help="write report.html (one file), .md, .tex and curves as PNG and SVG"
    )
    parser.add_argument("--audit", action="store_true", help="audit runs that are not, for their suspicious labels")
    parser.add_argument("--device", default="auto", metavar="auto|cpu|cuda", help="where to audit and to measure")
    given = parser.read(argv)
    if given["audit"] and not given["out"]:
        raise UserError("--audit is for the page; name its folder with --out DIR, or run warpi audit")
    broken, found = list[UserError](), list[Detail]()
    if not (runs := find_runs(given["runs"], broken)):
        raise UserError("; ".join(map(str, broken)))
    for error in broken:
        print(f"warpi: left out: {' '.join(str(error).split())}", file=sys.stderr)
    if given["against"] is not None:  # a wrong name is said before anything is computed
        compare(runs, given["against"])
    if given["out"]:
        from warpi.report.page_details import details

        found = details(runs, given["audit"], given["device"])
    rows = write_report(runs, given["out"], given["json"], found, given["against"])
    console = screen()
    console.print(to_rich(rows))
    if given["out"]:
        console.print(f"report: {given['out'] / 'report.html'}", markup=False, emoji=False, soft_wrap=True)
    if broken:
        raise SystemExit(1)


def bench(argv: list[str]) -> None:
    from rich.console import Console

    from warpi.bench.measure import VARIANTS, Bench, Left
    from warpi.bench.measure import bench as run_bench
    from warpi.bench.table import picture_kind, plot, to_rich
    from warpi.utils.files import write_atomically

    parser = Parser(
        prog="warpi bench", description="Time and memory of a training step, and how exact its meta gradient is."
    )
    parser.add_argument("what", metavar="meta-step")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows as JSON, each as soon as it is known")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="write a picture (.png or .svg)")
    add_fields(parser, "what is measured", Bench)
    parser.epilog = "variants: " + ", ".join(VARIANTS)
    given = parser.read(argv)
    if (what := given.pop("what")) != "meta-step":
        raise unknown("benchmark", what, ["meta-step"])
    out, picture, rows, console = given.pop("json"), given.pop("plot"), list[dict[str, Any]](), Console(highlight=False)
    spec, kind = Bench(**given), picture_kind(picture) if picture else ""
    for path in (out, picture):  # before minutes are spent
        if path and not path.parent.is_dir():
            raise UserError(f"there is no folder {str(path.parent)!r} to write {path.name} into; make it first")
    for row in run_bench(spec):
        if isinstance(row, Left):
            print(f"warpi: {row.variant} is left out: {row.why}", file=sys.stderr)
            continue
        rows.append(row)
        if out:
            write_atomically(out, (json.dumps(rows, indent=1) + "\n").encode())
    console.print(to_rich(rows))
    if picture:
        write_atomically(picture, plot(rows, kind))


def corrupt(argv: list[str]) -> None:
    from warpi.datasets.load import load_dataset
    from warpi.noise.noise import Noise
    from warpi.noise.noise_file import labels_hash, write_manifest
    from warpi.runs.spec import NOT_READ, DataSpec
    from warpi.utils.seeding import generator

    parser = Parser(
        prog="warpi corrupt", description="Draw label noise and write it to a file, for `--noise given:FILE`."
    )
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="the manifest to write (.json)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="the same as `warpi fit --seed` would draw")
    add_fields(parser, "data", DataSpec, NOT_READ)
    given = parser.read(argv)
    out, seed = given.pop("out"), given.pop("seed")
    spec = DataSpec(**given)
    root = Path(spec.root) if spec.root else None
    dataset, _ = spec.read()
    noise = Noise.parse(spec.noise)
    other = load_dataset(noise.other_name, root=root, image_size=spec.image_size)[0] if noise.other_name else None
    labels = noise.apply(dataset, generator(seed, "noise"), other)
    write_manifest(out, data=dataset, noise=str(noise), seed=seed, labels=labels)
    hit = labels.y != dataset.y if labels.replaced is None else labels.replaced >= 0
    wrong, digest = float(hit.double().mean()), labels_hash(labels.y, labels.replaced)
    print(f"{out}: {len(labels.y)} labels of {dataset.name}, {100 * wrong:.2f} % changed, sha256 {digest}")


def list_names(argv: list[str]) -> None:
    parser = Parser(prog="warpi list", description="What there is, by name.")
    parser.add_argument("what", metavar="methods|datasets|noises|nets|learners")
    parser.add_argument("--json", action="store_true", help="as JSON on standard output")
    given = parser.read(argv)
    if given["what"] not in _TABLES:
        raise unknown("list", given["what"], _TABLES)
    rows = _TABLES[given["what"]]()
    if given["json"]:
        print(json.dumps(rows, indent=1))
        return
    from shutil import get_terminal_size

    from warpi.report.table import in_columns

    shown = [name for name in rows[0] if name not in ("options", "docs") or given["what"] == "noises"]
    width = get_terminal_size().columns if sys.stdout.isatty() else None
    print(in_columns([{name: _cell(row[name]) for name in shown} for row in rows], width))
    if given["what"] == "methods":
        print("Cost: the time of an epoch relative to that of ce, on digits and one CPU thread (recipes/digits.toml).")
        print("The page of each: docs/methods/NAME.md")


def _methods() -> list[dict[str, Any]]:
    from warpi.methods.registry import METHODS
    from warpi.runs.plugins import METHOD_FILES, family
    from warpi.training.method import Method

    def needs(method: Method) -> list[str]:
        wants = {"trusted data": method.needs_meta, "noise rate": method.needs_noise_rate}
        wants[f"{method.n_nets} networks"] = method.n_nets > 1
        return [name for name, wanted in wants.items() if wanted]

    costs = json.loads((resources.files("warpi.methods") / "costs.json").read_text())  # benchmarks/digits_page.py
    return [
        {
            "name": name,
            "family": family(name),
            "year": m.year,
            "needs": needs(m),
            "cost": costs.get(name),  # relative to plain training
            "summary": _summary(m, type(m).__doc__),
            "options": asdict(m),
            "docs": METHOD_FILES.get(name) or f"docs/methods/{name}.md",
        }
        for name, m in METHODS.items()
    ]


def _datasets() -> list[dict[str, Any]]:
    from warpi.datasets.load import DATASETS

    own = {
        "name": "PATH",
        "summary": "your own: .npz .npy .csv .tsv .parquet, image folder, manifest (csv with a path column)",
    }
    return [{"name": name, "summary": e.summary} for name, e in DATASETS.items()] + [own]


def _noises() -> list[dict[str, Any]]:
    from warpi.noise.noise import NOISES

    return [{"name": name, "summary": e.summary, "options": dict(e.options)} for name, e in NOISES.items()]


def _nets() -> list[dict[str, Any]]:
    from warpi.nets.registry import NETS

    return [{"name": name, "summary": e.summary} for name, e in NETS.items()]


def _learners() -> list[dict[str, Any]]:
    from warpi.fewshot.learners.registry import LEARNERS

    docs = {name: sys.modules[type(m).__module__].__doc__ for name, m in LEARNERS.items()}
    return [
        {"name": name, "year": m.year, "for": list(m.solves), "summary": _summary(m, docs[name]), "options": asdict(m)}
        for name, m in LEARNERS.items()
    ]


def _summary(entry: Any, docs: str | None) -> str:
    """The first line of its documentation, and how it differs from others of its class."""
    changed = [f"{k}={v}" for k, v in asdict(entry).items() if v != getattr(type(entry)(), k)]
    first, *_ = (docs or "").strip().splitlines() or [""]
    return first + (f" Here {', '.join(changed)}." if changed else "")


def _cell(value: object) -> str:
    if value is None:
        return ""
    if isinstance(value, list):
        return ", ".join(value)
    if isinstance(value, dict):
        return ", ".join(f"{k}={v}" for k, v in value.items())
    return str(value)


_TABLES: dict[str, Callable[[], list[dict[str, Any]]]] = {
    "methods": _methods,
    "datasets": _datasets,
    "noises": _noises,
    "nets": _nets,
    "learners": _learners,
}
COMMANDS: dict[str, Callable[[list[str]], None]] = {
    "fit": fit,
    "sweep": sweep,
    "report": report,
    "bench": bench,
    "corrupt": corrupt,
    "list": list_names,
}
# Commands that live with what they command.
LATER = {
    "figures": "warpi.cli.figures:figures",
    "audit": "warpi.cli.audit:audit",
    "pick": "warpi.cli.audit:pick",
    "review": "warpi.cli.review:review",
    "fewshot": "warpi.cli.fewshot:fewshot",
    "predict": "warpi.runs.predictions:command",
}


def _command(name: str) -> Callable[[list[str]], None]:
    if name in COMMANDS:
        return COMMANDS[name]
    if name not in LATER:
        raise unknown("command", name, [*COMMANDS, *LATER])
    module, function = LATER[name].split(":")
    command: Callable[[list[str]], None] = getattr(import_module(module), function)
    return command


def _run(argv: list[str]) -> None:
    if not argv or argv[0] in ("-h", "--help", "help"):
        print(USAGE, end="")
    elif argv[0] == "--version":
        print(f"warpi {warpi.__version__}")
    elif argv[0].partition("=")[0] == "--use":
        from warpi.runs.plugins import run_with

        run_with(argv, _run)
    elif any(word.partition("=")[0] == "--use" for word in argv):
        raise UserError(f"--use FILE.py goes before the command: warpi --use FILE.py {argv[0]} ...")
    else:
        _command(argv[0])(argv[1:])


def main(argv: list[str] | None = None) -> int:
    """Run a command; a user's mistake is one line on standard error and exit code 2."""
    try:
        _run(sys.argv[1:] if argv is None else argv)
    except UserError as e:
        print(f"warpi: {' '.join(str(e).split())}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # the reader of our output has gone, as in `warpi list methods | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except KeyboardInterrupt:
        print("warpi: interrupted", file=sys.stderr)
        return 130
    return 0
