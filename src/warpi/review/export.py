"""Decisions as files: corrected labels of all rows, and a trusted set that `warpi fit --meta-data` takes."""

import csv
import hashlib
import io
import itertools
import os
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from warpi.audit.trusted_set import TrustedSetSummary, balance_classes, original_rows
from warpi.data.examples import Examples, TensorExamples
from warpi.data.image_files import FileExamples
from warpi.data.numeric import Columns
from warpi.data.overlap import mark_shared
from warpi.data.split import Split
from warpi.errors import UserError
from warpi.noise.kinds import NoisyLabels
from warpi.noise.noise_file import read_noise_file, write_noise_file
from warpi.review.decisions import Decision
from warpi.review.items import Items
from warpi.review.render import cells, inside, pixels, png
from warpi.runs.rerun import command
from warpi.utils.files import write_atomically

STATES = {"keep": "kept", "change": "changed", "skip": "skipped", "unsure": "unsure"}


def state_of(decision: Decision | None) -> str:
    return "open" if decision is None else STATES[decision.action]


def final(items: Items, standing: Mapping[int, Decision]) -> dict[int, int]:
    """Rows whose label is trusted now, and their class: by a person's decision, or known before."""
    number = {name: k for k, name in enumerate(items.classes)}
    decided = {row: number[d.label] for row, d in sorted(standing.items()) if d.label is not None}
    return items.trusted_rows | decided


def write_corrected(items: Items, standing: Mapping[int, Decision], path: Path) -> Path:
    """All rows with their corrected labels: .csv to look at, with a .json beside it, or that alone.

    The .json, which is returned, is for `warpi fit --noise given:FILE.json`. Beside NAME.csv it is NAME.json, or
    NAME-2.json and so on: a run may depend on an earlier one, which is never replaced.
    """
    if path.suffix.lower() == ".csv":
        write_atomically(path, corrected_csv(items, standing).encode(errors="surrogateescape"))
        for n in itertools.count(1):
            try:
                return write_corrected(
                    items, standing, path.with_name(path.stem + (f"-{n}" if n > 1 else "") + ".json")
                )
            except Taken:
                continue
    if path.suffix != ".json":
        raise UserError(f"corrected labels go to a .csv or .json file, got {path}")
    y = torch.from_numpy(items.given.copy())
    for row, k in final(items, standing).items():
        y[row] = k
    if path.exists() and not _holds(path, items, y):
        raise _taken(path, "--export")
    write_noise_file(path, data=items.dataset, noise="given", seed=0, labels=NoisyLabels(y, None))
    return path


def _holds(path: Path, items: Items, y: Tensor) -> bool:
    """Whether a file gives these labels to these very rows."""
    try:
        return torch.equal(read_noise_file(path, items.dataset).y, y)
    except UserError:
        return False


def corrected_csv(items: Items, standing: Mapping[int, Decision]) -> str:
    """A line a row of the data set. `label` is what to use; `verified` is 1 where a person stands behind it.

    Image files have a column `path`, so that the table is a manifest for `warpi fit --data FILE --root FOLDER`.
    """
    known, names, at = final(items, standing), items.classes, items.position
    files, text = items.dataset.files, io.StringIO(newline="")
    writer = csv.writer(text, lineterminator="\n")
    head = ["row", *(["path"] if files else []), "given_label", "label", "state", "verified"]
    writer.writerow([*head, "suggested_label", "wrong_probability"])
    for row, given in enumerate(items.given.tolist()):
        decision = standing.get(row)
        state, was = state_of(decision), names[given] if decision is None else decision.given or names[given]
        if state == "open" and row in known:
            state = "trusted"
        elif decision is not None and decision.label is not None:
            state = "kept" if decision.label == was else "changed"
        line = [row, *([files.paths[row]] if files else []), was, names[known.get(row, given)], state]
        i = at.get(row)
        suggested = "" if i is None or items.suggested[i] < 0 else names[items.suggested[i]]
        wrong = "" if i is None or np.isnan(items.wrong_probability[i]) else f"{items.wrong_probability[i]:.6g}"
        writer.writerow([*line, int(row in known), suggested, wrong])
    return text.getvalue()


def trusted_name(items: Items) -> str:
    """What a trusted set of this data is called where nobody says: a folder for images, a file for anything else."""
    if items.dataset.files is not None:
        return "trusted"
    return "trusted.csv" if isinstance(items.dataset.encoding, Columns) else "trusted.npz"


