"""Run commands on a run folder and list every file that is opened and every process that is started.

Arguments: the run folder, the data, and a folder for output with people.csv, studio.json, x.npy and y.npy.
Prints one line of JSON.
"""

import json
import os
import sys

opened: set[str] = set()
started: list[str] = []


def _record(event: str, args: tuple[object, ...]) -> None:
    if event == "open" and isinstance(args[0], str | bytes | os.PathLike):
        opened.add(os.path.realpath(os.fsdecode(args[0])))
    elif event in ("subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "pty.spawn", "socket.connect"):
        started.append(f"{event} {args!r:.200}")


def main(run: str, data: str, out: str) -> None:
    sys.addaudithook(_record)
    from warpi.cli.app import main as warpi
    from warpi.datasets import arrays

    arrays.LARGE = 0  # x.npy stays in its file, as a large one does
    quick = ["--method", "ce", "--epochs", "1", "--out", f"{out}/blocks"]
    commands = {
        "predict": ["predict", run, "--data", data, "--csv", f"{out}/p.csv"],
        "audit": ["audit", run, "--folds", "0", "--csv", f"{out}/a.csv"],
        "report": ["report", run, "--out", f"{out}/page"],
        "review": ["review", run, "--export", f"{out}/labels.csv"],
        "fit": ["fit", "--out", run, "--resume"],
        "check": ["check", run],
        "correct": ["correct", run, "--out", f"{out}/c.csv"],
        "pick": ["pick", "5", run, "--csv", f"{out}/n.csv"],
        "duplicates": ["duplicates", data, "--csv", f"{out}/d.csv"],
        "convert": ["convert", data, "--out", f"{out}/converted.npy"],
        "annotators": ["annotators", f"{out}/people.csv", "--out", f"{out}/consensus.csv"],
        "import": ["label-studio", "import", f"{out}/studio.json", "--out", f"{out}/studio"],
        "export": ["label-studio", "export", run, "--out", f"{out}/tasks.json"],
        "blocks": ["fit", "--data", f"{out}/x.npy", "--label", f"{out}/y.npy", "--shuffle", "blocks", *quick],
    }
    codes: dict[str, object] = {}
    for name, command in commands.items():
        try:
            codes[name] = warpi(command)
        except SystemExit as error:
            codes[name] = error.code
    print("\n" + json.dumps({"codes": codes, "opened": sorted(opened), "started": started}))


if __name__ == "__main__":
    main(*sys.argv[1:])
