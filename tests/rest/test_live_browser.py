"""The live page in Chromium: sizes, colours, keyboard, accessibility, lost servers."""

import itertools
import time

import msgspec
import pytest

from bench.kit.waiting import PATIENCE_S, wait_for
from serve.rest.process import missing_packages
from tests.browser import (
    AXE,
    LOOKS,
    SIGHTS,
    SIZES,
    asked,
    complaints,
    difference,
    fits,
    look_like,
    start_browser,
    violations,
)
from tests.obs.builders import late, record
from tests.rest.live_pages import live_server, recent, training
from tests.rest.screenshots import IMAGES, PICTURES, draw

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(bool(missing_packages()), reason="packages are missing"),
]

NAME = "<b>name</b> " + "long" * 40 + " \u202ertl"


@pytest.fixture(scope="module")
def live(tmp_path_factory):
    rows = recent(1500, 200, tenant="web")
    rows += recent(40, 100, 2, model=NAME, tenant=NAME)
    jobs = (
        training(3, "running", 120),
        training(2, "failed", 10, message="the loss is no number", loss=0.0),
        training(1, "done", 200, version=2),
    )
    with live_server(tmp_path_factory.mktemp("live"), rows, jobs) as server:
        yield server


@pytest.fixture(scope="module")
def shared_browser(tmp_path_factory):
    driver = start_browser(tmp_path_factory.mktemp("profile"), 1400, 900)
    yield driver
    driver.quit()


@pytest.fixture
def browser(shared_browser):
    look_like(shared_browser, 1400, 900)
    yield shared_browser
    shared_browser.get("about:blank")


def updates(browser):
    return int(browser.execute_script("return document.body.dataset.updates ?? 0"))


def opened(browser, live, fragment=""):
    """Open the page and wait for numbers."""
    browser.get("about:blank")
    browser.get_log("browser"), browser.get_log("performance")
    browser.get(f"{live.origin}/{fragment}")
    wait_for(lambda: updates(browser) > 0, "numbers on the page")


def text(browser, css):
    return browser.execute_script(
        "return [...document.querySelectorAll(arguments[0])].map(e => e.textContent).join('|')", css
    )


@pytest.mark.parametrize("look", LOOKS)
@pytest.mark.parametrize("size", SIZES, ids=lambda size: str(size[0]))
def test_it_fits_and_is_accessible(browser, live, size, look):
    look_like(browser, *size, look)
    opened(browser, live)
    assert fits(browser)
    # No text is cut off, and none is smaller than 11 px.
    small = browser.execute_script(
        "return [...document.body.querySelectorAll('*')].filter((e) => e.checkVisibility() &&"
        " [...e.childNodes].some((n) => n.nodeType === 3 && n.data.trim()) &&"
        " parseFloat(getComputedStyle(e).fontSize) < 11).map((e) => e.outerHTML)"
    )
    assert small == []
    cut = browser.execute_script(
        "return [...document.querySelectorAll('.tile *, .legend *, td, th, button, label, h1, h2')]"
        ".filter((e) => e.checkVisibility() && e.scrollWidth > e.clientWidth + 1 &&"
        " getComputedStyle(e).display !== 'inline').map((e) => e.outerHTML)"
    )
    assert cut == []
    assert violations(browser) == {}
    urls = asked(browser, live.origin)
    assert f"{live.origin}/live/assets/uplot.js" in urls
    assert [url for url in urls if not url.startswith((live.origin, "data:"))] == []
    assert complaints(browser) == []


def test_names_are_text_and_never_markup(browser, live):
    opened(browser, live)
    assert NAME in text(browser, "#by-models button")
    assert browser.execute_script("return document.querySelectorAll('table b').length") == 0


