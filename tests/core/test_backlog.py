from serve.core.policies import get_policy
from serve.core.state.backlog import Backlog
from serve.core.state.record import Record
from serve.core.types import Nanos
from tests.builders import MS, task

POLICY = get_policy("sqtf")
NOW = Nanos(0)


def backlog(runs_ms, sealing=False):
    made = Backlog(POLICY, sealing)
    records = []
    for task_id, run_ms in enumerate(runs_ms):
        given = task(task_id, run_ns=run_ms * MS)
        records.append(Record(given, POLICY.key(given), NOW, 1, 0, given.estimate.solo_ns))
        made.add(records[-1])
    return made, records


def ids(records):
    return [record.task.task_id for record in records]


def test_a_short_backlog_is_planned_as_a_whole():
    made, _ = backlog([3, 1, 2])
    assert sorted(ids(made.horizon(3, NOW))) == [0, 1, 2]


def test_a_long_one_gives_what_the_policy_picks_and_the_longest_waiting():
    made, records = backlog([9, 5, 1, 2, 3, 4])
    assert ids(made.horizon(3, NOW)) == [2, 3, 0]
    made.discard(records[0])
    assert ids(made.horizon(3, NOW)) == [2, 3, 1]
    made.discard(records[1])
    assert ids(made.horizon(3, NOW)) == [2, 3, 4]


def test_discarding_twice_is_once():
    made, records = backlog([1])
    made.discard(records[0])
    made.discard(records[0])
    assert len(made) == 0
    assert made.oldest() is None
    assert made.horizon(3, NOW) == []


def test_sealed_batches_are_planned_one_after_the_other():
    made, records = backlog([5, 4], sealing=True)
    assert made.plannable_count == 0
    made.seal()
    late = task(9, run_ns=MS)
    made.add(Record(late, POLICY.key(late), NOW, 1, 0, late.estimate.solo_ns))
    assert made.plannable_count == 2
    assert sorted(ids(made.horizon(8, NOW))) == [0, 1]
    made.seal()
    for record in records:
        made.discard(record)
    assert ids(made.horizon(8, NOW)) == [9]
