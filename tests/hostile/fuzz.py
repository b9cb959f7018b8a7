"""Feed damaged and hostile files to the commands: `python tests/hostile/fuzz.py --seconds 600 --seed 0`.

A case is a valid file with some mutations, and a command that reads it. The command must succeed, or print one line and
exit with code 2. Anything else is a bug: a traceback, a case that takes over 30 seconds, or more than 2 GiB of memory.
The seed of a case repeats it: `--only SEED`. Exits with code 1 if there was a bug.
"""

import argparse
import contextlib
import csv
import io
import json
import logging
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from pathlib import Path
from typing import Any

HOSTILE: tuple[Any, ...] = (
    *(None, True, 0, -1, 1e308, -0.0, 2**63, 10**30, float("nan"), float("inf"), "", " ", "nan", "-inf", "1e999"),
    *("[/b]", "\x1b[2J", "<script>", "a\nb", "\u202e", "\0", "\ud800", "../../etc/passwd", "/etc/passwd", "é" * 300),
    *([], {}, [[]], {"a": []}, [None] * 5, {"tensor": "0"}, {"list": 3}),
)
SECONDS_PER_CASE = 30
MEMORY = 2 * 2**30


class Hang(BaseException):
    """A case took too long."""


class Corpus:
    """Valid files of each kind, and the commands that read them."""

    def __init__(self, folder: Path) -> None:
        import numpy as np
        import pyarrow as pa
        from PIL import Image
        from pyarrow import parquet

        from warpi.cli.app import main

        self.folder = folder
        self.clean = folder / "clean"
        self.clean.mkdir(parents=True)
        rng = np.random.default_rng(0)
        x = rng.normal(size=(60, 3))
        y = np.arange(60) % 3
        names = ["p", "q", "r"]
        rows = [[*map(str, x[i].round(3)), ("u", "v")[i % 2], names[y[i]]] for i in range(60)]
        with (self.clean / "t.csv").open("w", newline="") as file:
            csv.writer(file).writerows([["a", "b", "c", "word", "label"], *rows])
        np.savez(self.clean / "t.npz", x=x, y=y, clean=y)
        np.save(self.clean / "t.npy", x)
        np.save(self.clean / "y.npy", y)
        parquet.write_table(pa.table({"a": x[:, 0], "label": [names[k] for k in y]}), self.clean / "t.parquet")
        images = self.clean / "images"
        for i in range(12):
            (images / names[i % 3]).mkdir(parents=True, exist_ok=True)
            Image.fromarray(rng.integers(256, size=(9, 9, 3), dtype=np.uint8)).save(images / names[i % 3] / f"{i}.png")
        listed = [f"{names[i % 3]}/{i}.png,{names[i % 3]}" for i in range(12)]
        (images / "list.csv").write_text("path,label\n" + "\n".join(listed) + "\n")
        run = str(self.clean / "run")
        data = str(self.clean / "t.csv")
        assert main(["fit", "--data", data, "--method", "ce", "--epochs", "1", "--test", "0.2", "--out", run]) == 0
        assert main(["audit", run, "--folds", "0", "--quiet"]) == 0
        assert (
            main(["corrupt", "--data", data, "--noise", "symmetric:0.2", "--out", str(self.clean / "noise.json")]) == 0
        )
        assert main(["pick", "9", "--data", data, "--csv", str(self.clean / "check.csv")]) == 0

    def targets(self, work: Path) -> dict[str, list[list[str]]]:
        """The files to change, relative to the folder, and the commands that read each."""
        run, out = str(work / "run"), str(work / "out.json")
        predict = ["predict", run, "--data", str(work / "t.csv"), "--csv", str(work / "p.csv")]
        load = lambda name: ["corrupt", "--data", str(work / name), "--noise", "symmetric:0.2", "--out", out]
        labels = ["--labels", str(work / "noise.json"), "--out", str(work / "new"), "--method", "ce", "--epochs", "1"]
        correct = ["correct", run, "--out", str(work / "c.csv")]
        opened = [predict, ["report", run], ["check", run], ["audit", run, "--folds", "0"], correct]
        opened += [["review", run, "--export", str(work / "l.csv")], ["pick", "5", run, "--csv", str(work / "n.csv")]]
        opened += [["figures", run, "--arrays"], ["fit", "--out", run, "--resume"]]
        return {
            **{name: [load(name), ["check", str(work / name)]] for name in ("t.csv", "t.npz", "t.npy", "t.parquet")},
            "y.npy": [load("t.npy")],
            "images/p/0.png": [load("images")],
            "images/list.csv": [load("images/list.csv"), ["check", str(work / "images/list.csv")]],
            "noise.json": [["fit", "--data", str(work / "t.csv"), *labels]],
            "check.csv": [["pick", "--estimate", str(work / "check.csv")]],
            "run/spec.json": opened,
            "run/results.jsonl": opened[1:4],
            "run/checkpoint.safetensors": [predict, ["check", run], opened[-1]],
            "run/audit.npz": [correct, ["check", run]],
        }


