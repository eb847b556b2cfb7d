"""The page of figures of a GPU check, from findings of a dry run."""

from html.parser import HTMLParser

import pytest

from bench.gpu.figures_page import page

FOUND = {
    "stages": {
        "arena": {"state": "ok", "seconds": 12.5},
        "gather": {"state": "FAILED", "seconds": 3, "why": "exit code 1; a < b"},
    },
    "results": {
        "kernels": {
            "dry": True, "machine": {"gpu": ["NVIDIA <H200>", "570.1"]}, "checks": [],
            "models": {"gcn": [
                {"nodes": 100, "edges": 400,
                 "eager_ms": {"median": 4.0}, "csr_ms": {"median": 1.0}},
            ]},
            "aggregate": [{
                "degrees": "even", "width": 64, "gb_per_s": {"median": 800.0},
                "torch_sparse_gb_per_s": {"median": 400.0},
                "variants_gb_per_s": {"shuffled": {"median": 600.0}},
            }],
        },
        "isolation": {
            "dry": True, "small_alone_ms": {"median": 0.5},
            "beside": [
                {"reserved_sms": 0, "small_p99_ms": 8.0, "large_ms_per_task": {"median": 3.0}},
                {"reserved_sms": 8, "small_p99_ms": 2.0, "large_ms_per_task": {"median": 3.2}},
            ],
        },
        "launching": {"dry": True, "host_us": {"csr": {"median": 9.0}}},
        "concurrency": {"dry": True},
    },
}  # fmt: skip


class Seen(HTMLParser):
    """Headings, text, and the widths of bars in percent."""

    def __init__(self, text):
        super().__init__()
        self.open, self.headings, self.text, self.widths = [], [], "", []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        if tag != "meta":
            self.open.append(tag)
        if ("class", "bar") in attrs:
            self.widths.append(float(dict(attrs)["style"].removeprefix("width:").rstrip("%")))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] == "h2":
            self.headings.append(data)
        self.text += data


@pytest.fixture(scope="module")
def seen():
    return Seen(page(FOUND))


def test_figures_of_stages_that_ran_are_there_and_no_others(seen):
    assert seen.open == []
    assert seen.headings == [
        "Aims", "Stages", "Executors", "Aggregation", "Reserved multiprocessors", "Launching",
    ]  # fmt: skip


def test_bars_are_as_long_as_what_they_tell(seen):
    assert seen.widths == [100, 25, 100, 50, 75, 6.2, 100, 25, 100]
    for told in ("gcn, 100 nodes, 400 edges: csr", "1 ms", "800 GB/s", "8 reserved, p99", "9 µs"):
        assert told in seen.text


def test_what_was_found_is_text_and_not_markup(seen):
    assert "NVIDIA <H200>, 570.1" in seen.text
    assert "exit code 1; a < b" in seen.text


def test_a_dry_run_says_so(seen):
    assert "the numbers mean nothing" in seen.text
    results = {"kernels": {**FOUND["results"]["kernels"], "dry": False}}
    assert "mean nothing" not in page({**FOUND, "results": results})


def test_the_verdict_on_each_aim_is_there(seen):
    assert "15reserved multiprocessors halve the p99" in seen.text
    assert "not measured" in seen.text
