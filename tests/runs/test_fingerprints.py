"""Runs identify their data by its content: a file that changes under the same name is detected."""

import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from safetensors.torch import save_file

from warpi.errors import UserError
from warpi.nets.registry import make_net
from warpi.report.experiments import find_runs, group
from warpi.runs.fingerprints import stamp
from warpi.runs.run import fit
from warpi.runs.schema import to_stored_names
from warpi.runs.spec import DataCache, DataSpec, RunSpec, prepare
from warpi.sweep.run_states import _other_content

N = 120
X, Y = np.random.default_rng(0).normal(size=(N, 3)).astype(np.float32), np.arange(N) % 2
PARTS = {"x": X, "y": Y, "clean": Y, "x_test": X[:20] + 9, "y_test": Y[:20]}


def make_files(where: Path, **change: Any) -> dict[str, Any]:
    """Write data, trusted examples and weights; return settings that name the files."""
    where.mkdir(exist_ok=True)
    np.savez(where / "data.npz", **{**PARTS, **{k: v for k, v in change.items() if k in PARTS}})
    np.savez(where / "trusted.npz", x=change.get("x_meta", X[:20] + 5), y=change.get("y_meta", Y[:20]))
    net = make_net("mlp", (3,), 2)
    for p in net.parameters():
        p.data.fill_(change.get("weight", 0.01))
    save_file(net.state_dict(), where / "net.safetensors")
    files = {"data": where / "data.npz", "trusted": where / "trusted.npz", "weights": where / "net.safetensors"}
    return {"method": "ce", "net": "mlp", "epochs": 1, **{name: str(file) for name, file in files.items()}}


def read_spec(run: Path) -> dict[str, Any]:
    spec: dict[str, Any] = json.loads((run / "spec.json").read_text())
    return spec


CHANGES: list[tuple[dict[str, Any], str, str]] = [
    ({"x_meta": X[:20] + 6}, "the set of trusted examples", "meta"),
    ({"y_meta": Y[1:21]}, "the set of trusted examples", "meta"),
    ({"x_test": X[:20] + 8}, "the test set", "test_set"),
    ({"y_test": Y[1:21]}, "the test set", "test_set"),
    ({"clean": Y[::-1].copy()}, "a label of the data", "labels"),
    ({"weight": 0.02}, "the weight file", "weights"),
]


@pytest.mark.parametrize(("change", "what", "fact"), CHANGES, ids=[next(iter(each[0])) for each in CHANGES])
def test_changed_files_are_refused_and_make_another_experiment(
    tmp_path: Path, change: dict[str, Any], what: str, fact: str
) -> None:
    run = tmp_path / "run"
    settings = {**make_files(tmp_path / "files"), "seed": 0}
    fit(run, **settings)
    fit(run, resume=True)
    stored = to_stored_names(settings)
    assert _other_content(read_spec(run), stored) is None
    fit(tmp_path / "other", seed=1, **make_files(tmp_path / "files", **change))
    with pytest.raises(UserError, match=rf"^{what} of the run in {run} has changed: {fact}_sha256 was"):
        fit(run, resume=True)
    assert re.search(rf": ({fact}_sha256|its sha256) was ", _other_content(read_spec(run), stored) or ""), (
        "a sweep detects it"
    )
    assert len(group(find_runs([run, tmp_path / "other"]))) == 2
    old = json.loads((run / "spec.json").read_text())
    del old["facts"][f"{fact}_sha256"]
    (run / "spec.json").write_text(json.dumps(old))  # as older versions wrote it
    fit(run, resume=True)
    assert len(group(find_runs([run, tmp_path / "other"]))) == 1, "they cannot be distinguished"


def test_another_noise_file_with_the_same_labels(tmp_path: Path) -> None:
    few = {"data": "digits", "method": "ce", "epochs": 1, "limit": 200, "meta": 20}
    np.save(file := tmp_path / "T.npy", np.eye(10))
    fit(tmp_path / "run", **few, noise=f"matrix:{file}")
    np.save(file, np.eye(10, dtype=np.float32))
    with pytest.raises(UserError, match=r"the label file of the run in .* has changed: noise_file_sha256 was"):
        fit(tmp_path / "run", resume=True)


def images(root: Path) -> Path:
    for i in range(40):
        file = root / "ab"[i % 2] / "deep" / f"{i}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (8, 8), (i, 0, 0)).save(file)
    return root


@pytest.mark.parametrize("in_memory", [True, False])
def test_a_changed_image_is_detected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, in_memory: bool) -> None:
    if not in_memory:
        monkeypatch.setattr("warpi.datasets.image_folders.IN_MEMORY", 0)
    root = images(tmp_path / "images")
    fit(tmp_path / "run", data=str(root), method="ce", epochs=1)
    fact = "inputs" if in_memory else "files"
    shutil.copytree(root, tmp_path / "copy")
    shutil.rmtree(root)
    shutil.copytree(tmp_path / "copy", root, copy_function=shutil.copyfile)  # the same files with other times
    fit(tmp_path / "run", resume=True)
    settings = {"method": "ce", "epochs": 1, "data": str(root), "seed": 0}
    assert _other_content(read_spec(tmp_path / "run"), settings) is None
    noise = np.random.default_rng(0).integers(0, 255, (8, 8, 3), np.uint8)
    Image.fromarray(noise).save(root / "a" / "deep" / "0.png")
    with pytest.raises(UserError, match=rf"has changed: {fact}_sha256 was"):
        fit(tmp_path / "run", resume=True)
    assert f"{root}: {fact}_sha256 was" in (_other_content(read_spec(tmp_path / "run"), settings) or "")


def test_every_change_changes_the_stamp(tmp_path: Path) -> None:
    """Even with the same size and times (rsync -t, touch -r), or if a link leads elsewhere."""
    for version in ("v1", "v2"):
        images(tmp_path / version)
    os.symlink("v1", tmp_path / "now")
    data = str(tmp_path / "now")
    file = tmp_path / "v1" / "a" / "deep" / "0.png"
    stamps = [stamp(data), stamp(data)]
    assert stamps[0] == stamps[1]
    before = os.stat(file)
    file.write_bytes(b"x" * before.st_size)
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    stamps.append(stamp(data))
    (file.parent / "new.png").write_bytes(b"")
    stamps.append(stamp(data))
    (tmp_path / "now").unlink()
    os.symlink("v2", tmp_path / "now")
    stamps.append(stamp(data))
    os.symlink("loop", tmp_path / "v2" / "loop")
    os.symlink("..", tmp_path / "v2" / "a" / "up")
    assert len({*stamps, stamp(data)}) == 5, "links in a circle do no harm"


def test_stamps_belong_to_the_data_that_was_read(tmp_path: Path) -> None:
    """If runs share cached data, its file may change meanwhile."""
    settings = make_files(tmp_path)
    data = DataSpec(settings["data"], meta_data=settings["trusted"])
    cache = DataCache()
    first = prepare(RunSpec.from_settings(**to_stored_names(settings)), cache).data
    make_files(tmp_path, x_meta=X[:20] + 6)
    second = prepare(RunSpec.from_settings(**to_stored_names(settings), seed=1), cache).data
    assert (first.fingerprints, first.stamps) == (second.fingerprints, second.stamps)
    assert first.stamps == data.stamps(cache)
    assert first.stamps != data.stamps()
