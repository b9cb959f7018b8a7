"""Images in one folder per class, some of them in the wrong folder: train, audit, and list the files to move.

python examples/image_folder.py

The same from a shell, with a report:
    warpi fit --data photos --image-size 16 --net mlp --epochs 20 --batch-size 32 --lr 0.05 --out run
    warpi report run --out report --audit

Photographs need a convolutional network (`--net resnet18`, `resnet50`) and a GPU; these small shapes do not.
"""

from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from PIL import Image, ImageDraw

import warpi
from warpi.audit import audit

SHAPES = ("disc", "square", "triangle")


def picture(shape: str, rng: np.random.Generator) -> Image.Image:
    """A bright shape at a random position on a dark background."""
    background, color = (tuple(rng.integers(low, low + 90, 3).tolist()) for low in (10, 150))
    image = Image.new("RGB", (32, 32), background)
    x, y = rng.integers(3, 9, 2).tolist()
    side = int(rng.integers(15, 20))
    draw = ImageDraw.Draw(image)
    if shape == "disc":
        draw.ellipse((x, y, x + side, y + side), fill=color)
    elif shape == "square":
        draw.rectangle((x, y, x + side, y + side), fill=color)
    else:
        draw.polygon([(x, y + side), (x + side, y + side), (x + side // 2, y)], fill=color)
    return image


def write_images(folder: Path, n: int, wrong: float, rng: np.random.Generator) -> int:
    """Write n images into folders by label and return how many are misplaced. File names start with the true class."""
    misplaced = 0
    for i in range(n):
        truth = given = SHAPES[i % 3]
        if rng.random() < wrong:
            given = SHAPES[(i + 1) % 3]
            misplaced += 1
        (folder / given).mkdir(parents=True, exist_ok=True)
        picture(truth, rng).save(folder / given / f"{truth}-{i:03}.png")
    return misplaced


def main(folder: Path, epochs: int = 20) -> tuple[float, float, float]:
    """Write the images and find the misplaced ones; return test accuracy, precision and recall."""
    rng = np.random.default_rng(0)
    photos = folder / "photos"
    misplaced = write_images(photos / "train", 360, 0.35, rng)
    write_images(photos / "trusted", 60, 0.0, rng)  # checked by a person
    write_images(photos / "test", 120, 0.0, rng)

    settings = {"image_size": 16, "net": "mlp", "epochs": epochs, "batch_size": 32, "meta_batch_size": 32}
    run = warpi.fit(out=folder / "run", data=str(photos), lr=0.05, seed=0, quiet=True, **settings)
    result = audit(run)

    dataset, _ = warpi.load_dataset(str(photos), image_size=16)
    suspects = [i for i in result.ranked if result.is_label_issue[i]]
    paths = {i: dataset.files.paths[result.row[i]] for i in suspects}
    for i in suspects[:3]:
        print(
            f"{paths[i]} belongs in {result.classes[result.suggested[i]]} ({100 * result.wrong_probability[i]:.0f} %)"
        )
    hits = sum(Path(path).parent.name != Path(path).name.split("-")[0] for path in paths.values())
    trained = [dataset.files.paths[row] for row in result.row]
    wrong = sum(Path(path).parent.name != Path(path).name.split("-")[0] for path in trained)
    print(f"{len(suspects)} suspicious images; {misplaced} of 360 are misplaced, {wrong} of them were trained on")
    return run.history[-1]["test_acc"], hits / max(1, len(suspects)), hits / wrong


if __name__ == "__main__":
    with TemporaryDirectory() as name:
        accuracy, precision, recall = main(Path(name))
    print(f"test accuracy {accuracy:.1f} %; {100 * recall:.0f} % of the misplaced images are found,")
    print(f"and {100 * precision:.0f} % of the reported images are misplaced")
