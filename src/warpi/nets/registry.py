"""Networks: plain nn.Modules that give logits [B, K].

Each has `features(x)` [B, D], the penultimate layer, and a last linear layer `fc`: forward(x) = fc(features(x)).
"""

import copy
import http.client
import pickle
import struct
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from warpi.errors import UserError, missing_package, unknown
from warpi.nets.conv4 import Conv4
from warpi.nets.fastnet import FastNet
from warpi.nets.mlp import MLP
from warpi.nets.preact_resnet import preact18
from warpi.nets.resnet import resnet18, resnet20, resnet32, resnet50
from warpi.nets.wide_resnet import wrn28_10

Build = Callable[[tuple[int, ...], int], nn.Module]
"""(shape of one input, number of classes) -> network. Initial weights are drawn from the global torch generator."""


class NetEntry(NamedTuple):
    summary: str
    build: Build


NETS: dict[str, NetEntry] = {
    "mlp": NetEntry("one hidden layer of 128 with BatchNorm; any input, flattened", MLP),
    "conv4": NetEntry("four 3x3 convolutions with pooling, 0.11 M parameters; small images", Conv4),
    "resnet20": NetEntry("CIFAR ResNet-20, 0.27 M parameters; small images", resnet20),
    "resnet32": NetEntry("CIFAR ResNet-32, 0.46 M parameters; small images", resnet32),
    "resnet18": NetEntry("ResNet-18 with a 3x3 stem, 11.2 M parameters; small images", resnet18),
    "preact18": NetEntry("pre-activation ResNet-18, 11.2 M parameters; small images", preact18),
    "fastnet": NetEntry("whitening and three wide blocks, 10.0 M parameters, fast on a GPU; small images", FastNet),
    "wrn28_10": NetEntry("WRN-28-10, 36.5 M parameters; small images", wrn28_10),
    "resnet50": NetEntry("ResNet-50, 25.6 M parameters; photographs of 32 pixels and more", resnet50),
}


def make_net(
    net: str | nn.Module | Build, shape: tuple[int, ...], n_classes: int, weights: Path | str | None = None
) -> nn.Module:
    """A new network for inputs of `shape` and K = `n_classes` classes.

    `net` is a name of NETS, a module of your own (copied, so that two networks made from it are two networks that
    begin alike), or a function (shape, n_classes) -> module. Builders draw initial weights from the global torch
    generator: seed it (`rng.seeded`) for a network that can be made again.

    `weights` is a `.safetensors`, `.pt` or `.pth` file with the state dict of such a network, or "torchvision"
    for the ImageNet weights of resnet50. The last layer `fc` keeps its fresh values where the file has another
    number of classes.
    """
    if weights == "torchvision" and net != "resnet50":
        got = net if isinstance(net, str) else type(net).__name__
        raise UserError(f"weights 'torchvision' are for the net 'resnet50', got {got!r}; give a weight file instead")
    if isinstance(net, str):
        if net not in NETS:
            raise unknown("net", net, NETS)
        made = NETS[net].build(shape, n_classes)
    else:
        made = _own(net, shape, n_classes)
        _check_output(made, shape, n_classes)
    if weights == "torchvision":
        _load(made, _read_torchvision(), "torchvision's resnet50")
    elif weights is not None:
        _load(made, _read(Path(weights)), str(weights))
    return made


def _own(net: nn.Module | Build, shape: tuple[int, ...], n_classes: int) -> nn.Module:
    """The user's module, copied, or what the user's function makes."""
    what = "a name, an nn.Module or a function (shape, n_classes) -> nn.Module"
    if isinstance(net, nn.Module):
        try:
            return copy.deepcopy(net)
        except (RuntimeError, TypeError) as error:
            raise UserError(
                f"the network {type(net).__name__} cannot be copied ({_first_line(error)}); "
                "give a function (shape, n_classes) -> nn.Module instead"
            ) from error
    if not callable(net):
        raise UserError(f"a network must be {what}, got {type(net).__name__}")
    made = net(shape, n_classes)
    if not isinstance(made, nn.Module):
        raise UserError(f"a network must be {what}; the function gave {type(made).__name__}")
    return made


def _check_output(net: nn.Module, shape: tuple[int, ...], n_classes: int) -> None:
    """Two inputs of zeros must give logits [2, K]. Nothing of the network is changed (lazy layers get their sizes)."""
    like = next((p for p in net.parameters() if p.is_floating_point()), torch.empty(0))
    x = torch.zeros((2, *shape), dtype=like.dtype, device=like.device)
    name, modes = type(net).__name__, [(module, module.training) for module in net.modules()]
    net.eval()
    try:
        with torch.no_grad():
            z = net(x)
    except (RuntimeError, ValueError, TypeError, IndexError) as error:
        raise UserError(
            f"the network {name} cannot take a batch of shape {tuple(x.shape)} ({_first_line(error)}); "
            f"it must give logits of shape (2, {n_classes})"
        ) from error
    finally:
        for module, mode in modes:
            module.training = mode
    if isinstance(z, Tensor) and bool((z >= 0).all()) and bool(((z.sum(-1) - 1).abs() < 1e-3).all()):
        warnings.warn(
            f"the outputs of {name} are probabilities (a Softmax at its end?), logits are expected: it will learn "
            "badly; take the Softmax off",
            stacklevel=2,
        )
    if not isinstance(z, Tensor) or tuple(z.shape) != (2, n_classes):
        got = f"shape {tuple(z.shape)}" if isinstance(z, Tensor) else type(z).__name__
        raise UserError(
            f"the network {name} gave {got} for a batch of shape {tuple(x.shape)}; "
            f"it must give logits of shape (2, {n_classes}), one column a class"
        )


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


