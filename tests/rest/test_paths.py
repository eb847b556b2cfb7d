"""Paths of the Open Inference Protocol: what is answered, with which status."""

import gzip
import json

import numpy as np
import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from bench.kit.waiting import wait_for
from serve.errors import (
    DeadlineExceeded,
    ErrorCode,
    ModelError,
    NameTaken,
    NotReady,
    QueueFull,
    TooBig,
)
from serve.server.version_facts import VersionChange
from tests.rpc.fakes import CLASSES, FEATURES

X = np.arange(3 * FEATURES, dtype=np.float32).reshape(3, FEATURES) / 7
EDGES = np.array([[0, 1], [1, 2]], np.int64)
EXPECTED = X[:, :CLASSES] + 2
INFER = "/v2/models/gcn/infer"


def tensor(name, array, datatype, nested=False):
    data = array.tolist() if nested else array.reshape(-1).tolist()
    return {"name": name, "datatype": datatype, "shape": list(array.shape), "data": data}


def request(nested=False, **fields):
    inputs = [tensor("x", X, "FP32", nested), tensor("edge_index", EDGES, "INT64", nested)]
    return {"inputs": inputs, **fields}


def test_server_and_models_can_be_asked_about(gateway):
    assert gateway.get("/v2/health/live").json == {"live": True}
    assert gateway.get("/v2/health/ready").json == {"ready": True}
    server = gateway.get("/v2").json
    assert server["name"] == "gnnserve"
    assert "binary_tensor_data" in server["extensions"]
    assert gateway.get("/v2/models").json == {"models": ["gcn", "gin"]}
    for path in ("/v2/models/gcn", "/v2/models/gcn/versions/1"):
        metadata = gateway.get(path).json
        assert metadata["versions"] == ["1"]
        assert metadata["inputs"][:2] == [
            {"name": "x", "datatype": "FP32", "shape": [-1, FEATURES]},
            {"name": "edge_index", "datatype": "INT64", "shape": [2, -1]},
        ]
        assert gateway.get(f"{path}/ready").json == {"name": "gcn", "ready": True}
        config = gateway.get(f"{path}/config").json
        assert config["input"][0]["data_type"] == "TYPE_FP32"
        assert config["input"][0]["dims"] == [-1, FEATURES]
        assert config["max_batch_size"] == 0
        (stats,) = gateway.get(f"{path}/stats").json["model_stats"]
        assert stats["name"] == "gcn"
        assert type(stats["inference_stats"]["success"]["count"]) is int
    assert len(gateway.get("/v2/models/stats").json["model_stats"]) == 2


@pytest.mark.parametrize("nested", [False, True])
def test_json_is_answered_by_json(gateway, nested):
    answer = gateway.post(INFER, request(nested, id="r-1"))
    assert answer.status == 200, answer.body
    assert answer.headers["content-type"] == "application/json"
    told = answer.json
    assert (told["model_name"], told["model_version"], told["id"]) == ("gcn", "1", "r-1")
    assert told["parameters"]["queue_us"] == 11
    assert told["parameters"]["qos_violated"] is False
    (output,) = told["outputs"]
    assert (output["name"], output["datatype"], output["shape"]) == ("output", "FP32", [3, CLASSES])
    given = np.array(output["data"], np.float32).reshape(3, CLASSES)
    np.testing.assert_array_equal(given, EXPECTED)


def test_parameters_ids_and_time_limits_reach_the_engine(gateway, engine):
    parameters = {"qos_target_us": 900, "tenant": "acme", "priority": 1, "timeout": 60_000_000}
    body = request(parameters=parameters)
    answer = gateway.post(INFER, body, X_Request_Id="from-header", Grpc_Timeout="30S")
    assert answer.json["id"] == "from-header"
    assert answer.json["parameters"]["qos_target_us"] == 900
    (call,) = engine.calls
    assert (call.tenant, call.priority, call.client_id) == ("acme", 1, "from-header")
    assert call.timeout_ns < 60e9
    gateway.post("/v2/models/gcn/versions/1/infer", request(id="own"), X_Request_Id="other")
    assert (engine.calls[1].client_id, engine.calls[1].version) == ("own", "1")


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (TooBig("too big"), 429),
        (NotReady("draining"), 503),
        (DeadlineExceeded("too late"), 504),
        (NameTaken("taken"), 409),
        (ModelError("raised"), 500),
    ],
)
def test_errors_have_their_status(gateway, engine, error, status):
    engine.refuse_with = error
    answer = gateway.post(INFER, request())
    assert (answer.status, answer.json) == (status, {"error": str(error)})
    assert "retry-after" not in answer.headers


