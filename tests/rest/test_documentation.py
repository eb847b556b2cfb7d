"""The OpenAPI document is valid and true, and its page works in a browser."""

import json
import re

import pytest

from bench.kit.waiting import PATIENCE_S
from tests.browser import asked, complaints, fits, start_browser

openapi_spec_validator = pytest.importorskip("openapi_spec_validator")


def test_the_document_is_valid_openapi(gateway):
    answer = gateway.get("/openapi.json")
    assert answer.status == 200
    openapi_spec_validator.validate(answer.json)
    assert answer.json["openapi"].startswith("3.1")


def test_every_path_told_exists_and_every_example_is_answered(gateway):
    api = gateway.get("/openapi.json").json
    values = {"model": "gcn", "version": "1", "region": "r", "asset": "docs.js"}
    seen = 0
    for path, methods in api["paths"].items():
        filled = re.sub(r"{(\w+)}", lambda match: values[match[1]], path)
        for method, operation in methods.items():
            assert operation["summary"], path
            content = operation.get("requestBody", {}).get("content", {})
            examples = content.get("application/json", {}).get("examples", {})
            if not examples and "/report" not in path:
                status = gateway.ask(method.upper(), filled).status
                assert status not in (405, 500), (method, path)
            for name, example in examples.items():
                url = filled.replace("gcn", name)
                answer = gateway.ask(method.upper(), url, example["value"])
                assert answer.status == 200, (url, answer.body)
                seen += 1
    assert seen >= 2 * 4


def test_bodies_are_described_by_their_classes(gateway):
    schemas = gateway.get("/openapi.json").json["components"]["schemas"]
    assert schemas["JsonRequest"]["required"] == ["inputs"]
    assert set(schemas["JsonTensor"]["required"]) == {"name", "datatype", "shape"}
    assert schemas["JsonTensor"]["properties"]["data"]["items"] == {}


def test_the_page_refers_to_this_server_alone(gateway):
    assert "default-src 'none'" in gateway.get("/docs").headers["content-security-policy"]
    for path in ("/docs", "/docs/docs.js", "/docs/docs.css"):
        answer = gateway.get(path)
        assert answer.status == 200
        assert not re.search(r"https?://|//\w+\.", answer.body.decode())
    assert gateway.get("/docs/docs.html/../../app.py").status == 404
    assert gateway.get("/docs/nope.js").status == 404


@pytest.fixture(params=[(1200, 900), (390, 800)], ids=["desk", "phone"])
def browser(request, tmp_path):
    driver = start_browser(tmp_path / "profile", *request.param)
    yield driver
    driver.quit()


@pytest.mark.browser
def test_a_reader_fills_the_example_and_executes_it(gateway, browser, tmp_path):
    from selenium.webdriver.common.by import By
    from selenium.webdriver.support.ui import Select, WebDriverWait

    origin = f"http://127.0.0.1:{gateway.port}"
    browser.get(f"{origin}/docs")
    wait = WebDriverWait(browser, PATIENCE_S)
    css = "[data-operation='post_v2_models_model_infer']"
    node = wait.until(lambda page: page.find_element(By.CSS_SELECTOR, css))
    node.find_element(By.TAG_NAME, "summary").click()
    Select(node.find_element(By.NAME, "example")).select_by_value("gcn")
    assert json.loads(node.find_element(By.NAME, "body").get_attribute("value"))["inputs"]
    node.find_element(By.TAG_NAME, "button").click()
    status = wait.until(lambda _: node.find_element(By.CSS_SELECTOR, "[data-status]"))
    assert status.get_attribute("data-status") == "200"
    assert '"outputs"' in node.find_element(By.TAG_NAME, "pre").text
    # Nothing is wider than the window, and nothing was asked of another host.
    assert fits(browser)
    urls = asked(browser, origin)
    assert f"{origin}/v2/models/gcn/infer" in urls
    assert [url for url in urls if not url.startswith((origin, "data:"))] == []
    assert complaints(browser) == []
