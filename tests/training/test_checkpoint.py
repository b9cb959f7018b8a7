"""Checkpoints: states survive a round trip, damaged files are refused, and a failed write keeps the old file."""

import base64
import math
import os
import pickle
import random
import resource
import struct
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import safetensors.torch
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor, nn

from warpi.errors import UserError
from warpi.training import checkpoint
from warpi.utils.seeding import RngState, generator, seeded


def identical(a: Any, b: Any) -> bool:
    """Whether two states are equal in types, structure and every bit of every number."""
    if type(a) is not type(b):
        return False
    if isinstance(a, Tensor):
        raw = [t.detach().contiguous().reshape(-1).view(torch.uint8) for t in (a, b)]
        return a.dtype == b.dtype and a.shape == b.shape and torch.equal(*raw)
    if isinstance(a, dict):
        return list(a) == list(b) and all(identical(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(identical, a, b))
    if isinstance(a, float):
        return struct.pack("d", a) == struct.pack("d", b)
    return bool(a == b)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "checkpoint.safetensors"


def previous(file: Path) -> Path:
    return file.with_name(file.name + ".previous")


class Pair(NamedTuple):
    left: Any
    right: Any


class TestRoundTrip:
    def test_every_kind(self, file: Path) -> None:
        state = {
            "none": None,
            "flags": [True, False],
            "numbers": [0, -1, 2**62, -0.0, 0.1, 1e-320, 1.7e308, math.inf, -math.inf, math.nan],
            "text": "ä \u2028 \0 \"'{}",
            "nested": {"a": [{"b": ({"c": [[], {}, ()]},)}]},
            "keys": {0: "zero", "0": "text", -5: None, (1, 2): "pair", True: 1, 2.5: "float"},
            "tensors": {
                "scalar": torch.tensor(3.5),
                "none": torch.empty(0),
                "flat": torch.empty(3, 0, 2),
                "turned": torch.arange(6.0).view(2, 3).T,
                "strided": torch.arange(10)[::3],
            },
        }
        state["dtypes"] = [
            torch.tensor([0, 1]).to(dtype)
            for dtype in (
                *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
                *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
            )
        ]
        checkpoint.save(file, state)
        assert identical(checkpoint.load(file), state)

    def test_floats_are_bitwise_equal(self, file: Path) -> None:
        bits = torch.tensor([0x7FC00001, 0x7F800000, -0x800000, 1, -(2**31), 0x00800000], dtype=torch.int32)
        x = bits.view(torch.float32)  # a nan with a message, infinities, the smallest numbers, minus zero
        checkpoint.save(file, {"x": x, "half": torch.tensor([math.nan, -0.0, 1e-40]).bfloat16()})
        assert torch.equal(checkpoint.load(file)["x"].view(torch.int32), bits)

    leaves = st.none() | st.booleans() | st.integers(-(2**63), 2**63) | st.floats(allow_nan=False) | st.text()
    keys = st.integers() | st.text()

    @given(
        st.dictionaries(
            keys, st.recursive(leaves, lambda s: st.lists(s) | st.dictionaries(st.text(), s) | st.tuples(s))
        )
    )
    @settings(max_examples=15, deadline=None)
    def test_any_tree(self, state: dict[Any, Any]) -> None:
        tensors: dict[str, Tensor] = {}
        assert identical(checkpoint._decode(checkpoint._encode(state, tensors), tensors), state)

    def test_tensors_that_share_memory(self, file: Path) -> None:
        x = torch.arange(6.0)
        state = {"x": x, "again": x, "part": x[2:4], "turned": x.view(2, 3).T}
        checkpoint.save(file, state)
        assert identical(checkpoint.load(file), state)

    def test_the_file_is_independent_of_the_tensors(self, file: Path) -> None:
        x = torch.zeros(3)
        checkpoint.save(file, {"x": x})
        loaded = checkpoint.load(file)["x"]
        x += 1
        loaded += 5  # a change of the loaded tensor does not reach the file either
        assert torch.equal(checkpoint.load(file)["x"], torch.zeros(3))

    def test_a_named_tuple_is_stored_as_a_tuple(self, file: Path) -> None:
        checkpoint.save(file, {"pair": Pair(1, torch.ones(2))})
        assert identical(checkpoint.load(file), {"pair": (1, torch.ones(2))})

    @pytest.mark.parametrize("bad", [{1, 2}, b"bytes", np.zeros(2), object(), lambda: 0, iter([])])
    def test_values_that_cannot_be_stored_raise_before_writing(self, file: Path, bad: Any) -> None:
        with pytest.raises(TypeError, match=f"cannot store a {type(bad).__name__} .*state_dict"):
            checkpoint.save(file, {"deep": [{"inside": bad}]})
        assert not file.exists()

    def test_global_generators(self, file: Path) -> None:
        with seeded(3):
            random.gauss(0, 1)  # keeps a second number for the next call
            np.random.standard_normal()  # noqa: NPY002
            checkpoint.save(file, RngState.capture().to_dict())
            draw = lambda: (random.gauss(0, 1), random.random(), np.random.standard_normal(3), torch.rand(3))  # noqa: NPY002
            wanted = draw()
        with seeded(4):
            RngState.from_dict(checkpoint.load(file)).restore()
            got = draw()
        assert got[:2] == wanted[:2]
        assert np.array_equal(got[2], wanted[2])
        assert torch.equal(got[3], wanted[3])


@dataclass
class Learner:
    """A small method with every kind of state that a method may have."""

    rate: float = 0.1  # a hyper-parameter is not state

    def start(self, seed: int) -> "Learner":
        with seeded(seed):
            self.nets = [nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)) for _ in range(2)]
            self.w = nn.Parameter(torch.randn(2))
        parameters = [p for net in self.nets for p in net.parameters()]
        self.sgd = torch.optim.SGD(parameters, self.rate, momentum=0.9)
        self.adam = torch.optim.Adam([self.w], 0.01, amsgrad=True)
        self.generator = generator(seed)
        self.pair = (nn.Linear(1, 1), generator(seed, "pair"))
        self.memory = torch.zeros(5)
        self.by_class = {0: torch.zeros(2), 1: torch.zeros(2)}
        self.seen: list[Tensor] = []
        self.best: Tensor | None = None
        self.count = 0
        return self

    def step(self) -> Tensor:
        x = torch.randn(6, 3, generator=self.generator)
        z = sum((net(x) for net in self.nets), torch.zeros(6, 2)) * self.w
        loss = (z - torch.rand(2, generator=self.pair[1])).square().mean()
        for optimizer in (self.sgd, self.adam):
            optimizer.zero_grad()
        loss.backward()
        for optimizer in (self.sgd, self.adam):
            optimizer.step()
        self.memory = 0.9 * self.memory + loss.detach()
        self.by_class[self.count % 2] += loss.detach()
        self.seen.append(loss.detach())
        self.best = loss.detach() if self.best is None else torch.minimum(self.best, loss.detach())
        self.count += 1
        return loss.detach()


