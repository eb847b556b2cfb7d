"""One front, or one client: which machine serves each request, and where it goes when that fails.

``Dispatcher.handle(event, now_ns)`` returns commands, as the scheduler does. It keeps, whatever
happens:

- every request that arrives ends exactly once, by ``PassAnswer`` or ``EndRequest``;
- at most one attempt of a request is waited for, and only its answer is passed on;
- what changes the server is sent again only when the machine before said that it did not take it;
- no request goes to a machine that is not ready, that cannot hold it, or that failed it before,
  unless that machine refused it and may have a place now;
- every wait ends: with the caller's time, or after `patience_ns` without a machine, or
  `full_patience_ns` after every machine refused it.

When an answer is late does not depend on where it comes from: ``RoutedRequest.due_ns`` is fixed
when the request arrives, from its solo time on the reference pool (``promise``).
"""

import heapq
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from serve.core.cluster.commands import (
    ClusterCommand,
    EndRequest,
    MachineDrained,
    NoAnswer,
    PassAnswer,
    SendAttempt,
    WithdrawAttempt,
)
from serve.core.cluster.events import (
    AttemptAnswered,
    AttemptFailed,
    AttemptFailure,
    ContactLost,
    DrainAsked,
    MachineAnnounced,
    MachineDied,
    MachineEvent,
    MachineTold,
    ProbeMissed,
    ProbePassed,
    RequestArrived,
    RequestGivenUp,
    TimePassed,
)
from serve.core.cluster.flight import Flight, never, sooner, unrouted
from serve.core.cluster.members import MOST_MISSES, MachineState, Member, Members
from serve.core.cluster.route import RULES, choose, mixed
from serve.core.cluster.views import MachineView
from serve.errors import ConfigError, InvariantViolation

#: Ends of requests that are over, kept besides as many as there are requests.
_SPARE_ENDS = 1024
#: A machine that asked for no wait, or a shorter one, is tried again after this.
_LEAST_WAIT_NS = 10_000_000
_EXPIRED = "the caller's time has passed"


@dataclass(frozen=True, slots=True)
class DispatchParams:
    """How a front routes, and what it bounds."""

    #: One of ``route.RULES``.
    rule: str = "in_time"
    #: Machines compared for a request; None for all.
    choices: int | None = None
    #: What the way to a machine and back takes.
    way_ns: int = 0
    #: Machines that one request is sent to at most.
    most_attempts: int = 4
    #: How long a request waits for a machine when none is ready.
    patience_ns: int = 2_000_000_000
    #: How long a request that every machine refused waits for one to have a place.
    full_patience_ns: int = 0
    #: Requests without an answer.
    most_requests: int = 100_000
    #: Probes missed in a row after which a machine is gone.
    most_misses: int = MOST_MISSES
    #: Fronts of one cluster have different ones, so that they draw different machines.
    seed: int = 0

    def __post_init__(self) -> None:
        if self.rule not in RULES:
            raise ConfigError(f"unknown rule of a front '{self.rule}'; known: {', '.join(RULES)}")
        least = min(self.most_attempts, self.most_requests, self.most_misses)
        patience_ns = min(self.patience_ns, self.full_patience_ns)
        if least < 1 or patience_ns < 0 or (self.choices is not None and self.choices < 1):
            raise ConfigError(f"limits must be at least 1 and patience at least 0, got {self}")


