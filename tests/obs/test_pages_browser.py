"""The report's page in Chromium: sizes, looks, keyboard, numbers, paper; and its colours."""

import base64
import itertools
import re
from datetime import UTC, datetime
from importlib.resources import files
from pathlib import Path

import numpy as np
import pytest

from serve.core.rules.cause import CAUSES
from tests.browser import complaints, fits, start_browser
from tests.obs.builders import late, traffic
from tests.obs.test_pages import page

SIZES = [(360, 740), (390, 844), (768, 1024), (1400, 900), (1920, 1080)]
LOOKS = {
    "light": ("prefers-color-scheme", "light"),
    "dark": ("prefers-color-scheme", "dark"),
    "forced": ("forced-colors", "active"),
}
NAME = "<b>name</b>" + "long" * 40 + "\u202ertl"

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


def lab(colour, sight):
    """Return CIELAB of a colour such as #3f7fe0 as someone sees it, under D65."""
    values = np.array([int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)])
    linear = np.where(values <= 0.04045, values / 12.92, ((values + 0.055) / 1.055) ** 2.4)
    red, green, blue = np.clip(SIGHTS[sight] @ linear, 0, 1)
    x = (0.4124 * red + 0.3576 * green + 0.1805 * blue) / 0.95047
    y = 0.2126 * red + 0.7152 * green + 0.0722 * blue
    z = (0.0193 * red + 0.1192 * green + 0.9505 * blue) / 1.08883
    x, y, z = (t ** (1 / 3) if t > 0.008856 else 7.787 * t + 16 / 116 for t in (x, y, z))
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


@pytest.mark.parametrize("sight", SIGHTS)
@pytest.mark.parametrize("look", [0, 1], ids=["light", "dark"])
def test_outcomes_and_causes_have_colours_that_everybody_tells_apart(look, sight):
    style = (files("serve.obs") / "assets/report.css").read_text()
    colours = dict(
        re.findall(r"--([a-z-]+): (#[0-9a-f]{6})", style.split("}\n}")[0].split("@media")[look])
    )
    kinds = ["kept", "late", "none", *(f"c-{cause}" for cause in CAUSES)]
    named = {
        kind: re.search(rf"\.{kind} {{ --c: var\(--([a-z-]+)\)", style)[1]
        for kind in kinds
        if re.search(rf"\.{kind} {{ --c", style)
    }
    named["c-queue"] = "queue"
    assert set(named) == set(kinds)
    for one, other in itertools.combinations(kinds, 2):
        apart = lab(colours[named[one]], sight) - lab(colours[named[other]], sight)
        assert np.linalg.norm(apart) >= 15, (one, other)


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    driver = start_browser(tmp_path_factory.mktemp("profile"), 1400, 900)
    yield driver
    driver.quit()


@pytest.fixture(scope="module")
def address(tmp_path_factory):
    rows = [*traffic(2000, 1), late("late", model=NAME, client_id=NAME, tenant=NAME)]
    file = tmp_path_factory.mktemp("report") / "report.html"
    file.write_text(page(rows), encoding="utf-8")
    assert file.stat().st_size <= 500_000
    return file.as_uri()


def show(browser, address, width, height, look="light"):
    metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    name, value = LOOKS[look]
    features = [{"name": name, "value": value}]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
    browser.get_log("browser")
    browser.get(address)


@pytest.mark.browser
@pytest.mark.parametrize("look", LOOKS)
@pytest.mark.parametrize("size", SIZES, ids=lambda size: str(size[0]))
def test_it_fits_and_can_be_read(browser, address, size, look):
    show(browser, address, *size, look)
    assert fits(browser)
    small = browser.execute_script("""
        return [...document.querySelectorAll('main *')].filter((e) => e.checkVisibility() &&
            [...e.childNodes].some((n) => n.nodeType === 3 && n.data.trim())).map((e) => {
                const svg = e.closest('svg'), size = parseFloat(getComputedStyle(e).fontSize);
                const drawn = svg && svg.getBoundingClientRect().width;
                return [e.textContent, svg ? size * drawn / svg.viewBox.baseVal.width : size];
            }).filter(([, size]) => size < 11)
    """)
    assert small == []
    # What is wider than its card says so, and the keyboard reaches it.
    wide = browser.execute_script("""
        return [...document.querySelectorAll('.scroll')].filter(
            (e) => e.scrollWidth > e.clientWidth + 1).map((e) => [e.tabIndex,
                e.getAttribute('aria-label').length > 0, e.nextElementSibling.checkVisibility()])
    """)
    assert all(one == [0, True, True] for one in wide)
    assert bool(wide) == (size[0] < 1400)
    assert complaints(browser) == []


