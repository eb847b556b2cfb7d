"""Answers to requests: outputs and QoS facts."""

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from html import escape
from typing import Any

import numpy as np

from serve.wire.messages import Array, ParameterValue, Response


@dataclass(frozen=True, slots=True)
class QosFacts:
    """Facts about one request; fields that another server does not send keep their defaults."""

    request_uid: str = ""
    #: Time from acceptance to launch, without the preparation that no other work hid.
    queue_us: int = 0
    prepare_us: int = 0
    run_us: int = 0
    group_id: int = -1
    #: Number of requests planned together, this one included.
    group_size: int = 0
    #: Number of requests of one model that ran as one, this one included.
    merged: int = 0
    policy: str = ""
    discipline: str = ""
    lane: int = -1
    executor: str = ""
    #: Estimated time of the request alone in the server.
    solo_estimate_us: int = 0
    #: The promise: time from arrival to the answer.
    qos_target_us: int = 0
    qos_violated: bool = False
    pmc_estimate_bytes: int = 0
    #: None when the lane could not measure it.
    pmc_measured_bytes: int | None = None
    #: Values of the outputs that are NaN or infinite, unless the model checks none.
    nonfinite_values: int = 0
    #: For requests by node id: the version of the graph, the seed of the sample (send it again for
    #: the same sample), and the size of the sample.
    graph: str = ""
    graph_version: int = 0
    seed: int | None = None
    sampled_nodes: int = 0
    sampled_edges: int = 0
    #: For a client of several servers: which one answered, and how many the request was sent to.
    machine: str = ""
    attempts: int = 0
    #: For a server that knows others: its name, and how many servers passed the request on to it.
    node: str = ""
    hops: int = 0
    #: For a request with `split="home"`: the number of parts that were answered apart.
    split_parts: int = 0
    #: Time from its arrival at a front until its arrival at the server, where the front tells it.
    front_us: int = 0

    @classmethod
    def of(cls, parameters: Mapping[str, ParameterValue]) -> "QosFacts":
        """Return the facts among the parameters of a response."""
        known: Any = {name: parameters[name] for name in _QOS_FACTS if name in parameters}
        return cls(**known)

    def to_dict(self) -> dict[str, Any]:
        """Return the facts by name, as plain values for JSON or a table."""
        return asdict(self)

    def _repr_html_(self) -> str:
        return _table("QoS facts", self.to_dict())


#: Computed once, as `fields` takes longer than reading an answer's facts.
_QOS_FACTS = tuple(f.name for f in fields(QosFacts))


@dataclass(frozen=True, slots=True)
class Answer:
    """Result of one request."""

    #: Outputs by name, in the model's order; writable.
    outputs: dict[str, Array]
    qos: QosFacts
    model: str
    version: str
    #: As sent, or made by the server.
    request_id: str
    #: Nodes of each graph, for a request that held several graphs as a list or a `Batch`.
    graph_nodes: tuple[int, ...] | None = None
    #: Rows of each graph in outputs whose declaration tells them, by output.
    graph_rows: Mapping[str, tuple[int, ...]] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        response: Response,
        graph_nodes: Sequence[int] | None = None,
        graph_rows: Mapping[str, tuple[int, ...]] | None = None,
    ) -> "Answer":
        """Convert a decoded message; outputs are copies, half precision widened to FP32."""
        outputs = {name: _own(array) for name, array in response.outputs.items()}
        return cls(
            outputs,
            QosFacts.of(response.parameters),
            response.model,
            response.version,
            response.request_id,
            None if graph_nodes is None else tuple(graph_nodes),
            graph_rows or {},
        )

    @property
    def output(self) -> Array:
        """The model's only output, or its first: one row per node, requested id, or graph."""
        return next(iter(self.outputs.values()))

    def torch(self, name: str | None = None) -> Any:
        """Return one output as a torch tensor on the CPU that shares its memory.

        Args:
            name: Name of the output; None for the first.

        Raises KeyError for an unknown name, and ImportError when torch is not installed.
        """
        array = self.output if name is None else self.outputs[name]
        return importlib.import_module("torch").from_numpy(array)

    def split(self) -> tuple["Answer", ...]:
        """Return an answer for each graph of a request that held several.

        Each output is cut by its rows: as the model declares them, such as one an edge, else one a
        graph or one a node. The parts share the request's QoS facts, and the memory of this answer.
        Raises ValueError for a request of one graph, and for an output with other rows.
        """
        if self.graph_nodes is None:
            raise ValueError("the request held no list of graphs and no Batch")
        parts: list[dict[str, Array]] = [{} for _ in self.graph_nodes]
        for name, array in self.outputs.items():
            counts = self.graph_rows.get(name)
            if counts is not None and array.ndim and len(array) == sum(counts):
                cut = np.split(array, np.cumsum(counts)[:-1])
            else:
                cut = _cut(name, array, self.graph_nodes)
            for part, rows in zip(parts, cut, strict=True):
                part[name] = rows
        return tuple(replace(self, outputs=part, graph_nodes=None, graph_rows={}) for part in parts)

    def _repr_html_(self) -> str:
        outputs = {name: f"{a.dtype} {list(a.shape)}" for name, a in self.outputs.items()}
        title = f"{self.model} version {self.version}"
        qos = self.qos
        times = {
            "run": f"{qos.run_us:,} µs",
            "target": f"{qos.qos_target_us:,} µs",
            "in time": "no" if qos.qos_violated else "yes",
        }
        return _table(title, outputs | times)


def _own(array: Array) -> Array:
    """Return a writable copy, with float16 as float32."""
    return array.astype(np.float32 if array.dtype == np.float16 else array.dtype.newbyteorder("="))


def _cut(name: str, array: Array, graph_nodes: Sequence[int]) -> list[Array]:
    """Return the rows of each graph; raises ValueError."""
    rows = len(array) if array.ndim else 0
    if rows == len(graph_nodes) and rows != sum(graph_nodes):
        return [array[at : at + 1] for at in range(rows)]
    if rows == sum(graph_nodes):
        return np.split(array, np.cumsum(graph_nodes)[:-1])
    raise ValueError(
        f"output '{name}' has {rows} rows, neither one for each of {len(graph_nodes)} graphs nor"
        f" one for each of {sum(graph_nodes)} nodes"
    )


def _table(title: str, rows: Mapping[str, object]) -> str:
    """Return an HTML table of two columns for notebooks."""
    cells = "".join(
        f"<tr><th>{escape(str(name))}</th><td>{escape(str(value))}</td></tr>"
        for name, value in rows.items()
    )
    return f"<table><caption>{escape(title)}</caption>{cells}</table>"
