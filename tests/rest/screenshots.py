"""Pictures of the live page for the documentation.

python -m tests.rest.screenshots [FOLDER]
"""

import random
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import msgspec

from bench.kit.beside import beside
from bench.kit.waiting import wait_for
from serve.obs.record import RequestRecord
from serve.obs.sink import RecordSink
from tests.browser import start_browser
from tests.rest.live_pages import live_server, recent

IMAGES = Path(__file__).parents[2] / "docs" / "images"
#: Width, height, dark, and whether the story of a late request is open, by name.
PICTURES = {
    "live.png": (1240, 630, False, False),
    "live-dark.png": (1240, 630, True, False),
    "live-phone.png": (390, 910, False, False),
    "live-story.png": (1000, 910, False, True),
}
#: Requests a second, and the seconds before the pictures that have some.
_RATE, _SECONDS = 20, 290
#: Seconds of requests that the page gets after it is open.
_WATCHED_S = 4.0


@contextmanager
def going_on(sink: RecordSink, rows: Sequence[RequestRecord]) -> Iterator[None]:
    """Have requests like these end while open."""
    choose = random.Random(0)

    def end_some(over: threading.Event) -> None:
        while not over.wait(choose.expovariate(_RATE)):
            row = choose.choice(rows)
            uid = f"{choose.getrandbits(64):016x}"
            now = time.time_ns() - row.latency_ns
            sink.put(msgspec.structs.replace(row, request_uid=uid, arrived_unix_ns=now))

    with beside(end_some):
        yield


def draw(folder: Path) -> None:
    """Write all pictures to a folder."""
    folder.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as home:
        rows = recent(_RATE * _SECONDS, _SECONDS, tenant="web")
        worst = max((row for row in rows if row.violated), key=lambda row: row.queue_ns)
        with live_server(Path(home), rows) as live, going_on(live.sink, rows):
            browser = start_browser(Path(home) / "profile", 1280, 800)
            try:
                browser.execute_cdp_cmd("Emulation.setScrollbarsHidden", {"hidden": True})
                for name, (width, height, dark, story) in PICTURES.items():
                    scheme = "dark" if dark else "light"
                    browser.execute_cdp_cmd(
                        "Emulation.setEmulatedMedia",
                        {"features": [{"name": "prefers-color-scheme", "value": scheme}]},
                    )
                    browser.execute_cdp_cmd(
                        "Emulation.setDeviceMetricsOverride",
                        {"width": width, "height": height, "deviceScaleFactor": 1,
                         "mobile": width < 600},
                    )  # fmt: skip
                    browser.get("about:blank")
                    at = f"#request={worst.request_uid}" if story else ""
                    browser.get(f"{live.origin}/{at}")
                    ready = "#detail .bar" if story else "#by-models table"
                    script = f"return Boolean(document.querySelector('{ready}'))"
                    wait_for(partial(browser.execute_script, script), ready)
                    time.sleep(_WATCHED_S)
                    (folder / name).write_bytes(browser.get_screenshot_as_png())
            finally:
                browser.quit()


if __name__ == "__main__":
    draw(Path(sys.argv[1]) if len(sys.argv) > 1 else IMAGES)
