"""Time limits and cancelling: told promptly in every stage, and nothing stays reserved."""

import re
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest

from bench.kit.servers import ServerProcess
from bench.kit.waiting import with_growing_limits
from serve.wire.messages import INFER_METHOD, decode_response, encode_request
from tests.e2e.support import GOOD, Troubled, assert_equal, infer, raw_channel
from tests.processes import PATIENCE_S, metric, row, rows, wait_for

DEADLINE = grpc.StatusCode.DEADLINE_EXCEEDED
#: One lane, so that a request behind another is sure to wait.
LANES = 1


@pytest.fixture(scope="module")
def trouble(tmp_path_factory):
    return Troubled(tmp_path_factory.mktemp("repository"), "gcn")


@pytest.fixture(scope="module")
def narrow(tmp_path_factory, trouble):
    folder = tmp_path_factory.mktemp("narrow")
    sections = {"device": {"lanes": LANES}}
    with ServerProcess(folder, repository=trouble.root, sections=sections) as found:
        yield found


@pytest.fixture
def call(narrow, trouble):
    """Afterwards the lane answers, once it is free, and nothing is reserved."""
    with raw_channel(narrow) as found:
        yield found
        graph = trouble.graph()
        assert_equal(infer(found, "mischief", graph).outputs["output"], trouble.expected(graph))
    wait_for(lambda: metric(narrow, "gnnserve_memory_reserved_bytes") == 0, "an empty ledger")
    assert metric(narrow, "gnnserve_queue_depth") == 0
    assert metric(narrow, "gnnserve_lane_restarts_total") == 0


@pytest.fixture
def busy(call, trouble):
    """The lane runs something throughout; its answer comes in spite of what others do."""
    with ThreadPoolExecutor(1) as threads:
        with trouble.holding() as graph:
            held = threads.submit(infer, call, "mischief", graph)
            wait_for(trouble.running, "a running request")
            yield
            assert not held.done()
        assert_equal(held.result().outputs["output"], trouble.expected(graph))


def refused(call, message: bytes, timeout_s: float = PATIENCE_S) -> grpc.RpcError:
    with pytest.raises(grpc.RpcError) as caught:
        call(message, timeout=timeout_s)
    return caught.value


@pytest.mark.usefixtures("busy")
def test_a_timeout_ends_a_queued_request(narrow, call):
    parameters = {"timeout": 100_000, "tenant": "queued"}
    error = refused(call, encode_request("gcn", GOOD.tensors, parameters=parameters))
    assert error.code() is DEADLINE
    assert re.search("time limit passed while it was (queued|preparing|ready)", error.details())
    told = row(narrow, "tenant = ?", "queued")
    assert (told["status"], told["reason"]) == ("DEADLINE_EXCEEDED", "deadline")


def test_a_timeout_ends_a_running_request(narrow, call, trouble):
    def ended(limit_s):
        """Who asked, if the run had begun by then."""
        parameters = {"timeout": int(limit_s * 1e6), "tenant": f"ran for {limit_s}"}
        error = refused(call, encode_request("mischief", graph.tensors, parameters=parameters))
        assert error.code() is DEADLINE
        began = error.details() == "the request's time limit passed while it was running"
        return parameters["tenant"] if began else None

    with trouble.holding() as graph:
        tenant = with_growing_limits(ended)
        wait_for(lambda: not trouble.running(), "the end of the run")
        wait_for(lambda: metric(narrow, "gnnserve_memory_reserved_bytes") == 0, "its memory back")
    assert row(narrow, "tenant = ?", tenant)["reason"] == "deadline"


