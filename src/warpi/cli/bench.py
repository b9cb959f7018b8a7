"""`warpi bench`, for the authors of this library: its code is in `benchmarks/`, not in the package."""

import sys
from importlib import import_module
from pathlib import Path

from warpi.errors import UserError, unknown


def bench(argv: list[str]) -> None:
    root = Path(__file__).resolve().parents[3]
    if not (root / "benchmarks" / "meta_step").is_dir():
        raise UserError("warpi bench needs a checkout of the repository; run there: python -m benchmarks.meta_step")
    name, *flags = argv or ["--help"]
    if name not in ("meta-step", "-h", "--help"):
        raise unknown("benchmark", name, ["meta-step"])
    sys.path.insert(0, str(root))
    import_module("benchmarks.meta_step.__main__").main(flags if name == "meta-step" else ["--help"])
