"""The live page of several servers: sums, what is read of each, and the page in Chromium."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import msgspec
import pytest

from bench.kit.result import ROOT
from bench.kit.waiting import PATIENCE_S, wait_for
from serve.cluster.live_page import MOST_SERVERS, ClusterServers, Watches, named_servers
from serve.cluster.live_sum import MOST_POINTS, MachineSeen, Seen, summed, with_changes
from serve.cluster.live_watch import MOST_EVENT_BYTES, LiveWatch
from serve.cluster.replica import FOLDER_VARIABLE
from serve.errors import ConfigError
from serve.obs.live.view import CAUSES, NameTotals, Point
from serve.rest.feed import event
from serve.rest.process import missing_packages
from serve.wilson import wilson_interval
from tests.browser import complaints, fits, look_like, small_texts, start_browser, violations
from tests.cluster.pools import announced
from tests.docs.pages import texts
from tests.rest.live_pages import live_server, recent

NOW_S = 1_000
#: Where no server is.
NOBODY = "127.0.0.1:9"


def point(at, requests=10, late=1, p99=5.0, queue=2):
    causes = [late, *[0] * (len(CAUSES) - 1)]
    return Point(at, requests, requests, late, 1.0, p99, 9.0, 0.5, 0.9, 1.5, queue, 100, causes)


def totals(name="", requests=10, late=1, p99=5.0):
    interval = wilson_interval(late, requests)
    return NameTotals(name, "", requests, requests, late, interval, [1, 2, p99, 9], [1, 1, 1, 1])


def numbers(points, models=(), begin_s=NOW_S - 300, alarms=(), queue=2):
    """Return what a server's stream says."""
    return {
        "begin_s": begin_s, "end_s": NOW_S, "width_s": 1, "points": points, "total": totals(),
        "models": list(models), "reasons": {"queue_full": 2}, "meanings": {"queue_full": "it was"},
        "alarms": list(alarms), "server": {"lanes": 2, "budget_bytes": 1000, "lanes_started": 8},
        "state": {"queue": queue, "reserved_bytes": 300, "lanes_up": 8}, "more": "is left alone",
    }  # fmt: skip


def seen(*points, **fields):
    return msgspec.convert(msgspec.to_builtins(numbers(list(points), **fields)), Seen)


def test_counts_add_up_and_percentiles_are_the_highest():
    one = seen(point(990), point(991), models=[totals("gcn")], alarms=["It is full."])
    two = seen(point(991, 30, 0, p99=7.0), models=[totals("gcn", 90, 2, 8.0), totals("gat")])
    found = summed([MachineSeen("a", "a:2", one), MachineSeen("b", "b:2", two)], NOW_S)
    assert [(p.start_s, p.requests, p.late, p.p99, p.queue) for p in found["points"]] == [
        (990, 10, 1, 5.0, 2), (991, 40, 1, 7.0, 4),
    ]  # fmt: skip
    total = found["total"]
    assert (total.requests, total.late, total.latency_ms) == (50, 2, [1, 2, 5.0, 9])
    assert total.interval == wilson_interval(2, 50)
    assert found["causes"] == {name: 2 if name == "queue" else 0 for name in CAUSES}
    assert found["state"] == {"queue": 4, "reserved_bytes": 600, "lanes_up": 16}
    assert found["server"] == {"lanes": 4, "lanes_started": 16, "budget_bytes": 2000}
    assert [(m.name, m.requests, m.latency_ms[2]) for m in found["models"]] == [
        ("gcn", 100, 8.0), ("gat", 10, 5.0),
    ]  # fmt: skip
    assert (found["reasons"], found["meanings"]) == ({"queue_full": 4}, {"queue_full": "it was"})
    assert found["alarms"] == ["a: It is full."]


def test_a_machine_that_says_nothing_is_told_of_and_stays_in_the_past():
    lost = MachineSeen("a", "a:2", seen(point(990), alarms=["old"]), "it was cut off", 991.0)
    never = MachineSeen("c", "c:2", None, "connection refused")
    found = summed([lost, MachineSeen("b", "b:2", seen(point(995))), never], NOW_S)
    assert [one.start_s for one in found["points"]] == [990, 995]
    assert found["total"].requests == 20
    assert (found["state"]["queue"], found["server"]["lanes"], found["alarms"]) == (2, 2, [])
    rows = {row["machine"]: (row["problem"], row["heard_s"], row["total"] is None)
            for row in found["machines"]}  # fmt: skip
    assert rows == {"a": ("it was cut off", 991.0, True), "b": ("", 0.0, False),
                    "c": ("connection refused", 0.0, True)}  # fmt: skip
    for nobody, requests in (([], 0), ([never], 0), ([lost], 10)):
        assert summed(nobody, NOW_S)["total"].requests == requests