class Taken(UserError):
    """There is something else of that name."""


def write_trusted(
    items: Items, standing: Mapping[int, Decision], path: Path, balanced: bool = True
) -> TrustedSetSummary:
    """Examples that are trusted: those known before, and those that a person decided about.

    Balanced: the same number of every class, those known before first.
    Images: a folder of links, one folder a class; or a .csv with paths below the folder of the data. Tables: a .csv
    with all columns of the first, cells as they stand there. Everything else: a .npz with x and y. A run is bound to
    the set that it was trained with, so another one of that name is never replaced.
    """
    chosen = final(items, standing)
    apart = items.trusted is not None and not items.shares(items.trusted.examples)
    before = _others(items, chosen) if apart else None
    y = torch.tensor([*(before.y.tolist() if before else ()), *chosen.values()], dtype=torch.int64)
    if not len(y):
        raise UserError("nothing is trusted yet: keep or change the labels of some examples first")
    places: list[tuple[Examples, int]] = [(before.examples, row) for row in before.rows.tolist()] if before else []
    places += [(items.examples, row) for row in chosen]
    kept = torch.arange(len(y))
    if balanced:
        kept = balance_classes(y, first=len(y) - len(chosen) + len(items.trusted_rows))
    _write(items, [places[i] for i in kept.tolist()], [items.classes[k] for k in y[kept].tolist()], path)
    return TrustedSetSummary.of(path, y, len(kept), items.classes)


def _write(items: Items, places: list[tuple[Examples, int]], names: list[str], path: Path) -> None:
    kinds, suffix = {"trusted": ("", ".csv"), "trusted.csv": (".csv",)}, path.suffix.lower()
    allowed = kinds.get(trusted_name(items), (".npz",))
    if suffix not in allowed:
        shown = " or ".join({"": "a folder"}.get(kind, f"a {kind} file") for kind in allowed)
        raise UserError(f"the trusted set of {items.dataset.name} is {shown}, got {path}")
    if not suffix:
        _write_folder(path, _links(items, places, names, path))
        return
    if suffix == ".npz":
        content = _arrays(places, names)
    elif items.dataset.files is None:
        content = _table(items, places, names)
    else:
        content = _paths(items, places, names, path)
    if path.exists() and path.read_bytes() != content:
        raise _taken(path, "--trusted")
    write_atomically(path, content)


def write_all(items: Items, standing: Mapping[int, Decision], folder: Path) -> tuple[Path, TrustedSetSummary]:
    """Everything into a folder of its own: export-1, and export-2 once more has been decided. The folder, and what is
    in its trusted set."""
    for n in itertools.count(1):
        path = folder / f"export-{n}"
        try:
            path.mkdir(parents=True, exist_ok=True)
            trusted = write_trusted(items, standing, path / trusted_name(items))  # first: it may be refused
            write_corrected(items, standing, path / "corrected.json")
            write_corrected(items, standing, path / "corrected.csv")
            return path, trusted
        except Taken:
            continue
        except OSError as e:
            raise UserError(f"cannot write {path}: {e.strerror}; choose another --out") from e
    raise AssertionError("there is always a next number")


def _taken(path: Path, flag: str) -> Taken:
    return Taken(f"{path} holds something else, and a run may depend on it; choose another name for {flag}")


def _others(items: Items, chosen: Mapping[int, int]) -> Split:
    """Trusted examples that lie elsewhere; not those that are copies of these rows."""
    assert items.trusted is not None
    rows, y = (torch.tensor(list(part), dtype=torch.int64) for part in (chosen, chosen.values()))
    new = ~mark_shared(items.trusted, Split(items.examples, rows, y))
    return replace(items.trusted, rows=items.trusted.rows[new], y=items.trusted.y[new])


def fit_command(items: Items, settings: Mapping[str, Any], trusted: Path, corrected: Path | None) -> str:
    """How to train with what was exported. `settings` are those of the run, or of reading the data, less defaults."""
    flags = {name: value for name, value in settings.items() if name not in ("meta", "meta_data")}
    if corrected is not None:
        flags["noise"] = f"given:{corrected}"
    if items.dataset.files and trusted.suffix:  # its paths are relative to the folder of the data
        flags["root"] = items.dataset.files.root
    names = itertools.chain(["runs/next"], (f"runs/next-{n}" for n in itertools.count(2)))  # there may be many rounds
    return command({**flags, "meta_data": str(trusted)}, next(name for name in names if not Path(name).exists()))


