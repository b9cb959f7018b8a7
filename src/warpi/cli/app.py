"""The command line: find the module of a command by name, import it and run it."""

import os
import sys
from collections.abc import Callable
from importlib import import_module

import warpi
from warpi.errors import UserError, unknown

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
COMMANDS = {
    "fit": "warpi.cli.fit:fit",
    "predict": "warpi.runs.predictions:command",
    "sweep": "warpi.cli.sweep:sweep",
    "report": "warpi.cli.report:report",
    "figures": "warpi.cli.figures:figures",
    "audit": "warpi.cli.audit:audit",
    "pick": "warpi.cli.audit:pick",
    "review": "warpi.cli.review:review",
    "fewshot": "warpi.cli.fewshot:fewshot",
    "bench": "warpi.cli.bench:bench",
    "corrupt": "warpi.cli.corrupt:corrupt",
    "list": "warpi.cli.list:list_names",
}
"""The module and function of each command. A module is imported when its command runs, so the overview is instant."""


def find_command(name: str) -> Callable[[list[str]], None]:
    if name not in COMMANDS:
        raise unknown("command", name, COMMANDS)
    module, function = COMMANDS[name].split(":")
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
        find_command(argv[0])(argv[1:])


def main(argv: list[str] | None = None) -> int:
    """Run a command and return its exit code. A `UserError` is printed on one line, with exit code 2."""
    try:
        _run(sys.argv[1:] if argv is None else argv)
    except UserError as e:
        print(f"warpi: {' '.join(str(e).split())}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # nobody reads the output any more, as in `warpi list methods | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except KeyboardInterrupt:
        print("warpi: interrupted", file=sys.stderr)
        return 130
    return 0
