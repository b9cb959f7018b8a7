"""Sweeps: reading the file, folders and their states, workers, the display, and every way a sweep can end."""

import hashlib
import json
import os
import queue
import random
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from forked import ForkedPopen
from hypothesis import given, settings, strategies as st
from rich.console import Console
from sweep_helpers import assert_same_runs

from warpi import UserError, fit
from warpi.cli.app import main
from warpi.noise.kinds import NoisyLabels
from warpi.noise.noise_file import write_noise_file
from warpi.runs import spec
from warpi.sweep import run_states as folders
from warpi.sweep.display import Board
from warpi.sweep.plan import Job, Plan, read_plan
from warpi.sweep.processes import _listen, run_processes
from warpi.sweep.queue import ClaimedRun, Queue, RunEvent
from warpi.sweep.run_states import KEPT, State
from warpi.sweep.runner import parse_resources
from warpi.sweep.worker import work
from warpi.training import checkpoint
from warpi.utils.devices import Stopped
from warpi.utils.time_left import format_duration

CPU = torch.device("cpu")
TINY = {"data": "digits", "limit": 300, "epochs": 2, "meta": 20, "batch_size": 32, "threads": 1}
TABLES = """
[defaults]
data = "{data}"
limit = {limit}
epochs = {epochs}
meta = 20
batch_size = {batch}
threads = 1
[grid]
noise = ["pair:0.4"]
method = ["ce", "warpi"]
seed = [0, 1]
"""


def write(folder: Path, text: str, name: str = "sweep.toml") -> Path:
    file = folder / name
    file.write_text(text)
    return file


def tiny(folder: Path, epochs: int = 2, batch: int = 32, more: str = "") -> Path:
    return write(folder, TABLES.format(data="digits", limit=300, epochs=epochs, batch=batch) + more)


def names(plan: Plan) -> list[str]:
    return [job.name for job in plan.jobs]


# -- the file --------------------------------------------------------------------------------------------------------


def test_sections_and_their_precedence(tmp_path: Path) -> None:
    file = write(
        tmp_path,
        """
        [sweep]
        out = "runs/x"
        [defaults]
        epochs = 3
        lr = 0.1
        milestones = [0.5]
        [grid]
        noise = ["pair:0.4", "flip:0.20"]
        seed = [0, 1]
        [method.warpi]
        samples = [1, 5]
        lr = 0.2
        [[runs]]
        method = ["ce", "warpi"]
        [[runs]]
        method = "mwnet"
        seed = [7]
        noise = "uniform:0.6"
        milestones = [[0.5], [0.6, 0.8]]
        """,
    )
    plan = read_plan(file)
    assert plan.out == Path("runs/x")
    settings = {job.name: job.settings for job in plan.jobs}
    first = ["ce_pair-0.4_seed0", "warpi_pair-0.4_samples-1_seed0", "warpi_pair-0.4_samples-5_seed0"]
    assert names(plan)[:4] == [*first, "ce_pair-0.4_seed1"], "the axes of a method vary fastest"
    assert len(settings) == 4 + 8 + 2
    assert settings["ce_flip-0.2_seed1"] == {
        "method": "ce",
        "noise": "flip:0.2",
        "seed": 1,
        "epochs": 3,
        "lr": 0.1,
        "milestones": (0.5,),
    }
    assert settings["warpi_pair-0.4_samples-5_seed0"]["lr"] == 0.2
    assert settings["mwnet_uniform-0.6_milestones-0.6,0.8_seed7"]["milestones"] == (0.6, 0.8)
    assert "mwnet_uniform-0.6_milestones-0.5_seed7" in settings


def test_runs_keep_the_order_of_the_file(tmp_path: Path) -> None:
    file = write(tmp_path, '[grid]\nseed = [1, 0]\nmethod = ["warpi", "ce"]\n')
    plan = read_plan(file)
    assert names(plan) == ["warpi_given_seed1", "ce_given_seed1", "warpi_given_seed0", "ce_given_seed0"]
    assert plan.out == Path("runs/sweep"), "not named after the file"
    assert read_plan(file, tmp_path).out == tmp_path


AXES = {
    "seed": st.integers(0, 99),
    "lr": st.floats(1e-6, 10),
    "noise": st.sampled_from(["pair:0.4", "pair:0.2", "given", "open_set:0.2,from=cifar100", "given:a/b.json"]),
    "method": st.sampled_from(["ce", "clean_only", "mwnet", "warpi", "warpi_detc"]),
    "net": st.sampled_from(["mlp", "wrn28_10", "resnet32"]),
    "data": st.sampled_from(["digits", "a/x.csv", "a-x.csv", "a x.csv"]),
    "meta": st.integers(1, 50),
}
GRIDS = st.sets(st.sampled_from(sorted(AXES)), min_size=1).flatmap(
    lambda keys: st.fixed_dictionaries(
        {key: st.lists(AXES[key], min_size=1, max_size=3, unique=True) for key in sorted(keys)}
    )
)


@settings(max_examples=25, deadline=None)
@given(GRIDS)
def test_cross_product(tmp_path_factory: pytest.TempPathFactory, grid: dict[str, list[Any]]) -> None:
    folder = tmp_path_factory.mktemp("grid")

    def plan(axes: dict[str, list[Any]]) -> Plan:
        lines = [f"{key} = {json.dumps(values)}" for key, values in axes.items()]
        return read_plan(write(folder, "[grid]\n" + "\n".join(lines)))

    wanted = [dict(zip(grid, values, strict=True)) for values in product(*grid.values())]
    jobs = plan(grid).jobs
    assert [{key: job.settings[key] for key in grid} for job in jobs] == wanted, (
        "not each once with the last key fastest"
    )
    assert len({job.name for job in jobs}) == len(jobs), "two runs share a folder"
    assert all(not set(job.name) & set("/\\: *?\"<>|'") and len(job.name) < 160 for job in jobs)
    alone = plan({key: [value] for key, value in wanted[-1].items()}).jobs[0]
    assert alone == jobs[-1], "a name depends on the rest of the grid"


