"""The engine in this process: a request's way through it, and that nothing stays behind."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import grpc
import numpy as np
import pytest
from msgspec.structs import replace

from bench.kit.waiting import with_growing_limits
from serve.commands.configured import calibration_cache, device_of
from serve.config import ServerConfig, load_config
from serve.core.commands import LaunchTask
from serve.core.events import LaneSeen, SlowdownChanged, TaskArrived, TaskFinished, Tick
from serve.core.lifecycle import State
from serve.errors import (
    DeadlineExceeded,
    InvalidInput,
    ModelError,
    NotReady,
    QueueFull,
    RequestCancelled,
    TooBig,
    UnknownName,
)
from serve.estimate.estimator import ModelEstimator
from serve.journal import AnswerLeft, commands_of, decode
from serve.native import front_lacks
from serve.obs.journal import JournalWriter
from serve.rpc import native_front
from serve.rpc.server import GrpcServer
from serve.server.api import InferCall, Tensor
from serve.server.engine import Engine
from serve.server.learning.alone import IDLE_NS
from serve.server.ticket import WaitingTicket
from serve.sim.replay import first_difference, recorded
from serve.wire.messages import INFER_METHOD
from tests.e2e.mischief import HOLD, RAISE, SLEEP
from tests.e2e.support import Graph, random_graph
from tests.processes import PATIENCE_S, wait_for
from tests.rpc.fakes import FACTS
from tests.server.conftest import assert_nothing_more_is_held, held_by_this_process

CONFIG = """
[server]
max_queue = 4
start_timeout_s = 600.0
[models]
repository = "{repository}"
calibration_s = 1.0
executor = "csr"
[device]
lanes = 1
memory_budget = "256 MiB"
lane_writes = ["{repository}"]
[scheduling]
policy = "sqtf"
discipline = "rolling"
"""


def start(trouble, folder, records, journal=None):
    path = folder / "server.toml"
    path.write_text(CONFIG.format(repository=trouble.root))
    config = load_config(path)
    device = device_of(config)
    cache = calibration_cache(config, device)
    engine = Engine(config, device, records.append, cache, journal)
    engine.start()
    with pytest.raises(NotReady, match="starting"):
        engine.submit(call(trouble.graph()))
    engine.open()
    engine.wait_loaded()
    assert not records
    return engine


def call(graph: Graph, model: str = "mischief", **options: object) -> InferCall:
    names = {"float32": "FP32", "int32": "INT32", "int64": "INT64"}
    tensors = {
        name: Tensor(names[array.dtype.name], array.shape, array.tobytes())
        for name, array in graph.tensors.items()
    }
    return InferCall(model, "", tensors, arrived_ns=time.monotonic_ns(), **options)


@pytest.fixture(scope="module")
def records():
    return []


@pytest.fixture(scope="module")
def journal(tmp_path_factory):
    writer = JournalWriter(tmp_path_factory.mktemp("journal") / "journal.jsonl")
    yield writer
    writer.close()


@pytest.fixture(scope="module")
def started(tmp_path_factory, trouble, records, journal):
    engine = start(trouble, tmp_path_factory.mktemp("engine"), records, journal)
    yield engine
    engine.stop()


@pytest.fixture
def engine(started, records):
    """Afterwards nothing is staged, reserved or waiting, and each request has its record."""
    records.clear()
    yield started
    wait_for(lambda: started._parts.shared.used_bytes == 0, "an empty shared pool")
    snapshot = started.snapshot()
    assert (snapshot.reserved_bytes, snapshot.pending, snapshot.lanes_up) == (0, {}, 1)
    assert set(snapshot.running_ns.values()) == {0}
    uids = [record.request_uid for record in records]
    assert len(set(uids)) == len(uids)


def test_only_a_request_alone_on_an_idle_server_teaches_a_solo_time(
    engine, trouble, records, monkeypatch
):
    """A request right after another is not alone, nor is one that another joins."""

    def submitted(graph):
        threading.Event().wait(2 * IDLE_NS / 1e9)
        return engine.submit(call(graph))

    wait_for(lambda: not engine.driver.requests.tickets(), "an idle server")
    submitted(trouble.graph(num_nodes=12)).result()
    with ThreadPoolExecutor() as threads, trouble.holding() as graph:
        joined = submitted(graph)
        for ticket in (joined, engine.submit(call(trouble.graph(num_nodes=12)))):
            threads.submit(ticket.result)
    # The next one comes right after, even on a slow machine.
    monkeypatch.setattr("serve.server.accepted.IDLE_NS", int(PATIENCE_S * 1e9))
    engine.submit(call(trouble.graph(num_nodes=12))).result()
    assert [record.alone for record in records] == [True, False, False, False]
    taught = []
    monkeypatch.setattr(ModelEstimator, "observe_solo", lambda _, *seen: taught.append(seen))
    for record in records:
        engine.learn(record)
    assert taught == [((12, 0), records[0].latency_ns)]


def test_an_answer_and_its_record(engine, trouble, records):
    graph = trouble.graph(num_nodes=12)
    result = engine.submit(call(graph, tenant="t", client_id="c", priority=3)).result()
    np.testing.assert_allclose(result.output, trouble.expected(graph), rtol=1e-5, atol=1e-6)
    record = result.record
    assert records == [record]
    assert (record.status, record.tenant, record.client_id) == ("OK", "t", "c")
    assert (record.num_nodes, record.num_edges, record.priority) == (12, 0, 3)
    stages = record.quet_ns + record.run_ns + record.answer_ns
    assert 0 < stages <= record.latency_ns
    assert record.queue_ns + record.prepare_exposed_ns == record.quet_ns
    assert 0 < record.pmc_estimate_bytes < record.reserve_bytes


def test_an_answer_late_by_its_run_alone_is_blamed_on_the_estimate(engine, trouble):
    def late_by_its_run(run_s):
        """Return its record; None when it waited for its lane for longer than it ran."""
        record = engine.submit(call(trouble.graph(SLEEP + run_s))).result().record
        beyond_ns = record.run_ns - record.run_estimate_ns
        return record if beyond_ns > record.latency_ns / 2 else None

    record = with_growing_limits(late_by_its_run)
    assert record.run_ns > 20 * record.run_estimate_ns
    assert (record.violated, record.cause, record.co_runners) == (True, "estimate", 0)


def test_int32_edges_reach_the_lane_as_they_are(engine, records, monkeypatch):
    packets = []
    launch = engine.pool.launch
    monkeypatch.setattr(engine.pool, "launch", lambda *a: (packets.append(a[1]), launch(*a)))
    wide = random_graph(40, 90, seed=3)
    narrow = random_graph(40, 90, seed=3, dtype=np.int32)
    narrow.edge_index[:] = wide.edge_index
    outputs = [engine.submit(call(graph, "gcn")).result().output for graph in (wide, narrow)]
    np.testing.assert_array_equal(*outputs)
    staged = [{ref.name: ref.dtype for ref in packet.parts[0].inputs} for packet in packets]
    assert [dtypes["edge_index"] for dtypes in staged] == ["int64", "int32"]
    estimates = [record.pmc_estimate_bytes for record in records]
    assert estimates[0] - estimates[1] == 8 * 90
    measured = [record.pmc_measured_bytes for record in records]
    assert measured[0] - measured[1] >= 8 * 90 - 64, "places are multiples of 64 bytes"


def test_no_run_takes_more_than_its_estimate_for_the_gaps_between_tensors(engine, records):
    for nodes in range(3, 19):
        engine.submit(call(random_graph(nodes, 2 * nodes + 1, seed=nodes), "gcn")).result()
    for record in records:
        assert record.pmc_measured_bytes <= record.pmc_estimate_bytes


def test_requests_that_are_alone_wake_the_driver_for_their_answers_only(
    engine, trouble, monkeypatch
):
    wakes = []
    wake = engine.pool.wake
    monkeypatch.setattr(engine.pool, "wake", lambda: (wakes.append(1), wake()))
    for _ in range(5):
        engine.submit(call(trouble.graph(), timeout_ns=int(PATIENCE_S * 1e9))).result()
    # Neither the lane that is held while they are prepared nor their deadlines are timed anew.
    assert len(wakes) <= 1


def test_a_lone_request_is_staged_before_it_arrives_and_launched_in_that_step(
    engine, trouble, monkeypatch
):
    seen = []
    handle = engine.driver.scheduler.handle

    def watched(event, now_ns):
        commands = handle(event, now_ns)
        # Timers, looks at a lane that is slow, and lessons of requests before come when they come.
        if not isinstance(event, Tick | LaneSeen | SlowdownChanged):
            seen.append((event, [type(command) for command in commands]))
        return commands

    monkeypatch.setattr(engine.driver.scheduler, "handle", watched)
    engine.driver.handle(Tick())
    graph = trouble.graph(num_nodes=12)
    record = engine.submit(call(graph)).result().record
    (arrived, commands), (ended, _) = seen
    assert (type(arrived), commands, type(ended)) == (TaskArrived, [LaunchTask], TaskFinished)
    assert 0 < record.prepare_exposed_ns <= record.prepare_ns < record.latency_ns


def test_a_record_tells_when_the_lane_began(engine, trouble):
    record = engine.submit(call(trouble.graph(num_nodes=12))).result().record
    assert record.start_ns > 0
    assert record.quet_ns + record.start_ns + record.run_ns <= record.latency_ns - record.answer_ns


def test_lanes_are_told_before_threads(engine, trouble, monkeypatch):
    """A thread that is answered takes the core, while the lane waits for its next task."""
    told = []
    pool, answer = engine.driver._pool, WaitingTicket.command_answer
    launch = pool.launch
    monkeypatch.setattr(pool, "launch", lambda *run: (told.append("lane"), launch(*run)))
    monkeypatch.setattr(
        WaitingTicket, "command_answer", lambda *end: (told.append("thread"), answer(*end))
    )
    behind_a_held_one(engine, trouble, trouble.graph(num_nodes=12))
    assert told == ["lane", "lane", "thread", "thread"]


def test_a_failed_lesson_does_not_fail_requests(engine, trouble, monkeypatch):
    def fail(*seen):
        raise RuntimeError("nothing to be learned here")

    graph = trouble.graph(num_nodes=12)
    with monkeypatch.context() as patched:
        patched.setattr(ModelEstimator, "observe_union", fail)
        for _ in range(2):
            result = engine.submit(call(graph)).result()
            np.testing.assert_allclose(result.output, trouble.expected(graph), rtol=1e-5, atol=1e-6)
        engine.driver.learn()
    assert engine.live


def test_runs_are_learned_from_in_batches_and_with_their_records(
    engine, trouble, records, monkeypatch
):
    learned = []
    engine.driver.learn()
    monkeypatch.setattr(
        ModelEstimator, "observe_union", lambda _, sizes, *seen: learned.append(sizes)
    )
    sizes = range(11, 21)
    for num_nodes in sizes:
        engine.submit(call(trouble.graph(num_nodes=num_nodes))).result()
    assert [nodes for ((nodes, _),) in learned] == list(sizes)[:8]
    engine.learn(records[-1])
    assert [nodes for ((nodes, _),) in learned] == list(sizes)


def test_refusals_before_a_ticket(engine, trouble, records):
    with pytest.raises(UnknownName, match="unknown model 'nobody'"):
        engine.submit(call(trouble.graph(), model="nobody"))
    ids = {"node_ids": Tensor("INT64", (1,), bytes(8))}
    with pytest.raises(UnknownName, match="unknown graph 'g'"):
        engine.submit(InferCall("gcn", "", ids, arrived_ns=0, graph="g"))
    assert records == []


def test_refusals_through_the_ticket(engine, trouble, records):
    wrong = random_graph(5, 0)
    wrong.x[2, 1] = np.nan
    for request, kind, words in (
        (call(wrong, "gcn"), InvalidInput, r"'x' \[2, 1\] is nan"),
        (call(random_graph(100, 12_000_000), "gcn"), TooBig, "needs .* the device has"),
        (call(trouble.graph(RAISE)), ModelError, "asked to fail"),
        (call(trouble.graph(), timeout_ns=1), DeadlineExceeded, "time limit passed"),
    ):
        with pytest.raises(kind, match=words):
            engine.submit(request).result()
    reasons = [record.reason for record in records]
    assert reasons == ["invalid_input", "too_big", "model_error", "deadline"]


def test_a_full_queue_refuses_with_the_time_to_retry(engine, trouble, records):
    with ThreadPoolExecutor(4) as threads:
        with trouble.holding() as graph:
            tickets = [engine.submit(call(graph)) for _ in range(4)]
            answers = [threads.submit(ticket.result) for ticket in tickets]
            with pytest.raises(QueueFull, match="at most 4 may be") as caught:
                engine.submit(call(graph)).result()
            assert caught.value.retry_after_ns > 0
        for answer in answers:
            assert answer.result().output.shape == (3, 2)
    assert [record.reason for record in records] == ["queue_full", "", "", "", ""]


def test_a_request_is_cancelled_in_every_stage(engine, trouble, records):
    """Before anybody waits for the answer, in the queue, while it runs, and too late."""
    with ThreadPoolExecutor(2) as threads:
        with trouble.holding() as graph:
            running = engine.submit(call(graph))
            answer = threads.submit(running.result)
            wait_for(trouble.running, "a running request")
            queued = engine.submit(call(graph))
            queued.cancel()
            with pytest.raises(RequestCancelled):
                queued.result()
            running.cancel()
            with pytest.raises(RequestCancelled, match="while running"):
                answer.result(PATIENCE_S)
            wait_for(lambda: not trouble.running(), "the end of the run")
        done = engine.submit(call(trouble.graph()))
        assert done.result().output.shape == (3, 2)
        for ticket in (queued, running, done):
            ticket.cancel()
    assert [record.status for record in records] == ["CANCELLED", "CANCELLED", "OK"]


def test_a_fresh_scheduler_gives_the_journals_commands_again(engine, trouble, journal):
    """Replay all that this module's engine went through, failures and cancellations included."""
    for nodes in (3, 20, 300):
        engine.submit(call(trouble.graph(num_nodes=nodes))).result()

    def written():
        with journal.path.open("rb") as lines:
            found = decode(lines)
        left = sum(isinstance(row, AnswerLeft) for row in found.rows)
        return found if left == _answers(found) > 3 else None

    found = wait_for(written, "the journal of the last answer")
    assert first_difference(found) is None
    assert len(recorded(found).requests) >= 3


