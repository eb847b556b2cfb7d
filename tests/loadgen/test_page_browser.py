"""The page of a load in Chromium: sizes, looks, accessibility, keyboard."""

import pytest

from loadgen.page import page
from tests.browser import (
    LOOKS,
    SIZES,
    complaints,
    fits,
    label_faults,
    look_like,
    small_texts,
    start_browser,
    violations,
)
from tests.loadgen.test_outputs import samples, summary_of

pytestmark = pytest.mark.browser


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    driver = start_browser(tmp_path_factory.mktemp("profile"), 1400, 900)
    yield driver
    driver.quit()


@pytest.fixture(scope="module")
def address(tmp_path_factory):
    found = samples(3000, late=200, failed=3, target_us=2)
    file = tmp_path_factory.mktemp("load") / "load.html"
    file.write_text(page(summary_of(found), found), encoding="utf-8")
    return file.as_uri()


@pytest.mark.parametrize("look", LOOKS)
@pytest.mark.parametrize("size", SIZES, ids=lambda size: str(size[0]))
def test_it_fits_and_is_accessible(browser, address, size, look):
    look_like(browser, *size, look)
    browser.get_log("browser")
    browser.get(address)
    assert fits(browser)
    assert small_texts(browser) == []
    assert label_faults(browser) == []
    assert violations(browser) == {}
    assert complaints(browser) == []


def test_what_marks_say_is_in_a_table_with_the_names_of_columns(browser, address):
    look_like(browser, 390, 844)
    browser.get(address)
    names = browser.execute_script(
        "return [...document.querySelectorAll('tbody tr:first-child td')].map((e) => e.dataset.h)"
    )
    assert {"model", "p99, ms", "p99.9", "status"} <= set(names)
    counts = browser.execute_async_script("""
        const done = arguments[0];
        const all = [...document.querySelectorAll('figure details')];
        all.forEach((one) => { one.open = true; });
        setTimeout(() => done(all.map((one) => [one.querySelectorAll('tr').length,
            one.parentElement.querySelectorAll('.scroll [data-t]').length])), 200);
    """)
    assert len(counts) == 3
    assert all(rows == marks > 0 for rows, marks in counts)
