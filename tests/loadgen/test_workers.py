"""Runs that several processes send: divided exactly, begun together, merged."""

import csv
import json
import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import msgspec
import numpy as np
import pytest
from scipy.stats import kstest

from bench.kit.servers import ROOT, free_ports
from bench.kit.waiting import PATIENCE_S, wait_for
from loadgen.measure import Sample
from loadgen.options import LoadOptions, address
from loadgen.parts import DividedLoop, LoadPart, divide, told
from loadgen.plan import ClosedLoop, LoadPlan
from serve.errors import ConfigError
from serve.workload import PoolSpec, Trace, TraceHeader, TraceItem, poisson_arrivals
from tests.loadgen.conftest import command_of

OPTIONS = LoadOptions("h:1", "gcn", rate_hz=10.0, requests=7, ca=Path("/ca.pem"))


def plan_of(count, closed=None):
    items = tuple(
        TraceItem(
            offset_ns=number * 1000, model="gcn", dataset="random", index=number, num_nodes=1,
            num_edges=0, seed=number,
        )
        for number in range(count)
    )  # fmt: skip
    header = TraceHeader(workload="gcn", seed=0, rate_hz=10.0, pool=PoolSpec(datasets=()))
    return LoadPlan(Trace(header, items), (), closed)


@pytest.mark.parametrize(("count", "workers"), [(0, 1), (1, 3), (7, 2), (100, 7)])
def test_each_request_is_sent_by_one_worker_at_its_own_time(count, workers):
    plan = plan_of(count)
    parts = divide(plan, OPTIONS, workers, run=1, native=False)
    again = {}
    for rank, part in enumerate(parts):
        assert (part.rank, part.workers) == (rank, workers)
        for index, item in enumerate(part.trace.items):
            again[rank + workers * index] = item
    assert [again[number] for number in range(count)] == list(plan.trace.items)


def test_three_workers_are_one_poisson_process():
    """The gaps of all requests pass the test of Kolmogorov and Smirnov, and so do each worker's."""
    rate_hz, count, workers = 200.0, 6000, 3
    trace = plan_of(count).trace
    offsets = poisson_arrivals(rate_hz, random.Random(0), count=count)
    items = tuple(
        msgspec.structs.replace(item, offset_ns=offset)
        for item, offset in zip(trace.items, offsets, strict=True)
    )
    plan = LoadPlan(Trace(trace.header, items), ())
    parts = divide(plan, OPTIONS, workers, run=1, native=False)
    times = [[item.offset_ns / 1e9 for item in part.trace.items] for part in parts]
    together = np.sort(np.concatenate(times))
    assert sum(len(one) / one[-1] for one in times) == pytest.approx(rate_hz, rel=0.03)
    assert kstest(np.diff(together) * rate_hz, "expon").pvalue > 0.05
    for one in times:
        # Every third arrival: a gap is the sum of three exponential ones.
        assert kstest(np.diff(one) * rate_hz, "gamma", (workers,)).pvalue > 0.05


def test_requests_in_flight_are_divided():
    plan = plan_of(3, ClosedLoop(in_flight=7, duration_s=2.0, requests=11))
    parts = divide(plan, OPTIONS, 4, run=1, native=True)
    assert [part.closed.in_flight for part in parts] == [2, 2, 2, 1]
    assert [part.closed.requests for part in parts] == [3, 3, 3, 2]
    assert {part.closed.duration_s for part in parts} == {2.0}
    # The items only say what is sent, in turn: each worker has some.
    assert all(part.trace.items for part in parts)
    with pytest.raises(ConfigError, match="in-flight 7: each of 8 workers"):
        divide(plan, OPTIONS, 8, run=1, native=True)


def test_a_part_is_the_same_after_its_way():
    plan = plan_of(5, ClosedLoop(in_flight=2, duration_s=None, requests=9))
    for part in divide(plan, OPTIONS, 2, run=3, native=True):
        assert LoadPart.decode(part.encode()) == part
    (part,) = divide(plan_of(2), OPTIONS, 1, run=4, native=False)
    assert LoadPart.decode(part.encode()) == part


