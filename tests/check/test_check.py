"""`gnnserve check`: all mistakes at once, each with its file and key, and nothing left behind."""

import json
import os
import secrets
import shutil
import socket
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from bench.kit.servers import ROOT
from serve.access.tokens import Token, TokensFile, write_tokens
from serve.commands import check as checks
from serve.commands.check import check_config
from serve.server import trial
from serve.server.gpus import NoCuda, find_gpus
from tests.access.certs import Authority, needs_openssl
from tests.access.support import write_file
from tests.processes import is_running, wait_for

CODE = """
import torch


class Net(torch.nn.Module):
    def __init__(self, in_channels=4):
        super().__init__()
        self.linear = torch.nn.Linear(in_channels, 2)

    def forward(self, x, edge_index):
        return self.linear(x)
"""
MODEL = '[model]\nfactory = "./model.py:Net"\n'
#: A server of a trusted network.
REACHED = '[server]\ninsecure = true\nhost = "{}"'
_COMMAND_TIMEOUT_S = 600.0


def add_model(root, name, config=MODEL, code=CODE):
    folder = root / name
    (folder / "1").mkdir(parents=True)
    (folder / "config.toml").write_text(config)
    (folder / "model.py").write_text(code)
    weights = {"linear.weight": torch.zeros(2, 4), "linear.bias": torch.zeros(2)}
    save_file(weights, folder / "1" / "weights.safetensors")
    return folder


def nothing_told(step, fraction):
    """Nobody looks."""


# -- the mistakes: by name, what makes one of a good model, and what is to be told -----------------

