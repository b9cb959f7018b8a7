"""A short version of `make fuzz`."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

FUZZ = str(Path(__file__).with_name("fuzz.py"))


def _fuzz(*flags: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, FUZZ, *flags], capture_output=True, text=True, timeout=230)


@pytest.mark.slow
def test_damaged_and_hostile_files_end_in_one_line() -> None:
    done = _fuzz("--seconds", "200", "--cases", "1000", "--seed", "100")  # the same cases on every machine
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout[done.stdout.index("{") :])
    assert result["cases"] > 100
