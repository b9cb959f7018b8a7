"""`warpi bench meta-step`: what the rows say, what is left out and why, and that the other ways are the same step."""

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from warpi.bench import measure as bench
from warpi.bench import other_implementations as peers
from warpi.bench import table as steps
from warpi.bench.measure import VARIANTS, Bench, Left, first_step, random_task
from warpi.bench.other_implementations import WAYS, Peer
from warpi.cli.app import main
from warpi.methods.warpi import WarPI
from warpi.nets.resnet import resnet20
from warpi.training.recipe import Recipe

TINY = ["--net", "mlp", "--batch", "8", "--classes", "3", "--image-size", "4", "--repeats", "2", "--device", "cpu"]
NEEDED = {"net", "precision", "variant", "samples", "ms", "peak_mib", "ratio_to_sgd"}


def installed(way: str) -> bool:
    module = {"betty": "betty", "higher": "higher", "torchopt": "torchopt"}.get(way)
    return module is None or importlib.util.find_spec(module) is not None


def run(capsys: pytest.CaptureFixture[str], tmp_path: Path, *argv: str) -> tuple[list[dict[str, Any]], str, str]:
    assert main(["bench", "meta-step", *TINY, "--json", str(tmp_path / "rows.json"), *argv]) == 0
    shown = capsys.readouterr()
    return json.loads((tmp_path / "rows.json").read_text()), shown.out, shown.err