MODEL_MISTAKES = {
    "callable": (
        {"config": MODEL.replace("Net", "Nett")},
        ("callable/config.toml", "model.factory './model.py:Nett'", "has no callable 'Nett'"),
    ),
    "package": (
        {"config": MODEL.replace("./model.py:Net", "nowhere.to.be:found")},
        ("package/config.toml", "model.factory", "No module named 'nowhere'"),
    ),
    "syntax": (
        {"code": CODE + "def:\n"},
        ("syntax/config.toml", "model.factory", "SyntaxError", "model.py, line 12"),
    ),
    "import": (
        {"code": "import torch_nowhere\n" + CODE},
        ("import/config.toml", "model.factory", "No module named 'torch_nowhere'"),
    ),
    "args": (
        {"config": MODEL + "[model.args]\nhiden = 3\n"},
        ("args/config.toml", "model.args", "unexpected keyword argument 'hiden'"),
    ),
    "width": (
        {"config": MODEL + "[model.args]\nin_channels = 5\n"},
        ("width/1/weights.safetensors", "'linear.weight' is torch.float32 [2, 4]", "[2, 5]"),
    ),
    "tuple": (
        {"code": CODE.replace("return self.linear(x)", "return x, x")},
        ("tuple/config.toml", "forward returned a tuple; it must be torch.float32 [rows, C]"),
    ),
    "exit": (
        {"code": "import os\nos._exit(3)\n"},
        ("exit/config.toml", "the process that loaded the model died"),
    ),
    "key": (
        {"config": '[model]\nfactroy = "./model.py:Net"\n'},
        ("key/config.toml", "'model.factroy'", "did you mean 'model.factory'?"),
    ),
    "inputs": (
        {"config": MODEL + '[model.args]\ninputs = ["x"]\n'},
        ("inputs/config.toml", "model.args.inputs", "write inputs above [model.args]"),
    ),
    "two": (
        {"config": MODEL + "num_features = 'many'\n[qso]\nfactor = 2\n"},
        ("two/config.toml", "model.num_features: Expected `int | null`, got `str`"),
    ),
}
FILE_MISTAKES = {
    "source": (
        lambda folder: (folder / "model.py").unlink(),
        ("source/config.toml", "model.factory", "source/model.py does not exist"),
    ),
    "truncated": (
        lambda folder: os.truncate(folder / "1" / "weights.safetensors", 150),
        ("truncated/1/weights.safetensors", "truncated"),
    ),
    "weights": (
        lambda folder: (folder / "1" / "weights.safetensors").unlink(),
        ("weights/1/weights.safetensors", "cannot be read"),
    ),
    "version": (
        lambda folder: (folder / "1").rename(folder / "v1"),
        ("version/v1", "a version folder is named by a positive integer"),
    ),
}
SERVER_MISTAKES = {
    "load": ("models.load: 'nope' is not in", "it holds: args, "),
    "host": ("server.host: 'nowhere.invalid' cannot be resolved",),
    "no encryption": ("server.host: 'nowhere.invalid' is reached by", "server.insecure = true"),
    "tokens": ("auth.tokens_file: ", "tokens.toml: token[0].hash and token[0].cert"),
    "server key": ("'server.max_qeue'", "did you mean 'server.max_queue'?"),
    "port 70000": ("server.grpc_port", "<= 65535"),
    "port as text": ("server.http_port", "Expected `int`, got `str`"),
    "budget as number": ("device.memory_budget", "got `int`"),
    "policy": ("scheduling.policy: 'lifo' is not one of", "fifo"),
    "database": ("report.database", "nowhere/report.db", "does not exist"),
    "journal": ("report.journal", "it is a folder"),
    "access log": ("report.access_log", "logs does not exist"),
    "graph": ("graph[0].file", "absent.npz: no such file"),
}
#: More keys of the server's file, with a value that cannot be, and the rule that is told.
KEY_MISTAKES = {
    "server.max_connections": (0, "Expected `int` >= 1"),
    "server.receive_timeout_s": (-1, "Expected `float` > 0.0"),
    "server.front": ("rust", "'rust' is not one of "),
    "server.shared_memory": ("yes", "'yes' is not one of auto, on, off"),
    "server.max_run_s": (0, "Expected `float` > 0.0"),
    "server.start_timeout_s": ("long", "Expected `float`, got `str`"),
    "server.reject_nonfinite": ("yes", "Expected `bool`, got `str`"),
    "server.max_message": ("lots", "'lots' is not a size"),
    "models.executor": ("fast", "'fast' is not one of "),
    "models.compile": (1, "Expected `bool`, got `int`"),
    "models.cache_limit": ("2 GoB", "'2 GoB' is not a size"),
    "models.calibration_s": (0, "Expected `float` > 0.0"),
    "device.lanes": (0, "Expected `int` >= 1"),
    "device.lane_niceness": (21, "Expected `int` <= 20"),
    "device.lane_network": ("maybe", "'maybe' is not one of off, on"),
    "device.max_lane_memory": ("some", "'some' is not a size"),
    "scheduling.qos_factor": (0.5, "Expected `float` >= 1.0"),
    "scheduling.window_ms": (0, "Expected `float` >= 0.001"),
    "scheduling.shed_late": ("no", "Expected `bool`, got `str`"),
    "report.keep": ("soon", "'soon' is not a duration"),
    "report.max_size": ("big", "'big' is not a size"),
    "report.access_log_share": (2, "Expected `float` <= 1.0"),
    "report.record_size": ("?", "'?' is not a size"),
    "log.format": ("xml", "'xml' is not one of auto, json, text"),
    "log.level": ("LOUD", "'LOUD' is not one of DEBUG, INFO, WARNING, ERROR"),
    "traces.share": (3, "Expected `float` <= 1.0"),
}
NO_CUDA = ("device.kind: 'cuda': ",)


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """What one check says of all the mistakes together, in a process of its own."""
    folder = tmp_path_factory.mktemp("mistakes")
    root = folder / "models"
    for name, (changed, _) in MODEL_MISTAKES.items():
        add_model(root, name, **changed)
    for name, (change, _) in FILE_MISTAKES.items():
        change(add_model(root, name))
    add_model(root, "good")
    (folder / "journal").mkdir()
    write_tokens(
        folder / "tokens.toml", TokensFile(token=(Token(principal="a", roles=("infer",)),))
    )
    names = [*MODEL_MISTAKES, *FILE_MISTAKES, "good", "nope"]
    (folder / "server.toml").write_text(f"""
        [server]
        host = "nowhere.invalid"
        max_qeue = 3
        grpc_port = 70000
        http_port = "8002"
        {lines_of("server")}
        [auth]
        tokens_file = "tokens.toml"
        [models]
        load = {names}
        cache = "cache"
        {lines_of("models")}
        [device]
        kind = "cuda"
        memory_budget = 3
        {lines_of("device")}
        [scheduling]
        policy = "lifo"
        {lines_of("scheduling")}
        [report]
        database = "nowhere/report.db"
        journal = "journal"
        access_log = "logs/access.jsonl"
        {lines_of("report")}
        [log]
        {lines_of("log")}
        [traces]
        {lines_of("traces")}
        [[graph]]
        name = "g"
        file = "absent.npz"
    """)
    script = (
        "import sys, json; from pathlib import Path\n"
        "from serve.commands.check import check_config\n"
        f"found = check_config(Path({str(folder / 'server.toml')!r}), lambda *_: None)\n"
        "told = [found.errors, found.fine, 'torch' in sys.modules]\n"
        "print(json.dumps(told), file=sys.stderr)"
    )
    errors, fine, has_torch = json.loads(python("-c", script).stderr.splitlines()[-1])
    return folder, errors, fine, has_torch


