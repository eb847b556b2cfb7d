"""Log lines for people and for machines."""

import io
import json
import logging
import subprocess
import sys

import pytest

from bench.kit.waiting import PATIENCE_S
from serve.obs.log import setup_logging


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def root():
    """Yield the root logger and restore it afterwards."""
    logger = logging.getLogger()
    before = logger.handlers[:], logger.level
    yield logger
    logging.captureWarnings(False)
    logger.handlers[:], level = before
    logger.setLevel(level)


def test_machines_get_json_lines_with_the_request(root):
    out = io.StringIO()
    setup_logging(stream=out)
    logging.getLogger("serve.x").warning("lane %d died", 3, extra={"request_uid": "ab", "lane": 3})
    entry = json.loads(out.getvalue())
    assert entry.pop("time").endswith("Z")
    assert entry == {
        "level": "WARNING", "logger": "serve.x", "message": "lane 3 died",
        "request_uid": "ab", "lane": 3,
    }  # fmt: skip


def test_a_traceback_stays_in_its_line(root):
    out = io.StringIO()
    setup_logging("json", stream=out)
    try:
        raise ValueError("no\nway")
    except ValueError:
        logging.getLogger("serve.x").exception("bad", extra={"odd": object()})
    (line,) = out.getvalue().splitlines()
    assert "ValueError: no\nway" in json.loads(line)["exception"]


def test_text_that_is_not_unicode_loses_no_line(root):
    out = io.StringIO()
    setup_logging("json", stream=out)
    extra = {"file": "\udcff.npz", "files": ["\ud800", 3], "of": {"\udc80": 1.5}, "odd": object}
    logging.getLogger("serve.x").warning("%s is no file", "a\udcff", extra=extra)
    entry = json.loads(out.getvalue())
    assert entry["message"] == r"a\udcff is no file"
    assert (entry["file"], entry["files"]) == (r"\udcff.npz", [r"\ud800", 3])
    assert (entry["of"], entry["odd"]) == ({r"\udc80": 1.5}, str(object))


def test_people_get_text(root):
    out = Terminal()
    setup_logging(stream=out)
    logging.getLogger("serve.x").info("hello", extra={"request_uid": "ab"})
    logging.getLogger("serve.x").debug("not this")
    (line,) = out.getvalue().splitlines()
    assert line.endswith("INFO    serve.x: hello  [request_uid=ab]")


def test_setting_up_again_replaces_and_stdout_stays_clean(root, capsys):
    setup_logging("text")
    setup_logging("text", level="WARNING")
    logging.getLogger("serve.x").warning("once")
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("once") == 1
    assert root.handlers[0].stream is sys.stderr


_UNCAUGHT = """
import threading
from serve.obs.log import log_uncaught, setup_logging

class Bad:
    def __del__(self):
        raise KeyError("in a destructor")

setup_logging("json")
log_uncaught()
thread = threading.Thread(target=lambda: 1 / 0, name="worker")
thread.start()
thread.join()
Bad()
raise ValueError("at the end")
"""


def test_errors_that_nothing_catches_are_logged():
    done = subprocess.run(
        [sys.executable, "-c", _UNCAUGHT], capture_output=True, text=True, timeout=PATIENCE_S
    )
    assert (done.returncode, done.stdout) == (1, "")
    found = [json.loads(line) for line in done.stderr.splitlines()]
    errors = ["ZeroDivisionError", "KeyError: 'in a destructor'", "ValueError: at the end"]
    assert len(found) == len(errors)
    for line, error in zip(found, errors, strict=True):
        assert error in line["exception"]
    assert "worker" in found[0]["message"]
