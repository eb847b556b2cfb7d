"""Simulated clusters: each request has one answer, whatever happens to machines."""

import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serve.core.cluster.commands import NoAnswer
from serve.core.cluster.dispatch import DispatchParams
from serve.core.invariants import check_invariants
from serve.core.types import Completed, Nanos
from serve.errors import ConfigError
from serve.sim.agenda import Agenda
from serve.sim.cluster import (
    ClusterSetup,
    ClusterSimulation,
    Fault,
    Forwarding,
    simulate_cluster,
)
from serve.sim.device import Offered
from serve.sim.machine import MachineModel
from tests.builders import MS, US, task

S = 1000 * MS


def offered(task_id, run_ms, at_ms=0.0, **fields):
    run_ns = int(run_ms * MS)
    given = task(task_id, run_ns=run_ns, prepare_ns=200 * US, arrived_ns=int(at_ms * MS), **fields)
    return Offered(given, Nanos(run_ns), Nanos(100 * US), Nanos(100 * US))


def stream(count, rho, cores, seed=1, **fields):
    rng, now = random.Random(seed), 0.0
    found = []
    for task_id in range(1, count + 1):
        now += rng.expovariate(rho * cores / 4)
        found.append(offered(task_id, rng.choice((1, 2, 3, 10)), now, **fields))
    return found


def machines(count, **fields):
    return tuple(MachineModel(**fields) for _ in range(count))


def test_one_request_takes_what_it_takes_and_the_way():
    (answer,) = simulate_cluster([offered(1, 5)], ClusterSetup(machines(1), front_ns=MS))
    assert isinstance(answer.outcome, Completed)
    # The way, preparing, two switches of the device, the run, answering.
    assert answer.answered_ns == MS + 100 * US + 30 * US + 5 * MS + 100 * US
    assert (answer.machine, answer.attempts, answer.hops, answer.late) == ("m0", 1, 0, False)
    (slow,) = simulate_cluster([offered(1, 5)], ClusterSetup(machines(1, pace=0.5), front_ns=MS))
    assert slow.answered_ns == answer.answered_ns + 5 * MS
    # Late by the promise of the reference pool, though it ran as it does there alone.
    assert slow.late


def test_the_promise_is_the_same_on_every_machine():
    requests = stream(400, 0.9, 6, seed=3)
    setup = ClusterSetup((*machines(2), *machines(2, pace=0.5)), DispatchParams(rule="random"))
    by_id = {one.task.task_id: one.task for one in requests}
    answers = simulate_cluster(requests, setup)
    assert {answer.machine for answer in answers} == {"m0", "m1", "m2", "m3"}
    for answer in answers:
        assert answer.task == by_id[answer.task.task_id]
        assert answer.late == (answer.answered_ns > answer.task.due_ns)


def test_it_is_the_same_again():
    requests, setup = stream(300, 0.8, 8), ClusterSetup(machines(4), fronts=2)
    assert simulate_cluster(requests, setup) == simulate_cluster(requests, setup)


def test_counting_beats_chance_and_unlike_machines_need_weights():
    requests = stream(3000, 0.85, 32, seed=5)

    def missed(rule, given, **others):
        setup = ClusterSetup(given, DispatchParams(rule=rule), **others)
        return sum(answer.missed for answer in simulate_cluster(requests, setup)) / 3000

    assert missed("count", machines(16)) <= 0.001
    assert missed("random", machines(16)) >= 0.03
    mixed = tuple(MachineModel(cores=cores) for cores in (1, 1, 2, 4, 8, 8, 8))
    assert missed("in_time", mixed) <= 0.003
    assert missed("count", mixed) >= 0.01


def test_requests_go_only_where_their_model_is():
    having = (
        MachineModel(models=frozenset({"gcn:1"})),
        MachineModel(models=frozenset({"gcn:1", "gat:1"})),
        MachineModel(models=frozenset({"sage:1"})),
    )
    requests = [
        offered(n, 1, n, model=("gcn:1", "gat:1", "sage:1", "gin:1")[n % 4]) for n in range(1, 81)
    ]
    answers = simulate_cluster(requests, ClusterSetup(having, DispatchParams(rule="random")))
    places = {(answer.task.model, answer.machine): answer.outcome for answer in answers}
    assert set(places) == {
        ("gcn:1", "m0"), ("gcn:1", "m1"), ("gat:1", "m1"), ("sage:1", "m2"), ("gin:1", ""),
    }  # fmt: skip
    assert places["gin:1", ""] is NoAnswer.NO_MODEL


