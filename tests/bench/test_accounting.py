"""Where time went in two runs of one trace, request by request."""

from bench.live.accounting import PARTS, Account, compared, parts_ns, run_over_estimate

MS = 1_000_000


def account(late=False, ratio=1.0, **taken_ms):
    return Account(late, {part: taken_ms.get(part, 0) * MS for part in PARTS}, ratio)


def test_the_parts_are_the_whole_latency():
    row = {
        "queue_ns": 1, "prepare_exposed_ns": 2, "suspended_ns": 3, "start_ns": 4, "run_ns": 5,
        "answer_ns": 6, "latency_ns": 100,
    }  # fmt: skip
    assert sum(parts_ns(row).values()) == 100
    assert parts_ns(row)["return"] == 100 - 21


def test_what_grew_most_counts_for_requests_late_only_with_it():
    pairs = [
        (account(run=2), account(late=True, run=3, start=4)),
        (account(run=2), account(late=True, run=9, start=4)),
        (account(late=True, answer=5), account(answer=1)),
        (account(late=True, run=50), account(late=True, run=90)),
        (account(), None),
    ]
    rows = {row["part"]: row for row in compared(pairs)}
    assert (rows["run"]["grew_most"], rows["start"]["grew_most"]) == (0.5, 0.5)
    assert rows["answer"]["shrank_most"] == 1
    assert (rows["run"]["late_only_with"], rows["run"]["late_only_without"]) == (2, 1)
    assert (rows["start"]["without_ms"], rows["start"]["with_ms"]) == (0, 2)


def test_nothing_answered_is_no_error():
    assert {row["with_ms"] for row in compared([(None, None)])} == {0}
    assert run_over_estimate([None]) == 0
