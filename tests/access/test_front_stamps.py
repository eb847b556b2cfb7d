"""When a front got a request: told by who has the key, and by nobody else."""

import pytest

from serve.access.front_stamps import ARRIVED, FrontStamps, read_key
from serve.errors import ConfigError

KEY = "k" * 16
NOW_NS = 1_700_000_000 * 10**9
MS = 10**6


def told(value, now_ns=NOW_NS):
    return FrontStamps(KEY).front_ns([("authorization", "Bearer t"), (ARRIVED, value)], now_ns)


def test_what_was_written_is_read():
    assert told(FrontStamps(KEY).value(NOW_NS - 3 * MS)) == 3 * MS
    assert FrontStamps(KEY).front_ns([], NOW_NS) == 0


@pytest.mark.parametrize(
    "value",
    [
        "", f"{NOW_NS // 1000 - 5}", f"{'x' * 16} {NOW_NS // 1000 - 5}", f"{KEY} ", f"{KEY} -5",
        f"{KEY} ٣", f"{KEY} {'9' * 5000}", f"{KEY} {NOW_NS // 1000 + 5}", f"{KEY} 0", b"bytes", "é",
    ],
)  # fmt: skip
def test_what_is_wrong_says_nothing(value):
    assert told(value) == 0


@pytest.mark.parametrize("content", ["short", "a b" * 9, "é" * 20, "k" * 129, "k" * 5000])
def test_a_key_that_is_none_is_refused(tmp_path, content):
    file = tmp_path / "front.key"
    with pytest.raises(ConfigError, match="cannot be read"):
        read_key(file)
    file.write_text(content)
    with pytest.raises(ConfigError, match=r"front\.key"):
        read_key(file)
    file.write_text(f"{KEY}\n")
    assert read_key(file) == KEY
