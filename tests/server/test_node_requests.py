"""What is learned of the samples of requests by node id, and how long it is kept."""

import pytest

from serve.server.node_requests import _MOST_SIZES, NodeRequests


def test_sizes_in_use_outlive_any_number_of_other_fanouts():
    """Else a client's fan-outs would have the usual ones drawn for anew, in others' requests."""
    requests = NodeRequests(graphs=None)
    usual = requests._sizes_of(("community", (10, 10)), object)
    for number in range(2 * _MOST_SIZES):
        requests._sizes_of(("community", (number,)), object)
        assert requests._sizes_of(("community", (10, 10)), pytest.fail) is usual
    assert len(requests._sizes) == _MOST_SIZES