def sample(index, latency_ns):
    return Sample(
        model="gcn", index=index, due_ns=0, lag_ns=0, latency_ns=latency_ns, status="OK",
        target_us=1000,
    )  # fmt: skip


def test_percentiles_are_those_of_all_samples_and_not_of_workers():
    rng = random.Random(1)
    workers, plan = 3, plan_of(600)
    parts = divide(plan, OPTIONS, workers, run=1, native=False)
    loop = DividedLoop(plan, "h:1", dict(zip("abc", parts, strict=True)))
    whole = []
    for rank, name in enumerate("abc"):
        own = DividedLoop(plan, "h:1", {})
        # The last worker has all slow answers.
        latencies = [rng.randrange(1, 10**6) * (1 + 9 * (rank == 2)) for _ in range(200)]
        whole += latencies
        samples = [sample(index, latency) for index, latency in enumerate(latencies)]
        loop.hear(name, told(1, own, samples[:150], over=False))
        assert name in loop.sending
        loop.hear(name, told(1, own, samples[150:], over=True))
        assert name not in loop.sending
    # What belongs to another run, or to nobody, counts for nothing.
    assert loop.hear("a", told(2, loop, [sample(0, 1)], over=False)) == []
    assert loop.hear("d", told(1, loop, [sample(0, 1)], over=False)) == []
    assert sorted(one.index for one in loop.samples) == list(range(600))
    summary = loop.summary()
    whole.sort()
    assert summary.requests == summary.scheduled == 600
    assert summary.processes == 3
    assert summary.latency_ms.max == whole[-1] / 1e6
    assert summary.violations == sum(one > 1e6 for one in whole)
    assert summary.latency_ms.p50 == pytest.approx((whole[299] + whole[300]) / 2e6)


@pytest.mark.parametrize("text", ["", "host", "host:", "host:0", "host:70000", ":5", "h:x"])
def test_an_address_that_is_none_is_refused(text):
    with pytest.raises(ConfigError, match=r"--worker .*: it is not HOST:PORT"):
        address("--worker", text)
    assert address("--worker", "::1:5557") == ("::1", 5557)


def ran(command):
    return subprocess.run(
        [str(part) for part in command],
        cwd=ROOT, capture_output=True, text=True, timeout=2 * PATIENCE_S, check=False,
    )  # fmt: skip


def rows_of(path):
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


@pytest.mark.timeout(600)
def test_two_workers_send_what_one_process_sends(fake_server, sender, tmp_path):
    sent = []
    for workers in ([], ["--workers", "2"]):
        rows = tmp_path / f"{len(workers)}.csv"
        with fake_server() as server:
            done = ran(
                command_of(
                    server, sender, "--rate", 100, "--requests", 61, "--seed", 5, *workers,
                    "--csv", rows,
                )
            )  # fmt: skip
            digest = server.received()
        assert done.returncode == 0, done.stderr
        seen = json.loads(done.stdout)
        assert seen["requests"] == seen["answered"] == seen["scheduled"] == 61
        assert seen["processes"] == (2 if workers else 1)
        found = rows_of(rows)
        assert [int(row["request"]) for row in found] == list(range(61))
        sent.append((digest, [(row["model"], row["due_s"]) for row in found], seen["trace"]))
    # The same messages, each once and at the same times.
    assert sent[0] == sent[1]


@pytest.mark.timeout(600)
def test_workers_keep_requests_in_flight_and_stop_after_their_number(fake_server):
    with fake_server(delay_s=0.01) as server:
        done = ran(command_of(server, [], "--workers", 2, "--in-flight", 3, "--requests", 41))
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout)
    assert seen["by_status"] == {"OK": 41}
    assert not seen["warnings"] or "stopped early" not in " ".join(seen["warnings"])


