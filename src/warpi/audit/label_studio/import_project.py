"""Write a Label Studio export as tables that the other commands read: tasks, annotators, tasks without a label."""

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import parse_qs, unquote, urlsplit

from warpi.audit.label_studio.read_export import Annotation, Export, Task, read_export
from warpi.data.decode import SUFFIXES
from warpi.datasets.label_columns import CORRECTION_COLUMNS, GIVEN, LABEL_COLUMNS
from warpi.errors import UserError
from warpi.utils.files import format_csv, write_csv

TASK_ID = "task_id"
PREFIX = "warpi_"
"""Prefix of the fields that an export adds to the data of a task. An import omits them."""
_RESERVED = {"label", "path", TASK_ID, *LABEL_COLUMNS, *GIVEN, *CORRECTION_COLUMNS}
_BUCKETS = ("http", "https", "s3", "gs", "azure-blob")
_ANNOTATOR_COLUMNS = ("row", TASK_ID, "annotator", "label", "earlier_labels", "ground_truth", "annotation_id", "time")


class Imported(NamedTuple):
    """The files that an import wrote, and counts of their content."""

    tasks: Path
    annotators: Path
    unlabeled: Path | None
    n_labeled: int
    n_unlabeled: int
    n_labels: int
    names: tuple[str, ...]  # of the annotators
    n_trusted: int
    other_results: int
    images: str | None  # the field with the images


def import_project(
    path: Path, out: Path, *, choices: str | None = None, field: str | None = None, consensus: bool = False
) -> Imported:
    """Write `tasks.csv`, `annotators.csv` and, if some tasks have no label, `unlabeled.csv` into a folder.

    `field` names the field of the images (default: found by the names of the files). The label of a task is that of a
    ground truth, else the most frequent one, or with `consensus` the most probable one by `combine_annotators`.
    """
    export = read_export(path, choices)
    labeled = [task for task in export.tasks if any(annotation.label for annotation in task.annotations)]
    unlabeled = [task for task in export.tasks if not any(annotation.label for annotation in task.annotations)]
    if not labeled:
        raise UserError(f"{path}: no task has a label; label some of them first")
    field = _find_images(export, field)
    out.mkdir(parents=True, exist_ok=True)
    annotators = out / "annotators.csv"
    write_csv(annotators, _ANNOTATOR_COLUMNS, _annotator_lines(labeled))
    labels = _combine(annotators) if consensus else [_majority(task.annotations) for task in labeled]
    trusted = [_truth(task) for task in labeled]
    extra: dict[str, Sequence[str]] = {}
    if any(trusted):
        extra = {"trusted": [str(int(bool(label))) for label in trusted]}
        extra["given"] = [_majority_of_others(task) if _truth(task) else "" for task in labeled]
        labels = [truth or label for truth, label in zip(trusted, labels, strict=True)]
    _write_tasks(out / "tasks.csv", labeled, field, {"label": labels, **extra})
    if unlabeled:
        skipped = [_join(annotation.annotator for annotation in task.annotations) for task in unlabeled]
        _write_tasks(out / "unlabeled.csv", unlabeled, field, {"skipped_by": skipped})
    annotations = [annotation for task in export.tasks for annotation in task.annotations]
    return Imported(
        out / "tasks.csv",
        annotators,
        out / "unlabeled.csv" if unlabeled else None,
        len(labeled),
        len(unlabeled),
        sum(bool(annotation.label) for annotation in annotations),
        tuple(sorted({annotation.annotator for annotation in annotations})),
        sum(map(bool, trusted)),
        export.other_results,
        field,
    )


def _truth(task: Task) -> str:
    """The label of the last ground truth of a task; '' if there is none."""
    truths = [annotation for annotation in task.annotations if annotation.ground_truth and annotation.label]
    return _last(truths).label if truths else ""


def _last(annotations: Sequence[Annotation]) -> Annotation:
    """The annotation that was changed last. If times are equal, it is the later one in the export."""
    return max(enumerate(annotations), key=lambda pair: (pair[1].time, pair[0]))[1]


def _majority(annotations: Sequence[Annotation]) -> str:
    """The most frequent label, counting each annotator once. In a tie, it is the first one in the export."""
    return Counter(last.label for last, _ in _by_annotator(annotations) if last.label).most_common(1)[0][0]


