"""Which server holds which part, as servers come, go, fall silent and are replaced."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from serve.core.cluster.seats import SILENT_NS, START_NS, Seat, SeatAsked, Seats

MACHINES = "abcdef"


def asked(machine, port=1, *, has_log=True, held=None):
    return SeatAsked(machine, f"{machine}:{port}", has_log=has_log, held=held)


def hear(seats, given_seats, now_ns=0):
    """Have servers say that they are ready; return whether each has its seat."""
    return [
        seats.heard(one.number, SeatAsked(one.machine, one.address), ready=True, now_ns=now_ns)
        for one in given_seats
    ]


def full(count, parts):
    seats = Seats(parts)
    taken = [seats.take(asked(machine), count, 0) for machine in MACHINES[:count]]
    assert all(hear(seats, taken))
    return seats, taken


def test_parts_get_as_many_servers_as_each_other_and_the_first_line_orders_changes():
    seats = Seats(2)
    for number, machine in enumerate("abcd"):
        assert len(seats.stores()) == (number if number > 1 else 0)
        assert seats.take(asked(machine, has_log=False), 4, 0).number == number
    assert seats.stores() == [("a:1", 0), ("b:1", 1), ("c:1", 0), ("d:1", 1)]
    assert seats.take(asked("e"), 4, 0) == "all 4 servers are there"
    assert seats.take(asked("e"), 5, 0).number == 4


def test_who_asks_again_and_who_runs_already_has_the_seat_that_it_had():
    seats, _ = full(3, 3)
    assert seats.take(asked("b"), 3, 1).number == 1
    # Its server was lost and starts anew, elsewhere on the machine.
    assert seats.take(asked("b", 9), 3, 1).number == 1
    assert seats.stores()[1] == ("b:9", 1)
    # Nothing is known any more, and the servers go on.
    new = Seats(3)
    assert [new.take(asked(m, held=n), 3, 0).number for m, n in (("c", 2), ("a", 0))] == [2, 0]
    assert new.heard(1, asked("b", 9), ready=True, now_ns=0)
    assert new.stores() == seats.stores()


def test_a_server_that_ended_or_is_silent_is_replaced_and_learns_of_it():
    seats, (a, b, c, d) = full(4, 2)
    seats.left(d.address)
    assert seats.take(asked("e"), 4, 0).number == 3
    assert isinstance(seats.take(asked("f"), 4, SILENT_NS - 1), str)
    assert hear(seats, (a, c), SILENT_NS) == [True, True]
    assert seats.stores()[1] == ("b:1", 1)  # until another has its part
    assert seats.take(asked("f"), 4, SILENT_NS).number == 1
    assert hear(seats, (a, b), SILENT_NS) == [True, False]
    assert seats.stores()[:4] == [("a:1", 0), ("f:1", 1), ("c:1", 0), ("e:1", 1)]


def test_a_silent_server_is_asked_until_the_one_in_its_place_is_ready():
    seats, (a, _) = full(2, 2)
    hear(seats, (a,), START_NS)
    assert seats.take(asked("e"), 2, START_NS).number == 1
    assert seats.stores() == [("a:1", 0), ("e:1", 1), ("b:1", 1)]
    seats.left("e:1")  # which was never ready
    assert seats.take(asked("f"), 2, START_NS).number == 1
    assert seats.stores() == [("a:1", 0), ("f:1", 1), ("b:1", 1)]
    assert Seats(2, seats.known()).stores() == seats.stores()
    seats.heard(1, asked("f"), ready=False, now_ns=START_NS)
    assert ("b:1", 1) in seats.stores()
    seats.heard(1, asked("f"), ready=True, now_ns=START_NS)
    assert seats.stores() == [("a:1", 0), ("f:1", 1)]


def test_a_server_that_ended_or_started_anew_on_its_machine_is_asked_no_more():
    seats, (a, _) = full(2, 2)
    hear(seats, (a,), SILENT_NS)
    assert seats.take(asked("b", 9), 2, SILENT_NS).number == 1
    assert seats.stores() == [("a:1", 0), ("b:9", 1)]
    seats, _ = full(1, 1)
    assert seats.take(asked("c"), 1, SILENT_NS).number == 0
    assert seats.stores() == [("c:1", 0), ("a:1", 0)]
    seats.left("a:1")
    assert seats.stores() == [("c:1", 0)]


def test_of_several_free_seats_one_of_the_part_with_fewest_servers_is_given():
    seats, (a, b, _, d) = full(4, 2)
    for lost in (a, b, d):
        seats.left(lost.address)
    assert [seats.take(asked(machine), 4, 0).number for machine in "efa"] == [1, 0, 3]


def test_a_server_that_starts_is_waited_for_longer_than_one_that_was_ready():
    seats = Seats(1)
    first = seats.take(asked("a"), 1, 0)
    told = SeatAsked(first.machine, first.address)
    assert seats.heard(0, told, ready=False, now_ns=SILENT_NS)
    assert isinstance(seats.take(asked("b"), 1, START_NS - 1), str)
    assert seats.take(asked("b"), 1, START_NS).number == 0


def test_who_is_to_order_changes_needs_the_log_of_those_that_were_made():
    seats, (a, b, c, d) = full(4, 2)
    seats.left(a.address)
    told = seats.take(asked("e", has_log=False), 4, 0)
    assert "the server on e is to order changes" in told
    assert "a has it or had it" in told
    seats.left(c.address)
    assert seats.take(asked("e", has_log=False), 4, 0).number == 2
    assert seats.take(asked("f"), 4, 0).number == 0
    # All are lost, and the log may be on a machine that has yet to come back.
    for one in (b, d, Seat(2, "e", "e:1"), Seat(0, "f", "f:1")):
        seats.left(one.address)
    assert seats.take(asked("a", has_log=False), 4, 0).number == 1
    assert seats.take(asked("a", has_log=True), 4, 0).number == 1
    assert seats.take(asked("f", has_log=True), 4, 0).number == 0


def test_a_server_that_takes_another_seat_is_asked_for_the_part_of_that_one():
    seats, (a, _, c, d) = full(4, 2)
    for lost in (a, c, d):
        seats.left(lost.address)
    assert seats.take(asked("d", has_log=False), 4, 0).number == 2
    assert seats.stores() == [("a:1", 0), ("b:1", 1), ("d:1", 0)]


def test_nobody_orders_changes_who_had_the_first_seat_and_takes_another():
    seats, (a, b) = full(2, 2)
    seats.left(a.address)
    seats.left(b.address)
    assert seats.take(asked("a", has_log=False), 2, 0).number == 1
    assert seats.stores() == []
    assert seats.take(asked("b"), 2, 0).number == 0
    assert seats.stores() == [("b:1", 0), ("a:1", 1)]


def test_after_a_loss_of_all_machines_nobody_begins_a_log_beside_the_one_that_was():
    lost, _ = full(2, 2)
    seats = Seats(2, lost.known())
    assert seats.take(asked("d", has_log=False), 2, START_NS).number == 1
    told = seats.take(asked("e", has_log=False), 2, START_NS)
    assert "the log of those that were made is not there" in told


def test_a_log_is_not_forgotten_with_a_server_that_had_it_and_was_not_ready():
    seats, _ = full(1, 1)
    assert seats.take(asked("f"), 1, START_NS).number == 0
    assert isinstance(seats.take(asked("e", has_log=False), 1, 2 * START_NS), str)
    assert seats.take(asked("a"), 1, 2 * START_NS).number == 0


def test_where_all_is_forgotten_no_log_is_begun():
    seats = Seats(1, None)
    assert seats.take(asked("a", has_log=False), 2, 0).number == 1
    assert isinstance(seats.take(asked("b", has_log=False), 2, 0), str)
    assert isinstance(Seats(1, seats.known()).take(asked("b", has_log=False), 2, 0), str)
    assert seats.take(asked("b"), 2, 0).number == 0


def test_where_nobody_was_ready_a_log_is_begun():
    seats = Seats(1)
    seats.take(asked("a"), 1, 0)
    assert seats.take(asked("b", has_log=False), 1, START_NS).number == 0


def test_seats_that_take_the_place_of_others_know_who_had_them():
    seats, (a, b) = full(2, 2)
    found = Seats(2, seats.known(), now_ns=5)
    assert found.stores() == seats.stores()
    assert isinstance(found.take(asked("c"), 2, START_NS), str)
    hear(found, (a,), START_NS)
    assert found.take(asked("c"), 2, 5 + START_NS).number == 1
    assert hear(found, (a, b), 5 + START_NS) == [True, False]


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["start", "start", "lose", "end", "wait"]), st.sampled_from(MACHINES)
    ),
    max_size=60,
)


@given(st.integers(1, 3), st.integers(0, 3), STEPS)
def test_whatever_happens_nobody_who_lives_loses_its_seat_and_parts_are_even(parts, more, steps):
    count = parts + more
    seats, now_ns, alive, port = Seats(parts), 0, {}, 0
    for step, machine in [*steps, *[("wait", "")], *[("start", one) for one in MACHINES]]:
        server = alive.get(machine)
        if step == "start" and server is None:
            port += 1
            found = seats.take(asked(machine, port), count, now_ns)
            if isinstance(found, Seat):
                assert found.number not in {one.number for one in alive.values()}
                alive[machine] = found
        elif step == "lose":
            alive.pop(machine, None)
        elif step == "end" and server is not None:
            seats.left(alive.pop(machine).address)
        elif step == "wait":
            now_ns += START_NS + SILENT_NS
        first = next((one.address for one in alive.values() if one.number == 0), None)
        assert all(hear(seats, alive.values(), now_ns))
        lines = seats.stores()
        if lines and first is not None:
            assert lines[0] == (first, 0)
    # All machines have asked, and those that were lost are silent.
    assert len(alive) == count
    held = Counter(one.number % parts for one in alive.values())
    assert max(held.values()) - min(held[part] for part in range(parts)) <= 1
    assert sorted(seats.stores()) == sorted(
        (one.address, one.number % parts) for one in alive.values()
    )
