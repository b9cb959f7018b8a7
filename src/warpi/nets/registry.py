"""The registry of networks, and `make_net`, which builds a registered or custom network."""

import copy
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from warpi.errors import UserError, first_line, unknown
from warpi.nets.conv4 import Conv4
from warpi.nets.fastnet import FastNet
from warpi.nets.linear import LinearHead
from warpi.nets.load_weights import load_weights, read_torchvision, read_weights
from warpi.nets.mlp import MLP, plain_mlp
from warpi.nets.preact_resnet import PreActResNet18
from warpi.nets.resnet import resnet18, resnet20, resnet32, resnet50
from warpi.nets.wide_resnet import WideResNet

NetBuilder = Callable[[tuple[int, ...], int], nn.Module]
"""(shape of one input, number of classes) -> network. Initial weights are drawn from the global torch generator."""


class NetEntry(NamedTuple):
    summary: str
    build: NetBuilder


NETS: dict[str, NetEntry] = {
    "mlp": NetEntry("one hidden layer of 128 units with BatchNorm; any input (it is flattened)", MLP),
    "mlp_plain": NetEntry("one hidden layer of 128 units without BatchNorm; any input (it is flattened)", plain_mlp),
    "linear": NetEntry(
        "one linear layer, for features of a pretrained network; any input (it is flattened)", LinearHead
    ),
    "conv4": NetEntry("four 3x3 convolutions with pooling, 0.11 M parameters; small images", Conv4),
    "resnet20": NetEntry("CIFAR ResNet-20, 0.27 M parameters; small images", resnet20),
    "resnet32": NetEntry("CIFAR ResNet-32, 0.46 M parameters; small images", resnet32),
    "resnet18": NetEntry("ResNet-18 with a 3x3 stem, 11.2 M parameters; small images", resnet18),
    "preact18": NetEntry("pre-activation ResNet-18, 11.2 M parameters; small images", PreActResNet18),
    "fastnet": NetEntry("whitening and three wide blocks, 10.0 M parameters, fast on a GPU; small images", FastNet),
    "wrn28_10": NetEntry("WRN-28-10, 36.5 M parameters; small images", WideResNet),
    "resnet50": NetEntry("ResNet-50, 25.6 M parameters; photos of at least 32 pixels", resnet50),
}

VECTOR_NETS = ("mlp", "mlp_plain", "linear")
"""The networks that flatten their input."""


def make_net(
    net: str | nn.Module | NetBuilder, shape: tuple[int, ...], n_classes: int, weights: Path | str | None = None
) -> nn.Module:
    """Build a network for inputs of `shape` and K = `n_classes` classes.

    `net` is a name in NETS, an nn.Module, or a function (shape, n_classes) -> nn.Module. A module is copied, so that
    two networks built from it are separate but start with the same weights. Builders draw initial weights from torch's
    global generator; use `warpi.utils.seeding.seeded` for reproducible weights.

    `weights` is a `.safetensors`, `.pt` or `.pth` file with the state dict of such a network, or "torchvision" for the
    ImageNet weights of resnet50. The last layer `fc` keeps its initial values if the file has a different
    number of classes.
    """
    if weights == "torchvision" and net != "resnet50":
        name = net if isinstance(net, str) else type(net).__name__
        raise UserError(f"weights 'torchvision' are only for 'resnet50', got {name!r}; give a weight file instead")
    if isinstance(net, str):
        if net not in NETS:
            raise unknown("net", net, NETS)
        built = NETS[net].build(shape, n_classes)
    else:
        built = _build_custom(net, shape, n_classes)
        _check_output(built, shape, n_classes)
    if weights == "torchvision":
        load_weights(built, read_torchvision(), "torchvision's resnet50")
    elif weights is not None:
        load_weights(built, read_weights(Path(weights)), str(weights))
    return built


def _build_custom(net: nn.Module | NetBuilder, shape: tuple[int, ...], n_classes: int) -> nn.Module:
    """Copy the user's module, or call the user's function."""
    allowed = "a name, an nn.Module or a function (shape, n_classes) -> nn.Module"
    if isinstance(net, nn.Module):
        try:
            return copy.deepcopy(net)
        except (RuntimeError, TypeError) as error:
            raise UserError(
                f"the network {type(net).__name__} cannot be copied ({first_line(error)}); "
                "give a function (shape, n_classes) -> nn.Module instead"
            ) from error
    if not callable(net):
        raise UserError(f"a network must be {allowed}, got {type(net).__name__}")
    built = net(shape, n_classes)
    if not isinstance(built, nn.Module):
        raise UserError(f"a network must be {allowed}; the function returned {type(built).__name__}")
    return built


def _check_output(net: nn.Module, shape: tuple[int, ...], n_classes: int) -> None:
    """Check that two zero inputs give logits [2, K]. Only lazy layers are changed: they are initialized."""
    parameter = next((p for p in net.parameters() if p.is_floating_point()), torch.empty(0))
    x = torch.zeros((2, *shape), dtype=parameter.dtype, device=parameter.device)
    name = type(net).__name__
    modes = [(module, module.training) for module in net.modules()]
    net.eval()
    try:
        with torch.no_grad():
            z = net(x)
    except (RuntimeError, ValueError, TypeError, IndexError) as error:
        raise UserError(
            f"the network {name} failed on a batch of shape {tuple(x.shape)} ({first_line(error)}); it must accept "
            f"this shape and return logits of shape (2, {n_classes})"
        ) from error
    finally:
        for module, mode in modes:
            module.training = mode
    if isinstance(z, Tensor) and bool((z >= 0).all()) and bool(((z.sum(-1) - 1).abs() < 1e-3).all()):
        warnings.warn(
            f"the network {name} returns probabilities (does it end with a Softmax?) instead of logits and will train "
            "poorly; remove the Softmax",
            stacklevel=2,
        )
    if not isinstance(z, Tensor) or tuple(z.shape) != (2, n_classes):
        returned = f"shape {tuple(z.shape)}" if isinstance(z, Tensor) else type(z).__name__
        raise UserError(
            f"the network {name} returned {returned} for a batch of shape {tuple(x.shape)}; "
            f"it must return logits of shape (2, {n_classes}), one column per class"
        )
