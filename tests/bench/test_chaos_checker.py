"""The checker of chaos runs refuses a record with one fault of each kind, and takes a good one."""

import subprocess
import sys

import numpy as np
import pytest

from bench.chaos import checker
from bench.chaos.checker import S, check
from bench.chaos.growth import GROWTH
from bench.kit.result import ROOT
from tests.bench.chaos_record import EXPECTED, MODEL, Written


@pytest.fixture
def record(tmp_path):
    return Written(tmp_path)


def no_outcome(record):
    record.ended.remove(record.end_of("refused"))
    return ["requests without an outcome"]


def answered_twice(record):
    record.ended.append(record.end_of("plain") | {"uid": "another"})
    return ["requests answered twice"]


def answered_unasked(record):
    record.ended.append(record.end_of("plain") | {"id": "not asked", "uid": "another"})
    return ["answers that nobody asked for"]


def one_uid_for_two(record):
    record.end_of("newer")["uid"] = "u-plain"
    return ["uids of two answers"]


def other_numbers(record):
    record.answers["other"] = EXPECTED[f"{MODEL}/1/0"] * 1.001
    record.end_of("plain")["answer"] = "other"
    return ["wrong answers"]


def not_a_number(record):
    record.answers["other"] = np.full((3, 2), np.nan, np.float32)
    record.end_of("plain")["answer"] = "other"
    return ["wrong answers"]


def answer_of_another_case(record):
    record.end_of("plain")["answer"] = f"{MODEL}/2/1"
    return ["wrong answers"]


def answer_of_another_version(record):
    record.end_of("plain")["version"] = "2"
    return ["wrong answers"]


def version_that_never_was(record):
    record.end_of("plain")["version"] = "3"
    return ["wrong answers"]


def version_that_was_not_asked(record):
    record.asked["plain"]["version"] = "2"
    return ["wrong answers"]


def answer_of_another_model(record):
    record.end_of("plain")["model"] = "gat"
    return ["wrong answers"]


def answer_that_is_not_kept(record):
    record.end_of("plain")["answer"] = "nowhere"
    return ["wrong answers"]


def row_too_few(record):
    record.answers["less"] = EXPECTED[f"{MODEL}/1/0"][1:]
    record.end_of("plain")["answer"] = "less"
    return ["wrong answers"]


def old_graph(record):
    record.answers["some nodes"] = EXPECTED[f"{MODEL}/1/held/1"][[1, 3]]
    record.end_of("nodes")["graph_version"] = 1
    return ["answers from a graph older than a change before the request"]


def invalid_taken(record):
    record.end_of("wrong").update(status="OK", answer=f"{MODEL}/1/0")
    record.change_row("wrong", status="OK")
    return ["statuses that are not documented"]


def good_model_internal(record):
    record.end_of("refused")["status"] = "INTERNAL"
    record.change_row("refused", status="INTERNAL")
    return ["statuses that are not documented"]


def cancelled_by_nobody(record):
    record.end_of("away")["by_client"] = False
    return ["statuses that are not documented"]


def deadline_of_nobody(record):
    record.end_of("refused")["status"] = "DEADLINE_EXCEEDED"
    record.change_row("refused", status="DEADLINE_EXCEEDED", reason="deadline")
    return ["statuses that are not documented"]


def stream_that_ends_early(record):
    record.end_of("refused")["status"] = "STREAM_OK"
    record.change_row("refused", status="OK")
    return ["statuses that are not documented"]


def region_refused_without_restart(record):
    record.asked["wrong"].update(kind="region", registered=65 * S)
    return ["statuses that are not documented"]


def unavailable_without_cause(record):
    record.end_of("refused")["status"] = "UNAVAILABLE"
    record.rows.pop(record.row_of("refused"))
    record.end["calls"] -= 1
    return ["UNAVAILABLE without a documented reason"]


def quarantined_though_good(record):
    record.end_of("refused")["status"] = "UNAVAILABLE"
    record.change_row("refused", status="UNAVAILABLE", reason="quarantined")
    return ["UNAVAILABLE without a documented reason"]


def answer_without_row(record):
    record.rows.pop(record.row_of("plain"))
    record.end["calls"] -= 1
    return ["answers without a row"]


