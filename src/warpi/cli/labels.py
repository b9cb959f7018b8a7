"""`warpi annotators`, `duplicates`, `label-studio` and `audit --probabilities`: labels and data from elsewhere.

Modules that are slow to import are imported only when a command runs.
"""

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from warpi.cli.data_flags import read_names
from warpi.errors import UserError, format_count, unknown
from warpi.utils.files import write_atomically, write_json
from warpi.utils.flags import Parser
from warpi.utils.terminal import cell, say

if TYPE_CHECKING:
    from warpi.audit.annotators.consensus import Consensus
    from warpi.audit.result import Audit
    from warpi.data.duplicates.result import Duplicates

_NEED_PROBABILITIES = ("data", "label", "labels", "trusted", "classes", "out")
_NEED_RUN = ("folds", "rows", "checked")


def add_probability_flags(parser: Parser) -> None:
    parser.start_group("the probabilities of any model, instead of a run")
    parser.add("--probabilities FILE", ".npy, .csv or .parquet: one row per example, one column per class", Path)
    parser.add("--data PATH", "the data, for its labels, class names, ids and image files")
    parser.add("--label COLUMN", "column of --data with the labels (default: label)")
    parser.add(
        "--labels FILE",
        "the given labels, one per row: .npy, or a table with the column label (not the file of `warpi fit --labels`)",
        Path,
    )
    parser.add(
        "--trusted FILE",
        "table with the columns row (from 0) and true_label of checked rows (not the file of `warpi fit --trusted`)",
        Path,
    )
    parser.add("--classes A,B,...", "the class of each column of the probabilities (default: the class names, sorted)")
    parser.add("--out DIR", "write audit.csv and audit.json into this folder", Path)


def check_probability_flags(given: dict[str, Any]) -> None:
    """Check that there is either a run or probabilities; `--out` sets `--csv` and `--json`."""
    if not given["probabilities"]:
        if given["run"] is None:
            raise UserError("missing DIR, a finished run folder, or --probabilities FILE")
        if wrong := [name for name in _NEED_PROBABILITIES if given[name] is not None]:
            raise UserError(f"--{wrong[0]} can only be used with --probabilities FILE; a run defines its data")
        return
    if given["run"] is not None:
        raise UserError("pass either a run folder or --probabilities, not both")
    if wrong := [name for name in _NEED_RUN if given[name]]:
        raise UserError(f"--{wrong[0]} needs a run; pass checked rows with --trusted FILE")
    if not given["data"] and not given["labels"]:
        raise UserError("--probabilities needs the given labels: --labels FILE or --data PATH")
    if given["out"]:
        try:
            given["out"].mkdir(parents=True, exist_ok=True)
        except OSError as e:
            raise UserError(f"cannot create the folder {given['out']}: {e.strerror}; choose another --out") from e
        for name in ("csv", "json"):
            given[name] = given[name] or given["out"] / f"audit.{name}"


def audit_probabilities(given: Mapping[str, Any]) -> "tuple[Audit, list[str] | None, dict[str, list[str]]]":
    """The audit, the image files of the data, and the columns to copy."""
    import numpy as np

    from warpi.audit.any_model.audit_array import audit_probabilities
    from warpi.audit.any_model.read_files import read_probabilities

    classes = read_names(given["classes"]) or None
    labels: Any = given["labels"]
    paths, copied = None, {}
    if given["data"]:
        from warpi.datasets.columns.copied import read_copied_columns
        from warpi.runs.spec import DataSpec

        dataset = DataSpec(data=given["data"], label=given["label"]).read()
        names = read_probabilities(given["probabilities"])[1]
        if labels is None and not classes and not names:
            classes, labels = list(dataset.classes), dataset.y.numpy()
        elif labels is None:
            labels = np.array(dataset.classes)[dataset.y.numpy()]
        paths = list(dataset.files.paths) if dataset.files else None
        ids, keep = (read_names(given[name]) for name in ("id", "keep"))
        copied = read_copied_columns(given["data"], dataset.encoding, ids, keep)
    values = (given["probabilities"], labels, given["trusted"], classes, given["threshold"])
    result = audit_probabilities(*values, keep_posterior=False)  # no table shows it
    return result, paths, copied


