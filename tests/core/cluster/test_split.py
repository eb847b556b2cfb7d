"""Which parts of a request are sent to where its nodes live."""

from hypothesis import given
from hypothesis import strategies as st

from serve.core.cluster.split import MOST_SENT, split_by_home
from serve.core.cluster.views import MachineFacts, MachineView, RoutedRequest

REQUEST = RoutedRequest(1, "gcn:1", graph="papers")


def view(name, part, count=0, **facts):
    found = MachineView(MachineFacts(name, part=part, **facts))
    found.told(count, 0)
    return found


def sent(counts, others, here=0):
    """Return the name of the machine of each part that is sent, and whether it is passed on."""
    found = split_by_home(counts, here, REQUEST, others, 0)
    return {part: there.facts.name for part, there in found.sent.items()}, found.whole


def test_each_part_goes_where_it_lives():
    others = [view("b", 1), view("c", 2), view("none", None)]
    assert sent({0: 5, 1: 3, 2: 1}, others) == ({1: "b", 2: "c"}, False)
    assert sent({0: 5}, others) == ({}, False)
    assert sent({}, others) == ({}, False)


def test_what_nobody_can_take_stays():
    others = [
        view("b", 1, models=frozenset({"gcn:2"})),
        view("c", 2, graphs=frozenset({"other"})),
        view("d", 3),
    ]
    assert sent({0: 1, 1: 1, 2: 1, 3: 1, 4: 1}, others) == ({3: "d"}, False)
    # The nodes of part 1 stay, so there is something here.
    assert sent({1: 1, 3: 1}, others) == ({3: "d"}, False)


def test_of_replicas_the_one_with_less_to_do_is_sent_the_part():
    others = [view("busy", 1, count=9), view("idle", 1)]
    assert sent({0: 1, 1: 1}, others) == ({1: "idle"}, False)


def test_where_nothing_is_here_the_smallest_stays_and_a_single_part_goes_as_a_whole():
    others = [view("b", 1), view("c", 2)]
    assert sent({1: 2, 2: 3}, others) == ({2: "c"}, False)
    assert sent({2: 3}, others) == ({2: "c"}, True)
    assert sent({3: 3}, others) == ({}, False)


@given(st.dictionaries(st.integers(0, 40), st.integers(1, 9)), st.sets(st.integers(0, 40)))
def test_every_node_is_answered_once_and_few_parts_are_sent(counts, held):
    others = [view(f"of {part}", part) for part in held]
    found = split_by_home(counts, 0, REQUEST, others, 0)
    assert found.sent.keys() <= counts.keys() - {0}
    assert all(there.facts.part == part for part, there in found.sent.items())
    assert len(found.sent) <= MOST_SENT
    stays = counts.keys() - found.sent.keys()
    assert found.whole == (bool(counts) and not stays)
    assert not found.whole or len(found.sent) == 1
