"""Custom methods and networks from a file (`--use`): in every command, in other processes, and after a stop."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import warpi
from warpi import METHODS, NETS, UserError, fit
from warpi.cli.app import main
from warpi.nets.registry import make_net
from warpi.runs import plugins
from warpi.runs.plugins import use
from warpi.sweep.plan import read_plan
from warpi.utils import distributed

ROOT = Path(__file__).resolve().parents[2]
MINE = '''
from __future__ import annotations  # hints are looked up in the module by name

from dataclasses import dataclass
from typing import ClassVar

from torch import nn

from beside import WIDTH  # a file in the same folder
from warpi import Batch; from warpi import Log; from warpi import Method
from warpi.training.method import descend


@dataclass
class Mine(Method):
    """Bounded loss."""

    year: ClassVar[int | None] = 2031
    q: float = 0.7

    def step(self, batch: Batch) -> Log:
        p = self.net(batch.x).softmax(dim=1).gather(1, batch.y[:, None])
        loss = ((1 - p**self.q) / self.q).mean()
        descend(loss, self.optimizer)
        return {"loss": loss.detach()}


class Tiny(nn.Module):
    """One layer."""

    def __init__(self, shape, n_classes):
        super().__init__()
        self.fc = nn.Linear(shape[0], n_classes)

    def forward(self, x):
        return self.fc(x)


def build(shape, n_classes):
    return nn.Sequential(nn.Flatten(), nn.LazyLinear(WIDTH), nn.ReLU(), nn.Linear(WIDTH, n_classes))


METHODS = {"mine": Mine(), "mine_q05": Mine(q=0.5)}
NETS = {"tiny": Tiny, "small": build}
'''
BEGINNING = (
    "from dataclasses import dataclass, field\nfrom torch import nn\nfrom warpi import CE, METHODS, Method, WarPI\n"
)
TINY = {"data": "digits", "limit": 300, "epochs": 2, "meta": 20, "batch_size": 32, "noise": "pair:0.4", "threads": 1}
FLAGS = [word for key, value in TINY.items() for word in (f"--{key.replace('_', '-')}", str(value))]


@pytest.fixture
def plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The path of a plugin file, relative to the working directory."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(MINE)
    (tmp_path / "beside.py").write_text("WIDTH = 16\n")
    return "mine.py"


@pytest.fixture(autouse=True)
def _no_trace() -> Iterator[None]:
    """Commands leave no trace of a plugin in the process."""
    state = [*METHODS], [*NETS], [*sys.path]
    yield
    assert ([*METHODS], [*NETS], [*sys.path]) == state
    assert not plugins.flags()
    assert not plugins.METHOD_PLUGINS
    assert not plugins.NET_PLUGINS
    assert "beside" not in sys.modules


def stored(folder: Path | str) -> dict[str, Any]:
    spec: dict[str, Any] = json.loads((Path(folder) / "spec.json").read_text())["spec"]
    return spec


def losses(folder: Path | str) -> list[float]:
    return [json.loads(line)["loss"] for line in (Path(folder) / "results.jsonl").read_text().splitlines()]


def error_of(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    """The one-line error message of a command."""
    assert main([*argv]) == 2
    err = capsys.readouterr().err
    assert len(err.splitlines()) == 1
    return err


# -- commands --------------------------------------------------------------------------------------------------------


def test_every_command_knows_the_file(plugin: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--use", plugin]
    assert main([*flags, "fit", *FLAGS, "--method", "mine", "--q", "0.9", "--net", "small", "--out", "runs/a"]) == 0
    spec, text = stored("runs/a"), Path("runs/a/spec.json").read_text()
    assert (spec["method"], spec["recipe"]["net"], spec["changed"]) == ("mine", "small", {"q": 0.9})
    assert "mine.py" not in text
    assert str(tmp_path / "mine") not in text, "only names are stored"
    assert main([*flags, "fit", "--out", "runs/a", "--resume", "--quiet"]) == 0
    resume = [*flags, "fit", "--out", "runs/a", "--resume"]
    assert "started with q = 0.9, not 0.8" in error_of(capsys, *resume, "--q", "0.8")

    with use([plugin]):
        module = sys.modules[type(METHODS["mine"]).__module__]
    fit("python", method=module.Mine(q=0.9), net=module.build, **TINY)
    assert losses("runs/a") == losses("python"), "the same run as in Python"

    np.savez("new.npz", x=np.zeros((5, 64), np.float32))
    assert main([*flags, "audit", "runs/a", "--csv", "audit.csv"]) == 0
    assert main([*flags, "predict", "runs/a", "--data", "new.npz", "--csv", "new.csv"]) == 0
    assert len(Path("new.csv").read_text().splitlines()) == 6
    assert main([*flags, "report", "runs/a", "--audit", "--out", "page"]) == 0
    page = Path("page/report.html").read_text()
    assert "<pre>warpi --use mine.py fit " in page
    assert "mine.py must define METHODS = {&#39;mine&#39;: ...} and NETS = {&#39;small&#39;: ...}" in page
    assert main([*flags, "figures", "runs/a", "--out", "figures"]) == 0
    assert main([*flags, "review", "runs/a", "--out", "checked", "--export", "corrected.csv"]) == 0
    options = ["--net", "small", "--variants", "sgd", "--repeats", "1", "--batch", "4", "--image-size", "4"]
    assert main([*flags, "bench", "meta-step", *options, "--device", "cpu"]) == 0
    assert "small" in capsys.readouterr().out


def test_lists(plugin: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--use", plugin, "list", "methods", "--json"]) == 0
    *others, first, second = json.loads(capsys.readouterr().out)
    assert all(row["family"] and row["docs"].startswith("docs/methods/") for row in others)
    assert (first["name"], first["family"], first["year"], first["cost"]) == ("mine", None, 2031, None)
    assert (first["summary"], first["docs"]) == ("Bounded loss.", "mine.py")
    assert second["summary"] == "Bounded loss. Here q=0.5."
    assert main(["--use", plugin, "list", "methods"]) == 0
    assert re.search(r"^mine +2031 +Bounded", capsys.readouterr().out, re.MULTILINE)
    assert main(["--use", plugin, "list", "nets"]) == 0
    assert re.search(r"^tiny +One layer\.\s*\nsmall +from mine\.py", capsys.readouterr().out, re.MULTILINE)
    with pytest.raises(SystemExit):
        main(["--use", plugin, "fit", "--method", "mine_q05", "--help-all"])
    assert re.search(r"--q X +setting q of method mine_q05 \(default: 0\.5\)", capsys.readouterr().out)


def test_a_class_without_docstring_and_a_partial_as_builder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "bare.py"
    file.write_text(
        BEGINNING + "from functools import partial\nclass A(CE): pass\nclass B(CE):\n    family = 'baseline'\n"
        "METHODS = {'a': A(), 'b': B()}\nNETS = {'part': partial(lambda w, shape, k: nn.Linear(*shape, k), 3)}\n"
    )
    assert main(["--use", str(file), "list", "methods", "--json"]) == 0
    a, b = json.loads(capsys.readouterr().out)[-2:]
    assert (a["family"], a["summary"], b["family"]) == (None, "", "baseline")
    assert main(["--use", str(file), "list", "methods"]) == 0
    assert (
        main(["--use", str(file), "fit", *FLAGS, "--method", "a", "--net", "part", "--out", str(tmp_path / "r")]) == 0
    )


def test_the_example_file_is_a_plugin(tmp_path: Path) -> None:
    example, out = str(ROOT / "examples" / "own_method.py"), str(tmp_path / "run")
    assert main(["--use", example, "fit", *FLAGS, "--method", "my_gce", "--q", "0.9", "--out", out]) == 0
    assert stored(out)["options"] == {"q": 0.9}


def test_help_mentions_the_flag(capsys: pytest.CaptureFixture[str], plugin: str) -> None:
    for argv in (["--help"], ["--use", plugin], ["--use", plugin, "--help"]):
        assert main(argv) == 0
        assert "warpi --use FILE.py COMMAND ..." in capsys.readouterr().out
    assert main([f"--use={plugin}", "--version"]) == 0


def test_several_files_each_executed_once(plugin: str, tmp_path: Path) -> None:
    count = "from pathlib import Path\nwith Path('count').open('a') as f:\n    f.write('x')\n"
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "mine.py").write_text(count + "from warpi import CE\nMETHODS = {'other': CE()}\n")
    with use([plugin, "b/mine.py", str(tmp_path / "b" / "mine.py")]):
        assert {"mine", "mine_q05", "other"} <= METHODS.keys()
        assert plugins.flags() == ["--use", "mine.py", "--use", "b/mine.py"]
    assert Path("count").read_text() == "x"


def test_ranks_get_the_flag(plugin: str, monkeypatch: pytest.MonkeyPatch) -> None:
    started = []
    monkeypatch.setattr(distributed, "launch", lambda n, argv, out, *_: started.append((n, argv, out)) or 0)
    argv = ["fit", "--method", "mine", "--device", "cpu", "--devices", "2", "--out", "r"]
    with pytest.raises(SystemExit):
        main(["--use", plugin, *argv])
    assert started == [(2, ["--use", plugin, *argv], Path("r"))]


# -- other processes, and resuming -----------------------------------------------------------------------------------

RECIPE = """
[defaults]
data = "digits"
limit = 300
epochs = {epochs}
meta = 20
net = "tiny"
threads = 1
[grid]
method = ["mine", "mine_q05", "ce", "warpi"]
[method.mine]
q = 0.9
"""


def start(*argv: str) -> "subprocess.Popen[str]":
    """Start warpi in another process, with a slow version of the method so that there is time to stop it."""
    file = Path("mine.py")
    file.write_text(MINE.replace("        return {", "        __import__('time').sleep(0.1)\n        return {"))
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "src")}
    command, pipe = [sys.executable, "-m", "warpi", *argv], subprocess.PIPE
    process = subprocess.Popen(command, env=env, stderr=pipe, stdout=subprocess.DEVNULL, text=True)
    end = time.monotonic() + 120
    while not list(Path().glob("runs/**/checkpoint.safetensors")):
        assert process.poll() is None
        assert time.monotonic() < end
        time.sleep(0.02)
    file.write_text(MINE)
    return process


@pytest.mark.slow  # test_workers_of_a_sweep_get_the_flag and the tests of sweeps cover the parts
def test_a_sweep_in_two_processes_is_stopped_and_resumed(plugin: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("cmp.toml").write_text(RECIPE.format(epochs=6))
    sweep = start("--use", plugin, "sweep", "cmp.toml", "--jobs", "2", "--device", "cpu")
    sweep.send_signal(signal.SIGINT)
    _, err = sweep.communicate(timeout=120)
    assert sweep.returncode == 130, err
    _, command = err.strip().splitlines()[-1].split("resume with: ")
    assert command == f"warpi --use {plugin} sweep cmp.toml --jobs 2 --device cpu"
    begun = {path.parent.name for path in Path("runs/cmp").glob("*/checkpoint.safetensors")}
    assert begun <= {"mine_given_seed0", "mine_q05_given_seed0"}, "the worker processes know the file"
    assert not list(Path("runs/cmp").glob("*/done")), "it was stopped before the end"
    assert main([word.replace("2", "1") for word in shlex.split(command)[1:]]) == 0
    out = capsys.readouterr().out
    assert "4 of 4 runs done" in out
    assert re.search(r"mine \(q=0.9\).*\n.*mine_q05 ", out)
    with use([plugin]):
        fit("alone", method="mine_q05", **{**TINY, "noise": "given", "epochs": 6, "net": "tiny", "batch_size": 64})
    assert losses("alone") == losses("runs/cmp/mine_q05_given_seed0"), "the stop changes nothing"


def test_workers_of_a_sweep_get_the_flag(plugin: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class Started(Exception):
        pass

    def popen(argv: list[str], **_: Any) -> None:
        raise Started(argv)

    Path("cmp.toml").write_text(RECIPE.format(epochs=1))
    monkeypatch.setattr("warpi.sweep.processes.subprocess.Popen", popen)
    command = ["--use", plugin, "sweep", "cmp.toml", "--device", "cpu"]
    with pytest.raises(Started) as caught:
        main([*command, "--jobs", "2"])
    (argv,) = caught.value.args
    assert argv[1:6] == ["-m", "warpi", *command[:3]]


def test_a_run_without_its_file(plugin: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The error names the tables that the file must define, and its commands work."""
    assert main(["--use", plugin, "fit", *FLAGS, "--method", "mine", "--net", "tiny", "--out", "a b"]) == 0
    capsys.readouterr()
    error = error_of(capsys, "audit", "a b")
    assert "made with a custom method and a custom network" in error
    assert "METHODS = {'mine': ...} and NETS = {'tiny': ...}" in error
    assert "warpi --use FILE.py audit 'a b'" in error
    assert "warpi --use FILE.py fit --out 'a b' --resume;" in error_of(capsys, "fit", "--out", "a b", "--resume")
    for command in re.findall(r"warpi (--use FILE.py (?:audit|fit)[^,;]*)", error):
        assert main([plugin if word == "FILE.py" else word for word in shlex.split(command)]) == 0
    with pytest.raises(UserError, match=r"method = 'mine', not 'GCE'.* or pass its file to"):
        warpi.audit.audit("a b", method=GCE())
    with use([plugin]):
        assert len(warpi.audit.audit("a b", save=False))


