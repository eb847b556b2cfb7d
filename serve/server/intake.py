"""Intake: a call becomes a task that the scheduler has heard of.

One path for every request: find the model, size the inputs, stage them early if the scheduler would
have them staged at once, and hand the task to the driver.
"""

import itertools
import threading
import uuid
from collections.abc import Callable, Sequence
from queue import SimpleQueue

import numpy as np
from msgspec.structs import replace

from serve.core.events import TaskArrived, TasksArrived
from serve.core.types import Bytes, InputBlock, Nanos, QoS, Task, TaskId
from serve.errors import InvalidInput, QueueFull, ServeError, UnknownName, VersionReplaced
from serve.graphs.shared_column import SharedColumn
from serve.ipc.shared_pool import SharedPool
from serve.models.repository import is_version
from serve.obs.payload_recorder import PayloadRecorder
from serve.obs.record import RequestRecord
from serve.server import clock
from serve.server.api import BetterElsewhere, InferCall, InferResult, Room
from serve.server.catalogue import ModelCatalogue, ModelEntry
from serve.server.declared_inputs import DeclaredInputs
from serve.server.driver import Driver
from serve.server.joint_block import JointBlock, common_bytes
from serve.server.joint_ticket import WaitingTickets
from serve.server.node_requests import NodeRequests, TypedRequest
from serve.server.node_sampling import read_ids
from serve.server.report_rows import refusal_record
from serve.server.request_inputs import (
    LaidOutInputs,
    NodeInputs,
    RequestInputs,
    StagedInputs,
    TensorInputs,
)
from serve.server.split import IdHomes
from serve.server.ticket import Answer, JointRequest, Order, PlainTicket, WaitingTicket
from serve.server.typed_inputs import TypedInputs