@pytest.mark.skipif(not AXE.exists(), reason="axe-core is not installed")
@pytest.mark.parametrize("look", ["light", "dark"])
def test_requests_and_story_are_accessible(browser, live, look):
    look_like(browser, 1400, 900, look)
    now = int(time.time())
    opened(browser, live, f"#from={now - 150}&until={now}")
    wait_for(lambda: text(browser, "#detail td"), "the requests")
    assert violations(browser) == {}
    # Requests that ran: those that were refused have no stages.
    browser.execute_script(
        "[...document.querySelectorAll('#detail tbody tr')]"
        ".find((row) => row.textContent.includes('late: ')).querySelector('a').click()"
    )
    wait_for(lambda: "Where the time went" in text(browser, "#detail h3"), "the story")
    assert violations(browser) == {}


def test_from_a_point_to_requests_to_a_story_by_clicks(browser, live):
    from selenium.webdriver.common.by import By
    from selenium.webdriver.support.ui import WebDriverWait

    wait = WebDriverWait(browser, PATIENCE_S)
    opened(browser, live)
    plot = browser.find_element(By.CSS_SELECTOR, "#plot-requests .u-over")
    browser.execute_script("arguments[0].scrollIntoView({block: 'center'})", plot)
    plot.click()
    link = wait.until(lambda page: page.find_element(By.CSS_SELECTOR, "#detail td a"))
    uid = link.text
    link.click()
    wait.until(lambda page: page.find_element(By.ID, "detail-title").text == f"Request {uid}")
    why = wait.until(lambda page: page.find_element(By.CSS_SELECTOR, "#detail .why"))
    row = next(row for row in live.rows if row.request_uid == uid)
    if row.status == "OK":
        assert why.text.startswith(f"Late because of {row.cause}" if row.violated else "Answered")
    assert row.model in text(browser, "#detail-body")
    browser.find_element(By.CSS_SELECTOR, "#detail button").click()
    assert not browser.execute_script("return document.getElementById('detail').open")


def test_everything_is_reached_by_keyboard(browser, live):
    from selenium.webdriver import ActionChains
    from selenium.webdriver.common.by import By
    from selenium.webdriver.common.keys import Keys

    opened(browser, live)
    seen = set()
    for _ in range(80):
        ActionChains(browser).send_keys(Keys.TAB).perform()
        seen.add(
            browser.execute_script(
                "const e = document.activeElement; return e.id || e.dataset.key || e.name ||"
                " e.getAttribute('href') || e.textContent"
            )
        )
    assert {"window", "uid", "/report", "/docs", "/metrics"} <= seen
    assert {f"plot-{name}" for name in ("requests", "late", "latency", "over", "memory")} <= seen
    assert "Numbers" in seen
    assert {"t web", "m gcn 1"} <= seen
    plot = browser.find_element(By.ID, "plot-requests")
    plot.send_keys(*[Keys.ARROW_LEFT] * 40)
    assert "in time" in plot.get_attribute("aria-valuetext")
    plot.send_keys(Keys.ENTER)
    wait_for(lambda: text(browser, "#detail-body p"), "the requests of the point")
    ActionChains(browser).send_keys(Keys.ESCAPE).perform()
    wait_for(
        lambda: browser.switch_to.active_element.get_attribute("id") == "plot-requests", "focus"
    )


def test_a_window_a_model_and_an_id_can_be_chosen(browser, live):
    from selenium.webdriver.common.by import By

    opened(browser, live)
    browser.find_element(By.CSS_SELECTOR, "input[value='1h']").click()
    wait_for(lambda: "window=1h" in browser.current_url, "the window in the address")
    browser.execute_script("document.querySelector('[data-key=\"m gcn 1\"]').click()")
    wait_for(lambda: text(browser, "#focus span") == "Only model gcn, version 1.", "the focus")
    mine = sum(row.model == "gcn" for row in live.rows)
    wait_for(lambda: f"{mine:,}" in text(browser, "#numbers strong").split("|"), "its requests")
    browser.find_element(By.CSS_SELECTOR, "#focus button").click()
    uid = live.rows[7].request_uid
    browser.find_element(By.ID, "uid").send_keys(uid, "\n")
    wait_for(lambda: text(browser, "#detail .why"), "the story")
    assert text(browser, "#detail-title") == f"Request {uid}"


