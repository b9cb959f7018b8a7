"""Read weight files and load them into a network."""

import http.client
import pickle
import struct
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from warpi.errors import MALFORMED_ERRORS, UserError, first_line, missing_package
from warpi.utils.limits import check_array_file

# Errors that the readers raise if bytes are missing or changed.
_DAMAGED = (*MALFORMED_ERRORS, OSError, EOFError, AssertionError, MemoryError, struct.error, SafetensorError)


def read_weights(path: Path) -> Mapping[str, Tensor]:
    """Read a file of named tensors. No code in it is run: pickles are read with torch's weights-only reader."""
    kind = path.suffix.lower()
    if kind not in (".safetensors", ".pt", ".pth"):
        raise UserError(f"weights must be a .safetensors, .pt or .pth file or 'torchvision', got {str(path)!r}")
    if not path.is_file():
        raise UserError(f"there is no weight file {str(path)!r}; pass the path of a .safetensors, .pt or .pth file")
    state: Any
    try:
        check_array_file(path)
        state = load_file(path) if kind == ".safetensors" else _unpickle(path)
    except UserError:
        raise
    except pickle.UnpicklingError as error:
        raise UserError(
            f"refusing to load the weight file {str(path)!r}: it is damaged, or contains objects that could run code; "
            "save only net.state_dict(), preferably as .safetensors"
        ) from error
    except _DAMAGED as error:
        raise UserError(
            f"cannot read the weight file {str(path)!r} ({first_line(error)}); copy or download it again"
        ) from error
    if not isinstance(state, Mapping):
        kind = type(state).__name__
        raise UserError(
            f"the weight file {str(path)!r} contains a {kind}, not a state dict; save only net.state_dict()"
        )
    for name, value in state.items():
        if not isinstance(name, str) or not isinstance(value, Tensor):
            raise UserError(
                f"the weight file {str(path)!r} contains a {type(value).__name__} under {name!r} instead of a tensor; "
                "save only net.state_dict()"
            )
    return state


def _unpickle(path: Path) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # about the pickle protocol, which the user cannot change
        return torch.load(path, map_location="cpu", weights_only=True)


def read_torchvision() -> Mapping[str, Tensor]:
    """The IMAGENET1K_V2 weights of torchvision's resnet50, from its cache or downloaded."""
    try:
        from torchvision.models import ResNet50_Weights
    except ImportError as error:
        raise missing_package("torchvision", "weights 'torchvision'", "pretrained") from error
    except RuntimeError as error:  # its compiled operators belong to another release of torch
        raise UserError(
            f"the installed torchvision is not compatible with torch {torch.__version__} ({first_line(error)}); "
            "install the matching torchvision, or pass a weight file"
        ) from error
    state: Mapping[str, Tensor]
    try:
        # ResNet50_Weights.get_state_dict does not accept weights_only in every release.
        state = torch.hub.load_state_dict_from_url(
            ResNet50_Weights.IMAGENET1K_V2.url, map_location="cpu", progress=False, check_hash=True, weights_only=True
        )
    except (OSError, RuntimeError, EOFError, http.client.HTTPException, pickle.UnpicklingError) as error:
        raise UserError(
            f"cannot download torchvision's weights of resnet50 ({first_line(error)}); try again, or give a weight file"
        ) from error
    return state


def load_weights(net: nn.Module, weights: Mapping[str, Tensor], source: str) -> None:
    """Load the weights into a network, or raise an error that names what does not fit and change nothing.

    The last layer `fc` keeps its values if the weights have a different number of classes.
    """
    current = {name: value for name, value in net.state_dict().items() if isinstance(value, Tensor)}
    state = dict(weights)
    head = current.get("fc.weight")
    new_head = state.get("fc.weight")
    if head is not None and new_head is not None:
        other_classes = head.shape != new_head.shape and head.shape[1:] == new_head.shape[1:]
        if other_classes:
            state = {k: v for k, v in state.items() if not k.startswith("fc.")}
            state |= {k: v for k, v in current.items() if k.startswith("fc.")}
    for name in current.keys() - state.keys():
        if name.endswith("num_batches_tracked"):  # missing in files of old torch releases
            state[name] = current[name]
    faults = [f"{k} is missing" for k in current if k not in state]
    faults += [f"{k} is not in the network" for k in state if k not in current]
    faults += [
        f"{k} has shape {tuple(state[k].shape)}, not {tuple(current[k].shape)}"
        for k in current
        if k in state and state[k].shape != current[k].shape
    ]
    if faults:
        more = f" and {len(faults) - 3} more" if len(faults) > 3 else ""
        raise UserError(f"the weights of {source} belong to another network: {'; '.join(faults[:3])}{more}")
    net.load_state_dict(state, strict=False)
