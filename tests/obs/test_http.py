"""The HTTP port, over real sockets."""

import gzip
import json
import logging
import socket
import threading
import urllib.error
import urllib.request
from collections import Counter
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager, suppress

import pytest

import serve.obs.http
from bench.kit.waiting import PATIENCE_S, wait_for
from serve.errors import ConfigError
from serve.obs import offline
from serve.obs.exposition import OPEN, PLAIN
from serve.obs.http import HttpPort, listening_socket

#: By content type; long enough to be compressed.
METRICS = {PLAIN: b"up 1\n" * 500, OPEN: b"up 1\n" * 500 + b"# EOF\n"}


class Facts:
    live = True
    ready = True


@pytest.fixture
def port(database):
    facts = Facts()
    before = threads()
    listener = listening_socket("127.0.0.1", 0)
    http = HttpPort(
        listener,
        live=lambda: facts.live,
        ready=lambda: facts.ready,
        metrics=METRICS.get,
        database=database,
    )
    http.start()
    http.facts, http.port = facts, listener.getsockname()[1]
    yield http
    http.stop()
    http.stop()
    wait_for(lambda: threads() <= before, "the end of its threads")


def threads():
    """Threads but for what Python keeps of those that it has not started itself."""
    return {one for one in threading.enumerate() if not isinstance(one, threading._DummyThread)}


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


PROMETHEUS = "application/openmetrics-text;version=1.0.0;q=0.5,text/plain;version=0.0.4;q=0.3"


@pytest.mark.parametrize(
    ("accept", "kind"), [("*/*", PLAIN), ("text/plain", PLAIN), (PROMETHEUS, OPEN)]
)
@pytest.mark.parametrize(
    ("codings", "packed"),
    [("gzip", True), ("br, gzip;q=0.5", True), ("gzip;q=0", False), ("gzip; q=0.000", False)],
)
def test_metrics_come_in_the_form_and_coding_that_is_asked_for(port, accept, kind, codings, packed):
    asked = {"Accept": accept, "Accept-Encoding": codings}
    url = f"http://127.0.0.1:{port.port}/metrics"
    with urllib.request.urlopen(urllib.request.Request(url, headers=asked)) as answer:
        body, told = answer.read(), answer.headers
    assert told["Content-Type"] == kind
    assert told["Content-Encoding"] == ("gzip" if packed else None)
    assert (gzip.decompress(body) if packed else body) == METRICS[kind]


def without_memory(*_):
    raise MemoryError


def test_a_thread_that_has_no_memory_to_begin_with_does_not_end_the_port(port, monkeypatch):
    """As when the kernel refuses Python pages: whoever starts a `Thread` then waits for ever."""
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "_bootstrap", without_memory)
        url = f"http://127.0.0.1:{port.port}/metrics"
        with suppress(OSError), urllib.request.urlopen(url, timeout=5.0) as answer:
            answer.read()
    with urllib.request.urlopen(url, timeout=PATIENCE_S / 10) as answer:
        assert answer.status == 200


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_connection_whose_thread_ended_before_it_read_is_closed(port, monkeypatch):
    monkeypatch.setattr("serve.obs.http._CLIENT_S", 0.2)
    with monkeypatch.context() as patch, socket.socket() as client:
        patch.setattr(port._server, "process_request_thread", without_memory)
        client.settimeout(PATIENCE_S)
        client.connect(("127.0.0.1", port.port))
        assert client.recv(1) == b""
        wait_for(lambda: not port._server._open, "the end of the connection")
    assert get(port, "/metrics")[0] == 200


def test_metrics_come_as_prometheus_reads_them(port):
    assert get(port, "/metrics") == (200, PLAIN, METRICS[PLAIN].decode())


def test_the_report_as_page_and_as_json(port):
    status, kind, body = get(port, "/report.json")
    assert (status, kind) == (200, "application/json")
    assert json.loads(body)["requests"] == 2000
    status, kind, body = get(port, "/report?since=5m")
    assert (status, kind) == (200, "text/html; charset=utf-8")
    assert body.startswith("<!doctype html>")


def test_filters_and_csv(port, monkeypatch):
    whole = json.loads(get(port, "/report.json")[2])
    some = json.loads(get(port, "/report.json?model=gat")[2])
    assert some["requests"] == whole["by_model"]["gat"]["requests"]
    assert list(some["by_model"]) == ["gat"]
    status, kind, body = get(port, "/report?format=csv&model=gat")
    assert (status, kind) == (200, "text/csv; charset=utf-8")
    assert body.startswith("run_id,request_uid,")
    assert len(body.splitlines()) > 100
    assert get(port, "/report?model=%00%27")[0] == 200
    assert "unknown filter 'modle'" in get(port, "/report?modle=gat")[2]
    assert "known formats: html, json, csv" in get(port, "/report?format=pdf")[2]


def test_reports_that_wait_keep_no_probe_out(port, monkeypatch):
    """They are made one at a time, and each that waits has one of the port's connections."""
    over = threading.Event()

    def slow(*_):
        over.wait(PATIENCE_S)
        return b"{}"

    monkeypatch.setattr("serve.obs.http.make_report", slow)
    asked = serve.obs.http._MAX_CONNECTIONS + 6
    with ThreadPoolExecutor(asked) as threads:
        reports = [threads.submit(get, port, f"/report.json?client={i}") for i in range(asked)]
        try:
            status, _, body = next(as_completed(reports)).result()
            assert status == 503
            assert "reports are made or wait" in body
            assert get(port, "/v2/health/live")[0] == 200
        finally:
            over.set()
    # Who came only after the first reports were made has one, too.
    statuses = Counter(one.result()[0] for one in reports)
    assert statuses.keys() == {200, 503}
    assert statuses[200] >= serve.obs.http._MOST_REPORTS


