"""What is left of finished runs, small enough to be committed: docs/results/TABLE/RUN/{spec.json, results.jsonl, ...}.

    python benchmarks/keep.py runs/asymmetric [runs/curves ...]        copy to docs/results
    python benchmarks/keep.py runs/* --tar kept.tar.gz                 into an archive, to take along
    python benchmarks/keep.py kept.tar.gz                              from an archive to docs/results
    python benchmarks/keep.py runs/* --begun FOLDER                    runs that have not ended, with their weights, as
                                                                       FOLDER/begun-0.tar, ... of at most 15 MiB each
    python benchmarks/keep.py runs/* --tar kept.tar.gz --begun FOLDER  both
    python benchmarks/keep.py begun-*.tar --to runs                    so that they go on on another machine

A table is a folder of run folders as `warpi sweep` makes them. Runs that have not ended are left out unless asked for.
An archive takes along every run that has ended. What is kept, from it or from a table, are the runs that a recipe asks
for (recipes/*.toml whose `out` ends in the name of the table), with its settings and today's defaults; of every other
one it is said why it is left out.
"""

import argparse
import io
import re
import sys
import tarfile
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from warpi.errors import UserError
from warpi.report.figure_data import FILE
from warpi.sweep.plan import Settings, read_plan
from warpi.sweep.queue import KEPT, why_not_kept
from warpi.utils.files import write_atomically

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "docs" / "results"
WEIGHTS = "checkpoint.safetensors"
BEGUN = ("spec.json", "sweep.json", WEIGHTS, "results.jsonl")  # read in this order: a run may be going on meanwhile
NAME = re.compile(rf"[\w.+-]+/[\w.,+-]+/({'|'.join(map(re.escape, {*KEPT, *BEGUN, FILE}))})")
MOST = 15 * 2**20  # bytes of an archive with weights

Entry = tuple[str, bytes]


def finished(table: Path) -> Iterator[list[Entry]]:
    """The files to keep of each finished run."""
    for run in sorted(table.iterdir()):
        if (run / "done").exists():
            names = [name for name in (*KEPT, FILE) if (run / name).exists()]
            yield [(f"{table.name}/{run.name}/{name}", (run / name).read_bytes()) for name in names]


def begun(table: Path) -> Iterator[list[Entry]]:
    """The files to go on from of each run that has weights and no end."""
    for run in sorted(table.iterdir()):
        if (run / WEIGHTS).exists() and not (run / "done").exists():
            names = [name for name in BEGUN if (run / name).exists()]
            yield [(f"{table.name}/{run.name}/{name}", (run / name).read_bytes()) for name in names]


def archived(path: Path) -> Iterator[list[Entry]]:
    """The files of an archive, none of which may lie anywhere else than in TABLE/RUN."""
    with tarfile.open(path) as tar:
        for member in tar:
            content = tar.extractfile(member) if member.isfile() and NAME.fullmatch(member.name) else None
            if content is None or ".." in member.name.split("/"):
                sys.exit(f"{path} holds {member.name!r}, which is no file of a run; nothing was taken")
            yield [(member.name, content.read())]


def together(runs: list[list[Entry]]) -> list[list[Entry]]:
    """The entries of each run: those of an archive come one by one."""
    found: dict[str, list[Entry]] = {}
    for entry in (entry for run in runs for entry in run):
        found.setdefault(entry[0].rpartition("/")[0], []).append(entry)
    return list(found.values())


def asked_for() -> dict[str, list[Settings]]:
    """TABLE/RUN to the settings that the recipes give it, which may be several."""
    found: dict[str, list[Settings]] = {}
    for plan in map(read_plan, sorted((ROOT / "recipes").glob("*.toml"))):
        for job in plan.jobs:
            found.setdefault(f"{plan.out.name}/{job.name}", []).append(job.settings)
    return found


def wanted(run: list[Entry], to: Path, asked: dict[str, list[Settings]]) -> list[Entry]:
    """The entries of a run that is to be written; none of one that is not, and then it is said why."""
    name = run[0][0].rpartition("/")[0]
    folder = to / name
    if any(file.endswith("/done") for file, _ in run):
        if why := why_not(run, name, asked.get(name, ())):
            print(f"{name} is left out: {why}")
            return []
    elif (folder / "done").exists() or (folder / WEIGHTS).exists():  # it may have come further
        print(f"{folder} is there already: left as it is")
        return []
    return run


def why_not(run: list[Entry], name: str, asked: Sequence[Settings]) -> str | None:
    """Why a finished run is none that a recipe asks for; None: it is."""
    table = name.partition("/")[0]
    why = f"no recipe whose runs are in {table!r} names it; `warpi sweep FILE.toml --dry-run` lists what one names"
    with tempfile.TemporaryDirectory() as folder:
        write(run, Path(folder))
        for settings in asked:
            try:
                if not (found := why_not_kept(Path(folder) / name, settings)):
                    return None
            except UserError as error:
                found = str(error).replace(f"{folder}/", "")
            why = found
    return why


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
    if gone := [str(path) for path in given.sources if not path.exists()]:
        parser.error(f"there is no {', '.join(gone)}; give folders of tables, such as runs/asymmetric, or archives")
    if given.tar:
        runs = gather(given.sources, finished)
        pack(given.tar, [entry for run in runs for entry in run])
        tell(runs, "finished", given.tar)
    if given.begun:
        parts = portions(gather(given.sources, begun))
        for i, part in enumerate(parts):
            pack(given.begun / f"begun-{i}.tar", part)
        tell(parts, "begun", given.begun / "begun-*.tar")
    if not given.tar and not given.begun:
        asked = asked_for()
        runs = [run for some in together(gather(given.sources, finished)) if (run := wanted(some, given.to, asked))]
        for run in runs:
            write(run, given.to)
        begun_ones = [run for run in runs if not any(name.endswith("/done") for name, _ in run)]
        tell([run for run in runs if run not in begun_ones], "finished", given.to)
        if begun_ones:
            tell(begun_ones, "begun", given.to)


def gather(sources: Sequence[Path], read: Callable[[Path], Iterator[list[Entry]]]) -> list[list[Entry]]:
    """The files of all runs, of tables by `read`."""
    return [run for path in sources for run in (read(path) if path.is_dir() else archived(path))]


def portions(runs: Sequence[list[Entry]]) -> list[list[Entry]]:
    """Files of runs together as long as they can be carried."""
    parts: list[list[Entry]] = [[]]
    for run in runs:
        if sum(len(data) for _, data in run) > MOST:
            print(f"{run[0][0].rpartition('/')[0]} is too large to be carried: left out")
            continue
        if sum(len(data) for _, data in (*parts[-1], *run)) > MOST:
            parts.append([])
        parts[-1] += run
    return [part for part in parts if part]


def tell(runs: Sequence[list[Entry]], what: str, where: Path) -> None:
    names = {name.rpartition("/")[0] for run in runs for name, _ in run}
    print(f"{len(names)} {what} runs kept in {where}")


if __name__ == "__main__":
    main()