# What the readers raise on files with bytes cut off or changed at random.
_DAMAGED = (
    *(OSError, RuntimeError, EOFError, ValueError, LookupError, TypeError, AttributeError, AssertionError),
    *(OverflowError, MemoryError, struct.error, SafetensorError),
)


def _unpickle(path: Path) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # about the pickle's protocol: the user can do nothing about it
        return torch.load(path, map_location="cpu", weights_only=True)


def _read(path: Path) -> Mapping[str, Tensor]:
    """A file of named tensors. Nothing in it is run: pickles are read by torch's weights-only reader."""
    kind = path.suffix.lower()
    if kind not in (".safetensors", ".pt", ".pth"):
        raise UserError(f"weights must be a .safetensors, .pt or .pth file or 'torchvision', got {str(path)!r}")
    if not path.is_file():
        raise UserError(f"there is no weight file {str(path)!r}; give the path of a .safetensors, .pt or .pth file")
    state: Any
    try:
        state = load_file(path) if kind == ".safetensors" else _unpickle(path)
    except pickle.UnpicklingError as error:
        raise UserError(
            f"the weight file {str(path)!r} is damaged, or holds more than tensors and could run code when opened: "
            "refused; save net.state_dict() alone, best as .safetensors"
        ) from error
    except _DAMAGED as error:
        raise UserError(f"cannot read the weight file {str(path)!r} ({_first_line(error)}); fetch it again") from error
    if not isinstance(state, Mapping):
        raise UserError(f"the weight file {str(path)!r} holds {type(state).__name__}; save net.state_dict() alone")
    for name, value in state.items():
        if not isinstance(name, str) or not isinstance(value, Tensor):
            raise UserError(
                f"the weight file {str(path)!r} holds {type(value).__name__} under {name!r}, where a tensor must be; "
                "save net.state_dict() alone"
            )
    return state


def _read_torchvision() -> Mapping[str, Tensor]:
    """The IMAGENET1K_V2 weights of torchvision's resnet50, from its cache or the network."""
    try:
        from torchvision.models import ResNet50_Weights
    except ImportError as error:
        raise missing_package("torchvision", "weights 'torchvision'", "pretrained") from error
    except RuntimeError as error:  # its compiled operators are of another release
        raise UserError(
            f"torchvision does not fit torch {torch.__version__} ({_first_line(error)}); "
            "install the torchvision of this torch, or give a weight file"
        ) from error
    state: Mapping[str, Tensor]
    try:
        # not its own get_state_dict, which does not take weights_only in every release
        state = torch.hub.load_state_dict_from_url(
            ResNet50_Weights.IMAGENET1K_V2.url, map_location="cpu", progress=False, check_hash=True, weights_only=True
        )
    except (OSError, RuntimeError, EOFError, http.client.HTTPException, pickle.UnpicklingError) as error:
        raise UserError(
            f"cannot download torchvision's weights of resnet50 ({_first_line(error)}); "
            "try again, or give a weight file"
        ) from error
    return state


def _load(net: nn.Module, state: Mapping[str, Tensor], source: str) -> None:
    """Put all of `state` into `net`, or nothing: an error names what does not fit."""
    own = {name: value for name, value in net.state_dict().items() if isinstance(value, Tensor)}
    state = dict(state)
    head, other = own.get("fc.weight"), state.get("fc.weight")
    if head is not None and other is not None and head.shape != other.shape and head.shape[1:] == other.shape[1:]:
        # another number of classes: the last layer stays as it is
        state = {k: v for k, v in state.items() if not k.startswith("fc.")}
        state |= {k: v for k, v in own.items() if k.startswith("fc.")}
    for name in own.keys() - state.keys():
        if name.endswith("num_batches_tracked"):  # files of old torch releases lack this counter
            state[name] = own[name]
    faults = [f"{k} is missing" for k in own if k not in state]
    faults += [f"{k} is not in the network" for k in state if k not in own]
    faults += [
        f"{k} has shape {tuple(state[k].shape)}, not {tuple(own[k].shape)}"
        for k in own
        if k in state and state[k].shape != own[k].shape
    ]
    if faults:
        more = f" and {len(faults) - 3} more" if len(faults) > 3 else ""
        raise UserError(f"the weights of {source} are of another network: {'; '.join(faults[:3])}{more}")
    net.load_state_dict(state, strict=False)
