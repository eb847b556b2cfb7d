"""Connection to the server under load, for what has to be known before a run."""

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import grpc
import msgspec

from loadgen.inputs import Shapes
from serve.client.channel import Metadata, address_of
from serve.errors import ConfigError, NotReady, UnknownName
from serve.interface import Interface
from serve.pb import gnnserve_pb2, gnnserve_pb2_grpc, grpc_service_pb2, grpc_service_pb2_grpc
from serve.wire.messages import INFER_METHOD
from serve.workload import ResidentSpec

_RATE_INSTEAD = "rho needs a gnnserve server: give a rate"
#: What another request would mend.
_REFUSED = (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.FAILED_PRECONDITION)
ResultT = TypeVar("ResultT")

_CONNECT_S = 10.0
#: Time limit of a question, and of a request that is sent alone.
ASK_S = 30.0
#: Pause before measuring a solo time, which includes that idle cores are slower at first.
REST_S = 0.01


class Target:
    """Channel to one server."""

    def __init__(
        self, address: str, tokens: Mapping[str, str] | None = None, ca: Path | None = None
    ) -> None:
        """Connect.

        Args:
            address: HOST:PORT, or as the client takes it, such as grpcs://HOST:PORT.
            tokens: Tokens by tenant, under "" that of requests without a tenant of its own.
            ca: PEM file of the authorities to trust.

        Raises NotReady when no server answers, ConfigError for arguments that contradict.
        """
        self.address = address
        self._tokens = dict(tokens or {})
        token = self._tokens.get("") or next(iter(self._tokens.values()), None)
        try:
            found = address_of(address, credentials=ca, token=token, max_message_bytes=-1)
        except (ValueError, OSError) as error:
            raise ConfigError(str(error)) from None
        #: For what is asked before a run.
        self._metadata = found.metadata()
        if found.credentials is None:
            self._channel = grpc.insecure_channel(found.target, found.options)
        else:
            self._channel = grpc.secure_channel(found.target, found.credentials, found.options)
        try:
            grpc.channel_ready_future(self._channel).result(timeout=_CONNECT_S)
        except grpc.FutureTimeoutError:
            self.close()
            raise NotReady(f"no gRPC server answers at {address} within {_CONNECT_S:g} s") from None
        #: Sends an encoded request, as gRPC's callables do.
        self.infer: Any = self._channel.unary_unary(INFER_METHOD)
        # Generated stubs carry no types.
        self._inference: Any = grpc_service_pb2_grpc.GRPCInferenceServiceStub(self._channel)  # type: ignore[no-untyped-call]
        self._own: Any = gnnserve_pb2_grpc.GnnServeStub(self._channel)  # type: ignore[no-untyped-call]

    def metadata(self, tenant: str) -> Metadata:
        """Return what a request of a tenant carries: its token, or the one for all."""
        token = self._tokens.get(tenant) or self._tokens.get("")
        return () if token is None else (("authorization", f"Bearer {token}"),)

    def close(self) -> None:
        """Cancel all requests in flight and disconnect."""
        self._channel.close()

    def models(self) -> tuple[str, ...]:
        """Return the names of the models that are ready; raises NotReady if the server cannot."""
        request = grpc_service_pb2.RepositoryIndexRequest(ready=True)
        answer = self._ask(self._inference.RepositoryIndex, request, "name one model")
        return tuple(dict.fromkeys(model.name for model in answer.models))

    def inputs(self, model: str) -> Shapes:
        """Return names and shapes of the model's inputs, or what it declares.

        Raises UnknownName or NotReady.
        """
        request = grpc_service_pb2.ModelMetadataRequest(name=model)
        metadata = self._ask(self._inference.ModelMetadata, request)
        if declared := metadata.properties.get("interface"):
            return msgspec.json.decode(declared, type=Interface)
        return {tensor.name: tuple(tensor.shape) for tensor in metadata.inputs}

    def slots(self) -> int:
        """Return how many requests execute at once; raises NotReady when it cannot tell."""
        answer = self._ask(self._own.Describe, gnnserve_pb2.DescribeRequest(), _RATE_INSTEAD)
        return int(answer.slots)

    def solo_s(self, model: str, num_nodes: int, num_edges: int) -> float:
        """Return the server's estimate of a request's solo time, in seconds."""
        request = gnnserve_pb2.EstimateRequest(
            model=model, num_nodes=num_nodes, num_edges=num_edges
        )
        return float(self._ask(self._own.Estimate, request, _RATE_INSTEAD).solo_ns) / 1e9

    def graph(self, name: str, node_type: str) -> tuple[int, str]:
        """Return the number of nodes of a graph, of one type if it has several, and its origin.

        Raises UnknownName or NotReady, and ConfigError for a type that the graph lacks.
        """
        request = gnnserve_pb2.ListGraphsRequest(name=name)
        (found,) = self._ask(self._own.ListGraphs, request, "send subgraphs").graphs
        if not found.node_types and not node_type:
            return int(found.num_nodes), str(found.source)
        if node_type not in found.node_types:
            known = ", ".join(sorted(found.node_types))
            has = f"it has nodes of {known}" if known else "it has one type of nodes"
            told = f"node type '{node_type}'" if node_type else "--node-type is missing"
            raise ConfigError(f"graph '{name}': {told}; {has}")
        return int(found.node_types[node_type]), str(found.source)

    def sample_solo_s(self, model: str, spec: ResidentSpec, num_ids: int) -> float:
        """Return the server's estimate of the solo time of a request by node ids, in seconds.

        Raises ConfigError when the model cannot be asked about that graph.
        """
        request = gnnserve_pb2.EstimateRequest(
            model=model,
            graph=spec.graph,
            num_ids=num_ids,
            fanouts=spec.fanouts,
            node_type=spec.node_type,
        )
        return float(self._ask(self._own.Estimate, request, _RATE_INSTEAD).solo_ns) / 1e9

    def lone_s(self, message: bytes) -> float:
        """Send an encoded request after a pause; returns its latency in seconds.

        Raises NotReady or UnknownName when there is no answer.
        """
        time.sleep(REST_S)
        sent_ns = time.monotonic_ns()
        self._ask(self.infer, message)
        return (time.monotonic_ns() - sent_ns) / 1e9

    def _ask(self, method: Callable[..., ResultT], request: Any, instead: str = "") -> ResultT:
        """Call `method`; when the server lacks it, the error says what to do `instead`."""
        try:
            return method(request, timeout=ASK_S, metadata=self._metadata)
        except grpc.RpcError as error:
            text = f"{self.address}: {error.details()}"
            if error.code() is grpc.StatusCode.NOT_FOUND:
                raise UnknownName(text) from None
            if error.code() is grpc.StatusCode.UNIMPLEMENTED:
                raise NotReady(f"{text}; {instead}" if instead else text) from None
            if error.code() in _REFUSED:
                raise ConfigError(text) from None
            raise NotReady(f"{text} ({error.code().name})") from None
