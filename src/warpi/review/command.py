"""`warpi review`: from a run, or from data alone, to the page; or straight to the exports."""

import csv
import os
import shlex
import sys
import webbrowser
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

from warpi.errors import UserError
from warpi.flags import Parser, add_fields

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from warpi.audit import Audit
    from warpi.data.dataset import Dataset
    from warpi.review.items import Items


def review(argv: list[str]) -> None:
    from warpi.spec import NOT_READ, READ, DataSpec

    parser = Parser(
        prog="warpi review",
        description="A page in the browser where a person decides which labels are right. Audits the run first if "
        "need be. With --export or --trusted nothing is opened: what was decided so far is written.",
    )
    parser.add_argument("run", type=Path, nargs="?", metavar="RUN", help="a run folder; or give --data")
    parser.add_argument(
        "--rows", type=Path, metavar="FILE.csv", help="review these rows, as `warpi pick --csv` wrote them"
    )
    parser.add_argument(
        "--show", type=Path, metavar="FILE.csv", help="a line a row of the data: more to be shown of each"
    )
    parser.add_argument("--out", type=Path, metavar="DIR", help="where decisions are kept (default: RUN/review)")
    parser.add_argument("--port", type=int, default=0, metavar="N", help="port on 127.0.0.1 (default: a free one)")
    parser.add_argument("--no-browser", action="store_true", help="only print the link")
    parser.add_argument("--export", type=Path, metavar="FILE", help="write all labels, corrected: .csv, or .json")
    parser.add_argument("--trusted", type=Path, metavar="PATH", help="write a trusted set for `warpi fit --meta-data`")
    parser.add_argument("--unbalanced", action="store_true", help="--trusted: all, however many of each class")
    parser.add_argument("--device", default="auto", metavar="auto|cpu|cuda", help="where a run is audited")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of --noise")
    add_fields(parser, "data without a run", DataSpec, NOT_READ)
    given = parser.read(argv)
    named = {name: given[name] for name in READ if name in given}
    if (given["run"] is None) == ("data" not in named):
        raise UserError("warpi review: give a run folder, or --data for data without a run (and not both)")
    if given["run"] is not None and named:
        raise UserError(f"warpi review: a run knows its data; leave out --{next(iter(named)).replace('_', '-')}")
    if given["run"] is None and given["out"] is None:
        raise UserError("warpi review: required: --out, the folder where decisions are kept")
    _review(given, named)


def _review(given: Mapping[str, Any], named: Mapping[str, Any]) -> None:
    from warpi.review.export import fit_command, write_corrected, write_trusted
    from warpi.review.session import Review
    from warpi.review.store import Store

    run, rows = given["run"], _rows(given["rows"])
    if run is None:
        items, spec = _of_data(named, rows, given)
    else:
        items, spec, _ = open_run(run, rows, given["device"], given["show"])
    folder = given["out"] or run / "review"
    with closing(Store(folder / "decisions.sqlite", items.identity)) as store:
        if not (given["export"] or given["trusted"]):
            _serve(Review(items, store, folder, spec), given)
            return
        standing, corrected = store.standing(), None
        if given["export"]:
            corrected = write_corrected(items, standing, given["export"])
            decided = sum(decision.label is not None for decision in standing.values())
            print(f"{given['export']}: labels of {len(items.given)} rows, {decided} of them decided by a person")
            if corrected != given["export"]:
                print(f"{corrected}: the same labels, for warpi fit --noise {shlex.quote(f'given:{corrected}')}")
        if given["trusted"]:
            written = write_trusted(items, standing, given["trusted"], not given["unbalanced"])
            written.tell()
            if written.left and corrected is None:
                print("warpi: add --export FILE.csv to learn from those left out, too", file=sys.stderr)
            print(f"next: {fit_command(items, spec, given['trusted'], corrected)}")


def _serve(review: Any, given: Mapping[str, Any]) -> None:
    from warpi.review.server import Server

    with Server(review, given["port"]) as server:
        print(server.link, flush=True)
        print("warpi: open this link on this machine; Ctrl-C ends, every decision is stored at once", file=sys.stderr)
        if not given["no_browser"] and _has_screen():
            webbrowser.open(server.link)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            print(f"warpi: decisions are in {review.store.path}; the same command goes on", file=sys.stderr)


def _has_screen() -> bool:
    """Without one a browser would be a text browser, in the terminal that holds the link."""
    return sys.platform in ("darwin", "win32") or bool({"DISPLAY", "WAYLAND_DISPLAY"} & os.environ.keys())