class TestRestore:
    def test_resumes_bitwise_equal(self, file: Path) -> None:
        whole = Learner().start(0)
        for _ in range(4):
            whole.step()
        checkpoint.save(file, checkpoint.state_of(whole))
        wanted = [whole.step() for _ in range(4)]

        late = Learner().start(99)  # another seed, which must not matter
        before = [*late.nets, late.sgd, late.adam, late.w, late.pair[0], late.generator]
        checkpoint.restore(late, checkpoint.load(file))
        assert identical([late.step() for _ in range(4)], wanted)
        checkpoint.save(file, checkpoint.state_of(whole))
        at_end = checkpoint.load(file)
        checkpoint.save(file, checkpoint.state_of(late))
        assert identical(checkpoint.load(file), at_end)
        now = [*late.nets, late.sgd, late.adam, late.w, late.pair[0], late.generator]
        assert all(a is b for a, b in zip(before, now, strict=True)), "optimizers refer to the weights"

    def test_a_tensor_shared_with_the_inputs_is_not_changed(self, file: Path) -> None:
        given_labels = torch.arange(3)

        class Corrects:
            def __init__(self) -> None:
                self.y = given_labels

        learner = Corrects()
        learner.y = given_labels + 5
        checkpoint.save(file, checkpoint.state_of(learner))
        checkpoint.restore(late := Corrects(), checkpoint.load(file))
        assert torch.equal(late.y, torch.tensor([5, 6, 7]))
        assert torch.equal(given_labels, torch.arange(3))

    def test_tied_weights_stay_tied(self, file: Path) -> None:
        class Tied:
            def __init__(self) -> None:
                self.net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
                self.net[1].weight = self.net[0].weight

        checkpoint.save(file, checkpoint.state_of(a := Tied()))
        checkpoint.restore(b := Tied(), checkpoint.load(file))
        assert b.net[0].weight is b.net[1].weight
        assert torch.equal(a.net[1].weight, b.net[0].weight)

    def test_state_that_start_did_not_create_raises(self, file: Path) -> None:
        learner = Learner().start(0)
        learner.later = 3  # type: ignore[attr-defined]
        checkpoint.save(file, checkpoint.state_of(learner))
        with pytest.raises(UserError, match="later"):
            checkpoint.restore(Learner().start(0), checkpoint.load(file))

    def test_another_network_raises(self, file: Path) -> None:
        checkpoint.save(file, checkpoint.state_of(Learner().start(0)))
        other = Learner().start(0)
        other.nets[0] = nn.Linear(7, 7)
        with pytest.raises(UserError, match="nets") as e:
            checkpoint.restore(other, checkpoint.load(file))
        assert "\n" not in str(e.value)

    @pytest.mark.gpu
    def test_tensors_are_loaded_to_their_kind_of_device(self, file: Path) -> None:
        checkpoint.save(file, {"on": torch.ones(2, device="cuda"), "off": torch.ones(2)})
        state = checkpoint.load(file, "cuda")
        assert state["on"].device.type == "cuda"
        assert state["off"].device.type == "cpu"
        assert checkpoint.load(file)["on"].device.type == "cpu"


