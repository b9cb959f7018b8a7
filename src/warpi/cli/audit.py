"""`warpi audit` and `warpi pick`. Modules that are slow to import are imported after the flags are parsed."""

import logging
import shlex
import sys
from argparse import SUPPRESS
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from warpi.cli.data_flags import add_copied_columns, add_data_flags, add_trusted_output, read_names
from warpi.cli.labels import add_probability_flags, audit_probabilities, check_probability_flags
from warpi.errors import UserError, format_count
from warpi.runs.rerun_command import flag
from warpi.runs.schema import NOT_READ, READ, to_written_names
from warpi.utils.files import unused_name, write_json
from warpi.utils.flags import Parser
from warpi.utils.terminal import VisibleFormatter, cell, say

if TYPE_CHECKING:
    from warpi.audit.result import Audit
    from warpi.review.trusted_set import TrustedSetSummary
    from warpi.runs.run import Run

_HANDLER = logging.StreamHandler()


def audit(argv: list[str]) -> None:
    parser = Parser(
        "warpi audit", "Find the labels that are probably wrong, with a run or the probabilities of any model."
    )
    parser.add_argument(
        "run", type=Path, nargs="?", metavar="DIR", help="a finished run folder; the audit is also stored there"
    )
    parser.add_output("--csv", "write a table with one line per example")
    parser.add_output("--parquet", "write the same table as parquet")
    parser.add_output("--json", "write the transition matrix, the error rates by class and how they were estimated")
    parser.add("--hf FOLDER", "write the data and the audit as a Hugging Face data set, for load_from_disk", Path)
    parser.add(
        "--folds K",
        "train the run K more times, each time without some rows, and predict these rows; 0: predict all rows with the "
        "run itself (default: 0 for image networks; otherwise `auto` predicts, even if the run used another method)",
        int,
    )
    parser.add(
        "--rows train|all",
        "train: training rows only; all: also rows held out for validation and testing (default: all; train if the "
        "test labels are known to be right)",
    )
    parser.add("--threshold X", "a label is an issue if its wrong_probability is above X (default: 0.5)", float, 0.5)
    parser.add(
        "--checked FILE.csv,...",
        "lists from `warpi pick` whose column checked_label was filled in (instead of `warpi review`)",
    )
    add_copied_columns(parser)
    parser.add("--device auto|cpu|cuda", "device to compute on", default="auto")
    parser.add("--quiet", "print only warnings and errors")
    add_probability_flags(parser)
    given = parser.read(argv)
    if not given["quiet"]:
        _log_to_stderr()
    check_probability_flags(given)
    if given["hf"] and given["probabilities"]:
        raise UserError("--hf writes the data of a run; it cannot be used with --probabilities")
    result, paths, copied = audit_probabilities(given) if given["probabilities"] else _audit_run(given)
    if given["csv"]:
        result.to_csv(given["csv"], paths, copied)
    if given["parquet"]:
        result.to_parquet(given["parquet"], paths, copied)
    if given["json"]:
        write_json(given["json"], result.summary())
    if not given["quiet"]:
        _print_audit(result)


def _audit_run(given: Mapping[str, Any]) -> "tuple[Audit, list[str] | None, dict[str, list[str]]]":
    """The audit of a run, the image files of its data, and the columns to copy."""
    from warpi.audit.make_audit import audit as audit_run
    from warpi.runs.reopen import reopen

    run = reopen(given["run"], given["device"])
    options = {name: given[name] for name in ("folds", "rows", "threshold")}
    result = audit_run(run, checked=read_names(given["checked"]), **options)
    files = run.data.dataset.files
    if given["hf"]:
        _save_dataset(run, result, given["hf"])
    return result, list(files.paths) if files else None, _read_copied(run, given)


def _save_dataset(run: "Run", audit: "Audit", out: Path) -> None:
    from warpi.audit.hugging_face import save_with_audit
    from warpi.runs.reopen import read_run_spec

    spec = read_run_spec(run.path)["spec"]
    save_with_audit(out, audit, run.data.dataset, spec["data"], spec["label"])


def _read_copied(run: "Run", given: Mapping[str, Any]) -> dict[str, list[str]]:
    """The ids of the rows of a run, and the columns of `--keep`."""
    from warpi.datasets.columns.copied import read_copied_columns
    from warpi.runs.reopen import read_run_spec

    data = read_run_spec(run.path)["spec"]["data"]
    return read_copied_columns(data, run.data.dataset.encoding, read_names(given["id"]), read_names(given["keep"]))


