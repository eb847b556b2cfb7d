"""Whether machines have the memory for servers is known before one is started."""

import re

import msgspec
import numpy as np
import pytest

from bench.kit.result import ROOT
from serve.cluster.replica import require_reachable
from serve.cluster.seating import parts_of, unseatable
from serve.cluster.server_need import HOST_BYTES, ServerNeed, server_need, unplaceable
from serve.commands.cluster import parts_of_local, pool_of
from serve.config import load_config
from serve.config_settings import settings_of
from serve.errors import ConfigError
from serve.graphs.datasets import TABLE_4
from tests.cluster.pools import POOL

GIB = 1 << 30
NEED = ServerNeed(weights_bytes=GIB, graphs_bytes=2 * GIB, budget_bytes=6 * GIB)


def test_servers_are_placed_where_all_that_they_take_fits():
    assert NEED.total_bytes == 7 * GIB
    assert unplaceable(NEED, 2, {"a": 7 * GIB, "b": 8 * GIB, "c": GIB}) is None


@pytest.mark.parametrize(
    ("machines", "words"),
    [
        (
            {"a": 6 * GIB, "b": 5 * GIB},
            "needs 7 GiB of memory: 6 GiB for .*; the largest of 2 machines has 6 GiB",
        ),
        ({"a": 7 * GIB, "b": 5 * GIB}, "1 of 2 machines have that, 2 are asked for"),
        ({}, "the largest of 0 machines has 0 B"),
    ],
)
def test_why_they_cannot_be_placed_is_told_with_both_numbers(machines, words):
    assert re.search(words, unplaceable(NEED, 2, machines))


def test_weights_and_graphs_beyond_the_budget_fit_nowhere():
    need = ServerNeed(3 * GIB, 2 * GIB, 4 * GIB)
    said = unplaceable(need, 1, {"a": 100 * GIB})
    assert "take 3 GiB and its graphs 2 GiB, more than the 4 GiB of device.memory_budget" in said


def test_graphs_of_servers_on_gpus_are_in_the_memory_of_the_machine():
    need = ServerNeed(3 * GIB, 2 * GIB, 4 * GIB, on_gpus=True)
    assert need.total_bytes == 2 * GIB + HOST_BYTES
    assert unplaceable(need, 1, {"a": 3 * GIB}) is None
    assert "3 GiB of memory: 2 GiB for graphs" in unplaceable(need, 1, {"a": GIB})
    heavy = ServerNeed(5 * GIB, 0, 4 * GIB, on_gpus=True)
    assert "take 5 GiB, more than the 4 GiB" in unplaceable(heavy, 1, {"a": 100 * GIB})


def config(tmp_path, text):
    path = tmp_path / "gnnserve.toml"
    path.write_text(f'models.repository = "{ROOT / "configs" / "models"}"\n{text}')
    return load_config(path)


def test_what_a_server_takes_follows_from_its_configuration(tmp_path):
    (tmp_path / "graph").mkdir()
    (tmp_path / "graph" / "x.npy").write_bytes(bytes(1000))
    found = server_need(
        config(
            tmp_path,
            'device.memory_budget = "1 GiB"\n'
            '[[graph]]\nname = "own"\nfile = "graph"\n'
            '[[graph]]\nname = "made"\ndataset = "pubmed"\n',
        ),
        on_gpus=False,
    )
    pubmed = TABLE_4["pubmed"]
    features = pubmed.num_nodes * pubmed.num_features * 4
    assert found.graphs_bytes == 1000 + features + pubmed.num_edges * 8
    assert found.weights_bytes > 0
    assert found.total_bytes == GIB + HOST_BYTES
    assert found.held_bytes == found.weights_bytes + found.graphs_bytes


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "device.memory_budget: servers are placed by the memory"),
        (
            'device.memory_budget = "1 GiB"\n[[graph]]\nname = "own"\nfile = "none"\n',
            "graph.file: .*none: No such file",
        ),
    ],
)
def test_a_need_that_is_not_known_is_refused(tmp_path, text, words):
    with pytest.raises(ConfigError, match=words):
        server_need(config(tmp_path, text), on_gpus=False)


def test_servers_that_others_would_not_reach_are_refused(tmp_path):
    found = config(tmp_path, "")
    require_reachable(found, "127.0.0.1")
    with pytest.raises(ConfigError, match=r"and the machine is 10\.0\.0\.7 to others"):
        require_reachable(found, "10.0.0.7")