class Dispatcher:
    """Decides for one front; changes only in ``handle``."""

    def __init__(self, params: DispatchParams | None = None) -> None:
        self.params = params = params or DispatchParams()
        self._rule = RULES[params.rule]
        self._members = Members(params.most_misses)
        #: Those that take new requests.
        self._ready: list[MachineView] = []
        self._flights: dict[int, Flight] = {}
        #: Flights without a machine, in order of arrival.
        self._waiting: dict[int, Flight] = {}
        #: (time, request id) of waits that end and callers' times; ended requests stay a while.
        self._ends: list[tuple[int, int]] = []
        self._now_ns = 0
        self._out: list[ClusterCommand] = []
        self._on: dict[type, Callable[[Any], None]] = {
            RequestArrived: self._request_arrived,
            RequestGivenUp: self._request_given_up,
            AttemptAnswered: self._attempt_answered,
            AttemptFailed: self._attempt_failed,
            MachineAnnounced: self._machine_changed,
            ProbePassed: self._machine_changed,
            ProbeMissed: self._machine_changed,
            ContactLost: self._machine_changed,
            MachineDied: self._machine_changed,
            DrainAsked: self._machine_changed,
            MachineTold: self._machine_told,
            TimePassed: lambda event: None,
        }

    def handle(self, event: object, now_ns: int) -> list[ClusterCommand]:
        """Take in one event and return what to do about it, in this order.

        A `now_ns` before that of an earlier call counts as that. Raises InvariantViolation for a
        request id that is in use; every other event is possible at any time.
        """
        self._now_ns = max(self._now_ns, now_ns)
        out: list[ClusterCommand] = []
        self._out = out
        self._on[type(event)](event)
        while self._ends and self._ends[0][0] <= self._now_ns:
            self._time_over(heapq.heappop(self._ends)[1])
        return out

    def next_wakeup(self) -> int | None:
        """Return when a ``TimePassed`` is needed at the latest; None for never."""
        ends = self._ends
        while ends and ends[0][1] not in self._flights:
            heapq.heappop(ends)
        return ends[0][0] if ends else None

    @property
    def members(self) -> Members:
        """The machines it knows; to be looked at only."""
        return self._members

    @property
    def unanswered_count(self) -> int:
        """Requests without an answer."""
        return len(self._flights)

    @property
    def waiting_count(self) -> int:
        """Requests that wait for a machine."""
        return len(self._waiting)

    def attempt_of(self, request_id: int) -> SendAttempt | None:
        """Return the attempt that a request waits for; None when it waits for none."""
        flight = self._flights.get(request_id)
        if flight is None or flight.member is None:
            return None
        return SendAttempt(request_id, flight.attempt, flight.member.name)

    # -- requests ---------------------------------------------------------------------------------

    def _request_arrived(self, event: RequestArrived) -> None:
        request = event.request
        if request.request_id in self._flights:
            raise InvariantViolation(f"request {request.request_id} is here already")
        flight = Flight(request)
        if len(self._flights) >= self.params.most_requests:
            count = len(self._flights)
            self._out.append(EndRequest(
                request.request_id, NoAnswer.FRONT_FULL,
                f"{count} requests are with this front, at most {self.params.most_requests} may be",
            ))  # fmt: skip
            return
        self._flights[request.request_id] = flight
        if request.expires_ns is not None:
            heapq.heappush(self._ends, (request.expires_ns, request.request_id))
        self._route(flight)

    def _request_given_up(self, event: RequestGivenUp) -> None:
        flight = self._flights.get(event.request_id)
        if flight is not None:
            self._leave_machine(flight, withdraw=True)
            self._forget(flight)

    def _attempt_answered(self, event: AttemptAnswered) -> None:
        flight = self._awaited(event.request_id, event.attempt)
        if flight is None:
            return
        assert flight.member is not None
        self._out.append(PassAnswer(event.request_id, event.attempt, flight.member.name))
        member = flight.member
        self._leave_machine(flight)
        self._forget(flight)
        self._offer_place(member.view)

    def _attempt_failed(self, event: AttemptFailed) -> None:
        flight = self._awaited(event.request_id, event.attempt)
        if flight is None:
            return
        member = flight.member
        assert member is not None
        self._leave_machine(flight)
        refused = event.failure is AttemptFailure.REFUSED
        if not refused:
            facts = member.view.facts
            self._machine_changed(ContactLost(facts.name, facts.incarnation))
        if refused:
            flight.refused_by.add(member.view)
            if sooner(event, flight.refusal):
                flight.refusal = event
        self._route_again(flight, event.message, may_be_done=not refused)

    def _awaited(self, request_id: int, attempt: int) -> Flight | None:
        """Return the flight that waits for this attempt; None when nobody does any more."""
        flight = self._flights.get(request_id)
        if flight is None or flight.member is None or flight.attempt != attempt:
            return None
        return flight

    def _time_over(self, request_id: int) -> None:
        """End the wait of a request whose time, or patience, has passed."""
        flight = self._flights.get(request_id)
        if flight is None:
            return
        expires_ns = flight.request.expires_ns
        if expires_ns is not None and expires_ns <= self._now_ns:
            if flight.member is None and flight.refusal is not None:
                self._end_unrouted(flight)  # which tells more
                return
            self._leave_machine(flight, withdraw=True)
            self._end(flight, NoAnswer.EXPIRED, _EXPIRED)
        elif flight.member is None and flight.until_ns <= self._now_ns:
            if flight.refused_by and not flight.waited_long_enough(self._now_ns):
                self._ask_all_again(flight)
            else:
                self._end_unrouted(flight)

    # -- routing ----------------------------------------------------------------------------------

    def _route(self, flight: Flight) -> None:
        """Send the request to a machine, have it wait for one, or end it."""
        request, params = flight.request, self.params
        if request.expires_ns is not None and request.expires_ns <= self._now_ns:
            self._end(flight, NoAnswer.EXPIRED, _EXPIRED)
            return
        view = choose(
            request, self._ready, self._now_ns + params.way_ns, self._rule,
            choices=params.choices, seed=params.seed, avoid=flight.avoid,
        )  # fmt: skip
        if view is not None:
            self._waiting.pop(request.request_id, None)
            flight.attempt += 1
            flight.member = self._members.get(view.facts.name)
            view.sent(request)
            self._out.append(SendAttempt(request.request_id, flight.attempt, view.facts.name))
        elif flight.refusal is not None:
            self._wait_full(flight)
        elif (refusal := never(request, [one.view.facts for one in self._members])) is not None:
            self._end(flight, *refusal)
        elif request.request_id not in self._waiting:
            self._waiting[request.request_id] = flight
            flight.until_ns = self._now_ns + params.patience_ns
            heapq.heappush(self._ends, (flight.until_ns, request.request_id))

    def _route_again(self, flight: Flight, why: str, *, may_be_done: bool) -> None:
        """Send a request whose attempt failed to another machine, if that is right."""
        if may_be_done and flight.request.changes:
            message = f"{why or 'the machine was lost'}; it may have been carried out"
            self._end(flight, NoAnswer.UNAVAILABLE, message)
        elif flight.attempt - flight.spared < self.params.most_attempts:
            self._route(flight)
        elif flight.refused_by:
            self._wait_full(flight)
        else:
            self._end_unrouted(flight)

    def _wait_full(self, flight: Flight) -> None:
        """Have a request that every machine refused wait for a place, or end it."""
        if flight.request.request_id in self._waiting:
            return
        if flight.full_until_ns is None:
            flight.full_until_ns = self._now_ns + self.params.full_patience_ns
        if flight.waited_long_enough(self._now_ns):
            self._end_unrouted(flight)
            return
        asked_ns = 0 if flight.refusal is None else flight.refusal.retry_after_ns or 0
        spread_ns = asked_ns * (mixed(flight.request.request_id) % 256) // 1024
        wait_ns = max(_LEAST_WAIT_NS, asked_ns + spread_ns)
        self._waiting[flight.request.request_id] = flight
        flight.until_ns = min(self._now_ns + wait_ns, flight.full_until_ns)
        heapq.heappush(self._ends, (flight.until_ns, flight.request.request_id))

    def _ask_all_again(self, flight: Flight) -> None:
        """Send a request to machines that refused it, as they asked for."""
        del self._waiting[flight.request.request_id]
        for view in tuple(flight.refused_by):
            flight.ask_again(view)
        flight.refusal = None
        self._route(flight)

    def _offer_place(self, view: MachineView) -> None:
        """Give the place of a request that was answered to the first that was refused there."""
        for flight in self._waiting.values():
            if view in flight.refused_by and view in self._ready:
                flight.ask_again(view)
                self._route(flight)
                return

    def _end_unrouted(self, flight: Flight) -> None:
        """End a request that no machine took."""
        self._end(flight, *unrouted(flight, len(self._members)))

    def _end(
        self, flight: Flight, reason: NoAnswer, message: str, retry_after_ns: int | None = None
    ) -> None:
        self._out.append(EndRequest(flight.request.request_id, reason, message, retry_after_ns))
        self._forget(flight)

    def _forget(self, flight: Flight) -> None:
        request_id = flight.request.request_id
        del self._flights[request_id]
        self._waiting.pop(request_id, None)
        if len(self._ends) > _SPARE_ENDS + 2 * len(self._flights):
            self._ends = [end for end in self._ends if end[1] in self._flights]
            heapq.heapify(self._ends)

    def _leave_machine(self, flight: Flight, *, withdraw: bool = False) -> None:
        """Count the flight off its machine, which it does not go to again."""
        member = flight.member
        if member is None:
            return
        flight.member = None
        flight.avoid.add(member.view)
        member.view.ended(flight.request)
        if withdraw:
            request_id = flight.request.request_id
            self._out.append(WithdrawAttempt(request_id, flight.attempt, member.name))
        self._leave_when_drained(member)

    # -- machines ---------------------------------------------------------------------------------

    def _machine_changed(self, event: MachineEvent) -> None:
        changed = self._members.take(event)
        if not changed and not isinstance(event, MachineAnnounced):
            return
        ready = MachineState.READY
        self._ready = [member.view for member in self._members if member.state is ready]
        for member, _before in changed:
            if member.state is MachineState.GONE:
                self._lose(member)
            elif member.state is MachineState.READY:
                self._trust_again(member)
            else:
                self._leave_when_drained(member)
        for flight in list(self._waiting.values()):
            self._route(flight)

    def _trust_again(self, member: Member) -> None:
        """Let waiting requests go to a machine that failed them and has answered a probe since."""
        for flight in self._waiting.values():
            flight.avoid.discard(member.view)

    def _machine_told(self, event: MachineTold) -> None:
        member = self._members.get(event.name, event.incarnation)
        if member is not None:
            member.view.told(event.count, event.work_ns)

    def _lose(self, member: Member) -> None:
        """Send what was on a machine that is gone to others."""
        lost = [flight for flight in self._flights.values() if flight.member is member]
        for flight in lost:
            self._leave_machine(flight, withdraw=True)
        for flight in lost:
            self._route_again(flight, f"machine '{member.name}' was lost", may_be_done=True)

    def _leave_when_drained(self, member: Member) -> None:
        """End the membership of a draining machine that has nothing left."""
        if member.state is not MachineState.DRAINING:
            return
        if any(flight.member is member for flight in self._flights.values()):
            return
        facts = member.view.facts
        self._members.forget(member)
        self._out.append(MachineDrained(facts.name, facts.incarnation))