def mutate(content: bytes, name: str, rng: random.Random) -> bytes:
    """A changed copy of a file: changes of its structure, or of its bytes."""
    if rng.random() < 0.7:
        with contextlib.suppress(UnicodeError, ValueError):
            if name.endswith((".json", ".jsonl")):
                lines = content.decode().splitlines() if name.endswith("l") else [content.decode()]
                return "\n".join(json.dumps(_mutate_json(json.loads(line), rng)) for line in lines).encode()
            if name.endswith(".csv"):
                return _mutate_csv(content.decode(), rng)
            if name.endswith(".safetensors"):
                return _mutate_checkpoint(content, rng)
    return _mutate_bytes(content, rng)


def _mutate_json(value: Any, rng: random.Random) -> Any:
    """Replace, remove or add some of the values at any depth."""
    places: list[tuple[Any, Any]] = []

    def walk(node: Any) -> None:
        keys = node.keys() if isinstance(node, dict) else range(len(node)) if isinstance(node, list) else ()
        for key in list(keys):
            places.append((node, key))
            walk(node[key])

    box = [value]
    walk(box)
    for _ in range(rng.choice((1, 1, 2, 5))):
        node, key = rng.choice(places)
        kind = rng.random()
        if kind < 0.7:
            with contextlib.suppress(IndexError):
                node[key] = rng.choice(HOSTILE)
        elif isinstance(node, dict):
            node.pop(key, None)
            if kind > 0.85:
                node[str(rng.choice(HOSTILE))] = rng.choice(HOSTILE)
        elif node is not box and node:
            node.pop()
    return box[0]


def _mutate_csv(text: str, rng: random.Random) -> bytes:
    rows = [*csv.reader(io.StringIO(text))]
    for _ in range(rng.choice((1, 2, 8))):
        row = rng.choice([rows[0], rng.choice(rows)])
        if not row:
            continue
        kind = rng.random()
        if kind < 0.7:
            row[rng.randrange(len(row))] = str(rng.choice(HOSTILE))
        elif kind < 0.8:
            row.pop()
        elif kind < 0.9:
            row.append(str(rng.choice(HOSTILE)))
        else:
            rows.append(list(row))
    out = io.StringIO(newline="")
    csv.writer(out, lineterminator=rng.choice(("\n", "\r\n", "\r"))).writerows(rows)
    return (b"\xef\xbb\xbf" if rng.random() < 0.1 else b"") + out.getvalue().encode(errors="surrogatepass")


