"""Preparing is done while others run, and the report shows it."""

from concurrent.futures import ThreadPoolExecutor

from tests.e2e.support import MODELS, infer, random_graph
from tests.processes import rows, wait_for

REQUESTS = 200


def test_under_load_preparing_is_hidden(server, call):
    """Eight requests are under way at any time and two run, so the others prepare behind them."""
    graphs = [random_graph(1_000 + number, 10_000, seed=number) for number in range(20)]

    def ask(number: int) -> None:
        infer(call, MODELS[number % 4], graphs[number % 20], tenant="behind")

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(ask, range(REQUESTS)))
    wait_for(lambda: len(rows(server, "tenant = 'behind'")) == REQUESTS, "a row for each")
    found = rows(server, "tenant = 'behind'")
    assert all(told["prepare_ns"] > 0 for told in found)
    assert all(0 <= told["prepare_exposed_ns"] <= told["quet_ns"] for told in found)
    hidden = [told for told in found if told["prepare_exposed_ns"] == 0]
    # How many is up to how soon they come, and that to what else the machine does.
    assert hidden
    # Then none of it is part of the time to the first execution: that was waiting for others.
    assert all(told["queue_ns"] == told["quet_ns"] for told in hidden)


def test_alone_preparing_is_exposed(server, call):
    graph = random_graph(1_000, 10_000)
    for _ in range(5):
        infer(call, "gcn", graph, tenant="alone")
    wait_for(lambda: len(rows(server, "tenant = 'alone'")) == 5, "a row for each")
    for told in rows(server, "tenant = 'alone'"):
        assert 0 < told["prepare_exposed_ns"] <= told["quet_ns"]
        assert (told["group_size"], told["co_runners"], told["attempt"]) == (1, 0, 1)
