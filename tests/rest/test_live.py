"""The live page's stream and questions, over real sockets."""

import asyncio
import http.client
import json
import threading
import time
from contextlib import ExitStack, closing

import pytest

from bench.kit.waiting import PATIENCE_S, wait_for
from serve.obs.live.view import Focus
from serve.rest.errors import RestError
from serve.rest.feed import MOST_QUESTIONS, MOST_WATCHERS, Feed
from serve.rest.process import missing_packages
from tests.obs.builders import late
from tests.rest.live_pages import live_server, recent

pytestmark = pytest.mark.skipif(bool(missing_packages()), reason="packages are missing")


@pytest.fixture(scope="module")
def live(tmp_path_factory):
    with live_server(tmp_path_factory.mktemp("live"), recent(500, 60, tenant="web")) as server:
        yield server


class Viewer:
    """A client of the stream."""

    def __init__(self, live, query=""):
        self.connection = http.client.HTTPConnection(
            "127.0.0.1", live.gateway.port, timeout=PATIENCE_S
        )
        self.connection.request("GET", f"/live/events{query}")
        self.answer = self.connection.getresponse()

    def event(self):
        """Return the name and the data of the next event."""
        lines = [self.answer.readline().decode().rstrip("\n") for _ in range(3)]
        assert lines[2] == ""
        return lines[0].removeprefix("event: "), json.loads(lines[1].removeprefix("data: "))

    def close(self):
        self.answer.close()
        self.connection.close()


def test_all_numbers_come_first_and_then_what_changed(live):
    with closing(Viewer(live)) as viewer:
        assert viewer.answer.status == 200
        assert viewer.answer.headers["Content-Type"] == "text/event-stream"
        assert viewer.answer.headers["Cache-Control"] == "no-store"
        name, seen = viewer.event()
        assert name == "all"
        assert len(seen["points"]) == seen["end_s"] - seen["begin_s"]
        assert seen["total"]["requests"] > 400
        before = seen["total"]["requests"]
        live.sink.put(late("fresh", arrived_unix_ns=time.time_ns()))

        def told():
            name, seen = viewer.event()
            assert name == "changes"
            assert len(seen["points"]) < 60
            return seen["total"]["requests"] != before

        wait_for(told, "the new request in the stream")


def test_a_focus_is_kept(live):
    with closing(Viewer(live, "?model=gcn&window=1h")) as viewer:
        _, seen = viewer.event()
        expected = sum(row.model == "gcn" for row in live.rows)
        assert seen["width_s"] == 10
        assert expected <= seen["total"]["requests"] <= expected + 1


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("/live/events?window=2y", "known windows are 5m, 1h, 6h, 1d"),
        ("/live/events?model=a&tenant=b", "exclude each other"),
        ("/live/events?version=1", "version needs model"),
        ("/live/events?modle=a", "unknown parameter 'modle'"),
        ("/live/requests?from=1", "until=''"),
        ("/live/requests?from=5&until=5", "until must lie after from"),
        ("/live/requests?from=1&until=99999999", "at most 86400 s"),
        ("/live/requests?from=x&until=2", "from='x'"),
        (f"/live/requests?from={10**19 - 5}&until={10**19 - 4}", "at most 9223372036"),
        ("/live/requests?from=9223372036&until=9223372037", "at most 9223372036"),
        ("/live/requests/any?at=soon", "at='soon'"),
        ("/live/requests/any?at=9223372036854775", "at most 9223372036854774"),
    ],
)
def test_a_wrong_question_is_named(live, path, said):
    answer = live.gateway.get(path)
    assert answer.status == 400
    assert said in answer.json["error"]


def test_the_last_times_are_asked_about_as_any_others(live):
    answer = live.gateway.get("/live/requests?from=9223372035&until=9223372036")
    assert (answer.status, answer.json["count"]) == (200, 0)
    assert live.gateway.get("/live/requests/any?at=9223372036854774").status == 404


