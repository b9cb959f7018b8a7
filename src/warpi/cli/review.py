"""`warpi review`: open the review page of a run or of data, or write the decisions made so far."""

import os
import shlex
import sys
import webbrowser
from argparse import SUPPRESS
from collections.abc import Mapping
from contextlib import closing
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from warpi.cli.audit import print_trusted_set
from warpi.cli.data_flags import add_copied_columns, add_data_flags, add_trusted_output, read_names
from warpi.errors import UserError, format_count
from warpi.runs.rerun_command import flag
from warpi.runs.schema import NOT_READ, READ, to_written_names
from warpi.utils.files import unused_name, write_json
from warpi.utils.flags import Parser
from warpi.utils.terminal import say

if TYPE_CHECKING:
    from warpi.audit.decisions import Store
    from warpi.review.open import OpenedRun
    from warpi.review.page_requests import ReviewSession
    from warpi.review.people import People


def review(argv: list[str]) -> None:
    given, settings = _read_flags(argv)
    run = given["run"]
    from warpi.audit.decisions import Store
    from warpi.review.open import open_data, open_run, read_row_list
    from warpi.review.page_requests import ReviewSession
    from warpi.runs.spec import DataSpec

    rows = read_row_list(given["rows"])
    copied = {name: read_names(given[name]) for name in ("id", "keep")}
    if run is None:
        items, settings = open_data(DataSpec(**settings), rows, given["seed"], given["show"], **copied)
    else:
        opened = open_run(run, rows, given["device"], given["show"], **copied)
        items, settings = opened.items, opened.settings
    folder = given["out"] or run / "review"
    with closing(Store(folder / "decisions.sqlite", items.identity)) as store:
        if rows is not None:
            store.remember_random(rows.random)
        items = replace(items, random_rows=frozenset(store.random_rows()))
        session = ReviewSession(items, store, folder, settings, given["blind"])
        if given["accept_above"] is not None or given["undo_accepted"]:
            if run is None:
                raise UserError(
                    "--accept-above and --undo-accepted can only be used with a run, because data given by --data has "
                    "no suggestions"
                )
            _accept(opened, store, given)
        elif given["export"] or given["export_trusted"]:
            _export(session, given)
        else:
            _serve(session, given)