@pytest.mark.usefixtures("busy")
def test_the_grpc_deadline_is_a_timeout_too(narrow, call):
    def waited(limit_s):
        """Who asked, if the server had the request by then."""
        tenant = f"grpc {limit_s}"
        message = encode_request("gcn", GOOD.tensors, parameters={"tenant": tenant})
        asked = call.future(message, timeout=limit_s)
        queued = []

        def queued_or_ended():
            queued.append(metric(narrow, "gnnserve_queue_depth"))
            return queued[-1] or asked.done()

        wait_for(queued_or_ended, "the request")
        assert asked.code() is DEADLINE
        return tenant if queued[-1] else None

    tenant = with_growing_limits(waited)
    # gRPC's timer and ours run out together: whichever was first, the request has ended.
    assert row(narrow, "tenant = ?", tenant)["status"] in ("DEADLINE_EXCEEDED", "CANCELLED")


def test_a_passed_timeout_changes_nothing_for_requests_in_time(call):
    message = encode_request("gcn", GOOD.tensors, parameters={"timeout": int(PATIENCE_S * 1e6)})
    assert decode_response(call(message, timeout=PATIENCE_S)).outputs["output"].shape == (30, 5)


def cancelled(narrow, message: bytes, when) -> grpc.StatusCode:
    """Send, cancel once `when` holds; how the client's call ended."""
    with grpc.insecure_channel(narrow.target) as channel:
        future = channel.unary_unary(INFER_METHOD).future(message)
        wait_for(when, "the time to cancel")
        future.cancel()
        assert future.cancelled()
        code: grpc.StatusCode = future.code()
        return code


@pytest.mark.usefixtures("busy")
def test_cancelling_a_queued_request(narrow, call):
    message = encode_request("gcn", GOOD.tensors, parameters={"tenant": "left queue"})
    code = cancelled(narrow, message, lambda: metric(narrow, "gnnserve_queue_depth") == 1)
    assert code is grpc.StatusCode.CANCELLED
    told = row(narrow, "tenant = ?", "left queue")
    assert (told["status"], told["reason"], told["lane"]) == ("CANCELLED", "cancelled", -1)


def test_cancelling_a_running_request(narrow, call, trouble):
    with trouble.holding() as graph:
        message = encode_request("mischief", graph.tensors, parameters={"tenant": "left lane"})
        cancelled(narrow, message, trouble.running)
        wait_for(lambda: not trouble.running(), "the end of the run")
        told = row(narrow, "tenant = ?", "left lane")
    assert told["status"] == "CANCELLED"
    assert "while running" in told["message"]


@pytest.mark.usefixtures("busy")
def test_a_client_that_disappears_cancels_all_it_asked(narrow, call):
    messages = [
        encode_request("gcn", GOOD.tensors, parameters={"tenant": f"gone {number}"})
        for number in range(8)
    ]
    channel = grpc.insecure_channel(narrow.target)
    futures = [channel.unary_unary(INFER_METHOD).future(message) for message in messages]
    wait_for(lambda: metric(narrow, "gnnserve_queue_depth") == 8, "eight waiting requests")
    channel.close()
    for number, future in enumerate(futures):
        assert future.code() is grpc.StatusCode.CANCELLED
        assert row(narrow, "tenant = ?", f"gone {number}")["status"] == "CANCELLED"


def test_many_at_once_with_limits_around_their_latency(narrow, call):
    """Whether each is in time is up to the machine; that it ends, and ends once, is not."""
    ended: list[str] = []
    lock = threading.Lock()

    def ask(number: int) -> None:
        parameters = {"timeout": 500 + 100 * number, "tenant": "tight"}
        message = encode_request("gcn", GOOD.tensors, parameters=parameters)
        try:
            call(message, timeout=PATIENCE_S)
            code = "OK"
        except grpc.RpcError as error:
            code = error.code().name
        with lock:
            ended.append(code)

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(ask, range(200)))
    assert set(ended) <= {"OK", "DEADLINE_EXCEEDED"}

    def told() -> Counter[str]:
        """Statuses by rows, each with those like it that have none, as in a flood of refusals."""
        counts: Counter[str] = Counter()
        for each in rows(narrow, "tenant = 'tight'"):
            counts[each["status"]] += 1 + each["left_out"]
        return counts

    wait_for(lambda: told().total() == 200, "a row for each")
    assert told() == Counter(ended)
