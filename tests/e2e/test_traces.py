"""Traces of requests, as a receiver of OTLP gets them."""

import os
import re
import signal
import threading
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import grpc
import numpy as np
import pytest
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as otlp
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc as otlp_grpc

from bench.kit.servers import ServerProcess
from serve.client import Client
from serve.wire.messages import INFER_METHOD, STREAM_METHOD, encode_request
from tests.e2e.support import GOOD, REPOSITORY
from tests.processes import PATIENCE_S, descendants, metric, row, wait_for

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
MESSAGE = encode_request("gcn", GOOD.tensors)


def header(trace=TRACE, flags="01"):
    return f"00-{trace}-{PARENT}-{flags}"


class Receiver(otlp_grpc.TraceServiceServicer):
    """Keeps the spans that it gets."""

    def __init__(self) -> None:
        self.spans, self.services = [], set()
        self._lock = threading.Lock()

    def Export(self, request, context):
        with self._lock:
            for resource in request.resource_spans:
                attributes = attributes_of(resource.resource)
                self.services.add(attributes["service.name"])
                for scope in resource.scope_spans:
                    self.spans.extend(scope.spans)
        return otlp.ExportTraceServiceResponse()

    def of(self, trace):
        with self._lock:
            found = [span for span in self.spans if span.trace_id.hex() == trace]
        return {span.name: span for span in found}


def attributes_of(span):
    kinds = ("string_value", "int_value", "bool_value")
    return {
        each.key: next(getattr(each.value, kind) for kind in kinds if each.value.HasField(kind))
        for each in span.attributes
        if each.value.WhichOneof("value") in kinds
    }