def _read_flags(argv: list[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return all flags, and the settings of the data without a run."""
    parser = Parser(
        "warpi review",
        "Open a page in the browser where a person decides which labels are right. A run is audited first "
        "if it has no audit. With --export or --export-trusted no page is opened; the decisions so far are written. To "
        "apply the suggestions of the audit too, use `warpi correct`.",
    )
    parser.add_argument("run", type=Path, nargs="?", metavar="RUN", help="a run folder; or give --data and --out")
    parser.add("--rows FILE.csv", "review the rows of this list, as `warpi pick --csv` wrote it", Path)
    parser.add("--show FILE.csv", "a csv with one line per row of the data, shown next to each item", Path)
    parser.add("--out DIR", "folder for the decisions (default: RUN/review)", Path)
    parser.add(
        "--blind random|all|none",
        "rows whose given label is hidden until you choose a class; random: those that `warpi pick` drew at random "
        "(default: random; none with more than 10 classes)",
    )
    parser.add("--port N", "port on 127.0.0.1 (default: a free one)", int, 0)
    parser.add("--host ADDRESS", "listen on this address, for other machines (default: 127.0.0.1)")
    parser.add("--tls-cert FILE", "certificate (PEM); without one, connections are not encrypted", Path)
    parser.add("--tls-key FILE", "its private key (PEM)", Path)
    parser.add("--people NAME,NAME,...", "several people review: each gets a link and a part of the rows")
    parser.add("--overlap X", "with --people: share of the rows that two people decide (default: 0.1)", float)
    parser.add("--no-browser", "print the link without opening a browser")
    parser.add("--export FILE", "write the labels of all rows, with the decisions so far (.csv or .json)", Path)
    add_trusted_output(
        parser,
        "write a set for `warpi fit --trusted`: the trusted examples of the run and the decided rows that `warpi pick` "
        "drew at random (without a run: all decided rows). Rows that you chose because they look suspicious are left "
        "out",
        "PATH",
    )
    parser.add(
        "--accept-above P", "accept all suggestions that are more probable than P without looking at them", float
    )
    parser.add("--undo-accepted", "take back the last --accept-above")
    parser.add("--balanced", "with --export-trusted: write the same number of rows per class and omit the rest")
    parser.add_argument("--unbalanced", action="store_true", help=SUPPRESS)  # the default
    add_copied_columns(parser)
    parser.add("--device auto|cpu|cuda", "device to audit the run on", default="auto")
    parser.add("--seed N", "random seed of --noise", int, 0)
    add_data_flags(parser, "data without a run", NOT_READ, has_default=False)
    given = parser.read(argv)
    settings = {name: given[name] for name in READ if name in given}
    run = given["run"]
    if (run is None) == ("data" not in settings):
        raise UserError("pass either a run folder, or --data for data without a run; see warpi review --help")
    if run is not None and settings:
        raise UserError(f"the run defines its data; omit --{next(iter(settings)).replace('_', '-')}")
    if run is None and given["out"] is None:
        raise UserError("missing --out DIR, the folder for the decisions, which data without a run needs")
    return given, settings


def _accept(opened: "OpenedRun", store: "Store", given: Mapping[str, Any]) -> None:
    """Accept suggestions, or undo the last acceptance."""
    from warpi.review.correct import accept_suggestions, undo_accepted
    from warpi.review.progress import correct_command

    run = shlex.quote(str(given["run"]))
    if given["undo_accepted"]:
        rows = undo_accepted(store)
        say(f"{format_count(len(rows), 'accepted suggestion')} taken back")
    else:
        rows = accept_suggestions(opened, store, given["accept_above"])
        say(
            f"accepted {format_count(len(rows), 'suggestion')} more probable than {given['accept_above']:g}; nobody "
            "looked at these rows, so they do not count as checked; take them back with: "
            f"warpi review {run} --undo-accepted"
        )
    say(f"next: warpi review {run}, or {correct_command(run)}")


def correct(argv: list[str]) -> None:
    parser = Parser(
        "warpi correct",
        "Write the data of a run with corrected labels: the decisions of people (`warpi review`) and, for all other "
        "rows, the suggestions of the audit. Three columns are added: given (the original label), changed_by (person, "
        "audit or empty) and label_probability (that the new label is right). To apply decisions only, use "
        "`warpi review RUN --export FILE`.",
    )
    parser.add_argument("run", type=Path, metavar="RUN", help="a run folder; it is audited if it has no audit")
    parser.add_output("--out", "write the corrected data (.csv or .parquet)")
    parser.add("--hf FOLDER", "write the corrected data as a Hugging Face data set, for load_from_disk", Path)
    parser.add(
        "--above P",
        "change a label only if the new one is more probable than this (default: 0, the most probable class)",
        float,
        0.0,
    )
    parser.add("--review DIR", "folder with the decisions (default: RUN/review)", Path)
    add_trusted_output(
        parser, "also write the trusted rows and the checked random rows, for `warpi fit --trusted`", "PATH"
    )
    parser.add_output("--json", "write the numbers of wrong labels before and after, with their intervals")
    parser.add("--device auto|cpu|cuda", "device to audit the run on", default="auto")
    given = parser.read(argv)
    if given["out"] is None and given["hf"] is None:
        raise UserError("missing --out FILE or --hf FOLDER, where to write the corrected data")
    from warpi.review.correct import correct as correct_run, save_dataset, write_corrections, write_trusted_set
    from warpi.review.progress import audit_concerns

    corrections = correct_run(given["run"], given["above"], given["device"], given["review"])
    trusted = given["export_trusted"]
    if trusted:
        print_trusted_set(write_trusted_set(corrections, trusted))
    command = save_dataset(corrections, given["hf"], trusted) if given["hf"] else ""
    if given["out"]:
        command = write_corrections(corrections, given["out"], trusted)
    if not trusted and corrections.items.random_rows:
        say("warpi: add --export-trusted PATH to also trust the random rows that were checked", error=True)
    if given["json"]:
        write_json(given["json"], {name: asdict(getattr(corrections, name)) for name in ("before", "after")})
    print(corrections)
    assert corrections.items.audit is not None
    for concern in audit_concerns(corrections.items.audit):
        say(f"warpi: {concern.problem} {concern.advice.replace('`', '')}", error=True)
    say(f"next: {command}")


def _export(session: "ReviewSession", given: Mapping[str, Any]) -> None:
    from warpi.review.export import fit_command, write_trusted
    from warpi.review.reviewed_labels import dropped_rows, write_corrected

    items = session.items
    decisions = session.store.current_decisions()
    corrected = None
    if given["export"]:
        corrected = write_corrected(items, decisions, given["export"])
        n = sum(decision.label is not None and not decision.is_automatic for decision in decisions.values())
        say(f"{given['export']}: labels of {format_count(len(items.given), 'row')}, {n} of them decided by a person")
        if dropped := len(dropped_rows(items, decisions)):
            say(f"{format_count(dropped, 'row')} omitted, because a copy is kept")
        if corrected != given["export"]:
            say(f"{corrected}: the same labels, for warpi fit --labels {shlex.quote(str(corrected))}")
    if given["export_trusted"]:
        trusted = write_trusted(items, decisions, given["export_trusted"], given["balanced"])
        print_trusted_set(trusted)
        if (trusted.left_out or trusted.corrected_only) and corrected is None:
            say("warpi: add --export FILE.csv to also train on the other corrected labels", error=True)
        say(f"next: {fit_command(items, session.settings, given['export_trusted'], corrected)}")


def _serve(session: "ReviewSession", given: Mapping[str, Any]) -> None:
    from warpi.review.page_requests import ReviewSession
    from warpi.review.people import People
    from warpi.review.server import LOCAL, Server

    host = given["host"] or LOCAL
    tls = _read_tls(given)
    if host not in (LOCAL, "localhost") and tls is None:
        say(
            f"warpi: warning: --host {host} lets other machines connect, and nothing is encrypted: everybody who can "
            "read the traffic can see the data and change decisions; set --tls-cert and --tls-key, or use an SSH "
            "tunnel to 127.0.0.1",
            error=True,
        )
    people, sessions = None, {}
    if given["people"]:
        overlap = 0.1 if given["overlap"] is None else given["overlap"]
        people = People(read_names(given["people"]), session.items, _store_of(session), overlap)
        session.people = people
        for name, store in people.stores.items():
            args = (people.items_of(name), store, session.folder, session.settings, session.blind)
            sessions[name] = ReviewSession(*args, people, name)
    elif given["overlap"] is not None:
        raise UserError("--overlap can only be used with --people")
    with Server(session, given["port"], host, sessions, tls) as server:
        say(server.link, flush=True)
        for name, token in server.tokens.items():
            say(f"{name}: {server.link_with(token)}", flush=True)
        say(f"warpi: {_how_to_open(bool(people))}; Ctrl-C stops; every decision is stored at once", error=True)
        # Without a display, a text browser would take over the terminal.
        has_display = sys.platform in ("darwin", "win32") or {"DISPLAY", "WAYLAND_DISPLAY"} & os.environ.keys()
        if has_display and not given["no_browser"]:
            webbrowser.open(server.link)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            say(f"warpi: decisions are in {session.store.path}; run the same command to continue", error=True)
    if people is not None:
        _print_people(people, session, given)
    else:
        _print_next(session, given)


def _print_next(session: "ReviewSession", given: Mapping[str, Any]) -> None:
    """Print what to do with the decisions so far; nothing if there are none."""
    from warpi.review.export import trusted_name
    from warpi.review.progress import audit_concerns

    if not session.store.current_decisions():
        return
    audit = session.items.audit
    if audit is None:
        trusted = unused_name(trusted_name(session.items))
        say(f"next: {shlex.join([*_command_of(session, given), '--export-trusted', trusted])}")
        return
    first = [concern.advice for concern in audit_concerns(audit) if concern.comes_first]
    advice = first[0] if first and not session.progress()["n_new"] else session.progress()["hint"]
    say(f"next: {advice.replace('`', '')}")


def _command_of(session: "ReviewSession", given: Mapping[str, Any], rows: Path | None = None) -> list[str]:
    """The words of the command that opened the review, or opens it with another list of rows."""
    if given["run"] is not None:
        words = [str(given["run"])]
    else:
        words = [word for name, value in to_written_names(session.settings).items() for word in flag(name, value)]
    listed = rows or given["rows"]
    return [
        *("warpi", "review", *words),
        *(["--out", str(given["out"])] if given["out"] else []),
        *(["--rows", str(listed)] if listed else []),
    ]


def _how_to_open(people: bool) -> str:
    if people:
        return "the first link shows all rows; send every other link to its person only"
    return "open this link on this machine"


def _read_tls(given: Mapping[str, Any]) -> tuple[Path, Path] | None:
    if (given["tls_cert"] is None) != (given["tls_key"] is None):
        raise UserError("set both --tls-cert and --tls-key")
    return None if given["tls_cert"] is None else (given["tls_cert"], given["tls_key"])


def _store_of(session: "ReviewSession") -> "Store":
    from warpi.audit.decisions import Store

    assert isinstance(session.store, Store)
    return session.store


def _print_people(people: "People", session: "ReviewSession", given: Mapping[str, Any]) -> None:
    for line in people.describe():
        say(line)
    file = people.write_disputes(session.folder)
    if file is not None:
        rows = format_count(len(people.disputes()), "row")
        say(f"{file}: {rows} with different labels")
        say(f"next: {shlex.join(_command_of(session, given, file))}")
    else:
        _print_next(session, given)