def _print_audit(audit: "Audit") -> None:
    from rich.console import Console
    from rich.table import Table

    from warpi.audit.result import describe_rate
    from warpi.review.progress import audit_concerns, correct_command

    rate = describe_rate(audit.facts)
    say(f"{len(audit)} labels, {int(audit.is_label_issue.sum())} probably wrong; noise rate {rate}")
    if audit.facts["left_out"]:
        say(f"{format_count(audit.facts['left_out'], 'held-out row')} not audited; --rows all adds held-out rows")
    table = Table(box=None)
    has_intervals = audit.has_interval
    heads = ["label", "rows", "wrong %", *(["90 % interval"] if has_intervals else []), "issues"]
    for name in (*heads, "most frequent suggestion"):
        table.add_column(name, justify="left" if name in ("label", "most frequent suggestion") else "right")
    for k, c in enumerate(audit.error_rates):
        issues = audit.is_label_issue & (audit.given == k)
        suggested = audit.suggested[issues].tolist()
        most_frequent = audit.classes[max(set(suggested), key=suggested.count)] if suggested else ""
        cells = [c["class"], str(c["n"]), f"{100 * c['rate']:.1f}"]
        if has_intervals:
            cells.append("" if c["low"] is None else f"{100 * c['low']:.1f} to {100 * c['high']:.1f}")
        table.add_row(*map(cell, (*cells, int(issues.sum()), most_frequent)))
    Console(highlight=False).print(table)
    if audit.copies is not None and audit.copies.has_findings:
        for line in audit.copies.describe():
            say(f"copies: {line}")
    say(f"probabilities: {audit.facts['probabilities']}")
    say(f"uncertainty: {audit.facts['uncertainty']}")
    if audit.facts["run"] is not None:
        run = shlex.quote(audit.facts["run"])
        listed = unused_name("check.csv")
        check = (
            f"warpi pick {100 if has_intervals else 40} {run} --csv {listed}, then warpi review {run} --rows {listed}"
        )
        correct = correct_command(run)
        if not has_intervals or any(concern.comes_first for concern in audit_concerns(audit)):
            say(f"next: {check}")
        elif (Path(audit.facts["run"]) / "review" / "decisions.sqlite").exists():
            say(f"next: {correct}, or check more rows: {check}")
        else:
            say(f"next: {check}, or correct the labels now: {correct}")


def pick(argv: list[str]) -> None:
    parser = Parser(
        "warpi pick",
        "Choose the examples that a person should check first: without a run at random, with a run half at random and "
        "half where the model is uncertain. Or estimate the noise rate from a list that a person has checked.",
    )
    parser.add_argument(
        "n", type=int, nargs="?", metavar="N", help="number of rows to pick; five per class are enough to start"
    )
    parser.add_argument("run", type=Path, nargs="?", metavar="DIR", help="a finished run on the data; or give --data")
    parser.add_output("--csv", "write the list; a person fills in its column checked_label")
    parser.add("--unbiased", "pick all rows at random, for the best estimate of the noise rate")
    parser.add("--coverage", "without a run: spread the rows over the inputs of each class")
    parser.add("--seed N", "random seed of the choice and of --noise", int, 0)
    parser.add("--estimate FILE", "read a checked list and print the noise rate it implies", Path)
    parser.add("--picked FILE", "if --estimate reads an export of `warpi review`: the list that was reviewed", Path)
    add_trusted_output(parser, "with --estimate: write the checked rows as a set for `warpi fit --trusted`")
    parser.add("--balanced", "with --export-trusted: write the same number of rows per class and omit the rest")
    parser.add_argument("--unbalanced", action="store_true", help=SUPPRESS)  # the default
    parser.add_output("--json", "with --estimate: write the estimate as JSON")
    add_copied_columns(parser)
    parser.add("--device auto|cpu|cuda", "device to audit the run on", default="auto")

    add_data_flags(parser, "data without a run", NOT_READ, has_default=False)
    given = parser.read(argv)
    settings = {name: given[name] for name in READ if name in given}
    if given["estimate"]:
        if given["n"] is not None or given["csv"]:
            raise UserError("--estimate reads a checked list; omit it to pick new rows with N and --csv FILE")
        _estimate(given, settings)
        return
    for name in ("picked", "export_trusted", "balanced", "json"):
        if given[name]:
            raise UserError(f"--{name.replace('_', '-')} requires --estimate FILE, a list that a person has checked")
    required = {"N, the number of rows": given["n"], "--csv FILE": given["csv"]}
    if absent := [name for name, value in required.items() if value is None]:
        raise UserError(f"missing {' and '.join(absent)}; to use a checked list instead, pass --estimate FILE")
    from warpi.audit.pick import pick_from_data, pick_from_run
    from warpi.runs.spec import DataSpec

    options = {name: given[name] for name in ("unbiased", "seed")}
    options |= {name: read_names(given[name]) for name in ("id", "keep")}
    if given["run"] is not None:
        if settings or given["coverage"]:
            raise UserError("the run defines its data; omit either the run, or --data and --coverage")
        picked = pick_from_run(given["n"], given["run"], device=given["device"], **options)
    else:
        if "data" not in settings:
            raise UserError("missing the data: pass a run folder after N, or --data")
        picked = pick_from_data(given["n"], DataSpec(**settings), coverage=given["coverage"], **options)
    picked.to_csv(given["csv"])
    n_random = int(picked.random.sum())
    rows = format_count(len(picked.row), "row")
    n_informative = len(picked.row) - n_random
    say(f"{given['csv']}: {rows} to check: {n_random} random and {n_informative} informative")
    if given["run"] is not None:
        run, listed = (shlex.quote(str(given[name])) for name in ("run", "csv"))
        say(f"next: warpi review {run} --rows {listed}, or fill it in and run warpi audit {run} --checked {listed}")
    else:
        words, listed = _words_of(settings), str(given["csv"])
        review = shlex.join(["warpi", "review", *words, "--rows", listed, "--out", "checked"])
        estimate = shlex.join(["warpi", "pick", "--estimate", listed, *words, "--export-trusted", "FILE"])
        say(f"next: {review}, or fill it in and run {estimate}")


