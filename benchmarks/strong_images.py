"""Train CIFAR-10 and CIFAR-100 with the strong recipe, several runs in one process, within a time limit.

    python -m benchmarks.strong_images --root DATA --out OUT --smoke              two epochs of each kind, with speeds
    python -m benchmarks.strong_images --root DATA --out OUT --seconds 560 --runs ce_clean plus_random1 ...

Each run leaves a run folder in OUT without its checkpoint, and a line in OUT/summary.jsonl. A run that does not end
within the time limit, or is killed, keeps its checkpoint; the same command resumes it, and skips finished runs. With
--final, a run that cannot end within the time limit is stopped as soon as its speed is known. With --probabilities, the
audit of a run is stored in OUT/NAME.npz, for `python -m benchmarks.audit.strong`.
"""

import argparse
import json
import signal
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from warpi.audit.make_audit import audit
from warpi.autodiff.inference import infer
from warpi.autodiff.memory_format import to_channels_last
from warpi.autodiff.passes import PassConfig, configure_passes
from warpi.data.augment import distort
from warpi.functional.losses import cross_entropy
from warpi.methods.plain import CE
from warpi.methods.registry import METHODS
from warpi.methods.warpi_plus import WarPIPlus
from warpi.nets.fastnet import FastNet
from warpi.runs.run import Run, fitting
from warpi.runs.run_folder import RunFolder
from warpi.runs.spec import DataCache
from warpi.utils.devices import Stopped, catch_signals

