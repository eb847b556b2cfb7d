"""Live runs that are played again in the simulator."""

from bench.kit.solo import Solo
from bench.live.simulated import simulated
from serve.workload import TraceItem

RUN_NS = 1_000_000
SOLO = Solo(run_ns=RUN_NS, solo_ns=RUN_NS, client_ns=RUN_NS, peak_bytes=1, reserve_bytes=1)


def served(count, gap_ns, *, handover_ns=0, run_ns=RUN_NS):
    """Requests `gap_ns` apart with targets of 2 ms, and the rows of a server that took so long."""
    return [
        (
            TraceItem(
                offset_ns=number * gap_ns, model="gcn", dataset="g", index=0, num_nodes=10,
                num_edges=20, seed=number, qos_target_us=2000,
            ),
            SOLO,
            {
                "arrived_unix_ns": 10**18 + number * gap_ns, "prepare_ns": 0, "answer_ns": 0,
                "run_ns": run_ns, "merged": 1, "waited_ns": handover_ns,
            },
        )
        for number in range(count)
    ]  # fmt: skip


def shares(requests, cores=1):
    found = simulated(requests, lambda row: row["waited_ns"], cores)
    return found["as_live"], found["no_host"]


def test_requests_apart_from_each_other_are_in_time():
    assert shares(served(10, 5_000_000)) == (0, 0)


def test_what_the_host_took_makes_late_and_is_told_from_the_scheduler():
    assert shares(served(10, 5_000_000, handover_ns=1_500_000)) == (1, 0)


def test_longer_runs_than_alone_are_of_the_live_machine():
    assert shares(served(10, 5_000_000, run_ns=2_500_000)) == (1, 0)


def test_more_work_than_the_cores_can_do_is_late_both_ways():
    as_live, no_host = shares(served(40, 500_000))
    assert as_live == no_host > 0.3
    assert shares(served(40, 500_000), cores=2) == (0, 0)