def _majority_of_others(task: Task) -> str:
    """The most frequent label without ground truths; '' if there is no other."""
    others = [annotation for annotation in task.annotations if not annotation.ground_truth and annotation.label]
    return _majority(others) if others else ""


def _by_annotator(annotations: Sequence[Annotation]) -> list[tuple[Annotation, list[str]]]:
    """The last annotation of each annotator, and the earlier labels. A skipped task does not replace a label."""
    groups: dict[str, list[Annotation]] = {}
    for annotation in annotations:
        groups.setdefault(annotation.annotator, []).append(annotation)
    pairs = []
    for group in groups.values():
        labeled = [annotation for annotation in group if annotation.label]
        last = _last(labeled or group)
        pairs.append((last, [annotation.label for annotation in labeled if annotation is not last]))
    return pairs


def _annotator_lines(tasks: Sequence[Task]) -> Iterable[list[object]]:
    for row, task in enumerate(tasks):
        for last, earlier in _by_annotator(task.annotations):
            cells = [last.annotator, last.label, _join(earlier), int(last.ground_truth), last.id, last.time]
            yield [row, task.id, *cells]


def _join(names: Iterable[str]) -> str:
    """Join names with `;`. Names that contain one are quoted like cells of a csv table."""
    return format_csv(names, [], separator=";")[:-1]


def _combine(annotators: Path) -> list[str]:
    from warpi.audit.annotators.consensus import combine_annotators

    consensus = combine_annotators(annotators)
    return [consensus.classes[k] for k in consensus.label.tolist()]


def _find_images(export: Export, field: str | None) -> str | None:
    """The field that contains image files in every task; None if there is none."""
    common = set.intersection(*({*task.data} for task in export.tasks))
    if field is not None:
        if field not in common:
            raise UserError(f"not every task has the field {field!r}; fields of all tasks: {', '.join(sorted(common))}")
        return field
    names = [name for name in sorted(common) if all(_is_image(task.data[name]) for task in export.tasks)]
    if len(names) > 1:
        raise UserError(f"several fields contain images; name one of them with --field: {', '.join(names)}")
    return names[0] if names else None


def _is_image(value: object) -> bool:
    return isinstance(value, str) and local_path(value).lower().endswith(SUFFIXES)


def local_path(value: str) -> str:
    """The path of a file, relative to the folder of the files, from the address that Label Studio stores.

    `/data/local-files/?d=a/b.jpg` becomes a/b.jpg, `/data/upload/1/b.jpg` becomes upload/1/b.jpg, and
    `s3://bucket/b.jpg` becomes bucket/b.jpg.
    """
    if "\n" in value or "\0" in value:
        return value
    try:
        parts = urlsplit(value)
    except ValueError:  # such as an IPv6 address that does not end
        return value
    if parts.path.rstrip("/").endswith("/data/local-files"):
        return parse_qs(parts.query).get("d", [""])[0]
    if parts.path.startswith("/data/upload/"):
        return unquote(parts.path.removeprefix("/data/"))
    if parts.scheme in _BUCKETS:
        return f"{parts.netloc}{unquote(parts.path)}"
    return value


def _write_tasks(path: Path, tasks: Sequence[Task], field: str | None, added: Mapping[str, Sequence[str]]) -> None:
    """Write one line per task: its id, the path of its image or the fields of its data, and more columns."""
    names = list(dict.fromkeys(name for task in tasks for name in task.data if not name.startswith(PREFIX)))
    header = [TASK_ID, *(["path"] if field else []), *map(_column, names), *added]
    if len({*header}) != len(header):
        raise UserError(f"two fields of the tasks would become the same column: {', '.join(header)}; rename one")
    lines = []
    for i, task in enumerate(tasks):
        image = [local_path(str(task.data[field]))] if field else []
        lines.append(
            [task.id, *image, *(_cell(task.data.get(name)) for name in names), *(v[i] for v in added.values())]
        )
    write_csv(path, header, lines)


def _column(name: str) -> str:
    """The name of a column. Names with a special meaning in warpi get a prefix."""
    return f"data_{name}" if name.strip().lower() in _RESERVED else name


def _cell(value: Any) -> str:
    if value is None:
        return ""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
