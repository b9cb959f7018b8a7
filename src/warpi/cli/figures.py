"""`warpi figures`: compute arrays from the weights of runs, and draw figures from the arrays."""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from warpi.cli.data_flags import read_names
from warpi.errors import UserError, format_count, unknown
from warpi.runs.schema import CHECKPOINT
from warpi.utils.flags import Parser
from warpi.utils.terminal import say

if TYPE_CHECKING:
    from warpi.report.experiments import RunRecord

_V = "v, which only methods with a rectifier have (warpi, warpi_detc)"
_NEEDS = {
    "losses": _V,
    "confusion": f"{_V}, and the true labels",
    "rectifier": _V,
    "samples": "runs of warpi with two or more values of --samples and the same data, noise and net",
    "stability": "two or more methods with a meta loss (warpi, mwnet, ...) and the same data, noise, net and epochs",
    "sigma": "σ, which only warpi has (with --samples > 0)",
    "calibration": "a test set",
}


def figures(argv: list[str]) -> None:
    given = _read_flags(argv)
    from warpi.report.figures import FIGURES, FROM_ARRAYS, draw_figures
    from warpi.utils.files import write_with_folder

    requested = read_names(given["only"])
    for name in requested:
        if name not in FIGURES:
            raise unknown("figure", name, FIGURES)
    only = requested or list(FIGURES)
    runs = _find_readable(given["runs"])
    if given["arrays"] or set(only) & set(FROM_ARRAYS):
        _compute_arrays(runs, given["device"], given["arrays"])
    if given["arrays"]:
        return
    paths, numbers = draw_figures(runs, given["out"], only)
    drawn = {path.name.split("-")[0] for path in paths}
    reasons = _reasons([kind for kind in only if kind not in drawn], runs)
    if not paths:
        methods = ", ".join(sorted({run.spec["method"] for run in runs}))
        raise UserError(f"no figure can be drawn from these runs (of {methods}): {'; '.join(reasons)}")
    for reason in reasons if requested else ():
        _warn(f"not drawn: {reason}")
    text = json.dumps(numbers, indent=1, sort_keys=True, ensure_ascii=False)
    write_with_folder(given["out"] / "figures.json", text + "\n")
    for path in paths:
        if path.suffix == ".png":
            say(f"{path} (and .svg)")


def _read_flags(argv: list[str]) -> dict[str, Any]:
    parser = Parser("warpi figures", "Draw the figures of the paper, and what V has learned.")
    parser.add_argument("runs", nargs="+", type=Path, metavar="DIR", help="run folders, or folders of run folders")
    parser.add("--out DIR", "write the figures as PNG and SVG, and figures.json", Path)
    parser.add("--only A,B,...", "some of: losses, confusion, samples, stability, rectifier, sigma, calibration")
    parser.add("--arrays", "only compute figures.npz in the run folders")
    parser.add("--device auto|cpu|cuda", "where to compute the arrays", default="auto")
    given = parser.read(argv)
    if not given["arrays"] and given["out"] is None:
        raise UserError("set the folder of the figures with --out DIR, or compute only their arrays with --arrays")
    return given


def _warn(text: str) -> None:
    say(f"warpi: {' '.join(text.split())}", error=True)


def _find_readable(paths: Sequence[Path]) -> "list[RunRecord]":
    """The readable runs. Prints a warning for each other run; raises an error if no run is readable."""
    from warpi.report.experiments import find_runs
    from warpi.report.figure_data import read_arrays

    errors: list[UserError] = []
    readable = []
    for run in find_runs(paths, errors):
        try:
            read_arrays(run.path)
            readable.append(run)
        except UserError as problem:
            errors.append(problem)
    if not readable:
        raise UserError("; ".join(map(str, errors)))
    for error in errors:
        _warn(f"skipped: {error}")
    return readable


def _compute_arrays(runs: "Sequence[RunRecord]", device: str, required: bool) -> None:
    """Compute the missing arrays of finished runs. If `required`, raise an error if no run has arrays afterwards."""
    from warpi.report.figure_data import FILE
    from warpi.report.figures import FROM_ARRAYS

    unmeasured = [run for run in runs if run.done and not (run.path / FILE).exists()]
    with_weights = [run for run in unmeasured if (run.path / CHECKPOINT).exists()]
    if with_weights:
        from warpi.report.figure_measures import measure
        from warpi.runs.rerun_command import UNKNOWN_FILE, custom_files, custom_names
        from warpi.runs.spec import DataCache

        cache = DataCache()
        unknown = [run for run in with_weights if UNKNOWN_FILE in custom_files(run.spec)]
        if unknown:
            names = ", ".join(sorted({name for run in unknown for name in custom_names(run.spec).values()}))
            _warn(
                f"not measured, because the file that defines {names} is unknown: "
                f"{', '.join(str(run.path) for run in unknown)}; run warpi --use {UNKNOWN_FILE} figures ..., or in "
                "Python call warpi.report.figure_measures.measure(RUN, method=..., net=...)"
            )
        for run in with_weights:
            if run in unknown:
                continue
            try:
                measure(run.path, device, cache=cache)
                say(f"{run.path} measured")
            except UserError as error:
                _warn(f"{run.path} is not measured: {error}")
    without = [str(run.path) for run in unmeasured if run not in with_weights]
    if without:
        names = ", ".join(without[:3])
        kinds = ", ".join(FROM_ARRAYS)
        _warn(f"no {kinds} for {format_count(len(without), 'run')} without weights and without {FILE} ({names})")
    if required and with_weights and not any((run.path / FILE).exists() for run in runs):
        raise UserError("none of these runs could be measured; the reasons are above")


def _reasons(kinds: Iterable[str], runs: "Sequence[RunRecord]") -> list[str]:
    """For each of these kinds of figures, what it needs."""
    from warpi.report.figure_data import FILE
    from warpi.report.figures import FROM_ARRAYS

    measured = any((run.path / FILE).exists() for run in runs)
    needs = _NEEDS if measured else _NEEDS | dict.fromkeys(FROM_ARRAYS, "a finished run whose weights can be measured")
    return [f"{kind} needs {needs[kind]}" for kind in kinds]
