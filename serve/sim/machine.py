"""A machine of a simulated cluster: the scheduler that serves, and whether anybody hears of it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec

from serve.core.cluster.views import MachineFacts, MachineView, RoutedRequest
from serve.core.fleet.fleet import make_scheduler
from serve.core.params import LANES_PER_CORE
from serve.core.types import Bytes, Nanos, QoS, TaskEstimate, TaskId
from serve.sim.device import Offered
from serve.sim.engine import Simulation
from serve.sim.workload import System, make_system

#: Memory of a machine that is no question.
_AMPLE_BYTES = Bytes(1 << 46)


@dataclass(frozen=True, slots=True)
class MachineModel:
    """Machine of a simulated cluster, in numbers."""

    #: Of each of its devices.
    cores: int = 2
    #: Speed of runs, as a multiple of the reference pool's.
    pace: float = 1.0
    budget_bytes: int = _AMPLE_BYTES
    #: Models it has; None for all.
    models: frozenset[str] | None = None
    policy: str = "slack"
    discipline: str = "preemptive"
    lanes_per_core: int = LANES_PER_CORE
    devices: int = 1

    def system(self) -> System:
        """Return its scheduler's parameters and its device; raises ConfigError."""
        return make_system(
            self.policy,
            self.discipline,
            cores=self.cores,
            budget_bytes=self.budget_bytes,
            lanes_per_core=self.lanes_per_core,
            devices=self.devices,
        )


@dataclass(frozen=True, slots=True)
class MachineAttempt:
    """Attempt of a request, as it lies on a machine."""

    #: Of the front that sent it, and its numbers there.
    front: int
    request: RoutedRequest
    attempt: int
    #: What it truly takes on the reference pool.
    offered: Offered
    #: Machines that passed it on.
    hops: int = 0


class SimulatedMachine:
    """Scheduler of one machine, its clock, and what it was sent."""

    __slots__ = (
        "alive", "attempts", "incarnation", "life", "model", "name", "silent", "simulation",
        "system", "unheard", "view", "wake_ns",
    )  # fmt: skip

    def __init__(self, name: str, model: MachineModel, system: System) -> None:
        self.name = name
        self.model = model
        self.system = system
        self.incarnation = self.life = 0
        self.start()

    def start(self) -> None:
        """Begin a new life, with nothing of the one before."""
        self.incarnation += 1
        #: Counts its starts; what began in an earlier one never ends.
        self.life += 1
        self.alive = True
        #: True while nothing gets to it or from it.
        self.silent = False
        self.simulation = Simulation(make_scheduler(self.system.params), self.system.device)
        self.attempts: dict[TaskId, MachineAttempt] = {}
        #: What others send it and it sends while silent: heard when it is heard again.
        self.unheard: list[tuple[Callable[[Any], None], Any]] = []
        #: When it is looked at next; None for not.
        self.wake_ns: int | None = None
        #: What is on it in truth, of all fronts.
        self.view = MachineView(self.facts)

    @property
    def facts(self) -> MachineFacts:
        """What it says of itself."""
        model = self.model
        return MachineFacts(
            self.name, self.incarnation, model.cores * model.devices, model.budget_bytes,
            model.models, model.pace,
        )  # fmt: skip

    def take(self, task_id: TaskId, attempt: MachineAttempt, now_ns: int) -> None:
        """Let the attempt arrive now."""
        self.attempts[task_id] = attempt
        self.view.sent(attempt.request)
        self.simulation.advance(now_ns)
        self.simulation.offer(self._here(task_id, attempt, now_ns))

    def join_anew(self) -> None:
        """Be heard again as a machine that starts, though it went on."""
        self.incarnation += 1
        self.view.know(self.facts)

    def ended(self, task_id: TaskId) -> MachineAttempt:
        """Forget an attempt that has its answer."""
        attempt = self.attempts.pop(task_id)
        self.view.ended(attempt.request)
        return attempt

    def _here(self, task_id: TaskId, attempt: MachineAttempt, now_ns: int) -> Offered:
        """Return the request with what it takes here, and what is left of its target."""
        offered, pace = attempt.offered, self.model.pace
        task, estimate = offered.task, offered.task.estimate
        # The promise began at the front, with the request: a second attempt gets no second one.
        target_ns = Nanos(max(1, task.due_ns - now_ns))
        if pace != 1.0:
            run_ns = max(1, int(estimate.run_ns / pace))
            estimate = TaskEstimate(
                estimate.peak_bytes,
                estimate.reserve_bytes,
                Nanos(run_ns),
                Nanos(estimate.solo_ns - estimate.run_ns + run_ns),
            )
        here = msgspec.structs.replace(
            task, task_id=task_id, arrived_ns=Nanos(now_ns), estimate=estimate,
            qos=QoS(target_ns, priority=task.qos.priority),
        )  # fmt: skip
        return Offered(
            here,
            run_ns=Nanos(max(1, round(offered.run_ns / pace))),
            prepare_ns=offered.prepare_ns,
            answer_ns=offered.answer_ns,
        )
