"""Sizes and durations as people read and write them."""

import pytest

from serve.errors import ConfigError
from serve.units import format_bytes, format_ms, format_seconds, parse_duration


@pytest.mark.parametrize(
    ("text", "seconds"), [("90s", 90), ("15m", 900), ("1.5h", 5400), ("7d", 604800)]
)
def test_durations_are_parsed(text, seconds):
    assert parse_duration(text, "keep") == seconds


@pytest.mark.parametrize("text", ["", "soon", "0", "90", "-1s", "5 weeks", "9" * 400])
def test_no_duration_is_refused(text):
    with pytest.raises(
        ConfigError, match=r"--keep: '.*' is not a duration; write a number and a unit"
    ):
        parse_duration(text, "--keep")


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.5, "500 ms"), (12.34, "12.3 s"), (245, "4 min 05 s"), (12000, "3 h 20 min")],
)
def test_durations_are_formatted(seconds, text):
    assert format_seconds(seconds) == text


@pytest.mark.parametrize(
    ("milliseconds", "text"), [(0.4242, "0.424 ms"), (12.34, "12.3 ms"), (1234.5, "1.23 s")]
)
def test_latencies_are_formatted(milliseconds, text):
    assert format_ms(milliseconds) == text


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [(0, "0 B"), (512 * 2**10, "512 KiB"), (1.5 * 2**30, "1.5 GiB"), (3 * 2**40, "3 TiB")],
)
def test_sizes_are_formatted(size_bytes, text):
    assert format_bytes(size_bytes) == text