def test_folder_names_are_readable_and_hashed_if_necessary(tmp_path: Path) -> None:
    def name(**values: Any) -> str:
        lines = [f"{key} = [{json.dumps(value)}]" for key, value in values.items()]
        return names(read_plan(write(tmp_path, "[grid]\n" + "\n".join(lines))))[0]

    assert name(method="warpi", noise="pair:0.4", seed=0) == "warpi_pair-0.4_seed0"
    assert (
        name(method="warpi", lr=0.1, compile=True, output="tanh") == "warpi_given_compile-true_lr-0.1_output-tanh_seed0"
    )
    a, b = name(data="a/x.csv"), name(data="a-x.csv")
    assert a != b
    assert a.startswith("warpi_given_data-a-x.csv_seed0_")
    long = [name(method="forward", matrix=100 * [0.1], seed=seed) for seed in (0, 1)]
    assert [re.sub(r"_[0-9a-f]{8}$", "", each)[-6:] for each in long] == ["_seed0", "_seed1"], "a seed is cut off"


def test_overrides_only_select_from_the_values_of_a_block(tmp_path: Path) -> None:
    """A block made for one kind of noise is not run with another one."""
    file = write(
        tmp_path,
        """
        [grid]
        noise = ["pair:0.4", "uniform:0.6"]
        seed = [0]
        [[runs]]
        method = ["ce", "warpi"]
        [[runs]]
        method = "warpi"
        noise = "pair:0.4"
        output = ["tanh", "sigmoid"]
        """,
    )

    def selected(*changes: str) -> list[str]:
        return names(read_plan(file, changes=changes))

    every = selected()
    assert len(every) == 6
    assert selected("noise=uniform:0.6") == ["ce_uniform-0.6_seed0", "warpi_uniform-0.6_seed0"]
    assert selected("method=ce") == ["ce_pair-0.4_seed0", "ce_uniform-0.6_seed0"]
    text = '[[runs]]\nseed = [5]\noutput = ["tanh", "sigmoid"]\n[[runs]]\noutput = "unbounded"'
    picked = read_plan(write(tmp_path, text, "v.toml"), changes=["output=tanh", "lr=0.2"]).jobs
    assert [(job.name, job.settings["lr"]) for job in picked] == [("warpi_given_output-tanh_seed5", 0.2)]
    assert set(selected('method=["warpi", "ce"]')) == set(every)
    assert len(selected("seed=[3, 4]")) == 12  # replaces the values of the grid
    with pytest.raises(UserError, match=r"no run is left: none of its \[\[runs\]\] has --set method=gce"):
        selected("method=gce")


BAD = {
    "[defaults]\nepoch = 3": "unknown setting in [defaults] 'epoch'; did you mean 'epochs'?",
    "[grid]\nlrr = [1.0]": "unknown setting in [grid] 'lrr'; did you mean 'lr'?",
    "[defautls]\nlr = 1.0": "unknown section 'defautls'; did you mean 'defaults'?",
    "[sweep]\nouts = 'x'": "unknown setting in [sweep] 'outs'",
    "[sweep]\nout = 3": "out in [sweep] must be text, got 3",
    "[method.warpy]\nlr = 0.1": "unknown method 'warpy'; did you mean 'warpi'? For a custom one",
    "[method]\nwarpi = 3": "settings of a method are written as [method.warpi], got 3",
    "[method.warpi]\nmethod = 'ce'": "method cannot be set in [method.warpi]",
    "[grid]\nmethod = ['warpi', 'cee']": "unknown method 'cee'",
    "[grid]\nseed = 3": "seed in [grid] must be a list of values, got 3; one value goes into [defaults]",
    "[grid]\nmilestones = [0.5]": "milestones in [grid] must be a list of values, got [0.5]",
    "[grid]\nseed = []": "seed in [grid] is an empty list",
    "[defaults]\nseed = [1, 2]": "seed in [defaults] must be one value, got [1, 2]; several go into [grid]",
    "[defaults]\nlr = 'fast'": "lr must be float, got 'fast'",
    "[defaults]\nepochs = 0": "epochs must be at least 1, got 0",
    "[defaults]\nlimit = -3": "limit must be at least 1, got -3",
    "[defaults]\nprecision = 32": "precision in [defaults] must be text, got 32; write it in quotes",
    "[grid]\nprecision = ['bf16', 32]": "precision in [grid] must be text, got 32; write it in quotes",
    "[[runs]]\ndata = 1979-05-27": "data in [[runs]] 1 must be text, got 1979-05-27; write it in quotes",
    "[defaults]\nnet = 'resnet33'": "unknown net 'resnet33'; did you mean 'resnet32'?",
    "[defaults]\nnoise = 'pairs:0.4'": "unknown noise 'pairs'; did you mean 'pair'?",
    "[defaults]\nthreads = 0": "threads must be at least 1",
    "[defaults]\nsamples = 5\n[grid]\nmethod = ['ce', 'warpi']": "'samples' is not a setting of the method 'ce'; "
    "put it into [method.NAME] of the methods that have it: warpi, warpi_detc",
    "[grid]\nseed = [1, 1]": "the run warpi_given_seed1 is described twice",
    "[defaults]\nlr = 0.1\n[[runs]]\n[[runs]]\nlr = 0.1": "the run warpi_given_lr-0.1_seed0 is described also as "
    "warpi_given_seed0",
    "runs = 3": "runs must be written as [[runs]], got 3",
    "lr = ": "is not TOML",
}


@pytest.mark.parametrize("text", BAD)
def test_invalid_files_are_refused(tmp_path: Path, text: str) -> None:
    file = write(tmp_path, text)
    with pytest.raises(UserError) as error:
        read_plan(file)
    assert str(error.value).startswith(f"{file}")
    assert BAD[text] in str(error.value)


def test_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"cannot read .*none\.toml"):
        read_plan(tmp_path / "none.toml")


def test_overrides(tmp_path: Path) -> None:
    file = tiny(tmp_path, more="[method.warpi]\nsamples = 2\n")
    changes = ["epochs=7", "seed=1", "noise=flip:0.2", "warpi.samples=3", "lr=[0.1, 0.2]"]
    plan = read_plan(file, changes=changes, root=Path("D"))
    assert names(plan) == [f"{m}_flip-0.2_lr-{lr}_seed1" for m in ("ce", "warpi") for lr in (0.1, 0.2)]
    assert all(job.settings["epochs"] == 7 and job.settings["root"] == "D" for job in plan.jobs)
    assert plan.jobs[-1].settings["samples"] == 3
    for text, output in {
        "epochs": "key=value",
        "epoch=3": "did you mean",
        "cee.lr=3": "unknown method",
        "lr=[]": "empty",
    }.items():
        with pytest.raises(UserError, match=output):
            read_plan(file, changes=[text])


