"""A training run: its folder, the errors it raises, and that an interruption changes nothing."""

import json
import math
import os
import random
import signal
import threading
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import warpi
from warpi.audit import audit
from warpi.cli.app import main
from warpi.data.batch import Batch
from warpi.data.image_files import FileExamples
from warpi.data.split import Split
from warpi.errors import UserError
from warpi.functional.losses import cross_entropy
from warpi.methods.mwnet import MWNet
from warpi.methods.plain import CE
from warpi.methods.registry import METHODS
from warpi.methods.warpi import WarPI
from warpi.runs import run
from warpi.runs.reopen import reopen
from warpi.runs.run import fit, fitting
from warpi.runs.spec import DataSpec, RunSpec, prepare
from warpi.training import checkpoint, engine, progress
from warpi.training.engine import Diverged, TrainingState, train
from warpi.training.method import Log, Method, descend
from warpi.training.recipe import Recipe
from warpi.utils import leases
from warpi.utils.devices import Stopped, pick_device
from warpi.utils.leases import LeaseLost, one_writer

SMALL: dict[str, Any] = {"data": "digits", "noise": "uniform:0.4", "limit": 300, "meta": 20, "epochs": 2}
QUICK: dict[str, Any] = {**SMALL, "method": "ce", "batch_size": 32}  # 5 steps per epoch


def records(path: Path) -> list[dict[str, float]]:
    """The records of results.jsonl without their times."""
    lines = [json.loads(line) for line in (path / "results.jsonl").read_text().splitlines()]
    return [{name: value for name, value in line.items() if name != "seconds"} for line in lines]


def raw(state: Any) -> Any:
    """The state of a checkpoint as plain values that == compares bit by bit."""
    if isinstance(state, Tensor):
        return str(state.dtype), tuple(state.shape), state.contiguous().view(-1).view(torch.uint8).tolist()
    if isinstance(state, dict):
        return {key: raw(value) for key, value in state.items()}
    return [raw(value) for value in state] if isinstance(state, list | tuple) else state


def final(path: Path) -> Any:
    return raw(checkpoint.load(path / "checkpoint.safetensors"))


def edit_spec(path: Path, change: Any) -> None:
    spec = json.loads((path / "spec.json").read_text())
    change(spec)
    (path / "spec.json").write_text(json.dumps(spec))


class Interrupt:
    """Sends SIGTERM to this process after a number of steps, and counts the steps."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, after: int) -> None:
        self.steps, self.after = 0, after
        monkeypatch.setattr(run.Progress, "step", self.step)

    def step(self, *_: Any) -> None:
        self.steps += 1
        if self.steps == self.after:
            signal.raise_signal(signal.SIGTERM)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of an uninterrupted run. Tests do not change it."""
    path = tmp_path_factory.mktemp("whole") / "run"
    fit(path, **QUICK)
    return path


class TestFolder:
    def test_files(self, whole: Path) -> None:
        names = {p.name for p in whole.iterdir()}
        assert names == {
            *("spec.json", "results.jsonl", "done", ".lease-1"),
            *("checkpoint.safetensors", "checkpoint.safetensors.previous"),
        }

    def test_spec(self, whole: Path) -> None:
        stored = json.loads((whole / "spec.json").read_text())
        assert stored["format"] == "warpi-run/1"
        assert stored["version"] == warpi.__version__
        spec = stored["spec"]
        assert {name: spec[name] for name in ("data", "noise", "meta", "limit", "method", "seed")} == {
            "data": "digits",
            "noise": "uniform:0.4",
            "meta": 20,
            "limit": 300,
            "method": "ce",
            "seed": 0,
        }
        assert spec["options"] == spec["changed"] == {}
        assert spec["recipe"]["batch_size"] == 32
        assert spec["recipe"]["lr"] == 0.05, "a default for this data set"
        facts = stored["facts"]
        assert facts["n_train"] + facts["n_meta"] + facts["n_val"] + facts["n_test"] == 300
        assert facts["n_meta"] == 20
        assert 0.2 < facts["wrong_share"] < 0.5
        assert len(facts["noise_sha256"]) == 64
        assert stored["environment"]["device"] == "cpu"

    def test_results(self, whole: Path) -> None:
        first, second = records(whole)
        assert [first["epoch"], second["epoch"]] == [1, 2]
        assert set(first) == {
            *("epoch", "lr", "loss", "val_acc", "val_nll", "val_ece", "test_acc", "test_nll", "test_ece")
        }
        assert second["loss"] < first["loss"]

    def test_fit_returns_the_trained_method(self, whole: Path, tmp_path: Path) -> None:
        done = fit(tmp_path / "a", **QUICK)
        x = next(done.task.train.batches(7)).x
        done.method.net.eval()
        p = done.method.predict(x)
        assert p.shape == (7, 10)
        assert torch.allclose(p.sum(1), torch.ones(7))
        assert [{**r, "seconds": 0} for r in done.history] == [{**r, "seconds": 0} for r in records(whole)]

    def test_two_runs_are_equal(self, whole: Path, tmp_path: Path) -> None:
        torch.rand(5), random.random()  # other draws from the global generators do not matter
        fit(tmp_path / "a", **QUICK)
        assert records(tmp_path / "a") == records(whole)
        assert final(tmp_path / "a") == final(whole)

    def test_another_seed_gives_another_run(self, whole: Path, tmp_path: Path) -> None:
        fit(tmp_path / "a", **QUICK, seed=1)
        assert records(tmp_path / "a")[0]["loss"] != records(whole)[0]["loss"]

    def test_global_generators_are_restored(self, tmp_path: Path) -> None:
        def state() -> Any:
            return random.getstate(), [*map(str, np.random.get_state())], torch.get_rng_state().tolist()  # noqa: NPY002

        random.seed(1), np.random.seed(2), torch.manual_seed(3)  # noqa: NPY002
        dropout = nn.Sequential(nn.Linear(64, 8), nn.Dropout(0.5), nn.Linear(8, 10))
        before = state()
        fit(tmp_path / "a", **QUICK, net=dropout)
        with pytest.raises(Diverged):
            fit(tmp_path / "b", **QUICK, lr=1e30)
        assert state() == before

    def test_signal_handlers_are_restored(self, tmp_path: Path) -> None:
        before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
        fit(tmp_path / "a", **QUICK)
        assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before

    def test_in_a_thread(self, whole: Path, tmp_path: Path) -> None:
        """Signals can only be caught in the main thread; everything else works."""
        thread = threading.Thread(target=lambda: fit(tmp_path / "a", **QUICK, threads=1))
        thread.start()
        thread.join()
        assert records(tmp_path / "a") == records(whole)

    def test_paths_with_spaces_and_umlauts(self, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)
        assert fit("new folder/ä b/run 1", **QUICK).path == Path("new folder/ä b/run 1")
        assert records(tmp_path / "new folder/ä b/run 1") == records(whole)