def test_a_server_takes_the_features_of_its_part_and_those_that_are_everywhere(tmp_path):
    (tmp_path / "papers").mkdir()
    (tmp_path / "papers" / "x.npy").write_bytes(bytes(1000))
    # Ten edges into node 0, the only one of its part, and one into node 4.
    edges = np.array([[0] * 8 + [0, 2, 0], [0] * 10 + [4]])
    np.save(tmp_path / "papers" / "edge_index.npy", edges)
    whole_bytes = (tmp_path / "papers" / "edge_index.npy").stat().st_size
    np.save(tmp_path / "parts.npy", np.array([0, 1, 1, 1, 2]))
    text = SHARED.format(ROOT / "configs" / "models").replace("papers.npz", "papers")
    (tmp_path / "gnnserve.toml").write_text(text + "hot_share = 0.1\n")
    found = load_config(tmp_path / "gnnserve.toml")
    assert parts_of(found) == 3
    assert server_need(found, on_gpus=False).graphs_bytes == whole_bytes + 700
    (tmp_path / "gnnserve.toml").write_text(text + 'hot_share = 0.1\nshare = "all"\n')
    with_edges = load_config(tmp_path / "gnnserve.toml")
    # Less what the server of node 0 has not: a part of three of the five nodes has no edge at all.
    edges_bytes = whole_bytes - int(1 / 11 * whole_bytes)
    assert server_need(with_edges, on_gpus=False).graphs_bytes == edges_bytes + 700
    np.save(tmp_path / "papers" / "edge_index.npy", np.zeros(8, np.int64))
    with pytest.raises(
        ConfigError, match=r"edge_index': integers \[2, E\] wanted, got int64 \[8\]"
    ):
        server_need(with_edges, on_gpus=False)
    of_dataset = text.replace('file = "papers"', 'dataset = "pubmed"') + 'share = "all"\n'
    (tmp_path / "gnnserve.toml").write_text(of_dataset)
    pubmed = TABLE_4["pubmed"]
    whole = pubmed.num_nodes * pubmed.num_features * 4 + pubmed.num_edges * 8
    made = load_config(tmp_path / "gnnserve.toml")
    assert server_need(made, on_gpus=False).graphs_bytes == int(whole * 0.6)
    assert parts_of(config(tmp_path, "")) == 0


def test_graphs_with_different_numbers_of_parts_are_refused_before_a_start(tmp_path):
    for name, parts in (("parts", [0, 1, 2]), ("two", [0, 1]), ("other", [2, 1, 0])):
        np.save(tmp_path / f"{name}.npy", np.array(parts))
    text = SHARED + '[[graph]]\nname = "more"\nfile = "more.npz"\nparts = "{}.npy"\n'
    path = tmp_path / "gnnserve.toml"
    path.write_text(text.format(ROOT / "configs" / "models", "other"))
    assert parts_of(load_config(path)) == 3
    path.write_text(text.format(ROOT / "configs" / "models", "two"))
    with pytest.raises(ConfigError, match="number of parts: 'papers' has 3, 'more' has 2"):
        parts_of(load_config(path))


def test_servers_whose_features_others_would_not_reach_are_refused(tmp_path):
    found = config(tmp_path, '''
        server = { host = "0.0.0.0", insecure = true }
        [cluster.rows]
        listen = "127.0.0.1:8005"
        [[graph]]
        name = "papers"
        file = "papers"
        parts = "parts.npy"
    ''')  # fmt: skip
    require_reachable(found, "127.0.0.1")
    with pytest.raises(ConfigError, match=r"cluster\.rows\.listen: '127\.0\.0\.1' is reached by"):
        require_reachable(found, "10.0.0.7")


@pytest.mark.parametrize(
    ("pool", "before", "words"),
    [
        ({"parts": 2, "replicas": 2}, None, None),
        ({"parts": 2, "replicas": 5}, {"parts": 2, "replicas": 2}, None),
        ({"replicas": 1}, {"replicas": 3}, None),
        ({"parts": 3, "replicas": 2}, None, "2: graphs are shared out in 3 parts, and each needs"),
        (
            {"parts": 2, "replicas": 2, "least": 2, "most": 4},
            None,
            "2..4: servers of .* not follow",
        ),
        ({"parts": 2, "replicas": 2}, {"parts": 2, "replicas": 3}, "there are 3 servers, and the"),
        ({"parts": 2, "replicas": 3}, {"parts": 3, "replicas": 3}, "in 2 parts and in 3 before"),
        ({"replicas": 3}, {"parts": 2, "replicas": 3}, "in no parts and in 2 before"),
    ],
)
def test_clusters_in_which_a_part_may_have_no_server_are_refused(pool, before, words):
    before = before and msgspec.structs.replace(POOL, **before)
    told = unseatable(msgspec.structs.replace(POOL, **pool), before)
    assert told is None if words is None else re.search(words, told)


def test_each_server_of_this_machine_takes_a_line_of_the_parts(tmp_path):
    path = tmp_path / "gnnserve.toml"
    path.write_text(SHARED.format(ROOT / "configs" / "models"))
    (tmp_path / "stores").write_text("127.0.0.1:8005 0\n127.0.0.1:8006 1\n")

    def parts(count):
        pool = pool_of("one", path, [], str(count), "127.0.0.1", 8000, 1.0, 0.0, "1h")
        return parts_of_local(pool)

    # Whatever the file says of one server's address, each has its own.
    path.write_text(
        path.read_text().replace("servers_file", 'address = "10.0.0.1:1"\nservers_file')
    )
    for number, settings in enumerate(parts(2)):
        rows = load_config(path, settings_of({}, settings)).cluster.rows
        own = f"127.0.0.1:{8005 + number}"
        assert (rows.listen, rows.address, rows.part) == (own, own, number)
    with pytest.raises(ConfigError, match=r"--local 3: .* names 2 servers"):
        parts(3)
    path.write_text(path.read_text().replace("servers_file", "# servers_file"))
    with pytest.raises(ConfigError, match=r"--local 3: cluster\.rows\.servers_file is missing"):
        parts(3)
    path.write_text("")
    assert parts(3) == [()] * 3


SHARED = """
models.repository = "{}"
device.memory_budget = "1 GiB"
[cluster.rows]
listen = "127.0.0.1:8005"
servers_file = "stores"
[[graph]]
name = "papers"
file = "papers.npz"
parts = "parts.npy"
"""
