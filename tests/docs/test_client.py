"""docs/client.md: its programs run, and its tables are the client's."""

import re

import gnnserve
from serve.client.errors import error_for
from serve.client.requests import RequestFields
from serve.errors import ErrorCode
from tests.docs.pages import PAGES, texts
from tests.e2e.support import run_python

PAGE = "docs/client.md"


def test_its_python_runs(server, tmp_path):
    one, many = (
        run_python(["-c", text.replace("127.0.0.1:8001", server.target)], tmp_path)
        for text in texts(PAGE, "python", "server")
    )
    assert "(3, 5)" in one
    assert "0 (3, 5)" in many
    assert "1 INVALID_ARGUMENT" in many


def test_every_option_and_error_is_in_its_table():
    rows = re.findall(r"^\| (`.*?) \| (.*?) \|", PAGES[PAGE], re.M)
    options = {name for cell, _ in rows for name in re.findall(r"`(\w+)`", cell)}
    assert set(RequestFields.__annotations__) <= options
    told = {(cell.strip("`"), status) for cell, status in rows if status.isupper()}
    codes = {code.status for code in ErrorCode} - {"INTERNAL"}
    assert told == {(type(error_for(code, "")).__name__, code) for code in codes}


def test_every_method_exists():
    table = PAGES[PAGE].partition("## Other calls")[2]
    for name in re.findall(r"`(\w+)\(", table):
        assert hasattr(gnnserve, name) or hasattr(gnnserve.Client, name)
