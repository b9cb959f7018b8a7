"""Feed damaged and hostile files to the commands: `python tests/hostile/fuzz.py --seconds 600 --seed 0`.

A case is a valid file with some mutations, and a command that reads it. The command must succeed, or print one line and
exit with code 2. Anything else is a bug: a traceback, more than 30 seconds of CPU time or 2 minutes, or over 2 GiB.
The file and the seed of a case repeat it: `--target FILE --only SEED`. Exits with code 1 if there was a bug.
The file, the change and the command are drawn independently, so a new kind of file does not change older cases.
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
import sqlite3
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from corpus import load_classifier, targets, write_corpus

HOSTILE: tuple[Any, ...] = (
    *(None, True, 0, -1, 1e308, -0.0, 2**63, 10**30, float("nan"), float("inf"), "", " ", "nan", "-inf", "1e999"),
    *("[/b]", "\x1b[2J", "<script>", "a\nb", "\u202e", "\0", "\ud800", "../../etc/passwd", "/etc/passwd", "é" * 300),
    *([], {}, [[]], {"a": []}, [None] * 5, {"tensor": "0"}, {"list": 3}),
)
SECONDS_PER_CASE = 30
MEMORY = 2 * 2**30


class Hang(BaseException):
    """A case took too long."""


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
            if name.endswith((".npy", ".npz")):
                return _mutate_arrays(content, rng)
            if name.endswith(".sqlite"):
                return _mutate_decisions(content, rng)
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


def _mutate_arrays(content: bytes, rng: random.Random) -> bytes:
    """Arrays of other types, shapes and values, in one file."""
    import numpy as np

    loaded = np.load(io.BytesIO(content))
    arrays = {"": loaded} if isinstance(loaded, np.ndarray) else dict(loaded)
    name = rng.choice([*arrays])
    x = arrays[name]
    changes: tuple[Callable[[], Any], ...] = (
        *(lambda: x[:0], lambda: x.reshape(-1)[0], lambda: x[None], lambda: x.reshape(-1), lambda: x[: len(x) // 2]),
        *(lambda: x.astype(str), lambda: x.astype(bool), lambda: x.astype(complex), lambda: x.astype(">f4")),
        *(lambda: x.astype("M8[s]"), lambda: x.astype([("a", "f8")]), lambda: x.astype(np.uint8), lambda: x.T),
        *(lambda: x * np.nan, lambda: x * 1e308 * 10, lambda: np.full(x.shape, 2**62), lambda: -x, lambda: x * 0),
        lambda: np.full(x.shape, rng.choice([v for v in HOSTILE if isinstance(v, str) and v.isprintable()])),
        lambda: np.lib.stride_tricks.as_strided(x, (*x.shape, 3), (*x.strides, 0)),
    )
    with np.errstate(all="ignore"), contextlib.suppress(IndexError, TypeError, ValueError):
        arrays[name] = rng.choice(changes)()
    if rng.random() < 0.1:
        arrays.pop(name)
    out = io.BytesIO()
    if "" in arrays or not name:
        np.save(out, arrays.get("", x))
    else:
        np.savez(out, **arrays)
    return out.getvalue()


def _mutate_decisions(content: bytes, rng: random.Random) -> bytes:
    """Other values in the tables, which a valid file could not have."""
    with tempfile.NamedTemporaryFile(suffix=".sqlite") as file:
        file.write(content)
        file.flush()
        with contextlib.closing(sqlite3.connect(file.name, isolation_level=None)) as db:
            db.execute("PRAGMA journal_mode = DELETE")
            db.execute("PRAGMA ignore_check_constraints = ON")
            (trigger,) = db.execute("SELECT sql FROM sqlite_master WHERE name = 'log_stays'").fetchone()
            db.execute("DROP TRIGGER log_stays")
            value = rng.choice([v for v in HOSTILE if v is None or (isinstance(v, float | str) and v != "\ud800")])
            table, column = rng.choice(
                [("about", "value"), *(("log", c) for c in ("time", "tab", "step", "row", "action", "label", "given"))]
            )
            with contextlib.suppress(sqlite3.Error, OverflowError):
                db.execute(f"UPDATE {table} SET {column} = ? WHERE abs(random() % 3) = 0", (value,))
            db.execute(trigger)
            if rng.random() < 0.1:
                db.execute(f"DROP {rng.choice(('TABLE about', 'TABLE log', 'VIEW valid', 'VIEW standing'))}")
        return Path(file.name).read_bytes()


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


def run_case(folder: Path, seed: int, target: str = "") -> tuple[str, str]:
    """Run one case; return its target and the bug, or ''."""
    from warpi.cli.app import main

    work = folder / "work"
    shutil.rmtree(work, ignore_errors=True)
    shutil.copytree(folder / "clean", work)
    commands = targets(work)
    name = random.Random(f"{seed} file").choice([name for name in commands if name.startswith(target)])
    file = work / name
    file.write_bytes(mutate(file.read_bytes(), name, random.Random(f"{seed} {name}")))
    command = random.Random(f"{seed} command").choice(commands[name])
    error = io.StringIO()
    signal.setitimer(signal.ITIMER_PROF, SECONDS_PER_CASE)
    signal.alarm(4 * SECONDS_PER_CASE)
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(error):
            code: object = load_classifier(command[1:]) if command[0] == "load-classifier" else main(command)
    except SystemExit as e:
        code = e.code
    except Hang:
        return name, f"{command[0]} takes more than {SECONDS_PER_CASE} s of CPU time, or waits four times as long"
    except BaseException:
        return name, f"{command[0]}: {traceback.format_exc(limit=-4)}"
    finally:
        signal.alarm(0)
        signal.setitimer(signal.ITIMER_PROF, 0)
    lines = [line for line in error.getvalue().splitlines() if line.startswith("warpi: ")]
    if code not in (0, 1, 2) or (code == 2 and not lines) or (code == 1 and command[0] not in ("check", "report")):
        return name, f"{command[0]}: exit code {code}, {error.getvalue()[-500:]!r}"
    return name, ""


def fuzz(seconds: float, cases: float, seed: int = 0, only: int | None = None, target: str = "") -> dict[str, Any]:
    """Run cases for some seconds; return their number per target, the bugs and the peak memory in MiB."""

    def hang(*_: object) -> None:
        raise Hang

    from warpi.datasets import arrays

    arrays.LARGE = 0  # features of float32 stay in their file, as large ones do
    signal.signal(signal.SIGALRM, hang)
    signal.signal(signal.SIGPROF, hang)
    logging.getLogger("warpi").setLevel(logging.ERROR)
    bugs: dict[int, str] = {}
    counts: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as folder:
        with contextlib.redirect_stdout(io.StringIO()):
            write_corpus(Path(folder) / "clean")
        end = time.monotonic() + seconds
        case = seed * 10**6 if only is None else only
        while time.monotonic() < end and counts.total() < cases:
            name, bug = run_case(Path(folder), case, target)
            counts[name] += 1
            if bug:
                bugs[case] = f"{name}: {bug}"
                print(f"--target {name} --only {case}: {bug}", file=sys.stderr, flush=True)
            case += 1
            if only is not None:
                break
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    if peak * 2**20 > MEMORY:
        bugs[-1] = f"peak memory {peak} MiB"
    return {"cases": counts.total(), "bugs": bugs, "peak_mib": peak, "targets": dict(sorted(counts.items()))}


def fuzz_together(jobs: int, words: list[str], seed: int) -> dict[str, Any]:
    """The same in several processes, whose cases differ."""
    program = [sys.executable, __file__, *words, "--jobs", "1", "--seed"]
    started = [subprocess.Popen([*program, str(seed + k)], stdout=subprocess.PIPE, text=True) for k in range(jobs)]
    done = [json.loads(process.communicate()[0]) for process in started]
    counts = sum((Counter(each["targets"]) for each in done), Counter[str]())
    bugs = {case: bug for each in done for case, bug in each["bugs"].items()}
    peak = max(each["peak_mib"] for each in done)
    return {"cases": counts.total(), "bugs": bugs, "peak_mib": peak, "targets": dict(sorted(counts.items()))}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Feed damaged and hostile files to the commands of warpi.")
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--cases", type=float, default=float("inf"), help="stop after this number of cases")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, help="repeat one case")
    parser.add_argument("--target", default="", help="only files whose name starts with this, such as run/spec.json")
    parser.add_argument("--jobs", type=int, default=1, help="number of processes")
    flags = parser.parse_args()
    if flags.jobs > 1:
        result = fuzz_together(flags.jobs, sys.argv[1:], flags.seed)
    else:
        result = fuzz(flags.seconds, flags.cases, flags.seed, flags.only, flags.target)
    print(json.dumps(result, indent=1))
    sys.exit(bool(result["bugs"]))
