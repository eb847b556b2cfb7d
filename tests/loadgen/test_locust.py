"""Locust's own command and web UI, as a process, against a server in another."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from urllib.parse import urlencode
from urllib.request import urlopen

import pytest

from bench.kit.servers import ROOT, free_ports
from serve.native import front_lacks
from tests.browser import asked, complaints, fits, start_browser

LOCUST = [sys.executable, "-m", "locust", "-f", "loadgen/locustfile.py"]
SMALL = ["--scale", "0.01", "--max-nodes", "200", "--max-edges", "2000"]
OPTIONS = (
    "workload rate rho end_to_end duration requests arrivals seed trace scale max_nodes max_edges "
    "data timeout native late_fails graph node_type ids fanouts "
    "rate_profile in_flight tenant priority target_ms token_file ca speed no_payloads"
)
PATIENCE_S = 100

pytestmark = pytest.mark.timeout(400)


def within(patience_s, ask):
    """Return the first true result of `ask`, or its last result after the patience is over."""
    give_up = time.monotonic() + patience_s
    while not (found := ask()) and time.monotonic() < give_up:
        time.sleep(0.2)
    return found


def eventually(ask):
    found = within(PATIENCE_S, ask)
    assert found
    return found


class WebUi:
    def __init__(self, port):
        self.url = f"http://127.0.0.1:{port}"

    def get(self, path, data=None):
        with urlopen(self.url + path, data, timeout=PATIENCE_S) as answer:
            return answer.read().decode()

    def post(self, path, **form):
        self.get(path, urlencode(form).encode())

    def is_up(self):
        try:
            return bool(self.get("/"))
        except OSError:
            return False

    def page(self):
        """Return the data that the page is made from."""
        return json.loads(re.search(r"templateArgs = (\{.*\})", self.get("/"))[1])

    def stats(self):
        return json.loads(self.get("/stats/requests"))

    def lateness(self):
        """Return the rows of the tab by model."""
        (table,) = self.stats()["extended_stats"]
        assert table["key"] == "lateness"
        return {row["model"]: row for row in table["data"]}

    def has_ended(self):
        return self.stats()["state"] == "stopped"

    def run(self, model, count, **form):
        """The row after a run of so many requests of `model`; the rest of the form is in `form`."""

        def row():
            found = self.lateness()
            return set(found) == {model} and found[model]["requests"] == count and found[model]

        def begun():
            # Locust ignores this during a run and for a moment afterwards.
            self.post("/swarm", workload=model, requests=str(count), **form)
            return within(10, row)

        return eventually(begun)


@contextmanager
def web_ui(host):
    (port,) = free_ports(1)
    command = [*LOCUST, *SMALL, "--web-host", "127.0.0.1", "--web-port", str(port), "--host", host]
    with subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as process:
        ui = WebUi(port)
        try:
            eventually(ui.is_up)
            yield ui
        finally:
            process.terminate()
            process.wait(PATIENCE_S)


def test_the_web_ui_has_the_options_and_shows_lateness(fake_server):
    with fake_server(delay_s=0.1) as server, web_ui(server.address) as ui:
        page = ui.page()
        options = page["extra_options"]
        assert set(OPTIONS.split()) <= set(options)
        assert options["workload"]["default_value"] == "mix"
        # One user sends all requests, so the form asks for no number of users.
        assert page["hide_common_options"]
        columns = {column["key"] for column in page["extended_tables"][0]["structure"]}

        # The fake server reports every answer as late by its own clock.
        row = ui.run("gine", 7, host=server.address, rate="100")
        assert set(row) == columns
        assert row["answered"] == 7
        assert row["late"] == row["late_by_server"] == 7
        assert row["late_share"] == row["late_share_by_server"] == 100.0
        assert row["over_target_p99"] >= 2

        # A second run counts from zero.
        assert ui.run("gcn", 3, host=server.address, rate="100")["answered"] == 3


@pytest.mark.parametrize("native", ["", "true"])
def test_a_run_stopped_in_the_web_ui_is_followed_by_another(fake_server, native):
    if native and (lacks := front_lacks()):
        pytest.skip(lacks)
    form = {"native": native} if native else {}
    with fake_server() as server, web_ui(server.address) as ui:
        ui.post("/swarm", host=server.address, workload="mix", rate="20", duration="3600", **form)
        eventually(ui.lateness)
        ui.post("/stop")
        eventually(ui.has_ended)
        assert ui.run("gin", 5, host=server.address, rate="100", **form)["answered"] == 5


def test_the_command_starts_the_ui_with_its_options_in_the_form(fake_server):
    (port,) = free_ports(1)
    with fake_server() as server:
        command = [
            sys.executable, "-m", "serve", "load", "--web", "--web-port", str(port), *SMALL,
            "--target", server.address, "--rate", "99", "--workload", "gin", "--requests", "6",
            "--rate-profile", "ramp:0-2", "--duration", "30", "--without", "a", "--priority", "3",
            "--no-payloads",
        ]  # fmt: skip
        with subprocess.Popen(
            command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            start_new_session=True,
        ) as process:  # fmt: skip
            ui = WebUi(port)
            try:
                eventually(ui.is_up)
                page = ui.page()
            finally:
                os.killpg(process.pid, signal.SIGTERM)
                process.wait(PATIENCE_S)
    form = {name: one["default_value"] for name, one in page["extra_options"].items()}
    wanted = {"workload": "gin", "rate": 99.0, "requests": 6, "rate_profile": "ramp:0-2",
              "without": "a", "priority": 3, "no_payloads": True, "max_nodes": 200,
              "duration": 30.0}  # fmt: skip
    assert {name: form[name] for name in wanted} == wanted
    assert page["host"] == server.address


@pytest.mark.parametrize("option", [["--csv", "a"], ["--find-limit"], ["--save-trace", "a"]])
def test_the_ui_refuses_what_it_has_not(option):
    command = [sys.executable, "-m", "loadgen", "--web", "--target", "h:1", "--rate", "1"]
    done = subprocess.run(
        [*command, *option], cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_S,
        check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert "--web has no" in done.stderr


def test_what_cannot_start_is_told_in_the_web_ui(fake_server):
    with fake_server() as server, web_ui(server.address) as ui:
        ui.post("/swarm", host=server.address, workload="nobody", rate="100", requests="7")
        (told,) = eventually(lambda: json.loads(ui.get("/exceptions"))["exceptions"])
        assert "cannot start" in told["msg"]
        assert "no model 'nobody'" in told["msg"]
        eventually(ui.has_ended)


def test_forks_are_refused_in_a_sentence():
    ended = subprocess.run(
        [*LOCUST, "--processes=2", "--headless", "--host", "127.0.0.1:1"],
        cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_S, check=False,
    )  # fmt: skip
    assert ended.returncode == 2
    assert "error: --processes forks, which gRPC does not survive" in ended.stderr


def test_locusts_own_master_and_workers_send_a_run_and_end(fake_server):
    (port,) = free_ports(1)
    with fake_server(fail_every=5) as server:
        common = {"cwd": ROOT, "text": True, "stdout": subprocess.PIPE}
        at = ["--master-port", str(port)]
        workers = [
            subprocess.Popen([*LOCUST, "--worker", *at], stderr=subprocess.DEVNULL, **common)
            for _ in range(2)
        ]
        try:
            master = subprocess.run(
                [*LOCUST, *SMALL, "--master", "--master-bind-port", str(port), "--headless",
                 "--expect-workers", "2", "--host", server.address, "--rate", "100",
                 "--requests", "50", "--workload", "gat", "--json"],
                stderr=subprocess.PIPE, timeout=PATIENCE_S, check=False, **common,
            )  # fmt: skip
            assert [one.wait(PATIENCE_S) for one in workers] == [0, 0]
        finally:
            for one in workers:
                one.kill()
                one.communicate()
    rows = {row["name"]: row for row in json.loads(master.stdout)}
    assert rows["gat"]["num_requests"] == rows["send lag"]["num_requests"] == 50
    assert rows["gat"]["num_failures"] == 10
    # The summary of all samples.
    assert "50 of 50 requests" in master.stderr
    assert "busiest of 2 generators" in master.stderr


def test_the_web_ui_with_workers_shows_all_their_requests(fake_server):
    (port,) = free_ports(1)
    with fake_server(delay_s=0.1) as server:
        command = [
            sys.executable, "-m", "serve", "load", "--web", "--web-port", str(port), *SMALL,
            "--target", server.address, "--rate", "100", "--requests", "31", "--workload", "gcn",
            "--workers", "2",
        ]  # fmt: skip
        with subprocess.Popen(
            command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            start_new_session=True,
        ) as process:  # fmt: skip
            ui = WebUi(port)
            try:
                eventually(ui.is_up)
                eventually(lambda: ui.stats().get("worker_count") == 2)
                row = ui.run("gcn", 31, host=server.address, rate="100")
                assert row["late_share"] == row["late_share_by_server"] == 100.0
                # A second run counts from zero, with the same workers.
                eventually(ui.has_ended)
                assert ui.run("gin", 12, host=server.address, rate="100")["answered"] == 12
            finally:
                os.killpg(process.pid, signal.SIGTERM)
                process.wait(PATIENCE_S)


@pytest.mark.browser
def test_a_run_typed_into_the_form_is_what_page_and_summary_tell(fake_server, tmp_path):
    from selenium.webdriver.common.keys import Keys

    (port,) = free_ports(1)
    log = tmp_path / "log"
    with fake_server(delay_s=0.1) as server, log.open("w") as stderr:
        command = [
            sys.executable, "-m", "serve", "load", "--web", "--web-port", str(port), *SMALL,
            "--target", server.address, "--rate", "99", "--duration", "3600", "--workload", "gcn",
        ]  # fmt: skip
        with subprocess.Popen(
            command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=stderr, start_new_session=True
        ) as process:
            browser = None
            try:
                ui = WebUi(port)
                eventually(ui.is_up)
                browser = start_browser(tmp_path / "profile", 1280, 1000)
                browser.get(ui.url)
                opener = "//*[normalize-space(.)='Custom parameters']/ancestor-or-self::button"
                eventually(lambda: browser.find_elements("xpath", opener))[0].click()
                for name, value in (("workload", "gine"), ("rate", "5"), ("duration", "10")):
                    field = eventually(
                        lambda name=name: [
                            one for one in browser.find_elements("name", name) if one.is_displayed()
                        ]
                    )[0]
                    field.send_keys(Keys.CONTROL, "a")
                    field.send_keys(value)
                browser.find_element("css selector", "button[type=submit]").click()
                eventually(ui.lateness)
                eventually(ui.has_ended)
                row = ui.lateness()["gine"]
                assert set(ui.lateness()) == {"gine"}
                # A Poisson stream of 5 a second for 10 s.
                assert 30 <= row["requests"] == row["answered"] <= 70
                browser.get(f"{ui.url}/?tab=lateness")
                cells = eventually(
                    lambda: [
                        [cell.text for cell in line.find_elements("css selector", "td")]
                        for line in browser.find_elements("css selector", "tbody tr")
                        if "gine" in line.text
                    ]
                )[0]
                summary = eventually(
                    lambda: re.search(r"late answers: ([0-9.]+)% at the client", log.read_text())
                )
                assert float(summary[1]) == row["late_share"] == 100.0
                assert str(row["requests"]) in cells
                assert "100" in cells or "100.00" in cells
            finally:
                if browser is not None:
                    browser.quit()
                os.killpg(process.pid, signal.SIGTERM)
                process.wait(PATIENCE_S)


@pytest.mark.browser
def test_late_answers_are_live_in_every_tab_and_drawn_in_two(fake_server, tmp_path):
    with fake_server(delay_s=0.1) as server, web_ui(server.address) as ui:
        browser = start_browser(tmp_path / "profile", 1280, 900)
        try:
            browser.get(ui.url)
            assert not browser.find_elements("css selector", "#gnnserve-late:not([hidden])")
            ui.post("/swarm", host=server.address, workload="mix", rate="50", duration="3600")
            told = eventually(lambda: shown_line(browser))
            assert "late at the client 100.00 %" in told
            assert "late by the server 100.00 %" in told
            # 0.1 s against the fake's target of 0.05 s.
            over = float(re.search(r"p50 ([0-9.]+)", told)[1])
            assert over >= 2
            for tab in ("lateness", "charts"):
                browser.get(f"{ui.url}/?tab={tab}")
                eventually(lambda: shown_line(browser))
                eventually(lambda: len(points_drawn(browser)) == 2 and min(points_drawn(browser)))
                assert fits(browser)
            browser.get(f"{ui.url}/?tab=stats")
            eventually(lambda: shown_line(browser))
            assert not browser.find_elements("css selector", ".charts:not([hidden])")
            own = (ui.url, "data:")
            assert [url for url in asked(browser, ui.url) if not url.startswith(own)] == []
            assert complaints(browser) == []
        finally:
            browser.quit()
        points = json.loads(ui.get("/lateness/points"))
        assert points[-1]["late"] == 100.0
        ui.post("/stop")
        eventually(ui.has_ended)


def shown_line(browser):
    found = browser.find_elements("css selector", "#gnnserve-late:not([hidden]) p")
    return found[0].text if found else ""


def points_drawn(browser):
    """Return how many pixels of each chart have the colour of its first line."""
    return browser.execute_script("""
        return [...document.querySelectorAll('#gnnserve-late .charts:not([hidden]) canvas')].map(
            (canvas) => {
                const {width, height} = canvas;
                if (!width || !height) return 0;
                const data = canvas.getContext('2d').getImageData(0, 0, width, height).data;
                let count = 0;
                for (let i = 0; i < data.length; i += 4) {
                    count += data[i] === 213 && data[i + 1] === 94 && data[i + 2] === 0;
                }
                return count;
            });
    """)