def test_overrides_need_no_quotes_for_text_that_looks_like_a_number(tmp_path: Path) -> None:
    file = tiny(tmp_path)
    changes = ["precision=32", "data=2024-01-01", "label=true", "weights=1e3", 'root="7"', "method=ce", "epochs=3"]
    (settings, _) = (job.settings for job in read_plan(file, changes=changes).jobs)
    wanted = {"precision": "32", "data": "2024-01-01", "label": "true", "weights": "1e3", "root": "7", "epochs": 3}
    assert {key: settings[key] for key in wanted} == wanted
    both = read_plan(file, changes=['precision=["32", "bf16"]', "warpi.output=tanh"]).jobs
    assert [job.settings["precision"] for job in both] == ["32", "bf16"] * 4
    for text, output in {
        'precision=[32, "bf16"]': "precision in --set must be text, got 32; write it in quotes",
        "precision=16": "unknown precision '16'",
        "warpi.output=3": "unknown output '3'",
        "method=3": "unknown method '3'",
        "epochs=two": "epochs must be int, got 'two'",
    }.items():
        with pytest.raises(UserError, match=re.escape(output)):
            read_plan(file, changes=[text])


def test_setting_may_be_a_list_for_one_method_only(tmp_path: Path) -> None:
    """`hidden` is a number for warpi and mwnet, and a list for vri."""

    def selected(text: str, *changes: str) -> list[str]:
        plan = read_plan(write(tmp_path, text), changes=changes)
        return [f"{job.settings['method']} {job.settings['hidden']}" for job in plan.jobs]

    two = ["warpi 50", "warpi 80"]
    assert selected("[grid]\nhidden = [50, 80]") == selected("[method.warpi]\nhidden = [50, 80]") == two
    assert selected("[[runs]]\nhidden = [50, 80]") == selected("", "hidden=[50, 80]") == two
    assert selected("", "warpi.hidden=[50, 80]") == two
    assert selected('[[runs]]\nmethod = "vri"\nhidden = [50, 80]') == selected("", "method=vri", "hidden=[50, 80]")
    assert selected("[method.vri]\nhidden = [[50, 80], [9]]", "method=vri") == ["vri (50, 80)", "vri (9,)"]


def test_an_override_without_effect_is_refused(tmp_path: Path) -> None:
    text = '[[runs]]\nmethod = "warpi"\nsamples = [1, 5]\n[[runs]]\nmethod = ["ce", "mwnet"]\n'
    output = r"warpi\.samples would change nothing: .* write --set method=warpi --set samples"
    with pytest.raises(UserError, match=output):
        read_plan(write(tmp_path, text), changes=["warpi.samples=1"])
    assert names(read_plan(tmp_path / "sweep.toml", changes=["method=warpi", "samples=1"])) == [
        "warpi_given_samples-1_seed0"
    ]
    jobs = read_plan(tmp_path / "sweep.toml", changes=["mwnet.hidden=7"]).jobs
    assert [job.settings.get("hidden") for job in jobs] == [None, None, None, 7]


def test_sweep_file_in_the_docs_is_valid(tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "sweep.md").read_text()
    (text,) = re.findall(r"```toml\n(.*?)```", page, re.DOTALL)
    planned = names(read_plan(write(tmp_path, text)))
    assert len(planned) == 2 * 3 * 3 + 3 * 2
    mentioned = re.findall(r"`(warpi_\S+seed\d)`", page)
    assert mentioned
    assert set(mentioned) <= set(planned)


