"""The live page of a whole server under load, in Chromium."""

import threading

import numpy as np
import pytest

from bench.kit.waiting import wait_for
from gnnserve import Client
from serve.rest.process import missing_packages
from tests.browser import asked, complaints, start_browser

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(bool(missing_packages()), reason="packages are missing"),
]


def load(server, stop):
    """Send requests one after the other, every third with a target that nobody can keep."""
    features, edges = np.zeros((20, 32), np.float32), np.array([[0, 1], [1, 2]])
    with Client(server.target) as client:
        number = 0
        while not stop.is_set():
            number += 1
            target_s = None if number % 3 else 1e-6
            client.infer("gcn", x=features, edge_index=edges, qos_target_s=target_s, tenant="web")


def test_a_server_under_load_moves_the_page_down_to_a_request(server, tmp_path):
    origin = f"http://127.0.0.1:{server.http_port}"
    stop = threading.Event()
    sender = threading.Thread(target=load, args=(server, stop))
    browser = start_browser(tmp_path / "profile", 1280, 900)
    try:
        browser.get(origin)

        def text(css):
            return browser.execute_script(
                "return [...document.querySelectorAll(arguments[0])].map(e => e.textContent)", css
            )

        def number():
            found = text("#numbers strong")
            return int(found[1].replace(",", "")) if found else -1

        wait_for(lambda: number() >= 0, "numbers on the page")
        before = number()
        sender.start()
        wait_for(lambda: number() > before + 50, "requests on the page")
        seen = number()
        wait_for(lambda: number() > seen, "more requests on the page")
        wait_for(lambda: any("late" in one for one in text("#alarms li")), "that answers are late")
        assert "web" in text("#by-tenants td:first-child")
        up, lanes = text("#numbers strong")[5].split(" of ")
        assert up == lanes
        browser.execute_script("document.querySelector('#by-causes button').click()")
        wait_for(lambda: text("#detail td a"), "late requests")
        browser.execute_script("document.querySelector('#detail td a').click()")
        wait_for(lambda: text("#detail .why"), "the story of one")
        assert text("#detail .why")[0].startswith("Late because of ")
        assert "run" in text("#detail table[aria-label=Stages] td:first-child")
        urls = asked(browser, origin)
        assert [url for url in urls if not url.startswith((origin, "data:"))] == []
        assert complaints(browser) == []
    finally:
        stop.set()
        if sender.ident is not None:
            sender.join()
        browser.quit()