def python(*arguments, environment=None):
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env=os.environ | (environment or {}),
        capture_output=True,
        text=True,
        timeout=_COMMAND_TIMEOUT_S,
        check=False,
    )


def has_gpu():
    try:
        return bool(find_gpus())
    except NoCuda:
        return False


MISTAKES = {
    **{name: told for name, (_, told) in (MODEL_MISTAKES | FILE_MISTAKES).items()},
    **{name: ("server.toml: ", *told) for name, told in SERVER_MISTAKES.items()},
    **{key: (f"server.toml: {key}: ", told) for key, (_, told) in KEY_MISTAKES.items()},
    "two, the second": ("two/config.toml", "unknown key 'qso'; did you mean 'qos'?"),
}


def lines_of(section):
    """The lines of a section of the server's file with its mistakes."""
    return "\n".join(
        f"{key.partition('.')[2]} = {json.dumps(value)}"
        for key, (value, _) in KEY_MISTAKES.items()
        if key.startswith(f"{section}.")
    )


def test_there_are_fifty():
    assert len(MISTAKES) >= 50


@pytest.mark.parametrize("told", MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_is_told_with_its_file_and_key(found, told):
    folder, errors, _, _ = found
    fitting = [error for error in errors if all(part in error for part in told)]
    assert len(fitting) == 1, "\n".join(errors)
    assert str(folder) in fitting[0]


@pytest.mark.skipif(has_gpu(), reason="there is a GPU")
def test_a_device_that_is_not_there_is_told(found):
    _, errors, _, _ = found
    assert len([error for error in errors if "server.toml: device.kind: 'cuda': " in error]) == 1


def test_nothing_else_is_told_and_the_main_process_has_no_torch(found):
    _, errors, _, has_torch = found
    assert len(errors) == len(MISTAKES) + (not has_gpu())
    assert not has_torch


# -- good configurations ----------------------------------------------------------------------


@pytest.fixture
def config(tmp_path):
    """A good one of one good model."""
    add_model(tmp_path / "models", "good")
    path = tmp_path / "server.toml"
    path.write_text(
        '[server]\ngrpc_port = 0\nhttp_port = 0\n[models]\ncache = "cache"\n[device]\nkind = "cpu"'
    )
    return path


def test_a_good_one_passes_and_leaves_nothing(config):
    """Also when the model prints, which is no part of what is said."""
    model = config.parent / "models" / "good" / "model.py"
    model.write_text("print('one', flush=True)\n" + CODE)
    before = sorted(config.parent.rglob("*"))
    token = secrets.token_hex()
    command = ("-m", "serve", "check", "--config", str(config), "--json")
    done = python(*command, environment={"GNNSERVE_CHECKED_BY": token})
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert (told["errors"], told["warnings"]) == ([], [])
    assert told["fine"] == [f"model good version 1: {weights_of(config).stat().st_size} bytes"]
    assert "one" in done.stderr
    assert sorted(config.parent.rglob("*")) == before
    wait_for(lambda: not started_with(token), "the end of all processes")


def weights_of(config):
    return config.parent / "models" / "good" / "1" / "weights.safetensors"


def started_with(token):
    """Processes that have it in their environment."""
    found = []
    for environment in Path("/proc").glob("[0-9]*/environ"):
        try:
            if token.encode() in environment.read_bytes():
                found.append(environment.parent.name)
        except OSError:
            continue
    return found


def test_fast_reads_files_only(config, monkeypatch):
    (config.parent / "models" / "good" / "model.py").write_text("raise RuntimeError\n")
    config.write_text(config.read_text().replace("[server]", REACHED.format("nowhere.invalid")))
    monkeypatch.setattr(checks, "Trials", None)
    monkeypatch.setattr(checks.socket, "getaddrinfo", None)
    found = check_config(config, nothing_told, fast=True)
    assert found.errors == []
    weights_of(config).write_bytes(b"")
    assert len(check_config(config, nothing_told, fast=True).errors) == 1


def test_the_command_tells_errors_as_they_are_and_exits_with_2(config):
    """What looks like markup is text."""
    text = config.read_text()
    config = config.parent / "a[red]b[" / "c].toml"
    config.parent.mkdir()
    (config.parent / "models").mkdir()
    config.write_text(text + "\n[nowhere]\n[report]\ndatabase = 'no/[bold]x[/].db'")
    done = python("-m", "serve", "check", "--fast", "--config", str(config))
    assert (done.returncode, done.stdout) == (2, "")
    first, second, warning = done.stderr.splitlines()
    assert first.startswith(f"error: {config}: unknown key 'nowhere'; known: ")
    assert second.startswith(f"error: {config}: report.database: ")
    assert "no/[bold]x[/].db: its folder" in second
    assert warning == f"warning: {config}: models.repository: {config.parent}/models holds no model"


def test_one_mistake_of_all_versions_is_told_once(config):
    folder = config.parent / "models" / "good"
    shutil.copytree(folder / "1", folder / "2")
    (folder / "config.toml").write_text("")
    assert len(check_config(config, nothing_told, fast=True).errors) == 1


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda path: path.write_text("[server\n"), "not valid TOML"),
        (lambda path: path.unlink(), "No such file"),
    ],
)
def test_a_file_that_is_none_is_told(config, make, words):
    make(config)
    (error,) = check_config(config, nothing_told).errors
    assert str(config) in error
    assert words in error


