"""Write tasks for Label Studio: the rows of an audit with suggestions, and the decisions of a review."""

from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import quote
from xml.sax.saxutils import quoteattr

from warpi.audit.label_scores import Floats
from warpi.audit.label_studio.import_project import PREFIX, TASK_ID
from warpi.audit.label_studio.read_export import Export
from warpi.audit.result import Audit
from warpi.errors import UserError

MODEL = "warpi"
"""The model version of the predictions that warpi writes."""
LOCAL_FILES = "/data/local-files/?d="
_CONTROL = "label"


def new_tasks(
    audit: Audit,
    cells: Mapping[int, Mapping[str, str]],
    image: str | None,
    decisions: Mapping[int, str | None],
    reviewer: int | None = None,
    prefix: str = LOCAL_FILES,
    only_issues: bool = False,
) -> list[dict[str, Any]]:
    """One task per row of an audit, the most suspicious first, then the other rows that were reviewed.

    `cells` maps each row to its cells by column name; `image` is the column of image paths. `decisions` are the labels
    that people chose by row; None means that they skipped it or were unsure. With `only_issues`, tasks are omitted if
    their labels seem right and nobody reviewed them.
    """
    shown = image or next(iter(next(iter(cells.values()))))
    control = (_CONTROL, _object_name(shown))
    posterior = audit.posterior
    tasks = []
    for i in audit.ranked.tolist():
        row = int(audit.row[i])
        if only_issues and not audit.is_label_issue[i] and row not in decisions:
            continue
        task = _new_task(row, cells[row], image, prefix)
        task["data"] |= _facts(audit, i)
        task["predictions"] = [_prediction(audit, posterior, i, control)]
        tasks.append(task)
    audited = set(audit.row.tolist())
    tasks += [_new_task(row, cells[row], image, prefix) for row in decisions if row not in audited]
    for task in tasks:
        row = task["data"][PREFIX + "row"]
        task["annotations"] = [_decision(decisions[row], control, reviewer)] if row in decisions else []
    return tasks


def add_to_export(
    export: Export,
    audit: Audit,
    cells: Mapping[int, Mapping[str, str]],
    decisions: Mapping[int, str | None],
    reviewer: int | None = None,
    only_issues: bool = False,
) -> list[dict[str, Any]]:
    """Add predictions and decisions to the tasks of an export. Everything that is in the export stays.

    Rows are matched by the column `task_id`, which the import wrote. With `only_issues`, tasks are omitted if their
    labels seem right and nobody reviewed them.
    """
    if export.control is None:
        raise UserError(
            "the export contains no annotations of type 'choices', so the name of the <Choices> tag is unknown; omit "
            "--tasks to write new tasks"
        )
    position = {int(row): i for i, row in enumerate(audit.row.tolist())}
    rows = {cells[row].get(TASK_ID): row for row in cells}
    if None in rows or not {task.id for task in export.tasks} >= {*rows}:
        raise UserError(
            f"the data of the run was not imported from these tasks: its column {TASK_ID} does not match; pass the "
            "export from which the data was imported"
        )
    posterior = audit.posterior
    tasks = []
    for raw, task in zip(export.raw, export.tasks, strict=True):
        added = {**raw}
        row = rows.get(task.id)
        i = None if row is None else position.get(row)
        is_issue = i is not None and bool(audit.is_label_issue[i])
        if only_issues and not is_issue and row not in decisions:
            continue
        if i is not None:
            others = [prediction for prediction in raw.get("predictions") or [] if not _is_ours(prediction)]
            added["data"] = {**raw["data"], **_facts(audit, i)}
            added["predictions"] = [*others, _prediction(audit, posterior, i, export.control)]
        if row is not None and row in decisions:
            decided = _decision(decisions[row], export.control, reviewer)
            added["annotations"] = [*raw.get("annotations", []), decided]
        tasks.append(added)
    return tasks


def _is_ours(prediction: object) -> bool:
    return isinstance(prediction, dict) and prediction.get("model_version") == MODEL


def _new_task(row: int, cells: Mapping[str, str], image: str | None, prefix: str) -> dict[str, Any]:
    data: dict[str, Any] = {PREFIX + "row": row}
    for name, cell in cells.items():
        data[_object_name(name)] = prefix + quote(cell) if name == image else cell
    return {"data": data}


def _object_name(column: str) -> str:
    return "image" if column == "path" else column


def _facts(audit: Audit, i: int) -> dict[str, Any]:
    """Fields by which the tasks can be sorted and filtered in Label Studio."""
    return {
        f"{PREFIX}row": int(audit.row[i]),
        f"{PREFIX}given_label": audit.classes[int(audit.given[i])],
        f"{PREFIX}label_quality": round(float(audit.label_quality[i]), 6),
        f"{PREFIX}is_label_issue": bool(audit.is_label_issue[i]),
    }


def _prediction(audit: Audit, posterior: Floats, i: int, control: tuple[str, str]) -> dict[str, Any]:
    k = int(audit.suggested[i])
    score = float(posterior[i, k])
    return {"model_version": MODEL, "score": round(score, 6), "result": [_choice(audit.classes[k], control)]}


def _decision(label: str | None, control: tuple[str, str], reviewer: int | None) -> dict[str, Any]:
    """A decision as an annotation; a row that was skipped becomes a skipped task."""
    result = [] if label is None else [_choice(label, control)]
    by = {} if reviewer is None else {"completed_by": reviewer}
    return {"result": result, "was_cancelled": label is None, "ground_truth": False, **by}


def _choice(label: str, control: tuple[str, str]) -> dict[str, Any]:
    return {"from_name": control[0], "to_name": control[1], "type": "choices", "value": {"choices": [label]}}


def labeling_interface(classes: Sequence[str], names: Sequence[str], image: str | None) -> str:
    """The labeling interface (XML) of a project for the tasks of `new_tasks`."""
    shown = [image] if image else list(names)
    tag = "Image" if image else "Text"
    objects = [
        f"  <{tag} name={quoteattr(_object_name(name))} value={quoteattr('$' + _object_name(name))}/>" for name in shown
    ]
    choices = [f"    <Choice value={quoteattr(name)}/>" for name in classes]
    control = f'  <Choices name="{_CONTROL}" toName={quoteattr(_object_name(shown[0]))} choice="single">'
    return "\n".join(["<View>", *objects, control, *choices, "  </Choices>", "</View>"]) + "\n"
