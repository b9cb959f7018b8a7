"""Store the small files of finished runs in docs/results/TABLE/RUN, where they can be committed.

    python benchmarks/keep.py runs/asymmetric [runs/curves ...]        copy to docs/results
    python benchmarks/keep.py runs/* --tar kept.tar.gz                 write to an archive
    python benchmarks/keep.py kept.tar.gz                              copy from an archive to docs/results
    python benchmarks/keep.py runs/* --begun FOLDER                    write unfinished runs with their weights to
                                                                       FOLDER/begun-0.tar, ... of at most 15 MiB each
    python benchmarks/keep.py begun-*.tar --to runs                    unpack them, to resume them on another machine

A table is a folder of run folders as made by `warpi sweep`. An archive contains every finished run. Only runs that a
recipe contains (recipes/*.toml whose `out` ends in the name of the table), with its settings and the current defaults,
are copied to docs/results; for every other run the reason is printed.
"""

import argparse
import io
import re
import sys
import tarfile
import tempfile
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path

from warpi.errors import UserError
from warpi.report.figure_data import FILE
from warpi.sweep.plan import Settings, read_plan
from warpi.sweep.run_states import KEPT, why_not_kept
from warpi.utils.files import write_atomically

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "docs" / "results"
WEIGHTS = "checkpoint.safetensors"
BEGUN = ("spec.json", "sweep.json", WEIGHTS, "results.jsonl")  # read in this order, since the run may still be active
NAME = re.compile(rf"[\w.+-]+/[\w.,+-]+/({'|'.join(map(re.escape, {*KEPT, *BEGUN, FILE}))})")
MAX_BYTES = 15 * 2**20  # of an archive with weights

Entry = tuple[str, bytes]


def finished(table: Path) -> Iterator[list[Entry]]:
    """The files to store of each finished run."""
    for run in sorted(table.iterdir()):
        if (run / "done").exists():
            names = [name for name in (*KEPT, FILE) if (run / name).exists()]
            yield [(f"{table.name}/{run.name}/{name}", (run / name).read_bytes()) for name in names]


def unfinished(table: Path) -> Iterator[list[Entry]]:
    """The files that are needed to resume each unfinished run with weights."""
    for run in sorted(table.iterdir()):
        if (run / WEIGHTS).exists() and not (run / "done").exists():
            names = [name for name in BEGUN if (run / name).exists()]
            yield [(f"{table.name}/{run.name}/{name}", (run / name).read_bytes()) for name in names]


def archived(path: Path) -> Iterator[list[Entry]]:
    """The files of an archive. All of them must be in TABLE/RUN."""
    with tarfile.open(path) as tar:
        for member in tar:
            content = tar.extractfile(member) if member.isfile() and NAME.fullmatch(member.name) else None
            if content is None or ".." in member.name.split("/"):
                sys.exit(f"{path} contains {member.name!r}, which is not a file of a run; nothing was unpacked")
            yield [(member.name, content.read())]


def group_by_run(runs: list[list[Entry]]) -> list[list[Entry]]:
    """The entries of each run. (An archive gives them one by one.)"""
    groups: dict[str, list[Entry]] = {}
    for entry in (entry for run in runs for entry in run):
        groups.setdefault(entry[0].rpartition("/")[0], []).append(entry)
    return list(groups.values())


@cache
def recipe_settings() -> dict[str, list[Settings]]:
    """The settings of TABLE/RUN in the recipes; there may be several."""
    settings: dict[str, list[Settings]] = {}
    for plan in map(read_plan, sorted((ROOT / "recipes").glob("*.toml"))):
        for job in plan.jobs:
            settings.setdefault(f"{plan.out.name}/{job.name}", []).append(job.settings)
    return settings


def select(run: list[Entry], to: Path, recipes: dict[str, list[Settings]]) -> list[Entry]:
    """The entries of a run that are to be written. If there are none, the reason is printed."""
    name = run[0][0].rpartition("/")[0]
    folder = to / name
    if any(file.endswith("/done") for file, _ in run):
        if reason := reason_against(run, name, recipes.get(name, ())):
            print(f"{name} is left out: {reason}")
            return []
    elif (folder / "done").exists() or (folder / WEIGHTS).exists():  # it may have more epochs
        print(f"{folder} already exists and is not changed")
        return []
    return run


def reason_against(run: list[Entry], name: str, recipes: Sequence[Settings]) -> str | None:
    """The reason why a finished run is not that of a recipe; None if it is."""
    table = name.partition("/")[0]
    reason = f"no recipe for {table!r} contains it; `warpi sweep FILE.toml --dry-run` lists the runs of a recipe"
    with tempfile.TemporaryDirectory() as folder:
        write(run, Path(folder))
        for settings in recipes:
            try:
                if not (difference := why_not_kept(Path(folder) / name, settings)):
                    return None
            except UserError as error:
                difference = str(error).replace(f"{folder}/", "")
            reason = difference
    return reason


def write(run: list[Entry], to: Path) -> None:
    for name, data in run:
        (to / name).parent.mkdir(parents=True, exist_ok=True)
        write_atomically(to / name, data)


def pack(path: Path, entries: list[Entry]) -> None:
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w:gz" if path.suffix == ".gz" else "w") as tar:
        for name, data in entries:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, content.getvalue())


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sources", nargs="+", type=Path)
    parser.add_argument("--to", type=Path, default=RESULTS)
    parser.add_argument("--tar", type=Path)
    parser.add_argument("--begun", type=Path)
    given = parser.parse_args(argv)
    if missing := [str(path) for path in given.sources if not path.exists()]:
        parser.error(
            f"{', '.join(missing)} does not exist; give folders of tables, such as runs/asymmetric, or archives"
        )
    if given.tar:
        runs = gather(given.sources, finished)
        pack(given.tar, [entry for run in runs for entry in run])
        print_count(runs, "finished", given.tar)
    if given.begun:
        parts = portions(gather(given.sources, unfinished))
        for i, part in enumerate(parts):
            pack(given.begun / f"begun-{i}.tar", part)
        print_count(parts, "begun", given.begun / "begun-*.tar")
    if not given.tar and not given.begun:
        every = group_by_run(gather(given.sources, finished))
        recipes = recipe_settings()
        runs = [run for some in every if (run := select(some, given.to, recipes))]
        for run in runs:
            write(run, given.to)
        begun = [run for run in runs if not any(name.endswith("/done") for name, _ in run)]
        print_count([run for run in runs if run not in begun], "finished", given.to)
        if begun:
            print_count(begun, "begun", given.to)


def gather(sources: Sequence[Path], read: Callable[[Path], Iterator[list[Entry]]]) -> list[list[Entry]]:
    """The files of all runs in archives, and in tables, which `read` reads."""
    return [run for path in sources for run in (read(path) if path.is_dir() else archived(path))]


def portions(runs: Sequence[list[Entry]]) -> list[list[Entry]]:
    """Group the files of runs into archives of at most MAX_BYTES."""
    parts: list[list[Entry]] = [[]]
    for run in runs:
        if sum(len(data) for _, data in run) > MAX_BYTES:
            print(f"{run[0][0].rpartition('/')[0]} is too large for an archive and is left out")
            continue
        if sum(len(data) for _, data in (*parts[-1], *run)) > MAX_BYTES:
            parts.append([])
        parts[-1] += run
    return [part for part in parts if part]


def print_count(runs: Sequence[list[Entry]], what: str, where: Path) -> None:
    names = {name.rpartition("/")[0] for run in runs for name, _ in run}
    print(f"{len(names)} {what} runs stored in {where}")


if __name__ == "__main__":
    main()
