"""`warpi predict`. Imports that load torch wait until the command runs."""

from pathlib import Path

from warpi.cli.data_flags import add_copied_columns, read_names
from warpi.runs.predictions import predict as predict_data
from warpi.utils.flags import Parser
from warpi.utils.terminal import say


def predict(argv: list[str]) -> None:
    parser = Parser("warpi predict", "Predict the classes of new rows with the classifier of a run.")
    parser.add_argument("run", type=Path, metavar="DIR", help="a finished run folder")
    parser.add("--data PATH", "new rows, of the same kind as the run's data; labels are optional", required=True)
    parser.add_output("--csv", "write row, ids, predicted, probability, p_CLASS ...", required=True)
    parser.add("--missing fill|error", "fill missing cells of a table, or refuse them (default: as in training)")
    parser.add(
        "--unknown ignore|error", "ignore values that training rows lack, or refuse them (default: as in training)"
    )
    add_copied_columns(parser)
    parser.add("--device auto|cpu|cuda", "device to compute on", default="auto")
    parser.add("--quiet", "print nothing but errors")
    given = parser.read(argv)
    options = {name: given[name] for name in ("device", "missing", "unknown")}
    ids, keep = (read_names(given[name]) for name in ("id", "keep"))
    predictions = predict_data(given["run"], given["data"], id=ids, keep=keep, **options)
    predictions.to_csv(given["csv"])
    if given["quiet"]:
        return
    unread = f"; {predictions.unread} images cannot be read and are left out" if predictions.unread else ""
    say(f"{given['csv']}: {len(predictions)} rows of {given['data']}{unread}")
    for name, (accuracy, n) in predictions.accuracy.items():
        doubt = "" if name in ("clean_label", "clean") else ", some of which may be wrong"
        say(f"accuracy against the labels of {given['data']} ({name!r}, {n} rows{doubt}): {accuracy:.2f} %")