SMALL = {"net": {"w": torch.arange(4.0), "b": torch.tensor(True)}, "position": {"epoch": 3}, "rng": [1.5, (2, None)]}


# A file of the first release, compressed. Never regenerate it: if it no longer loads, FORMAT must change.
FIRST = (
    "eNp9ktFq2zAYhTN2sT1G+K/VTZJdxc5NYReFwqAPEJnwV5YbU0c2lswWgqGPtkebJCedx7zKYHyOzicO+v354yquM+z3R+2wRIf7PWzPYA/I"
    "bwVsQSn+lHONmKV5SW9ZuRGZyjJkAlFgIjhPk0TkmqmcsZRteJnznIo8zTeKZ6wCAtah0/6os4SyVk7Cdr3bSTCt0RLI2gxNU5C1d6oGn4Pj"
    "+kFPjmoH44KVTLr3JwV5Q7+wyalNFYwHU9WmdqfJdPpnpCRIOVCqUwnTRlPbuHG+fvoqLEo3dI2Omhejf2L86bRWDVp7Qf60pxOjjW374Eig"
    "Esbiyh2wqS7MPMNCJgaOaF8WAvwtYBU22C9EkreIPnbutJBIpyb+4qu2P6LzN/8D+66+UQetXrq2Nu4rg5FAEgZdulMXhvMg0jCqAwa1KwjE"
    "f6GtKqud9Q4lWeEZOmfuEz5j+L9QRpgIVPp/ipIFjokLyObgt3smZiRb5mJN/hf3+Pj9/Z4sI5wW4/hpdV2/7vzr9fXuw+o3QxPsnA=="
)