def test_what_cannot_be_served_here_is_passed_on_once():
    setup = ClusterSetup(
        machines(4), DispatchParams(rule="random"), forwarding=Forwarding(asked=3), front_ns=0
    )
    answers = simulate_cluster(stream(800, 0.8, 8), setup)
    hops = Counter(answer.hops for answer in answers)
    assert set(hops) == {0, 1}
    assert 10 < hops[1] < 400
    alone = simulate_cluster(
        stream(800, 0.8, 8), ClusterSetup(machines(4), DispatchParams(rule="random"), front_ns=0)
    )
    assert sum(one.missed for one in answers) < 0.5 * sum(one.missed for one in alone)


def test_a_killed_machine_costs_nothing_but_time():
    requests = stream(600, 0.6, 6)
    middle = requests[300].task.arrived_ns
    fault = Fault(middle, 0, "killed", middle + 50 * MS)
    setup = ClusterSetup(machines(3), faults=(fault,), probe_every_ns=20 * MS)
    answers = simulate_cluster(requests, setup)
    assert len(answers) == 600
    assert all(isinstance(answer.outcome, Completed) for answer in answers)
    assert sum(answer.attempts == 2 for answer in answers) >= 1
    # It serves again.
    last = [one.machine for one in answers if one.task.arrived_ns > middle + 120 * MS]
    assert "m0" in last
    without = ClusterSetup(
        machines(3), DispatchParams(most_attempts=1), faults=(fault,), probe_every_ns=20 * MS
    )
    lost = [one for one in simulate_cluster(requests, without) if one.outcome is not None and
            one.outcome is NoAnswer.UNAVAILABLE]  # fmt: skip
    # Only what was in flight.
    assert 1 <= len(lost) <= 40
    assert all(one.answered_ns <= middle + 50 * MS for one in lost)


@pytest.mark.parametrize(("silent_ms", "moved"), [(30, False), (400, True)])
def test_a_machine_that_is_not_heard_is_left_with_the_second_probe(silent_ms, moved):
    fault = Fault(5 * MS, 0, "silent", (5 + silent_ms) * MS)
    setup = ClusterSetup(
        machines(2), DispatchParams(rule="count"), faults=(fault,), probe_every_ns=50 * MS
    )
    requests = [offered(n, 20, n / 10, target_ns=10 * S) for n in range(1, 5)]
    requests += [offered(5, 1, 600), offered(6, 1, 600.1), offered(7, 1, 600.2)]
    answers = simulate_cluster(requests, setup)
    assert Counter(type(answer.outcome) for answer in answers) == {Completed: 7}
    first = [answer for answer in answers if answer.task.task_id < 5]
    assert any(answer.attempts == 2 for answer in first) == moved
    assert {answer.machine for answer in first} == ({"m1"} if moved else {"m0", "m1"})
    assert all(answer.answered_ns < 200 * MS for answer in first)
    # Heard again, it serves again.
    assert {one.machine for one in answers if one.task.task_id >= 5} == {"m0", "m1"}


def test_a_drained_machine_finishes_what_it_has():
    fault = Fault(10 * MS, 0, "drained")
    requests = [offered(n, 20, n, target_ns=S) for n in range(1, 30)]
    answers = simulate_cluster(requests, ClusterSetup(machines(2), faults=(fault,)))
    assert all(isinstance(one.outcome, Completed) and one.attempts == 1 for one in answers)
    assert not [o for o in answers if o.machine == "m0" and o.task.arrived_ns > 10 * MS]
    assert [one for one in answers if one.machine == "m0" and one.answered_ns > 20 * MS]


class Checked(Agenda):
    """Looks at every machine after everything that happens."""

    def __init__(self, machines):
        super().__init__()
        self.machines = machines

    def happen(self):
        super().happen()
        for machine in self.machines:
            scheduler = machine.simulation.scheduler
            check_invariants(scheduler)
            assert scheduler.reserved_bytes <= scheduler.budget_bytes


