"""Shared by the benchmarks: paths, machine and versions, and tables between two marks of a page."""

import os
import platform
from datetime import date
from importlib.metadata import version
from pathlib import Path

from warpi.utils.files import write_atomically

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"


def made_on(*packages: str) -> dict[str, str]:
    """Date, machine and versions."""
    about = {"date": date.today().isoformat(), "machine": f"{os.cpu_count()} CPU cores ({platform.machine()})"}
    return about | {name: version(name) for name in packages} | {"python": platform.python_version()}


def write_between(page: Path, marks: tuple[str, str], text: str) -> None:
    """Replace the text between two marks of a page."""
    head, _, rest = page.read_text().partition(marks[0])
    _, _, tail = rest.partition(marks[1])
    write_atomically(page, f"{head}{marks[0]}\n{text}\n{marks[1]}{tail}".encode())
