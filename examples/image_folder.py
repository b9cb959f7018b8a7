"""A folder of images, one folder a class, some images in the wrong one: fit, audit, and the list of files to move.

python examples/image_folder.py

The same from a shell, and a page about it:
    warpi fit --data photos --image-size 16 --net mlp --epochs 20 --batch-size 32 --lr 0.05 --out run
    warpi report run --out report --audit

Photographs want a convolutional network (`--net resnet18`, `resnet50`) and a GPU; these little shapes do not.
"""

from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from PIL import Image, ImageDraw

import warpi
from warpi.audit import audit

SHAPES = ("disc", "square", "triangle")


def picture(shape: str, chance: np.random.Generator) -> Image.Image:
    """A bright shape somewhere on a dark ground."""
    ground, colour = (tuple(chance.integers(low, low + 90, 3).tolist()) for low in (10, 150))
    image = Image.new("RGB", (32, 32), ground)
    x, y = chance.integers(3, 9, 2).tolist()
    side = int(chance.integers(15, 20))
    draw = ImageDraw.Draw(image)
    if shape == "disc":
        draw.ellipse((x, y, x + side, y + side), fill=colour)
    elif shape == "square":
        draw.rectangle((x, y, x + side, y + side), fill=colour)
    else:
        draw.polygon([(x, y + side), (x + side, y + side), (x + side // 2, y)], fill=colour)
    return image


def write_images(folder: Path, n: int, wrong: float, chance: np.random.Generator) -> int:
    """n images in folders of their labels; the name of a file tells what it really shows. How many are misplaced."""
    misplaced = 0
    for i in range(n):
        truth = given = SHAPES[i % 3]
        if chance.random() < wrong:
            given, misplaced = SHAPES[(i + 1) % 3], misplaced + 1
        (folder / given).mkdir(parents=True, exist_ok=True)
        picture(truth, chance).save(folder / given / f"{truth}-{i:03}.png")
    return misplaced


def main(folder: Path, epochs: int = 20) -> tuple[float, float, float]:
    """Make the folder, find the misplaced images; test accuracy, precision and recall."""
    chance, photos = np.random.default_rng(0), folder / "photos"
    misplaced = write_images(photos / "train", 360, 0.35, chance)
    write_images(photos / "meta", 60, 0.0, chance)  # checked by a person
    write_images(photos / "test", 120, 0.0, chance)

    settings = {"image_size": 16, "net": "mlp", "epochs": epochs, "batch_size": 32, "meta_batch_size": 32}
    run = warpi.fit(out=folder / "run", data=str(photos), lr=0.05, seed=0, quiet=True, **settings)
    found = audit(run)

    dataset, _ = warpi.load_dataset(str(photos), image_size=16)
    suspects = [i for i in found.ranked if found.is_label_issue[i]]
    paths = {i: dataset.files.paths[found.row[i]] for i in suspects}
    for i in suspects[:3]:
        print(f"{paths[i]} belongs into {found.classes[found.suggested[i]]} ({100 * found.wrong_probability[i]:.0f} %)")
    hits = sum(Path(path).parent.name != Path(path).name.split("-")[0] for path in paths.values())
    trained = [dataset.files.paths[row] for row in found.row]
    there = sum(Path(path).parent.name != Path(path).name.split("-")[0] for path in trained)
    print(f"{len(suspects)} suspicious images; {misplaced} of 360 are misplaced, {there} of them were trained on")
    return run.history[-1]["test_acc"], hits / max(1, len(suspects)), hits / there


if __name__ == "__main__":
    with TemporaryDirectory() as name:
        accuracy, precision, recall = main(Path(name))
    print(f"test accuracy {accuracy:.1f} %; {100 * recall:.0f} % of the misplaced images are found,")
    print(f"and {100 * precision:.0f} % of those found are misplaced")
