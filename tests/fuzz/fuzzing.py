"""Makes up inputs for a target from its seeds, and bounds what each costs.

Inputs that a target ends differently for are kept, and changed again. An input that fails is
written to `corpus/TARGET`, from where every later run takes it first. So are, where asked for, the
shortest inputs that end as none of those in there does.
"""

import hashlib
import random
import time
import tracemalloc
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from pathlib import Path

CORPUS = Path(__file__).with_name("corpus")
#: Most inputs that are kept, and most bytes of one.
KEPT, MOST_BYTES = 2000, 1 << 16
#: Most bytes of an input that is added to the corpus without a failure.
MOST_ADDED_BYTES = 2048
#: Every so many inputs, the memory is measured, which takes time.
MEASURED = 50
WORDS = (
    *(
        b"",
        b"\0",
        b"\xff" * 8,
        b"\x80" * 9 + b"\x01",
        b"\x7f",
        b"\x80",
        b"-1",
        b"1e999",
        b"[" * 300,
    ),
    *(b'"x"', b"null", b"{}", b"[]", b"N", b"9" * 30),
)


@dataclass(frozen=True)
class Target:
    """Something that takes bytes.

    `run` returns what tells outcomes apart, and raises AssertionError where an oracle disagrees.
    """

    name: str
    seeds: Callable[[], list[bytes]]
    run: Callable[[bytes], Hashable]
    #: Processor time in s and Python's memory in bytes that any input may take, and each of its
    #: bytes on top. Processor time counts whatever shares the core, so it has room.
    base_s: float = 0.25
    per_byte_s: float = 20e-6
    base_bytes: int = 1 << 20
    per_byte: int = 64


def changed(dice: random.Random, data: bytes, other: bytes) -> bytes:
    """Change, drop, repeat or insert some bytes, or join with a part of another input."""
    for _ in range(dice.randint(1, 4)):
        at = dice.randint(0, len(data))
        end = min(len(data), at + dice.choice((1, 1, 2, 4, 8, 64)))
        part = data[at:end]
        match dice.randrange(6):
            case 0:
                new = dice.randbytes(len(part))
            case 1:
                new = b""
            case 2:
                new = part * dice.choice((2, 3, 100))
            case 3:
                new = dice.choice(WORDS)
            case 4:
                new = other[dice.randint(0, len(other)) :][: dice.randint(1, 200)]
            case _:
                new = bytes(byte ^ 1 << dice.randrange(8) for byte in part)
        data = data[:at] + new + data[end:]
    return data[:MOST_BYTES]


def costs(target: Target, data: bytes, measured: bool) -> Hashable:
    """Run the target; returns its outcome. Raises AssertionError when it cost too much."""
    if measured:
        tracemalloc.start()
    began = time.thread_time()
    try:
        outcome = target.run(data)
        took_s = time.thread_time() - began
        peak = tracemalloc.get_traced_memory()[1] if measured else 0
    finally:
        if measured:
            tracemalloc.stop()
    limit_s = target.base_s + target.per_byte_s * len(data)
    # Measuring memory slows it down. Once, it may have been the collector of the process's objects.
    if not measured and took_s > limit_s:
        took_s = min(_took_s(target, data) for _ in range(3))
        assert took_s <= limit_s, f"{took_s:.3f} s"
    assert peak <= target.base_bytes + target.per_byte * len(data), f"{peak} bytes"
    return outcome


def _took_s(target: Target, data: bytes) -> float:
    began = time.thread_time()
    target.run(data)
    return time.thread_time() - began


def fuzz(
    target: Target, seconds: float, seed: int, corpus: Path = CORPUS, grow: bool = False
) -> int:
    """Run the target on its corpus, its seeds and what comes of them; returns how many inputs.

    To `grow` adds to the corpus what ended as no input before did.
    """
    folder = corpus / target.name
    dice = random.Random(seed)
    kept = [path.read_bytes() for path in sorted(folder.glob("*"))] + target.seeds()
    given = len(kept)
    places: dict[Hashable, int] = {}  # in `kept`, by outcome
    waiting, until, count = kept[::-1], time.monotonic() + seconds, 0
    while waiting or time.monotonic() < until:
        data = waiting.pop() if waiting else changed(dice, dice.choice(kept), dice.choice(kept))
        try:
            outcome = costs(target, data, count % MEASURED == 0)
        except BaseException as error:
            error.add_note(f"{target.name}: the input is kept as {_write(folder, data)}")
            raise
        place = places.get(outcome)
        if count < given:
            places.setdefault(outcome, count)
        elif place is None and len(kept) < KEPT:
            places[outcome] = len(kept)
            kept.append(data)
        elif place is not None and place >= given and len(data) < len(kept[place]):
            kept[place] = data
        count += 1
    for data in kept[given:] if grow else []:
        if len(data) <= MOST_ADDED_BYTES:
            _write(folder, data)
    return count


def _write(folder: Path, data: bytes) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / hashlib.sha256(data).hexdigest()[:16]
    path.write_bytes(data)
    return path
