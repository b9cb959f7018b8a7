"""`warpi list`. Imports that load torch wait until the table is known."""

import json
import sys
from collections.abc import Callable
from dataclasses import asdict
from importlib import resources
from typing import Any

from warpi.errors import unknown
from warpi.utils.flags import Parser


def list_names(argv: list[str]) -> None:
    parser = Parser(prog="warpi list", description="What there is, by name.")
    parser.add_argument("what", metavar="methods|datasets|noises|nets|learners")
    parser.add_argument("--json", action="store_true", help="as JSON on standard output")
    given = parser.read(argv)
    if given["what"] not in _TABLES:
        raise unknown("list", given["what"], _TABLES)
    rows = _TABLES[given["what"]]()
    if given["json"]:
        print(json.dumps(rows, indent=1))
        return
    from shutil import get_terminal_size

    from warpi.report.table import in_columns

    shown = [name for name in rows[0] if name not in ("options", "docs") or given["what"] == "noises"]
    width = get_terminal_size().columns if sys.stdout.isatty() else None
    print(in_columns([{name: _cell(row[name]) for name in shown} for row in rows], width))
    if given["what"] == "methods":
        print("Cost: the time of an epoch relative to that of ce, on digits and one CPU thread (recipes/digits.toml).")
        print("The page of each: docs/methods/NAME.md")


def _methods() -> list[dict[str, Any]]:
    from warpi.methods.registry import METHODS
    from warpi.runs.plugins import METHOD_FILES, family
    from warpi.training.method import Method

    def needs(method: Method) -> list[str]:
        wants = {"trusted data": method.needs_meta, "noise rate": method.needs_noise_rate}
        wants[f"{method.n_nets} networks"] = method.n_nets > 1
        return [name for name, wanted in wants.items() if wanted]

    costs = json.loads((resources.files("warpi.methods") / "costs.json").read_text())  # benchmarks/digits_page.py
    return [
        {
            "name": name,
            "family": family(name),
            "year": m.year,
            "needs": needs(m),
            "cost": costs.get(name),  # relative to plain training
            "summary": _summary(m, type(m).__doc__),
            "options": asdict(m),
            "docs": METHOD_FILES.get(name) or f"docs/methods/{name}.md",
        }
        for name, m in METHODS.items()
    ]


def _datasets() -> list[dict[str, Any]]:
    from warpi.datasets.registry import DATASETS

    own = {
        "name": "PATH",
        "summary": "your own: .npz .npy .csv .tsv .parquet, image folder, manifest (csv with a path column)",
    }
    return [{"name": name, "summary": e.summary} for name, e in DATASETS.items()] + [own]


def _noises() -> list[dict[str, Any]]:
    from warpi.noise.noise import NOISES

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
    """The first line of its documentation, and how it differs from others of its class."""
    changed = [f"{k}={v}" for k, v in asdict(entry).items() if v != getattr(type(entry)(), k)]
    first, *_ = (docs or "").strip().splitlines() or [""]
    return first + (f" Here {', '.join(changed)}." if changed else "")


def _cell(value: object) -> str:
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
