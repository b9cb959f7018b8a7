"""`warpi fit` and `warpi compare`. torch is imported only when a command runs."""

import argparse
import json
import os
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from warpi.cli.data_flags import add_data_flags, add_old_switch, read_names, warn_deprecated
from warpi.errors import UserError, format_count, unknown
from warpi.utils.files import unused_name
from warpi.utils.flags import Parser, add_fields
from warpi.utils.terminal import cell, say

if TYPE_CHECKING:
    import torch

    from warpi.runs.run import Run
    from warpi.training.method import Method

_SHOWN = 8  # candidates in the table at the end
WITHOUT_TRUSTED = (
    "without trusted rows, the accuracy is unknown, and mistakes that follow a pattern look like right labels; check "
    "five rows per class with `warpi pick` and `warpi review`: on nine tables with 40 % of the labels of each class "
    "changed to one other class, this raised the accuracy from 74 to 83 %"
)
HELP = """usage: warpi fit --data DATA [--trusted FILE] --out DIR [flags]

Train a classifier that is robust to wrong labels, and write a run folder.

data:
  --data DATA           .csv, .tsv, .parquet, .npz, .npy, image folder, hf:FOLDER, or a name from `warpi list datasets`
  --label COLUMN        column with the labels (default: label)
  --drop A,B,...        columns of a table that are not features, such as an id
  --trusted FILE        second file or folder, with examples whose labels were checked; rows of DATA or others
  --labels FILE         replace the labels by those in a .json file written by `warpi review`

training:
  --method NAME         name from `warpi list methods` (default: auto; a network for images on a GPU and for more than a
                        million rows in a .npy file)
  --recipe NAME         strong or paper: set many training flags at once; strong is the default for images of up to 64
                        pixels on a GPU
  --model NAME          forest, boosting, logistic, kernel or knn: kind of model that auto uses (default: several
                        kinds)
  --budget TIME         time that auto may spend comparing models, such as 60s or 5m (default: no limit)
  --net NAME            network from `warpi list nets` (default: depends on the data)
  --epochs N            number of passes over the data (default: depends on the data)
  --seed N              random seed (default: 0)
  --device NAME         auto, cpu or cuda: the device to train on (default: auto)

run folder:
  --out DIR             where to write the run
  --resume              continue the interrupted run in DIR

benchmarks with known labels:
  --noise KIND:RATE     label noise to add, from `warpi list noises`
  --meta N              number of trusted (*meta*) examples to hold out from the data

`warpi fit --help-all` shows all flags; with `--method NAME` also the settings of that method.
"""


