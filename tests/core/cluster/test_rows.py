"""Who is asked for rows of features, and when a request gives up."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from serve.core.cluster.rows import MOST_SILENT_NS, SILENT_NS, RowFetch, Stores, expected_ns

MS = 1_000_000
PATIENCE_NS = 80 * MS


def test_each_part_is_asked_of_one_of_its_stores():
    stores = Stores({"a:1": 1, "b:1": 1, "c:1": 2})
    fetch = RowFetch(stores, (1, 2), 0, PATIENCE_NS)
    assert fetch.asked(1).part == 1
    assert fetch.asked(2).address == "c:1"
    # Another request asks the replica that has less to do.
    other = RowFetch(stores, (1,), 0, PATIENCE_NS)
    assert {fetch.asked(1).address, other.asked(1).address} == {"a:1", "b:1"}
    fetch.answered(1)
    assert not fetch.done
    fetch.answered(2)
    assert fetch.done
    assert fetch.lost is None


def test_replicas_are_asked_in_turn_by_requests_one_after_the_other():
    stores, asked = Stores({"a:1": 1, "b:1": 1}), []
    for _ in range(4):
        fetch = RowFetch(stores, (1,), 0, PATIENCE_NS)
        asked.append(fetch.asked(1).address)
        fetch.answered(1)
    assert asked == ["a:1", "b:1"] * 2


def test_other_stores_take_the_place_of_those_that_are_gone():
    stores = Stores({"a:1": 1, "b:1": 1, "c:1": 2})
    for _ in range(8):
        RowFetch(stores, (1,), 0, PATIENCE_NS).end()
    under_way = RowFetch(stores, (1, 2), 0, PATIENCE_NS)
    left = under_way.asked(2)
    stays, gone = stores.of(1)
    stores.change({"a:1": 1, "new:1": 1, "c:1": 3})
    assert (stays.gone, gone.gone, left.gone) == (False, True, True)
    assert stores.of(1)[0] is stays
    assert [one.address for one in stores.of(1)] == ["a:1", "new:1"]
    assert [one.address for one in stores.of(3)] == ["c:1"]
    # What is under way ends as ever, or with the stores that there are now.
    under_way.answered(1)
    assert under_way.failed(2, "is gone", 0) is None
    # A new store gets no more than those that were there.
    asked = []
    for _ in range(4):
        fetch = RowFetch(stores, (1,), 0, PATIENCE_NS)
        asked.append(fetch.asked(1).address)
        fetch.end()
    assert sorted(asked) == ["a:1", "a:1", "new:1", "new:1"]


def test_a_replica_is_asked_when_a_store_fails_and_the_next_request_avoids_it():
    stores = Stores({"a:1": 1, "b:1": 1})
    fetch = RowFetch(stores, (1,), 0, PATIENCE_NS)
    first = fetch.asked(1)
    then = fetch.failed(1, "is gone", 5 * MS)
    assert then is not first
    assert fetch.asked(1) is then
    fetch.answered(1)
    assert fetch.lost is None
    assert RowFetch(stores, (1,), 6 * MS, PATIENCE_NS).asked(1) is then
    # Later it is one like the others again, and gets what the busier one does not.
    assert RowFetch(stores, (1,), 6 * MS + SILENT_NS, PATIENCE_NS).asked(1) is first


def test_a_store_that_fails_again_and_again_is_tried_ever_less_often():
    stores = Stores({"a:1": 1, "b:1": 1})
    lost, _ = stores.of(1)
    now_ns, tried_ns = 0, []
    while now_ns < 30_000 * MS:
        now_ns += 10 * MS
        fetch = RowFetch(stores, (1,), now_ns, PATIENCE_NS)
        if fetch.asked(1) is lost:
            tried_ns.append(now_ns)
            fetch.failed(1, "is gone", now_ns)
        fetch.answered(1)
    waits_ns = [after - before for before, after in pairwise(tried_ns)]
    assert waits_ns[0] <= SILENT_NS + 20 * MS
    assert max(waits_ns) <= MOST_SILENT_NS + 20 * MS
    assert len(tried_ns) < 15
    # It is as before once it has answered.
    lost.heard()
    lost.failed(now_ns)
    assert lost.silent_until_ns == now_ns + SILENT_NS


def test_that_many_requests_see_a_store_fail_counts_once():
    stores = Stores({"a:1": 1, "b:1": 1})
    fetches = [RowFetch(stores, (1,), 0, PATIENCE_NS) for _ in range(20)]
    lost = fetches[0].asked(1)
    for fetch in fetches:
        if fetch.asked(1) is lost:
            fetch.failed(1, "is gone", MS)
    assert lost.silent_until_ns == MS + SILENT_NS


def test_a_lost_part_names_all_of_its_stores():
    fetch = RowFetch(Stores({"a:1": 1, "b:1": 1}), (1,), 0, PATIENCE_NS)
    first = fetch.asked(1).address
    second = fetch.failed(1, "is gone", 0).address
    assert fetch.failed(1, "did not answer", 0) is None
    assert fetch.done
    assert fetch.lost.part == 1
    assert fetch.lost.told == f"{first} is gone; {second} did not answer"


def test_a_part_without_a_store_is_lost_at_once():
    fetch = RowFetch(Stores({"a:1": 1}), (1, 7), 0, PATIENCE_NS)
    assert fetch.done
    assert (fetch.lost.part, fetch.lost.told) == (7, "no server is known to hold it")


def test_the_only_store_gets_all_of_the_patience_and_one_of_two_less():
    assert RowFetch(Stores({"a:1": 1}), (1,), 0, PATIENCE_NS).wake_ns == PATIENCE_NS
    fetch = RowFetch(Stores({"a:1": 1, "b:1": 1}), (1,), 0, PATIENCE_NS)
    assert 0 < fetch.wake_ns < PATIENCE_NS
    assert fetch.overdue(fetch.wake_ns - 1) == []
    assert fetch.overdue(fetch.wake_ns) == [1]
    fetch.failed(1, "did not answer", fetch.wake_ns)
    assert fetch.wake_ns == PATIENCE_NS


def test_a_store_that_failed_alone_is_asked_again():
    stores = Stores({"a:1": 1})
    RowFetch(stores, (1,), 0, PATIENCE_NS).failed(1, "is gone", 0)
    assert RowFetch(stores, (1,), 1, PATIENCE_NS).asked(1).address == "a:1"


@given(st.data())
def test_a_fetch_ends_when_nothing_came_for_its_patience_and_leaves_nothing_unanswered(data):
    known = {f"{n}:1": data.draw(st.integers(0, 3)) for n in range(data.draw(st.integers(0, 6)))}
    stores = Stores(known)
    parts = data.draw(st.sets(st.integers(0, 3), max_size=4))
    fetch, now_ns, end_ns = RowFetch(stores, parts, 0, PATIENCE_NS), 0, PATIENCE_NS
    while not fetch.done:
        assert now_ns <= fetch.wake_ns <= end_ns
        part = data.draw(st.sampled_from([p for p in parts if fetch.asked(p) is not None]))
        match data.draw(st.sampled_from(["answer", "more", "failure", "silence"])):
            case "answer":
                fetch.answered(part)
            case "more":
                fetch.progressed(part, now_ns)
                end_ns = now_ns + PATIENCE_NS
                now_ns = min(now_ns + MS, fetch.wake_ns)
            case "failure":
                fetch.failed(part, "failed", now_ns)
            case "silence":
                now_ns = fetch.wake_ns
                for late in fetch.overdue(now_ns):
                    fetch.failed(late, "did not answer", now_ns)
    assert now_ns <= end_ns
    if fetch.lost is None:
        assert all(fetch.asked(part) is None for part in parts)
    fetch.end()
    assert all(store.unanswered == 0 for part in range(4) for store in stores.of(part))


def test_the_network_costs_a_round_and_its_bytes():
    assert expected_ns(0, 0) == 0
    assert expected_ns(1 << 20, 2) > expected_ns(1 << 10, 1) > 0
