"""Checkpoints: one file, written atomically and checked by a hash. Nothing in it is unpickled.

Tensors are stored in the safetensors format, everything else as JSON in its header. The header also contains a SHA-256
of both, because neither torch nor safetensors detects a flipped bit.
"""

import hashlib
import json
import logging
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
from torch import Generator, Tensor

from warpi.errors import MALFORMED_ERRORS, UserError, blame_file
from warpi.training.recipe import Recipe
from warpi.training.task import Task
from warpi.utils.files import write_atomically
from warpi.utils.limits import check_regular

FORMAT = "warpi-checkpoint/1"
log = logging.getLogger("warpi.training")
_INPUTS = (Task, Recipe)  # rebuilt from the specification, never stored
_RENAMED = {"beginnings": "schedule_starts"}  # names in older checkpoints


def state_of(obj: object) -> dict[str, Any]:
    """All attributes of an object except hyper-parameters (dataclass fields) and inputs."""
    parameters = {f.name for f in fields(obj)} if is_dataclass(obj) else set()
    state = {k: v for k, v in vars(obj).items() if k not in parameters and not isinstance(v, _INPUTS)}
    return {k: v for k, v in state.items() if not callable(getattr(type(obj), k, None))}  # a graphed step


def restore(obj: object, stored: dict[str, Any]) -> None:
    """Load stored state into a started object. Networks and weights, which others may refer to, change in place."""
    state = state_of(obj)
    stored = {name if name in state else _RENAMED.get(name, name): value for name, value in stored.items()}
    different = state.keys() ^ stored.keys()
    if different:
        raise _mismatch(", ".join(sorted(different)), "only one of the two has this part")
    for name, value in state.items():
        try:
            setattr(obj, name, restore_into(value, stored[name]))
        except UserError:
            raise
        except MALFORMED_ERRORS as e:
            raise _mismatch(name, " ".join(str(e).split("\n")[:2])) from e


def save(path: Path, state: dict[str, Any]) -> None:
    """Write a checkpoint. The one before is kept next to it as `NAME.previous`."""
    write_atomically(path, pack(state, FORMAT), keep=_previous(path))


def pack(state: dict[str, Any], form: str) -> bytes:
    """Encode a state as the content of a file with the format `form`."""
    tensors: dict[str, Tensor] = {}
    tree = json.dumps(_encode(state, tensors))
    header = {"format": form, "state": tree, "sha256": _digest(tree, tensors)}
    content: bytes = safetensors.torch.save(tensors, header)
    return content


def exists(path: Path) -> bool:
    """Whether there is a checkpoint to resume from."""
    return path.exists() or _previous(path).exists()


def digest(state: dict[str, Any]) -> str:
    """A hash of an entire state."""
    tensors: dict[str, Tensor] = {}
    return _digest(json.dumps(_encode(state, tensors)), tensors)


def newest(path: Path) -> Path:
    """The file to resume from: the last checkpoint, or the previous one after a crash between two renames."""
    previous = _previous(path)
    return previous if not path.exists() and previous.exists() else path


def load(path: Path, device: torch.device | str = "cpu", advice: str = "") -> dict[str, Any]:
    """Read a checkpoint. Tensors that were on a GPU are loaded to `device`.

    If the file is damaged, the error ends with `advice`, which by default says how to resume without the file.
    """
    previous = _previous(path)
    path = newest(path)
    has_other = path != previous and previous.exists()
    resume = f"delete it to resume from {previous.name}" if has_other else "delete it to start from the beginning"
    return unpack(path, FORMAT, advice or resume, device)


def unpack(path: Path, form: str, advice: str, device: torch.device | str = "cpu") -> dict[str, Any]:
    """Read the state from a file with the format `form`. Error messages end with the advice."""
    what = form.partition("/")[0].removeprefix("warpi-")
    check_regular(path)
    try:
        with safetensors.safe_open(path, "pt") as f:
            header = f.metadata() or {}
            tensors = {name: f.get_tensor(name) for name in f.keys()}  # noqa: SIM118
    except (safetensors.SafetensorError, OSError) as e:
        raise UserError(f"{path} is not a complete {what} ({e}); {advice}") from e
    if header.get("format") != form:
        raise UserError(f"{path} is not a {what} of this version: got {header.get('format')!r}, expected {form!r}")
    tree = header.get("state", "")
    if header.get("sha256") != _digest(tree, tensors):
        raise UserError(f"{path} is damaged: checksum mismatch; {advice}")
    with blame_file(path):
        state: dict[str, Any] = _decode(json.loads(tree), tensors, device)
    return state


def _previous(path: Path) -> Path:
    return path.with_name(path.name + ".previous")