def test_a_repository_that_is_none_is_told(config):
    config.write_text(config.read_text().replace("[models]", '[models]\nrepository = "nowhere"'))
    (error,) = check_config(config, nothing_told, fast=True).errors
    assert error.startswith(f"{config}: ")
    assert "nowhere: not a model repository (models.repository)" in error


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda path: path.mkdir(), "it is a folder"),
        (lambda path: os.mkfifo(path), "it is not a regular file"),
        (lambda path: path.write_bytes(b"not a database" * 99), "file is not a database"),
        (lambda path: path.write_bytes(b""), ""),
    ],
)
def test_a_database_that_cannot_be_used_is_told(config, make, words):
    make(config.parent / "gnnserve.db")
    errors = check_config(config, nothing_told, fast=True).errors
    assert len(errors) == bool(words)
    for error in errors:
        assert error.startswith(f"{config}: report.database: ")
        assert words in error


def test_weights_that_no_device_can_hold_are_told(config):
    config.write_text(config.read_text() + '\nmemory_budget = "150 B"\n')
    (error,) = check_config(config, nothing_told, fast=True).errors
    assert "device.memory_budget: the weights of all models take" in error


# -- addresses ------------------------------------------------------------------------------------


@pytest.fixture
def without_models(monkeypatch):
    monkeypatch.setattr(checks, "_failed_trials", lambda *_: iter(()))


