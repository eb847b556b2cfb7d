"""Ask a gnnserve server for predictions on graphs, with a promise per request.

    from serve.client import Client

    with Client("127.0.0.1:8001") as client:
        answer = client.infer("gcn", data)

`data` is a PyG `Data`, or give arrays by keyword. `answer.output` is a numpy array and
`answer.qos` says what happened to the request. ``AsyncClient`` has the same methods for asyncio.
Neither torch nor PyG is imported here. Errors: see ``errors``.
"""

from serve.client.aio import AsyncClient
from serve.client.errors import (
    AlreadyExists,
    Cancelled,
    ClientError,
    Exhausted,
    InvalidRequest,
    Mismatched,
    NotFound,
    NotOffered,
    ServerFault,
    TimedOut,
    Unavailable,
)
from serve.client.facts import Answer, Estimate, GraphFacts, ModelFacts, QosFacts, ServerFacts
from serve.client.requests import Request
from serve.client.sync import Client

__all__ = [
    "AlreadyExists",
    "Answer",
    "AsyncClient",
    "Cancelled",
    "Client",
    "ClientError",
    "Estimate",
    "Exhausted",
    "GraphFacts",
    "InvalidRequest",
    "Mismatched",
    "ModelFacts",
    "NotFound",
    "NotOffered",
    "QosFacts",
    "Request",
    "ServerFacts",
    "ServerFault",
    "TimedOut",
    "Unavailable",
]
