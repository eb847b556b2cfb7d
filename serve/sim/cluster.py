"""Many machines under a virtual clock: the live decisions of fronts and of schedulers together.

Each machine is the very ``Scheduler`` that serves, each front the very ``Dispatcher``. A machine's
clock stands still until something happens on it or a front sends it something, so the cost is by
request and not by machine. Nothing is random here: the same requests give the same answers.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any, Literal

from serve.core.cluster.commands import (
    ClusterCommand,
    EndRequest,
    MachineDrained,
    NoAnswer,
    PassAnswer,
    SendAttempt,
    WithdrawAttempt,
)
from serve.core.cluster.dispatch import Dispatcher, DispatchParams
from serve.core.cluster.events import (
    AttemptAnswered,
    AttemptFailed,
    AttemptFailure,
    DrainAsked,
    MachineAnnounced,
    MachineDied,
    MachineTold,
    ProbeMissed,
    ProbePassed,
    RequestArrived,
    TimePassed,
)
from serve.core.cluster.forward import passed_on
from serve.core.cluster.members import MachineState
from serve.core.cluster.route import mixed
from serve.core.cluster.views import RoutedRequest
from serve.core.types import Completed, Outcome, Rejected, Task, TaskId
from serve.errors import ConfigError
from serve.sim.agenda import Agenda
from serve.sim.device import Offered
from serve.sim.machine import MachineAttempt, MachineModel, SimulatedMachine
from serve.sim.report import Answered

FaultKind = Literal["killed", "silent", "drained"]
#: Apart from what fronts draw, which front a request comes to.
_FRONT_SEED = 1 << 40


@dataclass(frozen=True, slots=True)
class Fault:
    """What happens to a machine during a simulation."""

    at_ns: int
    #: Place of the machine in the set-up.
    machine: int
    #: Its processes end; or nothing gets to it or from it; or it is asked to drain.
    kind: FaultKind
    #: When it is started again, or heard again; None for never.
    until_ns: int | None = None


@dataclass(frozen=True, slots=True)
class Forwarding:
    """How machines pass requests on."""

    #: Others that are asked what is on them.
    asked: int = 2
    #: What asking takes, and what passing on takes.
    ask_ns: int = 50_000
    hop_ns: int = 100_000


@dataclass(frozen=True, slots=True)
class ClusterSetup:
    """A simulated cluster."""

    machines: tuple[MachineModel, ...]
    #: How each front routes, but for its seed and the way, which follow from this set-up.
    dispatch: DispatchParams = field(default_factory=DispatchParams)
    fronts: int = 1
    #: Every machine belongs to one front; else every front sends to all.
    owned: bool = True
    #: What a front adds to a request's way.
    front_ns: int = 150_000
    #: How often machines tell all fronts what is on them; None for never, so that they count.
    report_every_ns: int | None = None
    forwarding: Forwarding | None = None
    #: How often fronts probe; only with faults.
    probe_every_ns: int = 200_000_000
    faults: tuple[Fault, ...] = ()

    def __post_init__(self) -> None:
        if not self.machines or not 1 <= self.fronts <= len(self.machines):
            raise ConfigError(
                f"machines {len(self.machines)} must be at least 1, and fronts {self.fronts} "
                "between 1 and as many"
            )


@dataclass(frozen=True, slots=True)
class ClusterAnswer:
    """Request of a simulated cluster at its end."""

    task: Task
    #: What its machine said; how it ended when no machine did.
    outcome: Outcome | NoAnswer
    answered_ns: int
    attempts: int
    hops: int
    #: Who answered; empty when nobody did.
    machine: str
    #: Why it was late, as its machine sees it; None for in time, or for no result at all.
    cause: str | None = None

    @property
    def late(self) -> bool:
        """True for a result that came after the promised time."""
        return isinstance(self.outcome, Completed) and self.answered_ns > self.task.due_ns

    @property
    def missed(self) -> bool:
        """True when it was late or has no result."""
        return self.late or not isinstance(self.outcome, Completed)


class ClusterSimulation:
    """Machines, fronts, and one stream of requests."""

    def __init__(self, setup: ClusterSetup) -> None:
        self.setup = setup
        self.agenda = Agenda()
        self.answered: list[ClusterAnswer] = []
        systems = {model: model.system() for model in set(setup.machines)}
        self.machines = [
            SimulatedMachine(f"m{number}", model, systems[model])
            for number, model in enumerate(setup.machines)
        ]
        self._of_name = {machine.name: machine for machine in self.machines}
        self.fronts = [
            Dispatcher(replace(setup.dispatch, seed=seed, way_ns=setup.front_ns))
            for seed in range(setup.fronts)
        ]
        #: Fronts that send to a machine.
        self._senders: dict[str, list[int]] = {}
        #: By front: when it wants to be woken, and where its attempts are: (machine, task id).
        self._front_wakes: list[int | None] = [None] * setup.fronts
        self._places: list[dict[int, tuple[SimulatedMachine, TaskId]]] = [{} for _ in self.fronts]
        #: Answers on their way to the caller, by front and request.
        self._rows: list[dict[int, tuple[Answered, int]]] = [{} for _ in self.fronts]
        #: Requests that have not ended, as a machine and as a front sees them.
        self._offered: dict[int, tuple[Offered, RoutedRequest]] = {}
        self._task_ids = count(1)
        self._acts: dict[type, Callable[[int, Any], None]] = {
            SendAttempt: self._send,
            WithdrawAttempt: self._withdraw,
            PassAnswer: self._pass_answer,
            EndRequest: self._end_request,
            MachineDrained: lambda front, command: None,
        }
        self._join_all()

    def run(self, requests: Iterable[Offered]) -> None:
        """Play `requests`, in order of arrival, until all have ended."""
        for fault in self.setup.faults:
            self.agenda.put(fault.at_ns, self._fault, fault)
        if self.setup.faults:
            for machine in self.machines:
                self.agenda.put(self.setup.probe_every_ns, self._probe, machine)
        if self.setup.report_every_ns is not None:
            for machine in self.machines:
                self.agenda.put(self.setup.report_every_ns, self._report, machine)
        for offered in requests:
            self.advance(offered.task.arrived_ns)
            self.offer(offered)
        while self._offered:
            self.agenda.happen()

    def advance(self, until_ns: int) -> None:
        """Let everything happen that is due before `until_ns`, which is now then."""
        self.agenda.advance(until_ns)

    def offer(self, offered: Offered) -> None:
        """Let the request arrive at its front now."""
        task = offered.task
        front = mixed(task.task_id + _FRONT_SEED) % len(self.fronts) if len(self.fronts) > 1 else 0
        request = RoutedRequest(
            task.task_id, task.model, task.reserve_bytes, task.estimate.solo_ns,
            task.estimate.run_ns, task.due_ns,
            task.expires_ns,
        )  # fmt: skip
        self._offered[task.task_id] = offered, request
        self._tell(front, RequestArrived(request))

    # -- fronts -----------------------------------------------------------------------------------

    def _join_all(self) -> None:
        setup = self.setup
        for number, machine in enumerate(self.machines):
            every = range(setup.fronts)
            self._senders[machine.name] = [number % setup.fronts] if setup.owned else list(every)
            for front in self._senders[machine.name]:
                self._tell(front, MachineAnnounced(machine.facts))
                self._tell(front, ProbePassed(machine.name, machine.incarnation))

    def _tell(self, front: int, event: object) -> None:
        dispatcher = self.fronts[front]
        for command in dispatcher.handle(event, self.agenda.now_ns):
            self._obey(front, command)
        wake_ns = dispatcher.next_wakeup()
        known_ns = self._front_wakes[front]
        if wake_ns is not None and (known_ns is None or wake_ns < known_ns):
            self._front_wakes[front] = wake_ns
            self.agenda.put(wake_ns, self._wake_front, front)

    def _wake_front(self, front: int) -> None:
        self._front_wakes[front] = None
        self._tell(front, TimePassed())

    def _obey(self, front: int, command: ClusterCommand) -> None:
        self._acts[type(command)](front, command)

    def _send(self, front: int, command: SendAttempt) -> None:
        offered, request = self._offered[command.request_id]
        attempt = MachineAttempt(front, request, command.attempt, offered)
        arrival = self._of_name[command.machine], attempt
        self.agenda.put(self.agenda.now_ns + self.setup.front_ns, self._reach, arrival)

    def _withdraw(self, front: int, command: WithdrawAttempt) -> None:
        place = self._places[front].pop(command.request_id, None)
        if place is None:
            return
        machine, task_id = place
        if not machine.alive or task_id not in machine.attempts:
            return
        if machine.silent:
            machine.unheard.append((self._cancel, place))
        else:
            self._cancel(place)

    def _pass_answer(self, front: int, command: PassAnswer) -> None:
        row, hops = self._rows[front].pop(command.request_id)
        self._places[front].pop(command.request_id, None)
        task = self._offered.pop(command.request_id)[0].task
        self.answered.append(
            ClusterAnswer(
                task,
                row.outcome,
                self.agenda.now_ns,
                command.attempt,
                hops,
                command.machine,
                row.cause,
            )
        )

    def _end_request(self, front: int, command: EndRequest) -> None:
        self._places[front].pop(command.request_id, None)
        task = self._offered.pop(command.request_id)[0].task
        self.answered.append(ClusterAnswer(task, command.reason, self.agenda.now_ns, 0, 0, ""))

    # -- machines ---------------------------------------------------------------------------------

    def _reach(self, arrival: tuple[SimulatedMachine, MachineAttempt]) -> None:
        """Let an attempt reach its machine."""
        machine, attempt = arrival
        if machine.silent:
            machine.unheard.append((self._reach, arrival))
            return
        if not machine.alive:
            self._attempt_lost(attempt)
            return
        if not self._is_awaited(attempt):
            return
        forwarding = self.setup.forwarding
        if forwarding is not None and not attempt.hops:
            asked = self._others(machine, attempt.request.request_id, forwarding.asked)
            there = passed_on(
                attempt.request, machine.view, [one.view for one in asked], self.agenda.now_ns,
                hops=attempt.hops, hop_ns=forwarding.ask_ns + forwarding.hop_ns,
            )  # fmt: skip
            if there is not None:
                moved = MachineAttempt(
                    attempt.front, attempt.request, attempt.attempt, attempt.offered, 1
                )
                delay_ns = forwarding.ask_ns + forwarding.hop_ns
                to = self._of_name[there.facts.name], moved
                self.agenda.put(self.agenda.now_ns + delay_ns, self._reach, to)
                return
        task_id = TaskId(next(self._task_ids))
        self._places[attempt.front][attempt.request.request_id] = machine, task_id
        machine.take(task_id, attempt, self.agenda.now_ns)
        self._look(machine)

    def _others(self, machine: SimulatedMachine, seed: int, count: int) -> list[SimulatedMachine]:
        """Return `count` other machines that are heard, drawn by `seed`, or fewer."""
        found: list[SimulatedMachine] = []
        for draw in range(4 * count):
            one = self.machines[mixed(seed + draw) % len(self.machines)]
            if one is not machine and one not in found and one.alive and not one.silent:
                found.append(one)
                if len(found) == count:
                    break
        return found

    def _is_awaited(self, attempt: MachineAttempt) -> bool:
        awaited = self.fronts[attempt.front].attempt_of(attempt.request.request_id)
        return awaited is not None and awaited.attempt == attempt.attempt

    def _attempt_lost(self, attempt: MachineAttempt) -> None:
        failed = AttemptFailed(
            attempt.request.request_id, attempt.attempt, AttemptFailure.UNREACHABLE, "no connection"
        )
        self._tell(attempt.front, failed)

    def _cancel(self, place: tuple[SimulatedMachine, TaskId]) -> None:
        machine, task_id = place
        if task_id in machine.attempts:
            machine.simulation.advance(self.agenda.now_ns)
            machine.simulation.cancel(task_id)
            self._look(machine)

    def _look(self, machine: SimulatedMachine) -> None:
        """Take the machine's new answers, and be there when something happens on it next."""
        simulation = machine.simulation
        if simulation.answered:
            for row in simulation.answered:
                answer = machine, machine.life, row
                self.agenda.put(max(self.agenda.now_ns, row.answered_ns), self._answer, answer)
            simulation.answered.clear()
        next_ns = simulation.next_ns()
        if next_ns is not None and (machine.wake_ns is None or next_ns < machine.wake_ns):
            machine.wake_ns = next_ns
            self.agenda.put(next_ns, self._wake, (machine, machine.life, next_ns))

    def _wake(self, wake: tuple[SimulatedMachine, int, int]) -> None:
        machine, life, at_ns = wake
        if machine.life == life and machine.alive and machine.wake_ns == at_ns:
            machine.wake_ns = None
            machine.simulation.advance(at_ns + 1)
            self._look(machine)

    def _answer(self, answer: tuple[SimulatedMachine, int, Answered]) -> None:
        machine, life, row = answer
        if machine.life != life or not machine.alive:
            return  # it died with it
        if machine.silent:
            machine.unheard.append((self._answer, answer))
            return
        attempt = machine.ended(row.task.task_id)
        if not self._is_awaited(attempt):
            return
        request_id, outcome = attempt.request.request_id, row.outcome
        if isinstance(outcome, Rejected):
            self._tell(attempt.front, AttemptFailed(
                request_id, attempt.attempt, AttemptFailure.REFUSED, outcome.message,
                outcome.retry_after_ns,
            ))  # fmt: skip
            return
        self._rows[attempt.front][request_id] = row, attempt.hops
        self._tell(attempt.front, AttemptAnswered(request_id, attempt.attempt))

    # -- news of machines -------------------------------------------------------------------------

    def _probe(self, machine: SimulatedMachine) -> None:
        heard = machine.alive and not machine.silent
        event = ProbePassed if heard else ProbeMissed
        for front in self._senders[machine.name]:
            self._tell(front, event(machine.name, machine.incarnation))
        self.agenda.put(self.agenda.now_ns + self.setup.probe_every_ns, self._probe, machine)

    def _report(self, machine: SimulatedMachine) -> None:
        if machine.alive and not machine.silent:
            view = machine.view
            told = MachineTold(machine.name, machine.incarnation, view.count, view.work_ns)
            for front in self._senders[machine.name]:
                self._tell(front, told)
        assert self.setup.report_every_ns is not None
        self.agenda.put(self.agenda.now_ns + self.setup.report_every_ns, self._report, machine)

    def _fault(self, fault: Fault) -> None:
        machine = self.machines[fault.machine]
        name, incarnation = machine.name, machine.incarnation
        if fault.kind == "drained":
            self._tell_senders(machine, DrainAsked(name, incarnation))
            return
        if fault.kind == "killed":
            machine.alive = False
            # Connections to a process that ends break at once.
            self._tell_senders(machine, MachineDied(name, incarnation))
        else:
            machine.silent = True
        if fault.until_ns is not None:
            self.agenda.put(fault.until_ns, self._recover, machine)

    def _recover(self, machine: SimulatedMachine) -> None:
        if not machine.alive:
            machine.start()
        else:
            machine.silent = False
            unheard, machine.unheard = machine.unheard, []
            for what, to in unheard:
                what(to)
            if not self._is_given_up(machine):
                return
            machine.join_anew()
        self._tell_senders(machine, MachineAnnounced(machine.facts))

    def _is_given_up(self, machine: SimulatedMachine) -> bool:
        """Return True when a front takes the machine back only if it joins anew."""
        members = (self.fronts[n].members.get(machine.name) for n in self._senders[machine.name])
        return any(one is None or one.state is MachineState.GONE for one in members)

    def _tell_senders(self, machine: SimulatedMachine, event: object) -> None:
        for front in self._senders[machine.name]:
            self._tell(front, event)


def simulate_cluster(requests: Sequence[Offered], setup: ClusterSetup) -> list[ClusterAnswer]:
    """Serve `requests`, in order of arrival; returns how each ended, in order of their ends."""
    simulation = ClusterSimulation(setup)
    simulation.run(requests)
    return simulation.answered