def annotators(argv: list[str]) -> None:
    parser = Parser(
        "warpi annotators",
        "Combine the labels of several annotators: the most probable class of each row, how good each annotator is, "
        "and which rows to review.",
    )
    parser.add_argument(
        "table", type=Path, metavar="TABLE", help="one column per annotator, or the columns row, annotator and label"
    )
    parser.add_output("--out", "write the consensus, one line per row", required=True)
    parser.add("--columns A,B,...", "columns of the annotators (default: label_... and annotator...)")
    parser.add("--probabilities FILE", "probabilities of a classifier for the rows, to combine with the labels", Path)
    parser.add("--trusted FILE", "table with the columns row (from 0) and true_label of checked rows", Path)
    parser.add("--classes A,B,...", "the class of each column of the probabilities (default: the class names, sorted)")
    parser.add_output("--json", "write the quality of the annotators as JSON")
    parser.add("--quiet", "print only warnings and errors")
    given = parser.read(argv)
    from warpi.audit.annotators.consensus import combine_annotators

    result = combine_annotators(
        given["table"],
        columns=read_names(given["columns"]),
        probabilities=given["probabilities"],
        trusted=given["trusted"],
        classes=read_names(given["classes"]) or None,
    )
    result.to_csv(given["out"])
    if given["json"]:
        write_json(given["json"], result.summary())
    if not given["quiet"]:
        _print_consensus(result, given["out"])


def _print_consensus(consensus: "Consensus", out: Path) -> None:
    from rich.console import Console
    from rich.table import Table

    summary = consensus.summary()
    rows, labels = format_count(summary["n"], "row"), format_count(summary["n_labels"], "label")
    say(f"{rows} with {labels} by {format_count(len(summary['annotators']), 'annotator')}")
    table = Table(box=None)
    for name in ("annotator", "labels", "right %", "90 % interval", "trusted rows"):
        table.add_column(name, justify="left" if name == "annotator" else "right")
    for quality in sorted(summary["annotators"], key=lambda quality: quality["accuracy"] or 0.0):
        accuracy, interval = "", ""
        if quality["n"]:
            accuracy = f"{100 * quality['accuracy']:.1f}"
            interval = f"{100 * quality['low']:.1f} to {100 * quality['high']:.1f}"
        table.add_row(*map(cell, (quality["annotator"], quality["n"], accuracy, interval, quality["checked"])))
    Console(highlight=False).print(table)
    if not any(quality["checked"] for quality in summary["annotators"]):
        say(
            "without trusted rows, the accuracies assume that annotators make independent mistakes, and may be too high"
        )
    right = summary["consensus"]
    interval = f"90 % interval {100 * right['low']:.1f} to {100 * right['high']:.1f}"
    say(
        f"{out}: {100 * right['accuracy']:.1f} % of the labels are right ({interval}); {summary['to_review']} to review"
    )
    say(f"next: warpi fit --data {out} --drop n_labels,agreement,review --out DIR")


def label_studio(argv: list[str]) -> None:
    parser = Parser(
        "warpi label-studio",
        "Import the JSON export of a Label Studio project, or export the rows of a run as tasks with suggestions.",
    )
    parser.add_argument("action", metavar="import|export", help="import a project, or export a run")
    parser.add_argument(
        "source", type=Path, metavar="EXPORT.json|RUN", help="import: the export of a project; export: a run folder"
    )
    parser.add("--out PATH", "import: folder for the tables; export: file for the tasks", Path, required=True)
    parser.add("--choices NAME", "name of the choices that hold the labels, if a task has several")
    parser.start_group("import")
    parser.add("--field NAME", "field with the images (default: found by the names of the files)")
    parser.add("--consensus", "label tasks by the most probable class (`warpi annotators`), not by majority")
    parser.start_group("export")
    parser.add("--tasks FILE", "the export from which the data was imported; suggestions are added to its tasks", Path)
    parser.add("--issues", "write only the tasks whose labels are probably wrong, and those that were decided")
    parser.add("--decisions", "also write the decisions of `warpi review` as annotations")
    parser.add("--reviewer N", "with --decisions: number of the Label Studio user who made them", int)
    parser.add("--prefix TEXT", "put before the paths of images (default: /data/local-files/?d=)")
    parser.add_output("--interface", "write a labeling interface (XML) for new tasks")
    parser.add("--device auto|cpu|cuda", "device to audit the run on", default="auto")
    given = parser.read(argv)
    actions = {"import": _import_label_studio, "export": _export_label_studio}
    if given["action"] not in actions:
        raise unknown("action", given["action"], actions)
    actions[given["action"]](given)