class GCE(warpi.CE):
    """Another custom method."""


def test_a_run_started_in_python_is_opened_in_the_shell(
    plugin: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The file must use the stored names: that of the class, and that of the function without its module."""
    with use([plugin]):
        module = sys.modules[type(METHODS["mine"]).__module__]
    fit("a", method=module.Mine(q=0.5), net=module.build, **TINY)
    fit("b", net=lambda shape, k: module.build(shape, k), **TINY)
    (tmp_path / "again.py").write_text(f"{MINE}\nMETHODS, NETS = {{'Mine': Mine()}}, {{'build': build}}\n")
    assert "NETS = {'build': ...}" in error_of(capsys, "audit", "a")
    assert main(["--use", "again.py", "audit", "a"]) == 0
    assert main(["--use", "again.py", "fit", "--out", "a", "--resume", "--net", "build"]) == 0
    capsys.readouterr()
    assert "FILE.py" not in error_of(capsys, "audit", "b"), "a lambda has no name"
    (tmp_path / "ours.py").write_text("def resnet20(shape, k): ...\nNETS = {'x': resnet20}\n")
    with use(["ours.py"]):
        assert plugins.stored_net("ours.resnet20") == "ours.resnet20", "not the built-in one"


def test_a_changed_default_in_the_file(plugin: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A run resumes with its stored values. A sweep, which would mix both values, refuses."""
    flags = ["--use", plugin]
    Path("cmp.toml").write_text(RECIPE.format(epochs=2))
    sweep = [*flags, "sweep", "cmp.toml", "--device", "cpu", "--jobs", "1"]
    assert main(sweep) == 0
    assert main([*flags, "fit", *FLAGS, "--method", "mine", "--q", "0.9", "--out", "set"]) == 0
    capsys.readouterr()
    (tmp_path / plugin).write_text(MINE.replace("q=0.5", "q=0.4").replace("q: float = 0.7", "q: float = 0.6"))
    assert main([*flags, "fit", "--out", "set", "--resume", "--quiet"]) == 0
    with pytest.raises(SystemExit):
        main(sweep)
    failed = capsys.readouterr().err
    assert re.fullmatch(r"warpi: mine_q05_given_seed0 .*: .* started with q = 0\.5, not with q = 0\.4; .*\n", failed)
    for argv in (["audit"], ["fit", "--resume", "--out"]):
        assert main([*flags, *argv, "runs/cmp/mine_q05_given_seed0"]) == 0, "with its stored values"
    assert stored("runs/cmp/mine_q05_given_seed0")["options"] == {"q": 0.5}


def test_a_removed_field(plugin: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--use", plugin]
    assert main([*flags, "fit", *FLAGS, "--method", "mine", "--q", "0.9", "--out", "a"]) == 0
    (tmp_path / plugin).write_text(MINE.replace("    q: float = 0.7\n", "    q = 0.7\n").replace("q=0.5", ""))
    wanted = "made with q = 0.9, but the method 'mine' of mine.py no longer has a field 'q'; restore it, or train"
    for argv in (["audit"], ["fit", "--resume", "--out"]):
        assert wanted in error_of(capsys, *flags, *argv, "a")


def test_kept_results_with_another_default_are_not_used(plugin: str, tmp_path: Path) -> None:
    from warpi.sweep.run_states import why_not_kept

    settings: dict[str, Any] = {"method": "mine", **TINY, "seed": 0}
    with use([plugin]):
        done = fit("a", **settings)
        (done.path / "sweep.json").write_text(json.dumps(settings))
        assert why_not_kept(done.path, settings) is None
    (tmp_path / plugin).write_text(MINE.replace("q: float = 0.7", "q: float = 0.6"))
    with use([plugin]):
        assert why_not_kept(done.path, settings) == "it was run with q = 0.7, not with q = 0.6"


def test_the_recipe_of_the_docs(plugin: str, tmp_path: Path) -> None:
    (text,) = re.findall(r"~~~toml\n(.*?)~~~", (ROOT / "docs" / "sweep.md").read_text(), re.DOTALL)
    (tmp_path / "compare.toml").write_text(text)
    with use([plugin]):
        names = [job.name for job in read_plan(tmp_path / "compare.toml").jobs]
    assert len(names) == 3 * 4
    assert "mine_pair-0.4_q-0.9_seed2" in names


def test_a_sweep_file_may_set_the_fields_of_a_plugin(plugin: str, tmp_path: Path) -> None:
    file = tmp_path / "s.toml"
    file.write_text("[method.mine]\nshyness = [0.1, 0.2]\n[grid]\nmethod = ['mine']\n")
    (tmp_path / plugin).write_text(MINE.replace("q: float = 0.7", "q: float = 0.7\n    shyness: float = 0.0"))
    with pytest.raises(UserError, match="unknown method 'mine'"):
        read_plan(file)
    with use([plugin]):
        assert len(read_plan(file).jobs) == 2


def test_a_custom_class_with_a_built_in_name(tmp_path: Path) -> None:
    """Data-dependent defaults are for the built-in WarPI, not for another class of that name."""
    file = tmp_path / "n.py"
    fields = "@dataclass\nclass WarPI(CE):\n    output: str = 'mine'\n    push: float = 1.0\n"
    file.write_text(BEGINNING + fields + "METHODS = {'n': WarPI()}\n")
    with use([file]):
        fit(tmp_path / "a", method="n", **TINY)
        assert stored(tmp_path / "a")["options"] == {"output": "mine", "push": 1.0}
        assert len(fit(tmp_path / "a", resume=True).history) == 2


def test_a_module_next_to_the_file_can_be_imported_late(tmp_path: Path) -> None:
    (tmp_path / "beside.py").write_text("WIDTH = 16\n")
    late = "def late(shape, n):\n    from beside import WIDTH\n    return nn.Linear(WIDTH, n)\nNETS = {'late': late}\n"
    (tmp_path / "mine.py").write_text(BEGINNING + late)
    with use([tmp_path / "mine.py"]):
        assert tuple(make_net("late", (16,), 3).weight.shape) == (3, 16)  # type: ignore[arg-type]


def test_modules_of_the_same_name_in_two_folders(tmp_path: Path) -> None:
    """Python keeps one module per name, so the second file would get the module of the first one."""
    for folder, width in (("a", 3), ("b", 4)):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "beside.py").write_text(f"WIDTH = {width}\n")
        text = f"{BEGINNING}from beside import WIDTH\nNETS = {{'n{folder}': lambda shape, n: nn.Linear(WIDTH, n)}}\n"
        (tmp_path / folder / "mine.py").write_text(text)
    files = [tmp_path / folder / "mine.py" for folder in "ab"]
    with (
        pytest.raises(
            UserError,
            match=r"folder of .*b/mine\.py contains a module 'beside', but .*a/beside\.py with the same name is",
        ),
        use(files),
    ):
        pass
    for file, width in zip(files, (3, 4), strict=True):  # one after the other, each gets its own module
        with use([file]):
            assert make_net(f"n{file.parent.name}", (width,), 2).weight.shape[1] == width  # type: ignore[union-attr, index]


def test_a_variant_of_a_built_in_method_keeps_its_values(tmp_path: Path) -> None:
    """Data-dependent defaults replace the paper's values, not those that the file sets."""
    file = tmp_path / "mine.py"
    file.write_text(BEGINNING + "METHODS = {'loose': WarPI(output='unbounded', samples=3)}\n")
    with use([file]):
        fit(tmp_path / "a", method="loose", **TINY)
    fit(tmp_path / "b", method="warpi", **TINY)
    options, usual = stored(tmp_path / "a")["options"], stored(tmp_path / "b")["options"]
    assert options == usual | {"output": "unbounded", "samples": 3}
    assert (usual["output"], warpi.WarPI().output) == ("tanh", "sigmoid"), "the default depends on the data"


# -- errors ----------------------------------------------------------------------------------------------------------

STEP = "    def step(self, batch): ...\n"
ERRORS = {
    "x = 1": "{file} defines neither METHODS nor NETS; end it with METHODS = {{'mine': Mine()}}",
    "METHODS['mine'] = CE()": "{file} defines neither METHODS nor NETS",
    "METHODS = [CE()]": "METHODS in {file} must be a dict such as {{'mine': Mine()}}, got list",
    "NETS = nn.Linear": "NETS in {file} must be a dict such as {{'tiny': build}}, got type",
    "METHODS = {'ce': CE()}": "METHODS['ce'] in {file}: 'ce' is the name of a built-in method; choose another",
    "NETS = {'mlp': nn.Linear}": "NETS['mlp'] in {file}: 'mlp' is the name of a built-in network",
    "METHODS = {'my-ce': CE()}": "METHODS['my-ce'] in {file}: a name must consist of letters, digits and _",
    "METHODS = {'': CE()}": "METHODS[''] in {file}: a name must consist of letters",
    "METHODS = {1: CE()}": "METHODS[1] in {file}: a name must consist of letters",
    "METHODS = {'a': WarPI}": "METHODS['a'] in {file} is the class WarPI, but an instance is needed; use WarPI()",
    "METHODS = {'a': nn.Linear}": "METHODS['a'] in {file} must be a warpi.Method, got the class Linear; derive",
    "METHODS = {'a': 'ce'}": "METHODS['a'] in {file} must be a warpi.Method, got str; derive your class from warpi",
    f"@dataclass\nclass A(Method):\n    q: float\n{STEP}METHODS = {{'a': A(1.0)}}": "A cannot be created without "
    "arguments, or not from its fields (A.__init__() missing 1 required positional argument: 'q'); make it a",
    f"@dataclass\nclass A(Method):\n    q: int = field(default=1, init=False)\n{STEP}METHODS = {{'a': A()}}": "A "
    "cannot be created without arguments, or not from its fields (",
    "class A(CE):\n    q: float = 1.0\nMETHODS = {'a': A()}": "'q' of A is not a field; add @dataclass to the",
    "@dataclass\nclass A(CE):\n    no_compile: bool = True\nMETHODS = {'a': A()}": "two fields of a run would be the",
    "@dataclass\nclass A(CE):\n    lr: float = 1.0\nMETHODS = {'a': A()}": "A has a field 'lr', which is a setting of",
    "@dataclass\nclass A(CE):\n    device: str = 'x'\nMETHODS = {'a': A()}": "A has a field 'device', which is",
    "@dataclass\nclass A(CE):\n    ok: int = 1\n    q: dict = field(default_factory=dict)\nMETHODS = {'a': A()}": "the "
    "field 'q' of A cannot be a flag (KeyError: <class 'dict'>); it may be int, float, str, bool",
    "NETS = {'a': nn.Linear(64, 10)}": "NETS['a'] in {file} is a module, whose weights would differ between "
    "processes; use its class, or a function: lambda shape, n_classes: Linear()",
    "NETS = {'a': 3}": "NETS['a'] in {file} must be a function (shape, n_classes) -> nn.Module, got int",
    "NETS = {'a': lambda: 3}": "NETS['a'] in {file} is called with (shape, n_classes), but does not accept them (too",
    "\nx = 1 / 0": "cannot load {file}:5: ZeroDivisionError: division by zero; for the full traceback: python {file}",
    "import nothing_here": "cannot load {file}:4: ModuleNotFoundError: No module named 'nothing_here'; for",
    "def f(:": "cannot load {file}:4: SyntaxError: invalid syntax",
    "raise SystemExit(0)": "cannot load {file}:4: SystemExit: 0",
    "assert False": "cannot load {file}:4: AssertionError; for the full",
    "METHODS = {'a': WarPI(samples='many')}": "cannot load {file}:4: samples must be int, got 'many'; for the full",
    "import name_error": "cannot load {folder}/name_error.py:2: NameError: name 'y' is not defined",
    "import syntax_error": "cannot load {folder}/syntax_error.py:1: SyntaxError: ",
}


@pytest.mark.parametrize("content", ERRORS)
def test_errors_in_a_file(content: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "name_error.py").write_text("x = 1\nx = y\n")
    (tmp_path / "syntax_error.py").write_text("x = (\n")
    file = tmp_path / "own.py"
    file.write_text(f"{BEGINNING}{content}\n")
    assert ERRORS[content].format(file=file, folder=tmp_path) in error_of(capsys, "--use", str(file), "list", "nets")


def test_built_in_methods_pass_the_checks() -> None:
    for name in ("ce", "forward", "warpi", "dividemix", "mentornet_dd"):
        assert plugins._check_method(METHODS[name], name) is METHODS[name]


def test_errors_on_the_command_line(plugin: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "second.py").write_text("from warpi import CE\nMETHODS = {'mine': CE()}\n")
    for argv, message in (
        (["--use", "gone.py", "list", "nets"], "there is no file 'gone.py'; --use takes a Python file"),
        (["--use", ".", "list", "nets"], "cannot read '.': Is a directory; --use takes a Python file"),
        (["--use"], "--use takes a Python file, got ''; for example: warpi --use mine.py fit ..."),
        (["--use="], "--use takes a Python file, got ''"),
        (["--use", "--use", plugin], "--use takes a Python file, got '--use'"),
        (["fit", "--use", plugin], "--use FILE.py goes before the command: warpi --use FILE.py fit ..."),
        (["--use", plugin, "sweep", f"--use={plugin}"], "--use FILE.py goes before the command"),
        (["--use", plugin, "ftt"], "unknown command 'ftt'; did you mean 'fit'?"),
        (["--use", plugin, "fit", "--method", "mien", "--out", "x"], "unknown method 'mien'; did you mean 'mine'?"),
        (["--use", plugin, "fit", "--method", "mine", "--p", "1", "--out", "x"], "unknown flag '--p'"),
        (["--use", plugin, "--use", "second.py", "list", "nets"], "'mine' is the name of a method in mine.py; choose"),
    ):
        assert message in error_of(capsys, *argv)


NETWORKS = {
    "raise ValueError('too narrow')": "cannot be built for (64,), 10: own.py:5: ValueError: too narrow",
    "return 3": "NETS['a'] in {file}: a network must be a name, an nn.Module or a function (shape, n_classes) -> "
    "nn.Module; the function returned int",
    "return nn.Linear(64, 3)": "NETS['a'] in {file}: the network Linear returned shape (2, 3) for a batch of shape",
    "return nn.Linear(3, 10)": "NETS['a'] in {file}: the network Linear failed on a batch of shape (2, 64)",
}


@pytest.mark.parametrize("content", NETWORKS)
def test_networks_that_cannot_be_used(content: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "own.py"
    file.write_text(f"{BEGINNING}def build(shape, n_classes):\n    {content}\nNETS = {{'a': build}}\n")
    error = error_of(capsys, "--use", str(file), "fit", *FLAGS, "--net", "a", "--out", str(tmp_path / "r"))
    assert NETWORKS[content].format(file=file) in error


def test_nothing_in_a_run_folder_or_sweep_file_is_executed(
    plugin: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Stored names never lead to a file, whatever they are."""
    (tmp_path / "evil.py").write_text(
        "from pathlib import Path\nPath('executed').touch()\nfrom warpi import CE\nMETHODS = {'evil': CE()}\n"
    )
    assert main(["fit", *FLAGS, "--method", "ce", "--out", "a", "--quiet"]) == 0
    text = Path("a/spec.json").read_text()
    for old, new in (
        ('"method": "ce"', '"method": "evil"'),
        ('"method": "ce"', '"method": "evil.py"'),
        ('"net": "mlp"', '"net": "evil.build"'),
        ('"format"', '"use": "evil.py", "format"'),
    ):
        Path("a/spec.json").write_text(text.replace(old, new))
        main(["audit", "a"])
        main(["--use", plugin, "fit", "--out", "a", "--resume"])
    for recipe in ("use = 'evil.py'\n", "[sweep]\nuse = 'evil.py'\n", "[defaults]\nuse = 'evil.py'\n"):
        Path("s.toml").write_text(recipe)
        assert main(["sweep", "s.toml", "--set", "method=evil"]) == 2
    Path("s.toml").write_text("[defaults]\nmethod = 'evil'\nnet = 'evil.py'\n")
    assert main(["sweep", "s.toml"]) == 2
    assert not Path("executed").exists()
    assert main(["--use", "evil.py", "list", "nets"]) == 0
    assert Path("executed").exists(), "only the command line executes files"
    capsys.readouterr()
