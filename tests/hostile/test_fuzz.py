"""A short version of `make fuzz`, and the cases that once failed."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

FUZZ = str(Path(__file__).with_name("fuzz.py"))
ONCE_FAILED = (
    204,  # a null byte in a path of a list of images
    100002143,  # a wrong index in a parquet file
    55001703,  # something else where an audit has an array
)


def _fuzz(*flags: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, FUZZ, *flags], capture_output=True, text=True, timeout=230)


@pytest.mark.slow
def test_damaged_and_hostile_files_end_in_one_line() -> None:
    done = _fuzz("--seconds", "200", "--cases", "1500", "--seed", "100")  # the same cases on every machine
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout[done.stdout.index("{") :])
    assert result["cases"] > 100


@pytest.mark.slow
@pytest.mark.parametrize("case", ONCE_FAILED)
def test_cases_that_once_failed(case: int) -> None:
    done = _fuzz("--only", str(case))
    assert done.returncode == 0, done.stderr