def _digest(tree: str, tensors: dict[str, Tensor]) -> str:
    digest = hashlib.sha256(tree.encode())
    for name in sorted(tensors):
        t = tensors[name].contiguous()
        digest.update(f"{name} {t.dtype} {tuple(t.shape)}".encode())
        digest.update(t.reshape(-1).view(torch.uint8).numpy().data if t.numel() else b"")
    return digest.hexdigest()


def _encode(value: Any, tensors: dict[str, Tensor]) -> Any:
    """Encode a value as a tree of JSON values. Tensors are put into `tensors` and replaced by their names."""
    match value:
        case None | bool() | int() | float() | str():
            return value
        case Tensor():
            tensors[name := str(len(tensors))] = value.detach().cpu().contiguous().clone()
            return {"tensor" if value.device.type == "cpu" else "device tensor": name}
        case Generator():
            return {"generator": _encode(value.get_state(), tensors)}
        case list() | tuple():
            return {"list" if isinstance(value, list) else "tuple": [_encode(v, tensors) for v in value]}
        case dict():
            return {"dict": [[_encode(k, tensors), _encode(v, tensors)] for k, v in value.items()]}
    if callable(getattr(value, "state_dict", None)):
        return _encode(dict(value.state_dict()), tensors)
    raise TypeError(f"cannot store a {type(value).__name__} in a checkpoint; define its state_dict and load_state_dict")


def _decode(tree: Any, tensors: dict[str, Tensor], device: torch.device | str = "cpu") -> Any:
    if not isinstance(tree, dict):
        return tree
    ((kind, inner),) = tree.items()
    match kind:
        case "tensor":
            return tensors[inner]
        case "device tensor":
            return tensors[inner].to(device)
        case "generator":
            return _decode(inner, tensors, device)
        case "list":
            return [_decode(v, tensors, device) for v in inner]
        case "tuple":
            return tuple(_decode(v, tensors, device) for v in inner)
        case _:
            return {_decode(k, tensors, device): _decode(v, tensors, device) for k, v in inner}


def restore_into(value: Any, stored: Any) -> Any:
    """Load `stored` into `value` if that is an object with state. Returns the object or value to use."""
    if isinstance(value, Generator):
        if stored.numel() == value.get_state().numel():
            value.set_state(stored)
        else:  # generators of GPUs and CPUs have different states
            log.warning("the run resumes on a different kind of device, so its random numbers restart from the seed")
        return value
    if isinstance(value, Tensor) and isinstance(stored, Tensor):
        if not value.requires_grad:
            return stored.to(value.device)  # not in place, because it may be a tensor of the task
        with torch.no_grad():
            return value.copy_(stored)  # an optimizer refers to it
    if isinstance(value, torch.optim.Optimizer):
        return _restore_optimizer(value, stored)
    if callable(getattr(value, "load_state_dict", None)):
        value.load_state_dict(stored)
        return value
    if isinstance(value, list | tuple) and isinstance(stored, list | tuple):
        has_fixed_length = hasattr(value, "_make") or any(hasattr(v, "state_dict") for v in value)
        if has_fixed_length or len(value) == len(stored):
            make: Any = getattr(value, "_make", type(value))  # a named tuple takes its parts as arguments
            return make([restore_into(v, s) for v, s in zip(value, stored, strict=True)])
    if isinstance(value, dict) and isinstance(stored, dict) and value.keys() == stored.keys():
        return {k: restore_into(v, stored[k]) for k, v in value.items()}
    if value is not None and stored is not None and _kind(value) != _kind(stored):
        raise ValueError(f"{stored!r:.60} is stored for a {type(value).__name__}")
    return stored


def _kind(value: object) -> str:
    """The type of a value. All numbers have one type, as do lists and tuples."""
    kinds = {"number": int | float, "list": list | tuple}
    return next((name for name, kind in kinds.items() if isinstance(value, kind)), type(value).__name__)


def _restore_optimizer(value: torch.optim.Optimizer, stored: dict[str, Any]) -> torch.optim.Optimizer:
    """Load the state of an optimizer. Its implementation and memory formats follow the current device."""
    kinds = ("fused", "foreach", "capturable")
    groups = [
        {**group, **{k: current[k] for k in kinds if k in current}}
        for group, current in zip(stored["param_groups"], value.param_groups, strict=True)
    ]
    rates = [group["lr"] for group in value.param_groups]
    value.load_state_dict({**stored, "param_groups": groups})
    for group, rate in zip(value.param_groups, rates, strict=True):
        group["lr"] = rate.fill_(float(group["lr"])) if isinstance(rate, Tensor) else float(group["lr"])
        for p in group["params"]:
            for name, t in value.state.get(p, {}).items():
                if isinstance(t, Tensor) and t.shape == p.shape and t.stride() != p.stride():
                    value.state[p][name] = torch.empty_like(p, dtype=t.dtype).copy_(t)
    return value


def _mismatch(name: str, why: str) -> UserError:
    return UserError(f"the checkpoint does not match in {name!r}: {why}; use the network and version it was made with")