PLAIN: dict[str, Any] = {"method": "ce", "meta": 0, "epochs": 200}
PLUS: dict[str, Any] = {"method": "warpi_plus", "meta": 1000, "epochs": 100}
FINE: dict[str, Any] = {"data": "cifar100", "noise": "given:noisy"}  # the fine labels of CIFAR-100N
C100_FLIP: dict[str, Any] = {"data": "cifar100", "noise": "flip:0.4"}
RUNS: dict[str, dict[str, Any]] = {
    "ce_clean": PLAIN,
    "ce_clean_no_mixup": {**PLAIN, "mixup": 0.0, "label_smoothing": 0.1},
    "ce_random1": {**PLAIN, "noise": "given:random1"},
    "ce_flip": {**PLAIN, "noise": "flip:0.4"},
    "plus_random1": {**PLUS, "noise": "given:random1"},
    "plus_flip": {**PLUS, "noise": "flip:0.4"},
    "plus_uniform": {**PLUS, "noise": "uniform:0.6"},
    "plus_instance": {**PLUS, "noise": "instance:0.4"},
    "plus_random1_v": {**PLUS, "noise": "given:random1", "rectifier": True},
    "plus_flip_v": {**PLUS, "noise": "flip:0.4", "rectifier": True},
    "plus_uniform_v": {**PLUS, "noise": "uniform:0.6", "rectifier": True},
    "plus_random1_v_only": {**PLUS, "noise": "given:random1", "rectifier": True, "trusted_in_loss": False},
    "plus_random1_untrusted": {**PLUS, "noise": "given:random1", "meta": 0},
    "plus_flip_untrusted": {**PLUS, "noise": "flip:0.4", "meta": 0},
    "plus_random1_strict": {**PLUS, "noise": "given:random1", "rho": 0.75, "agreement": 0.98},
    "plus_flip_strict": {**PLUS, "noise": "flip:0.4", "rho": 0.75, "agreement": 0.98},
    "plus_uniform_strict": {**PLUS, "noise": "uniform:0.6", "rho": 0.75, "agreement": 0.98},
    "plus_random1_falling": {**PLUS, "noise": "given:random1", "rho_last": 0.6, "agreement": 0.99},
    "plus_random2": {**PLUS, "noise": "given:random2"},  # development: settings are chosen with these labels
    "plus_random2_no_mixup": {**PLUS, "noise": "given:random2", "alpha": 0.0},
    "plus_random2_little_mixup": {**PLUS, "noise": "given:random2", "alpha": 0.5},
    "plus_random1_strong_pair": {**PLUS, "noise": "given:random1", "alpha": 0.0, "strong_pair": True},
    "plus_random2_strong_pair": {**PLUS, "noise": "given:random2", "alpha": 0.0, "strong_pair": True},
    "plus_random2_no_evidence": {**PLUS, "noise": "given:random2", "evidence": 0.0},
    "plus_uniform_no_evidence": {**PLUS, "noise": "uniform:0.6", "evidence": 0.0},
    "plus_fine_no_evidence": {**PLUS, **FINE, "evidence": 0.0},
    "plus_random1_long": {**PLUS, "noise": "given:random1", "epochs": 200},
    "plus_flip_long": {**PLUS, "noise": "flip:0.4", "epochs": 200},
    "plus_uniform_long": {**PLUS, "noise": "uniform:0.6", "epochs": 200},
    "plus_fine": {**PLUS, **FINE},
    "plus_fine_untrusted": {**PLUS, **FINE, "meta": 0},
    "plus_fine_no_mixup": {**PLUS, **FINE, "alpha": 0.0},
    "plus_fine_long": {**PLUS, **FINE, "epochs": 200},
    "plus_c100_flip": {**PLUS, **C100_FLIP},
    "plus_c100_flip_long": {**PLUS, **C100_FLIP, "epochs": 200},
    "ce_fine": {**PLAIN, **FINE},
    "ce_c100_flip": {**PLAIN, **C100_FLIP},
    "plus_fine_strict": {**PLUS, **FINE, "rho": 0.75, "agreement": 0.98},
    "plus_c100_flip_strict": {**PLUS, **C100_FLIP, "rho": 0.75, "agreement": 0.98},
    "ce_c100_clean": {**PLAIN, "data": "cifar100"},
    "ce_clean_long": {**PLAIN, "epochs": 480},
    "ce_clean_longest": {**PLAIN, "epochs": 560},
    "ce_clean_mild": {**PLAIN, "mixup": 0.2},
    "ce_clean_mild_long": {**PLAIN, "epochs": 480, "mixup": 0.2},
}
# As few images as in a small folder: 6,000 and 160 trusted ones
FEW: dict[str, Any] = {"noise": "given:random1", "limit": 6160}
SMALL_BATCHES: dict[str, Any] = {"batch_size": 128, "meta_batch_size": 32}
RUNS |= {
    "ce_random1_few": {**PLAIN, **FEW},
    "ce_random1_few_batches": {**PLAIN, **FEW, **SMALL_BATCHES},
    "plus_random1_few": {**PLUS, **FEW, "meta": 160},
    "plus_random1_few_batches": {**PLUS, **FEW, "meta": 160, **SMALL_BATCHES},
    "plus_flip_few": {**PLUS, **FEW, "noise": "flip:0.4", "meta": 160},
    "plus_flip_few_batches": {**PLUS, **FEW, "noise": "flip:0.4", "meta": 160, **SMALL_BATCHES},
}
# WarPI+ without one of its parts. V, which is off, is added in the runs named `_v`; `_untrusted` has no trusted images.
PARTS: dict[str, dict[str, Any]] = {
    "mixup": {"alpha": 0.0},
    "evidence": {"evidence": 0.0},  # the posterior without the given label, to see what T is worth
    "small_loss": {"rho": 0.0},
    "agreement": {"agreement": 1.0},
    "memory": {"beta": 0.0},
    "alignment": {"align": 0.0},
    "sharpening": {"temperature": 1.0},
    "balance": {"balance": 0.0},
    "averaging": {"average": 0.5},  # the teacher is the mean of the last two steps
}
RUNS |= {f"plus_random1_no_{part}": {**PLUS, "noise": "given:random1", **without} for part, without in PARTS.items()}
RUNS |= {f"plus_flip_no_{part}": {**PLUS, "noise": "flip:0.4", **without} for part, without in PARTS.items()}
# Against late memorization. Mixup makes the teacher less confident, so the posterior follows the given label too much:
# sharper predictions, or less weight of T in the end.
SHARP: dict[str, Any] = {"temperature": 0.25}
FADING: dict[str, Any] = {"evidence_last": 0.0}
RUNS |= {
    "plus_random1_sharp": {**PLUS, "noise": "given:random1", **SHARP},
    "plus_random1_fading": {**PLUS, "noise": "given:random1", **FADING},
    "plus_random2_sharp": {**PLUS, "noise": "given:random2", **SHARP},
    "plus_random2_fading": {**PLUS, "noise": "given:random2", **FADING},
    "plus_random1_long_sharp": {**PLUS, "noise": "given:random1", "epochs": 200, **SHARP},
    "plus_random1_long_fading": {**PLUS, "noise": "given:random1", "epochs": 200, **FADING},
    "plus_flip_sharp": {**PLUS, "noise": "flip:0.4", **SHARP},
    "plus_flip_fading": {**PLUS, "noise": "flip:0.4", **FADING},
    "plus_uniform_sharp": {**PLUS, "noise": "uniform:0.6", **SHARP},
    "plus_uniform_fading": {**PLUS, "noise": "uniform:0.6", **FADING},
    "plus_fine_sharp": {**PLUS, **FINE, **SHARP},
    "plus_fine_fading": {**PLUS, **FINE, **FADING},
}
# Other methods without trusted images; their authors' schedules are compressed to about five H200 minutes. With several
# loss terms, half the learning rate and twice the weight decay keep the relative change of the weights per step.
SEVERAL_TERMS: dict[str, Any] = {"meta": 0, "lr": 0.1, "weight_decay": 1e-3}
SOP: dict[str, Any] = {"method": "sop", "meta": 0, "epochs": 300}
SOP_PLUS: dict[str, Any] = {"method": "sop_plus", "meta": 0, "epochs": 280}
PROMIX: dict[str, Any] = {"method": "promix", "epochs": 95, "warm_up": 10.0, "tau": 0.8, **SEVERAL_TERMS}
SHORT_SOP_PLUS: dict[str, Any] = {**SOP_PLUS, "epochs": 120}  # about two minutes
SHORT_PROMIX: dict[str, Any] = {**PROMIX, "epochs": 36, "warm_up": 4.0, "tau": 0.9}
DISC: dict[str, Any] = {"method": "disc", "epochs": 150, **SEVERAL_TERMS}
TRUSTED: dict[str, Any] = {"meta": 1000, "use_trusted": True}
RUNS |= {
    "sop_random1": {**SOP, "noise": "given:random1"},
    "sop_plus_random1": {**SOP_PLUS, "noise": "given:random1"},
    "sop_plus_flip": {**SOP_PLUS, "noise": "flip:0.4", "lr_v": 100.0},
    "sop_plus_uniform": {**SOP_PLUS, "noise": "uniform:0.6"},
    "sop_plus_fine": {**SOP_PLUS, **FINE, "lr_u": 1.0},
    "sop_plus_random1_trusted": {**SOP_PLUS, "noise": "given:random1", **TRUSTED},
    "promix_random1": {**PROMIX, "noise": "given:random1"},
    "promix_random1_tau99": {**PROMIX, "noise": "given:random1", "tau": 0.99},
    "promix_random1_trusted": {**PROMIX, "noise": "given:random1", **TRUSTED},
    "promix_flip": {**PROMIX, "noise": "flip:0.4", "confidence_penalty": 1.0},
    "promix_flip_trusted": {**PROMIX, "noise": "flip:0.4", "confidence_penalty": 1.0, **TRUSTED},
    "promix_uniform": {**PROMIX, "noise": "uniform:0.6", "rho": 0.4},
    "sop_plus_random1_short": {**SHORT_SOP_PLUS, "noise": "given:random1"},
    "sop_plus_flip_short": {**SHORT_SOP_PLUS, "noise": "flip:0.4", "lr_v": 100.0},
    "promix_random1_short": {**SHORT_PROMIX, "noise": "given:random1"},
    "promix_random1_short_warm": {**PROMIX, "noise": "given:random1", "epochs": 36},
    "promix_flip_short": {**PROMIX, "noise": "flip:0.4", "epochs": 36, "confidence_penalty": 1.0},
    "disc_random1_short": {**DISC, "noise": "given:random1", "epochs": 65},
    "disc_random1": {**DISC, "noise": "given:random1"},
    "disc_flip": {**DISC, "noise": "flip:0.4", "memory": 0.95},
}
# DivideMix and ELR+: the published settings for each kind of noise. `stop` ends a run after some of its epochs.
DIVIDEMIX: dict[str, Any] = {"method": "dividemix", "meta": 0, "epochs": 120}
ELR_PLUS: dict[str, Any] = {"method": "elr_plus", "meta": 0, "epochs": 140}
OF_AUTHORS: dict[str, Any] = {
    "recipe": "paper",
    "net": "preact18",
    "batch_size": 64,
    "lr": 0.02,
    "schedule": "step",
    "milestones": (0.5,),
    "precision": "bf16",
}
RUNS |= {
    "dividemix_random1": {**DIVIDEMIX, "noise": "given:random1"},
    "dividemix_random1_short": {**DIVIDEMIX, "noise": "given:random1", "epochs": 50},
    "dividemix_random1_weak": {**DIVIDEMIX, "noise": "given:random1", "augment": "weak"},
    "dividemix_flip": {**DIVIDEMIX, "noise": "flip:0.4", "lambda_u": 0.0, "confidence_penalty": 1.0},
    "dividemix_random1_trusted": {**DIVIDEMIX, "noise": "given:random1", **TRUSTED},
    "dividemix_flip_trusted": {
        **DIVIDEMIX,
        "noise": "flip:0.4",
        "lambda_u": 0.0,
        "confidence_penalty": 1.0,
        **TRUSTED,
    },
    "dividemix_fine": {**DIVIDEMIX, **FINE, "warm_up": 15.0},
    "dividemix_paper_random1": {**DIVIDEMIX, **OF_AUTHORS, "noise": "given:random1", "epochs": 300, "stop": 20},
    "elr_plus_random1": {**ELR_PLUS, "noise": "given:random1"},
    "elr_plus_random1_short": {**ELR_PLUS, "noise": "given:random1", "epochs": 55},
    "elr_plus_flip": {**ELR_PLUS, "noise": "flip:0.4", "beta": 0.9, "strength": 1.0},
    "elr_plus_fine": {**ELR_PLUS, **FINE, "beta": 0.9, "strength": 7.0},
}
SMOKE = ("ce_clean", "plus_random1", "plus_flip_v")
COMMON: dict[str, Any] = {"data": "cifar10", "recipe": "strong", "val": 0.0, "checkpoint_epochs": 10**6}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", required=True, help="folder of CIFAR-10, CIFAR-100 and CIFAR-N")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--runs", nargs="+", choices=RUNS, default=[])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--seconds", type=float, default=560.0, help="time limit of all runs together")
    parser.add_argument("--smoke", action="store_true", help="a few epochs of each kind of run instead")
    parser.add_argument("--speeds", action="store_true", help="first measure the parts of a step")
    parser.add_argument("--final", action="store_true", help="stop a run early if it cannot end within the time limit")
    parser.add_argument("--probabilities", action="store_true", help="also store the probabilities of each audit")
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=JSON", help="settings of all runs")
    given = parser.parse_args()
    deadline = time.monotonic() + given.seconds
    settings = {key: json.loads(value) for key, _, value in (text.partition("=") for text in given.set)}
    given.out.mkdir(parents=True, exist_ok=True)
    if given.speeds:
        print(json.dumps(speeds()), flush=True)
    if given.smoke:
        settings = {"epochs": 4, "warm_up": 2.0, "compile": True, **settings}
    cache = DataCache()
    for seed in given.seeds:
        for name in given.runs or SMOKE:
            warms_up = hasattr(METHODS[RUNS[name]["method"]], "warm_up")
            usable = {key: value for key, value in settings.items() if key != "warm_up" or warms_up}
            options = {**RUNS[name], **usable, "seed": seed}
            kept = {"probabilities": given.probabilities, "final": given.final}
            try_run(given.out, f"{name}_seed{seed}", options, given.root, deadline, cache, **kept)


