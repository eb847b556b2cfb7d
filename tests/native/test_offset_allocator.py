"""The range allocator: the compiled module does exactly what its oracle does."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from serve import _core
from tests.native import oracle

BOTH = pytest.mark.parametrize(
    "kind", [_core.OffsetAllocator, oracle.OffsetAllocator], ids=["compiled", "oracle"]
)


class Parity(RuleBasedStateMachine):
    """Any sequence of calls gives equal answers, and ranges in use never overlap."""

    offsets = Bundle("offsets")

    def __init__(self) -> None:
        super().__init__()
        self.compiled = _core.OffsetAllocator(4096, 64)
        self.oracle = oracle.OffsetAllocator(4096, 64)
        self.live: dict[int, int] = {}

    @rule(target=offsets, size=st.integers(0, 1500))
    def alloc(self, size):
        offset = self.compiled.alloc(size)
        assert offset == self.oracle.alloc(size)
        if offset >= 0:
            self.live[offset] = max(1, -(-size // 64)) * 64
        return offset

    @rule(offset=consumes(offsets))
    def free(self, offset):
        if offset >= 0:
            self.compiled.free(offset)
            self.oracle.free(offset)
            del self.live[offset]

    @invariant()
    def agree(self):
        for name in ("capacity_bytes", "used_bytes", "largest_free_bytes"):
            assert getattr(self.compiled, name) == getattr(self.oracle, name)
        assert self.compiled.used_bytes == sum(self.live.values())

    @invariant()
    def disjoint(self):
        end = 0
        for offset in sorted(self.live):
            assert offset >= end
            end = offset + self.live[offset]
        assert end <= self.compiled.capacity_bytes


Parity.TestCase.settings = settings(max_examples=60, stateful_step_count=40)
TestParity = Parity.TestCase


@BOTH
def test_a_request_takes_the_tightest_hole_and_holes_merge(kind):
    ranges = kind(1000, 64)
    assert ranges.capacity_bytes == 960
    first, wide, kept, narrow = (ranges.alloc(size) for size in (64, 256, 64, 128))
    assert (first, wide, kept, narrow) == (0, 64, 320, 384)
    ranges.free(wide)
    ranges.free(narrow)  # merges with the tail of 448 bytes
    assert ranges.largest_free_bytes == 576
    assert ranges.alloc(100) == wide
    for offset in (wide, first, kept):
        ranges.free(offset)
    assert (ranges.used_bytes, ranges.largest_free_bytes) == (0, 960)


@BOTH
def test_no_room_is_an_answer(kind):
    ranges = kind(128, 64)
    assert ranges.alloc(129) == -1
    assert ranges.alloc(2**62) == -1
    assert [ranges.alloc(0), ranges.alloc(1), ranges.alloc(1)] == [0, 64, -1]
    assert ranges.largest_free_bytes == 0


@BOTH
def test_mistakes_are_refused_with_the_number(kind):
    with pytest.raises(ValueError, match=r"power of two, got 48"):
        kind(1000, 48)
    with pytest.raises(ValueError, match=r"capacity 63"):
        kind(63, 64)
    ranges = kind(128, 64)
    with pytest.raises(ValueError, match=r"-1"):
        ranges.alloc(-1)
    with pytest.raises(ValueError, match=r"offset 64"):
        ranges.free(64)
    ranges.free(ranges.alloc(1))
    with pytest.raises(ValueError, match=r"offset 0"):
        ranges.free(0)
