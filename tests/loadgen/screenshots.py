"""Pictures of the report's page and of Locust's for the documentation.

python -m tests.loadgen.screenshots [FOLDER]
"""

import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.browser import start_browser
from tests.loadgen.conftest import FAKE_SERVER, FakeServer
from tests.loadgen.test_locust import ROOT, eventually, points_drawn, web_ui
from tests.obs.builders import traffic
from tests.obs.test_pages import page
from tests.rest.screenshots import IMAGES

#: Names of the pictures.
REPORT, LOCUST = "report.png", "load.png"
_LENGTH_S = 25


def draw_report(folder: Path) -> None:
    """Write the picture of a report's page."""
    with tempfile.TemporaryDirectory() as home:
        file = Path(home) / "report.html"
        file.write_text(page(traffic(3000, 1)), encoding="utf-8")
        browser = start_browser(Path(home) / "profile", 1180, 820)
        try:
            browser.get(file.as_uri())
            (folder / REPORT).write_bytes(browser.get_screenshot_as_png())
        finally:
            browser.quit()


def draw_locust(folder: Path) -> None:
    """Write the picture of Locust's page while a server is late from time to time."""
    command = [sys.executable, str(FAKE_SERVER), "0.045", "0", "0"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with (
        tempfile.TemporaryDirectory() as home,
        subprocess.Popen(command, env={"PYTHONPATH": str(ROOT)}, **pipes) as process,
        web_ui(FakeServer(process).address) as ui,
    ):
        browser = start_browser(Path(home) / "profile", 1180, 1000)
        try:
            form = {"workload": "mix", "rate": "30", "rate_profile": "spikes:8,3,10"}
            ui.post("/swarm", duration="600", **form)
            time.sleep(_LENGTH_S)
            browser.get(f"{ui.url}/?tab=lateness")
            eventually(lambda: len(points_drawn(browser)) == 2 and min(points_drawn(browser)))
            (folder / LOCUST).write_bytes(browser.get_screenshot_as_png())
        finally:
            browser.quit()
            process.stdin.close()


if __name__ == "__main__":
    into = Path(sys.argv[1]) if len(sys.argv) > 1 else IMAGES
    draw_report(into)
    draw_locust(into)
