"""The configuration file: defaults, sizes, and what is said of a wrong one."""

import re
from pathlib import Path

import pytest

from serve.config import SIZE_KEYS, Config, load_config, read_config
from serve.config_settings import keys_of
from serve.errors import ConfigError
from serve.toml_tables import decode_table
from serve.units import parse_bytes


def load(folder: Path, text: str):
    path = folder / "server.toml"
    path.write_text(text)
    return load_config(path)


def _is_number(kind):
    return bool(re.search(r"\b(int|float)\b", str(kind))) and "tuple" not in str(kind)


def test_paths_start_at_the_file(tmp_path):
    config = load(tmp_path, '[scheduling]\npolicy = "fifo"\ndiscipline = "rolling"\n')
    assert config.path(config.models.repository) == tmp_path.resolve() / "models"
    assert config.path("/elsewhere/models") == Path("/elsewhere/models")


@pytest.mark.parametrize(
    ("variable", "folder"),
    [(None, "home/.cache"), ("", "home/.cache"), ("relative", "home/.cache"), ("{}/xdg", "xdg")],
)
def test_the_cache_is_in_the_users_cache_folder(tmp_path, monkeypatch, variable, folder):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    if variable is not None:
        monkeypatch.setenv("XDG_CACHE_HOME", variable.format(tmp_path))
    config = load(tmp_path, "")
    assert config.cache_path() == tmp_path.resolve() / folder / "gnnserve"
    assert load(tmp_path, '[models]\ncache = "c"').cache_path() == tmp_path.resolve() / "c"


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [("4 GiB", 4 << 30), ("512MB", 512_000_000), ("1.5 KiB", 1536), ("77", 77), ("2 tib", 2 << 40)],
)
def test_sizes(text, size_bytes):
    assert parse_bytes(text, "key") == size_bytes


@pytest.mark.parametrize("text", ["", "GiB", "4 QiB", "-1 MB", "0", "4 GiB please"])
def test_what_is_no_size_is_named(text):
    with pytest.raises(ConfigError, match=r"device\.memory_budget"):
        parse_bytes(text, "device.memory_budget")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[sheduling]", ["'sheduling'", "did you mean 'scheduling'"]),
        ("[server]\ngrpc_prot = 1", ["'server.grpc_prot'", "did you mean 'server.grpc_port'"]),
        ("[server]\nzzz = 1", ["'server.zzz'", "known: host"]),
        ("base = 1", ["unknown key 'base'"]),
        ("[server]\ngrpc_port = 70000", ["server.grpc_port", "<= 65535"]),
        ('[server]\ngrpc_port = "x"', ["server.grpc_port", "int"]),
        ("[server]\ngrpc_port = 5\nhttp_port = 5", ["both 5", "must differ"]),
        ('[server]\nmax_message = "lots"', ["server.max_message", "'lots'"]),
        ('[server]\nmax_message = "2 GiB"', ["server.max_message", "less than 2 GiB"]),
        (
            '[server]\nmax_receiving_of_connection = "1 MiB"',
            ["server.max_receiving_of_connection: '1 MiB' is less", "server.max_message '64 MiB'"],
        ),
        ('[device]\nkind = "tpu"', ["device.kind", "tpu"]),
        ('[device]\nmemory_budget = "0 GiB"', ["device.memory_budget"]),
        ('[device]\nmax_lane_memory = "some"', ["device.max_lane_memory", "'some'"]),
        ("[server]\nstop_timeout_s = 0", ["server.stop_timeout_s", "> 0"]),
        ("[device]\nlanes = 0", ["device.lanes", ">= 1"]),
        ('[models]\ncompile = "background"', ["models.compile", "`bool`"]),
        ('[scheduling]\npolicy = "best"', ["scheduling.policy", "'best'", "sqtf"]),
        (
            '[scheduling]\npolicy = "sqtf"\ndiscipline = "x"',
            ["scheduling.discipline", "barrier", "rolling"],
        ),
        ("[scheduling]\nqos_factor = 0.5", ["scheduling.qos_factor", ">= 1.0"]),
        ('[[graph]]\nname = "a"\nfle = "b"', ["'graph[0].fle'", "did you mean 'graph[0].file'"]),
        ('[[graph]]\nname = "a"', ["graph[0]", "file"]),
        ("graph = [1]", ["graph[0]", "object"]),
        ("server = 3", ["server", "object"]),
        ("[server\n", ["not valid TOML"]),
    ],
)
def test_what_is_wrong_is_named(tmp_path, text, words):
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, text)
    for word in ["server.toml", *words]:
        assert word in str(caught.value)


@pytest.mark.parametrize("key", sorted(SIZE_KEYS))
def test_no_size_is_accepted_that_is_none(tmp_path, key):
    section, name = key.split(".")
    workers = "workers = 1\n" if section == "training" else ""
    for text in ("some", "9" * 400, "9000000000 TiB"):
        with pytest.raises(ConfigError, match=re.escape(key)):
            load(tmp_path, f'[{section}]\n{workers}{name} = "{text}"')


