"""Write the decisions of a review: corrected labels of all rows, and a trusted set for `warpi fit --trusted`."""

import io
import itertools
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from warpi.audit.checked_labels import CHECKED
from warpi.audit.decisions import Decision
from warpi.data.examples import Examples, TensorExamples
from warpi.data.image_files import FileExamples
from warpi.data.numeric import Columns, Embedded
from warpi.data.overlap import mark_shared
from warpi.data.split import Split
from warpi.datasets.label_columns import GIVEN
from warpi.errors import UserError
from warpi.review.items import Items
from warpi.review.open import open_data
from warpi.review.reviewed_labels import NameTaken, accepted_labels, dropped_rows, final_labels, write_corrected
from warpi.review.show_input import feature_cells, path_inside, pixels, png
from warpi.review.trusted_set import TrustedSetSummary, balance_classes, format_texts, original_rows
from warpi.runs.rerun_command import command
from warpi.runs.spec import DataSpec
from warpi.utils.files import format_csv, sha256, write_atomically

ExampleRef = tuple[Examples, int]
"""An example: the `Examples` to which it belongs, and its row in them."""


def trusted_name(items: Items) -> str:
    """Default name of a trusted set: a folder for images, a file for everything else."""
    if items.dataset.files is not None:
        return "trusted"
    has_cells = isinstance(items.dataset.encoding, Columns) or isinstance(items.examples, Embedded)
    return "trusted.csv" if has_cells else "trusted.npz"


class NothingToTrust(UserError):
    """Raised if no row can be exported as trusted."""


def write_trusted(
    items: Items,
    decisions: Mapping[int, Decision],
    path: Path,
    balanced: bool = False,
    given: Mapping[int, str] | None = None,
) -> TrustedSetSummary:
    """Write the trusted examples: all that were trusted before, and decided rows that were not chosen by their scores.

    If `balanced`, there is the same number of every class, and examples that were trusted before are preferred. Images
    become a folder of links with one subfolder per class, or a .csv of paths relative to the folder of the data. Tables
    become a .csv with all columns of the original and its cells. Everything else becomes a .npz with x and y. An
    existing set with different content is never replaced, because runs may depend on it.
    """
    labeled = final_labels(items, decisions)
    chosen = {row: k for row, k in labeled.items() if items.represents_data(row)}
    separate = items.trusted is not None and not items.shares(items.trusted.examples)
    earlier = _earlier_examples(items, chosen) if separate else None
    labels = [*(earlier.y.tolist() if earlier else ()), *chosen.values()]
    if not labels:
        raise NothingToTrust(
            "no example is trusted yet: decide rows that `warpi pick` drew at random (warpi review --rows LIST.csv)"
            if labeled
            else "no example is trusted yet; keep or change the labels of some examples first"
        )
    refs: list[ExampleRef] = [(earlier.examples, row) for row in earlier.rows.tolist()] if earlier else []
    refs += [(items.examples, row) for row in chosen]
    n_first = len(labels) - len(chosen) + len(items.trusted_rows)
    before: list[str | None] = [None if given else ""] * (len(labels) - len(chosen))
    before += [_given_before(items, decisions, row) if given is None else given.get(row) for row in chosen]
    summary = _write_examples(items, refs, labels, path, balanced, n_first, given=before)
    return summary._replace(corrected_only=len(labeled) - len(chosen))


