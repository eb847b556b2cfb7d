"""Lines that a process prints, read here without one."""

import os

import pytest

from bench.kit.waiting import wait_for
from serve.ipc.printed import MARK
from serve.server.printed_lines import PrintedLines


@pytest.mark.parametrize("odd", [b'{"logger":"\xff"}', b'{"more":' + b"[" * 5000])
def test_what_looks_like_a_message_and_is_none_is_a_line_like_others(caplog, odd):
    lines = PrintedLines()
    ends = lines.open("lane 0")
    try:
        os.write(ends[1], MARK + odd + b"\nthe next line\n")
        wait_for(lambda: "the next line" in caplog.messages, "the line behind it")
        assert not [record for record in caplog.records if record.exc_info]
    finally:
        for end in ends:
            os.close(end)
        lines.close()
