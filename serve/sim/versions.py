"""Versions in the simulator: the server's router and its shadows, under a virtual clock."""

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from msgspec.structs import replace

from serve.core.commands import AnswerTask
from serve.core.events import Event
from serve.core.fleet.fleet import Fleet
from serve.core.scheduler import Scheduler
from serve.core.types import Completed, Nanos, Outcome, TaskId, Withdrawn
from serve.core.versions.canary import CanaryTakenBack, RequestEnd
from serve.core.versions.router import VersionRouter
from serve.sim.device import DeviceModel, Offered
from serve.sim.engine import Simulation


@dataclass(frozen=True, slots=True)
class VersionedRequest:
    """Request to a model, with what it takes of each of its versions."""

    request_id: str
    #: Tasks of all have the same arrival.
    by_version: Mapping[int, Offered]

    @property
    def arrived_ns(self) -> Nanos:
        """When it arrives."""
        return next(iter(self.by_version.values())).task.arrived_ns


class VersionedSimulation(Simulation):
    """Requests to one model without a version, sent to those that the router chooses.

    Shadows wait until nothing else is there, then run one at a time; one that is given up is
    tried again, one that does not fit the device is not.
    """

    def __init__(
        self, scheduler: Scheduler | Fleet, model: DeviceModel, router: VersionRouter, name: str
    ) -> None:
        """`name` is the model's, whose rules `router` holds."""
        self.router, self.name = router, name
        #: Version that answered, and how, by id of the request; and of the shadows.
        self.ends: dict[str, tuple[int, Outcome, int]] = {}
        self.shadow_ends: list[tuple[str, Outcome]] = []
        self.events: list[CanaryTakenBack] = []
        self._next_id = 0
        self._asked: dict[TaskId, tuple[VersionedRequest, int]] = {}
        self._shadows: deque[VersionedRequest] = deque()
        self._shadow_id: TaskId | None = None
        super().__init__(scheduler, model)

    def ask(self, requests: Iterable[VersionedRequest]) -> None:
        """Play `requests`, in order of arrival, until all are answered and shadowed."""
        for request in requests:
            while (next_ns := self.next_ns()) is not None and next_ns < request.arrived_ns:
                self._happen(next_ns)
            self.now_ns = max(self.now_ns, request.arrived_ns)
            served = request.by_version.__contains__
            version = self.router.choose(self.name, request.request_id, served)
            version = max(request.by_version) if version is None else version
            self._begin(request, version, best_effort=False)
        while (next_ns := self.next_ns()) is not None:
            self._happen(next_ns)

    def _begin(self, request: VersionedRequest, version: int, *, best_effort: bool) -> TaskId:
        task_id = TaskId(self._next_id)
        self._next_id += 1
        offered = request.by_version[version]
        task = replace(offered.task, task_id=task_id, best_effort=best_effort)
        if not best_effort:
            self._asked[task_id] = request, version
        self.offer(Offered(task, offered.run_ns, offered.prepare_ns, offered.answer_ns))
        return task_id

    def _tell(self, event: Event) -> None:
        super()._tell(event)
        while (
            self._shadows
            and self._shadow_id is None
            and not self.scheduler.queued_count
            and not self.scheduler.running_count
        ):
            request = self._shadows[0]
            shadow = self.router.rules(self.name).shadow
            if shadow is None or shadow not in request.by_version:
                self._shadows.popleft()
                continue
            self._shadow_id = TaskId(self._next_id)
            self._begin(request, shadow, best_effort=True)

    def _answer(self, command: AnswerTask) -> None:
        outcome, task_id = command.outcome, command.task_id
        if task_id == self._shadow_id:
            self._shadow_id = None
            request = self._shadows[0]
            self.shadow_ends.append((request.request_id, outcome))
            if not isinstance(outcome, Withdrawn):
                self._shadows.popleft()
            return
        request, version = self._asked.pop(task_id)
        super()._answer(command)
        late = self.answered[-1].cause is not None
        self.ends[request.request_id] = version, outcome, self.answered[-1].answered_ns
        failed = not isinstance(outcome, Completed)
        event = self.router.ended(self.name, RequestEnd(version, late, failed))
        if event is not None:
            self.events.append(event)
        if self.router.shadow_of(self.name, request.request_id) is not None:
            self._shadows.append(request)
