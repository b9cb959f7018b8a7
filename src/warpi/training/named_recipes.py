"""Recipes by name: settings that are chosen together with `--recipe NAME`. Each can also be set separately."""

from collections.abc import Mapping
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


def expand_recipe(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Replace the setting `recipe` by the settings it stands for. Other settings take precedence over these."""
    settings = dict(settings)
    name = settings.pop("recipe", None)
    if name is None:
        return settings
    if name not in RECIPES:
        raise unknown("recipe", name, RECIPES)
    return {**RECIPES[name], **settings}
