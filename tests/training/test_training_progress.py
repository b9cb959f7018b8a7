"""The lines that a training prints."""

import pytest

from warpi.training.progress import MOST_LINES, Progress


@pytest.mark.parametrize("epochs", [1, 12, 13, 25, 143, 300])
def test_about_a_dozen_epochs_are_printed(epochs: int, capsys: pytest.CaptureFixture[str]) -> None:
    with Progress(epochs, 1, 0, quiet=False) as progress:
        for epoch in range(1, epochs + 1):
            progress.line({"epoch": epoch, "lr": 0.1, "seconds": 1.0})
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("epoch")]
    assert min(epochs, MOST_LINES) / 2 <= len(lines) <= MOST_LINES
    assert lines[-1].startswith(f"epoch {epochs}/{epochs}")