@contextmanager
def listening(receiver):
    server = grpc.server(ThreadPoolExecutor(2))
    otlp_grpc.add_TraceServiceServicer_to_server(receiver, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield port
    finally:
        server.stop(0).wait()


@pytest.fixture(scope="module", params=["native", "python"])
def traced(tmp_path_factory, request):
    receiver = Receiver()
    with listening(receiver) as port:
        sections = {
            "models": {"load": ["gcn", "sage"]},
            "server": {"front": request.param},
            "traces": {"endpoint": f"http://127.0.0.1:{port}", "share": 0.0},
        }
        folder = tmp_path_factory.mktemp("traced")
        with ServerProcess(folder, repository=REPOSITORY, sections=sections) as server:
            yield server, receiver


def ask(server, method, *headers):
    with grpc.insecure_channel(server.target) as channel:
        metadata = [("traceparent", value) for value in headers]
        if method == STREAM_METHOD:
            call = channel.stream_stream(method)
            return list(call(iter([MESSAGE]), metadata=metadata, timeout=PATIENCE_S))
        return channel.unary_unary(method)(MESSAGE, metadata=metadata, timeout=PATIENCE_S)


def tree(receiver, trace, *more):
    """The spans of a request, checked: they nest, and their times add up."""
    names = ("infer gcn", "wait", "stage", "run", "answer")
    found = wait_for(lambda: (all_ := receiver.of(trace)).keys() >= set(names) and all_, names)
    root, wait, stage, run, answer = (found[name] for name in names)
    assert root.parent_span_id.hex() == PARENT
    for child in (wait, run, answer):
        assert child.parent_span_id == root.span_id
    assert stage.parent_span_id == wait.span_id
    assert len({span.span_id for span in found.values()}) == len(found)
    assert root.start_time_unix_nano == wait.start_time_unix_nano
    assert wait.end_time_unix_nano == run.start_time_unix_nano
    assert run.end_time_unix_nano == answer.start_time_unix_nano
    assert answer.end_time_unix_nano == root.end_time_unix_nano
    assert wait.start_time_unix_nano <= stage.start_time_unix_nano <= stage.end_time_unix_nano
    assert stage.end_time_unix_nano <= wait.end_time_unix_nano
    return found


@pytest.mark.parametrize("method", [INFER_METHOD, STREAM_METHOD])
def test_a_request_is_a_child_of_the_client_span(traced, method):
    server, receiver = traced
    trace = f"{1 + (method == STREAM_METHOD):032x}"
    assert ask(server, method, header(trace))
    found = tree(receiver, trace)
    root, run = attributes_of(found["infer gcn"]), attributes_of(found["run"])
    kept = row(server, "trace_parent = ?", header(trace))
    assert root["gnnserve.model"] == "gcn"
    assert root["gnnserve.request_uid"] == kept["request_uid"]
    assert root["gnnserve.memory.estimate_bytes"] == kept["pmc_estimate_bytes"] > 0
    assert root["gnnserve.qos.target_ns"] == kept["qos_target_ns"] > 0
    assert root["gnnserve.qos.late"] == bool(kept["violated"])
    assert (run["gnnserve.lane"], run["gnnserve.group.id"]) == (kept["lane"], kept["group_id"])
    span = found["infer gcn"]
    assert span.end_time_unix_nano - span.start_time_unix_nano == kept["latency_ns"]
    assert receiver.services == {"gnnserve"}
    wait_for(lambda: exported(server) >= 1, "the count of exported traces")


def exported(server):
    return metric(server, re.escape('gnnserve_traces_total{outcome="exported"}'))


def test_a_request_by_http_is_traced(traced):
    server, receiver = traced
    trace = f"{3:032x}"
    body = (
        b'{"inputs": [{"name": "x", "shape": [1, 32], "datatype": "FP32", "data": ['
        + b",".join([b"0"] * 32)
        + b']}, {"name": "edge_index", "shape": [2, 1], "datatype": "INT64", "data": [0, 0]}]}'
    )
    asked = urllib.request.Request(
        f"http://127.0.0.1:{server.http_port}/v2/models/gcn/infer",
        body,
        {"traceparent": header(trace), "Content-Type": "application/json"},
    )
    with urllib.request.urlopen(asked, timeout=PATIENCE_S) as answer:
        assert answer.status == 200
    tree(receiver, trace)


def test_the_parts_of_a_joint_request_are_of_one_trace(traced):
    server, receiver = traced
    trace = f"{4:032x}"
    with Client(server.target, metadata={"traceparent": header(trace)}) as client:
        client.infer(["gcn", "sage"], **GOOD.tensors)
    wait_for(lambda: {"infer gcn", "infer sage"} <= receiver.of(trace).keys(), "both parts")


def test_a_refused_request_is_a_failed_span(traced):
    server, receiver = traced
    trace = f"{5:032x}"
    wrong = encode_request("gcn", {"x": np.zeros((2, 3), np.float32)})
    with grpc.insecure_channel(server.target) as channel, pytest.raises(grpc.RpcError):
        channel.unary_unary(INFER_METHOD)(
            wrong, metadata=[("traceparent", header(trace))], timeout=PATIENCE_S
        )
    span = wait_for(lambda: receiver.of(trace), "its span")["infer gcn"]
    assert span.status.code == span.status.STATUS_CODE_ERROR
    assert attributes_of(span)["gnnserve.reason"] == "invalid_input"


def test_who_is_not_asked_to_trace_does_not(traced):
    server, receiver = traced
    unwanted = f"{0xABC6:032x}"
    longer, upper = f"{header(unwanted)}-more", header(unwanted.upper())
    for value in (header(unwanted, "00"), longer, upper, "?"):
        ask(server, INFER_METHOD, value)
    ask(server, INFER_METHOD)
    wanted = f"{7:032x}"
    ask(server, INFER_METHOD, header(wanted))
    tree(receiver, wanted)
    assert not receiver.of(unwanted)
    assert all(span.parent_span_id for span in receiver.spans)


def test_traces_that_nobody_takes_cost_no_answer(tmp_path):
    receiver = Receiver()
    sections = {"models": {"load": ["gcn"]}, "traces": {"share": 1.0}}
    with listening(receiver) as port:
        sections["traces"]["endpoint"] = f"http://127.0.0.1:{port}"
    with ServerProcess(tmp_path, repository=REPOSITORY, sections=sections) as server:
        for _ in range(20):
            ask(server, INFER_METHOD)
        lost = re.escape('gnnserve_traces_total{outcome="lost"}')
        wait_for(lambda: ask(server, INFER_METHOD) and metric(server, lost) > 0, "lost traces")
        assert exported(server) == 0
    assert "traces are lost" in server.log.read_text()


def test_a_share_of_other_requests_is_traced_and_the_process_is_replaced(tmp_path):
    receiver = Receiver()
    with listening(receiver) as port:
        sections = {
            "models": {"load": ["gcn"]},
            "traces": {"endpoint": f"http://127.0.0.1:{port}", "share": 1.0},
        }
        with ServerProcess(tmp_path, repository=REPOSITORY, sections=sections) as server:
            ask(server, INFER_METHOD)
            wait_for(lambda: len(receiver.spans) >= 4, "spans")
            (process,) = (
                pid for pid in descendants(server.pid) if "tracing.export" in command_of(pid)
            )
            os.kill(process, signal.SIGKILL)
            before = len(receiver.spans)
            wait_for(
                lambda: ask(server, INFER_METHOD) and len(receiver.spans) > before, "more spans"
            )
            last = ask(server, INFER_METHOD)
            assert last
        # What was answered before the stop is exported.
        roots = [span for span in receiver.spans if span.name == "infer gcn"]
        assert not any(span.parent_span_id for span in roots)
        assert len({span.trace_id for span in roots}) == len(roots)


def command_of(pid):
    with open(f"/proc/{pid}/cmdline") as found:
        return found.read()
