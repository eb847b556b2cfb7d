"""A model that ends its lanes again and again is put aside; the others keep theirs."""

import re
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest

from bench.kit.servers import ServerProcess
from serve.client import Client
from tests.e2e.mischief import EXIT
from tests.e2e.support import GOOD, Troubled, assert_equal, infer, raw_channel
from tests.processes import http_get, metric, rows, wait_for


def test_a_model_that_ends_its_lanes_again_and_again_is_put_aside(tmp_path, reference):
    trouble = Troubled(tmp_path, "gcn")
    sections = {"device": {"lanes": 2}}
    with (
        ServerProcess(tmp_path, repository=trouble.root, sections=sections) as server,
        raw_channel(server) as call,
        ThreadPoolExecutor(12) as threads,
    ):
        fatal = trouble.graph(EXIT)
        asked = [threads.submit(infer, call, "mischief", fatal, tenant="bad") for _ in range(12)]
        # Others are served meanwhile and afterwards.
        for _ in range(5):
            answer = infer(call, "gcn", GOOD)
            assert_equal(answer.outputs["output"], reference("gcn", GOOD))
        told = []
        for one in asked:
            with pytest.raises(grpc.RpcError) as caught:
                one.result()
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
            told.append(caught.value.details())
        assert any("its runs ended" in text and "not run for another" in text for text in told)

        # At once, as it is put aside for half a minute: what was good before is refused, too.
        for graph in (trouble.graph(), fatal):
            with pytest.raises(grpc.RpcError, match="model mischief:1: its runs ended"):
                infer(call, "mischief", graph)
        # Said in the index, the metrics and the log.
        with Client(server.target) as client:
            states = {model.name: (model.state, model.reason) for model in client.models()}
            assert states["gcn"][0] == "READY"
            assert states["mischief"][0] == "UNAVAILABLE"
            assert "not run for another" in states["mischief"][1]
        assert 'gnnserve_model_quarantined{model="mischief"} 1.0' in http_get(server, "/metrics")[1]
        said = re.search(r"model mischief:1: its runs ended (\d+) lanes", server.log.read_text())
        ended = int(said[1])
        assert 5 <= ended <= 10  # two that end together are one strike

        assert_equal(infer(call, "gcn", GOOD).outputs["output"], reference("gcn", GOOD))
        wait_for(lambda: metric(server, "gnnserve_lanes_up") == 2, "both lanes")
        # These, and one that ran on the other lane just then: what was refused reached none.
        assert metric(server, "gnnserve_lane_restarts_total") in (ended, ended + 1)
        wait_for(lambda: metric(server, "gnnserve_memory_reserved_bytes") == 0, "an empty ledger")
        unanswered = "model = 'mischief' AND status = 'UNAVAILABLE'"
        wait_for(lambda: len(rows(server, unanswered)) == len(asked) + 2, "a row for each")