def test_changes_join_the_points_before_and_no_more_are_kept():
    before = [point(at) for at in (600, 701, 702)]
    found = with_changes(before, seen(point(702, 99), point(703)))
    assert [(one.start_s, one.requests) for one in found.points] == [
        (701, 10), (702, 99), (703, 10),
    ]  # fmt: skip
    many = seen(*(point(at) for at in range(2 * MOST_POINTS)), begin_s=0)
    assert len(with_changes([], many).points) == MOST_POINTS
    odd = point(800)
    odd.causes = []
    assert with_changes([], seen(odd)).points == []


@pytest.mark.parametrize(("requests", "late"), [(10, 11), (-1, 0), (10**400, 1), (10, -1)])
def test_impossible_counts_are_not_summed(requests, late):
    whole = seen()
    whole.total.answered, whole.total.late = requests, late
    for found in (seen(point(700, requests, late)), whole):
        with pytest.raises(ValueError, match="more late answers than answers"):
            with_changes([], found)


@pytest.mark.skipif(bool(missing_packages()), reason="packages are missing")
def test_it_reads_what_a_gateway_writes(tmp_path):
    with live_server(tmp_path, recent(50, 20)) as live, watching(live.gateway.port) as watch:
        first = wait_for(lambda: latest(watch).answers and latest(watch), "numbers")
        wait_for(lambda: latest(watch).heard_s > first.heard_s, "changes")
        found = summed([latest(watch)], time.time())
    assert found["total"].requests == len(live.rows) == sum(m.requests for m in found["models"])
    assert 290 <= len(found["points"]) <= MOST_POINTS
    assert watch.latest(time.time() + 60).problem


class FakeServer(ThreadingHTTPServer):
    """A server whose stream is what a test says, its last event again and again."""

    daemon_threads = True

    def __init__(self, *events, status=200):
        super().__init__(("127.0.0.1", 0), FakeStream)
        self.events, self.status = events, status
        self.viewers, self.asked = 0, []
        self.over = threading.Event()
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def address(self):
        return f"127.0.0.1:{self.server_port}"

    def end(self):
        self.over.set()
        self.shutdown()
        self.server_close()


class FakeStream(BaseHTTPRequestHandler):
    def do_GET(self):
        server = self.server
        server.asked.append((self.path, self.headers.get("Authorization")))
        server.viewers += 1
        try:
            self.send_response(server.status)
            self.end_headers()
            for one in server.events:
                self.wfile.write(one)
            while server.status == 200 and not server.over.wait(0.2):
                self.wfile.write(server.events[-1])
        except OSError:
            pass  # the viewer has left
        server.viewers -= 1

    def log_message(self, *_):
        pass


@contextmanager
def fake(*events, status=200):
    server = FakeServer(*events, status=status)
    try:
        yield server
    finally:
        server.end()


@contextmanager
def watching(port, token=None):
    watch = LiveWatch("a", f"127.0.0.1:{port}", token)
    try:
        yield watch
    finally:
        watch.end()


def latest(watch):
    return watch.latest(time.time())


def test_it_is_one_viewer_with_a_token_and_leaves():
    all_ = event("all", numbers([point(990), point(991)]))
    with fake(all_, event("changes", numbers([point(992)]))) as server:
        with watching(server.server_port, "secret") as watch:
            found = wait_for(lambda: latest(watch).answers and latest(watch).seen, "numbers")
            wait_for(lambda: len(latest(watch).seen.points) == 3, "changes")
            assert set(server.asked) == {("/live/events?window=5m", "Bearer secret")}
            assert found.server.lanes == 2
            wait_for(lambda: server.viewers == 1, "one viewer")
            silent = watch.latest(time.time() + 60)
            assert (silent.answers, silent.problem) == (False, "it has been silent for 8 s")
        wait_for(lambda: server.viewers == 0, "the viewer to leave")