@pytest.mark.timeout(600)
def test_workers_of_other_machines_and_one_search(fake_server):
    """The master waits for its workers, which work for all runs of a search."""
    (port,) = free_ports(1)
    worker = [sys.executable, "-m", "loadgen", "--worker", f"127.0.0.1:{port}"]
    with fake_server() as server:
        workers = [subprocess.Popen(worker, cwd=ROOT) for _ in range(2)]
        try:
            done = ran(
                command_of(
                    server, [], "--master", f"127.0.0.1:{port}", "--workers", 2,
                    "--rate", 640, "--requests", 10, "--find-limit",
                    "--fail-if", "p50>0.000001ms",
                )
            )  # fmt: skip
            assert done.returncode == 1, done.stderr
            steps = json.loads(done.stdout)["steps"]
            assert len(steps) > 2
            # They end with their master.
            assert [one.wait(PATIENCE_S) for one in workers] == [0, 0]
        finally:
            for one in workers:
                one.kill()
                one.wait()


#: A worker that is connected for three seconds before it listens to its master.
LATE_WORKER = """
import sys
import loadgen.worker
import gevent
attach = loadgen.worker.attach
loadgen.worker.attach = lambda environment: (gevent.sleep(3), attach(environment))
loadgen.worker.work_for("127.0.0.1", int(sys.argv[1]))
"""


@pytest.mark.timeout(600)
def test_a_worker_that_listens_late_gets_its_part_all_the_same(fake_server):
    (port,) = free_ports(1)
    with fake_server() as server:
        worker = subprocess.Popen([sys.executable, "-c", LATE_WORKER, str(port)], cwd=ROOT)
        try:
            done = ran(
                command_of(
                    server, [], "--master", f"127.0.0.1:{port}", "--workers", 1,
                    "--rate", 100, "--requests", 5,
                )
            )  # fmt: skip
            assert done.returncode == 0, done.stderr
            assert json.loads(done.stdout)["by_status"] == {"OK": 5}
        finally:
            worker.kill()
            worker.wait()


def children_of(pid):
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def command_line(pid):
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return []


def workers_of(pid):
    return [child for child in children_of(pid) if b"loadgen.worker" in command_line(child)]


@pytest.mark.timeout(600)
def test_a_worker_that_is_killed_takes_only_its_part_with_it(fake_server):
    with fake_server() as server:
        command = command_of(server, [], "--workers", 2, "--rate", 20, "--duration", 20)
        with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE) as process:
            server.wait_for_requests()
            os.kill(workers_of(process.pid)[0], signal.SIGKILL)
            output, _ = process.communicate(timeout=2 * PATIENCE_S)
    seen = json.loads(output)
    assert process.returncode == 0
    # The other's part is whole.
    assert seen["scheduled"] // 2 <= seen["requests"] < seen["scheduled"]
    assert any("stopped early" in warning for warning in seen["warnings"])


@pytest.mark.timeout(600)
def test_interrupted_workers_still_tell_what_they_have(fake_server):
    with fake_server() as server:
        command = command_of(server, [], "--workers", 2, "--rate", 50, "--duration", 600)
        with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE) as process:
            server.wait_for_requests()
            pids = workers_of(process.pid)
            process.send_signal(signal.SIGINT)
            output, _ = process.communicate(timeout=2 * PATIENCE_S)
    seen = json.loads(output)
    assert 0 < seen["requests"] < seen["scheduled"]
    assert not any(command_line(pid) for pid in pids)


@pytest.mark.timeout(600)
def test_workers_end_with_their_master(fake_server):
    with fake_server() as server:
        command = command_of(server, [], "--workers", 2, "--rate", 50, "--duration", 600)
        with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL) as process:
            server.wait_for_requests()
            pids = workers_of(process.pid)
            assert len(pids) == 2
            process.kill()
        wait_for(lambda: not any(command_line(pid) for pid in pids), "the workers' end")


def test_what_cannot_be_divided_is_told(fake_server):
    with fake_server() as server:
        done = ran(command_of(server, [], "--workers", 3, "--in-flight", 2, "--requests", 5))
        assert done.returncode == 2
        assert "each of 3 workers keeps at least one in flight" in done.stderr
        done = ran(command_of(server, [], "--master", "127.0.0.1:1234", "--rate", 1))
        assert done.returncode == 2
        assert "say with --workers how many" in done.stderr
