"""Made-up bytes for what takes bytes from others.

FUZZ_S=600 makes it long. FUZZ_GROW=1 adds inputs that end as none before to the corpora.
"""

import itertools
import os
import random
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.fuzz.fuzzing import CORPUS, Target, changed, fuzz
from tests.fuzz.targets import TARGETS

SECONDS = float(os.environ.get("FUZZ_S", 3))
SEED = int(os.environ.get("FUZZ_SEED", 1))
GROW = os.environ.get("FUZZ_GROW") == "1"


@pytest.mark.timeout(900 + SECONDS)
@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)
def test_whatever_the_bytes_are(target):
    count = fuzz(target, SECONDS, SEED, grow=GROW)
    assert count >= len(target.seeds())


def found_by(run, tmp_path, **limits):
    """The input that a target's failure left behind."""
    target = Target("made_up", lambda: [b"a seed of some bytes"], run, **limits)
    with pytest.raises(AssertionError) as caught:
        fuzz(target, 300, 1, tmp_path)
    (path,) = (tmp_path / "made_up").iterdir()
    assert str(path) in caught.value.__notes__[0]
    return path.read_bytes()


def test_an_oracle_that_disagrees_is_heard_and_the_input_kept(tmp_path):
    def run(data):
        assert b"some" in data
        return len(data)

    assert b"some" not in found_by(run, tmp_path)
    # It comes first in the next run.
    assert found_by(run, tmp_path) == next(Path(tmp_path / "made_up").iterdir()).read_bytes()


def test_an_input_that_takes_long_is_found(tmp_path):
    def run(data):
        until = time.thread_time() + (0.05 if len(data) > 30 else 0)
        while time.thread_time() < until:
            pass
        return len(data)

    assert len(found_by(run, tmp_path, base_s=0.02, per_byte_s=0)) > 30


def test_an_input_that_takes_much_memory_is_found(tmp_path):
    found_by(lambda data: len(bytes(1 << 22)), tmp_path)


def test_a_corpus_grows_by_the_shortest_inputs_that_end_as_none_did(tmp_path, monkeypatch):
    """A look at the clock takes a second here."""
    clock = SimpleNamespace(monotonic=itertools.count().__next__, thread_time=time.thread_time)
    monkeypatch.setattr("tests.fuzz.fuzzing.time", clock)
    target = Target("made_up", lambda: [b"a seed of some bytes"], lambda data: b"a" in data)
    fuzz(target, 1000, 1, tmp_path, grow=True)
    (path,) = (tmp_path / "made_up").iterdir()
    assert path.read_bytes() == b""
    fuzz(target, 1000, 2, tmp_path, grow=True)
    assert list((tmp_path / "made_up").iterdir()) == [path]


def test_corpora_are_small():
    sizes = [path.stat().st_size for path in CORPUS.rglob("*") if path.is_file()]
    assert sum(sizes) <= 2 << 20
    assert len(sizes) <= 2000


def test_changes_are_those_of_the_seed():
    texts = [changed(random.Random(seed), b"one text", b"another") for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]