def _answers(journal):
    """Count the requests that the scheduler answered."""
    return sum(name == "AnswerTask" for step in journal.steps for name, _ in commands_of(step))


def behind_a_held_one(engine, trouble, *graphs):
    """Return the answers to the graphs, all prepared before the lane is free."""
    with ThreadPoolExecutor(4) as threads:
        with trouble.holding() as held:
            first = threads.submit(engine.submit(call(held)).result)
            wait_for(trouble.running, "a running request")
            # Nobody is late, so that on a busy machine too all may join a union.
            patient = int(PATIENCE_S * 1e9)
            tickets = [engine.submit(call(graph, qos_target_ns=patient)) for graph in graphs]
            answers = [threads.submit(ticket.result) for ticket in tickets]
            ids = [ticket.task.task_id for ticket in tickets]
            wait_for(
                lambda: all(engine.driver.scheduler.state(i) is State.READY for i in ids),
                "all to be prepared",
            )
        first.result()
        for answer in answers:
            answer.exception()
    return answers


@pytest.fixture
def unions_pay(monkeypatch):
    """Estimate next to no time for unions, whatever was learned on a busy machine."""
    predicted = ModelEstimator.union
    monkeypatch.setattr(
        ModelEstimator, "union", lambda self, sizes: replace(predicted(self, sizes), run_ns=1)
    )