class Intake:
    """Makes tasks of calls. Any thread may call any method."""

    def __init__(
        self,
        catalogue: ModelCatalogue,
        node_requests: NodeRequests,
        pool: SharedPool,
        driver: Driver,
        *,
        lock: threading.Lock,
        check_finite: bool,
        counts_shared_once: bool,
    ) -> None:
        """`lock` is the driver's.

        With `check_finite`, features must be finite numbers. With `counts_shared_once`, lanes run
        on the inputs in the pool, so that those which tasks share take memory once.
        """
        self._catalogue = catalogue
        self._node_requests = node_requests
        self._pool = pool
        self._driver = driver
        self._lock = lock
        self._check_finite = check_finite
        self._counts_shared_once = counts_shared_once
        #: Gets the tensors of requests that are taken in; None to record none.
        self.payloads: PayloadRecorder | None = None
        #: Says which movable tasks had better be on another server; None: there is no other.
        self.moves: Callable[[Task, Room], bool] | None = None
        #: Prefix of request ids, so that those of two starts differ.
        self._boot_id = uuid.uuid4().hex[:8]
        self._task_ids = itertools.count(1)
        self._refusal_ids = itertools.count(1)

    @property
    def room(self) -> Room:
        """What the server has for requests now."""
        devices = self._driver.scheduler.devices
        return Room(
            len(self._driver.requests),
            sum(one.params.device.slots for one in devices),
            max(one.budget_bytes for one in devices),
            self._node_requests.part,
        )

    def homes(self, call: InferCall) -> IdHomes | None:
        """See ``api.Moving``."""
        entry = self._entry(call)
        if call.graph is None:
            return None
        node_type, tensor = call.asked
        request = self._node_requests.make(
            call.graph, tensor.shape[0], call.fanouts, entry, node_type
        )
        if isinstance(request, TypedRequest):
            return None
        column = request.graph.snapshot.column
        if not isinstance(column, SharedColumn):
            return None
        ids = read_ids(call, call.graph, column.parts.size)
        here = column.source.part
        parts = np.where(column.here(ids), here, column.parts[ids])
        target_ns = call.qos_target_ns
        if target_ns is None:
            size = self._driver.sized(lambda: request.expected(entry.estimator))
            target_ns = int(self._catalogue.factor_of(entry) * size.estimate.solo_ns)
        return IdHomes(ids, parts, here, target_ns)

    def submit(self, call: InferCall) -> WaitingTicket:
        """Size, stage and hand over a request; see ``api.Inference``."""
        while (ticket := self._try_submit(call)) is None:
            pass  # the model was replaced meanwhile, and the catalogue names its successor
        self._record(ticket.request_uid, call)
        return ticket

    def submit_jointly(self, calls: Sequence[InferCall]) -> WaitingTickets:
        """Size, stage and hand over the tasks of a joint request; see ``api.Inference``."""
        while (ticket := self._try_submit_jointly(calls)) is None:
            pass  # as in `submit`
        for call, part in zip(calls, ticket.members, strict=True):
            self._record(part.request_uid, call, ticket.joint_uid)
        return ticket

    def submit_staged(
        self, call: InferCall, inputs: StagedInputs, answer: Answer
    ) -> PlainTicket | None:
        """Hand over a request that is staged already; None when its model was retired.

        Raises BetterElsewhere for a movable one.
        """
        with self._lock:
            if inputs.entry.retired:
                return None
            task, uid = self._task(inputs)
            self._require_better_here(call, task)
            ticket = PlainTicket(self._driver, inputs, task, uid, answer)
            self._driver.accept(TaskArrived(ticket.task, inputs.early_ns), ticket)
            return ticket

    def run_shadow(self, call: InferCall) -> InferResult:
        """Run a call for nobody, with best effort, and return its result; waits for the end.

        Raises QueueFull while others are there, RequestCancelled when another came meanwhile, and
        the errors of any request.
        """
        entry = self._entry(call)
        if self._driver.requests:
            raise QueueFull("other requests are there", 0)
        started_ns = Nanos(clock.now_ns())
        inputs = self._inputs(replace(call, arrived_ns=started_ns), entry)
        accepted = False
        try:
            sizes = inputs.stage()
            with self._lock:
                if self._driver.requests or entry.retired:
                    raise QueueFull("other requests are there", 0)
                task, uid = self._task(inputs)
                if sizes:
                    task = task.found(inputs.exact(task))
                ticket = WaitingTicket(self._driver, inputs, replace(task, best_effort=True), uid)
                accepted = True
                self._driver.accept(TaskArrived(ticket.task, started_ns), ticket)
        finally:
            if not accepted:
                inputs.release()
        return ticket.result()

    def refusal(
        self, model: str, version: str, client_id: str, arrived_ns: int, error: ServeError
    ) -> RequestRecord:
        """Return the record of a request that ended in `error` before it became a task."""
        if isinstance(error, UnknownName):
            # Names that clients make up must not become labels of metrics.
            model, version = "unknown", ""
        elif version and not self._is_served(model, version):
            version = ""
        uid = f"{self._boot_id}-r{next(self._refusal_ids)}"
        return refusal_record(uid, model, version, client_id, arrived_ns, error)

    def _is_served(self, model: str, version: str) -> bool:
        number = int(version) if is_version(version) else 0
        return self._catalogue.version(model, number) is not None

    def _record(self, uid: str, call: InferCall, joint_uid: str = "") -> None:
        """Record the tensors of an accepted request, which goes on whatever comes of that."""
        if self.payloads is None or call.is_part:
            return
        try:
            payload = call.payload()
        except InvalidInput:
            return  # its client has shortened the memory that it shares
        self.payloads.write(uid, payload, joint_uid)

    def _try_submit(self, call: InferCall) -> WaitingTicket | None:
        """Submit to the version served now; None when it was retired in the middle."""
        entry = self._entry(call)
        inputs = self._inputs(call, entry)
        # NOTE: read without the lock: a stale answer costs one step of the scheduler, no more.
        if self._driver.scheduler.prepares_at_once:
            inputs.stage_early()
        accepted = False
        try:
            with self._lock:
                if entry.retired:
                    return None
                task, uid = self._task(inputs)
                self._require_better_here(call, task)
                ticket = WaitingTicket(self._driver, inputs, task, uid)
                accepted = True
                self._driver.accept(TaskArrived(ticket.task, inputs.early_ns), ticket)
                return ticket
        finally:
            if not accepted:
                inputs.release()

    def _try_submit_jointly(self, calls: Sequence[InferCall]) -> WaitingTickets | None:
        """Submit to the versions served now; None when one was retired in the middle."""
        members: list[RequestInputs] = []
        accepted = False
        try:
            members.extend(self._inputs(call, self._entry(call)) for call in calls)
            shared_bytes = _share_block(members, self._pool)
            if self._driver.scheduler.prepares_at_once:
                for inputs in members:
                    inputs.stage_early()
            with self._lock:
                if any(inputs.entry.retired for inputs in members):
                    return None
                made = [self._task(inputs) for inputs in members]
                block = None
                if shared_bytes and self._counts_shared_once:
                    block = InputBlock(made[0][0].task_id, Bytes(shared_bytes))
                models = {
                    task.task_id: inputs.entry.spec.key
                    for inputs, (task, _) in zip(members, made, strict=True)
                }
                joint = JointRequest(f"{self._boot_id}-j{made[0][0].task_id}", models)
                orders: SimpleQueue[Order] = SimpleQueue()
                tickets = [
                    WaitingTicket(self._driver, inputs, replace(task, block=block), uid, orders)
                    for inputs, (task, uid) in zip(members, made, strict=True)
                ]
                for ticket in tickets:
                    ticket.joint = joint
                accepted = True
                began = [i.early_ns for i in members if i.early_ns is not None]
                staged_ns = min(began) if len(began) == len(members) else None
                tasks = tuple(ticket.task for ticket in tickets)
                self._driver.accept(TasksArrived(tasks, staged_ns), *tickets)
                return WaitingTickets(tickets, orders, joint.uid)
        finally:
            if not accepted:
                for inputs in members:
                    inputs.release()

    def _require_better_here(self, call: InferCall, task: Task) -> None:
        """Raise BetterElsewhere for a movable call that had better be there. Under the lock."""
        if call.movable and self.moves is not None and self.moves(task, self.room):
            raise BetterElsewhere(task)

    def _entry(self, call: InferCall) -> ModelEntry:
        """Return the served version that the call is for.

        Raises VersionReplaced when the one chosen for it is not served any more.
        """
        if call.version or not call.chosen:
            return self._catalogue.get(call.model, call.version, call.client_id)
        entry = self._catalogue.version(call.model, int(call.chosen))
        if entry is None:
            raise VersionReplaced(
                f"version {call.chosen} of model '{call.model}' was unloaded meanwhile; send the "
                "request again"
            )
        return entry

    def _inputs(self, call: InferCall, entry: ModelEntry) -> RequestInputs:
        if entry.spec.interface is not None and call.graph is None:
            return DeclaredInputs(call, entry, self._pool, check_finite=self._check_finite)
        if call.graph is None:
            return TensorInputs(call, entry, self._pool, check_finite=self._check_finite)
        node_type, ids = call.asked
        num_ids = ids.shape[0] if call.split is None else call.split.own.size
        request = self._node_requests.make(
            call.graph, num_ids, call.fanouts, entry, node_type,
            at_home=call.is_part or call.split is not None,
        )  # fmt: skip
        if isinstance(request, TypedRequest):
            return TypedInputs(call, entry, self._pool, request)
        return NodeInputs(call, entry, self._pool, request)

    def _task(self, inputs: RequestInputs) -> tuple[Task, str]:
        """Make the task of sized inputs and the request's id. Under the lock."""
        call, entry, size = inputs.call, inputs.entry, inputs.expected()
        solo_ns = size.estimate.solo_ns
        target_ns = call.qos_target_ns or int(self._catalogue.factor_of(entry) * solo_ns)
        timeout_ns = None if call.timeout_ns is None else Nanos(max(1, call.timeout_ns))
        task = Task(
            task_id=TaskId(next(self._task_ids)),
            model=entry.key,
            num_nodes=size.num_nodes,
            num_edges=size.num_edges,
            arrived_ns=Nanos(call.arrived_ns),
            estimate=size.estimate,
            qos=QoS(Nanos(target_ns), timeout_ns, call.priority),
            tenant=call.tenant,
            counts=size.counts,
            domain=entry.spec.domain,
            limits=entry.limits,
        )
        request_uid = f"{self._boot_id}-{task.task_id}"
        inputs.take_uid(request_uid)
        return task, request_uid


def _share_block(members: Sequence[RequestInputs], pool: SharedPool) -> int:
    """Have members that bring tensors stage them in one block; return the bytes common to all."""
    joining = [inputs for inputs in members if isinstance(inputs, LaidOutInputs)]
    if len(joining) < 2:
        return 0
    joint = JointBlock(pool)
    for inputs in joining:
        inputs.join(joint)
    return common_bytes([inputs.layout for inputs in joining])