def write_checked_rows(
    path: Path, rows: Sequence[Mapping[str, str]], listed: Path, spec: DataSpec, seed: int, balanced: bool
) -> TrustedSetSummary:
    """Write the checked rows of a pick list as a trusted set, which may replace an existing file.

    `rows` are the lines of the file `listed` (see `audit.checked_labels`), and `spec` names the data. Informative rows,
    which were chosen by their scores, are omitted.
    """
    items, _ = open_data(spec, seed=seed)
    all_checked = [cells for cells in rows if cells[CHECKED]]
    checked = [cells for cells in all_checked if cells.get("part") != "informative"]
    if not checked:
        raise NothingToTrust(f"no row of {listed} that was drawn at random is checked, so none can be trusted")
    try:
        chosen = {int(cells["row"]): cells[CHECKED] for cells in checked}
    except ValueError as e:
        raise UserError(f"{listed}: the column row is not as `warpi pick` wrote it ({e})") from e
    for cells in checked:
        _check_same_row(items, int(cells["row"]), cells, listed)
    labels = [items.classes.index(label) for label in chosen.values()]
    given = [cells["given_label"] for cells in checked]
    refs = [(items.examples, row) for row in chosen]
    summary = _write_examples(items, refs, labels, path, balanced, replace=True, given=given)
    return summary._replace(corrected_only=len(all_checked) - len(checked))


def _given_before(items: Items, decisions: Mapping[int, Decision], row: int) -> str:
    """The label that a row had before a person checked it; '' if it is not known."""
    if row in decisions and decisions[row].given:
        return decisions[row].given
    dataset = items.dataset
    if dataset.trusted is not None and bool(dataset.trusted[row]):  # the label was corrected in place
        k = -1 if dataset.given is None else int(dataset.given[row])
        return items.classes[k] if k >= 0 else ""
    return items.classes[int(items.given[row])]


def _check_same_row(items: Items, row: int, cells: Mapping[str, str], listed: Path) -> None:
    """Raise if a line of a list is about another row, so that no label is assigned to an unchecked example."""
    dataset = items.dataset
    if not 0 <= row < len(dataset.y):
        raise UserError(f"row {row} is checked, but {dataset.name} has {len(dataset.y)} rows; is it the same data?")
    if cells[CHECKED] not in dataset.classes:
        label = cells[CHECKED]
        raise UserError(f"row {row} is checked as {label!r}, which is not a class of {dataset.name}; leave it blank")
    if dataset.files is not None and cells.get("path"):
        name = cells["path"]
        expected = {dataset.files.paths[row]}
    else:  # the test rows of a run have no added noise
        name = cells["given_label"]
        expected = {dataset.classes[int(k)] for k in (items.given[row], dataset.y[row])}
    if name not in expected:
        raise UserError(
            f"row {row} is {name!r} in {listed}, but {' or '.join(map(repr, sorted(expected)))} in {dataset.name}: "
            "rows were moved or relabeled; use the same --data, --noise and --seed as when the list was made"
        )


def _write_examples(
    items: Items,
    refs: Sequence[ExampleRef],
    labels: Sequence[int],
    path: Path,
    balanced: bool,
    n_first: int = 0,
    replace: bool = False,
    given: Sequence[str | None] = (),
) -> TrustedSetSummary:
    """Write examples with their labels. If `balanced`, the same number of every class, preferring the first `n_first`.

    `given` are the labels before they were checked, which a table keeps in a column of this name. For '', the cell in
    the file of the row is kept; for None, it is empty.
    """
    y = torch.tensor(labels, dtype=torch.int64)
    kept = balance_classes(y, n_first) if balanced else torch.arange(len(y))
    names = [items.classes[k] for k in y[kept].tolist()]
    _write(items, [refs[i] for i in kept.tolist()], names, path, replace, [given[i] for i in kept.tolist()])
    return TrustedSetSummary.of(path, y, len(kept), items.classes)


def _earlier_examples(items: Items, chosen: Mapping[int, int]) -> Split:
    """Trusted examples from a separate file, without copies of the chosen rows."""
    assert items.trusted is not None
    rows = torch.tensor(list(chosen), dtype=torch.int64)
    y = torch.tensor(list(chosen.values()), dtype=torch.int64)
    return items.trusted.subset(~mark_shared(items.trusted, Split(items.examples, rows, y)))