def test_watchers_are_bounded_and_places_come_back(live):
    with ExitStack() as stack:
        viewers = [Viewer(live) for _ in range(MOST_WATCHERS)]
        for viewer in viewers:
            stack.callback(viewer.close)
            assert viewer.answer.status == 200
        refused = live.gateway.get("/live/events")
        assert refused.status == 503
        assert f"{MOST_WATCHERS} pages watch this server" in refused.json["error"]
        viewers[0].close()

        def free():
            with closing(Viewer(live)) as viewer:
                return viewer.answer.status == 200

        wait_for(free, "a place for one more")


def test_who_asks_for_the_head_alone_keeps_no_place(live):
    with ExitStack() as stack:
        for _ in range(MOST_WATCHERS + 1):
            connection = http.client.HTTPConnection(
                "127.0.0.1", live.gateway.port, timeout=PATIENCE_S
            )
            stack.callback(connection.close)
            connection.request("HEAD", "/live/events")
            answer = connection.getresponse()
            assert (answer.status, answer.headers["Content-Type"]) == (200, "text/event-stream")
            answer.read()
            # It has an end: the connection is there for the next question.
            connection.request("HEAD", "/live/events")
            assert connection.getresponse().status == 200


def test_questions_that_wait_are_bounded_and_places_come_back(live):
    """A client may leave, and what it asked stays in the queue of the only thread."""
    begun, over = threading.Event(), threading.Event()

    def slow(_):
        begun.set()
        over.wait(PATIENCE_S)

    async def ask_all():
        feed = Feed(live.gateway.database)
        try:
            asked = [asyncio.ensure_future(feed.ask(slow)) for _ in range(MOST_QUESTIONS)]
            await asyncio.to_thread(begun.wait, PATIENCE_S)
            with pytest.raises(RestError, match=f"{MOST_QUESTIONS} questions wait") as refused:
                await feed.ask(slow)
            assert (refused.value.status, refused.value.headers["Retry-After"]) == (503, "1")
            over.set()
            await asyncio.gather(*asked)
            assert await feed.ask(lambda _: "answered") == "answered"
        finally:
            over.set()
            feed.close()
        with pytest.raises(RestError, match="is shutting down"):
            await feed.ask(slow)

    asyncio.run(ask_all())


def test_requests_and_stories(live):
    answer = live.gateway.get(
        f"/live/requests?from={int(time.time()) - 90}&until={int(time.time()) + 1}&tenant=web"
    )
    assert answer.json["count"] == len(live.rows)
    one = answer.json["requests"][0]
    for query in ("", f"?at={one['arrived_unix_us']}"):
        told = live.gateway.get(f"/live/requests/{one['request_uid']}{query}").json
        assert told["facts"]["request_uid"] == one["request_uid"]
        assert told["why"]
    unknown = live.gateway.get("/live/requests/nobody")
    assert unknown.status == 404
    assert "the report has no row with this id" in unknown.json["error"]


def test_the_parts_of_the_page_come_from_the_server(live):
    page = live.gateway.get("/")
    assert page.status == 200
    assert "default-src 'none'" in page.headers["content-security-policy"]
    for name in ("live.js", "charts.js", "story.js", "text.js", "live.css", "uplot.js"):
        answer = live.gateway.get(f"/live/assets/{name}")
        assert answer.status == 200
        assert answer.headers["content-type"].startswith("text/")
    assert live.gateway.get("/live/assets/uplot.LICENSE").status == 200
    assert live.gateway.get("/live/assets/none.js").status == 404


def test_the_page_of_a_server_without_a_database_says_so(tmp_path):
    with live_server(tmp_path, []) as live:
        live.sink.close()
        (tmp_path / "live.db").unlink()
        with closing(Viewer(live)) as viewer:
            name, told = viewer.event()
    assert name == "problem"
    assert "no such report database" in told["error"]


def test_a_stop_ends_the_streams(tmp_path):
    with live_server(tmp_path, recent(20, 10)) as live:
        viewer = Viewer(live)
        viewer.event()
        live.gateway.process.stop()
        with closing(viewer):
            wait_for(lambda: not viewer.answer.readline(), "the end of the stream")


def test_a_focus_is_one_view_for_all_who_share_it():
    assert Focus("5m") == Focus() != Focus("1h")
    assert len({Focus(), Focus("5m"), Focus(model="a")}) == 2
