"""Files about a run: the page, and the distribution that plotters of HdrHistogram read."""

import re
from html.parser import HTMLParser

import msgspec
import pytest

from loadgen.hdr import distribution_text, write_hdr
from loadgen.measure import Sample, summarise
from loadgen.options import require_writable
from loadgen.page import page, write_page
from serve.errors import ConfigError
from serve.workload import TraceHeader

HEADER = TraceHeader(workload="<gcn>", seed=0, rate_hz=50.0, profile="ramp:0-2")


def samples(count, late=0, failed=0, target_us=2_000):
    return [
        Sample(
            model="g<c>n", index=one, due_ns=one * 20_000_000, lag_ns=0,
            latency_ns=3_000_000 if one < late else 1_000_000 + one,
            status="UNAVAILABLE" if one >= count - failed else "OK",
            message="<script>" if one >= count - failed else "", target_us=target_us,
        )
        for one in range(count)
    ]  # fmt: skip


def summary_of(found):
    return summarise("h:1", HEADER, found, scheduled=len(found), elapsed_s=1.0, cpu_s=0.1)


class Balanced(HTMLParser):
    """Checks that elements nest, and counts them."""

    OPEN = frozenset({"html", "meta", "!doctype"})

    def __init__(self):
        super().__init__()
        self.stack, self.seen = [], []

    def handle_starttag(self, tag, attrs):
        self.seen.append(tag)
        if tag not in self.OPEN:
            self.stack.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.seen.append(tag)

    def handle_endtag(self, tag):
        if tag not in self.OPEN:
            assert self.stack.pop() == tag


@pytest.mark.parametrize(
    ("count", "late", "failed", "target_us"),
    [(300, 20, 3, 2_000), (0, 0, 0, 2_000), (1, 0, 0, 2_000), (2, 2, 0, 2_000), (4, 0, 4, 2_000),
     (30, 0, 0, None), (300, 300, 0, 1)],
)  # fmt: skip
def test_a_page_is_whole_and_needs_nothing_else(count, late, failed, target_us):
    found = samples(count, late, failed, target_us)
    text = page(summary_of(found), found)
    parser = Balanced()
    parser.feed(text)
    assert not parser.stack
    assert parser.seen.count("script") == 1  # the page's own
    assert not re.search(r"https?://|@import|url\(", text)
    assert "nan" not in text.lower().replace("finance", "")
    assert "gcn>" not in text.replace("&lt;gcn&gt;", "")
    if count == 300 and failed:
        assert f"<b>{20 / 297:.2%}</b> of 297 answers were late" in text
        assert parser.seen.count("svg") == 4
        assert text.count('class="one') == 297
        assert text.count('class="one late"') == 20
        assert "&lt;script&gt;" in text


def test_percentiles_in_the_format_of_hdr_histogram():
    text = distribution_text([float(value) for value in range(1, 1001)])
    rows = [line.split() for line in text.splitlines()[2:] if not line.startswith("#")]
    found = {float(share): (float(value), int(count)) for value, share, count, *_ in rows}
    assert found[0.0] == (1.0, 1)
    assert found[0.5] == (500.0, 500)
    assert found[0.9] == (900.0, 900)
    assert found[1.0] == (1000.0, 1000)
    shares = [float(row[1]) for row in rows]
    assert shares == sorted(set(shares))
    assert all(
        float(row[3]) == pytest.approx(1 / (1 - float(row[1])), abs=0.01) for row in rows[:-1]
    )
    assert "#[Mean    =      500.500, StdDeviation   =      288.675]" in text
    assert "#[Max     =     1000.000, Total count    =         1000]" in text


def test_only_answers_are_in_the_distribution(tmp_path):
    path = tmp_path / "a.hgrm"
    write_hdr(path, samples(10, failed=4))
    assert "Total count    =            6]" in path.read_text()
    write_hdr(path, [])
    assert "Total count    =            0]" in path.read_text()


def test_a_file_that_cannot_be_written_is_told(tmp_path):
    found = samples(3)
    for option, write in (
        ("--html", lambda path: write_page(path, summary_of(found), found)),
        ("--hdr", lambda path: write_hdr(path, found)),
    ):
        with pytest.raises(ConfigError, match=f"{option}: .*absent"):
            write(tmp_path / "absent" / "file")


def test_a_file_that_cannot_be_written_is_told_before_the_run(tmp_path):
    there = tmp_path / "there"
    there.touch()
    require_writable({"--csv": there, "--html": tmp_path / "new", "--hdr": None})
    for path, message in (
        (tmp_path / "absent" / "file", "--csv: .*: the folder .*absent does not exist"),
        (tmp_path, "--csv: .*: it is a folder"),
    ):
        with pytest.raises(ConfigError, match=message):
            require_writable({"--csv": path})


def test_the_summary_has_the_interval_of_the_share():
    seen = summary_of(samples(100, late=5))
    low, high = seen.violation_interval
    assert low < 0.05 < high
    assert (low, high) == pytest.approx((0.0215, 0.1118), abs=1e-3)
    assert msgspec.json.decode(msgspec.json.encode(seen))["latency_ms"]["p999"] == 3.0