def test_reports_of_a_large_database_are_kept_for_a_minute(port, database, monkeypatch):
    made = []
    monkeypatch.setattr(offline, "_made", lambda *what: made.append(what) or b"{}")
    monkeypatch.setattr(offline, "_recent", offline._Recent())
    for _ in range(3):
        get(port, "/report.json")
    assert len(made) == 3
    monkeypatch.setattr(offline, "LARGE_BYTES", 1)
    for _ in range(3):
        get(port, "/report.json")
        get(port, "/report.json?model=gat")
    assert len(made) == 5
    monkeypatch.setattr(offline, "KEPT_S", 0.0)
    get(port, "/report.json")
    assert len(made) == 6


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
    assert status == 503
    assert "gone.db: no such report database" in body


def test_a_taken_port_is_named():
    with socket.create_server(("127.0.0.1", 0)) as holder:
        taken = holder.getsockname()[1]
        with pytest.raises(ConfigError, match=f"127.0.0.1:{taken}: already in use"):
            listening_socket("127.0.0.1", taken)


def test_a_host_that_is_not_here_is_named():
    with pytest.raises(ConfigError, match=r"cannot listen on 192\.0\.2\.1:8002"):
        listening_socket("192.0.2.1", 8002)


def test_a_client_that_hangs_up_is_no_error(port, caplog):
    with caplog.at_level(logging.ERROR):
        for _ in range(3):
            with socket.create_connection(("127.0.0.1", port.port)) as client:
                client.sendall(b"GET /metr")
        assert get(port, "/metrics")[0] == 200
    assert caplog.records == []


def test_a_target_that_is_no_url_is_the_clients_mistake(port, caplog):
    caplog.set_level(logging.ERROR)
    with socket.create_connection(("127.0.0.1", port.port)) as client:
        client.sendall(b"GET http://[ HTTP/1.0\r\n\r\n")
        assert client.makefile("rb").readline().split()[1] == b"400"
    assert caplog.records == []


@contextmanager
def dripping(port, count):
    """Run `count` clients that send a header byte by byte and never finish it."""
    ended = threading.Event()
    clients = [socket.create_connection(("127.0.0.1", port.port)) for _ in range(count)]
    for client in clients:
        client.sendall(b"GET /metrics HTTP/1.0\r\nx: ")

    def drip():
        while not ended.wait(0.05):
            for client in clients:
                with suppress(OSError):
                    client.sendall(b"x")

    thread = threading.Thread(target=drip)
    thread.start()
    try:
        yield clients
    finally:
        ended.set()
        thread.join()
        for client in clients:
            client.close()


def hung_up(client):
    """Return True when the server closed the connection."""
    client.settimeout(0)
    try:
        return client.recv(1) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True


def test_clients_that_drip_do_not_keep_the_port_open(port):
    with dripping(port, 15) as clients:
        wait_for(lambda: len(port._server._open) == 15, "all connections")
        port.stop()
        wait_for(lambda: all(map(hung_up, clients)), "the end of all connections")


def test_a_client_that_drips_is_hung_up_on_in_time(port, monkeypatch):
    monkeypatch.setattr(serve.obs.http, "_CLIENT_S", 0.5)
    with dripping(port, 3) as clients:
        wait_for(lambda: all(map(hung_up, clients)), "the end of all connections")
        assert get(port, "/metrics")[0] == 200


def test_however_many_connections_are_open_one_more_is_answered(port, monkeypatch):
    monkeypatch.setattr(serve.obs.http, "_CLIENT_S", 2 * PATIENCE_S)
    with dripping(port, 100):
        wait_for(lambda: len(port._server._open) == 64, "as many connections as there may be")
        assert get(port, "/v2/health/live")[0] == 200
        assert len(port._server._open) <= 64


def test_whoever_waits_for_an_answer_does_not_give_way(port, monkeypatch):
    monkeypatch.setattr(serve.obs.http, "_CLIENT_S", 2 * PATIENCE_S)
    go = threading.Event()
    port._metrics = lambda _: b"up 2\n" if go.wait(PATIENCE_S) else b""
    with ThreadPoolExecutor(1) as threads:
        asked = threads.submit(get, port, "/metrics")
        wait_for(lambda: None in port._server._open.values(), "a request being answered")
        with dripping(port, 100):
            wait_for(lambda: len(port._server._open) == 64, "as many connections as there may be")
            go.set()
            assert asked.result()[2] == "up 2\n"


def test_a_client_that_does_not_read_does_not_keep_the_port_open(port):
    port._metrics = lambda _: b"x" * 50_000_000
    with socket.create_connection(("127.0.0.1", port.port)) as client:
        client.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
        assert client.recv(4) == b"HTTP"
        port.stop()
        wait_for(lambda: not port._server._open, "the end of the connection")


def test_a_failure_behind_the_port_is_an_answer(port, caplog):
    port._metrics = lambda _: 1 / 0
    status, _, body = get(port, "/metrics")
    assert status == 500
    assert "ZeroDivisionError" not in body
    assert "ZeroDivisionError" in caplog.text
