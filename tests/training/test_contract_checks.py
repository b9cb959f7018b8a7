"""`warpi --use FILE.py check`: methods that keep the contract pass, and each mistake is found by its check."""

from pathlib import Path

import pytest

from warpi.cli.app import main
from warpi.methods.registry import make_method
from warpi.runs.plugins import use
from warpi.training.contract import _CHECKS, Finding, check_method

HEAD = '''
from dataclasses import dataclass
from typing import ClassVar
import itertools
import torch
from warpi import Batch, Log, Method
from warpi.training.method import descend
from warpi.utils.settings import setting

CALLS = itertools.count()

@dataclass
class Mine(Method):
    """Cross-entropy with a factor."""

    factor: float = setting(1.0, "factor of the loss")

    def step(self, batch: Batch) -> Log:
        loss = self.factor * torch.nn.functional.cross_entropy(self.net(batch.x), batch.y)
        return {"loss": descend(loss, self.optimizer)}

@dataclass
class Broken(Mine):
'''
LOSS = "loss = torch.nn.functional.cross_entropy(self.net(batch.x), batch.y)"
MISTAKES = {
    "settings have help texts": "    q: float = 0.7",
    "trains on vectors and images": """
    def step(self, batch):
        return {"loss": self.net(batch.x).sum().detach()}
""",
    "predicts probabilities": """
    def predict(self, x):
        return self.net(x)
""",
    "logs do not keep the graph": f"""
    def step(self, batch):
        {LOSS}
        descend(loss, self.optimizer)
        return {{"loss": loss}}
""",
    "depends on its seed only": f"""
    def step(self, batch):
        {LOSS}
        return {{"loss": descend(loss * torch.rand(()), self.optimizer)}}
""",
    "resumes exactly": """
    resumes_mid_epoch: ClassVar[bool] = True
    def step(self, batch):
        loss = torch.nn.functional.cross_entropy(self.net(batch.x), batch.y)
        factor = 1.0 + 0.1 * (next(CALLS) % 2)
        return {"loss": descend(factor * loss, self.optimizer)}
""",
    "states whether it needs trusted rows": """
    def step(self, batch):
        self.meta_loader.draw()
        return super().step(batch)
""",
    "trains on tiny data or refuses it": """
    def step(self, batch):
        if len(batch.y) < 8:
            raise IndexError("no eighth row")
        return super().step(batch)
""",
    "captured steps equal plain steps": """
    needs_meta: ClassVar[bool] = True
    def step(self, batch):
        if self.loader.count < 5:  # only in the first steps, which are observed
            self.meta_loader.draw()
        return super().step(batch)
""",
}


def write(folder: Path, body: str, name: str = "Broken") -> Path:
    file = folder / "mine.py"
    file.write_text(f"{HEAD}{body}\n\nMETHODS = {{'mine': {name}()}}\n")
    return file


def findings(file: Path) -> dict[str, Finding]:
    from warpi import METHODS

    with use([file]):
        return {finding.name: finding for finding in check_method(METHODS["mine"])}


@pytest.mark.parametrize("name", ["ce", "mwnet"])
def test_built_in_methods_pass(name: str) -> None:
    found = list(check_method(make_method(name)))
    assert [f.name for f in found] == list(_CHECKS)
    assert {f.result for f in found} == {"ok"}, found


@pytest.mark.parametrize("check", MISTAKES)
def test_each_mistake_is_found(check: str, tmp_path: Path) -> None:
    found = findings(write(tmp_path, MISTAKES[check]))
    assert found[check].result == "failed", found
    assert found[check].note


def test_every_check_has_a_mistake_that_it_finds() -> None:
    assert list(MISTAKES) == list(_CHECKS)


def test_a_step_that_cannot_be_recorded_is_no_failure(tmp_path: Path) -> None:
    body = """
    def create_state(self):
        self.calls = 0
    def step(self, batch):
        self.calls += 1
        return super().step(batch)
"""
    found = findings(write(tmp_path, body))["captured steps equal plain steps"]
    assert found.result == "skipped"
    assert "calls" in found.note


def test_an_error_names_its_line(tmp_path: Path) -> None:
    file = write(tmp_path, "    def step(self, batch):\n        return batch.nothing")
    line = file.read_text().splitlines().index("        return batch.nothing") + 1
    found = findings(file)
    assert found["trains on vectors and images"].note.startswith(f"mine.py:{line}: AttributeError")


def test_the_command_prints_one_line_per_check(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good = write(tmp_path, "    pass")
    assert main(["--use", str(good), "check"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(None, 2)[:2] for line in lines] == [["mine:", "ok"]] * len(_CHECKS)
    bad = write(tmp_path, MISTAKES["predicts probabilities"])
    assert main(["--use", str(bad), "check"]) == 2
    printed = capsys.readouterr()
    assert "mine: failed  predicts probabilities: " in printed.out
    assert "failed" in printed.err


def test_without_a_method_there_is_nothing_to_check(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check"]) == 2
    assert "--use FILE.py check" in capsys.readouterr().err
