"""`warpi review`: from a run, or from data alone, to the page; or straight to the exports."""

import os
import shlex
import sys
import webbrowser
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

from warpi.cli.data_flags import add_data_flags
from warpi.errors import UserError
from warpi.utils.flags import Parser


def review(argv: list[str]) -> None:
    from warpi.runs.spec import NOT_READ, READ

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
    add_data_flags(parser, "data without a run", NOT_READ)
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
    from warpi.review.decisions import Store
    from warpi.review.export import fit_command, write_corrected, write_trusted
    from warpi.review.open import open_data, open_run, read_row_list
    from warpi.review.session import ReviewSession

    run, rows = given["run"], read_row_list(given["rows"])
    if run is None:
        items, spec = open_data(named, rows, given)
    else:
        items, spec, _ = open_run(run, rows, given["device"], given["show"])
    folder = given["out"] or run / "review"
    with closing(Store(folder / "decisions.sqlite", items.identity)) as store:
        if not (given["export"] or given["trusted"]):
            _serve(ReviewSession(items, store, folder, spec), given)
            return
        standing, corrected = store.current_decisions(), None
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