FAULTS = st.builds(
    lambda at, machine, kind, length: Fault(
        at * MS, machine, kind, None if length is None else (at + length) * MS
    ),
    st.integers(0, 60), st.integers(0, 2), st.sampled_from(["killed", "silent", "drained"]),
    st.sampled_from([None, 5, 30, 200]),
)  # fmt: skip


@given(
    faults=st.lists(FAULTS, max_size=5),
    rule=st.sampled_from(["in_time", "count", "random"]),
    fronts=st.sampled_from([1, 2]),
    owned=st.booleans(),
    forwarding=st.sampled_from([None, Forwarding(2, MS, MS)]),
    timeout_ms=st.sampled_from([None, 3, 80]),
    attempts=st.sampled_from([1, 4]),
    seed=st.integers(0, 99),
)
@settings(max_examples=60, deadline=None)
def test_every_request_ends_once_and_memory_is_never_oversubscribed(
    faults, rule, fronts, owned, forwarding, timeout_ms, attempts, seed
):
    rng = random.Random(seed)
    requests = [
        offered(
            n, rng.choice((1, 4, 15)), n * rng.random(), reserve=rng.choice((300, 700, 1100)),
            timeout_ns=None if timeout_ms is None else timeout_ms * MS,
        )
        for n in range(1, 60)
    ]  # fmt: skip
    requests.sort(key=lambda one: one.task.arrived_ns)
    given = (*machines(2, budget_bytes=1000), MachineModel(budget_bytes=2000, pace=0.5))
    setup = ClusterSetup(
        given, DispatchParams(rule=rule, most_attempts=attempts, patience_ns=40 * MS),
        fronts=fronts, owned=owned, forwarding=forwarding, faults=tuple(faults),
        probe_every_ns=10 * MS,
    )  # fmt: skip
    simulation = ClusterSimulation(setup)
    simulation.agenda = Checked(simulation.machines)
    simulation.run(requests)
    assert Counter(one.task.task_id for one in simulation.answered) == dict.fromkeys(
        range(1, 60), 1
    )
    for answer in simulation.answered:
        if isinstance(answer.outcome, Completed):
            number = int(answer.machine[1:])
            assert answer.task.reserve_bytes <= given[number].budget_bytes
            assert answer.attempts <= attempts
        if answer.task.expires_ns is not None:
            assert answer.answered_ns <= answer.task.expires_ns + MS
    assert all(front.unanswered_count == 0 for front in simulation.fronts)


@pytest.mark.slow
@pytest.mark.parametrize("choices", [1, 2])
def test_queues_have_the_tails_of_theory(choices):
    """With d choices the share of machines with at least i requests is ρ^((dⁱ − 1) / (d − 1))."""
    count, rho, total = 150, 0.8, 45_000
    mean_ns = 100 * MS  # so that what a launch costs is nothing
    rng, now, requests = random.Random(7), 0.0, []
    for task_id in range(1, total + 1):
        now += rng.expovariate(rho * count) * mean_ns
        run_ns = max(1, round(rng.expovariate(1.0) * mean_ns))
        given = task(task_id, run_ns=run_ns, prepare_ns=0, arrived_ns=round(now))
        requests.append(Offered(given, Nanos(run_ns), Nanos(0)))
    one = MachineModel(cores=1, lanes_per_core=1, policy="fifo", discipline="rolling")
    setup = ClusterSetup((one,) * count, DispatchParams(rule="count", choices=choices), front_ns=0)
    simulation = ClusterSimulation(setup)
    tails, looks = Counter(), 0
    for number, request in enumerate(requests):
        simulation.advance(request.task.arrived_ns)
        if number > total // 5 and number % 50 == 0:
            looks += count
            for member in simulation.fronts[0].members:
                for length in range(1, member.view.count + 1):
                    tails[length] += 1
        simulation.offer(request)
    for length in (1, 2, 3, 4):
        power = length if choices == 1 else 2**length - 1
        assert tails[length] / looks == pytest.approx(rho**power, abs=0.02)


def test_a_setup_needs_machines_for_its_fronts():
    for fields in ({"machines": ()}, {"machines": machines(1), "fronts": 2}):
        with pytest.raises(ConfigError, match="fronts"):
            ClusterSetup(**fields)
