"""What is left of finished runs, small enough to be committed: docs/results/TABLE/RUN/{spec.json, results.jsonl, ...}.

    python benchmarks/keep.py runs/asymmetric [runs/curves ...]        copy to docs/results
    python benchmarks/keep.py runs/* --tar kept.tar.gz                 into an archive, to take along
    python benchmarks/keep.py kept.tar.gz                              from an archive to docs/results
    python benchmarks/keep.py runs/* --begun FOLDER                    runs that have not ended, with their weights, as
                                                                       FOLDER/begun-0.tar, ... of at most 15 MiB each
    python benchmarks/keep.py begun-*.tar --to runs                    so that they go on on another machine

A table is a folder of run folders as `warpi sweep` makes them. Runs that have not ended are left out unless asked for.
"""

import argparse
import io
import re
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path

from warpi.atomic import write_atomically
from warpi.figures.arrays import FILE
from warpi.sweep.folders import KEPT

RESULTS = Path(__file__).resolve().parents[1] / "docs" / "results"
WEIGHTS = "checkpoint.safetensors"
BEGUN = ("spec.json", "sweep.json", WEIGHTS, "results.jsonl")  # read in this order: a run may be going on meanwhile
NAME = re.compile(rf"[\w.+-]+/[\w.,+-]+/({'|'.join(map(re.escape, {*KEPT, *BEGUN, FILE}))})")
MOST = 15 * 2**20  # bytes of an archive with weights

Entry = tuple[str, bytes]


def finished(table: Path) -> Iterator[list[Entry]]:
    """The files to keep of each finished run."""
    for run in sorted(table.iterdir()):
        if all((run / name).exists() for name in KEPT):
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


def not_there_yet(run: list[Entry], to: Path) -> list[Entry]:
    """The entries of a run; none of one that has not ended where the same run is, which may have come further."""
    folder = to / run[0][0].rpartition("/")[0]
    unfinished = not any(name.endswith("/done") for name, _ in run)
    if unfinished and ((folder / "done").exists() or (folder / WEIGHTS).exists()):
        print(f"{folder} is there already: left as it is")
        return []
    return run


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
    read = begun if given.begun else finished
    runs = [run for path in given.sources for run in (read(path) if path.is_dir() else archived(path))]
    if given.begun:
        parts: list[list[Entry]] = [[]]
        for run in runs:
            if sum(len(data) for _, data in run) > MOST:
                print(f"{run[0][0].rpartition('/')[0]} is too large to be carried: left out")
                continue
            if sum(len(data) for _, data in (*parts[-1], *run)) > MOST:
                parts.append([])
            parts[-1] += run
        runs = parts
        for i, part in enumerate(part for part in parts if part):
            pack(given.begun / f"begun-{i}.tar", part)
    elif given.tar:
        pack(given.tar, [entry for run in runs for entry in run])
    else:
        runs = [not_there_yet(run, given.to) for run in together(runs)]
        for name, data in (entry for run in runs for entry in run):
            (given.to / name).parent.mkdir(parents=True, exist_ok=True)
            write_atomically(given.to / name, data)
    names = {name.rpartition("/")[0] for run in runs for name, _ in run}
    where = f"in {given.begun}/begun-*.tar" if given.begun else f"in {given.tar or given.to}"
    print(f"{len(names)} {'begun' if given.begun else 'finished'} runs kept {where}")


if __name__ == "__main__":
    main()