@pytest.mark.parametrize(("status", "events", "told"), [
    (403, [b'{"error": "no token"}'], "status 403: no token"),
    (404, [b"<html>"], "status 404: it says nothing more"),
    (200, [event("problem", {"error": "the disk is full"})], "the disk is full"),
    (200, [event("all", {"points": []})], "missing required field"),
    (200, [b"event: all\ndata: " + b"x" * (MOST_EVENT_BYTES + 1)], "more than 1048576 bytes"),
    (200, [b'event: all\ndata: {"more":' + b"[" * 9000 + b"\n\n"], "recursion depth"),
    (200, [event("all", numbers([point(NOW_S, 10, 11)]))], "more late answers than answers"),
], ids=["refused", "no page", "problem", "no numbers", "too long", "deep", "false"])  # fmt: skip
def test_a_server_that_says_something_else_is_told_of(status, events, told):
    with fake(*events, status=status) as server, watching(server.server_port) as watch:
        wait_for(lambda: told in latest(watch).problem, told)
        assert not latest(watch).answers


def test_a_server_that_cannot_be_reached_is_told_of():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    with watching(port) as watch:
        wait_for(lambda: "refused" in latest(watch).problem, "it to be refused")


def test_servers_come_and_go():
    with fake(event("all", numbers([]))) as one, fake(event("all", numbers([]))) as two:
        servers = {one.address: "one"}
        watches = Watches(lambda: servers, None)
        watches.look()
        wait_for(lambda: one.viewers == 1, "a viewer")
        servers = {two.address: "two"}
        watches.look()
        wait_for(lambda: (one.viewers, two.viewers) == (0, 1), "another's viewer")
        said = json.loads(watches.event(time.time()).split(b"data: ")[1])
        assert [row["machine"] for row in said["machines"]] == ["two"]
        watches.end()
        wait_for(lambda: two.viewers == 0, "its end")


def test_no_more_servers_are_read_than_may_and_the_page_says_so(monkeypatch):
    monkeypatch.setattr("serve.cluster.live_page.MOST_SERVERS", 1)
    with fake(event("all", numbers([]))) as one:
        watches = Watches(lambda: {one.address: "one", NOBODY: "two"}, None)
        watches.look()
        said = json.loads(watches.event(time.time()).split(b"data: ")[1])
        assert [row["machine"] for row in said["machines"]] == ["one"]
        assert said["alarms"] == ["1 of 2 servers are shown."]
        watches.end()


def test_servers_are_named_or_their_addresses():
    assert named_servers(["one=h:1", "h:2"]) == {"h:1": "one", "h:2": "h:2"}
    for wrong in ("h", "h:0", "h:65536", ":1", "one=h", "h:x"):
        with pytest.raises(ConfigError, match="expected host:port, or name=host:port"):
            named_servers([wrong])
    with pytest.raises(ConfigError, match="h:1 is given twice"):
        named_servers(["h:1", "one=h:1"])
    with pytest.raises(ConfigError, match=f"at most {MOST_SERVERS}"):
        named_servers([f"h:{port}" for port in range(1, MOST_SERVERS + 2)])


def test_the_servers_of_a_cluster_are_those_that_its_coordinator_knows(tmp_path, monkeypatch):
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    with pytest.raises(ConfigError, match="there is no cluster 'c' on this machine"):
        ClusterServers("c")
    (tmp_path / "c").mkdir()
    file = tmp_path / "c" / "known.json"
    file.write_bytes(msgspec.json.encode([announced("a"), announced("b")]))
    found = ClusterServers("c")
    assert found() == {"a:2": "a", "b:2": "b"}
    file.unlink()
    assert found() == {"a:2": "a", "b:2": "b"}


@contextmanager
def documented(mark, addresses=(), **environment):
    """Run a command of the page, with other addresses and port; yields the live page's address."""
    (text,) = texts("docs/cluster.md", "sh", mark)
    others = iter(addresses)
    _, *words = re.sub(r"127\.0\.0\.1:\d+", lambda _: next(others), text).split()
    with subprocess.Popen(
        [sys.executable, "-m", "serve", *words, "--port", "0"],
        cwd=ROOT, env=os.environ | environment, stdout=subprocess.PIPE, text=True,
    ) as running:  # fmt: skip
        try:
            yield running.stdout.readline().strip()
        finally:
            running.send_signal(signal.SIGTERM)
            code = running.wait(PATIENCE_S)
    assert code == 0


