"""`warpi predict`, `warpi embed` and `warpi convert`. torch is imported only when a command runs."""

import shlex
from pathlib import Path
from typing import Any

from warpi.cli.data_flags import add_copied_columns, read_names
from warpi.errors import UserError, format_count
from warpi.utils.flags import Parser
from warpi.utils.terminal import say


def predict(argv: list[str]) -> None:
    parser = Parser("warpi predict", "Predict the classes of new rows with the classifier of a run.")
    parser.add_argument("run", type=Path, metavar="DIR", help="a finished run folder")
    parser.add("--data PATH", "new rows, of the same kind as the run's data; labels are optional", required=True)
    parser.add_output(
        "--csv",
        "file to write: row, ids, predicted class, its probability, and one column p_CLASS per class",
        required=True,
    )
    parser.add("--missing fill|error", "fill missing cells of a table, or refuse them (default: as in training)")
    parser.add(
        "--unknown ignore|error", "ignore or refuse values that training rows do not have (default: as in training)"
    )
    add_copied_columns(parser)
    parser.add("--device auto|cpu|cuda", "device to compute on", default="auto")
    parser.add("--quiet", "print only warnings and errors")
    given = parser.read(argv)
    from warpi.runs.predictions import predict as predict_data

    options = {name: given[name] for name in ("device", "missing", "unknown")}
    ids, keep = (read_names(given[name]) for name in ("id", "keep"))
    predictions = predict_data(given["run"], given["data"], id=ids, keep=keep, **options)
    predictions.to_csv(given["csv"])
    if given["quiet"]:
        return
    unread = f"; omitted: {format_count(predictions.unread, 'unreadable image')}" if predictions.unread else ""
    say(f"{given['csv']}: {format_count(len(predictions), 'row')} of {given['data']}{unread}")
    for name, (accuracy, n) in predictions.accuracy.items():
        doubt = "" if name in ("clean_label", "clean") else "; some of these labels may be wrong"
        source = "folders" if name == "folder" and predictions.paths else f"column {name!r}"
        labels = f"{given['data']} ({source}, {format_count(n, 'row')}{doubt})"
        say(f"accuracy against the labels of {labels}: {accuracy:.2f} %")


def embed(argv: list[str]) -> None:
    parser = Parser(
        "warpi embed",
        "Compute the vectors of images or texts once, with a pretrained model. `warpi fit --data OUT` then trains in "
        "seconds. If the command is interrupted, the same command continues.",
    )
    parser.add_argument(
        "source", metavar="SOURCE", help="a folder of images or .txt files, a list of images, a table, hf:FOLDER"
    )
    parser.add("--with NAME", "embedder, such as timm:resnet50; docs/embeddings.md lists all", required=True)
    parser.add("--out DIR", "folder of features to write", Path, required=True)
    parser.add("--label COLUMN", "column with the labels (default: label)")
    parser.add("--text COLUMN", "column with the texts (default: text)")
    parser.add("--root DIR", "folder that listed paths are relative to (default: that of the list)", Path)
    parser.add("--image-size N", "side of the images in pixels (default: that of the embedder)", int)
    parser.add("--batch-size N", "images or texts per call of the embedder (default: 64)", int, 64)
    parser.add("--device auto|cpu|cuda", "device to compute on", default="auto")
    parser.add("--quiet", "print only warnings and errors")
    given = parser.read(argv)
    from warpi.datasets.embedding.embed import embed as embed_source

    embedder = given.pop("with")
    result = embed_source(embedder=embedder, **given)
    if not given["quiet"]:
        new = "nothing new" if not result.computed else f"{result.computed:,} of them computed now"
        say(
            f"{result.path}: {format_count(result.rows, 'vector')} of {result.dimensions} numbers by {embedder} ({new})"
        )
        say(f"next: warpi fit --data {result.path} --out DIR")


def convert(argv: list[str]) -> None:
    parser = Parser(
        "warpi convert",
        "Turn a table that does not fit into memory (.csv, .tsv, .parquet) into a .npy file of features, block by "
        "block. `warpi fit --data OUT.npy` leaves them in the file; trusted and new rows may still be tables. "
        "With --out FILE.parquet, turn a folder or a list of images into a list that is read faster.",
    )
    parser.add_argument(
        "data",
        metavar="DATA",
        help="a table, a folder of .parquet files or one saved by `datasets`, or a folder or list of images",
    )
    parser.add(
        "--out FILE",
        "a .npy file of features (labels and columns are written next to it), or a .parquet list of images",
        Path,
        required=True,
    )
    parser.add("--root FOLDER", "folder that listed paths are relative to (default: that of the list)", Path)
    parser.add("--label COLUMN", "column with the labels (default: label)")
    parser.add("--drop A,B,...", "columns to ignore")
    parser.add("--types A=KIND,...", "kinds of columns: number, category or date (default: by their content)")
    parser.add("--like FILE.npy", "read the columns as for this file, which was converted before", Path)
    parser.add("--missing fill|error", "fill missing cells, or refuse them (default: fill)", default="fill")
    parser.add("--unknown ignore|error", "ignore unknown values, or refuse them (default: ignore)", default="ignore")
    parser.add("--quiet", "print only warnings and errors")
    given = parser.read(argv)
    if given["out"].suffix == ".parquet":
        _convert_images(given)
        return
    if given["root"] is not None:
        raise UserError("--root can only be used with a list of images; set --out FILE.parquet, or omit --root")
    from warpi.datasets.columns.encode import TableOptions
    from warpi.datasets.columns.to_npy import convert_table

    options = TableOptions(tuple(read_names(given["types"])), missing=given["missing"], unknown=given["unknown"])
    drop = read_names(given["drop"])
    done = convert_table(
        given["data"], given["out"], label=given["label"], drop=drop, like=given["like"], options=options
    )
    if not given["quiet"]:
        say(f"{done.path}: {format_count(done.n_rows, 'row')} of {format_count(done.n_features, 'feature')}")
        say(f"next: warpi fit --data {done.path} --out DIR")


def _convert_images(given: dict[str, Any]) -> None:
    from warpi.datasets.image_folders import convert_images
    from warpi.datasets.load import has_images

    data, out = Path(given["data"]), given["out"]
    if not has_images(given["data"]):
        raise UserError(f"{data} is not a folder or a list of images; to convert a table, set --out FILE.npy")
    unused = [name for name in ("drop", "types", "like") if given[name]]
    if unused:
        raise UserError(f"--{unused[0]} can only be used with tables, but {data} contains images; omit it")
    n, base = convert_images(data, out, root=given["root"], label=given["label"])
    if not given["quiet"]:
        root = "" if base == out.parent else f" --root {shlex.quote(str(base))}"
        say(f"{out}: {format_count(n, 'image')}, with paths relative to {base}")
        say(f"next: warpi fit --data {out}{root} --out DIR")