def _words_of(settings: Mapping[str, Any]) -> list[str]:
    """The flags that read the data."""
    return [word for name, value in to_written_names(settings).items() for word in flag(name, value)]


def _estimate(given: Mapping[str, Any], settings: Mapping[str, Any]) -> None:
    from warpi.audit.checked_labels import read_checked
    from warpi.audit.rates import estimate_noise_rate
    from warpi.review.export import write_checked_rows
    from warpi.runs.spec import DataSpec

    rows = read_checked(given["estimate"], given["picked"])
    if given["export_trusted"]:
        if "data" not in settings:
            raise UserError("--export-trusted needs the data of the rows: --data, and the flags it was read with")
        options = (DataSpec(**settings), given["seed"], given["balanced"])
        print_trusted_set(write_checked_rows(given["export_trusted"], rows, given["estimate"], *options))
    rate = estimate_noise_rate(rows)
    if given["json"]:
        write_json(given["json"], rate)
    say(
        f"noise rate {100 * rate['rate']:.1f} % (95 % interval {100 * rate['low']:.1f} to {100 * rate['high']:.1f}) "
        f"from {format_count(rate['checked'], 'checked row')} of {rate['drawn']} drawn at random"
    )
    if rate["left_out"]:
        say(
            f"not used: {format_count(rate['left_out'], 'more checked row')}, not in the order of the list, which may "
            "have been picked because they look suspicious"
        )
    if rate["unchecked_classes"]:
        say(f"no rows were checked for: {', '.join(rate['unchecked_classes'])}; the estimate excludes these classes")
    trusted = given["export_trusted"]
    if trusted and not (trusted.suffix == ".csv" and Path(settings["data"]).is_dir()):  # paths of images need --root
        from warpi.review.export import next_folder
        from warpi.runs.rerun_command import command

        say(f"next: {command({**settings, 'meta_data': str(trusted)}, next_folder())}")


def print_trusted_set(summary: "TrustedSetSummary") -> None:
    """Print the contents of a trusted set that was written, and warn about classes without an example."""
    say(summary)
    if summary.missing:
        names = ", ".join(summary.missing)
        say(f"warpi: no trusted example yet of: {names}; check at least one row of each class", error=True)


def _log_to_stderr() -> None:
    """Print the log of an audit, such as which fold is trained."""
    logger = logging.getLogger("warpi.audit")
    _HANDLER.stream = sys.stderr  # notebooks and tests replace it between calls
    if not logger.handlers:
        _HANDLER.setFormatter(VisibleFormatter("warpi: %(message)s"))
        logger.addHandler(_HANDLER)
        logger.setLevel(logging.INFO)
