"""The command line: find the module of a command by name, import it and run it."""

import os
import sys
from collections.abc import Callable
from importlib import import_module

import warpi
from warpi.errors import UserError, unknown
from warpi.utils.terminal import say, show_warnings

COMMANDS = {
    "fit": ("warpi.cli.fit:fit", "train a classifier that is robust to wrong labels, and write a run folder"),
    "compare": ("warpi.cli.fit:compare", "compare models and methods on trusted rows they were not trained on"),
    "predict": ("warpi.cli.predict:predict", "predict the classes of new rows with a trained run"),
    "embed": ("warpi.cli.predict:embed", "compute the vectors of images or texts once, with a pretrained model"),
    "convert": ("warpi.cli.predict:convert", "turn a table larger than memory into arrays, block by block"),
    "audit": (
        "warpi.cli.audit:audit",
        "find the labels that are probably wrong, with a run or any model's probabilities",
    ),
    "annotators": ("warpi.cli.labels:annotators", "combine the labels of several annotators per row"),
    "label-studio": (
        "warpi.cli.labels:label_studio",
        "import a Label Studio project, or export a run as tasks with suggestions",
    ),
    "duplicates": ("warpi.cli.labels:duplicates", "find copies, near copies, outliers and broken images in data"),
    "pick": ("warpi.cli.audit:pick", "choose which examples a person should check first"),
    "review": ("warpi.cli.review:review", "check and correct labels in the browser"),
    "correct": ("warpi.cli.review:correct", "write the data with corrected labels"),
    "report": ("warpi.cli.report:report", "show one run, or compare many"),
    "check": ("warpi.cli.check:check", "describe a run or data from elsewhere; with --use, check your methods"),
    "sweep": ("warpi.cli.benchmarks:sweep", "train many runs described in one file"),
    "figures": ("warpi.cli.figures:figures", "draw the figures of the WarPI paper from runs"),
    "fewshot": ("warpi.cli.fewshot:fewshot", "few-shot learning: MetaVRF and baselines"),
    "bench": ("warpi.cli.benchmarks:bench", "measure the cost of a training step"),
    "corrupt": ("warpi.cli.benchmarks:corrupt", "draw label noise and write it to a file"),
    "list": ("warpi.cli.list:list_names", "list methods, datasets, noises, nets or few-shot learners"),
}
"""The function and the summary of each command. Its module is imported when it runs, so the overview is instant."""
_SUMMARIES = "\n".join(f"  {name:<14}{summary}" for name, (_, summary) in COMMANDS.items())
USAGE = f"""usage: warpi COMMAND ...
       warpi --use FILE.py COMMAND ...

Learn from data with partly wrong labels, with the help of a few trusted examples.

commands:
{_SUMMARIES}

methods to try first (`warpi list methods` describes these and more):
  auto (the default)         for tables, texts and features, with or without trusted examples
  without trusted examples   gce, elr, dividemix, dmi_ns, co_teaching (needs the share of wrong labels)
  with trusted examples      glc, l2rw, mwnet, warpi
  baselines                  ce; with trusted examples also clean_only, fine_tune

`warpi COMMAND --help` shows the flags of a command. `--use FILE.py` adds the methods and networks that your file
defines in METHODS = {{"mine": Mine()}} and NETS = {{"tiny": build}}.
"""


def find_command(name: str) -> Callable[[list[str]], None]:
    if name not in COMMANDS:
        raise unknown("command", name, COMMANDS)
    module, function = COMMANDS[name][0].split(":")
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
    show_warnings()
    try:
        _run(sys.argv[1:] if argv is None else argv)
    except UserError as e:
        say(f"warpi: {' '.join(str(e).split())}", error=True)
        return 2
    except MemoryError as e:
        say(
            f"warpi: out of memory{f' ({e})' if str(e) else ''}; use a machine with more memory, or less data",
            error=True,
        )
        return 2
    except BrokenPipeError:  # the reader has closed the pipe, as in `warpi list methods | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except KeyboardInterrupt:
        print("warpi: interrupted", file=sys.stderr)
        return 130
    return 0
