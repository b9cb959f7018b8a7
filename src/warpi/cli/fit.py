"""`warpi fit`. Imports that load torch wait until the command runs."""

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from warpi.cli.data_flags import add_data_flags
from warpi.errors import UserError, unknown
from warpi.utils.flags import Parser, add_fields

if TYPE_CHECKING:
    from warpi.runs.run import Run

HELP = """usage: warpi fit --data DATA --trusted FILE --out DIR [flags]

Train a classifier that is robust to wrong labels, and write a run folder.

data:
  --data DATA           .csv, .tsv, .parquet, .npz, .npy, a folder of images, or a name from `warpi list datasets`
  --label COLUMN        column with the labels (default: label)
  --drop A,B,...        columns of a table that are not features, such as an id
  --trusted FILE        second file or folder, with examples whose labels were checked
  --labels FILE         replace the labels by those in a .json file written by `warpi review`

training:
  --method NAME         name from `warpi list methods` (default: warpi)
  --net NAME            network from `warpi list nets` (default: depends on the data)
  --epochs N            number of passes over the data (default: depends on the data)
  --seed N              random seed (default: 0)
  --device NAME         auto, cpu or cuda: the device to train on (default: auto)

run folder:
  --out DIR             where to write the run
  --resume              continue the interrupted run in DIR

benchmarks with known labels:
  --noise KIND:RATE     label noise to add, from `warpi list noises`
  --meta N              number of trusted examples to hold out

`warpi fit --help-all` shows all flags; with `--method NAME` also the settings of that method.
"""


def fit(argv: list[str]) -> None:
    if "-h" in argv or "--help" in argv:  # instantly: the full help needs torch
        print(HELP, end="")
        return
    from warpi.runs import plugins
    from warpi.runs.run import fit as run_fit
    from warpi.utils import distributed
    from warpi.utils.devices import Stopped, pick_device

    first = _first_flags(argv)
    device = pick_device(first.device)
    if not distributed.is_launched() and "--help-all" not in argv:
        distributed.check_devices(first.devices, device)
        if first.devices > 1:
            _, given = _all_flags(argv, first)  # report errors once, before processes are started
            raise SystemExit(distributed.launch(first.devices, [*plugins.flags(), "fit", *argv], given["out"]))
    try:
        with distributed.process_group(device):
            with distributed.raise_on_all_ranks():
                name, given = _all_flags(argv, first)
                distributed.check_started(given.pop("devices"))
            run = run_fit(**given)
            is_first = distributed.rank() == 0
    except Stopped as e:
        if e.rank == 0:
            print(f"warpi: {e}", file=sys.stderr)
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
        _print_result(name, run)


def _print_result(name: str, run: "Run") -> None:
    epochs = len(run.history)
    score = "no test set"
    if run.history[-1].get("test_acc") is not None:
        against = "" if run.truth.test_is_clean else " against the given labels, some of which may be wrong"
        score = f"test accuracy {run.history[-1]['test_acc']:.2f} %{against}"
    print(f"{name} after {epochs} epoch{'s' * (epochs != 1)}: {score}; run folder {run.path}")


def _first_flags(argv: list[str]) -> argparse.Namespace:
    """The flags that must be known before the others can be parsed, since these depend on the method."""
    parser = Parser(prog="warpi fit", add_help=False)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--method", default=None)
    parser.add_argument("--out", type=Path, default=None)
    parser.add_argument("--resume", action="store_true")
    return parser.parse_known_args(argv)[0]


def _all_flags(argv: list[str], first: argparse.Namespace) -> tuple[str, dict[str, Any]]:
    """The name of the method, and the values of all flags that are set."""
    from warpi.methods.registry import METHODS
    from warpi.runs.run_folder import RunFolder
    from warpi.runs.same_run import check_plugins
    from warpi.utils import distributed

    stored = None
    if first.resume and first.out is not None:
        stored = json.loads(
            distributed.broadcast_from_rank0(lambda: json.dumps(RunFolder(first.out).read_spec()).encode())
        )
    name = first.method or (stored["spec"]["method"] if stored else "warpi")
    if stored and first.method is None:
        check_plugins(first.out, name, None)
    if name not in METHODS:
        raise unknown("method", name, METHODS)
    given = _make_parser(name).read(argv)
    if "meta_data" in given:
        given["trusted"] = given.pop("meta_data")
    return name, given


def _make_parser(method: str) -> Parser:
    """The parser of all flags, including the settings of a method."""
    from warpi.methods.registry import METHODS, explain_unknown_setting
    from warpi.runs.defaults import DATA_DEPENDENT
    from warpi.training.named_recipes import RECIPES
    from warpi.training.recipe import Recipe

    def explain(flag: str) -> UserError | None:
        field = flag.removeprefix("--").replace("-", "_")
        return explain_unknown_setting(f"flag {flag!r}", method, field, field.removeprefix("no_"))

    parser = Parser(
        "warpi fit",
        "Train a classifier that is robust to wrong labels, and write a run folder.",
        help_flag="--help-all",
        explain=explain,
    )
    parser.usage = "warpi fit --data DATA --trusted FILE --out DIR [flags]"
    parser.start_group("run")
    parser.add("--out DIR", "run folder to write", Path, required=True)
    parser.add("--method NAME", "name from `warpi list methods` (default: warpi)")
    parser.add(f"--recipe {'|'.join(RECIPES)}", "set many of the training flags at once", default=argparse.SUPPRESS)
    parser.add("--resume", "continue the interrupted run in DIR")
    parser.add("--device auto|cpu|cuda", "device to train on", default="auto")
    parser.add("--devices N", "processes that share each batch, one per GPU (default: 1)", int)
    parser.add("--threads N", "number of CPU threads, on which results depend", int)
    parser.add("--checkpoint-seconds X", "seconds between checkpoints (default: 300)", float, 300.0)
    parser.add("--checkpoint-epochs N", "epochs between checkpoints (default: 1)", int, 1)
    parser.add("--tensorboard", "also write logs to DIR/tensorboard")
    parser.add("--quiet", "print nothing but errors")
    add_data_flags(parser, "data")
    add_fields(parser, "training", Recipe, data_dependent=DATA_DEPENDENT)
    prefix = type(METHODS[method]).__name__ + "."
    data_dependent = {setting.removeprefix(prefix) for setting in DATA_DEPENDENT if setting.startswith(prefix)}
    add_fields(parser, f"method {method}", METHODS[method], data_dependent=data_dependent)
    return parser
