"""Headless Chromium for tests of pages."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from bench.kit.waiting import PATIENCE_S

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
DRIVER = shutil.which("chromedriver")
AXE = Path(__file__).parents[1] / "build/browser/node_modules/axe-core/axe.min.js"
#: Sizes of windows, and looks that the system may ask of a page.
SIZES = [(360, 740), (390, 844), (768, 1024), (1400, 900), (2560, 1440)]
LOOKS = {
    "light": ("prefers-color-scheme", "light"),
    "dark": ("prefers-color-scheme", "dark"),
    "forced": ("forced-colors", "active"),
    "still": ("prefers-reduced-motion", "reduce"),
}
#: What each kind of sight makes of linear RGB: Machado, Oliveira and Fernandes 2009, severity 1.
SIGHTS = {
    "normal": np.eye(3),
    "protan": np.array(
        [
            [0.152286, 1.052583, -0.204868],
            [0.114503, 0.786281, 0.099216],
            [-0.003882, -0.048116, 1.051998],
        ]
    ),
    "deutan": np.array(
        [
            [0.367322, 0.860646, -0.227968],
            [0.280085, 0.672501, 0.047413],
            [-0.011820, 0.042940, 0.968881],
        ]
    ),
    "tritan": np.array(
        [
            [1.255528, -0.076749, -0.178779],
            [-0.078411, 0.930809, 0.147602],
            [0.004733, 0.691367, 0.303900],
        ]
    ),
}


def difference(one, other, sight):
    """Return CIE76's difference of two colours, 0 to 255 each channel, as someone sees them."""
    return float(np.linalg.norm(_lab(one, sight) - _lab(other, sight)))


def _lab(colour, sight):
    """Return CIELAB of a colour as someone sees it, under D65."""
    values = np.array(colour) / 255
    linear = np.where(values <= 0.04045, values / 12.92, ((values + 0.055) / 1.055) ** 2.4)
    red, green, blue = np.clip(SIGHTS[sight] @ linear, 0, 1)
    x = (0.4124 * red + 0.3576 * green + 0.1805 * blue) / 0.95047
    y = 0.2126 * red + 0.7152 * green + 0.0722 * blue
    z = (0.0193 * red + 0.1192 * green + 0.9505 * blue) / 1.08883
    x, y, z = (t ** (1 / 3) if t > 0.008856 else 7.787 * t + 16 / 116 for t in (x, y, z))
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


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


def look_like(browser, width, height, look="light"):
    """Give the window a size, and what the system asks of pages."""
    metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    name, value = LOOKS[look]
    features = [{"name": name, "value": value}]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})


def violations(browser):
    """Return what axe-core finds wrong, by rule; nothing where it is not installed."""
    if not AXE.exists():
        return {}
    browser.execute_script(AXE.read_text(encoding="utf-8"))
    found = browser.execute_async_script(
        "const done = arguments[0]; axe.run(document, {resultTypes: ['violations']})"
        ".then((r) => done(r.violations.map((v) => [v.id, v.nodes.map((n) => n.html)])))"
    )
    return dict(found)


def small_texts(browser):
    """Return the texts below 11 px as they are drawn."""
    return browser.execute_script("""
        return [...document.querySelectorAll('main *')].filter((e) => e.checkVisibility() &&
            [...e.childNodes].some((n) => n.nodeType === 3 && n.data.trim())).map((e) => {
                const svg = e.closest('svg'), size = parseFloat(getComputedStyle(e).fontSize);
                const drawn = svg && svg.getBoundingClientRect().width;
                return [e.textContent, svg ? size * drawn / svg.viewBox.baseVal.width : size];
            }).filter(([, size]) => size < 11)
    """)


def label_faults(browser):
    """Return the labels of pictures that overlap each other, or are cut off by their picture."""
    return browser.execute_script("""
        const faults = [];
        for (const svg of document.querySelectorAll('svg')) {
            const frame = svg.getBoundingClientRect();
            const shown = getComputedStyle(svg).overflow === 'visible';
            const boxes = [...svg.querySelectorAll('text')].map((t) => {
                const box = t.getBoundingClientRect();
                // The box of a line is higher than its letters.
                const inset = box.height * 0.2;
                return {text: t.textContent, l: box.left, r: box.right, t: box.top + inset,
                    b: box.bottom - inset};
            }).filter((box) => box.r > box.l);
            for (const box of boxes) {
                if (!shown && (box.l < frame.left - 1 || box.r > frame.right + 1 ||
                    box.t < frame.top - 1 || box.b > frame.bottom + 1)) {
                    faults.push([svg.getAttribute('aria-label'), 'cut', box.text]);
                }
            }
            boxes.sort((a, b) => a.l - b.l);
            for (let i = 0; i < boxes.length; i++) {
                for (let j = i + 1; j < boxes.length && boxes[j].l < boxes[i].r - 0.5; j++) {
                    if (boxes[i].t < boxes[j].b && boxes[j].t < boxes[i].b) {
                        faults.push([svg.getAttribute('aria-label'), boxes[i].text, boxes[j].text]);
                    }
                }
            }
        }
        return faults;
    """)


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
