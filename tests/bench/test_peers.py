"""Other servers in ``bench.peers`` are asked rightly, and late answers counted rightly."""

from dataclasses import replace

import msgspec
import numpy as np
import pytest

from bench.kit.live_setup import Traces
from bench.kit.open_loop import LoadRun, load_process
from bench.kit.solo import Solo, messages_of
from bench.kit.undisturbed import Undisturbed
from bench.pages import live
from bench.peers import __main__ as peers
from bench.peers.stock import StockModels
from loadgen.measure import Sample
from serve.wire.messages import decode_response, encode_request
from serve.workload import PoolSpec

NEEDS = {"FastAPI, 2 workers": "fastapi", "mosec, 2 workers": "mosec"}
POOL = PoolSpec(datasets=("pubmed",), count=4, scale=0.05, min_nodes=100, max_nodes=200)
MS = 1_000_000


@pytest.fixture(scope="module")
def traces(tmp_path_factory):
    found = Traces(tmp_path_factory.mktemp("traces"), "mix", 12, POOL, cores=2)
    found.solo = {task: Solo(MS, MS, MS, 0, 0) for task in found.tasks(0)}
    return found


@pytest.fixture(scope="module")
def client():
    with load_process() as process:
        yield process


@pytest.mark.slow
@pytest.mark.parametrize("system", ["grpc.aio, one PyG thread", *NEEDS])
def test_a_peer_answers_as_stock_pyg_does(system, traces, client, tmp_path):
    if system in NEEDS:
        pytest.importorskip(NEEDS[system])
    (message,) = messages_of(traces.tasks(0)[:1], POOL)
    wanted = decode_response(StockModels().answer(message)).outputs["output"].copy()
    _, path = traces.make(0.3, 0)

    with peers.running(system, tmp_path / "peer") as (pid, address):
        peers.assert_right(address, message, wanted)
        with pytest.raises(AssertionError, match="Not equal"):
            peers.assert_right(address, message, wanted + 1)
        run, used = Undisturbed(client, tries=1).run(path, address, pid)

    assert [seen.error for seen in run.seen] == [""] * 12
    # The main process of some does nothing itself.
    assert used["cores_server"] + used["cores_lanes"] > 0
    assert used["slower"] >= 1


def test_a_peer_that_ends_says_why(tmp_path, monkeypatch):
    monkeypatch.setitem(peers.PEERS, "broken", ("bench.no_such_peer", "127.0.0.1:{port}"))
    why = r"no_such_peer ended with code 1(.|\n)*No module named"
    with pytest.raises(AssertionError, match=why), peers.running("broken", tmp_path / "peer"):
        pass


def seen(latency_ms, error=""):
    return Sample(
        model="gcn", due_ns=0, lag_ns=0, latency_ns=round(latency_ms * MS), status=error or "OK",
        message="why" if error else "",
    )  # fmt: skip


def test_late_is_what_comes_after_its_target_or_not_at_all(traces):
    trace, _ = traces.make(0.3, 0)
    targets_us = [1_000, 2_999, 3_000, 20_000]
    items = [
        msgspec.structs.replace(item, qos_target_us=us)
        for item, us in zip(trace.items, targets_us, strict=False)
    ]
    run = LoadRun((seen(1.1), seen(2.9), seen(2, "HTTP 500"), seen(25)), 1.0, 0.1)

    row = peers.seen_by_client(replace(trace, items=tuple(items)), run)

    assert row["late"] == 3
    assert [(one["requests"], one["late"]) for one in row["late_by_target"]] == [
        (2, 1), (1, 1), (1, 1)
    ]  # fmt: skip
    assert row["errors"] == ["HTTP 500: why"]
    assert row["over_target"]["p50"] == pytest.approx(1.25)
    assert row["over_target"]["p99"] == 1e9


def test_the_table_pools_seeds():
    def row(system, seed, late, p99):
        by_target = [{"from_ms": low, "requests": 100, "late": late if low == 0 else 0}
                     for low in peers.TARGETS_MS[:-1]]  # fmt: skip
        return {"system": system, "rho": 0.1, "seed": seed, "requests": 300, "late": late,
                "late_by_target": by_target, "over_target": {"p50": 0.5, "p99": p99}}  # fmt: skip

    rows = [row(peers.OURS, 0, 3, 1.0), row(peers.OURS, 1, 9, 3.0), row(peers.FLOORS[0], 0, 0, 1.0)]
    table = live.peers({"rows": rows})
    assert "| gnnserve | 2.0 %, 1.0 to 3.0 (6.0, 0.0, 0.0); 0.50, 2.0 |" in table


def test_stock_models_take_edges_of_either_width():
    models, rng = StockModels(), np.random.default_rng(0)
    x = rng.standard_normal((5, 32)).astype(np.float32)
    edges = np.array([[0, 1, 2], [1, 2, 3]])
    wide, narrow = (
        decode_response(
            models.answer(encode_request("gcn", {"x": x, "edge_index": edges.astype(dtype)}))
        ).outputs["output"]
        for dtype in (np.int64, np.int32)
    )

    np.testing.assert_array_equal(wide, narrow)
