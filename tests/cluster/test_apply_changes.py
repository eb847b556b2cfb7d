"""Files of a shared graph that have its changes: what servers open is what they held before."""

import errno
from dataclasses import replace

import numpy as np
import pytest
from typer.testing import CliRunner

pytest.importorskip("zmq", reason="ZeroMQ is not installed: pip install 'gnnserve[cluster]'")

from serve.cluster.change_log import ChangeLog
from serve.commands.apply_changes import apply_changes
from serve.commands.graph_cli import app
from serve.config import load_config
from serve.errors import ConfigError
from serve.graphs.load import OpenOptions, open_graph
from serve.graphs.updates import Change
from tests.cluster.sharing import FEATURES, NODES, cluster, parts_of_graph
from tests.docs.pages import texts

CONFIG = """
[cluster.rows]
listen = "127.0.0.1:1"
servers_file = "stores"
[[graph]]
name = "{name}"
file = "made.npz"
parts = "parts.npy"
share = "{share}"
"""


def silent(step, share):
    pass


@pytest.fixture(params=["features", "all"])
def changed(tmp_path, request):
    """Return a folder with a graph's files and a log of changes, and the graph that they make."""
    graph = parts_of_graph()
    y = np.arange(NODES) % 3
    np.savez(tmp_path / "made.npz", num_nodes=NODES, edge_index=graph.edge_index, x=graph.x, y=y)
    (tmp_path / "gnnserve.toml").write_text(CONFIG.format(name="made", share=request.param))
    first = Change(set_ids=np.array([3, 5]), set_x=np.full((2, FEATURES), 7, np.float32))
    if request.param == "all":
        # Of two changes that remove an edge at once, the second one finds it gone.
        first = replace(first, remove_edges=graph.edge_index[:, :1])
    second = Change(
        add_x=np.ones((3, FEATURES), np.float32),
        add_edges=np.array([[0, NODES], [NODES + 2, 1]]),
        remove_edges=graph.edge_index[:, :2],
    )
    with cluster(tmp_path, 2, graph=graph, with_edges=request.param == "all") as two:
        two.order_changes()
        for change in (first, second):
            two.rows[1].changes.change("made", change, None)
        found = two.graphs[0].snapshot
        features = found.features(np.arange(found.num_nodes))
        edges = found.edges()
        if request.param == "all":
            edges = np.concatenate([each.snapshot.edges() for each in two.graphs], axis=1)
            edges = edges[:, np.argsort(edges[1], kind="stable")]
        return tmp_path, edges, features, found.column.parts


def test_a_graph_that_is_written_anew_is_what_servers_held(changed):
    folder, edges, features, parts = changed
    config = load_config(folder / "gnnserve.toml")
    told = apply_changes(config, "made", folder / "new", silent)
    assert (told.changes, told.num_nodes, told.num_edges) == (2, NODES + 3, edges.shape[1])
    opened = open_graph("made", folder / "new", OpenOptions(), silent)
    found = opened.snapshot
    np.testing.assert_array_equal(found.edges(), edges)
    assert found.features(np.arange(found.num_nodes)).tobytes() == features.tobytes()
    np.testing.assert_array_equal(opened.labels, [*np.arange(NODES) % 3, -1, -1, -1])
    np.testing.assert_array_equal(np.load(folder / "new" / "parts.npy"), parts)


def test_what_cannot_be_written_anew_is_refused(changed):
    folder, *_ = changed
    config = load_config(folder / "gnnserve.toml")
    with pytest.raises(ConfigError, match="graph 'other': the configuration has no file and parts"):
        apply_changes(config, "other", folder / "new", silent)
    parts = np.load(folder / "parts.npy")
    np.save(folder / "parts.npy", parts[::-1])
    with pytest.raises(ConfigError, match=r"change 1 of .*changes\.log is of other files"):
        apply_changes(config, "made", folder / "new", silent)
    np.save(folder / "parts.npy", parts)
    log = ChangeLog(folder / "changes.log", 1 << 20)
    log.append(b"\x94\xc4\x00\xa1\xff\xc4\x00\xc4\x00")  # a graph's name that is no UTF-8
    log.close()
    with pytest.raises(ConfigError, match=r"changes\.log: change 3: 'utf-8' codec"):
        apply_changes(config, "made", folder / "new", silent)
    (folder / "changes.log").unlink()
    with pytest.raises(ConfigError, match="no such file; the sequencer has it"):
        apply_changes(config, "made", folder / "new", silent)
    assert not (folder / "new").exists()


def test_a_folder_is_there_wholly_or_not_at_all(changed, monkeypatch):
    folder, *_ = changed
    config = load_config(folder / "gnnserve.toml")
    before = sorted(folder.iterdir())

    def features(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("serve.graphs.snapshot.Snapshot.features", features)
    with pytest.raises(ConfigError, match=r"--out .*new: No space left on device"):
        apply_changes(config, "made", folder / "new", silent)
    assert sorted(folder.iterdir()) == before


def test_the_command_of_the_page_works(changed):
    folder, *_ = changed
    (command,) = texts("docs/cluster.md", "sh", "apply")
    _, _, *words = command.split()
    words = ["made" if word == "papers" else word for word in words]
    words[words.index("--config") + 1] = str(folder / "gnnserve.toml")
    words[words.index("--out") + 1] = str(folder / "papers-2")
    said = CliRunner().invoke(app, words)
    assert said.exit_code == 0
    assert "2 changes make it 63 nodes" in said.output
    again = CliRunner().invoke(app, words)
    assert "File exists" in str(again.exception)
