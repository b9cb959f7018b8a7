"""`warpi check`: describe a run folder or data from elsewhere without using it. Nothing is trained or written.

Without a path, `warpi --use FILE.py check` checks the custom methods of FILE.py instead.
"""

import hashlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from warpi.errors import UserError, format_count, no_path
from warpi.utils.flags import Parser
from warpi.utils.limits import limit, refuse
from warpi.utils.terminal import say

if TYPE_CHECKING:
    from warpi.runs.run_folder import RunFolder


class Finding(NamedTuple):
    """One line of the output."""

    topic: str
    text: str
    is_problem: bool = False


def check(argv: list[str]) -> None:
    parser = Parser(
        "warpi check",
        "Describe a run folder or data: what it is, whether it is complete, which files it refers to, and what opening "
        "it does. Nothing is trained, written or executed. The exit code is 1 if there is a problem. Without a path, "
        "`warpi --use FILE.py check` checks the methods of FILE.py on small generated data: whether they train, "
        "predict probabilities, depend on the seed only, resume exactly and state what they need. The exit code is "
        "then 2 if a check fails.",
    )
    parser.add_argument(
        "path", type=Path, nargs="?", metavar="RUN|DATA", help="a run folder, a folder of data, or a data file"
    )
    given = parser.read(argv)
    if given["path"] is None:
        _check_methods()
        return
    findings = [*inspect(given["path"])]
    for finding in findings:
        say(f"{'PROBLEM ' if finding.is_problem else ''}{finding.topic}: {finding.text}")
    if any(finding.is_problem for finding in findings):
        raise SystemExit(1)


def _check_methods() -> None:
    """Check the methods of all `--use` files, with one line per check."""
    from warpi.methods.registry import METHODS
    from warpi.runs.plugins import METHOD_PLUGINS
    from warpi.training.contract import check_method

    if not METHOD_PLUGINS:
        raise UserError("pass a run or data to check, or a file with METHODS: warpi --use FILE.py check")
    failed = 0
    for name in METHOD_PLUGINS:
        for finding in check_method(METHODS[name]):
            failed += finding.result == "failed"
            say(f"{name}: {finding.result:<8}{finding.name}{f': {finding.note}' * bool(finding.note)}", flush=True)
    if failed:
        raise UserError(f"{format_count(failed, 'check')} failed; CONTRIBUTING.md describes the contract")


def inspect(path: Path) -> Iterator[Finding]:
    """Yield all findings about a path."""
    from warpi.runs.schema import SPEC

    if not path.exists():
        raise no_path(path)
    if (path / SPEC).exists():
        yield from _inspect_run(path)
    elif path.is_dir():
        yield from _inspect_data_folder(path)
    else:
        yield from _inspect_data_file(path)


# -- runs --------------------------------------------------------------------------------------------------------------


def _inspect_run(path: Path) -> Iterator[Finding]:
    from warpi.runs.reopen import read_run_spec
    from warpi.runs.run_folder import RunFolder

    stored = read_run_spec(path)
    folder = RunFolder(path)
    spec = stored["spec"]
    state = "finished" if folder.is_done else "not finished"
    yield Finding("kind", f"a run of {spec['method']} by warpi {stored.get('version')}, {state}")
    yield from _check_files(folder)
    yield from _links_that_leave(path)
    names = dict(_files_of(spec))
    for name, value in names.items():
        state = "exists" if os.path.exists(value) else "does not exist here"
        yield Finding("refers to", f"{name} {value} ({state})")
    what = f"also the files above: {', '.join(names)}" if names else "no other files"
    yield Finding("opening", "predict and report read only this folder and the new rows")
    yield Finding("opening", f"audit, review, correct, figures, report --out and fit --resume read {what}")
    yield Finding("opening", "nothing is executed; custom methods and networks need --use FILE.py, which runs FILE.py")


