"""Fixtures for the tests of reports."""

import pytest

from warpi.report import plot_style


@pytest.fixture(autouse=True)
def cheap_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few pixels, and text that is not converted to paths."""
    monkeypatch.setattr(plot_style, "DPI", 30)
    monkeypatch.setitem(plot_style._STYLE, "svg.fonttype", "none")
