"""`warpi list`. Each table imports only what it lists, so that listing data sets does not import torch."""

import json
import sys
from collections.abc import Callable
from dataclasses import asdict
from importlib import resources
from typing import Any

from warpi.errors import unknown
from warpi.utils.flags import Parser
from warpi.utils.terminal import in_columns


def list_names(argv: list[str]) -> None:
    parser = Parser("warpi list", "List the names that flags accept, with a summary of each.")
    parser.add_argument("what", metavar="|".join(_TABLES), help="the table to print")
    parser.add("--json", "print JSON with all columns")
    given = parser.read(argv)
    if given["what"] not in _TABLES:
        raise unknown("list", given["what"], _TABLES)
    rows = _TABLES[given["what"]]()
    if given["json"]:
        print(json.dumps(rows, indent=1))
    elif given["what"] == "methods":
        _print([row for row in rows if row["core"]])
        print("\nMore methods:\n")
        _print([row for row in rows if not row["core"]])
        print("\nCost: the time per epoch relative to ce, on digits with one CPU thread (recipes/digits.toml).")
        print("Status: reproduced means that our runs are at most one point below a published accuracy.")
        print("Each method has a page: docs/methods/NAME.md")
    else:
        _print(rows, hidden=() if given["what"] == "noises" else ("options",))


def _print(rows: list[dict[str, Any]], hidden: tuple[str, ...] = ("core", "options", "docs")) -> None:
    from shutil import get_terminal_size

    width = get_terminal_size().columns if sys.stdout.isatty() else None
    cells = [{name: _format_cell(value) for name, value in row.items() if name not in hidden} for row in rows]
    print(in_columns(cells, width))


def _methods() -> list[dict[str, Any]]:
    from warpi.methods.registry import CORE, METHODS
    from warpi.runs.plugins import METHOD_PLUGINS, family
    from warpi.training.method import Method

    def needs_of(method: Method) -> list[str]:
        needs = {"trusted data": method.needs_meta, "noise rate": method.needs_noise_rate}
        needs[f"{method.n_nets} networks"] = method.n_nets > 1
        return [name for name, needed in needs.items() if needed]

    folder = resources.files("warpi.methods")
    costs = json.loads((folder / "costs.json").read_text())  # benchmarks/pages/digits.py
    statuses = json.loads((folder / "status.json").read_text())  # benchmarks/pages/status.py
    return [
        {
            "name": name,
            "core": name in CORE,
            "family": family(name),
            "year": m.year,
            "needs": needs_of(m),
            "cost": costs.get(name),  # relative to plain training
            "status": statuses.get(name, {}).get("status", "unit-tested only" if name not in METHOD_PLUGINS else ""),
            "summary": _summary(m, type(m).__doc__),
            "options": asdict(m),
            "docs": METHOD_PLUGINS.get(name) or f"docs/methods/{name}.md",
        }
        for name, m in sorted(METHODS.items(), key=lambda item: CORE.index(item[0]) if item[0] in CORE else len(CORE))
    ]


def _datasets() -> list[dict[str, Any]]:
    from warpi.datasets.registry import DATASETS

    paths = "your own files: .csv .tsv .parquet .npz .npy, a folder of images, or a csv with a path column"
    summaries = {**{name: e.summary for name, e in DATASETS.items()}, "PATH": paths}
    return [{"name": name, "summary": summary} for name, summary in summaries.items()]


def _noises() -> list[dict[str, Any]]:
    from warpi.noise.parse import NOISES

    return [{"name": name, "summary": e.summary, "options": dict(e.options)} for name, e in NOISES.items()]


def _nets() -> list[dict[str, Any]]:
    from warpi.nets.registry import NETS

    return [{"name": name, "summary": e.summary} for name, e in NETS.items()]


def _learners() -> list[dict[str, Any]]:
    from warpi.fewshot.learners.registry import LEARNERS

    docs = {name: sys.modules[type(m).__module__].__doc__ for name, m in LEARNERS.items()}
    return [
        {"name": name, "year": m.year, "for": list(m.solves), "summary": _summary(m, docs[name]), "options": asdict(m)}
        for name, m in LEARNERS.items()
    ]


def _summary(entry: Any, docs: str | None) -> str:
    """The first line of the documentation, and the settings that differ from the defaults of the class."""
    changed = [f"{k}={v}" for k, v in asdict(entry).items() if v != getattr(type(entry)(), k)]
    first, *_ = (docs or "").strip().splitlines() or [""]
    return first + (f" Here {', '.join(changed)}." if changed else "")


def _format_cell(value: object) -> str:
    if value is None:
        return ""
    if isinstance(value, list):
        return ", ".join(value)
    if isinstance(value, dict):
        return ", ".join(f"{k}={v}" for k, v in value.items())
    return str(value)


_TABLES: dict[str, Callable[[], list[dict[str, Any]]]] = {
    "methods": _methods,
    "datasets": _datasets,
    "noises": _noises,
    "nets": _nets,
    "learners": _learners,
}