def _mutate_checkpoint(content: bytes, rng: random.Random) -> bytes:
    """Change the stored values and write a right checksum, as an attacker would."""
    import safetensors.torch

    from warpi.training import checkpoint

    with tempfile.NamedTemporaryFile(suffix=".safetensors") as file:
        file.write(content)
        file.flush()
        with safetensors.safe_open(file.name, "pt") as stored:
            tree = json.loads(stored.metadata()["state"])
            tensors = {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118
    if rng.random() < 0.6:
        tree = _mutate_json(tree, rng)
    else:
        name = rng.choice([*tensors])
        changed = [
            tensors[name].reshape(-1)[:1],
            tensors[name].double(),
            tensors[name].reshape(-1),
            tensors[name] * float("nan"),
        ]
        tensors[name] = rng.choice(changed).contiguous()
    text = json.dumps(tree)
    header = {"format": checkpoint.FORMAT, "state": text, "sha256": checkpoint._digest(text, tensors)}
    return bytes(safetensors.torch.save(tensors, header))


def _mutate_bytes(content: bytes, rng: random.Random) -> bytes:
    data = bytearray(content)
    for _ in range(rng.choice((1, 1, 3, 20))):
        at = rng.randrange(len(data) + 1)
        kind = rng.randrange(5)
        if kind == 0 and data:
            data[at % len(data)] ^= 1 << rng.randrange(8)
        elif kind == 1:
            del data[at:]
        elif kind == 2:
            data[at:at] = rng.randbytes(rng.choice((1, 8, 300)))
        elif kind == 3:
            data[at : at + 8] = rng.choice((b"\xff" * 8, bytes(8), b"\x7f" + b"\xff" * 7))
        else:
            data[at:at] = data[at // 2 : at]
    return bytes(data)


def run_case(corpus: Corpus, seed: int, target: str = "") -> tuple[str, str]:
    """Run one case; return its target and the bug, or ''."""
    from warpi.cli.app import main

    rng = random.Random(seed)
    work = corpus.folder / "work"
    shutil.rmtree(work, ignore_errors=True)
    shutil.copytree(corpus.clean, work)
    targets = corpus.targets(work)
    name = rng.choice([name for name in targets if name.startswith(target)])
    file = work / name
    file.write_bytes(mutate(file.read_bytes(), name, rng))
    command = rng.choice(targets[name])
    error = io.StringIO()
    signal.alarm(SECONDS_PER_CASE)
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(error):
            code: object = main(command)
    except SystemExit as e:
        code = e.code
    except Hang:
        return name, f"{command[0]} takes more than {SECONDS_PER_CASE} s"
    except BaseException:
        return name, f"{command[0]}: {traceback.format_exc(limit=-4)}"
    finally:
        signal.alarm(0)
    lines = [line for line in error.getvalue().splitlines() if line.startswith("warpi: ")]
    if code not in (0, 1, 2) or (code == 2 and not lines) or (code == 1 and command[0] not in ("check", "report")):
        return name, f"{command[0]}: exit code {code}, {error.getvalue()[-500:]!r}"
    return name, ""


def fuzz(seconds: float, cases: float, seed: int = 0, only: int | None = None, target: str = "") -> dict[str, Any]:
    """Run cases for some seconds; return their number per target, the bugs and the peak memory in MiB."""

    def hang(*_: object) -> None:
        raise Hang

    signal.signal(signal.SIGALRM, hang)
    logging.getLogger("warpi").setLevel(logging.ERROR)
    bugs: dict[int, str] = {}
    counts: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as folder:
        corpus = Corpus(Path(folder))
        end = time.monotonic() + seconds
        case = seed * 10**6 if only is None else only
        while time.monotonic() < end and counts.total() < cases:
            name, bug = run_case(corpus, case, target)
            counts[name] += 1
            if bug:
                bugs[case] = f"{name}: {bug}"
                print(f"--only {case}: {bugs[case]}", file=sys.stderr, flush=True)
            case += 1
            if only is not None:
                break
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    if peak * 2**20 > MEMORY:
        bugs[-1] = f"peak memory {peak} MiB"
    return {"cases": counts.total(), "bugs": bugs, "peak_mib": peak, "targets": dict(sorted(counts.items()))}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Feed damaged and hostile files to the commands of warpi.")
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--cases", type=float, default=float("inf"), help="stop after this number of cases")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, help="repeat one case")
    parser.add_argument("--target", default="", help="only files whose name starts with this, such as run/spec.json")
    flags = parser.parse_args()
    result = fuzz(flags.seconds, flags.cases, flags.seed, flags.only, flags.target)
    print(json.dumps(result, indent=1))
    sys.exit(bool(result["bugs"]))
