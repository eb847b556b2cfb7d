"""docs/client.md: its programs run, and its tables are the client's."""

import re
import shutil
from inspect import signature

import gnnserve
from serve.client.errors import error_for
from serve.client.requests import RequestFields
from serve.errors import ErrorCode
from tests.client.certificates import Authority
from tests.docs.pages import PAGES, texts
from tests.e2e.support import run_python

PAGE = "docs/client.md"


def test_its_python_runs(server, tmp_path):
    one, several, many = (
        run_python(["-c", text.replace("127.0.0.1:8001", server.target)], tmp_path)
        for text in texts(PAGE, "python", "server")
    )
    assert "(3, 5)" in one
    assert [line.split()[0] for line in several.splitlines()] == ["gcn", "sage", "gat:1"]
    assert "0 (3, 5)" in many
    assert "1 INVALID_ARGUMENT" in many


def test_its_targets_are_taken(tmp_path):
    authority = Authority(tmp_path / "made")
    certificate, key = authority.issue("me")
    for file, name in (
        (authority.certificate, "private-ca.pem"),
        (authority.certificate, "ca.pem"),
        (certificate, "me.pem"),
        (key, "me.key"),
    ):
        shutil.copy(file, tmp_path / name)
    [text] = texts(PAGE, "python", "targets")
    run_python(["-c", text], tmp_path)


def test_every_option_of_the_client_is_in_its_table():
    table = PAGES[PAGE].partition("| option of `Client` |")[2].partition("\n\n")[0]
    told = set(re.findall(r"^\| `(\w+)` \|", table, re.M))
    assert told == set(signature(gnnserve.Client).parameters) - {"target"}


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