@pytest.mark.parametrize("key", [key for key, kind in keys_of(Config) if _is_number(kind)])
def test_no_number_is_accepted_that_nothing_can_wait_for_or_hold(tmp_path, key):
    section, _, name = key.rpartition(".")
    for text in ("inf", "nan", "1e300", f"{1 << 64}"):
        with pytest.raises(ConfigError, match=re.escape(key)):
            load(tmp_path, f"[{section}]\n{name} = {text}")


def test_a_fixed_window_has_a_length(tmp_path):
    with pytest.raises(ConfigError, match=r"scheduling\.window_ms"):
        load(tmp_path, "[scheduling]\nwindow_ms = 1e-9")


def test_a_graph_named_twice(tmp_path):
    row = '[[graph]]\nname = "a"\nfile = "b"\n'
    scheduling = '[scheduling]\npolicy = "fifo"\ndiscipline = "rolling"\n'
    with pytest.raises(ConfigError, match="'a' is given more than once"):
        load(tmp_path, scheduling + row + row)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"absent\.toml.*No such file"):
        load_config(tmp_path / "absent.toml")


@pytest.mark.parametrize(
    ("table", "offered"),
    [
        ({}, True),
        ({"host": "::1"}, True),
        ({"host": "localhost"}, True),
        ({"host": "0.0.0.0", "insecure": True}, False),
        ({"host": "some.name"}, False),
        ({"host": "0.0.0.0", "shared_memory": "on"}, True),
        ({"shared_memory": "off"}, False),
    ],
)
def test_shared_memory_is_for_clients_of_this_host(table, offered):
    config = decode_table({"server": table}, Config, "here")
    assert config.server.offers_shared_memory is offered


def test_all_that_is_wrong_is_told_and_the_rest_is_kept(tmp_path):
    path = tmp_path / "server.toml"
    path.write_text("""
        [server]
        grpc_prot = 1
        http_port = 70000
        host = "::1"
        [models]
        load = ["a", 3]
        [device]
        memory_budget = "much"
        lanes = "many"
        [scheduling]
        policy = "lifo"
        [nowhere]
        [[graph]]
        name = "a"
        fle = "b"
        [[graph]]
        name = "good"
        file = "c"
    """)
    config, problems = read_config(path)
    keys = ("server.grpc_prot", "server.http_port", "models.load[1]", "device.lanes", "nowhere",
            "graph[0].fle", "scheduling.policy", "device.memory_budget")  # fmt: skip
    for key, problem in zip(keys, problems, strict=True):
        assert problem.startswith(f"{path}: ")
        assert key in problem
    assert config.server.host == "::1"
    assert (config.server.grpc_port, config.server.http_port) == (8001, 8002)
    assert [graph.name for graph in config.graph] == ["good"]
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    assert str(caught.value) == "\n".join(problems)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda path: path.symlink_to("/dev/zero"), "it is a device"),
        (lambda path: path.mkdir(), "it is a folder"),
        (lambda path: path.write_text("a = " + "[" * 100_000), "nested too deep"),
        (lambda path: path.write_text("a" + ".a" * 100_000 + " = 1"), "more than 200 parts"),
        (lambda path: path.write_text(f"a = {'9' * 5000}"), "not valid TOML"),
        (lambda path: path.write_text("#" * 2_000_000), "more than 1048576 bytes"),
    ],
)
def test_a_strange_file_is_told_and_not_waited_for(tmp_path, make, words):
    path = tmp_path / "server.toml"
    make(path)
    with pytest.raises(ConfigError, match=words):
        load_config(path)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('host = "0.0.0.0"', "server.insecure = true"),
        ('host = "some.name"', "'some.name' is reached by other machines"),
        ('host = "::1"\n[server.tls]\nkey = "k"', "go together"),
        ('[server.tls]\nclient_ca = "c"', "server.tls.client_ca: it needs"),
        ('[server.tls]\ncertifcate = "c"', "did you mean 'server.tls.certificate'"),
    ],
)
def test_encryption_is_asked_for_as_a_whole(tmp_path, text, words):
    with pytest.raises(ConfigError, match=re.escape(words)):
        load(tmp_path, f"[server]\n{text}\n")


@pytest.mark.parametrize(
    "text",
    [
        'host = "0.0.0.0"\ninsecure = true',
        'host = "0.0.0.0"\n[server.tls]\ncertificate = "c"\nkey = "k"',
        'host = "127.0.0.7"',
    ],
)
def test_who_encrypts_or_says_not_to_may_listen_anywhere(tmp_path, text):
    load(tmp_path, f"[server]\n{text}\n")
