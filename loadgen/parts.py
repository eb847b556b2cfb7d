"""A run divided among worker processes: each sends a part of the trace, all begin together."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

import msgspec

from loadgen.loop import Loop
from loadgen.measure import Sample
from loadgen.options import LoadOptions
from loadgen.plan import ClosedLoop, LoadPlan
from serve.errors import ConfigError
from serve.workload import Trace

_SAMPLES = msgspec.msgpack.Decoder(list[Sample])


@dataclass(frozen=True, slots=True)
class LoadPart:
    """What one of several workers sends: each request whose turn is its rank."""

    #: Number of the run, which its messages carry.
    run: int
    rank: int
    workers: int
    options: LoadOptions
    trace: Trace
    closed: ClosedLoop | None
    native: bool

    def encode(self) -> dict[str, Any]:
        """Return the data of a message of Locust's."""
        return {
            "run": self.run,
            "rank": self.rank,
            "workers": self.workers,
            "options": msgspec.json.encode(self.options, enc_hook=str),
            "trace": self.trace.encode(),
            "closed": msgspec.json.encode(self.closed),
            "native": self.native,
        }

    @classmethod
    def decode(cls, data: Mapping[str, Any]) -> Self:
        """Return the part that `encode` wrote."""
        return cls(
            run=data["run"],
            rank=data["rank"],
            workers=data["workers"],
            options=msgspec.json.decode(
                data["options"], type=LoadOptions, dec_hook=lambda kind, text: kind(text)
            ),
            trace=Trace.decode(data["trace"]),
            closed=msgspec.json.decode(data["closed"], type=ClosedLoop | None),
            native=data["native"],
        )


def divide(
    plan: LoadPlan, options: LoadOptions, workers: int, *, run: int, native: bool
) -> list[LoadPart]:
    """Divide a plan so that each request is sent by one worker, at its own time.

    Requests in flight are divided as evenly as they go. Raises ConfigError for fewer requests in
    flight than workers.
    """
    items, closed = plan.trace.items, plan.closed
    if closed is not None and closed.in_flight < workers:
        raise ConfigError(
            f"in-flight {closed.in_flight}: each of {workers} workers keeps at least one in flight"
        )
    return [
        LoadPart(
            run=run,
            rank=rank,
            workers=workers,
            options=options,
            # In a closed loop the items only say what is sent, in turn.
            trace=Trace(plan.trace.header, items[rank::workers] or (items if closed else ())),
            closed=None if closed is None else _share(closed, rank, workers),
            native=native,
        )
        for rank in range(workers)
    ]


def _share(closed: ClosedLoop, rank: int, workers: int) -> ClosedLoop:
    requests = closed.requests
    return ClosedLoop(
        in_flight=_evenly(closed.in_flight, rank, workers),
        duration_s=closed.duration_s,
        requests=None if requests is None else _evenly(requests, rank, workers),
    )


def _evenly(total: int, rank: int, workers: int) -> int:
    return total // workers + (rank < total % workers)


class DividedLoop(Loop):
    """A run whose requests workers send; its samples are what they tell."""

    def __init__(self, plan: LoadPlan, address: str, parts: Mapping[str, LoadPart]) -> None:
        """Begin with nothing sent; `parts` has the part of each worker by its name."""
        super().__init__(plan, address)
        self._parts = dict(parts)
        self._sent = dict.fromkeys(parts, 0)
        self._cpu_s = dict.fromkeys(parts, 0.0)
        #: Workers whose part has not ended.
        self.sending = set(parts)

    @property
    def sent(self) -> int:
        """Number of requests sent."""
        return sum(self._sent.values())

    @property
    def processes(self) -> int:
        """Number of processes that send."""
        return len(self._parts)

    @property
    def cpu_s(self) -> float:
        """Processor time of the busiest worker since the start of the trace."""
        return max(self._cpu_s.values(), default=0.0)

    def hear(self, worker: str, data: Mapping[str, Any]) -> list[Sample]:
        """Add what a worker told, see `told`; return its samples, numbered as in the trace."""
        part = self._parts.get(worker)
        if part is None or data["run"] != part.run:
            return []
        samples = [
            msgspec.structs.replace(one, index=part.rank + part.workers * one.index)
            for one in _SAMPLES.decode(data["samples"])
        ]
        self.samples += samples
        self._sent[worker] = data["sent"]
        self._cpu_s[worker] = data["cpu_s"]
        if data["over"]:
            self.sending.discard(worker)
        return samples


def told(run: int, loop: Loop, samples: list[Sample], *, over: bool) -> dict[str, Any]:
    """Return the data of a worker's message: its counts, and samples since the last one."""
    return {
        "run": run,
        "samples": msgspec.msgpack.encode(samples),
        "sent": loop.sent,
        "cpu_s": loop.cpu_s,
        "over": over,
    }
