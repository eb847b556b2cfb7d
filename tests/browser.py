"""Headless Chromium for tests of pages."""

import json
import shutil
from pathlib import Path

import pytest

from bench.kit.waiting import PATIENCE_S

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")


def start_browser(profile: Path, width: int, height: int, *arguments: str):
    """Start a browser with a profile of its own; skips the test where there is none."""
    webdriver = pytest.importorskip("selenium.webdriver")
    if CHROMIUM is None or DRIVER is None:
        pytest.skip("chromium or chromedriver is not installed")
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for argument in (
        "--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--no-proxy-server",
        f"--window-size={width},{height}", f"--user-data-dir={profile}", *arguments,
    ):  # fmt: skip
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"performance": "ALL", "browser": "ALL"})
    driver = webdriver.Chrome(options, webdriver.ChromeService(DRIVER))
    driver.set_page_load_timeout(PATIENCE_S)
    driver.set_script_timeout(PATIENCE_S)
    return driver


def fits(browser) -> bool:
    """Return True when nothing is wider than the window."""
    return browser.execute_script(
        "return document.documentElement.scrollWidth <= document.documentElement.clientWidth"
    )


def asked(browser, origin: str) -> list[str]:
    """Return the addresses that pages of `origin` asked for."""
    events = [json.loads(line["message"])["message"] for line in browser.get_log("performance")]
    return [
        event["params"]["request"]["url"]
        for event in events
        if event["method"] == "Network.requestWillBeSent"
        # Before this page the browser shows one of its own.
        and event["params"]["documentURL"].startswith(origin)
    ]


def complaints(browser) -> list[dict]:
    """Return the errors of the browser's console."""
    return [line for line in browser.get_log("browser") if line["level"] == "SEVERE"]