def test_a_checkpoint_of_the_first_release(file: Path) -> None:
    file.write_bytes(zlib.decompress(base64.b64decode(FIRST)))
    numbers = {"none": None, "flag": True, "count": 3, "rate": -0.1, "inf": math.inf, "text": "ä", "list": [1, (2,)]}
    tensors = {
        "by class": {0: torch.tensor([1.5, -0.0])},
        "half": torch.tensor([1.0], dtype=torch.bfloat16),
        "mask": torch.tensor([True, False]),
        "scalar": torch.tensor(7),
        "empty": torch.empty(0, 2),
    }
    assert identical(checkpoint.load(file), numbers | tensors)


class TestDamage:
    def test_a_flipped_byte_is_detected_or_harmless(self, file: Path) -> None:
        checkpoint.save(file, SMALL)
        whole = file.read_bytes()
        rng = random.Random(0)
        errors = []
        positions = range(0, len(whole), 3)
        for at in positions:
            flipped = bytearray(whole)
            flipped[at] ^= rng.choice([1 << bit for bit in range(8)] + [0xFF])
            file.write_bytes(flipped)
            try:
                loaded = checkpoint.load(file)
            except UserError as e:
                errors.append(str(e))
            else:  # white space in the header may change
                assert identical(loaded, SMALL), f"byte {at}"
        assert len(errors) > 0.95 * len(positions)
        assert all(str(file) in error and "\n" not in error for error in errors)

    def test_a_flipped_bit_of_the_weights_is_a_checksum_mismatch(self, file: Path) -> None:
        checkpoint.save(file, SMALL)
        damaged = bytearray(file.read_bytes())
        damaged[-3] ^= 1
        file.write_bytes(damaged)
        with pytest.raises(UserError, match="damaged: checksum mismatch; delete it to start from the beginning"):
            checkpoint.load(file)

    def test_a_truncated_file(self, file: Path) -> None:
        checkpoint.save(file, SMALL)
        whole = file.read_bytes()
        for length in [*range(20), *range(20, len(whole), 17), len(whole) - 1]:
            file.write_bytes(whole[:length])
            with pytest.raises(UserError, match="not a complete checkpoint"):
                checkpoint.load(file)

    def test_an_extended_file(self, file: Path) -> None:
        checkpoint.save(file, SMALL)
        with file.open("ab") as f:
            f.write(b"\0")
        with pytest.raises(UserError, match="not a complete checkpoint"):
            checkpoint.load(file)

    def test_a_foreign_file(self, file: Path) -> None:
        safetensors.torch.save_file({"w": torch.ones(2)}, file)
        with pytest.raises(
            UserError, match="not a checkpoint of this version: got None, expected 'warpi-checkpoint/1'"
        ):
            checkpoint.load(file)
        safetensors.torch.save_file({"w": torch.ones(2)}, file, {"format": checkpoint.FORMAT})
        with pytest.raises(UserError, match="checksum"):
            checkpoint.load(file)
        safetensors.torch.save_file({"w": torch.ones(2)}, file, {"format": "warpi-checkpoint/9", "state": "{}"})
        with pytest.raises(UserError, match="got 'warpi-checkpoint/9'"):
            checkpoint.load(file)

    def test_a_folder(self, file: Path) -> None:
        file.mkdir()
        with pytest.raises(UserError, match="not a complete checkpoint"):
            checkpoint.load(file)

    def test_a_pickle_is_refused_and_nothing_in_it_runs(self, file: Path, tmp_path: Path) -> None:
        evil, ran = _Evil(tmp_path / "ran"), tmp_path / "ran"
        for write in (lambda: file.write_bytes(pickle.dumps(evil)), lambda: torch.save(evil, file)):
            write()
            with pytest.raises(UserError, match="not a complete checkpoint"):
                checkpoint.load(file)
        assert not ran.exists()
        pickle.loads(pickle.dumps(evil))
        assert ran.exists(), "otherwise the test would prove nothing"


class _Evil:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


