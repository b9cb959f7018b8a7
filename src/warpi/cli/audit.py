"""`warpi audit` and `warpi pick`. Heavy imports wait until the flags are read."""

import json
import logging
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from warpi.cli.data_flags import add_data_flags
from warpi.errors import UserError
from warpi.utils.flags import Parser

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from warpi.audit.pick import Pick
    from warpi.audit.result import Audit
    from warpi.data.dataset import Dataset

_LINES = logging.StreamHandler()


def audit(argv: list[str]) -> None:
    parser = Parser(prog="warpi audit", description="Which labels of a run's data are probably wrong.")
    parser.add_argument("run", type=Path, metavar="DIR", help="a finished run folder; the audit is stored in it, too")
    parser.add_output("--csv", "write the table, a row an example")
    parser.add_output("--parquet", "write the table as parquet")
    parser.add_output("--json", "write T, error rates by class and where numbers come from")
    parser.add_argument(
        "--folds", type=int, default=0, metavar="K", help="train K times more, to judge rows not trained on"
    )
    parser.add_argument(
        "--rows", metavar="train|all", help="all: held-out rows, too; the default, unless test labels are known"
    )
    parser.add_argument(
        "--threshold", type=float, default=0.5, metavar="X", help="wrong_probability above which is an issue"
    )
    parser.add_argument("--device", default="auto", metavar="auto|cpu|cuda", help="where to compute")
    parser.add_argument("--quiet", action="store_true", help="print nothing but errors")
    given = parser.read(argv)
    from warpi.audit import audit as run_audit
    from warpi.runs.reopen import reopen

    if not given["quiet"]:
        _say_progress()
    run = reopen(given["run"], given["device"])
    found = run_audit(run, **{name: given[name] for name in ("folds", "rows", "threshold")})
    files = run.data.dataset.files
    paths = files.paths if files else None
    if given["csv"]:
        found.to_csv(given["csv"], paths)
    if given["parquet"]:
        found.to_parquet(given["parquet"], paths)
    if given["json"]:
        _write_json(given["json"], found.summary())
    if not given["quiet"]:
        _show(found)


def _show(found: "Audit") -> None:
    from rich.console import Console
    from rich.table import Table

    console, rate = Console(highlight=False), found.facts["noise_rate"]
    print(
        f"{len(found)} labels, {int(found.is_label_issue.sum())} probably wrong; noise rate "
        f"{100 * rate['rate']:.1f} % ({100 * rate['low']:.1f} to {100 * rate['high']:.1f})"
    )
    if found.facts["left_out"]:
        print(f"{found.facts['left_out']} held-out rows are not audited; --rows all adds them")
    table = Table(box=None)
    for name in ("label", "rows", "wrong %", "95 % interval", "issues", "most often instead"):
        table.add_column(name, justify="left" if name in ("label", "most often instead") else "right")
    for k, c in enumerate(found.error_rates):
        mine = found.is_label_issue & (found.given == k)
        instead = found.suggested[mine].tolist()
        most = found.classes[max(set(instead), key=instead.count)] if instead else ""
        span = f"{100 * c['low']:.1f} to {100 * c['high']:.1f}"
        table.add_row(c["class"], str(c["n"]), f"{100 * c['rate']:.1f}", span, str(int(mine.sum())), most)
    console.print(table)
    print(f"probabilities: {found.facts['probabilities']}")
    print(f"uncertainty: {found.facts['uncertainty']}")


def pick(argv: list[str]) -> None:
    parser = Parser(
        prog="warpi pick", description="Which examples to have checked by a person first; what the checks say."
    )
    parser.add_argument("n", type=int, nargs="?", metavar="N", help="how many")
    parser.add_argument(
        "run", type=Path, nargs="?", metavar="DIR", help="a finished run on the data, where there is one"
    )
    parser.add_output("--csv", "write the list; fill its column checked_label")
    parser.add_argument("--unbiased", action="store_true", help="all at random: the best estimate of the noise rate")
    parser.add_argument("--coverage", action="store_true", help="without a run: spread over the inputs of each class")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the choice, and of --noise")
    parser.add_argument("--estimate", type=Path, metavar="FILE", help="a filled list: print the noise rate it shows")
    parser.add_argument(
        "--picked", type=Path, metavar="FILE", help="with --estimate of a file of `warpi review`: the list"
    )
    parser.add_output("--trusted", "with --estimate: write the set for --meta-data")
    parser.add_argument("--unbalanced", action="store_true", help="--trusted: all, however many of each class")
    parser.add_output("--json", "with --estimate: write it as JSON")
    parser.add_argument("--device", default="auto", metavar="auto|cpu|cuda", help="where to audit the run")
    from warpi.runs.spec import NOT_READ, READ

    add_data_flags(parser, "data, without a run", NOT_READ)
    given = parser.read(argv)
    of = {name: given[name] for name in READ if name in given}
    if given["estimate"]:
        if given["n"] is not None or given["csv"]:
            raise UserError("--estimate reads a filled list; to make one leave it out, and give N and --csv FILE")
        _estimate(given, of)
        return
    for name in ("picked", "trusted", "unbalanced", "json"):
        if given[name]:
            raise UserError(f"--{name} goes with --estimate FILE, a list that was filled")
    lacking = [
        what for what, value in (("N, how many rows", given["n"]), ("--csv FILE", given["csv"])) if value is None
    ]
    if lacking:
        raise UserError(f"warpi pick: required: {' and '.join(lacking)}; or --estimate FILE for a list that was filled")
    found = _pick(given, of)
    found.to_csv(given["csv"])
    random = int(found.random.sum())
    print(f"{given['csv']}: {len(found.row)} rows to check, {random} at random, {len(found.row) - random} informative")


