"""The page about reliability names tests and limits that exist."""

import re
from pathlib import Path

from warpi.utils.limits import LIMITS, PREFIX

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "reliability.md").read_text()


def test_every_named_test_exists() -> None:
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", PAGE)
    assert len(named) > 50
    absent = [name for name in named if f"def {name[1]}(" not in (ROOT / name[0]).read_text()]
    assert not absent


def test_every_limit_is_listed_with_its_default() -> None:
    for name, (default, _) in LIMITS.items():
        assert f"| `{PREFIX}{name}` | {default:,} |" in PAGE


def test_rows_are_numbered() -> None:
    numbers = [int(n) for n in re.findall(r"^\| (\d+) \|", PAGE, re.M)]
    assert numbers == list(range(1, len(numbers) + 1))
    assert len(numbers) > 43
