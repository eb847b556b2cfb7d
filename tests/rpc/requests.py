"""Requests for the fake engine's model, and what sends one."""

import numpy as np
import pytest

from bench.kit.waiting import PATIENCE_S
from serve.wire.messages import INFER_METHOD, decode_response, encode_request
from tests.rpc.fakes import FEATURES

#: A graph of two nodes and one edge, and the request with it.
TENSORS = {"x": np.ones((2, FEATURES), np.float32), "edge_index": np.zeros((2, 1), np.int64)}
MESSAGE = encode_request("gcn", TENSORS, request_id="r")
#: Two nodes that point at each other.
EDGES = np.array([[0, 1], [1, 0]], np.int64)

#: Runs a test of the fixture `front` with the native front alone.
native = pytest.mark.parametrize("front", ["native"], indirect=True)


def features(nodes):
    """Return features that differ from node to node."""
    return np.arange(nodes * FEATURES, dtype=np.float32).reshape(nodes, FEATURES)


def request(nodes=2, request_id="r", model="gcn"):
    """Return a serialized request for a graph of so many nodes."""
    return encode_request(model, {"x": features(nodes), "edge_index": EDGES}, request_id=request_id)


def infer(channel):
    """Send `MESSAGE`; returns the id of its answer."""
    answer = channel.unary_unary(INFER_METHOD)(MESSAGE, timeout=PATIENCE_S)
    return decode_response(answer).request_id
