"""The gateway's process beside a whole server: stops, kills and hangs of either."""

import http.client
import json
import os
import signal
import socket
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest

from bench.kit.servers import ServerProcess
from serve.rest.process import missing_packages
from tests.e2e.support import Troubled
from tests.processes import (
    PATIENCE_S,
    descendants,
    http_get,
    is_running,
    metric,
    row,
    rows,
    wait_for,
)

pytestmark = pytest.mark.skipif(bool(missing_packages()), reason="the gateway's packages")

ONE = {
    "inputs": [
        {"name": "x", "datatype": "FP32", "shape": [3, 32], "data": [0] * 96},
        {"name": "edge_index", "datatype": "INT64", "shape": [2, 2], "data": [0, 1, 1, 2]},
    ]
}


@pytest.fixture
def trouble(tmp_path):
    return Troubled(tmp_path, "gcn")


def ask(server, model="gcn", body=ONE, **headers):
    """Return status and decoded body; status 0 when the connection broke."""
    connection = http.client.HTTPConnection("127.0.0.1", server.http_port, timeout=PATIENCE_S)
    try:
        connection.request("POST", f"/v2/models/{model}/infer", json.dumps(body), headers)
        response = connection.getresponse()
        return response.status, json.loads(response.read())
    except (OSError, http.client.HTTPException):
        return 0, {}
    finally:
        connection.close()


def gateway_pid(server):
    (pid,) = (p for p, command in descendants(server.pid).items() if "serve.rest.run" in command)
    return pid


def graph_body(graph):
    """Return a request with `x` and `edge_index` of `graph`."""
    arrays = (("x", "FP32", graph.x), ("edge_index", "INT64", graph.edge_index))
    return {
        "inputs": [
            {
                "name": name,
                "datatype": datatype,
                "shape": list(array.shape),
                "data": array.reshape(-1).tolist(),
            }
            for name, datatype, array in arrays
        ]
    }


def test_sigterm_loses_no_answer_and_refuses_with_503(tmp_path, trouble):
    """To all processes, as systemd sends it."""
    statuses = []
    with (
        ServerProcess(tmp_path, repository=trouble.root, own_group=True) as server,
        ThreadPoolExecutor(12) as threads,
    ):

        def ask_until_refused():
            while (status := ask(server)[0]) == 200:
                statuses.append(status)
            return status

        with trouble.holding() as graph:
            held = threads.submit(ask, server, "mischief", graph_body(graph))
            wait_for(trouble.running, "a running request")
            clients = [threads.submit(ask_until_refused) for _ in range(8)]
            wait_for(lambda: len(statuses) > 8, "some answers")
            os.killpg(server.pid, signal.SIGTERM)
            wait_for(lambda: "draining" in server.log.read_text(), "the drain")
            assert [one.result() for one in clients] == [503] * 8
            assert http_get(server, "/v2/health/ready")[0] == 503
            assert http_get(server, "/v2/health/live")[0] == 200
        assert held.result()[0] == 200
        assert server.wait() == 0
    assert sum(told["status"] == "OK" for told in rows(server)) == len(statuses) + 1


@pytest.fixture(scope="module")
def lasting(tmp_path_factory):
    """One server for the tests after which it serves on."""
    sections = {"models": {"load": ["gcn"]}}
    with ServerProcess(tmp_path_factory.mktemp("lasting"), sections=sections) as server:
        yield server


def test_a_killed_gateway_is_started_again(lasting):
    assert ask(lasting)[0] == 200
    before = gateway_pid(lasting)
    os.kill(before, signal.SIGKILL)
    wait_for(lambda: not is_running(before), "its end")
    # Clients wait meanwhile, as the main process holds the port open.
    assert ask(lasting)[0] == 200
    assert gateway_pid(lasting) != before
    assert metric(lasting, "gnnserve_rest_restarts_total") == 1
    assert "the HTTP gateway ended (signal 9)" in lasting.log.read_text()


def test_a_main_process_that_hangs_is_not_called_healthy(lasting):
    os.kill(lasting.pid, signal.SIGSTOP)
    try:
        for path in ("/v2/health/live", "/v2/health/ready"):
            status, body = http_get(lasting, path)
            assert status == 503
            assert "did not answer within" in json.loads(body)["error"]
        # A time limit ends a request too.
        assert ask(lasting, **{"Grpc-Timeout": "200m"})[0] == 504
    finally:
        os.kill(lasting.pid, signal.SIGCONT)
    wait_for(lambda: http_get(lasting, "/v2/health/live")[0] == 200, "health")
    assert ask(lasting)[0] == 200


def test_nothing_of_the_gateway_outlives_a_killed_server(tmp_path, trouble):
    with (
        ServerProcess(tmp_path, repository=trouble.root) as server,
        ThreadPoolExecutor(1) as threads,
        trouble.holding() as graph,
    ):
        held = threads.submit(ask, server, "mischief", graph_body(graph))
        wait_for(trouble.running, "a running request")
        pid = gateway_pid(server)
        server.kill()
        assert held.result()[0] == 503
        wait_for(lambda: not is_running(pid), "the end of the gateway")
        with socket.socket() as one:
            # As servers do: connections that the gateway closed first may linger for a minute.
            one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            one.bind(("127.0.0.1", server.http_port))


def test_a_stop_does_not_wait_for_idle_or_slow_clients(tmp_path):
    sections = {"models": {"load": ["gcn"]}}
    with ServerProcess(tmp_path, sections=sections) as server, ExitStack() as clients:
        for sent in (b"", b"GET /v2 HTTP/1.1\r\nx:", b"POST /v2/models/gcn/infer HTTP/1.1\r\n"
                     b"Host: a\r\nContent-Length: 1000\r\n\r\n{"):  # fmt: skip
            client = clients.enter_context(
                socket.create_connection(("127.0.0.1", server.http_port))
            )
            client.sendall(sent)
        wait_for(lambda: metric(server, "gnnserve_rest_connections") >= 4, "the connections")
        assert server.stop() == 0


def test_without_rest_the_port_has_health_metrics_and_report(tmp_path):
    sections = {"models": {"load": ["gcn"]}, "server": {"rest": False}}
    with ServerProcess(tmp_path, sections=sections) as server:
        assert http_get(server, "/v2/health/ready") == (200, "ok\n")
        assert http_get(server, "/metrics")[0] == 200
        assert http_get(server, "/v2")[0] == 404
        assert not any("serve.rest" in each for each in descendants(server.pid).values())


def test_a_request_has_its_row_with_client_and_tenant(lasting):
    body = ONE | {"id": "from-curl", "parameters": {"tenant": "web"}}
    assert ask(lasting, body=body)[0] == 200
    told = row(lasting, "client_id = ?", "from-curl")
    assert (told["tenant"], told["model"], told["status"]) == ("web", "gcn", "OK")
    status, page = http_get(lasting, "/report.json?since=1h")
    assert status == 200
    assert json.loads(page)["requests"] == len(rows(lasting))
    assert http_get(lasting, "/report?since=soon")[0] == 400
