"""Runs that are also sent to TensorBoard, MLflow and Weights & Biases, by the real packages and local files."""

import json
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from warpi import fit
from warpi.cli.app import main
from warpi.errors import UserError
from warpi.runs import run
from warpi.utils.devices import Stopped
from warpi.utils.tracking import open_trackers

QUICK: dict[str, Any] = {"data": "digits", "noise": "uniform:0.4", "limit": 300, "meta": 20, "epochs": 3}
QUICK |= {"method": "ce", "batch_size": 32}  # 8 steps per epoch
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning:mlflow")  # of the packages


def records(path: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (path / "results.jsonl").read_text().splitlines()]


def stop_after(monkeypatch: pytest.MonkeyPatch, n: int) -> None:
    """Stop the run in its n-th step, as a signal would."""
    import signal

    steps = iter(range(1, 1000))
    monkeypatch.setattr(run.Progress, "step", lambda _: next(steps) == n and signal.raise_signal(signal.SIGTERM))


class TestTensorBoard:
    def test_writes_events(self, tmp_path: Path) -> None:
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        fit(tmp_path, **QUICK, track="tensorboard")
        events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
        assert set(events.Tags()["scalars"]) == set(records(tmp_path)[0])
        losses = [(e.step, e.value) for e in events.Scalars("loss")]
        assert losses == [(r["epoch"], pytest.approx(r["loss"])) for r in records(tmp_path)]

    def test_is_closed_when_a_run_stops(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        stop_after(monkeypatch, 10)
        before = threading.active_count()
        with pytest.raises(Stopped):
            fit(tmp_path, **QUICK, track="tensorboard")
        assert threading.active_count() == before
        events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
        assert [e.step for e in events.Scalars("loss")] == [1]

    def test_missing(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(__import__("sys").modules, "torch.utils.tensorboard", None)
        with pytest.raises(UserError, match=r"--track tensorboard needs the package 'tensorboard'.*warpi\[track\]"):
            fit(tmp_path, **QUICK, track="tensorboard")
        assert not (tmp_path / "spec.json").exists(), "the folder can still be used without tensorboard"
        fit(tmp_path, **{**QUICK, "epochs": 1})

    def test_the_old_names(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        with pytest.warns(FutureWarning, match="use track='tensorboard'"):
            fit(tmp_path / "a", **{**QUICK, "epochs": 1}, tensorboard=True)
        flags = [f"--{name.replace('_', '-')}={value}" for name, value in {**QUICK, "epochs": 1}.items()]
        assert main(["fit", *flags, "--out", f"{tmp_path}/b", "--tensorboard", "--quiet"]) == 0
        assert "--tensorboard is deprecated; use --track tensorboard" in capsys.readouterr().err
        assert all(any((tmp_path / name / "tensorboard").iterdir()) for name in "ab")


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A folder as MLflow's store."""
    uri = (tmp_path / "mlruns").as_uri()
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    return uri


class TestMLflow:
    def test_a_resumed_run_is_one_run_with_every_epoch_once(
        self, tmp_path: Path, store: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from mlflow import MlflowClient

        client = MlflowClient(store)

        def only_run() -> Any:
            (found,) = client.search_runs([client.get_experiment_by_name("warpi").experiment_id])
            return found

        out = tmp_path / "a run"
        with monkeypatch.context() as stop:
            stop_after(stop, 10)
            with pytest.raises(Stopped):
                fit(out, **QUICK, track="mlflow")
        assert only_run().info.status == "FAILED"
        fit(out, resume=True, track="mlflow")
        done = only_run()
        assert (done.info.status, done.info.run_name) == ("FINISHED", "a run")
        assert (done.data.params["method"], done.data.params["recipe.batch_size"]) == ("ce", "32")
        for name in ("loss", "test_acc", "epoch"):
            history = [(m.step, m.value) for m in client.get_metric_history(done.info.run_id, name)]
            assert history == [(r["epoch"], r[name]) for r in records(out)]

    def test_epochs_that_are_trained_again_are_not_sent_again(self, tmp_path: Path, store: str) -> None:
        from mlflow import MlflowClient

        for first in (1, 2):  # the second process starts from a checkpoint after epoch 1
            with open_trackers(["mlflow"], tmp_path / "run", {"a": 1}, first) as log:
                for epoch in range(first, 4):
                    log({"epoch": epoch, "loss": 10 - epoch, "trusted_acc": None})
        client = MlflowClient(store)
        (only,) = client.search_runs([client.get_experiment_by_name("warpi").experiment_id])
        assert [m.step for m in client.get_metric_history(only.info.run_id, "loss")] == [1, 2, 3]
        assert set(only.data.metrics) == {"epoch", "loss"}

    def test_a_store_that_cannot_be_opened(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("MLFLOW_TRACKING_URI", "nonsense://store")
        with pytest.raises(UserError, match=r"--track mlflow: .*; correct its settings, or omit --track mlflow"):
            fit(tmp_path / "run", **QUICK, track="mlflow")
        assert not (tmp_path / "run" / "spec.json").exists()

    @pytest.mark.usefixtures("store")
    def test_a_store_that_fails_later_does_not_stop_the_run(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        import shutil

        with open_trackers(["mlflow", "tensorboard"], tmp_path / "run", {}, 1) as log:
            log({"epoch": 1, "loss": 1.0})
            shutil.rmtree(tmp_path / "mlruns")
            log({"epoch": 2, "loss": 1.0})
            log({"epoch": 3, "loss": 1.0})
        (warning,) = capsys.readouterr().err.splitlines()
        assert warning.startswith("warpi: warning: mlflow failed (")
        assert warning.endswith("the run continues without it")


def test_wandb_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    from wandb.proto import wandb_internal_pb2 as messages
    from wandb.sdk.internal.datastore import DataStore

    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_PROJECT", "mine")
    out = tmp_path / "run"
    fit(out, **QUICK, track=["wandb"])
    assert capfd.readouterr().err == ""
    (file,) = (out / "wandb").glob("offline-run-*/*.wandb")
    deadline = time.monotonic() + 30  # the process of wandb writes the end of the file after `finish` has returned
    sent: list[Any] = []
    while not (sent and sent[-1].HasField("exit")):
        assert time.monotonic() < deadline
        sent = []
        data = DataStore()
        data.open_for_scan(str(file))
        while (content := data.scan_data()) is not None:
            sent.append(messages.Record.FromString(content))
        data.close()
    about = next(each.run for each in sent if each.HasField("run"))
    history = []
    for each in sent:
        if each.HasField("history"):
            values = {item.key or item.nested_key[0]: json.loads(item.value_json) for item in each.history.item}
            history.append({name: value for name, value in values.items() if not name.startswith("_")})
    assert history == records(out)
    assert (about.project, about.display_name) == ("mine", "run")
    assert about.run_id == json.loads((out / "tracking.json").read_text())["wandb"]
    config = {item.key: json.loads(item.value_json) for item in about.config.update}
    assert (config["method"], config["recipe"]["batch_size"]) == ("ce", 32)


def test_an_unknown_name(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="unknown tracker 'mlfow'; did you mean 'mlflow'"):
        fit(tmp_path / "run", **QUICK, track="mlfow")
