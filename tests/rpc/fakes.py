"""An engine in memory, which answers at once or when a test releases the request."""

import threading
import time
from dataclasses import replace
from types import SimpleNamespace

import numpy as np

from bench.kit.waiting import wait_for
from serve.core.versions.rules import VersionRules
from serve.errors import NotReady, RequestCancelled, ServeError, UnknownName
from serve.obs.record import RequestRecord, ServerRun
from serve.server.api import (
    BetterElsewhere,
    GraphInfo,
    InferCall,
    InferResult,
    ModelEstimate,
    ModelInfo,
    Room,
    TensorSpec,
)
from serve.server.version_facts import VersionChange, VersionFacts

FEATURES, CLASSES = 4, 3
FACTS = ServerRun(
    started_unix_ns=0,
    pid=1,
    version="0.1.0",
    device="cpu",
    lanes=2,
    budget_bytes=2**30,
    policy="slack",
    discipline="rolling",
    window="adaptive",
    qos_factor=2.0,
)


def model_info(name="gcn", version="1", extra=(), state="READY") -> ModelInfo:
    """Describe a node classifier with inputs x, edge_index and the optional ones in `extra`."""
    optional = {
        "edge_weight": TensorSpec("edge_weight", "FP32", (-1,), optional=True),
        "edge_attr": TensorSpec("edge_attr", "FP32", (-1, 2), optional=True),
        "batch": TensorSpec("batch", "INT64", (-1,), optional=True),
    }
    return ModelInfo(
        name=name,
        version=version,
        state=state,
        inputs=(
            TensorSpec("x", "FP32", (-1, FEATURES)),
            TensorSpec("edge_index", "INT64", (2, -1)),
            *(optional[key] for key in extra),
        ),
        outputs=(TensorSpec("output", "FP32", (-1, CLASSES)),),
        rows="node",
        executor="eager",
        weights_bytes=1234,
    )


def answer_to(call: InferCall) -> np.ndarray:
    """Return the fake model's output: the first features, plus the number of edges."""
    if call.graph is not None:
        ids = np.frombuffer(call.tensors["node_ids"].data, "<i8")
        return np.repeat(ids[:, None], CLASSES, axis=1).astype(np.float32)
    x = call.tensors["x"]
    content = b"".join(bytes(piece) for piece in x.pieces())
    values = np.frombuffer(content, "<f4").reshape(x.shape)
    return values[:, :CLASSES] + np.float32(call.tensors["edge_index"].shape[1])


class FakeTicket:
    """Waits for `engine.go`, unless cancelled or already failed."""

    def __init__(self, engine: "FakeEngine", call: InferCall, number: int) -> None:
        self.engine, self.call, self.number = engine, call, number
        self.cancelled = threading.Event()

    def result(self) -> InferResult:
        if self.engine.fail_with is not None:
            raise self.engine.fail_with
        if self.call.model in self.engine.failing:
            raise self.engine.failing[self.call.model]
        with self.engine.changed:
            while not (self.engine.may_go(self) or self.cancelled.is_set()):
                self.engine.changed.wait()
        if self.cancelled.is_set():
            self.engine.cancelled.append(self.call)
            raise RequestCancelled("the client cancelled")
        record = RequestRecord(
            request_uid=f"uid-{self.number}",
            client_id=self.call.client_id,
            model=self.call.model,
            version=self.call.version or "1",
            arrived_unix_ns=time.time_ns(),
            policy="slack",
            discipline="rolling",
            executor="eager",
            lane=1,
            group_id=7,
            group_size=2,
            merged=2,
            queue_ns=11_000,
            prepare_ns=22_000,
            run_ns=33_000,
            answer_ns=4_000,
            latency_ns=70_000,
            solo_estimate_ns=50_000,
            qos_target_ns=self.call.qos_target_ns or 100_000,
            violated=False,
            pmc_estimate_bytes=4096,
            pmc_measured_bytes=self.engine.measured_bytes,
            hops=self.call.hops,
        )
        return InferResult({"output": answer_to(self.call)}, record)

    def cancel(self) -> None:
        self.cancelled.set()
        with self.engine.changed:
            self.engine.changed.notify_all()


class FakeJointTicket:
    """Waits for each of its models' tickets in turn."""

    def __init__(self, tickets: list[FakeTicket]) -> None:
        self.tickets = tickets
        self.joint_uid = f"joint-{tickets[0].number}"

    def results(self) -> list[InferResult | Exception]:
        found: list[InferResult | Exception] = []
        for ticket in self.tickets:
            try:
                found.append(ticket.result())
            except ServeError as error:
                found.append(error)
        return found

    def cancel(self) -> None:
        for ticket in self.tickets:
            ticket.cancel()


