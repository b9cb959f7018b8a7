"""`warpi bench meta-step`: its rows, skipped variants, and that all implementations do the same step."""

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.meta_step import measure as measure_module, other_implementations, table
from benchmarks.meta_step.measure import VARIANTS, Measurement, Skipped, first_step, measure, random_task
from benchmarks.meta_step.other_implementations import IMPLEMENTATIONS, ReferenceWarPI
from warpi.cli import benchmarks as bench_commands
from warpi.cli.app import main
from warpi.methods.warpi import WarPI
from warpi.nets.resnet import resnet20
from warpi.training.recipe import Recipe

TINY = ["--net", "mlp", "--batch", "8", "--classes", "3", "--image-size", "4", "--repeats", "2", "--device", "cpu"]
FIELDS = {"net", "precision", "variant", "samples", "ms", "peak_mib", "ratio_to_sgd"}
EXACT = [name for name in IMPLEMENTATIONS if name != "betty"]


@pytest.fixture(autouse=True)
def eager_variants(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is compiled, which takes seconds, except in slow tests."""
    if not request.node.get_closest_marker("slow"):
        eager = {name: v._replace(fast=False) for name, v in VARIANTS.items()}
        monkeypatch.setattr(measure_module, "VARIANTS", eager)


def installed(name: str) -> bool:
    module = {"betty": "betty", "higher": "higher", "torchopt": "torchopt"}.get(name)
    return module is None or importlib.util.find_spec(module) is not None


def run(capsys: pytest.CaptureFixture[str], tmp_path: Path, *argv: str) -> tuple[list[dict[str, Any]], str, str]:
    assert main(["bench", "meta-step", *TINY, "--json", str(tmp_path / "rows.json"), *argv]) == 0
    printed = capsys.readouterr()
    return json.loads((tmp_path / "rows.json").read_text()), printed.out, printed.err


class TestRows:
    def test_names_and_ratios(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        argv = ["--variants", "warpi_eager,double_backward", "--samples", "1,4", "--threads", "1"]
        rows, out, err = run(capsys, tmp_path, *argv, "--plot", str(tmp_path / "steps.svg"))
        assert [(r["variant"], r["samples"]) for r in rows] == [
            ("sgd", None),
            *(("warpi_eager", 1), ("warpi_eager", 4)),
            *(("double_backward", 1), ("double_backward", 4)),
        ], "plain training is always measured"
        expected = {"net": "mlp", "precision": "32", "batch": 8, "device": "cpu", "gpu": None, "threads": 1}
        expected |= {"captured": False, "torch": torch.__version__}
        for row in rows:
            assert row.keys() >= FIELDS
            assert {name: row[name] for name in expected} == expected
            assert 0 < row["ms_min"] <= row["ms"] <= row["ms_max"]
            assert row["ratio_to_sgd"] == pytest.approx(row["ms"] / rows[0]["ms"])
            assert row["peak_mib"] is None, "memory is not counted on a CPU"
        assert rows[0]["ratio_to_sgd"] == 1
        assert rows[0]["gradient_error"] is None
        assert all(r["gradient_error"] < 1e-4 for r in rows[1:])
        assert out.startswith("mlp, 32, batch 8 + 8")
        assert all(row["variant"] in out and f"{row['ms']:.2f}" in out for row in rows)
        assert (tmp_path / "steps.svg").read_bytes().startswith(b"<?xml")
        assert err == ""

    def test_ratios_are_relative_to_the_same_precision(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        rows, _, _ = run(capsys, tmp_path, "--precision", "32,bf16", "--variants", "warpi_eager")
        assert [(r["precision"], r["variant"]) for r in rows] == [
            (p, v) for p in ("32", "bf16") for v in ("sgd", "warpi_eager")
        ]
        assert all(r["ratio_to_sgd"] == 1 for r in rows if r["variant"] == "sgd")
        assert 1e-4 < rows[3]["gradient_error"] < 0.5, "bf16 rounds the gradient, but not too much"

    def test_settings_of_variants_are_used(self) -> None:
        names = ("mwnet", "sgd_eager", "warpi_every5")
        settings = {"batch": 8, "classes": 3, "image_size": 4, "repeats": 1, "device": "cpu"}
        rows = {r["variant"]: r for r in measure(Measurement(net=("mlp",), variants=names, **settings)) if "ms" in r}
        assert set(rows) == {"sgd", *names}
        assert rows["mwnet"]["gradient_error"] is None
        assert rows["warpi_every5"]["gradient_error"] < 1e-3
        assert rows["warpi_every5"]["steps"] == 5, "a measurement has steps with and without a meta step"

    def test_bar_charts(self) -> None:
        machine = {"gpu": None, "threads": 1, "torch": "2", "date": "2026-11-15", "batch": 8}
        rows = [
            {"net": net, "precision": "32", "variant": v, "samples": n, "ms": 3.0, "ratio_to_sgd": r, **machine}
            for net in ("a", "b")
            for v, n, r in (("sgd", None, 1.0), ("warpi", 1, 3.3), ("warpi", 10, None))
        ]
        svg = table.plot(rows, "svg").decode()
        for text in (
            "a, 32, batch 8 + 8",
            "warpi L = 10",
            "3 ms, 3.30x",
            "Training step: CPU, 1 threads, torch 2, 2026-11-15",
        ):
            assert f"<!-- {text} -->" in svg

    @pytest.mark.slow
    @pytest.mark.filterwarnings("ignore")  # those of the libraries
    def test_every_variant_can_be_measured(self) -> None:
        settings = {"batch": 8, "classes": 3, "image_size": 4, "repeats": 1, "device": "cpu"}
        results = list(measure(Measurement(net=("mlp",), variants=("all",), **settings)))
        rows = {r["variant"]: r for r in results if not isinstance(r, Skipped)}
        skipped = {r.variant for r in results if isinstance(r, Skipped)}
        assert skipped == {n for n, v in VARIANTS.items() if v.implementation and not installed(v.implementation)}
        assert set(rows) == set(VARIANTS) - skipped - {"double_backward_graph"}
        assert {n: r["samples"] for n, r in rows.items() if n.startswith("warpi_samples")} == {
            "warpi_samples1": 1,
            "warpi_samples100": 100,
        }
        exact = {n for n, r in rows.items() if r["gradient_error"] is not None and r["gradient_error"] < 1e-3}
        assert exact >= {"warpi", "warpi_eager", "warpi_every5", "warpi_checkpointing", *filter(installed, EXACT)}
        assert {n for n, r in rows.items() if r["gradient_error"] is None} == {"sgd", "sgd_eager", "mwnet"}
        assert rows["warpi_every5"]["steps"] == 5, "a measurement has steps with and without a meta step"


class TestSkipped:
    def test_missing_library(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def import_nothing(name: str, *rest: Any) -> Any:
            if name.startswith("torch."):  # torch imports some of its modules at first use
                return real(name, *rest)
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

        real = other_implementations.importlib.import_module
        monkeypatch.setattr(bench_commands, "import_module", real)
        monkeypatch.setattr(other_implementations.importlib, "import_module", import_nothing)
        rows, _, err = run(capsys, tmp_path, "--variants", "higher,betty")
        assert [r["variant"] for r in rows] == ["sgd"]
        assert "warpi: higher is skipped" in err
        assert "needs the package 'betty-ml'; install it with: pip install 'warpi[bench]'" in err

    def test_broken_library(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def fail(name: str, *rest: Any) -> Any:
            if name.startswith("torch."):
                return real(name, *rest)
            raise ImportError("No module named 'graphviz'", name="graphviz")

        real = other_implementations.importlib.import_module
        monkeypatch.setattr(bench_commands, "import_module", real)
        monkeypatch.setattr(other_implementations.importlib, "import_module", fail)
        _, _, err = run(capsys, tmp_path, "--variants", "torchopt")
        assert "'torchopt' is installed but cannot be imported: No module named 'graphviz'" in err

    def test_variants_that_cannot_be_measured(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        argv = ["--precision", "bf16", "--variants", "warpi_difference,double_backward_graph"]
        rows, _, err = run(capsys, tmp_path, *argv)
        assert [r["variant"] for r in rows] == ["sgd"]
        assert "warpi_difference is skipped: the rounding of bf16" in err
        assert "double_backward_graph is skipped: CUDA graphs need a CUDA device" in err


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["meta-steps"], "unknown benchmark 'meta-steps'; did you mean 'meta-step'?"),
        (["meta-step", "--variants", "warpy"], "unknown variant 'warpy'; did you mean 'warpi'?"),
        (["meta-step", "--net", "resnet20,mpl"], "unknown net 'mpl'; did you mean 'mlp'?"),
        (["meta-step", "--precision", "16"], "unknown precision '16'"),
        (["meta-step", "--net", ","], "net is empty; name at least one"),
        (["meta-step", "--samples", "-1"], "samples must be at least 0, got -1"),
        (["meta-step", "--batch", "1"], "batch must be at least 2, got 1"),
        (["meta-step", "--plot", "a.pdf"], "images are written as .png or .svg, got 'a.pdf'"),
        (["meta-step", "--device", "tpu"], "unknown device 'tpu'"),
    ],
)
def test_errors_name_the_mistake(argv: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", *argv]) == 2
    assert message in capsys.readouterr().err


def test_the_command_needs_a_checkout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench_commands, "__file__", str(tmp_path / "site-packages" / "warpi" / "cli" / "benchmarks.py"))
    assert main(["bench", "meta-step"]) == 2
    assert "needs a checkout of the repository" in capsys.readouterr().err


def test_an_unknown_implementation_is_named() -> None:
    with pytest.raises(ValueError, match="unknown implementation 'duoble_backward'; did you mean 'double_backward'"):
        ReferenceWarPI(implementation="duoble_backward")


def step(method: WarPI, lr: float = 0.1) -> tuple[Tensor, WarPI]:
    """The meta gradient of the first step in float64 on a narrow ResNet with BatchNorm, and the method after it."""
    recipe = Recipe(net=lambda s, k: resnet20(s, k, width=4), lr=lr, batch_size=8, meta_batch_size=8)
    method.start(random_task(8, 3, 8, dtype=torch.float64), recipe)
    method.net.double()
    method.V.double()
    gradient = first_step(method)
    assert gradient is not None
    return gradient, method


@pytest.mark.filterwarnings("ignore")
class TestAgreement:
    @pytest.mark.parametrize("name", EXACT)
    @pytest.mark.parametrize("samples", [0, 3])
    def test_of_gradient_and_step(self, name: str, samples: int) -> None:
        if not installed(name):
            pytest.skip(f"{name} is not installed")
        gradient, warpi = step(WarPI(samples=samples))
        other_gradient, other = step(ReferenceWarPI(samples=samples, implementation=name))
        assert float((gradient - other_gradient).norm() / gradient.norm()) < 1e-9
        for key, value in warpi.net.state_dict().items():  # weights and the statistics of BatchNorm
            torch.testing.assert_close(other.net.state_dict()[key], value, rtol=1e-8, atol=1e-10)
        for p, q in zip(warpi.V.parameters(), other.V.parameters(), strict=True):
            torch.testing.assert_close(q, p, rtol=1e-8, atol=1e-8)

    @pytest.mark.skipif(not installed("betty"), reason="betty is not installed")
    def test_of_betty_for_small_steps(self) -> None:
        """Its finite difference is taken at theta_hat: right in the limit of small steps, inexact at usual ones."""
        errors = []
        for lr in (1e-1, 1e-4):
            gradient, warpi = step(WarPI(samples=3), lr)
            other_gradient, other = step(ReferenceWarPI(samples=3, implementation="betty"), lr)
            errors.append(float((gradient - other_gradient).norm() / gradient.norm()))
            for p, q in zip(warpi.V.parameters(), other.V.parameters(), strict=True):
                assert (p - q).abs().max() <= 2 * warpi.meta_lr + 1e-9, "one step of Adam each"
            assert all(int(n) == 1 for key, n in other.net.named_buffers() if key.endswith("num_batches_tracked"))
        assert errors[1] < 0.1
        assert errors[0] > 3 * errors[1]

    def test_the_second_step_works(self) -> None:
        for name in filter(installed, IMPLEMENTATIONS):
            _, method = step(ReferenceWarPI(samples=2, implementation=name))
            before = [p.detach().clone() for p in method.V.parameters()]
            method.step(method.loader.draw())
            assert any(not torch.equal(p, q) for p, q in zip(before, method.V.parameters(), strict=True)), name
            assert all(p.isfinite().all() for p in method.net.parameters()), name
            assert all(p.is_leaf for p in method.net.parameters()), name


def test_the_first_step_leaves_no_hook_and_no_fixed_noise() -> None:
    _, method = step(WarPI(samples=2))
    v = method.draw(method.V(torch.zeros(2, 3, dtype=torch.float64), torch.tensor([0, 0])))
    assert not torch.equal(v[:, 0], v[:, 1]), "each example has its own noise again"
    assert "rectify" not in vars(method)


@pytest.mark.gpu
def test_on_a_gpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["--net", "resnet20", "--image-size", "16", "--device", "cuda", "--variants"]
    rows, _, _ = run(capsys, tmp_path, *argv, "warpi,warpi_eager,double_backward,double_backward_graph,published")
    by_name = {r["variant"]: r for r in rows}
    assert all(r["peak_mib"] > 0 and r["gpu"] for r in rows)
    assert {n for n, r in by_name.items() if r["captured"]} == {"sgd", "warpi", "double_backward_graph"}
    assert by_name["warpi"]["peak_mib"] < by_name["double_backward"]["peak_mib"]
    assert all(r["gradient_error"] < 0.05 for r in rows if r["gradient_error"] is not None)