class TestRows:
    def test_names_and_ratios(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        argv = ["--variants", "warpi,double_backward", "--samples", "1,4", "--threads", "1"]
        rows, out, err = run(capsys, tmp_path, *argv, "--plot", str(tmp_path / "steps.svg"))
        assert [(r["variant"], r["samples"]) for r in rows] == [
            ("sgd", None),
            *(("warpi", 1), ("warpi", 4)),
            *(("double_backward", 1), ("double_backward", 4)),
        ], "plain training is measured, asked for or not"
        for row in rows:
            assert row.keys() >= NEEDED
            assert (row["net"], row["precision"], row["batch"], row["device"], row["gpu"]) == (
                "mlp",
                "32",
                8,
                "cpu",
                None,
            )
            assert 0 < row["ms_min"] <= row["ms"] <= row["ms_max"]
            assert row["ratio_to_sgd"] == pytest.approx(row["ms"] / rows[0]["ms"])
            assert row["peak_mib"] is None, "nobody counts memory on a CPU"
            assert row["threads"] == 1
            assert row["captured"] is False
            assert row["torch"] == torch.__version__
        assert rows[0]["ratio_to_sgd"] == 1
        assert rows[0]["gradient_error"] is None
        assert all(r["gradient_error"] < 1e-4 for r in rows[1:])
        assert out.startswith("mlp, 32, batch 8 + 8")
        assert all(row["variant"] in out and f"{row['ms']:.2f}" in out for row in rows)
        assert (tmp_path / "steps.svg").read_bytes().startswith(b"<?xml")
        assert err == ""

    def test_each_network_and_precision_has_its_own_plain_step(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        rows, _, _ = run(capsys, tmp_path, "--precision", "32,bf16", "--variants", "warpi")
        assert [(r["precision"], r["variant"]) for r in rows] == [
            (p, v) for p in ("32", "bf16") for v in ("sgd", "warpi")
        ]
        assert all(r["ratio_to_sgd"] == 1 for r in rows if r["variant"] == "sgd")
        rounded = rows[3]["gradient_error"]
        assert 1e-4 < rounded < 0.5, "bf16 is seen in the gradient, and does not spoil it"

    def test_pictures(self) -> None:
        where = {"gpu": None, "threads": 1, "torch": "2", "date": "2026-11-15", "batch": 8}
        rows = [
            {"net": net, "precision": "32", "variant": v, "samples": n, "ms": 3.0, "ratio_to_sgd": r, **where}
            for net in ("a", "b")
            for v, n, r in (("sgd", None, 1.0), ("warpi", 1, 3.3), ("warpi", 10, None))
        ]
        assert steps.plot(rows, "png").startswith(b"\x89PNG")
        svg = steps.plot(rows, "svg").decode()
        for text in (
            "a, 32, batch 8 + 8",
            "warpi L = 10",
            "3 ms, 3.30x",
            "a training step: CPU, 1 threads, torch 2, 2026-11-15",
        ):
            assert f"<!-- {text} -->" in svg

    @pytest.mark.filterwarnings("ignore")  # those of the libraries
    def test_every_variant_can_be_measured(self) -> None:
        spec = Bench(net=("mlp",), batch=8, classes=3, image_size=4, repeats=1, device="cpu", variants=("all",))
        found = list(bench.bench(spec))
        rows = {r["variant"]: r for r in found if not isinstance(r, Left)}
        left = {r.variant for r in found if isinstance(r, Left)}
        assert left == {v.way for v in VARIANTS.values() if v.way and not installed(v.way)}
        assert set(rows) == set(VARIANTS) - left - {"double_backward_graph"}
        assert {n: r["samples"] for n, r in rows.items() if n.startswith("warpi_samples")} == {
            "warpi_samples1": 1,
            "warpi_samples100": 100,
        }
        exact = {n for n, r in rows.items() if r["gradient_error"] is not None and r["gradient_error"] < 1e-3}
        assert exact >= {"warpi", "warpi_eager", "warpi_every5", "warpi_checkpointing", "published", *_exact_ways()}
        assert {n for n, r in rows.items() if r["gradient_error"] is None} == {"sgd", "sgd_eager", "mwnet"}
        assert rows["warpi_every5"]["steps"] == 5, "a measurement holds steps of both kinds"


def _exact_ways() -> set[str]:
    return {way for way in WAYS if way != "betty" and installed(way)}


class TestLeftOut:
    def test_a_library_that_is_not_installed(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def absent(name: str, *rest: Any) -> Any:
            if name.startswith("torch."):  # torch imports parts of itself when it needs them
                return real(name, *rest)
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

        real = peers.importlib.import_module
        monkeypatch.setattr(peers.importlib, "import_module", absent)
        rows, _, err = run(capsys, tmp_path, "--variants", "higher,betty")
        assert [r["variant"] for r in rows] == ["sgd"]
        assert "warpi: higher is left out" in err
        assert "needs the package 'betty-ml'; install it with: pip install 'warpi[bench]'" in err

    def test_a_library_that_is_broken(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def broken(name: str, *rest: Any) -> Any:
            if name.startswith("torch."):
                return real(name, *rest)
            raise ImportError("No module named 'graphviz'", name="graphviz")

        real = peers.importlib.import_module
        monkeypatch.setattr(peers.importlib, "import_module", broken)
        _, _, err = run(capsys, tmp_path, "--variants", "torchopt")
        assert "'torchopt' is installed, but cannot be imported: No module named 'graphviz'" in err

    def test_what_makes_no_sense(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        argv = ["--precision", "bf16", "--variants", "warpi_difference,double_backward_graph"]
        rows, _, err = run(capsys, tmp_path, *argv)
        assert [r["variant"] for r in rows] == ["sgd"]
        assert "warpi_difference is left out: a finite difference drowns" in err
        assert "double_backward_graph is left out: CUDA graphs need a CUDA device" in err


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["bench"], "required: meta-step"),
        (["bench", "meta-steps"], "unknown benchmark 'meta-steps'; did you mean 'meta-step'?"),
        (["bench", "meta-step", "--variants", "warpy"], "unknown variant 'warpy'; did you mean 'warpi'?"),
        (["bench", "meta-step", "--net", "resnet20,mpl"], "unknown net 'mpl'; did you mean 'mlp'?"),
        (["bench", "meta-step", "--precision", "16"], "unknown precision '16'"),
        (["bench", "meta-step", "--net", ","], "net is empty; name at least one"),
        (["bench", "meta-step", "--samples", "-1"], "samples must be at least 0, got -1"),
        (["bench", "meta-step", "--batch", "1"], "batch must be at least 2, got 1"),
        (["bench", "meta-step", "--repeats", "0"], "repeats must be at least 1, got 0"),
        (["bench", "meta-step", "--plot", "a.pdf"], "images are written as .png or .svg, got 'a.pdf'"),
        (["bench", "meta-step", "--json", "no/where/a.json"], "there is no folder 'no/where' to write a.json into"),
        (["bench", "meta-step", "--device", "tpu"], "unknown device 'tpu'"),
    ],
)
def test_mistakes(argv: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(argv) == 2
    assert message in capsys.readouterr().err


def test_an_unknown_way_is_named() -> None:
    with pytest.raises(Exception, match="unknown way 'duoble_backward'; did you mean 'double_backward'"):
        Peer(way="duoble_backward")


def step(method: WarPI, lr: float = 0.1) -> tuple[Tensor, WarPI]:
    """The meta gradient of the first step in float64, on a narrow ResNet with BatchNorm, and the method after it."""
    recipe = Recipe(net=lambda s, k: resnet20(s, k, width=4), lr=lr, batch_size=8, meta_batch_size=8)
    method.start(random_task(8, 3, 8, dtype=torch.float64), recipe)
    method.net.double()
    method.V.double()
    gradient = first_step(method)
    assert gradient is not None
    return gradient, method


@pytest.mark.filterwarnings("ignore")
class TestAgreement:
    @pytest.mark.parametrize("way", [way for way in WAYS if way != "betty"])
    @pytest.mark.parametrize("samples", [0, 3])
    def test_of_gradient_and_step(self, way: str, samples: int) -> None:
        if not installed(way):
            pytest.skip(f"{way} is not installed")
        (g, mine), (other, theirs) = step(WarPI(samples=samples)), step(Peer(samples=samples, way=way))
        assert float((g - other).norm() / g.norm()) < 1e-9
        for name, value in mine.net.state_dict().items():  # weights, and BatchNorm's statistics once
            torch.testing.assert_close(theirs.net.state_dict()[name], value, rtol=1e-8, atol=1e-10)
        for p, q in zip(mine.V.parameters(), theirs.V.parameters(), strict=True):
            torch.testing.assert_close(q, p, rtol=1e-8, atol=1e-8)

    @pytest.mark.skipif(not installed("betty"), reason="betty is not installed")
    def test_of_betty_where_the_step_is_small(self) -> None:
        """Its difference is taken at theta_hat: right in the limit of small steps, off by a lot at usual ones."""
        errors = []
        for lr in (1e-1, 1e-4):
            (g, mine), (other, theirs) = step(WarPI(samples=3), lr), step(Peer(samples=3, way="betty"), lr)
            errors.append(float((g - other).norm() / g.norm()))
            for p, q in zip(mine.V.parameters(), theirs.V.parameters(), strict=True):
                assert (p - q).abs().max() <= 2 * mine.meta_lr + 1e-9, "one step of Adam each"
            assert all(int(n) == 1 for name, n in theirs.net.named_buffers() if name.endswith("num_batches_tracked"))
        assert errors[1] < 0.1
        assert errors[0] > 3 * errors[1]

    def test_the_second_step_is_taken_too(self) -> None:
        for way in filter(installed, WAYS):
            _, method = step(Peer(samples=2, way=way))
            before = [p.detach().clone() for p in method.V.parameters()]
            method.step(method.loader.draw())
            assert any(not torch.equal(p, q) for p, q in zip(before, method.V.parameters(), strict=True)), way
            assert all(p.isfinite().all() for p in method.net.parameters()), way
            assert all(p.is_leaf for p in method.net.parameters()), way


def test_noise_and_hook_are_gone_after_the_first_step() -> None:
    _, method = step(WarPI(samples=2))
    v = method.rectify(torch.zeros(2, 3, dtype=torch.float64), torch.tensor([0, 0]))
    assert not torch.equal(v[:, 0], v[:, 1]), "each example has its own noise again"
    assert "rectify" not in vars(method)


@pytest.mark.gpu
def test_on_a_gpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["--net", "resnet20", "--image-size", "16", "--device", "cuda", "--variants"]
    rows, _, _ = run(capsys, tmp_path, *argv, "warpi,warpi_eager,double_backward,double_backward_graph,published")
    found = {r["variant"]: r for r in rows}
    assert all(r["peak_mib"] > 0 and r["gpu"] for r in rows)
    assert {n for n, r in found.items() if r["captured"]} == {"sgd", "warpi", "double_backward_graph"}
    assert found["warpi"]["peak_mib"] < found["double_backward"]["peak_mib"]
    assert all(r["gradient_error"] < 0.05 for r in rows if r["gradient_error"] is not None)