def _check_files(folder: "RunFolder") -> Iterator[Finding]:
    """Whether the files of a run are complete: their checksums, or that they can be parsed."""
    from warpi.audit.result import AUDIT_FILE, read_audit
    from warpi.training import checkpoint

    if not folder.has_checkpoint:
        yield Finding("files", "there is no checkpoint, so the run cannot predict or be resumed", True)
    parts: list[tuple[str, Callable[[], object]]] = []
    if folder.has_checkpoint:
        parts.append(("checkpoint, checksum", lambda: checkpoint.load(folder.checkpoint)))
    parts.append(("results", lambda: folder.read_history("copy it again")))
    if (folder.path / AUDIT_FILE).exists():
        parts.append(("audit", lambda: read_audit(folder.path)))
    for name, read in parts:
        try:
            read()
            yield Finding("files", f"{name}: correct")
        except UserError as error:
            yield Finding("files", str(error), True)


def _files_of(spec: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """The files that a specification names, by the flag that set them."""
    from warpi.datasets.registry import DATASETS
    from warpi.runs.schema import is_label_file

    values = {"--data": spec.get("data"), "--root": spec.get("root"), "--trusted": spec.get("meta_data")}
    values["--weights"] = spec["recipe"].get("weights")
    values["--matrix"] = spec["options"].get("matrix")
    if str(spec.get("label")).endswith(".npy"):
        values["--label"] = spec.get("label")
    if is_label_file(spec.get("noise")):
        values["--labels"] = str(spec["noise"]).partition(":")[2]
    for name, value in values.items():
        if isinstance(value, str) and value not in (*DATASETS, "torchvision"):
            yield name, value


# -- data --------------------------------------------------------------------------------------------------------------


def _inspect_data_folder(path: Path) -> Iterator[Finding]:
    from warpi.datasets.delimited_files import reading
    from warpi.datasets.embedding.folder import MANIFEST, FeatureFolder
    from warpi.datasets.hugging_face.saved import is_saved

    if (path / MANIFEST).exists():
        folder = FeatureFolder(path)
        manifest = folder.read_manifest()
        yield Finding("kind", f"features of {manifest.get('source')}")
        try:
            rows = sum(map(len, folder.read_shards(manifest)))
            yield Finding("files", f"{rows:,} vectors, checksums: correct")
        except UserError as error:
            yield Finding("files", str(error), True)
    else:
        n = 0
        with reading(path):
            for _, _, files in os.walk(path):
                n += len(files)
                if n > limit("FILES"):
                    raise refuse(path, "contains too many files", "FILES")
        kind = "a Hugging Face data set" if is_saved(path) else "images or texts with one folder per class"
        yield Finding("kind", f"a folder of {format_count(n, 'file')}, read as {kind}")
    yield from _links_that_leave(path)
    yield Finding("opening", "reads the files below this folder and executes nothing; links that leave it are refused")


def _inspect_data_file(path: Path) -> Iterator[Finding]:
    from warpi.datasets.delimited_files import TABLE_SUFFIXES, check_suffix, reading
    from warpi.datasets.image_lists import is_manifest

    suffix = check_suffix(path, (*TABLE_SUFFIXES, ".npz", ".npy"))
    with reading(path), path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    listed = suffix in TABLE_SUFFIXES and is_manifest(path)
    yield Finding("kind", f"{'a list of images' if listed else f'a {suffix} file'}, {path.stat().st_size:,} bytes")
    yield Finding("sha256", digest)
    if listed:
        yield from _paths_that_leave(path)
    what = "this file and the images that it lists" if listed else "this file only"
    yield Finding("opening", f"reads {what}, and executes nothing")


def _paths_that_leave(path: Path) -> Iterator[Finding]:
    """The paths of a list of images that are outside of its folder; `warpi fit` refuses them."""
    from warpi.datasets.image_lists import Manifest

    manifest = Manifest.read(path, ("path",))
    top = os.path.realpath(path.parent)
    for row, file in enumerate(manifest.columns["path"]):
        target = os.path.realpath(os.path.join(top, file.replace("\0", "")))  # a file name cannot contain it
        if not target.startswith(os.path.join(top, "")):
            yield Finding("refers to", f"{manifest.where(row)}: {file} is outside of {path.parent}", True)


def _links_that_leave(path: Path) -> Iterator[Finding]:
    """The links below a folder whose targets are outside of it."""
    top = os.path.realpath(path)
    for folder, below, files in os.walk(path):
        for name in (*below, *files):
            file = os.path.join(folder, name)
            if os.path.islink(file) and not os.path.realpath(file).startswith(os.path.join(top, "")):
                yield Finding("refers to", f"{file} is a link to {os.path.realpath(file)}", True)
