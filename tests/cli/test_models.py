"""`gnnserve model` against a server."""

import json
import sys

import pytest

from serve import cli
from serve.server.version_facts import VersionChange
from tests.client.small_server import SmallServer
from tests.rpc.conftest import engine, front, reports, server, target

__all__ = ["engine", "front", "reports", "server", "target"]


@pytest.fixture
def gnnserve(monkeypatch, capsys, target):
    """Return a function that runs a command on the server: exit code, stdout and stderr."""

    def run(*arguments, at=target):
        monkeypatch.setattr(sys, "argv", ["gnnserve", "model", *arguments, "--target", at])
        try:
            cli.main()
            code = 0
        except SystemExit as ended:
            code = ended.code or 0
        return code, *capsys.readouterr()

    return run


def test_models_are_listed(gnnserve, engine):
    engine.unload("gin")
    code, table, _ = gnnserve("list")
    assert code == 0
    rows = {line.split("│")[1].strip(): line for line in table.splitlines() if "│" in line}
    assert "READY" in rows["gcn"]
    assert "UNAVAILABLE" in rows["gin"]
    assert "unloaded" in rows["gin"]
    _, printed, _ = gnnserve("list", "--json")
    assert {row["name"]: row["state"] for row in json.loads(printed)} == {
        "gcn": "READY",
        "gin": "UNAVAILABLE",
    }


def test_models_are_unloaded_and_loaded(gnnserve, engine):
    assert gnnserve("unload", "gin")[:2] == (0, "gin: unloaded\n")
    assert engine.infos["gin"].state == "UNAVAILABLE"
    assert gnnserve("load", "gin")[:2] == (0, "gin: serves version 1\n")
    assert engine.infos["gin"].state == "READY"


def test_versions_are_pinned_split_and_rolled_back(gnnserve, engine):
    assert gnnserve("pin", "gcn", "1")[:2] == (0, "gcn: 1=100\n")
    told = "gcn: 1=90 2=10, canary 2\n"
    assert gnnserve("split", "gcn", "1=90", "2=10", "--canary", "2")[:2] == (0, told)
    assert gnnserve("unpin", "gcn")[:2] == (0, "gcn: the newest that loads\n")
    assert gnnserve("shadow", "gcn", "2", "--percent", "5")[1] == (
        "gcn: the newest that loads, shadow 2 of 5 %\n"
    )
    assert gnnserve("shadow", "gcn", "0")[1] == "gcn: the newest that loads\n"
    code, _, said = gnnserve("shadow", "gcn", "2", "--percent", "0")
    assert code
    assert "percent: 0.0 is not above 0" in said
    assert gnnserve("rollback", "gcn")[0] == 0
    assert engine.version_changes == [
        VersionChange(split={1: 100.0}),
        VersionChange(split={1: 90.0, 2: 10.0}, canary=2),
        VersionChange(split={}),
        VersionChange(shadow=2, shadow_percent=5.0),
        VersionChange(shadow=0),
        VersionChange(roll_back=True),
    ]


def test_versions_are_shown(gnnserve):
    _, table, _ = gnnserve("versions", "gcn")
    assert "the newest that loads" in table
    assert "1=100" in table
    _, printed, _ = gnnserve("versions", "--json")
    assert {row["model"]: row["main"] for row in json.loads(printed)} == {"gcn": "1", "gin": "1"}


@pytest.mark.parametrize("shares", [("1",), ("1=a",), ("a=1",), ("1=50", "1=50"), ("=",)])
def test_shares_are_written_version_equals_percent(gnnserve, engine, shares):
    code, _, told = gnnserve("split", "gcn", *shares)
    assert code == 2
    assert "VERSION=PERCENT" in told
    assert engine.version_changes == []


def test_errors_end_the_command(gnnserve, tmp_path):
    code, _, told = gnnserve("load", "nope")
    assert code == 1
    assert "NOT_FOUND" in told
    assert "nope" in told
    code, _, told = gnnserve("list", "--ca", str(tmp_path / "no.pem"))
    assert code == 2
    assert "no.pem" in told
    assert gnnserve("list", at="ftp://x")[0] == 2


def test_a_token_is_sent(gnnserve, monkeypatch):
    small = SmallServer()
    small.token = "right"
    with small.running() as port:
        monkeypatch.setenv("GNNSERVE_TOKEN", "wrong")
        code, _, told = gnnserve("load", "m", at=f"127.0.0.1:{port}")
        assert code == 1
        assert "UNAUTHENTICATED" in told
        gnnserve("load", "m", "--token", "right", at=f"127.0.0.1:{port}")
        assert small.metadata["authorization"] == "Bearer right"
