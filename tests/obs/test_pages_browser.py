"""The report's page in Chromium: sizes, looks, keyboard, numbers, paper; and its colours."""

import base64
import itertools
import random
import re
from datetime import UTC, datetime
from importlib.resources import files
from pathlib import Path

import msgspec
import pytest

from serve.core.rules.cause import CAUSES
from tests.browser import (
    LOOKS,
    SIGHTS,
    SIZES,
    complaints,
    difference,
    fits,
    label_faults,
    look_like,
    small_texts,
    start_browser,
    violations,
)
from tests.obs.builders import late, traffic
from tests.obs.test_pages import page

NAME = "<b>name</b>" + "long" * 40 + "\u202ertl"


def channels(colour):
    """Return red, green and blue of a colour such as #3f7fe0."""
    return [int(colour[at : at + 2], 16) for at in (1, 3, 5)]


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
        pair = (channels(colours[named[kind]]) for kind in (one, other))
        assert difference(*pair, sight) >= 15, (one, other)


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
    look_like(browser, width, height, look)
    browser.get_log("browser")
    browser.get(address)


@pytest.mark.browser
@pytest.mark.parametrize("look", LOOKS)
@pytest.mark.parametrize("size", SIZES, ids=lambda size: str(size[0]))
def test_it_fits_and_can_be_read(browser, address, size, look):
    show(browser, address, *size, look)
    assert fits(browser)
    assert small_texts(browser) == []
    assert label_faults(browser) == []
    assert violations(browser) == {}
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
    pages = "".join(
        (docs / name).read_text(encoding="utf-8") for name in ("operators.md", "load.md")
    )
    for picture in (docs / "images").iterdir():
        assert f"](images/{picture.name})" in pages
        assert picture.stat().st_size <= 150_000


@pytest.mark.browser
def test_it_prints_on_a4(browser, address):
    show(browser, address, 1400, 900)
    paper = {"paperWidth": 8.27, "paperHeight": 11.69, "printBackground": True}
    pdf = base64.b64decode(browser.execute_cdp_cmd("Page.printToPDF", paper)["data"])
    assert 1 <= len(re.findall(rb"/Type\s*/Page\b", pdf)) <= 12


def random_databases(seed, count):
    """Yield the pages of random databases: sizes, ends, numbers of models and names."""
    rng = random.Random(seed)
    for _ in range(count):
        rows = traffic(
            rng.choice((0, 1, 2, 30, 300)), rng.randrange(10**6), load=rng.choice((0.2, 0.6, 1.5))
        )
        models = [f"model {i}" for i in range(rng.choice((1, 4, 40)))]
        if rng.random() < 0.3:
            models[0] = rng.choice((NAME, "n" * 200, "\u05d0\u05d1\u05d2" * 30))
        stretch = 10 ** rng.uniform(-4, 5)
        first = rows[0].arrived_unix_ns if rows else 0
        every_late = rng.random() < 0.25
        more = rng.choice((0, 0, 10**6 // max(len(rows), 1)))
        changed = []
        for row in rows:
            facts = {
                "model": rng.choice(models),
                "arrived_unix_ns": first + int((row.arrived_unix_ns - first) * stretch),
                "left_out": more if row.lane < 0 else 0,
            }
            if every_late and row.status == "OK":
                target_ns = max(int(row.latency_ns / 10 ** rng.uniform(0.01, 4)), 1)
                facts |= {"violated": True, "cause": rng.choice(CAUSES), "qos_target_ns": target_ns}
            changed.append(msgspec.structs.replace(row, **facts))
        yield page(changed)


@pytest.mark.browser
@pytest.mark.parametrize("size", [(390, 844), (1400, 900)], ids=lambda size: str(size[0]))
@pytest.mark.parametrize("seed", range(5))
def test_labels_never_overlap_whatever_the_database_holds(browser, tmp_path, seed, size):
    """Of two hundred random databases, in both sizes; those of one seed share a document."""
    mains, style = [], ""
    for html in random_databases(seed, 40):
        style = html.partition("<style>")[2].partition("</style>")[0]
        mains.append(html.partition("<main>")[2].partition("</main>")[0])
    file = tmp_path / "all.html"
    body = "".join(f"<main>{one}</main>" for one in mains)
    head = '<meta name="viewport" content="width=device-width, initial-scale=1">'
    file.write_text(
        f"<!doctype html><html><meta charset='utf-8'>{head}<style>{style}</style>{body}</html>",
        encoding="utf-8",
    )
    show(browser, file.as_uri(), *size)
    assert browser.execute_script("return document.querySelectorAll('svg').length") >= 100
    assert label_faults(browser) == []
    assert fits(browser)
