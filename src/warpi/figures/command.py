"""`warpi figures`: arrays where the weights are, pictures where the arrays are."""

import json
import sys
from pathlib import Path

from warpi.errors import UserError, unknown
from warpi.flags import Parser

WEIGHTS = "checkpoint.safetensors"


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
    from warpi.figures import draw
    from warpi.figures.arrays import FILE
    from warpi.report.runs import find_runs
    from warpi.report.table import write

    only = [name.strip() for name in (given["only"] or "").split(",") if name.strip()] or list(draw.FIGURES)
    for name in only:
        if name not in draw.FIGURES:
            raise unknown("figure", name, draw.FIGURES)
    runs = find_runs(given["runs"])
    bare = [run.path for run in runs if run.done and not (run.path / FILE).exists()]
    if given["arrays"] or set(only) & set(draw.FROM_ARRAYS):
        _measure([path for path in bare if (path / WEIGHTS).exists()], given["device"])
        if gone := [str(path) for path in bare if not (path / WEIGHTS).exists()]:
            print(f"warpi: {len(gone)} runs have neither weights nor {FILE} ({', '.join(gone[:3])}): no "
                  f"{', '.join(draw.FROM_ARRAYS)} of them", file=sys.stderr)  # fmt: skip
    if given["arrays"]:
        return
    paths, numbers = draw.figures(runs, given["out"], only)
    if not paths:
        raise UserError("these runs allow no figure; it takes their weights, several L, or several meta methods")
    write(given["out"] / "figures.json", json.dumps(numbers, indent=1, sort_keys=True, ensure_ascii=False) + "\n")
    for path in paths:
        if path.suffix == ".png":
            print(f"{path} (and .svg)")


def _measure(folders: list[Path], device: str) -> None:
    if not folders:
        return
    from warpi.figures.measure import measure  # torch is needed for this alone
    from warpi.spec import read_once

    with read_once():
        for path in folders:
            measure(path, device)
            print(f"{path} measured")
