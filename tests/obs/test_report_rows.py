"""Reports over filters and random databases: the numbers against plain arithmetic, the commands."""

import csv
import io
import json
import random
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import msgspec
import numpy as np
import pytest

from serve.errors import ConfigError
from serve.obs.cli_report import write_csv
from serve.obs.html import render_html
from serve.obs.report import load_report, read_summary, report_of
from serve.obs.selection import Selection, selection_of
from serve.obs.sketch import EXACT, FINE_GROWTH, Sketch
from serve.obs.store import RecordStore
from serve.quantiles import quantile
from tests.obs.builders import RUN, late, record, traffic

ROOT = Path(__file__).parents[2]


def store_all(path, rows, lost=0):
    store = RecordStore(path, RUN)
    for row in rows:
        store.insert(row)
    store.dropped = lost
    store.close()


def random_rows(seed):
    """Requests with random names, ends and gaps; sometimes none."""
    rng = random.Random(seed)
    names = [f"m{i}" for i in range(rng.choice((1, 3, 12)))]
    return [
        msgspec.structs.replace(
            row,
            model=rng.choice(names),
            version=rng.choice("12"),
            tenant=rng.choice(("", "a", "b")),
            client_id=rng.choice(("", "c")),
            left_out=rng.choice((0, 0, 5)) if row.lane < 0 else 0,
        )
        for row in traffic(rng.choice((0, 1, 2, 50, 400)), seed, load=rng.choice((0.2, 0.9)))
    ]


def random_selection(rng, rows):
    """A selection of some filters, with values that may occur."""
    arrived = sorted(row.arrived_unix_ns for row in rows) or [0]
    chosen = {}
    if rng.random() < 0.5:
        chosen["from_unix_ns"] = rng.choice(arrived)
    if rng.random() < 0.5:
        chosen["until_unix_ns"] = rng.choice(arrived)
    for name, values in (
        ("model", ["m0", "m1"]), ("version", ["1"]), ("tenant", ["a"]), ("client", ["c"]),
        ("cause", ["queue", "interference"]),
    ):  # fmt: skip
        if rng.random() < 0.25:
            chosen[name] = rng.choice(values)
    return Selection(**chosen)


def passes(row, chosen):
    return (
        row.arrived_unix_ns >= chosen.from_unix_ns
        and (not chosen.until_unix_ns or row.arrived_unix_ns < chosen.until_unix_ns)
        and chosen.model in ("", row.model)
        and chosen.version in ("", row.version)
        and chosen.tenant in ("", row.tenant)
        and chosen.client in ("", row.client_id)
        and chosen.cause in ("", row.cause)
    )


@pytest.mark.parametrize("seed", range(40))
def test_a_report_is_plain_arithmetic_over_the_rows(tmp_path, seed):
    rng = random.Random(seed)
    rows = random_rows(seed)
    store_all(tmp_path / "r.db", rows)
    for _ in range(4):
        chosen = random_selection(rng, rows)
        mine = [row for row in rows if passes(row, chosen)]
        answers = [row for row in mine if row.status == "OK"]
        report = load_report(tmp_path / "r.db", chosen)
        assert report.requests == sum(1 + row.left_out for row in mine)
        assert report.answered == len(answers)
        assert report.violations == sum(row.violated for row in answers)
        causes = Counter(row.cause for row in answers if row.violated)
        assert {cause: n for cause, n in report.by_cause.items() if n} == causes
        ends = Counter()
        for row in mine:
            if row.status != "OK":
                ends[row.reason] += 1 + row.left_out
        assert report.rejected == ends
        models = Counter()
        for row in mine:
            models[row.model] += 1 + row.left_out
        assert {name: one.requests for name, one in report.by_model.items()} == models
        ordered = sorted(row.latency_ns / 1e6 for row in answers)
        for share, value in zip(
            (0.5, 0.9, 0.99), msgspec.structs.astuple(report.latency_ms), strict=True
        ):
            assert value == pytest.approx(quantile(ordered, share))
        measured = [row for row in mine if row.lane >= 0 and row.pmc_measured_bytes]
        excess = sorted(row.reserve_bytes / row.pmc_measured_bytes - 1 for row in measured)
        assert report.memory.overestimate_p50 == pytest.approx(quantile(excess, 0.5), abs=1e-9)
        late_ones = [row for row in answers if row.violated]
        worst = max((row.latency_ns / row.qos_target_ns for row in late_ones), default=None)
        assert [one.latency_over_qt for one in report.worst[:1]] == (
            [] if worst is None else [pytest.approx(worst)]
        )


