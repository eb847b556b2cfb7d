"""Conversion of graphs to request messages; shared by both clients.

Arrays may be numpy arrays, torch tensors (on any device) or nested sequences. Features and weights
are sent as FP32. Edges are sent as INT32 when their values fit, which those of all real graphs do.
Narrowing 80,000 edges takes 0.05 ms and halves what is usually the largest tensor, which saves
several times as much on the way.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypedDict

import numpy as np

from serve.client.errors import Exhausted, InvalidRequest
from serve.inputs import INPUTS
from serve.wire.messages import Array, ParameterValue, Places, WireError, encode_request

#: Dtype of each tensor of a request, in the order sent; None for integers of either width.
_DTYPES: dict[str, str | None] = {
    **{name: None if each.also else each.dtype for name, each in INPUTS.items()},
    "node_ids": "int64",
}
_INT32 = np.iinfo(np.int32)


class RequestFields(TypedDict, total=False):
    """The fields of ``Request`` that ``infer`` takes by keyword."""

    x: Any
    edge_index: Any
    edge_weight: Any
    edge_attr: Any
    batch: Any
    node_ids: Any
    graph: str | None
    version: str
    qos_target_s: float | None
    timeout_s: float | None
    priority: int
    tenant: str
    seed: int | None
    fanouts: str | Sequence[int] | None
    request_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One request: give `data`, or arrays, or `node_ids` of the resident `graph`.

    Shapes, for N nodes, E edges and F features: `x` [N, F], `edge_index` [2, E], `edge_weight`
    [E], `edge_attr` [E, D], `batch` [N], `node_ids` [K].
    """

    model: str
    #: A PyG `Data` or `Batch`, or any object with such attributes; sends those the model takes.
    data: Any = None
    x: Any = None
    edge_index: Any = None
    edge_weight: Any = None
    edge_attr: Any = None
    batch: Any = None
    node_ids: Any = None
    graph: str | None = None
    #: Empty for the newest.
    version: str = ""
    #: QoS target instead of the server's own. A later answer still comes, as a violation.
    qos_target_s: float | None = None
    #: Time limit after which both client and server give up.
    timeout_s: float | None = None
    #: 1 is the most urgent; 0 for the model's default.
    priority: int = 0
    tenant: str = ""
    #: Seed of neighbour sampling.
    seed: int | None = None
    #: In-neighbours sampled at each hop, -1 for all of them; or `all`, for the answer that the
    #: whole graph gives. None for the model's own.
    fanouts: str | Sequence[int] | None = None
    request_id: str = ""

    def encode(
        self, tensors: Mapping[str, Array], max_message_bytes: int, places: Places | None = None
    ) -> bytes:
        """Serialize the request.

        Args:
            tensors: Result of `tensors`.
            max_message_bytes: Largest message allowed.
            places: Places of the tensors in shared memory; None to send them in the message.

        Raises:
            InvalidRequest: A value cannot be encoded.
            Exhausted: The message is too large.
        """
        try:
            message = encode_request(
                self.model,
                tensors,
                version=self.version,
                request_id=self.request_id,
                parameters=self._parameters(),
                places=places,
            )
        except WireError as error:
            raise InvalidRequest.local(str(error)) from error
        if len(message) > max_message_bytes:
            sizes = ", ".join(f"{name} {array.nbytes}" for name, array in tensors.items())
            raise Exhausted.local(
                f"the request takes {len(message)} bytes ({sizes}), more than max_message_bytes "
                f"{max_message_bytes}",
            )
        return message

    def tensors(self, taken: Collection[str]) -> dict[str, Array]:
        """Return the arrays to send; of `data`, only those named in `taken`."""
        tensors = {}
        for name, dtype in _DTYPES.items():
            value = getattr(self, name)
            if value is None and name in taken:
                value = getattr(self.data, name, None)
            if value is not None:
                tensors[name] = as_array(name, value, dtype)
        return tensors

    def _parameters(self) -> dict[str, ParameterValue | None]:
        return {
            "graph": self.graph,
            "qos_target_us": _micros(self.qos_target_s),
            "timeout": _micros(self.timeout_s),
            "priority": self.priority or None,
            "tenant": self.tenant or None,
            "seed": self.seed,
            "fanouts": fanouts_text(self.fanouts),
        }


def fanouts_text(given: str | Sequence[int] | None) -> str | None:
    """Return fan-outs in the form of the request parameter."""
    return given if given is None or isinstance(given, str) else ",".join(map(str, given))


def _micros(seconds: float | None) -> int | None:
    """Convert to µs, at least 1 because 0 means no limit; None stays None."""
    return None if seconds is None else max(1, round(seconds * 1e6))


def as_array(name: str, value: Any, dtype: str | None) -> Array:
    """Convert `value` to a numpy array of `dtype`; raises InvalidRequest."""
    try:
        if hasattr(value, "detach"):
            value = value.detach().cpu().numpy()
        array = np.asarray(value, dtype)
    except (TypeError, ValueError) as error:
        raise InvalidRequest.local(f"tensor '{name}': {error}") from error
    return array if dtype else _narrow(name, array)


def _narrow(name: str, array: Array) -> Array:
    """Convert integers to INT32 if all of them fit, otherwise to INT64."""
    if array.size == 0:
        return array.astype(np.int32)
    if array.dtype.kind not in "iu":
        raise InvalidRequest.local(f"tensor '{name}': integers are required, not {array.dtype}")
    fits = array.dtype == np.int32 or (array.min() >= _INT32.min and array.max() <= _INT32.max)
    return array.astype(np.int32 if fits else np.int64, copy=False)
