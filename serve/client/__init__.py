"""Ask a gnnserve server for predictions on graphs, with a promise per request.

    from serve.client import Client

    with Client("127.0.0.1:8001") as client:
        answer = client.infer("gcn", data)

`data` is a PyG `Data`, or give arrays by keyword. `answer.output` is a numpy array and
`answer.qos` says what happened to the request. ``AsyncClient`` has the same methods for asyncio.
Neither torch nor PyG is imported here. Errors: see ``errors``.
"""

from serve.client.aio import AsyncClient
from serve.client.answers import Answer, QosFacts
from serve.client.channel import TlsFiles
from serve.client.errors import (
    AlreadyExists,
    Cancelled,
    ClientError,
    Exhausted,
    Forbidden,
    InvalidRequest,
    Mismatched,
    NotFound,
    NotOffered,
    ServerFault,
    TimedOut,
    Unauthenticated,
    Unavailable,
)
from serve.client.facts import (
    Estimate,
    GraphFacts,
    JobFacts,
    ModelFacts,
    ModelInterface,
    ServerFacts,
    ShadowFacts,
    SplitFacts,
    TensorFacts,
    VersionsFacts,
)
from serve.client.joint import Answers
from serve.client.requests import Request
from serve.client.sync import Client

__all__ = [
    "AlreadyExists",
    "Answer",
    "Answers",
    "AsyncClient",
    "Cancelled",
    "Client",
    "ClientError",
    "Estimate",
    "Exhausted",
    "Forbidden",
    "GraphFacts",
    "InvalidRequest",
    "JobFacts",
    "Mismatched",
    "ModelFacts",
    "ModelInterface",
    "NotFound",
    "NotOffered",
    "QosFacts",
    "Request",
    "ServerFacts",
    "ServerFault",
    "ShadowFacts",
    "SplitFacts",
    "TensorFacts",
    "TimedOut",
    "TlsFiles",
    "Unauthenticated",
    "Unavailable",
    "VersionsFacts",
]