def _import_label_studio(given: Mapping[str, Any]) -> None:
    from warpi.audit.label_studio.import_project import import_project

    options = {name: given[name] for name in ("choices", "field", "consensus")}
    done = import_project(given["source"], given["out"], **options)
    labeled = format_count(done.n_labeled, "labeled image" if done.images else "labeled row")
    say(f"{done.tasks}: {labeled}, {done.n_trusted} of them by a ground truth (trusted)")
    say(f"{done.annotators}: {format_count(done.n_labels, 'label')} by {format_count(len(done.names), 'annotator')}")
    if done.unlabeled:
        say(f"{done.unlabeled}: {format_count(done.n_unlabeled, 'task')} without a label")
    if done.other_results:
        say(f"ignored: {format_count(done.other_results, 'result')} of other kinds")
    root = " --root FOLDER" if done.images else ""
    say(f"next: warpi fit --data {shlex.quote(str(done.tasks))}{root} --out DIR")


def _export_label_studio(given: Mapping[str, Any]) -> None:
    from warpi.audit.label_studio.export_run import export_run
    from warpi.audit.label_studio.export_tasks import LOCAL_FILES

    decisions = given["source"] / "review" / "decisions.sqlite" if given["decisions"] else None
    if decisions and not decisions.exists():
        raise UserError(f"there are no decisions in {decisions}; make some with: warpi review {given['source']}")
    prefix = LOCAL_FILES if given["prefix"] is None else given["prefix"]
    options = {name: given[name] for name in ("tasks", "choices", "reviewer", "device")}
    options["only_issues"] = given["issues"]
    tasks, interface = export_run(given["source"], decisions=decisions, prefix=prefix, **options)
    write_json(given["out"], tasks)
    if given["interface"]:
        write_atomically(given["interface"], interface.encode())
    decided = sum(bool(task.get("annotations")) for task in tasks)
    n_tasks = format_count(len(tasks), "task")
    say(f"{given['out']}: {n_tasks}, {decided} of them with annotations; import the file in Label Studio")


def duplicates(argv: list[str]) -> None:
    parser = Parser(
        "warpi duplicates",
        "Find exact and near copies within and between training, trusted and test rows, copies with contradicting "
        "labels, outliers, and blank or broken images. Nothing is trained or changed.",
    )
    parser.add_argument("data", metavar="DATA", help="the data as for `warpi fit --data`")
    parser.add("--trusted FILE", "trusted rows to compare with: a file or folder of the same kind")
    parser.add("--test FILE", "test rows to compare with: a file or folder of the same kind")
    parser.add("--label COLUMN", "column with the labels (default: label)")
    parser.add("--root DIR", "folder that the paths of a list of images are relative to")
    parser.add("--drop A,B,...", "columns of a table to ignore, such as ids: rows that differ only there are copies")
    parser.add("--exact", "find exact copies and broken images only, which is faster")
    parser.add_output("--csv", "write a table with one line per row")
    parser.add_output("--json", "write the counts as JSON")
    parser.add("--quiet", "print only warnings and errors")
    given = parser.read(argv)
    from warpi.audit.duplicates.find import find_duplicates

    settings: dict[str, Any] = {name: given[name] for name in ("label", "root") if given[name]}
    if given["drop"]:
        settings["drop"] = tuple(read_names(given["drop"]))
    others = {name: given[name] for name in ("trusted", "test")}
    found = find_duplicates(given["data"], **others, near=not given["exact"], **settings)
    if given["csv"]:
        found.to_csv(given["csv"])
    if given["json"]:
        write_json(given["json"], found.summary())
    if not given["quiet"]:
        _print_duplicates(found, listed=given["csv"] is not None)


def _print_duplicates(found: "Duplicates", listed: bool, limit: int = 5) -> None:
    """Print the counts, and the first groups of copies with different labels or in different parts."""
    for line in found.describe():
        say(line)
    matters = found.labels_differ | found.across_parts
    groups = list(dict.fromkeys(found.group[matters].tolist()))
    for group in groups[:limit]:
        members = (found.group == group).nonzero()[0].tolist()
        names = (f"{found.part[i]} {found.path[i] if found.path else found.row[i]}" for i in members[:4])
        labels = ", ".join(sorted({found.label[i] for i in members}))
        say(f"  copies: {'; '.join(names)}{'; ...' if len(members) > 4 else ''} (labels: {labels})")
    if len(groups) > limit:
        say(f"  ... and {format_count(len(groups) - limit, 'more such group')}")
    if (found.group >= 0).any():
        table = "" if listed else "--csv FILE lists all copies; "
        say(f"{table}after warpi fit, warpi review RUN keeps one of each (key D)")