@pytest.mark.browser
def test_what_helps_is_in_view_on_a_phone(browser, address):
    show(browser, address, 360, 740)
    outside = browser.execute_script("""
        return [...document.querySelectorAll('td')].filter((e) =>
            ['what to try first', 'what happened'].includes(e.dataset.h)).map(
                (e) => e.getBoundingClientRect().right > innerWidth)
    """)
    assert len(outside) >= 2
    assert not any(outside)


@pytest.mark.browser
def test_the_keyboard_reaches_what_pointing_shows(browser, address):
    show(browser, address, 1400, 900)
    keys = """
        const svg = document.querySelectorAll('.scroll > svg')[arguments[0]];
        svg.focus();
        svg.dispatchEvent(new KeyboardEvent('keydown', {key: arguments[1]}));
        const marks = [...svg.querySelectorAll('[data-t]')];
        return [document.activeElement === svg, document.getElementById('tip').textContent,
            marks.findIndex((m) => m.classList.contains('pointed')), marks.length,
            marks.map((m) => m.dataset.t)];
    """
    pictures = browser.execute_script("return document.querySelectorAll('.scroll > svg').length")
    assert pictures == 6
    for picture in range(pictures):
        focused, told, at, count, tips = browser.execute_script(keys, picture, "ArrowRight")
        assert (focused, at, told) == (True, 0, tips[0])
        _, told, at, _, _ = browser.execute_script(keys, picture, "End")
        assert (at, told) == (count - 1, tips[-1])
    browser.execute_script(keys, 0, "Escape")
    assert not browser.execute_script("return document.getElementById('tip').checkVisibility()")


@pytest.mark.browser
def test_each_picture_tells_its_numbers_in_a_table(browser, address):
    show(browser, address, 1400, 900)
    counts = browser.execute_async_script("""
        const done = arguments[0];
        const all = [...document.querySelectorAll('figure details')];
        all.forEach((one) => { one.open = true; });
        setTimeout(() => done(all.map((one) => [one.querySelectorAll('tr').length,
            one.parentElement.querySelectorAll('.scroll [data-t]').length])), 200);
    """)
    assert len(counts) == 6
    assert all(rows == marks > 0 for rows, marks in counts)


@pytest.mark.browser
def test_it_tells_the_readers_time_zone(browser, address):
    browser.execute_cdp_cmd("Emulation.setTimezoneOverride", {"timezoneId": "Asia/Kolkata"})
    show(browser, address, 1400, 900)
    told = browser.execute_script("return document.querySelector('footer').textContent")
    browser.execute_cdp_cmd("Emulation.setTimezoneOverride", {"timezoneId": "UTC"})
    assert "All times are UTC; your clock (Asia/" in told
    assert "shows UTC +5:30" in told
    show(browser, address, 1400, 900)
    told = browser.execute_script("return document.querySelector('footer').textContent")
    assert told.endswith("All times are UTC.")
    assert str(datetime.now(UTC).year) in told


def test_the_pictures_of_pages_are_in_the_documentation():
    docs = Path(__file__).parents[2] / "docs"
    for told, name in (("operators.md", "report.png"), ("load.md", "load.png")):
        assert f"](images/{name})" in (docs / told).read_text(encoding="utf-8")
        assert (docs / "images" / name).stat().st_size <= 150_000


@pytest.mark.browser
def test_it_prints_on_a4(browser, address):
    show(browser, address, 1400, 900)
    paper = {"paperWidth": 8.27, "paperHeight": 11.69, "printBackground": True}
    pdf = base64.b64decode(browser.execute_cdp_cmd("Page.printToPDF", paper)["data"])
    assert 1 <= len(re.findall(rb"/Type\s*/Page\b", pdf)) <= 12