def test_waiting_requests_of_a_model_run_as_one(engine, trouble, records, unions_pay):
    graphs = [trouble.graph(num_nodes=nodes) for nodes in (4, 9, 5)]
    answers = behind_a_held_one(engine, trouble, *graphs)
    for answer, graph in zip(answers, graphs, strict=True):
        np.testing.assert_allclose(
            answer.result().output, trouble.expected(graph), rtol=1e-5, atol=1e-6
        )
    merged = [answer.result().record for answer in answers]
    assert [(record.merged, record.attempt) for record in merged] == [(3, 1)] * 3
    assert len({record.lane for record in merged}) == 1
    shares = [record.pmc_measured_bytes for record in merged]
    assert 0 < shares[0] <= shares[2] <= shares[1]


def test_a_request_that_fails_in_a_union_fails_alone(engine, trouble, records, unions_pay):
    bad, *good = (trouble.graph(RAISE), trouble.graph(num_nodes=6), trouble.graph(num_nodes=7))
    answers = behind_a_held_one(engine, trouble, bad, *good)
    with pytest.raises(ModelError, match="asked to fail at 3 nodes"):
        answers[0].result()
    for answer, graph in zip(answers[1:], good, strict=True):
        result = answer.result()
        np.testing.assert_allclose(result.output, trouble.expected(graph), rtol=1e-5, atol=1e-6)
        assert (result.record.merged, result.record.attempt) == (1, 2)