def test_new_requests_move_the_page_and_a_lost_server_is_told(browser, tmp_path):
    with live_server(tmp_path, []) as live:
        opened(browser, live)
        assert "No requests in this time" in text(browser, "#empty")
        assert browser.execute_script("return document.getElementById('empty').checkVisibility()")
        for i in range(30):
            live.sink.put((late if i % 2 else record)(str(i), arrived_unix_ns=time.time_ns()))
        wait_for(lambda: "30" in text(browser, "#numbers strong").split("|"), "the requests")
        wait_for(lambda: "15" in text(browser, "#by-causes td").split("|"), "the causes")
        assert "50.0% of the answers were late" in text(browser, "#alarms")
        # The process is killed; another takes its place.
        live.gateway.process._kill()
        state = "return document.getElementById('link').dataset.state"
        wait_for(lambda: browser.execute_script(state) == "lost", "that the connection is lost")
        assert "trying again" in text(browser, "#link")
        wait_for(lambda: browser.execute_script(state) == "live", "that it is back")


def test_training_jobs_are_shown(browser, live):
    opened(browser, live)
    wait_for(lambda: text(browser, "#by-jobs td"), "the jobs")
    rows = [line.split("|") for line in (text(browser, f"#by-jobs tr:nth-child({n}) td")
            for n in (1, 2, 3))]  # fmt: skip
    assert rows[0] == ["3", "gcn on cora", "running", "", "120 of 200", "0.520", "13.0\u00a0ms"]
    assert rows[1][2] == "failed: the loss is no number"
    assert rows[2][2] == "done, version 2"
    assert "of 4 cores in this time. 1 job trains now." in text(browser, "#by-jobs p")
    bar = "return document.querySelector('#by-jobs progress').position"
    assert browser.execute_script(bar) == pytest.approx(0.6)


@pytest.mark.parametrize("look", ["light", "dark"])
def test_lines_of_a_plot_differ_for_every_vision(browser, live, look):
    """By dashes and by colour."""
    look_like(browser, 1400, 900, look)
    opened(browser, live)
    for name in ("requests", "latency", "over", "causes"):
        lines = browser.execute_script(
            "return [...document.getElementById('plot-' + arguments[0]).parentNode"
            ".querySelectorAll('.legend path')].map((p) => [getComputedStyle(p).stroke,"
            " p.getAttribute('stroke-dasharray')])",
            name,
        )
        assert len({dashes for _, dashes in lines}) == len(lines) >= 2
        colours = [
            [int(part) for part in colour.partition("(")[2].rstrip(")").split(",")[:3]]
            for colour, _ in lines
        ]
        for one, other in itertools.combinations(colours, 2):
            for sight in SIGHTS:
                assert difference(one, other, sight) >= 15, (name, sight, one, other)


def test_thousands_of_tenants_are_the_largest_and_the_others(browser, tmp_path):
    rows = recent(3000, 60)
    rows = [
        msgspec.structs.replace(row, tenant=f"tenant {i % 1500}" if i % 3 else "large")
        for i, row in enumerate(rows)
    ]
    with live_server(tmp_path, rows) as live:
        opened(browser, live)
        shown = text(browser, "#by-tenants td:first-child").split("|")
        assert len(shown) == 10
        assert {"large", "others"} & set(shown)
        browser.execute_script("document.querySelector('[data-key=\"w tenants\"]').click()")
        wait_for(lambda: "others" in text(browser, "#by-tenants td:first-child"), "the others")
        assert fits(browser)


def test_the_pictures_of_the_documentation_can_be_made(tmp_path):
    draw(tmp_path)
    for name in PICTURES:
        for folder in (tmp_path, IMAGES):
            picture = (folder / name).read_bytes()
            assert picture.startswith(b"\x89PNG")
            assert 5_000 < len(picture) < 150_000, name