def _write(
    items: Items,
    refs: Sequence[ExampleRef],
    names: Sequence[str],
    path: Path,
    replace: bool,
    given: Sequence[str | None],
) -> None:
    suffix = path.suffix.lower()
    allowed = {"trusted": ("", ".csv"), "trusted.csv": (".csv",)}.get(trusted_name(items), (".npz",))
    if suffix not in allowed:
        kinds = " or ".join("a folder" if kind == "" else f"a {kind} file" for kind in allowed)
        raise UserError(f"the trusted set of {items.dataset.name} must be {kinds}, got {path}")
    if not suffix:
        _write_folder(path, _links(items, refs, names, path))
        return
    if suffix == ".npz":
        arrays = io.BytesIO()
        x = torch.stack([_input(*ref) for ref in refs])
        np.savez_compressed(arrays, x=x.numpy(), y=np.array(names))
        content = arrays.getvalue()
    elif isinstance(items.examples, Embedded) and items.dataset.files is None:
        content = format_texts(refs, names)
    elif items.dataset.files is None:
        content = _format_table(items, refs, names, given)
    else:
        content = _format_image_list(items, refs, names, path)
    if path.exists() and not replace and path.read_bytes() != content:
        raise NameTaken(path, "--export-trusted")
    write_atomically(path, content)


def _input(examples: Examples, row: int) -> Tensor:
    if not isinstance(examples, TensorExamples):
        raise UserError("arrays and image files cannot be mixed in one trusted set")
    return examples.x[row].cpu()


def _format_table(items: Items, refs: Sequence[ExampleRef], names: Sequence[str], given: Sequence[str | None]) -> bytes:
    """A csv with the original cells of each row, or cells reconstructed from its features if no file is known."""
    columns = items.dataset.encoding
    assert isinstance(columns, Columns)
    originals = original_rows(items.source, columns.label) if items.source else []
    if originals and len(originals) != len(items.given):
        raise UserError(f"{items.source} has changed while it was read; run the command again")
    if items.trusted_source is not None:
        trusted_originals = original_rows(items.trusted_source, columns.label)
    else:
        trusted_originals = original_rows(items.source, columns.label, "trusted") if items.source else []
    header = list(originals[0]) if originals else [*columns.features, columns.label]
    header += [] if GIVEN[0] in header else [GIVEN[0]]
    lines = []
    for (examples, row), name, before in zip(refs, names, given, strict=True):
        rows = originals if items.shares(examples) else trusted_originals
        cells = rows[row] if rows else dict(feature_cells(examples, row, columns))
        kept = cells.get(GIVEN[0], "") if before == "" else before
        cells = {**cells, columns.label: name, GIVEN[0]: kept or ""}
        lines.append([cells.get(column, "") for column in header])  # a trusted file may lack columns that are dropped
    return format_csv(header, lines).encode()


def _image_file(items: Items, examples: Examples, row: int) -> tuple[str, str] | None:
    """Folder and path of an image; None if only its pixels are known."""
    if isinstance(examples, FileExamples):
        return examples.root, examples.paths[row]
    if isinstance(examples, Embedded) and examples.originals and examples.originals.root is not None:
        return examples.originals.root, examples.originals.values[row]
    files = items.dataset.files
    return (files.root, files.paths[row]) if files and examples is items.examples else None


def _format_image_list(items: Items, refs: Sequence[ExampleRef], names: Sequence[str], path: Path) -> bytes:
    """A csv of image paths relative to the folder of the data."""
    files = items.dataset.files
    assert files is not None
    root = os.path.join(os.path.abspath(files.root), "")
    lines = []
    for ref, name in zip(refs, names, strict=True):
        file = _image_file(items, *ref)
        full_path = os.path.abspath(os.path.join(*file)) if file else ""
        if not full_path.startswith(root):
            raise UserError(f"some images are outside {files.root}; export a folder: --export-trusted {path.stem}")
        lines.append([full_path.removeprefix(root), name])
    try:
        return format_csv(["path", "label"], lines).encode()
    except UnicodeEncodeError as e:
        raise UserError(f"some image file names are not UTF-8; export a folder: --export-trusted {path.stem}") from e