def open_run(
    run: Path, rows: "NDArray[np.int64] | None" = None, device: str = "auto", show: Path | None = None
) -> "tuple[Items, dict[str, Any], Audit]":
    """The items of a run, its settings that are not defaults, and its audit, which is made where there is none."""
    from warpi import spec as settings
    from warpi.audit import audit, read_audit
    from warpi.audit.reopen import reopen
    from warpi.audit.table import FILE
    from warpi.data import DATASETS, finer
    from warpi.folder import read_spec
    from warpi.noise import Noise
    from warpi.review.items import of_run

    with settings.read_once():
        opened = reopen(run, device)
        spec: dict[str, Any] = (read_spec(run) or {})["spec"]
        dataset, defaults = settings.DataSpec.stored(spec).read()
    found = read_audit(run) if (run / FILE).exists() else audit(opened)
    shown = _shown(show, dataset, spec["data"])
    items = of_run(dataset, opened.task, opened.method.net, found, rows, shown)
    if not Noise.parse(spec["noise"]).other_name:  # else inputs are not those of the file
        items = _with_files(items, spec["data"], spec.get("meta_data"))
    if spec["data"] not in DATASETS:
        defaults = finer(defaults, len(opened.task.train))
    return items, settings.not_default(spec, defaults), found


def _with_files(items: "Items", data: str, trusted: str | None = None) -> "Items":
    """Where the rows of tables stand, so that an export can copy them."""
    from dataclasses import replace

    from warpi.data.tables import Columns

    if not isinstance(items.dataset.encoding, Columns):
        return items
    return replace(items, source=Path(data), trusted_source=Path(trusted) if trusted else None)


def _of_data(
    named: Mapping[str, Any], rows: "NDArray[np.int64] | None", given: Mapping[str, Any]
) -> "tuple[Items, dict[str, Any]]":
    """The items of data that nothing has been learned from."""
    from dataclasses import asdict

    from warpi.noise import Noise
    from warpi.review.items import of_data
    from warpi.rng import generator
    from warpi.spec import DataSpec, not_default

    spec = DataSpec(**named)
    dataset, defaults = spec.read()
    noise = Noise.parse(spec.noise)
    if noise.other_name:
        raise UserError(f"--noise {noise} replaces inputs, which only a run can show; leave it out")
    y = noise.apply(dataset, generator(given["seed"], "noise"), None).y
    shown = _shown(given["show"], dataset, spec.data)
    settings = not_default({**asdict(spec), "noise": str(noise), "seed": given["seed"]}, defaults)
    return _with_files(of_data(dataset, y, rows, shown), spec.data), settings


def _rows(path: Path | None) -> "NDArray[np.int64] | None":
    """The column `row` of a csv file, in its order."""
    import numpy as np

    if path is None:
        return None
    lines = _lines(path)
    if "row" not in lines[0]:
        raise UserError(
            f"{path} has no column 'row'; give a file as `warpi pick --csv` or `warpi audit --csv` writes it"
        )
    try:
        return np.array([int(line["row"]) for line in lines], dtype=np.int64)
    except (ValueError, OverflowError) as e:
        raise UserError(f"{path}: the column 'row' must hold whole numbers ({e})") from e


def _shown(path: Path | None, dataset: "Dataset", data: str) -> list[dict[str, str]] | None:
    """What else to show of each row: a csv file, or the array `text` of a .npz."""
    from warpi.data.arrays import load_arrays

    if path is not None:
        lines = _lines(path)
        trained = [line for line in lines if line.get("split", "").strip().lower() in ("", "train")]
        return [{key: value for key, value in line.items() if value} for line in trained]
    if dataset.encoding is None and data.lower().endswith(".npz"):
        held = load_arrays(Path(data))
        if isinstance(held, dict) and "text" in held and held["text"].shape == (len(dataset.y),):
            return [{"text": str(text)} for text in held["text"].tolist()]
    return None


def _lines(path: Path) -> list[dict[str, str]]:
    from warpi.data.reading import check_separator, reading

    try:
        with reading(path), path.open(encoding="utf-8-sig", newline="") as file:
            found = csv.DictReader(file)
            check_separator(path, found.fieldnames or ())
            lines = [{key: value or "" for key, value in line.items() if key} for line in found]
    except csv.Error as e:
        raise UserError(f"{path}: not a readable csv file ({e})") from e
    if not lines:
        raise UserError(f"{path}: a first line with the names of the columns and at least one row are needed")
    return lines
