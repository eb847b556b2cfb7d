"""A request by node ids of which some are answered by other servers, where these nodes live."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from serve.core.types import Failed, FailReason, Outcome
from serve.graphs.csr import Ids
from serve.graphs.partition import Parts

Outputs = dict[str, NDArray[Any]]


class IdHomes(NamedTuple):
    """Where the nodes of a request live."""

    ids: Ids
    #: Part of each id; those that all servers hold are of `here`.
    parts: Parts
    #: Part of this server.
    here: int
    #: Promise of the whole request.
    target_ns: int


class PartAnswer(NamedTuple):
    """The answer of another server."""

    #: Who gave it, for people.
    told: str
    #: Places of its ids among those of the request.
    positions: Ids
    #: A row for each of them, by output.
    outputs: Mapping[str, NDArray[Any]]
    graph_state: str


class OtherParts(Protocol):
    """The parts that other servers run. Any thread may call any method."""

    def answers(self) -> Sequence[PartAnswer] | Outcome:
        """Wait for all; return them, or how the request ends as one of them failed."""
        ...

    def end(self) -> None:
        """Cancel what has no answer yet. Idempotent."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class Split:
    """How a request was split."""

    #: Places of the ids that are answered here, among those of the request.
    own: Ids
    others: OtherParts
    #: Number of all parts.
    count: int


def put_together(
    split: Split, mine: Outputs, graph_state: str, answers: Sequence[PartAnswer]
) -> Outputs | Failed:
    """Return the outputs of the whole request, a row for each id, in their order.

    Fails where the parts do not fit each other: they saw other versions of the graph, or are of
    models that differ.
    """
    size = split.own.size + sum(one.positions.size for one in answers)
    found = {name: np.empty((size, *rows.shape[1:]), rows.dtype) for name, rows in mine.items()}
    for name, rows in mine.items():
        found[name][split.own] = rows
    for one in answers:
        if one.graph_state != graph_state:
            return Failed(
                FailReason.ROWS_LOST,
                f"{one.told} saw another version of the graph than this server: it has just"
                " changed; send the request again",
            )
        for name, rows in found.items():
            given = one.outputs.get(name)
            wanted = (one.positions.size, *rows.shape[1:])
            if given is None or given.shape != wanted or given.dtype != rows.dtype:
                shape = None if given is None else f"{given.dtype} {list(given.shape)}"
                return Failed(
                    FailReason.ROWS_LOST,
                    f"{one.told} answered output '{name}' with {shape}, expected"
                    f" {rows.dtype} {list(wanted)}",
                )
            rows[one.positions] = given
    return found
