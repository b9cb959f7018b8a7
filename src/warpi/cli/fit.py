"""`warpi fit`. Imports that load torch wait until the command runs."""

import json
import sys
from pathlib import Path
from typing import Any

from warpi.cli.data_flags import add_data_flags
from warpi.errors import UserError, unknown
from warpi.utils.flags import Parser, add_fields


def fit(argv: list[str]) -> None:
    from warpi.runs import plugins as own
    from warpi.runs.run import Stopped, pick_device
    from warpi.runs.run import fit as run_fit
    from warpi.utils import distributed

    first = Parser(prog="warpi fit", add_help=False)
    first.add_argument("--device", default="auto")
    first.add_argument("--devices", type=int, default=1)
    peek, _ = first.parse_known_args([a for a in argv if a not in ("-h", "--help")])
    where = pick_device(peek.device)
    if not distributed.launched():
        distributed.check_devices(peek.devices, where)
        if peek.devices > 1:
            _, given = _fit_flags(argv)  # mistakes are said once, before anything is started
            raise SystemExit(distributed.launch(peek.devices, [*own.flags(), "fit", *argv], given["out"]))
    try:
        with distributed.process_group(where):
            with distributed.raise_on_all_ranks():
                name, given = _fit_flags(argv)
                distributed.check_started(given.pop("devices"))
            done = run_fit(**given)
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
        last = done.history[-1]
        against = "" if done.truth.test_is_clean else " against the given labels, which may be wrong themselves"
        score = (
            f"test accuracy {last['test_acc']:.2f} %{against}" if last.get("test_acc") is not None else "no test set"
        )
        print(f"{name} after {len(done.history)} epochs: {score}; run folder {done.path}")


def _fit_flags(argv: list[str]) -> tuple[str, dict[str, Any]]:
    """The name of the method, which has flags of its own, and everything that was set."""
    from warpi.methods.registry import METHODS, explain_unknown_setting
    from warpi.runs.defaults import DATA_DEPENDENT
    from warpi.runs.resume import check_own, read_spec
    from warpi.training.recipe import Recipe
    from warpi.utils import distributed

    first = Parser(prog="warpi fit", add_help=False)
    first.add_argument("--method", default=None)
    first.add_argument("--out", type=Path, default=None)
    first.add_argument("--resume", action="store_true")
    peek, _ = first.parse_known_args([a for a in argv if a not in ("-h", "--help")])
    stored = None
    if peek.resume and peek.out is not None:
        stored = json.loads(distributed.broadcast_from_rank0(lambda: json.dumps(read_spec(peek.out)).encode()))
    name = peek.method or (stored["spec"]["method"] if stored else "warpi")
    if stored and peek.method is None:
        check_own(peek.out, name, None)
    if name not in METHODS:
        raise unknown("method", name, METHODS)

    def explain(flag: str) -> UserError | None:
        field = flag.removeprefix("--").replace("-", "_")
        return explain_unknown_setting(f"flag {flag!r}", name, field, field.removeprefix("no_"))

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
    add_data_flags(parser, "data")
    add_fields(parser, "training", Recipe, suited=DATA_DEPENDENT)
    prefix = type(METHODS[name]).__name__ + "."
    own = {setting.removeprefix(prefix) for setting in DATA_DEPENDENT if setting.startswith(prefix)}
    add_fields(parser, f"method {name}", METHODS[name], suited=own)
    given = parser.read(argv)
    if "meta_data" in given:
        given["trusted"] = given.pop("meta_data")
    return name, given