def fit(argv: list[str]) -> None:
    if "-h" in argv or "--help" in argv:  # instantly: the full help needs torch
        print(HELP, end="")
        return
    from warpi.runs.run import fit as run_fit
    from warpi.utils import distributed
    from warpi.utils.devices import Stopped, pick_device

    first = _first_flags(argv)
    by_srun = first.devices != 1 and first.nodes is None and distributed.use_srun()
    device = pick_device(first.device)
    if not distributed.is_launched() and "--help-all" not in argv and _start_ranks(argv, first, device):
        return
    try:
        with distributed.process_group(device):
            restarts = distributed.agree(None, int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")))[0]
            first.resume = first.resume or restarts > 0
            with distributed.raise_on_all_ranks():
                given = _all_flags(argv, first)
                distributed.check_started(given["devices"])
            if by_srun:
                distributed.check_same(str(first.out).encode(), "--out (for separate runs, add --devices 1)")
            run = run_fit(**{name: given[name] for name in given if name not in ("devices", "nodes", "restarts")})
            is_first = distributed.rank() == 0
    except Stopped as e:
        if e.rank == 0:
            say(f"warpi: {e}", error=True)
        raise SystemExit(128 + e.signum) from e
    except distributed.RemoteRankError as e:
        raise SystemExit(2) from e
    except distributed.RankLostError as e:
        distributed.give_up(e)
    except (MemoryError, RuntimeError) as e:
        if "memory" not in str(e):
            raise
        raise UserError(f"out of memory: {str(e).splitlines()[0]}; lower --batch-size and --meta-batch-size") from e
    if is_first and not given["quiet"]:
        _print_result(run)


def _start_ranks(argv: list[str], first: argparse.Namespace, device: "torch.device") -> bool:
    """Start the processes that --devices asks for, and exit with their code; or print how to start them on --nodes."""
    from warpi.runs import plugins
    from warpi.utils import distributed

    devices = 1 if first.devices is None else first.devices
    nodes = 1 if first.nodes is None else first.nodes
    if nodes < 1:
        raise UserError(f"--nodes must be at least 1, got {nodes}")
    if nodes == 1 or devices < 1:  # other machines may have more GPUs
        distributed.check_devices(devices, device)
    if devices * nodes == 1:
        return False
    given = _all_flags(argv, first)  # report errors once, before processes are started
    command = [*plugins.flags(), "fit", *argv]
    restarts = given["restarts"]
    if restarts < 0:
        raise UserError(f"--restarts must be at least 0, got {restarts}")
    if nodes == 1:
        raise SystemExit(distributed.launch(devices, command, given["out"], restarts))
    command = [*plugins.flags(), "fit", *_without(argv, ("--devices", "--nodes", "--restarts"))]
    print(distributed.describe_nodes(nodes, devices, command, restarts))
    return True


def _without(argv: Sequence[str], flags: Sequence[str]) -> list[str]:
    """The arguments without some flags and their values."""
    left = [word for word in argv if word.partition("=")[0] not in flags or "=" not in word]
    positions = [i for i, word in enumerate(left) if word in flags]
    return [word for i, word in enumerate(left) if i not in positions and i - 1 not in positions]


def _print_result(run: "Run") -> None:
    """Print the best candidates, the accuracy on trusted rows, and then the accuracy on test rows."""
    from warpi.runs.defaults import resolve_method
    from warpi.training.progress import describe_trusted_accuracy

    last = run.history[-1]
    name, _ = resolve_method(run.method)
    done = f"{name} after {format_count(len(run.history), 'epoch')}"
    choice = run.method.choice()
    if choice:
        _print_candidates(choice)
        done = f"{name}: {getattr(run.method, 'reason', '')}"
    score = "no test set"
    if last.get("test_acc") is not None:
        against = "" if run.truth.test_is_clean else " against the given labels, some of which may be wrong"
        score = f"test accuracy {last['test_acc']:.2f} %{against}"
    trusted = describe_trusted_accuracy(last, len(run.task.meta or ()))
    if not choice:
        say(f"{done}: {score}; run folder {run.path}")
        _print_next(run)
        return
    say(f"{done}; run folder {run.path}")
    if trusted:
        say(trusted)
    if "test_acc" in last:
        say(score)
    say(_describe_noise(run.method, run.task.meta is None))
    if run.task.meta is None:
        say(f"warpi: {WITHOUT_TRUSTED}", error=True)
    elif not trusted:
        why = "the budget left no time" if len(run.task.meta) > 1 else "one trusted row is too few"
        say(f"warpi: {why} to measure the accuracy on trusted rows", error=True)
    _print_next(run)


def _print_next(run: "Run") -> None:
    """Print the next command, if the true labels are unknown."""
    if run.truth.clean is None:
        path = shlex.quote(str(run.path))
        audit, predicted = unused_name("audit.csv"), unused_name("predicted.csv")
        say(f"next: warpi audit {path} --csv {audit}, or warpi predict {path} --data NEW --csv {predicted}")


def compare(argv: list[str]) -> None:
    parser = Parser(
        "warpi compare",
        "Compare the candidates of `auto`, and other methods, on trusted rows that they have not seen. The table is "
        "stored as choice.json in a run folder, whose model is the mixture that auto chose.",
    )
    parser.add_argument("run", type=Path, nargs="?", metavar="RUN", help="a finished run of auto; or give --data")
    parser.add("--methods A,B,...", "also train these methods (`warpi list methods`)")
    parser.add("--folds K", "trainings of each method, each without some trusted rows (default: 3)", int, 3)
    parser.add("--budget TIME", "time for auto, and the same for the methods, such as 60s or 5m (default: no limit)")
    parser.add("--out DIR", "run folder to write, with --data", Path)
    parser.add("--seed N", "random seed of a new run", int, 0)
    parser.add("--device auto|cpu|cuda", "device to train on", default="auto")
    add_data_flags(parser, "data without a run", has_default=False)
    given = parser.read(argv)
    from warpi.audit.compare import compare as compare_methods
    from warpi.methods.auto import parse_seconds
    from warpi.runs.reopen import reopen
    from warpi.runs.run import fit as run_fit
    from warpi.runs.schema import to_written_names

    not_data = ("run", "methods", "folds", "budget", "out", "seed", "device")
    data = to_written_names({name: value for name, value in given.items() if name not in not_data})
    if (given["run"] is None) == ("data" not in data) or (given["run"] is None) != (given["out"] is not None):
        raise UserError("pass either a run folder, or --data and --out for a new run; see warpi compare --help")
    budget = parse_seconds(given["budget"])
    if given["run"] is not None:
        run = reopen(given["run"], given["device"])
    else:
        options = {name: given[name] for name in ("seed", "device")}
        run = run_fit(given["out"], method="auto", budget=budget, quiet=False, **options, **data)
    entries = compare_methods(
        run,
        read_names(given["methods"]),
        folds=given["folds"],
        budget=budget,
        say=lambda text: say(f"warpi: {text}", error=True),
    )
    _print_candidates(entries, len(entries))
    say(f"auto: {getattr(run.method, 'reason', '')}")
    say(f"{run.path}/choice.json: {len(entries)} candidates")


def _describe_noise(method: "Method", unchecked: bool) -> str:
    from warpi.audit.result import MODEL_BASED, UNCHECKED

    measured: list[float] | None = getattr(method, "noise_rate", None)
    if measured is None:
        percent = 100 * getattr(method, "noise_rate_point", 0)
        return f"about {percent:.1f} % of the labels are wrong ({UNCHECKED if unchecked else MODEL_BASED})"
    rate, low, high = (100 * value for value in measured)
    interval = f"(90 % interval {low:.1f} to {high:.1f})"
    return f"about {rate:.1f} % of the labels are wrong {interval}; a first estimate, which warpi audit refines"


def _print_candidates(choice: Sequence[Mapping[str, Any]], most: int = _SHOWN) -> None:
    from rich.console import Console
    from rich.table import Table

    fitted = [c for c in choice if c["seconds"] or c["weight"] or c["score"] is not None]
    shown = sorted(fitted, key=lambda c: (-c["weight"], -(c["score"] or 0)))
    table = Table(box=None)
    for name in ("candidate", "accuracy on trusted rows", "seconds", "weight"):
        table.add_column(name, justify="left" if name == "candidate" else "right")
    for c in shown[:most]:
        score = "" if c["score"] is None else f"{100 * c['score']:.1f} ± {100 * (c['error'] or 0):.1f} %"
        weight = f"{c['weight']:.2f}" if c["weight"] else "–"
        table.add_row(cell(c["candidate"]), score, f"{c['seconds']:.1f}", weight)
    Console(highlight=False).print(table)
    if len(choice) > most:
        say(f"choice.json lists all {len(choice)} candidates")
    for note in dict.fromkeys(c.get("note") for c in choice if c.get("note")):
        say(f"{note}: {'; '.join(c['candidate'] for c in choice if c.get('note') == note)}")


def _first_flags(argv: list[str]) -> argparse.Namespace:
    """The flags that must be known before the others can be parsed, because the others depend on the method."""
    parser = Parser(prog="warpi fit", add_help=False)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--devices", type=int, default=None)
    parser.add_argument("--nodes", type=int, default=None)
    parser.add_argument("--method", default=None)
    parser.add_argument("--out", type=Path, default=None)
    parser.add_argument("--resume", action="store_true")
    return parser.parse_known_args(argv)[0]


def _all_flags(argv: list[str], first: argparse.Namespace) -> dict[str, Any]:
    """The values of all flags that are set. Without `--method`, the flags of `auto` are accepted."""
    from warpi.methods.registry import METHODS
    from warpi.runs.defaults import DEFAULT_METHOD
    from warpi.runs.run_folder import RunFolder
    from warpi.runs.same_run import check_plugins
    from warpi.runs.schema import to_written_names
    from warpi.utils import distributed

    stored = None
    if first.resume and first.out is not None:
        stored = json.loads(
            distributed.broadcast_from_rank0(lambda: json.dumps(RunFolder(first.out).read_spec()).encode())
        )
    name = first.method or (stored["spec"]["method"] if stored else DEFAULT_METHOD)
    if stored and first.method is None:
        check_plugins(first.out, name, None)
    if name not in METHODS:
        raise unknown("method", name, METHODS)
    given = to_written_names(_make_parser(name).read(argv))
    given["resume"] = first.resume
    if given.pop("tensorboard"):
        warn_deprecated("--tensorboard", "--track tensorboard")
        given["track"] = "tensorboard"
    return given


def _make_parser(method: str) -> Parser:
    """The parser of all flags, including the settings of a method."""
    from warpi.methods.old_names import OLD_NAMES
    from warpi.methods.registry import METHODS, explain_unknown_setting
    from warpi.runs.defaults import DATA_DEPENDENT
    from warpi.training.named_recipes import RECIPES
    from warpi.training.recipe import Recipe
    from warpi.utils.tracking import TRACKERS

    def explain(flag: str) -> UserError | None:
        field = flag.removeprefix("--").replace("-", "_")
        return explain_unknown_setting(f"flag {flag!r}", method, field, field.removeprefix("no_"))

    parser = Parser(
        "warpi fit",
        "Train a classifier that is robust to wrong labels, and write a run folder.",
        help_flag="--help-all",
        explain=explain,
    )
    parser.usage = "warpi fit --data DATA [--trusted FILE] --out DIR [flags]"
    parser.start_group("run")
    parser.add("--out DIR", "run folder to write", Path, required=True)
    parser.add(
        "--method NAME",
        "name from `warpi list methods` (default: auto; a network for images on a GPU and for more than a million rows "
        "in a .npy file)",
    )
    parser.add(
        f"--recipe {'|'.join(RECIPES)}",
        "set many training flags at once; strong is the default for images of up to 64 pixels on a GPU",
        default=argparse.SUPPRESS,
    )
    parser.add("--resume", "continue the interrupted run in DIR")
    parser.add("--device auto|cpu|cuda", "device to train on", default="auto")
    parser.add("--devices N", "processes that share each batch, one per GPU (default: 1)", int)
    parser.add("--nodes N", "print the commands that start --devices processes on each of N machines", int)
    parser.add("--restarts N", "how often to restart if one of several processes dies (default: 3)", int, 3)
    parser.add("--batch-per-rank", "batch sizes count one process; the learning rate grows with their number")
    parser.add("--threads N", "number of CPU threads, on which results depend", int)
    parser.add("--checkpoint-seconds X", "seconds between checkpoints (default: 300)", float, 300.0)
    parser.add("--checkpoint-epochs N", "epochs between checkpoints (default: 1)", int, 1)
    parser.add("--track A,B,...", f"also send the numbers of each epoch to {', '.join(TRACKERS)}", default="")
    parser.add_argument("--tensorboard", action="store_true", help=argparse.SUPPRESS)  # the old name
    parser.add("--quiet", "print only warnings and errors")
    add_data_flags(parser, "data")
    add_fields(parser, "training", Recipe, data_dependent=DATA_DEPENDENT)
    prefix = type(METHODS[method]).__name__ + "."
    data_dependent = {setting.removeprefix(prefix) for setting in DATA_DEPENDENT if setting.startswith(prefix)}
    group = add_fields(parser, f"method {method}", METHODS[method], data_dependent=data_dependent)
    for old, new in OLD_NAMES.get(method, {}).items():
        add_old_switch(group, old, new)
    return parser