class TestPrevious:
    def test_is_kept_and_suggested(self, file: Path) -> None:
        checkpoint.save(file, {"n": 1})
        assert not previous(file).exists()
        checkpoint.save(file, {"n": 2})
        checkpoint.save(file, {"n": 3})
        assert checkpoint.load(previous(file)) == {"n": 2}
        file.write_bytes(b"")
        with pytest.raises(UserError, match=r"delete it to resume from checkpoint\.safetensors\.previous"):
            checkpoint.load(file)
        file.unlink()
        assert checkpoint.exists(file)
        assert checkpoint.load(file) == {"n": 2}

    def test_a_crash_between_the_two_renames(self, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        checkpoint.save(file, {"n": 1})
        real, calls = os.replace, []

        def dies(source: str, target: str) -> None:
            calls.append(target)
            if len(calls) == 2:
                raise KeyboardInterrupt
            real(source, target)

        monkeypatch.setattr(os, "replace", dies)
        with pytest.raises(KeyboardInterrupt):
            checkpoint.save(file, {"n": 2})
        monkeypatch.undo()
        assert len(list(file.parent.iterdir())) == 2
        assert checkpoint.load(file) == checkpoint.load(previous(file)) == {"n": 1}
        file.unlink()  # as earlier versions left it
        assert checkpoint.load(file) == {"n": 1}
        checkpoint.save(file, {"n": 3})
        assert checkpoint.load(file) == {"n": 3}
        assert checkpoint.load(previous(file)) == {"n": 1}

    def test_the_advice_does_not_suggest_the_damaged_file(self, file: Path) -> None:
        previous(file).write_bytes(b"damaged")
        with pytest.raises(
            UserError, match=r"\.previous is not a complete checkpoint .*; delete it to start from the beginning"
        ):
            checkpoint.load(file)

    def test_nothing_there(self, file: Path) -> None:
        assert not checkpoint.exists(file)
        with pytest.raises(UserError, match="not a complete checkpoint"):
            checkpoint.load(file)

    def test_a_half_written_file_is_not_a_checkpoint(self, file: Path) -> None:
        file.with_name(f".{file.name}.123.part").write_bytes(b"half")
        assert not checkpoint.exists(file)


@contextmanager
def full_disk(n_bytes: int) -> Iterator[None]:
    """Context manager: files cannot exceed this size, as on a full disk. Python turns the signal into an error."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (n_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


class TestFullDisk:
    def test_the_old_file_is_unchanged_and_no_part_is_left(self, file: Path) -> None:
        checkpoint.save(file, {"n": 1})
        before = file.read_bytes()
        with full_disk(100_000), pytest.raises(UserError, match=r"cannot write .*checkpoint\.safetensors: .*unchanged"):
            checkpoint.save(file, {"x": torch.zeros(100_000)})
        assert file.read_bytes() == before
        assert [p.name for p in file.parent.iterdir()] == [file.name]
        checkpoint.save(file, {"n": 2})
        assert checkpoint.load(file) == {"n": 2}

    @pytest.mark.parametrize("call", ["fsync", "replace"])
    def test_any_failing_call_keeps_the_old_file(self, file: Path, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
        checkpoint.save(file, {"n": 1})

        def fails(*_: Any) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(os, call, fails)
        with pytest.raises(
            UserError, match=r"cannot write .*: No space left on device; the previous file is unchanged"
        ):
            checkpoint.save(file, {"n": 2})
        monkeypatch.undo()
        assert checkpoint.load(file) == {"n": 1}
        assert not list(file.parent.glob(".*"))

    def test_no_folder(self, tmp_path: Path) -> None:
        with pytest.raises(UserError, match=r"cannot write .*No such file"):
            checkpoint.save(tmp_path / "absent" / "c.safetensors", {"n": 1})
        (tmp_path / "file").touch()
        with pytest.raises(UserError, match=r"cannot write .*Not a directory"):
            checkpoint.save(tmp_path / "file" / "c.safetensors", {"n": 1})