@pytest.mark.parametrize("excess", [0.05, 0.1, 0.4])
def test_overestimates_of_many_runs_are_within_one_percent(excess):
    values = 1 + excess * np.random.default_rng(1).lognormal(0, 0.05, 3 * EXACT)
    sketch = Sketch(FINE_GROWTH)
    sketch.add(values)
    exact = float(np.median(values)) - 1
    assert sketch.quantiles((0.5,))[0] - 1 == pytest.approx(exact, rel=0.01)


def report_command(path, *options):
    command = [sys.executable, "-m", "serve", "report", "--db", str(path), *options]
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)


def test_the_command_takes_every_filter(tmp_path):
    now_ns = time.time_ns()
    rows = [
        record("a", tenant="t", client_id="c", version="2", arrived_unix_ns=now_ns),
        late("b", model="gat", cause="queue", arrived_unix_ns=now_ns - 3600 * 10**9),
        late("c", cause="overload", arrived_unix_ns=now_ns - 7200 * 10**9),
    ]
    store_all(tmp_path / "r.db", rows)
    for options, uids in (
        (("--model", "gat"), ["b"]),
        (("--version", "2"), ["a"]),
        (("--tenant", "t"), ["a"]),
        (("--client", "c"), ["a"]),
        (("--cause", "overload"), ["c"]),
        (("--since", "90m"), ["b", "a"]),
        (("--since", "90m", "--cause", "queue"), ["b"]),
        (("--until", "2020-01-01"), []),
    ):
        done = report_command(tmp_path / "r.db", *options, "--csv", "-")
        assert done.returncode == 0, done.stderr
        found = list(csv.DictReader(io.StringIO(done.stdout)))
        assert [row["request_uid"] for row in found] == uids, options
    wrong = report_command(tmp_path / "r.db", "--since", "soon")
    assert wrong.returncode == 2
    assert "'soon' is not a duration" in wrong.stderr


def test_since_counts_from_now(tmp_path):
    now_ns = time.time_ns()
    ages_s = (10, 100, 1_000, 100_000)
    rows = [record(f"{age}", arrived_unix_ns=now_ns - age * 10**9) for age in ages_s]
    store_all(tmp_path / "r.db", rows)
    for since, count in (("50s", 1), ("5m", 2), ("2h", 3), ("7d", 4)):
        chosen = selection_of({"since": since})
        assert load_report(tmp_path / "r.db", chosen).requests == count


def test_rows_of_csv_may_be_limited(tmp_path, capsys):
    store_all(tmp_path / "r.db", [record(str(i)) for i in range(5)])
    databases = {"": tmp_path / "r.db"}
    write_csv(databases, Selection(), tmp_path / "five.csv", 5)
    assert len((tmp_path / "five.csv").read_text().splitlines()) == 6
    with pytest.raises(ConfigError, match="more than 4 rows: narrow them"):
        write_csv(databases, Selection(), tmp_path / "four.csv", 4)


def test_rows_that_were_lost_are_told_everywhere(tmp_path):
    store_all(tmp_path / "r.db", [record()], lost=1234)
    summary, runs = read_summary({"": tmp_path / "r.db"}, Selection())
    report = report_of(summary, runs)
    page = render_html(summary, runs, report)
    assert '<p class="verdict"><b>1,234 rows are missing here</b>' in page
    done = report_command(tmp_path / "r.db", "--json")
    assert json.loads(done.stdout)["rows_lost"] == 1234
    assert "1,234 rows are missing here" in report_command(tmp_path / "r.db").stdout


def test_csv_has_no_formulas_of_clients(tmp_path):
    tenants = ("=1+1", "+cmd", "-cmd", "@SUM(A1)", "\t=1", "＝1", "plain", "-1.5", "a=b")
    store_all(tmp_path / "r.db", [record(f"r{n}", tenant=one) for n, one in enumerate(tenants)])
    write_csv({"": tmp_path / "r.db"}, Selection(), tmp_path / "rows.csv")
    with (tmp_path / "rows.csv").open(newline="", encoding="utf-8") as file:
        found = {row["request_uid"]: row for row in csv.DictReader(file)}
    written = [found[f"r{n}"]["tenant"] for n in range(len(tenants))]
    assert written == [f"'{one}" for one in tenants[:6]] + ["plain", "-1.5", "a=b"]
    assert {row["run_ns"] for row in found.values()} == {str(record().run_ns)}