def first_event(address):
    with urllib.request.urlopen(f"{address}live/events", timeout=PATIENCE_S) as answer:
        answer.readline()
        return json.loads(answer.readline().removeprefix(b"data: "))


def busy(now_s, name):
    """Return the numbers of a server that has answered for five minutes."""
    points = [
        point(now_s - at, 10 + at % 7, int(at % 3 == 0), 4.0 + at % 5) for at in range(300, 1, -1)
    ]
    models = [totals(name, 3000, 40), totals("long-" * 30, 10, 0)]
    said = numbers(points, models, now_s - 300, ["6 of 8 lanes can take a task."])
    return event("all", said | {"end_s": now_s})


@pytest.fixture(scope="module")
def page():
    """The address of a page of a server that answers and one that does not."""
    with fake(busy(int(time.time()), "gcn")) as one:
        with documented("page-of", [one.address, NOBODY]) as address:
            wait_for(lambda: rows_of(address)[0]["total"] is not None, "numbers")
            yield address
            wait_for(lambda: one.viewers == 1, "a single viewer, however many watched")
        wait_for(lambda: one.viewers == 0, "the viewer to leave")


def rows_of(address):
    return first_event(address)["machines"]


def test_the_command_serves_the_sums_and_says_who_does_not_answer(page):
    wait_for(lambda: rows_of(page)[1]["problem"], "a problem")
    said = first_event(page)
    assert [(row["machine"], row["address"]) for row in said["machines"]][1] == ("two", NOBODY)
    assert "refused" in said["machines"][1]["problem"]
    assert said["models"][0]["name"] == "gcn"
    assert said["alarms"] == ["one: 6 of 8 lanes can take a task."]
    assert loaded(page, "/live/assets/text.js")
    for path in re.findall(r'(?:src|href)="(/[^"]+)"', loaded(page)):
        assert loaded(page, path)
    with pytest.raises(urllib.error.HTTPError, match="404"):
        loaded(page, "/live/assets/nothing.js")


def test_on_the_head_the_servers_are_those_of_the_cluster(tmp_path):
    (tmp_path / "default").mkdir()
    file = tmp_path / "default" / "known.json"
    with fake(event("all", numbers([]))) as one:
        there = msgspec.structs.replace(announced("a"), http_address=one.address)
        file.write_bytes(msgspec.json.encode([there]))
        with documented("page", **{FOLDER_VARIABLE: str(tmp_path)}) as address:
            wait_for(lambda: rows_of(address)[0]["total"] is not None, "numbers")
            file.write_bytes(msgspec.json.encode([]))
            wait_for(lambda: not rows_of(address), "it to know that the server has left")


def loaded(page, path="/"):
    with urllib.request.urlopen(page.rstrip("/") + path, timeout=PATIENCE_S) as answer:
        return answer.read().decode()


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    driver = start_browser(tmp_path_factory.mktemp("profile"), 1400, 900)
    yield driver
    driver.quit()


@pytest.mark.browser
@pytest.mark.parametrize("look", ["light", "dark"])
@pytest.mark.parametrize(
    "size", [(360, 740), (768, 1024), (1400, 900)], ids=lambda size: str(size[0])
)
def test_the_page_fits_can_be_read_and_tells_each_machine(browser, page, size, look):
    look_like(browser, *size, look)
    browser.get_log("browser")
    browser.get(page)
    wait_for(lambda: browser.execute_script("return document.body.dataset.updates > 1"), "numbers")
    assert fits(browser)
    assert small_texts(browser) == []
    assert violations(browser) == {}
    assert complaints(browser) == []
    text = browser.find_element("id", "machines").text
    assert "says nothing yet: " in text
    assert text.count("answers") == 1
    assert "1 of 2" in browser.find_element("id", "numbers").text
    assert "two says nothing yet: " in browser.find_element("id", "alarms").text
    assert browser.execute_script("return document.querySelectorAll('#plots canvas').length") == 8
    links = browser.find_elements("css selector", "#machines a")
    assert [link.text for link in links] == ["one", "two"]
    assert links[1].get_attribute("href") == f"http://{NOBODY}/"
