"""Tasks and annotations from the JSON export of a Label Studio project."""

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from warpi.errors import UserError
from warpi.utils.files import read_json

UNKNOWN = "unknown"
"""The annotator of an annotation that does not say who made it."""
_ADVICE = "export the project from Label Studio as JSON (not JSON-MIN)"


class Annotation(NamedTuple):
    """What one annotator chose in one task."""

    annotator: str
    label: str  # '' if the task was skipped or nothing was chosen
    id: str
    time: str  # of the last change
    ground_truth: bool


class Task(NamedTuple):
    """A task with all its annotations."""

    id: str
    data: Mapping[str, Any]
    annotations: tuple[Annotation, ...]


class Export(NamedTuple):
    """The tasks of a project, as read and as they are in the file."""

    tasks: tuple[Task, ...]
    raw: Sequence[Mapping[str, Any]]
    control: tuple[str, str] | None  # from_name and to_name of the choices; None: there are none
    other_results: int  # number of results that are not choices of this control, which are not read


def read_export(path: Path, control: str | None = None) -> Export:
    """Read an export. `control` names the <Choices> tag whose labels are read, if there are several."""
    try:
        raw = read_json(path, _ADVICE)
    except FileNotFoundError as e:
        raise UserError(f"there is no file {path}; {_ADVICE}") from e
    if not isinstance(raw, list) or not raw or not all(_is_task(task) for task in raw):
        raise UserError(f"{path} is not a list of tasks with 'data' and 'annotations'; {_ADVICE}")
    used = Counter(_name(result) for task in raw for result in _results(task) if _is_choice(result))
    name = _choose_control(path, used, control)
    tasks = tuple(_read_task(path, task, name or "") for task in raw)
    n_results = sum(len(_results(task)) for task in raw)
    n_read = sum(n for (first, _), n in used.items() if first == name)
    return Export(tasks, raw, next((pair for pair in used if pair[0] == name), None), n_results - n_read)


def _is_task(task: object) -> bool:
    if not isinstance(task, dict) or not isinstance(task.get("data"), dict):
        return False
    annotations = task.get("annotations", [])
    return isinstance(annotations, list) and all(_is_annotation(annotation) for annotation in annotations)


def _is_annotation(annotation: object) -> bool:
    if not isinstance(annotation, dict):
        return False
    result = annotation.get("result") or []
    return isinstance(result, list) and all(isinstance(part, dict) for part in result)


def _results(task: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return [result for annotation in task.get("annotations", []) for result in annotation.get("result") or []]


def _is_choice(result: Mapping[str, Any]) -> bool:
    value = result.get("value")
    return result.get("type") == "choices" and isinstance(value, dict) and isinstance(value.get("choices"), list)


def _name(result: Mapping[str, Any]) -> tuple[str, str]:
    return str(result.get("from_name", "")), str(result.get("to_name", ""))


def _choose_control(path: Path, used: Mapping[tuple[str, str], int], wanted: str | None) -> str | None:
    names = sorted({first for first, _ in used})
    if wanted is not None and wanted not in names:
        raise UserError(f"{path} has no choices named {wanted!r}; it has {', '.join(names) or 'none'}")
    if wanted is None and len(names) > 1:
        raise UserError(f"{path} has several choices per task; name one of them with --choices: {', '.join(names)}")
    return wanted or (names[0] if names else None)


def _read_task(path: Path, task: Mapping[str, Any], control: str) -> Task:
    name = str(task.get("id", ""))
    annotations = [_read_annotation(path, name, annotation, control) for annotation in task.get("annotations", [])]
    unknown = [i for i, annotation in enumerate(annotations) if annotation.annotator == UNKNOWN]
    for n, i in enumerate(unknown[1:], 2):  # they may be from several people
        annotations[i] = annotations[i]._replace(annotator=f"{UNKNOWN}-{n}")
    return Task(name, task["data"], tuple(annotations))


def _read_annotation(path: Path, task: str, annotation: Mapping[str, Any], control: str) -> Annotation:
    chosen: list[str] = []
    if not annotation.get("was_cancelled"):
        for result in annotation.get("result") or []:
            if _is_choice(result) and _name(result)[0] == control:
                chosen += map(str, result["value"]["choices"])
    annotator = _annotator(annotation)
    if len(chosen) > 1:
        raise UserError(
            f"{path}: task {task}: {annotator} chose {len(chosen)} classes ({', '.join(chosen)[:80]}), but an example "
            'has one class; set choice="single" in the labeling interface and correct these tasks'
        )
    time = annotation.get("updated_at") or annotation.get("created_at") or ""
    truth = bool(annotation.get("ground_truth"))
    return Annotation(annotator, (chosen or [""])[0], str(annotation.get("id", "")), str(time), truth)


def _annotator(annotation: Mapping[str, Any]) -> str:
    """The e-mail address of an annotator, or else the number."""
    who = annotation.get("completed_by")
    if isinstance(who, dict):
        who = who.get("email") or who.get("username") or who.get("id")
    return UNKNOWN if who is None or who == "" else str(who)
