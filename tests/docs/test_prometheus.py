"""The queries of docs/operators.md, the dashboard and the alerts, before a real Prometheus."""

import json
import re
import shutil
import socket
import subprocess
import urllib.parse
import urllib.request
from pathlib import Path

import numpy as np
import pytest

from bench.kit.waiting import PATIENCE_S, wait_for
from gnnserve import Client, InvalidRequest
from tests.docs.pages import texts

ROOT = Path(__file__).parents[2]
ALERTS = ROOT / "configs/alerts.yml"
PANELS = json.loads((ROOT / "configs/grafana.json").read_text())["panels"]
PROMETHEUS, PROMTOOL = shutil.which("prometheus"), shutil.which("promtool")


def queries():
    """Return every query by where it is."""
    found = {}
    for block in texts("docs/operators.md", "promql"):
        for comment, query in re.findall(r"^# (.*)\n((?:(?!#).+\n?)+)", block, re.M):
            found[f"docs: {comment}"] = query.strip()
    for panel in PANELS:
        for target in panel["targets"]:
            query = target["expr"].replace("$__rate_interval", "1m")
            found[f"dashboard: {panel['title']} {target['refId']}"] = query
    return found


def test_there_are_queries():
    assert len(queries()) >= 18
    assert len({(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in PANELS}) == len(PANELS)


@pytest.fixture(scope="module")
def prometheus(server, tmp_path_factory):
    """Prometheus on a free port, which scrapes a server that answers, is late and refuses."""
    if PROMETHEUS is None:
        pytest.skip("prometheus is not installed")
    folder = tmp_path_factory.mktemp("prometheus")
    (shown,) = texts("docs/operators.md", "yaml", "prometheus")
    shown = shown.replace("localhost:8002", f"127.0.0.1:{server.http_port}")
    shown = shown.replace("alerts.yml", str(ALERTS))
    often = "{scrape_interval: 1s, evaluation_interval: 1s}"
    (folder / "prometheus.yml").write_text(f"global: {often}\n{shown}")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    command = [
        PROMETHEUS, f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data",
        f"--web.listen-address={address}", "--log.level=warn",
    ]  # fmt: skip
    ask_server(server)
    with subprocess.Popen(command, cwd=folder) as process:
        try:
            yield f"http://{address}", server
        finally:
            process.terminate()


def ask_server(server):
    graph = {"edge_index": np.array([[0, 1], [1, 2]])}
    features = np.zeros((3, 32), np.float32)
    with Client(server.target) as client:
        for target_s in (1000.0, 1e-6):
            client.infer("gcn", x=features, qos_target_s=target_s, **graph)
        with pytest.raises(InvalidRequest):
            client.infer("gcn", x=np.full((3, 32), np.nan, np.float32), **graph)


def value(origin, query):
    """Return the values of a query; empty before the server was scraped."""
    url = f"{origin}/api/v1/query?{urllib.parse.urlencode({'query': query})}"
    try:
        with urllib.request.urlopen(url, timeout=PATIENCE_S) as answer:
            return [float(row["value"][1]) for row in json.load(answer)["data"]["result"]]
    except OSError as error:
        # While it starts it does not listen, or answers 503; a wrong query gets 400.
        if getattr(error, "code", 503) == 503:
            return []
        raise


def test_every_query_has_a_value(prometheus):
    origin, server = prometheus
    wait_for(lambda: value(origin, "count_over_time(gnnserve_lanes[1m]) > 1"), "two scrapes")
    ask_server(server)
    for place, query in queries().items():

        def told(query=query):
            found = value(origin, query)
            return [one for one in found if one == one]

        assert wait_for(told, f"{place}: {query}"), place


def test_prometheus_takes_the_alerts(prometheus):
    origin, _ = prometheus

    def rules():
        try:
            with urllib.request.urlopen(f"{origin}/api/v1/rules", timeout=PATIENCE_S) as answer:
                groups = json.load(answer)["data"]["groups"]
        except OSError:
            return []
        return [rule for group in groups for rule in group["rules"]]

    found = wait_for(lambda: (r := rules()) and all(x["health"] == "ok" for x in r) and r, "rules")
    assert len(found) >= 9


@pytest.mark.skipif(PROMTOOL is None, reason="promtool is not installed")
def test_names_and_types_follow_the_conventions(server):
    url = f"http://127.0.0.1:{server.http_port}/metrics"
    with urllib.request.urlopen(url, timeout=PATIENCE_S) as answer:
        text = answer.read()
    done = subprocess.run(
        [PROMTOOL, "check", "metrics"], input=text, capture_output=True, check=False
    )
    # Names that are Triton's are not ours to choose.
    said = [
        line
        for line in (done.stdout + done.stderr).decode().splitlines()
        if line.startswith("gnnserve") or "error" in line
    ]
    assert said == []


#: Series that make an alert fire, by its name, and until when.
FIRING = {
    "GnnserveLate": [
        ('gnnserve_qos_violations_total{instance="a"}', "0+60x40"),
        ('nv_inference_request_success{instance="a"}', "0+600x40"),
    ],
    "GnnservePort": [('gnnserve_grpc_port_answers{instance="a"}', "0x40")],
    "GnnserveLanes": [
        ('gnnserve_lanes_up{instance="a"}', "1x40"),
        ('gnnserve_lanes{instance="a"}', "2x40"),
    ],
    "GnnserveNoLane": [('gnnserve_lanes_up{instance="a"}', "0x40")],
    "GnnserveStuck": [
        ('gnnserve_queue_depth{instance="a"}', "3x40"),
        ('nv_inference_request_success{instance="a"}', "7x40"),
    ],
    "GnnserveMemoryFull": [
        ('gnnserve_memory_reserved_bytes{instance="a"}', "99x40"),
        ('gnnserve_memory_budget_bytes{instance="a"}', "100x40"),
    ],
    "GnnserveLeak": [
        ('gnnserve_lanes_recycled_total{instance="a",reason="memory"}', "0x20 1x20"),
        ('gnnserve_lanes_recycled_total{instance="a",reason="requests"}', "0+1x40"),
    ],
    "GnnserveUnderestimates": [('gnnserve_memory_underestimates_total{instance="a"}', "0x20 1x20")],
    "GnnserveRowsLost": [('gnnserve_report_rows_dropped_total{instance="a"}', "0x20 1x20")],
}
#: The same series of a server that does well.
WELL = {"0+60x40": "0x40", "0x40": "1x40", "1x40": "2x40", "3x40": "0x40", "99x40": "9x40",
        "0x20 1x20": "0x40"}  # fmt: skip


@pytest.mark.skipif(PROMTOOL is None, reason="promtool is not installed")
@pytest.mark.parametrize("alert", FIRING)
def test_an_alert_fires_when_it_should_and_only_then(alert, tmp_path):
    firing = f'count(ALERTS{{alertname="{alert}", alertstate="firing"}}) or vector(0)'
    tests = []
    for well in (False, True):
        series = [
            {"series": name, "values": WELL.get(values, values) if well else values}
            for name, values in FIRING[alert]
        ]
        tests.append(
            {
                "interval": "1m",
                "input_series": series,
                "promql_expr_test": [
                    {
                        "expr": firing,
                        "eval_time": "35m",
                        "exp_samples": [{"labels": "{}", "value": 0 if well else 1}],
                    }
                ],
            }
        )
    # JSON is YAML.
    file = tmp_path / "tests.yml"
    file.write_text(json.dumps({"rule_files": [str(ALERTS)], "tests": tests}))
    done = subprocess.run(
        [PROMTOOL, "test", "rules", str(file)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_alert_is_tried():
    assert set(re.findall(r"alert: (\w+)", ALERTS.read_text())) == set(FIRING)
