"""Pictures of the live page for the documentation.

python -m tests.rest.screenshots [FOLDER]
"""

import sys
import tempfile
import time
from pathlib import Path

from bench.kit.waiting import wait_for
from tests.browser import start_browser
from tests.rest.live_pages import live_server, recent

IMAGES = Path(__file__).parents[2] / "docs" / "images"
#: Width, height, dark, and whether the story of a late request is open, by name.
PICTURES = {
    "live.png": (1240, 640, False, False),
    "live-dark.png": (1240, 640, True, False),
    "live-phone.png": (390, 844, False, False),
    "live-story.png": (1000, 760, False, True),
}


def draw(folder: Path) -> None:
    """Write all pictures to a folder."""
    folder.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as home:
        rows = recent(6000, 290, tenant="web")
        with live_server(Path(home), rows) as live:
            browser = start_browser(Path(home) / "profile", 1280, 800)
            try:
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
                    worst = max((row for row in rows if row.violated), key=lambda row: row.queue_ns)
                    at = f"#request={worst.request_uid}" if story else ""
                    browser.get(f"{live.origin}/{at}")
                    ready = "#detail .bar" if story else "#by-models table"
                    script = f"return Boolean(document.querySelector('{ready}'))"
                    wait_for(lambda asked=script: browser.execute_script(asked), ready)
                    time.sleep(0.5)  # for what moves to rest
                    (folder / name).write_bytes(browser.get_screenshot_as_png())
            finally:
                browser.quit()


if __name__ == "__main__":
    draw(Path(sys.argv[1]) if len(sys.argv) > 1 else IMAGES)
