"""Requests as callers write them, and their messages; shared by both clients."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import index
from typing import Any, TypedDict

from serve.client.arrays import array_for, is_integer
from serve.client.errors import Exhausted, InvalidRequest
from serve.client.facts import ModelInterface
from serve.client.objects import (
    DATATYPES_BY_KEYWORD,
    NODE_IDS,
    Graph,
    datatype_by_keyword,
    read_graph,
)
from serve.typed_names import edge_type, typed_name
from serve.wire.messages import Array, ParameterValue, Places, encode_request

#: Fan-outs of a request: see ``Request.fanouts``. Types of edges are names or PyG's tuples.
GivenFanouts = str | Sequence[int] | Mapping[Any, Sequence[int]]


class RequestFields(TypedDict, total=False):
    """The fields of ``Request`` that ``infer`` takes by keyword."""

    x: Any
    edge_index: Any
    edge_weight: Any
    edge_attr: Any
    batch: Any
    node_ids: Any
    nodes: Mapping[str, Any] | None
    graph: str | None
    version: str
    qos_target_s: float | None
    timeout_s: float | None
    priority: int
    tenant: str
    seed: int | None
    fanouts: GivenFanouts | None
    split: str
    request_id: str
    retry: bool


def refuse_unknown(options: Mapping[str, object]) -> None:
    """Raise TypeError for what is no field of a ``Request``, such as an input of a model's own."""
    for name in options:
        if name not in RequestFields.__annotations__:
            raise TypeError(
                f"'{name}' is no option of infer; if it is an input of the model, give all inputs"
                f" as a mapping by name: infer(model, {{'{name}': …}})"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One request: give `data`, or arrays, or `node_ids` or `nodes` of the resident `graph`.

    Shapes, for N nodes, E edges and F features: `x` [N, F], `edge_index` [2, E], `edge_weight`
    [E], `edge_attr` [E, D], `batch` [N], `node_ids` [K].
    """

    #: Name in the server's repository; or several, as `name` or `name:version`, to ask them all.
    model: str | list[str] | tuple[str, ...]
    #: A PyG `Data`, `Batch` or `HeteroData`, a list of `Data`, a mapping from names to arrays, or
    #: any object with such attributes. Sends what the model takes.
    data: Any = None
    x: Any = None
    edge_index: Any = None
    edge_weight: Any = None
    edge_attr: Any = None
    batch: Any = None
    node_ids: Any = None
    #: Ids of nodes of one type, by its name, for a graph with several: `{"paper": [5, 17]}`.
    nodes: Mapping[str, Any] | None = None
    graph: str | None = None
    #: Empty for the newest. For several models, `model` holds the versions.
    version: str = ""
    #: QoS target instead of the server's own. A later answer still comes, as a violation.
    qos_target_s: float | None = None
    #: Time limit after which both client and server give up; None for the client's.
    timeout_s: float | None = None
    #: 1 is the most urgent; 0 for the model's default.
    priority: int = 0
    tenant: str = ""
    #: Seed of neighbour sampling.
    seed: int | None = None
    #: In-neighbours sampled at each hop, -1 for all of them; or `all`, for the answer that the
    #: whole graph gives. A mapping has them by type of edges, and by `*` for those not named. None
    #: for the model's own.
    fanouts: GivenFanouts | None = None
    #: `home` to have nodes of a graph that is shared out answered by the servers where they live.
    split: str = ""
    request_id: str = ""
    #: False to send it once, whatever the answer.
    retry: bool = True

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
        for name in ("version", "request_id", "tenant", "graph"):
            if not isinstance(getattr(self, name), str | None):
                raise InvalidRequest.local(f"{name}: {getattr(self, name)!r} is no text")
        try:
            message = encode_request(
                self.models[0][0],
                tensors,
                version=self.version,
                request_id=self.request_id,
                parameters=self._parameters(),
                places=places,
            )
        except ValueError as error:  # includes WireError, and a text that is not Unicode
            raise InvalidRequest.local(str(error)) from error
        if len(message) > max_message_bytes:
            sizes = ", ".join(f"{name} {array.nbytes}" for name, array in tensors.items())
            raise Exhausted.local(
                f"the request takes {len(message)} bytes ({sizes}), more than max_message_bytes "
                f"{max_message_bytes}",
            )
        return message

    @property
    def is_joint(self) -> bool:
        """True when it asks several models, or lists one."""
        return not isinstance(self.model, str)

    @property
    def models(self) -> tuple[tuple[str, str], ...]:
        """Name and version of each model; the version is empty for the newest.

        Raises InvalidRequest.
        """
        if isinstance(self.model, str):
            return ((self.model, self.version),)
        if not self.model:
            raise InvalidRequest.local("model: the list is empty")
        if self.version:
            raise InvalidRequest.local(
                f"version: '{self.version}' is given beside several models; write "
                f"'{self.model[0]}:{self.version}'"
            )
        found = [name.partition(":") for name in self.model]
        return tuple((name, version) for name, _, version in found)

    @property
    def needs_interface(self) -> bool:
        """True when what to send depends on what the model takes."""
        if self.data is not None:
            return True
        return any(
            is_integer(value) and datatype_by_keyword(name).startswith("FP")
            for name, value in self._given().items()
        )

    def read(self, interface: ModelInterface | None) -> Graph:
        """Return the arrays to send.

        Args:
            interface: What the model takes; may be None unless `needs_interface`.

        Raises InvalidRequest for an object or an array that cannot be sent.
        """
        given = self._given()
        if interface is not None:
            return read_graph(self.data, given, interface)
        return Graph(
            {
                name: array_for(name, value, datatype_by_keyword(name))
                for name, value in given.items()
            }
        )

    def _given(self) -> dict[str, Any]:
        """Return the arrays given by keyword, in the order sent."""
        given = {name: getattr(self, name) for name in DATATYPES_BY_KEYWORD}
        given |= {typed_name(NODE_IDS, of): ids for of, ids in (self.nodes or {}).items()}
        return {name: value for name, value in given.items() if value is not None}

    def _parameters(self) -> dict[str, ParameterValue | None]:
        return {
            "graph": self.graph,
            "qos_target_us": _target_us(self.qos_target_s),
            "timeout": _micros("timeout_s", self.timeout_s),
            "priority": _integer("priority", self.priority) or None,
            "tenant": self.tenant or None,
            "seed": _integer("seed", self.seed),
            "fanouts": fanouts_text(self.fanouts),
            "split": self.split or None,
            "models": None if isinstance(self.model, str) else ",".join(self.model),
        }


def fanouts_text(given: GivenFanouts | None) -> str | None:
    """Return fan-outs in the form of the request parameter."""
    if isinstance(given, Mapping):
        return ";".join(
            f"{type_text(of)}={','.join(map(str, numbers))}" for of, numbers in given.items()
        )
    return given if given is None or isinstance(given, str) else ",".join(map(str, given))


def type_text(of: str | Sequence[str]) -> str:
    """Return the name of a type of nodes or edges; PyG has a tuple for edges."""
    return of if isinstance(of, str) else edge_type(*of)


def _integer(name: str, value: Any) -> int | None:
    """Return a Python int for an integer of any kind, such as numpy's; raises InvalidRequest."""
    if value is None:
        return None
    try:
        return index(value)
    except TypeError:
        raise InvalidRequest.local(f"{name}: {value!r} is no integer") from None


def count_of(name: str, value: Any) -> int:
    """Return a count as the wire carries it; raises InvalidRequest, which names the field."""
    count = _integer(name, value) or 0
    if not 0 <= count < 1 << 63:
        raise InvalidRequest.local(f"{name}: {count} must be at least 0 and less than 2**63")
    return count


def _target_us(seconds: float | None) -> int | None:
    """Return a QoS target in µs; raises InvalidRequest for one before the request."""
    if seconds is not None and seconds < 0:
        raise InvalidRequest.local(f"qos_target_s: {seconds} is negative")
    return _micros("qos_target_s", seconds)


def _micros(name: str, seconds: float | None) -> int | None:
    """Convert to µs, at least 1 because 0 means no limit; None stays None.

    Raises InvalidRequest, which names the field, for infinity and NaN.
    """
    if seconds is None:
        return None
    if not math.isfinite(seconds):
        raise InvalidRequest.local(f"{name}: {seconds} is no number of seconds; None is no limit")
    return max(1, round(seconds * 1e6))
