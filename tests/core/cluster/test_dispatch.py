"""What becomes of requests when machines die, hang, drain and come back: one answer each."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from serve.core.cluster.commands import (
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
    ContactLost,
    DrainAsked,
    MachineAnnounced,
    MachineDied,
    MachineTold,
    ProbeMissed,
    ProbePassed,
    RequestArrived,
    RequestGivenUp,
    TimePassed,
)
from serve.core.cluster.members import MachineState
from serve.core.cluster.route import RULES
from serve.core.cluster.views import MachineFacts, RoutedRequest
from serve.errors import ConfigError, InvariantViolation

S = 1_000_000_000
LOST, REFUSED = AttemptFailure.UNREACHABLE, AttemptFailure.REFUSED


def dispatcher(*names, facts=None, **params):
    found = Dispatcher(DispatchParams(rule="count", **params))
    for name in names:
        join(found, name, **(facts or {}))
    return found


def join(front, name, incarnation=1, now=0, **facts):
    front.handle(MachineAnnounced(MachineFacts(name, incarnation, **facts)), now)
    return front.handle(ProbePassed(name, incarnation), now)


def arrive(front, request_id=1, now=0, **fields):
    return front.handle(RequestArrived(RoutedRequest(request_id, "gcn", **fields)), now)


def kinds(commands):
    return [type(command).__name__ for command in commands]


def test_a_request_is_sent_and_its_answer_passed_on_once():
    front = dispatcher("a")
    assert arrive(front) == [SendAttempt(1, 1, "a")]
    assert front.attempt_of(1) == SendAttempt(1, 1, "a")
    assert front.handle(AttemptAnswered(1, 1), 5) == [PassAnswer(1, 1, "a")]
    for late in (AttemptAnswered(1, 1), AttemptFailed(1, 1, LOST), RequestGivenUp(1)):
        assert front.handle(late, 6) == []
    assert front.unanswered_count == 0
    assert front.members.get("a").view.count == 0


def test_requests_are_spread_by_what_is_there():
    front = dispatcher("a", "b")
    first, second = arrive(front, 1)[0].machine, arrive(front, 2)[0].machine
    assert {first, second} == {"a", "b"}
    front.handle(AttemptAnswered(1, 1), 0)
    assert arrive(front, 3)[0].machine == first
    # The machine itself says that others keep it busy.
    front.handle(MachineTold(first, 1, 9), 0)
    assert [arrive(front, n)[0].machine for n in range(4, 9)] == [second] * 5


def test_a_lost_machine_s_requests_go_elsewhere_and_its_late_answers_nowhere():
    front = dispatcher("a", "b")
    sent = arrive(front)[0]
    other = "b" if sent.machine == "a" else "a"
    assert front.handle(MachineDied(sent.machine, 1), 1) == [
        WithdrawAttempt(1, 1, sent.machine), SendAttempt(1, 2, other),
    ]  # fmt: skip
    assert front.handle(AttemptAnswered(1, 1), 2) == []
    assert front.handle(AttemptAnswered(1, 2), 3) == [PassAnswer(1, 2, other)]


def test_a_machine_that_hangs_loses_its_requests_with_the_second_probe():
    front = dispatcher("a", "b")
    sent = arrive(front)[0]
    assert front.handle(ProbeMissed(sent.machine, 1), 1) == []
    assert all(arrive(front, n)[0].machine != sent.machine for n in range(2, 6))
    assert kinds(front.handle(ProbeMissed(sent.machine, 1), 2)) == [
        "WithdrawAttempt", "SendAttempt",
    ]  # fmt: skip
    assert front.members.get(sent.machine).state is MachineState.GONE


def test_what_changes_a_server_is_sent_again_only_after_a_refusal():
    front = dispatcher("a", "b")
    first = arrive(front, changes=True)[0].machine
    again = front.handle(AttemptFailed(1, 1, REFUSED, "full"), 0)
    assert again == [SendAttempt(1, 2, "b" if first == "a" else "a")]
    (end,) = front.handle(AttemptFailed(1, 2, LOST, "reset"), 0)
    assert (end.reason, end.message) == (
        NoAnswer.UNAVAILABLE, "reset; it may have been carried out",
    )  # fmt: skip
    front = dispatcher("a", "b")
    sent = arrive(front, changes=True)[0]
    assert kinds(front.handle(MachineDied(sent.machine, 1), 0)) == ["WithdrawAttempt", "EndRequest"]


def test_when_all_refuse_the_shortest_wait_is_told():
    front = dispatcher("a", "b", "c")
    arrive(front)
    front.handle(AttemptFailed(1, 1, REFUSED, "full", 30), 0)
    front.handle(AttemptFailed(1, 2, REFUSED, "full", 10), 0)
    assert front.handle(AttemptFailed(1, 3, REFUSED, "full", 20), 0) == [
        EndRequest(1, NoAnswer.REFUSED, "3 machines did not take it: full", 10)
    ]
    # Refusing says nothing about the machine.
    assert kinds(arrive(front, 2)) == ["SendAttempt"]


def full(**params):
    """Two machines that have refused a request, which waits."""
    front = dispatcher("a", "b", full_patience_ns=10 * S, **params)
    first = arrive(front, 1, expires_ns=8 * S)[0].machine
    second = "b" if first == "a" else "a"
    assert front.handle(AttemptFailed(1, 1, REFUSED, "full", 5 * S), 0) == [
        SendAttempt(1, 2, second)
    ]
    return front, first, second


def test_a_request_that_all_refused_takes_the_first_place():
    front, first, second = full()
    other = arrive(front, 2)[0]
    assert front.handle(AttemptFailed(1, 2, REFUSED, "full", 6 * S), 0) == []
    assert front.waiting_count == 1
    assert front.handle(AttemptAnswered(2, other.attempt), S) == [
        PassAnswer(2, 1, other.machine), SendAttempt(1, 3, other.machine),
    ]  # fmt: skip
    assert {first, second} == {"a", "b"}
    assert front.handle(AttemptAnswered(1, 3), 2 * S) == [PassAnswer(1, 3, other.machine)]


def test_it_goes_to_a_machine_that_joins_meanwhile():
    front, *_ = full()
    front.handle(AttemptFailed(1, 2, REFUSED, "full", 6 * S), 0)
    assert join(front, "c", now=S) == [SendAttempt(1, 3, "c")]


def test_it_waits_on_while_the_machine_that_refused_it_is_not_ready():
    front = dispatcher("a", full_patience_ns=10 * S)
    arrive(front, 1)
    front.handle(AttemptFailed(1, 1, REFUSED, "full", 5 * S), 0)
    arrive(front, 2)
    front.handle(ProbeMissed("a", 1), S)
    assert front.handle(AttemptAnswered(2, 1), 2 * S) == [PassAnswer(2, 1, "a")]
    assert front.handle(TimePassed(), 7 * S) == []
    assert front.handle(ProbePassed("a", 1), 8 * S) == [SendAttempt(1, 2, "a")]


def test_it_is_sent_again_after_the_wait_that_was_asked_for():
    front, *_ = full()
    front.handle(AttemptFailed(1, 2, REFUSED, "full", 3 * S), 0)
    assert front.handle(TimePassed(), 3 * S - 1) == []
    # A little later, so that those refused together do not come back together.
    wake = front.next_wakeup()
    assert 3 * S <= wake <= 4 * S
    assert kinds(front.handle(TimePassed(), wake)) == ["SendAttempt"]


def test_it_ends_refused_with_its_caller_s_time_or_patience():
    for expires, ends in ((8 * S, 8 * S), (None, 10 * S)):
        front = dispatcher("a", full_patience_ns=10 * S)
        arrive(front, 1, expires_ns=expires)
        assert front.handle(AttemptFailed(1, 1, REFUSED, "full", 100 * S), 0) == []
        assert front.handle(TimePassed(), ends - 1) == []
        assert front.handle(TimePassed(), ends) == [
            EndRequest(1, NoAnswer.REFUSED, "1 machines did not take it: full", 100 * S)
        ]


def test_a_request_goes_where_its_graph_is():
    front = Dispatcher(DispatchParams(rule="count"))
    join(front, "a", graphs=frozenset({"roads"}))
    join(front, "b", graphs=frozenset({"papers"}))
    for request_id in range(4):
        assert arrive(front, request_id, graph="papers") == [SendAttempt(request_id, 1, "b")]
    (end,) = arrive(front, 9, graph="rivers")
    assert (end.reason, end.message) == (
        NoAnswer.NO_GRAPH, "graph 'rivers' is on none of 2 machines",
    )  # fmt: skip
    # One that has not said what it holds may hold it.
    join(front, "c")
    assert arrive(front, 10, graph="rivers") == [SendAttempt(10, 1, "c")]


def test_a_request_goes_to_no_more_machines_than_it_may():
    front = dispatcher("a", "b", "c", most_attempts=2)
    arrive(front)
    assert kinds(front.handle(AttemptFailed(1, 1, LOST), 0)) == ["SendAttempt"]
    (end,) = front.handle(AttemptFailed(1, 2, LOST), 0)
    assert (end.reason, end.message) == (
        NoAnswer.UNAVAILABLE, "of 3 machines 2 were lost with it",
    )  # fmt: skip


def test_it_waits_for_a_machine_and_is_patient_for_so_long():
    front = dispatcher(patience_ns=2 * S)
    assert arrive(front, 1, now=S) == []
    assert arrive(front, 2, now=2 * S) == []
    assert front.next_wakeup() == 3 * S
    (end,) = front.handle(TimePassed(), 3 * S)
    assert (end.request_id, end.reason) == (1, NoAnswer.UNAVAILABLE)
    assert join(front, "a", now=3 * S) == [SendAttempt(2, 1, "a")]
    assert front.handle(TimePassed(), 9 * S) == []
    assert front.next_wakeup() is None


def test_the_callers_time_ends_a_wait_and_an_attempt():
    front = dispatcher("a")
    arrive(front, 1, expires_ns=5)
    assert front.handle(TimePassed(), 5) == [
        WithdrawAttempt(1, 1, "a"), EndRequest(1, NoAnswer.EXPIRED, "the caller's time has passed"),
    ]  # fmt: skip
    assert front.handle(AttemptAnswered(1, 1), 6) == []
    assert kinds(arrive(front, 2, now=7, expires_ns=7)) == ["EndRequest"]
    front = dispatcher()
    arrive(front, 3, expires_ns=8)
    assert front.next_wakeup() == 8
    assert front.handle(TimePassed(), 8)[0].reason is NoAnswer.EXPIRED
    assert front.waiting_count == 0


def test_a_machine_that_broke_a_connection_is_tried_again_after_a_probe():
    front = dispatcher("a", patience_ns=S)
    arrive(front)
    assert front.handle(AttemptFailed(1, 1, LOST), 0) == []
    assert front.waiting_count == 1
    assert front.handle(ProbePassed("a", 1), 1) == [SendAttempt(1, 2, "a")]
    assert front.handle(ContactLost("a", 1), 2) == []
    assert front.handle(AttemptAnswered(1, 2), 3) == [PassAnswer(1, 2, "a")]


def test_a_request_may_return_to_a_machine_that_was_started_anew():
    front = dispatcher("a")
    arrive(front)
    assert kinds(front.handle(MachineDied("a", 1), 0)) == ["WithdrawAttempt"]
    assert join(front, "a", 2) == [SendAttempt(1, 2, "a")]


def test_admission_compares_known_memory_over_machines_that_have_the_model():
    front = dispatcher()
    join(front, "a", budget_bytes=100, models=frozenset({"gcn"}))
    join(front, "b", budget_bytes=200, models=frozenset({"gcn"}))
    join(front, "c", budget_bytes=900, models=frozenset({"gat"}))
    assert arrive(front, 1, need_bytes=200) == [SendAttempt(1, 1, "b")]
    (end,) = arrive(front, 2, need_bytes=201)
    assert (end.reason, end.message) == (
        NoAnswer.TOO_BIG,
        "needs 201 bytes, the largest of 2 machines that have 'gcn' has 200 for tasks",
    )
    (end,) = front.handle(RequestArrived(RoutedRequest(3, "sage")), 0)
    assert (end.reason, end.message) == (
        NoAnswer.NO_MODEL, "model 'sage' is on none of 3 machines",
    )  # fmt: skip
    # The machine that could is away: the request waits for it.
    front.handle(MachineDied("b", 1), 0)
    assert arrive(front, 4, need_bytes=150) == []
    assert front.waiting_count == 2


def test_a_draining_machine_answers_what_it_has_and_leaves():
    front = dispatcher("a", "b")
    sent = arrive(front)[0]
    assert front.handle(DrainAsked(sent.machine, 1), 0) == []
    assert all(arrive(front, n)[0].machine != sent.machine for n in range(2, 5))
    assert front.handle(AttemptAnswered(1, 1), 0) == [
        PassAnswer(1, 1, sent.machine), MachineDrained(sent.machine, 1),
    ]  # fmt: skip
    assert front.members.get(sent.machine) is None
    idle = dispatcher("a")
    assert idle.handle(DrainAsked("a", 1), 0) == [MachineDrained("a", 1)]


def test_a_front_takes_so_many_requests():
    front = dispatcher("a", most_requests=1)
    arrive(front, 1)
    (end,) = arrive(front, 2)
    assert (end.reason, end.message) == (
        NoAnswer.FRONT_FULL, "1 requests are with this front, at most 1 may be",
    )  # fmt: skip
    with pytest.raises(InvariantViolation, match="request 1 is here already"):
        arrive(front, 1)


def test_ends_of_requests_that_are_over_take_no_room():
    front = dispatcher("a")
    for request_id in range(5000):
        arrive(front, request_id, expires_ns=10 * S)
        front.handle(AttemptAnswered(request_id, 1), 0)
    assert len(front._ends) < 2000


@pytest.mark.parametrize(
    "params",
    [
        {"rule": "best"},
        {"choices": 0},
        {"most_attempts": 0},
        {"patience_ns": -1},
        {"full_patience_ns": -1},
    ],
)
def test_impossible_parameters_are_refused(params):
    with pytest.raises(ConfigError, match=r"unknown rule of a front 'best'|at least"):
        DispatchParams(**params)


NAMES = ("a", "b", "c")


class AnyOrder(RuleBasedStateMachine):
    """Any events in any order, also impossible ones."""

    @initialize(
        rule_name=st.sampled_from(sorted(RULES)),
        choices=st.sampled_from([None, 1, 2]),
        most_attempts=st.integers(1, 4),
        most_requests=st.sampled_from([4, 1000]),
        full_patience=st.sampled_from([0, 40, 2_000_000_000]),
    )
    def start(self, rule_name, choices, most_attempts, most_requests, full_patience):
        self.front = Dispatcher(
            DispatchParams(
                rule_name, choices, most_attempts=most_attempts, patience_ns=50,
                most_requests=most_requests, full_patience_ns=full_patience,
            )
        )  # fmt: skip
        self.now = 0
        self.requests = {}
        #: How each request ended.
        self.ended = {}
        #: Attempts waited for, and all that were sent, by request.
        self.waited = {}
        self.sent = {}
        #: What was carried out, or may have been, of requests that change a server.
        self.maybe_done = set()
        #: Refusals by request.
        self.refused = {}

    def tell(self, event):
        for command in self.front.handle(event, self.now):
            self.check(command)

    def check(self, command):
        if isinstance(command, MachineDrained):
            assert all(one.machine != command.name for one in self.waited.values())
            return
        request_id = command.request_id
        assert request_id not in self.ended
        if isinstance(command, SendAttempt):
            assert request_id not in self.waited
            member = self.front.members.get(command.machine)
            request = self.requests[request_id]
            assert member.state is MachineState.READY
            assert member.view.facts.can_hold(request)
            assert command.attempt == len(self.sent.setdefault(request_id, [])) + 1
            refused = self.refused.get(request_id, 0)
            patient = self.front.params.full_patience_ns > 0
            most = self.front.params.most_attempts + (refused if patient else 0)
            assert command.attempt <= most
            assert request_id not in self.maybe_done
            self.waited[request_id] = command
            self.sent[request_id].append(command)
        elif isinstance(command, WithdrawAttempt):
            gone = self.waited.pop(request_id)
            assert (gone.attempt, gone.machine) == (command.attempt, command.machine)
            if self.requests[request_id].changes:
                self.maybe_done.add(request_id)
        elif isinstance(command, PassAnswer):
            gone = self.waited.pop(request_id)
            assert (gone.attempt, gone.machine) == (command.attempt, command.machine)
            self.ended[request_id] = command
        else:
            self.waited.pop(request_id, None)
            self.ended[request_id] = command

    @rule(
        need=st.sampled_from([0, 5, 15, 25]),
        time=st.sampled_from([None, 1, 60]),
        model=st.sampled_from(["gcn", "gcn", "gat"]),
        changes=st.booleans(),
    )
    def arrive(self, need, time, model, changes):
        request_id = len(self.requests)
        expires = None if time is None else self.now + time
        self.requests[request_id] = RoutedRequest(
            request_id, model, need, 10, 5, self.now + 20, expires, changes
        )
        self.tell(RequestArrived(self.requests[request_id]))

    @rule(
        name=st.sampled_from(NAMES), incarnation=st.integers(1, 4),
        budget=st.sampled_from([None, 10, 20]), both=st.booleans(),
    )  # fmt: skip
    def announce(self, name, incarnation, budget, both):
        models = frozenset({"gcn", "gat"} if both else {"gcn"})
        self.tell(MachineAnnounced(MachineFacts(name, incarnation, 2, budget, models)))

    @rule(
        kind=st.sampled_from(
            [ProbePassed, ProbePassed, ProbeMissed, ContactLost, MachineDied, DrainAsked]
        ),
        name=st.sampled_from(NAMES),
        known=st.booleans(),
    )
    def news(self, kind, name, known):
        member = self.front.members.get(name)
        incarnation = member.view.facts.incarnation if known and member is not None else 1
        self.tell(kind(name, incarnation))

    @rule(name=st.sampled_from(NAMES), count=st.integers(0, 9))
    def told(self, name, count):
        self.tell(MachineTold(name, 1, count, count))

    @rule(data=st.data(), how=st.sampled_from(["answer", "lost", "refused", "given up"]))
    def outcome(self, data, how):
        """Also of attempts that nobody waits for any more."""
        if not self.sent:
            return
        request_id = data.draw(st.sampled_from(sorted(self.sent)))
        attempt = data.draw(st.sampled_from(self.sent[request_id])).attempt
        waited = self.waited.get(request_id)
        awaited = waited is not None and waited.attempt == attempt
        if how == "given up":
            if request_id not in self.ended:
                self.tell(RequestGivenUp(request_id))
                self.ended[request_id] = "given up"
            return
        if how == "answer":
            self.tell(AttemptAnswered(request_id, attempt))
            return
        failure = LOST if how == "lost" else REFUSED
        if awaited:
            del self.waited[request_id]
            if how == "refused":
                self.refused[request_id] = self.refused.get(request_id, 0) + 1
            if how == "lost" and self.requests[request_id].changes:
                self.maybe_done.add(request_id)
        self.tell(AttemptFailed(request_id, attempt, failure, "", 7))

    @rule(passed=st.sampled_from([1, 10, 60]))
    def time_passes(self, passed):
        self.now += passed
        self.tell(TimePassed())

    @invariant()
    def counts_agree(self):
        if not hasattr(self, "front"):
            return
        front = self.front
        assert front.unanswered_count == len(self.requests) - len(self.ended)
        assert front.waiting_count == front.unanswered_count - len(self.waited)
        wake = front.next_wakeup()
        assert wake is None or wake > self.now
        assert wake is not None or not front.waiting_count

    def teardown(self):
        """Everything ends: machines go, and time passes."""
        if not hasattr(self, "front"):
            return
        for name in NAMES:
            member = self.front.members.get(name)
            if member is not None:
                self.tell(MachineDied(name, member.view.facts.incarnation))
        for _ in range(2):
            self.now += 3_000_000_000
            self.tell(TimePassed())
        assert self.front.unanswered_count == 0
        assert set(self.ended) == set(self.requests)
        for member in self.front.members:
            assert member.view.count >= 0


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = settings(max_examples=120, stateful_step_count=40, deadline=None)