def row_lost_long_before_the_kill(record):
    record.rows.pop(record.row_of("first"))
    return ["answers without a row"]


def two_rows(record):
    record.rows.append((2, "another", "plain", "OK", "", 0, S // 10))
    record.end["calls"] += 1
    return ["requests with two rows"]


def two_rows_with_one_uid(record):
    record.rows.append((2, "u-plain", "", "OK", "", 0, S // 10))
    record.end["calls"] += 1
    return ["uids of two rows"]


def other_status_in_row(record):
    record.change_row("plain", status="INVALID_ARGUMENT")
    return ["other status in the report than at the client"]


def gave_up_long_after_the_answer(record):
    record.add("late", 80, kind="deadline", status="DEADLINE_EXCEEDED", limit_s=0.2)
    record.end["calls"] += 1
    record.change_row("late", status="OK")
    return ["other status in the report than at the client"]


def gave_up_without_a_limit(record):
    record.end_of("away")["status"] = "CANCELLED"
    record.change_row("away", status="OK")
    return ["other status in the report than at the client"]


def plain_requests_end_otherwise(record):
    for number in range(1000):
        status = "OK" if number % 100 else "INTERNAL"
        record.add(f"{number}", 80, status=status, answer=f"{MODEL}/1/0")
    record.end["calls"] += 1000
    return [
        "statuses that are not documented",
        "plain requests answered, or refused as documented",
    ]


def nothing_done_for_long(record):
    record.faults = [one for one in record.faults if not 70 * S < one["at"] < 80 * S]
    return ["share of seconds in which something was done"]


def row_lost_a_second_before_the_kill(record):
    record.add("late", 48.8, answer=f"{MODEL}/1/0", run=None)
    return ["age of the oldest row lost at a kill, s"]


def message_without_row(record):
    record.end["calls"] += 1
    return ["messages without a row, and rows without a message"]


def main_process_died(record):
    record.lives[0]["how"] = "died"
    return ["ends that nobody asked for"]


def exit_code(record):
    record.lives[1]["code"] = 70
    return ["stops with another exit code than 0"]


def held(name):
    def plant(record):
        record.end[name] = 1
        return [name.replace("_", " ")]

    plant.__name__ = f"held_{name.replace(' ', '_')}"
    return plant


def lane_down(record):
    record.end["lanes_up"] = 1
    return ["lanes down at the end"]


def journal_differs(record):
    record.end["journals"]["1-scheduler.journal"] = "decides otherwise"
    return ["journals that replay otherwise"]


def traceback(record):
    record.end["tracebacks"] = ["server-1.log:3"]
    return ["tracebacks in the log"]


def ready_though_deaf(record):
    for one in record.samples[10:30]:
        one["port_answers"] = False
    return ["ready though the port does not answer, s"]


def growth(name, step):
    def plant(record):
        for number, one in enumerate(record.samples):
            role, _, what = name.partition("_")
            holders = one.get(f"{role}s", {"": one})
            what = what if f"{role}s" in one else name
            for holder in holders.values():
                holder[what] += step * number
        return [f"growth of {name} per 10,000 calls"]

    plant.__name__ = f"growth_of_{name}"
    return plant


def seen_by_a_fault(record):
    record.faults.append(record.fault("certificate renewed", 80, 90, "violated: the old is shown"))
    return ["faults that saw what must not be"]


def expired_by_the_right_clock(record):
    record.asked["wrong"].update(kind="expiring")
    record.end_of("wrong").update(status="UNAUTHENTICATED")
    record.change_row("wrong", status="UNAUTHENTICATED")
    record.faults.append(record.fault("clock backwards", 73, 75))
    return ["statuses that are not documented"]


def lane_down_for_long(record):
    for one in record.samples[5:25]:
        one["gnnserve_lanes_up"] = 1.0
    return ["longest time with a lane down, s"]


def slow_stop(record):
    record.lives[1]["took"] = 36 * S
    return ["longest stop, s"]


def late_beside_floods(record):
    turns(record, late=lambda number: number % 5 == 0)
    return ["share in time beside a flood as a part of that without"]


def refused_beside_floods(record):
    turns(record, status=lambda number: "RESOURCE_EXHAUSTED" if number % 5 == 0 else "OK")
    return ["share in time beside a flood as a part of that without"]


def turns(record, late=lambda number: False, status=lambda number: "OK", tenant=1):
    """Have 600 requests in a turn without a flood and 600 in one beside it."""
    for at, flood in ((80, False), (90, True)):
        record.turns.append({"flood": flood, "at": at * S, "end": (at + 5) * S})
        for number in range(600):
            is_late = flood and late(number)
            word = status(number) if flood else "OK"
            record.add(f"{at} {number}", at + 1, status=word, tenant=tenant, late=is_late,
                       answer=f"{MODEL}/1/0")  # fmt: skip
            record.end["calls"] += 1


def long_wait(record):
    record.end_of("nodes")["end"] += 11 * S
    return ["longest wait of a plain request, s"]


PLANTED = [
    no_outcome, answered_twice, answered_unasked, one_uid_for_two, other_numbers, not_a_number,
    answer_of_another_case, answer_of_another_version, version_that_never_was,
    version_that_was_not_asked, answer_of_another_model, answer_that_is_not_kept, row_too_few,
    old_graph, invalid_taken, good_model_internal, cancelled_by_nobody, deadline_of_nobody,
    stream_that_ends_early, region_refused_without_restart, unavailable_without_cause,
    quarantined_though_good, answer_without_row, row_lost_long_before_the_kill, two_rows,
    two_rows_with_one_uid, other_status_in_row, gave_up_long_after_the_answer,
    gave_up_without_a_limit, plain_requests_end_otherwise, nothing_done_for_long,
    row_lost_a_second_before_the_kill, message_without_row, main_process_died, exit_code,
    *map(held, checker.NOTHING_AT_THE_END), lane_down, journal_differs, traceback,
    ready_though_deaf, *(growth(name, most // 5 or 1) for name, most in GROWTH.items()),
    seen_by_a_fault, expired_by_the_right_clock, lane_down_for_long, slow_stop,
    late_beside_floods, refused_beside_floods, long_wait,
]  # fmt: skip


def test_a_good_record_holds(record):
    assert record.refused() == []


@pytest.mark.parametrize("plant", PLANTED, ids=lambda plant: plant.__name__)
def test_a_planted_fault_is_found_and_nothing_else(record, plant):
    wanted = plant(record)
    assert record.refused() == wanted


def test_rows_of_the_last_half_second_before_a_kill_may_be_lost(record):
    record.add("late", 49.5, answer=f"{MODEL}/1/0", run=None)
    assert record.refused() == []


def test_an_answer_may_be_cut_off_by_a_kill_after_its_row(record):
    record.add("late", 49.95, status="UNAVAILABLE", run=1)
    record.change_row("late", status="INVALID_ARGUMENT", reason="invalid_input")
    assert record.refused() == []


def test_a_region_is_unknown_to_a_server_that_is_not_seen_ready_yet(record):
    record.add("late", 55, kind="region", status="NOT_FOUND", run=None)
    record.asked["late"]["registered"] = 40 * S
    assert record.refused() == []


def test_lost_rows_that_are_told_count(record):
    record.faults.append(record.fault("disk full", 69, 70))
    record.rows.pop(record.row_of("plain"))
    record.lost[2] = 1
    assert record.refused() == []


def test_an_answer_may_leave_as_its_clients_limit_passes(record):
    record.add("late", 80, kind="deadline", status="DEADLINE_EXCEEDED", limit_s=0.06)
    record.end["calls"] += 1
    record.change_row("late", status="OK")
    assert record.refused() == []


def test_a_pause_is_no_time_in_which_nothing_was_done(record):
    nothing_done_for_long(record)
    record.pauses = [{"at": 70 * S, "end": 81 * S}]
    assert record.refused() == []


def test_nothing_is_done_while_the_machine_stands_still(record):
    nothing_done_for_long(record)
    record.stills = [{"at": 70 * S, "end": 81 * S}]
    assert record.refused() == []


@pytest.mark.parametrize(
    ("begin", "end", "refused"),
    [(81, 84, []), (81, 82, ["statuses that are not documented"])],
    ids=["long enough", "too short"],
)
def test_a_limit_may_pass_while_the_machine_stands_still(record, begin, end, refused):
    record.add("late", 80, status="DEADLINE_EXCEEDED", reason="deadline", limit_s=5.0)
    record.end_of("late")["end"] = 86 * S
    record.end["calls"] += 1
    record.stills = [{"at": begin * S, "end": end * S}]
    assert record.refused() == refused


def test_the_servers_own_calls_have_no_rows(record):
    record.end["calls"] += 15
    assert record.refused() == ["messages without a row, and rows without a message"]
    (record.folder / "report.db").unlink()
    record.end["own calls"] = 15
    assert record.refused() == []


def test_a_token_expires_where_the_clock_goes_forwards(record):
    expired_by_the_right_clock(record)
    record.faults[-1]["name"] = "clock forwards"
    assert record.refused() == []


def test_the_tenant_that_floods_is_promised_nothing(record):
    turns(record, late=lambda number: True, tenant=0)
    assert record.refused() == []


def test_a_little_is_late_beside_a_flood(record):
    turns(record, late=lambda number: number % 20 == 0)
    assert record.refused() == []


def test_shares_beside_floods_are_not_judged_on_a_shared_machine(record):
    turns(record, late=lambda number: True)
    record.end["alone"] = False
    assert record.refused() == []


def test_a_run_without_a_journal_is_not_judged_by_one(record):
    record.end["journals"] = {}
    assert record.refused() == []


def test_what_is_held_for_a_moment_is_no_leak(record):
    for one in record.samples[::2]:
        one["rss_bytes"] += one["calls"] * 1000
    assert record.refused() == []


def test_descriptors_of_lanes_that_were_down_at_first_are_no_leak(record):
    for one in record.samples[8:20]:
        one["fds"] -= 12
        one["gnnserve_lanes_up"] = 1.0
    assert record.refused() == []


def test_descriptors_of_what_calibrates_for_a_while_are_no_leak(record):
    for one in record.samples[24:]:
        if one["at"] % (2 * S):
            one["fds"] += 12
            one["processes"] += 1
    assert record.refused() == []


def test_growth_that_is_less_than_its_error_is_not_judged(record):
    for number, one in enumerate(record.samples):
        one["rss_bytes"] += (number // 5 % 2) * 10**8 + number * 10**5
    record.write()
    (found,) = [one for one in check(record.folder) if "rss_bytes" in one.name][:1]
    assert found.holds
    assert not found.judged
    assert found.found.endswith("not judged: too inexact")


def test_what_a_fault_takes_for_the_first_time_is_no_leak(record):
    record.samples = [
        one | {"at": n * S // 2, "calls": 2000.0 * n} for n, one in enumerate(record.samples, 120)
    ]
    record.faults += [record.fault("resets", 62, 63), record.fault("garbage", 69, 70)]
    for one in record.samples:
        one["rss_bytes"] += 10**8 if one["at"] >= 70 * S else 0
    assert record.refused() == []
    record.faults.pop()
    (record.folder / "report.db").unlink()
    assert record.refused() == ["growth of rss_bytes per 10,000 calls"]


def test_what_waits_while_no_lane_can_be_started_waits_so_much_longer(record):
    long_wait(record)
    lane_down_for_long(record)
    record.faults += [record.fault("no threads", 68, 73), record.fault("server frozen", 74, 76)]
    assert record.refused() == []
    record.faults[-2:] = [record.fault("lane killed", 68, 73)]
    (record.folder / "report.db").unlink()
    assert record.refused() == [
        "longest wait of a plain request, s", "longest time with a lane down, s"
    ]  # fmt: skip


def test_waits_are_not_judged_on_a_shared_machine(record):
    long_wait(record)
    record.end["alone"] = False
    assert record.refused() == []


def test_the_command_prints_what_does_not_hold(record):
    other_numbers(record)
    record.write()
    command = [sys.executable, "-m", checker.__name__, str(record.folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 1
    assert "FAIL wrong answers: 1: ['plain']" in done.stdout