def test_a_port_in_use_is_a_warning(config, without_models):
    """It may be that of the server which is to be started anew."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        config.write_text(config.read_text().replace("http_port = 0", f"http_port = {port}"))
        found = check_config(config, nothing_told)
    assert found.errors == []
    (warning,) = found.warnings
    assert f"server.http_port: cannot listen on 127.0.0.1:{port}: Address already" in warning
    assert check_config(config, nothing_told).warnings == []


def test_an_address_of_another_machine_is_told(config, without_models):
    config.write_text(config.read_text().replace("[server]", REACHED.format("192.0.2.1")))
    (error,) = check_config(config, nothing_told).errors
    assert error.startswith(f"{config}: server.host: cannot listen on 192.0.2.1:0: ")


@needs_openssl
def test_files_of_access_are_read(config, without_models):
    """Good ones give no finding, and each wrong one a finding with its key."""
    folder = config.parent
    authority = Authority(folder, "authority")
    certificate, key = authority.sign("server")
    _, other_key = authority.sign("other")
    good_key = shutil.copy(key, folder / "good.key")
    tokens = write_file(folder)
    config.write_text(
        f'{config.read_text()}\n[auth]\ntokens_file = "{tokens}"\n[server.tls]\n'
        f'certificate = "{certificate}"\nkey = "{key}"\nclient_ca = "{authority.certificate}"\n'
    )
    assert check_config(config, nothing_told).errors == []
    shutil.copy(other_key, key)
    authority.certificate.write_text("no authority")
    tokens.chmod(0o622)
    errors = check_config(config, nothing_told, fast=True).errors
    assert len(errors) == 2
    assert f"{config}: auth.tokens_file: {tokens}: its mode is 0622" in errors[0]
    assert "server.tls.certificate" in errors[1]
    assert "key values mismatch" in errors[1]
    shutil.copy(good_key, key)
    tokens.unlink()
    tokens_error, certificate_error = check_config(config, nothing_told, fast=True).errors
    assert f"auth.tokens_file: {tokens}: cannot be read: No such file" in tokens_error
    assert f"server.tls.client_ca: {authority.certificate}: " in certificate_error


def test_what_shares_out_graphs_is_read_without_a_file_of_servers(config, monkeypatch):
    """As for servers on Ray, which are given one."""
    folder = config.parent
    np.save(folder / "parts.npy", np.array([0, 1]))
    (folder / "graph").mkdir()
    rows = '[cluster.rows]\nlisten = "127.0.0.1:8005"\nkey_file = "rows.key"\n'
    graph = '[[graph]]\nname = "papers"\nfile = "graph"\nparts = "parts.npy"\n'
    config.write_text(f"{config.read_text()}\n{rows}{graph}")
    (error,) = check_config(config, nothing_told, fast=True).errors
    assert f"{folder / 'rows.key'}: cannot be read" in error
    (folder / "rows.key").write_text("0123456789abcdef")
    (folder / "rows.key").chmod(0o600)
    found = check_config(config, nothing_told, fast=True)
    assert found.errors == []
    assert any("servers_file is missing" in warning for warning in found.warnings)
    config.write_text(config.read_text().replace("key_file", "part = 2\nkey_file"))
    monkeypatch.setattr(checks, "find_spec", lambda _: None)
    no_zmq, no_part = check_config(config, nothing_told, fast=True).errors
    assert "pyzmq is not installed" in no_zmq
    assert "cluster.rows.part is 2, and graph 'papers' has parts 0 to 1" in no_part
    (folder / "parts.npy").write_bytes(b"none")
    assert (
        "parts.npy: not a readable array" in check_config(config, nothing_told, fast=True).errors[1]
    )


def test_a_name_that_nobody_answers_for_is_not_waited_for(config, without_models, monkeypatch):
    asked = threading.Event()
    monkeypatch.setattr(checks, "_RESOLVE_TIMEOUT_S", 0.1)

    def answer(*_, **__):
        asked.wait(60)
        raise OSError("too late")

    monkeypatch.setattr(checks.socket, "getaddrinfo", answer)
    (error,) = check_config(config, nothing_told).errors
    asked.set()
    assert "server.host: '127.0.0.1' cannot be resolved: no answer within" in error


# -- bounds ---------------------------------------------------------------------------------------


def test_a_model_that_never_ends_is_ended(config, monkeypatch):
    model = config.parent / "models" / "good" / "model.py"
    model.write_text(
        "import os, pathlib, signal, time\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "pathlib.Path(__file__).with_name('pid').write_text(str(os.getpid()))\n"
        "while True:\n    time.sleep(1)\n"
    )
    monkeypatch.setattr(trial, "_TRIAL_TIMEOUT_S", 4.0)
    (error,) = check_config(config, nothing_told).errors
    assert "good/config.toml: model good:1: " in error
    assert "within 4 s" in error
    pid = model.with_name("pid")
    if pid.exists():  # on a busy machine it may not have come so far
        wait_for(lambda: not is_running(int(pid.read_text())), "the end of the model's process")