def test_a_full_queue_says_when_to_try_again(gateway, engine):
    engine.refuse_with = QueueFull("full", 2_500_000_000)
    answer = gateway.post(INFER, request())
    assert answer.status == 429
    assert (answer.headers["retry-after"], answer.headers["retry-after-ms"]) == ("3", "2500")


def test_every_code_of_grpc_has_the_status_of_the_one_table():
    from serve.rest.errors import _STATUSES

    assert {code.status: code.http_status for code in ErrorCode} == _STATUSES


def test_what_is_not_there_is_404_and_405(gateway):
    for path in ("/v2/models/nope", "/v2/models/gcn/versions/9", "/v2/models/nope/ready", "/nope"):
        answer = gateway.get(path)
        assert answer.status == 404, path
        assert answer.json["error"]
    assert gateway.post("/v2/models/nope/infer", request()).status == 404
    answer = gateway.get(INFER)
    assert answer.status == 405
    assert "POST" in answer.headers["allow"]


def test_a_model_that_is_not_ready_says_so(gateway, engine):
    gateway.post("/v2/repository/models/gin/unload")
    answer = gateway.get("/v2/models/gin/ready")
    assert answer.status == 503
    assert gateway.post("/v2/models/gin/infer", request()).status == 503


def test_health_follows_the_server(gateway, engine):
    engine.ready = False
    answer = gateway.get("/v2/health/ready")
    assert (answer.status, answer.json) == (503, {"ready": False})
    assert gateway.get("/v2/health/live").status == 200


def test_versions_are_shown_and_changed(gateway):
    before = gateway.get("/v2/repository/models/gcn/versions").json
    assert before["model"] == "gcn"
    assert before["rules"] == {"split": {}, "canary": 0, "shadow": 0, "shadow_percent": 0.0}
    assert before["previous"]["split"] == {"1": 100.0}
    assert (before["main"], before["served"]) == (1, [1])
    listed = gateway.get("/v2/repository/versions").json["models"]
    assert [each["model"] for each in listed] == ["gcn", "gin"]
    path = "/v2/repository/models/gcn/versions"
    split = {"split": {"1": 90, "2": 10.0}, "canary": 2}
    assert gateway.post(path, split).json["rules"] == {
        "split": {"1": 90.0, "2": 10.0}, "canary": 2, "shadow": 0, "shadow_percent": 0.0,
    }  # fmt: skip
    shadow = gateway.post(path, {"shadow": 3, "shadow_percent": 5}).json["rules"]
    assert (shadow["shadow"], shadow["shadow_percent"]) == (3, 5.0)
    assert gateway.post(path, {"roll_back": True}).status == 200
    assert gateway.post(path, {"split": {}}).status == 200
    assert gateway.engine.version_changes[-4:] == [
        VersionChange(split={1: 90.0, 2: 10.0}, canary=2),
        VersionChange(shadow=3, shadow_percent=5.0),
        VersionChange(roll_back=True),
        VersionChange(split={}),
    ]


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({}, "give one of split, shadow and roll_back"),
        ({"split": {}, "roll_back": True}, "give one of"),
        ({"split": {"one": 100}}, "version 'one'"),
        ({"split": {"0": 100}}, "version '0'"),
        ({"split": {"1" * 400: 100}}, "no positive integer"),
        ({"split": {"1": "all"}}, "float"),
        ({"shadow": -1}, "version '-1'"),
        ({"shadow": 2, "shadow_percent": 0}, "shadow_percent: 0.0 is not above 0"),
        ({"share": 5}, "share"),
    ],
)
def test_a_change_of_versions_that_makes_no_sense_is_refused(gateway, body, words):
    before = list(gateway.engine.version_changes)
    answer = gateway.post("/v2/repository/models/gcn/versions", body)
    assert answer.status == 400
    assert words in answer.json["error"]
    assert gateway.engine.version_changes == before


