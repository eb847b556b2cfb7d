"""The HTTP port, over real sockets."""

import json
import logging
import socket
import threading
import urllib.error
import urllib.request

import pytest

from serve.errors import ConfigError
from serve.obs.http import HttpPort
from tests.waiting import PATIENCE_S, wait_for


class Facts:
    live = True
    ready = True


@pytest.fixture
def port(database):
    facts = Facts()
    before = set(threading.enumerate())
    http = HttpPort(
        "127.0.0.1",
        0,
        live=lambda: facts.live,
        ready=lambda: facts.ready,
        metrics=lambda: b"up 1\n",
        database=database,
    )
    http.start()
    http.facts = facts
    yield http
    http.stop()
    http.stop()
    wait_for(lambda: set(threading.enumerate()) <= before, "the end of its threads")


def get(port, path):
    url = f"http://127.0.0.1:{port.port}{path}"
    try:
        with urllib.request.urlopen(url, timeout=PATIENCE_S) as answer:
            return answer.status, answer.headers["Content-Type"], answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.headers["Content-Type"], error.read().decode()


def test_health_follows_the_server(port):
    assert get(port, "/v2/health/live")[0] == 200
    assert get(port, "/v2/health/ready")[0] == 200
    port.facts.ready = False
    assert get(port, "/v2/health/ready")[0] == 503
    assert get(port, "/v2/health/live")[0] == 200


def test_metrics_come_as_prometheus_reads_them(port):
    assert get(port, "/metrics") == (200, "text/plain; version=0.0.4; charset=utf-8", "up 1\n")


def test_the_report_as_page_and_as_json(port):
    status, kind, body = get(port, "/report.json")
    assert (status, kind) == (200, "application/json")
    assert json.loads(body)["requests"] == 2000
    status, kind, body = get(port, "/report?since=5m")
    assert (status, kind) == (200, "text/html; charset=utf-8")
    assert body.startswith("<!doctype html>")


def test_a_wrong_duration_or_path_is_said(port):
    status, _, body = get(port, "/report?since=yesterday")
    assert status == 400
    assert "'yesterday' is not a duration" in body
    status, _, body = get(port, "/reprot")
    assert status == 404
    assert "/report" in body


def test_a_database_that_is_gone_is_said(port, tmp_path):
    port._database = tmp_path / "gone.db"
    status, _, body = get(port, "/report")
    assert status == 500
    assert "gone.db: no such report database" in body


def test_a_taken_port_is_named():
    with socket.create_server(("127.0.0.1", 0)) as holder:
        taken = holder.getsockname()[1]
        with pytest.raises(ConfigError, match=f"127.0.0.1:{taken}: already in use"):
            HttpPort("127.0.0.1", taken, live=bool, ready=bool, metrics=bytes, database=None)


def test_a_host_that_is_not_here_is_named():
    with pytest.raises(ConfigError, match=r"cannot listen on 192\.0\.2\.1:8002"):
        HttpPort("192.0.2.1", 8002, live=bool, ready=bool, metrics=bytes, database=None)


def test_a_client_that_hangs_up_is_no_error(port, caplog):
    with caplog.at_level(logging.ERROR):
        for _ in range(3):
            with socket.create_connection(("127.0.0.1", port.port)) as client:
                client.sendall(b"GET /metr")
        assert get(port, "/metrics")[0] == 200
    assert caplog.records == []


def test_a_failure_behind_the_port_is_an_answer(port, caplog):
    port._metrics = lambda: 1 / 0
    status, _, body = get(port, "/metrics")
    assert status == 500
    assert "ZeroDivisionError" not in body
    assert "ZeroDivisionError" in caplog.text