def _links(
    items: Items, refs: Sequence[ExampleRef], names: Sequence[str], path: Path
) -> dict[tuple[str, str], str | bytes]:
    """For each (class, file name): the file to link to, or the content of an image known only by its pixels."""
    for name in items.classes:
        if not name or name.startswith(".") or {"/", "\\", "\0"} & set(name):
            raise UserError(f"class {name!r} cannot be a folder name; export a file: --export-trusted {path}.csv")
    data_file = _image_file(items, items.examples, 0)
    root = os.path.realpath(data_file[0]) if data_file else "/"
    links: dict[tuple[str, str], str | bytes] = {}
    for ref, name in zip(refs, names, strict=True):
        file = _image_file(items, *ref)
        target = path_inside(*file, data_file and data_file[0]) if file else None
        if target is not None:
            # Names determine the order of training, so they must not depend on the location of the data.
            digest = sha256(os.path.relpath(target, root))[:8]
            links[name, f"{digest}-{os.path.basename(target)}"] = target
        else:
            content = png(pixels(_input(*ref)))
            links[name, f"{sha256(content)[:16]}.png"] = content
    return links


def _write_folder(path: Path, links: Mapping[tuple[str, str], str | bytes]) -> None:
    """Write a folder of images. It appears complete or not at all."""
    if path.exists():
        if {(file.parent.name, file.name) for file in path.glob("*/*")} != set(links):
            raise NameTaken(path, "--export-trusted")
        return
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        for (folder, name), content in links.items():
            (part / folder).mkdir(parents=True, exist_ok=True)
            if isinstance(content, str):  # relative, so that data and set can be moved together
                location = os.path.join(os.path.realpath(path.parent), path.name, folder)
                os.symlink(os.path.relpath(content, location), part / folder / name)
            else:
                (part / folder / name).write_bytes(content)
        os.replace(part, path)
    except OSError as e:
        raise UserError(f"cannot write {path}: {e.strerror}; choose another path") from e
    finally:
        shutil.rmtree(part, ignore_errors=True)


def write_all(items: Items, decisions: Mapping[int, Decision], folder: Path) -> tuple[Path, TrustedSetSummary | None]:
    """Write corrected labels and, if there are any, the trusted examples into a new subfolder export-1, export-2, ...

    If nothing was decided since the last export, its folder is used again.
    """
    for n in itertools.count(1):
        path = folder / f"export-{n}"
        try:
            path.mkdir(parents=True, exist_ok=True)
            try:
                trusted = write_trusted(items, decisions, path / trusted_name(items))  # first, since it may raise
            except NothingToTrust:
                if not any(read(items, decisions) for read in (final_labels, accepted_labels, dropped_rows)):
                    raise
                trusted = None
            write_corrected(items, decisions, path / "corrected.json")
            write_corrected(items, decisions, path / "corrected.csv")
            return path, trusted
        except NameTaken:
            continue
        except OSError as e:
            raise UserError(f"cannot write {path}: {e.strerror}; choose another --out") from e
    raise AssertionError("unreachable: there is always a next number")


def fit_command(items: Items, settings: Mapping[str, Any], trusted: Path | None, corrected: Path | None) -> str:
    """The command that trains on the exported files. `settings` are those of the run or the data, without defaults."""
    flags = {name: value for name, value in settings.items() if name not in ("meta", "meta_data")}
    if corrected is not None:
        flags["noise"] = f"given:{corrected}"
    if trusted is not None:
        flags["meta_data"] = str(trusted)
    if items.dataset.files and trusted is not None and trusted.suffix:
        flags["root"] = items.dataset.files.root  # the paths in the list are relative to it
    return command(flags, next_folder())


def next_folder() -> str:
    """A name for the folder of the next run that is not in use."""
    names = itertools.chain(["runs/next"], (f"runs/next-{n}" for n in itertools.count(2)))
    return next(name for name in names if not Path(name).exists())