class TestRefusals:
    def test_a_folder_that_contains_a_run(self, whole: Path) -> None:
        with pytest.raises(UserError, match="already contains a run; resume it with --resume, or choose"):
            fit(whole, **QUICK)

    @pytest.mark.parametrize(
        ("setting", "value", "stored"),
        [
            ("epochs", 3, 2),
            ("lr", 0.01, 0.05),
            ("seed", 5, 0),
            ("noise", "pair:0.2", "uniform:0.4"),
            ("method", "warpi", "ce"),
            ("net", "resnet18", "mlp"),
            ("milestones", [0.5], (2 / 3, 5 / 6)),
        ],
    )
    def test_resuming_with_another_setting(self, whole: Path, setting: str, value: Any, stored: Any) -> None:
        before = final(whole)
        with pytest.raises(UserError) as e:
            fit(whole, resume=True, **{**QUICK, setting: value})
        assert f"started with {setting} = {stored!r}, not" in str(e.value)
        assert final(whole) == before

    def test_resuming_with_another_custom_network(self, tmp_path: Path) -> None:
        fit(tmp_path / "a", **QUICK, net=nn.Linear(64, 10))
        with pytest.raises(UserError, match="different defaults"):
            fit(tmp_path / "a", **QUICK, net=nn.Sequential(nn.Linear(64, 10)), resume=True)
        deeper = nn.Sequential(nn.Linear(64, 10))
        fit(tmp_path / "b", **QUICK, net=deeper)
        deeper.append(nn.Linear(10, 10))  # the same class, but another network
        with pytest.raises(UserError, match=r"network of .* has changed: n_parameters was 650, now 760"):
            fit(tmp_path / "b", **QUICK, net=deeper, resume=True)

    @pytest.mark.parametrize("resume", [False, True])
    def test_unknown_settings(self, whole: Path, tmp_path: Path, resume: bool) -> None:
        with pytest.raises(UserError, match="unknown setting 'epoch'; did you mean 'epochs'"):
            fit(whole if resume else tmp_path / "a", **SMALL, epoch=3, method="ce", resume=resume)
        with pytest.raises(UserError, match="unknown setting 'sample'; did you mean 'samples'"):
            prepare(RunSpec.from_settings("warpi", **SMALL, sample=3))
        with pytest.raises(
            UserError, match=r"unknown setting 'samples': ce has no such setting; .*method with it: .*warpi"
        ):
            prepare(RunSpec.from_settings("ce", **SMALL, samples=3))
        with pytest.raises(UserError, match="unknown method 'wrapi'; did you mean 'warpi'"):
            fit(tmp_path / "a", **SMALL, method="wrapi")
        assert not (tmp_path / "a").exists(), "an error leaves no files behind"

    @pytest.mark.parametrize(
        ("settings", "message"),
        [
            ({"samples": "ten"}, "samples must be int, got 'ten'"),
            ({"samples": 2.5}, "samples must be int, got 2.5"),
            ({"samples": True}, "samples must be int, got True"),
            ({"virtual_lr": "x"}, "virtual_lr must be float | None, got 'x'"),
            ({"output": "sigmoids"}, "unknown output 'sigmoids'; did you mean 'sigmoid'?"),
            ({"schedule": "cosin"}, "unknown schedule 'cosin'; did you mean 'cosine'?"),
            ({"optimizer": 3}, "optimizer must be one of 'sgd', 'adam', got 3"),
            ({"milestones": (0.5, "x")}, "milestones must be tuple[float, ...], got (0.5, 'x')"),
            ({"lr": "fast"}, "lr must be float, got 'fast'"),
            ({"epochs": None}, "epochs must be int, got None"),
            ({"limit": 0}, "limit must be at least 1, got 0"),
            ({"limit": -5}, "limit must be at least 1, got -5"),
            ({"epochs": 0}, "epochs must be at least 1, got 0"),
        ],
    )
    def test_settings_of_the_wrong_type(self, settings: dict[str, Any], message: str) -> None:
        with pytest.raises(UserError) as e:
            prepare(RunSpec.from_settings("warpi", **{**SMALL, **settings}))
        assert str(e.value) == message

    @pytest.mark.parametrize(
        ("content", "message"),
        [
            (b"", "not JSON"),
            (b"{", "not JSON"),
            (b"\xff\xfe", "not JSON"),
            (b"[]", "does not have the format 'warpi-run/1' that `warpi fit` writes; choose another folder"),
            (b'{"format": "warpi-run/2"}', "does not have the format 'warpi-run/1'"),
            (b'{"format": "warpi-run/1"}', "'spec' must be an object, got None"),
            (
                b'{"format": "warpi-run/1", "facts": {}, "environment": {}, "spec": {"method": "ce", "options": 1}}',
                "'options' must be an object, got 1",
            ),
            (
                b'{"format": "warpi-run/1", "facts": {}, "environment": {}, '
                b'"spec": {"method": "e", "options": {}, "recipe": {}, "seed": 0}}',
                "made with a custom method",
            ),
        ],
    )
    def test_a_spec_of_another_format(self, tmp_path: Path, content: bytes, message: str) -> None:
        (tmp_path / "spec.json").write_bytes(content)
        with pytest.raises(UserError, match=message):
            fit(tmp_path, resume=True)
        assert (tmp_path / "spec.json").read_bytes() == content

    def test_a_spec_of_another_version(self, whole: Path, tmp_path: Path) -> None:
        """A field that is new, a field that was removed, or another default."""
        changes = {
            "unknown setting 'gone'": lambda s: s["spec"]["recipe"].update(gone=1),
            "different defaults": lambda s: s["spec"].pop("limit"),
            "version 0.0.9": lambda s: (s.update(version="0.0.9"), s["spec"]["recipe"].pop("decay")),
        }
        for message, change in changes.items():
            (tmp_path / "spec.json").write_bytes((whole / "spec.json").read_bytes())
            edit_spec(tmp_path, change)
            with pytest.raises(UserError, match=message):
                fit(tmp_path, resume=True)

    def test_a_hyper_parameter_that_older_runs_do_not_have(self, tmp_path: Path) -> None:
        """If its default is null, older runs can be resumed."""
        fit(tmp_path, **{**QUICK, "method": "warpi", "meta": 20})
        edit_spec(tmp_path, lambda s: (s["spec"]["options"].pop("mean_init"), s["spec"]["recipe"].pop("compile")))
        fit(tmp_path, resume=True)

    def test_data_that_has_changed(self, tmp_path: Path) -> None:
        x, y = np.random.default_rng(0).normal(size=(60, 3)), np.arange(60) % 3
        np.savez(tmp_path / "d.npz", x=x, y=y)
        settings = {"data": tmp_path / "d.npz", "method": "ce", "epochs": 1, "noise": "given"}
        fit(tmp_path / "a", **settings)
        np.savez(tmp_path / "d.npz", x=x, y=y[::-1])
        with pytest.raises(UserError, match=r"the data or the network of .* has changed: noise_sha256 was"):
            fit(tmp_path / "a", resume=True)

    def test_a_new_default_does_not_change_older_runs(self, tmp_path: Path) -> None:
        """A setting that a stored run does not have keeps the value of the paper, whatever suits its data today."""
        np.savez(tmp_path / "x.npz", x=np.random.default_rng(0).normal(size=(60, 3)), y=np.arange(60) % 2)
        np.savez(tmp_path / "t.npz", x=np.random.default_rng(1).normal(size=(8, 3)), y=np.arange(8) % 2)
        paper = {"v_start": None, "trusted_weight": 0.0, "log_var_init": None}
        settings = {"data": tmp_path / "x.npz", "trusted": tmp_path / "t.npz", "method": "warpi", "epochs": 1}
        trained = fit(tmp_path / "run", **settings, **paper)
        file = tmp_path / "run" / "spec.json"
        stored = json.loads(file.read_text())
        for name in (*paper, "warmup"):
            stored["spec"]["options"].pop(name)
            stored["spec"]["changed"].pop(name, None)
        file.write_text(json.dumps(stored))
        assert asdict(reopen(tmp_path / "run").method) == asdict(trained.method)

    def test_a_folder_with_other_files(self, tmp_path: Path) -> None:
        """For example the folder of the data, where the run would look like a class."""
        (tmp_path / "photos" / "cat").mkdir(parents=True)
        with pytest.raises(UserError, match=r"photos contains 'cat' and no run; choose .* such as --out runs/photos"):
            fit(tmp_path / "photos", **QUICK)
        with pytest.raises(UserError, match=r"photos/run is inside the folder of the data"):
            fit(tmp_path / "photos" / "run", data=tmp_path / "photos")
        assert [p.name for p in (tmp_path / "photos").iterdir()] == ["cat"]
        (tmp_path / "empty").mkdir()
        for name in (".DS_Store", "slurm-1.out", "run.log", "log.txt"):  # output of the run, written by a shell
            (tmp_path / "empty" / name).write_bytes(b"")
        fit(tmp_path / "empty", **QUICK)

    def test_relative_paths_from_another_folder(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (tmp_path / "here").mkdir()
        (tmp_path / "there").mkdir()
        monkeypatch.chdir(tmp_path / "here")
        np.savez("d.npz", x=np.random.default_rng(0).normal(size=(60, 3)), y=np.arange(60) % 3)
        fit("a", data="d.npz", method="ce", epochs=1)
        monkeypatch.chdir(tmp_path / "there")
        with pytest.raises(
            UserError, match=rf"no 'd.npz' here: --data .* started in {tmp_path}/here: cd {tmp_path}/here"
        ):
            fit("../here/a", resume=True)
        edit_spec(tmp_path / "here" / "a", lambda s: s["environment"].pop("folder"))  # as an older version wrote it
        with pytest.raises(UserError, match=r"relative path, and the run was started in another folder: change to it"):
            fit("../here/a", resume=True)
        monkeypatch.chdir(tmp_path / "here")
        assert len(fit("a", resume=True).history) == 1
        (tmp_path / "here" / "d.npz").unlink()
        edit_spec(tmp_path / "here" / "a", lambda s: s["environment"].update(folder=str(tmp_path / "here")))
        with pytest.raises(UserError, match=r"no file or folder 'd\.npz'"):
            fit("a", resume=True)

    def test_a_checkpoint_without_its_spec(self, whole: Path, tmp_path: Path) -> None:
        """Its settings are unknown, so it is neither used nor overwritten."""
        stray = tmp_path / "checkpoint.safetensors"
        stray.write_bytes((whole / "checkpoint.safetensors").read_bytes())
        for resume in (False, True):
            with pytest.raises(UserError, match=r"contains a checkpoint, but its spec\.json is missing"):
                fit(tmp_path, **QUICK, resume=resume)
        assert stray.read_bytes() == (whole / "checkpoint.safetensors").read_bytes()

    def test_a_file_in_the_way(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("mine")
        for out in (tmp_path / "file", tmp_path / "file" / "below"):
            with pytest.raises(UserError, match=r"cannot read .*: Not a directory; choose another folder"):
                fit(out, **QUICK)
        assert (tmp_path / "file").read_text() == "mine"

    def test_a_folder_that_cannot_be_written(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def denied(*_: Any, **__: Any) -> None:
            raise PermissionError(13, "Permission denied")

        monkeypatch.setattr(Path, "mkdir", denied)
        with pytest.raises(UserError, match=r"cannot write to .*: Permission denied; choose another --out"):
            fit(tmp_path / "a", **QUICK)

    def test_a_second_process(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("WARPI_LEASE_SECONDS", "0.3")
        with one_writer(tmp_path), pytest.raises(UserError, match="another process is training in"):
            fit(tmp_path, **QUICK)
        assert not (tmp_path / "spec.json").exists()
        fit(tmp_path, **QUICK)

    def test_a_run_that_was_taken_over_stops(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Its process was paused for longer than the lease. The next owner finishes the run."""
        monkeypatch.setenv("WARPI_LEASE_SECONDS", "0.3")
        steps = fitting(tmp_path, **{**QUICK, "epochs": 3})
        while next(steps) is None:
            pass
        late = leases._held.pop(str(tmp_path))
        late._ended.set()  # no longer renewed
        fit(tmp_path, resume=True)
        files = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
        leases._held[str(tmp_path)] = late
        with pytest.raises(LeaseLost, match=r"another process has taken over .* nothing was overwritten"):
            list(steps)
        assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == files
        assert len(files["results.jsonl"].splitlines()) == 3

    def test_another_run_starts_while_the_data_is_read(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        real = run.prepare

        def slow(*args: Any, **settings: Any) -> Any:
            monkeypatch.undo()
            fit(tmp_path, **QUICK, seed=9)
            return real(*args, **settings)

        monkeypatch.setattr(run, "prepare", slow)
        with pytest.raises(UserError, match="another process has started a run in"):
            fit(tmp_path, **QUICK)
        assert json.loads((tmp_path / "spec.json").read_text())["spec"]["seed"] == 9

    def test_threads(self, tmp_path: Path) -> None:
        with pytest.raises(UserError, match="threads must be at least 1 and at most 1024, got 0"):
            fit(tmp_path, **QUICK, threads=0)

    @pytest.mark.parametrize("device", ["gpu", "mps", "meta", "", "cuda:99"])
    def test_devices(self, device: str) -> None:
        with pytest.raises(UserError, match=r"device"):
            pick_device(device)
        assert pick_device("cpu") == torch.device("cpu")

    @pytest.mark.parametrize("name", ["batch_size", "meta_batch_size"])
    def test_batches_of_one(self, tmp_path: Path, name: str) -> None:
        with pytest.raises(UserError, match="BatchNorm needs at least 2 examples per batch"):
            fit(tmp_path / "a", **{**SMALL, name: 1})
        assert not (tmp_path / "a" / "spec.json").exists()
        fit(tmp_path / "a", **{**QUICK, "batch_size": 1, "limit": 150, "epochs": 1}, net=nn.Linear(64, 10))


class TestResume:
    def test_a_finished_run(self, whole: Path) -> None:
        before = {p.name: p.read_bytes() for p in whole.glob("[!.]*")}
        history = fit(whole, resume=True).history
        assert [{k: v for k, v in r.items() if k != "seconds"} for r in history] == records(whole)
        fit(whole, **QUICK, resume=True)  # giving the same settings again is allowed
        assert {p.name: p.read_bytes() for p in whole.glob("[!.]*")} == before

    def test_resuming_an_empty_folder_starts_a_run(self, whole: Path, tmp_path: Path) -> None:
        """So scripts can always pass --resume."""
        fit(tmp_path / "a", **QUICK, resume=True)
        assert final(tmp_path / "a") == final(whole)

    @pytest.mark.parametrize("after", [1, 5, 6, 10])
    def test_stopped_after_a_step(
        self, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, after: int
    ) -> None:
        Interrupt(monkeypatch, after)
        with pytest.raises(Stopped, match=r"stopped by SIGTERM; resume with: warpi fit --out \S+ --resume") as e:
            fit(tmp_path, **QUICK)
        assert e.value.signum == signal.SIGTERM
        position = checkpoint.load(tmp_path / "checkpoint.safetensors")["position"]
        assert (position["epoch"], position["step"]) == divmod(after, 5) or after in (5, 10)
        assert not (tmp_path / "done").exists()
        monkeypatch.undo()
        fit(tmp_path, resume=True)
        assert records(tmp_path) == records(whole)
        assert final(tmp_path) == final(whole)
        assert (tmp_path / "spec.json").read_bytes() == (whole / "spec.json").read_bytes()

    @pytest.mark.parametrize("method", ["vri", "selfie", "cal"])  # tests/methods resumes all methods in memory
    def test_methods_resume_in_the_middle_of_an_epoch(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str
    ) -> None:
        settings = {**SMALL, "method": method, "batch_size": 32}
        fit(tmp_path / "a", **settings)
        for after in (1, 4):
            Interrupt(monkeypatch, after)
            with pytest.raises(Stopped):
                fit(tmp_path / "b", **settings, resume=True)
            monkeypatch.undo()
        fit(tmp_path / "b", **settings, resume=True)
        assert records(tmp_path / "b") == records(tmp_path / "a")
        assert final(tmp_path / "b") == final(tmp_path / "a")

    def test_checkpoints_by_the_clock(self, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """With a clock that advances 40 s per call, every third step writes a checkpoint; a crash loses later steps."""
        clock = iter(range(0, 10**6, 40))
        monkeypatch.setattr(run.time, "monotonic", lambda: next(clock))
        saved: list[tuple[int, int]] = []
        real = checkpoint.save

        def note(path: Path, state: dict[str, Any]) -> None:
            real(path, state)
            saved.append((state["position"]["epoch"], state["position"]["step"]))
            if len(saved) == 3:
                raise KeyboardInterrupt

        monkeypatch.setattr(checkpoint, "save", note)
        with pytest.raises(KeyboardInterrupt):
            fit(tmp_path, **QUICK, checkpoint_seconds=100.0)
        assert saved == [(0, 3), (1, 0), (1, 3)]
        monkeypatch.undo()
        fit(tmp_path, resume=True)
        assert records(tmp_path) == records(whole)
        assert final(tmp_path) == final(whole)

    def test_a_network_that_draws_from_the_global_generators(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        class Random(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.fc = nn.Linear(64, 10)

            def forward(self, x: Tensor) -> Tensor:
                jitter = random.random() + np.random.rand() + torch.rand(1)  # noqa: NPY002
                return self.fc(x) * (1 + 0.1 * jitter)

        fit(tmp_path / "a", **QUICK, net=lambda *_: Random())
        Interrupt(monkeypatch, 7)
        with pytest.raises(Stopped):
            fit(tmp_path / "b", **QUICK, net=lambda *_: Random())
        monkeypatch.undo()
        fit(tmp_path / "b", net=lambda *_: Random(), resume=True)
        assert records(tmp_path / "b") == records(tmp_path / "a")
        assert final(tmp_path / "b") == final(tmp_path / "a")

    def test_a_method_that_cannot_resume_within_an_epoch(
        self, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(CE, "resumes_mid_epoch", False)
        interrupt = Interrupt(monkeypatch, 8)
        with pytest.raises(Stopped):
            fit(tmp_path, **QUICK, checkpoint_seconds=0.0)
        assert interrupt.steps == 8, "the run stops immediately"
        assert checkpoint.load(tmp_path / "checkpoint.safetensors")["position"]["epoch"] == 1
        fit(tmp_path, resume=True)
        assert interrupt.steps == 8 + 5, "the epoch is repeated"
        assert final(tmp_path) == final(whole)

    @pytest.mark.parametrize("tail", [b'{"epoch": 2, "lo', b'{"epoch": 2}\n{"epoch": 3}\n', b"\xff\n"])
    def test_lines_after_the_last_checkpoint_are_deleted(self, whole: Path, tmp_path: Path, tail: bytes) -> None:
        fit(tmp_path, **QUICK)
        (tmp_path / "checkpoint.safetensors").unlink()  # the previous one is from after the first epoch
        first = (tmp_path / "results.jsonl").read_bytes().splitlines(keepends=True)[0]
        (tmp_path / "results.jsonl").write_bytes(first + tail)
        fit(tmp_path, resume=True)
        assert records(tmp_path) == records(whole)

    @pytest.mark.parametrize(
        ("content", "message"),
        [(None, "has 0 epochs, but the checkpoint has 2"), (b"{\n{\n", "line 1 is not JSON")],
    )
    def test_results_that_were_lost(self, tmp_path: Path, content: bytes | None, message: str) -> None:
        fit(tmp_path, **QUICK)
        (tmp_path / "results.jsonl").unlink()
        if content is not None:
            (tmp_path / "results.jsonl").write_bytes(content)
        with pytest.raises(UserError, match=message):
            fit(tmp_path, resume=True)

    def test_half_written_files_are_removed(self, tmp_path: Path) -> None:
        (tmp_path / ".checkpoint.safetensors.77.part").write_bytes(b"half")
        fit(tmp_path, **QUICK)
        assert not list(tmp_path.glob("*.part")) + list(tmp_path.glob(".*.part"))

    @pytest.mark.parametrize("nth", [3, 9])
    def test_a_disk_that_fills_up(self, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nth: int) -> None:
        real, calls = os.fsync, []

        def full(fd: int) -> None:
            calls.append(fd)
            if len(calls) >= nth:
                raise OSError(28, "No space left on device")
            real(fd)

        monkeypatch.setattr(os, "fsync", full)
        with pytest.raises(UserError, match=r"cannot write .*No space left on device"):
            fit(tmp_path, **QUICK, checkpoint_seconds=0.0)
        monkeypatch.undo()
        assert not list(tmp_path.glob(".*.part"))
        fit(tmp_path, **QUICK, resume=True)
        assert records(tmp_path) == records(whole)
        assert final(tmp_path) == final(whole)

    def test_the_advice_for_a_damaged_checkpoint_works(self, whole: Path, tmp_path: Path) -> None:
        fit(tmp_path, **QUICK)
        file = tmp_path / "checkpoint.safetensors"
        damaged = bytearray(file.read_bytes())
        damaged[-20] ^= 4
        file.write_bytes(damaged)
        with pytest.raises(UserError, match=r"checksum mismatch; delete it to resume from checkpoint.safetensors.prev"):
            fit(tmp_path, resume=True)
        file.unlink()
        fit(tmp_path, resume=True)
        assert records(tmp_path) == records(whole)
        assert final(tmp_path) == final(whole)


@dataclass
class Spiky(CE):
    """Cross-entropy whose log becomes `value` at its fourth step."""

    value: float = math.inf

    def step(self, batch: Batch) -> Log:
        return {**super().step(batch), "spike": self.value if self.loader.count == 4 else 0.0}


@dataclass
class Poisoned(CE):
    """The loss stays finite, but a weight becomes nan."""

    resumes_mid_epoch: ClassVar[bool] = True
    at: int = 4

    def step(self, batch: Batch) -> Log:
        log = super().step(batch)
        if self.loader.count == self.at:
            with torch.no_grad():
                next(self.net.parameters())[0] = math.nan
        return log


class TestDivergence:
    @pytest.mark.parametrize("method", ["ce", "warpi"])
    def test_a_learning_rate_that_is_too_high(self, tmp_path: Path, method: str) -> None:
        with pytest.raises(Diverged) as e:
            fit(tmp_path, **{**QUICK, "method": method}, lr=1e30, checkpoint_seconds=0.0)
        assert isinstance(e.value, UserError)
        assert "\n" not in str(e.value)
        for part in ("became", "at epoch 1, step ", "(lr 1e+30)", "lower --lr"):
            assert part in str(e.value)
        assert (tmp_path / "results.jsonl").read_bytes() == b""
        if checkpoint.exists(tmp_path / "checkpoint.safetensors"):
            state = checkpoint.load(tmp_path / "checkpoint.safetensors")
            assert all(t.isfinite().all() for t in state["method"]["nets"][0].values())

    @pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
    def test_any_log(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: float) -> None:
        monkeypatch.setitem(METHODS, "spiky", Spiky(value=value))
        with pytest.raises(Diverged, match=rf"spike became {value} at epoch 1, step 4 \(lr 0.05\)"):
            fit(tmp_path, **{**QUICK, "method": "spiky"}, checkpoint_seconds=0.0)
        assert checkpoint.load(tmp_path / "checkpoint.safetensors")["position"]["step"] == 3

    @pytest.mark.parametrize("at", [4, 5])
    def test_weights_that_are_not_finite_are_never_stored(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: int
    ) -> None:
        """In the middle of an epoch and at its end, before the scores are computed."""
        monkeypatch.setitem(METHODS, "poisoned", Poisoned(at=at))
        with pytest.raises(Diverged, match=rf"a weight of \S+ became nan at epoch 1, step {at} \(lr 0.05\)"):
            fit(tmp_path, **{**QUICK, "method": "poisoned"}, checkpoint_seconds=0.0)
        state = checkpoint.load(tmp_path / "checkpoint.safetensors")
        assert state["position"]["step"] == at - 1
        assert all(t.isfinite().all() for t in state["method"]["nets"][0].values())
        assert (tmp_path / "results.jsonl").read_bytes() == b""

    def test_predictions_of_weights_that_are_too_large(self, tmp_path: Path) -> None:
        """The loss and the weights are finite, but the logits overflow during evaluation."""
        with pytest.raises(Diverged, match=r"a prediction became nan at epoch 1, step 1 \(lr 1e\+30\)"):
            fit(tmp_path, **{**QUICK, "batch_size": 1000}, lr=1e30)

    def test_a_buffer_may_be_infinite(self, tmp_path: Path) -> None:
        class Masked(nn.Linear):
            def __init__(self) -> None:
                super().__init__(64, 10)
                self.register_buffer("mask", torch.tensor([-math.inf]))

        fit(tmp_path, **QUICK, net=Masked())
        assert (tmp_path / "done").exists()


class TestEngine:
    def test_a_record_is_the_mean_of_the_logs(self) -> None:
        prepared = prepare(RunSpec.from_settings("ce", **{k: v for k, v in QUICK.items() if k != "method"}))
        task, truth = prepared.task, prepared.truth
        learner = CE()
        learner.start(task, Recipe(epochs=2, batch_size=32, lr=0.05, schedule="cosine"))
        losses: list[list[float]] = [[]]
        real = learner.step

        def step(batch: Batch) -> Log:
            log = real(batch)
            losses[-1].append(float(log["loss"]))
            return log

        learner.step = step  # type: ignore[method-assign]
        at = TrainingState()
        epochs = []
        for item in train(learner, task, truth, at):
            if item is not None:
                epochs.append(item)
                assert (at.step, at.sums) == (0, {})
                losses.append([])
        assert [r["epoch"] for r in epochs] == [1, 2]
        assert [r["lr"] for r in epochs] == [0.05, pytest.approx(0.025)]
        for r, values in zip(epochs, losses[:2], strict=True):
            assert r["loss"] == pytest.approx(sum(values) / len(values), abs=1e-6)

    def test_scores_are_computed_in_evaluation_mode(self) -> None:
        prepared = prepare(RunSpec.from_settings("ce", **{k: v for k, v in QUICK.items() if k != "method"}))
        task, truth = prepared.task, prepared.truth
        learner = CE()
        learner.start(task, Recipe(epochs=1, batch_size=32, lr=0.05))
        modes: list[bool] = []
        learner.net.register_forward_pre_hook(lambda net, _: modes.append(net.training))
        before = [b.clone() for b in learner.net.buffers()]
        engine.score(learner, task, truth)
        assert modes
        assert not any(modes)
        assert learner.net.training
        assert all(torch.equal(a, b) for a, b in zip(before, learner.net.buffers(), strict=True))

    def test_without_anything_to_score(self, tmp_path: Path) -> None:
        fit(tmp_path, **QUICK, val=0.0, test=0.0)
        assert set(records(tmp_path)[0]) == {"epoch", "lr", "loss"}


def two_layers(shape: tuple[int, ...], n_classes: int) -> nn.Module:
    return nn.Sequential(nn.Linear(shape[0], 12), nn.ReLU(), nn.Linear(12, n_classes))


class NotCopyable(nn.Linear):
    def __deepcopy__(self, memo: Any) -> Any:
        raise RuntimeError("cannot be copied")


class TestCustomNetworks:
    @pytest.mark.parametrize(
        ("net", "name"),
        [
            (nn.Sequential(nn.Linear(64, 10)), "torch.nn.modules.container.Sequential"),
            (two_layers, "test_run.two_layers"),
        ],
    )
    def test_modules_and_functions(self, tmp_path: Path, net: Any, name: str) -> None:
        done = fit(tmp_path, **QUICK, net=net)
        stored = json.loads((tmp_path / "spec.json").read_text())["spec"]["recipe"]["net"]
        assert stored.endswith(name)
        assert done.method.net is not net
        fit(tmp_path, net=net, resume=True)

    def test_a_given_module_is_not_changed(self, tmp_path: Path) -> None:
        net = nn.Linear(64, 10)
        before = net.weight.clone()
        done = fit(tmp_path, **QUICK, net=net)
        assert torch.equal(net.weight, before)
        assert not torch.equal(done.method.net.weight, before)  # type: ignore[arg-type]

    def test_invalid_networks(self, tmp_path: Path) -> None:
        with pytest.raises(UserError, match="cannot be copied"):
            fit(tmp_path / "a", **QUICK, net=NotCopyable(64, 10))
        with pytest.raises(UserError, match=r"must return logits of shape \(2, 10\)"):
            fit(tmp_path / "a", **QUICK, net=nn.Linear(64, 9))
        with pytest.raises(UserError, match="net must be"):
            fit(tmp_path / "a", **QUICK, net=3)
        assert not (tmp_path / "a" / "spec.json").exists()


class TestSettings:
    def test_options_of_a_method_are_stored_in_full_and_as_changed(self) -> None:
        spec = prepare(RunSpec.from_settings("warpi", **SMALL, samples=3, hidden=100)).spec.to_json()
        assert spec["changed"] == {"samples": 3}
        assert spec["options"]["samples"] == 3
        assert spec["options"]["hidden"] == 100

    def test_numpy_numbers_paths_and_lists(self, tmp_path: Path) -> None:
        """They are stored as plain JSON values."""
        np.savez(tmp_path / "d.npz", x=np.random.default_rng(0).normal(size=(60, 3)), y=np.arange(60) % 3)
        settings = {"epochs": np.int64(1), "lr": np.float32(0.5), "milestones": [0.5], "seed": np.arange(3)[2]}
        fit(tmp_path / "a", data=tmp_path / "d.npz", method="ce", **settings)
        spec = json.loads((tmp_path / "a/spec.json").read_text())["spec"]
        assert (spec["seed"], spec["data"]) == (2, str(tmp_path / "d.npz"))
        assert (spec["recipe"]["epochs"], spec["recipe"]["lr"], spec["recipe"]["milestones"]) == (1, 0.5, [0.5])
        fit(tmp_path / "a", data=tmp_path / "d.npz", method="ce", **settings, resume=True)

    def test_the_name_of_the_method(self) -> None:
        assert prepare(RunSpec.from_settings("warpi", **SMALL)).spec.method == "warpi"

    def test_setting_names_are_unique(self) -> None:
        """A flag is a field of the data, of the recipe or of the method, never of two of them."""
        arguments = {
            "out",
            "method",
            "resume",
            "device",
            "devices",
            "threads",
            "checkpoint_seconds",
            "track",
            "quiet",
        }
        for name, method in METHODS.items():
            groups = [arguments, *({*c.__dataclass_fields__} for c in (DataSpec, Recipe, type(method)))]
            assert sum(map(len, groups)) == len(set().union(*groups)), name


class _Plain(nn.Linear):
    """A custom network."""

    def __init__(self) -> None:
        super().__init__(64, 10)


class TestProgress:
    def test_accuracies_against_noisy_labels_are_marked(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        lines = dict[str, str]()
        np.savez(tmp_path / "own.npz", x=np.random.default_rng(0).normal(size=(80, 3)), y=np.arange(80) % 2)
        for data, noise in (("digits", "pair:0.4"), ("digits", "given"), (str(tmp_path / "own.npz"), "given")):
            settings = {"data": data, "noise": noise, "limit": 80, "meta": 0, "val": 0.1, "test": 0.25}
            fit(tmp_path / f"{len(lines)}", method="ce", epochs=1, quiet=False, **settings)
            lines[f"{Path(data).stem} {noise}"] = capsys.readouterr().out.splitlines()[-1]
        marks = {name: ("val % (noisy) " in line, "test % (noisy) " in line) for name, line in lines.items()}
        assert marks == {"digits pair:0.4": (True, False), "digits given": (False, False), "own given": (True, True)}
        assert all("val_acc" in record for record in records(tmp_path / "2"))

    def test_a_slow_run_prints_an_estimate(
        self, whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(run, "PATIENCE", -1)
        monkeypatch.setattr(progress, "WATCH", 0)
        fit(tmp_path / "a", **QUICK, quiet=False)
        first, second, *_ = capsys.readouterr().out.splitlines()
        assert first.endswith("; ce trains mlp for 2 epochs")
        assert second == (
            "this will take about 0 s on this CPU; to make it faster: use a GPU, fewer --epochs, --limit for a "
            "first try"
        )
        assert records(tmp_path / "a") == records(whole), "the estimate changes nothing"

    def test_rows_that_are_also_trusted_are_reported_once(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
    ) -> None:
        """By `fit` only: following the README leads to such rows."""
        x, y = np.random.default_rng(0).normal(size=(80, 3)), np.arange(80) % 2
        np.savez(tmp_path / "x.npz", x=x, y=y)
        np.savez(tmp_path / "ok.npz", x=x[:6], y=y[:6])
        settings = {"data": tmp_path / "x.npz", "trusted": tmp_path / "ok.npz", "method": "glc", "epochs": 1}
        fit(tmp_path / "a", **settings, quiet=False)
        assert (
            "rows that also appear in the trusted set are used only as trusted examples: 6\n" in capsys.readouterr().out
        )
        audit(tmp_path / "a")
        assert "also appear" not in caplog.text + "".join(capsys.readouterr())

    def test_one_line_per_epoch(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        fit(tmp_path / "a", **{**QUICK, "epochs": 10}, quiet=False)
        lines = capsys.readouterr().out.splitlines()
        assert len(lines) == 1 + 10
        assert lines.pop(0).startswith("digits, noise uniform:0.4 (32.4 % wrong): 185 noisy, 20 trusted, ")
        assert lines[0].startswith("epoch  1/10  loss 2.")
        assert "test %" in lines[-1]
        assert "lr 0.0005" in lines[-1]
        fit(tmp_path / "b", **QUICK, quiet=True)
        assert capsys.readouterr() == ("", "")

    def test_seconds_include_the_time_before_an_interruption(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        Interrupt(monkeypatch, 3)
        with pytest.raises(Stopped):
            fit(tmp_path, **QUICK)
        monkeypatch.undo()
        spent = checkpoint.load(tmp_path / "checkpoint.safetensors")["position"]["seconds"]
        began = time.perf_counter()
        seconds = fit(tmp_path, resume=True).history[0]["seconds"]
        assert 0 < spent < seconds < spent + time.perf_counter() - began


class TestRegressions:
    def test_predictions_do_not_depend_on_the_batch(self, tmp_path: Path) -> None:
        run = fit(tmp_path, **QUICK)
        batch = next(run.truth.test.batches(50))  # type: ignore[union-attr]
        before = {name: b.clone() for name, b in run.method.net.named_buffers()}
        p = run.method.predict(batch.x)
        torch.testing.assert_close(run.method.predict(batch.x[:1]), p[:1])
        assert all(torch.equal(b, before[name]) for name, b in run.method.net.named_buffers())
        assert run.method.net.training

    def test_a_custom_method(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        method = _Custom(push=0.5)
        run = fit(tmp_path / "a", **{**QUICK, "method": method})
        spec = json.loads((tmp_path / "a" / "spec.json").read_text())["spec"]
        assert (spec["method"], spec["options"], spec["changed"]) == ("_Custom", {"push": 0.5}, {"push": 0.5})
        again = fit(tmp_path / "a", **{**QUICK, "method": method}, resume=True)
        assert [r["loss"] for r in again.history] == [r["loss"] for r in run.history]
        with pytest.raises(UserError, match=r"started with push = 0.5, not 0.25"):
            fit(tmp_path / "a", **{**QUICK, "method": _Custom(push=0.25)}, resume=True)
        with pytest.raises(UserError, match=r"with a custom method.* resume=True, method=MyMethod\(\)\)"):
            fit(tmp_path / "a", resume=True)
        assert main(["fit", "--out", str(tmp_path / "a"), "--resume"]) == 2
        assert "with a custom method" in capsys.readouterr().err
        assert len(audit(tmp_path / "a", method=method)) == len(run.task.train)

    def test_a_custom_network(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The shell cannot open the run; the Python code in the error message can."""
        out = str(tmp_path / "a")
        done = fit(out, **QUICK, net=_Plain())
        for command in (
            ["fit", "--resume", "--out", out],
            ["audit", out],
            ["report", out, "--audit", "--out", out + "r"],
        ):
            assert main(command) == 2
            assert f"warpi.fit('{out}', resume=True, net=MyNet())" in capsys.readouterr().err
        monkeypatch.setattr(_Plain, "__module__", "__main__")  # the same class, in another program
        assert len(fit(out, resume=True, net=_Plain()).history) == 2
        assert len(audit(out, net=_Plain())) == len(done.task.train)

    def test_a_built_in_method_as_an_instance(self, tmp_path: Path) -> None:
        fit(tmp_path, **{**QUICK, "method": WarPI(samples=2)})
        spec = json.loads((tmp_path / "spec.json").read_text())["spec"]
        assert spec["method"] == "warpi"
        assert spec["options"]["output"] == "sigmoid", "an instance sets all its hyper-parameters"

    def test_there_is_no_run_to_resume(self, tmp_path: Path) -> None:
        with pytest.raises(UserError, match=r"no run in .* to resume"):
            fit(tmp_path / "typo", resume=True)
        assert main(["fit", "--out", str(tmp_path / "typo"), "--resume"]) == 2
        assert not (tmp_path / "typo").exists()

    def test_changed_inputs_are_noticed(self, tmp_path: Path) -> None:
        y = np.arange(200) % 2
        x = np.random.default_rng(0).normal(size=(200, 3)).astype(np.float32)
        np.savez(tmp_path / "x.npz", x=x, y=y)
        fit(tmp_path / "run", data=str(tmp_path / "x.npz"), method="ce", epochs=1)
        np.savez(tmp_path / "x.npz", x=x + 1, y=y)
        with pytest.raises(UserError, match="has changed: inputs_sha256"):
            fit(tmp_path / "run", resume=True)

    def test_a_run_that_failed_before_its_first_checkpoint_can_be_started_again(self, tmp_path: Path) -> None:
        with pytest.raises(Diverged):
            fit(tmp_path, **QUICK, lr=1e30)
        run = fit(tmp_path, **QUICK, lr=0.01)
        assert json.loads((tmp_path / "spec.json").read_text())["spec"]["recipe"]["lr"] == 0.01
        assert len(run.history) == QUICK["epochs"]

    def test_a_resumed_run_keeps_its_thread_count(self, tmp_path: Path) -> None:
        fit(tmp_path, **QUICK, threads=1)
        with pytest.raises(UserError, match="started with threads = 1, not 2"):
            fit(tmp_path, resume=True, threads=2)

    def test_the_thread_count_is_restored(self, tmp_path: Path) -> None:
        before = torch.get_num_threads()
        fit(tmp_path, **QUICK, threads=before + 1)
        assert torch.get_num_threads() == before

    def test_noise_is_stored_in_one_spelling(self, tmp_path: Path) -> None:
        fit(tmp_path, **{**QUICK, "noise": "pair:0.40"})
        assert json.loads((tmp_path / "spec.json").read_text())["spec"]["noise"] == "pair:0.4"
        fit(tmp_path, **{**QUICK, "noise": "pair:0.400"}, resume=True)

    def test_the_size_of_unused_batches_is_not_checked(self, tmp_path: Path) -> None:
        fit(tmp_path, **{**QUICK, "method": "ce"}, meta_batch_size=1)


@dataclass
class _Custom(Method):
    push: float = 1.0

    def step(self, batch: Batch) -> Log:
        loss = self.push * cross_entropy(self.net(batch.x), batch.y).mean()
        descend(loss, self.optimizer)
        return {"loss": loss.detach()}


# --- errors in custom methods and networks ----------------------------------------------------------------------------


class Needy(CE):
    def __init__(self, q: float) -> None:
        self.q = q


class Silent(CE):
    def step(self, batch: Batch) -> Log:  # type: ignore[return]
        super().step(batch)


class Wide(CE):
    def step(self, batch: Batch) -> Log:
        return {"loss": batch.y.float()}


class Loud(CE):
    def step(self, batch: Batch) -> Log:
        return {**super().step(batch), "test_acc": torch.tensor(99.0)}


class Raw(CE):
    def predict(self, x: Tensor) -> Tensor:
        out: Tensor = self.net(x)
        return out


class Quiet(MWNet):
    needs_meta: ClassVar[bool] = False


class Sized(nn.Module):
    def __init__(self, n: int = 64, k: int = 10) -> None:
        super().__init__()
        self.fc = nn.Linear(n, k)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.fc(x)
        return out


def test_predict_must_return_probabilities(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"Raw.predict returned rows that are not probabilities; end it with .softmax"):
        fit(tmp_path / "run", **{**QUICK, "method": Raw()})
    with pytest.warns(UserWarning, match=r"the network Sequential returns probabilities.*remove the Softmax"):
        fit(tmp_path / "soft", **{**QUICK, "method": "ce", "net": nn.Sequential(Sized(), nn.Softmax(1))})


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"method": Silent}, r"method is the class Silent, but an instance is needed; use Silent\(\)"),
        ({"method": nn.Linear}, "method must be a name .* or a warpi.Method, got the class Linear; derive"),
        ({"method": object()}, "method must be a name from `warpi list methods` or a warpi.Method, got object; derive"),
        (
            {"method": Needy(0.3)},
            r"the method Needy cannot be created without arguments \(.*'q'\); make it a",
        ),
        (
            {"method": Silent()},
            r'Silent.step returned None, not a dict of numbers; end it with return \{"loss": loss',
        ),
        ({"method": Loud()}, "Loud.step returned 'test_acc', which the engine also logs; choose another name"),
        ({"method": Quiet()}, "Quiet takes a meta step but does not declare it; add `needs_meta"),
        ({"method": Wide()}, r"Wide.step returned a tensor of shape \(\d+,\) for 'loss', expected a single number"),
        (
            {"method": "ce", "net": Sized},
            r"the network cannot be built: .*\(\(64,\), 10\) \(.*the module itself, such as",
        ),
    ],
)
def test_errors_in_a_custom_method_or_network(given: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=message):
        fit(tmp_path / "run", **{**QUICK, **given})
    x, y = np.random.default_rng(0).normal(size=(60, 64)).astype("f"), np.arange(60) % 10
    with pytest.raises(UserError, match=message):
        warpi.NoisyLabelClassifier(**{"epochs": 1, "device": "cpu", **given}).fit(x, y)


def test_the_representation_of_a_run_is_one_line(tmp_path: Path) -> None:
    done = fit(tmp_path / "run", **QUICK)
    score = done.history[-1]["test_acc"]
    rows = f"CE on {len(done.task.train)} rows, 10 classes; 2 epochs, test accuracy {score:.2f} %"
    assert repr(done) == f"<Run {str(tmp_path / 'run')!r}: {rows}>"
    assert repr(replace(done, history=[])).endswith("10 classes; 0 epochs>")
    noisy = replace(done, truth=replace(done.truth, test_is_clean=False))
    assert repr(noisy).endswith(" % (noisy labels)>")


def test_advice_for_slow_photos() -> None:
    prepared = prepare(RunSpec.from_settings("ce", data="digits", limit=60, meta=10, net="resnet50"))
    photos = Split(FileExamples("photos", ("a.jpg",)), torch.tensor([0]), torch.tensor([0]))
    advice = run._advise(replace(prepared, task=replace(prepared.task, train=photos)), 200)
    assert advice == (
        "this will take about 3 h 20 min on this CPU; to make it faster: use a GPU, --image-size 64, --net resnet20, "
        "fewer --epochs, --limit for a first try"
    )
