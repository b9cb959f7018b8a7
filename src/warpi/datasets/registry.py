"""The built-in data sets by name. Readers are imported on use, so that listing them does not load torch."""

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from warpi.data.dataset import Dataset


@dataclass(frozen=True)
class DatasetEntry:
    """One line of `warpi list datasets`, and the function that reads the data set."""

    reader: "str | Callable[..., Dataset]"  # takes the folder of the files (or None) and, if `resizable`, `size`
    summary: str
    resizable: bool = False  # image files, which can be read at any size

    def load(self, root: Path | None, size: int | None = None, **options: Any) -> "Dataset":
        read: Any = self.reader
        if isinstance(read, str):
            module, _, function = read.partition(":")
            read = getattr(import_module(module), function)
        dataset: Dataset = read(root, size=size, **options) if self.resizable else read(root)
        return dataset


DATASETS: dict[str, DatasetEntry] = {
    "digits": DatasetEntry("warpi.datasets.digits:digits", "1,797 digits, 8 x 8, 10 classes; included in scikit-learn"),
    "cifar10": DatasetEntry(
        "warpi.datasets.cifar:cifar10", "60,000 photos, 32 x 32, 10 classes; official files, optional CIFAR-N labels"
    ),
    "cifar100": DatasetEntry(
        "warpi.datasets.cifar:cifar100", "60,000 photos, 32 x 32, 100 classes; official files, optional CIFAR-N labels"
    ),
    "clothing1m": DatasetEntry(
        "warpi.datasets.web_images:clothing1m", "1 million photos of clothes, 14 classes", resizable=True
    ),
    "food101n": DatasetEntry(
        "warpi.datasets.web_images:food101n", "Food-101N with the Food-101 test set, 101 classes", resizable=True
    ),
    "animal10n": DatasetEntry(
        "warpi.datasets.web_images:animal10n", "55,000 photos of animals, 64 x 64, 10 classes", resizable=True
    ),
    "mini_webvision": DatasetEntry(
        "warpi.datasets.web_images:mini_webvision",
        "WebVision 1.0, the first 50 classes of Google's images",
        resizable=True,
    ),
}
