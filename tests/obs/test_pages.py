"""The report on a terminal, as CSV, as JSON and as a page, from empty to large."""

import csv
import io
import json
import re
from xml.etree import ElementTree

import pytest

from serve.errors import ConfigError
from serve.obs.cli_report import run_report
from serve.obs.frame import DTYPES
from serve.obs.html import render_html
from serve.obs.render import render_report
from serve.obs.report import report_of
from serve.obs.store import RecordStore
from serve.obs.sweeps import MAX_RUNS
from serve.obs.thinning import MAX_POINTS
from serve.terminal import Console
from tests.obs.builders import (
    MS,
    RUN,
    START_UNIX_NS,
    build_report,
    late,
    record,
    summary_of,
    traffic,
    unanswered,
)

LANES = "Lanes, waiting requests and reserved memory over time"
MEMORY = "Reserved against measured memory"


def page(rows, runs=(RUN,)):
    summary = summary_of(rows)
    return render_html(summary, runs, report_of(summary, runs))


def pictures(html):
    """Return the page's plots by title; parsing them proves that they are well-formed."""
    trees = [ElementTree.fromstring(svg) for svg in re.findall(r"<svg.*?</svg>", html, re.DOTALL)]
    return {tree.get("aria-label"): tree for tree in trees}


def tips(tree):
    """Return the tooltips of the page, with line ends as the parser leaves them."""
    return [element.get("data-t") for element in tree.iter() if element.get("data-t")]


def of_class(tree, name):
    return [element for element in tree.iter() if name in element.get("class", "").split()]


def terminal(rows):
    out = io.StringIO()
    Console(width=110, file=out).print(render_report(build_report(rows, [RUN]), [RUN]))
    return out.getvalue()


CASES = {
    "nothing": [],
    "one": [record()],
    "only late": [late()],
    "only refused": [unanswered("a", "RESOURCE_EXHAUSTED", "queue_full", latency_ns=1000)],
    "nothing measured": [record(pmc_measured_bytes=None), late(pmc_measured_bytes=None)],
    "no target": [record(qos_target_ns=0)],
    "no time at all": [record(latency_ns=0, run_ns=0, queue_ns=0, answer_ns=0, quet_ns=0)],
    "days apart": [record("a"), record("b", arrived_unix_ns=START_UNIX_NS + 9 * 86400 * 10**9)],
    "extremes": [
        record("a", latency_ns=1, pmc_measured_bytes=1, reserve_bytes=10**13),
        late("b", latency_ns=10**13, pmc_measured_bytes=10**13, reserve_bytes=1),
    ],
}


@pytest.mark.parametrize("rows", CASES.values(), ids=CASES.keys())
def test_every_case_has_a_page_and_a_screen(rows):
    html = page(rows, (RUN,) if rows else ())
    for tree in pictures(html).values():
        for element in tree.iter():
            assert "nan" not in "".join(v for k, v in element.attrib.items() if k != "data-t")
    assert terminal(rows).strip()


def test_the_page_needs_nothing_from_outside():
    html = page(traffic(200))
    assert not re.search(r"https?:|src=|<link|@import|url\(", html)


def test_what_clients_send_cannot_become_markup():
    evil = "<script>alert(1)</script>"
    html = page([late(evil, model=evil, client_id=evil, cause=evil), record("mate")])
    assert evil not in html
    assert html.count("<script>") == 1
    assert "<script>" in terminal([late(model=evil)])
    assert "[bold]x" in terminal([late(model="[bold]x")])


def test_the_histogram_counts_every_answer_once():
    rows = traffic(500)
    tree = pictures(page(rows))["Latency divided by QoS target"]
    counts = [int(re.search(r"([\d,]+) answers", tip)[1].replace(",", "")) for tip in tips(tree)]
    assert sum(counts) == sum(row.status == "OK" for row in rows)


def test_over_time_every_request_and_every_violation_once():
    rows = traffic(500)
    named = {}
    for tip in tips(pictures(page(rows))["Requests and late answers over time"]):
        name, count = re.search(r"UTC\s([a-z ]+): ([\d,]+) of", tip).groups()
        named[name] = named.get(name, 0) + int(count.replace(",", ""))
    assert sum(named.pop(name, 0) for name in ("in time", "late", "without a result")) == 500
    assert sum(named.values()) == sum(row.violated for row in rows)


def test_a_large_report_is_thinned_and_small():
    html = page(traffic(12_000))
    assert len(html) < 2 * 2**20
    shown = pictures(html)
    assert MAX_POINTS / 2 < len(list(shown[MEMORY].iter("circle"))) <= MAX_POINTS
    assert 0 < len(of_class(shown[LANES], "run")) <= MAX_RUNS * 1.2


def test_thinning_keeps_every_run_beyond_its_reservation():
    rows = [record(str(i)) for i in range(MAX_POINTS * 2)]
    rows[777] = record("over", pmc_measured_bytes=111 * 2**20)
    assert len(of_class(pictures(page(rows))[MEMORY], "under")) == 1


def test_the_timeline_shows_the_window_with_most_late_answers():
    burst = START_UNIX_NS + 60_000 * MS
    rows = [record(str(i), arrived_unix_ns=START_UNIX_NS + i * 100 * MS) for i in range(100)]
    rows += [late(f"l{i}", arrived_unix_ns=burst + i) for i in range(3)]
    begin, end = summary_of(rows).window
    assert begin <= burst + 32 * MS < burst + 39 * MS <= end
    assert end - begin < 1000 * MS


def test_group_mates_carry_the_same_mark():
    rows = [record("a", group_id=3), record("b", group_id=3, lane=1), record("c", group_id=4)]
    marks = [run.get("data-g") for run in of_class(pictures(page(rows))[LANES], "run")]
    assert sorted(marks) == ["0.3", "0.3", "0.4"]


def test_reserved_memory_reaches_its_peak_in_the_timeline():
    html = page([record("a"), record("b", lane=1)])
    assert "memory reserved, budget 1 GiB, at most 220 MiB here" in html


def test_the_screen_says_what_matters():
    text = terminal([record("a"), record("b"), record("c"), late("bad", cause="interference")])
    assert "75.00% answered in time" in text
    assert "1 of 4 answers were late" in text
    assert re.search(r"interference\s+1\s+100%", text)
    assert "none of 1 answers was late" in terminal([record()])
    assert "No requests yet, or none that passes the filters" in terminal([])


def test_json_goes_to_standard_output(database, capsys):
    run_report(database, as_json=True)
    assert json.loads(capsys.readouterr().out)["requests"] == 2000


def test_csv_has_every_column_of_every_request(database, tmp_path, capsys):
    run_report(database, csv=tmp_path / "r.csv")
    assert capsys.readouterr().out == ""
    with (tmp_path / "r.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 2000
    assert tuple(rows[0]) == tuple(DTYPES)
    assert int(rows[0]["latency_ns"]) > 0


def test_csv_of_an_empty_database_is_its_head(tmp_path, capsys):
    RecordStore(tmp_path / "r.db", RUN).close()
    run_report(tmp_path / "r.db", csv="-")
    assert capsys.readouterr().out.strip() == ",".join(DTYPES)


@pytest.mark.parametrize("form", ["html", "csv"])
def test_a_file_that_cannot_be_written_is_named(database, tmp_path, form):
    with pytest.raises(ConfigError, match="no/file: cannot be written: No such file"):
        run_report(database, **{form: tmp_path / "no" / "file"})


def test_a_missing_database_is_told(tmp_path):
    with pytest.raises(ConfigError, match=r"no\.db: no such report database"):
        run_report(tmp_path / "no.db")