def test_draining_answers_accepted_requests_and_stopping_leaves_nothing(tmp_path, trouble):
    start(trouble, tmp_path, []).stop()  # the fork server is this process's, and stays
    before = held_by_this_process()
    records = []
    engine = start(trouble, tmp_path, records)
    assert engine.ready
    with ThreadPoolExecutor(3) as threads:
        with trouble.holding() as graph:
            accepted = [threads.submit(engine.submit(call(graph)).result) for _ in range(3)]
            wait_for(trouble.running, "a running request")
            assert engine.begin_drain() == 3
            assert not engine.ready
            with pytest.raises(NotReady, match="stopping"):
                engine.submit(call(graph)).result()
            assert not engine.wait_drained(0.0)
        assert engine.wait_drained(PATIENCE_S)
        assert {answer.result().record.status for answer in accepted} == {"OK"}
    engine.stop()
    engine.stop()
    assert not engine.ready
    assert_nothing_more_is_held(before)
    assert sorted(record.status for record in records) == ["OK", "OK", "OK", "UNAVAILABLE"]


def test_stopping_cancels_waiting_requests(tmp_path, trouble):
    engine = start(trouble, tmp_path, [])
    ended = []

    def wait(ticket):
        with pytest.raises(RequestCancelled) as caught:
            ticket.result()
        ended.append(str(caught.value))

    graph = trouble.graph(HOLD)
    threads = [threading.Thread(target=wait, args=(engine.submit(call(graph)),)) for _ in range(3)]
    for thread in threads:
        thread.start()
    wait_for(trouble.running, "a running request")
    engine.stop()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert len(ended) == 3
    assert not trouble.running()
    with pytest.raises(NotReady, match="starting or has stopped"):
        engine.submit(call(graph))


