"""`warpi embed`. Imports that load torch wait until the command runs."""

from pathlib import Path

from warpi.utils.flags import Parser
from warpi.utils.terminal import say


def embed(argv: list[str]) -> None:
    parser = Parser(
        "warpi embed",
        "Compute the vectors of images or texts once, by a pretrained model. `warpi fit --data OUT` then trains in "
        "seconds. If the command is interrupted, the same command continues.",
    )
    parser.add_argument("source", metavar="SOURCE", help="a folder of images or .txt files, a list of images, a table")
    parser.add("--with NAME", "embedder, such as timm:resnet50; docs/embeddings.md lists all", required=True)
    parser.add("--out DIR", "folder of features to write", Path, required=True)
    parser.add("--label COLUMN", "column with the labels (default: label)")
    parser.add("--text COLUMN", "column with the texts (default: text)")
    parser.add("--root DIR", "folder in which listed images start (default: that of the list)", Path)
    parser.add("--image-size N", "side of the images in pixels (default: that of the embedder)", int)
    parser.add("--batch-size N", "images or texts per call of the embedder (default: 64)", int, 64)
    parser.add("--device auto|cpu|cuda", "device to compute on", default="auto")
    parser.add("--quiet", "print nothing but errors")
    given = parser.read(argv)
    from warpi.datasets.embedding.embed import embed as embed_source

    embedder = given.pop("with")
    result = embed_source(embedder=embedder, **given)
    if not given["quiet"]:
        new = "nothing new" if not result.computed else f"{result.computed:,} of them computed now"
        say(f"{result.path}: {result.rows:,} vectors of {result.dimensions} numbers by {embedder} ({new})")
        say(f"train on them with: warpi fit --data {result.path} --out DIR")
