"""`warpi figures`: arrays where the weights are, pictures where the arrays are."""

import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from warpi.errors import UserError, unknown
from warpi.utils.flags import Parser

if TYPE_CHECKING:
    from warpi.report.experiments import RunRecord

WEIGHTS = "checkpoint.safetensors"
_V = "v, which the methods with a rectifier alone have (warpi, warpi_detc)"
_TAKES = {
    "losses": _V,
    "confusion": f"{_V}, and the true labels",
    "rectifier": _V,
    "samples": "runs of warpi with two or more --samples, and data, noise and net the same",
    "stability": "two or more methods with a meta loss (warpi, mwnet, ...), and data, noise, net and epochs the same",
    "sigma": "σ, which warpi alone has (with --samples > 0)",
    "calibration": "a test set",
}


def figures(argv: list[str]) -> None:
    parser = Parser(prog="warpi figures", description="The paper's figures, and what V has learned, from runs.")
    parser.add_argument("runs", nargs="+", type=Path, metavar="DIR", help="run folders, or folders of run folders")
    parser.add_argument("--out", type=Path, metavar="DIR", help="write the pictures as PNG and SVG, and figures.json")
    parser.add_argument("--only", metavar="A,B,...", help="some of: losses, confusion, samples, stability, rectifier, "
                        "sigma, calibration")  # fmt: skip
    parser.add_argument("--arrays", action="store_true", help="draw nothing, compute figures.npz beside the runs")
    parser.add_argument("--device", default="auto", metavar="auto|cpu|cuda", help="where to compute them")
    given = parser.read(argv)
    if not given["arrays"] and given["out"] is None:
        raise UserError("name a folder for the pictures with --out DIR, or compute their arrays alone with --arrays")
    from warpi.report import figures as draw
    from warpi.report.figure_data import FILE
    from warpi.utils.files import write_with_folder

    asked = [name.strip() for name in (given["only"] or "").split(",") if name.strip()]
    for name in asked:
        if name not in draw.FIGURES:
            raise unknown("figure", name, draw.FIGURES)
    only = asked or list(draw.FIGURES)
    runs = _readable(given["runs"])
    if given["arrays"] or set(only) & set(draw.FROM_ARRAYS):
        bare = [run for run in runs if run.done and not (run.path / FILE).exists()]
        weighty = [run for run in bare if (run.path / WEIGHTS).exists()]
        _measure(weighty, given["device"])
        if gone := [str(run.path) for run in bare if run not in weighty]:
            _say(f"{len(gone)} runs have neither weights nor {FILE} ({', '.join(gone[:3])}): no "
                 f"{', '.join(draw.FROM_ARRAYS)} of them")  # fmt: skip
        if given["arrays"] and weighty and not any((run.path / FILE).exists() for run in runs):
            raise UserError("none of these runs could be measured; the reasons are above")
    if given["arrays"]:
        return
    paths, numbers = draw.figures(runs, given["out"], only)
    drawn = {path.name.split("-")[0] for path in paths}
    reasons = _reasons([kind for kind in only if kind not in drawn], runs)
    if not paths:
        methods = ", ".join(sorted({run.spec["method"] for run in runs}))
        raise UserError(f"these runs (of {methods}) allow no figure: {'; '.join(reasons)}")
    for reason in reasons if asked else ():
        _say(f"not drawn: {reason}")
    write_with_folder(
        given["out"] / "figures.json", json.dumps(numbers, indent=1, sort_keys=True, ensure_ascii=False) + "\n"
    )
    for path in paths:
        if path.suffix == ".png":
            print(f"{path} (and .svg)")


def _say(text: str) -> None:
    print(f"warpi: {' '.join(text.split())}", file=sys.stderr)


def _readable(paths: Sequence[Path]) -> "list[RunRecord]":
    """The runs; one that cannot be read is named and left out, and is an error where there are no others."""
    from warpi.report.experiments import find_runs
    from warpi.report.figure_data import read

    errors, readable = list[UserError](), []
    for run in find_runs(paths, errors):
        try:
            read(run.path)
            readable.append(run)
        except UserError as error:
            errors.append(error)
    if not readable:
        raise UserError("; ".join(map(str, errors)))
    for each in errors:
        _say(f"left out: {each}")
    return readable


def _measure(runs: "Sequence[RunRecord]", device: str) -> None:
    """Compute the arrays of runs; one that cannot be measured is named, and the others are."""
    if not runs:
        return
    from warpi.report.measure import measure
    from warpi.runs.spec import read_once

    with read_once():
        for run in runs:
            try:
                measure(run.path, device)
                print(f"{run.path} measured")
            except UserError as error:
                _say(f"{run.path} is not measured: {_own(run) or error}")


def _own(run: "RunRecord") -> str:
    """What to do where a run was made with a method or a net of the user's own; empty where it was not."""
    from warpi.methods.registry import METHODS
    from warpi.nets.registry import NETS

    method, net = run.spec["method"], run.spec["recipe"].get("net")
    parts = [*(["method"] if method not in METHODS else []), *(["net"] if net is not None and net not in NETS else [])]
    if not parts:
        return ""
    again = ", ".join(f"{part}=My{part.capitalize()}()" for part in parts)
    return (
        f"it was made with a {' and a '.join(parts)} of your own; give its file, warpi --use FILE.py figures ..., or "
        f"once, from Python: from warpi.report.measure import measure; measure({str(run.path)!r}, {again})"
    )


def _reasons(kinds: Iterable[str], runs: "Sequence[RunRecord]") -> list[str]:
    """Why there is no figure of each of these kinds, in words."""
    from warpi.report.figure_data import FILE
    from warpi.report.figures import FROM_ARRAYS

    measured = any((run.path / FILE).exists() for run in runs)
    takes = _TAKES if measured else _TAKES | dict.fromkeys(FROM_ARRAYS, "a finished run whose weights can be measured")
    return [f"{kind} takes {takes[kind]}" for kind in kinds]