def try_run(*given: Any, **options: Any) -> bool:
    """Call `run_one`. If it fails, print the error and return False, because the next run may succeed."""
    try:
        run_one(*given, **options)
    except Stopped as error:
        raise SystemExit("stopped by a signal; the same command resumes the runs") from error
    except Exception:
        traceback.print_exc()
        return False
    return True


def run_one(
    out: Path,
    name: str,
    settings: dict[str, Any],
    root: str,
    deadline: float,
    cache: DataCache,
    *,
    probabilities: bool = False,
    final: bool = False,
) -> None:
    """Train or resume until the end or the deadline, and append the figures of the run to summary.jsonl.

    At the deadline, and after a signal, the run stores a checkpoint.
    """
    began = time.monotonic()
    settings = dict(settings)
    stop = settings.pop("stop", None)
    last = stop or settings["epochs"]
    folder = RunFolder(out / name)
    if is_complete(out, name, stop):
        print(f"{name}: finished before", flush=True)
        return
    if began >= deadline:
        print(f"{name}: no time left", flush=True)
        return
    on_gpu = torch.cuda.is_available()
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    run: Run | None = None
    is_late = is_hopeless = False
    with catch_signals() as caught:
        options = {**COMMON, **settings, "root": root, "cache": cache, "caught": caught}
        training = fitting(folder.path, resume=folder.has_checkpoint, quiet=True, **options)
        history: list[dict[str, float]] = []
        try:
            while not is_hopeless:
                record = next(training)
                is_late = is_late or time.monotonic() >= deadline
                if is_late and not caught:
                    caught.append(signal.SIGTERM)  # the run stores a checkpoint
                if record is None:
                    continue
                history.append(record)
                epoch = int(record["epoch"])
                if len(history) % 5 == 0 or len(history) <= 4:
                    shown = {key: round(value, 3) for key, value in record.items() if key != "test_ece"}
                    print(f"{name} {shown} {time.monotonic() - began:.0f} s", flush=True)
                if epoch == stop:
                    break
                left = (last - epoch) * record["seconds"]
                is_hopeless = final and knows_speed(history, settings) and time.monotonic() + left > deadline
            training.close()
        except StopIteration as end:
            run = end.value
        except Stopped:
            if not is_late:
                raise
    if is_hopeless:
        print(f"{name}: would take {left:.0f} s more, which is too long", flush=True)
    history = folder.read_history("delete it")
    summary: dict[str, Any] = {"name": name, "finished": run is not None, "epochs": len(history)}
    summary["wall_seconds"] = time.monotonic() - began
    if history:
        seconds = [record["seconds"] for record in history]
        later = sorted(seconds[len(seconds) // 2 :])
        summary |= {"test_acc": history[-1]["test_acc"], "best_test_acc": max(r["test_acc"] for r in history)}
        summary |= {"training_seconds": sum(seconds), "epoch_seconds": later[len(later) // 2]}
    if on_gpu:
        summary["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
    if run is not None:
        summary |= measure(run, out / f"{name}.npz" if probabilities else None)
    if run is not None or len(history) == stop:
        for file in folder.path.glob("checkpoint*"):
            file.unlink()
    with (out / "summary.jsonl").open("a") as lines:
        lines.write(json.dumps(summary) + "\n")
    print(json.dumps(summary), flush=True)


def is_complete(out: Path, name: str, stop: int | None) -> bool:
    """Whether the figures of a run, or of the first `stop` epochs of its schedule, are in summary.jsonl."""
    file = out / "summary.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    return any(row["name"] == name and (row["finished"] or row["epochs"] == stop) for row in rows)


def knows_speed(history: list[dict[str, float]], settings: dict[str, Any]) -> bool:
    """Whether the last epoch of the history was neither compiled nor part of a warm-up, which may be much faster."""
    first = settings.get("warm_up", getattr(METHODS[settings["method"]], "warm_up", 0))
    return len(history) >= 3 and history[-1]["epoch"] >= first + 2


def speeds(batch: int = 1152) -> dict[str, float]:
    """Milliseconds of the parts of a step: the library's compiled pass, and the same by torch.compile alone."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    x = torch.randn(batch, 3, 32, 32, device=device).to(memory_format=torch.channels_last)
    y = torch.arange(batch, device=device) % 10
    bytes_ = torch.randint(256, (batch // 2, 3, 32, 32), device=device).float()
    generator = torch.Generator(device)
    plain = to_channels_last(FastNet((3, 32, 32), 10).to(device))
    traced = configure_passes(to_channels_last(FastNet((3, 32, 32), 10).to(device)), PassConfig(True, True))
    teacher = configure_passes(to_channels_last(FastNet((3, 32, 32), 10).to(device)), PassConfig(True, True)).eval()
    compiled = torch.compile(plain)

    def by_torch() -> None:
        with torch.autocast(device.type, torch.bfloat16):
            z = compiled(x)
        cross_entropy(z.float(), y).mean().backward()

    parts: dict[str, Callable[[], Any]] = {
        "library": lambda: cross_entropy(traced(x), y).mean().backward(),
        "torch.compile": by_torch,
        "teacher": lambda: infer(teacher, x[:512]),
        "strong views": lambda: distort(bytes_, generator),
    }
    return {name: milliseconds(part, device) for name, part in parts.items()}


def milliseconds(part: Callable[[], Any], device: torch.device, n: int = 30) -> float:
    """Mean time of a call, after three that compile and choose kernels."""
    for _ in range(3):
        part()
    if device.type == "cuda":
        torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(n if device.type == "cuda" else 1):
        part()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return 1000 * (time.perf_counter() - began) / (n if device.type == "cuda" else 1)


def measure(run: Run, file: Path | None = None) -> dict[str, float]:
    """Accuracy without mirrored views and, for WarPI+, how well it tells right labels from wrong ones.

    The probabilities of the audit, if there is one, are stored in `file`.
    """
    learner, truth = run.method, run.truth
    assert truth.test is not None
    hits = 0
    for batch in truth.test.batches(1000):
        with torch.no_grad():
            p = torch.stack([net.eval()(batch.x).softmax(1) for net in learner.predictors]).mean(0)
        hits += int((p.argmax(1) == batch.y).sum())
    scores = {"test_acc_one_view": 100 * hits / len(truth.test)}
    if isinstance(learner, WarPIPlus) and truth.clean is not None:
        y = run.task.train.y
        clean = truth.clean.to(y.device)
        right = clean == y
        selected = learner.selected > 0
        scores["selected"] = selected.float().mean().item()
        scores["selected_right"] = right[selected].float().mean().item()
        scores["recall_of_right"] = selected[right].float().mean().item()
        p = learner.memory
        scores["memory_acc"] = (p.argmax(1) == clean).float().mean().item()
        scores["auroc_wrong"] = auroc(-p.gather(1, y[:, None])[:, 0], ~right)
    with_audit = isinstance(learner, WarPIPlus | CE)
    if with_audit and truth.clean is not None and not torch.equal(truth.clean.cpu(), run.task.train.y.cpu()):
        began = time.monotonic()
        found = audit(run, save=False)
        true = dict(zip(run.task.train.rows.tolist(), truth.clean.tolist(), strict=True))
        wrong = torch.tensor([true[row] != given for row, given in zip(found.row, found.given, strict=True)])
        if file is not None:
            np.savez_compressed(
                file,
                given=found.given.astype(np.int8),
                true=np.array([true[row] for row in found.row], dtype=np.int8),
                probabilities=found.probabilities.astype(np.float32),
                wrong_probability=found.wrong_probability.astype(np.float32),
                is_label_issue=found.is_label_issue,
            )
        scores["audit_auroc"] = auroc(torch.as_tensor(found.wrong_probability), wrong)
        scores |= cleanlab_aurocs(torch.as_tensor(found.probabilities), torch.as_tensor(found.given), wrong)
        rate = found.facts["noise_rate"]
        scores |= {f"audit_noise_{name}": rate[name] for name in ("rate", "low", "high") if rate[name] is not None}
        scores["audit_seconds"] = time.monotonic() - began
    return scores


def cleanlab_aurocs(p: Tensor, given: Tensor, wrong: Tensor) -> dict[str, float]:
    """Self-confidence and normalized margin of cleanlab, on the probabilities [N, K] of the audit."""
    own = p.gather(1, given[:, None])  # [N, 1]
    other = p.scatter(1, given[:, None], -1.0).amax(1, keepdim=True)
    scores = {"self_confidence": own, "margin": own - other}
    return {f"audit_{name}_auroc": auroc(-score[:, 0], wrong) for name, score in scores.items()}


def auroc(score: Tensor, positive: Tensor) -> float:
    """Probability that a positive has a higher score than a negative; ties are broken by order."""
    ranks = torch.empty(len(score), dtype=torch.float64)
    ranks[score.double().cpu().argsort()] = torch.arange(1, len(score) + 1, dtype=torch.float64)
    positive = positive.cpu()
    n, m = int(positive.sum()), int((~positive).sum())
    if not n or not m:
        return float("nan")
    return float((ranks[positive].sum() - n * (n + 1) / 2) / (n * m))


if __name__ == "__main__":
    main()
