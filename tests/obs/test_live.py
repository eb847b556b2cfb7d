"""Buckets of the live page against plain arithmetic over the same requests."""

import math
import random
import sqlite3
import time
from collections import Counter
from contextlib import closing
from functools import partial

import msgspec
import pytest

from serve.errors import UnknownName
from serve.obs.live.story import MOST_BESIDE, requests_between, story_of
from serve.obs.live.tally import MOST_NAMES, OTHERS, ServerState
from serve.obs.live.training import MOST_SHOWN, ShownJob, make_table, read_jobs, write_jobs
from serve.obs.live.view import WINDOWS, Focus, View, cover
from serve.obs.live.writer import KEPT_S, OPEN_S, WIDTHS, BucketWriter
from serve.obs.selection import Selection
from serve.obs.store import RecordStore
from serve.server.training.job_facts import JobStatus, shown_jobs
from tests.obs.builders import MS, RUN, START_UNIX_NS, late, record, traffic, unanswered

START_S = START_UNIX_NS // 10**9 // 300 * 300


def stored(path, rows, end_s=None, state=None):
    """Write rows as a server does, second by second; return a connection."""
    store = RecordStore(path, RUN)
    by_second = {}
    for row in rows:
        ended_s = (row.arrived_unix_ns + row.latency_ns) // 10**9
        by_second.setdefault(ended_s, []).append(row)
    last_s = max(by_second, default=START_S) if end_s is None else end_s
    store._buckets._open_s = 0  # the rows are of a fixed past
    for now_s in range(min(by_second, default=START_S), last_s + 1):
        for row in by_second.get(now_s, ()):
            store.insert(row)
            store.count(row, now_s)
        if state is not None:
            store.tell(state, now_s)
        store.commit(now_s)
    store.close()
    return sqlite3.connect(path)


def moved(row, seconds):
    return msgspec.structs.replace(row, arrived_unix_ns=int((START_S + seconds) * 10**9))


def many(count, span_s, seed=1, tenants=0):
    """Requests spread over a time, some with a tenant."""
    rng = random.Random(seed)
    rows = traffic(count, seed)
    return [
        msgspec.structs.replace(
            moved(row, rng.random() * span_s),
            tenant=f"t{rng.randrange(tenants)}" if tenants else "",
        )
        for row in rows
    ]


