"""A trained classifier as one module from numbers to probabilities, and its export to ONNX."""

import json
import logging
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from warpi.autodiff.passes import restore_class
from warpi.data.examples import Scale
from warpi.errors import UserError, missing_package
from warpi.estimator.inputs import Layout, Prepare
from warpi.training.method import evaluating
from warpi.utils.files import write_atomically
from warpi.utils.seeding import generator

_TOLERANCE = 1e-5  # largest allowed difference of a probability


class Classifier(nn.Module):
    """Maps numbers of a layout to class probabilities, averaged over the networks that predict.  [B, ...] -> [B, K]"""

    def __init__(self, layout: Layout, scale: Scale, nets: Sequence[nn.Module]) -> None:
        super().__init__()
        self.prepare = Prepare(layout, scale)
        self.nets = nn.ModuleList(map(restore_class, nets))
        self.eval()

    def forward(self, x: Tensor) -> Tensor:
        x = self.prepare(x)
        return torch.stack([net(x).softmax(dim=1) for net in self.nets]).mean(0)

    @torch.no_grad()
    def probabilities(self, X: np.ndarray, size: int = 1000) -> Tensor:
        """[N, K] on the CPU, in batches of `size` rows, which are made dense if X is sparse."""
        device = self.prepare.mean.device
        batches = []
        with evaluating([self]):
            for start in range(0, X.shape[0], size):
                rows = X[start : start + size]
                x = rows if isinstance(rows, np.ndarray) else rows.toarray()
                batches.append(self(torch.tensor(x, device=device)).double().cpu())
        return torch.cat(batches)


def write_onnx(classifier: Classifier, path: Path, classes: Sequence[object]) -> float | None:
    """Write an ONNX file and compare it with onnxruntime, if that is installed.

    Returns the largest difference, or None. The input `x` is what `Layout.numbers` returns, a batch of any size; the
    output is `probabilities`. The metadata contains the classes and, for tables, the names of the categories.
    """
    try:
        import onnx
        import onnxscript  # noqa: F401
    except ImportError as e:
        raise missing_package(e.name or "onnx", "to_onnx", "onnx") from e
    layout = classifier.prepare.layout
    scale = Scale(classifier.prepare.mean, classifier.prepare.std)
    x = layout.sample(64, scale, generator(0, "onnx")).to(scale.mean.device)
    with tempfile.TemporaryDirectory() as folder, torch.no_grad(), _quiet():
        file = Path(folder) / "classifier.onnx"
        batch = torch.export.Dim("batch", max=2**31 - 1)  # torch 2.7 needs a limit below 2**63 - 1
        try:
            torch.onnx.export(
                classifier,
                (x,),
                file,
                dynamo=True,
                verbose=False,
                external_data=False,
                input_names=["x"],
                output_names=["probabilities"],
                dynamic_shapes={"x": {0: batch}},
            )
        except torch.onnx.errors.OnnxExporterError as e:
            reason = str(e).strip().splitlines()[0]
            raise UserError(f"the network cannot be exported to ONNX ({reason}); use operators of ONNX") from e
        model = onnx.load(file)
    metadata = {"classes": [str(name) for name in classes], "categories": layout.categories_of_numbers()}
    onnx.helper.set_model_props(model, {name: json.dumps(value) for name, value in metadata.items()})
    content = model.SerializeToString()
    difference = _difference(classifier, content, x)
    if difference is not None and not difference <= _TOLERANCE:
        raise UserError(
            f"probabilities of onnxruntime differ from those of the classifier by up to {difference:.1e}, more than "
            f"{_TOLERANCE:g}; {path} was not written"
        )
    write_atomically(path, content)
    return difference


@torch.no_grad()
def _difference(classifier: Classifier, content: bytes, x: Tensor) -> float | None:
    """The largest difference of a probability, over batches of several sizes; None without onnxruntime."""
    try:
        import onnxruntime
    except ImportError:
        return None
    session = onnxruntime.InferenceSession(content, providers=["CPUExecutionProvider"])
    largest = 0.0
    for n in (1, 5, len(x)):
        (theirs,) = session.run(["probabilities"], {"x": x[:n].cpu().numpy()})
        ours = classifier(x[:n]).cpu().numpy()
        largest = max(largest, float(np.abs(theirs - ours).max()))
    return largest


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence the messages of the exporter about optional packages."""
    log = logging.getLogger("torch.onnx")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        log.setLevel(level)