@pytest.mark.skipif(bool(front_lacks()), reason=front_lacks())
def test_a_stop_does_not_wait_for_a_driver_that_hangs(engine, trouble, monkeypatch, caplog):
    server = GrpcServer(
        engine,
        lambda: FACTS,
        lambda since_s: {},
        ServerConfig(grpc_port=0, front="native"),
        engine.plain,
    )
    target = f"127.0.0.1:{server.start()}"
    front = server._front
    take, hangs, goes_on = front.take, threading.Event(), threading.Event()

    def hang():
        hangs.set()
        assert goes_on.wait(PATIENCE_S)
        take()

    monkeypatch.setattr(front, "take", hang)
    monkeypatch.setattr(native_front, "_LEAVE_S", 0.1)
    with grpc.insecure_channel(target) as channel:
        asked = channel.unary_unary(INFER_METHOD).future(b"", timeout=PATIENCE_S)
        assert hangs.wait(PATIENCE_S)
        assert server.stop(0.0) == 0
        assert "a thread hangs" in caplog.text
        goes_on.set()
        monkeypatch.undo()
        front.stop()
        assert front._front is None
        assert asked.exception().code() is grpc.StatusCode.UNAVAILABLE
    submit = engine.submit(call(trouble.graph()))
    assert submit.result().output.shape == (3, 2)