def _input(examples: Examples, row: int) -> Tensor:
    if not isinstance(examples, TensorExamples):
        raise UserError("arrays and image files cannot be mixed in one trusted set")
    return examples.x[row].cpu()


def _arrays(places: list[tuple[Examples, int]], names: list[str]) -> bytes:
    content = io.BytesIO()
    np.savez_compressed(content, x=torch.stack([_input(*place) for place in places]).numpy(), y=np.array(names))
    return content.getvalue()


def _table(items: Items, places: list[tuple[Examples, int]], names: list[str]) -> bytes:
    """Rows as they stand in the files that they come from; by their features where no file is known."""
    columns, text = items.dataset.encoding, io.StringIO(newline="")
    assert isinstance(columns, Columns)
    own = items.source and original_rows(items.source, columns.label)
    if items.trusted_source is None:
        others = items.source and original_rows(items.source, columns.label, "meta")
    else:
        others = original_rows(items.trusted_source, columns.label)
    head = list(own[0]) if own else [*columns.categories, columns.label]
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(head)
    for (examples, row), name in zip(places, names, strict=True):
        rows = own if items.shares(examples) else others
        found = rows[row] if rows else dict(cells(_input(examples, row), columns))
        writer.writerow({**found, columns.label: name}.get(column, "") for column in head)  # "": of a dropped column
    return text.getvalue().encode()


def _file(items: Items, examples: Examples, row: int) -> tuple[str, str] | None:
    """Folder and path of an image; None where only its pixels are known."""
    if isinstance(examples, FileExamples):
        return examples.root, examples.paths[row]
    files = items.dataset.files
    return (files.root, files.paths[row]) if files and examples is items.examples else None


def _paths(items: Items, places: list[tuple[Examples, int]], names: list[str], path: Path) -> bytes:
    """A manifest, whose paths are relative to the folder of the data."""
    files, text = items.dataset.files, io.StringIO(newline="")
    assert files is not None
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["path", "label"])
    for place, name in zip(places, names, strict=True):
        found = _file(items, *place)
        whole = os.path.abspath(os.path.join(*found)) if found else ""
        below = os.path.join(os.path.abspath(files.root), "")
        if not whole.startswith(below):
            raise UserError(f"some trusted images lie outside {files.root}; export a folder: --trusted {path.stem}")
        writer.writerow([whole.removeprefix(below), name])
    return text.getvalue().encode(errors="surrogateescape")  # names of files may be any bytes


def _links(
    items: Items, places: list[tuple[Examples, int]], names: list[str], path: Path
) -> dict[tuple[str, str], str | bytes]:
    """(class, name of a file) -> the file to link to, or the pixels of an image that was read from elsewhere."""
    for name in items.classes:
        if not name or name.startswith(".") or {"/", "\\", "\0"} & set(name):
            raise UserError(f"class {name!r} cannot be the name of a folder; export a file: --trusted {path}.csv")
    links: dict[tuple[str, str], str | bytes] = {}
    of_data = _file(items, items.examples, 0)
    home = os.path.realpath(of_data[0]) if of_data else "/"
    for place, name in zip(places, names, strict=True):
        found = _file(items, *place)
        real = inside(*found) if found else None
        if real is not None:
            # The name is a place in the order of training: it must not depend on where the data lies.
            below = hashlib.sha256(os.fsencode(os.path.relpath(real, home))).hexdigest()[:8]
            links[name, f"{below}-{os.path.basename(real)}"] = real
        else:
            content = png(pixels(_input(*place)))
            links[name, f"{hashlib.sha256(content).hexdigest()[:16]}.png"] = content
    return links


def _write_folder(path: Path, links: dict[tuple[str, str], str | bytes]) -> None:
    """It appears whole or not at all."""
    if path.exists():
        there = {(file.parent.name, file.name) for file in path.glob("*/*")}
        if there != set(links):
            raise _taken(path, "--trusted")
        return
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        for (folder, name), content in links.items():
            (part / folder).mkdir(parents=True, exist_ok=True)
            if isinstance(content, str):
                os.symlink(content, part / folder / name)
            else:
                (part / folder / name).write_bytes(content)
        os.replace(part, path)
    except OSError as e:
        raise UserError(f"cannot write {path}: {e.strerror}; choose another place") from e
    finally:
        shutil.rmtree(part, ignore_errors=True)
