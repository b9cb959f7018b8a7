"""Recipes by name: settings that are chosen together with `--recipe NAME`. Each can also be set separately."""

from collections.abc import Mapping, Sequence
from typing import Any

from warpi.errors import unknown

STRONG: dict[str, Any] = {
    "net": "fastnet",
    "epochs": 100,
    "batch_size": 512,
    "meta_batch_size": 64,
    "optimizer": "sgd",
    "lr": 0.2,
    "momentum": 0.9,
    "weight_decay": 5e-4,
    "schedule": "cosine",
    "lr_warmup": 2.0,
    "nesterov": True,
    "decay_norms": False,
    "average": 0.998,
    "augment": "strong",
    "mixup": 1.0,
    "mirror_test": True,
    "precision": "bf16",
}
"""The fields that `--recipe strong` sets."""

PAPER: dict[str, Any] = {
    "schedule": "step",
    "lr_warmup": 0.0,
    "nesterov": False,
    "decay_norms": True,
    "average": 0.0,
    "augment": "weak",
    "mixup": 0.0,
    "label_smoothing": 0.0,
    "mirror_test": False,
}
"""The fields that `--recipe paper` sets: training as in the papers. Others, such as the network, depend on the data."""

RECIPES: dict[str, dict[str, Any]] = {"strong": STRONG, "paper": PAPER}
"""The settings of each named recipe."""

_FORM_OF_STRONG = ("net", "optimizer", "schedule", "average", "augment")
_CPU_IMAGES = 200_000  # of 32 x 32 pixels: less than an hour of `warpi_plus` on two cores
_LEAST_EPOCHS = 10


def is_strong(settings: Mapping[str, Any], *, if_missing: bool) -> bool:
    """Whether the settings that define the strong recipe have its values; `if_missing` is the answer for unset ones."""
    return all(
        settings[name] == STRONG[name] if settings.get(name) is not None else if_missing for name in _FORM_OF_STRONG
    )


def epochs_on_cpu(rows: int, shape: Sequence[int]) -> int:
    """Epochs of the strong recipe on a CPU: fewer the more pixels there are, but at least 10.

    The number does not depend on the machine, so that the same command gives the same result elsewhere.
    """
    most: int = STRONG["epochs"]
    images = rows * shape[-1] * shape[-2] / 32**2
    return max(_LEAST_EPOCHS, min(most, round(_CPU_IMAGES / images)))


def expand_recipe(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Replace the setting `recipe` by the settings it stands for. Other settings take precedence over these."""
    settings = dict(settings)
    name = settings.pop("recipe", None)
    if name is None:
        return settings
    if name not in RECIPES:
        raise unknown("recipe", name, RECIPES)
    return {**RECIPES[name], **settings}