def ended_s(row):
    return (row.arrived_unix_ns + row.latency_ns) // 10**9


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("seed", range(3))
def test_every_window_holds_what_ended_in_it(tmp_path, window, seed):
    span_s, width_s = WINDOWS[window]
    rows = many(800, 1.3 * span_s, seed, tenants=3)
    end_s = START_S + int(1.3 * span_s)
    with closing(stored(tmp_path / "r.db", rows, end_s)) as db:
        seen = View(Focus(window)).update(db, end_s)
    assert seen["width_s"] == width_s
    mine = [row for row in rows if seen["begin_s"] <= ended_s(row) < seen["end_s"]]
    answers = [row for row in mine if row.status == "OK"]
    total = seen["total"]
    assert (total.requests, total.answered) == (len(mine), len(answers))
    assert total.late == sum(row.violated for row in answers)
    causes = Counter(row.cause for row in answers if row.violated)
    assert {cause: n for cause, n in seen["causes"].items() if n} == causes
    assert seen["reasons"] == Counter(row.reason for row in mine if row.status != "OK")
    for kind, name in (("models", "model"), ("tenants", "tenant")):
        told = {line.name: (line.requests, line.late) for line in seen[kind]}
        late_by = Counter(getattr(row, name) for row in answers if row.violated)
        asked_by = Counter(getattr(row, name) for row in mine)
        assert told == {key: (n, late_by[key]) for key, n in asked_by.items()}
    latencies = sorted(row.latency_ns / 1e6 for row in answers)
    for share, value in zip((0.5, 0.9, 0.99), total.latency_ms, strict=False):
        rank = latencies[min(len(latencies) - 1, int(share * len(latencies)))]
        below = latencies[max(0, int(share * len(latencies)) - 1)]
        assert 0.97 * below <= value <= 1.03 * rank
    # The points hold the same requests, each once.
    by_point = Counter(ended_s(row) // width_s * width_s for row in mine)
    assert {point.start_s: point.requests for point in seen["points"] if point.requests} == by_point
    starts = [point.start_s for point in seen["points"]]
    assert starts == list(range(seen["begin_s"], seen["end_s"], width_s))


@pytest.mark.parametrize(
    "focus",
    [Focus(model="gcn"), Focus(model="gcn", version="1"), Focus(tenant="t1"), Focus(model="none")],
)
def test_a_focus_leaves_its_own_requests(tmp_path, focus):
    rows = many(300, 200, tenants=3)
    with closing(stored(tmp_path / "r.db", rows, START_S + 250)) as db:
        seen = View(focus).update(db, START_S + 250)
    mine = [
        row
        for row in rows
        if (not focus.model or row.model == focus.model)
        and (not focus.tenant or row.tenant == focus.tenant)
    ]
    assert seen["total"].requests == len(mine)
    assert sum(point.requests for point in seen["points"]) == len(mine)
    assert sum(line.requests for line in seen["models"]) == len(rows)


def test_an_update_is_what_a_new_view_shows(tmp_path):
    """Points that are over are kept from update to update, and none of them changes."""
    rows = many(900, 300)
    for window in ("5m", "1h"):
        path = tmp_path / f"{window}.db"
        store, view = RecordStore(path, RUN), View(Focus(window))
        store._buckets._open_s = 0
        with closing(sqlite3.connect(path)) as db:
            for now_s in range(START_S, START_S + 310):
                for row in rows:
                    if ended_s(row) == now_s:
                        store.count(row, now_s)
                store.tell(ServerState(now_s % 7, 100, 4), now_s)
                store.commit(now_s)
                if now_s % 9 == 0:
                    view._next_tables_s = 0.0
                    seen = view.update(db, now_s)
                    new = View(Focus(window)).update(db, now_s)
                    assert seen["points"] == new["points"]
                    assert seen["total"] == new["total"]
        store.close()


def test_thousands_of_names_are_the_largest_and_the_others(tmp_path):
    rng = random.Random(5)
    names = [int(2000 * rng.random() ** 3) for _ in range(4000)]
    rows = [
        moved(record(str(i), tenant=f"tenant {n}", model=f"m{n % 90}"), rng.random() * 60)
        for i, n in enumerate(names)
    ]
    with closing(stored(tmp_path / "r.db", rows, START_S + 90)) as db:
        seen = View(Focus()).update(db, START_S + 90)
        (most,) = db.execute(
            "SELECT max(n) FROM (SELECT count(*) AS n FROM bucket GROUP BY width_s, start_s)"
        ).fetchone()
    assert most <= 1 + sum(MOST_NAMES.values()) + 2
    for kind in ("models", "tenants"):
        assert sum(line.requests for line in seen[kind]) == len(rows)
        assert OTHERS in {line.name for line in seen[kind]}
    assert len(seen["tenants"]) <= MOST_NAMES["tenant"] * 12


def test_models_that_clients_make_up_are_no_rows(tmp_path):
    rows = [moved(unanswered(str(i), "NOT_FOUND", "", model=f"no {i}"), 1) for i in range(50)]
    with closing(stored(tmp_path / "r.db", rows, START_S + 20)) as db:
        seen = View(Focus()).update(db, START_S + 20)
    assert [(line.name, line.requests) for line in seen["models"]] == [(OTHERS, 50)]
    assert seen["reasons"] == {"not_found": 50}


def test_requests_that_got_no_row_count_as_well(tmp_path):
    rows = [moved(unanswered("f", "RESOURCE_EXHAUSTED", "queue_full", left_out=41), 1)]
    with closing(stored(tmp_path / "r.db", rows, START_S + 20)) as db:
        seen = View(Focus()).update(db, START_S + 20)
    assert (seen["total"].requests, seen["reasons"]) == (42, {"queue_full": 42})


def test_a_restart_goes_on_where_the_last_run_ended(tmp_path):
    path = tmp_path / "r.db"
    now_s = START_S + 40
    first = RecordStore(path, RUN)
    first._buckets._open_s = 0
    first.count(moved(record("a"), 40), now_s)
    first.commit(now_s)
    first.close()
    with closing(sqlite3.connect(path)) as db:
        second = BucketWriter(db, now_s)
        second.add(moved(record("b"), 40), now_s)
        second.add(moved(record("c"), 41), now_s + 1)
        second.write(now_s + 100)
        seen = View(Focus("1h")).update(db, now_s + 100)
        assert seen["total"].requests == 3
        # A clock that goes back takes what lies ahead of it with it.
        BucketWriter(db, now_s - 30)
        assert (
            db.execute("SELECT count(*) FROM bucket WHERE start_s > ?", (now_s,)).fetchone()[0] == 0
        )


@pytest.mark.parametrize("step_s", [86_400, -86_400])
def test_a_clock_that_is_set_and_set_right_again_leaves_the_page_working(tmp_path, step_s):
    state = ServerState(queue=3, reserved_bytes=5, lanes_up=2)
    from_s = 300  # the run has begun by then
    with closing(stored(tmp_path / "r.db", [], START_S + from_s)) as db:
        writer = BucketWriter(db, START_S + from_s)
        for turn, shift_s in enumerate((0, step_s, 0)):
            for second in range(from_s + 10 * turn, from_s + 10 * turn + 10):
                now_s = START_S + second + shift_s
                writer.tell(state, now_s)
                writer.add(moved(record(f"{second}"), second + shift_s), now_s)
                writer.write(now_s)
        seen = View(Focus()).update(db, START_S + from_s + 30)
        points = {point.start_s - START_S: point.requests for point in seen["points"]}
    assert [points[second] for second in range(from_s + 21, from_s + 30)] == [1] * 9
    assert seen["state"] == {"queue": 3, "reserved_bytes": 5, "lanes_up": 2}


def test_a_clock_that_is_set_back_before_the_start_leaves_the_state(tmp_path):
    state = ServerState(queue=3, reserved_bytes=5, lanes_up=2)
    hour_s, from_s = 3600, 300
    with closing(stored(tmp_path / "r.db", [], START_S + from_s)) as db:
        writer = BucketWriter(db, START_S + from_s)
        for second in range(from_s, from_s + 20):
            now_s = START_S + second - hour_s
            writer.tell(state, now_s)
            writer.write(now_s)
        seen = View(Focus()).update(db, START_S + from_s + 20 - hour_s)
    assert seen["state"] == {"queue": 3, "reserved_bytes": 5, "lanes_up": 2}


def test_old_buckets_go(tmp_path):
    span_s = KEPT_S[1] + 600
    rows = [moved(record(str(i)), i * 10) for i in range(span_s // 10)]
    with closing(stored(tmp_path / "r.db", rows, START_S + span_s)) as db:
        oldest = dict(db.execute("SELECT width_s, min(start_s) FROM bucket GROUP BY width_s"))
        until = dict(db.execute("SELECT width_s, until_s FROM bucket_until"))
    assert oldest[1] >= START_S + span_s - OPEN_S - KEPT_S[1] - 10
    assert oldest[60] == START_S
    ended_s = START_S + span_s - 10 - OPEN_S
    assert until == {width_s: ended_s // width_s * width_s for width_s in WIDTHS}


@pytest.mark.parametrize("seed", range(30))
def test_a_cover_has_every_second_once(seed):
    rng = random.Random(seed)
    begin_s = rng.randrange(5_000)
    end_s = begin_s + rng.randrange(4_000)
    until = {width_s: rng.randrange(9_000) // width_s * width_s for width_s in WIDTHS}
    seen = Counter()
    for width_s, from_s, to_s in cover(until, begin_s, end_s, rng.choice(WIDTHS)):
        assert from_s % width_s == to_s % width_s == 0
        assert width_s == 1 or to_s <= until[width_s]
        seen.update(range(from_s, to_s))
    assert seen == Counter(range(begin_s, end_s))


def test_alarms_say_what_is_wrong(tmp_path):
    rows = [moved(late(str(i), cause="queue"), i / 10) for i in range(20)]
    state = ServerState(queue=3, reserved_bytes=RUN.budget_bytes, lanes_up=3)
    with closing(stored(tmp_path / "r.db", rows, START_S + 30, state)) as db:
        changes = "rows_lost = 7, lanes_started = 16, started_unix_ns = ?"
        db.execute(f"UPDATE server SET {changes}", (START_UNIX_NS // 2,))
        alarms = " ".join(View(Focus()).update(db, START_S + 30)["alarms"])
    for said in (
        "100.0% of the answers were late, most often because of queue",
        "3 of 16 lanes can take a task",
        "reserve 100% of the memory budget",
        "3 requests wait, and none was answered",
        "7 rows are missing",
    ):
        assert said in alarms
    with closing(stored(tmp_path / "empty.db", [], START_S + 5)) as db:
        assert View(Focus()).update(db, START_S + 5)["alarms"] == []


def test_requests_of_a_point_and_the_story_of_one(tmp_path):
    rows = [
        moved(record("fine"), 9.99),
        moved(late("bad", group_id=5), 10.0),
        moved(record("mate", group_id=5, lane=1), 10.01),
        moved(unanswered("full", "RESOURCE_EXHAUSTED", "queue_full", latency_ns=1000), 10.2),
        moved(record("before"), 8.0),
    ]
    with closing(stored(tmp_path / "r.db", rows, START_S + 30)) as db:
        count, found = requests_between(db, Selection(), START_S + 10, START_S + 11)
        assert (count, [one.request_uid for one in found[:2]]) == (4, ["full", "bad"])
        assert {one.request_uid for one in found[2:]} == {"fine", "mate"}
        assert requests_between(db, Selection(cause="queue"), START_S, START_S + 60)[0] == 1
        bad = found[1]
        for at in (0, bad.arrived_unix_us):
            told = story_of(db, "bad", at)
            assert told.why.startswith("Late because of queue: it waited")
            assert told.facts.group_mates == ["mate"]
            assert {one.request_uid for one in told.beside} == {"bad", "mate"}
            assert "Without waiting for a lane or memory: 8 ms, in time." in told.remedies
            assert sum(told.facts.stages_ms.values()) == pytest.approx(40)
        assert "the queue was full" in story_of(db, "full").why
        assert story_of(db, "fine").why == "Answered in time."
        with pytest.raises(UnknownName, match="request 'nobody'"):
            story_of(db, "nobody")


def test_a_story_keeps_the_runs_nearest_to_its_own(tmp_path):
    """A request that waited long was behind more runs than a picture shows."""
    waited_s = (MOST_BESIDE + 40) // 10
    rows = [
        moved(record(f"r{i}", quet_ns=0, latency_ns=90 * MS, answer_ns=0), i / 10)
        for i in range(10 * waited_s)
    ]
    waited = {"quet_ns": waited_s * 1000 * MS, "latency_ns": (waited_s * 1000 + 50) * MS}
    with closing(
        stored(
            tmp_path / "r.db", [*rows, moved(late("mine", answer_ns=0, **waited), 0)], START_S + 99
        )
    ) as db:
        told = story_of(db, "mine")
    assert len(told.beside) == MOST_BESIDE
    assert told.left_out == len(rows) + 1 - MOST_BESIDE
    assert told.beside[-1].request_uid == "mine"
    assert told.beside[-2].request_uid == f"r{len(rows) - 1}"


def test_a_hopeless_target_is_called_so(tmp_path):
    rows = [moved(late("x", qos_target_ns=1 * MS, cause="estimate"), 1)]
    with closing(stored(tmp_path / "r.db", rows, START_S + 5)) as db:
        assert any("No order of requests helps" in one for one in story_of(db, "x").remedies)


def day_of(path, count):
    """Add requests to the buckets of a day, ten seconds at once; return a connection."""
    rows, day_s = traffic(500), 86_400
    db = sqlite3.connect(path)
    RecordStore(path, RUN).close()
    writer = BucketWriter(db, START_S)
    added = 0
    for passed_s in range(0, day_s, 10):
        now_s = START_S + passed_s
        while added * day_s < count * (passed_s + 10):
            row = rows[added % len(rows)]
            at = now_s * 10**9 - row.latency_ns
            writer.add(msgspec.structs.replace(row, arrived_unix_ns=at), now_s)
            added += 1
        writer.write(now_s)
    db.commit()
    return db


@pytest.mark.slow
def test_a_view_of_ten_times_the_requests_costs_about_the_same(tmp_path):
    costs, sizes = [], []
    for count in (20_000, 200_000):
        with closing(day_of(tmp_path / f"{count}.db", count)) as db:
            sizes.append(db.execute("SELECT count(*) FROM bucket").fetchone()[0])
            tries = []
            for _ in range(3):
                began_s = time.thread_time()
                seen = View(Focus("1d")).update(db, START_S + 86_400)
                tries.append(time.thread_time() - began_s)
            costs.append(min(tries))
            assert seen["total"].requests == pytest.approx(count, rel=0.01)
    assert sizes[1] < 1.5 * sizes[0]
    assert costs[1] < 4 * costs[0]


def test_training_jobs_stand_as_they_were_told_last(tmp_path):
    path = tmp_path / "r.db"
    job = ShownJob(
        job_id=3, model="gcn", graph="cora", state="running", epochs=200, epochs_done=12,
        loss=0.5, epoch_ns=13 * MS, version=0, message="",
    )  # fmt: skip
    with closing(sqlite3.connect(path)) as db:

        def shown():
            return View(Focus()).update(db, START_S)["jobs"]

        first = RecordStore(path, RUN)
        first.tell_jobs((job,))
        first.commit(START_S)
        assert shown() == [job]
        done = msgspec.structs.replace(job, state="done", epochs_done=200, version=2)
        newer = msgspec.structs.replace(job, job_id=4)
        first.tell_jobs((newer, done))
        first.commit(START_S)
        first.close()
        assert shown() == [newer, done]
        # A server that trains nothing shows nothing of the last one.
        second = RecordStore(path, RUN)
        assert shown() == [newer, done]
        second.tell_jobs(())
        second.commit(START_S)
        assert shown() == []
        second.close()


def test_jobs_that_go_on_are_shown_before_those_that_ended():
    status = partial(
        JobStatus, model="gcn", graph="cora", epochs=9, epochs_done=1, loss=math.nan,
        epoch_ns=1, accuracy=0.0, version=0, message="", reserve_bytes=1,
    )  # fmt: skip
    jobs = [status(number, state="queued" if number in (2, 5) else "done") for number in range(60)]
    shown = shown_jobs(jobs)
    assert [job.job_id for job in shown] == [5, 2, *range(59, 59 - MOST_SHOWN + 2, -1)]
    with closing(sqlite3.connect(":memory:")) as db:
        make_table(db)
        write_jobs(db, shown)
        assert {job.loss for job in read_jobs(db)} == {None}
