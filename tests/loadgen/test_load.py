"""The whole generator, as a process, against a server in another."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from bench.kit.waiting import PATIENCE_S
from serve.native import front_lacks
from serve.workload import Trace
from tests.loadgen.conftest import command_of

ROOT = Path(__file__).parents[2]


def test_all_is_sent_although_nothing_is_answered(fake_server, load):
    with fake_server(hold=40) as server:
        code, seen = load(server, "--rate", 600, "--requests", 40)
    assert code == 0
    assert seen["answered"] == 40


def test_a_slow_server_does_not_slow_the_sends(fake_server, load):
    # 64 server threads need four rounds of 0.4 s for 250 requests that are all due within 0.5 s.
    with fake_server(delay_s=0.4) as server:
        code, seen = load(server, "--rate", 600, "--requests", 250, "--seed", 3)
    assert code == 0
    assert seen["requests"] == seen["answered"] == 250
    # Latency counts from the intended send time, so the queue before the server is in it; a
    # closed loop would have sent the last rounds only after the first were answered.
    assert seen["latency_ms"]["max"] >= 1_100
    assert seen["latency_ms"]["p50"] >= 400
    # By the server's own clock each took 0.4 s, against its target of 50 ms.
    assert seen["violations"] == seen["violations_by_server"] == 250
    assert seen["latency_over_qt"]["p50"] >= 8


def test_rho_and_a_trace_replayed_with_targets_of_its_own(fake_server, load, tmp_path):
    saved, again = tmp_path / "a.trace", tmp_path / "b.trace"
    with fake_server(delay_s=0.02) as server:
        _, first = load(server, "--rho", 0.5, "--requests", 40, "--save-trace", saved)
        trace = Trace.load(saved).with_targets(lambda item: 1_000)
        trace.save(saved)
        _, second = load(server, "--trace", saved, "--save-trace", again)
    # The fake estimates 10 µs per node, of which there are 100 to 200, and claims 3 slots.
    header = first["trace"]
    assert header["lanes"] == 3
    assert 0.001 <= header["mean_solo_s"] <= 0.002
    assert header["rate_hz"] == pytest.approx(0.5 * 3 / header["mean_solo_s"])
    assert saved.read_bytes() == again.read_bytes()
    assert second["trace"] == header
    requests = {model: row["requests"] for model, row in first["by_model"].items()}
    assert requests == {model: row["requests"] for model, row in second["by_model"].items()}
    assert first["requests"] == second["requests"] == sum(requests.values()) == 40
    # The server's own target of 50 ms, and the trace's of 1 ms.
    assert first["violations_by_server"] == 0
    assert second["violations"] == second["violations_by_server"] == 40
    assert second["violation_rate"] == second["missed_rate"] == 1.0


def test_solo_times_as_the_client_sees_them(fake_server, load):
    with fake_server(delay_s=0.05) as server:
        code, seen = load(
            server, "--workload", "gcn", "--rho", 1.5, "--end-to-end", "--requests", 3
        )
    assert code == 0
    assert seen["trace"]["mean_solo_s"] >= 0.05
    assert seen["trace"]["rate_hz"] == pytest.approx(1.5 * 3 / seen["trace"]["mean_solo_s"])


@pytest.mark.skipif(bool(front_lacks()), reason=front_lacks())
def test_both_senders_send_the_same_requests_at_the_same_times(fake_server, tmp_path):
    sent = {}
    for sender in ([], ["--native"]):
        saved = tmp_path / "-".join(["trace", *sender])
        with fake_server() as server:
            command = command_of(server, sender, "--rate", 300, "--requests", 40, "--seed", 7)
            done = subprocess.run(
                [*command, "--save-trace", str(saved)],
                cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_S, check=True,
            )  # fmt: skip
            digest = server.received()
        seen = json.loads(done.stdout)
        requests = {model: row["requests"] for model, row in seen["by_model"].items()}
        sent[tuple(sender)] = saved.read_bytes(), digest, requests, seen["trace"]
    python, native = sent.values()
    assert python == native
    assert sum(python[2].values()) == 40


def test_failures_are_counted_by_status(fake_server, load):
    with fake_server(fail_every=4) as server:
        code, seen = load(server, "--rate", 200, "--requests", 20)
    assert code == 0
    assert seen["by_status"] == {"OK": 15, "RESOURCE_EXHAUSTED": 5}
    assert seen["messages"]["RESOURCE_EXHAUSTED"].startswith("queue full at call")
    assert seen["answered"] == 15
    assert seen["missed_rate"] >= 0.25


def test_a_request_is_given_up_at_its_timeout(fake_server, load):
    with fake_server(hold=6) as server:
        code, seen = load(server, "--rate", 100, "--requests", 5, "--timeout", 0.2)
    assert code == 1
    assert seen["by_status"] == {"DEADLINE_EXCEEDED": 5}
    assert seen["missed_rate"] == 1.0


def test_interrupted_it_still_sums_up(fake_server, load_command):
    with fake_server() as server:
        command = load_command(server, "--rate", 100, "--duration", 60)
        with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE) as process:
            server.wait_for_requests()
            process.send_signal(signal.SIGINT)
            output, _ = process.communicate(timeout=PATIENCE_S)
    seen = json.loads(output)
    assert process.returncode == (0 if seen["answered"] else 1)
    assert seen["requests"] < seen["scheduled"]
    assert any("stopped early" in warning for warning in seen["warnings"])


def test_locusts_own_command_line(fake_server, sender):
    with fake_server(fail_every=5) as server:
        run = subprocess.run(
            [
                sys.executable, "-m", "locust", "-f", "loadgen/locustfile.py", "--headless",
                "--host", server.address, "--rate", "100", "--duration", "0.5",
                "--workload", "gat", "--scale", "0.01", "--max-nodes", "200", "--json", *sender,
            ],
            cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_S, check=False,
        )  # fmt: skip
    rows = {row["name"]: row for row in json.loads(run.stdout)}
    assert set(rows) == {"gat", "send lag"}
    assert rows["gat"]["num_requests"] == rows["send lag"]["num_requests"] > 20
    assert rows["gat"]["num_failures"] == rows["gat"]["num_requests"] // 5


def test_nobody_there_and_wrong_arguments(sender):
    def load(*arguments):
        command = [sys.executable, "-m", "loadgen", "--target", "127.0.0.1:1", *sender, *arguments]
        return subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_S, check=False
        )

    wrong = load("--rate", "1", "--rho", "1", "--duration", "1")
    assert wrong.returncode == 2
    assert "give either a rate or rho" in wrong.stderr
    assert wrong.stdout == ""


def test_so_many_are_in_flight_one_after_the_other(fake_server, load):
    # With fewer than three in flight the server would answer none.
    with fake_server(delay_s=0.05, hold=3) as server:
        code, seen = load(server, "--workload", "gcn", "--in-flight", 3, "--duration", 2)
    assert code == 0
    assert seen["trace"]["in_flight"] == 3
    assert seen["scheduled"] == seen["requests"] == seen["answered"] >= 3
    # By Little's law: requests in flight = rate × latency.
    flying = seen["answered"] * seen["latency_ms"]["mean"] / 1e3 / seen["elapsed_s"]
    assert flying <= 3.01


def test_a_closed_loop_may_end_by_a_number(fake_server, tmp_path):
    with fake_server() as server:
        command = command_of(server, [], "--workload", "mix", "--in-flight", 4, "--requests", 150)
        rows = tmp_path / "rows.csv"
        done = subprocess.run(
            [*command, "--csv", str(rows)],
            cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_S, check=True,
        )  # fmt: skip
    assert json.loads(done.stdout)["answered"] == 150
    due_s = [float(line.split(",")[2]) for line in rows.read_text().splitlines()[1:]]
    assert len(due_s) == 150
    assert due_s == sorted(due_s)
    assert due_s[-1] > due_s[0]


def test_a_profile_changes_when_requests_are_sent(fake_server, load, tmp_path):
    saved = tmp_path / "a.trace"
    given = ["--rate", 40, "--duration", 2, "--rate-profile", "steps:0,1", "--arrivals", "even"]
    with fake_server() as server:
        code, seen = load(server, "--workload", "gcn", *given, "--save-trace", saved)
    assert code == 0
    assert seen["requests"] == 40
    assert seen["trace"]["profile"] == "steps:0,1"
    assert Trace.load(saved).items[0].offset_ns >= 1e9
