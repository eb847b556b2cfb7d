"""The life of machines, and who owns them, under any order of events."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serve.core.cluster.commands import DisownMachine, OwnMachine
from serve.core.cluster.directory import Directory
from serve.core.cluster.events import (
    ContactLost,
    DrainAsked,
    FrontJoined,
    FrontLeft,
    MachineAnnounced,
    MachineDied,
    ProbeMissed,
    ProbePassed,
)
from serve.core.cluster.members import TRANSITIONS, MachineState, Members, MissedTooMany
from serve.core.cluster.views import MachineFacts

NAMES = ("a", "b", "c", "d", "e")
FRONTS = ("f", "g", "h")
NEWS = (ProbePassed, ProbeMissed, ContactLost, MachineDied, DrainAsked)


def announced(name, incarnation=1, **facts):
    return MachineAnnounced(MachineFacts(name, incarnation, **facts))


def state(members, name):
    return members.get(name).state


def test_every_event_has_a_row_in_every_state():
    causes = {*NEWS, MissedTooMany}
    assert set(TRANSITIONS) == {(state, cause) for state in MachineState for cause in causes}


def test_a_machine_serves_once_it_answers_and_until_it_does_not():
    members = Members()
    assert [(m.state, before) for m, before in members.take(announced("a"))] == [
        (MachineState.JOINING, MachineState.GONE)
    ]
    members.take(ProbePassed("a", 1))
    assert state(members, "a") is MachineState.READY
    members.take(ProbeMissed("a", 1))
    assert state(members, "a") is MachineState.SUSPECT
    members.take(ProbePassed("a", 1))
    assert state(members, "a") is MachineState.READY
    # Only misses in a row count.
    members.take(ProbeMissed("a", 1))
    assert state(members, "a") is MachineState.SUSPECT
    members.take(ProbeMissed("a", 1))
    assert state(members, "a") is MachineState.GONE
    # It is back; but what was sent there was given up.
    assert members.take(ProbePassed("a", 1)) == []
    members.take(announced("a", 2))
    assert state(members, "a") is MachineState.JOINING


def test_a_broken_connection_counts_as_no_missed_probe():
    members = Members()
    members.take(announced("a"))
    members.take(ProbePassed("a", 1))
    for _ in range(9):
        members.take(ContactLost("a", 1))
    assert state(members, "a") is MachineState.SUSPECT
    members.take(ProbePassed("a", 1))
    assert state(members, "a") is MachineState.READY


def test_old_news_changes_nothing():
    members = Members()
    members.take(announced("a", 3))
    members.take(ProbePassed("a", 3))
    for event in (*(kind("a", 2) for kind in NEWS), announced("a", 2), ProbePassed("z", 1)):
        assert members.take(event) == []
    assert state(members, "a") is MachineState.READY
    changed = members.take(announced("a", 4))
    assert [(m.view.facts.incarnation, m.state.value, before.value) for m, before in changed] == [
        (3, "gone", "ready"), (4, "joining", "gone"),
    ]  # fmt: skip


def test_new_facts_of_the_same_life_are_taken_in():
    members = Members()
    members.take(announced("a", models=frozenset({"gcn"})))
    members.take(ProbePassed("a", 1))
    members.take(announced("a", models=frozenset({"gcn", "gat"}), cores=4))
    member = members.get("a")
    assert member.state is MachineState.READY
    assert member.view.facts.has_model("gat")
    assert member.view.weight == 4


def test_members_need_at_least_one_miss():
    with pytest.raises(ValueError, match="at least 1"):
        Members(0)


def owned(directory, names=NAMES):
    found = {}
    for name in names:
        found.setdefault(directory.owner(name), []).append(name)
    return found


def test_fronts_own_machines_of_nearly_the_same_weight_and_few_change_hands():
    directory = Directory()
    directory.handle(FrontJoined("f"))
    names = [f"m{n:02}" for n in range(48)]
    for name in names:
        assert directory.handle(announced(name)) == [OwnMachine("f", name)]
    moved = directory.handle(FrontJoined("g"))
    assert sorted(map(len, owned(directory, names).values())) == [24, 24]
    assert len(moved) == 2 * 24
    assert all(isinstance(command, DisownMachine) for command in moved[:24])
    assert len(directory.handle(FrontJoined("h"))) == 2 * 16
    assert sorted(map(len, owned(directory, names).values())) == [16, 16, 16]
    # Only those of the front that left find new owners, and nobody is told to disown.
    again = directory.handle(FrontLeft("g"))
    assert len(again) == 16
    assert all(isinstance(command, OwnMachine) for command in again)
    assert directory.handle(MachineDied(names[0], 1))[0].machine == names[0]


def test_a_machine_that_starts_anew_is_told_anew():
    directory = Directory()
    directory.handle(FrontJoined("f"))
    directory.handle(announced("a"))
    assert directory.handle(ProbePassed("a", 1)) == []
    assert directory.handle(announced("a", 2)) == [OwnMachine("f", "a")]


EVENTS = st.one_of(
    st.builds(FrontJoined, st.sampled_from(FRONTS)),
    st.builds(FrontLeft, st.sampled_from(FRONTS)),
    st.builds(
        lambda name, incarnation, cores: announced(name, incarnation, cores=cores),
        st.sampled_from(NAMES), st.integers(1, 3), st.integers(1, 4),
    ),
    *(st.builds(kind, st.sampled_from(NAMES), st.integers(1, 3)) for kind in NEWS),
)  # fmt: skip


@given(st.lists(EVENTS, max_size=40))
@settings(max_examples=200)
def test_every_machine_has_one_owner_whatever_happens(events):
    directory, fronts, told = Directory(), set(), {}
    for event in events:
        if isinstance(event, FrontJoined):
            fronts.add(event.front)
        elif isinstance(event, FrontLeft):
            fronts.discard(event.front)
            told = {name: front for name, front in told.items() if front != event.front}
        for command in directory.handle(event):
            assert command.front in fronts
            if isinstance(command, OwnMachine):
                # Whoever had it before was told, unless that front has left.
                assert told.get(command.machine) in (None, command.front)
                told[command.machine] = command.front
            else:
                assert told.pop(command.machine) == command.front
        here = {m.name for m in directory.members if m.state is not MachineState.GONE}
        if fronts:
            assert told == {name: directory.owner(name) for name in here}
            assert set(told.values()) <= fronts
            weights = dict.fromkeys(fronts, 0.0)
            for name, front in told.items():
                weights[front] += directory.members.get(name).view.weight
            heaviest = max((directory.members.get(n).view.weight for n in told), default=0)
            assert max(weights.values()) - min(weights.values()) <= 2 * heaviest
        else:
            assert all(directory.owner(name) is None for name in NAMES)
