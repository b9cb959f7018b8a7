"""The file of results: one JSON line per run."""

import json
import os
import sys
from pathlib import Path
from typing import Any

from benchmarks.never_loses.plan import Cell

Job = tuple[str, Cell, int]  # study, cell, seed


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The lines of a results file. A line that a kill cut off is left out."""
    rows = []
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:
            print(f"{path}: left out an incomplete line", file=sys.stderr)
    return rows


def read_kept(path: Path) -> tuple[dict[str, str], list[dict[str, Any]]]:
    """What `benchmarks.pages.never_loses` keeps: versions and rows, without the seconds of the baselines."""
    kept = json.loads(path.read_text())
    rows = []
    for line in kept["rows"]:
        row = dict(zip(kept["fields"], line, strict=True))
        row["auto"] = dict(zip(kept["auto"], row["auto"], strict=True))
        row["accuracy"] = dict(zip(kept["baselines"], row["accuracy"], strict=True))
        rows.append(row)
    return kept["about"], rows


def read_any(path: Path) -> list[dict[str, Any]]:
    """The rows of a results file or of the kept file."""
    return read_kept(path)[1] if path.suffix == ".json" else read_rows(path)


def append_row(path: Path, row: dict[str, Any]) -> None:
    """Append a line in one write, so that several processes can share the file."""
    handle = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        size = os.fstat(handle).st_size
        complete = size == 0 or os.pread(handle, 1, size - 1) == b"\n"
        os.write(handle, (b"" if complete else b"\n") + json.dumps(row).encode() + b"\n")
    finally:
        os.close(handle)


def job_of(row: dict[str, Any]) -> Job:
    return row["study"], Cell(row["table"], row["noise"], row["rate"], row["per_class"]), row["seed"]
