"""The whole on a CUDA device. Run by hand: PYTHONPATH=src python -m pytest -m gpu"""

import json
import socket
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from warpi import METHODS, fit
from warpi.nets.registry import NETS
from warpi.utils import distributed

pytestmark = pytest.mark.gpu

QUICK = {"noise": "pair:0.4", "limit": 300, "epochs": 2, "meta": 20, "batch_size": 32}


@pytest.mark.parametrize("method", METHODS)
def test_every_method_trains(method: str, tmp_path: Path) -> None:
    run = fit(tmp_path / "a", method=method, device="cuda", **QUICK)
    assert all(p.is_cuda for net in run.method.nets for p in net.parameters())
    assert json.loads((tmp_path / "a" / "spec.json").read_text())["environment"]["gpu"]
    assert all(np.isfinite(v) for record in run.history for v in record.values())


@pytest.mark.parametrize("net", [name for name in NETS if name != "mlp"])
def test_every_net_takes_the_meta_step(net: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    chance, y = np.random.default_rng(0), np.arange(120) % 3
    x = (chance.integers(0, 128, (120, 3, 32, 32)) + 100 * (y == 1)[:, None, None, None]).astype(np.uint8)
    np.savez(tmp_path / "x.npz", x=x, y=y, clean=y)
    settings = {"epochs": 1, "meta": 12, "batch_size": 16, "meta_batch_size": 12, "net": net, "device": "cuda"}
    run = fit(tmp_path / "run", data=str(tmp_path / "x.npz"), noise="symmetric:0.3", method="warpi", **settings)
    assert np.isfinite(run.history[-1]["meta_loss"])
    assert not caplog.records, "in forward mode, with no warning that it is not"


def test_a_run_goes_on_on_the_other_device(tmp_path: Path) -> None:
    """Stopped on the GPU, ended on the CPU: near the run that stayed on the CPU (the noise of sampling differs)."""
    out = tmp_path / "run"
    fit(out, method="ce", device="cuda", **QUICK)
    (out / "done").unlink()
    (out / "checkpoint.safetensors").unlink()  # the one before: the end of epoch 1
    run = fit(out, method="ce", device="cpu", resume=True, **QUICK)
    other = fit(tmp_path / "cpu", method="ce", device="cpu", **QUICK)
    assert not next(run.method.net.parameters()).is_cuda
    for p, q in zip(run.method.net.parameters(), other.method.net.parameters(), strict=True):
        torch.testing.assert_close(p, q, atol=1e-3, rtol=1e-2)


def test_resume_on_the_gpu(tmp_path: Path) -> None:
    out = tmp_path / "run"
    whole = fit(out, method="warpi", device="cuda", **QUICK).history
    (out / "done").unlink()
    (out / "checkpoint.safetensors").unlink()
    again = fit(out, method="warpi", device="cuda", resume=True, **QUICK).history
    for a, b in zip(whole, again, strict=True):
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-3)


def test_one_rank_on_nccl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every average goes through NCCL, which with one rank changes nothing."""
    alone = fit(tmp_path / "alone", method="warpi", device="cuda", **QUICK)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    names = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    for name, value in {**names, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}.items():
        monkeypatch.setenv(name, value)
    reduced, all_reduce = set(), distributed.all_reduce

    def watched(tensor: Tensor, group: dist.ProcessGroup | None = None, **options: bool) -> None:
        reduced.add((dist.get_backend(group), tensor.is_cuda))
        all_reduce(tensor, group, **options)

    monkeypatch.setattr(distributed, "all_reduce", watched)
    run = fit(tmp_path / "rank", method="warpi", device="cuda", **QUICK)
    assert ("nccl", True) in reduced
    assert not dist.is_initialized()
    for p, q in zip(run.method.net.parameters(), alone.method.net.parameters(), strict=True):
        torch.testing.assert_close(p, q, atol=1e-3, rtol=1e-2)