class FakeEngine:
    """Implements ``serve.server.api.Inference``."""

    def __init__(self) -> None:
        self.ready = True
        self.live = True
        #: How often the repository was read.
        self.repository_reads = 0
        self.infos = {"gcn": model_info(extra=("edge_weight", "batch")), "gin": model_info("gin")}
        #: Raised by the next submit, or by every result.
        self.refuse_with: Exception | None = None
        self.fail_with: Exception | None = None
        #: Raised by results of the model.
        self.failing: dict[str, Exception] = {}
        self.measured_bytes: int | None = 2048
        self.calls: list[InferCall] = []
        self.cancelled: list[InferCall] = []
        #: (model, class of the error) of every request refused before it was a task.
        self.refusals: list[tuple[str, str]] = []
        #: Changes of rules for versions.
        self.version_changes: list[VersionChange] = []
        #: Client ids whose requests wait; `hold_all` holds every request.
        self.held: set[str] = set()
        self.hold_all = False
        self.changed = threading.Condition()
        #: What says which requests move, and the task that it is asked about.
        self.moving = SimpleNamespace(moves=None, room=Room(0, FACTS.lanes, FACTS.budget_bytes))
        self.task = None

    @property
    def serving(self) -> bool:
        return self.ready

    def may_go(self, ticket: FakeTicket) -> bool:
        return not self.hold_all and ticket.call.client_id not in self.held

    def let_go(self, client_id: str | None = None) -> None:
        """Answer the held request, or all of them."""
        with self.changed:
            if client_id is None:
                self.hold_all = False
                self.held.clear()
            self.held.discard(client_id or "")
            self.changed.notify_all()

    def wait_for_calls(self, count: int) -> None:
        """Return once `count` requests were submitted."""
        wait_for(lambda: len(self.calls) >= count, f"{count} calls")

    def graphs(self, name: str = "") -> tuple[GraphInfo, ...]:
        return ()

    def submit(self, call: InferCall) -> FakeTicket:
        moves = self.moving.moves
        asked = call.movable and moves is not None and self.task is not None
        if asked and moves(self.task, self.moving.room):
            raise BetterElsewhere(self.task)
        if self.refuse_with is not None:
            raise self.refuse_with
        self.calls.append(call)
        return FakeTicket(self, call, len(self.calls))

    def submit_jointly(self, calls: list[InferCall]) -> FakeJointTicket:
        return FakeJointTicket([self.submit(call) for call in calls])

    def refused(
        self,
        model: str,
        version: str,
        client_id: str,
        arrived_ns: int,
        error: ServeError,
        trace_parent: str = "",
    ) -> None:
        self.refusals.append((model, type(error).__name__))

    def models(self) -> tuple[ModelInfo, ...]:
        self.repository_reads += 1
        return tuple(self.infos.values())

    def served(self) -> tuple[ModelInfo, ...]:
        return tuple(info for info in self.infos.values() if info.state == "READY")

    def model(self, name: str, version: str = "", request_id: str | None = None) -> ModelInfo:
        info = self.infos.get(name)
        if info is None or (version and version != info.version):
            raise UnknownName(f"no model '{name}' version '{version}'; there are gcn, gin")
        if info.state != "READY":
            raise NotReady(f"model '{name}' is {info.state}")
        return info

    def answered(self, call: InferCall, result: InferResult) -> None:
        pass

    def versions(self, name: str = "") -> tuple[VersionFacts, ...]:
        names = [name] if name else sorted(self.infos)
        return tuple(self._version_facts(each) for each in names)

    def change_versions(self, name: str, change: VersionChange) -> VersionFacts:
        facts = self._version_facts(name)
        self.version_changes.append(change)
        shares = tuple(sorted((change.split or {}).items()))
        shadow, percent = change.shadow or None, change.shadow_percent
        return replace(facts, rules=VersionRules(shares, change.canary, shadow, percent))

    def _version_facts(self, name: str) -> VersionFacts:
        if name not in self.infos:
            raise UnknownName(f"unknown model '{name}'")
        return VersionFacts(name, VersionRules(), VersionRules(((1, 100.0),)), 1, (1,))

    def load(self, name: str, cancellation: object = None) -> None:
        if name not in self.infos:
            raise UnknownName(f"no model '{name}' in the repository")
        self.infos[name] = replace(self.infos[name], state="READY", reason="")

    def unload(self, name: str, cancellation: object = None) -> None:
        self.infos[name] = replace(self.infos[name], state="UNAVAILABLE", reason="unloaded")

    def estimate_sample(
        self, name: str, version: str, graph: str, num_ids: int, fanouts: object = None
    ) -> ModelEstimate:
        raise UnknownName(f"no graph '{graph}'")

    def estimate(self, name: str, version: str, num_nodes: int, num_edges: int) -> ModelEstimate:
        info = self.model(name, version)
        return ModelEstimate(
            model=name,
            version=info.version,
            executor=info.executor,
            num_nodes=num_nodes,
            num_edges=num_edges,
            weights_bytes=info.weights_bytes,
            input_bytes=num_nodes * FEATURES * 4,
            peak_bytes=1000,
            reserve_bytes=1024,
            run_ns=10,
            solo_ns=20,
            solo_high_ns=30,
            qos_target_ns=40,
            budget_bytes=2**30,
            fit_count=2**20,
            warning="an upper bound",
        )
