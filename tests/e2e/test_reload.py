"""SIGHUP: a server takes what it can of its configuration and says what it cannot take."""

import json
import signal
import sqlite3
from contextlib import closing

import pytest

from bench.kit.servers import ServerProcess
from bench.kit.waiting import wait_for
from serve.client import Client

SECTIONS = {"models": {"load": ["gcn"]}, "log": {"format": "json"}}


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("reloaded")
    # Without a terminal, which a hang-up would mean otherwise.
    with ServerProcess(folder, sections=SECTIONS, own_group=True) as found:
        yield found


class Reload:
    """Rewrites the server's file, sends the signal and waits for the last word."""

    def __init__(self, server):
        self._server = server
        self._usual = server.config.read_text()

    def __call__(self, *pairs, last):
        """Replace texts of the usual file; return the lines of the log since."""
        text = self._usual
        for before, after in pairs:
            assert text.count(before) == 1
            text = text.replace(before, after)
        self._server.config.write_text(text)
        seen = len(self._server.log.read_text())
        self._server.process.send_signal(signal.SIGHUP)

        def lines():
            new = self._server.log.read_text()[seen:]
            return new.splitlines() if last in new and new.endswith("\n") else None

        return wait_for(lines, f"{last} in the log")


@pytest.fixture
def reload(server):
    return Reload(server)


def target_over_solo(server):
    with Client(server.target) as client:
        found = client.estimate("gcn", num_nodes=1000, num_edges=5000)
    return found.qos_target_ns / found.solo_ns


def factor_in_database(server):
    with closing(sqlite3.connect(f"file:{server.database}?mode=ro", uri=True)) as db:
        return db.execute("SELECT qos_factor FROM server").fetchone()[0]


SCHEDULING = 'discipline = "rolling"\n'


def test_targets_change_while_it_serves(server, reload):
    assert target_over_solo(server) == pytest.approx(2.0, rel=0.01)
    found = reload((SCHEDULING, SCHEDULING + "qos_factor = 5.0\n"), last="qos_factor")
    (line,) = [json.loads(line) for line in found if "qos_factor" in line]
    assert line["message"] == "configuration changed: scheduling.qos_factor: 2.0 to 5.0"
    assert target_over_solo(server) == pytest.approx(5.0, rel=0.01)
    wait_for(lambda: factor_in_database(server) == 5.0, "the database to tell")
    reload(last="qos_factor")
    assert target_over_solo(server) == pytest.approx(2.0, rel=0.01)


def test_what_needs_a_restart_is_told_and_the_rest_is_taken(server, reload):
    port = str(server.http_port)
    found = reload(
        (f"http_port = {port}", "http_port = 1"),
        ('format = "json"', 'format = "json"\nlevel = "DEBUG"'),
        last="server.http_port",
    )
    told = {line["message"]: line["level"] for line in map(json.loads, found)}
    assert told[f"configuration needs a restart: server.http_port: {port} to 1"] == "WARNING"
    assert told['configuration changed: log.level: "INFO" to "DEBUG"'] == "INFO"
    reload(last="log.level")


def test_a_broken_file_leaves_the_configuration_in_force(server, reload):
    found = reload((SCHEDULING, SCHEDULING + "qos_factor = 0\n"), last="stays as it was")
    (line,) = [json.loads(line) for line in found if "stays as it was" in line]
    assert line["level"] == "ERROR"
    assert "scheduling.qos_factor" in line["message"]
    assert target_over_solo(server) == pytest.approx(2.0, rel=0.01)
    reload(last="the configuration is as it was")


def test_the_form_of_the_log_changes_between_two_lines(server, reload):
    found = reload(('format = "json"', 'format = "text"'), last="log.format")
    assert "log.format" in found[-1]
    assert not found[-1].startswith("{")
    found = reload(last="log.format")
    assert json.loads(found[-1])["message"].startswith("configuration changed: log.format")