def _pick(given: dict[str, Any], of: dict[str, Any]) -> "Pick":
    import numpy as np

    from warpi.audit import audit as run_audit
    from warpi.audit.pick import pick_rows
    from warpi.audit.result import AUDIT_FILE, read_audit
    from warpi.data.examples import TensorExamples
    from warpi.runs.reopen import reopen
    from warpi.runs.spec import DataSpec

    n, run, unbiased, seed = given["n"], given["run"], given["unbiased"], given["seed"]
    if run is not None:
        if of or given["coverage"]:
            raise UserError("the run says what its data is; leave out the run, or --data and --coverage")
        opened = reopen(run, given["device"])  # refuses data that has changed
        dataset = opened.data.dataset
        found = read_audit(run) if (run / AUDIT_FILE).exists() else run_audit(opened)
        if found.classes != dataset.classes or found.row.max() >= len(dataset.y):
            raise UserError(f"{run / AUDIT_FILE} is about other data; make it anew with: warpi audit {run}")
        paths = dataset.files.paths if dataset.files else None
        return pick_rows(
            n, found.row, found.given, found.classes, audit=found, unbiased=unbiased, paths=paths, seed=seed
        )
    if "data" not in of:
        raise UserError("warpi pick: give a run folder after N, or --data")
    dataset = DataSpec(**of).read()
    y = _labels(dataset, of, seed)
    row = np.arange(len(y)) if dataset.trusted is None else np.flatnonzero(~dataset.trusted.numpy())
    features = None
    if given["coverage"]:
        if not isinstance(dataset.examples, TensorExamples):
            raise UserError("--coverage compares inputs in memory; these are files: leave it out, or pick from a run")
        features = dataset.examples.x[row]
    paths = dataset.files.paths if dataset.files else None
    return pick_rows(n, row, y[row], dataset.classes, features=features, unbiased=unbiased, paths=paths, seed=seed)


def _estimate(given: dict[str, Any], of: dict[str, Any]) -> None:
    from warpi.audit.pick import CHECKED, estimate, read_checked
    from warpi.audit.trusted_set import write_trusted
    from warpi.runs.spec import DataSpec

    rows = read_checked(given["estimate"], given["picked"])
    if given["trusted"]:
        if "data" not in of:
            raise UserError("--trusted needs the data that the rows are of: --data, and what else it was read with")
        try:
            labels = {int(cells["row"]): cells[CHECKED] for cells in rows if cells[CHECKED]}
        except ValueError as e:
            raise UserError(f"{given['estimate']}: the column row is not as `warpi pick` wrote it ({e})") from e
        spec = DataSpec(**of)
        dataset = spec.read()
        checked = [cells for cells in rows if cells[CHECKED]]
        _check_same(checked, dataset, _labels(dataset, of, given["seed"]), given["estimate"])
        write_trusted(given["trusted"], dataset, labels, not given["unbalanced"], Path(spec.data)).tell()
    found = estimate(rows)
    if given["json"]:
        _write_json(given["json"], found)
    print(
        f"noise rate {100 * found['rate']:.1f} % (95 % interval {100 * found['low']:.1f} to {100 * found['high']:.1f}) "
        f"by {found['checked']} checked rows of {found['drawn']} that were drawn at random"
    )
    if found["left_out"]:
        print(
            f"{found['left_out']} more of these are checked, but not in the order of the list: they may have been "
            "chosen for looking suspicious, and are left out of it"
        )
    if found["unchecked_classes"]:
        print(f"nothing was checked of: {', '.join(found['unchecked_classes'])}; they are left out of it")


def _labels(dataset: "Dataset", of: dict[str, Any], seed: int) -> "NDArray[np.int64]":
    """The labels that rows are given by --noise.  [N]"""
    from warpi.noise.noise import Noise
    from warpi.utils.seeding import generator

    noise = Noise.parse(of.get("noise", "given"))
    if noise.other_name:
        raise UserError(f"noise {noise} replaces inputs; pick from the data as it is")
    return noise.apply(dataset, generator(seed, "noise"), None).y.numpy()


def _check_same(rows: list[dict[str, str]], dataset: "Dataset", y: "NDArray[np.int64]", listed: Path) -> None:
    """Refuse a list of other data, or of other rows: a label would land on an example that nobody looked at."""
    for cells in rows:
        row = int(cells["row"])
        if not 0 <= row < len(y):
            continue  # said where the set is written
        if dataset.files is not None and cells.get("path"):
            said, here = cells["path"], {dataset.files.paths[row]}
        else:  # noise is not put on the test rows of a run
            said, here = cells["given_label"], {dataset.classes[int(k)] for k in (y[row], dataset.y[row])}
        if said not in here:
            found = " or ".join(map(repr, sorted(here)))
            raise UserError(
                f"row {row} is {said!r} in {listed}, and {found} in {dataset.name}: rows were moved or relabelled "
                "since; give --data as it was, with the --noise and --seed that it was read with"
            )


def _write_json(path: Path, values: dict[str, Any]) -> None:
    from warpi.utils.files import write_atomically

    write_atomically(path, (json.dumps(values, indent=1) + "\n").encode())


def _say_progress() -> None:
    """Lines of the log about trainings to standard error."""
    logger = logging.getLogger("warpi.audit")
    _LINES.stream = sys.stderr  # that of today: notebooks and tests change it between calls
    if not logger.handlers:
        _LINES.setFormatter(logging.Formatter("warpi: %(message)s"))
        logger.addHandler(_LINES)
        logger.setLevel(logging.INFO)