def test_models_are_listed_loaded_and_unloaded(gateway):
    assert gateway.post("/v2/repository/models/gin/unload", {"parameters": {}}).status == 200
    index = gateway.post("/v2/repository/index").json
    assert {model["name"]: model["state"] for model in index} == {
        "gcn": "READY",
        "gin": "UNAVAILABLE",
    }
    assert [m["name"] for m in gateway.post("/v2/repository/index", {"ready": True}).json] == [
        "gcn"
    ]
    assert gateway.post("/v2/repository/models/gin/load").status == 200
    assert gateway.get("/v2/models/gin/ready").status == 200
    assert gateway.post("/v2/repository/models/nope/load").status == 404
    answer = gateway.post("/v2/repository/models/gin/load", {"parameters": {"config": "{}"}})
    assert answer.status == 400
    assert "'config'" in answer.json["error"]


def test_metrics_of_both_processes_are_on_one_page(gateway):
    gateway.get("/nope")
    answer = gateway.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    text = answer.body.decode()
    assert "up 1\n" in text
    assert 'gnnserve_rest_requests_total{status="404"}' in text
    assert "gnnserve_rest_connections 1.0" in text


@pytest.mark.parametrize("refused", ["gzip;q=0", "gzip; q=0.000, br"])
def test_a_coding_that_the_client_refuses_is_not_taken(gateway, refused):
    answer = gateway.get("/openapi.json", Accept_Encoding=refused)
    assert "content-encoding" not in answer.headers
    assert answer.json["openapi"]
    taken = gateway.get("/openapi.json", Accept_Encoding=f"{refused}, Deflate;q=0.001")
    assert taken.headers["content-encoding"] == "deflate"


@pytest.mark.parametrize("limit", ["99999999H", "99999999M"])
def test_a_time_limit_of_any_length_is_taken(gateway, limit):
    assert gateway.post(INFER, request(), Grpc_Timeout=limit).status == 200


def test_openmetrics_of_both_processes_are_one_text(gateway):
    gateway.metrics = b"# TYPE up gauge\nup 1\n# EOF\n"
    accept = "application/openmetrics-text;version=1.0.0,text/plain;q=0.3"
    answer = gateway.get("/metrics", **{"Accept": accept, "Accept_Encoding": "gzip"})
    assert answer.headers["content-type"].startswith("application/openmetrics-text; version=1.0.0")
    assert answer.headers["content-encoding"] == "gzip"
    text = gzip.decompress(answer.body).decode()
    names = {family.name for family in text_string_to_metric_families(text)}
    assert {"up", "gnnserve_rest_requests", "gnnserve_rest_refused"} <= names


def test_a_client_that_goes_away_cancels_its_request(gateway, engine):
    import http.client

    engine.hold_all = True
    connection = http.client.HTTPConnection("127.0.0.1", gateway.port)
    connection.request("POST", INFER, json.dumps(request(id="gone")).encode())
    wait_for(lambda: engine.calls, "the request")
    connection.close()
    wait_for(lambda: engine.cancelled, "its cancellation")
    wait_for(lambda: b'{status="499"} ' in gateway.get("/metrics").body, "its count")


def test_pages_of_other_sites_are_refused(gateway):
    answer = gateway.post("/v2/repository/models/gin/unload", Origin="http://evil.example")
    assert answer.status == 403
    assert gateway.get("/v2/models/gin/ready").status == 200
    own = f"http://127.0.0.1:{gateway.port}"
    assert gateway.post("/v2/repository/index", Origin=own).status == 200
