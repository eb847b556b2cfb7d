"""A report on the databases of several servers: the same as on one that has all of their rows."""

import csv
import io
import json

import msgspec
import pytest

from serve.errors import ConfigError
from serve.obs.cli_report import run_report, write_csv
from serve.obs.databases import by_machine, of_machine
from serve.obs.html import render_html
from serve.obs.report import load_report, read_summary, report_of
from serve.obs.selection import Selection
from tests.obs.builders import MS, RUN, START_UNIX_NS, late, record, traffic
from tests.obs.test_report_rows import store_all


@pytest.fixture
def folders(tmp_path):
    """Three servers' databases by machine; one has had no request."""
    rows = {"a": traffic(300, seed=1, load=0.9), "b": traffic(200, seed=2, load=0.3), "c": []}
    paths = []
    for name, mine in rows.items():
        (tmp_path / name).mkdir()
        paths.append(tmp_path / name / "report.db")
        store_all(paths[-1], mine)
    return paths, rows


def leaves(name, value):
    """Return the numbers and texts of a report's part, by their places."""
    if isinstance(value, dict):
        return {k: v for key, one in value.items() for k, v in leaves(f"{name}.{key}", one).items()}
    return {name: value}


def report(paths, chosen=None):
    return report_of(*read_summary(by_machine(paths), chosen or Selection()))


@pytest.mark.parametrize("chosen", [Selection(), Selection(model="gat"), Selection(cause="queue")])
def test_totals_are_those_of_one_database_with_all_rows(tmp_path, folders, chosen):
    paths, rows = folders
    together = [row for mine in rows.values() for row in mine]
    store_all(tmp_path / "all.db", together)
    found, whole = report(paths, chosen), load_report(tmp_path / "all.db", chosen)
    assert whole.requests > 0
    apart = {"by_machine", "memory", "worst", "attainment_interval"}
    for field in set(whole.__struct_fields__) - apart:
        mine, theirs = (
            leaves(field, msgspec.to_builtins(getattr(one, field))) for one in (found, whole)
        )
        assert mine == pytest.approx(theirs), field
    assert [one.latency_over_qt for one in found.worst] == [
        one.latency_over_qt for one in whole.worst
    ]
    assert whole.by_machine == {}
    assert {name: one.requests for name, one in found.by_machine.items()} == {
        name: report([path], chosen).requests
        for name, path in zip(rows, paths, strict=True)
    }  # fmt: skip


def test_memory_and_lanes_are_those_of_one_server_each(folders):
    paths, rows = folders
    alone = [report([path]).memory for path in paths]
    found = report(paths).memory
    assert found.peak_bytes == max(one.peak_bytes for one in alone)
    assert found.peak_measured_bytes == max(one.peak_measured_bytes for one in alone)
    assert found.measured == sum(one.measured for one in alone)
    summary, runs = read_summary(by_machine(paths), Selection())
    path = dict(zip(rows, paths, strict=True))[summary.window_machine]
    own, _ = read_summary({"": path}, Selection())
    assert summary.window == own.window
    assert summary.shown["latency_ns"].tolist() == own.shown["latency_ns"].tolist()
    assert len(runs) == 3


def test_group_mates_are_of_the_same_server(tmp_path):
    paths = [tmp_path / "a.db", tmp_path / "b.db"]
    # Both are of run 1 and group 1 of their servers.
    store_all(paths[0], [late("late"), record("mate")])
    store_all(paths[1], [record("other")])
    (worst,) = report(paths).worst
    assert (worst.machine, worst.group_mates) == ("a", ["mate"])


def test_screen_page_and_json_tell_the_machines(folders, capsys):
    paths, _ = folders
    run_report(*paths)
    screen = capsys.readouterr().out
    assert "By machine" in screen
    assert "The worst machine is a: " in screen
    assert "3 machines" in screen
    summary, runs = read_summary(by_machine(paths), Selection())
    page = render_html(summary, runs, report_of(summary, runs))
    assert "By machine" in page
    assert "late answers, on a. Colours" in page
    assert "<b>3 machines</b>" in page
    run_report(*paths, machine="b", as_json=True)
    assert json.loads(capsys.readouterr().out)["requests"] == 200


def test_csv_names_the_machine_and_is_in_order_of_arrival(tmp_path, capsys):
    paths = [tmp_path / "a.db", tmp_path / "b.db"]
    for path, offsets in zip(paths, ((0, 2), (1, 3)), strict=True):
        rows = [record(f"r{one}", arrived_unix_ns=START_UNIX_NS + one * MS) for one in offsets]
        store_all(path, rows)
    run_report(*paths, csv="-")
    found = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert [(row["machine"], row["request_uid"]) for row in found] == [
        ("a", "r0"), ("b", "r1"), ("a", "r2"), ("b", "r3"),
    ]  # fmt: skip
    with pytest.raises(ConfigError, match="more than 3 rows"):
        write_csv(by_machine(paths), Selection(), tmp_path / "three.csv", 3)


def test_the_largest_budget_stands_for_all(tmp_path, monkeypatch):
    paths = [tmp_path / "a.db", tmp_path / "b.db"]
    for path, budget, start in zip(paths, (2**31, 2**30), (1, 2), strict=True):
        run = msgspec.structs.replace(RUN, budget_bytes=budget, started_unix_ns=start)
        monkeypatch.setattr("tests.obs.test_report_rows.RUN", run)
        store_all(path, [record()])
    assert report(paths).memory.budget_bytes == 2**31


@pytest.mark.parametrize(
    ("paths", "names"),
    [
        (["x.db"], [""]),
        (["one.db", "two.db"], ["one", "two"]),
        (["one/report.db", "two/report.db"], ["one", "two"]),
        (["m/one/server/r.db", "m/two/server/r.db"], ["one", "two"]),
        (["m/one/r.db", "m/two/x/r.db"], ["one", "two/x"]),
    ],
)
def test_machines_have_the_names_that_tell_their_files_apart(tmp_path, paths, names):
    assert list(by_machine([tmp_path / path for path in paths])) == names


@pytest.mark.parametrize("paths", [["r.db", "r.sqlite"], ["r.db", "r/r.db"]])
def test_files_that_nothing_but_their_paths_tell_apart_have_those(tmp_path, paths):
    whole = [tmp_path / path for path in paths]
    assert list(by_machine(whole)) == [str(path) for path in whole]


def test_a_database_twice_and_an_unknown_machine_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="given twice"):
        by_machine([tmp_path / "a.db", tmp_path / "b.db", tmp_path / "x" / ".." / "a.db"])
    found = by_machine([tmp_path / "a.db", tmp_path / "b.db"])
    with pytest.raises(ConfigError, match="machine 'z': not among the databases; known: a, b"):
        of_machine(found, "z")
    assert of_machine(found, "") == found