def test_kept_results_count_as_done(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A run with kept results is done, unless they are incomplete or belong to other settings."""
    kept = tmp_path / "kept"
    file = tiny(tmp_path, epochs=1, more=f'[sweep]\nkept = "{kept}"\n')
    only = ["--set", "method=ce", "--jobs", "1", "--device", "cpu"]
    assert main(["sweep", str(file), "--out", str(tmp_path / "first"), *only]) == 0
    for run in (tmp_path / "first").glob("ce_*"):
        for name in KEPT:
            write_bytes(kept / run.name / name, (run / name).read_bytes())
    capsys.readouterr()

    def dry(*more: str) -> str:
        assert main(["sweep", str(file), "--out", str(tmp_path / "second"), "--dry-run", *more]) == 0
        return capsys.readouterr().out

    assert "4 runs in" in (output := dry())
    assert "2 done, 0 begun, 2 missing" in output
    assert main(["sweep", str(file), "--out", str(tmp_path / "second"), *only]) == 0
    output = capsys.readouterr().out
    assert "nothing to do: 2 of 2 runs are done" in output
    assert re.search(r"ce +2 ", output), "kept runs are missing in the table"
    assert not (tmp_path / "second").exists()
    assert "0 done, 0 begun, 4 missing" in dry("--set", "epochs=2"), "results with other settings count"
    spec_file = kept / "ce_pair-0.4_seed1" / "spec.json"
    spec_file.write_text(spec_file.read_text().replace('"momentum": 0.9', '"momentum": 0.8'))
    assert "1 done, 0 begun, 3 missing" in dry(), "results with another default momentum count"
    results = kept / "ce_pair-0.4_seed0" / "results.jsonl"
    whole = results.read_bytes()
    for broken in (b"", b"[1, 2]\n", whole + whole):
        results.write_bytes(broken)
        assert "0 done, 0 begun, 4 missing" in dry(), "results without exactly one record per epoch count"
    results.write_bytes(whole)
    assert "1 done, 0 begun, 3 missing" in dry()
    (tmp_path / "kept2").mkdir()
    results.parent.rename(tmp_path / "kept2" / "of_another_sweep")
    assert "0 done" in dry()
    file.write_text(file.read_text().replace(f'"{kept}"', f'["{kept}", "{kept}2"]'))
    assert "1 done, 0 begun, 3 missing" in dry(), "a run of another sweep does not count"
    (tmp_path / "kept2" / "of_another_sweep" / "results.jsonl").unlink()
    assert "0 done, 0 begun, 4 missing" in dry()


def test_kept_runs_with_other_data_and_broken_ones_do_not_count(tmp_path: Path) -> None:
    """Under another name a run is identified by its settings, paths of the user's files included."""
    for root in ("raw", "cropped"):
        for name in KEPT:
            write_bytes(tmp_path / "kept" / root / name, b"{}")
    settings = {"data": "list.csv", "noise": "given", "seed": 0, "method": "ce"}
    for root in ("raw", "cropped"):
        (tmp_path / "kept" / root / "sweep.json").write_text(json.dumps(settings | {"root": root}))
    write_bytes(tmp_path / "kept" / "broken" / "sweep.json", b"{")
    paths = {
        root: folders._by_settings(tmp_path / "kept")[folders._key(settings | {"root": root})]
        for root in ("raw", "cropped")
    }
    assert paths == {root: [tmp_path / "kept" / root] for root in paths}
    named = settings | {"data": "digits"}
    assert folders._key(named | {"root": "/a"}) == folders._key(named | {"root": "/b"})
    assert folders.find_kept([tmp_path / "kept"], Job("other", settings | {"root": "third"})) is None


def test_kept_folders_are_relative_to_the_current_directory(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tiny(tmp_path, epochs=1, more='[sweep]\nkept = "results/flip"\n')
    monkeypatch.chdir(tmp_path)
    read_plan(file)
    assert f"results does not exist in {tmp_path}, so no kept run counts as done" in caplog.text
    caplog.clear()
    (tmp_path / "results").mkdir()
    read_plan(file)
    assert not caplog.text, "a warning before the first kept run"


def test_a_finished_run_with_broken_results_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tiny(tmp_path, epochs=1)
    flags = ["--set", "method=ce", "--out", str(tmp_path / "runs"), "--jobs", "1", "--device", "cpu"]
    assert main(["sweep", str(file), "--set", "seed=[0]", *flags]) == 0
    (tmp_path / "runs" / "ce_pair-0.4_seed0" / "results.jsonl").write_text("{bro\n")
    capsys.readouterr()
    with pytest.raises(SystemExit):
        main(["sweep", str(file), *flags])
    assert "does not contain every epoch; delete the folder to run it again" in (output := capsys.readouterr()).err
    assert "1 of 2 runs done" in output.out
    (spec_file := tmp_path / "runs" / "ce_pair-0.4_seed0" / "spec.json").write_text("{")
    with pytest.raises(SystemExit) as ended:
        main(["sweep", str(file), *flags])
    assert ended.value.code == 1
    assert f"{spec_file} is not JSON" in (output := capsys.readouterr()).err
    assert re.search(r"ce +1 ", output.out), "the other run is missing in the table"


def finished(plan: Plan, job: Job, **facts: Any) -> Path:
    """Write the folder of a finished run without training it."""
    settings = {key: value for key, value in job.settings.items() if key != "threads"}
    prepared = spec.prepare(spec.RunSpec.from_settings(**settings))
    run_spec = prepared.spec
    known = {"format": "warpi-run/1", "version": "0", "spec": run_spec.to_json(), "facts": facts}
    known["environment"] = {"stamps": prepared.data.stamps}
    content = {"spec.json": known, "sweep.json": job.settings, "done": {}}
    for name, each in content.items():
        write_bytes(plan.out / job.name / name, json.dumps(each).encode())
    write_bytes(plan.out / job.name / "results.jsonl", b"{}\n" * run_spec.recipe.epochs)
    return plan.out / job.name


def test_runs_made_from_another_version_of_the_noise_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    np.save("T.npy", np.eye(10))
    file = write(tmp_path, "[defaults]\nmethod = 'ce'\nepochs = 1\nnoise = 'matrix:T.npy'\n[grid]\nseed = [0, 1, 2]")
    plan = read_plan(file)
    made, old = plan.jobs[:2]
    path = finished(plan, made, noise_file_sha256=hashlib.sha256(Path("T.npy").read_bytes()).hexdigest())
    finished(plan, old)
    assert folders.run_state(plan, made).done
    np.save("T.npy", np.eye(10) * 0.5 + 0.05)
    assert main(["sweep", str(file), "--dry-run"]) == 0
    output = capsys.readouterr().out
    assert "1 done, 0 begun, 1 missing, 1 refused" in output, "a run without a stored hash is refused"
    with pytest.raises(UserError, match=r"was made from another version of T\.npy: its sha256 .* or delete the folder"):
        folders.run_state(plan, made)
    assert (folders.why_not_kept(path, made.settings) or "").startswith("it was made from another version of T.npy")
    assert folders.why_not_kept(plan.out / old.name, old.settings) is None
    refused = list[RunEvent]()
    queue = Queue(plan, "a session", refused.append)
    claim = queue.take()
    assert claim is not None
    assert (claim.job, [event.run for event in refused]) == (plan.jobs[2], [made.name])
    claim.lock.close()
    assert (path / "done").exists(), "a refused run was changed"
    Path("T.npy").unlink()
    assert folders.run_state(plan, made).done, "a finished run needs its noise file"


def test_runs_made_from_another_version_of_the_data_are_refused(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows = "a,label\n" + "".join(f"{i % 7}.5,{'pq'[i % 2]}\n" for i in range(60))
    data = write(tmp_path, rows, "x.csv")
    text = f"[defaults]\nmethod = 'ce'\nepochs = 1\ndata = '{data}'\nlabel = 'label'"
    plan = read_plan(write(tmp_path, text), tmp_path / "runs")
    (job,) = plan.jobs
    facts = folders._facts(spec.DataSpec(str(data), label="label"), 0)
    path = finished(plan, job, **facts)
    reads = folders._facts.cache_info().misses
    assert folders.run_state(plan, job).done
    assert folders._facts.cache_info().misses == reads, "unchanged data was read"
    os.utime(data)
    assert folders.run_state(plan, job).done, "refused although the content is the same"
    for changed, what in {rows.replace("p", "q", 1): "labels", rows.replace("3.5", "3.6", 1): "inputs"}.items():
        (tmp_path / "new").write_text(changed)
        os.utime(tmp_path / "new", ns=(0, 0))  # an older file replaces it
        os.replace(tmp_path / "new", data)
        os.utime(path / "spec.json", (4e9, 4e9))  # the run was copied later
        with pytest.raises(UserError, match=rf"{path} was made from another version of {data}: {what}_sha256 was"):
            folders.run_state(plan, job)
    assert not caplog.text
    data.write_text("nothing")
    assert folders.run_state(plan, job).done, "refused although the data cannot be compared"
    assert f"{data} has changed since runs were made from it and cannot be compared with their data" in caplog.text
    data.write_text(rows)
    assert folders.run_state(plan, job).done


def test_run_of_fit_with_another_setting_is_refused(tmp_path: Path) -> None:
    plan = read_plan(tiny(tmp_path), tmp_path / "runs", changes=["method=ce", "seed=0"])
    (job,) = plan.jobs
    other = Job(job.name, {**job.settings, "momentum": 0.5})
    (finished(plan, other) / "sweep.json").unlink()
    events = list[RunEvent]()
    assert Queue(plan, "a session", events.append).take() is None
    (event,) = events
    assert "was started with momentum = 0.5, not with momentum = 0.9; choose another --out" in event.reason


def write_bytes(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)


# -- resources -------------------------------------------------------------------------------------------------------


def test_flags_become_devices_and_processes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("warpi.sweep.runner.count_cores", lambda: 4)
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(tmp_path))
    assert parse_resources("cpu", "auto", 2).threads == 2
    assert len(parse_resources("auto", "auto", None).processes) == 4
    for flags in (("cpu,cpu", "auto", None), ("cpu", "3", None), ("cpu", "auto", 0), ("gpu", "auto", None)):
        with pytest.raises(UserError):
            parse_resources(*flags)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    three = parse_resources("auto", "3", None)
    assert [str(device) for device in three.processes] == ["cuda:0", "cuda:1"] * 3
    assert (three.jobs, three.threads) == (3, None)
    assert [str(d) for d in parse_resources("cuda:1", "auto", None).devices] == ["cuda:1"]
    assert parse_resources("auto", "auto", 3) == three, "--jobs and --per-gpu differ on a GPU"
    assert parse_resources("auto", "auto", None).jobs == 1
    (tmp_path / "control").touch()
    assert parse_resources("auto", "auto", None).jobs == 3, "NVIDIA MPS was not detected"
    for flags in (
        ("cuda:0,cuda:0", "auto", None),
        ("cuda:0,cpu", "auto", None),
        ("cuda", "auto", 0),
        ("cuda", "0", None),
    ):
        with pytest.raises(UserError):
            parse_resources(*flags)


# -- one worker ------------------------------------------------------------------------------------------------------


class ListQueue:
    """A queue of given jobs; records what the worker reports."""

    def __init__(self, folder: Path, jobs: list[Job], others: int = 0) -> None:
        self.folder = folder
        self.jobs = jobs
        self.cache = None
        self.others = others  # how often another process is at work
        self.events: list[RunEvent] = []
        self.failures: dict[str, str] = {}
        self.finished: list[str] = []

    def take(self) -> ClaimedRun | None:
        if not self.jobs:
            return None
        job = self.jobs.pop(0)
        path = self.folder / job.name
        return ClaimedRun(job, path, 0, checkpoint.exists(path / "checkpoint.safetensors"), ExitStack())

    def has_more(self) -> bool:
        return bool(self.jobs)

    def others_are_at_work(self) -> bool:
        self.others -= 1
        return self.others >= 0

    def mark_done(self, claim: ClaimedRun) -> None:
        self.finished.append(claim.job.name)

    def mark_failed(self, job: Job, reason: str, details: str) -> None:
        self.failures[job.name] = reason
        assert details or "Error:" not in reason, "an unexpected error without its traceback"

    def report(self, event: RunEvent) -> None:
        self.events.append(event)
        if event.kind == "requeued":
            self.jobs.append(REQUEUED[event.run])

    def work(self, caught: list[int] | None = None, shares_device: bool = False) -> None:
        queue: Any = self
        work(queue, CPU, [] if caught is None else caught, shares_device)


def test_runs_of_a_worker_equal_separate_runs(tmp_path: Path) -> None:
    jobs = [
        Job(f"{method}{seed}", {**TINY, "method": method, "seed": seed, "epochs": epochs, "noise": "pair:0.4"})
        for method, seed, epochs in [("ce", 0, 2), ("warpi", 1, 1), ("ce", 3, 1)]
    ]
    before = (random.getstate(), torch.get_rng_state().tolist(), torch.get_num_threads())
    queue = ListQueue(tmp_path / "swept", list(jobs))
    queue.work()
    assert queue.failures == {}
    assert queue.finished == [job.name for job in jobs]
    assert (random.getstate(), torch.get_rng_state().tolist(), torch.get_num_threads()) == before
    last = jobs[-1]  # trained after two others
    fit(tmp_path / "alone" / last.name, device="cpu", **last.settings)
    assert_same_runs(tmp_path / "swept" / last.name, tmp_path / "alone" / last.name)


def test_data_is_read_once_for_all_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    reads = []

    def counting(*args: Any, **named: Any) -> Any:
        reads.append(args)
        return load(*args, **named)

    def prepare(cache: spec.DataCache | None, **settings: Any) -> Any:
        return spec.prepare(spec.RunSpec.from_settings("ce", data="digits", **settings), cache).task

    load = spec.read_dataset
    monkeypatch.setattr(spec, "read_dataset", counting)
    cache = spec.DataCache()
    tasks = [prepare(cache, noise="pair:0.4", seed=seed) for seed in (0, 1)]
    prepare(cache, label=None, noise="flip:0.4")
    assert reads == [("digits",)]
    assert tasks[0].train.examples.x is tasks[1].train.examples.x
    prepare(None)
    assert len(reads) == 2, "without a cache the data is not read again"
    examples: Any = load("digits").examples
    assert examples.to("meta").x is examples.to("meta").x, "copied to a device twice"


def scripted_run(_: Path, **script: Any) -> Iterator[dict[str, float] | None]:
    """Replaces `fitting`: takes no time and does what its settings say."""
    if "threads" in script:
        torch.set_num_threads(script["threads"])
    for step in range(script["steps"]):
        if script.get("error") and step == script["at"]:
            raise script["error"]
        if script["caught"]:
            raise Stopped(script["caught"][0], "")
        yield {"epoch": step + 1.0, "seconds": 1.0, "test_acc": 50.0} if step % 3 == 2 else None
    return SimpleNamespace(history=[{"epoch": 1.0}])


HUNGRY = Job("hungry", {"steps": 3, "error": torch.OutOfMemoryError("CUDA out of memory. Tried 2 GiB"), "at": 1})
REQUEUED = {"hungry": HUNGRY}


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("warpi.sweep.worker.fitting", scripted_run)


@pytest.mark.usefixtures("scripted")
def test_failing_runs_do_not_stop_the_others(tmp_path: Path) -> None:
    errors = [UserError("no such file"), RuntimeError("shapes"), KeyError("bug"), OSError(28, "disk full")]
    jobs = [Job(f"bad{i}", {"steps": 9, "error": error, "at": 2 * i}) for i, error in enumerate(errors)]
    jobs[2:2] = [Job("good0", {"steps": 20})]
    big = Job("big", {"steps": 3, "error": MemoryError(), "at": 1})
    queue = ListQueue(tmp_path, [*jobs, Job("good1", {"steps": 5}), big])
    queue.work()
    assert queue.finished == ["good0", "good1"]
    assert queue.failures.keys() == {"bad0", "bad1", "bad2", "bad3", "big"}
    assert queue.failures["bad0"] == "no such file"
    assert queue.failures["bad2"] == "KeyError: 'bug'"
    assert "lower batch_size" in queue.failures["big"]


@pytest.mark.usefixtures("scripted")
@pytest.mark.parametrize("others", [0, 1])
def test_run_without_memory_on_a_shared_device_returns_to_the_queue(tmp_path: Path, others: int) -> None:
    """If other processes are at work, the worker ends, so that fewer share the device; else it tries once more."""
    queue = ListQueue(tmp_path, [HUNGRY, Job("small", {"steps": 3})], others)
    queue.work(shares_device=True)
    ends = [(event.run, event.kind) for event in queue.events if event.kind not in ("begun", "epoch")]
    if others:
        assert ends == [("hungry", "requeued")]
        assert [job.name for job in queue.jobs] == ["small", "hungry"]
    else:
        assert ends == [("hungry", "requeued"), ("small", "done"), ("hungry", "failed")]
        assert "lower batch_size" in queue.failures["hungry"]


@pytest.mark.usefixtures("scripted")
def test_the_number_of_threads_is_restored_after_each_run(tmp_path: Path) -> None:
    before = torch.get_num_threads()
    queue = ListQueue(tmp_path, [Job(str(n), {"steps": 5, "threads": n}) for n in (2, 3)])
    queue.work()
    assert (queue.failures, len(queue.finished), torch.get_num_threads()) == ({}, 2, before)


@pytest.mark.usefixtures("scripted")
def test_signal_stops_the_run_and_starts_no_other(tmp_path: Path) -> None:
    caught = list[int]()
    queue = ListQueue(tmp_path, [Job(name, {"steps": 50}) for name in "ab"])
    report = queue.report

    def stop_at_an_epoch(event: RunEvent) -> None:
        report(event)
        if event.kind == "epoch":
            caught.append(signal.SIGTERM)

    queue.report = stop_at_an_epoch  # type: ignore[method-assign]
    queue.work(caught)
    assert [event.run for event in queue.events if event.kind == "stopped"] == ["a"]
    assert queue.finished == []
    assert [job.name for job in queue.jobs] == ["b"]


# -- the display ----------------------------------------------------------------------------------------------------


def test_board_counts_and_estimates(tmp_path: Path) -> None:
    jobs = tuple(Job(f"{m}{s}", {"method": m, "seed": s, "epochs": 10}) for m in ("ce", "warpi") for s in (0, 1))
    states = {job.name: State() for job in jobs} | {"ce1": State(True, True, 10, 10)}
    with (tmp_path / "out").open("w") as out:
        board = Board(Plan(tmp_path, tmp_path, jobs), states, Console(file=out))
        assert (board.count("done"), board.seconds_left()) == (1, None)
        board.show(RunEvent("begun", "ce0"))
        board.show(RunEvent("epoch", "ce0", 4, {"epoch": 4, "seconds": 2.0, "test_acc": 70.0}))
        assert board.seconds_left() == pytest.approx((6 + 10 + 10) * 2.0), (
            "unknown runs are not assumed to take as long as known ones"
        )
        board.show(RunEvent("begun", "warpi0"))
        board.show(RunEvent("epoch", "warpi0", 5, {"epoch": 5, "seconds": 8.0}))
        assert board.seconds_left() == pytest.approx((6 * 2.0 + 5 * 8.0 + 10 * 8.0) / 2)
        board.show(RunEvent("failed", "warpi0", reason="no luck"))
        board.show(RunEvent("done", "ce0", 10, {"epoch": 10, "seconds": 2.0, "test_acc": 71.5}))
        assert (board.count("done"), board.failed) == (2, {"warpi0": "no luck"})
    text = (tmp_path / "out").read_text()
    assert "[2/4] ce0  test 71.50 %" in text
    assert "warpi0  failed: no luck" in text
    assert [format_duration(s) for s in (7.4, 200, 11000)] == ["7 s", "3 min", "3 h 03 min"]


def test_bars_on_a_terminal(tmp_path: Path) -> None:
    jobs = (Job("a", {"epochs": 4}), Job("b", {"epochs": 4}))
    with (tmp_path / "out").open("w") as out:
        console = Console(file=out, force_terminal=True, width=120)
        board = Board(Plan(tmp_path, tmp_path, jobs), {j.name: State() for j in jobs}, console)
        with board.bars:
            board.show(RunEvent("begun", "a"))
            board.show(RunEvent("epoch", "a", 1, {"epoch": 1, "seconds": 100.0, "val_acc": 12.0}))
            board.bars.refresh()
    text = (tmp_path / "out").read_text()
    assert "0 done, 1 active, 1 waiting" in text
    assert "12 min left" in text
    assert "val 12.00 %" in text


# -- whole sweeps ----------------------------------------------------------------------------------------------------


def sweep(file: Path, out: Path, *flags: str) -> int:
    try:
        return main(["sweep", str(file), "--out", str(out), "--device", "cpu", *flags])
    except SystemExit as end:
        return int(end.code or 0)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a sweep file and its `runs`, trained one after another.

    The data is a file, since workers that read digits import scikit-learn. Runs of mwnet are long enough to be killed.
    """
    folder = tmp_path_factory.mktemp("undisturbed")
    y = np.arange(240) % 3
    x = np.random.default_rng(0).normal(size=(240, 8)) + y[:, None]
    np.savez(folder / "x.npz", x=x.astype(np.float32), y=y, clean=y)
    text = TABLES.format(data=folder / "x.npz", limit=240, epochs=2, batch=32).replace("warpi", "mwnet")
    text += "[method.mwnet]\nepochs = 8\n"
    assert sweep(write(folder, text), folder / "runs", "--jobs", "1") == 0
    return folder


def test_unwritable_output_folder_is_reported_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "taken").write_text("")
    assert sweep(tiny(tmp_path), tmp_path / "taken" / "runs", "--jobs", "2") == 2
    assert capsys.readouterr().err == (
        f"warpi: cannot write to {tmp_path / 'taken' / 'runs'}: Not a directory; choose another --out\n"
    )


def test_sweep_trains_missing_runs_only(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tiny(tmp_path)
    out = tmp_path / "runs"
    assert sweep(file, out, "--dry-run") == 0
    output = capsys.readouterr().out
    assert "ce_pair-0.4_seed0     missing" in output
    assert "0 done, 0 begun, 4 missing" in output
    assert not out.exists()
    rows = tmp_path / "rows.json"
    assert sweep(file, out, "--jobs", "1", "--set", "seed=0", "--json", str(rows)) == 0
    output = capsys.readouterr().out
    assert "[2/2] warpi_pair-0.4_seed0  test " in output
    assert "2 of 2 runs done" in output
    assert [(row["method"], row["seeds"]) for row in json.loads(rows.read_text())] == [("ce", [0]), ("warpi", [0])]
    fit(
        out / "ce_pair-0.4_seed1", method="ce", noise="pair:0.4", seed=1, device="cpu", **TINY
    )  # one run without the sweep
    before = {path: path.stat().st_mtime_ns for path in out.glob("*_seed0/*")}
    assert sweep(file, out, "--jobs", "1") == 0
    assert before == {path: path.stat().st_mtime_ns for path in out.glob("*_seed0/*")}, "finished runs were changed"
    assert "[4/4] warpi_pair-0.4_seed1" in capsys.readouterr().out
    assert sweep(file, out, "--dry-run") == 0
    assert "4 done, 0 begun, 0 missing" in capsys.readouterr().out
    assert sweep(file, out) == 0
    assert "nothing to do: 4 of 4 runs are done" in capsys.readouterr().out
    assert sweep(file, out, "--jobs", "1", "--set", "epochs=3") == 1, "folders were used for other settings"
    output, errors = capsys.readouterr()
    assert "0 of 4 runs done" in output
    assert "seeds" not in output, "the table contains results with other settings"
    assert errors.count("was started with epochs = 2, not with epochs = 3; choose another --out") == 4
    assert sweep(file, out, "--dry-run", "--set", "lr=0.3") == 0
    assert capsys.readouterr().out.replace("\n", " ").count("was started with lr = 0.05") >= 1
    assert sweep(file, out, "--dry-run", "--json", str(rows)) == 2


def test_a_failing_reader_is_reported_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def read(*_: object, **__: object) -> None:
        raise RuntimeError("the server is away")

    monkeypatch.setattr("warpi.sweep.runner.load", read)
    file = tiny(tmp_path, epochs=1)
    assert sweep(file, tmp_path / "runs", "--jobs", "1") == 2
    assert (
        "RuntimeError: the server is away (data = 'digits', root = None; no run was started)" in capsys.readouterr().err
    )
    assert not (tmp_path / "runs").exists()


def test_failed_runs_are_reported_and_tried_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    more = '[[runs]]\nmethod = "ce"\nseed = [0]\nlr = [1e30, 0.05]\n'
    more += '[[runs]]\nmethod = "ce"\nseed = [0, 1, 2]\nnoise = "hierarchical:0.4"\n'
    file = tiny(tmp_path, more=more)
    out = tmp_path / "runs"
    for _ in range(2):  # the second call tries again, since the cause may be fixed
        assert sweep(file, out, "--jobs", "1") == 1
        output = capsys.readouterr()
        assert "warpi: ce_pair-0.4_lr-1e+30_seed0 failed: " in output.err
        assert "lower --lr" in output.err
        assert re.search(r"^warpi: ce_hierarchical-0.4_seed. and 2 more failed: ", output.err, re.M), (
            "not one line for all"
        )
        assert output.out.count("superclasses") == 1, "a shared reason is not printed once"
        assert "1 of 5 runs done" in output.out
        assert sweep(file, out, "--dry-run") == 0
        assert capsys.readouterr().out.count("failed: ") == 4, "--dry-run does not show the reasons"
    assert (out / "ce_pair-0.4_lr-0.05_seed0" / "done").exists()


@pytest.mark.parametrize(
    ("jobs", "extra", "message"),
    [
        ("1", 'data = "cifar10"', "cifar10 is not in {root}: download"),
        ("2", 'data = "cifar10"', "cifar10 is not in {root}: download"),
        ("1", 'data = "none.csv"', "there is no file or folder 'none.csv'"),
        ("1", 'noise = "given:none.json"', "cannot read the noise file none.json"),
        (
            "1",
            'noise = "given:worst"',
            "'digits' has no label sets; use a noise file *.json, or only 'given'",
        ),
        (
            "1",
            'noise = "given:{root}.json"',
            "noise file {root}.json: data is 'other', but this data set has 'digi",
        ),
        ("1", 'meta_data = "none.csv"', "there is no file or folder 'none.csv'"),
        ("1", 'noise = "open_set:0.2,from=cifar100"\ndata = "digits"', "cifar100 is not in {root}: download"),
    ],
)
def test_missing_data_is_reported_once_before_any_run_starts(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    jobs: str,
    extra: str,
    message: str,
) -> None:
    monkeypatch.setattr("warpi.sweep.runner.run_processes", lambda *_: pytest.fail("a process was started"))
    more = f'[[runs]]\nmethod = ["ce"]\n[[runs]]\nmethod = ["mwnet", "warpi"]\n{extra}\n'
    out, root = tmp_path / "runs", tmp_path / "no data"
    labels = NoisyLabels(torch.tensor([0, 1]), None)
    write_noise_file(f"{root}.json", data="other", noise="given", seed=0, n_classes=2, labels=labels)
    file = tiny(tmp_path, more=more.replace("{root}", str(root)))
    assert sweep(file, out, "--jobs", jobs, "--root", str(root)) == 2
    output = capsys.readouterr()
    (line,) = output.err.splitlines()
    assert line.startswith(f"warpi: {file}: {message.format(root=root)}")
    assert line.endswith(f"root = {str(root)!r}; no run was started)")
    assert not output.out
    assert not out.exists()


def test_finished_runs_do_not_need_their_data(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = write(tmp_path, "a,label\n" + "".join(f"{i}.5,{'pq'[i % 2]}\n" for i in range(60)), "x.csv")
    text = f'[defaults]\ndata = "{data}"\nlabel = "label"\nepochs = 1\nmethod = "ce"\nthreads = 1\n'
    file = write(tmp_path, text)
    out = tmp_path / "runs"
    assert sweep(file, out, "--jobs", "1") == 0
    data.unlink()
    assert sweep(file, out, "--jobs", "1") == 0
    assert "nothing to do: 1 of 1 runs are done" in capsys.readouterr().out
    assert sweep(file, out, "--jobs", "1", "--set", "seed=1") == 2


def start(file: Path, out: Path, *flags: str) -> "subprocess.Popen[str]":
    command = [sys.executable, "-m", "warpi", "sweep", str(file), "--out", str(out), "--device", "cpu", *flags]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.Popen(command, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def until(happened: Callable[[], object], process: "subprocess.Popen[str] | None" = None) -> None:
    end = time.monotonic() + 120
    while not happened():
        assert process is None or process.poll() is None, process.communicate()
        assert time.monotonic() < end
        time.sleep(0.002)


def children() -> list[int]:
    tasks = Path("/proc/self/task").glob("*/children")
    return [int(pid) for task in tasks for pid in task.read_text().split()]


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="finds processes through /proc")
def test_stopped_sweep_and_killed_worker_change_no_result(
    tmp_path: Path, undisturbed: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """SIGTERM stops a sweep in its first run. Two processes resume it, and one of them is killed with SIGKILL."""
    file = undisturbed / "sweep.toml"
    out = tmp_path / "runs"
    show = Board.show

    def stop_at_once(board: Board, event: RunEvent) -> None:
        show(board, event)
        if event.kind == "begun":
            os.kill(os.getpid(), signal.SIGTERM)

    with monkeypatch.context() as patch:
        patch.setattr(Board, "show", stop_at_once)
        assert sweep(file, out, "--jobs", "1") == 143
    command = f"warpi sweep {file} --out {out} --device cpu --jobs 1"
    assert capsys.readouterr().err == f"warpi: stopped by SIGTERM; resume with: {command}\n"
    (stored,) = out.glob("*/checkpoint.safetensors")
    assert stored.parent.name == "ce_pair-0.4_seed0"
    assert checkpoint.load(stored)["position"]["epoch"] == 0, "not stored at once"

    events = list[RunEvent]()
    killed = list[int]()
    before = set(children())

    def kill_one(board: Board, event: RunEvent) -> None:
        events.append(event)
        show(board, event)
        if len({e.run for e in events if e.kind == "epoch"}) >= 2 and not killed:  # usually, both are training
            killed.append(min(set(children()) - before))
            with suppress(ProcessLookupError):
                os.kill(killed[0], signal.SIGKILL)

    monkeypatch.setattr(Board, "show", kill_one)
    monkeypatch.setattr(subprocess, "Popen", ForkedPopen)
    assert sweep(file, out, "--jobs", "2") == 0, "the other process has not finished all runs"
    assert "a process of the sweep ended with code -9" in capsys.readouterr().out
    begun, done = ([event.run for event in events if event.kind == kind] for kind in ("begun", "done"))
    planned = names(read_plan(file))
    assert len(set(done)) == len(done) >= len(planned) - 1, "a run was finished twice"
    assert set(begun) == set(planned)
    assert len(begun) <= len(planned) + 1, "more than the run of the killed process was begun again"
    for name in planned:
        assert_same_runs(out / name, undisturbed / "runs" / name)


@pytest.mark.slow
def test_killed_sweep_ends_with_the_same_runs(tmp_path: Path, undisturbed: Path) -> None:
    file = undisturbed / "sweep.toml"
    out = tmp_path / "runs"
    process = start(file, out, "--jobs", "1")
    until((out / "mwnet_pair-0.4_seed0" / "checkpoint.safetensors").exists, process)
    process.kill()
    process.communicate()
    assert not (out / "mwnet_pair-0.4_seed1" / "done").exists(), "the sweep had ended before it was killed"
    assert sweep(file, out, "--jobs", "1") == 0
    for name in names(read_plan(file)):
        assert_same_runs(out / name, undisturbed / "runs" / name)


def test_output_of_libraries_in_a_worker_is_not_an_event(capsys: pytest.CaptureFixture[str]) -> None:
    output = "hello", '{"kind": "alive"}', "7", '{"other": 1}', '{"kind": "done", "run": "a"}'
    events: queue.Queue[RunEvent] = queue.Queue()
    code = f"print({chr(10).join(output)!r})"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as worker:
        _listen(worker, events)
    assert [event.kind for event in events.queue] == ["alive", "done"]
    assert capsys.readouterr().err == 'hello\n7\n{"other": 1}\n'


def test_workers_that_ignore_ctrl_c_are_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    """An import may ignore the signal while a worker starts."""
    code = "import signal, time\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\nprint(flush=True)\ntime.sleep(60)"
    popen = subprocess.Popen
    started = list["subprocess.Popen[bytes]"]()

    def start(_: list[str], **options: Any) -> "subprocess.Popen[bytes]":
        started.append(popen([sys.executable, "-c", code], **options))
        assert started[-1].stdout is not None
        started[-1].stdout.readline()
        return started[-1]

    monkeypatch.setattr(subprocess, "Popen", start)
    assert run_processes([["a command"]], [signal.SIGINT], lambda _: None) == []
    assert started[0].returncode == -signal.SIGTERM


def test_worker_without_parent_stores_a_checkpoint_and_stops(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tiny(tmp_path, 400, 8)
    out = tmp_path / "runs"
    reading, writing = os.pipe()
    os.close(reading)
    with open(writing, "w") as closed_pipe:
        monkeypatch.setattr(sys, "stdout", closed_pipe)
        assert sweep(file, out, "--jobs", "1", "--worker", "a session") == 143
        monkeypatch.undo()
    assert [path.parent.name for path in out.glob("*/checkpoint.safetensors")] == ["ce_pair-0.4_seed0"]


def test_a_queue_knows_whether_another_process_holds_a_run(tmp_path: Path) -> None:
    plan = read_plan(tiny(tmp_path), tmp_path / "runs")
    ours, theirs = (Queue(plan, session, lambda _: None) for session in ("ours", "theirs"))
    claim = theirs.take()
    assert claim is not None
    assert ours.others_are_at_work()
    assert not theirs.others_are_at_work(), "its own run does not count"
    claim.lock.close()
    assert not ours.others_are_at_work()


def test_two_sweeps_share_the_work(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A second sweep of the same file takes the free runs, waits for the others, and ends when all are done."""
    file = tiny(tmp_path)
    out = tmp_path / "runs"
    queue = Queue(read_plan(file, out), "another", lambda _: None)
    claim = queue.take()
    assert claim is not None

    def release_when_others_are_done() -> None:
        while len(list(out.glob("*/done"))) < 3:
            time.sleep(0.05)
        claim.lock.close()

    thread = threading.Thread(target=release_when_others_are_done, daemon=True)
    thread.start()
    assert sweep(file, out, "--jobs", "1") == 0
    thread.join()
    assert "[4/4] ce_pair-0.4_seed0" in capsys.readouterr().out, "not the last run, after its lock was released"
