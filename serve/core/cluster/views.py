"""What is known of a request before it is sent, and of the machines that could serve it.

Nothing here imports the scheduler's types: a client, which has none of the extras, decides by the
same code as a front.
"""

from dataclasses import dataclass
from zlib import crc32

#: Share of a run by which its estimate may be short where it decides on a machine: a run that would
#: just be in time is late half of the times.
DOUBT = 0.2


@dataclass(frozen=True, slots=True)
class RoutedRequest:
    """Request on its way to a machine; times are those of the reference pool."""

    #: Unique at its front.
    request_id: int
    model: str
    #: Memory that it reserves while it runs; 0 when not known.
    need_bytes: int = 0
    #: Solo time on a machine of the reference pool, and the run's part of it; 0 when not known.
    solo_ns: int = 0
    run_ns: int = 0
    #: When an answer is late, wherever it comes from; None when not known.
    due_ns: int | None = None
    #: When the caller stops waiting; None for never.
    expires_ns: int | None = None
    #: It changes the server, so it is sent again only after a refusal.
    changes: bool = False
    #: Graph that the machine must hold; empty for none.
    graph: str = ""

    def __post_init__(self) -> None:
        if self.need_bytes < 0 or not 0 <= self.run_ns <= self.solo_ns:
            raise ValueError(
                f"0 <= memory {self.need_bytes} bytes, 0 <= run {self.run_ns} <= solo "
                f"{self.solo_ns} ns"
            )


@dataclass(frozen=True, slots=True)
class MachineFacts:
    """What a machine says of itself."""

    name: str
    #: Counts its starts, so that news of an earlier one is known to be old.
    incarnation: int = 1
    #: Runs that execute at once.
    cores: int = 1
    #: Memory for tasks, weights already subtracted; None when not known.
    budget_bytes: int | None = None
    #: Models that it has loaded; None when not known, so that any may be there.
    models: frozenset[str] | None = None
    #: Speed of a run, as a multiple of that on the reference pool.
    pace: float = 1.0
    #: Graphs that it holds; None when not known, so that any may be there.
    graphs: frozenset[str] | None = None
    #: Part that it holds of graphs that are shared out; None for none.
    part: int | None = None

    def __post_init__(self) -> None:
        if self.cores < 1 or self.pace <= 0:
            raise ValueError(
                f"machine '{self.name}': cores {self.cores} must be at least 1 and pace "
                f"{self.pace:g} above 0"
            )

    @property
    def weight(self) -> float:
        """Work it does in a unit of time, in that of one core of the reference pool."""
        return self.cores * self.pace

    def has_model(self, model: str) -> bool:
        """Return True unless the model is known not to be there."""
        return self.models is None or model in self.models

    def has_graph(self, graph: str) -> bool:
        """Return True unless the graph is known not to be there."""
        return not graph or self.graphs is None or graph in self.graphs

    def can_hold(self, request: RoutedRequest) -> bool:
        """Return True unless its model, graph or the memory for it is known not to be there."""
        if self.budget_bytes is not None and request.need_bytes > self.budget_bytes:
            return False
        return self.has_model(request.model) and self.has_graph(request.graph)


class MachineView:
    """Machine as one front sees it: its facts and what is on it."""

    __slots__ = ("count", "facts", "mark", "weight", "work_ns")

    def __init__(self, facts: MachineFacts) -> None:
        self.facts = facts
        self.weight = facts.weight
        #: Follows from its name, and differs from those of most others.
        self.mark = crc32(facts.name.encode())
        #: Requests on it without an answer: those this front sent there, or as the machine told
        #: with what this front sent there since.
        self.count = 0
        #: Their run times on the reference pool, summed.
        self.work_ns = 0

    def __repr__(self) -> str:
        return f"MachineView({self.facts.name!r}, count={self.count})"

    def know(self, facts: MachineFacts) -> None:
        """Take in what the machine says of itself now."""
        self.facts = facts
        self.weight = facts.weight

    def sent(self, request: RoutedRequest) -> None:
        """Count a request that is sent there."""
        self.count += 1
        self.work_ns += request.run_ns

    def ended(self, request: RoutedRequest) -> None:
        """Count off a request that is no longer there."""
        self.count = max(0, self.count - 1)
        self.work_ns = max(0, self.work_ns - request.run_ns)

    def told(self, count: int, work_ns: int) -> None:
        """Take in what the machine says is on it now, others' requests included."""
        self.count = count
        self.work_ns = work_ns

    def ends_ns(self, request: RoutedRequest, now_ns: int) -> float:
        """Return when an answer is expected if the request is there now.

        Its run shares the cores with those that are there. A scheduler that lets short runs go
        before long ones gives each about that; by its queue's work a short run would wait for ever.
        """
        facts = self.facts
        beside = max(1.0, (self.count + 1) / facts.cores)
        host_ns = request.solo_ns - request.run_ns
        return now_ns + host_ns + request.run_ns * beside / facts.pace

    def is_in_time(self, request: RoutedRequest, now_ns: int) -> bool:
        """Return True when it is expected to end in time, also if its run takes a little longer."""
        if request.due_ns is None:
            return True
        doubt_ns = DOUBT * request.run_ns / self.facts.pace
        return self.ends_ns(request, now_ns) + doubt_ns <= request.due_ns
